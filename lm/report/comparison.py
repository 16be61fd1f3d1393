"""The comparison of runs: their arms, the sections of series shown together, paired differences, and whether the
comparison is fair.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import get_args

import numpy as np

from lm.config import normalizers as kinds
from lm.config.tree import distinguishes_arms
from lm.errors import RunError
from lm.report.tables import plain_text, printable
from lm.runs.evaluations import Series, Shape, Units, number, series_names
from lm.runs.record import RunRecord
from lm.schema import yaml_scalar
from lm.statistics.intervals import MIN_DOCUMENTS, Interval, over_documents, over_questions, over_seeds

_MISSING_VALUE = "-"  # stands for the value of a key that a run does not have
# prefixes of the keys in which a comparison of normalizers may differ
_NORMALIZER_PREFIXES = ("model.normalizer.", "phases", "swap.")


@dataclass(frozen=True, eq=False)
class ArmRuns:
    """The runs of an arm, which differ in their seed only."""

    label: str
    runs: tuple[RunRecord, ...]  # in the order of their seeds


@dataclass(frozen=True)
class SeriesName:
    """The name of a series: reports compare series of equal name. Each name has its own panels in a picture and its own
    differences.
    """

    metric: str
    subject: str  # task or source, with its options where another task has the same name
    setting: str  # inference setting; empty: the evaluation has none

    @property
    def labels(self) -> tuple[str, ...]:
        """The subject (a task or source) and the inference setting, without those that are empty."""
        return tuple(filter(None, (self.subject, self.setting)))


@dataclass(frozen=True, eq=False)
class Section:
    """The series of all runs that share a title (`Shown.title`) and a kind of axis: none, points or bins.

    A report shows them in one table and, with an axis, in one picture.
    """

    title: str
    series: dict[tuple[RunRecord, SeriesName], Series]  # in the order of the runs' files

    @property
    def example_series(self) -> Series:
        """The section's first series. Callers read from it what all of its series share, such as the shape of their
        values.
        """
        return next(iter(self.series.values()))

    @cached_property
    def names(self) -> list[SeriesName]:
        return list(dict.fromkeys(name for _, name in self.series))

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name.metric for name in self.names))

    @property
    def shape(self) -> Shape:
        return self.example_series.shape

    def example(self, metric: str) -> Series:
        """A series of the metric, with samples if any series of the metric has samples."""
        return max(
            (series for series in self.series.values() if series.metric == metric),
            key=lambda series: len(series.points),
        )

    @cached_property
    def places(self) -> dict[str, tuple[float, float]]:
        """The points or ranges of the section's series: (start, stop) by label, as in `Series.places`.

        Points are in ascending order; ranges are in the order of their stop divided by the training length.
        """
        places = {label: (series, place) for series in self.series.values() for label, place in series.places.items()}
        sort_keys = {
            label: stop / (series.seq_len if series.bins else 1) for label, (series, (_, stop)) in places.items()
        }
        return {label: places[label][1] for label in sorted(places, key=sort_keys.get)}

    @property
    def seq_lens(self) -> list[int]:
        """The training lengths of the runs, ascending, if the axis is in tokens; else []."""
        return sorted(
            {series.seq_len for series in self.series.values() if series.axis and series.axis.unit == "tokens"}
        )

    def series_of_run(self, run: RunRecord) -> list[Series]:
        return [series for (owner, _), series in self.series.items() if owner is run]

    def by_seed(self, arm: ArmRuns, name: SeriesName) -> dict[tuple[int, ...], Series]:
        """The series named `name` of the arm's runs, by the seeds of each run; runs without such a series are left
        out.
        """
        return {run.seeds: self.series[run, name] for run in arm.runs if (run, name) in self.series}

    def sha256(self, run: RunRecord) -> str | None:
        """The sha256 of the sequences on which the run's series in the section were measured; None if no such series
        has samples.

        If the series were measured on several sets of sequences, it is the sha256 of the sorted list of the sets'
        hashes.
        """
        hashes = sorted({sha256 for _, sha256 in identities(self.series_of_run(run))})
        return (
            hashes[0]
            if len(hashes) == 1
            else hashlib.sha256(", ".join(hashes).encode()).hexdigest()
            if hashes
            else None
        )

    def tokens_seen(self, run: RunRecord) -> str | None:
        """Number of tokens, as text, that the run had seen when the numbers in this section were measured; None without
        such numbers.
        """
        run_series = self.series_of_run(run)
        counts = {
            evaluation.tokens_seen
            for evaluation in run.evaluations
            if any(series in evaluation.series for series in run_series)
        }
        return ", ".join(f"{tokens:,}" for tokens in sorted(counts)) or None

    def comparable_series(self, arm: ArmRuns, name: SeriesName, place: str) -> list[Series]:
        """The arm's series named `name` that have a value at `place`, a label in `places`; [] if their sequences at
        `place` differ.
        """
        run_series = [series for series in self.by_seed(arm, name).values() if place in series.places]
        return run_series if len(identities(run_series, place)) < 2 else []

    def mean(self, arm: ArmRuns, name: SeriesName, place: str) -> float | None:
        """The mean at `place` of the arm's `comparable_series`; None if there are no such series."""
        run_series = self.comparable_series(arm, name, place)
        return float(np.mean([series.mean_at(place) for series in run_series])) if run_series else None

    def interval(self, arm: ArmRuns, name: SeriesName, place: str) -> Interval | None:
        """The interval of the mean at `place`: for one run the interval of its series, for several runs Student's t
        interval over seeds.

        With Wilson intervals, the latter is widened to contain each run's interval. None if the mean is not finite or
        has no interval.
        """
        run_series, mean = self.comparable_series(arm, name, place), self.mean(arm, name, place)
        if mean is None or not np.isfinite(mean) or not run_series[0].about.interval:
            return None
        run_intervals = [interval_of(series, series.point_at(place), mean) for series in run_series]
        if len(run_series) == 1:
            return run_intervals[0]
        seed_interval = over_seeds(np.array([series.mean_at(place) for series in run_series])).interval()
        if run_series[0].about.units != "questions":
            return seed_interval
        intervals = [*run_intervals, *[seed_interval] * seed_interval.bounded]
        low, high = min(interval.low for interval in intervals), max(interval.high for interval in intervals)
        return Interval(mean, max(0.0, low), min(1.0, high), seed_interval.noise_source)


@dataclass(frozen=True, eq=False)
class RunComparison:
    """The content of a report: arms with their runs, measured series, and differences to the baseline (none if there is
    one arm).
    """

    arm_names: tuple[str, ...]  # names of the arms that pictures give a colour, the baseline first
    arms: tuple[ArmRuns, ...]  # the arms that have runs
    sections: tuple[Section, ...]
    missing_notes: tuple[str, ...]  # sentences on how runs diverged and what they lack
    differences: tuple["Difference", ...]
    config_diff: Mapping[str, tuple[str, ...]]  # by configuration key in which arms differ, its value in each arm
    warning: str  # sentences on what differs besides the normalizer (configuration, tokens seen); empty if nothing does

    @property
    def runs(self) -> list[RunRecord]:
        return [run for arm in self.arms for run in arm.runs]

    def level(self, unit: str) -> tuple[str, float] | None:
        """Name and value of a finite reference level, such as the unigram cross-entropy, of a series measured in
        `unit`; else None.
        """
        unit_series = [series for section in self.sections for series in section.series.values() if series.unit == unit]
        return next(
            ((name, level) for series in unit_series for name, level in series.about.references if np.isfinite(level)),
            None,
        )


def shared_value(arms: tuple[ArmRuns, ...], value: Callable[[RunRecord], object]) -> tuple[bool | None, str]:
    """Whether `value(run)` is equal for all runs (None if equal, but unrecorded for some), and the value as text, by
    arm if arms differ.
    """
    texts_by_arm = [list(dict.fromkeys(plain_text(value(run)) for run in arm.runs)) for arm in arms]
    distinct_texts = set().union(*texts_by_arm)
    arm_texts = [", ".join(texts) for texts in texts_by_arm]
    recorded_texts = distinct_texts - {plain_text(None)}
    agreement = False if len(recorded_texts) > 1 else None if recorded_texts != distinct_texts else True
    if len(set(arm_texts)) == 1:
        return agreement, arm_texts[0]
    return agreement, "; ".join(f"{arm.label}: {text}" for arm, text in zip(arms, arm_texts, strict=True))


def compare_runs(records: list[RunRecord], baseline: str | None = None) -> RunComparison:
    """Group runs into arms and compare the arms with the baseline arm. `baseline` is this arm's label, else the name of
    one of its runs, else its normalizer's name; None: the first arm.

    Raises RunError: there are no runs, or `baseline` matches no arm or several arms.
    """
    records = [record.reporting for record in {record.folder.resolve(): record for record in records}.values()]
    if not records:
        raise RunError("no run folders given")
    arms = tuple(_group_into_arms(records))
    if baseline is not None:
        arm_names = [
            ([arm.label], [run.name for run in arm.runs], [arm.runs[0].flat["model.normalizer.name"]]) for arm in arms
        ]
        candidates = (
            [arm for arm, names in zip(arms, kind, strict=True) if baseline in names]
            for kind in zip(*arm_names, strict=True)
        )
        matches = next(filter(None, candidates), [])
        if len(matches) != 1:
            reason = "is the name of several arms" if matches else "no such run or arm"
            raise RunError(
                f"baseline '{baseline}': {reason}; choose from: {', '.join(arm.label for arm in matches or arms)}"
            )
        arms = (*matches, *(arm for arm in arms if arm is not matches[0]))
    return comparison_of(arms, tuple(arm.label for arm in arms))


def comparison_of(arms: tuple[ArmRuns, ...], names: tuple[str, ...]) -> RunComparison:
    """Compare `arms`, each of which has runs, to the baseline arm; if the baseline has no runs, there are no
    differences.

    names: labels of all arms, also of arms that have no runs; the label of the baseline comes first.
    """
    sections = _make_sections(arms)
    runs = [run for arm in arms for run in arm.runs]
    missing_notes = [f"{printable(run.name)}: diverged: {printable(run.divergence)}" for run in runs if run.divergence]
    missing_notes += [f"{printable(run.name)}: {lack}" for run in runs for lack in run.missing]
    for arm, section in product(arms, sections):
        mixed = any(
            len(identities(section.by_seed(arm, name).values(), place)) > 1
            for name in section.names
            for place in section.places
        )
        note = f"{arm.label}: the {section.example_series.about.measured_on} of its runs differ: no mean over them"
        missing_notes += [note] if mixed and note not in missing_notes else []
    diff = _config_diff(arms)
    differences = [
        _compare_arms(arm, arms[0], section, name)
        for arm in (arms[1:] if arms[0].label == names[0] else ())
        for section in sections
        for name in section.names
        if any(
            series.points and not series.about.control
            for runs in (arm, arms[0])
            for series in section.by_seed(runs, name).values()
        )
    ]
    warning = " ".join(_warnings(arms, sections, diff)) if len(arms) > 1 else ""
    return RunComparison(names, arms, sections, tuple(missing_notes), tuple(differences), diff, warning)


def _warnings(
    arms: tuple[ArmRuns, ...], sections: tuple[Section, ...], config_diff: Mapping[str, tuple[str, ...]]
) -> list[str]:
    keys = [key for key in config_diff if distinguishes_arms(key) and not key.startswith(_NORMALIZER_PREFIXES)]
    warnings = [f"The arms differ in more than the normalizer: {', '.join(keys)}."] if keys else []
    agreement, tokens = shared_value(arms, lambda run: run.tokens_before)
    warnings += (
        [f"They started from weights that had seen different numbers of tokens: {tokens}."]
        if agreement is False
        else []
    )
    agreement, tokens_seen = shared_value(arms, lambda run: run.tokens_seen)
    warnings += [f"The runs have not seen the same number of tokens: {tokens_seen}."] if agreement is False else []
    for section in sections:
        agreement, tokens = shared_value(arms, section.tokens_seen)
        if agreement is False and tokens != tokens_seen:
            measured_on = section.example_series.about.measured_on
            warnings.append(f"They were measured on {measured_on} after different numbers of tokens: {tokens}.")
    return list(dict.fromkeys(warnings))  # several sections may give the same warning


# ---------------------------------------------------------------- arms


def _group_into_arms(records: list[RunRecord]) -> list[ArmRuns]:
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in records:
        key = json.dumps(record.arm_definition, sort_keys=True, default=str)
        groups.setdefault((key, counts[key, record.seeds]), []).append(record)  # a second run of a seed is another arm
        counts[key, record.seeds] += 1
    runs_by_arm = [tuple(sorted(group, key=lambda run: run.seeds)) for group in groups.values()]
    labels = [arm_label(group[0]) for group in runs_by_arm]
    if len(set(labels)) < len(labels):
        diff = _config_diff([ArmRuns("", group) for group in runs_by_arm])
        keys = [key for key in diff if distinguishes_arms(key) and not key.startswith(_NORMALIZER_PREFIXES)]
        keys = keys if len(keys) <= 3 else []  # more keys would make long labels: the runs' names tell the arms apart

        def setting_suffixes(run: RunRecord) -> list[str]:
            # `init_from` and `branch_from` are paths in `config`, which stand as their last part, and arms in `flat`
            settings = {key: run.config.get(key, run.flat.get(key)) for key in keys}
            texts = {
                key: value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value
                for key, value in settings.items()
            }
            return [
                f"{key.split('.')[-1]}={value}"
                for key, value in texts.items()
                if value or key not in ("init_from", "branch_from")
            ]

        for suffixes in (setting_suffixes, lambda run: [run.name], lambda run: [str(run.folder)]):
            repeats, labelled_runs = Counter(labels), zip(labels, runs_by_arm, strict=True)
            labels = [
                ", ".join([label, *suffixes(group[0])]) if repeats[label] > 1 else label
                for label, group in labelled_runs
            ]
    return [ArmRuns(printable(label), group) for label, group in zip(labels, runs_by_arm, strict=True)]


def arm_label(run: RunRecord) -> str:
    """The label of a run's arm: its normalizer, the normalizers of its phases, or the normalizer that was swapped in
    after training.

    Phases read `softmax -> ssmax at step 175`.
    """
    (_, first_normalizer), *later_phases = run.phases
    if run.config.get("init_from"):  # the weights that the run started from have replaced the initial values
        first_normalizer = {key: value for key, value in first_normalizer.items() if key != "init"}
    names = [
        kinds.label(first_normalizer),
        *(
            f"{', '.join(filter(None, (kinds.label(normalizer), changes)))} at step {step}"
            for (step, normalizer), changes in zip(later_phases, run.phase_changes[1:], strict=True)
        ),
    ]
    if replaced_label := run.environment_entry("swap.normalizer"):
        swap_init = run.environment_entry("swap.init")
        names = [f"{replaced_label}", f"{names[0]} after training{f' (init {swap_init})' if swap_init else ''}"]
    return " -> ".join(names)


def _config_diff(arms: Sequence[ArmRuns]) -> dict[str, tuple[str, ...]]:
    """Map each configuration key in which arms differ to its values in each arm, as text.

    A null value (off) counts as a missing key: an older run without a key does not differ from a newer run that leaves
    it off.
    """
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.flat if key not in ("name", "seed"))
    run_texts = {
        key: [[printable(yaml_scalar(run.flat.get(key, _MISSING_VALUE))) for run in arm.runs] for arm in arms]
        for key in keys
    }
    arm_texts = {
        key: tuple(", ".join(dict.fromkeys(values)) for values in texts_by_arm)
        for key, texts_by_arm in run_texts.items()
    }
    return {
        key: values
        for key, values in arm_texts.items()
        if len({_MISSING_VALUE if value == "null" else value for value in values}) > 1
    }


# ---------------------------------------------------------------- sections


def _make_sections(arms: tuple[ArmRuns, ...]) -> tuple[Section, ...]:
    """The runs' series, grouped into sections: single numbers first, then series over bins, then series over points."""
    run_series = [(run, series) for arm in arms for run in arm.runs for series in run.series]
    subjects = series_names(series for _, series in run_series)
    titles: dict[tuple[str, Shape], dict[tuple[RunRecord, SeriesName], Series]] = {}
    for run, series in run_series:
        titles.setdefault((series.about.title, series.shape), {})[
            run, SeriesName(series.metric, subjects[series], series.setting)
        ] = series
    sections = [Section(title, series) for (title, _), series in titles.items()]
    return tuple(sorted(sections, key=lambda section: get_args(Shape).index(section.shape)))


def identities(series_list: Iterable[Series], place: str | None = None) -> set[tuple[str, str]]:
    """Pairs (data fingerprint, sha256 of the sequences) of all series with samples; with a `place`, a label of
    `Series.places`, only of sequences measured there."""
    measured = [series for series in series_list if series.points and (place is None or place in series.places)]
    points = (series.points if place is None else [series.points[series.point_at(place)]] for series in measured)
    return {units.identity for series_points in points for units in series_points}


def interval_of(series: Series, index: int, mean: float | None = None) -> Interval | None:
    """The 95 % interval of the mean at a point; None if the metric has no intervals, or too few documents. `mean`
    replaces that mean.
    """
    mean = float(series.means[index]) if mean is None else mean
    if not series.about.interval or not series.points:
        return None
    units = series.points[index]
    if series.about.units == "questions":
        return over_questions(units.values, units.weights, units.groups, mean)
    interval = over_documents(units.values, units.weights, units.groups)
    return interval and replace(interval, mean=mean)


# ---------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """The difference, arm minus baseline, of one series: an interval and how it was computed, or the reason why there
    is no interval.
    """

    arm: str
    section: Section
    name: SeriesName
    subject: str  # metric, task, place and setting in words
    interval: Interval | None  # in the unit of the series
    note: str  # how the interval was computed, or why there is no interval


def mean_interval(differences: list[Units]) -> Interval | None:
    """The mean of paired differences with its interval: Student's t over seeds, or for one seed over documents.

    `differences`: for each seed, the differences by sequence. Returns None for one seed with fewer than `MIN_DOCUMENTS`
    documents.
    """
    if len(differences) > 1:
        return over_seeds(np.array([units.mean for units in differences])).interval()
    (units,) = differences
    return over_documents(units.values, units.weights, units.groups)


def shown_interval(interval: Interval | None, series: Series) -> Interval | None:
    """The interval of a difference as reports show it: None if it is not `bounded`; for fractions its ends are clipped
    to [-1, 1].
    """
    if interval is None or not interval.bounded:
        return None
    limit = 1.0 if series.unit == "fraction" else np.inf
    return replace(interval, low=max(-limit, interval.low), high=min(limit, interval.high))


def seeds_shown(seeds: tuple[int, ...]) -> str:
    """A run's seeds (`RunRecord.seeds`) as text, the last first: `3 after 1` for seed 3 and initial weights trained
    with seed 1.
    """
    return " after ".join(map(str, reversed(seeds)))


def _compare_arms(arm: ArmRuns, base: ArmRuns, section: Section, name: SeriesName) -> Difference:
    """The difference of `arm` to `base` in series `name`, at the last point or range measured in both arms, else in
    either arm.
    """
    series_by_seeds = [
        {seeds: series for seeds, series in section.by_seed(runs, name).items() if series.points}
        for runs in (arm, base)
    ]
    arm_places, base_places = (
        {label for series in by_seed.values() for label in series.places} for by_seed in series_by_seeds
    )
    place = [label for label in section.places if label in (arm_places & base_places or arm_places | base_places)][-1]
    series_by_seeds = [
        {seeds: series for seeds, series in by_seed.items() if place in series.places} for by_seed in series_by_seeds
    ]
    example_series = next(series for by_seed in series_by_seeds for series in by_seed.values())
    place_text = ""
    if example_series.axis is not None:
        start, stop = example_series.units(*example_series.places[place]).span
        place_text = (
            f" {example_series.axis.before} {f'{number(start)}-{number(stop)}' if example_series.bins else place}"
        )
    subject = ", ".join(filter(None, (name.metric, name.subject))) + place_text + (name.setting and f", {name.setting}")
    if example_series.is_logged and not example_series.bins:
        subject = example_series.names[example_series.point_at(place)]
    units = [
        {seeds: series.units(*series.places[place]) for seeds, series in by_seed.items()} for by_seed in series_by_seeds
    ]
    interval, note = _difference_and_note([arm.label, base.label], units)
    if interval and not interval.bounded:
        note = "all sequences, or all seeds, agree: their spread gives no interval"
    return Difference(arm.label, section, name, subject, shown_interval(interval, example_series), note)


def _difference_and_note(
    labels: Sequence[str], units: Sequence[Mapping[tuple[int, ...], Units | None]]
) -> tuple[Interval | None, str]:
    """The interval of arm minus baseline (or None), and a note on its computation or absence. `units`: values of the
    arm, then of the baseline, by the runs' seeds."""
    arm_units, base_units = ({seeds: units for seeds, units in by_seed.items() if units} for by_seed in units)
    for label, units_by_seeds in zip(labels, (arm_units, base_units), strict=True):
        if not units_by_seeds:
            return None, f"{label} was not evaluated on it"
    all_units = [*arm_units.values(), *base_units.values()]
    if len({units.identity[0] for units in all_units}) > 1:
        return None, "not measured on the same tokens: the data fingerprints differ"
    if len({(units.identity, units.span, units.values.shape, units.weights.tobytes()) for units in all_units}) > 1:
        return None, "not measured on the same tokens: the evaluation sequences or positions differ"
    if not all(np.isfinite(units.values).all() for units in all_units):
        return None, "not finite on some sequences"
    shared_seeds = sorted(arm_units.keys() & base_units.keys())
    if not shared_seeds:
        return None, "no seed in common: a difference could be that of the seeds"
    interval = mean_interval([arm_units[seed].minus(base_units[seed]) for seed in shared_seeds])
    if len(shared_seeds) >= 2:
        return (
            interval,
            f"mean over {len(shared_seeds)} paired seeds, Student t interval over seeds, on these evaluation sequences",
        )
    n_sequences, n_documents = len(all_units[0].values), len(np.unique(all_units[0].groups))
    if interval is None:
        return None, f"sequences of {n_documents} documents: an interval takes at least {MIN_DOCUMENTS}"
    sample_text = (
        f"{n_sequences} sequences"
        if n_documents == n_sequences
        else f"{n_documents} documents ({n_sequences} sequences)"
    )
    note = (
        f"paired by sequence, Student t over {sample_text}: covers the choice of what was evaluated on, not "
        "training noise"
    )
    caveat = (
        "one seed per arm"
        if len(arm_units) == len(base_units) == 1
        else f"seed {seeds_shown(shared_seeds[0])} alone is in both arms"
    )
    note += (
        f"; {caveat}: says nothing about the method, as differences of several times this interval can be noise of "
        "the seed"
    )
    return interval, note
