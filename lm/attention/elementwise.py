"""In elementwise attention each weight depends on its own score, and on n or on the sum of unnormalized weights over
the query's keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention import elementwise_sums, routes
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import DividedNormalizer, logits
from lm.attention.options import MAX_FACTOR, MAX_LENGTH, N_HELP, Options, key
from lm.errors import Problem


class ElementwiseNormalizer(DividedNormalizer):
    """Base of normalizers whose weights are f(z + b) r, for logits z.

    `score_map` names f, `query_bias` returns each query's b, and `weight_factor` each query's r. If `weight_factor`
    returns None, r is 1 / (sum of f over the query's keys).
    """

    kernel = "tiles; on CUDA Triton"

    def unnormalized_weights(self, scores: Tensor) -> Tensor:
        return elementwise_sums.ELEMENTWISE_FUNCTIONS[self.score_map].forward(scores)

    def query_bias(self, layout: AttentionLayout) -> Tensor | None:
        """Return the bias b of each query's logits, fp32, broadcastable to (B, H, T); None for 0."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
        if not layout.mask_is_triangular:
            return super().forward(q, k, v, layout)
        factor = self.weight_factor(layout)
        # fp16 can't hold sums before they are divided by n
        dtype = torch.float32 if v.dtype == torch.float16 else v.dtype
        q, k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        output = elementwise_sums.elementwise_attention(
            self.score_map, q, k, values, self.query_bias(layout), divide_by_sum=factor is None
        )
        return (output if factor is None else output * factor.unsqueeze(-1)).to(v.dtype)


class QueryBiasNormalizer(ElementwiseNormalizer):
    """Base of elementwise normalizers whose scores include the bias: a score is the logit plus the `query_bias` of its
    query.
    """

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        z = logits(q, k)
        return z + self.query_bias(layout).unsqueeze(-1).to(z.dtype)


@dataclass
class Relu2(Options):
    """Options of the normalizer `relu2`, which divides squared positive logits by n."""

    name = "relu2"
    full_formula = "relu(z)^2 / n"
    source = "Hua et al. 2022, arXiv 2202.10447"
    published_findings = (
        "a fixed n transfers to other lengths better than the sample's, softmax best (kexue.fm 9019, no figures "
        "published)"
    )
    n_accepts_sum = True
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
    """Squared-ReLU attention: the weight of a key with the logit z is relu(z)^2 / n (arXiv 2202.10447).

    With `form: 1/n^2` the weight is relu(q.k / n)^2. With `n: sum` the squares are divided by their sum over the keys.
    """

    schema = Relu2
    score_map = "relu2"

    def weight_factor(self, layout: AttentionLayout) -> Tensor | None:
        return (
            super().weight_factor(layout)
            if self.options.form == "1/(n d)"
            else self.layer.head_size / self.row_length(layout).square()
        )


@dataclass
class Relu(Options):
    """Options of the normalizer `relu`, which divides positive logits by n."""

    name = "relu"
    full_formula = "relu(z) / n"
    source = "Wortsman et al. 2023, arXiv 2309.08586"
    published_findings = "no figures known to us"
    sums_to_one = False
    n: str = key("visible", N_HELP)


class ReluNormalizer(ElementwiseNormalizer):
    """ReLU attention: the weight of a key with the logit z is relu(z) / n (arXiv 2309.08586)."""

    schema = Relu
    score_map = "relu"


@dataclass
class Sigmoid(Options):
    """Options of the normalizer `sigmoid`, whose logits are shifted by -ln n."""

    name = "sigmoid"
    full_formula = "sigmoid(z - ln n (+ b))"
    learned_parameters = "none (or b per layer and head)"
    source = "arXiv 2409.04431"
    published_findings = "2.4 % worse loss and 16 points downstream at 1.2 B (2605.20798, secondary)"
    sums_to_one = False
    fixed_by_training: ClassVar[Mapping[str, str]] = {"bias": "decides whether there is a b to learn"}
    bias: bool = key(False, "add a learned b, one per layer and head, from 0")
    n: str = key("visible", N_HELP)


class SigmoidNormalizer(QueryBiasNormalizer):
    """Sigmoid attention: the weight of a key with the logit z is sigmoid(z - ln n) (arXiv 2409.04431).

    With the option `bias` the weight is sigmoid(z - ln n + b), b learned per head.
    """

    schema = Sigmoid
    score_map = "sigmoid"

    def initialise(self) -> None:
        if self.options.bias:
            self.b = self.new_parameter(0.0)

    def query_bias(self, layout: AttentionLayout) -> Tensor:
        query_bias = -self.row_length(layout).log()
        return query_bias + self.b.unsqueeze(-1) if self.options.bias else query_bias

    def weight_factor(self, layout: AttentionLayout) -> Tensor:
        return layout.n("fixed:1").unsqueeze(-2)


@dataclass
class Threshold(Options):
    """Options of the normalizer `threshold`, whose weights are 0 for logits below a threshold that grows with n."""

    name = "threshold"
    full_formula = "relu(z - beta sqrt(2 ln n))^p / sum"
    learned_parameters = "beta per layer and head"
    source = "arXiv 2601.12145 and its code; `recipes/tda.yaml` is the paper's, with QK-norm and a second view"
    published_findings = "TDA at 162 M: validation loss 3.119, softmax 3.120; 99 % exact zeros, no sinks (secondary)"
    sums_to_one = False
    power: Literal[1, 2] = key(2, "p")
    init: float = key(0.5, "initial value of beta, 1 in the paper: where the largest of n Gaussian logits lies",
                      ge=-MAX_FACTOR, le=MAX_FACTOR)  # fmt: skip
    divided: bool = key(True, "divide each row of weights by its sum; false in the paper", omit_default=True)
    n: str = key("visible", N_HELP)

    @property
    def rows_sum_to_one(self) -> bool:
        return self.divided

    def formula(self) -> str:
        return self.full_formula if self.divided else self.full_formula.removesuffix(" / sum")


class ThresholdNormalizer(QueryBiasNormalizer):
    """Threshold attention: a key's weight is relu(z - beta sqrt(2 ln n))^p, divided by the sum over the keys. z is the
    key's logit, beta is learned per head, and p is the option `power`. With `divided: false` weights are not divided,
    as in the paper (arXiv 2601.12145).

    The threshold grows with the n keys that a query sees, so that about as many Gaussian logits exceed it at every n.
    If no logit exceeds it, all weights are 0.
    """

    schema = Threshold

    @property
    def score_map(self) -> str:
        return "relu2" if self.options.power == 2 else "relu"

    def initialise(self) -> None:
        self.beta = self.new_parameter(self.options.init)

    def query_bias(self, layout: AttentionLayout) -> Tensor:
        return -self.beta.unsqueeze(-1) * (2 * self.row_length(layout).log()).sqrt()

    def weight_factor(self, layout: AttentionLayout) -> Tensor | None:
        return None if self.options.divided else layout.n("fixed:1").unsqueeze(-2)


@dataclass
class SoftplusAttention(Options):
    """Options of the normalizer `lssa`, length-scaled softplus attention."""

    name = "lssa"
    full_formula = "w = softplus(z ln n / ln m) / sum, then relu(n w - 1)^p / sum"
    source = (
        "arXiv 2501.13428 by a summary of it; `recipes/lssar.yaml` is the paper's, m = training length is our choice"
    )
    published_findings = "LSSAR at 124 M: loss 3.19 at 1,024 tokens, 3.32 at 8,192; softmax 3.19, 6.28 (secondary)"
    base: Literal["train", "head_size"] | float = key(
        "train",
        "m, the length at which logits are unscaled; `train`: the training length; `head_size`: e^(sqrt(D) / ln D) for "
        "heads of D, which with QK-norm gives the scale of the paper, ln D ln n cos(q, k)",
        ge=2,
        le=MAX_LENGTH,
    )
    sharpening: int = key(
        0,
        "p of the second stage, which drops weights below the mean; 0: first stage alone; 3 and 15 in the paper",
        ge=0,
        le=64,
        omit_default=True,
    )
    n: str = key("visible", N_HELP)

    def formula(self) -> str:
        return self.full_formula if self.sharpening else "softplus(z ln n / ln m) / sum"


class SoftplusNormalizer(DividedNormalizer):
    """Length-scaled softplus attention (LSSA): a key's weight w is softplus(z ln n / ln m), divided by the sum of w
    over the keys. z is the key's logit, n the row length, m the option `base`.

    With `sharpening` p a second stage turns w into relu(n w - 1)^p, again divided by the sum. In this stage n is always
    the number of keys that the query sees, so that 1 / n is the mean of w. Where n is 3 or less, the 1 is not
    subtracted, as in the paper.
    """

    schema = SoftplusAttention

    @property
    def reference_length(self) -> float:
        if self.options.base != "head_size":
            return super().reference_length
        size = max(self.layer.head_size, 2)
        return math.exp(math.sqrt(size) / math.log(size))

    def define_scores(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> Tensor:
        scale = self.row_length(layout).log() / math.log(self.reference_length)
        return logits(q, k) * scale.unsqueeze(-1).to(q.dtype)

    def unnormalized_weights(self, scores: Tensor) -> Tensor:
        return F.softplus(scores)

    def weight_factor(self, layout: AttentionLayout) -> None:
        return None

    def normalize(self, scores: Tensor, layout: AttentionLayout) -> Tensor:
        weights = super().normalize(scores, layout)
        if not self.options.sharpening:
            return weights
        n = layout.n("visible").unsqueeze(-2).unsqueeze(-1).to(weights.dtype)
        excess = (n * weights - (n > 3).to(n.dtype)).relu()  # hidden keys have w = 0
        # relative to the largest, whose power would be infinite; their quotient doesn't depend on it
        largest = excess.detach().amax(-1, keepdim=True).clamp(min=routes.MIN_SUM)
        powers = (excess / largest) ** self.options.sharpening
        return routes.divide_rows(powers, powers.sum(-1, keepdim=True), None)

    def log_weight_sum(self, scores: Tensor, layout: AttentionLayout) -> Tensor | None:
        return None if self.options.sharpening else super().log_weight_sum(scores, layout)
