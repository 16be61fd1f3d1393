"""What a run prints first names all that it is, in derived quantities."""

import os
import subprocess

import pytest

from lm.data.prepare import prepare
from lm.model.device import Machine, ResolvedSetting
from lm.training.banner import banner, git_state
from lm.training.phase_start import start_new_run


@pytest.fixture
def printed(tiny):
    """A function: overrides -> the banner's texts by the names before them."""

    def banner_of(*overrides: str) -> dict[str, str]:
        config = tiny(*overrides)
        store = prepare(config.data, progress=False)
        machine = Machine("cpu", "cpu", ResolvedSetting("32", "as asked"), ResolvedSetting("false", "as asked"))
        lines = banner(config, store, start_new_run(config, store)[0], machine).splitlines()
        return {line[:11].strip(): line[12:] for line in lines}

    return banner_of


def test_what_a_run_is_comes_first_with_its_phases(printed):
    plain = printed("trainer.max_steps=8")
    assert [*plain][:4] == ["run", "model", "", "normalizer"]
    assert "phases" not in plain
    assert plain["tokens"].endswith(", 0.035 a parameter (0.03 epochs)")
    lines = printed("optim.optimizer=muon")
    assert lines["optimizer"] == "muon, lr 0.01, cosine, warm-up of 2 steps"
    symbolic = printed("data.tasks=[{task: mqar}]", "eval.long_context.length_factor=0", "eval.swap_lengths=[1]")
    assert "epochs" not in symbolic["tokens"]
    lengths = "data.lengths={name: mixed, weights: {8: 0.5, 32: 0.5}}"  # a slot of 32 tokens holds 4 sequences of 8
    assert printed(lengths, "trainer.micro_batch=4")["device"].endswith(", micro-batches of 128 tokens")
    text = printed("phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]")["phases"]
    assert text == "softmax to step 4, then ssmax to step 8"
    assert "base = train (32)" in printed("model.normalizer=log_n")["normalizer"]


@pytest.mark.parametrize("tracked", [True, False], ids=["in its checkout", "installed within another project's"])
def test_the_commit_is_that_of_the_package_s_own_checkout(tmp_path, monkeypatch: pytest.MonkeyPatch, tracked: bool):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    package = tmp_path / "lm"
    package.mkdir()
    (package / "__init__.py").touch()
    (tmp_path / "other").touch()
    git("init", "-q")
    git("add", "lm" if tracked else "other")
    git("commit", "-qm", "x")
    monkeypatch.setattr("lm.__file__", str(package / "__init__.py"))
    # so that git would refresh its index, behind a lock that a killed process leaves
    os.utime(package / "__init__.py", (1, 1))
    index = (tmp_path / ".git" / "index").read_bytes()
    assert git_state() == ((git("rev-parse", "HEAD"), False) if tracked else (None, None))
    assert (tmp_path / ".git" / "index").read_bytes() == index
    monkeypatch.setenv("LM_COMMIT", "abc")  # as an image sets it, which holds no checkout
    assert git_state() == ((git("rev-parse", "HEAD"), False) if tracked else ("abc", None))
