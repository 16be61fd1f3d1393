"""Choosing each arm's learning rate, or several keys together, by its loss on the selection text, over one grid that all arms share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

EXTENSIONS = 2  # how often a grid may grow
FEWEST_TUNING_SEEDS = 2  # that a rate is tuned on

Rate = float | tuple[float, ...]  # the value of the tuned key; of several keys theirs, in their order
Losses = Mapping[Rate, Sequence[float]]  # one arm's: by learning rate, the final selection loss of each tuning seed; inf: diverged
ANY = "any"  # in a cell, in place of the value of a key that a run doesn't have
_BETWEEN = " / "  # values of several keys


def rate_of(values: Iterable[float]) -> Rate:
    """The rate of these values, one for each tuned key."""
    first, *others = values
    return (first, *others) if others else first


def coordinates(rate: Rate) -> tuple[float, ...]:
    """The value of each tuned key."""
    return rate if isinstance(rate, tuple) else (rate,)


def rates_of(axes: Iterable[Iterable[float]]) -> list[Rate]:
    """The rates of a grid, from the values of each tuned key."""
    return [rate_of(values) for values in product(*axes)]


def rate_words(rate: Rate | str) -> str:
    """A rate or its cell as it is shown, such as `0.002`, or `0.002 / 0.1` of two keys."""
    values = _texts(rate) if isinstance(rate, str) else coordinates(rate)
    return _BETWEEN.join(ANY if value == ANY else f"{float(value):g}" for value in values)


def rate_cell(rate: Rate | None, has: Sequence[bool] = ()) -> float | str | None:
    """A rate as files and tables hold it: a number, or of several keys the text of their exact values. `has`: for each key, whether the run
    has it; all, if empty."""
    if rate is not None and not all(has):
        return _BETWEEN.join(repr(value) if there else ANY for value, there in zip(coordinates(rate), has, strict=True))
    return _BETWEEN.join(map(repr, rate)) if isinstance(rate, tuple) else rate


def full_cells(cells: Iterable[float | str | None], grid: Iterable[float | str | None]) -> dict[float | str, list[float | str | None]]:
    """By cell, the cells that it stands for if it has `ANY`: those of `cells` that agree in other keys, and the one in the middle of the
    values in `grid`, which `best_rate` chooses. A key that has no value in `grid` is left out of all. Empty: no cell has `ANY`."""
    known, planned = ({cell: _texts(cell) for cell in some if cell is not None and cell == cell} for some in (cells, grid))
    if not any(ANY in values for values in known.values()) or len({len(values) for values in planned.values()}) > 1:
        return {}
    axes = [sorted({value for value in values if value != ANY}, key=float) for values in zip(*planned.values(), strict=True)]
    kept = [number for number, axis in enumerate(axes) if axis]
    full: dict[float | str, list[float | str | None]] = {}
    for cell, values in known.items():
        middle = [axis[(len(axis) - 1) // 2] if axis and value == ANY else value for value, axis in zip(values, axes, strict=True)]
        whole = [middle, *(others for others in known.values() if all(others[number] != ANY for number in kept))]
        rates = [[rate[number] for number in kept] for rate in whole if all(values[number] in (ANY, rate[number]) for number in kept)]
        full[cell] = [*dict.fromkeys(rate_cell(read_rate(_BETWEEN.join(rate))) if rate else None for rate in rates)]
    return full


def _texts(cell: float | str) -> list[str]:
    """The values of a cell as text."""
    return cell.split(_BETWEEN) if isinstance(cell, str) else [str(cell)]


def read_rate(cell: Rate | str) -> Rate:
    """The rate of a cell; a rate as it is. Raises ValueError: it is none."""
    if not isinstance(cell, str):
        return cell
    return rate_of(int(text) if text.isdecimal() else float(text) for text in _texts(cell))


@dataclass(frozen=True)
class Tuned:
    """The learning rates of the arms, or what is missing to choose them.

    Attributes:
        rates: by arm, that of the lowest mean loss; arms still at an edge have none.
        missing: rates to measure for every arm before anything is chosen; then `rates` is empty.
        at_edge: arms whose best rate is at an edge of the grid, of any key, that may not grow again, or that diverged at every rate: no
            verdict on them.
    """

    rates: dict[str, Rate]
    missing: tuple[Rate, ...] = ()
    at_edge: tuple[str, ...] = ()


def tuned(axes: Sequence[Sequence[float]], losses: Mapping[str, Losses], possible: Callable[[Rate], bool] = lambda rate: True) -> Tuned:
    """The outcome by the losses so far, where `axes` are the planned values of each tuned key, which every arm is trained at all of.

    A rate at which any seed diverged has mean loss infinite. Where the best value of some arm is the highest (lowest) measured of a key,
    the grid grows there by twice the highest (half the lowest) for every arm. It grows at most `EXTENSIONS` times, and not where that is
    not `possible`.

    Args:
        axes: values above 0; of whole numbers a key's grow by whole numbers.
        losses: by arm; each arm's at least at the rates of the grid, with `FEWEST_TUNING_SEEDS` seeds or more.
        possible: whether the tuned keys may have the values of a rate.

    Raises:
        ValueError: a grid or losses that are not as described.
    """
    if not axes or not losses or any(not values or min(values) <= 0 for values in axes):
        raise ValueError("needs a grid of learning rates above 0, and an arm")
    axes = [sorted(set(values)) for values in axes]
    grown = 0
    while True:
        asked = rates_of(axes)
        for arm, by_rate in losses.items():
            for rate in asked:
                if rate in by_rate and len(by_rate[rate]) < FEWEST_TUNING_SEEDS:
                    raise ValueError(f"arm {arm}: {len(by_rate[rate])} seeds at {rate_words(rate)}; tuning needs {FEWEST_TUNING_SEEDS}")
        if missing := tuple(rate for rate in asked if not all(rate in by_rate for by_rate in losses.values())):
            return Tuned({}, missing)
        outcome = chosen(losses, asked)
        grown_axes = _grown(axes, {arm: best_rate(losses[arm], asked) for arm in outcome.at_edge}, losses, possible)
        if grown == EXTENSIONS or grown_axes == axes:
            return outcome
        axes = grown_axes
        grown += 1


def chosen(losses: Mapping[str, Losses], rates: Iterable[Rate] | None = None) -> Tuned:
    """The rate of the lowest mean loss of each arm among those measured, or among `rates`; none of an arm whose best is at an edge."""
    rate_by_arm, at_edge = {}, []
    for arm, by_rate in losses.items():
        asked = list(by_rate if rates is None else rates)
        best = rate_by_arm[arm] = best_rate(by_rate, asked)
        edges = [(values[0], values[-1]) for values in _axes(asked)]
        if any(value in ends for value, ends in zip(coordinates(best), edges, strict=True)) or mean_loss(by_rate[best]) == math.inf:
            at_edge.append(arm)
    return Tuned({arm: rate for arm, rate in rate_by_arm.items() if arm not in at_edge}, at_edge=tuple(at_edge))


def crossed_rates(base: str, rates: Mapping[str, Rate]) -> dict[str, tuple[Rate, ...]]:
    """The rates that the final seeds of each arm are trained at: its own first, then the baseline's; the baseline's seeds at those of all
    arms. Tuning seeds are few; what they chose for one arm of a comparison is tried with the other before a difference is believed.

    Args:
        base: the baseline; without a rate of its own, nothing is crossed.
        rates: by arm, as tuning chose them.
    """
    others = {arm: rates.values() if arm == base else (rates[base],) for arm in rates} if base in rates else {}
    return {arm: tuple(dict.fromkeys((rate, *others.get(arm, ())))) for arm, rate in rates.items()}


def best_rate(by_rate: Losses, asked: Iterable[Rate]) -> Rate:
    """The rate of the lowest mean loss; of several, as where a task is solved at all of them, the one nearest the middle of the grid."""
    asked = sorted(asked)
    axes = _axes(asked)

    def off_middle(rate: Rate) -> float:
        return sum(abs(values.index(value) - (len(values) - 1) / 2) for value, values in zip(coordinates(rate), axes, strict=True))

    return min(asked, key=lambda rate: (mean_loss(by_rate[rate]), off_middle(rate)))


def _axes(rates: Iterable[Rate]) -> list[list[float]]:
    """The values of each tuned key at these rates, ascending."""
    return [sorted(set(values)) for values in zip(*map(coordinates, rates), strict=True)]


def _grown(
    axes: list[list[float]], best: Mapping[str, Rate], losses: Mapping[str, Losses], possible: Callable[[Rate], bool]
) -> list[list[float]]:
    """The axes, grown for arms whose best is at an edge; those that diverged everywhere ask for nothing."""
    growing = [coordinates(rate) for arm, rate in best.items() if mean_loss(losses[arm][rate]) < math.inf]
    grown = []
    for number, values in enumerate(axes):
        at = {rate[number] for rate in growing}
        half = values[0] // 2 if isinstance(values[0], int) else values[0] / 2
        more = [half] * (values[0] in at and half > 0) + [values[-1] * 2] * (values[-1] in at)
        allowed = [value for value in more if all(map(possible, rates_of([*axes[:number], [value], *axes[number + 1 :]])))]
        grown.append(sorted([*values, *allowed]))
    return grown


def mean_loss(losses: Sequence[float]) -> float:
    """Over seeds; infinite if any is not finite: a rate at which training diverges now and then is not one to use."""
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


def rate_differences(arm: str, base: str, losses: Mapping[str, Losses]) -> dict[Rate, list[float]]:
    """Arm minus baseline at every learning rate that both were measured at: by rate, one value a tuning seed. Infinite where only
    one of them diverged; seeds of which both did are left out."""
    pairs = {rate: zip(losses[arm][rate], losses[base][rate], strict=True) for rate in sorted(losses[arm].keys() & losses[base].keys())}
    return {rate: [ours - theirs for ours, theirs in both if math.isfinite(ours) or math.isfinite(theirs)] for rate, both in pairs.items()}
