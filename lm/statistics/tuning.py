"""Choose each arm's learning rate, or value of another key, by the loss on the selection text, in a grid that all arms
share.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

EXTENSIONS = 2  # how often a grid may grow
MIN_TUNING_SEEDS = 2  # fewest seeds that a rate is tuned on

Rate = float  # the value of the tuned key
# by rate, an arm's final selection loss with each tuning seed; infinite if that run diverged
Losses = Mapping[Rate, Sequence[float]]


@dataclass(frozen=True)
class TuningOutcome:
    """The learning rate of each arm, or the rates that must be measured before a rate is chosen."""

    rates: dict[str, Rate]  # by arm, the rate of the lowest mean loss; arms in `at_edge` have none
    missing: tuple[Rate, ...] = ()  # rates to measure for every arm before a rate is chosen; then `rates` is empty
    # arms that get no verdict: their best rate is at an edge of a grid that may not grow again, or they diverged
    # at every rate
    at_edge: tuple[str, ...] = ()


def tuning_outcome(
    grid: Iterable[Rate], losses: Mapping[str, Losses], possible: Callable[[Rate], bool] = lambda rate: True
) -> TuningOutcome:
    """The outcome of tuning by the losses so far; every arm is trained at all rates of the grid.

    A rate at which any seed diverged has infinite mean loss. If an arm's best rate is the highest (lowest) one, twice
    (half) this value is added to the grid of every arm. The grid grows at most `EXTENSIONS` times, and only by
    `possible` values.

    Args:
        grid: planned values of the tuned key, above 0.
        losses: by arm, with `MIN_TUNING_SEEDS` seeds or more at each rate.
        possible: whether the tuned key may have a value.
    """
    rates = sorted(set(grid))
    for growths in count():
        if missing_rates := tuple(rate for rate in rates if not all(rate in by_rate for by_rate in losses.values())):
            return TuningOutcome({}, missing_rates)
        outcome = rate_choice(losses, rates)
        best_rates = {arm: best_rate(losses[arm], rates) for arm in outcome.at_edge}
        # an arm that diverged at every rate grows no grid
        edges = {rate for arm, rate in best_rates.items() if mean_loss(losses[arm][rate]) < math.inf}
        low, high = rates[0], rates[-1]
        half = low // 2 if low % 2 == 0 else low / 2  # a key of whole numbers keeps them
        smaller = [half] if low in edges and possible(half) else []
        larger = [high * 2] if high in edges and possible(high * 2) else []
        if growths == EXTENSIONS or not smaller + larger:
            return outcome
        rates = [*smaller, *rates, *larger]


def rate_choice(losses: Mapping[str, Losses], rates: Iterable[Rate] | None = None) -> TuningOutcome:
    """Each arm's rate of lowest mean loss in `rates` (None: all). An arm gets none
    if its best rate is at the grid's edge or has a diverged run."""
    rate_by_arm, edge_arms = {}, []
    for arm, by_rate in losses.items():
        candidates = list(by_rate if rates is None else rates)
        best = rate_by_arm[arm] = best_rate(by_rate, candidates)
        if best in (min(candidates), max(candidates)) or mean_loss(by_rate[best]) == math.inf:
            edge_arms.append(arm)
    return TuningOutcome(
        {arm: rate for arm, rate in rate_by_arm.items() if arm not in edge_arms}, at_edge=tuple(edge_arms)
    )


def crossed_rates(base: str, rates: Mapping[str, Rate]) -> dict[str, tuple[Rate, ...]]:
    """The rates of each arm's final runs (the runs that are judged): its own rate, then the baseline's; for the
    baseline, all arms' rates.

    As tuning seeds are few, a rate chosen for an arm is tried with the baseline, too, and vice versa, before a verdict
    names a difference.

    Args:
        base: the baseline; if it has no rate, every arm is trained at its own rate alone.
        rates: by arm, as tuning chose them.
    """
    opposite_rates = {arm: rates.values() if arm == base else (rates[base],) for arm in rates} if base in rates else {}
    return {arm: tuple(dict.fromkeys((rate, *opposite_rates.get(arm, ())))) for arm, rate in rates.items()}


def best_rate(by_rate: Losses, rates: Iterable[Rate]) -> Rate:
    """The rate of the lowest mean loss. If losses are equal, as where all runs solve a task, it is the one nearest to
    the grid's middle.
    """
    rates = sorted(rates)
    middle = (len(rates) - 1) / 2
    return min(rates, key=lambda rate: (mean_loss(by_rate[rate]), abs(rates.index(rate) - middle)))


def mean_loss(losses: Sequence[float]) -> float:
    """The mean loss over seeds; infinite if any loss is not finite, so that tuning avoids rates at which some seeds
    diverge.
    """
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
