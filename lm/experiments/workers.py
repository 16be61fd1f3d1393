"""Workers on a cluster, through submitit: each job is `lm compare` on the experiments, until nothing is left that it can do.

Claims divide the runs among the jobs. When the scheduler announces the end of a job with SIGUSR1, `lm compare` lets its runs save a
checkpoint and gives their claims back, and the job is queued again.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm.errors import ConfigError, RunError, one_line
from lm.machine import child_environment

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

Engine = Literal["slurm", "local"]
OUTPUT = "workers"  # in the experiment's folder: scripts and output of the jobs
_SIGNAL = "SUBMITIT_PREEMPT_SIGNAL"  # where submitit reads which signal announces the end, here and in the job
_COMMON = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name")  # to all engines
_DEFAULTS = {"name": "lm", "timeout_min": 60}
_REQUEUES = 1000  # how often a job may meet its time limit


class Worker:
    """What a job does: submitit calls it, and `checkpoint` when the job is about to end.

    Args:
        arguments: of `lm compare`.
        folder: where it is called.
    """

    def __init__(self, arguments: list[str], folder: str):
        self.arguments, self.folder = arguments, folder
        self._process: subprocess.Popen | None = None

    def __call__(self) -> None:
        """Work until nothing is left. Raises RunError if `lm compare` fails, as it does if runs failed."""
        command = [sys.executable, "-m", "lm", "compare", *self.arguments]
        self._process = subprocess.Popen(command, cwd=self.folder, env=child_environment())
        self._wait()
        if status := self._process.wait():
            raise RunError(f"lm compare ended with status {status}; its output says why")

    def checkpoint(self) -> "DelayedSubmission":
        """Let `lm compare` save and end; returns what the job does when it is started again."""
        from submitit.helpers import DelayedSubmission

        if self._process:  # if not, it is only being started, and ends with this one
            self._process.send_signal(signal.SIGUSR1)
            self._wait()
        return DelayedSubmission(Worker(self.arguments, self.folder))

    def _wait(self) -> None:
        """Until the process has ended. `checkpoint` is called by a signal in the midst of this, where Popen.wait would wait for itself."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def submit(arguments: list[str], number: int, output: Path, options: dict[str, str], engine: Engine) -> list[str]:
    """Submit jobs that work side by side; returns their ids.

    Args:
        arguments: of the `lm compare` that each job is.
        number: of jobs.
        output: folder for the jobs' scripts and output, which all machines see.
        options: of a job: submitit's (timeout_min, gpus_per_node, cpus_per_task, mem_gb), and others of sbatch, such as partition.
        engine: `local`: processes of this machine.

    Raises:
        ConfigError: an option is none.
        RunError: submitit or the scheduler is not there, or refuses.
    """
    os.environ[_SIGNAL] = "USR1"  # read when submitit is imported
    try:
        import submitit
    except ImportError:
        raise RunError("--submit needs submitit, which is not installed: pip install 'submitit>=1.5'") from None
    given = _DEFAULTS | {name: int(value) if value.isdigit() else value for name, value in options.items()}
    prefixed: dict[str, object] = {name if name in _COMMON else f"{engine}_{name}": value for name, value in given.items()}
    if engine == "slurm":
        prefixed["slurm_setup"] = [f"export {_SIGNAL}=USR1"]  # where jobs don't inherit the environment
    try:
        executor = submitit.AutoExecutor(output, engine, **{f"{engine}_max_num_timeout": _REQUEUES})
        executor.update_parameters(**prefixed)
    except (AssertionError, NameError, TypeError, ValueError) as error:
        raise ConfigError(f"--job-options {','.join(map('='.join, options.items()))}: {one_line(error)}") from None
    except RuntimeError as error:
        raise RunError(f"--submit {engine}: {one_line(error)}") from None
    try:
        with executor.batch():
            jobs = [executor.submit(Worker(arguments, os.getcwd())) for _ in range(number)]
    except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
        raise RunError(f"--submit {engine}: {one_line(error)}") from None
    return [job.job_id for job in jobs]


def read_options(text: str) -> dict[str, str]:
    """`partition=gpu,timeout_min=240` as a map. Raises ConfigError."""
    found = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not name.isidentifier() or not equals:
            raise ConfigError(f"--job-options {text}: must be KEY=VALUE,KEY=VALUE, e.g. partition=gpu,timeout_min=240")
        found[name] = value
    return found
