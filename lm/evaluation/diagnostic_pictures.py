"""The picture of diagnostics: each statistic by the number of visible keys, with maps of heads."""

from collections.abc import Sequence

import numpy as np

from lm.diagnostics.attention_rows import HEAD, KEYS
from lm.report.pictures import Map, Panel, Picture, Trace, logarithmic_ticks
from lm.runs.evaluations import Series

PANEL_SIZE = 4.8, 3.4  # inches


def diagnostics(series: Sequence[Series]) -> Picture | None:
    """A row for each statistic that reports show: its curve and a map of heads for each model; None if none is defined anywhere.

    What is derived of several statistics, and comes as several lines of one name, has a row with a panel for each model.
    """
    shown = [each for each in series if each.axis and each.axis.name != HEAD and each.shown]
    curves = [each for each in shown if each.axis.name == KEYS and not each.what]
    several = {each.metric for each in shown if each.what and np.isfinite(each.means).any()}
    lines = [each for each in shown if each.what and each.metric in several]
    settings = [*dict.fromkeys(each.setting for each in curves + lines)]
    if not settings:
        return None
    rows: list[list[Panel | Map | None]] = []
    for metric in dict.fromkeys(each.metric for each in curves):
        of_metric = [each for each in curves if each.metric == metric]
        rows.append([_curve(of_metric, settings), *_maps(metric, series, [each.setting for each in of_metric], settings)])
    for metric in dict.fromkeys(each.metric for each in lines):
        rows.append(_derived([each for each in lines if each.metric == metric], settings))
    columns = max(map(len, rows))
    panels = [panel for row in rows for panel in row + [None] * (columns - len(row))]
    return Picture(panels, settings, "", columns, PANEL_SIZE)


def _curve(lines: list[Series], settings: list[str]) -> Panel:
    traces = [
        Trace(settings.index(each.setting), each.setting, np.array(each.axis.values), each.means, "mean", dashes=each.control,
              hollow=each.control) for each in lines
    ]  # fmt: skip
    first = lines[0]
    base, ticks = logarithmic_ticks(first.axis.values)
    return Panel(first.metric, "visible keys n", first.unit, traces, ticks, base, marks={first.seq_len: "training length"})


def _maps(metric: str, series: Sequence[Series], measured: list[str], settings: list[str]) -> list[Map | None]:
    """Layers from the top to the bottom, heads from left to right, on one scale of colours; None for models without such heads."""
    by_layer = [each for each in series if each.axis and each.axis.name == HEAD and each.metric == metric and "," not in each.what]
    heads = {setting: np.array([each.means for each in by_layer if each.setting == setting]) for setting in measured}
    known = np.concatenate([some[np.isfinite(some)] for some in heads.values()])
    low, top = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    return [
        Map(f"{metric}\n{setting}", "head", [*map(str, range(heads[setting].shape[1]))], [*map(str, range(len(heads[setting])))],
            heads[setting], top, low, written=False, y_label="layer") if len(heads.get(setting, ())) else None
        for setting in settings
    ]  # fmt: skip


def _derived(lines: list[Series], settings: list[str]) -> list[Panel | Map | None]:
    """A panel for each model, on one scale, of lines told apart by what they are of."""
    known, axis = np.concatenate([each.means[np.isfinite(each.means)] for each in lines]), lines[0].axis
    log = bool(lines[0].unit != "fraction" and known.min() > 0 and known.max() > 100 * known.min())
    low, high = known.min(), known.max()
    spread = (high / low) ** 0.06 if log else 0.06 * (high - low) or 0.1
    y_range = (low / spread, high * spread) if log else (low - spread, high + spread)
    base, ticks = logarithmic_ticks(axis.values) if axis.log else (0, {})
    panels: list[Panel | Map | None] = []
    for setting in settings:
        curves = [each for each in lines if each.setting == setting]
        traces = [Trace(place, each.what, np.array(each.axis.values), each.means, "mean", keyed=True) for place, each in enumerate(curves)]
        title = f"{lines[0].metric}\n{setting}"
        panels.append(Panel(title, axis.name, lines[0].unit, traces, ticks, base, log, y_range=y_range) if curves else None)
    return panels
