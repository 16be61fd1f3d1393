"""Values of several runs along an axis, and the paired differences of two arms there."""

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import numpy as np

from lm.report.plots import FIRST_POSITION
from lm.runs.series import Series
from lm.statistics.intervals import FEWEST, mean_ends, over_seeds, sampled


@dataclass(frozen=True, eq=False)
class AlongAxis:
    """Values of each seed along an axis, and their mean.

    Attributes:
        x: (points,) the points, or the middles of bins from position 16 on.
        seeds: (seeds, points).
        low, high: (points,) 95 % interval of the mean; NaN where there is none.
        over: what the interval covers; empty: there is none.
    """

    x: np.ndarray
    seeds: np.ndarray
    low: np.ndarray
    high: np.ndarray
    over: str

    @property
    def mean(self) -> np.ndarray:
        """Over seeds, (points,)."""
        return self.seeds.mean(axis=0)


@dataclass(frozen=True, eq=False)
class _Column:
    """Values by unit at one place, each array (units,), and the identity of the sequences measured."""

    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    identity: tuple[str, str]

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))


def values_along(series: list[Series]) -> AlongAxis | None:
    """The means of several runs where all have them; None if they share no place."""
    shared, x = _places(series)
    seeds = np.array([[_mean(one, place) for place in shared] for one in series])
    nothing = np.full(len(x), np.nan)
    return AlongAxis(x, seeds, nothing, nothing, "") if len(x) else None


def _mean(one: Series, place: tuple[float, float]) -> float:
    inside = _inside(one, place)
    widths = np.diff(one.axis.values)[inside] if one.bins else np.ones(1)
    return float(one.means[inside] @ widths / widths.sum())


def differences_along(pairs: list[tuple[Series, Series]]) -> AlongAxis | None:
    """Differences of pairs of runs, one pair a seed, sequence by sequence, where all were measured on the same; None: nowhere.

    Intervals are Student t over seeds, point by point; of one seed over documents. There is none where all seeds agree about a fraction.
    """
    series = [one for pair in pairs for one in pair if one.samples]
    shared, x = _places(series)
    columns = [[_column(one, place) for place in shared] for one in series]
    alike = np.array([len({one.identity for one in place}) == 1 for place in zip(*columns, strict=True)], dtype=bool)
    if len(columns) < 2 * len(pairs) or not alike.any():
        return None
    x, columns = x[alike], [[one for one, same in zip(row, alike, strict=True) if same] for row in columns]
    differences = [
        [replace(one, values=one.values - other.values) for one, other in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(columns[::2], columns[1::2], strict=True)
    ]
    seeds = np.array([[one.mean for one in row] for row in differences])
    low, high, over = _ends(differences, seeds)
    without, limit = np.isinf(low) | (low == high), 1 if pairs[0][0].unit == "fraction" else np.inf
    low, high = (np.where(without, np.nan, np.clip(ends, -limit, limit)) for ends in (low, high))
    return AlongAxis(x, seeds, low, high, over)


def _ends(differences: list[list[_Column]], seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Ends of the interval at each place, and what it covers."""
    first = differences[0]
    if len(seeds) > 1:
        found = over_seeds(seeds.T)
        return found.mean - found.half(), found.mean + found.half(), found.over
    if any(len(np.unique(one.groups)) < FEWEST for one in first):
        return np.full(len(first), np.nan), np.full(len(first), np.nan), ""
    ends = [mean_ends(one.values[:, None], one.weights, one.groups) for one in first]
    low, high = np.array(ends)[:, :, 0].T
    return low, high, f"{sampled(first[0].groups)}, 1 seed"


def _places(series: list[Series]) -> tuple[list[tuple[float, float]], np.ndarray]:
    """Where all series have values, (start, stop), and where that is drawn: their common points, or bins between their common edges."""
    shared = reduce(np.intersect1d, [np.array(one.axis.values, dtype=float) for one in series]) if series else np.empty(0)
    if not series or not series[0].bins:
        return [(x, x) for x in shared], shared
    shared = shared[shared >= min(FIRST_POSITION, shared[-2:].min())]
    return list(pairwise(shared)), np.sqrt(shared[:-1] * shared[1:])


def _inside(one: Series, place: tuple[float, float]) -> np.ndarray:
    """The columns of a place, (columns,) bool."""
    values = np.array(one.axis.values)
    return (values[:-1] >= place[0]) & (values[1:] <= place[1]) if one.bins else values == place[0]


def _column(one: Series, place: tuple[float, float]) -> _Column:
    inside = _inside(one, place)
    if one.bins:
        (sample,), widths = one.samples, np.diff(one.axis.values)[inside]
        values = sample.values[:, inside] @ widths / widths.sum()
    else:
        sample, values = one.column(int(np.flatnonzero(inside)[0]))
    return _Column(values, sample.weights, sample.groups, (one.data_fingerprint, sample.sha256))
