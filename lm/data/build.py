"""Making a token store: scan, tokenizer, tokens, manifest, in a hidden folder that becomes the store at the end.

What is done stays in the folder when the process dies: the scan, the tokenizer, and a journal that says how far the
tokens reach. The same preparation goes on from there, and makes the same bytes as one in one go.
"""

import io
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Files
from lm.data import writing
from lm.data.encoding import Document, default_workers, encode_all, pieces
from lm.data.reading import OnError, Unreadable
from lm.data.sources import documents, label, licence
from lm.data.store import TOKEN_BYTES, TOKENIZER, Part, token_dtype
from lm.data.tasks.generators import example
from lm.data.tasks.symbol_store import SHOWN, answer_entropy, symbol_rows, symbol_tokenizer
from lm.data.tokenizer import load_tokenizer, token_bytes, tokenizer_of, train_tokenizer, vocab_size
from lm.data.writing import SplitWriter, npy, write_file, write_manifest, write_whole
from lm.errors import DataError
from lm.files import sync_folder
from lm.progress import Progress
from lm.schema import Plain

SCAN, JOURNAL = "scan.npz", "journal.json"
JOURNAL_BYTES = 64 << 20  # text between entries in the journal
LISTED = 100  # unreadable files, documents and rows that the manifest names
TRAIN, VAL, COPY = 0, 1, 2  # what becomes of a document


@dataclass(frozen=True)
class Scan:
    """What one pass over the documents says: all that is kept of them."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    fate: np.ndarray  # (documents,) uint8: TRAIN, VAL or COPY (of an earlier one)
    ends: np.ndarray  # (sources,) int64: documents up to the end of each source
    left_out: dict[str, int]  # documents left out, by reason
    unreadable: dict[str, Plain]  # how many files, documents and rows, of how many bytes, and the first of them

    @property
    def part(self) -> np.ndarray:
        """Which source each document is of: (documents,)."""
        return np.repeat(np.arange(len(self.ends)), np.diff(self.ends, prepend=0))


def build(data: DataConfig, spec: dict[str, Plain], target: Path, shown: Progress) -> None:
    """Make the store `target`, or go on where a process that died was.

    Raises:
        DataError: a source is too small or changed meanwhile, and nothing is left; or it can't be read any further, and the next call
            goes on from there.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(exist_ok=True)
        made = _symbols(data, partial) if data.symbolic else _made(data, partial, shown)
        write_manifest(partial, spec | made)
        for name in (SCAN, JOURNAL):
            (partial / name).unlink(missing_ok=True)
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except (DataError, OSError):
        if not (partial / JOURNAL).exists():  # else hours of work, which the reason may leave usable: a network, a full disk
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _made(data: DataConfig, partial: Path, shown: Progress) -> dict[str, Plain]:
    """Write all of a store of text but the manifest, which is returned."""
    scan = _scanned(data, partial, shown)
    kept = scan.fate != COPY
    total = int(scan.n_bytes[kept].sum())
    end = data.tokenizer.end_of_text
    if not (partial / TOKENIZER).exists():
        if not data.tokenizer.files:
            with shown.bytes("tokenizer", int(scan.n_bytes[scan.fate == TRAIN].sum())) as advance:
                tokenizer = train_tokenizer(_training_texts(data, scan, advance), data.tokenizer)
        else:
            tokenizer = tokenizer_of(data.tokenizer)
        write_whole(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(partial / TOKENIZER, end)
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end)
    done, train, val = _reopened(partial, scan, size, end_id)
    with closing(train), closing(val):
        before = int(scan.n_bytes[:done][kept[:done]].sum())
        workers = data.prepare_workers or default_workers(total - before)
        unsaved = 0
        with shown.bytes("encode", total, before) as advance:
            for batch in encode_all(_read_again(data, scan, done), tokenizer.to_str(), end, workers):
                held_out = np.repeat([document.held_out for document in batch.documents], batch.lengths)
                train.add(batch.tokens[~held_out])
                val.add(batch.tokens[held_out])
                n_bytes = sum(document.n_bytes for document in batch.documents)
                advance(n_bytes)
                unsaved += n_bytes
                if unsaved >= JOURNAL_BYTES:
                    _note(partial, batch.documents[-1].end, train, val)
                    unsaved = 0
        splits, files = {}, write_file(partial / TOKENIZER, (partial / TOKENIZER).read_bytes())
        for name, fate, writer in (("train", TRAIN, train), ("val", VAL, val)):
            splits[name], written = writer.finish(int(scan.n_bytes[scan.fate == fate].sum()), _parts(data, scan, fate))
            files |= written
        counts = train.counts + val.counts
    by_token = token_bytes(tokenizer)
    exact = by_token is not None and int(counts @ by_token.astype(np.int64)) == total
    if not exact:
        by_token = np.full(size, total / max(1, counts.sum() - counts[end_id]), np.float32)
        by_token[end_id] = 0
    return {
        "licence": "; ".join(dict.fromkeys(_licences(data))),
        "left_out": scan.left_out | {"copies": int((scan.fate == COPY).sum())},
        "unreadable": scan.unreadable,
        "vocab_size": size,
        "end_of_text": {"token": end, "id": end_id},
        "dtype": token_dtype(size),
        "shard_tokens": train.shard_tokens,
        "token_bytes": "exact" if exact else "corpus mean",
        "splits": splits,
        "files": files | write_file(partial / TOKEN_BYTES, npy(by_token)),
    }


def _symbols(data: DataConfig, partial: Path) -> dict[str, Plain]:
    """The same of a store of tasks over symbols. Its unigram entropy is that of the answers."""
    tasks, terms = [share.task for share in data.tasks], "none needed: made up"
    for task in tasks:
        try:
            example(task, 0, 0, data.seq_len)
        except ValueError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; set data.seq_len to more, or the task's options to less") from None
    tokenizer = symbol_tokenizer(tasks, END_OF_TEXT)
    size = vocab_size(tokenizer)
    files, splits = write_file(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode()), {}
    for name, part in (("train", "train"), ("val", "test")):
        rows = symbol_rows(tasks, part, data.seq_len)
        n_bytes = SHOWN * (data.seq_len + 1)  # one a symbol; of each task
        with closing(SplitWriter(partial, name, size, size - 1)) as writer:
            for row in rows:
                writer.add(np.array([size - 1, *row.tokens], writer.dtype))
            parts = [Part(task.name, terms, 0, SHOWN, n_bytes) for task in tasks]
            splits[name], written = writer.finish(n_bytes * len(tasks), parts)
        splits[name]["unigram_entropy"] = answer_entropy(rows)
        files |= written
    return {
        "licence": terms,
        "left_out": {},
        "unreadable": {"count": 0, "bytes": 0, "first": []},
        "vocab_size": size,
        "end_of_text": {"token": END_OF_TEXT, "id": size - 1},
        "dtype": token_dtype(size),
        "shard_tokens": writing.SHARD_TOKENS,
        "token_bytes": "one a symbol",
        "splits": splits,
        "files": files | write_file(partial / TOKEN_BYTES, npy(np.ones(size, np.float32))),
    }


def _parts(data: DataConfig, scan: Scan, fate: int) -> list[Part]:
    """What each source gives to a split, but for the tokens."""
    chosen = scan.fate == fate
    documents = np.bincount(scan.part[chosen], minlength=len(scan.ends))
    n_bytes = np.bincount(scan.part[chosen], scan.n_bytes[chosen], len(scan.ends))
    return [
        Part(name, terms, 0, int(documents[n]), int(n_bytes[n]))
        for n, (name, terms) in enumerate(zip(labels(data), _licences(data), strict=True))
    ]


def labels(data: DataConfig) -> list[str]:
    """A name for each source, all different."""
    names: list[str] = []
    for part in data.parts:
        name, number = label(part.source), 2
        while name in names:
            name, number = f"{label(part.source)}-{number}", number + 1
        names.append(name)
    return names


def _licences(data: DataConfig) -> list[str]:
    return [licence(part.source) for part in data.parts]


# ---------------------------------------------------------------- the journal


def _note(partial: Path, done: int, train: SplitWriter, val: SplitWriter) -> None:
    """Say that the first `done` documents are on disk."""
    train.sync()
    val.sync()
    entry = {"documents": done, "train": train.n_tokens, "val": val.n_tokens, "shard_tokens": train.shard_tokens}
    write_whole(partial / JOURNAL, json.dumps(entry).encode())


def _reopened(partial: Path, scan: Scan, size: int, end_id: int) -> tuple[int, SplitWriter, SplitWriter]:
    """How many documents are done, and the two splits to go on with; from the start if the journal and they disagree."""
    path, writers = partial / JOURNAL, []
    try:
        entry = json.loads(path.read_bytes()) if path.exists() else None
        if entry and entry["shard_tokens"] == writing.SHARD_TOKENS:
            for name, fate in (("train", TRAIN), ("val", VAL)):
                writers.append(SplitWriter(partial, name, size, end_id, entry[name]))
                if len(writers[-1].starts) != (scan.fate[: entry["documents"]] == fate).sum():
                    raise EOFError
            return entry["documents"], *writers
    except (ValueError, KeyError, EOFError, FileNotFoundError):
        for writer in writers:
            writer.close()
    return 0, *(SplitWriter(partial, name, size, end_id) for name in ("train", "val"))


# ---------------------------------------------------------------- reading the sources


def _scanned(data: DataConfig, partial: Path, shown: Progress) -> Scan:
    """The scan: kept from before, or made and kept."""
    path = partial / SCAN
    if not path.exists():
        scan = _scan(data, shown)
        buffer = io.BytesIO()
        facts = np.frombuffer(json.dumps([scan.left_out, scan.unreadable]).encode(), np.uint8)
        np.savez(buffer, hashes=scan.hashes, n_bytes=scan.n_bytes, fate=scan.fate, ends=scan.ends, facts=facts)
        write_whole(path, buffer.getvalue())
    with np.load(path) as kept:
        left_out, unreadable = json.loads(kept["facts"].tobytes())
        return Scan(kept["hashes"], kept["n_bytes"], kept["fate"], kept["ends"], left_out, unreadable)


def _scan(data: DataConfig, shown: Progress) -> Scan:
    """Hash every document, find the copies, and hold out those with the smallest hashes of each source.

    Equal texts have equal hashes: a document that is held out anywhere is never trained on.
    """
    hashes, sizes, ends = array("Q"), array("q"), []
    left_out = {"blank": 0, "short": 0, "long": 0}
    unreadable: dict[str, Plain] = {"count": 0, "bytes": 0, "first": []}

    def skip(error: Unreadable) -> None:
        if data.on_error == "fail":
            raise error
        unreadable["count"] += 1
        unreadable["bytes"] += error.n_bytes
        if len(unreadable["first"]) < LISTED:
            unreadable["first"].append(str(error))

    def refuse(reason: str) -> None:
        left_out[reason] += 1

    with shown.bytes("scan", None) as advance:
        for part in range(len(data.parts)):
            for _, digest, n_bytes in _texts(data, part, skip, refuse):
                hashes.append(digest)
                sizes.append(n_bytes)
                advance(n_bytes)
            ends.append(len(hashes))
    where = ", ".join(labels(data))
    if not hashes:
        raise DataError(f"data.source: {where}: holds no documents{_explained(left_out, unreadable)}")
    hash_array, size_array, end_array = np.array(hashes, np.uint64), np.array(sizes, np.int64), np.array(ends, np.int64)
    fate = np.full(len(hash_array), TRAIN, np.uint8)
    if data.deduplicate:
        fate[:] = COPY
        fate[np.unique(hash_array, return_index=True)[1]] = TRAIN
    spans = [slice(*edge) for edge in pairwise([0, *ends])]
    sources = [_by_hash(hash_array[one][fate[one] == TRAIN], size_array[one][fate[one] == TRAIN]) for one in spans]
    fate[np.isin(hash_array, _held_out(sources, data.val_fraction)) & (fate == TRAIN)] = VAL
    if not (fate == VAL).any() or not (fate == TRAIN).any():
        is_text = any(part.source.name == Files.name for part in data.parts)
        split = ", or set data.source.separator to split .txt files into documents" if is_text else ""
        copies = {"copies": int((fate == COPY).sum())}
        raise DataError(
            f"data.source: {where}: {len(hashes)} document(s), none of which can be held out{_explained(left_out | copies, unreadable)}; "
            f"two different ones of a source are needed: add text{split}"
        )
    return Scan(hash_array, size_array, fate, end_array, left_out, unreadable)


def _by_hash(hashes: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different hashes of documents in order, and the bytes of text that each has: a document, or all copies of one."""
    different, which = np.unique(hashes, return_inverse=True)
    return different, np.bincount(which, sizes)


def _held_out(sources: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """The hashes to hold out: the smallest of each source, of at least `fraction` of its text, but never of all.

    A hash with more than half of a source's text stays in training, unless `fraction` is as large, and at most half of the others
    is held out.

    Args:
        sources: of each what `_by_hash` gives.
    """
    large = np.concatenate([hashes[sizes > max(fraction, 0.5) * sizes.sum()] for hashes, sizes in sources])
    return np.concatenate([_smallest(hashes, sizes, np.isin(hashes, large), fraction) for hashes, sizes in sources])


def _smallest(hashes: np.ndarray, sizes: np.ndarray, large: np.ndarray, fraction: float) -> np.ndarray:
    """The smallest of a source's hashes, of at least `fraction` of its text; never those that are `large`, and never all."""
    wanted, most = fraction * sizes.sum(), len(hashes) - 1
    if large.any():
        hashes, sizes = hashes[~large], sizes[~large]
        wanted, most = min(wanted, sizes.sum() / 2), len(hashes)
    return hashes[: max(0, min(most, 1 + np.searchsorted(np.cumsum(sizes), wanted)))]


def _explained(left_out: dict[str, int], unreadable: dict[str, Plain]) -> str:
    counts = {**left_out, "unreadable": unreadable["count"]}
    words = {"copies": "copies of others"}
    text = ", ".join(f"{count:,} {words.get(reason, reason)}" for reason, count in counts.items() if count)
    return f" ({text})" if text else ""


def _texts(data: DataConfig, part: int, skip: OnError, refuse: Callable[[str], None]) -> Iterator[tuple[str, int, int]]:
    """(text, 64 bits of its hash, UTF-8 bytes) of a source's documents, but for those that are blank, too short or too long."""
    for text in documents(data.parts[part].source, Path(data.root), skip):
        if not text or text.isspace():
            refuse("blank")
            continue
        content = text.encode()
        if len(content) < data.min_document_bytes:
            refuse("short")
        elif data.max_document_bytes is not None and len(content) > data.max_document_bytes:
            refuse("long")
        else:
            yield text, int.from_bytes(blake2b(content, digest_size=8).digest(), "big"), len(content)


def _read_again(data: DataConfig, scan: Scan, done: int) -> Iterator[Document]:
    """The scan's documents from number `done` on, copies left out. Raises DataError if the sources do not give the same."""

    def skip(error: Unreadable) -> None:
        if data.on_error == "fail":
            raise error

    seen = 0
    for part, end in enumerate(scan.ends):
        for text, digest, n_bytes in _texts(data, part, skip, lambda reason: None):
            if seen == end or digest != scan.hashes[seen]:
                raise _changed(data, seen)
            seen += 1
            if seen > done and scan.fate[seen - 1] != COPY:
                yield Document(text, n_bytes, bool(scan.fate[seen - 1] == VAL), seen)
        if seen != end:
            raise _changed(data, seen)


def _changed(data: DataConfig, seen: int) -> DataError:
    return DataError(f"data.source: {', '.join(labels(data))}: changed while it was read (document {seen + 1}); run again")


def _training_texts(data: DataConfig, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for document in _read_again(data, scan, 0):
        if not document.held_out:
            advance(document.n_bytes)
            yield from pieces(document.text)
