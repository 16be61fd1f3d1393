"""Routes of attention are algorithms that compute weights x values exactly, for long sequences without holding T x T
weights.

PyTorch's fused kernel computes softmax, with two exceptions on a CPU. Short sequences are computed in blocks of
queries. Long sequences are computed by `lm.attention.cpu_kernel` if they need no gradients. A definition without a
fused kernel is computed for some queries at a time. Elementwise attention has routes of its own
(`lm.attention.elementwise_sums`).

Shapes: B sequences, H heads, T queries, S keys, D head size, E width of the values; N = B x H.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention import cpu_kernel
from lm.attention.kernels import without_autocast
from lm.attention.layout import AttentionLayout, keep_uncompiled

MIN_SUM = 1e-24  # a query whose weights would be divided by a smaller sum has weights 0


def block_ranges(length: int, size: int) -> list[tuple[int, int]]:
    """Cut `length` tokens into blocks of at most `size` tokens, and return each block's (first token, last
    token + 1).
    """
    return [(a, min(a + size, length)) for a in range(0, length, size)]


# ---------------------------------------------------------------- weights divided by their sums


def divide_rows(rows: Tensor, total: Tensor, factor_instead: Tensor | None) -> Tensor:
    """Divide rows of weights or outputs by `total`, or multiply them by `factor_instead` if that is given. Returns fp32
    or wider.

    A row that would be divided by less than `MIN_SUM` becomes 0, for example where relu(z)^2 is 0 for all keys.

    rows: (B, H, T, size). total: (B, H, T, 1). factor_instead: broadcastable to (B, H, T).
    """
    wide_dtype = torch.promote_types(rows.dtype, torch.float32)
    if factor_instead is None:
        total = total.to(wide_dtype)
        return rows.to(wide_dtype) / total.masked_fill(total < MIN_SUM, torch.inf)
    return rows * factor_instead.unsqueeze(-1).to(wide_dtype)


def gradient_before_division(grad: Tensor, dtype: torch.dtype, output: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return `grad` / `sums`, rounded to `dtype`, and the sum over the last dimension of this rounded tensor times
    `output`, (N, T, 1). `output` is weights x values divided by `sums`; `grad` is its gradient.

    The first result is the gradient of weights x values before the division. The second is the mean of the gradients of
    a query's weights, in which each key counts by its weight. The caller subtracts this mean from each of these
    gradients, as in the backward pass of softmax. The difference must be 0 for a key that has all the weight. So the
    mean is computed from the same rounded first result as the gradients, and is not rounded itself.
    """
    grad = (grad / sums).to(dtype)
    return grad, (grad.to(output.dtype) * output).sum(-1, keepdim=True)


# ---------------------------------------------------------------- softmax


# most keys that `block_softmax` takes on a CPU; with more, the fused kernel is as fast, and keeps no T x T weights
MAX_BLOCK_SOFTMAX_LENGTH = 512
SOFTMAX_BLOCK_QUERIES = 64  # queries of a block
MAX_SOFTMAX_BLOCK_WEIGHTS = 2**20  # most weights computed together, which limits how many heads a block has
# PyTorch's fused kernel on a CPU takes a mask beside `is_causal`, as the public function doesn't; None: it isn't there
TORCH_CPU_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def fused_softmax(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, mask: Tensor | None = None, key_bias: Tensor | None = None
) -> Tensor:
    """Return softmax(q.k / sqrt(D) + key_bias) v, (B, H, T, E) in the dtype of `v`, by the fastest route.

    The fused kernel needs values as wide as keys. So wider values are cut into pieces, each of which is one more head
    with a copy of q and k.

    mask: used in place of the mask of `layout`. key_bias: a logit of each key, broadcastable to (B, H, S).
    """
    scale, width, causal = 1 / math.sqrt(q.size(-1)), v.size(-1), layout.mask_is_triangular and mask is None
    in_order = (layout.mask_is_triangular or layout.mask_is_triangle_end) and mask is None and v.device.type == "cpu"
    if in_order and k.size(2) <= MAX_BLOCK_SOFTMAX_LENGTH:
        return block_softmax(q, k, v, scale, key_bias=key_bias)
    if key_bias is not None:
        q, k = q.to(v.dtype), k.to(v.dtype)
        if TORCH_CPU_KERNEL and causal and in_order and torch.is_grad_enabled() and q.size(-1) == width:
            return _biased_softmax(q, k, v, key_bias, scale)
        q, k = append_bias(q, k, key_bias / scale)
    size, needs_grad = q.size(-1), torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if in_order and not (needs_grad or cpu_kernel.why_unusable(v)):
        return cpu_kernel.causal_softmax_no_grad(*(x.flatten(0, 1) for x in (q, k, v)), scale).unflatten(0, q.shape[:2])
    n_pieces = -(-width // size)
    if width != size:
        # (B, H x n_pieces, S, D)
        v = F.pad(v, (0, n_pieces * size - width)).unflatten(-1, (n_pieces, size)).transpose(2, 3).flatten(1, 2)
        q, k = q.repeat_interleave(n_pieces, 1), k.repeat_interleave(n_pieces, 1)
    if mask is None and not causal:
        mask = layout.visible()
    output = F.scaled_dot_product_attention(
        q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=causal, scale=scale
    )
    return output if width == size else output.unflatten(1, (-1, n_pieces)).transpose(2, 3).flatten(-2)[..., :width]


class _BiasedSoftmax(torch.autograd.Function):
    """Compute causal softmax(scale q.k + bias) v by PyTorch's kernel for CPUs. The kernel adds the bias (B, H, S) as a
    mask, and has no gradient for a mask. So the backward pass appends dimensions to q and k, from whose gradients that
    of the bias follows (`append_bias`).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        # the kernel misreads a mask that isn't contiguous, and reads other strides of the last dimension as 1
        mask = (bias - bias[..., bias.size(-1) // 2, None]).unsqueeze(-2).contiguous()
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        output, log_sums = TORCH_CPU_KERNEL(q, k, v, is_causal=True, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, bias, output, log_sums, mask)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, output, log_sums, mask = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, bias)]
        with torch.enable_grad():
            long_q, long_k = (
                append_bias(*leaves[:2], leaves[2] / ctx.scale, 0) if ctx.needs_input_grad[3] else leaves[:2]
            )
        padding = 0, long_q.size(-1) - q.size(-1)
        grad, long_v, output = (F.pad(x, padding) for x in (grad, v, output))
        backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *long_grads, dv = backward_kernel(
            grad, long_q, long_k, long_v, output, log_sums, 0.0, True, attn_mask=mask, scale=ctx.scale
        )
        dq, dk, dbias = torch.autograd.grad((long_q, long_k), leaves, long_grads, materialize_grads=True)
        return dq, dk, dv[..., : v.size(-1)], dbias, None


@keep_uncompiled
def _biased_softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return causal softmax(scale q.k + bias) v, all of one head size on a CPU; bias: broadcastable to (B, H, S)."""
    bias = bias.to(torch.promote_types(v.dtype, torch.float32)).expand(k.shape[:3])
    return _BiasedSoftmax.apply(q, k, v, bias, scale)


def append_bias(q: Tensor, k: Tensor, bias: Tensor, n_bf16_parts: int = 3) -> tuple[Tensor, Tensor]:
    """Append a few dimensions to q and k, so that each product q.k grows by the key's `bias`. With `n_bf16_parts` 0 the
    products stay as they are, and the new dimensions serve the bias's gradient alone, for a kernel that adds the bias
    itself.

    q (B, H, T, D) are the last T of the S tokens of k (B, H, S, D); bias: fp32, broadcastable to (B, H, S). A constant
    added to all biases does not change softmax. So the bias of the middle query's own key is subtracted from all, which
    keeps their rounding small. The bias is split into three bf16 numbers: its first bits, the first bits of the
    remainder, and the last remainder. On a GPU the head size becomes a multiple of 8, as kernels need.

    Gradients of q and k are rounded. If the bias is a sum over tokens, as in forgetting attention, its gradients and
    their rounding errors are summed over all tokens. To keep these errors small, the gradient flows through
    differences: the bias of key j minus the bias of the query's own key i. The latter is the same for all keys of a
    query, so it does not change softmax. A difference is a sum of steps: from j to the last key of its block, from
    block to block, and then to i.

    Each step is a product of two numbers in one of the new dimensions. One is the constant `small`, the other the step
    divided by `small`. The step's value is replaced by 0, and only its gradient is kept (`_straight_through_zeros`).
    Each new dimension holds `small` plus one step in q, and `small` plus another step in k. Beside the steps the
    product then has the square of `small`, which is negligible beside a logit.
    """
    n_keys, first, parts = k.size(2), k.size(2) - q.size(2), []
    rest = (bias - bias[..., (first + n_keys) // 2, None].detach()).expand(k.shape[:3])
    if rest.requires_grad:
        ends = torch.arange(1, 6, device=k.device) * n_keys // 5 - 1  # the last key of each of five blocks
        block = torch.searchsorted(ends, torch.arange(n_keys, device=k.device))
        small = max(torch.finfo(k.dtype).tiny, 2**-126) ** 0.5
        gradient = _straight_through_zeros(rest - rest[..., ends[block]]) / small
        steps = _straight_through_zeros(rest[..., ends[:-1], None] - rest[..., ends[1:], None]) / small
        parts.append((small - gradient, small + gradient))
        for n in (0, 2):
            query_part = (block > n) * small + (block > n + 1) * steps[..., n + 1, :]
            parts.append((query_part, (block <= n + 1) * small + (block <= n) * steps[..., n, :]))
        rest = rest.detach()
    for n in range(n_bf16_parts):
        part = rest if n == 2 else _truncate_to_bf16(rest)
        parts.append((torch.ones_like(rest), part))
        rest = rest - part
    if not parts:
        return q, k
    padding = 0, -(q.size(3) + len(parts)) % (2 if k.device.type == "cpu" else 8)
    for_q, for_k = (F.pad(torch.stack(x, -1).to(k.dtype), padding) for x in zip(*parts, strict=True))
    return torch.cat((q, for_q[..., first:, :]), -1), torch.cat((k, for_k), -1)


def _truncate_to_bf16(x: Tensor) -> Tensor:
    """Return the first 8 significant bits of x, which are a bf16 number. Compiled code would leave out a cast to bf16
    and back.
    """
    return (x.float().view(torch.int32) & -(2**16)).view(torch.float32)


def _straight_through_zeros(x: Tensor) -> Tensor:
    """Return zeros through which the gradient of x flows unchanged."""
    return x - x.detach()


class _BlockSoftmax(torch.autograd.Function):
    """Compute causal softmax(scale q.k + bias) v by blocks of queries. q (N, T, D) are the last T of S tokens; k is
    (N, S, D), v is (N, S, E), and the bias (N, 1, S) or None.

    With `logit_map` (a `lm.attention.distance.MappedSoftmax`), softmax is of the scores to which it maps scale q.k.
    Without `logit_map` the backward pass reuses the weights. PyTorch's kernel recomputes them, and takes twice the time
    on a CPU, up to some hundred tokens.

    In the forward pass q, k and the scores' softmax are in fp32 or wider, then weights and their products with v in v's
    dtype. In the backward pass gradients of weights are in fp32 or wider, then q, k and gradients of scores in v's
    dtype.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        scale: float,
        logit_map: nn.Module | None,
    ) -> Tensor:
        output, saved_weights, needs_grad = v.new_empty(*q.shape[:2], v.size(2)), [], any(ctx.needs_input_grad)
        with without_autocast(v.device):
            for heads, queries, keys, distance_coefficients in _softmax_blocks(q, k, logit_map):
                scores = _compute_scores(q[heads, queries], k[heads, keys], scale, logit_map, distance_coefficients)
                if bias is not None:
                    scores += bias[heads, :, keys]
                weights = _hide_later_keys(scores).softmax(-1).to(v.dtype)
                output[heads, queries] = weights @ v[heads, keys]
                if needs_grad and not logit_map:
                    saved_weights.append(weights)
        if needs_grad:
            dtype = q.dtype if logit_map else v.dtype
            ctx.save_for_backward(q.to(dtype), k.to(dtype), v, *saved_weights)
            ctx.scale, ctx.logit_map = scale, logit_map
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved_weights = ctx.saved_tensors
        wide_dtype = torch.promote_types(v.dtype, torch.float32)
        dq, dk, dv, dbias = (torch.zeros_like(x, dtype=wide_dtype) for x in (q, k, v, k[..., :1].mT))
        grad, needs_dbias = grad.contiguous(), ctx.needs_input_grad[3]
        scaled_grad, v_wide = grad.to(wide_dtype) * ctx.scale, v.to(wide_dtype)
        low_q, low_k = q.to(v.dtype), k.to(v.dtype)
        with without_autocast(v.device):
            for number, (heads, queries, keys, distance_coefficients) in enumerate(
                _softmax_blocks(q, k, ctx.logit_map)
            ):
                if ctx.logit_map:
                    scores = _compute_scores(
                        q[heads, queries], k[heads, keys], ctx.scale, ctx.logit_map, distance_coefficients
                    )
                    derivative = ctx.logit_map.score_derivative(scores, distance_coefficients)
                    wide_weights = _hide_later_keys(scores).softmax(-1)
                    weights = wide_weights.to(v.dtype)
                else:
                    weights = saved_weights[number]
                    wide_weights = weights.to(wide_dtype)
                dv[heads, keys] += weights.mT @ grad[heads, queries]
                dweights = scaled_grad[heads, queries] @ v_wide[heads, keys].mT
                dscores = torch._softmax_backward_data(dweights, wide_weights, -1, wide_dtype)
                if ctx.logit_map:
                    dscores *= derivative
                if needs_dbias:
                    dbias[heads, :, keys] += dscores.sum(1, keepdim=True)
                dscores = dscores.to(v.dtype)
                dq[heads, queries] = dscores @ low_k[heads, keys]
                dk[heads, keys] += dscores.mT @ low_q[heads, queries]
        return dq, dk, dv.to(v.dtype), dbias / ctx.scale if needs_dbias else None, None, None


def _compute_scores(
    q: Tensor, k: Tensor, scale: float, logit_map: nn.Module | None, distance_coefficients: Tensor | None
) -> Tensor:
    """Return the scores (N, T, S) of the queries q (N, T, D) and the keys k (N, S, D)."""
    logits = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.mT, beta=0, alpha=scale)
    return logit_map.map_logits(logits, distance_coefficients) if logit_map else logits


def _hide_later_keys(scores: Tensor) -> Tensor:
    """Set the scores (N, T, S) of keys after the query to -inf, in place; the queries are the last T of S tokens."""
    n_queries, n_keys = scores.shape[1:]
    scores[:, :, n_keys - n_queries :] += scores.new_full((n_queries, n_queries), -math.inf).triu_(1)
    return scores


def _softmax_blocks(
    q: Tensor, k: Tensor, logit_map: nn.Module | None
) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """Yield, for each block of scores, its slices of the N heads, of the queries and of the keys, and the values that
    `logit_map` needs for the distance of each query and key; None without `logit_map`.

    N counts the heads of all sequences. q (N, T, D) are the last T of the S tokens of k (N, S, D).
    """
    (n, queries), keys = q.shape[:2], k.size(1)
    first = keys - queries
    on_cpu = q.device.type == "cpu"
    max_weights = MAX_SOFTMAX_BLOCK_WEIGHTS if on_cpu else MAX_GPU_BLOCK_WEIGHTS
    n_heads = max(1, max_weights // (SOFTMAX_BLOCK_QUERIES * keys))
    n_queries = SOFTMAX_BLOCK_QUERIES if on_cpu else max(SOFTMAX_BLOCK_QUERIES, max_weights // (n * keys))
    index = torch.arange(keys, device=q.device)
    by_distance = logit_map and logit_map.distance_coefficients(index.to(q.dtype))
    for a, b in block_ranges(queries, n_queries):
        distance = (index[first + a : first + b, None] - index[: first + b]).clamp(min=0)
        distance_coefficients = None if by_distance is None else by_distance[distance]
        for h in range(0, n, n_heads):
            yield slice(h, h + n_heads), slice(a, b), slice(first + b), distance_coefficients


@keep_uncompiled  # a compiled graph would unroll its blocks: slower to compile, and to run
def block_softmax(
    q: Tensor, k: Tensor, v: Tensor, scale: float, logit_map: nn.Module | None = None, key_bias: Tensor | None = None
) -> Tensor:
    """Return causal softmax(scale q.k + key_bias) v, (B, H, T, E) in the dtype of `v`, computed by blocks of queries.

    The queries q (B, H, T, D) are the last T of the S tokens of k (B, H, S, D) and v (B, H, S, E). `logit_map` is a
    module that turns scale q.k into other scores. key_bias: broadcastable to (B, H, S); not with `logit_map`.
    """
    wide_dtype = torch.promote_types(v.dtype, torch.float32)
    flat_tensors = (x.flatten(0, 1) for x in (q.to(wide_dtype), k.to(wide_dtype), v))
    bias = None if key_bias is None else key_bias.to(wide_dtype).expand(k.shape[:3]).flatten(0, 1).unsqueeze(1)
    return _BlockSoftmax.apply(*flat_tensors, bias, scale, logit_map).unflatten(0, q.shape[:2])


# ---------------------------------------------------------------- some queries at a time, from the definition


# most weights of a block on a CPU, where larger blocks leave the cache
MAX_BLOCK_WEIGHTS = 2**21
# smallest limit to the weights of a block on a CPU: smaller blocks spend more time on calls than on weights
MIN_BLOCK_WEIGHTS = 2**18
# Most weights of a block on other devices, which need large products. The backward pass of no definition takes more
# than 64 bytes a weight, 2 GiB. Not by the memory that is free: sums in blocks of another size round differently.
MAX_GPU_BLOCK_WEIGHTS = 2**25


def _query_blocks(q: Tensor, k: Tensor, layout: AttentionLayout) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each block of queries.

    A causal block has the keys up to its last query. Their number is rounded up to a multiple of an eighth of all keys,
    as blocks of few different sizes reuse memory. On a CPU a causal block has at most an eighth of the sequence's
    queries. A block of so few weights (pairs of query and key) that they are below `MIN_BLOCK_WEIGHTS` gets more
    queries, up to this number of weights.
    """
    length, keys, row_weights, on_cpu = q.size(2), k.size(2), q.size(0) * q.size(1) * k.size(2), q.device.type == "cpu"
    eighth_of_keys, max_weights = -(-keys // 8), MAX_BLOCK_WEIGHTS if on_cpu else MAX_GPU_BLOCK_WEIGHTS
    if on_cpu and layout.mask_is_triangular:
        max_weights = min(max_weights, max(row_weights * eighth_of_keys, MIN_BLOCK_WEIGHTS))
    step = max(1, max_weights // row_weights)
    return [
        (slice(a, b), slice(min(-(-b // eighth_of_keys) * eighth_of_keys, keys) if layout.mask_is_triangular else keys))
        for a, b in block_ranges(length, step)
    ]


class _QueryBlockAttention(torch.autograd.Function):
    """Compute weights x values block by block. The forward pass keeps no graph, and the backward pass builds the graph
    of each block again.

    Both passes turn autocast off, so that the inputs' dtypes decide the precision of both. Autocast would change the
    forward pass alone, and the passes would compute different functions.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, dense: nn.Module, layout: AttentionLayout, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.dense, ctx.layout = dense, layout
        with without_autocast(inputs[0].device):
            return torch.cat(
                [
                    _attend_block(dense, layout, block, *_block_inputs(block, *inputs))
                    for block in _query_blocks(*inputs[:2], layout)
                ],
                2,
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        # sums over the blocks
        grads = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        for block in _query_blocks(*inputs[:2], ctx.layout):
            leaves = [x.detach().requires_grad_() for x in _block_inputs(block, *inputs)]
            block_grad = grad[:, :, block[0]]
            with torch.enable_grad(), without_autocast(grad.device):
                output = _attend_block(ctx.dense, ctx.layout, block, *leaves)
                block_grads = torch.autograd.grad(output, leaves, block_grad, allow_unused=True, materialize_grads=True)
            for total, value in zip(_block_inputs(block, *grads), block_grads, strict=True):
                total += value
        return None, None, *(total.to(x.dtype) for total, x in zip(grads, inputs, strict=True))


def _block_inputs(
    block: tuple[slice, slice], q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
) -> tuple[Tensor, ...]:
    """Return the inputs of a block (queries, keys): its rows of q, k and v, then all parameters."""
    queries, keys = block
    return q[:, :, queries], k[:, :, keys], v[:, :, keys], *parameters


def _attend_block(
    dense: nn.Module, layout: AttentionLayout, block: tuple[slice, slice], q: Tensor, k: Tensor, v: Tensor,
    *parameters: Tensor,
) -> Tensor:  # fmt: skip
    """Return the output of a block of queries, computed by `DenseAttention` with `parameters` in place of its own."""
    queries, keys = block
    values = dict(zip((name for name, _ in dense.named_parameters()), parameters, strict=True))
    arguments = q, k, v, layout.select(queries, keys.stop)
    return torch.func.functional_call(dense, values, arguments)


class DenseAttention(nn.Module):
    """Computes a normalizer's `weights` times values, as a module, so that `torch.func.functional_call` can replace its
    parameters.
    """

    def __init__(self, normalizer: nn.Module):
        super().__init__()
        self.normalizer = normalizer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return self.normalizer.weights(q, k, layout).to(v.dtype) @ v


@keep_uncompiled
def attend_by_query_blocks(normalizer: nn.Module, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """Return a normalizer's `weights` times values, (B, H, T, E), computed in blocks of queries."""
    return _QueryBlockAttention.apply(DenseAttention(normalizer), layout, q, k, v, *normalizer.parameters())
