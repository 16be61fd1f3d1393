"""What this process may use of its machine."""

import os
from contextlib import suppress


def usable_cores() -> int:
    """Processor cores that this process may use: those it is bound to (taskset, a job's cgroup), and no more than SLURM gives each task."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(KeyError, ValueError):
        bound = min(bound, max(1, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return bound
