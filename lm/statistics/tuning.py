"""Choose each arm's learning rate, or values of several keys together, by the loss on the selection text, in a grid
that all arms share.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from statistics import fmean

EXTENSIONS = 2  # how often a grid may grow
MIN_TUNING_SEEDS = 2  # fewest seeds that a rate is tuned on

Rate = float | tuple[float, ...]  # the value of the tuned key; for several keys a tuple of their values
Cell = float | str | None  # a table's cell with a rate, or without one (`rate_cell`)
# by rate, an arm's final selection loss with each tuning seed; infinite if that run diverged
Losses = Mapping[Rate, Sequence[float]]
_SEPARATOR = " / "  # between the values of several keys in a rate's cell


def make_rate(values: Iterable[float]) -> Rate:
    """The rate with one value for each tuned key: a number for a single key, else a tuple."""
    first, *rest = values
    return (first, *rest) if rest else first


def key_values(rate: Rate) -> tuple[float, ...]:
    """The values of the tuned keys at a rate, as a tuple."""
    return rate if isinstance(rate, tuple) else (rate,)


def grid_rates(axes: Iterable[Iterable[float]]) -> list[Rate]:
    """The rates of a grid: all combinations of the values of each tuned key."""
    return [make_rate(values) for values in product(*axes)]


def rate_text(rate: Rate | str) -> str:
    """The text of a rate, or of a table cell with a rate (`rate_cell`), for example `0.002`, or `0.002 / 0.1` for two
    keys.
    """
    return _SEPARATOR.join(f"{float(value):g}" for value in _split_cell(rate))


def rate_cell(rate: Rate | None) -> Cell:
    """The table cell that holds a rate: a number, or for several keys the text of their exact values; None for None."""
    return _SEPARATOR.join(map(repr, rate)) if isinstance(rate, tuple) else rate


def _split_cell(cell: Rate | str) -> list[str]:
    """The texts of the tuned keys' values at a rate, or in a cell."""
    return cell.split(_SEPARATOR) if isinstance(cell, str) else [*map(str, key_values(cell))]


def read_rate(cell: Rate | str) -> Rate:
    """The rate that a cell holds (`rate_cell`); a rate is returned as it is. Raises ValueError if the cell holds no
    rate.
    """
    if not isinstance(cell, str):
        return cell
    return make_rate(int(text) if text.isdecimal() else float(text) for text in _split_cell(cell))


@dataclass(frozen=True)
class TuningOutcome:
    """The learning rate of each arm, or the rates that must be measured before a rate is chosen."""

    rates: dict[str, Rate]  # by arm, the rate of the lowest mean loss; arms in `at_edge` have none
    missing: tuple[Rate, ...] = ()  # rates to measure for every arm before a rate is chosen; then `rates` is empty
    # arms that get no verdict: their best rate is at an edge of a grid that may not grow again, in any key, or they
    # diverged at every rate
    at_edge: tuple[str, ...] = ()


def tuning_outcome(
    axes: Sequence[Sequence[float]], losses: Mapping[str, Losses], possible: Callable[[Rate], bool] = lambda rate: True
) -> TuningOutcome:
    """The outcome of tuning by the losses so far; every arm is trained at all rates of the grid.

    A rate at which any seed diverged has infinite mean loss. Where an arm's best rate has a key's highest (lowest)
    value, twice (half) this value is added to the grid of every arm. The grid grows at most `EXTENSIONS` times, and
    only by `possible` values.

    Args:
        axes: planned values of each tuned key, above 0; an odd whole number is halved exactly if that is possible, else
            rounded down.
        losses: by arm, with `MIN_TUNING_SEEDS` seeds or more at each rate.
        possible: whether the tuned keys may have the values of a rate.
    """
    axes = [sorted(set(values)) for values in axes]
    for growths in count():
        rates = grid_rates(axes)
        if missing_rates := tuple(rate for rate in rates if not all(rate in by_rate for by_rate in losses.values())):
            return TuningOutcome({}, missing_rates)
        outcome = rate_choice(losses, rates)
        grown_axes = _grown_axes(
            axes, {arm: best_rate(losses[arm], rates) for arm in outcome.at_edge}, losses, possible
        )
        if growths == EXTENSIONS or grown_axes == axes:
            return outcome
        axes = grown_axes


def rate_choice(losses: Mapping[str, Losses], rates: Iterable[Rate] | None = None) -> TuningOutcome:
    """Each arm's rate of lowest mean loss in `rates` (None: all). An arm gets none
    if its best rate is at the grid's edge or has a diverged run."""
    rate_by_arm, edge_arms = {}, []
    for arm, by_rate in losses.items():
        candidates = list(by_rate if rates is None else rates)
        best = rate_by_arm[arm] = best_rate(by_rate, candidates)
        is_at_edge = any(
            value in (axis[0], axis[-1]) for value, axis in zip(key_values(best), _axes(candidates), strict=True)
        )
        if is_at_edge or mean_loss(by_rate[best]) == math.inf:
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
    axes = _axes(rates)

    def distance_from_middle(rate: Rate) -> float:
        return sum(
            abs(values.index(value) - (len(values) - 1) / 2)
            for value, values in zip(key_values(rate), axes, strict=True)
        )

    return min(rates, key=lambda rate: (mean_loss(by_rate[rate]), distance_from_middle(rate)))


def _axes(rates: Iterable[Rate]) -> list[list[float]]:
    """The ascending values of each tuned key in `rates`, a list for each key."""
    return [sorted(set(values)) for values in zip(*map(key_values, rates), strict=True)]


def _grown_axes(
    axes: list[list[float]],
    rates_by_arm: Mapping[str, Rate],
    losses: Mapping[str, Losses],
    possible: Callable[[Rate], bool],
) -> list[list[float]]:
    """The axes, extended at each edge where an arm's rate (`rates_by_arm`) lies; an arm that diverged at every rate
    extends no axis.
    """
    edge_rates = [key_values(rate) for arm, rate in rates_by_arm.items() if mean_loss(losses[arm][rate]) < math.inf]

    def first_possible_value(key_index: int, candidates: list[float]) -> list[float]:
        """A list of the first of `candidates` that is possible for the tuned key number `key_index`; [] if no candidate
        is.
        """
        grids = (
            (value, grid_rates([*axes[:key_index], [value], *axes[key_index + 1 :]]))
            for value in candidates
            if value > 0
        )
        return [value for value, rates in grids if all(map(possible, rates))][:1]

    new_axes = []
    for key_index, values in enumerate(axes):
        edge_values = {rate[key_index] for rate in edge_rates}
        # a key of whole numbers takes the latter
        halves = [values[0] // 2] if values[0] % 2 == 0 else [values[0] / 2, values[0] // 2]
        smaller = first_possible_value(key_index, halves) if values[0] in edge_values else []
        larger = first_possible_value(key_index, [values[-1] * 2]) if values[-1] in edge_values else []
        new_axes.append([*smaller, *values, *larger])
    return new_axes


def mean_loss(losses: Sequence[float]) -> float:
    """The mean loss over seeds; infinite if any loss is not finite, so that tuning avoids rates at which some seeds
    diverge.
    """
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
