"""Where the text comes from: an installed package, local files, or a dataset of the Hugging Face hub.

`documents` reads a source's documents one at a time, again at every call; `identity` is plain data that
changes exactly when they do. Memory is bounded by the longest document (of parquet and the hub: by `ROWS` of them).
"""

import codecs
import difflib
import glob
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lm.config.data_config import Files, Hub, Package, Source
from lm.data.hashes import FileHashes
from lm.data.packages import PACKAGES, package_texts
from lm.errors import DataError
from lm.schema import Plain

if TYPE_CHECKING:
    import pyarrow

ROOT = Path("data")
BLOCK = 1 << 14  # bytes read at a time
ROWS = 256  # of parquet and the hub, likewise


class Unreadable(DataError):
    """A file, document or row that can't be read.

    Attributes:
        n_bytes: what is lost with it: bytes of the document or row, or of the file on disk where it can't be read any further.
    """

    def __init__(self, reason: str, n_bytes: int = 0):
        super().__init__(reason)
        self.n_bytes = n_bytes


OnError = Callable[[Unreadable], None]


def stop(error: Unreadable) -> NoReturn:
    """`data.on_error: fail`."""
    raise error


def documents(source: Source, root: Path = ROOT, on_error: OnError = stop) -> Iterator[str]:
    """The source's documents in a fixed order, blank ones included.

    `root`: `data.root`, where fetched packages are. `on_error` is told of each file, document or row that can't be read, which
    is left out if it returns; of a file that can't be read any further, what comes before.

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
        except Unreadable as error:
            on_error(error)
        except (OSError, pyarrow.ArrowException) as error:
            on_error(_damaged(str(path), error, path.stat().st_size if path.exists() else 0))


class _Stream(io.RawIOBase):
    """A file's bytes, decompressed if its name says so. Unlike `zstandard`, pyarrow reports a truncated file.

    Raises:
        Unreadable: where it is damaged; all but some 64 kB before that has been read.
    """

    def __init__(self, path: Path):
        import pyarrow

        self.path, self.errors = path, (OSError, pyarrow.ArrowException)
        self.file = pyarrow.OSFile(str(path))
        self.stream = pyarrow.input_stream(self.file, {".gz": "gzip", ".zst": "zstd"}.get(path.suffix))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self.stream.readinto(buffer)
        except self.errors as error:
            raise _damaged(str(self.path), error, self.file.size() - self.file.tell()) from None

    def close(self) -> None:
        self.file.close()
        super().close()


def _txt(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    separator, begin = source.separator.encode(), 0
    with io.BufferedReader(_Stream(path), BLOCK) as file:
        for content in _cut(file, separator):
            try:
                text = _decoded(content, begin, str(path))
            except Unreadable as error:
                on_error(error)
            else:
                yield text
            begin += len(content) + len(separator)


def _cut(file: io.BufferedReader, separator: bytes) -> Iterator[bytearray]:
    """What is between the separators: in UTF-8 none begins within a character."""
    begun = bytearray()
    try:
        while block := file.read1(BLOCK):
            searched = max(0, len(begun) + 1 - len(separator))
            begun += block
            while separator and (end := begun.find(separator, searched)) >= 0:
                yield begun[:end]
                del begun[: end + len(separator)]
                searched = 0
    except Unreadable as damage:
        damage.n_bytes += len(begun)
        raise
    yield begun


def _decoded(content: bytes | bytearray, begin: int, where: str) -> str:
    """The text of bytes that begin at byte `begin` of a file, without a byte order mark; line ends stay as they are."""
    mark = len(codecs.BOM_UTF8) if begin == 0 and content.startswith(codecs.BOM_UTF8) else 0
    try:
        return content[mark:].decode() if mark else content.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"{where}: not UTF-8 at byte {begin + mark + error.start}; {TO_UTF8}", len(content)) from None


def _jsonl(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    begin = 0
    with io.BufferedReader(_Stream(path), BLOCK) as file:
        for number, line in enumerate(file, 1):
            where, row = f"{path}: line {number}", None
            try:
                text = _decoded(line, begin, where)
                row = _value(json.loads(text), source.column, where, len(line)) if text.strip() else None
            except Unreadable as error:
                on_error(error)
            except (ValueError, RecursionError) as error:
                on_error(Unreadable(f"{where}: not valid JSON: {one_line(error)}", len(line)))
            if row is not None:
                yield row
            begin += len(line)


def _parquet(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        names = file.schema_arrow.names
        if source.column not in names:
            raise _no_column(str(path), source.column, names, path.stat().st_size)
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            try:
                yield from _column_texts(file.iter_batches(ROWS, [number], [source.column]), source.column, str(path), on_error, first)
            except (OSError, pyarrow.ArrowException) as error:
                columns = [group.column(index) for index in range(group.num_columns)]
                n_bytes = sum(one.total_compressed_size for one in columns if one.path_in_schema == source.column)
                on_error(_damaged(f"{path}: row group {number + 1} of {file.num_row_groups}", error, n_bytes))
            first += group.num_rows


def _column_texts(
    tables: "Iterable[pyarrow.Table | pyarrow.RecordBatch]", column: str, where: str, on_error: OnError, first: int = 0
) -> Iterator[str]:
    """The texts in a column of tables, the first of whose rows is number `first` + 1."""
    number = first
    for table in tables:
        if column not in table.schema.names:
            raise _no_column(where, column, table.schema.names)
        for scalar in table.column(column):
            number += 1
            text, row = None, f"{where}: row {number}"
            try:
                text = _value({column: scalar.as_py()}, column, row)
            except UnicodeDecodeError:
                n_bytes = scalar.as_buffer().size
                on_error(Unreadable(f"{row}: column '{column}' is not UTF-8; {TO_UTF8}", n_bytes))
            except Unreadable as error:
                on_error(error)
            if text is not None:
                yield text


def _value(row: Plain, column: str, where: str, n_bytes: int = 0) -> str:
    """The text of a row, which is lost with its `n_bytes` if it isn't one."""
    if not isinstance(row, dict):
        raise Unreadable(f"{where} holds {type(row).__name__}, not a JSON object; write one object a line", n_bytes)
    if column not in row:
        raise _no_column(where, column, list(row), n_bytes)
    value = row[column]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise Unreadable(f"{where}: column '{column}' holds {kind}, not text; remove the row or set data.source.column", n_bytes)
    if re.search("[\ud800-\udfff]", value):  # JSON can escape half of a character, which no encoding can hold
        raise Unreadable(f"{where}: column '{column}' holds a lone surrogate, not valid Unicode; remove it", n_bytes)
    return value


def _no_column(where: str, column: str, names: Iterable[str], n_bytes: int = 0) -> Unreadable:
    known = ", ".join(names) or "(no columns)"
    return Unreadable(f"{where}: no column '{column}'; set data.source.column to one of: {known}", n_bytes)


def _damaged(where: str, error: Exception, n_bytes: int) -> Unreadable:
    return Unreadable(f"{where}: can't be read (damaged?): {one_line(error)}", n_bytes)


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
    chosen = dataset if names is None else dataset.select_columns([source.column])
    tables = chosen.with_format("arrow").iter(ROWS)  # of which a row that isn't UTF-8 can be left out
    read = iter(lambda: _hub_call(source, lambda _: next(tables, None)), None)
    yield from islice(_column_texts(read, source.column, where, on_error), source.max_documents)


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
