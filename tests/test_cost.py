"""What a run costs: memory, estimated and saved by activation checkpointing; MFU; the profiler's window."""

import gzip
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, lm, thinned
from folders import differences, kill_after, metrics

from lm.attention.routes import with_device_limits
from lm.config.load import load_config
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.machine import peak_process_bytes
from lm.model.decoder import Decoder
from lm.model.spec import flops_per_token
from lm.training.callbacks import mfu, peak_flops
from lm.training.memory import TensorMemory, estimated_memory
from lm.training.optimizers import freeze, make_optimizer
from lm.training.train import train

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


@pytest.mark.parametrize(
    "options",
    [
        [],
        [RECOMPUTED],
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                GAU,
                ["trainer.micro_batch=4"],
                ["model.tied=true", "model.dropout=0.1"],
                ["model.normalizer=entmax15"],
                MODERN,
            )
        ),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["32", "bf16"])
def test_the_memory_of_a_step_is_estimated_within_fifteen_percent(tiny, options: list[str], bf16: bool):
    config = tiny(*LARGER, *options)
    assert estimated_memory(config, 0, 400, bf16, "cpu") == pytest.approx(measured(config, bf16), rel=0.15)


@pytest.mark.parametrize("micro_batch", [2, 4], ids=["accumulation", "in one"])
@pytest.mark.slow
def test_gradients_are_counted_where_little_else_is(tiny, micro_batch: int):
    shape = ["model.n_embd=128", "model.n_layer=6", "data.seq_len=64", "optim.batch_tokens=256"]
    config = tiny(*shape, RECOMPUTED, f"trainer.micro_batch={micro_batch}")
    assert estimated_memory(config, 0, 400, False, "cpu") == pytest.approx(measured(config), rel=0.02)


@pytest.mark.parametrize(
    "options",
    [["optim.optimizer=muon"], ["train_only=normalizer", "model.normalizer=ssmax", "trainer.micro_batch=2"]],
    ids=lambda options: options[0],
)
@pytest.mark.slow
def test_what_the_loss_takes_is_estimated_where_it_is_most_of_a_step(tiny, options: list[str]):
    """With many tokens in the vocabulary and few activations, in bf16, for which the head's weights are copied."""
    config = tiny(*LARGER, RECOMPUTED, *options)
    assert estimated_memory(config, 0, 8000, True, "cpu") == pytest.approx(measured(config, True, 8000), rel=0.05)


def test_the_estimate_is_of_all_phases_that_are_still_to_come(tiny):
    phases = (
        "phases=[{until: 0.3, normalizer: softmax}, {until: 0.6, normalizer: linear}, {until: 1, normalizer: softmax}]"
    )
    soft, linear, both_phases = (
        tiny(*LARGER, override) for override in ("model.normalizer=softmax", "model.normalizer=linear", phases)
    )
    estimates = [estimated_memory(both_phases, phase, 400, False, "cpu") for phase in range(3)]
    small, large = (estimated_memory(config, 0, 400, False, "cpu") for config in (soft, linear))
    assert small < large
    assert estimates == [large, large, small]


def test_frozen_layers_that_read_long_sequences_are_counted_without_numbers(tiny):
    """Their attention needs no gradient, and a kernel outside of PyTorch would read memory that fake tensors don't
    have.
    """
    config = tiny(
        "data.seq_len=1024", "optim.batch_tokens=1024", "model.normalizer=[softmax, ssmax]", "train_only=normalizer"
    )
    assert estimated_memory(config, 0, 400, True, "cpu") > 0


def test_activation_checkpointing_keeps_less(tiny):
    plain, recomputed = tiny(*LARGER), tiny(*LARGER, RECOMPUTED)
    assert estimated_memory(recomputed, 0, 400, False, "cpu") < 0.5 * estimated_memory(plain, 0, 400, False, "cpu")
    assert measured(recomputed) < 0.5 * measured(plain)


def test_all_that_a_run_needs_is_counted(tiny):
    def estimate(*options: str) -> int:
        return estimated_memory(tiny(*LARGER, *options), 0, 400, False, "cpu")

    weights = 4 * sum(p.numel() for p in Decoder(tiny(*LARGER).model, 400, 128, 1).parameters())
    assert (
        estimate("trainer.devices=2") - estimate("optim.batch_tokens=1024") == weights
    )  # DDP's copies of the gradients
    assert estimate() - estimate("train_only=normalizer", "model.normalizer=ssmax") > 2 * weights
    on_cpu, on_gpu = (estimated_memory(tiny(*LARGER), 0, 4000, False, device) for device in ("cpu", "gpu"))
    assert on_gpu > on_cpu  # which holds fewer logits at a time


@pytest.mark.slow
def test_blocks_of_the_definition_are_counted_as_large_as_the_device_holds_them(tiny, monkeypatch: pytest.MonkeyPatch):
    config = tiny(*LARGER, "model.normalizer=softpick")
    monkeypatch.setattr("lm.attention.routes.block_weights", lambda device: 2**19 if device.type == "cuda" else 2**17)
    on_cpu, on_gpu = (estimated_memory(config, 0, 400, False, device) for device in ("cpu", "gpu"))
    assert on_cpu == pytest.approx(measured(config), rel=0.15)
    with with_device_limits(torch.device("cuda")):
        assert on_gpu == pytest.approx(measured(config), rel=0.15)
    assert on_gpu > 1.1 * on_cpu


@pytest.mark.slow
def test_short_sequences_are_counted_by_the_route_of_the_device(tiny):
    """A CPU keeps the weights of short sequences, (B, H, T, T), for the backward pass; the fused kernel of a GPU
    recomputes them.
    """
    config = tiny(*LARGER, "model.n_head=16")
    on_cpu, on_gpu = (estimated_memory(config, 0, 400, False, device) for device in ("cpu", "gpu"))
    weights = 4 * config.model.n_layer * config.micro_batch * config.model.n_head * config.data.seq_len**2 // 2
    assert on_cpu - on_gpu > 0.5 * weights
    with with_device_limits(torch.device("cuda")):
        assert on_gpu == pytest.approx(measured(config), rel=0.15)


@pytest.mark.slow
def test_narrow_windows_are_counted_by_the_route_of_the_device(tiny, monkeypatch: pytest.MonkeyPatch):
    """A CPU adds up the few distances of a window; a GPU takes its fused kernel, as for any window."""
    config, estimates = tiny(*LARGER, "model.normalizer={name: window, size: 4}"), []
    for max_keys in (4, 0):
        monkeypatch.setattr("lm.attention.distance.MAX_LOOP_WINDOW", max_keys)
        monkeypatch.setattr("lm.training.memory._KNOWN_ESTIMATES", {})
        estimates.append([estimated_memory(config, 0, 400, False, device) for device in ("cpu", "gpu")])
    (on_cpu, on_gpu), (fused_on_cpu, fused_on_gpu) = estimates
    assert on_cpu != fused_on_cpu
    assert on_gpu == fused_on_gpu


def test_the_estimate_is_printed_and_a_model_without_one_is_trained(
    tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def refuse(*_: object) -> int:
        raise RuntimeError("its shapes\ndepend on numbers")

    for name, estimate, words in (
        ("a", estimated_memory, "about 0.00 GiB of tensors a process"),
        ("b", refuse, "not estimated: its shapes depend on numbers\n"),
    ):
        monkeypatch.setattr("lm.training.banner.estimated_memory", estimate)
        assert train(tiny(f"name={name}", "trainer.max_steps=1", "optim.warmup_steps=0")) == 0
        assert f"memory      {words}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_estimate_is_that_of_a_large_step_and_the_process_grows_by_half_as_much_again_at_most():
    """Beyond what libraries take at their first use; freed memory that the allocator keeps is what makes the
    difference.
    """
    code = f"""
import sys
from functools import partial
sys.path.insert(0, {str(ROOT / "tests")!r})
from test_cost import grown
grown()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    estimated, tensors, growth = map(float, result.stdout.split())
    assert estimated == pytest.approx(tensors, rel=0.15), result.stderr
    assert estimated < growth < 1.5 * estimated


def grown() -> None:
    """Print the estimate for a step, what its tensors took and what the process grew by, in MiB, after a small step,
    for libraries.
    """
    shape = [str(ROOT / "tests" / "tiny.yaml"), "data.source.paths=[x]", "model.n_embd=256", "data.seq_len=256"]
    small, large = (load_config([*shape, f"optim.batch_tokens={tokens}"]) for tokens in (512, 8192))
    measured(small)
    before = peak_process_bytes()
    tensors = measured(large)
    growth = peak_process_bytes() - before
    print(estimated_memory(large, 0, 400, False, "cpu") / 2**20, tensors / 2**20, growth / 2**20)


# ---------------------------------------------------------------- activation checkpointing


RECOMPUTED_MODELS = {
    "attention": ["model.normalizer=ssmax"],
    "gau": GAU,
    "values of the first layer": ["model.value_residual=first_layer"],
    "value embeddings": ["model.value_residual=embedding", "model.out_init=zero"],
}


@pytest.mark.parametrize("model", thinned(RECOMPUTED_MODELS, ["gau", "values of the first layer"]))
def test_activation_checkpointing_changes_no_bit(tiny, model: str):
    options = [*RECOMPUTED_MODELS[model], "model.dropout=0.2", "trainer.micro_batch=4"]
    plain, recomputed = tiny(*options, "name=plain"), tiny(*options, RECOMPUTED, "name=recomputed", "resume=auto")
    assert (train(plain), train(recomputed)) == (0, 0)
    assert differences(plain.run_folder, recomputed.run_folder) == []
    kill_after(recomputed.run_folder, 4)
    assert train(recomputed) == 0
    assert differences(plain.run_folder, recomputed.run_folder) == []


@pytest.mark.slow
def test_compiled_it_keeps_less_and_has_the_same_gradients(tiny, monkeypatch: pytest.MonkeyPatch):
    """By the partition that Inductor makes of a graph, without the code that it generates."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    decoder, totals, gradients = Decoder(tiny(*LARGER).model, 400, 128, 1), [], []
    decoder.compile_blocks(lengths=1)
    batch = Batch.of(torch.randint(400, (4, 129), generator=torch.Generator().manual_seed(0)))
    parameters = {p.data_ptr() for p in decoder.parameters()}
    for decoder.recomputes in (False, True):
        sizes: dict[int, int] = {}

        def keep(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss, _ = decoder.training_loss(batch)
        totals.append(sum(n_bytes for place, n_bytes in sizes.items() if place not in parameters))
        gradients.append(torch.autograd.grad(loss, list(decoder.parameters())))
    assert 0 < totals[1] < 0.5 * totals[0]
    torch.testing.assert_close(gradients[1], gradients[0])


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
    assert mfu(decoder, 1000.0, 4000.0 * palm) == {"mfu/causal": round(causal / palm / 4, 4), "mfu/palm": 0.25}
    assert mfu(decoder, 1000.0, None) == {}


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


# ---------------------------------------------------------------- the profiler


def test_a_window_of_steps_is_profiled_and_the_run_is_the_same(tiny):
    plain, profiled = tiny("name=plain"), tiny("name=profiled", "trainer.profile={first: 3, last: 4}")
    assert (train(plain), train(profiled)) == (0, 0)
    assert differences(plain.run_folder, profiled.run_folder) == []
    folder = profiled.run_folder / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps-3-4.json.gz", "steps-3-4.txt"]
    assert "aten::" in (folder / "steps-3-4.txt").read_text()
    names = [
        event.get("name")
        for event in json.loads(gzip.decompress((folder / "steps-3-4.json.gz").read_bytes()))["traceEvents"]
    ]
    assert sum(name.startswith("Optimizer.step") for name in names if name) >= 2


@pytest.mark.slow
def test_a_window_that_ends_after_the_run_is_cut_and_one_that_a_resumed_run_has_passed_is_named(
    tiny, capsys: pytest.CaptureFixture
):
    assert train(tiny("name=x", "trainer.max_steps=4")) == 0
    config = tiny(
        "name=x", "resume=auto", "trainer.max_steps=6", "trainer.profile={first: 3, last: 4}", "log.progress=lines"
    )
    assert train(config) == 0
    assert "trainer.profile: steps 3 to 4 were made before: none is recorded\n" in capsys.readouterr().err
    assert not (config.run_folder / "profile").exists()
    assert train(tiny("name=x", "resume=auto", "trainer.profile={first: 3, last: 90}")) == 0
    assert [path.name for path in sorted((config.run_folder / "profile").glob("*.txt"))] == ["steps-7-8.txt"]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("{first: 5, last: 4}", "last = 4: is before first = 5; give both"),
        (
            "{first: 9, last: 90}",
            "first = 9: is after the last step, trainer.max_steps = 8: nothing would be recorded; lower it",
        ),
    ],
)
def test_a_window_without_a_step_is_refused(arguments: list[str], window: str, expected: str):
    result = lm("train", *arguments, f"trainer.profile={window}")
    assert (result.returncode, result.stderr) == (2, f"error: trainer.profile.{expected}\n")
