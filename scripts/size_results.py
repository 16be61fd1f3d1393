"""Make the tables and the picture in docs/ of an experiment on text with models of several sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from committed_results import ARM_COLOUR_NUMBERS, markdown_table
from loss_results import LossResults
from page_pictures import styled_figure, svg_bytes

from lm.report.pictures import COLOURS
from lm.statistics.intervals import trend_per_doubling


@dataclass(frozen=True)
class LossResultsBySize(LossResults):
    """This class shows each arm's loss at several sizes. A line of the table is an arm of one size, such as
    `1.3M ssmax`.

    Attributes:
        parameters: numbers of parameters, in millions, by the name of the size.
        arm_labels: words for the arms that are compared, by name.
    """

    parameters: Mapping[str, float] = field(default_factory=dict)
    arm_labels: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def final_runs(self) -> pd.DataFrame:
        runs = super().final_runs
        return runs.assign(arm=runs["size"] + " " + runs["arm"])

    def differences(self, arm: str, column: str) -> np.ndarray:
        """Return an arm's losses minus its baseline's, (sizes, seeds), each at its best rate."""
        pairs = (pair for pair in self.pairs if pair[0].endswith(f" {arm}"))
        losses = ([next(iter(self.values_by_rate(line, column).values())) for line in pair] for pair in pairs)
        return np.stack([values - baseline for values, baseline in losses])

    def tables(self) -> dict[str, str]:
        return super().tables() | {f"{self.table_name} trends": self.trend_table()}

    def trend_table(self) -> str:
        """Return a Markdown table of each arm's change of its difference with each doubling of parameters. An interval
        of 95 % over seeds holds alone.
        """
        lines = [["", "setting", "change with each doubling"]]
        for arm in self.arm_labels:
            for column in self.decisive_settings:
                trend = trend_per_doubling(self.differences(arm, column), np.array([*self.parameters.values()]))
                words = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*trend.as_list())
                lines.append([self.arm_labels[arm], column, words])
        return markdown_table(lines)

    def draw_picture(self) -> bytes:
        """Draw a panel for each decisive setting: each arm's difference to its baseline by parameters, with the
        intervals of the verdicts."""
        with styled_figure(1, len(self.decisive_settings), (7.5, 3.4), sharey=True, squeeze=False) as (figure, panels):
            for axes, column in zip(panels[0], self.decisive_settings, strict=True):
                axes.axhspan(-self.matters, self.matters, color="0.9", linewidth=0)
                for number, arm in enumerate(self.arm_labels):
                    intervals = [
                        verdict.interval for (line, _, setting), verdict in self.verdicts.items()
                        if line.endswith(f" {arm}") and setting == column
                    ]  # fmt: skip
                    places = [amount * 1.04 ** (number - 1.5) for amount in self.parameters.values()]
                    means = [interval.mean for interval in intervals]
                    ends = [[x.mean - x.low for x in intervals], [x.high - x.mean for x in intervals]]
                    colour = COLOURS[ARM_COLOUR_NUMBERS.get(arm, number + 1)]
                    axes.errorbar(places, means, ends, fmt="o-", color=colour, label=self.arm_labels[arm], markersize=4)
                axes.set_xscale("log")
                axes.set_xticks([*self.parameters.values()], [*self.parameters])
                axes.minorticks_off()
                axes.set_title(f"RoPE: {column}", fontsize=9)
            panels[0, 0].set_ylabel("loss minus softmax's, nats")
            figure.supxlabel(f"parameters (grey: at most {self.matters:g})", fontsize=9)
            figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
            return svg_bytes(figure)
