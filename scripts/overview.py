"""Show all normalizers at a glance: four numbers for each arm, and tiers by what the seeds support."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from committed_results import markdown_table
from loss_results import LossResults
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from page_pictures import styled_figure, svg_bytes
from recall_results import RecallResults

from lm.report.pictures import COLOURS
from lm.statistics.verdicts import Verdict

TIER_TITLES = (
    "better in a column or more, worse in none",
    "better in one column, worse in another",
    "neither shown to be better nor worse",
    "worse in a column or more, better in none",
)
# fill of a cell by the kind of its verdict; equivalence is grey, an undecided cell is empty
VERDICT_COLOURS = {
    "better": COLOURS[0],
    "worse": COLOURS[1],
    "no difference above margin": "0.8",
    "difference below margin": "0.8",
}


@dataclass(frozen=True)
class Overview:
    """The overview makes the table and the picture of all arms of an experiment on text, with recall of the same arms.

    Attributes:
        short_loss_results: losses at the training length, whose verdicts are one family.
        long_loss_results: losses beyond the training length.
        recall_results: accuracies of the same arms.
        long_column: the column of `long_loss_results` that is shown.
        docs_page: page of docs/ that holds the table.
        table_name: name of the table in the page, and of the picture's file in docs/.
    """

    short_loss_results: LossResults
    long_loss_results: LossResults
    recall_results: RecallResults
    long_column: str
    docs_page: str
    table_name: str = "overview-arms"

    @cached_property
    def baseline(self) -> str:
        """Return the arm that all others are compared with."""
        return self.recall_results.baseline

    @cached_property
    def headings(self) -> list[str]:
        """Return the headings of the four numbers."""
        length = self.long_loss_results.columns[self.long_column].x
        return [
            f"loss at {self.long_loss_results.train_length:,} tokens",
            f"loss at {length:,} tokens",
            f"recall at {self.recall_results.decisive_lengths[0]:,}",
            "step time",
        ]

    def verdicts(self, arm: str) -> list[Verdict]:
        """Return three verdicts on an arm: loss at the training length, loss beyond it, and recall."""
        rate, length = self.recall_results.learning_rates(arm)[0], self.recall_results.decisive_lengths[0]
        return [
            self.short_loss_results.verdicts[arm, self.baseline, self.short_loss_results.decisive_columns[0]],
            self.long_loss_results.verdicts[arm, self.baseline, self.long_column],
            self.recall_results.verdicts[arm, rate, length],
        ]

    def number_cells(self, arm: str) -> list[str]:
        """Return the four numbers of an arm as text."""
        losses = [
            next(iter(results.values_by_rate(arm, column).values())).mean()
            for results, column in (
                (self.short_loss_results, self.short_loss_results.decisive_columns[0]),
                (self.long_loss_results, self.long_column),
            )
        ]
        recall = self.recall_results.accuracies[
            arm, self.recall_results.learning_rates(arm)[0], self.recall_results.decisive_lengths[0]
        ].mean()
        ratio = (
            "1"
            if arm == self.baseline
            else next(iter(self.long_loss_results.cost_cells_by_heading.values()))[arm].partition(" ")[0]
        )
        return [*(f"{loss:.3f}" for loss in losses), f"{100 * recall:.0f} %", f"x {ratio}"]

    @cached_property
    def arms_by_tier(self) -> Mapping[str, list[str]]:
        """Return the arms of each tier (`TIER_TITLES`), sorted by their loss beyond the training length. A tier holds
        the arms with verdicts `better`, `worse`, both or neither."""
        tiers: dict[str, list[str]] = {title: [] for title in TIER_TITLES}
        for arm in self.long_loss_results.row_names:
            if arm != self.baseline:
                kinds = {verdict.kind for verdict in self.verdicts(arm)}
                better, worse = "better" in kinds, "worse" in kinds
                tiers[TIER_TITLES[(1 if worse else 0) if better else (3 if worse else 2)]].append(arm)
        return tiers

    def tables(self) -> dict[str, str]:
        """Return the tables of the page in Markdown, by name. In the first a word in italics says that a number is
        better or worse; the second has the differences at the training length.
        """
        lines = [
            ["", *self.headings, "tier"],
            [self.long_loss_results.labels[self.baseline], *self.number_cells(self.baseline), "baseline"],
        ]
        for tier, arms in self.arms_by_tier.items():
            for arm in arms:
                words = [verdict.kind if verdict.kind in ("better", "worse") else "" for verdict in self.verdicts(arm)]
                *judged, time = self.number_cells(arm)
                judged = [f"{cell} *{word}*" if word else cell for cell, word in zip(judged, words, strict=True)]
                lines.append([self.long_loss_results.labels[arm], *judged, time, tier])
        verdicts_at_training_length = self.short_loss_results.verdict_table()
        return {self.table_name: markdown_table(lines), f"{self.table_name} verdicts": verdicts_at_training_length}

    def draw_picture(self) -> bytes:
        """Return the picture: a row for each arm, by tiers. The colour of a number shows its verdict."""
        n_rows = 3 + len(self.long_loss_results.row_names) + 1.4 * sum(map(bool, self.arms_by_tier.values()))
        with styled_figure(1, 1, (5.2, 0.215 * n_rows + 0.5)) as (figure, axes):  # legible on a telephone, too
            axes.set_xlim(-2.3, len(self.headings))
            axes.set_ylim(n_rows, 0)
            axes.axis("off")
            for number, head in enumerate(self.headings):
                axes.text(
                    number + 0.5,
                    0.9,
                    head.replace(" at ", "\nat ").replace("step ", "step\n").removesuffix(" tokens"),
                    ha="center",
                    va="center",
                )
            row = 2.2
            row = self._draw_row(axes, row, self.baseline, {})
            for tier, arms in self.arms_by_tier.items():
                if arms:
                    axes.text(-2.3, row + 0.85, tier, va="center", color="0.35", style="normal")
                    axes.axhline(row + 0.15, color="0.7", linewidth=0.6)
                    row += 1.4
                for arm in arms:
                    row = self._draw_row(axes, row, arm, dict(enumerate(self.verdicts(arm))))
            entries = [
                (VERDICT_COLOURS["better"], "better than softmax"),
                (VERDICT_COLOURS["worse"], "worse"),
                ("0.8", "no difference above the margin"),
            ]
            handles = [Rectangle((0, 0), 1, 1, color=colour, alpha=0.55, linewidth=0) for colour, _ in entries]
            figure.legend(
                handles,
                [words for _, words in entries],
                loc="outside lower center",
                ncols=3,
                frameon=False,
                columnspacing=1,
                handlelength=1.2,
            )
            return svg_bytes(figure)

    def _draw_row(self, axes: Axes, row: float, arm: str, verdicts: Mapping[int, Verdict]) -> float:
        """Draw an arm's row at the height `row`, and return the height of the next row. `verdicts`: verdicts on the
        arm's numbers, by the index of the number."""
        axes.text(-2.2, row + 0.5, self.long_loss_results.labels[arm], va="center")
        for number, cell in enumerate(self.number_cells(arm)):
            if fill := VERDICT_COLOURS.get(verdicts[number].kind) if number in verdicts else None:
                axes.add_patch(Rectangle((number + 0.08, row + 0.06), 0.84, 0.88, color=fill, alpha=0.55, linewidth=0))
            axes.text(number + 0.5, row + 0.5, cell, ha="center", va="center")
        return row + 1
