"""Where the text comes from: a package, local files, a dataset of the Hugging Face hub, or token ids. Each kind has an entry in
`SOURCE_READERS`.

`documents` reads a source's documents one at a time, again at every call; `identity` is plain data that changes exactly when the
documents do. Memory is bounded by the longest document (for parquet and the hub: by `reading.ROWS` documents).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from lm.config.data_config import Files, Hub, Package, Source, Tokens
from lm.data import hub, text_files, token_files
from lm.data.packages import PACKAGES, package_texts
from lm.data.text_files import OnError, Unreadable
from lm.data.token_files import Vocabulary
from lm.files import FileHashes, plain_sha256
from lm.schema import Plain

ROOT = Path("data")


def fail(error: Unreadable) -> NoReturn:
    """`data.on_error: fail`."""
    raise error


@dataclass(frozen=True)
class SourceReader:
    """How sources of one kind are read; each function takes the source's options first."""

    # Arguments after the source: data.root; what to do with what can't be read; the ids that the tokenizer knows, for sources of ids.
    documents: Callable[[Source, Path, OnError, Vocabulary | None], Iterator[str | np.ndarray]]
    identity: Callable[[Source, Path, FileHashes], dict[str, Plain]]
    licence: Callable[[Source], str]
    description: Callable[[Source], str] = lambda source: ""
    held_out: Callable[[Source], Source | None] = lambda source: None
    streamed: Callable[[Source], bool] = lambda source: False


def _package_documents(source: Package, root: Path, on_error: OnError, vocabulary: Vocabulary | None) -> Iterator[str]:
    return text_files.read_files(package_texts(source.package, root), Files(), on_error)


def _package_identity(source: Package, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    paths = package_texts(source.package, root)
    digest = plain_sha256([[path.name, hashes.sha256(path)] for path in paths])
    return {"package": source.package, "version": PACKAGES[source.package].found_version(), "sha256": digest}


SOURCE_READERS: dict[type, SourceReader] = {
    Package: SourceReader(_package_documents, _package_identity, lambda source: PACKAGES[source.package].licence),
    Files: SourceReader(text_files.documents, text_files.identity, text_files.licence, text_files.description),
    Hub: SourceReader(hub.documents, hub.identity, hub.licence, held_out=hub.held_out, streamed=lambda source: source.streaming),
    Tokens: SourceReader(token_files.documents, token_files.identity, text_files.licence, held_out=token_files.held_out),
}


def documents(
    source: Source, root: Path = ROOT, on_error: OnError = fail, vocabulary: Vocabulary | None = None
) -> Iterator[str | np.ndarray]:
    """The source's documents in a fixed order, blank ones included: texts, or of `Tokens` their ids, (tokens,) uint32.

    `root`: `data.root`, where fetched packages are. `on_error` is called with each file, document or row that can't be read, which
    is left out if the call returns; a file that is damaged part-way gives the documents before the damage. `vocabulary`: for `Tokens`.

    Raises:
        DataError: naming the file, dataset or row that can't be read, and why.
    """
    return SOURCE_READERS[type(source)].documents(source, root, on_error, vocabulary)


def identity(source: Source, root: Path = ROOT) -> dict[str, Plain]:
    """Plain data that changes exactly when the documents may: versions, settings and sha256 of the content.

    Files are hashed whole, once (`FileHashes`). A dataset of the hub is known by its pinned commit, else by the hash that
    the `datasets` library gives it (which asks the hub).

    Raises:
        DataError: the source is missing or unreadable.
    """
    hashes = FileHashes(root)
    try:
        return SOURCE_READERS[type(source)].identity(source, root, hashes)
    finally:
        hashes.save()


def licence(source: Source) -> str:
    """The licence of the text, as far as the source states one."""
    return SOURCE_READERS[type(source)].licence(source)


def description(source: Source) -> str:
    """Notes on what is read and ignored, where that is not plain from the options; else empty."""
    return SOURCE_READERS[type(source)].description(source)


def held_out(source: Source) -> Source | None:
    """The source's own held-out documents, if the configuration names any."""
    return SOURCE_READERS[type(source)].held_out(source)


def streamed(source: Source) -> bool:
    """True if every pass over the documents downloads them again."""
    return SOURCE_READERS[type(source)].streamed(source)


def label(source: Source) -> str:
    """A short name for folders: letters, digits, `-` and `_`."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", Path(source.label).name.split(".")[0]).strip("-")[:40] or "text"
