"""Theorems 1 and 2 (`lm.diagnostics.distances`) and the temperatures of Lemma 2 (`lm.diagnostics.jacobian`), summed over a model's rows.

Each gives (H, P): of P = octaves x 2 x quantities x points numbers of a head the sums over the rows of an octave of visible keys, and how
many rows are in each. Shapes: H heads, T queries, S keys, E vector, R rows of any heads, G points.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.eval_config import LimitsConfig
from lm.diagnostics.distances import counts_up_to, random_keys, top_distances, top_keys
from lm.diagnostics.jacobian import directions, finite_difference, spectral_norm
from lm.diagnostics.rows import LEAST_KEYS, AttentionRows

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


def means(sums: np.ndarray, quantities: Sequence[str], points: int) -> np.ndarray:
    """Sums and numbers of rows (..., P) as means over rows (octaves, quantities, points, ...); NaN where there are none."""
    total, rows = parts(sums, quantities, points)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rows > 0, total / rows, np.nan)


def parts(sums: np.ndarray, quantities: Sequence[str], points: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums and numbers of rows, each (octaves, quantities, points, ...), from (..., P)."""
    both = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 2, len(quantities), points), (-4, -3, -2, -1), (0, 1, 2, 3))
    return both[:, 0], both[:, 1]


@dataclass(frozen=True)
class Theorems:
    """The sums of a model, as its configuration asks for them."""

    asked: LimitsConfig

    def distances(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`DISTANCES`, d~ and its expectations, at the numbers of keys `many`."""

        def of(part: AttentionRows, most: int) -> Tensor:
            counts = [count for count in many(length) if count <= most / 4]

            def one(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                draws = torch.rand(weights.shape, generator=generator).to(weights.device)
                random = random_keys(weights, visible, x, counts, draws)
                top = top_distances(weights, visible, x, counts)
                return torch.stack((top, random.uncorrected, random.corrected, random.upper, random.sampled))

            return F.pad(self._by_rows(part, len(counts), one), (0, 0, 0, 0, 0, len(many(length)) - len(counts)), value=math.nan)

        generator = _generator(rows)
        return self._summed(rows, octaves(length), of)

    def separable(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`SEPARABLE` at the numbers of keys `few`, the last two of them of all heads of a layer together."""

        def of(part: AttentionRows, most: int) -> Tensor:
            counts, heads = few(length), len(part.weights)

            def one(weights: Tensor, visible: Tensor, x: Tensor) -> Tensor:
                found = top_keys(weights, visible, x, counts)
                masks.append((found.within, found.chosen))
                return torch.stack((found.separable, found.lower, found.upper, found.distance / found.bound))

            masks: list[tuple[Tensor, Tensor]] = []
            own = self._by_rows(part, len(counts), one)
            shape = len(counts), heads, -1, masks[0][0].size(-1)
            within, chosen = (torch.cat(found, 1).view(shape).any(1).sum(-1) for found in zip(*masks, strict=True))
            numbers = torch.tensor(counts, device=chosen.device).unsqueeze(-1)
            layer = torch.stack((within / chosen, numbers * heads / chosen)).unsqueeze(2).expand(-1, -1, heads, -1)
            return torch.cat((own, layer.masked_fill(own[:1].isnan(), math.nan)))

        return self._summed(rows, octaves(length), of)

    def differences(self, rows: AttentionRows, length: int) -> Tensor | None:
        """`DIFFERENCES` at each temperature and step, of the query that sees most keys; fp64 but for the norm.

        Logits are scores times sqrt(D), D the head size, so that T = sqrt(D) is the model as it is: in arXiv 2508.17821 they are q.k / T.
        """

        def of(part: AttentionRows, most: int) -> Tensor:
            part = part.select(torch.tensor([len(part.n) - 1], device=part.n.device))
            logits = part.scores.masked_fill(~part.visible, 0.0).unsqueeze(0) * math.sqrt(part.normalizer.layer.head_size)  # (1, H, T, S)
            along = directions(part.visible, torch.Size((self.asked.directions, *logits.shape[1:])), generator)
            temperatures = torch.tensor(self.asked.temperatures).view(-1, 1, 1, 1).to(logits)
            stacked = logits.expand(len(temperatures), -1, -1, -1)
            norms = spectral_norm(
                lambda given: part.normalizer.normalize(given / temperatures, part.layout), stacked, part.visible, generator
            )
            found = []
            for temperature, norm in zip(self.asked.temperatures, norms, strict=True):
                for step in self.asked.steps:
                    rates = finite_difference(
                        lambda given, t=temperature: part.normalizer.normalize(given / t, part.layout), logits, step, along
                    )
                    found.append(torch.stack((rates[0], rates.amax(0), norm.double())))
            return torch.stack(found, 1)

        generator = _generator(rows)
        return self._summed(rows, octaves(length)[-1:], of)

    def vectors(self, rows: AttentionRows) -> Tensor:
        """x of each key, (1, S, E), or of each head and key, (H, S, E)."""
        x = {"embedding": rows.embedding, "input": rows.inputs.x, "value": rows.inputs.v[0]}[self.asked.vectors].float()
        return F.normalize(x, dim=-1) if self.asked.unit else x

    def _by_rows(self, rows: AttentionRows, points: int, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """What `of` gives of weights (R, S), visible keys (R, S) and x (S, E), (quantities, G, R), of all rows: (quantities, G, H, T)."""
        seen = rows.visible.any(0).nonzero().squeeze(-1)
        keys = slice(int(seen[0]), int(seen[-1]) + 1)
        x, weights = self.vectors(rows)[:, keys], rows.weights[..., keys]
        heads, queries, width = weights.shape
        size = max(1, PRODUCTS // (points * width))
        found = []
        for index, vectors in enumerate(x):  # one of all heads, or one a head
            own = weights if len(x) == 1 else weights[index : index + 1]
            visible = rows.visible[:, keys].expand(own.shape).flatten(0, 1)
            found += [of(*both, vectors) for both in zip(own.flatten(0, 1).split(size), visible.split(size), strict=True)]
        return torch.cat(found, -1).unflatten(-1, (heads, queries))

    def _summed(self, rows: AttentionRows, bounds: Sequence[tuple[int, int]], of: Callable[[AttentionRows, int], Tensor]) -> Tensor | None:
        """Sums and numbers of rows, (H, P), of what `of` gives of the rows within each of the `bounds`: (quantities, G, H, T)."""
        rows = rows if self.asked.first_token else rows.without_first
        found = []
        for low, high in bounds:
            inside = ((rows.n >= low) & (rows.n <= high)).nonzero().squeeze(-1)
            if len(inside):
                part = rows.select(inside)
                values = of(part, high).masked_fill(~part.is_defined, math.nan)
                found.append(torch.stack((values.nan_to_num(nan=0.0).sum(-1), (~values.isnan()).sum(-1).to(values))))
            else:
                found.append(None)
        like = next((one for one in found if one is not None), None)
        if like is None:
            return None
        return torch.stack([torch.zeros_like(like) if one is None else one for one in found]).movedim(-1, 0).flatten(1)


def _generator(rows: AttentionRows) -> torch.Generator:
    """A generator that is the same for each model of the same sequence and layer."""
    return torch.Generator().manual_seed(1_000 * rows.seed + rows.layer)
