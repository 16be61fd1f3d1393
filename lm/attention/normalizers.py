"""Normalizers: how attention scores become weights.

Each class gives the same function twice: `weights`, the definition on dense scores, and `forward`,
the fastest exact route. Shapes: B rows, H heads, T queries, S keys, D head size.
"""

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention import table
from lm.attention.lengths import RowLength, Rows


class Normalizer(nn.Module, ABC):
    """Base of every normalizer; one instance per layer, its parameters per head.

    Args:
        options: the entry's options (`lm.attention.table`).
        n_head: heads of the layer.
        train_length: tokens in a training row, for first values and bases "at the training length".
    """

    def __init__(self, options: object, n_head: int, train_length: int):
        super().__init__()
        self.options, self.n_head = options, n_head
        self.initialise(train_length)

    def initialise(self, train_length: int) -> None:
        """Create the parameters with their first values for training rows of `train_length` tokens."""

    def match(self, other: "Normalizer", train_length: int) -> None:
        """Set the parameters so that the weights stay as near as may be to those of `other`, which this one replaces.

        The closed form over rows of `train_length` tokens, where there is one; the first values stay otherwise.
        """

    def constants(self) -> dict[str, float]:
        """Numbers fixed by the training length that no parameter holds, by the option that names them."""
        return {}

    @abstractmethod
    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        """The definition: dense weights (B, H, T, S), masked entries 0, in the dtype of `q`.

        q: (B, H, T, D), k: (B, H, S, D), any floating dtype.
        """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """Weights x values, (B, H, T, D) in the dtype of `v`, never holding T x S weights.

        q: (B, H, T, D), k: (B, H, S, D), of at least the precision of v: (B, H, S, D).
        """

    @abstractmethod
    def explain(self) -> str:
        """The kernel `forward` takes, and why."""


class QueryScale(Normalizer):
    """softmax(c q.k / sqrt(D)) with one factor c per query and head.

    Scaling q is scaling the logits, so every member runs on the fused softmax kernel. The product is
    formed in the precision q comes in (fp32 in training) and rounded to v's dtype once.
    """

    def scale(self, rows: Rows) -> Tensor | None:
        """c as fp32, broadcastable to (B, H, T); None for 1."""
        return None

    def scale_by_position(self, train_length: int) -> Tensor:
        """c at each position of a training row: (H, L) float64."""
        device = next((p.device for p in self.parameters()), "cpu")
        scale = self.scale(Rows.full(train_length, device))
        c = torch.ones(1, 1) if scale is None else scale.detach().cpu()
        return c.double().expand(self.n_head, train_length)

    def weights(self, q: Tensor, k: Tensor, rows: Rows) -> Tensor:
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, H, T, S)
        scale = self.scale(rows)
        if scale is not None:
            logits = logits * scale.unsqueeze(-1).to(logits.dtype)
        return logits.masked_fill(~rows.visible(), -math.inf).softmax(-1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        scale = self.scale(rows)
        if scale is not None:
            q = q * scale.unsqueeze(-1)
        mask = None if rows.causal else rows.visible()
        return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask, is_causal=rows.causal)

    def explain(self) -> str:
        return "SDPA, q scaled in fp32: a factor on the logits is a factor on the query"


class Softmax(QueryScale):
    """softmax(z), z = q.k / sqrt(D)."""

    def explain(self) -> str:
        return "SDPA: plain softmax"


class SSMax(QueryScale):
    """softmax((s ln n + b) z), arXiv 2501.19399 Eq. 2; s and b are learned per layer and head.

    s starts at 1 / mean ln n over a training row (the mean logit scale is then softmax's 1), at 1 (`unit`) or
    at the given number; b, if any, at 0. `scale: none` fixes s = 1.
    """

    options: table.SSMax

    def initialise(self, train_length: int) -> None:
        self.row_length = RowLength(self.options.n)
        if self.options.scale == "learned":
            first = {"match": 1 / self.mean_log(train_length), "unit": 1.0}.get(self.options.init, self.options.init)
            self.s = nn.Parameter(torch.full((self.n_head,), first))
        if self.options.bias:
            self.b = nn.Parameter(torch.zeros(self.n_head))

    def mean_log(self, train_length: int) -> float:
        """Mean of ln n over a training row: ln(L!) / L for n = visible."""
        return self.log_n(train_length).mean().item()

    def log_n(self, train_length: int) -> Tensor:
        """ln n at each position of a training row: (L,) float64."""
        return self.row_length(Rows.full(train_length)).double().log()

    @torch.no_grad()
    def match(self, other: Normalizer, train_length: int) -> None:
        """With `init: match`, follow the factor c(n) of `other` over a training row, head by head.

        s alone keeps the mean of the factor: s = mean c / mean ln n (1 / mean ln n after softmax). s and b are the
        least-squares line of c on ln n: s = 0, b = 1 after softmax, which is softmax to the bit.
        """
        if self.options.init != "match" or not isinstance(other, QueryScale):
            return
        c, log_n = other.scale_by_position(train_length), self.log_n(train_length)
        if self.options.scale == "learned":
            s = c.mean(-1) / log_n.mean()
            if self.options.bias:
                centred = log_n - log_n.mean()
                s = (c - c.mean(-1, keepdim=True)) @ centred / centred.square().sum().clamp(min=1e-12)
            self.s.copy_(s)
            c = c - s.unsqueeze(-1) * log_n
        else:
            c = c - log_n
        if self.options.bias:
            self.b.copy_(c.mean(-1))

    def scale(self, rows: Rows) -> Tensor:
        scale = self.row_length(rows).log().unsqueeze(-2)  # (1, T) or (B, 1, T)
        if self.options.scale == "learned":
            scale = self.s.unsqueeze(-1) * scale  # (H, T) or (B, H, T)
        return scale + self.b.unsqueeze(-1) if self.options.bias else scale


class LogN(QueryScale):
    """softmax(z ln n / ln m), kexue.fm 8823: equal to softmax at n = m, entropy nearly flat in n.

    `clip` gives max(1, ln n / ln m), for models trained without the factor (Qwen's `logn`).
    """

    options: table.LogN

    def initialise(self, train_length: int) -> None:
        self.row_length = RowLength(self.options.n)
        self.base = float(train_length if self.options.base == "train" else self.options.base)

    def constants(self) -> dict[str, float]:
        return {"base": self.base}

    def scale(self, rows: Rows) -> Tensor:
        scale = self.row_length(rows).log().unsqueeze(-2) / math.log(self.base)  # (1, T) or (B, 1, T)
        return scale.clamp(min=1.0) if self.options.clip else scale


def make_normalizer(options: object, n_head: int, train_length: int) -> Normalizer:
    """The normalizer that `options` (a row of the table) describes."""
    return table.ENTRIES[options.name].load()(options, n_head, train_length)
