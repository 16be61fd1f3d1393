"""Statistics of concentration say how many keys have most weight, and how much weight is on the first token and on near
keys.

Magnitudes |a| stand for weights, which may be negative or need not sum to one. Statistics whose names end in
`, no first` describe the same rows without the first token of the document, which may be an attention sink. Fractions
are then fractions of the other keys' weight.
"""

import math

import torch
from torch import Tensor

from lm.diagnostics.attention_rows import AttentionRows, Statistic, Statistics
from lm.diagnostics.sparsity import mean_over_rms_sparsity

LARGEST_KEY_COUNTS, NEAREST_KEY_COUNTS = (8, 64), (16, 64)  # numbers of keys whose weight is summed
WEIGHT_FRACTION = 0.95  # fraction of the weight in `keys with 95% of the weight`


def effective_keys(rows: AttentionRows) -> Tensor:
    """Return N_eff = (sum |a|)^2 / sum a^2 of each row's weights a. N_eff is 1 for weight on one key, and the number of
    visible keys for equal weights.
    """
    return mean_over_rms_sparsity(rows.weights, rows.visible).square() * rows.n_visible_keys


def entropy(rows: AttentionRows) -> Tensor | None:
    """Return the entropy -sum p ln p of each row, nats, with p = a / sum |a| for weights a. None for normalizers whose
    weights do not sum to one.

    The division matters where the first token is masked (`AttentionRows.with_first_token_zeroed`), as the rest of the
    weights sum to less than one. The entropy is NaN for rows with a negative weight, or without weight.
    """
    if not rows.normalizer.options.rows_sum_to_one:
        return None
    p = rows.weights / rows.abs_sum.unsqueeze(-1)
    return -torch.special.xlogy(p, p).sum(-1)


def relative_entropy(rows: AttentionRows) -> Tensor | None:
    """Return each row's entropy divided by ln (number of visible keys): 0 for weight on one key, 1 for equal weights.
    None as for `entropy`.
    """
    nats = entropy(rows)
    return None if nats is None else nats / rows.n_visible_keys.log()


def keys_with_most_weight(rows: AttentionRows) -> Tensor:
    """Return the least number of keys of each row that together have the fraction `WEIGHT_FRACTION` of the row's
    weight.
    """
    is_short = rows.descending_weights.cumsum(-1) < WEIGHT_FRACTION * rows.abs_sum.unsqueeze(-1)
    return (is_short.sum(-1) + 1).float().where(rows.defined_row_mask, math.nan)


def log_unnormalized_weight_sum(rows: AttentionRows) -> Tensor | None:
    """Return ln Z of each row (`Normalizer.log_weight_sum`). Z is the row's sum of unnormalized weights: of e^score for
    softmax, of relu(score)^2 for relu2.

    Su's argument about dividing by n (kexue.fm 9019) depends on p in Z ~ n^p: dividing by Z is dividing by n only if p
    is 1.
    """
    sums = rows.normalizer.log_weight_sum(rows.scores.unsqueeze(0), rows.layout)
    return None if sums is None else sums[0]


def weighted_mean(rows: AttentionRows, values: Tensor) -> Tensor:
    """Return each row's mean of the keys' `values`, weighted by |weights|. If `values` is a mask, this is the fraction
    of the row's weight on its keys.
    """
    return (rows.magnitudes * values).sum(-1) / rows.abs_sum


def concentration_statistics() -> Statistics:
    """Return all statistics of concentration (docs/diagnostics.md)."""

    def largest_weight(n_keys: int) -> Statistic:
        return Statistic(
            f"weight on the largest {n_keys}",
            "fraction",
            lambda rows: rows.descending_weights[..., :n_keys].sum(-1) / rows.abs_sum,
        )

    def nearest_weight(n_keys: int) -> Statistic:
        return Statistic(
            f"weight on the nearest {n_keys}", "fraction", lambda rows: weighted_mean(rows, rows.distance < n_keys)
        )

    def row_sum(rows: AttentionRows) -> Tensor | None:
        return None if rows.normalizer.options.rows_sum_to_one else rows.weights.sum(-1)

    by_row = [
        Statistic("effective keys", "keys", effective_keys, in_reports=True, has_exponent=True),
        Statistic("entropy / ln n", "fraction", relative_entropy, in_reports=True),
        Statistic(
            "largest weight", "weight", lambda rows: rows.descending_weights[..., 0], in_reports=True, has_exponent=True
        ),
        Statistic(f"keys with {WEIGHT_FRACTION:.0%} of the weight", "keys", keys_with_most_weight, has_exponent=True),
        Statistic("S", "fraction", lambda rows: mean_over_rms_sparsity(rows.weights, rows.visible)),
        Statistic("entropy", "nats", entropy),
        Statistic(
            "exact zeros", "fraction", lambda rows: ((rows.weights == 0) & rows.visible).sum(-1) / rows.n_visible_keys
        ),
        Statistic("mean distance", "tokens", lambda rows: weighted_mean(rows, rows.distance)),
        *map(largest_weight, LARGEST_KEY_COUNTS),
        *map(nearest_weight, NEAREST_KEY_COUNTS),
    ]
    row_totals = [
        Statistic(
            "weight on the first token",
            "fraction",
            lambda rows: weighted_mean(rows, rows.first_token_mask),
            in_reports=True,
        ),
        Statistic("ln Z", "nats", log_unnormalized_weight_sum, has_exponent=True, is_log=True),
        Statistic("sum of weights", "weight", row_sum),
    ]
    return [*by_row, *row_totals, *(statistic.without_first_token for statistic in by_row)]
