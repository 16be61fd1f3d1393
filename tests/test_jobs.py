"""Runs of experiments in processes of their own: started, stopped, killed, and gone on with."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fabricated import finish
from folders import losses

from lm.errors import RunError
from lm.experiments.definition import read_experiment
from lm.experiments.jobs import Jobs, Stopped
from lm.experiments.procedure import Procedure
from lm.training.train import find_checkpoint

FILE = {
    "base": str(ROOT / "tests" / "tiny.yaml"),
    "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
    "seeds": [1, 2],
    "primary": {"matters": 0.05},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(FILE, sort_keys=False))
    return path


@pytest.fixture
def overrides(arguments: list[str]) -> list[str]:
    """Runs of seconds, with a checkpoint often."""
    return [*arguments[1:], "trainer.max_steps=60", "trainer.checkpoint_every=5", "eval.every=60", "optim.batch_tokens=512"]


def with_one_run_left(file: Path, overrides: list[str]) -> Procedure:
    """An experiment all runs of which but the first are finished."""
    procedure = Procedure(read_experiment(file, overrides))
    for run in procedure.known()[1:]:
        finish(run, 5.0)
    return procedure


def child_of(folder: Path, step: int) -> int:
    """The process that trains in a run folder, once it has saved this step."""
    while not (folder / "checkpoints" / f"step-{step:06d}.ckpt").exists():
        time.sleep(0.01)
    (claim,) = (folder.parent / "claims").glob(f"{folder.name}.*")
    return json.loads(claim.read_text())["child"]


def test_a_run_killed_between_its_first_checkpoint_and_the_link_to_it_goes_on(tiny):
    config = tiny("name=killed", "resume=auto")
    checkpoints = config.run_folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert find_checkpoint(config) is None
    first = checkpoints / "step-000004.ckpt"
    first.touch()
    assert find_checkpoint(config) == first
    (checkpoints / "step-000008.ckpt").touch()
    with pytest.raises(RunError, match=r"last\.ckpt: missing, but the run has other checkpoints; go on .*step-000008\.ckpt"):
        find_checkpoint(config)


def test_a_killed_run_goes_on_from_its_last_checkpoint(file, overrides):
    procedure = with_one_run_left(file, overrides)
    folder = procedure.known()[0].config.run_folder
    killer = threading.Thread(target=lambda: os.kill(child_of(folder, 5), signal.SIGKILL))
    killer.start()
    with pytest.raises(RunError, match=r"1 runs failed \(softmax-seed1-.*killed by SIGKILL.*the same command goes on"):
        Jobs(procedure, 1).work()
    killer.join()
    assert not procedure.known()[0].outcome.ended
    Jobs(procedure, 1).work()
    assert procedure.known()[0].outcome.state == "finished"
    assert len(losses(folder)) == 60
    starts = json.loads((folder / "environment.json").read_text())["starts"]
    assert len(starts) == 2
    assert starts[1]["step"] >= 5


@pytest.mark.slow  # 10 s
def test_a_stopped_experiment_saves_its_runs(file, overrides):
    procedure = with_one_run_left(file, [*overrides, "trainer.max_steps=3000", "trainer.checkpoint_every=500"])
    folder = procedure.known()[0].config.run_folder

    def stop() -> None:
        while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(Stopped, match=r"stopped by SIGTERM: 1 runs were asked to save and have ended; the same command goes on") as error:
        Jobs(procedure, 1).work()
    stopper.join()
    assert error.value.exit_code == 128 + signal.SIGTERM
    assert (folder / "checkpoints" / "last.ckpt").exists()
    (claim,) = (folder.parent / "claims").glob(f"{folder.name}.*")
    assert json.loads(claim.read_text())["released"]


@pytest.mark.slow  # 4 min
def test_killed_at_random_the_same_command_ends_with_the_same_numbers(file, overrides, tmp_path):
    drawn = random.Random(0)

    def start(runs: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "lm", "compare", str(file), *overrides, f"runs={runs}", "--jobs", "2"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def children(process: subprocess.Popen) -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False).stdout
        return [int(one) for one in found.split()]

    undisturbed = start(tmp_path / "undisturbed")
    assert not undisturbed.communicate()[1]
    assert undisturbed.returncode == 0
    kills = {"experiment": 0, "run": 0}
    for number in range(40):
        process = start(tmp_path / "killed")
        while process.poll() is None and not children(process):
            time.sleep(0.1)
        time.sleep(drawn.uniform(0, 8))  # starting, training, measuring, saving
        if process.poll() is not None:
            break
        if number % 2:
            process.send_signal(signal.SIGKILL)
            kills["experiment"] += 1
            process.communicate()
        else:
            if here := children(process):
                os.kill(drawn.choice(here), signal.SIGKILL)
                kills["run"] += 1
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            process.communicate()
    last = start(tmp_path / "killed")
    assert not last.communicate()[1]
    assert last.returncode == 0
    assert min(kills.values()) >= 3, kills
    folders = {where: tmp_path / where / "trial" for where in ("undisturbed", "killed")}
    verdicts = [json.loads((folder / "verdicts.json").read_text())["arms"] for folder in folders.values()]
    assert verdicts[0] == verdicts[1]
    for folder in folders["undisturbed"].glob("*-seed*"):
        assert losses(folder) == losses(folders["killed"] / folder.name)
