"""The limits of normalization (Mudarisov et al. 2025, arXiv 2508.17821) of a model's attention: the family `limits` of statistics.

Lemmas 1 and 2 by row: `lm.diagnostics.lemmas`. Here are Theorems 1 and 2, the critical number of keys (Algorithm 3, by two-sample
Kolmogorov-Smirnov tests) and the temperatures of Lemma 2. What the paper leaves open (which vectors, divided by their length or not, with
or without the first token) is an option, `eval.diagnostics.limits`.

Both theorems say how far a query's weighted keys lie from the sum of some of them. A query gives keys i the weights a_i; x_i is a vector of
each key. For a set I of N keys, s = sum over I of a_i x_i, and

    d~ = sum over i not in I of |a_i x_i - s|    (their Eqs. 6 and 7).

Theorem 1 compares the N keys of the largest weights with N keys drawn at random. Theorem 2 asks how many of the N lie no farther from s
than the nearest other key. The bounds are reconstructed from the paper's words, as its typeset equations could not be read; Theorem 1's is
proved, and holds for weights of any sum.

All distances follow from products x_i . x_j, made for `KEYS` keys at a time, so that memory is linear in the keys. Sums over a model's rows
are (H, octaves, 2, quantities, points): for each octave of visible keys the sums over its rows, and how many rows there are.
Shapes: H heads, T queries, S keys, E vector, R rows of any heads, G numbers of keys N, ascending. fp32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.eval_config import LimitsConfig
from lm.diagnostics import lemmas
from lm.diagnostics.attention_rows import LEAST_KEYS, Accumulated, AttentionRows, Derived, Family, Statistic, Values, mean, visible_keys
from lm.diagnostics.lemmas import directions, finite_difference, spectral_norm
from lm.runs.evaluations import Axis

KEYS = 2048  # whose products with all others are held at a time


@dataclass(frozen=True)
class TopKeys:
    """The N keys with the largest |weights|, for each N; NaN where a query sees too few keys, all (G, R).

    The envelopes are no bounds: they suppose that keys lie uniformly on a sphere, independently of weights, and r is that of the data.
    """

    distance: Tensor  # d~; 0 where the N are all keys
    bound: Tensor  # Theorem 1's upper bound on it, NaN of rows with a negative weight
    separable: Tensor  # Theorem 2's N_s / N: the fraction of the N that lie within r of s, r the distance of the nearest other key
    lower: Tensor  # envelope of `separable`, between 0 and 1
    upper: Tensor  # likewise
    within: Tensor  # (G, R, S) bool: those of the N that lie within r of s
    chosen: Tensor  # (G, R, S) bool: the N keys


@dataclass(frozen=True)
class RandomKeys:
    """E, the expectation of d~ over N random keys, for each N; NaN where a query sees fewer keys, all (G, R). x- = sum a_j x_j."""

    uncorrected: Tensor  # (n - N) / n sum |(a_i + N / (n - 1)) x_i - x-|, Theorem 1 as quoted: 2 to 12 times too large
    corrected: Tensor  # (n - N) / n sum |(1 + c) a_i x_i - c x-|, c = N / (n - 1): each norm of a mean, so at most E
    upper: Tensor  # each norm replaced by the root of its mean square, so at least E
    sampled: Tensor  # d~ of one random set a row, the same for all N but for its size: unbiased (Monte Carlo)


def top_keys(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> TopKeys:
    """Theorems 1 and 2 for the keys of the largest weights.

    weights: (R, S), 0 where not visible; visible: (R, S) bool; x: (S, E).
    """
    order = _largest_first(weights, visible, counts)
    n, length = visible.sum(-1), x.norm(dim=-1)
    farthest, nearest = _extremes(x, order, counts)
    total, positive = weights.sum(-1), (weights >= 0).all(-1)
    rows = []
    for index, (count, (others, excess, distance)) in enumerate(zip(counts, _to_sums(weights, visible, x, order, counts), strict=True)):
        chosen = visible & ~others
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
    values, within, chosen = map(torch.stack, zip(*rows, strict=True))
    return TopKeys(*values.unbind(1), within, chosen)


def top_distances(weights: Tensor, visible: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """`TopKeys.distance` alone, for many N."""
    return _distances(weights, visible, x, _largest_first(weights, visible, counts), counts)


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
    rows = []
    for count in counts:
        c = count / (n - 1)
        uncorrected = (weights + c).square() * square - 2 * (weights + c) * product + mean_square
        corrected = (1 + c).square() * own - 2 * c * (1 + c) * cross + c.square() * mean_square
        spread = c * (n - 1 - count) / (n - 2) * rest
        left_out = ((n - count) / n).squeeze(-1)
        expected = [left_out * (square_.clamp(min=0).sqrt() * visible).sum(-1) for square_ in (uncorrected, corrected, corrected + spread)]
        rows.append(torch.stack(expected).masked_fill(n.squeeze(-1) < count, torch.nan))
    return RandomKeys(*torch.stack(rows, 1), _distances(weights, visible, x, order, counts))


def counts_up_to(most: int) -> list[int]:
    """Numbers of keys at which curves are measured: 1 to 10, then each a tenth larger than the last, up to `most`."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(most, max(counts[-1] + 1, round(counts[-1] * 1.1))))
    return counts


def _largest_first(weights: Tensor, visible: Tensor, counts: Sequence[int]) -> Tensor:
    """Indices of the keys of each row from the largest |weight| on, (R, N) int64; invisible keys come last."""
    return weights.abs().masked_fill(~visible, -1.0).topk(min(counts[-1], weights.size(1)), -1).indices


def _columns(x: Tensor) -> Iterator[slice]:
    """The keys, `KEYS` at a time."""
    return (slice(start, start + KEYS) for start in range(0, len(x), KEYS))


def _products(weights: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """x_i . s of all keys, (G, R, S), and |s|^2, (G, R), of the sums s over the first N keys in the order of each row, (R, N)."""
    alpha = weights.gather(1, order)
    products = weights.new_empty(len(counts), *weights.shape)
    for keys in _columns(x):
        pairs = x @ x[keys].T
        product = weights.new_zeros(len(weights), pairs.size(1))
        done = 0
        for index, count in enumerate(counts):
            for place in range(done, min(count, order.size(1))):
                product.addcmul_(pairs.index_select(0, order[:, place]), alpha[:, place : place + 1])
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
        pairs = (square[:, None] + square[keys] - 2 * x @ x[keys].T).clamp(min=0)
        far, near = x.new_zeros(len(order), pairs.size(1)), x.new_full((len(order), pairs.size(1)), torch.inf)
        place_here = order - keys.start
        here = (place_here >= 0) & (place_here < pairs.size(1))
        place_here = place_here.clamp(0, pairs.size(1) - 1)
        least = nearest[0].clone().fill_(torch.inf)
        done = 0
        for index, count in enumerate(counts):
            for place in range(done, min(count, order.size(1))):
                to_earlier = near.gather(1, place_here[:, place : place + 1]).squeeze(1)
                least = torch.minimum(least, to_earlier.where(here[:, place], torch.inf))
                pair = pairs.index_select(0, order[:, place])
                torch.maximum(far, pair, out=far)
                torch.minimum(near, pair, out=near)
            done = count
            farthest[index, :, keys] = far
            nearest[index] = torch.minimum(nearest[index], least)
    return farthest, nearest


def _distances(weights: Tensor, visible: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]) -> Tensor:
    """d~ of the sums s over the first N keys in the order of each row: the sum of |a_i x_i - s| over the others, (G, R)."""
    n, spread = visible.sum(-1), _to_sums(weights, visible, x, order, counts)
    return torch.stack(
        [(distance * others).sum(-1).masked_fill(n < count, torch.nan) for count, (others, _, distance) in zip(counts, spread, strict=True)]
    )


def _to_sums(weights: Tensor, visible: Tensor, x: Tensor, order: Tensor, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The keys other than the first N in the order of each row, |a_i x_i - s|^2 - |s|^2 and |a_i x_i - s|, (R, S) each, for each N.

    The second tells apart small weights, whose distances are all |s| but for rounding.
    """
    others, square = visible, x.square().sum(-1)
    for count, inner, length in zip(counts, *_products(weights, x, order, counts), strict=True):
        others = others.scatter(1, order[:, :count], False)
        excess = weights.square() * square - 2 * weights * inner
        yield others, excess, (excess + length.unsqueeze(-1)).clamp(min=0).sqrt()


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


# ---------------------------------------------------------------- the theorems


PRODUCTS = 2**22  # products of keys with sums that are held at a time
FEW = (1, 2, 4, 8, 16, 32, 64)  # N of Theorem 2
DISTANCES = ("largest weights", "random keys, uncorrected", "random keys, corrected", "random keys, upper bound", "random keys, drawn")
SEPARABLE = ("N_s / N", "lower envelope", "upper envelope", "d~ / its bound", "by at least one head", "heads that choose a key")
DIFFERENCES = ("one direction", "largest of all directions", "spectral norm")


def octaves(length: int) -> list[tuple[int, int]]:
    """Octaves of the number of visible keys, (first, last), from `LEAST_KEYS` to all tokens of a sequence."""
    edges = [LEAST_KEYS * 2**power for power in range(40) if LEAST_KEYS * 2**power < length] or [LEAST_KEYS]
    return [(low, high - 1) for low, high in pairwise([*edges, length + 1])]


def many(length: int) -> list[int]:
    """N of Theorem 1: up to a quarter of the keys."""
    return counts_up_to(max(1, length // 4))


def few(length: int) -> list[int]:
    """N of Theorem 2: at most half of the keys."""
    return [count for count in FEW if count <= length / 2]


def means(sums: np.ndarray) -> np.ndarray:
    """Sums and numbers of rows as means over rows (octaves, quantities, points, ...); NaN where there are none."""
    total, rows = parts(sums)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rows > 0, total / rows, np.nan)


def parts(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and numbers of rows, each (octaves, quantities, points, ...), from (..., octaves, 2, quantities, points)."""
    both = np.moveaxis(sums, (-4, -3, -2, -1), (0, 1, 2, 3))
    return both[:, 0], both[:, 1]


@dataclass(frozen=True)
class Theorems:
    """The sums of a model, as its configuration asks for them."""

    asked: LimitsConfig

    def distances(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`DISTANCES`, d~ and its expectations, at the numbers of keys `many`."""

        def measure(part: AttentionRows, most: int) -> Tensor:
            counts = [count for count in many(length) if count <= most / 4]

            def at_counts(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                draws = torch.rand(weights.shape, generator=generator).to(weights.device)
                random = random_keys(weights, visible, x, counts, draws)
                return torch.stack((top_distances(weights, visible, x, counts), *vars(random).values()))

            return F.pad(self._by_rows(part, len(counts), at_counts), (0, 0, 0, 0, 0, len(many(length)) - len(counts)), value=math.nan)

        generator = _generator(rows)
        return self._summed(rows, octaves(length), measure)

    def separable(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`SEPARABLE` at the numbers of keys `few`, the last two of them of all heads of a layer together."""

        def measure(part: AttentionRows, most: int) -> Tensor:
            counts, heads = few(length), len(part.weights)

            def at_counts(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                top = top_keys(weights, visible, x, counts)
                masks.append((top.within, top.chosen))
                return torch.stack((top.separable, top.lower, top.upper, top.distance / top.bound))

            masks: list[tuple[Tensor, Tensor]] = []
            own = self._by_rows(part, len(counts), at_counts)
            shape = len(counts), heads, -1, masks[0][0].size(-1)
            within, chosen = (torch.cat(mask, 1).view(shape).any(1).sum(-1) for mask in zip(*masks, strict=True))
            numbers = torch.tensor(counts, device=chosen.device).unsqueeze(-1)
            layer = torch.stack((within / chosen, numbers * heads / chosen)).unsqueeze(2).expand(-1, -1, heads, -1)
            return torch.cat((own, layer.masked_fill(own[:1].isnan(), math.nan)))

        return self._summed(rows, octaves(length), measure)

    def differences(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`DIFFERENCES` at each temperature and step, of the query that sees most keys; fp64 but for the norm.

        Logits are scores times sqrt(D), D the head size, so that T = sqrt(D) is the model as it is: in arXiv 2508.17821 they are q.k / T.
        """

        def measure(part: AttentionRows, most: int) -> Tensor:
            part = part.select(torch.tensor([len(part.n) - 1], device=part.n.device))

            def normalized(scores: Tensor, temperature: Tensor | float) -> Tensor:
                return part.normalizer.normalize(scores / temperature, part.layout)

            logits = part.scores.masked_fill(~part.visible, 0.0).unsqueeze(0) * math.sqrt(part.normalizer.layer.head_size)  # (1, H, T, S)
            along = directions(part.visible, torch.Size((self.asked.directions, *logits.shape[1:])), generator)
            temperatures = torch.tensor(self.asked.temperatures).view(-1, 1, 1, 1).to(logits)
            stacked = logits.expand(len(temperatures), -1, -1, -1)
            norms = spectral_norm(partial(normalized, temperature=temperatures), stacked, part.visible, generator)
            points = []
            for (temperature, norm), step in product(zip(self.asked.temperatures, norms, strict=True), self.asked.steps):
                rates = finite_difference(partial(normalized, temperature=temperature), logits, step, along)
                points.append(torch.stack((rates[0], rates.amax(0), norm.double())))
            return torch.stack(points, 1)

        generator = _generator(rows)
        return self._summed(rows, octaves(length)[-1:], measure)

    def vectors(self, rows: AttentionRows) -> Tensor:
        """x of each key, (1, S, E), or of each head and key, (H, S, E)."""
        x = {"embedding": rows.embedding, "input": rows.inputs.x, "value": rows.inputs.v[0]}[self.asked.vectors].float()
        return F.normalize(x, dim=-1) if self.asked.unit else x

    def _by_rows(self, rows: AttentionRows, points: int, measure: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Values (quantities, G, H, T) of all rows, by `measure` of weights (R, S), visible (R, S) and x (S, E): (quantities, G, R)."""
        seen = rows.visible.any(0).nonzero().squeeze(-1)
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
        x, weights = self.vectors(rows)[:, keys], rows.weights[..., keys]
        heads, queries, width = weights.shape
        size, parts = max(1, PRODUCTS // (points * width)), []
        for index, vectors in enumerate(x):  # one of all heads, or one a head
            own = weights if len(x) == 1 else weights[index : index + 1]
            visible = rows.visible[:, keys].expand(own.shape).flatten(0, 1)
            parts += [measure(*both, vectors) for both in zip(own.flatten(0, 1).split(size), visible.split(size), strict=True)]
        return torch.cat(parts, -1).unflatten(-1, (heads, queries))

    def _summed(
        self, rows: AttentionRows, bounds: Sequence[tuple[int, int]], measure: Callable[[AttentionRows, int], Tensor]
    ) -> Tensor | None:
        """Sums and numbers of rows, (H, octaves, 2, quantities, G), of what `measure` gives of the rows within each of the `bounds`:
        (quantities, G, H, T)."""
        rows = rows if self.asked.first_token else rows.without_first
        sums: list[Tensor | None] = []
        for low, high in bounds:
            inside = ((rows.n >= low) & (rows.n <= high)).nonzero().squeeze(-1)
            sums.append(None)
            if len(inside):
                part = rows.select(inside)
                values = measure(part, high).masked_fill(~part.is_defined, math.nan)
                sums[-1] = torch.stack((values.nan_to_num(nan=0.0).sum(-1), (~values.isnan()).sum(-1).to(values)))
        template = next((total for total in sums if total is not None), None)
        if template is None:
            return None
        return torch.stack([torch.zeros_like(template) if total is None else total for total in sums]).movedim(-1, 0)


def _generator(rows: AttentionRows) -> torch.Generator:
    """A random generator from which all models draw the same numbers of a sequence and layer."""
    return torch.Generator().manual_seed(1_000 * rows.seed + rows.layer)


@dataclass(frozen=True)
class TwoSamples:
    """Two samples, such as heads' mean distances of the largest weights and of random keys, compared for each number of keys N."""

    counts: Sequence[int]  # the numbers N
    statistic: np.ndarray  # (G,) largest difference of the two distribution functions, D; NaN where a sample is empty
    p: np.ndarray  # (G,) p values of the two-sided test
    size: int  # values in each sample; D of two small samples is large by chance

    def critical(self, level: float) -> float:
        """The smallest N at which the test at `level` does not reject that the samples are of one distribution; NaN if it does at all N."""
        accepted = np.flatnonzero(self.p >= level)
        return float(self.counts[accepted[0]]) if len(accepted) else float("nan")


def two_sample_tests(first: np.ndarray, second: np.ndarray, counts: Sequence[int]) -> TwoSamples:
    """Two samples of equal size for each N, (size, G); values that are not finite are left out."""
    from scipy.stats import ks_2samp

    results = []
    for pair in zip(first.T, second.T, strict=True):
        finite = [values[np.isfinite(values)] for values in pair]
        results.append(ks_2samp(*finite) if all(map(len, finite)) else (np.nan, np.nan))
    statistic, p = np.array(results, dtype=float).T
    return TwoSamples(counts, statistic, p, len(first))


def samples(sums: np.ndarray, rows: np.ndarray, size: int) -> np.ndarray:
    """Means by head as a sample of about `size` values, so that models with other numbers of heads are tested with equal power: (size', G).

    With fewer heads each one's sequences are dealt into several groups, of which each gives a mean: as many as `size` needs, at most one a
    sequence. With more heads, an evenly spread part of them is taken.

    sums: (N, heads, G), of N sequences; rows: (N, heads, G), how many rows are in each.
    """
    sequences, heads, _ = sums.shape
    groups = min(sequences, -(-size // heads))
    with np.errstate(invalid="ignore"):
        means = [sums[start::groups].sum(0) / rows[start::groups].sum(0) for start in range(groups)]
    pooled = np.concatenate(means)
    return pooled[np.linspace(0, len(pooled) - 1, min(size, len(pooled))).round().astype(int)]


# ---------------------------------------------------------------- the family


LEVELS = (0.01, 0.05)  # both levels that the paper names, in tests for the critical number of keys
TESTED = (1, 2, 4)  # places in `DISTANCES` of the expectations that the largest weights are compared with
OVER_LENGTH = 5  # keys chosen, in the curves by the number of visible keys
PLATEAU = 16  # keys chosen, from which on the paper has N_s / N between .70 and .85


def family(asked: LimitsConfig, every: int) -> Family:
    """Statistics of the lemmas and the theorems. `every`: of how many described queries one is taken, but for Lemma 1."""
    theorems, steps = Theorems(asked), len(asked.temperatures) * len(asked.steps)

    def chosen(rows: AttentionRows) -> Tensor:
        return torch.arange(len(rows.n) - 1, -1, -every, device=rows.n.device).flip(0)  # the last query is always among them

    def sparse(of: Callable[[AttentionRows], Tensor | None]) -> Callable[[AttentionRows], Tensor | None]:
        """The values of the chosen queries, NaN of the others."""

        def spread(rows: AttentionRows) -> Tensor | None:
            value = of(rows.select(chosen(rows)))
            empty = torch.full_like(rows.n, math.nan)
            return None if value is None else empty.repeat(len(value), 1).index_copy(1, chosen(rows), value.float())

        return spread

    def norm(rows: AttentionRows) -> Tensor:
        return lemmas.jacobian_norm(rows, torch.Generator().manual_seed(0))

    def sums(name: str, size: Callable[[int], tuple[int, ...]], of: Callable[[AttentionRows, int], Tensor | None]) -> Accumulated:
        return Accumulated(name, "", size, lambda rows, length: of(rows.select(chosen(rows)), length))

    return Family(
        (
            Statistic("n x largest weight", "", lambda rows: rows.size.amax(-1) * rows.n, fitted=True),  # 1 of equal weights
            Statistic("Lemma 1: ln (n x largest weight)", "nats", lemmas.log_n_times_largest),
            Statistic("Lemma 1: ln (n x smallest weight)", "nats", lemmas.log_n_times_smallest),
            Statistic("Lemma 1: ln C2 = -ln C1", "nats", lemmas.log_c2),
            Statistic("norm of the Jacobian", "", sparse(norm), shown=True, fitted=True),
            Statistic("bound on the norm of the Jacobian", "", sparse(lemmas.jacobian_ceiling)),
        ),
        (
            sums("distances", lambda length: (len(octaves(length)), 2, len(DISTANCES), len(many(length))), theorems.distances),
            sums("separability", lambda length: (len(octaves(length)), 2, len(SEPARABLE), len(few(length))), theorems.separable),
            sums("differences", lambda length: (1, 2, len(DIFFERENCES), steps), theorems.differences),
        ),
        lambda values: [each for derive in DERIVED for each in derive(asked, values)],
    )


def _counts_axis(counts: list[int]) -> Axis:
    return Axis("keys N", "", "for N =", tuple(map(float, counts)))


def _over_heads(values: np.ndarray) -> np.ndarray:
    """Means over layers and heads, the last two axes."""
    return mean(values, (-2, -1))


def _derived_distances(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """d~ and its expectations: over N where most keys are visible, and by the number of visible keys at one N."""
    counts = many(values.length)
    distances = _over_heads(means(values.sums["distances"].sum(0)))  # (octaves, quantities, N)
    for number, what in enumerate(DISTANCES):
        yield Derived("d~", "", distances[-1, number], _counts_axis(counts), shown=True, what=what)
    for number, what in enumerate(DISTANCES if OVER_LENGTH in counts else ()):
        by_length, axis = distances[:, number, counts.index(OVER_LENGTH)], visible_keys(octaves(values.length))
        yield Derived(f"d~ of {OVER_LENGTH} keys", "", by_length, axis, shown=True, what=what)


def _derived_critical(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """Critical numbers of keys over visible ones, and the D that they follow from."""
    counts, bounds = many(values.length), octaves(values.length)
    inside = [values.n[(values.n >= low) & (values.n <= high)] for low, high in bounds]
    keys = [float(n.mean()) if len(n) else math.nan for n in inside]  # that the queries of an octave see on average
    for which in TESTED:
        results = [_compared(asked, values, octave, which) for octave in range(len(bounds))]
        what = f"to {DISTANCES[which]}, {results[-1].size} values"
        yield Derived("D of the largest weights", "", results[-1].statistic, _counts_axis(counts), shown=True, what=what)
        for level in LEVELS:
            fractions = np.array([result.critical(level) / n for result, n in zip(results, keys, strict=True)])
            what = f"{DISTANCES[which]}, level {level:g}"
            yield Derived("critical N / visible keys", "fraction", fractions, visible_keys(bounds), shown=True, what=what)


def _compared(asked: LimitsConfig, values: Values, octave: int, which: int) -> TwoSamples:
    """Heads' mean d~ of the largest weights and one expectation of it, of one octave."""
    total, rows = parts(values.sums["distances"])  # (octaves, quantities, N, sequences, layers, H)
    both = []
    for quantity in (0, which):
        by_head, count = (np.moveaxis(part[octave, quantity], 0, -1) for part in (total, rows))  # (sequences, layers, H, N)
        flat = (len(by_head), -1, by_head.shape[-1])
        both.append(samples(by_head.reshape(flat), count.reshape(flat), asked.sample_size))
    return two_sample_tests(*both, many(values.length))


def _derived_separable(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """N_s / N over N where most keys are visible, and by at least one of a layer's heads."""
    counts = few(values.length)
    axis = _counts_axis(counts)
    separable = means(values.sums["separability"].sum(0))[-1]  # (quantities, N, layers, H)
    for number in (0, 1, 2):
        yield Derived("N_s / N", "fraction", _over_heads(separable[number]), axis, shown=True, what=SEPARABLE[number])
    yield Derived("d~ of the largest weights / its bound", "fraction", _over_heads(separable[3]), axis)
    alone = mean(separable[0], -1)  # p, by layer
    predicted = 1 - (1 - alone) ** separable.shape[-1]
    title = "keys that at least one head separates"
    yield Derived(title, "fraction", _over_heads(separable[4]), axis, what="measured")
    yield Derived(title, "fraction", _over_heads(predicted[..., None]), axis, what="1 - (1 - p)^H")
    yield Derived("heads that choose a key", "heads", _over_heads(separable[5]), axis)
    if PLATEAU in counts:
        yield Derived(f"N_s / N of {PLATEAU} keys", "fraction", _over_heads(separable[0])[[counts.index(PLATEAU)]])


def _derived_differences(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """Finite differences and the spectral norm over the temperature: the largest of the heads' means, as in the paper."""
    shape = len(asked.temperatures), len(asked.steps)
    by_head = means(values.sums["differences"].sum(0))[0]
    largest = np.nan_to_num(by_head, nan=-np.inf).max((-2, -1)).reshape(len(DIFFERENCES), *shape)
    largest[np.isneginf(largest)] = np.nan
    axis = Axis("temperature T", "", "at T =", tuple(asked.temperatures))
    for (index, step), number in product(enumerate(asked.steps), (0, 1)):
        what = f"{DIFFERENCES[number]}, step {step:g}"
        yield Derived("change of weights", "", largest[number, :, index], axis, shown=True, what=what)
    yield Derived("change of weights", "", largest[2, :, 0], axis, shown=True, what=DIFFERENCES[2])


DERIVED = _derived_distances, _derived_critical, _derived_separable, _derived_differences
