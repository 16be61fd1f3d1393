"""The numbers of docs/smollm2.md, from the results of scripts/pretrained_parts.py. A part that is not there gives none."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from pretrained_parts import SCALES, TRAINED, Result, slug
from scipy.special import stdtrit

from lm.runs.evaluations import Evaluation, Series
from lm.statistics.intervals import Interval, interval_of, paired_difference

SWAPPED = {"ssmax": "SSMax, `match`", "fit": "SSMax, `fit`", "bias": "SSMax with b, `match`", "log_n": "log n"}
WORDS = {
    "softmax": "softmax",
    "ssmax": "SSMax, `match`",
    "log_n": "log n",
    "s trained": "SSMax, s alone trained",
    "ssmax trained": "SSMax, all trained",
    "softmax trained": "softmax, all trained",
    "ssmax trained, under softmax": "the weights of SSMax, all trained, under softmax",
    "softmax trained, under ssmax": "the weights of softmax, all trained, under SSMax",
}


FIRST = 128  # position from which on losses are shown
RISE = 0.5  # nats above the loss within the context: what counts as no longer reading


def shown(interval: Interval | None, digits: int = 3) -> str:
    """A difference with its interval; `-` of none."""
    if interval is None:
        return "-"
    if math.isnan(interval.low):
        return f"{interval.mean:+.{digits}f}"
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def within(one: Series, low: float, high: float) -> np.ndarray:
    """Mean of each sequence over the positions from `low` to `high`, which are edges of its bins: (sequences,)."""
    edges = np.array(one.axis.values)
    chosen = (edges[:-1] >= low) & (edges[1:] <= high)
    return np.average(one.samples[0].values[:, chosen], axis=1, weights=np.diff(edges)[chosen])


def octaves(one: Series, first: int) -> list[tuple[int, int]]:
    """The octaves of positions of a series up to the training length and the rest beyond, from `first` on."""
    length, edges = int(one.axis.values[-1]), []
    while not edges or edges[-1] < min(one.seq_len, length):
        edges.append(edges[-1] * 2 if edges else first)
    stops = [*edges, *(x for x in one.axis.values if x > edges[-1])]
    return [(int(low), int(high)) for low, high in pairwise(stops)]


def jackknifed(values: Callable[[np.ndarray], float], count: int) -> Interval:
    """A number made of documents, with its 95 % interval by the jackknife: `values` of which documents are taken, (count,) bool."""
    every = np.ones(count, bool)
    left = np.array([values(np.arange(count) != out) for out in range(count)])
    half = stdtrit(count - 1, 0.975) * math.sqrt((count - 1) / count * np.square(left - left.mean()).sum())
    mean = values(every)
    return Interval(mean, mean - half, mean + half, "documents, 1 seed")


@dataclass(frozen=True)
class Scales:
    """Loss by factor on the logits, of softmax (the same at each n) and of SSMax (growing as ln n), on the same documents.

    Attributes:
        factors: means over a sequence, (factors,).
        softmax, ssmax: series of each.
    """

    factors: np.ndarray
    softmax: list[Series]
    ssmax: list[Series]

    def losses(self, series: list[Series], low: float, high: float) -> np.ndarray:
        """(factors, documents)."""
        return np.stack([within(one, low, high) for one in series])

    @property
    def mean_log_n(self) -> float:
        """Mean of ln n over a sequence."""
        return float(np.log(np.arange(1, self.softmax[0].axis.values[-1] + 1)).mean())

    def fitted(self, losses: np.ndarray) -> tuple[float, float]:
        """The best factor and its loss, of a parabola in ln factor by least squares through the mean over documents of `losses`; the best
        lies within the factors that were measured."""
        a, b, c = np.polyfit(np.log(self.factors), losses.mean(1), 2)
        at = -b / (2 * a) if a > 0 else math.log(self.factors[int(losses.mean(1).argmin())])
        at = float(np.clip(at, *np.log(self.factors[[0, -1]])))
        return math.exp(at), float(a * at**2 + b * at + c)

    def best(self, series: list[Series], low: float = 0, high: float = math.inf) -> Interval:
        """The best factor."""
        losses = self.losses(series, low, high)
        return jackknifed(lambda taken: self.fitted(losses[:, taken])[0], losses.shape[1])

    def by_shape(self, low: float = 0) -> Interval:
        """Loss of SSMax at its best factor minus that of softmax at its own, over the positions from `low` on."""
        one, other = (self.losses(series, low, math.inf) for series in (self.ssmax, self.softmax))
        return jackknifed(lambda taken: self.fitted(one[:, taken])[1] - self.fitted(other[:, taken])[1], one.shape[1])

    def slope(self, first: int) -> Interval:
        """Growth of softmax's best factor with ln n, by least squares over octaves of positions from `first` on."""
        places = octaves(self.softmax[0], first)
        losses = [self.losses(self.softmax, *place) for place in places]
        middle = [math.log(math.sqrt(low * high)) for low, high in places]
        return jackknifed(
            lambda taken: float(np.polyfit(middle, [self.fitted(one[:, taken])[0] for one in losses], 1)[0]), losses[0].shape[1]
        )


class Results:
    """What the parts have given.

    Args:
        parts: the result of each, in their order; None: it is not there.
    """

    def __init__(self, parts: dict[str, Result | None]):
        self.parts = parts

    @property
    def missing(self) -> list[str]:
        """The parts that are not there."""
        return [name for name, one in self.parts.items() if one is None]

    def evaluation(self, part: str) -> Evaluation | None:
        """The evaluation of a part that has one; None: the part is not there."""
        found = self.parts.get(part)
        return found and next(iter(found.evaluations.values()))

    def series(self, part: str, metric: str, what: str = "") -> Series | None:
        """A series of a part's evaluation; None: it is not there."""
        found = self.evaluation(part)
        return found and next((one for one in found.series if (one.metric, one.what) == (metric, what)), None)

    def loss(self, part: str) -> Series | None:
        """Loss by position of a part."""
        return self.series(part, "loss")

    def sequences(self, part: str, asked: tuple[int, int]) -> tuple[int, int]:
        """Length and number of the sequences that a part's loss by position is of; `asked` if it is not there."""
        one = self.loss(part)
        return (int(one.axis.values[-1]), len(one.samples[0].values)) if one else asked

    def change(self, part: str, base: str, low: float = 0, high: float = math.inf) -> Interval | None:
        """Difference in loss between two parts on the same sequences, over positions; None: not both are there."""
        one, other = self.loss(part), self.loss(base)
        if one is None or other is None:
            return None
        a, b = (within(each, low, high) for each in (one, other))
        return paired_difference(a, b, groups=one.samples[0].groups)

    # ------------------------------------------------------------ tables

    def positions(self, first: int) -> list[dict[str, object]]:
        """Loss of the model by octaves of positions."""
        one = self.loss("positions")
        rows = []
        for low, high in octaves(one, first) if one else []:
            values = within(one, low, high)
            rows.append({"low": low, "high": high, "loss": values.mean(), "documents": values})
        return rows

    def needles(self, parts: Iterable[str]) -> list[dict[str, object]]:
        """Exact answers by length and depth, and the control."""
        rows = []
        for part in parts:
            found = self.evaluation(part)
            grid = [one for one in found.series if one.metric == "exact"] if found else []
            losses = {one.what: one for one in found.series if one.metric == "loss of answers"} if found else {}
            for column, length in enumerate(grid[0].axis.values if grid else ()):
                cells = {one.what: one.column(column)[1] for one in grid}
                with_needle = np.mean([one.means[column] for what, one in losses.items() if what != "no needle"])
                rows.append(
                    {
                        "length": int(length),
                        "cells": {what: (int(values.sum()), len(values)) for what, values in cells.items()},
                        "all": [100 * end for end in self.over_depths(part, column).listed()],
                        "loss": with_needle,
                        "control": losses["no needle"].means[column],
                    }
                )
        return rows

    def over_depths(self, part: str, column: int) -> Interval:
        """Fraction of exact answers at a length over all depths: questions are asked once at each, and count once."""
        return interval_of(self.series(part, "accuracy", "needle"), column)

    @cached_property
    def heads(self) -> np.ndarray | None:
        """Mean attention to the number, (layers, heads)."""
        found = self.evaluation("needles")
        layers = [one for one in found.series if one.metric == "attention to the number"] if found else []
        return np.stack([one.means for one in layers]) if layers else None

    @property
    def uniform(self) -> float:
        """What uniform attention would give to the number."""
        return self.series("needles", "attention to the number", "layer 0").references["uniform attention"]

    @property
    def heads_of(self) -> tuple[int, int] | None:
        """Length and number of the sequences that the heads' attention is of; None: it is not there."""
        one = self.series("needles", "attention to the number", "layer 0")
        return one and (one.options["length"], len(one.samples[0].values))

    def best_heads(self, count: int) -> list[tuple[int, int, float]]:
        """Layer, head and attention to the number of those with the most of it."""
        places = np.unravel_index(np.argsort(self.heads, axis=None)[::-1][:count], self.heads.shape)
        return [(int(layer), int(head), float(self.heads[layer, head])) for layer, head in zip(*places, strict=True)]

    def swaps(self, context: int) -> list[dict[str, object]]:
        """What each swap changed at once."""
        rows = []
        for name, words in SWAPPED.items():
            found = self.evaluation(f"swap_{name}")
            if found is None:
                continue
            by_length = {one.metric: one for one in found.series if one.samples and not one.bins}
            change, kl = by_length["change of loss"], by_length["KL divergence"]
            drift = [one for one in found.series if one.metric == "attention drift"][-1]
            changes = []
            for column in range(len(change.means)):
                sample, values = change.column(column)
                changes.append(paired_difference(values, np.zeros_like(values), sample.weights, sample.groups))
            far = self.change(f"beyond_{name}", "beyond_softmax", context / 2, context)
            rows.append({"words": words, "changes": changes, "kl": kl.means, "drift": drift.means.mean(), "far": far})
        return rows

    @property
    def swap_lengths(self) -> list[int]:
        """Lengths at which swaps were measured."""
        one = self.series("swap_ssmax", "change of loss")
        return [int(length) for length in one.axis.values] if one else []

    @property
    def swap_documents(self) -> list[int]:
        """The numbers of sequences that swaps were measured on, each once."""
        one = self.series("swap_ssmax", "change of loss")
        return sorted({len(sample.values) for sample in one.samples}) if one else []

    @cached_property
    def scales(self) -> Scales | None:
        """Losses by those factors on the logits that both were measured with; None: fewer than three, too few for a parabola."""
        pairs = {scale: [self.loss(f"scale_{name}_{scale:g}") for name in ("softmax", "ssmax")] for scale in SCALES}
        found = {scale: pair for scale, pair in pairs.items() if None not in pair}
        return Scales(np.array(list(found)), *map(list, zip(*found.values(), strict=True))) if len(found) > 2 else None

    def scale_rows(self) -> list[dict[str, object]]:
        """Change of the loss by factor, to softmax as it is."""
        names = ("softmax", "ssmax")
        rows = [{"scale": scale} | {name: self.change(f"scale_{name}_{scale:g}", "scale_softmax_1") for name in names} for scale in SCALES]
        return [row for row in rows if row["softmax"] or row["ssmax"]]

    def arms(self, context: int, trained: int) -> list[dict[str, object]]:
        """Loss within and beyond the context, and before and after the `trained` length of sequences, and needles of all arms."""
        rows = []
        for arm in ("softmax", "ssmax", "log_n", *TRAINED):
            places = {
                "early": ("within", "scale_softmax_1", 0, trained),
                "late": ("within", "scale_softmax_1", trained, math.inf),
                "near": ("within", "scale_softmax_1", 0, math.inf),
                "far": ("beyond", "beyond_softmax", 0, context),
                "beyond": ("beyond", "beyond_softmax", context, math.inf),
            }
            changes = {
                name: None if arm == "softmax" else self.change(f"{part}_{slug(arm)}", *place) for name, (part, *place) in places.items()
            }
            row = changes | {"words": WORDS[arm], "needle": self.asked("needles" if arm == "softmax" else f"asked_{slug(arm)}")}
            if any(row[name] is not None for name in ("near", "far", "beyond", "needle")):
                rows.append(row)
        return rows

    def asked(self, part: str) -> tuple[int, int] | None:
        """Exact answers at the longest length of a part, at half depth, and how many there were; None: it is not there."""
        one = self.series(part, "exact", "depth 50%")
        return one and (int(one.column(len(one.means) - 1)[1].sum()), len(one.column(len(one.means) - 1)[1]))


def remarks(results: Results, context: int) -> list[str]:
    """What came out, in sentences, as far as it was measured."""
    sentences = (
        _loss_beyond_context(results, context),
        _needles_found(results),
        _match_by_length(results, context),
        _shape_or_scale(results),
        _best_constant(results),
        _s_trained(results),
        _all_trained(results),
    )
    return [said for said in sentences if said]


def _loss_beyond_context(results: Results, context: int) -> str | None:
    rows = results.positions(context // 8)
    if not rows:
        return None
    within = next(row["loss"] for row in rows if row["high"] == context)
    worse = [row for row in rows if row["low"] >= context and row["loss"] > within + RISE]
    if not worse:
        return f"Up to {rows[-1]['high']:,} tokens the loss stays within {RISE} nats of that in the last octave of the context."
    first, last = worse[0]["low"], worse[-1]
    return (
        f"Up to {first:,} tokens ({first / context:.1f} contexts) the loss stays within {RISE} nats of that in the context's last octave. "
        f"From {last['low']:,} to {last['high']:,} tokens it is {last['loss'] - within:.1f} nats above."
    )


def _needles_found(results: Results) -> str | None:
    rows = results.needles(part for part in results.parts if part.startswith("needles"))
    said = []
    for row in rows:
        exact, asked = np.sum([cell for what, cell in row["cells"].items() if what != "no needle"], axis=0)
        said.append(f"{exact} of {asked} at {row['length']:,}")
    return f"Needles found, by tokens: {', '.join(said)}." if said else None


def _match_by_length(results: Results, context: int) -> str | None:
    row = next((row for row in results.swaps(context) if row["words"] == SWAPPED["ssmax"]), None)
    if row is None:
        return None
    means = [math.lgamma(length + 1) / length for length in (*results.swap_lengths, context)]  # of ln n
    each = [
        f"{change.mean:+.2f} nats at {length:,} tokens (mean factor {mean / means[-1]:.2f})"
        for length, change, mean in zip(results.swap_lengths, row["changes"], means[:-1], strict=True)
    ]
    return f"SSMax by `match` has a mean factor of 1 on the logits over {context:,} tokens. Shorter sequences: {', '.join(each)}."


def _shape_or_scale(results: Results) -> str | None:
    if results.scales is None:
        return None
    every, later = results.scales.by_shape(), results.scales.by_shape(FIRST)
    verdict = "costs" if every.low > 0 else "gains" if every.high < 0 else "neither costs nor gains resolvably"
    return (
        f"Growing with n {verdict}. SSMax at its best mean factor, less softmax at its best constant, is {shown(every, 4)} nats over all "
        f"positions and {shown(later, 4)} from {FIRST} on."
    )


def _best_constant(results: Results) -> str | None:
    if results.scales is None:
        return None
    slope = results.scales.slope(FIRST)
    grows = "grows with ln n" if slope.low > 0 else "falls with ln n" if slope.high < 0 else "does not resolvably change with ln n"
    return f"By position, the best constant {grows}: {shown(slope)} for each unit."


def _s_trained(results: Results) -> str | None:
    found, before = results.change("within_s_trained", "scale_softmax_1"), results.change("within_ssmax", "scale_softmax_1")
    if found is None or before is None or results.parts["train_s"] is None:
        return None
    s = np.array(results.parts["train_s"].facts["s"])
    return (
        f"Training s alone takes the swapped model from {shown(before)} to {shown(found)} nats from softmax. Its mean s is then "
        f"{s.mean():.3f}, from {s.min():.3f} to {s.max():.3f}."
    )


def _all_trained(results: Results) -> str | None:
    found = results.change("within_ssmax_trained", "within_softmax_trained")
    return (
        None if found is None else f"All weights trained under SSMax are {shown(found)} nats from those trained under softmax for as long."
    )
