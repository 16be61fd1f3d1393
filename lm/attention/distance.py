"""Softmax of logits that depend on how far back a key is."""

import math

import torch
from torch import Tensor

from lm.attention import table
from lm.attention.lengths import Rows
from lm.attention.normalizers import Normalizer, logits


class ALiBi(Normalizer):
    """softmax(z - m_h t), t tokens back, m_h = 2^(-8 h / H) for heads h = 1 ... H: arXiv 2108.12409."""

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        heads = torch.arange(1, self.shape.n_head + 1, device=q.device)
        slopes = (2.0 ** (-8 * heads / self.shape.n_head)).view(-1, 1, 1)
        z = logits(q, k) - (slopes * rows.distance()).to(q.dtype)
        return z.masked_fill(~rows.visible(), -math.inf).softmax(-1)


class ScaleInvariant(Normalizer):
    """softmax(a_t z + m_t), t tokens back: total attention to each octave of distance stays the same, arXiv 2505.17083.

    a_t = sqrt(2 (ln(t / tau + 1) - ln al + be / al)), m_t = be / al - a_t^2, al = be = e^(1/2), so that a_0 = 1 and m_0 = 0.
    """

    options: table.ScaleInvariant

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        visible = rows.visible()
        distance = rows.distance().clamp(min=0.0)
        square = 2 * (torch.log1p(distance / self.options.tau) - 0.5 + 1.0)  # ln al = 1/2, be / al = 1
        z = logits(q, k) * square.sqrt().to(q.dtype) + (1.0 - square).to(q.dtype)
        return z.masked_fill(~visible, -math.inf).softmax(-1)
