"""Resources of this machine that this process may use or has used; the identity of the machine, and of its live processes."""

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

_PARENT = "LM_PARENT"  # process id of the process with which a child ends
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def usable_cores() -> int:
    """Processor cores that this process may use: the cores it is bound to (taskset, a job's cgroup), at most SLURM's cores of a task."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(KeyError, ValueError):
        bound = min(bound, max(1, int(os.environ["SLURM_CPUS_PER_TASK"])))
    return bound


def threads_each(processes: int) -> int:
    """Threads for torch in each of `processes` on this machine: its share of the usable cores, at most OMP_NUM_THREADS if that is set."""
    share = max(1, usable_cores() // processes)
    with suppress(KeyError, ValueError):
        share = min(share, max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0])))
    return share


@cache
def _first_core() -> dict[str, str]:
    """The fields of /proc/cpuinfo of the first core; none where there is no such file."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu_flags() -> list[str]:
    """Linux's names of the instruction sets that this CPU has beyond its base instructions; none where they are not known."""
    return (_first_core().get("flags") or _first_core().get("Features", "")).split()


def cpp_compiler() -> str | None:
    """The path of a C++ compiler: of $CXX, g++ or clang++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def compiled_code_folder() -> Path | None:
    """The folder for code that is compiled for this CPU, kept for later processes; None if it can't be written.

    It is `lm/compiled-HASH` in XDG_CACHE_HOME or `~/.cache`, HASH of the CPU: machines may share a home.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        cpu = [f"{name} {value}" for name, value in _first_core().items() if name.startswith(("model name", "flags", "Features", "CPU "))]
        identity = hashlib.sha256("\n".join([platform.machine(), *cpu]).encode()).hexdigest()[:8]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / f"compiled-{identity}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


def peak_process_bytes() -> int:
    """The largest resident memory of this process so far, bytes.

    On Linux it is of this process's address space: getrusage would also count memory of the process that started it.
    """
    with suppress(OSError):
        if match := re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8")):
            return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def keep_freed_memory() -> None:
    """Let this process keep the memory that its tensors free, for the tensors of the next step.

    glibc would give blocks of some MiB back, and the pages of new blocks cost up to a quarter of a small step. Another C library, or a
    user's settings of malloc, are left alone.
    """
    if os.environ.keys() & {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"}:
        return
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that it takes: tensors up to 32 MiB
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def without_collection() -> Iterator[None]:
    """A context for importing large packages without Python's collector of reference cycles, which would scan their objects many times
    to no effect. Afterwards the collector is on or off as before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def this_machine() -> str:
    """An identifier of this machine since its start, and of the namespace of its process numbers (containers have separate ones)."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def born(pid: int) -> str:
    """The start time of a process of this machine, which tells it from a later process of the same number; empty if it is not alive."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if state in "ZX" else values[18]
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
    """The environment for an `lm` process that is to be stopped when this process ends in any way; on Linux alone.

    gpus: the GPUs that the process sees, as CUDA_VISIBLE_DEVICES names them; None: all GPUs that this process sees.
    """
    gpu_variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**os.environ, **gpu_variables, _PARENT: str(os.getpid())}


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Request a signal at the end of the parent that gave `child_environment` to this process; exit if the parent has ended already.

    The process requests it itself: code between fork and exec (`preexec_fn`) may wait forever for a lock that another thread held.
    """
    parent = os.environ.pop(_PARENT, "")
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if str(os.getppid()) != parent:
            sys.exit(128 + number)
