"""Make the tables, pictures and verdicts in docs/ of experiments on text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from committed_results import (
    ARM_COLOUR_NUMBERS,
    RESULTS_FOLDER,
    ExperimentResults,
    TrainingFraction,
    compare_at_best_rates,
    final_run_lines,
    markdown_table,
    rate_text,
    trend_table,
)
from page_pictures import styled_figure, svg_bytes

from lm.report.pictures import COLOURS
from lm.statistics.intervals import estimate_over_seeds
from lm.statistics.verdicts import Comparison, Verdict, judge_comparisons

SECOND_BASELINE_TIMING = "the baseline again"  # the second timing of the baseline in costs.csv, which shows the noise
# inference settings in which sequences beyond the training length are measured
LONG_CONTEXT_SETTINGS = ("as trained", "theta x 50")

RowAndBaseline = tuple[str, str]  # names of a table row and of the row that it is compared with


class TableColumn(NamedTuple):
    """A column of the table shows a metric under an inference setting, at `x`, a length or a position in tokens.

    With `arm_suffix`, each row shows a variant of its arm here: the arm whose name is the row's arm followed by the
    suffix. A row without such a variant shows its own arm. `x` is 0 if the metric has none.
    """

    arm_suffix: str
    metric: str
    setting: str
    x: int


@dataclass(frozen=True)
class LossResults(ExperimentResults):
    """This class shows results of an experiment on text: each arm's mean loss in nats, or accuracy, by setting.

    A setting here is what a column of the table shows: a metric under an inference setting at a length.

    Attributes:
        labels: words for the rows of the table, by their names. A row's name begins with the name of its arm. After a
            comma stands what an inference setting changes of the normalizer, such as `ssmax, n=fixed:753`.
        compared_pairs: the rows that are compared, each with its baseline.
        columns: the table's columns, by heading.
        decisive_columns: the columns that are compared; all verdicts are one family, whose intervals hold together.
        tuning_column: the column whose loss chose the learning rates. A verdict in another column must hold at every
            rate.
        matters: smallest difference of interest, in nats; a fraction if the metric is an accuracy.
        shown_size: the model size or corpus whose runs are shown; empty if there is only one.
        picture_rows: for each row of the picture, by its title, the pairs whose differences it shows by position. A row
            has one panel for each setting.
        train_length: training length, in tokens.
        training_fractions_by_trend: for each trend its arms, each with a fraction of training (0 to 1), such as the
            time of its swap. A line is fitted through each seed's runs.
        shows_token_counts: whether there is a table of the training tokens that each arm needs to reach a common loss
            (`tokens_to_common_loss_table`).
        table_suffix: end of the name of its tables, where the experiment's accuracies have tables, too.
        is_accuracy: whether the metric is an accuracy, shown in per cent, of which higher values are better.
        ranks_arms: whether rows are sorted by their losses in the setting that rates were tuned on, and drawn in a
            picture.
        extra_columns: further columns, such as results of another experiment. By heading, each is a function from a
            row's name to the words of its cell.
        draws_intervals: whether the verdicts' differences and intervals are drawn.
        change_from_tuning_columns: columns whose change from `tuning_column` is compared between pairs, as one family
            of its own.
    """

    compared_pairs: tuple[RowAndBaseline, ...]
    columns: Mapping[str, TableColumn]
    decisive_columns: tuple[str, ...] = LONG_CONTEXT_SETTINGS
    tuning_column: str = "theta x 50"
    matters: float = 0.02
    shown_size: str = ""
    picture_rows: Mapping[str, tuple[RowAndBaseline, ...]] = field(default_factory=dict)
    train_length: int = 256
    training_fractions_by_trend: Mapping[str, Mapping[str, TrainingFraction]] = field(default_factory=dict)
    shows_token_counts: bool = False
    table_suffix: str = ""
    is_accuracy: bool = False
    ranks_arms: bool = False
    extra_columns: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    change_from_tuning_columns: tuple[str, ...] = ()
    draws_intervals: bool = False

    @property
    def table_name(self) -> str:
        """Return the name of the tables in the page, which is also that of the picture's file in docs/."""
        return "-".join(filter(None, (self.name, self.shown_size, self.table_suffix)))

    @property
    def display_scale(self) -> tuple[float, int]:
        """Return the factor by which values are multiplied for display, and the number of decimal places."""
        return (100, 1) if self.is_accuracy else (1, 3)

    @cached_property
    def final_runs(self) -> pd.DataFrame:
        """Return the lines of seeds.csv that belong to the final runs of the shown size or corpus."""
        data = final_run_lines(self.name)
        return data[data["size"] == self.shown_size] if self.shown_size else data

    @cached_property
    def row_names(self) -> list[str]:
        """Return the names of the table's rows, in their order."""
        if not self.ranks_arms:
            return [*self.labels]
        best = {
            row_name: next(iter(self.values_by_rate(row_name, self.tuning_column).values())).mean()
            for row_name in self.labels
        }
        return sorted(self.labels, key=best.__getitem__)

    def values_by_rate(self, row_name: str, column: str) -> dict[float, np.ndarray]:
        """Return the losses (seeds,) of a row in the setting `column` by learning rate.

        The rate that is best in the column `tuning_column` comes first.
        """
        tuned = self._losses_of_row(row_name, self.tuning_column)
        runs = self._losses_of_row(row_name, column)
        return {rate: runs[rate] for rate in sorted(runs, key=lambda rate: tuned[rate].mean())}

    def _losses_of_row(self, row_name: str, column: str) -> dict[float, np.ndarray]:
        """Return the losses (seeds,) of a row in the setting `column` by learning rate. Return {} if another metric
        than a loss or an accuracy was not measured.

        Raises LookupError: a loss or an accuracy was not measured.
        """
        end, metric, base_setting, x = self.columns[column]
        arm, setting = _arm_and_full_setting(row_name, base_setting)
        is_arm = any(name == arm + end for name, *_ in self._losses)
        place = arm + end if is_arm else arm, metric, setting, x
        if place not in self._losses and metric.endswith(("loss", "accuracy")):
            raise LookupError(
                f"results/{self.name}: no {metric} of {place[0]} in the setting {setting or 'without a name'} at {x}"
            )
        return self._losses.get(place, {})

    @cached_property
    def _losses(self) -> dict[tuple[str, str, str, int], dict[float, np.ndarray]]:
        """Return the losses (seeds,) of the columns' metrics, by (arm, metric, inference setting, length or position)
        and by learning rate.
        """
        data = self.final_runs[
            self.final_runs.metric.isin({column.metric for column in self.columns.values()})
        ].sort_values("seed")
        losses: dict[tuple[str, str, str, int], dict[float, np.ndarray]] = {}
        for (*place, rate), runs in data.groupby(["arm", "metric", "setting", "x", "rate"]):
            losses.setdefault(tuple(place), {})[rate] = runs.value.to_numpy()
        return losses

    @cached_property
    def verdicts(self) -> dict[tuple[str, str, str], Verdict]:
        """Return the verdicts by row, baseline and setting. They are one family: their intervals hold together."""
        comparisons = {
            (*pair, column): compare_at_best_rates(
                *(self.values_by_rate(row_name, column) for row_name in pair),
                higher_is_better=self.is_accuracy,
                other_values_chose_rates=column != self.tuning_column,
            )
            for pair, column in product(self.compared_pairs, self.decisive_columns)
        }
        return judge_comparisons(comparisons, self.matters)

    def arm_and_baseline_names(self, verdict_key: tuple[str, str, str]) -> tuple[str, str]:
        """Return the names of the row and of the baseline that a verdict's key names."""
        return verdict_key[:2]

    def tables(self) -> dict[str, str]:
        """Return the Markdown tables of the page, by name."""
        tables = {self.table_name: self.table()}
        if self.decisive_columns:
            tables[f"{self.table_name} verdicts"] = self.verdict_table()
        if self.training_fractions_by_trend:
            tables[f"{self.table_name} trends"] = self.trend_table()
        if self.change_from_tuning_columns:
            tables[f"{self.table_name} transfers"] = self.change_from_tuning_table()
        if self.shows_token_counts:
            tables[f"{self.table_name} tokens"] = self.tokens_to_common_loss_table()
        return tables

    def table(self) -> str:
        """Return the table of mean losses in Markdown: each row in each setting, at its best rate, with the seeds'
        standard deviation.
        """
        lines = [["", "learning rate", *self.columns, *self.extra_columns, *self.cost_cells_by_heading]]
        for row_name in self.row_names:
            cells = [next(iter(self.values_by_rate(row_name, column).values()), None) for column in self.columns]
            rate = rate_text(next(iter(self.values_by_rate(row_name, self.tuning_column))))
            factor, digits = self.display_scale
            words = [
                "" if x is None else f"{factor * x.mean():.{digits}f} ({factor * x.std(ddof=1):.{digits}f})"
                for x in cells
            ]
            words += [
                *(cell(row_name) for cell in self.extra_columns.values()),
                *(cells[row_name] for cells in self.cost_cells_by_heading.values()),
            ]
            lines.append([self.labels[row_name], rate, *words])
        return markdown_table(lines)

    @cached_property
    def cost_cells_by_heading(self) -> dict[str, dict[str, str]]:
        """Return words for the costs of a training step, by heading and row; {} if results/NAME/costs.csv is missing.

        Steps are paired by round. Ratios are geometric means with a 95 % interval over rounds. The baseline's ratio
        compares its two timings.
        """
        path, (baseline, *_) = RESULTS_FOLDER / self.name / "costs.csv", self.labels
        if not path.exists():
            return {}
        values = pd.read_csv(path).pivot(index="round", columns=["metric", "arm"], values="value")
        logs, memory = np.log(values["seconds"]), values["bytes"].loc[0] / 2**20
        arms = {row_name: row_name.partition(", ")[0] for row_name in self.labels}
        sides = {row_name: SECOND_BASELINE_TIMING if row_name == baseline else arm for row_name, arm in arms.items()}
        ratios = {
            row_name: np.exp(estimate_over_seeds((logs[side] - logs[baseline]).to_numpy()).interval().as_list())
            for row_name, side in sides.items()
        }
        return {
            f"step time / {self.labels[baseline]}'s": {
                row_name: "{:.2f} [{:.2f}, {:.2f}]".format(*ratio) for row_name, ratio in ratios.items()
            },
            "tensors, MiB": {row_name: f"{memory[arm]:.0f}" for row_name, arm in arms.items()},
        }

    def verdict_table(self) -> str:
        """Return a Markdown table of the differences in the decisive settings, with their verdicts."""
        lines = [["", "minus", *self.decisive_columns]]
        for row_name, baseline in (
            sorted(self.compared_pairs, key=lambda pair: self.row_names.index(pair[0]))
            if self.ranks_arms
            else self.compared_pairs
        ):
            cells = [self.verdict_text(self.verdicts[row_name, baseline, column]) for column in self.decisive_columns]
            lines.append([self.labels[row_name], self.labels[baseline], *cells])
        return markdown_table(lines)

    def change_from_tuning_table(self) -> str:
        """Return a Markdown table of how the loss changes from the column `tuning_column`, a row's change minus its
        baseline's.
        """

        def change(row_name: str, column: str) -> np.ndarray:
            before, after = (self.values_by_rate(row_name, place) for place in (self.tuning_column, column))
            return after[next(iter(after))] - before[next(iter(before))]

        comparisons = {
            (*pair, column): Comparison(change(pair[0], column) - change(pair[1], column))
            for pair, column in product(self.compared_pairs, self.change_from_tuning_columns)
        }
        judged = judge_comparisons(comparisons, self.matters)
        rows = [
            [
                self.labels[row_name],
                self.labels[baseline],
                *(self.verdict_text(judged[row_name, baseline, x]) for x in self.change_from_tuning_columns),
            ]
            for row_name, baseline in self.compared_pairs
        ]
        return markdown_table([["", "minus", *self.change_from_tuning_columns], *rows])

    def trend_table(self) -> str:
        """Return a Markdown table of the losses in the decisive columns by fraction of training
        (`training_fractions_by_trend`), and of their change."""
        values_by_row = {
            f"{name}, {column}": {
                part: next(iter(self.values_by_rate(arm, column).values())) for arm, part in arms.items()
            }
            for name, arms in self.training_fractions_by_trend.items()
            for column in self.decisive_columns
        }
        return trend_table(values_by_row, self.matters, False, lambda losses: f"{losses.mean():.3f}", 1, 3)

    def tokens_to_common_loss_table(self) -> str:
        """Return a Markdown table of the training tokens with which each row's arm reaches a common loss. This loss is
        the highest final loss of any run.

        Beside them are their ratios to the baseline's tokens, with 95 % intervals over seeds. Means are geometric.
        """
        curves = self.final_runs[self.final_runs.metric == "val loss by tokens"].pivot(
            index=["arm", "seed"], columns="x", values="value"
        )
        level = math.ceil(curves.iloc[:, -1].max() * 100) / 100
        tokens = {
            key: tokens_to_reach(curves.columns, curve, level)
            for key, curve in zip(curves.index, curves.to_numpy(), strict=True)
        }
        logs = np.log(pd.Series(tokens)).unstack(0)
        lines = [["", f"tokens to a loss of {level:.2f}", "factor"]]
        factors = {
            row_name: np.exp(estimate_over_seeds((logs[row_name] - logs[baseline]).to_numpy()).interval().as_list())
            for row_name, baseline in self.compared_pairs
        }
        for row_name, label in self.labels.items():
            factor = "{:.3f} [{:.3f}, {:.3f}]".format(*factors[row_name]) if row_name in factors else "1"
            lines.append([label, f"{np.exp(logs[row_name].mean()):,.0f}", factor])
        return markdown_table(lines)

    def draw_picture(self) -> bytes | None:
        """Return the picture docs/TABLE_NAME.svg, or None if there is none.

        It shows the losses of ranked rows, the verdicts' intervals, or the differences of pairs by position. By
        position, lines are means over seeds, and bands their 95 % intervals at each position alone.
        """
        if self.ranks_arms:
            return self._draw_seed_losses_by_row()
        if self.draws_intervals:
            return self._draw_differences()
        if not self.picture_rows:
            return None
        columns = [heading for heading, column in self.columns.items() if column.metric.startswith("mean ")]
        size, shared = (9.5, 0.8 + 2.4 * len(self.picture_rows)), {"sharex": True, "sharey": True, "squeeze": False}
        with styled_figure(len(self.picture_rows), len(columns), size, **shared) as (figure, panels):
            for row, (title, pairs) in zip(panels, self.picture_rows.items(), strict=True):
                for axes, column in zip(row, columns, strict=True):
                    axes.axhline(0, color="0.3", linewidth=0.8)
                    axes.axvline(self.train_length, color="0.6", linewidth=1, linestyle=":")
                    for row_name, baseline in pairs:
                        curves = self._losses_by_position(row_name, column) - self._losses_by_position(baseline, column)
                        estimate = estimate_over_seeds(curves.to_numpy())
                        half, colour = estimate.half_width(), COLOURS[ARM_COLOUR_NUMBERS[row_name.partition("_no")[0]]]
                        axes.plot(
                            curves.index,
                            estimate.mean,
                            color=colour,
                            linewidth=2,
                            label=self.labels[row_name].partition(", ")[0],
                        )
                        axes.fill_between(
                            curves.index,
                            estimate.mean - half,
                            estimate.mean + half,
                            color=colour,
                            alpha=0.2,
                            linewidth=0,
                        )
                    axes.set_xscale("log", base=2)
                    axes.set_xlim(left=curves.index[0])
                    ticks = [
                        self.train_length * 2**power
                        for power in range(-3, 8)
                        if self.train_length * 2**power < curves.index[-1]
                    ]
                    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                row[0].set_ylabel(f"{title}\nloss minus the baseline's, nats")
            handles, words = panels[0, 0].get_legend_handles_labels()
            figure.legend(
                handles,
                words,
                loc="outside upper center",
                ncols=2 if max(map(len, words)) > 25 else 4,
                frameon=False,
                fontsize=9,
            )
            for axes, column in zip(panels[0], columns, strict=True):
                axes.set_title(f"RoPE: {column}", fontsize=9)
            figure.supxlabel(f"position (dotted: the training length, {self.train_length} tokens)", fontsize=9)
            return svg_bytes(figure)

    def _draw_seed_losses_by_row(self) -> bytes:
        """Draw a strip for each row of the table, in a panel for each column: dots are seeds, rings are means.
        Return the picture as SVG.

        Broken lines are the means of the baseline, the first of `labels`. A ring is filled if a verdict says that the
        difference is larger than `matters`.
        """
        columns = [heading for heading, column in self.columns.items() if column.metric.endswith("loss")]
        large = {
            (row_name, column) for (row_name, _, column), verdict in self.verdicts.items() if verdict.exceeds_margin
        }
        with styled_figure(1, 1, (7.5, 1.1 + 0.21 * len(self.row_names))) as (figure, axes):
            for number, column in enumerate(columns):
                colour, length = COLOURS[number], self.columns[column].x
                axes.plot(
                    [],
                    [],
                    "o",
                    color=colour,
                    fillstyle="none",
                    label=f"{column}, {length:,} tokens" if length else column,
                )
                for row, row_name in enumerate(self.row_names):
                    losses = next(iter(self.values_by_rate(row_name, column).values()))
                    axes.plot(losses, [row] * len(losses), ".", color=colour, markersize=4, alpha=0.5)
                    axes.plot(
                        losses.mean(),
                        row,
                        "o",
                        color=colour,
                        fillstyle="full" if (row_name, column) in large else "none",
                    )
                    if row_name == next(iter(self.labels)):
                        axes.axvline(losses.mean(), color=colour, linewidth=0.8, linestyle="--")
            axes.set_yticks(range(len(self.row_names)), [self.labels[row_name] for row_name in self.row_names])
            axes.invert_yaxis()
            axes.grid(axis="y", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
            baseline = next(iter(self.labels.values()))
            filled = f"; filled: better or worse than it by more than {self.matters:g}" if self.compared_pairs else ""
            axes.set_xlabel(f"loss, nats (broken: {baseline}{filled})")
            figure.legend(loc="outside upper center", ncols=len(columns), frameon=False)
            return svg_bytes(figure)

    def _draw_differences(self) -> bytes:
        """Draw a row for each pair and a panel for each decisive setting: the difference with its interval, and the
        margin as a band.
        """
        size = (
            2.2 + 1.9 * len(self.decisive_columns) if len(self.decisive_columns) > 1 else 6,
            1.0 + 0.24 * len(self.compared_pairs),
        )
        with styled_figure(1, len(self.decisive_columns), size, sharey=True, sharex=True, squeeze=False) as (
            figure,
            panels,
        ):
            for axes, column in zip(panels[0], self.decisive_columns, strict=True):
                axes.axvspan(-self.matters, self.matters, color="0.9", linewidth=0)
                axes.axvline(0, color="0.3", linewidth=0.8)
                for row, pair in enumerate(self.compared_pairs):
                    interval = self.verdicts[*pair, column].interval
                    axes.plot([interval.low, interval.high], [row, row], color=COLOURS[0], linewidth=2)
                    axes.plot(interval.mean, row, "o", color=COLOURS[0], markersize=5)
                axes.set_title(column if " " in column else f"{column} tokens", fontsize=9)
            panels[0, 0].set_yticks(
                range(len(self.compared_pairs)), [self.labels[row_name] for row_name, _ in self.compared_pairs]
            )
            panels[0, 0].set_ylim(len(self.compared_pairs) - 0.5, -0.5)
            baselines = {self.labels[baseline] for _, baseline in self.compared_pairs}
            baseline = baselines.pop() if len(baselines) == 1 else "its baseline"
            figure.supxlabel(f"loss minus that of {baseline}, nats (grey: at most {self.matters:g})", fontsize=9)
            return svg_bytes(figure)

    def _losses_by_position(self, row_name: str, column: str) -> pd.DataFrame:
        """Return the losses by position (positions, seeds) of the table's row `row_name` under its heading `column`, at
        the row's best rate. Positions before an eighth of the training length are left out.
        """
        shown = self.columns[column]
        arm, setting = _arm_and_full_setting(row_name, shown.setting)
        data = self.final_runs[self.final_runs.x >= self.train_length // 8]
        data = data[(data.metric == shown.metric.removeprefix("mean ")) & (data.setting == setting)]
        runs = data[(data.arm == arm) & (data.rate == next(iter(self.values_by_rate(row_name, column))))]
        return runs.pivot(index="x", columns="seed", values="value")


def tokens_to_reach(tokens: Sequence[int], losses: Sequence[float], level: float) -> float:
    """Return the number of training tokens at which a loss first reaches `level`.

    It is interpolated linearly in log tokens between the first evaluation that has reached the level and the one
    before. Losses that are not finite are left out.
    """
    evaluations = [(count, loss) for count, loss in zip(tokens, losses, strict=True) if math.isfinite(loss)]
    index = next(index for index, (_, loss) in enumerate(evaluations) if loss <= level)
    (tokens_before, loss_before), (tokens_after, loss_after) = evaluations[index - 1 : index + 1]
    fraction = (loss_before - level) / (loss_before - loss_after)
    return math.exp(math.log(tokens_before) + fraction * math.log(tokens_after / tokens_before))


def _arm_and_full_setting(row_name: str, base_setting: str) -> tuple[str, str]:
    """Return a row's arm, and `base_setting` followed by the normalizer's option that the row's name changes, such as
    `theta x 50, n=fixed:753`."""
    arm, comma, change = row_name.partition(", ")
    return arm, base_setting + comma + change
