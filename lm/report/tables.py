"""The comparison tables, as Markdown, CSV, LaTeX (booktabs) and terminal text. All print the same numbers."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from lm.evaluation.statistics import Interval
from lm.report.comparison import Comparison, compare
from lm.report.sections import Arm, Line, Section, mean_at
from lm.runs.record import RunRecord, read_run

Cell = str | Interval | None  # None: not measured


@dataclass(frozen=True)
class Column:
    """A heading and its unit, and what the cells are: text; numbers as text; means or differences, which are intervals."""

    name: str
    unit: str = ""
    kind: Literal["label", "number", "mean", "difference"] = "number"
    decimals: int = 4  # of means

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float) -> str:
        """One number of an interval: a difference has its sign."""
        return signed(value) if self.kind == "difference" else f"{value:.{self.decimals}f}"

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


def digits(value: float | None) -> str | None:
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
    """One for each section: a row for each task, inference setting and arm, a column for each metric and place."""
    return tuple(_table(comparison, section) for section in comparison.sections)


_Made = tuple[Column, Callable[[Arm, Line], Cell]]  # a column, and its cell in the row of an arm and a line


def _table(comparison: Comparison, section: Section) -> Table:
    settings, tasks = (any(getattr(line, name) for line in section.lines) for name in ("setting", "what"))
    made: list[_Made] = [(Column("arm", kind="label"), lambda arm, line: arm.label)]
    made += [(Column("task", kind="label"), lambda arm, line: line.what)] if tasks else []
    made += [(Column("inference setting", kind="label"), lambda arm, line: line.setting)] if settings else []
    made += [(Column("seeds"), lambda arm, line: str(len(arm.runs)))]
    if section.shape == "number":
        made += [_millions("params", lambda run: run.measured("parameters.total")), _millions("tokens", lambda run: run.tokens_seen)]
    made += [column for metric in section.metrics for column in _means(comparison, section, metric)]
    made += [_reference(section, metric, name) for metric, name in section.references] if section.shape == "number" else []
    made += [column for metric in section.metrics for column in _differences(comparison, section, metric)]
    rows = [
        tuple(cell(arm, line) for _, cell in made)
        for line in dict.fromkeys(replace(line, metric="") for line in section.lines)
        for arm in comparison.arms
        if any(section.of_arm(arm, replace(line, metric=metric)) for metric in section.metrics)
    ]
    title = section.title + (" in training lengths" if section.shape == "bins" else "")
    return Table(title, _unit(section.first.unit), tuple(column for column, _ in made), tuple(rows))


def _millions(name: str, value: Callable[[RunRecord], float | None]) -> _Made:
    def cell(arm: Arm, line: Line) -> str | None:
        values = [found for found in map(value, arm.runs) if found is not None]
        return f"{np.mean(values) / 1e6:.4g}" if values else None

    return Column(name, "M"), cell


def _means(comparison: Comparison, section: Section, metric: str) -> list[_Made]:
    """A column for each place, with intervals at points; the spread of a single number over seeds has a column of its own."""
    one = section.example(metric)
    unit, points, lengths = _unit(one.unit), section.shape == "points", section.seq_lens
    made: list[_Made] = []
    for place, (start, _) in section.places.items():

        def mean(arm: Arm, line: Line, place: str = place) -> Cell:
            of = replace(line, metric=metric)
            return (section.interval(arm, of, place) if points else None) or digits(section.mean(arm, of, place))

        times = f", {start / lengths[0]:g}x" if points and len(lengths) == 1 else ""
        name = place + times if points and len(section.metrics) == 1 else f"{metric} {place}{times}".strip()
        made.append((Column(name, unit, "mean", 3 if one.unit == "fraction" else 4), mean))
    cells = [cell(arm, line) for _, cell in made for arm in comparison.arms for line in section.lines if line.metric == metric]
    covered = dict.fromkeys(cell.over for cell in cells if isinstance(cell, Interval))
    if covered:
        return [(replace(column, unit=_with_interval(unit, " or over ".join(covered))), cell) for column, cell in made]
    made = [(replace(column, kind="number"), cell) for column, cell in made]
    several = any(len(arm.runs) > 1 for arm in comparison.arms)
    return made + ([_spread(section, metric)] if section.shape == "number" and several and one.samples else [])


def _spread(section: Section, metric: str) -> _Made:
    def cell(arm: Arm, line: Line) -> str | None:
        of = replace(line, metric=metric)
        values = [mean_at(found, "") for found in section.of_arm(arm, of)]
        return digits(float(np.std(values, ddof=1))) if len(values) > 1 and section.mean(arm, of, "") is not None else None

    return Column("sd over seeds", _unit(section.example(metric).unit)), cell


def _reference(section: Section, metric: str, name: str) -> _Made:
    """The mean of a level that a single number is to be compared with."""

    def cell(arm: Arm, line: Line) -> str | None:
        of = replace(line, metric=metric)
        levels = [found.references[name] for found in section.of_arm(arm, of) if name in found.references]
        return digits(float(np.mean(levels))) if levels and section.mean(arm, of, "") is not None else None

    return Column(name, _unit(section.example(metric).unit)), cell


def _differences(comparison: Comparison, section: Section, metric: str) -> list[_Made]:
    """Differences to the baseline at the farthest place: a column for each thing that their intervals cover; none for one arm."""
    farthest = list(section.places)[-1]
    every = [one for one in comparison.differences if (one.section, one.line.metric) == (section.title, metric)]
    found = [one for one in every if one.place == farthest]
    covered = list(dict.fromkeys(one.interval.over for one in found if one.interval)) or [""] * bool(every)
    several = len({one.line.metric for one in comparison.differences if one.section == section.title}) > 1
    parts = (f"difference to {comparison.arms[0].label}", metric if several else "", farthest)
    made: list[_Made] = []
    for over in covered:

        def cell(arm: Arm, line: Line, over: str = over) -> Cell:
            of = arm.label, replace(line, metric=metric)
            return next((one.interval for one in found if (one.arm, one.line) == of and one.interval and one.interval.over == over), None)

        unit = _with_interval(_unit(section.example(metric).unit), over)
        made.append((Column(", ".join(filter(None, parts)), unit, "difference"), cell))
    return made


def _unit(unit: str) -> str:
    """In the little room of a heading."""
    return unit.replace(" per ", "/")


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
        return f"\\shortstack{{{mean}\\\\{{\\scriptsize [{low}, {high}]}}}}" if column.kind == "mean" else f"{mean} [{low}, {high}]"
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
            heading = column.name if column.unit == table.unit or column.kind == "mean" else column.heading  # without their intervals
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
    units = dict.fromkeys(f"{metric} {in_unit(_unit(unit))}" for metric, unit, _ in differing(comparison))
    grid = _grid(f"Differences to {comparison.arms[0].label} ({', '.join(units)})")
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


def differing(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Metric, unit and which way is better of what has differences."""
    sections = {section.title: section for section in comparison.sections}
    of = dict.fromkeys((one.section, one.line.metric) for one in comparison.differences)
    return [(metric, one.unit, one.better) for title, metric in of for one in [sections[title].example(metric)]]


def in_unit(unit: str) -> str:
    """Words after what a number is of."""
    return f"as a {unit}" if unit == "fraction" else f"in {unit}"


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
