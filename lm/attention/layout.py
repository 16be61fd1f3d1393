"""An attention layout holds the positions of queries and keys in their documents. Positions and document lengths alone
determine the row length n in the formulas of normalizers, by default the number of keys that a query sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import NamedTuple

import torch
from torch import Tensor


def keep_uncompiled(function: Callable) -> Callable:
    """Return `function` in a form that `torch.compile` leaves out of its graphs. Unlike `torch.compiler.disable`, this
    does not import the compiler, which takes seconds.
    """
    excluded_function = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)

    @wraps(function)
    def call(*arguments: object, **named_arguments: object) -> object:
        return (excluded_function if torch.compiler.is_compiling() else function)(*arguments, **named_arguments)

    return call


@dataclass(frozen=True)
class AttentionLayout:
    """An attention layout gives the positions, in their documents, of the queries and keys of one attention call.

    Every normalizer takes n from a layout, never from a tensor's width. So a prefix, a padded batch, a packed sequence
    and a decoding step give the same n for the same token.
    """

    positions: Tensor  # (T,) or (B, T) int64, 0-based position of each query in its document
    key_positions: Tensor  # (S,) or (B, S) int64, 0-based position of each key in its document
    document_lengths: Tensor  # tokens of the query's document, int64, broadcastable to `positions`
    # true: queries and keys are the same tokens of one document per sequence, in order
    mask_is_triangular: bool
    # int64, index of each query's document, shaped as `positions`; None: one document per sequence
    documents: Tensor | None = None
    key_documents: Tensor | None = None  # int64, index of each key's document, shaped as `key_positions`
    # true: queries are the last of the keys' tokens, of one document per sequence: the mask is the triangle's last rows
    mask_is_triangle_end: bool = False

    @cached_property
    def document_group_cache(self) -> dict[int, "DocumentGroups"]:
        """Cache of the groups of documents that `attend_by_document` computes together, by the number of sequences in
        the batch.
        """
        return {}

    @cached_property
    def block_mask_cache(self) -> dict[int | None, object]:
        """Cache of FlexAttention's masks of packed documents (`lm.attention.gpu_kernels`), by the window's number of
        keys.
        """
        return {}

    @classmethod
    def full(cls, length: int, device: torch.device | str = "cpu") -> "AttentionLayout":
        """Return the layout of one document of `length` tokens, each both a query and a key."""
        return cls.continuation(0, length, length, device)

    @classmethod
    def from_document_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "AttentionLayout":
        """Return the layout of one sequence that holds documents of `lengths` tokens one after the other. A token sees
        its own document only.
        """
        return cls.from_positions(torch.cat([torch.arange(length, device=device) for length in lengths]).unsqueeze(0))

    @classmethod
    def from_positions(cls, positions: Tensor) -> "AttentionLayout":
        """Return the layout of sequences whose documents don't see each other. `positions` (B, T) begin at 0 in each
        document and sequence.
        """
        documents = (positions == 0).cumsum(-1)
        sizes = torch.zeros(len(positions), positions.size(1) + 1, dtype=torch.int64, device=positions.device)
        sizes.scatter_add_(1, documents, torch.ones_like(documents))
        return cls(positions, positions, sizes.gather(1, documents), False, documents, documents)

    @classmethod
    def continuation(
        cls, start: int, n_queries: int, length: int, device: torch.device | str = "cpu"
    ) -> "AttentionLayout":
        """Return the layout of `n_queries` queries from token `start` on, and of all keys up to the last query.

        The full document has `length` tokens.
        """
        keys = torch.arange(start + n_queries, device=device)
        return cls(keys[start:], keys, torch.full((n_queries,), length, device=device), mask_is_triangular=start == 0)

    @classmethod
    def from_4d_mask(
        cls, mask: Tensor | None, n_cached: int, n_queries: int, device: torch.device
    ) -> "AttentionLayout":
        """Return the layout that a mask for softmax kernels describes, for `n_queries` queries that follow `n_cached`
        cached keys.

        mask: (B, 1, T, S), bool or additive, in which padding and other documents are hidden; None: one document.
        Raises ValueError: the mask is not the causal mask of whole documents, or adds a bias to scores.
        """
        if mask is None:
            return cls.continuation(n_cached, n_queries, n_cached + n_queries, device)
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool and bool(mask.masked_fill(~visible, 0).any()):
            raise ValueError("lm's normalizers add no bias to scores: this mask has one; use a model without it")
        visible = visible[:, 0]  # (B, T, S)
        positions = visible.sum(-1) - 1
        if n_queries == visible.size(2):  # padding, which does not see itself, gets position 0
            is_token = visible.diagonal(dim1=1, dim2=2)
            positions = positions * is_token
            layout = cls.from_positions(positions)
            is_next = positions == torch.nn.functional.pad(positions[:, :-1] + 1, (1, 0))
            is_causal = ((positions == 0) | is_next).all()
        else:
            is_token, positions = positions >= 0, positions.clamp(min=0)
            is_key = visible[:, -1]  # of the document that goes on
            documents = torch.ones_like(positions), is_key.long()
            layout = cls(positions, is_key.cumsum(-1) - 1, positions[:, -1:] + 1, False, *documents)
            is_causal = True
        if not bool(is_causal & (layout.visible()[:, 0] == visible)[is_token].all()):
            raise ValueError(
                "lm's normalizers compute causal masks of whole documents alone: this mask has a window, a prefix or "
                "gaps"
            )
        return layout

    def select(self, queries: slice | Tensor, n_keys: int) -> "AttentionLayout":
        """Return the layout of the queries with indices `queries` in the sequence, and of the first `n_keys` keys."""
        documents = None if self.documents is None else self.documents[..., queries]
        key_documents = None if self.key_documents is None else self.key_documents[..., :n_keys]
        lengths = self.document_lengths.expand_as(self.positions)[..., queries]
        return AttentionLayout(
            self.positions[..., queries], self.key_positions[..., :n_keys], lengths, False, documents, key_documents
        )

    def queries_from(self, first: int) -> "AttentionLayout":
        """Return the layout of all queries from index `first` in the sequence on, and of all keys."""
        return replace(
            self.select(slice(first, None), self.key_positions.size(-1)), mask_is_triangle_end=self.mask_is_triangular
        )

    def visible(self) -> Tensor:
        """Return the mask of the keys that each query sees: (T, S) or (B, 1, T, S) bool."""
        mask = self.key_positions.unsqueeze(-2) <= self.positions.unsqueeze(-1)
        if self.documents is not None:
            mask = mask & (self.key_documents.unsqueeze(-2) == self.documents.unsqueeze(-1))
        return mask if mask.dim() == 2 else mask.unsqueeze(1)

    def distance(self) -> Tensor:
        """Return the number of tokens from each key to each query: (T, S) or (B, 1, T, S) fp32, negative for keys after
        the query.
        """
        distance = (self.positions.unsqueeze(-1) - self.key_positions.unsqueeze(-2)).float()
        return distance if distance.dim() == 2 else distance.unsqueeze(1)

    def n(self, policy: str) -> Tensor:
        """Return the row length n of each query, fp32, in the shape of `positions`.

        policy: `visible` (keys that the query sees, position + 1, the SSMax paper's n), `sample`
        (tokens of its document) or `fixed:N` (N).
        """
        if policy == "visible":
            return (self.positions + 1).float()
        if policy == "sample":
            return self.document_lengths.expand_as(self.positions).float()
        return torch.full_like(self.positions, int(policy.removeprefix("fixed:")), dtype=torch.float32)


class DocumentGroups(NamedTuple):
    """Holds the documents of a batch in groups of similar size, and where the groups' outputs hold each token of the
    batch.
    """

    # (B T,) int64: where each token of the batch stands in the concatenated outputs of all groups
    index_in_outputs: Tensor
    # a pair for each group of N documents, padded to P tokens: indices (N, P) of its tokens in the batch, their layout
    groups: list[tuple[Tensor, AttentionLayout]]


@keep_uncompiled
def attend_by_document(
    attend: Callable[[Tensor, Tensor, Tensor, AttentionLayout], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
) -> Tensor:
    """Compute `attend(q, k, v, layout)`, (B, H, T, E), for sequences of several documents, each document by itself.

    Documents of similar size (within a factor of 2, or up to 16 tokens) are batched. Padding follows a document's last
    token, so that no query of the document sees it. There is no T x T mask, the time depends on the documents' lengths
    instead of T, and `attend` is called log2(T) times at most.
    """
    b, _, t, _ = q.shape
    if b not in layout.document_group_cache:  # once for all layers
        layout.document_group_cache[b] = _group_documents(layout, b)
    index_in_outputs, groups = layout.document_group_cache[b]
    flat_tensors = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, H, D)
    outputs = []
    for index, group_layout in groups:
        group_tensors = (
            x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for x in flat_tensors
        )
        outputs.append(attend(*group_tensors, group_layout).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, index_in_outputs).unflatten(0, (b, t)).transpose(1, 2)


def _group_documents(layout: AttentionLayout, n_sequences: int) -> DocumentGroups:
    """Sort the documents of a batch of `n_sequences` sequences into groups of similar size."""
    device = layout.positions.device
    positions = layout.positions.expand(n_sequences, -1).flatten().cpu()
    lengths = layout.document_lengths.expand_as(layout.positions).expand(n_sequences, -1).flatten()
    starts = (positions == 0).nonzero().flatten()
    sizes = torch.diff(starts, append=torch.tensor([len(positions)]))
    size_classes = sizes.clamp(min=16).double().log2().ceil()
    index_in_outputs, groups, n_outputs = torch.empty_like(positions), [], 0
    for size_class in size_classes.unique():
        first_token = starts[size_classes == size_class].unsqueeze(1)
        size = sizes[size_classes == size_class].unsqueeze(1)
        offset = torch.arange(int(size.max()))
        index = first_token + torch.minimum(offset, size - 1)
        is_token = offset < size
        index_in_outputs[index[is_token]] = n_outputs + torch.arange(index.numel()).view_as(index)[is_token]
        n_outputs += index.numel()
        index = index.to(device)
        group_positions = offset.to(device).expand_as(index)
        groups.append(
            (index, AttentionLayout(group_positions, group_positions, lengths[index[:, :1]], mask_is_triangular=True))
        )
    return DocumentGroups(index_in_outputs.to(device), groups)
