"""Convert configurations of GPT-2, Llama and similar transformers models to and from lm's, and map their tensors.

An `Architecture` says for each of lm's parameters which tensors of the transformers model hold it.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lm.attention.distance import Window
from lm.attention.options import Options
from lm.attention.query_scale import Llama4, Softmax
from lm.config.model_config import LearnedPosition, ModelConfig, Rope
from lm.config.normalizers import LayerList
from lm.huggingface.fields import (
    IRRELEVANT_FIELDS,
    ORIGINAL_LENGTH_FIELD,
    REQUIRED_VALUES,
    ConfigFields,
    read_partial_rope,
    read_rope,
    rope_parameters_value,
)
from lm.model.decoder import projection_rows
from lm.model.spec import ModelSpec
from lm.plain import Plain

PlainDict = dict[str, Plain]
MAX_LAYERS, MAX_DIMENSION = 10**4, 10**9
HEAD_TENSOR = "lm_head.weight"  # tensor of the head; its name never has a prefix
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"  # kinds of layers, in the field `layer_types`

ACTIVATIONS = {
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
    "relu2": "relu2",
}  # fmt: skip


@dataclass(frozen=True)
class MappedParameter:
    """This class names a parameter of lm's decoder, and the transformers tensors that it consists of.

    The tensors are concatenated along the parameter's first dimension.
    """

    name: str  # lm's name of the parameter
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the tensors
    is_transposed: bool  # each tensor is stored as (inputs, outputs)
    # one tensor interleaves queries, keys and values by this many heads; 0: it does not
    n_interleaved_heads: int = 0


class Architecture(ABC):
    """An architecture maps configurations and tensors of one transformers `model_type` to those of lm's decoder, and
    back.

    Except for the head, tensor names of a model with a language-model head start with `tensor_prefix`.
    """

    model_type: ClassVar[str]
    # transformers' classes of models with such weights; the first is the language model
    transformers_class_names: ClassVar[tuple[str, ...]]
    tensor_prefix: ClassVar[str]  # beginning of tensor names in models with a head
    layer_list_name: ClassVar[str]  # name of the list of layers in tensor names
    option_by_field: ClassVar[dict[str, str]]  # name of lm's option, by the name of the field in config.json
    option_defaults: ClassVar[PlainDict]  # transformers' default of each of these options
    fixed_options: ClassVar[PlainDict]  # lm's options that all models of this architecture share
    # name of transformers' module by the name of lm's; several names if lm fuses several projections into one matrix
    module_names: ClassVar[dict[str, str]]
    stores_inputs_first = False  # whether matrices of layers are stored as (inputs, outputs)
    buffer_suffixes: ClassVar[tuple[str, ...]] = ()  # ends of the names of tensors that are not parameters
    interleaves_heads = False  # whether one tensor holds queries, keys and values head by head
    heads_divide_width = False  # whether transformers requires a width divisible by the number of heads

    def read_model_spec(self, fields: ConfigFields) -> ModelSpec:
        """Return the model's spec (shape, vocabulary, training length) that the fields of a config.json describe.

        The spec's `end_of_text` and `end_tokens` keep their defaults here; `import_model` sets them from the tokenizer.
        Raises RunError: a field is missing, unknown or has a value that lm can't use.
        """
        allowed = (*([name] for name in self.transformers_class_names), [])
        fields.require_value("architectures", allowed, f"only {' and '.join(self.transformers_class_names)} are read")
        for name, (value, reason) in REQUIRED_VALUES.items():
            fields.require_value(name, (value,), reason)
        spec = self.read_own_fields(fields)
        fields.check_all_used(IRRELEVANT_FIELDS)
        return spec

    def read_own_fields(self, fields: ConfigFields) -> ModelSpec:
        """Return the spec that this architecture's own fields describe, and mark these fields as used.

        `read_model_spec` checks the fields that all architectures share.
        """
        option_values: PlainDict = {}
        for name, option in self.option_by_field.items():
            default = self.option_defaults[option]
            if isinstance(default, bool):
                option_values[option] = fields.read_value(name, bool, default)
            elif isinstance(default, float):
                option_values[option] = fields.positive_number(name, default)
            else:
                option_values[option] = fields.positive_integer(
                    name, default, MAX_LAYERS if option == "n_layer" else MAX_DIMENSION
                )
        options = {name: value for name, value in option_values.items() if name not in ("vocab_size", "seq_len")}
        model = ModelConfig(**options, **self.fixed_options, **self.converted_options(fields, option_values))
        return ModelSpec(model, option_values["vocab_size"], option_values["seq_len"])

    @abstractmethod
    def converted_options(self, fields: ConfigFields, option_values: PlainDict) -> dict[str, object]:
        """Return lm's model options, {name: value}, that follow from several fields or need a conversion.

        option_values: the options that single fields give, read already.
        """

    def config_fields(self, spec: ModelSpec) -> PlainDict:
        """Return the config.json fields that describe `spec` as closely as this architecture can.

        If it can't describe the spec exactly, `read_model_spec` returns a different spec for these fields.
        """
        values = {**vars(spec.model), "n_mlp": spec.model.mlp_width, **vars(spec)}
        return {
            "architectures": [self.transformers_class_names[0]], "model_type": self.model_type,
            **{name: values[option] for name, option in self.option_by_field.items()},
            "initializer_range": spec.model.init_std, "dtype": "float32", **self.converted_fields(spec.model),
        }  # fmt: skip

    @abstractmethod
    def converted_fields(self, model: ModelConfig) -> PlainDict:
        """Return the config.json fields that follow from several options of `model` or need a conversion."""

    def mapped_parameters(self, spec: ModelSpec, model_prefix: str) -> Iterator[MappedParameter]:
        """Yield each of lm's parameters with the transformers tensors that hold it.

        model_prefix: prefix of the model's tensor names; empty for a model without a language-model head.
        """
        with torch.device("meta"):
            decoder = spec.make_decoder()
        slices = projection_rows(decoder)
        for full_name, parameter in decoder.named_parameters():
            layer, module, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(\w+)", full_name).groups()
            shape, prefix = tuple(parameter.shape), model_prefix + (f"{self.layer_list_name}.{layer}." if layer else "")
            names = (
                [f"{prefix}{name}.{leaf}" for name in self.module_names[module].split()]
                if module != "head"
                else [HEAD_TENSOR]
            )
            rows = (
                [part.stop - part.start for part in slices[f"{full_name.removesuffix(leaf)}weight"].values()]
                if names[1:]
                else shape[:1]
            )
            transposed = self.stores_inputs_first and bool(layer) and len(shape) == 2
            shapes = [(size, *shape[1:])[:: -1 if transposed else 1] for size in rows]
            n_interleaved_heads = spec.model.n_head if self.interleaves_heads and module == "attention.qkv" else 0
            yield MappedParameter(full_name, tuple(zip(names, shapes, strict=True)), transposed, n_interleaved_heads)


class GPT2(Architecture):
    """GPT-2 has learned positions, LayerNorm and biases everywhere, and stores matrices as (inputs, outputs)."""

    model_type = "gpt2"
    transformers_class_names = ("GPT2LMHeadModel", "GPT2Model")
    tensor_prefix, layer_list_name, stores_inputs_first = "transformer.", "h", True
    module_names: ClassVar[dict[str, str]] = {
        "embedding": "wte", "position": "wpe", "norm": "ln_f", "attention_norm": "ln_1", "mlp_norm": "ln_2",
        "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.out": "mlp.c_proj",
    }  # fmt: skip
    buffer_suffixes = (".attn.bias", ".attn.masked_bias")
    option_by_field: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size", "n_positions": "seq_len", "n_embd": "n_embd", "n_layer": "n_layer", "n_head":
        "n_head", "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied",
    }  # fmt: skip
    option_defaults: ClassVar[PlainDict] = {
        "vocab_size": 50257, "seq_len": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "norm_eps": 1e-5, "tied":
        True,
    }  # fmt: skip
    fixed_options: ClassVar[PlainDict] = {"norm": "layer", "bias": True}

    def converted_options(self, fields: ConfigFields, option_values: PlainDict) -> dict[str, object]:
        n_positions = option_values["seq_len"]
        fields.require_value("n_ctx", (n_positions,), f"is not n_positions = {n_positions}")
        for name, value in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
            fields.require_value(name, (value,), f"only {str(value).lower()} is read")
        activation = _read_activation(fields, "activation_function", "gelu_new")
        n_mlp = fields.positive_integer("n_inner", 4 * option_values["n_embd"])
        return {"n_mlp": n_mlp, "mlp": activation, "position": LearnedPosition(), "normalizer": Softmax()}

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        return {
            "n_inner": model.mlp_width, "activation_function": _write_activation(model),
            "embd_pdrop": model.dropout, "resid_pdrop": model.dropout, "attn_pdrop": 0.0,
        }  # fmt: skip


class Llama(Architecture):
    """Llama and similar models (SmolLM2, TinyLlama) have RoPE, RMSNorm, SwiGLU and grouped queries."""

    model_type = "llama"
    transformers_class_names = ("LlamaForCausalLM", "LlamaModel")
    tensor_prefix, layer_list_name, heads_divide_width = "model.", "layers", True
    module_names: ClassVar[dict[str, str]] = {
        "embedding": "embed_tokens", "norm": "norm", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "mlp.up": "mlp.gate_proj mlp.up_proj", "mlp.out": "mlp.down_proj",
    }  # fmt: skip
    buffer_suffixes = (".rotary_emb.inv_freq",)
    option_by_field: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size", "max_position_embeddings": "seq_len", "hidden_size": "n_embd",
        "intermediate_size": "n_mlp", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps":
        "norm_eps", "tie_word_embeddings": "tied",
    }  # fmt: skip
    option_defaults: ClassVar[PlainDict] = {
        "vocab_size": 32000, "seq_len": 2048, "n_embd": 4096, "n_mlp": 11008, "n_layer": 32, "n_head": 32, "norm_eps":
        1e-6, "tied": False,
    }  # fmt: skip
    fixed_options: ClassVar[PlainDict] = {"mlp": "swiglu", "norm": "rms"}
    default_head_dim: ClassVar[int | None] = None  # default of head_dim; None: hidden_size / num_attention_heads
    bias_field_names: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")  # other biases are absent

    def converted_options(self, fields: ConfigFields, option_values: PlainDict) -> dict[str, object]:
        width, n_heads = option_values["n_embd"], option_values["n_head"]
        head_size = fields.positive_integer("head_dim", self.default_head_dim)
        fields.require_value("hidden_act", ("silu", "swish"), "only silu is read, which makes the MLP SwiGLU")
        if head_size is None and width % n_heads:
            raise fields.refusal(
                "num_attention_heads", f"does not divide hidden_size = {width}, and there is no head_dim"
            )
        kv_heads = fields.positive_integer("num_key_value_heads", None)
        bias, mlp_bias = (
            name in self.bias_field_names and fields.read_value(name, bool, False)
            for name in ("attention_bias", "mlp_bias")
        )
        return {
            "n_kv_head": None if kv_heads == n_heads else kv_heads,
            "head_size": None if head_size and head_size * n_heads == width else head_size,
            "position": self.rope_options(fields, option_values),
            "normalizer": self.normalizer_options(fields, option_values),
            "bias": bias, "mlp_bias": mlp_bias if mlp_bias != bias else None,
        }  # fmt: skip

    def rope_options(self, fields: ConfigFields, option_values: PlainDict) -> Rope:
        """Return the options of RoPE."""
        return read_rope(fields, option_values["seq_len"])

    def normalizer_options(self, fields: ConfigFields, option_values: PlainDict) -> Options:
        """Return the options of the normalizer: softmax, unless a subclass has sliding windows or scales queries."""
        return Softmax()

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        biases = {"attention_bias": model.bias, "mlp_bias": model.has_mlp_bias}
        return {
            "num_key_value_heads": model.kv_heads, "head_dim": model.key_dims, "hidden_act": "silu",
            "attention_dropout": 0.0, **{name: biases[name] for name in self.bias_field_names},
            "rope_parameters":
                rope_parameters_value(model.position) if model.position.rotates else {"rope_type": "default"},
        }  # fmt: skip


class Qwen2(Llama):
    """Qwen 2 and 2.5 have biases of queries, keys and values; some layers may have a sliding window."""

    model_type = "qwen2"
    transformers_class_names = ("Qwen2ForCausalLM", "Qwen2Model")
    heads_divide_width, bias_field_names = False, ()
    option_defaults: ClassVar[PlainDict] = Llama.option_defaults | {
        "vocab_size": 151936, "seq_len": 32768, "n_mlp": 22016,
    }  # fmt: skip
    fixed_options: ClassVar[PlainDict] = Llama.fixed_options | {"qkv_bias": True}

    def normalizer_options(self, fields: ConfigFields, option_values: PlainDict) -> Options:
        first_layer = fields.read_value("max_window_layers", int, 28)
        return _read_window_options(fields, [layer >= first_layer for layer in range(option_values["n_layer"])])

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        return super().converted_fields(model) | _write_windows(model)


class Qwen3(Qwen2):
    """Qwen 3 has norms of queries and keys, and a head size that doesn't depend on the width."""

    model_type = "qwen3"
    transformers_class_names = ("Qwen3ForCausalLM", "Qwen3Model")
    default_head_dim, bias_field_names = 128, ("attention_bias",)
    fixed_options: ClassVar[PlainDict] = Llama.fixed_options | {"qk_norm": True}


class SmolLM3(Llama):
    """SmolLM3 has layers without positions: every fourth layer, or those that the field `no_rope_layers` names."""

    model_type = "smollm3"
    transformers_class_names = ("SmolLM3ForCausalLM", "SmolLM3Model")
    option_defaults: ClassVar[PlainDict] = Llama.option_defaults | {
        "vocab_size": 128256, "seq_len": 32768, "n_embd": 2048, "n_layer": 36, "n_head": 16, "tied": True,
    }  # fmt: skip

    def rope_options(self, fields: ConfigFields, option_values: PlainDict) -> Rope:
        layers = self.has_rope_by_layer(fields, option_values)
        rope = read_rope(fields, option_values["seq_len"], 2e6)
        if not any(layers):
            raise fields.refusal("no_rope_layers", "no layer has positions")
        return replace(rope, layers=[] if all(layers) else layers)

    def has_rope_by_layer(self, fields: ConfigFields, option_values: PlainDict) -> list[bool]:
        """Return for each layer whether it has rotary positions."""
        interval, n_layers = fields.positive_integer("no_rope_layer_interval", 4), option_values["n_layer"]
        default = [int((layer + 1) % interval != 0) for layer in range(n_layers)]
        return [bool(rotates) for rotates in fields.read_value("no_rope_layers", list[int], default)[:n_layers]]

    def normalizer_options(self, fields: ConfigFields, option_values: PlainDict) -> Options:
        return _read_window_options(fields, [not rotates for rotates in self.has_rope_by_layer(fields, option_values)])

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        layers = [int(model.position.rotates_in(layer)) for layer in range(model.n_layer)]
        return {**super().converted_fields(model), **_write_windows(model), "no_rope_layers": layers}


class Ministral3(Llama):
    """Ministral 3 multiplies queries by a factor that grows with the position."""

    model_type = "ministral3"
    transformers_class_names = ("Ministral3ForCausalLM", "Ministral3Model")
    default_head_dim, bias_field_names = 128, ()
    option_defaults: ClassVar[PlainDict] = Llama.option_defaults | {
        "vocab_size": 131072, "seq_len": 262144, "n_mlp": 14336, "n_layer": 34, "norm_eps": 1e-5,
    }  # fmt: skip
    QUERY_GROWTH_FIELD: ClassVar[str] = "llama_4_scaling_beta"

    def rope_options(self, fields: ConfigFields, option_values: PlainDict) -> Rope:
        return read_rope(
            fields, option_values["seq_len"], names_read_elsewhere=(self.QUERY_GROWTH_FIELD, "max_position_embeddings")
        )

    def normalizer_options(self, fields: ConfigFields, option_values: PlainDict) -> Options:
        fields.require_value("sliding_window", (), "layers with windows are not read here")
        if (rope_fields := fields.nested_fields("rope_parameters")) is None:
            raise fields.refusal("rope_parameters", "must say how the factor on queries grows")
        growth = rope_fields.read_value(self.QUERY_GROWTH_FIELD, float)
        length = rope_fields.positive_integer(ORIGINAL_LENGTH_FIELD)
        return Llama4(floor_scale=float(length), attn_scale=growth, offset=0)

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        fields, options = super().converted_fields(model), model.normalizer.options_of_layer(0)
        growth = {self.QUERY_GROWTH_FIELD: getattr(options, "attn_scale", 0.0)}
        length = {ORIGINAL_LENGTH_FIELD: int(getattr(options, "floor_scale", 1))}
        return {**fields, "rope_parameters": {**length, **fields["rope_parameters"], **growth}}


class OLMo2(Llama):
    """OLMo 2 has norms on the outputs of attention and MLP, and on the queries and keys of all heads together."""

    model_type = "olmo2"
    transformers_class_names = ("Olmo2ForCausalLM", "Olmo2Model")
    module_names: ClassVar[dict[str, str]] = Llama.module_names | {
        "attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    bias_field_names = ("attention_bias",)
    option_defaults: ClassVar[PlainDict] = Llama.option_defaults | {
        "vocab_size": 50304, "norm_eps": 1e-5,
    }  # fmt: skip
    fixed_options: ClassVar[PlainDict] = Llama.fixed_options | {"qk_norm": "width", "post_norm": True}


class GPTNeoX(Architecture):
    """GPT-NeoX and Pythia have parallel attention and MLP, LayerNorm, biases, and RoPE on a part of each head."""

    model_type = "gpt_neox"
    transformers_class_names = ("GPTNeoXForCausalLM", "GPTNeoXModel")
    tensor_prefix, layer_list_name, interleaves_heads, heads_divide_width = "gpt_neox.", "layers", True, True
    module_names: ClassVar[dict[str, str]] = {
        "embedding": "embed_in", "norm": "final_layer_norm", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.qkv": "attention.query_key_value",
        "attention.out": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.out": "mlp.dense_4h_to_h",
    }  # fmt: skip
    buffer_suffixes = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

    option_by_field: ClassVar[dict[str, str]] = {
        "vocab_size": "vocab_size", "max_position_embeddings": "seq_len", "hidden_size": "n_embd",
        "intermediate_size": "n_mlp", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "layer_norm_eps": "norm_eps", "use_parallel_residual": "parallel", "tie_word_embeddings": "tied",
    }  # fmt: skip
    option_defaults: ClassVar[PlainDict] = {
        "vocab_size": 50432, "seq_len": 2048, "n_embd": 6144, "n_mlp": 24576, "n_layer": 44, "n_head": 64, "norm_eps":
        1e-5, "parallel": True, "tied": False,
    }  # fmt: skip
    fixed_options: ClassVar[PlainDict] = {"norm": "layer", "bias": True}

    def converted_options(self, fields: ConfigFields, option_values: PlainDict) -> dict[str, object]:
        fields.require_value("attention_bias", (True,), "only layers with biases are read")
        activation = _read_activation(fields, "hidden_act", "gelu")
        return {"mlp": activation, "position": read_partial_rope(fields), "normalizer": Softmax()}

    def converted_fields(self, model: ModelConfig) -> PlainDict:
        rope = {
            "rope_type": "default", "rope_theta": getattr(model.position, "theta", 1e4),
            "partial_rotary_factor": getattr(model.position, "fraction", 1.0),
        }  # fmt: skip
        return {
            "hidden_act": _write_activation(model), "hidden_dropout": model.dropout, "attention_dropout": 0.0,
            "rope_parameters": rope,
        }  # fmt: skip


def _read_activation(fields: ConfigFields, name: str, default: str) -> str:
    """Return lm's name for the MLP's activation. Raises RunError: lm does not have this activation."""
    if (activation := fields.read_value(name, str, default)) not in ACTIVATIONS:
        raise fields.refusal(name, f"only {', '.join(ACTIVATIONS)} are read")
    return ACTIVATIONS[activation]


def _write_activation(model: ModelConfig) -> str:
    """Return transformers' name for the MLP's activation; `gelu` if transformers lacks it."""
    return next((name for name, mlp in ACTIVATIONS.items() if mlp == model.mlp), "gelu")


def _read_window_options(fields: ConfigFields, has_window_by_default: list[bool]) -> Options:
    """Return the normalizer's options: softmax, over a sliding window in the layers for which config.json says so.

    has_window_by_default: for each layer, whether it has a window if the field `layer_types` is absent.

    Raises RunError: a field has a value that lm can't use.
    """
    has_windows, n_layers = fields.read_value("use_sliding_window", bool, False), len(has_window_by_default)
    if (size := fields.positive_integer("sliding_window", None)) is None and has_windows:
        raise fields.refusal("sliding_window", "must be a size, as use_sliding_window is true")
    default_layer_types = [
        SLIDING_ATTENTION if has_windows and windowed else FULL_ATTENTION for windowed in has_window_by_default
    ]
    layer_types = fields.read_value("layer_types", list[str], default_layer_types)
    if len(layer_types) != n_layers or not {*layer_types} <= {FULL_ATTENTION, SLIDING_ATTENTION}:
        raise fields.refusal(
            "layer_types", f"must list {FULL_ATTENTION} or {SLIDING_ATTENTION} for each of the {n_layers} layers"
        )
    if SLIDING_ATTENTION not in layer_types:
        return Softmax()
    if not has_windows:
        raise fields.refusal("layer_types", f"lists {SLIDING_ATTENTION}: use_sliding_window must be true")
    normalizers = [Window(size=size) if kind == SLIDING_ATTENTION else Softmax() for kind in layer_types]
    return normalizers[0] if {*layer_types} == {SLIDING_ATTENTION} else LayerList(of=normalizers)


def _write_windows(model: ModelConfig) -> PlainDict:
    """Return the config.json fields that say which layers of `model` have a sliding window, and its size in tokens."""
    layer_options = [model.normalizer.options_of_layer(n) for n in range(model.n_layer)]
    window_sizes = [options.size for options in layer_options if options.name == Window.name]
    if not window_sizes:
        return {"use_sliding_window": False, "sliding_window": None}
    layer_types = [SLIDING_ATTENTION if options.name == Window.name else FULL_ATTENTION for options in layer_options]
    return {"use_sliding_window": True, "sliding_window": window_sizes[0], "layer_types": layer_types}


ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture()
    for architecture in (GPT2, Llama, Qwen2, Qwen3, SmolLM3, Ministral3, OLMo2, GPTNeoX)
}
