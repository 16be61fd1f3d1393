"""The picture of diagnostics: a row for each statistic that reports show, its curve by the number of visible keys and a map of heads.

What is derived of several statistics, and comes as several lines of one name, has a row of its own: a panel for each model."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm.diagnostics.measured import KEYS
from lm.evaluation import sparsity_picture
from lm.evaluation.diagnostic_series import HEAD
from lm.evaluation.line_styles import colour_and_marker
from lm.runs.series import Series, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEORY_HEIGHT = 8.0  # inches of the panels below that compare with closed forms


def draw(series: Sequence[Series]) -> bytes | None:
    """A PNG file; None if no statistic is defined anywhere."""
    shown = [one for one in series if one.axis and one.axis.name != HEAD and one.shown]
    curves = [one for one in shown if one.axis.name == KEYS and not one.what]
    lines = [one for one in shown if one.what]
    settings = [*dict.fromkeys(one.setting for one in curves + lines)]
    metrics, several = ([*dict.fromkeys(one.metric for one in part)] for part in (curves, lines))
    maps = {(one.metric, one.setting): [] for one in curves}
    for one in series:
        if one.axis and one.axis.name == HEAD and (one.metric, one.setting) in maps and "," not in one.what:
            maps[one.metric, one.setting].append(one.means)
    if not curves + lines:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, layers = 1 + len(settings), max(map(len, maps.values()), default=0)
    heights = [max(2.6, 0.22 * layers + 1.2)] * len(metrics) + [3.2] * len(several)
    size, theory = (5.5 + 3.2 * len(settings), sum(heights)), THEORY_HEIGHT * sparsity_picture.has_closed_forms(series)
    figure = plt.figure(figsize=(size[0], size[1] + theory), layout="constrained")
    above, *below = figure.subfigures(2 if theory else 1, 1, squeeze=False, height_ratios=[size[1]] + [theory] * bool(theory))[:, 0]
    widths = [5.5] + [3.2] * (columns - 1)
    grid = above.subplots(len(heights), columns, squeeze=False, width_ratios=widths, height_ratios=heights)
    for row, metric in zip(grid[len(metrics) :], several, strict=True):
        row[1].set_visible(False)
        for axes, setting in zip([row[0], *row[2:]], settings, strict=True):
            _lines(axes, [one for one in lines if (one.metric, one.setting) == (metric, setting)], legend=axes is row[0])
    for row, metric in zip(grid, metrics, strict=False):
        _curve(row[0], [one for one in curves if one.metric == metric])
        found = {setting: np.array(maps[metric, setting]) for setting in settings if maps.get((metric, setting))}
        limits = _limits(list(found.values()))
        for axes, setting in zip(row[1:], settings, strict=True):
            axes.set_title(f"{metric}\n{setting}", fontsize=9)
            image = _map(axes, found.get(setting), limits)
        if image is not None:
            above.colorbar(image, ax=row[1:].tolist())
    for one in below:
        sparsity_picture.draw(one, series)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    plt.close(figure)
    return png.getvalue()


def _curve(axes: "Axes", lines: list[Series]) -> None:
    for index, one in enumerate(lines):
        style = colour_and_marker(index) | {"linestyle": "--" if one.control else "-", "zorder": 3 if one.control else 2}
        axes.plot(one.axis.values, one.means, label=one.setting, markersize=4, **style)
    first = lines[0]
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(31) if first.axis.values[0] / 2 < 2**power < first.axis.values[-1] * 2]
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.axvline(first.seq_len, color="0.6", linewidth=1, label="training length")
    axes.set(title=first.metric, xlabel="visible keys n", ylabel=first.unit)
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


def _lines(axes: "Axes", lines: list[Series], legend: bool) -> None:
    """Lines of one model, told apart by what they are of; a logarithmic scale where values cover more than two decades."""
    for index, one in enumerate(lines):
        axes.plot(one.axis.values, one.means, label=one.what, markersize=3, **colour_and_marker(index))
    if not lines:
        axes.set_visible(False)
        return
    values = np.concatenate([one.means[np.isfinite(one.means)] for one in lines])
    if lines[0].axis.log:
        axes.set_xscale("log")
    if len(values) and lines[0].unit != "fraction" and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")
    axes.set(xlabel=lines[0].axis.name, ylabel=lines[0].unit)
    axes.set_title(f"{lines[0].metric}\n{lines[0].setting}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=6)


def _limits(maps: list[np.ndarray]) -> tuple[float, float]:
    """One range of colours for all maps of a statistic."""
    known = np.concatenate([one[np.isfinite(one)] for one in maps] or [np.empty(0)])
    return (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)


def _map(axes: "Axes", values: np.ndarray | None, limits: tuple[float, float]) -> object:
    """Layers from the top to the bottom, heads from left to right."""
    if values is None:
        axes.set_visible(False)
        return None
    axes.set(xlabel="head", ylabel="layer", xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    return axes.imshow(values, vmin=limits[0], vmax=limits[1], cmap="viridis", aspect="auto")
