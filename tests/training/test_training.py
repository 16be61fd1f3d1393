"""Training: the run folder, the optimizer and its schedule, what stops a run, and what is refused."""

import json
import shlex
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from folders import inject_nan, last_checkpoint, logged_values, metric_lines, stored_curves, training_losses

from lm.config.load import parse_config
from lm.errors import RunError
from lm.files import new_temporary_path
from lm.machine import command_line
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import checkpoint_paths
from lm.training.fit import truncate_results
from lm.training.loggers import MetricsFile
from lm.training.module import LanguageModel
from lm.training.step_callbacks import StopOnSignal
from lm.training.train import train

# sequences of unequal numbers of answers
TASK = "data.tasks=[{weight: 0.5, task: mqar}, {weight: 0.5, task: {name: mqar, queries: 1}}]"
WITHOUT_TEXT = ["data.seq_len=64", "eval.long_context.length_factor=0", "eval.recall.length_factors=[]"]


def test_a_run_learns_and_leaves_a_complete_run_folder(tiny, capsys: pytest.CaptureFixture):
    config = tiny(
        "name=whole",
        "trainer.max_steps=40",
        "trainer.checkpoint_every=10",
        "trainer.keep_checkpoints=2",
        "eval.every=10",
    )
    assert train(config) == 0
    folder = config.run_folder
    assert parse_config(yaml.safe_load((folder / "config.yaml").read_text())) == config
    facts = json.loads((folder / "environment.json").read_text())
    assert {
        "git_commit",
        "versions",
        "device",
        "precision",
        "command",
        "data_fingerprint",
        "parameters",
    } <= facts.keys()
    assert (folder / "tokenizer.json").exists()
    lines = metric_lines(folder)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 41))
    assert training_losses(folder)[-1] < training_losses(folder)[0] - 0.5
    assert [line["step"] for line in lines if "val/loss" in line] == [10, 20, 30, 40]
    peaks = [line["peak_memory_bytes"] for line in lines]
    assert all(later > 0.99 * earlier for earlier, later in pairwise(peaks))  # Linux counts pages in batches
    assert 2**26 < peaks[-1] < 2**36
    assert [path.name for path in checkpoint_paths(folder / "checkpoints")] == ["step-000030.ckpt", "step-000040.ckpt"]
    assert load_checkpoint(last_checkpoint(folder))["lm"]["step"] == 40
    loss, bits = stored_curves(folder, "validation", 40)
    assert bits.metric == "val/bits_per_byte"
    assert loss.overall_mean == pytest.approx(loss.points[0].values.mean(), abs=1e-5)
    assert loss.overall_mean < loss.references["unigram cross-entropy"] + 0.5
    long = [curve_of_loss for curve_of_loss in stored_curves(folder, "long_context", 40) if curve_of_loss.bins]
    assert [curve_of_loss.setting for curve_of_loss in long] == ["as trained", "theta x 50"]
    assert all(curve_of_loss.until[-1] == 4 * 32 for curve_of_loss in long)
    assert not list(folder.rglob(".*"))
    out = capsys.readouterr().out
    for word in ("parameters", "normalizer", "kernel", "fingerprint", "FLOP", "precision"):
        assert word in out


def test_a_tilde_is_the_home_folder_in_every_path(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    short = ["trainer.max_steps=2", "eval.long_context.length_factor=0"]
    config = tiny("name=first", "runs=~/runs", "data.root=~/data", *short)
    assert train(config) == 0
    tokenizer = "data.tokenizer={name: file, path: ~/runs/first/tokenizer.json}"
    assert (
        train(tiny("name=second", "runs=~/runs", "data.root=~/data", tokenizer, "init_from=~/runs/first", *short)) == 0
    )
    branch = ["branch_from=~/runs/first/checkpoints/step-000002.ckpt", "trainer.max_steps=4", short[1]]
    assert train(tiny("name=third", "runs=~/runs", "data.root=~/data", *branch)) == 0
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"runs", "data"}
    assert (
        train(tiny("name=first", "runs=~/runs", "data.root=~/data", branch[0].replace("branch_from", "resume"), *short))
        == 0
    )
    assert not (tmp_path / "~").exists()
    with pytest.raises(RunError, match="~nobody-of-this-name/runs: no such user"):
        train(tiny("name=nobody", "runs=~nobody-of-this-name/runs"))


def test_a_metrics_log_that_can_not_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        RunError, match=r"metrics\.jsonl: can't log step 3: No space left on device; go on with resume=auto"
    ):
        MetricsFile(tmp_path / "metrics.jsonl").log_metrics({"train/loss": 1.0}, 3)


def test_the_recorded_command_can_be_run_again(monkeypatch: pytest.MonkeyPatch):
    words = ["lm", "train", "a b.yaml", "data.source.paths=[x, 'y z']", "name=$HOME"]
    monkeypatch.setattr("sys.argv", words)
    assert shlex.split(command_line()) == words


def test_steps_micro_batches_ranks_and_seeds_have_each_their_own_dropout():
    """And a micro-batch that is read again, as after a resume, has the same."""
    cases, seeds = list(product((0, 1), (0, 1, 7), (0, 1, 2), (0, 1, 3))), []
    with torch.random.fork_rng():
        for seed, step, micro_batch, rank in [*cases, *cases]:
            module = SimpleNamespace(
                config=SimpleNamespace(seed=seed), global_step=step, micro_batches_per_step=3, global_rank=rank
            )
            module.device = torch.device("cpu")
            LanguageModel.on_train_batch_start(module, None, 3 * step + micro_batch)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == len(cases)
    assert seeds[: len(cases)] == seeds[len(cases) :]


def test_the_logged_loss_is_the_mean_of_all_steps_since_the_last_line(tiny):
    """Also across a resume, and where tasks leave each step another number of targets."""
    for name, options in (("text", []), ("task", [TASK, *WITHOUT_TEXT])):
        every_step = tiny(f"name={name}-each", *options)
        every_third = tiny(f"name={name}-few", "log.every=3", *options)
        train(every_step)
        train(tiny(f"name={name}-few", "log.every=3", *options))
        last_checkpoint(every_third.run_folder).unlink()
        before = logged_values(every_third.run_folder)
        train(tiny(f"name={name}-few", "log.every=3", "resume=auto", *options))
        assert logged_values(every_third.run_folder) == before
        steps = training_losses(every_step.run_folder)
        assert [step for step, _ in before] == [1, 3, 6, 8]
        for (step, loss), first in zip(before, (0, 1, 3, 6), strict=True):
            assert loss == pytest.approx(sum(steps[first:step]) / (step - first), rel=1e-6 if name == "text" else 0.05)


@pytest.mark.parametrize(
    "options", [[], ["trainer.micro_batch=2"], [TASK, *WITHOUT_TEXT]], ids=["whole", "micro-batches", "task"]
)
def test_a_step_waits_for_its_device_once(tiny, monkeypatch: pytest.MonkeyPatch, options: list[str]):
    """Counted on a CPU as calls of what brings a tensor's values to the host; on a GPU: test_gpu.py."""
    calls, by_step = Counter(), []

    def counted(name: str):
        function = getattr(torch.Tensor, name)

        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    start, end = LanguageModel.on_train_batch_start, StopOnSignal.on_train_batch_end

    def started(self, *arguments):
        calls.clear()
        start(self, *arguments)

    def ended(self, trainer, module, *arguments):
        by_step.append((trainer.global_step, dict(calls)))
        end(self, trainer, module, *arguments)

    monkeypatch.setattr(LanguageModel, "on_train_batch_start", started)
    monkeypatch.setattr(StopOnSignal, "on_train_batch_end", ended)
    train(tiny("name=waits", "eval.every=8", *options))
    assert [counts for _, counts in by_step if counts] == [{"tolist": 1}] * 8


def test_a_checkpoint_is_lightning_s_read_by_torch_alone_and_has_the_optimizer_s_state_by_name(tiny):
    config = tiny("name=plain", "trainer.max_steps=4", "eval.long_context.length_factor=0")
    train(config)
    content = torch.load(last_checkpoint(config.run_folder), weights_only=True)
    assert content["global_step"] == content["lm"]["step"] == 4
    (counts,) = (value for name, value in content["loops"]["fit_loop"].items() if name.endswith("optim_progress"))
    assert counts["optimizer"]["step"]["total"]["completed"] == 4
    (optimizer,) = content["optimizer_states"]
    assert optimizer["state"].keys() == content["state_dict"].keys()
    for name, state in optimizer["state"].items():
        assert state["exp_avg"].shape == content["state_dict"][name].shape
        assert state["step"] == 4


# ---------------------------------------------------------------- refusals


def test_an_existing_run_folder_is_refused_and_left_alone(tiny):
    config = tiny("name=twice")
    train(config)
    before = {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="resume=auto"):
        train(config)
    assert before == {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_step_that_is_not_finite_stops_the_run_and_says_where(tiny, monkeypatch: pytest.MonkeyPatch, what: str):
    inject_nan(monkeypatch, {6}, what)
    place = "none" if what == "loss" else "embedding.weight"
    with pytest.raises(RunError, match=rf"step 6: the loss is .*finite: {place}\)"):
        train(tiny("name=blown"))
    assert load_checkpoint(last_checkpoint(tiny("name=blown").run_folder))["lm"]["step"] == 4


# ---------------------------------------------------------------- parts


def test_what_came_after_the_resumed_step_is_cut_back(tmp_path: Path):
    (tmp_path / "evaluations").mkdir()
    for step in (2, 3):
        (tmp_path / "evaluations" / f"validation.step-{step:06d}.csv").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    for name in (
        ".nfs000001",
        f"checkpoints/{new_temporary_path(tmp_path / 'step-000003.ckpt').name}",
        new_temporary_path(tmp_path / "metrics.jsonl").name,
    ):
        (tmp_path / name).write_text("")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_results(tmp_path, 2)
    assert [p.name for p in [*tmp_path.glob(".*"), *tmp_path.glob("checkpoints/.*")]] == [".nfs000001"]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [p.name for p in (tmp_path / "evaluations").iterdir()] == ["validation.step-000002.csv"]


def test_sequences_of_several_lengths_are_trained_and_logged(tiny):
    mixed = "data.lengths={name: mixed, weights: {8: 0.5, 32: 0.5}}"
    config = tiny("name=mixed", mixed, "trainer.max_steps=12", "model.normalizer={name: relu2, n: sample}")
    assert train(config) == 0
    lines = [line for line in metric_lines(config.run_folder) if "sequence_length" in line]
    assert {line["sequence_length"] for line in lines} == {8, 32}
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 13)]
    assert parse_config(yaml.safe_load((config.run_folder / "config.yaml").read_text())) == config
