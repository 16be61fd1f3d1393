"""One model written in several ways is one model: for arms, for a resumed run, for starting weights, for the cache of
evaluations.
"""

import pytest

from lm.config.tree import config_differences, model_function_options, resolve_null_model_keys
from lm.errors import ConfigError
from lm.files import json_sha256
from lm.plain import to_plain
from lm.runs.record import arm_hash
from lm.training.train import train

WRITTEN_OUT = [
    "model.head_size=16", "model.n_kv_head=4", "model.n_mlp=192", "model.qkv_bias=false", "model.mlp_bias=false"
]  # fmt: skip
SIZES = ["model.n_embd=64", "model.n_head=4", "model.n_layer=2", "model.normalizer=softmax"]


@pytest.mark.parametrize("written", [*([override] for override in WRITTEN_OUT), WRITTEN_OUT])
def test_a_model_with_its_nulls_written_out_is_the_same_model(tiny, written: list[str]):
    config, full_config = tiny(*SIZES), tiny(*SIZES, *written)
    assert to_plain(config) != to_plain(full_config)
    assert config_differences(to_plain(config), to_plain(full_config)) == {}
    assert resolve_null_model_keys(to_plain(config)) == resolve_null_model_keys(to_plain(full_config))
    assert arm_hash(to_plain(config), {}) == arm_hash(to_plain(full_config), {})
    assert model_function_options(config.model) == model_function_options(full_config.model)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (["model.head_size=32"], {"model.head_size": (16, 32)}),
        (["model.n_embd=128"], {"model.n_embd": (64, 128)}),  # and what follows from it is not repeated
        (["model.bias=true", "model.qkv_bias=false"], {"model.bias": (False, True)}),
        (["model.n_kv_head=2"], {"model.n_kv_head": (4, 2)}),
        (["optim.lr=0.5", "seed=9"], {"optim.lr": (0.003, 0.5), "seed": (1, 9)}),
    ],
)
def test_differences_are_those_that_were_made(tiny, changes: list[str], found: dict):
    assert (
        config_differences(
            to_plain(tiny(*SIZES, "optim.lr=0.003", "seed=1")),
            to_plain(tiny(*SIZES, "optim.lr=0.003", "seed=1", *changes)),
        )
        == found
    )


def test_keys_that_were_added_later_leave_the_hashes_of_earlier_models_as_they_were(tiny):
    """The values are those of 0.12.0."""
    config = tiny(*SIZES, "data.root=data", "data.source={name: files, paths: [texts]}")
    assert arm_hash(to_plain(config), {}) == "c5aef34a6f8f"
    assert json_sha256(model_function_options(config.model))[:12] == "a33fed0169cd"
    assert model_function_options(tiny(*SIZES, "model.mlp_bias=true").model) != model_function_options(config.model)
    assert model_function_options(tiny(*SIZES, "model.position.scaling=linear").model) != model_function_options(
        config.model
    )


def test_a_run_is_resumed_and_started_from_by_the_same_model_written_out(tiny):
    before = tiny(*SIZES, "name=run", "trainer.max_steps=2")
    assert train(before) == 0
    assert train(tiny(*SIZES, *WRITTEN_OUT, "name=run", "resume=auto", "trainer.max_steps=4")) == 0
    assert train(tiny(*SIZES, *WRITTEN_OUT, "name=next", f"init_from={before.run_folder}", "trainer.max_steps=2")) == 0
    with pytest.raises(ConfigError, match=r"^model\.head_size = 32: the checkpoint was trained with 16; [^\n]*$"):
        train(tiny(*SIZES, "model.head_size=32", "name=run", "resume=auto", "trainer.max_steps=5"))
    with pytest.raises(ConfigError, match=r"^model\.head_size = 32: \S* has 16; [^\n]*$"):
        train(tiny(*SIZES, "model.head_size=32", "name=other", f"init_from={before.run_folder}"))
