"""Exact attention without the T x S matrix of weights, for normalizers that the fused softmax kernel does not serve.

Two routes, both with O(T x block) memory forward and backward: `by_query_blocks` takes any definition and
recomputes it in the backward pass; `pointwise` serves weights that depend on their own score alone, tile by tile,
on CUDA by a Triton kernel.
Shapes: B rows, H heads, T queries, S keys, D head size.
"""

import math
import os
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.layout import Rows

if TYPE_CHECKING:
    from lm.attention.normalizer import Normalizer

BLOCK_WEIGHTS = 2**21  # weights held at a time by `by_query_blocks`
TILE = 256  # queries and keys of one tile of `pointwise`
SMALLEST_SUM = 1e-24  # rows that are to be divided by a smaller sum have weights 0
LARGEST_HEAD = 128  # dimensions of a key that the Triton kernel holds
OLDEST_TRITON = (3, 4)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which the dtypes of operands alone decide what is computed in."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


class _Definition(nn.Module):
    """A normalizer's dense weights times values, as a module's `forward`, so that its parameters can be passed in."""

    def __init__(self, normalizer: "Normalizer"):
        super().__init__()
        self.normalizer = normalizer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        return self.normalizer.weights(q, k, rows).to(v.dtype) @ v


def _blocks(q: Tensor, k: Tensor, rows: Rows) -> list[tuple[int, int, int]]:
    """(first query, last query + 1, number of keys to look at) of each block.

    Keys that causal queries can't see are left out, in eighths of the row: blocks of few different sizes reuse memory.
    """
    length, keys = q.size(2), k.size(2)
    step, eighth = max(1, BLOCK_WEIGHTS // (q.size(0) * q.size(1) * keys)), -(-keys // 8)
    ends = [(a, min(a + step, length)) for a in range(0, length, step)]
    return [(a, b, min(-(-b // eighth) * eighth, keys) if rows.causal else keys) for a, b in ends]


class _ByQueryBlocks(torch.autograd.Function):
    """Forward block by block without a graph; the backward pass makes each block's graph again.

    Both without autocast, which does not reach the backward pass: the dtypes given decide alone, so that it recomputes the same function.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, definition: _Definition, rows: Rows, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.definition, ctx.rows = definition, rows
        names = [name for name, _ in definition.named_parameters()]
        values = dict(zip(names, parameters, strict=True))
        with without_autocast(v.device):
            parts = [
                torch.func.functional_call(definition, values, (q[:, :, a:b], k[:, :, :s], v[:, :, :s], rows.part(a, b, s)))
                for a, b, s in _blocks(q, k, rows)
            ]
        return torch.cat(parts, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *parameters = ctx.saved_tensors
        names = [name for name, _ in ctx.definition.named_parameters()]
        grads = [torch.zeros_like(x) for x in (q, k, v, *parameters)]
        for a, b, s in _blocks(q, k, ctx.rows):
            leaves = [x.detach().requires_grad_() for x in (q[:, :, a:b], k[:, :, :s], v[:, :, :s], *parameters)]
            with torch.enable_grad(), without_autocast(v.device):
                values = dict(zip(names, leaves[3:], strict=True))
                out = torch.func.functional_call(ctx.definition, values, (*leaves[:3], ctx.rows.part(a, b, s)))
                found = torch.autograd.grad(out, leaves, grad[:, :, a:b], allow_unused=True)
            places = (grads[0][:, :, a:b], grads[1][:, :, :s], grads[2][:, :, :s], *grads[3:])
            for place, value in zip(places, found, strict=True):
                if value is not None:
                    place += value
        return None, None, *grads


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float | None = None, mask: Tensor | None = None) -> Tensor:
    """softmax(q.k scale) v on the fused kernel, (B, H, T, E) in the dtype of `v`; `scale`: 1 / sqrt(D) unless given.

    The kernel wants values as wide as keys: wider ones are cut into pieces that are heads of their own.
    `mask`: another than that of `rows`.
    """
    size, width = q.size(-1), v.size(-1)
    scale = scale or 1 / math.sqrt(size)
    pieces = -(-width // size)
    if width != size:
        v = F.pad(v, (0, pieces * size - width)).unflatten(-1, (pieces, size)).transpose(2, 3).flatten(1, 2)  # (B, H x pieces, S, D)
        q, k = q.repeat_interleave(pieces, 1), k.repeat_interleave(pieces, 1)
    causal = rows.causal and mask is None
    mask = None if causal else rows.visible() if mask is None else mask
    out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=causal, scale=scale)
    return out if width == size else out.unflatten(1, (-1, pieces)).transpose(2, 3).flatten(-2)[..., :width]


@torch.compiler.disable
def by_query_blocks(normalizer: "Normalizer", q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """weights(q, k) @ v by the normalizer's own definition, (B, H, T, D) in the dtype of `v`.

    Holds `BLOCK_WEIGHTS` weights at a time; gradients reach q, k, v and the normalizer's parameters.
    """
    return _ByQueryBlocks.apply(_Definition(normalizer), rows, q, k, v, *normalizer.parameters())


# ---------------------------------------------------------------- documents that don't see each other


@torch.compiler.disable
def by_documents(normalizer: "Normalizer", q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Weights x values where a row holds several documents, (B, H, T, E): each by the route it would take alone.

    Documents of like size (up to a factor of 2) lie side by side, padded at their ends, where no query of theirs looks: there is no
    T x T mask, and time grows with the documents' lengths. At most log2(T) calls of the normalizer.
    """
    b, _, t, _ = q.shape
    if b not in rows.grouped:  # the same for all layers
        rows.grouped[b] = _document_groups(rows, b)
    places, groups = rows.grouped[b]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, D)
    outs = []
    for index, alone in groups:
        parts = (x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for x in flat)
        outs.append(normalizer(*parts, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, places).unflatten(0, (b, t)).transpose(1, 2)


def _document_groups(rows: Rows, n_rows: int) -> tuple[Tensor, list[tuple[Tensor, Rows]]]:
    """Where each token of the flattened rows (B T,) stands in the groups' outputs one after the other; and of each group the tokens
    of its documents (N, P) and their rows."""
    device = rows.positions.device
    positions = rows.positions.expand(n_rows, -1).flatten().cpu()
    lengths = rows.lengths.expand_as(rows.positions).expand(n_rows, -1).flatten()
    starts = (positions == 0).nonzero().flatten()
    sizes = torch.diff(starts, append=torch.tensor([len(positions)]))
    classes = sizes.clamp(min=16).double().log2().ceil()
    places, groups, before = torch.empty_like(positions), [], 0
    for size_class in classes.unique():
        first, size = starts[classes == size_class].unsqueeze(1), sizes[classes == size_class].unsqueeze(1)
        place = torch.arange(int(size.max()))
        index = first + torch.minimum(place, size - 1)
        real = place < size
        places[index[real]] = before + torch.arange(index.numel()).view_as(index)[real]
        before += index.numel()
        index = index.to(device)
        at = place.to(device).expand_as(index)
        groups.append((index, Rows(at, at, lengths[index[:, :1]], causal=True)))
    return places.to(device), groups


# ---------------------------------------------------------------- weights that depend on their own score alone


class Pointwise(ABC):
    """A function f of a score, plain and for tiles; `kind` names it to the Triton kernels."""

    kind: str

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """f(z), the definition."""

    @abstractmethod
    def value_(self, z: Tensor) -> Tensor:
        """f(z); overwrites z."""

    @abstractmethod
    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(f(z), grad x f'(z)); overwrites z and grad."""


class Relu(Pointwise):
    """max(z, 0)."""

    kind = "relu"

    def __call__(self, z: Tensor) -> Tensor:
        return z.relu()

    def value_(self, z: Tensor) -> Tensor:
        return z.relu_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return z.relu_(), grad.mul_(z > 0)


class Relu2(Pointwise):
    """max(z, 0)^2."""

    kind = "relu2"

    def __call__(self, z: Tensor) -> Tensor:
        return z.relu().square()

    def value_(self, z: Tensor) -> Tensor:
        return z.relu_().square_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        z.relu_()
        grad.mul_(z).mul_(2)
        return z.square_(), grad


class Sigmoid(Pointwise):
    """1 / (1 + e^-z)."""

    kind = "sigmoid"

    def __call__(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def value_(self, z: Tensor) -> Tensor:
        return z.sigmoid_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        z.sigmoid_()
        grad.mul_(z)
        return z, grad.addcmul_(grad, z, value=-1)


def _tiles(length: int) -> list[tuple[int, int]]:
    return [(a, min(a + TILE, length)) for a in range(0, length, TILE)]


class _Pointwise(torch.autograd.Function):
    """Causal tiles of f(q.k + shift) v on (N, T, D) tensors, N = B x H; shift (N, T) or None; `over_sum`: divided by each row's sum.

    Scores, f and sums are in fp32 (or wider), weights as wide as v.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, f: Pointwise, over_sum: bool, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None) -> Tensor:
        wide = torch.promote_types(v.dtype, torch.float32)
        out = torch.empty(v.shape, dtype=wide if over_sum else v.dtype, device=v.device)
        sums = torch.empty((*v.shape[:2], 1), dtype=wide, device=v.device) if over_sum else None
        qw, kw = q.to(wide), k.to(wide)
        summed = v.to(out.dtype)  # of rows over their sums nothing is rounded: their gradients are what is left of a difference
        with without_autocast(v.device):  # as in the backward pass
            for a, b in _tiles(q.size(1)):
                total = torch.zeros(v.size(0), b - a, v.size(2), dtype=wide, device=v.device)
                row_sum = torch.zeros(v.size(0), b - a, 1, dtype=wide, device=v.device)
                for c, d in _tiles(b):
                    w = f.value_(_scores(qw, kw, shift, a, b, c, d))
                    w = (w.tril_() if c == a else w).to(out.dtype)
                    total += w @ summed[:, c:d]
                    if over_sum:
                        row_sum += w.sum(-1, keepdim=True)
                if over_sum:
                    sums[:, a:b] = row_sum.masked_fill_(row_sum < SMALLEST_SUM, torch.inf)
                    total /= row_sum
                out[:, a:b] = total
        ctx.save_for_backward(q, k, v, shift, *((out, sums) if over_sum else ()))
        ctx.f = f
        return out.to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, shift, *of_sums = ctx.saved_tensors
        grad, mean = gradient_of_sums(grad, v.dtype, *of_sums) if of_sums else (grad, None)
        wide = torch.promote_types(v.dtype, torch.float32)
        qw, kw, vw, gw = (x.to(wide) for x in (q, k, v, grad))
        dq, dk, dv = (torch.zeros_like(x) for x in (qw, kw, vw))
        dshift = None if shift is None else torch.zeros_like(shift)
        with without_autocast(v.device):
            for a, b in _tiles(q.size(1)):
                for c, d in _tiles(b):
                    dw = gw[:, a:b] @ vw[:, c:d].transpose(1, 2)
                    if mean is not None:
                        dw -= mean[:, a:b]
                    w, dz = ctx.f.derivative_(_scores(qw, kw, shift, a, b, c, d), dw)
                    if c == a:
                        w, dz = w.tril_(), dz.tril_()
                    if dshift is not None:
                        dshift[:, a:b] += dz.sum(-1)
                    w, dz = w.to(v.dtype), dz.to(v.dtype)
                    dq[:, a:b] += dz @ k[:, c:d]
                    dk[:, c:d] += dz.transpose(1, 2) @ q[:, a:b]
                    dv[:, c:d] += w.transpose(1, 2) @ grad[:, a:b]
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dshift


def _scores(q: Tensor, k: Tensor, shift: Tensor | None, a: int, b: int, c: int, d: int) -> Tensor:
    """q.k + shift of queries a to b and keys c to d, (N, b - a, d - c)."""
    z = q[:, a:b] @ k[:, c:d].transpose(1, 2)
    return z if shift is None else z.add_(shift[:, a:b].unsqueeze(-1))


def gradient_of_sums(grad: Tensor, dtype: torch.dtype, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """For rows divided by their sums, (N, T, 1), or by infinity: the gradient of the undivided output, in `dtype`, and its mean over a
    row's weights, (N, T, 1), to be subtracted from each weight's own.

    Where one key has all the weight the two cancel, so both are made of the same rounded gradient and of `out` in fp32.
    """
    grad = (grad / sums).to(dtype)
    return grad, (grad.to(out.dtype) * out).sum(-1, keepdim=True)


def tiles(f: Pointwise, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None = None, over_sum: bool = False) -> Tensor:
    """`pointwise` on any device, holding one tile of weights a head."""
    if shift is not None:
        shift = shift.to(torch.promote_types(v.dtype, torch.float32)).expand(q.shape[:3]).flatten(0, 1)
    return _Pointwise.apply(f, over_sum, *(x.flatten(0, 1) for x in (q, k, v)), shift).unflatten(0, q.shape[:2])


def interpreted() -> bool:
    """True if Triton's kernels are run by its interpreter, on any device: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_tiles(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Why `pointwise` takes tiles instead of the Triton kernel, for keys of `size` dimensions; empty if it takes the kernel."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the Triton kernel has no {dtype}"
    if size > LARGEST_HEAD:
        return f"the Triton kernel has no head size over {LARGEST_HEAD}"
    if device.type != "cuda" and not interpreted():
        return "the Triton kernel needs a CUDA GPU"
    return _unusable(device)


@cache
def _unusable(device: torch.device) -> str:
    """What keeps this machine's Triton, or this device, from running the kernel; empty if nothing."""
    if not find_spec("triton"):
        return "triton is not installed"
    import triton

    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:  # 3.2 aborts, compiling for wide values
        return f"the Triton kernel needs triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}, this is {triton.__version__}"
    if interpreted():
        return ""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernel needs a GPU of compute capability 8.0"
    return _trial(device)


def _trial(device: torch.device) -> str:
    """Run the Triton kernel on a device: what goes wrong, which is also a warning; empty if nothing.

    Triton compiles at the first use, for which the machine may lack a C compiler or Python's headers.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            *x, grad = torch.arange(4 * 80 * 16.0, device=device).sin().bfloat16().view(4, 1, 1, 80, 16)
            shift = x[0][..., 0].float()
            ways = product((Relu2(), Relu(), Sigmoid()), (None, shift), (False, True))
            wrong = [f.kind for f, b, over_sum in ways if not _agree(f, x, b, over_sum, grad)]
        if not wrong:
            return ""
        problem = f"its results are not those of the tiles ({', '.join(dict.fromkeys(wrong))})"
    except Exception as error:  # whatever Triton, the compilers it calls or the driver may raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    warnings.warn(f"the Triton kernel does not work on {device}, tiles take its place: {problem}", stacklevel=2)
    return f"the Triton kernel does not work here: {problem}"


def _agree(f: Pointwise, x: list[Tensor], shift: Tensor | None, over_sum: bool, grad: Tensor) -> bool:
    """True if the Triton kernel gives what the tiles give, forward and backward, for bf16 `x` (q, k, v)."""
    from lm.attention import triton_kernels

    leaves = [one.detach().requires_grad_() for one in (*x, *([] if shift is None else [shift]))]
    outs = [route(f, *leaves[:3], *(leaves[3:] or [None]), over_sum) for route in (triton_kernels.pointwise, tiles)]
    found, expected = ((out, *torch.autograd.grad(out, leaves, grad)) for out in outs)
    return all(bool((a - b).abs().max() <= b.abs().max() / 32) for a, b in zip(found, expected, strict=True))


@torch.compiler.disable
def pointwise(f: Pointwise, q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None = None, over_sum: bool = False) -> Tensor:
    """sum_{j <= i} f(q_i.k_j + shift_i) v_j, (B, H, T, E) in the dtype of `v`, by the Triton kernel or by tiles (`why_tiles`).

    q, k: (B, H, T, D), v: (B, H, T, E), all of one dtype; shift: fp32, broadcastable to (B, H, T), or None for 0.
    Scores are not scaled: scale q. `over_sum`: each row divided by its sum of f, which f must keep from being negative.
    """
    if why_tiles(q.device, q.dtype, q.size(-1)):
        return tiles(f, q, k, v, shift, over_sum)
    from lm.attention import triton_kernels

    return triton_kernels.pointwise(f, q, k, v, shift, over_sum)
