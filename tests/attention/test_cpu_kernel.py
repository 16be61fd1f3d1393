"""The kernel of long sequences on a CPU with AVX-512 BF16: as near to fp64 as PyTorch's, and PyTorch's where it does
not work.
"""

import math
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import mark_others_slow
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lm.attention import cpu_kernel, kernels
from lm.attention.cpu_kernel import TILE_KEYS, TILE_QUERIES, causal_softmax_no_grad
from lm.attention.layout import AttentionLayout
from lm.attention.routes import MAX_BLOCK_SOFTMAX_LENGTH, fused_softmax

BLOCK = 256  # keys of a block, KEYS in the source
V = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
SCRIPTS = {  # of compilers: one that refuses, and one whose library is a line of text
    "compiler": "echo no such flag >&2; exit 1",
    "library": 'while [ "$1" != -o ]; do shift; done; echo text > "$2"',
}
needs_kernel = pytest.mark.skipif(
    "avx512_bf16" not in kernels.cpu_instruction_sets() or not kernels.cpp_compiler(), reason="no AVX-512 or compiler"
)


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is known of this machine, before a test and after it."""
    cached = (cpu_kernel._machine_problem, cpu_kernel._load_library)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def inputs(queries: int, keys: int, size: int, width: int, heads: int = 3) -> list[Tensor]:
    """q in fp32, k and v in bf16; q large enough for weights that are far from equal."""
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(heads, *shape, generator=generator) for shape in ((queries, size), (keys, size), (keys, width))
    )
    return [3 * q, k.bfloat16(), v.bfloat16()]


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The definition in fp64, of queries that are the last of the keys."""
    visible = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
    return (q.double() @ k.double().mT * scale).masked_fill(~visible, -math.inf).softmax(-1) @ v.double()


@needs_kernel
@pytest.mark.parametrize("keys", [1, TILE_KEYS, BLOCK - 1, BLOCK, BLOCK + 1, 8 * TILE_QUERIES + 1, 1000])
@pytest.mark.parametrize(("size", "width"), [(32, 32), (17, 48), (64, 33), (128, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_fp64_as_the_fused_kernel(keys: int, size: int, width: int, dtype: torch.dtype):
    q, k, v = inputs(keys, keys, size, width)
    q = q.to(dtype)
    scale = 1 / math.sqrt(size)
    true, output = exact(q, k, v, scale), causal_softmax_no_grad(q, k, v, scale)
    wider = max(size, width)
    # of three dimensions it would not be the fused kernel
    padded = (F.pad(x.bfloat16(), (0, wider - x.size(-1)))[None] for x in (q, k, v))
    fused = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale)[0]
    assert output.shape == true.shape
    assert output.dtype == torch.bfloat16
    assert (output - true).norm() <= 1.05 * (fused[..., :width] - true).norm() + 1e-3 * true.norm()


@needs_kernel
@pytest.mark.parametrize("queries", [1, TILE_QUERIES - 1, TILE_QUERIES, 8 * TILE_QUERIES + 1, 699])
def test_queries_may_be_the_last_of_the_keys(queries: int):
    q, k, v = inputs(700, 700, 32, 32)
    expected = exact(q, k, v, 0.2)[:, -queries:]
    output = causal_softmax_no_grad(q[:, -queries:], k, v, 0.2)
    assert (output - expected).norm() <= 0.01 * expected.norm()


@needs_kernel
@pytest.mark.parametrize("factor", [0.0, 1e4, 1e30])
def test_extreme_scores_give_a_mean_of_values(factor: float):
    q, k, v = inputs(600, 600, 32, 32)
    output = causal_softmax_no_grad(q * factor, k, torch.ones_like(v), 0.2)
    assert (output - 1).abs().max() <= 1 / 64


@needs_kernel
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch):
    q, k, v = inputs(1500, 1500, 32, 32, heads=2)
    outputs = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        outputs.append(causal_softmax_no_grad(q, k, v, 0.2))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_long_sequences_without_gradients_in_bf16_take_it(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(cpu_kernel, "_machine_problem", lambda: "")
    monkeypatch.setattr(cpu_kernel, "causal_softmax_no_grad", lambda q, k, v, scale: calls.append(scale) or v)

    def taken(
        length: int, dtype: torch.dtype = torch.bfloat16, layout: AttentionLayout | None = None, grad: bool = False
    ) -> bool:
        x = torch.zeros(1, 1, length, 8, dtype=dtype, requires_grad=grad)
        calls.clear()
        fused_softmax(x, x, x, layout or AttentionLayout.full(length))
        return calls == [1 / math.sqrt(8)]

    assert taken(MAX_BLOCK_SOFTMAX_LENGTH + 1)
    assert not taken(MAX_BLOCK_SOFTMAX_LENGTH)
    assert not taken(MAX_BLOCK_SOFTMAX_LENGTH + 1, torch.float32)
    assert not taken(MAX_BLOCK_SOFTMAX_LENGTH + 1, grad=True)
    assert not taken(600, layout=AttentionLayout.from_document_lengths([300, 300]))
    with torch.no_grad():
        assert taken(MAX_BLOCK_SOFTMAX_LENGTH + 1, grad=True)


def test_the_fused_kernel_takes_what_it_can_not_compute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernel, "_machine_problem", lambda: "")
    assert not cpu_kernel.why_unusable(V)
    assert "float32" in cpu_kernel.why_unusable(V.float())
    with FakeTensorMode():
        assert "no numbers" in cpu_kernel.why_unusable(torch.empty(1, 1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("flags", "compiler", "reason"),
    [
        (["avx512f"], "g++", "no avx512_bf16"),
        (["avx512_bf16", "amx_bf16"], "g++", "amx_bf16"),
        (["avx512_bf16"], None, "no C++ compiler"),
    ],
)
def test_machines_without_what_it_needs_are_not_warned(
    flags: list[str],
    compiler: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
):
    monkeypatch.setattr(cpu_kernel, "cpu_instruction_sets", lambda: flags)
    monkeypatch.setattr(cpu_kernel, "cpp_compiler", lambda: compiler)
    assert reason in cpu_kernel.why_unusable(V)
    assert not recwarn


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("compiler", "no such flag"), ("library", "too short|invalid ELF"), ("results", "results differ: output")],
)
def test_a_kernel_that_does_not_work_is_replaced_with_a_warning(
    trouble: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_kernel, "cpu_instruction_sets", lambda: ["avx512_bf16"])
    monkeypatch.setattr(cpu_kernel, "compiled_code_folder", lambda: tmp_path)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n" + SCRIPTS.get(trouble, ""))
    compiler.chmod(0o755)
    monkeypatch.setattr(cpu_kernel, "cpp_compiler", lambda: str(compiler))
    if trouble == "results":
        monkeypatch.setattr(cpu_kernel, "causal_softmax_no_grad", lambda q, k, v, scale: torch.zeros_like(q))
    with pytest.warns(UserWarning, match=words):
        assert cpu_kernel.why_unusable(V)
    assert cpu_kernel.why_unusable(V)  # asked again, without a further warning
    q = torch.randn(1, 1, 600, 8).bfloat16()
    assert torch.equal(
        fused_softmax(q, q, q, AttentionLayout.full(600)), F.scaled_dot_product_attention(q, q, q, is_causal=True)
    )


@needs_kernel
@pytest.mark.parametrize("kept", mark_others_slow([True, False], [True]))
def test_it_is_compiled_once_on_a_machine_whose_cache_can_be_written(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_kernel, "compiled_code_folder", lambda: tmp_path if kept else None)
    runs, run = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *arguments, **options: runs.append(arguments) or run(*arguments, **options)
    )
    for _ in range(2):
        cpu_kernel._load_library.cache_clear()
        q, k, v = inputs(40, 40, 8, 8)
        assert torch.isfinite(causal_softmax_no_grad(q, k, v, 1.0)).all()
    assert len(runs) == (1 if kept else 2)
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"] * kept
