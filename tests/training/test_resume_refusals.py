"""What a resumed run may not be: another configuration, another normalizer, a folder in use, a damaged checkpoint."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import lm
from folders import EVERY_STEP_OPTIONS, checkpoint_weights, last_checkpoint, run_differences, swap_override

from lm.data.prepare import prepare
from lm.errors import ConfigError, DataError, RunError
from lm.files import folder_lock, new_folder, new_temporary_path, write_json, write_text, write_together
from lm.runs.checkpoints import save_checkpoint
from lm.runs.folder import ALREADY_TRAINING, METRICS_FILE, checkpoint_paths
from lm.runs.loading import export, load
from lm.training.train import train


def test_a_run_folder_in_use_is_refused(tiny):
    config = tiny("name=used")
    train(config)
    with folder_lock(config.run_folder, ALREADY_TRAINING), pytest.raises(RunError, match="another process is training"):
        train(tiny("name=used", "resume=auto"))


def _fill(folder: Path) -> None:
    with new_folder(folder / "other") as new:
        (new / "file").write_text("new")


WRITERS = {
    "replacing": lambda folder: write_text(folder / "other", "new"),
    "together": lambda folder: write_together({folder / "other": b"new"}),
    "json": lambda folder: write_json(folder / "other", {}),
    "folder": _fill,
    "checkpoint": lambda folder: save_checkpoint({"state_dict": {}, "lm": {"step": 1}}, folder / "other"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_the_umask_decides_the_modes_of_what_is_written(tmp_path: Path, write: Callable[[Path], object]):
    before = os.umask(0o027)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~0o027, path


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system without locks: how its refusal is said after the folder's name."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    return f": its file system has no locks ({os.strerror(errno.ENOLCK)})"


def test_without_locks_training_goes_on_and_says_so_and_preparing_is_refused(tiny, tmp_path: Path, without_locks: str):
    config, fresh = tiny("name=a", "trainer.max_steps=2", "eval.long_context.length_factor=0"), tmp_path / "fresh"
    if not list(Path(config.data.root).glob("*/manifest.json")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("fcntl.flock", lambda descriptor, operation: None)
            prepare(config.data)
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        assert train(config) == 0
        export(config.run_folder, "last", tmp_path / "out")
    notes = output.getvalue().splitlines()
    remedy = "start no second process on this run, or set runs to a folder on another one"
    assert f"note: {config.run_folder}{without_locks}: {remedy}" in notes
    files = {"lm.json", "manifest.jsonl", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    with pytest.raises(DataError) as error:
        prepare(tiny(f"data.root={fresh}").data)
    assert str(error.value).startswith(
        f"{fresh}{without_locks}, which keep processes from preparing one store at the same time; set data.root"
    )
    assert [path.name for path in fresh.iterdir()] == [".lock"]


def test_a_worker_that_outlives_its_run_does_not_keep_the_folder(tmp_path: Path):
    read_end, write_end = os.pipe()
    with folder_lock(tmp_path, ALREADY_TRAINING):
        worker = os.fork()
        if not worker:
            os.write(write_end, b".")
            time.sleep(60)
            os._exit(0)
        os.read(read_end, 1)
    try:
        with folder_lock(tmp_path, ALREADY_TRAINING):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_resuming_with_another_configuration_lists_every_difference(tiny):
    train(tiny("name=other"))
    with pytest.raises(ConfigError) as error:
        train(
            tiny(
                "name=other",
                "resume=auto",
                "model.n_embd=64",
                "optim.lr=1e-3",
                "seed=9",
                "log.every=5",
                "trainer.max_steps=20",
            )
        )
    assert {problem.key_path for problem in error.value.problems} == {"model.n_embd", "optim.lr", "seed"}


@pytest.mark.parametrize("goes_on", ["name=text", "name=branch branch_from={}"])
def test_a_run_goes_on_without_its_text_and_not_on_another(tiny, corpus: Path, tmp_path: Path, goes_on: str):
    texts = shutil.copytree(corpus, tmp_path / "texts")
    options = [f"data.source.paths=[{texts}]", f"data.root={tmp_path / 'stores'}", "optim.schedule=constant"]
    train(config := tiny("name=text", *options))
    resumed = [*goes_on.format(config.run_folder).split(), "resume=auto", *options]
    (texts / "13.txt").write_text("another text " * 2000)
    assert train(tiny(*resumed, "trainer.max_steps=9")) == 0
    shutil.rmtree(texts)
    with pytest.raises(ConfigError, match=r"data\.source\.paths"):
        train(tiny(*resumed, "trainer.max_steps=10", f"data.source.paths=[{corpus}]"))
    assert train(tiny(*resumed, "trainer.max_steps=10")) == 0
    shutil.rmtree(tmp_path / "stores")
    (shutil.copytree(corpus, texts) / "00.txt").unlink()
    with pytest.raises(ConfigError, match="bring that text and tokenizer back"):
        train(tiny(*resumed, "trainer.max_steps=11"))


def test_a_log_that_was_altered_is_refused(tiny):
    train(tiny("name=altered"))
    log = tiny().run_folder.parent / "altered" / METRICS_FILE
    content = log.read_text()
    for altered in (content[: len(content) // 2], content.replace('"train/loss": ', '"train/loss": 1')):
        log.write_text(altered)
        with pytest.raises(
            RunError, match=r"metrics\.jsonl: was altered since step-000008\.ckpt was saved; bring it back"
        ):
            train(tiny("name=altered", "resume=auto", "trainer.max_steps=20"))
    log.write_text(content + '{"step": 8, "tok')  # as a kill leaves it
    train(tiny("name=altered", "resume=auto", "trainer.max_steps=20"))
    assert log.read_text().startswith(content)


def test_phases_still_to_come_may_change_and_those_done_may_not(tiny):
    train(tiny("name=plan", swap_override("ssmax"), *EVERY_STEP_OPTIONS))
    checkpoints = tiny("name=plan").run_folder / "checkpoints"
    early, late = f"resume={checkpoints}/step-000002.ckpt", f"resume={checkpoints}/step-000006.ckpt"
    with pytest.raises(ConfigError, match=r"phases\[0\].until.*ends the phase at step 5.*until=0.5"):
        train(
            tiny(
                "name=plan",
                "phases=[{until: 0.625, normalizer: softmax}, {until: 1, normalizer: ssmax, warmup_steps: 3}]",
                late,
            )
        )
    with pytest.raises(ConfigError, match=r"phases\[1\].normalizer = 'log_n': the checkpoint was trained with ssmax"):
        train(tiny("name=plan", swap_override("log_n"), late))
    with pytest.raises(ConfigError, match=r"ends the phase at step 8"):  # twice the steps would move the boundary
        train(tiny("name=plan", swap_override("ssmax"), "trainer.max_steps=16", late))
    assert train(tiny("name=plan", swap_override("log_n"), early, *EVERY_STEP_OPTIONS)) == 0
    assert load(tiny("name=plan").run_folder).decoder.config.normalizer.name == "log_n"
    train(tiny("name=straight", swap_override("log_n"), *EVERY_STEP_OPTIONS))
    assert not run_differences(tiny("name=straight").run_folder, tiny("name=plan").run_folder)


def test_another_normalizer_never_loads_silently(tiny):
    config = tiny("name=ssmax", "model.normalizer=ssmax")
    train(config)
    with pytest.raises(
        ConfigError, match=r"model\.normalizer = 'softmax': the checkpoint was trained with ssmax; .*lm swap"
    ):
        train(tiny("name=ssmax", "resume=auto"))
    train(tiny("name=log_n", "model.normalizer=log_n"))
    other = last_checkpoint(tiny("name=log_n").run_folder)
    with pytest.raises(RunError, match=r"not a checkpoint of.*init_from="):
        train(tiny("name=plain", f"resume={other}"))
    train(tiny("name=plain"))
    foreign = shutil.copy(other, tiny("name=plain").run_folder / "checkpoints" / "step-000003.ckpt")
    with pytest.raises(RunError, match=r"step-000003\.ckpt: was altered, or is of another folder"):
        train(tiny("name=plain", f"resume={foreign}"))
    with pytest.raises(RuntimeError, match=r"normalizer\.s"):
        load(tiny("name=plain").run_folder).decoder.load_state_dict(checkpoint_weights(config.run_folder))


def test_a_run_without_its_checkpoints_and_a_model_folder_do_not_start_anew(tiny, tmp_path: Path):
    options = "trainer.checkpoint_every=4", "eval.long_context.length_factor=0"
    train(tiny("name=whole", *options))
    folder = tiny("name=whole").run_folder
    export(folder, "last", tmp_path / "runs" / "model")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    for name, words in (
        ("whole", "holds a run whose checkpoints are gone"),
        ("model", "holds something else than a run"),
    ):
        before = sorted(path.name for path in (tmp_path / "runs" / name).rglob("*"))
        with pytest.raises(RunError, match=words):
            train(tiny(f"name={name}", *options, "resume=auto"))
        assert sorted(path.name for path in (tmp_path / "runs" / name).rglob("*")) == before
    log = folder / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if json.loads(line)["step"] <= 4))
    for path in (folder / "evaluations").glob("*.step-000008.*"):
        path.unlink()
    new_temporary_path(folder / "checkpoints" / "step-000004.ckpt").write_text("")
    assert train(tiny("name=whole", *options, "resume=auto")) == 0, "killed before the first checkpoint was written"


def test_a_renamed_run_folder_goes_on_under_its_name_alone(tiny, tmp_path: Path):
    options = ["trainer.max_steps=4", "eval.long_context.length_factor=0"]
    config = tiny("name=a", *options)
    train(config)
    moved, resume = config.run_folder.rename(tmp_path / "runs" / "b"), ["resume=auto", "trainer.max_steps=6"]
    result = lm("train", str(moved / "config.yaml"), *resume)
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"error: {moved}/checkpoints/step-000004.ckpt: not a checkpoint of {config.run_folder}; a run"
    )
    assert not config.run_folder.exists()
    assert lm("train", str(moved / "config.yaml"), *resume, "name=b").returncode == 0
    assert [path.name for path in checkpoint_paths(moved / "checkpoints")] == ["step-000004.ckpt", "step-000006.ckpt"]
