"""The numbers of evaluations, whatever they are of: tables on the terminal, and CSV or JSON with one number a line."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lm.files import write_together
from lm.report.tables import Column, Filled, Table, digits, print_tables, table_bytes
from lm.runs.evaluations import Evaluation
from lm.runs.series import Series, number, series_names
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

    @property
    def label(self) -> str:
        """The run's name and the checkpoint's step."""
        return f"{self.folder.name}, {self.evaluation.step}"

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
    """The numbers that belong among a run's metrics, by their names there."""
    return {name: value for one in evaluation.series for name, value in one.scores.items()}


def print_results(evaluated: list[Evaluated], out: Path | None = None) -> None:
    """Tables by kind of evaluation: of few numbers all, of many those of all places together and the ends of curves.

    Runs measured on other data are not comparable, which their fingerprints say. `out`: the file or folder that all numbers are in.
    """
    several = len({each.folder for each in evaluated}) > 1
    for kind in dict.fromkeys(each.evaluation.kind for each in evaluated):
        same = [each for each in evaluated if each.evaluation.kind == kind]
        title = kind if several else f"{kind}, {same[0].folder.name}, step {same[0].evaluation.step}"
        title += " (cached)" if all(each.cached for each in same) else ""
        left_out = 0
        for metrics in together(row for each in same for row in each.rows):
            if len(metrics) > MOST_COLUMNS:
                print_tables(_by_metric(title, metrics, same))
                left_out += sum(row.metric in metrics and bool(row.where) for each in same for row in each.rows)
                continue
            rows = [[row for row in each.rows if row.metric in metrics] for each in same]
            if long := max(sum(row.low is None for row in some) for some in rows) > MOST_LINES:
                curves = [each.curves(metrics) for each in same]
                rows = [[row for curve, name in some if _has_intervals(curve) for row in _rows(curve, name)] for some in curves]
            if any(rows):
                print_tables(_by_place(title, same, rows, several))
            if long:
                paired = zip(same, curves, strict=True)
                without = [(each, *curve) for each, some in paired for curve in some if not _has_intervals(curve[0])]
                if without:
                    print_tables(_ends(title, without, several))
                left_out += sum(len(curve.places) - min(2, len(_known(curve))) for _, curve, _ in without)
        if left_out:
            where = out or "in a table with -o table.csv"
            print(f"{left_out:,} more numbers, by layer, position or the like, and all intervals: {where}")


def _by_place(title: str, evaluated: list[Evaluated], rows: list[list[Row]], several: bool) -> Table:
    """A line for each place that the rows of an evaluation are of, and a column for each metric, with its interval."""
    over: dict[str, str] = {}
    lines: dict[_Place, dict[str, str]] = {}
    for each, some in zip(evaluated, rows, strict=True):
        for row in some:
            over[row.metric] = over.get(row.metric) or row.over * (row.low is not None)
            interval = f" ({row.over})" * bool(row.over) if row.low is None else f" [{digits(row.low)}, {digits(row.high)}]"
            lines.setdefault((each, row.setting, row.where), {})[row.metric] = digits(row.value) + interval
    columns = [Column(name, what and f"95% over {what}") for name, what in over.items()]
    metrics = [(column, [cells.get(column.name, "") for cells in lines.values()]) for column in columns]
    return Table(title, "", (*_labels(lines, several, "measured at"), *metrics))


def _by_metric(title: str, metrics: list[str], evaluated: list[Evaluated]) -> Table:
    """A line for each of many metrics, of what they are of all places together, and a column for each model and setting."""
    columns: dict[tuple[str, str], dict[str, Row]] = {}
    for each in evaluated:
        for row in each.rows:
            if row.metric in metrics and not row.where:
                columns.setdefault((each.label, row.setting), {})[row.metric] = row
    several, shown = len({name for name, _ in columns}) > 1, [name for name in metrics if any(name in rows for rows in columns.values())]
    contents: list[Filled] = [(Column("metric", kind="label"), shown)]
    for (name, setting), rows in columns.items():
        cells = [digits(rows[metric].value) if metric in rows else "" for metric in shown]
        contents.append((Column(f"{name} {setting}" if several else setting), cells))
    return Table(title, "", tuple(contents))


def _ends(title: str, curves: list[tuple[Evaluated, Series, str]], several: bool) -> Table:
    """A line for each curve, with its values where it begins and where it ends."""
    lines: dict[_Place, tuple[str, str]] = {}
    for each, curve, name in curves:
        cells = [digits(curve.mean_at(place)) + f" ({_place(curve, *curve.places[place])})" * bool(place) for place in _known(curve)]
        label = ", ".join(filter(None, (curve.metric, name)))
        lines[each, curve.setting, label] = cells[0] if cells else "", cells[-1] if len(cells) > 1 else ""
    ends = [(Column(f"{end} value (at)"), [cells[number] for cells in lines.values()]) for number, end in enumerate(("first", "last"))]
    return Table(title, "", (*_labels(lines, several, "curve"), *ends))


def _known(curve: Series) -> list[str]:
    return [place for place in curve.places if math.isfinite(curve.mean_at(place))]


_Place = tuple[Evaluated, str, str]  # a model, an inference setting, and what is measured there


def _labels(lines: Iterable[_Place], several: bool, what: str) -> list[Filled]:
    """The columns that say what each line is of: model, inference setting and `what`; the first two where there is something to tell."""
    models, settings, places = (list(cells) for cells in zip(*lines, strict=True))
    models = ["" if number and model is models[number - 1] else model.label for number, model in enumerate(models)]
    named = {"run, step": models if several else [], SETTING: settings if any(settings) else [], what: places}
    return [(Column(name, kind="label"), cells) for name, cells in named.items() if cells]


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


def write_table(evaluated: list[Evaluated], path: Path) -> None:
    """Write all numbers as CSV or JSON, one row or object a number, whole or not at all."""
    write_together({path: results_bytes(evaluated, path)})


def results_bytes(evaluated: list[Evaluated], path: Path) -> bytes:
    """All numbers as the content of a file of this name, as `write_table` writes it."""
    lines = []
    for each in evaluated:
        first = {"run": str(each.folder), "step": each.evaluation.step, "kind": each.evaluation.kind}
        lines += [first | vars(row) for row in each.rows]
    return table_bytes(lines, path)
