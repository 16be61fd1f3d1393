"""Where the text comes from: an installed package, local files, or a dataset of the Hugging Face hub.

`documents` reads a source's documents one at a time, again at every call; `identity` is plain data that
changes exactly when they do. Memory is bounded by the longest document (of parquet: by 256 of them).
"""

import codecs
import difflib
import glob
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from lm.config import Files, Hub, Package, Source
from lm.data.hashes import FileHashes
from lm.data.packages import PACKAGES, package_texts
from lm.errors import DataError
from lm.schema import Plain

OnError = Callable[[DataError], None]
ROOT = Path("data")


def stop(error: DataError) -> NoReturn:
    """`data.on_error: fail`."""
    raise error


def documents(source: Source, root: Path = ROOT, on_error: OnError = stop) -> Iterator[str]:
    """The source's documents in a fixed order, blank ones included.

    `root`: `data.root`, where fetched packages are. `on_error` is told of each file or row that can't be read, which is
    left out if it returns.

    Raises:
        DataError: naming the file, dataset or row that can't be read, and why.
    """
    if isinstance(source, Hub):
        return _hub_documents(source, on_error)
    if isinstance(source, Package):
        return _file_documents(package_texts(source.package, root), Files(), on_error)
    return _file_documents(expand(source.paths), source, on_error)


def identity(source: Source, root: Path = ROOT) -> dict[str, Plain]:
    """Plain data that changes exactly when the documents may: versions, settings and sha256 of the content.

    Files are hashed whole, once (`FileHashes`). A dataset of the hub is known by its pinned commit, else by the hash that
    the `datasets` library gives it (which asks the hub).

    Raises:
        DataError: the source is missing or unreadable.
    """
    hashes = FileHashes(root)
    try:
        return _identity(source, root, hashes)
    finally:
        hashes.save()


def _identity(source: Source, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    if isinstance(source, Package):
        paths = package_texts(source.package, root)
        digest = hashlib.sha256(json.dumps([[path.name, hashes.sha256(path)] for path in paths]).encode()).hexdigest()
        return {"package": source.package, "version": PACKAGES[source.package].found_version(), "sha256": digest}
    if isinstance(source, Files):
        files = [{"path": str(path), "sha256": hashes.sha256(path)} for path in expand(source.paths)]
        return {"files": files, "column": source.column, "separator": source.separator}
    settings = {name: getattr(source, name) for name in ("dataset", "config", "split", "column", "revision", "max_documents")}
    folder = Path(source.dataset)
    if folder.is_dir():
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path, folder)]
        return settings | {"files": [{"path": path.relative_to(folder).as_posix(), "sha256": hashes.sha256(path)} for path in paths]}
    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return settings  # a commit says it all, so that a prepared store opens without a network
    return settings | {"fingerprint": _hub_call(source, lambda datasets: _builder(datasets, source).hash)}


def licence(source: Source) -> str:
    """Whose text it is and on what terms, as far as the source says."""
    if isinstance(source, Package):
        return PACKAGES[source.package].licence
    if isinstance(source, Hub):
        return _hub_call(source, lambda datasets: _builder(datasets, source).info.license) or "not stated by the dataset"
    return "not stated (local files)"


def label(source: Source) -> str:
    """A short name for folders: letters, digits, `-` and `_`."""
    name = source.package if isinstance(source, Package) else source.dataset if isinstance(source, Hub) else source.paths[0]
    return re.sub(r"[^A-Za-z0-9_]+", "-", Path(name).name.split(".")[0]).strip("-")[:40] or "text"


def one_line(error: BaseException) -> str:
    """An exception's text on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---------------------------------------------------------------- which files


def expand(paths: list[str]) -> list[Path]:
    """The files that `data.source.paths` stands for: sorted, each once; folders are searched recursively.

    Raises:
        DataError: a path that does not exist, matches nothing, is empty or has a suffix that can't be read.
    """
    found: set[Path] = set()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.is_file() and _kind(file) and not _hidden(file, path)]
            if not files:
                raise DataError(f"{path}: no {SUPPORTED} file in this folder (data.source.paths)")
        elif path.exists():
            files = [path]
            if path.stat().st_size == 0:
                raise DataError(f"{path}: is empty; remove it from data.source.paths")
        else:
            files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
            if not files:
                raise DataError(f"{path}: {_missing(path)} (data.source.paths)")
        found.update(files)
    for path in found:
        if not _kind(path):
            raise DataError(f"{path}: can't read files of this kind; data.source.paths takes {SUPPORTED}")
    unique = {path.resolve(): path for path in sorted(found, reverse=True)}
    return sorted(unique.values())


def _missing(path: Path) -> str:
    if glob.has_magic(str(path)):
        return "matches no file"
    names = [near.name for near in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return "no such file or folder" + (f"; did you mean '{path.parent / close[0]}'?" if close else "")


def _kind(path: Path) -> str:
    """`.txt`, `.jsonl` or `.parquet`; empty if the file is none of them."""
    packed = path.suffix in (".gz", ".zst")
    kind = Path(path.stem).suffix if packed else path.suffix
    return kind if kind in READERS and not (packed and kind == ".parquet") else ""


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


# ---------------------------------------------------------------- reading files


def _file_documents(paths: list[Path], source: Files, on_error: OnError) -> Iterator[str]:
    import pyarrow

    for path in paths:
        try:
            yield from READERS[_kind(path)](path, source, on_error)
        except DataError as error:
            on_error(error)
        except (OSError, pyarrow.ArrowException) as error:
            on_error(DataError(f"{path}: can't be read (damaged?): {one_line(error)}"))


def _open(path: Path) -> io.BufferedReader:
    """The file's bytes, decompressed if its name says so. Unlike `zstandard`, pyarrow reports a truncated file."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(path, compression="detect"), 1 << 20)


def _txt(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    if not source.separator:
        yield "".join(_characters(path))
        return
    overlap = len(source.separator) - 1
    begun: list[str] = []  # a document's text so far, in pieces: joining them at every block would be quadratic
    tail = ""  # may hold the beginning of a separator
    for block in _characters(path):
        first, *others = (tail + block).split(source.separator)
        for other in others:
            yield "".join((*begun, first))
            begun, first = [], other
        cut = max(0, len(first) - overlap)
        begun.append(first[:cut])
        tail = first[cut:]
    yield "".join((*begun, tail))


def _characters(path: Path) -> Iterator[str]:
    """The text in blocks, without a byte order mark; line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with _open(path) as file:
        while True:
            block = file.read(1 << 20)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: not UTF-8 at byte {done - pending + error.start}; {TO_UTF8}") from None
            yield text if done else text.removeprefix("\ufeff")
            done += len(block)
            if not block:
                return


def _jsonl(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    done = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            row = None
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = _value(json.loads(text), source.column, where) if text.strip() else None
            except UnicodeDecodeError as error:
                on_error(DataError(f"{where}: not UTF-8 at byte {done + error.start}; {TO_UTF8}"))
            except (ValueError, RecursionError) as error:
                on_error(DataError(f"{where}: not valid JSON: {one_line(error)}"))
            except DataError as error:
                on_error(error)
            if row is not None:
                yield row
            done += len(line)


def _parquet(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        names = file.schema_arrow.names
        if source.column not in names:
            raise _no_column(str(path), source.column, names)
        number = 0
        for batch in file.iter_batches(256, columns=[source.column]):
            for scalar in batch.column(source.column):
                number += 1
                text = None
                try:
                    text = _value({source.column: scalar.as_py()}, source.column, f"{path}: row {number}")
                except UnicodeDecodeError:
                    on_error(DataError(f"{path}: row {number}: column '{source.column}' is not UTF-8; {TO_UTF8}"))
                except DataError as error:
                    on_error(error)
                if text is not None:
                    yield text


def _value(row: Plain, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where} holds {type(row).__name__}, not a JSON object; write one object a line")
    if column not in row:
        raise _no_column(where, column, list(row))
    value = row[column]
    if not isinstance(value, str):
        raise DataError(f"{where}: column '{column}' holds {type(value).__name__}, not text; remove the row or set data.source.column")
    if re.search("[\ud800-\udfff]", value):  # JSON can escape half of a character, which no encoding can hold
        raise DataError(f"{where}: column '{column}' holds a lone surrogate, not valid Unicode; remove it")
    return value


def _no_column(where: str, column: str, names: Iterable[str]) -> DataError:
    return DataError(f"{where}: no column '{column}'; set data.source.column to one of: {', '.join(names) or '(no columns)'}")


READERS: dict[str, Callable[[Path, Files, OnError], Iterator[str]]] = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
SUPPORTED = ".txt[.gz|.zst], .jsonl[.gz|.zst], .parquet"
TO_UTF8 = "convert it to UTF-8 (e.g. iconv -f latin1 -t utf-8)"


# ---------------------------------------------------------------- the hub


def _hub_documents(source: Hub, on_error: OnError) -> Iterator[str]:
    dataset = _hub_call(
        source,
        lambda datasets: datasets.load_dataset(
            source.dataset, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        ),
    )
    where = f"data.source.dataset: '{source.dataset}' ({source.split})"
    names = dataset.column_names
    if names is not None and source.column not in names:
        raise _no_column(where, source.column, names)
    rows = iter(dataset if names is None else dataset.select_columns([source.column]))
    number = 0
    while number != source.max_documents and (row := _hub_call(source, lambda _: next(rows, None))) is not None:
        number += 1
        try:
            text = _value(row, source.column, f"{where}: row {number}")
        except DataError as error:
            on_error(error)
        else:
            yield text


def _builder(datasets, source: Hub):
    return datasets.load_dataset_builder(source.dataset, source.config, revision=source.revision)


def _hub_call(source: Hub, call: Callable):
    """`call(datasets)`, with whatever the library or the network raises as one line."""
    import datasets

    if source.dataset.startswith((".", "/", "~")) and not Path(source.dataset).is_dir():
        raise DataError(f"data.source.dataset: '{source.dataset}': no such folder")
    try:
        return call(datasets)
    except Exception as error:  # the library has no common base class
        offline = "; prepare it once where there is a network" if isinstance(error, ConnectionError) else ""
        settings = f"config {source.config}, split {source.split}, revision {source.revision}"
        raise DataError(f"data.source.dataset: '{source.dataset}' ({settings}): {one_line(error)}{offline}") from None
