"""This module calls fused kernels for CUDA GPUs that others maintain: PyTorch's FlexAttention, adasplash (entmax) and
fla-core (stick-breaking).

The first call for a normalizer's options and sizes on a device compares the kernel's output and gradients with exact
attention, on small sequences. If a package is missing, its kernel fails or its results differ, other routes
(`lm.attention.routes`) compute the attention.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import routes
from lm.attention.kernels import kernel_problem, output_and_gradients, without_autocast
from lm.attention.layout import AttentionLayout, keep_uncompiled

FLEX, ADASPLASH, FLA = "torch", "adasplash", "fla"  # the packages that hold the kernels
CHECKED_LENGTH = 256  # tokens of the sequences that the check computes
MAX_FLEX_LENGTH = 2**15  # most tokens of a sequence: the mask by blocks of longer ones takes too much memory to make


def can_compute(normalizer: nn.Module, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> bool:
    """Return whether the kernel of the package `normalizer.gpu_package` works on this device, and can compute attention
    with these arguments.
    """
    is_flex = normalizer.gpu_package == FLEX
    if not normalizer.gpu_package or v.device.type != "cuda" or (is_flex and k.size(2) > MAX_FLEX_LENGTH):
        return False
    if v.dtype != torch.bfloat16 and not (is_flex and v.dtype == torch.float32):
        return False
    is_packed = is_flex and layout.documents is not None and q.size(2) == k.size(2)
    return (layout.mask_is_triangular or is_packed) and not why_unusable(normalizer, q, k, v)


_KERNEL_PROBLEMS: dict[tuple[object, ...], str] = {}  # by normalizer, sizes, dtype and device; empty: none


@keep_uncompiled
def why_unusable(normalizer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Return the reason why the kernel of `normalizer.gpu_package` can't be used for q, k and v; empty if it can.

    The reason is kept for later calls with the same sizes, dtype and device.
    """
    package, name = normalizer.gpu_package, f"{type(normalizer).__name__} {normalizer.options}"
    call = name, q.size(1), *(x.size(-1) for x in (q, k, v)), v.dtype, v.device
    if call not in _KERNEL_PROBLEMS:
        _KERNEL_PROBLEMS[call] = f"{package} is not installed"
        if find_spec(package):
            compare = partial(_compare_with_query_blocks, normalizer, q, k, v)
            _KERNEL_PROBLEMS[call] = kernel_problem(f"the kernel of {package} for {name}", v.device, compare)
    return _KERNEL_PROBLEMS[call]


def _compare_with_query_blocks(
    normalizer: nn.Module, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield a name, the kernel's result and that of `attend_by_query_blocks`, for the output and the gradients of small
    sequences.
    """
    length, leaves = CHECKED_LENGTH, []
    for i, x in enumerate((q, k, v)):
        numbers = torch.arange(q.size(1) * length * x.size(-1), device=v.device).mul(1 + i).sin()
        leaves.append(numbers.view(1, q.size(1), length, -1).to(v.dtype))
    layouts = [AttentionLayout.full(length, v.device)]
    if normalizer.gpu_package == FLEX:
        layouts.append(AttentionLayout.from_document_lengths([100, length - 100], v.device))
    for layout in layouts:
        pair = (
            output_and_gradients(partial(route, layout=layout), leaves, leaves[2].cos())
            for route in (normalizer.gpu_forward, partial(routes.attend_by_query_blocks, normalizer))
        )
        yield from zip(("output", "dq", "dk", "dv"), *pair, strict=True)


# ---------------------------------------------------------------- FlexAttention


@keep_uncompiled
def flex_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float | None = None,
    logit_map: nn.Module | None = None,
    window: int | None = None,
) -> Tensor:
    """Return softmax(s) v, (B, H, T, E) in the dtype of `v`, by FlexAttention.

    The scores s are `scale` x q.k (None: 1 / sqrt(D)), which `logit_map.map_logits` then changes if it is given. With
    `window` a query sees only its latest `window` keys.
    """
    attend, _ = _flex_functions()
    score_mod = _make_score_mod(logit_map) if logit_map else None
    with without_autocast(v.device):
        mask = _block_mask(layout, q.size(2), window)
        return attend(q.to(v.dtype), k.to(v.dtype), v, score_mod=score_mod, block_mask=mask, scale=scale)


@cache
def _flex_functions() -> tuple[Callable, Callable]:
    """Return two functions of PyTorch: FlexAttention, compiled, and the one that makes masks for it."""
    flex = import_module("torch.nn.attention.flex_attention")
    return torch.compile(flex.flex_attention), flex.create_block_mask


_SCORE_MODS: dict[tuple[type, str], Callable] = {}  # FlexAttention's `score_mod`, by class and options of a normalizer


def _make_score_mod(logit_map: nn.Module) -> Callable:
    """Return the function by which FlexAttention changes scores: it computes `logit_map.map_logits`.

    Each such function is compiled. So layers share one if their maps agree in class and options.
    """

    def map_logit(z: Tensor, sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit_map.map_logits(z, logit_map.distance_coefficients((query - key).clamp(min=0).float()))

    return _SCORE_MODS.setdefault((type(logit_map), repr(logit_map.options)), map_logit)


def _block_mask(layout: AttentionLayout, length: int, window: int | None) -> object:
    """Return FlexAttention's mask of a layout. It is made once and used in all layers.

    Without packed documents, one mask serves all layouts of the same length and window.

    window: number of the latest keys that a query sees; None: all.
    """
    documents = layout.documents
    if documents is None:
        return _make_mask(length, window, layout.positions.device)
    if window not in layout.block_mask_cache:
        layout.block_mask_cache[window] = _make_mask.__wrapped__(length, window, documents.device, documents)
    return layout.block_mask_cache[window]


@cache
def _make_mask(length: int, window: int | None, device: torch.device, documents: Tensor | None = None) -> object:
    """Make FlexAttention's causal mask for `length` tokens.

    documents: index of each token's document, (B, T); None: one document per sequence.
    """

    def is_visible(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_same = documents is None or documents[sequence, query] == documents[sequence, key]
        return (key <= query) & (query - key < (window or length)) & is_same

    count = len(documents) if documents is not None and len(documents) > 1 else None
    return _flex_functions()[1](is_visible, count, None, length, length, device, _compile=True)


# ---------------------------------------------------------------- kernels of packages


@keep_uncompiled
def entmax(q: Tensor, k: Tensor, v: Tensor, alpha: float) -> Tensor:
    """Return alpha-entmax(q.k / sqrt(D)) v with a causal mask, (B, H, T, E) in the dtype of `v`, by adasplash.

    adasplash takes powers of 2 as sizes. So tokens are appended that no query sees, and dimensions of zeros.
    """
    size, width, length = q.size(-1), v.size(-1), q.size(2)
    padded_size = max(16, 1 << (max(size, width) - 1).bit_length())
    padded_length = max(64, 1 << (length - 1).bit_length())
    q = q * math.sqrt(padded_size / size)  # the kernel divides by the root of the padded size
    q, k, v = (
        F.pad(x.to(v.dtype), (0, padded_size - x.size(-1), 0, padded_length - length)).contiguous() for x in (q, k, v)
    )
    with without_autocast(v.device):
        output = import_module(ADASPLASH).adasplash(q, k, v, alpha=alpha, is_causal=True)
    return output[:, :, :length, :width].to(v.dtype)


@keep_uncompiled
def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return stick-breaking attention's output, (B, H, T, E) in the dtype of `v`, by fla-core."""
    kernel = import_module("fla.ops.stickbreaking_attn").parallel_stickbreaking_attn
    with without_autocast(v.device):
        output, _ = kernel(*(x.to(v.dtype).transpose(1, 2).contiguous() for x in (q, k, v)))
    return output.transpose(1, 2)
