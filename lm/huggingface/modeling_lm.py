"""The decoder of lm, a framework that compares attention normalizers, for transformers: load it with
`trust_remote_code=True`.

`lm export --format hf` copies this file and lm's modules of attention and layers beside the weights. They need torch
and transformers alone; tensors have lm's names. n, the number of keys that a query counts, is fixed or that of its
document's tokens; a document begins where `position_ids` begin anew. So padding and packing don't change n.

Shapes: B sequences, T query positions, S key positions, H query heads, K key-value heads, D head size, E width of a
head's values, C width of the model, V size of the vocabulary.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple

from lm.attention.catalogue import implementation
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options
from lm.model.blocks import (
    AttentionBase,
    Block,
    ForwardContext,
    GatedBlock,
    MapDifference,
    make_norm,
    rotation_at,
)


class LmConfig(PreTrainedConfig):
    """The decoder's configuration. `lm.model.blocks` reads it by the names of lm's `ModelConfig`.

    Args:
        block: `attention` (attention, then an MLP) or `gau` (gated attention unit).
        normalizers: for each layer a dict of its normalizer's `name` and options.
        seq_len: tokens in a training sequence, which initial values and some formulas depend on.
        rope_frequencies: radians per token of each rotated pair; None: no rotary positions.
        rope_amplitude: factor on cos and sin.
        rope_layers: whether each layer rotates queries and keys; None: all do.
        learned_positions: whether each position below `seq_len` has a learned vector.
        value_residual: `first_layer`: layers mix the values of the first layer into theirs.
    """

    model_type = "lm_decoder"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "num_key_value_heads": "kv_heads", "head_dim": "key_dims", "intermediate_size": "mlp_width",
        "max_position_embeddings": "seq_len",
    }  # fmt: skip

    vocab_size: int = 256
    seq_len: int = 1024
    block: str = "attention"
    n_layer: int = 2
    n_head: int = 4
    kv_heads: int = 4
    n_embd: int = 64
    key_dims: int = 16
    value_dims: int = 16
    mlp: str = "relu2"
    mlp_width: int = 256
    norm: str = "rms"
    norm_eps: float = 1e-5
    bias: bool = False
    has_qkv_bias: bool = False
    has_mlp_bias: bool = False
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
    gate_inputs: int | None = None
    exclusive: bool = False
    differential: bool | str = False
    dropout: float = 0.0
    logit_softcap: float | None = None
    normalizers: list[dict] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object):
        """Give each layer a default of its own; `kwargs` are fields that all configurations of transformers may
        have.
        """
        self.rope_layers = self.rope_layers or [True] * self.n_layer
        self.normalizers = self.normalizers or [{"name": "softmax"}] * self.n_layer
        super().__post_init__(**kwargs)

    @property
    def maps_per_head(self) -> int:
        """The number of attention maps of each head."""
        return 2 if self.differential else 1

    @property
    def position(self) -> SimpleNamespace:
        """Holds `rotates_in`, whether a layer rotates queries and keys."""
        return SimpleNamespace(rotates_in=lambda layer: bool(self.rope_frequencies) and self.rope_layers[layer])

    @property
    def normalizer(self) -> SimpleNamespace:
        """Holds `layer_option`, the options of a layer's normalizer."""
        return SimpleNamespace(layer_option=self._layer_option)

    def _layer_option(self, layer: int) -> Options:
        options = dict(self.normalizers[layer])
        return implementation(options.pop("name")).schema(**options)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, kw_only=True)
class TransformersContext(ForwardContext):
    """Inputs that all layers share. Attention is computed by lm's routes with a cache of transformers; if
    `attn_implementation` is eager, from all weights.
    """

    past_key_values: Cache | None
    weights: list[Tensor | None]  # each layer appends its weights, or None if it doesn't hold them

    def attend(self, layer: AttentionBase, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T, E), as `ForwardContext.attend`."""
        normalizer, layout = layer.normalizer, self.layout
        q, k = normalizer.append_features(x, q, k)
        if self.past_key_values is not None:
            k, v = self.past_key_values.update(k, v, layer.layer_idx)
        n_keys = layout.key_positions.size(-1)  # a new cache of fixed size has empty keys behind them
        k, v = normalizer.expand_kv_heads(k[:, :, :n_keys], v[:, :, :n_keys])
        v = v.to(x.dtype)  # a cache has one dtype, and keys may be wider
        weights = normalizer.weights(q, k, layout) if layer.config._attn_implementation == "eager" else None
        self.weights.append(weights)
        return normalizer.attend(q, k, v, layout) if weights is None else weights.to(v.dtype) @ v


class RecomputedLayer(GradientCheckpointingLayer):
    """A layer that transformers can compute again in the backward pass: what has gradients comes by position."""

    def forward(self, x: Tensor, first_values: Tensor | None, context: TransformersContext) -> Tensor:
        """Return the layer's output (B, T, C) for its input x (B, T, C)."""
        return super().forward(x, replace(context, first_values=first_values))


class LmBlock(RecomputedLayer, Block):
    """A layer of attention and an MLP."""


class LmGatedBlock(RecomputedLayer, GatedBlock):
    """A layer of one gated attention unit."""


BLOCKS = {"attention": LmBlock, "gau": LmGatedBlock}


# ---------------------------------------------------------------- models


def packed_documents(is_token: Tensor, position_ids: Tensor) -> Tensor | None:
    """Return the number of each token's document, (B, T), if a sequence holds several documents; else None.

    A document begins at position 0 and where positions of neighbours do not follow each other; is_token: (B, T), false
    for padding.
    """
    breaks = F.pad(is_token[:, :-1] & (position_ids.diff(dim=-1) != 1), (1, 0))
    begins = is_token & ((position_ids == 0) | breaks)
    return begins.cumsum(-1) if bool((begins & (is_token.cumsum(-1) > 1)).any()) else None


def input_layout(
    mask: Tensor | None, position_ids: Tensor | None, n_cached: int, x: Tensor
) -> tuple[AttentionLayout, Tensor, bool]:
    """Return the layout of the tokens x (B, T, C) behind `n_cached` cached ones, their positions, and whether a
    sequence holds several documents. mask and position_ids: as for `LmModel.forward`.
    """
    count, n_keys, device = x.size(1), n_cached + x.size(1), x.device
    if mask is not None and mask.dim() == 4:
        layout = AttentionLayout.from_mask(mask, n_cached, count, device)
        return layout, layout.positions if position_ids is None else position_ids, False
    is_token = torch.ones(1, n_keys, dtype=torch.bool, device=device) if mask is None else mask != 0
    if position_ids is None:
        position_ids = (is_token.cumsum(-1) - 1).clamp(min=0)[:, n_cached:n_keys]
        documents = None
    else:
        documents = packed_documents(is_token, position_ids) if is_token.size(1) == count else None
    if documents is None and (mask is None or bool(is_token.all())):
        return AttentionLayout.continuation(n_cached, count, n_keys, device), position_ids, False
    triangle = torch.ones(count, is_token.size(1), dtype=torch.bool, device=device).tril(n_cached)
    visible = is_token[:, None, None] & triangle
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    return AttentionLayout.from_mask(visible, n_cached, count, device), position_ids, documents is not None


class LmPreTrainedModel(PreTrainedModel):
    """Base class with the class attributes that transformers reads."""

    config_class = LmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = tuple(block.__name__ for block in BLOCKS.values())
    _skip_keys_device_placement = ("past_key_values",)
    _keep_in_fp32_modules_strict = ("normalizer", "q_norm", "k_norm")
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as transformers does, a normalizer as lm does."""
        super()._init_weights(module)
        if isinstance(module, MapDifference):
            init.constant_(module.initial_lambda, module.lambda_0)
        if isinstance(module, Normalizer):
            for parameter, value in zip(
                module.parameters(), type(module)(module.options, module.layer).parameters(), strict=True
            ):
                init.copy_(parameter, value)


class LmModel(LmPreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: LmConfig):
        super().__init__(config)
        n_layers, width = config.n_layer, config.n_embd
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_norm = make_norm(config, config.embedding_norm) if config.embedding_norm else nn.Identity()
        self.position = nn.Embedding(config.seq_len, width) if config.learned_positions else None
        self.blocks = nn.ModuleList(BLOCKS[config.block](config, config.seq_len, layer) for layer in range(n_layers))
        self.dropout = nn.Dropout(config.dropout)
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        attention = (module for module in self.modules() if isinstance(module, AttentionBase))
        for layer, module in enumerate(attention):
            module.config, module.layer_idx = config, layer
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Cache | None = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_attentions: bool | None = None, output_hidden_states: bool | None = None, **kwargs: object,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Hidden states (B, T, C) of tokens (B, T), after the last norm.

        Args:
            attention_mask: (B, S), 0 for padding, any other number for a token; or (B, 1, T, S), causal over whole
                documents.
            position_ids: (1, T) or (B, T), 0-based in each document; None: counted from `attention_mask` and the cached
                tokens.

        Raises ValueError for a mask (B, 1, T, S) with gaps, a prefix or a bias, or for packed documents with a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        n_cached = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        layout, position_ids, is_packed = input_layout(attention_mask, position_ids, n_cached, x)
        if is_packed and (use_cache or past_key_values is not None):
            raise ValueError("packed documents (position_ids that begin anew) have no cache: set use_cache to False")
        if is_packed or (self.gradient_checkpointing and self.training):  # a second pass would add to the cache again
            past_key_values, use_cache = None, False
        if use_cache if use_cache is not None else getattr(self.config, "use_cache", True) and not self.training:
            past_key_values = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        x = self.embedding_norm(x)
        if self.position is not None:
            x = x + self.position(position_ids)
        x, rotation = self.dropout(x), None
        if self.config.rope_frequencies is not None:
            frequencies = torch.tensor(self.config.rope_frequencies, dtype=torch.float64, device=x.device)
            rotation = rotation_at(position_ids, frequencies, self.config.rope_amplitude)
        context = TransformersContext(layout, rotation, 1.0, None, past_key_values=past_key_values, weights=[])
        first_values, hidden_states = None, ()
        if self.config.value_residual:
            first = self.blocks[0]
            first_values = first.attention.values(first.attention_norm(x))
        for block in self.blocks:
            hidden_states += (x,) if output_hidden_states else ()
            x = block(x, first_values, context)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=tuple(context.weights) if output_attentions else None,
        )


class LmForCausalLM(LmPreTrainedModel, GenerationMixin):
    """The decoder with its head: a language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LmConfig):
        super().__init__(config)
        self.model = LmModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
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
