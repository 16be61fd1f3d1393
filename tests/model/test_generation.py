"""Text from a trained model, token by token."""

import contextlib
import io
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import lm

from lm.attention.catalogue import SSMax
from lm.cli import main
from lm.config.data_config import MQAR
from lm.config.model_config import ModelConfig
from lm.data.tasks import symbol_tokenizer
from lm.errors import ConfigError, RunError
from lm.evaluation.generation import Sampling, generate, generate_text, sample_token
from lm.model.decoder import Decoder
from lm.training.train import train


def test_generation_is_greedy_at_temperature_zero_and_follows_its_seed_otherwise():
    model = (
        Decoder(ModelConfig(n_layer=2, n_head=2, n_embd=32, normalizer=SSMax()), 50, seq_len=16, seed=3).eval().double()
    )
    greedy = list(generate(model, [1, 2, 3], 12, Sampling(temperature=0)))
    expected = [1, 2, 3]
    for _ in range(12):
        expected.append(int(model.logits(torch.tensor([expected]))[0, -1].argmax()))
    assert greedy == expected[3:]
    runs = [list(generate(model, [1, 2, 3], 12, Sampling(seed=seed))) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert list(generate(model, [1, 2, 3], 12, Sampling(top_k=1))) == greedy


def test_draws_stay_within_top_k():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def seen(top_k: int | None) -> set[int]:
        return {sample_token(logits, Sampling(top_k=top_k), generator) for _ in range(300)}

    assert seen(None) == {0, 1, 2, 3}
    assert seen(2) == {0, 1}


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_a_temperature_divides_the_logits(temperature: float):
    """Drawn as often as p^(1 / temperature) says, over their sum."""
    p, generator = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.Generator().manual_seed(0)
    expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
    counts = torch.bincount(
        torch.tensor([sample_token(p.log(), Sampling(temperature), generator) for _ in range(4000)]), minlength=4
    )
    assert (counts / 4000).tolist() == pytest.approx(expected.tolist(), abs=0.03)


@pytest.mark.parametrize(
    ("value", "temperature"),
    [*itertools.product((math.nan, math.inf), (0, 1.0)), (1.0, math.nan), (1.0, 1e-300)],
)
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float):
    with pytest.raises(RunError, match="logits are not finite"):
        sample_token(torch.tensor([0.0, value]), Sampling(temperature), torch.Generator())


def test_lm_generate_writes_text_as_it_comes(tiny):
    train(tiny("name=writer", "trainer.max_steps=4"))
    folder = str(tiny("name=writer").run_folder)
    results = [lm("generate", folder, "--prompt", "a word", "--max-new-tokens", "20", "--seed", "3") for _ in range(2)]
    assert results[0].returncode == 0, results[0].stderr
    assert results[0].stdout == results[1].stdout
    assert results[0].stdout.startswith("a word")
    assert len(results[0].stdout) > 20


def test_a_prompt_that_the_model_has_no_token_for_is_refused(monkeypatch):
    model = SimpleNamespace(tokenizer_and_start_id=lambda: (symbol_tokenizer([MQAR()]), 0))
    monkeypatch.setattr("lm.evaluation.generation.load", lambda *arguments: model)
    with pytest.raises(
        ConfigError, match="--prompt = 'hello': the model has no token for it; its tokens are such as `0 1 2`"
    ):
        list(generate_text(Path(), "last", "1 hello 2", 3, Sampling()))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_control_characters_reach_a_file_and_no_terminal(monkeypatch, is_terminal: bool):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("lm.evaluation.generation.generate_text", lambda *_: iter(["a\x1b[2J", "\n\tb"]))
    monkeypatch.setattr(sys, "argv", ["lm", "generate", "runs/any"])
    with contextlib.redirect_stdout(stream), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert stream.getvalue() == ("a\\x1b[2J\n\tb\n" if is_terminal else "a\x1b[2J\n\tb\n")
