"""Elementwise attention sums f(q.k / sqrt(D) + b) v over the keys up to each query, for a function f of one score and a
bias b of the query.

The Triton kernel computes these sums where it works; tiles in PyTorch compute them elsewhere. Shapes: N = sequences x
heads, T tokens, D head size, E width of the values.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.kernels import kernel_problem, output_and_gradients, triton_is_interpreted, without_autocast
from lm.attention.layout import keep_uncompiled
from lm.attention.routes import MIN_SUM, block_ranges, gradient_before_division

TILE_SIZE = 256  # queries and keys of one tile
MAX_TRITON_HEAD_SIZE = 128  # the largest head size that the Triton kernel takes


# ---------------------------------------------------------------- functions of a single score


class ElementwiseFunction(NamedTuple):
    """A function f of scores z, in forms for the forward and the backward pass.

    `forward` and `forward_` return f(z); `backward_` returns (f(z), grad x f'(z)). Functions whose names end in `_`
    overwrite their arguments.
    """

    forward: Callable[[Tensor], Tensor]  # f(z)
    forward_: Callable[[Tensor], Tensor]  # f(z); overwrites z
    # (f(z), grad x f'(z)) from z and grad; overwrites both
    backward_: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _relu2_backward_(z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return relu(z)^2 and `grad` times its derivative; both arguments are overwritten."""
    z.relu_()
    grad.mul_(z).mul_(2)
    return z.square_(), grad


def _sigmoid_backward_(z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigmoid(z) and `grad` times its derivative; both arguments are overwritten."""
    z.sigmoid_()
    grad.mul_(z)
    return z, grad.addcmul_(grad, z, value=-1)


ELEMENTWISE_FUNCTIONS = {  # by the name that the Triton kernels use, too
    "relu2": ElementwiseFunction(lambda z: z.relu().square(), lambda z: z.relu_().square_(), _relu2_backward_),
    "relu": ElementwiseFunction(torch.relu, torch.relu_, lambda z, grad: (z.relu_(), grad.mul_(z > 0))),
    "sigmoid": ElementwiseFunction(torch.sigmoid, torch.sigmoid_, _sigmoid_backward_),
}
# Functions of scores, by the names in `Normalizer.score_map`. `features` is the identity for scores that are products
# of non-negative features, for which diagnostics have another closed form.
SCORE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    **{name: function.forward for name, function in ELEMENTWISE_FUNCTIONS.items()},
    "identity": lambda z: z,
    "features": lambda z: z,
}


# ---------------------------------------------------------------- tiles


class TileSums(torch.autograd.Function):
    """Compute causal sums of f(q.k / sqrt(D) + b) v tile by tile, for q, k (N, T, D), v (N, T, E) and b, the
    `query_bias` (N, T) or None, on any device. Memory holds one tile of weights per head at a time.

    With `divide_by_sum` weights are divided by their sum, and are in fp32 or wider in the forward pass. Otherwise, and
    in the backward pass, weights are in v's dtype. Scores, f and sums are in fp32 or wider.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        function_name: str,
        divide_by_sum: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_bias: Tensor | None,
    ) -> Tensor:
        wide_dtype = torch.promote_types(v.dtype, torch.float32)
        output = torch.empty(v.shape, dtype=wide_dtype if divide_by_sum else v.dtype, device=v.device)
        sums = torch.empty((*v.shape[:2], 1), dtype=wide_dtype, device=v.device) if divide_by_sum else None
        qw, kw = q.to(wide_dtype), k.to(wide_dtype)
        values = v.to(output.dtype)  # rows divided by their sums stay unrounded: their gradients are small differences
        with without_autocast(v.device):  # as in the backward pass
            for a, b in block_ranges(q.size(1), TILE_SIZE):
                output_block = torch.zeros(v.size(0), b - a, v.size(2), dtype=wide_dtype, device=v.device)
                row_sum = torch.zeros(v.size(0), b - a, 1, dtype=wide_dtype, device=v.device)
                for c, d in block_ranges(b, TILE_SIZE):
                    w = ELEMENTWISE_FUNCTIONS[function_name].forward_(
                        _unmasked_tile_scores(qw, kw, query_bias, a, b, c, d)
                    )
                    w = (w.tril_() if c == a else w).to(output.dtype)
                    output_block += w @ values[:, c:d]
                    if divide_by_sum:
                        row_sum += w.sum(-1, keepdim=True)
                if divide_by_sum:
                    sums[:, a:b] = row_sum.masked_fill_(row_sum < MIN_SUM, torch.inf)
                    output_block /= row_sum
                output[:, a:b] = output_block
        ctx.save_for_backward(q, k, v, query_bias, *((output, sums) if divide_by_sum else ()))
        ctx.function_name = function_name
        return output.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_bias, *saved_sums = ctx.saved_tensors
        grad, mean_grad = gradient_before_division(grad, v.dtype, *saved_sums) if saved_sums else (grad, None)
        wide_dtype = torch.promote_types(v.dtype, torch.float32)
        qw, kw, vw, gw = (x.to(wide_dtype) for x in (q, k, v, grad))
        dq, dk, dv = (torch.zeros_like(x) for x in (qw, kw, vw))
        dbias = None if query_bias is None else torch.zeros_like(query_bias)
        with without_autocast(v.device):
            for a, b in block_ranges(q.size(1), TILE_SIZE):
                for c, d in block_ranges(b, TILE_SIZE):
                    dw = gw[:, a:b] @ vw[:, c:d].transpose(1, 2)
                    if mean_grad is not None:
                        dw -= mean_grad[:, a:b]
                    scores = _unmasked_tile_scores(qw, kw, query_bias, a, b, c, d)
                    w, dz = ELEMENTWISE_FUNCTIONS[ctx.function_name].backward_(scores, dw)
                    if c == a:
                        w, dz = w.tril_(), dz.tril_()
                    if dbias is not None:
                        dbias[:, a:b] += dz.sum(-1)
                    w, dz = w.to(v.dtype), dz.to(v.dtype)
                    dq[:, a:b] += dz @ k[:, c:d]
                    dk[:, c:d] += dz.transpose(1, 2) @ q[:, a:b]
                    dv[:, c:d] += w.transpose(1, 2) @ grad[:, a:b]
        dq, dk = (x.div_(math.sqrt(q.size(-1))) for x in (dq, dk))
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


def _unmasked_tile_scores(
    q: Tensor, k: Tensor, query_bias: Tensor | None, query_start: int, query_end: int, key_start: int, key_end: int
) -> Tensor:
    """Return the scores q.k / sqrt(D) + query_bias of a tile, without a mask: (N, query_end - query_start,
    key_end - key_start). `query_bias`, (N, T), is one number for each query; q and k are (N, T, D)."""
    queries, keys = q[:, query_start:query_end], k[:, key_start:key_end]
    bias_column = q.new_zeros(1, 1, 1) if query_bias is None else query_bias[:, query_start:query_end].unsqueeze(-1)
    return torch.baddbmm(bias_column, queries, keys.mT, beta=query_bias is not None, alpha=1 / math.sqrt(q.size(-1)))


# ---------------------------------------------------------------- the Triton kernel, or tiles


def why_no_triton(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Return the reason why `elementwise_attention` takes tiles instead of the Triton kernel; empty if the kernel runs.

    dtype: the dtype of q and k.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the Triton kernel has no {dtype}"
    if head_size > MAX_TRITON_HEAD_SIZE:
        return f"the Triton kernel has no head size over {MAX_TRITON_HEAD_SIZE}"
    if triton_is_interpreted():
        return ""
    if device.type != "cuda":
        return "the Triton kernel needs a CUDA GPU"
    return _device_problem(device)


@cache
def _device_problem(device: torch.device) -> str:
    """Return the reason why the Triton kernel can't run on `device`; empty if it can.

    The import of the kernel fails without triton, and in exported models, which have no copy of the kernel.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernel needs a GPU of compute capability 8.0"
    return kernel_problem("the Triton kernel", device, partial(_compare_with_tiles, device))


def _compare_with_tiles(device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of f, a tensor from the Triton kernel, and the same tensor from the tiles, for the output and each
    gradient. Each f is computed with and without `query_bias`, and with and without `divide_by_sum`.

    Raises the compiler's error where the machine lacks a C compiler or Python's headers; `kernel_problem` catches it.
    """
    from lm.attention import triton_kernels

    *qkv, grad = torch.arange(4 * 80 * 16.0, device=device).sin().bfloat16().view(4, 1, 1, 80, 16)
    for name, bias, divide_by_sum in product(ELEMENTWISE_FUNCTIONS, ([], [qkv[0][..., 0].float()]), (False, True)):
        pair = (
            output_and_gradients(partial(compute_sums, sums, name, divide_by_sum=divide_by_sum), [*qkv, *bias], grad)
            for sums in (triton_kernels.TritonSums, TileSums)
        )
        yield from ((name, a, b) for a, b in zip(*pair, strict=True))


@keep_uncompiled
def elementwise_attention(
    function_name: str, q: Tensor, k: Tensor, v: Tensor, query_bias: Tensor | None = None, divide_by_sum: bool = False
) -> Tensor:
    """Return sum_{j <= i} f(q_i.k_j / sqrt(D) + b_i) v_j, (B, H, T, E) in the dtype of `v`.

    A Triton kernel or tiles (`why_no_triton`) compute it. The scores are multiplied by 1 / sqrt(D) in fp32: q times
    this factor would be rounded once more, to `q.dtype`.

    Args:
        function_name: the name of f in `ELEMENTWISE_FUNCTIONS`.
        q, k, v: (B, H, T, D), (B, H, T, D) and (B, H, T, E), all of one dtype.
        query_bias: the bias b of each query, fp32, broadcastable to (B, H, T); None for 0.
        divide_by_sum: divide each query's output by the sum of f over its keys; f must not be negative.
    """
    if why_no_triton(q.device, q.dtype, q.size(-1)):
        return compute_sums(TileSums, function_name, q, k, v, query_bias, divide_by_sum)
    from lm.attention import triton_kernels  # `from triton_kernels` would be a file that transformers demands

    return compute_sums(triton_kernels.TritonSums, function_name, q, k, v, query_bias, divide_by_sum)


def compute_sums(
    sums: type[torch.autograd.Function],
    function_name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bias: Tensor | None = None,
    divide_by_sum: bool = False,
) -> Tensor:
    """Compute `elementwise_attention` by `sums`: `TileSums`, or `TritonSums` of `lm.attention.triton_kernels`."""
    if query_bias is not None:
        query_bias = query_bias.to(torch.promote_types(v.dtype, torch.float32)).expand(q.shape[:3]).flatten(0, 1)
    output = sums.apply(function_name, divide_by_sum, *(x.flatten(0, 1) for x in (q, k, v)), query_bias)
    return output.unflatten(0, q.shape[:2])
