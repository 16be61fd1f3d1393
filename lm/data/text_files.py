"""Reads documents from local files: plain text and .jsonl (.ndjson), also compressed, and .parquet.

lm/data/sources.py and lm/data/token_files.py use `column_texts`, `Unreadable` and `report_unreadable`, too.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import Files
from lm.errors import DataError, one_line
from lm.files import FileHashes, expand_home
from lm.schema import Plain

if TYPE_CHECKING:
    import pyarrow

READ_BYTES = 1 << 14  # bytes read at a time
ROWS = 256  # rows of a dataset read at a time
UTF8_REMEDY = "convert it to UTF-8 (e.g. iconv -f latin1 -t utf-8)"
UTF16_REMEDY = UTF8_REMEDY.replace("latin1", "utf-16")


class Unreadable(DataError):
    """Raised for a file, document or row that can't be read."""


OnError = Callable[[Unreadable], None]
# makes a document of a value; the str names its location in errors
Parse = Callable[[Plain | np.ndarray, str], str | np.ndarray]
Documents = Iterator[tuple[str | np.ndarray, str]]  # documents, each with its location: the file and the place in it
Reader = Callable[["Path", Files, OnError, Parse], Documents]


@contextmanager
def report_unreadable(on_error: OnError, location: str = "") -> Iterator[None]:
    """A context for reading documents: if `Unreadable` is raised within it, the context ends and calls `on_error` with
    the error. OSErrors and pyarrow's errors become `Unreadable` with the name of the file, or of a part of it, in
    `location`, unless that is empty.
    """
    try:
        yield
    except Unreadable as error:
        on_error(error)
    except Exception as error:
        import pyarrow

        if not location or not isinstance(error, OSError | pyarrow.ArrowException):
            raise
        on_error(unreadable_error(location, error))


def text_of(value: Plain | np.ndarray, location: str) -> str:
    """Return `value` if it is a text, or "" if it is None. Raises Unreadable for other types and for text that is not
    valid Unicode.
    """
    if value is None:
        return ""  # a document without text, which is counted as blank
    if not isinstance(value, str):
        type_name = type(value).__name__ if not isinstance(value, np.ndarray) else "a list of numbers"
        raise Unreadable(f"{location} holds {type_name}, not text; remove the row or set data.source.column")
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
) -> Documents:
    """Yield the documents in a column of tables. `offset`: number of the file's rows before these tables, for row
    numbers in errors.
    """
    row_number = offset
    for table in tables:
        check_column(location, column, table.schema.names)
        for scalar in table.column(column):
            row_number += 1
            row = f"{location}: row {row_number}: column '{column}'"
            with report_unreadable(on_error):
                yield parse(_cell_value(scalar, row), row), row


def _cell_value(scalar: "pyarrow.Scalar", location: str) -> Plain | np.ndarray:
    """Return the value of a table's cell as a Python value; a list of whole numbers as an array (numbers,).

    Raises Unreadable: the value is or contains a text that is not UTF-8, or Python has no such value, such as a date
    after 9999.
    """
    items = getattr(scalar, "values", None)  # for a struct, `values` is a method
    is_whole = str(getattr(items, "type", "")).startswith(("int", "uint"))
    try:
        return items.to_numpy(zero_copy_only=False) if is_whole else scalar.as_py()
    except UnicodeDecodeError:
        raise Unreadable(f"{location} is not UTF-8; {UTF8_REMEDY}") from None
    except (ValueError, OverflowError) as error:
        raise Unreadable(
            f"{location} can't be read: {one_line(error)}; remove the row or set data.source.column"
        ) from None


def check_column(location: str, column: str, names: list[str]) -> None:
    """Raise Unreadable unless `names` hold `column` exactly once."""
    known_names = ", ".join(dict.fromkeys(names)) or "(no columns)"
    if column not in names:
        raise Unreadable(f"{location}: no column '{column}'; set data.source.column to one of: {known_names}")
    if names.count(column) > 1:
        raise Unreadable(f"{location}: {names.count(column)} columns are named '{column}'; rename all but one")


def unreadable_error(location: str, error: Exception) -> Unreadable:
    """Return an `Unreadable` for the `error` raised by reading `location`, a file or a part of one."""
    reason = os.strerror(error.errno) if getattr(error, "errno", None) else one_line(error)
    return Unreadable(f"{location}: can't be read: {reason}; mend it, remove it, or set data.on_error=skip")


# ---------------------------------------------------------------- local files


SUPPORTED = "those of data.source.suffixes, .jsonl, .ndjson (also .gz, .zst), .json of JSON lines, and .parquet"
_LATER_DOCUMENT = ": document from byte "  # in the location of a document after a separator
PARQUET_ROWS = 32  # rows of a parquet file in memory at a time


def file_documents(source: Files, on_error: OnError, vocabulary: object = None) -> Documents:
    """Yield the documents of files. Raises DataError at their end if the separator occurs in no text file."""
    is_split = not source.separator
    for document, location in read_files(expand(source), source, on_error):
        is_split = is_split or _LATER_DOCUMENT in location
        yield document, location
    if not is_split:
        remedy = "set one that stands between documents, or drop it; in YAML \\n is a line end in double quotes alone"
        raise DataError(
            f"data.source.separator: {source.separator!r} occurs in no text file, and rows are not split; {remedy}"
        )


def files_identity(source: Files, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """Return plain data that identifies the documents: paths and sha256 of the files, and the options that affect
    reading. A file that can't be read has the sha256 "unreadable"; reading it is an error or not by `data.on_error`.
    """
    files = []
    for path in expand(source):
        files.append({"path": str(path), "sha256": "unreadable"})
        with suppress(DataError):
            files[-1]["sha256"] = hashes.sha256(path)
    return {"files": files, "suffixes": source.suffixes, "column": source.column, "separator": source.separator}


def expand(source: Files) -> list[Path]:
    """Return the files that `source.paths` names, sorted, without duplicates; folders are searched recursively.

    Raises DataError: a path does not exist, matches nothing, is empty or has a suffix that can't be read.
    """
    matches: set[Path] = set()
    for path in map(expand_home, source.paths):
        files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        files = [file for file in files if file.is_file()]
        if path.is_dir():
            files = [file for file in files_in(path) if _is_read(file, source)]
        elif path.is_file() and path.stat().st_size == 0:
            raise DataError(f"{path}: is empty; remove it from data.source.paths")
        if not files:
            remedy = f"; files that are read: {SUPPORTED}" if path.is_dir() else near_name(path)
            raise DataError(f"{path}: holds, matches or is no file that is read (data.source.paths){remedy}")
        matches.update(files)
    for path in matches:
        if not _reader_of(path, source):
            remedy = "token ids are read by data.source={name: tokens, ...}"
            raise DataError(f"{path}: can't read files of this kind; data.source.paths takes {SUPPORTED}; {remedy}")
    unique = {path.resolve(): path for path in sorted(matches, reverse=True)}
    return sorted(unique.values())


def near_name(path: Path) -> str:
    """Return the most similar name in a missing file's folder as advice; empty if there is none."""
    names = [neighbour.name for neighbour in path.parent.iterdir()] if path.parent.is_dir() else []
    matches = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean '{path.parent / matches[0]}'?" if matches else ""


def description(source: Files) -> str:
    """Say how many files are read, and how many in folders are not, by suffix. Raises DataError as `expand` does."""
    folders = filter(Path.is_dir, map(expand_home, source.paths))
    ignored = Counter(
        _suffix(file) or "no suffix" for path in folders for file in files_in(path) if not _is_read(file, source)
    )
    listing = ", ".join(f"{suffix} {count:,}" for suffix, count in ignored.most_common(8))
    remedy = f" ({listing}); data.source.suffixes names what is read as text" if ignored else ""
    return f"{len(expand(source)):,} files read, {ignored.total():,} ignored{remedy}"


def files_in(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, also broken links and files in linked folders, except hidden ones. Each folder is
    entered once.

    Raises DataError: a folder can't be read. Without this error the folder's files would be left out unnoticed.
    """
    entered_paths: set[str] = set()
    for path, folders, names in os.walk(folder, onerror=_unreadable_folder, followlinks=True):
        if (real_path := os.path.realpath(path)) in entered_paths:
            folders.clear()
            continue
        entered_paths.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(path, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file() or not file.exists())


def _unreadable_folder(error: OSError) -> None:
    raise DataError(f"{error.filename}: the folder can't be read: {error.strerror}; make it readable")


def _suffix(path: Path) -> str:
    """Return a file's suffix in lower case, for a compressed file both, such as `.json.gz`."""
    is_compressed = path.suffix.lower() in (".gz", ".zst")
    return ((Path(path.stem).suffix if is_compressed else "") + path.suffix).lower()


def _is_read(path: Path, source: Files) -> bool:
    """Return whether a file in a folder is read. A plain .json file is read if it is named: most describe others."""
    return _suffix(path) != ".json" and _reader_of(path, source) is not None


def _reader_of(path: Path, source: Files) -> Reader | None:
    """Return the function that reads a file by its suffix, in upper or lower case; None for a suffix that is not
    supported.
    """
    suffix = _suffix(path).removesuffix(".gz").removesuffix(".zst")
    reader = _read_txt if suffix in map(str.lower, source.suffixes) else READERS.get(suffix)
    return None if suffix != path.suffix.lower() and reader is _read_parquet else reader


def read_files(paths: list[Path], source: Files, on_error: OnError, parse: Parse = text_of) -> Documents:
    """Yield the documents of files, whose suffixes tell their formats; `parse` turns the value of a row's column into a
    document.

    `on_error` is called with the error of each file, document or row that can't be read.
    """
    for path in paths:
        with report_unreadable(on_error, str(path)):
            yield from _reader_of(path, source)(path, source, on_error, parse)


def _open_decompressed(path: Path) -> io.BufferedReader:
    """Open a file for reading. pyarrow decompresses .gz and .zst, because `zstandard` would not report a truncated
    file. Up to about 64 kB of content before damage of a compressed file are lost, too.
    """
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise Unreadable(f"{path}: is empty, which no compressed file is: damaged; fetch it again, or remove it")
    return io.BufferedReader(pyarrow.input_stream(pyarrow.OSFile(os.fsencode(path)), compression), READ_BYTES)


def _read_txt(path: Path, source: Files, on_error: OnError, parse: Parse) -> Documents:
    with _open_decompressed(path) as file:
        for begin, content in _split_at_separator(file, source.separator.encode()):
            with report_unreadable(on_error):
                text = _decode(content, begin, str(path))
                content.clear()  # a long document is in memory once
                if not begin and source.column in _first_row(text):
                    reason = f"holds JSON lines with the column '{source.column}'"
                    raise Unreadable(f"{path}: {reason}, whose syntax would be trained on; name it .jsonl")
                yield text, f"{path}{_LATER_DOCUMENT}{begin:,} on" if begin else str(path)


def _split_at_separator(file: io.BufferedReader, separator: bytes) -> Iterator[tuple[int, bytearray]]:
    """Yield (index of the first byte, bytes) of each document between separators. A line end in a separator matches \\n
    and \\r\\n.

    The split can't cut a character in two: in UTF-8 no character's bytes begin within another character.
    """
    lines = separator.replace(b"\r\n", b"\n").split(b"\n")
    pattern = re.compile(rb"\r?\n".join(map(re.escape, lines)))
    max_match_bytes = len(separator) + len(lines)
    begin, content = 0, bytearray()
    while block := file.read1(READ_BYTES):
        search_start = max(0, len(content) + 1 - max_match_bytes)
        content += block
        while separator and (match := pattern.search(content, search_start)):
            next_content = content[match.end() :]
            del content[match.start() :]
            yield begin, content
            begin, content, search_start = begin + match.end(), next_content, 0
    yield begin, content


def _decode(content: bytes | bytearray, begin: int, location: str) -> str:
    """Decode the bytes `content`, found at byte `begin` of a file, as UTF-8 without a byte order mark; line ends stay
    unchanged.
    """
    n_mark_bytes = len(codecs.BOM_UTF8) if begin == 0 and content.startswith(codecs.BOM_UTF8) else 0
    try:
        text = str(memoryview(content)[n_mark_bytes:], "utf-8")
    except UnicodeDecodeError as error:
        is_utf16 = begin == 0 and content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        remedy = UTF16_REMEDY if is_utf16 else UTF8_REMEDY
        raise Unreadable(f"{location}: not UTF-8 at byte {begin + n_mark_bytes + error.start}; {remedy}") from None
    if content.count(0) > len(content) // 8:  # half the bytes of English in UTF-16 are zero, and each is UTF-8
        raise Unreadable(f"{location}: {content.count(0):,} bytes are zero, as in UTF-16; {UTF16_REMEDY}")
    return text


def _read_jsonl(path: Path, source: Files, on_error: OnError, parse: Parse) -> Documents:
    begin = 0
    with _open_decompressed(path) as file:
        for number, line in enumerate(iter(file.readline, b""), 1):
            location, document = f"{path}: line {number}", None
            with report_unreadable(on_error):
                if (text := _decode(line, begin, location)).strip():
                    row = _json_object(text, location)
                    check_column(location, source.column, list(row))
                    document = parse(row[source.column], f"{location}: column '{source.column}'")
            begin += len(line)
            line = text = row = None  # a long document is in memory once
            if document is not None:
                yield document, location
    if not begin:  # a file of 0 bytes among others is counted as a blank document
        yield parse(None, str(path)), str(path)


def _first_row(text: str) -> dict[str, Plain]:
    """Return the first line of a text if it is a JSON object, as in JSON lines; else {}."""
    with suppress(Unreadable):
        return _json_object(text.partition("\n")[0], "") if text.startswith("{") else {}
    return {}


def _json_object(text: str, location: str) -> dict[str, Plain]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{location}: not valid JSON: {one_line(error)}") from None
    if not isinstance(row, dict):
        raise Unreadable(f"{location} holds {type(row).__name__}, not a JSON object; write one object a line")
    return row


def _read_parquet(path: Path, source: Files, on_error: OnError, parse: Parse) -> Documents:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    # with other options a whole row group would be in memory
    with (
        pyarrow.OSFile(os.fsencode(path)) as disk_file,
        ParquetFile(disk_file, buffer_size=1 << 20, pre_buffer=False) as file,
    ):
        check_column(str(path), source.column, file.schema_arrow.names)
        offset = 0
        for group_number in range(file.num_row_groups):
            batches = file.iter_batches(PARQUET_ROWS, [group_number], [source.column], use_threads=False)
            location = f"{path}: row group {group_number + 1} of {file.num_row_groups}"
            with report_unreadable(on_error, location):
                yield from column_texts(batches, source.column, str(path), on_error, offset, parse)
            offset += file.metadata.row_group(group_number).num_rows


# `_read_txt`: `Files.suffixes`
READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_jsonl,
    ".parquet": _read_parquet,
}
