"""Normalizers as functions, for models and trainers that are not lm's: forward and backward by lm's own routes.

    import lm.functional as L

    first = L.parameters("ssmax", n_head=12, head_size=64, train_length=1024)   # {"s": (12,)}: learn it
    out = L.attention("ssmax", q, k, v, first)                                  # in place of scaled_dot_product_attention
    q, k = L.scaled("ssmax", q, k, first, positions=positions)                  # or before a kernel of your own

A normalizer is named as in a configuration, `"ssmax"` or `{"name": "ssmax", "bias": True, "n": "fixed:1024"}` (docs/normalizers.md).
n is that of positions in documents, never a tensor's width.

Shapes: B sequences, T queries, S keys, H heads of queries, K of keys and values (H is a multiple of K), D head size, C width.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lm.attention.catalogue import SINGLE, make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options
from lm.attention.plugins import PLUGINS
from lm.errors import ConfigError, Problem
from lm.schema import Plain, build, own_problems, variant

Named = str | Mapping[str, Plain]
NONE: Mapping[str, Tensor] = MappingProxyType({})


def attention(
    normalizer: Named,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor] = NONE,
    *,
    positions: Tensor | AttentionLayout | None = None,
    cu_seqlens: Tensor | None = None,
    train_length: int | None = None,
    x: Tensor | None = None,
) -> Tensor:
    """Weights x values, (B, H, T, D) in the dtype of v. Gradients reach q, k, v, x and the parameters.

    Args:
        q: (B, H, T, D), after RoPE and norms.
        k: (B, K, S, D). Without positions and cu_seqlens the queries are the last T of S tokens of one document: S > T decodes.
        v: (B, K, S, D).
        parameters: of this layer, by the names that the function `parameters` gives.
        positions: (T,) or (B, T) int64, 0-based in each document: another begins at each 0, and each sequence must begin with one. Or an
            `AttentionLayout`, made once for all layers.
        cu_seqlens: (N + 1,), where each of N documents begins in the B T tokens of all sequences, and their number.
        train_length: m of entries that are softmax "at the training length".
        x: the layer's input (B, T, C), which asentmax and forget read.

    Raises:
        ConfigError: no such normalizer or option, or one that needs what was not given.
        ValueError: other parameters than the normalizer has, or heads, positions or lengths that belong to no such sequences.
    """
    return _call(_attend, normalizer, q, k, parameters, positions, cu_seqlens, train_length, x, v)


def scaled(
    normalizer: Named,
    q: Tensor,
    k: Tensor,
    parameters: Mapping[str, Tensor] = NONE,
    *,
    positions: Tensor | AttentionLayout | None = None,
    cu_seqlens: Tensor | None = None,
    train_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of which any softmax kernel (scores q.k / sqrt(D)) makes the normalizer's weights, in their own dtypes.

    The product is in fp32 and rounded once. Arguments and errors as `attention`; also ConfigError: no such queries make the weights.
    """
    return _call(_scale, normalizer, q, k, parameters, positions, cu_seqlens, train_length, None)


def parameters(normalizer: Named, n_head: int, head_size: int, train_length: int, width: int = 1) -> dict[str, Tensor]:
    """Initial values of one layer's parameters by name, fp32 on the CPU; {} if the normalizer has none. MLPs draw from torch's generator.

    Args:
        train_length: tokens in a training sequence.
        width: of the layer's input, for asentmax and forget.
    """
    layer = make_normalizer(_options(normalizer), LayerSpec(n_head, head_size, width, train_length))
    first = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    return {
        name: value.normal_(0.0, 1 / math.sqrt(value.size(1))) if name.endswith("hidden.weight") else value for name, value in first.items()
    }


# ---------------------------------------------------------------- how


def _attend(normalizer: Normalizer, layout: AttentionLayout, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = normalizer.append_features(x, q, k)
    k, v = normalizer.expand_kv_heads(k, v)
    return normalizer.attend(q, k, v, layout) if q.size(2) == k.size(2) else normalizer(q, k, v, layout)


def _scale(normalizer: Normalizer, layout: AttentionLayout, x: None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    fused = normalizer.fused_inputs(q, k, layout)
    if fused is None:
        raise ConfigError(
            [Problem("normalizer", normalizer.options.name, "is no softmax of scaled queries", "use lm.functional.attention")]
        )
    return fused[0].to(q.dtype), fused[1].to(k.dtype)


class _Function(nn.Module):
    """A function of a normalizer as a module's `forward`, so that the parameters can be passed in."""

    def __init__(self, normalizer: Normalizer):
        super().__init__()
        self.normalizer = normalizer

    def forward(self, function: Callable, *given: object) -> Tensor | tuple[Tensor, Tensor]:
        return function(self.normalizer, *given)


def _call(
    function: Callable, normalizer: Named, q: Tensor, k: Tensor, parameters: Mapping[str, Tensor],
    positions: Tensor | AttentionLayout | None, cu_seqlens: Tensor | None, train_length: int | None, x: Tensor | None, *values: Tensor,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    named = json.dumps(dict(normalizer) if isinstance(normalizer, Mapping) else normalizer, sort_keys=True)
    module = _module(named, LayerSpec(q.size(1), q.size(3), 1 if x is None else x.size(-1), train_length or 2), str(q.device))
    own, kind = module.normalizer, module.normalizer.options.name
    if (expected := {name for name, _ in own.named_parameters()}) != set(parameters):
        raise ValueError(
            f"{kind} has the parameters {sorted(expected)}, given are {sorted(parameters)}; lm.functional.parameters makes them"
        )
    if train_length is None and own.constants() and getattr(own.options, "base", "") == "train":
        raise ConfigError([Problem("train_length", None, f"{kind} is softmax at this length", "give it, or base")])
    reads = any(getattr(type(own), name) is not getattr(Normalizer, name) for name in ("query_features", "key_features"))
    if reads and x is None:
        raise ConfigError([Problem("x", None, f"{kind} reads the layer's input", "give it to lm.functional.attention")])
    if q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} heads of queries can't share {k.size(1)} heads of keys")
    layout = positions if isinstance(positions, AttentionLayout) else make_layout(q, k, positions, cu_seqlens)
    given = {f"normalizer.{name}": value for name, value in parameters.items()}
    return torch.func.functional_call(module, given, (function, layout, x, q, k, *values))


@dataclass
class _Chosen:
    normalizer: Options = variant(SINGLE, "softmax", "a normalizer by name, with its options")


def _options(normalizer: Named) -> Options:
    problems: list[Problem] = []
    with PLUGINS.trusted():  # the caller named it
        chosen = build(_Chosen, {"normalizer": normalizer}, "", problems)
    if problems := problems or own_problems(chosen):
        raise ConfigError(problems)
    return chosen.normalizer


@lru_cache(maxsize=256)
def _module(named: str, layer: LayerSpec, device: str) -> _Function:
    """A module of the normalizer, whose own parameters are never used."""
    return _Function(make_normalizer(_options(json.loads(named)), layer)).to(device)


def make_layout(q: Tensor, k: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None) -> AttentionLayout:
    """Where queries (B, H, T, D) and keys (B, K, S, D) stand, for all layers of a step; arguments as of `attention`.

    Raises:
        ValueError: both are given, a sequence does not begin with a document, or lengths are not those of the tokens.
    """
    queries, keys = q.size(2), k.size(2)
    if positions is not None and cu_seqlens is not None:
        raise ValueError("give positions or cu_seqlens, not both")
    if cu_seqlens is not None:
        token = torch.arange(q.size(0) * queries, device=q.device)
        starts = cu_seqlens.to(token)
        if starts[-1] != len(token):
            raise ValueError(f"cu_seqlens end at {int(starts[-1])}, not at the {len(token)} tokens that there are")
        positions = (token - starts[torch.searchsorted(starts, token, right=True) - 1]).view(q.size(0), queries)
    if positions is None:
        if keys < queries:
            raise ValueError(f"{queries} queries are not the last of {keys} tokens")
        return AttentionLayout.continuing(keys - queries, queries, keys, q.device)
    positions = positions.to(q.device).view(-1, positions.size(-1))
    if positions.size(1) != queries or queries != keys or (positions[:, 0] != 0).any():
        raise ValueError(
            f"positions {tuple(positions.shape)} are not those of {queries} queries and {keys} keys that begin with a document"
        )
    return AttentionLayout.from_positions(positions)
