"""Paired differences of arms to the baseline: of any series that has values by unit, at one place or along its axis."""

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import numpy as np

from lm.report.pictures import FIRST_POSITION
from lm.report.sections import Arm, Line, Section, Units, units_at
from lm.runs.series import Series, number
from lm.statistics.intervals import FEWEST, Interval, mean_ends, over_seeds, paired_difference, sampled


@dataclass(frozen=True)
class Difference:
    """Arm minus baseline: an interval and how it was made, or why there is none."""

    arm: str
    section: Section
    line: Line
    place: str  # label, such as `4x-8x`; empty: of a single number
    what: str  # all of these in words
    interval: Interval | None  # in the unit of the series
    note: str


def differences(arms: tuple[Arm, ...], found: tuple[Section, ...]) -> list[Difference]:
    """Differences of every arm to the first, in every line but the controls that has values by unit, at the farthest place that both
    have."""
    return [
        _of_line(arm, arms[0], section, line)
        for arm in arms[1:]
        for section in found
        for line in section.lines
        if any(one.samples and not one.control for one in (*section.of_arm(arm, line), *section.of_arm(arms[0], line)))
    ]


def _of_line(arm: Arm, base: Arm, section: Section, line: Line) -> Difference:
    measured = [[one for one in section.of_arm(each, line) if one.samples] for each in (arm, base)]
    ours, theirs = ({label for one in some for label in one.places} for some in measured)
    place = [label for label in section.places if label in (ours & theirs or ours | theirs)][-1]
    one = next(one for some in measured for one in some if place in one.places)
    interval, note = _shown(*_difference(arm, base, section, line, place), one.unit == "fraction")
    return Difference(arm.label, section, line, place, _in_words(one, line, place), interval, note)


def _in_words(one: Series, line: Line, place: str) -> str:
    where = ""
    if one.axis is not None:
        start, stop = units_at(one, place).place
        where = f" {one.axis.before} {f'{number(start)}-{number(stop)}' if one.bins else place}"
    return ", ".join(filter(None, (line.metric, line.what))) + where + (line.setting and f", {line.setting}")


def _shown(interval: Interval | None, note: str, fraction: bool) -> tuple[Interval | None, str]:
    """An interval as it may be shown: none without spread, and of a difference of fractions within -1 and 1."""
    if interval is None or not interval.bounded:
        return None, "all sequences, or all seeds, agree: their spread gives no interval" if interval else note
    return replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high)) if fraction else interval, note


def _difference(arm: Arm, base: Arm, section: Section, line: Line, place: str) -> tuple[Interval | None, str]:
    def units(one: Arm) -> dict[tuple[int, ...], Units]:
        series = {run.seeds: section.series.get((run, line)) for run in one.runs}
        return {seeds: found for seeds, each in series.items() if each and (found := units_at(each, place))}

    ours, theirs = units(arm), units(base)
    for one, found in ((arm, ours), (base, theirs)):
        if not found:
            return None, f"{one.label} was not evaluated on it"
    every = [*ours.values(), *theirs.values()]
    if len({one.identity[0] for one in every}) > 1:
        return None, "not measured on the same tokens: the data fingerprints differ"
    if len({(one.identity, one.place, one.values.shape, one.weights.tobytes()) for one in every}) > 1:
        return None, "not measured on the same tokens: the evaluation sequences or positions differ"
    if not all(np.isfinite(one.values).all() for one in every):
        return None, "not finite on some sequences"
    shared, weights = sorted(ours.keys() & theirs.keys()), every[0].weights
    if not shared:
        return None, "no seed in common: a difference could be that of the seeds"
    if len(shared) >= 2:
        values = np.array([np.average(ours[seed].values - theirs[seed].values, weights=weights) for seed in shared])
        note = f"mean over {len(shared)} paired seeds, Student t interval over seeds, on these evaluation sequences"
        return over_seeds(values).interval(), note
    mine, other = ours[shared[0]].values, theirs[shared[0]].values
    documents = len(np.unique(every[0].groups))
    over = f"{len(mine)} sequences" if documents == len(mine) else f"{documents} documents ({len(mine)} sequences)"
    note = f"paired by sequence, Student t over {over}: covers the choice of what was evaluated on, not training noise"
    alone = "one seed per arm" if len(ours) == len(theirs) == 1 else f"seed {seeds_shown(shared[0])} alone is in both arms"
    note += f"; {alone}: says nothing about the method, as differences of several times this interval can be noise of the seed"
    if documents < FEWEST:
        return None, f"sequences of {documents} documents: an interval takes at least {FEWEST}"
    interval = paired_difference(mine, other, weights, every[0].groups)
    return replace(interval, over=f"{sampled(every[0].groups)}, 1 seed"), note


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seed, and after it those of the weights it started from, if they differ."""
    before = " after ".join(map(str, reversed(seeds[:-1])))
    return f"{seeds[-1]} after {before}" if before else str(seeds[-1])


# ---------------------------------------------------------------- along an axis


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
