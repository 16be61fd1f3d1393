"""Runs that signals, kills and full disks stop: what they leave, from which they end the same."""

import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lm, mark_others_slow
from folders import best_checkpoint, is_group_alive, last_checkpoint, logged_values, run_differences, swap_override
from lightning.pytorch.strategies import DDPStrategy
from processes import run_command, run_ranks, run_with_file_limit, start_forked, start_training
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lm.errors import RunError
from lm.machine import STOP_SIGNALS
from lm.runs.checkpoints import load_checkpoint
from lm.training.module import LanguageModel, StepData
from lm.training.step_callbacks import Checkpoints, LogMetrics
from lm.training.train import train


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Until the metrics of `step` are there."""
    for _ in range(6000):
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > step:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGABRT)  # where each thread of each process stands
    raise AssertionError(f"the run makes no steps: {process.communicate(timeout=60)[1]}")


LONG = ["trainer.checkpoint_every=100000", "eval.every=100000", "eval.long_context.length_factor=0"]


def test_a_signal_leaves_a_checkpoint_from_which_the_run_ends_the_same(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One run, stopped by each of the signals and resumed in turn."""
    options, training_step = [*LONG, "trainer.max_steps=12"], LanguageModel.training_step
    stops = {3: signal.SIGINT, 6: signal.SIGUSR2, 9: signal.SIGUSR1}

    def signalled(self: LanguageModel, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step in stops:
            os.kill(os.getpid(), stops.pop(self.global_step))
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", signalled)
    folder = tmp_path / "runs" / "stopped"
    for step, number in list(stops.items()):
        result = lm("train", *arguments, *options, "name=stopped", "resume=auto")
        assert result.returncode == 128 + number, result.stderr
        assert "Traceback" not in result.stderr
        assert load_checkpoint(last_checkpoint(folder))["lm"]["step"] == step + 1
    assert not stops
    for name in ("stopped", "straight"):
        assert lm("train", *arguments, *options, f"name={name}", "resume=auto").returncode == 0
    assert not run_differences(folder, tmp_path / "runs" / "straight")


STOPS = [  # data.workers, trainer.devices, who gets the signal
    (0, 1, "parent"),
    (2, 1, "parent"),
    (0, 1, "group"),
    (2, 1, "group"),
    *((workers, 2, target) for workers in (0, 2) for target in ("parent", "rank 1", "group")),
]
CASES = [(number, *stop) for number in STOP_SIGNALS for stop in STOPS]


@pytest.mark.parametrize("case", mark_others_slow(CASES, [(signal.SIGTERM, 2, 1, "group")]), ids=str)
def test_a_signal_stops_all_processes_with_a_checkpoint(
    arguments: list[str], tmp_path: Path, case: tuple[signal.Signals, int, int, str]
):
    number, workers, devices, target = case
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, which ignores it
    options = [f"data.workers={workers}", f"trainer.devices={devices}", "trainer.max_steps=100000", "name=stopped"]
    process = start_training(arguments, *LONG, *options)
    signal.signal(signal.SIGHUP, before)
    folder = tmp_path / "runs" / "stopped"
    wait_for_step(folder, 5, process)
    rank_1 = [child for child in children(process.pid) if b"LOCAL_RANK=1" in environment(child)]
    os.killpg(process.pid, number) if target == "group" else os.kill(
        rank_1[0] if target == "rank 1" else process.pid, number
    )
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + (signal.SIGTERM if target == "rank 1" else number), stderr
    assert "Traceback" not in stderr
    step = load_checkpoint(last_checkpoint(folder))["lm"]["step"]
    assert logged_values(folder)[-1][0] == step > 5
    assert not is_group_alive(process.pid)


@pytest.mark.slow
def test_a_signal_while_the_second_process_starts_ends_the_run_in_one_line(arguments: list[str], tmp_path: Path):
    process = start_training(arguments, *LONG, "trainer.devices=2", "trainer.max_steps=100000", "name=stopped")
    while not (started := [child for child in children(process.pid) if b"LOCAL_RANK=1" in environment(child)]):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert (process.returncode, len(started)) == (143, 1), stderr
    assert "Traceback" not in stderr
    assert load_checkpoint(last_checkpoint(tmp_path / "runs" / "stopped"))["lm"]["step"] == 1
    assert not is_group_alive(process.pid)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lost_worker_ends_the_run_in_one_line(arguments: list[str], tmp_path: Path, devices: int):
    options = ["data.workers=2", f"trainer.devices={devices}", "trainer.max_steps=100000", "name=lost"]
    process = start_training(arguments, *LONG, *options)
    wait_for_step(tmp_path / "runs" / "lost", 5, process)
    os.kill(children(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert (
        "error: data.workers = 2: a process that reads batches was killed by SIGKILL (out of memory?); lower" in stderr
    )
    assert "Traceback" not in stderr
    assert not is_group_alive(process.pid)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.slow
def test_workers_end_soon_after_a_killed_parent(arguments: list[str], tmp_path: Path, devices: int):
    options = ["data.workers=2", f"trainer.devices={devices}", "trainer.max_steps=100000", "name=killed"]
    process = start_training(arguments, *LONG, *options)
    wait_for_step(tmp_path / "runs" / "killed", 5, process)
    process.kill()
    process.communicate(timeout=60)  # no process holds its stderr any more
    assert not is_group_alive(process.pid)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment(pid: int) -> bytes:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


@pytest.mark.slow
def test_a_closed_terminal_leaves_a_checkpoint(arguments: list[str], tmp_path: Path):
    command = [sys.executable, "-m", "lm", "train", *arguments, *LONG, "trainer.max_steps=100000", "name=stopped"]
    process, terminal = pty.fork()
    if not process:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, which ignores it
        os.execv(command[0], command)
    log, deadline = tmp_path / "runs" / "stopped" / "metrics.jsonl", time.monotonic() + 60
    while (not log.exists() or len(log.read_text().splitlines()) < 5) and time.monotonic() < deadline:
        select.select([terminal], [], [], 0.1)[0] and os.read(terminal, 10_000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert load_checkpoint(last_checkpoint(log.parent))["lm"]["step"] == logged_values(log.parent)[-1][0] >= 4


@pytest.mark.slow
def test_torchrun_told_to_stop_leaves_a_checkpoint(arguments: list[str], tmp_path: Path):
    """torchrun passes SIGTERM on and exits with a status of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lm", "train"]
    options = [*LONG, "trainer.max_steps=100000", "trainer.devices=2", "name=stopped"]
    process = subprocess.Popen(
        [*launch, *arguments, *options], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    folder = tmp_path / "runs" / "stopped"
    wait_for_step(folder, 5, process)
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert load_checkpoint(last_checkpoint(folder))["lm"]["step"] == logged_values(folder)[-1][0]


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_bitwise_the_same(
    arguments: list[str], tmp_path: Path, kills: int, record_property
):
    """SIGKILL, every other one while a checkpoint is being written (its temporary file is there)."""
    rng = random.Random(kills)
    options = [
        "trainer.checkpoint_every=2",
        "trainer.keep_checkpoints=2",
        "eval.every=50",
        "eval.sequences=4",
        f"trainer.max_steps={10 * kills}",
    ]
    options += [
        "model.n_embd=128",
        "model.dropout=0.1",
        swap_override("ssmax"),
        "log.progress=none",
        "eval.long_context.length_factor=0",
    ]
    folder, in_saves = tmp_path / "runs" / "killed", 0
    for number in range(kills):
        process = start_forked(
            tmp_path / "output", run_command, "train", *arguments, *options, "name=killed", "resume=auto"
        )
        before = len(logged_values(folder)) if (folder / "metrics.jsonl").exists() else 0
        deadline = time.monotonic() + 60
        while process.is_alive() and len(curve_so_far(folder)) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        if number % 2:
            while process.is_alive() and not list((folder / "checkpoints").glob(".step-*")):
                pass
            in_saves += 1
        else:
            time.sleep(rng.uniform(0, 0.1))
        assert process.is_alive(), f"the run ended after {number} kills: {(tmp_path / 'output').read_text()}"
        process.kill()
        process.join()
    for name in ("killed", "straight"):
        result = lm("train", *arguments, *options, f"name={name}", "resume=auto")
        assert result.returncode == 0, result.stderr
    names = run_differences(folder, tmp_path / "runs" / "straight")
    record_property(
        "bitwise", ["ssmax", f"{kills} kills, {in_saves} in a save", "equal" if not names else ", ".join(names)]
    )
    assert not names
    assert not [path for path in folder.rglob(".*") if path.is_file()]


def curve_so_far(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return [line for line in path.read_text().splitlines() if "train/loss" in line] if path.exists() else []


def test_a_signal_in_the_last_step_of_a_phase_is_heeded_in_the_next(tiny, monkeypatch: pytest.MonkeyPatch):
    """All ranks leave the loop over the phases together: on what they have agreed, not on a flag of one process."""
    save = Checkpoints.save

    def signalled(self: Checkpoints, trainer, module) -> None:
        save(self, trainer, module)
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "save", signalled)
    assert train(tiny("name=late", swap_override("ssmax"), "trainer.checkpoint_every=4")) == 143
    assert load_checkpoint(last_checkpoint(tiny("name=late").run_folder))["lm"]["step"] == 5


def test_a_signal_before_the_first_step_leaves_a_checkpoint(tiny, monkeypatch: pytest.MonkeyPatch):
    """Lightning, which sets the loop up, would answer it by an end with status 0."""
    train_dataloader = StepData.train_dataloader

    def signalled(self: StepData) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return train_dataloader(self)

    monkeypatch.setattr(StepData, "train_dataloader", signalled)
    assert train(tiny("name=early", "trainer.checkpoint_every=100")) == 143
    assert load_checkpoint(last_checkpoint(tiny("name=early").run_folder))["lm"]["step"] == 1


def stopped_at_its_first_barrier(*arguments: str) -> None:
    """Run `lm` in one of two ranks, of which the second gets SIGTERM where Lightning has just set its own handler."""
    barrier = DDPStrategy.barrier

    def signalled(self: DDPStrategy, name: str = "") -> None:
        if name == "run-stage" and self.global_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        barrier(self, name)

    DDPStrategy.barrier = signalled
    signal.alarm(120)  # ends ranks that wait for each other
    run_command(*arguments)


@pytest.mark.slow
def test_a_signal_to_one_rank_before_the_first_step_stops_all_with_a_checkpoint(arguments: list[str], tmp_path: Path):
    options = [*LONG, "trainer.devices=2", "trainer.max_steps=100000", "name=early"]
    with pytest.raises(ChildFailedError):
        run_ranks(2, stopped_at_its_first_barrier, "train", *arguments, *options)
    assert load_checkpoint(last_checkpoint(tmp_path / "runs" / "early"))["lm"]["step"] == 1


@pytest.mark.parametrize("max_steps", [12, 8])
def test_a_kill_just_after_a_checkpoint_loses_no_step(tiny, monkeypatch: pytest.MonkeyPatch, max_steps: int):
    def killed(self: Checkpoints, best: object) -> None:
        if self.saved_step == 8:
            raise RunError("killed")

    config = tiny("name=killed", "eval.long_context.length_factor=0", "eval.every=8")
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "prune", killed)
        with pytest.raises(RunError, match="killed"):
            train(config)
    steps = []
    monkeypatch.setattr(LogMetrics, "on_step", lambda self, trainer, module, step: steps.append(step))
    resumed = replace(config, resume="auto", trainer=replace(config.trainer, max_steps=max_steps))
    assert train(resumed) == 0
    assert steps == [*range(9, max_steps + 1)]
    assert load_checkpoint(last_checkpoint(config.run_folder))["lm"]["step"] == max_steps
    assert best_checkpoint(config.run_folder).exists()


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(arguments: list[str], tmp_path: Path):
    """A file-size limit stands in for the full disk: the second save fails half-way through."""
    assert lm("train", *arguments, "name=full", "trainer.max_steps=4").returncode == 0
    folder = tmp_path / "runs" / "full"
    size = (last_checkpoint(folder)).stat().st_size
    process = start_forked(
        tmp_path / "output",
        run_with_file_limit,
        size // 2,
        "train",
        *arguments,
        "name=full",
        "trainer.max_steps=8",
        "resume=auto",
    )
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 1
    assert "Traceback" not in output
    assert "can't save the checkpoint: File too large; what was there before is intact" in output
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert load_checkpoint(last_checkpoint(folder))["lm"]["step"] == 4
    assert lm("train", *arguments, "name=full", "trainer.max_steps=8", "resume=auto").returncode == 0
