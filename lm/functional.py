"""This module gives lm's attention normalizers to models and trainers outside lm. Each attention layer of such a model
holds its normalizer, a `torch.nn.Module`.

    import lm.functional as L

    normalizer = L.make_module("ssmax", n_head=12, head_size=64, train_length=1024)  # its parameter s is learned
    out = L.attention(normalizer, q, k, v)  # in place of scaled_dot_product_attention
    q, k = L.scaled(normalizer, q, k, positions=positions)  # or before a kernel of your own

Many formulas depend on n, such as the number of keys that a query sees. n comes from positions in documents, never from
a tensor's width. Shapes: B sequences, T queries, S keys, H heads of queries, K heads of keys and values (H is a
multiple of K), D head size, C width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.config.normalizers import LAYER_OPTIONS
from lm.config.schema import build_named_block
from lm.errors import ConfigError, Problem
from lm.plain import Plain
from lm.plugins import PLUGINS

NormalizerChoice = str | Mapping[str, Plain]


def make_module(
    normalizer: NormalizerChoice, n_head: int, head_size: int, train_length: int, width: int = 1
) -> Normalizer:
    """Return a layer's normalizer as a module, with initial values of its parameters in fp32.

    normalizer: named as in a configuration, `"ssmax"` or `{"name": "ssmax", "bias": True, "n": "fixed:1024"}`
    (docs/normalizers.md). train_length: tokens in a training sequence; width: dimensions of the layer's input, which
    asentmax and forget read. Raises ConfigError: no such normalizer or option.
    """
    with PLUGINS.trust_user_text():  # the caller named the normalizer, which may be a plugin
        plain = dict(normalizer) if isinstance(normalizer, Mapping) else normalizer
        options = build_named_block(LAYER_OPTIONS, plain, "normalizer", "softmax")
        return make_normalizer(options, LayerSpec(n_head, head_size, width, train_length))


def attention(
    normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor, *,
    positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None, x: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the output of attention (the weighted sums of values), (B, H, T, E) in the dtype of v.

    Args:
        q: (B, H, T, D), after RoPE and norms.
        k: (B, K, S, D). Without positions and cu_seqlens the queries are the last T of S tokens of one document; in
            decoding S > T.
        v: (B, K, S, E).
        positions: (T,) or (B, T) int64, 0-based in each document: a document begins at each 0, and each sequence must
            begin with 0. Or an `AttentionLayout` of `make_layout`, made once for all layers.
        cu_seqlens: (N + 1,), the index at which each of N documents begins among the B * T tokens of all sequences,
            then B * T.
        x: the attention layer's input (B, T, C), which the normalizers asentmax and forget read.

    Raises ConfigError: `x` is not given to a normalizer that reads it. Raises ValueError: heads or positions that don't
    fit.
    """
    if x is None and normalizer.reads_layer_input:
        raise ConfigError([Problem("x", None, f"{normalizer.options.name} reads the layer's input", "give it")])
    layout = _make_checked_layout(normalizer, q, k, positions, cu_seqlens)
    q, k = normalizer.append_features(x, q, k)
    k, v = normalizer.expand_kv_heads(k, v)
    return normalizer.attend(q, k, v, layout).to(v.dtype)  # autocast rounds the output of some routes


def scaled(
    normalizer: Normalizer, q: Tensor, k: Tensor, *,
    positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scaled queries (B, H, T, D) and keys (B, K, S, D), from which softmax of q.k / sqrt(D) gives the
    normalizer's weights.

    Scaling is in fp32; the results have the dtypes of q and k. Arguments and errors are as in `attention`. Raises
    ConfigError, too, if the normalizer is no softmax of scaled queries.
    """
    layout = _make_checked_layout(normalizer, q, k, positions, cu_seqlens)
    if (inputs := normalizer.fused_inputs(q, k, layout)) is None:
        reason = "is no softmax of scaled queries"
        raise ConfigError([Problem("normalizer", normalizer.options.name, reason, "use lm.functional.attention")])
    return inputs[0].to(q.dtype), inputs[1].to(k.dtype)


def make_layout(
    q: Tensor, k: Tensor, positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None
) -> AttentionLayout:
    """Return the `AttentionLayout` of queries q and keys k for all layers of a step; arguments as in `attention`.

    Raises ValueError: `positions` and `cu_seqlens` are both given, or do not fit the tokens.
    """
    if positions is not None and cu_seqlens is not None:
        raise ValueError("give positions or cu_seqlens, not both")
    if isinstance(positions, AttentionLayout):
        return positions
    (n_sequences, _, queries, _), keys = q.shape, k.size(2)
    if cu_seqlens is not None:
        index, starts = torch.arange(n_sequences * queries, device=q.device), cu_seqlens.to(q.device)
        if int(starts[-1]) != len(index):
            raise ValueError(f"cu_seqlens must end with the number of tokens, {len(index)}")
        positions = (index - starts[torch.searchsorted(starts, index, right=True) - 1]).view(n_sequences, queries)
    if positions is None:
        if keys < queries:
            raise ValueError(f"{queries} queries are not the last of {keys} tokens")
        return AttentionLayout.continuation(keys - queries, queries, keys, q.device)
    positions = positions.to(q.device).view(-1, positions.size(-1))
    is_right = queries == keys and positions.shape in ((1, keys), (n_sequences, keys))
    # waits for the device once
    if not is_right or (positions[:, 0] != 0).any() or ((positions[:, 1:] != 0) & (positions.diff() != 1)).any():
        reason = f"must begin with 0, and go on by 1 or 0, in {n_sequences} sequences of {queries} queries and keys"
        raise ValueError(f"positions, or those of cu_seqlens, {reason}")
    return AttentionLayout.from_positions(positions.long())


def _make_checked_layout(
    normalizer: Normalizer, q: Tensor, k: Tensor, positions: Tensor | AttentionLayout | None, cu_seqlens: Tensor | None
) -> AttentionLayout:
    """Return the result of `make_layout`, after a check that q and k have heads of the number and size that the
    normalizer was made for.

    Raises ValueError: heads or positions don't fit.
    """
    layer = normalizer.layer
    if q.shape[1::2] != (layer.n_head, layer.head_size) or layer.n_head % k.size(1) or k.shape[::3] != q.shape[::3]:
        heads = f"(B, H, T, D) and (B, K, S, D) for {layer.n_head} heads of {layer.head_size} dimensions"
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} are not {heads}, H a multiple of K")
    return make_layout(q, k, positions, cu_seqlens)
