"""Elementwise attention on any device: causal tiles of keys and queries, forward and backward.

Shapes: N = sequences x heads, T tokens, D head size, E width of the values.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.precision import without_autocast
from lm.attention.row_sums import SMALLEST_SUM, gradient_of_sums
from lm.attention.score_functions import ScoreFunction

TILE = 256  # queries and keys of one tile


def _tiles(length: int) -> list[tuple[int, int]]:
    return [(a, min(a + TILE, length)) for a in range(0, length, TILE)]


class _ElementwiseAttention(torch.autograd.Function):
    """Causal tiles of f(q.k / sqrt(D) + shift) v on (N, T, D) tensors, N = B x H; shift (N, T) or None.

    `over_sum`: rows are divided by their sums. Scores, f and sums are in fp32 (or wider), weights as wide as v.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, f: ScoreFunction, over_sum: bool, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        out = torch.empty(v.shape, dtype=wide if over_sum else v.dtype, device=v.device)
        sums = torch.empty((*v.shape[:2], 1), dtype=wide, device=v.device) if over_sum else None
        qw, kw = q.to(wide), k.to(wide)
        summed = v.to(out.dtype)  # rows divided by their sums stay unrounded: their gradients are small differences
        with without_autocast(v.device):  # as in the backward pass
            for a, b in _tiles(q.size(1)):
                total = torch.zeros(v.size(0), b - a, v.size(2), dtype=wide, device=v.device)
                row_sum = torch.zeros(v.size(0), b - a, 1, dtype=wide, device=v.device)
                for c, d in _tiles(b):
                    w = f.value_(_scores(qw, kw, shift, a, b, c, d))
                    w = (w.tril_() if c == a else w).to(out.dtype)
                    total += w @ summed[:, c:d]
                    if over_sum:
                        row_sum += w.sum(-1, keepdim=True)
                if over_sum:
                    sums[:, a:b] = row_sum.masked_fill_(row_sum < SMALLEST_SUM, torch.inf)
                    total /= row_sum
                out[:, a:b] = total
        ctx.save_for_backward(q, k, v, shift, *((out, sums) if over_sum else ()))
        ctx.f = f
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shift, *of_sums = ctx.saved_tensors
        grad, mean = gradient_of_sums(grad, v.dtype, *of_sums) if of_sums else (grad, None)
        wide = torch.promote_types(v.dtype, torch.float32)
        qw, kw, vw, gw = (x.to(wide) for x in (q, k, v, grad))
        dq, dk, dv = (torch.zeros_like(x) for x in (qw, kw, vw))
        dshift = None if shift is None else torch.zeros_like(shift)
        with without_autocast(v.device):
            for a, b in _tiles(q.size(1)):
                for c, d in _tiles(b):
                    dw = gw[:, a:b] @ vw[:, c:d].transpose(1, 2)
                    if mean is not None:
                        dw -= mean[:, a:b]
                    w, dz = ctx.f.derivative_(_scores(qw, kw, shift, a, b, c, d), dw)
                    if c == a:
                        w, dz = w.tril_(), dz.tril_()
                    if dshift is not None:
                        dshift[:, a:b] += dz.sum(-1)
                    w, dz = w.to(v.dtype), dz.to(v.dtype)
                    dq[:, a:b] += dz @ k[:, c:d]
                    dk[:, c:d] += dz.transpose(1, 2) @ q[:, a:b]
                    dv[:, c:d] += w.transpose(1, 2) @ grad[:, a:b]
        dq, dk = (x.div_(math.sqrt(q.size(-1))) for x in (dq, dk))
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dshift


def _scores(q: Tensor, k: Tensor, shift: Tensor | None, a: int, b: int, c: int, d: int) -> Tensor:
    """q.k / sqrt(D) + shift of queries a to b and keys c to d, (N, b - a, d - c)."""
    factor, shifts = 1 / math.sqrt(q.size(-1)), q.new_zeros(1, 1, 1) if shift is None else shift[:, a:b].unsqueeze(-1)
    return torch.baddbmm(shifts, q[:, a:b], k[:, c:d].transpose(1, 2), beta=shift is not None, alpha=factor)


def tiles(f: ScoreFunction, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None = None, over_sum: bool = False) -> Tensor:
    """`lm.attention.elementwise_sums.elementwise_attention` on any device, holding one tile of weights a head."""
    if shift is not None:
        shift = shift.to(torch.promote_types(v.dtype, torch.float32)).expand(q.shape[:3]).flatten(0, 1)
    return _ElementwiseAttention.apply(f, over_sum, *(x.flatten(0, 1) for x in (q, k, v)), shift).unflatten(0, q.shape[:2])
