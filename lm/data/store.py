"""Reads and writes token stores. A store is a folder with two splits of tokens, their documents' offsets, the tokenizer
and a manifest.

    train-00000.bin ..., val-00000.bin ...   token ids, little-endian uint16 (uint32 if the vocabulary has more than
                                             65,536 entries)
    train.offsets.npy, val.offsets.npy       int64 (documents + 1,): the index of each document's first token
    tokenizer.json, token_bytes.npy          the vocabulary; the number of UTF-8 bytes of each of its V tokens, fp32
                                             (V,)
    manifest.json                            origin, sizes, and sha256 of every file; written last

Each document is the end-of-text token followed by the tokens of its text. A split is cut into shards of `shard_tokens`
tokens: a document may begin in one shard and end in the next. The documents of each source are contiguous, in the order
of the sources (`Split.sources`).
"""

import hashlib
import io
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from lm.data.tokenizer import load_tokenizer
from lm.errors import DataError, RunError, one_line
from lm.files import FileHashes, file_sha256, read_json, unsealed
from lm.progress import Progress
from lm.schema import Plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STORE_FORMAT = 5
MANIFEST, TOKENIZER, TOKEN_BYTES = "manifest.json", "tokenizer.json", "token_bytes.npy"
SPLITS = ("train", "val")
LONG_CHECK_BYTES = 2**30  # files whose hashes take seconds, which is said


@dataclass(frozen=True)
class SourceCounts:
    """The numbers of tokens, documents and bytes that one source has in a split; sources' documents follow one another
    in order.
    """

    label: str
    licence: str
    n_tokens: int
    n_documents: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Split:
    """The training or held-out tokens of a store. Files are mapped from disk at first use, and again after
    unpickling.
    """

    path: Path  # absolute, without suffix
    dtype: str
    n_tokens: int
    n_documents: int
    n_bytes: int  # UTF-8 bytes of the documents
    unigram_cross_entropy: float  # loss by token frequencies of the training split (see the function), nats per token
    longest: int  # tokens of the longest document, its end-of-text token included
    sources: tuple[SourceCounts, ...]  # the counts of each source, in order
    shard_tokens: int  # tokens in each shard but the last

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """The token ids of each shard file: read-only arrays (tokens,) mapped from disk."""
        sizes = [min(self.shard_tokens, self.n_tokens - begin) for begin in range(0, self.n_tokens, self.shard_tokens)]
        return [np.memmap(shard_path(self.path, n), self.dtype, "r", shape=(size,)) for n, size in enumerate(sizes)]

    @cached_property
    def offsets(self) -> np.ndarray:
        """The index of each document's first token, followed by the split's number of tokens: int64 (n_documents + 1,),
        read-only.
        """
        return np.load(self.path.with_suffix(".offsets.npy"), mmap_mode="r")

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, its end-of-text token included: int64 (n_documents,)."""
        return np.diff(np.asarray(self.offsets))

    def take(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the `length` consecutive tokens from each index in `starts` (k,) on, also across shards: int64 (k,
        length).
        """
        return self.tokens_at(np.asarray(starts)[:, None] + np.arange(length)).astype(np.int64)

    def tokens_at(self, index: np.ndarray) -> np.ndarray:
        """Return the tokens at the indices `index`, in the shape of `index` and the store's dtype."""
        if len(self.shards) == 1:
            return np.asarray(self.shards[0])[index]
        shard, position = np.divmod(index, self.shard_tokens)
        tokens = np.empty(index.shape, self.dtype)
        for number in np.unique(shard):
            in_shard = shard == number
            tokens[in_shard] = np.asarray(self.shards[number])[position[in_shard]]
        return tokens

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of document `index`, the end-of-text token first: int64 (tokens,)."""
        return self.tokens_at(np.arange(*self.offsets[index : index + 2])).astype(np.int64)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("shards", "offsets")}


def shard_path(split: Path, number: int) -> Path:
    return split.with_name(f"{split.name}-{number:05d}.bin")


def manifests(root: Path, folders: str = "*") -> Iterator[tuple[Path, dict[str, Plain]]]:
    """Yield (path, content) of the manifest of each store in `root` whose folder's name matches the glob `folders`;
    skip damaged ones.
    """
    for path in sorted(root.glob(f"{folders}/{MANIFEST}")):
        with suppress(RunError):
            yield path, read_json(path)


@dataclass(frozen=True, eq=False)
class Store:
    """A token store on disk, opened for reading: its splits, tokenizer facts and manifest."""

    path: Path
    fingerprint: str  # sha256 of tokens, offsets and tokenizer; messages show 16 hex digits of it
    vocab_size: int
    end_of_text: int  # id of the end-of-text token
    token_bytes: np.ndarray  # (V,) fp32, number of UTF-8 bytes of each token; 0 for special tokens
    manifest: Mapping[str, Plain]
    train: Split
    val: Split

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open the store in the folder `path` and check its format, and the size and sha256 of every file.

        Hashes are cached in the parent folder (`FileHashes`), and computed again if a file's size, times or inode
        change. `verify` always reads the files.

        Raises DataError: a file is missing, truncated or altered, or the manifest does not describe it.
        """
        manifest, hashes = _read_manifest(path), FileHashes(path.parent)
        try:
            files = manifest["files"]
            unchecked = [name for name in files if hashes.cached(path / name) != files[name]["sha256"]]
            if (n_bytes := sum(files[name]["bytes"] for name in unchecked)) > LONG_CHECK_BYTES:
                Progress().say(f"{path}: checking the sha256 of {n_bytes / 1e9:,.1f} GB, once")
            _check_files(path, files, hashes.sha256)
            token_bytes = np.load(path / TOKEN_BYTES)
            splits = [_open_split(path, name, manifest) for name in SPLITS]
            end_of_text = manifest["end_of_text"]["id"]
            return cls(path, fingerprint(files), manifest["vocab_size"], end_of_text, token_bytes, manifest, *splits)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged_error(path, f"{path / MANIFEST}: does not describe the store ({one_line(error)})") from None
        finally:
            hashes.save()

    def verify(self) -> None:
        """Read every file and check its sha256. Raises DataError if a file was altered."""
        _check_files(self.path, self.manifest["files"], file_sha256)

    def tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.path / TOKENIZER, self.manifest["end_of_text"]["token"])


def fingerprint(files: Mapping[str, Mapping[str, Plain]]) -> str:
    """Return a sha256 over the hashes of the token, offset and tokenizer files. The fingerprint is a seed of the order
    of training data.

    The first shard, e.g. train-00000.bin, is hashed as train.bin, its name in earlier versions, so older stores keep
    their fingerprint.
    """
    names = [name for split in SPLITS for name in sorted(files) if name.startswith((f"{split}-", f"{split}."))]
    lines = [f"{name.replace('-00000', '')} {files[name]['sha256']}\n" for name in (*names, TOKENIZER)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def unigram_cross_entropy(counts: np.ndarray, training_counts: np.ndarray) -> float:
    """Return the loss, in nats per token, of a model that predicts each token by its frequency in the training text.

    Args:
        counts: how often each token occurs in the predicted text, (V,).
        training_counts: how often each token occurs in the training text, (V,). With add-one smoothing a token's
            probability is (count + 1) / (sum of counts + V).
    """
    log_p = np.log(training_counts + 1) - np.log(training_counts.sum() + len(training_counts))
    return float(-(counts * log_p).sum() / max(1, counts.sum()))


def token_dtype(vocab_size: int) -> str:
    """Return the dtype of token ids: little-endian uint16 if every id below `vocab_size` fits, else uint32."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


# ---------------------------------------------------------------- checking


def _read_manifest(folder: Path) -> dict[str, Plain]:
    path = folder / MANIFEST
    if not path.exists() and not any(folder.glob("train*.bin")):
        raise DataError(f"{folder}: not a token store (it has no {MANIFEST})")
    try:
        content = read_json(path)
        if content.get("format") != STORE_FORMAT:
            raise RunError(f"{path}: is not a token store of format {STORE_FORMAT}")
        return unsealed(content, path)
    except RunError as error:
        raise _damaged_error(folder, error) from None


def _open_split(path: Path, name: str, manifest: Mapping[str, Plain]) -> Split:
    entries = manifest["splits"][name]
    sources = tuple(SourceCounts(**source) for source in entries["sources"])
    options = {**entries, "sources": sources, "shard_tokens": manifest["shard_tokens"]}
    return Split(path.absolute() / name, manifest["dtype"], **options)


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Plain]], sha256: Callable[[Path], str]) -> None:
    """Check the sizes and, by `sha256`, the hashes of files, in several threads. Raises DataError if a file was altered
    or can't be read.
    """

    def check(name: str) -> None:
        path, entry = folder / name, files[name]
        try:
            size = path.stat().st_size
            is_equal = size == entry["bytes"] and sha256(path) == entry["sha256"]
        except OSError as error:
            raise _damaged_error(folder, f"{path}: can't be read: {error.strerror}") from None
        if not is_equal:
            change = "was altered (its sha256 differs)"
            if size != entry["bytes"]:
                change = f"has {size:,} bytes, not {entry['bytes']:,}"
            raise _damaged_error(folder, f"{path}: {change}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(check, files))


def _damaged_error(folder: Path, problem: object) -> DataError:
    return DataError(f"{problem}; delete the folder {folder}: it is prepared again")


# ---------------------------------------------------------------- writing a store, each file synchronised to disk


SHARD_TOKENS = 2**28  # 512 MiB of uint16


class SplitWriter:
    """Writes one split, document by document, and counts its tokens; memory holds 8 bytes per document."""

    def __init__(self, folder: Path, name: str, vocab_size: int, end_of_text: int):
        self.path, self.end_of_text = folder / name, end_of_text
        self.dtype, self.shard_tokens = np.dtype(token_dtype(vocab_size)), SHARD_TOKENS
        self.counts = np.zeros(vocab_size, np.int64)
        self.starts = array("q")  # index of each document's first token
        self.n_tokens = 0
        self.files: dict[str, Plain] = {}  # manifest entries of finished shards
        self.file: BinaryIO | None = None

    def close(self) -> None:
        if self.file:
            self.file.close()

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens: documents, each beginning with the end-of-text token, or further tokens of the document
        written last.
        """
        while len(tokens):
            shard_part, tokens = np.split(tokens, [self.shard_tokens - self.n_tokens % self.shard_tokens])
            if self.file is None:
                self.file = open(shard_path(self.path, len(self.files)), "wb", 1 << 20)  # noqa: SIM115 (`close` closes it)
                self.sha256 = hashlib.sha256()
            self.file.write(shard_part)
            self.counts += np.bincount(shard_part, minlength=len(self.counts))
            self.sha256.update(shard_part)
            self.starts.extend((np.flatnonzero(shard_part == self.end_of_text) + self.n_tokens).tolist())
            self.n_tokens += len(shard_part)
            if self.n_tokens % self.shard_tokens == 0:
                self._finish_shard()

    def finish(self, sources: list[SourceCounts]) -> tuple[dict[str, Plain], dict[str, Plain]]:
        """Finish the split on disk. Returns two maps of manifest entries, the counts (of the split and of each source)
        and the files.
        """
        if self.file:
            self._finish_shard()
        offsets = np.append(np.array(self.starts, "<i8"), self.n_tokens)
        ends = offsets[np.cumsum([0, *(source.n_documents for source in sources)])]
        entries = {
            "n_tokens": self.n_tokens,
            "n_documents": len(self.starts),
            "n_bytes": sum(source.n_bytes for source in sources),
            "longest": int(np.diff(offsets).max(initial=0)),
            "sources": [
                vars(source) | {"n_tokens": int(count)} for source, count in zip(sources, np.diff(ends), strict=True)
            ],
        }
        return entries, self.files | write_file(self.path.with_name(f"{self.path.name}.offsets.npy"), npy(offsets))

    def _finish_shard(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.files[shard_path(self.path, len(self.files)).name] = {
            "bytes": self.file.tell(),
            "sha256": self.sha256.hexdigest(),
        }
        self.file.close()
        self.file = None


def finish_store(
    folder: Path,
    writers: dict[str, SplitWriter],
    sources: dict[str, list[SourceCounts]],
    counts: dict[str, np.ndarray],
    end_of_text: str,
    bytes_per_token: np.ndarray,
    origin: str,
) -> dict[str, Plain]:
    """Finish the splits and write the file of `bytes_per_token`. Returns the manifest's entries on vocabulary, splits
    and files.

    counts: for each split, how often each token is predicted, (V,); origin: how `bytes_per_token` was obtained, e.g.
    `exact`.
    """
    splits, files, train = {}, write_file(folder / TOKENIZER, (folder / TOKENIZER).read_bytes()), writers["train"]
    for name, writer in writers.items():
        splits[name], entries = writer.finish(sources[name])
        splits[name]["unigram_cross_entropy"] = unigram_cross_entropy(counts[name], counts["train"])
        files |= entries
    return {
        "vocab_size": len(train.counts),
        "end_of_text": {"token": end_of_text, "id": train.end_of_text},
        "dtype": token_dtype(len(train.counts)),
        "shard_tokens": train.shard_tokens,
        "token_bytes": origin,
        "splits": splits,
        "files": files | write_file(folder / TOKEN_BYTES, npy(bytes_per_token)),
    }


def write_file(path: Path, content: bytes) -> dict[str, Plain]:
    """Write `content` to `path` and sync it to disk. Returns the file's manifest entry {name: its size in bytes and
    sha256}.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def npy(values: np.ndarray) -> bytes:
    """Return `values` as the bytes of a .npy file. `write_file` writes these bytes, as `np.save` hides the error of a
    full disk.
    """
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()
