"""Opening a token store: damage, shards, size."""

import dataclasses
import hashlib
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from texts import split_tokens

from lm.config.data_config import DataConfig
from lm.data.prepare import find_store, prepare
from lm.data.store import MANIFEST_FILE, Store, data_fingerprint
from lm.errors import DataError
from lm.files import json_sha256, write_json


@pytest.mark.parametrize("size", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize(
    "name",
    [
        "train-00000.bin",
        "val-00000.bin",
        "train.offsets.npy",
        "val.offsets.npy",
        "tokenizer.json",
        "token_bytes.npy",
        "manifest.json",
    ],
)
def test_a_damaged_store_does_not_open(text_data: DataConfig, name: str, size: str):
    path = prepare(text_data).path / name
    content = bytearray(path.read_bytes())
    if size == "missing":
        path.unlink()
    elif size == "truncated":
        path.write_bytes(content[:-1] if name != "manifest.json" else content[:-3])
    else:
        digits = (
            [index for index, byte in enumerate(content) if chr(byte).isdigit()]
            if name == "manifest.json"
            else [len(content) // 2]
        )
        content[digits[len(digits) // 2]] ^= 1
        path.write_bytes(content)
    with pytest.raises(DataError) as error:
        prepare(text_data)
    assert str(path) in str(error.value)
    assert f"delete the folder {path.parent}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_store_of_another_format_does_not_open(text_data: DataConfig):
    path = prepare(text_data).path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(DataError, match="format 5"):
        Store.open(path)


def test_a_store_is_found_by_its_fingerprint_among_those_of_other_formats(text_data: DataConfig):
    store = prepare(text_data)
    old = shutil.copytree(store.path, store.path.with_name("a-store-of-before"))
    manifest = {**store.manifest, "format": 4}
    write_json(old / MANIFEST_FILE, {**manifest, "sha256": json_sha256(manifest)})
    assert find_store(text_data, store.fingerprint).path == store.path


@pytest.fixture
def unchecked(text_data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose hashes are not cached yet, and are soon."""
    store = prepare(text_data)
    monkeypatch.setattr("lm.files._RECENT_CHANGE_NS", -1)
    return store


def test_a_store_is_read_once_until_a_file_changes(unchecked: Store, monkeypatch: pytest.MonkeyPatch):
    import lm.files as module

    names, digest = [], module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda path: (names.append(path.name), digest(path))[1])
    Store.open(unchecked.path)
    assert sorted(names) == sorted(unchecked.manifest["files"])
    Store.open(unchecked.path)
    assert len(names) == len(unchecked.manifest["files"])
    path = unchecked.path / "train-00000.bin"
    path.write_bytes(path.read_bytes())
    Store.open(unchecked.path)
    assert names[len(unchecked.manifest["files"]) :] == [path.name]


# ---------------------------------------------------------------- shards


@pytest.fixture
def sharded(text_data: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Store, Store]:
    """The same text in shards of a few documents each, and whole."""
    single_file = prepare(text_data)
    monkeypatch.setattr("lm.data.build.SHARD_BYTES", 800)
    return prepare(dataclasses.replace(text_data, root=str(tmp_path / "sharded"))), single_file


def test_shards_hold_the_tokens_of_one_file(sharded: tuple[Store, Store]):
    store, single_file = sharded
    for split, other_split in ((store.train, single_file.train), (store.val, single_file.val)):
        assert len(split.shard_starts) > 3
        np.testing.assert_array_equal(split_tokens(split), split_tokens(other_split))
        np.testing.assert_array_equal(split.offsets, other_split.offsets)
        assert split.unigram_cross_entropy == other_split.unigram_cross_entropy


def test_take_gives_windows_across_the_borders_of_shards(sharded: tuple[Store, Store]):
    split = sharded[0].train
    for length in (1, 250):
        starts = np.arange(0, split.n_tokens - length + 1, 13)[::-1]
        expected = np.stack([split_tokens(split)[start : start + length] for start in starts])
        np.testing.assert_array_equal(split.take_windows(starts, length), expected)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(split)).take_windows(starts, length), expected)


def test_the_fingerprint_is_that_of_stores_from_before_shards():
    digest = {"bytes": 1, "sha256": "a"}
    names = (
        "train-00000.bin",
        "train.offsets.npy",
        "val-00000.bin",
        "val.offsets.npy",
        "tokenizer.json",
        "token_bytes.npy",
    )
    before = "".join(
        f"{name} a\n" for name in ("train.bin", "train.offsets.npy", "val.bin", "val.offsets.npy", "tokenizer.json")
    )
    assert data_fingerprint(dict.fromkeys(names, digest)) == hashlib.sha256(before.encode()).hexdigest()
