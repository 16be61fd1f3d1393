"""Test the Triton kernel under Triton's interpreter. test_triton.py runs this file with TRITON_INTERPRET=1.

test_gpu.py imports its reference functions, too.
"""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lm.attention import catalogue as opt
from lm.attention import elementwise_sums
from lm.attention.catalogue import make_normalizer
from lm.attention.elementwise_sums import (
    ELEMENTWISE_FUNCTIONS,
    TileSums,
    compute_sums,
    elementwise_attention,
    why_no_triton,
)
from lm.attention.kernels import kernel_problem
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec

every_function = pytest.mark.parametrize("f", ELEMENTWISE_FUNCTIONS)
SIZES = [(t, d, e) for t in (1, 17, 64, 100) for d in (16, 64) for e in (16, 96)] + [(100, 40, 200), (70, 128, 384)]
either_sum = pytest.mark.parametrize("divide_by_sum", [False, True], ids=["plain", "over its sum"])
every_size = pytest.mark.parametrize(("length", "size", "width"), SIZES)


def dense_attention(f: str, q: Tensor, k: Tensor, v: Tensor, query_bias: Tensor, divide_by_sum: bool = False) -> Tensor:
    """Return the output (B, H, T, E) of attention with the score function `f` by its definition, with all weights in
    memory.
    """
    w = (
        ELEMENTWISE_FUNCTIONS[f]
        .forward(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + query_bias.unsqueeze(-1).to(q.dtype))
        .tril()
    )
    return (w / w.sum(-1, keepdim=True).clamp(min=1e-24) if divide_by_sum else w) @ v


def attention_inputs(length: int, size: int, width: int, dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    """Return q, k, v in `dtype`, the query bias (2, 1) of two heads in fp32, and the output's gradient.

    Products of q and k are exact in fp32, in any order of summation. So no rounding decides on which side of relu's
    kink a score lies.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(batch, 2, length, n, generator=generator) for n in (size, size, width, width))
    query_bias = torch.randn(2, 1, generator=generator)
    q, k, query_bias = ((8 * x).round() / 8 for x in (q, k, query_bias))
    return [q.to(dtype), k.to(dtype), v.to(dtype), query_bias, grad.to(dtype)]


def output_and_gradients(
    route: Callable[..., Tensor],
    f: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bias: Tensor,
    grad: Tensor,
    divide_by_sum: bool = False,
) -> list[Tensor]:
    """Return the output of `route`, and the gradients of q, k, v and the query bias."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, query_bias)]
    out = route(f, *leaves, divide_by_sum)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@either_sum
@every_function
@every_size
def test_fp32_is_the_definition_and_the_tiles_forward_and_backward(
    f: str, length: int, size: int, width: int, divide_by_sum: bool
):
    tensors = attention_inputs(length, size, width, torch.float32)
    actual, tiled = (
        output_and_gradients(route, f, *tensors, divide_by_sum)
        for route in (elementwise_attention, partial(compute_sums, TileSums))
    )
    for a, b, exact in zip(
        actual,
        tiled,
        output_and_gradients(dense_attention, f, *(x.double() for x in tensors), divide_by_sum),
        strict=True,
    ):
        allowed = (2e-4 if divide_by_sum else 1e-5) * max(1.0, exact.abs().max().item())  # small sums are divided by
        assert (a - exact).abs().max() <= allowed
        assert (b - exact).abs().max() <= allowed


@either_sum
@every_function
@every_size
def test_bf16_error_is_at_most_twice_that_of_the_definition_in_bf16(
    f: str, length: int, size: int, width: int, divide_by_sum: bool
):
    tensors = attention_inputs(length, size, width, torch.bfloat16)
    actual, plain = (
        output_and_gradients(route, f, *tensors, divide_by_sum) for route in (elementwise_attention, dense_attention)
    )
    assert [x.dtype for x in actual] == [torch.bfloat16] * 4 + [torch.float32]
    for a, b, exact in zip(
        actual,
        plain,
        output_and_gradients(dense_attention, f, *(x.double() for x in tensors), divide_by_sum),
        strict=True,
    ):
        # two roundings; small sums are divided by
        allowed = 2 * (b - exact).abs().max() + 2**-7 * exact.abs().max() + 1e-4 * divide_by_sum
        assert (a - exact).abs().max() <= allowed


@every_function
def test_without_a_shift_and_with_strided_inputs(f: str):
    *tensors, query_bias, grad = attention_inputs(50, 16, 32, torch.float32, batch=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in strided]
    actual = elementwise_attention(f, *leaves)
    actual = [actual.detach(), *torch.autograd.grad(actual, leaves, grad.expand_as(actual))]
    expected = output_and_gradients(dense_attention, f, *tensors, 0 * query_bias, grad)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(actual, expected[:4], strict=True))


@pytest.mark.parametrize("options", [opt.Relu2(), opt.Relu2(n="sum"), opt.Relu(), opt.Sigmoid(bias=True)], ids=str)
def test_a_normalizer_takes_the_kernel_and_trains_its_parameters(options: object):
    normalizer, layout = make_normalizer(options, LayerSpec(2, 16, 32, 64)), AttentionLayout.full(40)
    assert not why_no_triton(torch.device("cpu"), torch.float32, 16)
    q, k, v, _, grad = attention_inputs(40, 16, 16, torch.float32, batch=2)
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *normalizer.parameters()]
    fast, slow = normalizer(*leaves[:3], layout), normalizer.weights(*leaves[:2], layout) @ v
    assert torch.allclose(fast, slow, atol=1e-5)
    grads = (
        torch.autograd.grad(output, leaves, grad, allow_unused=True, materialize_grads=True) for output in (fast, slow)
    )
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_a_function_that_the_kernel_does_not_have_is_an_error():
    q, k, v, query_bias, _ = attention_inputs(40, 16, 16, torch.float32)
    with pytest.raises(Exception, match="no function of this kind"):
        elementwise_attention("cube", q, k, v, query_bias)


def test_the_gradient_of_a_row_with_one_weight_is_zero_in_bf16():
    """Its weight is 1 whatever the score: what is left of a difference of gradients must not be their rounding."""
    q, k, v, grad = (
        x[..., :1, :].contiguous()
        for x in attention_inputs(40, 16, 16, torch.bfloat16)[:3] + attention_inputs(40, 16, 16, torch.bfloat16)[4:]
    )
    q = k * 1e-2  # a small positive score
    actual = output_and_gradients(elementwise_attention, "relu2", q, k, v, torch.zeros(2, 1), grad, divide_by_sum=True)
    assert torch.equal(actual[0], v)
    assert actual[1].abs().max() < 1e-2 * grad.abs().max()


@every_function
def test_extreme_scores_stay_finite_and_nan_is_not_hidden(f: str):
    q, k, v, query_bias, grad = attention_inputs(40, 16, 16, torch.float32)
    for x in output_and_gradients(elementwise_attention, f, 1e4 * q, 1e4 * k, v, query_bias, grad):
        assert x.isfinite().all()
    q[0, 0, 20] = torch.nan
    out = elementwise_attention(f, q, k, v, query_bias)
    assert out[0, 0, 20].isnan().all()
    assert not out[0, 0, :20].isnan().any()
    assert not out[0, 0, 21:].isnan().any()


def test_inputs_that_the_kernel_does_not_support_use_tiles():
    cpu = torch.device("cpu")
    assert not why_no_triton(cpu, torch.bfloat16, 128)
    assert "float64" in why_no_triton(cpu, torch.float64, 64)
    assert "head size" in why_no_triton(cpu, torch.float32, 136)


def test_the_trial_accepts_the_kernel_and_warns_of_one_that_fails_or_differs(monkeypatch: pytest.MonkeyPatch):
    from lm.attention import triton_kernels

    def trial(device: torch.device) -> str:
        compare = partial(elementwise_sums._compare_with_tiles, device)
        return kernel_problem("the Triton kernel", device, compare)

    with torch.inference_mode():
        assert trial(torch.device("cpu")) == ""
    doubled = SimpleNamespace(apply=lambda *arguments: 2 * TileSums.apply(*arguments))
    monkeypatch.setattr(triton_kernels, "TritonSums", doubled)
    with pytest.warns(UserWarning, match="a slower route takes its place"):
        assert "results differ: relu2, relu, sigmoid" in trial(torch.device("cpu"))
    monkeypatch.setattr(triton_kernels, "TritonSums", SimpleNamespace(apply=lambda *_: 1 / 0))
    with pytest.warns(UserWarning, match="a slower route takes its place"):
        assert "ZeroDivisionError" in trial(torch.device("cpu"))
