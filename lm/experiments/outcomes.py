"""What became of a run of an experiment, read from its run folder alone."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from lm.errors import RunError, one_line
from lm.runs.evaluations import Evaluation, evaluation_files
from lm.runs.folder import CHECKPOINTS, METRICS, read_json
from lm.runs.metric_log import DIVERGED, read_metrics
from lm.runs.series import Series
from lm.runs.validation import UNIGRAM

SELECTION = "val/loss"  # what chooses learning rates, whatever the primary metric

State = Literal["not started", "interrupted", "finished", "diverged"]


@dataclass(frozen=True)
class Values:
    """A metric by unit, such as a held-out sequence.

    Attributes:
        values, weights: (units,).
        groups: (units,) documents.
        identity: of what was measured: equal in runs that can be compared.
        better: which direction is.
    """

    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    identity: str
    better: str

    def part(self, selection: bool) -> "Values":
        """Those of the documents that select, about a third, or of those that are reported on: by a hash of the document."""
        chosen = np.array([selects(self.identity, group) for group in self.groups.tolist()]) == selection
        return Values(self.values[chosen], self.weights[chosen], self.groups[chosen], self.identity, self.better)

    @property
    def mean(self) -> float:
        """The weighted mean over units; NaN of none."""
        return float(np.average(self.values, weights=self.weights)) if len(self.values) else math.nan


def selects(data: str, document: object) -> bool:
    """Whether a held-out document is of the third on which learning rates are chosen."""
    return hashlib.sha256(f"{data} {document}".encode()).digest()[0] % 3 == 0


@dataclass(frozen=True)
class Outcome:
    """A run folder, and the step that the run is to reach."""

    folder: Path
    last_step: int

    @cached_property
    def state(self) -> State:
        """How far the run came. A final loss above the unigram cross-entropy is divergence, too."""
        if not self.folder.is_dir():
            return "not started"
        if any(DIVERGED in line for line in read_metrics(self.folder / METRICS)[0]):
            return "diverged"
        found = self.series(SELECTION)
        if found is None:
            return "interrupted" if any((self.folder / CHECKPOINTS).glob("*.ckpt")) else "not started"
        level = found.references.get(UNIGRAM, math.inf)
        return "finished" if found.means[0] <= level else "diverged"

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train."""
        return self.state in ("finished", "diverged")

    def series(self, metric: str) -> Series | None:
        """The series that logs a metric at the last step; None if it was not measured. Raises RunError: a damaged file."""
        for (_, step), path in evaluation_files(self.folder).items():
            if step != self.last_step:
                continue
            content = read_json(path)
            if "series" not in content:
                continue
            try:
                evaluation = Evaluation.of(content)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RunError(f"{path}: not an evaluation: {one_line(error)}; delete it, and it is measured again") from None
            for one in evaluation.series:
                if metric in one.logged:
                    return one
        return None

    def values(self, metric: str) -> Values | None:
        """A metric by unit at the last step; None if it was not measured by unit."""
        one = self.series(metric)
        if one is None or not one.samples:
            return None
        sample, values = one.column(one.logged.index(metric))
        return Values(values.astype(float), sample.weights, sample.groups, one.data_fingerprint or sample.sha256, one.better)

    def loss(self, selection: bool) -> float:
        """The mean of the selection metric over its part of the documents; infinite of a run that diverged."""
        found = self.values(SELECTION) if self.state == "finished" else None
        return found.part(selection).mean if found else math.inf
