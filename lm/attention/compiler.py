"""This CPU's instruction sets, the C++ compiler, and the cache folder of compiled code."""

import hashlib
import os
import platform
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def _cpuinfo() -> dict[str, str]:
    """Return the first core's fields in /proc/cpuinfo by name; {} if there is no such file."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def cpu_flags() -> list[str]:
    """Return the names of this CPU's instruction sets, e.g. avx2, as /proc/cpuinfo lists them; [] if they are
    unknown.
    """
    return (_cpuinfo().get("flags") or _cpuinfo().get("Features", "")).split()


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler: the one that $CXX names (default g++), or else clang++; None if neither is
    found.
    """
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def compiled_code_folder() -> Path | None:
    """Return the cache folder for code compiled for this CPU, which later processes reuse; None if it is not writable.

    The folder is `lm/compiled-HASH` in XDG_CACHE_HOME or `~/.cache`; HASH identifies the CPU, as machines may share a
    home folder.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        cpu = [
            f"{name} {value}"
            for name, value in _cpuinfo().items()
            if name.startswith(("model name", "flags", "Features", "CPU "))
        ]
        identity = hashlib.sha256("\n".join([platform.machine(), *cpu]).encode()).hexdigest()[:8]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / f"compiled-{identity}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None
