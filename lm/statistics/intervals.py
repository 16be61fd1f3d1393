"""Intervals over documents, over training seeds, over both, and of fractions of trials; 95 % unless several hold together.

Everything here is in closed form: no resampling, no seed.
"""

from dataclasses import dataclass, replace

import numpy as np

from lm.runs.evaluations import Series

ALPHA = 0.05  # the chance that an interval, or any of several that hold together, misses the true value
FEWEST_DOCUMENTS = 3  # documents; below, an interval over them says nothing
FEWEST_CROSSED = 8  # documents, for an interval over seeds and documents at once
_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; NaN where a value was not finite.

    `over` says what it covers, such as `3 seeds` or `documents, 1 seed`: the noise that would move it in another sample of these.
    """

    mean: float
    low: float
    high: float
    over: str = ""

    @property
    def bounded(self) -> bool:
        """Whether the interval says something: without spread it has no length, or no ends (`Estimate.half`)."""
        return bool(np.isfinite([self.low, self.high]).all() and self.low < self.high)

    def drawn(self) -> list[float]:
        """[mean, low, high] of a picture: without spread the mean alone."""
        return self.listed() if self.bounded else [self.mean] * 3

    def listed(self) -> list[float]:
        """The interval as results keep it: [mean, low, high]."""
        return [self.mean, self.low, self.high]


@dataclass(frozen=True)
class Estimate:
    """Means of one or of many samples of the same size, of which intervals and tests are made; NaN where a value was not finite.

    Student's t takes the spread of a sample as an estimate. A sample without spread gives none, however many ties made it so: the exact
    sign-flip test decides in its place, by which n equal values have p = 2^-n on the side where they lie.

    Attributes:
        mean, error, degrees: (...,), the standard errors of the means, and degrees of freedom of Student's t.
        over: what the intervals cover, as of `Interval`.
        floors: estimates of the same means; this one's intervals are at least as long as theirs.
    """

    mean: np.ndarray
    error: np.ndarray
    degrees: np.ndarray
    over: str
    floors: tuple["Estimate", ...] = ()

    def __getitem__(self, at: int | slice | tuple[int | slice, ...]) -> "Estimate":
        """The estimates of some of the samples, as an array is indexed."""
        return Estimate(self.mean[at], self.error[at], self.degrees[at], self.over, tuple(floor[at] for floor in self.floors))

    def half(self, together: int = 1) -> np.ndarray:
        """Half the length of the interval, (...,), so that so many `together` hold with 95 % (Bonferroni). Without spread it is 0, or
        infinite where so few values can't bring the sign-flip test to that level."""
        from scipy.special import stdtrit  # takes a quarter of a second to import, which most runs need not

        tail = ALPHA / 2 / together
        unspread = np.where(0.5 ** (self.degrees + 1) <= tail, 0.0, np.inf)
        half = np.where(self.error == 0, unspread, stdtrit(self.degrees, 1 - tail) * self.error)
        return np.maximum.reduce([half, *(floor.half(together) for floor in self.floors)])

    def p(self, at: float, sign: int) -> np.ndarray:
        """One-sided p, (...,), that a mean is not below (`sign` 1), or not above (-1), a value: at most 0.025 / together where `half` of so
        many leaves the value out on that side."""
        from scipy.special import stdtr

        distance = sign * (self.mean - at)
        unspread = np.where(distance < 0, 0.5 ** (self.degrees + 1), 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.error == 0, unspread, stdtr(self.degrees, distance / self.error))

    def interval(self, together: int = 1) -> Interval:
        """The interval of a single sample."""
        mean, half = float(self.mean), float(self.half(together))
        return Interval(mean, mean - half, mean + half, self.over)


def _estimate(mean: np.ndarray, variance: np.ndarray, degrees: np.ndarray, largest: np.ndarray, over: str = "") -> Estimate:
    """The estimate of a mean from its variance; a spread that is mere rounding of the `largest` value counts as none."""
    error = np.sqrt(variance)
    return Estimate(mean, np.where(error <= 1e-9 * largest, 0.0, error), np.broadcast_to(degrees, np.shape(mean)), over)


def sampled(groups: np.ndarray) -> str:
    """The units that an interval over these groups covers: `documents` where some hold several units, else `sequences`."""
    return "documents" if len(np.unique(groups)) < len(groups) else "sequences"


def interval_of(series: Series, column: int, mean: float | None = None) -> Interval | None:
    """The interval of a column's mean (or of another that is as well known); None if the series has none, or too few units for one."""
    mean = float(series.means[column]) if mean is None else mean
    if series.interval == "none":
        return None
    sample, values = series.column(column)
    if series.interval == "wilson":
        right, asked = by_group(values * sample.weights, sample.groups), by_group(sample.weights, sample.groups)
        trials, unit = effective_trials(right, asked), "sequences" if asked.max() > 1 else "questions"
        return replace(wilson(mean * trials, trials), over=f"{unit}, 1 seed")
    if len(np.unique(sample.groups[sample.weights > 0])) < FEWEST_DOCUMENTS:
        return None
    (low,), (high,) = mean_ends(values[:, None], sample.weights, sample.groups)
    return Interval(mean, float(low), float(high), f"{sampled(sample.groups)}, 1 seed")


def paired_difference(a: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None, groups: np.ndarray | None = None) -> Interval:
    """Mean of a - b over units, such as sequences, with its interval over the documents they are from.

    Args:
        a, b: (units,) the same units under two models, such as nats per token.
        weights, groups: as of `mean_ends`.

    Raises:
        ValueError: shapes that differ, or aren't (units,).
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired units need equal shapes (units,), not {a.shape} and {b.shape}")
    with np.errstate(invalid="ignore"):
        difference = a - b
    low, high = mean_ends(difference[:, None], weights, groups)
    mean = np.average(difference, weights=weights) if np.isfinite(difference).all() else np.nan
    return Interval(float(mean), float(low[0]), float(high[0]))


def mean_ends(values: np.ndarray, weights: np.ndarray | None = None, groups: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % interval of the weighted mean over units, each (columns,): Student t over documents.

    The mean is a ratio of sums over documents. Its variance is that of the documents' residual sums, each divided by 1 - its part of
    the weight (Bell and McCaffrey 2002, CR2). Student's t has their Satterthwaite degrees of freedom: of documents of equal
    weight D - 1; fewer where few documents have most of the weight. A column that isn't all finite gives NaN.

    Args:
        values: (units, columns).
        weights: (units,), such as how many tokens each has; None: all alike.
        groups: (units,) labels; units of one label, such as a document's sequences, are not independent of each other. None: each is.

    Raises:
        ValueError: fewer than two groups have weight.
    """
    finite = np.isfinite(values).all(axis=0)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=float)
    labels = np.arange(len(values)) if groups is None else np.unique(groups, return_inverse=True)[1]
    values = np.where(finite, values, 0.0)
    mean, variance, degrees = _mean_variance(values, weights, labels)
    half = _estimate(mean, variance, degrees, np.abs(values).max(0)).half()
    return np.where(finite, mean - half, np.nan), np.where(finite, mean + half, np.nan)


def _mean_variance(values: np.ndarray, weights: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Means (columns,), for `mean_ends`, the variances of these (columns,), and the degrees of freedom; `labels`: (units,) numbers."""
    part = np.bincount(labels, weights) / weights.sum()  # (documents,) each one's part of the weight
    mean = weights @ values / weights.sum()
    residuals = np.zeros((len(part), values.shape[1]))
    np.add.at(residuals, labels, weights[:, None] / weights.sum() * (values - mean))
    residuals, part = residuals[part > 0], part[part > 0]
    if len(part) < 2:
        raise ValueError("an interval needs at least two documents")
    variance = (residuals**2 / (1 - part[:, None])).sum(0)
    # Were all documents alike but for their weight, the variance would be a quadratic form in them of matrix G; trace(G)^2 / trace(G G).
    u, square = part**2 / (1 - part), (part**2).sum()
    first, second = u @ part, u @ part**2
    traced = (u * (1 + square - 2 * part)).sum()
    squared = square**2 * u.sum() ** 2 - 4 * square * u.sum() * first + 2 * u.sum() * second + 2 * first**2
    squared += (u**2 * ((1 + square - 2 * part) ** 2 - (square - 2 * part) ** 2)).sum()
    return mean, variance, float(traced**2 / squared)


def over_seeds(values: np.ndarray) -> Estimate:
    """The mean over seeds with Student's t; `values` is (..., seeds), at least two."""
    values = np.asarray(values, dtype=float)
    seeds, finite = values.shape[-1], np.isfinite(values).all(-1, keepdims=True)
    values = np.where(finite, values, np.nan)
    return _estimate(values.mean(-1), values.var(-1, ddof=1) / seeds, seeds - 1, np.abs(values).max(-1), f"{seeds} seeds")


def trend(differences: np.ndarray, sizes: np.ndarray) -> Interval:
    """The change of a difference with each doubling of size: the mean over seeds of least-squares slopes, with Student's t over seeds.

    Args:
        differences: (sizes, seeds), of one seed at every size; at least two seeds.
        sizes: (sizes,), at least two different ones, such as numbers of parameters.
    """
    doublings = np.log2(np.asarray(sizes, dtype=float))
    centred = doublings - doublings.mean()
    return over_seeds(centred @ np.asarray(differences, dtype=float) / (centred @ centred)).interval()


def over_seeds_and_documents(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> Estimate | None:
    """The mean over seeds and documents, for intervals over both: what other seeds and other text of the kind would give.

    Seeds and documents are crossed: each seed's model reads each document. The variance is that between seeds' means, plus that between
    documents' means, minus what both hold of the interaction (Cameron, Gelbach and Miller 2011). It is at least the greater of the
    first two; degrees of freedom after Satterthwaite.

    Args:
        values: (..., seeds, units), such as paired differences in nats per token.
        weights, groups: (units,), as of `mean_ends`.

    Returns:
        None: fewer than two seeds or `FEWEST_CROSSED` documents, or values that are not finite.
    """
    weights, (*outer, seeds, units) = np.asarray(weights, dtype=float), values.shape
    labels = np.unique(groups, return_inverse=True)[1]
    within = np.bincount(labels, weights)
    kept = within > 0
    if seeds < 2 or kept.sum() < FEWEST_CROSSED or not np.isfinite(values).all():
        return None
    per_seed = values @ weights / weights.sum()
    of_seeds, seed_degrees = per_seed.var(-1, ddof=1) / seeds, seeds - 1
    mean, of_documents, document_degrees = _mean_variance(values.mean(-2).reshape(-1, units).T, weights, labels)
    mean, of_documents = mean.reshape(outer), of_documents.reshape(outer)
    sums = np.zeros((len(within), *values.T.shape[1:]))
    np.add.at(sums, labels, (weights * values).T)
    sums = sums.T[..., kept]
    interaction = sums - sums.mean(-2, keepdims=True) - (per_seed - per_seed.mean(-1, keepdims=True))[..., None] * within[kept]
    of_both = (interaction**2).sum((-2, -1)) / (seeds * (seeds - 1)) / weights.sum() ** 2
    total, largest, over = of_seeds + of_documents, np.abs(values).max((-2, -1)), f"{seeds} seeds and {kept.sum()} documents"
    below = of_seeds**2 / seed_degrees + of_documents**2 / document_degrees
    degrees = np.divide(total**2, below, out=np.full(total.shape, float(seed_degrees)), where=below > 0)
    floors = _estimate(mean, of_seeds, seed_degrees, largest, over), _estimate(mean, of_documents, document_degrees, largest, over)
    return replace(_estimate(mean, np.maximum(total - of_both, 0.0), degrees, largest, over), floors=floors)


def by_group(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sums of values (units,) over the units of each label in `groups` (units,): (groups,)."""
    return np.bincount(np.unique(groups, return_inverse=True)[1], values)


def effective_trials(right: np.ndarray, asked: np.ndarray) -> float:
    """How many independent trials the questions of several sequences are worth: at most as many as there are questions.

    That is their number over the design effect, the variance of the right answers between sequences over the binomial one (Kish 1965;
    Korn and Graubard 1998). It is taken with two more sequences of mean size, one all right and one all wrong, as Agresti and Coull (1998)
    add to a fraction: where nearly all are right or wrong it is that of sequences which are so as a whole, and all right (or wrong) of M
    sequences are M trials. With one question in each sequence the effect is 1.

    Args:
        right, asked: (sequences,) questions that were answered right, which may be fractional, and all of them.
    """
    total = float(asked.sum())
    if not total:
        return 0.0
    size = asked[asked > 0].mean()
    right, asked = np.append(right, [size, 0]), np.append(asked, [size, size])
    fraction = right.sum() / asked.sum()
    binomial = fraction * (1 - fraction) * asked.sum()
    return total / float(np.maximum(1.0, ((right - fraction * asked) ** 2).sum() / binomial))


def wilson(right: float, trials: float) -> Interval:
    """A fraction of independent trials with its 95 % Wilson score interval (1927), which stays within 0 and 1; NaN without trials.

    `right` may be fractional where each trial is a mean, over depths, say: the interval is then as wide as if they were all alike. So may
    `trials`, of dependent ones (`effective_trials`).
    """
    if not trials:
        return Interval(np.nan, np.nan, np.nan)
    fraction, scale = right / trials, 1 + _Z**2 / trials
    middle = (fraction + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * np.sqrt(fraction * (1 - fraction) / trials + _Z**2 / (4 * trials**2))
    # At the ends the bound is the fraction itself, which rounding may miss.
    return Interval(fraction, 0.0 if right == 0 else float(middle - half), 1.0 if right == trials else float(middle + half))
