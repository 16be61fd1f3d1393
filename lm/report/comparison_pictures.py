"""Pictures that compare runs: training curves, evaluated metrics by position, length or head, heat maps by layer and
head, and the metrics that training logs by layer and head."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm.report.comparison import (
    UNIT_COLUMNS,
    ArmComparison,
    interval_of,
    paired_interval,
    shown_interval,
    training_lengths,
)
from lm.report.pictures import Map, Panel, Picture, Trace, plain_ticks, token_unit
from lm.report.tables import printable, with_unit
from lm.runs.evaluations import mean, number, point_means
from lm.runs.folder import DIVERGED, Curve
from lm.runs.folder import curve as logged_curve
from lm.runs.record import RunRecord
from lm.schema import Plain
from lm.statistics.intervals import Interval
from lm.statistics.verdicts import seed_count_text

FIRST_DRAWN_POSITION = 16  # position at which a picture by position begins
MAX_TASKS_WITHOUT_MAP = 3  # fractions of more tasks than this, such as a needle at several depths, are drawn as a map
NATS = "nats per token"
LOSSES = {"train/loss": ("Training loss (train/loss)", NATS), "val/loss": ("Validation loss (val/loss)", NATS)}
MAX_POINTS = 250  # most points of a curve in a picture
SETTLING_FRACTION = 0.1  # fraction of training after which values count for the ends of the y axis
_PARAMETER_METRIC = re.compile(r"normalizer/(.+)/layer(\d+)/(head\d+|rms)")


POINT = ["name", "arm", "x"]  # columns that tell points of an arm's curves apart
PointKey = tuple[int, str, float]
Bands = Mapping[PointKey, Interval | None]  # the interval of the mean at each point


class DrawnRun(NamedTuple):
    """A run as pictures of training draw it and pages list it. `state` is finished, unfinished or diverged."""

    arm: str
    seed: int
    state: str
    record: RunRecord
    label: str  # the run's name on the page


def drawn_runs(comparison: ArmComparison) -> list[DrawnRun]:
    """Return the comparison's runs for drawing."""
    return [
        DrawnRun(arm, run.seeds[-1], run.state, run, f"{printable(run.name)} ({arm}, {run.state})")
        for arm, runs in comparison.arms.items()
        for run in runs
    ]


def overview(comparison: ArmComparison, pictures: Sequence[Picture | None] | None = None) -> Picture:
    """Join `pictures` into one; None: those of losses while training and of each section with an axis."""
    if pictures is None:
        training = curves(comparison.names, drawn_runs(comparison), LOSSES, comparison)
        pictures = [training, *axis_pictures(comparison)]
    pictures = [*filter(None, pictures)]
    diverged = {arm: sum(run.state == DIVERGED for run in runs) for arm, runs in comparison.arms.items()}
    arms = [
        f"{arm} ({seed_count_text(len(runs))}{f', {diverged[arm]} diverged' * bool(diverged[arm])})"
        for arm, runs in comparison.arms.items()
    ]
    panels = [panel for picture in pictures for panel in picture.panels]
    if len(comparison.arms) == 1:
        panels = [panel for panel in panels if panel]
    elif pictures and len(pictures[0].panels) % 2:  # a line's values and differences, two panels, stand in one row
        panels.insert(len(pictures[0].panels), None)
    return Picture(
        panels or [Panel("While training", "tokens seen", "loss", [])],
        arms,
        " ".join(picture.caption for picture in pictures),
    )


# ---------------------------------------------------------------- while training


def curves(
    names: Sequence[str],
    runs: Sequence[DrawnRun],
    titles: Mapping[str, tuple[str, str]],
    comparison: ArmComparison | None,
) -> Picture | None:
    """A picture of logged metrics as functions of tokens seen; None if no metric has a curve.

    Args:
        names: names of the arms, whose order decides their colours.
        titles: titles and labels of the y axis of the metrics, by their names in the log.
        comparison: comparison of the finished runs, from which the reference level is read; None: no level is drawn.
    """
    curves_by_name = {
        name: [(run, curve) for run in runs if len((curve := _curve_by_tokens_seen(run, name)).tokens)]
        for name in titles
    }
    max_tokens = max((curve.tokens[-1] for run_curves in curves_by_name.values() for _, curve in run_curves), default=1)
    unit, x_label = token_unit(max_tokens)
    swaps = [(run.record, step) for run in runs for step, _ in run.record.phases[1:]]
    swap_tokens = {step * (record.flat.get("optim.batch_tokens") or 0) + record.tokens_before for record, step in swaps}
    level = comparison and comparison.level(NATS)
    panels, single_point_titles, clip_notes = [], [], []
    for name, run_curves in curves_by_name.items():
        curve_length = max((len(curve.tokens) for _, curve in run_curves), default=0)
        if curve_length < 2 and name != "train/loss":
            single_point_titles += [titles[name][0]] if curve_length else []
            continue
        traces, settled_values, drawn, is_loss = [], [], [], name in LOSSES
        all_diverged = all(run.state == DIVERGED for run, _ in run_curves)  # then the ends of the y axis hide nothing
        for run, curve in run_curves:
            window = max(1, len(curve.tokens) // 50) // 2 * 2 + 1 if name == "train/loss" else 1
            losses = pd.Series(curve.values).where(np.isfinite(curve.values))
            stride = max(1, len(curve.tokens) // MAX_POINTS)
            y = losses.rolling(window, center=True, min_periods=1).mean().where(losses.notna()).to_numpy()
            arm_index, label = names.index(run.arm), f"{run.arm}, seed {run.seed}"
            drawn.append((run, curve.tokens[::stride] / unit, y[::stride]))
            traces.append(Trace(arm_index, label, *drawn[-1][1:], "seed"))
            start_tokens = run.record.tokens_before
            is_settled = curve.tokens - start_tokens > SETTLING_FRACTION * (max_tokens - start_tokens)
            if all_diverged or run.state != DIVERGED:
                settled_values += y[(is_settled | all_diverged) & np.isfinite(y)].tolist()
            if run.state == DIVERGED:
                traces.append(Trace(arm_index, label, curve.tokens[-1:] / unit, curve.values[-1:], "diverged"))
        for arm_index, arm in enumerate(names):
            arm_curves = [(x, y) for run, x, y in drawn if run.arm == arm and run.state == "finished"]
            if len({x.tobytes() for x, _ in arm_curves}) == 1:
                label = f"{arm}, mean of {seed_count_text(len(arm_curves))}"
                mean = np.mean([y for _, y in arm_curves], axis=0)
                traces.append(Trace(arm_index, label, arm_curves[0][0], mean, "mean"))
        low, high = (min(settled_values), max(settled_values)) if settled_values else (0.0, 1.0)
        top = min(high, max(1.08 * level[1], 1.3 * low)) if level and is_loss and not all_diverged else high
        clip_notes += [f"{titles[name][0]} above {top:.2f} (highest: {high:.4g}) is not shown."] if top < high else []
        y_padding = 0.06 * (top - low) or 0.1
        levels = {level[1]: f"{level[0]} {level[1]:.2f}"} if level and is_loss and low < level[1] < top else {}
        marks = {tokens / unit: "normalizer swapped" * (index == 0) for index, tokens in enumerate(sorted(swap_tokens))}
        panels.append(
            Panel(
                titles[name][0],
                x_label,
                titles[name][1],
                traces,
                y_range=(low - y_padding, top + y_padding),
                marks=marks,
                levels=levels,
            )
        )
    kinds = {trace.kind for panel in panels for trace in panel.traces}
    if not kinds:
        return None
    caption = "Thin: single seeds. " if max(Counter(run.arm for run in runs).values()) > 1 else ""
    caption += "Thick: mean over the seeds of an arm that have finished. " if "mean" in kinds else ""
    caption += "Training loss is a centred moving mean. " if panels[0].traces else ""
    caption += "Held-out losses are of all held-out text, the part that selects included." if len(panels) > 1 else ""
    caption += " Crosses at the top: where a run diverged." if "diverged" in kinds else ""
    caption += (
        f" Without a curve, because it was measured once: {', '.join(single_point_titles)}."
        if single_point_titles
        else ""
    )
    return Picture(panels, names, " ".join([caption.strip(), *clip_notes]))


def _curve_by_tokens_seen(run: DrawnRun, name: str) -> Curve:
    """The curve of a logged metric as a function of tokens seen, which include the tokens that the run's initial
    weights had seen.
    """
    curve = run.record.curve(name)
    return replace(curve, tokens=curve.tokens + run.record.tokens_before)


# ---------------------------------------------------------------- sections

WILSON_NOTE = (
    "Wilson's over questions or the sequences that ask several, for several seeds each end of Student's t "
    "over seeds that lies farther out"
)


def axis_pictures(comparison: ArmComparison) -> list[Picture | None]:
    """A picture for each section of its metrics along their axis: for each name, panels of values and of paired
    differences to the baseline. None if there is no axis, or a single place and no level to compare it with.
    """
    rows = comparison.rows
    paired = comparison.paired(rows)
    values, differences = _shared_points(rows), _shared_points(paired)
    drawn = (values, _value_bands(comparison, values)), (differences, _difference_bands(paired, differences))
    return [_axis_picture(comparison, section, *drawn) for section in comparison.sections]


def _shared_points(rows: pd.DataFrame) -> pd.DataFrame:
    """Each run's mean at the points or bins at which all runs of an arm have one. Bins that begin before
    `FIRST_DRAWN_POSITION` are left out, except the last.
    """
    means, of_arm = point_means(rows)[[*POINT, "until", "run", "shape", "about", "value"]], ["name", "arm"]
    n_runs = means.groupby(of_arm)["run"].transform("nunique")
    means = means[means.groupby([*of_arm, "x", "until"], dropna=False)["run"].transform("size") == n_runs]
    first = means.groupby(of_arm)["x"].transform("max").clip(upper=FIRST_DRAWN_POSITION)
    return means[(means["shape"] == "points") | ((means["shape"] == "bins") & (means["x"] >= first))]


def _value_bands(comparison: ArmComparison, points: pd.DataFrame) -> Bands:
    """Intervals of an arm's mean at points and, of a single run, in bins."""
    units, bands = _units_by_point(comparison.rows), {}
    for key, means in points.groupby(POINT, sort=False):
        index, arm, x = key
        name, about, values = comparison.metric_names[index], means["about"].iloc[0], means["value"].to_numpy()
        if about.control:
            continue
        if name.shape == "points":
            bands[key] = (cell := comparison.cells.get((name, number(x), arm))) and cell.interval
        elif len(values) == 1:
            bands[key] = interval_of(units(key), float(values[0]))
    return bands


def _difference_bands(paired: pd.DataFrame, points: pd.DataFrame) -> Bands:
    """Intervals of mean differences at points and in bins."""
    units = _units_by_point(paired)
    return {
        key: shown_interval(paired_interval(units(key), means["value"].to_numpy()), means["about"].iloc[0])
        for key, means in points.groupby(POINT, sort=False)
    }


def _units_by_point(rows: pd.DataFrame) -> Callable[[PointKey], pd.DataFrame]:
    indices, units = rows.groupby(POINT, sort=False).indices, rows[UNIT_COLUMNS]
    return lambda key: units.iloc[indices[key]]


def _axis_picture(
    comparison: ArmComparison, section: pd.DataFrame, *drawn: tuple[pd.DataFrame, Bands]
) -> Picture | None:
    title, shape, about = section[["title", "shape", "about"]].iloc[0]
    metrics, names, panels, sentences = section["about"].unique(), comparison.names, [], []
    if shape == "number" or (section["place"].nunique() < 2 and not any(metric.references for metric in metrics)):
        return None
    caption = f"{about.caption[:1].upper()}{about.caption[1:]}."
    caption += " Thin: single seeds; thick: their mean." if max(map(len, comparison.arms.values())) > 1 else ""
    for index in section["name"].unique():
        name, of_name = comparison.metric_names[index], section["about"][section["name"] == index].unique()
        traces, paired_traces = (
            [
                trace
                for _, means in points[points["name"] == index].groupby("arm", sort=False)
                for trace in _seed_traces(comparison, means, bands)
            ]
            for points, bands in drawn
        )
        panel_title, y_range = f"{title}: {', '.join((name.quantity, *name.labels))}", (-0.03, 1.03)
        if about.unit != "fraction":
            y_range, clip_note = _y_range(comparison, section, traces)
            sentences.append(clip_note)
        nonfinite_arms = dict.fromkeys(names[trace.arm] for trace in traces if not np.isfinite(trace.y).all())
        if nonfinite_arms:
            sentences.append(f"Not finite at some places: {', '.join((*name.labels, *nonfinite_arms))}.")
        for kind, of_kind in (("Bands", traces), ("Bands of differences", paired_traces)):
            sources = (trace.noise_source for trace in of_kind if trace.noise_source)
            sentences += [f"{kind}: 95% intervals over {source}, each alone." for source in sources]
        levels = {level: f"{label} {level:.3g}" for metric in of_name for label, level in metric.references}
        panels.append(replace(_axis_panel(section, panel_title, name.quantity, traces), y_range=y_range, levels=levels))
        panel_title += f": paired difference to {names[0]}"
        panel = _axis_panel(section, panel_title, "difference", paired_traces)
        panels.append(replace(panel, zero_line=True) if paired_traces else None)
    if any(metric.interval and metric.units == "questions" for metric in metrics):
        sentences.append(f"Intervals are {WILSON_NOTE}.")
    sentences += [f"Dotted, if any: {about.levels}."] if about.levels else []
    sentences += [f"From position {FIRST_DRAWN_POSITION}."] if shape == "bins" else []
    return Picture(panels, names, " ".join([caption, *dict.fromkeys(filter(None, sentences))]))


def _seed_traces(comparison: ArmComparison, means: pd.DataFrame, intervals: Bands) -> list[Trace]:
    """A trace of each run of an arm, and of their mean with its interval at each point."""
    table = means.pivot(index="x", columns="run", values="value")  # (points, runs)
    x, ends = table.index.to_numpy(), means.sort_values("x")["until"].to_numpy()[:: len(table.columns)]
    mean, bounds, noise_source = table.to_numpy().mean(1), (None, None), ""
    name, arm = means[["name", "arm"]].iloc[0]
    bands = [intervals.get((name, arm, at)) for at in x]
    if any(bands):
        bands = [interval or Interval(y, y, y) for interval, y in zip(bands, mean, strict=True)]
        bounds = np.array([interval.picture_values() for interval in bands]).T[1:]
        noise_source = next(interval.noise_source for interval in bands if interval.noise_source)
    x = np.where(np.isnan(ends), x, np.sqrt(x * ends))
    index, label = comparison.names.index(arm), f"{arm}, mean of {seed_count_text(len(table.columns))}"
    seeds = [
        Trace(index, f"{arm}, seed {comparison.runs[run].seeds[-1]}", x, y.to_numpy(), "seed")
        for run, y in table.items()
    ]
    return [*seeds, Trace(index, label, x, mean, "mean", *bounds, noise_source=noise_source)]


def _axis_panel(section: pd.DataFrame, title: str, quantity: str, traces: Sequence[Trace]) -> Panel:
    """A panel of traces along the section's axis, with vertical marks at training lengths. `quantity` labels the y
    axis.
    """
    about, x = section["about"].iloc[0], np.concatenate([trace.x for trace in traces] or [np.ones(1)])
    octaves = [2**power for power in range(31) if x.min() <= 2**power <= x.max()]
    ticks = plain_ticks(octaves if section["shape"].iloc[0] == "bins" else sorted(set(x.tolist())))
    marks = {float(length): f"training length {length:,}" for length in training_lengths(section)}
    label, log = with_unit(quantity, about.unit), 2 if about.axis.log else 0
    return Panel(title, about.axis.label, label, traces, ticks, log, marks=marks)


def _y_range(
    comparison: ArmComparison, section: pd.DataFrame, traces: Sequence[Trace]
) -> tuple[tuple[float, float] | None, str]:
    """The range (low, high) of the y axis, cut off above the metric's reference level, and a note on arms with values
    above the range.

    The range is None and the note empty if no value is finite, there is no reference level, or higher is better.
    """
    about = section["about"].iloc[0]
    level, length = comparison.level(about.unit), max(training_lengths(section), default=0)
    arrays = [
        (trace.arm, array[np.isfinite(array)])
        for trace in traces
        for array in (trace.y, trace.low, trace.high)
        if array is not None
    ]
    values = np.concatenate([np.empty(0), *(array for _, array in arrays)])
    if not len(values) or level is None or about.better == "higher":
        return None, ""
    low = values.min()
    short = np.concatenate([trace.y[trace.x <= length] for trace in traces])
    lowest = min(short[np.isfinite(short)], default=low)
    top = max(min(values.max(), max(1.08 * level[1], 1.6 * lowest)), low + 1e-3)
    padding = 0.06 * (top - low)
    peaks: dict[int, float] = {}
    for arm, array in arrays:
        peaks[arm] = max(peaks.get(arm, low), array.max(initial=low))
    left = [
        f"{comparison.names[arm]} (highest: {peak:.4g})" for arm, peak in sorted(peaks.items()) if peak > top + padding
    ]
    return (low - padding, top + padding), f"Leaving the picture: {'; '.join(left)}." if left else ""


def heat_maps(comparison: ArmComparison) -> list[Picture]:
    """Pictures of heat maps of fractions of more than `MAX_TASKS_WITHOUT_MAP` tasks, such as accuracy by needle depth
    and length. Each map shows an arm's mean over seeds."""
    rows = comparison.all_rows[(comparison.all_rows["title"] == "") & (comparison.all_rows["shape"] == "points")]
    is_drawn = np.array([about.unit == "fraction" and not about.control for about in rows["about"]], bool)
    means, pictures = point_means(rows[is_drawn]), []
    for (kind, quantity, setting), group in means.groupby(["kind", "quantity", "setting"], sort=False):
        if group.groupby("arm")["task"].nunique().max() > MAX_TASKS_WITHOUT_MAP:
            caption = f"{kind}: {', '.join(filter(None, (quantity, setting)))}. Mean over the seeds of an arm."
            maps = [_fraction_map(arm, of_arm) for arm, of_arm in group.groupby("arm", sort=False)]
            pictures.append(Picture(maps, comparison.names, caption, columns=3))
    return pictures


def _fraction_map(arm: str, means: pd.DataFrame) -> Map:
    """A heat map of an arm: a row for each task, a column for each point, cells with means over runs."""
    about, tasks = means["about"].iloc[0], means["task"].unique()
    table = mean(means, ["task", "x"]).pivot(index="task", columns="x", values="value").reindex(tasks)
    values = table.to_numpy()
    top = 1.0 if about.interval else float(np.nanmax(values))
    return Map(arm, about.axis.label, list(plain_ticks(table.columns).values()), list(tasks), values, top)


# ---------------------------------------------------------------- what is logged by layer and head


def parameter_curves(log_lines: list[dict[str, Plain]]) -> dict[tuple[str, int], dict[str, Curve]]:
    """Curves of the normalizers' parameters by (parameter, layer), then by `head3` or `rms` (root mean square)."""
    names = dict.fromkeys(name for log_line in log_lines for name in log_line)
    curves: dict[tuple[str, int], dict[str, Curve]] = {}
    for match in sorted(
        filter(None, map(_PARAMETER_METRIC.fullmatch, names)), key=lambda match: (match[1], int(match[2]))
    ):
        curves.setdefault((match[1], int(match[2])), {})[match[3]] = logged_curve(log_lines, match[0])
    return curves


def parameter_picture(names: Sequence[str], runs: Sequence[DrawnRun]) -> Picture | None:
    """The picture of the normalizers' parameters in training; None if there are none.

    Each arm has a colour and thin lines, and a thick line for the median of these; with a single run, each layer has a
    colour. Neighbouring points of a curve are merged to `MAX_POINTS` or fewer.
    """
    entries = [(run, *key, by_head) for run in runs for key, by_head in parameter_curves(run.record.log_lines).items()]
    if not entries:
        return None
    last_tokens = max(
        curve.tokens[-1] + run.record.tokens_before for run, *_, by_head in entries for curve in by_head.values()
    )
    unit, x_label = token_unit(last_tokens)
    if len(runs) == 1:
        names = [f"layer {layer}" for layer in range(1 + max(layer for _, _, layer, _ in entries))]
    traces: dict[str, list[Trace]] = {}
    for run, parameter, layer, by_head in entries:
        colour_index = layer if len(runs) == 1 else names.index(run.arm)
        for head, curve in by_head.items():
            points = _merge_points((curve.tokens + run.record.tokens_before) / unit, curve.values)
            label = f"{run.arm}, seed {run.seed}, layer{layer}/{head}"
            traces.setdefault(parameter, []).append(Trace(colour_index, label, *points, "seed"))
    medians = {parameter: _median_traces(names, lines) if len(runs) > 1 else [] for parameter, lines in traces.items()}
    panels = [
        Panel(f"Parameter {name} of the normalizer", x_label, "value", [*traces[name], *medians[name]])
        for name in sorted(traces)
    ]
    note = " Thick: the median of an arm's lines." if any(medians.values()) else ""
    return Picture(panels, names, f"Parameters of the normalizers. A line for each seed, layer and head.{note}")


def _median_traces(names: Sequence[str], traces: Sequence[Trace]) -> list[Trace]:
    """The median trace of each arm that has several traces, all with the same x (tokens seen)."""
    by_arm = {name: [trace for trace in traces if trace.arm == arm] for arm, name in enumerate(names)}
    return [
        Trace(
            arm_traces[0].arm,
            f"{name}, median",
            arm_traces[0].x,
            np.median([trace.y for trace in arm_traces], axis=0),
            "mean",
        )
        for name, arm_traces in by_arm.items()
        if len(arm_traces) > 1 and len({trace.x.tobytes() for trace in arm_traces}) == 1
    ]


def _merge_points(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring points into at most `MAX_POINTS` points, whose y is the median; return their x and y."""
    group_size = -(-len(x) // MAX_POINTS)
    groups = np.split(np.arange(len(x)), range(group_size, len(x), group_size))
    with np.errstate(invalid="ignore"):
        return np.array([x[group].mean() for group in groups]), np.array([np.median(values[group]) for group in groups])
