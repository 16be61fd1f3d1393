"""Concentration against theory: S of each query's weights beside what the mean and the spread of its scores predict in closed form.

Moments are those of the normalizer's scores, every scale and temperature included, without the part that depends on distance alone, which
has a closed form of its own: S of the product of both is the product of theirs. With shuffled scores the two cannot be told apart any more,
and weights with such a part have no closed form there.

A head's attention that follows from positions alone is measured beside it: the fraction of the weights' variance that the position of the
key explains, or its distance from the query, whatever the tokens are.

A query's weights are standardised over the keys that it sees (mean 0, variance 1), so that every query counts alike. The mean of these
values at a key position (or distance) is the effect of that place, and the mean of its square is the fraction of the variance that places
explain. That square is estimated by products of means of different sequences: within a sequence all queries see the same tokens at a
place, and the square of one mean would count a key's content, and chance, as an effect of its position. The estimate has no bias, and so
may be slightly negative where there is no effect.

Under a causal mask the two go together: late keys are near to the queries that see them. What one of them explains has to be compared with
what any function of both explains, the pattern that all sequences share: where distance alone explains as much, key position adds nothing.
Queries within a factor of two of each other are taken together: of standardised weights that fall with distance, say, those of a query that
sees more keys are larger.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lm.diagnostics.concentration import no_first
from lm.diagnostics.rows import Accumulated, AttentionRows, Family, Statistic
from lm.diagnostics.sparsity import (
    condensation_scale,
    decay_sparsity,
    exp_sparsity,
    identity_sparsity,
    independent_features_sparsity,
    relu2_sparsity,
    relu_sparsity,
    sparsity,
)


def standardised(weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Each query's weights (..., S) minus their mean, over their standard deviation, and where they count: both (..., S).

    Keys that a query does not see do not count, nor does a query whose weights are all equal, or not finite.
    """
    n = visible.sum(-1, keepdim=True)
    deviation = (weights - weights.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / n).masked_fill(~visible, 0.0)
    std = (deviation.square().sum(-1, keepdim=True) / n).sqrt()
    size = weights.abs().masked_fill(~visible, 0.0).amax(-1, keepdim=True)
    counts = visible & (std > 1e-6 * size) & std.isfinite()  # deviations below that are rounding errors of equal weights
    return torch.where(counts, deviation / std, 0.0), counts


def sums_by_place(values: Tensor, counts: Tensor, places: Tensor, size: int) -> Tensor:
    """Sums over queries at each of `size` places, and how many there were: (..., T, S) -> (..., 2 size), sums first.

    places: (T, S) int64, or broadcastable to it: where each entry belongs.
    """
    places = places.expand(values.shape).flatten(-2)
    empty = values.new_zeros(*values.shape[:-2], size)
    entries = (values, counts.expand(values.shape).to(values.dtype))
    return torch.cat([empty.scatter_add(-1, places, one.flatten(-2)) for one in entries], -1)


def variance_explained(sums: np.ndarray) -> np.ndarray:
    """The fraction of the variance that places explain, from `sums_by_place` of N sequences (N, ..., 2 size): (...) float64.

    Of the places that two sequences or more have; NaN where none has.
    """
    size = sums.shape[-1] // 2
    total, square, sequences, entries = (np.zeros((*sums.shape[1:-1], size)) for _ in range(4))
    for one in sums:
        counts = one[..., size:]
        mean = one[..., :size] / np.maximum(counts, 1)
        total += mean
        square += mean**2
        sequences += counts > 0
        entries += counts
    pairs = sequences * (sequences - 1)
    effect = (total**2 - square) / np.maximum(pairs, 1)
    weight = entries * (pairs > 0)
    weights = weight.sum(-1)
    return np.divide((effect * weight).sum(-1), weights, out=np.full(weights.shape, np.nan), where=weights > 0)


def by_key_position(rows: AttentionRows, length: int) -> Tensor:
    """Sums by the position of the key in its document, of queries in the second half of the sequence, (H, 2 length)."""
    places = rows.layout.key_positions.view(1, -1)
    return _sums(rows, length, places, length // 2)


def by_distance(rows: AttentionRows, length: int) -> Tensor:
    """Sums by the distance of the key, of the same queries."""
    return _sums(rows, length, rows.distance.clamp(min=0).long(), length // 2)


def by_both(rows: AttentionRows, length: int) -> Tensor:
    """Sums of the last query, for which distance and key position are the same thing: what any function of both explains."""
    return _sums(rows, length, rows.distance.clamp(min=0).long(), length - 1)


def _sums(rows: AttentionRows, length: int, places: Tensor, first: int) -> Tensor:
    """Of queries from position `first` of their document on."""
    chosen = rows.layout.positions.flatten() >= first
    values, counts = standardised(rows.weights[:, chosen], rows.visible[chosen])
    places = places if places.size(0) == 1 else places[chosen]
    return sums_by_place(values, counts, places, length)


STATISTICS = (
    Accumulated("variance explained by key position", "", lambda length: 2 * length, by_key_position, variance_explained, shown=True),
    Accumulated("variance explained by distance", "", lambda length: 2 * length, by_distance, variance_explained, shown=True),
    Accumulated("variance explained by both, last query", "", lambda length: 2 * length, by_both, variance_explained, shown=True),
)


# ---------------------------------------------------------------- S against its closed form


CLOSED_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # by `Normalizer.score_map`, of mean and standard deviation
    "exp": lambda mean, std: exp_sparsity(std),
    "relu2": relu2_sparsity,
    "relu": relu_sparsity,
    "identity": identity_sparsity,
}


def closed_form(rows: AttentionRows) -> Tensor | None:
    """S in closed form at the moments of each query's scores, (H, T); None of weights without one.

    Of non-negative features it is that of independent components: with the query's own mean and variance of the products it would be
    true of any keys.
    """
    name, log_decay = rows.normalizer.score_map, rows.normalizer.log_decay(rows.scores)
    if rows.is_shuffled and (log_decay.any() or name == "features"):
        return None
    if name == "features":
        of_content = _of_features(rows)
    elif name in CLOSED_FORMS:
        of_content = CLOSED_FORMS[name](rows.moments.mean, rows.moments.std)
    else:
        return None
    return of_content * decay_sparsity(log_decay.unsqueeze(-1), rows.n)


def _of_features(rows: AttentionRows) -> Tensor:
    """`independent_features_sparsity` with the moments of all features of the keys that each query sees, (H, T)."""
    query, key = rows.features
    seen = rows.visible.to(key.dtype) / rows.n.unsqueeze(-1)  # (T, S)
    mean = seen @ key.mean(-1, keepdim=True)  # (H, T, 1)
    square = seen @ key.square().mean(-1, keepdim=True)
    std = (square - mean.square()).clamp(min=0.0).sqrt()
    return independent_features_sparsity(query, mean.squeeze(-1), std.squeeze(-1))


def is_condensed(rows: AttentionRows) -> Tensor | None:
    """1 of queries whose scores spread too much for the closed form of exp to hold for so many keys, else 0; None of other maps."""
    if rows.normalizer.score_map != "exp":
        return None
    return (rows.moments.std > condensation_scale(rows.n)).float()


def difference(rows: AttentionRows) -> Tensor | None:
    """S minus its closed form."""
    closed = closed_form(rows)
    return None if closed is None else sparsity(rows.weights, rows.visible) - closed


def family() -> Family:
    """S against its closed form, the moments of the scores, and what positions explain of the weights."""
    of_rows = [
        Statistic("score standard deviation", "", lambda rows: rows.moments.std, shown=True, fitted=True),
        Statistic("score mean", "", lambda rows: rows.moments.mean),
        Statistic("score skew", "", lambda rows: rows.moments.skew),
        Statistic("score excess kurtosis", "", lambda rows: rows.moments.excess_kurtosis),
        Statistic("S, closed form", "fraction", closed_form),
        Statistic("S minus closed form", "", difference),
    ]
    condensed = Statistic("queries beyond condensation", "fraction", is_condensed)
    return Family((*of_rows, condensed, *map(no_first, of_rows)), STATISTICS)
