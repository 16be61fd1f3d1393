"""Triton kernels compute causal sums of f(q.k / sqrt(D) + b) v, for a function f of one score and a bias b of each
query. They never write weights to GPU memory.

Importing this module needs `triton`; `lm.attention.elementwise_sums` decides whether to use it. Sums and f are in fp32
whatever the inputs; fp32 inputs are multiplied in full precision, never as TF32. There are no atomic additions, so the
same inputs give the same bits. Shapes: N = sequences x heads, T tokens, D head size, E width of the values. A program
takes at most 128 columns of the values. If `HAS_QUERY_BIAS`, b is `query_bias` (N, T), else 0. If `DIVIDE_BY_SUM`,
weights are divided by their sums (N, T). The backward pass then subtracts `mean_grad` (N, T) from the gradient of each
weight. This is the mean of the gradients of a query's weights, in which each key counts by its weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.kernels import triton_is_interpreted
from lm.attention.routes import MIN_SUM, gradient_before_division

KERNEL_MIN_SUM = tl.constexpr(MIN_SUM)
# Triton's interpreter would multiply the bit patterns of bf16 numbers
WIDEN_BF16 = tl.constexpr(triton_is_interpreted())
# columns of v that a program holds; wider values take further programs, which compute the weights again
VALUE_PIECE_WIDTH = 128
# Fewest columns of a tile in bf16. On Hopper, Triton 3.6 and later compile narrower products to code that sometimes
# reads shared memory beyond its tiles (triton-lang/triton#10486, #11366). On an H200 a head of 64 dimensions with 16
# values failed in 4 of 10 first runs.
MIN_BF16_TILE_WIDTH = 64


@triton.jit
def _value_and_derivative(z, FUNCTION_NAME: tl.constexpr):
    """Return (f(z), f'(z)) for the f named `FUNCTION_NAME` in `ELEMENTWISE_FUNCTIONS`, a table of
    `lm.attention.elementwise_sums`; NaN stays NaN.
    """
    if FUNCTION_NAME == "sigmoid":
        value = 1 / (1 + tl.exp(-z))
        derivative = value * (1 - value)
    elif FUNCTION_NAME == "relu2":
        value = tl.where(z < 0, 0.0, z)
        derivative = 2 * value
        value = value * value
    else:
        tl.static_assert(FUNCTION_NAME == "relu", "no function of this kind")
        value = tl.where(z < 0, 0.0, z)
        derivative = tl.where(z > 0, 1.0, 0.0)
    return value, derivative


@triton.jit
def _dot(a, b, accumulator):
    """Return the matrix product a b, plus `accumulator`."""
    if WIDEN_BF16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def _load_tile(x, rows, columns, height, WIDTH: tl.constexpr):
    """Load the tile x[rows, columns] of a matrix x (height, WIDTH); entries outside of the matrix are 0."""
    mask = (rows < height)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(x + rows[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_tile(x, tile, rows, columns, height, WIDTH: tl.constexpr):
    """Store `tile` in x[rows, columns] of a matrix x (height, WIDTH); entries outside of the matrix are not stored."""
    mask = (rows < height)[:, None] & (columns < WIDTH)[None, :]
    tl.store(x + rows[:, None] * WIDTH + columns[None, :], tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_vector(x, i, T, PRESENT: tl.constexpr):
    """Load the entries x[i] of a vector x, with 0 for i >= T; return zeros if the kernel has no such vector
    (`PRESENT` is false).
    """
    if PRESENT:
        return tl.load(x + i, mask=i < T, other=0.0)
    else:
        return tl.zeros(i.shape, tl.float32)


@triton.jit
def _head_and_first_token(T, BLOCK: tl.constexpr):
    """Return the index n < N of this program's sequence and head, and the first token of its block."""
    blocks = tl.cdiv(T, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK


@triton.jit
def _forward(
    q, k, v, query_bias, outputs, sums, T,
    D: tl.constexpr, E: tl.constexpr, HAS_QUERY_BIAS: tl.constexpr, DIVIDE_BY_SUM: tl.constexpr,
    FUNCTION_NAME: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute a block of outputs, for one piece of at most 128 columns of the values, in a loop over blocks of keys."""
    n, first_token = _head_and_first_token(T, BLOCK)
    i = first_token + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k, v = k + n * T * D, v + n * T * E
    q_i, bias_i = _load_tile(q + n * T * D, i, d, T, D), _load_vector(query_bias + n * T, i, T, HAS_QUERY_BIAS)
    total, row_sum = tl.zeros((BLOCK, BLOCK_E), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, first_token + BLOCK, BLOCK):
        j = start + tl.arange(0, BLOCK)
        z = (
            _dot(q_i, tl.trans(_load_tile(k, j, d, T, D)), tl.zeros((BLOCK, BLOCK), tl.float32)) * SCALE
            + bias_i[:, None]
        )
        w, _ = _value_and_derivative(z, FUNCTION_NAME)
        w = tl.where(i[:, None] >= j[None, :], w, 0.0).to(v.dtype.element_ty)
        total = _dot(w, _load_tile(v, j, e, T, E), total)
        if DIVIDE_BY_SUM:
            row_sum += tl.sum(w.to(tl.float32), 1)
    if DIVIDE_BY_SUM:
        row_sum = tl.where(row_sum < KERNEL_MIN_SUM, float("inf"), row_sum)
        total /= row_sum[:, None]
        if tl.program_id(1) == 0:
            tl.store(sums + n * T + i, row_sum, mask=i < T)
    _store_tile(outputs + n * T * E, total, i, e, T, E)


@triton.jit
def _backward_queries(
    q, k, v, query_bias, grad, mean_grad, dq, dbias, T,
    D: tl.constexpr, E: tl.constexpr, HAS_QUERY_BIAS: tl.constexpr, DIVIDE_BY_SUM: tl.constexpr,
    FUNCTION_NAME: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute a block of dq and dbias, the gradients of q and the bias, in a loop over blocks of keys."""
    n, first_token = _head_and_first_token(T, BLOCK)
    i, d, e = first_token + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    k, v, grad = k + n * T * D, v + n * T * E, grad + n * T * E
    q_i = _load_tile(q + n * T * D, i, d, T, D)
    bias_i = _load_vector(query_bias + n * T, i, T, HAS_QUERY_BIAS)
    g_i = _load_tile(grad, i, e, T, E)
    mean_i = _load_vector(mean_grad + n * T, i, T, DIVIDE_BY_SUM)
    dq_i, dbias_i = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, first_token + BLOCK, BLOCK):
        j = start + tl.arange(0, BLOCK)
        k_j = _load_tile(k, j, d, T, D)
        z = _dot(q_i, tl.trans(k_j), tl.zeros((BLOCK, BLOCK), tl.float32)) * SCALE + bias_i[:, None]
        dw = _dot(g_i, tl.trans(_load_tile(v, j, e, T, E)), tl.zeros((BLOCK, BLOCK), tl.float32))
        for offset in range(BLOCK_E, E, BLOCK_E):
            dw = _dot(_load_tile(grad, i, offset + e, T, E), tl.trans(_load_tile(v, j, offset + e, T, E)), dw)
        _, derivative = _value_and_derivative(z, FUNCTION_NAME)
        dz = tl.where(i[:, None] >= j[None, :], (dw - mean_i[:, None]) * derivative, 0.0)
        dq_i = _dot(dz.to(k.dtype.element_ty), k_j, dq_i)
        dbias_i += tl.sum(dz, 1)
    _store_tile(dq + n * T * D, dq_i * SCALE, i, d, T, D)
    if HAS_QUERY_BIAS:
        tl.store(dbias + n * T + i, dbias_i, mask=i < T)


@triton.jit
def _backward_keys(
    q, k, v, query_bias, grad, mean_grad, dk, dv, T,
    D: tl.constexpr, E: tl.constexpr, HAS_QUERY_BIAS: tl.constexpr, DIVIDE_BY_SUM: tl.constexpr,
    FUNCTION_NAME: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, FIRST_PIECE: tl.constexpr,
):  # fmt: skip
    """Compute a block of dk and dv, the gradients of k and v, in a loop over blocks of queries.

    If `FIRST_PIECE`, the kernel computes dk and the first piece of at most 128 columns of dv, else another piece of dv
    alone. All tiles of weights are (keys, queries), so that none is ever transposed.
    """
    n, first_token = _head_and_first_token(T, BLOCK)
    j, d, e = first_token + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    if not FIRST_PIECE:
        e += (tl.program_id(1) + 1) * BLOCK_E
    q, v, grad = q + n * T * D, v + n * T * E, grad + n * T * E
    query_bias, mean_grad = query_bias + n * T, mean_grad + n * T
    k_j, v_j = _load_tile(k + n * T * D, j, d, T, D), _load_tile(v, j, e, T, E)
    dk_j, dv_j = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.zeros((BLOCK, BLOCK_E), tl.float32)
    for start in range(first_token, T, BLOCK):
        i = start + tl.arange(0, BLOCK)
        q_i, g_i = _load_tile(q, i, d, T, D), _load_tile(grad, i, e, T, E)
        z = (
            _dot(k_j, tl.trans(q_i), tl.zeros((BLOCK, BLOCK), tl.float32)) * SCALE
            + _load_vector(query_bias, i, T, HAS_QUERY_BIAS)[None, :]
        )
        w, derivative = _value_and_derivative(z, FUNCTION_NAME)
        mask = i[None, :] >= j[:, None]  # the mask holds queries beyond T, too: their gradients are 0
        dv_j = _dot(tl.where(mask, w, 0.0).to(grad.dtype.element_ty), g_i, dv_j)
        if FIRST_PIECE:
            dw = _dot(v_j, tl.trans(g_i), tl.zeros((BLOCK, BLOCK), tl.float32))
            for offset in range(BLOCK_E, E, BLOCK_E):
                dw = _dot(_load_tile(v, j, offset + e, T, E), tl.trans(_load_tile(grad, i, offset + e, T, E)), dw)
            dz = tl.where(mask, (dw - _load_vector(mean_grad, i, T, DIVIDE_BY_SUM)[None, :]) * derivative, 0.0)
            dk_j = _dot(dz.to(q.dtype.element_ty), q_i, dk_j)
    if FIRST_PIECE:
        _store_tile(dk + n * T * D, dk_j * SCALE, j, d, T, D)
    _store_tile(dv + n * T * E, dv_j, j, e, T, E)


def launch_options(
    dtype: torch.dtype, head_size: int, value_width: int, function_name: str, has_query_bias: bool, divide_by_sum: bool
) -> dict[str, int | str | bool]:
    """Return the options of a kernel launch, by name, for inputs of `dtype`.

    Block sizes are fixed, not tuned. With them compiled kernels spill few registers, and fit into the shared memory of
    GPUs that have no more than 99 KiB.
    """
    min_columns = MIN_BF16_TILE_WIDTH if dtype == torch.bfloat16 else 16
    block_d, block_e = (
        max(min_columns, triton.next_power_of_2(x)) for x in (head_size, min(value_width, VALUE_PIECE_WIDTH))
    )
    is_small = dtype == torch.bfloat16 and block_d + block_e <= 128
    return {
        "D": head_size,
        "E": value_width,
        "HAS_QUERY_BIAS": has_query_bias,
        "DIVIDE_BY_SUM": divide_by_sum,
        "FUNCTION_NAME": function_name,
        "SCALE": head_size**-0.5,
        "BLOCK": 64 if dtype == torch.bfloat16 else 32,
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "num_warps": 4 if is_small else 8,
        "num_stages": 3 if is_small else 2,
    }


class TritonSums(torch.autograd.Function):
    """Compute elementwise attention of (N, T, .) tensors by the kernels above; `query_bias` is (N, T) fp32 or None.
    `why_no_triton` in `lm.attention.elementwise_sums` says which tensors they take.
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
        q, k, v, query_bias = (x if x is None else x.contiguous() for x in (q, k, v, query_bias))
        ctx.options = launch_options(
            q.dtype, q.size(-1), v.size(-1), function_name, query_bias is not None, divide_by_sum
        )
        blocks = triton.cdiv(q.size(1), ctx.options["BLOCK"]) * q.size(0)
        output = torch.empty_like(v, dtype=torch.float32 if divide_by_sum else v.dtype)
        sums = torch.empty((*v.shape[:2], 1), device=v.device) if divide_by_sum else None
        placeholder = q  # passed for arguments that the kernel does not read
        arguments = (
            q,
            k,
            v,
            placeholder if query_bias is None else query_bias,
            output,
            sums if divide_by_sum else placeholder,
        )
        with torch.cuda.device_of(q):
            _forward[(blocks, triton.cdiv(v.size(-1), VALUE_PIECE_WIDTH))](*arguments, q.size(1), **ctx.options)
        ctx.save_for_backward(q, k, v, query_bias, *((output, sums) if divide_by_sum else ()))
        return output.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_bias, *saved_sums = ctx.saved_tensors
        grad, mean_grad = gradient_before_division(grad, v.dtype, *saved_sums) if saved_sums else (grad, q)
        blocks = triton.cdiv(q.size(1), ctx.options["BLOCK"]) * q.size(0)
        pieces = triton.cdiv(v.size(-1), VALUE_PIECE_WIDTH)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        bias_or_q, dbias = (q, dq) if query_bias is None else (query_bias, torch.empty_like(query_bias))
        inputs = q, k, v, bias_or_q, grad.contiguous(), mean_grad.contiguous()
        with torch.cuda.device_of(q):
            _backward_queries[(blocks,)](*inputs, dq, dbias, q.size(1), **ctx.options)
            _backward_keys[(blocks,)](*inputs, dk, dv, q.size(1), FIRST_PIECE=True, **ctx.options)
            if pieces > 1:
                _backward_keys[(blocks, pieces - 1)](*inputs, dk, dv, q.size(1), FIRST_PIECE=False, **ctx.options)
        return None, None, dq, dk, dv, None if query_bias is None else dbias
