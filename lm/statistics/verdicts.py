"""Verdicts on arms against one baseline: what paired differences over seeds show, all comparisons taken together."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from scipy.special import nctdtr, ndtri, stdtr, stdtrit

from lm.statistics.intervals import Estimate, Interval, over_seeds

ALPHA = 0.05  # the chance of any false verdict of difference over all comparisons, and that of any of equivalence
POWER = 0.8
FEWEST_SEEDS = 3  # seeds of a verdict `better` or `worse`
FEWEST_EQUIVALENT = 5  # seeds of a verdict that what there is does not matter
MOST_SEEDS = 1000  # that `seeds_needed` counts to

Kind = Literal[
    "better", "worse", "different but below what matters", "equivalent", "not resolved", "depends on the rate", "unstable", "not tuned"
]
Name = TypeVar("Name", bound=Hashable)  # of an arm, or of an arm and its size


@dataclass(frozen=True)
class Comparison:
    """What was measured of an arm against the baseline, on the primary metric.

    Attributes:
        differences: (seeds,) arm minus baseline, each at its own learning rate, on the report text: one value a seed that both were
            trained with.
        diverged: final runs of either that diverged; they are counted, never dropped.
        by_rates: (the arm's rates, the baseline's rates, seeds) where they were trained at several: differences over the same seeds at each
            pair of rates; the claim is on both at their best, which is their lowest (`hardest`).
        place: of `differences` among these.
        shared: how many of the baseline's rates, the first, the arm was trained at, too: it is worse only if it is so against the baseline
            at one of these. None: all.
        every: the best rates are those of another metric than the one compared: the claim must hold at every pair.
        elsewhere: differences with both at another learning rate, one value a seed (`lm.statistics.tuning.elsewhere`).
        tuned: False if the best rate of either is at an edge of the grid.
        planned: seeds that were planned; None: these. Until all have ended there is no verdict.
        why: which runs diverged and how, in words.
        over_documents: the difference with its interval over seeds and documents, where there are enough of both.
        unreached: which runs have no value, as they did not reach a level, in words: then there is no verdict.
    """

    differences: Sequence[float]
    diverged: int = 0
    by_rates: np.ndarray | None = None
    place: tuple[int, int] = (0, 0)
    shared: int | None = None
    every: bool = False
    elsewhere: Mapping[float, Sequence[float]] = field(default_factory=dict)
    tuned: bool = True
    planned: int | None = None
    why: str = ""
    over_documents: Interval | None = None
    unreached: str = ""

    @property
    def whole(self) -> bool:
        """Whether all planned seeds are there."""
        return self.planned is None or len(self.differences) >= self.planned

    @property
    def finite(self) -> bool:
        """Whether all differences are finite, at every pair of rates."""
        return all(np.isfinite(some).all() for some in (self.differences, self.by_rates) if some is not None)

    @cached_property
    def estimates(self) -> Estimate:
        """Over seeds, (the arm's rates, the baseline's)."""
        return over_seeds(np.array(self.differences)[None, None] if self.by_rates is None else self.by_rates)

    @property
    def interval(self) -> Interval:
        """Of the mean difference over seeds, of the arms at their best rates."""
        return enclosing(self.estimates, self.place, self.every, self.shared)


@dataclass(frozen=True)
class Verdict:
    """What may be said of an arm.

    Attributes:
        kind: the verdict in words.
        reason: what it rests on.
        interval: of the difference, Student t over seeds, not adjusted for other comparisons; None with fewer than two seeds.
        p: two-sided, of no difference, adjusted after Holm over all comparisons; 1 where nothing was tested.
        p_equivalent: of a difference that matters, adjusted likewise.
        seeds_needed: for a difference that matters to be found with probability `POWER`, judged by the spread so far; None: unknown.
        over_documents: the difference with its interval over seeds and documents; None where there is none.
        exploratory: seeds that were added after the first start, or planned then and left out: p is too small.
    """

    kind: Kind
    reason: str
    interval: Interval | None
    p: float
    p_equivalent: float
    seeds_needed: int | None
    over_documents: Interval | None = None
    exploratory: tuple[int, ...] = ()

    @property
    def words(self) -> str:
        """The verdict, and that it is exploratory if it is."""
        return f"exploratory: {self.kind}" if self.exploratory else self.kind


def verdicts(
    comparisons: Mapping[Name, Comparison], matters: float, better: Literal["lower", "higher"], ratio: bool = False
) -> dict[Name, Verdict]:
    """The verdict on each arm (or arm and size), all taken as one family.

    Paired t tests of no difference, and two one-sided t tests (Schuirmann 1987) of |difference| >= `matters`; Holm's (1979) adjustment
    over all comparisons, of each kind of test apart. One that can't be tested counts in the family with p = 1.

    Args:
        comparisons: by name.
        matters: smallest difference of interest, in the metric's unit, settled before any run.
        better: which direction of the metric is better.
        ratio: differences are of natural logarithms, and `matters` is relative: 0.1 is a factor of 1.1 or 1 / 1.1.

    Raises:
        ValueError: no `matters` above 0.
    """
    if not 0 < matters < math.inf:
        raise ValueError("the smallest difference of interest must be above 0 and finite")
    margin, amount = (math.log1p(matters), f"a factor of {1 + matters:g}") if ratio else (matters, f"{matters:g}")
    tested = {name: _testable(one) for name, one in comparisons.items()}
    differs = holm([p_difference(one) if tested[name] else 1.0 for name, one in comparisons.items()])
    alike = holm([p_equivalence(one, margin) if tested[name] else 1.0 for name, one in comparisons.items()])
    return {
        name: _verdict(one, p, q, margin, amount, better, len(comparisons))
        for (name, one), p, q in zip(comparisons.items(), differs, alike, strict=True)
    }


def _testable(one: Comparison) -> bool:
    if not one.tuned or not one.whole or one.diverged or one.unreached:
        return False
    return len(one.differences) >= FEWEST_SEEDS and one.finite


def _verdict(one: Comparison, p: float, q: float, margin: float, amount: str, better: str, family: int) -> Verdict:
    seeds = len(one.differences)
    interval = one.interval if seeds > 1 and not one.unreached else None
    spread = float(np.std(one.differences, ddof=1)) if seeds > 1 and np.isfinite(one.differences).all() else None
    together = 1 if one.every or one.by_rates is None else max(one.by_rates[:, : one.shared].shape[:2])
    needed = None if spread is None else seeds_needed(spread, margin, ALPHA / family / together)

    def verdict(kind: Kind, reason: str) -> Verdict:
        return Verdict(kind, reason, interval, p, q, needed, one.over_documents)

    if one.diverged or not np.isfinite(one.differences).all():
        return verdict(
            "unstable", f"{one.diverged} final runs diverged{one.why and ': '}{one.why}" if one.diverged else "a difference is not finite"
        )
    if not one.tuned:
        return verdict("not tuned", "the best learning rate is at the edge of a grid that may not grow again, or every rate diverged")
    if one.unreached:
        return verdict("not resolved", one.unreached)
    if not one.whole:
        return verdict("not resolved", f"{seeds} of {one.planned} seeds have ended")
    if seeds < FEWEST_SEEDS:
        return verdict("not resolved", f"{seeds} seeds in common: a verdict needs at least {FEWEST_SEEDS}")
    if not one.finite:
        return verdict("not resolved", "a difference at another of the learning rates, all of which a verdict is on, is not finite")
    mean = interval.mean
    if p <= ALPHA:
        if q <= ALPHA and seeds >= FEWEST_EQUIVALENT:
            return verdict("different but below what matters", f"within {amount} of the baseline (p = {q:.2g})")
        if turned := other_sign(mean, one.elsewhere):
            at = " and ".join(f"{rate:g}" for rate in turned)
            return verdict("depends on the rate", f"the difference has the other sign with both at rate {at}")
        return verdict("better" if (mean < 0) == (better == "lower") else "worse", f"p = {p:.2g} over {seeds} seeds")
    if q <= ALPHA and seeds >= FEWEST_EQUIVALENT:
        return verdict("equivalent", f"within {amount} of the baseline (p = {q:.2g} over {seeds} seeds)")
    if p_difference(Comparison(one.differences)) <= ALPHA / family < p_difference(one):
        return verdict("not resolved", "the difference is not shown at the other rates that the arms were trained at")
    if needed is not None and needed <= seeds:
        more = f"; equivalence takes {FEWEST_EQUIVALENT} seeds or more" if seeds < FEWEST_EQUIVALENT else ""
        return verdict("not resolved", f"neither a difference (p = {p:.2g}) nor equivalence (p = {q:.2g}) is shown{more}")
    how_many = f"more than {MOST_SEEDS}" if needed is None else f"{needed}"
    return verdict("not resolved", f"finding a difference of {amount} 4 times in 5 takes {how_many} seeds, by the spread of these {seeds}")


def other_sign(mean: float, elsewhere: Mapping[float, Sequence[float]]) -> list[float]:
    """The learning rates at which the mean difference has not the sign of `mean`: where there are `FEWEST_SEEDS` seeds or more, by a t test
    at `ALPHA` alone, else by the mean as it is."""
    found = []
    for rate, some in elsewhere.items():
        if not len(some) or mean * float(np.mean(some)) > 0:
            continue
        if len(some) < FEWEST_SEEDS or not np.isfinite(some).all() or p_difference(Comparison(some)) <= ALPHA:
            found.append(rate)
    return found


def hardest(values: np.ndarray, every: bool) -> float:
    """How far a claim on two arms at their best rates is from being shown.

    One is better than the other at its best if, for each rate of the other, it is better at one of its own. Over its own rates that is
    the least p, times their number (Bonferroni): the seeds that are tested may choose the rate, and it is paid for. Over the other's
    rates it is the greatest p (an intersection-union test, Berger 1982).

    Args:
        values: (its own rates, the other's), p or an end of an interval, each of as many together as are its own rates.
        every: the greatest of all pairs; each is then one alone.
    """
    return float(values.max() if every else values.min(0).max())


def enclosing(by_rates: Estimate, place: tuple[int, int], every: bool, shared: int | None = None) -> Interval:
    """The interval of the difference between two arms at their best rates: from that of one pair of rates and those of all, (the one's,
    the other's); NaN where one of these is. `every`: as of `hardest`; `shared`: as of `Comparison`, for the lower end."""
    one, both = by_rates[place].interval(), by_rates[:, :shared]
    own, others = (1, 1) if every else both.mean.shape
    high, low = hardest(by_rates.mean + by_rates.half(own), every), -hardest((both.half(others) - both.mean).T, every)
    return replace(one, low=float(np.minimum(one.low, low)), high=float(np.maximum(one.high, high)))


def p_difference(one: Comparison) -> float:
    """Two-sided p of the paired t test of mean 0, of the arms at their best rates. Differences that are all the same have p 0, or 1 where
    they are 0; NaN where one is not finite."""
    return float(np.minimum(1.0, 2 * np.minimum(_p_below(one, 0.0), _p_above(one, 0.0))))


def p_equivalence(one: Comparison, matters: float) -> float:
    """The greater p of the two one-sided t tests of a mean at or beyond -matters, and at or beyond +matters; NaN as in `p_difference`."""
    return float(np.maximum(_p_below(one, matters), _p_above(one, -matters)))


def _p_below(one: Comparison, at: float) -> float:
    """One-sided, that the difference is at or above a value."""
    p = _p(one.estimates, at, 1)
    return float(np.maximum(p[one.place], hardest(p if one.every else np.minimum(1.0, len(p) * p), one.every)))


def _p_above(one: Comparison, at: float) -> float:
    """One-sided, that the difference is at or below a value."""
    p = _p(one.estimates, at, -1).T
    both = p[: one.shared]
    return float(np.maximum(p[one.place[::-1]], hardest(both if one.every else np.minimum(1.0, len(both) * both), one.every)))


def _p(estimate: Estimate, at: float, sign: int) -> np.ndarray:
    """One-sided p of each, (...,): that its mean is not below (`sign` 1), or not above (-1), a value."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = sign * (estimate.mean - at)
        return stdtr(estimate.degrees, np.where(distance == 0, 0.0, distance / estimate.error))


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted so that rejecting those at most alpha keeps the chance of any false rejection at alpha (Holm 1979)."""
    order, adjusted, highest = np.argsort(p, kind="stable"), [1.0] * len(p), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = float(highest)
    return adjusted


def power(seeds: int, spread: float, difference: float, alpha: float = ALPHA) -> float:
    """The probability that a paired t test at `alpha` finds a mean `difference`; `spread`: the standard deviation of single differences."""
    if spread == 0:
        return 1.0 if difference else alpha
    critical, shift = stdtrit(seeds - 1, 1 - alpha / 2), abs(difference) / spread * math.sqrt(seeds)
    below, at_most = np.fmax(nctdtr(seeds - 1, shift, [-critical, critical]), 0)  # NaN where they are too small to be represented
    return float(1 - at_most + below)


def seeds_needed(spread: float, difference: float, alpha: float = ALPHA) -> int | None:
    """The fewest seeds, at least `FEWEST_SEEDS`, with which `power` is `POWER`; None: more than `MOST_SEEDS`."""
    known = (ndtri(1 - alpha / 2) + ndtri(POWER)) * spread / abs(difference)  # its square: of a test that knows the spread, and takes fewer
    some = range(max(FEWEST_SEEDS, math.floor(min(known, MOST_SEEDS) ** 2)), MOST_SEEDS + 1)
    return next((seeds for seeds in some if power(seeds, spread, difference, alpha) >= POWER), None)
