"""Several processes train as one: tokens equal exactly, losses and weights up to the order of additions.

Gradients are summed in another order, which moves a loss by about 1e-6 after eight steps here; TOLERANCE leaves room.
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lm
from folders import best_checkpoint, checkpoint_weights, is_group_alive, logged_values, stored_curves, training_losses
from processes import run_command, run_ranks, run_with_file_limit, start_forked, start_training

from lm.config.training_config import OPTIMIZERS
from lm.errors import ConfigError
from lm.training.train import train

TOLERANCE = 2e-5  # nats; of weights: absolute, they are of order 0.1


def close(folder: Path, other_folder: Path, tolerance: float = TOLERANCE) -> None:
    """Equal up to the order of additions: losses, validations, last weights."""
    for name in ("train/loss", "val/loss", "train/grad_norm/layer0", "train/grad_norm/layer1"):
        a, b = logged_values(folder, name), logged_values(other_folder, name)
        assert [step for step, _ in a] == [step for step, _ in b]
        assert [loss for _, loss in a] == pytest.approx([loss for _, loss in b], abs=tolerance)
    for name, value in checkpoint_weights(folder).items():
        torch.testing.assert_close(
            value,
            checkpoint_weights(other_folder)[name],
            atol=tolerance,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def train_and_leave_the_group(*arguments: str) -> None:
    try:
        run_command("train", *arguments)
    finally:
        assert not torch.distributed.is_initialized(), "its threads may abort the process as Python ends"


def test_two_ranks_train_as_one_with_and_without_a_swap(arguments: list[str], tmp_path: Path):
    """Validation, long rows and the swap's measurement are shared by the ranks, too."""
    phases = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]"
    assert lm("train", *arguments, phases, "name=one").returncode == 0
    run_ranks(2, train_and_leave_the_group, *arguments, phases, "name=two", "trainer.devices=2")
    one_rank, two_ranks = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    close(one_rank, two_ranks)
    a, b = (stored_curves(run, "long_context", 8)[0] for run in (one_rank, two_ranks))
    assert a.points[0].sha256 == b.points[0].sha256
    assert a.means == pytest.approx(b.means, abs=1e-4)
    for a, b in zip(*(stored_curves(run, "swap", 4) for run in (one_rank, two_ranks)), strict=True):
        assert a.means.tolist() == pytest.approx(b.means.tolist(), abs=1e-4)
    checkpoint = two_ranks / "checkpoints" / "step-000004.ckpt"
    assert lm("train", *arguments, phases, "name=two", f"resume={checkpoint}").returncode == 0, (
        "a run of two goes on with one"
    )
    assert training_losses(two_ranks) == pytest.approx(training_losses(one_rank), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_two_ranks_train_as_one_with_another_optimizer(arguments: list[str], tmp_path: Path, optimizer: str):
    """Less closely: bfloat16 in Muon decides about directions in which a gradient is near 0. Measured: 1.5e-4 nats, 1.6
    % of a matrix.
    """
    for name, devices in (("one", 1), ("two", 2)):
        options = [
            f"optim.optimizer={optimizer}",
            "model.normalizer=ssmax",
            f"name={name}",
            f"trainer.devices={devices}",
        ]
        result = lm("train", *arguments, *options, process=devices > 1)
        assert result.returncode == 0, result.stderr
    one_rank, two_ranks = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert logged_values(one_rank)[0][1] - logged_values(one_rank)[-1][1] > 0.3
    for name in ("train/loss", "val/loss"):
        assert [loss for _, loss in logged_values(one_rank, name)] == pytest.approx(
            [loss for _, loss in logged_values(two_ranks, name)], abs=1e-3
        )
    for name, value in checkpoint_weights(one_rank).items():
        assert (value - checkpoint_weights(two_ranks)[name]).norm() < 0.05 * value.norm(), name


@pytest.mark.slow
def test_two_compiled_ranks_train_as_an_eager_one(arguments: list[str], tmp_path: Path):
    """Less closely: compiled kernels round otherwise, and Adam divides by gradients near 0. Measured: 4e-5 of a
    weight.
    """
    assert lm("train", *arguments, "model.normalizer=ssmax", "name=one", "trainer.compile=false").returncode == 0
    run_ranks(
        2,
        run_command,
        "train",
        *arguments,
        "model.normalizer=ssmax",
        "name=two",
        "trainer.devices=2",
        "trainer.compile=true",
    )
    close(tmp_path / "runs" / "one", tmp_path / "runs" / "two", 2e-4)


def test_several_machines_without_a_launcher_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"trainer.num_nodes = 2: needs a launcher on each machine; use torchrun"):
        train(tiny("trainer.num_nodes=2"))


@pytest.mark.slow
def test_two_machines_train_as_one(arguments: list[str], tmp_path: Path):
    """Two torchrun agents on loopback, a process each, stand in for the machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--master_addr=127.0.0.1",
    ]
    command = [f"--master_port={port}", "-m", "lm", "train", *arguments, "name=nodes", "trainer.num_nodes=2"]
    agents = [
        subprocess.Popen([*launch, f"--node_rank={node}", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for node in (0, 1)
    ]
    for agent in agents:
        _, stderr = agent.communicate(timeout=300)
        assert agent.returncode == 0, stderr
    assert lm("train", *arguments, "name=one").returncode == 0
    close(tmp_path / "runs" / "one", tmp_path / "runs" / "nodes")
    assert len(training_losses(tmp_path / "runs" / "nodes")) == 8


@pytest.mark.slow
def test_a_failure_of_the_first_rank_alone_ends_all_in_one_line(arguments: list[str], tmp_path: Path):
    """Only rank 0 writes; where it can't, the others don't wait in a collective for ever."""
    runs = tmp_path / "runs" / "failing"
    (runs / "checkpoints").mkdir(parents=True)
    (runs / "evaluations").write_text("a file where the evaluations' folder belongs")
    options = ["name=failing", "trainer.devices=2", "resume=auto", "eval.on_error=stop"]
    process = start_training(arguments, *options)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "evaluations" in stderr
    assert not is_group_alive(process.pid)


@pytest.mark.slow
def test_a_checkpoint_that_the_first_rank_can_not_save_ends_the_others_too(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a launcher that ends them: they are told, and don't find out by a connection that is lost (NCCL waits for
    minutes).
    """
    assert lm("prepare", *arguments).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in ("0", "1"):
        for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items():
            monkeypatch.setenv(name, value)
        limit = 20_000 if rank == "0" else 10**9  # the model's weights take more
        options = ["name=unsaved", "trainer.devices=2"]
        processes.append(
            start_forked(tmp_path / f"rank{rank}", run_with_file_limit, limit, "train", *arguments, *options)
        )
    for process in processes:
        process.join(120)
        assert process.exitcode == 1
    assert "can't save the checkpoint: File too large" in (tmp_path / "rank0").read_text()
    assert "failed on another process" in (tmp_path / "rank1").read_text()


@pytest.mark.slow
def test_results_that_can_not_be_written_leave_the_ranks_in_step(arguments: list[str], tmp_path: Path):
    runs = tmp_path / "runs" / "unwritten"
    (runs / "checkpoints").mkdir(parents=True)
    (runs / "evaluations").write_text("a file where the evaluations' folder belongs")
    run_ranks(2, run_command, "train", *arguments, "name=unwritten", "trainer.devices=2", "resume=auto")
    assert "validation/failed" in (runs / "metrics.jsonl").read_text()
    assert (best_checkpoint(runs)).exists()
