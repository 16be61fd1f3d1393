"""Attention normalizers as functions, for models and trainers outside lm; forward and backward passes use lm's
implementations.

    import lm.functional as L

    # s to be learned: {"s": (12,)}
    first = L.parameters("ssmax", n_head=12, head_size=64, train_length=1024)
    # in place of scaled_dot_product_attention
    out = L.attention("ssmax", q, k, v, first)
    # or before a kernel of your own
    q, k = L.scaled("ssmax", q, k, first, positions=positions)

A normalizer is named as in a configuration, `"ssmax"` or `{"name": "ssmax", "bias": True, "n": "fixed:1024"}`
(docs/normalizers.md). n comes from positions in documents, never from a tensor's width.

Shapes: B sequences, T queries, S keys, H heads of queries, K heads of keys and values (H is a multiple of K), D head
size, C width.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar, cast

import torch
from torch import Tensor

from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.attention.options import Options
from lm.attention.routes import AsModule
from lm.config.normalizers import SINGLE
from lm.errors import ConfigError, Problem
from lm.plugins import PLUGINS
from lm.schema import Plain, build_named

Named = str | Mapping[str, Plain]
Result = TypeVar("Result")
NO_PARAMETERS: Mapping[str, Tensor] = MappingProxyType({})


def attention(
    normalizer: Named,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Tensor] = NO_PARAMETERS,
    *,
    positions: Tensor | AttentionLayout | None = None,
    cu_seqlens: Tensor | None = None,
    train_length: int | None = None,
    x: Tensor | None = None,
) -> Tensor:
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
    normalizer: Named,
    q: Tensor,
    k: Tensor,
    parameters: Mapping[str, Tensor] = NO_PARAMETERS,
    *,
    positions: Tensor | AttentionLayout | None = None,
    cu_seqlens: Tensor | None = None,
    train_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return scaled queries and keys with which any softmax kernel (scores q.k / sqrt(D)) computes the normalizer's
    weights.

    Scaling is in fp32; the results have the dtypes of q and k. Arguments and errors are those of `attention`;
    ConfigError is also raised for a normalizer that is no softmax of scaled queries.
    """
    return _call_normalizer(_scale, normalizer, q, k, parameters, positions, cu_seqlens, train_length, None)


def parameters(normalizer: Named, n_head: int, head_size: int, train_length: int, width: int = 1) -> dict[str, Tensor]:
    """Return the normalizer's initial parameters for one layer, {name: fp32 tensor on the CPU}. If the normalizer has
    MLPs, the weights of their first layers are drawn from torch's random generator.

    Args:
        train_length: number of tokens in a training sequence.
        width: width C of the layer's input, for asentmax and forget.

    Raises ConfigError: no such normalizer or option, or a size that is not a whole number or too small.
    """
    layer = make_normalizer(_read_options(normalizer), _layer_spec(n_head, head_size, width, train_length))
    initial_values = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for name, value in initial_values.items():
        if name.endswith("hidden.weight"):
            value.normal_(0.0, 1 / math.sqrt(value.size(1)))
    return initial_values


# ---------------------------------------------------------------- the call


def _attend(
    normalizer: Normalizer, layout: AttentionLayout, x: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    q, k = normalizer.append_features(x, q, k)
    k, v = normalizer.expand_kv_heads(k, v)
    return normalizer.attend(q, k, v, layout).to(v.dtype)  # autocast rounds the output of some routes


def _scale(normalizer: Normalizer, layout: AttentionLayout, x: None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    scaled_inputs = normalizer.fused_inputs(q, k, layout)
    if scaled_inputs is None:
        name = normalizer.options.name
        raise ConfigError(
            [Problem("normalizer", name, "is no softmax of scaled queries", "use lm.functional.attention")]
        )
    return scaled_inputs[0].to(q.dtype), scaled_inputs[1].to(k.dtype)


def _call_normalizer(
    function: Callable[..., Result], normalizer: Named, q: Tensor, k: Tensor, parameters: Mapping[str, Tensor],
    positions: Tensor | AttentionLayout | None, cu_seqlens: Tensor | None, train_length: int | None, x: Tensor | None,
    *values: Tensor,
) -> Result:  # fmt: skip
    _check_sequences(q, k, values, x)
    if not isinstance(parameters, Mapping):
        raise ValueError(
            "parameters must map names to tensors, as lm.functional.parameters does, not be "
            f"{type(parameters).__name__}"
        )
    normalizer_data = dict(normalizer) if isinstance(normalizer, Mapping) else normalizer
    # a value of another type is text, which the option refuses
    normalizer_json = json.dumps(normalizer_data, sort_keys=True, default=repr)
    layer = _layer_spec(
        q.size(1), q.size(3), 1 if x is None else x.size(-1), 2 if train_length is None else train_length
    )
    module = _cached_module(normalizer_json, layer, str(q.device))
    layer_normalizer = cast(Normalizer, module.normalizer)
    normalizer_name = layer_normalizer.options.name
    if (
        train_length is None
        and layer_normalizer.constants()
        and getattr(layer_normalizer.options, "base", "") == "train"
    ):
        raise ConfigError(
            [Problem("train_length", None, f"{normalizer_name} is softmax at this length", "give it, or base")]
        )
    has_query_features, has_key_features = (
        getattr(type(layer_normalizer), name) is not getattr(Normalizer, name)
        for name in ("query_features", "key_features")
    )
    shapes = _parameter_shapes(normalizer_json, layer, train_length is None)
    if set(parameters) == set(shapes) and (has_query_features or has_key_features) and x is None:
        raise ConfigError(
            [Problem("x", None, f"{normalizer_name} reads the layer's input", "give it to lm.functional.attention")]
        )
    _check_parameters(normalizer_name, parameters, shapes)
    if has_key_features and q.size(2) != k.size(2):
        raise ValueError(
            f"{normalizer_name} reads the layer's input at each key: {q.size(2)} queries can't go on from {k.size(2)} "
            "keys"
        )
    layout = make_layout(q, k, positions, cu_seqlens)
    _check_layout(layout, q, k)
    tensors = {f"normalizer.{name}": value for name, value in parameters.items()}
    return torch.func.functional_call(module, tensors, (function, layout, x, q, k, *values))


# ---------------------------------------------------------------- checks of arguments: ConfigError for sizes,
# ValueError for tensors


def _layer_spec(n_head: int, head_size: int, width: int, train_length: int) -> LayerSpec:
    """Return the sizes as a `LayerSpec`. Raises ConfigError: a size is not a whole number, or too small."""
    layer = LayerSpec(n_head, head_size, width, train_length)
    minimum_sizes = {"n_head": 1, "head_size": 1, "width": 1, "train_length": 2}
    if problems := [
        Problem(name, size, f"must be a whole number, {minimum} or more")
        for name, minimum in minimum_sizes.items()
        if not isinstance(size := getattr(layer, name), int) or size < minimum
    ]:
        raise ConfigError(problems)
    return layer


def _check_sequences(q: Tensor, k: Tensor, values: tuple[Tensor, ...], x: Tensor | None) -> None:
    """Raise ValueError if q, k, v and x do not fit together in sequences, heads, tokens or head size."""
    for name, tensor in zip("qkv", (q, k, *values), strict=False):
        _check_axes(name, tensor, "B, heads, tokens, size")
    if x is not None:
        _check_axes("x", x, "B, T, C")
    n_sequences, n_heads, n_queries, head_size = q.shape
    if k.size(0) != n_sequences or k.size(3) != head_size:
        raise ValueError(f"k {tuple(k.shape)} must have the sequences and the head size of q {tuple(q.shape)}")
    if n_heads % k.size(1):
        raise ValueError(f"{n_heads} heads of queries can't share {k.size(1)} heads of keys")
    for v in values:
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v {tuple(v.shape)} must have the sequences, heads and tokens of k {tuple(k.shape)}")
    if x is not None and x.shape[:2] != (n_sequences, n_queries):
        raise ValueError(
            f"x {tuple(x.shape)} must be (B, T, C), the layer's input at the {n_queries} queries of {n_sequences} "
            "sequences"
        )


def _check_axes(name: str, tensor: Tensor, axes: str) -> None:
    """Raise ValueError unless `tensor` is a non-empty floating-point tensor with the axes listed in `axes`."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor ({axes}), not {type(tensor).__name__}")
    if not tensor.is_floating_point() or tensor.dim() != len(axes.split()) or not tensor.numel():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} must be floating numbers ({axes}), no axis empty; it is {dtype_name} {tuple(tensor.shape)}"
        )


def _check_parameters(
    normalizer: str, parameters: Mapping[str, Tensor], expected: Mapping[str, tuple[int | str, ...]]
) -> None:
    """Raise ValueError unless `parameters` have the names and shapes of `expected`, in which a word in place of a size
    allows any size.
    """
    if set(expected) != set(parameters):
        reason = f"has the parameters {sorted(expected)}, given are {sorted(parameters)}"
        raise ValueError(f"{normalizer} {reason}; lm.functional.parameters makes them")
    for name, sizes in expected.items():
        value = parameters[name]
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if (
            shape is None
            or len(shape) != len(sizes)
            or not all(isinstance(a, str) or a == b for a, b in zip(sizes, shape, strict=True))
        ):
            shape_text = f"({', '.join(map(str, sizes))}{',' * (len(sizes) == 1)})"
            reason = f"must be {shape_text}, as lm.functional.parameters makes it, not {shape or type(value).__name__}"
            raise ValueError(f"{name} of {normalizer} {reason}")


def _check_layout(layout: AttentionLayout, q: Tensor, k: Tensor) -> None:
    """Raise ValueError if the positions in `layout` don't fit the queries q and keys k in number or sequences."""
    for name, positions, tensor in (("queries", layout.positions, q), ("keys", layout.key_positions, k)):
        n_sequences = positions.numel() // max(1, positions.size(-1))
        if positions.size(-1) != tensor.size(2) or n_sequences not in (1, q.size(0)):
            raise ValueError(
                f"positions {tuple(positions.shape)} are not those of {tensor.size(2)} {name} in {q.size(0)} sequences"
            )


def _checked_whole_numbers(name: str, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return `tensor` as int64. Raises ValueError: no tensor, no integer dtype, no entries, or a number of axes that is
    not in `axes`.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor of whole numbers, not {type(tensor).__name__}")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.dim() not in axes or not tensor.numel():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} must be whole numbers of {' or '.join(map(str, axes))} axes; it is {dtype_name} "
            f"{tuple(tensor.shape)}"
        )
    return tensor.long()


def _read_options(normalizer: Named) -> Options:
    with PLUGINS.trusted():  # the caller named the normalizer, which may be a plugin
        return build_named(
            SINGLE, dict(normalizer) if isinstance(normalizer, Mapping) else normalizer, "normalizer", "softmax"
        )


@lru_cache(maxsize=256)
def _cached_module(normalizer_json: str, layer: LayerSpec, device: str) -> AsModule:
    """Return the cached module of a normalizer for `torch.func.functional_call`, which replaces its parameters at each
    call.
    """
    with torch.random.fork_rng([]):  # the caller's random state stays as it is
        return AsModule(make_normalizer(_read_options(json.loads(normalizer_json)), layer)).to(device)


@lru_cache(maxsize=256)
def _parameter_shapes(normalizer_json: str, layer: LayerSpec, any_length: bool) -> dict[str, tuple[int | str, ...]]:
    """Return {name: shape} of the parameters; with `any_length`, the word `train_length` replaces sizes that depend on
    this length.
    """
    shapes, longer_shapes = (
        {
            name: tuple(value.shape)
            for name, value in _cached_module(normalizer_json, spec, "cpu").normalizer.named_parameters()
        }
        for spec in (layer, replace(layer, train_length=layer.train_length + any_length))
    )
    return {
        name: tuple(
            size if size == longer_size else "train_length"
            for size, longer_size in zip(shape, longer_shapes[name], strict=True)
        )
        for name, shape in shapes.items()
    }


def make_layout(
    q: Tensor, k: Tensor, positions: Tensor | AttentionLayout | None = None, cu_seqlens: Tensor | None = None
) -> AttentionLayout:
    """Return the `AttentionLayout` of queries q (B, H, T, D) and keys k (B, K, S, D) for all layers of a step;
    arguments as in `attention`.

    Raises ValueError: `positions` and `cu_seqlens` are both given, do not fit the tokens, skip positions, or start
    inside a document.
    """
    queries, keys = q.size(2), k.size(2)
    if positions is not None and cu_seqlens is not None:
        raise ValueError("give positions or cu_seqlens, not both")
    if isinstance(positions, AttentionLayout):
        return positions
    if cu_seqlens is not None:
        token_index = torch.arange(q.size(0) * queries, device=q.device)
        starts = _checked_whole_numbers("cu_seqlens", cu_seqlens, (1,)).to(token_index)
        # waits for the device once
        if not (starts[0] == 0) & (starts[-1] == len(token_index)) & (starts.diff() >= 0).all():
            if starts[-1] != len(token_index):
                raise ValueError(
                    f"cu_seqlens end at {int(starts[-1])}, not at the {len(token_index)} tokens that there are"
                )
            raise ValueError("cu_seqlens must begin at 0 and never fall")
        positions = (token_index - starts[torch.searchsorted(starts, token_index, right=True) - 1]).view(
            q.size(0), queries
        )
    if positions is None:
        if keys < queries:
            raise ValueError(f"{queries} queries are not the last of {keys} tokens")
        return AttentionLayout.continuing(keys - queries, queries, keys, q.device)
    positions = _checked_whole_numbers("positions", positions, (1, 2)).to(q.device)
    positions = positions.view(-1, positions.size(-1))
    if positions.size(1) != queries or queries != keys or (positions[:, 0] != 0).any():
        name = "positions" if cu_seqlens is None else "positions by cu_seqlens"
        raise ValueError(
            f"{name} {tuple(positions.shape)} are not those of {queries} queries and {keys} keys that begin with a "
            "document"
        )
    if ((positions[:, 1:] != 0) & (positions.diff() != 1)).any():
        raise ValueError(
            "positions jump: within a document each is one more than the one before, and another document begins at 0"
        )
    return AttentionLayout.from_positions(positions)
