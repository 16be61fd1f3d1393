"""A/A experiments: the baseline against itself with other seeds, by the procedure of the experiment."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import lm
from fabricated import finish_all
from test_experiments import here, overrides  # noqa: F401
from trials import written

from lm.experiments.engine import Jobs
from lm.experiments.experiment_folder import noise, open_experiment, start
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Slots
from lm.experiments.summary import summary_lines
from lm.runs.folder import read_json
from lm.statistics.verdicts import ALPHA, FEWEST_SEEDS, POWER, detectable, power

pytestmark = pytest.mark.usefixtures("inline")
GRID = {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]}


def loss(run: Run) -> float:
    """Noise by seed, best at 2e-2."""
    return 5.0 + abs((run.rate or run.config.optim.lr) - 2e-2) + 1e-3 * math.sin(run.config.seed)


def used(procedure: Procedure, arm: str) -> list[int]:
    return sorted({run.config.seed for run in procedure.known() if run.arm == arm})


@pytest.mark.parametrize("tune", [None, GRID], ids=["untuned", "tuned"])
def test_the_second_arm_is_the_baseline_with_seeds_used_nowhere(tmp_path, arguments, tune):
    path = written(tmp_path, tune=tune, seeds=[1, 2, 3])
    ours, data = [], arguments[1:]
    original = finish_all(open_experiment(path, data), loss)
    made = finish_all(open_experiment(path, data, aa=True), loss)
    assert made.experiment.folder.name == "trial-aa"
    assert made.experiment.command.endswith(" --aa")
    assert [one.name for one in made.experiment.arms] == ["softmax", "softmax-again"]
    ours = used(made, "softmax-again")
    assert not {*ours} & {run.config.seed for run in original.known()}
    assert len(ours) == len(used(made, "softmax")) == 3
    baseline = {run.seed: run for run in original.final("") if run.arm == "softmax"}
    for run in made.final(""):
        theirs = baseline[run.seed].config
        assert run.config.optim == theirs.optim, "its rate, too"
        assert run.config.model == theirs.model
        assert run.label.endswith(f"seed {run.config.seed}")
        assert f"seed{run.config.seed}-" in run.config.name
    assert {run.stage for run in made.known()} == {"final"}, "what the experiment's tuning has chosen is not tuned again"
    differences = [math.sin(seed + 1000) - math.sin(seed) for seed in (1, 2, 3)]
    spread = 1e-3 * np.std(differences, ddof=1)
    (said,) = noise(made, made.judged())
    assert f"a standard deviation of {spread:.2g} over 3 seeds" in said
    assert f"the 3 seeds of trial find a difference of {detectable(3, spread, ALPHA):.2g} with probability 0.8" in said
    verdict = summary_lines(made)[1]["verdict"]
    assert said.endswith(f"the verdict, `{summary_lines(made)[1]['words']}`, held")
    assert verdict in ("undecided", "no difference above margin")
    assert not noise(original, original.judged())


def test_without_rates_both_are_tuned_and_it_stays_so(tmp_path, arguments):
    path = written(tmp_path, tune=GRID)
    folder = start(path, arguments[1:], aa=True).experiment.folder
    assert read_json(folder / "resolved.json")["rates"] is None
    finish_all(open_experiment(path, arguments[1:]), loss)
    made = finish_all(open_experiment(path, arguments[1:], aa=True), loss)
    assert {run.stage for run in made.known()} == {"tune", "final"}, "as at its first start, whatever the experiment has found since"
    tuned = {run.config.seed for run in made.known() if run.stage == "tune"}
    assert tuned == {101, 102, 1101, 1102}


def test_rates_are_those_of_the_first_start(tmp_path, arguments):
    path = written(tmp_path, tune=GRID)
    original = finish_all(open_experiment(path, arguments[1:]), loss)
    made = start(path, arguments[1:], aa=True)
    names = [run.config.name for run in made.known()]
    assert read_json(made.experiment.folder / "resolved.json")["rates"] == {"": 2e-2}
    for run in original.known():
        if run.stage == "tune":
            (run.config.run_folder / "checkpoints" / f"step-{run.outcome.last_step:06d}.ckpt").unlink()
    assert [run.config.name for run in open_experiment(path, arguments[1:], aa=True).known()] == names


def test_arms_that_are_not_equal_are_found(tmp_path, arguments):
    path = written(tmp_path, tune=None, seeds=[1, 2, 3])
    made = finish_all(open_experiment(path, arguments[1:], aa=True), lambda run: loss(run) + (run.config.seed > 1000))
    assert noise(made, made.judged())[0].endswith("the verdict, `worse by more than 0.05 (3 seeds)`, is false")


def test_single_runs_say_nothing_yet(tmp_path, arguments):
    made = finish_all(open_experiment(written(tmp_path, tune=None, seeds=[1]), arguments[1:], aa=True), loss)
    assert noise(made, made.judged()) == ["noise: the verdict, `incomplete: a verdict takes 3 seeds`, says nothing of equal arms yet"]


def test_from_the_command_line_with_its_report(tmp_path, overrides):  # noqa: F811
    path = written(tmp_path, tune=None)
    planned = lm("compare", str(path), *overrides, "--aa", "--plan")
    assert "experiment trial-aa in " in planned.stdout, planned.stderr
    Jobs(start(path, overrides, aa=True), Slots(1), here).work()
    done = lm("compare", str(path), *overrides, "--aa", "--report-only")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "trial-aa"
    notes = json.loads((folder / "verdicts.json").read_text())["notes"]
    (said,) = [one for one in notes if one.startswith("noise: single differences between equal arms have a standard deviation of ")]
    assert said in done.stdout
    assert said in (folder / "report" / "report.html").read_text()
    assert not Path(tmp_path / "runs" / "trial").exists()


@pytest.mark.parametrize("seeds", [2, 3, 5, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_what_is_detectable_has_the_power_that_is_said(seeds, alpha):
    found = detectable(seeds, 0.3, alpha)
    assert power(seeds, 0.3, found, alpha) == pytest.approx(POWER, abs=1e-4)
    assert detectable(seeds, 0.0, alpha) == 0
    assert detectable(1, 0.3) == math.inf
    assert FEWEST_SEEDS > 1
