"""The numbers of evaluations of any kind: tables on the terminal, and CSV or JSON with a row or object for each
number.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from lm.errors import abbreviated
from lm.report.comparison import interval_of
from lm.report.tables import Column, FilledColumn, Table, numeral, print_tables, table_bytes
from lm.runs.evaluations import CURVE, Evaluation, at_places, measured, number, overall_means, point_means
from lm.runs.metric import Metric
from lm.statistics.intervals import MIN_DOCUMENTS

TOO_FEW_DOCUMENTS = f"no interval: fewer than {MIN_DOCUMENTS} documents"
NO_SPREAD = "no interval: all agree"
MAX_COLUMNS = 12  # most metrics that have a column each; more metrics have a row each
# most numbers without interval that a table has of one model; if there are more, ends of curves are printed
MAX_NUMBERS = 24

# texts by row (number of the evaluation, inference setting, place) and column
CellTexts = dict[tuple[tuple[int, str, str], Column], str]


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """One evaluation of one checkpoint of a run. `cached` says whether it was read from the run folder, not measured
    anew.
    """

    folder: Path
    evaluation: Evaluation
    cached: bool

    @cached_property
    def rows(self) -> list["Row"]:
        return rows_of(self.evaluation)


@dataclass(frozen=True)
class Row:
    """One mean or reference level of an evaluation."""

    setting: str  # inference setting; empty: the evaluation has none
    where: str  # task and place in words: positions, lengths, depths ...; empty: the whole evaluation
    metric: str
    value: float
    low: float | None = None  # ends of its 95 % interval, if it has one
    high: float | None = None
    over: str = ""  # what the interval covers, or why there is no interval
    name: str = ""  # the metric's name in metrics.jsonl; empty: it is not there
    curve: tuple[str, str, str] | None = None  # setting, metric and task if its metric is printed without intervals
    at: str | None = None  # the place in words; None: a level, or the mean over all places


def rows_of(evaluation: Evaluation) -> list[Row]:
    """Rows of all means at places (`at_places`) and reference levels; over bins, a row for the overall mean, too."""
    measurements = measured([evaluation])
    units = at_places(measurements)
    indices = units.groupby([*CURVE, "place"], sort=False, observed=True).indices
    overall = {_curve_of(mean): mean for mean in overall_means(measurements).itertuples()}
    rows: list[Row] = []
    for key, means in groupby(point_means(units).itertuples(), _curve_of):
        about, _, setting = key
        for mean in means:
            is_bin, axis, at = mean.shape == "bins", about.axis, ""
            if axis:
                at = f"{number(mean.x)}-{number(mean.until)}" if is_bin else number(mean.x)
                at = f"{at} {axis.unit}" if axis.unit else f"{axis.name} {at}"
            has_interval = about.interval and not is_bin
            curve = None if has_interval else (setting, mean.quantity, mean.subject)
            bounds: tuple[float | None, float | None, str] = None, None, TOO_FEW_DOCUMENTS * has_interval
            if has_interval and (interval := interval_of(units.iloc[indices[(0, *key, mean.place)]], mean.value)):
                bounds = interval.low, interval.high, interval.noise_source
                if math.isfinite(interval.mean) and not interval.bounded:
                    bounds = None, None, NO_SPREAD
            where = ", ".join(filter(None, (mean.subject, at)))
            name = mean.metric if mean.logged and not is_bin else ""
            rows.append(Row(setting, where, mean.quantity, mean.value, *bounds, name, curve, at))
            rows += [
                Row(setting, where, f"{mean.quantity}: {level}", value, curve=curve)
                for level, value in about.references
            ]
        if is_bin:
            name = mean.metric if mean.logged else ""
            rows.append(Row(setting, mean.subject, mean.quantity, overall[key].value, name=name, curve=curve))
    return rows


def _curve_of(mean: NamedTuple) -> tuple[Metric, str, str]:
    return mean.about, mean.task, mean.setting


def print_results(results: list[EvaluationResult], output: Path | None = None) -> None:
    """Print tables for each kind of evaluation: for many metrics only the overall means, for long curves only the first
    and last values.

    `output`: the file or folder that holds all numbers. Runs with different data fingerprints are not comparable.
    """
    folders = {result.folder for result in results}
    several_runs, has_equal_names = len(folders) > 1, len({folder.resolve().name for folder in folders}) < len(folders)
    for kind in dict.fromkeys(result.evaluation.kind for result in results):
        kind_results = [result for result in results if result.evaluation.kind == kind]
        runs = [result.folder if has_equal_names else result.folder.resolve().name for result in kind_results]
        models = [
            f"{run}, {result.evaluation.step}" * several_runs for run, result in zip(runs, kind_results, strict=True)
        ]
        omitted_count = 0
        title = (
            kind
            if several_runs
            else f"{kind}, {kind_results[0].folder.resolve().name}, step {kind_results[0].evaluation.step}"
        )
        title += " (cached)" if all(result.cached for result in kind_results) else ""
        for metrics in _metric_groups(row for result in kind_results for row in result.rows):
            rows = [
                (index, row)
                for index, result in enumerate(kind_results)
                for row in result.rows
                if row.metric in metrics
            ]
            tables: dict[str, CellTexts] = {}
            curves: dict[tuple[int, tuple[str, str, str]], list[Row]] = {}
            if len(metrics) > MAX_COLUMNS:
                means = [
                    (Column(f"{models[index]} {row.setting}".strip()), row) for index, row in rows if not row.where
                ]
                tables["metric"] = {((0, "", row.metric), column): numeral(row.value) for column, row in means}
                omitted_count += len(rows) - len(means)
                rows = []
            elif max(Counter(index for index, row in rows if row.low is None).values(), default=0) > MAX_NUMBERS:
                for index, row in rows:
                    if row.curve and row.at is not None:
                        curves.setdefault((index, row.curve), []).append(row)
                rows = [(index, row) for index, row in rows if not row.curve]
            tables["measured at"] = _interval_cells(rows)
            tables["curve"] = cells = {}
            for (index, (setting, metric, task)), points in curves.items():
                texts = [
                    numeral(row.value) + f" ({row.at})" * bool(row.at) for row in points if math.isfinite(row.value)
                ]
                key = index, setting, ", ".join(filter(None, (metric, task)))
                cells[key, Column("first value (at)")] = texts[0] if texts else ""
                cells[key, Column("last value (at)")] = texts[-1] if len(texts) > 1 else ""
                omitted_count += len(points) - min(2, len(texts))
            print_tables(
                *(
                    _table(title, models if head != "metric" else [""], head, cells)
                    for head, cells in tables.items()
                    if cells
                )
            )
        names = dict.fromkeys(row.name for result in kind_results for row in result.rows if row.name != row.metric)
        if log_names := list(filter(None, names)):
            print(abbreviated(f"in metrics.jsonl: {', '.join(log_names)}"))
        if omitted_count:
            destination = output or "in a table with -o table.csv"
            print(f"{omitted_count:,} more numbers, by layer, position or the like, and all intervals: {destination}")
    if any((result.evaluation.frame["part"] != "").any() for result in results):
        print(
            "Numbers are of all held-out text; lm report and lm compare leave out the third that selects rates and "
            "checkpoints."
        )


def _table(title: str, models: list[str], place_heading: str, cells: CellTexts) -> Table:
    """The table of `cells`, without label columns that are all empty. A model's name stands in the first of its rows
    only.
    """
    rows, columns = dict.fromkeys(row for row, _ in cells), dict.fromkeys(column for _, column in cells)
    indices, settings, places = (list(labels) for labels in zip(*rows, strict=True))
    names = [
        "" if index and model_number == indices[index - 1] else models[model_number]
        for index, model_number in enumerate(indices)
    ]
    places = [place or "all" for place in places] if any(places) else []
    labels = {
        "run, step": names if any(models) else [],
        "inference setting": settings if any(settings) else [],
        place_heading: places,
    }
    label_columns: list[FilledColumn] = [(Column(name, kind="label"), texts) for name, texts in labels.items() if texts]
    return Table(
        title, "", (*label_columns, *((column, [cells.get((row, column), "") for row in rows]) for column in columns))
    )


def _interval_cells(indexed_rows: list[tuple[int, Row]]) -> CellTexts:
    """Texts of means with intervals: rows by evaluation, setting and place, columns by metric. `indexed_rows`:
    (evaluation index, row).
    """
    units = {row.metric: f"95% over {row.over}, alone" for _, row in reversed(indexed_rows) if row.low is not None}
    cells = {}
    for index, row in indexed_rows:
        bounds = f" ({row.over})" * bool(row.over) if row.low is None else f" [{numeral(row.low)}, {numeral(row.high)}]"
        cells[(index, row.setting, row.where), Column(row.metric, units.get(row.metric, ""))] = (
            numeral(row.value) + bounds
        )
    return cells


def _metric_groups(rows: Iterable[Row]) -> list[list[str]]:
    """Group metrics into tables: metrics measured at the same place under the same inference setting share a table."""
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


def results_bytes(results: list[EvaluationResult], path: Path) -> bytes:
    """The content of the result file `path`, CSV or JSON by the suffix, with a row or object for each number."""
    lines = []
    for result in results:
        labels = {"run": str(result.folder), "step": result.evaluation.step, "kind": result.evaluation.kind}
        for row in result.rows:
            cells = vars(row) | {"metric": row.name or row.metric, "quantity": row.metric}
            lines.append(labels | {name: cell for name, cell in cells.items() if name not in ("name", "curve", "at")})
    return table_bytes(lines, path)
