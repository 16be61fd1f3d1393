"""Attention to look at: maps of single heads' weights on a text, their table and pictures, and what can not be
drawn.
"""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import lm
from test_diagnostics import VOCAB, make_decoder
from tokenizers import Tokenizer, models, pre_tokenizers

from lm.attention import catalogue as opt
from lm.attention.options import Options
from lm.config.model_config import LearnedPosition, ModelConfig
from lm.data.batches import Batch
from lm.evaluation.attention_maps import ModelAttention, attention_maps, attention_picture_by_suffix
from lm.model import attention_stream
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.runs.loading import save_model

START = "<|endoftext|>"
WORDS = [START, "?", *["a", "few", "words", "of", "a", "text", "that", "attention", "is", "drawn", "on,", "é", "$x_1$"]]


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "block"), [(opt.Window(9), "attention"), (opt.Relu2(), "gau"), (opt.Softpick(), "attention")]
)
def test_maps_hold_each_weight_however_attention_is_streamed(
    options: Options, block: str, monkeypatch: pytest.MonkeyPatch
):
    decoder = make_decoder(options, block)
    tokens = torch.randint(1, VOCAB, (23,), generator=torch.Generator().manual_seed(3))
    batch = Batch.from_sequences(torch.cat((tokens, tokens[:1]))[None])
    (*layers,) = attention_blocks(decoder, batch, block_size=23)
    monkeypatch.setattr(attention_stream, "MAX_BLOCK_WEIGHTS", 5 * 2 * 23)  # five queries at a time
    maps = attention_maps(decoder, tokens)
    for layer in layers:
        visible = layer.normalizer.visible(layer.layout).reshape(23, 23)
        expected = layer.weights[0].masked_fill(~visible, math.nan).numpy()
        np.testing.assert_allclose(maps[layer.layer], expected, atol=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of two layers of two heads, whose tokens are words."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(WORDS))}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([START])
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = Decoder(
        ModelConfig(n_layer=2, n_embd=16, n_head=2, init_std=0.5, position=LearnedPosition()), VOCAB, 64, seed=1
    )
    return save_model(decoder, folder / "model", folder / "tokenizer.json")


@pytest.mark.usefixtures("drawn_pictures")
def test_a_short_text_is_drawn_whole_with_its_tokens(model: Path, tmp_path: Path):
    text, out = "a few words on a text, é $x_1$", tmp_path / "maps.csv"
    result = lm("diagnose", str(model), str(model), "--text", text, "--layer", "1", "-o", str(out))
    assert result.returncode == 0, result.stderr
    assert "9 tokens, 2 heads" in result.stdout
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "maps.svg").read_bytes()
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 2 * 2 * 9 * 10 / 2
    assert {(row["layer"], row["head"]) for row in rows} == {("1", "0"), ("1", "1")}
    for query in range(9):
        of_row = [float(row["weight"]) for row in rows[: 9 * 10 // 2] if int(row["query"]) == query]
        assert sum(of_row) == pytest.approx(1, abs=1e-5)
    assert [row["key_token"] for row in rows[-9:]] == ["<start>", *text.split()]


@pytest.mark.usefixtures("drawn_pictures")
def test_heads_that_leave_places_empty_and_negative_weights_are_drawn():
    maps = np.random.default_rng(0).normal(size=(2, 2, 60, 60))
    models = [ModelAttention(Path(name), ["a"] * 60, maps, [(0, 0), (0, 1), (1, 0)]) for name in "ab"]
    files = attention_picture_by_suffix(models)
    assert files[".png"].startswith(b"\x89PNG")
    assert b"<svg" in files[".svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", ""], "--text: is empty; give a file or a text"),
        (["--text", " \n"], "--text: is empty"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: no such file"),
        (["--text", "a few " * 40], "--text: 81 tokens to "),
        (["--text", "a few", "--layer", "2"], "has 2 layers, 0 to 1"),
        (["--text", "a few", "--head", "-1"], "has 2 heads, 0 to 1"),
        (["--text", "a few", "-o", "a.png"], "a.png: can't write results of this kind"),
        (["--layer", "1"], "--layer: of the maps that --text draws"),
        (["--text", "a few", "eval.diagnostics.sequences=2"], "eval.diagnostics.sequences=2: --text takes no keys"),
    ],
)
def test_what_can_not_be_drawn_is_said_in_one_line(
    model: Path, arguments: list[str], said: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = lm("diagnose", str(model), *arguments)
    assert (result.returncode in (1, 2), result.stderr.count("\n")) == (True, 1), result.stderr
    assert said in result.stderr
    assert not list(tmp_path.iterdir())
