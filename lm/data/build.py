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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Files, Source, Tokens
from lm.data.encoding import Document, default_workers, encode_all, pieces
from lm.data.sources import documents, labels, reader
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
from lm.data.tasks import STORE_SEED, SUBSETS, TaskError, check_task, example, symbol_tokenizer
from lm.data.text_files import Unreadable
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
            content = json.loads((folder / JOURNAL).read_bytes())
            if isinstance(content["entry"], dict) and plain_sha256(content["entry"]) == content["sha256"]:
                self.entry = content["entry"]
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

    def writers(self, vocab_size: int, end_of_text: int) -> tuple[int, dict[str, SplitWriter]]:
        """The number of documents done, and writers that continue the splits; from the start if files are not those of `advance`."""
        resumed: dict[str, SplitWriter] = {}
        for name in SPLITS:
            progress = self.entry.get(name)
            # Too few tokens, ids beyond the vocabulary, or no such file.
            with suppress(EOFError, ValueError, FileNotFoundError, KeyError, TypeError):
                resumed[name] = SplitWriter(self.folder, name, vocab_size, end_of_text, progress["n_tokens"])
        if len(resumed) == len(SPLITS) and all(writer.progress() == self.entry[name] for name, writer in resumed.items()):
            return self.n_documents, resumed
        for writer in resumed.values():
            writer.close()
        return 0, {name: SplitWriter(self.folder, name, vocab_size, end_of_text) for name in SPLITS}

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
SHOWN = 64  # sequences of each task in each split of a store without text
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


ARRAYS = tuple(each.name for each in fields(Scan)[:5])


class LeftOut:
    """Counts of what a pass over the documents leaves out, by reason, and of what can't be read, which `data.on_error` may refuse."""

    def __init__(self, on_error: str):
        self.fails = on_error == "fail"
        self.by_reason = {"blank": 0, "short": 0, "long": 0}
        self.unreadable: dict[str, Plain] = {"count": 0, "bytes": 0, "first": []}

    def skip(self, error: Unreadable) -> None:
        """Count a file, document or row that can't be read. Raises it if nothing may be left out."""
        if self.fails:
            raise error
        self.unreadable["count"] += 1
        self.unreadable["bytes"] += error.n_bytes or 0
        if len(self.unreadable["first"]) < LISTED:
            self.unreadable["first"].append(str(error))

    def words(self, copies: int = 0) -> str:
        """All counts above 0, in brackets; empty if there are none."""
        counts = {**self.by_reason, "copies of others": copies, "unreadable": self.unreadable["count"]}
        text = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        return f" ({text})" if text else ""


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
        facts = _build_symbol_store(data, partial) if data.symbolic else _build_text_store(data, partial, shown)
        write_manifest(partial, spec | facts)
        for path in (partial / SCAN, partial / JOURNAL, *partial.glob(f"{SPOOL}-*"), *partial.glob("*.new")):
            path.unlink(missing_ok=True)
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
    licences = [reader(each.source).licence(each.source) for each in data.sources]  # first: the hub may be out of reach hours later
    tokenizer_origin = origin(data.tokenizer)
    scan = _scanned(data, journal, shown)
    kept = scan.assignment != COPY
    total = int(scan.n_bytes[kept].sum())
    end = data.tokenizer.end_of_text
    if not journal.holds(TOKENIZER):
        if data.tokenizer.files:
            tokenizer = tokenizer_of(data.tokenizer)
        else:
            with shown.bytes("tokenizer", int(scan.n_bytes[scan.assignment == TRAIN].sum())) as advance:
                tokenizer = train_tokenizer(_training_texts(data, journal.folder, scan, advance), data.tokenizer)
        journal.keep(TOKENIZER, tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(partial / TOKENIZER, end)
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end)
    done, writers = journal.writers(size, end_id)
    with ExitStack() as files:
        for writer in writers.values():
            files.callback(writer.close)
        before = int(scan.n_bytes[:done][kept[:done]].sum())
        texts = ~np.array([isinstance(each.source, Tokens) for each in data.sources])[scan.source[done:]]
        workers = data.prepare_workers or default_workers(int(scan.n_bytes[done:][kept[done:] & texts].sum()))
        unsaved = 0
        with shown.bytes("encode", total, before) as advance:
            for batch in encode_all(_documents_from(data, journal.folder, scan, done), tokenizer, end, workers):
                in_val = np.repeat([document.held_out for document in batch.documents], batch.lengths)
                writers["train"].add(batch.tokens[~in_val])
                writers["val"].add(batch.tokens[in_val])
                n_bytes = sum(document.n_bytes for document in batch.documents)
                advance(n_bytes)
                unsaved += n_bytes
                if unsaved >= JOURNAL_BYTES and batch.documents[-1].ends:
                    journal.advance(batch.documents[-1].end, writers)
                    unsaved = 0
        counts = {name: writer.counts for name, writer in writers.items()}
        all_counts, bytes_per_token = sum(counts.values()), token_bytes(tokenizer)
        exact = bytes_per_token is not None and int(all_counts @ bytes_per_token.astype(np.int64)) == total
        if not exact:
            bytes_per_token = np.full(size, total / max(1, all_counts.sum() - all_counts[end_id]), np.float32)
            bytes_per_token[end_id] = 0
        sources = {name: _source_counts(labels(data), licences, scan, place) for name, place in (("train", TRAIN), ("val", VAL))}
        facts = _finished(partial, writers, sources, counts, end, bytes_per_token, "exact" if exact else "corpus mean")
    return {
        "licence": "; ".join(dict.fromkeys(licences)),
        "left_out": scan.left_out | {"copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.unreadable,
        **({"ids": scan.ids} if scan.ids else {}),
        **({"tokenizer_origin": tokenizer_origin} if tokenizer_origin else {}),
        **facts,
    }


def _build_symbol_store(data: DataConfig, partial: Path) -> dict[str, Plain]:
    """The same for a store of tasks over symbols, whose unigram cross-entropy is that of the answers."""
    tasks, terms, length = [weighted.task for weighted in data.tasks], "none needed: made up", data.seq_len
    for task in tasks:
        try:
            for subset in SUBSETS:
                check_task(task, STORE_SEED, length, subset, 1)
        except TaskError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; change data.seq_len or the task's options") from None
    tokenizer = symbol_tokenizer(tasks)
    size = vocab_size(tokenizer)
    write_file(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    sources, counts = [SourceCounts(task.name, terms, 0, SHOWN, SHOWN * (length + 1)) for task in tasks], {}  # a byte a symbol
    with ExitStack() as files:
        writers = {name: files.enter_context(closing(SplitWriter(partial, name, size, size - 1))) for name in SPLITS}
        for subset, (name, writer) in zip(SUBSETS, writers.items(), strict=True):
            sequences = [example(task, STORE_SEED, index, length, subset) for task in tasks for index in range(SHOWN)]
            for sequence in sequences:
                writer.add(np.array([size - 1, *sequence.tokens], writer.dtype))
            counts[name] = np.bincount(np.concatenate([each.tokens[1:][each.answers] for each in sequences]), minlength=size)
        shared = dict.fromkeys(SPLITS, sources)
        facts = _finished(partial, writers, shared, counts, END_OF_TEXT, np.ones(size, np.float32), "one a symbol")
    return {"licence": terms, "left_out": {}, "unreadable": {"count": 0, "bytes": 0, "first": []}, **facts}


def _finished(
    partial: Path,
    writers: dict[str, SplitWriter],
    sources: dict[str, list[SourceCounts]],
    counts: dict[str, np.ndarray],
    end: str,
    bytes_per_token: np.ndarray,
    origin: str,
) -> dict[str, Plain]:
    """Finish the splits and write the last files: what the manifest says of vocabulary, splits and files.

    counts: how often each token is predicted in each split, (V,); origin: where `bytes_per_token` come from.
    """
    splits, files, train = {}, write_file(partial / TOKENIZER, (partial / TOKENIZER).read_bytes()), writers["train"]
    for name, writer in writers.items():
        splits[name], written = writer.finish(sources[name])
        splits[name]["unigram_cross_entropy"] = unigram_cross_entropy(counts[name], counts["train"])
        files |= written
    return {
        "vocab_size": len(train.counts),
        "end_of_text": {"token": end, "id": train.end_of_text},
        "dtype": token_dtype(len(train.counts)),
        "shard_tokens": train.shard_tokens,
        "token_bytes": origin,
        "splits": splits,
        "files": files | write_file(partial / TOKEN_BYTES, npy(bytes_per_token)),
    }


def _source_counts(names: list[str], licences: list[str], scan: Scan, assignment: int) -> list[SourceCounts]:
    """Counts of each source in a split, without the tokens."""
    source = scan.source[scan.assignment == assignment]
    documents = np.bincount(source, minlength=len(names)).tolist()
    n_bytes = np.bincount(source, scan.n_bytes[scan.assignment == assignment], len(names)).astype(int).tolist()
    return [SourceCounts(*facts) for facts in zip(names, licences, [0] * len(names), documents, n_bytes, strict=True)]


# ---------------------------------------------------------------- reading the sources


def _scanned(data: DataConfig, journal: Journal, shown: Progress) -> Scan:
    """The scan of an interrupted preparation, or a new one, which is saved."""
    if not journal.holds(SCAN):
        scan = _scan(data, journal.folder, shown)
        buffer = io.BytesIO()
        facts = np.frombuffer(json.dumps([scan.left_out, scan.unreadable, scan.ids]).encode(), np.uint8)
        np.savez(buffer, **{name: getattr(scan, name) for name in ARRAYS}, facts=facts)
        journal.keep(SCAN, buffer.getvalue())
    with np.load(journal.folder / SCAN) as kept:
        left_out, unreadable, *ids = json.loads(kept["facts"].tobytes())  # an earlier version kept nothing of ids
        return Scan(*(kept[name] for name in ARRAYS), left_out, unreadable, ids[0] if ids else {})


def _scan(data: DataConfig, partial: Path, shown: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents with the smallest hashes of each source.

    Equal texts have equal hashes: a document that is held out of one source is in the training split of none. A source with a
    validation split of its own has that held out, whole; without `data.deduplicate`, its training split stays whole, too. A text that is
    read for evaluation alone (`data.val_fraction` is 1, which no run can have) is held out whole.
    """
    hashes, sizes, ends, left_out = array("Q"), array("q"), [], LeftOut(data.on_error)
    with shown.bytes("scan", None) as advance:
        readings = _readings(data, partial)
        for reading in readings:
            if reading.spool:
                reading.spool.unlink(missing_ok=True)
            accepted = _accepted(data, reading, left_out)
            for _, digest, n_bytes in spooled(accepted, reading.spool) if reading.spool else accepted:
                hashes.append(digest)
                sizes.append(n_bytes)
                advance(n_bytes)
            ends.append(len(hashes))
    where = ", ".join(labels(data))
    if not hashes:
        raise DataError(f"data.source: {where}: holds no documents{left_out.words()}")
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
    training = [(hash_array[part][assignment[part] == TRAIN], size_array[part][assignment[part] == TRAIN]) for part in spans]
    assignment[np.isin(hash_array, _held_out(training, data.val_fraction)) & (assignment == TRAIN)] = VAL
    if data.val_fraction == 1:
        assignment[assignment == TRAIN] = VAL
    elif not (assignment == VAL).any() or not (assignment == TRAIN).any():
        is_text = any(weighted.source.name == Files.name for weighted in data.sources)
        split = ", or set data.source.separator to split .txt files into documents" if is_text else ""
        words = left_out.words(int((assignment == COPY).sum()))
        raise DataError(
            f"data.source: {where}: {len(hashes)} document(s), none of which can be held out{words}; "
            f"two different ones of a source are needed: add text{split}"
        )
    ids = next((reading.vocabulary.seen for reading in readings if reading.vocabulary), {})
    return Scan(hash_array, size_array, assignment, end_array, source_array, left_out.by_reason, left_out.unreadable, ids)


def _held_out(sources: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """The hashes to hold out: each source's smallest, with at least `fraction` of its text, but never all of it.

    A hash with more than half of a source's text (or more than `fraction`, if that is larger) stays in training; then at most half of
    the source's other text is held out.

    Args:
        sources: the hashes and bytes of each source's documents.
    """
    by_hash, large, smallest = [], [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for hashes, sizes in sources:
        different, which = np.unique(hashes, return_inverse=True)
        by_hash.append((different, np.bincount(which, sizes)))  # bytes of a document, or of all its copies
        large.append(different[by_hash[-1][1] > max(fraction, 0.5) * sizes.sum()])
    for hashes, sizes in by_hash:
        wanted, most, is_small = fraction * sizes.sum(), len(hashes) - 1, ~np.isin(hashes, np.concatenate(large))
        if not is_small.all():
            hashes, sizes = hashes[is_small], sizes[is_small]
            wanted, most = min(wanted, sizes.sum() / 2), len(hashes)
        smallest.append(hashes[: max(0, min(most, 1 + np.searchsorted(np.cumsum(sizes), wanted)))])
    return np.concatenate(smallest)


def _readings(data: DataConfig, partial: Path) -> list[Reading]:
    """The sources in order, each followed by its own validation split, if it has one."""
    readings: list[Reading] = []
    any_ids = any(isinstance(weighted.source, Tokens) for weighted in data.sources)
    vocabulary = Vocabulary(data.tokenizer) if any_ids else None
    for index, weighted in enumerate(data.sources):
        for source, is_held_out in ((weighted.source, False), (reader(weighted.source).held_out(weighted.source), True)):
            if source:
                spool = partial / f"{SPOOL}-{len(readings)}" if reader(source).streamed(source) else None
                readings.append(Reading(index, source, is_held_out, spool, vocabulary if isinstance(source, Tokens) else None))
    return readings


def _accepted(data: DataConfig, reading: Reading, left_out: LeftOut) -> Iterator[tuple[str | np.ndarray, int, int]]:
    """(text or ids, 64 bits of its hash, UTF-8 bytes) of a source's documents, without blank, too short and too long ones."""
    spool, vocabulary = reading.spool, reading.vocabulary
    for document in (
        read_spool(spool) if spool and spool.exists() else documents(reading.source, Path(data.root), left_out.skip, vocabulary)
    ):
        content = document.data if vocabulary else document.encode()
        n_bytes = vocabulary.n_bytes(document) if vocabulary else len(content)
        digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
        del content  # a long document is in memory once
        if not n_bytes or (not vocabulary and document.isspace()):
            left_out.by_reason["blank"] += 1
        elif n_bytes < data.min_document_bytes:
            left_out.by_reason["short"] += 1
        elif data.max_document_bytes is not None and n_bytes > data.max_document_bytes:
            left_out.by_reason["long"] += 1
        else:
            yield document, digest, n_bytes


def _documents_from(data: DataConfig, partial: Path, scan: Scan, done: int) -> Iterator[Document]:
    """The scan's documents after the first `done`, without copies. Raises DataError if the sources changed since the scan."""
    seen = 0
    for reading, end in zip(_readings(data, partial), scan.ends, strict=True):
        for content, digest, n_bytes in _accepted(data, reading, LeftOut(data.on_error)):
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
