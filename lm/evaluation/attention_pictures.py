"""Pictures of attention weights on a text: a map for each head, models side by side."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lm.diagnostics.attention_maps import Maps
from lm.runs.series import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

LABELLED = 40  # tokens up to which each has its text at the axes
DECADES = 4  # of weights that colours tell apart, below the largest
STYLE = {"svg.hashsalt": "lm.attention", "svg.fonttype": "path"}  # the same picture is the same file


@dataclass(frozen=True, eq=False)
class Panels:
    """The maps of one model: its name, what is said of it, its tokens and where they begin in the text, the heads (layer, head)."""

    name: str
    said: str
    tokens: list[str]
    characters: list[int]
    maps: Maps
    heads: list[tuple[int, int]]


def draw(models: list[Panels]) -> tuple[bytes, bytes]:
    """A PNG and an SVG file. One scale of colours for all maps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from lm.report.pictures import saved

    columns = [math.ceil(math.sqrt(len(one.heads))) for one in models]
    rows = max(math.ceil(len(one.heads) / wide) for one, wide in zip(models, columns, strict=True))
    side = 4.2 if min(len(one.tokens) for one in models) <= LABELLED else 2.6
    colours, kind = _colours(models)
    with rc_context(STYLE):
        figure = Figure(figsize=(side * sum(columns) + 0.9, (side + 0.3) * rows + 1.2), layout="constrained")
        *parts, beside = figure.subfigures(1, len(models) + 1, width_ratios=[*columns, 0.9 / side])
        for part, one, wide in zip(parts, models, columns, strict=True):
            part.suptitle(f"{one.name}\n{one.said}", fontsize=9, parse_math=False)
            grid = part.subplots(math.ceil(len(one.heads) / wide), wide, squeeze=False)
            for axes in grid.flat[len(one.heads) :]:
                axes.set_visible(False)
            for place, (axes, (layer, head)) in enumerate(zip(grid.flat, one.heads, strict=False)):
                image = axes.imshow(_clipped(one.maps.weights[layer, head], colours), norm=colours, cmap=kind, interpolation="nearest")
                axes.set_title(f"layer {layer}, head {head}", fontsize=8)
                _label(axes, one, left=place % wide == 0, bottom=place + wide >= len(one.heads))
        figure.colorbar(image, cax=beside.add_axes((0.1, 0.2, 0.2, 0.6)), label="weight")
        return saved(figure, "png", dpi=130), saved(figure, "svg").encode()


def _colours(models: list[Panels]) -> tuple["Normalize", str]:
    """The scale of colours and its map: logarithmic, on both sides of 0 where weights are negative."""
    from matplotlib.colors import LogNorm, SymLogNorm

    shown = np.concatenate([one.maps.weights[layer, head].ravel() for one in models for layer, head in one.heads])
    shown = shown[np.isfinite(shown)]
    largest = float(np.abs(shown).max(initial=0.0)) or 1.0
    if (shown < 0).any():
        return SymLogNorm(largest / 10**DECADES, vmin=-largest, vmax=largest), "RdBu_r"
    return LogNorm(largest / 10**DECADES, largest), "viridis"


def _clipped(weights: np.ndarray, colours: "Normalize") -> np.ndarray:
    """Weights below the scale have its lowest colour, that of 0; what is not seen has none."""
    return np.clip(weights, colours.vmin, colours.vmax)


def _label(axes: "Axes", one: Panels, left: bool, bottom: bool) -> None:
    """Each token's text if they are few, else some positions: of the token, and in brackets of its first character in the text; written
    once for a row or column of panels, at the `left` one and the `bottom` one."""
    count, size = len(one.tokens), one.maps.size
    if count <= LABELLED:
        ticks, labels = range(count), [printable(token) for token in one.tokens]
    else:
        marks = np.unique(np.linspace(0, count - 1, 5).round().astype(int) // size * size)
        ticks, labels = marks / size, [f"{number(mark)} ({number(one.characters[mark])})" for mark in marks]
    text, words = {"fontsize": 6, "parse_math": False}, "" if count <= LABELLED else ", token (character)"
    axes.set_xticks(ticks, labels if bottom else [""] * len(labels), rotation=90, **text)
    axes.set_yticks(ticks, labels if left else [""] * len(labels), **text)
    if bottom:
        axes.set_xlabel(f"key{words}", fontsize=7)
    if left:
        axes.set_ylabel(f"query{words}", fontsize=7)
    axes.tick_params(length=2)


def printable(token: str) -> str:
    """A token's text as a label shows it."""
    return "".join("\u00b7" if letter == " " else letter if letter.isprintable() else repr(letter)[1:-1] for letter in token) or "-"
