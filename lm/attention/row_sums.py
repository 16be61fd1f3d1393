"""Rows of weights divided by their sums, or times a factor."""

import torch
from torch import Tensor

SMALLEST_SUM = 1e-24  # rows that are to be divided by a smaller sum have weights 0


def divided(rows: Tensor, total: Tensor, factor: Tensor | None) -> Tensor:
    """Rows (B, H, T, X) by their `factor` (broadcastable to B, H, T), or, if it is None, over their `total` (B, H, T, 1); fp32 or wider.

    A row whose total is below `SMALLEST_SUM` has weights 0: of relu^2 one whose scores are all negative, or below 1e-12.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    if factor is None:
        total = total.to(wide)
        return rows.to(wide) / total.masked_fill(total < SMALLEST_SUM, torch.inf)
    return rows * factor.unsqueeze(-1).to(wide)


def gradient_of_sums(grad: Tensor, dtype: torch.dtype, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """For rows divided by their sums, (N, T, 1), or by infinity: the gradient of the undivided output, in `dtype`, and its mean over a
    row's weights, (N, T, 1), to be subtracted from each weight's own.

    Where one key has all the weight the two cancel, so both are made of the same rounded gradient and of `out` in fp32.
    """
    grad = (grad / sums).to(dtype)
    return grad, (grad.to(out.dtype) * out).sum(-1, keepdim=True)
