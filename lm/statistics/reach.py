"""Tokens at which a metric first reaches a level: interpolated between evaluations, compared as ratios."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lm.statistics.intervals import Interval


def tokens_to_reach(tokens: Sequence[int], values: Sequence[float], level: float, better: Literal["lower", "higher"]) -> float:
    """The number of training tokens at which a metric first reaches `level`: linear in log tokens between the first evaluation that has
    reached it and the one before.

    Args:
        tokens: seen at each evaluation, ascending, above 0.
        values: of the metric then; evaluations that gave no finite value are left out.

    Returns:
        0: the first evaluation had reached it already; infinite: none did.
    """
    before: tuple[int, float] | None = None
    for at, value in zip(tokens, values, strict=True):
        if not math.isfinite(value):
            continue
        if value <= level if better == "lower" else value >= level:
            if before is None:
                return 0.0
            part = (before[1] - level) / (before[1] - value)
            return math.exp(math.log(before[0]) + part * math.log(at / before[0]))
        before = at, value
    return math.inf


def log_tokens(tokens: float) -> float:
    """The natural logarithm, -infinite of 0."""
    return math.log(tokens) if tokens else -math.inf


def factor(log_ratio: Interval | None) -> Interval | None:
    """The interval of a log ratio as that of the ratio."""
    with np.errstate(over="ignore"):
        return log_ratio and Interval(*map(float, np.exp(log_ratio.listed())), log_ratio.over)
