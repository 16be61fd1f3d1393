"""Draw pictures for pages of docs/ in one style, as SVG files that are the same for the same data."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

matplotlib.use("Agg")

FONT = "matplotlib DejaVu Sans"  # and not the machine's font of that name, whose glyphs have other numbers
_FONT_ENTRY = font_manager.FontEntry(fname=f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", name=FONT)
font_manager.fontManager.ttflist.append(_FONT_ENTRY)
# hues stay
DARK_PAGE_CSS = (
    b"<style>@media screen and (prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}</style>"
)
# the same picture is the same file
MATPLOTLIB_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "lm.pages",
    "svg.fonttype": "path",
    "font.family": FONT,
    "font.size": 9,
}


@contextmanager
def styled_figure(
    rows: int, columns: int, size: tuple[float, float], **options: object
) -> Iterator[tuple[plt.Figure, np.ndarray]]:
    """Yield a figure and its axes in the style that all pictures have. options: those of `plt.subplots`.

    size: width and height in inches. Pages show pictures about 700 pixels wide, so text of 9 points is legible up to a
    width of 10 inches.
    """
    with plt.rc_context(MATPLOTLIB_STYLE):
        yield plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def svg_bytes(figure: plt.Figure) -> bytes:
    """Close a figure and return it as an SVG file, whose colours are inverted on dark pages.

    The file names the release of matplotlib, and no time.
    """
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata=dict.fromkeys(("Date", "Format", "Type")))
    plt.close(figure)
    return re.sub(rb"<svg [^>]*>", lambda head: head[0] + DARK_PAGE_CSS, content.getvalue(), count=1)


def draw_percentages(axes: Axes, values: np.ndarray) -> None:
    """Draw percentages as coloured cells with their numbers, without ticks or frame."""
    axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color="w" if value < 60 else "0.1")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
