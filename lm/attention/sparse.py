"""Weights with exact zeros: sparsemax, 1.5-entmax, softpick."""

import torch
from torch import Tensor

from lm.attention.lengths import Rows
from lm.attention.normalizers import Normalizer, logits


def visible_logits(q: Tensor, k: Tensor, rows: Rows) -> Tensor:
    """z with its row's largest visible entry subtracted, entries below -2 raised to it and masked ones set to it.

    Neither sparsemax nor 1.5-entmax gives weight to anything that far below the largest.
    """
    z = logits(q, k).masked_fill(~rows.visible(), -torch.inf)
    return (z - z.amax(-1, keepdim=True).detach()).clamp(min=-2.0)


class Sparsemax(Normalizer):
    """relu(z - tau), tau such that the row sums to one: the projection onto the simplex, arXiv 1602.02068."""

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        z = visible_logits(q, k, rows)
        high = z.sort(-1, descending=True).values
        rank = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
        above = high.cumsum(-1) - 1
        size = (rank * high > above).sum(-1, keepdim=True)  # of the support
        tau = above.gather(-1, size - 1) / size
        return (z - tau).relu()


class Entmax15(Normalizer):
    """relu(z / 2 - tau)^2, tau such that the row sums to one: alpha-entmax with alpha = 1.5, arXiv 1905.05702."""

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        z = visible_logits(q, k, rows) / 2
        high = z.sort(-1, descending=True).values
        rank = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
        mean = high.cumsum(-1) / rank
        spread = high.square().cumsum(-1) - rank * mean.square()  # of the first `rank` entries
        inside = (1 - spread) / rank
        candidates = mean - inside.clamp(min=1e-30).sqrt()
        size = ((candidates <= high) & (inside > 0)).sum(-1, keepdim=True).clamp(min=1)
        return (z - candidates.gather(-1, size - 1)).relu().square()


class Softpick(Normalizer):
    """relu(e^z - 1) / sum |e^z - 1|: no sink, exact zeros, a row sum of at most 1, arXiv 2504.20966."""

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        visible = rows.visible()
        z = logits(q, k)
        top = z.masked_fill(~visible, 0.0).amax(-1, keepdim=True).clamp(min=0.0).detach()  # keeps both terms below 1
        a = (torch.exp(z.masked_fill(~visible, -torch.inf) - top) - torch.exp(-top)).masked_fill(~visible, 0.0)
        return a.relu() / (a.abs().sum(-1, keepdim=True) + 1e-8)
