"""Run folders: the only thing that training leaves behind and everything after it reads; metrics.jsonl among it."""

import hashlib
import itertools
import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.load import parse
from lm.config.tree import Config, ExperimentConfig
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, RunError, one_line, shown
from lm.files import plain_sha256, write_text, write_together
from lm.schema import Plain, convert, suggest, type_name

CONFIG, ENVIRONMENT, METRICS, TOKENIZER = "config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json"
CHECKPOINTS, EVALUATIONS, PROFILE = "checkpoints", "evaluations", "profile"
SWAPPED = "swapped"  # in the folder of an experiment: swapped weights that runs start from
RESOLVED = "resolved.json"  # in the folder of an experiment, around its run folders: what its first start settled for all of them
TRAINING = "another process is training in this run folder; wait for it or stop it"  # why a folder that is locked is refused
LAST, BEST = "last.ckpt", "best.ckpt"  # in CHECKPOINTS, beside step-N.ckpt


def write_json(path: Path, content: Plain) -> Path:
    """`content` as indented JSON, whole or not at all; returns the file's path."""
    write_together({path: json_bytes(content)})
    return path


def json_bytes(content: Plain) -> bytes:
    """`content` as the text of an indented JSON file."""
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Plain]:
    """The object in a JSON file. Raises RunError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON: {one_line(error, 160)}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON object")
    return content


def check_fields(content: dict[str, Plain], fields: Mapping[str, object], path: Path, within: str = "") -> None:
    """Check what was read from `path`: `fields` maps the names of its entries to their types.

    within: the entry that holds them, in the message.

    Raises:
        RunError: an entry is missing, of another type, or a negative number.
    """
    for name, kind in fields.items():
        value = convert(kind, content.get(name, MISSING))
        if value is MISSING or (isinstance(value, int | float) and value < 0):
            value_read = str(content[name])[:40] if name in content else "missing"
            raise RunError(f"{path}: its `{within}{name}` must be {type_name(kind)}, not {shown(value_read)}")


def command_line() -> str:
    """The command of this process, quoted so that a shell runs the same again."""
    return shlex.join(["lm", *sys.argv[1:]])


def sealed(content: dict[str, Plain]) -> dict[str, Plain]:
    """`content` as it is read back from JSON, with a `sha256` of itself."""
    content = json.loads(json.dumps(content, allow_nan=False))  # with the keys that will be read: JSON's are texts
    return {**content, "sha256": plain_sha256(content)}


def unsealed(content: dict[str, Plain], path: Path) -> dict[str, Plain]:
    """The content that `sealed` was given, of what was read from `path`. Raises RunError if it has no sha256, or was altered."""
    bare = {name: value for name, value in content.items() if name != "sha256"}
    if "sha256" not in content:
        raise RunError(f"{path}: holds no sha256 of itself: it is of an older version, and must be made again")
    if content["sha256"] != plain_sha256(bare):
        raise RunError(f"{path}: was altered (its sha256 differs)")
    return bare


def write_sealed(path: Path, content: dict[str, Plain]) -> Path:
    """`content` as JSON with a `sha256` of itself, whole or not at all; returns the file's path."""
    return write_json(path, sealed(content))


def read_sealed(path: Path) -> dict[str, Plain]:
    """The content that `write_sealed` wrote. Raises RunError if it is missing, damaged or was altered."""
    return unsealed(read_json(path), path)


def require_run(folder: Path, *files: str) -> None:
    """Raises RunError if `folder` is not a run folder that holds `files`: with what it is instead, and what takes it."""
    if (folder / "modeling_lm.py").is_file():
        raise RunError(f"{folder}: a model exported for transformers with its code, which is not read back; name what it was exported from")
    if (folder / "config.json").is_file() or (folder.suffix == ".gguf" and folder.is_file()):
        raise RunError(f"{folder}: a model that was not imported; run lm import {folder} -o OUT, and name OUT here")
    if folder.is_file():
        raise RunError(f"{folder}: a file, not a run folder; name the folder that holds it")
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        near = suggest(folder.name, beside)
        raise RunError(f"{folder}: no such run folder; {near if 'did' in near else 'lm train makes one, runs/NAME'}")
    if (folder / RESOLVED).is_file():
        use = f"name runs below it, or judge all of them: lm compare {folder.resolve().name}.yaml --report-only"
        raise RunError(f"{folder}: the folder of an experiment, not of a run; {use}")
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise RunError(f"{folder}: not a run folder: it has no {' and no '.join(absent)}")


def read_config(folder: Path) -> Config:
    """The run's resolved configuration. Raises RunError if `folder` is not a run folder, or the file was cut short."""
    require_run(folder, CONFIG)
    path = folder / CONFIG
    try:
        plain = parse_yaml(path.read_bytes(), path.name)
        written = [spec.name for spec in fields(Config) if spec.type is not ExperimentConfig and not spec.metadata.get("omit_default")]
        missing = [name for name in written if name not in (plain or {})]
        if missing:  # a run writes all of them, `log` last; the experiment since there are experiments
            again = f"lm.config.load.to_yaml(lm.load({str(folder)!r}).config)"
            raise RunError(f"{path}: cut short: it has no {', '.join(missing)}; bring it back, or write what the checkpoint holds: {again}")
        return parse(plain)
    except (OSError, ConfigError, TypeError) as error:
        raise RunError(f"{path}: not readable: {one_line(error)}") from None


def step_path(folder: Path, step: int) -> Path:
    """`step-N.ckpt` in a folder of checkpoints."""
    return folder / f"step-{step:06d}.ckpt"


def step_of(path: Path) -> int:
    """The step N of a `step-N.ckpt`."""
    return int(path.stem.removeprefix("step-"))


def is_own(run: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint lies in a run folder's own folder of checkpoints."""
    return checkpoint.resolve().parent == (run / CHECKPOINTS).resolve()


def steps_saved(folder: Path) -> list[Path]:
    """The `step-N.ckpt` files of a folder, in ascending order of step."""
    return sorted((path for path in folder.glob("step-*.ckpt") if path.stem.removeprefix("step-").isdigit()), key=step_of)


# ---------------------------------------------------------------- metrics.jsonl


PEAK_MEMORY = "peak_memory_bytes"  # up to a line: of tensors on the GPU, of the whole process on the CPU; rank 0's
_WARM_UP = 3  # steps that are slower than the others
_TAIL_BYTES = 1 << 16  # of a log that is followed, read at the first look
DIVERGED = "diverged"  # in the last line of a run that stopped at values that are not finite: why


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss while training, one point a logged step; a loss that was not finite is NaN."""

    tokens: np.ndarray  # (points,) seen so far
    loss: np.ndarray  # (points,) nats per token


class Log(NamedTuple):
    """A metrics.jsonl as it was read: `lines` that are JSON objects with a step, numbers (from 1) of the others, and all bytes; None: there
    is no such file."""

    lines: list[dict[str, Plain]]
    unreadable: list[int]
    content: bytes | None

    def is_altered(self, seal: dict[str, Plain]) -> bool:
        """Whether there is a log, and its beginning is not what `log_seal` saw."""
        return self.content is not None and _seal(self.content[: seal["bytes"]]) != seal


def read_metrics(path: Path) -> Log:
    """Read a log. A last line without its end is what a kill leaves: it is left out unless it is whole."""
    content = path.read_bytes() if path.is_file() else None
    *texts, last = (content or b"").split(b"\n")
    lines = [*map(_read, texts), *filter(None, [_read(last)])]
    return Log([line for line in lines if line], [number for number, line in enumerate(lines, 1) if not line], content)


def truncate_metrics(path: Path, step: int) -> list[str]:
    """Keep the lines up to `step`, from which a run is resumed, without a swap at it. Returns notes on unreadable lines."""
    if not path.exists():
        return []
    lines, unreadable, _ = read_metrics(path)
    kept = [line for line in lines if line["step"] < step or (line["step"] == step and "swap/kl" not in line)]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return [f"note: {path}: left out what is not readable: line {', '.join(map(str, unreadable))}"] if unreadable else []


def log_seal(path: Path) -> dict[str, Plain]:
    """How many `bytes` a log has, and their `sha256`: a checkpoint keeps it, and later lines are only added."""
    return _seal(path.read_bytes() if path.is_file() else b"")


def _seal(content: bytes) -> dict[str, Plain]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


EMPTY_LOG = _seal(b"")


def training_seconds(lines: list[dict[str, Plain]], after_step: int = 0) -> float | None:
    """Time spent in the training steps after one, without evaluations, over all starts; None: the log does not say."""
    logged = [(line["step"], line["elapsed_s"]) for line in lines if line.get("elapsed_s")]
    return logged[-1][1] - max((seconds for step, seconds in logged if step <= after_step), default=0.0) if logged else None


def peak_memory(lines: list[dict[str, Plain]]) -> int | None:
    """The highest PEAK_MEMORY in bytes, evaluations while training included; None of a run that did not log it."""
    return max((line[PEAK_MEMORY] for line in lines if line.get(PEAK_MEMORY)), default=None)


class MetricTail:
    """The end of a log that grows: each look reads what has been written since the last.

    Attributes:
        step: the last logged one; 0: none yet.
        latest: the last value of each metric, of those in the lines that were read.
    """

    def __init__(self, path: Path):
        self.path, self.step, self.latest = path, 0, dict[str, Plain]()
        self._file, self._read_to = 0, 0  # its inode: a resumed run writes its log anew, up to where it goes on

    def look(self) -> None:
        """Read what was appended since the last look; `step` and `latest` stay if the log can't be read."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._read_to:
                    self._file, self._read_to, self.step, self.latest = status.st_ino, 0, 0, {}
                file.seek(max(self._read_to, status.st_size - _TAIL_BYTES))
                text = file.read()
                whole, end, rest = text.rpartition(b"\n")
                self._read_to = file.tell() - len(rest)
        except OSError:
            return
        for line in filter(None, map(_read, whole.split(b"\n") if end else [])):
            self.step = line["step"]
            self.latest |= line


def curve(lines: list[dict[str, Plain]], name: str) -> Curve:
    """A loss that was logged as `name`; of a step that a resumed run logged twice the last counts."""
    by_step = {line["step"]: line for line in lines if name in line}
    points = [by_step[step] for step in sorted(by_step)]
    return Curve(*(np.array([line.get(key) for line in points], dtype=float) for key in ("tokens", name)))


def step_seconds(path: Path) -> float | None:
    """Median seconds of a step of a run that logs every step, without the first ones; None before the first."""
    ends = [line["elapsed_s"] for line in read_metrics(path).lines if "elapsed_s" in line]
    durations = [after - before for before, after in itertools.pairwise(ends)][_WARM_UP:]
    return statistics.median(durations or [ends[-1] / len(ends)]) if ends else None


def _read(text: bytes) -> dict[str, Plain] | None:
    """A line; None if it can't be read as one."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None
