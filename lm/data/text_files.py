"""Local files as documents: .txt, .jsonl and .parquet, the first two also compressed."""

import codecs
import difflib
import glob
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.config.data_config import Files
from lm.data.hashes import FileHashes
from lm.data.reading import BLOCK, ROWS, TO_UTF8, OnError, Unreadable, column_texts, damaged, no_column, row_text
from lm.errors import DataError, one_line
from lm.schema import Plain

SUPPORTED = ".txt[.gz|.zst], .jsonl[.gz|.zst], .parquet"


def documents(source: Files, root: Path, on_error: OnError) -> Iterator[str]:
    """The documents of the files that `source.paths` names."""
    return read_files(expand(source.paths), source, on_error)


def identity(source: Files, root: Path, hashes: FileHashes) -> dict[str, Plain]:
    """The files with the hashes of their content, and the options they are read with."""
    files = [{"path": str(path), "sha256": hashes.sha256(path)} for path in expand(source.paths)]
    return {"files": files, "column": source.column, "separator": source.separator}


def licence(source: Files) -> str:
    """Files state no licence."""
    return "not stated (local files)"


def expand(paths: list[str]) -> list[Path]:
    """The files that `data.source.paths` names: sorted, each once; folders are searched recursively.

    Raises:
        DataError: a path that does not exist, matches nothing, is empty or has a suffix that can't be read.
    """
    found: set[Path] = set()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = [file for file in path.rglob("*") if file.is_file() and _kind(file) and not hidden(file, path)]
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


def hidden(path: Path, folder: Path) -> bool:
    """True for a file whose name, or a folder's on the way to it, begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def read_files(paths: list[Path], source: Files, on_error: OnError) -> Iterator[str]:
    """The documents of files, in the format that each file's suffix gives. `on_error` is called with what can't be read."""
    import pyarrow

    for path in paths:
        try:
            yield from READERS[_kind(path)](path, source, on_error)
        except Unreadable as error:
            on_error(error)
        except (OSError, pyarrow.ArrowException) as error:
            on_error(damaged(str(path), error, path.stat().st_size if path.exists() else 0))


class _Stream(io.RawIOBase):
    """A file's bytes, decompressed if its name says so. Unlike `zstandard`, pyarrow reports a truncated file.

    Raises:
        Unreadable: the file is damaged; all but some 64 kB before the damage has been read.
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
            raise damaged(str(self.path), error, self.file.size() - self.file.tell()) from None

    def close(self) -> None:
        self.file.close()
        super().close()


def _txt(path: Path, source: Files, on_error: OnError) -> Iterator[str]:
    separator, begin = source.separator.encode(), 0
    with io.BufferedReader(_Stream(path), BLOCK) as file:
        for content in _split_at(file, separator):
            try:
                text = _decoded(content, begin, str(path))
            except Unreadable as error:
                on_error(error)
            else:
                yield text
            begin += len(content) + len(separator)


def _split_at(file: io.BufferedReader, separator: bytes) -> Iterator[bytearray]:
    """The bytes between separators. No UTF-8 sequence begins within another, so that no character is split."""
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
                row = row_text(json.loads(text), source.column, where, len(line)) if text.strip() else None
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
            raise no_column(str(path), source.column, names, path.stat().st_size)
        first = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            try:
                yield from column_texts(file.iter_batches(ROWS, [number], [source.column]), source.column, str(path), on_error, first)
            except (OSError, pyarrow.ArrowException) as error:
                columns = [group.column(index) for index in range(group.num_columns)]
                n_bytes = sum(one.total_compressed_size for one in columns if one.path_in_schema == source.column)
                on_error(damaged(f"{path}: row group {number + 1} of {file.num_row_groups}", error, n_bytes))
            first += group.num_rows


READERS: dict[str, Callable[[Path, Files, OnError], Iterator[str]]] = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}
