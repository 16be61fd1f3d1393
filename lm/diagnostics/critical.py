"""The critical number of keys of Mudarisov et al. 2025 (arXiv 2508.17821, Algorithm 3), by two-sample Kolmogorov-Smirnov tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
