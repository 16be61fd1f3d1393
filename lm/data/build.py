"""Builds a token store: scan, tokenizer, tokens, manifest, in a hidden folder that gets the store's name at the end.

An interrupted preparation leaves the scan, the tokenizer, the tokens and a journal of the number of complete documents. The same
preparation then continues from these, and the store has the same bytes as after a preparation without interruption.
"""

import io
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import chain, pairwise, product, zip_longest
from pathlib import Path

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Files, Source, Tokens
from lm.config.task_config import Task
from lm.data.encoding import Document, default_workers, encode_all, pieces, short_words
from lm.data.sources import labels, reader
from lm.data.store import MANIFEST, SPLITS, TOKENIZER, SourceCounts, SplitWriter, finish_store, write_file, write_whole
from lm.data.tasks import STORE_SEED, SUBSETS, Subset, TaskError, check_task, example, symbol_tokenizer
from lm.data.text_files import Unreadable
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import load_tokenizer, origin, token_bytes, tokenizer_of, train_tokenizer, vocab_size
from lm.errors import DataError, RunError, one_line
from lm.files import file_sha256, json_bytes, read_sealed, sealed, sync_folder
from lm.progress import Progress
from lm.schema import Plain

JOURNAL = "journal.json"


class Journal:
    """The record of the files and documents that a preparation has completed in `folder`; empty if its file is missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.entry: dict[str, Plain] = {}
        with suppress(RunError):
            self.entry = read_sealed(folder / JOURNAL)

    @property
    def n_documents(self) -> int:
        """The number of documents, from the first on, whose tokens are on disk."""
        return self.entry.get("documents", 0)

    def holds(self, name: str) -> bool:
        """True if the file `name` has the content that `keep` wrote."""
        path = self.folder / name
        return path.is_file() and self.entry.get(name) == file_sha256(path)

    def keep(self, name: str, content: bytes) -> None:
        write_whole(self.folder / name, content)
        self._write({name: file_sha256(self.folder / name)})

    def advance(self, n_documents: int, writers: dict[str, SplitWriter]) -> None:
        """Sync the splits that `writers` write, and record that the first `n_documents` documents are in them on disk."""
        for writer in writers.values():
            writer.sync()
        self._write({"documents": n_documents} | {name: writer.progress() for name, writer in writers.items()})

    def writers(self, vocab_size: int, end_of_text: int) -> tuple[int, dict[str, SplitWriter]]:
        """The number of documents on disk, and writers that continue the splits; 0 and new splits if the files differ from the journal."""
        writers: dict[str, SplitWriter] = {}
        for name in SPLITS:
            progress = self.entry.get(name)
            # The files hold too few tokens or ids beyond the vocabulary, or a file or its entry is missing.
            with suppress(EOFError, ValueError, FileNotFoundError, KeyError, TypeError):
                writers[name] = SplitWriter(self.folder, name, vocab_size, end_of_text, progress["n_tokens"])
        if len(writers) == len(SPLITS) and all(writer.progress() == self.entry[name] for name, writer in writers.items()):
            return self.n_documents, writers
        for writer in writers.values():
            writer.close()
        return 0, {name: SplitWriter(self.folder, name, vocab_size, end_of_text) for name in SPLITS}

    def _write(self, changes: dict[str, Plain]) -> None:
        self.entry |= changes
        write_whole(self.folder / JOURNAL, json_bytes(sealed(self.entry)))


class Restart(DataError):
    """An interrupted preparation that can't be continued: `build` deletes its folder, and the next call starts again."""


def write_spool(texts: Iterator[tuple[str, int, int]], path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the items of `texts`, and write their first fields, the texts, to `path`, compressed. The file appears after the last item."""
    import pyarrow

    new_path = path.with_name(f"{path.name}.new")
    with pyarrow.OSFile(os.fsencode(new_path), "wb") as disk_file, pyarrow.CompressedOutputStream(disk_file, "zstd") as file:
        for item in texts:
            file.write(json.dumps(item[0], ensure_ascii=False).encode())
            file.write(b"\n")
            yield item
    os.replace(new_path, path)


def read_spool(path: Path) -> Iterator[str]:
    """The texts that `write_spool` wrote. Raises Restart if the file is damaged."""
    import pyarrow

    try:
        with pyarrow.OSFile(os.fsencode(path)) as disk_file, pyarrow.CompressedInputStream(disk_file, "zstd") as file:
            yield from map(json.loads, io.BufferedReader(file))
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise Restart(f"{path}: can't be read (damaged?): {one_line(error)}; run again") from None


# ---------------------------------------------------------------- building


SCAN, SPOOL = "scan.npz", "spool"
JOURNAL_BYTES = 64 << 20  # bytes of text between entries in the journal
SEQUENCES = 64  # sequences of each task in each split of a store without text
ANSWERS_A_SYMBOL, MOST_COUNTED = 16, 8192  # answers are counted up to so many for each symbol, or so many sequences of a task
MOST_LISTED = 100  # unreadable files, documents and rows that the manifest names
TRAIN, VAL, COPY = 0, 1, 2  # assignment of a document


@dataclass(frozen=True)
class Scan:
    """The result of one pass over the documents: sizes, hashes and assignment to the splits."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    assignment: np.ndarray  # (documents,) uint8: TRAIN, VAL or COPY (left out, as another document has the same content)
    ends: np.ndarray  # (readings,) int64: number of documents up to the end of each reading
    sources: np.ndarray  # (readings,) int64: index of each reading's source
    left_out: dict[str, int]  # number of documents left out, by reason
    unreadable: dict[str, Plain]  # number and bytes of unreadable files, documents and rows; messages of the first
    ids: dict[str, int]  # facts on documents of token ids (`Vocabulary.seen`); empty if all documents are texts

    @property
    def source(self) -> np.ndarray:
        """Index of each document's source: (documents,)."""
        return np.repeat(self.sources, np.diff(self.ends, prepend=0))


ARRAYS = tuple(field.name for field in fields(Scan)[:5])


class OmissionCounts:
    """Counts of the documents that a pass leaves out, by reason, and of what can't be read; `on_error`: the value of `data.on_error`."""

    def __init__(self, on_error: str):
        self.fails = on_error == "fail"
        self.by_reason = {"blank": 0, "short": 0, "long": 0}
        self.unreadable: dict[str, Plain] = {"count": 0, "bytes": 0, "first": []}

    def skip(self, error: Unreadable) -> None:
        """Count a file, document or row that can't be read. Raises `error` if `data.on_error` is `fail`."""
        if self.fails:
            raise error
        self.unreadable["count"] += 1
        self.unreadable["bytes"] += error.n_bytes or 0
        if len(self.unreadable["first"]) < MOST_LISTED:
            self.unreadable["first"].append(str(error))

    def words(self, copies: int = 0) -> str:
        """A list of all counts above 0, in brackets; empty if there are none. `copies`: number of documents left out as copies."""
        counts = {**self.by_reason, "copies of others": copies, "unreadable": self.unreadable["count"]}
        text = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        return f" ({text})" if text else ""


@dataclass(frozen=True)
class Reading:
    """A source to read, or the validation split of a source."""

    index: int  # the source's index in `DataConfig.sources`
    source: Source
    held_out: bool
    spool: Path | None  # for a streamed source, the file that keeps its documents after the first pass
    vocabulary: Vocabulary | None  # for a source of token ids, the ids that the tokenizer has


def build(data: DataConfig, spec: dict[str, Plain], target: Path, progress: Progress) -> None:
    """Build the store in the folder `target`, or finish an interrupted preparation. `spec` becomes the first part of the manifest.

    Raises:
        DataError: a source is too small, changed meanwhile or can't be read. If the journal counts documents, the hidden folder stays
            on disk for the next call.
    """
    folder = target.with_name(f".{target.name}.partial")
    try:
        folder.mkdir(exist_ok=True)
        facts = _build_symbol_store(data, folder) if data.symbolic else _build_text_store(data, folder, progress)
        write_file(folder / MANIFEST, json_bytes(sealed(spec | facts)))
        for path in (folder / SCAN, folder / JOURNAL, *folder.glob(f"{SPOOL}-*"), *folder.glob("*.new")):
            path.unlink(missing_ok=True)
        sync_folder(folder)
        os.rename(folder, target)
        sync_folder(target.parent)
    except Exception as error:
        # With documents on disk the next call continues: the cause of the error may be a network or a full disk.
        if isinstance(error, Restart) or not Journal(folder).n_documents:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _build_text_store(data: DataConfig, folder: Path, progress: Progress) -> dict[str, Plain]:
    """Write all files of a store of text except the manifest. Returns the manifest's entries on them."""
    journal = Journal(folder)
    # The licences first: the hub may be out of reach hours later.
    licences = [reader(weighted.source).licence(weighted.source) for weighted in data.sources]
    tokenizer_origin = origin(data.tokenizer)
    scan = _load_or_scan(data, journal, progress)
    is_stored = scan.assignment != COPY
    total = int(scan.n_bytes[is_stored].sum())
    end_of_text = data.tokenizer.end_of_text
    if not journal.holds(TOKENIZER):
        if data.tokenizer.files:
            tokenizer = tokenizer_of(data.tokenizer)
        else:
            with progress.bytes("tokenizer", int(scan.n_bytes[scan.assignment == TRAIN].sum())) as advance:
                tokenizer = train_tokenizer(_training_texts(data, folder, scan, advance), data.tokenizer)
        journal.keep(TOKENIZER, tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(folder / TOKENIZER, end_of_text)
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end_of_text)
    n_encoded, writers = journal.writers(size, end_id)
    with ExitStack() as stack:
        for writer in writers.values():
            stack.callback(writer.close)
        encoded_bytes = int(scan.n_bytes[:n_encoded][is_stored[:n_encoded]].sum())
        is_text = ~np.array([isinstance(weighted.source, Tokens) for weighted in data.sources])[scan.source[n_encoded:]]
        workers = data.prepare_workers or default_workers(int(scan.n_bytes[n_encoded:][is_stored[n_encoded:] & is_text].sum()))
        unsaved_bytes = 0
        with progress.bytes("encode", total, encoded_bytes) as advance:
            for batch in encode_all(_documents_from(data, folder, scan, n_encoded), tokenizer, end_of_text, workers):
                in_val = np.repeat([document.held_out for document in batch.documents], batch.lengths)
                writers["train"].add(batch.tokens[~in_val])
                writers["val"].add(batch.tokens[in_val])
                n_bytes = sum(document.n_bytes for document in batch.documents)
                advance(n_bytes)
                unsaved_bytes += n_bytes
                if unsaved_bytes >= JOURNAL_BYTES and batch.documents[-1].ends:
                    journal.advance(batch.documents[-1].end, writers)
                    unsaved_bytes = 0
        counts = {name: writer.counts for name, writer in writers.items()}
        all_counts, bytes_per_token = sum(counts.values()), token_bytes(tokenizer)
        exact = bytes_per_token is not None and int(all_counts @ bytes_per_token.astype(np.int64)) == total
        if not exact:
            bytes_per_token = np.full(size, total / max(1, all_counts.sum() - all_counts[end_id]), np.float32)
            bytes_per_token[end_id] = 0
        sources = {name: _source_counts(labels(data), licences, scan, assignment) for name, assignment in (("train", TRAIN), ("val", VAL))}
        facts = finish_store(folder, writers, sources, counts, end_of_text, bytes_per_token, "exact" if exact else "corpus mean")
    return {
        "licence": "; ".join(dict.fromkeys(licences)),
        "left_out": scan.left_out | {"copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.unreadable,
        **({"ids": scan.ids} if scan.ids else {}),
        **({"tokenizer_origin": tokenizer_origin} if tokenizer_origin else {}),
        **facts,
    }


def _build_symbol_store(data: DataConfig, folder: Path) -> dict[str, Plain]:
    """Write all files of a store of tasks over symbols, as `_build_text_store`. The unigram cross-entropy is that of answers alone."""
    tasks, licence, length = [weighted.task for weighted in data.tasks], "none needed: made up", data.seq_len
    for task in tasks:
        try:
            for subset in SUBSETS:
                check_task(task, STORE_SEED, length, subset, 1)
        except TaskError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; change data.seq_len or the task's options") from None
    tokenizer = symbol_tokenizer(tasks)
    size = vocab_size(tokenizer)
    write_file(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    sources = [SourceCounts(task.name, licence, 0, SEQUENCES, SEQUENCES * (length + 1)) for task in tasks]  # a byte a symbol
    counts: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        writers = {name: stack.enter_context(closing(SplitWriter(folder, name, size, size - 1))) for name in SPLITS}
        for subset, (name, writer) in zip(SUBSETS, writers.items(), strict=True):
            for task, index in product(tasks, range(SEQUENCES)):
                writer.add(np.array([size - 1, *example(task, STORE_SEED, index, length, subset).tokens], writer.dtype))
            counts[name] = _answer_counts(tasks, length, subset, size, ANSWERS_A_SYMBOL * size if subset == "train" else 0)
        sources_by_split = dict.fromkeys(SPLITS, sources)
        facts = finish_store(folder, writers, sources_by_split, counts, END_OF_TEXT, np.ones(size, np.float32), "one a symbol")
    return {"licence": licence, "left_out": {}, "unreadable": {"count": 0, "bytes": 0, "first": []}, **facts}


def _answer_counts(tasks: list[Task], length: int, subset: Subset, size: int, min_answers: int) -> np.ndarray:
    """How often each of `size` symbols is an answer in `SEQUENCES` sequences of each task: (size,). With fewer than `min_answers` answers
    in all, more sequences of each task are counted, up to `MOST_COUNTED`."""
    counts, sequences = np.zeros(size, np.int64), 0
    while sequences < SEQUENCES or (sequences < MOST_COUNTED and counts.sum() < min_answers):
        for task in tasks:
            sequence = example(task, STORE_SEED, sequences, length, subset)
            np.add.at(counts, sequence.tokens[1:][sequence.answers], 1)
        sequences += 1
    return counts


def _source_counts(names: list[str], licences: list[str], scan: Scan, assignment: int) -> list[SourceCounts]:
    source = scan.source[scan.assignment == assignment]
    documents = np.bincount(source, minlength=len(names)).tolist()
    n_bytes = np.bincount(source, scan.n_bytes[scan.assignment == assignment], len(names)).astype(int).tolist()
    return [SourceCounts(*facts) for facts in zip(names, licences, [0] * len(names), documents, n_bytes, strict=True)]


# ---------------------------------------------------------------- reading the sources


def _load_or_scan(data: DataConfig, journal: Journal, progress: Progress) -> Scan:
    """The scan that an interrupted preparation saved, or a new scan, which is saved."""
    if not journal.holds(SCAN):
        scan = _scan(data, journal.folder, progress)
        buffer = io.BytesIO()
        facts = np.frombuffer(json.dumps([scan.left_out, scan.unreadable, scan.ids]).encode(), np.uint8)
        np.savez(buffer, **{name: getattr(scan, name) for name in ARRAYS}, facts=facts)
        journal.keep(SCAN, buffer.getvalue())
    with np.load(journal.folder / SCAN) as arrays:
        omissions, unreadable, *ids = json.loads(arrays["facts"].tobytes())  # scans of earlier versions hold no facts on ids
        return Scan(*(arrays[name] for name in ARRAYS), omissions, unreadable, ids[0] if ids else {})


def _scan(data: DataConfig, folder: Path, progress: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents with the smallest hashes of each source.

    Equal texts have equal hashes: a document that is held out of one source is in the training split of none. A source's own validation
    split is held out whole. Without `data.deduplicate` the only copies left out are training documents that are also in a validation split.
    If `data.val_fraction` is 1 (text for evaluation alone, never a run's), all documents are held out.
    """
    hashes, sizes, ends, omissions = array("Q"), array("q"), [], OmissionCounts(data.on_error)
    with progress.bytes("scan", None) as advance:
        readings = _readings(data, folder)
        for reading in readings:
            if reading.spool:
                reading.spool.unlink(missing_ok=True)
            accepted = _accepted_documents(data, reading, omissions)
            for _, digest, n_bytes in write_spool(accepted, reading.spool) if reading.spool else accepted:
                hashes.append(digest)
                sizes.append(n_bytes)
                advance(n_bytes)
            ends.append(len(hashes))
    source_names = ", ".join(labels(data))
    if not hashes:
        raise DataError(f"data.source: {source_names}: holds no documents{omissions.words()}")
    hash_array, size_array, end_array = np.array(hashes, np.uint64), np.array(sizes, np.int64), np.array(ends, np.int64)
    source_array = np.array([reading.index for reading in readings])
    assignment = np.full(len(hash_array), TRAIN, np.uint8)
    # True for documents of the sources' own validation splits, of which no copy is left out.
    is_validation = np.repeat([reading.held_out for reading in readings], np.diff(end_array, prepend=0))
    if data.deduplicate:
        candidates = np.flatnonzero(~is_validation)
        originals = candidates[np.unique(hash_array[candidates], return_index=True)[1]]
        assignment[:] = COPY
        assignment[originals] = TRAIN
    assignment[np.isin(hash_array, hash_array[is_validation])] = COPY
    assignment[is_validation] = VAL
    sources_with_split = {reading.index for reading in readings if reading.held_out}
    spans = [slice(*edge) for edge, reading in zip(pairwise([0, *ends]), readings, strict=True) if reading.index not in sources_with_split]
    training_documents = [(hash_array[part][assignment[part] == TRAIN], size_array[part][assignment[part] == TRAIN]) for part in spans]
    assignment[np.isin(hash_array, _held_out(training_documents, data.val_fraction)) & (assignment == TRAIN)] = VAL
    if data.val_fraction == 1:
        assignment[assignment == TRAIN] = VAL
    elif not (assignment == VAL).any() or not (assignment == TRAIN).any():
        is_text = any(weighted.source.name == Files.name for weighted in data.sources)
        remedy = ", or set data.source.separator to split .txt files into documents" if is_text else ""
        words = omissions.words(int((assignment == COPY).sum()))
        raise DataError(
            f"data.source: {source_names}: {len(hashes)} document(s), none of which can be held out{words}; "
            f"two different ones of a source are needed: add text{remedy}"
        )
    ids = next((reading.vocabulary.seen for reading in readings if reading.vocabulary), {})
    return Scan(hash_array, size_array, assignment, end_array, source_array, omissions.by_reason, omissions.unreadable, ids)


def _held_out(sources: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """The hashes of documents to hold out: each source's smallest, until their documents have `fraction` of its bytes; never all.

    A document with more than half of a source's bytes, and more than `fraction` of them, stays in training. Of this source's other
    documents, half of their bytes or `fraction` of all the source's bytes is held out, whichever is less.

    sources: the hashes and sizes in bytes of each source's documents.
    """
    by_hash, large_hashes, smallest_hashes = [], [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for hashes, sizes in sources:
        distinct_hashes, inverse = np.unique(hashes, return_inverse=True)
        by_hash.append((distinct_hashes, np.bincount(inverse, sizes)))  # bytes of all documents with a hash
        large_hashes.append(distinct_hashes[by_hash[-1][1] > max(fraction, 0.5) * sizes.sum()])
    for hashes, sizes in by_hash:
        target_bytes, limit, is_small = fraction * sizes.sum(), len(hashes) - 1, ~np.isin(hashes, np.concatenate(large_hashes))
        if not is_small.all():
            hashes, sizes = hashes[is_small], sizes[is_small]
            target_bytes, limit = min(target_bytes, sizes.sum() / 2), len(hashes)
        smallest_hashes.append(hashes[: max(0, min(limit, 1 + np.searchsorted(np.cumsum(sizes), target_bytes)))])
    return np.concatenate(smallest_hashes)


def _readings(data: DataConfig, folder: Path) -> list[Reading]:
    """The sources in order, each followed by its validation split, if it has one."""
    readings: list[Reading] = []
    any_ids = any(isinstance(weighted.source, Tokens) for weighted in data.sources)
    vocabulary = Vocabulary(data.tokenizer) if any_ids else None
    for index, weighted in enumerate(data.sources):
        for source, is_held_out in ((weighted.source, False), (reader(weighted.source).held_out(weighted.source), True)):
            if source:
                spool = folder / f"{SPOOL}-{len(readings)}" if reader(source).streamed(source) else None
                readings.append(Reading(index, source, is_held_out, spool, vocabulary if isinstance(source, Tokens) else None))
    return readings


def _accepted_documents(data: DataConfig, reading: Reading, omissions: OmissionCounts) -> Iterator[tuple[str | np.ndarray, int, int]]:
    """(text or ids, 64-bit hash, UTF-8 bytes) of a reading's documents; blank, too short and too long ones are only counted."""
    spool, vocabulary = reading.spool, reading.vocabulary
    has_text = not all(isinstance(weighted.source, Tokens) for weighted in data.sources)  # then ids are hashed as text, to find copies
    has_spool = spool and spool.exists()
    read = reader(reading.source).documents
    for document in read_spool(spool) if has_spool else read(reading.source, data.folder, omissions.skip, vocabulary):
        content = document.encode() if not vocabulary else vocabulary.text(document) if has_text else document.data
        n_bytes = vocabulary.n_bytes(document) if vocabulary else len(content)
        digest = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
        del content  # a long document is in memory once
        if not n_bytes or (not vocabulary and document.isspace()):
            omissions.by_reason["blank"] += 1
        elif n_bytes < data.min_document_bytes:
            omissions.by_reason["short"] += 1
        elif data.max_document_bytes is not None and n_bytes > data.max_document_bytes:
            omissions.by_reason["long"] += 1
        else:
            yield document, digest, n_bytes


def _documents_from(data: DataConfig, folder: Path, scan: Scan, n_skipped: int) -> Iterator[Document]:
    """The scan's documents after the first `n_skipped`, without copies. Raises Restart if the sources changed since the scan."""
    n_read = 0
    for reading, end in zip(_readings(data, folder), scan.ends, strict=True):
        accepted = _accepted_documents(data, reading, OmissionCounts(data.on_error))
        for item, scanned_hash in zip_longest(accepted, scan.hashes[n_read:end]):
            if item is None or item[1] != scanned_hash:
                raise Restart(f"data.source: {', '.join(labels(data))}: changed while it was read (document {n_read + 1}); run again")
            n_read += 1
            if n_read > n_skipped and scan.assignment[n_read - 1] != COPY:
                content, _, n_bytes = item
                yield Document(content, n_bytes, bool(scan.assignment[n_read - 1] == VAL), n_read)


def _training_texts(data: DataConfig, folder: Path, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for document in _documents_from(data, folder, scan, 0):
        if not document.held_out:
            advance(document.n_bytes)
            yield from chain.from_iterable(map(short_words, pieces(document.content)))
