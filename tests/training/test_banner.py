"""What a run prints first names all that it is, in derived quantities."""

import os
import re
import subprocess

import pytest

from lm.data.prepare import prepare
from lm.model.device import Machine, ResolvedSetting
from lm.training.banner import banner, git_state
from lm.training.starting import start_new_run


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


def test_options_of_the_model_that_are_not_at_their_defaults_are_named(printed):
    assert "options" not in printed()
    text = printed("model.qkv_bias=true", "model.norm_eps=1e-6", "model.tied=true", "model.n_layer=3")["options"]
    assert text == "norm_eps = 1e-06, qkv_bias = true, tied = true"
    assert printed("optim.optimizer={name: adamw, beta2: 0.99}")["optimizer"].startswith("adamw, beta2 = 0.99, lr ")


def test_what_a_run_is_comes_first_and_all_of_it_is_one_screen(printed):
    names = [*printed()]
    assert names[:4] == ["run", "model", "", "normalizer"]
    assert len(names) <= 20


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("{name: mixed, weights: {8: 0.5, 32: 0.5}}", "8 tokens 50.0%, 32 tokens 50.0%"),
        ("{name: curriculum, starts: {0.0: 16, 0.5: 32}}", "16 tokens 50.0%, 32 tokens 50.0%"),
    ],
)
def test_the_fraction_of_tokens_in_sequences_of_each_length_is_named(printed, lengths: str, words: str):
    assert words in printed(f"data.lengths={lengths}")["lengths"]


FEW = "data.tasks=[{task: {name: copy, symbols: 2, filler: 1, span: 4}}]"


def test_a_task_whose_training_sequences_must_repeat_is_named(printed):
    task = [FEW, "eval.long_context.length_factor=0", "eval.swap_lengths=[1]"]
    assert printed("data.tasks=[{task: copy}]", *task[1:])["tasks"] == "copy 100%"
    assert printed(*task, "data.lengths={name: mixed, weights: {8: 1}}")["tasks"] == (
        "copy 100% (256 sequences of 8 tokens, of about 14 different ones)"
    )


def test_the_fraction_of_targets_that_are_answers_is_named_beside_text(printed):
    tasks = printed("data.tasks=[{weight: 0.5, task: passkey}]", "data.seq_len=128")["tasks"]
    assert re.fullmatch(r"passkey 50%, answers are about [34]% of the targets", tasks)


def test_phases_name_the_current_one_in_brackets(printed):
    text = printed("phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]")["phases"]
    assert text.startswith("[softmax to step ")
    assert ", then ssmax" in text


def test_tokens_a_parameter_are_named_and_far_too_few_are_warned_of(printed):
    lines = printed("trainer.max_steps=8")
    assert ", 0.035 a parameter" in lines["tokens"]
    assert lines["note"].startswith("fewer than 5 tokens a parameter: ")
    assert "note" not in printed("trainer.max_steps=3000", "eval.every=3000")
    assert "note" not in printed(
        "data.tasks=[{task: copy}]", "eval.long_context.length_factor=0", "eval.swap_lengths=[1]"
    )


def test_text_that_is_read_too_often_is_warned_of(printed):
    lines = printed("trainer.max_steps=30000", "eval.every=30000")
    assert float(re.search(r"\(([\d.]+) epochs\)", lines["tokens"])[1]) > 16
    assert lines["note"].startswith("text is read more than 16 times: ")
    assert (
        "epochs"
        not in printed("data.tasks=[{task: copy}]", "eval.long_context.length_factor=0", "eval.swap_lengths=[1]")[
            "tokens"
        ]
    )


def test_what_is_minimised_and_bounded_is_said(printed):
    assert printed()["optimizer"].endswith("; gradients' norm at most 1")
    assert printed("optim.z_loss=1e-4", "optim.grad_clip=0")["optimizer"].endswith(
        "; gradients' norm not bounded; z-loss x 0.0001"
    )


def test_options_of_a_later_phase_s_normalizer_are_said(printed):
    phases = "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]"
    groups = printed(phases, "optim.groups.normalizer={lr_factor: 10, weight_decay: 0.2}")["groups"]
    assert groups.endswith("; normalizer (of later phases), lr x 10, weight decay 0.2")


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


def test_validation_on_next_to_nothing_is_warned_of(printed):
    assert "validation sequences" not in printed("eval.sequences=1000")["note"]
    note = printed(
        "eval.sequences=1000", "data.seq_len=1024", "optim.batch_tokens=8192", "eval.long_context.length_factor=0"
    )["note"]
    assert re.search(
        r"held-out text of \d+ validation sequences, eval\.sequences asks for 1,000: raise data\.val_fraction", note
    )


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("full", r"(\d+) sequences x (32) tokens"),
        ("{name: mixed, weights: {8: 1}}", r"(\d+) sequences x (8) tokens"),
        ("{name: mixed, weights: {8: 0.5, 32: 0.5}}", r"(\d+) sequences x (8) tokens or (\d+) sequences x (32) tokens"),
    ],
)
def test_a_micro_batch_has_as_many_sequences_as_its_lengths_give(printed, lengths: str, words: str):
    numbers = [
        int(n) for n in re.match(words + r" x \d+ micro-batches", printed(f"data.lengths={lengths}")["step"]).groups()
    ]
    full = int(printed()["step"].split()[0])
    assert all(count * length == full * 32 for count, length in zip(numbers[::2], numbers[1::2], strict=True))


@pytest.mark.parametrize("normalizer", ["log_n", "infoscale", "yarn"])
def test_a_base_that_is_the_training_length_is_named_with_it(printed, normalizer: str):
    assert "base = train (32)" in printed(f"model.normalizer={normalizer}")["normalizer"]
