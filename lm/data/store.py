"""Reads and writes token stores. A store is a folder with two splits of tokens, their documents' offsets, the tokenizer
and a manifest.

    train-00000.bin ..., val-00000.bin ...   token ids, little-endian uint16 (uint32 if the vocabulary has more than
                                             65,536 entries)
    train.offsets.npy, val.offsets.npy       int64 (documents + 1,): the index of each document's first token
    tokenizer.json, token_bytes.npy          the vocabulary; the number of UTF-8 bytes of each of its V tokens, fp32
                                             (V,)
    manifest.json                            origin, sizes, and sha256 of every file; written last

Each document is the end-of-text token followed by the tokens of its text. A split has a shard for some 64 MB of text
(in older stores, for 2^28 tokens). The documents of each source are contiguous, in the order of the sources
(`Split.sources`).
"""

import hashlib
import io
import os
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.data.tokenizer import count_token_bytes, load_tokenizer, vocab_size
from lm.errors import DataError, LMError, RunError, one_line
from lm.files import FileHashes, file_sha256, json_sha256, read_json, write_together
from lm.plain import Plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STORE_FORMAT = 5
MANIFEST_FILE, TOKENIZER_FILE, TOKEN_BYTES_FILE = "manifest.json", "tokenizer.json", "token_bytes.npy"
SPLITS = ("train", "val")


@dataclass(frozen=True)
class SourceCounts:
    """The numbers of tokens, documents and bytes that one source has in a split. The split has one source's documents
    after another's.
    """

    label: str
    n_tokens: int
    n_documents: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class Split:
    """The training or held-out tokens of a store. Files are mapped from disk at first use."""

    path_without_suffix: Path  # absolute
    dtype: str
    n_tokens: int
    n_documents: int
    n_bytes: int  # UTF-8 bytes of the documents
    unigram_cross_entropy: float  # loss by token frequencies of the training split (see the function), nats per token
    longest: int  # tokens of the longest document, its end-of-text token included
    sources: tuple[SourceCounts, ...]  # the counts of each source, in order
    shard_starts: dict[str, int]  # {name of a shard's file, in order: index of its first token}

    @property
    def offsets(self) -> np.ndarray:
        """Return the index of each document's first token, followed by the split's number of tokens: int64 (n_documents
        + 1,), read-only.
        """
        return _map_array(self.path_without_suffix.with_suffix(".offsets.npy"))

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each document, its end-of-text token included: int64 (n_documents,)."""
        return np.diff(np.asarray(self.offsets))

    def take_windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the `length` consecutive tokens from each index in `starts` (k,) on: int64 (k, length). A window may
        span several shards.
        """
        return self.tokens_at(np.asarray(starts)[:, None] + np.arange(length)).astype(np.int64)

    def tokens_at(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens at `indices`, in the shape of `indices` and the store's dtype."""
        names, starts = [*self.shard_starts], np.array([*self.shard_starts.values()])
        if len(names) == 1:  # as of most stores: faster
            return np.asarray(_map_array(self.path_without_suffix.with_name(names[0]), self.dtype))[indices]
        shard_numbers, tokens = np.searchsorted(starts, indices, "right") - 1, np.empty(indices.shape, self.dtype)
        for number in np.unique(shard_numbers):
            in_shard = shard_numbers == number
            shard = _map_array(self.path_without_suffix.with_name(names[number]), self.dtype)
            tokens[in_shard] = np.asarray(shard)[indices[in_shard] - starts[number]]
        return tokens

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of document `index`, the end-of-text token first: int64 (tokens,)."""
        return self.tokens_at(np.arange(*self.offsets[index : index + 2])).astype(np.int64)


@lru_cache(maxsize=512)  # a process may have 1,024 files open
def _map_array(path: Path, dtype: str | None = None) -> np.ndarray:
    """Map a file from disk, and return it as a read-only array, (n,): a file of tokens in `dtype`, or else an .npy
    file.
    """
    return np.memmap(path, dtype, "r") if dtype else np.load(path, mmap_mode="r")


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Return the path of shard `number` of a split, such as train-00000.bin."""
    return folder / f"{split}-{number:05d}.bin"


@dataclass(frozen=True, eq=False)
class Store:
    """A token store on disk, opened for reading: its splits, its manifest, and facts about its tokenizer."""

    path: Path
    fingerprint: str  # sha256 of tokens, offsets and tokenizer; messages show 16 hex digits of it
    vocab_size: int
    end_of_text_id: int  # id of the end-of-text token
    bytes_per_token: np.ndarray  # (V,) fp32, number of UTF-8 bytes of each token; 0 for special tokens
    manifest: Mapping[str, Plain]
    train: Split
    val: Split

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Store":
        """Open the store in the folder `path`, and check its format and the sha256 of every file.

        Hashes are cached in the parent folder (`FileHashes`), and computed again if a file's size, times or inode
        change.

        Raises DataError: a file is missing, truncated or altered, or the manifest does not describe it.
        """
        path = Path(path)
        manifest_path, hashes = path / MANIFEST_FILE, FileHashes(path.parent)
        if not manifest_path.exists() and not any(path.glob("train*.bin")):
            raise DataError(f"{path}: not a token store (it has no {MANIFEST_FILE})")
        try:
            content = read_json(manifest_path)
            if content.get("format") != STORE_FORMAT:
                raise RunError(f"{manifest_path}: is not a token store of format {STORE_FORMAT}")
            manifest = {name: value for name, value in content.items() if name != "sha256"}
            if content.get("sha256") != json_sha256(manifest):
                raise RunError(f"{manifest_path}: was altered (its sha256 differs)")
            files = manifest["files"]
            with ThreadPoolExecutor() as threads:
                digests = threads.map(hashes.sha256, [path / name for name in files])
                for name, digest in zip(files, digests, strict=True):
                    if digest != files[name]["sha256"]:
                        raise DataError(f"{path / name}: was altered (its sha256 differs)")
            splits = [_open_split(path, name, manifest) for name in SPLITS]
            byte_counts, end_of_text_id = np.load(path / TOKEN_BYTES_FILE), manifest["end_of_text"]["id"]
            return cls(
                path, data_fingerprint(files), manifest["vocab_size"], end_of_text_id, byte_counts, manifest, *splits
            )
        except LMError as error:
            problem = one_line(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{manifest_path}: does not describe the store ({one_line(error)})"
        finally:
            hashes.save()
        raise DataError(f"{problem}; delete the folder {path}: it is prepared again")

    def tokenizer(self) -> "Tokenizer":
        """Load the store's tokenizer."""
        return load_tokenizer(self.path / TOKENIZER_FILE, self.manifest["end_of_text"]["token"])


def data_fingerprint(files: Mapping[str, Mapping[str, Plain]]) -> str:
    """Return a sha256 over the hashes of the token, offset and tokenizer files. The fingerprint seeds the order of
    training data.

    The first shard, e.g. train-00000.bin, is hashed as train.bin, its name in earlier versions, so older stores keep
    their fingerprint.
    """
    names = [name for split in SPLITS for name in sorted(files) if name.startswith((f"{split}-", f"{split}."))]
    lines = [f"{name.replace('-00000', '')} {files[name]['sha256']}\n" for name in (*names, TOKENIZER_FILE)]
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


def _open_split(path: Path, name: str, manifest: Mapping[str, Plain]) -> Split:
    """Return the split `name` of the store in the folder `path`, as the manifest describes it."""
    entries, itemsize = manifest["splits"][name], np.dtype(manifest["dtype"]).itemsize
    names = SourceCounts.__annotations__  # older stores have a licence, too
    sources = tuple(SourceCounts(**{name: source[name] for name in names}) for source in entries["sources"])
    shard_starts, n_tokens = {}, 0
    for file in sorted(file for file in manifest["files"] if file.startswith(f"{name}-")):
        shard_starts[file], n_tokens = n_tokens, n_tokens + manifest["files"][file]["bytes"] // itemsize
    options = {**entries, "sources": sources, "shard_starts": shard_starts}
    return Split(path.absolute() / name, manifest["dtype"], **options)


# ---------------------------------------------------------------- writing a store, each file synchronised to disk


STORE_NAME_IN_ERRORS = (
    "the token store (make room, or set data.root to another folder)"  # what errors of writing call a file
)
BLOCK_BYTES = 512 << 10  # bytes of a shard that are read at a time


def write_store_file(path: Path, content: bytes) -> None:
    """Write a file of a store completely or not at all. Raises RunError: the file can't be written; the message has a
    remedy.
    """
    write_together({path: content}, STORE_NAME_IN_ERRORS)


def write_offsets_and_token_bytes(
    folder: Path,
    tokenizer: "Tokenizer",
    end_of_text: str,
    sources: dict[str, list[SourceCounts]],
    answer_counts_by_split: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Plain]:
    """Write the offsets of the documents whose shards are in `folder`, and the number of bytes of each token. Return
    the manifest's entries on vocabulary, splits and files.

    Args:
        sources: the numbers of documents and bytes of each source in each split.
        answer_counts_by_split: for a store of symbols, how often each symbol is in an answer in each split, (V,); each
            symbol counts as one byte. None: the store holds text, and a token is a target as often as it occurs.
    """
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end_of_text)
    splits: dict[str, dict[str, Plain]] = {}
    token_counts: dict[str, np.ndarray] = {}
    for name in SPLITS:
        token_counts[name], offsets = _counts_and_offsets(folder, name, size, end_id)
        write_store_file(folder / f"{name}.offsets.npy", npy_bytes(offsets))
        source_ends = offsets[np.cumsum([0, *(source.n_documents for source in sources[name])])]
        splits[name] = {
            "n_tokens": int(offsets[-1]),
            "n_documents": len(offsets) - 1,
            "n_bytes": sum(source.n_bytes for source in sources[name]),
            "longest": int(np.diff(offsets).max(initial=0)),
            "sources": [
                vars(source) | {"n_tokens": int(n_tokens)}
                for source, n_tokens in zip(sources[name], np.diff(source_ends), strict=True)
            ],
        }
    for name in SPLITS:
        counts_by_split = answer_counts_by_split or token_counts
        splits[name]["unigram_cross_entropy"] = unigram_cross_entropy(counts_by_split[name], counts_by_split["train"])
    total_counts, n_bytes = sum(token_counts.values()), sum(split["n_bytes"] for split in splits.values())
    bytes_per_token, origin = count_token_bytes(tokenizer), "exact"
    if answer_counts_by_split:
        bytes_per_token, origin = np.ones(size, np.float32), "one a symbol"
    elif bytes_per_token is None or int(total_counts @ bytes_per_token.astype(np.int64)) != n_bytes:
        origin = "corpus mean"
        bytes_per_token = np.full(size, n_bytes / max(1, total_counts.sum() - total_counts[end_id]), np.float32)
        bytes_per_token[end_id] = 0
    write_store_file(folder / TOKEN_BYTES_FILE, npy_bytes(bytes_per_token))
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".npy") or path.name == TOKENIZER_FILE)
    return {
        "vocab_size": size,
        "end_of_text": {"token": end_of_text, "id": end_id},
        "dtype": token_dtype(size),
        "token_bytes": origin,
        "splits": splits,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            for path in paths
            if path.stat().st_size
        },
    }


def _counts_and_offsets(folder: Path, split: str, size: int, end_of_text_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each of `size` tokens occurs in a split, int64 (size,), and the index of each document's first
    token.

    The indices are followed by the number of tokens: int64 (documents + 1,). A document begins at each
    `end_of_text_id`.
    """
    counts, starts, n_tokens = np.zeros(size, np.int64), array("q"), 0
    for path in sorted(folder.glob(f"{split}-*.bin")):
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                tokens = np.frombuffer(block, token_dtype(size))
                counts += np.bincount(tokens, minlength=size)
                starts.extend((np.flatnonzero(tokens == end_of_text_id) + n_tokens).tolist())
                n_tokens += len(tokens)
    return counts, np.append(np.array(starts, "<i8"), n_tokens)


def npy_bytes(values: np.ndarray) -> bytes:
    """Return `values` as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()
