"""Choosing each arm's learning rate, or several keys together, by the loss on the selection text, over one grid that all arms share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from statistics import fmean

EXTENSIONS = 2  # how often a grid may grow
FEWEST_TUNING_SEEDS = 2  # fewest seeds that a rate is tuned on

Rate = float | tuple[float, ...]  # the value of the tuned key; for several keys a tuple of their values
Losses = Mapping[Rate, Sequence[float]]  # of one arm, by rate: the final selection loss of each tuning seed; inf: its run diverged
ANY = "any"  # stands in a rate's cell (`rate_cell`) for the value of a tuned key that a run doesn't have
_SEPARATOR = " / "  # between the values of several keys in a rate's cell


def rate_of(values: Iterable[float]) -> Rate:
    """The rate with these values, one value for each tuned key."""
    first, *rest = values
    return (first, *rest) if rest else first


def coordinates(rate: Rate) -> tuple[float, ...]:
    """The values of the tuned keys at a rate."""
    return rate if isinstance(rate, tuple) else (rate,)


def rates_of(axes: Iterable[Iterable[float]]) -> list[Rate]:
    """The rates of a grid, from the values of each tuned key."""
    return [rate_of(values) for values in product(*axes)]


def rate_words(rate: Rate | str) -> str:
    """A rate, or the cell that holds it, in words, such as `0.002`, or `0.002 / 0.1` for two keys."""
    values = _texts(rate) if isinstance(rate, str) else coordinates(rate)
    return _SEPARATOR.join(ANY if value == ANY else f"{float(value):g}" for value in values)


def rate_cell(rate: Rate | None, presence: Sequence[bool] = ()) -> float | str | None:
    """The cell of a rate in files and tables: a number, or for several keys the text of their exact values.

    presence: for each key, whether the run has it; empty: the run has all keys.
    """
    if rate is not None and not all(presence):
        return _SEPARATOR.join(repr(value) if is_present else ANY for value, is_present in zip(coordinates(rate), presence, strict=True))
    return _SEPARATOR.join(map(repr, rate)) if isinstance(rate, tuple) else rate


def full_cells(cells: Iterable[float | str | None], grid: Iterable[float | str | None]) -> dict[float | str, list[float | str | None]]:
    """The cells without `ANY` that each cell of a rate (`rate_cell`) stands for, by this cell.

    A run that lacks a tuned key has `ANY` in its cell. Such a cell stands for all `cells` with the same values of the other keys, and for
    the cell with the missing key's middle value in `grid`: of equal rates `best_rate` chooses the middle one. A key that has no value in
    the cells of `grid` is left out of all cells. Returns {} if no cell has `ANY`, or cells of `grid` have different numbers of keys.
    """
    cell_values, grid_values = ({cell: _texts(cell) for cell in group if cell is not None and cell == cell} for group in (cells, grid))
    if not any(ANY in values for values in cell_values.values()) or len({len(values) for values in grid_values.values()}) > 1:
        return {}
    axes = [sorted({value for value in values if value != ANY}, key=float) for values in zip(*grid_values.values(), strict=True)]
    key_numbers = [number for number, axis in enumerate(axes) if axis]
    expansion: dict[float | str, list[float | str | None]] = {}
    for cell, values in cell_values.items():
        middle = [axis[(len(axis) - 1) // 2] if axis and value == ANY else value for value, axis in zip(values, axes, strict=True)]
        candidates = [middle, *(candidate for candidate in cell_values.values() if all(candidate[number] != ANY for number in key_numbers))]
        matches = (rate for rate in candidates if all(values[number] in (ANY, rate[number]) for number in key_numbers))
        rates = [[rate[number] for number in key_numbers] for rate in matches]
        expansion[cell] = [*dict.fromkeys(rate_cell(read_rate(_SEPARATOR.join(rate))) if rate else None for rate in rates)]
    return expansion


def _texts(cell: float | str) -> list[str]:
    """The values of the tuned keys in a cell, as text."""
    return cell.split(_SEPARATOR) if isinstance(cell, str) else [str(cell)]


def read_rate(cell: Rate | str) -> Rate:
    """The rate that a cell holds (`rate_cell`); a rate is returned as it is. Raises ValueError if the cell holds no rate."""
    if not isinstance(cell, str):
        return cell
    return rate_of(int(text) if text.isdecimal() else float(text) for text in _texts(cell))


@dataclass(frozen=True)
class TuningOutcome:
    """The learning rates of the arms, or the rates that must be measured to choose them."""

    rates: dict[str, Rate]  # by arm, the rate of the lowest mean loss; arms in `at_edge` have none
    missing: tuple[Rate, ...] = ()  # rates to measure for every arm before a rate is chosen; then `rates` is empty
    # arms that get no verdict: their best rate is at an edge of a grid that may not grow again, in any key, or they diverged at every rate
    at_edge: tuple[str, ...] = ()


def tuning_outcome(
    axes: Sequence[Sequence[float]], losses: Mapping[str, Losses], possible: Callable[[Rate], bool] = lambda rate: True
) -> TuningOutcome:
    """The outcome of tuning by the losses so far; every arm is trained at all rates of the grid.

    A rate at which any seed diverged has infinite mean loss. Where the best value of some arm is the highest (lowest) value of a key,
    the grid grows there by twice the highest (half the lowest) value for every arm. It grows at most `EXTENSIONS` times, and only by
    `possible` values.

    Args:
        axes: planned values of each tuned key, above 0; an odd whole number is halved exactly if that is possible, else rounded down.
        losses: by arm, with `FEWEST_TUNING_SEEDS` seeds or more at each rate.
        possible: whether the tuned keys may have the values of a rate.
    """
    axes = [sorted(set(values)) for values in axes]
    for growths in count():
        rates = rates_of(axes)
        if missing_rates := tuple(rate for rate in rates if not all(rate in by_rate for by_rate in losses.values())):
            return TuningOutcome({}, missing_rates)
        outcome = rate_choice(losses, rates)
        grown_axes = _grown_axes(axes, {arm: best_rate(losses[arm], rates) for arm in outcome.at_edge}, losses, possible)
        if growths == EXTENSIONS or grown_axes == axes:
            return outcome
        axes = grown_axes


def rate_choice(losses: Mapping[str, Losses], rates: Iterable[Rate] | None = None) -> TuningOutcome:
    """Each arm's rate of the lowest mean loss, among all measured rates or among `rates`; no rate for an arm whose best is at an edge."""
    rate_by_arm, edge_arms = {}, []
    for arm, by_rate in losses.items():
        candidates = list(by_rate if rates is None else rates)
        best = rate_by_arm[arm] = best_rate(by_rate, candidates)
        edges = [(values[0], values[-1]) for values in _axes(candidates)]
        if any(value in ends for value, ends in zip(coordinates(best), edges, strict=True)) or mean_loss(by_rate[best]) == math.inf:
            edge_arms.append(arm)
    return TuningOutcome({arm: rate for arm, rate in rate_by_arm.items() if arm not in edge_arms}, at_edge=tuple(edge_arms))


def crossed_rates(base: str, rates: Mapping[str, Rate]) -> dict[str, tuple[Rate, ...]]:
    """The rates that the final seeds of each arm are trained at: its own rate, then the baseline's; for the baseline the rates of all arms.

    Tuning seeds are few: the rate that they chose for one arm is tried with the other arm, too, before a difference is believed.

    Args:
        base: the baseline; if it has no rate, every arm is trained at its own rate alone.
        rates: by arm, as tuning chose them.
    """
    opposite_rates = {arm: rates.values() if arm == base else (rates[base],) for arm in rates} if base in rates else {}
    return {arm: tuple(dict.fromkeys((rate, *opposite_rates.get(arm, ())))) for arm, rate in rates.items()}


def best_rate(by_rate: Losses, rates: Iterable[Rate]) -> Rate:
    """The rate of the lowest mean loss; of rates with equal losses, as where all solve a task, the one nearest the grid's middle."""
    rates = sorted(rates)
    axes = _axes(rates)

    def off_middle(rate: Rate) -> float:
        return sum(abs(values.index(value) - (len(values) - 1) / 2) for value, values in zip(coordinates(rate), axes, strict=True))

    return min(rates, key=lambda rate: (mean_loss(by_rate[rate]), off_middle(rate)))


def _axes(rates: Iterable[Rate]) -> list[list[float]]:
    """The values of each tuned key at these rates, ascending."""
    return [sorted(set(values)) for values in zip(*map(coordinates, rates), strict=True)]


def _grown_axes(
    axes: list[list[float]], best: Mapping[str, Rate], losses: Mapping[str, Losses], possible: Callable[[Rate], bool]
) -> list[list[float]]:
    """The axes, grown at the edges where the rates of `best` lie (by arm); an arm that diverged at every rate adds no value."""
    edge_rates = [coordinates(rate) for arm, rate in best.items() if mean_loss(losses[arm][rate]) < math.inf]

    def first_possible(number: int, candidates: list[float]) -> list[float]:
        """The first candidate value that the tuned key of this number may have, in a list; [] if there is none."""
        grids = ((value, rates_of([*axes[:number], [value], *axes[number + 1 :]])) for value in candidates if value > 0)
        return [value for value, rates in grids if all(map(possible, rates))][:1]

    new_axes = []
    for number, values in enumerate(axes):
        edge_values = {rate[number] for rate in edge_rates}
        halves = [values[0] // 2] if values[0] % 2 == 0 else [values[0] / 2, values[0] // 2]  # a key of whole numbers takes the latter
        smaller = first_possible(number, halves) if values[0] in edge_values else []
        larger = first_possible(number, [values[-1] * 2]) if values[-1] in edge_values else []
        new_axes.append([*smaller, *values, *larger])
    return new_axes


def mean_loss(losses: Sequence[float]) -> float:
    """The mean loss over seeds; infinite if any loss is not finite: a rate at which training diverges now and then is not to be used."""
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf
