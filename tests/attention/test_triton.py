"""The Triton kernel without a GPU: under the interpreter, and compiled for GPUs that aren't there. On one:
test_gpu.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.attention.elementwise_sums import why_no_triton
from lm.attention.kernels import triton_is_interpreted

triton = pytest.importorskip("triton", minversion="3.4")


def test_the_interpreted_kernel_agrees_with_the_definition():
    """A process of its own: Triton decides at its import, and interpreted it would serve other tests, slowly."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parents[1] / "interpreted.py"),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.skipif(triton_is_interpreted(), reason="compiles")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "size", "width", "kind", "divide_by_sum"),
    [
        (torch.bfloat16, 64, 64, "relu2", False),
        (torch.bfloat16, 64, 64, "relu2", True),
        (torch.bfloat16, 128, 1536, "sigmoid", False),
        (torch.float32, 128, 128, "sigmoid", True),
    ],
)
def test_the_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(
    dtype: torch.dtype, size: int, width: int, kind: str, divide_by_sum: bool, capability: int
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lm.attention import triton_kernels

    settings = triton_kernels.launch_options(dtype, size, width, kind, kind == "sigmoid", divide_by_sum)
    launch = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
    matrix = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    runs = [(triton_kernels._forward, {}), (triton_kernels._backward_queries, {})]
    runs += [(triton_kernels._backward_keys, {"FIRST_PIECE": first}) for first in (True, False)]
    for kernel, extra in runs:
        constants = settings | extra
        types = (
            {"T": "i32"}
            | dict.fromkeys(("query_bias", "dbias", "sums", "mean_grad"), "*fp32")
            | dict.fromkeys(constants, "constexpr")
        )
        signature = {name: types.get(name, matrix) for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
        source = ASTSource(kernel, signature, places, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
        assert compiled.metadata.shared <= (99 if capability < 90 else 227) * 1024
        assert "tf32" not in compiled.asm["ptx"]


@pytest.mark.skipif(triton_is_interpreted(), reason="the interpreter serves the CPU")
def test_a_cpu_uses_tiles():
    assert "CUDA" in why_no_triton(torch.device("cpu"), torch.float32, 64)
