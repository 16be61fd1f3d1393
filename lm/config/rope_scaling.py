"""RoPE's frequencies of models that were trained, or trained further, with rescaled ones: part of the model, as theta is."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lm.errors import Problem
from lm.schema import key

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL_HELP = "context length before the frequencies were rescaled, tokens"


class TrainedScaling:
    """What a model's own rescaling does to the frequencies that theta gives: nothing, unless a class says more."""

    name: ClassVar[str]

    def rescaled(self, frequencies: "Tensor", theta: float, head_size: int) -> "Tensor":
        """Radians per token of each pair (pairs,), from those that an unscaled theta gives; `theta`: of training."""
        return frequencies

    @property
    def amplitude(self) -> float:
        """Multiplies cos and sin, so that logits are multiplied by its square."""
        return 1.0


@dataclass(frozen=True)
class Unscaled(TrainedScaling):
    """The frequencies of theta."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling(TrainedScaling):
    """Position interpolation, arXiv 2306.15595: all frequencies divided by one factor."""

    name: ClassVar[str] = "linear"
    factor: float = key(2.0, "divides all frequencies", gt=0, le=1e6)

    def rescaled(self, frequencies: "Tensor", theta: float, head_size: int) -> "Tensor":
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(TrainedScaling):
    """Llama 3.1's: frequencies divided by `factor` but for pairs of many periods, linear in the number of periods between.

    Source: `apply_scaling` of github.com/meta-llama/llama-models.
    """

    name: ClassVar[str] = "llama3"
    factor: float = key(8.0, "divides low frequencies", gt=0, le=1e6)
    slow: float = key(1.0, "pairs with at most so many periods in the original context are divided by factor", gt=0, le=1e9)
    fast: float = key(4.0, "pairs with at least so many periods stay as they are", gt=0, le=1e9)
    original: int = key(8192, ORIGINAL_HELP, ge=1, le=10**9)

    def rescaled(self, frequencies: "Tensor", theta: float, head_size: int) -> "Tensor":
        periods = self.original * frequencies / (2 * math.pi)
        return divided_below(frequencies, periods, self.slow, self.fast, self.factor)

    def problems(self) -> list[Problem]:
        """Contradictory options."""
        return order_problems(self.slow, self.fast)


@dataclass(frozen=True)
class YarnScaling(TrainedScaling):
    """YaRN, arXiv 2309.00071, as in its authors' code: linear in the index of the pair between those kept and those divided by `factor`.

    Source: `YaRNScaledRotaryEmbedding` of github.com/jquesnelle/yarn. The paper itself is linear in the number of periods, as the inference
    setting `yarn` is.
    """

    name: ClassVar[str] = "yarn"
    factor: float = key(4.0, "divides low frequencies", gt=0, le=1e6)
    slow: float = key(1.0, "pairs with at most so many periods in the original context are divided by factor", gt=0, le=1e9)
    fast: float = key(32.0, "pairs with at least so many periods stay as they are", gt=0, le=1e9)
    original: int = key(8192, ORIGINAL_HELP, ge=1, le=10**9)
    attention_factor: float | None = key(None, "multiplies cos and sin; null: 0.1 ln(factor) + 1", gt=0, le=1e6)
    whole_pairs: bool = key(True, "the first and the last pair of the transition are rounded outwards")

    def rescaled(self, frequencies: "Tensor", theta: float, head_size: int) -> "Tensor":
        # The pairs with so many periods, as real numbers.
        ends = [head_size * math.log(self.original / (periods * 2 * math.pi)) / (2 * math.log(theta)) for periods in (self.fast, self.slow)]
        if self.whole_pairs:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_size - 1)
        pairs = frequencies.new_tensor(range(len(frequencies)))
        divided = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    @property
    def amplitude(self) -> float:
        return self.attention_factor or (0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0)

    def problems(self) -> list[Problem]:
        """Contradictory options."""
        return order_problems(self.slow, self.fast)


def divided_below(frequencies: "Tensor", periods: "Tensor", slow: float, fast: float, factor: float) -> "Tensor":
    """Frequencies divided by `factor` in pairs of at most `slow` periods, kept from `fast` periods on, linear in their number between."""
    kept = ((periods - slow) / (fast - slow)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def order_problems(slow: float, fast: float) -> list[Problem]:
    """What is wrong with the ends of a transition between pairs of few and of many periods."""
    return [] if fast > slow else [Problem("fast", fast, f"is not above slow = {slow:g}")]


TRAINED_SCALINGS = {v.name: v for v in (Unscaled, LinearScaling, Llama3Scaling, YarnScaling)}
