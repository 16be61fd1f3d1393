"""Sections of a report: the series of all runs that are shown together, and their numbers by arm."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from lm.runs.record import RunRecord
from lm.runs.series import Series, Shape, series_names
from lm.statistics.intervals import Interval, interval_of, over_seeds

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
        return max((one for one in self.series.values() if one.metric == metric), key=lambda one: len(one.samples))

    @cached_property
    def places(self) -> dict[str, tuple[float, float]]:
        """All places, ascending; those of bins by training lengths."""
        found = {label: place for one in self.series.values() for label, place in one.places.items()}
        order = {label: place[1] / (one.seq_len if one.bins else 1) for one in self.series.values() for label, place in one.places.items()}
        return {label: found[label] for label in sorted(found, key=order.get)}

    @property
    def seq_lens(self) -> list[int]:
        """Training lengths of the runs, ascending, if the axis is in tokens."""
        return sorted({one.seq_len for one in self.series.values() if one.axis and one.axis.unit == "tokens"})

    @property
    def how(self) -> str:
        """How its intervals are made, in words, where `interval` has two ways; else empty."""
        return WILSON if any(one.interval == "wilson" for one in self.series.values()) else ""

    def of_run(self, run: RunRecord) -> list[Series]:
        """All series of a run."""
        return [one for (owner, _), one in self.series.items() if owner is run]

    def of_arm(self, arm: Arm, line: Line) -> list[Series]:
        """A line of an arm, a series each run that has it."""
        return [self.series[run, line] for run in arm.runs if (run, line) in self.series]

    def sha256(self, run: RunRecord) -> str | None:
        """The sha256 of the sequences that a run was measured on; of several sets one of all their sums. None if it wasn't."""
        found = sorted({sha256 for _, sha256 in identities(self.of_run(run))})
        return found[0] if len(found) == 1 else hashlib.sha256(", ".join(found).encode()).hexdigest() if found else None

    def tokens_seen(self, run: RunRecord) -> str | None:
        """Tokens that a run had seen when it was measured."""
        found = {evaluation.tokens_seen for evaluation in run.evaluations if any(one in evaluation.series for one in self.of_run(run))}
        return ", ".join(f"{tokens:,}" for tokens in sorted(found)) or None

    def is_apart(self, arm: Arm) -> bool:
        """Whether runs of the arm were measured on different sequences in some line, so that they have no mean there."""
        return any(len(identities(self.of_arm(arm, line), place)) > 1 for line in self.lines for place in self.places)

    def alike(self, arm: Arm, line: Line, place: str) -> list[Series]:
        """The series of a line of an arm that have a place; none if they were measured on different sequences there."""
        found = [one for one in self.of_arm(arm, line) if place in one.places]
        return found if len(identities(found, place)) < 2 else []

    def mean(self, arm: Arm, line: Line, place: str) -> float | None:
        """Mean over the arm's runs; None if none has it, or if they were measured on different sequences."""
        found = self.alike(arm, line, place)
        return float(np.mean([one.mean_at(place) for one in found])) if found else None

    def interval(self, arm: Arm, line: Line, place: str) -> Interval | None:
        """At a point: of one run that of its series; of several Student's t over seeds, but never narrower than Wilson's."""
        found, mean = self.alike(arm, line, place), self.mean(arm, line, place)
        if mean is None or not np.isfinite(mean) or found[0].interval == "none":
            return None
        alone = [interval_of(one, one.column_at(place), mean) for one in found]
        if len(found) == 1:
            return alone[0]
        seeds = over_seeds(np.array([one.mean_at(place) for one in found])).interval()
        if found[0].interval != "wilson":
            return seeds
        low, high = min(one.low for one in alone), max(one.high for one in alone)
        if not seeds.bounded:
            return Interval(mean, low, high, seeds.over)
        return Interval(mean, min(low, max(0.0, seeds.low)), max(high, min(1.0, seeds.high)), seeds.over)


def sections(arms: tuple[Arm, ...]) -> tuple[Section, ...]:
    """Everything that the runs measured, by title: single numbers first, then by bins, then by points."""
    every = [(run, one) for arm in arms for run in arm.runs for one in run.series]
    names = series_names(one for _, one in every)
    titles: dict[tuple[str, Shape], dict[tuple[RunRecord, Line], Series]] = {}
    for run, one in every:
        line = Line(one.metric, names[one], one.setting)
        titles.setdefault((one.shown.title, one.shape), {})[run, line] = one
    found = [Section(title, series) for (title, _), series in titles.items()]
    return tuple(sorted(found, key=lambda section: get_args(Shape).index(section.shape)))


def identities(found: list[Series], place: str | None = None) -> set[tuple[str, str]]:
    """(data fingerprint, sha256 of the sequences) that series were measured on, at one of their places or at all; none of means alone."""
    measured = [one for one in found if one.samples and (place is None or place in one.places)]
    samples = [(one, one.samples if place is None else [one.column(one.column_at(place))[0]]) for one in measured]
    return {(one.data_fingerprint, sample.sha256) for one, some in samples for sample in some}


@dataclass(frozen=True, eq=False)
class Units:
    """Values by unit at one place, and what must be equal for units to be pairs."""

    identity: tuple[str, str]
    place: tuple[float, float]
    values: np.ndarray  # (units,)
    weights: np.ndarray  # (units,)
    groups: np.ndarray  # (units,)


def units_at(one: Series, place: str) -> Units | None:
    """Values by unit at a place; of bins over those within it, as the place then says. None if the series has none there."""
    if not one.samples or place not in one.places:
        return None
    start, stop = one.places[place]
    sample, values = one.column(one.column_at(place))
    if one.bins:
        edges = np.array(one.axis.values)
        start = edges[one.column_at(place)]
        inside = (edges[:-1] >= start) & (edges[1:] <= stop)
        if not inside.any():
            return None
        values = np.average(sample.values[:, inside], axis=1, weights=np.diff(edges)[inside])
    return Units((one.data_fingerprint, sample.sha256), (start, stop), values, sample.weights, sample.groups)
