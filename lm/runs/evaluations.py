"""Evaluations of a run folder: a frame of measured values by unit, facts about it, and its file.

A file `KIND.step-N.csv` has the facts in its first line, as JSON after `# `, then a table with the columns `COLUMNS`.
"""

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd

from lm.config.data_config import task_names
from lm.config.eval_config import EvalConfig
from lm.errors import RunError, one_line
from lm.files import source_files_sha256
from lm.plain import Plain, json_value
from lm.runs.folder import EVALUATIONS
from lm.runs.manifest import read_file
from lm.runs.metric import Axis, Metric

# The columns of a frame. A row is the value of a unit (such as a sequence) at a point of the metric's axis, or the mean
# alone, without `sample`; the rows of a point are consecutive.
COLUMNS = {
    "metric": object,  # name in metrics.jsonl, else the quantity
    "task": object,  # task, source or the like; empty: all together
    "setting": object,  # inference setting; empty: the evaluation has none
    "x": float,  # point on the axis, or start of a bin; missing: a single number
    "until": float,  # end of a bin
    "sequences": object,  # hash of the sequences: units of equal hashes can be paired by `sample`
    "sample": float,  # number of the unit
    "group": float,  # label: equal for units that depend on each other, such as sequences of one document
    "part": object,  # `selects`: chooses checkpoints and learning rates; `reports`; empty: does both
    "weight": float,  # number of tokens or questions that count in the unit; 0 for a unit without a value
    "value": float,
    "about": int,  # number of the metric in the facts; in memory the `Metric`
}


# ---------------------------------------------------------------- units, and the two parts of held-out text


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


def units_frame(
    sha256: str, groups: np.ndarray, weights: np.ndarray | None = None, fingerprint: str = ""
) -> pd.DataFrame:
    """The units of a measurement, a row each, for `rows`.

    Args:
        sha256: hash of the sequences.
        groups: (units,), the label of each unit's document.
        weights: (units,); None: all equal.
        fingerprint: of the data of which a third chooses learning rates; empty: all units choose, and all report.
    """
    part = np.where(selection_mask(fingerprint, groups), "selects", "reports") if fingerprint else ""
    weights = np.ones(len(groups)) if weights is None else weights
    columns = {"sequences": sha256[:16], "sample": np.arange(len(groups)), "group": groups, "part": part}
    return pd.DataFrame(columns | {"weight": weights})


def rows(
    metric: Metric,
    values: np.ndarray | float,
    units: pd.DataFrame | None = None,
    x: Sequence[float] = (np.nan,),
    until: Sequence[float] = (),
    task: str = "",
    setting: str = "",
) -> pd.DataFrame:
    """Rows of a frame (`COLUMNS`), with the Metric itself as `about`. The task, the setting, the metric's quantity and
    a length x stand for the words in braces in its name.

    Args:
        values: (units, points), or (points,) for means alone.
        units: the units, as `units_frame` gives them; None: means alone.
        x, until: the points of the axis; for bins their starts and ends.
    """
    values = np.atleast_2d(values) if units is None else values
    n_units, n_points = values.shape
    words = dict.fromkeys(("TASK", "NAME", "PART"), task or metric.quantity) | {"SETTING": setting}
    words |= dict.fromkeys(("STATISTIC", "METRIC"), metric.quantity)
    names = [metric.fill_name(**words, LENGTH=point).name or metric.quantity for point in x]
    points = {"metric": names, "x": x, "until": until or [np.nan] * n_points}
    columns: dict[str, object] = {name: np.repeat(column, n_units) for name, column in points.items()}
    if units is None:
        columns |= {"sequences": "", "sample": np.nan, "group": np.nan, "part": "", "weight": 1.0}
    else:
        columns |= {name: np.tile(units[name], n_points) for name in units}
    about = np.full(values.size, None, object)
    about[:] = metric
    columns |= {"task": task, "setting": setting, "value": values.T.ravel().astype(float), "about": about}
    return pd.DataFrame(columns)[[*COLUMNS]]


def join_rows(blocks: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One frame of several blocks of rows, perhaps of none."""
    return pd.concat(blocks, ignore_index=True) if blocks else rows(Metric(), np.zeros(0), x=())


class NoDocuments(RunError):
    """Raised if `selection_mask` leaves no held-out document to choose learning rates on, or none to report
    results on.
    """


def unit_rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row for each unit that a metric, by its name in metrics.jsonl, was measured on: the mean over all bins, if its
    axis has bins. Empty if it was not measured, or of which only the mean is known.
    """
    rows = frame[(frame["metric"] == metric) & frame["sample"].notna()]
    if not rows["until"].notna().any():
        return rows
    return mean(rows, ["sample"], rows["until"] - rows["x"]).assign(until=rows["until"].iloc[-1])


def weighted_mean(rows: pd.DataFrame) -> float:
    """The weighted mean of units; NaN if no unit has a value, which is one of weight 0."""
    rows = rows[rows["weight"] > 0]
    return float(np.average(rows["value"], weights=rows["weight"])) if len(rows) else math.nan


def part_of(units: pd.DataFrame, part: Literal["selects", "reports"]) -> pd.DataFrame:
    """The units of held-out documents that choose learning rates, or of those that are reported. All units are returned
    if they don't come from such text. A sequence belongs to the document in which it begins.

    Raises NoDocuments: no unit is left.
    """
    kept = units[units["part"].isin(["", part])]
    if units.empty or len(kept):
        return kept
    purpose = "choose learning rates" if part == "selects" else "report"
    raise NoDocuments(
        f"none of {units['group'].nunique()} held-out documents is left to {purpose} on: hold out more text"
    )


def number(value: float) -> str:
    """An axis value as text; integers have thousands separators."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


# ---------------------------------------------------------------- several evaluations as one frame

FACTS = ("kind", "step", "tokens_seen", "seq_len", "data_fingerprint")
CURVE = ["evaluation", "about", "task", "setting"]  # equal in the rows of one curve, or of one number


def evaluation_rows(evaluations: Sequence["Evaluation"]) -> pd.DataFrame:
    """The rows of evaluations as one frame, with `about` as a category, and with `FACTS` about them as columns.

    More columns are `evaluation`, its number; `quantity`, `title`, `unit`, `better` and `control` of the metric;
    `subject`, the task with the options that tell it from others of its name; `logged`, whether training logs the mean
    of the row's point; and `shape`, which is `number` without an axis, `bins` if points are ranges of the axis, else
    `points`.
    """
    rows = join_rows([evaluation.frame for evaluation in evaluations])
    rows = rows.astype({name: object for name, kind in COLUMNS.items() if kind is object})
    numbers = np.repeat(np.arange(len(evaluations)), [len(evaluation.frame) for evaluation in evaluations])
    codes, metrics = _metric_numbers(rows["about"].to_numpy())
    tasks, names = (list(zip(codes.tolist(), rows[name], strict=True)) for name in ("task", "metric"))
    definitions = {pair: {"name": pair[1]} | json.loads(metrics[pair[0]].options or "{}") for pair in set(tasks)}
    distinct = {str(definition): definition for definition in definitions.values()}
    subjects = dict(zip(distinct, task_names([*distinct.values()]), strict=True))
    logged = {(code, name): metrics[code].logs(name) for code, name in set(names)}
    columns = {name: np.array([getattr(of, name) for of in evaluations], object)[numbers] for name in FACTS}
    of_metric = ("quantity", "title", "unit", "better")
    columns |= {name: np.array([getattr(of, name) for of in metrics], object)[codes] for name in of_metric}
    columns |= {
        "evaluation": numbers,
        "seq_len": columns["seq_len"].astype(int),
        "about": pd.Categorical.from_codes(codes, pd.Index(metrics, dtype=object)),
        "subject": [subjects[str(definitions[pair])] for pair in tasks],
        "control": np.array([of.control for of in metrics], bool)[codes],
        "logged": np.array([logged[pair] for pair in names], bool),
        "shape": np.select([rows["x"].isna(), rows["until"].notna()], ["number", "bins"], "points").astype(object),
    }
    return rows.assign(**columns)


def mean(rows: pd.DataFrame, keys: Sequence[str], weights: pd.Series | float = 1.0) -> pd.DataFrame:
    """The weighted mean of `value` over the rows with equal `keys`, in the order in which they come first. It is NaN
    without weight, or where a value with weight is NaN. Other columns are those of the first of these rows.
    """
    codes = rows.groupby([*keys], sort=False, observed=True, dropna=False).ngroup().to_numpy()
    weights = np.broadcast_to(np.asarray(weights, float), len(rows))
    values = np.where(weights > 0, weights * rows["value"], 0.0)
    with np.errstate(invalid="ignore"):
        means = np.bincount(codes, values) / np.bincount(codes, weights)
    return rows.iloc[np.unique(codes, return_index=True)[1]].assign(value=means)


def reporting_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a frame of `evaluation_rows` without held-out documents that choose checkpoints or learning rates.

    Names of metrics then say so, as metrics.jsonl has the mean over all held-out text by its name alone. A curve
    without a document for reports at some point keeps its means over all documents, without units.
    """
    is_text, reports = rows["part"] != "", rows["part"] == "reports"
    has_reports = reports.groupby([rows[name] for name in (*CURVE, "x")], observed=True, dropna=False).transform("any")
    lost = (is_text & ~has_reports).groupby([rows[name] for name in CURVE], observed=True).transform("any")
    means = mean(rows[lost], [*CURVE, "x"], rows["weight"][lost]).assign(sample=np.nan)
    is_named = is_text & ~lost
    named = {name: rows[name].where(~is_named, rows[name] + f" {REPORTING}") for name in ("metric", "quantity")}
    kept = rows.assign(**named)[~lost & (rows["part"] != "selects")]
    return pd.concat([kept, means], ignore_index=True) if len(means) else kept


def at_places(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a frame of `evaluation_rows` at the places that reports show. Bins are merged into ranges: a unit's
    value is its mean over the bins within the range.

    Ranges are `within 1x`, `1x-2x`, ... of the training length. New columns are `place`, a label, and `order`, by which
    places are sorted.
    """
    is_bin = rows["shape"] == "bins"
    points, bins = rows[~is_bin], rows[is_bin]
    labels = {x: number(x) for x in points["x"].dropna().unique()}
    points = points.assign(place=[labels.get(x, "") for x in points["x"]], order=points["x"])
    octave = np.floor(np.log2(np.maximum(bins["x"] / bins["seq_len"], 0.5))) + 1  # 0: within the training length
    length = bins.groupby(CURVE, observed=True)["until"].transform("max")
    stop = np.minimum(bins["seq_len"] * 2**octave, length)
    ends = list(zip(np.where(octave > 0, 2.0 ** (octave - 1), 0.0), stop / bins["seq_len"], strict=True))
    labels = {(low, high): f"{low:g}x-{high:g}x" if low else f"within {high:g}x" for low, high in set(ends)}
    bins = bins.assign(place=[labels[pair] for pair in ends], order=stop / bins["seq_len"], stop=stop)
    bins = bins[bins["until"] <= stop]
    ranges = mean(bins, [*CURVE, "place", "sample"], bins["until"] - bins["x"])
    return pd.concat([points, ranges.assign(until=ranges["stop"]).drop(columns="stop")]).sort_index()


def point_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over units (sequences or questions) at each x of a frame's curves: a point, a bin or a place."""
    return mean(rows, [*CURVE, "x", "until"], rows["weight"])


def overall_means(rows: pd.DataFrame) -> pd.DataFrame:
    """The mean of each curve over all bins, and the mean at each single point."""
    means = point_means(rows)
    widths, is_bin = (means["until"] - means["x"]).fillna(1.0), means["shape"] == "bins"
    return mean(means.assign(x=means["x"].mask(is_bin)), [*CURVE, "x"], widths)


def logged_means(evaluation: "Evaluation") -> dict[str, float]:
    """The means of an evaluation that training logs to metrics.jsonl, by metric name."""
    rows = evaluation_rows([evaluation])
    means = overall_means(rows[rows["logged"]])
    return dict(zip(means["metric"], means["value"].tolist(), strict=True))


# ---------------------------------------------------------------- the validation loss


VALIDATION, LOSS, BITS_PER_BYTE = "validation", "val/loss", "val/bits_per_byte"
NATS = "nats per token"
REPORTING = "of reporting documents"  # what names of metrics in reports end with, if other documents are left out
UNIGRAM = "unigram cross-entropy"  # the level to compare the loss with
UNIGRAM_BOUND = f"{UNIGRAM}, at most"  # the name of the level if it is an upper bound


def chance_level(metric: Metric) -> tuple[str, float]:
    """The name and value of the metric's level of a model that has learned nothing; ("", NaN) if none is known."""
    name, level = next(iter(metric.references), ("", math.nan))
    return (name, level) if name.startswith(("chance", UNIGRAM)) else ("", math.nan)


_VALIDATION_TITLES = {"title": "Validation at the training length", "measured_on": "validation sequences"}
VALIDATION_METRICS = (
    Metric(LOSS, NATS, "lower", "loss at the training length on all held-out text, or on tasks' answers", LOSS,
        "documents", True, **_VALIDATION_TITLES),
    Metric(f"{LOSS} {{PART}}", NATS, "lower", "the same on one source of a mixture, or one task", LOSS, "documents"),
    Metric(BITS_PER_BYTE, "bits per byte", "lower", "the same in bits per byte of text", BITS_PER_BYTE,
        **_VALIDATION_TITLES),
)  # fmt: skip


def validation_rows(
    loss: np.ndarray,
    bits_per_byte: float | None,
    unigram: float | None,
    seq_len: int,
    units: pd.DataFrame,
    level: str = UNIGRAM,
) -> pd.DataFrame:
    """The rows of the loss and, for text, of bits per byte on held-out sequences of the training length.

    Args:
        loss: loss by sequence, (sequences,).
        bits_per_byte: bits per byte of the text; None: the tokens are symbols, which are no bytes.
        unigram: loss by token frequencies of the training text, nats per token; None: not known.
        units: the sequences.
        level: the name of `unigram`: UNIGRAM, or UNIGRAM_BOUND for an upper bound.
    """
    target_note = "" if bits_per_byte is not None else ", nats per token of the answers"
    amount = f"{len(units):,} of {seq_len:,} tokens{target_note}"
    references = () if unigram is None else ((level, unigram),)
    about, bits = (replace(VALIDATION_METRICS[index], amount=amount) for index in (0, 2))
    blocks = [rows(replace(about, references=references), np.reshape(loss, (-1, 1)), units)]
    if bits_per_byte is not None:
        blocks.append(rows(bits, bits_per_byte))
    return pd.concat(blocks, ignore_index=True)


def selection_loss(evaluation: "Evaluation") -> tuple[float, str]:
    """Validation loss (nats per token) on the sequences on which the best checkpoint is chosen, and the hash of these
    sequences.
    """
    loss = unit_rows(evaluation.frame, LOSS)
    selects = (loss["part"] == "selects").to_numpy()
    return weighted_mean(loss[selects] if selects.any() else loss), loss["sequences"].iloc[0]


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
    return source_files_sha256([package / package_name for package_name in MEASURING_PACKAGES])


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of one kind of evaluation on one checkpoint: a frame, and facts about it."""

    kind: str
    step: int
    tokens_seen: int
    seq_len: int  # training length, tokens
    data_fingerprint: str
    options: dict[str, Plain]  # everything that decides the numbers, except weights, precision and data
    precision: str
    weights_sha256: str
    frame: pd.DataFrame  # (`COLUMNS`)
    asked: dict[str, Plain] = field(default_factory=dict)  # the keys of `eval` that asked for it
    code: dict[str, str] = field(default_factory=dict)  # digests of the code that measured it

    @property
    def name(self) -> str:
        """The kind of evaluation as a noun for messages, such as `long-context evaluation`."""
        return f"{self.kind.replace('_', '-')} evaluation"

    def content(self) -> bytes:
        """The content of the evaluation's file."""
        about, metrics = _metric_numbers(self.frame["about"].to_numpy())
        frame = self.frame.assign(about=about, value=self.frame["value"].where(np.isfinite(self.frame["value"])))
        table = frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        names = [spec.name for spec in fields(self) if spec.name != "frame"]
        facts = {name: getattr(self, name) for name in names}
        facts["metrics"] = json_value([asdict(metric) for metric in metrics])
        return f"# {json.dumps(facts)}\n{table}".encode()

    @classmethod
    def parse(cls, content: bytes) -> "Evaluation":
        """The evaluation whose `content()` is `content`. Raises ValueError: it is of another version."""
        head, _, table = content.decode().partition("\n")
        try:
            facts = json.loads(head.removeprefix("# "))
            metrics = [_metric(plain) for plain in facts.pop("metrics")]
            return cls(**facts, frame=_read_table(table, metrics))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(one_line(error)) from None


def _metric(plain: dict[str, Plain]) -> Metric:
    """The Metric whose fields a file holds as JSON."""
    references = tuple((name, np.nan if level is None else level) for name, level in plain["references"])
    return Metric(**plain | {"references": references, "axis": plain["axis"] and Axis(**plain["axis"])})


def _read_table(table: str, metrics: list[Metric]) -> pd.DataFrame:
    missing = {name: [""] for name, kind in COLUMNS.items() if kind is float}
    frame = pd.read_csv(io.StringIO(table), dtype=COLUMNS, keep_default_na=False, na_values=missing)
    if [*frame] != [*COLUMNS]:
        raise ValueError(f"its columns are {', '.join(frame)}")
    about = np.empty(len(metrics), object)
    about[:] = metrics
    return frame.assign(about=about[frame["about"].to_numpy()] if len(frame) else [])


def _metric_numbers(about: np.ndarray) -> tuple[np.ndarray, list[Metric]]:
    """The number of each row's metric, (rows,), and the metrics."""
    objects, _ = pd.factorize(np.fromiter(map(id, about), np.int64, len(about)))  # hashes of metrics are slow
    numbers: dict[Metric, int] = {}
    firsts = np.unique(objects, return_index=True)[1]
    by_object = np.array([numbers.setdefault(metric, len(numbers)) for metric in about[firsts]], int)
    return by_object[objects], [*numbers]


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """The path evaluations/KIND.step-N.csv in a run folder."""
    return run / EVALUATIONS / f"{kind}.step-{step:06d}.csv"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """The evaluation files of a run folder, by kind and step."""
    paths = (run / EVALUATIONS).glob("*.step-*.csv")
    names = ((re.fullmatch(r"(.+)\.step-(\d+)", path.stem), path) for path in paths)
    return {(name[1], int(name[2])): path for name, path in names if name}


def load_evaluation(path: Path) -> Evaluation:
    """Read the evaluation in a file of evaluations/. Raises RunError if the file was altered or this version can't read
    it.
    """
    run, step = path.parent.parent, int(path.stem.rpartition(".step-")[2])
    advice = f"bring it back, or measure it again: lm eval {run} --checkpoint {step}"
    content = read_file(run, f"{EVALUATIONS}/{path.name}", advice)
    try:
        return Evaluation.parse(content)
    except ValueError as error:
        raise RunError(f"{path}: not an evaluation of this version: {one_line(error)}; {advice}") from None


def last_evaluations(
    run: Path, known_evaluations: Mapping[Path, Evaluation] = MappingProxyType({})
) -> list[Evaluation]:
    """The last evaluation of each kind. `known_evaluations`: those that have been read already, by file path. Raises
    RunError: a file is damaged.
    """
    last_paths = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}
    kinds = dict.fromkeys((*EvalConfig.kind_names(), *last_paths))
    paths = [last_paths[kind] for kind in kinds if kind in last_paths]
    return [known_evaluations.get(path) or load_evaluation(path) for path in paths]
