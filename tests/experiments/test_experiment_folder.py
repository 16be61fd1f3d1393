"""An experiment whose folder has runs of other overrides, and the command that goes on with them."""

import shlex
from pathlib import Path

import pytest
from conftest import lm
from fabricated import finish_all
from manifests import put
from trials import written

from lm.config.load import to_yaml
from lm.experiments.compare import PLAN, open_experiment
from lm.experiments.definition import plan_of, read_experiment
from lm.experiments.procedure import Procedure
from lm.runs.folder import CONFIG, RESOLVED_FILE

SHORT = ["trainer.max_steps=4", "optim.warmup_steps=1", "eval.every=2"]


@pytest.fixture
def runs(arguments: list[str]) -> str:
    return arguments[-1]


def ended(path: Path, overrides: list[str]) -> Procedure:
    """An experiment all of whose runs have ended, and its plan."""
    procedure = finish_all(Procedure(read_experiment(path, overrides)), lambda run: 5 + abs((run.rate or 0) - 2e-2))
    for run in procedure.known_runs():
        put(run.config.run_folder / CONFIG, to_yaml(run.config))
    settings = {PLAN: plan_of(procedure.experiment), "overrides": overrides}
    put(procedure.experiment.folder / RESOLVED_FILE, {"precision": 32, "compile": False, "threads": 1} | settings)
    return procedure


def command(error: str) -> list[str]:
    """The overrides of the command that a message gives."""
    words = shlex.split(error.partition("the command that goes on with them: ")[2].partition(";")[0].splitlines()[0])
    assert words[:2] == ["lm", "compare"], error
    return words[3:]


@pytest.mark.parametrize("tune", [None, {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]}], ids=["untuned", "tuned"])
def test_overrides_that_are_forgotten_are_said_with_the_command_that_has_them(
    tmp_path, arguments, runs, tune, monkeypatch
):
    monkeypatch.setattr("lm.experiments.page.experiment_files", lambda *_: {})
    path, data = written(tmp_path, tune=tune), arguments[1:]
    first = ended(path, [*data, *SHORT])
    note, *_ = open_experiment(path, data).notes()
    assert note.startswith("the runs here were started with other overrides; ")
    reopened = open_experiment(path, command(note))
    assert [run.config.run_folder for run in reopened.known_runs()] == [
        run.config.run_folder for run in first.known_runs()
    ]
    assert all(run.outcome.ended for run in reopened.known_runs())
    result = lm("compare", str(path), *data, "--report-only")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "the runs here were started with other overrides" in result.stderr, result.stderr
    planning = lm("compare", str(path), *data, "--plan")
    assert lm("compare", str(path), *command(planning.stdout), "--report-only").returncode == 0
    assert not open_experiment(path, [*data, *SHORT, "log.every=7"]).plan_notes, "the same runs"
    edited = open_experiment(written(tmp_path, tune=tune, seeds=[7]), [*data, *SHORT])
    assert not [note for note in edited.plan_notes if "other overrides" in note]
