"""Functions on the resources of this machine (cores, memory), on signals, and on this process and its
children."""

import ctypes
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# environment variable that holds the id of the parent process, at whose end the child ends
_PARENT_ID_VARIABLE = "LM_PARENT"
# environment variable with the numbers of signals that are blocked while a process starts
_BLOCKED_SIGNALS_VARIABLE = "LM_BLOCKED_SIGNALS"
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl that requests a signal at the end of the parent
# signals that end a run after its step, with a checkpoint
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def usable_cores() -> int:
    """Return the number of cores that this process may run on (by taskset or a job's cpuset), at most
    SLURM_CPUS_PER_TASK if this variable is set.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(KeyError, ValueError):
        n_cores = min(n_cores, max(1, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return n_cores


def threads_per_process(n_processes: int) -> int:
    """Return the number of torch threads for each of `n_processes` processes: an equal part of the cores. The number is
    at most OMP_NUM_THREADS if this variable is set.
    """
    n_threads = max(1, usable_cores() // n_processes)
    with suppress(KeyError, ValueError):
        n_threads = min(n_threads, max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0])))
    return n_threads


def peak_process_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes.

    On Linux the value comes from /proc, since getrusage would also count memory of the process that started this
    process.
    """
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")):
            return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory of tensors in this process, for the tensors of the next step.

    By default glibc returns blocks of some MiB to the system, and getting new pages takes up to a quarter of a small
    step's time. With another C library, or if the user has set malloc's options, nothing changes.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}:
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest value that glibc takes: tensors up to 32 MiB
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def command_line() -> str:
    """Return the command of this process, quoted so that a shell runs the same command."""
    return shlex.join(["lm", *sys.argv[1:]])


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Iterator[None]:
    """Return a context that blocks `signals` in this thread, and in processes that are started within the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def block_stop_signals() -> None:
    """Block `STOP_SIGNALS` in this thread until `unblock_stop_signals`.

    A process started meanwhile inherits the block: a signal to that process waits until the process calls
    `unblock_stop_signals`.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.environ[_BLOCKED_SIGNALS_VARIABLE] = " ".join(str(int(number)) for number in STOP_SIGNALS if number not in mask)


def unblock_stop_signals() -> None:
    """End the block of `block_stop_signals`, which this process or its parent called. Signals that were blocked before,
    as in a submitted job, stay blocked.
    """
    numbers = os.environ.pop(_BLOCKED_SIGNALS_VARIABLE, "").split()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [int(number) for number in numbers])


def process_start_time(pid: int) -> str:
    """Return the start time of process `pid`, as a text, which distinguishes the process from a later one with the same
    id. Return an empty text if the process has ended. On systems without /proc, return `alive` for a live process.
    """
    try:
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return "" if state in "ZX" else fields[18]  # field 22 of /proc/PID/stat, starttime
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except OSError:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"


def start_child(
    command: Sequence[str],
    stdout: BinaryIO | int | None,
    stderr: BinaryIO | int | None,
    gpus: Sequence[str] | None = None,
    text: bool = False,
) -> subprocess.Popen:
    """Start an `lm` process in a session of its own, so that Ctrl-C does not reach it. On Linux it stops when this
    process ends in any way.

    Args:
        stdout, stderr: where its output goes, as `subprocess.Popen` takes them.
        gpus: the GPUs that it sees, as CUDA_VISIBLE_DEVICES names them; None: all GPUs that this process sees.
        text: whether pipes yield text.
    """
    gpu_variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    # the child imports what this process can, and not by chance what lies in the current folder, such as a clone `lm`
    paths = [sys.path[0] or os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    path_variables = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment = {**os.environ, **gpu_variables, **path_variables, _PARENT_ID_VARIABLE: str(os.getpid())}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=text,
        env=environment,
        start_new_session=True,
    )


def stop_with_parent() -> None:
    """Make Linux send this process SIGTERM when the parent that started it with `start_child` ends.

    If the parent has ended already, exit. The child requests the signal itself, since code between fork and exec
    (`preexec_fn`) may wait forever for a lock that another thread held.
    """
    parent = os.environ.pop(_PARENT_ID_VARIABLE, "")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != parent:
            sys.exit(128 + signal.SIGTERM)
