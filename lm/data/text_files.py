"""Reads documents from local files: plain text and .jsonl (.ndjson), also compressed, and .parquet.

lm/data/sources.py and lm/data/token_files.py use parts of this module to read datasets and token ids.
"""

import codecs
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import FileSource
from lm.errors import DataError, one_line
from lm.files import FileHashes, expand_home
from lm.plain import Plain

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, IterableDataset

BYTES_PER_READ = 1 << 14  # bytes read at a time
ROWS_PER_READ = 256  # rows of a dataset read at a time
PARQUET_ROWS_PER_READ = 32  # rows of a parquet file in memory at a time
UTF8_REMEDY = "convert it to UTF-8 (iconv -f ENCODING -t utf-8)"


class UnreadableError(DataError):
    """Raised for a file, document or row that can't be read."""


# A document, or the error in place of one, and its location: the file and the place in it.
Documents = Iterator[tuple[str | np.ndarray | UnreadableError, str]]
# makes a document of a value; the str names its location in errors
DocumentParser = Callable[[Plain | np.ndarray, str], str | np.ndarray]


def parse_document(
    parse: Callable[..., str | np.ndarray], value: object, location: str
) -> str | np.ndarray | UnreadableError:
    """Return the document that `parse` makes of `value`. If it raises `UnreadableError`, return this error instead."""
    try:
        return parse(value, location)
    except UnreadableError as error:
        return error


def append_read_error(documents: Documents, location: str) -> Documents:
    """Yield `documents`. If reading them fails, yield an `UnreadableError` last, which names `location`, a file or a
    part of one.
    """
    import pyarrow

    try:
        yield from documents
    except UnreadableError as error:
        yield error, location
    except (OSError, pyarrow.ArrowException) as error:
        reason = os.strerror(error.errno) if getattr(error, "errno", None) else one_line(error)
        remedy = "decompress it (zstd -d --long=31)" if "too much memory" in reason else "mend it"
        remedy += ", remove it, or set data.on_error=skip"
        yield UnreadableError(f"{location}: can't be read: {reason}; {remedy}"), location


def checked_text(value: Plain | np.ndarray, location: str) -> str:
    """Return `value` if it is a text, or "" if it is None. Raises UnreadableError for other types, and for text that is
    not valid Unicode.
    """
    if value is None:
        return ""  # a document without text, which is counted as blank
    if not isinstance(value, str):
        type_name = type(value).__name__ if not isinstance(value, np.ndarray) else "a list of numbers"
        raise UnreadableError(f"{location} holds {type_name}, not text; remove the row or set data.source.column")
    if re.search("[\ud800-\udfff]", value):  # JSON can escape half of a surrogate pair, which UTF-8 can't encode
        raise UnreadableError(f"{location} holds a lone surrogate, not valid Unicode; remove it")
    return value


# ---------------------------------------------------------------- tables


def dataset_documents(
    dataset: "Dataset | IterableDataset", column: str, location: str, parse: DocumentParser = checked_text
) -> Documents:
    """Yield the documents in a column of a dataset of the `datasets` library. `parse` turns a value of the column into
    a document.
    """
    if (names := dataset.column_names) is not None:
        check_column(location, column, names)
        dataset = dataset.select_columns([column])
    # arrow: a row that isn't UTF-8 can be left out alone
    yield from column_documents(dataset.with_format("arrow").iter(ROWS_PER_READ), column, location, parse)


def column_documents(
    tables: "Iterable[pyarrow.Table | pyarrow.RecordBatch]",
    column: str,
    location: str,
    parse: DocumentParser = checked_text,
    row_offset: int = 0,
) -> Documents:
    """Yield the documents in a column of Arrow tables, and their locations.

    row_offset: number of the file's rows before these tables, for row numbers in errors.
    """

    def document(scalar: "pyarrow.Scalar", location: str) -> str | np.ndarray:
        items = getattr(scalar, "values", None)  # for a struct, `values` is a method
        is_whole = str(getattr(items, "type", "")).startswith(("int", "uint"))
        try:
            value = items.to_numpy(zero_copy_only=False) if is_whole else scalar.as_py()
        except UnicodeDecodeError:
            raise UnreadableError(f"{location} is not UTF-8; {UTF8_REMEDY}") from None
        return parse(value, location)

    row_number = row_offset
    for table in tables:
        check_column(location, column, table.schema.names)
        for scalar in table.column(column):
            row_number += 1
            row = f"{location}: row {row_number}: column '{column}'"
            yield parse_document(document, scalar, row), row


def check_column(location: str, column: str, names: list[str]) -> None:
    """Raise UnreadableError unless `names` contain `column` exactly once."""
    if (count := names.count(column)) != 1:
        listing = ", ".join(dict.fromkeys(names)) or "(no columns)"
        number = f"{count} columns" if count else "no column"
        raise UnreadableError(f"{location}: {number} '{column}'; set data.source.column to one of: {listing}")


# ---------------------------------------------------------------- local files


SUPPORTED_FILES_TEXT = (
    "files of data.source.suffixes, .jsonl, .ndjson (also .gz, .zst), .json of JSON lines, and .parquet; token ids are "
    "read by data.source={name: tokens, ...}"
)
_SPLIT_LOCATION_TEXT = ": document from byte "  # in the location of a document after a separator


def file_documents(source: FileSource, vocabulary: object = None) -> Documents:
    """Yield the documents of local files. Raises DataError after the last document if `source.separator`, which splits
    text files into documents, occurs in none of them.
    """
    is_split = not source.separator
    for document, location in read_files(source_files(source), source):
        is_split = is_split or _SPLIT_LOCATION_TEXT in location
        yield document, location
    if not is_split:
        remedy = "set one that stands between documents, or drop it; in YAML \\n is a line end in double quotes alone"
        raise DataError(
            f"data.source.separator: {source.separator!r} occurs in no text file, and rows are not split; {remedy}"
        )


def files_identity(source: FileSource, hashes: FileHashes) -> dict[str, Plain]:
    """Return plain data that identifies the documents: paths and sha256 of the files, and the options that affect
    reading.

    A file that can't be read has the sha256 "unreadable"; `data.on_error` decides later whether this is an error.
    """
    files = []
    for path in source_files(source):
        files.append({"path": str(path), "sha256": "unreadable"})
        with suppress(DataError):
            files[-1]["sha256"] = hashes.sha256(path)
    return {"files": files, "suffixes": source.suffixes, "column": source.column, "separator": source.separator}


def source_files(source: FileSource) -> list[Path]:
    """Return the files that `source.paths` names, as `find_files` does."""
    return find_files(source.paths, partial(_is_supported_file, source), SUPPORTED_FILES_TEXT)


def find_files(paths: list[str], is_supported: Callable[[Path, bool], bool], supported_text: str) -> list[Path]:
    """Return the files that `paths` name, sorted, without duplicates. Paths are files, folders, which are searched
    recursively, or globs.

    Args:
        is_supported: a function of a file's path, and of whether the file was found in a folder, that tells whether
            files of this kind are read. Other files in folders are passed over.
        supported_text: the files that are read, in words, for errors.

    Raises DataError: a path does not exist, matches nothing, or is a file that is not read.
    """
    matches: set[Path] = set()
    for path in map(expand_home, paths):
        if path.is_dir():
            files = [file for file in files_below(path) if is_supported(file, True)]
        else:
            files = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
            files = [file for file in files if file.is_file()]
        if unsupported_files := [file for file in files if not is_supported(file, path.is_dir())]:
            raise DataError(
                f"{unsupported_files[0]}: can't read files of this kind; data.source.paths takes {supported_text}"
            )
        if not files:
            reason = f"holds, matches or is no file that is read (data.source.paths): {supported_text}"
            raise DataError(f"{path}: {reason}")
        matches.update(files)
    path_by_target = {path.resolve(): path for path in sorted(matches, reverse=True)}
    return sorted(path_by_target.values())


def files_summary(source: FileSource) -> str:
    """Return a line that says how many files are read, and how many in folders are ignored, by suffix. Raises DataError
    as `source_files` does.
    """
    folders = filter(Path.is_dir, map(expand_home, source.paths))
    ignored_counts = Counter(
        _full_suffix(file) or "no suffix"
        for path in folders
        for file in files_below(path)
        if not _is_supported_file(source, file, True)
    )
    listing = ", ".join(f"{suffix} {count:,}" for suffix, count in ignored_counts.most_common(8))
    remedy = f" ({listing}); data.source.suffixes names what is read as text" if ignored_counts else ""
    return f"{len(source_files(source)):,} files read, {ignored_counts.total():,} ignored{remedy}"


def files_below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, also broken links and files in linked folders, except hidden ones. Each folder is
    entered once.

    Raises DataError: a folder can't be read. Without this error the folder's files would be left out unnoticed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: the folder can't be read: {error.strerror}; make it readable")

    entered_paths: set[str] = set()
    for path, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real_path := os.path.realpath(path)) in entered_paths:
            folders.clear()
            continue
        entered_paths.add(real_path)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(path, name) for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file() or not file.exists())


def _full_suffix(path: Path) -> str:
    """Return a file's suffix in lower case; for a compressed file, both suffixes, such as `.json.gz`."""
    is_compressed = path.suffix.lower() in (".gz", ".zst")
    return ((Path(path.stem).suffix if is_compressed else "") + path.suffix).lower()


def _is_supported_file(source: FileSource, path: Path, in_folder: bool) -> bool:
    """Return whether a file is read. A plain .json file in a folder is not: it mostly describes other files."""
    return _file_reader(path, source) is not None and not (in_folder and _full_suffix(path) == ".json")


def _file_reader(path: Path, source: FileSource) -> Callable[[Path, FileSource, DocumentParser], Documents] | None:
    """Return the function that reads a file by its suffix, in upper or lower case. Return None for a suffix that is not
    supported.
    """
    suffix = _full_suffix(path).removesuffix(".gz").removesuffix(".zst")
    if suffix in map(str.lower, source.suffixes):
        return _read_txt
    if suffix in (".jsonl", ".ndjson", ".json"):
        return _read_jsonl
    return _read_parquet if _full_suffix(path) == ".parquet" else None


def read_files(paths: list[Path], source: FileSource, parse: DocumentParser = checked_text) -> Documents:
    """Yield the documents of files, whose suffixes tell their formats. `parse` turns the value of a row's column into a
    document.
    """
    for path in paths:
        yield from append_read_error(_file_reader(path, source)(path, source, parse), str(path))


def _open_decompressed(path: Path) -> io.BufferedReader:
    """Open a file for reading, decompressed if its suffix is .gz or .zst.

    pyarrow decompresses, because the package `zstandard` would not report a truncated file. If a compressed file is
    damaged, up to about 64 kB of content before the damage are lost, too.
    """
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise UnreadableError(f"{path}: is empty, which no compressed file is: damaged; fetch it again, or remove it")
    return io.BufferedReader(pyarrow.input_stream(pyarrow.OSFile(os.fsencode(path)), compression), BYTES_PER_READ)


def _read_txt(path: Path, source: FileSource, parse: DocumentParser) -> Documents:
    """Yield the documents of a plain-text file, which the source's separator splits."""
    begin = 0

    def document(content: bytearray, location: str) -> str:
        text = _decode_utf8(begin, content, location)
        if not begin and source.column in _first_json_row(text):
            reason = f"holds JSON lines with the column '{source.column}'"
            raise UnreadableError(f"{path}: {reason}, whose syntax would be trained on; name it .jsonl")
        return text

    with _open_decompressed(path) as file:
        for begin, content in _split_at_separator(file, source.separator.encode()):
            text = parse_document(document, content, str(path))
            content.clear()  # a long document is in memory once
            yield text, f"{path}{_SPLIT_LOCATION_TEXT}{begin:,} on" if begin else str(path)


def _split_at_separator(file: io.BufferedReader, separator: bytes) -> Iterator[tuple[int, bytearray]]:
    """Yield (index of the first byte, bytes) of each document between separators. A line end in a separator matches \\n
    and \\r\\n.

    The split can't cut a character in two: in UTF-8 no character's bytes begin within another character.
    """
    lines = separator.replace(b"\r\n", b"\n").split(b"\n")
    pattern = re.compile(rb"\r?\n".join(map(re.escape, lines)))
    max_match_bytes = len(separator) + len(lines)
    begin, content = 0, bytearray()
    while block := file.read1(BYTES_PER_READ):
        search_start = max(0, len(content) + 1 - max_match_bytes)
        content += block
        while separator and (match := pattern.search(content, search_start)):
            next_content = content[match.end() :]
            del content[match.start() :]
            yield begin, content
            begin, content, search_start = begin + match.end(), next_content, 0
    yield begin, content


def _decode_utf8(byte_offset: int, content: bytes | bytearray, location: str) -> str:
    """Decode the bytes `content`, found at byte `byte_offset` of a file, as UTF-8 without a byte order mark. Line ends
    stay unchanged.
    """
    n_mark_bytes = len(codecs.BOM_UTF8) if byte_offset == 0 and content.startswith(codecs.BOM_UTF8) else 0
    try:
        text = str(memoryview(content)[n_mark_bytes:], "utf-8")
    except UnicodeDecodeError as error:
        place = byte_offset + n_mark_bytes + error.start
        raise UnreadableError(f"{location}: not UTF-8 at byte {place}; {UTF8_REMEDY}") from None
    if content.count(0) > len(content) // 8:  # half the bytes of English in UTF-16 are zero, and each is UTF-8
        raise UnreadableError(f"{location}: {content.count(0):,} bytes are zero, as in UTF-16; {UTF8_REMEDY}")
    return text


def _read_jsonl(path: Path, source: FileSource, parse: DocumentParser) -> Documents:
    """Yield the documents of a file of JSON lines: the value of the source's column in each row."""
    begin = 0

    def document(line: bytes, location: str) -> str | np.ndarray:
        row = _json_object(_decode_utf8(begin, line, location), location)
        check_column(location, source.column, list(row))
        return parse(row[source.column], f"{location}: column '{source.column}'")

    with _open_decompressed(path) as file:
        for number, line in enumerate(iter(file.readline, b""), 1):
            location = f"{path}: line {number}"
            content = parse_document(document, line, location) if line.strip() else None
            begin += len(line)
            line = None  # a long document is in memory once
            if content is not None:
                yield content, location
    if not begin:  # a file of 0 bytes among others is counted as a blank document
        yield parse(None, str(path)), str(path)


def _first_json_row(text: str) -> dict[str, Plain]:
    """Return the first line of a text if it is a JSON object, as in JSON lines; else {}."""
    with suppress(UnreadableError):
        return _json_object(text.partition("\n")[0], "") if text.startswith("{") else {}
    return {}


def _json_object(text: str, location: str) -> dict[str, Plain]:
    """Return the JSON object in `text`. Raises UnreadableError for text that is not one."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{location}: not valid JSON: {one_line(error)}") from None
    if not isinstance(row, dict):
        raise UnreadableError(f"{location} holds {type(row).__name__}, not a JSON object; write one object a line")
    return row


def _read_parquet(path: Path, source: FileSource, parse: DocumentParser) -> Documents:
    """Yield the documents of a Parquet file: the values of the source's column."""
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
            batches = file.iter_batches(PARQUET_ROWS_PER_READ, [group_number], [source.column], use_threads=False)
            documents = column_documents(batches, source.column, str(path), parse, offset)
            yield from append_read_error(documents, f"{path}: row group {group_number + 1} of {file.num_row_groups}")
            offset += file.metadata.row_group(group_number).num_rows
