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


def _finished(axes: Axes, over: tuple[float, float] | None = None, **words: str) -> None:
    """Words and legend; `over`: a logarithmic x axis from one number of tokens to another."""
    finish(axes, **words)
    if not (axes.lines or axes.images):
        axes.text(0.5, 0.5, "not measured yet", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
    elif over:
        logarithmic_x(axes, over)


def _by_position(axes: Axes, one: Series, values: np.ndarray, number: int, label: str, first: int) -> None:
    """Means of the bins of a series from position `first` on, at their middles."""
    edges = np.array(one.axis.values)
    chosen = edges[:-1] >= first
    axes.plot(np.sqrt(edges[:-1] * edges[1:])[chosen], values[chosen], label=label, markersize=4, **colour_and_marker(number))


def loss_picture(results: Results, context: int, first: int) -> bytes:
    """Loss by position of the model far beyond its context, and of all arms less that of softmax."""
    with canvas(1, 2, (10, 4.2)) as (figure, (left, right)):
        if one := results.loss("positions"):
            _by_position(left, one, one.means, 0, "mean", first)
            for values in one.samples[0].values:
                _by_position(left, one, values, 6, "", first)
                left.lines[-1].set(alpha=0.3, marker="")
        base = results.loss("beyond_softmax")
        for number, arm in enumerate(("ssmax", *OWN, "log_n"), start=1):
            if base and (one := results.loss(f"beyond_{slug(arm)}")):
                _by_position(right, one, one.means - base.means, number, WORDS[arm], first)
        for axes, words in ((left, "loss, nats per token"), (right, "minus softmax, same tokens")):
            _finished(axes, (first, 2 * context), xlabel="position in the sequence (dotted: context)", ylabel=words)
            axes.axvline(context, color="0.6", linestyle=":", linewidth=1)
        return saved(figure)


def attention_picture(results: Results) -> bytes:
    """Heads that look at the needle, first tokens, entropy and Z by layer, and growth with the number of keys."""
    found = results.evaluation("diagnostics")

    def over(axis: str) -> list[Series]:
        return [one for one in found.series if one.axis and one.axis.name == axis] if found else []

    with canvas(2, 2, (10, 7.5)) as (figure, grid):
        if results.heads is not None:
            image = grid[0, 0].imshow(results.heads, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
            figure.colorbar(image, ax=grid[0, 0])
        _finished(grid[0, 0], title="attention to the number of the needle", xlabel="head", ylabel="layer")
        for axes, metric in ((grid[0, 1], "weight on the first token"), (grid[1, 0], "exponent of Z")):
            for number, setting in enumerate((TRAINED, UNTRAINED)):  # of shuffled scores it is that of equal weights, or the same
                if layers := [np.nanmean(one.means) for one in over("head") if (one.metric, one.setting) == (metric, setting)]:
                    axes.plot(layers, label=setting, markersize=3, **colour_and_marker(number))
            _finished(axes, title=f"{metric}, mean over heads", xlabel="layer")
        shown = [(metric, setting) for metric in ("entropy", "entropy" + NO_FIRST) for setting in (TRAINED, UNTRAINED)]
        for one in over("visible keys"):
            if (one.metric, one.setting) in shown:
                style = colour_and_marker(shown.index((one.metric, one.setting)))
                grid[1, 1].plot(one.axis.values, one.means, label=f"{one.metric}, {one.setting}", markersize=3, **style)
        keys = [one.axis.values for one in over("visible keys")]
        _finished(grid[1, 1], (keys[0][0], keys[0][-1]) if keys else None, title="entropy, nats", xlabel="visible keys n")
        return saved(figure)


def scale_picture(results: Results, first: int) -> bytes:
    """Loss by factor on the logits of softmax and SSMax, and softmax's best factor by position."""
    with canvas(1, 2, (10, 4.2)) as (figure, (left, right)):
        for number, (name, words) in enumerate((("softmax", "softmax: the same at each n"), ("ssmax", "SSMax: proportional to ln n"))):
            found = [(scale, results.loss(f"scale_{name}_{scale:g}")) for scale in SCALES]
            points = [(scale, one.whole) for scale, one in found if one]
            if points:
                left.plot(*zip(*points, strict=True), label=words, **colour_and_marker(number))
        _finished(left, xlabel="factor on the logits, mean over the sequence", ylabel="loss, nats per token")
        if scales := results.scales:
            places = octaves(scales.softmax[0], first)
            middles = [float(np.sqrt(low * high)) for low, high in places]
            best = [scales.best(scales.softmax, *place) for place in places]
            bars = np.clip([[one.mean - one.low for one in best], [one.high - one.mean for one in best]], 0, None)
            right.errorbar(middles, [one.mean for one in best], bars, label="softmax's best factor", capsize=3, **colour_and_marker(0))
            grown = np.log(middles) / scales.mean_log_n
            right.plot(middles, grown * scales.best(scales.ssmax).mean, label="SSMax at its best s", **colour_and_marker(1))
        ends = (first, scales.softmax[0].axis.values[-1]) if scales else None
        _finished(right, ends, xlabel="position in the sequence", ylabel="factor on the logits")
        return saved(figure)
