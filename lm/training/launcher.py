"""This process's rank in its run, by the environment variables of its launcher: torchrun, SLURM's srun, or Lightning itself."""

import os
import threading
import time
from dataclasses import dataclass
from typing import Literal

from lm.config.tree import Config
from lm.errors import ConfigError, Problem, RunError

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
COUNTS = (
    "WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NNODES",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "MASTER_PORT",
)
Launcher = Literal["torchrun", "srun", "lightning"]
STARTER = "LM_STARTED_BY"  # environment variable: id of the process that starts the run's other processes
UNSET = "unset it, or start with torchrun or srun (docs/running.md)"


@dataclass(frozen=True)
class Process:
    """A process of a run: its rank among all processes, their launcher, and a note on the launcher for the user."""

    rank: int
    launcher: Launcher
    note: str = ""
    is_child: bool = False  # whether Lightning, in another process of the run, started it


def this_process(config: Config) -> Process:
    """Rank and launcher of this process: rank 0, and `lightning`, if no launcher started it.

    SLURM's variables count only within a step of several tasks, which srun starts: a batch script inherits the variables of its
    allocation. `lm.training.fit` tells Lightning the launcher, which Lightning would guess otherwise.

    Raises ConfigError: another number of processes than the configuration says, or a rank that no launcher of so many processes gives.
    """
    values = {name: _number(name) for name in (*RANKS, *COUNTS) if name in os.environ}
    is_srun = "WORLD_SIZE" not in values and values.get("SLURM_STEP_NUM_TASKS", 1) > 1
    if "WORLD_SIZE" not in values and not is_srun:
        return _without_launcher(config, values)
    n_processes = values["SLURM_STEP_NUM_TASKS" if is_srun else "WORLD_SIZE"]
    if n_processes != config.world_size:
        reason = f"with num_nodes = {config.trainer.num_nodes} makes {config.world_size} processes, the launcher started {n_processes}"
        raise ConfigError([Problem("trainer.devices", config.trainer.devices, reason, "make them agree")])
    if is_srun:
        return _srun_process(config, values)
    return _torchrun_process(config, values) if "TORCHELASTIC_RUN_ID" in os.environ else _lightning_process(config, values)


def end_with_parent(process: Process) -> None:
    """If Lightning started this process from another one of the run, end it soon after that parent has ended, for whatever reason.

    A killed parent can't tell its children, which would wait for minutes for its tensors.

    Raises RunError: the parent has ended already.
    """
    if process.launcher != "lightning":
        return
    starter, parent = os.environ.get(STARTER), os.getppid()
    if not process.is_child:
        os.environ[STARTER] = str(os.getpid())
    elif starter == str(parent):
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    elif starter:
        raise RunError("the process that started this one has ended; go on with resume=auto")


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _torchrun_process(config: Config, values: dict[str, int]) -> Process:
    rank, local_rank = _required_number(values, "RANK"), _required_number(values, "LOCAL_RANK")
    if rank >= values["WORLD_SIZE"]:
        raise _variable_error("RANK", rank, f"torchrun started {values['WORLD_SIZE']} processes")
    if local_rank != rank % config.trainer.devices:
        raise _variable_error("LOCAL_RANK", local_rank, f"RANK = {rank} is process {rank % config.trainer.devices} of its machine")
    return Process(rank, "torchrun")


def _lightning_process(config: Config, values: dict[str, int]) -> Process:
    """The process that Lightning started, or a user by hand with the variables that Lightning sets."""
    node = "GROUP_RANK" if "GROUP_RANK" in values and "NODE_RANK" not in values else "NODE_RANK"
    for name, count in (("LOCAL_RANK", config.trainer.devices), (node, config.trainer.num_nodes)):
        if values.get(name, 0) >= count:
            raise _variable_error(name, values[name], f"no launcher gave this rank of {count}")
    rank = values.get(node, 0) * config.trainer.devices + values.get("LOCAL_RANK", 0)
    if values.get("RANK", rank) != rank:
        raise _variable_error("RANK", values["RANK"], f"no launcher gave this rank: {node} and LOCAL_RANK make it {rank}")
    return Process(rank, "lightning", is_child=values.get("LOCAL_RANK", 0) > 0)


def _srun_process(config: Config, values: dict[str, int]) -> Process:
    tasks = values["SLURM_STEP_NUM_TASKS"]
    rank, *_ = (_required_number(values, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))  # Lightning reads all three
    if rank >= tasks:
        raise _variable_error("SLURM_PROCID", rank, f"srun started {tasks} processes")
    expected_counts = {"SLURM_NTASKS": tasks, "SLURM_NTASKS_PER_NODE": config.trainer.devices, "SLURM_NNODES": config.trainer.num_nodes}
    for name, count in expected_counts.items():
        if values.get(name) != count:
            call = f"srun --nodes={config.trainer.num_nodes} --ntasks-per-node={config.trainer.devices}"
            raise ConfigError([Problem(name, values.get(name), f"must be {count} for trainer.devices and num_nodes", f"start with {call}")])
    return Process(rank, "srun")


def _without_launcher(config: Config, values: dict[str, int]) -> Process:
    """The process of rank 0, which no launcher started; Lightning starts the run's other processes.

    Raises ConfigError: a variable sets a rank other than 0, or any rank where Lightning starts others; or the run needs several machines.
    """
    strays = [name for name in RANKS if values.get(name) or (name in ("RANK", "LOCAL_RANK") and name in values and config.world_size > 1)]
    if strays:
        raise _variable_error(strays[0], values[strays[0]], "no launcher of several processes gave this rank: there is no WORLD_SIZE")
    if config.trainer.num_nodes > 1:
        reason, remedy = "needs a launcher on each machine", "use torchrun, see docs/running.md"
        raise ConfigError([Problem("trainer.num_nodes", config.trainer.num_nodes, reason, remedy)])
    tasks = values.get("SLURM_NTASKS", 1)
    if tasks in (1, config.world_size):
        return Process(0, "lightning")
    note = f"note: SLURM allocated {tasks} tasks, srun did not start this process: trains with trainer.devices = {config.trainer.devices}"
    return Process(0, "lightning", f"{note}; for all of them: srun --ntasks-per-node=... lm train ... trainer.devices=...")


def _required_number(values: dict[str, int], name: str) -> int:
    if name not in values:
        raise _variable_error(name, None, "is missing, although the launcher's other variables are set")
    return values[name]


def _variable_error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError([Problem(name, value, reason, UNSET)])


def _number(name: str) -> int:
    value = os.environ[name]
    if not (value.isascii() and value.isdigit() and len(value) < 10) or (name == "MASTER_PORT" and int(value) > 65535):
        raise _variable_error(name, value, "must be a whole number, as a launcher sets it")
    return int(value)
