"""Which number of a trained model, taken at the training length, predicts the length at which it loses recall: a table
and a picture.

Settled before the final runs of configs/experiments/recall-all.yaml:

- Runs: the final ones of `EXPERIMENTS` that have learned the task (accuracy of at least 0.9 at the training length). A
  run falls at the length at which accuracy falls below one half.
- Numbers, of the head that gives the needle most weight: the formula of docs/half-length.md with margin and slope,
  which has no fitted constant; and straight lines for log2 of the length in margin, log odds of the weight on the
  needle, ln N_eff, ln S and entropy, fitted on the runs that fall of all other arms, each arm with equal weight.
- To beat: the mean of the other arms, and of the other seeds of the same arm.
- An error is |log2(predicted / observed)| of a run that falls, with predictions kept within 64 and 2^20 tokens. Arms
  are the sample: each counts by its mean error, and 0.25 octaves matter.
- Order: of pairs of runs of two arms of which it is known which falls first, the part that a number puts in that order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from committed_results import markdown, verdict_words
from matplotlib import pyplot as plt
from pages import canvas, finish, saved

from lm.report.pictures import COLOURS
from lm.statistics.verdicts import Comparison, Verdict, verdicts

EXPERIMENTS = ("recall-after", "recall-all")
LEARNED = 0.9  # accuracy at the training length from which on a run has learned the task
MATTERS = 0.25  # octaves
NEAREST, FARTHEST = 64.0, 2.0**20  # tokens that predictions are kept within
FORMULA = "margin and slope: the formula, nothing fitted"
LINES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "margin": lambda runs: runs.margin.clip(upper=100),
    "weight on the needle": lambda runs: np.log(
        runs["weight on the needle"] / (1 - runs["weight on the needle"]).clip(lower=1e-12)
    ),
    "N_eff": lambda runs: -np.log(runs.N_eff),
    "S": lambda runs: -np.log(runs.S),
    "entropy": lambda runs: -runs.entropy,
}  # numbers that are larger where a run falls later
OTHERS, SEEDS = "mean of the other arms", "mean of the arm's other seeds"


def learned(results: Path) -> pd.DataFrame:
    """The runs that have learned the task, a line each: experiment, arm, its numbers, the length observed (infinite)
    and the longest.
    """
    frames = []
    for name in EXPERIMENTS:
        lines = pd.read_csv(results / name / "seeds.csv").query("stage == 'final'")
        lines = lines.assign(line=name + " " + lines.get("size", ""))
        keys = ["line", "arm", "rate", "seed"]
        heads = lines[lines.setting == "head"].pivot(index=keys, columns="metric", values="value")
        right = lines[(lines.metric == "mqar accuracy") & (lines.setting == "as trained")]
        at_length = right[right.x == right.x.min()].set_index(keys).value
        frames.append(heads[at_length.reindex(heads.index) >= LEARNED].reset_index())
    return pd.concat(frames, ignore_index=True)


def fell(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs whose accuracy falls below one half."""
    return runs[np.isfinite(runs["half-length"])]


@dataclass(frozen=True)
class Prediction:
    """A number as a prediction.

    Attributes:
        name: of the number.
        lengths: (runs,) predicted, tokens; NaN where nothing can be said.
        order: (runs,) larger where a run is predicted to fall later; None if the number says nothing about arms that it
            has not seen.
    """

    name: str
    lengths: pd.Series
    order: pd.Series | None

    def errors(self, runs: pd.DataFrame) -> pd.Series:
        """Mean error of each arm, octaves, by its name."""
        falling = fell(runs)
        lengths = self.lengths[falling.index].clip(NEAREST, FARTHEST)
        return np.log2(lengths / falling["half-length"]).abs().groupby(falling.arm).mean().dropna()

    def in_order(self, runs: pd.DataFrame) -> float:
        """The part of pairs of runs of two arms that is in the order observed, those that are level counted half."""
        arms, order, falls = (
            runs.arm.to_numpy(),
            self.order[runs.index].to_numpy(),
            np.isfinite(runs["half-length"].to_numpy()),
        )
        ends = np.where(falls, runs["half-length"], runs.longest)  # a run that doesn't fall ends later than this
        later = (arms != arms[falls, None]) & (ends > ends[falls, None])  # (runs that fall, runs)
        in_order, level = order > order[falls, None], order == order[falls, None]
        return (
            float((later & in_order).sum() + 0.5 * (later & level).sum()) / later.sum() if later.any() else float("nan")
        )


def predictions(runs: pd.DataFrame) -> list[Prediction]:
    """Every number as a prediction, the formula first; lines and means are fitted on what they don't predict."""
    numbers = [Prediction(FORMULA, runs["predicted half-length"], runs["predicted half-length"])]
    for name, number in LINES.items():
        values = number(runs).where(np.isfinite)  # a row without weight has no N_eff
        numbers.append(Prediction(name, _by_arm(runs, lambda part, values=values: _line(part, values)), values))
    numbers.append(Prediction(OTHERS, _by_arm(runs, lambda part: _line(part, None)), None))
    logs = np.log2(fell(runs)["half-length"]).reindex(runs.index)
    groups = logs.groupby([runs.line, runs.arm, runs.rate])
    count = groups.transform("count") - logs.notna()
    return [
        *numbers,
        Prediction(SEEDS, 2 ** ((groups.transform("sum") - logs.fillna(0)) / count.where(count > 0)), None),
    ]


def _by_arm(runs: pd.DataFrame, fitted: Callable[[pd.DataFrame], Callable[[pd.Index], np.ndarray]]) -> pd.Series:
    """The lengths predicted for each arm by what is fitted on the runs of all others that fall."""
    lengths = pd.Series(np.nan, runs.index)
    for arm, part in runs.groupby("arm"):
        rest = fell(runs[runs.arm != arm])
        if len(rest):
            lengths[part.index] = 2 ** fitted(rest)(part.index)
    return lengths


def _line(runs: pd.DataFrame, values: pd.Series | None) -> Callable[[pd.Index], np.ndarray]:
    """The straight line in `values` (None: the constant) for log2 of the length, least squares with each arm of equal
    weight.
    """
    runs = runs if values is None else runs[values[runs.index].notna()]
    weights = 1 / runs.groupby("arm").arm.transform("size")
    heights = np.log2(runs["half-length"])
    level = np.average(heights, weights=weights)
    if values is None or np.ptp(values[runs.index]) == 0:
        return lambda index: np.full(len(index), level)
    center = np.average(values[runs.index], weights=weights)
    centred = values[runs.index] - center
    slope = (weights * centred * heights).sum() / (weights * centred**2).sum()
    return lambda index: slope * (values[index].to_numpy() - center) + level


def compared(runs: pd.DataFrame, numbers: list[Prediction]) -> dict[str, Verdict]:
    """Each number against the formula, by the errors of the arms that both predict, as one family."""
    formula, *rest = numbers
    errors = formula.errors(runs)
    comparisons = {number.name: Comparison((number.errors(runs) - errors).dropna().tolist()) for number in rest}
    return verdicts(comparisons, MATTERS)


def table(runs: pd.DataFrame, numbers: list[Prediction]) -> str:
    """The table in Markdown: a line for each number."""
    found_verdicts = compared(runs, numbers)
    heads = ["number at the training length", "arms", "mean error, octaves"]
    lines = [[*heads, "minus the formula's", "pairs in order, %", "leaving an arm out"]]
    for number in numbers:
        errors, verdict = number.errors(runs), found_verdicts.get(number.name)
        cells = [number.name, str(len(errors)), f"{errors.mean():.2f}", "" if verdict is None else difference(verdict)]
        if number.order is None:
            cells += ["", ""]
        else:
            leaving_out = [100 * number.in_order(runs[runs.arm != arm]) for arm in sorted(set(fell(runs).arm))]
            cells += [f"{100 * number.in_order(runs):.0f}", f"{min(leaving_out):.0f} to {max(leaving_out):.0f}"]
        lines.append(cells)
    return markdown(lines)


def difference(verdict: Verdict) -> str:
    """A verdict with the difference and its interval."""
    if verdict.kind == "incomplete":
        return "no verdict: fewer than 3 arms"
    if verdict.interval is None:
        return verdict.statement
    return verdict_words(verdict, 1, 2)


def drawn(runs: pd.DataFrame, numbers: list[Prediction]) -> bytes:
    """The picture: lengths observed over those predicted, a panel for each number; hollow: a run that doesn't fall."""
    numbers = [number for number in numbers if number.name != SEEDS]
    ticks = {2.0**power: f"{2**power:,}" for power in (6, 10, 14, 18)}
    with plt.rc_context({"font.size": 9}), canvas(2, 4, (9.6, 5.2), sharey=True, sharex=True) as (figure, panels):
        for axes, number in zip(panels.flat, numbers, strict=False):
            axes.plot((NEAREST, FARTHEST), (NEAREST, FARTHEST), color="0.6", linewidth=1)
            for is_formula, colour in ((1, COLOURS[0]), (0, COLOURS[1])):
                part = runs[runs["formula holds"] == is_formula]
                falls = np.isfinite(part["half-length"])
                lengths = number.lengths[part.index].clip(NEAREST, FARTHEST)
                axes.scatter(
                    lengths[~falls],
                    part.longest[~falls],
                    s=14,
                    facecolors="none",
                    edgecolors=colour,
                    linewidths=0.6,
                    alpha=0.6,
                )
                axes.scatter(lengths[falls], part["half-length"][falls], s=14, color=colour)
            axes.set_title(number.name.partition(":")[0], fontsize=9)
            axes.set(xscale="log", yscale="log")
            axes.set_xticks([*ticks], ticks.values(), fontsize=8)
            axes.set_yticks([*ticks], ticks.values())
            axes.minorticks_off()
            finish(axes)
        for place in range(len(numbers), panels.size):
            panels.flat[place].set_axis_off()
            panels.flat[place - panels.shape[1]].tick_params(labelbottom=True)  # no panel below it has them
        for colour, words in zip(COLOURS, ("weights e^score", "other weights"), strict=False):
            panels[-1, -1].scatter([], [], s=14, color=colour, label=words)
        panels[-1, -1].scatter([], [], s=14, facecolors="none", edgecolors="0.4", label="does not fall, up to here")
        panels[-1, -1].legend(frameon=False, loc="center", fontsize=9)
        figure.supxlabel("length predicted, symbols", fontsize=9)
        figure.supylabel("length observed, symbols", fontsize=9)
        return saved(figure)
