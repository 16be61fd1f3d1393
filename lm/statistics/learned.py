"""Compare fractions of runs that reach a level of a metric, by Fisher's exact test, and find the training tokens that
each run needed.
"""

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
    """The numbers of runs that have learned (`has_learned`), for an arm and the baseline."""

    # (runs of the arm, runs of the baseline) that have learned, for each pair of learning rates. The judged pair comes
    # first, then all pairs of rates that the two were trained at. Each pair must show the difference. A run that
    # diverged has not learned
    learned_pairs: Sequence[tuple[int, int]]
    n_ended_seeds: int  # number of seeds whose runs have all ended, in both arms
    n_diverged_runs: int = 0  # number of runs that diverged, of both arms
    is_tuned: bool = True  # False if the best rate of either arm is at an edge of the grid
    n_planned_seeds: int = 0  # number of planned seeds

    @property
    def p(self) -> list[float]:
        """p of Fisher's test at each pair of learning rates; 1 where the difference has another sign than at the first
        pair.
        """
        first_sign, n = np.sign(np.subtract(*self.learned_pairs[0])), self.n_ended_seeds
        return [fisher_exact(a, n, b, n) if np.sign(a - b) == first_sign else 1.0 for a, b in self.learned_pairs]


def learned_verdicts(counts: Mapping[Name, LearnedCounts], looks: int = 1) -> dict[Name, Verdict]:
    """The verdict on each arm (or arm and size, as in `verdicts`) by Fisher's exact test of equal probabilities of
    learning.

    p is multiplied by the number of comparisons and by `looks`, how often the data may be judged. There is no verdict
    of equivalence, as a handful of runs can't show that two probabilities are equal.

    Fisher's test takes the runs of both arms as independent, although they share seeds. McNemar's test pairs the runs,
    but counts only seeds with which one arm has learned and the other has not, and can't reach 0.05 with fewer than 6
    such seeds. A seed that is good or bad for both arms makes their results more alike. Equal arms then differ less
    often than Fisher's test allows for, so that the test is conservative.
    """
    family = max(1, len(counts)) * looks
    min_seeds = fewest_seeds(ALPHA / family)
    return {name: _verdict(arm, family, min_seeds) for name, arm in counts.items()}


def _verdict(counts: LearnedCounts, family: int, min_seeds: int) -> Verdict:
    (arm_count, base_count), seeds = counts.learned_pairs[0], counts.n_ended_seeds
    is_tested = counts.is_tuned and seeds >= counts.n_planned_seeds
    p = min(1.0, family * max(counts.p)) if is_tested else 1.0
    finding = f"{arm_count} of {seeds} have learned, {base_count} of {seeds} of the baseline"
    finding += f"; {counts.n_diverged_runs} diverged, and count as not learned" if counts.n_diverged_runs else ""
    kind, reason, open_reason = (
        "undecided",
        f"{finding}; Fisher's exact test: p = {p:.2g}",
        "no arm is shown to learn more often",
    )
    if not counts.is_tuned:
        kind, (reason, open_reason) = "not tuned", UNTUNED
    elif not is_tested:
        kind, reason = "incomplete", f"{seeds} of {counts.n_planned_seeds} seeds have ended"
        open_reason = reason
    elif p <= ALPHA:
        kind, open_reason = "better" if arm_count > base_count else "worse", ""
    elif family * counts.p[0] <= ALPHA:
        reason = f"{finding}; but not so at the other rates that the arms were trained at"
    elif seeds < min_seeds:
        reason = f"{finding}; Fisher's exact test can show a difference from {min_seeds} seeds on"
    return Verdict(
        kind,
        reason,
        None,
        p,
        (min_seeds, min_seeds, min_seeds),
        open_reason=open_reason,
        seeds=seeds if is_tested else 0,
    )


def fisher_exact(successes: int, runs: int, base_successes: int, base_runs: int) -> float:
    """Two-sided p of equal success probabilities of an arm and the baseline (Fisher 1935); 1 where either has no runs.

    It is the probability of all 2 x 2 tables with the same margins that are no likelier than the observed table,
    computed in integers.
    """
    total = successes + base_successes
    counts = range(max(0, total - base_runs), min(runs, total) + 1)
    n_selections = {count: math.comb(runs, count) * math.comb(base_runs, total - count) for count in counts}
    return sum(n for n in n_selections.values() if n <= n_selections[successes]) / math.comb(runs + base_runs, total)


def fewest_seeds(alpha: float) -> int:
    """The fewest seeds with which `fisher_exact` gives `alpha` or less if all runs of one arm have learned, and no run
    of the other arm.
    """
    return next(seeds for seeds in range(1, 1000) if fisher_exact(seeds, seeds, 0, seeds) <= alpha)


def clopper_pearson(successes: int, runs: int) -> Interval:
    """The fraction of runs that succeed, with an interval whose coverage is at least 95 % (Clopper and Pearson
    1934).
    """
    if not runs:
        return Interval(np.nan, np.nan, np.nan, "0 seeds")
    low = betaincinv(successes, runs - successes + 1, 0.025) if successes else 0.0
    high = betaincinv(successes + 1, runs - successes, 0.975) if successes < runs else 1.0
    return Interval(successes / runs, float(low), float(high), f"{runs} seeds")


def has_learned(value: float, level: float, better: Literal["lower", "higher"]) -> bool:
    """Whether `value` is at least as good as `level`; False if `value` is not finite."""
    return math.isfinite(value) and (value <= level if better == "lower" else value >= level)


# ---------------------------------------------------------------- tokens at which a level is reached


def tokens_to_reach(
    tokens: Sequence[int], values: Sequence[float], level: float, better: Literal["lower", "higher"]
) -> float:
    """The number of training tokens at which a metric first reaches `level`, interpolated linearly in log tokens
    between the first evaluation that has reached it and the evaluation before.

    Args:
        tokens: tokens seen at each evaluation, ascending, above 0.
        values: the metric at each evaluation; values that are not finite are left out.

    Returns:
        The number of tokens; 0 if the first evaluation has reached the level already, infinite if no evaluation has.
    """
    evaluations = [(count, value) for count, value in zip(tokens, values, strict=True) if math.isfinite(value)]
    first_index = next(
        (index for index, (_, value) in enumerate(evaluations) if has_learned(value, level, better)), None
    )
    if not first_index:
        return math.inf if first_index is None else 0.0
    (tokens_before, value_before), (tokens_after, value_after) = evaluations[first_index - 1 : first_index + 1]
    fraction = (value_before - level) / (value_before - value_after)
    return math.exp(math.log(tokens_before) + fraction * math.log(tokens_after / tokens_before))


def log_tokens(tokens: float) -> float:
    """The natural logarithm of a number of tokens; minus infinity for 0."""
    return math.log(tokens) if tokens else -math.inf


def factor(log_ratio: Interval | None) -> Interval | None:
    """The interval of a ratio, from the interval of the ratio's natural logarithm; None stays None."""
    with np.errstate(over="ignore"):
        return log_ratio and Interval(*map(float, np.exp(log_ratio.as_list())), log_ratio.noise_source)
