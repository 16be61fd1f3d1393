"""From a source to a token store in a folder named by its content: prepared once, opened ever after."""

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.config import Config, DataConfig, Files, TokenizerFile
from lm.data.sources import Source, documents, identity, label, licence, one_line
from lm.data.store import (
    FORMAT,
    MANIFEST,
    TOKEN_BYTES,
    TOKENIZER,
    SplitWriter,
    Store,
    npy,
    token_dtype,
    write_file,
    write_manifest,
)
from lm.data.tasks import Task
from lm.data.tasks.store import answer_entropy, symbol_label, symbol_rows, symbol_spec, symbol_tokenizer
from lm.data.tokenizer import END_OF_TEXT, encode, load_tokenizer, token_bytes, train_tokenizer, vocab_size
from lm.errors import ConfigError, DataError, Problem
from lm.files import sync_folder
from lm.schema import Plain

BATCH_BYTES, BATCH_DOCUMENTS = 4 << 20, 2048  # encoded at a time


def prepare(data: DataConfig, progress: bool = False) -> Store:
    """The token store of a configuration: opened if it is there, else made.

    The folder is `data.root/LABEL-KEY`, KEY a hash of source, tokenizer, `val_fraction` and format.
    It appears whole or not at all; processes that want it at the same time wait for the one that makes it.
    `progress`: tell what is done (stderr) and what there is (stdout).

    Raises:
        DataError: the source can't be read, is too small, or the store can't be written or is damaged.
    """
    spec = _spec(data)
    root = Path(data.root)
    name = symbol_label(_tasks(data)) if data.symbolic else label(data.source)
    target = root / f"{name}-{_sha256(spec)[:12]}"
    shown = _Progress(progress)
    try:
        if not target.exists():
            with _locked(root, shown.say):
                if not target.exists():  # another process may have made it meanwhile
                    for leftover in root.glob(".*.partial"):
                        shutil.rmtree(leftover)
                    shown.say(f"{target}: preparing a new token store ({_why(root, target, spec)})")
                    (_build_symbols if data.symbolic else _build)(data, spec, target, shown)
    except OSError as error:  # those of reading the source are DataErrors already
        reason = error.strerror or one_line(error)
        raise DataError(f"{target}: can't write the token store: {reason}; make room, or set data.root to another folder") from None
    store = Store.open(target)
    if progress:
        print(summary(store), flush=True)
    return store


def summary(store: Store) -> str:
    """One line: size, compression, held-out share and licence."""
    train, val, manifest = store.train, store.val, store.manifest
    n_bytes, n_tokens = train.n_bytes + val.n_bytes, train.n_tokens + val.n_tokens
    skipped = f" ({manifest['skipped']:,} empty ones skipped)" if manifest["skipped"] else ""
    return (
        f"{store.path}: {train.n_documents + val.n_documents:,} documents{skipped}, {n_tokens:,} tokens of a vocabulary of "
        f"{store.vocab_size:,}, {n_bytes / n_tokens:.2f} bytes a token; held out: {val.n_documents:,} documents, "
        f"{val.n_bytes / n_bytes:.1%} of the text; licence: {manifest['licence']}"
    )


def check_rows(store: Store, config: Config) -> None:
    """Check that the store's documents are long enough for the rows that `config` asks for.

    Raises:
        ConfigError: a training, validation or long row does not fit.
    """
    seq_len, factor = config.data.seq_len, config.eval.long_context.length_factor
    name, shortest = min(("training", store.train.n_tokens), ("held-out", store.val.n_tokens), key=lambda split: split[1])
    if shortest <= seq_len:
        reason = f"a row needs {seq_len + 1:,} tokens, the {name} text has {shortest:,}"
        raise ConfigError([Problem("data.seq_len", seq_len, reason, f"set it to {shortest - 1} or less, or add text")])
    if config.long_length >= store.val.longest:
        fitting = (store.val.longest - 1) / seq_len
        smaller = f"{int(fitting * 10) / 10:g} or less, or to " if fitting >= 1 else ""
        reason = (
            f"with data.seq_len = {seq_len} a long row needs a held-out document of {config.long_length + 1:,} tokens, "
            f"the longest has {store.val.longest:,}"
        )
        remedy = f"set it to {smaller}0 to train without this evaluation"
        raise ConfigError([Problem("eval.long_context.length_factor", factor, reason, remedy)])


# ---------------------------------------------------------------- which store


def _spec(data: DataConfig) -> dict[str, Plain]:
    """All that decides the store's content, as plain data."""
    if data.symbolic:
        return {"format": FORMAT, **symbol_spec(_tasks(data), data.seq_len)}
    tokenizer: dict[str, Plain] = {"name": data.tokenizer.name}
    if isinstance(data.tokenizer, TokenizerFile):
        path = Path(data.tokenizer.path)
        load_tokenizer(path, data.tokenizer.end_of_text)
        tokenizer |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "end_of_text": data.tokenizer.end_of_text}
    else:
        tokenizer |= {"vocab_size": data.tokenizer.vocab_size}
    return {"format": FORMAT, "source": identity(data.source), "tokenizer": tokenizer, "val_fraction": data.val_fraction}


def _sha256(plain: Plain) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _why(root: Path, target: Path, spec: dict[str, Plain]) -> str:
    """Why none of the folders beside `target` would do: what differs from the most similar one."""
    differences = {}
    for path in root.glob(f"{target.name.rpartition('-')[0]}-*/{MANIFEST}"):
        try:
            manifest = json.loads(path.read_bytes())
            differences[path.parent.name] = [name for name in spec if manifest.get(name) != spec[name]]
        except (OSError, ValueError, AttributeError):
            continue  # damaged, and not asked for
    if not differences:
        return "there is none of this source"
    nearest = min(differences, key=lambda name: len(differences[name]))
    return f"{nearest} differs in {', '.join(differences[nearest])}"


@contextmanager
def _locked(root: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `root`; the system takes it back when the process dies."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{root}: waiting for another process that prepares a token store")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- making it


@dataclass(frozen=True)
class Scan:
    """What one pass over the documents says: all that is kept of them."""

    hashes: np.ndarray  # (documents,) uint64
    n_bytes: np.ndarray  # (documents,) int64, UTF-8
    held_out: np.ndarray  # (documents,) bool
    skipped: int  # blank documents


def _build(data: DataConfig, spec: dict[str, Plain], target: Path, shown: "_Progress") -> None:
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.mkdir()
        scan = _scan(data, shown)
        total = int(scan.n_bytes.sum())
        if isinstance(data.tokenizer, TokenizerFile):
            end_of_text = data.tokenizer.end_of_text
            tokenizer = load_tokenizer(Path(data.tokenizer.path), end_of_text)
        else:
            end_of_text = END_OF_TEXT
            with shown.stage("tokenizer", total) as advance:
                tokenizer = train_tokenizer(_training_texts(data.source, scan, advance), data.tokenizer)
        size, end_id = vocab_size(tokenizer), tokenizer.token_to_id(end_of_text)
        files = write_file(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode())
        with (
            closing(SplitWriter(partial, "train", size, end_id)) as train,
            closing(SplitWriter(partial, "val", size, end_id)) as val,
        ):
            with shown.stage("encode", total) as advance:
                for batch in _batches(_read_again(data.source, scan)):
                    for ids, (_, n_bytes, held_out) in zip(encode(tokenizer, [text for text, *_ in batch]), batch, strict=True):
                        (val if held_out else train).add(ids, n_bytes)
                        advance(n_bytes)
            splits = {}
            for writer in (train, val):
                splits[writer.name], written = writer.finish()
                files |= written
            counts = train.counts + val.counts
        by_token = token_bytes(tokenizer)
        exact = by_token is not None and int(counts @ by_token.astype(np.int64)) == total
        if not exact:  # not byte-level, or it normalises the text
            by_token = np.full(size, total / max(1, counts.sum() - counts[end_id]), np.float32)
            by_token[end_id] = 0
        files |= write_file(partial / TOKEN_BYTES, npy(by_token))
        manifest = spec | {
            "licence": licence(data.source),
            "skipped": scan.skipped,
            "vocab_size": size,
            "end_of_text": {"token": end_of_text, "id": end_id},
            "dtype": token_dtype(size),
            "token_bytes": "exact" if exact else "corpus mean",
            "splits": splits,
            "files": files,
        }
        write_manifest(partial, manifest)
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed by now, unless something failed


def _build_symbols(data: DataConfig, spec: dict[str, Plain], target: Path, shown: "_Progress") -> None:
    """The store of tasks over symbols. Its unigram entropy is that of the answers."""
    tasks, partial = _tasks(data), target.with_name(f".{target.name}.partial")
    tokenizer = symbol_tokenizer(tasks, END_OF_TEXT)
    size = vocab_size(tokenizer)
    try:
        partial.mkdir()
        files, splits = write_file(partial / TOKENIZER, tokenizer.to_str(pretty=True).encode()), {}
        for name, part in (("train", "train"), ("val", "test")):
            with closing(SplitWriter(partial, name, size, size - 1)) as writer:
                for row in symbol_rows(tasks, part, data.seq_len):
                    writer.add(row, len(row))
                splits[name], written = writer.finish()
            splits[name]["unigram_entropy"] = answer_entropy(tasks, part, data.seq_len)
            files |= written
        files |= write_file(partial / TOKEN_BYTES, npy(np.ones(size, np.float32)))
        manifest = spec | {
            "licence": "none needed: made up",
            "skipped": 0,
            "vocab_size": size,
            "end_of_text": {"token": END_OF_TEXT, "id": size - 1},
            "dtype": token_dtype(size),
            "token_bytes": "one a symbol",
            "splits": splits,
            "files": files,
        }
        write_manifest(partial, manifest)
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed by now, unless something failed


def _tasks(data: DataConfig) -> list[Task]:
    return [share.task for share in data.tasks]


def _scan(data: DataConfig, shown: "_Progress") -> Scan:
    """Hash every document, and hold out those with the smallest hashes.

    Equal texts have equal hashes, so copies of a held-out document are never trained on.
    """
    hashes, sizes, skipped = array("Q"), array("q"), 0
    with shown.stage("scan", None) as advance:
        for text in documents(data.source):
            if not text or text.isspace():
                skipped += 1
                continue
            digest, n_bytes = _digest(text)
            hashes.append(digest)
            sizes.append(n_bytes)
            advance(n_bytes)
    where = f"data.source: {label(data.source)}"
    if not hashes:
        raise DataError(f"{where}: all {skipped} documents are empty" if skipped else f"{where}: holds no documents")
    hash_array, size_array = np.array(hashes, np.uint64), np.array(sizes, np.int64)
    distinct = np.unique(hash_array)
    if len(distinct) < 2:
        split = ", or set data.source.separator to split .txt files into documents" if isinstance(data.source, Files) else ""
        raise DataError(f"{where}: {len(hashes)} document(s), all the same; two different ones are needed to hold one out: add text{split}")
    order = np.argsort(hash_array, kind="stable")
    reached = np.searchsorted(np.cumsum(size_array[order]), data.val_fraction * size_array.sum())
    last = min(hash_array[order[reached]], distinct[-2])  # leaves a document to train on
    return Scan(hash_array, size_array, hash_array <= last, skipped)


def _digest(text: str) -> tuple[int, int]:
    """64 bits of the text's hash, and its size in bytes."""
    content = text.encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big"), len(content)


def _read_again(source: Source, scan: Scan) -> Iterator[tuple[str, int, bool]]:
    """(text, bytes, held out?) of every document that the scan saw. Raises DataError if they are not the same."""
    texts = (text for text in documents(source) if text and not text.isspace())
    seen = 0
    for text in texts:
        if seen == len(scan.hashes) or _digest(text)[0] != scan.hashes[seen]:
            break
        yield text, int(scan.n_bytes[seen]), bool(scan.held_out[seen])
        seen += 1
    else:
        if seen == len(scan.hashes):
            return
    raise DataError(f"data.source: {label(source)}: changed while it was read (document {seen + 1}); run again")


def _training_texts(source: Source, scan: Scan, advance: Callable[[int], None]) -> Iterator[str]:
    for text, n_bytes, held_out in _read_again(source, scan):
        advance(n_bytes)
        if not held_out:
            yield text


def _batches(items: Iterator[tuple[str, int, bool]]) -> Iterator[list[tuple[str, int, bool]]]:
    batch: list[tuple[str, int, bool]] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item[1]
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Progress:
    """Bars on a terminal, a line a stage elsewhere, all on stderr; or nothing."""

    def __init__(self, shown: bool):
        from rich.console import Console

        self.console = Console(stderr=True, quiet=not shown)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Gives a function that is told how many more bytes are done, of `total`."""
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        if not self.console.is_terminal:
            self.say(f"{name}: {total:,} bytes" if total else name)
            yield lambda n_bytes: None
            return
        columns = (TextColumn("{task.description:<9}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda n_bytes: bar.advance(task, n_bytes)
