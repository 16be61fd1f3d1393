"""Find this process's rank in its run from the environment variables of its launcher: torchrun, SLURM's srun, or
Lightning itself.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Literal

from lm.config.tree import Config
from lm.errors import ConfigError, Problem

# environment variable with the id of the process that starts the run's other processes
PARENT_ID_VARIABLE = "LM_STARTED_BY"


@dataclass(frozen=True)
class Process:
    """A process of a run has a rank among all processes, and a launcher that started them."""

    rank: int
    launcher: Literal["torchrun", "srun", "lightning"]
    is_child: bool = False  # whether Lightning, in another process of the run, started it


def this_process(config: Config) -> Process:
    """Return the rank and launcher of this process, from environment variables. Without a launcher they are 0 and
    `lightning`.

    SLURM's variables count only if srun has started several tasks: a batch script has them, too, from its allocation.
    `lm.training.fit` passes the launcher on to Lightning, so that Lightning doesn't guess it.

    Raises ConfigError: the number of processes differs from the configuration's, or variables of the launcher are
    missing, or variables of another launcher are left over.
    """
    devices, num_nodes, n_processes = config.trainer.devices, config.trainer.num_nodes, config.world_size
    if "TORCHELASTIC_RUN_ID" in os.environ:
        process, expected = Process(_environment_number("RANK"), "torchrun"), {"WORLD_SIZE": n_processes}
    elif _environment_number("SLURM_STEP_NUM_TASKS", "1") > 1:
        process = Process(_environment_number("SLURM_PROCID"), "srun")
        expected = {"SLURM_NTASKS": n_processes, "SLURM_NTASKS_PER_NODE": devices, "SLURM_NNODES": num_nodes}
    elif num_nodes > 1:
        reason, remedy = "needs a launcher on each machine", "use torchrun, see docs/running.md"
        raise ConfigError([Problem("trainer.num_nodes", num_nodes, reason, remedy)])
    elif "WORLD_SIZE" in os.environ:
        rank = _environment_number("LOCAL_RANK", "0")
        process, expected = Process(rank, "lightning", is_child=rank > 0), {"WORLD_SIZE": n_processes}
    elif "LOCAL_RANK" in os.environ:  # Lightning would wait for processes that nobody starts
        raise _variable_error("LOCAL_RANK", "no launcher gave this rank: there is no WORLD_SIZE")
    else:
        return Process(0, "lightning")
    for name, number in expected.items():
        if _environment_number(name) != number:
            reason = f"must be {number}, as trainer.devices = {devices} and trainer.num_nodes = {num_nodes}"
            raise _variable_error(name, reason)
    if process.rank >= n_processes:
        raise _variable_error("SLURM_PROCID" if process.launcher == "srun" else "RANK", f"there are {n_processes}")
    return process


def _environment_number(name: str, default: str | None = None) -> int:
    """Return the whole number in an environment variable, or `default` if the variable is unset. Raises ConfigError:
    there is no such number.
    """
    value = os.environ.get(name, default)
    if value is None or not value.isdecimal():
        raise _variable_error(name, "must be a whole number, as a launcher sets it")
    return int(value)


def _variable_error(name: str, reason: str) -> ConfigError:
    """Return the error for an environment variable that does not fit the configuration."""
    remedy = "unset it, or start with torchrun or srun (docs/running.md)"
    return ConfigError([Problem(name, os.environ.get(name), reason, remedy)])


def end_with_parent(process: Process) -> None:
    """If Lightning started this process, described by `process`, end it soon after its parent, another process of the
    run, has ended.

    Children of a killed parent would otherwise wait minutes for its tensors. In the parent, this function only stores
    the parent's id in an environment variable, which its children read.
    """
    if process.launcher != "lightning":
        return
    if not process.is_child:
        os.environ[PARENT_ID_VARIABLE] = str(os.getpid())
    elif starter := os.environ.get(PARENT_ID_VARIABLE):
        threading.Thread(target=_exit_without_parent, args=(int(starter),), daemon=True).start()


def _exit_without_parent(parent_id: int) -> None:
    """End this process at once when the process `parent_id` is no longer its parent."""
    while os.getppid() == parent_id:
        time.sleep(0.5)
    os._exit(1)
