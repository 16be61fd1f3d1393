"""Levels of a metric: fractions of runs that have learned it, compared by Fisher's exact test, and tokens at which a run reaches one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import betaincinv

from lm.statistics.intervals import ALPHA, Interval
from lm.statistics.verdicts import UNTUNED, Name, Verdict


@dataclass(frozen=True)
class LearnedCounts:
    """How many runs of an arm and of the baseline have learned.

    Attributes:
        learned: of the arm and of the baseline, first at the rates that are judged, then at any others that they were trained at: each pair
            must show the difference. A run that diverged has not learned.
        ended: seeds of which the runs of both have ended.
        diverged: how many of them all diverged.
        tuned: False if the best rate of either is at an edge of the grid.
        planned: seeds that were planned for each.
    """

    learned: Sequence[tuple[int, int]]
    ended: int
    diverged: int = 0
    tuned: bool = True
    planned: int = 0

    @property
    def whole(self) -> bool:
        """Whether all planned seeds are there."""
        return self.ended >= self.planned

    @property
    def p(self) -> list[float]:
        """The p of Fisher's test at each pair of rates; 1 where the difference has another direction than the first."""
        ours, theirs = self.learned[0]
        tests = ((fisher_exact(a, self.ended, b, self.ended), np.sign(a - b)) for a, b in self.learned)
        return [p if sign == np.sign(ours - theirs) else 1.0 for p, sign in tests]


def learned_verdicts(counts: Mapping[Name, LearnedCounts], looks: int = 1) -> dict[Name, Verdict]:
    """The verdict on each arm (or arm and size), all taken as one family: Fisher's exact test of equal chances to learn, p times the number
    of comparisons and of `looks` (as of `verdicts`). There is no verdict of equivalence: a handful of runs can't show two chances alike.

    Fisher's test takes the runs of both arms as independent, although they share seeds. McNemar's, which pairs them, rests on the seeds
    alone of which one arm has learned and the other not, and can't reach 0.05 with fewer than 6. If a seed is good or bad for both, the
    arms' results are more alike, and equal arms differ less often than the test allows for: it errs to the safe side.
    """
    family = max(1, len(counts)) * looks
    needed = fewest_seeds(ALPHA / family)
    tested = {name: max(each.p) if each.tuned and each.whole else 1.0 for name, each in counts.items()}
    return {name: _verdict(each, min(1.0, family * tested[name]), needed) for name, each in counts.items()}


def _verdict(counts: LearnedCounts, p: float, needed: int) -> Verdict:
    (ours, theirs), seeds = counts.learned[0], counts.ended
    words = f"{ours} of {seeds} have learned, {theirs} of {seeds} of the baseline"
    words += f"; {counts.diverged} diverged, and count as not learned" if counts.diverged else ""
    kind, reason, unanswered = "undecided", f"{words}; Fisher's exact test: p = {p:.2g}", "no arm is shown to learn more often"
    if not counts.tuned:
        kind, (reason, unanswered) = "not tuned", UNTUNED
    elif not counts.whole:
        kind, reason = "incomplete", f"{seeds} of {counts.planned} seeds have ended"
        unanswered = reason
    elif p <= ALPHA:
        kind, unanswered = "better" if ours > theirs else "worse", ""
    elif counts.p[0] <= ALPHA < max(counts.p):
        reason = f"{words}; but not so at the other rates that the arms were trained at"
    elif seeds < needed:
        reason = f"{words}; Fisher's exact test can show a difference from {needed} seeds on"
    tested = seeds if counts.tuned and counts.whole else 0
    return Verdict(kind, reason, None, p, (needed, needed, needed), open=unanswered, seeds=tested)


def fisher_exact(learned: int, ended: int, base_learned: int, base_ended: int) -> float:
    """Two-sided p of equal chances: the probability of all tables with these margins that are no more probable than this one (Fisher 1935).

    Computed in whole numbers, so that equally probable tables are found equal. 1 where either has no runs.
    """
    total = learned + base_learned
    ways = {
        mine: math.comb(ended, mine) * math.comb(base_ended, total - mine)
        for mine in range(max(0, total - base_ended), min(ended, total) + 1)
    }
    return sum(way for way in ways.values() if way <= ways[learned]) / math.comb(ended + base_ended, total)


def fewest_seeds(alpha: float) -> int:
    """The fewest seeds with which `fisher_exact` can reach `alpha`: all of one arm have learned, and none of the other."""
    return next(seeds for seeds in range(1, 1000) if fisher_exact(seeds, seeds, 0, seeds) <= alpha)


def clopper_pearson(learned: int, runs: int) -> Interval:
    """A fraction of runs with its 95 % interval, which covers at least so often for any chance (Clopper and Pearson 1934)."""
    if not runs:
        return Interval(np.nan, np.nan, np.nan, "0 seeds")
    low = betaincinv(learned, runs - learned + 1, 0.025) if learned else 0.0
    high = betaincinv(learned + 1, runs - learned, 0.975) if learned < runs else 1.0
    return Interval(learned / runs, float(low), float(high), f"{runs} seeds")


def has_learned(value: float, level: float, better: Literal["lower", "higher"]) -> bool:
    """Whether a metric reaches a level; one that is not finite doesn't."""
    return math.isfinite(value) and (value <= level if better == "lower" else value >= level)


# ---------------------------------------------------------------- tokens at which a level is reached


def tokens_to_reach(tokens: Sequence[int], values: Sequence[float], level: float, better: Literal["lower", "higher"]) -> float:
    """The number of training tokens at which a metric first reaches `level`: linear in log tokens between the first evaluation that has
    reached it and the one before.

    Args:
        tokens: seen at each evaluation, ascending, above 0.
        values: of the metric then; evaluations that gave no finite value are left out.

    Returns:
        0: the first evaluation had reached it already; infinite: none did.
    """
    before: tuple[int, float] | None = None
    for at, value in zip(tokens, values, strict=True):
        if not math.isfinite(value):
            continue
        if has_learned(value, level, better):
            if before is None:
                return 0.0
            part = (before[1] - level) / (before[1] - value)
            return math.exp(math.log(before[0]) + part * math.log(at / before[0]))
        before = at, value
    return math.inf


def log_tokens(tokens: float) -> float:
    """The natural logarithm, -infinite of 0."""
    return math.log(tokens) if tokens else -math.inf


def factor(log_ratio: Interval | None) -> Interval | None:
    """The interval of a log ratio as that of the ratio."""
    with np.errstate(over="ignore"):
        return log_ratio and Interval(*map(float, np.exp(log_ratio.listed())), log_ratio.over)
