"""The overview picture: loss while training, loss by position beyond the training length, and answers right by length."""

import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lm.evaluation.statistics import FEWEST, bootstrap_mean, groups_of, unit_resampled
from lm.report.comparison import Arm, Comparison, asked, lengths_asked, setting_of, share_right, ways_used
from lm.runs.record import ROLL_OUT, Curve

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, safe for colour blindness
_MARKERS = "osD^vP*"
_STYLES = ("-", "--", ":", "-.")
_GREY = "#555555"
_FIRST_POSITION = 16  # where the right panel begins
_SETTINGS = {
    "svg.hashsalt": "lm.report",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Overview:
    """The picture, 600 px a panel (PNG at twice that), its legend and footer as text, and its caption."""

    svg: str
    png: bytes
    legend: tuple[str, ...]
    footer: str
    caption: str


def overview(comparison: Comparison) -> Overview:
    """Training and validation loss by tokens; loss by position, a line an arm and way to use it; if any was asked, answers right.

    Rows of one length alone, of runs that were asked for answers, leave the second panel out.
    """
    panels = [_training]
    panels += [_by_position] if ways_used(comparison.arms) or not asked(comparison.arms) else []
    panels += [_answered] if asked(comparison.arms) else []
    width = 6 * len(panels)
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, 5), dpi=100)
        FigureCanvasAgg(figure)
        drawn = [draw(axes, comparison) for draw, axes in zip(panels, figure.subplots(1, len(panels)), strict=True)]
        sides = ("Left", "Middle", "Right") if len(panels) > 2 else ("Left", "Right")
        captions, cuts = (
            [f"{side}: {text}" for side, text in zip(sides, texts, strict=True) if text] for texts in zip(*drawn, strict=True)
        )
        legend = tuple(f"{arm.label} ({_seeds(len(arm.runs))})" for arm in comparison.arms)
        handles = [Line2D([], [], color=_COLOURS[i % 7], marker=_marker(i), linewidth=2.4, label=label) for i, label in enumerate(legend)]
        footer = textwrap.wrap(" ".join(cuts), 82 * len(panels))
        columns = min(len(handles), 4 if max(map(len, legend)) < 34 else 2)
        rows = -(-len(handles) // columns)
        height = 5.0 + 0.25 * (rows - 1) + 0.16 * len(footer)
        bottom, top = (0.05 + 0.16 * len(footer)) / height, (0.1 + 0.27 * rows) / height
        figure.set_size_inches(width, height)
        figure.set_layout_engine("constrained", rect=(0, bottom, 1, 1 - bottom - top), w_pad=0.12)
        figure.legend(handles=handles, loc="upper center", ncols=columns, fontsize=12)
        figure.text(0.012, 0.012, "\n".join(footer), fontsize=9, color=_GREY)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    return Overview(svg.getvalue(), png.getvalue(), legend, "\n".join(footer), " ".join(captions))


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def _bands(what: list[str]) -> str:
    """What the bands of a panel are, in words; the words for one curve are empty where it has none."""
    words = "; ".join(filter(None, dict.fromkeys(what)))
    return f"Bands: {words}." if words else ""


# ---------------------------------------------------------------- left panel


def _training(axes: Axes, comparison: Comparison) -> tuple[str, str]:
    points = [len(run.training.tokens) for arm in comparison.arms for run in arm.runs if len(run.training.tokens)]
    window = max(1, min(points, default=1) // 50) // 2 * 2 + 1
    last = max((c.tokens[-1] for arm in comparison.arms for r in arm.runs for c in (r.training, r.validations) if len(c.tokens)), default=1)
    unit, word = next(((size, word) for size, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")) if last >= size), (1, ""))
    lows, highs, bands, swaps = [], [], [], ""
    for index, arm in enumerate(comparison.arms):
        colour = _COLOURS[index % 7]
        tokens, losses = _shared([run.training for run in arm.runs])
        if len(tokens):
            loss = _smooth(losses.mean(axis=0), window)
            axes.plot(tokens / unit, loss, color=colour, linewidth=1.1, alpha=0.55)
            lows.append(loss)
            highs.append(loss[tokens >= 0.05 * tokens[-1]])
        for step, _ in arm.runs[0].phases[1:]:
            axes.axvline(step * (arm.runs[0].flat.get("optim.batch_tokens") or 0) / unit, color=colour, linestyle=":", linewidth=1.2)
            swaps = " Dotted: where the normalizer was swapped."
        tokens, losses = _shared([run.validations for run in arm.runs])
        if len(tokens):
            axes.plot(tokens / unit, losses.mean(axis=0), color=colour, marker=_marker(index), markersize=4, linewidth=1.5, zorder=3)
            if len(losses) > 1:
                axes.fill_between(tokens / unit, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.18, linewidth=0)
                bands.append(f"lowest to highest of {_seeds(len(losses))}")
            lows.append(losses.mean(axis=0))
            highs.append(losses.mean(axis=0)[tokens >= 0.05 * tokens[-1]])
    axes.set_title("While training")
    axes.set_xlabel(f"tokens seen ({word})" if word else "tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlim(0, last / unit * 1.01)
    entropy = _entropy(comparison)
    low, high = _finite(lows, min), _finite(highs, max)
    if low is None:
        _empty(axes, "no training metrics")
        return "no training metrics.", ""
    shown = _limit(axes, low, high, max(1.08 * entropy, 1.3 * low) if entropy else 2 * low)
    smoothed = f"centred mean of {window} logged points" if window > 1 else "as logged"
    ends = f" Validation loss: markers. Thin lines: training loss, {smoothed}.{swaps}"
    if any(len(arm.runs) > 1 for arm in comparison.arms):
        ends += " Arms with several seeds: mean over seeds, the band from the lowest to the highest seed."
    if entropy and low < entropy < shown:
        axes.axhline(entropy, color=_GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"unigram entropy {entropy:.2f}", (1, entropy), (-4, 4), axes.get_yaxis_transform(), textcoords="offset points",
            ha="right", va="bottom", color=_GREY, fontsize=9,
        )  # fmt: skip
    elif entropy:
        ends += f" The unigram entropy, {entropy:.2f}, is outside the picture."
    key = [Line2D([], [], color=_GREY, linewidth=1.1, alpha=0.7, label="training")]
    key.append(Line2D([], [], color=_GREY, linewidth=1.8, marker="o", markersize=4, label="validation"))
    axes.legend(handles=key, loc="best", fontsize=10)
    top = _finite(lows, max)
    cut = f"losses above {shown:.2f} (highest: {top:.4g}) are not shown." if top > shown else ""
    return f"loss against tokens seen.{ends}", f"{_bands(bands)} {cut}".strip()


def _shared(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens logged by every curve that has any, (points,), and the losses there, (curves, points)."""
    curves = [curve for curve in curves if len(curve.tokens)]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    tokens = curves[0].tokens
    for curve in curves[1:]:
        tokens = np.intersect1d(tokens, curve.tokens)
    return tokens, np.array([curve.loss[np.isin(curve.tokens, tokens)] for curve in curves])


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean, (points,); at the ends over the points there are. A value that isn't finite is left out."""
    good = np.isfinite(values)
    total, count = (
        np.convolve(x, np.ones(window))[window // 2 :][: len(values)] for x in (np.where(good, values, 0.0), good.astype(float))
    )
    return np.where(good, total / np.maximum(count, 1), np.nan)


# ---------------------------------------------------------------- right panel


def _by_position(axes: Axes, comparison: Comparison) -> tuple[str, str]:
    axes.set_title("By position in the row, beyond the training length")
    ways = ways_used(comparison.arms)
    curves = [
        (index, way, arm, *curve) for index, arm in enumerate(comparison.arms) for way in ways if (curve := _curve(arm, way)) is not None
    ]
    if not curves:
        _empty(axes, "no long-context evaluation")
        return "no long-context evaluation.", ""
    inside, lost = [], []
    trained = sorted({run.long_context.seq_len for arm in comparison.arms for run in arm.runs if run.long_context})
    for index, way, arm, x, mean, low, high, _ in curves:
        colour, style = _COLOURS[index % 7], _STYLES[min(ways.index(way), 3)]
        axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(x, mean, color=colour, linestyle=style, linewidth=1.8)
        inside.append(mean[x <= trained[-1]])
        if not np.isfinite(mean).all():
            lost.append(f"{arm.label}, {way}")
    low, best = _finite([c[5] for c in curves], min), _finite(inside, min)
    ends, cut = "", ""
    if low is not None:
        limit = max(1.08 * (_entropy(comparison) or 0), 1.6 * best if best else low)
        highest = _finite([c[6] for c in curves], max)
        shown = _limit(axes, low, min(highest, limit), limit)
        above = [f"{c[2].label}, {c[1]} (highest: {_finite([c[4]], max):.4g})" for c in curves if (_finite([c[4]], max) or 0) > shown]
        cut = f"leaving the picture: {'; '.join(above)}." if above else ""
    if lost:
        ends += f" Not finite at some positions: {'; '.join(lost)}."
    for length in trained:
        axes.axvline(length, color=_GREY, linewidth=1)
        axes.annotate(
            f"training length {length:,}", (length, 1), (-4, -2), axes.get_xaxis_transform(), textcoords="offset points",
            ha="right", va="top", rotation=90, color=_GREY, fontsize=9,
        )  # fmt: skip
    first, last = (
        min(_FIRST_POSITION, *(c[3][0] for c in curves)),
        max(run.long_context.length for a in comparison.arms for run in a.runs if run.long_context),
    )
    axes.set_xscale("log", base=2)
    axes.set_xlim(first, last)
    ticks = [2**power for power in range(31) if first <= 2**power <= last]
    axes.set_xticks(ticks, [f"{tick:,}" if tick < 10_000 else f"{tick // 1024}k" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("position in the row (tokens)")
    axes.set_ylabel("loss (nats per token)")
    if ways != ["as trained"]:
        handles = [Line2D([], [], color=_GREY, linestyle=_STYLES[min(i, 3)], linewidth=1.8, label=f"{way}") for i, way in enumerate(ways)]
        axes.legend(handles=handles, loc="best", fontsize=10)
    bands = _bands([c[7] for c in curves])
    return f"loss by position, mean over rows, from position {_FIRST_POSITION}. {bands}{ends}", f"{bands} {cut}".strip()


def _curve(arm: Arm, way: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, str] | None:
    """Positions (buckets' middles), mean loss, lower and upper end of the band, each (buckets,), and what the band is."""
    runs = [run for run in arm.runs if setting_of(run, way)]
    if not runs:
        return None
    edges = runs[0].long_context.bucket_edges
    runs = [run for run in runs if np.array_equal(run.long_context.bucket_edges, edges)]
    x = np.sqrt(np.maximum(edges[:-1], 0.5) * edges[1:])
    keep = edges[:-1] >= min(_FIRST_POSITION, edges[-2])
    values = np.array([setting_of(run, way).nll_by_row.mean(axis=0) for run in runs])[:, keep]  # (seeds, buckets)
    if len(runs) > 1:
        return x[keep], values.mean(axis=0), values.min(axis=0), values.max(axis=0), f"lowest to highest of {_seeds(len(runs))}"
    rows, documents = setting_of(runs[0], way).nll_by_row[:, keep], runs[0].long_context.document_by_row
    if len(rows) < FEWEST:
        return x[keep], values[0], values[0], values[0], ""
    unit = unit_resampled(len(np.unique(documents)), len(rows))
    return x[keep], values[0], *bootstrap_mean(rows, groups=groups_of(documents)), f"95% interval over {unit}, 1 seed"


# ---------------------------------------------------------------- answers


def _answered(axes: Axes, comparison: Comparison) -> tuple[str, str]:
    axes.set_title("Answers right, by length of the row")
    each, lengths = asked(comparison.arms), lengths_asked(comparison.arms)
    bands: list[str] = []
    for index, arm in enumerate(comparison.arms):
        for number, of in enumerate(each):
            points = [(length, share) for length in lengths if (share := share_right(arm, of, length))]
            if not points:
                continue
            x, (mean, low, high) = [length for length, _ in points], np.array([share.listed() for _, share in points]).T
            if "control" not in of[0]:
                axes.fill_between(x, low, high, color=_COLOURS[index % 7], alpha=0.13, linewidth=0)
                bands += [f"95% interval over {share.over}" for _, share in points]
            style = {"color": _COLOURS[index % 7], "marker": _marker(index), "linestyle": _STYLES[number % 4]}
            axes.plot(x, mean, markersize=4, linewidth=1.8, **style)
    for length in sorted({run.seq_len for arm in comparison.arms for run in arm.runs}):
        axes.axvline(length, color=_GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" if length < 10_000 else f"{length // 1024}k" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("length of the row (tokens)")
    axes.set_ylabel("share of answers right")
    names = [f"{task}, {way}" for task, way in each]
    if len(each) > 1:
        handles = [Line2D([], [], color=_GREY, linestyle=_STYLES[i % 4], linewidth=1.8, label=name) for i, name in enumerate(names)]
        axes.legend(handles=handles, loc="best", fontsize=10)
    answers = [one for arm in comparison.arms for run in arm.runs for one in run.answers if one.chance is not None]
    for chance, rolled_out in sorted({(one.chance, one.way.endswith(ROLL_OUT)) for one in answers}):
        axes.axhline(chance, color=_GREY, linestyle=":", linewidth=1)
        axes.annotate(
            f"chance{', roll-out' if rolled_out else ''} {chance:.1%}",
            (0, chance),
            (4, 3),
            axes.get_yaxis_transform(),
            textcoords="offset points",
            color=_GREY,
            fontsize=9,
        )
    how = "Wilson's over questions, for several seeds each end of Student's t over seeds that lies farther out"
    caption = (
        f"answers right by length of the row, after the right answers to earlier questions, or in a {ROLL_OUT} after the model's own "
        f"({'; '.join(names)}). {_bands(bands)} They are {how}. Grey line: the training length. "
        "Dotted, if any: chance, picking among the answers shown and not yet given."
    )
    return caption, _bands(bands)


# ---------------------------------------------------------------- all


def _entropy(comparison: Comparison) -> float | None:
    found = [run.unigram_entropy for arm in comparison.arms for run in arm.runs]
    return next((entropy for entropy in found if entropy is not None and np.isfinite(entropy)), None)


def _marker(arm: int) -> str:
    """Of an arm; arms of one colour differ in it."""
    return _MARKERS[(arm + arm // 7) % 7]


def _finite(arrays: list[np.ndarray], pick: Callable[[np.ndarray], float]) -> float | None:
    """The least or greatest finite value (`pick` is min or max)."""
    values = np.concatenate(arrays) if arrays else np.empty(0)
    values = values[np.isfinite(values)]
    return float(pick(values)) if len(values) else None


def _limit(axes: Axes, low: float, high: float | None, limit: float) -> float:
    """Set the y range from the data, but not above `limit`; the top of the range."""
    high = max(min(high if high is not None else limit, limit), low + 1e-3)
    pad = 0.06 * (high - low)
    axes.set_ylim(low - pad, high + pad)
    return high + pad


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)
    axes.set_xticks([])
    axes.set_yticks([])
