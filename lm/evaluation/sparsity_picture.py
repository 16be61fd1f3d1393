"""Heads against theory: S of each head's weights by the spread of its scores, beside the closed forms and where that of exp ends."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lm.diagnostics.attention_rows import HEAD, KEYS, LEAST_KEYS, NO_FIRST
from lm.diagnostics.sparsity import condensation_scale, exp_sparsity, identity_sparsity, relu2_sparsity, relu_sparsity, simulated_sparsity
from lm.report.pictures import DASHES, colour_and_marker
from lm.runs.series import Series, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

CLOSED, STD, MEAN, DIFFERENCE, CONDENSED = (
    "S, closed form", "score standard deviation", "score mean", "S minus closed form", "queries beyond condensation",
)  # fmt: skip
POINTS = 60  # points of a curve
Found = dict[str, np.ndarray]  # by metric: all heads of all layers, NaN where it is not defined
Heads = dict[str, Found]  # by setting


def has_closed_forms(series: Sequence[Series]) -> bool:
    """Whether there is anything to draw."""
    return any(one.metric == CLOSED for one in series)


def draw(figure: "FigureBase", series: Sequence[Series]) -> None:
    """S of e^score by the spread of scores, of other maps by their ratio of mean and spread, and S by its closed form: a panel for each
    that there are heads for, and below it the same without the first token."""
    keys = LEAST_KEYS, next(one.axis.values[-1] for one in series if one.axis and one.axis.name == KEYS)
    rows = {ending: _heads(series, ending) for ending in ("", NO_FIRST)}
    panels = [(x, draw_theory) for x, draw_theory in PANELS if any(np.isfinite(x(one) + one[CLOSED]).any() for one in rows[""].values())]
    grid = figure.subplots(len(rows), len(panels), squeeze=False)
    for row, (ending, heads) in zip(grid, rows.items(), strict=True):
        for axes, (x, draw_theory) in zip(row, panels, strict=True):
            of_heads = [x(found) for found in heads.values()]
            for index, (setting, found) in enumerate(heads.items()):
                _points(axes, of_heads[index], found[CLOSED] + found[DIFFERENCE], index, setting)
            draw_theory(axes, max(np.nanmax(one, initial=1.0) for one in of_heads), keys)
            axes.set(ylabel="S measured" + ending, ylim=(0, 1.02))
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=7)


def _heads(series: Sequence[Series], ending: str) -> Heads:
    """Means over queries, of all keys together."""
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    wanted = {name + ending: name for name in (CLOSED, STD, MEAN, DIFFERENCE)} | {CONDENSED: CONDENSED}
    for one in series:
        if one.axis and one.axis.name == HEAD and "," not in one.what and one.metric in wanted:
            found.setdefault(one.setting, {}).setdefault(wanted[one.metric], []).append(one.means)
    heads = {setting: {name: np.concatenate(parts) for name, parts in metrics.items()} for setting, metrics in found.items()}
    for metrics in heads.values():
        nowhere = np.full(len(metrics[STD]), np.nan)
        metrics |= {name: metrics.get(name, nowhere) for name in (CLOSED, DIFFERENCE, CONDENSED)}
    return heads


def _exp(axes: "Axes", largest: float, keys: tuple[int, float]) -> None:
    """Of e^score: the closed form, S of so many Gaussian scores, and the spread where these condense."""
    scale = torch.linspace(0, 1.1 * largest, POINTS, dtype=torch.float64)
    axes.plot(scale, exp_sparsity(scale), color="0.3", label="closed form, e^score")
    for dashes, n in zip(DASHES[1:], keys, strict=False):
        axes.plot(scale, simulated_sparsity(scale, int(n)), color="0.6", linestyle=dashes, label=f"{number(n)} Gaussian scores")
        limit = condensation_scale(torch.tensor(float(n))).item()
        axes.axvline(limit, color="0.8", linestyle=dashes, label=f"condensation of {number(n)}")
    axes.set(xlabel="standard deviation of scores (logit scale)")


def _ratio(axes: "Axes", largest: float, keys: tuple[int, float]) -> None:
    """Of other maps: the closed forms that depend on the ratio of mean and standard deviation."""
    ratio, one = torch.linspace(-4, 4, POINTS, dtype=torch.float64), torch.tensor(1.0)
    curves = {
        "relu(score)^2": relu2_sparsity(ratio, one),
        "relu(score)": relu_sparsity(ratio, one),
        "score": identity_sparsity(ratio, one),
        "products of non-negative features": torch.where(ratio > 0, ratio / (1 + ratio.square()).sqrt(), torch.nan),
    }
    for dashes, (name, curve) in zip(DASHES, curves.items(), strict=False):
        axes.plot(ratio, curve, color="0.6", linestyle=dashes, label=f"closed form, {name}")
    axes.set(xlabel="mean of scores over their standard deviation", xlim=(-4.2, 4.2))


def _both(axes: "Axes", largest: float, keys: tuple[int, float]) -> None:
    """Of any map: where S is its closed form."""
    axes.plot((0, 1), (0, 1), color="0.6", label="equal")
    axes.set(xlabel="S in closed form at the measured moments", xlim=(-0.02, 1.02))


PANELS: tuple[tuple[Callable[[Found], np.ndarray], Callable[["Axes", float, tuple[int, float]], None]], ...] = (  # x of heads, and curves
    (lambda found: np.where(np.isfinite(found[CONDENSED]), found[STD], np.nan), _exp),
    (lambda found: np.where(np.isfinite(found[CONDENSED]), np.nan, found[MEAN] / found[STD]), _ratio),
    (lambda found: found[CLOSED], _both),
)


def _points(axes: "Axes", x: np.ndarray, y: np.ndarray, index: int, setting: str) -> None:
    known = np.isfinite(x) & np.isfinite(y)
    if known.any():
        fill = "none" if index else "full"  # what lies behind is seen, too
        axes.plot(x[known], y[known], linestyle="", markersize=4 + index, fillstyle=fill, label=setting, **colour_and_marker(index))
