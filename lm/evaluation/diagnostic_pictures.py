"""The picture of diagnostics: a row for each statistic that reports show, its curve by the number of visible keys and a map of heads.

What is derived of several statistics, and comes as several lines of one name, has a row of its own: a panel for each model."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm.diagnostics.attention_rows import HEAD, KEYS
from lm.evaluation import sparsity_picture
from lm.report.pictures import colour_and_marker, logarithmic_x
from lm.runs.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

CURVE_WIDTH, MAP_WIDTH, LINES_HEIGHT = 5.5, 3.2, 3.2  # inches of a panel
THEORY_HEIGHT = 8.0  # inches of the panels below that compare with closed forms
Maps = dict[tuple[str, str], list[np.ndarray]]  # by statistic and model: values by head, of each layer


def draw(series: Sequence[Series]) -> bytes | None:
    """A PNG file; None if no statistic is defined anywhere."""
    shown = [one for one in series if one.axis and one.axis.name != HEAD and one.shown]
    curves = [one for one in shown if one.axis.name == KEYS and not one.what]
    several = {one.metric for one in shown if one.what and np.isfinite(one.means).any()}
    lines = [one for one in shown if one.what and one.metric in several]
    settings = [*dict.fromkeys(one.setting for one in curves + lines)]
    maps: Maps = {(one.metric, one.setting): [] for one in curves}
    for one in series:
        if one.axis and one.axis.name == HEAD and (one.metric, one.setting) in maps and "," not in one.what:
            maps[one.metric, one.setting].append(one.means)
    if not curves + lines:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = max(2.6, 0.22 * max(map(len, maps.values()), default=0) + 1.2)
    parts: list[tuple[float, Callable[[FigureBase], None]]] = []  # heights, and what draws them
    if curves:
        parts.append((height * len({one.metric for one in curves}), lambda part: _statistics(part, curves, maps, settings)))
    if lines:
        parts.append((LINES_HEIGHT * len(several), lambda part: _derived(part, lines, settings)))
    if sparsity_picture.has_closed_forms(series):
        parts.append((THEORY_HEIGHT, lambda part: sparsity_picture.draw(part, series)))
    heights = [inches for inches, _ in parts]
    figure = plt.figure(figsize=(CURVE_WIDTH + MAP_WIDTH * len(settings), sum(heights)), layout="constrained")
    for part, (_, fill) in zip(figure.subfigures(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0], parts, strict=True):
        fill(part)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110)
    plt.close(figure)
    return png.getvalue()


def _statistics(figure: "FigureBase", curves: list[Series], maps: Maps, settings: list[str]) -> None:
    """A row for each statistic: its curves, and a map of heads for each model."""
    metrics = list(dict.fromkeys(one.metric for one in curves))
    widths = [CURVE_WIDTH] + [MAP_WIDTH] * len(settings)
    for row, metric in zip(figure.subplots(len(metrics), len(widths), squeeze=False, width_ratios=widths), metrics, strict=True):
        _curve(row[0], [one for one in curves if one.metric == metric])
        found = {setting: np.array(maps[metric, setting]) for setting in settings if maps.get((metric, setting))}
        limits = _limits(list(found.values()))
        for axes, setting in zip(row[1:], settings, strict=True):
            axes.set_title(f"{metric}\n{setting}", fontsize=9)
            image = _map(axes, found.get(setting), limits)
        if image is not None:
            figure.colorbar(image, ax=row[1:].tolist())


def _derived(figure: "FigureBase", lines: list[Series], settings: list[str]) -> None:
    """A row for each name of several lines: a panel for each model, on one scale."""
    metrics = list(dict.fromkeys(one.metric for one in lines))
    grid = figure.subplots(len(metrics), len(settings), squeeze=False, sharey="row")
    for row, metric in zip(grid, metrics, strict=True):
        found = [one for one in lines if one.metric == metric]
        for axes, setting in zip(row, settings, strict=True):
            _lines(axes, [one for one in found if one.setting == setting], legend=axes is row[0])
        values = np.concatenate([one.means[np.isfinite(one.means)] for one in found])
        if found[0].unit != "fraction" and values.min() > 0 and values.max() > 100 * values.min():
            row[0].set_yscale("log")


def _curve(axes: "Axes", lines: list[Series]) -> None:
    for index, one in enumerate(lines):
        style = {"linestyle": "--", "linewidth": 1.2, "fillstyle": "none", "zorder": 3} if one.control else {"linewidth": 2.4}
        axes.plot(one.axis.values, one.means, label=one.setting, markersize=4, **colour_and_marker(index), **style)  # equal lines show
    first = lines[0]
    logarithmic_x(axes, first.axis.values)
    axes.axvline(first.seq_len, color="0.6", linewidth=1, label="training length")
    axes.set(title=first.metric, xlabel="visible keys n", ylabel=first.unit)
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


def _lines(axes: "Axes", lines: list[Series], legend: bool) -> None:
    """Lines of one model, told apart by what they are of."""
    if not lines:
        axes.set_visible(False)
        return
    for index, one in enumerate(lines):
        axes.plot(one.axis.values, one.means, label=one.what, markersize=3, **colour_and_marker(index))
    if lines[0].axis.log:
        logarithmic_x(axes, lines[0].axis.values)
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
