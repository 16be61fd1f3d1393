"""Pictures as data: panels of lines, dots and intervals, and heat maps. They are drawn as SVG and PNG, and their
numbers written as CSV.
"""

import io
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Transform

from lm.errors import RunError
from lm.report.tables import csv_text
from lm.runs.evaluations import number

GREY, INK, PAPER, GRID, SHADE = "#555555", "#1a1a1a", "#ffffff", "#e6e6e6", "#f0f0f0"
MAX_CELLS = 40  # most rows or columns of a map with gaps between cells; larger maps are drawn as one image
# most characters of all category labels below a panel together; with more, the labels are slanted
MAX_LABEL_CHARACTERS = 56
MAX_LEGEND_ENTRIES = 3  # most entries of a legend inside a panel; a legend of more entries stands below the panel
PLOT_SETTINGS = {
    "svg.hashsalt": "lm.report",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
# The first three colours of Okabe and Ito, and three more: readers with colour blindness can tell all of them apart on
# white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#bd5c94", "#684e09", "#1893ff", INK)
DARK_COLOURS = {  # colours of SVG files and pages for readers who prefer dark pages
    INK: "#e4e6ea", PAPER: "#15181d", GREY: "#a4abb5", GRID: "#2c323a", SHADE: "#262b33",
    **dict(zip(COLOURS, ("#4d90ec", "#ff774d", "#38e58e", "#ae7db2", "#ecd529", "#aad0ff"), strict=False)),
}  # fmt: skip
MARKERS = "osD^vP*"
# dotted lines are reference levels
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (2, 1)), (0, (9, 2, 3, 2)))

Style = dict[str, str | float | tuple[int, tuple[int, ...]]]  # keyword arguments of matplotlib's `plot`
_PANEL_WIDTH, _PANEL_HEIGHT = 6.4, 4.3  # size of a panel in inches


@dataclass(frozen=True, eq=False)
class Trace:
    """The points of one arm, or of one of the arm's seeds, in a panel, and how they are drawn."""

    arm: int  # number of the trace's colour and marker; -1: a grey line, such as theory to compare with
    label: str  # arm and seed of the trace, such as `ssmax, seed 3`
    # x, y: coordinates of the points, (points,); NaN where a value is unknown
    x: np.ndarray
    y: np.ndarray
    # thin line (`seed`), thick line with interval as band (`mean`), `dots`, points with bars (`interval`), crosses at
    # the top (`diverged`)
    kind: Literal["seed", "mean", "dots", "interval", "diverged"]
    # low, high: ends of the interval, (points,); None: there are none
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    # number of the trace's dash pattern; 0: solid for the first seven arms, another pattern for each seven more
    dashes: int = 0
    hollow: bool = False  # whether its markers are hollow, so that traces behind them can be seen
    # whether its panel has a legend that names it (even without points); else the arm is named above all panels
    in_legend: bool = False
    noise_source: str = ""  # the noise that the interval covers, in words


@dataclass(frozen=True, eq=False)
class Panel:
    """Axes and the traces drawn in them."""

    title: str
    x_label: str
    y_label: str
    traces: Sequence[Trace]
    # labels of the x axis by value; empty: matplotlib's choice
    ticks: Mapping[float, str] = field(default_factory=dict)
    log: Literal[0, 2, 10] = 0  # base of a logarithmic x axis, 2 or 10; 0: the axis is linear
    # x_range, y_range: ends of the axes; None: the range of the traces
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    zero_line: bool = False  # whether a line is drawn at zero, as for differences
    margin: float = 0.0  # half-width of the shaded band around zero, in which differences do not matter; 0: no band
    marks: Mapping[float, str] = field(default_factory=dict)  # words at vertical reference lines, by x
    levels: Mapping[float, str] = field(default_factory=dict)  # words at horizontal reference lines, by y
    # points (x, y, arm) that have a ring, such as the rate that was chosen
    rings: Sequence[tuple[float, float, int]] = ()

    @property
    def is_crowded(self) -> bool:
        """Whether more arms have a mean than there are colours; if so, their means are drawn without seeds and without
        intervals.
        """
        return len({trace.arm for trace in self.traces if trace.kind == "mean"}) > len(COLOURS)


@dataclass(frozen=True, eq=False)
class Map:
    """A heat map: values over two axes as colours."""

    title: str
    x_label: str
    # columns, rows: labels of columns and rows; an empty label has no tick
    columns: Sequence[str]
    rows: Sequence[str]
    values: np.ndarray  # (rows, columns); a cell without a finite value has no colour
    # low, top: ends of the scale of colours, to which values beyond them are clipped
    top: float = 1.0
    low: float = 0.0
    shows_values: bool = True  # whether the values stand in the cells; else maps of equal scales share a colour bar
    y_label: str = ""
    # linear, logarithmic, or logarithmic on both sides of 0 (`signed`) from `low` to `top`, which are magnitudes
    scale: Literal["linear", "log", "signed"] = "linear"
    unit: str = ""  # label of the colour bar

    @property
    def colours(self) -> tuple[Normalize, str]:
        if self.scale == "signed":
            return SymLogNorm(self.low, vmin=-self.top, vmax=self.top), "RdBu_r"
        return (LogNorm if self.scale == "log" else Normalize)(self.low, self.top), "viridis"


@dataclass(frozen=True, eq=False)
class Picture:
    """Panels and maps in a grid. The names of arms stand above all panels; a map's arm is named in the map's title."""

    panels: Sequence[Panel | Map | None]  # panels and maps row by row; None: an empty place
    arms: Sequence[str]  # empty: none is named
    caption: str = ""
    columns: int = 2  # panels in a row
    # width and height of a panel in inches; None: the default size of its kind
    panel_size: tuple[float, float] | None = None
    # axes whose labels and ticks stand once: `x` for panels below each other, `y` for panels side by side
    shared: Literal["", "x", "y", "xy"] = ""

    @property
    def shown_arms(self) -> list[int]:
        """Indices of the arms that are named above all panels: arms with a trace that has points and stands in no
        panel's legend.
        """
        traces = [trace for panel in self.panels if isinstance(panel, Panel) for trace in panel.traces if len(trace.x)]
        return sorted({trace.arm for trace in traces if not trace.in_legend and trace.arm >= 0}) if self.arms else []

    @property
    def has_maps(self) -> bool:
        return any(isinstance(panel, Map) for panel in self.panels)

    @property
    def crowd_note(self) -> str:
        """A note on what crowded panels leave out (`Panel.is_crowded`); empty if no panel is crowded."""
        is_crowded = any(isinstance(panel, Panel) and panel.is_crowded for panel in self.panels)
        return " Of so many arms means alone are drawn; seeds and intervals are in the CSV." * is_crowded

    @property
    def parts(self) -> "list[Picture | None]":
        """One picture for each panel (None for an empty place), for a page to arrange by its width; a picture with maps
        is not divided.
        """
        if self.has_maps:
            return [self]
        single_panels = [panel and replace(self, panels=[panel], arms=[]) for panel in self.panels]
        return single_panels if len(single_panels) > 1 else [replace(self, arms=[])]

    def sign(self, arm: int) -> str:
        """A character that shows the marker of an arm, for text next to the picture."""
        return "\u25cf\u25a0\u25c6\u25b2\u25bc\u271a\u2605"[MARKERS.index(colour_and_marker(arm)["marker"])]

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Number of rows and number of columns of panels."""
        columns = min(self.columns, len(self.panels))
        return -(-len(self.panels) // columns), columns

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the picture in inches, without its legends."""
        rows, columns = self.grid_shape
        maps = [] if self.panel_size else [panel for panel in self.panels if isinstance(panel, Map)]
        if not maps:
            width, height = self.panel_size or (_PANEL_WIDTH, _PANEL_HEIGHT)
            return width * columns, height * rows
        min_height = _PANEL_HEIGHT if any(isinstance(panel, Panel) for panel in self.panels) else 2.2
        return 2 * _PANEL_WIDTH, rows * max(1.2 + 0.36 * max(len(panel.rows) for panel in maps), min_height)

    @cached_property
    def svg(self) -> str:
        """The picture as the text of an SVG file, with colours for light and for dark pages."""
        return re.sub(
            r"(<svg [^>]*>)", lambda head: f"{head[1]}<style>{dark_style()}</style>", _render(self, "svg"), count=1
        )

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG file, with 160 pixels per inch."""
        return _render(self, "png")

    @cached_property
    def csv(self) -> str:
        """The picture's numbers as CSV text, one line per point or map cell: panel, label, kind, x, y and the ends of
        the interval.
        """
        columns, lines = ("panel", "of", "kind", "x", "y", "low", "high"), []
        for panel in filter(None, self.panels):
            if isinstance(panel, Map):
                for (row, column), value in np.ndenumerate(panel.values):
                    lines.append((panel.title, panel.rows[row], "map", panel.columns[column], f"{value:.6g}"))
                continue
            for trace in panel.traces:
                bounds = () if trace.low is None else (trace.low, trace.high)
                for x, *values in zip(trace.x, trace.y, *bounds, strict=True):
                    numbers = (panel.ticks.get(x, f"{x:.8g}"), *(f"{value:.6g}" for value in values))
                    lines.append((panel.title, trace.label, trace.kind, *numbers))
        return csv_text([dict(zip(columns, line, strict=False)) for line in lines], columns)

    def file(self, suffix: str) -> bytes:
        """The content of the picture's file in the format of `suffix`: .svg, .png or .csv. Raises RunError for any
        other suffix.
        """
        if suffix not in (".svg", ".png", ".csv"):
            raise RunError(f"can't draw a picture as {suffix or 'a file without a suffix'}: choose .svg, .png or .csv")
        content = getattr(self, suffix[1:])
        return content if isinstance(content, bytes) else content.encode()


def dark_style() -> str:
    """CSS rules that replace the colours of SVG files by their dark counterparts on dark pages."""
    rules = "".join(
        f'[style*="{name}: {light}"]{{{name}:{dark}!important}}'
        for light, dark in DARK_COLOURS.items()
        for name in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


def _render(picture: Picture, kind: Literal["svg", "png"]) -> str | bytes:
    """Draw the picture and return the content of its SVG or PNG file, which does not depend on the time or the
    machine.
    """
    rows, columns = picture.grid_shape
    width, height = picture.size
    arms = picture.arms
    shown_arms = picture.shown_arms
    font = min(11.0, 2.4 * width / columns)
    with matplotlib.rc_context(PLOT_SETTINGS | {"font.size": font, "axes.titlesize": font + 1}):
        # before colour bars, which need the layout
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        maps_by_scale = {}
        for index, panel in enumerate(picture.panels):
            if panel is None:
                continue
            axes = figure.add_subplot(rows, columns, index + 1)
            if isinstance(panel, Map):
                mesh = _draw_map(axes, panel, (width / columns, height / rows))
                if not panel.shows_values:
                    maps_by_scale.setdefault((panel.scale, panel.low, panel.top, panel.unit), (mesh, []))[1].append(
                        axes
                    )
            else:
                _draw_panel(axes, panel)
            if "y" in picture.shared and index % columns:
                axes.set(ylabel="", yticklabels=[])
            if "x" in picture.shared and any(picture.panels[index + columns : index + columns + 1]):
                axes.set(xlabel="", xticklabels=[])
        for (scale, *_, unit), (mesh, map_axes) in maps_by_scale.items():
            tick_format = {} if scale == "linear" else {"format": "{x:g}"}
            figure.colorbar(
                mesh, ax=map_axes, label=unit, **tick_format, aspect=20 * max(1, len(map_axes) // columns), pad=0.02
            )
        legend_entries = max(
            (_legend_entry_count(panel) for panel in picture.panels if isinstance(panel, Panel)), default=0
        )
        height += 0.1 * rows * (legend_entries + 2) if legend_entries > MAX_LEGEND_ENTRIES else 0
        legend_rows = 0
        if shown_arms:
            styles = {
                arm: colour_and_marker(arm) | {"linestyle": DASHES[arm // len(COLOURS) % len(DASHES)]}
                for arm in shown_arms
            }
            handles = [Line2D([], [], linewidth=2.4, **style, label=arms[arm]) for arm, style in styles.items()]
            entries_per_row = max(
                1, min(len(handles), int(width * 8 // (max(len(arms[arm]) for arm in shown_arms) + 6)))
            )
            legend_rows = -(-len(handles) // entries_per_row)
            figure.legend(handles=handles, loc="upper center", ncols=entries_per_row, fontsize=12)
        height += 0.28 * legend_rows
        figure.set_size_inches(width, height)
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.32 * legend_rows / height), w_pad=0.12, h_pad=0.12)
        file = io.StringIO() if kind == "svg" else io.BytesIO()
        metadata = (
            {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
        )
        figure.savefig(file, format=kind, dpi=160, metadata=metadata)
        return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.log:
        axes.set_xscale("log", base=panel.log)
    axes.ticklabel_format(axis="y", useOffset=False)
    if panel.margin:
        axes.axhspan(-panel.margin, panel.margin, color=SHADE, zorder=0)
    if panel.zero_line:
        axes.axhline(0, color=GREY, linewidth=1)
    lines_by_arm = Counter(trace.arm for trace in panel.traces if trace.kind in ("seed", "mean"))
    averaged_arms = {trace.arm for trace in panel.traces if trace.kind == "mean"} if panel.is_crowded else ()
    for trace in (trace for trace in panel.traces if trace.kind != "seed" or trace.arm not in averaged_arms):
        _draw_trace(axes, trace, is_alone=lines_by_arm[trace.arm] == 1, has_band=not panel.is_crowded)
    for x, y, arm in panel.rings:
        axes.plot(
            [x],
            [y],
            "o",
            markersize=15,
            markerfacecolor="none",
            markeredgewidth=1.6,
            color=colour_and_marker(arm)["color"],
        )
    limits = {name: limit for name, limit in (("xlim", panel.x_range), ("ylim", panel.y_range)) if limit}
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label, **limits)
    # room for the words at the top of vertical lines
    axes.set_title(_wrap_title(panel.title), pad=20 if panel.marks else 6)
    if panel.ticks:
        labels, is_categorical = list(panel.ticks.values()), [*panel.ticks] == [*range(len(panel.ticks))]
        labels_overlap = is_categorical and sum(map(len, labels)) + 2 * len(labels) > MAX_LABEL_CHARACTERS
        axes.set_xticks(
            list(panel.ticks),
            labels,
            **({"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if labels_overlap else {}),
        )
        axes.minorticks_off()
        if is_categorical:  # categories keep half a unit from the ends of the axis
            axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    for index, (x, text) in enumerate(sorted(panel.marks.items())):
        axes.axvline(x, color=GREY, linewidth=1)
        axis_fraction = axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0]
        alignment = (
            "left"
            if axis_fraction < 0.2 or index
            else "right"
            if axis_fraction > 0.8 or len(panel.marks) > 1
            else "center"
        )
        write_note(axes, text, (x, 1), (0, 3), axes.get_xaxis_transform(), ha=alignment, va="bottom")
    for y, text in panel.levels.items():
        axes.axhline(y, color=GREY, linestyle=":", linewidth=1)
        write_note(axes, text, (1, y), (-4, 3), axes.get_yaxis_transform(), ha="right", va="bottom")
    if not any(len(trace.x) for trace in panel.traces):
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", va="center", color=GREY)
    if _legend_entry_count(panel) > MAX_LEGEND_ENTRIES:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=9)
    elif _legend_entry_count(panel):
        axes.legend(loc="best", fontsize=9)


def _legend_entry_count(panel: Panel) -> int:
    return sum(trace.in_legend for trace in panel.traces)


def _draw_trace(axes: Axes, trace: Trace, is_alone: bool, has_band: bool) -> None:
    """Draw a trace. With `is_alone` its arm has no other line, and a seed is as thick as a mean. With `has_band` means
    show intervals.
    """
    style = colour_and_marker(trace.arm) | dashes_and_width(trace.dashes or max(trace.arm, 0) // len(COLOURS))
    style |= {"fillstyle": "none" if trace.hollow else "full"} | ({"label": trace.label} if trace.in_legend else {})
    point_style = style | {"linestyle": "none"}
    match trace.kind:
        case "seed":
            line_style = {"marker": ""} | ({} if is_alone else {"linewidth": 0.8, "alpha": 0.5})
            axes.plot(trace.x, trace.y, **style | line_style)
        case "mean":
            if trace.low is not None and has_band:
                axes.fill_between(trace.x, trace.low, trace.high, color=style["color"], alpha=0.15, linewidth=0)
            line_style = {"linewidth": 1.1} if trace.hollow or trace.arm < 0 else {}
            axes.plot(
                trace.x, trace.y, markersize=4.5, markevery=max(1, len(trace.x) // 8), zorder=3, **style | line_style
            )
        case "dots":
            marker_style = (
                {"markeredgewidth": 1.2, "markersize": 5.5}
                if trace.hollow
                else {"markeredgewidth": 0, "markersize": 4.5}
            )
            axes.plot(trace.x, trace.y, alpha=0.55, **marker_style, **point_style)
        case "interval":
            interval_lengths = None if trace.low is None else np.array([trace.y - trace.low, trace.high - trace.y])
            axes.errorbar(trace.x, trace.y, yerr=interval_lengths, markersize=8, capsize=5, zorder=3, **point_style)
        case "diverged":
            # crosses of several arms at one x must not overlap
            heights = np.full(len(trace.x), 0.98 - 0.045 * trace.arm)
            marker_style = {
                "markersize": 9,
                "markeredgewidth": 2,
                "clip_on": False,
                "transform": axes.get_xaxis_transform(),
            }
            axes.plot(trace.x, heights, "x", color=style["color"], **marker_style)


def _draw_map(axes: Axes, panel: Map, size: tuple[float, float]) -> QuadMesh:
    """Draw a heat map and return its mesh of cells. `size`: width and height in inches of the space for the map."""
    rows, columns = panel.values.shape
    norm, colormap = panel.colours
    edges, is_large = (np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5), max(rows, columns) > MAX_CELLS
    values = np.clip(panel.values, norm.vmin, norm.vmax)
    cell_style = {"rasterized": True} if is_large else {"edgecolors": PAPER, "linewidth": 1}
    mesh = axes.pcolormesh(*edges, values, norm=norm, cmap=colormap, **cell_style)
    axes.invert_yaxis()
    axes.grid(visible=False)
    for (row, column), value in np.ndenumerate(panel.values) if panel.shows_values else ():
        text, colour = (
            f"{value:.2f}" if np.isfinite(value) else "-",
            "#010101" if value > 0.6 * panel.top else "#fefefe",
        )
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour if np.isfinite(value) else GREY)
    ticks = [{index: label for index, label in enumerate(labels) if label} for labels in (panel.columns, panel.rows)]
    fonts = [
        min(matplotlib.rcParams["font.size"], 50 * inches / max(1, len(labels)))
        for inches, labels in zip(size, ticks, strict=True)
    ]
    rotation_style = {"rotation": 90} if max(map(len, panel.columns), default=0) * len(ticks[0]) > 11 * size[0] else {}
    axes.set_xticks(list(ticks[0]), list(ticks[0].values()), fontsize=fonts[0], **rotation_style)
    axes.set_yticks(list(ticks[1]), list(ticks[1].values()), fontsize=fonts[1])
    axes.set(title=_wrap_title(panel.title), xlabel=panel.x_label, ylabel=panel.y_label)
    return mesh


def _wrap_title(title: str) -> str:
    return "\n".join(textwrap.fill(line, 56) for line in title.split("\n"))


# ---------------------------------------------------------------- styles and axes


def colour_and_marker(number: int) -> Style:
    """Colour and marker of trace `number` (`Trace.arm`): no two of the traces 0 to 48 have both in common; -1 is grey,
    without a marker.
    """
    if number < 0:
        return {"color": GREY, "marker": ""}
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def dashes_and_width(number: int) -> Style:
    """Dash pattern and width (points) of line `number`: no two of the lines 0 to 13 have both in common."""
    return {"linestyle": DASHES[number % 7], "linewidth": (1.8, 1.0)[number // 7 % 2]}


def logarithmic_ticks(values: Sequence[float]) -> tuple[Literal[2, 10], dict[float, str]]:
    """Base and ticks (labels by value) of a logarithmic axis for ascending `values`: powers of 2, or of 10 if values
    lie below 1.
    """
    base = 2 if values[0] >= 1 else 10
    ticks = [tick for power in range(-30, 41) if values[0] / base < (tick := float(base) ** power) < values[-1] * base]
    return base, {tick: number(tick) for tick in ticks}


def token_unit(count: float) -> tuple[float, str]:
    """The unit of an axis of up to `count` tokens, and the label of the axis, such as 1e6 and `tokens seen
    (millions)`.
    """
    unit, word = next(
        ((size, word) for size, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")) if count >= size),
        (1, ""),
    )
    return unit, f"tokens seen ({word})" if word else "tokens seen"


def write_note(
    axes: Axes, text: str, xy: tuple[float, float], offset: tuple[int, int], transform: Transform, **options: str | int
) -> None:
    """Write small grey text, shifted by `offset` (points) from `xy`, a point (x, y) in the coordinates of
    `transform`.
    """
    halo = [withStroke(linewidth=2.5, foreground=PAPER)]
    axes.annotate(
        text, xy, offset, transform, textcoords="offset points", color=GREY, fontsize=9, path_effects=halo, **options
    )


def plain_ticks(values: Sequence[float]) -> dict[float, str]:
    """Axis labels by value: plain numbers below 10,000, and multiples of 1024 from there on, such as `16k`."""
    return {value: number(value) if value < 10_000 else f"{value / 1024:g}k" for value in values}
