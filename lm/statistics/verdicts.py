"""This module gives verdicts on arms against one baseline. Each verdict follows from one interval, and all intervals
hold together with 95 %."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from scipy.optimize import brentq
from scipy.special import chdtri, nctdtr, stdtrit

from lm.statistics.intervals import (
    ALPHA,
    CORRELATION_STEP,
    MAX_CORRELATION,
    MAX_DEGREES,
    Estimate,
    Family,
    Interval,
    bounded_mean_ends,
    cautious_mean_correlation,
    estimate_over_seeds,
    welch_estimate,
)

POWER = 0.8  # probability with which a number of seeds must find a difference
# fewest seeds of a verdict: a spread estimated from two seeds is off by a factor of up to 32 (95 %), from three by up
# to 6
MIN_SEEDS = 3
MAX_SEEDS = 1000  # number of seeds that `seeds_needed` counts to
_JUST_ABOVE_0 = 1e-9  # end of an interval that leaves out 0 and says no more

VerdictKind = Literal[
    "better", "worse", "difference below margin", "no difference above margin", "undecided", "incomplete",
    "unstable", "not tuned", "not learned",
]  # fmt: skip
Obstacle = tuple[VerdictKind, str, str]  # what keeps an arm from an answer: kind, reason, and reason in a few words
UNTUNED_OBSTACLE: Obstacle = (
    "not tuned",
    "the best learning rate is at the edge of a grid that may not grow again, or every rate diverged: give tune.grid "
    "other values",
    "no best learning rate inside the grid",
)
ArmName = TypeVar("ArmName", bound=Hashable)  # name of an arm, or of an arm and its size
IntervalEnds = tuple[np.ndarray, np.ndarray]  # lower and upper ends of intervals


@dataclass(frozen=True, eq=False)
class Comparison:
    """Holds the differences between an arm and the baseline in the primary metric. It also says how they are judged:
    learning rates, pairing of runs, better direction and bounds of the metric."""

    # arm minus baseline on the reporting documents, one value a seed that both were trained with: (seeds,), or for
    # several learning rates (the arm's rates, the baseline's rates, seeds). The claim is about both arms at their best
    # rates (`combine_over_rates`). Several comparisons that are alike may be one, along a first axis
    metric_differences: np.ndarray | Sequence[float]
    judged_rate_pair: tuple[int, int] = (0, 0)  # indices in `metric_differences` of the pair of rates that are judged
    # number of the baseline's rates, from the first on, that the arm was trained at, too. The arm is worse only if it
    # is worse than the baseline at one of these rates. None: all rates
    n_shared_rates: int | None = None
    # whether the claim must hold at every pair of rates, since the best rates were chosen by another metric
    must_hold_at_all_rates: bool = False
    # whether higher values of the metric are better: an arm's best rate is then the rate of its highest value
    higher_is_better: bool = False
    # the least and the greatest possible value: of a difference, or of an arm's runs where they are not paired. None:
    # values have no such bounds
    possible_range: tuple[float, float] | None = None
    # values of the arm, (its rates, its seeds), and of the baseline, where their runs are not paired. The pairs in
    # `metric_differences` are then arbitrary, and as many as the smaller number of seeds
    unpaired_values: IntervalEnds | None = None
    # (the arm's rates, the baseline's rates), the estimates over seeds and documents, where there are enough of both
    seed_and_document_estimate: Estimate | None = None
    obstacle: Obstacle | None = None  # such as a run that diverged, or seeds that have not ended; None: none is known

    @cached_property
    def differences_by_rate(self) -> np.ndarray:
        """Return the differences as an array, (the arm's rates, the baseline's rates, seeds). If many comparisons are
        stacked as one, their number is a first dimension."""
        return np.array(self.metric_differences, dtype=float, order="C", ndmin=3)  # sums depend on the order

    @property
    def judged_differences(self) -> np.ndarray:
        """Return each seed's difference between arm and baseline, (seeds,), each at its own best learning rate
        (`judged_rate_pair`)."""
        return self.differences_by_rate[(..., *self.judged_rate_pair, slice(None))]

    @property
    def rate_counts(self) -> tuple[int, int]:
        """Return the numbers of rates of the arm and of the baseline."""
        return self.differences_by_rate.shape[-3:-1]

    @cached_property
    def difference_estimates(self) -> Estimate:
        """Return the mean differences over seeds and their errors, (the arm's rates, the baseline's rates)."""
        return (
            estimate_over_seeds(self.differences_by_rate)
            if self.unpaired_values is None
            else welch_estimate(*self.unpaired_values)
        )

    def interval_ends(self, alpha: float = ALPHA, difference_estimates: Estimate | None = None) -> IntervalEnds:
        """Return the ends of the interval of the difference between arms at their best rates, which misses the true
        difference with probability `alpha`. This interval contains the interval at the judged pair of rates
        (`judged_rate_pair`). Ends that depend on a NaN are NaN.

        difference_estimates: estimates of the difference at each pair of rates, (the arm's rates, the baseline's
            rates), such as estimates over seeds and documents. None: the estimates over seeds are taken.
        """
        estimates = difference_estimates or self.difference_estimates
        low, high = self._ends_at_best_rates(lambda alpha: self._student_t_ends(estimates, alpha), alpha)
        bounds = self.possible_range
        if not bounds:
            return low, high
        # That there is a difference rests on Student's t. That there is none above a margin takes enough seeds to see
        # an arm that fails in some of them: an end that doesn't leave out 0 reaches as far as `_bounded_metric_ends`.
        # It may miss with the whole `alpha`, as the truth is on one side.
        least, greatest = bounds if self.unpaired_values is None else (-np.ptp(bounds), np.ptp(bounds))
        bounded_low, bounded_high = self._ends_at_best_rates(self._bounded_metric_ends, alpha)
        low = np.where(low > 0, low, np.maximum(np.minimum(low, bounded_low), least))
        return low, np.where(high < 0, high, np.minimum(np.maximum(high, bounded_high), greatest))

    def _ends_at_best_rates(self, ends: Callable[[float], IntervalEnds], alpha: float) -> IntervalEnds:
        """Return the ends of the interval at the arms' best rates. `ends` returns the ends at each pair of rates, for a
        given alpha."""

        def oriented(alpha: float) -> IntervalEnds:  # an arm's best rate is that of its lowest value
            low, high = ends(alpha)
            return (-high, -low) if self.higher_is_better else (low, high)

        low, high = (end[(..., *self.judged_rate_pair)] for end in oriented(alpha))
        if self.rate_counts != (1, 1):
            shared = slice(self.n_shared_rates)
            arm_rates, base_rates = (
                (1, 1) if self.must_hold_at_all_rates else self.differences_by_rate[..., shared, 0].shape[-2:]
            )
            highest = combine_over_rates(oriented(alpha / arm_rates)[1], self.must_hold_at_all_rates)
            lowest = oriented(alpha / base_rates)[0][..., shared].swapaxes(-1, -2)
            low = np.minimum(low, -combine_over_rates(-lowest, self.must_hold_at_all_rates))
            high = np.maximum(high, highest)
        return (0.0 - high, 0.0 - low) if self.higher_is_better else (low, high)  # no -0.0

    def _student_t_ends(self, estimates: Estimate, alpha: float) -> IntervalEnds:
        """Return the ends of the interval of each mean difference by Student's t.

        Where all seeds have equal differences in a bounded metric, the sign-flip test decides whether the interval
        leaves out 0; for unpaired runs the permutation test does. A test gives no ends. If the test leaves out 0, the
        end closer to 0 is therefore taken from `_bounded_metric_ends`, and the other end is the mean. If it does not,
        the ends are 0 and the mean. `interval_ends` then widens the interval, except at an end that leaves out 0.
        """
        half = estimates.half_width(alpha)
        low, high = estimates.mean - half, estimates.mean + half
        if self.possible_range and (is_tied := estimates.standard_error == 0).any():
            # half as large a tail as that of an end on the far side of 0
            (bounded_low, bounded_high), without_0 = self._bounded_metric_ends(alpha / 2), half == 0
            near_low, near_high = np.maximum(bounded_low, _JUST_ABOVE_0), np.minimum(bounded_high, -_JUST_ABOVE_0)
            tied_low = np.where(without_0 & (estimates.mean > 0), near_low, np.minimum(estimates.mean, 0))
            tied_high = np.where(without_0 & (estimates.mean < 0), near_high, np.maximum(estimates.mean, 0))
            low, high = np.where(is_tied, tied_low, low), np.where(is_tied, tied_high, high)
        return low, high

    def _bounded_metric_ends(self, alpha: float) -> IntervalEnds:
        """Return the ends of the interval of each mean of a bounded metric, at each pair of rates. They hold for any
        distribution; either end misses the true mean with probability `alpha`."""
        if self.unpaired_values is None:
            return bounded_mean_ends(self.differences_by_rate, *self.possible_range, alpha)
        (low, high), (base_low, base_high) = (
            bounded_mean_ends(values, *self.possible_range, alpha / 2) for values in self.unpaired_values
        )
        return low[..., None] - base_high[..., None, :], high[..., None] - base_low[..., None, :]

    def fewest_seeds_within_margin(self, margin: float, alpha: float) -> int:
        """Return the fewest seeds with which `_bounded_metric_ends` can lie within plus and minus `margin`. With so
        many they do if all differences are 0. Return 0 if no difference can exceed `margin`, or if the metric has no
        bounds.

        For an accuracy it is the smallest n with (1 - margin)^n below `alpha`; for unpaired runs, below half of
        `alpha`.
        """
        bounds = self.possible_range
        if bounds is None:
            return 0
        reach, tail = (max(map(abs, bounds)), alpha) if self.unpaired_values is None else (np.ptp(bounds), alpha / 2)
        return 0 if margin >= reach else math.floor(math.log(tail) / math.log1p(-margin / reach)) + 1

    @property
    def p(self) -> np.ndarray:
        """Return the two-sided p of the t test that the arms' mean difference at their best rates is 0; NaN where a
        difference is not finite.

        p is at most `alpha` where `interval_ends(alpha)` leave out 0. For equal differences the sign-flip test gives p.
        """

        def claim_p(p: np.ndarray, judged_rate_pair: tuple[int, int], n_shared_rates: int | None) -> np.ndarray:
            shared_p = p[..., :n_shared_rates, :]
            corrected_p = shared_p if self.must_hold_at_all_rates else np.minimum(1.0, shared_p.shape[-2] * shared_p)
            return np.maximum(p[(..., *judged_rate_pair)], combine_over_rates(corrected_p, self.must_hold_at_all_rates))

        sign = -1 if self.higher_is_better else 1
        p_better = claim_p(self.difference_estimates.one_sided_p(sign), self.judged_rate_pair, None)
        p_worse = claim_p(
            self.difference_estimates.one_sided_p(-sign).swapaxes(-1, -2),
            self.judged_rate_pair[::-1],
            self.n_shared_rates,
        )
        return np.minimum(1.0, 2 * np.minimum(p_better, p_worse))


class SeedCounts(NamedTuple):
    """Holds the numbers of seeds that find a given difference with probability `POWER`. They follow from the measured
    spread over seeds, and from the ends of its 95 % interval (chi squared). A number is None above `MAX_SEEDS`."""

    for_measured_spread: int | None
    for_low_spread: int | None
    for_high_spread: int | None


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict on an arm against the baseline, with the interval and p that it rests on."""

    kind: VerdictKind
    reason: str  # the facts that the verdict rests on, with the smallest difference of interest
    # the interval of the difference, from which the verdict follows. All intervals of the experiment hold together with
    # 95 %. None with fewer than two seeds
    interval: Interval | None
    p: float  # two-sided p of no difference, adjusted for the number of comparisons; 1 where nothing was tested
    # numbers of seeds that find a difference that matters with probability `POWER`; None: unknown
    seeds_needed: SeedCounts | None
    unadjusted_interval: Interval | None = None  # the 95 % interval of this difference by itself
    # the interval over seeds and documents; None where there are too few seeds or documents
    seed_and_document_interval: Interval | None = None
    plan_changed_after_results: bool = (
        False  # whether the plan was changed after results were known, so that p is too small
    )
    margin: float = math.nan  # the smallest difference of interest
    exceeds_margin: bool = False  # whether every difference in the interval is at least the margin
    no_answer_reason: str = ""  # the reason why there is no answer, in a few words; empty if there is an answer
    seed_count: int = 0  # number of seeds that the verdict rests on; 0: nothing was tested

    @property
    def kind_with_exploratory_mark(self) -> str:
        """Return the verdict's kind for tables that programs read, preceded by `exploratory: ` if the plan was
        changed after results were known."""
        return f"{'exploratory: ' if self.plan_changed_after_results else ''}{self.kind}"

    @property
    def statement_without_seeds(self) -> str:
        """Return the verdict in plain words with its margin, such as `no difference above 0.01`."""
        if self.no_answer_reason:
            return f"{self.kind}: {self.no_answer_reason}"
        if self.kind in ("better", "worse"):
            return f"{self.kind}{' by more' if self.exceeds_margin else ', perhaps by less'} than {self.margin:g}"
        article = "a " if self.kind == "difference below margin" else ""
        return f"{article}{self.kind.removesuffix('margin')}{self.margin:g}"

    @property
    def statement_with_seeds(self) -> str:
        """Return the `statement_without_seeds` with its number of seeds, after `exploratory: ` if the plan was changed
        after results were known."""
        return f"{'exploratory: ' if self.plan_changed_after_results else ''}{self.statement_without_seeds}" + (
            f" ({self.interval.noise_source})" if self.seed_count else ""
        )


def seed_count_text(count: int) -> str:
    """Return `1 seed`, or `2 seeds`."""
    return f"{count} seed{'' if count == 1 else 's'}"


def judge_comparisons(comparisons: Mapping[ArmName, Comparison], matters: float) -> dict[ArmName, Verdict]:
    """Return the verdict on each arm, or pair of an arm and a size. All comparisons are one family, whose intervals
    hold together.

    Each comparison has one interval over seeds, by Student's t, at the level at which all intervals hold together with
    95 % (`comparison_family`). Its verdict follows from this interval alone. With a probability of 95 % all intervals
    contain the true differences, and then no verdict of any kind is false. A comparison that can't be tested counts in
    the family.

    Args:
        comparisons: the comparison of each arm with the baseline, by name.
        matters: smallest difference of interest, above 0, in the metric's unit, fixed before any run.
    """
    stacks, found = stack_comparisons(comparisons), dict[ArmName, Verdict]()
    family = comparison_family(stacks)
    for stack, members in stacks:
        found.update(zip(members, _stack_verdicts(stack, [*members.values()], matters, family), strict=True))
    return {name: found[name] for name in comparisons}


ComparisonStack = tuple[
    Comparison, dict[ArmName, Comparison]
]  # comparisons that are alike as one, and these comparisons


def stack_comparisons(comparisons: Mapping[ArmName, Comparison]) -> list[ComparisonStack]:
    """Join comparisons with equally many rates and seeds, so that thousands of them are computed at once."""
    stacks = defaultdict[tuple, dict[ArmName, Comparison]](dict)
    for name, comparison in comparisons.items():
        shapes = comparison.differences_by_rate.shape, *(values.shape for values in comparison.unpaired_values or ())
        design = (
            comparison.judged_rate_pair,
            comparison.n_shared_rates,
            comparison.must_hold_at_all_rates,
            comparison.higher_is_better,
        )
        stacks[shapes, design, comparison.possible_range][name] = comparison
    results = []
    for members in stacks.values():
        first = next(iter(members.values()))
        differences = np.stack([member.differences_by_rate for member in members.values()])
        sides = zip(*(member.unpaired_values or () for member in members.values()), strict=True)
        unpaired_values = tuple(map(np.stack, sides)) or None
        results.append((replace(first, metric_differences=differences, unpaired_values=unpaired_values), members))
    return results


def comparison_family(stacks: Iterable[ComparisonStack]) -> Family:
    """Return the joint distribution of comparisons, by which their intervals hold together.

    Comparisons of paired runs with equally many seeds are one group, as the baseline's noise is in all of them; their
    correlation is estimated cautiously (`cautious_mean_correlation`). Comparisons of unpaired runs with one baseline
    are a group, too, whose correlation follows from the variances (Dunnett 1955). Other comparisons count as
    independent: comparisons of arms with several learning rates, and comparisons that can't be tested.
    """
    paired, unpaired, count = defaultdict[int, list[np.ndarray]](list), defaultdict[bytes, list[tuple]](list), 0
    for stack, members in stacks:
        count += len(members)
        differences = stack.judged_differences
        if stack.rate_counts != (1, 1) or differences.shape[1] < MIN_SEEDS:
            continue
        is_testable = np.isfinite(differences).all(1) & [member.obstacle is None for member in members.values()]
        if stack.unpaired_values is None:
            paired[differences.shape[1]].append(differences[is_testable])
            continue
        arm, baseline = (values[:, 0].var(1, ddof=1) / values.shape[2] for values in stack.unpaired_values)
        for place in np.flatnonzero(is_testable):
            row = arm[place], baseline[place], stack.difference_estimates.degrees_of_freedom[place, 0, 0]
            unpaired[stack.unpaired_values[1][place].tobytes()].append(row)
    joined = {seeds: np.concatenate(arrays) for seeds, arrays in paired.items()}
    groups = [
        (len(rows), seeds - 1, cautious_mean_correlation(rows)) for seeds, rows in joined.items() if len(rows) > 1
    ]
    for rows in unpaired.values():
        arm, baseline, _ = np.mean(rows, axis=0)
        correlation = min(baseline / (arm + baseline), MAX_CORRELATION) if baseline else 0.0
        groups.append((len(rows), np.min(rows, axis=0)[2], correlation))
    rounded = []  # so that intervals get longer
    for size, degrees, correlation in groups:
        steps = math.floor(correlation / CORRELATION_STEP + 1e-9)
        if size > 1 and steps > 0:
            rounded.append((size, min(max(1, int(degrees)), MAX_DEGREES), steps * CORRELATION_STEP))
    return Family(count - sum(size for size, *_ in rounded), tuple(sorted(rounded)))


def _stack_verdicts(stack: Comparison, members: list[Comparison], margin: float, family: Family) -> Iterator[Verdict]:
    """Return the verdicts on the comparisons of a stack, that is, on comparisons that are computed at once."""
    seeds, is_paired = stack.differences_by_rate.shape[-1], stack.unpaired_values is None
    rows, source = [[math.nan] * 8] * len(members), ""
    if seeds > 1:
        estimates, pair = stack.difference_estimates, (..., *stack.judged_rate_pair)
        source = estimates.noise_source
        ends = *stack.interval_ends(family.comparison_alpha), *stack.interval_ends()
        columns = (
            estimates.mean[pair],
            *ends,
            family.joint_p(stack.p),
            estimates.standard_error[pair],
            estimates.degrees_of_freedom[pair],
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
    all_finite = np.isfinite(stack.differences_by_rate).all((1, 2, 3)).tolist()
    for member, row, is_finite in zip(members, rows, all_finite, strict=True):
        mean, low, high, low_alone, high_alone, joint_p, error, degrees = row
        interval = unadjusted_interval = needed_seeds = seed_and_document_interval = None
        obstacle = member.obstacle
        if seeds > 1:
            interval = Interval(mean, low, high, source)
            unadjusted_interval = Interval(mean, low_alone, high_alone, source)
        if seeds > 1 and is_finite:
            needed_seeds = _needed_seed_counts(stack, error, degrees, margin, family.comparison_alpha)
        if documents := member.seed_and_document_estimate:
            ends = map(float, member.interval_ends(family.comparison_alpha, documents))
            seed_and_document_interval = Interval(
                float(documents.mean[member.judged_rate_pair]), *ends, documents.noise_source
            )
        if obstacle:
            pass
        elif not is_finite:  # at any rate, as a verdict is on all of them
            obstacle = "unstable", "a difference is not finite", "a difference is not finite"
        elif seeds < MIN_SEEDS:
            reason = f"{seed_count_text(seeds)} in common" if is_paired else f"an arm has {seed_count_text(seeds)}"
            obstacle = "incomplete", reason, f"a verdict takes {MIN_SEEDS} seeds"
        kind, reason, no_answer_reason = obstacle or _kind_and_reason(
            stack, interval, joint_p, error == 0, needed_seeds, margin, family.comparison_alpha
        )
        yield Verdict(
            kind, reason, interval, 1.0 if obstacle else joint_p, needed_seeds, unadjusted_interval,
            seed_and_document_interval, margin=margin, no_answer_reason=no_answer_reason,
            exceeds_margin=not obstacle and max(low, -high) >= margin, seed_count=0 if obstacle else seeds,
        )  # fmt: skip


def _kind_and_reason(
    stack: Comparison,
    interval: Interval,
    p: float,
    is_tied: bool,
    needed_seeds: SeedCounts | None,
    margin: float,
    alpha: float,
) -> Obstacle:
    """Return three texts: the kind of verdict that follows from an interval, the reason, and a few words on why the
    verdict is `undecided`. The third text is empty for other kinds.

    is_tied: whether all seeds have the same difference, so that an exact test gave `p`. needed_seeds: as
    `Verdict.seeds_needed`.
    """
    seeds, is_paired = stack.differences_by_rate.shape[-1], stack.unpaired_values is None
    exact_test, tie = (
        ("sign-flip test", f"all {seeds} seeds differ by the same")
        if is_paired
        else ("permutation test", "each arm's seeds agree")
    )
    method = f" by the {exact_test}, as {tie}" if is_tied else "" if is_paired else " by Welch's t test"
    assumption = "" if is_tied else ", if seeds scatter alike to both sides"
    is_within = -margin < interval.low and interval.high < margin
    if interval.low > 0 or interval.high < 0:
        finding = "the interval leaves out 0"
        test = f"(p = {p:.2g}{method}{assumption})"
        if is_within:
            return "difference below margin", f"{finding} and lies within {margin:g} {test}", ""
        if max(interval.low, -interval.high) >= margin:
            finding += f" and every difference below {margin:g}"
        is_better = (interval.mean > 0) == stack.higher_is_better
        return "better" if is_better else "worse", f"{finding} {test}", ""
    if is_within:
        reason = f"the interval holds 0 and lies within {margin:g}{method}"
        return "no difference above margin", f"{reason}{'' if stack.possible_range else assumption}", ""
    if is_tied and not interval.is_bounded:
        remark = "" if interval.mean == 0 else f", which so few can't bring to {ALPHA:g}"
        reason = f"{tie}: p = {p:.2g} by the {exact_test}{remark}"
        return "undecided", reason, "all seeds agree, and are too few"
    rates = ", over all rates that the arms were trained at," if stack.rate_counts != (1, 1) else ""
    finding = f"the interval{rates} holds 0, and differences of more than {margin:g}"
    fewest = stack.fewest_seeds_within_margin(margin, alpha)
    if seeds < fewest:
        blindness = f"an arm may fail in some seeds and in none of {seeds}: to leave this out takes at least {fewest}"
        return "undecided", f"{finding}; {blindness}", "too few seeds to see one fail"
    if not is_tied:  # at the rates that are judged, where no spread would say how many seeds it takes
        expected, fewest, most = (
            f"more than {MAX_SEEDS:,}" if number is None else f"{number:,}" for number in needed_seeds
        )
        unit = "seeds" if is_paired else "seeds an arm"
        finding += f"; to find one of {margin:g} 4 times in 5 takes {expected} {unit}"
        if fewest != most:
            finding += f" ({fewest} to {most}, as the spread itself is known from few)"
    return "undecided", finding, "the interval is too wide"


def _needed_seed_counts(stack: Comparison, error: float, degrees: float, margin: float, alpha: float) -> SeedCounts:
    """Return the numbers of seeds that detect a difference of `margin` (`Verdict.seeds_needed`). `alpha`: the error
    rate of this comparison."""
    count = stack.differences_by_rate.shape[-1]
    if stack.unpaired_values:
        count = 2 / sum(1 / values.shape[-1] for values in stack.unpaired_values)  # harmonic mean
    rates = (
        1
        if stack.must_hold_at_all_rates
        else max(1, *stack.differences_by_rate[..., : stack.n_shared_rates, 0].shape[-2:])
    )
    spread, degrees_per_seed = math.sqrt(count) * error, degrees / (count - 1)
    factors, fewest = (1.0, *_std_interval_factors(degrees)), stack.fewest_seeds_within_margin(margin, alpha)
    counts = (seeds_needed(spread * factor, margin, alpha / rates, degrees_per_seed) for factor in factors)
    return SeedCounts(*(count and max(count, fewest) for count in counts))


def pooled_std_and_interval(squares: float, degrees_of_freedom: int, value_scale: float) -> list[float] | None:
    """Return a standard deviation, from a sum of squares with `degrees_of_freedom`, and the ends of its 95 % interval;
    None without degrees of freedom.

    `value_scale` is the largest absolute value of a run. A standard deviation of at most 1e-9 times this value is
    rounding, and returned as 0.
    """
    if not degrees_of_freedom:
        return None
    squares *= math.sqrt(squares / degrees_of_freedom) > 1e-9 * value_scale
    return np.sqrt(squares / np.array([degrees_of_freedom, *chdtri(degrees_of_freedom, [0.025, 0.975])])).tolist()


@lru_cache  # the arms of a table have equally many seeds
def _std_interval_factors(degrees: float) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a standard deviation, divided by the measured one."""
    return tuple(math.sqrt(degrees / chdtri(degrees, tail)) for tail in (0.025, 0.975))


def combine_over_rates(p_or_upper_ends: np.ndarray, must_hold_at_all_rates: bool) -> np.ndarray:
    """Combine values at all pairs of learning rates into one. It is for the claim that arm A is better (lower) than arm
    B, each at its best rate. Values are p or upper ends of intervals of A minus B; the result is the claim's p or upper
    end.

    The claim is that, for each rate of B, A is better at one of A's rates. p at a rate of B is the least corrected p
    over A's rates. p of the claim is the greatest p over B's rates (an intersection-union test, Berger 1982).

    Args:
        p_or_upper_ends: (..., rates of A, rates of B). The caller has corrected them for the number of A's
            rates (Bonferroni), since A's best rate is chosen by the values that are tested.
        must_hold_at_all_rates: whether the claim must hold at every pair of rates. Values are then not corrected, and
            the greatest of them is returned.
    """
    return p_or_upper_ends.max((-2, -1)) if must_hold_at_all_rates else p_or_upper_ends.min(-2).max(-1)


def power(seeds: int, spread: float, difference: float, alpha: float = ALPHA, degrees_per_seed: float = 1) -> float:
    """Return the probability that a two-sided test at `alpha` finds a mean `difference`.

    spread: the standard deviation over seeds of paired differences; for unpaired runs, the root of the sum of both
    arms' variances.
    degrees_per_seed: degrees of freedom per seed: 1 for pairs, 2 for unpaired runs of two arms that scatter alike.
    """
    if spread == 0:  # the sign-flip test decides
        return float(bool(difference) and 2.0 ** (1 - seeds) <= alpha)
    degrees = degrees_per_seed * (seeds - 1)
    critical_value, shift = stdtrit(degrees, 1 - alpha / 2), abs(difference) / spread * math.sqrt(seeds)
    # NaN stands for a probability that is too small to be represented.
    lower_tail, upper_cdf = np.fmax(nctdtr(degrees, shift, [-critical_value, critical_value]), 0)
    return float(1 - upper_cdf + lower_tail)


def smallest_difference(seeds: int, spread: float, degrees_per_seed: float = 1, alpha: float = ALPHA) -> float:
    """Return the difference that `seeds` seeds find with probability `POWER`; arguments are as for `power`."""
    return spread * _smallest_effect(seeds, alpha, degrees_per_seed)


@lru_cache(maxsize=1 << 14)  # the arms of a table share these; each takes about 10 calls of `power`
def _smallest_effect(seeds: int, alpha: float, degrees_per_seed: float) -> float:
    """Return what `smallest_difference` returns for a `spread` of 1."""
    # above the root: with a probability of 0.9 each, a sample's spread is below 1.7, and its noise below 1.3 errors
    limit = (2 * stdtrit(degrees_per_seed * (seeds - 1), 1 - alpha / 2) + 2) / math.sqrt(seeds)
    return brentq(lambda difference: power(seeds, 1, difference, alpha, degrees_per_seed) - POWER, 0, limit)


def seeds_needed(spread: float, difference: float, alpha: float = ALPHA, degrees_per_seed: float = 1) -> int | None:
    """Return the fewest seeds, at least `MIN_SEEDS`, with which `power` reaches `POWER`; None: more than `MAX_SEEDS`.

    Arguments are as for `power`. For unpaired runs the result is the number of seeds of each arm.
    """
    effect = abs(difference) / spread if spread and degrees_per_seed == 1 else 0.0

    def suffices(seeds: int) -> bool:
        if effect:  # numbers of seeds that arms of a table share
            return _smallest_effect(seeds, alpha, degrees_per_seed) <= effect
        return power(seeds, spread, difference, alpha, degrees_per_seed) >= POWER

    counts = range(MIN_SEEDS, MAX_SEEDS + 1)
    index = bisect_left(counts, True, key=suffices)
    return counts[index] if index < len(counts) else None
