"""The numbers of evaluations, whatever they are of: tables on the terminal, and CSV or JSON with one number a line."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lm.report.tables import Column, Filled, Table, digits, print_tables, table_bytes
from lm.runs.evaluations import Evaluation, Series, number, series_names
from lm.statistics.intervals import FEWEST_DOCUMENTS, interval_of

SETTING = "inference setting"  # heading of the column that says how the model was used
TOO_FEW = f"no interval: fewer than {FEWEST_DOCUMENTS} documents"
NO_SPREAD = "no interval: all agree"
MOST_COLUMNS = 12  # metrics in one table; of more than these each has a line
MOST_NUMBERS = 24  # numbers without an interval in one table; of curves with more than these the ends are printed

Cells = dict[tuple[tuple[int, str, str], Column], str]  # by row (number of the evaluation, inference setting, place) and column


@dataclass(frozen=True, eq=False)
class Evaluated:
    """One evaluation of one checkpoint of a run; `cached`: it had been measured before, with these weights and options."""

    folder: Path
    evaluation: Evaluation
    cached: bool

    @property
    def label(self) -> str:
        """The run's name and the checkpoint's step."""
        return f"{self.folder.name}, {self.evaluation.step}"

    @cached_property
    def rows(self) -> list["Row"]:
        """The numbers of the evaluation, a row each."""
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
    over: str = ""  # what the interval covers, or why there is none


def rows_of(series: Iterable[Series]) -> list[Row]:
    """Rows of all means of series, with intervals and reference levels; of bins the means of octaves and of the whole axis."""
    return [row for each, name in series_names(series).items() for row in _rows(each, name)]


def _rows(series: Series, name: str) -> Iterator[Row]:
    """The rows of a series; name: what it is measured on."""
    for place, (start, stop) in series.places.items():
        where = ", ".join(filter(None, (name, _place(series, start, stop))))
        interval = interval_of(series, series.column_at(place)) if _has_intervals(series) else None
        ends = (interval.low, interval.high, interval.over) if interval else (None, None, TOO_FEW * _has_intervals(series))
        if interval and math.isfinite(interval.mean) and not interval.bounded:
            ends = None, None, NO_SPREAD
        yield Row(series.setting, where, series.metric, series.mean_at(place), *ends)
        yield from (Row(series.setting, where, f"{series.metric}: {level}", value) for level, value in series.references.items())
    if series.bins:
        yield Row(series.setting, name, series.metric, series.whole)


def _has_intervals(series: Series) -> bool:
    """Whether means of a series have intervals where there are enough units."""
    return series.interval != "none" and not series.bins


def _place(series: Series, start: float, stop: float) -> str:
    if series.axis is None:
        return ""
    value = f"{number(start)}-{number(stop)}" if series.bins else number(start)
    return f"{value} {series.axis.unit}" if series.axis.unit else f"{series.axis.name} {value}"


def logged(evaluation: Evaluation) -> dict[str, float]:
    """The numbers of an evaluation that are logged among a run's metrics, by their names there."""
    return {name: value for series in evaluation.series for name, value in series.scores.items()}


def print_results(evaluated: list[Evaluated], out: Path | None = None) -> None:
    """Tables by kind of evaluation: of few numbers all, of many those of all places together and the ends of curves.

    Runs measured on other data are not comparable, which their fingerprints say. `out`: the file or folder that all numbers are in.
    """
    several = len({each.folder for each in evaluated}) > 1
    for kind in dict.fromkeys(each.evaluation.kind for each in evaluated):
        same = [each for each in evaluated if each.evaluation.kind == kind]
        models, left_out = [each.label if several else "" for each in same], 0
        title = kind if several else f"{kind}, {same[0].folder.name}, step {same[0].evaluation.step}"
        title += " (cached)" if all(each.cached for each in same) else ""
        for metrics in _together(row for each in same for row in each.rows):
            rows = [[row for row in each.rows if row.metric in metrics] for each in same]
            if len(metrics) > MOST_COLUMNS:
                print_tables(_by_metric(title, metrics, same))
                left_out += sum(bool(row.where) for group in rows for row in group)
                continue
            curves, cells = [], Cells()
            if max(sum(row.low is None for row in group) for group in rows) > MOST_NUMBERS:
                named = [series_names(series for series in each.evaluation.series if series.metric in metrics) for each in same]
                rows = [[row for each, name in names.items() if _has_intervals(each) for row in _rows(each, name)] for names in named]
                curves = [(at, *curve) for at, names in enumerate(named) for curve in names.items() if not _has_intervals(curve[0])]
            if any(rows):
                print_tables(_table(title, models, "measured at", _with_intervals(rows)))
            for at, curve, name in curves:
                known = [place for place in curve.places if math.isfinite(curve.mean_at(place))]
                ends = [digits(curve.mean_at(place)) + f" ({_place(curve, *curve.places[place])})" * bool(place) for place in known]
                row = at, curve.setting, ", ".join(filter(None, (curve.metric, name)))
                cells[row, Column("first value (at)")] = ends[0] if ends else ""
                cells[row, Column("last value (at)")] = ends[-1] if len(ends) > 1 else ""
                left_out += len(curve.places) - min(2, len(known))
            if cells:
                print_tables(_table(title, models, "curve", cells))
        if left_out:
            where = out or "in a table with -o table.csv"
            print(f"{left_out:,} more numbers, by layer, position or the like, and all intervals: {where}")


def _table(title: str, models: list[str], what: str, cells: Cells) -> Table:
    """The table of cells; a column of labels is left out where it says nothing, and a model is named in its first row."""
    rows, columns = dict.fromkeys(row for row, _ in cells), dict.fromkeys(column for _, column in cells)
    numbers, settings, places = (list(labels) for labels in zip(*rows, strict=True))
    names = ["" if place and at == numbers[place - 1] else models[at] for place, at in enumerate(numbers)]
    labels = {"run, step": names if any(models) else [], SETTING: settings if any(settings) else [], what: places}
    filled: list[Filled] = [(Column(name, kind="label"), texts) for name, texts in labels.items() if texts]
    return Table(title, "", (*filled, *((column, [cells.get((row, column), "") for row in rows]) for column in columns)))


def _with_intervals(rows: list[list[Row]]) -> Cells:
    """A row for each place that the rows of an evaluation are of, and a column for each metric, with its interval."""
    over: dict[str, str] = {}
    for row in (row for group in rows for row in group):
        over[row.metric] = over.get(row.metric) or row.over * (row.low is not None)
    cells = {}
    for at, row in ((at, row) for at, group in enumerate(rows) for row in group):
        interval = f" ({row.over})" * bool(row.over) if row.low is None else f" [{digits(row.low)}, {digits(row.high)}]"
        what = over[row.metric]
        cells[(at, row.setting, row.where), Column(row.metric, what and f"95% over {what}")] = digits(row.value) + interval
    return cells


def _by_metric(title: str, metrics: list[str], evaluated: list[Evaluated]) -> Table:
    """A table of many metrics, each over all places together: a row for each metric, a column for each model and setting."""
    columns: dict[tuple[str, str], dict[str, Row]] = {}
    for model, row in ((each, row) for each in evaluated for row in each.rows if row.metric in metrics and not row.where):
        columns.setdefault((model.label, row.setting), {})[row.metric] = row
    several, shown = len({name for name, _ in columns}) > 1, [name for name in metrics if any(name in rows for rows in columns.values())]
    contents: list[Filled] = [(Column("metric", kind="label"), shown)]
    for (name, setting), rows in columns.items():
        cells = [digits(rows[metric].value) if metric in rows else "" for metric in shown]
        contents.append((Column(f"{name} {setting}" if several else setting), cells))
    return Table(title, "", tuple(contents))


def _together(rows: Iterable[Row]) -> list[list[str]]:
    """Groups of metrics for one table each: those that were measured at the same places."""
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


def results_bytes(evaluated: list[Evaluated], path: Path) -> bytes:
    """All numbers as the content of a file of this name: CSV or JSON, one row or object a number."""
    first = [({"run": str(each.folder), "step": each.evaluation.step, "kind": each.evaluation.kind}, each.rows) for each in evaluated]
    return table_bytes([what | vars(row) for what, rows in first for row in rows], path)
