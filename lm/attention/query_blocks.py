"""Attention from the definition: some queries at a time, O(T x block) memory, recomputed in the backward pass.

Shapes: B sequences, H heads, T queries, S keys, D head size, E width of the values.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.layout import AttentionLayout
from lm.attention.precision import executing_device, without_autocast

BLOCK_WEIGHTS = 2**21  # weights held at a time on a CPU, where larger blocks leave the cache, and at least
MOST_WEIGHTS = 2**27  # on a GPU, which wants large products: some tens of blocks a step of a model of 124 M parameters
WEIGHT_BYTES = 64  # more than the backward pass of any definition takes for a weight: softpick's takes 42
MEMORY_PART = 16  # a block takes at most this part of a GPU's free memory: most of it is for what a step keeps


def block_weights(device: torch.device) -> int:
    """Weights that a block holds on a device: by the memory that a GPU has free at the first call in this process, a power of two."""
    return _of_gpu(device.index) if device.type == "cuda" and torch.cuda.is_available() else BLOCK_WEIGHTS


@cache
def _of_gpu(index: int | None) -> int:
    """`block_weights` of a GPU, kept: blocks of other sizes would round sums otherwise. None: the current GPU."""
    if index is None:
        return _of_gpu(torch.cuda.current_device())
    free, _ = torch.cuda.mem_get_info(index)
    weights = free // (MEMORY_PART * WEIGHT_BYTES)
    return min(max(2 ** (weights.bit_length() - 1) if weights else 0, BLOCK_WEIGHTS), MOST_WEIGHTS)


def _blocks(q: Tensor, k: Tensor, layout: AttentionLayout) -> list[tuple[int, int, int]]:
    """(first query, last query + 1, number of keys) of each block.

    Keys that causal queries can't see are left out, in eighths of the sequence: blocks of few different sizes reuse memory.
    """
    length, keys = q.size(2), k.size(2)
    step, eighth = max(1, block_weights(executing_device(q)) // (q.size(0) * q.size(1) * keys)), -(-keys // 8)
    ends = [(a, min(a + step, length)) for a in range(0, length, step)]
    return [(a, b, min(-(-b // eighth) * eighth, keys) if layout.causal else keys) for a, b in ends]


class _ByQueryBlocks(torch.autograd.Function):
    """Forward block by block without a graph; the backward pass builds each block's graph again.

    Both without autocast, which does not reach the backward pass: the dtypes given decide alone, so that it recomputes the same function.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, definition: nn.Module, layout: AttentionLayout, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.definition, ctx.layout = definition, layout
        names = [name for name, _ in definition.named_parameters()]
        values = dict(zip(names, parameters, strict=True))
        with without_autocast(v.device):
            parts = [
                torch.func.functional_call(definition, values, (q[:, :, a:b], k[:, :, :s], v[:, :, :s], layout.select(slice(a, b), s)))
                for a, b, s in _blocks(q, k, layout)
            ]
        return torch.cat(parts, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *parameters = ctx.saved_tensors
        names = [name for name, _ in ctx.definition.named_parameters()]
        given = (q, k, v, *parameters)
        grads = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in given]  # sums over the blocks
        for a, b, s in _blocks(q, k, ctx.layout):
            leaves = [x.detach().requires_grad_() for x in (q[:, :, a:b], k[:, :, :s], v[:, :, :s], *parameters)]
            with torch.enable_grad(), without_autocast(v.device):
                values = dict(zip(names, leaves[3:], strict=True))
                out = torch.func.functional_call(ctx.definition, values, (*leaves[:3], ctx.layout.select(slice(a, b), s)))
                block_grads = torch.autograd.grad(out, leaves, grad[:, :, a:b], allow_unused=True)
            slices = (grads[0][:, :, a:b], grads[1][:, :, :s], grads[2][:, :, :s], *grads[3:])
            for total, value in zip(slices, block_grads, strict=True):
                if value is not None:
                    total += value
        return None, None, *(total.to(x.dtype) for total, x in zip(grads, given, strict=True))


@torch.compiler.disable
def by_query_blocks(definition: nn.Module, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout) -> Tensor:
    """The output of `definition(q, k, v, layout)`, (B, H, T, E), for some queries at a time, holding `block_weights` weights.

    Gradients reach q, k, v and the definition's parameters.
    """
    return _ByQueryBlocks.apply(definition, layout, q, k, v, *definition.parameters())
