"""What needs no data is checked before they are prepared, which can take long."""

import sys

import pytest
import torch
from folders import last_checkpoint

from lm.config.tree import Config
from lm.errors import ConfigError, RunError
from lm.training.train import train

SIZES = ["model.n_embd=64", "model.n_head=4", "model.n_layer=2", "model.normalizer=softmax", "trainer.max_steps=2"]
REFUSED = {
    "nothing to train": (["train_only=normalizer"], r"train_only = 'normalizer': softmax has no parameters to train"),
    "a group without parameters": (
        ["model.tied=true", "optim.groups.head.lr_factor=2"],
        r"optim\.groups\.head = .*: no trained parameter is in this group; drop it",
    ),
}


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the data can't be prepared."""

    def prepare(*_, **__) -> None:
        raise AssertionError("data were prepared")

    for module in ("lm.training.train", "lm.evaluation.evaluate"):
        monkeypatch.setattr(f"{module}.prepare", prepare)


@pytest.mark.parametrize("what", REFUSED)
def test_a_new_run_is_refused_before_its_data_are_prepared(tiny, no_data, what: str):
    overrides, message = REFUSED[what]
    config = tiny(*SIZES, *overrides, "trainer.accelerator=cpu", "name=run")
    for folder_was_there in (False, True):
        if folder_was_there:
            config.run_folder.mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"^{message}[^\n]*$"):
            train(config)
        assert not config.run_folder.exists()


def test_a_missing_package_of_an_evaluation_is_reported_and_leaves_no_run(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    config = tiny(*SIZES, "name=run", "eval.tasks=[hellaswag]")
    with pytest.raises(RunError, match=r"downstream tasks: lm_eval.* is not installed; pip install"):
        train(config)
    assert not config.run_folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_noticed_before_data_are_prepared(tiny, no_data):
    with pytest.raises(ConfigError, match=r"trainer\.accelerator = 'gpu': no CUDA GPU is visible"):
        train(tiny(*SIZES, "trainer.accelerator=gpu"))


def test_weights_and_checkpoints_of_another_model_are_refused_before_data_are_prepared(
    tiny, request: pytest.FixtureRequest
):
    before = tiny(*SIZES, "name=run")
    assert train(before) == 0
    request.getfixturevalue("no_data")
    for overrides, message in (
        (["name=next", f"init_from={before.run_folder}"], r"model\.n_embd = 128: \S+ has 64"),
        (["name=run", "resume=auto"], r"model\.n_embd = 128: the checkpoint was trained with 64"),
    ):
        with pytest.raises(ConfigError, match=rf"^{message}; [^\n]*$"):
            train(tiny(*SIZES, "model.n_embd=128", *overrides))
    assert (last_checkpoint(before.run_folder)).exists()
    with pytest.raises(AssertionError, match="data were prepared"):
        train(tiny(*SIZES, "name=next", f"init_from={before.run_folder}"))


def test_a_task_over_symbols_goes_on_from_weights_that_know_these_symbols_and_from_no_others(tiny):
    def config(name: str, keys: int, *overrides: str) -> Config:
        task = f"data.tasks=[{{task: {{name: mqar, keys: {keys}, values: 16, pairs: 4, queries: 4}}}}]"
        return tiny(
            *SIZES,
            f"name={name}",
            task,
            "eval.long_context.length_factor=0",
            "eval.recall.length_factors=[]",
            *overrides,
        )

    before = config("first", 16)
    assert train(before) == 0
    assert train(config("next", 16, f"init_from={before.run_folder}")) == 0
    with pytest.raises(
        ConfigError,
        match=r"^data\.tokenizer = .*: makes a vocabulary of |^data\.tokenizer = .*: is another tokenizer than that of",
    ):
        train(config("other", 32, f"init_from={before.run_folder}"))


def test_a_checkpoint_that_is_not_there_is_said_with_those_that_are(tiny):
    run = tiny(*SIZES, "name=run", "trainer.checkpoint_every=1")
    assert train(run) == 0
    remedy = rf"set it to auto, or to one of step-000001\.ckpt, step-000002\.ckpt in {run.run_folder}/checkpoints$"
    for other in (f"{run.run_folder}/checkpoints/step-2.ckpt", "latest", run.run_folder):
        with pytest.raises(RunError, match=rf"^resume = {other}: no checkpoint; {remedy}"):
            train(tiny(*SIZES, "name=run", f"resume={other}"))
    with pytest.raises(
        RunError, match=r"^resume = latest: no checkpoint; set it to auto, or to a path; the run has no checkpoint$"
    ):
        train(tiny(*SIZES, "name=new", "resume=latest"))
    assert not (run.run_folder.parent / "new").exists()
