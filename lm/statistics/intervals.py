"""Intervals of means over documents, over training seeds or over both, and of fractions of trials; each holds with 95 %
by default. A `Family` gives the level at which several comparisons with one baseline hold together with 95 %.

No interval uses resampling (bootstrap).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import starmap

import numpy as np
import scipy  # its parts are imported at their first use, as they take half a second that most commands need not
from numpy.polynomial import Chebyshev

ALPHA = 0.05  # probability that an interval, or any interval of a family, misses the true value
MIN_DOCUMENTS = 3  # an interval over fewer documents says nothing
MIN_DOCUMENTS_WITH_SEEDS = 8  # fewest documents of an interval over seeds and documents at once
_NORMAL_QUANTILE = 1.959963984540054  # 97.5 % quantile of the normal distribution
MAX_CORRELATION = 0.5  # largest correlation that is credited: the one of arms that scatter like their baseline
CORRELATION_STEP = 0.05  # correlations are rounded down to a multiple, so that experiments share quadratures
# numbers of quadrature nodes over the shared factor's mean, its sum of squares, and a statistic's standard error
_QUADRATURE_NODES = {"factor_mean": 24, "factor_squares": 20, "standard_error": 60}
_SMALLEST_P = 1e-5  # p from which on the correlation counts fully
MAX_DEGREES = 100  # more degrees of freedom count as these


@dataclass(frozen=True)
class Interval:
    """Holds a mean and its interval, which holds with 95 % by itself or together with the other intervals of a family.
    All numbers are NaN if a measured value was not finite.

    `noise_source` names the sampled units whose noise the interval covers, such as `3 seeds` or `documents, 1 seed`.
    """

    mean: float
    low: float
    high: float
    noise_source: str = ""

    @property
    def is_bounded(self) -> bool:
        """Return whether both ends are finite and differ. Equal values have no interval: it is then False."""
        return bool(np.isfinite([self.low, self.high]).all() and self.low < self.high)

    def as_list(self) -> list[float]:
        """Return the interval as result files hold it, [mean, low, high]."""
        return [self.mean, self.low, self.high]


@dataclass(frozen=True)
class Estimate:
    """Holds the means of one or many samples of equal size and their standard errors, for intervals and tests. A mean
    is NaN if a value in its sample was not finite.

    Student's t estimates the spread from the sample. As a sample of equal values has no spread to estimate, the exact
    sign-flip test then decides in place of t. Its p of the hypothesis that the mean is not above 0 is 2^-n for n equal
    values above 0.
    """

    # (...,) each: means, their standard errors, and degrees of freedom of Student's t
    mean: np.ndarray
    standard_error: np.ndarray
    degrees_of_freedom: np.ndarray
    noise_source: str  # the units whose noise the intervals cover, as in `Interval`
    # other estimates of the same means: intervals of this estimate are at least as long as the intervals of each of
    # them
    minimum_width_estimates: tuple["Estimate", ...] = ()

    def half_width(self, alpha: float = ALPHA) -> np.ndarray:
        """Return half the length of the interval of each mean, (...,), which misses the true mean with probability
        `alpha`.

        For a sample of equal values the result is 0. It is infinite if such a sample has too few values for the
        sign-flip test to reach a two-sided p of `alpha`.
        """
        exact_half = np.where(0.5 ** (self.degrees_of_freedom + 1) <= alpha / 2, 0.0, np.inf)
        half = np.where(
            self.standard_error == 0,
            exact_half,
            scipy.special.stdtrit(self.degrees_of_freedom, 1 - alpha / 2) * self.standard_error,
        )
        return np.maximum.reduce([half, *(floor.half_width(alpha) for floor in self.minimum_width_estimates)])

    def one_sided_p(self, null_sign: int) -> np.ndarray:
        """Return the one-sided p, (...,), of the null hypothesis that the mean is at least 0 (`null_sign` 1), or at
        most 0 (`null_sign` -1).

        p is at most alpha / 2 where the interval by `half_width(alpha)` lies below 0 (`null_sign` 1) or above 0
        (`null_sign` -1).
        """
        distance = null_sign * self.mean
        exact_p = np.where(distance < 0, 0.5 ** (self.degrees_of_freedom + 1), 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(
                self.standard_error == 0,
                exact_p,
                scipy.special.stdtr(self.degrees_of_freedom, distance / self.standard_error),
            )

    def interval(self) -> Interval:
        """Return the interval of the mean of a single sample."""
        mean, half = float(self.mean), float(self.half_width())
        return Interval(mean, mean - half, mean + half, self.noise_source)


def _make_estimate(
    mean: np.ndarray, variance: np.ndarray, degrees: np.ndarray, largest_value: np.ndarray, noise_source: str
) -> Estimate:
    """Make the estimate of means from their variances. A standard error up to 1e-9 times `largest_value` is rounding,
    and set to 0."""
    error = np.sqrt(variance)
    return Estimate(
        mean,
        np.where(error <= 1e-9 * largest_value, 0.0, error),
        np.broadcast_to(degrees, np.shape(mean)),
        noise_source,
    )


def interval_over_questions(values: np.ndarray, weights: np.ndarray, groups: np.ndarray, mean: float) -> Interval:
    """Return Wilson's 95 % interval of `mean`, the fraction of right answers over sequences that ask questions.

    Args:
        values, weights, groups: (units,), each unit's fraction of right answers, number of questions, and sequence.
    """
    labels = np.unique(groups, return_inverse=True)[1]
    right_answers, questions = np.bincount(labels, values * weights), np.bincount(labels, weights)
    trials, unit = effective_trials(right_answers, questions), "sequences" if questions.max() > 1 else "questions"
    return replace(wilson_interval(mean * trials, trials), noise_source=f"{unit}, 1 seed")


def is_unlearned(
    mean: float, unlearned_level: float, better: str, values: np.ndarray, weights: np.ndarray, groups: np.ndarray | None
) -> bool:
    """Return whether `mean` is not better than `unlearned_level`, the value of the metric for a model that has learned
    nothing. False if `unlearned_level` or `mean` is NaN.

    A fraction of right answers is better only if the lower end of its 95 % interval is above `unlearned_level`. A
    metric counts as such a fraction if higher is better, `groups` is given, and all `values` are within 0 and 1.
    `values`, `weights` and `groups` are as for `interval_over_questions`; `better` is `lower` or `higher`.
    """
    if better == "lower":
        return bool(mean >= unlearned_level)
    is_fraction = groups is not None and mean > unlearned_level and ((values >= 0) & (values <= 1)).all()
    return bool(
        (interval_over_questions(values, weights, groups, mean).low if is_fraction else mean) <= unlearned_level
    )


def interval_over_documents(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> Interval | None:
    """Return the weighted mean over units, such as sequences, with its 95 % interval by Student's t over the documents
    of the units.

    The mean is a ratio of sums over documents. Its variance is the sum of the documents' squared residual sums, each
    divided by 1 minus the document's fraction of the weight (Bell and McCaffrey 2002, CR2). Student's t has
    Satterthwaite degrees of freedom: D - 1 for D documents of equal weight; fewer where few documents have most of the
    weight. Values that aren't all finite give NaN.

    Args:
        values: (units,), such as losses in nats per token, or differences between the losses of two models.
        weights: (units,), such as the number of tokens of a unit.
        groups: (units,) labels; units of one label, such as a document's sequences, depend on each other.

    Returns:
        None if fewer than `MIN_DOCUMENTS` documents have weight.
    """
    labels = np.unique(groups, return_inverse=True)[1]
    if len(np.unique(labels[weights > 0])) < MIN_DOCUMENTS:
        return None
    noise_source = f"{'documents' if len(np.unique(labels)) < len(labels) else 'sequences'}, 1 seed"
    if not np.isfinite(values).all():
        return Interval(np.nan, np.nan, np.nan, noise_source)
    (mean,), variance, degrees = _means_variances_and_degrees(values[:, None], weights, labels)
    return _make_estimate(mean, variance[0], degrees, np.abs(values).max(), noise_source).interval()


def _means_variances_and_degrees(
    columns: np.ndarray, weights: np.ndarray, document_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return each column's mean over units, its variance, and their degrees of freedom, as in
    `interval_over_documents`. `columns` is (units, columns); `document_indices` is (units,)."""
    # (documents,) fraction of the weight in each document
    fractions = np.bincount(document_indices, weights) / weights.sum()
    mean = weights @ columns / weights.sum()
    residuals = np.zeros((len(fractions), columns.shape[1]))
    np.add.at(residuals, document_indices, weights[:, None] / weights.sum() * (columns - mean))
    residuals, fractions = residuals[fractions > 0], fractions[fractions > 0]
    variance = (residuals**2 / (1 - fractions[:, None])).sum(0)
    # The variance is a quadratic form, of matrix G, in document means that are taken as equally spread; degrees:
    # trace(G)^2 / trace(G G).
    u, square = fractions**2 / (1 - fractions), (fractions**2).sum()
    first_moment, second_moment = u @ fractions, u @ fractions**2
    trace = (u * (1 + square - 2 * fractions)).sum()
    square_trace = (
        square**2 * u.sum() ** 2
        - 4 * square * u.sum() * first_moment
        + 2 * u.sum() * second_moment
        + 2 * first_moment**2
    )
    square_trace += (u**2 * ((1 + square - 2 * fractions) ** 2 - (square - 2 * fractions) ** 2)).sum()
    return mean, variance, float(trace**2 / square_trace)


def estimate_over_seeds(values: np.ndarray) -> Estimate:
    """Return the estimate of means over seeds, by Student's t; `values` is (..., seeds), with at least two seeds."""
    seeds, is_finite = values.shape[-1], np.isfinite(values).all(-1, keepdims=True)
    values = np.where(is_finite, values, np.nan)
    return _make_estimate(
        values.mean(-1), values.var(-1, ddof=1) / seeds, seeds - 1, np.abs(values).max(-1), f"{seeds} seeds"
    )


def welch_estimate(values: np.ndarray, baseline_values: np.ndarray) -> Estimate:
    """Return the estimate of differences between the means of unpaired runs, by Welch's t (1947).

    Where all values of each arm are equal, the exact permutation test gives p, and whether the interval leaves out 0.
    For paired runs the sign-flip test does so.

    Args:
        values: (..., learning rates, seeds) of an arm, with at least two seeds.
        baseline_values: (..., learning rates, seeds) of the baseline, whose seeds differ from the arm's seeds, perhaps
            also in number.

    Returns:
        The estimate at each pair of learning rates, (..., the arm's rates, the baseline's rates).
    """
    arm, baseline = estimate_over_seeds(values[..., None, :]), estimate_over_seeds(baseline_values[..., None, :, :])
    variances = arm.standard_error**2, baseline.standard_error**2
    counts = values.shape[-1], baseline_values.shape[-1]
    variance = variances[0] + variances[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        degrees = variance**2 / (
            variances[0] ** 2 / arm.degrees_of_freedom + variances[1] ** 2 / baseline.degrees_of_freedom
        )
    degrees = np.where(variance == 0, math.log2(math.comb(sum(counts), counts[0])) - 1, degrees)
    noise_source = f"{counts[0]} and {counts[1]} seeds, unpaired"
    return Estimate(arm.mean - baseline.mean, np.sqrt(variance), degrees, noise_source)


def bounded_mean_ends(values: np.ndarray, low: float, high: float, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and the upper ends, each (...,), of intervals of means of independent values between `low` and
    `high`. `values` is (..., n). Either end misses the true mean with probability `tail`.

    Nothing is assumed of the distribution: with a small probability, a new value may be far from all `values`. The
    upper end is the 1 - `tail` quantile of a random mean of the values and `high`. Its weights are uniform over all
    weights of sum 1 (Learned-Miller and Thomas 2019, arXiv 1905.06208). For values of 0 and 1 the interval is Clopper
    and Pearson's. If all n values are 0, and the bounds are -1 and 1, the ends are plus and minus 1 - tail^(1/n).
    """
    return -_upper_end(-values, -low, tail), _upper_end(values, high, tail)


def _upper_end(values: np.ndarray, high: float, tail: float) -> np.ndarray:
    """Return the upper ends of the intervals that `bounded_mean_ends` returns."""
    from scipy.optimize.elementwise import find_root  # `scipy` doesn't import it at its first use

    *shape, count = values.shape
    means, power = values.mean(-1).ravel(), 1 / (count + 1)
    rows = np.sort(np.concatenate([values, np.full((*shape, 1), float(high))], axis=-1)).reshape(-1, count + 1)

    def excess(end: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return P^`power` - `tail`^`power`, which is 0 at the upper end. P is the probability that the mean of a row,
        under random weights, is above `end`. The power makes the result nearly linear in `end` if the row's values are
        equal. row: indices in `rows`, each of which holds the values of one mean, and `high`."""
        residuals = rows[row] - end[:, None]
        positive, negative = np.maximum(residuals, 0), np.maximum(-residuals, 0)
        first = positive[:, positive.shape[1] - (positive > 0).sum(1).max() :]
        return _p_of_larger_exponential_sum(first, negative[:, : (negative > 0).sum(1).max()]) ** power - tail**power

    ends = find_root(excess, (means, np.full(len(means), float(high))), args=(np.arange(len(means)),)).x
    return np.where(means < high, ends, means).reshape(shape)


def _p_of_larger_exponential_sum(first_means: np.ndarray, second_means: np.ndarray) -> np.ndarray:
    """Return the probability, (...,), that exponential times of means `first_means`, (..., k), have a larger sum than
    exponential times of means `second_means`, (..., l).

    Let the times of each side run one after another, both sides at once. At any moment one time of each side is in
    progress, of mean a on the first side and b on the second. As exponential times have no memory, the second side's
    ends first with probability a / (a + b). The first side has the larger sum if the second side's last time ends
    before its own.
    """
    count, others = first_means.shape[-1], second_means.shape[-1]
    if not others:
        return np.full(first_means.shape[:-1], float(count > 0))
    total = first_means[..., :, None] + second_means[..., None, :]
    first_ends = np.divide(second_means[..., None, :], total, out=np.ones(total.shape), where=total > 0)
    # by the number of times of the first side that have ended, on a diagonal: so many of both sides together have ended
    more = np.zeros((*first_means.shape[:-1], count + 1))
    for ended in reversed(range(count + others - 1)):
        if ended + 1 >= others:
            more[..., ended + 1 - others] = 1.0
        places = np.arange(max(0, ended + 1 - others), min(count, ended + 1))
        chance = first_ends[..., places, ended - places]
        more[..., places] = chance * more[..., places + 1] + (1 - chance) * more[..., places]
    return more[..., 0]


def trend_per_doubling(differences: np.ndarray, sizes: np.ndarray) -> Interval:
    """Return the mean change of a difference per doubling of size, by least squares for each seed, with its interval by
    Student's t over seeds.

    Args:
        differences: (sizes, seeds); a column is one seed at every size. At least two seeds.
        sizes: (sizes,) such as numbers of parameters; at least two different sizes.
    """
    doublings = np.log2(sizes)
    deviations = doublings - doublings.mean()
    return estimate_over_seeds(deviations @ differences / (deviations @ deviations)).interval()


def estimate_over_seeds_and_documents(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> Estimate | None:
    """Return the estimate of means over seeds and documents, for intervals that hold for new seeds and new documents,
    too.

    Seeds and documents are crossed: each seed's model reads each document. The variance is the variance over seeds,
    plus the variance over documents, minus the variance of their interaction, which both contain (Cameron, Gelbach and
    Miller 2011). Intervals are at least as long as intervals over seeds or documents alone. Degrees of freedom are
    Satterthwaite's.

    Args:
        values: (..., seeds, units), such as paired differences in nats per token.
        weights, groups: (units,), as in `interval_over_documents`.

    Returns:
        None if there are fewer than two seeds or `MIN_DOCUMENTS_WITH_SEEDS` documents, or a value is not finite.
    """
    (*outer_shape, seeds, units), labels = values.shape, np.unique(groups, return_inverse=True)[1]
    document_weights = np.bincount(labels, weights)
    has_weight = document_weights > 0
    if seeds < 2 or has_weight.sum() < MIN_DOCUMENTS_WITH_SEEDS or not np.isfinite(values).all():
        return None
    seed_means = values @ weights / weights.sum()
    seed_variance, seed_degrees = seed_means.var(-1, ddof=1) / seeds, seeds - 1
    mean, document_variance, document_degrees = _means_variances_and_degrees(
        values.mean(-2).reshape(-1, units).T, weights, labels
    )
    mean, document_variance = mean.reshape(outer_shape), document_variance.reshape(outer_shape)
    document_sums = np.zeros((len(document_weights), *values.T.shape[1:]))
    np.add.at(document_sums, labels, (weights * values).T)
    document_sums = document_sums.T[..., has_weight]
    seed_deviations = (seed_means - seed_means.mean(-1, keepdims=True))[..., None]
    interaction = document_sums - document_sums.mean(-2, keepdims=True) - seed_deviations * document_weights[has_weight]
    interaction_variance = (interaction**2).sum((-2, -1)) / (seeds * (seeds - 1)) / weights.sum() ** 2
    total = seed_variance + document_variance
    largest_value = np.abs(values).max((-2, -1))
    noise_source = f"{seeds} seeds and {has_weight.sum()} documents"
    denominator = seed_variance**2 / seed_degrees + document_variance**2 / document_degrees
    degrees = np.divide(total**2, denominator, out=np.full(total.shape, float(seed_degrees)), where=denominator > 0)
    sources = (seed_variance, seed_degrees), (document_variance, document_degrees)
    floors = tuple(_make_estimate(mean, *source, largest_value, noise_source) for source in sources)
    return replace(
        _make_estimate(mean, np.maximum(total - interaction_variance, 0.0), degrees, largest_value, noise_source),
        minimum_width_estimates=floors,
    )


def effective_trials(right_answers: np.ndarray, questions: np.ndarray) -> float:
    """Return the number of independent trials that the questions of several sequences are worth, at most the number of
    questions.

    It is the number of questions divided by the design effect. The design effect is the variance of right answers
    between sequences divided by the binomial variance (Kish 1965; Korn and Graubard 1998). It is 1 with one question in
    each sequence. Both variances are computed with two sequences of mean size added: one has only right answers, one
    only wrong answers (Agresti and Coull 1998). So M sequences of equal size with right answers alone, or with wrong
    answers alone, are worth M trials.

    Args:
        right_answers: (sequences,) numbers of right answers, which may be fractional.
        questions: (sequences,) numbers of questions.
    """
    n_questions = float(questions.sum())
    if not n_questions:
        return 0.0
    mean_questions = questions[questions > 0].mean()
    right_answers = np.append(right_answers, [mean_questions, 0])
    questions = np.append(questions, [mean_questions, mean_questions])
    fraction = right_answers.sum() / questions.sum()
    binomial_variance = fraction * (1 - fraction) * questions.sum()
    return n_questions / float(np.maximum(1.0, ((right_answers - fraction * questions) ** 2).sum() / binomial_variance))


def wilson_interval(successes: float, trials: float) -> Interval:
    """Return a fraction of independent trials with its 95 % Wilson score interval (1927), which stays within 0 and 1;
    NaN without trials.

    `successes` may be fractional where a trial is a mean, such as over the depths at which one needle is hidden in a
    text. The interval is as wide as for trials of 0 or 1.
    `trials` may be fractional where trials depend on each other (`effective_trials`).
    """
    if not trials:
        return Interval(np.nan, np.nan, np.nan)
    fraction, scale = successes / trials, 1 + _NORMAL_QUANTILE**2 / trials
    middle = (fraction + _NORMAL_QUANTILE**2 / (2 * trials)) / scale
    half = (
        _NORMAL_QUANTILE / scale * np.sqrt(fraction * (1 - fraction) / trials + _NORMAL_QUANTILE**2 / (4 * trials**2))
    )
    # Fractions of 0 and 1 are themselves an end of their interval, which rounding may miss.
    return Interval(
        fraction, 0.0 if successes == 0 else float(middle - half), 1.0 if successes == trials else float(middle + half)
    )


# ---------------------------------------------------------------- comparisons that hold together


def cautious_mean_correlation(differences: np.ndarray) -> float:
    """Return a cautious estimate of the mean correlation between arms' differences, (arms, seeds), to a shared
    baseline.

    It is the mean over pairs of arms, less one standard error, between 0 and `MAX_CORRELATION`. Arms without spread
    count as uncorrelated.
    """
    arms, seeds = differences.shape
    residuals = differences - differences.mean(1, keepdims=True)
    norms = np.sqrt((residuals**2).sum(1, keepdims=True))
    residuals = np.divide(residuals, norms, out=np.zeros_like(residuals), where=norms > 0)
    mean = ((residuals.sum(0) ** 2).sum() - (norms > 0).sum()) / (arms * (arms - 1))  # over pairs, without all of them
    error = (1 - mean) * (1 + (arms - 1) * max(mean, 0.0)) * math.sqrt(2 / (arms * (arms - 1) * (seeds - 1)))
    return min(max(mean - error, 0.0), MAX_CORRELATION)


@dataclass(frozen=True)
class Family:
    """A family is a set of comparisons whose intervals hold together with 95 %; comparisons that can't be tested count,
    too.

    A group holds comparisons that share a baseline, so that their differences are correlated. Different groups and
    `n_independent_comparisons` further comparisons are taken as independent, which is cautious (Sidak 1967).
    """

    n_independent_comparisons: int = 1
    correlated_groups: tuple[
        tuple[int, int, float], ...
    ] = ()  # comparisons, degrees of freedom, correlation of each group

    @property
    def n_comparisons(self) -> int:
        """Return the number of comparisons."""
        return self.n_independent_comparisons + sum(count for count, *_ in self.correlated_groups)

    def joint_p(self, p: np.ndarray | float) -> np.ndarray:
        """Return the probability that at least one comparison without a difference has a two-sided p of at most `p`."""
        p = np.asarray(p, dtype=float)
        if self.n_comparisons <= 1:
            return p
        single = -np.log1p(-np.minimum(p, 1 - 1e-16))  # minus log of the probability that one comparison has no such p
        surprise = self.n_independent_comparisons * single
        for ratio in starmap(_joint_tail_interpolation, self.correlated_groups):
            surprise = surprise + single * np.exp(ratio(np.clip(np.log(np.maximum(single, 1e-300)), *ratio.domain)))
        return np.where(p >= 1, 1.0, -np.expm1(-surprise))

    @cached_property
    def comparison_alpha(self) -> float:
        """Return the error rate of one comparison's interval, such that all intervals hold together with 95 %."""
        if self.n_comparisons <= 1:
            return ALPHA
        return scipy.optimize.brentq(
            lambda alpha: float(self.joint_p(alpha)) - ALPHA, ALPHA / self.n_comparisons * (1 - 1e-9), ALPHA
        )


@lru_cache(maxsize=1 << 12)
def _joint_tail_interpolation(count: int, degrees: float, correlation: float) -> Chebyshev:
    """Return an interpolation of `joint_tail_probability`, the joint p, over p, the two-sided p of one comparison. With
    l(P) = -log(1 - P), the interpolated function takes log l(p) and returns log(l(joint p) / l(p))."""

    def ratio(logs: np.ndarray) -> list[float]:
        tails = [joint_tail_probability(-math.expm1(-math.exp(log)), count, degrees, correlation) for log in logs]
        return [math.log(-math.log1p(-tail)) - log for tail, log in zip(tails, logs, strict=True)]

    return Chebyshev.interpolate(ratio, 20, [math.log(_SMALLEST_P), math.log(min(7, 20 / count))])


def joint_tail_probability(p: float, count: int, degrees: float, correlation: float) -> float:
    """Return the probability that any of `count` correlated t statistics without a difference reaches a two-sided `p`.

    Each statistic has its own standard error. The differences of a seed are normal and share one factor, such as the
    baseline's noise. Given the factor's mean and its sum of squares, the statistics are independent, so that
    quadratures over both, and over a statistic's standard error, give the probability.
    """
    factor, factor_weights, squares_weights, spread, density = _quadrature(degrees, correlation)
    reach = scipy.special.stdtrit(degrees, 1 - p / 2) * spread  # (squares, spreads)
    rest = math.sqrt(1 - correlation)
    tails = sum(scipy.special.ndtr((side - reach) / rest) for side in (factor, -factor))  # (factor, squares, spreads)
    single = np.minimum((tails * density).sum(-1), 1 - 1e-16)
    return float(factor_weights @ -np.expm1(count * np.log1p(-single)) @ squares_weights)


@lru_cache(maxsize=1 << 8)
def _quadrature(degrees: float, correlation: float) -> tuple[np.ndarray, ...]:
    """Return nodes and weights of the quadratures in `joint_tail_probability`, as five arrays.

    The first array holds nodes for the mean of the factor that all statistics share: amounts that are added to each
    statistic's mean. The second holds their weights. The third holds the weights of nodes for the factor's sum of
    squares. The fourth, (squares, spreads), holds nodes for a statistic's standard error, given each of these sums of
    squares. The fifth, (squares, spreads), holds their weights.
    """
    # a mean and its opposite have the same probability
    factor, factor_weights = (
        nodes[_QUADRATURE_NODES["factor_mean"] // 2 :]
        for nodes in scipy.special.roots_hermitenorm(_QUADRATURE_NODES["factor_mean"])
    )
    squares, squares_weights = scipy.special.roots_genlaguerre(_QUADRATURE_NODES["factor_squares"], degrees / 2 - 1)
    steps, step_weights = scipy.special.roots_legendre(_QUADRATURE_NODES["standard_error"])
    steps = (steps + 1) / 2
    # A comparison's sum of squares is noncentral chi squared; its root r has the density below, by Bessel's I.
    centre = np.sqrt(2 * squares * correlation / (1 - correlation))[:, None]
    low, high = np.maximum(0, centre - 9), centre + math.sqrt(degrees) + 8
    root = low + (high - low) * steps**3  # many nodes lie at small standard errors, which make large statistics
    log_density = -((root - centre) ** 2) / 2 + degrees / 2 * np.log(root) - (degrees / 2 - 1) * np.log(centre)
    density = np.exp(log_density) * scipy.special.ive(degrees / 2 - 1, centre * root) * step_weights * steps**2
    return (
        math.sqrt(correlation) * factor[:, None, None],
        factor_weights / factor_weights.sum(),
        squares_weights / squares_weights.sum(),
        root * math.sqrt((1 - correlation) / degrees),
        density / density.sum(1, keepdims=True),
    )
