"""Resuming is exact, bit for bit: the table of normalizers x scenarios, signals, kills, and what is refused.

python -m pytest tests/test_resume.py -m "slow or not slow" -k bitwise      prints the whole table
"""

import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lm
from folders import alive, curve, differences, kill_after, losses, metrics, poison, same, series, weights

from lm.attention import catalogue
from lm.config.data_config import DataConfig
from lm.config.training_config import OPTIMIZERS
from lm.data.batches import TrainSequences
from lm.data.prepare import prepare
from lm.errors import ConfigError, RunError
from lm.files import locked_folder, new_folder
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import TRAINING, steps_saved
from lm.runs.loading import load
from lm.training.callbacks import StopOnSignal
from lm.training.checkpointing import Checkpoints
from lm.training.train import train

EVERY_STEP = ["trainer.checkpoint_every=1", "trainer.keep_checkpoints=20", "eval.every=2", "eval.long_context.length_factor=0"]


def swap_to(name: str) -> str:
    """Phases that end with the normalizer `name`, the boundary after step 4 of 8."""
    first = "ssmax" if name == "softmax" else "softmax"
    return f"phases=[{{until: 0.5, normalizer: {first}}}, {{until: 1, normalizer: {name}, warmup_steps: 3}}]"


# options, and the steps that the run is killed after
SCENARIOS = {
    "plain": ([], (3,)),
    "accumulation": (["trainer.micro_batch=2"], (3,)),
    "dropout": (["model.dropout=0.2"], (3,)),
    "twice in a row": (["model.dropout=0.2", "trainer.micro_batch=2"], (3, 6)),
    "mixed lengths": (["data.lengths={name: mixed, weights: {8: 0.5, 32: 0.5}}", "trainer.micro_batch=2"], (3,)),
    "isolated documents": (["data.lengths={name: curriculum, starts: {0.0: 16, 0.5: 32}}", "data.documents=isolate"], (3,)),
    "bf16": (["trainer.precision=bf16-mixed"], (3,)),
}
SWAPS = {"swap, before": (2,), "swap, at": (4,), "swap, after": (6,), "swap, all three": (2, 4, 6)}


# By default the whole table for one normalizer, and its two richest columns for one of each kind of kernel, parameter and state.
SOME, RICHEST = ("ssmax",), ("twice in a row", "swap, all three")
KINDS = ("softmax", "relu2", "entmax15", "linear", "window", "forget", "p_n", "qassmax")


def cells(scenarios: dict[str, object]) -> pytest.MarkDecorator:
    """Every normalizer x scenario, as parameters `name` and `scenario`."""
    quick = [
        (name, scenario) for name in catalogue.ENTRIES for scenario in scenarios if name in SOME or (name in KINDS and scenario in RICHEST)
    ]
    slow = [(name, scenario) for name in catalogue.ENTRIES for scenario in scenarios if (name, scenario) not in quick]
    return pytest.mark.parametrize(("name", "scenario"), quick + [pytest.param(*cell, marks=pytest.mark.slow) for cell in slow])


def rows(names: object = SOME) -> pytest.MarkDecorator:
    """Every normalizer as the parameter `name`; those not in `names` are slow."""
    return pytest.mark.parametrize(
        "name", [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in catalogue.ENTRIES]
    )


@cells(SCENARIOS)
def test_a_resumed_run_is_bitwise_the_same(tiny, record_property, name: str, scenario: str):
    options, kills = SCENARIOS[scenario]
    check(tiny, record_property, name, scenario, [f"model.normalizer={name}", *options], kills)


OTHERS = [name for name in OPTIMIZERS if name != "adamw"]  # with which all other runs of the table are made
FOR_OPTIMIZERS = {name: (["model.normalizer=ssmax", *options], kills) for name, (options, kills) in SCENARIOS.items()}
FOR_OPTIMIZERS |= {name: ([swap_to("ssmax"), *SCENARIOS["twice in a row"][0]], kills) for name, kills in SWAPS.items()}


@pytest.mark.parametrize(
    "scenario", [one if one == "swap, all three" else pytest.param(one, marks=pytest.mark.slow) for one in FOR_OPTIMIZERS]
)
@pytest.mark.parametrize("optimizer", OTHERS)
def test_a_run_of_another_optimizer_resumed_is_bitwise_the_same(tiny, record_property, optimizer: str, scenario: str):
    options, kills = FOR_OPTIMIZERS[scenario]
    check(tiny, record_property, optimizer, scenario, [f"optim.optimizer={optimizer}", *options], kills)


@rows()
def test_a_run_that_skipped_steps_resumed_is_bitwise_the_same(tiny, record_property, monkeypatch: pytest.MonkeyPatch, name: str):
    poison(monkeypatch, {2, 3, 4, 7}, "gradient")
    parts = check(tiny, record_property, name, "skipped steps", [f"model.normalizer={name}", "optim.on_nonfinite=skip"], (3,))
    assert load_checkpoint(parts / "checkpoints" / "last.ckpt")["lm"]["skipped"] == 4


@cells(SWAPS)
def test_a_run_resumed_around_a_swap_is_bitwise_the_same(tiny, record_property, name: str, scenario: str):
    options = [swap_to(name), "model.dropout=0.2", "trainer.micro_batch=2"]
    parts = check(tiny, record_property, name, scenario, options, SWAPS[scenario])
    assert load_checkpoint(parts / "checkpoints" / "last.ckpt")["lm"]["phase"] == 1
    assert load(parts).decoder.config.normalizer.name == name


@rows()
def test_a_run_resumed_at_the_end_of_an_epoch_is_bitwise_the_same(tiny, record_property, name: str):
    few = ["data.val_fraction=0.9", f"model.normalizer={name}"]
    store = prepare(tiny(*few).data, progress=False)
    for seq_len in range(30, 60):
        count = TrainSequences(store, DataConfig(seq_len=seq_len), 1, 1).streams[0].sequences_per_epoch
        if count % 3 == 0:
            break
    else:
        pytest.fail("no length of rows gives epochs of three steps")
    options = [*few, f"data.seq_len={seq_len}", f"optim.batch_tokens={count // 3 * seq_len}", "trainer.max_steps=7"]
    check(tiny, record_property, name, "an epoch's end", options, (3, 6))


def check(tiny, record_property, name: str, scenario: str, options: list[str], kills: tuple[int, ...]) -> Path:
    """Train in one go and with kills, compare, and enter the result in the table."""
    whole, parts = tiny("name=whole", *EVERY_STEP, *options), tiny("name=parts", *EVERY_STEP, *options, "resume=auto")
    train(whole)
    shutil.copytree(whole.run_folder, parts.run_folder)
    for step in kills:
        kill_after(parts.run_folder, step)
        train(parts)
    found = differences(whole.run_folder, parts.run_folder)
    record_property("bitwise", [name, scenario, "equal" if not found else ", ".join(found)])
    assert not found
    return parts.run_folder


RANKS = {"2 ranks": ([], (4,)), "2 ranks, dropout, accumulation": (["model.dropout=0.2", "trainer.micro_batch=1"], (3, 6))}


@pytest.mark.parametrize(
    ("names", "optimizer"),
    [
        (SOME, "adamw"),
        pytest.param(tuple(name for name in catalogue.ENTRIES if name not in SOME), "adamw", marks=pytest.mark.slow),
        *(pytest.param(SOME, optimizer, marks=pytest.mark.slow) for optimizer in OTHERS),
    ],
    ids=["some", "others", *OTHERS],
)
def test_two_ranks_resumed_are_bitwise_the_same(
    arguments: list[str], tmp_path: Path, record_property, names: tuple[str, ...], optimizer: str
):
    """One torchrun makes all the runs: in one go, in one go again and then back to earlier checkpoints."""
    jobs = []
    expected = []
    for name in names:
        for scenario, (options, backs) in {**RANKS, "2 ranks, swap": ([swap_to(name)], (2, 4, 6))}.items():
            folder = f"{name} {scenario}".replace(",", "").replace(" ", "-")
            common = [*arguments, *EVERY_STEP, "trainer.devices=2", f"optim.optimizer={optimizer}", *options]
            common += [f"model.normalizer={name}"] if "swap" not in scenario else []
            jobs += [[*common, f"name={folder}-a"], [*common, f"name={folder}-b"]]
            for step in backs:
                jobs.append([*common, f"name={folder}-b", f"resume={tmp_path}/runs/{folder}-b/checkpoints/step-{step:06d}.ckpt"])
            expected.append((name, scenario, folder))
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))  # too long for a command line
    torchrun(2, ["tests/jobs.py", str(tmp_path / "jobs.json")])
    failed = []
    for name, scenario, folder in expected:
        found = differences(tmp_path / "runs" / f"{folder}-a", tmp_path / "runs" / f"{folder}-b")
        of = name if optimizer == "adamw" else optimizer
        record_property("bitwise", [of, scenario, "equal" if not found else ", ".join(found)])
        failed += found
    assert not failed


def torchrun(ranks: int, command: list[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*launch, *command], capture_output=True, text=True, cwd=ROOT, timeout=1200, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


# ---------------------------------------------------------------- stops


def start(arguments: list[str], *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "lm", "train", *arguments, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until the metrics of `step` are there."""
    for _ in range(1200):
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > step:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    raise AssertionError("the run makes no steps")


LONG = ["trainer.checkpoint_every=100000", "eval.every=100000", "eval.long_context.length_factor=0"]


def test_a_signal_leaves_a_checkpoint_from_which_the_run_ends_the_same(arguments: list[str], tmp_path: Path):
    """One run, stopped by each of the signals and resumed in turn."""
    options = [*LONG, "trainer.max_steps=300"]
    folder, seen = tmp_path / "runs" / "stopped", 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        process = start(arguments, *options, "name=stopped", "resume=auto")
        wait_for_step(folder, seen + 3, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + number, stderr
        assert "Traceback" not in stderr
        before, seen = seen, load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"]
        assert before + 3 < seen < 300
    assert lm("train", *arguments, *options, "name=stopped", "resume=auto").returncode == 0
    assert lm("train", *arguments, *options, "name=straight").returncode == 0
    assert not differences(folder, tmp_path / "runs" / "straight")


STOPS = [(signal.SIGTERM, "group"), (signal.SIGINT, "group"), (signal.SIGTERM, "parent"), (signal.SIGUSR1, "parent")]


@pytest.mark.parametrize(
    ("number", "target"), [pytest.param(*stop, marks=[pytest.mark.slow] if index else []) for index, stop in enumerate(STOPS)]
)
def test_a_signal_stops_two_ranks_with_a_checkpoint(arguments: list[str], tmp_path: Path, number: signal.Signals, target: str):
    process = start(arguments, *LONG, "trainer.max_steps=100000", "trainer.devices=2", "name=stopped")
    folder = tmp_path / "runs" / "stopped"
    wait_for_step(folder, 5, process)
    os.killpg(process.pid, number) if target == "group" else process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    step = load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"]
    assert curve(folder)[-1][0] == step > 5
    assert not alive(process.pid)


@pytest.mark.parametrize("ignored", [False, True], ids=["heard", "started by nohup"])
def test_a_terminal_that_hangs_up_twice_asks_for_one_stop(ignored: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with StopOnSignal() as stop:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == (0 if ignored else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_closed_terminal_leaves_a_checkpoint(arguments: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "lm", "train", *arguments, *LONG, "trainer.max_steps=100000", "name=stopped"]
    process, terminal = pty.fork()
    if not process:
        os.chdir(ROOT)
        os.execv(command[0], command)
    log, deadline = tmp_path / "runs" / "stopped" / "metrics.jsonl", time.monotonic() + 60
    while (not log.exists() or len(log.read_text().splitlines()) < 5) and time.monotonic() < deadline:
        select.select([terminal], [], [], 0.1)[0] and os.read(terminal, 10_000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert load_checkpoint(log.parent / "checkpoints" / "last.ckpt")["lm"]["step"] == curve(log.parent)[-1][0] >= 4


@pytest.mark.slow
def test_torchrun_told_to_stop_leaves_a_checkpoint(arguments: list[str], tmp_path: Path):
    """torchrun passes SIGTERM on and exits with a status of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lm", "train"]
    options = [*LONG, "trainer.max_steps=100000", "trainer.devices=2", "name=stopped"]
    process = subprocess.Popen([*launch, *arguments, *options], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "stopped"
    wait_for_step(folder, 5, process)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert load_checkpoint(folder / "checkpoints" / "last.ckpt")["lm"]["step"] == curve(folder)[-1][0]


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_bitwise_the_same(arguments: list[str], tmp_path: Path, kills: int, record_property):
    """SIGKILL, every other one while a checkpoint is being written (its temporary file is there)."""
    drawn = random.Random(kills)
    options = [
        "trainer.checkpoint_every=2",
        "trainer.keep_checkpoints=2",
        "eval.every=50",
        "eval.sequences=4",
        f"trainer.max_steps={60 * kills}",
    ]
    options += ["model.n_embd=128", "model.dropout=0.1", swap_to("ssmax"), "log.progress=none", "eval.long_context.length_factor=0"]
    folder, during = tmp_path / "runs" / "killed", 0
    for number in range(kills):
        process = start(arguments, *options, "name=killed", "resume=auto")
        before = len(curve(folder)) if (folder / "metrics.jsonl").exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and len(curve_so_far(folder)) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        if number % 2:
            while process.poll() is None and not list((folder / "checkpoints").glob(".step-*")):
                pass
            during += 1
        else:
            time.sleep(drawn.uniform(0, 0.4))
        assert process.poll() is None, f"the run ended after {number} kills: {process.stderr.read()}"
        process.kill()
        process.wait()
    for name in ("killed", "straight"):
        result = lm("train", *arguments, *options, f"name={name}", "resume=auto")
        assert result.returncode == 0, result.stderr
    found = differences(folder, tmp_path / "runs" / "straight")
    record_property("bitwise", ["ssmax", f"{kills} kills, {during} in a save", "equal" if not found else ", ".join(found)])
    assert not found
    assert not [path for path in folder.rglob(".*") if path.is_file()]


def curve_so_far(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_text().splitlines() if "train/loss" in line] if path.exists() else []


# ---------------------------------------------------------------- other splits, more steps, going back


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
    for name, devices, resume in (("one", 1, ""), ("both", 2, ""), ("both", 1, "resume")):
        extra = [f"resume={tmp_path / 'runs' / 'both' / 'checkpoints' / 'step-000004.ckpt'}"] if resume else []
        result = lm("train", *arguments, *options, *extra, f"name={name}", f"trainer.devices={devices}", process=devices > 1)
        assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "runs" / "both") == pytest.approx(losses(tmp_path / "runs" / "one"), abs=1e-4)


def test_a_complete_run_resumed_does_nothing_but_missing_evaluations(tiny):
    config = tiny("name=done")
    train(config)
    before = (config.run_folder / "metrics.jsonl").read_bytes()
    evaluation = config.run_folder / "evaluations" / "validation.step-000008.json"
    loss = series(config.run_folder, "validation", 8)[0].whole
    evaluation.unlink()
    assert train(tiny("name=done", "resume=auto")) == 0
    assert (config.run_folder / "metrics.jsonl").read_bytes() == before
    assert series(config.run_folder, "validation", 8)[0].whole == pytest.approx(loss, abs=1e-6)


def test_an_evaluation_lost_to_a_kill_is_made_up_for(tiny):
    """A long-context evaluation comes after its step's checkpoint; killed meanwhile, it is made when the run goes on."""
    options = ["eval.long_context.every=4", "trainer.checkpoint_every=4"]
    for phases in ([], [swap_to("ssmax")]):
        name = f"name=lost{len(phases)}"
        config = tiny(name, *options, *phases)
        train(config)
        path = config.run_folder / "evaluations" / "long_context.step-000004.json"
        before = path.read_text()
        kill_after(config.run_folder, 4)
        path.unlink()
        train(tiny(name, *options, *phases, "resume=auto"))
        assert path.read_text() == before


def test_more_steps_may_be_asked_for_when_resuming(tiny, capsys: pytest.CaptureFixture):
    train(tiny("name=more", "optim.schedule=constant"))
    assert train(tiny("name=more", "optim.schedule=constant", "trainer.max_steps=12", "resume=auto")) == 0
    train(tiny("name=once", "optim.schedule=constant", "trainer.max_steps=12"))
    assert not differences(tiny("name=more").run_folder, tiny("name=once").run_folder)
    train(tiny("name=longer"))
    capsys.readouterr()
    train(tiny("name=longer", "trainer.max_steps=12", "resume=auto"))
    assert "note: cosine now ends at step 12, it was headed for 8" in capsys.readouterr().out


def test_going_back_to_an_earlier_checkpoint_keeps_one_time_line(tiny, capsys: pytest.CaptureFixture):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=3"]
    config = tiny("name=back", *options)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    assert [path.name for path in steps_saved(checkpoints)] == ["step-000004.ckpt", "step-000006.ckpt", "step-000008.ckpt"]
    expected = losses(config.run_folder)
    capsys.readouterr()
    train(tiny("name=back", *options, f"resume={checkpoints / 'step-000004.ckpt'}", "trainer.max_steps=6", "optim.schedule=cosine"))
    assert "note: back to step 4; checkpoints, metrics and evaluations of later steps are deleted" in capsys.readouterr().out
    assert [path.name for path in steps_saved(checkpoints)] == ["step-000004.ckpt", "step-000006.ckpt"]
    assert load_checkpoint(checkpoints / "last.ckpt")["lm"]["step"] == 6
    assert len(losses(config.run_folder)) == 6
    assert losses(config.run_folder)[:4] == expected[:4]
    assert not (config.run_folder / "evaluations" / "validation.step-000008.json").exists()
    best = load_checkpoint(checkpoints / "best.ckpt")["lm"]
    assert best["best"] == load_checkpoint(checkpoints / "last.ckpt")["lm"]["best"]
    validations = dict(curve(config.run_folder, "val/loss"))
    assert (best["step"], best["best"]["loss"]) == min(validations.items(), key=lambda item: item[1])


def test_going_back_where_the_best_weights_are_gone_finds_a_new_best(tiny):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=9", "eval.every=1"]
    config = tiny("name=gone", *options)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    back = load_checkpoint(checkpoints / "step-000006.ckpt")["lm"]
    assert back["best"]["step"] == 6
    odd = load_checkpoint(checkpoints / "step-000006.ckpt")
    odd["lm"]["best"] = {**back["best"], "step": 5, "loss": 0.0}  # as if the validation of step 5 had been the best
    torch.save(odd, checkpoints / "odd")  # not in place: what was loaded is a map of the file
    os.replace(checkpoints / "odd", checkpoints / "step-000006.ckpt")
    train(tiny("name=gone", *options, f"resume={checkpoints / 'step-000006.ckpt'}"))
    assert load_checkpoint(checkpoints / "best.ckpt")["lm"]["step"] in (7, 8)


def test_a_clock_set_back_does_not_decide_which_checkpoints_are_kept(tiny):
    options = ["trainer.checkpoint_every=2", "trainer.keep_checkpoints=2", "eval.every=100", "eval.long_context.length_factor=0"]
    config = tiny("name=clock", "trainer.max_steps=4", "optim.schedule=constant", *options)
    train(config)
    for path in steps_saved(config.run_folder / "checkpoints"):
        os.utime(path, (2**32, 2**32))
    train(tiny("name=clock", "trainer.max_steps=8", "optim.schedule=constant", *options, "resume=auto"))
    assert [path.name for path in steps_saved(config.run_folder / "checkpoints")] == ["step-000006.ckpt", "step-000008.ckpt"]


def test_a_lost_last_checkpoint_does_not_start_the_run_anew(tiny):
    train(tiny("name=lost"))
    checkpoints = tiny("name=lost").run_folder / "checkpoints"
    (checkpoints / "last.ckpt").unlink()
    before = (tiny("name=lost").run_folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"last.ckpt: missing, .* resume=.*step-000008.ckpt"):
        train(tiny("name=lost", "resume=auto"))
    assert (tiny("name=lost").run_folder / "metrics.jsonl").read_bytes() == before


def test_a_run_taken_back_to_a_swap_measures_the_new_one(tiny):
    train(tiny("name=plan", swap_to("ssmax"), *EVERY_STEP))
    boundary = tiny("name=plan").run_folder / "checkpoints" / "step-000004.ckpt"
    train(tiny("name=plan", swap_to("log_n"), *EVERY_STEP, f"resume={boundary}"))
    train(tiny("name=straight", swap_to("log_n"), *EVERY_STEP))
    folders = [tiny(f"name={name}").run_folder for name in ("plan", "straight")]
    assert not differences(*folders)
    found = [json.loads((folder / "evaluations" / "swap.step-000004.json").read_text()) for folder in folders]
    assert found[0] == found[1]
    assert found[0]["series"]


def test_a_signal_in_the_last_step_of_a_phase_is_heeded_in_the_next(tiny, monkeypatch: pytest.MonkeyPatch):
    """All ranks leave the loop over the phases together: on what they have agreed, not on a flag of one process."""
    save = Checkpoints.save

    def signalled(self: Checkpoints, trainer, module) -> None:
        save(self, trainer, module)
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", signalled)
    assert train(tiny("name=late", swap_to("ssmax"), "trainer.checkpoint_every=4")) == 143
    assert load_checkpoint(tiny("name=late").run_folder / "checkpoints" / "last.ckpt")["lm"]["step"] == 5


def test_the_last_the_best_and_the_ends_of_phases_are_kept(tiny):
    phases = "phases=[{until: 0.2, normalizer: softmax}, {until: 1, normalizer: ssmax}]"
    options = ["trainer.max_steps=20", "trainer.checkpoint_every=6", "trainer.keep_checkpoints=2", "eval.every=1"]
    config = tiny("name=kept", *options, phases)
    train(config)
    checkpoints = config.run_folder / "checkpoints"
    assert [path.name for path in steps_saved(checkpoints)] == ["step-000004.ckpt", "step-000018.ckpt", "step-000020.ckpt"]
    validations = {step: loss for step, loss in curve(config.run_folder, "val/loss")}
    best = load_checkpoint(checkpoints / "best.ckpt")["lm"]
    assert best["best"]["loss"] == min(validations.values()) == validations[best["step"]]
    last = load_checkpoint(checkpoints / "last.ckpt")["lm"]
    assert (last["step"], last["tokens"], last["phase"], last["best"]) == (20, 20 * 256, 1, best["best"])
    assert last["wandb_id"] == json.loads((config.run_folder / "environment.json").read_text())["wandb_id"]
    assert load(config.run_folder, "best").metadata["step"] == best["step"]


def test_every_start_of_a_run_is_recorded_and_time_goes_on(tiny):
    config = tiny("name=starts", "trainer.max_steps=4", "optim.schedule=constant")
    train(config)
    train(tiny("name=starts", "trainer.max_steps=8", "optim.schedule=constant", "resume=auto"))
    facts = json.loads((config.run_folder / "environment.json").read_text())
    assert [start["step"] for start in facts["starts"]] == [0, 4]
    elapsed = [line["elapsed_s"] for line in metrics(config.run_folder) if "elapsed_s" in line]
    assert elapsed == sorted(elapsed)


# ---------------------------------------------------------------- refusals


def test_a_run_folder_in_use_is_refused(tiny):
    config = tiny("name=used")
    train(config)
    with locked_folder(config.run_folder, TRAINING), pytest.raises(RunError, match="another process is training"):
        train(tiny("name=used", "resume=auto"))


def test_what_a_killed_export_left_is_deleted_and_what_another_one_fills_is_not(tmp_path: Path):
    abandoned, filled, foreign = (tmp_path / name for name in (".out-unfinished-a", ".out-unfinished-b", ".out-notes"))
    for folder in (abandoned, filled, foreign):
        folder.mkdir()
        (folder / "file").write_text("x")
    with locked_folder(filled, "in use"), new_folder(tmp_path / "out") as made:
        (made / "file").write_text("new")
    assert {path.name for path in tmp_path.iterdir()} == {"out", filled.name, foreign.name}


def test_a_worker_that_outlives_its_run_does_not_keep_the_folder(tmp_path: Path):
    started, begins = os.pipe()
    with locked_folder(tmp_path, TRAINING):
        worker = os.fork()
        if not worker:
            os.write(begins, b".")
            time.sleep(60)
            os._exit(0)
        os.read(started, 1)
    try:
        with locked_folder(tmp_path, TRAINING):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_resuming_with_another_configuration_lists_every_difference(tiny):
    train(tiny("name=other"))
    with pytest.raises(ConfigError) as caught:
        train(tiny("name=other", "resume=auto", "model.n_embd=64", "optim.lr=1e-3", "seed=9", "log.every=5", "trainer.max_steps=20"))
    assert {problem.path for problem in caught.value.problems} == {"model.n_embd", "optim.lr", "seed"}


def test_phases_still_to_come_may_change_and_those_done_may_not(tiny):
    train(tiny("name=plan", swap_to("ssmax"), *EVERY_STEP))
    checkpoints = tiny("name=plan").run_folder / "checkpoints"
    early, late = f"resume={checkpoints}/step-000002.ckpt", f"resume={checkpoints}/step-000006.ckpt"
    with pytest.raises(ConfigError, match=r"phases\[0\].until.*ends the phase at step 5.*until=0.5"):
        train(tiny("name=plan", "phases=[{until: 0.625, normalizer: softmax}, {until: 1, normalizer: ssmax, warmup_steps: 3}]", late))
    with pytest.raises(ConfigError, match=r"phases\[1\].normalizer = 'log_n': the checkpoint was trained with ssmax"):
        train(tiny("name=plan", swap_to("log_n"), late))
    with pytest.raises(ConfigError, match=r"ends the phase at step 8"):  # twice the steps would move the boundary
        train(tiny("name=plan", swap_to("ssmax"), "trainer.max_steps=16", late))
    assert train(tiny("name=plan", swap_to("log_n"), early, *EVERY_STEP)) == 0
    assert load(tiny("name=plan").run_folder).decoder.config.normalizer.name == "log_n"
    train(tiny("name=straight", swap_to("log_n"), *EVERY_STEP))
    assert not differences(tiny("name=straight").run_folder, tiny("name=plan").run_folder)


def test_another_normalizer_never_loads_silently(tiny):
    config = tiny("name=ssmax", "model.normalizer=ssmax")
    train(config)
    with pytest.raises(ConfigError, match=r"model\.normalizer = 'softmax': the checkpoint was trained with ssmax; .*lm swap"):
        train(tiny("name=ssmax", "resume=auto"))
    train(tiny("name=log_n", "model.normalizer=log_n"))
    other = tiny("name=log_n").run_folder / "checkpoints" / "last.ckpt"
    with pytest.raises(RunError, match=r"not a checkpoint of.*init_from="):
        train(tiny("name=plain", f"resume={other}"))
    train(tiny("name=plain"))
    foreign = shutil.copy(other, tiny("name=plain").run_folder / "checkpoints" / "step-000003.ckpt")
    with pytest.raises(ConfigError, match=r"model\.normalizer = 'softmax': the checkpoint was trained with log_n"):
        train(tiny("name=plain", f"resume={foreign}"))
    with pytest.raises(RuntimeError, match=r"normalizer\.s"):
        load(tiny("name=plain").run_folder).decoder.load_state_dict(weights(config.run_folder))


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


def test_a_damaged_checkpoint_is_named_with_an_intact_one(tiny):
    config = tiny("name=damaged")
    train(config)
    last = config.run_folder / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    for damage in (b"", content[: len(content) // 2], b"x" * 100):
        last.unlink()
        last.write_bytes(damage)
        with pytest.raises(RunError, match=r"last.ckpt: not a readable checkpoint.*the newest beside it is .*step-000008.ckpt"):
            load(last)
    assert same(weights(config.run_folder, "step-000008.ckpt"), weights(config.run_folder, "best.ckpt"))
