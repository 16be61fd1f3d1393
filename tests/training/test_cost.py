"""What a run costs: memory saved by activation checkpointing."""

import pytest
import torch
from conftest import lm, thinned
from folders import differences, kill_after, metrics

from lm.config.tree import Config
from lm.data.batches import Batch
from lm.model.decoder import Decoder
from lm.training.optimizers import freeze, make_optimizer
from lm.training.train import train
from scripts.tensor_memory import TensorMemory

RECOMPUTED = "trainer.activation_checkpointing=true"
LARGER = ["model.n_embd=64", "model.n_layer=3", "data.seq_len=128", "optim.batch_tokens=2048"]
GAU = ["model.block={name: gau, key_size: 16}", "model.n_head=1", "model.normalizer=relu2"]
MODERN = [
    "model.value_residual=first_layer",
    "model.embedding_norm=rms",
    "model.logit_softcap=15",
    "optim.optimizer=muon",
]


# ---------------------------------------------------------------- memory


def measured(config: Config, bf16: bool = False, vocab_size: int = 400) -> int:
    """Bytes of tensors at the peak of the second of two steps, as Lightning makes them."""
    with TensorMemory() as memory:
        decoder = Decoder(config.model, vocab_size, config.data.seq_len, 1)
        decoder.recomputes = config.trainer.activation_checkpointing
        freeze(decoder, config.train_only)
        optimizer = make_optimizer(decoder, config.optim)
        for _ in range(2):
            for number in range(config.rank_sequences // config.micro_batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = decoder.loss(
                        Batch.of(torch.randint(vocab_size, (config.micro_batch, config.data.seq_len + 1)))
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
    "value embeddings": ["model.value_residual=embedding", "model.out_init=zero"],
}


@pytest.mark.parametrize("model", thinned(RECOMPUTED_MODELS, ["values of the first layer"]))
def test_activation_checkpointing_changes_no_bit(tiny, model: str):
    options = [*RECOMPUTED_MODELS[model], "model.dropout=0.2", "trainer.micro_batch=4"]
    plain, recomputed = tiny(*options, "name=plain"), tiny(*options, RECOMPUTED, "name=recomputed", "resume=auto")
    assert (train(plain), train(recomputed)) == (0, 0)
    assert differences(plain.run_folder, recomputed.run_folder) == []
    kill_after(recomputed.run_folder, 4)
    assert train(recomputed) == 0
    assert differences(plain.run_folder, recomputed.run_folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [["trainer.compile=true"], ["trainer.devices=2"]], ids=["compiled", "two processes"])
def test_activation_checkpointing_goes_with_compilation_and_several_processes(
    arguments: list[str], tmp_path, how: list[str]
):
    for name, options in {"plain": [], "recomputed": [RECOMPUTED]}.items():
        result = lm("train", *arguments, *how, *options, f"name={name}", process=True)
        assert result.returncode == 0, result.stderr
    plain_losses, recomputed_losses = (
        [line["train/loss"] for line in metrics(tmp_path / "runs" / name) if "lr" in line]
        for name in ("plain", "recomputed")
    )
    assert plain_losses == pytest.approx(recomputed_losses, rel=1e-5)


def test_vectors_of_tokens_for_values_are_looked_up_layer_by_layer(tiny):
    peaks = []
    for depth in (2, 8):
        decoder = Decoder(tiny("model.value_residual=embedding", f"model.n_layer={depth}").model, 400, 32, 1)
        tokens = torch.zeros(1, 4096, dtype=torch.long)
        with torch.no_grad(), TensorMemory() as memory:
            decoder(tokens)
        peaks.append(memory.peak_bytes)
    assert peaks[1] - peaks[0] < 4096 * 32 * 4, "those of one layer"
