"""Cross-entropy of the output head without the tokens x vocabulary matrix of logits."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_LOGITS = 2**24  # logits held at a time: 64 MiB in fp32


def _chunk_rows(vocab_size: int) -> int:
    return max(128, CHUNK_LOGITS // vocab_size)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the negative log-likelihoods, with both gradients formed chunk by chunk in the forward pass.

    The chunk's logits are at hand there, so nothing is kept or computed twice; the backward pass only
    multiplies by the incoming scalar.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        train = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        head = weight.to(dtype)
        grad_hidden, grad_weight = [], torch.zeros_like(weight) if train else None
        for h, y in zip(hidden.split(_chunk_rows(weight.size(0))), targets.split(_chunk_rows(weight.size(0))), strict=True):
            h_low = h.to(dtype)
            log_p = (h_low @ head.t()).float().log_softmax(-1)  # (chunk, V)
            total = total - log_p.gather(1, y.unsqueeze(1)).sum()
            if train:
                grad_logits = log_p.exp().scatter_add(1, y.unsqueeze(1), -torch.ones_like(log_p[:, :1])).to(dtype)
                grad_hidden.append((grad_logits @ head).to(hidden.dtype))
                grad_weight = grad_weight + (grad_logits.t() @ h_low).to(weight.dtype)
        if train:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over tokens of -log p(target), fp32 scalar (nats).

    hidden: (N, C); weight: (V, C), the head; targets: (N,) int64. The product runs in the autocast
    dtype if autocast is on, softmax and sum in fp32. Peak memory: 2^24 logits, not N x V.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, targets, dtype)


@torch.no_grad()
def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of every token, (N,) fp32 (nats), computed in fp32 throughout.

    hidden: (N, C); weight: (V, C); targets: (N,) int64. Holds 2^24 logits at a time.
    """
    rows = _chunk_rows(weight.size(0))
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.float().t()
        return torch.cat(
            [
                torch.nn.functional.cross_entropy(h.float() @ head, y, reduction="none")
                for h, y in zip(hidden.split(rows), targets.split(rows), strict=True)
            ]
        )
