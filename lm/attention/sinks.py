"""With an attention sink, softmax has one more logit whose value vector is zero, so that a query's weights sum to less
than 1.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import FUSED_SOFTMAX, SoftmaxNormalizer
from lm.attention.options import MAX_FACTOR, Options, key


@dataclass
class Softmax1(Options):
    """Options of the normalizer `softmax1`, softmax with a sink whose logit is 0."""

    name = "softmax1"
    full_formula = "e^z / (1 + sum e^z)"
    source = "Miller 2023"
    published_findings = "removes attention sinks"
    sums_to_one = False


class Softmax1Normalizer(SoftmaxNormalizer):
    """Softmax with a sink: weights are e^z_j / (e^b + sum e^z), for logits z and one more logit b per head. Here b is
    0.

    The fused kernel gets one more key before the first, with logit b and value 0, which every query sees. The weights
    equal softmax's times sigmoid(lse - b), where lse = ln sum e^z.
    """

    schema = Softmax1
    kernel = FUSED_SOFTMAX

    def sink_logit_by_head(self, device: torch.device) -> Tensor:
        """Return the sink's logit b of each head, (H,) fp32."""
        return torch.zeros(self.layer.n_head, device=device)

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        z = scores.masked_fill(~layout.visible(), -math.inf)
        b = self.sink_logit_by_head(z.device).to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:3], 1)
        return torch.cat((b, z), -1).softmax(-1)[..., 1:]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        bias = F.pad(self.sink_logit_by_head(q.device).view(1, -1, 1), (0, k.size(2)))  # (1, H, 1 + S)
        k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        if layout.mask_is_triangular:  # one more query in front keeps the causal mask square
            return routes.fused_softmax(F.pad(q, (0, 0, 1, 0)), k, v, layout, key_bias=bias)[:, :, 1:]
        return routes.fused_softmax(q, k, v, layout, F.pad(layout.visible(), (1, 0), value=True), bias)


@dataclass
class Sink(Options):
    """Options of the normalizer `sink`, softmax with a sink whose logit is learned."""

    name = "sink"
    full_formula = "e^z / (e^b + sum e^z)"
    learned_parameters = "b per layer and head"
    source = "gpt-oss's code"
    published_findings = "softmax times sigmoid(lse - b)"
    sums_to_one = False
    init: float = key(0.0, "initial value of b", ge=-MAX_FACTOR, le=MAX_FACTOR)


class SinkNormalizer(Softmax1Normalizer):
    """Softmax with a sink whose logit b is learned per head, as in gpt-oss."""

    schema = Sink

    def initialise(self) -> None:
        self.b = self.new_parameter(self.options.init)

    def sink_logit_by_head(self, device: torch.device) -> Tensor:
        return self.b
