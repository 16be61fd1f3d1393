"""Rotary embedding, and its rescalings for sequences beyond the training length."""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.config.inference_config import RopeScaling
from lm.config.model_config import Rope

AS_TRAINED = RopeScaling()
# cos and sin, fp32, each (T, pairs) or (B, T, pairs) for the pairs of dimensions that rotate
Rotation = tuple[Tensor, Tensor]


def rope_rotation(
    positions: Tensor, head_size: int, rope: Rope, scaling: RopeScaling = AS_TRAINED, lengths: tuple[int, int] = (1, 1)
) -> Rotation:
    """Return cos and sin of RoPE's angles (arXiv 2104.09864) at `positions`, (T,) or (B, T), times
    `rope.scaling.amplitude`.

    Pair i rotates by position * theta^(-2i/D), D = head_size. `rope.fraction` below 1 leaves the low-frequency pairs
    unrotated (p-RoPE); with `rope.partial` D is the number of rotated dimensions. `rope.scaling` is the model's own
    rescaling of the frequencies. Angles are formed in float64, as at position 131,072 fp32 would be off by 0.004
    radians.

    Args:
        scaling: a further rescaling of the frequencies in inference, for sequences beyond the training length.
        lengths: numbers of tokens in a training sequence and in this sequence.
    """
    angles = positions.double().unsqueeze(-1) * frequencies(head_size, rope, scaling, *lengths, positions.device)
    amplitude = rope.scaling.amplitude
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


def frequencies(
    head_size: int, rope: Rope, scaling: RopeScaling, train_length: int, length: int, device: torch.device | str = "cpu"
) -> Tensor:
    """RoPE's frequencies after rescaling, which are radians per token of each rotated pair of dimensions, (pairs,)
    float64.
    """
    pairs = torch.arange(rope.rotated(head_size) // 2, dtype=torch.float64, device=device)
    if rope.partial:  # the rotated dimensions are as a head of their own
        head_size = rope.rotated(head_size)
    s = scaling.s(train_length, length)
    theta = scaling.theta(rope.theta, head_size, s)
    radians = rope.scaling.rescaled_frequencies(theta ** (-2 * pairs / head_size), theta, head_size)
    return scaling.scaled_frequencies(radians, train_length * radians / (2 * math.pi), s)


class _PairRotation(torch.autograd.Function):
    """Rotation of pairs (x1, x2) by their angles, in few passes over x; gradients are rotated by the opposite
    angles.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, -sin).to(ctx.dtype), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x, in fp32 or wider, with pairs (x1, x2) turned to (x1 cos - x2 sin, x2 cos + x1 sin) and other dimensions
    as they are.
    """
    n_pairs = cos.size(-1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x1, x2 = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    return torch.cat(((x1 * cos).addcmul_(x2, sin, value=-1), (x2 * cos).addcmul_(x1, sin), x[..., 2 * n_pairs :]), -1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `x` (B, H, T, D) rotated by RoPE, in fp32 or wider. The first half of the rotated dimensions pairs with
    the second.
    """
    cos, sin = (part.unsqueeze(-3) for part in rotation)  # the same for all heads
    return _PairRotation.apply(x, cos, sin)
