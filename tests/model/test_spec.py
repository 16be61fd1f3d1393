"""A model by itself: saved with or without a training run behind it, read back and used."""

from pathlib import Path

import pytest
import torch
from conftest import lm as command
from manifests import edit_json

import lm
from lm.attention import catalogue as opt
from lm.config.eval_config import InferenceSetting, ThetaFactor
from lm.config.model_config import ModelConfig
from lm.data.prepare import prepare
from lm.errors import RunError
from lm.files import read_json
from lm.model.decoder import Decoder
from lm.model.spec import ModelSpec
from lm.model.swapped import with_inference_setting
from lm.plain import to_plain
from lm.runs.folder import MODEL_JSON
from lm.runs.loading import MODEL_FORMAT, save_model
from lm.training.train import train

MODEL = ModelConfig(
    n_layer=2, n_head=4, n_kv_head=2, head_size=6, n_embd=32, qkv_bias=True, tied=True, normalizer=opt.SSMax(bias=True)
)
TOKENS = torch.arange(40)[None]


@pytest.fixture
def tokenizer(tiny, tmp_path: Path) -> Path:
    """A tokenizer.json of 400 tokens."""
    prepare(tiny().data).tokenizer().save(str(tmp_path / "own.json"))
    return tmp_path / "own.json"


@pytest.fixture
def saved(tokenizer: Path, tmp_path: Path) -> Path:
    return save_model(Decoder(MODEL, 400, 32, seed=5), tmp_path / "model", tokenizer)


FILES = ["lm.json", "manifest.jsonl", "model.safetensors", "tokenizer.json"]


def test_a_saved_model_is_loaded_unchanged(saved: Path):
    model, decoder = lm.load(saved), Decoder(MODEL, 400, 32, seed=5)
    assert torch.equal(model.decoder.logits(TOKENS), decoder.logits(TOKENS))
    assert model.spec == ModelSpec(MODEL, 400, 32)
    assert ModelSpec.from_plain(to_plain(model.spec)) == model.spec
    assert (model.config, model.metadata, model.environment) == (None, {}, {})
    assert model.tokenizer.get_vocab_size() == 400
    assert sorted(path.name for path in saved.iterdir()) == sorted([*FILES, "model.yaml"])


def test_a_model_without_text_needs_no_tokenizer(tmp_path: Path):
    model = lm.load(save_model(Decoder(MODEL, 70, 32), tmp_path / "model"))
    assert model.tokenizer is None
    assert command("generate", str(tmp_path / "model")).stderr.count("no tokenizer.json") == 1


def test_a_run_starts_from_a_saved_model(saved: Path, tiny):
    shape = [
        "n_head=4",
        "n_kv_head=2",
        "head_size=6",
        "qkv_bias=true",
        "tied=true",
        "normalizer={name: ssmax, bias: true}",
    ]
    config = tiny("name=tuned", f"init_from={saved}", *(f"model.{key}" for key in shape))
    train(config)
    start = read_json(config.run_folder / "environment.json")["started_from"]
    assert (start["step"], start["tokens"], start["seeds"], len(start["arm"])) == (0, 0, [], 12)


def test_commands_that_need_the_training_text_refuse_a_saved_model(saved: Path, tmp_path: Path):
    for words in (["eval", str(saved)], ["swap", str(saved), "--to", "softmax", "-o", str(tmp_path / "swapped")]):
        result = command(*words)
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
        assert "model: has no training run behind it" in result.stderr
    assert not (tmp_path / "swapped").exists()


def test_what_a_model_folder_can_not_hold_is_refused(tokenizer: Path, tmp_path: Path):
    decoder = Decoder(MODEL, 300, 32)
    with pytest.raises(RunError, match="has 400 tokens, the model 300"):
        save_model(decoder, tmp_path / "model", tokenizer)
    with pytest.raises(RunError, match="holds no inference setting"):
        save_model(with_inference_setting(decoder, InferenceSetting(ThetaFactor())), tmp_path / "model")
    assert not (tmp_path / "model").exists()


ALTERED = {
    "another normalizer": (
        lambda description: description["spec"]["model"].update(normalizer={"name": "softmax"}),
        r"Unexpected key\(s\) .*normalizer\.b",
    ),
    "a wrong key": (
        lambda description: description["spec"]["model"].update(heads=3),
        r"weights and configuration don't fit: .*model\.heads",
    ),
    "a contradiction": (
        lambda description: description["spec"]["model"].update(n_kv_head=3),
        r"n_kv_head = 3: does not divide",
    ),
    "no length": (lambda description: description["spec"].pop("seq_len"), r"seq_len = null: is missing"),
    "another version": (
        lambda description: description.update(format=1),
        f"format 1, this version of lm reads {MODEL_FORMAT}",
    ),
}


@pytest.mark.parametrize("change", ALTERED)
def test_a_description_that_does_not_fit_is_refused(saved: Path, change: str):
    alter, words = ALTERED[change]
    edit_json(saved / MODEL_JSON, alter)
    with pytest.raises(RunError, match=words):
        lm.load(saved)


@pytest.mark.parametrize(
    ("tied", "normalizer"), [(False, "{name: ssmax, bias: true}"), (True, "{name: softmax, temperature: 0.5}")]
)
def test_a_run_a_checkpoint_and_an_export_give_the_same_model(tiny, tmp_path: Path, tied: bool, normalizer: str):
    config = tiny("name=given", f"model.tied={str(tied).lower()}", f"model.normalizer={normalizer}")
    train(config)
    folder = config.run_folder
    result = command("export", str(folder), "-o", str(tmp_path / "exported"))
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == FILES
    tokens = torch.arange(40)[None]
    models = [
        lm.load(path) for path in (folder, folder / "checkpoints" / "step-000008.ckpt", str(tmp_path / "exported"))
    ]
    for model in models:
        assert not model.decoder.training
        assert torch.equal(model.decoder.logits(tokens), models[0].decoder.logits(tokens))
        assert model.tokenizer.decode(model.tokenizer.encode("a few words").ids) == "a few words"
        assert (model.metadata["step"], model.config) == (8, models[0].config)
    assert command("export", str(folder), "-o", str(tmp_path / "exported")).returncode == 1
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match=r"model.safetensors: was altered"):
        lm.load(tmp_path / "exported")
    with pytest.raises(RunError, match="not a run folder: it has no checkpoints"):
        lm.load(tmp_path)
