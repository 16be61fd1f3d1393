"""This process's rank in its run, by the environment variables of its launcher: torchrun, SLURM's srun, or Lightning
itself.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Literal

from lm.config.tree import Config
from lm.errors import ConfigError, Problem, RunError

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # environment variables
COUNTS = (  # environment variables with other whole numbers of a launcher
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
# environment variable with the id of the process that starts the run's other processes
STARTER_VARIABLE = "LM_STARTED_BY"
UNSET_REMEDY = "unset it, or start with torchrun or srun (docs/running.md)"


@dataclass(frozen=True)
class Process:
    """A process of a run: its rank among all processes, their launcher, and a note on the launcher for the user."""

    rank: int
    launcher: Launcher
    note: str = ""
    is_child: bool = False  # whether Lightning, in another process of the run, started it


def this_process(config: Config) -> Process:
    """Rank and launcher of this process, from environment variables; without a launcher they are 0 and `lightning`.

    SLURM's variables count only within a step of several tasks, which srun starts, as a batch script inherits the
    variables of its allocation. `lm.training.fit` passes the launcher on to Lightning, so that Lightning doesn't guess
    it.

    Raises ConfigError: the number of processes differs from the configuration's, or a rank is impossible for this
    number.
    """
    values = {name: _number(name) for name in (*RANKS, *COUNTS) if name in os.environ}
    is_srun = "WORLD_SIZE" not in values and values.get("SLURM_STEP_NUM_TASKS", 1) > 1
    if "WORLD_SIZE" not in values and not is_srun:
        return _without_launcher(config, values)
    n_processes = values["SLURM_STEP_NUM_TASKS" if is_srun else "WORLD_SIZE"]
    if n_processes != config.world_size:
        reason = (
            f"with num_nodes = {config.trainer.num_nodes} makes {config.world_size} processes, the launcher "
            f"started {n_processes}"
        )
        raise ConfigError([Problem("trainer.devices", config.trainer.devices, reason, "make them agree")])
    if is_srun:
        return _srun_process(config, values)
    return (
        _torchrun_process(config, values) if "TORCHELASTIC_RUN_ID" in os.environ else _lightning_process(config, values)
    )


def end_with_parent(process: Process) -> None:
    """If Lightning started this process, end it soon after its parent, another process of the run, has ended.

    Children of a killed parent would otherwise wait minutes for its tensors. Called in the parent, it only records the
    parent's id.

    Raises RunError: the parent has ended already.
    """
    if process.launcher != "lightning":
        return
    starter, parent = os.environ.get(STARTER_VARIABLE), os.getppid()
    if not process.is_child:
        os.environ[STARTER_VARIABLE] = str(os.getpid())
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
        raise _variable_error(
            "LOCAL_RANK", local_rank, f"RANK = {rank} is process {rank % config.trainer.devices} of its machine"
        )
    return Process(rank, "torchrun")


def _lightning_process(config: Config, values: dict[str, int]) -> Process:
    """Describe this process from Lightning's environment variables, which Lightning or a user has set; checks the
    ranks.
    """
    node_variable = "GROUP_RANK" if "GROUP_RANK" in values and "NODE_RANK" not in values else "NODE_RANK"
    for name, count in (("LOCAL_RANK", config.trainer.devices), (node_variable, config.trainer.num_nodes)):
        if values.get(name, 0) >= count:
            raise _variable_error(name, values[name], f"no launcher gave this rank of {count}")
    rank = values.get(node_variable, 0) * config.trainer.devices + values.get("LOCAL_RANK", 0)
    if values.get("RANK", rank) != rank:
        raise _variable_error(
            "RANK", values["RANK"], f"no launcher gave this rank: {node_variable} and LOCAL_RANK make it {rank}"
        )
    return Process(rank, "lightning", is_child=values.get("LOCAL_RANK", 0) > 0)


def _srun_process(config: Config, values: dict[str, int]) -> Process:
    n_tasks, devices, num_nodes = config.world_size, config.trainer.devices, config.trainer.num_nodes
    # Lightning reads all three
    rank, *_ = (_required_number(values, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    if rank >= n_tasks:
        raise _variable_error("SLURM_PROCID", rank, f"srun started {n_tasks} processes")
    for name, count in {"SLURM_NTASKS": n_tasks, "SLURM_NTASKS_PER_NODE": devices, "SLURM_NNODES": num_nodes}.items():
        if values.get(name) != count:
            remedy = f"start with srun --nodes={num_nodes} --ntasks-per-node={devices}"
            raise ConfigError(
                [Problem(name, values.get(name), f"must be {count} for trainer.devices and num_nodes", remedy)]
            )
    return Process(rank, "srun")


def _without_launcher(config: Config, values: dict[str, int]) -> Process:
    """Describe this process as rank 0, started without a launcher; Lightning starts any other processes of the run.

    Raises ConfigError: an environment variable sets a rank that this process can't have, or the run needs several
    machines.
    """
    names = [
        name
        for name in RANKS
        if values.get(name) or (name in ("RANK", "LOCAL_RANK") and name in values and config.world_size > 1)
    ]
    if names:
        raise _variable_error(
            names[0], values[names[0]], "no launcher of several processes gave this rank: there is no WORLD_SIZE"
        )
    if config.trainer.num_nodes > 1:
        reason, remedy = "needs a launcher on each machine", "use torchrun, see docs/running.md"
        raise ConfigError([Problem("trainer.num_nodes", config.trainer.num_nodes, reason, remedy)])
    n_tasks = values.get("SLURM_NTASKS", 1)
    if n_tasks in (1, config.world_size):
        return Process(0, "lightning")
    note = (
        f"note: SLURM allocated {n_tasks} tasks, srun did not start this process: trains with trainer.devices = "
        f"{config.trainer.devices}"
    )
    return Process(
        0, "lightning", f"{note}; for all of them: srun --ntasks-per-node=... lm train ... trainer.devices=..."
    )


def _required_number(values: dict[str, int], name: str) -> int:
    if name not in values:
        raise _variable_error(name, None, "is missing, although the launcher's other variables are set")
    return values[name]


def _variable_error(name: str, value: object, reason: str) -> ConfigError:
    return ConfigError([Problem(name, value, reason, UNSET_REMEDY)])


def _number(name: str) -> int:
    value = os.environ[name]
    if not (value.isascii() and value.isdigit() and len(value) < 10) or (name == "MASTER_PORT" and int(value) > 65535):
        raise _variable_error(name, value, "must be a whole number, as a launcher sets it")
    return int(value)
