"""Experiments that tune two keys together: their grid, its edges, tables, pages, and what goes on after the file has
changed.
"""

import math

import pytest
import yaml
from fabricated import finish_all, write_page
from manifests import put
from test_experiment_page import FILE as PAGE_FILE
from test_experiment_page import finish_all as build_all
from test_experiment_page import rows, text_of
from trials import TWO_ARMS, procedure_of, written

import lm
from lm.config.load import to_yaml
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import open_experiment, start
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import summary_entries, tuning_means, tuning_table_rows
from lm.report.tables import csv_text
from lm.runs.folder import CONFIG

DECAY = "optim.optimizer.weight_decay"
TUNE = {"key": ["optim.lr", DECAY], "grid": [[1e-2, 2e-2, 4e-2], [0.05, 0.1, 0.2, 0.4]], "seeds": [101, 102]}
FILE = {"seeds": [1, 2, 3], "tune": TUNE}
BEST = {"softmax": (2e-2, 0.1), "ssmax": (2e-2, 0.2)}


def loss(run: Run, best: dict[str, tuple[float, float]] = BEST) -> float:
    """A bowl over both keys for each arm; SSMax is better by 0.1."""
    optim = run.config.optim
    squares = [
        math.log2(value / centre) ** 2
        for value, centre in zip((optim.lr, optim.optimizer.weight_decay), best[run.arm], strict=True)
    ]
    return 5 - 0.1 * (run.arm == "ssmax") + 0.2 * sum(squares) + 1e-3 * run.seed * (1 + (run.arm == "ssmax"))


@pytest.fixture(scope="module")
def on_a_grid(tmp_path_factory) -> Procedure:
    """An experiment that was tuned on a grid of 3 rates and 4 weight decays."""
    procedure = finish_all(procedure_of(tmp_path_factory.mktemp("grid"), **FILE), loss)
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


def test_the_table_of_tuning_has_both_keys_and_chooses_the_same_pairs(tmp_path, on_a_grid):
    table = tuning_table_rows(on_a_grid)
    assert {(line["key"], type(line["rate"])) for line in table} == {(f"optim.lr / {DECAY}", str)}
    (tmp_path / "rates.csv").write_text(csv_text(table))
    by_table = finish_all(procedure_of(tmp_path, **FILE | {"tune": {"key": TUNE["key"], "table": "rates.csv"}}), loss)
    assert by_table.choice("").rates == BEST
    assert {run.stage for run in by_table.known_runs()} == {"final"}
    assert (by_table.tuning_runs(""), tuning_means(by_table)) == (on_a_grid.tuning_runs(""), tuning_means(on_a_grid))
    assert not [note for note in by_table.notes() if "another configuration" in note]


def test_a_changed_grid_is_said_beside_the_verdicts(tmp_path, arguments):
    procedure = start(written(tmp_path, **FILE), arguments[1:])
    finish_all(procedure, loss)
    for run in procedure.known_runs():
        put(run.config.run_folder / CONFIG, to_yaml(run.config))
    other_tune = TUNE | {"grid": [[1e-2, 2e-2, 4e-2], [0.05, 0.1, 0.2]]}
    changed = open_experiment(written(tmp_path, **FILE | {"tune": other_tune}), arguments[1:])
    grid = "[[0.01, 0.02, 0.04], [0.05, 0.1, 0.2, 0.4]], is [[0.01, 0.02, 0.04], [0.05, 0.1, 0.2]]"
    assert changed.plan_notes == [f"changed since the plan: tune.grid was {grid}"]
    assert not changed.exploratory


@pytest.mark.slow
def test_the_page_has_a_panel_for_each_key(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.report.pictures._render", lambda *arguments: "<svg />")
    file = PAGE_FILE | {"arms": TWO_ARMS["arms"], "tune": TUNE}
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
