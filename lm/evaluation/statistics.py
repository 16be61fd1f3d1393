"""Intervals: percentile bootstrap over rows or documents, Student t over seeds, Wilson for shares. Seeded, numpy only."""

from dataclasses import dataclass, replace

import numpy as np

from lm.runs.series import Series

FEWEST = 8  # rows or documents; below, a bootstrap interval says nothing
_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
_T = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)  # the same of t, 1-10 d.f.


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; NaN where a value was not finite.

    `over` says what it covers, such as `3 seeds` or `documents, 1 seed`: the noise that would move it in another sample of these.
    """

    mean: float
    low: float
    high: float
    over: str = ""

    def listed(self) -> list[float]:
        """As results keep it: [mean, low, high]."""
        return [self.mean, self.low, self.high]


def groups_of(documents: np.ndarray) -> np.ndarray | None:
    """Rows that are to be resampled together, (rows,): those of one document, if there are at least `FEWEST` documents; else None."""
    return documents if len(np.unique(documents)) >= FEWEST else None


def unit_resampled(documents: np.ndarray) -> str:
    """What a bootstrap resamples of rows of these documents: `documents` where `groups_of` has groups of several rows, else `rows`."""
    return "documents" if FEWEST <= len(np.unique(documents)) < len(documents) else "rows"


def interval_of(one: Series, column: int, mean: float | None = None) -> Interval | None:
    """The interval of a column's mean (or of another that is as well known); None if the series has none, or too few units for one."""
    mean = float(one.means[column]) if mean is None else mean
    if one.interval == "none":
        return None
    sample, values = one.column(column)
    if one.interval == "wilson":
        asked = int(sample.weights.sum())
        return replace(wilson(mean * asked, asked), over="questions, 1 seed")
    if len(values) < FEWEST:
        return None
    (low,), (high,) = bootstrap_mean(values[:, None], sample.weights, groups_of(sample.groups))
    return Interval(mean, float(low), float(high), f"{unit_resampled(sample.groups)}, 1 seed")


def paired_difference(
    a: np.ndarray,
    b: np.ndarray,
    weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 10_000,
) -> Interval:
    """Mean of a - b over rows, with the 95 % percentile bootstrap interval over the choice of rows.

    Args:
        a, b: (rows,) the same rows under two models, such as nats per token.
        weights, groups: as of `bootstrap_mean`.
        seed: of the resampling.

    Raises:
        ValueError: shapes that differ, or aren't (rows,).
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired rows need equal shapes (rows,), not {a.shape} and {b.shape}")
    with np.errstate(invalid="ignore"):
        difference = a - b
    low, high = bootstrap_mean(difference[:, None], weights, groups, seed, resamples)
    mean = np.average(difference, weights=weights) if np.isfinite(difference).all() else np.nan
    return Interval(float(mean), float(low[0]), float(high[0]))


def bootstrap_mean(
    values: np.ndarray,
    weights: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    seed: int = 0,
    resamples: int = 10_000,
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % percentile bootstrap interval of the mean over rows, each (columns,).

    A column that isn't all finite gives NaN.

    Args:
        values: (rows, columns); rows are resampled whole.
        weights: (rows,) of the rows, such as how many tokens each has; None: all alike.
        groups: (rows,) labels; rows of one label, such as a document's, are resampled together (Davison and Hinkley 1997,
            sec. 3.8), as they are not independent. None: each by itself.
    """
    rows, columns = values.shape
    finite = np.isfinite(values).all(axis=0)
    weights = np.ones(rows) if weights is None else np.asarray(weights, dtype=float)
    sums = weights[:, None] * np.where(finite, values, 0.0)
    if groups is not None:
        names, label = np.unique(groups, return_inverse=True)
        by_row, sums = sums, np.zeros((len(names), columns))
        np.add.at(sums, label, by_row)
        weights = np.bincount(label, weights)
    units = len(sums)
    generator = np.random.default_rng(seed)
    means = np.empty((resamples, columns))
    chunk = max(1, 4_000_000 // units)  # bounds the memory of the counts
    for start in range(0, resamples, chunk):
        counts = generator.multinomial(units, np.full(units, 1 / units), size=min(chunk, resamples - start))  # (chunk, units)
        means[start : start + chunk] = counts @ sums / (counts @ weights)[:, None]
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return np.where(finite, low, np.nan), np.where(finite, high, np.nan)


def over_seeds(values: np.ndarray) -> Interval:
    """Mean over seeds with the 95 % Student t interval; `values` is (seeds,), at least two."""
    values = np.asarray(values, dtype=float)
    over = f"{len(values)} seeds"
    if not np.isfinite(values).all():
        return Interval(np.nan, np.nan, np.nan, over)
    half = t_quantile(len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return Interval(float(values.mean()), float(values.mean() - half), float(values.mean() + half), over)


def wilson(right: float, trials: int) -> Interval:
    """A share of independent trials with its 95 % Wilson score interval (1927), which stays within 0 and 1; NaN without trials.

    `right` is a fraction where each trial is a mean, over depths, say: the interval is then as wide as if they were all alike.
    """
    if not trials:
        return Interval(np.nan, np.nan, np.nan)
    share, scale = right / trials, 1 + _Z**2 / trials
    middle = (share + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * np.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    # At the ends the bound is the share itself, which rounding may miss.
    return Interval(share, 0.0 if right == 0 else float(middle - half), 1.0 if right == trials else float(middle + half))


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t: a table to 10 degrees of freedom, then Cornish-Fisher (error below 1e-4)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, v = _Z, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))
