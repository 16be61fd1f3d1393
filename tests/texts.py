"""Make small corpora, and read their token stores."""

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

from lm.config.data_config import DataConfig, FileSource, HubSource, PackageSource, Source, TrainedTokenizer
from lm.data.sources import source_reader
from lm.data.store import Split, Store
from lm.data.text_files import UnreadableError
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import END_OF_TEXT, train_tokenizer
from lm.errors import DataError

ODD_TEXTS = [
    "naïve café, Ωmega, 漢字かな交じり文, العربية, 🤷🏽\u200d♂️ e\u0301 \u00a0\u2028\ufffd\U0010ffff",
    "tabs\tand\r\nline ends\r and \x00 zeros \x7f",
    f"a {END_OF_TEXT} in the text {END_OF_TEXT}{END_OF_TEXT}",
    "   \n  leading and trailing   \n",
]
TEXTS = [*ODD_TEXTS, *(f"Document {n}. " + " ".join(f"word{(n * k) % 97}" for k in range(60)) for n in range(40))]


def write_texts(folder: Path, texts: list[str]) -> Path:
    """Write each text as a file of a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return folder


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    """Write columns as a Parquet file, and return its path."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def files_config(folder: Path, tmp_path: Path, **changes) -> DataConfig:
    """Return a data configuration of the files in a folder, with `changes` to it."""
    base = DataConfig(
        FileSource(paths=[str(folder)]), TrainedTokenizer(300), root=str(tmp_path / "stores"), val_fraction=0.2
    )
    return dataclasses.replace(base, **changes)


def split_tokens(split: Split) -> np.ndarray:
    """Return all tokens of a split."""
    return split.tokens_at(np.arange(split.n_tokens))


def stored_texts(store: Store) -> list[str]:
    """Return every document of a store as decoded text, training documents first."""
    tokenizer = store.tokenizer()
    texts = []
    for split in (store.train, store.val):
        tokens = split_tokens(split)
        for begin, end in zip(split.offsets[:-1], split.offsets[1:], strict=True):
            assert tokens[begin] == store.end_of_text_id
            texts.append(tokenizer.decode(tokens[begin + 1 : end].tolist(), skip_special_tokens=False))
    return texts


def occurrences(tokens: np.ndarray, piece: np.ndarray) -> int:
    """Return how often a piece stands in a sequence."""
    return int((np.lib.stride_tricks.sliding_window_view(tokens, len(piece)) == piece).all(1).sum())


def file_states(folder: Path) -> list[tuple[str, int, int]]:
    """Return path, inode and modification time of every file below a folder."""
    return sorted((str(path), path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def documents(source: Source, vocabulary: Vocabulary | None = None) -> Iterator[str | np.ndarray]:
    """Yield the documents of a source. Raises the first error of a document that can't be read."""
    for document, _ in source_reader(source).read_documents(source, vocabulary):
        if isinstance(document, UnreadableError):
            raise document
        yield document


def readable_documents(
    source: Source, vocabulary: Vocabulary | None = None
) -> tuple[list[str | np.ndarray], list[UnreadableError]]:
    """Return the documents of a source that can be read, and the errors of the others."""
    read: tuple[list, list] = [], []
    for document, _ in source_reader(source).read_documents(source, vocabulary):
        read[isinstance(document, UnreadableError)].append(document)
    return read


def one_line_error(source: FileSource | HubSource | PackageSource) -> str:
    """Return the message of the DataError that reading a source raises; it must be one line."""
    with pytest.raises(DataError) as error:
        list(documents(source))
    assert "\n" not in str(error.value)
    return str(error.value)


def start_script(script: str, source: Path | None, root: Path, **environment: str) -> subprocess.Popen:
    """Start a Python process that runs `script`, in which `data` is the configuration of the source."""
    header = (
        "import sys\nfrom lm.config.data_config import *\n"
        "from lm.data.prepare import prepare\n"
        "from lm.errors import DataError\ndata = DataConfig(FileSource([sys.argv[1]]), TrainedTokenizer(300), "
        "root=sys.argv[2])\n"
    )
    env = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", header + script, str(source), str(root)], stdout=-1, stderr=-1, text=True, env=env
    )


def write_tokenizer(path: Path, end_of_text: str = "</s>", **changes) -> Path:
    """Write a byte-level tokenizer.json whose end-of-text token is an ordinary added token in the middle of the ids.

    changes: fields of tokenizer.json. Returns the path.
    """
    tokenizer = train_tokenizer(iter(TEXTS), TrainedTokenizer(290))
    tokenizer.add_tokens([end_of_text, "Zwölf"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    return path
