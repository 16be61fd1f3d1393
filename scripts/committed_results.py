"""Read committed results (results/NAME/seeds.csv), compare arms, and write tables in Markdown for docs/."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lm.statistics.verdicts import Comparison, Verdict, judge_comparisons

ROOT = Path(__file__).resolve().parent.parent
RESULTS_FOLDER = ROOT / "results"
# what is kept of diagnostics: a number a document, no curves
KEPT_DIAGNOSTICS = ("entropy / ln n", "weight on the first token")
# an arm's colour in the reports' palette
ARM_COLOUR_NUMBERS = {"softmax": 0, "ssmax": 1, "log_n": 2, "ssmax_fixed": 3, "half": 4, "quarter": 5}
ARM_COLOUR_NUMBERS |= {"ssmax_fixed, n=fixed:753": 4, "ssmax_fixed, n=fixed:2048": 5, "ssmax_fixed, n=visible": 2}


def final_run_lines(name: str) -> pd.DataFrame:
    """Return the lines of seeds.csv, as scripts/collect.py writes them, that belong to an experiment's final runs.

    Final runs are trained after learning rates are chosen. Tuning runs, which choose them, are left out.
    """
    data = pd.read_csv(RESULTS_FOLDER / name / "seeds.csv", dtype={"setting": str})
    data, keys = data[data.stage == "final"], [key for key in ("size", "arm", "rate") if key in data]
    seeds = data.groupby(keys)["seed"].unique().map(sorted).map(tuple)
    if len(set(seeds)) > 1:  # values are paired in the order of seeds
        raise SystemExit(f"error: results/{name}/seeds.csv: arms differ in seeds: {seeds.to_dict()}")
    return data.fillna({"setting": ""})


@dataclass(frozen=True)
class ExperimentResults:
    """This base class makes the tables and the picture of an experiment's results for a page of docs/.

    Attributes:
        name: folder of results/.
        docs_page: page of docs/ that holds the tables.
        labels: words for the arms, by the arms' names, in the order of the table.
    """

    name: str
    docs_page: str
    labels: Mapping[str, str]

    @property
    def table_name(self) -> str:
        """Return the name of the experiment's tables on its page in docs/, which is also that of the picture's file."""
        return self.name

    @property
    def display_scale(self) -> tuple[float, int]:
        """Return the factor by which values are multiplied for display, and the number of decimal places."""
        return 100, 1

    @cached_property
    def final_runs(self) -> pd.DataFrame:
        """Return the lines of seeds.csv that belong to the final runs."""
        return final_run_lines(self.name)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the sequence lengths at which accuracies were measured, in ascending order."""
        return sorted({key[-1] for key in self.accuracies})

    def verdict_text(self, verdict: Verdict) -> str:
        """Return a verdict in words, with its difference."""
        return verdict_text(verdict, *self.display_scale)


def compare_at_best_rates(
    arm_values: Mapping[float, np.ndarray],
    baseline_values: Mapping[float, np.ndarray],
    higher_is_better: bool,
    other_values_chose_rates: bool = False,
) -> Comparison:
    """Return the comparison of an arm with its baseline, each at its best learning rate.

    The arm is worse only if it is worse than the baseline at one of the learning rates that both have. If they share no
    rate, all of the baseline's rates count.

    Args:
        arm_values: the arm's values (seeds,) by learning rate, the best rate first.
        baseline_values: the baseline's values, in the same way.
        higher_is_better: whether values are accuracies, of which higher ones are better.
        other_values_chose_rates: whether learning rates were chosen by other values than these, such as by losses at
            another length. A verdict must then hold at every pair of an arm's rate and a baseline's rate.
    """
    rates = sorted(baseline_values, key=lambda rate: rate not in arm_values)
    by_rates = np.stack([*arm_values.values()])[:, None] - np.stack([baseline_values[rate] for rate in rates])
    place = 0, rates.index(next(iter(baseline_values)))
    return Comparison(
        by_rates,
        place,
        n_shared_rates=sum(rate in arm_values for rate in baseline_values) or None,
        must_hold_at_all_rates=other_values_chose_rates,
        higher_is_better=higher_is_better,
        possible_range=ACCURACY_BOUNDS if higher_is_better else None,
    )


ACCURACY_BOUNDS = (-1.0, 1.0)  # the bounds of a difference between accuracies


def rate_text(rate: float) -> str:
    """Return a learning rate as text with two digits."""
    return f"{rate:.1e}".replace("e-0", "e-").replace(".0e", "e")


TrainingFraction = float  # fraction of the training's steps that is done, from 0 to 1


def trend_table(
    values_by_row: Mapping[str, Mapping[TrainingFraction, np.ndarray]],
    matters: float,
    higher_is_better: bool,
    format_values: Callable[[np.ndarray], str],
    factor: float = 100,
    digits: int = 1,
) -> str:
    """Return a Markdown table of values of runs by a fraction of training, such as the time of a swap in a run.

    The last column has the change of the value from fraction 0 to 1: the slope of a line through each seed's runs. The
    verdicts on these changes are one family: their intervals hold together.

    Args:
        values_by_row: for each row (a trend, by its name) values (seeds,) by fraction of training (0 to 1).
        matters: smallest change of interest.
        higher_is_better: whether values are accuracies.
        format_values: function from the values at one fraction to their words.
        factor, digits: as for `verdict_text`.
    """
    parts = sorted({part for values in values_by_row.values() for part in values})
    lines = [["", *(f"{100 * part:g} %" for part in parts), "change from 0 to 100 %"]]
    changes = {}
    for name, values in values_by_row.items():
        slopes = np.polyfit([*values], np.eye(len(values)), 1)[0]  # a change is this sum of a seed's values
        bounds = (-abs(slopes).sum() / 2, abs(slopes).sum() / 2) if higher_is_better else None
        changes[name] = Comparison(
            slopes @ [*values.values()], higher_is_better=higher_is_better, possible_range=bounds
        )
    for name, verdict in judge_comparisons(changes, matters).items():
        cells = [format_values(values_by_row[name][part]) if part in values_by_row[name] else "" for part in parts]
        lines.append([name, *cells, verdict_text(verdict, factor, digits)])
    return markdown_table(lines)


def markdown_table(lines: list[list[str]]) -> str:
    """Return a Markdown table of cells; the first line holds the headings."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])) + "\n"


def verdict_text(verdict: Verdict, factor: float = 100, digits: int = 1) -> str:
    """Return a verdict in words with its difference and interval; the interval is left out if all seeds have the same
    difference, so that its ends are equal or infinite.

    factor: multiplies the difference and the margin, such as 100 for per cent. digits: decimal places.
    """
    mean, low, high = (factor * value for value in verdict.interval.as_list())
    interval = f"[{low:+.{digits}f}, {high:+.{digits}f}] " if math.isfinite(low) and low < high else ""
    return f"{mean:+.{digits}f} {interval}*{replace(verdict, margin=factor * verdict.margin).statement_without_seeds}*"
