"""Rotary embedding, and its rescalings for sequences beyond the training length."""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.config.inference_config import RopeScaling
from lm.config.model_config import Rope

AS_TRAINED = RopeScaling()
Rotation = tuple[Tensor, Tensor]  # cos and sin, each (T, rotated / 2) or (B, T, rotated / 2) fp32


def rope_rotation(
    positions: Tensor, head_size: int, rope: Rope, scaling: RopeScaling = AS_TRAINED, lengths: tuple[int, int] = (1, 1)
) -> Rotation:
    """cos and sin of RoPE's angles at `positions`, (T,) or (B, T); arXiv 2104.09864.

    Pair i rotates by position * theta^(-2i/D). `rope.fraction` below 1 leaves the low-frequency pairs unrotated
    (p-RoPE), and `rope.scaling` is the model's own rescaling of the frequencies. Angles are formed in float64: at
    position 131,072 fp32 would be off by 0.004 radians.

    Args:
        scaling: other frequencies, for sequences beyond the training length.
        lengths: tokens in a training sequence and in this one.
    """
    angles = positions.double().unsqueeze(-1) * frequencies(head_size, rope, scaling, *lengths, positions.device)
    amplitude = rope.scaling.amplitude
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


def frequencies(
    head_size: int, rope: Rope, scaling: RopeScaling, train_length: int, length: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Radians per token of each rotated pair, (rotated / 2,) float64."""
    pairs = torch.arange(rope.rotated(head_size) // 2, dtype=torch.float64, device=device)
    s = scaling.s(train_length, length)
    radians = scaling.theta(rope.theta, head_size, s) ** (-2 * pairs / head_size)
    radians = rope.scaling.rescaled_frequencies(radians, rope.theta, head_size)
    return scaling.scaled_frequencies(radians, train_length * radians / (2 * math.pi), s)


class _Rotated(torch.autograd.Function):
    """Pairs (x1, x2) turned by their angles, in few passes over x; backward by the opposite angles."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin).to(ctx.dtype), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its pairs (x1, x2) as (x1 cos - x2 sin, x2 cos + x1 sin), and its other dimensions as they are; contiguous."""
    half = cos.size(-1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return torch.cat(((x1 * cos).addcmul_(x2, sin, value=-1), (x2 * cos).addcmul_(x1, sin), x[..., 2 * half :]), -1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` (B, H, T, D) rotated by RoPE, as fp32 (or wider): the first half of the rotated dimensions pairs with the second."""
    cos, sin = (part.unsqueeze(-3) for part in rotation)  # the same for all heads
    return _Rotated.apply(x, cos, sin)
