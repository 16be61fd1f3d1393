"""What a resumed run may not be: another configuration, another normalizer, a folder in use, a damaged checkpoint."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from folders import EVERY_STEP, differences, same, swap_to, weights

from lm.errors import ConfigError, RunError
from lm.files import locked_folder, new_folder
from lm.runs.folder import TRAINING
from lm.runs.loading import load
from lm.training.train import train


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


def test_a_lost_last_checkpoint_does_not_start_the_run_anew(tiny):
    train(tiny("name=lost"))
    checkpoints = tiny("name=lost").run_folder / "checkpoints"
    (checkpoints / "last.ckpt").unlink()
    before = (tiny("name=lost").run_folder / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"last.ckpt: missing, .* resume=.*step-000008.ckpt"):
        train(tiny("name=lost", "resume=auto"))
    assert (tiny("name=lost").run_folder / "metrics.jsonl").read_bytes() == before
