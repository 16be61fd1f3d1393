"""At which length attention loses the key that it is to retrieve, from scores at one length: the prediction of docs/theory.md.

A query sees n keys; one of them, the needle, has the score z*. Weights are e^z over their sum. When the sequence grows by `more` tokens
like those of its filler, scores are multiplied by 1 + slope ln((n + more) / n), where slope is d ln(scale) / d ln n of the normalizer at n
(0 of softmax, 1 / ln n of a scale that is proportional to ln n), and each token adds the mean of e^z over filler to the sum. The needle has

    w = 1 / (1 + sum over other keys of e^(z - z*) + more mean over filler of e^(z - z*)),

with the scores z at the new length.

Shapes: Q questions, K keys (-inf where a key is not visible).

"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS_AN_OCTAVE = 8  # lengths at which a crossing is looked for
OCTAVES = 40  # as far as is looked: beyond it a model is said never to lose the needle


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What a head gives to questions at one length, fp64.

    Attributes:
        needle: (Q,) z*, score of the key that holds the answer.
        others: (Q, K) scores of all other visible keys.
        is_filler: (Q, K) bool, which of those a longer sequence has more of.
        n: (Q,) visible keys.
        slope: (Q,) of the scores' scale on ln n, relative to the scale at n.
    """

    needle: np.ndarray
    others: np.ndarray
    is_filler: np.ndarray
    n: np.ndarray
    slope: np.ndarray

    def weight(self, more: float) -> np.ndarray:
        """Weight on the needle (Q,) in a sequence of `more` further tokens."""
        scale = (1 + self.slope * np.log1p(more / self.n))[:, None]
        odds = np.exp(np.minimum(scale * (self.others - self.needle[:, None]), 700.0))  # -inf: 0
        of_filler = np.where(self.is_filler, odds, 0.0).sum(1) / self.is_filler.sum(1)
        return 1 / (1 + odds.sum(1) + more * of_filler)

    @property
    def margin(self) -> np.ndarray:
        """z* - ln mean of e^z over filler, (Q,) nats: e^margin keys of filler have as much weight as the needle."""
        filler = np.where(self.is_filler, np.exp(self.others - self.needle[:, None]), 0.0)
        return -np.log(filler.sum(1) / self.is_filler.sum(1))


def median_weights(found: Retrieval, length: int) -> np.ndarray:
    """The median weight on the needle at the lengths `reach(length)`, (R,)."""
    return np.array([np.median(found.weight(at - length)) for at in reach(length)])


def reach(length: int) -> np.ndarray:
    """The lengths that a prediction looks at, (R,) tokens: `STEPS_AN_OCTAVE` in each of `OCTAVES` octaves from `length` on."""
    return length * 2 ** (np.arange(OCTAVES * STEPS_AN_OCTAVE + 1) / STEPS_AN_OCTAVE)


def half_length(weights: np.ndarray, length: int, threshold: float) -> float:
    """The least length, in tokens, at which the median weight on the needle, `median_weights`, is below `threshold`; infinite if none is
    within reach. Between the lengths looked at ln odds of the weight are linear in the logarithm of the length."""
    below = np.flatnonzero(weights < threshold)
    if not len(below):
        return math.inf
    lengths, last = reach(length), int(below[0])
    if last == 0:
        return float(length)
    odds = np.log(np.maximum(1 / weights[last - 1 : last + 1] - 1, 1e-300))
    part = (math.log(1 / threshold - 1) - odds[0]) / (odds[1] - odds[0])
    return float(lengths[last - 1] * (lengths[last] / lengths[last - 1]) ** part)


def observed_half_length(lengths: Sequence[int], accuracy: Sequence[float]) -> float:
    """Where accuracy first falls below 1/2, interpolated in the logarithm of the length; infinite if it does at none of the lengths."""
    for index, right in enumerate(accuracy):
        if right < 0.5:
            if index == 0:
                return float(lengths[0])
            before = accuracy[index - 1]
            part = (before - 0.5) / (before - right)
            return float(lengths[index - 1] * (lengths[index] / lengths[index - 1]) ** part)
    return math.inf


def error(predicted: float, observed: float, longest: int) -> float:
    """|log2(predicted / observed)|, octaves. Of a run that keeps half of its accuracy up to `longest`, the last length measured (`observed`
    is infinite), how far the prediction lies below that: 0 if it lies beyond, which is all that is known to be right."""
    if math.isinf(observed):
        return max(0.0, math.log2(longest / predicted)) if math.isfinite(predicted) else 0.0
    return abs(math.log2(min(predicted, 2.0**OCTAVES * longest) / observed))


def fitted_threshold(weights: Sequence[np.ndarray], observed: Sequence[float], length: int, longest: int) -> float:
    """The threshold of the least sum of errors over runs, each with its `median_weights`."""
    candidates = 1 / (1 + np.exp(-np.linspace(-6, 4, 101)))

    def total(threshold: float) -> float:
        return sum(error(half_length(one, length, threshold), seen, longest) for one, seen in zip(weights, observed, strict=True))

    return float(min(candidates, key=total))
