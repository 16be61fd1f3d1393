"""The loss head: cross-entropy without the tokens x vocabulary matrix of logits."""

import pytest
import torch
import torch.nn.functional as F

from lm.config.model_config import ModelConfig
from lm.data.batches import NO_TARGET, Batch
from lm.model.cross_entropy import (
    LOGITS_IN_CACHE,
    LOGITS_PER_CHUNK,
    Head,
    argmax_tokens,
    summed_training_loss,
    token_nll,
)
from lm.model.decoder import Decoder
from scripts.tensor_memory import TensorMemory


def head_of(weight: torch.Tensor, softcap: float | None = None) -> Head:
    head = Head(weight.size(1), weight.size(0), softcap)
    head.weight = torch.nn.Parameter(weight)
    return head


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_losses_equal_plain_ones_with_their_gradients(
    dtype: torch.dtype, softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 128 * 37)
    monkeypatch.setitem(LOGITS_IN_CACHE, "cpu", 50 * 37)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=generator, dtype=dtype, requires_grad=True)
    head = head_of(torch.randn(37, 24, generator=generator, dtype=dtype), softcap)
    targets = torch.randint(37, (300,), generator=generator)
    targets[::7] = NO_TARGET
    logits = hidden.double() @ head.weight.double().t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits, targets, reduction="sum", ignore_index=NO_TARGET)
    loss = summed_training_loss(hidden, head, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), nll, rtol=1e-5, atol=0)
    grads = (torch.autograd.grad(total * 0.3, [hidden, head.weight]) for total in (loss, nll))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert torch.allclose(token_nll(hidden, head, targets).sum(), nll.float(), rtol=1e-5)
    assert torch.equal(argmax_tokens(hidden, head), logits.argmax(-1))
    assert torch.allclose(head(hidden).double(), logits, atol=1e-4)


def test_loss_in_bf16_autocast_is_near_the_exact_one():
    decoder = Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32), 500, 64)
    sequences = torch.randint(500, (4, 65), generator=torch.Generator().manual_seed(0))
    exact = decoder.summed_loss(Batch.from_sequences(sequences)).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.summed_loss(Batch.from_sequences(sequences))
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=1e-3)
    assert decoder.head.weight.grad.dtype == torch.float32


def test_the_faster_cap_on_bf16_logits_is_as_near_to_fp64_as_tanh(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((500, 64), (400, 64)))
    targets = torch.randint(400, (500,), generator=generator)

    def loss_and_gradients(dtype: torch.dtype, autocast: bool) -> list[torch.Tensor]:
        leaves, head = [x.to(dtype).requires_grad_() for x in (hidden, weight)], Head(64, 400, 15.0)
        del head.weight
        head.weight = leaves[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = summed_training_loss(leaves[0], head, targets)
        return [x.double().flatten() for x in (loss, *torch.autograd.grad(loss, leaves))]

    exact, fast = loss_and_gradients(torch.float64, False), loss_and_gradients(torch.float32, True)
    monkeypatch.setattr("lm.model.cross_entropy._rough_tanh", lambda x, scale: (x / scale).tanh_())
    slow = loss_and_gradients(torch.float32, True)
    assert not torch.equal(fast[1], slow[1])
    for expected, actual, before in zip(exact, fast, slow, strict=True):
        assert 0 < (actual - expected).norm() < 1.01 * (before - expected).norm()


def test_loss_and_evaluation_never_hold_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LOGITS_PER_CHUNK, "cpu", 256 * 1000)
    monkeypatch.setitem(LOGITS_IN_CACHE, "cpu", 50 * 1000)
    hidden, head = torch.randn(4096, 16, requires_grad=True), head_of(torch.randn(1000, 16), softcap=3.0)
    targets = torch.randint(1000, (4096,))
    with TensorMemory() as memory:
        summed_training_loss(hidden, head, targets).backward()
        token_nll(hidden, head, targets)
    assert memory.peak_bytes < 4096 * 1000
