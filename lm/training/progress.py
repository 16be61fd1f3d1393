"""Time spent training, and how it is shown."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Clock:
    """Seconds of training: evaluations and checkpoints, which pause it, are left out."""

    def __init__(self) -> None:
        self._begin = self._paused = 0.0

    def start(self, seconds: float = 0.0) -> None:
        """Go on from `seconds`."""
        self._begin, self._paused = time.perf_counter() - seconds, 0.0

    def seconds(self) -> float:
        """Since `start`, without the pauses."""
        return time.perf_counter() - self._begin - self._paused

    def paused(self, since: float) -> None:
        """Leave out the time since `since` (of `time.perf_counter`)."""
        self._paused += time.perf_counter() - since


class ProgressLine:
    """One bar on a terminal, a line every twentieth of the run elsewhere; silent on other ranks."""

    def __init__(self, mode: str, max_steps: int, main: bool):
        self.console = Console(stderr=True)
        self.max_steps, self.main = max_steps, main and mode != "none"
        self.lines = mode == "lines" or (mode == "auto" and not self.console.is_terminal)
        self.started, self.first_step = time.perf_counter(), 0
        self.line_every, self.due = max(1, max_steps // 20), 0
        self.bar = Progress(
            TextColumn("step"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("", total=max_steps, text="")

    def start(self, step: int) -> None:
        """Training goes on from `step`."""
        self.started, self.first_step = time.perf_counter(), step
        if self.main and not self.lines:
            self.bar.start()
            self.bar.update(self.task, completed=step)

    def advance(self, step: int, loss: float | None = None, speed: float = 0.0) -> None:
        """`step` is done; loss and tokens/s where they were measured."""
        if not self.main:
            return
        text = {} if loss is None else {"text": f"loss {loss:.4f}  {speed:,.0f} tokens/s"}
        if not self.lines:
            self.bar.update(self.task, completed=step, **text)
        elif text and (step >= self.due or step == self.max_steps):
            self.due = (step // self.line_every + 1) * self.line_every
            left = (time.perf_counter() - self.started) / (step - self.first_step) * (self.max_steps - step)
            self.console.print(f"step {step}/{self.max_steps}  {text['text']}  ETA {left:.0f} s", highlight=False)

    def note(self, text: str) -> None:
        """A line of its own."""
        if self.main:
            self.console.print(text, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.main and not self.lines:
            self.bar.stop()
