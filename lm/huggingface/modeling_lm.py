"""The decoder of lm, a framework that compares attention normalizers, for transformers: load it with
`trust_remote_code=True`.

`lm export --format hf` copies this file and lm's attention modules beside the weights. They need torch and transformers
alone; tensors have lm's names. n, the number of keys that a query counts, is fixed or comes from `position_ids`, which
are 0 at each document's start. So padding and packing don't change n.

Shapes: B sequences, T query positions, S key positions, H query heads, K key-value heads, D head size, E width of a
head's values, C width of the model, V size of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple

from lm.attention.catalogue import implementation
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer

SLIDING = "sliding_attention"


class LmConfig(PreTrainedConfig):
    """The decoder's configuration.

    Args:
        block: `attention` (attention, then an MLP) or `gau` (gated attention unit, whose gate and values are
            `intermediate_size` wide).
        normalizers: for each layer a dict of its normalizer's `name` and options.
        train_length: tokens in a training sequence, which initial values and some formulas depend on.
        rope_frequencies: radians per token of each rotated pair; None: no rotary positions.
        rope_amplitude: factor on cos and sin.
        rope_layers: whether each layer rotates queries and keys; None: all do.
        learned_positions: whether each position below `max_position_embeddings` has a learned vector.
        value_residual: what layers mix into values: `first_layer`, values of the first layer; `embedding`, a learned
            vector per token.
    """

    model_type = "lm_decoder"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 1024
    train_length: int = 1024
    block: str = "attention"
    hidden_act: str = "relu2"
    norm: str = "rms"
    norm_eps: float = 1e-5
    bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | str = False
    post_norm: bool = False
    parallel: bool = False
    rope_frequencies: list[float] | None = None
    rope_amplitude: float = 1.0
    rope_layers: list[bool] | None = None
    learned_positions: bool = False
    embedding_norm: str | None = None
    value_residual: str | None = None
    output_gate: str | None = None
    logit_softcap: float | None = None
    normalizers: list[dict] | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object):
        """Give each layer a default of its own; `kwargs` are fields that all configurations of transformers may
        have.
        """
        self.rope_layers = self.rope_layers or [True] * self.num_hidden_layers
        self.normalizers = self.normalizers or [{"name": "softmax"}] * self.num_hidden_layers
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


# ---------------------------------------------------------------- layers


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax attention's outputs (B, T, H, E) and all of its weights (B, H, T, S) in fp32.

    attention_mask: additive, as for transformers' eager attention, or bool, as for SDPA; None: the causal triangle.
    """
    key, value = (x.repeat_interleave(query.size(1) // key.size(1), 1) for x in (key, value))
    if attention_mask is None:
        visible = query.new_ones(query.size(2), key.size(2), dtype=torch.bool)
        visible = visible.tril() if query.size(2) > 1 else visible
    else:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    with torch.autocast(query.device.type, enabled=False):
        scores = query.float() @ key.float().transpose(2, 3) * scaling
        weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


def make_norm(config: LmConfig, kind: str | None = None) -> nn.Module:
    """RMSNorm (`rms`) or LayerNorm (`layer`) over the model's width; `kind` None: the kind of `config.norm`."""
    size, eps = config.hidden_size, config.norm_eps
    return nn.RMSNorm(size, eps) if (kind or config.norm) == "rms" else nn.LayerNorm(size, eps, bias=config.bias)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head's queries or keys, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) rotated by RoPE, fp32; cos and sin are (B, 1, T, R / 2). The first half of the R rotated
    dimensions pairs with the second half."""
    n_pairs, x = cos.size(-1), x.float()
    x1, x2 = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * n_pairs :]), -1)


class WidthNorm(HeadNorm):
    """RMSNorm of the queries or keys of all heads together, (B, H, T, D), in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.shape[1]
        return super().forward(x.transpose(1, 2).flatten(2)).unflatten(2, (heads, -1)).transpose(1, 2)


class AttentionBase(nn.Module):
    """Base class of `Attention` and `GAU`, with norms and rotation of queries and keys, the cache, the normalizer, and
    the kernel that `attn_implementation` names."""

    def __init__(self, config: LmConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.head_dim**-0.5, True
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == SLIDING else None
        heads = config.num_attention_heads, config.num_key_value_heads
        if config.qk_norm == "width":
            self.q_norm, self.k_norm = (WidthNorm(n * config.head_dim, config.norm_eps) for n in heads)
        elif config.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(config.head_dim, config.norm_eps) for _ in heads)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        options = dict(config.normalizers[layer_idx])
        normalizer_class = implementation(options.pop("name"))
        layer = LayerSpec(config.num_attention_heads, config.head_dim, config.hidden_size, config.train_length)
        self.normalizer = normalizer_class(normalizer_class.schema(**options), layer)
        # whether any kernel for softmax computes the weights, perhaps of changed queries and keys
        changes_inputs = normalizer_class.fused_inputs is not Normalizer.fused_inputs
        self.is_softmax = changes_inputs or self.sliding_window is not None

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None, layout: AttentionLayout, past_key_values: Cache | None, **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return heads' outputs (B, T, H E) for q (B, H, T, D), k (B, K, T, D), v (B, K, T, E), and weights if the
        kernel gives them. x: the layer's input (B, T, C).
        """
        normalizer, backend = self.normalizer, self.config._attn_implementation
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        if self.is_softmax:
            q, k = (part.to(v.dtype) for part in normalizer.fused_inputs(q, k, layout) or (q, k))
        else:
            q, k = normalizer.append_features(x, q, k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if self.is_softmax:
            kernel = eager_attention if backend == "eager" else ALL_ATTENTION_FUNCTIONS[backend]
            output, weights = kernel(
                self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, sliding_window=self.sliding_window,
                **kwargs,
            )  # fmt: skip
            return output.reshape(q.size(0), q.size(2), -1), weights
        if backend not in ("eager", "sdpa"):
            name = self.config.normalizers[self.layer_idx]["name"]
            raise ValueError(f"attn_implementation {backend} does not compute {name}; set it to eager or sdpa")
        n_keys = layout.key_positions.size(-1)  # a new cache of fixed size has empty keys behind them
        k, v = normalizer.expand_kv_heads(k[:, :, :n_keys], v[:, :, :n_keys])
        v = v.to(x.dtype)  # a cache has one dtype, and keys may be wider
        weights = normalizer.weights(q, k, layout) if backend == "eager" else None
        output = normalizer.attend(q, k, v, layout) if weights is None else weights.to(v.dtype) @ v
        return output.transpose(1, 2).flatten(2), weights


class Attention(AttentionBase):
    """Causal attention with grouped queries."""

    def __init__(self, config: LmConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.bias)
        mixes_values = config.value_residual == "embedding" or (
            config.value_residual == "first_layer" and layer_idx > 0
        )
        self.value_mix = nn.Parameter(torch.full((1,), 0.5)) if mixes_values else None
        gate_width = {None: 0, "head": self.heads[0], "element": self.heads[0] * config.head_dim}[config.output_gate]
        self.gate = nn.Linear(config.hidden_size, gate_width, bias=False) if gate_width else None

    def forward(
        self, x: Tensor, values_to_mix: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The output (B, T, C), weights if the kernel gives them, values (B, K, T, D), mixed with `values_to_mix` if
        `value_mix` is set.
        """
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.heads, 1)
        if self.value_mix is not None:
            v = v + self.value_mix.to(v.dtype) * (values_to_mix.to(v.dtype) - v)
        output, weights = self.attend(x, q, k, v, **kwargs)
        if self.gate is not None:
            head_shape = (self.heads[0], -1)
            output = (output.unflatten(-1, head_shape) * self.gate(x).sigmoid().unflatten(-1, head_shape)).flatten(2)
        return self.out(output), weights, v


class GAU(AttentionBase):
    """Gated attention unit, arXiv 2202.10447: one head; queries and keys are one projection, each with its own gains
    and offsets.
    """

    def __init__(self, config: LmConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.sizes = (config.intermediate_size, config.intermediate_size, config.head_dim)
        self.uvz = nn.Linear(config.hidden_size, sum(self.sizes), bias=config.bias)
        for name in ("q_gain", "q_offset", "k_gain", "k_offset"):
            self.register_parameter(name, nn.Parameter(torch.full((config.head_dim,), float(name.endswith("gain")))))
        self.out = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """The output (B, T, C), and the weights if the kernel gives them."""
        gate, v, z = F.silu(self.uvz(x)).split(self.sizes, -1)
        q, k = z * self.q_gain + self.q_offset, z * self.k_gain + self.k_offset
        output, weights = self.attend(x, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), **kwargs)
        return self.out(gate * output), weights


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


ACTIVATIONS = {
    "swiglu": _swiglu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """MLP with SwiGLU (gate and value in one matrix), GELU, GELU's approximation by tanh, or ReLU^2."""

    def __init__(self, config: LmConfig):
        super().__init__()
        hidden_width = config.intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.up = nn.Linear(
            config.hidden_size,
            2 * hidden_width if config.hidden_act == "swiglu" else hidden_width,
            bias=config.mlp_bias,
        )
        self.out = nn.Linear(hidden_width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.up(x)))


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)). With `post_norm` norms are on the outputs; with `parallel` the MLP
    has the attention's input.
    """

    def __init__(self, config: LmConfig, layer_idx: int):
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), Attention(config, layer_idx)
        self.mlp_norm, self.mlp = make_norm(config), MLP(config)
        self.post_norm, self.parallel = config.post_norm, config.parallel

    def forward(
        self, x: Tensor, values_to_mix: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        attention_input = x if self.post_norm else self.attention_norm(x)
        output, weights, values = self.attention(attention_input, values_to_mix, **kwargs)
        output = x + (self.attention_norm(output) if self.post_norm else output)
        x = x if self.parallel else output
        return output + (self.mlp_norm(self.mlp(x)) if self.post_norm else self.mlp(self.mlp_norm(x))), weights, values


class GatedBlock(GradientCheckpointingLayer):
    """x + gau(norm(x))."""

    def __init__(self, config: LmConfig, layer_idx: int):
        super().__init__()
        self.gau_norm, self.gau = make_norm(config), GAU(config, layer_idx)

    def forward(self, x: Tensor, values_to_mix: None, **kwargs: object) -> tuple[Tensor, Tensor | None, None]:
        output, weights = self.gau(self.gau_norm(x), **kwargs)
        return x + output, weights, None


BLOCKS = {"attention": Block, "gau": GatedBlock}


# ---------------------------------------------------------------- models


def packed_documents(is_token: Tensor, position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's document, (B, T), if a sequence holds several documents; else None.

    A document begins at position 0 and where positions of neighbours do not follow each other; is_token: (B, T), false
    for padding.
    """
    breaks = F.pad(is_token[:, :-1] & (position_ids.diff(dim=-1) != 1), (1, 0))
    begins = is_token & ((position_ids == 0) | breaks)
    return begins.cumsum(-1) if bool((begins & (is_token.cumsum(-1) > 1)).any()) else None


class LmPreTrainedModel(PreTrainedModel):
    """Base class with the class attributes that transformers, and vLLM's backend for transformers' models, read."""

    config_class = LmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = tuple(block.__name__ for block in BLOCKS.values())
    _skip_keys_device_placement = ("past_key_values",)
    _keep_in_fp32_modules_strict = ("normalizer",)
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as transformers does, a normalizer as lm does."""
        super()._init_weights(module)
        if isinstance(module, Normalizer):
            for parameter, value in zip(
                module.parameters(), type(module)(module.options, module.layer).parameters(), strict=True
            ):
                init.copy_(parameter, value)

    def resize_token_embeddings(self, *arguments: object, **options: object) -> nn.Embedding:
        """Resize the embedding, the head and each layer's value embedding; returns the embedding."""
        embedding = super().resize_token_embeddings(*arguments, **options)
        for table in self.base_model.value_embedding or ():
            self._get_resized_embeddings(table, embedding.num_embeddings)
        return embedding


class LmModel(LmPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: LmConfig):
        super().__init__(config)
        n_layers, width = config.num_hidden_layers, config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_norm = make_norm(config, config.embedding_norm) if config.embedding_norm else nn.Identity()
        self.position = nn.Embedding(config.max_position_embeddings, width) if config.learned_positions else None
        self.blocks = nn.ModuleList(BLOCKS[config.block](config, layer) for layer in range(n_layers))
        value_width = config.num_key_value_heads * config.head_dim
        value_embeddings = (nn.Embedding(config.vocab_size, value_width) for _ in range(n_layers))
        self.value_embedding = nn.ModuleList(value_embeddings) if config.value_residual == "embedding" else None
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.is_softmax = all(module.is_softmax for module in self.modules() if isinstance(module, AttentionBase))
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_attentions: bool | None = None, output_hidden_states: bool | None = None, **kwargs: object,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Hidden states (B, T, C) of tokens (B, T), after the last norm.

        Args:
            attention_mask: (B, S), 0 for padding, any other number for a token; or a mask for each type of layer, which
                generation makes for a cache of fixed size.
            position_ids: (1, T) or (B, T), 0-based in each document; None: counted from `attention_mask` and the cached
                tokens.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is None and self.value_embedding is not None:
            raise ValueError("value embeddings need input_ids")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cached_length = past_key_values.get_seq_length() if past_key_values is not None else 0
        documents = None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            if position_ids is None:
                position_ids = ((attention_mask != 0).cumsum(-1) - 1).clamp(min=0)[
                    :, cached_length : cached_length + x.size(1)
                ]
            elif attention_mask.size(1) == x.size(1):
                documents = packed_documents(attention_mask != 0, position_ids)
        elif position_ids is None:
            position_ids = torch.arange(cached_length, cached_length + x.size(1), device=x.device)[None]
        if isinstance(masks := attention_mask, Tensor | None):
            # By name: releases differ in the order. Made before a new cache, with which transformers would not look for
            # packed documents.
            mask_arguments = {
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
                "position_ids": position_ids,
            }
            if documents is not None:
                mask_arguments |= self._document_arguments(attention_mask != 0, documents, use_cache, past_key_values)
                use_cache = False
            masks = {"full_attention": create_causal_mask(self.config, x, **mask_arguments)}
            if self.config.sliding_window is not None:
                masks[SLIDING] = create_sliding_window_causal_mask(self.config, x, **mask_arguments)
        if use_cache if use_cache is not None else getattr(self.config, "use_cache", True) and not self.training:
            past_key_values = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        layout = AttentionLayout(position_ids, position_ids, position_ids[:, -1:] + 1, causal=False)
        if not self.is_softmax:  # other normalizers take the mask from the layout
            layout = AttentionLayout.from_mask(masks["full_attention"], int(cached_length), x.size(1), x.device)
        x = self.embedding_norm(x)
        if self.position is not None:
            x = x + self.position(position_ids)
        weights, hidden_states, rotation, first_values = (), (), self._rotation(position_ids), None
        for layer, block in enumerate(self.blocks):
            hidden_states += (x,) if output_hidden_states else ()
            values_to_mix = first_values
            if self.value_embedding is not None:
                values_to_mix = (
                    self.value_embedding[layer](input_ids).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
                )
            x, layer_weights, values = block(  # what has gradients by position, as recomputation demands
                x,
                values_to_mix,
                rotation=rotation if self.config.rope_layers[layer] else None,
                attention_mask=masks[self.config.layer_types[layer]],
                layout=layout,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )
            first_values = values if first_values is None else first_values
            weights += (layer_weights,) if output_attentions else ()
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
        )

    def _document_arguments(
        self, is_token: Tensor, documents: Tensor, use_cache: bool | None, past_key_values: Cache | None
    ) -> dict[str, object]:
        """Arguments with which transformers masks other documents, (B, T), where a mask of padding stands beside them.

        Raises ValueError: a cache is asked for, or the kernel does not take a mask of documents with padding.
        """
        if use_cache or past_key_values is not None:
            raise ValueError("packed documents (position_ids that begin anew) have no cache: set use_cache to False")
        if bool(is_token.all()):
            return {"attention_mask": None}  # transformers then finds documents by their positions
        if (backend := self.config._attn_implementation) not in ("eager", "sdpa", "flex_attention"):
            raise ValueError(f"attn_implementation {backend} takes no padding beside packed documents; drop padding")
        return {"and_mask_function": lambda batch, head, query, key: documents[batch, query] == documents[batch, key]}

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of RoPE's angles, each times `rope_amplitude`, (B, 1, T, R / 2) for R rotated dimensions, fp32,
        computed in float64. None if the model has no RoPE."""
        if self.config.rope_frequencies is None:
            return None
        frequencies = torch.tensor(self.config.rope_frequencies, dtype=torch.float64, device=positions.device)
        angles = positions.double()[:, None, :, None] * frequencies
        amplitude = self.config.rope_amplitude
        return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


class LmForCausalLM(LmPreTrainedModel, GenerationMixin):
    """The decoder with its head: a language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LmConfig):
        super().__init__(config)
        self.model = LmModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **kwargs: object,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Return logits (B, T, V), and the loss of `labels` (B, T), which the loss function shifts by one token.
        `logits_to_keep` above 0 keeps the logits of that many last positions alone, a tensor those of the positions
        that it lists.
        """
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs
        )
        kept_positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept_positions])
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * torch.tanh(logits.float() / self.config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, output.past_key_values, output.hidden_states, output.attentions)
