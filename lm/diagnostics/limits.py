"""Mudarisov et al. 2025 (arXiv 2508.17821) bound what normalized attention can do. This module has their bounds as
functions of rows of attention, and the statistics named `limits`.

Lemma 1: weights F(score) / sum F(score), F > 0, of n keys lie between C1 / n and C2 / n. C2 is max F / min F over [-a,
a], a the largest |score| of the row, and C1 = 1 / C2.

Lemma 2 bounds the change of weights with scores, here by the spectral norm of each row's Jacobian d weights / d scores.
The paper's Cor. 3 takes |J| <= min(1 / (4 t), sqrt 2) for softmax(l / t) at temperature t, J the Jacobian by the logits
l. For the spectral norm this is wrong: its supremum is 1 / (2 t), at two equal leading logits. 1 / (4 t) bounds the
largest entry of J.

Theorems 1 and 2 choose N of the keys that a query sees. They say how far the other keys lie from the sum of the chosen
ones. The query gives key i the weight a_i; x_i is the vector of key i. For the set I of chosen keys, s = sum over I of
a_i x_i, and

    d~ = sum over i not in I of |a_i x_i - s|    (the paper's Eqs. 6 and 7).

Theorem 1 compares the N keys of the largest weights with N keys drawn at random. Theorem 2 takes the distance r from s
to the nearest a_j x_j of all keys that are not chosen. N_s is the number of chosen keys whose a_i x_i lies within r of
s. The bounds are reconstructed from the paper's words, as its typeset equations could not be read. The bound of Theorem
1 is proved, and holds for weights of any sum.

Shapes: H heads, T queries, S keys, E entries of a vector.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.diagnostics.attention_rows import AttentionRows, Statistic, Statistics

TOP_KEY_COUNTS = (5, 16)  # numbers N of keys of the statistics
QUERY_STRIDE = 4  # the Jacobian is measured for one described query in this number
POWER_ITERATIONS = 30  # power iterations


# ---------------------------------------------------------------- Lemma 1


def log_n_times_largest_weight(rows: AttentionRows) -> Tensor | None:
    """Return ln (n x largest weight) of each row of n keys, at most `log_n_times_weight_bound` by Lemma 1; None where
    the lemma does not apply.
    """
    logs = _log_n_times_weights(rows)
    return None if logs is None else logs.amax(-1)


def log_n_times_smallest_weight(rows: AttentionRows) -> Tensor | None:
    """Return ln (n x smallest weight) of each row of n keys, at least -`log_n_times_weight_bound` by Lemma 1; None
    where the lemma does not apply.
    """
    logs = _log_n_times_weights(rows)
    return None if logs is None else logs.masked_fill(~rows.visible, math.inf).amin(-1)


def log_n_times_weight_bound(rows: AttentionRows) -> Tensor | None:
    """Return ln C2, 2 x the largest |score| of each row. By Lemma 1 no weight exceeds C2 / n; None where the lemma does
    not apply.
    """
    return 2 * rows.scores.masked_fill(~rows.visible, 0.0).abs().amax(-1) if weight_bound_applies(rows) else None


def weight_bound_applies(rows: AttentionRows) -> bool:
    """Return whether weights are the softmax of scores that do not depend on the number of keys, as Lemma 1
    of arXiv 2508.17821 supposes.
    """
    normalizer = rows.normalizer
    return normalizer.options.rows_sum_to_one and normalizer.score_map == "exp" and not _scores_depend_on_length(rows)


def _scores_depend_on_length(rows: AttentionRows) -> bool:
    """Return whether the last query's scores change if other tokens, as many as the sequence has, are put before the
    sequence.
    """
    x, q, k, _ = rows.inputs
    length = x.size(1)
    layout = AttentionLayout.full(length, x.device).select(torch.tensor([length - 1], device=x.device), length)
    names = ("positions", "key_positions", "document_lengths")
    shifted = replace(layout, **{name: getattr(layout, name) + length for name in names})
    scores = (rows.normalizer.unmasked_scores(q[:, :, -1:], k, each) for each in (layout, shifted))
    return not torch.allclose(*scores, rtol=1e-5, atol=1e-6)


def _log_n_times_weights(rows: AttentionRows) -> Tensor | None:
    """Return ln (n x weight) of n keys, (H, T, S), from the scores, since weights may be rounded to 0; None where Lemma
    1 does not apply.
    """
    if not weight_bound_applies(rows):
        return None
    return rows.scores.masked_fill(~rows.visible, -math.inf).log_softmax(-1) + rows.n_visible_keys.log().unsqueeze(-1)


# ---------------------------------------------------------------- Lemma 2


@torch.inference_mode(False)
@torch.enable_grad()
def spectral_norm(
    normalize: Callable[[Tensor], Tensor],
    scores: Tensor,
    visible: Tensor,
    steps: int = POWER_ITERATIONS,
) -> Tensor:
    """Return the largest singular value, (...), of each row's Jacobian J = d weights / d scores, by power iteration on
    J^T J.

    The result is at most the true value. In rows with nearly all weight on one key, fp32 rounding errors are up to a
    third of the value.

    Args:
        normalize: scores (..., S) -> weights (..., S), each row by itself.
        scores: (..., S) fp32 or fp64.
        visible: bool, broadcastable to the scores: the keys whose scores matter.
    """
    scores = scores.detach().clone().requires_grad_(True)
    weights = normalize(scores)
    cotangent = torch.zeros_like(weights, requires_grad=True)
    # J^T cotangent, linear in the cotangent
    (pullback,) = torch.autograd.grad(weights, scores, cotangent, create_graph=True)
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores)
    v = _unit_vectors((noise * weights.detach().abs().sqrt()).masked_fill(~visible, 0.0) + 1e-6 * noise)
    norm = v.new_zeros(scores.shape[:-1])
    for _ in range(steps):
        (u,) = torch.autograd.grad(pullback, cotangent, v, retain_graph=True)  # J v
        norm = torch.maximum(norm, u.norm(dim=-1))
        (v,) = torch.autograd.grad(weights, scores, _unit_vectors(u), retain_graph=True)  # J^T u
        v = _unit_vectors(v)
    return norm.detach()


def _unit_vectors(v: Tensor) -> Tensor:
    """Scale vectors (..., S) to length 1; vectors of zeros stay."""
    norm = v.norm(dim=-1, keepdim=True)
    return v / norm.masked_fill(norm == 0, 1.0)


def jacobian_norm(rows: AttentionRows) -> Tensor:
    """Return the spectral norm of each row's d weights / d scores. The norm is computed in fp64, as fp32 rounds it
    badly if one key has nearly all weight.
    """
    return spectral_norm(rows.normalize, rows.scores.double(), rows.visible).to(rows.scores.dtype)


def jacobian_norm_bound(rows: AttentionRows) -> Tensor | None:
    """Return a bound on `jacobian_norm`: 1 / 2 for softmax, with or without a sink; None for normalizers of other maps
    of scores.
    """
    return torch.full_like(rows.weights[..., 0], 0.5) if rows.normalizer.score_map == "exp" else None


# ---------------------------------------------------------------- Theorems 1 and 2


class TopKeySeparation(NamedTuple):
    """Theorems 1 and 2 give these quantities for the N keys with the largest |weights|, (H, T) each; NaN where a query
    sees too few keys.
    """

    # d~, the sum over the other keys of |a_i x_i - s|; 0 where the N keys are all keys
    other_keys_distance_to_sum: Tensor
    other_keys_distance_bound: Tensor  # Theorem 1's upper bound on d~; NaN for rows with a negative weight
    separable_fraction: Tensor  # Theorem 2's N_s / N: the fraction of the N keys that lie within r of s


class RandomKeyBounds(NamedTuple):
    """Theorem 1 gives these bounds on the expected d~ of N random keys, (H, T) each; NaN where a query sees too few
    keys.

    In the fields' formulas n is the number of visible keys, c = N / (n - 1), and X the sum of a_j x_j over these keys.
    """

    lower: Tensor  # (n - N) / n times the sum over i of |(1 + c) a_i x_i - c X|, norms of means
    upper: Tensor  # the same with roots of mean squares in place of norms of means


def measure_top_keys(weights: Tensor, visible: Tensor, key_vectors: Tensor, count: int) -> TopKeySeparation:
    """Measure how far the other keys lie from the weighted sum s of the N = `count` keys of largest |weight| (arXiv
    2508.17821).

    The result has the summed distance d~ of all other keys to s, Theorem 1's upper bound on d~, and Theorem 2's N_s /
    N. This is the fraction of the N keys that lie as near to s as the nearest other key, or nearer.

    weights: (H, T, S), 0 where not visible; visible: (T, S) bool; key_vectors: (S, E).
    """
    n, order = visible.sum(-1), weights.abs().masked_fill(~visible, -1.0).topk(min(count, weights.size(-1)), -1).indices
    is_top = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, True) & visible
    rest, square = visible & ~is_top, key_vectors.square().sum(-1)
    s = (weights * is_top) @ key_vectors  # (H, T, E)
    # |a_i x_i - s|^2 - |s|^2, which tells small weights apart, as their distances round to |s|
    excess = weights.square() * square - 2 * weights * (s @ key_vectors.T)
    distance = (excess + s.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()
    farthest = weights.new_zeros(weights.shape[:-1])  # squared distance between one of the N keys and another key
    for key in order.unbind(-1):
        gaps = square + square[key].unsqueeze(-1) - 2 * key_vectors[key] @ key_vectors.T
        farthest = torch.maximum(farthest, gaps.masked_fill(~rest, 0.0).amax(-1))
    total, top_total = weights.sum(-1), (weights * is_top).sum(-1)
    longest = square.sqrt().expand_as(weights).masked_fill(~is_top, 0.0).amax(-1)
    bound = (total - top_total) * farthest.sqrt() + ((n - count + 1) * top_total - total) * longest
    is_separable = is_top & (excess <= excess.masked_fill(~rest, math.inf).amin(-1, keepdim=True))
    return TopKeySeparation(
        (distance * rest).sum(-1).masked_fill(n < count, math.nan),
        bound.masked_fill((n < count) | (weights < 0).any(-1), math.nan),
        (is_separable.sum(-1) / count).masked_fill(n <= count, math.nan),
    )


def bound_random_keys(weights: Tensor, visible: Tensor, key_vectors: Tensor, count: int) -> RandomKeyBounds:
    """Return the lower and upper bound (H, T) on the expected d~ of `count` keys drawn at random, by Theorem 1 of arXiv
    2508.17821.

    d~ is the summed distance of the other keys' vectors a_i x_i from s, the sum of the drawn keys' vectors. Arguments
    are as in `measure_top_keys`.
    """
    n = visible.sum(-1, keepdim=True).to(weights.dtype)
    products = weights * ((weights @ key_vectors) @ key_vectors.T)  # y_i . X, where y_i = a_i x_i
    mean_square = products.sum(-1, keepdim=True)  # |X|^2
    own_squares = weights.square() * key_vectors.square().sum(-1)  # |y_i|^2
    # For each key i: the sum over all other keys of the squared deviations of y from its mean.
    others = (mean_square - 2 * products + own_squares).clamp(min=0)
    rest_spread = own_squares.sum(-1, keepdim=True) - own_squares - others / (n - 1)
    c = count / (n - 1)
    norm = (1 + c).square() * own_squares - 2 * c * (1 + c) * products + c.square() * mean_square
    squares = norm, norm + c * (n - 1 - count) / (n - 2) * rest_spread
    sums = (((n - count) / n).squeeze(-1) * (part.clamp(min=0).sqrt() * visible).sum(-1) for part in squares)
    return RandomKeyBounds(*(total.masked_fill(n.squeeze(-1) < count, math.nan) for total in sums))


# ---------------------------------------------------------------- the family


def limit_statistics() -> Statistics:
    """Return the statistics of the lemmas and theorems; x_i is the embedding of token i, of length 1 as in
    Theorem 2.
    """
    return [
        # 1 for equal weights
        Statistic(
            "n x largest weight", "", lambda rows: rows.magnitudes.amax(-1) * rows.n_visible_keys, has_exponent=True
        ),
        Statistic("Lemma 1: ln (n x largest weight)", "nats", log_n_times_largest_weight),
        Statistic("Lemma 1: ln (n x smallest weight)", "nats", log_n_times_smallest_weight),
        Statistic("Lemma 1: ln C2 = -ln C1", "nats", log_n_times_weight_bound),
        Statistic("norm of the Jacobian", "", _compute_at_stride(jacobian_norm), in_reports=True, has_exponent=True),
        Statistic("bound on the norm of the Jacobian", "", _compute_at_stride(jacobian_norm_bound)),
        *(statistic for count in TOP_KEY_COUNTS for statistic in _key_separation_statistics(count)),
    ]


def _key_separation_statistics(count: int) -> Iterator[Statistic]:
    """Yield the statistics of Theorems 1 and 2 for `count` keys."""

    @lru_cache(maxsize=1)  # the statistics of the same rows are asked for one after the other
    def measure_theorems(rows: AttentionRows) -> tuple[Tensor, ...]:
        """Return the fields of `TopKeySeparation`, then of `RandomKeyBounds`, for N = `count`. The keys' vectors are
        their tokens' embeddings, scaled to length 1.
        """
        x = F.normalize(rows.token_embeddings[0].float(), dim=-1)[: rows.visible.size(-1)]
        keys = rows.weights, rows.visible, x, count
        return *measure_top_keys(*keys), *bound_random_keys(*keys)

    names = {
        f"d~ of the {count} largest weights": "",
        f"bound on d~ of the {count} largest weights": "",
        f"N_s / N of the {count} largest weights": "fraction",
        f"d~ of {count} random keys, at least": "",
        f"d~ of {count} random keys, at most": "",
    }
    for index, (name, unit) in enumerate(names.items()):
        yield Statistic(name, unit, lambda rows, index=index: measure_theorems(rows)[index], in_reports=index in (0, 2))


def _compute_at_stride(statistic: Callable[[AttentionRows], Tensor | None]) -> Callable[[AttentionRows], Tensor | None]:
    """Return a function that computes the statistic at every `QUERY_STRIDE`-th query, counted back from the sequence's
    last query. At other queries the function gives NaN.
    """

    def measure(rows: AttentionRows) -> Tensor | None:
        indices = (rows.later_query_counts % QUERY_STRIDE == 0).nonzero().squeeze(-1)
        value = statistic(rows.select(indices)) if len(indices) else None
        empty_values = torch.full_like(rows.n_visible_keys, math.nan)
        return None if value is None else empty_values.repeat(len(value), 1).index_copy(1, indices, value.float())

    return measure
