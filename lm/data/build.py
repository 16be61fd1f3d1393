"""Builds a token store: scans documents, trains the tokenizer, encodes parts of the text, joins them, and renames the
store's folder at the end.

All is written in a hidden folder beside the store. A part has the tokens of some 64 MB of text, and appears when it is
whole. After an interruption the next call keeps the tokenizer and the whole parts of the same documents, and makes all
else again: the store has the same bytes as after a preparation without interruption.
"""

import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, groupby, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, Tokens, TrainedTokenizer
from lm.config.task_config import Task
from lm.data.encoding import Document, Tokenized, encode_all, split_long_words, split_text
from lm.data.sources import labels, reader, streamed_documents
from lm.data.store import MANIFEST, SPLITS, TOKENIZER, SourceCounts, SplitWriter, finish_store, write_file
from lm.data.tasks import STORE_SEED, SUBSETS, Subset, TaskError, check_task, example, symbol_tokenizer
from lm.data.text_files import Unreadable
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import load_tokenizer, origin, token_bytes, tokenizer_of, train_tokenizer, vocab_size
from lm.errors import DataError
from lm.files import json_bytes, replacing, sealed, sync_folder
from lm.progress import Progress
from lm.schema import Plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PART_BYTES = 64 << 20  # bytes of text whose tokens are in a part; it ends with a document
PART_NAME = "part-"  # beginning of the names of parts
NOUN = "the token store (make room, or set data.root to another folder)"  # what errors of writing call a part
JOIN_BYTES = 512 << 10  # bytes of a part that are joined to the store at a time
TASK_SEQUENCES = 64  # sequences of each task that a store without text holds in each split
# limits of `_answer_counts`: answers per symbol, sequences per task
MIN_ANSWERS_PER_SYMBOL, MAX_COUNTED_SEQUENCES = 16, 8192
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # texts may spell them between documents
MAX_LISTED_ERRORS = 100  # unreadable files, documents and rows that the manifest names
# Assignment of a document. A copy is left out because another document has the same content; an omitted document,
# because the tokenizer does not give it back.
TRAIN, VAL, COPY, OMITTED = 0, 1, 2, 3


@dataclass(frozen=True)
class Scan:
    """The result of the first pass over all documents, in the order in which they are read."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    sources: np.ndarray  # (documents,) int64: index of each document's source in `DataConfig.sources`
    assignment: np.ndarray  # (documents,) uint8: TRAIN, VAL, COPY or OMITTED
    omissions: "Omissions"  # what was left out, or could not be read

    @property
    def is_stored(self) -> np.ndarray:
        """A mask of the documents that are in a split: bool (documents,)."""
        return self.assignment <= VAL


class Omissions:
    """Counts what a pass leaves out or can't read, by `data.on_error`."""

    def __init__(self, on_error: str):
        self.fails = on_error == "fail"
        self.blank = 0  # documents without text
        self.unreadable: dict[str, Plain] = {"count": 0, "first": []}

    def skip(self, error: Unreadable) -> None:
        """Count `error`, about a file, document or row that can't be read, or raise it if `data.on_error` is `fail`."""
        if self.fails:
            raise error
        self.unreadable["count"] += 1
        if len(self.unreadable["first"]) < MAX_LISTED_ERRORS:
            self.unreadable["first"].append(str(error))


def build_store(data: DataConfig, spec: dict[str, Plain], target: Path, progress: Progress) -> None:
    """Build the store in the folder `target`, or finish an interrupted preparation. The manifest begins with the
    entries of `spec`.

    Raises:
        DataError: a source is too small, changed meanwhile or can't be read. If a part is whole, the hidden folder
            stays, and the next call continues.
    """
    folder = partial_folder(target)
    store = folder / "store"
    try:
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        facts = _build_symbol_store(data, store) if data.symbolic else _build_text_store(data, store, progress)
        write_file(store / MANIFEST, json_bytes(sealed(spec | facts)))
        sync_folder(store)
        os.rename(store, target)
        sync_folder(target.parent)
    except Exception:
        # With a whole part the next call continues: the cause of the error may be a network or a full disk.
        if not any(folder.glob(f"*/{PART_NAME}*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def partial_folder(target: Path) -> Path:
    """Return the hidden folder in which the store `target` is prepared."""
    return target.with_name(f".{target.name}.partial")


def _build_text_store(data: DataConfig, store: Path, progress: Progress) -> dict[str, Plain]:
    """Write all files of a store of text except the manifest. Returns the manifest's entries that describe these
    files.
    """
    # The licences first: the hub may be out of reach hours later.
    licences = [reader(weighted.source).licence(weighted.source) for weighted in data.sources]
    tokenizer_origin = origin(data.tokenizer)
    scan = _scan(data, store.parent, progress)
    arrays = (scan.hashes, scan.n_bytes, scan.sources, scan.assignment)
    folder = store.parent / blake2b(b"".join(map(np.ndarray.tobytes, arrays)), digest_size=8).hexdigest()
    folder.mkdir(exist_ok=True)
    if not (folder / TOKENIZER).exists():
        if isinstance(data.tokenizer, TrainedTokenizer):
            with progress.bytes("tokenizer", int(scan.n_bytes[scan.assignment == TRAIN].sum())) as advance:
                tokenizer = train_tokenizer(_training_texts(data, store.parent, scan, advance), data.tokenizer)
        else:
            tokenizer = tokenizer_of(data.tokenizer)
        with replacing(folder / TOKENIZER, NOUN) as file:
            file.write(tokenizer.to_str(pretty=True).encode())
    shutil.copyfile(folder / TOKENIZER, store / TOKENIZER)
    end_of_text = data.tokenizer.end_of_text
    tokenizer = load_tokenizer(store / TOKENIZER, end_of_text)
    size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end_of_text)
    parts = _write_parts(data, folder, scan, tokenizer, progress)
    total_bytes = int(scan.n_bytes[scan.is_stored].sum())
    with ExitStack() as stack:
        writers = {name: stack.enter_context(closing(SplitWriter(store, name, size, end_id))) for name in SPLITS}
        _join(parts, scan.assignment[scan.is_stored] == VAL, end_id, writers)
        counts = {name: writer.counts for name, writer in writers.items()}
        total_counts, bytes_per_token = sum(counts.values()), token_bytes(tokenizer)
        is_exact = bytes_per_token is not None and int(total_counts @ bytes_per_token.astype(np.int64)) == total_bytes
        if not is_exact:
            bytes_per_token = np.full(size, total_bytes / max(1, total_counts.sum() - total_counts[end_id]), np.float32)
            bytes_per_token[end_id] = 0
        sources = {}
        for name, assignment in zip(SPLITS, (TRAIN, VAL), strict=True):
            chosen = scan.sources[scan.assignment == assignment], scan.n_bytes[scan.assignment == assignment]
            documents, n_bytes = (np.bincount(chosen[0], weights, len(licences)) for weights in (None, chosen[1]))
            sources[name] = [
                SourceCounts(label, licence, 0, int(count), int(size_of_source))
                for label, licence, count, size_of_source in zip(
                    labels(data), licences, documents, n_bytes, strict=True
                )
            ]
        facts = finish_store(
            store, writers, sources, counts, end_of_text, bytes_per_token, "exact" if is_exact else "corpus mean"
        )
    return {
        "licence": "; ".join(dict.fromkeys(licences)),
        "left_out": {"blank": scan.omissions.blank, "copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.omissions.unreadable,
        **({"tokenizer_origin": tokenizer_origin} if tokenizer_origin else {}),
        **facts,
    }


def _write_parts(data: DataConfig, folder: Path, scan: Scan, tokenizer: "Tokenizer", progress: Progress) -> list[Path]:
    """Encode the documents of the parts that are missing in `folder`, which is in the folder of streams. Returns the
    paths of all parts, in order.

    Documents that the tokenizer does not give back become `OMITTED` in the scan, or are an error, by `data.on_error`.
    """
    is_stored, n_bytes = scan.is_stored, np.where(scan.is_stored, scan.n_bytes, 0)
    part_of = (np.cumsum(n_bytes) - n_bytes) // PART_BYTES  # (documents,)
    paths = {number: folder / f"{PART_NAME}{number:05d}" for number in np.unique(part_of[is_stored]).tolist()}
    is_missing = is_stored & ~np.isin(part_of, [number for number, path in paths.items() if path.exists()])
    with progress.bytes("encode", int(n_bytes.sum()), int(n_bytes[~is_missing].sum())) as advance:
        documents = _scanned_documents(data, folder.parent, scan, is_missing) if is_missing.any() else iter(())
        with closing(encode_all(documents, tokenizer, data.tokenizer.end_of_text)) as tokenized:
            for number, group in groupby(tokenized, key=lambda item: part_of[item[0].index]):
                _write_part(paths[number], group, data.on_error, advance)
    splits = np.unique(scan.assignment[is_stored])
    for path in filter(Path.exists, map(_omitted_path, paths.values())):
        for index, problem in json.loads(path.read_text(encoding="utf-8")):
            scan.assignment[index] = OMITTED
            scan.omissions.skip(Unreadable(problem))
    if not np.isin(splits, scan.assignment).all():
        reason = "gives no document of the training text, or of the held-out text, back"
        raise DataError(f"data.tokenizer: {reason}; {scan.omissions.unreadable['first'][-1]}")
    return list(paths.values())


def _omitted_path(path: Path) -> Path:
    return path.with_name(f"omitted-{path.name}.json")


def _write_part(path: Path, tokenized: Iterator[Tokenized], on_error: str, advance: Callable[[int], None]) -> None:
    """Write the tokens of documents to `path`, which appears when it is whole, and before it a list of the documents
    that the tokenizer does not give back: [index, reason] each. Raises the first such error if `on_error` is
    `fail`.
    """
    omitted: dict[int, Unreadable] = {}
    with replacing(path, NOUN) as file:
        start = end = 0  # of the document in the file
        for document, tokens in tokenized:
            advance(document.n_bytes)
            start = end if document.is_first_piece else start
            if isinstance(tokens, Unreadable):
                if on_error == "fail":
                    raise tokens
                omitted.setdefault(document.index, tokens)
                end = file.seek(start)
                file.truncate()
            elif document.index not in omitted:
                end += file.write(tokens)
        if omitted:
            with replacing(_omitted_path(path), NOUN) as list_file:
                list_file.write(json_bytes([[index, str(error)] for index, error in omitted.items()]))


def _join(parts: list[Path], held_out: np.ndarray, end_of_text: int, writers: dict[str, SplitWriter]) -> None:
    """Write the tokens of the parts to the two splits. `held_out`: whether each stored document is in the split `val`,
    (documents,) bool. A document begins at each `end_of_text`.
    """
    n_documents, dtype = 0, writers["train"].dtype
    for path in parts:
        with open(path, "rb") as file:
            while block := file.read(JOIN_BYTES):
                tokens = np.frombuffer(block, dtype)
                document_numbers = n_documents + np.cumsum(tokens == end_of_text)  # from 1
                in_val = held_out[document_numbers - 1]
                writers["train"].add(tokens[~in_val])
                writers["val"].add(tokens[in_val])
                n_documents = int(document_numbers[-1])


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
    # a byte a symbol
    sources = [SourceCounts(task.name, licence, 0, TASK_SEQUENCES, TASK_SEQUENCES * (length + 1)) for task in tasks]
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
    return {"licence": licence, "left_out": {}, "unreadable": {"count": 0, "first": []}, **facts}


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


# ---------------------------------------------------------------- reading the sources


def _scan(data: DataConfig, folder: Path, progress: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents of each source that have the smallest hashes.

    Equal texts have equal hashes, so a text that is held out in one source is held out in all sources. A source's own
    validation split is held out whole; training documents that are also in such a split are left out as copies. Other
    copies are left out only with `data.deduplicate`. If `data.val_fraction` is 1 (for text on which models are
    evaluated, not trained), all but copies are held out. Raises DataError if there is no document, or none to hold out
    or to train on.
    """
    omissions = Omissions(data.on_error)
    scanned = array("Q"), array("q"), array("H"), array("B")
    end_tokens, n_spelled = {*END_TOKENS, data.tokenizer.end_of_text}, Counter[tuple[int, str]]()
    with progress.bytes("scan", None) as advance:
        for document, source, is_held_out in _documents(data, folder, omissions):
            for values, value in zip(scanned, (document.digest, document.n_bytes, source, is_held_out), strict=True):
                values.append(value)
            if isinstance(document.content, str):
                n_spelled.update({(source, token): document.content.count(token) for token in end_tokens})
            advance(document.n_bytes)
    for (source, token), count in (+n_spelled).items():
        spelled = f"{labels(data)[source]}: {token} is spelled {count:,} times, and read as text"
        remedy = f'if it ends documents of .txt files, set data.source.separator, e.g. "\\n{token}\\n"'
        progress.say(f"note: {spelled}; {remedy}")
    dtypes = np.uint64, np.int64, np.int64, bool
    # `is_validation`: documents of the sources' own validation splits, of which no copy is left out
    hashes, n_bytes, sources, is_validation = map(np.array, scanned, dtypes)
    assignment = np.full(len(hashes), TRAIN, np.uint8)
    if data.deduplicate:
        candidates = np.flatnonzero(~is_validation)
        assignment[:] = COPY
        assignment[candidates[np.unique(hashes[candidates], return_index=True)[1]]] = TRAIN
    assignment[np.isin(hashes, hashes[is_validation])] = COPY
    assignment[is_validation] = VAL
    masks = [
        (sources == index) & (assignment == TRAIN) for index in np.setdiff1d(sources, sources[is_validation]).tolist()
    ]
    held_out_hashes = _hashes_to_hold_out([(hashes[mask], n_bytes[mask]) for mask in masks], data.val_fraction)
    assignment[(assignment == TRAIN) & (np.isin(hashes, held_out_hashes) | (data.val_fraction == 1))] = VAL
    if not (np.isin((TRAIN, VAL), assignment).all() or (len(hashes) and data.val_fraction == 1)):
        n_copies, n_unreadable = int((assignment == COPY).sum()), omissions.unreadable["count"]
        raise DataError(
            f"data.source: {', '.join(labels(data))}: {len(hashes)} document(s), none of which can be held out "
            f"({omissions.blank:,} blank, {n_copies:,} copies of others, {n_unreadable:,} unreadable); two different "
            "ones of a source are needed: add text, or set data.source.separator to split .txt files into documents"
        )
    return Scan(hashes, n_bytes, sources, assignment, omissions)


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
        target_bytes = fraction * sizes.sum()
        max_hashes = len(hashes) - 1
        is_small = ~np.isin(hashes, np.concatenate(large_hashes))
        if not is_small.all():
            hashes, sizes = hashes[is_small], sizes[is_small]
            target_bytes, max_hashes = min(target_bytes, sizes.sum() / 2), len(hashes)
        smallest_hashes.append(hashes[: max(0, min(max_hashes, 1 + np.searchsorted(np.cumsum(sizes), target_bytes)))])
    return np.concatenate(smallest_hashes)


def _documents(data: DataConfig, folder: Path, omissions: Omissions) -> Iterator[tuple[Document, int, bool]]:
    """Yield each document that is not blank, the index of its source, and whether it is of the source's own validation
    split; each source in order, followed by its validation split if it has one. `folder` has the streams' files.
    """
    is_ids = [isinstance(weighted.source, Tokens) for weighted in data.sources]
    vocabulary = Vocabulary(data.tokenizer) if any(is_ids) else None
    n_read = n_readings = 0
    for index, weighted in enumerate(data.sources):
        for source in filter(None, (weighted.source, reader(weighted.source).held_out(weighted.source))):
            if getattr(source, "streaming", False):
                documents = streamed_documents(source, folder / f"stream-{n_readings}", omissions.skip)
            else:
                documents = reader(source).documents(source, omissions.skip, vocabulary if is_ids[index] else None)
            n_readings += 1
            for content, location in documents:
                if not is_ids[index]:
                    n_bytes = len(encoded := content.encode())
                else:  # ids among texts are hashed as text, to find copies
                    n_bytes = vocabulary.n_bytes(content)
                    encoded = content.data if all(is_ids) else vocabulary.utf8_text(content)
                digest = int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big")
                del encoded  # a long document is in memory once
                if n_bytes and (is_ids[index] or not content.isspace()):
                    yield Document(content, n_bytes, n_read, location, digest), index, source is not weighted.source
                    n_read += 1
                else:
                    omissions.blank += 1


def _scanned_documents(data: DataConfig, folder: Path, scan: Scan, is_wanted: np.ndarray) -> Iterator[Document]:
    """Yield the scanned documents for which `is_wanted`, (documents,) bool, is true. Raises DataError if the sources
    have changed since the scan.
    """
    items = _documents(data, folder, Omissions(data.on_error))
    for number, (item, scanned_hash) in enumerate(zip_longest(items, scan.hashes)):
        if item is None or item[0].digest != scanned_hash:
            changed = f"changed while it was read (document {number + 1}); run again"
            raise DataError(f"data.source: {', '.join(labels(data))}: {changed}")
        if is_wanted[number]:
            yield item[0]


def _training_texts(data: DataConfig, folder: Path, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for document in _scanned_documents(data, folder, scan, scan.assignment == TRAIN):
        advance(document.n_bytes)
        yield from chain.from_iterable(map(split_long_words, split_text(document.content)))
