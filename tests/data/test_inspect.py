"""`lm data inspect`: what it says is what is in the store."""

import dataclasses
import re
from pathlib import Path

import pytest
from conftest import lm

from lm.config.data_config import DataConfig, TokenizerFile
from lm.data.inspect import store_description
from lm.data.prepare import prepare
from lm.errors import DataError


def test_a_store_is_checked_and_described(data: DataConfig):
    store = prepare(data)
    result = lm("data", "inspect", str(store.path), "--samples", "3")
    assert result.returncode == 0, result.stderr
    for figure in (
        store.fingerprint,
        f"{store.train.n_tokens:,}",
        f"{store.val.n_documents:,}",
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


def test_samples_are_spread_over_each_source(data: DataConfig):
    store = prepare(data)
    text = "\n".join(store_description(store, 4))
    indices = [int(index) for index in re.findall(r"training document ([0-9]+) of", text)]
    assert indices == [n * store.train.n_documents // 4 for n in range(4)]
    assert not any("training document" in line for line in store_description(store, 0))
