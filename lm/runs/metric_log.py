"""metrics.jsonl: what a run logged while training, one JSON object a line; its only parser."""

import hashlib
import itertools
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.files import write_text
from lm.schema import Plain

PEAK_MEMORY = "peak_memory_bytes"  # up to a line: of tensors on the GPU, of the whole process on the CPU; rank 0's
_WARM_UP = 3  # steps that are slower than the others
_TAIL_BYTES = 1 << 16  # of a log that is followed, read at the first look
DIVERGED = "diverged"  # in the last line of a run that stopped at values that are not finite: why


@dataclass(frozen=True, eq=False)
class Curve:
    """Loss while training, one point a logged step; a loss that was not finite is NaN."""

    tokens: np.ndarray  # (points,) seen so far
    loss: np.ndarray  # (points,) nats per token


def read_metrics(path: Path) -> tuple[list[dict[str, Plain]], list[int]]:
    """The logged lines, and the numbers (from 1) of those that are no JSON objects with a step; none of a file that isn't there.

    A last line without its end is what a kill leaves: it is left out unless it is whole.
    """
    *texts, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    found = [*map(_read, texts), *filter(None, [_read(last)])]
    return [line for line in found if line], [number for number, line in enumerate(found, 1) if not line]


def truncate_metrics(path: Path, step: int) -> list[str]:
    """Keep the lines up to `step`, from which a run is resumed, without a swap at it. Returns notes on unreadable lines."""
    if not path.exists():
        return []
    lines, unreadable = read_metrics(path)
    kept = [line for line in lines if line["step"] < step or (line["step"] == step and "swap/kl" not in line)]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return [f"note: {path}: left out what is not readable: line {', '.join(map(str, unreadable))}"] if unreadable else []


def log_seal(path: Path) -> dict[str, Plain]:
    """How many `bytes` a log has, and their `sha256`: a checkpoint keeps it, and later lines are only added."""
    return _seal(path.read_bytes() if path.is_file() else b"")


def is_altered(path: Path, seal: dict[str, Plain]) -> bool:
    """True if there is a log, and its beginning is not what `log_seal` saw."""
    return path.is_file() and _seal(path.read_bytes()[: seal["bytes"]]) != seal


def _seal(content: bytes) -> dict[str, Plain]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


EMPTY_LOG = _seal(b"")


def training_seconds(path: Path, after_step: int = 0) -> float | None:
    """Time spent in the training steps after one, without evaluations, over all starts; None: the log does not say."""
    logged = [(line["step"], line["elapsed_s"]) for line in read_metrics(path)[0] if line.get("elapsed_s")]
    return logged[-1][1] - max((seconds for step, seconds in logged if step <= after_step), default=0.0) if logged else None


def peak_memory(path: Path) -> int | None:
    """The highest PEAK_MEMORY in bytes, evaluations while training included; None of a run that did not log it."""
    return max((line[PEAK_MEMORY] for line in read_metrics(path)[0] if line.get(PEAK_MEMORY)), default=None)


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
        """Read on; a log that can't be read stays as it was."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._read_to:
                    self._file, self._read_to, self.step, self.latest = found.st_ino, 0, 0, {}
                file.seek(max(self._read_to, found.st_size - _TAIL_BYTES))
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
    ordered = [by_step[step] for step in sorted(by_step)]
    return Curve(*(np.array([line.get(key) for line in ordered], dtype=float) for key in ("tokens", name)))


def step_seconds(path: Path) -> float | None:
    """Median seconds of a step of a run that logs every step, without the first ones; None before the first."""
    ends = [line["elapsed_s"] for line in read_metrics(path)[0] if "elapsed_s" in line]
    took = [after - before for before, after in itertools.pairwise(ends)][_WARM_UP:]
    return statistics.median(took or [ends[-1] / len(ends)]) if ends else None


def _read(text: bytes) -> dict[str, Plain] | None:
    """A line; None if it can't be read as one."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None
