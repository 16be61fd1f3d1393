"""The decoder is a nanoGPT-style pre-norm transformer whose attention normalizer can be chosen.

Shapes: B sequences, T tokens, C width of the model, V size of the vocabulary, K key-value heads, E width of a head's
values.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.config.eval_config import NO_SCALING, RopeScaling
from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.model.blocks import (
    Block,
    DecodingCache,
    DifferentialV1,
    ForwardContext,
    GauBlock,
    UninitialisedEmbedding,
    make_norm,
)
from lm.model.cross_entropy import Head, summed_training_loss
from lm.model.rope import rope_rotation


class Decoder(nn.Module):
    """The decoder is the language model that lm trains: embedding, blocks, last norm and head.

    Args:
        config: layers, sizes and kinds of blocks.
        vocab_size: number of tokens V.
        seq_len: tokens in a training sequence; normalizers are initialised for it, learned positions end at it.
        seed: the seed of the initial weights. Each parameter draws from its own stream (seed, name), so two models of
            one seed start equal wherever they share parameters, whatever their normalizers. None: leave the weights
            unset, for weights that are loaded.
    """

    takes_inference_settings = True  # whether inference settings can change it

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int, seed: int | None = 0):
        super().__init__()
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        # activations of blocks are computed again in the backward pass (trainer.activation_checkpointing)
        self.recomputes_activations = False
        # compiled by `compile_blocks`
        self.run_block: Callable[[nn.Module, Tensor, ForwardContext], Tensor] = _run_block
        # another scaling in a copy by `lm.model.swapped.with_inference_setting`
        self.rope_scaling: RopeScaling = NO_SCALING
        self.embedding = UninitialisedEmbedding(vocab_size, config.n_embd)
        self.embedding_norm = make_norm(config, config.embedding_norm) if config.embedding_norm else nn.Identity()
        self.position = UninitialisedEmbedding(seq_len, config.n_embd) if config.position.has_length_limit else None
        self.dropout = nn.Dropout(config.dropout)
        block = {"attention": Block, "gau": GauBlock}[config.block.name]
        self.blocks = nn.ModuleList(block(config, seq_len, layer) for layer in range(config.n_layer))
        first_normalizers: dict[type, Normalizer] = {}
        for normalizer in self.normalizers():
            if (first_normalizer := first_normalizers.setdefault(type(normalizer), normalizer)) is not normalizer:
                normalizer.tie_parameters(first_normalizer)
        self.norm = make_norm(config)
        self.head = Head(config.n_embd, vocab_size, config.logit_softcap)
        if config.tied:
            self.head.weight = self.embedding.weight
        if seed is not None:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int, normalizers_only: bool = False) -> None:
        """Draw each parameter from N(0, std^2), with std from `_initial_std`, in a random stream of its own, which
        `seed` and its name determine.

        normalizers_only: draw only the normalizers' parameters.
        """
        for name, parameter in self.named_parameters():
            std = self._initial_std(name, parameter)
            if std is not None and (is_normalizer_parameter(name) or not normalizers_only):
                digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def _initial_std(self, name: str, parameter: Tensor) -> float | None:
        """Return the standard deviation of a parameter's initial values; None for a parameter that is not drawn at
        random, such as a gain.

        In normalizers only matrices named `hidden.weight` are drawn, with standard deviation 1 / sqrt(inputs). For
        projections into the residual stream it is init_std / sqrt(2 n_layer), or 0 if `out_init` is `zero`. Biases, and
        gates that read only `gate_inputs` dimensions, start at 0.
        """
        if is_normalizer_parameter(name):
            return parameter.size(1) ** -0.5 if name.endswith(".hidden.weight") else None
        if name.endswith(".lambdas"):
            return DifferentialV1.INITIAL_STD
        if name.endswith(".bias") or (name.endswith(".gate.weight") and self.config.gate_inputs):
            return 0.0
        if parameter.dim() < 2:
            return None
        if name.endswith(".out.weight"):
            return 0.0 if self.config.out_init == "zero" else self.config.init_std / math.sqrt(2 * self.config.n_layer)
        return self.config.init_std

    def forward(
        self, tokens: Tensor, layout: AttentionLayout | None = None, cache: DecodingCache | None = None,
        output_start: int = 0
    ) -> Tensor:  # fmt: skip
        """Return hidden states (B, T - output_start, C) of tokens (B, T) int64, after the last norm; `head` maps them
        to logits.

        Args:
            layout: the layout of the tokens, e.g. `AttentionLayout.from_document_lengths`; None: one document from its
                start, or with a cache the tokens after those in the cache.
            cache: the state that layers keep of earlier tokens, to which these tokens are added.
            output_start: index of the first token whose hidden state is returned. The last layer computes no queries
                before it.
        """
        x, context = self.embed(tokens, layout, cache)
        run_block = self.run_block if self.training else _run_block
        for layer, block in enumerate(self.blocks):
            if output_start and layer == len(self.blocks) - 1:
                context = replace(context, output_start=output_start)
            recomputes_activations = self.recomputes_activations and torch.is_grad_enabled()
            x = (
                checkpoint(run_block, block, x, context, use_reentrant=False)
                if recomputes_activations
                else run_block(block, x, context)
            )
        if cache:
            cache.n_seen += tokens.size(1)
        return self.norm(x)

    def embed(
        self,
        tokens: Tensor,
        layout: AttentionLayout | None = None,
        cache: DecodingCache | None = None,
        document_length: int | None = None,
    ) -> tuple[Tensor, ForwardContext]:
        """Return the first layer's input, vectors (B, T, C) of the tokens, and the context that all layers share.

        document_length: number of tokens of the whole document, of which `tokens` are a part; None: the cache's
        document length, or T without a cache.
        """
        document_length = document_length or (cache.document_length if cache else tokens.size(1))
        layout = layout or AttentionLayout.continuation(
            cache.n_seen if cache else 0, tokens.size(1), document_length, tokens.device
        )
        x = self.embedding_norm(self.embedding(tokens))
        if self.position is not None:
            x = x + self.position(layout.positions)
        rotation, lengths = None, (self.seq_len, document_length)
        if self.config.position.rotates:
            rotation = rope_rotation(
                layout.positions, self.config.key_dims, self.config.position, self.rope_scaling, lengths
            )
        score_factor = self.rope_scaling.score_factor(self.rope_scaling.length_ratio(*lengths))
        x, first_layer_values = self.dropout(x), None
        if self.config.value_residual:
            first_layer_values = self.blocks[0].attention.project_values(self.blocks[0].attention_norm(x))
        return x, ForwardContext(layout, rotation, score_factor, cache, first_layer_values)

    def normalizers(self) -> list[Normalizer]:
        """Return the normalizers, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, Normalizer)]

    def compile_blocks(self, n_lengths: int) -> None:
        """Compile the blocks' forward pass in training mode, for `n_lengths` different sequence lengths. Layers that
        are alike share code.

        Evaluations (`eval`) stay eager, and so do embedding, RoPE's angles, last norm and the head's loss, whose chunks
        would be unrolled.
        """
        # its limits count a function's graphs in a process; each layer may need its own
        dynamo_config = torch._dynamo.config
        dynamo_config.recompile_limit += 2 * n_lengths * len(self.blocks)
        dynamo_config.accumulated_recompile_limit += 2 * n_lengths * len(self.blocks)
        self.run_block = torch.compile(_run_block, dynamic=False)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return next-token logits (B, T, V) of tokens (B, T) int64. `lm.model.cross_entropy` avoids holding all logits
        at once.
        """
        return self.head(self(tokens))

    def summed_loss(self, batch: Batch) -> Tensor:
        """Return the summed negative log-likelihood of a batch's targets, an fp32 scalar (nats), by
        `lm.model.cross_entropy.summed_training_loss`.
        """
        # a compiled block would be compiled anew for each `output_start`
        output_start = batch.first_target_index if self.run_block is _run_block else 0
        return summed_training_loss(
            self.hidden_states(batch, output_start).flatten(0, 1), self.head, batch.targets[:, output_start:].flatten()
        )

    def hidden_states(self, batch: Batch, output_start: int = 0) -> Tensor:
        """Return hidden states (B, T - output_start, C) of a batch's tokens from the index `output_start` on, after the
        last norm (see `forward`).
        """
        return self(batch.tokens, batch_layout(batch), output_start=output_start)


def _run_block(block: nn.Module, x: Tensor, context: ForwardContext) -> Tensor:
    """Call a block. `Decoder.compile_blocks` replaces this function by a compiled one."""
    return block(x, context)


def batch_layout(batch: Batch) -> AttentionLayout:
    """Return the attention layout of a batch, whose sequences are one document each, or several documents that don't
    see each other.
    """
    if batch.positions is None:
        return AttentionLayout.full(batch.tokens.size(1), batch.tokens.device)
    return AttentionLayout.from_positions(batch.positions)


def is_normalizer_parameter(name: str) -> bool:
    """Return whether `name` is the name of a normalizer's parameter."""
    return ".normalizer." in name


def parameter_group(name: str, parameter: Tensor) -> str:
    """Return the name of the parameter's group in `optim.groups`: embedding, head, matrices, vectors or normalizer."""
    if is_normalizer_parameter(name):
        return "normalizer"
    if name.startswith(("embedding.", "position.")):
        return "embedding"
    if name.startswith("head."):
        return "head"
    return "matrices" if parameter.dim() >= 2 else "vectors"


def projection_rows(decoder: Decoder) -> dict[str, dict[str, slice]]:
    """Return the rows of each projection in each fused matrix, by matrix name: `attention.qkv.weight` has {"q": rows,
    "k": rows, "v": rows}.

    Optimizers use these rows to treat projections separately. A module's `fused_row_counts` is {linear layer:
    {projection: number of rows}}, in the order of rows.
    """
    matrix_rows = {}
    for name, module in decoder.named_modules():
        for layer, sizes in getattr(module, "fused_row_counts", {}).items():
            row_ends = accumulate(sizes.values())
            matrix_rows[f"{name}.{layer}.weight"] = {
                part: slice(end - sizes[part], end) for part, end in zip(sizes, row_ends, strict=True)
            }
    return matrix_rows


# ---------------------------------------------------------------- models of other code


class LogitsModel(nn.Module):
    """Wraps a module that maps tokens to logits, so that measurements can use it like a `Decoder`.

    There is no cache for decoding: each new token is computed from all earlier tokens again.
    """

    takes_inference_settings = False

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.head, self.config = module, _IdentityHead(), ModelConfig()

    def forward(self, tokens: Tensor, cache: DecodingCache | None = None, output_start: int = 0) -> Tensor:
        """Return logits (B, T - output_start, V) of tokens (B, T). With a cache these tokens follow the tokens
        in it.
        """
        if cache is not None:
            n_seen = cache.n_seen
            tokens = torch.cat((cache.states[self], tokens), 1) if n_seen else tokens
            cache.states[self], cache.n_seen, output_start = tokens, tokens.size(1), output_start + n_seen
        logits = self.module(tokens)[:, output_start:]
        self.head.out_features = logits.size(-1)
        return logits

    def hidden_states(self, batch: Batch, output_start: int = 0) -> Tensor:
        """Return logits in place of hidden states; the head leaves them as they are."""
        return self(batch.tokens, output_start=output_start)


class _IdentityHead(nn.Identity):
    """Stands in for the head of a `LogitsModel`, whose module returns logits, and leaves them unchanged."""

    out_features: int  # size of the vocabulary

    def fp32_forward_function(self) -> Callable[[Tensor], Tensor]:
        """Return the function that converts logits to fp32."""
        return Tensor.float
