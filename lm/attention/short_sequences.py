"""Causal softmax attention of short sequences on a CPU: blocks of queries whose weights are kept for the backward pass.

PyTorch's fused kernel computes tile by tile, forward and backward, and recomputes all weights; up to some hundred tokens a few products
of whole blocks take half its time. Scores, their maximum and sum are in fp32, of queries and keys that are not rounded to bf16.

Shapes: N = sequences x heads, T tokens, D head size, E width of the values.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.precision import without_autocast

LONGEST = 512  # tokens; beyond, the fused kernel is as fast, and does not keep the T x T weights
BLOCK = 64  # queries of a block
BLOCK_WEIGHTS = 2**20  # weights of a block: that many heads of a block are computed together


class _ShortAttention(torch.autograd.Function):
    """softmax(scale q.k) v on (N, T, .) tensors: q and k in fp32 or wider, v and the weights' products with it in v's dtype."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, kept, train = torch.empty_like(v), [], any(ctx.needs_input_grad)
        mask = q.new_full((BLOCK, BLOCK), -math.inf).triu_(1)
        with without_autocast(v.device):
            for heads, a, b in _blocks(q):
                scores = torch.baddbmm(q.new_zeros(1, 1, 1), q[heads, a:b], k[heads, :b].mT, beta=0, alpha=scale)
                scores[:, :, a:] += mask[: b - a, : b - a]
                weights = scores.softmax(-1).to(v.dtype)
                out[heads, a:b] = weights @ v[heads, :b]
                if train:
                    kept.append(weights)
        if train:
            ctx.save_for_backward(q.to(v.dtype), k.to(v.dtype), v, *kept)
            ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        grad = grad.contiguous()
        scaled, v_wide = grad.to(wide) * ctx.scale, v.to(wide)
        with without_autocast(v.device):
            for (heads, a, b), weights in zip(_blocks(q), kept, strict=True):
                dv[heads, :b] += weights.mT @ grad[heads, a:b]
                dweights = scaled[heads, a:b] @ v_wide[heads, :b].mT
                dscores = torch._softmax_backward_data(dweights, weights.to(wide), -1, wide).to(v.dtype)
                dq[heads, a:b] = dscores @ k[heads, :b]
                dk[heads, :b] += dscores.mT @ q[heads, a:b]
        return dq, dk, dv.to(v.dtype), None


def _blocks(q: Tensor) -> list[tuple[slice, int, int]]:
    """Heads, first query and last query + 1 of each block of q (N, T, D)."""
    n, length = q.shape[:2]
    heads = max(1, BLOCK_WEIGHTS // (BLOCK * length))
    return [(slice(h, h + heads), a, min(a + BLOCK, length)) for h in range(0, n, heads) for a in range(0, length, BLOCK)]


@torch.compiler.disable  # traced, its blocks would be unrolled: slower to compile, and to run
def short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q.k) v with a causal mask, (B, H, T, E) in the dtype of `v`; q and k (B, H, T, D), v (B, H, T, E)."""
    wide = torch.promote_types(v.dtype, torch.float32)
    return _ShortAttention.apply(*(x.flatten(0, 1) for x in (q.to(wide), k.to(wide), v)), scale).unflatten(0, q.shape[:2])
