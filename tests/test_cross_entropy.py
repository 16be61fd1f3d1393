"""The loss head: cross-entropy without the tokens x vocabulary matrix of logits."""

import pytest
import torch
import torch.nn.functional as F

from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.model.cross_entropy import CHUNK_LOGITS, linear_cross_entropy, token_nll
from lm.model.decoder import Decoder


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_loss_equals_plain_cross_entropy_with_its_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 128 * 37)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(37, 24, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(37, (300,), generator=generator)
    plain = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    chunked = linear_cross_entropy(hidden, weight, targets)
    assert chunked.dtype == torch.float32
    assert torch.allclose(chunked, plain.float(), rtol=1e-5)
    for a, b in zip(torch.autograd.grad(chunked * 0.3, [hidden, weight]), torch.autograd.grad(plain * 0.3, [hidden, weight]), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert torch.allclose(token_nll(hidden, weight, targets).sum(), plain.float(), rtol=1e-5)


def test_loss_in_bf16_autocast_is_near_the_exact_one():
    decoder = Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32), 500, 64)
    sequences = torch.randint(500, (4, 65), generator=torch.Generator().manual_seed(0))
    exact = decoder.loss(Batch.of(sequences)).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.loss(Batch.of(sequences))
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=1e-3)
    assert decoder.head.weight.grad.dtype == torch.float32


def test_loss_and_evaluation_never_hold_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch):
    """The largest tensor made while computing the loss of 4,096 tokens and 1,000 words stays far below 4,096 x 1,000."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 256 * 1000)
    hidden = torch.randn(4096, 16, requires_grad=True)
    weight = torch.randn(1000, 16, requires_grad=True)
    targets = torch.randint(1000, (4096,))
    with Watch():
        linear_cross_entropy(hidden, weight, targets).backward()
        token_nll(hidden, weight, targets)
    assert largest <= 256 * 1000
