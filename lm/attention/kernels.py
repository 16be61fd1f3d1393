"""Exact attention without the T x S matrix of weights, for normalizers that the fused softmax kernel does not serve.

Two routes, both with O(T x block) memory forward and backward: `by_query_blocks` takes any definition and
recomputes it in the backward pass; `pointwise` serves weights that depend on their own score alone, tile by tile.
Shapes: B rows, H heads, T queries, S keys, D head size.
"""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.lengths import Rows

if TYPE_CHECKING:
    from lm.attention.normalizers import Normalizer

BLOCK_WEIGHTS = 2**21  # weights held at a time by `by_query_blocks`
TILE = 256  # queries and keys of one tile of `pointwise`


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
    """Forward block by block without a graph; the backward pass makes each block's graph again."""

    @staticmethod
    def forward(ctx: FunctionCtx, definition: _Definition, rows: Rows, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.definition, ctx.rows = definition, rows
        names = [name for name, _ in definition.named_parameters()]
        values = dict(zip(names, parameters, strict=True))
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
            with torch.enable_grad():
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
    places, groups = _document_groups(rows, b)
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
    """A function f of a score, plain and for tiles."""

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

    def __call__(self, z: Tensor) -> Tensor:
        return z.relu()

    def value_(self, z: Tensor) -> Tensor:
        return z.relu_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return z.relu_(), grad.mul_(z > 0)


class Relu2(Pointwise):
    """max(z, 0)^2."""

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
    """Causal tiles of f(q.k) v on (N, T, D) tensors, N = B x H; sums in fp32 (or wider)."""

    @staticmethod
    def forward(ctx: FunctionCtx, f: Pointwise, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.f = f
        wide = torch.promote_types(v.dtype, torch.float32)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        for a, b in _tiles(q.size(1)):
            total = torch.zeros(v.size(0), b - a, v.size(2), dtype=wide, device=v.device)
            for c, d in _tiles(b):
                w = f.value_(q[:, a:b] @ k[:, c:d].transpose(1, 2))
                total += (w.tril_() if c == a else w) @ v[:, c:d]
            out[:, a:b] = total
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        for a, b in _tiles(q.size(1)):
            qa, ga = q[:, a:b], grad[:, a:b]
            for c, d in _tiles(b):
                w, dz = ctx.f.derivative_(qa @ k[:, c:d].transpose(1, 2), ga @ v[:, c:d].transpose(1, 2))
                if c == a:
                    w, dz = w.tril_(), dz.tril_()
                dq[:, a:b] += dz @ k[:, c:d]
                dk[:, c:d] += dz.transpose(1, 2) @ qa
                dv[:, c:d] += w.transpose(1, 2) @ ga
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@torch.compiler.disable
def pointwise(f: Pointwise, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sum_{j <= i} f(q_i.k_j) v_j, (B, H, T, D) in the dtype of `v`; q, k: (B, H, T, D), v: (B, H, T, E), all of one dtype.

    Scores are not scaled: scale q. Holds one tile of weights a head.
    """
    return _Pointwise.apply(f, *(x.flatten(0, 1) for x in (q, k, v))).unflatten(0, q.shape[:2])
