"""Lemmas 1 and 2 of Mudarisov et al. 2025 (arXiv 2508.17821) as statistics of rows: bounds on weights, and on the rate
at which they change with the scores.

Lemma 1: weights F(score) / sum F(score), F > 0, of n keys lie between C1 / n and C2 / n. C2 is max F / min F over [-a,
a], a the largest |score| of the row, and C1 = 1 / C2. Lemma 2 bounds the change of weights with scores. It is measured
by the norm of each row's Jacobian d weights / d scores, and by finite differences in one direction. Both need only the
map of scores to weights (`Normalizer.normalize`), and so work for every normalizer.

The paper's Cor. 3 takes |J| <= min(1 / (4 T), sqrt 2) for softmax(l / T), J the Jacobian by the logits l. For the
spectral norm this is wrong: its supremum is 1 / (2 T), at two equal leading logits. 1 / (4 T) bounds the largest entry
of J, and sqrt 2 the distance of two rows of weights. A finite difference over a step of length e is thus at most min(1
/ (2 T), sqrt 2 / e). The paper measures the difference in one random direction. This estimates the Frobenius norm of J
divided by sqrt(n), far below the spectral norm.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lm.attention.elementwise_sums import SCORE_MAPS
from lm.attention.layout import AttentionLayout
from lm.diagnostics.attention_rows import AttentionRows, shifted_layout

Normalize = Callable[[Tensor], Tensor]  # scores (..., S) -> weights (..., S), each row by itself

ITERATIONS = 30  # power iterations


@torch.inference_mode(False)
@torch.enable_grad()
def spectral_norm(
    normalize: Normalize, scores: Tensor, visible: Tensor, generator: torch.Generator, steps: int = ITERATIONS
) -> Tensor:
    """The largest singular value, (...), of each row's Jacobian J = d weights / d scores, by power iteration on J^T J.

    The result is at most the true value. In rows with nearly all weight on one key, fp32 rounding errors are up to a
    third of the value.

    scores: (..., S) fp32 or fp64; visible: bool, broadcastable to the scores: the keys whose scores matter.
    """
    scores = scores.detach().clone().requires_grad_(True)
    weights = normalize(scores)
    cotangent = torch.zeros_like(weights, requires_grad=True)
    (pullback,) = torch.autograd.grad(
        weights, scores, cotangent, create_graph=True
    )  # J^T cotangent, linear in the cotangent
    noise = torch.randn(scores.shape, generator=generator).to(scores)
    v = _unit_vectors((noise * weights.detach().abs().sqrt()).masked_fill(~visible, 0.0) + 1e-6 * noise)
    norm = v.new_zeros(scores.shape[:-1])
    for _ in range(steps):
        (u,) = torch.autograd.grad(pullback, cotangent, v, retain_graph=True)  # J v
        norm = torch.maximum(norm, u.norm(dim=-1))
        (v,) = torch.autograd.grad(weights, scores, _unit_vectors(u), retain_graph=True)  # J^T u
        v = _unit_vectors(v)
    return norm.detach()


def finite_difference(normalize: Normalize, scores: Tensor, step: float, direction: Tensor) -> Tensor:
    """|weights(scores + step x direction) - weights(scores)| / step for each row, (...); fp64, whatever the scores'
    dtype.

    direction: (..., S), of length 1 over the keys that a row sees.
    """
    scores, direction = scores.double(), direction.double()
    return (normalize(scores + step * direction) - normalize(scores)).norm(dim=-1) / step


def directions(visible: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A random direction of length 1 for each row, `shape` = (..., S), fp64, over the visible keys alone."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float64).to(visible.device)
    return _unit_vectors(noise.masked_fill(~visible, 0.0))


def _unit_vectors(v: Tensor) -> Tensor:
    """Vectors (..., S) scaled to length 1; vectors of zeros stay."""
    norm = v.norm(dim=-1, keepdim=True)
    return v / norm.masked_fill(norm == 0, 1.0)


# ---------------------------------------------------------------- the lemmas


def log_of_n_times_largest(rows: AttentionRows) -> Tensor | None:
    """ln (n x largest weight) of each row of n keys, at most `log_c2` by Lemma 1 (arXiv 2508.17821); None where it does
    not apply.
    """
    logs = _log_n_times_weights(rows)
    return None if logs is None else logs.amax(-1)


def log_of_n_times_smallest(rows: AttentionRows) -> Tensor | None:
    """ln (n x smallest weight) of each row of n keys, at least -`log_c2` by Lemma 1 (arXiv 2508.17821); None where it
    does not apply.
    """
    logs = _log_n_times_weights(rows)
    return None if logs is None else logs.masked_fill(~rows.visible, math.inf).amin(-1)


def log_c2(rows: AttentionRows) -> Tensor | None:
    """ln C2, 2 x the largest |score| of each row. By Lemma 1 (arXiv 2508.17821) no weight exceeds C2 / n; None where it
    does not apply.
    """
    return 2 * rows.scores.masked_fill(~rows.visible, 0.0).abs().amax(-1) if lemma_1_applies(rows) else None


def lemma_1_applies(rows: AttentionRows) -> bool:
    """Whether weights are the softmax of scores that do not depend on the number of keys, as in Lemma 1 of arXiv
    2508.17821.
    """
    normalizer = rows.normalizer
    return normalizer.options.rows_sum_to_one and normalizer.score_map == "exp" and not _scores_depend_on_length(rows)


def _scores_depend_on_length(rows: AttentionRows) -> bool:
    """Whether the scores of the sequence's last query change if other tokens, as many as the sequence has, come before
    the sequence.
    """
    x, q, k, _ = rows.inputs
    length = x.size(1)
    query_layout = AttentionLayout.full(length, x.device).select(torch.tensor([length - 1], device=x.device), length)
    scores = (
        rows.normalizer.scores(q[:, :, -1:], k, layout)
        for layout in (query_layout, shifted_layout(query_layout, length))
    )
    return not torch.allclose(*scores, rtol=1e-5, atol=1e-6)


def _log_n_times_weights(rows: AttentionRows) -> Tensor | None:
    """ln (n x weight) of n keys, (H, T, S), from the scores, since weights may be rounded to 0; None where Lemma 1 does
    not apply.
    """
    if not lemma_1_applies(rows):
        return None
    return rows.scores.masked_fill(~rows.visible, -math.inf).log_softmax(-1) + rows.n.log().unsqueeze(-1)


def jacobian_norm(rows: AttentionRows) -> Tensor:
    """The spectral norm of each row's d weights / d scores, computed in fp64, as fp32 rounds it badly if one key has
    nearly all weight.
    """
    generator = torch.Generator().manual_seed(0)
    return spectral_norm(rows.normalize, rows.scores.double(), rows.visible, generator).to(rows.scores.dtype)


def jacobian_ceiling(rows: AttentionRows) -> Tensor | None:
    """A bound on `jacobian_norm`: 1 / 2 for softmax, with or without a sink; None for normalizers without a
    `score_map`.

    With another score map F, a row's weights are F(score) times a factor of the row, and the bound is max |F'| times
    |factor|. Where the factor is 1 / (sum of F over the row), this is multiplied by max(1, sqrt(n) |weights|),
    |weights| the L2 norm of the row's weights.
    """
    name = rows.normalizer.score_map
    if name == "exp":
        return torch.full_like(rows.weights[..., 0], 0.5)
    if not name:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        scores = rows.scores.masked_fill(~rows.visible, 0.0).clone().requires_grad_(True)
        mapped_scores = SCORE_MAPS[name](scores)
        (slope,) = torch.autograd.grad(mapped_scores.sum(), scores)
    mapped_scores, slope = (values.detach().masked_fill(~rows.visible, 0.0) for values in (mapped_scores, slope))
    factor = (rows.weights * mapped_scores).sum(-1) / mapped_scores.square().sum(-1)
    bound = factor.abs() * slope.abs().amax(-1)
    return (
        bound * (rows.n.sqrt() * rows.weights.norm(dim=-1)).clamp(min=1)
        if rows.normalizer.options.rows_sum_to_one
        else bound
    )
