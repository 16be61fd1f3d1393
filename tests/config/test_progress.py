"""What is said of how far long work is, on a terminal, in a file and nowhere."""

import io

import pytest
from rich.console import Console

from lm.progress import Progress, StepProgress


def told(progress: Progress, terminal: bool) -> io.StringIO:
    """What it writes from now on, as to a terminal or to a file."""
    file = io.StringIO()
    progress.console = Console(file=file, force_terminal=terminal, width=200, quiet=progress.console.quiet)
    progress.prints_lines = progress.prints_lines and not terminal
    return file


def test_bytes_are_lines_in_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.progress.LINE_SECONDS", 0.0)
    progress = Progress("lines")
    file = told(progress, terminal=False)
    with progress.bytes("encode", 4_000_000, 1_000_000) as advance:
        advance(1_000_000)
    line, last = file.getvalue().splitlines()
    assert line.startswith("encode: 2 MB (50%), ")
    assert last.startswith("encode: 1.0 MB in ")


def test_steps_are_a_line_every_twentieth_of_the_run_in_a_file():
    progress = StepProgress("lines", 100)
    file = told(progress, terminal=False)
    progress.start(40)
    for step in range(41, 101):
        progress.advance(step, 2.0, 1234.0)
    progress.stop()
    lines = file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/100" for step in (41, *range(45, 101, 5))]
    assert "loss 2.0000  1,234 tokens/s  ETA 0 s" in lines[-1]
    assert lines[0].endswith("1,234 tokens/s"), "one step, the first, says nothing of the others"


def test_a_terminal_has_a_bar_that_leaves_nothing_and_lines_beside_it():
    progress = StepProgress("bar", 10)
    file = told(progress, terminal=True)
    progress.start(0)
    progress.advance(5, 2.0, 1234.0)
    progress.say("step 5: measured")
    progress.stop()
    assert "5/10  loss 2.0000  1,234 tokens/s" in file.getvalue()
    assert "step 5: measured" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")
