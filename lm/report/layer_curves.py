"""Curves of quantities that are logged by layer and head while training: normalizers' parameters, and those of `log.dynamics`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lm.report.pictures import Panel, Picture, Trace, token_unit
from lm.runs.folder import METRICS, read_metrics
from lm.runs.record import RunRecord
from lm.schema import Plain

PARAMETERS = "normalizer/"  # beginning of the names of normalizers' parameters
GRADIENTS = "train/grad_norm"
POINTS = 250  # most points of a curve in a picture
_NAME = re.compile(r"(.+)/layer(\d+)(?:/(head\d+|rms))?")
_LENGTH = re.compile(r"logit_scale/n(\d+)")
_TITLES = {
    GRADIENTS: "Gradient norm before clipping",
    "largest_score": "Largest score",
    "logit_scale/slope": "Logit scale: a of a ln n + b",
    "logit_scale/intercept": "Logit scale: b of a ln n + b",
}


@dataclass(frozen=True, eq=False)
class LayerCurve:
    """One quantity of one layer: by tokens seen, (points,), and by head, (points, heads); NaN where it was not finite.

    `columns` names the heads; what has none has one column without a name.
    """

    tokens: np.ndarray
    values: np.ndarray
    columns: tuple[str, ...]


def layer_curves(lines: Iterable[dict[str, Plain]]) -> dict[str, dict[int, LayerCurve]]:
    """Curves by quantity, such as `largest_score`, and layer; of a step that a resumed run logged twice the last line counts."""
    logged: dict[str, dict[int, dict[str, dict[int, tuple[float, float]]]]] = {}
    for line in lines:
        for name, value in line.items():
            if match := _NAME.fullmatch(name):
                columns = logged.setdefault(match[1], {}).setdefault(int(match[2]), {})
                columns.setdefault(match[3] or "", {})[line["step"]] = line["tokens"], np.nan if value is None else value
    by_name = {quantity: logged[quantity] for quantity in sorted(logged, key=order)}
    return {quantity: {layer: _curve(columns) for layer, columns in sorted(layers.items())} for quantity, layers in by_name.items()}


def _curve(columns: dict[str, dict[int, tuple[float, float]]]) -> LayerCurve:
    steps = sorted(set.intersection(*(set(points) for points in columns.values())))
    tokens, values = np.array([[points[step] for step in steps] for points in columns.values()], dtype=float).transpose(2, 1, 0)
    return LayerCurve(tokens[:, 0], values, tuple(columns))


def order(quantity: str) -> list[tuple[bool, int, str]]:
    """Sort key of quantities: their names, in which numbers count as numbers."""
    parts = re.split(r"(\d+)", quantity)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def title(quantity: str) -> str:
    """A quantity in words, as at the head of its panel."""
    if match := _LENGTH.fullmatch(quantity):
        return f"Logit scale of a query that sees {int(match[1]):,} keys"
    return _TITLES.get(quantity, f"Parameter {quantity.removeprefix(PARAMETERS)} of the normalizer")


def panel(quantity: str, x_label: str, traces: list[Trace]) -> Panel:
    """The panel of a quantity; gradient norms, of which steps may be many times larger than others, are on a logarithmic axis."""
    return Panel(title(quantity), x_label, quantity, traces, log_y=quantity == GRADIENTS)


def by_layer(run: RunRecord) -> Picture | None:
    """A panel a quantity, a line a layer: the median over heads, and a band from the least to the largest; None: nothing is logged.

    Of more than `POINTS` points the line is the median over some in a row, and the band covers them all, so that no spike is lost.
    """
    logged = layer_curves(read_metrics(run.folder / METRICS)[0])
    curves = [curve for layers in logged.values() for curve in layers.values()]
    if not curves:
        return None
    unit, label = token_unit(max(curve.tokens[-1] for curve in curves))
    panels = [panel(quantity, label, [_band(layer, curve, unit) for layer, curve in layers.items()]) for quantity, layers in logged.items()]
    names = [f"layer {layer}" for layer in range(1 + max(layer for layers in logged.values() for layer in layers))]
    caption = "Lines: the median over the heads of a layer. Bands: from the least to the largest of them"
    caption += "; where steps are drawn together, the median and the range of all."
    return Picture(panels, names, caption)


def _band(layer: int, curve: LayerCurve, unit: float) -> Trace:
    together = -(-len(curve.tokens) // POINTS)
    groups = np.split(np.arange(len(curve.tokens)), range(together, len(curve.tokens), together))
    with np.errstate(invalid="ignore"):
        low, middle, high = (np.array([of(curve.values[group]) for group in groups]) for of in (np.min, np.median, np.max))
    x = np.array([curve.tokens[group].mean() for group in groups]) / unit
    return Trace(layer, f"layer {layer}, median of {len(curve.columns)}", x, middle, "mean", low, high)
