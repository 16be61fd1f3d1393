"""Pictures as data: panels of lines, dots, intervals and maps; drawn as SVG and PNG, with their numbers as CSV."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from matplotlib.transforms import Transform

from lm.report.tables import csv_text
from lm.runs.series import Series, number, series_names
from lm.statistics.intervals import interval_of

GREY = "#555555"
MOST_LINES = 3  # fractions of one setting in a panel; more are drawn as a map
FIRST_POSITION = 16  # where a picture by position begins
SETTINGS = {
    "svg.hashsalt": "lm.report",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, safe for colour blindness
MARKERS = "osD^vP*"
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (2, 1)), (0, (9, 2, 3, 2)))  # dotted lines are reference levels

Style = dict[str, str | float | tuple[int, tuple[int, ...]]]  # what matplotlib's `plot` takes
_WIDTH, _HEIGHT = 6.4, 4.3  # inches, of a panel


@dataclass(frozen=True, eq=False)
class Trace:
    """One arm, or one of its seeds, in a panel.

    Attributes:
        arm: number of its colour and marker.
        label: whose it is, such as `ssmax, seed 3`.
        x, y: (points,); NaN where nothing is known.
        kind: a thin line (`seed`), a thick one (`mean`) with its interval as a band, `dots`, points with an `interval` as a bar, what
            `diverged`, which is marked at the top of the panel, or a grey `theory` to compare with.
        low, high: (points,) ends of the interval; None: there is none.
        dashes: number of its dashes.
        hollow: whether its markers are, so that what lies behind them is seen.
        keyed: whether its panel has a legend that names it; else the arm is named above all panels.
    """

    arm: int
    label: str
    x: np.ndarray
    y: np.ndarray
    kind: Literal["seed", "mean", "dots", "interval", "diverged", "theory"]
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dashes: int = 0
    hollow: bool = False
    keyed: bool = False


@dataclass(frozen=True, eq=False)
class Panel:
    """Axes and what is drawn in them.

    Attributes:
        ticks: labels of the x axis by value; empty: as matplotlib chooses.
        log: 2 or 10, the base of a logarithmic x axis; 0: it is linear.
        log_y: whether the y axis is logarithmic.
        x_range, y_range: ends of the axes; None: as the traces need.
        zero: whether a line is drawn at zero, as of differences.
        small: differences within this of zero do not matter: shaded; 0: nothing is.
        marks, levels: words by x of vertical and by y of horizontal reference lines.
        rings: values of (x, y, arm) that are ringed, such as the rate that was chosen.
    """

    title: str
    x_label: str
    y_label: str
    traces: Sequence[Trace]
    ticks: Mapping[float, str] = field(default_factory=dict)
    log: Literal[0, 2, 10] = 0
    log_y: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    zero: bool = False
    small: float = 0.0
    marks: Mapping[float, str] = field(default_factory=dict)
    levels: Mapping[float, str] = field(default_factory=dict)
    rings: Sequence[tuple[float, float, int]] = ()


@dataclass(frozen=True, eq=False)
class Map:
    """Numbers over two axes as colours from `low` to `top`: `values` (rows, columns), written in the cells, else beside a scale."""

    title: str
    x_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: np.ndarray
    top: float = 1.0
    low: float = 0.0
    written: bool = True
    y_label: str = ""


@dataclass(frozen=True, eq=False)
class Picture:
    """Panels side by side, `columns` in a row (None: an empty place), the names of the arms above; maps name theirs in their titles.

    `panel_size` is that of a panel in inches; None: as its kind needs.
    """

    panels: Sequence[Panel | Map | None]
    arms: Sequence[str]
    caption: str = ""
    columns: int = 2
    panel_size: tuple[float, float] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        columns = min(self.columns, len(self.panels))
        return -(-len(self.panels) // columns), columns

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, without the names of the arms."""
        rows, columns = self.grid
        maps = [] if self.panel_size else [panel for panel in self.panels if isinstance(panel, Map)]
        if not maps:
            width, height = self.panel_size or (_WIDTH, _HEIGHT)
            return width * columns, height * rows
        least = _HEIGHT if any(isinstance(panel, Panel) for panel in self.panels) else 2.2
        return 2 * _WIDTH, rows * max(1.2 + 0.36 * max(len(panel.rows) for panel in maps), least)

    @property
    def width(self) -> int:
        """Width on a page in CSS pixels."""
        return round(82 * self.size[0])

    @cached_property
    def svg(self) -> str:
        """An SVG file."""
        return _drawn(self, "svg")

    @cached_property
    def png(self) -> bytes:
        """A PNG file of 110 pixels an inch."""
        return _drawn(self, "png")

    @cached_property
    def csv(self) -> str:
        """A line a point: panel, whose it is, what it is, x, y and the ends of its interval."""
        return _csv(self.panels)


def saved(figure: Figure, kind: Literal["svg", "png"], dpi: int = 110) -> str | bytes:
    """The figure as a file, which is the same whenever and wherever it is drawn."""
    file = io.StringIO() if kind == "svg" else io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
    figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def _drawn(picture: Picture, kind: Literal["svg", "png"]) -> str | bytes:
    (rows, columns), (width, height), arms = picture.grid, picture.size, picture.arms
    traces = [trace for panel in picture.panels if isinstance(panel, Panel) for trace in panel.traces if len(trace.x)]
    shown = sorted({trace.arm for trace in traces if not trace.keyed})
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")  # before colour bars, which ask for it
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for each, panel in zip_longest(axes, picture.panels):
            if panel is None:
                each.set_visible(False)
            else:
                _map(each, panel) if isinstance(panel, Map) else _panel(each, panel)
        legend_rows = 0
        if shown:
            handles = [Line2D([], [], linewidth=2.4, **colour_and_marker(arm), label=arms[arm]) for arm in shown]
            per_row = max(1, min(len(handles), int(width * 8 // (max(len(arms[arm]) for arm in shown) + 6))))
            legend_rows = -(-len(handles) // per_row)
            figure.legend(handles=handles, loc="upper center", ncols=per_row, fontsize=12)
        height += 0.28 * legend_rows
        figure.set_size_inches(width, height)
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.32 * legend_rows / height), w_pad=0.12, h_pad=0.12)
        return saved(figure, kind)


def _panel(axes: Axes, panel: Panel) -> None:
    if panel.log:
        axes.set_xscale("log", base=panel.log)
    if panel.log_y:
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if panel.small:
        axes.axhspan(-panel.small, panel.small, color="#f0f0f0", zorder=0)
    if panel.zero:
        axes.axhline(0, color=GREY, linewidth=1)
    for trace in panel.traces:
        _trace(axes, trace)
    for x, y, arm in panel.rings:
        axes.plot([x], [y], "o", markersize=15, markerfacecolor="none", markeredgewidth=1.6, color=colour_and_marker(arm)["color"])
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.x_range:
        axes.set_xlim(*panel.x_range)
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        axes.minorticks_off()
        if len(panel.ticks) == 1 and not panel.log:  # what belongs to one place stands beside it, not at the ends of the axis
            (place,) = panel.ticks
            axes.set_xlim(place - 0.5, place + 0.5)
    for x, text in panel.marks.items():
        axes.axvline(x, color=GREY, linewidth=1)
        at_left = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0] < 0.1
        side, offset = ("left", 4) if at_left else ("right", -4)
        note(axes, text, (x, 1), (offset, -2), axes.get_xaxis_transform(), ha=side, va="top", rotation=90)
    for y, text in panel.levels.items():
        axes.axhline(y, color=GREY, linestyle=":", linewidth=1)
        note(axes, text, (1, y), (-4, 3), axes.get_yaxis_transform(), ha="right", va="bottom")
    if any(trace.keyed for trace in panel.traces):
        axes.legend(loc="best", fontsize=8)


def _trace(axes: Axes, trace: Trace) -> None:
    style = colour_and_marker(trace.arm) | {"linestyle": DASHES[trace.dashes % len(DASHES)]}
    style |= {"fillstyle": "none" if trace.hollow else "full"} | ({"label": trace.label} if trace.keyed else {})
    points = style | {"linestyle": "none"}
    match trace.kind:
        case "seed":
            axes.plot(trace.x, trace.y, linewidth=0.8, alpha=0.5, **style | {"marker": ""})
        case "theory":
            axes.plot(trace.x, trace.y, linewidth=1.2, **style | {"marker": "", "color": GREY})
        case "mean":
            if trace.low is not None:
                axes.fill_between(trace.x, trace.low, trace.high, color=style["color"], alpha=0.15, linewidth=0)
            axes.plot(
                trace.x,
                trace.y,
                linewidth=1.1 if trace.hollow else 1.9,
                markersize=4.5,
                markevery=max(1, len(trace.x) // 8),
                zorder=3,
                **style,
            )
        case "dots":
            look = {"markeredgewidth": 1.2, "markersize": 5.5} if trace.hollow else {"markeredgewidth": 0, "markersize": 4.5}
            axes.plot(trace.x, trace.y, alpha=0.55, **look, **points)
        case "interval":
            reach = None if trace.low is None else np.array([trace.y - trace.low, trace.high - trace.y])
            axes.errorbar(trace.x, trace.y, yerr=reach, markersize=8, capsize=5, linewidth=1.8, zorder=3, **points)
        case "diverged":
            above = np.full(len(trace.x), 0.98 - 0.045 * trace.arm)  # those of several arms at one place stay apart
            look = {"markersize": 9, "markeredgewidth": 2, "clip_on": False, "transform": axes.get_xaxis_transform()}
            axes.plot(trace.x, above, "x", color=style["color"], **look)


def _map(axes: Axes, panel: Map) -> None:
    rows, columns = panel.values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    mesh = axes.pcolormesh(*edges, panel.values, vmin=panel.low, vmax=panel.top, cmap="viridis", edgecolors="white", linewidth=1)
    axes.invert_yaxis()
    axes.grid(visible=False)
    if not panel.written:
        axes.figure.colorbar(mesh, ax=axes)
    for (row, column), value in np.ndenumerate(panel.values) if panel.written else ():
        text = f"{value:.2f}" if np.isfinite(value) else "-"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color="black" if value > 0.6 * panel.top else "white")
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)


def _csv(panels: Sequence[Panel | Map | None]) -> str:
    columns, lines = ("panel", "of", "kind", "x", "y", "low", "high"), []
    for panel in filter(None, panels):
        if isinstance(panel, Map):
            for (row, column), value in np.ndenumerate(panel.values):
                lines.append((panel.title, panel.rows[row], "map", panel.columns[column], f"{value:.6g}", "", ""))
            continue
        for trace in panel.traces:
            ends = ([""] * len(trace.x),) * 2 if trace.low is None else ([f"{x:.6g}" for x in some] for some in (trace.low, trace.high))
            for x, y, low, high in zip(trace.x, trace.y, *ends, strict=True):
                lines.append((panel.title, trace.label, trace.kind, panel.ticks.get(x, f"{x:.8g}"), f"{y:.6g}", low, high))
    return csv_text([dict(zip(columns, line, strict=True)) for line in lines], columns)


# ---------------------------------------------------------------- fractions


def fractions(series: Sequence[Series]) -> Picture | None:
    """The series that are fractions at points; None if there are none.

    A panel a metric, of lines with their intervals; where a setting has more than `MOST_LINES` of them a map for each setting.
    """
    groups: dict[tuple[str, str], list[Series]] = {}
    for each in series:
        if each.shape == "points" and each.unit == "fraction":
            groups.setdefault((each.metric, each.axis.name), []).append(each)
    names: dict[str, int] = {}  # numbers of the lines of all panels
    panels: list[Panel | Map] = []
    for (metric, _), alike in groups.items():
        settings = [each.setting for each in alike]
        if max(map(settings.count, settings)) > MOST_LINES:
            for setting in dict.fromkeys(settings):
                rows = {name: [each] for each, name in series_names([each for each in alike if each.setting == setting]).items()}
                panels.append(fraction_map(_wrapped(", ".join(filter(None, (metric, setting)))), rows))
        else:
            panels.append(_lines(metric, alike, names))
    return Picture(panels, list(names), columns=3) if panels else None


def _lines(metric: str, alike: list[Series], names: dict[str, int]) -> Panel:
    first, traces = alike[0], []
    for each, name in series_names(alike).items():
        label = ", ".join(filter(None, (name, each.setting)))
        intervals = [interval_of(each, column) for column in range(len(each.means))]
        ends = np.array([interval.drawn()[1:] for interval in intervals]).T if all(intervals) else (None, None)
        x, kind = np.array(each.axis.values, dtype=float), "mean" if len(each.means) > 1 else "interval"
        traces.append(Trace(names.setdefault(label, len(names)), label, x, each.means, kind, *ends))
    over = dict.fromkeys(interval.over for each in alike if (interval := interval_of(each, 0)))
    levels: dict[float, str] = {}
    for name, level in dict.fromkeys(pair for each in alike for pair in each.references.items()):
        levels[level] = f"{levels[level]}; {name}" if level in levels else f"{level:.1%}: {name}"
    return Panel(
        _wrapped(metric), first.axis.label, "fraction" + "".join(f" [95% over {what}]" for what in over), traces,
        plain_ticks(sorted({value for each in alike for value in each.axis.values})), 2 if first.axis.log else 0, y_range=(-0.02, 1.02),
        marks={first.seq_len: "training length"} if first.axis.unit == "tokens" else {}, levels=levels,
    )  # fmt: skip


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 56))


def fraction_map(title: str, rows: Mapping[str, Sequence[Series]]) -> Map:
    """A map of fractions at points: a row for each name, the mean over its series; NaN where a row has no such point."""
    every = [each for some in rows.values() for each in some]
    x = sorted({value for each in every for value in each.axis.values})
    values = np.full((len(rows), len(x)), np.nan)
    for row, some in enumerate(rows.values()):
        values[row, np.searchsorted(x, some[0].axis.values)] = np.mean([each.means for each in some], axis=0)
    top = 1.0 if every[0].interval == "wilson" else float(np.nanmax(values))
    return Map(title, every[0].axis.label, list(plain_ticks(x).values()), list(rows), values, top)


# ---------------------------------------------------------------- styles and axes


def colour_and_marker(number: int) -> Style:
    """Colour and marker of a line by its number: both cycle, and no two of 49 lines agree in both."""
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def dashes_and_width(number: int) -> Style:
    """Dashes and width (points) of a line by its number: no two of 14 lines agree in both."""
    return {"linestyle": DASHES[number % 7], "linewidth": (1.8, 1.0)[number // 7 % 2]}


def logarithmic_ticks(values: Sequence[float]) -> tuple[Literal[2, 10], dict[float, str]]:
    """Base and ticks of an axis for ascending `values`: powers of 2, as of tokens and keys, or of 10 where there are values below 1."""
    base = 2 if values[0] >= 1 else 10
    ticks = [tick for power in range(-30, 41) if values[0] / base < (tick := float(base) ** power) < values[-1] * base]
    return base, {tick: number(tick) for tick in ticks}


def logarithmic_x(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis for ascending `values`."""
    base, ticks = logarithmic_ticks(values)
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)


def token_unit(last: float) -> tuple[float, str]:
    """The unit in which to draw tokens of which `last` is the most, and the label of the axis."""
    unit, word = next(((size, word) for size, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")) if last >= size), (1, ""))
    return unit, f"tokens seen ({word})" if word else "tokens seen"


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean, (points,); at the ends over the points there are. A value that isn't finite is left out."""
    good = np.isfinite(values)
    total, count = (
        np.convolve(x, np.ones(window))[window // 2 :][: len(values)] for x in (np.where(good, values, 0.0), good.astype(float))
    )
    return np.where(good, total / np.maximum(count, 1), np.nan)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], within: Transform, **how: str | int) -> None:
    """Small grey words at a place, `offset` points away."""
    axes.annotate(text, at, offset, within, textcoords="offset points", color=GREY, fontsize=9, **how)


def doublings(first: float, last: float) -> dict[float, str]:
    """Ticks of a logarithmic axis, in plain numbers: powers of 2 between two values."""
    return plain_ticks([2**power for power in range(31) if first <= 2**power <= last])


def plain_ticks(values: Sequence[float]) -> dict[float, str]:
    """Ticks at values, in plain numbers, thousands in k."""
    return {value: number(value) if value < 10_000 else f"{value / 1024:g}k" for value in values}
