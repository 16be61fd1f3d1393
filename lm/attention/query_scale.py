"""These normalizers are softmax of scaled queries, in most of them with one factor per query and head. The fused
softmax kernel computes all of them.

n is a query's row length, as the option `n` defines it; m is the training length (or the option `base`), D the head
size. Logits are z = q.k / sqrt(D).
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lm.attention import gpu_kernels, routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import FUSED_SOFTMAX, Normalizer, SoftmaxNormalizer, logits
from lm.attention.options import INIT_FIXED_REASON, MAX_FACTOR, MAX_LENGTH, N_HELP, Options, key, reference_length_key
from lm.errors import Problem


class FusedSoftmax(SoftmaxNormalizer):
    """Base of normalizers that are softmax attention of changed queries and keys (`fused_inputs`), which the fused
    kernel computes.
    """

    kernel = FUSED_SOFTMAX
    gpu_package = gpu_kernels.FLEX  # for packed documents

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        return logits(*self.fused_inputs(q, k, layout))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return routes.fused_softmax(*self.fused_inputs(q, k, layout), v, layout)

    def gpu_forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        return gpu_kernels.flex_softmax(*self.fused_inputs(q, k, layout), v, layout)


class QueryScale(FusedSoftmax):
    """Base of normalizers that are softmax of the scores c q.k / sqrt(D), with one factor c per query and head.

    Scaling q is scaling the logits, so every subclass runs on the fused softmax kernel. The product c q is computed in
    fp32 or wider, and rounded to v's dtype at most once.
    """

    def scale(self, layout: AttentionLayout) -> Tensor | None:
        """Return the factor c on a query's scores, fp32, broadcastable to (B, H, T); None: c is 1 for all queries."""
        return None

    def scale_by_position(self) -> Tensor | None:
        layout = self.training_layout(next((p.device for p in self.parameters()), "cpu"))
        scale = self.scale(layout)
        c = layout.n("fixed:1") if scale is None else scale.detach()
        return c.double().expand(self.layer.n_head, self.layer.train_length)

    def fused_inputs(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
        scale = self.scale(layout)
        return q if scale is None else q * scale.unsqueeze(-1), k


@dataclass
class Softmax(Options):
    """Options of the normalizer `softmax`, with a constant temperature."""

    name = "softmax"
    full_formula = "softmax(z / tau)"
    source = "baseline"
    published_findings = "entropy grows as ln n: attention fades with length"
    temperature: float = key(
        1.0, "tau, a constant that divides the logits: below 1 attention is sharper from the start", omit_default=True,
        ge=1 / MAX_FACTOR, le=MAX_FACTOR,
    )  # fmt: skip

    def formula(self) -> str:
        return self.full_formula if self.temperature != 1 else "softmax(z)"


class SoftmaxWithTemperature(QueryScale):
    """Softmax of logits that are divided by a constant temperature tau, 1 by default."""

    schema = Softmax

    def scale(self, layout: AttentionLayout) -> Tensor | None:
        tau = self.options.temperature
        return None if tau == 1 else layout.n("visible").new_full((1, 1), 1 / tau)


@dataclass
class SSMax(Options):
    """Options of the normalizer `ssmax`, whose factor on logits grows as ln n."""

    name = "ssmax"
    full_formula = "softmax((s ln n + b) z)"
    learned_parameters = "s (and b) per layer and head"
    source = "Nakanishi 2025, arXiv 2501.19399, Eq. 2"
    published_findings = (
        "training loss 0.008 nats below softmax at 162 M (same paper); validation loss 3 % worse at 1.2 B and 6 points "
        "downstream (2605.20798, secondary)"
    )
    fixed_by_training: ClassVar[Mapping[str, str]] = {
        "scale": "decides whether there is an s to learn",
        "bias": "decides whether there is a b to learn",
        "init": INIT_FIXED_REASON,
    }
    scale: Literal["learned", "none"] = key(
        "learned", "s of `s ln n`, one per layer and head; `none`: s = 1 (the paper's variant c)"
    )
    bias: bool = key(False, "learn b of `s ln n + b`, one per layer and head, from 0 (the paper's variant d)")
    init: Literal["match", "unit"] | float = key(
        "match",
        "initial value of s; `match`: 1 / mean of ln n over the training length, which keeps the mean logit scale at "
        "1, and in a swap the closed form that follows the old normalizer (docs/swapping.md); `unit`: 1",
        ge=-MAX_FACTOR,
        le=MAX_FACTOR,
    )
    n: str = key("visible", N_HELP)

    def formula(self) -> str:
        text = self.full_formula if self.bias else self.full_formula.replace(" + b", "")
        return text.replace("s ln n", "ln n") if self.scale == "none" else text

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.scale == "none" and self.init != "match":
            problems.append(
                Problem("init", self.init, "scale: none has no s to start", "drop init, or set scale: learned")
            )
        return problems


class SSMaxNormalizer(QueryScale):
    """Scalable-Softmax (arXiv 2501.19399, Eq. 2), which multiplies logits by s ln n, with s learned per head.

    With the option `bias` the factor is s ln n + b; with `scale: none` s is 1.
    """

    schema = SSMax

    def initialise(self) -> None:
        if self.options.scale == "learned":
            initial_s = {"match": 1 / self.training_log_n().mean().item(), "unit": 1.0}
            self.s = self.new_parameter(initial_s.get(self.options.init, self.options.init))
        if self.options.bias:
            self.b = self.new_parameter(0.0)

    def training_log_n(self) -> Tensor:
        """Return ln of the row length n at each position of a training sequence: (L,) float64."""
        return self.training_layout().n(self.options.n).double().log()

    def init_from(self, source: Normalizer) -> None:
        """Fit s ln n + b over a training sequence to the factor c(n) of `source`, head by head, if `init` is `match`.
        Keep initial values if `source` has no such factor.

        If s alone is learned, s = mean c / mean ln n; if b alone is, b = mean c - mean ln n. Either keeps the mean
        factor. If s and b are learned, the fit is by least squares. Where `source` is softmax, c = 1, and least squares
        give s = 0 and b = 1, which computes softmax to the bit.
        """
        c, log_n = source.scale_by_position(), self.training_log_n()
        if self.options.init != "match" or c is None:
            return
        c = c.detach().cpu()
        s = c.new_ones(len(c))
        if self.options.scale == "learned":
            s = c.mean(-1) / log_n.mean()
            if self.options.bias:
                centred_log_n = log_n - log_n.mean()
                s = (c - c.mean(-1, keepdim=True)) @ centred_log_n / centred_log_n.square().sum().clamp(min=1e-12)
            self.s.data.copy_(s)
        if self.options.bias:
            self.b.data.copy_((c - s.unsqueeze(-1) * log_n).mean(-1))

    def scale(self, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log()  # (1, T) or (B, 1, T)
        if self.options.scale == "learned":
            scale = self.s.unsqueeze(-1) * scale  # (H, T) or (B, H, T)
        return scale + self.b.unsqueeze(-1) if self.options.bias else scale


@dataclass
class LogN(Options):
    """Options of the normalizer `log_n`, whose factor on logits is ln n / ln m."""

    name = "log_n"
    full_formula = "softmax(z (ln n / ln m)^p)"
    source = "Su 2021, kexue.fm 8823; other powers p: arXiv 2605.12697 compares such laws"
    published_findings = (
        "masked LM trained at 64, at 256: accuracy 34.0 % against softmax's 23.0 % (8823); causal with RoPE, at 8 "
        "times the length: under a point alone, 4 to 10 points once positions are handled (kexue.fm 9708, 9948)"
    )
    base: Literal["train"] | float = reference_length_key("the length at which this is softmax")
    clip: bool = key(False, "never scale below 1, for models trained without it (`max(1, ln n / ln m)`)")
    power: float = key(1.0, "p: how fast the factor grows with ln n", omit_default=True, gt=0, le=8)
    n: str = key("visible", N_HELP)

    def formula(self) -> str:
        return self.full_formula if self.power != 1 else "softmax(z ln n / ln m)"


class LogNNormalizer(QueryScale):
    """Softmax with the factor ln n / ln m on logits, or a power of it (kexue.fm 8823). This factor keeps the entropy of
    weights nearly constant in n.

    With `clip` the factor is at least 1, as in Qwen's `logn`.
    """

    schema = LogN

    def scale(self, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log() / math.log(self.reference_length)  # (1, T) or (B, 1, T)
        scale = scale.clamp(min=1.0) if self.options.clip else scale
        return scale if self.options.power == 1 else scale**self.options.power


@dataclass
class SqrtLogN(Options):
    """Options of the normalizer `sqrt_log_n`, whose factor on logits grows as sqrt(ln n)."""

    name = "sqrt_log_n"
    full_formula = "softmax(c sqrt(2 ln n) z)"
    learned_parameters = "c per layer and head"
    source = "Gaussian logits (extreme values)"
    published_findings = "largest weight of Gaussian logits, c = 1: .46, .39, .35 at n = 64, 1,024, 16,384"
    n: str = key("visible", N_HELP)


class SqrtLogNNormalizer(QueryScale):
    """Softmax with the factor c sqrt(2 ln n) on logits, c learned per head. sqrt(2 ln n) grows as the largest of n
    Gaussian logits.

    At first the factor's mean in a training sequence is 1.
    """

    schema = SqrtLogN

    def initialise(self) -> None:
        self.c = self.new_parameter(1 / self.n_factor(self.training_layout()).double().mean().item())

    def n_factor(self, layout: AttentionLayout) -> Tensor:
        """Return sqrt(2 ln n), (1, T) or (B, 1, T)."""
        return (2 * self.row_length(layout).log()).sqrt()

    def scale(self, layout: AttentionLayout) -> Tensor:
        return self.c.unsqueeze(-1) * self.n_factor(layout)


@dataclass
class Llama4(Options):
    """Options of the normalizer `llama4`, whose factor on logits grows in steps of the position."""

    name = "llama4"
    full_formula = "softmax(z (1 + a ln(1 + floor((p + o) / f))))"
    source = "Llama 4's code; with o = 0 Ministral 3's, in transformers"
    published_findings = "used in Llama 4 in layers without positions"
    floor_scale: float = key(8192.0, "f, tokens after which the temperature first changes", ge=1, le=MAX_LENGTH)
    attn_scale: float = key(0.1, "a", ge=0, le=MAX_FACTOR)
    offset: Literal[0, 1] = key(1, "o, added to the position: Llama 4 counts from 1", omit_default=True)


class Llama4Normalizer(QueryScale):
    """Softmax with Llama 4's factor 1 + a ln(1 + floor((p + o) / f)) on the logits of the query at position p. a, o and
    f are options.
    """

    schema = Llama4

    def scale(self, layout: AttentionLayout) -> Tensor:
        steps = ((layout.positions + self.options.offset).float() / self.options.floor_scale).floor()
        return (1 + self.options.attn_scale * steps.log1p()).unsqueeze(-2)


@dataclass
class YaRN(Options):
    """Options of the normalizer `yarn`, whose factor on logits grows with the document's length."""

    name = "yarn"
    full_formula = "softmax(z (0.1 ln(n / m) + 1)^2)"
    source = "Peng et al. 2023, arXiv 2309.00071"
    published_findings = "one factor for each document; softmax up to the training length m"
    base: Literal["train"] | float = reference_length_key("the length up to which this is softmax")
    n: str = key("sample", N_HELP)


class YaRNNormalizer(QueryScale):
    """Softmax with YaRN's factor (0.1 ln(n / m) + 1)^2 on logits, m the training length; the factor is 1 for n up to m
    (arXiv 2309.00071).

    YaRN also rescales RoPE's frequencies. Other options do this, in training (`model.position`) or in inference.
    """

    schema = YaRN

    def scale(self, layout: AttentionLayout) -> Tensor:
        return (0.1 * (self.row_length(layout) / self.reference_length).clamp(min=1.0).log() + 1).square()


@dataclass
class InfoScale(Options):
    """Options of the normalizer `infoscale`, whose factor on logits depends on n and the head size."""

    name = "infoscale"
    full_formula = "softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)))"
    source = "arXiv 2501.08570"
    published_findings = "made for models trained without it"
    base: Literal["train"] | float = reference_length_key("the length at which this is softmax")
    n: str = key("visible", N_HELP)


class InfoScaleNormalizer(QueryScale):
    """Softmax with the factor sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)) on logits (arXiv 2501.08570)."""

    schema = InfoScale

    def scale(self, layout: AttentionLayout) -> Tensor:
        power = -2 / self.layer.head_size
        n = self.row_length(layout).double()  # 1 - n^power in fp32 would depend on where in the tensor n stands
        return ((1 - n**power).sqrt() / math.sqrt(1 - self.reference_length**power)).float()


@dataclass
class Cosine(Options):
    """Options of the normalizer `cosine`, whose scores are cosines of queries and keys."""

    name = "cosine"
    scales_with_q = False
    full_formula = "softmax(g cos(q, k)) or softmax(g ln n cos(q, k))"
    learned_parameters = "g per layer and head"
    source = "Henry et al. 2020, arXiv 2010.04245; Su, kexue.fm 9859"
    published_findings = (
        "GAU trained at 512, at 4,096, with g = 4 ln n: 64.7 % against 24.2 % of plain RoPE, on repeated text "
        "(kexue.fm 9859)"
    )
    log_n: bool = key(False, "multiply the gain by ln n (Su, kexue.fm 9859)")
    n: str = key("visible", N_HELP)


class CosineNormalizer(QueryScale):
    """Softmax of g cos(q, k), or with the option `log_n` of g ln n cos(q, k), g learned per head.

    At first the factor on cosines has the mean sqrt(D) for head size D, as with QK-norm (our choice).
    """

    schema = Cosine

    def initialise(self) -> None:
        self.g = self.new_parameter(
            math.sqrt(self.layer.head_size) / self.n_factor(self.training_layout()).double().mean().item()
        )

    def n_factor(self, layout: AttentionLayout) -> Tensor:
        """Return ln n if the option `log_n` is set, else 1: (1, T) or (B, 1, T)."""
        n = self.row_length(layout)
        return n.log() if self.options.log_n else n.new_ones(n.shape)

    def scale(self, layout: AttentionLayout) -> Tensor:
        return self.g.unsqueeze(-1) * self.n_factor(layout) * math.sqrt(self.layer.head_size)  # undoes 1 / sqrt(D)

    def scale_by_position(self) -> None:
        return None  # the factor is on cosines, not on softmax's logits

    def fused_inputs(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
        return super().fused_inputs(unit_vectors(q), unit_vectors(k), layout)


def unit_vectors(x: Tensor) -> Tensor:
    """Divide the vectors along the last dimension of x by their lengths, in fp32 or wider."""
    return torch.nn.functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)


@dataclass
class PN(Options):
    """Options of the normalizer `p_n`, whose factor on logits is learned for each n."""

    name = "p_n"
    full_formula = "softmax((s p_n + b) z)"
    learned_parameters = "s, b per layer and head; p_n for each n to m, shared by all (beyond, the last)"
    source = "Nakanishi 2025, arXiv 2501.19399, sec. 2.1"
    published_findings = "p_n is well fitted by a1 ln n + a2 at 162 M and 1,024 tokens (same paper)"


class PNNormalizer(QueryScale):
    """Softmax with the factor s p_n + b on logits, at first 1 (our choice). s, b and p_n are learned; p_n is a number
    for each n up to the training length.

    p_n is determined only up to a factor and an offset, which s and b can undo.
    """

    schema = PN

    def initialise(self) -> None:
        self.p = self.new_parameter(1.0, self.layer.train_length)
        self.s, self.b = self.new_parameter(1.0), self.new_parameter(0.0)

    def tie_parameters(self, source: Normalizer) -> None:
        self.p = source.p

    def scale(self, layout: AttentionLayout) -> Tensor:
        p = self.p[layout.positions.clamp(max=len(self.p) - 1)].unsqueeze(-2)  # (1, T) or (B, 1, T)
        return self.s.unsqueeze(-1) * p + self.b.unsqueeze(-1)


@dataclass
class QASSMax(Options):
    """Options of the normalizer `qassmax`, whose queries are multiplied by learned functions of n and of the query."""

    name = "qassmax"
    scales_with_q = False
    full_formula = "softmax(z), q times B(ln n) (1 + tanh G(q))"
    learned_parameters = "MLPs B (1 to H x D) and G (D to D) per layer, 64 hidden, GELU"
    source = "TabICLv2's code"
    published_findings = "holds 100 % where SSMax fails, at 15k negatives; adopted by TabPFN-3 (TabICLv2; secondary)"
    n: str = key("visible", N_HELP)


class QASSMaxNormalizer(FusedSoftmax):
    """Softmax whose queries are multiplied by B(ln n) (1 + tanh G(q)), for MLPs B and G. Initially it is softmax: G = 0
    as in TabICLv2, B = 1 (our choice).

    A layer's heads share both MLPs; B has an output for each head and dimension.
    """

    schema = QASSMax

    def initialise(self) -> None:
        self.base = _make_mlp(1, self.layer.n_head * self.layer.head_size, 1.0)
        self.gate = _make_mlp(self.layer.head_size, self.layer.head_size, 0.0)

    def fused_inputs(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
        dtype = self.base.out.weight.dtype
        q = q.to(torch.promote_types(q.dtype, dtype))
        with routes.without_autocast(q.device):
            log_n = layout.n(self.options.n).log().unsqueeze(-1).to(dtype)  # (T, 1) or (B, T, 1)
            # (H, T, D) or (B, H, T, D)
            base = self.base(log_n).unflatten(-1, (self.layer.n_head, -1)).transpose(-2, -3)
            gate = 1 + self.gate(q.to(dtype)).tanh()
        return q * base * gate, k


def _make_mlp(n_inputs: int, n_outputs: int, initial_output: float) -> Module:
    """Make an MLP of two layers with 64 hidden units and GELU, whose outputs are all `initial_output` at first."""
    nn = torch.nn
    layers = nn.Sequential(OrderedDict(hidden=nn.Linear(n_inputs, 64), gelu=nn.GELU(), out=nn.Linear(64, n_outputs)))
    nn.init.normal_(layers.hidden.weight, 0.0, 1 / math.sqrt(n_inputs))
    for tensor in (layers.hidden.bias, layers.out.weight):
        nn.init.zeros_(tensor)
    nn.init.constant_(layers.out.bias, initial_output)
    return layers
