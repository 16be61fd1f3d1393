"""An attention row is a query's scores and weights in one head, over the keys that it sees. This module holds such
rows, and measures statistics of all rows of a model.

Shapes: H heads, T queries, S keys; one sequence at a time.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.data.batches import Batch
from lm.model.attention_stream import QueryBlock, attention_blocks
from lm.model.blocks import AttentionInputs
from lm.model.decoder import Decoder
from lm.runs.evaluations import Axis

# ending of names of statistics without the first token (`Statistic.without_first_token`)
NO_FIRST_TOKEN_SUFFIX = ", no first"
# queries that see fewer keys are left out: their statistics depend more on the number of keys than on the model
MIN_KEYS = 32


class Moments(NamedTuple):
    """The mean, standard deviation, skew and excess kurtosis of each query's scores over the keys that it sees."""

    mean: Tensor  # beta
    std: Tensor  # gamma, the root of the mean squared deviation (over n keys, not n - 1)
    skew: Tensor  # third standardised moment, 0 for Gaussian scores; NaN where all scores are equal
    excess_kurtosis: Tensor  # fourth standardised moment minus 3, 0 for Gaussian scores; NaN where all scores are equal


def score_moments(scores: Tensor, visible: Tensor) -> Moments:
    """Return the moments, (...) each, of scores (..., S) over the visible keys.

    visible: bool, broadcastable to the scores.
    """
    n = visible.sum(-1)
    mean = scores.masked_fill(~visible, 0.0).sum(-1) / n
    deviation = (scores - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
    std = (deviation.square().sum(-1) / n).sqrt()
    standard_scores = deviation / std.masked_fill(std == 0, math.nan).unsqueeze(-1)
    cube = standard_scores * standard_scores * standard_scores
    return Moments(mean, std, cube.sum(-1) / n, (cube * standard_scores).sum(-1) / n - 3)


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention rows hold the scores and weights that some queries of one sequence give to the keys they see, in all
    heads of one layer.
    """

    layer: int  # from 0
    query_indices: Tensor  # (T,) int64, index of each query in the sequence
    later_query_counts: Tensor  # (T,) int64, for each query the number of described queries after it in the sequence
    normalizer: Normalizer  # the layer's normalizer: its `normalize` turns scores into weights
    layout: AttentionLayout  # where queries and keys stand in their documents
    # (H, T, S) fp32, which the normalizer turns into weights (`Normalizer.unmasked_scores`); meaningless for keys that
    # are not visible
    scores: Tensor
    # (H, T, S) fp32, 0 for keys that are not visible; not negative in most families, summing to one in many
    weights: Tensor
    # (T, S) bool, the keys that a query may give weight to: keys of its document up to the query, or of its window
    visible: Tensor
    # the layer's x (1, L, C), q, k (1, H, L, D) and v (1, H, L, E), of all L tokens of the sequence
    inputs: AttentionInputs | None = None
    token_embeddings: Tensor | None = None  # (1, L, C), the embedding vectors of all tokens

    @classmethod
    def from_block(
        cls, block: QueryBlock, token_embeddings: Tensor | None = None, n_queries_in_later_blocks: int = 0
    ) -> "AttentionRows":
        """Return the attention rows of one block of queries.

        token_embeddings: (1, L, C), the embedding vectors of all tokens of the sequence; None if no statistic needs
            them.
        n_queries_in_later_blocks: number of the sequence's queries after this block.
        """
        visible = _drop_batch_and_head_axes(block.normalizer.visible(block.layout))
        later_query_counts = n_queries_in_later_blocks + torch.arange(
            len(block.queries) - 1, -1, -1, device=block.queries.device
        )
        tensors = block.scores[0], block.weights[0], visible
        return cls(
            block.layer,
            block.queries,
            later_query_counts,
            block.normalizer,
            block.layout,
            *tensors,
            block.inputs,
            token_embeddings,
        )

    @cached_property
    def n_visible_keys(self) -> Tensor:
        """Number of keys that each query sees, (T,) fp32."""
        return self.visible.sum(-1).float()

    @cached_property
    def first_token_mask(self) -> Tensor:
        """Mask, (T, S) bool, that is true at the first token of each query's document."""
        return _drop_batch_and_head_axes(self.layout.visible()) & (self.layout.key_positions == 0).view(
            -1, self.visible.size(-1)
        )

    @cached_property
    def distance(self) -> Tensor:
        """Number of tokens from the key to the query, (T, S) fp32; it is negative for keys after the query."""
        return _drop_batch_and_head_axes(self.layout.distance())

    @cached_property
    def magnitudes(self) -> Tensor:
        """Absolute value of each weight, (H, T, S), as weights may be negative."""
        return self.weights.abs()

    @cached_property
    def abs_sum(self) -> Tensor:
        """Sum of |weights| of each row, (H, T); NaN where the sum is 0: a value divided by the sum is then NaN, too."""
        total = self.magnitudes.sum(-1)
        return total.masked_fill(total == 0, math.nan)

    @cached_property
    def descending_weights(self) -> Tensor:
        """Magnitudes |weights|, (H, T, S), sorted in each row from the largest to the smallest."""
        return self.magnitudes.sort(-1, descending=True).values

    @cached_property
    def scores_without_decay(self) -> Tensor:
        """Scores (H, T, S) without the part that depends on distance alone: ALiBi's slope, or the decay of linear
        attention.
        """
        log_decay = self.normalizer.log_decay(self.scores)
        if not log_decay.any():
            return self.scores
        if self.normalizer.score_map == "exp":
            return self.scores - log_decay.view(-1, 1, 1) * self.distance
        query, key = self.linear_attention_features
        return query @ key.transpose(-2, -1)

    @cached_property
    def linear_attention_features(self) -> tuple[Tensor, Tensor]:
        """Features of the queries (H, T, F) and of the keys (H, S, F), fp32, whose products are the scores of linear
        attention (`Normalizer.apply_feature_map`).
        """
        q, k = self.inputs.q[:, :, self.query_indices].float(), self.inputs.k[:, :, : self.visible.size(-1)].float()
        query, key = self.normalizer.apply_feature_map(q, k)
        return query[0], key[0]

    @cached_property
    def moments_without_decay(self) -> Moments:
        """Moments, (H, T) each, of `scores_without_decay` over the keys that each query sees."""
        return score_moments(self.scores_without_decay, self.visible)

    @cached_property
    def finite_row_mask(self) -> Tensor:
        """Mask, (H, T) bool, that is true for rows whose weights, and scores of visible keys, are all finite."""
        return ((self.scores.isfinite() | ~self.visible) & self.weights.isfinite()).all(-1)

    @cached_property
    def defined_row_mask(self) -> Tensor:
        """Mask, (H, T) bool, that is true for rows that can be described: their scores and weights are finite, and not
        all weights are 0.
        """
        return self.finite_row_mask & (self.magnitudes.sum(-1) > 0)

    def select(self, queries: Tensor) -> "AttentionRows":
        """Return the rows of some queries; `queries` is a mask, (T,) bool, or indices, int64."""
        layout = self.layout.select(queries, self.visible.size(-1))
        scores = self.scores[:, queries]
        weights = self.weights[:, queries]
        fields = {name: getattr(self, name)[queries] for name in ("query_indices", "later_query_counts", "visible")}
        return replace(self, layout=layout, scores=scores, weights=weights, **fields)

    def normalize(self, scores: Tensor) -> Tensor:
        """Return the weights (H, T, S) that the layer's normalizer gives these queries for other scores (H, T, S)."""
        return self.normalizer.normalize(scores.unsqueeze(0), self.layout)[0]

    @cached_property
    def with_first_token_zeroed(self) -> "AttentionRows":
        """Same rows with the first token of the document made invisible and its weight set to 0; weights of other keys
        do not change.
        """
        return replace(
            self,
            weights=self.weights.masked_fill(self.first_token_mask, 0.0),
            visible=self.visible & ~self.first_token_mask,
        )


def _drop_batch_and_head_axes(values: Tensor) -> Tensor:
    """Reshape `values`, (T, S) or (1, 1, T, S), to (T, S)."""
    return values.reshape(values.shape[-2:])


def log_spaced_queries(length: int, count: int) -> list[int]:
    """Return up to `count` indices of queries of a sequence, ascending. The indices go from the first query that can
    see `MIN_KEYS` keys to the last query.

    The queries are evenly spread over the logarithm of the number of keys, so that each octave has equally many
    queries. Short sequences have fewer queries than `count`, as indices are not repeated.
    """
    key_counts = np.geomspace(MIN_KEYS, length, count) if length >= MIN_KEYS else []
    return sorted({round(float(keys)) - 1 for keys in key_counts})


# ---------------------------------------------------------------- statistics of rows


@dataclass(frozen=True)
class Statistic:
    """A statistic has one value for each row (head and query). Values of rows where `AttentionRows.defined_row_mask` is
    false are not used.
    """

    name: str  # as tables and pictures show it
    unit: str  # such as `keys` or `nats`; empty: no unit. A `fraction` lies within 0 and 1
    # rows -> (H, T), NaN where not defined; None: does not apply to the normalizer
    measure: Callable[[AttentionRows], Tensor | None]
    # whether reports, pictures and a run's metrics show it; else only the result and its tables do
    in_reports: bool = False
    has_exponent: bool = False  # whether value ~ n^exponent is fitted for each head, n the number of visible keys
    is_log: bool = False  # whether the values are logarithms already, so that the fit takes no logarithms

    @property
    def without_first_token(self) -> "Statistic":
        """Same statistic, measured without the first token of the document. Its name ends in `NO_FIRST_TOKEN_SUFFIX`,
        and reports do not show it.
        """
        return replace(
            self,
            name=self.name + NO_FIRST_TOKEN_SUFFIX,
            measure=lambda row: self.measure(row.with_first_token_zeroed),
            in_reports=False,
        )


@dataclass(frozen=True)
class HeadStatistic:
    """This statistic has one value for each head. It is computed from sums over the defined rows of a sequence
    (`AttentionRows.defined_row_mask`), such as sums of weights by key position.

    `sum_rows` sorts (query, key) pairs into L groups, such as key positions or distances. L is the number of tokens of
    a sequence. For each head the first L numbers are sums of a value over the groups' pairs, and the last L numbers
    count these pairs: (H, 2 L).
    `reduce_sequence_sums` turns these sums into a number for each head.
    """

    name: str  # as in `Statistic`
    sum_rows: Callable[[AttentionRows, int], Tensor]  # rows, L -> (H, 2 L)
    # sums of each sequence (N, layers, H, 2 L) float64 -> a number for each head (layers, H), NaN where not defined
    reduce_sequence_sums: Callable[[np.ndarray], np.ndarray]
    unit: str = ""  # as in `Statistic`
    in_reports: bool = True  # as in `Statistic`


class MeasuredValues(NamedTuple):
    """Holds the values that one model's statistics have on N sequences, by the statistics' names; NaN where a statistic
    is not defined.
    """

    n_visible_keys_by_query: np.ndarray  # (N, layers, T), the number of keys that each query sees
    by_query: dict[str, np.ndarray]  # (N, layers, H, T) for each `Statistic`
    pooled_by_head: dict[str, np.ndarray]  # (layers, H) for each `HeadStatistic`, of all sequences together


Statistics = Sequence[Statistic | HeadStatistic]
VISIBLE_KEYS_AXIS = Axis("visible keys", "tokens", "where queries see about")
HEAD_AXIS = Axis("head", "", "of head", log=False)
# names of two fractions of rows, beside the statistics
NOT_FINITE_FRACTION, NO_WEIGHT_FRACTION = "rows that are not finite", "rows without weight"


class AttentionMeasurement:
    """Measures statistics of attention, and writes their values for one sequence and model into a vector.

    queries: indices of the queries in each sequence, ascending; length: tokens in a sequence.
    """

    def __init__(self, statistics: Statistics, layers: int, heads: int, queries: Sequence[int], length: int):
        self.queries, self.length = queries, length
        self.row_statistics = [each for each in statistics if isinstance(each, Statistic)]
        self.head_statistics = [each for each in statistics if isinstance(each, HeadStatistic)]
        # Values by row: the number of keys that its query sees, two reasons for being undefined, and each statistic.
        self.row_value_names = [
            "n",
            NOT_FINITE_FRACTION,
            NO_WEIGHT_FRACTION,
            *(each.name for each in self.row_statistics),
        ]
        # shapes of the two parts of a vector
        self.row_values_shape = len(self.row_value_names), layers, heads, len(queries)
        self.sums_shape = len(self.head_statistics), layers, heads, 2 * length

    @property
    def vector_length(self) -> int:
        """Number of values that all statistics have for one sequence and model."""
        return math.prod(self.row_values_shape) + math.prod(self.sums_shape)

    @torch.no_grad()
    def measure_statistics(self, decoder: Decoder, one_sequence: Batch) -> Tensor:
        """Return the values of all statistics of the only sequence of a batch: (`vector_length`,).

        Scores and weights are fp32. Memory holds scores and weights of some queries of one layer at a time.
        """
        parts = torch.full(self.row_values_shape, torch.nan), torch.zeros(self.sums_shape)
        embedding = decoder.embedding(one_sequence.tokens)
        for block in attention_blocks(decoder, one_sequence, self.queries):
            start = self.queries.index(int(block.queries[0]))
            rows = AttentionRows.from_block(block, embedding, len(self.queries) - start - len(block.queries))
            self._write_statistics(*parts, rows, start)
        return torch.cat([part.flatten() for part in parts])

    def _write_statistics(self, row_values: Tensor, sums: Tensor, rows: AttentionRows, start: int) -> None:
        """Write statistics of rows with `MIN_KEYS` or more keys into `row_values` and `sums`, the parts of a sequence's
        vector.

        start: the first row's index in `queries`.
        """
        indices = (rows.n_visible_keys >= MIN_KEYS).nonzero().squeeze(-1)
        if not len(indices):
            return
        row_indices, rows, layer = indices.cpu() + start, rows.select(indices), rows.layer
        defined_row_mask = rows.defined_row_mask
        row_values[0, layer][:, row_indices] = rows.n_visible_keys.cpu()
        row_values[1, layer][:, row_indices] = (~rows.finite_row_mask).float().cpu()
        row_values[2, layer][:, row_indices] = (rows.finite_row_mask & ~defined_row_mask).float().cpu()
        for index, statistic in enumerate(self.row_statistics, 3):
            if (value := statistic.measure(rows)) is not None:
                row_values[index, layer][:, row_indices] = value.float().where(defined_row_mask, torch.nan).cpu()
        for index, statistic in enumerate(self.head_statistics):
            sums[index, layer] += statistic.sum_rows(rows, self.length).float().cpu()

    def split_vectors(self, vectors: np.ndarray) -> MeasuredValues:
        """Split the vectors of N sequences, (N, `vector_length`), into the values of each statistic, by its name."""
        rows, sums = np.split(vectors, [math.prod(self.row_values_shape)], axis=1)
        n, *by_query = np.moveaxis(rows.reshape(len(vectors), *self.row_values_shape), 1, 0)
        by_sums = np.moveaxis(sums.reshape(len(vectors), *self.sums_shape).astype("f8"), 1, 0)
        pooled_by_head = {
            each.name: each.reduce_sequence_sums(total)
            for each, total in zip(self.head_statistics, by_sums, strict=True)
        }
        return MeasuredValues(n[:, :, 0], dict(zip(self.row_value_names[1:], by_query, strict=True)), pooled_by_head)


def nan_mean(values: np.ndarray, axes: tuple[int, ...] | int | None = None) -> np.ndarray:
    """Return the mean, float64, of the values that are not NaN; NaN where all values are NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about means of nothing
        return np.nanmean(values, axis=axes, dtype="f8")


def half_octave_ranges(key_counts: np.ndarray, train_length: int) -> list[tuple[int, int]]:
    """Return ranges (first, last) of numbers of keys. Each range is half an octave long, and holds some of
    `key_counts`.

    The training length is the end of a range. `key_counts` may hold NaN, which is in no range.
    """
    counts = key_counts[np.isfinite(key_counts)]
    if not len(counts):
        return []
    steps = np.arange(
        math.floor(2 * math.log2(counts.min() / train_length)) - 1,
        math.ceil(2 * math.log2(counts.max() / train_length)) + 1,
    )
    edges = np.unique(np.rint(train_length * 2.0 ** (steps / 2)).astype(int))
    ranges = ((max(a + 1, int(counts.min())), min(b, int(counts.max()))) for a, b in pairwise(edges.tolist()))
    return [(first, last) for first, last in ranges if ((counts >= first) & (counts <= last)).any()]


def fit_head_exponents_and_r2(values: np.ndarray, n: np.ndarray, is_log: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Fit value ~ n^exponent to each head by least squares on logarithms; returns the exponents and R^2, both
    (layers, H).

    Both are NaN where n spans fewer than two octaves. Values without a finite logarithm are left out.

    values: (N, layers, H, T), or their logarithms if `is_log`; n: (N, layers, T).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        y = values.astype("f8") if is_log else np.log(values.astype("f8"))
        x = np.broadcast_to(np.log(n.astype("f8"))[:, :, None], y.shape)
        x, y = (np.where(np.isfinite(x + y), values, np.nan) for values in (x, y))
        dx, dy = (values - nan_mean(values, (0, 3))[None, :, :, None] for values in (x, y))
        xx, xy, yy = (np.nansum(product, (0, 3)) for product in (dx * dx, dx * dy, dy * dy))
        is_wide = np.fmax.reduce(x, (0, 3)) - np.fmin.reduce(x, (0, 3)) >= 2 * np.log(2) - 1e-6
        return np.where(is_wide, xy / xx, np.nan), np.where(is_wide, xy**2 / (xx * yy), np.nan)
