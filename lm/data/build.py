"""Building a token store: scan, tokenizer, tokens, manifest, in a hidden folder that is renamed to the store's at the end.

An interrupted preparation leaves the scan, the tokenizer, the tokens and a journal of how many of them are complete. The same
preparation continues from there, and the store has the same bytes as one prepared without interruption.
"""

import io
import json
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Files, Source, Tokens
from lm.data.encoding import Document, default_workers, encode_all, pieces
from lm.data.sources import documents, held_out, label, licence, streamed
from lm.data.store import (
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    SourceCounts,
    SplitWriter,
    npy,
    token_dtype,
    unigram_cross_entropy,
    write_file,
    write_manifest,
    write_whole,
)
from lm.data.tasks.examples import SUBSETS, TaskError
from lm.data.tasks.generators import SHOWN, STORE_SEED, answer_counts, check_task, symbol_sequences, symbol_tokenizer
from lm.data.text_files import OnError, Unreadable
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import load_tokenizer, origin, token_bytes, tokenizer_of, train_tokenizer, vocab_size
from lm.errors import DataError, one_line
from lm.files import file_sha256, plain_sha256, sync_folder
from lm.progress import Progress
from lm.schema import Plain

JOURNAL = "journal.json"


class Journal:
    """The parts that an interrupted preparation completed in `folder`; empty if it completed nothing, or if the journal is damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entry: dict[str, Plain] = {}
        try:
            found = json.loads((folder / JOURNAL).read_bytes())
            if isinstance(found["entry"], dict) and plain_sha256(found["entry"]) == found["sha256"]:
                self.entry = found["entry"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            pass

    @property
    def n_documents(self) -> int:
        """Documents whose tokens are on disk."""
        count = self.entry.get("documents")
        return count if isinstance(count, int) and count > 0 else 0

    def holds(self, name: str) -> bool:
        """True if the file `name` is what `keep` wrote."""
        path = self.folder / name
        return path.is_file() and self.entry.get(name) == file_sha256(path)

    def keep(self, name: str, content: bytes) -> None:
        """Write the file `name`, and record its hash."""
        write_whole(self.folder / name, content)
        self._write({name: file_sha256(self.folder / name)})

    def advance(self, n_documents: int, writers: dict[str, SplitWriter]) -> None:
        """Record that the first `n_documents` documents are on disk, in the splits that `writers` write."""
        for writer in writers.values():
            writer.sync()
        self._write({"documents": n_documents} | {name: writer.progress() for name, writer in writers.items()})

    def resumed(self, name: str, vocab_size: int, end_of_text: int) -> SplitWriter | None:
        """A writer that continues the split `name`; None if its files are not those of the last `advance`."""
        progress = self.entry.get(name)
        if not isinstance(progress, dict) or not isinstance(n_tokens := progress.get("n_tokens"), int):
            return None
        try:
            writer = SplitWriter(self.folder, name, vocab_size, end_of_text, n_tokens)
        except (EOFError, ValueError, FileNotFoundError):  # too few tokens, or ids beyond the vocabulary
            return None
        if writer.progress() == progress:
            return writer
        writer.close()
        return None

    def remove(self) -> None:
        """Delete the journal: the store is complete."""
        (self.folder / JOURNAL).unlink(missing_ok=True)

    def _write(self, changes: dict[str, Plain]) -> None:
        self.entry |= changes
        write_whole(self.folder / JOURNAL, json.dumps({"entry": self.entry, "sha256": plain_sha256(self.entry)}).encode())


_LENGTH = struct.Struct("<q")  # bytes of the document that follows


class Restart(DataError):
    """The parts that an interrupted preparation kept can't be continued; it is deleted, and the next call starts again."""


def spooled(texts: Iterator[tuple[str, int, int]], path: Path) -> Iterator[tuple[str, int, int]]:
    """The items of `texts`, whose first fields are written to `path` (compressed), which appears when the last was given."""
    import pyarrow

    temporary = path.with_name(f"{path.name}.new")
    with pyarrow.OSFile(os.fsencode(temporary), "wb") as raw, pyarrow.CompressedOutputStream(raw, "zstd") as file:
        for item in texts:
            content = item[0].encode()
            file.write(_LENGTH.pack(len(content)))
            file.write(content)
            del content  # a long document is in memory once
            yield item
    os.replace(temporary, path)


def read_spool(path: Path) -> Iterator[str]:
    """The texts that `spooled` wrote. Raises Restart if the file is damaged."""
    import pyarrow

    try:
        with pyarrow.OSFile(os.fsencode(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as file:
            while head := file.read(_LENGTH.size):
                (size,) = _LENGTH.unpack(head)
                yield file.read(size).decode()
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError, ValueError, OverflowError, struct.error) as error:
        raise Restart(f"{path}: can't be read (damaged?): {one_line(error)}; run again") from None


# ---------------------------------------------------------------- building


SCAN, SPOOL = "scan.npz", "spool"
JOURNAL_BYTES = 64 << 20  # bytes of text between entries in the journal
LISTED = 100  # unreadable files, documents and rows that the manifest names
TRAIN, VAL, COPY = 0, 1, 2  # assignment of a document


@dataclass(frozen=True)
class Scan:
    """The result of one pass over the documents: sizes, hashes and assignment to the splits."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    assignment: np.ndarray  # (documents,) uint8: TRAIN, VAL or COPY (of an earlier document)
    ends: np.ndarray  # (readings,) int64: documents up to the end of each reading
    sources: np.ndarray  # (readings,) int64: index of each reading's source
    left_out: dict[str, int]  # documents left out, by reason
    unreadable: dict[str, Plain]  # number and bytes of unreadable files, documents and rows; messages of the first
    ids: dict[str, int]  # facts on the documents of token ids (`Vocabulary.seen`); empty if all are texts

    @property
    def source(self) -> np.ndarray:
        """Index of each document's source: (documents,)."""
        return np.repeat(self.sources, np.diff(self.ends, prepend=0))


@dataclass(frozen=True)
class Reading:
    """A source to read, or the split of a source that is held out."""

    index: int  # the source's place in `DataConfig.sources`
    source: Source
    held_out: bool
    spool: Path | None  # where the documents of a stream are kept after the first pass
    vocabulary: Vocabulary | None  # the ids that the tokenizer knows, for a source of ids


def build(data: DataConfig, spec: dict[str, Plain], target: Path, shown: Progress) -> None:
    """Build the store `target`, or finish an interrupted preparation.

    Raises:
        DataError: a source is too small, changed meanwhile or can't be read. Once the journal has an entry, what is done is kept for
            the next call.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir(exist_ok=True)
        made = _build_symbol_store(data, partial) if data.symbolic else _build_text_store(data, partial, shown)
        write_manifest(partial, spec | made)
        for path in (partial / SCAN, *partial.glob(f"{SPOOL}-*")):
            path.unlink(missing_ok=True)
        Journal(partial).remove()
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except (DataError, OSError) as error:
        # With documents on disk the next call continues: the cause may be a network or a full disk.
        if isinstance(error, Restart) or not Journal(partial).n_documents:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _build_text_store(data: DataConfig, partial: Path, shown: Progress) -> dict[str, Plain]:
    """Write all files of a store of text except the manifest, which is returned."""
    journal = Journal(partial)
    licences = [licence(weighted.source) for weighted in data.sources]  # first: the hub may be out of reach hours later
    tokenizer_origin = origin(data.tokenizer)
    scan = _scanned(data, journal, shown)
    kept = scan.assignment != COPY
    total = int(scan.n_bytes[kept].sum())
    end = data.tokenizer.end_of_text
    if not journal.holds(TOKENIZER):
        if not data.tokenizer.files:
            with shown.bytes("tokenizer", int(scan.n_bytes[scan.assignment == TRAIN].sum())) as advance:
                tokenizer = train_tokenizer(_training_texts(data, journal.folder, scan, advance), data.tokenizer)
        else:
            tokenizer = tokenizer_of(data.tokenizer)
        journal.keep(TOKENIZER, tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(partial / TOKENIZER, end)
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end)
    done, train, val = _writers(journal, size, end_id)
    with closing(train), closing(val):
        before = int(scan.n_bytes[:done][kept[:done]].sum())
        texts = ~np.array([isinstance(weighted.source, Tokens) for weighted in data.sources])[scan.source[done:]]
        workers = data.prepare_workers or default_workers(int(scan.n_bytes[done:][kept[done:] & texts].sum()))
        unsaved = 0
        with shown.bytes("encode", total, before) as advance:
            for batch in encode_all(_documents_from(data, journal.folder, scan, done), tokenizer, end, workers):
                in_val = np.repeat([document.held_out for document in batch.documents], batch.lengths)
                train.add(batch.tokens[~in_val])
                val.add(batch.tokens[in_val])
                n_bytes = sum(document.n_bytes for document in batch.documents)
                advance(n_bytes)
                unsaved += n_bytes
                if unsaved >= JOURNAL_BYTES and batch.documents[-1].ends:
                    journal.advance(batch.documents[-1].end, {"train": train, "val": val})
                    unsaved = 0
        splits, files = {}, write_file(partial / TOKENIZER, (partial / TOKENIZER).read_bytes())
        for name, kept_as, writer in (("train", TRAIN, train), ("val", VAL, val)):
            n_bytes = int(scan.n_bytes[scan.assignment == kept_as].sum())
            splits[name], written = writer.finish(n_bytes, _source_counts(labels(data), licences, scan, kept_as))
            splits[name]["unigram_cross_entropy"] = unigram_cross_entropy(writer.counts, train.counts)
            files |= written
        counts = train.counts + val.counts
    bytes_per_token = token_bytes(tokenizer)
    exact = bytes_per_token is not None and int(counts @ bytes_per_token.astype(np.int64)) == total
    if not exact:
        bytes_per_token = np.full(size, total / max(1, counts.sum() - counts[end_id]), np.float32)
        bytes_per_token[end_id] = 0
    return {
        "licence": "; ".join(dict.fromkeys(licences)),
        "left_out": scan.left_out | {"copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.unreadable,
        **({"ids": scan.ids} if scan.ids else {}),
        **({"tokenizer_origin": tokenizer_origin} if tokenizer_origin else {}),
        "vocab_size": size,
        "end_of_text": {"token": end, "id": end_id},
        "dtype": token_dtype(size),
        "shard_tokens": train.shard_tokens,
        "token_bytes": "exact" if exact else "corpus mean",
        "splits": splits,
        "files": files | write_file(partial / TOKEN_BYTES, npy(bytes_per_token)),
    }


def _build_symbol_store(data: DataConfig, partial: Path) -> dict[str, Plain]:
    """The same for a store of tasks over symbols, whose unigram cross-entropy is that of the answers."""
    tasks, terms = [weighted.task for weighted in data.tasks], "none needed: made up"
    for task in tasks:
        try:
            for subset in SUBSETS:
                check_task(task, STORE_SEED, data.seq_len, subset, 1)
        except TaskError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; change data.seq_len or the task's options") from None
    tokenizer = symbol_tokenizer(tasks)
    size = vocab_size(tokenizer)
    files, splits = write_file(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode()), {}
    shown = {name: symbol_sequences(tasks, subset, data.seq_len) for name, subset in (("train", "train"), ("val", "test"))}
    counts = {name: answer_counts(sequences, size) for name, sequences in shown.items()}
    for name, sequences in shown.items():
        n_bytes = SHOWN * (data.seq_len + 1)  # bytes of each task, one per symbol
        with closing(SplitWriter(partial, name, size, size - 1)) as writer:
            for sequence in sequences:
                writer.add(np.array([size - 1, *sequence.tokens], writer.dtype))
            sources = [SourceCounts(task.name, terms, 0, SHOWN, n_bytes) for task in tasks]
            splits[name], written = writer.finish(n_bytes * len(tasks), sources)
        splits[name]["unigram_cross_entropy"] = unigram_cross_entropy(counts[name], counts["train"])
        files |= written
    return {
        "licence": terms,
        "left_out": {},
        "unreadable": {"count": 0, "bytes": 0, "first": []},
        "vocab_size": size,
        "end_of_text": {"token": END_OF_TEXT, "id": size - 1},
        "dtype": token_dtype(size),
        "shard_tokens": writer.shard_tokens,
        "token_bytes": "one a symbol",
        "splits": splits,
        "files": files | write_file(partial / TOKEN_BYTES, npy(np.ones(size, np.float32))),
    }


def _source_counts(names: list[str], licences: list[str], scan: Scan, assignment: int) -> list[SourceCounts]:
    """The share of each source in a split, without the tokens."""
    chosen = scan.assignment == assignment
    documents = np.bincount(scan.source[chosen], minlength=len(names))
    n_bytes = np.bincount(scan.source[chosen], scan.n_bytes[chosen], len(names))
    return [
        SourceCounts(name, terms, 0, int(documents[n]), int(n_bytes[n]))
        for n, (name, terms) in enumerate(zip(names, licences, strict=True))
    ]


def labels(data: DataConfig) -> list[str]:
    """A name for each source, all different."""
    names: list[str] = []
    for weighted in data.sources:
        name, number = label(weighted.source), 2
        while name in names:
            name, number = f"{label(weighted.source)}-{number}", number + 1
        names.append(name)
    return names


# ---------------------------------------------------------------- reading the sources


def _writers(journal: Journal, vocab_size: int, end_of_text: int) -> tuple[int, SplitWriter, SplitWriter]:
    """The number of documents that are done, and writers that continue the two splits; from the start if they were damaged since."""
    train, val = (journal.resumed(name, vocab_size, end_of_text) for name in SPLITS)
    if train and val:
        return journal.n_documents, train, val
    for writer in (train, val):
        if writer:
            writer.close()
    return 0, *(SplitWriter(journal.folder, name, vocab_size, end_of_text) for name in SPLITS)


def _scanned(data: DataConfig, journal: Journal, shown: Progress) -> Scan:
    """The scan of an interrupted preparation, or a new one, which is saved."""
    if not journal.holds(SCAN):
        scan = _scan(data, journal.folder, shown)
        buffer = io.BytesIO()
        facts = np.frombuffer(json.dumps([scan.left_out, scan.unreadable, scan.ids]).encode(), np.uint8)
        np.savez(
            buffer, hashes=scan.hashes, n_bytes=scan.n_bytes, assignment=scan.assignment, ends=scan.ends, sources=scan.sources, facts=facts
        )
        journal.keep(SCAN, buffer.getvalue())
    with np.load(journal.folder / SCAN) as kept:
        left_out, unreadable, *ids = json.loads(kept["facts"].tobytes())  # an earlier version kept nothing of ids
        arrays = (kept[name] for name in ("hashes", "n_bytes", "assignment", "ends", "sources"))
        return Scan(*arrays, left_out, unreadable, ids[0] if ids else {})


def _scan(data: DataConfig, partial: Path, shown: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents with the smallest hashes of each source.

    Equal texts have equal hashes: a document that is held out of one source is in the training split of none. A source with a
    validation split of its own has that held out, whole; without `data.deduplicate`, its training split stays whole, too.
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

    def leave_out(reason: str) -> None:
        left_out[reason] += 1

    with shown.bytes("scan", None) as advance:
        readings = _readings(data, partial)
        for reading in readings:
            if reading.spool:
                reading.spool.unlink(missing_ok=True)
            accepted = _accepted(data, reading, skip, leave_out)
            for _, digest, n_bytes in spooled(accepted, reading.spool) if reading.spool else accepted:
                hashes.append(digest)
                sizes.append(n_bytes)
                advance(n_bytes)
            ends.append(len(hashes))
    where = ", ".join(labels(data))
    if not hashes:
        raise DataError(f"data.source: {where}: holds no documents{_in_words(left_out, unreadable)}")
    hash_array, size_array, end_array = np.array(hashes, np.uint64), np.array(sizes, np.int64), np.array(ends, np.int64)
    source_array = np.array([reading.index for reading in readings])
    assignment = np.full(len(hash_array), TRAIN, np.uint8)
    own = np.repeat([reading.held_out for reading in readings], np.diff(end_array, prepend=0))  # validation splits, which stay whole
    if data.deduplicate:
        candidates = np.flatnonzero(~own)
        first = candidates[np.unique(hash_array[candidates], return_index=True)[1]]
        assignment[:] = COPY
        assignment[first[~np.isin(hash_array[first], hash_array[own])]] = TRAIN
    assignment[own] = VAL
    with_own = {reading.index for reading in readings if reading.held_out}
    spans = [slice(*edge) for edge, reading in zip(pairwise([0, *ends]), readings, strict=True) if reading.index not in with_own]
    by_source = [_bytes_by_hash(hash_array[one][assignment[one] == TRAIN], size_array[one][assignment[one] == TRAIN]) for one in spans]
    assignment[np.isin(hash_array, _held_out(by_source, data.val_fraction)) & (assignment == TRAIN)] = VAL
    if not (assignment == VAL).any() or not (assignment == TRAIN).any():
        is_text = any(weighted.source.name == Files.name for weighted in data.sources)
        split = ", or set data.source.separator to split .txt files into documents" if is_text else ""
        copies = {"copies": int((assignment == COPY).sum())}
        raise DataError(
            f"data.source: {where}: {len(hashes)} document(s), none of which can be held out{_in_words(left_out | copies, unreadable)}; "
            f"two different ones of a source are needed: add text{split}"
        )
    ids = next((reading.vocabulary.seen for reading in readings if reading.vocabulary), {})
    return Scan(hash_array, size_array, assignment, end_array, source_array, left_out, unreadable, ids)


def _bytes_by_hash(hashes: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct hashes in order, and the bytes of text with each: those of a document, or of all its copies."""
    different, which = np.unique(hashes, return_inverse=True)
    return different, np.bincount(which, sizes)


def _held_out(sources: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """The hashes to hold out: each source's smallest, with at least `fraction` of its text, but never all of it.

    A hash with more than half of a source's text (or more than `fraction`, if that is larger) stays in training; then at most half of
    the source's other text is held out.

    Args:
        sources: the result of `_bytes_by_hash` for each source.
    """
    if not sources:
        return np.empty(0, np.uint64)
    large = np.concatenate([hashes[sizes > max(fraction, 0.5) * sizes.sum()] for hashes, sizes in sources])
    return np.concatenate([_smallest(hashes, sizes, np.isin(hashes, large), fraction) for hashes, sizes in sources])


def _smallest(hashes: np.ndarray, sizes: np.ndarray, large: np.ndarray, fraction: float) -> np.ndarray:
    """The smallest of a source's hashes, with at least `fraction` of its text; none that is `large`, and never all."""
    wanted, most = fraction * sizes.sum(), len(hashes) - 1
    if large.any():
        hashes, sizes = hashes[~large], sizes[~large]
        wanted, most = min(wanted, sizes.sum() / 2), len(hashes)
    return hashes[: max(0, min(most, 1 + np.searchsorted(np.cumsum(sizes), wanted)))]


def _in_words(left_out: dict[str, int], unreadable: dict[str, Plain]) -> str:
    counts = {**left_out, "unreadable": unreadable["count"]}
    words = {"copies": "copies of others"}
    text = ", ".join(f"{count:,} {words.get(reason, reason)}" for reason, count in counts.items() if count)
    return f" ({text})" if text else ""


def _readings(data: DataConfig, partial: Path) -> list[Reading]:
    """The sources in order, each followed by its own validation split, if it has one."""
    found: list[Reading] = []
    any_ids = any(isinstance(weighted.source, Tokens) for weighted in data.sources)
    vocabulary = Vocabulary(data.tokenizer) if any_ids else None
    for index, weighted in enumerate(data.sources):
        for source, is_held_out in ((weighted.source, False), (held_out(weighted.source), True)):
            if source:
                spool = partial / f"{SPOOL}-{len(found)}" if streamed(source) else None
                found.append(Reading(index, source, is_held_out, spool, vocabulary if isinstance(source, Tokens) else None))
    return found


def _accepted(
    data: DataConfig, reading: Reading, skip: OnError, leave_out: Callable[[str], None]
) -> Iterator[tuple[str | np.ndarray, int, int]]:
    """(text or ids, 64 bits of its hash, UTF-8 bytes) of a source's documents, without blank, too short and too long ones."""
    spool, vocabulary = reading.spool, reading.vocabulary
    for document in read_spool(spool) if spool and spool.exists() else documents(reading.source, Path(data.root), skip, vocabulary):
        content = document.data if vocabulary else document.encode()
        n_bytes = vocabulary.n_bytes(document) if vocabulary else len(content)
        digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
        del content  # a long document is in memory once
        if not n_bytes or (not vocabulary and document.isspace()):
            leave_out("blank")
        elif n_bytes < data.min_document_bytes:
            leave_out("short")
        elif data.max_document_bytes is not None and n_bytes > data.max_document_bytes:
            leave_out("long")
        else:
            yield document, digest, n_bytes


def _documents_from(data: DataConfig, partial: Path, scan: Scan, done: int) -> Iterator[Document]:
    """The scan's documents after the first `done`, without copies. Raises DataError if the sources changed since the scan."""

    def skip(error: Unreadable) -> None:
        if data.on_error == "fail":
            raise error

    seen = 0
    for reading, end in zip(_readings(data, partial), scan.ends, strict=True):
        for content, digest, n_bytes in _accepted(data, reading, skip, lambda reason: None):
            if seen == end or digest != scan.hashes[seen]:
                raise _changed(data, seen)
            seen += 1
            if seen > done and scan.assignment[seen - 1] != COPY:
                yield Document(content, n_bytes, bool(scan.assignment[seen - 1] == VAL), seen)
        if seen != end:
            raise _changed(data, seen)


def _changed(data: DataConfig, seen: int) -> Restart:
    return Restart(f"data.source: {', '.join(labels(data))}: changed while it was read (document {seen + 1}); run again")


def _training_texts(data: DataConfig, partial: Path, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for document in _documents_from(data, partial, scan, 0):
        if not document.held_out:
            advance(document.n_bytes)
            yield from pieces(document.content)
