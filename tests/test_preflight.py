"""What needs no data is checked before they are prepared, which can take long."""

import pytest
import torch

from lm.errors import ConfigError
from lm.model.decoder import Decoder
from lm.training.train import train

SIZES = ["model.n_embd=64", "model.n_head=4", "model.n_layer=2", "model.normalizer=softmax", "trainer.max_steps=2"]
REFUSED = {
    "nothing to train": (["train_only=normalizer"], r"train_only = 'normalizer': softmax has no parameters to train"),
    "an idle group": (
        ["model.normalizer=ssmax", "train_only=normalizer", "optim.groups.matrices.lr_factor=2"],
        r"optim\.groups\.matrices = .*: no trained parameter is in this group",
    ),
    "a model beyond all memory": (
        ["model.n_embd=524288", "model.n_layer=32"],
        r"model = '[\d,]+ parameters': need [\d,]+ GiB for weights, gradients and optimizer state, this machine has [\d,]+ GiB; lower",
    ),
}


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the data can't be prepared."""

    def prepare(*_, **__) -> None:
        raise AssertionError("data were prepared")

    monkeypatch.setattr("lm.training.train.prepare", prepare)


@pytest.mark.parametrize("what", REFUSED)
def test_a_new_run_is_refused_before_its_data_are_prepared(tiny, no_data, what: str):
    overrides, said = REFUSED[what]
    config = tiny(*SIZES, *overrides, "trainer.accelerator=cpu", "name=run")
    with pytest.raises(ConfigError, match=rf"^{said}[^\n]*$"):
        train(config)
    assert not config.run_folder.exists()


def test_the_memory_that_a_model_needs_is_that_of_its_optimizer(tiny, no_data, monkeypatch: pytest.MonkeyPatch):
    """Muon has one number for each entry of a matrix, where AdamW has two."""
    adamw, muon = (tiny(*SIZES, f"optim.optimizer={name}", "trainer.accelerator=cpu") for name in ("adamw", "muon"))
    size = sum(p.numel() for p in Decoder(adamw.model, 1, adamw.data.seq_len).parameters())
    monkeypatch.setattr("lm.training.preflight.os.sysconf", lambda name: 14 * size if name == "SC_PHYS_PAGES" else 1)
    with pytest.raises(ConfigError, match="for weights, gradients and optimizer state"):
        train(adamw)
    with pytest.raises(AssertionError, match="data were prepared"):
        train(muon)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_noticed_before_data_are_prepared(tiny, no_data):
    with pytest.raises(ConfigError, match=r"trainer\.accelerator = 'gpu': no CUDA GPU is visible"):
        train(tiny(*SIZES, "trainer.accelerator=gpu"))


def test_weights_and_checkpoints_of_another_model_are_refused_before_data_are_prepared(tiny, request: pytest.FixtureRequest):
    before = tiny(*SIZES, "name=run")
    assert train(before) == 0
    request.getfixturevalue("no_data")
    for overrides, said in (
        (["name=next", f"init_from={before.run_folder}"], r"model\.n_embd = 128: \S+ has 64"),
        (["name=run", "resume=auto"], r"model\.n_embd = 128: the checkpoint was trained with 64"),
    ):
        with pytest.raises(ConfigError, match=rf"^{said}; [^\n]*$"):
            train(tiny(*SIZES, "model.n_embd=128", *overrides))
    assert (before.run_folder / "checkpoints" / "last.ckpt").exists()
    with pytest.raises(AssertionError, match="data were prepared"):
        train(tiny(*SIZES, "name=next", f"init_from={before.run_folder}"))
