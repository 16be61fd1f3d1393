"""The picture of diagnostics: statistics by the number of visible keys, and maps of heads."""

from collections.abc import Iterator, Sequence

import numpy as np

from lm.diagnostics.attention_rows import HEAD, KEYS
from lm.report.pictures import Map, Panel, Picture, Trace, logarithmic_ticks
from lm.runs.evaluations import Series

PANEL_SIZE = 4.8, 3.4  # inches


def diagnostics_picture(series: Sequence[Series]) -> Picture | None:
    """A picture with a row for each statistic in reports, with its curve and each model's map of heads; None if there
    is nothing to show.
    """
    curves = [entry for entry in series if entry.axis and entry.axis.name == KEYS and entry.about.title]
    settings = [*dict.fromkeys(entry.setting for entry in curves)]
    panels: list[Panel | Map | None] = []
    for metric in dict.fromkeys(curve.metric for curve in curves):
        traces = [
            Trace(settings.index(curve.setting), curve.setting, curve.x, curve.means, "mean",
                dashes=curve.about.control, hollow=curve.about.control)
            for curve in curves if curve.metric == metric
        ]  # fmt: skip
        unit = next(curve.unit for curve in curves if curve.metric == metric)
        base, ticks = logarithmic_ticks(traces[0].x.tolist())
        marks = {curves[0].seq_len: "training length"}
        panels.append(Panel(metric, "visible keys n", unit, traces, ticks, base, marks=marks))
        panels += _maps(metric, series, settings)
    return Picture(panels, settings, "", 1 + len(settings), PANEL_SIZE) if panels else None


def _maps(metric: str, series: Sequence[Series], settings: list[str]) -> Iterator[Map | None]:
    """Each model's map of a metric, layers from top to bottom, heads from left to right, on one scale of colours; None
    without values.
    """
    layers = [
        entry
        for entry in series
        if entry.axis and entry.axis.name == HEAD and entry.metric == metric and "," not in entry.task
    ]
    values = np.concatenate([layer.means for layer in layers])
    values = values[np.isfinite(values)]
    top, low = float(values.max()), float(values.min())
    for setting in settings:
        heads = np.array([layer.means for layer in layers if layer.setting == setting])
        labels = [[*map(str, range(size))] for size in heads.shape[::-1]]
        yield (
            Map(f"{metric}\n{setting}", "head", *labels, heads, top, low, shows_values=False, y_label="layer")
            if len(heads)
            else None
        )
