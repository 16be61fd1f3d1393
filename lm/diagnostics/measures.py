"""Statistics of a model on one sequence after the other, and with its scores shuffled."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lm.data.batches import Batch
from lm.diagnostics.rows import LEAST_KEYS, AttentionRows, Family, Values
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.runs.series import Axis

KEYS = "visible keys"  # name of an axis
NOT_FINITE, NO_WEIGHT = "rows that are not finite", "rows without weight"  # fractions of the queries, beside the statistics


@dataclass(frozen=True)
class Measures:
    """The statistics of some families, and how their numbers lie in one vector a sequence and model.

    Attributes:
        families: what is asked for.
        layers, heads: of the model.
        queries: indices of the queries in each sequence, ascending.
        length: tokens in a sequence.
    """

    families: tuple[Family, ...]
    layers: int
    heads: int
    queries: Sequence[int]
    length: int

    @property
    def per_query(self) -> list:
        """Every `Statistic`."""
        return [one for family in self.families for one in family.per_query]

    @property
    def accumulated(self) -> list:
        """Every `Accumulated`."""
        return [one for family in self.families for one in family.accumulated]

    @property
    def names(self) -> list[str]:
        """What there is a number of for each query: how many keys it sees, what keeps it from being described, the statistics."""
        return ["n", NOT_FINITE, NO_WEIGHT, *(one.name for one in self.per_query)]

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        """For one sequence: NaN (names, layers, H, T), and sums (layers, H, P) of each `Accumulated`."""
        numbers = torch.full((len(self.names), self.layers, self.heads, len(self.queries)), torch.nan)
        return numbers, [torch.zeros(self.layers, self.heads, one.size(self.length)) for one in self.accumulated]

    @property
    def numbers(self) -> int:
        """How long the vector of a sequence and model is."""
        first, others = self.empty()
        return first.numel() + sum(one.numel() for one in others)

    @torch.no_grad()
    def of(self, decoder: Decoder, batch: Batch, index: int = 0, order: Tensor | None = None) -> list[Tensor]:
        """The vector (numbers,) of a batch of one sequence; and with `order` (queries, tokens), random numbers, of the shuffled scores.

        `index`: which sequence it is, the seed of what statistics draw.

        Scores and weights are fp32. Holds those of some queries of a layer at a time.
        """
        found = [self.empty() for _ in range(1 if order is None else 2)]
        device, done = batch.tokens.device, [0] * self.layers
        embedding = decoder.embedding(batch.tokens)
        for block in attention_blocks(decoder, batch, self.queries, inputs=True):
            rows, start = AttentionRows.of(block, embedding, index), done[block.layer]
            stop = done[block.layer] = start + len(block.queries)
            self._add(found[0], rows, start)
            if order is not None:
                keys = rows.visible.size(-1)
                self._add(found[1], rows.shuffled(order[start:stop, :keys].to(device)), start)
        return [torch.cat([numbers.flatten(), *(one.flatten() for one in sums)]) for numbers, sums in found]

    def _add(self, found: tuple[Tensor, list[Tensor]], rows: AttentionRows, start: int) -> None:
        """Put in the numbers of those rows that see enough keys; `start`: place of the first of them among the queries."""
        numbers, sums = found
        enough = (rows.n >= LEAST_KEYS).nonzero().squeeze(-1)
        if not len(enough):
            return
        places, rows, layer = enough.cpu() + start, rows.select(enough), rows.layer
        defined = rows.is_defined
        numbers[0, layer][:, places] = rows.n.cpu().expand(self.heads, -1)
        numbers[1, layer][:, places] = (~rows.is_finite).float().cpu()
        numbers[2, layer][:, places] = (rows.is_finite & ~defined).float().cpu()
        for index, one in enumerate(self.per_query, 3):
            if (value := one.of(rows)) is not None:
                numbers[index, layer][:, places] = value.float().where(defined, torch.nan).cpu()
        for total, one in zip(sums, self.accumulated, strict=True):
            if (value := one.sums(rows, self.length)) is not None:
                total[layer] += value.float().cpu()

    def values(self, vectors: np.ndarray, train_length: int) -> Values:
        """Vectors (N, numbers) of N sequences, by the names of what they are."""
        numbers, sums = self.empty()
        ends = np.cumsum([numbers.numel(), *(one.numel() for one in sums)])[:-1]
        by_query, *summed = np.split(vectors, ends, axis=1)
        n, *others = np.moveaxis(by_query.reshape(-1, *numbers.shape), 1, 0)
        totals = {
            one.name: found.reshape(-1, *total.shape).astype("f8") for one, found, total in zip(self.accumulated, summed, sums, strict=True)
        }
        by_head = {one.name: one.finish(totals[one.name]) for one in self.accumulated if one.finish}
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
    return [(a, b) for a, b in ranges if ((known >= a) & (known <= b)).any()]


def exponent(values: np.ndarray, n: np.ndarray, log: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The exponent of value ~ n^exponent for each head, and the fit's R^2, both (layers, H): least squares on logarithms.

    NaN where fewer than two octaves are covered. Values that are not above 0 are left out.

    values: (N, layers, H, T), logarithms already if `log`; n: (N, layers, T).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        y = values.astype("f8") if log else np.log(values.astype("f8"))
        x = np.broadcast_to(np.log(n.astype("f8"))[:, :, None], y.shape)
        known = np.isfinite(y) & np.isfinite(x)
        x, y = (np.where(known, one, 0.0) for one in (x, y))
        count = known.sum((0, 3))
        mean_x, mean_y = x.sum((0, 3)) / count, y.sum((0, 3)) / count
        dx = np.where(known, x - mean_x[None, :, :, None], 0.0)
        dy = np.where(known, y - mean_y[None, :, :, None], 0.0)
        xx, xy, yy = (dx * dx).sum((0, 3)), (dx * dy).sum((0, 3)), (dy * dy).sum((0, 3))
        reach = np.where(known, x, -np.inf).max((0, 3)) - np.where(known, x, np.inf).min((0, 3))
        wide = reach >= 2 * np.log(2) - 1e-6
        return np.where(wide, xy / xx, np.nan), np.where(wide, xy**2 / (xx * yy), np.nan)
