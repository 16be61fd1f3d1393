"""Reading a run folder: configuration, environment, logged metrics and the last evaluations."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lm.config.task_config import TASKS
from lm.errors import RunError
from lm.runs import identity
from lm.schema import Plain, flatten

ROLL_OUT = "roll-out"  # the way of answers after the model's own, in place of the right ones
_REQUIRED_KEYS = ("model.normalizer.name", "data.seq_len", "seed")


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss while training, one point a logged step; a loss that was not finite is NaN."""

    tokens: np.ndarray  # (points,) seen so far
    loss: np.ndarray  # (points,) nats per token
    bits_per_byte: np.ndarray  # (points,)


@dataclass(frozen=True, eq=False)
class Validation:
    """Loss on held-out rows of the training length."""

    identity: tuple[str, str]  # data fingerprint, hash of the rows
    step: int
    tokens_seen: int
    seq_len: int
    loss: float  # nats per token
    bits_per_byte: float | None  # None: symbols, which are no bytes
    unigram_entropy: float  # nats per token
    nll_by_row: np.ndarray  # (rows,) nats per token
    targets_by_row: np.ndarray  # (rows,) tokens that count
    document_by_row: np.ndarray  # (rows,) labels: equal for rows of one document


@dataclass(frozen=True, eq=False)
class Setting:
    """The long rows, with the model used in one way."""

    label: str
    nll_by_position: np.ndarray  # (length,) nats per token, mean over rows
    nll_by_row: np.ndarray  # (rows, buckets) nats per token


@dataclass(frozen=True, eq=False)
class LongContext:
    """Loss by position on rows longer than the training length."""

    identity: tuple[str, str]  # data fingerprint, hash of the rows
    step: int
    tokens_seen: int
    seq_len: int  # training length
    length: int  # tokens in a row
    rows: int
    bucket_edges: np.ndarray  # (buckets + 1,) positions
    document_by_row: np.ndarray  # (rows,) labels: equal for rows of one document
    settings: tuple[Setting, ...]


@dataclass(frozen=True, eq=False)
class AnswersRight:
    """How often a task's answers were right in rows of one length, with the model used in one way."""

    task: dict[str, Plain]  # its name and options
    way: str
    length: int  # tokens in a row
    rows_sha256: str
    step: int
    tokens_seen: int
    share: float
    chance: float | None  # what picking among the answers shown would give of it; None: not one number
    by_row: np.ndarray  # (rows,) share in each row; of needles: in each trial, over all depths
    questions: np.ndarray  # (rows,) independent ones in each
    name: str = ""  # of the task, beside others


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run folder holds. `missing` says in words what it lacks."""

    folder: Path
    name: str
    config: dict[str, Plain]
    environment: dict[str, Plain]
    training: Curve
    validations: Curve
    validation: Validation | None
    long_context: LongContext | None
    answers: tuple[AnswersRight, ...]  # of recall, then of needles
    missing: tuple[str, ...]

    @cached_property
    def flat(self) -> dict[str, Plain]:
        """The configuration as dotted keys; what decides what is learned as it was used (`lm.runs.identity.learned`)."""
        return flatten(self.config) | self.learned

    @cached_property
    def learned(self) -> dict[str, Plain]:
        """What decides what the run learns, its seed aside: arms differ in it."""
        return identity.learned(self.config, self.environment)

    @property
    def symbolic(self) -> bool:
        """Trained on tasks over symbols, not on text."""
        return any(TASKS[share["task"]["name"]]().vocab_size for share in self.config["data"].get("tasks") or [])

    @property
    def phases(self) -> list[tuple[int, dict[str, Plain]]]:
        """The normalizers of training, each with the step it began after."""
        phases = self.config.get("phases") or []
        starts = [0, *(round(phase["until"] * self.config["trainer"]["max_steps"]) for phase in phases)]
        return [(start, phase["normalizer"]) for start, phase in zip(starts, phases, strict=False)] or [
            (0, self.config["model"]["normalizer"])
        ]

    @property
    def seed(self) -> int:
        return self.flat["seed"]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Its seed, after those of the runs that its weights come from: what runs of two arms are paired by."""
        return identity.seeds(self.config, self.environment)

    @property
    def seq_len(self) -> int:
        """Training length, tokens."""
        return self.flat["data.seq_len"]

    @property
    def tokens_seen(self) -> int | None:
        """Tokens trained on at the reported evaluation, else at the last logged step."""
        for evaluation in (self.validation, self.long_context):
            if evaluation:
                return evaluation.tokens_seen
        return int(self.training.tokens[-1]) if len(self.training.tokens) else None

    @property
    def tokens_before(self) -> int:
        """Tokens that the weights it started from had seen (`init_from`); 0 for a run from scratch."""
        return self.measured("started_from.tokens") or 0

    @property
    def unigram_entropy(self) -> float | None:
        """Of the held-out tokens, nats per token: what a model without context could reach."""
        return self.validation.unigram_entropy if self.validation else self.measured("unigram_entropy.val")

    def used(self, name: str) -> Plain:
        """What its starts used, e.g. of `precision`, in words where they differ; None if environment.json does not say."""
        return identity.used(self.environment, name)

    @property
    def commits(self) -> str | None:
        """The git commit of each start, with whether the tree had changes."""
        found = [(one["git_commit"], one.get("git_dirty")) for one in identity.starts(self.environment) if one.get("git_commit")]
        words = dict.fromkeys(f"{commit[:12]}{' with uncommitted changes' if dirty else ''}" for commit, dirty in found)
        return ", then ".join(words) or None

    def measured(self, path: str) -> Plain:
        """A dotted entry of environment.json, e.g. `parameters.total`; None if it is not there."""
        return flatten(self.environment).get(path)


def read_run(folder: Path) -> RunRecord:
    """The record of a run folder; evaluations and metrics may be absent (`missing` says so).

    Raises:
        RunError: not a run folder, or a file in it that can't be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    lacking = [name for name in ("config.yaml", "environment.json") if not (folder / name).is_file()]
    if lacking:
        raise RunError(f"{folder}: not a run folder: it has no {' and no '.join(lacking)}")
    config = _read_config(folder / "config.yaml")
    environment = _read_json(folder / "environment.json")
    missing = _missing_of(config, environment, folder / "environment.json")
    lines = _read_metrics(folder / "metrics.jsonl", missing)
    validation, long_context = (_read_evaluation(folder, kind, read) for kind, read in _LOSSES.items())
    asked = config.get("eval") or {}
    recall, needle, long = (asked.get(name) or {} for name in ("recall", "needle", "long_context"))
    missing += ["no validation evaluation"] if validation is None else []
    missing += ["no long-context evaluation"] if long_context is None and long.get("length_factor", 1) else []
    wanted = {
        "recall": recall.get("length_factors") and (config["data"].get("tasks") or recall.get("tasks")),
        "needle": needle.get("length_factors"),
    }
    answers: list[AnswersRight] = []
    for kind, read in _ANSWERS.items():
        try:
            found = _read_evaluation(folder, kind, read)
            answers += found or ()
            missing += [f"no {kind} evaluation"] if found is None and wanted[kind] else []
        except RunError as error:  # older ones had less in them
            missing.append(f"no {kind} evaluation that can be read ({error})")
    training, validations = _curve(lines, "train/loss"), _curve(lines, "val/loss", "val/bits_per_byte")
    if validation is None and len(validations.tokens):
        missing.append("its validation loss is the last one logged while training, without an interval")
    others = [("long-context evaluation", long_context.step)] if long_context else []
    others += dict.fromkeys((f"evaluation of {one.task['name']}", one.step) for one in answers)
    for name, step in others:
        if validation and step != validation.step:
            missing.append(f"the validation is of step {validation.step:,}, the {name} of step {step:,}")
    return RunRecord(
        folder, folder.resolve().name, config, environment, training, validations, validation, long_context, tuple(answers), tuple(missing)
    )  # fmt: skip


def _read_config(path: Path) -> dict[str, Plain]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise RunError(f"{path}: holds no configuration")
    if isinstance(config.get("model"), dict) and isinstance(config["model"].get("normalizer"), str):
        config["model"]["normalizer"] = {"name": config["model"]["normalizer"]}
    absent = [key for key in _REQUIRED_KEYS if key not in flatten(config)]
    if absent:
        raise RunError(f"{path}: no {', '.join(absent)}")
    return config


def _read_json(path: Path) -> dict[str, Plain]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON object")
    return content


def _missing_of(config: dict[str, Plain], environment: dict[str, Plain], path: Path) -> list[str]:
    """What environment.json lacks, and what makes its run more than one. Raises RunError where it can't be read as one."""
    try:
        found, unlike = identity.starts(environment), identity.unlike(environment)
        identity.learned(config, environment), identity.seeds(config, environment)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}; if an older version wrote it, train the run again") from None
    lacks = [f"its starts used unlike things: {'; '.join(unlike)}"] if unlike else []
    silent = "environment.json (of an older version, or of an export) does not say"
    lacks += [f"{silent} what each start used: those it is silent on may be unlike"] if any("precision" not in one for one in found) else []
    unknown = config.get("init_from") and "arm" not in (environment.get("started_from") or {})
    return lacks + ([f"{silent} of which arm its starting weights are: told from others by their path"] if unknown else [])


def _read_metrics(path: Path, missing: list[str]) -> list[dict[str, Plain]]:
    """Logged lines; a cut-off last line is dropped, other unreadable lines are dropped and reported."""
    lines, bad = [], []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not all(isinstance(line.get(key), int) for key in ("step", "tokens")):
                raise ValueError(text)
            lines.append(line)
        except ValueError:
            if text.strip() and number < len(texts):
                bad.append(str(number))
    if bad and not lines:
        raise RunError(f"{path}: no line is a JSON object with step and tokens")
    if bad:
        missing.append(f"metrics.jsonl: unreadable lines were skipped ({', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''})")
    if not lines:
        missing.append("metrics.jsonl is empty: no training curve" if path.is_file() else "no metrics.jsonl: no training curve")
    return lines


def _curve(lines: list[dict[str, Plain]], loss: str, bits: str = "") -> Curve:
    by_step = {line["step"]: line for line in lines if loss in line}  # a resumed run may log a step twice: the last counts
    ordered = [by_step[step] for step in sorted(by_step)]
    columns = [[line.get(key) for line in ordered] for key in ("tokens", loss, bits)]
    return Curve(*(np.array(column, dtype=float) for column in columns))


def _read_evaluation(folder: Path, kind: str, read: Callable[[dict[str, Plain]], Any]) -> Any:
    """The run's last evaluation of a kind."""
    steps = {}
    for path in (folder / "evaluations").glob(f"{kind}.step-*.json"):
        match = re.fullmatch(rf"{kind}\.step-(\d+)\.json", path.name)
        if match:
            steps[int(match[1])] = path
    if not steps:
        return None
    path = steps[max(steps)]
    content = _read_json(path)
    try:
        return read(content)
    except KeyError as error:
        raise RunError(f"{path}: no {error.args[0]}; if it was measured by an older version, measure it again with `lm eval`") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from None


def _identity(content: dict[str, Plain]) -> tuple[str, str]:
    return str(content["data_fingerprint"]), str(content["rows_sha256"])


def _validation(content: dict[str, Plain]) -> Validation:
    identity = _identity(content)
    loss, entropy = (_array(content, key, ()).item() for key in ("loss", "unigram_entropy"))
    bits = None if content["bits_per_byte"] is None and np.isfinite(loss) else _array(content, "bits_per_byte", ()).item()
    nll_by_row = _array(content, "nll_by_row", (content["rows"],))
    targets, documents = (_array(content, key, nll_by_row.shape) for key in ("targets_by_row", "document_by_row"))
    counts = (int(content[key]) for key in ("step", "tokens_seen", "seq_len"))
    return Validation(identity, *counts, loss, bits, entropy, nll_by_row, targets, documents)


def _long_context(content: dict[str, Plain]) -> LongContext:
    identity = _identity(content)
    step, tokens_seen, seq_len, length, rows = (int(content[key]) for key in ("step", "tokens_seen", "seq_len", "length", "rows"))
    edges = np.array(content["bucket_edges"], dtype=int)
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != length or np.any(np.diff(edges) <= 0):
        raise ValueError(f"bucket_edges must ascend from 0 to length = {length}")
    settings = tuple(
        Setting(
            str(setting["label"]),
            _array(setting, "nll_by_position", (length,)),
            _array(setting, "nll_by_row", (rows, len(edges) - 1)),
        )
        for setting in content["settings"]
    )
    return LongContext(identity, step, tokens_seen, seq_len, length, rows, edges, _array(content, "document_by_row", (rows,)), settings)


def _recall(content: dict[str, Plain]) -> list[AnswersRight]:
    """Teacher-forced, and where a row asks several questions, so that it differs, in a roll-out: another way to use the model."""
    found = []
    for cell in content["cells"]:
        rows, questions = cell["rows_sha256"], cell["questions_by_row"]
        found.append(_answers(content, cell, cell["task"], rows, cell["chance"], cell["by_row"], questions))
        if max(questions) > 1:
            own = cell | {"label": f"{cell['label']}, {ROLL_OUT}"}
            found.append(_answers(content, own, cell["task"], rows, cell["rollout_chance"], cell["rollout_by_row"], questions))
    return found


def _needle(content: dict[str, Plain]) -> list[AnswersRight]:
    """All depths of a length together, the control, without a needle, apart. A trial asks the same at each depth: it counts once."""
    taught = content["finetune"]
    task = {"needles": content["needles"], "distractors": content["distractors"], "fine-tuned": taught["steps"]}
    groups: dict[tuple[str, int, bool], list[dict[str, Plain]]] = {}
    for cell in content["cells"]:
        groups.setdefault((cell["label"], cell["length"], cell["absent"]), []).append(cell)
    found = []
    for (_, _, absent), cells in groups.items():
        by_trial = np.mean([cell["by_trial"] for cell in cells], axis=0)
        rows = hashlib.sha256(json.dumps([taught, *(cell["trials_sha256"] for cell in cells)]).encode()).hexdigest()
        name = {"name": "needle, control without it" if absent else "needle"}
        found.append(_answers(content, cells[0], name | task, rows, cells[0]["chance"], by_trial, [1] * len(by_trial)))
    return found


def _answers(
    content: dict[str, Plain],
    cell: dict[str, Plain],
    task: dict[str, Plain],
    rows: str,
    chance: float | None,
    by_row: Sequence[float],
    questions: list[int],
) -> AnswersRight:
    shares, counts = np.array(by_row, dtype=float), np.array(questions, dtype=float)
    of = dict(task), str(cell["label"]), int(cell["length"]), str(rows), int(content["step"]), int(content["tokens_seen"])
    return AnswersRight(*of, float(np.average(shares, weights=counts)), chance, shares, counts)


_LOSSES = {"validation": _validation, "long_context": _long_context}
_ANSWERS = {"recall": _recall, "needle": _needle}


def _array(content: dict[str, Plain], key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the given shape; null (a number that was not finite) becomes NaN."""
    array = np.array(content[key], dtype=float)
    if array.shape != shape:
        raise ValueError(f"{key} has shape {array.shape}, not {shape}")
    return array
