"""Compilation: one graph for all layers that are alike, kept for later processes, and only where it pays."""

import os
from functools import partial

import pytest
import torch
from conftest import ROOT
from folders import delete_checkpoints_after, run_differences
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from lm.config import normalizers as kinds
from lm.config.load import load_config
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.model.decoder import Decoder
from lm.model.device import MIN_ALL_RUNS_FLOPS_TO_COMPILE, MIN_RUN_FLOPS_TO_COMPILE, resolve_compile, use_compile_cache
from lm.training.train import train

NARROW = ["model.n_head=1", "model.n_embd=8"]
MODELS = {
    **{name: [f"model.normalizer={name}"] for name in kinds.LAYER_OPTIONS},
    "gated attention unit": ["model.block=gau"],
    "differential": ["model.n_head=2", "model.n_embd=16", "model.differential=true", "model.output_gate=element"],
    "value residual": ["model.value_residual=first_layer"],
}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch):
    """Counts the graphs that torch.compile makes, and runs them eagerly."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    yield counter
    torch._dynamo.reset()


def batch(length: int = 12) -> Batch:
    """Two sequences of tokens."""
    return Batch.from_sequences(torch.randint(50, (2, length + 1), generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_alike_share_their_graphs_and_later_steps_make_none(tiny, counter, name: str):
    graphs = []
    for n_layer in (2, 3):
        decoder = Decoder(tiny(*NARROW, *MODELS[name], f"model.n_layer={n_layer}").model, 50, 12)
        expected = decoder.summed_loss(batch())
        decoder.compile_blocks(n_lengths=1)
        torch._dynamo.reset()
        counter.clear()
        for _ in range(2):
            loss = decoder.summed_loss(batch())
            torch.testing.assert_close(loss, expected)
            graphs.append(counter.frame_count)
    first, *_, last = graphs
    assert graphs == [first] * 2 + [last] * 2, "all graphs are made in the first step"
    assert first > 0
    assert last == first or name.startswith("value"), "layers that mix values are graphs of their own"


@pytest.mark.slow
def test_each_length_is_a_graph_and_evaluations_are_eager(tiny, counter):
    decoder = Decoder(tiny(*NARROW).model, 50, 32)
    decoder.compile_blocks(n_lengths=2)
    for length in (8, 16, 8, 16):
        decoder.summed_loss(batch(length))
    count = counter.frame_count
    decoder.eval()
    decoder.summed_loss(batch(24))
    with torch.no_grad():
        decoder.summed_loss(batch(8))
    assert counter.frame_count == count
    decoder.train()
    decoder.summed_loss(batch(8))
    assert counter.frame_count == count


@pytest.mark.parametrize(
    ("flops", "runs", "pays"),
    [
        (1.01 * MIN_ALL_RUNS_FLOPS_TO_COMPILE["cpu"], 1, "true"),
        (0.99 * MIN_ALL_RUNS_FLOPS_TO_COMPILE["cpu"], 1, "false"),
        (0.51 * MIN_ALL_RUNS_FLOPS_TO_COMPILE["cpu"], 2, "true"),
        (0.49 * MIN_ALL_RUNS_FLOPS_TO_COMPILE["cpu"], 2, "false"),
        (1.01 * MIN_RUN_FLOPS_TO_COMPILE["cpu"], 1000, "true"),
        (0.99 * MIN_RUN_FLOPS_TO_COMPILE["cpu"], 1000, "false"),
    ],
)
def test_runs_that_share_code_compile_where_all_repay_making_it_and_each_repays_loading_it(
    tiny, monkeypatch: pytest.MonkeyPatch, flops: float, runs: int, pays: str
):
    monkeypatch.setattr("shutil.which", lambda name: name)
    choice = resolve_compile(tiny("trainer.compile=auto"), flops, "cpu", {}, runs)
    assert choice.value == pays
    assert f"{flops:.1e} FLOP" in choice.reason
    assert resolve_compile(tiny("trainer.compile=auto"), flops, "cpu", {"compile": True}, runs).value == "true", (
        "as it was started"
    )
    assert resolve_compile(tiny("trainer.compile=true"), flops, "cpu", {}, runs).value == "true"
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert resolve_compile(tiny("trainer.compile=auto"), flops, "cpu", {}, runs).value == "false"
    assert resolve_compile(tiny("trainer.compile=auto"), flops, "cpu", {"compile": False}, runs).value == "false"
    for setting, facts in (("true", {}), ("auto", {"compile": True})):
        with pytest.raises(ConfigError, match=r"trainer\.compile = true: no C\+\+ compiler found"):
            resolve_compile(tiny(f"trainer.compile={setting}"), flops, "cpu", facts, runs)


def test_training_on_tasks_alone_stays_eager_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    config = load_config([str(ROOT / "configs" / "recall.yaml")])
    assert str(resolve_compile(config, 1e20, "cpu", {})) == "false (auto: steps on tasks alone compute less eager)"
    assert resolve_compile(config, 1e20, "gpu", {}).value == "true"


def test_compiled_code_lies_where_the_user_says_or_else_in_the_cache_of_this_cpu(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    use_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch does, where nobody says otherwise
    use_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/lm/compiled-")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ, "torch's default"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["model.dropout=0.2", "trainer.micro_batch=4"]], ids=["plain", "dropout, micro-batches"]
)
def test_a_compiled_run_that_was_killed_and_resumed_is_the_same_to_the_bit(tiny, options: list[str]):
    whole_run, killed_run = (
        tiny("trainer.compile=true", *options, f"name={name}", "resume=auto") for name in ("whole", "killed")
    )
    assert (train(whole_run), train(killed_run)) == (0, 0)
    delete_checkpoints_after(killed_run.run_folder, 4)
    torch._dynamo.reset()
    assert train(killed_run) == 0
    assert run_differences(whole_run.run_folder, killed_run.run_folder) == []
