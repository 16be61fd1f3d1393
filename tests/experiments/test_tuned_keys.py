"""Experiments that tune two keys together: their grid, its edges, tables, pages, and what goes on after the file has
changed.
"""

import math
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fabricated import finish_all, write_page
from manifests import put
from test_experiment_page import FILE as PAGE_FILE
from test_experiment_page import finish_all as build_all
from test_experiment_page import rows, text_of

import lm
from lm.config.load import to_yaml
from lm.experiments.compare import plan_lines
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import open_experiment, start
from lm.experiments.loop import Slots
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import summary_entries, tuning_means, tuning_table_rows
from lm.report.tables import csv_text
from lm.runs.folder import CONFIG

DECAY = "optim.optimizer.weight_decay"
TUNE = {"key": ["optim.lr", DECAY], "grid": [[1e-2, 2e-2, 4e-2], [0.05, 0.1, 0.2, 0.4]], "seeds": [101, 102]}
FILE = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2, 3],
    "tune": TUNE,
}
BEST = {"softmax": (2e-2, 0.1), "ssmax": (2e-2, 0.2)}


def loss(run: Run, best: dict[str, tuple[float, float]] = BEST) -> float:
    """A bowl over both keys for each arm; SSMax is better by 0.1."""
    optim = run.config.optim
    squares = [
        math.log2(value / centre) ** 2
        for value, centre in zip((optim.lr, optim.optimizer.weight_decay), best[run.arm], strict=True)
    ]
    return 5 - 0.1 * (run.arm == "ssmax") + 0.2 * sum(squares) + 1e-3 * run.seed * (1 + (run.arm == "ssmax"))


def experiment(folder: Path, *overrides: str, **changes: object) -> Procedure:
    """The experiment of FILE with some keys changed, its runs in `folder`."""
    return Procedure(read_experiment(written(folder, **changes), [*given(folder), *overrides]))


def written(folder: Path, **changes: object) -> Path:
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
    return path


def given(folder: Path) -> list[str]:
    return ["data.source.paths=[.]", f"runs={folder / 'runs'}"]


@pytest.fixture(scope="module")
def on_a_grid(tmp_path_factory) -> Procedure:
    """An experiment that was tuned on a grid of 3 rates and 4 weight decays."""
    procedure = finish_all(experiment(tmp_path_factory.mktemp("grid")), loss)
    for run in procedure.known_runs():
        put(run.config.run_folder / CONFIG, to_yaml(run.config))
    return procedure


def test_each_arm_is_judged_at_its_best_pair(on_a_grid):
    assert on_a_grid.choice("").rates == BEST
    tuning = [run for run in on_a_grid.known_runs() if run.stage == "tune"]
    assert len(tuning) == 2 * 3 * 4 * 2
    assert {(run.config.optim.lr, run.config.optim.optimizer.weight_decay) for run in tuning} == {
        run.rate for run in tuning
    }
    softmax, ssmax = summary_entries(on_a_grid)
    assert (softmax["rate"], ssmax["rate"], ssmax["verdict"]) == ("0.02 / 0.1", "0.02 / 0.2", "better")
    assert set(ssmax["means_by_rate"]) == {"0.02 / 0.2", "0.02 / 0.1"}
    assert "ssmax: final seeds are trained at 0.02 / 0.1 and 0.02 / 0.2, as tuning chose" in "\n".join(
        on_a_grid.notes()
    )


def test_the_plan_counts_the_runs_of_all_pairs(tmp_path):
    lines = "\n".join(plan_lines(experiment(tmp_path), Slots(1)))
    values = "0.05, 0.1, 0.2, 0.4 (12 together)"
    assert (
        f"tuning optim.lr over 0.01, 0.02, 0.04 and {DECAY} over {values} with seeds 101, 102; final seeds 1, 2, 3"
        in lines
    )
    assert f"{2 * (12 * 2 + 2 * 3)} runs, " in lines
    assert "done: 0 of the 48 runs known so far" in lines


def test_the_table_of_tuning_has_both_keys_and_chooses_the_same_pairs(tmp_path, on_a_grid):
    table = tuning_table_rows(on_a_grid)
    assert {(line["key"], type(line["rate"])) for line in table} == {(f"optim.lr / {DECAY}", str)}
    (tmp_path / "rates.csv").write_text(csv_text(table))
    by_table = finish_all(experiment(tmp_path, tune={"key": TUNE["key"], "table": "rates.csv"}), loss)
    assert by_table.choice("").rates == BEST
    assert {run.stage for run in by_table.known_runs()} == {"final"}
    assert (by_table.tuning_runs(""), tuning_means(by_table)) == (on_a_grid.tuning_runs(""), tuning_means(on_a_grid))
    assert not [note for note in by_table.notes() if "another configuration" in note]


def test_a_grid_that_changed_keeps_the_runs_that_it_still_has(tmp_path, on_a_grid):
    folder = tmp_path / "runs"
    folder.symlink_to(on_a_grid.experiment.folder.parent)
    before = {run.config.name for run in on_a_grid.known_runs() if run.outcome.ended}
    coarser = experiment(tmp_path, tune=TUNE | {"grid": [[1e-2, 2e-2, 4e-2], [0.1, 0.2, 0.3]]})
    unfinished = {run.rate for run in coarser.known_runs() if not run.outcome.ended}
    assert unfinished == {(rate, 0.3) for rate in (1e-2, 2e-2, 4e-2)}, "the others were trained"
    assert {run.config.name for run in coarser.known_runs() if run.outcome.ended} < before


def test_a_changed_grid_is_said_beside_the_verdicts(tmp_path, arguments):
    procedure = start(written(tmp_path), arguments[1:])
    finish_all(procedure, loss)
    for run in procedure.known_runs():
        put(run.config.run_folder / CONFIG, to_yaml(run.config))
    other_tune = TUNE | {"grid": [[1e-2, 2e-2, 4e-2], [0.05, 0.1, 0.2]]}
    changed = open_experiment(written(tmp_path, tune=other_tune), arguments[1:])
    grid = "[[0.01, 0.02, 0.04], [0.05, 0.1, 0.2, 0.4]], is [[0.01, 0.02, 0.04], [0.05, 0.1, 0.2]]"
    assert changed.plan_notes == [f"changed since the plan: tune.grid was {grid}"]
    assert not changed.exploratory


@pytest.mark.slow
def test_the_page_has_a_panel_for_each_key(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.report.pictures._render", lambda *arguments: "<svg />")
    file = PAGE_FILE | {"arms": FILE["arms"], "tune": TUNE}
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    keys = [
        "data.source.paths=[texts]",
        "trainer.max_steps=200",
        "data.seq_len=64",
        "optim.batch_tokens=8192",
        f"runs={tmp_path / 'runs'}",
    ]
    procedure = build_all(Procedure(read_experiment(tmp_path / "trial.yaml", keys)), loss)
    page = write_page([procedure], tmp_path / "out")
    words = text_of(page)
    assert f"optim.lr / {DECAY} was chosen for each arm by the lowest mean val/loss" in words
    assert "softmax 0.02 / 0.1, ssmax 0.02 / 0.2" in words
    panels = rows(page.parent / "rates.csv")
    first, second = "Tuning runs, by optim.lr", f"Tuning runs, by {DECAY}"
    assert {first, second} < {row["panel"] for row in panels}
    means = {float(row["x"]): float(row["y"]) for row in panels if (row["panel"], row["of"]) == (second, "ssmax, mean")}
    assert min(means, key=means.get) == 0.2
    frame = lm.results(tmp_path / "runs")
    assert "0.02 / 0.2" in set(frame["rate"])
    line = lm.judge(frame, metric="val/loss", matters=0.02, baseline="softmax").set_index("arm").loc["ssmax"]
    assert (line["rate"], line["verdict"]) == ("0.02 / 0.2", "better")
