"""Local files as documents: plain text, .jsonl (.ndjson) and .parquet, the first two also compressed.

`column_texts` and `Unreadable` serve all readers of documents.
"""

import codecs
import difflib
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import Files
from lm.errors import DataError, one_line
from lm.files import FileHashes, expanded
from lm.schema import Plain

if TYPE_CHECKING:
    import pyarrow

BLOCK = 1 << 14  # bytes read at a time
ROWS = 256  # rows of a parquet file or hub dataset read at a time
TO_UTF8 = "convert it to UTF-8 (e.g. iconv -f latin1 -t utf-8)"


class Unreadable(DataError):
    """A file, document or row that can't be read.

    Attributes:
        n_bytes: bytes that are lost: of the document or row, or of the rest of the file on disk; None: `UnreadableGuard` sets the number.
    """

    def __init__(self, reason: str, n_bytes: int | None = None):
        super().__init__(reason)
        self.n_bytes = n_bytes


OnError = Callable[[Unreadable], None]
Parse = Callable[[Plain | np.ndarray, str], str | np.ndarray]  # makes a document of a value; the str names its location in errors
Reader = Callable[["Path", Files, OnError, Parse], Iterator[str | np.ndarray]]


@dataclass
class UnreadableGuard:
    """A context in which documents are read: an `Unreadable` ends the context, and is passed to `on_error` instead of the caller."""

    on_error: OnError
    n_bytes: int = 0  # size of the file, document or row
    location: str = ""  # name of the file, or part of it, whose OSErrors and pyarrow errors become `Unreadable`; empty: none do

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> bool:
        if self.location and isinstance(error, Exception) and not isinstance(error, Unreadable):
            import pyarrow

            error = damaged(self.location, error) if isinstance(error, OSError | pyarrow.ArrowException) else error
        if not isinstance(error, Unreadable):
            return False
        error.n_bytes = self.n_bytes if error.n_bytes is None else error.n_bytes
        self.on_error(error)
        return True


def text_of(value: Plain | np.ndarray, location: str) -> str:
    """The value, if it is a text; empty for null. Raises Unreadable for other types and for text that is not valid Unicode."""
    if value is None:
        return ""  # a document without text, which is counted as blank
    if not isinstance(value, str):
        kind = type(value).__name__ if not isinstance(value, np.ndarray) else "a list of numbers"
        raise Unreadable(f"{location} holds {kind}, not text; remove the row or set data.source.column")
    if re.search("[\ud800-\udfff]", value):  # JSON can escape half of a surrogate pair, which UTF-8 can't encode
        raise Unreadable(f"{location} holds a lone surrogate, not valid Unicode; remove it")
    return value


def column_texts(
    tables: "Iterable[pyarrow.Table | pyarrow.RecordBatch]",
    column: str,
    location: str,
    on_error: OnError,
    offset: int = 0,
    parse: Parse = text_of,
) -> Iterator[str | np.ndarray]:
    """The documents in a column of tables; `offset`: rows of the file before these tables, for the row's number in errors."""
    number = offset
    for table in tables:
        check_column(location, column, table.schema.names)
        for scalar in table.column(column):
            number += 1
            row = f"{location}: row {number}: column '{column}'"
            with UnreadableGuard(on_error):
                yield parse(_value(scalar, row), row)


def _value(scalar: "pyarrow.Scalar", location: str) -> Plain | np.ndarray:
    """The value of a table's cell; a list of whole numbers as an array (numbers,).

    Raises Unreadable: a text that is not UTF-8, also within another value, or a value that Python lacks, such as a date after 9999.
    """
    items = getattr(scalar, "values", None)  # for a struct, `values` is a method
    is_whole = str(getattr(items, "type", "")).startswith(("int", "uint"))
    try:
        return items.to_numpy(zero_copy_only=False) if is_whole else scalar.as_py()
    except UnicodeDecodeError:
        n_bytes = scalar.as_buffer().size if hasattr(scalar, "as_buffer") else None
        raise Unreadable(f"{location} is not UTF-8; {TO_UTF8}", n_bytes) from None
    except (ValueError, OverflowError) as error:
        raise Unreadable(f"{location} can't be read: {one_line(error)}; remove the row or set data.source.column") from None


def check_column(location: str, column: str, names: list[str]) -> None:
    """Raise Unreadable unless `names` hold `column` exactly once."""
    known_names = ", ".join(dict.fromkeys(names)) or "(no columns)"
    if column not in names:
        raise Unreadable(f"{location}: no column '{column}'; set data.source.column to one of: {known_names}")
    if names.count(column) > 1:
        raise Unreadable(f"{location}: {names.count(column)} columns are named '{column}'; rename all but one")


def damaged(location: str, error: Exception, n_bytes: int | None = None) -> Unreadable:
    """An `Unreadable` for the file, or part of a file, at `location`, whose reading raised `error`; `n_bytes`: number of bytes lost."""
    if isinstance(error, PermissionError | FileNotFoundError):
        reason = "a link to nothing" if os.path.islink(location) else os.strerror(error.errno)
        return Unreadable(f"{location}: can't be read: {reason}; mend it, remove it, or set data.on_error=skip", n_bytes)
    return Unreadable(f"{location}: can't be read (damaged?): {one_line(error)}", n_bytes)


# ---------------------------------------------------------------- local files


PARQUET_BATCH_BYTES = 4 << 20  # text of a parquet file in memory at a time, unless one row has more


def documents(source: Files, root: Path, on_error: OnError, vocabulary: object = None) -> Iterator[str]:
    return read_files(expand(source), source, on_error)


def identity(source: Files, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """The files with the hashes of their content, and the options of reading."""
    files = [{"path": str(path), "sha256": _sha256(path, hashes)} for path in expand(source)]
    return {"files": files, "suffixes": source.suffixes, "column": source.column, "separator": source.separator}


def _sha256(path: Path, hashes: FileHashes) -> str:
    """The hash of a file; "unreadable" for a file that `documents` can't read either, which `data.on_error` may leave out."""
    try:
        return hashes.sha256(path)
    except DataError:
        return "unreadable"


def expand(source: Files) -> list[Path]:
    """The files that `source.paths` names: sorted, each once; folders are searched recursively.

    Raises DataError: a path that does not exist, matches nothing, is empty or has a suffix that can't be read.
    """
    matches: set[Path] = set()
    for path in (expanded(name) for name in source.paths):
        if path.is_dir():
            files = [file for file in files_in(path) if _reader(file, source)]
            if not files:
                reason = "the folder holds no files; put some there, or name another in data.source.paths"
                if ignored_counts := _ignored_by_suffix(path, source):
                    reason = f"the folder holds nothing that is read, {_ignored_in_words(ignored_counts)}"
                raise DataError(f"{path}: {reason}; read are {_supported_suffixes(source)}")
        elif path.exists():
            files = [path]
            if path.stat().st_size == 0:
                raise DataError(f"{path}: is empty; remove it from data.source.paths")
        else:
            files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
            if not files:
                raise DataError(f"{path}: {_reason_missing(path)} (data.source.paths)")
        matches.update(files)
    for path in matches:
        if not _reader(path, source):
            ids = "; token ids are read by data.source={name: tokens, ...}" if path.suffix in (".bin", ".idx") and source.suffixes else ""
            raise DataError(f"{path}: can't read files of this kind; data.source.paths takes {_supported_suffixes(source)}{ids}")
    unique = {path.resolve(): path for path in sorted(matches, reverse=True)}
    return sorted(unique.values())


def description(source: Files) -> str:
    """Words on how many files are read, and how many files of the folders are ignored, by suffix. Raises DataError as `expand` does."""
    folders = [path for path in (expanded(name) for name in source.paths) if path.is_dir()]
    ignored_counts = sum((_ignored_by_suffix(path, source) for path in folders), Counter())
    remedy = "; data.source.suffixes names what is read as text"
    return f"{len(expand(source)):,} files read, " + (f"{_ignored_in_words(ignored_counts)}{remedy}" if ignored_counts else "0 ignored")


def _ignored_in_words(ignored_counts: Counter[str]) -> str:
    listing = ", ".join(f"{suffix} {count:,}" for suffix, count in ignored_counts.most_common(8))
    return f"{ignored_counts.total():,} ignored ({listing}{', ...' if len(ignored_counts) > 8 else ''})"


def _ignored_by_suffix(folder: Path, source: Files) -> Counter[str]:
    hidden: list[Path] = []
    counts = Counter(file.suffix.lower() or "no suffix" for file in files_in(folder, hidden) if not _reader(file, source))
    return counts + Counter(hidden=sum(sum(len(names) for *_, names in os.walk(path)) if path.is_dir() else 1 for path in hidden))


def files_in(folder: Path, hidden: list[Path] | None = None) -> Iterator[Path]:
    """Yield all files below a folder but hidden ones: also files in linked folders, and broken links. Each folder is entered once.

    hidden: a list to which hidden files and folders are appended.

    Raises DataError: a folder can't be read. Without the error its files would be left out unnoticed.
    """
    entered_paths: set[str] = set()
    for path, folders, names in os.walk(folder, onerror=_unreadable_folder, followlinks=True):
        real_path = os.path.realpath(path)
        if hidden is not None and real_path not in entered_paths:
            hidden += [Path(path, name) for name in (*folders, *names) if name.startswith(".")]
        folders[:] = [] if real_path in entered_paths else sorted(name for name in folders if not name.startswith("."))
        if real_path not in entered_paths:
            files = (Path(path, name) for name in names if not name.startswith("."))
            yield from (file for file in files if file.is_file() or not file.exists())
        entered_paths.add(real_path)


def _unreadable_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder can't be read: {error.strerror}; make it readable, or name others in data.source.paths")


def _reason_missing(path: Path) -> str:
    if glob.has_magic(str(path)):
        has_folders = any(map(os.path.isdir, glob.iglob(str(path), recursive=True)))
        return f"matches folders alone: name a folder as it is, or its files as {path / '*'}" if has_folders else "matches no file"
    if path.is_symlink():
        return "a link to nothing"
    names = [neighbour.name for neighbour in path.parent.iterdir()] if path.parent.is_dir() else []
    matches = difflib.get_close_matches(path.name, names, n=1)
    return "no such file or folder" + (f"; did you mean '{path.parent / matches[0]}'?" if matches else "")


def _reader(path: Path, source: Files) -> Reader | None:
    """The reader of a file by its suffix, in upper or lower case; None for other suffixes."""
    compressed = path.suffix.lower() in (".gz", ".zst")
    suffix = (Path(path.stem) if compressed else path).suffix.lower()
    reader = _txt if suffix in map(str.lower, source.suffixes) else READERS.get(suffix)
    return None if compressed and reader is _parquet else reader


def _supported_suffixes(source: Files) -> str:
    suffixes = ", ".join([*source.suffixes, ".jsonl", ".ndjson"])
    remedy = "; data.source.suffixes names what is read as text" if source.suffixes else ""
    return f"{suffixes} (also .gz, .zst) and .parquet{remedy}"


def read_files(paths: list[Path], source: Files, on_error: OnError, parse: Parse = text_of) -> Iterator[str | np.ndarray]:
    """The documents of files, each in the format of its suffix; `parse` makes a document of a row's value.

    `on_error` is called with the error of each file, document or row that can't be read.
    """
    for path in paths:
        with UnreadableGuard(on_error, size_of([path]), str(path)):
            yield from _reader(path, source)(path, source, on_error, parse)


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of all files among `paths` that exist."""
    return sum(path.stat().st_size for path in paths if path.is_file())


class _Stream(io.RawIOBase):
    """A file's bytes, decompressed if its suffix is .gz or .zst. Unlike `zstandard`, pyarrow reports a truncated file.

    Raises Unreadable: the file is damaged; its content up to some 64 kB before the damage has been read.
    """

    file = None  # until `__init__` opens it: Python closes a stream whose `__init__` failed, too

    def __init__(self, path: Path):
        import pyarrow

        self.path, self.errors = path, (OSError, pyarrow.ArrowException)
        self.file = pyarrow.OSFile(os.fsencode(path))
        self.stream = pyarrow.input_stream(self.file, {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower()))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self.stream.readinto(buffer)
        except self.errors as error:
            raise damaged(str(self.path), error, self.file.size() - self.file.tell()) from None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()


def _txt(path: Path, source: Files, on_error: OnError, parse: Parse) -> Iterator[str]:
    with io.BufferedReader(_Stream(path), BLOCK) as file:
        for begin, content in _split_at(file, source.separator.encode()):
            with UnreadableGuard(on_error, len(content)):
                text = _decode(content, begin, str(path))
                content.clear()  # a long document is in memory once
                yield text


def _split_at(file: io.BufferedReader, separator: bytes) -> Iterator[tuple[int, bytearray]]:
    """(index of the first byte, bytes) of each document between separators. Line ends of a separator may be \\n or \\r\\n in the file.

    No UTF-8 character begins within another, so that none is split.
    """
    lines = separator.replace(b"\r\n", b"\n").split(b"\n")
    pattern = re.compile(rb"\r?\n".join(map(re.escape, lines)))
    max_match_bytes = len(separator) + len(lines)
    begin, content = 0, bytearray()
    try:
        while block := file.read1(BLOCK):
            search_start = max(0, len(content) + 1 - max_match_bytes)
            content += block
            while separator and (match := pattern.search(content, search_start)):
                rest = content[match.end() :]
                del content[match.start() :]
                yield begin, content
                begin, content, search_start = begin + match.end(), rest, 0
    except Unreadable as damage:
        damage.n_bytes += len(content)
        raise
    yield begin, content


def _decode(content: bytes | bytearray, begin: int, location: str) -> str:
    """The text of `content`, which is at byte `begin` of a file, without a byte order mark; line ends stay as they are."""
    mark = len(codecs.BOM_UTF8) if begin == 0 and content.startswith(codecs.BOM_UTF8) else 0
    try:
        return str(memoryview(content)[mark:], "utf-8")
    except UnicodeDecodeError as error:
        is_utf16 = begin == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        remedy = TO_UTF8.replace("latin1", "utf-16") if is_utf16 else TO_UTF8
        raise Unreadable(f"{location}: not UTF-8 at byte {begin + mark + error.start}; {remedy}") from None


def _jsonl(path: Path, source: Files, on_error: OnError, parse: Parse) -> Iterator[str | np.ndarray]:
    begin = 0
    with io.BufferedReader(_Stream(path), BLOCK) as file:
        for number, line in enumerate(iter(file.readline, b""), 1):
            location, document = f"{path}: line {number}", None
            with UnreadableGuard(on_error, len(line)):
                if (text := _decode(line, begin, location)).strip():
                    row = _json_object(text, location)
                    check_column(location, source.column, list(row))
                    document = parse(row[source.column], f"{location}: column '{source.column}'")
            begin += len(line)
            line = text = row = None  # a long document is in memory once
            if document is not None:
                yield document


def _json_object(text: str, location: str) -> dict[str, Plain]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{location}: not valid JSON: {one_line(error)}") from None
    if not isinstance(row, dict):
        raise Unreadable(f"{location} holds {type(row).__name__}, not a JSON object; write one object a line")
    return row


def _parquet(path: Path, source: Files, on_error: OnError, parse: Parse) -> Iterator[str | np.ndarray]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with (
        pyarrow.OSFile(os.fsencode(path)) as disk_file,
        ParquetFile(disk_file, buffer_size=1 << 20, pre_buffer=False) as file,
    ):  # with other options a whole row group would be in memory
        check_column(str(path), source.column, file.schema_arrow.names)
        offset = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            columns = [group.column(index) for index in range(group.num_columns)]
            columns = [column for column in columns if f"{column.path_in_schema}.".startswith(f"{source.column}.")]
            row_bytes = sum(column.total_uncompressed_size for column in columns) // max(1, group.num_rows)
            rows = max(1, min(ROWS, PARQUET_BATCH_BYTES // max(1, row_bytes)))
            batches = file.iter_batches(rows, [number], [source.column], use_threads=False)
            location = f"{path}: row group {number + 1} of {file.num_row_groups}"
            with UnreadableGuard(on_error, sum(column.total_compressed_size for column in columns), location):
                yield from column_texts(batches, source.column, str(path), on_error, offset, parse)
            offset += group.num_rows


READERS: dict[str, Reader] = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}  # `_txt` reads `Files.suffixes`
