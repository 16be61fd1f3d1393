"""Shared by all readers of text: columns of tables, and the error for text that can't be read, with its place and size."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lm.errors import DataError, one_line
from lm.schema import Plain

if TYPE_CHECKING:
    import pyarrow

BLOCK = 1 << 14  # bytes read at a time
ROWS = 256  # rows of a parquet file or hub dataset read at a time
TO_UTF8 = "convert it to UTF-8 (e.g. iconv -f latin1 -t utf-8)"


class Unreadable(DataError):
    """A file, document or row that can't be read.

    Attributes:
        n_bytes: size of what is lost: bytes of the document or row, or of the rest of the file on disk.
    """

    def __init__(self, reason: str, n_bytes: int = 0):
        super().__init__(reason)
        self.n_bytes = n_bytes


OnError = Callable[[Unreadable], None]


def column_texts(
    tables: "Iterable[pyarrow.Table | pyarrow.RecordBatch]", column: str, where: str, on_error: OnError, first: int = 0
) -> Iterator[str]:
    """The texts in a column of tables; `first`: rows before them, so that errors give the row's number in the file."""
    number = first
    for table in tables:
        check_column(where, column, table.schema.names)
        for scalar in table.column(column):
            number += 1
            text, row = None, f"{where}: row {number}"
            try:
                text = row_text({column: scalar.as_py()}, column, row)
            except UnicodeDecodeError:
                n_bytes = scalar.as_buffer().size
                on_error(Unreadable(f"{row}: column '{column}' is not UTF-8; {TO_UTF8}", n_bytes))
            except Unreadable as error:
                on_error(error)
            if text is not None:
                yield text


def row_text(row: Plain, column: str, where: str, n_bytes: int = 0) -> str:
    """The text in a row's `column`, empty for null. Raises Unreadable, with `n_bytes`, if it holds something else."""
    if not isinstance(row, dict):
        raise Unreadable(f"{where} holds {type(row).__name__}, not a JSON object; write one object a line", n_bytes)
    check_column(where, column, list(row), n_bytes)
    value = row[column]
    if value is None:
        return ""  # a document without text, which is counted as blank
    if not isinstance(value, str):
        kind = type(value).__name__
        raise Unreadable(f"{where}: column '{column}' holds {kind}, not text; remove the row or set data.source.column", n_bytes)
    if re.search("[\ud800-\udfff]", value):  # JSON can escape half of a surrogate pair, which UTF-8 can't encode
        raise Unreadable(f"{where}: column '{column}' holds a lone surrogate, not valid Unicode; remove it", n_bytes)
    return value


def check_column(where: str, column: str, names: list[str], n_bytes: int = 0) -> None:
    """Check that there is one `column` among `names`. Raises Unreadable."""
    known = ", ".join(dict.fromkeys(names)) or "(no columns)"
    if column not in names:
        raise Unreadable(f"{where}: no column '{column}'; set data.source.column to one of: {known}", n_bytes)
    if names.count(column) > 1:
        raise Unreadable(f"{where}: {names.count(column)} columns are named '{column}'; rename all but one", n_bytes)


def damaged(where: str, error: Exception, n_bytes: int) -> Unreadable:
    return Unreadable(f"{where}: can't be read (damaged?): {one_line(error)}", n_bytes)
