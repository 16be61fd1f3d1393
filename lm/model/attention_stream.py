"""This module yields the attention of a decoder on a batch, layer by layer and some queries at a time. So memory never
holds all weights of long sequences.

Shapes: B sequences, T queries, S keys, H heads, D head size, E width of a head's values, C width of the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lm.attention.kernels import without_autocast
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.data.batches import Batch
from lm.model.blocks import AttentionInputs
from lm.model.decoder import Decoder, batch_layout

MAX_BLOCK_WEIGHTS = 2**24  # most attention weights held at a time, and as many scores


@dataclass(frozen=True)
class QueryBlock:
    """A query block holds scores and weights of some queries of one layer, over the keys up to the last of these
    queries.
    """

    layer: int  # from 0
    normalizer: Normalizer  # the normalizer of the layer
    queries: Tensor  # (T,) int64, index of each query in the sequence; keys have the indices 0 to S - 1
    layout: AttentionLayout  # positions of these queries and keys in their documents
    # (B, H, T, S) before normalization (`Normalizer.unmasked_scores`), also for keys that a query does not see
    scores: Tensor
    # the layer's input x (B, L, C), q and k (B, H, L, D), and v (B, H, L, E), of all L tokens
    inputs: AttentionInputs

    @cached_property
    def weights(self) -> Tensor:
        """Attention weights (B, H, T, S), computed from the scores when first read; 0 for keys that a query does not
        see.
        """
        with without_autocast(self.scores.device):
            return self.normalizer.normalize(self.scores, self.layout)


def attention_blocks(
    decoder: Decoder,
    batch: Batch,
    queries: Sequence[int] | None = None,
    document_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    block_size: int | None = None,
) -> Iterator[QueryBlock]:
    """Yield the decoder's attention on a batch, layer by layer, and within a layer some queries at a time.

    Training mode, gradients and autocast are as the caller has set them. For another inference setting, such as a
    rescaled RoPE, pass the decoder that `lm.model.swapped.with_inference_setting` returns. Memory holds queries and
    keys of one layer, and `MAX_BLOCK_WEIGHTS` scores and as many weights at a time.

    Args:
        queries: indices of queries in the sequence, negative ones from the end; None: all queries.
        document_length: number of tokens of the whole document, if the batch holds only its first tokens. Normalizers
            and RoPE may depend on it. None: the batch holds whole documents.
        dtype: the dtype of q and k, and so of scores and weights: fp32 or fp64.
        block_size: number of queries at a time; None: as many as `MAX_BLOCK_WEIGHTS` allows.
    """
    indices = torch.arange(batch.tokens.size(1), device=batch.tokens.device)
    indices = indices if queries is None else indices[list(queries)]
    block_size = block_size or max(
        1, MAX_BLOCK_WEIGHTS // (decoder.normalizers()[0].layer.n_head * batch.tokens.numel())
    )
    x, context = decoder.embed(
        batch.tokens, None if document_length else batch_layout(batch), document_length=document_length
    )
    for layer, (module, normalizer) in enumerate(zip(decoder.blocks, decoder.normalizers(), strict=True)):
        captured_inputs: list[AttentionInputs] = []
        x = module(x, replace(context, captured_inputs=captured_inputs))
        layer_inputs = captured_inputs.pop()
        for block_queries in indices.split(block_size):
            n_keys = int(block_queries.max()) + 1  # no query sees a later key
            block_layout = context.layout.select(block_queries, n_keys)
            scores = normalizer.unmasked_scores(
                layer_inputs.q[:, :, block_queries].to(dtype), layer_inputs.k[:, :, :n_keys].to(dtype), block_layout
            )
            yield QueryBlock(layer, normalizer, block_queries, block_layout, scores, layer_inputs)
        del layer_inputs, scores  # before the next layer's are computed
