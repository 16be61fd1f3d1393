"""The output head maps hidden states to logits. Its cross-entropy is computed without holding the tokens x vocabulary
matrix of logits.

Shapes: N tokens, C width of the model, V size of the vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.data.batches import NO_TARGET
from lm.model.blocks import UninitialisedLinear

# LOGITS_PER_CHUNK: logits held at a time. Matrix products of fewer tokens are slower, and each adds its part to the
# gradient of the head's weights. LOGITS_IN_CACHE: logits whose exponentials are computed together; as many as
# fit in a CPU's cache take half the time.
LOGITS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**26}
LOGITS_IN_CACHE = {"cpu": 2**18, "cuda": 2**26}


class Head(UninitialisedLinear):
    """The output head maps hidden states (..., C) to logits (..., V).

    softcap: bound c on logits, which become c tanh(logit / c), in fp32 (Gemma 2, arXiv 2408.00118); None: logits are
    unchanged.
    """

    def __init__(self, n_embd: int, vocab_size: int, softcap: float | None = None):
        super().__init__(n_embd, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        return logits if self.softcap is None else soft_cap(logits.float(), self.softcap)

    def fp32_forward_function(self) -> Callable[[Tensor], Tensor]:
        """Return the function that maps hidden states to logits with the weights in fp32."""
        matrix = self.weight.float().t()
        return lambda hidden: soft_cap(hidden.float() @ matrix, self.softcap)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits unchanged if `softcap` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def tokens_per_chunk(vocab_size: int, device_type: str) -> int:
    """Return the number of tokens of a chunk, whose logits are in memory at the same time; at least 64."""
    return max(64, LOGITS_PER_CHUNK[device_type] // vocab_size)


class _SummedLinearCrossEntropy(torch.autograd.Function):
    """Compute the negative log-likelihood of all targets, summed.

    The forward pass computes gradients, too, while it holds a chunk's logits, which are not kept or computed again. The
    backward pass only multiplies by the incoming scalar.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, softcap: float | None
    ) -> Tensor:
        nll = hidden.new_zeros((), dtype=torch.float32)
        vocab_size, device_type = weight.size(0), weight.device.type
        matrix = weight.to(dtype)
        chunk_size = tokens_per_chunk(vocab_size, device_type)
        rows = max(1, LOGITS_IN_CACHE[device_type] // vocab_size)
        grad_hidden = torch.empty_like(hidden)  # filled in place, as in `_map_logits`
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for number, (h, y) in enumerate(
            zip(hidden.split(chunk_size), targets.unsqueeze(1).split(chunk_size), strict=True)
        ):
            h_low = h.to(dtype)
            logits = h_low @ matrix.t()  # (n, V), which `_summed_chunk_nll` overwrites with their gradient
            nll += sum(
                _summed_chunk_nll(*part, softcap) for part in zip(logits.split(rows), y.split(rows), strict=True)
            )
            grad_hidden[number * chunk_size :][:chunk_size] = logits @ matrix
            if grad_weight is not None:
                grad_weight += logits.t() @ h_low
            del logits  # before the next chunk's are computed
        ctx.save_for_backward(grad_hidden, grad_weight)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = grad_weight * grad.to(grad_weight.dtype)
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight, None, None, None


def _summed_chunk_nll(low_precision_logits: Tensor, y: Tensor, softcap: float | None) -> Tensor:
    """Return the summed negative log-likelihood of a chunk of tokens, an fp32 scalar. The gradient of the logits
    overwrites `low_precision_logits`.

    This is a function of its own, so that its temporary tensors are freed before the next call.

    Args:
        low_precision_logits: logits (n, V), in the dtype of the matrix product that gave them, such as bf16.
        y: targets (n, 1).
    """
    target_mask, y = (y != NO_TARGET).float(), y.clamp(min=0)
    logits, tanh_logits = low_precision_logits.float(), None
    if softcap is not None:
        uses_rough_tanh = low_precision_logits.dtype == torch.bfloat16 and low_precision_logits.device.type == "cpu"
        tanh_logits = _rough_tanh(logits, softcap) if uses_rough_tanh else (logits / softcap).tanh_()
        logits = tanh_logits * softcap
    p, largest_logit = logits.softmax(-1), logits.amax(-1, keepdim=True)
    # log Z - the largest logit: exact where one token has nearly all the probability
    log_z_minus_max = -p.amax(-1, keepdim=True).log()
    nll = ((largest_logit - logits.gather(1, y) + log_z_minus_max) * target_mask).sum()
    del logits
    p.scatter_add_(1, y, p.new_full((len(y), 1), -1.0)).mul_(target_mask)  # p becomes the gradient of the logits
    if tanh_logits is not None:
        p = torch.ops.aten.tanh_backward(p, tanh_logits)
    low_precision_logits.copy_(p)
    return nll


def _rough_tanh(x: Tensor, divisor: float) -> Tensor:
    """Return tanh(x / divisor) of fp32 to within 3e-7, as 2 sigmoid(2 x / divisor) - 1, which takes a quarter of
    tanh's time on a CPU.
    """
    return (x * (2 / divisor)).sigmoid_().mul_(2).sub_(1)


def summed_training_loss(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Return the sum over tokens of -log p(target), an fp32 scalar (nats).

    hidden: (N, C); head: maps C to V; targets: (N,) int64. The matrix product runs in the autocast dtype if autocast is
    on, softmax and sum run in fp32. `NO_TARGET` targets add nothing. Memory holds `LOGITS_PER_CHUNK` logits, not N x V.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    with torch.autocast(device, enabled=False):
        return _SummedLinearCrossEntropy.apply(hidden, head.weight, targets, dtype, head.softcap)


@torch.no_grad()
def token_nll(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Return -log p(target) of every token, (N,) fp32 (nats), computed in fp32 throughout; 0 where the target is
    `NO_TARGET`.

    hidden: (N, C); head: maps C to V; targets: (N,) int64. Memory holds `LOGITS_PER_CHUNK` logits, not N x V.
    """
    nll = partial(F.cross_entropy, reduction="none", ignore_index=NO_TARGET)
    return _map_logits(nll, torch.float32, hidden, head, targets)


@torch.no_grad()
def argmax_tokens(hidden: Tensor, head: Head) -> Tensor:
    """Return the token with the largest logit at each hidden state, (N,) int64. Logits are computed in fp32 and in
    chunks, as in `token_nll`.
    """
    return _map_logits(lambda logits: logits.argmax(-1), torch.int64, hidden, head)


@torch.no_grad()
def token_kl(p_hidden: Tensor, p_head: Head, q_hidden: Tensor, q_head: Head) -> Tensor:
    """Return KL(p || q) of two models' next-token distributions at every token, (N,) fp32 (nats), computed in fp32.

    p_hidden, q_hidden: the models' hidden states, (N, C); p_head, q_head: their heads, which map C to V. Exactly 0
    where the distributions are equal.
    """
    q_logits = q_head.fp32_forward_function()

    def divergence(p_logits: Tensor, hidden: Tensor) -> Tensor:
        log_p, log_q = p_logits.log_softmax(-1), q_logits(hidden).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    # the logits of q, both log-softmaxes and the sum's terms are held, too
    return _map_logits(divergence, torch.float32, p_hidden, p_head, q_hidden, chunk_divisor=4)


def _map_logits(
    f: Callable[..., Tensor], dtype: torch.dtype, hidden: Tensor, head: Head, *tensors: Tensor, chunk_divisor: int = 1
) -> Tensor:
    """Return the results of `f` for all N tokens as one tensor (N,) of `dtype`. `f` is called on chunks of n tokens. It
    gets their logits (n, V), in fp32 even under autocast, and their n rows of each of `tensors`.

    tensors: tensors with N rows each. chunk_divisor: number that the chunk length is divided by, for an f that holds
    several tensors (n, V) beside the logits. Results are written in place: a tensor allocated between two chunks may
    keep glibc from reusing the logits' memory.
    """
    results = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
    chunk_size = max(64, tokens_per_chunk(head.out_features, hidden.device.type) // chunk_divisor)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head.fp32_forward_function()
        for result, h, *part in zip(*(x.split(chunk_size) for x in (results, hidden, *tensors)), strict=True):
            result.copy_(f(logits(h), *part))
    return results
