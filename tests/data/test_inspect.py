"""`lm data inspect`: what it says is what is in the store."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import lm
from texts import TEXTS, files_config, write_texts

from lm.config.data_config import DataConfig, TokenizerFile
from lm.data.inspect import N_GRAM, overlap, sample_documents, store_description
from lm.data.prepare import prepare
from lm.data.store import Split, Store
from lm.errors import DataError


def test_a_store_is_checked_and_described(data: DataConfig):
    store = prepare(data)
    result = lm("data", "inspect", str(store.path), "--samples", "3")
    assert result.returncode == 0, result.stderr
    for figure in (
        store.fingerprint,
        f"{store.train.n_tokens:,}",
        f"{store.val.n_documents:,}",
        "not stated",
    ):
        assert figure in result.stdout
    assert result.stdout.count("training document") == 3


def test_a_store_of_held_out_text_alone_is_described(data: DataConfig):
    """As `eval.texts` makes it."""
    tokenizer = TokenizerFile(path=str(prepare(data).path / "tokenizer.json"))
    store = prepare(dataclasses.replace(data, tokenizer=tokenizer, val_fraction=1.0, deduplicate=False))
    lines = list(store_description(store, 2))
    assert f" of a vocabulary of {store.vocab_size:,}, " in lines[0]
    assert not any(line.startswith("train: ") for line in lines)


def test_a_configuration_stands_for_its_store(arguments: list[str], tmp_path: Path):
    result = lm("data", "inspect", *arguments, f"data.root={tmp_path}")
    assert result.returncode == 1
    assert "there is no token store of this configuration yet" in result.stderr
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert lm("prepare", *arguments).returncode == 0
    result = lm("data", "inspect", *arguments)
    assert result.returncode == 0, result.stderr


def test_an_altered_byte_is_found(data: DataConfig):
    from lm.data.inspect import inspect

    path = prepare(data).path
    content = bytearray((path / "train-00000.bin").read_bytes())
    content[-1] ^= 1
    (path / "train-00000.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.bin: was altered"):
        inspect([str(path)], 1)


def n_grams(store: Store, split: Split) -> list[tuple[int, ...]]:
    documents = [split.document(index)[1:].tolist() for index in range(split.n_documents)]
    return [tuple(tokens[n : n + N_GRAM]) for tokens in documents for n in range(len(tokens) - N_GRAM + 1)]


@pytest.mark.parametrize("shard_bytes", [2**28, 1000])
def test_the_overlap_is_the_fraction_of_held_out_n_grams_that_training_text_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
):
    monkeypatch.setattr("lm.data.build.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("lm.data.inspect._BLOCK_TOKENS", 300)
    quoted = "a sentence that every second document quotes, word by word and to its very end"
    texts = [f"{text} {quoted if n % 2 else ''} {n}" for n, text in enumerate(TEXTS)] + ["short", "also"]
    store = prepare(files_config(write_texts(tmp_path / "texts", texts), tmp_path))
    ((label, count, fraction),) = overlap(store)
    held_out, training = n_grams(store, store.val), set(n_grams(store, store.train))
    assert (label, count) == ("texts", len(held_out))
    assert fraction == pytest.approx(np.mean([n_gram in training for n_gram in held_out]))
    assert 0 < fraction < 1
    assert f"{fraction:.1%} of {count:,} looked up" in "\n".join(store_description(store, 0))


def test_samples_are_spread_over_each_part(data: DataConfig):
    split = prepare(data).train
    indices = [index for _, index in sample_documents(split, 4)]
    assert indices[0] == 0
    assert len(set(indices)) == 4
    assert max(indices) >= split.n_documents // 2
    assert not any("training document" in line for line in store_description(prepare(data), 0))
