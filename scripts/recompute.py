"""Tables and pictures of docs/ from the committed results of every run: python scripts/recompute.py [--check]

Everything comes from results/NAME/seeds.csv, which holds each run's mean by metric, inference setting and length; nothing is trained and
torch is not needed. A table stands in its page between `<!-- results: NAME -->` and `<!-- end of NAME -->`.
`--check` changes nothing, and exits with status 1 where a page or a picture is another than its data say.
That file is written by scripts/collect.py.
"""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import predictors
from pages import canvas, finish, saved

from lm.report.pictures import COLOURS
from lm.statistics.intervals import over_seeds
from lm.statistics.verdicts import Comparison, Verdict, verdicts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
MOST = 100  # nats, of a margin that is shown: sparse weights leave filler nothing
GUESSING = 100 * sum(1 / k for k in range(1, 9)) / 8  # of 8 questions about 8 values, each value once: H_8 / 8


@dataclass(frozen=True)
class Recall:
    """An experiment on recall: accuracy by sequence length.

    Attributes:
        name: folder of results/.
        page: of docs/, that holds its table.
        labels: words for the arms, by name, in the order of the table.
        baseline: the arm that all others are compared with.
        deciding: sequence lengths at which they are.
        matters: smallest difference of interest, as a fraction.
        tuned: whether each arm has its own rate, the best of those that its final seeds have; else all rates are compared.
        picture: whether accuracy by length is drawn, docs/NAME.svg.
        task: whose accuracy it is.
        layers: heading of the arms' column, the layers that differ.
        rows: column whose values are judged apart, as one family, of arms that are not tuned: rate or size.
        heading: of that column.
        heads: whether a table says what the head that answers gives at the training length.
        ranked: whether arms are in the order of their accuracy, each at its best rate, in the tables and in a picture of all of them.
        trends: arms over a part of training, from 0 to 1, by the name of the trend: a line through the runs of each seed.
    """

    name: str
    page: str
    labels: dict[str, str]
    baseline: str
    deciding: tuple[int, ...]
    matters: float
    tuned: bool = False
    picture: bool = False
    task: str = "mqar"
    layers: str = "layer 2"
    rows: str = "rate"
    heading: str = "learning rate"
    heads: bool = False
    ranked: bool = False
    trends: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Name of the tables in the page, and of the picture, docs/PLACE.svg."""
        return self.name

    @cached_property
    def data(self) -> pd.DataFrame:
        """The numbers of the final runs; a size is the number at the end of its name."""
        data = pd.read_csv(RESULTS / self.name / "seeds.csv").query("stage == 'final'")
        return data.assign(size=data["size"].str.rpartition("-")[2].astype(int)) if "size" in data else data

    @cached_property
    def accuracies(self) -> dict[tuple[str, float, int], np.ndarray]:
        """(seeds,) the accuracy of the final runs by arm, rate and length."""
        lines = self.data.query(f"metric == '{self.task} accuracy' and setting == 'as trained'")
        return {key: run.sort_values("seed").value.to_numpy() for key, run in lines.groupby(["arm", self.rows, "x"])}

    @cached_property
    def lengths(self) -> list[int]:
        """The sequence lengths, ascending."""
        return sorted({length for *_, length in self.accuracies})

    def rates(self, arm: str) -> list[float]:
        """The rates of an arm's final seeds, ascending; of tuned arms the best comes first."""
        rates = sorted({rate for name, rate, _ in self.accuracies if name == arm})
        return sorted(rates, key=lambda rate: -self.accuracies[arm, rate, self.deciding[0]].mean()) if self.tuned else rates

    @cached_property
    def verdicts(self) -> dict[tuple[str, float, int], Verdict]:
        """The verdicts by arm, rate and length, as one family."""
        comparisons = {}
        for arm in self.labels:
            ours = self.rates(arm)
            for length in self.deciding if arm != self.baseline else ():
                if self.tuned:
                    by_rates = [{rate: self.accuracies[one, rate, length] for rate in self.rates(one)} for one in (arm, self.baseline)]
                    comparisons[arm, ours[0], length] = at_best(*by_rates, higher=True)
                    continue
                for rate in ours:
                    differences = self.accuracies[arm, rate, length] - self.accuracies[self.baseline, rate, length]
                    comparisons[arm, rate, length] = Comparison(differences, higher=True)
        return verdicts(comparisons, self.matters)

    @cached_property
    def arms(self) -> list[str]:
        """The arms in the order shown: as they are named, or from the highest accuracy at the deciding length to the lowest."""
        return sorted(self.labels, key=lambda arm: tuple(-self._best(arm).mean(0)[::-1])) if self.ranked else list(self.labels)

    def _best(self, arm: str) -> np.ndarray:
        """(seeds, lengths) accuracy of an arm at its best rate."""
        return np.stack([self.accuracies[arm, self.rates(arm)[0], length] for length in self.lengths], 1)

    def table(self) -> str:
        """The table in Markdown: a line for each arm and rate, accuracies in per cent and the verdicts."""
        against = f"minus {self.labels[self.baseline].partition(' at ')[0]}"
        heads = [self.heading, self.layers, *(f"{length:,}" for length in self.lengths)]
        heads += [f"{against}, at {length:,}" for length in self.deciding]
        places = [(arm, rate) for arm in self.arms for rate in (self.rates(arm)[:1] if self.ranked else self.rates(arm))]
        lines = [
            [self._row(rate), self.labels[arm], *self._cells(arm, rate)]
            for arm, rate in (places if self.tuned else sorted(places, key=lambda place: place[1]))
        ]
        return _markdown([heads, *lines])

    def _row(self, row: float) -> str:
        return f"{row:,}" if self.rows == "size" else _rate(row)

    def head_table(self) -> str:
        """What the head that answers gives at the training length, and the lengths at which accuracy falls below one half, in Markdown.

        Means over seeds with the lowest and highest, of lengths medians.
        """
        lines = [[self.heading, self.layers, "margin, nats", "slope", "half-length, predicted", "observed"]]
        heads = self.data[self.data.setting == "head"]
        rows = sorted(set(heads[self.rows]))
        for row, arm in (
            [(self.rates(arm)[0], arm) for arm in self.arms] if self.tuned else [(row, arm) for row in rows for arm in self.labels]
        ):
            run = heads[(heads.arm == arm) & (heads[self.rows] == row)].pivot(index="seed", columns="metric", values="value")
            margin = run["margin"].clip(upper=MOST)
            cells = [f"{margin.mean():.1f} [{margin.min():.1f}, {margin.max():.1f}]" if margin.min() < MOST else f"more than {MOST}"]
            by_length = np.array([self.accuracies[arm, row, length] for length in self.lengths])
            observed = [observed_half_length(self.lengths, accuracy) for accuracy in by_length.T]
            fell, median = int(np.isfinite(observed).sum()), float(np.median(observed))
            counted = f" ({fell} of {len(observed)} fall)" if 0 < fell < len(observed) else ""
            predicted = _tokens(float(run["predicted half-length"].median()), "never")
            cells += [f"{run['slope'].mean():.2f}", predicted] if run["formula holds"].all() else ["", ""]
            up_to = f"not up to {self.lengths[-1]:,}"
            cells += ["not learned" if median <= self.lengths[0] else _tokens(median, up_to) + counted]
            lines.append([self._row(row), self.labels[arm], *cells])
        return _markdown(lines)

    def trend_table(self) -> str:
        """Accuracy at the deciding length by part of training, and its change from a part of 0 to 1, in Markdown.

        A change is the slope of a line through the runs of a seed; the verdicts are one family.
        """
        parts = sorted({part for arms in self.trends.values() for part in arms.values()})
        lines = [["", *(f"{100 * part:g} %" for part in parts), "change from 0 to 100 %"]]
        by_part, changes = {}, {}
        for name, arms in self.trends.items():
            values = {part: self.accuracies[arm, self.rates(arm)[0], self.deciding[0]] for arm, part in arms.items()}
            by_part[name] = values
            changes[name] = Comparison(np.polyfit(list(values), list(values.values()), 1)[0], higher=True)
        for name, verdict in verdicts(changes, self.matters).items():
            cells = [_spread(by_part[name][part]) if part in by_part[name] else "" for part in parts]
            lines.append([name, *cells, _difference(verdict)])
        return _markdown(lines)

    def _cells(self, arm: str, rate: float) -> list[str]:
        """The accuracies of an arm at a rate, and its verdicts."""
        cells = [_spread(self.accuracies[arm, rate, length]) for length in self.lengths]
        for length in self.deciding:
            verdict = self.verdicts.get((arm, rate, length))
            cells.append(_difference(verdict) if verdict else "")
        return cells

    def overview(self) -> bytes:
        """The picture of all arms at their best rates: mean accuracy by length as coloured cells, and verdicts."""
        values = np.stack([100 * self._best(arm).mean(0) for arm in self.arms])
        with plt.rc_context({"font.size": 9}), canvas(1, 1, (7.2, 0.8 + 0.235 * len(self.arms))) as (figure, axes):
            axes.imshow(values, cmap="viridis", vmin=0, vmax=100, aspect="auto")
            for (row, column), value in np.ndenumerate(values):
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color="w" if value < 60 else "0.1")
            for row, arm in enumerate(self.arms):
                verdict = self.verdicts.get((arm, self.rates(arm)[0], self.deciding[0]))
                said = "baseline" if verdict is None else replace(verdict, margin=f"{100 * self.matters:g}").statement.partition(":")[0]
                axes.text(len(self.lengths) - 0.4, row, said, va="center", fontsize=8, color="0.5")
            axes.set_yticks(range(len(self.arms)), [self.labels[arm] for arm in self.arms])
            axes.set_xticks(range(len(self.lengths)), [f"{length:,}" for length in self.lengths])
            axes.set_xlabel(
                f"accuracy, %, by sequence length (training: {self.lengths[0]} tokens), and against {self.labels[self.baseline]}"
            )
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
            return saved(figure)

    def drawn(self) -> bytes:
        """The picture: accuracy by length, a row for each rate, a panel for each arm, so that no arm lies on another."""
        rates = sorted({row for _, row, _ in self.accuracies})
        size = max(6.5, 1.6 * len(self.labels)), 1.4 + 1.7 * len(rates)  # inches; shown about 700 pixels wide
        factors = {length: f"{length // self.lengths[0]:,}" for length in (self.lengths[0], *self.lengths[:0:-2])}  # with room for words
        style, shared = plt.rc_context({"font.size": 9}), {"sharex": True, "sharey": True, "squeeze": False}
        with style, canvas(len(rates), len(self.labels), size, **shared) as (figure, panels):
            for row, rate in zip(panels, rates, strict=True):
                for axes, arm in zip(row, self.labels, strict=True):
                    colour = COLOURS[HUES[arm.removeprefix("after_").removeprefix("tau_")]]
                    values = 100 * np.array([self.accuracies[arm, rate, length] for length in self.lengths])
                    axes.axhline(GUESSING, color="0.6", linewidth=1, linestyle=":")
                    axes.plot(self.lengths, values, color=colour, linewidth=0.8, alpha=0.6)
                    axes.plot(self.lengths, values.mean(1), color=colour, linewidth=2.4)
                    axes.set_xscale("log", base=2)
                    axes.set_xticks([*factors], factors.values())
                    axes.set_xticks(self.lengths, [], minor=True)
                    axes.set_ylim(-3, 103)
                    finish(axes)
                row[0].set_ylabel(
                    f"{self._row(rate)} steps\naccuracy, %" if self.rows == "size" else f"learning rate {self._row(rate)}\naccuracy, %"
                )
                row[0].annotate("dotted:\na guess", (self.lengths[0], 3), fontsize=8, color="0.35")
            for axes, label in zip(panels[0], self.labels.values(), strict=True):
                axes.set_title(textwrap.fill(label, 16, break_long_words=False), fontsize=9)
            figure.supxlabel(f"sequence length, in training lengths ({self.lengths[0]} tokens)", fontsize=9)
            return saved(figure)


@dataclass(frozen=True)
class Losses:
    """An experiment on text: a mean loss of each arm in some settings, in nats.

    Attributes:
        name: folder of results/.
        page: of docs/, that holds its tables.
        labels: words for the lines of the table, by the beginning of the names of their arms, and after a comma what a setting changes of
            the normalizer, such as `ssmax, n=fixed:753`.
        pairs: the lines that are compared, each with its baseline.
        columns: words for the settings, each with the end of the names of its arms (if there is such an arm), the metric, the inference
            setting and x.
        deciding: the settings that are compared; all verdicts are one family.
        tuned_on: the setting whose loss chose the rates. A verdict in another must hold at every rate that final seeds were trained at.
        matters: smallest difference of interest, in nats.
        size: whose runs they are; empty if there is one.
        rows: rows of the picture, by their titles: pairs whose difference is drawn by position, a panel for each setting.
        length: training length, in tokens.
    """

    name: str
    page: str
    labels: Mapping[str, str]
    pairs: tuple[tuple[str, str], ...]
    columns: Mapping[str, tuple[str, str, str, int]]
    deciding: tuple[str, ...]
    tuned_on: str
    matters: float
    size: str = ""
    rows: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    length: int = 256

    @property
    def place(self) -> str:
        """Name of the tables in the page, and of the picture, docs/PLACE.svg."""
        return "-".join(filter(None, (self.name, self.size)))

    @cached_property
    def data(self) -> pd.DataFrame:
        """The numbers of the final runs."""
        data = pd.read_csv(RESULTS / self.name / "seeds.csv").query("stage == 'final'").fillna({"setting": ""})
        return data[data["size"] == self.size] if self.size else data

    def by_rate(self, line: str, column: str) -> dict[float, np.ndarray]:
        """The losses (seeds,) of a line in a setting by rate, first the rate that is best in the setting that rates were tuned on."""
        tuned = self._runs(line, self.tuned_on)
        runs = self._runs(line, column)
        return {rate: runs[rate] for rate in sorted(runs, key=lambda rate: tuned[rate].mean())}

    def _runs(self, line: str, column: str) -> dict[float, np.ndarray]:
        end, metric, setting, x = self.columns[column]
        data, arm = self._measured(line, metric, setting)
        runs = data[(data.arm == (arm + end if arm + end in set(data.arm) else arm)) & (data.x == x)]
        return {rate: run.sort_values("seed").value.to_numpy() for rate, run in runs.groupby("rate")}

    def _measured(self, line: str, metric: str, setting: str) -> tuple[pd.DataFrame, str]:
        """A metric of all arms in a setting, with what a line changes of the normalizer, and the line's arm."""
        arm, comma, changed = line.partition(", ")
        return self.data[(self.data.metric == metric) & (self.data.setting == setting + comma + changed)], arm

    @cached_property
    def verdicts(self) -> dict[tuple[str, str, str], Verdict]:
        """The verdicts by line, baseline and setting, as one family."""
        comparisons = {
            (*pair, column): at_best(*(self.by_rate(line, column) for line in pair), higher=False, every=column != self.tuned_on)
            for pair, column in product(self.pairs, self.deciding)
        }
        return verdicts(comparisons, self.matters)

    def table(self) -> str:
        """The table in Markdown: the mean loss of each line in each setting, at its best rate, with the standard deviation of seeds."""
        lines = [["", "learning rate", *self.columns]]
        for line, label in self.labels.items():
            cells = [next(iter(self.by_rate(line, column).values())) for column in self.columns]
            rate = _rate(next(iter(self.by_rate(line, self.tuned_on))))
            lines.append([label, rate, *(f"{losses.mean():.3f} ({losses.std(ddof=1):.3f})" for losses in cells)])
        return _markdown(lines)

    def verdict_table(self) -> str:
        """The differences in the deciding settings with their verdicts, in Markdown."""
        lines = [["", "minus", *self.deciding]]
        for line, baseline in self.pairs:
            cells = [_difference(self.verdicts[line, baseline, column], 1, 3) for column in self.deciding]
            lines.append([self.labels[line], self.labels[baseline], *cells])
        return _markdown(lines)

    def drawn(self) -> bytes:
        """The picture: the differences of pairs by position, means over seeds and their 95 % intervals at each position alone."""
        columns = [column for column, (_, metric, *_) in self.columns.items() if metric.startswith("mean ")]
        size, shared = (9.5, 0.8 + 2.4 * len(self.rows)), {"sharex": True, "sharey": True, "squeeze": False}
        with plt.rc_context({"font.size": 9}), canvas(len(self.rows), len(columns), size, **shared) as (figure, panels):
            for row, (title, pairs) in zip(panels, self.rows.items(), strict=True):
                for axes, column in zip(row, columns, strict=True):
                    axes.axhline(0, color="0.3", linewidth=0.8)
                    axes.axvline(self.length, color="0.6", linewidth=1, linestyle=":")
                    for line, baseline in pairs:
                        curves = self._curves(line, column) - self._curves(baseline, column)
                        estimate = over_seeds(curves.to_numpy())
                        half, colour = estimate.half(), COLOURS[HUES[line.partition("_no")[0]]]
                        axes.plot(curves.index, estimate.mean, color=colour, linewidth=2, label=self.labels[line].partition(", ")[0])
                        axes.fill_between(curves.index, estimate.mean - half, estimate.mean + half, color=colour, alpha=0.2, linewidth=0)
                    axes.set_xscale("log", base=2)
                    axes.set_xlim(left=curves.index[0])
                    ticks = [self.length * 2**power for power in range(-3, 4) if self.length * 2**power < curves.index[-1]]
                    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                    axes.spines[["top", "right"]].set_visible(False)
                row[0].set_ylabel(f"{title}\nloss minus the baseline's, nats")
            finish(panels[0, 0])
            for axes, column in zip(panels[0], columns, strict=True):
                axes.set_title(f"RoPE: {column}", fontsize=9)
            figure.supxlabel(f"position (dotted: the training length, {self.length} tokens)", fontsize=9)
            return saved(figure)

    def _curves(self, line: str, column: str) -> pd.DataFrame:
        """The losses by position (positions, seeds) of a line in a setting at its best rate, from an eighth of the training length on."""
        _, metric, setting, _ = self.columns[column]
        data, arm = self._measured(line, metric.removeprefix("mean "), setting)
        runs = data[(data.arm == arm) & (data.rate == next(iter(self.by_rate(line, column)))) & (data.x >= self.length // 8)]
        return runs.pivot(index="x", columns="seed", values="value")


def at_best(ours: Mapping[float, np.ndarray], theirs: Mapping[float, np.ndarray], higher: bool, every: bool = False) -> Comparison:
    """The comparison of two arms by the values (seeds,) at each of their rates, of which the first is each arm's best.

    Args:
        higher: whether an arm is the better the higher its values are.
        every: whether rates were chosen by other values, so that a verdict must hold at every pair of rates.
    """
    ordered = sorted(theirs, key=lambda rate: rate not in ours)
    by_rates = np.stack([*ours.values()])[:, None] - np.stack([theirs[rate] for rate in ordered])
    place, shared = (0, ordered.index(next(iter(theirs)))), sum(rate in ours for rate in theirs)
    return Comparison(by_rates, place, shared=shared, every=every, higher=higher)


HUES = {"softmax": 0, "ssmax": 1, "log_n": 2, "ssmax_fixed": 3, "half": 4, "quarter": 5}  # an arm's colour in the reports' palette
HUES |= {"ssmax_fixed, n=fixed:753": 4, "ssmax_fixed, n=fixed:2048": 5, "ssmax_fixed, n=visible": 2}
LABELS = {
    "softmax": "softmax",
    "tau_half": "softmax, temperature 1/2",
    "tau_quarter": "softmax, temperature 1/4",
    "ssmax_fixed": "SSMax, n fixed at 64",
    "ssmax": "SSMax",
    "log_n": "log n",
}
EVERY = {arm: LABELS[arm] for arm in ("softmax", "ssmax_fixed", "ssmax", "log_n")} | {
    "ssmax_without_s": "SSMax without s",
    "ssmax_bias": "SSMax with b",
    "sqrt_log_n": "sqrt log n",
    "llama4": "Llama 4, f = 64",
    "yarn": "YaRN's factor",
    "infoscale": "InfoScale",
    "cosine": "cosine",
    "cosine_log_n": "cosine, log n",
    "qassmax": "QASSMax",
    "softmax1": "softmax1",
    "sink": "softmax, sink",
    "relu2": "relu^2",
    "relu2_sum": "relu^2, by its sum",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "sparsemax": "sparsemax",
    "entmax15": "1.5-entmax",
    "asentmax": "ASEntmax",
    "softpick": "softpick",
    "alibi": "ALiBi",
    "scale_invariant": "scale-invariant",
    "forget": "forgetting",
    "stick_breaking": "stick-breaking",
    "softmax_gate": "softmax, output gate",
    "linear": "linear",
}
QK_NORM = {"ssmax_fixed": "SSMax, n fixed at 256", "softmax": "softmax", "ssmax": "SSMax", "log_n": "log n"}
GROWTH = tuple((arm, "ssmax_fixed") for arm in ("softmax", "ssmax", "log_n"))
PUT_IN = {
    f"ssmax_fixed, n={n}": label
    for n, label in (
        ("fixed:753", "n fixed at 753 after training"),
        ("fixed:2048", "n fixed at 2,048 after training"),
        ("visible", "growth after training"),
    )
}
GROWTH_ALONE = tuple((f"{arm}_no_qk_norm", f"{baseline}_no_qk_norm") for arm, baseline in GROWTH)
SHOWN = (
    Losses(
        "eight-times",
        "length.md",
        QK_NORM | {f"{arm}_no_qk_norm": f"{label}, no QK-norm" for arm, label in QK_NORM.items()},
        (*GROWTH, *GROWTH_ALONE, ("softmax_no_qk_norm", "softmax")),
        {"at 256 tokens": ("", "val loss", "", 0)}
        | {words: ("", "mean loss", words, 2048) for words in ("as trained", "theta x 50", "yarn")},
        ("as trained", "theta x 50"),
        "theta x 50",
        0.02,
        "speeches",
        {"QK-norm": GROWTH, "no QK-norm": GROWTH_ALONE},
    ),
    Losses(
        "eight-times-after",
        "length.md",
        {"ssmax_fixed": "SSMax, n fixed at 256", **PUT_IN, "ssmax": "SSMax", "ssmax, n=fixed:256": "SSMax, n fixed at 256 after training"},
        (
            ("ssmax", "ssmax_fixed"),
            *((line, baseline) for baseline in ("ssmax_fixed", "ssmax") for line in PUT_IN),
            ("ssmax, n=fixed:256", "ssmax"),
        ),
        {words: ("", "mean loss", words, 2048) for words in ("as trained", "theta x 50")},
        ("as trained", "theta x 50"),
        "theta x 50",
        0.02,
        rows={"QK-norm": (("ssmax", "ssmax_fixed"), *((line, "ssmax_fixed") for line in PUT_IN))},
    ),
    Recall("recall", "retrieval.md", {arm: LABELS[arm] for arm in ("softmax", "ssmax", "log_n")}, "softmax", (2048,), 0.1, picture=True),
    Recall("recall-control", "retrieval.md", LABELS, "ssmax_fixed", (2048, 8192), 0.1, picture=True),
    Recall("recall-tuned", "retrieval.md", LABELS, "ssmax_fixed", (16384,), 0.25, tuned=True, picture=True, ranked=True),
    Recall("recall-all", "retrieval.md", EVERY, "softmax", (4096,), 0.25, tuned=True, picture=True, heads=True, ranked=True),
    Recall(
        "recall-after",
        "retrieval.md",
        {arm: LABELS[arm] for arm in ("softmax", "ssmax_fixed", "ssmax", "log_n")}
        | {"after_half": "softmax, 1/2 put in after training", "after_quarter": "softmax, 1/4 put in after training"},
        "ssmax_fixed",
        (16384,),
        0.25,
        rows="size",
        heading="steps",
        heads=True,
        picture=True,
    ),
    Recall(
        "when-to-swap",
        "retrieval.md",
        {"ssmax": "SSMax", "ssmax_b": "SSMax with b", "softmax": "softmax"}
        | {f"at_{part}{b}": f"SSMax{words} after {part} %" for b, words in (("", ""), ("_b", " with b")) for part in (25, 50, 75, 90)}
        | {"after": "SSMax put in after training", "after_more": "the same, 120 more steps"}
        | {"after_more_b": "the same with b, 120 more steps", "softmax_more": "softmax, 120 more steps"},
        "ssmax",
        (16384,),
        0.25,
        trends={
            "SSMax": {"ssmax": 0, "at_25": 0.25, "at_50": 0.5, "at_75": 0.75, "at_90": 0.9, "after": 1},
            "SSMax with b": {"ssmax_b": 0, "at_25_b": 0.25, "at_50_b": 0.5, "at_75_b": 0.75, "at_90_b": 0.9},
        },
    ),
    Recall(
        "needle",
        "retrieval.md",
        LABELS | {"ssmax_fixed": "SSMax, n fixed at 256"},
        "ssmax_fixed",
        (4096,),
        0.25,
        tuned=True,
        task="needle",
        layers="layers 2, 3",
    ),
)


def observed_half_length(lengths: Sequence[int], accuracy: Sequence[float]) -> float:
    """Where accuracy first falls below 1/2, interpolated in the logarithm of the length; infinite if it does at none of the lengths."""
    for index, right in enumerate(accuracy):
        if right < 0.5:
            if index == 0:
                return float(lengths[0])
            before = accuracy[index - 1]
            part = (before - 0.5) / (before - right)
            return float(lengths[index - 1] * (lengths[index] / lengths[index - 1]) ** part)
    return math.inf


def _rate(rate: float) -> str:
    """A learning rate with two digits."""
    return f"{rate:.1e}".replace("e-0", "e-").replace(".0e", "e")


def _tokens(length: float, never: str) -> str:
    """A length in tokens; `never` for an infinite one."""
    return never if math.isinf(length) else f"{length:,.0f}" if length < 1e6 else f"{length:.0e}".replace("e+0", "e")


def _markdown(lines: list[list[str]]) -> str:
    """A table of cells, the first line its headings."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])) + "\n"


def _spread(accuracies: np.ndarray) -> str:
    """The mean over seeds in per cent, with the lowest and highest where they are more than 2 apart."""
    values = 100 * accuracies
    return f"{values.mean():.1f}" + (f" [{values.min():.0f}, {values.max():.0f}]" if np.ptp(values) > 2 else "")


def _difference(verdict: Verdict, factor: float = 100, digits: int = 1) -> str:
    """A verdict, its margin times `factor`, with the difference and its interval; without interval where all seeds agree."""
    mean, low, high = (factor * value for value in verdict.interval.listed())
    interval = f"[{low:+.{digits}f}, {high:+.{digits}f}] " if math.isfinite(low) and low < high else ""
    return f"{mean:+.{digits}f} {interval}*{replace(verdict, margin=f'{factor * float(verdict.margin):g}').statement}*"


def filled(text: str, name: str, table: str) -> str:
    """A page with the table of some results in it. Raises LookupError: it has no place for them."""
    begin, end = f"<!-- results: {name} -->\n", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(begin)
    _, end, after = rest.partition(end)
    if not end:
        raise LookupError(f"no place for the results of {name}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def files() -> dict[Path, bytes]:
    """What is made of the results: the pages with their tables, and the pictures."""
    pages: dict[Path, str] = {}
    pictures = {}
    for shown in SHOWN:
        page = ROOT / "docs" / shown.page
        pages[page] = filled(pages.get(page) or page.read_text(encoding="utf-8"), shown.place, shown.table())
        if isinstance(shown, Losses):
            pages[page] = filled(pages[page], f"{shown.place} verdicts", shown.verdict_table())
            if shown.rows:
                pictures[ROOT / "docs" / f"{shown.place}.svg"] = shown.drawn()
            continue
        if shown.heads:
            pages[page] = filled(pages[page], f"{shown.name} heads", shown.head_table())
        if shown.trends:
            pages[page] = filled(pages[page], f"{shown.name} trends", shown.trend_table())
        if shown.picture:
            pictures[ROOT / "docs" / f"{shown.name}.svg"] = shown.overview() if shown.ranked else shown.drawn()
    runs, page = predictors.learned(RESULTS), ROOT / "docs" / "half-length.md"
    pages[page] = filled(page.read_text(encoding="utf-8"), "predictors", predictors.table(runs, _markdown))
    pictures[page.with_suffix(".svg")] = predictors.drawn(runs)
    return {page: text.encode() for page, text in pages.items()} | pictures


def same(committed: bytes, content: bytes) -> bool:
    """Whether a file is what its data say; of a picture that another release of matplotlib drew, its words are compared alone."""
    releases, words = ([re.findall(part, file) for file in (committed, content)] for part in (rb">(Matplotlib v.*?),", rb"<!-- (.*?) -->"))
    return words[0] == words[1] != [] if releases[0] != releases[1] else committed == content


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    equal = same if asked.check else bytes.__eq__
    differing = {path: content for path, content in files().items() if not path.exists() or not equal(path.read_bytes(), content)}
    for path, content in differing.items():
        print(f"{path.relative_to(ROOT)}: {'differs from results/' if asked.check else 'written'}")
        if not asked.check:
            path.write_bytes(content)
    return int(asked.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
