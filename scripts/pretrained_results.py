"""The numbers of docs/smollm2.md, from the results of scripts/pretrained_parts.py. A part that is not there gives
none.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from pretrained_parts import SCALES, TRAINED, Result, slug
from scipy.special import stdtrit

from lm.runs.evaluations import Evaluation, Series
from lm.statistics.intervals import Interval, interval_of, over_documents

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


def shown(interval: Interval | None, digits: int = 3) -> str:
    """A difference with its interval; `-` of none."""
    if interval is None:
        return "-"
    if math.isnan(interval.low):
        return f"{interval.mean:+.{digits}f}"
    return f"{interval.mean:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def within(series: Series, low: float, high: float) -> np.ndarray:
    """Mean of each sequence over the positions from `low` to `high`, which are edges of its bins: (sequences,)."""
    edges = np.array(series.axis.values)
    bins = (edges[:-1] >= low) & (edges[1:] <= high)
    return np.average(series.samples[0].values[:, bins], axis=1, weights=np.diff(edges)[bins])


def octaves(series: Series, first: int) -> list[tuple[int, int]]:
    """The octaves of positions of a series up to the training length and the rest beyond, from `first` on."""
    length, edges = int(series.axis.values[-1]), []
    while not edges or edges[-1] < min(series.seq_len, length):
        edges.append(edges[-1] * 2 if edges else first)
    stops = [*edges, *(x for x in series.axis.values if x > edges[-1])]
    return [(int(low), int(high)) for low, high in pairwise(stops)]


def jackknifed(values: Callable[[np.ndarray], float], count: int) -> Interval:
    """A number made of documents, with its 95 % interval by the jackknife: `values` of which documents are taken,
    (count,) bool.
    """
    estimates = np.array([values(np.arange(count) != out) for out in range(count)])
    half = stdtrit(count - 1, 0.975) * math.sqrt((count - 1) / count * np.square(estimates - estimates.mean()).sum())
    mean = values(np.ones(count, bool))
    return Interval(mean, mean - half, mean + half, "documents, 1 seed")


@dataclass(frozen=True)
class Scales:
    """Loss by factor on the logits, of softmax (the same at each n) and of SSMax (growing as ln n), on the same
    documents.

    Attributes:
        factors: means over a sequence, (factors,).
        softmax, ssmax: series of each.
    """

    factors: np.ndarray
    softmax: list[Series]
    ssmax: list[Series]

    def losses(self, series: list[Series], low: float, high: float) -> np.ndarray:
        """(factors, documents)."""
        return np.stack([within(curve, low, high) for curve in series])

    @property
    def mean_log_n(self) -> float:
        """Mean of ln n over a sequence."""
        return float(np.log(np.arange(1, self.softmax[0].axis.values[-1] + 1)).mean())

    def fitted(self, losses: np.ndarray) -> tuple[float, float]:
        """The best factor and its loss, of a parabola in ln factor by least squares through the mean over documents of
        `losses`; the best lies within the factors that were measured."""
        a, b, c = np.polyfit(np.log(self.factors), losses.mean(1), 2)
        log_factor = -b / (2 * a) if a > 0 else math.log(self.factors[int(losses.mean(1).argmin())])
        log_factor = float(np.clip(log_factor, *np.log(self.factors[[0, -1]])))
        return math.exp(log_factor), float(a * log_factor**2 + b * log_factor + c)

    def best(self, series: list[Series], low: float = 0, high: float = math.inf) -> Interval:
        losses = self.losses(series, low, high)
        return jackknifed(lambda documents: self.fitted(losses[:, documents])[0], losses.shape[1])

    def by_shape(self, low: float = 0) -> Interval:
        """Loss of SSMax at its best factor minus that of softmax at its own, over the positions from `low` on."""
        ssmax, softmax = (self.losses(series, low, math.inf) for series in (self.ssmax, self.softmax))
        return jackknifed(
            lambda documents: self.fitted(ssmax[:, documents])[1] - self.fitted(softmax[:, documents])[1],
            ssmax.shape[1],
        )

    def slope(self, first: int) -> Interval:
        """Growth of softmax's best factor with ln n, by least squares over octaves of positions from `first` on."""
        places = octaves(self.softmax[0], first)
        losses = [self.losses(self.softmax, *place) for place in places]
        middle = [math.log(math.sqrt(low * high)) for low, high in places]
        return jackknifed(
            lambda documents: float(
                np.polyfit(middle, [self.fitted(octave[:, documents])[0] for octave in losses], 1)[0]
            ),
            losses[0].shape[1],
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
        return [name for name, part in self.parts.items() if part is None]

    def evaluation(self, part: str) -> Evaluation | None:
        """The evaluation of a part that has one; None: the part is not there."""
        record = self.parts.get(part)
        return record and next(iter(record.evaluations.values()))

    def series(self, part: str, metric: str, what: str = "") -> Series | None:
        """A series of a part's evaluation; None: it is not there."""
        evaluation = self.evaluation(part)
        return evaluation and next(
            (series for series in evaluation.series if (series.metric, series.what) == (metric, what)), None
        )

    def loss(self, part: str) -> Series | None:
        """Loss by position of a part."""
        return self.series(part, "loss")

    def sequences(self, part: str, default: tuple[int, int]) -> tuple[int, int]:
        """Length and number of the sequences behind the loss by position of a part; `default` if the part is not
        there.
        """
        series = self.loss(part)
        return (int(series.axis.values[-1]), len(series.samples[0].values)) if series else default

    def change(self, part: str, base: str, low: float = 0, high: float = math.inf) -> Interval | None:
        """Difference in loss between two parts on the same sequences, over positions; None: not both are there."""
        curve, base_curve = self.loss(part), self.loss(base)
        if curve is None or base_curve is None:
            return None
        a, b = (within(series, low, high) for series in (curve, base_curve))
        return over_documents(a - b, groups=curve.samples[0].groups)

    # ------------------------------------------------------------ tables

    def positions(self, first: int) -> list[dict[str, object]]:
        """Loss of the model by octaves of positions."""
        series = self.loss("positions")
        places = [(low, high, within(series, low, high)) for low, high in octaves(series, first)] if series else []
        return [{"low": low, "high": high, "loss": values.mean(), "documents": values} for low, high, values in places]

    def needles(self, parts: Iterable[str]) -> list[dict[str, object]]:
        """Exact answers by length and depth, and the control."""
        rows = []
        for part in parts:
            evaluation = self.evaluation(part)
            grid = [series for series in evaluation.series if series.metric == "exact"] if evaluation else []
            losses = (
                {series.what: series for series in evaluation.series if series.metric == "loss of answers"}
                if evaluation
                else {}
            )
            for column, length in enumerate(grid[0].axis.values if grid else ()):
                cells = {series.what: series.column(column)[1] for series in grid}
                with_needle = np.mean(
                    [series.means[column] for label, series in losses.items() if label != "no needle"]
                )
                rows.append(
                    {
                        "length": int(length),
                        "cells": {label: (int(values.sum()), len(values)) for label, values in cells.items()},
                        # over all depths: questions are asked once at each, and count once
                        "all": [
                            100 * end for end in interval_of(self.series(part, "accuracy", "needle"), column).as_list()
                        ],
                        "loss": with_needle,
                        "control": losses["no needle"].means[column],
                    }
                )
        return rows

    @cached_property
    def heads(self) -> np.ndarray | None:
        """Mean attention to the number, (layers, heads)."""
        evaluation = self.evaluation("needles")
        layers = (
            [series for series in evaluation.series if series.metric == "attention to the number"] if evaluation else []
        )
        return np.stack([layer.means for layer in layers]) if layers else None

    @property
    def uniform(self) -> float:
        """What uniform attention would give to the number."""
        return self.series("needles", "attention to the number", "layer 0").references["uniform attention"]

    @property
    def heads_of(self) -> tuple[int, int] | None:
        """Length and number of the sequences that the heads' attention is of; None: it is not there."""
        series = self.series("needles", "attention to the number", "layer 0")
        return series and (series.options["length"], len(series.samples[0].values))

    def best_heads(self, count: int) -> list[tuple[int, int, float]]:
        """Layer, head and attention to the number of those with the most of it."""
        places = np.unravel_index(np.argsort(self.heads, axis=None)[::-1][:count], self.heads.shape)
        return [(int(layer), int(head), float(self.heads[layer, head])) for layer, head in zip(*places, strict=True)]

    def swaps(self, context: int) -> list[dict[str, object]]:
        """What each swap changed at once."""
        rows = []
        for name, words in SWAPPED.items():
            evaluation = self.evaluation(f"swap_{name}")
            if evaluation is None:
                continue
            by_length = {series.metric: series for series in evaluation.series if series.samples and not series.bins}
            change, kl = by_length["change of loss"], by_length["KL divergence"]
            drift = [series for series in evaluation.series if series.metric == "attention drift"][-1]
            changes = [interval_of(change, column) for column in range(len(change.means))]
            far = self.change(f"beyond_{name}", "beyond_softmax", context / 2, context)
            rows.append({"words": words, "changes": changes, "kl": kl.means, "drift": drift.means.mean(), "far": far})
        return rows

    @property
    def swap_lengths(self) -> list[int]:
        """Lengths at which swaps were measured."""
        series = self.series("swap_ssmax", "change of loss")
        return [int(length) for length in series.axis.values] if series else []

    @property
    def swap_documents(self) -> list[int]:
        """The numbers of sequences that swaps were measured on, each once."""
        series = self.series("swap_ssmax", "change of loss")
        return sorted({len(sample.values) for sample in series.samples}) if series else []

    @cached_property
    def scales(self) -> Scales | None:
        """Losses by those factors on the logits that both were measured with; None: fewer than three, too few for a
        parabola.
        """
        pairs = {scale: [self.loss(f"scale_{name}_{scale:g}") for name in ("softmax", "ssmax")] for scale in SCALES}
        complete_pairs = {scale: pair for scale, pair in pairs.items() if None not in pair}
        if len(complete_pairs) < 3:
            return None
        return Scales(np.array(list(complete_pairs)), *map(list, zip(*complete_pairs.values(), strict=True)))

    def scale_rows(self) -> list[dict[str, object]]:
        """Change of the loss by factor, to softmax as it is."""
        names = ("softmax", "ssmax")
        rows = [
            {"scale": scale} | {name: self.change(f"scale_{name}_{scale:g}", "scale_softmax_1") for name in names}
            for scale in SCALES
        ]
        return [row for row in rows if row["softmax"] or row["ssmax"]]

    def arms(self, context: int, trained_length: int) -> list[dict[str, object]]:
        """Loss within and beyond the context, loss before and after `trained_length` of the sequences, and needles, of
        all arms.
        """
        rows = []
        for arm in ("softmax", "ssmax", "log_n", *TRAINED):
            places = {
                "early": ("within", "scale_softmax_1", 0, trained_length),
                "late": ("within", "scale_softmax_1", trained_length, math.inf),
                "near": ("within", "scale_softmax_1", 0, math.inf),
                "far": ("beyond", "beyond_softmax", 0, context),
                "beyond": ("beyond", "beyond_softmax", context, math.inf),
            }
            changes = {
                name: None if arm == "softmax" else self.change(f"{part}_{slug(arm)}", *place)
                for name, (part, *place) in places.items()
            }
            row = changes | {
                "words": WORDS[arm],
                "needle": self.asked("needles" if arm == "softmax" else f"asked_{slug(arm)}"),
            }
            if any(row[name] is not None for name in ("near", "far", "beyond", "needle")):
                rows.append(row)
        return rows

    def asked(self, part: str) -> tuple[int, int] | None:
        """Exact answers at the longest length of a part, at half depth, and how many there were; None: it is not
        there.
        """
        series = self.series(part, "exact", "depth 50%")
        if series is None:
            return None
        _, answers = series.column(len(series.means) - 1)
        return int(answers.sum()), len(answers)


def remarks(results: Results) -> list[str]:
    """What came out, in sentences, as far as it was measured."""
    sentences = (
        _shape_or_scale(results),
        _best_constant(results),
        _s_trained(results),
        _all_trained(results),
    )
    return [sentence for sentence in sentences if sentence]


def _shape_or_scale(results: Results) -> str | None:
    if results.scales is None:
        return None
    gap, later_gap = results.scales.by_shape(), results.scales.by_shape(FIRST)
    verdict = "costs" if gap.low > 0 else "gains" if gap.high < 0 else "neither costs nor gains resolvably"
    return (
        f"Growing with n {verdict}. SSMax at its best mean factor, less softmax at its best constant, is "
        f"{shown(gap, 4)} nats over all "
        f"positions and {shown(later_gap, 4)} from {FIRST} on."
    )


def _best_constant(results: Results) -> str | None:
    if results.scales is None:
        return None
    slope = results.scales.slope(FIRST)
    grows = (
        "grows with ln n"
        if slope.low > 0
        else "falls with ln n"
        if slope.high < 0
        else "does not resolvably change with ln n"
    )
    return f"By position, the best constant {grows}: {shown(slope)} for each unit."


def _s_trained(results: Results) -> str | None:
    after, before = (
        results.change("within_s_trained", "scale_softmax_1"),
        results.change("within_ssmax", "scale_softmax_1"),
    )
    if after is None or before is None or results.parts["train_s"] is None:
        return None
    s = np.array(results.parts["train_s"].facts["s"])
    return (
        f"Training s alone takes the swapped model from {shown(before)} to {shown(after)} nats from softmax. Its mean "
        "s is then "
        f"{s.mean():.3f}, from {s.min():.3f} to {s.max():.3f}."
    )


def _all_trained(results: Results) -> str | None:
    change = results.change("within_ssmax_trained", "within_softmax_trained")
    return (
        change
        and f"All weights trained under SSMax are {shown(change)} nats from those trained under softmax for as long."
    )
