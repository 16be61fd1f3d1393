"""Stick-breaking attention: from the latest key back, each takes its part of what the later ones have left."""

from __future__ import annotations

from dataclasses import dataclass

from lm.attention.lazy import AttentionLayout, F, Tensor
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options


@dataclass
class StickBreaking(Options):
    name = "stick_breaking"
    full_formula = "sigmoid(z_j) prod (1 - sigmoid(z_k)), j < k < i"
    source = "arXiv 2410.17980"
    known = "without positions, trained at 2,048: perplexity goes on to fall up to 16,384 (abstract)"
    sums_to_one = False


class StickBreakingNormalizer(Normalizer):
    """Query i sees the keys before its own token: a document's first has none, and weights 0. Use it with `model.position: none`."""

    schema = StickBreaking

    def visible(self, layout: AttentionLayout) -> Tensor:
        return layout.visible() & (layout.distance() > 0)

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Sums of logarithms run from the latest key back, so that what comes after a key is summed without it, exactly."""
        visible = self.visible(layout)
        log_rest = F.logsigmoid(-scores).masked_fill(~visible, 0.0)  # ln of the part of the stick that a key leaves
        later_sums = F.pad(log_rest[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        return (F.logsigmoid(scores) + later_sums).exp().masked_fill(~visible, 0.0)
