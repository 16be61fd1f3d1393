"""The comparison tables, as Markdown, CSV, LaTeX (booktabs) and terminal text. All print the same numbers."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from lm.evaluation.statistics import Interval
from lm.report.comparison import (
    LONG,
    VALIDATION,
    Arm,
    Comparison,
    Difference,
    asked,
    compare,
    lengths_asked,
    ranges,
    setting_of,
    share_right,
    ways_used,
)
from lm.runs.record import RunRecord, read_run

LOSSES, SHARES = "losses in nats/token", "share"
Cell = str | Interval | None  # None: not measured


@dataclass(frozen=True)
class Column:
    """A heading and its unit, and what the cells are: text; numbers as text; shares or differences, which are intervals."""

    name: str
    unit: str = ""
    kind: Literal["label", "number", "share", "difference"] = "number"

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float) -> str:
        """One number of an interval: a difference has its sign."""
        return signed(value) if self.kind == "difference" else f"{value:.3f}"

    def shown(self, cell: Cell) -> str:
        """The cell as text; an interval as `mean [low, high]`."""
        if isinstance(cell, Interval):
            return f"{self.text(cell.mean)} {self.ends(cell)}"
        return "-" if cell is None else cell

    def ends(self, cell: Interval) -> str:
        """The interval alone, as `[low, high]`."""
        return f"[{self.text(cell.low)}, {self.text(cell.high)}]"


@dataclass(frozen=True)
class Table:
    """Columns, labels first, of which the arm is the first; and rows of cells."""

    title: str
    unit: str  # of most columns
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def cells(self, row: tuple[Cell, ...]) -> Iterator[tuple[Column, Cell]]:
        """Each cell of a row with its column."""
        return zip(self.columns, row, strict=True)


DIFFERENCE = Column("difference", kind="difference")


def number(value: float | None) -> str | None:
    """Four decimals, or four digits where there are more before the point; None stays None."""
    if value is None:
        return None
    if not np.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def signed(value: float) -> str:
    """A difference with its sign."""
    text = f"{value:+.4f}" if abs(value) < 100 else f"{value:+.4g}"
    return "0.0000" if float(text) == 0 else text


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """At the training length; beyond it, if any run was evaluated on longer rows; of answers, if any was asked for some."""
    tables = (_at_training_length(comparison), _beyond(comparison), _answered(comparison))
    return tuple(table for table in tables if table.rows)


def _at_training_length(comparison: Comparison) -> Table:
    def millions(path: str) -> Callable[[RunRecord], float | None]:
        return lambda run: None if run.measured(path) is None else run.measured(path) / 1e6

    several = any(len(arm.runs) > 1 for arm in comparison.arms)
    nats = "nats/token"
    columns = [Column("arm", kind="label"), Column("seeds"), Column("params", "M"), Column("tokens", "M"), Column("val loss", nats)]
    columns += [Column("sd over seeds", nats)] if several else []
    in_bytes = any(arm.values(bits) for arm in comparison.arms)
    columns += [Column("bits per byte")] if in_bytes else []
    columns += [Column("unigram entropy", nats)]
    differences = _Differences.of(comparison, 0, "nats/token")
    columns += differences.columns
    rows = []
    for arm in comparison.arms:
        tokens = arm.mean(lambda run: run.tokens_seen)
        sizes = (arm.mean(millions("parameters.total")), None if tokens is None else tokens / 1e6)
        row = [
            arm.label,
            str(len(arm.runs)),
            *(None if size is None else f"{size:.4g}" for size in sizes),
            number(arm.mean(loss, VALIDATION)),
        ]
        losses = arm.values(loss)
        row += [number(float(np.std(losses, ddof=1))) if len(losses) > 1 and not arm.apart(VALIDATION) else None] if several else []
        row += [number(arm.mean(bits, VALIDATION))] if in_bytes else []
        row += [number(arm.mean(lambda run: run.unigram_entropy, VALIDATION))]
        rows.append((*row, *differences.cells(arm, ())))
    return Table("Validation, rows of the training length", LOSSES, tuple(columns), tuple(rows))


def loss(run: RunRecord) -> float | None:
    """Validation loss, nats per token; the last logged one if there is no evaluation."""
    return run.validation.loss if run.validation else _last(run.validations.loss)


def bits(run: RunRecord) -> float | None:
    """Validation bits per byte; the last logged one if there is no evaluation."""
    return run.validation.bits_per_byte if run.validation else _last(run.validations.bits_per_byte)


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _beyond(comparison: Comparison) -> Table:
    found = [ranges(run.long_context) for arm in comparison.arms for run in arm.runs if run.long_context]
    labels = list(dict.fromkeys(label for one in sorted(found, key=len) for label, _, _ in one))
    columns = [Column("arm", kind="label"), Column("RoPE", kind="label"), *(Column(f"loss {label}", "nats/token") for label in labels)]
    last = max((run.long_context.length for arm in comparison.arms for run in arm.runs if run.long_context), default=0)
    differences = _Differences.of(comparison, 1, "nats/token", labels[-1] if labels else "", last)
    columns += differences.columns
    rows = []
    for arm in comparison.arms:
        for way in ways_used([arm]):
            row = [arm.label, way, *(number(arm.mean(lambda run, a=(way, label): _range_loss(run, *a), LONG)) for label in labels)]
            rows.append((*row, *differences.cells(arm, (way,))))
    return Table("Long rows, by position in training lengths", LOSSES, tuple(columns), tuple(rows))


def _range_loss(run: RunRecord, way: str, label: str) -> float | None:
    """Mean loss over a position range, nats per token."""
    setting = setting_of(run, way)
    if setting is None:
        return None
    return next((float(setting.nll_by_position[a:b].mean()) for name, a, b in ranges(run.long_context) if name == label), None)


def _answered(comparison: Comparison) -> Table:
    lengths = lengths_asked(comparison.arms)
    trained = {run.seq_len for arm in comparison.arms for run in arm.runs}
    times = {length: f", {length / min(trained):g}x" if len(trained) == 1 else "" for length in lengths}
    shares = {(arm, of): [share_right(arm, of, length) for length in lengths] for of in asked(comparison.arms) for arm in comparison.arms}
    shares = {key: row for key, row in shares.items() if any(row)}
    unit = _with_interval(SHARES, " or over ".join(dict.fromkeys(share.over for row in shares.values() for share in row if share)))
    columns = [*(Column(name, kind="label") for name in ("arm", "task", "used")), Column("seeds")]
    columns += [Column(f"{length:,}{times[length]}", unit, "share") for length in lengths]
    farthest = lengths[-1] if lengths else 0
    differences = _Differences.of(comparison, 2, SHARES, f"{farthest:,}", farthest)
    rows = [(arm.label, *of, str(len(arm.runs)), *row, *differences.cells(arm, of)) for (arm, of), row in shares.items()]
    return Table("Answers right, by tokens in the row", SHARES, (*columns, *differences.columns), tuple(rows))


@dataclass(frozen=True)
class _Differences:
    """The differences to the baseline of one table: a column for each thing that their intervals cover; none for one arm."""

    several: bool  # arms
    found: tuple[Difference, ...]
    name: str
    unit: str

    @classmethod
    def of(cls, comparison: Comparison, parts: int, unit: str, where: str = "", length: int | None = None) -> "_Differences":
        """Those whose `of` has so many `parts`; if a length is given, those up to there, which the heading calls `where`."""
        found = (one for one in comparison.differences if len(one.of) == parts and length in (None, one.length))
        return cls(
            len(comparison.arms) > 1, tuple(found), f"difference to {comparison.arms[0].label}" + (f", {where}" if where else ""), unit
        )

    @property
    def covered(self) -> list[str]:
        """What the intervals are over; [""] where there is none."""
        return list(dict.fromkeys(one.interval.over for one in self.found if one.interval)) or [""] * self.several

    @property
    def columns(self) -> list[Column]:
        """A column for each of `covered`."""
        return [Column(self.name, _with_interval(self.unit, over), "difference") for over in self.covered]

    def cells(self, arm: Arm, of: tuple[str, ...]) -> list[Cell]:
        """An arm's difference in the column of what it covers."""
        interval = next((one.interval for one in self.found if (one.arm, one.of) == (arm.label, of)), None)
        return [interval if interval and interval.over == over else None for over in self.covered]


def _with_interval(unit: str, over: str) -> str:
    """The unit of numbers that have an interval."""
    return f"{unit}, 95% interval" + (f" over {over}" if over else "")


# ---------------------------------------------------------------- formats


def to_markdown(tables: tuple[Table, ...], notes: tuple[str, ...] = ()) -> str:
    """Pipe tables, one after the other, then the notes as a list."""
    blocks = []
    for table in tables:
        heads = [column.heading for column in table.columns]
        lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *([c.shown(cell) for c, cell in table.cells(row)] for row in table.rows)]
        blocks.append(
            f"{table.title}\n\n" + "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        )
    if notes:
        blocks.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(blocks) + "\n"


def to_csv(tables: tuple[Table, ...]) -> str:
    """One number a line, of all tables: what it is of, its value, and the ends of its interval, if it has one, and what that covers."""
    labels = list(dict.fromkeys(column.name for table in tables for column in table.columns if column.kind == "label"))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", *labels, "quantity", "unit", "value", "low", "high", "interval over"])
    for table in tables:
        for row in table.rows:
            of = {column.name: cell for column, cell in table.cells(row) if column.kind == "label"}
            for column, cell in table.cells(row):
                if column.kind != "label" and cell is not None:
                    alone = not isinstance(cell, Interval)
                    values = [cell, "", "", ""] if alone else [*(column.text(value) for value in cell.listed()), cell.over]
                    writer.writerow([table.title, *(of.get(label, "") for label in labels), column.name, column.unit, *values])
    return out.getvalue()


def to_latex(tables: tuple[Table, ...]) -> str:
    """A booktabs tabular a table; units stand in a second line of the heading."""
    blocks = ["% needs \\usepackage{booktabs}"]
    for table in tables:
        names, units = ([_tex(column.name) for column in table.columns], [_tex_unit(column.unit) for column in table.columns])
        lines = [f"% {_tex(table.title)}", f"\\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}", "\\toprule"]
        lines += [" & ".join(names) + " \\\\", " & ".join(units) + " \\\\", "\\midrule"]
        lines += [" & ".join(_tex_cell(*each) for each in table.cells(row)) + " \\\\" for row in table.rows]
        blocks.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}"]))
    return "\n\n".join(blocks) + "\n"


_TEX = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
_TEX |= {"<": "\\textless{}", ">": "\\textgreater{}", "|": "\\textbar{}"} | {letter: f"\\{letter}" for letter in "&%$#_{}"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)


def _tex_unit(unit: str) -> str:
    """In parentheses, a line for each of its parts."""
    lines = ",\\\\ ".join(_tex(part) for part in unit.split(", "))
    return unit and f"\\shortstack{{({lines})}}"


def _tex_cell(column: Column, cell: Cell) -> str:
    if isinstance(cell, Interval):
        mean, low, high = (f"${column.text(value)}$" for value in cell.listed())
        return f"\\shortstack{{{mean}\\\\{{\\scriptsize [{low}, {high}]}}}}" if column.kind == "share" else f"{mean} [{low}, {high}]"
    return _tex(column.shown(cell))


def print_table(folders: list[Path], baseline: str | None = None, console: Console | None = None) -> None:
    """The tables, the differences, the warning and what is missing, on the terminal.

    Raises:
        RunError: as `write_report`.
    """
    comparison, console = compare([read_run(folder) for folder in folders], baseline), console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    for table in comparison_tables(comparison):
        kept = [index for index, column in enumerate(table.columns) if column.kind != "difference"]  # they get a table of their own
        grid = _grid(f"{table.title} ({table.unit})")
        for index in kept:
            column = table.columns[index]
            heading = (
                column.name if column.unit in table.unit or column.kind == "share" else column.heading
            )  # shares without their intervals
            if column.kind == "label":
                grid.add_column(escape(heading), min_width=8, overflow="fold")
            else:
                grid.add_column(escape(heading.replace(" ", "\n")), justify="right", no_wrap=True)
        for row in table.rows:
            cells = (column.text(cell.mean) if isinstance(cell, Interval) else column.shown(cell) for column, cell in table.cells(row))
            grid.add_row(*(escape(text) for index, text in enumerate(cells) if index in kept))
        console.print(grid)
    if comparison.differences:
        console.print(_differences_grid(comparison))
    for text in ([comparison.warning] if comparison.warning else []) + notes(comparison):
        console.print(escape(text), highlight=False)


def _differences_grid(comparison: Comparison) -> RichTable:
    """Each difference in the column of what its interval covers."""
    grid = _grid(f"Differences to {comparison.arms[0].label} (losses in nats/token, answers right as a share)")
    grid.add_column("arm")
    grid.add_column("of")
    covered = list(dict.fromkeys(one.interval.over for one in comparison.differences if one.interval)) or [""]
    for over in covered:
        grid.add_column(f"mean [{_with_interval('', over).removeprefix(', ')}]".replace(" over ", "\nover "), no_wrap=True)
    for one in comparison.differences:
        cells = (one.interval if one.interval and one.interval.over == over else None for over in covered)
        grid.add_row(escape(one.arm), one.what, *(escape(DIFFERENCE.shown(cell)) for cell in cells))
    return grid


def _grid(title: str) -> RichTable:
    return RichTable(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def notes(comparison: Comparison) -> list[str]:
    """How the differences were made, or why there are none, and what the runs lack."""
    lines = []
    for note in dict.fromkeys(difference.note for difference in comparison.differences):
        same = [difference for difference in comparison.differences if difference.note == note]
        whats: dict[tuple[str, ...], list[str]] = {}  # by the arms that have this note
        for what in dict.fromkeys(difference.what for difference in same):
            whats.setdefault(tuple(difference.arm for difference in same if difference.what == what), []).append(what)
        kind = "" if same[0].interval else "no "
        lines += [f"{kind}difference of {', '.join(arms)} in {'; '.join(which)}: {note}" for arms, which in whats.items()]
    return lines + [f"missing: {lack}" for lack in comparison.missing]
