"""Attention normalizers as functions, for models and trainers outside lm; they call lm's own modules.

    import lm.functional as L

    first = L.parameters("ssmax", n_head=12, head_size=64, train_length=1024)  # to be learned: {"s": (12,)}
    out = L.attention("ssmax", q, k, v, first)  # in place of scaled_dot_product_attention
    q, k = L.scaled("ssmax", q, k, first, positions=positions)  # or before a kernel of your own

A normalizer is named as in a configuration, `"ssmax"` or `{"name": "ssmax", "bias": True, "n": "fixed:1024"}`
(docs/normalizers.md). n comes from positions in documents, never from a tensor's width.

Shapes: B sequences, T queries, S keys, H heads of queries, K heads of keys and values (H is a multiple of K), D head
size, C width.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import TypeVar, cast

import torch
from torch import Tensor

from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.routes import AsModule
from lm.config.normalizers import SINGLE
from lm.errors import ConfigError, Problem
from lm.plain import Plain
from lm.plugins import PLUGINS
from lm.schema import build_named

Named = str | Mapping[str, Plain]
Result = TypeVar("Result")


def attention(
    normalizer: Named, q: Tensor, k: Tensor, v: Tensor, parameters: Mapping[str, Tensor] | None = None, *,
    positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None,
    train_length: int | None = None, x: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the output of attention (the weighted sums of values), (B, H, T, D) in the dtype of v. It is
    differentiable in q, k, v, x and the parameters.

    Args:
        q: (B, H, T, D), after RoPE and norms.
        k: (B, K, S, D). Without positions and cu_seqlens the queries are the last T of S tokens of one document; in
            decoding S > T.
        v: (B, K, S, D).
        parameters: the normalizer's parameters in this layer, by the names that the function `parameters` gives.
        positions: (T,) or (B, T) int64, 0-based in each document: a document begins at each 0, and each sequence must
            begin with 0. Or an `AttentionLayout` of `make_layout`, made once for all layers.
        cu_seqlens: (N + 1,), the index at which each of N documents begins among the B * T tokens of all sequences,
            then B * T.
        train_length: the training length m, for normalizers whose formula or parameters depend on m.
        x: the attention layer's input (B, T, C), which the normalizers asentmax and forget read.

    Raises:
        ConfigError: no such normalizer or option, or an argument that the normalizer needs was not given.
        ValueError: parameters with other names or shapes than the function `parameters` gives them, or tensors,
            positions or lengths that don't match.
    """
    return _call_normalizer(_attend, normalizer, q, k, parameters, positions, cu_seqlens, train_length, x, v)


def scaled(
    normalizer: Named, q: Tensor, k: Tensor, parameters: Mapping[str, Tensor] | None = None, *,
    positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None,
    train_length: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return scaled queries and keys with which any softmax kernel (scores q.k / sqrt(D)) computes the normalizer's
    weights.

    Scaling is in fp32; the results have the dtypes of q and k. Arguments and errors are those of `attention`;
    ConfigError is also raised for a normalizer that is no softmax of scaled queries.
    """
    return _call_normalizer(_scale, normalizer, q, k, parameters, positions, cu_seqlens, train_length, None)


def parameters(normalizer: Named, n_head: int, head_size: int, train_length: int, width: int = 1) -> dict[str, Tensor]:
    """Return the normalizer's initial parameters for one layer, {name: fp32 tensor on the CPU}. If the normalizer has
    MLPs, the weights of their first layers are drawn from torch's random generator.

    train_length: tokens in a training sequence; width: of the layer's input, which asentmax and forget read.
    Raises ConfigError: no such normalizer or option, or a size that is not a whole number or too small.
    """
    module = make_module(normalizer, n_head, head_size, train_length, width)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def make_module(normalizer: Named, n_head: int, head_size: int, train_length: int, width: int = 1) -> Normalizer:
    """Return the normalizer as a module, whose parameters are those that the function `parameters` gives."""
    module = _make_normalizer(normalizer, n_head, head_size, width, train_length)
    for name, value in module.named_parameters():
        if name.endswith("hidden.weight"):
            torch.nn.init.normal_(value, 0.0, 1 / math.sqrt(value.size(1)))
    return module


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
        index = torch.arange(n_sequences * queries, device=q.device)
        starts = cu_seqlens.to(index)
        # waits for the device once
        is_wrong = (starts[0] != 0) | (starts[-1] != len(index)) | (starts.diff() < 0).any()
        if cu_seqlens.is_floating_point() or is_wrong:
            raise ValueError(f"cu_seqlens must be whole numbers that never fall, from 0 to the {len(index)} tokens")
        positions = (index - starts[torch.searchsorted(starts, index, right=True) - 1]).view(n_sequences, queries)
    if positions is None:
        if keys < queries:
            raise ValueError(f"{queries} queries are not the last of {keys} tokens")
        return AttentionLayout.continuing(keys - queries, queries, keys, q.device)
    positions = positions.to(q.device).view(-1, positions.size(-1))
    fits = queries == keys and positions.shape in ((1, keys), (n_sequences, keys)) and not positions.is_floating_point()
    if not fits or (positions[:, 0] != 0).any() or ((positions[:, 1:] != 0) & (positions.diff() != 1)).any():
        reason = f"must be whole numbers for {queries} queries and keys in {n_sequences} sequences, from 0 on by 1 or 0"
        raise ValueError(f"positions {tuple(positions.shape)} {reason}")
    return AttentionLayout.from_positions(positions.long())


def _attend(
    normalizer: Normalizer, layout: AttentionLayout, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    q, k = normalizer.append_features(x, q, k)
    k, v = normalizer.expand_kv_heads(k, v)
    return normalizer.attend(q, k, v, layout).to(v.dtype)  # autocast rounds the output of some routes


def _scale(normalizer: Normalizer, layout: AttentionLayout, x: None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if (scaled_inputs := normalizer.fused_inputs(q, k, layout)) is None:
        reason = "is no softmax of scaled queries"
        raise ConfigError([Problem("normalizer", normalizer.options.name, reason, "use lm.functional.attention")])
    return scaled_inputs[0].to(q.dtype), scaled_inputs[1].to(k.dtype)


def _call_normalizer(
    function: Callable[..., Result], normalizer: Named, q: Tensor, k: Tensor,
    parameters: Mapping[str, Tensor] | None, positions: Tensor | AttentionLayout | None, cu_seqlens: Tensor | None,
    train_length: int | None, x: Tensor | None, *values: Tensor,
) -> Result:  # fmt: skip
    fits = all(tensor.dim() == 4 for tensor in (q, k, *values)) and k.shape[::3] == q.shape[::3]
    if not fits or q.size(1) % k.size(1) or any(v.shape[:3] != k.shape[:3] for v in values):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, *values))
        raise ValueError(f"q, k, v {shapes} must be (B, H, T, D), (B, K, S, D), (B, K, S, E), H a multiple of K")
    # a value of another type is text, which the option refuses
    options = json.dumps(dict(normalizer) if isinstance(normalizer, Mapping) else normalizer, default=repr)
    sizes = q.size(1), q.size(3), 1 if x is None else x.size(-1), 2 if train_length is None else train_length
    module = _cached_module(options, str(q.device), *sizes)
    layer = cast(Normalizer, module.normalizer)
    name, parameters = layer.options.name, parameters or {}
    if train_length is None and getattr(layer.options, "base", "") == "train":
        raise ConfigError([Problem("train_length", None, f"{name} is softmax at this length", "give it, or base")])
    parts = "query_features", "key_features"
    reads = [getattr(type(layer), part) is not getattr(Normalizer, part) for part in parts]
    if any(reads):
        if x is None:
            raise ConfigError([Problem("x", None, f"{name} reads the layer's input", "give it")])
        if x.shape[:2] != (q.size(0), q.size(2)) or (reads[1] and k.size(2) != q.size(2)):
            raise ValueError(f"x {tuple(x.shape)} must be (B, T, C), the layer's input at each query and key")
    expected, given = (
        {key: tuple(value.shape) for key, value in source.items()}
        for source in (dict(layer.named_parameters()), parameters)
    )
    if expected != given:
        raise ValueError(f"{name} has the parameters {expected}, as lm.functional.parameters makes them, not {given}")
    layout = make_layout(q, k, positions, cu_seqlens)
    tensors = {f"normalizer.{parameter}": value for parameter, value in parameters.items()}
    return torch.func.functional_call(module, tensors, (function, layout, x, q, k, *values))


def _make_normalizer(normalizer: Named, *sizes: int) -> Normalizer:
    """Return the normalizer of a layer of `sizes`, the fields of `LayerSpec`. Raises ConfigError: no such normalizer
    or option, or a size that is not a whole number or too small.
    """
    for spec, size, minimum in zip(fields(LayerSpec), sizes, (1, 1, 1, 2), strict=True):
        if not isinstance(size, int) or size < minimum:
            raise ConfigError([Problem(spec.name, size, f"must be a whole number, {minimum} or more")])
    with PLUGINS.trusted():  # the caller named the normalizer, which may be a plugin
        plain = dict(normalizer) if isinstance(normalizer, Mapping) else normalizer
        return make_normalizer(build_named(SINGLE, plain, "normalizer", "softmax"), LayerSpec(*sizes))


@lru_cache(maxsize=256)
def _cached_module(normalizer: str, device: str, *sizes: int) -> AsModule:
    """Return the cached module of a normalizer, given as JSON, whose parameters each call replaces."""
    with torch.random.fork_rng([]):  # the caller's random state stays as it is
        return AsModule(_make_normalizer(json.loads(normalizer), *sizes)).to(device)
