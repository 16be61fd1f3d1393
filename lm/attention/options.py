"""The options of every normalizer: their keys, which of them contradict each other, the formula and the label.

Nothing here imports torch, so that a configuration is checked before anything heavy is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from lm.errors import Problem
from lm.schema import Plain, build, key, own_problems, to_plain

N_HELP = "row length n: `visible` keys, length of the `sample`, or `fixed:N`"
FIRST_VALUE = "is an initial value, which training has replaced"
_LONGEST = 1e9  # tokens, of any length among the options: more would leave the range of what is computed with it
_LARGEST = 1e6  # bound of factors and logits: products of them stay within fp32
_ROW_LENGTH = re.compile(r"visible|sample|fixed:([2-9]|[1-9][0-9]{1,8}|10{9})")


@dataclass
class Options:
    """Base of a normalizer's options. A subclass is a dataclass of keys (`lm.schema.key`).

    Attributes:
        name: in `model.normalizer`.
        full_formula: the weights, with all that options can add.
        sums_to_one: each row of weights sums to 1, whatever the options.
        over_sum: `n` may be `sum`: each row is divided by its sum.
        fixed_by_training: why an option can't be changed in a trained model, by its name.
    """

    name: ClassVar[str]
    full_formula: ClassVar[str]
    sums_to_one: ClassVar[bool] = True
    over_sum: ClassVar[bool] = False
    fixed_by_training: ClassVar[Mapping[str, str]] = {}

    @property
    def rows_sum_to_one(self) -> bool:
        """Whether each row of weights sums to 1 with these options."""
        return self.sums_to_one or getattr(self, "n", "") == "sum"

    def formula(self) -> str:
        """The weights with these options, without what they switch off."""
        return self.full_formula

    def problems(self) -> list[Problem]:
        """Problems that the types of the options can't express: an unknown row length, contradictory options."""
        n = str(getattr(self, "n", "visible"))
        if _ROW_LENGTH.fullmatch(n) or (self.over_sum and n == "sum"):
            return []
        return [Problem("n", n, "unknown row length", f"choose visible, sample or fixed:N (N a whole number from 2 to {_LONGEST:g})")]

    @classmethod
    def first_init(cls) -> Plain:
        """The initial values of its parameters unless `init` says others; None: it has no `init`."""
        return next((spec.default for spec in fields(cls) if spec.name == "init"), None)

    def layer_options(self) -> list["Options"]:
        """The options of single normalizers: themselves."""
        return [self]

    def of_layer(self, layer: int) -> "Options":
        """The options of one layer's normalizer."""
        return self

    def with_changes(self, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> "Options":
        """Options of a trained normalizer with the `changes` that it has as options; what is wrong at `path` is appended to `problems`."""
        own = {option: value for option, value in changes.items() if option in {spec.name for spec in fields(self)}}
        late = [Problem(f"{path}.{option}", own[option], reason) for option, reason in self.fixed_by_training.items() if option in own]
        changed = build(type(self), {**to_plain(self), **own}, path, late)
        problems += late or own_problems(changed, path)
        return changed

    def non_defaults(self) -> dict[str, Plain]:
        """The options that aren't their defaults."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if getattr(self, spec.name) != spec.default}

    def label(self) -> str:
        """The name with the options that aren't their defaults: `ssmax (init=1.0)`."""
        return labelled(self.name, self.non_defaults())

    def swap_arguments(self) -> str:
        """The options as `lm swap --to` takes them: `ssmax model.normalizer.bias=true`; initial values left out."""
        changed = {option: value for option, value in self.non_defaults().items() if option != "init"}
        return " ".join([self.name, *(f"model.normalizer.{option}={shown(value)}" for option, value in changed.items())])


def labelled(name: str, options: Mapping[str, Plain]) -> str:
    """A normalizer's name and options as a reader sees them."""
    return f"{name} ({', '.join(f'{option}={shown(value)}' for option, value in options.items())})" if options else name


def shown(value: Plain) -> str:
    """An option's value as it is written in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Softmax(Options):
    """softmax(z / tau): the baseline."""

    name = "softmax"
    full_formula = "softmax(z / tau)"
    temperature: float = key(
        1.0, "tau, a constant that divides the logits: below 1 attention is sharper from the start", omit_default=True,
        ge=1 / _LARGEST, le=_LARGEST,
    )  # fmt: skip

    def formula(self) -> str:
        return self.full_formula if self.temperature != 1 else "softmax(z)"


@dataclass
class SSMax(Options):
    """Scalable-Softmax, arXiv 2501.19399: softmax((s ln n + b) z)."""

    name = "ssmax"
    full_formula = "softmax((s ln n + b) z)"
    fixed_by_training: ClassVar[Mapping[str, str]] = {
        "scale": "decides whether there is an s to learn",
        "bias": "decides whether there is a b to learn",
        "init": FIRST_VALUE,
    }
    scale: Literal["learned", "none"] = key("learned", "s of `s ln n`, one per layer and head; `none`: s = 1 (the paper's variant c)")
    bias: bool = key(False, "learn b of `s ln n + b`, one per layer and head, from 0 (the paper's variant d)")
    init: Literal["match", "unit"] | float = key(
        "match",
        "initial value of s; `match`: 1 / mean of ln n over the training length, which keeps the mean logit scale at 1, and in a swap "
        "the closed form that follows the old normalizer (docs/swapping.md); `unit`: 1",
        ge=-_LARGEST,
        le=_LARGEST,
    )
    n: str = key("visible", N_HELP)

    def formula(self) -> str:
        text = self.full_formula if self.bias else self.full_formula.replace(" + b", "")
        return text.replace("s ln n", "ln n") if self.scale == "none" else text

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.scale == "none" and self.init != "match":
            problems.append(Problem("init", self.init, "scale: none has no s to start", "drop init, or set scale: learned"))
        return problems


@dataclass
class LogN(Options):
    """Entropy-invariant scaling, kexue.fm 8823: softmax(z ln n / ln m)."""

    name = "log_n"
    full_formula = "softmax(z ln n / ln m)"
    base: Literal["train"] | float = key("train", "m, the length at which this is softmax; `train`: the training length", ge=2, le=_LONGEST)
    clip: bool = key(False, "never scale below 1, for models trained without it (`max(1, ln n / ln m)`)")
    n: str = key("visible", N_HELP)


@dataclass
class SqrtLogN(Options):
    """softmax(c sqrt(2 ln n) z): the largest weight of n Gaussian logits falls slowly with n."""

    name = "sqrt_log_n"
    full_formula = "softmax(c sqrt(2 ln n) z)"
    n: str = key("visible", N_HELP)


@dataclass
class Llama4(Options):
    """Llama 4's attention temperature: softmax(z (1 + a ln(1 + floor((position + 1) / f))))."""

    name = "llama4"
    full_formula = "softmax(z (1 + a ln(1 + floor((p + 1) / f))))"
    floor_scale: float = key(8192.0, "f, tokens after which the temperature first changes", ge=1, le=_LONGEST)
    attn_scale: float = key(0.1, "a", ge=0, le=_LARGEST)


@dataclass
class YaRN(Options):
    """YaRN's temperature, arXiv 2309.00071: softmax(z (0.1 ln(n / m) + 1)^2) for documents longer than m."""

    name = "yarn"
    full_formula = "softmax(z (0.1 ln(n / m) + 1)^2)"
    base: Literal["train"] | float = key(
        "train", "m, the length up to which this is softmax; `train`: the training length", ge=2, le=_LONGEST
    )
    n: str = key("sample", N_HELP)


@dataclass
class InfoScale(Options):
    """InfoScale, arXiv 2501.08570: softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)))."""

    name = "infoscale"
    full_formula = "softmax(z sqrt(1 - n^(-2/D)) / sqrt(1 - m^(-2/D)))"
    base: Literal["train"] | float = key("train", "m, the length at which this is softmax; `train`: the training length", ge=2, le=_LONGEST)
    n: str = key("visible", N_HELP)


@dataclass
class Cosine(Options):
    """softmax(g cos(q, k)) with a learned gain, first sqrt(D) on average (our choice); with `log_n`, g ln n."""

    name = "cosine"
    full_formula = "softmax(g cos(q, k)) or softmax(g ln n cos(q, k))"
    log_n: bool = key(False, "multiply the gain by ln n (Su, kexue.fm 9859)")
    n: str = key("visible", N_HELP)


@dataclass
class PN(Options):
    """The experiment from which SSMax was derived, arXiv 2501.19399 sec. 2.1: softmax((s p_n + b) z) with a learned table p_n."""

    name = "p_n"
    full_formula = "softmax((s p_n + b) z)"


@dataclass
class QASSMax(Options):
    """Query-aware SSMax (TabICLv2): each dimension of q scaled by MLPs of ln n and of q."""

    name = "qassmax"
    full_formula = "softmax(z), q times B(ln n) (1 + tanh G(q))"
    n: str = key("visible", N_HELP)


@dataclass
class Softmax1(Options):
    """e^z / (1 + sum e^z): softmax off by one."""

    name = "softmax1"
    full_formula = "e^z / (1 + sum e^z)"
    sums_to_one = False


@dataclass
class Sink(Options):
    """e^z / (e^b + sum e^z): a learned sink logit."""

    name = "sink"
    full_formula = "e^z / (e^b + sum e^z)"
    sums_to_one = False
    fixed_by_training: ClassVar[Mapping[str, str]] = {"init": FIRST_VALUE}
    init: float = key(0.0, "initial value of b", ge=-_LARGEST, le=_LARGEST)


@dataclass
class Relu2(Options):
    """relu(z)^2 / n, as in GAU, arXiv 2202.10447."""

    name = "relu2"
    full_formula = "relu(z)^2 / n"
    over_sum = True
    sums_to_one = False
    n: str = key("visible", "row length n: `visible` keys, length of the `sample`, `fixed:N`; or `sum`: divide each row by its sum")
    form: Literal["1/(n d)", "1/n^2"] = key("1/(n d)", "relu(q.k)^2 / (n d), d the head size; or relu(q.k / n)^2, as in GAU's own code")

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.n == "sum" and self.form != "1/(n d)":
            problems.append(Problem("form", self.form, "rows divided by their sum have no n", "drop it"))
        return problems


@dataclass
class Relu(Options):
    """relu(z) / n."""

    name = "relu"
    full_formula = "relu(z) / n"
    sums_to_one = False
    n: str = key("visible", N_HELP)


@dataclass
class Sigmoid(Options):
    """sigmoid(z - ln n), arXiv 2409.04431."""

    name = "sigmoid"
    full_formula = "sigmoid(z - ln n (+ b))"
    sums_to_one = False
    fixed_by_training: ClassVar[Mapping[str, str]] = {"bias": "decides whether there is a b to learn"}
    bias: bool = key(False, "add a learned b, one per layer and head, from 0")
    n: str = key("visible", N_HELP)


@dataclass
class Sparsemax(Options):
    """The projection of z onto the simplex, arXiv 1602.02068."""

    name = "sparsemax"
    full_formula = "relu(z - tau)"


@dataclass
class Entmax15(Options):
    """1.5-entmax, arXiv 1905.05702: between softmax and sparsemax."""

    name = "entmax15"
    full_formula = "relu(z / 2 - tau)^2"


@dataclass
class Softpick(Options):
    """relu(e^z - 1) / sum |e^z - 1|."""

    name = "softpick"
    full_formula = "relu(e^z - 1) / (sum |e^z - 1| + 1e-8)"
    sums_to_one = False


@dataclass
class ALiBi(Options):
    """softmax(z - m t), t tokens back, arXiv 2108.12409; use it with `model.position: none`."""

    name = "alibi"
    full_formula = "softmax(z - 2^(-8 h / H) t)"


@dataclass
class Window(Options):
    """softmax over the latest keys alone: a sliding window."""

    name = "window"
    full_formula = "softmax(z), t < w"
    size: int = key(256, "keys a query sees, its own among them", ge=1, le=_LONGEST)


@dataclass
class ScaleInvariant(Options):
    """softmax(a_t z + m_t), t tokens back, arXiv 2505.17083; the paper adds `model.qk_norm` and p-RoPE."""

    name = "scale_invariant"
    full_formula = "softmax(a_t z + m_t)"
    tau: float = key(10.0, "distance, in tokens, from which on the scale grows", ge=1e-3, le=_LONGEST)


@dataclass
class Forget(Options):
    """Forgetting attention, arXiv 2503.02130: softmax(z + c_i - c_j), c summing the logs of learned gates of first sigmoid(5)."""

    name = "forget"
    full_formula = "softmax(z + c_i - c_j)"


@dataclass
class ASEntmax(Options):
    """Adaptive-scalable entmax, arXiv 2506.16640: 1.5-entmax((1 + b (ln n)^g) z), b and g from the layer's input by matrices that start
    at 0 (our choice)."""

    name = "asentmax"
    full_formula = "1.5-entmax((1 + b (ln n)^g) z)"
    n: str = key("visible", N_HELP)


@dataclass
class Linear(Options):
    """Linear attention, arXiv 2006.16236: phi(q / D^(1/4)).phi(k / D^(1/4)), at O(T) a sequence; the scaling by D is ours."""

    name = "linear"
    full_formula = "phi(q).phi(k) (g^t) / sum, or / n"
    over_sum = True
    sums_to_one = False
    features: Literal["elu", "relu", "exp", "identity"] = key(
        "elu", "phi: elu + 1, relu, exp (of 20 at most), or the identity (weights may then be negative)"
    )
    decay: bool = key(False, "weights fade by 1 - 2^(-5 - h) a token for heads h = 0, 1 ... (RetNet's rates)")
    n: str = key("sum", "divide each row by its `sum`, or by n: `visible`, `sample` or `fixed:N`")

    def problems(self) -> list[Problem]:
        problems = super().problems()
        if self.features == "identity" and self.n == "sum":
            problems.append(Problem("n", self.n, "weights of either sign may sum to 0", "set it to visible"))
        return problems
