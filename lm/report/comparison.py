"""Runs compared: their arms, the series that are shown together, paired differences, and whether the comparison is fair."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np

from lm.attention import catalogue
from lm.config.tree import is_learned
from lm.errors import RunError
from lm.report.tables import printable, show
from lm.runs.evaluations import Series, Shape, Units, number, series_names
from lm.runs.record import RunRecord
from lm.statistics.intervals import FEWEST_DOCUMENTS, Interval, interval_of, over_seeds, paired_difference, sampled

WILSON = (
    "Wilson's over questions or the sequences that ask several, for several seeds each end of Student's t over seeds that lies farther out"
)
_ABSENT = "-"  # the value of a key that a run does not have
_NORMALIZER = ("model.normalizer.", "phases", "swap.")  # what a comparison of normalizers is about


@dataclass(frozen=True, eq=False)
class ArmRuns:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RunRecord, ...]  # by seed


@dataclass(frozen=True)
class Line:
    """The name that series of several runs share: they are one line of a picture, and one row of a table."""

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
        """A series from which to read what all of the section share."""
        return next(iter(self.series.values()))

    @cached_property
    def lines(self) -> list[Line]:
        """The section's lines, in the order of the runs' files."""
        return list(dict.fromkeys(line for _, line in self.series))

    @property
    def metrics(self) -> list[str]:
        """The section's metrics, in the order of its lines."""
        return list(dict.fromkeys(line.metric for line in self.lines))

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
        """How intervals are made, in words, where some are Wilson's; else empty."""
        return WILSON if any(each.interval == "wilson" for each in self.series.values()) else ""

    def of_run(self, run: RunRecord) -> list[Series]:
        """All series of a run."""
        return [each for (owner, _), each in self.series.items() if owner is run]

    def by_seed(self, arm: ArmRuns, line: Line) -> dict[tuple[int, ...], Series]:
        """The series of a line of an arm, by the seeds of the runs that have it."""
        return {run.seeds: self.series[run, line] for run in arm.runs if (run, line) in self.series}

    def of_arm(self, arm: ArmRuns, line: Line) -> list[Series]:
        """The series of a line of an arm, one for each run that has it."""
        return [*self.by_seed(arm, line).values()]

    def sha256(self, run: RunRecord) -> str | None:
        """The sha256 of the sequences that a run was measured on, or of the list of several; None if it was not measured."""
        sums = sorted({sha256 for _, sha256 in identities(self.of_run(run))})
        return sums[0] if len(sums) == 1 else hashlib.sha256(", ".join(sums).encode()).hexdigest() if sums else None

    def tokens_seen(self, run: RunRecord) -> str | None:
        """Tokens that a run had seen when it was measured."""
        own = self.of_run(run)
        seen = {evaluation.tokens_seen for evaluation in run.evaluations if any(each in evaluation.series for each in own)}
        return ", ".join(f"{tokens:,}" for tokens in sorted(seen)) or None

    def alike(self, arm: ArmRuns, line: Line, place: str) -> list[Series]:
        """The series of a line of an arm that have a mean at a place; [] if they were measured on different sequences there."""
        series = [each for each in self.of_arm(arm, line) if place in each.places]
        return series if len(identities(series, place)) < 2 else []

    def mean(self, arm: ArmRuns, line: Line, place: str) -> float | None:
        """Mean over the arm's runs; None if none has it, or if they were measured on different sequences."""
        series = self.alike(arm, line, place)
        return float(np.mean([each.mean_at(place) for each in series])) if series else None

    def interval(self, arm: ArmRuns, line: Line, place: str) -> Interval | None:
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


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Everything a report shows, in plain data. With one arm there are no differences.

    Attributes:
        names: of the arms that pictures give a colour; the baseline first.
        arms: those with runs.
        config_diff: the values in each arm of a configuration key in which arms differ, by key.
        warning: what differs besides the normalizer: configuration, tokens seen; empty: nothing.
    """

    names: tuple[str, ...]
    arms: tuple[ArmRuns, ...]
    sections: tuple[Section, ...]
    missing: tuple[str, ...]
    differences: tuple["Difference", ...] = ()
    config_diff: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warning: str = ""

    @property
    def title(self) -> str:
        if len(self.arms) > 1:
            return " vs ".join(arm.label for arm in self.arms)
        return f"{self.arms[0].label}: {', '.join(printable(run.name) for run in self.arms[0].runs)}"

    @property
    def runs(self) -> list[RunRecord]:
        """The runs of all arms."""
        return [run for arm in self.arms for run in arm.runs]

    def level(self, unit: str) -> tuple[str, float] | None:
        """Name and value of a level that numbers of a unit are to be compared with, such as the entropy of single tokens."""
        same = [each for section in self.sections for each in section.series.values() if each.unit == unit]
        return next(((name, level) for each in same for name, level in each.references.items() if np.isfinite(level)), None)


def across(arms: tuple[ArmRuns, ...], value: Callable[[RunRecord], object]) -> tuple[bool | None, str]:
    """Whether all runs agree on a value (None: some don't say), and the value, by arm if arms differ."""
    by_arm = [list(dict.fromkeys(show(value(run)) for run in arm.runs)) for arm in arms]
    distinct = set().union(*by_arm)
    words = [", ".join(values) for values in by_arm]
    known = distinct - {show(None)}
    same = False if len(known) > 1 else None if known != distinct else True
    if len(set(words)) == 1:
        return same, words[0]
    return same, "; ".join(f"{arm.label}: {word}" for arm, word in zip(arms, words, strict=True))


def compare_runs(records: list[RunRecord], baseline: str | None = None) -> RunComparison:
    """Group runs into arms and compare them with the baseline: an arm's label, its normalizer or one of its runs.

    Raises:
        RunError: no runs, or no such baseline.
    """
    records = [record.reporting for record in {record.folder.resolve(): record for record in records}.values()]
    if not records:
        raise RunError("no run folders given")
    arms = tuple(_arms(records))
    if baseline is not None:
        known = [{arm.label, arm.runs[0].flat["model.normalizer.name"], *(run.name for run in arm.runs)} for arm in arms]
        chosen = [arm for arm, names in zip(arms, known, strict=True) if baseline in names]
        if not chosen:
            raise RunError(f"baseline '{baseline}': no such run or arm; choose from: {', '.join(arm.label for arm in arms)}")
        arms = (chosen[0], *(arm for arm in arms if arm is not chosen[0]))
    return comparison_of(arms, tuple(arm.label for arm in arms))


def comparison_of(arms: tuple[ArmRuns, ...], names: tuple[str, ...]) -> RunComparison:
    """The comparison of arms with the first of `names`, if that has runs."""
    shown = _sections_of(arms)
    missing = [f"{printable(run.name)}: {lack}" for arm in arms for run in arm.runs for lack in run.missing]
    apart = dict.fromkeys(
        (arm, section.first.shown.measured_on)
        for arm in arms
        for section in shown
        if any(len(identities(section.of_arm(arm, line), place)) > 1 for line in section.lines for place in section.places)
    )
    missing += [f"{arm.label}: the {measured_on} of its runs differ: no mean over them" for arm, measured_on in apart]
    if len(arms) == 1:
        return RunComparison(names, arms, shown, tuple(missing))
    diff = _config_diff(arms)
    differences = [
        _difference_of(arm, arms[0], section, line)
        for arm in (arms[1:] if arms[0].label == names[0] else ())
        for section in shown
        for line in section.lines
        if any(each.samples and not each.control for each in (*section.of_arm(arm, line), *section.of_arm(arms[0], line)))
    ]
    warning = " ".join(_warnings(arms, shown, diff))
    return RunComparison(names, arms, shown, tuple(missing), tuple(differences), diff, warning)


def _warnings(arms: tuple[ArmRuns, ...], shown: tuple[Section, ...], diff: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Words for what differs besides the normalizer."""
    keys = [key for key in diff if is_learned(key) and not key.startswith(_NORMALIZER)]
    warnings = [f"The arms differ in more than the normalizer: {', '.join(keys)}."] if keys else []
    same, tokens = across(arms, lambda run: run.tokens_before)
    warnings += [f"They started from weights that had seen different numbers of tokens: {tokens}."] if same is False else []
    same, seen = across(arms, lambda run: run.tokens_seen)
    warnings += [f"The runs have not seen the same number of tokens: {seen}."] if same is False else []
    for section in shown:
        same, tokens = across(arms, section.tokens_seen)
        if same is False and tokens != seen:
            warnings.append(f"They were measured on {section.first.shown.measured_on} after different numbers of tokens: {tokens}.")
    return warnings


# ---------------------------------------------------------------- arms


def _arms(records: list[RunRecord]) -> list[ArmRuns]:
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in records:
        key = json.dumps(record.arm_definition, sort_keys=True, default=str)
        groups.setdefault((key, seen[key, record.seeds]), []).append(record)  # a seed run twice is another arm, not a seed
        seen[key, record.seeds] += 1
    runs = [tuple(sorted(group, key=lambda run: run.seeds)) for group in groups.values()]
    labels = [arm_label(group[0]) for group in runs]
    if len(set(labels)) < len(labels):
        differ = _config_diff([ArmRuns("", group) for group in runs])
        keys = [key for key in differ if is_learned(key) and not key.startswith(_NORMALIZER)]
        keys = keys if len(keys) <= 3 else []  # else the runs' names tell them apart

        def values(run: RunRecord) -> list[str]:
            origins = {key: run.config.get(key) for key in keys if key in ("init_from", "branch_from")}
            known = {key: origins.get(key, run.flat.get(key)) for key in keys if origins.get(key, key)}  # none of a run from step 0
            short = {key: value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value for key, value in known.items()}
            return [f"{key.split('.')[-1]}={value}" for key, value in short.items()]  # of a path the last part

        for more in (values, lambda run: [run.name], lambda run: [str(run.folder)]):
            repeated = {label for label, count in Counter(labels).items() if count > 1}
            both = zip(labels, runs, strict=True)
            labels = [", ".join([label, *more(group[0])]) if label in repeated else label for label, group in both]
    return [ArmRuns(printable(label), group) for label, group in zip(labels, runs, strict=True)]


def arm_label(run: RunRecord) -> str:
    """The run's normalizer, or those of its phases, `softmax -> ssmax at step 175`, or what was swapped in after training."""
    (_, first), *later = run.phases
    if run.config.get("init_from"):  # the weights that it started from have replaced the initial values
        first = {key: value for key, value in first.items() if key != "init"}
    names = [catalogue.label(first), *(f"{catalogue.label(normalizer)} at step {step}" for step, normalizer in later)]
    before = run.measured("swap.normalizer")
    return " -> ".join([f"{before}", f"{names[0]} after training (init {run.measured('swap.init')})"] if before else names)


def _config_diff(arms: Sequence[ArmRuns]) -> dict[str, tuple[str, ...]]:
    """Keys in which arms differ, with the value in each. Null (off) equals a missing key: keys that were added later are no difference."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.flat if key not in ("name", "seed"))

    def written(run: RunRecord, key: str) -> str:
        value = run.flat.get(key, _ABSENT)
        return "null" if value is None else printable(str(value).lower() if isinstance(value, bool) else str(value))

    lines = {key: tuple(", ".join(dict.fromkeys(written(run, key) for run in arm.runs)) for arm in arms) for key in keys}
    return {key: values for key, values in lines.items() if len({_ABSENT if value == "null" else value for value in values}) > 1}


# ---------------------------------------------------------------- sections


def _sections_of(arms: tuple[ArmRuns, ...]) -> tuple[Section, ...]:
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
    return {(each.data_fingerprint, sample.sha256) for each, parts in samples for sample in parts}


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


def mean_interval(differences: list[Units]) -> Interval | None:
    """The mean of paired differences, one array a seed: Student t over seeds, or of one seed over documents; None of too few of these."""
    first = differences[0]
    if len(differences) > 1:
        return over_seeds(np.array([each.mean for each in differences])).interval()
    if len(np.unique(first.groups)) < FEWEST_DOCUMENTS:
        return None
    interval = paired_difference(first.values, np.zeros_like(first.values), first.weights, first.groups)
    return replace(interval, over=f"{sampled(first.groups)}, 1 seed")


def shown_interval(interval: Interval | None, series: Series) -> Interval | None:
    """An interval of differences as it may be shown: none without spread, and of fractions within -1 and 1."""
    if interval is None or not interval.bounded:
        return None
    limit = 1.0 if series.unit == "fraction" else np.inf
    return replace(interval, low=max(-limit, interval.low), high=min(limit, interval.high))


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seed, and after it those of the weights it started from, if they differ."""
    before = " after ".join(map(str, reversed(seeds[:-1])))
    return f"{seeds[-1]} after {before}" if before else str(seeds[-1])


def _difference_of(arm: ArmRuns, base: ArmRuns, section: Section, line: Line) -> Difference:
    """The difference of two arms in a line, at the farthest place that both have."""
    measured = [[each for each in section.of_arm(side, line) if each.samples] for side in (arm, base)]
    ours, theirs = ({label for each in side for label in each.places} for side in measured)
    place = [label for label in section.places if label in (ours & theirs or ours | theirs)][-1]
    series = next(each for side in measured for each in side if place in each.places)
    where = ""
    if series.axis is not None:
        start, stop = series.units(*series.places[place]).place
        where = f" {series.axis.before} {f'{number(start)}-{number(stop)}' if series.bins else place}"
    words = ", ".join(filter(None, (line.metric, line.what))) + where + (line.setting and f", {line.setting}")
    interval, note = _difference(arm, base, section, line, place)
    if interval and not interval.bounded:
        note = "all sequences, or all seeds, agree: their spread gives no interval"
    return Difference(arm.label, section, line, place, words, shown_interval(interval, series), note)


def _difference(arm: ArmRuns, base: ArmRuns, section: Section, line: Line, place: str) -> tuple[Interval | None, str]:
    ours, theirs = (
        {
            seeds: units
            for seeds, each in section.by_seed(side, line).items()
            if place in each.places and (units := each.units(*each.places[place]))
        }
        for side in (arm, base)
    )
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
        return None, f"sequences of {documents} documents: an interval takes at least {FEWEST_DOCUMENTS}"
    over = f"{sequences} sequences" if documents == sequences else f"{documents} documents ({sequences} sequences)"
    note = f"paired by sequence, Student t over {over}: covers the choice of what was evaluated on, not training noise"
    alone = "one seed per arm" if len(ours) == len(theirs) == 1 else f"seed {seeds_shown(shared[0])} alone is in both arms"
    note += f"; {alone}: says nothing about the method, as differences of several times this interval can be noise of the seed"
    return interval, note
