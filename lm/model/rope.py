"""Rotary embedding, and its rescalings for rows beyond the training length."""

import math

import torch
from torch import Tensor

from lm.config.inference_config import NTK, AsTrained, Interpolation, RopeScaling, ThetaFactor, YaRNScaling
from lm.config.model_config import Rope, rotated_dims

Rotation = tuple[Tensor, Tensor]  # cos and sin, each (T, rotated / 2) or (B, T, rotated / 2) fp32


def rope_rotation(
    positions: Tensor, head_size: int, rope: Rope, scaling: RopeScaling | None = None, lengths: tuple[int, int] = (1, 1)
) -> Rotation:
    """cos and sin of RoPE's angles at `positions`, (T,) or (B, T); arXiv 2104.09864.

    Pair i turns by position * theta^(-2i/D). `rope.fraction` below 1 leaves the slowest pairs unturned
    (p-RoPE). Angles are formed in float64: at position 131,072 fp32 would be off by 0.004 radians.

    Args:
        scaling: other frequencies, for rows beyond the training length.
        lengths: tokens in a training row and in this one.
    """
    angles = positions.double().unsqueeze(-1) * frequencies(head_size, rope, scaling or AsTrained(), *lengths, positions.device)
    return angles.cos().float(), angles.sin().float()


def frequencies(head_size: int, rope: Rope, scaling: RopeScaling, trained: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Radians per token of each turning pair, (rotated / 2,) float64."""
    pairs = torch.arange(rotated_dims(head_size, rope.fraction) // 2, dtype=torch.float64, device=device)
    theta, s = rope.theta, scaling_factor(scaling, trained, length)
    if isinstance(scaling, ThetaFactor):
        theta *= s
    elif isinstance(scaling, NTK):  # the slowest pair turns 1 / s as fast, the fastest as before
        theta *= s ** (head_size / max(1, head_size - 2))
    plain = theta ** (-2 * pairs / head_size)
    if isinstance(scaling, Interpolation):
        return plain / s
    if isinstance(scaling, YaRNScaling):  # by parts: pairs that turn often in a training row keep their frequency
        turns = trained * plain / (2 * math.pi)
        kept = ((turns - scaling.slow) / (scaling.fast - scaling.slow)).clamp(0, 1)
        return plain * (kept + (1 - kept) / s)
    return plain


def scaling_factor(scaling: RopeScaling, trained: int, length: int) -> float:
    """The scaling's factor: as set, or the row's length in training lengths, at least 1."""
    return getattr(scaling, "factor", None) or max(1.0, length / trained)


def logit_factor(scaling: RopeScaling | None, trained: int, length: int) -> float:
    """What a scaling multiplies logits by: (0.1 ln s + 1)^2 for YaRN (arXiv 2309.00071), 1 for others."""
    if not isinstance(scaling, YaRNScaling) or not scaling.temperature:
        return 1.0
    return (0.1 * math.log(scaling_factor(scaling, trained, length)) + 1) ** 2


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` (B, H, T, D) turned by RoPE, as fp32 (or wider): the first half of the turned dimensions pairs with the second."""
    cos, sin = (part.unsqueeze(-3) for part in rotation)  # the same for all heads
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    half = cos.size(-1)
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]), -1)
