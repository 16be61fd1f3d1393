"""What a run costs: memory saved by activation checkpointing; MFU."""

import json

import pytest
import torch
from conftest import ROOT, lm, thinned
from folders import differences, kill_after, metrics

from lm.config.load import load_config
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.model.decoder import Decoder
from lm.model.spec import flops_per_token
from lm.training.flops import mfu, peak_flops
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


# ---------------------------------------------------------------- MFU


def test_mfu_counts_what_the_mask_hides_in_one_of_two_conventions():
    config = load_config([str(ROOT / "configs" / "models" / "gpt2-124m.yaml")])
    with torch.device("meta"):
        decoder = Decoder(config.model, 50257, 1024, seed=None)
    attention = 12 * 12 * 12 * 64 * 1024  # 12 L H Q T
    causal, palm = flops_per_token(decoder), flops_per_token(decoder, count_masked=True)
    assert palm - causal == attention / 2
    assert palm == pytest.approx(6 * 124.3e6 + attention, rel=0.01)  # nanoGPT's 6 N + 12 L H Q T
    assert mfu(decoder, 1024, 1000.0, 4000.0 * palm) == {"mfu/causal": round(causal / palm / 4, 4), "mfu/palm": 0.25}
    assert mfu(decoder, 1024, 1000.0, None) == {}


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_name_and_of_no_other_card(
    monkeypatch: pytest.MonkeyPatch, card: str, peak: float | None
):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: card)
    assert peak_flops("gpu", bf16=True) == pytest.approx(peak)


def test_the_peak_of_a_cpu_is_measured_and_each_line_has_the_mfu(tiny):
    peak = peak_flops("cpu", bf16=False)
    assert 1e9 < peak < 1e14
    config = tiny("name=x", "trainer.max_steps=2")
    assert train(config) == 0
    logged = [line for line in metrics(config.run_folder) if "tokens_per_s" in line]
    recorded = json.loads((config.run_folder / "environment.json").read_text())
    assert recorded["peak_flops"] == peak
    for line in logged:
        assert line["mfu/causal"] == pytest.approx(recorded["flops_per_token"] * line["tokens_per_s"] / peak, abs=1e-4)
        assert line["mfu/causal"] <= line["mfu/palm"]
