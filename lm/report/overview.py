"""Picture of a comparison: loss while training, and a panel for each section that is over an axis."""

from collections.abc import Callable

import numpy as np

from lm.report.comparison import RunComparison
from lm.report.pictures import FIRST_POSITION, Panel, Picture, Trace, doublings, plain_ticks, smooth, token_unit
from lm.report.sections import Arm, Line, Section
from lm.report.tables import with_unit
from lm.runs.folder import Curve
from lm.statistics.intervals import FEWEST, Interval, mean_ends, sampled

NOTHING = np.empty(0)


def overview(comparison: RunComparison) -> Picture:
    """Training and validation loss by tokens; then each section over an axis, a line an arm, task and inference setting."""
    sections = [section for section in comparison.sections if section.shape != "number"]
    drawn = [_training(comparison), *(_section(comparison, section) for section in sections)]
    panels, captions, cuts = zip(*drawn, strict=True)
    sides = {1: ("Picture",), 2: ("Left", "Right")}.get(len(panels)) or [f"Panel {number}" for number in range(1, len(panels) + 1)]
    caption, footer = (" ".join(f"{side}: {text}" for side, text in zip(sides, texts, strict=True) if text) for texts in (captions, cuts))
    return Picture(panels, [f"{arm.label} ({_seeds(len(arm.runs))})" for arm in comparison.arms], caption, 3, footer=footer)


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _bands(words: list[str]) -> str:
    """The meaning of the bands of a panel; the words for a curve are empty where it has none."""
    joined = "; ".join(filter(None, dict.fromkeys(words)))
    return f"Bands: {joined}." if joined else ""


# ---------------------------------------------------------------- while training


def _training(comparison: RunComparison) -> tuple[Panel, str, str]:
    points = [len(run.training.tokens) for run in comparison.runs if len(run.training.tokens)]
    window = max(1, min(points, default=1) // 50) // 2 * 2 + 1
    last = max((curve.tokens[-1] for run in comparison.runs for curve in (run.training, run.validations) if len(curve.tokens)), default=1)
    unit, label = token_unit(last)
    traces, highs, bands, marks = [], [], [], {}
    for index, arm in enumerate(comparison.arms):
        curves = ("seed", window, [run.training for run in arm.runs]), ("mean", 1, [run.validations for run in arm.runs])
        for kind, over, alike in curves:
            tokens, losses = _shared(alike)
            if not len(tokens):
                continue
            loss, ends = smooth(losses.mean(axis=0), over), (None, None)
            if kind == "mean" and len(losses) > 1:
                ends = losses.min(axis=0), losses.max(axis=0)
                bands.append(f"lowest to highest of {_seeds(len(losses))}")
            what = "training" if kind == "seed" else "validation"
            traces.append(Trace(index, f"{arm.label}, {what}", tokens / unit, loss, kind, *ends))
            highs.append(loss[tokens >= 0.05 * tokens[-1]])
        batch = arm.runs[0].flat.get("optim.batch_tokens") or 0
        marks |= {step * batch / unit: "normalizer swapped" for step, _ in arm.runs[0].phases[1:]}
    lows = [trace.y for trace in traces]
    low, high, top = _finite(lows, min), _finite(highs, max), _finite(lows, max)
    x_range = 0, last / unit * 1.01
    title, y_label = "While training", "loss (nats per token)"
    if low is None:
        return Panel(title, label, y_label, [], x_range=x_range), "no training metrics.", ""
    level, entropy = comparison.level("nats per token") or ("", None)
    y_range = _limit(low, high, max(1.08 * entropy, 1.3 * low) if entropy else 2 * low)
    smoothed = f"centred mean of {window} logged points" if window > 1 else "as logged"
    words = f"loss against tokens seen. Validation loss: markers. Thin lines: training loss, {smoothed}."
    if any(len(arm.runs) > 1 for arm in comparison.arms):
        words += " Arms with several seeds: mean over seeds, the band from the lowest to the highest seed."
    inside = bool(entropy) and low < entropy < y_range[1]
    words += f" The {level}, {entropy:.2f}, is outside the picture." if entropy and not inside else ""
    cut = f"Losses above {y_range[1]:.2f} (highest: {top:.4g}) are not shown." if top > y_range[1] else ""
    key = [Trace(-1, what, NOTHING, NOTHING, kind, keyed=True) for what, kind in (("training", "seed"), ("validation", "mean"))]
    levels = {entropy: f"{level} {entropy:.2f}"} if inside else {}
    panel = Panel(title, label, y_label, [*traces, *key], x_range=x_range, y_range=y_range, marks=marks, levels=levels)
    return panel, words, f"{_bands(bands)} {cut}".strip()


def _shared(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens logged by every curve that has any, (points,), and the losses there, (curves, points)."""
    curves = [curve for curve in curves if len(curve.tokens)]
    if not curves:
        return NOTHING, np.empty((0, 0))
    tokens = curves[0].tokens
    for curve in curves[1:]:
        tokens = np.intersect1d(tokens, curve.tokens)
    return tokens, np.array([curve.loss[np.isin(curve.tokens, tokens)] for curve in curves])


# ---------------------------------------------------------------- sections


def _section(comparison: RunComparison, section: Section) -> tuple[Panel, str, str]:
    first = section.first
    drawn = [each for index, arm in enumerate(comparison.arms) for line in section.lines if (each := _line(index, arm, section, line))]
    lines, bands = [trace for trace, _ in drawn], _bands([band for _, band in drawn])
    traces = list(lines)
    if len(section.of) > 1 or {line.setting for line in section.lines} - {"", "as trained"}:
        traces += [Trace(-1, of, NOTHING, NOTHING, "mean", dashes=number, keyed=True) for number, of in enumerate(section.of)]
    levels = {
        level: f"{name} {level:.1%}" if first.unit == "fraction" else f"{name} {level:.2f}"
        for series in section.series.values() for name, level in series.references.items()
    }  # fmt: skip
    y_range, cut = ((-0.02, 1.02), "") if first.unit == "fraction" else _y_range(comparison, section, lines)
    ticks, x_range = _ticks(section, lines)
    panel = Panel(
        section.title, first.axis.label, with_unit(", ".join(section.metrics), first.unit), traces, ticks, 2 if first.axis.log else 0,
        x_range=x_range, y_range=y_range, marks={length: f"training length {length:,}" for length in section.seq_lens}, levels=levels,
    )  # fmt: skip
    words = first.shown.caption + (f" ({'; '.join(section.of)})" if any(line.what for line in section.lines) else "")
    words += f", from position {FIRST_POSITION}" if first.bins else ""
    how = f"Intervals are {section.how}." if section.how else ""
    lost = [each.label for each in lines if not np.isfinite(each.y).all()]
    ends = [f"Not finite at some places: {'; '.join(lost)}."] if lost else []
    ends += [f"Dotted, if any: {first.shown.levels}."] if first.shown.levels else []
    return panel, " ".join(filter(None, [f"{words}.", bands, how, *ends])), f"{bands} {cut}".strip()


def _line(index: int, arm: Arm, section: Section, line: Line) -> tuple[Trace, str] | None:
    """An arm's line, with the intervals of its points; of bins the middles, and for several seeds from the lowest to the highest. And what
    its band is, in words; empty if it has none."""
    series = section.of_arm(arm, line)
    if not series:
        return None

    def trace(x: np.ndarray, mean: np.ndarray, low: np.ndarray, high: np.ndarray, band: str) -> tuple[Trace, str]:
        of = ", ".join(line.of)
        label, ends = ", ".join(filter(None, (arm.label, of))), (low, high) if band else (None, None)
        return Trace(index, label, x, mean, "mean", *ends, dashes=section.of.index(of)), band

    if section.shape == "points":
        means = {place: mean for place in section.places if (mean := section.mean(arm, line, place)) is not None}
        intervals = [section.interval(arm, line, place) or Interval(mean, mean, mean) for place, mean in means.items()]
        bands = [] if series[0].control else dict.fromkeys(f"95% interval over {each.over}" for each in intervals if each.over)
        x, ends = np.array([section.places[place][0] for place in means]), np.array([each.drawn() for each in intervals]).T
        return trace(x, *ends, "; ".join(bands)) if intervals else None
    edges = np.array(series[0].axis.values)
    series = [each for each in series if np.array_equal(each.axis.values, edges)]
    x, keep = np.sqrt(np.maximum(edges[:-1], 0.5) * edges[1:]), edges[:-1] >= min(FIRST_POSITION, edges[-2])
    values = np.array([each.means for each in series])[:, keep]  # (seeds, bins)
    low, high, band = values.min(axis=0), values.max(axis=0), f"lowest to highest of {_seeds(len(series))}" if len(series) > 1 else ""
    if len(series) == 1 and series[0].interval != "none" and len(np.unique(series[0].samples[0].groups)) >= FEWEST:
        (sample,) = series[0].samples
        ends = mean_ends(sample.values[:, keep], sample.weights, sample.groups)
        low, high = (np.where(np.isinf(some), np.nan, some) for some in ends)
        band = f"95% interval over {sampled(sample.groups)}, 1 seed"
    return trace(x[keep], values.mean(axis=0), low, high, band)


def _ticks(section: Section, lines: list[Trace]) -> tuple[dict[float, str], tuple[float, float] | None]:
    """Ticks and range of a logarithmic axis, at each doubling or at each of the points; none of a linear one."""
    values = sorted({value for series in section.series.values() for value in series.axis.values})
    if not section.first.axis.log:
        return {}, None
    if section.shape != "bins":
        return plain_ticks(values), None
    x_range = min(FIRST_POSITION, *(each.x[0] for each in lines)), values[-1]
    return doublings(*x_range), x_range


def _y_range(comparison: RunComparison, section: Section, lines: list[Trace]) -> tuple[tuple[float, float] | None, str]:
    """The range up to somewhat above a level that the metric can be compared with, if there is one, and what leaves the picture."""
    trained = max(section.seq_lens, default=0)
    low = _finite([each.y if each.low is None else each.low for each in lines], min)
    best = _finite([each.y[each.x <= trained] for each in lines], min)
    level = comparison.level(section.first.unit)
    if low is None or level is None or section.first.better == "higher":
        return None, ""
    limit = max(1.08 * level[1], 1.6 * best if best else low)
    high = _finite([each.y if each.high is None else each.high for each in lines], max)
    y_range = _limit(low, min(high, limit), limit)
    highest = {each.label: _finite([each.y], max) or 0 for each in lines}
    above = [f"{label} (highest: {top:.4g})" for label, top in highest.items() if top > y_range[1]]
    return y_range, f"Leaving the picture: {'; '.join(above)}." if above else ""


def _finite(arrays: list[np.ndarray], pick: Callable[[np.ndarray], float]) -> float | None:
    """The least or greatest finite value (`pick` is min or max)."""
    values = np.concatenate(arrays) if arrays else NOTHING
    values = values[np.isfinite(values)]
    return float(pick(values)) if len(values) else None


def _limit(low: float, high: float | None, limit: float) -> tuple[float, float]:
    """A y range for data from `low` to `high`, which does not reach far above `limit`."""
    high = max(min(high if high is not None else limit, limit), low + 1e-3)
    pad = 0.06 * (high - low)
    return low - pad, high + pad
