"""Evaluations of a run folder, their files, and their series of measured values, from which tables, pictures and
differences are made.
"""

import hashlib
import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from lm.config.data_config import DataConfig
from lm.config.eval_config import EvalConfig
from lm.config.task_config import task_names
from lm.errors import RunError, one_line
from lm.files import sources_sha256
from lm.runs.folder import CHECKPOINTS, EVALUATIONS, step_path
from lm.runs.manifest import read_file
from lm.runs.metric import Better
from lm.schema import Plain, build

# How the interval of a mean is made: Student's t over documents, Wilson's interval over sequences with questions.
IntervalKind = Literal["none", "documents", "wilson"]
Shape = Literal["number", "bins", "points"]


@dataclass(frozen=True)
class Axis:
    """The axis of a series, such as positions or sequence lengths.

    `values`, in ascending order, are the points at which the series was measured. If `bins` is true, they are the edges
    of its bins, whole numbers from 0.
    """

    name: str  # such as `position in the sequence`
    unit: str  # unit of its values; pictures mark the training length on axes of `tokens`
    before: str  # words before a value in a sentence, such as `at positions`
    values: tuple[float, ...]
    bins: bool = False
    log: bool = True  # drawn on a logarithmic scale

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Shown:
    """Title and texts with which a report shows a series; series of equal `title` and `Series.shape` share a table and
    a picture.
    """

    title: str
    measured_on: str  # a plural noun for the sequences of the measurement, such as `validation sequences`
    amount: str  # number and length of these sequences, such as `256 of 512 tokens`
    caption: str = ""  # what the picture shows, in words
    levels: str = ""  # the reference levels of the series (`Series.references`), in words


@dataclass(frozen=True, eq=False)
class Sample:
    """A metric's values by unit (sequence, document or trial) on one set of sequences. Samples of equal `sha256` can be
    paired by unit.
    """

    sha256: str  # hash of the sequences
    values: np.ndarray  # (units, columns); NaN where not finite
    weights: np.ndarray  # (units,) number of tokens or questions that count in each unit
    groups: np.ndarray  # (units,) labels: equal for units that depend on each other, such as sequences of one document

    def part(self, mask: np.ndarray) -> "Sample":
        """The sample restricted to units where `mask`, (units,) bool, is true; if a unit is dropped, the sample's hash
        depends on the mask, too."""
        if mask.all():
            return self
        sha256 = hashlib.sha256(f"{self.sha256} {np.flatnonzero(mask).tolist()}".encode()).hexdigest()
        return Sample(sha256, self.values[mask], self.weights[mask], self.groups[mask])


def selection_mask(fingerprint: str, documents: np.ndarray) -> np.ndarray:
    """Mask, (units,) bool, of held-out units (such as sequences) that choose checkpoints and learning rates; reports
    use all other units.

    `documents`, (units,), is the label of each unit's document. By a hash of label and data `fingerprint`, about a
    third of the documents are selecting documents, which choose checkpoints and rates. All others are reporting
    documents, whose results are reported.
    """
    labels, label_indices = np.unique(documents, return_inverse=True)
    selection = [hashlib.sha256(f"{fingerprint} {label}".encode()).digest()[0] % 3 == 0 for label in labels.tolist()]
    return np.array(selection, dtype=bool)[label_indices]


class NoDocuments(RunError):
    """Raised if `selection_mask` leaves no held-out document to choose learning rates on, or none to report
    results on.
    """


@dataclass(frozen=True, eq=False)
class Units:
    """A series' values by unit (such as a sequence) at a point or over a range of its axis. `Units` of equal `identity`
    can be paired.
    """

    # values, weights, groups: (units,); the groups are labels of documents
    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    # fingerprint of the held-out text, of which some documents choose learning rates, and the others are reported;
    # empty for units that do not come from held-out text, such as questions, which do both
    fingerprint: str
    sha256: str  # the hash of the sequences
    span: tuple[float, float]  # start and end on the axis

    @property
    def identity(self) -> tuple[str, str]:
        """Fingerprint of the data, and hash of the measured sequences."""
        return self.fingerprint, self.sha256

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    def minus(self, baseline: "Units") -> "Units":
        """Differences by unit: these values minus the values of `baseline`, another run on the same units."""
        return replace(self, values=self.values - baseline.values)

    def part(self, selection: bool) -> "Units":
        """The units of documents that choose learning rates (`selection_mask`) if `selection` is true, else of
        documents that are reported.

        A sequence belongs to the document in which it begins. All units are returned if they don't come from held-out
        text.

        Raises NoDocuments: no unit is left.
        """
        if not self.fingerprint:
            return self
        mask = selection_mask(self.fingerprint, self.groups) == selection
        if not mask.any():
            purpose = "choose learning rates" if selection else "report"
            raise NoDocuments(
                f"none of {len(set(self.groups.tolist()))} held-out documents is left to {purpose} on: hold out more "
                "text"
            )
        return replace(self, values=self.values[mask], weights=self.weights[mask], groups=self.groups[mask])


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one evaluation under one inference setting, such as rescaled RoPE. It has a column for each point
    or bin of its axis.

    Without `samples` only means are known, so that it has no intervals or differences. One sample holds all columns.
    Where each point was measured on different sequences, there is instead one sample for each column, in the order of
    the axis.
    """

    kind: str  # kind of evaluation
    metric: str  # such as `loss`
    unit: str  # such as `nats per token`; a `fraction` lies within 0 and 1
    better: Better
    seq_len: int  # training length, tokens
    means: np.ndarray  # (columns,) means over all tokens or questions that count; NaN where not finite
    what: str = ""  # task or source; empty: all tasks or sources together
    # options of the task or source `what`; they tell equal names apart
    options: dict[str, Plain] = field(default_factory=dict)
    setting: str = ""  # label of the inference setting; empty: the evaluation has no such settings
    axis: Axis | None = None  # None: a single number
    samples: tuple[Sample, ...] = ()
    curve: np.ndarray | None = None  # (length,) for bins: means at every whole number of the axis, finer than the bins
    data_fingerprint: str = ""  # fingerprint of the data that the sequences come from; empty: they come from no data
    # levels to compare the series with, such as chance, by name
    references: dict[str, float] = field(default_factory=dict)
    interval: IntervalKind = "none"
    # whether it shows that the measurement works, not what the model can do; drawn without interval
    control: bool = False
    logged: tuple[str, ...] = ()  # name in the metrics log of each column, or of the mean over all bins; (): not logged
    shown: Shown | None = None  # how reports show the series; None: no report shows it

    def __post_init__(self):
        """Check that the fields are consistent; raises ValueError otherwise."""
        n_columns = 1 if self.axis is None else len(self.axis.values) - self.axis.bins
        edges = np.array(self.axis.values if self.axis else [0.0])
        _require(n_columns > 0 and bool(np.all(np.diff(edges) > 0)), "the values of its axis must ascend")
        _require(not self.bins or (edges[0] == 0 and not (edges % 1).any()), "bins must be whole numbers from 0")
        _require_shape("means", self.means, (n_columns,))
        for name, choices in (("interval", IntervalKind), ("better", Better)):
            _require(getattr(self, name) in get_args(choices), f"{name} must be {' or '.join(get_args(choices))}")
        n_sample_columns = sum(sample.values.shape[1] if sample.values.ndim == 2 else 0 for sample in self.samples)
        _require(
            not self.samples or n_sample_columns == n_columns,
            f"its samples have {n_sample_columns} columns, not {n_columns}",
        )
        _require(not self.bins or len(self.samples) < 2, "bins have one sample")
        _require(bool(self.samples) or self.interval == "none", "an interval needs samples")
        for sample in self.samples:
            for name in ("weights", "groups"):
                _require_shape(f"samples.{name}", getattr(sample, name), sample.values.shape[:1])
            _require(bool((sample.weights >= 0).all() and sample.weights.sum() > 0), "samples.weights must be positive")
        if self.bins or self.curve is not None:
            _require(self.bins and self.curve is not None, "a curve belongs to bins, and bins to a curve")
            _require_shape("curve", self.curve, (int(edges[-1]),))
        _require(len(self.logged) in (0, 1 if self.bins else n_columns), "needs one logged name a column")

    @property
    def names(self) -> tuple[str, ...]:
        """The metric of each column: its name in metrics.jsonl, or `metric` if it is not logged. All bins have the name
        of their mean.
        """
        return (self.logged or (self.metric,)) * (1 if self.logged and not self.bins else len(self.means))

    @property
    def bins(self) -> bool:
        """Whether each column covers a range (bin) of the axis, not a single point."""
        return self.axis is not None and self.axis.bins

    @property
    def shape(self) -> Shape:
        """The series' shape: `number` without an axis, `bins` if its columns are ranges of the axis, else `points`."""
        return "number" if self.axis is None else "bins" if self.axis.bins else "points"

    def column(self, index: int) -> tuple[Sample, np.ndarray]:
        """The sample that holds column `index` (a point or bin of the axis), and the column's values by unit,
        (units,).
        """
        for sample in self.samples:
            if index < sample.values.shape[1]:
                return sample, sample.values[:, index]
            index -= sample.values.shape[1]
        raise IndexError(f"{self.metric} has no such column")

    def units(self, start: float, stop: float) -> Units | None:
        """Values by unit (such as a sequence) at point `start`; for bins, each unit's mean from `start` to `stop`. None
        if there are no such values."""
        columns, widths = self._columns(start, stop)
        if not self.samples or not len(columns):
            return None
        sample, values = self.column(int(columns[0]))
        if self.bins:
            start, values = float(self.axis.values[columns[0]]), sample.values[:, columns] @ widths / widths.sum()
        return Units(
            values.astype(float), sample.weights, sample.groups, self.data_fingerprint, sample.sha256, (start, stop)
        )

    def _columns(self, start: float, stop: float) -> tuple[np.ndarray, np.ndarray]:
        """Indices and widths of the columns from `start` to `stop` if columns are bins; else of the column at point
        `start`, of width 1.
        """
        axis_values = np.array(self.axis.values if self.axis else [0.0], dtype=float)
        columns = np.flatnonzero(
            (axis_values[:-1] >= start) & (axis_values[1:] <= stop) if self.bins else axis_values == start
        )
        return columns, np.diff(axis_values)[columns] if self.bins else np.ones(len(columns))

    def logged_units(self, metric: str) -> Units | None:
        """Values by unit (such as a sequence) of the column that is logged as `metric`; for bins, each unit's mean over
        all bins.
        """
        if self.bins or self.axis is None:
            return self.units(0, self.axis.values[-1] if self.axis else 0)
        point = self.axis.values[self.logged.index(metric)]
        return self.units(point, point)

    @property
    def overall_mean(self) -> float | None:
        """The mean over all bins, or the single number; None if the columns are points."""
        return float(self.curve.mean()) if self.bins else None if self.axis else float(self.means[0])

    @property
    def places(self) -> dict[str, tuple[float, float]]:
        """The points or ranges that reports show, (start, stop) by label. Ranges are `within 1x`, `1x-2x`, ... of the
        training length.
        """
        if self.axis is None:
            return {"": (0, 0)}
        if not self.bins:
            return {number(value): (value, value) for value in self.axis.values}
        length = self.axis.values[-1]
        stops = [min(self.seq_len, length)]
        while stops[-1] < length:
            stops.append(min(stops[-1] * 2, length))
        length_factors = [stop / self.seq_len for stop in stops]
        labels = [f"within {length_factors[0]:g}x", *(f"{low:g}x-{high:g}x" for low, high in pairwise(length_factors))]
        return dict(zip(labels, zip([0, *stops[:-1]], stops, strict=True), strict=True))

    def column_at(self, label: str) -> int:
        """The index, among the columns of `means`, of the point with the label `label`, a key of `places`; for the
        label of a range of bins, the index of its first bin."""
        start = self.places[label][0]
        return (
            0
            if self.axis is None
            else int(np.searchsorted(self.axis.values[: len(self.means)], start).clip(max=len(self.means) - 1))
        )

    def mean_at(self, label: str) -> float:
        """The mean at the point, or over the range of bins, with this `label`, a key of `places`."""
        start, stop = self.places[label]
        return float(self.curve[int(start) : int(stop)].mean() if self.bins else self.means[self.column_at(label)])

    def mean_within(self, start: float, stop: float) -> float:
        """The mean at the point `start`; for bins, the mean over the bins from `start` to `stop`, weighted by bin
        width.
        """
        columns, widths = self._columns(start, stop)
        return float(np.average(self.means[columns], weights=widths))

    @property
    def reporting(self) -> "Series":
        """The series restricted to reporting documents: held-out documents that don't choose checkpoints or learning
        rates.

        Means are then over the units (such as sequences) of these documents; `curve` is constant in each bin. If a
        sample has no such unit, the series keeps its means over all held-out text, without `samples`. A series without
        samples or held-out text stays as it is.
        """
        if not self.data_fingerprint or not self.samples:
            return self
        samples = [sample.part(~selection_mask(self.data_fingerprint, sample.groups)) for sample in self.samples]
        if not all(len(sample.weights) and sample.weights.sum() for sample in samples):
            return replace(self, samples=(), interval="none")
        averages = [
            np.ma.average(np.ma.masked_invalid(sample.values), axis=0, weights=sample.weights) for sample in samples
        ]
        means = np.where(
            np.isfinite(self.means), np.concatenate([average.filled(np.nan) for average in averages]), np.nan
        )
        curve = np.repeat(means, np.diff(self.axis.values).astype(int)) if self.bins else None
        return replace(self, samples=tuple(samples), means=means, curve=curve)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.means).all() and (self.curve is None or np.isfinite(self.curve).all()))

    @property
    def logged_means(self) -> dict[str, float]:
        """The means of this series that training logs to metrics.jsonl, by their names in the log (`logged`)."""
        means = self.means.tolist() if self.overall_mean is None else [self.overall_mean]
        return dict(zip(self.logged, means, strict=False))

    @property
    def sample_means(self) -> list[float]:
        """The means of the values in `samples`, one for each name in `logged`; [] without samples."""
        columns = [self.column(index) for index in range(len(self.means))] if self.samples else []
        means = [float(np.average(values, weights=sample.weights)) for sample, values in columns]
        return [float(np.average(means, weights=np.diff(self.axis.values)))] if means and self.bins else means

    def plain(self) -> dict[str, Plain]:
        """The series as JSON data, with null for numbers that are not finite. `curve` and the values in `samples` are
        rounded to 1e-6.
        """
        content = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        content["axis"], content["shown"] = self.axis and asdict(self.axis), self.shown and asdict(self.shown)
        content["samples"] = [
            vars(sample) | {"values": sample.values.astype(float).round(6)} for sample in self.samples
        ]
        content["curve"] = None if self.curve is None else self.curve.round(6)
        return json_value(content)

    @classmethod
    def from_plain(cls, content: dict[str, Plain]) -> "Series":
        """The series whose `plain()` is `content`. Raises ValueError, TypeError or KeyError where `content` is not of
        this form.
        """
        field_names = {spec.name for spec in fields(cls)}
        _require(not set(content) - field_names, f"a series has no {', '.join(sorted(set(content) - field_names))}")
        field_values = typed_fields(cls, content)
        if field_values["axis"]:
            field_values["axis"] = Axis(
                **typed_fields(Axis, field_values["axis"]) | {"values": tuple(field_values["axis"]["values"])}
            )
            np.array(field_values["axis"].values, float)  # raises where they are no numbers
        samples = (
            Sample(
                sample["sha256"],
                *(np.array(sample[name], float) for name in ("values", "weights")),
                np.array(sample["groups"]),
            )
            for sample in field_values["samples"]
        )
        field_values |= {
            "shown": field_values["shown"] and Shown(**typed_fields(Shown, field_values["shown"])),
            "samples": tuple(samples),
            "means": np.array(field_values["means"], float),  # null becomes NaN
            "curve": None if field_values["curve"] is None else np.array(field_values["curve"], float),
            "references": {
                name: float("nan") if level is None else float(level)
                for name, level in field_values["references"].items()
            },
            "logged": tuple(field_values["logged"]),
        }
        if field_values["kind"] == VALIDATION:  # older versions had another name for it than metrics.jsonl
            field_values["metric"] = {"val loss": LOSS, "bits per byte": BITS_PER_BYTE}.get(
                field_values["metric"], field_values["metric"]
            )
        return cls(**field_values)


def number(value: float) -> str:
    """An axis value as text; integers have thousands separators."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def series_names(series: Iterable[Series]) -> dict[Series, str]:
    """The name of each series' task or source, with the options that distinguish it from tasks or sources of the same
    name.
    """
    definitions = {member: {"name": member.what} | member.options for member in series}
    distinct_definitions = {str(definition): definition for definition in definitions.values()}
    names = dict(zip(distinct_definitions, task_names(list(distinct_definitions.values())), strict=True))
    return {member: names[str(definition)] for member, definition in definitions.items()}


_TYPE_WORDS = {str: "a text", int: "an integer", bool: "true or false", dict: "a map"}


def typed_fields(schema: type, content: dict[str, Plain]) -> dict[str, Plain]:
    """The values in `content` of the fields of dataclass `schema`. Raises KeyError if a field is missing, ValueError
    for a wrong type.
    """
    values = {spec.name: content[spec.name] for spec in fields(schema)}
    for spec in fields(schema):
        plain_type = typing.get_origin(spec.type) or spec.type
        if plain_type in _TYPE_WORDS:
            _require(isinstance(values[spec.name], plain_type), f"{spec.name} must be {_TYPE_WORDS[plain_type]}")
    return values


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    _require(array.shape == shape, f"{name} has shape {array.shape}, not {shape}")


def json_value(value: object) -> Plain:
    """`value` with lists in place of arrays and tuples, and with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [json_value(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- the validation loss


VALIDATION, LOSS, BITS_PER_BYTE = "validation", "val/loss", "val/bits_per_byte"
REPORTING = "of reporting documents"  # what names of metrics in reports end with, if other documents are left out
UNIGRAM = "unigram cross-entropy"  # the level to compare the loss with
UNIGRAM_BOUND = f"{UNIGRAM}, at most"  # the name of the level if it is an upper bound


def validation_series(
    loss: float,
    bits_per_byte: float | None,
    unigram_cross_entropy: float | None,
    seq_len: int,
    sample: Sample | None = None,
    data_fingerprint: str = "",
    level: str = UNIGRAM,
) -> list[Series]:
    """The series of the loss (nats per token) and, for text, of bits per byte on held-out sequences of the training
    length.

    Args:
        bits_per_byte: bits per byte of the text; None: the tokens are symbols, which are no bytes.
        unigram_cross_entropy: loss by token frequencies of the training text, nats per token; None: not known.
        sample: loss by sequence, (sequences, 1); None: only the means are known.
        level: the name of `unigram_cross_entropy` in the series: UNIGRAM, or UNIGRAM_BOUND for an upper bound.
    """
    target_note = "" if bits_per_byte is not None else ", nats per token of the answers"
    sequences_text = "" if sample is None else f"{len(sample.values):,} of {seq_len:,} tokens{target_note}"
    display = Shown("Validation at the training length", "validation sequences", sequences_text)
    common_fields = {"kind": VALIDATION, "better": "lower", "seq_len": seq_len, "shown": display}
    loss_series = Series(
        metric=LOSS, unit="nats per token", means=np.array([loss], float), logged=(LOSS,),
        references={} if unigram_cross_entropy is None else {level: unigram_cross_entropy},
        samples=() if sample is None else (sample,), interval="none" if sample is None else "documents",
        data_fingerprint=data_fingerprint, **common_fields,
    )  # fmt: skip
    if bits_per_byte is None:
        return [loss_series]
    bits = Series(
        metric=BITS_PER_BYTE,
        unit="",
        means=np.array([bits_per_byte], float),
        logged=(BITS_PER_BYTE,),
        **common_fields,
    )
    return [loss_series, bits]


def checkpoint_selection_mask(fingerprint: str, documents: np.ndarray) -> np.ndarray:
    """Mask, (sequences,) bool, of validation sequences that choose the best checkpoint: `selection_mask`, or all if it
    selects none.
    """
    selection = selection_mask(fingerprint, documents)
    return selection if selection.any() else ~selection


def selection_loss(series: Series) -> tuple[float, str]:
    """Validation loss (nats per token) on the sequences on which the best checkpoint is chosen, and the hash of these
    sequences.
    """
    (sample,) = series.samples
    selected_sample = sample.part(checkpoint_selection_mask(series.data_fingerprint, sample.groups))
    return float(np.average(selected_sample.values[:, 0], weights=selected_sample.weights)), selected_sample.sha256


# ---------------------------------------------------------------- evaluations and their files


# packages and modules that measure
MEASURING_PACKAGES = (
    "attention",
    "config",
    "data",
    "diagnostics",
    "evaluation",
    "functional.py",
    "huggingface",
    "model",
    "runs",
    "statistics",
)


@cache
def measuring_code(package: Path = Path(__file__).parent.parent) -> str:
    """A digest of all source files that can affect an evaluation's numbers."""
    return sources_sha256([package / package_name for package_name in MEASURING_PACKAGES])


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of one kind of evaluation on one checkpoint."""

    kind: str
    step: int
    tokens_seen: int
    data_fingerprint: str
    options: dict[str, Plain]  # everything that decides the numbers, except weights, precision and data
    precision: str
    weights_sha256: str
    series: tuple[Series, ...]
    # the keys of `eval` that asked for it; {}: an older version measured it
    asked: dict[str, Plain] = field(default_factory=dict)
    # digests of the code that measured it (`Measurement.code`)
    code: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind of evaluation as a noun for messages, such as `long-context evaluation`."""
        return f"{self.kind.replace('_', '-')} evaluation"

    @property
    def reporting(self) -> "Evaluation":
        """A copy whose series keep only the held-out documents for reports (`Series.reporting`). A metric's name then
        says so, as metrics.jsonl has the mean over all held-out text by its name alone."""
        series = [member.reporting for member in self.series]
        named_series = [
            replace(
                member,
                metric=f"{member.metric} {REPORTING}",
                logged=tuple(f"{name} {REPORTING}" for name in member.logged),
            )
            if member.samples and member.data_fingerprint
            else member
            for member in series
        ]
        return replace(self, series=tuple(sorted(named_series, key=lambda member: not member.samples)))

    def plain(self) -> dict[str, Plain]:
        """The content of the evaluation's file."""
        return vars(self) | {"series": [series.plain() for series in self.series]}

    @classmethod
    def from_plain(cls, content: dict[str, Plain]) -> "Evaluation":
        """The evaluation whose `plain()` is `content`. Raises KeyError if a field is missing, ValueError if a field has
        another type.
        """
        try:
            series = tuple(Series.from_plain(entry) for entry in content["series"])
            return cls(**typed_fields(cls, {"asked": {}, "code": {}} | content) | {"series": series})
        except (TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"a field has another type than it should: {one_line(error, None)}") from None


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """The path evaluations/KIND.step-N.json in a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.json"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """The evaluation files of a run folder, by kind and step."""
    matches = {path: re.fullmatch(r"(.+)\.step-(\d+)\.json", path.name) for path in (run / EVALUATIONS).glob("*.json")}
    return {(match[1], int(match[2])): path for path, match in matches.items() if match}


def load_evaluation(path: Path) -> Evaluation:
    """Read the evaluation in a file of evaluations/. Raises RunError if the file was altered or this version can't read
    it.
    """
    content = read_file(path.parent.parent, f"{EVALUATIONS}/{path.name}", restore_advice(path))
    try:
        return Evaluation.from_plain(json.loads(content))
    except (KeyError, ValueError) as error:
        raise RunError(
            f"{path}: not an evaluation of this version: {one_line(error)}; {restore_advice(path)}"
        ) from None


def restore_advice(path: Path) -> str:
    """Advice that ends an error message on a damaged evaluation file: restore it, or measure again if the checkpoint
    exists.
    """
    run, step = path.parent.parent, int(path.stem.rpartition(".step-")[2])
    if not step_path(run / CHECKPOINTS, step).exists():
        return "bring it back: the checkpoint of its step is no longer there to be measured again"
    return f"bring it back, or measure it again: lm eval {run} --checkpoint {step}"


def last_evaluations(
    run: Path, config: dict[str, Plain], known_evaluations: Mapping[Path, Evaluation] = MappingProxyType({})
) -> tuple[list[Evaluation], list[str]]:
    """The last evaluation of each kind, and a message for each kind that `config` asks for but the run folder lacks.

    known_evaluations: evaluations that have been read already, by file path.

    Raises RunError: a file was altered.
    """
    last_paths = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}
    wanted_kinds = _wanted_kinds(config)
    evaluations, gaps = [], []
    for kind in dict.fromkeys((*EvalConfig.kind_names(), *last_paths)):
        path, name = last_paths.get(kind), f"{kind.replace('_', '-')} evaluation"
        if path is None:
            gaps += [f"no {name}"] if kind in wanted_kinds else []
            continue
        if path in known_evaluations:
            evaluations.append(known_evaluations[path])
            continue
        evaluations.append(load_evaluation(path))
    return evaluations, gaps


def _wanted_kinds(config: dict[str, Plain]) -> set[str]:
    """The kinds of evaluation that a run's configuration asks for; empty if this version can't read the
    configuration.
    """
    problems = []
    eval_config = build(EvalConfig, config.get("eval") or {}, "eval", problems)
    data_config = build(DataConfig, config.get("data") or {}, "data", problems)
    return set() if problems else set(eval_config.measurement_classes(data_config))
