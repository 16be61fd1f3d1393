"""This module draws comparisons of runs: training curves, metrics by position, length or head, and heat maps by layer
and head. It also draws the normalizers' parameters in training."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from lm.report.comparison import (
    INTERVAL_INPUT_COLUMNS,
    ArmComparison,
    clip_difference_interval,
    paired_interval,
    run_interval,
    training_lengths,
)
from lm.report.pictures import HeatMap, Panel, Picture, Trace
from lm.report.tables import axis_text, printable_text, with_unit
from lm.runs.evaluations import NATS, grouped_mean, point_means
from lm.runs.folder import DIVERGED_KEY, Curve
from lm.runs.record import RunRecord
from lm.statistics.intervals import Interval
from lm.statistics.verdicts import seed_count_text

FIRST_DRAWN_POSITION = 16  # position at which a picture by position begins
MAX_TASKS_WITHOUT_MAP = 3  # fractions of more tasks than this, such as a needle at several depths, are drawn as a map
LOSS_TITLES = {
    "train/loss": ("Training loss (train/loss)", NATS),
    "val/loss": ("Validation loss (val/loss)", NATS),
}
MAX_CURVE_POINTS = 60  # most points of a curve in a picture; of more, neighbours are merged
SETTLING_FRACTION = 0.1  # fraction of a curve after which its values count for the ends of the y axis
TOKENS_SEEN_LABEL = "tokens seen"
# a head, or the root mean square
_PARAMETER_METRIC_PATTERN = re.compile(r"normalizer/(.+)/layer(\d+)/(head\d+|rms)")


class DrawnRun(NamedTuple):
    """Holds what pictures and pages show of a run. `state` is finished, unfinished or diverged."""

    arm: str
    seed: int
    state: str
    record: RunRecord
    label: str  # the run's name on the page


def drawn_runs(comparison: ArmComparison) -> list[DrawnRun]:
    """Return the comparison's runs for drawing."""
    return [
        DrawnRun(arm, run.seeds[-1], run.state, run, f"{printable_text(run.name)} ({arm}, {run.state})")
        for arm, runs in comparison.runs_by_arm.items()
        for run in runs
    ]


def _trace(
    run: DrawnRun, curve: Curve, colour_index: int, label: str, drawn_as: Literal["seed", "mean"] = "seed"
) -> Trace:
    """Return the curve of a logged metric as a function of tokens seen, which include the tokens that the run's initial
    weights had seen. Of more than `MAX_CURVE_POINTS` points, neighbours are replaced by their mean."""
    count, tokens = len(curve.tokens), curve.tokens + run.record.tokens_before_run
    groups = np.array_split(np.arange(count), min(count, MAX_CURVE_POINTS) or 1)
    x, y = (np.array([values[group].mean() for group in groups if len(group)]) for values in (tokens, curve.values))
    return Trace(colour_index, label, x, y, drawn_as)


def _y_range(
    title: str, arrays: Sequence[np.ndarray], reference_level: float | None
) -> tuple[tuple[float, float] | None, str]:
    """Return the range (low, high) of the y axis for the values in `arrays`, and a note. The range is None if no value
    is finite. Values far above the reference level lie beyond the range; the note then says so of `title`."""
    values = np.concatenate([np.empty(0), *arrays])
    values = values[np.isfinite(values)]
    if not len(values):
        return None, ""
    low, high = values.min(), values.max()
    top = high if reference_level is None else min(high, max(1.08 * reference_level, 1.5 * low))
    padding = 0.06 * (top - low) or 0.1
    note = f"{title} above {top:.4g} (highest: {high:.4g}) is not shown." if top < high else ""
    return (low - padding, top + padding), note


# ---------------------------------------------------------------- while training


def curves_picture(
    arm_labels: Sequence[str],
    runs: Sequence[DrawnRun],
    metric_titles: Mapping[str, tuple[str, str]],
    comparison: ArmComparison | None,
) -> Picture | None:
    """Return a picture of logged metrics as functions of tokens seen; None if no metric has a curve.

    Args:
        arm_labels: labels of the arms, whose order decides their colours.
        metric_titles: titles and labels of the y axis of the metrics, by their names in the log.
        comparison: comparison of the finished runs, from which the reference level is read; None: no level is drawn.
    """
    swaps = [(run.record, step) for run in runs for step, _ in run.record.phase_starts_and_normalizers[1:]]
    swap_tokens = {
        step * (record.flat_config.get("optim.batch_tokens") or 0) + record.tokens_before_run for record, step in swaps
    }
    vertical_line_labels = {
        tokens: "normalizer swapped" * (index == 0) for index, tokens in enumerate(sorted(swap_tokens))
    }
    panels, notes = [], []
    for name, (title, y_label) in metric_titles.items():
        traces = [
            (run, _trace(run, curve, arm_labels.index(run.arm), f"{run.arm}, seed {run.seed}"))
            for run in runs
            if len((curve := run.record.curve(name)).tokens)
        ]
        if max((len(trace.x) for _, trace in traces), default=0) < 2:
            continue
        converged = [trace.y for run, trace in traces if run.state != DIVERGED_KEY]
        settled = [y[int(SETTLING_FRACTION * len(y)) :] for y in converged]
        level = comparison.reference_level(NATS) if comparison and converged and name in LOSS_TITLES else None
        y_range, note = _y_range(title, settled or [trace.y for _, trace in traces], level and level[1])
        means = []
        for arm in dict.fromkeys(run.arm for run in runs):
            finished = [trace for run, trace in traces if run.arm == arm and run.state == "finished"]
            if len({trace.x.tobytes() for trace in finished}) == 1:
                label, y = (
                    f"{arm}, mean of {seed_count_text(len(finished))}",
                    np.mean([trace.y for trace in finished], axis=0),
                )
                means.append(Trace(arm_labels.index(arm), label, finished[0].x, y, "mean"))
        ends = [
            Trace(trace.arm_index, trace.label, trace.x[-1:], trace.y[-1:], "diverged")
            for run, trace in traces
            if run.state == DIVERGED_KEY
        ]
        is_drawn = level and y_range and y_range[0] < level[1] < y_range[1]
        horizontal_line_labels = {level[1]: f"{level[0]} {level[1]:.2f}"} if is_drawn else {}
        lines = [*(trace for _, trace in traces), *ends, *means]
        panels.append(
            Panel(
                title,
                TOKENS_SEEN_LABEL,
                y_label,
                lines,
                y_range=y_range,
                vertical_line_labels=vertical_line_labels,
                horizontal_line_labels=horizontal_line_labels,
            )
        )
        notes.append(note)
    if not panels:
        return None
    kinds = {trace.drawn_as for panel in panels for trace in panel.traces}
    caption = "Thin: single seeds. " if max(Counter(run.arm for run in runs).values()) > 1 else ""
    caption += "Thick: mean over the seeds of an arm that have finished. " if "mean" in kinds else ""
    caption += f"Of more than {MAX_CURVE_POINTS} logged steps, points are means over neighbours. "
    caption += "Held-out losses are of all held-out text, the part that selects included." if len(panels) > 1 else ""
    caption += " Crosses at the top: where a run diverged." if "diverged" in kinds else ""
    return Picture(panels, arm_labels, " ".join([caption.strip(), *filter(None, notes)]))


# ---------------------------------------------------------------- sections


def section_pictures(comparison: ArmComparison) -> list[Picture | None]:
    """Return a picture for each section, of its metrics along their axis: panels of values and of paired differences to
    the baseline. None for a section without an axis, or with a single place and no reference level."""
    traces = [_curve_traces(comparison, shows_differences) for shows_differences in (False, True)]
    return [_section_picture(comparison, section, *traces) for section in comparison.sections]


def _curve_traces(comparison: ArmComparison, shows_differences: bool) -> dict[int, list[Trace]]:
    """Return traces of values, or of paired differences, by the metric's index in `metric_names`. Traces show each
    run's means at the points or bins that all runs of its arm have, and the mean over runs with its interval. Bins that
    begin before `FIRST_DRAWN_POSITION` are left out, but the last bin of an axis is always drawn."""
    rows = comparison.titled_metric_rows
    rows = comparison.paired_differences(rows) if shows_differences else rows
    rows = rows[rows["axis_kind"] != "number"]
    rows = rows.assign(until=rows["until"].fillna(rows["x"]))  # a point is a bin without width
    indices, units = rows.groupby(["name", "arm", "x", "until"], sort=False).indices, rows[INTERVAL_INPUT_COLUMNS]
    traces: dict[int, list[Trace]] = {}
    for (name, arm), arm_rows in point_means(rows).groupby(["name", "arm"], sort=False):
        table = arm_rows.pivot(index=["x", "until"], columns="run", values="value")  # (points, runs)
        starts, ends = (table.index.get_level_values(level).to_numpy() for level in ("x", "until"))
        is_shared = arm_rows.groupby(["x", "until"]).size().to_numpy() == table.shape[1]
        is_drawn = (starts == ends) | (starts >= min(FIRST_DRAWN_POSITION, starts.max()))
        table, x = table[is_shared & is_drawn], np.sqrt(starts * ends)[is_shared & is_drawn]
        if table.empty:
            continue
        intervals = [
            _point_interval(
                comparison, name, arm, place[0], units.iloc[indices[name, arm, *place]], values, shows_differences
            )
            for place, values in zip(table.index, table.to_numpy(), strict=True)
        ]
        arm_index, averages = comparison.arm_labels.index(arm), table.mean(axis=1, skipna=False).to_numpy()
        traces.setdefault(name, []).extend(
            Trace(arm_index, f"{arm}, seed {comparison.runs[run].seeds[-1]}", x, y.to_numpy(), "seed")
            for run, y in table.items()
        )
        bounds, label = (None, None, ""), f"{arm}, mean of {seed_count_text(len(table.columns))}"
        if any(intervals):
            pairs = zip(intervals, averages, strict=True)
            ends = [
                (interval.low, interval.high) if interval and interval.is_bounded else (average, average)
                for interval, average in pairs
            ]
            noise_source = next(interval.noise_source for interval in intervals if interval and interval.noise_source)
            bounds = *np.array(ends).T, noise_source
        traces[name].append(Trace(arm_index, label, x, averages, "mean", *bounds))
    return traces


def _point_interval(
    comparison: ArmComparison,
    metric_index: int,
    arm: str,
    x: float,
    unit_rows: pd.DataFrame,
    run_means: np.ndarray,
    shows_differences: bool,
) -> Interval | None:
    """Return the interval of an arm's mean, or of its paired difference, at `x`.

    A mean over several runs has no interval in a range of positions (bin). A mean of a control metric, which only
    checks a measurement, has none anywhere. `unit_rows` are the arm's units at `x`, `run_means` each run's mean.
    `shows_differences`: whether these are paired differences.
    """
    metric = unit_rows["about"].iloc[0]
    if shows_differences:
        return clip_difference_interval(paired_interval(unit_rows, run_means, metric), metric)
    if metric.control:
        return None
    if comparison.metric_names[metric_index].axis_kind == "points":
        arm_mean = comparison.arm_means.get((comparison.metric_names[metric_index], axis_text(x), arm))
        return arm_mean and arm_mean.interval
    return run_interval(unit_rows, float(run_means[0])) if len(run_means) == 1 else None


def _section_picture(
    comparison: ArmComparison,
    section: pd.DataFrame,
    value_traces: dict[int, list[Trace]],
    difference_traces: dict[int, list[Trace]],
) -> Picture | None:
    """Return the picture of a section. The traces are given by the metric's index in `metric_names`."""
    title, axis_kind, metric = section[["title", "axis_kind", "about"]].iloc[0]
    metrics, panels = section["about"].unique(), []
    if axis_kind == "number" or (section["place"].nunique() < 2 and not any(metric.references for metric in metrics)):
        return None
    sentences = [f"{metric.caption[:1].upper()}{metric.caption[1:]}."]
    if max(map(len, comparison.runs_by_arm.values())) > 1:
        sentences.append("Thin: single seeds; thick: their mean.")
    lengths = training_lengths(section)
    words = f"training length{'s' * (len(lengths) > 1)} {', '.join(map(axis_text, lengths))}"
    axis = {
        "x_log_base": 2 if metric.axis.log else 0,
        "vertical_line_labels": {n: words * (n == lengths[0]) for n in lengths},
    }
    level = None if metric.better == "higher" else comparison.reference_level(metric.unit)
    x_label = with_unit(metric.axis.name, metric.axis.unit)
    for index, metric_rows in section.groupby("name", sort=False):
        name = comparison.metric_names[index]
        values, differences = value_traces.get(index, []), difference_traces.get(index, [])
        name_text, y_range, note = ", ".join((name.quantity, *name.task_and_setting)), (-0.03, 1.03), ""
        panel_title = f"{title}: {name_text}"
        if metric.unit != "fraction":
            ends = [end for trace in values for end in (trace.y, trace.low, trace.high) if end is not None]
            y_range, note = _y_range(name_text, ends, level and level[1])
        sentences.append(note)
        for kind, traces in (("Bands", values), ("Bands of differences", differences)):
            sources = dict.fromkeys(trace.noise_source for trace in traces if trace.noise_source)
            sentences += [f"{kind}: 95% intervals over {source}, each alone." for source in sources]
        horizontal_line_labels = {
            level: f"{label} {level:.3g}"
            for row_metric in metric_rows["about"].unique()
            for label, level in row_metric.references
        }
        y_label = with_unit(name.quantity, metric.unit)
        panels.append(
            Panel(
                panel_title,
                x_label,
                y_label,
                values,
                y_range=y_range,
                horizontal_line_labels=horizontal_line_labels,
                **axis,
            )
        )
        if comparison.baseline:
            panel_title += f": paired difference to {comparison.baseline}"
            y_label = with_unit("difference", metric.unit)
            panel = Panel(panel_title, x_label, y_label, differences, has_zero_line=True, **axis)
            panels.append(panel if differences else None)
    sentences += [f"Dotted, if any: {metric.levels}."] if metric.levels else []
    sentences += [f"From position {FIRST_DRAWN_POSITION}."] if axis_kind == "bins" else []
    return Picture(panels, comparison.arm_labels, " ".join(dict.fromkeys(filter(None, sentences))))


def task_heat_maps(comparison: ArmComparison) -> list[Picture]:
    """Return pictures with heat maps of metrics that are fractions and have more than `MAX_TASKS_WITHOUT_MAP` tasks,
    such as accuracy by needle depth and length. Each map shows an arm's mean over seeds."""
    rows, pictures = comparison.all_rows, []
    is_fraction = (rows["unit"] == "fraction") & ~rows["control"]
    means = point_means(rows[is_fraction & (rows["title"] == "") & (rows["axis_kind"] == "points")])
    for (kind, quantity, setting), group in means.groupby(["kind", "quantity", "setting"], sort=False):
        n_tasks = group.groupby("arm")["task"].nunique().max()
        if n_tasks > MAX_TASKS_WITHOUT_MAP:
            caption = f"{kind}: {', '.join(filter(None, (quantity, setting)))}. Mean over the seeds of an arm."
            maps = [_arm_heat_map(arm, arm_rows) for arm, arm_rows in group.groupby("arm", sort=False)]
            size = 12.8 / min(3, len(maps)), max(1.2 + 0.36 * n_tasks, 2.2)
            pictures.append(Picture(maps, comparison.arm_labels, caption, n_columns=3, panel_size=size))
    return pictures


def _arm_heat_map(arm: str, means: pd.DataFrame) -> HeatMap:
    """Return a heat map of an arm: a row for each task, a column for each point, cells with means over runs."""
    metric, tasks = means["about"].iloc[0], means["task"].unique()
    table = (
        grouped_mean(means, ["task", "x"], np.ones(len(means)))
        .pivot(index="task", columns="x", values="value")
        .reindex(tasks)
    )
    top = 1.0 if metric.interval else float(np.nanmax(table))
    return HeatMap(
        arm, with_unit(metric.axis.name, metric.axis.unit), [*map(axis_text, table)], list(tasks), table.to_numpy(), top
    )


# ---------------------------------------------------------------- what is logged by layer and head


def parameter_picture(arm_labels: Sequence[str], runs: Sequence[DrawnRun]) -> Picture | None:
    """Return the picture of the normalizers' parameters in training; None if there are none.

    Each arm has a colour; with a single run, each layer has one.
    """
    is_alone, traces = len(runs) == 1, dict[str, list[Trace]]()
    for run in runs:
        for name in dict.fromkeys(chain(*run.record.log_lines)):
            if match := _PARAMETER_METRIC_PATTERN.fullmatch(name):
                parameter, layer, head = match.groups()
                label = f"{run.arm}, seed {run.seed}, layer{layer}/{head}"
                colour_index, drawn_as = (int(layer), "mean") if is_alone else (arm_labels.index(run.arm), "seed")
                traces.setdefault(parameter, []).append(
                    _trace(run, run.record.curve(name), colour_index, label, drawn_as)
                )
    if not traces:
        return None
    panels = [Panel(f"Parameter {name} of the normalizer", TOKENS_SEEN_LABEL, "value", traces[name]) for name in traces]
    if is_alone:
        arm_labels = [f"layer {layer}" for layer in range(runs[0].record.flat_config["model.n_layer"])]
    return Picture(panels, arm_labels, "Parameters of the normalizers. A line for each seed, layer and head.")
