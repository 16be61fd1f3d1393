"""The processes that train the runs of an experiment: one for each command of a run, stopped with a checkpoint when this one ends."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from lm.errors import RunError
from lm.experiments.claims import Claim
from lm.experiments.commands import commands
from lm.experiments.failures import log_path
from lm.experiments.procedure import Run
from lm.experiments.slots import Devices
from lm.files import locked_folder
from lm.machine import child_environment
from lm.runs.folder import TRAINING


class Stopped(RunError):
    """A signal has stopped the work on an experiment; its exit status is the signal's."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_code = 128 + number


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """SIGTERM, SIGHUP and SIGUSR1 interrupt as Ctrl-C does, unless somebody else handles or ignores them. Yields the signals that came."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and received:  # schedulers announce the end of a job more than once
            return
        received.append(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if main and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


class Children:
    """The processes of an experiment's runs.

    Args:
        experiment: its folder.
    """

    def __init__(self, experiment: Path):
        self.experiment = experiment
        self._running: dict[Path, subprocess.Popen] = {}
        self._stopping = threading.Event()

    def train(self, run: Run, claim: Claim, devices: Devices) -> int:
        """Train a run, or go on with it, on these GPUs and no others; the exit status of the last of its commands, negative: of the signal
        that killed it."""
        status = self._wait_for_earlier(run.config.run_folder)
        for command in [] if status else commands(replace(run, outcome=replace(run.outcome)), self.experiment):
            status = self._execute(run, command, claim, devices)
            if status:
                break
        return status

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Let all processes save a checkpoint and end, and start no others."""
        self._stopping.set()
        for process in list(self._running.values()):
            process.send_signal(number)

    def stop_one(self, run: Run) -> None:
        """Let the process of a run save and end."""
        if process := self._running.get(run.config.run_folder):
            process.send_signal(signal.SIGTERM)

    def _execute(self, run: Run, command: list[str], claim: Claim, devices: Devices) -> int:
        """One `lm` command of a run, to its end."""
        folder, output = run.config.run_folder, log_path(self.experiment, run)
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as log:
            # a session of its own: Ctrl-C reaches it through `stop` alone, once
            process = subprocess.Popen(
                [sys.executable, "-m", "lm", *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=child_environment(devices),
            )
            self._running[folder] = process
            try:
                claim.trained_by(process.pid)
            finally:
                if self._stopping.is_set() or claim.lost:
                    process.send_signal(signal.SIGTERM)
                status = process.wait()
                del self._running[folder]
        return status

    def _wait_for_earlier(self, folder: Path) -> int:
        """Wait until no process trains in a run folder, as one that an earlier start of the experiment left may for a while; the status of
        a run that is stopped first."""
        while folder.is_dir() and not self._stopping.is_set():
            try:
                with locked_folder(folder, TRAINING):
                    break
            except RunError:
                self._stopping.wait(1)
        return 128 + signal.SIGTERM if self._stopping.is_set() else 0
