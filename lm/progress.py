"""Progress of long operations, on stderr: bars on a terminal, lines elsewhere, or nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

LINE_SECONDS = 30.0  # between the lines of a stage that is measured in bytes
LINES = 20  # lines in a training run


class Progress:
    """Shows messages and progress.

    Args:
        mode: `auto`: bars on a terminal, lines elsewhere; `bar` or `lines` everywhere; `none`: silent.
    """

    def __init__(self, mode: str = "auto"):
        self.console = Console(stderr=True, quiet=mode == "none")
        self.lines = mode == "lines" or (mode == "auto" and not self.console.is_terminal)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int | None, done: int = 0, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
        """A progress bar, if bars are shown. Yields a function of the units done since its last call, and of `text` to show beside the bar.

        Args:
            total, done: all units, and those done before.
            columns: to the right of the bar; by default the units done and the remaining time.
        """
        shown = columns or (MofNCompleteColumn(), TimeRemainingColumn())
        bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            *shown,
            console=self.console,
            transient=True,
            disable=self.lines or self.console.quiet,
        )
        task = bars.add_task(name, total=total, completed=done, text="")
        with bars:
            yield lambda units, **fields: bars.update(task, advance=units, **fields)

    @contextmanager
    def bytes(self, name: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
        """A stage of `total` bytes, `done` of them before, with MB/s and the remaining time. Yields a function of the bytes done."""
        rate = _Rate(name, total, done)
        if self.lines:
            self.say(f"{name}: {total:,} bytes" + (f", {done:,} of them done before" if done else "") if total else name)
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with self.bar(f"{name:<9}", total, done, *columns) as show:

            def advance(n_bytes: int) -> None:
                show(n_bytes)
                if rate.advance(n_bytes) and self.lines:
                    self.say(str(rate))

            yield advance
        self.say(rate.end())


class StepProgress(Progress):
    """The steps of a training run, with loss, speed and remaining time; as lines, one every twentieth of the run."""

    def __init__(self, mode: str, max_steps: int):
        super().__init__(mode)
        self.max_steps, self.every, self.due = max_steps, max(1, max_steps // LINES), 0
        self.started, self.first, self.step, self._bars = 0.0, 0, 0, ExitStack()

    def start(self, step: int) -> None:
        """Show that training starts or continues at `step`."""
        self.started, self.first, self.step = time.perf_counter(), step, step
        columns = (TextColumn("{task.completed}/{task.total}  {task.fields[text]}"), TimeElapsedColumn(), TextColumn("ETA"))
        self._show = self._bars.enter_context(self.bar("step", self.max_steps, step, *columns, TimeRemainingColumn()))

    def advance(self, step: int, loss: float | None = None, speed: float = 0.0) -> None:
        """Show that `step` is done, with its loss and tokens/s if they were measured."""
        text = {} if loss is None else {"text": f"loss {loss:.4f}  {speed:,.0f} tokens/s"}
        self._show(step - self.step, **text)
        self.step = step
        if self.lines and text and (step >= self.due or step == self.max_steps):
            self.due = (step // self.every + 1) * self.every
            seconds = (time.perf_counter() - self.started) / (step - self.first) * (self.max_steps - step)
            remaining = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            # The first step warms up: a time by it alone would be many times too long.
            self.say(f"step {step}/{self.max_steps}  {text['text']}" + (step > self.first + 1) * f"  ETA {remaining}")

    def stop(self) -> None:
        """Remove the bar."""
        self._bars.close()


class _Rate:
    """The number of bytes done, and their rate."""

    def __init__(self, name: str, total: int | None, done: int):
        self.name, self.total, self.before, self.done = name, total, done, done
        self.started = self.last_line = time.monotonic()

    def advance(self, n_bytes: int) -> bool:
        """Count bytes; True if the next line is due."""
        self.done += n_bytes
        now = time.monotonic()
        due = now - self.last_line >= LINE_SECONDS
        self.last_line = now if due else self.last_line
        return due

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        speed = (self.done - self.before) / max(seconds, 1e-9)
        text = f"{self.name}: {self.done / 1e6:,.0f} MB"
        if self.total:
            text += f" ({self.done / self.total:.0%}), {(self.total - self.done) / max(speed, 1e-9):,.0f} s left"
        return f"{text}, {speed / 1e6:.1f} MB/s"

    def end(self) -> str:
        """The line that ends a stage."""
        seconds = time.monotonic() - self.started
        n_bytes = self.done - self.before
        return f"{self.name}: {n_bytes / 1e6:,.1f} MB in {seconds:,.1f} s, {n_bytes / max(seconds, 1e-9) / 1e6:,.1f} MB/s"
