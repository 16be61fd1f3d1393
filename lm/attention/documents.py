"""Attention in sequences that hold several documents, which don't see each other."""

from collections.abc import Callable

import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout


@torch.compiler.disable
def by_documents(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionLayout], Tensor], q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout
) -> Tensor:
    """`attend(q, k, v, layout)` where a sequence holds several documents, (B, H, T, E): each document computed as it would be alone.

    Documents of similar size (up to a factor of 2) are batched, padded at their ends, where none of their queries looks: there is no
    T x T mask, and time grows with the documents' lengths. At most log2(T) calls.
    """
    b, _, t, _ = q.shape
    if b not in layout.document_groups:  # the same for all layers
        layout.document_groups[b] = _document_groups(layout, b)
    index_in_outputs, groups = layout.document_groups[b]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, D)
    outs = []
    for index, alone in groups:
        parts = (x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for x in flat)
        outs.append(attend(*parts, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, index_in_outputs).unflatten(0, (b, t)).transpose(1, 2)


def _document_groups(layout: AttentionLayout, n_sequences: int) -> tuple[Tensor, list[tuple[Tensor, AttentionLayout]]]:
    """The index of each token of the flattened sequences (B T,) in the groups' concatenated outputs; and for each group the index of
    its documents' tokens (N, P) and their layout."""
    device = layout.positions.device
    positions = layout.positions.expand(n_sequences, -1).flatten().cpu()
    lengths = layout.lengths.expand_as(layout.positions).expand(n_sequences, -1).flatten()
    starts = (positions == 0).nonzero().flatten()
    sizes = torch.diff(starts, append=torch.tensor([len(positions)]))
    classes = sizes.clamp(min=16).double().log2().ceil()
    index_in_outputs, groups, before = torch.empty_like(positions), [], 0
    for size_class in classes.unique():
        first, size = starts[classes == size_class].unsqueeze(1), sizes[classes == size_class].unsqueeze(1)
        offset = torch.arange(int(size.max()))
        index = first + torch.minimum(offset, size - 1)
        real = offset < size
        index_in_outputs[index[real]] = before + torch.arange(index.numel()).view_as(index)[real]
        before += index.numel()
        index = index.to(device)
        at = offset.to(device).expand_as(index)
        groups.append((index, AttentionLayout(at, at, lengths[index[:, :1]], causal=True)))
    return index_in_outputs.to(device), groups
