"""What n means: the length of an attention row, from positions alone."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Where the queries and keys of one attention call stand in their documents.

    Every normalizer takes n from here, never from a tensor's width: a prefix, a padded batch, a
    packed row and a decoding step then give the same n for the same token.

    Attributes:
        positions: (T,) or (B, T) int64, 0-based position of each query in its document.
        key_positions: (S,) or (B, S) int64, likewise of each key.
        lengths: tokens of the query's document, int64, broadcastable to `positions`.
        causal: keys are the queries themselves, in order: the mask is the plain causal triangle.
    """

    positions: Tensor
    key_positions: Tensor
    lengths: Tensor
    causal: bool

    @classmethod
    def full(cls, length: int, device: torch.device | str = "cpu") -> "Rows":
        """Rows of one document of `length` tokens, each token a query and a key."""
        positions = torch.arange(length, device=device)
        return cls(positions, positions, torch.full_like(positions, length), causal=True)

    def queries(self, start: int, stop: int) -> "Rows":
        """The same keys, and of the queries those from `start` to `stop`."""
        return Rows(self.positions[..., start:stop], self.key_positions, self.lengths[..., start:stop], causal=False)

    def visible(self) -> Tensor:
        """(T, S) or (B, 1, T, S) bool: which keys each query sees."""
        mask = self.key_positions.unsqueeze(-2) <= self.positions.unsqueeze(-1)
        return mask if mask.dim() == 2 else mask.unsqueeze(1)


@dataclass(frozen=True)
class RowLength:
    """The policy that gives n, one per query.

    `visible`: keys the query sees, its position + 1 (the SSMax paper's n). `sample`: length of its
    document. `fixed:N`: the number N.
    """

    policy: str

    def __call__(self, rows: Rows) -> Tensor:
        """n as fp32, of the shape of `rows.positions`."""
        if self.policy == "visible":
            return (rows.positions + 1).float()
        if self.policy == "sample":
            return rows.lengths.expand_as(rows.positions).float()
        return torch.full_like(rows.positions, int(self.policy.removeprefix("fixed:")), dtype=torch.float32)
