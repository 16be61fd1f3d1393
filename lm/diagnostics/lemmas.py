"""Lemmas 1 and 2 of Mudarisov et al. 2025 (arXiv 2508.17821) as statistics of rows: how small and large weights can be, and
how fast they change.

Lemma 1: weights F(score) / sum F(score), F > 0, lie between C1 / n and C2 / n, where C1 and C2 are the least and largest F of the scores
over the other. Lemma 2: `lm.diagnostics.jacobian`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.score_functions import SCORE_MAPS
from lm.diagnostics.jacobian import spectral_norm
from lm.diagnostics.rows import AttentionRows


def n_times_largest(rows: AttentionRows) -> Tensor:
    """n x the largest weight: 1 of equal weights."""
    return rows.size.amax(-1) * rows.n


def log_n_times_largest(rows: AttentionRows) -> Tensor | None:
    """ln (n x the largest weight), at most ln C2."""
    found = _log_n_times_weights(rows)
    return None if found is None else found.amax(-1)


def log_n_times_smallest(rows: AttentionRows) -> Tensor | None:
    """ln (n x the smallest weight), at least ln C1 = -ln C2."""
    found = _log_n_times_weights(rows)
    return None if found is None else found.masked_fill(~rows.visible, math.inf).amin(-1)


def log_c2(rows: AttentionRows) -> Tensor | None:
    """ln C2 = 2 a, of scores between -a and a."""
    return 2 * rows.scores.masked_fill(~rows.visible, 0.0).abs().amax(-1) if lemma_1_applies(rows) else None


def lemma_1_applies(rows: AttentionRows) -> bool:
    """Whether weights are F(score) over their sum, F > 0 for all scores, and scores stay the same where a query sees more keys."""
    normalizer = rows.normalizer
    return normalizer.options.rows_sum_to_one and normalizer.score_map == "exp" and not _scores_depend_on_length(rows)


def _scores_depend_on_length(rows: AttentionRows) -> bool:
    """Whether the scores of the sequence's last query would be others if as many tokens more stood before it and its keys."""
    x, q, k, _ = rows.inputs
    length = x.size(1)
    last = AttentionLayout.full(length, x.device).select(torch.tensor([length - 1], device=x.device), length)
    later = replace(last, positions=last.positions + length, key_positions=last.key_positions + length, lengths=last.lengths + length)
    return not torch.allclose(*(rows.normalizer.scores(q[:, :, -1:], k, where) for where in (last, later)), rtol=1e-5, atol=1e-6)


def _log_n_times_weights(rows: AttentionRows) -> Tensor | None:
    """ln (n x weights), (H, T, S), from the scores, since weights may be rounded to 0; None where Lemma 1 does not apply."""
    if not lemma_1_applies(rows):
        return None
    return rows.scores.masked_fill(~rows.visible, -math.inf).log_softmax(-1) + rows.n.log().unsqueeze(-1)


def jacobian_norm(rows: AttentionRows, generator: torch.Generator) -> Tensor:
    """The spectral norm of d weights / d scores, in fp64: in fp32 rows of nearly one key give rounding errors, whose logarithms are
    fitted."""
    found = spectral_norm(
        lambda scores: rows.normalizer.normalize(scores.unsqueeze(0), rows.layout)[0], rows.scores.double(), rows.visible, generator
    )
    return found.to(rows.scores.dtype)


def jacobian_ceiling(rows: AttentionRows) -> Tensor | None:
    """A bound on it: 1 / 2 of softmax, with or without a sink. Of another function F of each score: max |F'| times the row's factor, and,
    where that is 1 / Z, Z the sum of F, times sqrt(n) |weights|. None of weights that are no function of each score."""
    name = rows.normalizer.score_map
    if name == "exp":
        return torch.full_like(rows.weights[..., 0], 0.5)
    if not name:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        scores = rows.scores.masked_fill(~rows.visible, 0.0).clone().requires_grad_(True)
        mapped = SCORE_MAPS[name](scores)
        (slope,) = torch.autograd.grad(mapped.sum(), scores)
    mapped, slope = (one.detach().masked_fill(~rows.visible, 0.0) for one in (mapped, slope))
    factor = (rows.weights * mapped).sum(-1) / mapped.square().sum(-1)
    bound = factor.abs() * slope.abs().amax(-1)
    return bound * (rows.n.sqrt() * rows.weights.norm(dim=-1)).clamp(min=1) if rows.normalizer.options.rows_sum_to_one else bound
