"""Small corpora and what the tests of data do with them."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lm.config.data_config import DataConfig, Files, Hub, Package, Source, TrainedTokenizer
from lm.data.sources import reader
from lm.data.store import Split, Store
from lm.data.text_files import Unreadable
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import END_OF_TEXT, train_tokenizer
from lm.errors import DataError

ODD = [
    "naïve café, Ωmega, 漢字かな交じり文, العربية, 🤷🏽\u200d♂️ e\u0301 \u00a0\u2028\ufffd\U0010ffff",
    "tabs\tand\r\nline ends\r and \x00 zeros \x7f",
    f"a {END_OF_TEXT} in the text {END_OF_TEXT}{END_OF_TEXT}",
    "   \n  leading and trailing   \n",
]
TEXTS = [*ODD, *(f"Document {n}. " + " ".join(f"word{(n * k) % 97}" for k in range(60)) for n in range(40))]


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return folder


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def files_config(folder: Path, tmp_path: Path, **changes) -> DataConfig:
    base = DataConfig(
        Files(paths=[str(folder)]), TrainedTokenizer(300), root=str(tmp_path / "stores"), val_fraction=0.2
    )
    return dataclasses.replace(base, **changes)


def tokens_of(split: Split) -> np.ndarray:
    return split.tokens_at(np.arange(split.n_tokens))


def stored_texts(store: Store) -> list[str]:
    """Every document of the store, decoded, training ones first."""
    tokenizer = store.tokenizer()
    texts = []
    for split in (store.train, store.val):
        tokens = tokens_of(split)
        for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            assert tokens[begin] == store.end_of_text
            texts.append(tokenizer.decode(tokens[begin + 1 : end].tolist(), skip_special_tokens=False))
    return texts


def occurrences(tokens: np.ndarray, piece: np.ndarray) -> int:
    """How often a piece stands in a sequence."""
    return int((np.lib.stride_tricks.sliding_window_view(tokens, len(piece)) == piece).all(1).sum())


def state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def documents(source: Source, vocabulary: Vocabulary | None = None) -> Iterator[str | np.ndarray]:
    """The documents of a source. Raises the first error."""
    for document, _ in reader(source).documents(source, vocabulary):
        if isinstance(document, Unreadable):
            raise document
        yield document


def skipping(source: Source, vocabulary: Vocabulary | None = None) -> tuple[list[str | np.ndarray], list[Unreadable]]:
    """The documents that can be read, and the errors of the others."""
    read: tuple[list, list] = [], []
    for document, _ in reader(source).documents(source, vocabulary):
        read[isinstance(document, Unreadable)].append(document)
    return read


def one_line_error(source: Files | Hub | Package) -> str:
    with pytest.raises(DataError) as error:
        list(documents(source))
    assert "\n" not in str(error.value)
    return str(error.value)


def start(script: str, source: Path | None, root: Path, **environment: str) -> subprocess.Popen:
    """A Python process that runs `script`, which finds the configuration in `data`."""
    header = (
        "import sys\nfrom lm.config.data_config import DataConfig, Files, Hub, Package, TrainedTokenizer\n"
        "from lm.data.prepare import prepare\n"
        "from lm.errors import DataError\ndata = DataConfig(Files([sys.argv[1]]), TrainedTokenizer(300), "
        "root=sys.argv[2])\n"
    )
    env = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", header + script, str(source), str(root)], stdout=-1, stderr=-1, text=True, env=env
    )


def write_tokenizer(path: Path, end_of_text: str = "</s>", **changes) -> Path:
    """A byte-level tokenizer.json whose end-of-text token is an ordinary added token in the middle of the ids."""
    tokenizer = train_tokenizer(iter(TEXTS), TrainedTokenizer(290))
    tokenizer.add_tokens([end_of_text, "Zwölf"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return path
