"""Rows of attention (scores and weights of single queries over the keys that they see), and statistics of all rows of a model.

Shapes: H heads, T queries, S keys; one sequence at a time.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.data.batches import Batch
from lm.model.attention_stream import AttentionBlock, attention_blocks
from lm.model.blocks import AttentionInputs
from lm.model.decoder import Decoder
from lm.runs.evaluations import Axis

NO_FIRST = ", no first"
LEAST_KEYS = 32  # queries that see fewer keys are left out: their statistics say more about the number of keys than about the model


@dataclass(frozen=True)
class Moments:
    """Moments of the scores of each query over the keys that it sees."""

    mean: Tensor  # beta
    std: Tensor  # gamma, the root of the mean squared deviation (divided by n, as S is)
    skew: Tensor  # third standardised moment, 0 for Gaussian scores; NaN where all scores are equal
    excess_kurtosis: Tensor  # fourth standardised moment minus 3, 0 for Gaussian scores; NaN where all scores are equal


def score_moments(scores: Tensor, visible: Tensor) -> Moments:
    """Moments over the last dimension of scores (..., S), of the keys where `visible` (broadcastable to it) is true."""
    n = visible.sum(-1)
    mean = scores.masked_fill(~visible, 0.0).sum(-1) / n
    deviation = (scores - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
    std = (deviation.square().sum(-1) / n).sqrt()
    standard = deviation / std.masked_fill(std == 0, math.nan).unsqueeze(-1)
    cube = standard * standard * standard
    return Moments(mean, std, cube.sum(-1) / n, (cube * standard).sum(-1) / n - 3)


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Some queries of one layer and sequence."""

    layer: int  # from 0
    queries: Tensor  # (T,) int64, index of each query in the sequence
    normalizer: Normalizer  # of the layer: `normalize` makes weights of other scores
    layout: AttentionLayout  # where queries and keys stand in their documents
    scores: Tensor  # (H, T, S) fp32, what the normalizer normalizes (`Normalizer.scores`); of visible keys alone they mean anything
    weights: Tensor  # (H, T, S) fp32, 0 for keys that are not visible; not negative in most families, summing to one in many
    visible: Tensor  # (T, S) bool, the keys that a query may give weight to: those of its document up to itself, or of its window
    inputs: AttentionInputs | None = None  # the layer's x (1, L, C), q, k (1, H, L, D) and v (1, H, L, E), of all tokens of the sequence
    embedding: Tensor | None = None  # (1, L, C), their vectors in the embedding
    seed: int = 0  # tells sequences apart, for what is drawn at random
    is_shuffled: bool = False  # scores and weights are not where the inputs put them (`shuffled`)

    @classmethod
    def of(cls, block: AttentionBlock, embedding: Tensor | None = None, seed: int = 0) -> "AttentionRows":
        """The rows of a block of one sequence."""
        visible = _plane(block.normalizer.visible(block.layout))
        return cls(
            block.layer, block.queries, block.normalizer, block.layout, block.scores[0], block.weights[0], visible, block.inputs,
            embedding, seed,
        )  # fmt: skip

    @cached_property
    def n(self) -> Tensor:
        """How many keys each query sees, (T,) fp32."""
        return self.visible.sum(-1).float()

    @cached_property
    def first(self) -> Tensor:
        """(T, S) bool: the first token of each query's document."""
        return _plane(self.layout.visible()) & (self.layout.key_positions == 0).view(-1, self.visible.size(-1))

    @cached_property
    def distance(self) -> Tensor:
        """(T, S) fp32: how many tokens back each key is; negative for those ahead."""
        return _plane(self.layout.distance())

    @cached_property
    def size(self) -> Tensor:
        """|weights|, (H, T, S)."""
        return self.weights.abs()

    @cached_property
    def total(self) -> Tensor:
        """Sum of |weights| of each row, (H, T); NaN where it is 0, so that whatever is divided by it is undefined there."""
        total = self.size.sum(-1)
        return total.masked_fill(total == 0, math.nan)

    @cached_property
    def descending(self) -> Tensor:
        """|weights| from the largest to the smallest, (H, T, S)."""
        return self.size.sort(-1, descending=True).values

    @cached_property
    def content(self) -> Tensor:
        """Scores (H, T, S) without the part that depends on distance alone (ALiBi's slope, the decay of linear attention).

        Shuffled scores are as they are: which part was whose key's cannot be told any more.
        """
        log_decay = self.normalizer.log_decay(self.scores)
        if self.is_shuffled or not log_decay.any():
            return self.scores
        if self.normalizer.score_map == "exp":
            return self.scores - log_decay.view(-1, 1, 1) * self.distance
        query, key = self.features
        return query @ key.transpose(-2, -1)

    @cached_property
    def features(self) -> tuple[Tensor, Tensor]:
        """Features of the queries (H, T, F) and of the keys (H, S, F) of linear attention (`Normalizer.features`), fp32."""
        q, k = self.inputs.q[:, :, self.queries].float(), self.inputs.k[:, :, : self.visible.size(-1)].float()
        query, key = self.normalizer.features(q, k)
        return query[0], key[0]

    @cached_property
    def moments(self) -> Moments:
        """Moments of `content` over the keys that each query sees, (H, T) each."""
        return score_moments(self.content, self.visible)

    @cached_property
    def is_finite(self) -> Tensor:
        """(H, T) bool: whether all scores of visible keys and all weights are finite."""
        return ((self.scores.isfinite() | ~self.visible) & self.weights.isfinite()).all(-1)

    @cached_property
    def is_defined(self) -> Tensor:
        """(H, T) bool: whether a row can be described: its numbers are finite, and not all of its weights are 0."""
        return self.is_finite & (self.size.sum(-1) > 0)

    def select(self, queries: Tensor) -> "AttentionRows":
        """Some of the queries, (T,) bool or int64."""
        layout, scores, weights = self.layout.select(queries, self.visible.size(-1)), self.scores[:, queries], self.weights[:, queries]
        visible = self.visible[queries]
        return replace(self, queries=self.queries[queries], layout=layout, scores=scores, weights=weights, visible=visible)

    @cached_property
    def without_first(self) -> "AttentionRows":
        """The same rows as if the first token of the document were not there: it is not visible, the weights of the others stay."""
        return replace(self, weights=self.weights.masked_fill(self.first, 0.0), visible=self.visible & ~self.first)

    def shuffled(self, order: Tensor) -> "AttentionRows":
        """The same scores of each query in another order among the keys that it sees, normalized again.

        order: (T, S) numbers that tell the order: the visible keys, sorted by them, take over the scores of the visible keys in their own
        order. It is the same for all heads. What is left is what the distribution of the scores gives, wherever the keys stand.
        """
        places = torch.argsort((~self.visible).to(torch.int8), dim=-1, stable=True)  # visible keys first, in their order
        drawn = order.masked_fill(~self.visible, math.inf).argsort(-1)  # visible keys first, in the drawn order
        in_order = self.scores.gather(-1, places.expand(self.scores.shape))
        scores = torch.empty_like(self.scores).scatter_(-1, drawn.expand(self.scores.shape), in_order)
        weights = self.normalizer.normalize(scores.unsqueeze(0), self.layout)[0]
        return replace(self, scores=scores, weights=weights, is_shuffled=True)


def later(layout: AttentionLayout, tokens: int) -> AttentionLayout:
    """The same queries and keys with so many tokens more before all of them."""
    shifted = {name: getattr(layout, name) + tokens for name in ("positions", "key_positions", "lengths")}
    return replace(layout, **shifted)


def _plane(values: Tensor) -> Tensor:
    """A tensor (T, S) or (1, 1, T, S) as (T, S)."""
    return values.reshape(values.shape[-2:])


def query_indices(length: int, count: int) -> list[int]:
    """Up to `count` queries of a sequence, ascending: from the first that can see `LEAST_KEYS` keys to the last one, evenly spread over the
    logarithm of the number of keys, so that each octave has as many. Fewer in short sequences, where indices are not repeated."""
    spread = np.geomspace(LEAST_KEYS, length, count) if length >= LEAST_KEYS else []
    return sorted({round(float(keys)) - 1 for keys in spread})


# ---------------------------------------------------------------- statistics of rows


@dataclass(frozen=True)
class Statistic:
    """One number for each head and query; those of rows that are not `is_defined` are not used."""

    name: str  # as tables and pictures show it
    unit: str  # such as `keys` or `nats`; a `fraction` lies within 0 and 1; empty: a number without one
    of: Callable[[AttentionRows], Tensor | None]  # (H, T), NaN where not defined; None: it does not apply to the layer's normalizer
    shown: bool = False  # in reports, pictures and the metrics of a run, too; any other is in the result and its tables alone
    fitted: bool = False  # its growth with the number of visible keys n is fitted by head, value ~ n^exponent
    log: bool = False  # its values are logarithms already, for the fit

    @property
    def without_first(self) -> "Statistic":
        """The same statistic without the first token of the document, which reports leave out."""
        return replace(self, name=self.name + NO_FIRST, of=lambda rows: self.of(rows.without_first), shown=False)


@dataclass(frozen=True)
class Accumulated:
    """Sums over all queries of each sequence by head, such as those of weights by the key's position; of rows that are `is_defined`.

    P: the shape of the sums of a head.
    """

    name: str  # as of `Statistic`
    unit: str  # as of `Statistic`
    size: Callable[[int], tuple[int, ...]]  # tokens of a sequence -> P
    sums: Callable[[AttentionRows, int], Tensor | None]  # rows, tokens of the sequence -> (H, *P); None: it does not apply
    # Sums of each sequence (N, layers, H, *P) float64 -> a number for each head (layers, H), NaN where not defined; None: see `derive`.
    finish: Callable[[np.ndarray], np.ndarray] | None = None
    shown: bool = False  # as of `Statistic`


@dataclass(frozen=True, eq=False)
class Values:
    """The values of statistics of one model on N sequences, NaN where they are not defined."""

    n: np.ndarray  # (N, layers, T), how many keys each query sees
    by_query: dict[str, np.ndarray]  # (N, layers, H, T) of each `Statistic`, by its name
    by_head: dict[str, np.ndarray]  # (layers, H) of each `Accumulated` that has such numbers, by its name
    sums: dict[str, np.ndarray]  # (N, layers, H, *P) float64 of each `Accumulated`, by its name
    length: int  # tokens in a sequence
    train_length: int  # tokens in a training sequence


@dataclass(frozen=True, eq=False)
class Derived:
    """Numbers made of the values of several statistics: one (1,), or one for each point of an axis; `what`: which of those of this name."""

    name: str
    unit: str
    values: np.ndarray
    axis: Axis | None = None
    shown: bool = False
    what: str = ""


@dataclass(frozen=True)
class Family:
    """Statistics that belong together, which `eval.diagnostics.statistics` names by one word."""

    per_query: tuple[Statistic, ...] = ()
    accumulated: tuple[Accumulated, ...] = ()
    derive: Callable[[Values], list[Derived]] = lambda values: []


KEYS, HEAD = "visible keys", "head"  # names of axes
NOT_FINITE, NO_WEIGHT = "rows that are not finite", "rows without weight"  # fractions of the queries, beside the statistics


class Measures:
    """The statistics of some families, and how their numbers lie in one vector for each sequence and model.

    Args:
        queries: indices of the queries in each sequence, ascending.
        length: tokens in a sequence.
    """

    def __init__(self, families: tuple[Family, ...], layers: int, heads: int, queries: Sequence[int], length: int):
        self.families, self.heads, self.queries, self.length = families, heads, queries, length
        self.per_query = [statistic for family in families for statistic in family.per_query]
        self.accumulated = [sums for family in families for sums in family.accumulated]
        # Numbers of a query: the keys it sees, what leaves it undefined, and each statistic.
        self.names = ["n", NOT_FINITE, NO_WEIGHT, *(statistic.name for statistic in self.per_query)]
        # Parts of a vector: the queries' numbers (names, layers, H, T), and (layers, H, *P) of each `Accumulated`.
        self.shapes = [(len(self.names), layers, heads, len(queries)), *((layers, heads, *each.size(length)) for each in self.accumulated)]

    @property
    def numbers(self) -> int:
        """The length of the vector of a sequence and model."""
        return sum(map(math.prod, self.shapes))

    @torch.no_grad()
    def of(self, decoder: Decoder, batch: Batch, index: int = 0, order: Tensor | None = None) -> list[Tensor]:
        """All statistics of a sequence, (numbers,); and with `order` those of its shuffled scores, a second vector.

        Scores and weights are fp32. Memory holds those of some queries of a layer at a time.

        Args:
            batch: of one sequence.
            index: number of the sequence, the seed of what statistics draw.
            order: random numbers, (queries, tokens), by which scores are shuffled.
        """
        vectors = [[torch.full(self.shapes[0], torch.nan), *map(torch.zeros, self.shapes[1:])] for _ in range(1 if order is None else 2)]
        device, done = batch.tokens.device, [0] * self.shapes[0][1]
        embedding = decoder.embedding(batch.tokens)
        for block in attention_blocks(decoder, batch, self.queries, inputs=True):
            rows, start = AttentionRows.of(block, embedding, index), done[block.layer]
            stop = done[block.layer] = start + len(block.queries)
            self._add(vectors[0], rows, start)
            if order is not None:
                self._add(vectors[1], rows.shuffled(order[start:stop, : rows.visible.size(-1)].to(device)), start)
        return [torch.cat([part.flatten() for part in parts]) for parts in vectors]

    def _add(self, parts: list[Tensor], rows: AttentionRows, start: int) -> None:
        """Put in the numbers of those rows that see enough keys; `start`: place of the first of them among the queries."""
        enough = (rows.n >= LEAST_KEYS).nonzero().squeeze(-1)
        if not len(enough):
            return
        (numbers, *sums), places, rows, layer = parts, enough.cpu() + start, rows.select(enough), rows.layer
        defined = rows.is_defined
        numbers[0, layer][:, places] = rows.n.cpu().expand(self.heads, -1)
        numbers[1, layer][:, places] = (~rows.is_finite).float().cpu()
        numbers[2, layer][:, places] = (rows.is_finite & ~defined).float().cpu()
        for index, statistic in enumerate(self.per_query, 3):
            if (value := statistic.of(rows)) is not None:
                numbers[index, layer][:, places] = value.float().where(defined, torch.nan).cpu()
        for total, accumulated in zip(sums, self.accumulated, strict=True):
            if (value := accumulated.sums(rows, self.length)) is not None:
                total[layer] += value.float().cpu()

    def values(self, vectors: np.ndarray, train_length: int) -> Values:
        """Divide vectors (N, numbers) of N sequences into the statistics that they hold, by name."""
        parts = np.split(vectors, np.cumsum([math.prod(shape) for shape in self.shapes])[:-1], axis=1)
        by_query, *sums = (part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True))
        n, *others = np.moveaxis(by_query, 1, 0)
        totals = {each.name: part.astype("f8") for each, part in zip(self.accumulated, sums, strict=True)}
        by_head = {each.name: each.finish(totals[each.name]) for each in self.accumulated if each.finish}
        return Values(n[:, :, 0], dict(zip(self.names[1:], others, strict=True)), by_head, totals, self.length, train_length)


def orders(index: int, queries: int, length: int) -> Tensor:
    """Random numbers (queries, length) for shuffling the scores of a sequence, the same for each model: the seed is its index."""
    return torch.rand(queries, length, generator=torch.Generator().manual_seed(index))


def mean(values: np.ndarray, axes: tuple[int, ...] | int | None = None) -> np.ndarray:
    """The mean of what is defined, float64; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's about means of nothing
        return np.nanmean(values, axis=axes, dtype="f8")


def visible_keys(ranges: Sequence[tuple[int, int]]) -> Axis:
    """Ranges of the number of visible keys, (first, last), each at its middle."""
    middles = tuple(float(round(math.sqrt(first * last))) for first, last in ranges)
    return Axis(KEYS, "tokens", "where queries see about", middles)


def half_octaves(n: np.ndarray, train_length: int) -> list[tuple[int, int]]:
    """Ranges of the number of keys, (first, last), that some of `n` (NaN: not known) lie in: half octaves, one of which ends at the
    training length."""
    known = n[np.isfinite(n)]
    if not len(known):
        return []
    steps = np.arange(math.floor(2 * math.log2(known.min() / train_length)) - 1, math.ceil(2 * math.log2(known.max() / train_length)) + 1)
    edges = np.unique(np.rint(train_length * 2.0 ** (steps / 2)).astype(int))
    ranges = ((max(a + 1, int(known.min())), min(b, int(known.max()))) for a, b in pairwise(edges.tolist()))
    return [(first, last) for first, last in ranges if ((known >= first) & (known <= last)).any()]


def exponent(values: np.ndarray, n: np.ndarray, log: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The exponent of value ~ n^exponent for each head, and the fit's R^2, both (layers, H): least squares on logarithms.

    NaN where fewer than two octaves are covered. Values that are not above 0 are left out.

    values: (N, layers, H, T), logarithms already if `log`; n: (N, layers, T).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        y = values.astype("f8") if log else np.log(values.astype("f8"))
        x = np.broadcast_to(np.log(n.astype("f8"))[:, :, None], y.shape)
        known = np.isfinite(y) & np.isfinite(x)
        x, y = (np.where(known, values, 0.0) for values in (x, y))
        count = known.sum((0, 3))
        mean_x, mean_y = x.sum((0, 3)) / count, y.sum((0, 3)) / count
        dx = np.where(known, x - mean_x[None, :, :, None], 0.0)
        dy = np.where(known, y - mean_y[None, :, :, None], 0.0)
        xx, xy, yy = (dx * dx).sum((0, 3)), (dx * dy).sum((0, 3)), (dy * dy).sum((0, 3))
        reach = np.where(known, x, -np.inf).max((0, 3)) - np.where(known, x, np.inf).min((0, 3))
        wide = reach >= 2 * np.log(2) - 1e-6
        return np.where(wide, xy / xx, np.nan), np.where(wide, xy**2 / (xx * yy), np.nan)
