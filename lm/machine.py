"""Resources of this machine that this process may use or has used; identifiers of the machine and of its live processes."""

import ctypes
import gc
import hashlib
import os
import platform
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_PARENT = "LM_PARENT"  # environment variable: the id of the process with whose end a child process ends
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: request a signal at the end of the parent
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


def usable_cores() -> int:
    """The number of processor cores that this process is bound to (taskset, a job's cgroup), at most SLURM_CPUS_PER_TASK if that is set."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(KeyError, ValueError):
        n_cores = min(n_cores, max(1, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return n_cores


def threads_each(processes: int) -> int:
    """The number of torch threads for each of `processes` processes: an equal part of the usable cores, at most OMP_NUM_THREADS if set."""
    n_threads = max(1, usable_cores() // processes)
    with suppress(KeyError, ValueError):
        n_threads = min(n_threads, max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0])))
    return n_threads


@cache
def _first_core() -> dict[str, str]:
    """The fields of /proc/cpuinfo for the first core, by name; {} where there is no such file."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu_flags() -> list[str]:
    """The instruction sets of this CPU by Linux's names, e.g. avx2, as in the flags of /proc/cpuinfo; [] where they are not known."""
    return (_first_core().get("flags") or _first_core().get("Features", "")).split()


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that $CXX names (g++ if it is not set), else of clang++; None if neither is found."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def compiled_code_folder() -> Path | None:
    """The folder that keeps code compiled for this CPU for later processes; None if it can't be written.

    It is `lm/compiled-HASH` in XDG_CACHE_HOME or `~/.cache`, where HASH identifies the CPU: machines may share a home.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        cpu = [f"{name} {value}" for name, value in _first_core().items() if name.startswith(("model name", "flags", "Features", "CPU "))]
        identity = hashlib.sha256("\n".join([platform.machine(), *cpu]).encode()).hexdigest()[:8]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / f"compiled-{identity}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


def peak_process_bytes() -> int:
    """The peak resident memory of this process so far, in bytes.

    On Linux it comes from /proc: getrusage would also count memory of the process that started this one.
    """
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")):
            return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def keep_freed_memory() -> None:
    """Let this process keep the memory that its tensors free, for the tensors of the next step.

    glibc would return blocks of some MiB to the system, and the pages of new blocks take up to a quarter of a small step's time. Another
    C library, or a user's settings of malloc, are left unchanged.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}:
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest value that glibc takes: tensors up to 32 MiB
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def without_collection() -> Iterator[None]:
    """A context without Python's garbage collector, for importing large packages: the collector would scan their objects many times to no
    effect. Afterwards it is on or off as before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def this_machine() -> str:
    """The host name, and on Linux the ids of the machine's current boot and of the PID namespace (each container has its own)."""
    identifiers = [socket.gethostname()]
    with suppress(OSError):
        identifiers += [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(identifiers)


def born(pid: int) -> str:
    """The start time of process `pid`, by which it differs from a later process of the same id; empty if it isn't alive. Without
    /proc it is the word `alive`."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if state in "ZX" else values[18]  # field 22 of /proc/PID/stat, starttime
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


def child_environment(gpus: Sequence[str] | None = None) -> dict[str, str]:
    """Environment variables for an `lm` child process; on Linux the child is then stopped when this process ends in any way.

    gpus: the GPUs that the child sees, as CUDA_VISIBLE_DEVICES names them; None: all GPUs that this process sees.
    """
    gpu_variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**os.environ, **gpu_variables, _PARENT: str(os.getpid())}


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Have Linux send this process the signal `number` when the parent that set `child_environment` ends; exit if it has ended already.

    The child requests the signal itself: code between fork and exec (`preexec_fn`) may wait forever for a lock that another thread held.
    """
    parent = os.environ.pop(_PARENT, "")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if str(os.getppid()) != parent:
            sys.exit(128 + number)
