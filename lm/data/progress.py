"""What a preparation tells: bars on a terminal, lines elsewhere, all on stderr; or nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 30.0  # between lines where there is no terminal


class Progress:
    """Stages with bytes done, MB/s and the time that is left."""

    def __init__(self, shown: bool):
        from rich.console import Console

        self.console = Console(stderr=True, quiet=not shown)

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
        """Gives a function that is told how many more bytes are done, of `total`; `done` of them were before."""
        rate = _Rate(name, total, done)
        if not self.console.is_terminal:
            self.say(f"{name}: {total:,} bytes" + (f", {done:,} of them done before" if done else "") if total else name)
            yield lambda n_bytes: self.say(str(rate)) if rate.advance(n_bytes) else None
        else:
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description:<9}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True) as bar:
                task = bar.add_task(name, total=total, completed=done)

                def advance(n_bytes: int) -> None:
                    rate.advance(n_bytes)
                    bar.advance(task, n_bytes)

                yield advance
        self.say(rate.end())


class _Rate:
    """Bytes done and how fast."""

    def __init__(self, name: str, total: int | None, done: int):
        self.name, self.total, self.before, self.done = name, total, done, done
        self.started = self.told = time.monotonic()

    def advance(self, n_bytes: int) -> bool:
        """Count; True if it is time for a line."""
        self.done += n_bytes
        now = time.monotonic()
        due = now - self.told >= LINE_SECONDS
        self.told = now if due else self.told
        return due

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        speed = (self.done - self.before) / max(seconds, 1e-9)
        text = f"{self.name}: {self.done / 1e6:,.0f} MB"
        if self.total:
            text += f" ({self.done / self.total:.0%}), {(self.total - self.done) / max(speed, 1e-9):,.0f} s left"
        return f"{text}, {speed / 1e6:.1f} MB/s"

    def end(self) -> str:
        """The line of a stage that is done."""
        seconds = time.monotonic() - self.started
        n_bytes = self.done - self.before
        return f"{self.name}: {n_bytes / 1e6:,.1f} MB in {seconds:,.1f} s, {n_bytes / max(seconds, 1e-9) / 1e6:,.1f} MB/s"
