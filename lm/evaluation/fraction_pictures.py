"""Pictures of evaluations, beside their files in evaluations/: fractions by length, depth or whatever they are measured over."""

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm.report.pictures import colour_and_marker
from lm.runs.series import Series, number, series_names
from lm.statistics.intervals import interval_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LINES = 3  # lines of one setting; more are drawn as a map
COLUMNS = 3  # panels side by side


def draw(series: Sequence[Series]) -> bytes | None:
    """Those series that are fractions at points as a PNG file; None if there are none.

    A panel a metric, of lines with their intervals; where a setting has more than `MOST_LINES` of them a map for each setting.
    """
    panels: dict[tuple[str, ...], list[Series]] = {}
    for one in series:
        if one.shape == "points" and one.unit == "fraction":
            panels.setdefault((one.metric, one.axis.name), []).append(one)
    for key, lines in list(panels.items()):
        settings = [one.setting for one in lines]
        if max(map(settings.count, settings)) > MOST_LINES:
            del panels[key]
            panels |= {(*key, setting): [one for one in lines if one.setting == setting] for setting in dict.fromkeys(settings)}
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6.5 * columns, 4 * rows), squeeze=False, layout="constrained")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (key, lines) in zip(grid.flat, panels.items(), strict=False):
        (_map if len(key) > 2 else _lines)(axes, lines)
        x = lines[0].axis
        axes.set(title="\n".join(textwrap.wrap(", ".join(key[::2]), 56)), xlabel=x.name + (f", {x.unit}" if x.unit else ""))
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    plt.close(figure)
    return png.getvalue()


def _lines(axes: "Axes", lines: list[Series]) -> None:
    for index, (one, name) in enumerate(series_names(lines).items()):
        x, label = one.axis.values, ", ".join(filter(None, (name, one.setting)))
        intervals = [interval_of(one, column) for column in range(len(x))]
        reach = np.zeros((2, len(x)))
        if all(intervals):
            drawn = np.array([interval.drawn() for interval in intervals])
            reach = np.abs(drawn[:, 1:] - drawn[:, :1]).T
        axes.errorbar(x, one.means, yerr=np.clip(reach, 0, None), capsize=3, label=label, **colour_and_marker(index))
    if lines[0].axis.log:
        axes.set_xscale("log", base=2)
    ticks = sorted({value for one in lines for value in one.axis.values})
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    if lines[0].axis.unit == "tokens":
        axes.axvline(lines[0].seq_len, color="0.6", linewidth=1, label="training length")
    levels = dict.fromkeys((name, level) for one in lines for name, level in one.references.items())
    for dots, (name, level) in zip(("-.", ":") * len(levels), levels, strict=False):
        axes.axhline(level, color="0.6", linestyle=dots, label=f"{name}, {level:.1%}")
    over = dict.fromkeys(interval.over for one in lines if (interval := interval_of(one, 0)))
    axes.set(ylabel="fraction" + "".join(f" [95% over {what}]" for what in over), ylim=(-0.02, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    many = len(lines) > MOST_LINES  # then they would cover each other
    axes.legend(frameon=False, fontsize=8, **({"loc": "upper left", "bbox_to_anchor": (0, -0.18)} if many else {}))


def _map(axes: "Axes", lines: list[Series]) -> None:
    names, x = series_names(lines), sorted({value for one in lines for value in one.axis.values})
    values = np.full((len(lines), len(x)), np.nan)
    for row, one in enumerate(lines):
        values[row, np.searchsorted(x, one.axis.values)] = one.means
    top = 1.0 if lines[0].interval == "wilson" else float(np.nanmax(values))
    image = axes.imshow(values, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    for (y, place), value in np.ndenumerate(values):
        axes.text(place, y, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 * top else "black", fontsize=8)
    axes.set_xticks(range(len(x)), [number(value) for value in x])
    axes.set_yticks(range(len(lines)), names.values())
    axes.figure.colorbar(image, ax=axes)
