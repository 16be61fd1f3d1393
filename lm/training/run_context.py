"""A run context holds the objects that all phases of a run share: configuration, data, machine, loggers, progress,
clock and the request to stop.
"""

import os
import signal
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType

from lm.config.load import to_yaml
from lm.config.tree import Config
from lm.data.store import Store
from lm.evaluation.measurement import Measurement
from lm.machine import STOP_SIGNALS, unblock_stop_signals
from lm.model.device import Machine
from lm.plain import Plain
from lm.progress import StepProgress
from lm.training.lightning_import import L


class Clock:
    """A clock measures the seconds of training, without evaluations and checkpoints."""

    def start(self, seconds: float) -> None:
        """Start the clock at `seconds` of training so far."""
        self._begin = time.perf_counter() - seconds

    def seconds(self) -> float:
        """Return the seconds since `start`, pauses excluded."""
        return time.perf_counter() - self._begin

    def exclude_since(self, begin: float) -> None:
        """Exclude the time since `begin`, a reading of `time.perf_counter`."""
        self._begin += time.perf_counter() - begin


class StopRequest:
    """A stop request records the last of `STOP_SIGNALS` that asked this process to end its run.

    It is a context manager around all phases of a run. The same signal a second time ends the process at once, except
    SIGHUP, which a closed terminal sends more than once. Another signal than the first is only recorded: SIGTERM may
    come from a parent that the first signal has ended. A process that was started to ignore SIGHUP (nohup) ignores it.
    """

    def __init__(self) -> None:
        self.signal = 0  # the number of the last signal; 0: none yet
        self._old_handlers: dict[int, object] = {}
        self._terminal_outputs: list[int] = []

    def __enter__(self) -> "StopRequest":
        self._terminal_outputs = [output for output in (1, 2) if os.isatty(output)]
        self._old_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        if self._old_handlers[signal.SIGHUP] == signal.SIG_IGN:
            del self._old_handlers[signal.SIGHUP]
        self.listen()
        unblock_stop_signals()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        unblock_stop_signals()

    def listen(self) -> None:
        """Install this object's signal handlers, also where other code has replaced them."""
        for number in self._old_handlers:
            signal.signal(
                number, self._repeated_signal_handler(number) if number == self.signal else self._record_signal
            )

    def _repeated_signal_handler(self, number: int) -> signal.Handlers:
        """Return the handler for a signal that was received before: SIGHUP is ignored; for any other signal, the
        system's default, which ends the process."""
        return signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. Its repetition then ends the process, but a repeated SIGHUP is ignored. After SIGHUP, output
        to a closed terminal is discarded."""
        self.signal = number
        signal.signal(number, self._repeated_signal_handler(number))
        if number == signal.SIGHUP:  # writing to a closed terminal would raise an error
            null_device = os.open(os.devnull, os.O_WRONLY)
            for output in self._terminal_outputs:
                os.dup2(null_device, output)
            os.close(null_device)


class SignalRestoringDDP(L.pytorch.strategies.DDPStrategy):
    """This strategy is Lightning's DDP, except that the stop request handles SIGTERM from the first barrier of a phase
    on.

    Lightning sets a handler of its own right before this barrier. That handler waits for the other ranks. If the other
    ranks got the signal at another moment, that handler would wait for ever.
    """

    def __init__(self, stop_request: StopRequest):
        super().__init__()
        self.stop_request = stop_request

    def barrier(self, name: str | None = None) -> None:
        """Take the stop signals back from Lightning, then wait for all ranks."""
        self.stop_request.listen()
        super().barrier(name)


@dataclass
class RunContext:
    """A run context holds the objects shared by all phases of a run. `measurements` are the evaluations to make, the
    validation first.
    """

    config: Config
    store: Store
    measurements: list[Measurement]
    machine: Machine
    loggers: list[L.pytorch.loggers.Logger]
    progress: StepProgress
    user_callbacks: list[L.Callback] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    stop_request: StopRequest = field(default_factory=StopRequest)

    @cached_property
    def config_yaml(self) -> str:
        """Return the text of config.yaml. It is made once and kept, as making it takes longer than saving a small
        model.
        """
        return to_yaml(replace(self.config, resume=""))

    def log(self, step: int, metrics: dict[str, Plain]) -> None:
        """Log metrics after `step` optimizer steps to all loggers."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step)
