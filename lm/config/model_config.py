"""The keys of `model`: the decoder's dimensions and architecture, and RoPE's frequencies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor

from lm.attention.options import Options
from lm.config.normalizers import OPTIONS
from lm.config.schema import key, variant
from lm.errors import Problem


@dataclass(frozen=True)
class TrainedScaling:
    """RoPE's frequencies without rescaling; the base class of rescalings that a model was, or will be, trained with."""

    name: ClassVar[str] = "none"
    # the factor on RoPE's cos and sin, by whose square attention logits are multiplied
    amplitude: ClassVar[float] = 1.0

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        """Radians per token, (pairs,), by which each pair of dimensions rotates after rescaling, from its `frequencies`
        before; `theta` is the base of those."""
        return frequencies


@dataclass(frozen=True)
class LinearScaling(TrainedScaling):
    """Position interpolation, arXiv 2306.15595: all frequencies divided by `factor`."""

    name: ClassVar[str] = "linear"
    factor: float = key(2.0, "divides all frequencies", gt=0, le=1e6)

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(TrainedScaling):
    """Llama 3.1's rescaling: low frequencies divided by `factor`, high ones unchanged, with a transition.

    The transition is linear in a pair's number of periods in `original` tokens. Source: `apply_scaling` of
    github.com/meta-llama/llama-models.
    """

    name: ClassVar[str] = "llama3"
    factor: float = key(8.0, "divides low frequencies", gt=0, le=1e6)
    # pairs with at most `slow` periods in the original context are divided by factor, with at least `fast` unchanged
    slow: ClassVar[float] = 1.0
    fast: ClassVar[float] = 4.0
    original: int = key(8192, "context length before the frequencies were rescaled, tokens", ge=1, le=10**9)

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        periods = self.original * frequencies / (2 * math.pi)
        return divide_low_frequencies(frequencies, periods, self.slow, self.fast, self.factor)


@dataclass(frozen=True)
class YarnScaling(Llama3Scaling):
    """YaRN, arXiv 2309.00071, as in its authors' code: low frequencies divided by `factor`, high ones unchanged, with a
    transition.

    Keys are those of Llama 3's scaling, frequencies are not. Source: `YaRNScaledRotaryEmbedding` of
    github.com/jquesnelle/yarn, whose transition is linear in a pair's index. In the paper it is linear in the number of
    periods, as in the inference setting `yarn`.
    """

    name: ClassVar[str] = "yarn"
    factor: float = key(4.0, "divides low frequencies", gt=0, le=1e6)
    fast: ClassVar[float] = 32.0
    attention_factor: float | None = key(None, "multiplies cos and sin; null: 0.1 ln(factor) + 1", gt=0, le=1e6)
    whole_pairs: bool = key(True, "the first and the last pair of the transition are rounded outwards")

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        # The indices of the pairs with `fast` and `slow` periods, as real numbers.
        ends = [
            head_size * math.log(self.original / (periods * 2 * math.pi)) / (2 * math.log(theta))
            for periods in (self.fast, self.slow)
        ]
        if self.whole_pairs:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_size - 1)
        pair_indices = frequencies.new_tensor(range(len(frequencies)))
        divided_fraction = ((pair_indices - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - divided_fraction + divided_fraction / self.factor)

    @property
    def amplitude(self) -> float:
        return self.attention_factor or (0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0)


def divide_low_frequencies(frequencies: Tensor, periods: Tensor, slow: float, fast: float, factor: float) -> Tensor:
    """Return RoPE's frequencies, one for each pair of dimensions, with low ones divided by `factor` and high ones as
    they are.

    A low frequency has at most `slow` periods, a high one at least `fast`. Between them the multiplier is linear in the
    number of periods.

    periods: (pairs,), the number of periods of each pair, not rounded, in the context length before scaling.
    """
    kept_fraction = ((periods - slow) / (fast - slow)).clamp(0, 1)
    return frequencies * (kept_fraction + (1 - kept_fraction) / factor)


TRAINED_SCALINGS = {v.name: v for v in (TrainedScaling, LinearScaling, Llama3Scaling, YarnScaling)}


# ---------------------------------------------------------------- the decoder


class Position:
    """Base class of the options of position encodings."""

    name: ClassVar[str]
    rotates: ClassVar[bool] = False  # true if queries and keys are rotated by angles that can be rescaled
    has_last_position: ClassVar[bool] = False  # true if positions beyond the training length have no encoding

    @property
    def label(self) -> str:
        return f"position {self.name}"

    def rotates_in(self, layer: int) -> bool:
        """Whether queries and keys of a layer, counted from 0, are rotated."""
        return self.rotates


@dataclass
class Rope(Position):
    """Rotary embedding, arXiv 2104.09864."""

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True
    theta: float = key(10000.0, "base of the rotation periods", gt=1, le=1e12)
    fraction: float = key(
        1.0, "fraction of each head's dimensions that rotate, highest frequencies first (p-RoPE below 1)", gt=0, le=1
    )
    partial: bool = key(
        False,
        "the dimensions that rotate have frequencies from highest to lowest, as in GPT-NeoX, not the head's highest",
        omit_default=True,
    )
    scaling: TrainedScaling = variant(
        TRAINED_SCALINGS, "none", "how the frequencies of theta were rescaled before or in training", omit_default=True
    )
    layers: list[bool] = key(
        [],
        "whether each layer has it, repeated from the first layer on; the others have no positions; []: all have",
        omit_default=True,
    )

    @property
    def label(self) -> str:
        scaling = f", {self.scaling.name}" if self.scaling.name != "none" else ""
        layers = (
            f" (layers {', '.join('rope' if rotates else 'none' for rotates in self.layers)})" if self.layers else ""
        )
        return f"rope theta {self.theta:g}{scaling}{layers}"

    def rotates_in(self, layer: int) -> bool:
        """Whether queries and keys of a layer, counted from 0, are rotated."""
        return not self.layers or self.layers[layer % len(self.layers)]

    def problems(self) -> Iterator[Problem]:
        if len({*self.layers}) == 1:
            yield Problem(
                "layers",
                self.layers,
                "is the same in all layers",
                "drop it" if self.layers[0] else "set model.position=none",
            )

    def rotated_dimensions(self, head_size: int) -> int:
        """The number of a head's dimensions that rotate, which is even."""
        return int(round(head_size * self.fraction, 6)) // 2 * 2  # 100 x 0.58 falls below 58 in floating point


@dataclass
class Learned(Position):
    """A learned vector for each position up to the training length, beyond which the model can't be evaluated."""

    name: ClassVar[str] = "learned"
    has_last_position: ClassVar[bool] = True


@dataclass
class NoPosition(Position):
    """The causal mask as the only position information (NoPE)."""

    name: ClassVar[str] = "none"


POSITIONS = {v.name: v for v in (Rope, Learned, NoPosition)}


@dataclass
class AttentionBlock:
    """Multi-head attention, then an MLP."""

    name: ClassVar[str] = "attention"

    def key_dims(self, model: "ModelConfig") -> int:
        """Dimensions of each head's queries and keys; with `differential`, the dimensions in each of a head's two
        attention maps.
        """
        return self.value_dims(model) // (2 if model.differential is True else 1)

    def value_dims(self, model: "ModelConfig") -> int:
        """Dimensions of each head's values."""
        return model.head_size or model.n_embd // model.n_head

    def resolved_options(self, model: "ModelConfig") -> dict[str, int | bool | None]:
        """Return {key: value} of the options of `model` that may be null, with each null replaced by the value that it
        stands for.

        Configurations of the same model give equal values. `mlp_bias` is None where it is null or equals `bias`.
        """
        return {
            "n_kv_head": model.kv_heads,
            "head_size": model.value_dims,
            "n_mlp": model.mlp_width,
            "qkv_bias": model.has_qkv_bias,
            "mlp_bias": model.mlp_bias if model.mlp_bias != model.bias else None,
        }

    def label(self, model: "ModelConfig") -> str:
        """A text such as `swiglu 704`: the activation and hidden width of the MLP."""
        return f"{model.mlp} {model.mlp_width}"

    def model_problems(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield the options of `model` that contradict this block, as problems with paths relative to `model`."""
        if model.head_size is None and model.n_embd % model.n_head:
            reason = f"is not a multiple of model.n_head = {model.n_head}"
            remedy = (
                f"make it a multiple of {2 * model.n_head}, or set model.head_size"  # RoPE needs heads of even size
            )
            yield Problem("n_embd", model.n_embd, reason, remedy)
        if model.n_head % model.kv_heads:
            reason = f"does not divide model.n_head = {model.n_head}"
            yield Problem("n_kv_head", model.n_kv_head, reason)
        if (model.head_size or not model.n_embd % model.n_head) and model.differential is True and model.value_dims % 2:
            yield model.head_problem(f"gives heads of odd size {model.value_dims}, which two maps can't share")


@dataclass
class GAUBlock:
    """A gated attention unit, arXiv 2202.10447: one head and no MLP; two units have about the size of one attention
    block with MLP.
    """

    name: ClassVar[str] = "gau"
    expansion: float = key(2.0, "width of gate and values, in model widths", gt=0, le=64)
    key_size: int = key(128, "dimensions of queries and keys", ge=1, le=10**5)

    def key_dims(self, model: "ModelConfig") -> int:
        """Dimensions of queries and keys."""
        return self.key_size

    def value_dims(self, model: "ModelConfig") -> int:
        """Dimensions of the values, which are also those of the gate."""
        return int(self.expansion * model.n_embd)

    def resolved_options(self, model: "ModelConfig") -> dict[str, int | bool]:
        return {}  # the options that may be null are for attention and MLP

    def label(self, model: "ModelConfig") -> str:
        return f"gated attention units of width {self.value_dims(model)}"

    def model_problems(self, model: "ModelConfig") -> Iterator[Problem]:
        if model.n_head != 1:
            yield Problem("n_head", model.n_head, "a gated attention unit has one head", "set model.n_head=1")
        defaults = {spec.name: spec.default for spec in fields(model)}
        for name in (
            *("mlp", "n_mlp", "mlp_bias", "parallel", "post_norm", "n_kv_head", "head_size", "qkv_bias"),
            *("value_residual", "output_gate", "gate_inputs", "exclusive", "differential"),
        ):
            if (value := getattr(model, name)) != defaults[name]:
                yield Problem(
                    name, value, "is no option of a gated attention unit: it has one head and no MLP", "drop it"
                )


@dataclass
class ModelConfig:
    n_layer: int = key(6, "blocks", ge=1, le=10**4)
    block: AttentionBlock | GAUBlock = variant(
        {v.name: v for v in (AttentionBlock, GAUBlock)}, "attention", "what a layer consists of"
    )
    n_head: int = key(4, "attention heads; 1 for gau", ge=1, le=10**4)
    n_kv_head: int | None = key(
        None,
        "heads of keys and values, each shared by n_head / n_kv_head heads of queries (grouped queries); null: n_head",
        ge=1,
        le=10**4,
    )
    head_size: int | None = key(None, "dimensions of each head; null: n_embd / n_head", ge=1, le=10**5)
    n_embd: int = key(256, "width of the residual stream", ge=1, le=10**6)
    n_mlp: int | None = key(
        None, "hidden width of the MLP; null: 4 x n_embd, or 8/3 x n_embd rounded up to 64 for swiglu", ge=1, le=10**7
    )
    mlp: Literal["swiglu", "gelu", "gelu_tanh", "relu2"] = key(
        "swiglu", "the MLP's activation; gelu_tanh: GPT-2's approximation of GELU"
    )
    norm: Literal["rms", "layer"] = key("rms", "RMSNorm or LayerNorm, before attention, MLP and head")
    norm_eps: float = key(1e-5, "added to the mean square, or the variance, in every norm", gt=0)
    position: Position = variant(POSITIONS, "rope", "position information", {"on_resume": "branch"})
    post_norm: bool = key(
        False,
        "the norms of a layer are on the outputs of attention and MLP, not the inputs (OLMo 2)",
        omit_default=True,
    )
    parallel: bool = key(
        False, "attention and MLP have the same input, and both are added to it (GPT-NeoX)", omit_default=True
    )
    normalizer: Options = variant(
        OPTIONS, "softmax", "how attention scores become weights", {"on_resume": "ahead", "acts_in": ("train", "swap")}
    )
    qk_norm: bool | Literal["width"] = key(
        False, "RMSNorm with gain on each head's queries and keys; width: on those of all heads together (OLMo 2)"
    )
    bias: bool = key(False, "biases in linear layers and LayerNorm")
    qkv_bias: bool | None = key(None, "biases of queries, keys and values; null: as `bias`")
    mlp_bias: bool | None = key(None, "biases of the MLP; null: as `bias`", omit_default=True)
    tied: bool = key(False, "one matrix for embedding and head")
    dropout: float = key(0.0, "after embedding, attention and MLP", {"affects": "training"}, ge=0, lt=1)
    init_std: float = key(
        0.02,
        "standard deviation of initial weights; projections into the residual stream: / sqrt(2 n_layer)",
        {"affects": "training"},
        gt=0,
    )
    out_init: Literal["zero"] | None = key(
        None, "zero: projections into the residual stream start at 0 (arXiv 1901.09321); null: as `init_std` says",
        {"affects": "training"},
        omit_default=True,
    )  # fmt: skip
    embedding_norm: Literal["rms", "layer"] | None = key(
        None, "a norm with gain on the tokens' vectors (arXiv 2110.02861); null: none", omit_default=True
    )
    value_residual: Literal["first_layer"] | None = key(
        None,
        "each layer's values are mixed, by a learned factor that is 0.5 at first, with the first layer's (arXiv "
        "2410.17897); null: not",
        omit_default=True,
    )
    differential: bool | Literal["v2"] = key(
        False,
        "each head has two maps of weights, of the halves of its queries and keys: the first less a learned factor "
        "times the second, then RMSNorm (arXiv 2410.05258); v2: of two whole queries and one key, less sigmoid(x W) "
        "times the second, x the layer's input, without a norm (Microsoft's note of January 2026)",
        omit_default=True,
    )
    output_gate: Literal["head", "element"] | None = key(
        None,
        "attention's outputs times sigmoid(x W), x the layer's input: one factor a head, or one an element (arXiv "
        "2505.06708); null: not",
        omit_default=True,
    )
    gate_inputs: int | None = key(
        None,
        "dimensions of x, the first ones, that the output gate sees; it is then 2 sigmoid(x W), W from 0 "
        "(modded-nanogpt); null: all, and sigmoid(x W)",
        omit_default=True,
        ge=1,
    )
    exclusive: bool = key(
        False,
        "attention's outputs lose their part along the token's own value vector (exclusive self-attention, arXiv "
        "2603.09078)",
        omit_default=True,
    )
    logit_softcap: float | None = key(
        None,
        "c of c tanh(logit / c), which bounds the head's logits (arXiv 2408.00118); null: none",
        omit_default=True,
        gt=0,
    )

    @property
    def key_dims(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.block.key_dims(self)

    @property
    def value_dims(self) -> int:
        """Dimensions of each head's values."""
        return self.block.value_dims(self)

    @property
    def maps_per_head(self) -> int:
        """The number of attention maps of each head: 2 with `differential`, else 1."""
        return 2 if self.differential else 1

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, fewer than query heads with grouped queries."""
        return self.n_kv_head or self.n_head

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def scales_with_q(self) -> bool:
        """Whether multiplying queries by a factor multiplies the attention logits by the same factor, in all layers."""
        return all(layer.scales_with_q for layer in self.normalizer.layer_options())

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP: `n_mlp`, or its default if null."""
        if self.n_mlp:
            return self.n_mlp
        return 4 * self.n_embd if self.mlp != "swiglu" else -(-8 * self.n_embd // (3 * 64)) * 64

    def head_problem(self, reason: str) -> Problem:
        """Return a problem of the key that determines the size of heads, which must be even."""
        name = "head_size" if self.head_size else "n_embd"
        name, owner = ("key_size", self.block) if hasattr(self.block, "key_size") else (name, self)
        path = name if owner is self else f"block.{name}"
        remedy = f"make it a multiple of {2 * self.n_head}" if name == "n_embd" else "make it even"
        return Problem(path, getattr(owner, name), reason, remedy)

    def problems(self) -> Iterator[Problem]:
        key_dims, length_reason = self.key_dims, f"lists more than the {self.n_layer} layers of model.n_layer"
        remedy = "shorten the list: it is repeated over the layers"
        block_problems = [*self.block.model_problems(self)]
        yield from block_problems
        if self.position.rotates and not block_problems:
            if key_dims % 2:
                yield self.head_problem(f"gives heads of odd size {key_dims}, which RoPE can't rotate")
            if self.position.rotated_dimensions(key_dims) == 0:
                reason = f"rotates nothing of a head of size {key_dims}"
                yield Problem("position.fraction", self.position.fraction, reason, "set model.position=none")
            if len(self.position.layers) > self.n_layer:
                yield Problem("position.layers", self.position.layers, length_reason, remedy)
        if self.gate_inputs and not (self.output_gate and self.gate_inputs <= self.n_embd):
            reason = f"exceeds model.n_embd = {self.n_embd}" if self.output_gate else "has no gate to act in"
            yield Problem(
                "gate_inputs", self.gate_inputs, reason, "lower it" if self.output_gate else "set output_gate"
            )
        if self.post_norm and self.value_residual:
            yield Problem(
                "post_norm", True, "the values of value_residual come from a normed input", "drop one of both"
            )
        if self.value_residual and self.n_layer == 1:
            yield Problem(
                "value_residual", self.value_residual, "has no other layer to act in: model.n_layer = 1", "drop it"
            )
        if (n_listed := len(self.normalizer.layer_options())) > self.n_layer:
            yield Problem("normalizer", f"{n_listed} normalizers", length_reason, remedy)
