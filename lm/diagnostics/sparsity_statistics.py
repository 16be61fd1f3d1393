"""Concentration against theory: S of each query's weights beside what the mean and the spread of its scores predict in closed form.

Moments are those of the normalizer's scores, every scale and temperature included, without the part that depends on distance alone, which
has a closed form of its own: S of the product of both is the product of theirs. With shuffled scores the two cannot be told apart any more,
and weights with such a part have no closed form there.
"""

from collections.abc import Callable

from torch import Tensor

from lm.diagnostics import position_effects
from lm.diagnostics.concentration import no_first
from lm.diagnostics.rows import AttentionRows
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
from lm.diagnostics.statistic import Family, Statistic

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
    return Family((*of_rows, condensed, *map(no_first, of_rows)), position_effects.STATISTICS)
