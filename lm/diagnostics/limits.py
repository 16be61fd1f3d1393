"""The limits of normalization (Mudarisov et al. 2025, arXiv 2508.17821) in a model's attention: the family `limits` of
statistics.

`lm.diagnostics.lemmas` has Lemmas 1 and 2 by row. This module has Theorems 1 and 2, the critical number of keys
(Algorithm 3, by two-sample Kolmogorov-Smirnov tests) and the temperatures of Lemma 2. Where the paper leaves a choice
open (which vectors, divided by their length or not, with or without the first token) `eval.diagnostics.limits` has an
option.

Both theorems say how far a query's weighted keys lie from the sum of some of them. A query gives key i the weight a_i;
x_i is the vector of key i. For a set I of N keys, s = sum over I of a_i x_i, and

    d~ = sum over i not in I of |a_i x_i - s|    (the paper's Eqs. 6 and 7).

Theorem 1 compares the N keys of the largest weights with N keys drawn at random. Theorem 2 counts N_s, the number of
keys among the N whose a_i x_i lies within r of s. r is the distance from s to the nearest a_j x_j of any other key. The
bounds are reconstructed from the paper's words, as its typeset equations could not be read. The bound of Theorem 1 is
proved, and holds for weights of any sum.

All distances are computed from inner products of vectors. Sums over a model's rows, (H, octaves, 2, quantities,
points), hold for each octave of visible keys the sums over its rows, and the number of these rows. Points are numbers
N, or pairs of temperature and step. Shapes: H heads, T queries, S keys, E entries of a vector, R rows of any heads, G
numbers of keys N, ascending. Tensors are fp32.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.eval_config import LimitsConfig
from lm.diagnostics import lemmas
from lm.diagnostics.attention_rows import (
    MIN_KEYS,
    AttentionRows,
    DerivedNumbers,
    MeasuredValues,
    QuerySums,
    Statistic,
    StatisticFamily,
    mean,
    visible_keys_axis,
)
from lm.diagnostics.lemmas import directions, finite_difference, spectral_norm
from lm.runs.evaluations import Axis


class TopKeys(NamedTuple):
    """Quantities of Theorems 1 and 2 (arXiv 2508.17821) for the N keys with the largest |weights|: (G, R) for G numbers
    N, R queries.

    NaN where a query sees too few keys. The module's docstring defines s, d~ and r. The envelopes are no bounds: they
    assume keys that lie uniformly on a sphere, independently of weights, and take r from the data.
    """

    distance: Tensor  # d~, the sum over the other keys of |a_i x_i - s|; 0 where the N keys are all keys
    bound: Tensor  # Theorem 1's upper bound on d~; NaN for rows with a negative weight
    separable: Tensor  # Theorem 2's N_s / N: the fraction of the N keys that lie within r of s
    lower: Tensor  # lower envelope of `separable`, between 0 and 1
    upper: Tensor  # upper envelope of `separable`, between 0 and 1
    separable_mask: Tensor  # (G, R, S) bool: the keys among the N that lie within r of s
    top_mask: Tensor  # (G, R, S) bool: the N keys


class RandomKeys(NamedTuple):
    """Expected d~ (see the module) of N random keys (Theorem 1, arXiv 2508.17821): (G, R) for G numbers N, R queries.

    NaN where a query sees too few keys. In the formulas n is the number of visible keys, and x- is the sum of a_j x_j
    over all of them.
    """

    uncorrected: Tensor  # (n - N) / n sum |(a_i + N / (n - 1)) x_i - x-|: Theorem 1 as quoted, which is too large
    corrected: Tensor  # (n - N) / n sum |(1 + c) a_i x_i - c x-|, c = N / (n - 1): norms of means, a lower bound
    # as `corrected`, with roots of mean squares in place of norms of means: an upper bound of the expectation
    upper: Tensor
    sampled: Tensor  # d~ of one random set of keys for each row, a set that grows with N; unbiased (Monte Carlo)


def top_keys(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> TopKeys:
    """`TopKeys` of R queries for each N in `counts`: distances from the sum of N weighted keys, and bounds on them
    (arXiv 2508.17821).

    weights: (R, S), 0 where not visible; visible: (R, S) bool; x: (S, E), the keys' vectors.
    """
    order = _keys_by_weight(weights, visible, counts)
    n, length = visible.sum(-1), x.norm(dim=-1)
    farthest, nearest = _extreme_distances(x, order, counts)
    total, not_negative = weights.sum(-1), (weights >= 0).all(-1)
    by_count = []
    for index, (count, (rest_mask, excess, distance)) in enumerate(
        zip(counts, _sum_gaps(weights, visible, x, order, counts), strict=True)
    ):
        top_mask = visible & ~rest_mask
        separable_mask = top_mask & (excess <= excess.masked_fill(~rest_mask, torch.inf).amin(-1, keepdim=True))
        r = distance.masked_fill(~rest_mask, torch.inf).amin(-1)
        indices = order[:, :count]
        alpha, longest = weights.gather(1, indices), length[indices].amax(-1)
        largest_distance = farthest[index].masked_fill(~rest_mask, 0.0).amax(-1).sqrt()
        top_total = alpha.sum(-1)
        bound = (total - top_total) * largest_distance + ((n - count + 1) * top_total - total) * longest
        lower, upper = _envelopes(alpha, longest, nearest[index], r)
        values = (
            (distance * rest_mask).sum(-1),
            bound.where(not_negative, torch.nan),
            separable_mask.sum(-1) / count,
            lower,
            upper,
        )
        is_too_many = torch.stack((n < count, n < count, n <= count, n <= count, n <= count))
        by_count.append((torch.stack(values).masked_fill(is_too_many, torch.nan), separable_mask, top_mask))
    values, separable_masks, top_masks = map(torch.stack, zip(*by_count, strict=True))
    return TopKeys(*values.unbind(1), separable_masks, top_masks)


def top_distances(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """`TopKeys.distance` alone, (G, R), for the G numbers N in `counts` and R queries."""
    return _distances(weights, visible, x, _keys_by_weight(weights, visible, counts), counts)


def random_keys(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int], draws: Tensor) -> RandomKeys:
    """`RandomKeys` for each N in `counts`; the keys with the largest of the random numbers `draws`, (R queries, S
    keys), are the sample.
    """
    order = draws.masked_fill(~visible, -torch.inf).topk(min(counts[-1], weights.size(1)), -1).indices
    n, square = visible.sum(-1, keepdim=True).to(weights.dtype), x.square().sum(-1)
    product = (weights @ x) @ x.T  # x_i . x-
    mean_square = (weights * product).sum(-1, keepdim=True)  # |x-|^2
    own_squares, cross_products = weights.square() * square, weights * product  # |y_i|^2 and y_i . x-, of y_i = a_i x_i
    # For each key i: the sum over all other keys of the squared deviations of y from its mean.
    rest_spread = (
        own_squares.sum(-1, keepdim=True)
        - own_squares
        - (mean_square - 2 * cross_products + own_squares).clamp(min=0) / (n - 1)
    )
    by_count = []
    for count in counts:
        c = count / (n - 1)
        uncorrected = (weights + c).square() * square - 2 * (weights + c) * product + mean_square
        corrected = (1 + c).square() * own_squares - 2 * c * (1 + c) * cross_products + c.square() * mean_square
        spread = c * (n - 1 - count) / (n - 2) * rest_spread
        rest_fraction = ((n - count) / n).squeeze(-1)
        squared_norms = uncorrected, corrected, corrected + spread
        expectations = [
            rest_fraction * (squared_norm.clamp(min=0).sqrt() * visible).sum(-1) for squared_norm in squared_norms
        ]
        by_count.append(torch.stack(expectations).masked_fill(n.squeeze(-1) < count, torch.nan))
    return RandomKeys(*torch.stack(by_count, 1), _distances(weights, visible, x, order, counts))


def _keys_by_weight(weights: Tensor, visible: Tensor, counts: Sequence[int]) -> Tensor:
    """For each of R queries the indices of its N keys of largest |weight|, in descending order, N the largest of
    `counts`: (R, N) int64.

    Invisible keys come last.
    """
    return weights.abs().masked_fill(~visible, -1.0).topk(min(counts[-1], weights.size(1)), -1).indices


def _added_keys(order: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield, for each N in `counts`, the keys that it adds to the previous N's: columns previous N to N - 1 of `order`,
    (R, keys).
    """
    return (order[:, start:stop] for start, stop in pairwise([0, *counts]))


def _extreme_distances(x: Tensor, order: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Squared distances from each key to the farthest of the first N keys in a query's `order`, and between the closest
    two of these N.

    The first are (G, R, S); the others, (G, R), are infinite for N = 1. Shapes: G numbers N in `counts`, R queries, S
    keys.
    """

    def pairs(keys: Tensor, others: Tensor) -> Tensor:
        products = x[keys] @ x[others].mT
        return (square[keys].unsqueeze(-1) + square[others].unsqueeze(-2) - 2 * products).clamp(min=0)

    square, farthest = x.square().sum(-1), [x.new_zeros(len(order), len(x))]
    for keys in _added_keys(order, counts):
        distances = pairs(keys, torch.arange(len(x), device=x.device))
        farthest.append(torch.cat((farthest[-1].unsqueeze(1), distances), 1).amax(1))
    pair_distances = pairs(order, order)
    pair_distances = pair_distances.masked_fill(
        torch.ones_like(pair_distances[0], dtype=torch.bool).triu(), torch.inf
    )  # each pair once
    return torch.stack(farthest[1:]), torch.stack([pair_distances[:, :count].amin((1, 2)) for count in counts])


def _distances(weights: Tensor, visible: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of |a_i x_i - s| over keys i beyond the first N in `order`, s the sum of a_i x_i over these N: (G numbers
    N, R queries).
    """
    distance_sums = [
        (distance * rest_mask).sum(-1) for rest_mask, _, distance in _sum_gaps(weights, visible, x, order, counts)
    ]
    return torch.stack(distance_sums).masked_fill(
        visible.sum(-1) < torch.tensor(counts, device=x.device)[:, None], torch.nan
    )


def _sum_gaps(
    weights: Tensor, visible: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield, for each N in `counts`, three (R, S): mask of the keys beyond the first N in `order`, |a_i x_i - s|^2 -
    |s|^2, |a_i x_i - s|.

    s is the sum of a_i x_i over the first N. The difference of squares tells small weights apart, as their distances
    round to |s|.
    """
    rest_mask, square, s = visible, x.square().sum(-1), x.new_zeros(len(order), x.size(1))
    for count, keys in zip(counts, _added_keys(order, counts), strict=True):
        s = s + torch.zeros_like(weights).scatter(1, keys, weights.gather(1, keys)) @ x
        rest_mask = rest_mask.scatter(1, order[:, :count], False)
        excess = weights.square() * square - 2 * weights * (s @ x.T)
        yield rest_mask, excess, (excess + s.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()


def _envelopes(alpha: Tensor, longest: Tensor, nearest: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper envelope, (R,) each, of the fraction of N keys with a_i x_i within r of their sum s (Theorem 2,
    arXiv 2508.17821).

    They are 1 - mean(xi_i) / r and mean exp(-(xi_i - r)_+^2 / (2 longest^2)), where x_i is the vector of key i. xi_i
    bounds |a_i x_i - s| from above, if weights are not negative. R is the number of queries.

    alpha: (R, N), weights a_i of the N keys; r: (R,), a radius.
    longest, nearest: (R,) each, the largest |x| of the N keys, and the smallest squared distance between two of them.
    """
    own_squares = alpha.square()
    other_squares = own_squares.sum(-1, keepdim=True) - own_squares  # sum of the other weights' squares
    pairs = ((alpha.sum(-1, keepdim=True) - alpha).square() - other_squares).clamp(min=0)
    m = longest.square().unsqueeze(-1)
    xi = (m * other_squares + (m - nearest.nan_to_num(posinf=0.0).unsqueeze(-1) / 2).clamp(min=0) * pairs).sqrt()
    lower = 1 - (xi / r.unsqueeze(-1).clamp(min=1e-30)).mean(-1)
    return lower.clamp(min=0), torch.exp(-(xi - r.unsqueeze(-1)).clamp(min=0).square() / (2 * m)).mean(-1)


# ---------------------------------------------------------------- the theorems


MAX_PRODUCTS = 2**22  # the most products of keys' vectors with sums s in memory at a time
FEW_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # N of Theorem 2
DISTANCES = (
    "largest weights",
    "random keys, uncorrected",
    "random keys, corrected",
    "random keys, upper bound",
    "random keys, drawn",
)
SEPARABLE = (
    "N_s / N",
    "lower envelope",
    "upper envelope",
    "d~ / its bound",
    "by at least one head",
    "heads that choose a key",
)
DIFFERENCES = ("one direction", "largest of all directions", "spectral norm")


def octaves(length: int) -> list[tuple[int, int]]:
    """Octaves of the number of visible keys, (first, last), from `MIN_KEYS` to all tokens of a sequence."""
    edges = [MIN_KEYS * 2**power for power in range(40) if MIN_KEYS * 2**power < length] or [MIN_KEYS]
    return [(low, high - 1) for low, high in pairwise([*edges, length + 1])]


def many_key_counts(length: int) -> list[int]:
    """The numbers of keys N for which Theorem 1 is measured: from 1 in steps of a tenth of N, at least 1, to a quarter
    of `length` keys.
    """
    counts, largest = [1], length // 4
    while counts[-1] < largest:
        counts.append(min(largest, max(counts[-1] + 1, round(counts[-1] * 1.1))))
    return counts


def few_key_counts(length: int) -> list[int]:
    """The numbers of keys N for which Theorem 2 is measured, at most half of the `length` keys."""
    return [count for count in FEW_COUNTS if count <= length / 2]


def query_means(sums: np.ndarray) -> np.ndarray:
    """Divide the totals in `sums` by the numbers of queries in it (`totals_and_counts`): (octaves, quantities, points,
    ...).

    NaN where no query was counted.
    """
    total, counts = totals_and_counts(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, total / counts, np.nan)


def totals_and_counts(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split `sums`, (..., octaves, 2, quantities, points), into sums over queries and numbers of queries. Octaves are
    of visible keys.

    Both results are (octaves, quantities, points, ...).
    """
    arrays = np.moveaxis(sums, (-4, -3, -2, -1), (0, 1, 2, 3))
    return arrays[:, 0], arrays[:, 1]


@dataclass(frozen=True)
class Theorems:
    """Computes sums over a model's queries of the quantities in Theorems 1 and 2 and Lemma 2 (arXiv 2508.17821), with
    options `config`.
    """

    config: LimitsConfig

    def distances(self, rows: AttentionRows, length: int) -> Tensor | None:
        """Sums over queries of d~ (see the module) for the N keys of largest weight and N random keys (`DISTANCES`),
        and counts of queries: (H, octaves of visible keys, 2, distances, numbers N). None without queries."""

        def measure(octave_rows: AttentionRows, max_keys: int) -> Tensor:
            counts = [count for count in many_key_counts(length) if count <= max_keys / 4]

            def at_counts(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                draws = torch.rand(weights.shape, generator=generator).to(weights.device)
                return torch.stack(
                    (top_distances(weights, visible, x, counts), *random_keys(weights, visible, x, counts, draws))
                )

            values, missing_count = (
                self._measure_in_chunks(octave_rows, len(counts), at_counts),
                len(many_key_counts(length)) - len(counts),
            )
            return F.pad(values, (0, 0, 0, 0, 0, missing_count), value=math.nan)

        generator = _generator(rows)
        return self._sums_within(rows, octaves(length), measure)

    def separability(self, rows: AttentionRows, length: int) -> Tensor | None:
        """Sums over queries of quantities of N keys of largest weight (`SEPARABLE`), and counts of queries: (H, octaves
        of visible keys, 2, quantities, numbers N). The last two quantities are for whole layers; the result is None
        without queries.
        """

        def measure(octave_rows: AttentionRows, max_keys: int) -> Tensor:
            counts, heads = few_key_counts(length), len(octave_rows.weights)

            def at_counts(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                top = top_keys(weights, visible, x, counts)
                masks.append((top.separable_mask, top.top_mask))
                return torch.stack((top.separable, top.lower, top.upper, top.distance / top.bound))

            masks: list[tuple[Tensor, Tensor]] = []
            head_values = self._measure_in_chunks(octave_rows, len(counts), at_counts)
            shape = len(counts), heads, -1, masks[0][0].size(-1)
            near_count, top_count = (torch.cat(mask, 1).view(shape).any(1).sum(-1) for mask in zip(*masks, strict=True))
            numbers = torch.tensor(counts, device=top_count.device).unsqueeze(-1)
            layer_values = (
                torch.stack((near_count / top_count, numbers * heads / top_count))
                .unsqueeze(2)
                .expand(-1, -1, heads, -1)
            )
            return torch.cat((head_values, layer_values.masked_fill(head_values[:1].isnan(), math.nan)))

        return self._sums_within(rows, octaves(length), measure)

    def differences(self, rows: AttentionRows, length: int) -> Tensor | None:
        """Rates at which the last query's weights change with its logits (`DIFFERENCES`), by temperature and step of
        the finite difference.

        The rates are computed in fp64, spectral norms in fp32. The result is None if `rows` do not hold the last query,
        or its number of keys is outside the last octave of visible keys. Logits are scores times sqrt(D), D the head
        size, because arXiv 2508.17821 divides q.k by T. So T = sqrt(D) is the model as it is.
        """

        def measure(octave_rows: AttentionRows, max_keys: int) -> Tensor:
            is_left_out = octave_rows.is_first_token & (
                not self.config.first_token
            )  # its score stays, and its weight does not count

            def weights_at(scores: Tensor, temperature: Tensor | float) -> Tensor:
                scores = torch.where(is_left_out, logits.to(scores.dtype), scores)
                return octave_rows.normalizer.normalize(scores / temperature, octave_rows.layout).masked_fill(
                    is_left_out, 0.0
                )

            root_head_size = math.sqrt(octave_rows.normalizer.layer.head_size)
            logits = (
                octave_rows.scores.masked_fill(~(octave_rows.visible | is_left_out), 0.0).unsqueeze(0) * root_head_size
            )  # (1, H, T, S)
            random_directions = directions(
                octave_rows.visible, torch.Size((self.config.directions, *logits.shape[1:])), generator
            )
            temperatures = torch.tensor(self.config.temperatures).view(-1, 1, 1, 1).to(logits)
            stacked_logits = logits.expand(len(temperatures), -1, -1, -1)
            norms = spectral_norm(
                partial(weights_at, temperature=temperatures), stacked_logits, octave_rows.visible, generator
            )
            points = []
            for (temperature, norm), step in product(
                zip(self.config.temperatures, norms, strict=True), self.config.steps
            ):
                rates = finite_difference(partial(weights_at, temperature=temperature), logits, step, random_directions)
                points.append(torch.stack((rates[0], rates.amax(0), norm.double())))
            return torch.stack(points, 1)

        generator = _generator(rows)
        return self._sums_within(
            rows.select((rows.n_later_queries == 0).nonzero().squeeze(-1)), octaves(length)[-1:], measure
        )

    def vectors(self, rows: AttentionRows) -> Tensor:
        """The keys' vectors x that `config.vectors` names: (1, S, E), or (H, S, E) if each head has its own."""
        x = {"embedding": rows.embedding, "input": rows.inputs.x, "value": rows.inputs.v[0]}[
            self.config.vectors
        ].float()
        return F.normalize(x, dim=-1) if self.config.unit else x

    def _measure_in_chunks(
        self, rows: AttentionRows, points: int, measure: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The values (quantities, points, H, T) of all rows, computed by `measure` for R rows at a time.

        measure: weights (R, S), visible (R, S), x (S, E) -> values (quantities, points, R).
        """
        key_indices = rows.visible.any(0).nonzero().squeeze(-1)
        keys = slice(int(key_indices[0]), int(key_indices[-1]) + 1)
        x, weights = self.vectors(rows)[:, keys], rows.weights[..., keys]
        heads, queries, width = weights.shape
        size, values = max(1, MAX_PRODUCTS // (points * width)), []
        for vectors, head_weights in zip(
            x, weights.split(heads // len(x)), strict=True
        ):  # one x for all heads, or one for each head
            visible = rows.visible[:, keys].expand(head_weights.shape).flatten(0, 1)
            values += [
                measure(*pair, vectors)
                for pair in zip(head_weights.flatten(0, 1).split(size), visible.split(size), strict=True)
            ]
        return torch.cat(values, -1).unflatten(-1, (heads, queries))

    def _sums_within(
        self, rows: AttentionRows, bounds: Sequence[tuple[int, int]], measure: Callable[[AttentionRows, int], Tensor]
    ) -> Tensor | None:
        """Sums over queries, and numbers of queries, in each range of `bounds`: (H, ranges, 2, quantities, points);
        None without queries.

        bounds: ranges (first, last) of the number of visible keys.
        measure: rows of a range, the range's `last` -> values (quantities, points, H, T), NaN where not defined.
        """
        rows = rows if self.config.first_token else rows.without_first
        sums: dict[int, Tensor] = {}  # by index in `bounds`
        for index, (low, high) in enumerate(bounds):
            indices = ((rows.n >= low) & (rows.n <= high)).nonzero().squeeze(-1)
            if len(indices):
                octave_rows = rows.select(indices)
                values = measure(octave_rows, high).masked_fill(~octave_rows.is_defined, math.nan)
                sums[index] = torch.stack((values.nan_to_num(nan=0.0).sum(-1), (~values.isnan()).sum(-1).to(values)))
        if not sums:
            return None
        zeros = torch.zeros_like(next(iter(sums.values())))
        return torch.stack([sums.get(index, zeros) for index in range(len(bounds))]).movedim(-1, 0)


def _generator(rows: AttentionRows) -> torch.Generator:
    """A random generator that gives all models the same numbers for a sequence and layer."""
    return torch.Generator().manual_seed(1_000 * rows.seed + rows.layer)


def two_sample_tests(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """D and p, (columns,) each, of two-sided Kolmogorov-Smirnov tests of two samples, (size, columns) each, column by
    column.

    Values that are not finite are left out; NaN where a sample is empty. D is the largest difference of the two
    distribution functions.
    """
    from scipy.stats import ks_2samp

    first, second = (np.where(np.isfinite(values), values, np.nan) for values in (first, second))
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # scipy warns about empty samples
        result = ks_2samp(first, second, nan_policy="omit")
    return result.statistic, result.pvalue


def critical_count(p: np.ndarray, counts: Sequence[int], level: float) -> float:
    """The smallest of `counts` (numbers of keys) whose test has `p` of at least `level`, so shows no difference; NaN if
    there is none.
    """
    accepted_indices = np.flatnonzero(p >= level)
    return float(counts[accepted_indices[0]]) if len(accepted_indices) else math.nan


def head_mean_samples(sums: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Up to `size` means of single heads, (means, points), so that models with any number of heads are tested with
    equal power.

    The sequences are divided into size / heads groups, rounded up; if there are fewer sequences, each sequence is a
    group. Each head has a mean for each group. If there are more than `size` means, `size` evenly spread means are
    taken.

    sums: (N, heads, points), sums over queries in each of N sequences; counts: (N, heads, points), numbers of these
    queries.
    """
    sequences, heads, _ = sums.shape
    groups = min(sequences, -(-size // heads))
    with np.errstate(invalid="ignore"):
        group_means = [sums[start::groups].sum(0) / counts[start::groups].sum(0) for start in range(groups)]
    head_means = np.concatenate(group_means)
    return head_means[np.linspace(0, len(head_means) - 1, min(size, len(head_means))).round().astype(int)]


# ---------------------------------------------------------------- the family


SIGNIFICANCE_LEVELS = (0.01, 0.05)  # the paper's two significance levels, for the critical number of keys
TESTED_EXPECTATIONS = (1, 2, 4)  # indices in `DISTANCES` of the expectations that the largest weights are compared with
LENGTH_CURVE_KEYS = 5  # number N of keys in the curves over the number of visible keys
PLATEAU_KEYS = 16  # number N of keys from which on the paper has N_s / N between .70 and .85


def limit_statistics(config: LimitsConfig, query_stride: int) -> StatisticFamily:
    """The statistics of the lemmas and theorems of arXiv 2508.17821; Lemma 2 and the theorems
    take one query in `query_stride`, others all."""
    theorems, steps = Theorems(config), len(config.temperatures) * len(config.steps)
    derivations = _derived_distances, _derived_critical, _derived_separable, _derived_differences

    def chosen_queries(rows: AttentionRows) -> Tensor:
        return (
            (rows.n_later_queries % query_stride == 0).nonzero().squeeze(-1)
        )  # the last query of the sequence is always among them

    def at_chosen_queries(
        statistic: Callable[[AttentionRows], Tensor | None],
    ) -> Callable[[AttentionRows], Tensor | None]:
        """A function that gives the statistic at the chosen queries, and NaN at other queries."""

        def measure(rows: AttentionRows) -> Tensor | None:
            indices = chosen_queries(rows)
            value = statistic(rows.select(indices)) if len(indices) else None
            empty_values = torch.full_like(rows.n, math.nan)
            return None if value is None else empty_values.repeat(len(value), 1).index_copy(1, indices, value.float())

        return measure

    def sums(
        name: str, size: Callable[[int], tuple[int, ...]], function: Callable[[AttentionRows, int], Tensor | None]
    ) -> QuerySums:
        return QuerySums(name, "", size, lambda rows, length: function(rows.select(chosen_queries(rows)), length))

    return StatisticFamily(
        (
            Statistic(
                "n x largest weight", "", lambda rows: rows.magnitudes.amax(-1) * rows.n, has_exponent=True
            ),  # 1 for equal weights
            Statistic("Lemma 1: ln (n x largest weight)", "nats", lemmas.log_of_n_times_largest),
            Statistic("Lemma 1: ln (n x smallest weight)", "nats", lemmas.log_of_n_times_smallest),
            Statistic("Lemma 1: ln C2 = -ln C1", "nats", lemmas.log_c2),
            Statistic(
                "norm of the Jacobian", "", at_chosen_queries(lemmas.jacobian_norm), in_reports=True, has_exponent=True
            ),
            Statistic("bound on the norm of the Jacobian", "", at_chosen_queries(lemmas.jacobian_ceiling)),
        ),
        (
            sums(
                "distances",
                lambda length: (len(octaves(length)), 2, len(DISTANCES), len(many_key_counts(length))),
                theorems.distances,
            ),
            sums(
                "separability",
                lambda length: (len(octaves(length)), 2, len(SEPARABLE), len(few_key_counts(length))),
                theorems.separability,
            ),
            sums("differences", lambda length: (1, 2, len(DIFFERENCES), steps), theorems.differences),
        ),
        lambda values: [numbers for derive in derivations for numbers in derive(config, values)],
    )


def _counts_axis(counts: list[int]) -> Axis:
    return Axis("keys N", "", "for N =", tuple(map(float, counts)))


def _mean_over_heads(values: np.ndarray) -> np.ndarray:
    return mean(values, (-2, -1))


def _derived_distances(config: LimitsConfig, values: MeasuredValues) -> Iterator[DerivedNumbers]:
    """Yield d~, a distance that the module's docstring defines, of the N keys of largest weight and of N random keys.

    First by N, for queries that see the most keys (the last octave of visible keys); then by octave for N =
    `LENGTH_CURVE_KEYS`.
    """
    counts = many_key_counts(values.length)
    distances = _mean_over_heads(query_means(values.sums["distances"].sum(0)))  # (octaves, quantities, N)
    for number, label in enumerate(DISTANCES):
        yield DerivedNumbers("d~", "", distances[-1, number], _counts_axis(counts), in_reports=True, label=label)
    for number, label in enumerate(DISTANCES if LENGTH_CURVE_KEYS in counts else ()):
        by_length, axis = (
            distances[:, number, counts.index(LENGTH_CURVE_KEYS)],
            visible_keys_axis(octaves(values.length)),
        )
        yield DerivedNumbers(f"d~ of {LENGTH_CURVE_KEYS} keys", "", by_length, axis, in_reports=True, label=label)


def _derived_critical(config: LimitsConfig, values: MeasuredValues) -> Iterator[DerivedNumbers]:
    """Yield D of Kolmogorov-Smirnov tests by N in the last octave of visible keys, and by octave the critical N /
    number of visible keys.

    The tests compare d~ (see the module) of the N keys of largest weight and of N random keys. The critical N is the
    least N at which they show no difference.
    """
    counts, bounds = many_key_counts(values.length), octaves(values.length)
    key_counts = [values.n[(values.n >= low) & (values.n <= high)] for low, high in bounds]
    mean_keys = [
        float(n.mean()) if len(n) else math.nan for n in key_counts
    ]  # mean number of keys that the queries of an octave see
    for expectation in TESTED_EXPECTATIONS:
        pairs = [_distance_samples(config, values, octave, expectation) for octave in range(len(bounds))]
        statistics, p_values = zip(*(two_sample_tests(*pair) for pair in pairs), strict=True)
        label = f"to {DISTANCES[expectation]}, {len(pairs[-1][0])} values"  # D of two small samples is large by chance
        yield DerivedNumbers(
            "D of the largest weights", "", statistics[-1], _counts_axis(counts), in_reports=True, label=label
        )
        for level in SIGNIFICANCE_LEVELS:
            fractions = np.array(
                [critical_count(p, counts, level) / n for p, n in zip(p_values, mean_keys, strict=True)]
            )
            label = f"{DISTANCES[expectation]}, level {level:g}"
            yield DerivedNumbers(
                "critical N / visible keys",
                "fraction",
                fractions,
                visible_keys_axis(bounds),
                in_reports=True,
                label=label,
            )


def _distance_samples(config: LimitsConfig, values: MeasuredValues, octave: int, expectation: int) -> list[np.ndarray]:
    """Two samples of heads' mean d~ (see the module) in one octave of visible keys, (size, numbers N) each: for the
    largest weights, then for `DISTANCES[expectation]`."""
    total, counts = totals_and_counts(values.sums["distances"])  # (octaves, quantities, N, sequences, layers, H)
    sample_pair = []
    for quantity in (0, expectation):
        by_head, count = (
            np.moveaxis(part[octave, quantity], 0, -1) for part in (total, counts)
        )  # (sequences, layers, H, N)
        shape = (len(by_head), -1, by_head.shape[-1])
        sample_pair.append(head_mean_samples(by_head.reshape(shape), count.reshape(shape), config.sample_size))
    return sample_pair


def _derived_separable(config: LimitsConfig, values: MeasuredValues) -> Iterator[DerivedNumbers]:
    """Yield the quantities `SEPARABLE` by N, means over heads in the last octave of visible keys, N_s / N
    (`TopKeys.separable`) at N = `PLATEAU_KEYS`, and the fraction of keys that at least one of H independent heads would
    separate.
    """
    counts = few_key_counts(values.length)
    axis = _counts_axis(counts)
    separability = query_means(values.sums["separability"].sum(0))[-1]  # (quantities, N, layers, H)
    for number in (0, 1, 2):
        yield DerivedNumbers(
            "N_s / N",
            "fraction",
            _mean_over_heads(separability[number]),
            axis,
            in_reports=True,
            label=SEPARABLE[number],
        )
    yield DerivedNumbers("d~ of the largest weights / its bound", "fraction", _mean_over_heads(separability[3]), axis)
    one_head = mean(separability[0], -1)  # p, by layer
    any_head = 1 - (1 - one_head) ** separability.shape[-1]
    title = "keys that at least one head separates"
    yield DerivedNumbers(title, "fraction", _mean_over_heads(separability[4]), axis, label="measured")
    yield DerivedNumbers(title, "fraction", _mean_over_heads(any_head[..., None]), axis, label="1 - (1 - p)^H")
    yield DerivedNumbers("heads that choose a key", "heads", _mean_over_heads(separability[5]), axis)
    if PLATEAU_KEYS in counts:
        yield DerivedNumbers(
            f"N_s / N of {PLATEAU_KEYS} keys",
            "fraction",
            _mean_over_heads(separability[0])[[counts.index(PLATEAU_KEYS)]],
        )


def _derived_differences(config: LimitsConfig, values: MeasuredValues) -> Iterator[DerivedNumbers]:
    """Yield rates of change of weights (`DIFFERENCES`) by temperature, each for the head of the largest mean, as in
    arXiv 2508.17821.
    """
    shape = len(config.temperatures), len(config.steps)
    by_head = query_means(values.sums["differences"].sum(0))[0]
    largest = np.nan_to_num(by_head, nan=-np.inf).max((-2, -1)).reshape(len(DIFFERENCES), *shape)
    largest[np.isneginf(largest)] = np.nan
    axis = Axis("temperature T", "", "at T =", tuple(config.temperatures))
    for (index, step), number in product(enumerate(config.steps), (0, 1)):
        label = f"{DIFFERENCES[number]}, step {step:g}"
        yield DerivedNumbers("change of weights", "", largest[number, :, index], axis, in_reports=True, label=label)
    yield DerivedNumbers("change of weights", "", largest[2, :, 0], axis, in_reports=True, label=DIFFERENCES[2])
