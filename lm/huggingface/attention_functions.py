"""Use lm's normalizers as attention functions of transformers' own models. A layer's attention holds the learned
parameters.

    import lm.huggingface
    lm.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="lm_ssmax")
    lm.huggingface.add_normalizer_parameters(model)  # for normalizers with learned parameters

The same code reads the parameters back from a folder that `save_pretrained` wrote. A model loaded without
`attn_implementation` computes softmax, and transformers may warn of unexpected tensors. Layers with a sliding window
keep transformers' attention.

Shapes: B sequences, T queries, S keys, H query heads, K key-value heads, D head size.
"""

import json
import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lm.functional as functional
from lm.attention.catalogue import OPTIONS_BY_NAME
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.data.tokenizer import download_files
from lm.errors import ConfigError, Problem
from lm.functional import NormalizerChoice
from lm.huggingface.architectures import SLIDING_ATTENTION
from lm.huggingface.importing import INDEX_FILE, WeightFiles
from lm.plain import Plain

TRAIN_LENGTH_FIELD = "lm_train_length"  # field of the configuration that holds the training length
# attribute of an attention module that holds its normalizer, and field of the configuration that holds its options
NORMALIZER_ATTRIBUTE = "lm_normalizer"
# attribute of an attention module: a list to which each call adds queries, keys and values of all heads
QKV_RECORD_ATTRIBUTE = "lm_record"
# arguments of attention functions that change what is computed
REFUSED_ARGUMENTS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
# weights depend on absolute positions even with RoPE; those of linear don't with `features: identity`
POSITION_DEPENDENT_NORMALIZERS = ("qassmax", "linear")
# fields of a configuration or its `rope_parameters` that make a model multiply queries by a function of position
GROWING_SCALE_FIELDS = ("llama_4_scaling_beta", "attn_temperature_tuning")
GROWING_SCALE_MODEL_TYPES = ("beam",)  # types of models that always do so
OWN_ATTENTION_MESSAGE = "{} computes attention by itself, or has none, whatever attn_implementation says"
WEIGHT_FILE_PATTERNS = ["*.safetensors", INDEX_FILE]


def register(normalizers: Mapping[str, NormalizerChoice] | None = None) -> None:
    """Register normalizers as attention functions of transformers.

    normalizers: {`attn_implementation`: normalizer}, such as {"lm_ssmax_b": {"name": "ssmax", "bias": True}}. None: all
    of lm's as lm_NAME with default options, except forget, asentmax and p_n.

    Raises ConfigError: there is no such normalizer or option. It is also raised for a normalizer that reads the layer's
    input or shares parameters among layers, as forget, asentmax and p_n do.
    """
    for name, normalizer in (normalizers or {f"lm_{name}": name for name in OPTIONS_BY_NAME}).items():
        module = functional.make_module(normalizer, 1, 2, 2)
        options = {"name": normalizer} if isinstance(normalizer, str) else dict(normalizer)
        if module.reads_layer_input or type(module).tie_parameters is not Normalizer.tie_parameters:
            if not normalizers:
                continue
            reason = "is no function of one layer's queries and keys"
            raise ConfigError([Problem(name, options["name"], reason, "train it with lm")])
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention_function, options))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, sdpa_mask)
    # Each model calls this method when it is made or its attention is set. Some models never call the function itself.
    PreTrainedModel.get_correct_attn_implementation = _checked_attn_implementation


_transformers_correct_implementation = PreTrainedModel.get_correct_attn_implementation


def _checked_attn_implementation(
    model: PreTrainedModel, requested_attention: str | None, *arguments: object, **options: object
) -> str:
    """Return the name of the attention function that a model gets; replaces transformers' method of a similar name.

    Raises ValueError: the function is lm's, and the model can't use it. Either the model's code never calls attention
    functions, or it scales queries by position itself, or all layers have a sliding window.
    """
    if _registered_normalizer(requested_attention) is not None:
        if not model.is_backend_compatible():
            raise ValueError(OWN_ATTENTION_MESSAGE.format(type(model).__name__))
        rope_fields = getattr(model.config, "rope_parameters", None) or {}
        scale_fields = [
            name for name in GROWING_SCALE_FIELDS if rope_fields.get(name) or getattr(model.config, name, None)
        ]
        if scale_fields or model.config.model_type in GROWING_SCALE_MODEL_TYPES:
            reason = f"multiplies queries by a function of position, and {requested_attention} would act on top"
            remedy = f"set {scale_fields[0]} to 0 in its configuration" if scale_fields else "use another model"
            raise ValueError(f"{type(model).__name__} {reason}; {remedy}")
        layer_types = getattr(model.config, "layer_types", None) or [SLIDING_ATTENTION]
        if getattr(model.config, "sliding_window", None) and {*layer_types} == {SLIDING_ATTENTION}:
            reason = f"has a sliding window in each layer, and {requested_attention} acts on layers without one"
            raise ValueError(f"{type(model).__name__} {reason}; set sliding_window to null in its configuration")
    return _transformers_correct_implementation(model, requested_attention, *arguments, **options)


def _registered_normalizer(attn_implementation: str | None) -> dict[str, Plain] | None:
    """Return the name and options of lm's normalizer that is registered as `attn_implementation`; None if lm has
    registered no such function.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(attn_implementation)
    return function.args[0] if isinstance(function, partial) and function.func is _attention_function else None


def add_normalizer_parameters(model: PreTrainedModel, train_length: int | None = None) -> None:
    """Add the learned parameters, in fp32, of the normalizer that `attn_implementation` names to each layer without a
    window.

    An attention module holds them as `lm_normalizer`, so that optimizers see them and `save_pretrained` saves them.
    Their values come from the folder or hub model that `model` was read from, if it has them. Otherwise they get
    initial values.

    train_length: tokens in a training sequence; None: the length that the model was saved with, else
    `max_position_embeddings`.

    Raises ValueError: `attn_implementation` names no normalizer of lm, or the model can't use attention functions. It
    is also raised if the model has the parameters already or was saved with another normalizer. Raises RunError or
    DataError: saved parameters can't be read.
    """
    config = model.config
    if (options := _registered_normalizer(config._attn_implementation)) is None:
        raise ValueError(
            f"attn_implementation is {config._attn_implementation}: call lm.huggingface.register() and name one of lm's"
        )
    if (saved_options := getattr(config, NORMALIZER_ATTRIBUTE, None)) not in (None, options):
        raise ValueError(
            f"{config._name_or_path} was saved with {saved_options}, attn_implementation "
            f"{config._attn_implementation} is {options}"
        )
    layers = [layer for layer in attention_modules(model) if not getattr(layer, "sliding_window", None)]
    if not layers:
        raise ValueError(OWN_ATTENTION_MESSAGE.format(type(model).__name__))
    if any(hasattr(module, NORMALIZER_ATTRIBUTE) for module in layers):
        raise ValueError("the model has these parameters already: call lm.huggingface.add_normalizer_parameters once")
    setattr(config, NORMALIZER_ATTRIBUTE, dict(options))
    setattr(config, TRAIN_LENGTH_FIELD, train_length or _train_length(config))
    for module in layers:
        # In latent attention (MLA) `head_dim` is the part of a head that rotates.
        head_size = getattr(module, "qk_head_dim", None) or getattr(config, "head_dim", None)
        head_size = head_size or config.hidden_size // config.num_attention_heads
        normalizer = functional.make_module(options, config.num_attention_heads, head_size, _train_length(config))
        module.add_module(NORMALIZER_ATTRIBUTE, normalizer.to(next(module.parameters()).device))
    if saved_options:
        _read_saved_parameters(model)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention module of each layer, including layers with a sliding window."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def _train_length(config: PreTrainedConfig) -> int:
    """Return the training length in tokens: the one saved with the model, else `max_position_embeddings`."""
    return getattr(config, TRAIN_LENGTH_FIELD, None) or config.max_position_embeddings


@cache
def _parameterless_normalizer(options_json: str, n_head: int, head_size: int, train_length: int) -> Normalizer:
    """Return the one normalizer that all layers share if it has no learned parameters. `options_json` holds its
    options.
    """
    return functional.make_module(json.loads(options_json), n_head, head_size, train_length)


def _read_saved_parameters(model: PreTrainedModel) -> None:
    """Set the normalizers' parameters from the weights that the model was loaded from.

    Raises ValueError: a parameter is missing or has another shape. Raises RunError or DataError: the weights can't be
    read.
    """
    folder = Path(name := model.config._name_or_path)
    tensors = WeightFiles(
        folder
        if folder.is_dir()
        else download_files(name, getattr(model.config, "_commit_hash", None), WEIGHT_FILE_PATTERNS)
    )
    for name, parameter in model.named_parameters():
        if f".{NORMALIZER_ATTRIBUTE}." in name:
            if tensors.shapes.get(name) != tuple(parameter.shape):
                message_start = f"{tensors.folder}: its configuration names {NORMALIZER_ATTRIBUTE}, and it"
                raise ValueError(f"{message_start} has no tensor {name} of shape {tuple(parameter.shape)}")
            parameter.data.copy_(tensors.read(name))


def _attention_function(
    options: dict[str, Plain], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, position_ids: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute attention with lm's normalizer `options`, as an attention function that transformers calls. Return
    (output (B, T, H, D), None), with None in place of attention weights.

    query is (B, H, T, D), key and value are (B, K, S, D). A module with a sliding window gets transformers' own
    attention.

    Raises ValueError: an argument asks for what lm does not compute, such as dropout of weights. It is also raised if
    learned parameters are missing or positions don't fit the normalizer.
    """
    if refused_arguments := [name for name in REFUSED_ARGUMENTS if kwargs.get(name) is not None]:
        raise ValueError(
            f"lm's normalizers do not compute {refused_arguments[0]} of {type(module).__name__}; use a model without it"
        )
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.size(-1))
    if (record := getattr(module, QKV_RECORD_ATTRIBUTE, None)) is not None:
        record.append((query * factor, *(x.repeat_interleave(query.size(1) // key.size(1), 1) for x in (key, value))))
    if kwargs.get("sliding_window") is not None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask,
            scaling=scaling, dropout=dropout, position_ids=position_ids, **kwargs,
        )  # fmt: skip
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"lm's normalizers are causal, {type(module).__name__} is not")
    if dropout:
        raise ValueError("lm's normalizers have no dropout of weights; set attention_dropout (or attn_pdrop) to 0")
    normalizer, config = getattr(module, NORMALIZER_ATTRIBUTE, None), module.config
    if normalizer is None:
        normalizer = _parameterless_normalizer(
            json.dumps(options, sort_keys=True), query.size(1), query.size(-1), _train_length(config)
        )
        if next(normalizer.parameters(), None) is not None:
            raise ValueError(
                f"{config._attn_implementation} has learned parameters: call "
                "lm.huggingface.add_normalizer_parameters(model) once it is made"
            )
    if not math.isclose(factor, 1.0):
        query = query.to(torch.promote_types(query.dtype, torch.float32)) * factor
    n_queries, n_keys = query.size(2), key.size(2)
    # a new cache of fixed size, whose later keys are empty
    if attention_mask is None and 1 < n_queries < n_keys:
        key, value, n_keys = key[:, :, :n_queries], value[:, :, :n_queries], n_queries
    is_whole = attention_mask is None and position_ids is not None and n_queries == n_keys
    if is_whole and bool((position_ids[:, 1:] == 0).any()):  # packed documents
        layout = functional.make_layout(query, key, position_ids)
    else:
        layout = AttentionLayout.from_4d_mask(attention_mask, n_keys - n_queries, n_queries, query.device)
    depends_on_position = options["name"] in POSITION_DEPENDENT_NORMALIZERS and options.get("features") != "identity"
    if (
        depends_on_position
        and position_ids is not None
        and bool(((layout.positions != position_ids) & (layout.positions > 0)).any())
    ):
        reason = "depends on positions: position_ids must count from each sequence's first token, padding left out"
        raise ValueError(f"{options['name']} {reason}")
    output = functional.attention(normalizer, query, key, value, positions=layout)
    return output.transpose(1, 2).contiguous(), None
