"""Learning rates from a committed table: `tuning.csv` of one experiment, `tune.table` of another."""

import math
from pathlib import Path

import pytest
from fabricated import finish_all_runs
from trials import procedure_of

from lm.errors import ConfigError
from lm.experiments.procedure import Procedure, Run

ARMS = {arm: {"model.normalizer": arm} for arm in ("softmax", "ssmax", "log_n")}
GRID = {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]}
BEST = {"softmax": 2e-2, "ssmax": 4e-2, "log_n": 2e-2}


def loss(run: Run) -> float:
    """A bowl over rates for each arm; SSMax is better by 0.1, and more so at its own rate."""
    return 5 - 0.1 * (run.arm == "ssmax") + 0.2 * math.log2(run.rate / BEST[run.arm]) ** 2 + 1e-3 * run.seed


def experiment(folder: Path, **changes: object) -> Procedure:
    """An experiment of three arms and seeds, tuned on a grid, or a changed one."""
    return procedure_of(folder, **({"arms": ARMS, "seeds": [1, 2, 3], "primary": None, "tune": GRID} | changes))


@pytest.fixture(scope="module")
def on_a_grid(tmp_path_factory) -> Procedure:
    """An experiment that was tuned on a grid."""
    return finish_all_runs(experiment(tmp_path_factory.mktemp("grid")), loss)


@pytest.fixture
def table(tmp_path, on_a_grid) -> Path:
    """Its table, beside the file of another experiment."""
    path = tmp_path / "rates.csv"
    path.write_text(on_a_grid.tuning_runs("").to_csv(index=False))
    return path


def test_a_table_chooses_the_rates_that_the_grid_chose(tmp_path, table, on_a_grid):
    assert on_a_grid.rate_choice("").judged_rates == BEST
    by_table = finish_all_runs(experiment(tmp_path, tune={"table": "rates.csv"}), loss)
    assert by_table.rate_choice("").judged_rates == BEST
    assert by_table.tuning_runs("").equals(on_a_grid.tuning_runs(""))
    assert {run.stage for run in by_table.known_runs()} == {"final"}
    assert {run.config.name for run in by_table.known_runs()} < {run.config.name for run in on_a_grid.known_runs()}
    assert by_table.judgement().summary_rows() == on_a_grid.judgement().summary_rows()
    assert by_table.notes() == on_a_grid.notes()
    assert {*on_a_grid.tuning_runs("")["seed"]} == {101, 102}


def test_final_seeds_choose_no_rates(tmp_path, table):
    with pytest.raises(
        ConfigError, match=r"tune.table = \[102\]: are final seeds; the runs that choose a rate must not judge it"
    ):
        experiment(tmp_path, tune={"table": "rates.csv"}, seeds=[1, 2, 102])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace("log_n,", "log,"),
            "tune.table = 'rates.csv': has not runs of log_n with the seeds that softmax has",
        ),
        (
            lambda text: text.replace("ssmax,optim.lr,0.02,102,", "ssmax,optim.lr,0.02,103,"),
            "has not runs of ssmax with the seeds that softmax has",
        ),
        (
            lambda text: text.replace("optim.lr", "optim.grad_clip"),
            "tune.key = 'optim.lr': the table rates.csv is of optim.grad_clip",
        ),
        (lambda text: text.replace("arm,", "arms,"), "rates.csv: is no tuning table: it needs columns size, arm"),
    ],
)
def test_a_wrong_table_is_refused_in_words(tmp_path, table, change, message):
    table.write_text(change(table.read_text()))
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, tune={"table": "rates.csv"})


def test_a_table_that_is_not_there_and_one_beside_a_grid_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: No such file or directory \(tune\.table\)"):
        experiment(tmp_path, tune={"table": "none.csv"})
    with pytest.raises(ConfigError, match=r"tune\.table = 'none.csv': the rates would be chosen twice"):
        experiment(tmp_path, tune={"table": "none.csv", "grid": [1e-3, 2e-3]})


def test_a_grid_that_would_leave_the_key_s_range_ends_not_tuned(tmp_path):
    procedure = experiment(tmp_path, tune={"key": "optim.optimizer.beta1", "grid": [0.3, 0.6], "seeds": [101, 102]})
    finish_all_runs(procedure, lambda run: 2 - run.rate)
    assert {run.rate for run in procedure.known_runs()} == {0.3, 0.6}
    assert [line["verdict"] for line in procedure.judgement().summary_rows()[1:]] == ["not tuned"] * 2
