"""Elementwise attention: each weight depends on its own score, and on n or on the sum of unnormalized weights over the
query's keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import elementwise_sums
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import DividedNormalizer, logits
from lm.attention.options import LARGEST, N_HELP, Options, key, reference_length_key
from lm.errors import Problem


class ElementwiseNormalizer(DividedNormalizer):
    """Weights f(z + b) r of logits z: `score_map` names f, b is the query's `shift`, r its `factor`, or 1 / sum of f if
    that is None.
    """

    kernel = "tiles; on CUDA Triton"

    def f(self, scores: Tensor) -> Tensor:
        return elementwise_sums.SCORE_FUNCTIONS[self.score_map].value(scores)

    def shift(self, layout: AttentionLayout) -> Tensor | None:
        """The shift b of each query's logits, fp32, broadcastable to (B, H, T); None for 0."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if not layout.causal:
            return super().forward(q, k, v, layout)
        factor = self.factor(layout)
        # fp16 can't hold sums before they are divided by n
        dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        output = elementwise_sums.elementwise_attention(
            self.score_map, q, k, values, self.shift(layout), over_sum=factor is None
        )
        return (output if factor is None else output * factor.unsqueeze(-1)).to(v.dtype)


class ShiftedNormalizer(ElementwiseNormalizer):
    """Base of elementwise normalizers whose logits have a `shift`."""

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        z = logits(q, k)
        return z + self.shift(layout).unsqueeze(-1).to(z.dtype)


@dataclass
class Relu2(Options):
    name = "relu2"
    full_formula = "relu(z)^2 / n"
    source = "Hua et al. 2022, arXiv 2202.10447"
    known = (
        "a fixed n transfers to other lengths better than the sample's, softmax best (kexue.fm 9019, no figures "
        "published)"
    )
    over_sum = True
    sums_to_one = False
    n: str = key(
        "visible",
        "row length n: `visible` keys, length of the `sample`, `fixed:N`; or `sum`: divide each row by its sum",
    )
    form: Literal["1/(n d)", "1/n^2"] = key(
        "1/(n d)", "relu(q.k)^2 / (n d), d the head size; or relu(q.k / n)^2, as in GAU's own code"
    )

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.n == "sum" and self.form != "1/(n d)":
            problems.append(Problem("form", self.form, "rows divided by their sum have no n", "drop it"))
        return problems


class Relu2Normalizer(ElementwiseNormalizer):
    schema = Relu2
    score_map = "relu2"

    def factor(self, layout: AttentionLayout) -> Tensor | None:
        return (
            super().factor(layout)
            if self.options.form == "1/(n d)"
            else self.layer.head_size / self.row_length(layout).square()
        )


@dataclass
class Relu(Options):
    name = "relu"
    full_formula = "relu(z) / n"
    source = "Wortsman et al. 2023, arXiv 2309.08586"
    known = "no figures known to us"
    sums_to_one = False
    n: str = key("visible", N_HELP)


class ReluNormalizer(ElementwiseNormalizer):
    schema = Relu
    score_map = "relu"


@dataclass
class Sigmoid(Options):
    name = "sigmoid"
    full_formula = "sigmoid(z - ln n (+ b))"
    learned_parameters = "none (or b per layer and head)"
    source = "arXiv 2409.04431"
    known = "2.4 % worse loss and 16 points downstream at 1.2 B (2605.20798, secondary)"
    sums_to_one = False
    fixed_by_training: ClassVar[Mapping[str, str]] = {"bias": "decides whether there is a b to learn"}
    bias: bool = key(False, "add a learned b, one per layer and head, from 0")
    n: str = key("visible", N_HELP)


class SigmoidNormalizer(ShiftedNormalizer):
    schema = Sigmoid
    score_map = "sigmoid"

    def initialise(self) -> None:
        if self.options.bias:
            self.b = self.parameter(0.0)

    def shift(self, layout: AttentionLayout) -> Tensor:
        shift = -self.row_length(layout).log()
        return shift + self.b.unsqueeze(-1) if self.options.bias else shift

    def factor(self, layout: AttentionLayout) -> Tensor:
        return layout.n("fixed:1").unsqueeze(-2)


@dataclass
class Threshold(Options):
    name = "threshold"
    full_formula = "relu(z - beta sqrt(2 ln n))^p / sum"
    learned_parameters = "beta per layer and head"
    source = "one view of arXiv 2601.12145, whose code we have not seen"
    known = "over 99 % exact zeros, no sinks (abstract, with a second view subtracted)"
    power: Literal[1, 2] = key(2, "p")
    init: float = key(0.5, "initial value of beta (our choice); 1: where the largest of n Gaussian logits lies",
                      ge=-LARGEST, le=LARGEST)  # fmt: skip
    n: str = key("visible", N_HELP)


class ThresholdNormalizer(ShiftedNormalizer):
    """Threshold attention: a key's weight is relu(z - beta sqrt(2 ln n))^p, divided by the sum; z is its logit.

    The threshold grows with the n keys that a query sees, so that about as many Gaussian logits exceed it at every n.
    If none does, all weights are 0.
    """

    schema = Threshold

    @property
    def score_map(self) -> str:
        return "relu2" if self.options.power == 2 else "relu"

    def initialise(self) -> None:
        self.beta = self.parameter(self.options.init)

    def shift(self, layout: AttentionLayout) -> Tensor:
        return -self.beta.unsqueeze(-1) * (2 * self.row_length(layout).log()).sqrt()

    def factor(self, layout: AttentionLayout) -> None:
        return None


@dataclass
class SoftplusAttention(Options):
    name = "lssa"
    full_formula = "softplus(z ln n / ln m)^p / sum"
    source = "the first stage of arXiv 2501.13428, of which we know the abstract; m and p are our choice"
    known = "with a second stage that sharpens weights, loss nearly constant to 16 times the length (abstract)"
    base: Literal["train"] | float = reference_length_key("the length at which logits are unscaled")
    power: float = key(1.0, "p", gt=0, le=16)
    n: str = key("visible", N_HELP)


class SoftplusNormalizer(DividedNormalizer):
    """Length-scaled softplus attention (LSSA): a key's weight is softplus(z ln n / ln m)^p, divided by the sum.
    z is its logit, n the number of keys in sight, m the option `base`.
    """

    schema = SoftplusAttention

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log() / math.log(self.reference_length)
        return logits(q, k) * scale.unsqueeze(-1).to(q.dtype)

    def f(self, scores: Tensor) -> Tensor:
        return F.softplus(scores) ** self.options.power

    def factor(self, layout: AttentionLayout) -> None:
        return None
