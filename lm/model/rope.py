"""RoPE rotates pairs of dimensions by frequencies. This module computes them, and rescales them for sequences beyond
the training length.
"""

import math

import torch
from torch import Tensor

from lm.config.eval_config import NO_SCALING, RopeScaling
from lm.config.model_config import Rope
from lm.model.blocks import Rotation, rotation_at


def rope_rotation(
    positions: Tensor, head_size: int, rope: Rope, scaling: RopeScaling = NO_SCALING,
    scaling_lengths: tuple[int, int] = (1, 1)
) -> Rotation:  # fmt: skip
    """Return cos and sin of RoPE's angles (arXiv 2104.09864) at `positions`, (T,) or (B, T). Both are multiplied by
    `rope.scaling.amplitude`.

    Pair i rotates by position * theta^(-2i/D), where D is `head_size`. If `rope.fraction` is below 1, the low-frequency
    pairs don't rotate (p-RoPE). With `rope.partial`, D is instead the number of dimensions that rotate. `rope.scaling`
    is the rescaling of the frequencies that the model was trained with.

    Args:
        scaling: a further rescaling of the frequencies in inference, for sequences beyond the training length. It
            leaves the amplitude as it is.
        scaling_lengths: numbers of tokens in a training sequence and in this sequence.
    """
    radians = frequencies(head_size, rope, scaling, *scaling_lengths, positions.device)
    return rotation_at(positions, radians, rope.scaling.amplitude)


def frequencies(
    head_size: int, rope: Rope, scaling: RopeScaling, train_length: int, length: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return RoPE's frequencies after rescaling, in radians per token, of each rotated pair of dimensions: (pairs,)
    float64.
    """
    pairs = torch.arange(rope.rotated_dimensions(head_size) // 2, dtype=torch.float64, device=device)
    if rope.partial:  # the rotated dimensions are as a head of their own
        head_size = rope.rotated_dimensions(head_size)
    s = scaling.length_ratio(train_length, length)
    theta = scaling.scaled_theta(rope.theta, head_size, s)
    radians = rope.scaling.rescaled_frequencies(theta ** (-2 * pairs / head_size), theta, head_size)
    return scaling.scaled_frequencies(radians, train_length * radians / (2 * math.pi), s)
