"""The limits of normalization (Mudarisov et al. 2025, arXiv 2508.17821) of a model's attention: the family `limits` of statistics.

Lemmas 1 and 2 by row: `lm.diagnostics.lemmas`. Theorems 1 and 2 and the critical number of keys (Algorithm 3, by two-sample
Kolmogorov-Smirnov tests) follow here from the sums of `lm.diagnostics.theorems`. What the paper leaves open (which vectors, divided by
their length or not, with or without the first token) is an option, `eval.diagnostics.limits`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.config.eval_config import LimitsConfig
from lm.diagnostics import lemmas
from lm.diagnostics.measures import mean, visible_keys
from lm.diagnostics.rows import Accumulated, AttentionRows, Derived, Family, Statistic, Values
from lm.diagnostics.theorems import DIFFERENCES, DISTANCES, SEPARABLE, Theorems, few, many, means, octaves, parts
from lm.runs.series import Axis


@dataclass(frozen=True)
class Compared:
    """Two samples, such as heads' mean distances of the largest weights and of random keys, compared for each number of keys N.

    Attributes:
        counts: the numbers N.
        statistic: (G,) largest difference of the two distribution functions, D; NaN where a sample is empty.
        p: (G,) p values of the two-sided test.
        size: values in each sample; D of two small samples is large by chance.
    """

    counts: Sequence[int]
    statistic: np.ndarray
    p: np.ndarray
    size: int

    def critical(self, level: float) -> float:
        """The smallest N at which the test at `level` does not reject that the samples are of one distribution; NaN if it does at all N."""
        accepted = np.flatnonzero(self.p >= level)
        return float(self.counts[accepted[0]]) if len(accepted) else float("nan")


def compared(first: np.ndarray, second: np.ndarray, counts: Sequence[int]) -> Compared:
    """Two samples of equal size for each N, (size, G); values that are not finite are left out."""
    from scipy.stats import ks_2samp

    results = []
    for one, other in zip(first.T, second.T, strict=True):
        one, other = one[np.isfinite(one)], other[np.isfinite(other)]
        results.append(ks_2samp(one, other) if len(one) and len(other) else (np.nan, np.nan))
    statistic, p = np.array(results, dtype=float).T
    return Compared(counts, statistic, p, len(first))


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
    found = np.concatenate(means)
    return found[np.linspace(0, len(found) - 1, min(size, len(found))).round().astype(int)]


# ---------------------------------------------------------------- the family


LEVELS = (0.01, 0.05)  # both levels that the paper names, in tests for the critical number of keys
TESTED = (1, 2, 4)  # places in `DISTANCES` of the expectations that the largest weights are compared with
OVER_LENGTH = 5  # keys chosen, in the curves by the number of visible keys
PLATEAU = 16  # keys chosen, from which on the paper has N_s / N between .70 and .85


def family(asked: LimitsConfig, every: int) -> Family:
    """Statistics of the lemmas and the theorems. `every`: of how many described queries one is taken, but for Lemma 1."""
    theorems = Theorems(asked)

    def some(of: Callable[[AttentionRows], Tensor | None]) -> Callable[[AttentionRows], Tensor | None]:
        """The values of every so many queries, NaN of the others."""

        def sparse(rows: AttentionRows) -> Tensor | None:
            chosen = _some(rows, every)
            value = of(rows.select(chosen))
            return None if value is None else torch.full_like(rows.n, math.nan).repeat(len(value), 1).index_copy(1, chosen, value.float())

        return sparse

    def norm(rows: AttentionRows) -> Tensor:
        return lemmas.jacobian_norm(rows, torch.Generator().manual_seed(0))

    def sums(of: Callable[[AttentionRows, int], Tensor | None]) -> Callable[[AttentionRows, int], Tensor | None]:
        return lambda rows, length: of(rows.select(_some(rows, every)), length)

    steps = len(asked.temperatures) * len(asked.steps)
    return Family(
        (
            Statistic("n x largest weight", "", lemmas.n_times_largest, fitted=True),
            Statistic("Lemma 1: ln (n x largest weight)", "nats", lemmas.log_n_times_largest),
            Statistic("Lemma 1: ln (n x smallest weight)", "nats", lemmas.log_n_times_smallest),
            Statistic("Lemma 1: ln C2 = -ln C1", "nats", lemmas.log_c2),
            Statistic("norm of the Jacobian", "", some(norm), shown=True, fitted=True),
            Statistic("bound on the norm of the Jacobian", "", some(lemmas.jacobian_ceiling)),
        ),
        (
            Accumulated(
                "distances", "", lambda length: 2 * len(octaves(length)) * len(DISTANCES) * len(many(length)), sums(theorems.distances)
            ),
            Accumulated(
                "separability", "", lambda length: 2 * len(octaves(length)) * len(SEPARABLE) * len(few(length)), sums(theorems.separable)
            ),
            Accumulated("differences", "", lambda length: 2 * len(DIFFERENCES) * steps, sums(theorems.differences)),
        ),
        lambda values: [one for part in (_distances, _critical, _separable, _differences) for one in part(asked, values)],
    )


def _some(rows: AttentionRows, every: int) -> Tensor:
    return torch.arange(len(rows.n) - 1, -1, -every, device=rows.n.device).flip(0)  # the last query is always among them


def _chosen(counts: list[int]) -> Axis:
    return Axis("keys N", "", "for N =", tuple(map(float, counts)))


def _over_heads(values: np.ndarray) -> np.ndarray:
    """Means over layers and heads, the last two axes."""
    return mean(values, (-2, -1))


def _distances(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """d~ and its expectations: over N where most keys are visible, and by the number of visible keys at one N."""
    counts = many(values.length)
    found = _over_heads(means(values.sums["distances"].sum(0), DISTANCES, len(counts)))  # (octaves, quantities, N)
    for number, what in enumerate(DISTANCES):
        yield Derived("d~", "", found[-1, number], _chosen(counts), shown=True, what=what)
    if OVER_LENGTH in counts:
        for number, what in enumerate(DISTANCES):
            of_lengths = found[:, number, counts.index(OVER_LENGTH)]
            yield Derived(f"d~ of {OVER_LENGTH} keys", "", of_lengths, visible_keys(octaves(values.length)), shown=True, what=what)


def _critical(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """Critical numbers of keys over visible ones, and the D that they follow from."""
    counts, bounds = many(values.length), octaves(values.length)
    found = {(octave, which): _compared(asked, values, octave, which) for octave in range(len(bounds)) for which in TESTED}
    visible = [_mean_keys(values, *octave) for octave in bounds]
    for which in TESTED:
        last = found[len(bounds) - 1, which]
        yield Derived(
            "D of the largest weights", "", last.statistic, _chosen(counts), shown=True, what=f"to {DISTANCES[which]}, {last.size} values"
        )
        for level in LEVELS:
            fractions = np.array([found[octave, which].critical(level) / keys for octave, keys in enumerate(visible)])
            what = f"{DISTANCES[which]}, level {level:g}"
            yield Derived("critical N / visible keys", "fraction", fractions, visible_keys(octaves(values.length)), shown=True, what=what)


def _compared(asked: LimitsConfig, values: Values, octave: int, which: int) -> Compared:
    """Heads' mean d~ of the largest weights and one expectation of it, of one octave."""
    total, rows = parts(values.sums["distances"], DISTANCES, len(many(values.length)))  # (octaves, quantities, N, sequences, layers, H)
    both = []
    for quantity in (0, which):
        one, count = (np.moveaxis(part[octave, quantity], 0, -1) for part in (total, rows))  # (sequences, layers, H, N)
        flat = (len(one), -1, one.shape[-1])
        both.append(samples(one.reshape(flat), count.reshape(flat), asked.sample_size))
    return compared(*both, many(values.length))


def _mean_keys(values: Values, low: int, high: int) -> float:
    """How many keys the queries of an octave see on average."""
    inside = values.n[(values.n >= low) & (values.n <= high)]
    return float(inside.mean()) if len(inside) else math.nan


def _separable(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """N_s / N over N where most keys are visible, and by at least one of a layer's heads."""
    counts = few(values.length)
    found = means(values.sums["separability"].sum(0), SEPARABLE, len(counts))[-1]  # (quantities, N, layers, H)
    for name, lines in (("N_s / N", (0, 1, 2)), ("d~ of the largest weights / its bound", (3,))):
        for number in lines:
            what = SEPARABLE[number] if len(lines) > 1 else ""
            yield Derived(name, "fraction", _over_heads(found[number]), _chosen(counts), shown=name == "N_s / N", what=what)
    alone = mean(found[0], -1)  # p, by layer
    predicted = 1 - (1 - alone) ** found.shape[-1]
    title = "keys that at least one head separates"
    yield Derived(title, "fraction", _over_heads(found[4]), _chosen(counts), what="measured")
    yield Derived(title, "fraction", _over_heads(predicted[..., None]), _chosen(counts), what="1 - (1 - p)^H")
    yield Derived("heads that choose a key", "heads", _over_heads(found[5]), _chosen(counts))
    if PLATEAU in counts:
        yield Derived(f"N_s / N of {PLATEAU} keys", "fraction", _over_heads(found[0])[[counts.index(PLATEAU)]])


def _differences(asked: LimitsConfig, values: Values) -> Iterator[Derived]:
    """Finite differences and the spectral norm over the temperature: the largest of the heads' means, as in the paper."""
    shape = len(asked.temperatures), len(asked.steps)
    found = means(values.sums["differences"].sum(0), DIFFERENCES, shape[0] * shape[1])[0]
    largest = np.nan_to_num(found, nan=-np.inf).max((-2, -1)).reshape(len(DIFFERENCES), *shape)
    largest[np.isneginf(largest)] = np.nan
    axis = Axis("temperature T", "", "at T =", tuple(asked.temperatures))
    for index, step in enumerate(asked.steps):
        for number in (0, 1):
            what = f"{DIFFERENCES[number]}, step {step:g}"
            yield Derived("change of weights", "", largest[number, :, index], axis, shown=True, what=what)
    yield Derived("change of weights", "", largest[2, :, 0], axis, shown=True, what=DIFFERENCES[2])
