"""What the scripts that write pages of docs/ share: pictures and templates."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lm.report.pictures import logarithmic_ticks

matplotlib.use("Agg")

FONT = "matplotlib DejaVu Sans"  # and not the machine's font of that name, whose glyphs have other numbers
_ENTRY = font_manager.FontEntry(fname=f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", name=FONT)
font_manager.fontManager.ttflist.append(_ENTRY)
# hues stay
DARK = b"<style>@media screen and (prefers-color-scheme:dark){svg{filter:invert(1) hue-rotate(180deg)}}</style>"
STYLE = {"svg.hashsalt": "lm.pages", "svg.fonttype": "path", "font.family": FONT}  # the same picture is the same file


@contextmanager
def canvas(
    rows: int, columns: int, size: tuple[float, float], **options: object
) -> Iterator[tuple[plt.Figure, np.ndarray]]:
    """A figure and its axes, in the style that every picture has; `options` of `plt.subplots`.

    Pages show pictures about 700 pixels wide: a `size` of at most 10 inches keeps 9 points legible.
    """
    with plt.rc_context(STYLE):
        yield plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def saved(figure: plt.Figure, kind: Literal["svg", "png"] = "svg") -> bytes:
    """A picture as a file, without the time it was made at; an SVG names the release of matplotlib, and is dark on dark
    pages.

    The figure is closed.
    """
    content, unsaid = io.BytesIO(), {"svg": ("Date", "Format", "Type"), "png": ("Software",)}[kind]
    figure.savefig(content, format=kind, dpi={"svg": "figure", "png": 150}[kind], metadata=dict.fromkeys(unsaid))
    plt.close(figure)
    return (
        re.sub(rb"<svg [^>]*>", lambda head: head[0] + DARK, content.getvalue(), count=1)
        if kind == "svg"
        else content.getvalue()
    )


def finish(axes: Axes, size: float = 9, place: str = "best", **words: str) -> None:
    """Give axes their words, and a legend where something has a name; `size` and `place` of the legend."""
    axes.set(**words)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=size, loc=place)


def percentage_cells(axes: Axes, values: np.ndarray) -> None:
    """Draw percentages as coloured cells with their numbers, without ticks or frame."""
    axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color="w" if value < 60 else "0.1")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def rendered(template: Path, **values: object) -> str:
    """A jinja2 template in Markdown with what it is given; a name that is not given is an error."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**values)


def logarithmic_x(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis for ascending `values`."""
    base, ticks = logarithmic_ticks(values)
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
