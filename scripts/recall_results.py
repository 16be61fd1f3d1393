"""Make the tables, pictures and verdicts in docs/ of experiments on recall."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
from committed_results import (
    ACCURACY_BOUNDS,
    ARM_COLOUR_NUMBERS,
    ExperimentResults,
    TrainingFraction,
    compare_at_best_rates,
    final_run_lines,
    markdown_table,
    rate_text,
    trend_table,
)
from page_pictures import draw_percentages, styled_figure, svg_bytes

from lm.report.pictures import COLOURS
from lm.statistics.verdicts import Comparison, Verdict, judge_comparisons

QUESTIONS_BY_TASK = {"mqar": 8, "needle": 4}  # number of questions in a sequence of the task; each has another answer
# layers: those that arms differ in
COLUMN_HEADINGS = {"mqar": "layer 2", "needle": "layers 2, 3", "rate": "learning rate", "size": "steps"}


@dataclass(frozen=True)
class RecallResults(ExperimentResults):
    """This class shows results of an experiment on recall: the accuracy of each arm by sequence length.

    Attributes:
        baseline: the arm that all others are compared with.
        decisive_lengths: sequence lengths at which arms are compared.
        matters: smallest difference of interest, as a fraction.
        is_tuned: whether each arm is shown at its best learning rate; else arms are compared at each rate.
        picture_kind: how docs/NAME.svg draws accuracy by length: `curves`, `rows`, or empty for no picture.
        task: the task whose accuracy is shown.
        compared_column: if arms are not tuned, the column (rate or size) by whose values they are compared.
        ranks_arms: whether arms are sorted by their accuracy at their best rates.
        training_fractions_by_trend: for each trend its arms, each with a fraction of training (0 to 1), such as the
            time of its swap. A line is fitted through each seed's runs.
    """

    baseline: str
    decisive_lengths: tuple[int, ...]
    matters: float
    is_tuned: bool = False
    picture_kind: Literal["", "curves", "rows"] = ""
    task: str = "mqar"
    compared_column: str = "rate"
    ranks_arms: bool = False
    training_fractions_by_trend: Mapping[str, Mapping[str, TrainingFraction]] = field(default_factory=dict)

    @property
    def token_word(self) -> str:
        """Return the word for the tokens of the task's sequences: `symbols` or `tokens`."""
        return "symbols" if self.task == "mqar" else "tokens"

    @property
    def guess_accuracy_percent(self) -> float:
        """Return the accuracy, in per cent, of a guess among the answers not asked for yet: H_k / k for k questions,
        with H_k = 1 + 1/2 + ... + 1/k."""
        count = QUESTIONS_BY_TASK[self.task]
        return 100 * sum(1 / rank for rank in range(1, count + 1)) / count

    @cached_property
    def final_runs(self) -> pd.DataFrame:
        """Return the lines of seeds.csv that belong to the final runs. The column `size` has the number at the end of a
        model size's name."""
        data = final_run_lines(self.name)
        return data.assign(size=data["size"].str.rpartition("-")[2].astype(int)) if "size" in data else data

    @cached_property
    def accuracies(self) -> dict[tuple[str, float, int], np.ndarray]:
        """Return the accuracy (seeds,) of the final runs by arm, learning rate (or size) and length."""
        lines = self.final_runs.query(f"metric == '{self.task} accuracy' and setting == 'as trained'")
        return {
            key: run.sort_values("seed").value.to_numpy()
            for key, run in lines.groupby(["arm", self.compared_column, "x"])
        }

    def learning_rates(self, arm: str) -> list[float]:
        """Return the learning rates of an arm's final runs in ascending order; the best first if arms are tuned."""
        rates = sorted({rate for name, rate, _ in self.accuracies if name == arm})
        return (
            sorted(rates, key=lambda rate: -self.accuracies[arm, rate, self.decisive_lengths[0]].mean())
            if self.is_tuned
            else rates
        )

    @cached_property
    def verdicts(self) -> dict[tuple[str, float, int], Verdict]:
        """Return the verdicts by arm, rate and length. They are one family: their intervals hold together."""
        comparisons = {}
        for arm in self.labels:
            arm_rates = self.learning_rates(arm)
            for length in self.decisive_lengths if arm != self.baseline else ():
                if self.is_tuned:
                    by_rates = [
                        {rate: self.accuracies[name, rate, length] for rate in self.learning_rates(name)}
                        for name in (arm, self.baseline)
                    ]
                    comparisons[arm, arm_rates[0], length] = compare_at_best_rates(*by_rates, higher_is_better=True)
                    continue
                for rate in arm_rates:
                    differences = self.accuracies[arm, rate, length] - self.accuracies[self.baseline, rate, length]
                    comparisons[arm, rate, length] = Comparison(
                        differences, higher_is_better=True, possible_range=ACCURACY_BOUNDS
                    )
        return judge_comparisons(comparisons, self.matters)

    def arm_and_baseline_names(self, verdict_key: tuple[str, float, int]) -> tuple[str, str]:
        """Return the arm and the baseline of a verdict's key."""
        return verdict_key[0], self.baseline

    @cached_property
    def arms(self) -> list[str]:
        """Return the arms in the order shown: as they are named, or from the highest accuracy at the longest length to
        the lowest.
        """
        return (
            sorted(self.labels, key=lambda arm: tuple(-self._accuracy_at_best_rate(arm).mean(0)[::-1]))
            if self.ranks_arms
            else list(self.labels)
        )

    def _accuracy_at_best_rate(self, arm: str) -> np.ndarray:
        """Return the accuracy (seeds, lengths) of an arm at its best rate."""
        return np.stack([self.accuracies[arm, self.learning_rates(arm)[0], length] for length in self.lengths], 1)

    def tables(self) -> dict[str, str]:
        """Return the Markdown tables of the page, by name."""
        tables = {self.table_name: self.table()}
        if self.training_fractions_by_trend:
            tables[f"{self.table_name} trends"] = self.trend_table()
        return tables

    def draw_picture(self) -> bytes | None:
        """Return the picture docs/TABLE_NAME.svg; None if there is none."""
        return (
            {"curves": self.draw_curves, "rows": self.draw_overview}[self.picture_kind]() if self.picture_kind else None
        )

    def table(self) -> str:
        """Return a Markdown table with a line for each arm and rate: accuracies in per cent, and the verdicts."""
        title = f"minus {self.labels[self.baseline].partition(' at ')[0]}"
        heads = [
            COLUMN_HEADINGS[self.compared_column],
            COLUMN_HEADINGS[self.task],
            *(f"{length:,}" for length in self.lengths),
        ]
        heads += [f"{title}, at {length:,}" for length in self.decisive_lengths]
        places = [
            (arm, rate) for arm in self.arms for rate in (self.learning_rates(arm)[: 1 if self.ranks_arms else None])
        ]
        lines = [
            [self._row_label(rate), self.labels[arm], *self._row_cells(arm, rate)]
            for arm, rate in (places if self.is_tuned else sorted(places, key=lambda place: place[1]))
        ]
        return markdown_table([heads, *lines])

    def _row_label(self, rate_or_size: float) -> str:
        """Return a learning rate or a size as text."""
        return f"{rate_or_size:,}" if self.compared_column == "size" else rate_text(rate_or_size)

    def half_accuracy_length(self, arm: str, rate_or_size: float | None = None) -> str:
        """Return words for the length at which an arm's accuracy falls below 1/2, the median over seeds.

        rate_or_size: the learning rate, or size, of the runs (`compared_column`); None: the arm's best rate.
        """
        rate_or_size = self.learning_rates(arm)[0] if rate_or_size is None else rate_or_size
        by_length = np.array([self.accuracies[arm, rate_or_size, length] for length in self.lengths])
        observed = [first_length_below_half(self.lengths, accuracy) for accuracy in by_length.T]
        n_fallen, median = int(np.isfinite(observed).sum()), float(np.median(observed))
        if median <= self.lengths[0]:
            return "not learned"
        counted = f" ({n_fallen} of {len(observed)} fall)" if 0 < n_fallen < len(observed) else ""
        return _token_text(median, f"not up to {self.lengths[-1]:,}") + counted

    def trend_table(self) -> str:
        """Return a Markdown table of the accuracy at the first decisive length by fraction of training
        (`training_fractions_by_trend`), and of its change.
        """
        values_by_row = {
            name: {
                part: self.accuracies[arm, self.learning_rates(arm)[0], self.decisive_lengths[0]]
                for arm, part in arms.items()
            }
            for name, arms in self.training_fractions_by_trend.items()
        }
        return trend_table(values_by_row, self.matters, True, _mean_and_range)

    def _row_cells(self, arm: str, rate: float) -> list[str]:
        """Return the accuracies and the verdicts of an arm at a rate, as text."""
        cells = [_mean_and_range(self.accuracies[arm, rate, length]) for length in self.lengths]
        for length in self.decisive_lengths:
            verdict = self.verdicts.get((arm, rate, length))
            cells.append(self.verdict_text(verdict) if verdict else "")
        return cells

    def draw_overview(self) -> bytes:
        """Draw all arms at their best rates: mean accuracy by length as coloured cells, the lowest seed's accuracy at
        the longest length, and the verdicts.
        """
        values = np.stack([100 * self._accuracy_at_best_rate(arm).mean(0) for arm in self.arms])
        with styled_figure(1, 1, (7.2, 0.8 + 0.235 * len(self.arms))) as (figure, axes):
            draw_percentages(axes, values)
            for row, arm in enumerate(self.arms):
                verdict = self.verdicts.get((arm, self.learning_rates(arm)[0], self.decisive_lengths[0]))
                statement = (
                    "baseline"
                    if verdict is None
                    else replace(verdict, margin=100 * self.matters).statement_without_seeds
                )
                words = statement.partition(":")[0]
                lowest = 100 * self._accuracy_at_best_rate(arm)[:, -1].min()
                axes.text(
                    len(self.lengths) - 0.1, row, f"{lowest:.0f}", ha="right", va="center", fontsize=8, color="0.3"
                )
                axes.text(len(self.lengths), row, words, va="center", fontsize=8, color="0.5")
            axes.set_yticks(range(len(self.arms)), [self.labels[arm] for arm in self.arms])
            axes.set_xticks(range(len(self.lengths)), [f"{length:,}" for length in self.lengths])
            axes.set_xlabel(
                f"mean accuracy, %, by sequence length (training: {self.lengths[0]} {self.token_word})\n"
                f"right: the lowest seed at {self.lengths[-1]:,}, and the verdict against {self.labels[self.baseline]}"
            )
            figure.draw_without_rendering()  # the layout takes two passes to make room for long verdicts
            return svg_bytes(figure)

    def draw_curves(self) -> bytes:
        """Draw accuracy by length, with a row for each rate and a panel for each arm."""
        rates = sorted({rate for _, rate, _ in self.accuracies})
        size = max(6.5, 1.6 * len(self.labels)), 1.4 + 1.7 * len(rates)  # inches; shown about 700 pixels wide
        # with room for words
        factors = {length: f"{length // self.lengths[0]:,}" for length in (self.lengths[0], *self.lengths[:0:-2])}
        shared = {"sharex": True, "sharey": True, "squeeze": False}
        with styled_figure(len(rates), len(self.labels), size, **shared) as (figure, panels):
            for row, rate in zip(panels, rates, strict=True):
                for axes, arm in zip(row, self.labels, strict=True):
                    colour = COLOURS[ARM_COLOUR_NUMBERS[arm.removeprefix("after_").removeprefix("tau_")]]
                    values = 100 * np.array([self.accuracies[arm, rate, length] for length in self.lengths])
                    axes.axhline(self.guess_accuracy_percent, color="0.6", linewidth=1, linestyle=":")
                    axes.plot(self.lengths, values, color=colour, linewidth=0.8, alpha=0.6)
                    axes.plot(self.lengths, values.mean(1), color=colour, linewidth=2.4)
                    axes.set_xscale("log", base=2)
                    axes.set_xticks([*factors], factors.values())
                    axes.set_xticks(self.lengths, [], minor=True)
                    axes.set_ylim(-3, 103)
                words = (
                    f"{self._row_label(rate)} steps"
                    if self.compared_column == "size"
                    else f"learning rate {self._row_label(rate)}"
                )
                row[0].set_ylabel(f"{words}\naccuracy, %")
                row[0].annotate("dotted:\na guess", (self.lengths[0], 3), fontsize=8, color="0.35")
            for axes, label in zip(panels[0], self.labels.values(), strict=True):
                axes.set_title(textwrap.fill(label, 16, break_long_words=False), fontsize=9)
            figure.supxlabel(f"sequence length, in training lengths of {self.lengths[0]} {self.token_word}", fontsize=9)
            return svg_bytes(figure)


def first_length_below_half(lengths: Sequence[int], accuracy: Sequence[float]) -> float:
    """Return the length at which accuracy first falls below 1/2, interpolated in the length's logarithm; else
    infinity.
    """
    for index, right in enumerate(accuracy):
        if right < 0.5:
            if index == 0:
                return float(lengths[0])
            before = accuracy[index - 1]
            part = (before - 0.5) / (before - right)
            return float(lengths[index - 1] * (lengths[index] / lengths[index - 1]) ** part)
    return math.inf


def _token_text(length: float, infinite: str) -> str:
    """Return a length in tokens as text; `infinite` is the text for an infinite length."""
    return infinite if math.isinf(length) else f"{length:,.0f}" if length < 1e6 else f"{length:.0e}".replace("e+0", "e")


def _mean_and_range(accuracies: np.ndarray) -> str:
    """Return the mean over seeds in per cent, with the lowest and highest seed if they are more than 2 points apart."""
    values = 100 * accuracies
    return f"{values.mean():.1f}" + (f" [{values.min():.0f}, {values.max():.0f}]" if np.ptp(values) > 2 else "")
