"""The rank of this process, from the environment that its launcher sets: torchrun, SLURM's srun, or Lightning itself."""

import os

from lm.config.tree import Config
from lm.errors import ConfigError, Problem

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
UNSET = "unset it, or start with torchrun or srun (docs/running.md)"


def process_rank(config: Config) -> int:
    """The rank of this process among those of the run: 0 without a launcher.

    The rank is the one that Lightning will take it for: torchrun's RANK, SLURM_PROCID in an srun, else LOCAL_RANK on the machine
    NODE_RANK (of processes that Lightning starts itself, or that were started by hand).

    Raises:
        ConfigError: another number of processes than the configuration says, or a rank that no launcher of several gave.
    """
    found = {name: _number(name) for name in (*RANKS, "WORLD_SIZE", "SLURM_NTASKS") if name in os.environ}
    srun = "SLURM_NTASKS" in found and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")  # which only allocate
    started = found.get("WORLD_SIZE", found["SLURM_NTASKS"] if srun else None)
    if started is None:
        _check_no_launcher(config, found)
        return 0
    if started != config.world_size:
        reason = f"with num_nodes = {config.trainer.num_nodes} makes {config.world_size} processes, the launcher started {started}"
        raise ConfigError([Problem("trainer.devices", config.trainer.devices, reason, "make them agree")])
    if "WORLD_SIZE" not in found:
        rank = found.get("SLURM_PROCID", 0)
        if started > 1 and "SLURM_NTASKS_PER_NODE" not in os.environ:
            raise ConfigError(f"SLURM_NTASKS = {started}: tasks are given by machine; start with srun --ntasks-per-node=...")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        rank = found.get("RANK", 0)
    else:
        rank = found.get("NODE_RANK", found.get("GROUP_RANK", 0)) * config.trainer.devices + found.get("LOCAL_RANK", 0)
    if rank >= started or found.get("RANK", rank) != rank:
        name = "RANK" if "RANK" in found else "LOCAL_RANK" if "WORLD_SIZE" in found else "SLURM_PROCID"
        raise ConfigError([Problem(name, found[name], f"no launcher gave this rank of {started} processes", UNSET)])
    return rank


def _check_no_launcher(config: Config, found: dict[str, int]) -> None:
    """Without a launcher, refuse a rank other than 0, and one that would keep Lightning from starting processes of its own."""
    stray = [name for name in RANKS if found.get(name) or (name in ("RANK", "LOCAL_RANK") and name in found and config.world_size > 1)]
    if stray:
        reason = "no launcher of several processes gave this rank: there is no WORLD_SIZE"
        raise ConfigError([Problem(stray[0], found[stray[0]], reason, UNSET)])
    if config.trainer.num_nodes > 1:
        reason, remedy = "needs a launcher on each machine", "use torchrun, see docs/running.md"
        raise ConfigError([Problem("trainer.num_nodes", config.trainer.num_nodes, reason, remedy)])


def _number(name: str) -> int:
    value = os.environ[name]
    if not (value.isascii() and value.isdigit()):
        raise ConfigError([Problem(name, value, "must be a whole number, as a launcher sets it", UNSET)])
    return int(value)
