"""Builds a token store: scans documents, trains the tokenizer, writes tokens and manifest in a hidden folder, and
renames it at the end.

An interrupted preparation leaves the scan, the tokenizer, the tokens and a journal of the number of documents on disk.
The next call continues from these files, and the store has the same bytes as after a preparation without interruption.
"""

import io
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import chain, pairwise, product, zip_longest
from pathlib import Path

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Files, Source, Tokens
from lm.config.task_config import Task
from lm.data.encoding import MIN_BYTES_PER_THREAD, Document, encode_all, split_long_words, split_text
from lm.data.sources import labels, reader
from lm.data.store import MANIFEST, SPLITS, TOKENIZER, SourceCounts, SplitWriter, finish_store, write_file, write_whole
from lm.data.tasks import STORE_SEED, SUBSETS, Subset, TaskError, check_task, example, symbol_tokenizer
from lm.data.text_files import Unreadable
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import load_tokenizer, origin, token_bytes, tokenizer_of, train_tokenizer, vocab_size
from lm.errors import DataError, RunError, one_line
from lm.files import file_sha256, json_bytes, read_sealed, sealed, sync_folder
from lm.machine import usable_cores
from lm.progress import Progress
from lm.schema import Plain

JOURNAL = "journal.json"


class Journal:
    """The record, in `folder`, of the files and documents that a preparation has completed; empty if its file is
    missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.entry: dict[str, Plain] = {}
        with suppress(RunError):
            self.entry = read_sealed(folder / JOURNAL)

    @property
    def n_documents(self) -> int:
        """The number n of documents at the start of the text, the first n without a gap, whose tokens are on disk."""
        return self.entry.get("documents", 0)

    def holds(self, name: str) -> bool:
        """Return whether the file `name` in the folder still has the content that `keep` last wrote to it."""
        path = self.folder / name
        return path.is_file() and self.entry.get(name) == file_sha256(path)

    def keep(self, name: str, content: bytes) -> None:
        write_whole(self.folder / name, content)
        self._write({name: file_sha256(self.folder / name)})

    def advance(self, n_documents: int, writers: dict[str, SplitWriter]) -> None:
        """Sync the splits' files to disk, and record that they hold the tokens of the first `n_documents` documents."""
        for writer in writers.values():
            writer.sync()
        self._write({"documents": n_documents} | {name: writer.progress() for name, writer in writers.items()})

    def writers(self, vocab_size: int, end_of_text: int) -> tuple[int, dict[str, SplitWriter]]:
        """Return the number of documents whose tokens are on disk, and {split: writer} to go on after them.

        If the token files don't match the journal, writing starts again, with 0 documents and writers of empty splits.
        """
        writers: dict[str, SplitWriter] = {}
        # Suppressed: the files hold too few tokens or ids beyond the vocabulary, or a file or its entry is missing.
        with suppress(EOFError, ValueError, FileNotFoundError, KeyError, TypeError), ExitStack() as stack:
            for name in SPLITS:
                writers[name] = SplitWriter(self.folder, name, vocab_size, end_of_text, self.entry[name]["n_tokens"])
                stack.callback(writers[name].close)
            if all(writer.progress() == self.entry[name] for name, writer in writers.items()):
                stack.pop_all()
                return self.n_documents, writers
        return 0, {name: SplitWriter(self.folder, name, vocab_size, end_of_text) for name in SPLITS}

    def _write(self, changes: dict[str, Plain]) -> None:
        self.entry |= changes
        write_whole(self.folder / JOURNAL, json_bytes(sealed(self.entry)))


class Restart(DataError):
    """Raised if an interrupted preparation can't be continued: `build_store` deletes its folder, and the next call
    starts again.
    """


def write_spool(texts: Iterator[tuple[str, int, int]], path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (text, hash, number of bytes) from `texts`, and write the texts, compressed, to `path`, which appears after
    the last item.
    """
    import pyarrow

    new_path = path.with_name(f"{path.name}.new")
    with (
        pyarrow.OSFile(os.fsencode(new_path), "wb") as disk_file,
        pyarrow.CompressedOutputStream(disk_file, "zstd") as file,
    ):
        for item in texts:
            file.write(json.dumps(item[0], ensure_ascii=False).encode())
            file.write(b"\n")
            yield item
    os.replace(new_path, path)


def read_spool(path: Path) -> Iterator[str]:
    """Yield the texts that `write_spool` wrote to `path`. Raises Restart if the file is damaged."""
    import pyarrow

    try:
        with pyarrow.OSFile(os.fsencode(path)) as disk_file, pyarrow.CompressedInputStream(disk_file, "zstd") as file:
            yield from map(json.loads, io.BufferedReader(file))
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise Restart(f"{path}: can't be read (damaged?): {one_line(error)}; run again") from None


# ---------------------------------------------------------------- building


SCAN, SPOOL = "scan.npz", "spool"
JOURNAL_BYTES = 64 << 20  # bytes of text between entries in the journal
TASK_SEQUENCES = 64  # sequences of each task that a store without text holds in each split
MIN_ANSWERS_PER_SYMBOL, MAX_COUNTED_SEQUENCES = (
    16,
    8192,
)  # limits of `_answer_counts`: answers per symbol, sequences per task
MAX_LISTED_ERRORS = 100  # unreadable files, documents and rows that the manifest names
TRAIN, VAL, COPY = 0, 1, 2  # assignment of a document


@dataclass(frozen=True)
class Scan:
    """The result of the first pass over all documents: sizes, hashes and assignment to splits, in the order in which
    documents are read.
    """

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    assignment: (
        np.ndarray
    )  # (documents,) uint8: TRAIN, VAL or COPY (left out, as another document has the same content)
    ends: np.ndarray  # (readings,) int64: number of documents up to the end of each `Reading`
    sources: np.ndarray  # (readings,) int64: index of each reading's source
    left_out: dict[str, int]  # number of documents left out, by reason
    unreadable: dict[str, Plain]  # number and bytes of unreadable files, documents and rows; messages of the first
    id_statistics: dict[
        str, int
    ]  # facts on documents of token ids (`Vocabulary.seen`); empty if all documents are texts

    @property
    def source_indices(self) -> np.ndarray:
        """The index, in `DataConfig.sources`, of the source that each document comes from: int64 (documents,)."""
        return np.repeat(self.sources, np.diff(self.ends, prepend=0))


SCAN_ARRAYS = tuple(field.name for field in fields(Scan)[:5])


class OmissionCounts:
    """Counts of the documents that a pass leaves out or can't read, by reason. `on_error`: the value of
    `data.on_error`.
    """

    def __init__(self, on_error: str):
        self.fails = on_error == "fail"
        self.by_reason = {"blank": 0, "short": 0, "long": 0}
        self.unreadable: dict[str, Plain] = {"count": 0, "bytes": 0, "first": []}

    def skip(self, error: Unreadable) -> None:
        """Count `error`, about a file, document or row that can't be read, or raise it if `data.on_error` is `fail`."""
        if self.fails:
            raise error
        self.unreadable["count"] += 1
        self.unreadable["bytes"] += error.n_bytes or 0
        if len(self.unreadable["first"]) < MAX_LISTED_ERRORS:
            self.unreadable["first"].append(str(error))

    def words(self, copies: int = 0) -> str:
        """Return the counts above 0 as text in brackets; empty if all are 0. `copies`: number of documents left out as
        copies.
        """
        counts = {**self.by_reason, "copies of others": copies, "unreadable": self.unreadable["count"]}
        listing = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        return f" ({listing})" if listing else ""


@dataclass(frozen=True)
class Reading:
    """A source to read in one pass; a source's own validation split is a separate reading."""

    index: int  # the source's index in `DataConfig.sources`
    source: Source
    held_out: bool
    spool: Path | None  # for a streamed source, the file that keeps its documents after the first pass
    vocabulary: Vocabulary | None  # for a source of token ids, the ids that the tokenizer has


def build_store(data: DataConfig, spec: dict[str, Plain], target: Path, progress: Progress) -> None:
    """Build the store in the folder `target`, or finish an interrupted preparation. The manifest begins with the
    entries of `spec`.

    Raises:
        DataError: a source is too small, changed meanwhile or can't be read. If tokens of documents are on disk, the
            hidden folder stays, and the next call continues, except after a `Restart`.
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
    """Write all files of a store of text except the manifest. Returns the manifest's entries that describe these
    files.
    """
    journal = Journal(folder)
    # The licences first: the hub may be out of reach hours later.
    licences = [reader(weighted.source).licence(weighted.source) for weighted in data.sources]
    tokenizer_origin = origin(data.tokenizer)
    scan = _load_or_scan(data, journal, progress)
    is_stored = scan.assignment != COPY
    total_bytes = int(scan.n_bytes[is_stored].sum())
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
        is_text = ~np.array([isinstance(weighted.source, Tokens) for weighted in data.sources])[
            scan.source_indices[n_encoded:]
        ]
        text_bytes = int(scan.n_bytes[n_encoded:][is_stored[n_encoded:] & is_text].sum())
        workers = data.prepare_workers or max(1, min(usable_cores(), text_bytes // MIN_BYTES_PER_THREAD))
        unsaved_bytes = 0
        with progress.bytes("encode", total_bytes, encoded_bytes) as advance:
            new_documents = _scanned_documents(data, folder, scan, n_encoded)
            for documents, tokens, in_val in encode_all(new_documents, tokenizer, end_of_text, workers):
                writers["train"].add(tokens[~in_val])
                writers["val"].add(tokens[in_val])
                n_bytes = sum(document.n_bytes for document in documents)
                advance(n_bytes)
                unsaved_bytes += n_bytes
                if unsaved_bytes >= JOURNAL_BYTES and documents[-1].is_last_piece:
                    journal.advance(documents[-1].n_read, writers)
                    unsaved_bytes = 0
        counts = {name: writer.counts for name, writer in writers.items()}
        total_counts, bytes_per_token = sum(counts.values()), token_bytes(tokenizer)
        is_exact = bytes_per_token is not None and int(total_counts @ bytes_per_token.astype(np.int64)) == total_bytes
        if not is_exact:
            bytes_per_token = np.full(size, total_bytes / max(1, total_counts.sum() - total_counts[end_id]), np.float32)
            bytes_per_token[end_id] = 0
        sources = {
            name: _source_counts(labels(data), licences, scan, assignment)
            for name, assignment in (("train", TRAIN), ("val", VAL))
        }
        facts = finish_store(
            folder, writers, sources, counts, end_of_text, bytes_per_token, "exact" if is_exact else "corpus mean"
        )
    return {
        "licence": "; ".join(dict.fromkeys(licences)),
        "left_out": scan.left_out | {"copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.unreadable,
        **({"ids": scan.id_statistics} if scan.id_statistics else {}),
        **({"tokenizer_origin": tokenizer_origin} if tokenizer_origin else {}),
        **facts,
    }


def _build_symbol_store(data: DataConfig, folder: Path) -> dict[str, Plain]:
    """Write all files, except the manifest, of a store without text, for tasks over symbols. Returns the manifest's
    entries, in which `unigram_cross_entropy` is of the tasks' answers alone."""
    tasks, licence, length = [weighted.task for weighted in data.tasks], "none needed: made up", data.seq_len
    for task in tasks:
        try:
            for subset in SUBSETS:
                check_task(task, STORE_SEED, length, subset, 1)
        except TaskError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; change data.seq_len or the task's options") from None
    tokenizer = symbol_tokenizer(tasks)
    n_symbols = vocab_size(tokenizer)
    write_file(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    sources = [
        SourceCounts(task.name, licence, 0, TASK_SEQUENCES, TASK_SEQUENCES * (length + 1)) for task in tasks
    ]  # a byte a symbol
    counts: dict[str, np.ndarray] = {}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(closing(SplitWriter(folder, name, n_symbols, n_symbols - 1))) for name in SPLITS
        }
        for subset, (name, writer) in zip(SUBSETS, writers.items(), strict=True):
            for task, index in product(tasks, range(TASK_SEQUENCES)):
                writer.add(
                    np.array([n_symbols - 1, *example(task, STORE_SEED, index, length, subset).tokens], writer.dtype)
                )
            counts[name] = _answer_counts(
                tasks, length, subset, n_symbols, MIN_ANSWERS_PER_SYMBOL * n_symbols if subset == "train" else 0
            )
        sources_by_split = dict.fromkeys(SPLITS, sources)
        facts = finish_store(
            folder, writers, sources_by_split, counts, END_OF_TEXT, np.ones(n_symbols, np.float32), "one a symbol"
        )
    return {"licence": licence, "left_out": {}, "unreadable": {"count": 0, "bytes": 0, "first": []}, **facts}


def _answer_counts(tasks: list[Task], length: int, subset: Subset, n_symbols: int, min_answers: int) -> np.ndarray:
    """Count how often each symbol is an answer in `TASK_SEQUENCES` sequences of each task: int64 (n_symbols,). If these
    sequences have fewer than `min_answers` answers in total, more sequences of each task are counted, up to
    `MAX_COUNTED_SEQUENCES`.
    """
    counts, sequences = np.zeros(n_symbols, np.int64), 0
    while sequences < TASK_SEQUENCES or (sequences < MAX_COUNTED_SEQUENCES and counts.sum() < min_answers):
        for task in tasks:
            sequence = example(task, STORE_SEED, sequences, length, subset)
            np.add.at(counts, sequence.tokens[1:][sequence.answers], 1)
        sequences += 1
    return counts


def _source_counts(names: list[str], licences: list[str], scan: Scan, assignment: int) -> list[SourceCounts]:
    source_indices = scan.source_indices[scan.assignment == assignment]
    documents = np.bincount(source_indices, minlength=len(names)).tolist()
    n_bytes = np.bincount(source_indices, scan.n_bytes[scan.assignment == assignment], len(names)).astype(int).tolist()
    return [SourceCounts(*facts) for facts in zip(names, licences, [0] * len(names), documents, n_bytes, strict=True)]


# ---------------------------------------------------------------- reading the sources


def _load_or_scan(data: DataConfig, journal: Journal, progress: Progress) -> Scan:
    """Return the scan that an interrupted preparation saved; without one, scan the documents and save the result."""
    if not journal.holds(SCAN):
        scan = _scan(data, journal.folder, progress)
        buffer = io.BytesIO()
        facts = np.frombuffer(json.dumps([scan.left_out, scan.unreadable, scan.id_statistics]).encode(), np.uint8)
        np.savez(buffer, **{name: getattr(scan, name) for name in SCAN_ARRAYS}, facts=facts)
        journal.keep(SCAN, buffer.getvalue())
    with np.load(journal.folder / SCAN) as arrays:
        omissions, unreadable, *ids = json.loads(
            arrays["facts"].tobytes()
        )  # scans of earlier versions hold no facts on ids
        return Scan(*(arrays[name] for name in SCAN_ARRAYS), omissions, unreadable, ids[0] if ids else {})


def _scan(data: DataConfig, folder: Path, progress: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents of each source that have the smallest hashes.

    Equal texts have equal hashes, so a text that is held out in one source is held out in all sources. A source's own
    validation split is held out whole; training documents that are also in such a split are left out as copies. Other
    copies are left out only with `data.deduplicate`. If `data.val_fraction` is 1 (for text on which models are
    evaluated, not trained), all but copies are held out. Raises DataError if there is no document, or none to hold out
    or to train on.
    """
    hashes, sizes, ends, omissions = array("Q"), array("q"), [], OmissionCounts(data.on_error)
    with progress.bytes("scan", None) as advance:
        readings = _readings(data, folder)
        for reading in readings:
            if reading.spool:
                reading.spool.unlink(missing_ok=True)
            accepted = _accepted_documents(data, reading, omissions)
            n_spelled = Counter()
            for document, digest, n_bytes in write_spool(accepted, reading.spool) if reading.spool else accepted:
                if isinstance(document, str):
                    for token in {END_OF_TEXT, data.tokenizer.end_of_text}:
                        n_spelled[token] += document.count(token)
                hashes.append(digest)
                sizes.append(n_bytes)
                advance(n_bytes)
            ends.append(len(hashes))
            for token, count in (+n_spelled).items():
                remedy = f'if it ends documents of .txt files, set data.source.separator, e.g. "\\n{token}\\n"'
                spelled = f"{token} is spelled {count:,} times in the text, where it is text"
                progress.say(f"note: {reading.source.label}: {spelled}; {remedy}")
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
    spans = [
        slice(*pair)
        for pair, reading in zip(pairwise([0, *ends]), readings, strict=True)
        if reading.index not in sources_with_split
    ]
    training_documents = [
        (hash_array[span][assignment[span] == TRAIN], size_array[span][assignment[span] == TRAIN]) for span in spans
    ]
    assignment[
        np.isin(hash_array, _hashes_to_hold_out(training_documents, data.val_fraction)) & (assignment == TRAIN)
    ] = VAL
    if data.val_fraction == 1:
        assignment[assignment == TRAIN] = VAL
    elif not (assignment == VAL).any() or not (assignment == TRAIN).any():
        is_text = any(weighted.source.name == Files.name for weighted in data.sources)
        remedy = ", or set data.source.separator to split .txt files into documents" if is_text else ""
        omission_text = omissions.words(int((assignment == COPY).sum()))
        raise DataError(
            f"data.source: {source_names}: {len(hashes)} document(s), none of which can be held out{omission_text}; "
            f"two different ones of a source are needed: add text{remedy}"
        )
    ids = next((reading.vocabulary.seen for reading in readings if reading.vocabulary), {})
    return Scan(
        hash_array, size_array, assignment, end_array, source_array, omissions.by_reason, omissions.unreadable, ids
    )


def _hashes_to_hold_out(sources: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """Return the hashes of the documents to hold out: each source's smallest, until their documents have `fraction` of
    the source's bytes.

    No source contributes all its hashes. A large document, with more than half of a source's bytes and more than
    `fraction` of them, stays in training. A source with a large document contributes hashes until their documents have
    `fraction` of the source's bytes, or half of the bytes of its other documents, if that is less.

    sources: for each source, two arrays: the hashes of its documents, and their sizes in bytes.
    """
    bytes_by_hash, large_hashes, smallest_hashes = [], [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for hashes, sizes in sources:
        distinct_hashes, inverse = np.unique(hashes, return_inverse=True)
        bytes_by_hash.append((distinct_hashes, np.bincount(inverse, sizes)))  # bytes of all documents with a hash
        large_hashes.append(distinct_hashes[bytes_by_hash[-1][1] > max(fraction, 0.5) * sizes.sum()])
    for hashes, sizes in bytes_by_hash:
        target_bytes, max_hashes, is_small = (
            fraction * sizes.sum(),
            len(hashes) - 1,
            ~np.isin(hashes, np.concatenate(large_hashes)),
        )
        if not is_small.all():
            hashes, sizes = hashes[is_small], sizes[is_small]
            target_bytes, max_hashes = min(target_bytes, sizes.sum() / 2), len(hashes)
        smallest_hashes.append(hashes[: max(0, min(max_hashes, 1 + np.searchsorted(np.cumsum(sizes), target_bytes)))])
    return np.concatenate(smallest_hashes)


def _readings(data: DataConfig, folder: Path) -> list[Reading]:
    """Return a `Reading` for each source in order, each followed by a `Reading` for the source's own validation split,
    if it has one.
    """
    readings: list[Reading] = []
    vocabulary = (
        Vocabulary(data.tokenizer) if any(isinstance(weighted.source, Tokens) for weighted in data.sources) else None
    )
    for index, weighted in enumerate(data.sources):
        for source, is_held_out in (
            (weighted.source, False),
            (reader(weighted.source).held_out(weighted.source), True),
        ):
            if source:
                spool = folder / f"{SPOOL}-{len(readings)}" if reader(source).streamed(source) else None
                readings.append(
                    Reading(index, source, is_held_out, spool, vocabulary if isinstance(source, Tokens) else None)
                )
    return readings


def _accepted_documents(
    data: DataConfig, reading: Reading, omissions: OmissionCounts
) -> Iterator[tuple[str | np.ndarray, int, int]]:
    """Yield (text or ids, 64-bit hash, number of UTF-8 bytes) of documents to keep; count blank, short and long ones in
    `omissions`.
    """
    spool, vocabulary = reading.spool, reading.vocabulary
    has_text = not all(
        isinstance(weighted.source, Tokens) for weighted in data.sources
    )  # then ids are hashed as text, to find copies
    has_spool = spool and spool.exists()
    read_documents = reader(reading.source).documents
    for document in (
        read_spool(spool) if has_spool else read_documents(reading.source, data.folder, omissions.skip, vocabulary)
    ):
        content = document.encode() if not vocabulary else vocabulary.utf8_text(document) if has_text else document.data
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


def _scanned_documents(data: DataConfig, folder: Path, scan: Scan, n_skipped: int) -> Iterator[Document]:
    """Yield the scanned documents after the first `n_skipped`, without copies. Raises Restart if the sources changed
    since the scan.
    """
    n_read = 0
    for reading, end in zip(_readings(data, folder), scan.ends, strict=True):
        accepted = _accepted_documents(data, reading, OmissionCounts(data.on_error))
        for item, scanned_hash in zip_longest(accepted, scan.hashes[n_read:end]):
            if item is None or item[1] != scanned_hash:
                raise Restart(
                    f"data.source: {', '.join(labels(data))}: changed while it was read (document {n_read + 1}); run "
                    "again"
                )
            n_read += 1
            if n_read > n_skipped and scan.assignment[n_read - 1] != COPY:
                content, _, n_bytes = item
                yield Document(content, n_bytes, bool(scan.assignment[n_read - 1] == VAL), n_read)


def _training_texts(data: DataConfig, folder: Path, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for document in _scanned_documents(data, folder, scan, 0):
        if not document.held_out:
            advance(document.n_bytes)
            yield from chain.from_iterable(map(split_long_words, split_text(document.content)))
