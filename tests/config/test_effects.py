"""Each key declares what it affects; what distinguishes arms, and what resume and evaluation may change, follows from
that.
"""

import pytest

from lm.config.load import command_overrides
from lm.config.model_config import ModelConfig
from lm.config.reference import reference_rows
from lm.config.schema import effect_at
from lm.config.tree import Config, distinguishes_arms, key_effect, keys_recorded_at_each_start, model_function_options
from lm.errors import ConfigError

KEYS = [path for path, *_ in reference_rows(Config)]


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_an_effect(path: str):
    assert effect_at(Config, path) is not None


def test_unknown_keys_have_no_effect_and_options_of_plugins_have_their_blocks():
    assert [effect_at(Config, path) for path in ("nothing", "optim.nothing", "model.n_layer2", "trainer.threads2")] == [
        None
    ] * 4
    assert effect_at(Config, "model.normalizer.an_option_of_a_plugin") == effect_at(Config, "model.normalizer")


def test_a_key_of_another_version_distinguishes_arms_and_must_not_change_on_resume():
    assert distinguishes_arms("optim.nothing")
    assert key_effect("optim.nothing").on_resume == "same"


@pytest.mark.parametrize(
    ("path", "learned"),
    [
        ("optim.lr", True), ("data.source.paths", True), ("phases[1].normalizer.name", True),
        ("trainer.precision", True),
        ("trainer.max_steps", True), ("data.on_error", True), ("seed", False), ("name", False),
        ("trainer.micro_batch", False),
        ("data.root", False), ("eval.needle.trials", False), ("log.every", False), ("resume", False),
        ("init_from", True)
    ]
)  # fmt: skip
def test_which_keys_distinguish_arms(path: str, learned: bool):
    assert distinguishes_arms(path) == learned


def test_which_keys_that_affect_learning_may_change_on_resume():
    assert sorted(keys_recorded_at_each_start()) == [
        "trainer.callbacks",
        "trainer.compile",
        "trainer.max_steps",
        "trainer.precision",
    ]
    blocks = {path.partition(".")[0].removesuffix("[]") for path in KEYS if key_effect(path).on_resume == "ahead"}
    assert blocks == {"phases", "model"}
    assert key_effect("phases[2].warmup_steps").on_resume == key_effect("model.normalizer.init").on_resume == "ahead"


def test_dropout_and_initial_weights_are_no_part_of_a_models_function():
    assert {"dropout", "init_std"}.isdisjoint(model_function_options(ModelConfig()))
    assert {"n_layer", "normalizer.name", "position.theta"} <= set(model_function_options(ModelConfig()))


def test_each_command_accepts_the_keys_that_act_in_it():
    accepted = {path for path in KEYS if "eval" in effect_at(Config, path).commands and not path.startswith("eval.")}
    assert accepted == {"trainer.accelerator", "trainer.precision", "trainer.threads", "data.root"}
    assert command_overrides("eval", ["eval.sequences=3"]) == {"eval": {"sequences": 3}}


@pytest.mark.parametrize(
    "override", ["model.n_head=4", "trainer.devices=2", "trainer={threads: 1}", "optim.groups.head.lr_factor=2"]
)
def test_an_override_that_a_command_would_ignore_is_refused(override: str):
    with pytest.raises(ConfigError, match=r"can't be changed in lm eval"):
        command_overrides("eval", [override])
