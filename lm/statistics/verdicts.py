"""Verdicts on arms against one baseline. Each verdict follows from one interval, and all intervals hold together with
95 %.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, nctdtr, ndtri, stdtrit

from lm.statistics.intervals import ALPHA, Estimate, Interval, bounded_ends, over_seeds, welch
from lm.statistics.joint import MAX_CORRELATION, Family, mean_correlation

POWER = 0.8  # probability with which a number of seeds must find a difference
# fewest seeds of a verdict: a spread estimated from two seeds is off by a factor of up to 32 (95 %), from three by up
# to 6
MIN_SEEDS = 3
MIN_SIGN_FLIP_SEEDS = 6  # seeds from which the sign-flip test can reach 0.05
MAX_SIGN_FLIP_SEEDS = 30  # seeds up to which p of the sign-flip test is computed
MAX_SEEDS = 1000  # number of seeds that `seeds_needed` counts to
_NOT_0 = 1e-9  # end of an interval that leaves out 0 and says no more

VerdictKind = Literal[
    "better", "worse", "difference below margin", "no difference above margin", "undecided", "incomplete",
    "not reached", "unstable", "not tuned", "not learned",
]  # fmt: skip
# the reason, and the reason in a few words
UNTUNED = (
    "the best learning rate is at the edge of a grid that may not grow again, or every rate diverged: give tune.grid "
    "other values",
    "no best learning rate inside the grid",
)
Name = TypeVar("Name", bound=Hashable)  # name of an arm, or of an arm and its size


@dataclass(frozen=True)
class Comparison:
    """The differences between an arm and the baseline in the primary metric, with the facts about runs that decide the
    verdict.
    """

    # arm minus baseline on the reporting documents, one value a seed that both were trained with: (seeds,), or for
    # several learning rates (the arm's rates, the baseline's rates, seeds). The claim is about both arms at their best
    # rates (`combine_over_rates`)
    rate_differences: np.ndarray | Sequence[float]
    judged_pair: tuple[int, int] = (0, 0)  # indices in `rate_differences` of the pair of rates that are judged
    n_diverged_runs: int = 0  # number of final runs of either arm that diverged; they are counted, never dropped
    # number of the baseline's rates, from the first on, that the arm was trained at, too. The arm is worse only if it
    # is worse than the baseline at one of these rates. None: all rates
    n_shared_rates: int | None = None
    # whether the claim must hold at every pair of rates, since the best rates were chosen by another metric
    all_pairs: bool = False
    # whether higher values of the metric are better: an arm's best rate is then the rate of its highest value
    higher_is_better: bool = False
    is_tuned: bool = True  # False if the best rate of either arm is at an edge of the grid
    # number of planned seeds; 0: the seeds in `rate_differences`. Until all have ended there is no verdict
    n_planned_seeds: int = 0
    divergence: str = ""  # the runs that diverged, and how, in words
    # (the arm's rates, the baseline's rates), the estimates over seeds and documents, where there are enough of both
    document_estimate: Estimate | None = None
    # values of the arm, (its rates, its seeds), and of the baseline, where their runs are not paired. The pairs in
    # `rate_differences` are then arbitrary, and as many as the smaller number of seeds
    unpaired_values: tuple[np.ndarray, np.ndarray] | None = None
    # the runs that have no value because they did not reach a level, in words; with such runs there is no verdict
    unreached_runs: str = ""
    # the least and the greatest possible value: of a difference, or of an arm's runs where they are not paired. None:
    # values have no such bounds
    bounds: tuple[float, float] | None = None
    not_learned: str = ""  # the level that no run of either arm is better than, in words; empty if a run is

    @cached_property
    def rate_difference_array(self) -> np.ndarray:
        """The differences as an array, (the arm's rates, the baseline's rates, seeds)."""
        return np.array(self.rate_differences, dtype=float, ndmin=3)

    @cached_property
    def has_single_rates(self) -> bool:
        """Whether both arms have one learning rate each."""
        return self.rate_difference_array[..., 0].size == 1

    @cached_property
    def is_finite(self) -> bool:
        """Whether all differences at the judged rates are finite."""
        return bool(np.isfinite(self.differences).all())

    @cached_property
    def is_testable(self) -> bool:
        """Whether the verdict follows from the interval: runs have ended, learned, and are finite at every rate."""
        blocks = self.n_diverged_runs or self.unreached_runs or self.not_learned or not self.is_tuned
        seeds = len(self.differences)
        return (
            not blocks
            and seeds >= max(MIN_SEEDS, self.n_planned_seeds)
            and bool(np.isfinite(self.rate_difference_array).all())
        )

    @cached_property
    def differences(self) -> np.ndarray:
        """Each seed's difference between arm and baseline at the rates of `judged_pair`, (seeds,).

        Seeds are left out if a run never reached the level of the metric that `primary.reach` asks for
        (`unreached_runs`).
        """
        values = self.rate_difference_array[self.judged_pair]
        return values[np.isfinite(values)] if self.unreached_runs else values

    @cached_property
    def estimates(self) -> Estimate:
        """The mean differences over seeds and their errors, (the arm's rates, the baseline's rates)."""
        return over_seeds(self.rate_difference_array) if self.unpaired_values is None else welch(*self.unpaired_values)

    def interval(self, alpha: float = ALPHA) -> Interval:
        """The interval over seeds of the difference between arms at their best rates; it misses the true difference
        with probability `alpha`.
        """
        return self.enclosing(self.estimates, alpha)

    def enclosing(self, estimates: Estimate, alpha: float = ALPHA) -> Interval:
        """The same interval as `interval`, but from any estimates, such as estimates over seeds and documents. It
        contains the interval at `judged_pair`. Ends of the interval that depend on a NaN are NaN.

        estimates: the estimate at each pair of rates, (the arm's rates, the baseline's rates).
        """
        low, high = self._over_rates(lambda alpha: self.t_ends(estimates, alpha), alpha)
        if self.bounds:
            low, high = self.guarded_ends(low, high, *self._over_rates(self.bounded_ends, alpha))
        return Interval(float(estimates.mean[self.judged_pair]), float(low), float(high), estimates.noise_source)

    def _over_rates(self, ends: Callable[[float], tuple[np.ndarray, np.ndarray]], alpha: float) -> tuple[float, float]:
        """The ends of the interval at the arms' best rates. `ends` gives those at each pair of rates, for an alpha."""
        if self.higher_is_better and self.rate_difference_array[..., 0].size > 1:
            mirror = replace(self, higher_is_better=False)
            low, high = mirror._over_rates(lambda alpha: tuple(-end for end in reversed(ends(alpha))), alpha)
            return 0.0 - high, 0.0 - low  # no -0.0
        low, high = (end[self.judged_pair] for end in ends(alpha))
        if self.rate_difference_array[..., 0].size == 1:
            return low, high
        shared = slice(self.n_shared_rates)
        arm_rates, base_rates = (1, 1) if self.all_pairs else self.rate_difference_array[:, shared, 0].shape
        highest = combine_over_rates(ends(alpha / arm_rates)[1], self.all_pairs)
        lowest = -combine_over_rates(-ends(alpha / base_rates)[0][:, shared].T, self.all_pairs)
        return np.minimum(low, lowest), np.maximum(high, highest)

    def t_ends(self, estimates: Estimate, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the interval of each mean by Student's t.

        Where all seeds agree in a bounded metric, the exact test says whether 0 is left out, and no more: the end that
        is next to 0 is then `bounded_ends`.
        """
        half = estimates.half_width(alpha)
        low, high = estimates.mean - half, estimates.mean + half
        if self.bounds and (is_tied := estimates.error == 0).any():
            # half as large a tail as that of an end on the far side of 0
            (bounded_low, bounded_high), without_0 = self.bounded_ends(alpha / 2), half == 0
            near_low, near_high = np.maximum(bounded_low, _NOT_0), np.minimum(bounded_high, -_NOT_0)
            tied_low = np.where(without_0 & (estimates.mean > 0), near_low, np.minimum(estimates.mean, 0))
            tied_high = np.where(without_0 & (estimates.mean < 0), near_high, np.maximum(estimates.mean, 0))
            low, high = np.where(is_tied, tied_low, low), np.where(is_tied, tied_high, high)
        return low, high

    def bounded_ends(self, alpha: float) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the interval of each mean of a bounded metric, at each pair of rates, whatever the distribution;
        either misses the true mean with probability `alpha`.
        """
        if self.unpaired_values is None:
            return bounded_ends(self.rate_difference_array, *self.bounds, alpha)
        (low, high), (base_low, base_high) = (
            bounded_ends(values, *self.bounds, alpha / 2) for values in self.unpaired_values
        )
        return low[:, None] - base_high, high[:, None] - base_low

    def fewest_agreeing_seeds(self, margin: float, alpha: float) -> int:
        """The fewest seeds whose `bounded_ends` can lie within `margin`: all agree, and (1 - margin)^seeds is at most
        `alpha` for an accuracy (half of it where runs are unpaired). 0 without bounds.
        """
        if self.bounds is None:
            return 0
        reach, tail = (max(map(abs, self.bounds)), alpha) if self.unpaired_values is None else (1.0, alpha / 2)
        return 0 if margin >= reach else math.floor(math.log(tail) / math.log1p(-margin / reach)) + 1

    def guarded_ends(
        self, low: np.ndarray, high: np.ndarray, bounded_low: np.ndarray, bounded_high: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ends by Student's t, reaching as far as `bounded_ends` where they don't leave out 0, within the bounds.

        That there is a difference rests on Student's t. That there is none above a margin takes enough seeds to see
        an arm that fails in some of them. An end on the far side of 0 may miss with the whole `alpha`, as the truth is
        on one side.
        """
        least, greatest = self.bounds if self.unpaired_values is None else (-np.ptp(self.bounds), np.ptp(self.bounds))
        low = np.where(low > 0, low, np.maximum(np.minimum(low, bounded_low), least))
        return low, np.where(high < 0, high, np.minimum(np.maximum(high, bounded_high), greatest))


@dataclass(frozen=True)
class Verdict:
    """The verdict on an arm against the baseline."""

    kind: VerdictKind
    reason: str  # the facts that the verdict rests on, with the smallest difference of interest
    # the interval of the difference, from which the verdict follows. All intervals of the experiment hold together with
    # 95 %. None with fewer than two seeds
    interval: Interval | None
    p: float  # two-sided p of no difference, times the number of comparisons; 1 where nothing was tested
    # numbers of seeds that find a difference that matters with probability `POWER`: for the measured spread, and for
    # the ends of its 95 % interval (chi squared). A number is None above `MAX_SEEDS`; None in place of all three:
    # unknown
    seeds_needed: tuple[int | None, int | None, int | None] | None
    single_interval: Interval | None = None  # the 95 % interval of this difference by itself
    # the same p by the sign-flip test, which assumes symmetric differences, not normal ones; None: too few or too many
    # seeds
    p_exact: float | None = None
    # the interval over seeds and documents; None where there are too few seeds or documents
    document_interval: Interval | None = None
    exploratory: bool = False  # whether the plan was changed after results were known, so that p is too small
    # the smallest difference of interest, in words; empty if fractions of runs that learn are compared
    margin_text: str = ""
    exceeds_margin: bool = False  # whether every difference in the interval is at least the margin
    open_reason: str = ""  # the reason why there is no answer, in a few words; empty if there is an answer
    seeds: int = 0  # number of seeds that the verdict rests on; 0: nothing was tested

    @property
    def label(self) -> str:
        """The verdict's kind for tables that programs read, preceded by `exploratory: ` if the verdict is
        exploratory.
        """
        return f"{'exploratory: ' if self.exploratory else ''}{self.kind}"

    @property
    def statement(self) -> str:
        """The verdict in plain words with its margin, such as `no difference above 0.01`. No other code puts a kind
        into words.
        """
        if self.open_reason:
            return f"{self.kind}: {self.open_reason}"
        if self.kind in ("better", "worse"):
            return f"{self.kind}{' by more' if self.exceeds_margin else ', perhaps by less'} than {self.margin_text}"
        article = "a " if self.kind == "difference below margin" else ""
        return f"{article}{self.kind.removesuffix('margin')}{self.margin_text}"

    @property
    def words(self) -> str:
        """The `statement` with the seeds that it rests on, after `exploratory: ` if the verdict is exploratory."""
        return f"{'exploratory: ' if self.exploratory else ''}{self.statement}" + (
            f" ({self.interval.noise_source})" if self.seeds else ""
        )


def verdicts(comparisons: Mapping[Name, Comparison], matters: float, ratio: bool = False) -> dict[Name, Verdict]:
    """The verdict on each arm (or pair of an arm and one of the experiment's `sizes`), all comparisons taken as one
    family.

    Each comparison has one interval over seeds, by Student's t, at the level at which all intervals hold together with
    95 % (`family_of`). Its verdict follows from this interval alone. With a probability of 95 % all intervals contain
    the true differences, and then no verdict of any kind is false. A comparison that can't be tested counts in the
    family.

    Args:
        comparisons: the comparison of each arm with the baseline, by name.
        matters: smallest difference of interest, in the metric's unit, fixed before any run.
        ratio: differences are of natural logarithms, and `matters` is relative: 0.1 is a factor of 1.1 or 1 / 1.1.

    Raises ValueError unless `matters` is above 0 and finite.
    """
    if not 0 < matters < math.inf:
        raise ValueError("the smallest difference of interest must be above 0 and finite")
    margin, margin_text, null = (
        (math.log1p(matters), f"a factor of {1 + matters:g}", "1") if ratio else (matters, f"{matters:g}", "0")
    )
    family = family_of([*comparisons.values()])
    measurements = _measurements([*comparisons.values()], family)
    return {
        name: _verdict(comparison, measured, margin, margin_text, null, family)
        for (name, comparison), measured in zip(comparisons.items(), measurements, strict=True)
    }


def family_of(comparisons: Sequence[Comparison]) -> Family:
    """The joint distribution of comparisons, by which their intervals hold together.

    Comparisons of paired runs with equally many seeds are one group, as the baseline's noise is in all of them; their
    correlation is estimated cautiously (`mean_correlation`). Of unpaired runs, those that share a baseline are a group;
    its correlation follows from the variances (Dunnett 1955). Other comparisons count as independent: arms of several
    learning rates, and what can't be tested.
    """
    by_seeds, by_baseline = defaultdict[int, list[np.ndarray]](list), defaultdict[bytes, list[Comparison]](list)
    for comparison in comparisons:
        if comparison.is_testable and comparison.has_single_rates:
            if comparison.unpaired_values is None:
                by_seeds[len(comparison.differences)].append(comparison.differences)
            else:
                by_baseline[comparison.unpaired_values[1].tobytes()].append(comparison)
    groups = [
        (len(rows), seeds - 1, mean_correlation(np.array(rows))) for seeds, rows in by_seeds.items() if len(rows) > 1
    ]
    for group in by_baseline.values():
        variances = [[values.var(ddof=1) / values.size for values in item.unpaired_values] for item in group]
        arm, baseline = np.mean(variances, axis=0)
        correlation = min(baseline / (arm + baseline), MAX_CORRELATION) if baseline else 0.0
        degrees = min(float(item.estimates.degrees[0, 0]) for item in group)
        groups.append((len(group), degrees, correlation))
    return Family.of_groups(len(comparisons), groups)


@dataclass(frozen=True)
class _Measured:
    """What is measured of a comparison; None and NaN where it can't be."""

    interval: Interval | None = None  # it holds together with those of the family
    single_interval: Interval | None = None
    p: float = math.nan  # two-sided, of this comparison alone
    joint_p: float = 1.0
    exact_p: float | None = None  # as `p_exact`
    is_tied: bool = False  # whether all seeds agree
    spread: float | None = None  # standard deviation over seeds


def _measurements(comparisons: list[Comparison], family: Family) -> list[_Measured]:
    """What is measured of each comparison. A table may have thousands: those of one shape are computed together."""
    results, stacks = [_Measured()] * len(comparisons), defaultdict[tuple, list[int]](list)
    for place, comparison in enumerate(comparisons):
        if len(comparison.differences) < 2 or comparison.unreached_runs:
            continue
        if comparison.has_single_rates:
            arm_values, base_values = comparison.unpaired_values or (np.empty(0), np.empty(0))
            shape = comparison.rate_difference_array.shape, arm_values.shape, base_values.tobytes()
            stacks[*shape, comparison.bounds].append(place)
            continue
        estimate = comparison.estimates[comparison.judged_pair]
        intervals, p = (comparison.interval(family.alpha), comparison.interval()), p_difference(comparison)
        is_tied = bool(estimate.error == 0)
        results[place] = _Measured(*intervals, p, float(family.joint_p(p)), p_exact(comparison), is_tied)
    for places in stacks.values():
        for place, measured in zip(places, _stack_measurements([comparisons[n] for n in places], family), strict=True):
            results[place] = measured
    return results


def _stack_measurements(comparisons: list[Comparison], family: Family) -> Iterator[_Measured]:
    """What is measured of comparisons of one rate each, with equally many seeds and, if unpaired, one baseline."""
    differences = np.concatenate([comparison.rate_difference_array for comparison in comparisons])
    stack = replace(comparisons[0], rate_differences=differences)  # as if each comparison were another rate of one arm
    if stack.unpaired_values:
        arm_values = np.concatenate([comparison.unpaired_values[0] for comparison in comparisons])
        stack = replace(stack, unpaired_values=(arm_values, stack.unpaired_values[1]))
    estimates = stack.estimates
    ends = []
    for alpha in dict.fromkeys((family.alpha, ALPHA)):
        low, high = stack.t_ends(estimates, alpha)
        if stack.bounds:
            low, high = stack.guarded_ends(low, high, *stack.bounded_ends(alpha))
        ends += [low, high]
    ends = (ends * 2)[:4]
    p = np.minimum(1.0, 2 * np.minimum(estimates.p(1), estimates.p(-1)))
    spread = estimates.error * math.sqrt(differences.shape[-1])
    columns = (estimates.mean, *ends, p, family.joint_p(p), estimates.error == 0, spread)
    rows = zip(*(column[:, 0].tolist() for column in columns), strict=True)
    for comparison, row in zip(comparisons, rows, strict=True):
        mean, low, high, low_alone, high_alone, single_p, joint_p, is_tied, deviation = row
        intervals = (Interval(mean, *pair, estimates.noise_source) for pair in ((low, high), (low_alone, high_alone)))
        yield _Measured(*intervals, single_p, joint_p, p_exact(comparison), is_tied, deviation)


def _verdict(
    comparison: Comparison, measured: _Measured, margin: float, margin_text: str, null: str, family: Family
) -> Verdict:
    seeds, is_paired, interval = len(comparison.differences), comparison.unpaired_values is None, measured.interval
    needed_seeds = (
        _seed_numbers(comparison, measured.spread, margin, family.alpha) if seeds > 1 and comparison.is_finite else None
    )
    documents = comparison.document_estimate
    document_interval = documents and comparison.enclosing(documents, family.alpha)

    def untested_verdict(
        kind: VerdictKind, reason: str, open_reason: str, p: float = 1.0, **tested: float | None
    ) -> Verdict:
        return Verdict(
            kind, reason, interval, p, needed_seeds, measured.single_interval, document_interval=document_interval,
            margin_text=margin_text, open_reason=open_reason, **tested,
        )  # fmt: skip

    if comparison.n_diverged_runs:
        runs = f"{comparison.n_diverged_runs} final run{'s' * (comparison.n_diverged_runs > 1)} diverged"
        return untested_verdict("unstable", f"{runs}{comparison.divergence and ': '}{comparison.divergence}", runs)
    if not comparison.is_finite:
        return untested_verdict("unstable", "a difference is not finite", "a difference is not finite")
    if not comparison.is_tuned:
        return untested_verdict("not tuned", *UNTUNED)
    if comparison.unreached_runs:
        return untested_verdict("not reached", comparison.unreached_runs, "runs have no number of tokens")
    if seeds < comparison.n_planned_seeds:
        progress = f"{seeds} of {comparison.n_planned_seeds} seeds have ended"
        return untested_verdict("incomplete", progress, progress)
    if seeds < MIN_SEEDS:
        reason = f"{seeds} seeds in common" if is_paired else f"an arm has {seeds} seeds"
        return untested_verdict("incomplete", reason, f"a verdict takes {MIN_SEEDS} seeds")
    if comparison.not_learned:
        return untested_verdict("not learned", comparison.not_learned, comparison.not_learned)
    if not comparison.is_testable:
        reason = "a difference at another of the learning rates, all of which a verdict is on, is not finite"
        return untested_verdict("undecided", reason, "another learning rate has no finite difference")
    p, exact_p = measured.joint_p, measured.exact_p

    def verdict(kind: VerdictKind, reason: str, open_reason: str = "", is_beyond_margin: bool = False) -> Verdict:
        adjusted_p = None if exact_p is None else min(1.0, family.size * exact_p)
        tested = {"p_exact": adjusted_p, "exceeds_margin": is_beyond_margin, "seeds": seeds}
        return untested_verdict(kind, reason, open_reason, p, **tested)

    is_within = -margin < interval.low and interval.high < margin
    is_tied = measured.is_tied
    exact_test, tie = "sign-flip test", f"all {seeds} seeds differ by the same"
    if not is_paired:
        exact_test, tie = "permutation test", "each arm's seeds agree"
    method = f" by the {exact_test}, as {tie}" if is_tied else "" if is_paired else " by Welch's t test"
    assumption = "" if is_tied else ", if seeds scatter alike to both sides"
    if interval.low > 0 or interval.high < 0:
        if is_within:
            return verdict(
                "difference below margin",
                f"the interval leaves out {null} and lies within {margin_text} (p = {p:.2g}{method}{assumption})",
            )
        is_beyond_margin = min(abs(interval.low), abs(interval.high)) >= margin
        addition = f" and every difference below {margin_text}" if is_beyond_margin else ""
        kind = "better" if (interval.mean > 0) == comparison.higher_is_better else "worse"
        return verdict(
            kind,
            f"the interval leaves out {null}{addition} (p = {p:.2g}{method}{assumption})",
            is_beyond_margin=is_beyond_margin,
        )
    if is_within:
        reason = f"the interval holds {null} and lies within {margin_text}{method}"
        return verdict("no difference above margin", f"{reason}{'' if comparison.bounds else assumption}")
    if is_tied and not interval.bounded:
        remark = "" if interval.mean == 0 else f", which so few can't bring to {ALPHA:g}"
        tie_reason = f"{tie}: p = {p:.2g} by the {exact_test}{remark}"
        return verdict("undecided", tie_reason, "all seeds agree, and are too few")
    rates = (
        ", over all rates that the arms were trained at," if comparison.rate_difference_array[..., 0].size > 1 else ""
    )
    finding = f"the interval{rates} holds {null}, and differences of more than {margin_text}"
    fewest = comparison.fewest_agreeing_seeds(margin, family.alpha)
    if seeds < fewest:
        blindness = f"an arm may fail in some seeds and in none of {seeds}: to leave this out takes at least {fewest}"
        return verdict("undecided", f"{finding}; {blindness}", "too few seeds to see one fail")
    if is_tied:  # at the rates that are judged, where no spread says how many seeds it takes
        return verdict("undecided", finding, "the interval is too wide")
    expected_seeds, min_seeds, max_seeds = (
        f"more than {MAX_SEEDS:,}" if number is None else f"{number:,}" for number in needed_seeds
    )
    addition = (
        f" ({min_seeds} to {max_seeds}, as the spread itself is known from few)" if min_seeds != max_seeds else ""
    )
    unit = "seeds" if is_paired else "seeds an arm"
    estimate = f"to find one of {margin_text} 4 times in 5 takes {expected_seeds} {unit}{addition}"
    return verdict("undecided", f"{finding}; {estimate}", "the interval is too wide")


def _seed_numbers(comparison: Comparison, spread: float | None, margin: float, alpha: float) -> tuple[int | None, ...]:
    """The numbers of seeds needed to detect a difference of `margin` (`Verdict.seeds_needed`), by the measured spread
    and by the ends of its 95 % interval. None stands for more seeds than are tried.

    spread: the standard deviation of the differences of paired runs; None: it is not known yet.
    alpha: the error rate of this comparison.
    """
    seeds = len(comparison.differences)
    degrees, arms = seeds - 1, 1.0
    spread = float(np.std(comparison.differences, ddof=1)) if spread is None else spread
    if comparison.unpaired_values:
        estimate = comparison.estimates[comparison.judged_pair]
        mean_count = 2 / sum(1 / values.shape[1] for values in comparison.unpaired_values)  # harmonic
        spread, degrees = math.sqrt(mean_count) * float(estimate.error), float(estimate.degrees)
        arms = degrees / (mean_count - 1)
    rates = 1
    if not (comparison.has_single_rates or comparison.all_pairs or comparison.unreached_runs):
        rates = max(comparison.rate_difference_array[:, : comparison.n_shared_rates].shape[:2])
    factors = 1.0, *_spread_factors(degrees)
    return tuple(seeds_needed(spread * factor, margin, alpha / rates, arms) for factor in factors)


@lru_cache  # the arms of a table have equally many seeds
def _spread_factors(degrees: float) -> tuple[float, float]:
    """The ends of the 95 % interval of a standard deviation, divided by the measured one."""
    return tuple(math.sqrt(degrees / chdtri(degrees, tail)) for tail in (0.025, 0.975))


def combine_over_rates(values: np.ndarray, all_pairs: bool) -> float:
    """The p, or the end of an interval, of the claim that arm A is better than arm B, each at its best rate.

    The claim is that, for each rate of B, A is better at one of A's rates. p at a rate of B is the least p over A's
    rates, times their number (Bonferroni), since the tested seeds choose among these rates. p of the claim is the
    greatest p over B's rates (an intersection-union test, Berger 1982).

    Args:
        values: (rates of A, rates of B), p or ends of intervals, corrected for the number of A's rates.
        all_pairs: whether the claim must hold at every pair of rates; values are then not corrected.
    """
    return float(values.max() if all_pairs else values.min(0).max())


def p_difference(comparison: Comparison) -> float:
    """Two-sided p of the t test that the arms' mean difference at their best rates is 0; NaN where a difference
    is not finite.

    It is at most `alpha` where `Comparison.interval(alpha)` leaves out 0. For equal differences the sign-flip
    test gives p.
    """
    estimates = comparison.estimates
    return _two_sided_p(comparison, estimates.p(1), estimates.p(-1))


def p_exact(comparison: Comparison) -> float | None:
    """Two-sided p of the sign-flip test that the arms' mean difference at their best rates is 0 (Fisher 1935).

    It is exact where differences are symmetric about 0. None below `MIN_SIGN_FLIP_SEEDS` or above `MAX_SIGN_FLIP_SEEDS`
    seeds, and of unpaired runs.
    """
    values = comparison.rate_difference_array
    if comparison.unpaired_values or not MIN_SIGN_FLIP_SEEDS <= values.shape[-1] <= MAX_SIGN_FLIP_SEEDS:
        return None
    return _two_sided_p(comparison, sign_flip(-values), sign_flip(values))


def _two_sided_p(comparison: Comparison, p_below: np.ndarray, p_above: np.ndarray) -> float:
    """The two-sided p of no difference between the arms at their best rates.

    p_below: (arm's rates, baseline's rates), one-sided p of the hypothesis that the difference is at least 0.
    p_above: of the same shape, one-sided p of the hypothesis that the difference is at most 0.
    """

    def claim_p(p: np.ndarray, judged_pair: tuple[int, int], n_shared_rates: int | None) -> float:
        shared_p = p[:n_shared_rates]
        corrected_p = shared_p if comparison.all_pairs else np.minimum(1.0, len(shared_p) * shared_p)
        return float(np.maximum(p[judged_pair], combine_over_rates(corrected_p, comparison.all_pairs)))

    if comparison.higher_is_better:
        p_below, p_above = p_above, p_below
    p_better = claim_p(p_below, comparison.judged_pair, None)
    p_worse = claim_p(p_above.T, comparison.judged_pair[::-1], comparison.n_shared_rates)
    return float(np.minimum(1.0, 2 * np.minimum(p_better, p_worse)))


def sign_flip(values: np.ndarray) -> np.ndarray:
    """One-sided p, (...,), of the hypothesis that a mean over seeds is not above 0; `values`: (..., seeds).

    It is the fraction of the 2^seeds choices of signs that give at least the observed sum. Sums are made for each half
    of the seeds, so that memory holds about 2^(seeds / 2) sums.
    """
    values = np.asarray(values, dtype=float)
    *outer_shape, seeds = values.shape
    if outer_shape:
        return np.array([sign_flip(row) for row in values])
    halves = np.array_split(values, 2)
    first_sums, second_sums = (
        (1 - 2 * (np.arange(2 ** len(half))[:, None] >> np.arange(len(half)) & 1)) @ half for half in halves
    )
    second_sums = np.sort(second_sums)
    # equal sums stay equal when they are added in another order
    threshold = values.sum() - 1e-12 * np.abs(values).sum()
    return (len(second_sums) - np.searchsorted(second_sums, threshold - first_sums)).sum() / 2**seeds


def power(seeds: int, spread: float, difference: float, alpha: float = ALPHA, arms: float = 1) -> float:
    """The probability that a two-sided test at `alpha` finds a mean `difference`.

    spread: the standard deviation over seeds of paired differences; of unpaired runs the root of both arms' variances.
    arms: degrees of freedom a seed: 1 for pairs, 2 for unpaired runs of two arms that scatter alike.
    """
    if spread == 0:  # the sign-flip test decides
        return float(bool(difference) and 2.0 ** (1 - seeds) <= alpha)
    degrees = arms * (seeds - 1)
    critical_value, shift = stdtrit(degrees, 1 - alpha / 2), abs(difference) / spread * math.sqrt(seeds)
    # NaN stands for a probability that is too small to be represented.
    lower_tail, upper_cdf = np.fmax(nctdtr(degrees, shift, [-critical_value, critical_value]), 0)
    return float(1 - upper_cdf + lower_tail)


def smallest_difference(seeds: int, spread: float, arms: float = 1, alpha: float = ALPHA) -> float:
    """The difference that `seeds` seeds find with probability `POWER`; arguments are those of `power`."""
    return spread * _smallest_effect(seeds, alpha, arms)


@lru_cache(maxsize=1 << 14)  # the arms of a table share these; each takes about 10 calls of `power`
def _smallest_effect(seeds: int, alpha: float, arms: float) -> float:
    """The `smallest_difference` at a spread of 1."""
    # above the root: with a probability of 0.9 each, a sample's spread is below 1.7, and its noise below 1.3 errors
    limit = (2 * stdtrit(arms * (seeds - 1), 1 - alpha / 2) + 2) / math.sqrt(seeds)
    return brentq(lambda difference: power(seeds, 1, difference, alpha, arms) - POWER, 0, limit)


def seeds_needed(spread: float, difference: float, alpha: float = ALPHA, arms: float = 1) -> int | None:
    """The fewest seeds, at least `MIN_SEEDS`, with which `power` reaches `POWER`; None: more than `MAX_SEEDS`.

    Arguments are those of `power`; of unpaired runs, it is the number of seeds of each arm.
    """
    # The square of `root` is the number of seeds of a test that knows the spread, and so needs fewer.
    root = (ndtri(1 - alpha / 2) + ndtri(POWER)) * spread / abs(difference)
    candidates = range(max(MIN_SEEDS, math.floor(min(root, MAX_SEEDS) ** 2)), MAX_SEEDS + 1)
    smallest = abs(difference) / spread if spread and arms == 1 else 0.0

    def suffices(seeds: int) -> bool:
        if smallest:
            return _smallest_effect(seeds, alpha, arms) <= smallest
        return power(seeds, spread, difference, alpha, arms) >= POWER

    width = 4  # few numbers are tried, as the first candidate is near
    while width < len(candidates) and not suffices(candidates[width - 1]):
        width *= 2
    index = bisect_left(
        candidates, True, lo=width // 2 if width > 4 else 0, hi=min(width, len(candidates)), key=suffices
    )
    return candidates[index] if index < len(candidates) else None
