"""Writing a token store: shards, offsets and manifest, each synchronised to disk."""

import hashlib
import io
import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lm.data.store import MANIFEST, SourceCounts, content_sha256, shard_path, token_dtype
from lm.schema import Plain

SHARD_TOKENS = 2**28  # 512 MiB of uint16
_BLOCK = 2**20  # tokens of an existing shard read at a time


class SplitWriter:
    """Writes one split, document by document, and counts its tokens; memory holds 8 bytes per document.

    With `resume_at`, that many tokens of the existing files are kept: they are read again for their counts and hashes, and the files
    are truncated after them, so that the result is the same as without interruption.

    Raises:
        EOFError: the files hold fewer than `resume_at` tokens.
        ValueError: they hold ids beyond the vocabulary.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int, end_of_text: int, resume_at: int = 0):
        self.path, self.end_of_text = folder / name, end_of_text
        self.dtype, self.shard_tokens = np.dtype(token_dtype(vocab_size)), SHARD_TOKENS
        self.counts = np.zeros(vocab_size, np.int64)
        self.starts = array("q")  # where each document begins
        self.n_tokens = 0
        self.files: dict[str, Plain] = {}  # manifest entries of finished shards
        self.file: BinaryIO | None = None
        try:
            while self.n_tokens < resume_at:
                self._read_again(resume_at)
            for path in folder.glob(f"{name}-*.bin"):
                if path.name not in self.files and (self.file is None or path != self._shard()):
                    path.unlink()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, finished or not."""
        if self.file:
            self.file.close()

    def add(self, tokens: np.ndarray) -> None:
        """Append documents, each of which begins with the end-of-text token, or the next tokens of the last one."""
        while len(tokens):
            piece, tokens = np.split(tokens, [self.shard_tokens - self.n_tokens % self.shard_tokens])
            if self.file is None:
                self._open("wb")
            self.file.write(piece)
            self._count(piece)

    def sync(self) -> None:
        """Synchronise what was added to disk."""
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def progress(self) -> dict[str, Plain]:
        """What is written so far: tokens, tokens of a full shard, and the sha256 of each shard."""
        hashes = [file["sha256"] for file in self.files.values()] + ([self.sha256.hexdigest()] if self.file else [])
        return {"n_tokens": self.n_tokens, "shard_tokens": self.shard_tokens, "sha256": hashes}

    def finish(self, n_bytes: int, sources: list[SourceCounts]) -> tuple[dict[str, Plain], dict[str, Plain]]:
        """Finish the split on disk; its manifest entry, and those of its files. Adds the numbers of tokens to `sources`."""
        if self.file:
            self._finish_shard()
        offsets = np.append(np.array(self.starts, "<i8"), self.n_tokens)
        ends = offsets[np.cumsum([0, *(one.n_documents for one in sources)])]
        facts = {
            "n_tokens": self.n_tokens,
            "n_documents": len(self.starts),
            "n_bytes": n_bytes,
            "longest": int(np.diff(offsets).max()),
            "sources": [vars(one) | {"n_tokens": int(n_tokens)} for one, n_tokens in zip(sources, np.diff(ends), strict=True)],
        }
        return facts, self.files | write_file(self.path.with_name(f"{self.path.name}.offsets.npy"), npy(offsets))

    def _shard(self) -> Path:
        return shard_path(self.path, len(self.files))

    def _open(self, mode: str) -> None:
        self.file = open(self._shard(), mode, 1 << 20)  # noqa: SIM115 (`close` closes it)
        self.sha256 = hashlib.sha256()

    def _read_again(self, resume_at: int) -> None:
        """Count a block of an existing shard; truncate the shard after the last block."""
        if self.file is None:
            self._open("r+b")
        room = self.shard_tokens - self.n_tokens % self.shard_tokens
        end = min(room, resume_at - self.n_tokens)
        wanted = min(_BLOCK, end)
        piece = np.frombuffer(self.file.read(wanted * self.dtype.itemsize), self.dtype)
        if len(piece) < wanted:
            raise EOFError(f"{self._shard()}: ends early")
        if wanted == end:
            self.file.seek(self.file.tell())  # from reading to writing
            self.file.truncate()
        self._count(piece)

    def _count(self, piece: np.ndarray) -> None:
        """Count tokens that the file now holds, and finish the shard if it is full."""
        self.counts += np.bincount(piece, minlength=len(self.counts))
        self.sha256.update(piece)
        self.starts.extend((np.flatnonzero(piece == self.end_of_text) + self.n_tokens).tolist())
        self.n_tokens += len(piece)
        if self.n_tokens % self.shard_tokens == 0:
            self._finish_shard()

    def _finish_shard(self) -> None:
        self.sync()
        self.files[self._shard().name] = {"bytes": self.file.tell(), "sha256": self.sha256.hexdigest()}
        self.file.close()
        self.file = None


def write_file(path: Path, content: bytes) -> dict[str, Plain]:
    """Write `content` and synchronise it to disk; returns the file's manifest entry."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically: a process that dies leaves the old content or the new."""
    temporary = path.with_name(f"{path.name}.new")
    write_file(temporary, content)
    os.replace(temporary, path)


def npy(values: np.ndarray) -> bytes:
    """`values` in NumPy's file format (`np.save` hides the error of a full disk)."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def write_manifest(folder: Path, manifest: Mapping[str, Plain]) -> None:
    """Write manifest.json, to which the sha256 of its own content is added."""
    content = {**manifest, "sha256": content_sha256(manifest)}
    write_file(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())
