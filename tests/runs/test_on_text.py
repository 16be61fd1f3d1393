"""Model folders without a training run: evaluated, diagnosed and swapped on the text of a configuration, with their own
tokenizer.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, lm
from folders import stored_curves
from manifests import edit_json

from lm.config.data_config import TrainedTokenizer
from lm.config.load import load_config
from lm.config.model_config import ModelConfig
from lm.data.prepare import prepare
from lm.data.tokenizer import train_tokenizer
from lm.model.decoder import Decoder
from lm.runs.evaluations import load_evaluation
from lm.runs.loading import export, load, save_model
from lm.training.phase_start import start_new_run


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of its own, which knows fewer tokens than it, and a token of its own that ends
    documents.
    """
    folder = tmp_path_factory.mktemp("models")
    texts = [path.read_text() for path in sorted(corpus.iterdir())][:2]
    train_tokenizer(iter(texts), TrainedTokenizer(vocab_size=290)).save(str(folder / "tokenizer.json"))
    model = save_model(
        Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32), 300, 48), folder / "model", folder / "tokenizer.json"
    )
    edit_json(model / "lm.json", lambda description: description["spec"].update(end_tokens=["e"]))
    keys = (model / "model.yaml").read_text()
    (model / "model.yaml").write_text(keys.replace("end_tokens: []", 'end_tokens: [e, "<|endoftext|>"]'))
    return model


def test_a_model_is_evaluated_on_the_text_of_a_configuration(saved: Path, corpus_file: Path, tmp_path: Path):
    out = tmp_path / "numbers.csv"
    result = lm("eval", str(saved), str(corpus_file), "eval.sequences=4", "-o", str(out))
    assert result.returncode == 0, result.stderr
    loss = stored_curves(saved, "validation", 0)[0]
    assert np.log(290) - 1 < loss.means[0] < np.log(300) + 1  # untrained
    assert (loss.metric, len(loss.points[0].values)) == ("val/loss", 4)
    assert "290" in result.stdout  # the vocabulary of the store: the model's tokenizer, not the configuration's
    assert load_config([str(corpus_file)]).data.tokenizer.name == "train"
    second_result = lm(
        "eval", str(saved), str(saved), str(corpus_file), "eval.sequences=4"
    )  # named twice, measured once
    assert second_result.returncode == 0, second_result.stderr
    assert load(saved).config is None


def test_a_model_is_swapped_on_the_text_of_a_configuration_and_trained_from(
    saved: Path, corpus_file: Path, tmp_path: Path
):
    out = tmp_path / "swapped"
    result = lm(
        "swap", str(saved), str(corpus_file), "--to", "ssmax", "--init", "match", "-o", str(out), "eval.sequences=4"
    )
    assert result.returncode == 0, result.stderr
    assert "KL" in result.stdout
    swapped = load(out)
    assert (swapped.spec.model.normalizer.name, swapped.spec.vocab_size, swapped.spec.seq_len) == ("ssmax", 300, 48)
    assert (swapped.spec.end_tokens, load(export(out, "last", tmp_path / "exported")).spec.end_tokens) == (["e"], ["e"])
    assert load_evaluation(out / "evaluations" / "swap.step-000000.csv").options["before"] == "softmax"
    assert lm("eval", str(out), "eval.sequences=4").returncode == 0
    options = [
        str(corpus_file),
        str(saved / "model.yaml"),
        f"init_from={out}",
        f"runs={tmp_path}",
        "name=run",
        "data.seq_len=32",
        "eval.sequences=4",
    ]
    options += ["model.normalizer=ssmax"]
    words = [*options, "train_only=normalizer", "trainer.activation_checkpointing=true", "trainer.max_steps=2"]
    result = lm("train", *words)
    assert result.returncode == 0, result.stderr
    assert "note: those weights were trained on text that is not known" in result.stdout
    run, before = load(tmp_path / "run"), swapped.decoder.state_dict()
    assert (run.spec.model.n_embd, run.spec.model.normalizer.name, run.config.data.tokenizer.name) == (
        32,
        "ssmax",
        "file",
    )
    assert run.spec.end_tokens == ["e", "<|endoftext|>"]  # its documents end where the next one starts
    changed_names = {name for name, value in run.decoder.state_dict().items() if not torch.equal(value, before[name])}
    assert changed_names == {"blocks.0.attention.normalizer.s", "blocks.1.attention.normalizer.s"}
    assert lm("train", *words, "trainer.max_steps=3", "resume=auto").returncode == 0


def test_a_run_from_a_model_has_phases(saved: Path, corpus_file: Path, tmp_path: Path):
    phases = "[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: {name: ssmax, bias: true}}]"
    arguments = [str(saved / "model.yaml"), f"runs={tmp_path}", "name=run", "data.seq_len=32", f"phases={phases}"]
    arguments += ["trainer.max_steps=2", "trainer.activation_checkpointing=true", "eval.sequences=4"]
    result = lm("train", str(corpus_file), *arguments)
    assert result.returncode == 0, result.stderr
    assert load(tmp_path / "run").spec.model.normalizer.label() == "ssmax (bias=true)"


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_model_that_was_not_imported_is_said_to_be_one(command: str, corpus_file: Path, tmp_path: Path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text("{}")
    result = lm(
        *map(str, ["train", corpus_file, f"init_from={path}"] if command == "train" else ["eval", path, corpus_file])
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {path}: a model in transformers' format; run lm import on it, or ")


def test_a_run_from_a_model_has_its_shape_and_tokenizer(saved: Path, corpus_file: Path, tmp_path: Path):
    arguments = [
        str(corpus_file),
        str(saved / "model.yaml"),
        f"runs={tmp_path}",
        "name=run",
        "data.seq_len=32",
        "trainer.max_steps=2",
    ]
    result = lm("train", *arguments, "model.normalizer=softmax", "eval.sequences=4")
    assert result.returncode == 0, result.stderr
    run = load(tmp_path / "run")
    assert (run.spec.vocab_size, run.spec.seq_len, run.spec.model.n_embd, run.config.data.tokenizer.name) == (
        300,
        32,
        32,
        "file",
    )
    assert run.tokenizer.get_vocab() == load(saved).tokenizer.get_vocab()
    contradicting = lm("train", *arguments, "model.normalizer=softmax", "name=other", "model.n_mlp=64")
    assert (contradicting.returncode, contradicting.stderr.count("\n")) == (2, 1)
    assert f"model.n_mlp = 64: {saved} has" in contradicting.stderr
    swapped = lm("train", *arguments, "name=other", "model.normalizer=ssmax")
    assert "convert it: lm swap" in swapped.stderr


def test_a_run_holds_the_weights_that_it_starts_from_once(saved: Path, corpus_file: Path):
    source, run = load(saved), load_config([str(corpus_file), str(saved / "model.yaml")])
    start, _, _ = start_new_run(run, prepare(run.data, progress=False), source)
    assert {p.device.type for p in source.decoder.parameters()} == {"meta"}
    assert start.decoder.embedding.weight.equal(load(saved).decoder.embedding.weight)


def test_no_normalizer_is_taken_from_a_model_folder(saved: Path):
    assert "normalizer" not in (saved / "model.yaml").read_text()


@pytest.mark.parametrize(("command", "options"), [("eval", []), ("diagnose", []), ("swap", ["--to", "ssmax", "-o"])])
def test_text_that_is_too_short_for_a_model_is_said_to_be(
    command: str, options: list[str], saved: Path, corpus_file: Path, tmp_path: Path
):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abc":
        (texts / f"{name}.txt").write_text(f"{name} short text")
    little = tmp_path / "little.yaml"
    little.write_text(
        f"base: {corpus_file}\n"
        f"data: {{root: {tmp_path}, source: {{name: files, paths: [{texts}]}}, val_fraction: 0.4}}\n"
    )
    result = lm(command, str(saved), str(little), *options, *([str(tmp_path / "out")] if options else []))
    assert (result.returncode, result.stderr.splitlines()[-1].startswith("error: ")) == (2, True), result.stderr
    reason = r"data\.seq_len = 48: a sequence needs 49 tokens, the .*; add text, or .*\n"
    assert re.search(reason, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_swap_is_refused_before_its_text_is_prepared(saved: Path, corpus_file: Path, tmp_path: Path):
    arguments = ["swap", str(saved), str(corpus_file), "-o", str(tmp_path / "out"), f"data.root={tmp_path / 'data'}"]
    for options, reason in {
        ("--to", "softmix"): "unknown name",
        ("--to", "log_n", "--init", "unit"): "model.normalizer.init",
    }.items():
        result = lm(*arguments, *options)
        assert (result.returncode, result.stdout) == (2, "")
        assert reason in result.stderr
        assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["eval", "diagnose"])
def test_what_can_not_be_measured_is_said_in_one_line(command: str, saved: Path, corpus_file: Path, tmp_path: Path):
    symbols = tmp_path / "symbols.yaml"
    symbols.write_text(f"base: {ROOT / 'configs' / 'recall_one_symbol.yaml'}\n")
    no_tokenizer = save_model(Decoder(ModelConfig(n_layer=1, n_head=1, n_embd=8), 20, 16), tmp_path / "mute")
    for arguments, reason in {
        (corpus_file,): "a configuration, not a model",
        (saved, symbols): "its sequences are symbols",
        (no_tokenizer, corpus_file): "no tokenizer.json beside the weights",
        (saved, tmp_path / "none.yaml"): "no such configuration file",
    }.items():
        result = lm(command, *map(str, arguments))
        assert result.returncode in (1, 2), arguments
        assert result.stderr.count("\n") == 1, result.stderr
        assert reason in result.stderr
