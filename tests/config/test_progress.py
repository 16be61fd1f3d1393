"""Progress of long work on a terminal and in a file."""

import io
import re

import pytest

from lm.progress import Progress, StepProgress


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def test_bytes_leave_a_line_in_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lm.progress.MIN_SECONDS_BETWEEN_LINES", 0.0)
    with Progress().byte_bar("encode", 4_000_000, 1_000_000) as bar:
        bar.update(1_000_000)
    with Progress("none").byte_bar("encode", 4_000_000) as bar:
        bar.update(1_000_000)
    assert re.fullmatch(r"(encode 2.00M/4.00M \[00:00<00:00, .*B/s\]\n){2}", capsys.readouterr().err)


def test_steps_are_a_line_every_twentieth_of_the_run_in_a_file(capsys: pytest.CaptureFixture[str]):
    progress = StepProgress("lines", 100)
    progress.start(40)
    for step in range(41, 101):
        progress.advance(step, *((step / 10, 1234.0) if step % 2 else ()))
    progress.stop()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/100" for step in (45, 51, 57, 63, 69, 75, 81, 87, 93, 99)]
    assert lines[-1].endswith("step/s, loss 9.9000, 1,234 tokens/s]")


def test_a_terminal_has_a_bar_that_leaves_nothing_and_lines_beside_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    progress = StepProgress("auto", 10)
    progress.start(0)
    progress.advance(5, 2.0, 1234.0)
    progress.say("step 5: \x1bmeasured")
    progress.stop()
    text = stream.getvalue()
    assert "| 5/10 [" in text
    assert "loss 2.0000, 1,234 tokens/s" in text
    assert "\rstep 5: \\x1bmeasured\n" in text
    assert not text.rpartition("\r")[0].rpartition("\r")[2].strip(), "the bar is overwritten by spaces"
