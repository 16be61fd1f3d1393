"""The numbers of evaluations, whatever they are of: as tables on the terminal, and as CSV or JSON, one a line."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lm.files import write_text
from lm.runs.evaluations import Evaluation
from lm.runs.folder import write_json
from lm.runs.series import Series, listed, number, series_names
from lm.statistics.intervals import interval_of

MOST_COLUMNS = 12  # metrics in one table; of more than these each has a line


@dataclass(frozen=True, eq=False)
class Evaluated:
    """One evaluation of one checkpoint of a run; `cached`: it had been measured before, with these weights and options."""

    folder: Path
    evaluation: Evaluation
    cached: bool

    @cached_property
    def rows(self) -> list["Row"]:
        """Its numbers."""
        return rows_of(self.evaluation.series)


@dataclass(frozen=True)
class Row:
    """One number."""

    setting: str  # how the model was used; empty: it can't be set
    where: str  # positions, lengths, depths ...; empty: all there is
    metric: str
    value: float
    low: float | None = None  # ends of its 95 % interval, if it has one
    high: float | None = None
    over: str = ""  # what the interval covers


def rows_of(series: Iterable[Series]) -> list[Row]:
    """All means of series, with their intervals and the levels to compare them with; of bins those of the whole axis and of octaves."""
    found = []
    for one, name in series_names(series).items():
        for place, (start, stop) in one.places.items():
            where = ", ".join(filter(None, (name, _place(one, start, stop))))
            interval = None if one.bins else interval_of(one, one.column_at(place))
            ends = (interval.low, interval.high, interval.over) if interval else ()
            found.append(Row(one.setting, where, one.metric, one.mean_at(place), *ends))
            found += [Row(one.setting, where, f"{one.metric}: {level}", value) for level, value in one.references.items()]
        if one.bins:
            found.append(Row(one.setting, name, one.metric, one.whole))
    return found


def _place(one: Series, start: float, stop: float) -> str:
    if one.axis is None:
        return ""
    value = f"{number(start)}-{number(stop)}" if one.bins else number(start)
    return f"{value} {one.axis.unit}" if one.axis.unit else f"{one.axis.name} {value}"


def logged(evaluation: Evaluation) -> dict[str, float]:
    """Those numbers that belong among a run's metrics, by their names there."""
    return {name: value for one in evaluation.series for name, value in one.scores.items()}


def print_results(found: list[Evaluated]) -> None:
    """Tables of all numbers, by kind of evaluation; runs measured on other data are not comparable, which their fingerprints say."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    several = len({one.folder for one in found}) > 1
    for kind in dict.fromkeys(one.evaluation.kind for one in found):
        same = [one for one in found if one.evaluation.kind == kind]
        title = kind if several else f"{kind}, {same[0].folder.name}, step {same[0].evaluation.step}"
        title += " (cached)" if all(one.cached for one in same) else ""
        for metrics in together(row for one in same for row in one.rows):
            if len(metrics) > MOST_COLUMNS:
                _print_by_metric(console, title, metrics, same)
                continue
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
            for name in ("run, step", "used", "where")[not several :]:
                table.add_column(name)
            over = {row.metric: row.over for one in same for row in one.rows if row.over}
            for metric in metrics:
                table.add_column(f"{metric}\n[95% over {over[metric]}]" if metric in over else metric, justify="right")
            for one in same:
                lines: dict[tuple[str, str], dict[str, str]] = {}
                for row in one.rows:
                    if row.metric in metrics:
                        interval = "" if row.low is None else f" [{_digits(row.low)}, {_digits(row.high)}]"
                        lines.setdefault((row.setting, row.where), {})[row.metric] = _digits(row.value) + interval
                for index, (of, values) in enumerate(lines.items()):
                    name = [f"{one.folder.name}, {one.evaluation.step}" if index == 0 else ""] if several else []
                    table.add_row(*name, *of, *(values.get(metric, "") for metric in metrics))
            console.print(table)


def _print_by_metric(console: Console, title: str, metrics: list[str], found: list[Evaluated]) -> None:
    """A line for each of many metrics, of what they are of all places together, and a column for each model and setting."""
    columns: dict[tuple[str, str], dict[str, Row]] = {}
    for one in found:
        for row in one.rows:
            if row.metric in metrics and not row.where:
                columns.setdefault((f"{one.folder.name}, {one.evaluation.step}", row.setting), {})[row.metric] = row
    several = len({name for name, _ in columns}) > 1
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name, setting in columns:
        table.add_column(f"{name}\n{setting}" if several else setting, justify="right")
    for metric in metrics:
        values = [column.get(metric) for column in columns.values()]
        if any(values):
            table.add_row(metric, *("" if row is None else f"{row.value:.4g}" for row in values))
    console.print(table)
    more = sum(row.metric in metrics and bool(row.where) for one in found for row in one.rows)
    if more:
        console.print(f"{more:,} more numbers, by layer, position or the like, and all intervals: in a table with -o table.csv")


def together(rows: Iterable[Row]) -> list[list[str]]:
    """The metrics that belong in one table: those that are given of the same place."""
    by_place: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_place.setdefault((row.setting, row.where), []).append(row.metric)
    groups: list[list[str]] = []
    for metrics in by_place.values():
        group = next((group for group in groups if set(group) & set(metrics)), None)
        if group is None:
            groups.append(group := [])
        group += [metric for metric in dict.fromkeys(metrics) if metric not in group]
    return groups


def _digits(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def write_table(found: list[Evaluated], path: Path) -> None:
    """All numbers as CSV or JSON, one row or object a number, whole or not at all."""
    lines = [
        {"run": str(one.folder), "step": one.evaluation.step, "kind": one.evaluation.kind, **vars(row)} for one in found for row in one.rows
    ]
    if path.suffix == ".json":
        write_json(path, listed(lines))
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    write_text(path, text.getvalue())
