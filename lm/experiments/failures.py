"""Runs that failed: what is written of them beside their logs, so that later calls leave them until they are asked to try again."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lm.errors import RunError
from lm.experiments.procedure import Run
from lm.runs.evaluations import evaluation_files
from lm.runs.folder import CHECKPOINTS, read_json, step_of, steps_saved, write_json

LOGS = "logs"  # in the experiment's folder: the output of each run, its configuration, and why it failed
_STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # end a run after its step, with a checkpoint
_CRASHES = (signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # SIGKILL: out of memory, perhaps


@dataclass(frozen=True)
class Failure:
    """A run that ended without a result.

    Attributes:
        status: its exit status; negative: of the signal that killed it.
        reason: its last line, or the signal.
        log: the file of all its output.
        saved: what the run had saved by then, as `saved_of` says it.
        again: whether a crash of the run before had come as far.
    """

    status: int
    reason: str
    log: str
    saved: str = ""
    again: bool = False

    def __str__(self) -> str:
        return f"status {self.status}: {self.reason}"

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it from outside, or it crashed for the first time since it last saved something: the next start goes on
        with it. A second crash at the same place is a failure."""
        return (self.status < 0 and not self.again) or self.status - 128 in _STOPS

    @property
    def crashed(self) -> bool:
        """Whether a signal ended it that the run may be the cause of."""
        return -self.status in _CRASHES


def log_path(experiment: Path, run: Run, suffix: str = "log") -> Path:
    """The file in the experiment's folder that holds a run's output; with another suffix, what belongs to it."""
    return experiment / LOGS / run.size / f"{run.config.name}.{suffix}"


def failure_of(experiment: Path, run: Run, status: int) -> Failure:
    """What the log of a run says of its end."""
    log, saved = log_path(experiment, run), saved_of(run)
    said = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((line for line in reversed(said) if line.strip()), "no output")[:300]
    if status < 0:
        last = f"killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    before = _read(log_path(experiment, run, "failed.json"))
    again = -status in _CRASHES and before is not None and before.crashed and before.saved == saved
    return Failure(status, f"{last}, twice in a row at the same place" if again else last, str(log), saved, again)


def saved_of(run: Run) -> str:
    """How far the checkpoints and evaluations of a run have come."""
    folder = run.config.run_folder
    step = max(map(step_of, steps_saved(folder / CHECKPOINTS)), default=0)
    return f"step {step}, {len(evaluation_files(folder))} evaluations"


def write_failure(experiment: Path, run: Run, failure: Failure) -> None:
    """Keep it for later calls: of those that went on, crashes alone."""
    if failure.interrupted and not failure.crashed:
        return
    write_json(log_path(experiment, run, "failed.json"), vars(failure) | {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def read_failure(experiment: Path, run: Run) -> Failure | None:
    """Why a run failed; None if it has not, or was interrupted. Raises RunError: the file is damaged."""
    found = _read(log_path(experiment, run, "failed.json"))
    return None if found is None or found.interrupted else found


def _read(path: Path) -> Failure | None:
    """What `write_failure` wrote; None if it did not."""
    if not path.exists():
        return None
    content = read_json(path)
    try:
        saved, again = str(content.get("saved", "")), bool(content.get("again"))
        return Failure(int(content["status"]), str(content["reason"]), str(content["log"]), saved, again)
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: does not say why the run failed; delete it, and the run is tried again") from None


def forget_failure(experiment: Path, run: Run) -> None:
    """Let it be tried again."""
    log_path(experiment, run, "failed.json").unlink(missing_ok=True)
