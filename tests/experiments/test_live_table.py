"""The table that `lm compare` keeps up to date on a terminal."""

import io
import json
import re
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fabricated import finish
from rich.console import Console

from lm.experiments.compare import LiveTable, live_table
from lm.experiments.engine import ExperimentTrainer, Failure
from lm.experiments.experiment_file import read_experiment
from lm.experiments.procedure import Procedure
from lm.experiments.slots import Slots
from lm.runs.folder import last_logged

FILE = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2],
    "tune": {"grid": [1e-2, 2e-2], "seeds": [101, 102]},
}


@pytest.fixture
def work(tmp_path: Path):
    """A function: changes of the file -> the work on the experiment, as it stands."""

    def make(progress: str = "auto", **changes: object) -> ExperimentTrainer:
        path = tmp_path / "trial.yaml"
        path.write_text(
            yaml.safe_dump(
                {key: value for key, value in (FILE | changes).items() if value is not None}, sort_keys=False
            )
        )
        jobs = ExperimentTrainer(
            Procedure(
                read_experiment(
                    path, ["data.source.paths=[.]", f"runs={tmp_path / 'runs'}", f"log.progress={progress}"]
                )
            ),
            Slots(2),
        )
        jobs.known_runs = jobs.procedure.known_runs()
        return jobs

    return make


def logged(folder: Path, *lines: dict[str, object]) -> None:
    """Append lines to a run's log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)


def text(table: LiveTable) -> list[str]:
    """The table's lines, without borders; cells apart by two spaces."""
    out = io.StringIO()
    Console(file=out, width=160, force_terminal=False).print(table.render())
    lines = [re.sub(r"[─━┏┓┗┛┡┩└┘┳┻╇┴┃│├┤┬┼]", " ", line) for line in out.getvalue().splitlines()]
    return [re.sub(r" {2,}", "  ", line.strip()) for line in lines if line.strip()]


def test_every_run_that_trains_has_a_line_and_the_time_that_is_left_stands_below(work):
    jobs = work()
    runs = {(run.arm, run.rate, run.seed): run for run in jobs.known_runs}
    first, second, third, fourth = (runs["softmax", rate, seed] for rate in (1e-2, 2e-2) for seed in (101, 102))
    finish(first, 5.0)
    jobs.known_runs = jobs.procedure.known_runs()
    jobs.pending = {Future(): (second, ()), Future(): (third, ("1",))}
    jobs.failed[fourth.config.run_folder] = Failure(3, "out of memory", "log")
    table = LiveTable(jobs)
    assert text(table)[-1] == "trial: 1 of the 8 runs known so far ended, 1 failed", "no time is known"
    jobs.times = {("", "softmax"): 60.0, ("", "ssmax"): 80.0}
    logged(second.config.run_folder, {"step": 2, "val/loss": 5.5, "tokens": 0}, {"step": 4, "tokens": 0})
    heading, *lines, footer = text(table)
    assert heading == "stage  run  step  val/loss  on"
    assert lines == ["tune  softmax at 0.01 seed 102  4 of 8  5.5000", "tune  softmax at 0.02 seed 101  0 of 8  GPU 1"]
    estimate = "about 3 min left"  # (60 / 2 + 60 + 4 x 80) s, two at a time
    assert footer == f"trial: 1 of the 8 runs known so far ended, 1 failed; {estimate}"


def test_of_a_branch_only_its_own_steps_count(work):
    arms = {"softmax": {"trainer.checkpoint_every": 2}, "on": {"from": "softmax", "step": 6}}
    jobs = work(arms=arms, tune=None, seeds=[1])
    finish(jobs.known_runs[0], 5.0)
    jobs.known_runs = jobs.procedure.known_runs()
    jobs.pending = {Future(): (jobs.known_runs[1], ())}
    jobs.times = {("", "softmax"): 900.0, ("", "on"): 600.0}
    table = LiveTable(jobs)
    assert "about 5 min left" in text(table)[-1]
    logged(jobs.known_runs[1].config.run_folder, {"step": 7, "tokens": 0})
    assert "about 2 min left" in text(table)[-1], "half of 600 s, two at a time"


def test_a_grid_that_has_grown_is_said(work):
    jobs = work()
    for run in jobs.known_runs:
        finish(run, 5.0 + run.rate)
    jobs.known_runs = jobs.procedure.known_runs()
    assert "; the grid has grown by 1" in text(LiveTable(jobs))[-1]


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


def test_a_loss_stays_in_the_table_when_the_end_of_the_log_has_none_any_more(work):
    jobs = work(tune=None)
    run = jobs.known_runs[0]
    jobs.pending = {0: (run, ())}
    table = LiveTable(jobs)
    logged(run.config.run_folder, {"step": 1, "val/loss": 6.0})
    assert text(table)[1].endswith("1 of 8  6.0000")
    logged(
        run.config.run_folder,
        {"step": 1, "val/loss": 6.0},
        *({"step": step, "train/loss": 5.0} for step in range(2, 3000)),
    )
    assert "val/loss" not in last_logged(run.config.run_folder / "metrics.jsonl")
    assert text(table)[1].endswith("2999 of 8  6.0000")


class Terminal(io.StringIO):
    """Standard output that is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("output", "progress", "shown"),
    [(Terminal, "auto", True), (Terminal, "lines", False), (io.StringIO, "auto", False)],
)
def test_the_table_is_for_terminals_and_leaves_them_as_they_were(work, monkeypatch, output, progress, shown):
    jobs, out = work(progress, tune=None), output()
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
    assert "trial: 0 of the 4 runs known so far ended" in output_text
    assert output_text.rindex("\x1b[?25h") > output_text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert sys.stdout is out
