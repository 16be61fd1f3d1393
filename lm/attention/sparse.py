"""Sparsemax, 1.5-entmax and softpick, which give many keys a weight of exactly 0."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import gpu_kernels, routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer, logits
from lm.attention.options import N_HELP, Options, key


def subtract_largest_logit(z: Tensor, layout: AttentionLayout) -> Tensor:
    """Subtract each query's largest visible logit from its logits z, and set those of masked keys to -inf.

    The largest logit has no gradient here, as weights don't depend on it.
    """
    z = z.masked_fill(~layout.visible(), -math.inf)
    return z - z.amax(-1, keepdim=True).detach()


@dataclass
class Sparsemax(Options):
    """Options of the normalizer `sparsemax`, the projection of logits onto the simplex."""

    name = "sparsemax"
    full_formula = "relu(z - tau)"
    source = "Martins and Astudillo 2016, arXiv 1602.02068"
    published_findings = "exact zeros"


class SparsemaxNormalizer(Normalizer):
    """Sparsemax projects logits z onto the simplex: weights are relu(z - tau), where tau is such that they sum to one
    (arXiv 1602.02068).
    """

    schema = Sparsemax
    kernel = "query blocks; on CUDA adasplash's"
    gpu_package = gpu_kernels.ADASPLASH
    alpha = 2.0

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return gpu_kernels.entmax(q, k, v, self.alpha)

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        z = subtract_largest_logit(scores, layout)
        z_minus_tau = z - entmax_threshold(z.detach(), 1)
        positive_part = z_minus_tau.relu()
        # Solve the linear equation for tau on the support of `positive_part`: exact, and with the gradient of tau.
        return (
            z_minus_tau
            - (positive_part.sum(-1, keepdim=True) - 1) / positive_part.detach().sign().sum(-1, keepdim=True)
        ).relu()


@dataclass
class Entmax15(Options):
    """Options of the normalizer `entmax15`, which is between softmax and sparsemax."""

    name = "entmax15"
    full_formula = "relu(z / 2 - tau)^2"
    source = "Peters et al. 2019, arXiv 1905.05702"
    published_findings = "exact zeros"


class Entmax15Normalizer(SparsemaxNormalizer):
    """1.5-entmax is between softmax and sparsemax: weights are relu(z / 2 - tau)^2, where tau is such that they sum to
    one (arXiv 1905.05702).
    """

    schema = Entmax15
    alpha = 1.5

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        z = subtract_largest_logit(scores, layout) / 2
        z_minus_tau = z - entmax_threshold(z.detach(), 2)
        positive_part = z_minus_tau.relu()
        # Solve the quadratic equation for tau on the support of `positive_part`: exact, and with the gradient of tau.
        total, excess = positive_part.sum(-1, keepdim=True), positive_part.square().sum(-1, keepdim=True) - 1
        support_size = positive_part.detach().sign().sum(-1, keepdim=True)
        return (
            (z_minus_tau - excess / (total + (total.square() - support_size * excess).clamp(min=1e-30).sqrt()))
            .relu()
            .square()
        )


def entmax_threshold(z: Tensor, p: Literal[1, 2]) -> Tensor:
    """Return the tau (..., 1) at which relu(z - tau) has p-norm 1, for rows z (..., S) whose largest entry is 0. The
    error of tau is at most 32 eps.

    tau is the root of g(tau) = p-norm of relu(z - tau), minus 1. Newton's method starts at tau = -1. As g is convex and
    falling, it does not pass the root. z must not require a gradient.

    A fixed number of steps is enough. Let slope be -g', which is never below 1. In each step g_new / g + slope_new /
    slope <= 1, so the product g x slope is divided by at least 4. At the start this product is at most S^(2 / p). So g
    is at most 32 eps after log2(S) / p - log2(32 eps) / 2 steps.
    """
    tau = torch.full_like(z[..., :1], -1)
    positive_part = torch.empty_like(z)
    bits = -math.log2(torch.finfo(z.dtype).eps)
    for _ in range(math.ceil(math.log2(z.size(-1)) / p + (bits - 5) / 2)):
        torch.sub(z, tau, out=positive_part).relu_()
        total = positive_part.sum(-1, keepdim=True)
        norm = total if p == 1 else torch.linalg.vector_norm(positive_part, dim=-1, keepdim=True)
        slope = positive_part.sign_().sum(-1, keepdim=True) if p == 1 else total / norm
        tau = tau + (norm - 1) / slope
    return tau


@dataclass
class ASEntmax(Options):
    """Options of the normalizer `asentmax`, 1.5-entmax whose factor on logits depends on n and the layer's input."""

    name = "asentmax"
    full_formula = "1.5-entmax((1 + b (ln n)^g) z), b = softplus(w_b.x), g = 2 tanh(w_g.x), x the layer's input"
    learned_parameters = "w_b, w_g (width C) per layer and head"
    source = "arXiv 2506.16640"
    published_findings = (
        "multi-query recall to 65k from training at 64; loss better at 8 times the length (abstract). ln n is the "
        "paper's, its authors' code has ln(n + 1)"
    )
    n: str = key("visible", N_HELP)


class ASEntmaxNormalizer(Entmax15Normalizer):
    """1.5-entmax of (1 + b (ln n)^g) z for logits z, with b = softplus(w_b.x) and g = 2 tanh(w_g.x) for the layer's
    input x.

    w_b and w_g start at 0 (our choice), so that the factor on logits is at first 1 + ln 2 at every n.
    """

    schema = ASEntmax

    def initialise(self) -> None:
        self.w_b, self.w_g = (self.new_parameter(0.0, self.layer.n_head, self.layer.width) for _ in range(2))

    def query_features(self, x: Tensor) -> Tensor:
        """Return the coefficients b and g of the class's formula for each query, (B, H, T, 2)."""
        with routes.without_autocast(x.device):
            x = x.to(self.w_b.dtype)
            b, g = F.softplus(F.linear(x, self.w_b)), 2 * F.linear(x, self.w_g).tanh()
        return torch.stack((b, g), -1).transpose(1, 2)

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return logits(q[..., :-2], k) * self.scale(q, layout)

    def scale(self, q: Tensor, layout: AttentionLayout) -> Tensor:
        """Return the factor 1 + b (ln n)^g of each query's logits, (B, H, T, 1); q (B, H, T, D + 2) ends with b
        and g.
        """
        log_n = self.row_length(layout).log().unsqueeze(-1).to(q.dtype)  # (1, T, 1) or (B, 1, T, 1)
        growth = log_n.clamp(min=math.log(2)) ** q[..., -1:]  # n = 1 as n = 2: a single key has weight 1 anyway
        return 1 + q[..., -2:-1] * growth

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return super().gpu_forward(q[..., :-2] * self.scale(q, layout), k, v, layout)


@dataclass
class Softpick(Options):
    """Options of the normalizer `softpick`, whose weights are 0 for negative logits."""

    name = "softpick"
    full_formula = "relu(e^z - 1) / (sum |e^z - 1| + 1e-8)"
    source = "softpick's code, 2025"
    published_findings = "no sinks and 47 % exact zeros at 340 M (secondary)"
    sums_to_one = False


class SoftpickNormalizer(Normalizer):
    """Softpick gives the weights relu(e^z - 1) / (sum |e^z - 1| + 1e-8) for logits z, which sum to 1 at most.

    The 1e-8 matters only if no |z| is much larger.
    """

    schema = Softpick
    kernel = "query blocks; no package on the index has a kernel"

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        signed_weights, _ = self._signed_weights_and_max_score(scores, layout)
        return signed_weights.relu() / (signed_weights.abs().sum(-1, keepdim=True) + 1e-8)

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        """Return ln of the sum of |e^z - 1| over the keys that each query sees."""
        signed_weights, top = self._signed_weights_and_max_score(scores, layout)
        return signed_weights.abs().sum(-1).log() + top.squeeze(-1)

    def _signed_weights_and_max_score(self, z: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
        """Return (e^z - 1) / e^top, 0 where masked, and top (B, H, T, 1).

        top is the largest score of the keys that a query sees, but at least 0.
        """
        visible = layout.visible()
        top = z.masked_fill(~visible, 0.0).amax(-1, keepdim=True).clamp(min=0.0).detach()  # keeps both terms below 1
        # Small scores take `expm1`: a difference of two exponentials would be rounded away.
        # Not clamp(max=top), whose gradient at the largest score differs between releases of torch.
        large_terms = (top.where(z > top, z) - top).exp() - (-top).exp()
        small_terms = z.clamp(max=1.0).expm1() * (-top).exp()
        return small_terms.where(z < 1, large_terms).masked_fill(~visible, 0.0), top
