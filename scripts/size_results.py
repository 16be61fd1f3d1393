"""Make the tables in docs/ of the experiment that compares normalizers at several model sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from committed_results import final_run_lines, markdown_table
from loss_results import LossResults

from lm.statistics.intervals import Estimate, estimate_over_seeds


@dataclass(frozen=True)
class LossResultsBySize(LossResults):
    """This class shows results on text of models of several sizes, some of which may be those of another experiment.

    A row's name is that of its arm and that of its size, such as `ssmax 1.3M`.

    Attributes:
        arm_labels: words for the arms, by their names; the first is the baseline of each size.
        sizes: for each size, by its name, the folder of results/ that holds its runs, and the number of parameters.
    """

    arm_labels: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def final_runs(self) -> pd.DataFrame:
        """Return the lines of seeds.csv that belong to the final runs of all sizes, with rows' names as arms."""
        runs_by_size = {size: final_run_lines(folder) for size, (folder, _) in self.sizes.items()}
        return pd.concat(
            (runs[runs["size"] == size] if "size" in runs else runs).assign(
                arm=lambda part, size=size: part.arm + f" {size}"
            )
            for size, runs in runs_by_size.items()
        )

    def tables(self) -> dict[str, str]:
        """Return the Markdown tables of the page, by name."""
        return super().tables() | {f"{self.table_name} trends": self.size_trend_table()}

    def size_trend_table(self) -> str:
        """Return a Markdown table of how each arm's difference to the baseline changes with each doubling of
        parameters: the slope of a line through the sizes' means, by least squares, with its 95 % interval. Sizes of one
        experiment share seeds, and are combined seed by seed; experiments share none (Welch's t)."""
        (baseline, *arms), parameters = self.arm_labels, [count for _, count in self.sizes.values()]
        slope_weights = np.linalg.pinv(np.vander(np.log2(parameters), 2))[0]
        lines = [["with each doubling of parameters", *self.decisive_columns]]
        for arm in arms:
            cells = []
            for column in self.decisive_columns:
                parts: dict[str, np.ndarray] = {}  # (seeds,) of each experiment, whose means sum to the slope
                for weight, (size, (folder, _)) in zip(slope_weights, self.sizes.items(), strict=True):
                    losses, baseline_losses = (self.best_values(f"{name} {size}", column) for name in (arm, baseline))
                    parts[folder] = parts.get(folder, 0) + weight * (losses - baseline_losses)
                estimates = [estimate_over_seeds(values) for values in parts.values()]
                variances = np.array([estimate.standard_error**2 for estimate in estimates])
                degrees = np.array([estimate.degrees_of_freedom for estimate in estimates])
                slope = Estimate(
                    sum(estimate.mean for estimate in estimates),
                    np.sqrt(variances.sum()),
                    variances.sum() ** 2 / (variances**2 / degrees).sum(),
                    "seeds",
                )
                cells.append("{:+.3f} [{:+.3f}, {:+.3f}]".format(*slope.interval().as_list()))
            lines.append([self.arm_labels[arm], *cells])
        return markdown_table(lines)

    def best_values(self, row_name: str, column: str) -> np.ndarray:
        """Return the losses (seeds,) of a row in the setting `column` at its best rate."""
        return next(iter(self.values_by_rate(row_name, column).values()))
