"""How fast weights change with scores: the Jacobian d weights / d scores of each row, and finite differences in one direction.

Both work for every normalizer, from its map of scores to weights alone (`Normalizer.normalize`), which treats each row by itself.

Mudarisov et al. (arXiv 2508.17821), Cor. 3, take |J| <= min(1 / (4 T), sqrt 2) for softmax(l / T). As a spectral norm that is wrong: its
supremum is 1 / (2 T), of two equal leading scores; 1 / (4 T) bounds the largest entry; sqrt 2 bounds the distance of two rows of weights,
so that a finite difference over a step of length e is at most min(1 / (2 T), sqrt 2 / e). And the difference in one random direction that
they measure estimates |J|_F / sqrt(n), far below the spectral norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Normalize = Callable[[Tensor], Tensor]  # scores (..., S) to weights of that shape, each row by itself

STEPS = 30  # power iterations


@torch.inference_mode(False)
@torch.enable_grad()
def spectral_norm(normalize: Normalize, scores: Tensor, visible: Tensor, generator: torch.Generator, steps: int = STEPS) -> Tensor:
    """The largest singular value of each row's Jacobian, (...), by power iteration on J^T J: at most the true one, but
    for rounding: in fp32 that is up to a third of it in rows whose weight is nearly all on one key.

    scores: (..., S) fp32 or fp64; visible: bool, broadcastable to them: the keys whose scores matter.
    """
    scores = scores.detach().clone().requires_grad_(True)
    weights = normalize(scores)
    left = torch.zeros_like(weights, requires_grad=True)
    (pulled,) = torch.autograd.grad(weights, scores, left, create_graph=True)  # J^T left, linear in left
    drawn = torch.randn(scores.shape, generator=generator).to(scores)
    v = _unit((drawn * weights.detach().abs().sqrt()).masked_fill(~visible, 0.0) + 1e-6 * drawn)
    norm = v.new_zeros(scores.shape[:-1])
    for _ in range(steps):
        (u,) = torch.autograd.grad(pulled, left, v, retain_graph=True)  # J v
        norm = torch.maximum(norm, u.norm(dim=-1))
        (v,) = torch.autograd.grad(weights, scores, _unit(u), retain_graph=True)  # J^T u
        v = _unit(v)
    return norm.detach()


def finite_difference(normalize: Normalize, scores: Tensor, step: float, direction: Tensor) -> Tensor:
    """|weights(scores + step x direction) - weights(scores)| / step of each row, (...); fp64, whatever the scores' dtype.

    direction: (..., S), of length 1 over the keys that a row sees.
    """
    scores, direction = scores.double(), direction.double()
    return (normalize(scores + step * direction) - normalize(scores)).norm(dim=-1) / step


def directions(visible: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A random direction of length 1 for each row, `shape` = (..., S), fp64, over the visible keys alone."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).to(visible.device)
    return _unit(drawn.masked_fill(~visible, 0.0))


def _unit(v: Tensor) -> Tensor:
    """Rows of length 1, or 0."""
    norm = v.norm(dim=-1, keepdim=True)
    return v / norm.masked_fill(norm == 0, 1.0)
