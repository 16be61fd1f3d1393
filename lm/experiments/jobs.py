"""Training the runs of an experiment: several at a time, each in a process of its own, resumed where an earlier start was stopped."""

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from lm.config.load import to_yaml
from lm.errors import RunError
from lm.experiments.outcomes import SELECTION
from lm.experiments.procedure import Procedure, Run
from lm.files import locked_folder, write_text
from lm.runs.folder import TRAINING

LOGS = "logs"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Ask to be stopped as by SIGTERM when the process that started this one ends, however that happens; on Linux alone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Jobs:
    """Trains what an experiment needs until nothing is left, or nothing more can be done.

    Args:
        procedure: says what is needed next.
        jobs: runs at a time.
        launch: trains one run, or goes on with it, and gives the exit status; None: `lm train` in a process of its own.
    """

    def __init__(self, procedure: Procedure, jobs: int, launch: Callable[[Run], int] | None = None):
        self.procedure, self.jobs, self.launch = procedure, jobs, launch or self._process
        self.failed: dict[Path, str] = {}
        self._running: dict[Path, subprocess.Popen] = {}
        self._stopping = threading.Event()
        self._seconds: list[float] = []

    def work(self) -> None:
        """Train until no run is left. Raises RunError at the end if some failed; KeyboardInterrupt lets the running ones save first."""
        pending: dict[Future, Run] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while True:
                    for run in self._startable({one.config.run_folder for one in pending.values()}):
                        if len(pending) < self.jobs:
                            pending[pool.submit(self._train, run)] = run
                    if not pending:
                        break
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        self._ended(pending.pop(future), future.result())
            except BaseException:
                self._stop()
                raise
        if self.failed:
            lines = "; ".join(f"{folder.name}: {reason}" for folder, reason in self.failed.items())
            raise RunError(f"{len(self.failed)} runs failed ({lines}); the same command tries them again")

    def _startable(self, running: set[Path]) -> list[Run]:
        """Runs that are not done, whose starting weights are."""
        known = self.procedure.known()
        done = {str(one.config.run_folder) for one in known if one.outcome.state == "finished" and one.config.run_folder not in running}
        return [
            one
            for one in known
            if not one.outcome.ended
            and one.config.run_folder not in running | self.failed.keys()
            and (not one.config.init_from or one.config.init_from in done)
        ]

    def _train(self, run: Run) -> tuple[int, float]:
        """The exit status of training a run, and the seconds it took."""
        begin = time.monotonic()
        return self.launch(run), time.monotonic() - begin

    def _process(self, run: Run) -> int:
        folder, logs = run.config.run_folder, self.procedure.experiment.folder / LOGS
        config = logs / f"{folder.name}.yaml"
        write_text(config, to_yaml(run.config))
        if not self._free(folder):
            return 128 + signal.SIGTERM
        command = [sys.executable, "-m", "lm", "train", str(config), "resume=auto", "log.progress=none"]
        with (logs / f"{folder.name}.log").open("ab") as log:
            # a session of its own: Ctrl-C reaches it through `_stop` alone, once
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            self._running[folder] = process
            if self._stopping.is_set():
                process.send_signal(signal.SIGTERM)
            status = process.wait()
            del self._running[folder]
        return status

    def _free(self, folder: Path) -> bool:
        """Wait until no process trains in a run folder, as one that an earlier start of the experiment left may for a while; False if this
        one is to stop first."""
        while folder.is_dir() and not self._stopping.is_set():
            try:
                with locked_folder(folder, TRAINING):
                    break
            except RunError:
                self._stopping.wait(1)
        return not self._stopping.is_set()

    def _ended(self, run: Run, result: tuple[int, float]) -> None:
        status, seconds = result
        outcome = replace(run.outcome)  # read anew
        if outcome.ended:
            self._seconds.append(seconds)
            loss = "diverged" if outcome.state == "diverged" else f"selection loss {outcome.loss(SELECTION):.4f}"
            known = self.procedure.known()
            left = sum(not one.outcome.ended for one in known)
            minutes = sum(self._seconds) / len(self._seconds) * left / self.jobs / 60
            left_over = f"{left} of the {len(known)} runs known so far are left, about {minutes:.0f} min"
            print(f"{run.stage}: {run.label}: {loss}, {seconds:.0f} s; {left_over}", flush=True)
        elif not status:
            metric = self.procedure.experiment.primary.metric
            raise RunError(
                f"{run.config.run_folder}: primary.metric {metric} was not measured by sequence at the last step; correct the file"
            )
        else:
            log = self.procedure.experiment.folder / LOGS / f"{run.config.run_folder.name}.log"
            said = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
            last = next((line for line in reversed(said) if line.strip()), "no output")
            if status < 0:
                last = f"killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
            self.failed[run.config.run_folder] = f"status {status}: {last[:300]}"
            print(f"{run.stage}: {run.label}: failed with status {status}: {last[:300]} ({log})", flush=True)

    def _stop(self) -> None:
        """Let the running ones save a checkpoint and end."""
        self._stopping.set()
        for process in list(self._running.values()):
            process.send_signal(signal.SIGTERM)
