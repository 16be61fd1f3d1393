"""What a run costs: memory saved by activation checkpointing."""

import pytest
import torch
from conftest import mark_others_slow
from folders import delete_checkpoints_after, run_differences

from lm.config.tree import Config
from lm.data.batches import Batch
from lm.model.decoder import Decoder
from lm.training.optimizers import freeze, make_optimizer
from lm.training.train import train
from scripts.tensor_memory import TensorMemory

RECOMPUTED = "trainer.activation_checkpointing=true"
LARGER = ["model.n_embd=64", "model.n_layer=3", "data.seq_len=128", "optim.batch_tokens=2048"]
GAU = ["model.block={name: gau, key_size: 16}", "model.n_head=1", "model.normalizer=relu2"]


# ---------------------------------------------------------------- memory


def measured(config: Config, bf16: bool = False, vocab_size: int = 400) -> int:
    """Bytes of tensors at the peak of the second of two steps, as Lightning makes them."""
    with TensorMemory() as memory:
        decoder = Decoder(config.model, vocab_size, config.data.seq_len, 1)
        decoder.recomputes_activations = config.trainer.activation_checkpointing
        freeze(decoder, config.train_only)
        optimizer = make_optimizer(decoder, config.optim)
        for _ in range(2):
            for number in range(config.sequences_per_rank // config.micro_batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = decoder.summed_loss(
                        Batch.from_sequences(torch.randint(vocab_size, (config.micro_batch, config.data.seq_len + 1)))
                    )
                if number == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    return memory.peak_bytes


def test_activation_checkpointing_keeps_less(tiny):
    plain, recomputed = tiny(*LARGER), tiny(*LARGER, RECOMPUTED)
    assert measured(recomputed) < 0.5 * measured(plain)


# ---------------------------------------------------------------- activation checkpointing


RECOMPUTED_MODELS = {
    "attention": ["model.normalizer=ssmax"],
    "gau": GAU,
    "values of the first layer": ["model.value_residual=first_layer"],
}


@pytest.mark.parametrize("model", mark_others_slow(RECOMPUTED_MODELS, ["values of the first layer"]))
def test_activation_checkpointing_changes_no_bit(tiny, model: str):
    options = [*RECOMPUTED_MODELS[model], "model.dropout=0.2", "trainer.micro_batch=4"]
    plain, recomputed = tiny(*options, "name=plain"), tiny(*options, RECOMPUTED, "name=recomputed", "resume=auto")
    assert (train(plain), train(recomputed)) == (0, 0)
    assert run_differences(plain.run_folder, recomputed.run_folder) == []
    delete_checkpoints_after(recomputed.run_folder, 4)
    assert train(recomputed) == 0
    assert run_differences(plain.run_folder, recomputed.run_folder) == []
