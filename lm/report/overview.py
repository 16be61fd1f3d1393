"""The overview picture: loss while training, and a panel for each section that is over an axis."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lm.report.comparison import Comparison
from lm.report.pictures import (
    FIRST_POSITION,
    GREY,
    SETTINGS,
    colour_and_marker,
    dashes_and_width,
    doublings,
    note,
    plain_ticks,
    saved,
    smooth,
    token_unit,
)
from lm.report.sections import Arm, Line, Section
from lm.runs.folder import Curve
from lm.statistics.intervals import FEWEST, Interval, mean_ends, sampled


@dataclass(frozen=True)
class Overview:
    """The picture, 600 px a panel (PNG at twice that), its legend and footer as text, and its caption."""

    svg: str
    png: bytes
    legend: tuple[str, ...]
    footer: str
    caption: str


def overview(comparison: Comparison) -> Overview:
    """Training and validation loss by tokens; then each section over an axis, a line an arm, task and inference setting."""
    over_axes = [section for section in comparison.sections if section.shape != "number"]
    panels = [partial(_training, comparison=comparison), *(partial(_section, comparison=comparison, section=one) for one in over_axes)]
    width = 6 * len(panels)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, 5), dpi=100)
        FigureCanvasAgg(figure)
        drawn = [draw(axes) for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True)]
        sides = {1: ("Picture",), 2: ("Left", "Right"), 3: ("Left", "Middle", "Right")}.get(len(panels))
        sides = sides or [f"Panel {number}" for number in range(1, len(panels) + 1)]
        captions, cuts = (
            [f"{side}: {text}" for side, text in zip(sides, texts, strict=True) if text] for texts in zip(*drawn, strict=True)
        )
        legend = tuple(f"{arm.label} ({_seeds(len(arm.runs))})" for arm in comparison.arms)
        handles = [Line2D([], [], linewidth=2.4, **colour_and_marker(i), label=label) for i, label in enumerate(legend)]
        footer = textwrap.wrap(" ".join(cuts), 82 * len(panels))
        columns = min(len(handles), 4 if max(map(len, legend)) < 34 else 2)
        rows = -(-len(handles) // columns)
        height = 5.0 + 0.25 * (rows - 1) + 0.16 * len(footer)
        bottom, top = (0.05 + 0.16 * len(footer)) / height, (0.1 + 0.27 * rows) / height
        figure.set_size_inches(width, height)
        figure.set_layout_engine("constrained", rect=(0, bottom, 1, 1 - bottom - top), w_pad=0.12)
        figure.legend(handles=handles, loc="upper center", ncols=columns, fontsize=12)
        figure.text(0.012, 0.012, "\n".join(footer), fontsize=9, color=GREY)
        svg, png = saved(figure, "svg"), saved(figure, "png", dpi=200)
    return Overview(svg, png, legend, "\n".join(footer), " ".join(captions))


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _bands(what: list[str]) -> str:
    """What the bands of a panel are, in words; the words for one curve are empty where it has none."""
    words = "; ".join(filter(None, dict.fromkeys(what)))
    return f"Bands: {words}." if words else ""


# ---------------------------------------------------------------- left panel


def _training(axes: Axes, comparison: Comparison) -> tuple[str, str]:
    points = [len(run.training.tokens) for run in comparison.runs if len(run.training.tokens)]
    window = max(1, min(points, default=1) // 50) // 2 * 2 + 1
    curves = [curve for run in comparison.runs for curve in (run.training, run.validations)]
    last = max((curve.tokens[-1] for curve in curves if len(curve.tokens)), default=1)
    unit, label = token_unit(last)
    lows, highs, bands, swaps = [], [], [], ""
    for index, arm in enumerate(comparison.arms):
        style_of_arm = colour_and_marker(index)
        colour = style_of_arm["color"]
        thin = {"linewidth": 1.1, "alpha": 0.55}
        marked = {"marker": style_of_arm["marker"], "markersize": 4, "linewidth": 1.5, "zorder": 3}
        for curves, points, style in (
            ([run.training for run in arm.runs], window, thin),
            ([run.validations for run in arm.runs], 1, marked),
        ):
            tokens, losses = _shared(curves)
            if len(tokens):
                loss = smooth(losses.mean(axis=0), points)
                axes.plot(tokens / unit, loss, color=colour, **style)
                lows.append(loss)
                highs.append(loss[tokens >= 0.05 * tokens[-1]])
        if len(losses) > 1 and len(tokens):
            axes.fill_between(tokens / unit, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.18, linewidth=0)
            bands.append(f"lowest to highest of {_seeds(len(losses))}")
        for step, _ in arm.runs[0].phases[1:]:
            axes.axvline(step * (arm.runs[0].flat.get("optim.batch_tokens") or 0) / unit, color=colour, linestyle=":", linewidth=1.2)
            swaps = " Dotted: where the normalizer was swapped."
    axes.set_title("While training")
    axes.set_xlabel(label)
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0, last / unit * 1.01)
    level, entropy = comparison.level("nats per token") or ("", None)
    low, high = _finite(lows, min), _finite(highs, max)
    if low is None:
        axes.text(0.5, 0.5, "no training metrics", transform=axes.transAxes, ha="center", va="center", color=GREY)
        axes.set_xticks([])
        axes.set_yticks([])
        return "no training metrics.", ""
    shown = _limit(axes, low, high, max(1.08 * entropy, 1.3 * low) if entropy else 2 * low)
    smoothed = f"centred mean of {window} logged points" if window > 1 else "as logged"
    ends = f" Validation loss: markers. Thin lines: training loss, {smoothed}.{swaps}"
    if any(len(arm.runs) > 1 for arm in comparison.arms):
        ends += " Arms with several seeds: mean over seeds, the band from the lowest to the highest seed."
    if entropy and low < entropy < shown:
        axes.axhline(entropy, color=GREY, linestyle="--", linewidth=1)
        note(axes, f"{level} {entropy:.2f}", (1, entropy), (-4, 4), axes.get_yaxis_transform(), ha="right", va="bottom")
    elif entropy:
        ends += f" The {level}, {entropy:.2f}, is outside the picture."
    key = [Line2D([], [], color=GREY, linewidth=1.1, alpha=0.7, label="training")]
    key.append(Line2D([], [], color=GREY, linewidth=1.8, marker="o", markersize=4, label="validation"))
    axes.legend(handles=key, loc="best", fontsize=10)
    top = _finite(lows, max)
    cut = f"Losses above {shown:.2f} (highest: {top:.4g}) are not shown." if top > shown else ""
    return f"loss against tokens seen.{ends}", f"{_bands(bands)} {cut}".strip()


def _shared(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens logged by every curve that has any, (points,), and the losses there, (curves, points)."""
    curves = [curve for curve in curves if len(curve.tokens)]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    tokens = curves[0].tokens
    for curve in curves[1:]:
        tokens = np.intersect1d(tokens, curve.tokens)
    return tokens, np.array([curve.loss[np.isin(curve.tokens, tokens)] for curve in curves])


# ---------------------------------------------------------------- sections


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A line of a panel, each array (points,), and what its band is in words; empty if it has none."""

    arm: int
    line: Line
    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    band: str


def _section(axes: Axes, comparison: Comparison, section: Section) -> tuple[str, str]:
    first, words, cut = section.first, section.first.shown.caption, ""
    lines = [one for index, arm in enumerate(comparison.arms) for line in section.lines if (one := _line(index, arm, section, line))]
    for one in lines:
        style = colour_and_marker(one.arm) | dashes_and_width(section.of.index(", ".join(one.line.of)))
        if one.band:
            axes.fill_between(one.x, one.low, one.high, color=style["color"], alpha=0.13, linewidth=0)
        axes.plot(one.x, one.mean, markersize=4, markevery=max(1, len(one.x) // 8), **style)
    axes.set_title(section.title)
    axes.set_xlabel(first.axis.label)
    axes.set_ylabel(f"{', '.join(section.metrics)} ({first.unit})")
    _ticks(axes, section, lines)
    if first.unit == "fraction":
        axes.set_ylim(-0.02, 1.02)
    else:
        cut = _y_range(axes, comparison, section, lines)
    for length in section.seq_lens:
        axes.axvline(length, color=GREY, linewidth=1)
        note(axes, f"training length {length:,}", (length, 1), (-4, -2), axes.get_xaxis_transform(), ha="right", va="top", rotation=90)
    handles = []
    if len(section.of) > 1 or {line.setting for line in section.lines} - {"", "as trained"}:
        handles = [Line2D([], [], color=GREY, label=of, **dashes_and_width(i)) for i, of in enumerate(section.of)]
    for level, name in sorted({(level, name) for one in section.series.values() for name, level in one.references.items()}):
        text = f"{name} {level:.1%}" if first.unit == "fraction" else f"{name} {level:.2f}"
        handles.append(axes.axhline(level, color=GREY, linestyle=":", linewidth=1, label=text))
    if handles:
        axes.legend(handles=handles, loc="best", fontsize=10)
    bands = _bands([one.band for one in lines])
    words += f" ({'; '.join(section.of)})" if any(line.what for line in section.lines) else ""
    words += f", from position {FIRST_POSITION}" if first.bins else ""
    how = f"Intervals are {section.how}." if section.how else ""
    lost = [f"{comparison.arms[one.arm].label}, {', '.join(one.line.of)}" for one in lines if not np.isfinite(one.mean).all()]
    ends = [f"Not finite at some places: {'; '.join(lost)}."] if lost else []
    ends += [f"Dotted, if any: {first.shown.levels}."] if first.shown.levels else []
    return " ".join(filter(None, [f"{words}.", bands, how, *ends])), f"{bands} {cut}".strip()


def _line(index: int, arm: Arm, section: Section, line: Line) -> _Drawn | None:
    """An arm's line, with the intervals of its points; of bins the middles, and for several seeds from the lowest to the highest."""
    found = section.of_arm(arm, line)
    if not found:
        return None
    if section.shape == "points":
        means = {place: mean for place in section.places if (mean := section.mean(arm, line, place)) is not None}
        intervals = [section.interval(arm, line, place) or Interval(mean, mean, mean) for place, mean in means.items()]
        bands = [] if found[0].control else dict.fromkeys(f"95% interval over {one.over}" for one in intervals if one.over)
        x, ends = np.array([section.places[place][0] for place in means]), np.array([one.drawn() for one in intervals]).T
        return _Drawn(index, line, x, *ends, "; ".join(bands)) if intervals else None
    edges = np.array(found[0].axis.values)
    found = [one for one in found if np.array_equal(one.axis.values, edges)]
    x, keep = np.sqrt(np.maximum(edges[:-1], 0.5) * edges[1:]), edges[:-1] >= min(FIRST_POSITION, edges[-2])
    values = np.array([one.means for one in found])[:, keep]  # (seeds, bins)
    low, high, band = values.min(axis=0), values.max(axis=0), f"lowest to highest of {_seeds(len(found))}" if len(found) > 1 else ""
    if len(found) == 1 and found[0].interval != "none" and len(np.unique(found[0].samples[0].groups)) >= FEWEST:
        (sample,) = found[0].samples
        ends = mean_ends(sample.values[:, keep], sample.weights, sample.groups)
        low, high = (np.where(np.isinf(some), np.nan, some) for some in ends)
        band = f"95% interval over {sampled(sample.groups)}, 1 seed"
    return _Drawn(index, line, x[keep], values.mean(axis=0), low, high, band)


def _ticks(axes: Axes, section: Section, lines: list[_Drawn]) -> None:
    """A logarithmic axis has a tick at each doubling, or at each of the points."""
    if not section.first.axis.log:
        return
    ticks = sorted({value for one in section.series.values() for value in one.axis.values})
    axes.set_xscale("log", base=2)
    labels = plain_ticks(ticks)
    if section.shape == "bins":
        first, last = min(FIRST_POSITION, *(one.x[0] for one in lines)), ticks[-1]
        axes.set_xlim(first, last)
        labels = doublings(first, last)
    axes.set_xticks(list(labels), list(labels.values()))
    axes.minorticks_off()


def _y_range(axes: Axes, comparison: Comparison, section: Section, lines: list[_Drawn]) -> str:
    """Leave out what lies far above a level that the metric can be compared with, if there is one; says what leaves the picture."""
    low, best = (
        _finite(some, min) for some in ([one.low for one in lines], [one.mean[one.x <= max(section.seq_lens, default=0)] for one in lines])
    )
    level = comparison.level(section.first.unit)
    if low is None or level is None or section.first.better == "higher":
        return ""
    limit = max(1.08 * level[1], 1.6 * best if best else low)
    shown = _limit(axes, low, min(_finite([one.high for one in lines], max), limit), limit)
    highest = {one: _finite([one.mean], max) or 0 for one in lines}
    above = [
        f"{comparison.arms[one.arm].label}, {', '.join(one.line.of)} (highest: {top:.4g})" for one, top in highest.items() if top > shown
    ]
    return f"Leaving the picture: {'; '.join(above)}." if above else ""


# ---------------------------------------------------------------- all


def _finite(arrays: list[np.ndarray], pick: Callable[[np.ndarray], float]) -> float | None:
    """The least or greatest finite value (`pick` is min or max)."""
    values = np.concatenate(arrays) if arrays else np.empty(0)
    values = values[np.isfinite(values)]
    return float(pick(values)) if len(values) else None


def _limit(axes: Axes, low: float, high: float | None, limit: float) -> float:
    """Set the y range from the data, but not above `limit`; the top of the range."""
    high = max(min(high if high is not None else limit, limit), low + 1e-3)
    pad = 0.06 * (high - low)
    axes.set_ylim(low - pad, high + pad)
    return high + pad
