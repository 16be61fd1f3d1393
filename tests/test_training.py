"""Training: the run folder, exactness, resuming, stopping, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, lm

from lm.attention import table
from lm.checkpoints import load_checkpoint, load_decoder, steps_saved
from lm.config import WSD, Constant, Cosine, LogConfig, OptimConfig, parse
from lm.errors import ConfigError, RunError
from lm.model import Decoder
from lm.training.metrics import cut_back, wandb_mode
from lm.training.optim import lr_factor, make_optimizer
from lm.training.run import hold, train


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(folder) if "train/loss" in line]


def weights(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoints" / name)["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_a_complete_run_folder(tiny, capsys: pytest.CaptureFixture):
    config = tiny("name=whole", "trainer.max_steps=40", "trainer.checkpoint_every=10", "trainer.keep_checkpoints=2", "eval.every=10")
    assert train(config) == 0
    folder = config.run_folder
    assert parse(yaml.safe_load((folder / "config.yaml").read_text())) == config
    facts = json.loads((folder / "environment.json").read_text())
    assert {"git_commit", "versions", "device", "precision", "command", "data_fingerprint", "parameters", "unigram_entropy"} <= facts.keys()
    assert (folder / "tokenizer.json").exists()
    lines = metrics(folder)
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 41))
    assert losses(folder)[-1] < losses(folder)[0] - 0.5
    assert [line["step"] for line in lines if "val/loss" in line] == [10, 20, 30, 40]
    assert [path.name for path in steps_saved(folder / "checkpoints")] == ["step-000030.ckpt", "step-000040.ckpt"]
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"] == 40
    validation = json.loads((folder / "evaluations" / "validation.step-000040.json").read_text())
    assert validation["loss"] == pytest.approx(sum(validation["nll_by_row"]) / validation["rows"], abs=1e-5)
    assert validation["loss"] < validation["unigram_entropy"] + 0.5
    long = json.loads((folder / "evaluations" / "long_context.step-000040.json").read_text())
    assert long["length"] == 4 * 32
    assert [s["rope_theta_factor"] for s in long["settings"]] == [1.0, 50.0]
    assert all(len(s["nll_by_position"]) == 128 for s in long["settings"])
    assert not list(folder.rglob(".*"))
    out = capsys.readouterr().out
    for word in ("parameters", "normalizer", "kernel", "fingerprint", "FLOP", "precision", "seed"):
        assert word in out


@pytest.mark.parametrize("name", table.ENTRIES)
def test_steps_then_kill_then_resume_equal_steps_in_one_go_bit_for_bit(tiny, name: str):
    """With dropout, gradient accumulation, a kill between checkpoints, and twice in a row."""
    options = [
        f"model.normalizer={name}",
        "model.dropout=0.2",
        "trainer.micro_batch=2",
        "trainer.max_steps=9",
        "trainer.checkpoint_every=3",
    ]
    whole = tiny("name=whole", *options)
    train(whole)
    parts = tiny("name=parts", *options, "resume=auto")
    train(parts)
    expected = metrics(parts.run_folder)
    for step in (3, 6):  # as if killed after checkpoint `step`, some metrics already written
        checkpoints = parts.run_folder / "checkpoints"
        for path in steps_saved(checkpoints):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        os.replace(shutil.copy(checkpoints / f"step-{step:06d}.ckpt", checkpoints / "copy"), checkpoints / "last.ckpt")
        train(parts)
    assert losses(whole.run_folder) == losses(parts.run_folder)
    assert [line.get("val/loss") for line in metrics(parts.run_folder)] == [line.get("val/loss") for line in expected]
    assert same(weights(whole.run_folder), weights(parts.run_folder))


def test_the_step_is_the_same_however_it_is_split_into_micro_batches(tiny):
    one, many = tiny("name=one"), tiny("name=many", "trainer.micro_batch=1")
    train(one)
    train(many)
    assert losses(one.run_folder) == pytest.approx(losses(many.run_folder), abs=1e-4)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (8, 2), (1, 8)])
def test_a_run_resumed_with_another_split_sees_the_same_tokens(tiny, before: int, after: int):
    train(tiny("name=whole"))
    train(tiny("name=parts", f"trainer.micro_batch={before}", "trainer.checkpoint_every=3"))
    first = tiny("name=parts").run_folder / "checkpoints" / "step-000003.ckpt"
    train(tiny("name=parts", f"trainer.micro_batch={after}", "trainer.checkpoint_every=3", f"resume={first}"))
    assert len(losses(tiny("name=parts").run_folder)) == 8
    assert losses(tiny("name=parts").run_folder) == pytest.approx(losses(tiny("name=whole").run_folder), abs=1e-4)


def test_a_run_of_two_processes_goes_on_with_one(arguments: list[str], tmp_path: Path):
    options = ["trainer.checkpoint_every=4"]
    for name, devices, steps, resume in (("one", 1, 8, ""), ("both", 2, 8, ""), ("both", 1, 8, "resume")):
        extra = [f"resume={tmp_path / 'runs' / 'both' / 'checkpoints' / 'step-000004.ckpt'}"] if resume else []
        result = lm("train", *arguments, *options, *extra, f"name={name}", f"trainer.devices={devices}", f"trainer.max_steps={steps}")
        assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "runs" / "both") == pytest.approx(losses(tmp_path / "runs" / "one"), abs=1e-4)


def test_a_launcher_of_another_size_is_refused(arguments: list[str]):
    result = lm("train", *arguments, "name=launched", WORLD_SIZE="4", RANK="0", LOCAL_RANK="0")
    assert result.returncode == 2
    assert "trainer.devices = 1: with num_nodes = 1 makes 1 processes, the launcher started 4" in result.stderr


def test_two_processes_train_as_one(arguments: list[str], tmp_path: Path):
    """DDP launched by `lm train` itself: same tokens, losses and evaluations up to the order of additions."""
    for name, devices in (("one", 1), ("two", 2)):
        result = lm("train", *arguments, f"name={name}", f"trainer.devices={devices}")
        assert result.returncode == 0, result.stderr
    one, two = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert losses(one) == pytest.approx(losses(two), abs=1e-4)
    a, b = (json.loads((run / "evaluations" / "long_context.step-000008.json").read_text()) for run in (one, two))
    assert a["rows_sha256"] == b["rows_sha256"]
    assert a["settings"][0]["nll_by_position"] == pytest.approx(b["settings"][0]["nll_by_position"], abs=1e-2)


def test_torchrun_trains_on_two_processes(arguments: list[str], tmp_path: Path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lm", "train"]
    result = subprocess.run(
        [sys.executable, *command, *arguments, "name=torchrun", "trainer.devices=2"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path / "runs" / "torchrun")) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_a_signal_leaves_a_checkpoint_from_which_the_run_ends_the_same(arguments: list[str], tmp_path: Path, number: signal.Signals):
    options = ["trainer.max_steps=300", "trainer.checkpoint_every=300", "eval.every=300", "eval.long_context.length_factor=0"]
    command = [sys.executable, "-m", "lm", "train", *arguments, *options, "name=stopped"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "stopped"
    for _ in range(600):
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > 5:
            break
        time.sleep(0.1)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    assert 5 < load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"] < 300
    assert lm("train", *arguments, *options, "name=stopped", "resume=auto").returncode == 0
    assert lm("train", *arguments, *options, "name=straight").returncode == 0
    assert same(weights(folder), weights(tmp_path / "runs" / "straight"))
    assert losses(folder) == losses(tmp_path / "runs" / "straight")


def test_a_complete_run_resumed_does_nothing_but_missing_evaluations(tiny):
    config = tiny("name=done")
    train(config)
    before = (config.run_folder / "metrics.jsonl").read_bytes()
    evaluation = config.run_folder / "evaluations" / "validation.step-000008.json"
    loss = json.loads(evaluation.read_text())["loss"]
    evaluation.unlink()
    assert train(tiny("name=done", "resume=auto")) == 0
    assert (config.run_folder / "metrics.jsonl").read_bytes() == before
    assert json.loads(evaluation.read_text())["loss"] == pytest.approx(loss, abs=1e-6)


def test_more_steps_may_be_asked_for_when_resuming(tiny):
    train(tiny("name=more", "optim.schedule=constant"))
    assert train(tiny("name=more", "optim.schedule=constant", "trainer.max_steps=12", "resume=auto")) == 0
    train(tiny("name=once", "optim.schedule=constant", "trainer.max_steps=12"))
    more, once = tiny("name=more").run_folder, tiny("name=once").run_folder
    assert losses(more) == losses(once)
    assert same(weights(more), weights(once))


# ---------------------------------------------------------------- refusals


def test_an_existing_run_folder_is_refused_and_left_alone(tiny):
    config = tiny("name=twice")
    train(config)
    before = {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="resume=auto"):
        train(config)
    assert before == {path: path.read_bytes() for path in config.run_folder.rglob("*") if path.is_file()}


def test_a_run_folder_in_use_is_refused(tiny):
    config = tiny("name=used")
    train(config)
    with hold(config.run_folder), pytest.raises(RunError, match="another process is training"):
        train(tiny("name=used", "resume=auto"))


def test_resuming_with_another_configuration_lists_every_difference(tiny):
    train(tiny("name=other"))
    with pytest.raises(ConfigError) as caught:
        train(tiny("name=other", "resume=auto", "model.n_embd=64", "optim.lr=1e-3", "seed=9", "log.every=5", "trainer.max_steps=20"))
    assert {problem.path for problem in caught.value.problems} == {"model.n_embd", "optim.lr", "seed"}


def test_another_normalizer_never_loads_silently(tiny):
    config = tiny("name=ssmax", "model.normalizer=ssmax")
    train(config)
    with pytest.raises(ConfigError, match=r"model\.normalizer"):
        train(tiny("name=ssmax", "resume=auto"))
    train(tiny("name=log_n", "model.normalizer=log_n"))
    other = tiny("name=log_n").run_folder / "checkpoints" / "last.ckpt"
    with pytest.raises(RunError, match="not a checkpoint of"):
        train(tiny("name=plain", f"resume={other}"))
    train(tiny("name=plain"))
    foreign = shutil.copy(other, tiny("name=plain").run_folder / "checkpoints" / "step-000003.ckpt")
    with pytest.raises(ConfigError, match=r"model\.normalizer\.name = 'softmax': the checkpoint was trained with 'log_n'"):
        train(tiny("name=plain", f"resume={foreign}"))
    state = weights(config.run_folder)
    bare = {name.removeprefix("decoder."): value for name, value in state.items()}
    with pytest.raises(RuntimeError, match=r"normalizer\.s"):
        Decoder(tiny().model, 400, 32).load_state_dict(bare)


def test_a_run_folder_that_cannot_be_made_is_one_line(arguments: list[str], tmp_path: Path):
    (tmp_path / "file").write_text("")
    for runs in (tmp_path / "file", Path("/proc/nothing")):
        result = lm("train", *arguments, f"runs={runs}")
        assert result.returncode == 1
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert str(runs) in result.stderr


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(arguments: list[str], tmp_path: Path):
    """A file-size limit stands in for the full disk: the second save fails half-way through."""
    assert lm("train", *arguments, "name=full", "trainer.max_steps=4").returncode == 0
    folder = tmp_path / "runs" / "full"
    size = (folder / "checkpoints" / "last.ckpt").stat().st_size
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2}));"
        "sys.argv = ['lm', *sys.argv[1:]]; from lm.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "train", *arguments, "name=full", "trainer.max_steps=8", "resume=auto"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "can't save the checkpoint: File too large; what was there before is intact" in result.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"] == 4
    assert lm("train", *arguments, "name=full", "trainer.max_steps=8", "resume=auto").returncode == 0


def test_a_gradient_that_is_not_finite_stops_the_run_and_says_where(tiny):
    config = tiny("name=blown", "optim.lr=1e30", "optim.grad_clip=0", "optim.warmup_steps=0")
    with pytest.raises(RunError, match=r"step \d+: the gradient is (nan|inf)"):
        train(config)


def test_a_damaged_checkpoint_is_named(tiny):
    config = tiny("name=damaged")
    train(config)
    last = config.run_folder / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    for damage in (b"", content[: len(content) // 2], b"x" * 100):
        last.unlink()
        last.write_bytes(damage)
        with pytest.raises(RunError, match=r"last.ckpt: not a"):
            load_decoder(last)


# ---------------------------------------------------------------- parts


def test_learning_rate_follows_the_schedule():
    optim = OptimConfig(warmup_steps=10, schedule=Cosine(final_fraction=0.1))
    assert [lr_factor(step, optim, 110) for step in (0, 9, 10, 60, 110)] == pytest.approx([0.1, 1, 1, 0.55, 0.1])
    optim.schedule = Constant()
    assert [lr_factor(step, optim, 110) for step in (4, 10, 109)] == pytest.approx([0.5, 1, 1])
    optim.schedule = WSD(decay_fraction=0.5, final_fraction=0.0)
    assert [lr_factor(step, optim, 100) for step in (10, 50, 75, 100)] == pytest.approx([1, 1, 0.5, 0])


def test_weight_decay_is_on_matrices_only(tiny):
    decoder = Decoder(tiny("model.normalizer={name: ssmax, bias: true}", "model.bias=true", "model.norm=layer").model, 400, 32)
    decayed, free = make_optimizer(decoder, OptimConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}
    assert sum(len(group["params"]) for group in (decayed, free)) == len(list(decoder.parameters()))


def test_what_came_after_the_resumed_step_is_cut_back(tmp_path: Path):
    (tmp_path / "evaluations").mkdir()
    for step in (2, 3):
        (tmp_path / "evaluations" / f"validation.step-{step:06d}.json").write_text("{}")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_back(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [p.name for p in (tmp_path / "evaluations").iterdir()] == ["validation.step-000002.json"]


def test_going_back_to_an_earlier_checkpoint_keeps_the_new_ones(tiny):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=3"]
    config = tiny("name=back", *options)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    assert [path.name for path in steps_saved(checkpoints)] == ["step-000004.ckpt", "step-000006.ckpt", "step-000008.ckpt"]
    expected = losses(config.run_folder)
    train(tiny("name=back", *options, f"resume={checkpoints / 'step-000004.ckpt'}", "trainer.max_steps=6", "optim.schedule=cosine"))
    assert load_checkpoint(checkpoints / "last.ckpt")["lm"]["step"] == 6
    assert len(losses(config.run_folder)) == 6
    assert losses(config.run_folder)[:4] == expected[:4]
    assert not (config.run_folder / "evaluations" / "validation.step-000008.json").exists()


def test_wandb_is_online_only_with_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(LogConfig()) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_mode(LogConfig()) == "online"
    assert wandb_mode(LogConfig(wandb="disabled")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(LogConfig()) == "offline"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert wandb_mode(LogConfig()) == "online"


def test_metrics_are_mirrored_to_an_offline_wandb_run(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny("name=mirrored", "log.wandb=offline")
    train(config)
    assert list(config.run_folder.glob("wandb/offline-run-*/run-*.wandb"))
