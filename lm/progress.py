"""Shows progress of long operations on stderr: bars on a terminal, lines elsewhere, or nothing."""

import sys

from tqdm import tqdm

from lm.errors import terminal_text

MIN_SECONDS_BETWEEN_LINES = 30.0  # shortest time between two lines on one operation
LINES_PER_RUN = 20  # approximate number of progress lines in a training run
LINE_FORMAT = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Bar(tqdm):
    """A bar of tqdm that starts no thread, since the thread would receive signals that this process blocks."""

    monitor_interval = 0


class LineStream:
    """A stream that prints each state of a progress bar as a line on stderr."""

    def write(self, text: str) -> None:
        """Print a state of a bar without the characters that would overwrite the state before."""
        if state := text.strip():
            print(state, file=sys.stderr, flush=True)


class Progress:
    """Shows messages and progress on stderr.

    mode: `auto` shows bars on a terminal and lines elsewhere; `bar` shows bars everywhere, `lines` shows lines, `none`
    shows nothing.
    """

    def __init__(self, mode: str = "auto"):
        self.is_quiet = mode == "none"
        self.prints_lines = mode == "lines" or (mode == "auto" and not sys.stderr.isatty())

    def say(self, text: str) -> None:
        """Print one line, unless the mode is `none`."""
        if not self.is_quiet:
            Bar.write(terminal_text(text), file=sys.stderr)

    def bar(self, name: str, total: int | None, n_done: int = 0, **options: bool | float | str) -> Bar:
        """Return a progress bar, which is a context. The bar's method `update` adds newly done units, such as bytes or
        steps.

        Args:
            total, n_done: number of units in all (None if unknown), and number of units that were done before.
            options: further options of tqdm.
        """
        # with a delay, tqdm shows nothing before something is done
        options = {"miniters": 1, "leave": False, "delay": 1e-9, "dynamic_ncols": True} | options
        if self.prints_lines:
            options = {
                "file": LineStream(),
                "bar_format": LINE_FORMAT,
                "mininterval": MIN_SECONDS_BETWEEN_LINES,
            } | options
        return Bar(desc=terminal_text(name), total=total, initial=n_done, disable=self.is_quiet, **options)

    def byte_bar(self, name: str, total: int | None, n_done: int = 0) -> Bar:
        """Return a progress bar that counts bytes. The bar stays visible after its end."""
        return self.bar(name, total, n_done, unit="B", unit_scale=True, leave=True)


class StepProgress(Progress):
    """Shows the progress of a training run in steps, with loss, speed and remaining time.

    A terminal shows a bar. Elsewhere a line is printed after each twentieth of the run.
    """

    def __init__(self, mode: str, max_steps: int):
        super().__init__(mode)
        self.max_steps = max_steps

    def start(self, step: int) -> None:
        """Show that training starts or continues at `step`."""
        intervals = {"miniters": max(1, self.max_steps // LINES_PER_RUN), "mininterval": 0} if self.prints_lines else {}
        self._bar = self.bar("step", self.max_steps, step, unit="step", **intervals)

    def advance(self, step: int, loss: float | None = None, tokens_per_second: float = 0.0) -> None:
        """Show that `step` steps are done, with the step's loss and tokens per second if they were measured."""
        if loss is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        if loss is not None or not self.prints_lines:  # a line has its own step's loss
            self._bar.update(step - self._bar.n)

    def stop(self) -> None:
        """Remove the progress bar."""
        self._bar.close()
