"""How long experiments take, by ended runs."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fabricated import finish, finish_all
from manifests import put

from lm.experiments.experiment_file import read_experiment
from lm.experiments.plan import costs, plan_lines, run_times, total_seconds
from lm.experiments.procedure import Procedure
from lm.experiments.slots import Slots

FILE = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2, 3],
}


def experiment(folder: Path, name: str = "trial", **changes: object) -> Procedure:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
    return Procedure(read_experiment(path, ["data.source.paths=[.]", f"runs={folder / 'runs'}"]))


def took(procedure: Procedure, seconds: float, begin: float, step: int = 0) -> None:
    """Let the finished runs of an experiment have taken so long since their start at a step, and each step 5 s."""
    for run in procedure.known_runs():
        if run.outcome.ended:
            begun = [(0, begin - 1e6)] * bool(step) + [(step, begin)]
            starts = [
                {"step": step_of_start, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))}
                for step_of_start, moment in begun
            ]
            put(run.config.run_folder / "environment.json", {"starts": starts})
            logged = [
                json.dumps({"step": step_of_line, "elapsed_s": 5.0 * step_of_line})
                for step_of_line in range(1, run.outcome.last_step + 1)
            ]
            (log := run.config.run_folder / "metrics.jsonl").write_text("\n".join(logged) + "\n")
            os.utime(log, (begin + seconds, begin + seconds))


def test_time_is_that_of_the_runs_that_have_ended(tmp_path):
    procedure = experiment(tmp_path, sizes={"small": {}, "large": {"trainer.max_steps": 16}})
    assert not run_times(procedure.known_runs(), costs(procedure)), "not known before the first run has ended"
    for run in procedure.known_runs():
        if run.size == "small" and run.arm == "softmax":
            finish(run, 5.0)
    procedure = Procedure(procedure.experiment)
    took(procedure, 60, 1e9)
    times = run_times(procedure.known_runs(), costs(procedure))
    assert times["small", "softmax"] == pytest.approx(60)
    assert times["small", "ssmax"] == pytest.approx(60, rel=0.01), "by FLOPs"
    assert times["large", "softmax"] == pytest.approx(120, rel=0.01)
    assert total_seconds(procedure, times, Slots(2)) == pytest.approx((3 * 60 + 6 * 120) / 2, rel=0.01), (
        "three are done"
    )
    for step in (2, 7, 8):
        took(procedure, 60 - 5 * step, 1e9, step)
        seconds_of_run = run_times(procedure.known_runs(), costs(procedure))["small", "softmax"]
        assert seconds_of_run == pytest.approx(60), (
            f"20 s of start and evaluations, and 5 s a step, {step} of eight of which were made before"
        )


def test_an_arm_that_is_not_trained_has_no_tuning_runs(tmp_path):
    arms = {
        "softmax": {"model.normalizer": "softmax"},
        "as-it-is": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
    }
    procedure = experiment(tmp_path, arms=arms, tune={"grid": [1e-3, 2e-3, 4e-3], "seeds": [101, 102]})
    lines = "\n".join(plan_lines(procedure, costs(procedure), "unknown"))
    assert "\n12 runs (3 of them are measured without training), " in lines
    times = {("", "softmax"): 60.0, ("", "as-it-is"): 10.0}
    assert total_seconds(procedure, times, Slots(1)) == 9 * 60 + 3 * 10
    assert len(finish_all(procedure, lambda run: 5 + abs(run.rate - 2e-3)).known_runs()) == 12
