"""Memory that runs out is one line, which says what to lower, in every command that computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import lm

from lm.errors import is_out_of_memory
from lm.model.decoder import Decoder


def cpu_allocation() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def numpy_allocation() -> None:
    np.empty(2**60, np.uint8)


def gpu_allocation() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which ..."
    )


ALLOCATIONS = {cpu_allocation: "1152921504606846976 bytes", numpy_allocation: "1.00 EiB", gpu_allocation: "20.00 MiB"}


def run_out(monkeypatch: pytest.MonkeyPatch, allocation=cpu_allocation) -> None:
    """From now on a decoder asks for more memory than there is."""
    monkeypatch.setattr(Decoder, "forward", lambda *_, **__: allocation())


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=lambda function: function.__name__)
def test_training_says_what_to_lower_and_leaves_no_run_folder(
    arguments: list[str], tmp_path: Path, monkeypatch, allocation
):
    run_out(monkeypatch, allocation)
    result = lm("train", *arguments, "name=big")
    remedy = (
        "lower trainer.micro_batch, set trainer.activation_checkpointing=true, or lower data.seq_len or the "
        "model's size"
    )
    expected = f"error: out of memory (asked for {ALLOCATIONS[allocation]}): {remedy}\n"
    assert (result.returncode, result.stderr[-len(expected) :]) == (1, expected)
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs" / "big").exists()


def test_commands_on_a_trained_model_say_what_to_lower(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, out = str(tmp_path / "runs" / "small"), str(tmp_path / "out")
    assert lm("train", *arguments, "name=small", "trainer.max_steps=2").returncode == 0
    run_out(monkeypatch)
    monkeypatch.setattr(Decoder, "load_state_dict", lambda *_: cpu_allocation())  # not called damaged weights
    for command in (
        ("eval", run, "eval.sequences=2"), ("swap", run, "--to", "ssmax", "-o", out), ("export", run, "-o", out),
        ("generate", run, "--prompt", "a"),
    ):  # fmt: skip
        result = lm(*command)
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), command
        assert result.stderr.startswith("error: out of memory (asked for 1152921504606846976 bytes): "), command
    assert not Path(out).exists()


def test_other_errors_are_not_taken_for_it():
    assert not any(
        is_out_of_memory(error) for error in (RuntimeError("shapes differ"), ValueError("memory"), OSError(12, "no"))
    )


def test_compiled_code_that_a_kill_cut_short_is_one_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("InductorError: ImportError: /cache/compiled/a.so: invalid ELF header")

    run_out(monkeypatch, fail)
    line = (
        "error: /cache/compiled/a.so: compiled code that can't be loaded, as after a kill: delete it, and start again\n"
    )
    assert lm("train", *arguments).stderr == line
