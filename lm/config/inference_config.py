"""Inference settings of a trained model: RoPE's scaling, and the normalizer's options that differ from training."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from lm.attention.options import Options
from lm.config.model_config import Position, divide_low_frequencies
from lm.config.normalizers import with_changes
from lm.errors import Problem, yaml_scalar
from lm.schema import key, variant

FACTOR_HELP = "s; null: the sequence's length in training lengths"


@dataclass(frozen=True)
class RopeScaling:
    """RoPE unchanged from training; the base class of scalings of RoPE for sequences s times as long as in training."""

    name: ClassVar[str] = "as_trained"

    def s(self, trained_length: int, length: int) -> float:
        """The scaling factor s: the option `factor` if it is set, else max(1, `length` / `trained_length`)."""
        return getattr(self, "factor", None) or max(1.0, length / trained_length)

    def theta(self, theta: float, head_size: int, s: float) -> float:
        """RoPE's base at scaling factor `s`, from the base `theta` in training."""
        return theta

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        """Radians per token, (pairs,), by which each pair of dimensions rotates at scaling factor `s`, from its
        `frequencies` in training.

        periods: (pairs,), the number of each pair's periods within the training length.
        """
        return frequencies

    def logit_factor(self, s: float) -> float:
        """The factor by which this scaling multiplies the attention logits at scaling factor `s`."""
        return 1.0


AS_TRAINED = RopeScaling()


@dataclass(frozen=True)
class ThetaFactor(RopeScaling):
    """RoPE with theta multiplied by `factor`; the SSMax paper (arXiv 2501.19399) takes 50."""

    name: ClassVar[str] = "theta"
    factor: float = key(50.0, "multiplies theta", ge=1e-3, le=1e6)

    def theta(self, theta: float, head_size: int, s: float) -> float:
        return theta * s


@dataclass(frozen=True)
class Interpolation(RopeScaling):
    """Position interpolation, arXiv 2306.15595, which divides all frequencies by s. s is `factor` or, if that is null,
    the sequence's length in training lengths, at least 1."""

    name: ClassVar[str] = "interpolation"
    factor: float | None = key(None, FACTOR_HELP, ge=1, le=1e6)

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        return frequencies / s


@dataclass(frozen=True)
class NTK(RopeScaling):
    """NTK-aware scaling by a factor s, which multiplies theta by s^(D / (D - 2)), D the head size. It divides the
    lowest frequency by s and keeps the highest."""

    name: ClassVar[str] = "ntk"
    factor: float | None = key(None, FACTOR_HELP, ge=1, le=1e6)

    def theta(self, theta: float, head_size: int, s: float) -> float:
        return theta * s ** (head_size / max(1, head_size - 2))


# Pairs with at most so many periods in a training sequence are interpolated by s; those with at least so many stay.
SLOW_PERIODS, FAST_PERIODS = 1.0, 32.0


@dataclass(frozen=True)
class YaRNScaling(RopeScaling):
    """YaRN, arXiv 2309.00071: interpolation of low-frequency pairs of dimensions, and a temperature."""

    name: ClassVar[str] = "yarn"
    factor: float | None = key(None, FACTOR_HELP, ge=1, le=1e6)
    temperature: bool = key(True, "multiply logits by (0.1 ln s + 1)^2")

    def scaled_frequencies(self, frequencies: Tensor, periods: Tensor, s: float) -> Tensor:
        return divide_low_frequencies(frequencies, periods, SLOW_PERIODS, FAST_PERIODS, s)

    def logit_factor(self, s: float) -> float:
        return (0.1 * math.log(s) + 1) ** 2 if self.temperature else 1.0


ROPE_SCALINGS = {v.name: v for v in (RopeScaling, ThetaFactor, Interpolation, NTK, YaRNScaling)}


@dataclass(frozen=True)
class InferenceSetting:
    """RoPE scaling and normalizer options with which a trained model, its weights unchanged, is evaluated
    (`lm.model.swapped.for_inference`)."""

    rope: RopeScaling = variant(ROPE_SCALINGS, "as_trained", "RoPE's frequencies")
    normalizer: dict[str, bool | int | float | str] = key(
        {},
        "options of the model's normalizers that have them, where they differ from training, e.g. {clip: true} "
        "of log_n",
    )

    @property
    def label(self) -> str:
        """A short description of the setting, e.g. `theta x 50` or `as trained, clip=true`; different settings have
        different labels.
        """
        rope = self.rope
        words = {"as_trained": "as trained", "theta": "theta x"}.get(rope.name, rope.name)
        if getattr(rope, "factor", None):
            words += f" {_number_text(rope.factor)}"
        options = [
            f"{spec.name} {_number_text(getattr(rope, spec.name))}"
            for spec in fields(rope)
            if spec.name != "factor" and getattr(rope, spec.name) != spec.default
        ]
        return ", ".join(
            [words, *options, *(f"{name}={yaml_scalar(value)}" for name, value in self.normalizer.items())]
        )

    def normalizers(self, trained_normalizers: list[Options], path: str) -> tuple[list[Options], list[Problem]]:
        """Return the normalizer options as changed by this setting, and its problems; `path` is the setting's path.

        YaRN's temperature is one, if it is on and some normalizer's scores do not scale with q.
        """
        problems: list[Problem] = []
        key_path = f"{path}.normalizer"
        normalizers = [with_changes(options, self.normalizer, key_path, problems) for options in trained_normalizers]
        for name in self.missing_options(trained_normalizers):
            reason = "no normalizer of this model has this option"
            problems.append(Problem(f"{key_path}.{name}", self.normalizer[name], reason, "drop it"))
        layers = [layer for options in trained_normalizers for layer in options.layer_options()]
        unscaled_names = [layer.name for layer in layers if not layer.scales_with_q]
        if unscaled_names and getattr(self.rope, "temperature", False):
            reason = f"is a factor on queries, and none on the scores of {unscaled_names[0]}"
            problems.append(Problem(f"{path}.rope.temperature", True, reason, "set it to false"))
        return normalizers, list({problem.path: problem for problem in problems}.values())

    def missing_options(self, normalizers: list[Options]) -> list[str]:
        """Names of normalizer options in this setting that none of `normalizers` has."""
        names = {spec.name for options in normalizers for layer in options.layer_options() for spec in fields(layer)}
        return [name for name in self.normalizer if name not in names]


def _number_text(value: float) -> str:
    """Return a number as text, with six significant digits if they represent `value` exactly, else with all digits."""
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def check_inference(settings: list[InferenceSetting], position: Position) -> Iterator[Problem]:
    """Yield problems of an evaluation's inference settings, given the model's `position`; paths are relative to the
    evaluation's block.
    """
    if not settings or any(setting in settings[:index] for index, setting in enumerate(settings)):
        labels = [setting.label for setting in settings]
        yield Problem("inference", labels, "must be a list of different inference settings", "set it to [{}]")
    for index, setting in enumerate(settings):
        if setting.rope.name != "as_trained" and not position.rotates:
            reason = f"model.position = {position.name} has no RoPE to scale"
            yield Problem(f"inference[{index}].rope", setting.rope.name, reason, "set it to as_trained")
