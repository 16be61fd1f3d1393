"""This module draws pictures as SVG and PNG from data: panels of lines, dots and intervals, and heat maps."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Transform

from lm.report.tables import axis_text

GREY, INK, PAPER, GRID, SHADE = "#555555", "#1a1a1a", "#ffffff", "#e6e6e6", "#f0f0f0"
# most characters of all category labels below a panel together; with more, the labels are slanted
MAX_UNROTATED_TICK_CHARACTERS = 56
PLOT_SETTINGS = {
    "svg.hashsalt": "lm.report",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.formatter.useoffset": False,
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
# dash patterns, each of seven arms; dotted lines are reference levels
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))

LineStyle = dict[str, str | float | tuple[int, tuple[int, ...]]]  # keyword arguments of matplotlib's `plot`


@dataclass(frozen=True, eq=False)
class Trace:
    """Holds the points of one arm, or of one of the arm's seeds, in a panel, and says how they are drawn."""

    arm_index: int  # number of the trace's colour and marker
    label: str  # arm and seed of the trace, such as `ssmax, seed 3`
    # x, y: coordinates of the points, (points,); NaN where a value is unknown
    x: np.ndarray
    y: np.ndarray
    # thin line (`seed`), thick line with interval as band (`mean`), `dots`, points with bars (`interval`), rings around
    # points (`chosen`), crosses at the top (`diverged`)
    drawn_as: Literal["seed", "mean", "dots", "interval", "chosen", "diverged"]
    # low, high: ends of the interval, (points,); None: there are none
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    noise_source: str = ""  # the noise that the interval covers, in words


@dataclass(frozen=True, eq=False)
class Panel:
    """Holds axes and the traces drawn in them."""

    title: str
    x_label: str
    y_label: str
    traces: Sequence[Trace]
    x_tick_labels: Mapping[float, str] = field(default_factory=dict)  # by value; empty: at round values
    x_log_base: Literal[0, 2, 10] = 0  # base of a logarithmic x axis, 2 or 10; 0: the axis is linear
    y_range: tuple[float, float] | None = None  # ends of the y axis; None: the range of the traces
    has_zero_line: bool = False  # whether a line is drawn at zero, as for differences
    margin: float = 0.0  # half-width of the shaded band around zero, in which differences do not matter; 0: no band
    vertical_line_labels: Mapping[float, str] = field(default_factory=dict)  # words at the lines, by x
    horizontal_line_labels: Mapping[float, str] = field(default_factory=dict)  # words at reference lines, by y

    @property
    def is_crowded(self) -> bool:
        """Return whether more arms have a mean than there are colours; if so, their means are drawn without seeds and
        without intervals."""
        return len({trace.arm_index for trace in self.traces if trace.drawn_as == "mean"}) > len(COLOURS)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Holds a heat map: a table of values that is drawn as a grid of coloured cells."""

    title: str
    x_label: str
    column_labels: Sequence[str]
    row_labels: Sequence[str]
    values: np.ndarray  # (rows, columns); a cell without a finite value has no colour
    max_value: float  # the largest value of the scale of colours, which begins at 0


@dataclass(frozen=True, eq=False)
class Picture:
    """Holds panels and maps in a grid. The names of arms stand above all panels; a map's arm is named in the map's
    title."""

    panels: Sequence[Panel | HeatMap | None]  # panels and maps row by row; None: an empty place
    arm_labels: Sequence[str]  # empty: none is named
    caption: str = ""
    n_columns: int = 2  # panels in a row
    panel_size: tuple[float, float] = (6.4, 4.3)  # width and height of a panel in inches

    @property
    def shown_arms(self) -> list[int]:
        """Return the indices of the arms that are named above all panels, as they have a trace with points."""
        traces = [trace for panel in self.panels if isinstance(panel, Panel) for trace in panel.traces if len(trace.x)]
        return sorted({trace.arm_index for trace in traces}) if self.arm_labels else []

    @property
    def has_maps(self) -> bool:
        """Return whether any of the panels is a heat map."""
        return any(isinstance(panel, HeatMap) for panel in self.panels)

    @property
    def crowd_note(self) -> str:
        """Return a note on what crowded panels leave out (`Panel.is_crowded`); empty if no panel is crowded."""
        is_crowded = any(isinstance(panel, Panel) and panel.is_crowded for panel in self.panels)
        return " Of so many arms means alone are drawn." * is_crowded

    @property
    def panel_pictures(self) -> "list[Picture | None]":
        """Return one picture for each panel, which a page arranges by its width; None for an empty cell of the grid of
        panels. A picture with maps is not divided."""
        return (
            [self]
            if self.has_maps
            else [panel and replace(self, panels=[panel], arm_labels=[]) for panel in self.panels]
        )

    def marker_character(self, arm_index: int) -> str:
        """Return a character that shows the marker of an arm, for text next to the picture."""
        return "\u25cf\u25a0\u25c6\u25b2\u25bc\u271a\u2605"[MARKERS.index(arm_style(arm_index)["marker"])]

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of panels."""
        columns = min(self.n_columns, len(self.panels))
        return -(-len(self.panels) // columns), columns

    @cached_property
    def svg(self) -> str:
        """Return the picture as the text of an SVG file, with colours for light and for dark pages."""
        style = f"<style>{dark_css()}</style>"
        return re.sub(r"<svg [^>]*>", lambda head: head[0] + style, _render(self, "svg"), count=1)

    @cached_property
    def png(self) -> bytes:
        """Return the picture as a PNG file, with 160 pixels per inch."""
        return _render(self, "png")


def dark_css() -> str:
    """Return CSS rules that replace the colours of SVG files by their dark counterparts on dark pages."""
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
    width, height = picture.panel_size
    font = min(11.0, 2.4 * width)
    with matplotlib.rc_context(PLOT_SETTINGS | {"font.size": font, "axes.titlesize": font + 1}):
        figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        for index, panel in enumerate(picture.panels):
            if panel is None:
                continue
            axes = figure.add_subplot(rows, columns, index + 1)
            if isinstance(panel, Panel):
                _draw_panel(axes, panel)
            else:
                _draw_heat_map(axes, panel, picture.panel_size)
        if shown_arms := picture.shown_arms:
            longest = max(len(picture.arm_labels[arm]) for arm in shown_arms)
            entries_per_row = max(1, min(len(shown_arms), int(columns * width * 8 // (longest + 6))))
            handles = [
                Line2D([], [], **arm_style(arm) | {"linewidth": 2.4}, label=picture.arm_labels[arm])
                for arm in shown_arms
            ]
            figure.legend(handles=handles, loc="outside upper center", ncols=entries_per_row, fontsize=12)
            figure.set_figheight(rows * height + 0.28 * -(-len(shown_arms) // entries_per_row))
        file = io.StringIO() if kind == "svg" else io.BytesIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format=kind, dpi=160, metadata=metadata)
        return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw a panel's traces, lines and labels into `axes`."""
    if panel.x_log_base:
        axes.set_xscale("log", base=panel.x_log_base)
    axes.xaxis.set_major_formatter(lambda x, _: _tick_text(x, panel.x_log_base == 2))
    if panel.margin:
        axes.axhspan(-panel.margin, panel.margin, color=SHADE, zorder=0)
    if panel.has_zero_line:
        axes.axhline(0, color=GREY, linewidth=1)
    for trace in panel.traces:
        if not panel.is_crowded:
            _draw_trace(axes, trace)
        elif trace.drawn_as != "seed":
            _draw_trace(axes, replace(trace, low=None, high=None))
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    # room for the words at the top of vertical lines
    axes.set_title(_wrap_title(panel.title), pad=20 if panel.vertical_line_labels else 6)
    if panel.y_range:
        axes.set_ylim(panel.y_range)
    if panel.x_tick_labels:
        labels = list(panel.x_tick_labels.values())
        axes.set_xticks(list(panel.x_tick_labels), labels)
        axes.minorticks_off()
        # categories keep half a unit from the ends of the axis
        if list(panel.x_tick_labels) == list(range(len(labels))):
            axes.set_xlim(-0.5, len(labels) - 0.5)
            if sum(map(len, labels)) + 2 * len(labels) > MAX_UNROTATED_TICK_CHARACTERS:
                axes.tick_params("x", rotation=35)
    for x, text in panel.vertical_line_labels.items():
        axes.axvline(x, color=GREY, linewidth=1)
        alignment = "left" if (axes.transScale + axes.transLimits).transform((x, 1))[0] < 0.5 else "right"
        _write_note(axes, text, (x, 1), (0, 3), axes.get_xaxis_transform(), alignment)
    for y, text in panel.horizontal_line_labels.items():
        axes.axhline(y, color=GREY, linestyle=":", linewidth=1)
        _write_note(axes, text, (1, y), (-4, 3), axes.get_yaxis_transform(), "right")


def _tick_text(value: float, uses_binary_units: bool) -> str:
    """Return the label of a tick: below 10,000 a plain number, else a short one. With `uses_binary_units` this is in
    units of 1,024, such as `16k`; without, it is such as `20k` or `1.5M`."""
    if abs(value) < 10_000:
        return axis_text(value)
    return f"{value / 1024:g}k" if uses_binary_units else EngFormatter(sep="")(value)


def _draw_trace(axes: Axes, trace: Trace) -> None:
    """Draw the points of a trace into `axes`, in the style of its arm and of `trace.drawn_as`."""
    style = arm_style(trace.arm_index)
    colour, points = style["color"], style | {"linestyle": "none"}
    match trace.drawn_as:
        case "seed":
            axes.plot(trace.x, trace.y, **style | {"marker": "", "linewidth": 0.8, "alpha": 0.5})
        case "mean":
            if trace.low is not None:
                axes.fill_between(trace.x, trace.low, trace.high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(trace.x, trace.y, **style, markersize=4.5, markevery=max(1, len(trace.x) // 8), zorder=3)
        case "dots":
            axes.plot(trace.x, trace.y, **points, alpha=0.55, markeredgewidth=0, markersize=4.5)
        case "interval":
            lengths = np.array([trace.y - trace.low, trace.high - trace.y])
            axes.errorbar(trace.x, trace.y, yerr=lengths, **points, markersize=8, capsize=5, zorder=3)
        case "chosen":
            axes.plot(
                trace.x, trace.y, **points | {"marker": "o"}, fillstyle="none", markersize=15, markeredgewidth=1.6
            )
        case "diverged":
            # crosses of several arms at one x must not overlap
            heights = np.full(len(trace.x), 0.98 - 0.045 * trace.arm_index)
            cross_style = {"markersize": 9, "markeredgewidth": 2, "transform": axes.get_xaxis_transform()}
            axes.plot(trace.x, heights, "x", color=colour, clip_on=False, **cross_style)


def _draw_heat_map(axes: Axes, panel: HeatMap, size: tuple[float, float]) -> None:
    """Draw a heat map with the values in its cells. `size`: width and height in inches of the space for the map."""
    edges = [np.arange(count + 1) - 0.5 for count in panel.values.T.shape]
    axes.pcolormesh(*edges, panel.values, vmin=0.0, vmax=panel.max_value, cmap="viridis")
    axes.invert_yaxis()
    axes.grid(visible=False)
    for (row, column), value in np.ndenumerate(panel.values):
        text, colour = f"{value:.2f}", "#010101" if value > 0.6 * panel.max_value else "#fefefe"
        text, colour = (text, colour) if np.isfinite(value) else ("-", GREY)
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
    for axis, labels, inches in zip(
        (axes.xaxis, axes.yaxis), (panel.column_labels, panel.row_labels), size, strict=True
    ):
        font = min(matplotlib.rcParams["font.size"], 50 * inches / max(1, len(labels)))
        axis.set_ticks(range(len(labels)), labels, fontsize=font)
        if axis is axes.xaxis and max(map(len, labels), default=0) * len(labels) > 11 * inches:
            axes.tick_params("x", rotation=90)
    axes.set(title=_wrap_title(panel.title), xlabel=panel.x_label)


def _wrap_title(title: str) -> str:
    """Break a title into lines that fit above a panel."""
    return "\n".join(textwrap.fill(line, 56) for line in title.split("\n"))


def arm_style(arm_index: int) -> LineStyle:
    """Return the colour, marker and dashes of an arm: no two of the arms 0 to 48 have colour and marker in common."""
    round_number = arm_index // len(COLOURS)
    marker, dashes = MARKERS[(arm_index + round_number) % 7], DASHES[round_number % 4]
    return {"color": COLOURS[arm_index % 7], "marker": marker, "linestyle": dashes, "linewidth": 1.8}


def _write_note(
    axes: Axes, text: str, xy: tuple[float, float], offset: tuple[int, int], transform: Transform, alignment: str
) -> None:
    """Write small grey text, shifted by `offset` (points) from `xy`, a point (x, y) in the coordinates of
    `transform`.
    """
    style = {"color": GREY, "fontsize": 9, "path_effects": [withStroke(linewidth=2.5, foreground=PAPER)]}
    axes.annotate(text, xy, offset, transform, textcoords="offset points", ha=alignment, va="bottom", **style)
