"""The table that `lm compare` keeps up to date on a terminal."""

import io
import json
import re
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from rich.console import Console
from trials import procedure_of

from lm.experiments.compare import live_table, running_table
from lm.experiments.loop import ExperimentTrainer, Slots
from lm.runs.folder import last_logged


@pytest.fixture
def work(tmp_path: Path):
    """A function: `log.progress` -> the work on an experiment."""

    def make(progress: str = "auto") -> ExperimentTrainer:
        return ExperimentTrainer(procedure_of(tmp_path, f"log.progress={progress}"), Slots(2))

    return make


def logged(folder: Path, *lines: dict[str, object]) -> None:
    """Append lines to a run's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)


def test_every_run_that_trains_has_a_line_with_its_last_loss(work):
    jobs, values = work(), {}
    first, second = jobs.procedure.known_runs()[:2]
    jobs.pending = {Future(): (first, ()), Future(): (second, ("1",))}

    def lines() -> list[str]:
        """The table's lines, without borders; cells apart by two spaces."""
        out = io.StringIO()
        Console(file=out, width=160, force_terminal=False).print(running_table(jobs, values))
        texts = [re.sub(r"[─━┏┓┗┛┡┩└┘┳┻╇┴┃│├┤┬┼]", " ", line) for line in out.getvalue().splitlines()]
        return [re.sub(r" {2,}", "  ", line.strip()) for line in texts if line.strip()]

    folder = first.config.run_folder
    logged(folder, {"step": 2, "val/loss": 5.5, "tokens": 0}, {"step": 4, "tokens": 0})
    assert lines() == [
        "stage  run  step  val/loss  on",
        "tune  softmax at 0.01 seed 101  4 of 8  5.5000",
        "tune  softmax at 0.01 seed 102  0 of 8  GPU 1",
    ]
    logged(folder, *({"step": step, "train/loss": 5.0} for step in range(2, 3000)))
    assert "val/loss" not in last_logged(folder / "metrics.jsonl")
    assert lines()[1].endswith("2999 of 8  5.5000")


def test_the_end_of_a_log_is_read_while_it_grows_and_when_it_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_logged(path) == {}
    logged(tmp_path, {"step": 1, "val/loss": 6.0}, {"step": 2, "train/loss": 5.0})
    with path.open("a") as log:
        log.write('{"step": 3, "val/')
    assert last_logged(path) == {"step": 2, "val/loss": 6.0, "train/loss": 5.0}
    with path.open("a") as log:
        log.write('loss": 4.0}\n')
    assert last_logged(path) == {"step": 3, "val/loss": 4.0, "train/loss": 5.0}
    shorter = tmp_path / "shorter"
    shorter.write_text('{"step": 1, "val/loss": 6.0}\n' + " " * 200 + "\n")
    shorter.rename(path)
    assert last_logged(path) == {"step": 1, "val/loss": 6.0}, "a resumed run goes on from an earlier step"


class Terminal(io.StringIO):
    """Standard output that is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("output", "progress", "shown"),
    [(Terminal, "auto", True), (Terminal, "lines", False), (io.StringIO, "auto", False)],
)
def test_the_table_is_for_terminals_and_leaves_them_as_they_were(work, monkeypatch, output, progress, shown):
    jobs, out = work(progress), output()
    jobs.pending = {Future(): (jobs.procedure.known_runs()[0], ())}
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("TERM", "xterm")

    def interrupted() -> None:
        with live_table(jobs):
            print("a run has ended", flush=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    output_text = out.getvalue()
    assert "a run has ended" in output_text
    if not shown:
        assert output_text == "a run has ended\n"
        return
    assert "softmax at 0.01 seed 101" in output_text
    assert output_text.rindex("\x1b[?25h") > output_text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert sys.stdout is out
