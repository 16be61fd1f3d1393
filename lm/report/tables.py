"""This module writes tables as CSV and as text on the terminal, which show the same numbers, and formats numbers."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from rich import box, markup
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lm.errors import terminal_text
from lm.files import json_bytes
from lm.plain import Plain, json_value
from lm.statistics.intervals import Interval

NO_INTERVAL_TEXT = "[no interval]"  # stands beside a mean whose interval has an open end

ColumnKind = Literal["label", "words", "number", "mean", "difference"]
Cell = str | Text | Interval | None  # None: not measured; Text: for the terminal only


def with_unit(name: str, unit: str) -> str:
    """Return the name of a quantity, followed by its unit in brackets unless `unit` is empty."""
    return f"{name} ({unit})" if unit else name


@dataclass(frozen=True)
class Column:
    """Holds a heading, its unit, and the kind of its cells: text, numbers as text, or intervals (means and
    differences)."""

    name: str
    unit: str = ""
    kind: ColumnKind = "number"
    decimals: int = 4  # decimals of means

    @property
    def heading(self) -> str:
        """Return the name with its unit."""
        return with_unit(self.name, self.unit)

    def mean_text(self, value: float) -> str:
        """Format a mean, or an end of an interval, as text; with a sign in columns of differences."""
        return signed_text(value) if self.kind == "difference" else f"{value:z.{self.decimals}f}"

    def cell_text(self, cell: Cell) -> str:
        """Format a cell as text: an interval as `mean [low, high]`, None as `-`."""
        if isinstance(cell, Interval):
            return f"{self.mean_text(cell.mean)} {self.ends_text(cell)}"
        return "-" if cell is None else cell

    def ends_text(self, cell: Interval) -> str:
        """Return the ends of an interval as `[low, high]`. Return `NO_INTERVAL_TEXT` if an end is infinite or both are
        equal."""
        if not cell.is_bounded:
            return NO_INTERVAL_TEXT
        return f"[{self.mean_text(cell.low)}, {self.mean_text(cell.high)}]"


FilledColumn = tuple[Column, list[Cell]]  # a column and its cells, row by row


@dataclass(frozen=True)
class Table:
    """Holds a table as columns, each with its cells in the order of rows. Label columns come first, and the column of
    arms before all others."""

    title: str
    unit: str  # unit of most columns
    filled_columns: tuple[FilledColumn, ...]

    @property
    def columns(self) -> list[Column]:
        """Return the table's columns, without their cells."""
        return [column for column, _ in self.filled_columns]

    @property
    def rows(self) -> list[list[tuple[Column, Cell]]]:
        """Return the table's rows: each cell with its column."""
        return [
            list(zip(self.columns, row, strict=True))
            for row in zip(*(cells for _, cells in self.filled_columns), strict=True)
        ]


DIFFERENCE_COLUMN = Column("difference", kind="difference")


def recorded_value_text(value: object) -> str:
    """Format a value as text: integers with thousands separated, None as `not recorded`."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else printable_text(str(value))


def printable_text(text: str) -> str:
    """Return the text on one line, with `?` in place of control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def number_text(value: float | None) -> str | None:
    """Format a value as text: four decimals below a magnitude of 100, else four significant digits. `not finite` for
    NaN or inf, None for None."""
    if value is None:
        return None
    if not np.isfinite(value):
        return "not finite"
    return f"{value:z.4f}" if abs(value) < 100 else four_digit_text(value)


def axis_text(value: float) -> str:
    """Format a value on an axis as text; integers have thousands separators."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def four_digit_text(value: float) -> str:
    """Format a value with four significant digits, without an exponent if it is large: 16460."""
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e+" in text else text


def signed_text(value: float) -> str:
    """Format a difference with its sign: four decimals below a magnitude of 100, six if four are zeros, so that the
    end of an interval shows on which side of 0 it lies. Differences below 1e-6 are zero."""
    if abs(value) < 1e-6:
        return "0.0000"
    small = f"{value:+.{6 if abs(value) < 5e-5 else 4}f}"
    return small if abs(value) < 100 else f"{'+' * (value > 0)}{four_digit_text(value)}"


# ---------------------------------------------------------------- formats


def to_csv(tables: tuple[Table, ...]) -> str:
    """Return CSV text of all tables: a line for each cell that holds a measured value, with the labels of the row, the
    value and the interval."""
    labels = list(dict.fromkeys(column.name for table in tables for column in table.columns if column.kind == "label"))
    numbers, lines = ("quantity", "unit", "value", "low", "high", "interval over"), []
    for table in tables:
        for row in table.rows:
            row_key = {column.name: cell for column, cell in row if column.kind == "label"}
            for column, cell in row:
                if column.kind != "label" and cell is not None:
                    values = (
                        [*map(column.mean_text, cell.as_list()), cell.noise_source]
                        if isinstance(cell, Interval)
                        else [cell]
                    )
                    lines.append(
                        {"table": table.title}
                        | row_key
                        | dict(zip(numbers, [column.name, column.unit, *values], strict=False))
                    )
    return csv_text(lines, ("table", *labels, *numbers))


def csv_text(rows: Sequence[dict[str, Plain]], columns: Sequence[str] = (), intervals: Sequence[str] = ()) -> str:
    """Return CSV text with a row for each of `rows`, which map column names to values; `columns` come first, then the
    rows' other columns.

    A list [value, low, high] takes three columns, a mapping one for each key. Values named in `intervals` take three
    columns even if None.
    """
    cells = [dict(cell for name, value in row.items() for cell in _csv_columns(name, value, intervals)) for row in rows]
    names = dict.fromkeys([*columns, *chain(*cells)])
    return pd.DataFrame(cells, dtype=object).reindex(columns=[*names]).to_csv(index=False, lineterminator="\n")


def _csv_columns(name: str, value: Plain, intervals: Sequence[str]) -> list[tuple[str, Plain]]:
    """Return the columns of a value in `csv_text`, each with its cell."""
    if isinstance(value, dict):
        return [(f"{name} {key}", item) for key, item in value.items()]
    if isinstance(value, list) or (value is None and name in intervals):
        return list(zip((name, f"{name} low", f"{name} high"), value or [None] * 3, strict=True))
    return [(name, value)]


def table_bytes(rows: Sequence[dict[str, Plain]], path: Path) -> bytes:
    """Return the content of file `path`, CSV or JSON by suffix: a row for each of `rows`, values by column name. JSON
    has null for NaN, inf."""
    return json_bytes(json_value(list(rows))) if path.suffix == ".json" else csv_text(rows).encode()


# ---------------------------------------------------------------- terminal

MAX_MEANS_WITH_INTERVALS = 2  # columns of means that are printed with their intervals; more columns show the means only
MIN_WRAP_WIDTH = 10  # least width, in characters, at which headings are wrapped


def print_tables(*tables: Table, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """Print tables and then notes on the terminal, or into `console`."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    for table in tables:
        console.print(to_rich_table(table))
    for text in notes:
        console.print(escape_markup(text), highlight=False)


def escape_markup(text: str) -> str:
    """Return `text` for rich: brackets are printed as they are, control characters are made visible."""
    return markup.escape(terminal_text(text))


def to_rich_table(table: Table) -> RichTable:
    """Return the table in the form in which rich prints it. The unit of most columns (`Table.unit`) stands in the title
    only."""
    title = with_unit(table.title, table.unit)
    rich_table = RichTable(
        title=escape_markup(title) or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    omits_intervals = sum(column.kind == "mean" for column in table.columns) > MAX_MEANS_WITH_INTERVALS
    columns = []
    for column, cells in table.filled_columns:
        is_mean_only = omits_intervals and column.kind == "mean"
        texts = [
            column.mean_text(cell.mean) if is_mean_only and isinstance(cell, Interval) else column.cell_text(cell)
            for cell in cells
        ]
        columns.append([escape_markup(text) if isinstance(text, str) else text for text in texts])
        heading = column.name if column.unit == table.unit or is_mean_only else column.heading
        if column.kind in ("label", "words"):
            rich_table.add_column(escape_markup(heading), min_width=8, overflow="fold")
        else:
            width = max(MIN_WRAP_WIDTH, *map(len, texts), 0)
            heading = textwrap.fill(heading, width, break_long_words=False)
            rich_table.add_column(escape_markup(heading), justify="right")
    for row in zip(*columns, strict=True):
        rich_table.add_row(*row)
    return rich_table
