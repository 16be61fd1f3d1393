"""This module has what compiled kernels need: the CPU's instruction sets, the C++ compiler, the cache folder, and the
check of a kernel's results at its first use.
"""

import hashlib
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor


@cache
def cpu_instruction_sets() -> list[str]:
    """Return the names of this CPU's instruction sets, e.g. avx2, as /proc/cpuinfo lists them; [] if they are
    unknown.
    """
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return value.split()
    return []


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler: the one that $CXX names (default g++), or else clang++; None if neither is
    found.
    """
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def compiled_code_folder() -> Path | None:
    """Return the cache folder for code compiled for this CPU, which later processes reuse; None if it is not writable.

    The folder is `lm/compiled-HASH` in XDG_CACHE_HOME or `~/.cache`; HASH identifies the CPU's instruction sets, as
    machines may share a home folder.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        identity = hashlib.sha256(" ".join([platform.machine(), *cpu_instruction_sets()]).encode()).hexdigest()[:8]
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lm" / f"compiled-{identity}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


def triton_is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1), as in tests. The interpreter is slow,
    but runs on any device.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context without autocast, in which the dtypes of operands alone decide the dtype of a computation."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def output_and_gradients(route: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the output of `route(*leaves)` and its gradients for the leaves, where `grad` is the output's gradient."""
    tensors = [x.detach().requires_grad_() for x in leaves]
    output = route(*tensors)
    return output, *torch.autograd.grad(output, tensors, grad)


def kernel_problem(kernel: str, device: torch.device, cases: Callable[[], Iterator[tuple[str, Tensor, Tensor]]]) -> str:
    """Return the reason why a kernel can't be used on a device, and give it as a warning; return an empty text if the
    kernel can be used.

    `cases` yields a name, the kernel's result, and the result of a route that is known to be right. Both results must
    agree to 1/32 of the largest entry.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
            different = [name for name, a, b in cases() if not bool((a - b).abs().max() <= b.abs().max() / 32)]
        problem = f"its results differ: {', '.join(dict.fromkeys(different))}" if different else ""
    except Exception as error:  # whatever a package, the compilers that it calls or the driver may raise
        problem = " ".join(f"{type(error).__name__}: {getattr(error, 'stderr', None) or error}".split())[:200]
    if problem:
        warnings.warn(f"{kernel} does not work on {device}, a slower route takes its place: {problem}", stacklevel=2)
    return problem
