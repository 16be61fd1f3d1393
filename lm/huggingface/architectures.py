"""Convert configurations of GPT-2, Llama and Qwen in transformers to and from lm's, and find their tensors for each of
lm's parameters.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lm.attention.distance import Window
from lm.attention.options import Options
from lm.attention.query_scale import Llama4, Softmax
from lm.config.model_config import Learned, ModelConfig, Rope
from lm.config.normalizers import Layers
from lm.huggingface.fields import (
    IRRELEVANT_FIELDS,
    ORIGINAL_LENGTH,
    REQUIRED_VALUES,
    Fields,
    read_partial_rope,
    read_rope,
    write_rope,
)
from lm.model.decoder import projections
from lm.model.spec import ModelSpec
from lm.schema import Plain

MAX_LAYERS = 10**4
HEAD = "lm_head.weight"  # tensor of the head; its name has no prefix `base`
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # kinds of layers, in the field `layer_types`


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of lm's decoder, and the transformers tensors that hold it, concatenated along the parameter's first
    dimension.
    """

    name: str  # lm's name of the parameter
    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the tensors
    transposed: bool  # each tensor is stored as (inputs, outputs)
    scaled: tuple[int, float] | None  # (number of first rows that a factor multiplies, the factor); None: no rows
    by_heads: int = 0  # heads by which queries, keys and values are interleaved in one tensor; 0: they are not


class Architecture(ABC):
    """The map between configuration and tensors of lm's models and of one `model_type` of transformers.

    In a model with a language-model head, names of all tensors but the head's start with `base`.
    """

    model_type: ClassVar[str]
    # transformers' classes of models with such weights; the first is the language model
    classes: ClassVar[tuple[str, ...]]
    base: ClassVar[str]  # prefix of tensor names in models with a head
    blocks: ClassVar[str]  # the name of the list of layers
    # lm's module -> transformers' name in the layer; several names for a matrix of several projections
    modules: ClassVar[dict[str, str]]
    stores_inputs_first = False  # matrices of layers are stored as (inputs, outputs)
    buffers: ClassVar[tuple[str, ...]] = ()  # ends of the names of tensors that are no parameters
    interleaves_heads = False  # one tensor has a head's queries, keys and values after another's
    divides_width = False  # transformers needs a width that is a multiple of the number of heads

    def read(self, fields: Fields) -> ModelSpec:
        """The spec that a config.json's `fields` give; `end_of_text` and `end_tokens` keep lm's defaults. Raises
        RunError for a missing, unknown or bad field."""
        allowed = (*([name] for name in self.classes), [])
        fields.require_value("architectures", allowed, f"only {' and '.join(self.classes)} are read")
        for name, (value, reason) in REQUIRED_VALUES.items():
            fields.require_value(name, (value,), reason)
        spec = self.spec(fields)
        fields.check_all_used(IRRELEVANT_FIELDS)
        return spec

    @abstractmethod
    def spec(self, fields: Fields) -> ModelSpec:
        """Return the spec that this architecture's fields give, and mark them as used; `read` checks fields that all
        architectures have.
        """

    @abstractmethod
    def write(self, spec: ModelSpec) -> dict[str, Plain]:
        """Return the config.json fields closest to `spec`. If they can't describe it exactly, `read` returns a
        different spec for them.
        """

    def query_scale(self, spec: ModelSpec, fields: Fields, layer: int) -> float:
        """Return the factor on a layer's queries q that turns lm's scores q.k / sqrt(head size) into this
        architecture's scores.
        """
        return 1.0

    def mapped_parameters(self, spec: ModelSpec, fields: Fields, base: str) -> Iterator[MappedParameter]:
        """Yield each of lm's parameters with the tensors that hold it, in a model whose tensor names have the prefix
        `base`.
        """
        with torch.device("meta"):
            decoder = spec.decoder()
        slices = projections(decoder)
        for full_name, parameter in decoder.named_parameters():
            layer, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", full_name).groups()
            shape, prefix = tuple(parameter.shape), base + (f"{self.blocks}.{layer}." if layer else "")
            names = [f"{prefix}{name}.{leaf}" for name in self.modules[module].split()] if module != "head" else [HEAD]
            rows = (
                [part.stop - part.start for part in slices[f"{full_name.removesuffix(leaf)}weight"].values()]
                if names[1:]
                else shape[:1]
            )
            transposed = self.stores_inputs_first and bool(layer) and len(shape) == 2
            shapes = [(size, *shape[1:])[:: -1 if transposed else 1] for size in rows]
            factor = self.query_scale(spec, fields, int(layer)) if module == "attention.qkv" else 1.0
            by_heads = spec.model.n_head if self.interleaves_heads and module == "attention.qkv" else 0
            scaled_rows = (spec.model.n_embd, factor) if factor != 1 else None
            yield MappedParameter(
                full_name, shape, tuple(zip(names, shapes, strict=True)), transposed, scaled_rows, by_heads
            )


class GPT2(Architecture):
    """GPT-2: learned positions, LayerNorm, biases everywhere, matrices stored as (inputs, outputs)."""

    model_type = "gpt2"
    classes = ("GPT2LMHeadModel", "GPT2Model")
    base, blocks, stores_inputs_first = "transformer.", "h", True
    modules: ClassVar[dict[str, str]] = {
        "embedding": "wte", "position": "wpe", "norm": "ln_f", "attention_norm": "ln_1", "mlp_norm": "ln_2",
        "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.out": "mlp.c_proj",
    }  # fmt: skip
    buffers = (".attn.bias", ".attn.masked_bias")
    activations: ClassVar[dict[str, str]] = {
        "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
        "relu2": "relu2",
    }  # fmt: skip

    def spec(self, fields: Fields) -> ModelSpec:
        width, n_positions = fields.size("n_embd", 768), fields.size("n_positions", 1024)
        fields.require_value("n_ctx", (n_positions,), f"is not n_positions = {n_positions}")
        activation = fields.take("activation_function", str, "gelu_new")
        if activation not in self.activations:
            raise fields.refusal("activation_function", f"only {', '.join(self.activations)} are read")
        for name, default in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
            fields.take(name, bool, default)  # read again in `query_scale`
        model = ModelConfig(
            n_layer=fields.size("n_layer", 12, MAX_LAYERS), n_head=fields.size("n_head", 12), n_embd=width,
            n_mlp=fields.size("n_inner", 4 * width),
            mlp=self.activations[activation], norm="layer", norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            position=Learned(),
            normalizer=Softmax(), bias=True, tied=fields.take("tie_word_embeddings", bool, True),
        )  # fmt: skip
        return ModelSpec(model, fields.size("vocab_size", 50257), n_positions)

    def write(self, spec: ModelSpec) -> dict[str, Plain]:
        model = spec.model
        activation = next((name for name, mlp in self.activations.items() if mlp == model.mlp), "gelu_new")
        return {
            "architectures": [self.classes[0]], "model_type": self.model_type, "vocab_size": spec.vocab_size,
            "n_positions": spec.seq_len, "n_embd": model.n_embd, "n_layer": model.n_layer, "n_head": model.n_head,
            "n_inner": model.mlp_width,
            "activation_function": activation, "layer_norm_epsilon": model.norm_eps, "tie_word_embeddings": model.tied,
            "initializer_range": model.init_std, "dtype": "float32",
            "embd_pdrop": model.dropout, "resid_pdrop": model.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip

    def query_scale(self, spec: ModelSpec, fields: Fields, layer: int) -> float:
        """Return 1, or sqrt(head size) if `scale_attn_weights` is false. `scale_attn_by_inverse_layer_idx` divides this
        by `layer` + 1.
        """
        is_scaled = fields.take("scale_attn_weights", bool, True)
        per_layer = fields.take("scale_attn_by_inverse_layer_idx", bool, False)
        return (1.0 if is_scaled else math.sqrt(spec.model.key_dims)) / (layer + 1 if per_layer else 1)


class Llama(Architecture):
    """Llama and its like (SmolLM2, TinyLlama): RoPE, RMSNorm, SwiGLU, grouped queries."""

    model_type = "llama"
    classes = ("LlamaForCausalLM", "LlamaModel")
    base, blocks, divides_width = "model.", "layers", True
    modules: ClassVar[dict[str, str]] = {
        "embedding": "embed_tokens", "norm": "norm", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "mlp.up": "mlp.gate_proj mlp.up_proj", "mlp.out": "mlp.down_proj",
    }  # fmt: skip
    buffers = (".rotary_emb.inv_freq",)
    kv_heads: ClassVar[int | None] = None  # default of num_key_value_heads; None: the number of query heads
    head_dim: ClassVar[int | None] = None  # default of head_dim; None: hidden_size / num_attention_heads
    vocab_size: ClassVar[int] = 32000
    # defaults of num_hidden_layers, num_attention_heads, rms_norm_eps and tie_word_embeddings
    n_layers, n_heads, eps, tied = 32, 32, 1e-6, False
    # hidden_size, intermediate_size, max_position_embeddings
    default_sizes: ClassVar[tuple[int, int, int]] = (4096, 11008, 2048)

    def spec(self, fields: Fields) -> ModelSpec:
        width, mlp_width, n_positions = self.default_sizes
        width, n_positions = fields.size("hidden_size", width), fields.size("max_position_embeddings", n_positions)
        fields.require_value("hidden_act", ("silu", "swish"), "only silu is read, which makes the MLP SwiGLU")
        n_heads = fields.size("num_attention_heads", self.n_heads)
        head_size = fields.size("head_dim", self.head_dim)
        if head_size is None and width % n_heads:
            raise fields.refusal(
                "num_attention_heads", f"does not divide hidden_size = {width}, and there is no head_dim"
            )
        kv_heads = fields.size("num_key_value_heads", None if fields.is_null("num_key_value_heads") else self.kv_heads)
        model = ModelConfig(
            n_layer=fields.size("num_hidden_layers", self.n_layers, MAX_LAYERS), n_head=n_heads,
            n_kv_head=None if kv_heads == n_heads else kv_heads,
            head_size=None if head_size and head_size * n_heads == width else head_size, n_embd=width,
            n_mlp=fields.size("intermediate_size", mlp_width), mlp="swiglu", norm="rms",
            norm_eps=fields.number("rms_norm_eps", self.eps), position=self.position(fields, n_positions),
            tied=fields.take("tie_word_embeddings", bool, self.tied), **self.variant_options(fields),
        )  # fmt: skip
        return ModelSpec(model, fields.size("vocab_size", self.vocab_size), n_positions)

    def position(self, fields: Fields, n_positions: int) -> Rope:
        """Return RoPE's options for a context of `n_positions` tokens."""
        return read_rope(fields, n_positions)

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        """Return {name: value} of lm's model options in which Llama, Qwen 2 and Qwen 3 differ: biases, query and key
        norms, normalizer.
        """
        biases = fields.take("attention_bias", bool, False), fields.take("mlp_bias", bool, False)
        return {"bias": biases[0], "mlp_bias": biases[1] if biases[0] != biases[1] else None, "normalizer": Softmax()}

    def write(self, spec: ModelSpec) -> dict[str, Plain]:
        model = spec.model
        return {
            "architectures": [self.classes[0]], "model_type": self.model_type, "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.seq_len, "hidden_size": model.n_embd, "intermediate_size": model.mlp_width,
            "num_hidden_layers": model.n_layer, "num_attention_heads": model.n_head,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.key_dims, "hidden_act": "silu", "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tied,
            "initializer_range": model.init_std, "dtype": "float32", "attention_dropout": 0.0,
            **self.write_variant_options(model),
            "rope_parameters": write_rope(model.position) if model.position.rotates else {"rope_type": "default"},
        }  # fmt: skip

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        """Return the config.json fields for the options of `model` in which Llama, Qwen 2 and Qwen 3 differ."""
        return {"attention_bias": model.bias, "mlp_bias": model.has_mlp_bias}


class Qwen2(Llama):
    """Qwen 2 and 2.5: biases of queries, keys and values; some layers may have a sliding window."""

    model_type = "qwen2"
    classes = ("Qwen2ForCausalLM", "Qwen2Model")
    divides_width, kv_heads, vocab_size, default_sizes = False, 32, 151936, (4096, 22016, 32768)

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        return {"bias": False, "qkv_bias": True, "normalizer": _qwen_windows(fields)}

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        return _write_windows(model)


class Qwen3(Qwen2):
    """Qwen 3: norms of queries and keys, a head size that doesn't depend on the width."""

    model_type = "qwen3"
    classes = ("Qwen3ForCausalLM", "Qwen3Model")
    kv_heads, head_dim, vocab_size, default_sizes = 32, 128, 151936, (4096, 22016, 32768)

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        bias = fields.take("attention_bias", bool, False)
        return {"bias": bias, "mlp_bias": False if bias else None, "qk_norm": True, "normalizer": _qwen_windows(fields)}

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        return {"attention_bias": model.bias, **_write_windows(model)}


class SmolLM3(Llama):
    """SmolLM3: every fourth layer, or those that `no_rope_layers` says, has no positions."""

    model_type = "smollm3"
    classes = ("SmolLM3ForCausalLM", "SmolLM3Model")
    kv_heads, vocab_size, default_sizes, tied = 4, 128256, (2048, 11008, 32768), True
    n_layers, n_heads = 36, 16

    def position(self, fields: Fields, n_positions: int) -> Rope:
        layers = self.rotating_layers(fields)
        rope = read_rope(fields, n_positions, 2e6)
        if not any(layers):
            raise fields.refusal("no_rope_layers", "no layer has positions")
        return replace(rope, layers=[] if all(layers) else layers)

    def rotating_layers(self, fields: Fields) -> list[bool]:
        """Return whether each layer has positions."""
        n_layers = fields.size("num_hidden_layers", self.n_layers, MAX_LAYERS)
        interval = fields.size("no_rope_layer_interval", 4)
        default = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
        return [bool(rotates) for rotates in fields.take("no_rope_layers", list[int], default)[:n_layers]]

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        layers = [not rotates for rotates in self.rotating_layers(fields)]
        return {**super().variant_options(fields), "normalizer": _read_windows(fields, None, layers)}

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        layers = [int(model.position.rotates_in(layer)) for layer in range(model.n_layer)]
        return {**super().write_variant_options(model), **_write_windows(model), "no_rope_layers": layers}


class Ministral3(Llama):
    """Ministral 3: the factor on queries grows with the position."""

    model_type = "ministral3"
    classes = ("Ministral3ForCausalLM", "Ministral3Model")
    kv_heads, head_dim, vocab_size, default_sizes, eps = 8, 128, 131072, (4096, 14336, 262144), 1e-5
    n_layers = 34
    GROWTH: ClassVar[str] = "llama_4_scaling_beta"
    DEFAULT_ROPE: ClassVar[dict[str, Plain]] = {
        "type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL_LENGTH: 16384, "mscale": 1.0,
        "mscale_all_dim": 1.0, GROWTH: 0.1,
    }  # fmt: skip

    def position(self, fields: Fields, n_positions: int) -> Rope:
        return read_rope(self.with_rope(fields), n_positions, others=(self.GROWTH, "max_position_embeddings"))

    def with_rope(self, fields: Fields) -> Fields:
        """Return the fields, or where they don't say what RoPE is, transformers' default of this field."""
        default = Fields({"rope_parameters": self.DEFAULT_ROPE}, fields.path)
        return fields if fields.block("rope_parameters") else default

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        fields.require_value("sliding_window", (), "layers with windows are not read here")
        block = self.with_rope(fields).block("rope_parameters")
        growth, length = block.take(self.GROWTH, float), block.size(ORIGINAL_LENGTH)
        return {"bias": False, "normalizer": Llama4(floor_scale=float(length), attn_scale=growth, offset=0)}

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        return {}

    def write(self, spec: ModelSpec) -> dict[str, Plain]:
        config, options = super().write(spec), spec.model.normalizer.layer_option(0)
        growth = {self.GROWTH: getattr(options, "attn_scale", 0.0)}
        length = {ORIGINAL_LENGTH: int(getattr(options, "floor_scale", 1))}
        return {**config, "rope_parameters": {**length, **config["rope_parameters"], **growth}}


class OLMo2(Llama):
    """OLMo 2: norms on the outputs of attention and MLP, and on the queries and keys of all heads together."""

    model_type = "olmo2"
    classes = ("Olmo2ForCausalLM", "Olmo2Model")
    modules: ClassVar[dict[str, str]] = Llama.modules | {
        "attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    vocab_size, default_sizes, eps = 50304, (4096, 11008, 2048), 1e-5

    def variant_options(self, fields: Fields) -> dict[str, bool | Options]:
        bias = fields.take("attention_bias", bool, False)
        extra = {"qk_norm": "width", "post_norm": True}
        return {"bias": bias, "mlp_bias": False if bias else None, "normalizer": Softmax(), **extra}

    def write_variant_options(self, model: ModelConfig) -> dict[str, Plain]:
        return {"attention_bias": model.bias}


class GPTNeoX(Architecture):
    """GPT-NeoX and Pythia: parallel attention and MLP, LayerNorm, biases, RoPE on a part of each head."""

    model_type = "gpt_neox"
    classes = ("GPTNeoXForCausalLM", "GPTNeoXModel")
    base, blocks, interleaves_heads, divides_width = "gpt_neox.", "layers", True, True
    modules: ClassVar[dict[str, str]] = {
        "embedding": "embed_in", "norm": "final_layer_norm", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.out": "mlp.dense_4h_to_h",
    }  # fmt: skip
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

    def spec(self, fields: Fields) -> ModelSpec:
        n_positions, activation = fields.size("max_position_embeddings", 2048), fields.take("hidden_act", str, "gelu")
        if activation not in GPT2.activations:
            raise fields.refusal("hidden_act", f"only {', '.join(GPT2.activations)} are read")
        fields.require_value("attention_bias", (True,), "only layers with biases are read")
        model = ModelConfig(
            n_layer=fields.size("num_hidden_layers", 44, MAX_LAYERS), n_head=fields.size("num_attention_heads", 64),
            n_embd=fields.size("hidden_size", 6144), n_mlp=fields.size("intermediate_size", 24576),
            mlp=GPT2.activations[activation], norm="layer", norm_eps=fields.number("layer_norm_eps", 1e-5),
            position=read_partial_rope(fields), normalizer=Softmax(), bias=True,
            parallel=fields.take("use_parallel_residual", bool, True),
            tied=fields.take("tie_word_embeddings", bool, False),
        )  # fmt: skip
        return ModelSpec(model, fields.size("vocab_size", 50432), n_positions)

    def write(self, spec: ModelSpec) -> dict[str, Plain]:
        model, rope = spec.model, spec.model.position
        activation = next((name for name, mlp in GPT2.activations.items() if mlp == model.mlp), "gelu")
        return {
            "architectures": [self.classes[0]], "model_type": self.model_type, "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.seq_len, "hidden_size": model.n_embd, "num_hidden_layers": model.n_layer,
            "num_attention_heads": model.n_head, "intermediate_size": model.mlp_width,
            "hidden_act": {"gelu_tanh": "gelu_new"}.get(model.mlp, activation),
            "layer_norm_eps": model.norm_eps, "use_parallel_residual": model.parallel,
            "tie_word_embeddings": model.tied, "initializer_range": model.init_std, "dtype": "float32",
            "hidden_dropout": model.dropout, "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": getattr(rope, "theta", 1e4),
                "partial_rotary_factor": getattr(rope, "fraction", 1.0)},
        }  # fmt: skip


def _qwen_windows(fields: Fields) -> Options:
    first_layer, n_layers = fields.take("max_window_layers", int, 28), fields.size("num_hidden_layers", 32, MAX_LAYERS)
    return _read_windows(fields, 4096, [layer >= first_layer for layer in range(n_layers)])


def _read_windows(fields: Fields, default_size: int | None, layers: list[bool]) -> Options:
    """Return options of lm's normalizer: softmax, over a sliding window in the layers for which config.json has one,
    by default those of `layers`. Raises RunError for a bad field."""
    has_windows, n_layers = fields.take("use_sliding_window", bool, False), len(layers)
    size = fields.size("sliding_window", None if fields.is_null("sliding_window") else default_size)
    default_layer_types = [
        SLIDING_ATTENTION if has_windows and size and has_window else FULL_ATTENTION for has_window in layers
    ]
    layer_types = fields.take("layer_types", list[str], default_layer_types)
    if len(layer_types) != n_layers or not {*layer_types} <= {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise fields.refusal(
            "layer_types", f"must list {FULL_ATTENTION} or {SLIDING_ATTENTION} for each of the {n_layers} layers"
        )
    if SLIDING_ATTENTION in layer_types and not has_windows:
        raise fields.refusal("layer_types", f"lists {SLIDING_ATTENTION}, and use_sliding_window is not true")
    if SLIDING_ATTENTION in layer_types and size is None:
        raise fields.refusal("sliding_window", f"layer_types lists {SLIDING_ATTENTION}")
    if SLIDING_ATTENTION not in layer_types:
        return Softmax()
    normalizers = [Window(size=size) if kind == SLIDING_ATTENTION else Softmax() for kind in layer_types]
    return normalizers[0] if {*layer_types} == {SLIDING_ATTENTION} else Layers(of=normalizers)


def _write_windows(model: ModelConfig) -> dict[str, Plain]:
    """Return the config.json fields that say which layers of `model` have a sliding window, and of what size."""
    layer_options = [model.normalizer.layer_option(n) for n in range(model.n_layer)]
    window_sizes = [options.size for options in layer_options if options.name == Window.name]
    if not window_sizes:
        return {"use_sliding_window": False, "sliding_window": None}
    layer_types = [SLIDING_ATTENTION if options.name == Window.name else FULL_ATTENTION for options in layer_options]
    return {"use_sliding_window": True, "sliding_window": window_sizes[0], "layer_types": layer_types}


ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture()
    for architecture in (GPT2, Llama, Qwen2, Qwen3, SmolLM3, Ministral3, OLMo2, GPTNeoX)
}
