"""Progress of long operations, on stderr: bars on a terminal, lines elsewhere, or nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich import progress
from rich.console import Console

from lm.errors import terminal_text

LINE_SECONDS = 30.0  # shortest time between two lines that report progress in bytes
LINES_PER_RUN = 20  # approximate number of progress lines in a training run


class Progress:
    """Shows messages and progress on stderr.

    mode: `auto` shows bars on a terminal and lines elsewhere; `bar` shows bars everywhere, `lines` shows lines, `none`
    shows nothing.
    """

    def __init__(self, mode: str = "auto"):
        self.console = Console(stderr=True, quiet=mode == "none")
        self.prints_lines = mode == "lines" or (mode == "auto" and not self.console.is_terminal)

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(terminal_text(text), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def bar(
        self, name: str, total: int | None, n_done: int = 0, *columns: progress.ProgressColumn
    ) -> Iterator[Callable[..., None]]:
        """A context that shows a progress bar, unless `mode` asks for lines or silence. Yields a function f(units,
        text=...) that adds newly done units, e.g. bytes, and sets `text`, a field of the bar that one of `columns` may
        show.

        Args:
            total, n_done: number of units in all (None if unknown), and number of units that were done before.
            columns: rich columns to show right of the bar; by default the number of units done and the remaining time.
        """
        bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *(columns or (progress.MofNCompleteColumn(), progress.TimeRemainingColumn())),
            console=self.console,
            transient=True,
            disable=self.prints_lines or self.console.quiet,
        )
        bar_id = bars.add_task(terminal_text(name), total=total, completed=n_done, text="")
        with bars:
            yield lambda units, **fields: bars.update(bar_id, advance=units, **fields)

    @contextmanager
    def bytes(self, name: str, total: int | None, n_done: int = 0) -> Iterator[Callable[[int], None]]:
        """A context that shows progress over `total` bytes (None if unknown), of which `n_done` were done before.
        Yields a function f(n_bytes) that adds newly done bytes."""
        columns = progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
        start = last_line = time.monotonic()
        n_new = 0  # bytes done since the start
        with self.bar(f"{name:<9}", total, n_done, *columns) as show:

            def advance(n_bytes: int) -> None:
                nonlocal n_new, last_line
                n_new += n_bytes
                show(n_bytes)
                if self.prints_lines and time.monotonic() - last_line >= LINE_SECONDS:
                    last_line = time.monotonic()
                    part = f" ({(n_done + n_new) / total:.0%})" if total else ""
                    self.say(f"{name}: {(n_done + n_new) / 1e6:,.0f} MB{part}, {last_line - start:,.0f} s")

            yield advance
        seconds = time.monotonic() - start
        self.say(f"{name}: {n_new / 1e6:,.1f} MB in {seconds:,.1f} s, {n_new / max(seconds, 1e-9) / 1e6:,.1f} MB/s")


class StepProgress(Progress):
    """Shows the progress of a training run in steps, with loss, speed and remaining time. Lines, where they replace the
    bar, are printed at each twentieth of the run."""

    def __init__(self, mode: str, max_steps: int):
        super().__init__(mode)
        self.max_steps, self.steps_per_line, self.next_line = max_steps, max(1, max_steps // LINES_PER_RUN), 0
        self.start_time, self.first_step, self.step, self._bars = 0.0, 0, 0, ExitStack()

    def start(self, step: int) -> None:
        """Show that training starts or continues at `step`."""
        self.start_time, self.first_step, self.step = time.perf_counter(), step, step
        step_column = progress.TextColumn("{task.completed}/{task.total}  {task.fields[text]}")
        time_columns = progress.TimeElapsedColumn(), progress.TextColumn("ETA"), progress.TimeRemainingColumn()
        self._show = self._bars.enter_context(self.bar("step", self.max_steps, step, step_column, *time_columns))

    def advance(self, step: int, loss: float | None = None, speed: float = 0.0) -> None:
        """Show that `step` steps are done, with the step's loss and `speed` (tokens/s) if they were measured."""
        text = {} if loss is None else {"text": f"loss {loss:.4f}  {speed:,.0f} tokens/s"}
        self._show(step - self.step, **text)
        self.step = step
        if self.prints_lines and text and (step >= self.next_line or step == self.max_steps):
            self.next_line = (step // self.steps_per_line + 1) * self.steps_per_line
            seconds = (time.perf_counter() - self.start_time) / (step - self.first_step) * (self.max_steps - step)
            remaining = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
            # The first step includes warm-up work: a remaining time estimated from it alone would be many times too
            # long.
            self.say(
                f"step {step}/{self.max_steps}  {text['text']}" + (step > self.first_step + 1) * f"  ETA {remaining}"
            )

    def stop(self) -> None:
        """Remove the progress bar."""
        self._bars.close()
