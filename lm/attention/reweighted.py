"""These normalizers compute softmax weights and then change them: an offset makes small weights 0, or a temperature
depends on the weights' entropy.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer, SoftmaxNormalizer
from lm.attention.options import MAX_FACTOR, N_HELP, Options, key

# of the entropy in nats, highest power first, as fitted by the authors
TEMPERATURE_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)
MIN_ENTROPY = 0.5  # nats, up to which weights stay as they are


@dataclass
class Elastic(Options):
    """Options of the normalizer `elastic`, which adds an offset to softmax's weights."""

    name = "elastic"
    full_formula = "relu(softmax(z) + tau / n)"
    learned_parameters = "tau per layer and head"
    source = "Elastic-Softmax, arXiv 2601.00919 and its code"
    published_findings = "no figures known to us"
    sums_to_one = False
    init: float = key(-1.0, "initial value of tau: at -1 weights below 1 / n are 0", ge=-MAX_FACTOR, le=MAX_FACTOR)
    n: str = key("visible", N_HELP)


class ElasticNormalizer(SoftmaxNormalizer):
    """Elastic-Softmax gives the weights relu(softmax(z) + tau / n), with tau learned per head (arXiv 2601.00919).

    If it replaces another softmax in a trained model, tau starts at 0, which changes nothing.
    """

    schema = Elastic
    score_map = ""

    def initialise(self) -> None:
        self.tau = self.new_parameter(self.options.init)

    def init_from(self, source: Normalizer) -> None:
        if source.score_map == "exp":
            self.tau.data.zero_()

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        offset = (self.tau.unsqueeze(-1) / self.row_length(layout)).unsqueeze(-1)
        weights = super().normalize(scores, layout) + offset.to(scores.dtype)
        return weights.relu().masked_fill(~self.visible(layout), 0.0)


@dataclass
class EntropyTemperature(Options):
    """Options of the normalizer `entropy_temperature`, whose temperature follows the entropy of weights."""

    name = "entropy_temperature"
    full_formula = "softmax(b(H) z), b a polynomial of the entropy H of softmax(z)"
    source = "arXiv 2410.01104, the authors' coefficients"
    published_findings = (
        "for models trained without it. b is 2.2 at 3 nats, 1 up to 0.5 and above 6: diffuse rows of long sequences "
        "stay as they are"
    )


class EntropyTemperatureNormalizer(SoftmaxNormalizer):
    """Softmax of b(H) z, where H is the entropy of softmax(z) in nats (arXiv 2410.01104).

    b is a polynomial of H, but at least 1, and 1 where H is at most 0.5.
    """

    schema = EntropyTemperature
    score_map = ""

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        visible = self.visible(layout)
        log_weights = scores.masked_fill(~visible, -math.inf).log_softmax(-1).masked_fill(~visible, 0.0)
        entropy = -(log_weights.exp() * log_weights).sum(-1, keepdim=True)  # hidden keys add 1 x 0
        value = torch.zeros_like(entropy)
        for coefficient in TEMPERATURE_POLYNOMIAL:
            value = value * entropy + coefficient
        b = value.clamp(min=1.0).where(entropy > MIN_ENTROPY, torch.ones_like(entropy))
        return super().normalize(scores * b, layout)

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> None:
        return None
