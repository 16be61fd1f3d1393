"""The picture of diagnostics: each statistic by the number of visible keys with maps of heads, and heads against closed forms."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lm.diagnostics.attention_rows import HEAD, KEYS, LEAST_KEYS, NO_FIRST
from lm.diagnostics.sparsity import condensation_scale, exp_sparsity, identity_sparsity, relu2_sparsity, relu_sparsity, simulated_sparsity
from lm.report.pictures import Map, Panel, Picture, Trace, logarithmic_ticks
from lm.runs.evaluations import Series, number

CLOSED, STD, MEAN, DIFFERENCE, CONDENSED = (
    "S, closed form", "score standard deviation", "score mean", "S minus closed form", "queries beyond condensation",
)  # fmt: skip
POINTS = 60  # points of a curve
PANEL_SIZE = 4.8, 3.4  # inches
Heads = dict[str, np.ndarray]  # by metric: all heads of all layers, NaN where it is not defined


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
    theory = against_theory(series, settings)
    one_row = [panel for row in theory for panel in row]
    rows += [one_row] if 0 < len(one_row) <= columns else theory
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


# ---------------------------------------------------------------- heads against theory


def against_theory(series: Sequence[Series], settings: list[str]) -> list[list[Panel]]:
    """S of e^score by the spread of scores, of other maps by their ratio of mean and spread, and S by its closed form: a panel for each
    that there are heads for, and below it the same without the first token; nothing if there are no closed forms."""
    if not any(each.metric == CLOSED for each in series):
        return []
    keys = LEAST_KEYS, next(each.axis.values[-1] for each in series if each.axis and each.axis.name == KEYS)
    rows = {ending: _heads(series, ending) for ending in ("", NO_FIRST)}
    columns = [(x, describe) for x, describe in PANELS if any(np.isfinite(x(heads) + heads[CLOSED]).any() for heads in rows[""].values())]
    return [[_against(heads, ending, x, describe, keys, settings) for x, describe in columns] for ending, heads in rows.items()]


def _against(
    heads: dict[str, Heads],
    ending: str,
    x: Callable[[Heads], np.ndarray],
    describe: "Callable[[float, tuple[int, float]], _Theory]",
    keys: tuple[int, float],
    settings: list[str],
) -> Panel:
    traces = []
    for place, (setting, values) in enumerate(heads.items()):
        at, measured = x(values), values[CLOSED] + values[DIFFERENCE]
        known = np.isfinite(at) & np.isfinite(measured)
        traces.append(Trace(settings.index(setting), setting, at[known], measured[known], "dots", hollow=place > 0))
    x_label, x_range, curves = describe(max(np.nanmax(x(values), initial=1.0) for values in heads.values()), keys)
    return Panel(f"S{ending}, by head", x_label, f"S measured{ending}", [*traces, *curves], x_range=x_range, y_range=(0, 1.02))


def _heads(series: Sequence[Series], ending: str) -> dict[str, Heads]:
    """Means over queries by setting, of all keys together."""
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    wanted = {name + ending: name for name in (CLOSED, STD, MEAN, DIFFERENCE)} | {CONDENSED: CONDENSED}
    for each in series:
        if each.axis and each.axis.name == HEAD and "," not in each.what and each.metric in wanted:
            parts.setdefault(each.setting, {}).setdefault(wanted[each.metric], []).append(each.means)
    heads = {setting: {name: np.concatenate(some) for name, some in metrics.items()} for setting, metrics in parts.items()}
    for metrics in heads.values():
        nowhere = np.full(len(metrics[STD]), np.nan)
        metrics |= {name: metrics.get(name, nowhere) for name in (CLOSED, DIFFERENCE, CONDENSED)}
    return heads


_Theory = tuple[str, tuple[float, float] | None, list[Trace]]  # label and range of the x axis, and curves


def _theory(label: str, x: torch.Tensor | tuple[float, float], y: torch.Tensor | tuple[float, float], dashes: int) -> Trace:
    return Trace(-1, label, np.asarray(x), np.asarray(y), "mean", dashes=dashes, keyed=True)


def _exp(largest: float, keys: tuple[int, float]) -> _Theory:
    """For e^score: the closed form, S of so many Gaussian scores, and the spread where these condense."""
    scale = torch.linspace(0, 1.1 * largest, POINTS, dtype=torch.float64)
    curves = [_theory("closed form, e^score", scale, exp_sparsity(scale), 0)]
    for dashes, n in enumerate(keys, 1):
        curves.append(_theory(f"{number(n)} Gaussian scores", scale, simulated_sparsity(scale, int(n)), dashes))
        limit = condensation_scale(torch.tensor(float(n))).item()
        curves.append(_theory(f"condensation of {number(n)}", (limit, limit), (0, 1.02), dashes + 3))
    return "standard deviation of scores (logit scale)", None, curves


def _ratio(largest: float, keys: tuple[int, float]) -> _Theory:
    """For other maps: the closed forms that depend on the ratio of mean and standard deviation."""
    ratio, unit = torch.linspace(-4, 4, POINTS, dtype=torch.float64), torch.tensor(1.0)
    curves = {
        "relu(score)^2": relu2_sparsity(ratio, unit),
        "relu(score)": relu_sparsity(ratio, unit),
        "score": identity_sparsity(ratio, unit),
        "products of non-negative features": torch.where(ratio > 0, ratio / (1 + ratio.square()).sqrt(), torch.nan),
    }
    traces = [_theory(f"closed form, {name}", ratio, curve, dashes) for dashes, (name, curve) in enumerate(curves.items())]
    return "mean of scores over their standard deviation", (-4.2, 4.2), traces


def _both(largest: float, keys: tuple[int, float]) -> _Theory:
    """For any map: where S is its closed form."""
    return "S in closed form at the measured moments", (-0.02, 1.02), [_theory("equal", (0, 1), (0, 1), 0)]


PANELS: tuple[tuple[Callable[[Heads], np.ndarray], Callable[[float, tuple[int, float]], _Theory]], ...] = (  # x of heads, and curves
    (lambda heads: np.where(np.isfinite(heads[CONDENSED]), heads[STD], np.nan), _exp),
    (lambda heads: np.where(np.isfinite(heads[CONDENSED]), np.nan, heads[MEAN] / heads[STD]), _ratio),
    (lambda heads: heads[CLOSED], _both),
)
