"""The routes of softmax: blocks of queries for short sequences on a CPU, PyTorch's fused attention for all others."""

import math

import torch.nn.functional as F
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.precision import executing_device
from lm.attention.short_sequences import LONGEST, short_attention


def fused_softmax(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """softmax(q.k scale) v by the faster route, (B, H, T, E) in the dtype of `v`; `scale`: 1 / sqrt(D) unless given.

    The fused kernel wants values as wide as keys: wider ones are cut into pieces that are heads of their own.
    `mask`: another than that of `layout`.
    """
    size, width = q.size(-1), v.size(-1)
    scale = scale or 1 / math.sqrt(size)
    if layout.causal and mask is None and executing_device(v).type == "cpu" and q.size(2) <= LONGEST:
        return short_attention(q, k, v, scale)
    pieces = -(-width // size)
    if width != size:
        v = F.pad(v, (0, pieces * size - width)).unflatten(-1, (pieces, size)).transpose(2, 3).flatten(1, 2)  # (B, H x pieces, S, D)
        q, k = q.repeat_interleave(pieces, 1), k.repeat_interleave(pieces, 1)
    causal = layout.causal and mask is None
    mask = None if causal else layout.visible() if mask is None else mask
    out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=causal, scale=scale)
    return out if width == size else out.unflatten(1, (-1, pieces)).transpose(2, 3).flatten(-2)[..., :width]


def softmax_route(device: str, length: int) -> str:
    """The route of causal sequences of `length` tokens on a `device` (`cpu`, `cuda`), in words for the banner."""
    short = device == "cpu" and length <= LONGEST
    return f"blocks of queries (faster than SDPA on a CPU, up to {LONGEST} tokens)" if short else "SDPA"
