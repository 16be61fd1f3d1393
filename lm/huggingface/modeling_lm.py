"""Compute the decoder of lm in transformers.

`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` loads it. lm is a framework that compares
attention normalizers, the functions that turn a query's scores into weights. `lm export --format hf` writes this file
beside the weights, with copies of lm's modules of attention and layers. They import only torch and transformers. The
weights have the names of lm's parameters.

Many normalizers depend on n, the number of keys that a query counts. n is a fixed number, or the number of the
document's tokens up to the query. A new document begins where `position_ids` start again at 0. Padding and packing
therefore don't change n.

Shapes: B sequences, T query positions, S key positions, H query heads, K key-value heads. D is a head's size, E the
width of its values, C the width of the model, V the size of the vocabulary.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

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

from lm.attention.catalogue import normalizer_class
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options
from lm.model.blocks import (
    AttentionBase,
    Block,
    DifferentialV1,
    ForwardContext,
    GauBlock,
    make_norm,
    rotation_at,
)


class LmConfig(PreTrainedConfig):
    """The decoder's configuration has the field names that lm's modules read.

    Sizes can also be read and set by the names of transformers, such as `hidden_size` for `n_embd`.

    Args:
        vocab_size: number of token ids, V.
        seq_len: tokens in a training sequence, on which normalizers' initial values and some of their formulas depend.
        block: kind of layer: `attention` (attention, then an MLP) or `gau` (gated attention unit).
        n_layer: number of layers.
        n_head: number of query heads, H.
        kv_heads: number of key-value heads, K.
        n_embd: width of the model, C.
        key_dims: size D of a head's queries and keys.
        value_dims: width E of a head's values.
        mlp: activation of the MLP: `swiglu`, `gelu`, `gelu_tanh` or `relu2`.
        mlp_width: number of the MLP's hidden units.
        norm: `rms` (RMSNorm) or `layer` (LayerNorm).
        norm_eps: constant that norms add to the variance.
        bias: whether linear layers and LayerNorm have a bias.
        has_qkv_bias: whether the projection to queries, keys and values has a bias.
        has_mlp_bias: whether the MLP's linear layers have a bias.
        qk_norm: whether queries and keys have an RMSNorm in each head; `width`: one norm over all heads together.
        post_norm: whether norms act on the outputs of attention and MLP, not on their inputs.
        parallel: whether the MLP reads the layer's input, not the sum with the attention's output.
        rope_frequencies: radians per token for each rotated pair of dimensions; None: no rotary positions.
        rope_amplitude: factor on the cos and sin of rotary positions.
        rope_layers: whether each layer rotates its queries and keys; None: all do.
        learned_positions: whether each position below `seq_len` has a learned vector.
        embedding_norm: kind of the norm after the embedding, as `norm`; None: no norm.
        value_residual: `first_layer`: each layer mixes the first layer's values into its own; None: no layer does.
        output_gate: `head` or `element`: the attention's output is multiplied by a learned gate per head or element.
        gate_inputs: number of the layer input's dimensions that the gate reads; None: all.
        exclusive: whether the component along the token's own value is taken out of each head's output.
        differential: whether attention is differential (arXiv 2410.05258); `v2`: its second version.
        dropout: probability of dropout on the embeddings and on each layer's outputs.
        logit_softcap: c in c tanh(logits / c); None: logits are not capped.
        normalizers: for each layer, a dict with its normalizer's `name` and options; None: softmax.
        tie_word_embeddings: whether the head's matrix is the embedding.
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
        """Fill in the lists that have one entry per layer. `kwargs` are fields that all of transformers' configurations
        share.
        """
        self.rope_layers = self.rope_layers or [True] * self.n_layer
        self.normalizers = self.normalizers or [{"name": "softmax"}] * self.n_layer
        super().__post_init__(**kwargs)

    @property
    def maps_per_head(self) -> int:
        """Return how many attention maps each head has: 2 in differential attention, else 1."""
        return 2 if self.differential else 1

    @property
    def position(self) -> SimpleNamespace:
        """Return an object whose `rotates_in(layer)` says whether a layer rotates queries and keys; lm's modules call
        this method.
        """
        return SimpleNamespace(rotates_in=lambda layer: bool(self.rope_frequencies) and self.rope_layers[layer])

    @property
    def normalizer(self) -> SimpleNamespace:
        """Return an object whose `options_of_layer(layer)` gives a layer's normalizer options; lm's modules call this
        method.
        """
        return SimpleNamespace(options_of_layer=self._options_of_layer)

    def _options_of_layer(self, layer: int) -> Options:
        """Return the options of a layer's normalizer, checked by the normalizer's own class of options."""
        options = dict(self.normalizers[layer])
        return normalizer_class(options.pop("name")).schema(**options)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, kw_only=True)
class TransformersForwardContext(ForwardContext):
    """This class holds the inputs of one forward pass that all layers share, with a cache of transformers in place of
    lm's.

    With `attn_implementation="eager"` attention computes all weights and keeps them. Otherwise each normalizer takes
    its fastest exact route.
    """

    past_key_values: Cache | None
    weights: list[Tensor | None]  # each layer appends its weights, or None if it doesn't hold them

    def attend(self, layer: AttentionBase, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T, E) of one layer, for the new tokens.

        Args:
            layer: the attention module.
            x: the layer's input (B, T, C).
            q: queries (B, H, T, D), normalised and rotated.
            k: keys (B, K, T, D), normalised and rotated; the cache adds those of earlier tokens.
            v: values (B, K, T, E); the cache adds those of earlier tokens.
        """
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


class CheckpointedLayer(GradientCheckpointingLayer):
    """A layer that gradient checkpointing can recompute in the backward pass.

    transformers requires that tensors with gradients are positional arguments. So `first_layer_values` is one, though
    lm passes it in the context.
    """

    def forward(self, x: Tensor, first_layer_values: Tensor | None, context: TransformersForwardContext) -> Tensor:
        """Return the layer's output (B, T, C) for its input x (B, T, C).

        first_layer_values: the first layer's values (B, K, T, E), which a model with `value_residual` mixes into its
        own; else None.
        """
        return super().forward(x, replace(context, first_layer_values=first_layer_values))


class LmBlock(CheckpointedLayer, Block):
    """This layer consists of attention and an MLP."""


class LmGauBlock(CheckpointedLayer, GauBlock):
    """This layer consists of one gated attention unit (arXiv 2202.10447)."""


BLOCK_CLASSES = {"attention": LmBlock, "gau": LmGauBlock}


# ---------------------------------------------------------------- models


def document_numbers(is_token: Tensor, position_ids: Tensor) -> Tensor | None:
    """Return each token's document number (B, T) int64 if any sequence holds several documents, else None.

    A document begins at position 0, and wherever a token's position is not its predecessor's plus 1.

    Args:
        is_token: (B, T) bool, false for padding.
        position_ids: (1, T) or (B, T) int64.
    """
    breaks = F.pad(is_token[:, :-1] & (position_ids.diff(dim=-1) != 1), (1, 0))
    begins = is_token & ((position_ids == 0) | breaks)
    return begins.cumsum(-1) if bool((begins & (is_token.cumsum(-1) > 1)).any()) else None


class InputLayout(NamedTuple):
    """Holds the attention layout and the positions of the new tokens of a forward pass."""

    layout: AttentionLayout
    position_ids: Tensor  # (1, T) or (B, T)
    is_packed: bool  # whether a sequence holds several documents


def input_layout(mask: Tensor | None, position_ids: Tensor | None, n_cached: int, x: Tensor) -> InputLayout:
    """Return the attention layout of new tokens, and their positions.

    Args:
        mask: attention mask, as for `LmModel.forward`.
        position_ids: positions, as for `LmModel.forward`.
        n_cached: number of tokens in the cache, which come before the new ones.
        x: embeddings of the new tokens (B, T, C).

    Raises ValueError: a mask (B, 1, T, S) is not the causal mask of whole documents, or adds a bias to scores.
    """
    count, n_keys, device = x.size(1), n_cached + x.size(1), x.device
    if mask is not None and mask.dim() == 4:
        layout = AttentionLayout.from_4d_mask(mask, n_cached, count, device)
        return InputLayout(layout, layout.positions if position_ids is None else position_ids, False)
    is_token = torch.ones(1, n_keys, dtype=torch.bool, device=device) if mask is None else mask != 0
    if position_ids is None:
        position_ids = (is_token.cumsum(-1) - 1).clamp(min=0)[:, n_cached:n_keys]
        documents = None
    else:
        documents = document_numbers(is_token, position_ids) if is_token.size(1) == count else None
    if documents is None and (mask is None or bool(is_token.all())):
        return InputLayout(AttentionLayout.continuation(n_cached, count, n_keys, device), position_ids, False)
    triangle = torch.ones(count, is_token.size(1), dtype=torch.bool, device=device).tril(n_cached)
    visible = is_token[:, None, None] & triangle
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    layout = AttentionLayout.from_4d_mask(visible, n_cached, count, device)
    return InputLayout(layout, position_ids, documents is not None)


class LmPreTrainedModel(PreTrainedModel):
    """This base class holds the class attributes that transformers reads."""

    config_class = LmConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    supports_gradient_checkpointing = True
    _no_split_modules = tuple(block.__name__ for block in BLOCK_CLASSES.values())
    _skip_keys_device_placement = ("past_key_values",)
    _keep_in_fp32_modules_strict = ("normalizer", "q_norm", "k_norm")
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module's parameters: normalizers as lm does, all other modules as transformers does."""
        super()._init_weights(module)
        if isinstance(module, DifferentialV1):
            init.constant_(module.initial_lambda, module.lambda_0)
        if isinstance(module, Normalizer):
            for parameter, value in zip(
                module.parameters(), type(module)(module.options, module.layer).parameters(), strict=True
            ):
                init.copy_(parameter, value)


class LmModel(LmPreTrainedModel):
    """The decoder without its language-model head computes hidden states from token ids."""

    def __init__(self, config: LmConfig):
        super().__init__(config)
        n_layers, width = config.n_layer, config.n_embd
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.embedding_norm = make_norm(config, config.embedding_norm) if config.embedding_norm else nn.Identity()
        self.position = nn.Embedding(config.seq_len, width) if config.learned_positions else None
        self.blocks = nn.ModuleList(
            BLOCK_CLASSES[config.block](config, config.seq_len, layer) for layer in range(n_layers)
        )
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
        """Return hidden states (B, T, C) after the last norm, for token ids or embeddings of T new tokens.

        Args:
            input_ids: (B, T) int64 token ids; give either them or `inputs_embeds`.
            attention_mask: (B, S), 0 for padding and any other number for a token; or (B, 1, T, S), causal over whole
                documents.
            position_ids: (1, T) or (B, T), 0-based in each document; None: counted from `attention_mask` and the cache.
            past_key_values: cache of earlier tokens' keys and values.
            inputs_embeds: (B, T, C) embeddings in place of token ids.
            use_cache: whether a cache is returned; None: as the configuration says, but never in training.
            output_attentions: whether attention weights (B, H, T, S) are returned for each layer. They are None unless
                `attn_implementation` is `eager`.
            output_hidden_states: whether each layer's input (B, T, C) is returned, too.

        Raises ValueError: a mask (B, 1, T, S) has gaps or a prefix, or adds a bias to scores; or packed documents are
        given with a cache.
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
        context = TransformersForwardContext(layout, rotation, 1.0, None, past_key_values=past_key_values, weights=[])
        first_layer_values, hidden_states = None, ()
        if self.config.value_residual:
            first = self.blocks[0]
            first_layer_values = first.attention.project_values(first.attention_norm(x))
        for block in self.blocks:
            hidden_states += (x,) if output_hidden_states else ()
            x = block(x, first_layer_values, context)
        x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            attentions=tuple(context.weights) if output_attentions else None,
        )


class LmForCausalLM(LmPreTrainedModel, GenerationMixin):
    """The language model adds a linear head to the decoder, which gives next-token logits."""

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
        """Return next-token logits (B, T, V) and, if `labels` are given, the loss.

        Args:
            labels: (B, T) token ids, -100 where a token does not count. The loss function shifts them by one token.
            logits_to_keep: number of last positions whose logits are returned, 0 for all; or a tensor of their indices.

        Other arguments and errors are those of `LmModel.forward`.
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
