"""Models out: transformers loads them without code of ours and computes the same; what it can't compute is refused with the reason."""

import json
from pathlib import Path

import pytest
import torch
from conftest import lm
from test_import import CASES, T, V, imported, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm.attention import options as opt
from lm.attention.catalogue import Layers
from lm.config.model_config import GAUBlock, Learned, ModelConfig, NoPosition, Rope
from lm.evaluation.generation import generate
from lm.model.decoder import Decoder
from lm.runs.loading import load, save_model
from lm.training.train import train


def exported(source: Path, out: Path) -> Path:
    result = lm("export", str(source), "--format", "hf", "-o", str(out))
    assert (result.returncode, result.stdout) == (0, f"{out}\n"), result.stderr
    return out


def tokens() -> torch.Tensor:
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_import_export_import_gives_the_same_bits_and_transformers_the_same_logits(case: str, tmp_path: Path):
    original = save(tmp_path / "hf", *CASES[case])
    first = imported(tmp_path / "hf", tmp_path / "first")
    theirs, report = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "first", tmp_path / "again"), output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(theirs.eval()(tokens()).logits, original(tokens()).logits, rtol=0, atol=1e-4)
    second = imported(tmp_path / "again", tmp_path / "second")
    assert second.spec == first.spec
    assert second.decoder.state_dict().keys() == first.decoder.state_dict().keys()
    assert all(torch.equal(value, second.decoder.state_dict()[name]) for name, value in first.decoder.state_dict().items())


SHAPES = {
    "gpt2": ModelConfig(2, n_head=2, n_embd=32, mlp="relu2", norm="layer", position=Learned(), bias=True, tied=True),
    "llama": ModelConfig(2, n_head=4, n_kv_head=2, n_embd=32, n_mlp=48),
    "qwen2": ModelConfig(2, n_head=2, n_embd=36, head_size=16, qkv_bias=True, normalizer=Layers([opt.Softmax(), opt.Window(size=9)])),
    "qwen3": ModelConfig(2, n_head=2, n_embd=36, head_size=16, qk_norm=True, norm_eps=1e-4, position=Rope(theta=500.0)),
}


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_models_made_here_are_computed_by_transformers(kind: str, tmp_path: Path):
    decoder = Decoder(SHAPES[kind], V, 64, seed=3)
    for parameter in decoder.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    save_model(decoder, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "ours", tmp_path / "hf")).eval()
    assert theirs.config.model_type == kind
    torch.testing.assert_close(theirs(tokens()[:, :64]).logits, decoder.logits(tokens()[:, :64]), rtol=0, atol=1e-4)


def test_a_run_is_exported_with_its_tokenizer_and_a_card(tiny, tmp_path: Path):
    config = tiny("name=run", "model.normalizer=softmax", "eval.sequences=4")
    train(config)
    ours, out = load(config.run_folder), exported(config.run_folder, tmp_path / "hf")
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    text = "some words of text <|endoftext|>"
    assert tokenizer(text.removesuffix("<|endoftext|>")).input_ids == ours.tokenizer.encode(text.removesuffix("<|endoftext|>")).ids
    start = ours.tokenizer_and_start()[1]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, theirs.config.bos_token_id) == (start, start, start)
    prompt = [start, *tokenizer("some words").input_ids]
    there = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(ours.decoder, prompt, 8, temperature=0)) == there[0, len(prompt) :].tolist()
    card = (out / "README.md").read_text()
    evaluation = json.loads((config.run_folder / "evaluations" / f"validation.step-{ours.stamp['step']:06d}.json").read_text())
    loss = next(one for one in evaluation["series"] if one["metric"] == "val loss")["means"][0]
    for told in (
        "library_name: transformers",
        f"val loss (nats per token) |  |  | {loss:.4f} | 4 |",
        f"seed | {config.seed} |",
        "normalizer:",
    ):
        assert told in card, card


REFUSED = {
    "another normalizer": (ModelConfig(2, normalizer=opt.SSMax()), r"normalizer.name = softmax (here ssmax)"),
    "one in a list": (ModelConfig(2, normalizer=Layers([opt.Softmax(), opt.LogN()])), r"normalizer."),
    "no positions": (ModelConfig(2, position=NoPosition()), "position.name = rope (here none)"),
    "part of a head": (ModelConfig(2, position=Rope(fraction=0.5)), "position.fraction = 1.0 (here 0.5)"),
    "another mlp": (ModelConfig(2, mlp="relu2"), "mlp = swiglu (here relu2)"),
    "gau": (ModelConfig(2, n_head=1, block=GAUBlock()), "block.name = attention (here gau)"),
    "two windows": (ModelConfig(2, qk_norm=True, normalizer=Layers([opt.Window(size=4), opt.Window(size=5)])), "normalizer."),
    "no biases": (ModelConfig(2, norm="layer", position=Learned(), mlp="gelu"), "bias = true (here false)"),
    "uneven width": (ModelConfig(2, n_head=3, n_embd=32, head_size=16), "a width that is a multiple of its heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_does_not_compute_is_refused_with_the_reason(case: str, tmp_path: Path):
    model, reason = REFUSED[case]
    save_model(Decoder(model, 20, 16), tmp_path / "ours")
    result = lm("export", str(tmp_path / "ours"), "--format", "hf", "-o", str(tmp_path / "hf"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "no architecture of transformers computes this model without code of ours; the nearest, " in result.stderr
    assert reason in result.stderr
    assert not (tmp_path / "hf").exists()
