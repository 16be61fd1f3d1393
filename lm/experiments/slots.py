"""The slots of this machine, which decide how many runs are trained at a time and on which GPUs, and the processes that
train the runs.

A run takes one process after another, one for each of its `lm` commands. When `lm compare` ends, its processes save a
checkpoint and end.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import FrameType

from lm.config.load import to_yaml
from lm.config.yaml_text import override
from lm.errors import ConfigError, RunError
from lm.experiments.experiment import Experiment
from lm.experiments.procedure import Run
from lm.files import locked_folder, write_text
from lm.machine import STOP_SIGNALS, start_child
from lm.model.device import count_gpus, visible_gpus
from lm.runs.folder import ALREADY_TRAINING, CONFIG
from lm.schema import to_plain

LOG_FOLDER = "logs"  # folder in the experiment's folder: output, configuration, job record and failure of each run
Devices = tuple[str, ...]  # GPUs of a run, as CUDA_VISIBLE_DEVICES names them; (): it computes on the CPU


@dataclass(frozen=True)
class Slots:
    """Places in which one `lm compare` trains runs at the same time. A run on the CPU takes one slot, a run on GPUs one
    slot on each.
    """

    n_slots: int
    gpus: Devices = ()  # GPUs that are handed out; (): all runs compute on the CPU
    slots_per_gpu: int = 1  # number of slots on each GPU
    # number of GPUs that a run takes, by size and arm; other runs take none
    gpus_per_run: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def slots_per_run(self, size: str, arm: str) -> int:
        """Return the number of slots that a run of an arm takes."""
        return max(1, self.gpus_per_run.get((size, arm), 0))

    def devices(self, size: str, arm: str, busy_devices: list[Devices]) -> Devices | None:
        """Choose the GPUs with the fewest runs for a run that starts while other runs occupy `busy_devices`. None while
        too few slots are free."""
        if sum(max(1, len(gpus)) for gpus in busy_devices) + self.slots_per_run(size, arm) > self.n_slots:
            return None
        run_counts, gpu_count = Counter(chain(*busy_devices)), self.gpus_per_run.get((size, arm), 0)
        free_gpus = sorted(
            (gpu for gpu in self.gpus if run_counts[gpu] < self.slots_per_gpu), key=run_counts.__getitem__
        )
        return tuple(free_gpus[:gpu_count]) if len(free_gpus) >= gpu_count else None

    @property
    def at_a_time(self) -> int:
        """The number of runs that can train at the same time, if every run needs as many slots as the widest."""
        return self.n_slots // max((1, *self.gpus_per_run.values()))

    def __str__(self) -> str:
        gpus = f"on {gpu_words(self.gpus[: self.n_slots])}, {self.slots_per_gpu} on each (--jobs-per-gpu)"
        return f"{self.at_a_time} at a time {gpus if any(self.gpus_per_run.values()) else 'on the CPU'}"


def gpu_words(devices: Devices) -> str:
    """GPUs in words, e.g. `GPU 0, 1`, or the first 12 characters of each UUID; empty without GPUs."""
    words = ", ".join(name[:12] for name in devices)
    return f"GPU {words}" if words and devices[0].isdigit() else words


def slots_of(experiment: Experiment, jobs: int | None, slots_per_gpu: int) -> Slots:
    """Return the slots for an experiment on this machine.

    Args:
        jobs: largest number of slots; None: `slots_per_gpu` on each GPU, or one if all runs compute on the CPU.
        slots_per_gpu: number of slots on each GPU. If any run takes a GPU, there are no slots without a GPU.

    Raises ConfigError: there are too few GPUs, or slots, for a run.
    """
    gpus = visible_gpus()
    gpu_counts = {
        (size, arm.name): count_gpus(experiment.example_config(size, arm)) for size, arm in experiment.size_arms
    }
    max_gpus = max(gpu_counts.values())
    if not max_gpus:
        return Slots(jobs or 1)
    slot_count = min(jobs or len(gpus) * slots_per_gpu, len(gpus) * slots_per_gpu)
    if slot_count < max_gpus:
        reason = f"a run of {max_gpus} GPUs (trainer.devices) takes {max_gpus} slots"
        raise ConfigError(f"--jobs {jobs}: {reason}; raise it, or lower trainer.devices")
    return Slots(slot_count, gpus, slots_per_gpu, gpu_counts)


def log_path(experiment_folder: Path, run: Run, suffix: str = "log") -> Path:
    """The path of a run's file with `suffix` in the experiment's folder of logs; the file with the suffix `log` holds
    the run's output.
    """
    return experiment_folder / LOG_FOLDER / run.size / f"{run.config.name}.{suffix}"


def commands(run: Run, experiment_folder: Path) -> list[list[str]]:
    """List the arguments of each `lm` command that a run still needs, in order; [] if the run has ended. The
    configuration that training reads is written below `experiment_folder`. Each command can be stopped and started
    again.
    """
    if run.outcome.ended:
        return []
    config, folder, outcome = run.config, run.config.run_folder, run.outcome
    arguments, plugins = [], [f"--allow-plugin={package}" for package in sorted(run.packages)]
    swapped_folder = Path(config.init_from) if run.trained else folder
    if run.swap and not (swapped_folder / CONFIG).exists():
        options = {f"model.normalizer.{name}": value for name, value in to_plain(config.model.normalizer).items()}
        # `init` is an option of the command; without the labels lm.results has the source's arm
        options |= {
            f"experiment.{name}": value for name, value in to_plain(config.experiment).items() if value is not None
        }
        overrides = [
            override(path, value)
            for path, value in options.items()
            if path not in ("model.normalizer.name", "model.normalizer.init")
        ]
        init = [] if run.swap.init is None else [f"--init={run.swap.init}"]
        source = str(run.source.config.run_folder)
        arguments.append(
            ["swap", source, f"--to={run.swap.to}", f"--out={swapped_folder}", *init, *overrides, *plugins]
        )
    if run.trained and (not outcome.is_trained or not outcome.is_complete or outcome.is_measured):
        # `lm train` makes the evaluations that a kill left out, too
        file = log_path(experiment_folder, run, "yaml")
        write_text(file, to_yaml(config))
        arguments.append(["train", str(file), "resume=auto", "log.progress=none"])
    if not run.trained or not outcome.is_measured:
        arguments.append(["eval", str(folder), *run.evaluate, *plugins])
    return arguments


class Stopped(RunError):
    """A signal has stopped the work on an experiment; the exit status is 128 plus the signal's number."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_code = 128 + number


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Let all `STOP_SIGNALS` interrupt the body as Ctrl-C does, except signals that are already handled or ignored.
    Yields the list of received signals. Only the main thread can be interrupted; in others the list stays empty.
    """
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # schedulers announce the end of a job more than once
        if number in (signal.SIGUSR1, signal.SIGUSR2) and signals:
            return
        signals.append(number)
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOP_SIGNALS if is_main_thread and signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield signals
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class Children:
    """Trains the runs of an experiment in processes of this machine."""

    def __init__(self, experiment_folder: Path):
        self.experiment_folder = experiment_folder
        self._processes: dict[Path, subprocess.Popen] = {}
        self._stopping = threading.Event()

    def train(self, run: Run, devices: Devices | None) -> tuple[int, float]:
        """Train or continue a run, which sees only `devices` (None: all GPUs that this process sees). Returns the exit
        status of its last command, negative if a signal killed it, and the seconds that its commands took."""
        # in a process that an earlier start left
        while is_training(run.config.run_folder) and not self._stopping.is_set():
            self._stopping.wait(1)
        status, start = 128 + signal.SIGTERM if self._stopping.is_set() else 0, time.monotonic()
        for command in [] if status else commands(replace(run, outcome=replace(run.outcome)), self.experiment_folder):
            status = self._execute(run, command, devices)
            if status:
                break
        return status, time.monotonic() - start

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send the signal `number` to all processes, and start no more. At SIGTERM, the processes save a checkpoint and
        end.
        """
        self._stopping.set()
        for process in list(self._processes.values()):
            process.send_signal(number)

    def wait(self) -> None:
        """Wait until all processes have ended. Signal handlers call this method, since Popen.wait may deadlock in
        them.
        """
        for process in list(self._processes.values()):
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def _execute(self, run: Run, command: list[str], devices: Devices | None) -> int:
        folder, output = run.config.run_folder, log_path(self.experiment_folder, run)
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as log:
            process = start_child([sys.executable, "-m", "lm", *command], log, log, devices)
        self._processes[folder] = process
        if self._stopping.is_set():
            process.send_signal(signal.SIGTERM)
        status = process.wait()
        del self._processes[folder]
        return status


def is_training(folder: Path) -> bool:
    """Whether a process of this machine trains the run in a run folder, as the folder's lock shows."""
    if not folder.is_dir():
        return False
    try:
        with locked_folder(folder, ALREADY_TRAINING):
            return False
    except RunError:
        return True
