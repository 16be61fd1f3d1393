"""Pictures of runs: curves while training, each section along its axis, maps of fractions, and what is logged by layer and head."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lm.report.comparison import ArmRuns, Line, RunComparison, Section, mean_interval, shown_interval
from lm.report.pictures import (
    Map,
    Panel,
    Picture,
    Trace,
    doublings,
    plain_ticks,
    smooth,
    token_unit,
)  # fmt: skip
from lm.report.tables import printable, with_unit
from lm.runs.evaluations import Series, number
from lm.runs.folder import DIVERGED
from lm.runs.record import RunRecord
from lm.schema import Plain
from lm.statistics.intervals import Interval, interval_of

PARAMETERS = "normalizer/"  # beginning of the names of normalizers' parameters
GRADIENTS = "train/grad_norm"
FIRST_POSITION = 16  # where a picture by position begins
MOST_LINES = 3  # fractions of one setting in a picture over an axis; more are drawn as a map, too
LOSSES = {"train/loss": "Training loss", "val/loss": "Validation loss"}
MOST_POINTS = 250  # most points of a curve in a picture
SETTLED = 0.1  # part of training after which losses lie within the picture
_NAME = re.compile(r"(.+)/layer(\d+)(?:/(head\d+|rms))?")
_LENGTH = re.compile(r"logit_scale/n(\d+)")
_TITLES = {
    GRADIENTS: "Gradient norm before clipping",
    "largest_score": "Largest score",
    "logit_scale/slope": "Logit scale: a of a ln n + b",
    "logit_scale/intercept": "Logit scale: b of a ln n + b",
}


class DrawnRun(NamedTuple):
    """A run on a page and in pictures of training; `state`: finished, unfinished or diverged."""

    arm: str
    seed: int
    state: str
    record: RunRecord
    label: str  # its name on the page


def drawn_runs(comparison: RunComparison) -> list[DrawnRun]:
    """The runs of a comparison, which count as finished."""
    every = ((arm.label, run) for arm in comparison.arms for run in arm.runs)
    return [DrawnRun(arm, run.seeds[-1], "finished", run, f"{printable(run.name)} ({arm})") for arm, run in every]


def overview(comparison: RunComparison) -> Picture:
    """One picture of all that is over an axis: losses while training, then each section."""
    pictures = [curves(comparison.names, drawn_runs(comparison), LOSSES, comparison)]
    pictures += [along_axis(comparison, section) for section in comparison.sections if section.shape != "number"]
    known = [picture for picture in pictures if picture]
    arms = [f"{arm.label} ({_seeds(len(arm.runs))})" for arm in comparison.arms]
    panels = [panel for picture in known for panel in picture.panels if panel or len(comparison.arms) > 1]
    return Picture(panels or [Panel("While training", "tokens seen", "loss", [])], arms, " ".join(picture.caption for picture in known))


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


# ---------------------------------------------------------------- while training


def curves(names: Sequence[str], runs: Sequence[DrawnRun], titles: Mapping[str, str], comparison: RunComparison | None) -> Picture | None:
    """Logged metrics by tokens seen, `titles` by name in the log; None: nothing is logged. `comparison`: of the runs that have finished."""
    logged = {name: [(run, run.record.curve(name)) for run in runs] for name in titles}
    last = max((each.tokens[-1] for by_run in logged.values() for _, each in by_run if len(each.tokens)), default=1)
    unit, x_label = token_unit(last)
    swapped = {step * (run.record.flat.get("optim.batch_tokens") or 0) for run in runs for step, _ in run.record.phases[1:]}
    level = comparison and comparison.level("nats per token")
    panels, once, outside = [], [], []
    for name, by_run in logged.items():
        longest = max((len(each.tokens) for _, each in by_run), default=0)
        if longest < 2 and name != "train/loss":
            once += [titles[name]] if longest else []
            continue
        traces, settled, in_nats = [], [], name in LOSSES
        for run, each in ((run, each) for run, each in by_run if len(each.tokens)):
            window = max(1, len(each.tokens) // 50) // 2 * 2 + 1 if name == "train/loss" else 1
            every, y = max(1, len(each.tokens) // MOST_POINTS), smooth(each.loss, window)
            number, label = names.index(run.arm), f"{run.arm}, seed {run.seed}"
            traces.append(Trace(number, label, each.tokens[::every] / unit, y[::every], "seed"))
            settled += y[(each.tokens > SETTLED * last) & np.isfinite(y)].tolist()
            if run.state == DIVERGED:
                traces.append(Trace(number, label, each.tokens[-1:] / unit, each.loss[-1:], "diverged"))
        for number, arm in enumerate(names) if name != "train/loss" else ():
            same = [each for run, each in by_run if run.arm == arm and run.state == "finished" and len(each.tokens)]
            if len({each.tokens.tobytes() for each in same}) == 1:
                mean = np.mean([each.loss for each in same], axis=0)
                traces.append(Trace(number, f"{arm}, mean of {_seeds(len(same))}", same[0].tokens / unit, mean, "mean"))
        low, high = (min(settled), max(settled)) if settled else (0.0, 1.0)
        top = min(high, max(1.08 * level[1], 1.3 * low)) if level and in_nats else high
        outside += [f"{titles[name]} above {top:.2f} (highest: {high:.4g}) is not shown."] if top < high else []
        pad = 0.06 * (top - low) or 0.1
        levels = {level[1]: f"{level[0]} {level[1]:.2f}"} if level and in_nats and low < level[1] < top else {}
        marks = {tokens / unit: "normalizer swapped" for tokens in swapped}
        label = "nats per token" if in_nats else name
        panels.append(Panel(titles[name], x_label, label, traces, y_range=(low - pad, top + pad), marks=marks, levels=levels))
    if not any(panel.traces for panel in panels):
        return None
    several = max(Counter(run.arm for run in runs).values()) > 1
    caption = "Thin: single seeds. Thick: mean over the seeds of an arm that have finished. " if several else ""
    caption += "Training loss is a centred moving mean. " if panels[0].traces else ""
    caption += "All of the held-out text, the part that selects included."
    if any(trace.kind == "diverged" for panel in panels for trace in panel.traces):
        caption += " Crosses at the top: where a run diverged."
    caption += f" Without a curve, because it was measured once: {', '.join(once)}." if once else ""
    return Picture(panels, names, " ".join([caption, *outside]))


# ---------------------------------------------------------------- sections

DIFFERENCE_BANDS = "Bands of differences: 95% intervals over {}, point by point, not adjusted."
Traces = dict[str, list[Trace]]  # by arm
BySeed = Mapping[tuple[int, ...], Series]


def along_axis(comparison: RunComparison, section: Section) -> Picture | None:
    """A section over an axis: values, and paired differences to the baseline, a row for each thing that was measured in a setting; None
    where all of it is at one place, without a level to compare with: the table says as much."""
    if len(section.places) < 2 and not any(each.references for each in section.series.values()):
        return None
    first, panels, sentences = section.first, [], dict[str, None]()
    base, *others = comparison.arms
    caption = f"{first.shown.caption[:1].upper()}{first.shown.caption[1:]}."
    caption += " Thin: single seeds; thick: their mean." if max(len(arm.runs) for arm in comparison.arms) > 1 else ""
    for line in section.lines:
        series = {arm.label: section.by_seed(arm, line) for arm in comparison.arms}
        every = [each for by_seed in series.values() for each in by_seed.values()]
        values = {arm.label: _values(section, arm, line) for arm in comparison.arms}
        apart: Traces = {}
        if base.label == comparison.names[0] and not every[0].control:
            apart = {arm.label: differences_along(series[arm.label], series[base.label]) for arm in others}
        title, y_range = f"{section.title}: {', '.join((line.metric, *line.of))}", (-0.03, 1.03)
        if first.unit != "fraction":
            y_range, cut = _y_range(comparison, section, values)
            sentences |= {cut: None} if cut else {}
        lost = [arm for arm, traces in values.items() if not all(np.isfinite(each.y).all() for each in traces)]
        sentences |= {f"Not finite at some places: {', '.join((*line.of, *lost))}.": None} if lost else {}
        for traces, words in ((values, "Bands: 95% intervals over {}."), (apart, DIFFERENCE_BANDS)):
            sentences |= {words.format(each.over): None for lines in traces.values() for each in lines if each.over}
        levels = {level: f"{name} {level:.3g}" for each in every for name, level in each.references.items()}
        panels.append(_axis_panel(comparison, section, title, with_unit(line.metric, first.unit), values, y_range, levels))
        about = f"{title}: paired difference to {base.label}"
        panels.append(_axis_panel(comparison, section, about, with_unit("difference", first.unit), apart) if any(apart.values()) else None)
    sentences |= {f"Intervals are {section.how}.": None} if section.how else {}
    sentences |= {f"Dotted, if any: {first.shown.levels}.": None} if first.shown.levels else {}
    sentences |= {f"From position {FIRST_POSITION}.": None} if first.bins else {}
    return Picture(panels, comparison.names, " ".join([caption, *sentences]))


def _values(section: Section, arm: ArmRuns, line: Line) -> list[Trace]:
    """A line of an arm along the axis, where all its runs have values, with the intervals of points, and of bins those of a single run;
    controls have none."""
    by_seed, intervals = section.by_seed(arm, line), []
    series = [*by_seed.values()]
    places = _places(series)
    if section.shape == "points" and series and not series[0].control:
        intervals = [section.interval(arm, line, number(x)) for x in places]
    elif len(series) == 1 and not series[0].control:
        edges = [*series[0].axis.values]
        intervals = [interval_of(series[0], edges.index(start)) for start, _ in places.values()]
    return _traces(by_seed, {place: [each.mean_within(*ends) for each in series] for place, ends in places.items()}, intervals)


def differences_along(ours: BySeed, theirs: BySeed) -> list[Trace]:
    """Differences of the runs of the same seeds, sequence by sequence, where all were measured on the same; [] if they were nowhere.

    Intervals are Student t over seeds, point by point; of one seed over documents. There is none where all seeds agree about a fraction.
    """
    seeds = [each for each in ours if each in theirs]
    series = [by_seed[each] for each in seeds for by_seed in (ours, theirs)]
    places = _places(series) if all(each.samples for each in series) else {}
    units = {x: [each.units(*place) for each in series] for x, place in places.items()}
    units = {x: by_seed for x, by_seed in units.items() if len({each.identity for each in by_seed}) == 1}
    apart = {x: [a.minus(b) for a, b in zip(by_seed[::2], by_seed[1::2], strict=True)] for x, by_seed in units.items()}
    intervals = [mean_interval(differences) for differences in apart.values()]
    shown = [shown_interval(each, series[0]) for each in intervals] if all(intervals) else []
    return _traces(seeds, {x: [each.mean for each in differences] for x, differences in apart.items()}, shown)


def _traces(seeds: Iterable[tuple[int, ...]], values: Mapping[float, list[float]], intervals: Sequence[Interval | None]) -> list[Trace]:
    """A line for each seed and their mean, of values by seed at each x, with the mean's intervals; the arm's number and name are not in."""
    if not values:
        return []
    x, rows, ends, over = np.array([*values]), np.array([*values.values()]).T, (None, None), ""
    mean = rows.mean(0)
    if any(intervals):
        ends = np.array([(each or Interval(at, at, at)).drawn() for each, at in zip(intervals, mean, strict=True)]).T[1:]
        over = next(each.over for each in intervals if each)
    lines = [Trace(0, f"seed {each[-1]}", x, row, "seed") for each, row in zip(seeds, rows, strict=True)]
    return [*lines, Trace(0, f"mean of {_seeds(len(rows))}", x, mean, "mean", *ends, over=over)]


def _places(series: Sequence[Series]) -> dict[float, tuple[float, float]]:
    """Places (start, stop) where all series have values, by the x at which they are drawn: common points, or bins between common edges."""
    shared = reduce(np.intersect1d, [np.array(each.axis.values, dtype=float) for each in series]) if series else np.empty(0)
    if not series or not series[0].bins:
        return {x: (x, x) for x in shared.tolist()}
    shared = shared[shared >= min(FIRST_POSITION, shared[-2:].min())]
    return {float(np.sqrt(start * stop)): (start, stop) for start, stop in pairwise(shared.tolist())}


def _axis_panel(
    comparison: RunComparison,
    section: Section,
    title: str,
    label: str,
    along: Traces,
    y_range: tuple[float, float] | None = None,
    levels: Mapping[float, str] | None = None,
) -> Panel:
    """A panel of lines over the section's axis. `levels`: reference levels of values; None: the lines are differences."""
    numbers = {arm: comparison.names.index(arm) for arm in along}
    traces = [replace(each, arm=numbers[arm], label=f"{arm}, {each.label}") for arm, lines in along.items() for each in lines]
    axis, x = section.first.axis, np.concatenate([each.x for each in traces] or [np.ones(1)])
    ticks = doublings(x.min(), x.max()) if section.shape == "bins" else plain_ticks(sorted(set(x.tolist())))
    marks = {float(length): f"training length {length:,}" for length in section.seq_lens}
    log, reference = 2 if axis.log else 0, levels or {}
    return Panel(title, axis.label, label, traces, ticks, log, y_range=y_range, zero=levels is None, marks=marks, levels=reference)


def _y_range(comparison: RunComparison, section: Section, along: Traces) -> tuple[tuple[float, float] | None, str]:
    """The range up to somewhat above a level that the metric can be compared with, if there is one, and what leaves the picture."""
    level, trained = comparison.level(section.first.unit), max(section.seq_lens, default=0)
    known = {}
    for arm, traces in along.items():
        drawn = [value for each in traces for value in (each.y, each.low, each.high) if value is not None]
        known[arm] = np.concatenate(drawn or [np.empty(0)])
        known[arm] = known[arm][np.isfinite(known[arm])]
    values = np.concatenate([*known.values()]) if known else np.empty(0)
    if not len(values) or level is None or section.first.better == "higher":
        return None, ""
    inside = np.concatenate([each.y[each.x <= trained] for traces in along.values() for each in traces])
    low = values.min()
    top = max(min(values.max(), max(1.08 * level[1], 1.6 * min(inside[np.isfinite(inside)], default=low))), low + 1e-3)
    pad = 0.06 * (top - low)
    above = [f"{arm} (highest: {drawn.max():.4g})" for arm, drawn in known.items() if len(drawn) and drawn.max() > top + pad]
    return (low - pad, top + pad), f"Leaving the picture: {'; '.join(above)}." if above else ""


def maps(comparison: RunComparison) -> list[Picture]:
    """Fractions that are measured in many places at once, such as needles by depth and length: a map an arm, of the mean over seeds."""
    groups: dict[tuple[str, str, str], dict[str, dict[str, list[Series]]]] = {}
    every = ((arm, each) for arm in comparison.arms for run in arm.runs for evaluation in run.evaluations for each in evaluation.series)
    for arm, each in every:
        if each.shape == "points" and each.unit == "fraction" and not each.shown and not each.control:
            by_arm = groups.setdefault((each.kind, each.metric, each.setting), {})
            by_arm.setdefault(arm.label, {}).setdefault(each.what, []).append(each)
    pictures = []
    for (kind, metric, setting), by_arm in groups.items():
        alike = {arm: rows for arm, rows in by_arm.items() if len({each.axis.values for series in rows.values() for each in series}) == 1}
        if alike and max(map(len, by_arm.values())) > MOST_LINES:
            caption = f"{kind}: {', '.join(filter(None, (metric, setting)))}. Mean over the seeds of an arm."
            panels = [_fraction_map(arm, rows) for arm, rows in alike.items()]
            pictures.append(Picture(panels, comparison.names, caption, columns=3))
    return pictures


def _fraction_map(title: str, rows: Mapping[str, Sequence[Series]]) -> Map:
    """A map of fractions at points: a row for each name, the mean over its series; NaN where a row has no such point."""
    every = [each for series in rows.values() for each in series]
    x = sorted({value for each in every for value in each.axis.values})
    values = np.full((len(rows), len(x)), np.nan)
    for row, series in enumerate(rows.values()):
        values[row, np.searchsorted(x, series[0].axis.values)] = np.mean([each.means for each in series], axis=0)
    top = 1.0 if every[0].interval == "wilson" else float(np.nanmax(values))
    return Map(title, every[0].axis.label, list(plain_ticks(x).values()), list(rows), values, top)


# ---------------------------------------------------------------- what is logged by layer and head


class LayerCurve(NamedTuple):
    """A quantity of a layer: by tokens seen, (points,), and by head, (points, heads); NaN where it was not finite.

    `columns` names the heads; what has none has one column without a name.
    """

    tokens: np.ndarray
    values: np.ndarray
    columns: tuple[str, ...]


def layer_curves(lines: Iterable[dict[str, Plain]]) -> dict[str, dict[int, LayerCurve]]:
    """Curves by quantity, such as `largest_score`, and layer; of a step that a resumed run logged twice the last line counts."""
    logged: dict[str, dict[int, dict[str, dict[int, tuple[float, float]]]]] = {}
    for line in lines:
        for name, value in line.items():
            if match := _NAME.fullmatch(name):
                columns = logged.setdefault(match[1], {}).setdefault(int(match[2]), {})
                columns.setdefault(match[3] or "", {})[line["step"]] = line["tokens"], np.nan if value is None else value
    curves: dict[str, dict[int, LayerCurve]] = {}
    for quantity in sorted(logged, key=_order):
        for layer, columns in sorted(logged[quantity].items()):
            steps = sorted(set.intersection(*(set(points) for points in columns.values())))
            tokens, values = np.array([[points[step] for step in steps] for points in columns.values()], dtype=float).transpose(2, 1, 0)
            curves.setdefault(quantity, {})[layer] = LayerCurve(tokens[:, 0], values, tuple(columns))
    return curves


def _order(quantity: str) -> list[tuple[bool, int, str]]:
    """Sort key of a quantity: its name, with the numbers in it compared as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", quantity)]


def title(quantity: str) -> str:
    """A quantity in words, as at the head of its panel."""
    if match := _LENGTH.fullmatch(quantity):
        return f"Logit scale of a query that sees {int(match[1]):,} keys"
    return _TITLES.get(quantity, f"Parameter {quantity.removeprefix(PARAMETERS)} of the normalizer")


def by_layer(names: Sequence[str], runs: Sequence[DrawnRun]) -> dict[str, Picture]:
    """Pictures, by name, of what runs have logged by layer and head: the normalizers' parameters, and the quantities of `log.dynamics`.
    Colours are those of arms, and of a single run its layers'. Gradient norms, of which some are many times larger than others, are on a
    logarithmic axis. Of more than `MOST_POINTS` points some in a row are drawn as one."""
    captions = {
        "normalizer-parameters": "Parameters of the normalizers. A line for each seed, layer and head.",
        "dynamics": "A line for each seed and layer: the median over heads, of scores and gradients the largest.",
    }
    logged = [(run, layer_curves(run.record.logged)) for run in runs]
    every = [
        (run, quantity, layer, curve)
        for run, quantities in logged
        for quantity, layers in quantities.items()
        for layer, curve in layers.items()
    ]
    unit, label = token_unit(max((curve.tokens[-1] for *_, curve in every), default=1))
    if len(runs) == 1:
        names = [f"layer {layer}" for layer in range(1 + max((layer for _, _, layer, _ in every), default=0))]
    traces: dict[str, list[Trace]] = {}
    for run, quantity, layer, curve in every:
        number, words = layer if len(runs) == 1 else names.index(run.arm), f"{run.arm}, seed {run.seed}, layer{layer}"
        by_head = quantity.startswith(PARAMETERS)
        for column, head in enumerate(curve.columns if by_head else ("",)):
            values = curve.values[:, column : column + 1] if by_head else curve.values
            points = _points(quantity, curve.tokens / unit, values)
            traces.setdefault(quantity, []).append(Trace(number, f"{words}{head and '/'}{head}", *points, "seed"))
    pictures = {}
    for picture, caption in captions.items():
        shown = [each for each in sorted(traces, key=_order) if each.startswith(PARAMETERS) == (picture == "normalizer-parameters")]
        panels = [Panel(title(each), label, each, traces[each], log_y=each == GRADIENTS) for each in shown]
        pictures |= {picture: Picture(panels, names, caption)} if panels else {}
    return pictures


def _points(quantity: str, x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `MOST_POINTS` points (x, y) of values (points, heads): the median of all that are drawn as one, of spikes the largest."""
    together = -(-len(x) // MOST_POINTS)
    groups = np.split(np.arange(len(x)), range(together, len(x), together))
    reduced = np.max if quantity in ("largest_score", GRADIENTS) else np.median
    with np.errstate(invalid="ignore"):
        return np.array([x[group].mean() for group in groups]), np.array([reduced(values[group]) for group in groups])
