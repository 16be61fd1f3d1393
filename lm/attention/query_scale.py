"""Softmax of scaled logits: one factor a query, so that the fused softmax kernel serves all of them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import options
from lm.attention.fused import fused_softmax, softmax_route
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer, SoftmaxNormalizer, logits
from lm.attention.precision import without_autocast


class QueryScale(SoftmaxNormalizer):
    """softmax of the scores c q.k / sqrt(D), with one factor c per query and head.

    Scaling q is scaling the logits, so every member runs on the fused softmax kernel. The product is
    computed in the dtype of q (fp32 in training) and rounded to v's dtype once.
    """

    def scale(self, layout: AttentionLayout) -> Tensor | None:
        """c as fp32, broadcastable to (B, H, T); None for 1."""
        return None

    def scale_by_position(self) -> Tensor | None:
        device = next((p.device for p in self.parameters()), "cpu")
        scale = self.scale(AttentionLayout.full(self.layer.train_length, device))
        c = torch.ones(1, 1) if scale is None else scale.detach()
        return c.double().expand(self.layer.n_head, self.layer.train_length)

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        z, scale = logits(q, k), self.scale(layout)
        return z if scale is None else z * scale.unsqueeze(-1).to(z.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        scale = self.scale(layout)
        if scale is not None:
            q = q * scale.unsqueeze(-1)
        return fused_softmax(q, k, v, layout)

    def kernel_description(self, device: str = "cpu") -> str:
        return f"{softmax_route(device, self.layer.train_length)}, q scaled in fp32: a factor on the logits is a factor on the query"


class Softmax(QueryScale):
    """softmax(z / tau), z = q.k / sqrt(D); tau is a constant, 1 unless set."""

    options: options.Softmax

    def scale(self, layout: AttentionLayout) -> Tensor | None:
        tau = self.options.temperature
        return None if tau == 1 else torch.full((1, 1), 1 / tau, device=layout.positions.device)

    def kernel_description(self, device: str = "cpu") -> str:
        plain = f"{softmax_route(device, self.layer.train_length)}: plain softmax"
        return plain if self.options.temperature == 1 else super().kernel_description(device)


class SSMax(QueryScale):
    """softmax((s ln n + b) z), arXiv 2501.19399 Eq. 2; s and b are learned per layer and head.

    s starts at 1 / mean ln n over a training sequence (the mean logit scale is then softmax's 1), at 1 (`unit`) or
    at the given number; b, if any, at 0. `scale: none` fixes s = 1.
    """

    options: options.SSMax

    def initialise(self) -> None:
        if self.options.scale == "learned":
            first = {"match": 1 / self.log_n().mean().item(), "unit": 1.0}.get(self.options.init, self.options.init)
            self.s = nn.Parameter(torch.full((self.layer.n_head,), first))
        if self.options.bias:
            self.b = nn.Parameter(torch.zeros(self.layer.n_head))

    def log_n(self) -> Tensor:
        """ln n at each position of a training sequence: (L,) float64."""
        return AttentionLayout.full(self.layer.train_length).n(self.options.n).double().log()

    @torch.no_grad()
    def init_from(self, other: Normalizer) -> None:
        """With `init: match`, follow the factor c(n) of `other` over a training sequence, head by head.

        s alone keeps the mean of the factor: s = mean c / mean ln n (1 / mean ln n after softmax). s and b are the
        least-squares line of c on ln n: s = 0, b = 1 after softmax, which is softmax to the bit.
        """
        c, log_n = other.scale_by_position(), self.log_n()
        if self.options.init != "match" or c is None:
            return
        c = c.cpu()
        s = torch.ones_like(c[:, 0])
        if self.options.scale == "learned":
            s = c.mean(-1) / log_n.mean()
            if self.options.bias:
                centred = log_n - log_n.mean()
                s = (c - c.mean(-1, keepdim=True)) @ centred / centred.square().sum().clamp(min=1e-12)
            self.s.copy_(s)
        if self.options.bias:
            self.b.copy_((c - s.unsqueeze(-1) * log_n).mean(-1))

    def scale(self, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log()  # (1, T) or (B, 1, T)
        if self.options.scale == "learned":
            scale = self.s.unsqueeze(-1) * scale  # (H, T) or (B, H, T)
        return scale + self.b.unsqueeze(-1) if self.options.bias else scale


class ScaleFromBase(QueryScale):
    """A factor that is 1 at n = m, the option `base` (`train`: the training length)."""

    options: options.LogN | options.InfoScale | options.YaRN

    def initialise(self) -> None:
        self.base = float(self.layer.train_length if self.options.base == "train" else self.options.base)

    def constants(self) -> dict[str, float]:
        return {"base": self.base}


class LogN(ScaleFromBase):
    """softmax(z ln n / ln m), kexue.fm 8823: equal to softmax at n = m, entropy nearly flat in n.

    `clip` gives max(1, ln n / ln m), for models trained without the factor (Qwen's `logn`).
    """

    options: options.LogN

    def scale(self, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log() / math.log(self.base)  # (1, T) or (B, 1, T)
        return scale.clamp(min=1.0) if self.options.clip else scale


class SqrtLogN(QueryScale):
    """softmax(c sqrt(2 ln n) z), the growth of the largest of n Gaussian logits; c learned per layer and head.

    c starts at 1 / mean sqrt(2 ln n) over a training sequence.
    """

    options: options.SqrtLogN

    def initialise(self) -> None:
        growth = self.growth(AttentionLayout.full(self.layer.train_length)).double().mean().item()
        self.c = nn.Parameter(torch.full((self.layer.n_head,), 1 / growth))

    def growth(self, layout: AttentionLayout) -> Tensor:
        """sqrt(2 ln n), (1, T) or (B, 1, T)."""
        return (2 * self.row_length(layout).log()).sqrt()

    def scale(self, layout: AttentionLayout) -> Tensor:
        return self.c.unsqueeze(-1) * self.growth(layout)


class Llama4(QueryScale):
    """softmax(z (1 + a ln(1 + floor((position + 1) / f)))): Llama 4's attention temperature tuning."""

    options: options.Llama4

    def scale(self, layout: AttentionLayout) -> Tensor:
        steps = torch.floor((layout.positions + 1).float() / self.options.floor_scale)
        return (1 + self.options.attn_scale * torch.log1p(steps)).unsqueeze(-2)


class YaRN(ScaleFromBase):
    """softmax(z (0.1 ln(n / m) + 1)^2) where n, here the document's length, is above m: YaRN's temperature, arXiv 2309.00071.

    The temperature alone; RoPE's frequencies are rescaled by an inference setting.
    """

    options: options.YaRN

    def scale(self, layout: AttentionLayout) -> Tensor:
        return (0.1 * (self.row_length(layout) / self.base).clamp(min=1.0).log() + 1).square()


class InfoScale(ScaleFromBase):
    """softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D))), D the head size: arXiv 2501.08570. Equal to softmax at n = m."""

    options: options.InfoScale

    def scale(self, layout: AttentionLayout) -> Tensor:
        power = -2 / self.layer.head_size
        n = self.row_length(layout).double()  # in fp32 the difference of two powers would depend on where in a tensor they are
        return ((1 - n**power).sqrt() / math.sqrt(1 - self.base**power)).float()


def unit_vectors(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension, in fp32 or wider."""
    return F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


class Cosine(QueryScale):
    """softmax(g cos(q, k)) or softmax(g ln n cos(q, k)): unit queries and keys (arXiv 2010.04245; Su, kexue.fm 9859: 4 ln n).

    The gain g is learned per layer and head. It starts so that the mean factor is that of QK-norm, sqrt(D) (our choice).
    """

    options: options.Cosine

    def initialise(self) -> None:
        growth = self.growth(AttentionLayout.full(self.layer.train_length)).double().mean().item()
        self.g = nn.Parameter(torch.full((self.layer.n_head,), math.sqrt(self.layer.head_size) / growth))

    def growth(self, layout: AttentionLayout) -> Tensor:
        """ln n, or 1: (1, T) or (B, 1, T)."""
        n = self.row_length(layout)
        return n.log() if self.options.log_n else torch.ones_like(n)

    def scale(self, layout: AttentionLayout) -> Tensor:
        return self.g.unsqueeze(-1) * self.growth(layout) * math.sqrt(self.layer.head_size)  # undoes 1 / sqrt(D)

    def scale_by_position(self) -> Tensor | None:
        return None  # a factor on other logits than softmax's

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return super().define_scores(unit_vectors(q), unit_vectors(k), layout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().forward(unit_vectors(q), unit_vectors(k), v, layout)


class PN(QueryScale):
    """softmax((s p_n + b) z) with a table p_n, n = 1 ... training length, that all layers and heads share (arXiv 2501.19399, sec. 2.1).

    s and b are learned per layer and head. p starts at 1, s at 1 and b at 0 (our choice): the whole as softmax. p is
    identifiable only up to scale and offset, which s and b absorb. Beyond the training length its last entry is used.
    """

    def initialise(self) -> None:
        self.p = nn.Parameter(torch.ones(self.layer.train_length))
        self.s = nn.Parameter(torch.ones(self.layer.n_head))
        self.b = nn.Parameter(torch.zeros(self.layer.n_head))

    def tie_parameters(self, first: Normalizer) -> None:
        if isinstance(first, PN):
            self.p = first.p

    def scale(self, layout: AttentionLayout) -> Tensor:
        p = self.p[layout.positions.clamp(max=len(self.p) - 1)].unsqueeze(-2)  # (1, T) or (B, 1, T)
        return self.s.unsqueeze(-1) * p + self.b.unsqueeze(-1)


class _MLP(nn.Module):
    """Two layers, 64 hidden, GELU; gives `start` everywhere at first."""

    def __init__(self, size: int, out: int, start: float):
        super().__init__()
        self.hidden, self.out = nn.Linear(size, 64), nn.Linear(64, out)
        for zero in (self.hidden.bias, self.out.weight):
            nn.init.zeros_(zero)
        nn.init.constant_(self.out.bias, start)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.hidden(x)))


class QASSMax(SoftmaxNormalizer):
    """softmax(z) with q scaled dimension by dimension: q * B(ln n) * (1 + tanh G(q)), B and G MLPs (TabICLv2).

    G's last layer starts at 0, as there; B starts at 1 (our choice), so that the whole starts as softmax. Both are shared
    by a layer's heads but for B's output, one a head and dimension.
    """

    options: options.QASSMax

    def initialise(self) -> None:
        self.base = _MLP(1, self.layer.n_head * self.layer.head_size, 1.0)
        self.gate = _MLP(self.layer.head_size, self.layer.head_size, 0.0)

    def scaled(self, q: Tensor, layout: AttentionLayout) -> Tensor:
        """q (B, H, T, D) times both factors, in fp32 or wider."""
        q = q.to(torch.promote_types(q.dtype, self.base.out.weight.dtype))
        with without_autocast(q.device):
            log_n = layout.n(self.options.n).log().unsqueeze(-1).to(self.base.out.weight.dtype)  # (T, 1) or (B, T, 1)
            base = self.base(log_n).unflatten(-1, (self.layer.n_head, -1)).transpose(-2, -3)  # (H, T, D) or (B, H, T, D)
            gate = 1 + self.gate(q.to(self.gate.out.weight.dtype)).tanh()
        return q * base * gate

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return logits(self.scaled(q, layout), k)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return fused_softmax(self.scaled(q, layout), k, v, layout)

    def kernel_description(self, device: str = "cpu") -> str:
        return f"{softmax_route(device, self.layer.train_length)}, each dimension of q scaled in fp32"
