"""Which process of a run this is: every launcher's environment, and those that no launcher made."""

import pytest

from lm.config.training_config import TrainerConfig
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.training.launcher import RANKS, process_rank
from lm.training.train import train

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
SRUN = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    """A function that sets variables, in an environment that names no process."""
    names = ("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_NAME")
    for name in (*RANKS, *names):
        monkeypatch.delenv(name, raising=False)

    def set_to(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


def rank(devices: int, num_nodes: int = 1) -> int:
    return process_rank(Config(trainer=TrainerConfig(devices=devices, num_nodes=num_nodes)))


@pytest.mark.parametrize(
    ("expected", "devices", "nodes", "variables"),
    [
        pytest.param(0, 1, 1, {}, id="alone"),
        pytest.param(0, 2, 1, {}, id="Lightning starts the others"),
        pytest.param(1, 2, 1, {"WORLD_SIZE": "2", "NODE_RANK": "0", "LOCAL_RANK": "1"}, id="Lightning's child"),
        pytest.param(0, 1, 1, {"LOCAL_RANK": "0", "NODE_RANK": "0"}, id="after Lightning's children have ended"),
        pytest.param(0, 1, 1, {"RANK": "0", "WORLD_SIZE": "1"}, id="a container that says it is alone"),
        pytest.param(0, 2, 1, {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, id="torchrun, first"),
        pytest.param(1, 2, 1, {**TORCHRUN, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, id="torchrun, second"),
        pytest.param(
            3, 2, 2, {**TORCHRUN, "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1"}, id="torchrun, second machine"
        ),
        pytest.param(
            2, 1, 4, {**TORCHRUN, **SRUN, "WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            id="torchrun in an srun",
        ),
        pytest.param(2, 2, 2, {"WORLD_SIZE": "4", "NODE_RANK": "1"}, id="by hand on the second machine, where Lightning starts the other"),
        pytest.param(0, 2, 1, {**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, id="srun, first"),
        pytest.param(1, 2, 1, {**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, id="srun, second"),
        pytest.param(0, 1, 1, {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, id="sbatch of one task"),
        pytest.param(0, 2, 1, {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, id="interactive SLURM"),
    ],
)  # fmt: skip
def test_the_rank_is_the_launchers(environment, expected: int, devices: int, nodes: int, variables: dict[str, str]):
    environment(**variables)
    assert rank(devices, nodes) == expected


STRAY = "no launcher of several processes gave this rank: there is no WORLD_SIZE; unset it"


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_without_a_launcher_is_refused(environment, name: str):
    environment(**{name: "1"})
    with pytest.raises(ConfigError, match=f"{name} = 1: {STRAY}, or start with torchrun or srun"):
        rank(1)


@pytest.mark.parametrize("name", [*RANKS, "WORLD_SIZE", "SLURM_NTASKS"])
@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5"])
def test_a_rank_that_is_no_number_is_refused(environment, name: str, value: str):
    environment(**{name: value})
    with pytest.raises(ConfigError, match=f"^{name} = '{value}': .* unset it"):
        rank(1)


@pytest.mark.parametrize(
    ("devices", "variables", "words"),
    [
        pytest.param(2, {"LOCAL_RANK": "0"}, f"LOCAL_RANK = 0: {STRAY}", id="Lightning would wait for others"),
        pytest.param(2, {"RANK": "0"}, f"RANK = 0: {STRAY}", id="Lightning's children would inherit it"),
        pytest.param(1, {"WORLD_SIZE": "1", "RANK": "1"}, "RANK = 1: no launcher gave this rank of 1 processes", id="beyond one process"),
        pytest.param(2, {"WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK = 2: no launcher gave this rank of 2", id="beyond two"),
        pytest.param(2, {"WORLD_SIZE": "2", "RANK": "1"}, "RANK = 1: no launcher gave this rank of 2", id="not torchrun's"),
        pytest.param(1, {**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "1"}, "SLURM_PROCID = 1: no launcher", id="beyond srun's"),
        pytest.param(1, {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, f"SLURM_PROCID = 1: {STRAY}", id="salloc"),
        pytest.param(1, {"WORLD_SIZE": "2", "RANK": "1"}, "trainer.devices = 1: .* the launcher started 2", id="more than configured"),
        pytest.param(1, {**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "trainer.devices = 1: .* the launcher", id="more than in srun"),
        pytest.param(2, {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_NTASKS = 2: .*--ntasks-per-node", id="srun, not by machine"),
    ],
)  # fmt: skip
def test_processes_that_do_not_fit_together_are_refused(environment, devices: int, variables: dict[str, str], words: str):
    environment(**variables)
    with pytest.raises(ConfigError, match=f"^{words}"):
        rank(devices)


def test_a_refused_rank_leaves_nothing_behind(tiny, environment):
    environment(RANK="1")
    with pytest.raises(ConfigError, match=r"^RANK = 1"):
        train(tiny("name=stray"))
    assert not tiny("name=stray").run_folder.exists()
