"""This module computes causal softmax attention of long sequences, without gradients. Its kernel `causal_softmax.cpp`
is for CPUs with AVX-512 BF16 but no AMX.

On such CPUs PyTorch's fused kernel needs more than twice the time (docs/speed.md). lm's kernel is compiled at its first
use on a machine, in two seconds. Where it can't be compiled or used, PyTorch's kernel computes the same function.

Shapes: B sequences, H heads, N = B x H, T queries, S keys, D head size, E width of the values.
"""

import ctypes
import hashlib
import math
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention.kernels import compiled_code_folder, cpp_compiler, cpu_instruction_sets, kernel_problem

SOURCE_PATH = Path(__file__).with_name("causal_softmax.cpp")
TILE_QUERIES, TILE_KEYS = 12, 32  # queries and keys of a tile
MAX_COMPILE_SECONDS = 120  # time limit, more than a compiler takes on a busy machine


def why_unusable(v: Tensor) -> str:
    """Return the reason why the kernel can't compute attention with the values `v` (B, H, S, E); empty if it can."""
    if torch.compiler.is_compiling() or type(v) is not Tensor:
        return "operands are traced, or have no numbers"
    if v.dtype != torch.bfloat16:
        return f"the kernel has no {v.dtype}"
    return _machine_problem()


def causal_softmax_no_grad(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return softmax(scale q.k) v with a causal mask, (N, T, E) bf16.

    The queries q (N, T, D) are the last T of the S tokens of k (N, S, D) and v (N, S, E). q and k may be in a wider
    dtype: each is rounded to bf16 once. `scale` is positive, and operands are on the CPU.
    """
    (n, queries, _), (keys, width) = q.shape, v.shape[1:]
    q = _pad_tiles(q, TILE_QUERIES, 2)
    # (N, S / TILE_KEYS, D / 2, TILE_KEYS, 2)
    k = _pad_tiles(k, TILE_KEYS, 2).unflatten(1, (-1, TILE_KEYS)).unflatten(3, (-1, 2)).transpose(2, 3).contiguous()
    v = _pad_tiles(v, TILE_KEYS, TILE_KEYS).unflatten(1, (-1, 2)).transpose(2, 3).contiguous()  # (N, S / 2, E, 2)
    output = v.new_empty(n, q.size(1), v.size(2))
    sizes = (n, q.size(1), 2 * v.size(1), keys - queries, q.size(2), v.size(2), torch.get_num_threads())
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, output))
    _load_library().causal_softmax(*pointers, *map(ctypes.c_int64, sizes), ctypes.c_float(scale / math.log(2)))
    return output[:, :queries, :width]


def _pad_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """Convert matrices x (N, R, C) to contiguous bf16, and append zeros so that tiles of `rows` x `columns` divide
    them.
    """
    return F.pad(x.to(torch.bfloat16), (0, -x.size(2) % columns, 0, -x.size(1) % rows)).contiguous()


@cache
def _machine_problem() -> str:
    """Return the reason why this machine can't run the kernel; empty if it can."""
    flags = cpu_instruction_sets()
    if "avx512_bf16" not in flags:
        return "the CPU has no avx512_bf16"
    if "amx_bf16" in flags:
        return "the CPU has amx_bf16, which PyTorch's kernel uses"
    if not SOURCE_PATH.is_file():
        return f"{SOURCE_PATH.name} is not beside its module"
    if not cpp_compiler():
        return "no C++ compiler found"
    return kernel_problem("lm's kernel for long sequences", torch.device("cpu"), _compare_with_pytorch)


def _compare_with_pytorch() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a name, the kernel's output and PyTorch's output, for the last 200 of a sequence's 300 queries."""
    q, k, v = torch.arange(3 * 2 * 300 * 40.0, device="cpu").sin().bfloat16().view(3, 2, 300, 40)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    yield "output", causal_softmax_no_grad(q[:, 100:], k, v, 1.0), expected[:, 100:]


@cache
def _load_library() -> ctypes.CDLL:
    """Load the kernel's library, which is compiled first unless this machine's cache holds it. Raises OSError or
    subprocess.SubprocessError: compiling or loading fails.
    """
    command = [
        cpp_compiler(),
        "-O3",
        "-std=c++17",
        "-march=native",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-DROWS={TILE_QUERIES}",
        f"-DWIDTH={TILE_KEYS}",
    ]
    identity = hashlib.sha256(f"{command} {SOURCE_PATH.read_text(encoding='utf-8')}".encode()).hexdigest()[:16]
    folder = compiled_code_folder()
    path = folder and folder / f"{SOURCE_PATH.stem}-{identity}.so"
    if path and path.is_file():
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        library = Path(temporary, "kernel.so")
        command += ["-o", str(library), str(SOURCE_PATH)]
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", timeout=MAX_COMPILE_SECONDS
        )
        if path:
            library = library.replace(path)
        return ctypes.CDLL(str(library))
