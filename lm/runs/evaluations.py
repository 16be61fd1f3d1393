"""Evaluations of a run folder: the series that each gives, of which all tables, pictures and differences are made, and its JSON file."""

import hashlib
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
from lm.runs.folder import CHECKPOINTS, EVALUATIONS, read_json, step_path, unsealed
from lm.schema import Plain, build

IntervalKind = Literal[
    "none", "documents", "wilson"
]  # how a mean's interval is made: Student t over documents; Wilson's over sequences with questions
Better = Literal["lower", "higher", "none"]  # which direction is better; none: it describes
Shape = Literal["number", "bins", "points"]


@dataclass(frozen=True)
class Axis:
    """The axis that a series is measured over.

    `values` ascend: the points, or the edges of `bins`, which are whole numbers from 0 (one more than there are columns).
    """

    name: str  # such as `position in the sequence`
    unit: str  # unit of its values; `tokens` are marked with the training length
    before: str  # words before a value in a sentence, such as `at positions`
    values: tuple[float, ...]
    bins: bool = False
    log: bool = True  # drawn on a logarithmic scale

    @property
    def label(self) -> str:
        """The axis' label in a picture: name and unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Shown:
    """How a report shows a series; series of one `title` share a table, a picture and the checks of fairness."""

    title: str
    measured_on: str  # a plural noun for the sequences, such as `validation sequences`
    amount: str  # how many and how long they are, such as `256 of 512 tokens`
    caption: str = ""  # what the picture shows, in words
    levels: str = ""  # what its references are, in words


@dataclass(frozen=True, eq=False)
class Sample:
    """Values by unit (sequence, document, trial) on one set of sequences; of equal `sha256` they can be paired unit by unit."""

    sha256: str  # hash of the sequences
    values: np.ndarray  # (units, columns); NaN where not finite
    weights: np.ndarray  # (units,) how many tokens or questions count in each
    groups: np.ndarray  # (units,) labels: equal for units that depend on each other, such as those of one document

    def part(self, chosen: np.ndarray) -> "Sample":
        """The units where `chosen` (units,) bool is true, under a hash of their own."""
        sha256 = hashlib.sha256(f"{self.sha256} {np.flatnonzero(chosen).tolist()}".encode()).hexdigest()
        own = self.sha256 if chosen.all() else sha256
        return Sample(own, self.values[chosen], self.weights[chosen], self.groups[chosen])


def selects(data: str, documents: np.ndarray) -> np.ndarray:
    """Which units of held-out text select (best checkpoints, learning rates), (units,) bool; results are of the others.

    A hash of the data's fingerprint `data` and the label of the document, `documents` (units,), decides: about a third of them.
    """
    labels, of_unit = np.unique(documents, return_inverse=True)
    chosen = [hashlib.sha256(f"{data} {label}".encode()).digest()[0] % 3 == 0 for label in labels.tolist()]
    return np.array(chosen, dtype=bool)[of_unit]


@dataclass(frozen=True, eq=False)
class Units:
    """Values of a series by unit, such as a held-out sequence, at one place of its axis. Of equal `identity` they can be paired.

    Attributes:
        values, weights, groups: (units,); groups are documents.
        fingerprint: of the held-out text, a part of which selects; empty: of others, such as questions, all of which report.
        sha256: of the sequences.
        place: start and end on the axis.
    """

    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    fingerprint: str
    sha256: str
    place: tuple[float, float]

    @property
    def identity(self) -> tuple[str, str]:
        """The data and the sequences that were measured."""
        return self.fingerprint, self.sha256

    @property
    def mean(self) -> float:
        """The weighted mean."""
        return float(np.average(self.values, weights=self.weights))

    def minus(self, other: "Units") -> "Units":
        """The differences to the same units of another run."""
        return replace(self, values=self.values - other.values)

    def part(self, selection: bool) -> "Units":
        """The values of the documents that select, about a third, or of those that report: by a hash of the document, which is for a
        sequence the one that it begins in. All, where they are not of held-out text.

        Raises:
            RunError: there are none.
        """
        if not self.fingerprint:
            return self
        chosen = selects(self.fingerprint, self.groups) == selection
        if not chosen.any():
            use = "choose learning rates" if selection else "report"
            raise RunError(f"none of {len(set(self.groups.tolist()))} held-out documents is left to {use} on: hold out more text")
        return replace(self, values=self.values[chosen], weights=self.weights[chosen], groups=self.groups[chosen])


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one evaluation under one inference setting, over the columns of an axis.

    A series without `samples` has means alone: no interval, no differences. The columns of its samples, one after the other, are
    those of the axis: one sample for all of them, or one for each where every x has sequences of its own.
    """

    kind: str  # kind of evaluation
    metric: str  # such as `loss`
    unit: str  # such as `nats per token`; a `fraction` lies within 0 and 1
    better: Better
    seq_len: int  # training length, tokens
    means: np.ndarray  # (columns,) over all that counts; NaN where not finite
    what: str = ""  # task or source; empty: all there is
    options: dict[str, Plain] = field(default_factory=dict)  # options of `what`, which tell equal names apart
    setting: str = ""  # label of the inference setting; empty: it can't be set
    axis: Axis | None = None  # None: a single number
    samples: tuple[Sample, ...] = ()
    curve: np.ndarray | None = None  # (length,) of bins: means at every whole number of the axis, finer than the bins
    data_fingerprint: str = ""  # fingerprint of the data the sequences come from; empty: they come from no data
    references: dict[str, float] = field(default_factory=dict)  # levels to compare it with, such as chance, by name
    interval: IntervalKind = "none"
    control: bool = False  # shows that the measurement works, not what the model can do: drawn without its interval
    logged: tuple[str, ...] = ()  # name in the metrics log: of each column, or of the mean over all bins; (): not logged
    shown: Shown | None = None  # None: in no report

    def __post_init__(self):
        """Raises ValueError where the parts don't fit together."""
        columns = 1 if self.axis is None else len(self.axis.values) - self.axis.bins
        edges = np.array(self.axis.values if self.axis else [0.0])
        _require(columns > 0 and bool(np.all(np.diff(edges) > 0)), "the values of its axis must ascend")
        _require(not self.bins or (edges[0] == 0 and not (edges % 1).any()), "bins must be whole numbers from 0")
        _shaped("means", self.means, (columns,))
        for name, choices in (("interval", IntervalKind), ("better", Better)):
            _require(getattr(self, name) in get_args(choices), f"{name} must be {' or '.join(get_args(choices))}")
        sampled = sum(sample.values.shape[1] if sample.values.ndim == 2 else 0 for sample in self.samples)
        _require(not self.samples or sampled == columns, f"its samples have {sampled} columns, not {columns}")
        _require(bool(self.samples) or self.interval == "none", "an interval needs samples")
        for sample in self.samples:
            for name in ("weights", "groups"):
                _shaped(f"samples.{name}", getattr(sample, name), sample.values.shape[:1])
            _require(bool((sample.weights >= 0).all() and sample.weights.sum() > 0), "samples.weights must be positive")
        if self.bins or self.curve is not None:
            _require(self.bins and self.curve is not None, "a curve belongs to bins, and bins to a curve")
            _shaped("curve", self.curve, (int(edges[-1]),))
        _require(len(self.logged) in (0, 1 if self.bins else columns), "needs one logged name a column")

    @property
    def bins(self) -> bool:
        """Whether its columns are ranges of the axis, not points."""
        return self.axis is not None and self.axis.bins

    @property
    def shape(self) -> Shape:
        """The shape of its axis: nothing, ranges or points of its axis."""
        return "number" if self.axis is None else "bins" if self.axis.bins else "points"

    def column(self, number: int) -> tuple[Sample, np.ndarray]:
        """The sample that a column is of, and the column's values, (units,)."""
        for sample in self.samples:
            if number < sample.values.shape[1]:
                return sample, sample.values[:, number]
            number -= sample.values.shape[1]
        raise IndexError(f"{self.metric} has no such column")

    def units(self, start: float, stop: float) -> Units | None:
        """Values by unit at a point `start`; of bins the means over those within a range, as `place` then says. None if it has none."""
        places = np.array(self.axis.values if self.axis else [0.0], dtype=float)
        columns = np.flatnonzero((places[:-1] >= start) & (places[1:] <= stop) if self.bins else places == start)
        if not self.samples or not len(columns):
            return None
        sample, values = self.column(int(columns[0]))
        if self.bins:
            widths = np.diff(places)[columns]
            start, values = places[columns[0]], sample.values[:, columns] @ widths / widths.sum()
        return Units(values.astype(float), sample.weights, sample.groups, self.data_fingerprint, sample.sha256, (start, stop))

    def logged_units(self, metric: str) -> Units | None:
        """Values by unit of what is logged as `metric`: of bins the mean over all of them."""
        if self.bins or self.axis is None:
            return self.units(0, self.axis.values[-1] if self.axis else 0)
        x = self.axis.values[self.logged.index(metric)]
        return self.units(x, x)

    @property
    def whole(self) -> float | None:
        """The mean over all bins, or the single number; None of points."""
        return float(self.curve.mean()) if self.bins else None if self.axis else float(self.means[0])

    @property
    def places(self) -> dict[str, tuple[float, float]]:
        """Where it has means, (start, stop) by label: its points; of bins, within 1x, 1x-2x, 2x-4x ... of the training length."""
        if self.axis is None:
            return {"": (0, 0)}
        if not self.bins:
            return {number(value): (value, value) for value in self.axis.values}
        length = self.axis.values[-1]
        stops = [min(self.seq_len, length)]
        while stops[-1] < length:
            stops.append(min(stops[-1] * 2, length))
        times = [stop / self.seq_len for stop in stops]
        labels = [f"within {times[0]:g}x", *(f"{low:g}x-{high:g}x" for low, high in pairwise(times))]
        return dict(zip(labels, zip([0, *stops[:-1]], stops, strict=True), strict=True))

    def column_at(self, place: str) -> int:
        """The column of one of its `places`: of a point, or of the bin that a range begins with."""
        start = self.places[place][0]
        return 0 if self.axis is None else int(np.searchsorted(self.axis.values[: len(self.means)], start).clip(max=len(self.means) - 1))

    def mean_at(self, place: str) -> float:
        """The mean at one of its `places`."""
        start, stop = self.places[place]
        return float(self.curve[int(start) : int(stop)].mean() if self.bins else self.means[self.column_at(place)])

    def mean_within(self, start: float, stop: float) -> float:
        """The mean of its columns at a point `start`, or of bins within a range, by their widths."""
        places = np.array(self.axis.values)
        if not self.bins:
            return float(self.means[places == start][0])
        inside = (places[:-1] >= start) & (places[1:] <= stop)
        return float(np.average(self.means[inside], weights=np.diff(places)[inside]))

    @property
    def reporting(self) -> "Series":
        """The series on the documents of held-out text that report; its means alone, as of all of the text, where none does.

        Curves of bins become as coarse as the bins are; a unit without a value is left out of the mean.
        """
        if not self.data_fingerprint or not self.samples:
            return self
        samples = [each.part(~selects(self.data_fingerprint, each.groups)) for each in self.samples]
        if not all(len(each.weights) and each.weights.sum() for each in samples):
            return replace(self, samples=(), interval="none")
        masked = [np.ma.average(np.ma.masked_invalid(each.values), axis=0, weights=each.weights) for each in samples]
        means = np.where(np.isfinite(self.means), np.concatenate([each.filled(np.nan) for each in masked]), np.nan)
        curve = np.repeat(means, np.diff(self.axis.values).astype(int)) if self.bins else None
        return replace(self, samples=tuple(samples), means=means, curve=curve)

    @property
    def is_finite(self) -> bool:
        """Whether all of its means are finite."""
        return bool(np.isfinite(self.means).all() and (self.curve is None or np.isfinite(self.curve).all()))

    @property
    def scores(self) -> dict[str, float]:
        """The series' numbers that are logged among a run's metrics, by their names there."""
        means = self.means.tolist() if self.whole is None else [self.whole]
        return dict(zip(self.logged, means, strict=False))

    def plain(self) -> dict[str, Plain]:
        """The series as JSON holds it, with null for what is not finite; values by unit and the curve to 1e-6."""
        content = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        content["axis"], content["shown"] = self.axis and asdict(self.axis), self.shown and asdict(self.shown)
        content["samples"] = [vars(sample) | {"values": sample.values.astype(float).round(6)} for sample in self.samples]
        content["curve"] = None if self.curve is None else self.curve.round(6)
        return listed(content)

    @classmethod
    def of(cls, content: dict[str, Plain]) -> "Series":
        """The series that `plain` was called on. Raises ValueError, TypeError or KeyError where it isn't that."""
        known = {spec.name for spec in fields(cls)}
        _require(not set(content) - known, f"a series has no {', '.join(sorted(set(content) - known))}")
        parts = typed(cls, content)
        if parts["axis"]:
            parts["axis"] = Axis(**typed(Axis, parts["axis"]) | {"values": tuple(parts["axis"]["values"])})
            numbers(parts["axis"].values)
        samples = (
            Sample(sample["sha256"], *(numbers(sample[name]) for name in ("values", "weights")), np.array(sample["groups"]))
            for sample in parts["samples"]
        )
        parts |= {
            "shown": parts["shown"] and Shown(**typed(Shown, parts["shown"])),
            "samples": tuple(samples),
            "means": numbers(parts["means"]),
            "curve": None if parts["curve"] is None else numbers(parts["curve"]),
            "references": {name: float("nan") if level is None else float(level) for name, level in parts["references"].items()},
            "logged": tuple(parts["logged"]),
        }
        return cls(**parts)


def number(value: float) -> str:
    """A value of an axis, thousands separated."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def series_names(series: Iterable[Series]) -> dict[Series, str]:
    """The name of each series' task or source, with the options that tell it apart from others of that name."""
    every = {each: {"name": each.what} | each.options for each in series}
    different = {str(what): what for what in every.values()}
    names = dict(zip(different, task_names(list(different.values())), strict=True))
    return {each: names[str(what)] for each, what in every.items()}


_PLAIN = {str: "a text", int: "an integer", bool: "true or false", dict: "a map"}


def typed(schema: type, content: dict[str, Plain]) -> dict[str, Plain]:
    """The fields of a dataclass in `content`. Raises KeyError where one is missing, ValueError where a text or an integer is none."""
    values = {spec.name: content[spec.name] for spec in fields(schema)}
    for spec in fields(schema):
        plain = typing.get_origin(spec.type) or spec.type
        if plain in _PLAIN:
            _require(isinstance(values[spec.name], plain), f"{spec.name} must be {_PLAIN[plain]}")
    return values


def numbers(values: Plain) -> np.ndarray:
    """A list of numbers as an array; null (a number that was not finite) becomes NaN."""
    return np.array(values, dtype=float)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _shaped(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    _require(array.shape == shape, f"{name} has shape {array.shape}, not {shape}")


def listed(value: object) -> Plain:
    """`value` without arrays and tuples, and with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: listed(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [listed(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return None if isinstance(value, float) and not np.isfinite(value) else value


# ---------------------------------------------------------------- the validation loss


KIND, LOSS = "validation", "val loss"
UNIGRAM = "unigram cross-entropy"  # the level to compare the loss with


def validation_series(
    loss: float,
    bits_per_byte: float | None,
    unigram_cross_entropy: float | None,
    seq_len: int,
    sample: Sample | None = None,
    data_fingerprint: str = "",
) -> list[Series]:
    """Loss (nats per token) and, of text, bits per byte on held-out sequences of the training length.

    Args:
        bits_per_byte: None: symbols, which are no bytes.
        unigram_cross_entropy: loss by token frequencies of the training text, nats per token; None: not known.
        sample: loss by sequence, (sequences, 1); None: means alone are known.
    """
    token = "" if bits_per_byte is not None else ", nats per token of the answers"
    amount = "" if sample is None else f"{len(sample.values):,} of {seq_len:,} tokens{token}"
    shown = Shown("Validation at the training length", "validation sequences", amount)
    common = {"kind": KIND, "better": "lower", "seq_len": seq_len, "shown": shown}
    series = [
        Series(
            metric=LOSS, unit="nats per token", means=np.array([loss], float), logged=("val/loss",),
            references={} if unigram_cross_entropy is None else {UNIGRAM: unigram_cross_entropy},
            samples=() if sample is None else (sample,), interval="none" if sample is None else "documents",
            data_fingerprint=data_fingerprint, **common,
        )
    ]  # fmt: skip
    if bits_per_byte is not None:
        series.append(
            Series(metric="bits per byte", unit="", means=np.array([bits_per_byte], float), logged=("val/bits_per_byte",), **common)
        )
    return series


def selecting(data: str, documents: np.ndarray) -> np.ndarray:
    """Which validation sequences, (sequences,) bool, choose the best checkpoint: those that `selects`; all where none or each does."""
    chosen = selects(data, documents)
    return chosen if chosen.any() else ~chosen


def selection_loss(series: Series) -> tuple[float, str]:
    """The validation loss on the sequences that choose the best checkpoint, nats per token, and the hash of these."""
    (sample,) = series.samples
    part = sample.part(selecting(series.data_fingerprint, sample.groups))
    return float(np.average(part.values[:, 0], weights=part.weights)), part.sha256


# ---------------------------------------------------------------- evaluations and their files


ROOMS = ("attention", "config", "data", "diagnostics", "evaluation", "model", "runs", "statistics")  # of the code that measures imports


@cache
def measuring_code(package: Path = Path(__file__).parent.parent) -> str:
    """A digest of the source files that an evaluation's numbers come from, which changes with any of them."""
    return sources_sha256([package / room for room in ROOMS])


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One kind of evaluation of one checkpoint."""

    kind: str
    step: int
    tokens_seen: int
    data_fingerprint: str
    options: dict[str, Plain]  # all that decides the numbers beside the weights, precision and data
    precision: str
    weights_sha256: str
    series: tuple[Series, ...]
    asked: dict[str, Plain] = field(default_factory=dict)  # the keys of `eval` it was asked for with; {}: by an older version
    code: dict[str, str] = field(
        default_factory=dict
    )  # `Measurement.code`; {}: by an older version, whose files hold no sha256 of themselves

    @property
    def name(self) -> str:
        """The evaluation's kind in a sentence, such as `long-context evaluation`."""
        return f"{self.kind.replace('_', '-')} evaluation"

    @property
    def reporting(self) -> "Evaluation":
        """The evaluation on the documents that report; means that are known of all held-out text alone say so in their names."""
        of_text = any(each.data_fingerprint for each in self.series)
        series = [each.reporting for each in self.series]
        whole = [each if each.samples or not of_text else replace(each, metric=f"{each.metric}, all held-out text") for each in series]
        return replace(self, series=tuple(sorted(whole, key=lambda each: not each.samples)))

    def plain(self) -> dict[str, Plain]:
        """The content of its file."""
        return vars(self) | {"series": [series.plain() for series in self.series]}

    @classmethod
    def of(cls, content: dict[str, Plain]) -> "Evaluation":
        """The evaluation that `plain` was called on. Raises KeyError where it lacks something, ValueError where it isn't that."""
        try:
            series = tuple(Series.of(each) for each in content["series"])
            return cls(**typed(cls, {"asked": {}, "code": {}} | content) | {"series": series})
        except (TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"a field has another type than it should: {one_line(error, None)}") from None


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """evaluations/KIND.step-N.json of a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.json"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """The evaluation files of a run folder, by kind and step."""
    matches = {path: re.fullmatch(r"(.+)\.step-(\d+)\.json", path.name) for path in (run / EVALUATIONS).glob("*.json")}
    return {(match[1], int(match[2])): path for path, match in matches.items() if match}


def read_evaluation(path: Path) -> dict[str, Plain]:
    """The content of an evaluation's file; one that an older version wrote holds no sha256 of itself, and no `code`.

    Raises:
        RunError: it is missing or damaged, was altered, or is not of the kind and step of its name.
    """
    try:
        content = read_json(path)
        if "sha256" in content or "code" in content:
            content = unsealed(content, path)
    except RunError as error:
        raise RunError(f"{error}; {remedy(path)}") from None
    kind, _, step = path.stem.rpartition(".step-")
    if (content.get("kind", kind), content.get("step", int(step))) != (kind, int(step)):
        raise RunError(f"{path}: holds the {content['kind']} of step {content['step']}; {remedy(path)}")
    return content


def evaluation_in(path: Path) -> Evaluation | None:
    """The evaluation in a file; None if the file holds no series. Raises RunError: it is damaged, or of an older version."""
    content = read_evaluation(path)
    try:
        return Evaluation.of(content) if "series" in content else None
    except (KeyError, ValueError) as error:
        raise RunError(f"{path}: not an evaluation of this version: {one_line(error)}; {remedy(path)}") from None


def remedy(path: Path) -> str:
    """Words on what to do about an evaluation's file that can't be believed."""
    run, step = path.parent.parent, int(path.stem.rpartition(".step-")[2])
    if not step_path(run / CHECKPOINTS, step).exists():
        return "bring it back: the checkpoint of its step is no longer there to be measured again"
    return f"bring it back, or measure it again: lm eval {run} --checkpoint {step}"


def last_evaluations(
    run: Path, config: dict[str, Plain], known: Mapping[Path, Evaluation] = MappingProxyType({})
) -> tuple[list[Evaluation], list[str]]:
    """The last evaluation of each kind that holds series, and words for each that `config` asks for and that is missing; `known`: those
    that have been read, by their files.

    Raises:
        RunError: a file that can't be read; one that an older version wrote counts as missing.
    """
    last, wanted = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}, _wanted(config)
    evaluations, missing = [], []
    for kind in dict.fromkeys((*EvalConfig.known(), *last)):
        name = f"{kind.replace('_', '-')} evaluation"
        if kind not in last:
            missing += [f"no {name}"] if kind in wanted else []
            continue
        if last[kind] in known:
            evaluations.append(known[last[kind]])
            continue
        content = read_evaluation(last[kind])
        try:
            if "series" in content or kind in wanted:  # downstream tasks keep a record of their own
                evaluations.append(Evaluation.of(content))
        except KeyError as error:
            again = "if it was measured by an older version, measure it again with `lm eval`"
            missing.append(f"no {name} that can be read ({last[kind]}: no {error.args[0]}; {again})")
        except ValueError as error:
            raise RunError(f"{last[kind]}: {one_line(error, None)}") from None
    return evaluations, missing


def _wanted(config: dict[str, Plain]) -> set[str]:
    """The kinds that a run's configuration asks for; none where an older version wrote it so that it can't be told."""
    problems = []
    asked, data = (build(schema, config.get(key) or {}, key, problems) for key, schema in (("eval", EvalConfig), ("data", DataConfig)))
    return set() if problems else set(asked.wanted(data))
