"""The pictures of docs/smollm2.md."""

import numpy as np
from matplotlib.axes import Axes
from pages import canvas, finish, logarithmic_x, saved
from pretrained_parts import OWN, SCALES, slug
from pretrained_results import WORDS, Results, octaves
from theory_statements import TRAINED, UNTRAINED

from lm.diagnostics.attention_rows import NO_FIRST
from lm.report.pictures import colour_and_marker
from lm.runs.evaluations import Series


def _finished(axes: Axes, span: tuple[float, float] | None = None, **words: str) -> None:
    """Words and legend; `span`: a logarithmic x axis from one number of tokens to another."""
    finish(axes, **words)
    if not (axes.lines or axes.images):
        axes.text(0.5, 0.5, "not measured yet", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
    elif span:
        logarithmic_x(axes, span)


def _by_position(axes: Axes, series: Series, values: np.ndarray, number: int, label: str, first: int) -> None:
    """Means of the bins of a series from position `first` on, at their middles."""
    edges = np.array(series.axis.values)
    bins = edges[:-1] >= first
    axes.plot(
        np.sqrt(edges[:-1] * edges[1:])[bins], values[bins], label=label, markersize=4, **colour_and_marker(number)
    )


def loss_picture(results: Results, context: int, first: int) -> bytes:
    """Loss by position of the model far beyond its context, and of all arms less that of softmax."""
    with canvas(1, 2, (10, 4.2)) as (figure, (left_axes, right_axes)):
        if series := results.loss("positions"):
            _by_position(left_axes, series, series.means, 0, "mean", first)
            for values in series.samples[0].values:
                _by_position(left_axes, series, values, 6, "", first)
                left_axes.lines[-1].set(alpha=0.3, marker="")
        base = results.loss("beyond_softmax")
        for number, arm in enumerate(("ssmax", *OWN, "log_n"), start=1):
            if base and (series := results.loss(f"beyond_{slug(arm)}")):
                _by_position(right_axes, series, series.means - base.means, number, WORDS[arm], first)
        for axes, words in ((left_axes, "loss, nats per token"), (right_axes, "minus softmax, same tokens")):
            _finished(axes, (first, 2 * context), xlabel="position in the sequence (dotted: context)", ylabel=words)
            axes.axvline(context, color="0.6", linestyle=":", linewidth=1)
        return saved(figure)


def attention_picture(results: Results) -> bytes:
    """Heads that look at the needle, first tokens, entropy and Z by layer, and growth with the number of keys."""
    evaluation = results.evaluation("diagnostics")

    def over(axis: str) -> list[Series]:
        return (
            [series for series in evaluation.series if series.axis and series.axis.name == axis] if evaluation else []
        )

    with canvas(2, 2, (10, 7.5)) as (figure, grid):
        if results.heads is not None:
            image = grid[0, 0].imshow(results.heads, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
            figure.colorbar(image, ax=grid[0, 0])
        _finished(grid[0, 0], title="attention to the number of the needle", xlabel="head", ylabel="layer")
        for axes, metric in ((grid[0, 1], "weight on the first token"), (grid[1, 0], "exponent of Z")):
            for number, setting in enumerate(
                (TRAINED, UNTRAINED)
            ):  # of shuffled scores it is that of equal weights, or the same
                if layers := [
                    np.nanmean(series.means)
                    for series in over("head")
                    if (series.metric, series.setting) == (metric, setting)
                ]:
                    axes.plot(layers, label=setting, markersize=3, **colour_and_marker(number))
            _finished(axes, title=f"{metric}, mean over heads", xlabel="layer")
        pairs = [(metric, setting) for metric in ("entropy", "entropy" + NO_FIRST) for setting in (TRAINED, UNTRAINED)]
        for series in over("visible keys"):
            if (series.metric, series.setting) in pairs:
                style = colour_and_marker(pairs.index((series.metric, series.setting)))
                grid[1, 1].plot(
                    series.axis.values, series.means, label=f"{series.metric}, {series.setting}", markersize=3, **style
                )
        keys = [series.axis.values for series in over("visible keys")]
        _finished(
            grid[1, 1], (keys[0][0], keys[0][-1]) if keys else None, title="entropy, nats", xlabel="visible keys n"
        )
        return saved(figure)


def scale_picture(results: Results, first: int) -> bytes:
    """Loss by factor on the logits of softmax and SSMax, and softmax's best factor by position."""
    with canvas(1, 2, (10, 4.2)) as (figure, (left_axes, right_axes)):
        for number, (name, words) in enumerate(
            (("softmax", "softmax: the same at each n"), ("ssmax", "SSMax: proportional to ln n"))
        ):
            losses = [(scale, results.loss(f"scale_{name}_{scale:g}")) for scale in SCALES]
            points = [(scale, series.overall_mean) for scale, series in losses if series]
            if points:
                left_axes.plot(*zip(*points, strict=True), label=words, **colour_and_marker(number))
        _finished(left_axes, xlabel="factor on the logits, mean over the sequence", ylabel="loss, nats per token")
        if scales := results.scales:
            places = octaves(scales.softmax[0], first)
            middles = [float(np.sqrt(low * high)) for low, high in places]
            best = [scales.best(scales.softmax, *place) for place in places]
            means, lows, highs = np.array([estimate.as_list() for estimate in best]).T
            bars = np.clip([means - lows, highs - means], 0, None)
            right_axes.errorbar(middles, means, bars, label="softmax's best factor", capsize=3, **colour_and_marker(0))
            growth = np.log(middles) / scales.mean_log_n
            right_axes.plot(
                middles, growth * scales.best(scales.ssmax).mean, label="SSMax at its best s", **colour_and_marker(1)
            )
        ends = (first, scales.softmax[0].axis.values[-1]) if scales else None
        _finished(right_axes, ends, xlabel="position in the sequence", ylabel="factor on the logits")
        return saved(figure)
