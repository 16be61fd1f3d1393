"""Stores damaged in any way: an error of one line, or the identical tokens."""

import dataclasses
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from texts import files_config, tokens_of, write_texts

from lm.config.data_config import DataConfig, TrainedTokenizer
from lm.data.prepare import prepare
from lm.data.store import Store
from lm.errors import DataError

KINDS = ("flip", "truncate", "extend", "delete", "empty", "swap", "extra", "garbage")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Store]:
    """A store of a few shards."""
    folder, rng = tmp_path_factory.mktemp("fuzz"), random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(60)]
    texts = [" ".join(rng.choices(words, k=40)) for _ in range(40)]
    data = files_config(write_texts(folder / "texts", texts), folder, tokenizer=TrainedTokenizer(270))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.data.store.SHARD_TOKENS", 2000)
        return data, prepare(data)


def damage(folder: Path, kind: str, rng: random.Random) -> None:
    """Change one file of `folder`, or two."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    path, other = rng.choice(paths), rng.choice(paths)
    content = bytearray(path.read_bytes())
    if kind == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif kind == "truncate":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind == "extend":
        path.write_bytes(content + rng.randbytes(rng.randint(1, 9)))
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "swap":
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
    elif kind == "extra":
        (folder / rng.choice(["train-00009.bin", "val-00001.bin", "notes.txt", "x.npy"])).write_bytes(rng.randbytes(50))
    else:
        path.write_bytes(rng.choice([b"{", b"[]", b"null", b"\xff\xfe", rng.randbytes(100)]))


def same_tokens(store: Store, other_store: Store) -> bool:
    return all(
        tokens_of(split).tolist() == tokens_of(true).tolist() and split.offsets.tolist() == true.offsets.tolist()
        for split, true in ((store.train, other_store.train), (store.val, other_store.val))
    )


def outcome_is_an_error_or_the_same(open_store, true: Store) -> None:
    try:
        store, message = open_store(), ""
    except DataError as error:
        store, message = None, str(error)
    assert "\n" not in message
    assert len(message) < 2000
    if store:
        assert same_tokens(store, true)
        assert store.token_bytes.tolist() == true.token_bytes.tolist()


def fuzz(examples: int):
    chosen_settings = settings(
        max_examples=examples, deadline=5000, derandomize=True, suppress_health_check=list(HealthCheck), database=None
    )
    return lambda test: chosen_settings(given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32))(test))


def prepared_stores(whole: tuple[DataConfig, Store], kind: str, seed: int) -> None:
    data, true = whole
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(true.path, Path(folder, true.path.name)))
        damage(copy, kind, random.Random(seed))
        outcome_is_an_error_or_the_same(lambda: prepare(dataclasses.replace(data, root=folder)), true)


@fuzz(40)
def test_a_damaged_store_is_an_error_or_the_same(whole, kind: str, seed: int):
    prepared_stores(whole, kind, seed)


@pytest.mark.slow
@fuzz(2000)
def test_stores_damaged_in_many_ways(whole, kind: str, seed: int):
    prepared_stores(whole, kind, seed)
