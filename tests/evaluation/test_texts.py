"""Texts beside the held-out one: each measured whole, by its name; and long sequences that fit themselves to the
documents there are.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from folders import measure_curves, metric_lines

from lm.data.prepare import prepare
from lm.errors import ConfigError, DataError
from lm.evaluation import held_out
from lm.evaluation.held_out import OtherTexts, long_sequences
from lm.evaluation.measurement import HeldOutSequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.evaluations import model_selection_mask
from lm.runs.loading import load
from lm.training.train import train

OFF = "eval.long_context.length_factor=0"


@pytest.fixture
def verse(tmp_path: Path) -> Path:
    """A text in one file, which is one document."""
    path = tmp_path / "verse.txt"
    path.write_text(" ".join(f"line {number} of the poem ends so." for number in range(300)))
    return path


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A text of several documents, in files of another suffix."""
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.py").write_text("\n".join(f"x{line} = {number} * {line}" for line in range(60)))
    return folder


def asked(verse: Path, code: Path) -> str:
    files = f"{{name: files, paths: [{code}], suffixes: [.py]}}"
    return f"eval.texts={{sequences: 16, of: {{verse: {{name: files, paths: [{verse}]}}, code: {files}}}}}"


def test_each_text_is_measured_in_training_by_its_name_and_whole(tiny, verse: Path, code: Path):
    config = tiny("name=run", OFF, asked(verse, code))
    train(config)
    last = next(line for line in reversed(metric_lines(config.run_folder)) if "text/verse/loss" in line)
    assert {name for name in last if name.startswith("text/")} == {
        f"text/{name}/{quantity}" for name in ("verse", "code") for quantity in ("loss", "bits_per_byte")
    }
    model = load(config.run_folder)
    tokenizer, start = model.tokenizer_and_start_id()
    ids = np.array([start, *tokenizer.encode(verse.read_text()).ids])  # all of it, in sequences of 32 spread over it
    places = np.arange(16) * ((len(ids) - 1) // 32) // 16 * 32
    rows = torch.tensor(np.stack([ids[place : place + 33] for place in places]))
    with torch.no_grad():
        logits = model.decoder.head(model.decoder(rows[:, :-1]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    assert last["text/verse/loss"] == pytest.approx(float(expected), abs=1e-5)


def test_documents_are_divided_into_those_that_select_and_report_where_there_are_enough(tiny, verse: Path, code: Path):
    config = tiny(OFF, asked(verse, code))
    texts = OtherTexts(config, store := prepare(config.data))
    assert len(set(texts.held_out[1].document_labels.tolist())) > 3
    assert set(texts.held_out[0].document_labels.tolist()) == {0}
    decoder = Decoder(config.model, store.vocab_size, config.data.seq_len)
    by_name = {
        curve.task: curve
        for curve in measure_curves(texts, decoder, Device(torch.device("cpu"), False))
        if curve.points
    }
    (code_units,), (verse_units,) = by_name["code"].points, by_name["verse"].points
    fingerprint = texts.stores["code"].fingerprint
    selects = model_selection_mask(fingerprint, code_units.groups.astype(int))
    assert ((code_units.rows["part"] == "selects") == selects).all()
    assert (verse_units.rows["part"] == "").all()  # all of one document reports


def test_documents_of_a_text_are_isolated_where_those_of_training_are(tiny, verse: Path, code: Path):
    losses = []
    for documents in ("pack", "isolate"):
        config = tiny(OFF, asked(verse, code).replace("sequences: 16", "sequences: 100"), f"data.documents={documents}")
        texts = OtherTexts(config, store := prepare(config.data))
        decoder = Decoder(config.model, store.vocab_size, config.data.seq_len, seed=1)
        measured = measure_curves(texts, decoder, Device(torch.device("cpu"), False))
        losses.append({curve.task: curve.points[0].values for curve in measured if curve.points})
    has_boundary = (texts.held_out[1].sequences[:, 1:-1] == store.end_of_text_id).any(1)
    assert ((losses[0]["code"] != losses[1]["code"]) == has_boundary).all()
    assert has_boundary.any()
    assert (losses[0]["verse"] == losses[1]["verse"]).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("{of: {x: {name: files, paths: [no-such-folder]}}}", DataError, r"eval\.texts\.of\.x: .*no-such-folder"),
        (
            "{of: {x: {name: files, paths: [SHORT]}}}",
            ConfigError,
            r"eval\.texts\.of\.x = .*has \d+ tokens, and a sequence needs 33",
        ),
        ("{of: {x: {name: nothing}}}", ConfigError, r"eval\.texts\.of\.x\.name = 'nothing': unknown name"),
        ("{of: {x: {name: files}}}", ConfigError, r"eval\.texts\.of\.x\.paths = \[\]: must be given"),
        (
            "{of: {a/b: {name: files, paths: [SHORT]}}}",
            ConfigError,
            r"eval\.texts\.of\.a/b = 'a/b': can't be the name of a text",
        ),
        ("{of: [SHORT]}", ConfigError, r"eval\.texts\.of = .*must be a map from names to blocks"),
    ],
)
def test_texts_that_can_not_be_measured_are_refused_before_the_run_is_made(
    tiny, tmp_path: Path, given: str, error: type, message: str
):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(error, match=message):
        train(tiny("name=run", OFF, f"eval.texts={given.replace('SHORT', str(tmp_path / 'short.txt'))}"))
    assert not (tmp_path / "runs" / "run").exists()


# ---------------------------------------------------------------- long sequences that fit the documents


def test_auto_leaves_out_lengths_that_one_document_alone_has(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(held_out, "long_window_starts", lambda *_: None)
    monkeypatch.setattr(HeldOutSequences, "from_store", lambda store, starts, length: length)
    store = SimpleNamespace(val=SimpleNamespace(longest=5_000, lengths=np.array([5_000, 200, 100])))
    assert long_sequences(store, tiny("eval.long_context.length_factor=auto")) == 4 * 32
    with pytest.raises(ConfigError, match="it needs a held-out document"):
        long_sequences(store, tiny("eval.long_context.length_factor=200"))
