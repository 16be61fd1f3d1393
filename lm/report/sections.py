"""Sections of a report: the series of all runs that are shown together, their numbers by arm, and paired differences of arms."""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import get_args

import numpy as np

from lm.report.pictures import FIRST_POSITION
from lm.runs.record import RunRecord
from lm.runs.series import Series, Shape, number, series_names
from lm.statistics.intervals import FEWEST, Interval, interval_of, over_seeds, paired_difference, sampled

WILSON = (
    "Wilson's over questions or the sequences that ask several, for several seeds each end of Student's t over seeds that lies farther out"
)


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RunRecord, ...]  # by seed


@dataclass(frozen=True)
class Line:
    """The parts of a name that the series of several runs share that are one line of a picture, one row of a table."""

    metric: str
    what: str  # with its options where they tell it apart from others of its name
    setting: str

    @property
    def of(self) -> tuple[str, ...]:
        """Words for what is measured and how, without the metric."""
        return tuple(filter(None, (self.what, self.setting)))


@dataclass(frozen=True, eq=False)
class Section:
    """Series of one title and shape, of all runs."""

    title: str
    series: dict[tuple[RunRecord, Line], Series]  # in the order of the runs' files

    @property
    def first(self) -> Series:
        """One of its series: what they share is read from it."""
        return next(iter(self.series.values()))

    @cached_property
    def lines(self) -> list[Line]:
        """Its lines, in the order of the runs' files."""
        return list(dict.fromkeys(line for _, line in self.series))

    @property
    def metrics(self) -> list[str]:
        """Its metrics, likewise."""
        return list(dict.fromkeys(line.metric for line in self.lines))

    @property
    def of(self) -> list[str]:
        """Words for what is measured and how, likewise."""
        return list(dict.fromkeys(", ".join(line.of) for line in self.lines))

    @property
    def shape(self) -> Shape:
        """The shape of its series' axis."""
        return self.first.shape

    def example(self, metric: str) -> Series:
        """A series of a metric; one with samples, if there is one."""
        return max((each for each in self.series.values() if each.metric == metric), key=lambda each: len(each.samples))

    @cached_property
    def places(self) -> dict[str, tuple[float, float]]:
        """All places, ascending; those of bins by training lengths."""
        every = [(each, *item) for each in self.series.values() for item in each.places.items()]
        order = {label: stop / (each.seq_len if each.bins else 1) for each, label, (_, stop) in every}
        places = {label: place for _, label, place in every}
        return {label: places[label] for label in sorted(places, key=order.get)}

    @property
    def seq_lens(self) -> list[int]:
        """Training lengths of the runs, ascending, if the axis is in tokens."""
        return sorted({each.seq_len for each in self.series.values() if each.axis and each.axis.unit == "tokens"})

    @property
    def how(self) -> str:
        """How its intervals are made, in words, where `interval` has two ways; else empty."""
        return WILSON if any(each.interval == "wilson" for each in self.series.values()) else ""

    def of_run(self, run: RunRecord) -> list[Series]:
        """All series of a run."""
        return [each for (owner, _), each in self.series.items() if owner is run]

    def of_arm(self, arm: Arm, line: Line) -> list[Series]:
        """A line of an arm, a series each run that has it."""
        return [self.series[run, line] for run in arm.runs if (run, line) in self.series]

    def sha256(self, run: RunRecord) -> str | None:
        """The sha256 of the sequences that a run was measured on; of several sets one of all their sums. None if it wasn't."""
        sums = sorted({sha256 for _, sha256 in identities(self.of_run(run))})
        return sums[0] if len(sums) == 1 else hashlib.sha256(", ".join(sums).encode()).hexdigest() if sums else None

    def tokens_seen(self, run: RunRecord) -> str | None:
        """Tokens that a run had seen when it was measured."""
        own = self.of_run(run)
        seen = {evaluation.tokens_seen for evaluation in run.evaluations if any(each in evaluation.series for each in own)}
        return ", ".join(f"{tokens:,}" for tokens in sorted(seen)) or None

    def is_apart(self, arm: Arm) -> bool:
        """Whether runs of the arm were measured on different sequences in some line, so that they have no mean there."""
        return any(len(identities(self.of_arm(arm, line), place)) > 1 for line in self.lines for place in self.places)

    def alike(self, arm: Arm, line: Line, place: str) -> list[Series]:
        """The series of a line of an arm that have a place; none if they were measured on different sequences there."""
        series = [each for each in self.of_arm(arm, line) if place in each.places]
        return series if len(identities(series, place)) < 2 else []

    def mean(self, arm: Arm, line: Line, place: str) -> float | None:
        """Mean over the arm's runs; None if none has it, or if they were measured on different sequences."""
        series = self.alike(arm, line, place)
        return float(np.mean([each.mean_at(place) for each in series])) if series else None

    def interval(self, arm: Arm, line: Line, place: str) -> Interval | None:
        """At a point: of one run that of its series; of several Student's t over seeds, but never narrower than Wilson's."""
        series, mean = self.alike(arm, line, place), self.mean(arm, line, place)
        if mean is None or not np.isfinite(mean) or series[0].interval == "none":
            return None
        alone = [interval_of(each, each.column_at(place), mean) for each in series]
        if len(series) == 1:
            return alone[0]
        seeds = over_seeds(np.array([each.mean_at(place) for each in series])).interval()
        if series[0].interval != "wilson":
            return seeds
        low, high = min(each.low for each in alone), max(each.high for each in alone)
        if seeds.bounded:
            low, high = min(low, max(0.0, seeds.low)), max(high, min(1.0, seeds.high))
        return Interval(mean, low, high, seeds.over)


def sections(arms: tuple[Arm, ...]) -> tuple[Section, ...]:
    """Everything that the runs measured, by title: single numbers first, then by bins, then by points."""
    every = [(run, each) for arm in arms for run in arm.runs for each in run.series]
    names = series_names(each for _, each in every)
    titles: dict[tuple[str, Shape], dict[tuple[RunRecord, Line], Series]] = {}
    for run, each in every:
        titles.setdefault((each.shown.title, each.shape), {})[run, Line(each.metric, names[each], each.setting)] = each
    by_title = [Section(title, series) for (title, _), series in titles.items()]
    return tuple(sorted(by_title, key=lambda section: get_args(Shape).index(section.shape)))


def identities(series: list[Series], place: str | None = None) -> set[tuple[str, str]]:
    """(data fingerprint, sha256 of the sequences) that series were measured on, at one of their places or at all; none of means alone."""
    measured = [each for each in series if each.samples and (place is None or place in each.places)]
    samples = [(each, each.samples if place is None else [each.column(each.column_at(place))[0]]) for each in measured]
    return {(each.data_fingerprint, sample.sha256) for each, some in samples for sample in some}


# ---------------------------------------------------------------- differences


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


@dataclass(frozen=True, eq=False)
class Units:
    """Values by unit at one place, each array (units,), and what must be equal for units to be pairs."""

    identity: tuple[str, str]
    place: tuple[float, float]
    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    def minus(self, other: "Units") -> "Units":
        """The differences to the same units of another run."""
        return replace(self, values=self.values - other.values)


def units_at(series: Series, start: float, stop: float) -> Units | None:
    """Values by unit at a point `start`; of bins over those within a range, as `place` then says. None if the series has none there."""
    places = np.array(series.axis.values if series.axis else [0.0])
    columns = np.flatnonzero((places[:-1] >= start) & (places[1:] <= stop) if series.bins else places == start)
    if not series.samples or not len(columns):
        return None
    sample, values = series.column(int(columns[0]))
    if series.bins:
        start, values = places[columns[0]], np.average(sample.values[:, columns], axis=1, weights=np.diff(places)[columns])
    return Units((series.data_fingerprint, sample.sha256), (start, stop), values, sample.weights, sample.groups)


def mean_interval(differences: list[Units]) -> Interval | None:
    """The mean of paired differences, one array a seed: Student t over seeds, or of one seed over documents; None of too few of these."""
    first = differences[0]
    if len(differences) > 1:
        return over_seeds(np.array([each.mean for each in differences])).interval()
    if len(np.unique(first.groups)) < FEWEST:
        return None
    interval = paired_difference(first.values, np.zeros_like(first.values), first.weights, first.groups)
    return replace(interval, over=f"{sampled(first.groups)}, 1 seed")


def shown(interval: Interval | None, series: Series) -> Interval | None:
    """An interval of differences as it may be shown: none without spread, and of fractions within -1 and 1."""
    if interval is None or not interval.bounded:
        return None
    limit = 1.0 if series.unit == "fraction" else np.inf
    return replace(interval, low=max(-limit, interval.low), high=min(limit, interval.high))


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seed, and after it those of the weights it started from, if they differ."""
    before = " after ".join(map(str, reversed(seeds[:-1])))
    return f"{seeds[-1]} after {before}" if before else str(seeds[-1])


def differences(arms: tuple[Arm, ...], sections: tuple[Section, ...]) -> list[Difference]:
    """Differences of every arm to the first, in every line but the controls that has values by unit, at the farthest place that both
    have."""
    return [
        _of_line(arm, arms[0], section, line)
        for arm in arms[1:]
        for section in sections
        for line in section.lines
        if any(each.samples and not each.control for each in (*section.of_arm(arm, line), *section.of_arm(arms[0], line)))
    ]


def _of_line(arm: Arm, base: Arm, section: Section, line: Line) -> Difference:
    measured = [[each for each in section.of_arm(side, line) if each.samples] for side in (arm, base)]
    ours, theirs = ({label for each in some for label in each.places} for some in measured)
    place = [label for label in section.places if label in (ours & theirs or ours | theirs)][-1]
    series = next(each for some in measured for each in some if place in each.places)
    where = ""
    if series.axis is not None:
        start, stop = units_at(series, *series.places[place]).place
        where = f" {series.axis.before} {f'{number(start)}-{number(stop)}' if series.bins else place}"
    words = ", ".join(filter(None, (line.metric, line.what))) + where + (line.setting and f", {line.setting}")
    interval, note = _difference(arm, base, section, line, place)
    if interval and not interval.bounded:
        note = "all sequences, or all seeds, agree: their spread gives no interval"
    return Difference(arm.label, section, line, place, words, shown(interval, series), note)


def _difference(arm: Arm, base: Arm, section: Section, line: Line, place: str) -> tuple[Interval | None, str]:
    def units(side: Arm) -> dict[tuple[int, ...], Units]:
        series = {run.seeds: section.series.get((run, line)) for run in side.runs}
        known = {seeds: units_at(each, *each.places[place]) for seeds, each in series.items() if each and place in each.places}
        return {seeds: each for seeds, each in known.items() if each}

    ours, theirs = units(arm), units(base)
    for side, known in ((arm, ours), (base, theirs)):
        if not known:
            return None, f"{side.label} was not evaluated on it"
    every = [*ours.values(), *theirs.values()]
    if len({each.identity[0] for each in every}) > 1:
        return None, "not measured on the same tokens: the data fingerprints differ"
    if len({(each.identity, each.place, each.values.shape, each.weights.tobytes()) for each in every}) > 1:
        return None, "not measured on the same tokens: the evaluation sequences or positions differ"
    if not all(np.isfinite(each.values).all() for each in every):
        return None, "not finite on some sequences"
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None, "no seed in common: a difference could be that of the seeds"
    interval = mean_interval([ours[seed].minus(theirs[seed]) for seed in shared])
    if len(shared) >= 2:
        return interval, f"mean over {len(shared)} paired seeds, Student t interval over seeds, on these evaluation sequences"
    sequences, documents = len(every[0].values), len(np.unique(every[0].groups))
    if interval is None:
        return None, f"sequences of {documents} documents: an interval takes at least {FEWEST}"
    over = f"{sequences} sequences" if documents == sequences else f"{documents} documents ({sequences} sequences)"
    note = f"paired by sequence, Student t over {over}: covers the choice of what was evaluated on, not training noise"
    alone = "one seed per arm" if len(ours) == len(theirs) == 1 else f"seed {seeds_shown(shared[0])} alone is in both arms"
    note += f"; {alone}: says nothing about the method, as differences of several times this interval can be noise of the seed"
    return interval, note


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
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    over: str = ""

    @property
    def mean(self) -> np.ndarray:
        """Over seeds, (points,)."""
        return self.seeds.mean(axis=0)


def values_along(series: list[Series]) -> AlongAxis | None:
    """The means of several runs where all have them; None if they share no place."""
    places = _places(series)
    seeds = np.array([[_mean(each, *place) for place in places.values()] for each in series])
    return AlongAxis(np.array([*places]), seeds) if places else None


def _mean(series: Series, start: float, stop: float) -> float:
    values = np.array(series.axis.values)
    if not series.bins:
        return float(series.means[values == start][0])
    inside = (values[:-1] >= start) & (values[1:] <= stop)
    return float(np.average(series.means[inside], weights=np.diff(values)[inside]))


def differences_along(pairs: list[tuple[Series, Series]]) -> AlongAxis | None:
    """Differences of pairs of runs, one pair a seed, sequence by sequence, where all were measured on the same; None: nowhere.

    Intervals are Student t over seeds, point by point; of one seed over documents. There is none where all seeds agree about a fraction.
    """
    series = [each for pair in pairs for each in pair]
    places = _places(series) if all(each.samples for each in series) else {}
    units = {x: [units_at(each, *place) for each in series] for x, place in places.items()}
    units = {x: some for x, some in units.items() if len({each.identity for each in some}) == 1}
    if not units:
        return None
    apart = [[ours.minus(theirs) for ours, theirs in zip(some[::2], some[1::2], strict=True)] for some in units.values()]
    intervals = [mean_interval(each) for each in apart]
    ends = [(each.low, each.high) if each else (np.nan, np.nan) for each in (shown(each, series[0]) for each in intervals)]
    over = intervals[0].over if all(intervals) else ""
    return AlongAxis(np.array([*units]), np.array([[each.mean for each in some] for some in apart]).T, *np.array(ends).T, over)


def _places(series: list[Series]) -> dict[float, tuple[float, float]]:
    """Where all series have values, (start, stop), by where that is drawn: their common points, or bins between their common edges."""
    shared = reduce(np.intersect1d, [np.array(each.axis.values, dtype=float) for each in series]) if series else np.empty(0)
    if not series or not series[0].bins:
        return {x: (x, x) for x in shared.tolist()}
    shared = shared[shared >= min(FIRST_POSITION, shared[-2:].min())]
    return {float(np.sqrt(start * stop)): (start, stop) for start, stop in pairwise(shared.tolist())}
