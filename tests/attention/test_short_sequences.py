"""Softmax attention of short sequences on a CPU, by blocks of queries: equal to PyTorch's kernel, and nearer to fp64 in
bf16.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import catalogue, distance
from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.routes import (
    MAX_BLOCK_SOFTMAX_LENGTH,
    SOFTMAX_BLOCK_QUERIES,
    block_softmax,
    fused_softmax,
)

LENGTHS = (1, 2, *range(SOFTMAX_BLOCK_QUERIES - 1, SOFTMAX_BLOCK_QUERIES + 2), 257, MAX_BLOCK_SOFTMAX_LENGTH)


def inputs(length: int, size: int, width: int, heads: int = 3) -> list[Tensor]:
    """q, k, v and a gradient of the output, of two sequences, fp32; q and k large enough for weights that are far from
    equal.
    """
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, heads, length, n, generator=generator) * factor
        for n, factor in ((size, 2), (size, 1), (width, 1), (width, 1))
    ]


def results(attend: object, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, scale=0.3)


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return block_softmax(q, k, v, 0.3)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("size", "width"), [(16, 16), (24, 40), (32, 8)])
def test_it_is_softmax_attention(length: int, size: int, width: int):
    tensors = [x.double() for x in inputs(length, size, width)]
    for actual, expected in zip(results(blocks, *tensors), results(kernel, *tensors), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("queries", [1, SOFTMAX_BLOCK_QUERIES, SOFTMAX_BLOCK_QUERIES + 1, 200])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_may_be_the_last_of_the_keys_alone(queries: int, dtype: torch.dtype):
    """They get what they get among all queries, and so do the gradients of a loss on them alone, as near to fp64."""
    q, k, v, grad = (x.double() for x in inputs(257, 24, 40))
    grad[:, :, :-queries] = 0.0
    layout, first = AttentionLayout.full(257), 257 - queries

    def tail(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(fused_softmax(q[:, :, first:], k, v, layout.queries_from(first)), (0, 0, first, 0))

    def unasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_softmax(q, k, v, 24**-0.5) * (grad != 0)

    exact, low = results(unasked, q, k, v, grad), [x.float() for x in (q, k)] + [x.to(dtype) for x in (v, grad)]
    if dtype == torch.float64:
        low = [q, k, v, grad]
    for actual, reference, true in zip(results(tail, *low), results(unasked, *low), exact, strict=True):
        assert (actual - true).norm() <= 1.02 * (reference - true).norm() + 1e-12 * true.norm()


@pytest.mark.parametrize("length", [64, 256, MAX_BLOCK_SOFTMAX_LENGTH])
def test_under_autocast_it_is_nearer_to_fp64_than_the_kernel(length: int):
    """Queries and keys come in fp32, as RoPE leaves them; the kernel rounds them to bf16."""
    q, k, v, grad = inputs(length, 32, 32)
    v, grad = v.bfloat16(), grad.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        actual, reference = results(blocks, q, k, v, grad), results(kernel, q, k, v, grad)
    exact = results(kernel, *(x.double() for x in (q, k, v, grad)))
    assert actual[0].dtype == torch.bfloat16
    for a, b, true in zip(actual, reference, exact, strict=True):
        assert (a - true).norm() < (b - true).norm()


@pytest.mark.parametrize("length", [MAX_BLOCK_SOFTMAX_LENGTH, MAX_BLOCK_SOFTMAX_LENGTH + 1])
def test_longer_sequences_take_the_kernel(length: int, monkeypatch: pytest.MonkeyPatch):
    q, k, v, _ = inputs(length, 8, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_, **__: torch.tensor(1.0))
    assert (fused_softmax(q, k, v, AttentionLayout.full(length)).dim() == 0) == (length > MAX_BLOCK_SOFTMAX_LENGTH)


@pytest.mark.parametrize(("size", "expected"), [(2, []), (64, [False]), (128, [True])])
def test_a_window_takes_a_loop_the_kernel_on_blocks_or_the_kernel_on_whole_sequences(
    size: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
):
    normalizer = make_normalizer(catalogue.Window(size=size), LayerSpec(2, 16, 32, 128))
    whole = []
    monkeypatch.setattr(
        distance.routes,
        "fused_softmax",
        lambda *tensors, **options: whole.append(not options) or fused_softmax(*tensors, **options),
    )
    q, k, v, _ = inputs(128, 16, 16, heads=2)
    normalizer(q, k, v, AttentionLayout.full(128))
    assert whole == expected
