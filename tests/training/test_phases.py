"""A phase, and a run that starts from weights, may change what has no weights: positions, lengths, learning rate."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import lm
from folders import (
    EVERY_STEP_OPTIONS,
    checkpoint_weights,
    delete_checkpoints_after,
    equal_tensors,
    logged_values,
    training_losses,
)
from processes import run_command, run_ranks

from lm.data.batches import train_sequences
from lm.data.prepare import prepare
from lm.errors import ConfigError
from lm.report.comparison import normalizer_history_label
from lm.runs.loading import load
from lm.runs.record import read_run
from lm.training.train import train

YARN = "{name: rope, theta: 40000, scaling: {name: yarn, factor: 4, original: 32}}"
# the same in all phases but positions, length and rate, with an optimizer state of the normalizer that must survive
LONGER = f"phases=[{{until: 0.5}}, {{until: 1, seq_len: 64, position: {YARN}, lr_factor: 0.5}}]"
SWAPPED = f"phases=[{{until: 0.5}}, {{until: 1, seq_len: 64, position: {YARN}, normalizer: {{name: log_n}}}}]"


@pytest.mark.parametrize("phases", [pytest.param(LONGER, marks=pytest.mark.slow), SWAPPED])
def test_a_run_whose_positions_and_length_change_resumes_bitwise(tiny, phases: str):
    options = [*EVERY_STEP_OPTIONS, "model.normalizer=ssmax", "model.dropout=0.2", "trainer.micro_batch=2", phases]
    whole = tiny("name=whole", *options)
    train(whole)
    cut = tiny("name=cut", *options, "resume=auto")
    shutil.copytree(whole.run_folder, cut.run_folder)
    for step in (4, 6):
        delete_checkpoints_after(cut.run_folder, step)
        train(cut)
        assert training_losses(cut.run_folder) == training_losses(whole.run_folder)
        assert equal_tensors(checkpoint_weights(cut.run_folder), checkpoint_weights(whole.run_folder))
    lengths = dict(logged_values(whole.run_folder, "sequence_length"))
    assert [lengths[step] for step in (1, 4, 5, 8)] == [32, 32, 64, 64]


def test_a_phase_without_a_swap_keeps_the_optimizer_state_and_its_factor_is_on_the_rate(tiny):
    plain, changed = ["model.normalizer=ssmax", "optim.schedule=constant"], ["phases=[{until: 0.5}, {until: 1}]"]
    train(tiny("name=plain", *plain))
    train(tiny("name=phased", *plain, *changed))
    folders = [tiny(f"name={name}").run_folder for name in ("plain", "phased")]
    assert training_losses(folders[0]) == training_losses(folders[1])
    assert equal_tensors(*(checkpoint_weights(folder) for folder in folders))
    train(tiny("name=slower", *plain, "phases=[{until: 0.5}, {until: 1, lr_factor: 0.25}]"))
    rates = dict(logged_values(tiny("name=slower").run_folder, "lr"))
    assert rates[5] == rates[4] / 4


def test_a_batch_depends_on_the_step_and_its_phase_alone(tiny):
    config, longer = tiny(LONGER), tiny("data.seq_len=64")
    store = prepare(config.data)
    batches = [train_sequences(store, given).batch(5, 0, 4) for given in (config.with_phase_seq_len(1), longer)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    assert batches[0].tokens.shape == (4, 64)
    assert config.with_phase_seq_len(0) is config


def test_n_and_m_go_by_the_first_length_and_the_model_has_the_last_positions(tiny):
    config = tiny("name=longer", "model.normalizer=log_n", LONGER)
    train(config)
    model = load(config.run_folder)
    assert model.decoder.seq_len == model.spec.seq_len == 32
    assert model.decoder.config.position.theta == 40000
    assert {normalizer.layer.train_length for normalizer in model.decoder.normalizers()} == {32}
    assert normalizer_history_label(read_run(config.run_folder)) == "log_n"


@pytest.mark.slow
def test_two_processes_train_as_one_does_across_a_change(tiny, arguments: list[str]):
    train(tiny("name=one", LONGER))
    run_ranks(2, run_command, "train", *arguments, LONGER, "name=two", "trainer.devices=2")
    one, two = (training_losses(tiny(f"name={name}").run_folder) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["phases=[{until: 1, seq_len: 64}]"], r"phases\[0\]\.seq_len = 64: .*; set data\.seq_len"),
        (["phases=[{until: 0.5}, {until: 1, seq_len: 48}]"], r"optim\.batch_tokens = 256: .* = 48, in phases\[1\]"),
        (
            [LONGER, "data.lengths={name: mixed, weights: {16: 0.5, 32: 0.5}}"],
            r"data\.lengths = 'mixed': draws the length of each step, and phases change it",
        ),
        (["model.position=learned", LONGER], r"phases\[1\]\.position = 'rope': learned positions are weights"),
        (
            ["model.position=learned", "phases=[{until: 0.5}, {until: 1, seq_len: 64}]"],
            r"phases\[1\]\.seq_len = 64: learned positions end at data\.seq_len = 32",
        ),
        (
            ["phases=[{until: 0.5}, {until: 1, position: {name: rope, fraction: 0.01}}]"],
            r"phases\[1\]\.position\.fraction = 0\.01: rotates nothing",
        ),
        (["phases=[{until: 0.5}, {until: 1, lr_factor: 0}]"], r"phases\[1\]\.lr_factor = 0: must be > 0"),
    ],
)
def test_a_change_that_has_weights_or_makes_no_whole_sequences_is_refused(tiny, changes: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        tiny(*changes)


def test_text_that_is_too_short_for_a_later_phase_is_named_before_training(tiny):
    with pytest.raises(ConfigError, match=r"phases\[1\]\.seq_len = 1048576: a sequence needs 1,048,577 tokens"):
        train(tiny("optim.batch_tokens=1048576", "phases=[{until: 0.5}, {until: 1, seq_len: 1048576}]"))


@pytest.fixture(scope="module")
def trained(tiny_below, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints."""
    config = tiny_below(tmp_path_factory.mktemp("first"), "name=first", "optim.schedule=constant", *EVERY_STEP_OPTIONS)
    train(config)
    return config.run_folder


@pytest.mark.parametrize("start", ["init_from", "branch_from"])
@pytest.mark.parametrize("position", [YARN, "none"], ids=["yarn", "NoPE"])
def test_a_start_from_weights_may_change_positions_and_length_and_says_so(
    tiny, trained: Path, start: str, position: str, capsys: pytest.CaptureFixture
):
    at = trained if start == "init_from" else trained / "checkpoints" / "step-000004.ckpt"
    options = [
        "optim.schedule=constant",
        *EVERY_STEP_OPTIONS,
        f"{start}={at}",
        f"model.position={position}",
        "data.seq_len=64",
    ]
    config = tiny("name=longer", *options)
    train(config)
    output = capsys.readouterr().out
    assert "note: positions change: rope theta 10000 -> " in output
    assert "note: the training length, which n and m go by, changes from 32 to 64" in output
    delete_checkpoints_after(config.run_folder, 6)
    before = training_losses(config.run_folder)
    train(tiny("name=longer", *options, "resume=auto"))
    assert training_losses(config.run_folder) == before


def test_what_has_weights_or_constants_may_not_change_at_a_start(tiny, trained: Path):
    branch = ["optim.schedule=constant", *EVERY_STEP_OPTIONS, f"branch_from={trained}/checkpoints/step-000004.ckpt"]
    learned = ["model.position=learned", "eval.long_context={length_factor: 1, inference: [{}]}"]
    for start in ([f"init_from={trained}"], branch):
        with pytest.raises(ConfigError, match=r"model\.position = 'learned': .* learned positions are weights"):
            train(tiny("name=other", *start, *learned))
    train(tiny("name=log_n", "model.normalizer=log_n", *EVERY_STEP_OPTIONS))
    with pytest.raises(ConfigError, match=r"model\.normalizer\.base = 64\.0: \S+ has 32\.0; set it"):
        train(
            tiny(
                "name=other", "model.normalizer=log_n", *EVERY_STEP_OPTIONS, "data.seq_len=64",
                f"branch_from={tiny('name=log_n').run_folder}/checkpoints/step-000004.ckpt",
            )
        )  # fmt: skip


def test_arms_may_start_from_others_with_other_positions(arguments: list[str], tmp_path: Path):
    file = tmp_path / "extended.yaml"
    base = "\n".join(f"  {line}" for line in Path(arguments[0]).read_text().splitlines() if not line.startswith("#"))
    file.write_text(
        f"base:\n{base}\narms:\n  short: {{}}\n  longer: {{from: short, model.position: {YARN}}}\n"
        "seeds: [1]\nprimary: {metric: val/loss, better: lower, matters: 0.1}\n"
    )
    done = lm("compare", str(file), *arguments[1:], "--plan")
    assert done.returncode == 0, done.stderr
