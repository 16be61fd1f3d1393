"""Estimate the memory that a run will need. The tensors of a training step are made without their values, and their
bytes are counted.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lm.attention.routes import with_device_limits
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.model.cross_entropy import Head, cached_tokens, chunk_tokens
from lm.model.decoder import Decoder
from lm.training.optimizers import implied_state


class TensorMemory(TorchDispatchMode):
    """A context that counts the bytes of tensors made within it and not yet freed, each storage once (`current_bytes`,
    `peak_bytes`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = self.peak_bytes = 0  # bytes held now, and the most bytes so far
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        results = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(results) if isinstance(tensor, Tensor)):
            if storage not in self._storages:
                self._storages[storage] = None
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return results

    def _add(self, n_bytes: int) -> None:
        self.current_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


_KNOWN_ESTIMATES: dict[str, int] = {}  # estimated bytes, by the repr of all values that determine them


def estimated_memory(config: Config, phase: int, vocab_size: int, bf16: bool, accelerator: str) -> int:
    """Estimate a process's peak bytes of tensors in a training step (weights, gradients, optimizer state, activations,
    logits), the maximum over phase `phase` and all later phases.

    The estimate takes no account of memory that `torch.compile` saves, nor of the isolation of documents, nor of
    evaluations. It also leaves out the temporary memory of Muon, which is used once activations are freed: it is 12 to
    22 bytes for each of `BATCH_ELEMENTS` entries (lm.training.optimizers), or of the largest matrix if that has more.
    """
    recomputes, models = (
        config.trainer.activation_checkpointing,
        [config.model_in(number) for number in range(phase, len(config.plan))],
    )
    setup = (
        config.data.seq_len,
        config.micro_batch,
        config.rank_sequences,
        config.world_size,
        recomputes,
        config.optim,
        config.train_only,
    )
    models_by_key = {repr((model, setup, vocab_size, bf16, accelerator)): model for model in models}
    for key, model in models_by_key.items():
        _KNOWN_ESTIMATES[key] = _KNOWN_ESTIMATES.get(key) or _step_bytes(config, model, vocab_size, bf16, accelerator)
    return max(_KNOWN_ESTIMATES[key] for key in models_by_key)


def _step_bytes(config: Config, model: ModelConfig, vocab_size: int, bf16: bool, accelerator: str) -> int:
    device = "cuda" if accelerator == "gpu" else "cpu"
    with torch.device("meta"):
        decoder = Decoder(model, vocab_size, config.data.seq_len, seed=None)
    decoder.recomputes = config.trainer.activation_checkpointing
    state = [
        value for entries in implied_state(decoder, config).values() for value in entries.values()
    ]  # freezes untrained parameters
    tensors = [*decoder.parameters(), *(value for value in state if isinstance(value, Tensor))]
    trained_bytes = sum(p.nbytes for p in decoder.parameters() if p.requires_grad)
    with FakeTensorMode(allow_non_fake_inputs=True), with_device_limits(torch.device(device)), TensorMemory() as memory:
        decoder.to_empty(device="cpu")
        if model.tied:
            decoder.head.weight = decoder.embedding.weight
        weight_bytes = memory.current_bytes  # subtracted below, as `tensors` has the weights
        gradients = torch.empty(trained_bytes, dtype=torch.uint8)  # gradients of the step before
        tokens = torch.zeros(config.micro_batch, config.data.seq_len, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = decoder(tokens)
        loss_gradients = _gradients_of_loss(hidden, decoder.head, bf16, device)
        if config.rank_sequences > config.micro_batch:  # the gradients of a micro-batch are freed once they are added
            for parameter in filter(lambda p: p.requires_grad, decoder.parameters()):
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        else:
            del gradients  # Lightning frees them after the forward pass
        scaled_gradients = [torch.empty_like(tensor) for tensor in loss_gradients]
        del loss_gradients
        hidden.backward(scaled_gradients[0])
        del scaled_gradients
    sent_bytes = trained_bytes if config.world_size > 1 else 0  # copies of the gradients, which DDP sends
    return memory.peak_bytes - weight_bytes + sum(tensor.nbytes for tensor in tensors) + sent_bytes


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _gradients_of_loss(hidden: Tensor, head: Head, bf16: bool, device: str) -> list[Tensor]:
    """Empty gradients of hidden states (B, T, C) and, if trained, of the head's weights (V, C). Before returning,
    allocates and frees as much memory as the loss needs while it computes these gradients in chunks
    (`lm.model.cross_entropy`).
    """
    weight, (n_tokens, width), element_bytes = head.weight, hidden.flatten(0, -2).shape, 2 if bf16 else 4
    vocab_size = len(weight)
    n_chunk = min(n_tokens, chunk_tokens(vocab_size, device))
    n_cached = min(n_chunk, cached_tokens(vocab_size, device))
    gradients = [torch.empty_like(hidden), *([torch.empty_like(weight)] if weight.requires_grad else [])]
    weight_copy = torch.empty(element_bytes * weight.numel() if bf16 else 0, dtype=torch.uint8)
    # The chunk's logits, and the largest of: fp32 logits, probabilities and softcap of some tokens, and the products
    # for both gradients.
    product_bytes = element_bytes * max(n_chunk * width, weight.numel() * weight.requires_grad)
    chunk_bytes = element_bytes * n_chunk * vocab_size + max(
        (4 + 4 * bf16 + 8 * bool(head.softcap)) * n_cached * vocab_size, product_bytes
    )
    torch.empty(chunk_bytes, dtype=torch.uint8)
    del weight_copy
    return gradients
