"""What the scripts that write pages of docs/ share: pictures and templates."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from lm.report.pictures import logarithmic_ticks

matplotlib.use("Agg")

STYLE = {"svg.hashsalt": "lm.pages", "svg.fonttype": "path"}  # the same picture is the same file


def svg(figure: plt.Figure) -> bytes:
    """A picture as an SVG file, without the time it was made at; the figure is closed."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    return content.getvalue()


def rendered(template: Path, **given: object) -> str:
    """A jinja2 template in Markdown with what it is given; a name that is not given is an error. `tokens` is a filter there."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["tokens"] = lambda value: f"{value:,.0f}" if math.isfinite(value) else "never"
    return environment.from_string(template.read_text(encoding="utf-8")).render(**given)


def logarithmic_x(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis for ascending `values`."""
    base, ticks = logarithmic_ticks(values)
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
