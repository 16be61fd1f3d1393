"""Runs that failed: what is written of them beside their logs, so that later calls leave them until they are asked to try again."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lm.errors import RunError
from lm.experiments.procedure import Run
from lm.runs.folder import read_json, write_json

LOGS = "logs"  # in the experiment's folder: the output of each run, its configuration, and why it failed
_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # end a run after its step, with a checkpoint


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result.

    Attributes:
        status: its exit status; negative: of the signal that killed it.
        reason: its last line, or the signal.
        log: the file of all its output.
    """

    status: int
    reason: str
    log: str

    def __str__(self) -> str:
        return f"status {self.status}: {self.reason}"

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it, from outside: then nothing is wrong with the run, and the next start goes on with it."""
        return self.status < 0 or self.status - 128 in _STOPS


def log_path(experiment: Path, run: Run, suffix: str = "log") -> Path:
    """The file in the experiment's folder that holds a run's output; with another suffix, what belongs to it."""
    return experiment / LOGS / run.size / f"{run.config.name}.{suffix}"


def failure_of(log: Path, status: int) -> Failure:
    """What the log of a run says of its end."""
    said = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line for line in reversed(said) if line.strip()), "no output")[:300]
    if status < 0:
        last = f"killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    return Failure(status, last, str(log))


def write_failure(experiment: Path, run: Run, failure: Failure) -> None:
    """Keep it for later calls."""
    write_json(log_path(experiment, run, "failed.json"), vars(failure) | {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def read_failure(experiment: Path, run: Run) -> Failure | None:
    """Why a run failed; None if it has not. Raises RunError: the file is damaged."""
    path = log_path(experiment, run, "failed.json")
    if not path.exists():
        return None
    content = read_json(path)
    try:
        return Failure(int(content["status"]), str(content["reason"]), str(content["log"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: does not say why the run failed; delete it, and the run is tried again") from None


def forget_failure(experiment: Path, run: Run) -> None:
    """Let it be tried again."""
    log_path(experiment, run, "failed.json").unlink(missing_ok=True)
