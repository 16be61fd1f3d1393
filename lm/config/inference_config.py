"""How a trained model is used in an evaluation: RoPE's scaling and what else differs from training."""

from dataclasses import dataclass, fields
from typing import ClassVar

from lm.schema import key, variant


@dataclass(frozen=True)
class AsTrained:
    """RoPE as it was trained."""

    name: ClassVar[str] = "as_trained"


@dataclass(frozen=True)
class ThetaFactor:
    """RoPE with theta multiplied (the SSMax paper: 50)."""

    name: ClassVar[str] = "theta"
    factor: float = key(50.0, "multiplies theta", gt=0)


@dataclass(frozen=True)
class Interpolation:
    """Position interpolation, arXiv 2306.15595: all frequencies divided by s."""

    name: ClassVar[str] = "interpolation"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)


@dataclass(frozen=True)
class NTK:
    """NTK-aware scaling: theta times s^(D / (D - 2)), so that the slowest pair turns 1 / s as fast."""

    name: ClassVar[str] = "ntk"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)


@dataclass(frozen=True)
class YaRNScaling:
    """YaRN, arXiv 2309.00071: interpolation of pairs that turn seldom in a training row, and a temperature."""

    name: ClassVar[str] = "yarn"
    factor: float | None = key(None, "s; null: the row's length in training lengths", ge=1)
    fast: float = key(32.0, "pairs that turn this often in a training row, and more, stay as they are", gt=0)
    slow: float = key(1.0, "pairs that turn this often, and less, are interpolated by s", ge=0)
    temperature: bool = key(True, "multiply logits by (0.1 ln s + 1)^2")


RopeScaling = AsTrained | ThetaFactor | Interpolation | NTK | YaRNScaling
ROPE_SCALINGS = {v.name: v for v in (AsTrained, ThetaFactor, Interpolation, NTK, YaRNScaling)}


@dataclass(frozen=True)
class LongSetting:
    """How a model is used beyond its training length; the model itself stays as it is."""

    rope: RopeScaling = variant(ROPE_SCALINGS, "as_trained", "RoPE's frequencies")
    log_n_clip: bool = key(False, "log_n: never scale below 1 (`max(1, ln n / ln m)`), whatever it was trained with")

    @property
    def label(self) -> str:
        """A few words, e.g. `theta x 50`; unlike for unlike settings."""
        rope = self.rope
        words = {"as_trained": "as trained", "theta": "theta x"}.get(rope.name, rope.name)
        if getattr(rope, "factor", None):
            words += f" {rope.factor:g}"
        others = [
            f"{spec.name} {getattr(rope, spec.name):g}"
            for spec in fields(rope)
            if spec.name != "factor" and getattr(rope, spec.name) != spec.default
        ]
        return ", ".join([words, *others, *(["log_n clipped"] if self.log_n_clip else [])])
