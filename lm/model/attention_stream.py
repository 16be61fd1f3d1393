"""The attention of a decoder as it reads a batch: layer by layer, some queries at a time, never all weights of a layer at once.

Shapes: B sequences, T queries, S keys, H heads, D head size, E width of the values, C width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.data.batches import Batch
from lm.model.blocks import Heads
from lm.model.decoder import Decoder, batch_layout

BLOCK_WEIGHTS = 2**24  # weights, and as many scores, held at a time


@dataclass(frozen=True)
class AttentionBlock:
    """What some queries of a layer make of the keys up to the last of them.

    Attributes:
        layer: from 0.
        queries: (T,) int64, places of the queries in the sequence; keys are places 0 to S - 1.
        layout: where those queries and keys stand in their documents.
        scores: (B, H, T, S) before normalization (`Normalizer.scores`), also of keys that a query does not see.
        weights: (B, H, T, S), what the scores become; 0 for those keys.
        heads: the layer's input x (B, L, C), q, k (B, H, L, D), with their features, and v (B, H, L, E) of all L tokens, if asked for.
    """

    layer: int
    queries: Tensor
    layout: AttentionLayout
    scores: Tensor
    weights: Tensor
    heads: Heads | None


def attention_blocks(
    decoder: Decoder,
    batch: Batch,
    queries: Sequence[int] | None = None,
    layout: AttentionLayout | None = None,
    dtype: torch.dtype = torch.float32,
    block: int | None = None,
    heads: bool = False,
) -> Iterator[AttentionBlock]:
    """The decoder's attention on a batch, layer by layer, and in a layer some queries after the others.

    The model runs as the caller has set it: training mode, gradients and autocast are theirs; for another inference setting give
    `lm.model.inference.for_inference` of it. Queries and keys are held of one layer at a time, and `BLOCK_WEIGHTS` scores and weights.

    Args:
        queries: places of the queries asked for, negative ones from the end; None: all.
        layout: where the tokens stand, if not as the batch says.
        dtype: of scores and weights, made of q and k in it: fp32 or fp64.
        block: queries at a time; None: as many as `BLOCK_WEIGHTS` allows.
        heads: give the layer's input, queries, keys and values, too.
    """
    length = batch.tokens.size(1)
    places = torch.arange(length, device=batch.tokens.device)
    places = places if queries is None else places[list(queries)]
    block = block or block_size([decoder], batch)
    x, context = decoder.start(batch.tokens, batch_layout(batch) if layout is None else layout)
    for layer, (module, normalizer) in enumerate(zip(decoder.blocks, decoder.normalizers(), strict=True)):
        left: list[Heads] = []
        x = module(x, replace(context, left=left))
        yield from _layer(layer, normalizer, left.pop(), context.layout, places.split(block), dtype, heads)


def in_lockstep(
    decoders: Sequence[Decoder],
    batch: Batch,
    queries: Sequence[int] | None = None,
    layout: AttentionLayout | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[AttentionBlock, ...]]:
    """The attention of several decoders on one batch, as `attention_blocks`: for the same layer and queries a block of each.

    Raises:
        ValueError: decoders of different numbers of layers.
    """
    block = block_size(decoders, batch)
    return zip(*(attention_blocks(decoder, batch, queries, layout, dtype, block) for decoder in decoders), strict=True)


def block_size(decoders: Sequence[Decoder], batch: Batch) -> int:
    """How many queries at a time `BLOCK_WEIGHTS` allows."""
    n_head = max(normalizer.shape.n_head for decoder in decoders for normalizer in decoder.normalizers())
    return max(1, BLOCK_WEIGHTS // (n_head * batch.tokens.numel()))


def _layer(
    layer: int, normalizer: Normalizer, heads: Heads, layout: AttentionLayout, blocks: Sequence[Tensor], dtype: torch.dtype, keep: bool
) -> Iterator[AttentionBlock]:
    """The blocks of one layer, whose queries and keys are let go with the last of them."""
    for places in blocks:
        n_keys = int(places.max()) + 1  # no query sees a later one
        part = layout.part(places, n_keys)
        scores = normalizer.scores(heads.q[:, :, places].to(dtype), heads.k[:, :, :n_keys].to(dtype), part)
        yield AttentionBlock(layer, places, part, scores, normalizer.normalize(scores, part), heads if keep else None)
