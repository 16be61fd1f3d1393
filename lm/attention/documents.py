"""The route of rows that hold several documents, which don't see each other."""

from collections.abc import Callable

import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout


@torch.compiler.disable
def by_documents(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionLayout], Tensor], q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout
) -> Tensor:
    """What `attend(q, k, v, layout)` gives where a row holds several documents, (B, H, T, E): each by the route it would take alone.

    Documents of like size (up to a factor of 2) lie side by side, padded at their ends, where no query of theirs looks: there is no
    T x T mask, and time grows with the documents' lengths. At most log2(T) calls.
    """
    b, _, t, _ = q.shape
    if b not in layout.grouped:  # the same for all layers
        layout.grouped[b] = _document_groups(layout, b)
    places, groups = layout.grouped[b]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, D)
    outs = []
    for index, alone in groups:
        parts = (x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for x in flat)
        outs.append(attend(*parts, alone).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, places).unflatten(0, (b, t)).transpose(1, 2)


def _document_groups(layout: AttentionLayout, n_rows: int) -> tuple[Tensor, list[tuple[Tensor, AttentionLayout]]]:
    """Where each token of the flattened rows (B T,) stands in the groups' outputs one after the other; and of each group the tokens
    of its documents (N, P) and their rows."""
    device = layout.positions.device
    positions = layout.positions.expand(n_rows, -1).flatten().cpu()
    lengths = layout.lengths.expand_as(layout.positions).expand(n_rows, -1).flatten()
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
        groups.append((index, AttentionLayout(at, at, lengths[index[:, :1]], causal=True)))
    return places.to(device), groups
