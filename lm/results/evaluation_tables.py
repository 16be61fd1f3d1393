"""The numbers of evaluations, whatever they are of: as tables on the terminal, and as CSV or JSON, one a line."""

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lm.files import write_together
from lm.runs.evaluations import Evaluation
from lm.runs.folder import json_bytes
from lm.runs.series import Series, listed, number, series_names
from lm.schema import Plain
from lm.statistics.intervals import FEWEST, interval_of

SETTING = "inference setting"  # heading of the column that says how the model was used
TOO_FEW = f"no interval: fewer than {FEWEST} documents"
NO_SPREAD = "no interval: all agree"
MOST_COLUMNS = 12  # metrics in one table; of more than these each has a line
MOST_LINES = 24  # numbers without an interval in one table; of curves with more than these the ends are printed


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

    def curves(self, metrics: list[str]) -> list[tuple[Series, str]]:
        """Its series of some metrics, each with what it is measured on."""
        return list(series_names([one for one in self.evaluation.series if one.metric in metrics]).items())


@dataclass(frozen=True)
class Row:
    """One number."""

    setting: str  # how the model was used; empty: it can't be set
    where: str  # positions, lengths, depths ...; empty: all there is
    metric: str
    value: float
    low: float | None = None  # ends of its 95 % interval, if it has one
    high: float | None = None
    over: str = ""  # what the interval covers, or why there is none


def rows_of(series: Iterable[Series]) -> list[Row]:
    """All means of series, with their intervals and the levels to compare them with; of bins those of the whole axis and of octaves."""
    return [row for one, name in series_names(series).items() for row in _rows(one, name)]


def _rows(one: Series, name: str) -> Iterator[Row]:
    """The rows of a series; name: what it is measured on."""
    for place, (start, stop) in one.places.items():
        where = ", ".join(filter(None, (name, _place(one, start, stop))))
        interval = interval_of(one, one.column_at(place)) if _has_intervals(one) else None
        ends = (interval.low, interval.high, interval.over) if interval else (None, None, TOO_FEW * _has_intervals(one))
        if interval and math.isfinite(interval.mean) and not interval.bounded:
            ends = None, None, NO_SPREAD
        yield Row(one.setting, where, one.metric, one.mean_at(place), *ends)
        yield from (Row(one.setting, where, f"{one.metric}: {level}", value) for level, value in one.references.items())
    if one.bins:
        yield Row(one.setting, name, one.metric, one.whole)


def _has_intervals(one: Series) -> bool:
    """Whether its means are given with intervals where they have units enough."""
    return one.interval != "none" and not one.bins


def _place(one: Series, start: float, stop: float) -> str:
    if one.axis is None:
        return ""
    value = f"{number(start)}-{number(stop)}" if one.bins else number(start)
    return f"{value} {one.axis.unit}" if one.axis.unit else f"{one.axis.name} {value}"


def logged(evaluation: Evaluation) -> dict[str, float]:
    """Those numbers that belong among a run's metrics, by their names there."""
    return {name: value for one in evaluation.series for name, value in one.scores.items()}


def print_results(found: list[Evaluated], out: Path | None = None) -> None:
    """Tables by kind of evaluation: of few numbers all, of many those of all places together and the ends of curves.

    Runs measured on other data are not comparable, which their fingerprints say. `out`: the file or folder that all numbers are in.
    """
    console = Console()
    if not console.is_terminal:
        console.width = 160
    several = len({one.folder for one in found}) > 1
    for kind in dict.fromkeys(one.evaluation.kind for one in found):
        same = [one for one in found if one.evaluation.kind == kind]
        title = kind if several else f"{kind}, {same[0].folder.name}, step {same[0].evaluation.step}"
        title += " (cached)" if all(one.cached for one in same) else ""
        left_out = 0
        for metrics in together(row for one in same for row in one.rows):
            if len(metrics) > MOST_COLUMNS:
                left_out += _print_by_metric(console, title, metrics, same)
                continue
            rows = [[row for row in one.rows if row.metric in metrics] for one in same]
            if long := max(sum(row.low is None for row in some) for some in rows) > MOST_LINES:
                rows = [[row for curve, name in one.curves(metrics) if _has_intervals(curve) for row in _rows(curve, name)] for one in same]
            if any(rows):
                _print_places(console, title, same, rows, several)
            left_out += _print_ends(console, title, metrics, same, several) if long else 0
        if left_out:
            where = out or "in a table with -o table.csv"
            print(f"{left_out:,} more numbers, by layer, position or the like, and all intervals: {where}")


def _print_places(console: Console, title: str, found: list[Evaluated], rows: list[list[Row]], several: bool) -> None:
    """A line for each place that the rows of an evaluation are of, and a column for each metric, with its interval."""
    of_settings = any(row.setting for some in rows for row in some)
    table = _table(title, *["run, step"] * several, *[SETTING] * of_settings, "measured at")
    over: dict[str, str] = {}
    for row in itertools.chain(*rows):
        over[row.metric] = over.get(row.metric) or row.over * (row.low is not None)
    for metric, what in over.items():
        table.add_column(f"{metric}\n[95% over {what}]" if what else metric, justify="right")
    for one, some in zip(found, rows, strict=True):
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in some:
            interval = f" ({row.over})" * bool(row.over) if row.low is None else f" [{_digits(row.low)}, {_digits(row.high)}]"
            lines.setdefault((row.setting, row.where), {})[row.metric] = _digits(row.value) + interval
        for index, ((setting, where), values) in enumerate(lines.items()):
            name = [f"{one.folder.name}, {one.evaluation.step}" if index == 0 else ""] if several else []
            table.add_row(*name, *[setting] * of_settings, where, *(values.get(metric, "") for metric in over))
    console.print(table)


def _print_by_metric(console: Console, title: str, metrics: list[str], found: list[Evaluated]) -> int:
    """A line for each of many metrics, of what they are of all places together, and a column for each model and setting.

    Returns how many numbers are left out.
    """
    columns: dict[tuple[str, str], dict[str, Row]] = {}
    for one in found:
        for row in one.rows:
            if row.metric in metrics and not row.where:
                columns.setdefault((f"{one.folder.name}, {one.evaluation.step}", row.setting), {})[row.metric] = row
    several = len({name for name, _ in columns}) > 1
    table = _table(title, "metric")
    for name, setting in columns:
        table.add_column(f"{name}\n{setting}" if several else setting, justify="right")
    for metric in metrics:
        values = [column.get(metric) for column in columns.values()]
        if any(values):
            table.add_row(metric, *("" if row is None else f"{row.value:.4g}" for row in values))
    console.print(table)
    return sum(row.metric in metrics and bool(row.where) for one in found for row in one.rows)


def _print_ends(console: Console, title: str, metrics: list[str], found: list[Evaluated], several: bool) -> int:
    """A line for each curve, with its values where it begins and where it ends. Returns how many numbers are left out.

    Series with intervals are in a table of their own.
    """
    curves = [(one, curve, name) for one in found for curve, name in one.curves(metrics) if not _has_intervals(curve)]
    of_settings = any(curve.setting for _, curve, _ in curves)
    table, left_out = _table(title, *["run, step"] * several, "curve", *[SETTING] * of_settings), 0
    for end in ("first value (at)", "last value (at)"):
        table.add_column(end, justify="right")
    for one, curve, name in curves:
        known = [place for place in curve.places if math.isfinite(curve.mean_at(place))]
        ends = dict.fromkeys((known[0], known[-1])) if known else ()
        cells = [f"{curve.mean_at(place):.4g}" + f" ({_place(curve, *curve.places[place])})" * bool(place) for place in ends]
        label = ", ".join(filter(None, (curve.metric, name)))
        table.add_row(*[f"{one.folder.name}, {one.evaluation.step}"] * several, label, *[curve.setting] * of_settings, *cells)
        left_out += len(curve.places) - len(ends)
    console.print(table)
    return left_out


def _table(title: str, *columns: str) -> Table:
    """A table whose first columns say what its lines are of."""
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD)


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
    write_together({path: table_bytes(lines, path)})


def table_bytes(lines: list[dict[str, Plain]], path: Path) -> bytes:
    """Lines of the same fields, at least one, as the CSV or JSON file that `path` names; what is not finite is null in JSON."""
    if path.suffix == ".json":
        return json_bytes(listed(lines))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue().encode()
