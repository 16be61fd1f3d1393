"""Styles that tell the lines of a picture apart, also without colour, and the axis of lengths."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm.runs.series import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, safe for colour blindness
MARKERS = "osD^vP*"
DASHES = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (2, 1)), (0, (9, 2, 3, 2)))  # dotted lines are reference levels

Style = dict[str, str | float | tuple[int, tuple[int, ...]]]  # what matplotlib's `plot` takes


def colour_and_marker(number: int) -> Style:
    """Colour and marker of a line by its number: both cycle, and no two of 49 lines agree in both."""
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + number // 7) % 7]}


def dashes_and_width(number: int) -> Style:
    """Dashes and width (points) of a line by its number: no two of 14 lines agree in both."""
    return {"linestyle": DASHES[number % 7], "linewidth": (1.8, 1.0)[number // 7 % 2]}


def logarithmic_x(axes: "Axes", values: Sequence[float]) -> None:
    """A logarithmic x axis for ascending `values`: ticks at powers of 2, as of tokens and keys, or of 10 where there are values below 1."""
    base = 2.0 if values[0] >= 1 else 10.0
    ticks = [tick for power in range(-30, 41) if values[0] / base < (tick := base**power) < values[-1] * base]
    axes.set_xscale("log", base=base)
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
