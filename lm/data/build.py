"""Builds a token store: scans the documents, trains the tokenizer, encodes the text shard by shard, and renames the
store's folder at the end.

All files are written in a hidden folder beside the store. A shard has the tokens of some 64 MB of text. The list of its
documents that are left out is written last, which marks the shard as complete. After an interruption the next call
keeps the tokenizer and the complete shards, if the documents are the same. The store then has the same bytes as without
the interruption.
"""

import json
import os
import re
import shutil
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, groupby, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm.config.data_config import END_OF_TEXT, DataConfig, FileSource, Task, TokenSource, TrainedTokenizer
from lm.data.sources import source_labels, source_reader, streamed_documents
from lm.data.store import (
    MANIFEST_FILE,
    SPLITS,
    STORE_NAME_IN_ERRORS,
    TOKENIZER_FILE,
    SourceCounts,
    shard_path,
    token_dtype,
    write_offsets_and_token_bytes,
    write_store_file,
)
from lm.data.tasks import STORE_SEED, SUBSETS, Subset, TaskError, check_task, make_example, symbol_tokenizer
from lm.data.text_files import UnreadableError, files_summary
from lm.data.token_files import Vocabulary
from lm.data.tokenizer import (
    adds_leading_space,
    count_token_bytes,
    decode,
    encode,
    load_tokenizer,
    special_token_mask,
    tokenizer_from_options,
    train_tokenizer,
    vocab_size,
)
from lm.errors import DataError
from lm.files import json_bytes, json_sha256, replace_file, sync_folder
from lm.machine import usable_cores
from lm.plain import Plain
from lm.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_BYTES = 64 << 20  # bytes of text whose tokens are in a shard; it ends with a document
OMITTED_LIST_PREFIX = "omitted-"  # beginning of the names of the lists of documents left out, one a shard
SEQUENCES_PER_TASK = 64  # sequences of each task that a store without text holds in each split
MIN_ANSWERS_PER_SYMBOL, MAX_COUNTED_SEQUENCES = 16, 8192  # of each task, for `_count_answers_by_symbol`
END_TOKENS_SPELLED_IN_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # texts may spell them between documents
MAX_LISTED_ERRORS = 100  # unreadable files, documents and rows that the manifest names
# Assignment of a document. A copy is left out because another document has the same content; an omitted document,
# because the tokenizer does not give it back.
TRAIN, VAL, COPY, OMITTED = 0, 1, 2, 3
# limits of a batch, which a single longer document may exceed: encoding takes a hundred times the batch's bytes of
# memory
BATCH_BYTES, BATCH_DOCUMENTS = 1 << 20, 2048
PIECE_CHARACTERS = 1 << 20  # characters of each piece into which a long document is cut to be encoded
# longest word, in characters, that a tokenizer is trained on: training time grows with the square of its length
MAX_WORD_LENGTH = 1 << 12
# environment variable that turns the `tokenizers` library's own threads off
_PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"
# GPT-2, cl100k and o200k split text at these places, too
_WORD_BORDER = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\S\n)(?=\w)")


@dataclass(frozen=True)
class Document:
    """A document to encode, or a piece of a long document."""

    content: str | np.ndarray  # its text, or its token ids (tokens,)
    n_bytes: int  # UTF-8 bytes of the text
    location: str = ""  # the file or dataset and the place in it
    digest: int = 0  # 64-bit hash of the content
    index: int = 0  # number of documents that the scan has read before this one
    is_first_piece: bool = True  # true if the content is the beginning of the document


class ReadDocument(NamedTuple):
    """A document as it was read from a source."""

    document: Document | UnreadableError | None  # None for a blank document; the error for an unreadable one
    source_index: int
    is_held_out: bool  # whether the document is of the source's own validation split


# A document or piece, and the ids of its tokens in the store's dtype (tokens,), or why the tokenizer does not give it
# back.
TokenizedDocument = tuple[Document, np.ndarray | UnreadableError]


@dataclass(frozen=True)
class Scan:
    """The result of the first pass over all documents. The arrays are in the order in which documents are read."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    sources: np.ndarray  # (documents,) int64: index of each document's source in `DataConfig.sources`
    assignment: np.ndarray  # (documents,) uint8: TRAIN, VAL, COPY or OMITTED
    n_blank: int  # documents without text
    unreadable_summary: dict[str, Plain]  # files, documents and rows that can't be read: their number and the `first`


def count_unreadable(unreadable_summary: dict[str, Plain], error: UnreadableError, on_error: str) -> None:
    """Count `error`, about a file, document or row that can't be read. If `data.on_error` is `fail`, raise it instead.

    unreadable_summary: the `count` of such errors, and the texts of the `first` ones, which this function updates.
    """
    if on_error == "fail":
        raise error
    unreadable_summary["count"] += 1
    if len(unreadable_summary["first"]) < MAX_LISTED_ERRORS:
        unreadable_summary["first"].append(str(error))


def build_store(data: DataConfig, store_identity: dict[str, Plain], store_folder: Path, progress: Progress) -> None:
    """Build the token store of a data configuration in `store_folder`, or finish a build that was interrupted. The
    manifest begins with the entries of `store_identity`, which determine the content.

    The store is built in a hidden folder beside `store_folder`, and renamed at the end. Raises DataError: a source is
    too small, changed meanwhile or can't be read. The hidden folder then stays if it has a complete shard (the tokens
    of some 64 MB of text), and the next call continues from there.
    """
    folder = store_folder.with_name(f".{store_folder.name}.partial")
    progress.say(f"{store_folder}: {'finishing an interrupted' if folder.exists() else 'preparing a new'} token store")
    for label, weighted in zip(source_labels(data), data.sources, strict=True):
        if isinstance(weighted.source, FileSource) and not data.symbolic:
            progress.say(f"{label}: {files_summary(weighted.source)}")
    try:
        folder.mkdir(exist_ok=True)
        store, facts = _build_symbol_store(data, folder) if data.symbolic else _build_text_store(data, folder, progress)
        for path in store.iterdir():
            if path.name not in facts["files"]:
                path.unlink()
        manifest = store_identity | facts
        write_store_file(store / MANIFEST_FILE, json_bytes({**manifest, "sha256": json_sha256(manifest)}))
        os.rename(store, store_folder)
        sync_folder(store_folder.parent)
    except Exception:
        # With a whole shard the next call continues: the cause of the error may be a network or a full disk.
        if not any(folder.glob(f"*/{OMITTED_LIST_PREFIX}*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _build_text_store(data: DataConfig, folder: Path, progress: Progress) -> tuple[Path, dict[str, Plain]]:
    """Write all files of a store of text except the manifest, in a subfolder of `folder` that is named by a hash of the
    documents. Return the subfolder, and the manifest's entries that describe the files.
    """
    scan = _scan_documents(data, folder, progress)
    arrays = (scan.hashes, scan.n_bytes, scan.sources, scan.assignment)
    store = folder / blake2b(b"".join(map(np.ndarray.tobytes, arrays)), digest_size=8).hexdigest()
    store.mkdir(exist_ok=True)
    if not (store / TOKENIZER_FILE).exists():
        if isinstance(data.tokenizer, TrainedTokenizer):
            with progress.byte_bar("tokenizer", int(scan.n_bytes[scan.assignment == TRAIN].sum())) as bar:
                tokenizer = train_tokenizer(_training_texts(data, folder, scan, bar.update), data.tokenizer)
        else:
            tokenizer = tokenizer_from_options(data.tokenizer)
        write_store_file(store / TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(store / TOKENIZER_FILE, data.tokenizer.end_of_text)
    _write_shards(data, store, scan, tokenizer, progress)
    sources = {}
    for name, assignment in zip(SPLITS, (TRAIN, VAL), strict=True):
        is_chosen = scan.assignment == assignment
        documents, n_bytes = (
            np.bincount(scan.sources[is_chosen], weights, len(data.sources))
            for weights in (None, scan.n_bytes[is_chosen])
        )
        facts = zip(source_labels(data), documents, n_bytes, strict=True)
        sources[name] = [SourceCounts(label, 0, int(count), int(size)) for label, count, size in facts]
    return store, {
        "left_out": {"blank": scan.n_blank, "copies": int((scan.assignment == COPY).sum())},
        "unreadable": scan.unreadable_summary,
        **write_offsets_and_token_bytes(store, tokenizer, data.tokenizer.end_of_text, sources),
    }


def _write_shards(data: DataConfig, store: Path, scan: Scan, tokenizer: "Tokenizer", progress: Progress) -> None:
    """Encode the documents of each shard that is not complete, and write their tokens to the folder `store`.

    A document may differ from the text to which its tokens decode. Raises DataError for such a document if
    `data.on_error` is `fail`; else the document's entry in `scan.assignment` becomes `OMITTED`.
    """
    is_stored = scan.assignment <= VAL
    n_bytes = np.where(is_stored, scan.n_bytes, 0)
    shard_numbers = (np.cumsum(n_bytes) - n_bytes) // SHARD_BYTES  # (documents,)
    list_paths = {
        number: store / f"{OMITTED_LIST_PREFIX}{number:05d}.json"
        for number in np.unique(shard_numbers[is_stored]).tolist()
    }
    is_missing = is_stored & ~np.isin(shard_numbers, [number for number, path in list_paths.items() if path.exists()])
    with progress.byte_bar("encode", int(n_bytes.sum()), int(n_bytes[~is_missing].sum())) as bar:
        documents = _read_scanned_documents(data, store.parent, scan, is_missing) if is_missing.any() else iter(())
        with closing(encode_documents(documents, tokenizer, data.tokenizer.end_of_text)) as tokenized_documents:
            for number, group in groupby(tokenized_documents, key=lambda item: shard_numbers[item[0].index]):
                path_by_assignment = {TRAIN: shard_path(store, "train", number), VAL: shard_path(store, "val", number)}
                omitted = _write_shard(path_by_assignment, scan.assignment, group, data.on_error, bar.update)
                write_store_file(list_paths[number], json_bytes(omitted))
    splits = np.unique(scan.assignment[is_stored])
    for path in list_paths.values():
        for index, problem in json.loads(path.read_text(encoding="utf-8")):
            scan.assignment[index] = OMITTED
            count_unreadable(scan.unreadable_summary, UnreadableError(problem), data.on_error)
    if not np.isin(splits, scan.assignment).all():
        reason = "gives no document of the training text, or of the held-out text, back"
        raise DataError(f"data.tokenizer: {reason}; {scan.unreadable_summary['first'][-1]}")


def _write_shard(
    path_by_assignment: dict[int, Path],
    assignment: np.ndarray,
    tokenized_documents: Iterator[TokenizedDocument],
    on_error: str,
    advance: Callable[[int], None],
) -> list[Plain]:
    """Write the tokens of each document to the file of its split. Return [index, reason] of each document that can't be
    decoded from its tokens.

    `path_by_assignment` has the file of each split, by the split's number; `assignment` says for each document the
    number of its split. `advance` is called with the bytes of each document or piece. If `on_error` is `fail`, the
    first document that can't be decoded raises UnreadableError.
    """
    omitted: dict[int, str] = {}
    with ExitStack() as stack:
        paths = path_by_assignment.items()
        files = {split: stack.enter_context(replace_file(path, STORE_NAME_IN_ERRORS)) for split, path in paths}
        for document, tokens in tokenized_documents:
            advance(document.n_bytes)
            file = files[assignment[document.index]]
            if document.is_first_piece:
                start = file.tell()
            if isinstance(tokens, UnreadableError):
                if on_error == "fail":
                    raise tokens
                omitted.setdefault(document.index, str(tokens))
                file.seek(start)
                file.truncate()
            elif document.index not in omitted:
                file.write(tokens)
    return [[index, problem] for index, problem in omitted.items()]


def _build_symbol_store(data: DataConfig, folder: Path) -> tuple[Path, dict[str, Plain]]:
    """Write all files, except the manifest, of a store for tasks over symbols, which has no text. Return the folder of
    the files and the manifest's entries.

    The entry `unigram_cross_entropy` is computed over the tasks' answers alone.
    """
    tasks, length = [weighted.task for weighted in data.tasks], data.seq_len
    for task in tasks:
        try:
            for subset in SUBSETS:
                check_task(task, STORE_SEED, length, subset, 1)
        except TaskError as error:
            raise DataError(f"data.tasks: {task.name}: {error}; change data.seq_len or the task's options") from None
    tokenizer = symbol_tokenizer(tasks)
    n_symbols, counts = vocab_size(tokenizer), {}
    store = folder / "symbols"
    store.mkdir(exist_ok=True)
    write_store_file(store / TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
    for name, subset in zip(SPLITS, SUBSETS, strict=True):
        sequences = [
            [n_symbols - 1, *make_example(task, STORE_SEED, index, length, subset).tokens]
            for task, index in product(tasks, range(SEQUENCES_PER_TASK))
        ]
        write_store_file(shard_path(store, name, 0), np.array(sequences, token_dtype(n_symbols)).tobytes())
        target_answers = MIN_ANSWERS_PER_SYMBOL * n_symbols if subset == "train" else 0
        counts[name] = _count_answers_by_symbol(tasks, length, subset, n_symbols, target_answers)
    # a byte a symbol
    sources = [SourceCounts(task.name, 0, SEQUENCES_PER_TASK, SEQUENCES_PER_TASK * (length + 1)) for task in tasks]
    facts = write_offsets_and_token_bytes(store, tokenizer, END_OF_TEXT, dict.fromkeys(SPLITS, sources), counts)
    return store, {"left_out": {}, "unreadable": {"count": 0, "first": []}, **facts}


def _count_answers_by_symbol(
    tasks: list[Task], length: int, subset: Subset, n_symbols: int, target_answers: int
) -> np.ndarray:
    """Count how often each symbol is an answer in `SEQUENCES_PER_TASK` sequences of each task: int64 (n_symbols,).

    If these sequences have fewer than `target_answers` answers in total, more sequences of each task are counted, up to
    `MAX_COUNTED_SEQUENCES`.
    """
    counts, sequences = np.zeros(n_symbols, np.int64), 0
    while sequences < SEQUENCES_PER_TASK or (sequences < MAX_COUNTED_SEQUENCES and counts.sum() < target_answers):
        for task in tasks:
            sequence = make_example(task, STORE_SEED, sequences, length, subset)
            np.add.at(counts, sequence.tokens[1:][sequence.answer_mask], 1)
        sequences += 1
    return counts


# ---------------------------------------------------------------- reading the sources


def _scan_documents(data: DataConfig, folder: Path, progress: Progress) -> Scan:
    """Hash every document, find copies, and hold out the documents of each source that have the smallest hashes.

    Equal texts have equal hashes, so a text that is held out in one source is held out in all sources. A source's own
    validation split is held out whole; training documents that are also in such a split are left out as copies. Other
    copies are left out only with `data.deduplicate`.

    If `data.val_fraction` is 1 (for text on which models are evaluated, not trained), all documents but copies are held
    out.

    Raises DataError: there is no document, or none to hold out or to train on.
    """
    n_blank, unreadable = 0, {"count": 0, "first": []}
    scanned_values = array("Q"), array("q"), array("H"), array("B")
    end_tokens, n_spelled = {*END_TOKENS_SPELLED_IN_TEXT, data.tokenizer.end_of_text}, Counter[tuple[int, str]]()
    with progress.byte_bar("scan", None) as bar:
        for document, source_index, is_held_out in _read_documents(data, folder):
            if isinstance(document, UnreadableError):
                count_unreadable(unreadable, document, data.on_error)
                continue
            if document is None:
                n_blank += 1
                continue
            for values, value in zip(
                scanned_values, (document.digest, document.n_bytes, source_index, is_held_out), strict=True
            ):
                values.append(value)
            if isinstance(document.content, str):
                n_spelled.update({(source_index, token): document.content.count(token) for token in end_tokens})
            bar.update(document.n_bytes)
    for (source, token), count in (+n_spelled).items():
        spelling_note = f"{source_labels(data)[source]}: {token} is spelled {count:,} times, and read as text"
        remedy = f'if it ends documents of .txt files, set data.source.separator, e.g. "\\n{token}\\n"'
        progress.say(f"note: {spelling_note}; {remedy}")
    dtypes = np.uint64, np.int64, np.int64, bool
    # `is_validation`: documents of the sources' own validation splits, of which no copy is left out
    hashes, n_bytes, sources, is_validation = map(np.array, scanned_values, dtypes)
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
        n_copies = int((assignment == COPY).sum())
        raise DataError(
            f"data.source: {', '.join(source_labels(data))}: {len(hashes)} document(s), none of which can be held out "
            f"({n_blank:,} blank, {n_copies:,} copies of others, {unreadable['count']:,} unreadable); two different "
            "ones of a source are needed: add text, or set data.source.separator to split .txt files into documents"
        )
    return Scan(hashes, n_bytes, sources, assignment, n_blank, unreadable)


def _hashes_to_hold_out(hashes_and_sizes: list[tuple[np.ndarray, np.ndarray]], fraction: float) -> np.ndarray:
    """Return the hashes of the documents to hold out. Each source gives its smallest hashes, until the documents that
    have them make up `fraction` of the source's bytes.

    No source gives all its hashes. A document with more than half, and more than `fraction`, of its source's bytes
    stays in training. A source with such a document holds out at most about half of the bytes of its other documents.

    hashes_and_sizes: for each source, two arrays: the hashes of its documents, and their sizes in bytes.
    """
    bytes_by_hash, large_hashes, smallest_hashes = [], [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for hashes, sizes in hashes_and_sizes:
        distinct_hashes, inverse = np.unique(hashes, return_inverse=True)
        bytes_by_hash.append((distinct_hashes, np.bincount(inverse, sizes)))  # bytes of all documents with a hash
        large_hashes.append(distinct_hashes[bytes_by_hash[-1][1] > max(fraction, 0.5) * sizes.sum()])
    for hashes, sizes in bytes_by_hash:
        is_small, target_bytes = ~np.isin(hashes, np.concatenate(large_hashes)), fraction * sizes.sum()
        if not is_small.all():
            target_bytes = min(target_bytes, sizes[is_small].sum() / 2)
        count = 1 + np.searchsorted(np.cumsum(sizes[is_small]), target_bytes)
        smallest_hashes.append(hashes[is_small][: max(0, min(len(hashes) - 1, count))])
    return np.concatenate(smallest_hashes)


def _read_documents(data: DataConfig, folder: Path) -> Iterator[ReadDocument]:
    """Yield each document of the sources, blank and unreadable ones included. Each source is read in order, followed by
    its validation split if it has one.

    folder: where the documents of streamed sources are kept in files.
    """
    has_ids = [isinstance(weighted.source, TokenSource) for weighted in data.sources]
    vocabulary = Vocabulary(data.tokenizer) if any(has_ids) else None
    for index, weighted in enumerate(data.sources):
        for source in filter(None, (weighted.source, source_reader(weighted.source).held_out_source(weighted.source))):
            is_held_out = source is not weighted.source
            if getattr(source, "streaming", False):
                documents = streamed_documents(source, folder / f"stream-{index}-{is_held_out:d}")
            else:
                documents = source_reader(source).read_documents(source, vocabulary if has_ids[index] else None)
            for content, location in documents:
                document = content
                if not isinstance(content, UnreadableError):
                    if not has_ids[index]:
                        n_bytes = len(encoded := content.encode())
                    else:  # ids among texts are hashed as text, to find copies
                        n_bytes = vocabulary.n_bytes(content)
                        encoded = content.data if all(has_ids) else vocabulary.utf8_text(content)
                    digest = int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big")
                    del encoded  # a long document is in memory once
                    is_blank = not n_bytes or (not has_ids[index] and content.isspace())
                    document = None if is_blank else Document(content, n_bytes, location, digest)
                yield ReadDocument(document, index, is_held_out)


def _read_scanned_documents(data: DataConfig, folder: Path, scan: Scan, is_wanted: np.ndarray) -> Iterator[Document]:
    """Yield the scanned documents for which `is_wanted`, (documents,) bool, is true. Raises DataError if the sources
    have changed since the scan.
    """
    documents = (read.document for read in _read_documents(data, folder) if isinstance(read.document, Document))
    for number, (document, scanned_hash) in enumerate(zip_longest(documents, scan.hashes)):
        if document is None or document.digest != scanned_hash:
            changed = f"changed while it was read (document {number + 1}); run again"
            raise DataError(f"data.source: {', '.join(source_labels(data))}: {changed}")
        if is_wanted[number]:
            yield replace(document, index=number)


def _training_texts(data: DataConfig, folder: Path, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of the training documents in pieces, to train a tokenizer on. `advance` is called with each
    document's bytes.
    """
    for document in _read_scanned_documents(data, folder, scan, scan.assignment == TRAIN):
        advance(document.n_bytes)
        yield from chain.from_iterable(map(split_long_words, split_text(document.content)))


# ---------------------------------------------------------------- encoding, in several threads


class Encoder:
    """Encodes batches of documents as token ids. Documents that are token ids already stay unchanged."""

    def __init__(self, tokenizer: "Tokenizer", leading_token: str):
        self.tokenizer, self.leading_id = tokenizer, tokenizer.token_to_id(leading_token)
        self.dtype = np.dtype(token_dtype(vocab_size(tokenizer)))
        self.bytes_per_token, self.special_token_mask = count_token_bytes(tokenizer), special_token_mask(tokenizer)
        keeps_all_characters = tokenizer.normalizer is None and getattr(tokenizer.model, "unk_token", None) is None
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        is_reversible = all(
            token.special or decode(tokenizer, [index]) == token.content for index, token in added_tokens
        )
        # True if tokens that stand for as many bytes as the text are sure to decode to it.
        self.byte_count_suffices = self.bytes_per_token is not None and keeps_all_characters and is_reversible

    def __call__(self, documents: list[Document]) -> list[TokenizedDocument]:
        """Encode documents or pieces of documents, with the leading token before the first token of each document.

        A document gets an `UnreadableError` in place of ids if its decoded tokens differ from it, or if it has a
        special token.
        """
        texts = [document.content for document in documents if isinstance(document.content, str)]
        text_ids = iter(encode(self.tokenizer, texts))
        tokenized: list[TokenizedDocument] = []
        for document in documents:
            is_text = isinstance(document.content, str)
            tokens = np.array(next(text_ids) if is_text else document.content, self.dtype)
            if is_text and (problem := self._decoding_problem(document.content, tokens)):
                tokens = UnreadableError(f"{document.location}: data.tokenizer: {problem}")
            elif document.is_first_piece:
                tokens = np.insert(tokens, 0, self.leading_id)
            tokenized.append((document, tokens))
        return tokenized

    def _decoding_problem(self, text: str, tokens: np.ndarray) -> str:
        """Return why the tokens don't stand for the text, and what to do; an empty text if they do."""
        if self.byte_count_suffices and self.bytes_per_token[tokens].sum(dtype=np.float64) == len(text.encode()):
            return ""
        decoded_text = decode(self.tokenizer, tokens.tolist(), keep_special=True)
        if decoded_text != text:
            index = next(n for n, (a, b) in enumerate(zip_longest(text, decoded_text)) if a != b)
            excerpts = [ascii(string[max(0, index - 10) : index + 20]) for string in (text, decoded_text)]
            normalizer = self.tokenizer.normalizer
            cause = f"its normalizer is {type(normalizer).__name__}; " if normalizer is not None else ""
            return (
                f"does not give text back unchanged: {excerpts[0]} is decoded as {excerpts[1]}; {cause}set "
                "data.on_error=skip to leave such documents out, or use a byte-level tokenizer, or one with byte "
                "fallback, without a normalizer or prefix space"
            )
        if self.special_token_mask[tokens].any():
            token = self.tokenizer.id_to_token(int(tokens[self.special_token_mask[tokens]][0]))
            return f"the text has the special token {token!r} in it as a word; use a tokenizer that keeps it as text"
        return ""


def can_cut_between_words(tokenizer: "Tokenizer") -> bool:
    """Return whether the pieces of `split_text` are encoded as the same tokens as the whole text. A short test text
    decides this.
    """
    if tokenizer.normalizer is not None or tokenizer.pre_tokenizer is None or adds_leading_space(tokenizer):
        return False
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    text = "ab cd 12 Ef. gh, ij\nkl.\nmn"
    word_starts = {begin for _, (begin, _) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    cuts = {cut.start() for cut in _WORD_BORDER.finditer(text)}
    return cuts <= word_starts and not any(
        re.search(r"\s", token.content) or token.lstrip or token.rstrip for token in added_tokens
    )


def split_text(text: str) -> Iterator[str]:
    """Split a text between words. Yield pieces a little longer than `PIECE_CHARACTERS` characters, then the rest of the
    text.
    """
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS and (cut := _WORD_BORDER.search(text, begin + PIECE_CHARACTERS)):
        yield text[begin : cut.start()]
        begin = cut.start()
    yield text[begin:]


def split_long_words(text: str) -> Iterator[str]:
    """Yield a text in parts to train a tokenizer on. Words of `MAX_WORD_LENGTH` or more characters, e.g. base64, are
    cut at this length.
    """
    begin = 0
    for part in re.finditer(rf"\S{{{MAX_WORD_LENGTH}}}", text):
        yield text[begin : part.end()]
        begin = part.end()
    yield text[begin:]


def encode_documents(
    documents: Iterator[Document], tokenizer: "Tokenizer", leading_token: str
) -> Iterator[TokenizedDocument]:
    """Encode documents in batches, with a thread for each core, and yield them, or their pieces, in order. Threads run
    in parallel as the `tokenizers` library releases the GIL.

    Long documents are encoded in pieces if this leaves their tokens unchanged (`can_cut_between_words`). Memory holds
    few pieces at a time.

    leading_token: the token that precedes each document, the end-of-text token.
    """
    encoder = Encoder(tokenizer, leading_token)
    is_divisible = encoder.bytes_per_token is not None and can_cut_between_words(tokenizer)
    document_pieces = (
        _split_document(document) if is_divisible and isinstance(document.content, str) else [document]
        for document in documents
    )
    queue: deque[Future[list[TokenizedDocument]]] = deque()
    workers = usable_cores()
    thread_pool, sets_variable = ThreadPoolExecutor(workers), workers > 1 and _PARALLELISM_VARIABLE not in os.environ
    if sets_variable:  # each thread encodes alone: the library's own threads would take all cores
        os.environ[_PARALLELISM_VARIABLE] = "false"
    try:
        for batch in _document_batches(chain.from_iterable(document_pieces)):
            queue.append(thread_pool.submit(encoder, batch))
            if len(queue) == 2 * workers - 1:
                yield from queue.popleft().result()
        while queue:
            yield from queue.popleft().result()
    finally:
        thread_pool.shutdown(cancel_futures=True)
        if sets_variable:
            del os.environ[_PARALLELISM_VARIABLE]


def _split_document(document: Document) -> Iterator[Document]:
    """Yield a long document in pieces, which are documents with parts of its text."""
    end = 0
    for text in split_text(document.content):
        begin, end = end, end + len(text)
        yield replace(document, content=text, n_bytes=len(text.encode()), is_first_piece=begin == 0)


def _document_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield documents in lists of at most `BATCH_BYTES` bytes and `BATCH_DOCUMENTS` documents. A single longer document
    has a list of its own.
    """
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and (size + document.n_bytes > BATCH_BYTES or len(batch) == BATCH_DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += document.n_bytes
    if batch:
        yield batch
