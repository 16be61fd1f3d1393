"""Verdicts on arms against one baseline: each word follows from one interval, and all intervals hold together with 95 %."""

import math
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from scipy.special import chdtri, nctdtr, ndtri, stdtrit

from lm.statistics.intervals import ALPHA, Estimate, Interval, over_seeds

POWER = 0.8
FEWEST_SEEDS = 3  # seeds of a verdict: the spread of two is off by a factor of up to 32 (95 %), that of three by up to 6
FEWEST_EXACT = 6  # seeds from which the sign-flip test can reach 0.05
MOST_EXACT = 30  # seeds up to which its p is worked out
MOST_SEEDS = 1000  # that `seeds_needed` counts to

Kind = Literal[
    "better", "worse", "difference below margin", "no difference above margin", "undecided", "incomplete", "not reached", "unstable",
    "not tuned",
]  # fmt: skip
UNTUNED = (
    "the best learning rate is at the edge of a grid that may not grow again, or every rate diverged",
    "no best learning rate inside the grid",
)  # the reason, and the few words of it
Name = TypeVar("Name", bound=Hashable)  # of an arm, or of an arm and its size


@dataclass(frozen=True)
class Comparison:
    """Measurements of an arm against the baseline, on the primary metric.

    Attributes:
        by_rates: arm minus baseline on the report text, one value a seed that both were trained with: (seeds,), or of several learning
            rates (the arm's rates, the baseline's rates, seeds). The claim is on both at their best (`hardest`).
        place: indices in `by_rates` of the pair of rates that are judged.
        diverged: final runs of either that diverged; they are counted, never dropped.
        shared: how many of the baseline's rates, the first, the arm was trained at, too: it is worse only if it is so against the baseline
            at one of these. None: all.
        every: the best rates are those of another metric than the one compared: the claim must hold at every pair.
        higher: of the metric more is better: an arm's best rate is that of its highest value, in place of its lowest.
        tuned: False if the best rate of either is at an edge of the grid.
        planned: seeds that were planned; None: these. Until all have ended there is no verdict.
        why: which runs diverged and how, in words.
        over_documents: (the arm's rates, the baseline's rates) the same over seeds and documents, where there are enough of both.
        unreached: which runs have no value, as they did not reach a level, in words: then there is no verdict.
    """

    by_rates: np.ndarray | Sequence[float]
    place: tuple[int, int] = (0, 0)
    diverged: int = 0
    shared: int | None = None
    every: bool = False
    higher: bool = False
    tuned: bool = True
    planned: int | None = None
    why: str = ""
    over_documents: Estimate | None = None
    unreached: str = ""

    @property
    def whole(self) -> bool:
        """Whether all planned seeds are there."""
        return self.planned is None or len(self.differences) >= self.planned

    @property
    def finite(self) -> bool:
        """Whether all differences are finite, at every pair of rates."""
        return bool(np.isfinite(self.by_rates).all())

    @cached_property
    def at_rates(self) -> np.ndarray:
        """The differences, (the arm's rates, the baseline's rates, seeds)."""
        return np.array(self.by_rates, dtype=float, ndmin=3)

    @cached_property
    def differences(self) -> np.ndarray:
        """The differences at the rates that are judged, (seeds,); those of runs without a value are left out."""
        judged = self.at_rates[self.place]
        return judged[np.isfinite(judged)] if self.unreached else judged

    @cached_property
    def estimates(self) -> Estimate:
        """The mean differences over seeds, (the arm's rates, the baseline's rates)."""
        return over_seeds(self.at_rates)

    def interval(self, family: int = 1) -> Interval:
        """The interval of the mean difference over seeds, of the arms at their best rates; so many intervals hold together with 95 %."""
        return self.enclosing(self.estimates, family)

    def enclosing(self, by_rates: Estimate, family: int = 1) -> Interval:
        """The interval of the difference between the arms at their best rates, of which so many hold together with 95 %.

        Args:
            by_rates: (the arm's rates, the baseline's), the difference at each pair; the interval is NaN where one is.
        """
        if self.higher:
            mirrored = replace(self, higher=False).enclosing(replace(by_rates, mean=-by_rates.mean), family)
            return replace(mirrored, mean=float(by_rates.mean[self.place]), low=0.0 - mirrored.high, high=0.0 - mirrored.low)  # no -0.0
        shown, both, every = by_rates[self.place].interval(family), by_rates[:, : self.shared], self.every
        own, others = (1, 1) if every else both.mean.shape
        high, low = hardest(by_rates.mean + by_rates.half(own * family), every), -hardest((both.half(others * family) - both.mean).T, every)
        return replace(shown, low=float(np.minimum(shown.low, low)), high=float(np.maximum(shown.high, high)))


@dataclass(frozen=True)
class Verdict:
    """A verdict on an arm.

    Attributes:
        kind: the verdict.
        reason: what it rests on, with the smallest difference of interest in it.
        interval: the interval of the difference from which the verdict follows: all intervals of the experiment hold together with 95 %;
            None with fewer than two seeds.
        alone: the 95 % interval of this difference taken alone, at all looks.
        p: two-sided, of no difference, times the number of comparisons; 1 where nothing was tested.
        p_exact: the same of the sign-flip test, which takes differences as symmetric in place of normal; None: too few or too many seeds.
        seeds_needed: numbers that find a difference that matters with probability `POWER`: by the spread as measured, and by the ends of
            its 95 % interval (chi squared). None: more than `MOST_SEEDS`; None in place of all: unknown.
        over_documents: as `interval`, over seeds and documents; None where there is none.
        exploratory: whether something was changed after results were there, so that p is too small.
        margin: the smallest difference of interest, in words; empty if runs learn or don't.
        beyond: whether every difference in the interval is of the margin or more.
        open: why there is no answer, in a few words; empty if there is one.
        seeds: number that the verdict rests on; 0: none was tested.
    """

    kind: Kind
    reason: str
    interval: Interval | None
    p: float
    seeds_needed: tuple[int | None, int | None, int | None] | None
    alone: Interval | None = None
    p_exact: float | None = None
    over_documents: Interval | None = None
    exploratory: bool = False
    margin: str = ""
    beyond: bool = False
    open: str = ""
    seeds: int = 0

    @property
    def label(self) -> str:
        """The kind for tables that programs read, and that it is exploratory if it is."""
        return f"{'exploratory: ' if self.exploratory else ''}{self.kind}"

    @property
    def statement(self) -> str:
        """The verdict in plain words with its margin, such as `no difference above 0.01`: the one place where a kind becomes words."""
        if self.open:
            return f"{self.kind}: {self.open}"
        if not self.margin:
            return f"learns {'more' if self.kind == 'better' else 'less'} often"
        if self.kind in ("better", "worse"):
            return f"{self.kind} by more than {self.margin}" if self.beyond else f"{self.kind}, perhaps by less than {self.margin}"
        return f"{'a ' if self.kind == 'difference below margin' else ''}{self.kind.removesuffix('margin')}{self.margin}"

    @property
    def words(self) -> str:
        """The statement with the number of seeds, and that it is exploratory if it is."""
        return f"{'exploratory: ' if self.exploratory else ''}{self.statement}" + (f" ({self.seeds} seeds)" if self.seeds else "")


def verdicts(comparisons: Mapping[Name, Comparison], matters: float, ratio: bool = False, looks: int = 1) -> dict[Name, Verdict]:
    """The verdict on each arm (or arm and size), all taken as one family.

    Each comparison has one interval, Student's t over seeds at a level of 0.05 / comparisons (Bonferroni), and its word follows from that
    interval alone: with 95 % all intervals hold the true differences, and then no word is false, of whatever kind. A comparison that
    can't be tested counts in the family.

    Args:
        comparisons: by name.
        matters: smallest difference of interest, in the metric's unit, settled before any run.
        ratio: differences are of natural logarithms, and `matters` is relative: 0.1 is a factor of 1.1 or 1 / 1.1.
        looks: how often the data may be judged: 2 with a planned second stage, of which each has half of the 0.05.

    Raises:
        ValueError: no `matters` above 0.
    """
    if not 0 < matters < math.inf:
        raise ValueError("the smallest difference of interest must be above 0 and finite")
    margin, amount = (math.log1p(matters), f"a factor of {1 + matters:g}") if ratio else (matters, f"{matters:g}")
    return {name: _verdict(comparison, margin, amount, len(comparisons), looks) for name, comparison in comparisons.items()}


def _verdict(comparison: Comparison, margin: float, amount: str, comparisons: int, looks: int) -> Verdict:
    family = comparisons * looks
    seeds, finite = len(comparison.differences), np.isfinite(comparison.differences).all()
    shown = seeds > 1 and not comparison.unreached
    interval = comparison.interval(family) if shown else None
    needed = _needed(comparison, margin, family) if seeds > 1 and finite else None
    both = comparison.over_documents
    tested = comparison.tuned and comparison.whole and not comparison.diverged and shown and seeds >= FEWEST_SEEDS and comparison.finite
    p = min(1.0, family * p_difference(comparison)) if tested else 1.0
    exact = p_exact(comparison) if tested else None

    def verdict(kind: Kind, reason: str, unanswered: str = "", beyond: bool = False) -> Verdict:
        return Verdict(
            kind, reason, interval, p, needed,
            alone=comparison.interval(looks) if shown else None,
            p_exact=None if exact is None else min(1.0, family * exact),
            over_documents=both and comparison.enclosing(both, family),
            margin=amount, beyond=beyond, open=unanswered, seeds=seeds if tested else 0,
        )  # fmt: skip

    if comparison.diverged:
        runs = f"{comparison.diverged} final run{'s' * (comparison.diverged > 1)} diverged"
        return verdict("unstable", f"{runs}{comparison.why and ': '}{comparison.why}", runs)
    if not finite:
        return verdict("unstable", "a difference is not finite", "a difference is not finite")
    if not comparison.tuned:
        return verdict("not tuned", *UNTUNED)
    if comparison.unreached:
        return verdict("not reached", comparison.unreached, "runs have no number of tokens")
    if not comparison.whole:
        ended = f"{seeds} of {comparison.planned} seeds have ended"
        return verdict("incomplete", ended, ended)
    if seeds < FEWEST_SEEDS:
        few = f"a verdict takes {FEWEST_SEEDS} seeds"
        return verdict("incomplete", f"{seeds} seeds in common: a verdict takes at least {FEWEST_SEEDS}", few)
    if not comparison.finite:
        infinite = "a difference at another of the learning rates, all of which a verdict is on, is not finite"
        return verdict("undecided", infinite, "another learning rate has no finite difference")
    within = -margin < interval.low and interval.high < margin
    tied = comparison.estimates.error[comparison.place] == 0
    by = f" by the sign-flip test, as all {seeds} seeds differ by the same" if tied else ""
    if interval.low > 0 or interval.high < 0:
        if within:
            return verdict("difference below margin", f"the interval leaves out 0 and lies within {amount} (p = {p:.2g}{by})")
        beyond = min(abs(interval.low), abs(interval.high)) >= margin
        more = f" and every difference below {amount}" if beyond else ""
        kind = "better" if (interval.mean > 0) == comparison.higher else "worse"
        return verdict(kind, f"the interval leaves out 0{more} (p = {p:.2g}{by})", beyond=beyond)
    if within:
        return verdict("no difference above margin", f"the interval holds 0 and lies within {amount}{by}")
    if tied and not interval.bounded:
        few = "" if interval.mean == 0 else f", which so few can't bring to {ALPHA:g}"
        same = f"all {seeds} seeds differ by the same: p = {p:.2g} by the sign-flip test{few}"
        return verdict("undecided", same, "all seeds agree, and are too few")
    rates = ", over all rates that the arms were trained at," if comparison.at_rates[..., 0].size > 1 else ""
    beyond = f"the interval{rates} holds 0, and differences of more than {amount}"
    if tied:  # at the rates that are judged, where no spread says how many seeds it takes
        return verdict("undecided", beyond, "the interval is too wide")
    by_spread, fewest, most = (f"more than {MOST_SEEDS:,}" if number is None else f"{number:,}" for number in needed)
    more = f" ({fewest} to {most}, as the spread itself is known from few)" if fewest != most else ""
    finding = f"to find one of {amount} 4 times in 5 takes {by_spread} seeds{more}"
    return verdict("undecided", f"{beyond}; {finding}", "the interval is too wide")


def _needed(comparison: Comparison, margin: float, family: int) -> tuple[int | None, ...]:
    """Seeds with which a difference of `margin` is found, by the spread so far and by the ends of its 95 % interval."""
    seeds, spread = len(comparison.differences), float(np.std(comparison.differences, ddof=1))
    rates = 1 if comparison.every or comparison.unreached else max(comparison.at_rates[:, : comparison.shared].shape[:2])
    ends = (math.sqrt((seeds - 1) / chdtri(seeds - 1, tail)) for tail in (0.025, 0.975))
    return tuple(seeds_needed(spread * each, margin, ALPHA / family / rates) for each in (1.0, *ends))


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


def p_difference(comparison: Comparison) -> float:
    """Two-sided p of the paired t test of mean 0, of the arms at their best rates: it is at most 0.05 / family where `Comparison.interval`
    of that family leaves out 0. Without spread that of the sign-flip test; NaN where a difference is not finite."""
    estimates = comparison.estimates
    return _two_sided(comparison, estimates.p(0.0, 1), estimates.p(0.0, -1))


def p_exact(comparison: Comparison) -> float | None:
    """Two-sided p of the sign-flip test of mean 0, of the arms at their best rates: exact where differences are symmetric about 0 (Fisher
    1935); None with fewer than `FEWEST_EXACT` or more than `MOST_EXACT` seeds."""
    values = comparison.at_rates
    if not FEWEST_EXACT <= values.shape[-1] <= MOST_EXACT:
        return None
    return _two_sided(comparison, sign_flip(-values), sign_flip(values))


def _two_sided(comparison: Comparison, below: np.ndarray, above: np.ndarray) -> float:
    """The two-sided p of the arms at their best rates, from the one-sided p at each pair of rates, (the arm's, the baseline's): that the
    difference is not below 0, and that it is not above."""

    def claim(p: np.ndarray, place: tuple[int, int], shared: int | None) -> float:
        both = p[:shared]
        return float(np.maximum(p[place], hardest(both if comparison.every else np.minimum(1.0, len(both) * both), comparison.every)))

    if comparison.higher:
        below, above = above, below
    better, worse = claim(below, comparison.place, None), claim(above.T, comparison.place[::-1], comparison.shared)
    return float(np.minimum(1.0, 2 * np.minimum(better, worse)))


def sign_flip(values: np.ndarray) -> np.ndarray:
    """One-sided p, (...,), that the mean of (..., seeds) is not above 0: the fraction of the 2^seeds choices of their signs whose sum is at
    least as high. Sums of each half of the seeds are sorted, so that no more than 2^(seeds / 2) are kept."""
    values = np.asarray(values, dtype=float)
    *outer, seeds = values.shape
    if outer:
        return np.array([sign_flip(each) for each in values])
    first, second = (
        (1 - 2 * (np.arange(2 ** len(half))[:, None] >> np.arange(len(half)) & 1)) @ half for half in np.array_split(values, 2)
    )
    second = np.sort(second)
    least = values.sum() - 1e-12 * np.abs(values).sum()  # equal sums stay equal when they are added in another order
    return (len(second) - np.searchsorted(second, least - first)).sum() / 2**seeds


def power(seeds: int, spread: float, difference: float, alpha: float = ALPHA) -> float:
    """The probability that a mean `difference` is found at `alpha`; `spread`: the standard deviation of single differences."""
    if spread == 0:  # the sign-flip test decides
        return float(bool(difference) and 2.0 ** (1 - seeds) <= alpha)
    critical, shift = stdtrit(seeds - 1, 1 - alpha / 2), abs(difference) / spread * math.sqrt(seeds)
    below, at_most = np.fmax(nctdtr(seeds - 1, shift, [-critical, critical]), 0)  # NaN where they are too small to be represented
    return float(1 - at_most + below)


def seeds_needed(spread: float, difference: float, alpha: float = ALPHA) -> int | None:
    """The fewest seeds, at least `FEWEST_SEEDS`, with which `power` is `POWER`; None: more than `MOST_SEEDS`."""
    known = (ndtri(1 - alpha / 2) + ndtri(POWER)) * spread / abs(difference)  # its square: of a test that knows the spread, and takes fewer
    some = range(max(FEWEST_SEEDS, math.floor(min(known, MOST_SEEDS) ** 2)), MOST_SEEDS + 1)
    fewest = bisect_left(some, True, key=lambda seeds: power(seeds, spread, difference, alpha) >= POWER)
    return some[fewest] if fewest < len(some) else None
