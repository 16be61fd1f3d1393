"""This module shows the numbers of evaluations of any kind: as tables on the terminal, and as CSV or JSON with a row or
object for each number."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm.errors import abbreviate
from lm.plain import Plain
from lm.report.comparison import NO_INTERVAL_REASON, merge_bins_into_ranges, run_interval
from lm.report.tables import Column, FilledColumn, Table, axis_text, number_text, print_tables, table_bytes
from lm.runs.evaluations import CURVE_COLUMNS, Evaluation, Metric, evaluation_rows, means_over_bins, point_means

MAX_METRIC_COLUMNS = 12  # most metrics that have a column each; more metrics have a row each
# most numbers without interval that are printed of one model; of more, curves show their first and last values only
MAX_PRINTED_NUMBERS_PER_RUN = 24
RUN_HEADING = "run, step"  # heading


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Holds one evaluation of one checkpoint of a run. `is_cached` says whether it was read from the run folder, not
    measured anew."""

    folder: Path
    evaluation: Evaluation
    is_cached: bool

    @cached_property
    def rows(self) -> list[dict[str, Plain]]:
        """Return all means at points and ranges (`merge_bins_into_ranges`), reference levels, and overall means over
        bins.

        Keys of a row:

        setting: inference setting; empty: the evaluation has none.
        where: task and place in words: positions, lengths, depths ...; empty: the whole evaluation.
        metric: its name in metrics.jsonl, else the quantity.
        value, low, high: the mean and the ends of its 95 % interval, if it has one.
        over: what the interval covers, or why there is no interval.
        quantity: the metric's name in reports; for a reference level `NAME: LEVEL`.
        curve: the task, if the row is on a curve without intervals; else None. The terminal shortens a long curve to
            its first and last values.
        """
        measurements = evaluation_rows([self.evaluation])
        units = merge_bins_into_ranges(measurements)
        indices = units.groupby([*CURVE_COLUMNS, "place"], sort=False, observed=True).indices
        overall = {_curve_key(mean): mean for mean in means_over_bins(measurements).itertuples()}
        rows: list[dict[str, Plain]] = []
        for key, means in groupby(point_means(units).itertuples(), _curve_key):
            metric = key[0]
            for mean in means:
                is_bin, axis, at = mean.axis_kind == "bins", metric.axis, ""
                if axis:
                    at = f"{axis_text(mean.x)}-{axis_text(mean.until)}" if is_bin else axis_text(mean.x)
                    at = f"{at} {axis.unit}" if axis.unit else f"{axis.name} {at}"
                name, has_interval = mean.metric if mean.logged else mean.quantity, metric.interval and not is_bin
                row = {"setting": mean.setting, "where": ", ".join(filter(None, (mean.task_label, at))), "metric": name}
                row |= {"value": mean.value, "low": None, "high": None, "over": "", "quantity": mean.quantity}
                row |= {"curve": None if has_interval else mean.task_label} | (
                    {"metric": mean.quantity} if is_bin else {}
                )
                levels = [(f"{mean.quantity}: {level}", value) for level, value in metric.references]
                levels = [row | {"metric": level, "quantity": level, "value": value} for level, value in levels]
                if has_interval:
                    interval = run_interval(units.iloc[indices[(0, *key, mean.place)]], mean.value)
                    row["over"] = f"no interval: {NO_INTERVAL_REASON}" if np.isfinite(mean.value) else ""
                    if interval and interval.is_bounded:
                        row |= {"low": interval.low, "high": interval.high, "over": interval.noise_source}
                rows += [row, *levels]
            if is_bin:
                whole = {"where": mean.task_label, "metric": name, "value": overall[key].value, "curve": None}
                rows.append(row | whole)
        return rows


def _curve_key(mean: NamedTuple) -> tuple[Metric, str, str]:
    """Return what the means of one curve have in common: metric, task and inference setting."""
    return mean.about, mean.task, mean.setting


def print_results(results: list[EvaluationResult], saved_to: Path | None = None) -> None:
    """Print a table for each kind of evaluation: for many metrics only the overall means, for long curves only the
    first and last values.

    saved_to: the file or folder to which the caller writes all numbers, named in a line below a shortened table.
    """
    folders = {result.folder for result in results}
    several_runs, has_equal_names = len(folders) > 1, len({folder.resolve().name for folder in folders}) < len(folders)
    for kind in dict.fromkeys(result.evaluation.kind for result in results):
        kind_results = [result for result in results if result.evaluation.kind == kind]
        names = [result.folder if has_equal_names else result.folder.resolve().name for result in kind_results]
        models = [f"{name}, {result.evaluation.step}" for name, result in zip(names, kind_results, strict=True)]
        title = kind if several_runs else f"{kind}, {names[0]}, step {kind_results[0].evaluation.step}"
        title += " (cached)" if all(result.is_cached for result in kind_results) else ""
        rows = pd.DataFrame(
            [
                {RUN_HEADING: model * several_runs} | row
                for model, result in zip(models, kind_results, strict=True)
                for row in result.rows
            ]
        )
        shown_rows = _printed_rows(rows)
        if len(shown_rows):
            print_tables(_result_table(title, shown_rows))
        if len(logged := rows["metric"][rows["metric"] != rows["quantity"]].unique()):
            print(abbreviate(f"in metrics.jsonl: {', '.join(logged)}"))
        if omitted_count := len(rows) - len(shown_rows):
            destination = saved_to or "in a table with -o table.csv"
            print(f"{omitted_count:,} more numbers, by layer, position or the like, and all intervals: {destination}")
    if any((result.evaluation.frame["part"] != "").any() for result in results):
        print(
            "Numbers are of all held-out text; lm report and lm compare leave out the third that selects rates and "
            "checkpoints."
        )


def _printed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of one kind of evaluation that the terminal shows. If the kind has many metrics, only the overall
    means are shown. Otherwise long curves are shortened to their first and last values."""
    if rows["quantity"].nunique() > MAX_METRIC_COLUMNS:
        return rows[rows["where"] == ""]
    if rows["low"].isna().groupby(rows[RUN_HEADING]).sum().max() <= MAX_PRINTED_NUMBERS_PER_RUN:
        return rows
    keys, points = [RUN_HEADING, "setting", "quantity", "curve"], rows[rows["curve"].notna()]
    is_inside = points.duplicated(keys, keep="first") & points.duplicated(keys, keep="last")
    return rows.drop(points.index[is_inside])


def _result_table(title: str, rows: pd.DataFrame) -> Table:
    """Return a table with a row for each run, inference setting and place (such as a length), and a column for each
    metric. More than `MAX_METRIC_COLUMNS` metrics have a row each instead. Label columns that tell no rows apart are
    left out."""
    has_metric_rows, units, cells = rows["quantity"].nunique() > MAX_METRIC_COLUMNS, {}, {}
    for row in rows.to_dict("records"):
        text = number_text(row["value"])
        if pd.notna(row["low"]):
            text += f" [{number_text(row['low'])}, {number_text(row['high'])}]"
            units.setdefault(row["quantity"], f"95% over {row['over']}, alone")
        elif row["over"]:
            text += f" ({row['over']})"
        labels, heading = (row[RUN_HEADING], row["setting"], row["where"] or "all"), row["quantity"]
        if has_metric_rows:
            labels, heading = (heading,), f"{row[RUN_HEADING]} {row['setting']}".strip()
        cells[labels, heading] = text
    keys, headings = (dict.fromkeys(parts) for parts in zip(*cells, strict=True))
    label_names = ("metric",) if has_metric_rows else (RUN_HEADING, "inference setting", "measured at")
    columns: list[FilledColumn] = [
        (Column(name, kind="label"), list(texts))
        for name, texts in zip(label_names, zip(*keys, strict=True), strict=True)
        if {*texts} - {"", "all"}
    ]
    columns += [
        (Column(heading, units.get(heading, "")), [cells.get((key, heading), "") for key in keys])
        for heading in headings
    ]
    return Table(title, "", tuple(columns))


def results_file_content(results: list[EvaluationResult], path: Path) -> bytes:
    """Return the content of the result file `path`, CSV or JSON by the suffix, with a row or object for each number."""
    lines = []
    for result in results:
        labels = {"run": str(result.folder), "step": result.evaluation.step, "kind": result.evaluation.kind}
        lines += [labels | {name: cell for name, cell in row.items() if name != "curve"} for row in result.rows]
    return table_bytes(lines, path)
