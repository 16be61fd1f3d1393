"""lm's normalizers as attention functions of transformers' own models, with learned parameters in each layer's attention.

    import lm.huggingface
    lm.huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="lm_ssmax")
    lm.huggingface.add_parameters(model)  # of normalizers that learn something

The same lines read the parameters again from a folder that `save_pretrained` wrote. Without `attn_implementation` transformers computes
softmax, at most with a warning of unexpected tensors.

Shapes: B sequences, T queries, S keys, H query heads, K key-value heads, D head size.
"""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lm.functional as functional
from lm.attention.catalogue import ENTRIES
from lm.attention.layout import AttentionLayout
from lm.data.tokenizer import downloaded
from lm.errors import ConfigError, Problem
from lm.functional import Named
from lm.huggingface.importing import INDEX, Shards

LENGTH = "lm_train_length"  # field of the configuration with the training length
HOLDER = "lm_normalizer"  # the module with the parameters, in each layer's attention; and the configuration's field with their normalizer
UNREGISTERED = ("forget", "asentmax", "p_n")  # the first two read the layer's input, the last has a table for all layers
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")  # arguments of attention functions that change what is computed
BY_ANGLE = ("qassmax", "linear")  # no functions of q.k: through RoPE they see absolute positions; but not linear with features: identity
OWN_ATTENTION = "{} computes attention by itself, whatever attn_implementation says"
WEIGHTS = ["*.safetensors", INDEX]


def register(normalizers: Mapping[str, Named] | None = None) -> None:
    """Register normalizers as attention functions of transformers.

    normalizers: by their `attn_implementation`, e.g. {"lm_ssmax_b": {"name": "ssmax", "bias": True}}; None: all but forget, asentmax and
    p_n with their default options, as lm_NAME.

    Raises ConfigError: no such normalizer, one of these three, or options that it does not have.
    """
    for name, normalizer in (normalizers or {f"lm_{name}": name for name in ENTRIES if name not in UNREGISTERED}).items():
        functional.parameters(normalizer, 1, 2, 2)
        if (kind := normalizer if isinstance(normalizer, str) else normalizer["name"]) in UNREGISTERED:
            raise ConfigError([Problem(name, kind, "is no function of one layer's queries and keys", "train it with lm")])
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, normalizer))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)


def add_parameters(model: PreTrainedModel, train_length: int | None = None) -> None:
    """Give each attention of a model the parameters of the normalizer that `attn_implementation` names, in fp32.

    An attention module holds them as `lm_normalizer`: optimizers see them, `save_pretrained` saves them. If the folder or hub model that
    `model` was read from has such parameters, their values are read from there; else they get initial values.

    train_length: tokens in a training sequence; None: the configuration's `max_position_embeddings`.

    Raises ValueError: no normalizer of lm is named, the model's code takes no attention function, the model has the parameters already, or
    it was saved with another normalizer.
    """
    config = model.config
    function = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    if not isinstance(function, partial) or function.func is not _attend:
        raise ValueError(f"attn_implementation is {config._attn_implementation}: call lm.huggingface.register() and name one of lm's")
    (normalizer,) = function.args
    options = {"name": normalizer} if isinstance(normalizer, str) else dict(normalizer)
    if (entry := getattr(config, HOLDER, None)) not in (None, options):
        raise ValueError(f"{config._name_or_path} was saved with {entry}, attn_implementation {config._attn_implementation} is {options}")
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    if not (model.is_backend_compatible() and layers):
        raise ValueError(OWN_ATTENTION.format(type(model).__name__))
    if any(hasattr(module, HOLDER) for module in layers):
        raise ValueError("the model has these parameters already: call lm.huggingface.add_parameters once")
    setattr(config, HOLDER, options)
    setattr(config, LENGTH, train_length or _train_length(config))
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for module in layers:
        initial_values = functional.parameters(normalizer, config.num_attention_heads, head_size, _train_length(config))
        holder = nn.ParameterDict((name.replace(".", "_"), value) for name, value in initial_values.items())
        holder.names = list(initial_values)  # as `lm.functional` has them, with their dots
        module.add_module(HOLDER, holder.to(next(module.parameters()).device))
    if entry:
        _read_saved(model)


def _train_length(config: PreTrainedConfig) -> int:
    return getattr(config, LENGTH, None) or config.max_position_embeddings


def _read_saved(model: PreTrainedModel) -> None:
    """Read the normalizers' parameters from the model's saved weights. Raises ValueError: one is missing, or of another shape."""
    folder = Path(name := model.config._name_or_path)
    tensors = Shards(folder if folder.is_dir() else downloaded(name, getattr(model.config, "_commit_hash", None), WEIGHTS))
    for name, parameter in model.named_parameters():
        if f".{HOLDER}." in name:
            if tensors.shapes.get(name) != tuple(parameter.shape):
                message_start = f"{tensors.path}: its configuration names {HOLDER}, and it"
                raise ValueError(f"{message_start} has no tensor {name} of shape {tuple(parameter.shape)}")
            parameter.data.copy_(tensors.read(name))


def _mask(*sizes: object, config: PreTrainedConfig | None = None, **kwargs: object) -> Tensor | None:
    """The mask that `sdpa_mask` makes of these arguments. Raises ValueError: a model that computes attention itself, with other masks."""
    model_type = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_type and not model_type.is_backend_compatible():
        raise ValueError(OWN_ATTENTION.format(model_type.__name__))
    return sdpa_mask(*sizes, config=config, **kwargs)


def _attend(
    normalizer: Named, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, position_ids: Tensor | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function for transformers: (output (B, T, H, D), None) of query (B, H, T, D), key and value (B, K, S, D)."""
    if refused_arguments := [name for name in REFUSED if kwargs.get(name) is not None]:
        raise ValueError(f"lm's normalizers do not compute {refused_arguments[0]} of {type(module).__name__}; use a model without it")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"lm's normalizers are causal, {type(module).__name__} is not")
    if dropout:
        raise ValueError("lm's normalizers have no dropout of weights; set attention_dropout (or attn_pdrop) to 0")
    holder, config = getattr(module, HOLDER, None), module.config
    if holder is None and functional.parameters(normalizer, 1, 2, 2):
        raise ValueError(f"{config._attn_implementation} has learned parameters: call lm.huggingface.add_parameters(model) once it is made")
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.size(-1))
    if not math.isclose(factor, 1.0):
        query = query.to(torch.promote_types(query.dtype, torch.float32)) * factor
    if attention_mask is None and 1 < query.size(2) < key.size(2):  # a new cache of fixed size, whose later keys are empty
        key, value = key[:, :, : query.size(2)], value[:, :, : query.size(2)]
    layout = _layout(query, key, attention_mask, position_ids)
    options = {"name": normalizer} if isinstance(normalizer, str) else normalizer
    by_angle = options["name"] in BY_ANGLE and options.get("features") != "identity"
    if by_angle and position_ids is not None and bool(((layout.positions != position_ids) & (layout.positions > 0)).any()):
        reason = "depends on positions: position_ids must count from each sequence's first token, padding left out"
        raise ValueError(f"{options['name']} {reason}")
    parameters = {} if holder is None else dict(zip(holder.names, holder.parameters(), strict=True))
    output = functional.attention(normalizer, query, key, value, parameters, positions=layout, train_length=_train_length(config))
    return output.transpose(1, 2).contiguous(), None


def _layout(query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> AttentionLayout:
    """The layout of queries and keys, from the mask, which shows padding and packing; without a mask from the positions."""
    queries, keys = query.size(2), key.size(2)
    if mask is None:
        is_packed = position_ids is not None and queries == keys and bool((position_ids[:, 1:] == 0).any())
        return functional.make_layout(query, key, position_ids if is_packed else None)
    visible = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)[:, 0]  # (B, T, S)
    positions = visible.sum(-1) - 1
    if queries == keys:  # padding, which does not see itself, gets position 0
        is_token = visible.diagonal(dim1=1, dim2=2)
        positions = positions * is_token
        layout = AttentionLayout.from_positions(positions)
        goes_on = positions == torch.nn.functional.pad(positions[:, :-1] + 1, (1, 0))
        is_causal = ((positions == 0) | goes_on).all() & (layout.visible().view(-1, queries, keys) == visible)[is_token].all()
        if not bool(is_causal):
            raise ValueError("lm's normalizers compute causal masks of whole documents alone: this mask has a window, a prefix or gaps")
        return layout
    positions = positions.clamp(min=0)
    start = visible[:, -1].int().argmax(-1, keepdim=True)  # (B, 1), first key of the document that goes on
    key_positions = torch.arange(keys, device=key.device) - start
    key_documents = (key_positions >= 0).long()
    return AttentionLayout(positions, key_positions, positions[:, -1:] + 1, False, torch.ones_like(positions), key_documents)
