"""Keys of the block `model`: they describe the decoder's dimensions and architecture, and RoPE's frequencies."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor

from lm.attention.options import Options
from lm.config.normalizers import NORMALIZER_OPTIONS
from lm.config.schema import key, variant
from lm.errors import Problem


@dataclass(frozen=True)
class TrainedScaling:
    """Base class of rescalings of RoPE's frequencies with which a model was, or will be, trained. The base class itself
    leaves the frequencies as they are.
    """

    name: ClassVar[str] = "none"
    # the factor on RoPE's cos and sin, by whose square attention logits are multiplied
    amplitude: ClassVar[float] = 1.0

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        """Return the radians per token by which each pair of dimensions rotates after rescaling: (pairs,).

        Args:
            frequencies: (pairs,), radians per token before rescaling.
            theta: RoPE's base, from which `frequencies` are computed.
        """
        return frequencies


@dataclass(frozen=True)
class LinearScaling(TrainedScaling):
    """Position interpolation (arXiv 2306.15595) divides all frequencies by `factor`."""

    name: ClassVar[str] = "linear"
    factor: float = key(2.0, "divides all frequencies", gt=0, le=1e6)

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling(TrainedScaling):
    """Llama 3.1's rescaling divides low frequencies by `factor` and keeps high ones. Between them is a transition.

    The transition is linear in a pair's number of periods in `original` tokens. Source: `apply_scaling` of
    github.com/meta-llama/llama-models.
    """

    name: ClassVar[str] = "llama3"
    factor: float = key(8.0, "divides low frequencies", gt=0, le=1e6)
    # pairs with at most `slow_periods` periods in the original context are divided by factor, those with at least
    # `fast_periods` stay
    slow_periods: ClassVar[float] = 1.0
    fast_periods: ClassVar[float] = 4.0
    original: int = key(8192, "context length before the frequencies were rescaled, tokens", ge=1, le=10**9)

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        periods = self.original * frequencies / (2 * math.pi)
        return divide_low_frequencies(frequencies, periods, self.slow_periods, self.fast_periods, self.factor)


@dataclass(frozen=True)
class TrainedYarn(Llama3Scaling):
    """YaRN (arXiv 2309.00071), as in its authors' code, divides low frequencies by `factor` and keeps high ones.
    Between them is a transition.

    The options are those of Llama 3's scaling, the frequencies differ. Source: `YaRNScaledRotaryEmbedding` of
    github.com/jquesnelle/yarn, whose transition is linear in a pair's index. In the paper it is linear in the number of
    periods, as in the inference setting `yarn`.
    """

    name: ClassVar[str] = "yarn"
    factor: float = key(4.0, "divides low frequencies", gt=0, le=1e6)
    fast_periods: ClassVar[float] = 32.0
    attention_factor: float | None = key(None, "factor on cos and sin; null: 0.1 ln(factor) + 1", gt=0, le=1e6)
    whole_pairs: bool = key(True, "round the indices of the transition's first and last pair outwards")

    def rescaled_frequencies(self, frequencies: Tensor, theta: float, head_size: int) -> Tensor:
        # The indices of the pairs with `fast_periods` and `slow_periods` periods, as real numbers.
        ends = [
            head_size * math.log(self.original / (periods * 2 * math.pi)) / (2 * math.log(theta))
            for periods in (self.fast_periods, self.slow_periods)
        ]
        if self.whole_pairs:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], head_size - 1)
        pair_indices = frequencies.new_tensor(range(len(frequencies)))
        divided_fraction = ((pair_indices - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - divided_fraction + divided_fraction / self.factor)

    @property
    def amplitude(self) -> float:
        """Return the factor on RoPE's cos and sin: `attention_factor`, or if that is null 0.1 ln(factor) + 1."""
        return self.attention_factor or (0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0)


def divide_low_frequencies(
    frequencies: Tensor, periods: Tensor, slow_periods: float, fast_periods: float, factor: float
) -> Tensor:
    """Return RoPE's frequencies, (pairs,), with low ones divided by `factor` and high ones unchanged.

    A low frequency has at most `slow_periods` periods in the context length, a high one at least `fast_periods`.
    Between them the multiplier is linear in the number of periods.

    Args:
        frequencies: (pairs,), radians per token of each pair of dimensions.
        periods: (pairs,), the number of periods of each pair, not rounded, in the context length before scaling.
    """
    kept_fraction = ((periods - slow_periods) / (fast_periods - slow_periods)).clamp(0, 1)
    return frequencies * (kept_fraction + (1 - kept_fraction) / factor)


TRAINED_SCALINGS = {v.name: v for v in (TrainedScaling, LinearScaling, Llama3Scaling, TrainedYarn)}


# ---------------------------------------------------------------- the decoder


class Position:
    """Base class of the options of position encodings."""

    name: ClassVar[str]
    rotates: ClassVar[bool] = False  # true if queries and keys are rotated by angles that can be rescaled
    has_length_limit: ClassVar[bool] = False  # true if positions beyond the training length have no encoding

    @property
    def label(self) -> str:
        """Return the encoding in words, e.g. `rope theta 10000`."""
        return f"position {self.name}"

    def rotates_in(self, layer: int) -> bool:
        """Return whether layer `layer`, counted from 0, rotates its queries and keys."""
        return self.rotates


@dataclass
class Rope(Position):
    """Rotary position embedding (arXiv 2104.09864) rotates queries and keys."""

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True
    theta: float = key(10000.0, "base of the rotation periods", gt=1, le=1e12)
    fraction: float = key(
        1.0, "fraction of each head's dimensions that rotate, highest frequencies first (p-RoPE below 1)", gt=0, le=1
    )
    partial: bool = key(
        False,
        "rotating dimensions have frequencies from highest to lowest, as in GPT-NeoX, not the head's highest alone",
        omit_default=True,
    )
    scaling: TrainedScaling = variant(
        TRAINED_SCALINGS, "none", "how the frequencies of theta were rescaled before or in training", omit_default=True
    )
    layers: list[bool] = key(
        [],
        "whether each layer has RoPE, repeated from the first layer on; others have no positions; []: all have it",
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
        """Return whether layer `layer`, counted from 0, rotates its queries and keys."""
        return not self.layers or self.layers[layer % len(self.layers)]

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the entries of `layers` are all true or all false."""
        if len({*self.layers}) == 1:
            yield Problem(
                "layers",
                self.layers,
                "is the same in all layers",
                "drop it" if self.layers[0] else "set model.position=none",
            )

    def rotated_dimensions(self, head_size: int) -> int:
        """Return how many dimensions of a head rotate, which is an even number."""
        return int(round(head_size * self.fraction, 6)) // 2 * 2  # 100 x 0.58 falls below 58 in floating point


@dataclass
class LearnedPosition(Position):
    """Each position up to the training length has a learned vector. The model can't be evaluated beyond that length."""

    name: ClassVar[str] = "learned"
    has_length_limit: ClassVar[bool] = True


@dataclass
class NoPosition(Position):
    """The causal mask is the only position information (NoPE)."""

    name: ClassVar[str] = "none"


POSITIONS = {v.name: v for v in (Rope, LearnedPosition, NoPosition)}


@dataclass
class AttentionBlock:
    """Each layer is multi-head attention, then an MLP."""

    name: ClassVar[str] = "attention"

    def key_dims(self, model: "ModelConfig") -> int:
        """Return the number of dimensions of each head's queries and keys. With `differential`, each of a head's two
        attention maps has this number.
        """
        return self.value_dims(model) // (2 if model.differential is True else 1)

    def value_dims(self, model: "ModelConfig") -> int:
        """Return the number of dimensions of each head's values."""
        return model.head_size or model.n_embd // model.n_head

    def resolved_options(self, model: "ModelConfig") -> dict[str, int | bool | None]:
        """Return {key: value} of the options of `model` that may be null. All configurations of the same model have the
        same result.

        Each null is replaced by the value that it stands for. The exception is `mlp_bias`: a value that equals `bias`,
        for which null stands, is replaced by null.
        """
        return {
            "n_kv_head": model.kv_heads,
            "head_size": model.value_dims,
            "n_mlp": model.mlp_width,
            "qkv_bias": model.has_qkv_bias,
            "mlp_bias": model.mlp_bias if model.mlp_bias != model.bias else None,
        }

    def label(self, model: "ModelConfig") -> str:
        """Return the MLP's activation and hidden width as text, such as `swiglu 704`."""
        return f"{model.mlp} {model.mlp_width}"

    def model_problems(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield a problem for each option of `model` that contradicts this block, with a path relative to `model`."""
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
            yield model.make_head_size_problem(
                f"gives heads of odd size {model.value_dims}, which two maps can't share"
            )


@dataclass
class GAUBlock:
    """Each layer is a gated attention unit (arXiv 2202.10447), with one head and no MLP. Two units have about as many
    parameters as one attention block with an MLP.
    """

    name: ClassVar[str] = "gau"
    expansion: float = key(2.0, "width of gate and values, in model widths", gt=0, le=64)
    key_size: int = key(128, "dimensions of queries and keys", ge=1, le=10**5)

    def key_dims(self, model: "ModelConfig") -> int:
        """Return the number of dimensions of queries and keys."""
        return self.key_size

    def value_dims(self, model: "ModelConfig") -> int:
        """Return the number of dimensions of the values, which is also that of the gate."""
        return int(self.expansion * model.n_embd)

    def resolved_options(self, model: "ModelConfig") -> dict[str, int | bool]:
        """Return {}: the options of a model that may be null describe attention with heads and an MLP."""
        return {}  # the options that may be null are for attention and MLP

    def label(self, model: "ModelConfig") -> str:
        """Return the layers in words, such as `gated attention units of width 512`."""
        return f"gated attention units of width {self.value_dims(model)}"

    def model_problems(self, model: "ModelConfig") -> Iterator[Problem]:
        """Yield a problem for each option of `model` that a gated attention unit doesn't have."""
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
    """The options of the block `model`: the decoder's architecture and initial weights."""

    n_layer: int = key(6, "number of layers", ge=1, le=10**4)
    block: AttentionBlock | GAUBlock = variant(
        {v.name: v for v in (AttentionBlock, GAUBlock)}, "attention", "what a layer consists of"
    )
    n_head: int = key(4, "number of attention heads; 1 for gau", ge=1, le=10**4)
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
        False, "attention and MLP have the same input, and both outputs are added to it (GPT-NeoX)", omit_default=True
    )
    normalizer: Options = variant(
        NORMALIZER_OPTIONS,
        "softmax",
        "how scores become weights",
        {"on_resume": "ahead", "commands": ("train", "swap")},
    )
    qk_norm: bool | Literal["width"] = key(
        False, "RMSNorm with gain on each head's queries and keys; width: on those of all heads together (OLMo 2)"
    )
    bias: bool = key(False, "biases in linear layers and LayerNorm")
    qkv_bias: bool | None = key(None, "biases of queries, keys and values; null: as `bias`")
    mlp_bias: bool | None = key(None, "biases of the MLP; null: as `bias`", omit_default=True)
    tied: bool = key(False, "one matrix for embedding and head")
    dropout: float = key(0.0, "dropout after embedding, attention and MLP", {"affects": "training"}, ge=0, lt=1)
    init_std: float = key(
        0.02,
        "standard deviation of initial weights; projections into the residual stream: / sqrt(2 n_layer)",
        {"affects": "training"},
        gt=0,
    )
    out_init: Literal["zero"] | None = key(
        None, "zero: projections into the residual stream start at 0 (arXiv 1901.09321); null: as `init_std` says",
        {"affects": "training"},
        omit_default=True
    )  # fmt: skip
    embedding_norm: Literal["rms", "layer"] | None = key(
        None, "a norm with gain on the tokens' vectors (arXiv 2110.02861); null: none", omit_default=True
    )
    value_residual: Literal["first_layer"] | None = key(
        None,
        "each layer's values are mixed, by a learned factor that is 0.5 at first, with the first layer's (arXiv "
        "2410.17897); null: off",
        omit_default=True,
    )
    differential: bool | Literal["v2"] = key(
        False,
        "each head has two attention maps, from halves of its queries and keys; its weights are the first minus a "
        "learned factor times the second, then RMSNorm (arXiv 2410.05258); v2: maps from two queries and one key, the"
        " factor is sigmoid(x W), x the layer's input, no norm (Microsoft, January 2026)",
        omit_default=True,
    )
    output_gate: Literal["head", "element"] | None = key(
        None,
        "attention's outputs times sigmoid(x W), x the layer's input: one factor for each head, or each element "
        "(arXiv 2505.06708); null: off",
        omit_default=True,
    )
    gate_inputs: int | None = key(
        None,
        "number of first dimensions of x that the output gate sees; it is then 2 sigmoid(x W), W 0 at first "
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
        """Return the number of dimensions of each head's queries and keys."""
        return self.block.key_dims(self)

    @property
    def value_dims(self) -> int:
        """Return the number of dimensions of each head's values."""
        return self.block.value_dims(self)

    @property
    def maps_per_head(self) -> int:
        """Return the number of attention maps of each head: 2 with `differential`, else 1."""
        return 2 if self.differential else 1

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads: with grouped queries, fewer than the query heads."""
        return self.n_kv_head or self.n_head

    @property
    def has_qkv_bias(self) -> bool:
        """Return whether the projections to queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Return whether the MLP has biases."""
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def mlp_width(self) -> int:
        """Return the hidden width of the MLP: `n_mlp`, or its default if that is null."""
        if self.n_mlp:
            return self.n_mlp
        return 4 * self.n_embd if self.mlp != "swiglu" else -(-8 * self.n_embd // (3 * 64)) * 64

    def make_head_size_problem(self, reason: str) -> Problem:
        """Return a problem of the key that determines the size of heads. `reason` says what is wrong with that key's
        value; advice on what to set is added.
        """
        name = "head_size" if self.head_size else "n_embd"
        name, owner = ("key_size", self.block) if hasattr(self.block, "key_size") else (name, self)
        path = name if owner is self else f"block.{name}"
        remedy = f"make it a multiple of {2 * self.n_head}" if name == "n_embd" else "make it even"
        return Problem(path, getattr(owner, name), reason, remedy)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each contradiction between the options, such as heads of odd size with RoPE."""
        key_dims, length_reason = self.key_dims, f"lists more than the {self.n_layer} layers of model.n_layer"
        remedy = "shorten the list: it is repeated over the layers"
        block_problems = [*self.block.model_problems(self)]
        yield from block_problems
        if self.position.rotates and not block_problems:
            if key_dims % 2:
                yield self.make_head_size_problem(f"gives heads of odd size {key_dims}, which RoPE can't rotate")
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
