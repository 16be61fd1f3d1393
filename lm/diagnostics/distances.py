"""How far a query's weighted keys lie from the sum of some of them: Theorems 1 and 2 of Mudarisov et al. 2025 (arXiv 2508.17821).

A query gives keys i the weights a_i; x_i is a vector of each key. For a set I of N keys, s = sum over I of a_i x_i, and

    d~ = sum over i not in I of |a_i x_i - s|    (their Eqs. 6 and 7).

Theorem 1 compares the N keys of the largest weights with N keys drawn at random. Theorem 2 asks how many of the N lie no farther from s
than the nearest other key. The bounds are reconstructed from the
paper's words, as its typeset equations could not be read; Theorem 1's is proved, and holds for weights of any sum.

All distances follow from products x_i . x_j, made for `KEYS` keys at a time, so that memory is linear in the keys. Shapes: R rows
(queries of any heads), S keys, E vector, G numbers of keys N, ascending. fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEYS = 2048  # whose products with all others are held at a time


@dataclass(frozen=True)
class TopKeys:
    """Of the N keys with the largest |weights|, for each N; NaN where a query sees too few keys, all (G, R).

    Attributes:
        distance: d~; 0 where the N are all keys.
        bound: Theorem 1's upper bound on it, NaN of rows with a negative weight.
        separable: Theorem 2's N_s / N: the fraction of the N that lie within r of s, r the distance of the nearest other key.
        lower, upper: its envelopes, between 0 and 1. They are no bounds: they suppose that keys lie uniformly on a sphere and
            independently of the weights, and r is taken from the data.
        within: (G, R, S) bool: those keys.
        chosen: (G, R, S) bool: the N keys.
    """

    distance: Tensor
    bound: Tensor
    separable: Tensor
    lower: Tensor
    upper: Tensor
    within: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class RandomKeys:
    """E, the expectation of d~ over N random keys, for each N; NaN where a query sees fewer keys, all (G, R).

    Attributes:
        uncorrected: (n - N) / n sum |(a_i + N / (n - 1)) x_i - x-|, with x- = sum a_j x_j, as Theorem 1 was quoted
            to us: 2 to 12 times too large.
        corrected: (n - N) / n sum |(1 + c) a_i x_i - c x-|, c = N / (n - 1): each norm of a mean, so at most E.
        upper: each norm replaced by the root of its mean square, so at least E.
        sampled: d~ of one random set a row, the same for all N but for its size: unbiased (Monte Carlo).
    """

    uncorrected: Tensor
    corrected: Tensor
    upper: Tensor
    sampled: Tensor


def top_keys(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> TopKeys:
    """Theorems 1 and 2 for the keys of the largest weights.

    weights: (R, S), 0 where not visible; visible: (R, S) bool; x: (S, E).
    """
    order = _largest_first(weights, visible, counts)
    n, square, length = visible.sum(-1), x.square().sum(-1), x.norm(dim=-1)
    products, sums = _products(weights, x, order, counts)
    farthest, nearest = _extremes(x, order, counts)
    total, positive = weights.sum(-1), (weights >= 0).all(-1)
    chosen = torch.zeros_like(visible)
    rows = []
    for index, count in enumerate(counts):
        chosen = chosen.scatter(1, order[:, :count], True) & visible
        others = visible & ~chosen
        excess = _excess(weights, square, products[index])
        distance = (excess + sums[index].unsqueeze(-1)).clamp(min=0).sqrt()
        within = chosen & (excess <= excess.masked_fill(~others, torch.inf).amin(-1, keepdim=True))
        r = distance.masked_fill(~others, torch.inf).amin(-1)
        best = order[:, :count]
        alpha, longest = weights.gather(1, best), length[best].amax(-1)
        span = farthest[index].masked_fill(~others, 0.0).amax(-1).sqrt()
        mass = alpha.sum(-1)
        bound = (total - mass) * span + ((n - count + 1) * mass - total) * longest
        lower, upper = _envelopes(alpha, longest, nearest[index], r)
        values = (distance * others).sum(-1), bound.where(positive, torch.nan), within.sum(-1) / count, lower, upper
        too_many = torch.stack((n < count, n < count, n <= count, n <= count, n <= count))
        rows.append((torch.stack(values).masked_fill(too_many, torch.nan), within, chosen))
    values, within, chosen = (torch.stack(found, dim) for found, dim in zip(zip(*rows, strict=True), (1, 0, 0), strict=True))
    return TopKeys(*values, within, chosen)


def top_distances(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """`TopKeys.distance` alone, for many N."""
    order = _largest_first(weights, visible, counts)
    n, square = visible.sum(-1), x.square().sum(-1)
    products, sums = _products(weights, x, order, counts)
    others, rows = visible.clone(), []
    for index, count in enumerate(counts):
        others = others.scatter(1, order[:, :count], False)
        total = (_distances(weights, square, products[index], sums[index]) * others).sum(-1)
        rows.append(total.masked_fill(n < count, torch.nan))
    return torch.stack(rows)


def random_keys(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int], draws: Tensor) -> RandomKeys:
    """Theorem 1's expectation over random keys.

    weights, visible, x: as in `top_keys`; draws: (R, S) random numbers, by whose order keys are drawn without replacement.
    """
    order = draws.masked_fill(~visible, -torch.inf).topk(min(counts[-1], weights.size(1)), -1).indices
    n, square = visible.sum(-1, keepdim=True).to(weights.dtype), x.square().sum(-1)
    product = torch.cat([weights @ (x @ x[keys].T) for keys in _columns(x)], -1)  # x_i . x-
    mean_square = (weights * product).sum(-1, keepdim=True)  # |x-|^2
    own, cross = weights.square() * square, weights * product  # |y_i|^2 and y_i . x-, of y_i = a_i x_i
    rest = own.sum(-1, keepdim=True) - own - (mean_square - 2 * cross + own).clamp(min=0) / (n - 1)  # spread of the others' y
    products, sums = _products(weights, x, order, counts)
    chosen = torch.zeros_like(visible)
    rows = []
    for index, count in enumerate(counts):
        c = count / (n - 1)
        uncorrected = (weights + c).square() * square - 2 * (weights + c) * product + mean_square
        corrected = (1 + c).square() * own - 2 * c * (1 + c) * cross + c.square() * mean_square
        spread = c * (n - 1 - count) / (n - 2) * rest
        left_out = ((n - count) / n).squeeze(-1)
        chosen = chosen.scatter(1, order[:, :count], True)
        expected = [left_out * (square_.clamp(min=0).sqrt() * visible).sum(-1) for square_ in (uncorrected, corrected, corrected + spread)]
        sampled = (_distances(weights, square, products[index], sums[index]) * (visible & ~chosen)).sum(-1)
        rows.append(torch.stack((*expected, sampled)).masked_fill(n.squeeze(-1) < count, torch.nan))
    return RandomKeys(*torch.stack(rows, 1))


def counts_up_to(most: int) -> list[int]:
    """Numbers of keys from 1 to `most`: all up to 10, then a tenth farther each."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * 1.1))))
    return found


def _largest_first(weights: Tensor, visible: Tensor, counts: Sequence[int]) -> Tensor:
    """The keys of the largest |weights| of each row, (R, N) int64, those that are not visible after the others."""
    return weights.abs().masked_fill(~visible, -1.0).topk(min(counts[-1], weights.size(1)), -1).indices


def _columns(x: Tensor) -> Iterator[slice]:
    """The keys, `KEYS` at a time."""
    return (slice(start, start + KEYS) for start in range(0, len(x), KEYS))


def _products(weights: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """x_i . s of all keys, (G, R, S), and |s|^2, (G, R), of the sums s over the first N keys in the order of each row, (R, N)."""
    alpha = weights.gather(1, order)
    products = weights.new_empty(len(counts), *weights.shape)
    for keys in _columns(x):
        of_pairs = x @ x[keys].T
        product = weights.new_zeros(len(weights), of_pairs.size(1))
        done = 0
        for index, count in enumerate(counts):
            for place in range(done, min(count, order.size(1))):
                product.addcmul_(of_pairs.index_select(0, order[:, place]), alpha[:, place : place + 1])
            done = count
            products[index, :, keys] = product
    sums = [(products[index].gather(1, order[:, :count]) * alpha[:, :count]).sum(-1) for index, count in enumerate(counts)]
    return products, torch.stack(sums).clamp(min=0)


def _extremes(x: Tensor, order: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Squared distances, of the first N keys in the order of each row: every key's largest to one of them, (G, R, S), and their smallest to
    each other, (G, R); infinite of a single key."""
    square = x.square().sum(-1)
    farthest = x.new_empty(len(counts), len(order), len(x))
    nearest = x.new_full((len(counts), len(order)), torch.inf)
    for keys in _columns(x):
        of_pairs = (square[:, None] + square[keys] - 2 * x @ x[keys].T).clamp(min=0)
        far, near = x.new_zeros(len(order), of_pairs.size(1)), x.new_full((len(order), of_pairs.size(1)), torch.inf)
        place_here = order - keys.start
        here = (place_here >= 0) & (place_here < of_pairs.size(1))
        place_here = place_here.clamp(0, of_pairs.size(1) - 1)
        least = nearest[0].clone().fill_(torch.inf)
        done = 0
        for index, count in enumerate(counts):
            for place in range(done, min(count, order.size(1))):
                to_earlier = near.gather(1, place_here[:, place : place + 1]).squeeze(1)
                least = torch.minimum(least, to_earlier.where(here[:, place], torch.inf))
                pair = of_pairs.index_select(0, order[:, place])
                torch.maximum(far, pair, out=far)
                torch.minimum(near, pair, out=near)
            done = count
            farthest[index, :, keys] = far
            nearest[index] = torch.minimum(nearest[index], least)
    return farthest, nearest


def _distances(weights: Tensor, square: Tensor, product: Tensor, sums: Tensor) -> Tensor:
    """|a_i x_i - s|, (R, S), from |x_i|^2 (S,), x_i . s (R, S) and |s|^2 (R,)."""
    return (_excess(weights, square, product) + sums.unsqueeze(-1)).clamp(min=0).sqrt()


def _excess(weights: Tensor, square: Tensor, product: Tensor) -> Tensor:
    """|a_i x_i - s|^2 - |s|^2, (R, S): tells apart small weights, whose distances are all |s| but for rounding."""
    return weights.square() * square - 2 * weights * product


def _envelopes(alpha: Tensor, longest: Tensor, nearest: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Theorem 2's envelopes of N_s / N, (R,) each, from the N weights (R, N), the largest |x| among them, their smallest squared distance
    and r: 1 - mean(xi_i) / r, and mean exp(-(xi_i - r)_+^2 / (2 M^2))."""
    own = alpha.square()
    squares = own.sum(-1, keepdim=True) - own  # sum of the other weights' squares
    pairs = ((alpha.sum(-1, keepdim=True) - alpha).square() - squares).clamp(min=0)
    m = longest.square().unsqueeze(-1)
    xi = (m * squares + (m - nearest.nan_to_num(posinf=0.0).unsqueeze(-1) / 2).clamp(min=0) * pairs).sqrt()
    lower = 1 - (xi / r.unsqueeze(-1).clamp(min=1e-30)).mean(-1)
    return lower.clamp(min=0), torch.exp(-(xi - r.unsqueeze(-1)).clamp(min=0).square() / (2 * m)).mean(-1)
