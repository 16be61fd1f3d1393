"""This module compares runs: their arms, what they measured as one frame, paired differences, and whether the
comparison is fair."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm.config import normalizers as kinds
from lm.config.tree import distinguishes_arms
from lm.errors import RunError, yaml_scalar
from lm.report.tables import axis_text, printable_text, recorded_value_text
from lm.runs.evaluations import CURVE_COLUMNS, Metric, evaluation_rows, grouped_mean, point_means
from lm.runs.record import RunRecord
from lm.statistics.intervals import (
    ALPHA,
    MIN_DOCUMENTS,
    Interval,
    bounded_mean_ends,
    estimate_over_seeds,
    interval_over_documents,
    interval_over_questions,
)
from lm.statistics.verdicts import Comparison

# what names of metrics in reports end with, if other documents are left out
REPORTING_SUFFIX = "of reporting documents"
_MISSING_VALUE = "-"  # stands for the value of a key that a run does not have
# prefixes of the keys in which a comparison of normalizers may differ
_NORMALIZER_KEY_PREFIXES = ("model.normalizer.", "phases", "swap.")
NO_INTERVAL_REASON = f"all agree, or are of fewer than {MIN_DOCUMENTS} documents"  # why values have no interval
AXIS_KINDS = ("number", "bins", "points")  # the order of sections in a report
INTERVAL_INPUT_COLUMNS = ["about", "sample", "value", "weight", "group"]  # what an interval takes
ArmLabel = str
Place = str  # label of a point or a range of a metric's axis
# an arm's runs, which differ in their seed only, in the order of seeds
RunsByArm = Mapping[ArmLabel, list[RunRecord]]


class MetricName(NamedTuple):
    """Identifies a metric, with task and inference setting, as reports compare it between runs. All metrics with the
    same `title` and `axis_kind` are one section of a report: a table and, with an axis, a picture."""

    title: str
    axis_kind: str  # number (no axis), bins or points
    quantity: str
    task_label: str  # task or source, with its options where another task has the same name
    setting: str  # inference setting; empty: the evaluation has none

    @property
    def task_and_setting(self) -> tuple[str, ...]:
        """Return the task's label and the inference setting, without those that are empty."""
        return tuple(filter(None, (self.task_label, self.setting)))


@dataclass(frozen=True, eq=False)
class Difference:
    """Holds the difference, arm minus baseline, of a metric at one place on its axis, such as a length or a range of
    positions. It has an interval, or a reason why there is none."""

    arm: str
    metric_name: MetricName
    metric: Metric
    metric_in_words: str  # with task, place and setting
    interval: Interval | None  # in the unit of the metric
    no_interval_reason: str  # empty if there is one


class ArmMean(NamedTuple):
    """Holds the mean of a metric over an arm's runs at one place on its axis, such as a length or a range of positions.
    `metric` describes the metric in the arm's first run. Its reference levels, such as chance, may differ in the other
    runs."""

    metric: Metric
    mean: float
    seed_std: float | None  # standard deviation over seeds; None: one run
    interval: Interval | None


@dataclass(frozen=True, eq=False)
class ArmComparison:
    """Holds the runs of each arm, and data frames of their measurements. Frames leave out the held-out documents that
    select learning rates and checkpoints. The first of `arm_labels` is the baseline.
    """

    arm_labels: tuple[str, ...]  # labels of all arms, also of arms without runs, by which pictures choose colours
    runs_by_arm: RunsByArm  # the arms that have runs

    @property
    def runs(self) -> list[RunRecord]:
        """Return the runs of all arms, one arm after the other."""
        return [run for runs in self.runs_by_arm.values() for run in runs]

    @property
    def baseline(self) -> str | None:
        """Return the label of the baseline; None if it has no runs, or no other arm has."""
        return self.arm_labels[0] if self.arm_labels[0] in self.runs_by_arm and len(self.runs_by_arm) > 1 else None

    @cached_property
    def all_rows(self) -> pd.DataFrame:
        """Return the rows of all evaluations, without selection text (`drop_selection_rows`). New columns are `arm`;
        `run`, the index of the run in `runs`; and `seeds`, an integer that is equal for runs with equal
        `RunRecord.seeds`."""
        run_numbers = np.repeat(np.arange(len(self.runs)), [len(run.evaluations) for run in self.runs])
        rows = drop_selection_rows(evaluation_rows([evaluation for run in self.runs for evaluation in run.evaluations]))
        owner = run_numbers[rows["evaluation"]]
        labels = np.array([label for label, runs in self.runs_by_arm.items() for _ in runs], object)
        all_seeds = sorted({run.seeds for run in self.runs})
        seeds = np.array([all_seeds.index(run.seeds) for run in self.runs])
        return rows.assign(run=owner, arm=labels[owner], seeds=seeds[owner])

    @cached_property
    def titled_metric_rows(self) -> pd.DataFrame:
        """Return the rows of the metrics that have a title. The new column `name` numbers the metrics: it holds the
        index of the row's metric in `metric_names`."""
        rows = self.all_rows[self.all_rows["title"] != ""]
        return rows.assign(name=rows.groupby([*MetricName._fields], sort=False).ngroup())

    @cached_property
    def metric_names(self) -> list[MetricName]:
        """Return the metrics that reports show, in the order of their first rows."""
        first_rows = self.titled_metric_rows.drop_duplicates("name")[[*MetricName._fields]]
        return [MetricName(*values) for values in first_rows.to_numpy()]

    @cached_property
    def unit_values(self) -> pd.DataFrame:
        """Return the value of each unit (sequence or question) at each point or range that tables show."""
        return merge_bins_into_ranges(self.titled_metric_rows)

    @cached_property
    def run_means(self) -> pd.DataFrame:
        """Return the mean of each run over its sequences or questions, at each position or other place in tables."""
        return point_means(self.unit_values)

    @cached_property
    def sections(self) -> list[pd.DataFrame]:
        """Return `run_means` split into a frame for each title and kind of axis: first single numbers, then ranges of
        an axis (bins), then points."""
        sections = [section for _, section in self.run_means.groupby(["title", "axis_kind"], sort=False)]
        return sorted(sections, key=lambda section: AXIS_KINDS.index(section["axis_kind"].iloc[0]))

    @cached_property
    def arm_means(self) -> dict[tuple[MetricName, Place, ArmLabel], ArmMean]:
        """Return the mean over an arm's runs by (name, place, arm)."""
        indices, arm_means = self.unit_values.groupby(["name", "place", "run"], sort=False).indices, {}
        units = self.unit_values[INTERVAL_INPUT_COLUMNS]
        narrow = self.run_means[["name", "place", "arm", "run", "about", "value"]]
        for (index, place, arm), means in narrow.groupby(["name", "place", "arm"], sort=False):
            metric_name, metric, values = self.metric_names[index], means["about"].iloc[0], means["value"].to_numpy()
            mean, interval = float(values.mean()), None
            if metric_name.axis_kind == "points" and metric.interval and np.isfinite(mean):
                units_by_run = [units.iloc[indices[index, place, run]] for run in means["run"]]
                interval = _mean_interval([run_interval(rows, mean) for rows in units_by_run], values, metric)
            spread = float(values.std(ddof=1)) if len(values) > 1 else None
            arm_means[metric_name, place, arm] = ArmMean(metric, mean, spread, interval)
        return arm_means

    @cached_property
    def differences(self) -> list[Difference]:
        """Return each arm's difference to the baseline in each metric, at the last point or range where both were
        measured.

        If they share no point or range, the difference is at the last one where either was measured. The `Difference`
        then says why it has no interval.
        """
        units = self.unit_values[self.unit_values["sample"].notna() & ~self.unit_values["control"]]
        indices = units.groupby(["name", "arm"], sort=False).indices
        metric_indices = dict.fromkeys(index for section in self.sections for index in section["name"])
        differences = []
        for arm, index in product(list(self.runs_by_arm)[1:] if self.baseline else (), metric_indices):
            sides = [units.iloc[indices.get((index, label), [])] for label in (arm, self.baseline)]
            places = [dict(zip(side["place"], side["order"], strict=True)) for side in sides]
            if order := places[0] | places[1]:
                last = max(places[0].keys() & places[1].keys() or order, key=order.get)
                at_last = pd.concat([side[side["place"] == last] for side in sides])
                differences.append(self._arm_difference(arm, self.metric_names[index], at_last))
        return differences

    def paired_differences(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of all arms but the baseline, with the difference to the baseline as `value`.

        A unit is paired with the same sequence at the same point, in the baseline's run of the same seeds. Units that
        only one of the two runs has are left out. So are units of control metrics, which only check a measurement.

        rows: rows of `titled_metric_rows` or `unit_values`.
        """
        rows = rows[rows["sample"].notna() & ~rows["control"]]
        keys = ["name", "x", "until", "seeds", "data_fingerprint", "sequences", "sample"]
        unit = rows.groupby(keys, sort=False, dropna=False).ngroup()
        is_base = rows["arm"] == self.baseline
        baseline = rows["value"].set_axis(unit)[is_base.to_numpy()]
        is_paired = ~is_base & unit.isin(baseline.index)
        return rows[is_paired].assign(value=lambda arm: arm["value"] - baseline[unit[is_paired]].to_numpy())

    def _arm_difference(self, arm: str, metric_name: MetricName, arm_and_baseline_units: pd.DataFrame) -> Difference:
        """Return the difference of an arm to the baseline in one metric. `arm_and_baseline_units` holds the rows of
        both arms' units at one point or range of the metric's axis."""
        unit = arm_and_baseline_units.iloc[0]
        metric = unit["about"]
        if unit["logged"] and metric_name.axis_kind != "bins":
            description = unit["metric"]
        else:
            span = (
                f"{axis_text(unit['x'])}-{axis_text(unit['until'])}"
                if metric_name.axis_kind == "bins"
                else unit["place"]
            )
            place = f" {metric.axis.before} {span}" if metric.axis else ""
            description = (
                ", ".join(filter(None, (metric_name.quantity, metric_name.task_label)))
                + place
                + (metric_name.setting and f", {metric_name.setting}")
            )
        paired = self.paired_differences(arm_and_baseline_units)
        no_interval_reason, interval = self._incomparable_reason(arm, arm_and_baseline_units, paired), None
        if not no_interval_reason:
            interval = paired_interval(
                paired, grouped_mean(paired, ["seeds"], paired["weight"])["value"].to_numpy(), metric
            )
            interval = clip_difference_interval(interval, metric)
            if not interval:
                no_interval_reason = NO_INTERVAL_REASON
        return Difference(arm, metric_name, metric, description, interval, no_interval_reason)

    def _incomparable_reason(self, arm: str, arm_and_baseline_units: pd.DataFrame, paired: pd.DataFrame) -> str:
        """Say why the units of an arm and of the baseline can't be compared; empty if they can.

        `paired` holds the rows of the seeds that both have.
        """
        units = arm_and_baseline_units
        for label in (arm, self.baseline):
            if label not in {*units["arm"]}:
                return f"{label} was not evaluated on it"
        if len(units.drop_duplicates(["data_fingerprint", "sequences", "x", "until"])) > 1:
            return "not measured on the same tokens: the data, sequences or positions differ"
        if not np.isfinite(units["value"]).all():
            return "not finite on some sequences"
        return "no seed in common: a difference could be that of the seeds" if paired.empty else ""

    @cached_property
    def config_diff(self) -> dict[str, tuple[str, ...]]:
        """Return each configuration key in which arms differ, with its value in each arm."""
        return _config_diff(self.runs_by_arm)

    @property
    def fairness_warning(self) -> str:
        """Say what differs besides the normalizer (configuration, tokens seen); empty if nothing does."""
        if len(self.runs_by_arm) == 1:
            return ""
        keys = _keys_besides_normalizer(self.config_diff)
        warnings = [f"The arms differ in more than the normalizer: {', '.join(keys)}."] if keys else []
        for words, counts in (
            ("They started from weights that had seen different numbers", [run.tokens_before_run for run in self.runs]),
            ("The runs have not seen the same number", [run.tokens_seen for run in self.runs]),
        ):
            agreement, tokens = self.agreement_and_text(counts)
            warnings += [f"{words} of tokens: {tokens}."] * (agreement is False)
        return " ".join(warnings)

    @property
    def divergence_notes(self) -> list[str]:
        """Return sentences on how runs diverged."""
        return [
            f"{printable_text(run.name)}: diverged: {printable_text(run.divergence_reason)}"
            for run in self.runs
            if run.divergence_reason
        ]

    def agreement_and_text(self, run_values: Sequence[object]) -> tuple[bool | None, str]:
        """Return whether `run_values`, one value per run, are equal, and the value as text, by arm if arms differ. The
        first is None if recorded values are equal, but some runs don't record one."""
        recorded = {recorded_value_text(value) for value in run_values if value is not None}
        agreement = False if len(recorded) > 1 else None if None in run_values else True
        texts = pd.Series(
            map(recorded_value_text, run_values), [label for label, runs in self.runs_by_arm.items() for _ in runs]
        )
        by_arm = texts.groupby(level=0, sort=False).agg(lambda arm_texts: ", ".join(arm_texts.unique()))
        if by_arm.nunique() == 1:
            return agreement, by_arm.iloc[0]
        return agreement, "; ".join(f"{arm}: {text}" for arm, text in by_arm.items())

    def reference_level(self, metric_unit: str) -> tuple[str, float] | None:
        """Return the name and value of the first finite reference level, such as the unigram cross-entropy, of the
        metrics measured in `metric_unit`; None if they have none."""
        metrics = [metric for metric in self.run_means["about"].unique() if metric.unit == metric_unit]
        levels = [level for metric in metrics for level in metric.references if np.isfinite(level[1])]
        return next(iter(levels), None)


# ---------------------------------------------------------------- rows as reports show them


def drop_selection_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a frame of `evaluation_rows` without held-out documents that choose checkpoints or learning
    rates.

    The names of metrics of held-out text get the suffix `REPORTING_SUFFIX`, as their plain names in metrics.jsonl mean
    all held-out text. A curve is an exception if one of its points was measured on left-out documents alone. Such a
    curve keeps its name. Each of its points then has one row, the mean over all documents, without values of single
    sequences.
    """
    is_text, reports = rows["part"] != "", rows["part"] == "reports"
    has_reports = reports.groupby(
        [rows[name] for name in (*CURVE_COLUMNS, "x")], observed=True, dropna=False
    ).transform("any")
    keeps_mean = (
        (is_text & ~has_reports).groupby([rows[name] for name in CURVE_COLUMNS], observed=True).transform("any")
    )
    means = grouped_mean(rows[keeps_mean], [*CURVE_COLUMNS, "x"], rows["weight"][keeps_mean]).assign(sample=np.nan)
    is_named = is_text & ~keeps_mean
    new_names = {
        name: rows[name].where(~is_named, rows[name] + f" {REPORTING_SUFFIX}") for name in ("metric", "quantity")
    }
    kept_rows = rows.assign(**new_names)[~keeps_mean & (rows["part"] != "selects")]
    return pd.concat([kept_rows, means], ignore_index=True) if len(means) else kept_rows


def merge_bins_into_ranges(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a frame of `evaluation_rows` with bins merged into ranges, as reports show them. The value of
    a unit (sequence or question) in a range is its mean over the bins within the range.

    Ranges are `within 1x`, `1x-2x`, ... of the training length. New columns are `place`, the label of a point or
    range, and `order`, by which these are sorted.
    """
    is_bin = rows["axis_kind"] == "bins"
    points, bins = rows[~is_bin], rows[is_bin]
    labels = {x: axis_text(x) for x in points["x"].dropna().unique()}
    points = points.assign(place=[labels.get(x, "") for x in points["x"]], order=points["x"])
    octave = np.floor(np.log2(np.maximum(bins["x"] / bins["seq_len"], 0.5))) + 1  # 0: within the training length
    length = bins.groupby(CURVE_COLUMNS, observed=True)["until"].transform("max")
    stop = np.minimum(bins["seq_len"] * 2**octave, length)
    ends = list(zip(np.where(octave > 0, 2.0 ** (octave - 1), 0.0), stop / bins["seq_len"], strict=True))
    labels = {(low, high): f"{low:g}x-{high:g}x" if low else f"within {high:g}x" for low, high in set(ends)}
    bins = bins.assign(place=[labels[pair] for pair in ends], order=stop / bins["seq_len"], stop=stop)
    bins = bins[bins["until"] <= stop]
    ranges = grouped_mean(bins, [*CURVE_COLUMNS, "place", "sample"], bins["until"] - bins["x"])
    return pd.concat([points, ranges.assign(until=ranges["stop"]).drop(columns="stop")]).sort_index()


def training_lengths(section: pd.DataFrame) -> list[int]:
    """Return the training lengths of a section's runs, ascending, if its axis is in tokens; else []."""
    has_tokens = [bool(metric.axis) and metric.axis.unit == "tokens" for metric in section["about"]]
    return sorted(set(section["seq_len"][has_tokens]))


def run_interval(unit_rows: pd.DataFrame, mean: float) -> Interval | None:
    """Return the 95 % interval of the mean of a run's units at one point. None if the metric has no intervals, or too
    few documents were measured."""
    metric = unit_rows["about"].iloc[0]
    if not metric.interval or unit_rows["sample"].isna().any():
        return None
    arrays = (unit_rows[name].to_numpy() for name in ("value", "weight", "group"))
    if metric.units == "questions":
        return interval_over_questions(*arrays, mean)
    interval = interval_over_documents(*arrays)
    return interval and replace(interval, mean=mean)


def _mean_interval(run_intervals: list[Interval | None], run_means: np.ndarray, metric: Metric) -> Interval | None:
    """Return the interval of the mean of an arm's runs: a single run's own interval, else Student's t interval over
    seeds. For an accuracy it is `bounded_mean_ends`, since an arm may fail altogether in some seeds and in none of
    a few. If runs have Wilson intervals, the interval over seeds is widened to contain each of them."""
    if len(run_intervals) == 1:
        return run_intervals[0]
    seed_interval = estimate_over_seeds(run_means).interval()
    if metric.unit == "fraction" and metric.better == "higher":
        low, high = map(float, bounded_mean_ends(run_means, 0.0, 1.0, ALPHA / 2))
        seed_interval = replace(seed_interval, low=low, high=high)
    if metric.units != "questions" or None in run_intervals:
        return seed_interval
    intervals = [*run_intervals, seed_interval]
    low, high = min(interval.low for interval in intervals), max(interval.high for interval in intervals)
    return replace(seed_interval, low=low, high=high)


def paired_interval(paired_rows: pd.DataFrame, seed_means: np.ndarray, metric: Metric) -> Interval | None:
    """Return the interval of the mean of paired differences at one point: over seeds, as that of a verdict, or for one
    seed over documents. `seed_means`: mean differences by seed. None for one seed with fewer than `MIN_DOCUMENTS`
    documents."""
    if len(seed_means) > 1:
        interval = estimate_over_seeds(seed_means).interval()
        if metric.unit != "fraction" or metric.better != "higher":
            return interval
        low, high = map(float, Comparison([[seed_means]], possible_range=(-1.0, 1.0)).interval_ends())
        return replace(interval, low=low, high=high)
    return interval_over_documents(*(paired_rows[name].to_numpy() for name in ("value", "weight", "group")))


def clip_difference_interval(interval: Interval | None, metric: Metric) -> Interval | None:
    """Return the interval of a difference as reports show it, or None if an end is infinite or both ends are equal. For
    fractions the ends are clipped to [-1, 1]."""
    if interval is None or not interval.is_bounded:
        return None
    limit = 1.0 if metric.unit == "fraction" else np.inf
    return replace(interval, low=max(-limit, interval.low), high=min(limit, interval.high))


# ---------------------------------------------------------------- arms


def compare_runs(records: list[RunRecord], baseline: str | None = None) -> ArmComparison:
    """Group runs into arms and compare the arms with the baseline arm. `baseline` is this arm's label, or the name of
    one of its runs; None: the first arm.

    Raises RunError: there are no runs, or no arm or run has the name `baseline`.
    """
    records = [*{record.folder.resolve(): record for record in records}.values()]
    if not records:
        raise RunError("no run folders given")
    arms = _group_into_arms(records)
    if baseline is not None:
        by_run = {run.name: label for label, runs in arms.items() for run in runs}
        label = baseline if baseline in arms else by_run.get(baseline)
        if label is None:
            raise RunError(f"baseline '{baseline}': no such run or arm; choose from: {', '.join(arms)}")
        arms = {label: arms[label]} | arms
    return ArmComparison(tuple(arms), arms)


def _group_into_arms(records: list[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs of equal settings, apart from seeds, into arms by label; a second run of a seed is another arm."""
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for record in records:
        key = json.dumps(record.arm_definition, sort_keys=True, default=str)
        groups.setdefault((key, counts[key, record.seeds]), []).append(record)  # a second run of a seed is another arm
        counts[key, record.seeds] += 1
    runs_by_arm = [sorted(group, key=lambda run: run.seeds) for group in groups.values()]
    labels = [normalizer_history_label(runs[0]) for runs in runs_by_arm]
    keys = _keys_besides_normalizer(_config_diff(dict(enumerate(runs_by_arm))))
    keys = keys if len(keys) <= 3 else []  # more keys would make long labels: the runs' names tell the arms apart

    def settings(run: RunRecord) -> list[str]:
        # `init_from` and `branch_from` are paths in `config`, which stand as their last part, and arms in `flat_config`
        values = {key: run.config.get(key, run.flat_config.get(key)) for key in keys}
        return [f"{key.split('.')[-1]}={Path(str(value)).name}" for key, value in values.items() if value is not None]

    for suffixes in (settings, lambda run: [run.name], lambda run: [str(run.folder)]):
        repeats = Counter(labels)
        labels = [
            ", ".join([label, *suffixes(runs[0])]) if repeats[label] > 1 else label
            for label, runs in zip(labels, runs_by_arm, strict=True)
        ]
    return dict(zip(map(printable_text, labels), runs_by_arm, strict=True))


def normalizer_history_label(run: RunRecord) -> str:
    """Return the label of a run's arm: its normalizer, the normalizers of its phases, or the normalizer that was
    swapped in after training.

    Phases read `softmax -> ssmax at step 175`.
    """
    (_, first_normalizer), *_ = run.phase_starts_and_normalizers
    if run.config.get("init_from"):  # the weights that the run started from have replaced the initial values
        first_normalizer = {key: value for key, value in first_normalizer.items() if key != "init"}
    changes = [
        (step, after) for (_, before), (step, after) in pairwise(run.phase_starts_and_normalizers) if after != before
    ]
    names = [kinds.label(first_normalizer), *(f"{kinds.label(after)} at step {step}" for step, after in changes)]
    if replaced_label := run.environment_entry("swap.normalizer"):
        swap_init = run.environment_entry("swap.init")
        names = [f"{replaced_label}", f"{names[0]} after training{f' (init {swap_init})' if swap_init else ''}"]
    return " -> ".join(names)


def _config_diff(runs_by_arm: Mapping[object, list[RunRecord]]) -> dict[str, tuple[str, ...]]:
    """Map each configuration key in which arms differ to its values in each arm, as text.

    A null value (off) counts as a missing key: an older run without a key does not differ from a newer run that leaves
    it off.
    """
    keys = dict.fromkeys(
        key for runs in runs_by_arm.values() for run in runs for key in run.flat_config if key not in ("name", "seed")
    )
    texts = {
        key: tuple(
            ", ".join(
                dict.fromkeys(printable_text(yaml_scalar(run.flat_config.get(key, _MISSING_VALUE))) for run in runs)
            )
            for runs in runs_by_arm.values()
        )
        for key in keys
    }
    off = {"null": _MISSING_VALUE}
    return {key: arm_texts for key, arm_texts in texts.items() if len({off.get(text, text) for text in arm_texts}) > 1}


def _keys_besides_normalizer(config_diff: Iterable[str]) -> list[str]:
    """Return those keys of `config_diff` that decide what a run learns and are not the normalizer's."""
    return [key for key in config_diff if distinguishes_arms(key) and not key.startswith(_NORMALIZER_KEY_PREFIXES)]
