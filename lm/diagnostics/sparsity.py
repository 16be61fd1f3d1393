"""This module compares the sparsity S = E|a| / sqrt(E[a^2]) of a query's weights a with closed forms, and measures the
variance that positions explain.

S is at most 1, where all weights are equal; it is 1 / sqrt(n) where one of n keys has all the weight. A factor on the
weights does not change S. The closed forms (after Su, kexue.fm 9889) suppose infinitely many keys whose scores are beta
+ gamma eps, eps ~ N(0, 1). beta and gamma are the mean and the standard deviation of a query's scores, and r = beta /
gamma. Phi and phi are the normal distribution function and its density at r. The closed forms are elementwise in
tensors of any shape, fp32 or wider, and give NaN where they are not defined.

Moments are moments of the normalizer's scores, with every scale and temperature, without the part that depends on
distance alone. This part has a closed form of its own, by which S is multiplied. S of products of independent weights
is the product of their S.

Beside S, this module measures how far attention follows from positions alone, whatever the tokens are. The measure is
the fraction of the weights' variance that the key's position, or its distance from the query, explains. A query's
weights are standardised over the keys that it sees (mean 0, variance 1), so that every query counts alike. The mean of
these values at a key position (or distance) is its effect. The effects' mean square is the fraction of the variance
that positions explain. An effect's square is estimated by the product of the means in two different sequences, averaged
over all pairs of sequences. Within a sequence all queries see the same token at a position. So the square of one mean
would count the token, and chance, as an effect of the position. The estimate has no bias, and so may be slightly
negative where there is no effect.

Under a causal mask key position and distance go together: late keys are near to the queries that see them. So the
fraction that one of them explains is compared with the fraction that any function of both explains. Where distance
alone explains as much, key position adds nothing. The last query gives the fraction for both: for one query a key's
distance determines its position, so distance explains all that any function of both can.

The fractions for one of them are measured over queries in the second half of the sequence, as these see similar numbers
of keys. Standardised weights that fall with distance, say, are larger for a query that sees more keys.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lm.diagnostics.attention_rows import AttentionRows, HeadStatistic, Statistic, Statistics

# beta / gamma: S of relu and relu^2 is below 1e-40 from there on, and its terms cancel to rounding error
MIN_MEAN_OVER_STD = -20.0


def mean_over_rms_sparsity(weights: Tensor, visible: Tensor) -> Tensor:
    """Return the sparsity S = E|a| / sqrt(E[a^2]), (...), of each query's weights a, (..., keys). E is the mean over
    keys that the query sees.

    S is NaN if all weights are 0.
    """
    a = weights.abs().masked_fill(~visible, 0.0)
    a = a / a.amax(-1, keepdim=True)  # squares of small weights would underflow
    return a.sum(-1) / (a.square().sum(-1) * visible.sum(-1)).sqrt()


def exp_sparsity(std: Tensor) -> Tensor:
    """Return the sparsity S = exp(-std^2 / 2) of weights e^score, whatever the scores' mean.

    The formula holds for n keys if std < sqrt(ln n / 2) (`score_std_exceeds_limit`).
    """
    return (-std.square() / 2).exp()


def relu_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """Return the sparsity S of weights relu(score) of Gaussian scores.

    S = (r Phi + phi) / sqrt((r^2 + 1) Phi + r phi) with r = mean / std, which is 1 / sqrt(pi) at r = 0. Phi and phi are
    the normal distribution function and its density at r.
    """
    r, cdf, density = _ratio_normal_cdf_pdf(mean, std)
    return (r * cdf + density) / ((r**2 + 1) * cdf + r * density).sqrt()


def relu2_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """Return the sparsity S = E[a] / sqrt(E[a^2]) of weights a = relu(score)^2 of Gaussian scores with the given mean
    and std. S is 1 if all weights are equal, and near 0 if few keys have most of the weight.

    S = ((r^2 + 1) Phi + r phi) / sqrt((r^4 + 6 r^2 + 3) Phi + (r^3 + 5 r) phi) with r = mean / std, which is 1 /
    sqrt(6) at r = 0. Phi and phi are the normal distribution function and its density at r.
    """
    r, cdf, density = _ratio_normal_cdf_pdf(mean, std)
    return ((r**2 + 1) * cdf + r * density) / ((r**4 + 6 * r**2 + 3) * cdf + (r**3 + 5 * r) * density).sqrt()


def identity_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """Return the sparsity S = E|a| / sqrt(E[a^2]) of weights a that equal Gaussian scores, negative ones included.

    S is at least sqrt(2 / pi) = .798. In general S is 1 for equal weights, and small where few keys have most of the
    weight. With this lower bound, weights can't concentrate.
    """
    beta, gamma = mean.double(), std.double()
    mean_magnitude = math.sqrt(2 / math.pi) * gamma * (-(beta / gamma).square() / 2).exp() + beta * torch.erf(
        beta / gamma / math.sqrt(2)
    )
    return mean_magnitude / (beta.square() + gamma.square()).sqrt()


def independent_features_sparsity(query_features: Tensor, key_mean: Tensor, key_std: Tensor) -> Tensor:
    """Return the sparsity S of weights query.key of D non-negative features, if a key's features are independent, with
    the given mean and standard deviation.

    S = 1 / sqrt(1 + ((std / mean) ||q||_2 / ||q||_1)^2), q = `query_features` (..., D). The ratio of norms is between
    1 / sqrt(D) and 1.
    """
    return 1 / (1 + (key_std / key_mean * query_features.norm(dim=-1) / query_features.norm(1, -1)).square()).sqrt()


def decay_sparsity(log_decay: Tensor, n: Tensor) -> Tensor:
    """Return the sparsity S of weights g^t on n keys, t = 0 ... n - 1 tokens back, g = e^log_decay <= 1; S is 1 for g =
    1.

    If g^n is small, S is near sqrt((1 + g) / (n - n g)). S of products of independent weights is the product of their
    S, so S of a decay multiplies S of the weights without the decay.
    """
    log_g, n = torch.broadcast_tensors(log_decay.double(), n.double())
    g = log_g.exp()
    square = torch.expm1(n * log_g) / (n * torch.expm1(log_g)) * (1 + g) / (1 + (n * log_g).exp())
    return torch.where(log_g == 0, 1.0, square).sqrt()


def _ratio_normal_cdf_pdf(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return r = mean / std, the normal distribution function Phi(r) and the normal density phi(r), in fp64."""
    r = (mean.double() / std.double()).clamp(MIN_MEAN_OVER_STD, 1e6)  # at 1e6, which gamma = 0 gives too, S is 1
    density = (-r.square() / 2).exp() / math.sqrt(2 * math.pi)
    # exact where Phi's terms cancel
    tail = density * math.sqrt(math.pi / 2) * torch.special.erfcx(-r.clamp(max=0.0) / math.sqrt(2))
    return r, torch.where(r < 0, tail, torch.special.ndtr(r)), density


def standardised_weights_and_mask(weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise each query's weights (..., S) to mean 0 and standard deviation 1. Returns the standardised weights,
    and a mask of the weights that count, both (..., S).

    Keys that a query does not see do not count, nor does a query whose weights are all equal, or not finite.
    """
    n = visible.sum(-1, keepdim=True)
    deviation = (weights - weights.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / n).masked_fill(~visible, 0.0)
    std = (deviation.square().sum(-1, keepdim=True) / n).sqrt()
    largest = weights.abs().masked_fill(~visible, 0.0).amax(-1, keepdim=True)
    # deviations below that are rounding errors of equal weights
    is_counted = visible & (std > 1e-6 * largest) & std.isfinite()
    return torch.where(is_counted, deviation / std, 0.0), is_counted


def group_sums_and_counts(values: Tensor, is_counted: Tensor, groups: Tensor, n_groups: int) -> Tensor:
    """Return sums of `values` over each of `n_groups` groups of (query, key) pairs, then the number of pairs that count
    in each group: (..., 2 n_groups).

    values, (..., T, S), are 0 for pairs that don't count; is_counted, (..., T, S) bool, is true for pairs that do.
    groups: int64, broadcastable to (T, S), each pair's group, such as its key position or distance.
    """
    groups = groups.expand(values.shape).flatten(-2)
    zeros = values.new_zeros(*values.shape[:-2], n_groups)
    entries = (values, is_counted.expand(values.shape).to(values.dtype))
    return torch.cat([zeros.scatter_add(-1, groups, entry.flatten(-2)) for entry in entries], -1)


def variance_explained(sums_by_sequence: np.ndarray) -> np.ndarray:
    """Return the fraction of weights' variance that groups of keys explain, (...) float64.

    sums_by_sequence: `group_sums_and_counts` of N sequences, (N, ..., 2 n_groups). Only groups (key positions or
        distances) that occur in two sequences or more count; NaN where no group does.
    """
    sums, counts = np.split(sums_by_sequence, 2, axis=-1)
    mean = sums / np.maximum(counts, 1)
    total, square, sequences, entries = mean.sum(0), (mean**2).sum(0), (counts > 0).sum(0), counts.sum(0)
    pairs = sequences * (sequences - 1)
    squared_effect = (total**2 - square) / np.maximum(pairs, 1)
    weight = entries * (pairs > 0)
    weights = weight.sum(-1)
    return np.divide((squared_effect * weight).sum(-1), weights, out=np.full(weights.shape, np.nan), where=weights > 0)


def make_position_sums_and_counts(
    by_key_position: bool, first_query_position: Callable[[int], int]
) -> Callable[[AttentionRows, int], Tensor]:
    """Return a function (rows, length) that computes `group_sums_and_counts` of standardised weights, (H, 2 length).

    Groups are key positions in the document, or distances. Only queries from position `first_query_position(length)` on
    count.
    """

    def sum_rows(rows: AttentionRows, length: int) -> Tensor:
        """Return `group_sums_and_counts` of these rows, as `make_position_sums_and_counts` describes them."""
        mask = rows.layout.positions.flatten() >= first_query_position(length)
        values, is_counted = standardised_weights_and_mask(rows.weights[:, mask], rows.visible[mask])
        groups = rows.layout.key_positions.view(1, -1) if by_key_position else rows.distance.clamp(min=0).long()[mask]
        return group_sums_and_counts(values, is_counted, groups, length)

    return sum_rows


# queries in the second half of the sequence; for the last query distance and key position are the same
VARIANCE_SOURCES = {
    "key position": make_position_sums_and_counts(True, lambda length: length // 2),
    "distance": make_position_sums_and_counts(False, lambda length: length // 2),
    "both, last query": make_position_sums_and_counts(False, lambda length: length - 1),
}


# ---------------------------------------------------------------- S against its closed form


# by `Normalizer.score_map`, of mean and standard deviation
CLOSED_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": lambda mean, std: exp_sparsity(std),
    "relu2": relu2_sparsity,
    "relu": relu_sparsity,
    "identity": identity_sparsity,
}


def closed_form_sparsity(rows: AttentionRows) -> Tensor | None:
    """Return the sparsity S of each query's weights in closed form, from the moments of its scores, (H, T); None for
    weights without a closed form.

    For non-negative features the closed form supposes that a key's features are independent. It takes their mean and
    standard deviation over all features of all keys that the query sees. It does not take those of the products of
    query and key. With them the formula would hold even for dependent features, and its error would not show the
    dependence.
    """
    name, log_decay = rows.normalizer.score_map, rows.normalizer.log_decay(rows.scores)
    if name == "features":
        query, key = rows.linear_attention_features
        key_weights = rows.visible.to(key.dtype) / rows.n_visible_keys.unsqueeze(-1)  # (T, S)
        mean = key_weights @ key.mean(-1, keepdim=True)  # (H, T, 1)
        square = key_weights @ key.square().mean(-1, keepdim=True)
        std = (square - mean.square()).clamp(min=0.0).sqrt()
        content = independent_features_sparsity(query, mean.squeeze(-1), std.squeeze(-1))
    elif name in CLOSED_FORMS:
        content = CLOSED_FORMS[name](rows.moments_without_decay.mean, rows.moments_without_decay.std)
    else:
        return None
    return content * decay_sparsity(log_decay.unsqueeze(-1), rows.n_visible_keys)


def score_std_exceeds_limit(rows: AttentionRows) -> Tensor | None:
    """Return 1 for queries whose scores have a standard deviation std above sqrt(ln n / 2), else 0, (H, T). For these
    queries the sparsity S of weights e^score is larger than `exp_sparsity`.

    Return None if the normalizer's weights are not e^score. The closed form contains E[e^(2 score)], which stems from
    scores about 2 std^2 above the mean, that is 2 std standard deviations. The largest of n Gaussian scores lies only
    sqrt(2 ln n) standard deviations above the mean. If 2 std is larger, n keys lack the scores that make up the
    expectation, and S stays above its closed form.
    """
    return (
        (rows.moments_without_decay.std > (rows.n_visible_keys.log() / 2).sqrt()).float()
        if rows.normalizer.score_map == "exp"
        else None
    )


def sparsity_minus_closed_form(rows: AttentionRows) -> Tensor | None:
    """Return the sparsity S of each query's weights minus the S that a closed form predicts from the moments of its
    scores, (H, T).

    Return None for a normalizer whose S has no closed form.
    """
    expected_sparsity = closed_form_sparsity(rows)
    return None if expected_sparsity is None else mean_over_rms_sparsity(rows.weights, rows.visible) - expected_sparsity


def sparsity_statistics() -> Statistics:
    """Return the statistics of sparsity: S against its closed form, the moments of scores, and the variance of weights
    that positions explain.
    """
    by_row = [
        Statistic(
            "score standard deviation",
            "",
            lambda rows: rows.moments_without_decay.std,
            in_reports=True,
            has_exponent=True,
        ),
        Statistic("score mean", "", lambda rows: rows.moments_without_decay.mean),
        Statistic("score skew", "", lambda rows: rows.moments_without_decay.skew),
        Statistic("score excess kurtosis", "", lambda rows: rows.moments_without_decay.excess_kurtosis),
        Statistic("S, closed form", "fraction", closed_form_sparsity),
        Statistic("S minus closed form", "", sparsity_minus_closed_form),
    ]
    condensation = Statistic("queries beyond condensation", "fraction", score_std_exceeds_limit)
    explained_variance = [
        HeadStatistic(f"variance explained by {source}", sum_rows, variance_explained)
        for source, sum_rows in VARIANCE_SOURCES.items()
    ]
    return [*by_row, condensation, *(statistic.without_first_token for statistic in by_row), *explained_variance]
