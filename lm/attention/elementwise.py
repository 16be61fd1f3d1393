"""Elementwise attention: each weight is a function of its own score, and of n or the sum of its row."""

import torch
from torch import Tensor, nn

from lm.attention import options
from lm.attention.elementwise_sums import elementwise_attention, why_tiles
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import DividedNormalizer, logits
from lm.attention.score_functions import Relu, Relu2, ScoreFunction, Sigmoid


class ElementwiseNormalizer(DividedNormalizer):
    """f(z + b(n)) r(n): a function of the score z + b(n), the logit with a shift for each row, and a factor for each row."""

    f: ScoreFunction

    @property
    def score_map(self) -> str:
        return self.f.kind

    def shift(self, layout: AttentionLayout) -> Tensor | None:
        """b as fp32, broadcastable to (B, H, T); None for 0."""
        return None

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        z, shift = logits(q, k), self.shift(layout)
        return z if shift is None else z + shift.unsqueeze(-1).to(z.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if not layout.causal:
            return super().forward(q, k, v, layout)
        factor = self.factor(layout)
        out = elementwise_attention(self.f, q.to(v.dtype), k.to(v.dtype), v, self.shift(layout), over_sum=factor is None)
        return out if factor is None else (out * factor.unsqueeze(-1)).to(v.dtype)

    def kernel_description(self, device: str = "cpu") -> str:
        why = why_tiles(torch.device(device), torch.float32, self.layer.head_size)
        kernel = f"causal tiles of keys and queries, backward by hand ({why})" if why else "Triton, tiles that stay on the chip"
        return f"{kernel}: elementwise attention needs no row statistics"


class Relu2Normalizer(ElementwiseNormalizer):
    """relu(z)^2 / n, GAU's (arXiv 2202.10447); or relu(q.k / n)^2; or normalised by its sum (Su, kexue.fm 9019)."""

    options: options.Relu2
    f = Relu2()

    def factor(self, layout: AttentionLayout) -> Tensor | None:
        return super().factor(layout) if self.options.form == "1/(n d)" else self.layer.head_size / self.row_length(layout).square()


class ReluNormalizer(ElementwiseNormalizer):
    """relu(z) / n, arXiv 2309.08586."""

    options: options.Relu
    f = Relu()


class SigmoidNormalizer(ElementwiseNormalizer):
    """sigmoid(z - ln n + b), arXiv 2409.04431; b, from 0, is learned per layer and head if asked."""

    options: options.Sigmoid
    f = Sigmoid()

    def initialise(self) -> None:
        if self.options.bias:
            self.b = nn.Parameter(torch.zeros(self.layer.n_head))

    def shift(self, layout: AttentionLayout) -> Tensor:
        shift = -self.row_length(layout).log()
        return shift + self.b.unsqueeze(-1) if self.options.bias else shift

    def factor(self, layout: AttentionLayout) -> Tensor:
        return torch.ones_like(layout.positions, dtype=torch.float32).unsqueeze(-2)
