"""The joint distribution of comparisons with one baseline, by which their intervals hold together with 95 %."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import starmap

import numpy as np
from numpy.polynomial import Chebyshev
from scipy.optimize import brentq
from scipy.special import ive, ndtr, roots_genlaguerre, roots_hermitenorm, roots_legendre, stdtrit

from lm.statistics.intervals import ALPHA

MAX_CORRELATION = 0.5  # largest correlation that is credited: the one of arms that scatter like their baseline
CORRELATION_STEP = 0.05  # correlations are rounded down to a multiple, so that experiments share quadratures
_NODES = 24, 20, 60  # of the quadratures over the factor's mean, its squares, and a comparison's spread
_SMALLEST_P = 1e-5  # p from which on the correlation counts fully
MAX_DEGREES = 100  # more degrees of freedom count as these


def mean_correlation(differences: np.ndarray) -> float:
    """A cautious estimate of the mean correlation between arms' differences, (arms, seeds), to a shared baseline.

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
    """Comparisons whose intervals hold together with 95 %; a comparison that can't be tested counts, too.

    A group holds comparisons that share a baseline, so that their differences are correlated. Different groups and
    `n_independent` further comparisons are taken as independent, which is cautious (Sidak 1967).
    """

    n_independent: int = 1
    groups: tuple[tuple[int, int, float], ...] = ()  # comparisons, degrees of freedom, correlation of each group

    @property
    def size(self) -> int:
        """The number of comparisons."""
        return self.n_independent + sum(count for count, *_ in self.groups)

    def joint_p(self, p: np.ndarray | float) -> np.ndarray:
        """The probability that at least one comparison without a difference has a two-sided p of at most `p`."""
        p = np.asarray(p, dtype=float)
        if self.size <= 1:
            return p
        single = -np.log1p(-np.minimum(p, 1 - 1e-16))  # minus log of the probability that one comparison has no such p
        surprise = self.n_independent * single
        for ratio in starmap(_log_ratio, self.groups):
            surprise = surprise + single * np.exp(ratio(np.clip(np.log(np.maximum(single, 1e-300)), *ratio.domain)))
        return np.where(p >= 1, 1.0, -np.expm1(-surprise))

    @cached_property
    def alpha(self) -> float:
        """The error rate of one comparison's interval, such that all intervals hold together with 95 %."""
        if self.size <= 1:
            return ALPHA
        return brentq(lambda alpha: float(self.joint_p(alpha)) - ALPHA, ALPHA / self.size * (1 - 1e-9), ALPHA)


@lru_cache(maxsize=1 << 12)
def _log_ratio(count: int, degrees: float, correlation: float) -> Chebyshev:
    """An interpolation of `joint_tail` for a group: the logarithm of the ratio of minus the log of the probability that
    no comparison reaches a p to that of one comparison, as a function of the latter's log.
    """

    def ratio(logs: np.ndarray) -> list[float]:
        tails = [joint_tail(-math.expm1(-math.exp(log)), count, degrees, correlation) for log in logs]
        return [math.log(-math.log1p(-tail)) - log for tail, log in zip(tails, logs, strict=True)]

    return Chebyshev.interpolate(ratio, 20, [math.log(_SMALLEST_P), math.log(min(7, 20 / count))])


def joint_tail(p: float, count: int, degrees: float, correlation: float) -> float:
    """The probability that any of `count` correlated t statistics without a difference reaches a two-sided `p`.

    Each statistic has its own standard error. The differences of a seed are normal and share one factor, such as the
    baseline's noise. Given the factor's mean and its sum of squares, the statistics are independent, so that
    quadratures over both, and over a statistic's standard error, give the probability.
    """
    factor, factor_weights, squares_weights, spread, density = _quadrature(degrees, correlation)
    reach = stdtrit(degrees, 1 - p / 2) * spread  # (squares, spreads)
    rest = math.sqrt(1 - correlation)
    tails = ndtr((factor - reach) / rest) + ndtr((-factor - reach) / rest)  # (factor, squares, spreads)
    single = np.minimum((tails * density).sum(-1), 1 - 1e-16)
    return float(factor_weights @ -np.expm1(count * np.log1p(-single)) @ squares_weights)


@lru_cache(maxsize=1 << 8)
def _quadrature(degrees: float, correlation: float) -> tuple[np.ndarray, ...]:
    """Nodes and weights of `joint_tail`: the factor's part of a mean, its weights; weights of its squares; a
    comparison's spread given the squares, and its density, (squares, spreads)."""
    # a mean and its opposite have the same probability
    factor, factor_weights = (nodes[_NODES[0] // 2 :] for nodes in roots_hermitenorm(_NODES[0]))
    squares, squares_weights = roots_genlaguerre(_NODES[1], degrees / 2 - 1)
    steps, step_weights = roots_legendre(_NODES[2])
    steps = (steps + 1) / 2
    # A comparison's sum of squares is noncentral chi squared; its root r has the density below, by Bessel's I.
    centre = np.sqrt(2 * squares * correlation / (1 - correlation))[:, None]
    low, high = np.maximum(0, centre - 9), centre + math.sqrt(degrees) + 8
    root = low + (high - low) * steps**3  # many nodes lie at small standard errors, which make large statistics
    log_density = -((root - centre) ** 2) / 2 + degrees / 2 * np.log(root) - (degrees / 2 - 1) * np.log(centre)
    density = np.exp(log_density) * ive(degrees / 2 - 1, centre * root) * step_weights * steps**2
    return (
        math.sqrt(correlation) * factor[:, None, None],
        factor_weights / factor_weights.sum(),
        squares_weights / squares_weights.sum(),
        root * math.sqrt((1 - correlation) / degrees),
        density / density.sum(1, keepdims=True),
    )
