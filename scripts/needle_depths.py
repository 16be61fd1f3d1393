"""Needles by length and depth in docs/: accuracy under two settings of RoPE, heads' attention to the number, and the
verdicts.
"""

import textwrap
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import pandas as pd
from committed_results import ACCURACY, Results, markdown, runs_of
from pages import canvas, percentage_cells, saved

from lm.statistics.verdicts import Comparison, Verdict, verdicts


@dataclass(frozen=True)
class NeedleDepths(Results):
    """An experiment in which one needle of several is asked for, at several depths of the text.

    Attributes:
        baseline: the arm that all others are compared with, at depth 0 of the longest sequences with RoPE as trained.
        matters: smallest difference of interest, as a fraction.
    """

    baseline: str
    matters: float

    @cached_property
    def data(self) -> pd.DataFrame:
        return runs_of(self.name).sort_values("seed")

    @cached_property
    def accuracies(self) -> dict[tuple[str, str, float, int], np.ndarray]:
        """(seeds,) accuracy by arm, inference setting, depth and length."""
        depths = self.data.metric.str.extract(r"^needle \(depth ([\d.]+)\) accuracy$")[0].astype(float)
        runs = self.data.assign(depth=depths).dropna(subset=["depth"])
        return {key: group.value.to_numpy() for key, group in runs.groupby(["arm", "setting", "depth", "x"])}

    @cached_property
    def settings(self) -> list[str]:
        return sorted({setting for _, setting, *_ in self.accuracies})

    @cached_property
    def depths(self) -> list[float]:
        return sorted({depth for *_, depth, _ in self.accuracies})

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """The verdicts by arm, as one family."""
        place = self.settings[0], self.depths[0], self.lengths[-1]
        values = {arm: self.accuracies[(arm, *place)] for arm in self.labels}
        differences = {arm: values[arm] - values[self.baseline] for arm in self.labels if arm != self.baseline}
        return verdicts(
            {arm: Comparison(values, higher_is_better=True, bounds=ACCURACY) for arm, values in differences.items()},
            self.matters,
        )

    def attention(self, arm: str, layer: int) -> np.ndarray:
        """(seeds,) attention to the number of the layer's head that attends to it most."""
        runs = self.data[(self.data.arm == arm) & (self.data.metric == f"layer {layer} attention to the number")]
        return runs.groupby("seed").value.max().to_numpy()

    def tables(self) -> dict[str, str]:
        """The table in Markdown: accuracy at the first depth, in per cent, heads' attention to the number, and the
        verdicts.
        """
        length = f"{self.lengths[-1]:,}"
        lines = [
            [
                "layers 2, 3",
                *(f"{length}, {setting}" for setting in self.settings),
                "attention, layer 2",
                "attention, layer 3",
            ]
        ]
        lines[0].append(f"minus {self.labels[self.baseline].partition(' at ')[0]}, as trained")
        for arm, label in self.labels.items():
            words = [
                spread(100 * self.accuracies[arm, setting, self.depths[0], self.lengths[-1]], 0)
                for setting in self.settings
            ]
            words += [spread(self.attention(arm, layer), 2) for layer in (1, 2)]
            lines.append([label, *words, self.words(self.verdicts[arm]) if arm in self.verdicts else ""])
        return {self.place: markdown(lines)}

    def drawn(self) -> bytes:
        """The picture: mean accuracy by length and depth, a panel for each arm and setting."""
        shape = len(self.settings), len(self.labels)
        with canvas(*shape, (9, 1 + 1.9 * shape[0]), sharex=True, sharey=True, squeeze=False) as (figure, rows):
            for (row, setting), (column, arm) in product(enumerate(self.settings), enumerate(self.labels)):
                axes = rows[row, column]
                values = 100 * np.array(
                    [[self.accuracies[arm, setting, d, n].mean() for n in self.lengths] for d in self.depths]
                )
                percentage_cells(axes, values)
                axes.set_xticks(range(len(self.lengths)), [f"{length:,}" for length in self.lengths], rotation=30)
                axes.set_yticks(range(len(self.depths)), [f"{100 * depth:g} %" for depth in self.depths])
                if row == 0:
                    axes.set_title(textwrap.fill(self.labels[arm], 16, break_long_words=False), fontsize=9)
                if column == 0:
                    axes.set_ylabel(f"RoPE {setting}\ntext before the needle")
            figure.supxlabel(f"mean accuracy, %, by sequence length (training: {self.lengths[0]} tokens)", fontsize=9)
            return saved(figure)


def spread(values: np.ndarray, digits: int) -> str:
    """The mean of values with the lowest and highest."""
    return f"{values.mean():.{digits}f} [{values.min():.{digits}f}, {values.max():.{digits}f}]"
