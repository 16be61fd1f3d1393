"""Choosing each arm's learning rate by its loss on the selection text, over one grid that all arms share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

EXTENSIONS = 2  # how often a grid may grow
FEWEST_TUNING_SEEDS = 2  # that a rate is tuned on

Losses = Mapping[float, Sequence[float]]  # one arm's: by learning rate, the final selection loss of each tuning seed; inf: diverged


@dataclass(frozen=True)
class Tuned:
    """The learning rates of the arms, or what is missing to choose them.

    Attributes:
        rates: by arm, that of the lowest mean loss; arms still at an edge have none.
        missing: rates to measure for every arm before anything is chosen; then `rates` is empty.
        at_edge: arms whose best rate is at an edge of the grid that may not grow again, or that diverged at every rate: no verdict on them.
    """

    rates: dict[str, float]
    missing: tuple[float, ...] = ()
    at_edge: tuple[str, ...] = ()


def tuned(grid: Sequence[float], losses: Mapping[str, Losses], possible: Callable[[float], bool] = lambda rate: True) -> Tuned:
    """The outcome by the losses so far, where `grid` is the one that was planned.

    A rate at which any seed diverged has mean loss infinite. Where the best rate of some arm is the highest (lowest) measured, the grid
    grows by twice the highest (half the lowest) for every arm. It grows at most `EXTENSIONS` times, and not where that is not `possible`.

    Args:
        grid: values above 0; of whole numbers it grows by whole numbers.
        losses: by arm; each arm's at least at the rates of the grid, with `FEWEST_TUNING_SEEDS` seeds or more.
        possible: whether the tuned key may have a value.

    Raises:
        ValueError: a grid or losses that are not as described.
    """
    if not grid or not losses or any(not rate > 0 for rate in grid):
        raise ValueError("needs a grid of learning rates above 0, and an arm")
    asked = sorted(set(grid))
    grown = 0
    while True:
        for arm, by_rate in losses.items():
            for rate in asked:
                if rate in by_rate and len(by_rate[rate]) < FEWEST_TUNING_SEEDS:
                    raise ValueError(f"arm {arm}: {len(by_rate[rate])} seeds at {rate:g}; tuning needs {FEWEST_TUNING_SEEDS}")
        if missing := tuple(rate for rate in asked if not all(rate in by_rate for by_rate in losses.values())):
            return Tuned({}, missing)
        outcome = chosen(losses, asked)
        more = [rate for rate in _beyond(asked, {arm: best_rate(losses[arm], asked) for arm in outcome.at_edge}, losses) if possible(rate)]
        if grown == EXTENSIONS or not more:
            return outcome
        asked = sorted([*asked, *more])
        grown += 1


def chosen(losses: Mapping[str, Losses], rates: Iterable[float] | None = None) -> Tuned:
    """The rate of the lowest mean loss of each arm among those measured, or among `rates`; none of an arm whose best is at an edge."""
    rate_of, at_edge = {}, []
    for arm, by_rate in losses.items():
        asked = sorted(by_rate if rates is None else rates)
        rate_of[arm] = best_rate(by_rate, asked)
        if rate_of[arm] in (asked[0], asked[-1]) or mean_loss(by_rate[rate_of[arm]]) == math.inf:
            at_edge.append(arm)
    return Tuned({arm: rate for arm, rate in rate_of.items() if arm not in at_edge}, at_edge=tuple(at_edge))


def crossed_rates(base: str, rates: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
    """The rates that the final seeds of each arm are trained at: its own first, then the baseline's; the baseline's seeds at those of all
    arms. Tuning seeds are few; what they chose for one arm of a comparison is tried with the other before a difference is believed.

    Args:
        base: the baseline; without a rate of its own, nothing is crossed.
        rates: by arm, as tuning chose them.
    """
    others = {arm: rates.values() if arm == base else (rates[base],) for arm in rates} if base in rates else {}
    return {arm: tuple(dict.fromkeys((rate, *others.get(arm, ())))) for arm, rate in rates.items()}


def best_rate(by_rate: Losses, asked: Iterable[float]) -> float:
    """The rate of the lowest mean loss; of several, as where a task is solved at all of them, the one nearest the middle of the grid."""
    asked = sorted(asked)
    middle = (len(asked) - 1) / 2
    return min(asked, key=lambda rate: (mean_loss(by_rate[rate]), abs(asked.index(rate) - middle)))


def _beyond(asked: Sequence[float], best: Mapping[str, float], losses: Mapping[str, Losses]) -> list[float]:
    """The rates by which a grid grows for arms whose best is at an edge; those that diverged everywhere ask for none."""
    growing = {rate for arm, rate in best.items() if mean_loss(losses[arm][rate]) < math.inf}
    half = asked[0] // 2 if isinstance(asked[0], int) else asked[0] / 2
    return [half] * (asked[0] in growing and half > 0) + [asked[-1] * 2] * (asked[-1] in growing)


def mean_loss(losses: Sequence[float]) -> float:
    """Over seeds; infinite if any is not finite: a rate at which training diverges now and then is not one to use."""
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def rate_differences(arm: str, base: str, losses: Mapping[str, Losses]) -> dict[float, list[float]]:
    """Arm minus baseline at every learning rate that both were measured at: by rate, one value a tuning seed. Infinite where only
    one of them diverged; seeds of which both did are left out."""
    pairs = {rate: zip(losses[arm][rate], losses[base][rate], strict=True) for rate in sorted(losses[arm].keys() & losses[base].keys())}
    return {rate: [ours - theirs for ours, theirs in both if math.isfinite(ours) or math.isfinite(theirs)] for rate, both in pairs.items()}
