"""The training tokens that a run needed to reach a level of a metric, and their ratios."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from lm.statistics.intervals import Interval


def tokens_to_reach(
    tokens: Sequence[int], values: Sequence[float], level: float, better: Literal["lower", "higher"]
) -> float:
    """The number of training tokens at which a metric first reaches `level`, interpolated linearly in log tokens
    between the first evaluation that has reached it and the evaluation before.

    Args:
        tokens: tokens seen at each evaluation, ascending, above 0.
        values: the metric at each evaluation; values that are not finite are left out.

    Returns:
        The number of tokens; 0 if the first evaluation has reached the level already, infinite if no evaluation has.
    """
    evaluations = [(count, value) for count, value in zip(tokens, values, strict=True) if math.isfinite(value)]
    first_index = next(
        (
            index
            for index, (_, value) in enumerate(evaluations)
            if (value <= level if better == "lower" else value >= level)
        ),
        None,
    )
    if not first_index:
        return math.inf if first_index is None else 0.0
    (tokens_before, value_before), (tokens_after, value_after) = evaluations[first_index - 1 : first_index + 1]
    fraction = (value_before - level) / (value_before - value_after)
    return math.exp(math.log(tokens_before) + fraction * math.log(tokens_after / tokens_before))


def log_tokens(tokens: float) -> float:
    """The natural logarithm of a number of tokens; minus infinity for 0."""
    return math.log(tokens) if tokens else -math.inf


def factor(log_ratio: Interval | None) -> Interval | None:
    """The interval of a ratio, from the interval of the ratio's natural logarithm; None stays None."""
    with np.errstate(over="ignore"):
        return log_ratio and Interval(*map(float, np.exp(log_ratio.as_list())), log_ratio.noise_source)
