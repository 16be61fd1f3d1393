"""The token store: a folder with two splits of tokens, their documents' offsets, the tokenizer and a manifest.

    train.bin, val.bin                   token ids, little-endian uint16 (uint32 beyond 65,536 entries)
    train.offsets.npy, val.offsets.npy   int64 (documents + 1,): where each document begins, in tokens
    tokenizer.json, token_bytes.npy      the vocabulary, and the UTF-8 bytes each token stands for, fp32 (V,)
    manifest.json                        origin, sizes and sha256 of all of it; written last

Each document is the end-of-text token followed by its own tokens.
"""

import hashlib
import io
import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.data.tokenizer import load_tokenizer
from lm.errors import DataError
from lm.schema import Plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
MANIFEST, TOKENIZER, TOKEN_BYTES = "manifest.json", "tokenizer.json", "token_bytes.npy"
SPLITS = ("train", "val")
TOKEN_FILES = ("train.bin", "train.offsets.npy", "val.bin", "val.offsets.npy", TOKENIZER)
FULL_CHECK_BYTES = 2**30


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a store. `tokens` and `offsets` are mapped from disk at first use, and again after unpickling."""

    path: Path  # absolute, without suffix
    dtype: str
    n_tokens: int
    n_documents: int
    n_bytes: int  # UTF-8 bytes of the documents
    unigram_entropy: float  # of the split's own token counts, nats per token
    longest: int  # tokens of the longest document, its end-of-text token included

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, (n_tokens,), read-only."""
        return np.memmap(self.path.with_suffix(".bin"), self.dtype, "r", shape=(self.n_tokens,))

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each document begins, and the end: int64 (n_documents + 1,), read-only."""
        return np.load(self.path.with_suffix(".offsets.npy"), mmap_mode="r")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("tokens", "offsets")}


@dataclass(frozen=True, eq=False)
class Store:
    """An opened token store."""

    path: Path
    fingerprint: str  # sha256 of tokens, offsets and tokenizer; 16 hex digits of it are enough to show
    vocab_size: int
    end_of_text: int  # its id
    token_bytes: np.ndarray  # (V,) fp32; special tokens 0
    manifest: Mapping[str, Plain]
    train: Split
    val: Split

    @classmethod
    def open(cls, path: Path) -> "Store":
        """The store at `path`, checked: format, sizes, and sha256 of every file.

        A store of more than 1 GiB is checked by its sizes only, and its tokens are not read.

        Raises:
            DataError: a file is missing, truncated or altered.
        """
        manifest = _read_manifest(path)
        full = sum(file["bytes"] for file in manifest["files"].values()) <= FULL_CHECK_BYTES
        for name, expected in manifest["files"].items():
            _check_file(path / name, expected, full)
        splits = {name: Split(path.absolute() / name, manifest["dtype"], **manifest["splits"][name]) for name in SPLITS}
        return cls(
            path,
            fingerprint(manifest["files"]),
            manifest["vocab_size"],
            manifest["end_of_text"]["id"],
            np.load(path / TOKEN_BYTES),
            manifest,
            **splits,
        )

    def tokenizer(self) -> "Tokenizer":
        """The store's tokenizer."""
        return load_tokenizer(self.path / TOKENIZER, self.manifest["end_of_text"]["token"])


def fingerprint(files: Mapping[str, Mapping[str, Plain]]) -> str:
    """sha256 over the hashes of the files that decide what a model sees."""
    return hashlib.sha256("".join(f"{name} {files[name]['sha256']}\n" for name in TOKEN_FILES).encode()).hexdigest()


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 (little-endian) that holds every id."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


# ---------------------------------------------------------------- writing


class SplitWriter:
    """Writes one split, document by document, and counts as it goes; memory holds 8 bytes a document."""

    def __init__(self, folder: Path, name: str, vocab_size: int, end_of_text: int):
        self.folder, self.name, self.end_of_text = folder, name, end_of_text
        self.dtype = token_dtype(vocab_size)
        self.file = open(folder / f"{name}.bin", "wb", 1 << 20)  # noqa: SIM115 (`close` closes it)
        self.sha256 = hashlib.sha256()
        self.counts = np.zeros(vocab_size, np.int64)
        self.offsets = array("q", [0])
        self.n_bytes = 0

    def close(self) -> None:
        """Close the file, finished or not."""
        self.file.close()

    def add(self, ids: list[int], n_bytes: int) -> None:
        """Append a document of `n_bytes` UTF-8 bytes."""
        tokens = np.array([self.end_of_text, *ids], self.dtype)
        self.file.write(tokens)
        self.sha256.update(tokens)
        np.add.at(self.counts, tokens, 1)
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.n_bytes += n_bytes

    def finish(self) -> tuple[dict[str, Plain], dict[str, Plain]]:
        """Make the split last on disk; its manifest entry, and those of its two files."""
        self.file.flush()
        os.fsync(self.file.fileno())
        size = self.file.tell()
        offsets = np.array(self.offsets, "<i8")
        share = self.counts[self.counts > 0] / offsets[-1]
        facts = {
            "n_tokens": int(offsets[-1]),
            "n_documents": len(offsets) - 1,
            "n_bytes": self.n_bytes,
            "unigram_entropy": float(-(share * np.log(share)).sum()),
            "longest": int(np.diff(offsets).max()),
        }
        files = {f"{self.name}.bin": {"bytes": size, "sha256": self.sha256.hexdigest()}}
        return facts, files | write_file(self.folder / f"{self.name}.offsets.npy", npy(offsets))


def write_file(path: Path, content: bytes) -> dict[str, Plain]:
    """Write `content` and make it last on disk; the file's manifest entry."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def npy(values: np.ndarray) -> bytes:
    """`values` in NumPy's file format (`np.save` to a full disk would lose the reason)."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def write_manifest(folder: Path, manifest: Mapping[str, Plain]) -> None:
    """Write manifest.json, which also holds the sha256 of the rest of itself."""
    content = {**manifest, "sha256": _content_sha256(manifest)}
    write_file(folder / MANIFEST, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _content_sha256(manifest: Mapping[str, Plain]) -> str:
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- checking


def _read_manifest(folder: Path) -> dict[str, Plain]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, f"can't be read: {error.strerror}") from None
    except ValueError:
        raise _damaged(path, "is not valid JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _damaged(path, f"is not a token store of format {FORMAT}")
    if manifest.get("sha256") != _content_sha256(manifest):
        raise _damaged(path, "was altered (its sha256 differs)")
    return manifest


def _check_file(path: Path, expected: Mapping[str, Plain], full: bool) -> None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(path, f"has {size:,} bytes, not {expected['bytes']:,}")
        if full:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                raise _damaged(path, "was altered (its sha256 differs)")
    except OSError as error:
        raise _damaged(path, f"can't be read: {error.strerror}") from None


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: {reason}; delete the folder {path.parent}: it is prepared again")
