"""Pictures that compare runs: training curves, evaluated metrics by position, length or head, heat maps by layer and
head, and the metrics that training logs by layer and head."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from lm.report.comparison import (
    ArmRuns,
    RunComparison,
    Section,
    SeriesName,
    interval_of,
    mean_interval,
    shown_interval,
)
from lm.report.pictures import Map, Panel, Picture, Trace, plain_ticks, token_unit
from lm.report.tables import printable, with_unit
from lm.runs.evaluations import Series, number
from lm.runs.folder import DIVERGED, Curve
from lm.runs.folder import curve as logged_curve
from lm.runs.record import RunRecord
from lm.schema import Plain
from lm.statistics.intervals import Interval

PARAM_PREFIX = "normalizer/"  # prefix of the logged names of normalizers' parameters
GRAD_NORM = "train/grad_norm"
FIRST_DRAWN_POSITION = 16  # position at which a picture by position begins
MAX_TASKS_WITHOUT_MAP = 3  # fractions of more tasks than this, such as a needle at several depths, are drawn as a map
LOSSES = {"train/loss": "Training loss (train/loss)", "val/loss": "Validation loss (val/loss)"}
MAX_POINTS = 250  # most points of a curve in a picture
SETTLING_FRACTION = 0.1  # fraction of training after which values count for the ends of the y axis
_LAYER_METRIC = re.compile(r"(.+)/layer(\d+)(?:/(head\d+|rms))?")
_LOGIT_SCALE_METRIC = re.compile(r"logit_scale/n(\d+)")
_QUANTITY_TITLES = {
    GRAD_NORM: "Gradient norm before clipping",
    "largest_score": "Largest score",
    "logit_scale/slope": "Logit scale: a of a ln n + b",
    "logit_scale/intercept": "Logit scale: b of a ln n + b",
}


class DrawnRun(NamedTuple):
    """A run as pictures of training draw it and pages list it. `state` is finished, unfinished or diverged."""

    arm: str
    seed: int
    state: str
    record: RunRecord
    label: str  # the run's name on the page


def drawn_runs(comparison: RunComparison) -> list[DrawnRun]:
    """Return the comparison's runs for drawing."""
    arm_runs = ((arm.label, run) for arm in comparison.arms for run in arm.runs)
    return [
        DrawnRun(arm, run.seeds[-1], run.state, run, f"{printable(run.name)} ({arm}, {run.state})")
        for arm, run in arm_runs
    ]


def overview(comparison: RunComparison) -> Picture:
    """Join the pictures of losses while training and of each section with an axis into one picture."""
    axis_pictures = [axis_picture(comparison, section) for section in comparison.sections if section.shape != "number"]
    pictures = [
        *filter(None, [curves(comparison.arm_names, drawn_runs(comparison), LOSSES, comparison), *axis_pictures])
    ]
    diverged_counts = [sum(run.state == DIVERGED for run in arm.runs) for arm in comparison.arms]
    arms = [
        f"{arm.label} ({_seed_count(len(arm.runs))}{f', {count} diverged' if count else ''})"
        for arm, count in zip(comparison.arms, diverged_counts, strict=True)
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


def _seed_count(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


# ---------------------------------------------------------------- while training


def curves(
    names: Sequence[str], runs: Sequence[DrawnRun], titles: Mapping[str, str], comparison: RunComparison | None
) -> Picture | None:
    """A picture of logged metrics as functions of tokens seen; None if no metric has a curve.

    Args:
        names: names of the arms, whose order decides their colours.
        titles: titles of the metrics by their names in the log.
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
    level = comparison and comparison.level("nats per token")
    panels, single_point_titles, clip_notes = [], [], []
    for name, run_curves in curves_by_name.items():
        curve_length = max((len(curve.tokens) for _, curve in run_curves), default=0)
        if curve_length < 2 and name != "train/loss":
            single_point_titles += [titles[name]] if curve_length else []
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
                label = f"{arm}, mean of {_seed_count(len(arm_curves))}"
                mean = np.mean([y for _, y in arm_curves], axis=0)
                traces.append(Trace(arm_index, label, arm_curves[0][0], mean, "mean"))
        low, high = (min(settled_values), max(settled_values)) if settled_values else (0.0, 1.0)
        top = min(high, max(1.08 * level[1], 1.3 * low)) if level and is_loss and not all_diverged else high
        clip_notes += [f"{titles[name]} above {top:.2f} (highest: {high:.4g}) is not shown."] if top < high else []
        y_padding = 0.06 * (top - low) or 0.1
        levels = {level[1]: f"{level[0]} {level[1]:.2f}"} if level and is_loss and low < level[1] < top else {}
        marks = {tokens / unit: "normalizer swapped" * (index == 0) for index, tokens in enumerate(sorted(swap_tokens))}
        label = "nats per token" if is_loss else name
        panels.append(
            Panel(
                titles[name],
                x_label,
                label,
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
DIFFERENCE_BANDS = "Bands of differences: 95% intervals over {}, each alone."
SeriesBySeeds = Mapping[tuple[int, ...], Series]


def axis_picture(comparison: RunComparison, section: Section) -> Picture | None:
    """A picture of a section's series along their axis: for each series name, panels of values and of paired
    differences to the baseline.

    It is None if the series have a single point or range and no reference level, so that the section's table shows as
    much.
    """
    if len(section.places) < 2 and not any(series.about.references for series in section.series.values()):
        return None
    first_series, panels, sentences, names = section.example_series, [], [], comparison.arm_names
    base, *other_arms = comparison.arms
    caption = f"{first_series.about.caption[:1].upper()}{first_series.about.caption[1:]}."
    caption += " Thin: single seeds; thick: their mean." if max(len(arm.runs) for arm in comparison.arms) > 1 else ""
    for name in section.names:
        series_by_arm = {arm.label: section.by_seed(arm, name) for arm in comparison.arms}
        line_series = [series for by_seed in series_by_arm.values() for series in by_seed.values()]
        value_traces = [
            trace
            for arm in comparison.arms
            for trace in _arm_traces(_value_traces(section, arm, name), arm.label, names)
        ]
        paired_traces = []
        for arm in other_arms if base.label == names[0] and not line_series[0].about.control else ():
            paired_traces += _arm_traces(
                paired_difference_traces(series_by_arm[arm.label], series_by_arm[base.label]), arm.label, names
            )
        title, y_range = f"{section.title}: {', '.join((name.metric, *name.labels))}", (-0.03, 1.03)
        if first_series.unit != "fraction":
            y_range, clip_note = _y_range(comparison, section, value_traces)
            sentences.append(clip_note)
        nonfinite_arms = dict.fromkeys(names[trace.arm] for trace in value_traces if not np.isfinite(trace.y).all())
        sentences += (
            [f"Not finite at some places: {', '.join((*name.labels, *nonfinite_arms))}."] if nonfinite_arms else []
        )
        for traces, template in (
            (value_traces, "Bands: 95% intervals over {}, each alone."),
            (paired_traces, DIFFERENCE_BANDS),
        ):
            sentences += [template.format(trace.noise_source) for trace in traces if trace.noise_source]
        levels = {level: f"{name} {level:.3g}" for series in line_series for name, level in series.about.references}
        panels.append(replace(_axis_panel(section, title, name.metric, value_traces), y_range=y_range, levels=levels))
        difference_panel = _axis_panel(
            section, f"{title}: paired difference to {base.label}", "difference", paired_traces
        )
        panels.append(replace(difference_panel, zero_line=True) if paired_traces else None)
    sentences += (
        [f"Intervals are {WILSON_NOTE}."]
        if any(series.about.interval and series.about.units == "questions" for series in section.series.values())
        else []
    )
    sentences += [f"Dotted, if any: {first_series.about.levels}."] if first_series.about.levels else []
    sentences += [f"From position {FIRST_DRAWN_POSITION}."] if first_series.bins else []
    return Picture(panels, names, " ".join([caption, *dict.fromkeys(filter(None, sentences))]))


def _arm_traces(traces: Sequence[Trace], arm: str, names: Sequence[str]) -> list[Trace]:
    """Copy the traces with the index of `arm` in `names`, which decides their colour, and with the arm's name before
    their labels.
    """
    return [replace(trace, arm=names.index(arm), label=f"{arm}, {trace.label}") for trace in traces]


def _value_traces(section: Section, arm: ArmRuns, name: SeriesName) -> list[Trace]:
    """Traces of an arm's series named `name`, over the points or bins at which all runs of the arm have values.

    Points have intervals; bins have intervals only if the arm has a single run. Control series (`Series.control`) have
    no intervals.
    """
    by_seed, intervals = section.by_seed(arm, name), []
    run_series = [*by_seed.values()]
    places = _shared_places(run_series)
    if section.shape == "points" and run_series and not run_series[0].about.control:
        intervals = [section.interval(arm, name, number(x)) for x in places]
    elif len(run_series) == 1 and not run_series[0].about.control:
        starts = run_series[0].x.tolist()
        intervals = [interval_of(run_series[0], starts.index(start)) for start, _ in places.values()]
    return _seed_traces(
        by_seed, {x: [series.mean_within(*place) for series in run_series] for x, place in places.items()}, intervals
    )


def paired_difference_traces(arm_series: SeriesBySeeds, base_series: SeriesBySeeds) -> list[Trace]:
    """Traces of differences, arm minus baseline, between runs of equal seeds, paired by sequence.

    The traces cover the points or bins at which all runs were measured on the same sequences; [] if there are none.
    Each point has its own interval: Student's t over seeds, or over documents if there is one seed; no interval if the
    point's differences have no spread.
    """
    shared_seeds = [seeds for seeds in arm_series if seeds in base_series]
    paired_series = [by_seed[seeds] for seeds in shared_seeds for by_seed in (arm_series, base_series)]
    places = _shared_places(paired_series) if all(series.points for series in paired_series) else {}
    units_by_x = {x: [series.units(*place) for series in paired_series] for x, place in places.items()}
    units_by_x = {x: units for x, units in units_by_x.items() if len({units.identity for units in units}) == 1}
    differences_by_x = {
        x: [a.minus(b) for a, b in zip(units[::2], units[1::2], strict=True)] for x, units in units_by_x.items()
    }
    intervals = [mean_interval(differences) for differences in differences_by_x.values()]
    bands = [shown_interval(interval, paired_series[0]) for interval in intervals] if all(intervals) else []
    return _seed_traces(
        shared_seeds, {x: [units.mean for units in differences] for x, differences in differences_by_x.items()}, bands
    )


def _seed_traces(
    seeds: Iterable[tuple[int, ...]], values: Mapping[float, list[float]], bands: Sequence[Interval | None]
) -> list[Trace]:
    """A trace of each seed, and a trace of the mean over seeds. The caller sets the traces' arm.

    `values` has, by x, the values of all runs in the order of `seeds`. `bands` has the interval of the mean at each x,
    or is empty.
    """
    if not values:
        return []
    x, seed_values, bounds, noise_source = np.array([*values]), np.array([*values.values()]).T, (None, None), ""
    mean = seed_values.mean(0)
    if any(bands):
        bounds = np.array(
            [(interval or Interval(y, y, y)).picture_values() for interval, y in zip(bands, mean, strict=True)]
        ).T[1:]
        noise_source = next(interval.noise_source for interval in bands if interval)
    seed_traces = [
        Trace(0, f"seed {run_seeds[-1]}", x, y_values, "seed")
        for run_seeds, y_values in zip(seeds, seed_values, strict=True)
    ]
    return [
        *seed_traces,
        Trace(0, f"mean of {_seed_count(len(seed_values))}", x, mean, "mean", *bounds, noise_source=noise_source),
    ]


def _shared_places(series_list: Sequence[Series]) -> dict[float, tuple[float, float]]:
    """Points or bins that all series share: (start, stop) by the x coordinate at which the value is drawn, for bins
    sqrt(start * stop). Bins that begin before `FIRST_DRAWN_POSITION` are left out, except the last."""
    if not series_list:
        return {}
    edges = [np.append(series.x, series.until[-1:]) if series.bins else series.x for series in series_list]
    shared_x = reduce(np.intersect1d, edges)
    if not series_list[0].bins:
        return {x: (x, x) for x in shared_x.tolist()}
    shared_x = shared_x[shared_x >= min(FIRST_DRAWN_POSITION, shared_x[-2:].min())]
    return {float(np.sqrt(start * stop)): (start, stop) for start, stop in pairwise(shared_x.tolist())}


def _axis_panel(section: Section, title: str, quantity: str, traces: Sequence[Trace]) -> Panel:
    """A panel of traces along the section's axis, with vertical marks at training lengths. `quantity` labels the y
    axis.
    """
    example, x = section.example_series, np.concatenate([trace.x for trace in traces] or [np.ones(1)])
    octaves = [2**power for power in range(31) if x.min() <= 2**power <= x.max()]
    ticks = plain_ticks(octaves if example.bins else sorted(set(x.tolist())))
    marks = {float(length): f"training length {length:,}" for length in section.seq_lens}
    label, log = with_unit(quantity, example.unit), 2 if example.axis.log else 0
    return Panel(title, example.axis.label, label, traces, ticks, log, marks=marks)


def _y_range(
    comparison: RunComparison, section: Section, traces: Sequence[Trace]
) -> tuple[tuple[float, float] | None, str]:
    """The range (low, high) of the y axis, cut off above the metric's reference level, and a note on arms with values
    above the range.

    The range is None and the note empty if no value is finite, there is no reference level, or higher is better.
    """
    level, training_length = comparison.level(section.example_series.unit), max(section.seq_lens, default=0)
    arrays = [
        (trace.arm, array[np.isfinite(array)])
        for trace in traces
        for array in (trace.y, trace.low, trace.high)
        if array is not None
    ]
    values = np.concatenate([np.empty(0), *(array for _, array in arrays)])
    if not len(values) or level is None or section.example_series.about.better == "higher":
        return None, ""
    training_values = np.concatenate([trace.y[trace.x <= training_length] for trace in traces])
    low = values.min()
    top = max(
        min(values.max(), max(1.08 * level[1], 1.6 * min(training_values[np.isfinite(training_values)], default=low))),
        low + 1e-3,
    )
    padding = 0.06 * (top - low)
    peaks = {
        arm: max(array.max(initial=low) for owner, array in arrays if owner == arm)
        for arm in sorted({arm for arm, _ in arrays})
    }
    arm_texts = [
        f"{comparison.arm_names[arm]} (highest: {peak:.4g})" for arm, peak in peaks.items() if peak > top + padding
    ]
    return (low - padding, top + padding), f"Leaving the picture: {'; '.join(arm_texts)}." if arm_texts else ""


def heat_maps(comparison: RunComparison) -> list[Picture]:
    """Pictures of heat maps of fractions of more than `MAX_TASKS_WITHOUT_MAP` tasks, such as accuracy by needle depth
    and length. Each map shows an arm's mean over seeds."""
    series_groups = defaultdict[tuple[str, str, str], dict[str, dict[str, list[Series]]]](
        lambda: defaultdict(lambda: defaultdict(list))
    )
    pairs = (
        (arm, series)
        for arm in comparison.arms
        for run in arm.runs
        for evaluation in run.evaluations
        for series in evaluation.series
    )
    for arm, series in pairs:
        if series.shape == "points" and series.unit == "fraction" and not (series.about.title or series.about.control):
            series_groups[series.kind, series.metric, series.setting][arm.label][series.task].append(series)
    pictures = []
    for (kind, metric, setting), by_arm in series_groups.items():
        aligned_arms = {
            arm: rows
            for arm, rows in by_arm.items()
            if len({series.x.tobytes() for series in chain(*rows.values())}) == 1
        }
        if aligned_arms and max(map(len, by_arm.values())) > MAX_TASKS_WITHOUT_MAP:
            caption = f"{kind}: {', '.join(filter(None, (metric, setting)))}. Mean over the seeds of an arm."
            panels = [_fraction_map(arm, rows) for arm, rows in aligned_arms.items()]
            pictures.append(Picture(panels, comparison.arm_names, caption, columns=3))
    return pictures


def _fraction_map(arm: str, series_by_task: Mapping[str, Sequence[Series]]) -> Map:
    """A heat map of an arm: a row for each task, a column for each point, cells with means over runs. All series have
    the same points.
    """
    example, *_ = next(iter(series_by_task.values()))
    values = np.array(
        [np.mean([series.means for series in series_list], axis=0) for series_list in series_by_task.values()],
        dtype=float,
    )
    top = 1.0 if example.about.interval else float(np.nanmax(values))
    return Map(
        arm, example.axis.label, list(plain_ticks(example.x.tolist()).values()), list(series_by_task), values, top
    )


# ---------------------------------------------------------------- what is logged by layer and head


def layer_curves(log_lines: list[dict[str, Plain]]) -> dict[tuple[str, int], dict[str, Curve]]:
    """Curves by (quantity, layer), such as (`largest_score`, 0), then by head: `head3`, `rms` (root mean square) or ''
    (no heads).
    """
    names = dict.fromkeys(name for log_line in log_lines for name in log_line)
    curves: dict[tuple[str, int], dict[str, Curve]] = {}
    for match in sorted(
        filter(None, map(_LAYER_METRIC.fullmatch, names)), key=lambda match: (_sort_key(match[1]), int(match[2]))
    ):
        curves.setdefault((match[1], int(match[2])), {})[match[3] or ""] = logged_curve(log_lines, match[0])
    return curves


def _sort_key(quantity: str) -> list[tuple[bool, int, str]]:
    """A key to sort names of quantities, in which whole numbers are compared by value: `n256` comes before `n1024`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", quantity)]


def quantity_title(quantity: str) -> str:
    if match := _LOGIT_SCALE_METRIC.fullmatch(quantity):
        return f"Logit scale of a query that sees {int(match[1]):,} keys"
    return _QUANTITY_TITLES.get(quantity, f"Parameter {quantity.removeprefix(PARAM_PREFIX)} of the normalizer")


def layer_pictures(names: Sequence[str], runs: Sequence[DrawnRun]) -> dict[str, Picture]:
    """Pictures, by name, of quantities logged for each layer: `normalizer-parameters`, and `dynamics` with those that
    the key `log.dynamics` lists (logit scale, largest score, gradient norm).

    Each arm has a colour and thin lines, and a thick line for the median of these; with a single run, each layer has a
    colour. Gradient norms, which differ by large factors, have a logarithmic axis. Neighbouring points of a curve are
    merged to `MAX_POINTS` or fewer.
    """
    captions = {
        "normalizer-parameters": "Parameters of the normalizers. A line for each seed, layer and head.",
        "dynamics": "A line for each seed and layer: the median over heads, of scores and gradients the largest.",
    }
    entries = [(run, *key, by_head) for run in runs for key, by_head in layer_curves(run.record.log_lines).items()]
    last_tokens = (
        curve.tokens[-1] + run.record.tokens_before for run, *_, by_head in entries for curve in by_head.values()
    )
    unit, x_label = token_unit(max(last_tokens, default=1))
    if len(runs) == 1:
        names = [f"layer {layer}" for layer in range(1 + max((layer for _, _, layer, _ in entries), default=0))]
    traces: dict[str, list[Trace]] = {}
    for run, quantity, layer, by_head in entries:
        colour_index = layer if len(runs) == 1 else names.index(run.arm)
        label_prefix = f"{run.arm}, seed {run.seed}, layer{layer}"
        single_heads = {head: [head_curve] for head, head_curve in by_head.items()}
        for head, head_curves in (
            single_heads if quantity.startswith(PARAM_PREFIX) else {"": [*by_head.values()]}
        ).items():
            x = (head_curves[0].tokens + run.record.tokens_before) / unit
            points = _merge_points(quantity, x, np.stack([head_curve.values for head_curve in head_curves], axis=1))
            traces.setdefault(quantity, []).append(
                Trace(colour_index, f"{label_prefix}{head and '/'}{head}", *points, "seed")
            )
    medians = {
        quantity: _median_traces(names, quantity_traces)
        for quantity, quantity_traces in traces.items()
        if len(runs) > 1
    }
    traces = {quantity: [*quantity_traces, *medians.get(quantity, [])] for quantity, quantity_traces in traces.items()}
    panels: dict[str, list[Panel]] = {name: [] for name in captions}
    for quantity in sorted(traces, key=_sort_key):
        panel = Panel(quantity_title(quantity), x_label, quantity, traces[quantity], log_y=quantity == GRAD_NORM)
        panels["normalizer-parameters" if quantity.startswith(PARAM_PREFIX) else "dynamics"].append(panel)
    note = " Thick: the median of an arm's lines." if any(medians.values()) else ""
    return {name: Picture(panels[name], names, caption + note) for name, caption in captions.items() if panels[name]}


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


def _merge_points(quantity: str, x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring points into at most `MAX_POINTS` points and return their x and y; `values` is (points, heads).

    Each y is the median of a group's values over all heads; for the largest score and the gradient norm, which have
    spikes, the largest.
    """
    group_size = -(-len(x) // MAX_POINTS)
    groups = np.split(np.arange(len(x)), range(group_size, len(x), group_size))
    reduction = np.max if quantity in ("largest_score", GRAD_NORM) else np.median
    with np.errstate(invalid="ignore"):
        return np.array([x[group].mean() for group in groups]), np.array([reduction(values[group]) for group in groups])
