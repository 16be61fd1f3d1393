"""An evaluation of a run is a data frame of measured values with facts about the measurement, stored in the run folder.
A row belongs to one unit (a sequence or a question). A `Metric` describes the values.

A file `KIND.step-N.csv` has the facts in its first line, as JSON after `# `, and then a table with the columns
`COLUMNS`.
"""

import hashlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd

from lm.config.eval_config import EvalConfig
from lm.errors import RunError, one_line
from lm.plain import Plain, distinct_names, json_value
from lm.runs.folder import EVALUATIONS_FOLDER, read_file

# ---------------------------------------------------------------- metrics

BetterDirection = Literal["lower", "higher", "none"]  # which direction is better; none: the metric only describes


@dataclass(frozen=True)
class Axis:
    """An axis describes the quantity that a metric is a function of, such as the position in the sequence."""

    name: str  # such as `position in the sequence`
    unit: str  # unit of its values; pictures mark the training length on axes of `tokens`
    before: str  # words before a value in a sentence, such as `at positions`
    log: bool = True  # drawn on a logarithmic scale


@dataclass(frozen=True)
class Metric:
    """A metric describes what is measured: name, unit, better direction, and how reports show it.

    Words in braces in the name, such as {LENGTH}, are placeholders. `fill_placeholders` puts values in their place.
    """

    name: str = ""  # in metrics.jsonl; empty: training does not log it
    unit: str = ""  # such as `nats per token`; a `fraction` lies within 0 and 1
    better: BetterDirection = "none"
    meaning: str = ""  # in words, for the list of all metrics
    quantity: str = ""  # its name in reports, such as `loss`
    # what it is measured on: documents, of which a third choose learning rates, or questions, which all choose rates
    # and all report; empty: only its mean is known
    units: Literal["", "documents", "questions"] = ""
    # whether a mean has an interval: Student's t over documents, Wilson's interval over sequences with questions
    interval: bool = False
    axis: Axis | None = None  # None: a single number
    title: str = ""  # of its table and picture in reports, which other metrics may share; empty: no report shows it
    measured_on: str = ""  # a plural noun for the sequences of the measurement, such as `validation sequences`
    amount: str = ""  # number and length of these sequences, such as `256 of 512 tokens`
    caption: str = ""  # what the picture shows, in words
    levels: str = ""  # its reference levels, in words
    references: tuple[tuple[str, float], ...] = ()  # name and value of levels to compare it with, such as chance
    options: str = ""  # options of its task, as JSON, which tell equal names of tasks apart
    # whether it shows that the measurement works, not what the model can do; drawn without interval
    control: bool = False

    @property
    def name_without_braces(self) -> str:
        """Return the metric's name with its placeholders, words in capitals, without their braces."""
        return re.sub("[{}]", "", self.name)

    @property
    def can_decide(self) -> bool:
        """Return whether the metric is measured for each sequence or question, so that it can be an experiment's
        `primary.metric`.
        """
        return bool(self.units)

    def fill_placeholders(self, **values: object) -> "Metric":
        """Return the metric with the placeholders in its name replaced by `values`, which are named after them; other
        placeholders stay.
        """
        name = re.sub(r"\{(\w+)\}", lambda word: str(values.get(word[1], word[0])), self.name)
        return replace(self, name=name.strip())

    def is_logged_as(self, name: str) -> bool:
        """Return whether training logs the metric under the name `name`."""
        return bool(self.name) and self.matches(name)

    def matches(self, name: str) -> bool:
        """Return whether `name` is the metric's name with any text in place of its placeholders."""
        pattern = re.sub(r"\\ \\{SETTING\\}$", r"(\ .+)?", re.escape(self.name))  # left out where there is one setting
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", pattern), name) is not None


# ---------------------------------------------------------------- rows of measured values

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


def join_rows(blocks: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one frame of several blocks of rows; the frame is empty without blocks."""
    return pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame(columns=[*COLUMNS]).astype(COLUMNS)


def model_selection_mask(fingerprint: str, document_labels: np.ndarray) -> np.ndarray:
    """Return the mask, (units,) bool, of the held-out units (such as sequences) that choose checkpoints and learning
    rates. Results are reported on all other units.

    `document_labels`, (units,), is the label of each unit's document. A hash of this label and the data `fingerprint`
    chooses about a third of the documents for selection.
    """
    labels, label_indices = np.unique(document_labels, return_inverse=True)
    selection = [hashlib.sha256(f"{fingerprint} {label}".encode()).digest()[0] % 3 == 0 for label in labels.tolist()]
    return np.array(selection, dtype=bool)[label_indices]


def unit_rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return one row for each unit (sequence or question) on which `metric`, a name in metrics.jsonl, was measured.
    `frame` is the data frame of an `Evaluation`, with the columns `COLUMNS`.

    If the metric was measured in ranges of positions (bins), the row's `value` is the unit's mean over all positions.
    The result is empty if the metric was not measured, or only its mean is known.
    """
    rows = frame[(frame["metric"] == metric) & frame["sample"].notna()]
    if not rows["until"].notna().any():
        return rows
    return grouped_mean(rows, ["sample"], rows["until"] - rows["x"]).assign(until=rows["until"].iloc[-1])


def weighted_mean(rows: pd.DataFrame) -> float:
    """Return the weighted mean of units; NaN if all weights are 0, which means that no unit has a value."""
    rows = rows[rows["weight"] > 0]
    return float(np.average(rows["value"], weights=rows["weight"])) if len(rows) else math.nan


def grouped_mean(rows: pd.DataFrame, keys: Sequence[str], weights: pd.Series | np.ndarray) -> pd.DataFrame:
    """Return the weighted mean of `value` over the rows with equal `keys`, in the order in which these keys come first.
    Other columns have the values of the first of these rows. The column `weight` is not read.

    A mean is NaN if all its weights are 0, or if a value with a weight above 0 is NaN.
    """
    codes = rows.groupby([*keys], sort=False, observed=True, dropna=False).ngroup().to_numpy()
    weights = np.asarray(weights, float)
    values = np.where(weights > 0, weights * rows["value"], 0.0)
    with np.errstate(invalid="ignore"):
        means = np.bincount(codes, values) / np.bincount(codes, weights)
    return rows.iloc[np.unique(codes, return_index=True)[1]].assign(value=means)


# ---------------------------------------------------------------- several evaluations as one frame

EVALUATION_FACT_COLUMNS = ("kind", "step", "tokens_seen", "seq_len", "data_fingerprint")
CURVE_COLUMNS = ["evaluation", "about", "task", "setting"]  # equal in the rows of one curve, or of one number


def evaluation_rows(evaluations: Sequence["Evaluation"]) -> pd.DataFrame:
    """Return the rows of evaluations as one frame. The column `about` holds each row's Metric, as a category; the
    `EVALUATION_FACT_COLUMNS` hold facts about each evaluation.

    More columns are `evaluation`, the index in `evaluations`, and the metric's `quantity`, `title`, `unit` and
    `better`. `control` says whether the metric only checks a measurement. `task_label` is the task, with its options
    where another task has the same name. `logged` says whether training logs the mean at the row's point. `axis_kind`
    is `number` without an axis, `bins` if points are ranges of the axis, else `points`.
    """
    rows = join_rows([evaluation.frame for evaluation in evaluations])
    rows = rows.astype({name: object for name, kind in COLUMNS.items() if kind is object})
    numbers = np.repeat(np.arange(len(evaluations)), [len(evaluation.frame) for evaluation in evaluations])
    codes, metrics = _factorize_metrics(rows["about"].to_numpy())
    tasks, names = (list(zip(codes.tolist(), rows[name], strict=True)) for name in ("task", "metric"))
    definitions = {pair: {"name": pair[1]} | json.loads(metrics[pair[0]].options or "{}") for pair in set(tasks)}
    distinct = {str(definition): definition for definition in definitions.values()}
    subjects = dict(zip(distinct, distinct_names([*distinct.values()]), strict=True))
    logged = {(code, name): metrics[code].is_logged_as(name) for code, name in set(names)}
    columns = {
        name: np.array([getattr(evaluation, name) for evaluation in evaluations], object)[numbers]
        for name in EVALUATION_FACT_COLUMNS
    }
    metric_columns = ("quantity", "title", "unit", "better")
    columns |= {name: np.array([getattr(metric, name) for metric in metrics], object)[codes] for name in metric_columns}
    columns |= {
        "evaluation": numbers,
        "seq_len": columns["seq_len"].astype(int),
        "about": pd.Categorical.from_codes(codes, pd.Index(metrics, dtype=object)),
        "task_label": [subjects[str(definitions[pair])] for pair in tasks],
        "control": np.array([metric.control for metric in metrics], bool)[codes],
        "logged": np.array([logged[pair] for pair in names], bool),
        "axis_kind": np.select([rows["x"].isna(), rows["until"].notna()], ["number", "bins"], "points").astype(object),
    }
    return rows.assign(**columns)


def point_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over units (sequences or questions) at each x, a point or a range's start, of each curve: a
    metric of one evaluation, task and inference setting."""
    return grouped_mean(rows, [*CURVE_COLUMNS, "x", "until"], rows["weight"])


def means_over_bins(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of each curve (see `point_means`) over all its ranges (bins), and the mean at each point of
    curves without bins."""
    means = point_means(rows)
    widths, is_bin = (means["until"] - means["x"]).fillna(1.0), means["axis_kind"] == "bins"
    return grouped_mean(means.assign(x=means["x"].mask(is_bin)), [*CURVE_COLUMNS, "x"], widths)


def logged_means(evaluation: "Evaluation") -> dict[str, float]:
    """Return the means of an evaluation that training logs to metrics.jsonl, by metric name."""
    rows = evaluation_rows([evaluation])
    means = means_over_bins(rows[rows["logged"]])
    return dict(zip(means["metric"], means["value"].tolist(), strict=True))


# ---------------------------------------------------------------- the validation loss


VALIDATION, VAL_LOSS = "validation", "val/loss"
NATS = "nats per token"
UNIGRAM_LEVEL_NAME = "unigram cross-entropy"  # the level to compare the loss with
UNIGRAM_BOUND_NAME = f"{UNIGRAM_LEVEL_NAME}, at most"  # the name of the level if it is an upper bound


def chance_level(metric: Metric) -> tuple[str, float]:
    """Return the name and value of a metric's reference level for a model that has learned nothing, such as chance;
    ("", NaN) if the metric has none.
    """
    name, level = next(iter(metric.references), ("", math.nan))
    return (name, level) if name.startswith(("chance", UNIGRAM_LEVEL_NAME)) else ("", math.nan)


def selection_loss_and_sequence_hash(evaluation: "Evaluation") -> tuple[float, str]:
    """Return the validation loss (nats per token) on the sequences by which the best checkpoint is chosen, and the hash
    of all validation sequences.
    """
    loss = unit_rows(evaluation.frame, VAL_LOSS)
    selects = (loss["part"] == "selects").to_numpy()
    return weighted_mean(loss[selects] if selects.any() else loss), loss["sequences"].iloc[0]


# ---------------------------------------------------------------- evaluations and their files


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An evaluation holds what one kind of evaluation, such as validation, measured on one checkpoint: a frame, and
    facts about the measurement."""

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

    def file_content(self) -> bytes:
        """Return the content of the evaluation's file."""
        about, metrics = _factorize_metrics(self.frame["about"].to_numpy())
        frame = self.frame.assign(about=about, value=self.frame["value"].where(np.isfinite(self.frame["value"])))
        table = frame.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        facts = {name: value for name, value in vars(self).items() if name != "frame"}
        facts["metrics"] = json_value([asdict(metric) for metric in metrics])
        return f"# {json.dumps(facts)}\n{table}".encode()

    @classmethod
    def parse(cls, content: bytes) -> "Evaluation":
        """Return the evaluation that a file with this content describes. Raises ValueError: another version of lm wrote
        it."""
        head, _, table = content.decode().partition("\n")
        try:
            facts = json.loads(head.removeprefix("# "))
            metrics = [_parse_metric(plain) for plain in facts.pop("metrics")]
            return cls(**facts, frame=_read_table(table, metrics))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(one_line(error)) from None


def _parse_metric(metric_fields: dict[str, Plain]) -> Metric:
    """Return the Metric whose fields a file holds as JSON."""
    references = tuple((name, np.nan if level is None else level) for name, level in metric_fields["references"])
    return Metric(
        **metric_fields | {"references": references, "axis": metric_fields["axis"] and Axis(**metric_fields["axis"])}
    )


def _read_table(table: str, metrics: list[Metric]) -> pd.DataFrame:
    """Return the frame of a file's table, which names a Metric by its index in `metrics`. Raises ValueError: the table
    has other columns.
    """
    missing = {name: [""] for name, kind in COLUMNS.items() if kind is float}
    frame = pd.read_csv(io.StringIO(table), dtype=COLUMNS, keep_default_na=False, na_values=missing)
    if [*frame] != [*COLUMNS]:
        raise ValueError(f"its columns are {', '.join(frame)}")
    return frame.assign(about=np.array(metrics, object)[frame["about"].to_numpy()])


def _factorize_metrics(row_metrics: np.ndarray) -> tuple[np.ndarray, list[Metric]]:
    """Return the index of each row's Metric, (rows,), and the list of Metrics that the indices refer to."""
    objects, _ = pd.factorize(
        np.fromiter(map(id, row_metrics), np.int64, len(row_metrics))
    )  # hashes of metrics are slow
    numbers: dict[Metric, int] = {}
    firsts = np.unique(objects, return_index=True)[1]
    by_object = np.array([numbers.setdefault(metric, len(numbers)) for metric in row_metrics[firsts]], int)
    return by_object[objects], [*numbers]


def evaluation_path(run: Path, kind: str, step: int) -> Path:
    """Return the path evaluations/KIND.step-N.csv in a run folder."""
    return run / EVALUATIONS_FOLDER / f"{kind}.step-{step:06d}.csv"


def evaluation_files(run: Path) -> dict[tuple[str, int], Path]:
    """Return the paths of a run folder's evaluation files, by kind and step."""
    paths = (run / EVALUATIONS_FOLDER).glob("*.step-*.csv")
    names = ((re.fullmatch(r"(.+)\.step-(\d+)", path.stem), path) for path in paths)
    return {(name[1], int(name[2])): path for name, path in names if name}


def load_evaluation(path: Path) -> Evaluation:
    """Read the evaluation in a file of evaluations/. Raises RunError: the file was altered, or this version can't read
    it.
    """
    run, step = path.parent.parent, int(path.stem.rpartition(".step-")[2])
    advice = f"bring it back, or measure it again: lm eval {run} --checkpoint {step}"
    content = read_file(run, f"{EVALUATIONS_FOLDER}/{path.name}", advice)
    try:
        return Evaluation.parse(content)
    except ValueError as error:
        raise RunError(f"{path}: not an evaluation of this version: {one_line(error)}; {advice}") from None


def last_evaluations(
    run: Path, known_evaluations: Mapping[Path, Evaluation] = MappingProxyType({})
) -> list[Evaluation]:
    """Return the last evaluation of each kind in a run folder. Raises RunError: a file is damaged.

    known_evaluations: evaluations that have been read already, by file path.
    """
    last_paths = {kind: path for (kind, _), path in sorted(evaluation_files(run).items())}
    kinds = dict.fromkeys((*EvalConfig.kind_names(), *last_paths))
    paths = [last_paths[kind] for kind in kinds if kind in last_paths]
    return [known_evaluations.get(path) or load_evaluation(path) for path in paths]
