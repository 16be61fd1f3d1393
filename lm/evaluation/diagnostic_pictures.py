"""The picture of diagnostics: statistics by the number of visible keys, maps of heads, and sparsity of heads' weights
against theory.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lm.diagnostics.attention_rows import HEAD, KEYS, MIN_KEYS, NO_FIRST
from lm.diagnostics.sparsity import (
    condensation_scale,
    exp_sparsity,
    identity_sparsity,
    relu2_sparsity,
    relu_sparsity,
    simulated_sparsity,
)
from lm.report.pictures import Map, Panel, Picture, Trace, logarithmic_ticks
from lm.runs.evaluations import Series, number

CLOSED_FORM, STD, MEAN, DIFFERENCE, BEYOND_CONDENSATION = (
    "S, closed form", "score standard deviation", "score mean", "S minus closed form", "queries beyond condensation",
)  # fmt: skip
CURVE_POINTS = 60  # points of a curve of theory
PANEL_SIZE = 4.8, 3.4  # inches
Heads = dict[str, np.ndarray]  # by metric: its values for all heads of all layers, NaN where it is not defined
KeyCounts = tuple[int, float]  # the fewest and the most visible keys
Frame = tuple[str, tuple[float, float] | None, list[Trace]]  # label and range of the x axis, and curves of theory
# heads -> x; (largest x, keys) -> frame
HeadsAxis, FrameFunction = (Callable[[Heads], np.ndarray], Callable[[float, KeyCounts], Frame])


def diagnostics_picture(series: Sequence[Series]) -> Picture | None:
    """A picture with a row for each statistic in reports, with its curve and each model's map of heads; None if there
    is nothing to show.

    The panels of `sparsity_panels` come last.
    """
    curves = [entry for entry in series if entry.axis and entry.axis.name == KEYS and entry.about.title]
    settings = [*dict.fromkeys(entry.setting for entry in curves)]
    if not settings:
        return None
    rows: list[list[Panel | Map | None]] = []
    for metric in dict.fromkeys(curve.metric for curve in curves):
        metric_curves = [curve for curve in curves if curve.metric == metric]
        rows.append(
            [
                _curve_panel(metric_curves, settings),
                *_maps(metric, series, [curve.setting for curve in metric_curves], settings),
            ]
        )
    columns = max(map(len, rows))
    sparsity_rows = sparsity_panels(series, settings)
    sparsity_row = [panel for row in sparsity_rows for panel in row]
    rows += [sparsity_row] if 0 < len(sparsity_row) <= columns else sparsity_rows
    columns = max(map(len, rows))
    panels = [panel for row in rows for panel in row + [None] * (columns - len(row))]
    return Picture(panels, settings, "", columns, PANEL_SIZE)


def _curve_panel(curves: list[Series], settings: list[str]) -> Panel:
    traces = [
        Trace(settings.index(curve.setting), curve.setting, curve.x, curve.means, "mean",
            dashes=curve.about.control,
              hollow=curve.about.control) for curve in curves
    ]  # fmt: skip
    example = curves[0]
    base, ticks = logarithmic_ticks(example.x.tolist())
    return Panel(
        example.metric, "visible keys n", example.unit, traces, ticks, base, marks={example.seq_len: "training length"}
    )


def _maps(metric: str, series: Sequence[Series], curve_settings: list[str], settings: list[str]) -> list[Map | None]:
    """Each model's map of a metric, layers from top to bottom, heads from left to right, on one scale of colours; None
    without values.
    """
    layers = [
        layer
        for layer in series
        if layer.axis and layer.axis.name == HEAD and layer.metric == metric and "," not in layer.task
    ]
    heads = {
        setting: np.array([layer.means for layer in layers if layer.setting == setting]) for setting in curve_settings
    }
    finite_values = np.concatenate([values[np.isfinite(values)] for values in heads.values()])
    low, top = (float(finite_values.min()), float(finite_values.max())) if len(finite_values) else (0.0, 1.0)
    return [
        Map(f"{metric}\n{setting}", "head", [*map(str, range(heads[setting].shape[1]))], [*map(str,
            range(len(heads[setting])))],
            heads[setting], top, low, shows_values=False, y_label="layer") if len(heads.get(setting, ())) else None
        for setting in settings
    ]  # fmt: skip


# ---------------------------------------------------------------- heads against theory


def sparsity_panels(series: Sequence[Series], settings: list[str]) -> list[list[Panel]]:
    """Rows of panels of each head's sparsity S = E|a| / sqrt(E[a^2]), E the mean over keys of its weights a, with
    closed forms of S.

    One row is for all keys, one leaves first tokens out. The x axis of the first column, for weights e^score, is the
    scores' standard deviation. In the second, for other weights, it is the scores' mean divided by their standard
    deviation. In the third, for all weights, it is the closed form of S. Columns without heads are left out; if no
    series has a closed form, the result is [].
    """
    if not any(entry.metric == CLOSED_FORM for entry in series):
        return []
    keys = MIN_KEYS, next(entry.x[-1] for entry in series if entry.axis and entry.axis.name == KEYS)
    rows = {ending: _head_metrics(series, ending) for ending in ("", NO_FIRST)}
    columns = [
        (x, frame)
        for x, frame in PANELS
        if any(np.isfinite(x(heads) + heads[CLOSED_FORM]).any() for heads in rows[""].values())
    ]
    return [
        [_theory_panel(heads, ending, x, frame, keys, settings) for x, frame in columns]
        for ending, heads in rows.items()
    ]


def _theory_panel(
    heads: dict[str, Heads], ending: str, x: HeadsAxis, frame: FrameFunction, keys: KeyCounts, settings: list[str]
) -> Panel:
    traces = []
    for index, (setting, values) in enumerate(heads.items()):
        x_values, sparsity = x(values), values[CLOSED_FORM] + values[DIFFERENCE]
        is_finite = np.isfinite(x_values) & np.isfinite(sparsity)
        traces.append(
            Trace(settings.index(setting), setting, x_values[is_finite], sparsity[is_finite], "dots", hollow=index > 0)
        )
    x_label, x_range, curves = frame(max(np.nanmax(x(values), initial=1.0) for values in heads.values()), keys)
    return Panel(
        f"S{ending}, by head", x_label, f"S measured{ending}", [*traces, *curves], x_range=x_range, y_range=(0, 1.02)
    )


def _head_metrics(series: Sequence[Series], ending: str) -> dict[str, Heads]:
    """The metrics that `sparsity_panels` draws, as means over all queries for each head, by model and inference
    setting, then by metric.

    ending: the end of the metrics' names: empty for metrics that count all keys, `NO_FIRST` for metrics that leave out
    first tokens.
    """
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    metric_names = {name + ending: name for name in (CLOSED_FORM, STD, MEAN, DIFFERENCE)} | {
        BEYOND_CONDENSATION: BEYOND_CONDENSATION
    }
    for entry in series:
        if entry.axis and entry.axis.name == HEAD and "," not in entry.task and entry.metric in metric_names:
            parts.setdefault(entry.setting, {}).setdefault(metric_names[entry.metric], []).append(entry.means)
    heads = {
        setting: {name: np.concatenate(arrays) for name, arrays in metrics.items()}
        for setting, metrics in parts.items()
    }
    for metrics in heads.values():
        nans = np.full(len(metrics[STD]), np.nan)
        metrics |= {name: metrics.get(name, nans) for name in (CLOSED_FORM, DIFFERENCE, BEYOND_CONDENSATION)}
    return heads


def _theory_trace(
    label: str, x: torch.Tensor | tuple[float, float], y: torch.Tensor | tuple[float, float], dashes: int
) -> Trace:
    return Trace(-1, label, np.asarray(x), np.asarray(y), "mean", dashes=dashes, in_legend=True)


def _exp_frame(x_max: float, keys: KeyCounts) -> Frame:
    """Label and range of the x axis (scores' standard deviation), curves of the sparsity S (`sparsity_panels`) of
    weights e^score, and lines at `condensation_scale`, where S leaves its closed form."""
    std = torch.linspace(0, 1.1 * x_max, CURVE_POINTS, dtype=torch.float64)
    curves = [_theory_trace("closed form, e^score", std, exp_sparsity(std), 0)]
    for dashes, n in enumerate(keys, 1):
        curves.append(_theory_trace(f"{number(n)} Gaussian scores", std, simulated_sparsity(std, int(n)), dashes))
        condensation_std = condensation_scale(torch.tensor(float(n))).item()
        curves.append(
            _theory_trace(f"condensation of {number(n)}", (condensation_std, condensation_std), (0, 1.02), dashes + 3)
        )
    return "standard deviation of scores (logit scale)", None, curves


def _ratio_frame(x_max: float, keys: KeyCounts) -> Frame:
    """Label and range of the x axis (scores' mean over their standard deviation), and closed forms of the sparsity S
    (`sparsity_panels`) for weights other than e^score."""
    ratio, unit_std = torch.linspace(-4, 4, CURVE_POINTS, dtype=torch.float64), torch.tensor(1.0)
    curves = {
        "relu(score)^2": relu2_sparsity(ratio, unit_std),
        "relu(score)": relu_sparsity(ratio, unit_std),
        "score": identity_sparsity(ratio, unit_std),
        "products of non-negative features": torch.where(ratio > 0, ratio / (1 + ratio.square()).sqrt(), torch.nan),
    }
    traces = [
        _theory_trace(f"closed form, {name}", ratio, curve, dashes)
        for dashes, (name, curve) in enumerate(curves.items())
    ]
    return "mean of scores over their standard deviation", (-4.2, 4.2), traces


def _identity_frame(x_max: float, keys: KeyCounts) -> Frame:
    """Label and range of the x axis (the closed form of the sparsity S, `sparsity_panels`), and the line on which
    measured S equals it.
    """
    return "S in closed form at the measured moments", (-0.02, 1.02), [_theory_trace("equal", (0, 1), (0, 1), 0)]


PANELS: tuple[tuple[HeadsAxis, FrameFunction], ...] = (
    (lambda heads: np.where(np.isfinite(heads[BEYOND_CONDENSATION]), heads[STD], np.nan), _exp_frame),
    (lambda heads: np.where(np.isfinite(heads[BEYOND_CONDENSATION]), np.nan, heads[MEAN] / heads[STD]), _ratio_frame),
    (lambda heads: heads[CLOSED_FORM], _identity_frame),
)
