"""Softmax of logits that depend on how far back a key is."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Forget(Normalizer):
    """softmax(z + c_i - c_j), c the running sum of ln f, f = sigmoid(w.x + b) a gate of each token and head: arXiv 2503.02130.

    Sums are in fp32. w starts at 0 and b at 5, so that a token is first forgotten at a rate of 0.7 %.
    """

    def initialise(self) -> None:
        self.w = nn.Parameter(torch.zeros(self.shape.n_head, self.shape.width))
        self.b = nn.Parameter(torch.full((self.shape.n_head,), 5.0))

    def key_features(self, x: Tensor) -> Tensor:
        """ln f, (B, H, T, 1)."""
        with torch.autocast(x.device.type, enabled=False):
            gate = F.linear(x.to(self.w.dtype), self.w, self.b)
        return F.logsigmoid(gate).transpose(1, 2).unsqueeze(-1)

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        visible = rows.visible()
        k, log_f = k[..., :-1], k[..., -1]
        so_far = log_f.cumsum(-1)  # (B, H, S), over documents, too: only differences within one count
        shown = visible.expand(*q.shape[:2], *visible.shape[-2:])
        first = shown.int().argmax(-1)  # (B, H, T), the first key of the query's document
        own = (shown.to(log_f.dtype) @ log_f.unsqueeze(-1)).squeeze(-1) + (so_far - log_f).gather(-1, first)
        z = logits(q, k) + own.unsqueeze(-1) - so_far.unsqueeze(-2)
        return z.masked_fill(~visible, -math.inf).softmax(-1)
