"""Which process of a run this is: the environment of each launcher, and environments that contradict themselves."""

import os
import signal
import subprocess
import sys

import pytest
from folders import is_group_alive

from lm.config.training_config import TrainerConfig
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.training.launcher import PARENT_ID_VARIABLE, Process, this_process
from lm.training.train import train

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
SRUN = {
    "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    """A function that sets variables, in an environment that names no process."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    for name in (*ranks, *SRUN, "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def set_to(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


def process(devices: int, num_nodes: int = 1) -> Process:
    return this_process(Config(trainer=TrainerConfig(devices=devices, num_nodes=num_nodes)))


@pytest.mark.parametrize(
    ("launcher", "expected", "devices", "nodes", "variables"),
    [
        pytest.param("lightning", 0, 1, 1, {}, id="alone"),
        pytest.param("lightning", 1, 2, 1, {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_RANK": "1"},
            id="Lightning's child"),
        pytest.param("lightning", 0, 1, 1, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, id="sbatch of four tasks"),
        pytest.param(
            "torchrun", 3, 2, 2, {**TORCHRUN, "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"},
            id="torchrun, second machine",
        ),
        pytest.param("srun", 0, 2, 1, {**SRUN, "SLURM_PROCID": "0"}, id="srun, first"),
        pytest.param("lightning", 0, 2, 1, {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
            id="sbatch of two tasks, which Lightning starts"),
    ],
)  # fmt: skip
def test_rank_and_launcher_are_those_of_the_environment(
    environment, launcher: str, expected: int, devices: int, nodes: int, variables: dict[str, str]
):
    environment(**variables)
    actual = process(devices, nodes)
    assert (actual.rank, actual.launcher) == (expected, launcher)


@pytest.mark.parametrize(
    ("devices", "variables", "words"),
    [
        pytest.param(2, {"LOCAL_RANK": "0"}, "LOCAL_RANK = '0': no launcher gave this rank", id="a stray rank"),
        pytest.param(2, {**TORCHRUN, "WORLD_SIZE": "2"}, "RANK = null: must be a whole", id="torchrun without RANK"),
        pytest.param(2, SRUN, "SLURM_PROCID = null: must be a whole number", id="srun without SLURM_PROCID"),
        pytest.param(2, {**SRUN, "SLURM_PROCID": "1", "SLURM_NNODES": "2"}, "SLURM_NNODES = '2': must be 1",
            id="srun over two machines"),
        pytest.param(2, {**SRUN, "SLURM_PROCID": "2"}, "SLURM_PROCID = '2': there are 2", id="beyond the last task"),
        pytest.param(1, {"WORLD_SIZE": "2"}, "WORLD_SIZE = '2': must be 1, as trainer.devices = 1", id="too many"),
    ],
)  # fmt: skip
def test_processes_that_do_not_fit_together_are_refused(
    environment, devices: int, variables: dict[str, str], words: str
):
    environment(**variables)
    with pytest.raises(ConfigError, match=f"^{words}"):
        process(devices)


def test_a_refused_rank_leaves_nothing_behind(tiny, environment):
    environment(LOCAL_RANK="1")
    with pytest.raises(ConfigError, match=r"^LOCAL_RANK = '1'"):
        train(tiny("name=stray"))
    assert not tiny("name=stray").run_folder.exists()


CHILD = """
import time
from lm.training.launcher import Process, end_with_parent
end_with_parent(Process(1, "lightning", is_child=True))
print("started", flush=True)
time.sleep(60)
"""
PARENT = """
import os, signal, subprocess, sys
from lm.training.launcher import Process, end_with_parent
end_with_parent(Process(0, "lightning"))
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "LOCAL_RANK": "1"},
    stdout=subprocess.PIPE)
child.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_process_ends_soon_after_the_one_that_started_it_was_killed():
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], start_new_session=True)
    assert process.wait() == -signal.SIGKILL
    assert not is_group_alive(process.pid)


@pytest.mark.slow
def test_a_process_whose_parent_is_gone_before_it_begins_ends():
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = {**os.environ, "LOCAL_RANK": "1", PARENT_ID_VARIABLE: str(gone.pid)}
    assert subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=50).returncode == 1
