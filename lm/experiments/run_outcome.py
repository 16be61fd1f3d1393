"""The outcome of a run of an experiment, read from its run folder alone."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from lm.errors import RunError, one_line
from lm.runs.evaluations import Evaluation, evaluation_files, read_evaluation
from lm.runs.folder import CHECKPOINTS, DIVERGED, METRICS, curve, read_metrics, step_path
from lm.runs.same_run import check_measured
from lm.runs.series import UNIGRAM, Series, selects
from lm.schema import Plain
from lm.statistics.learned import tokens_to_reach

SELECTION = "val/loss"  # what chooses learning rates, whatever the primary metric
RISE = 0.5  # nats per token: from the lowest training loss to the last one, of a run that diverged and stayed finite

State = Literal["unfinished", "finished", "diverged"]


@dataclass(frozen=True)
class UnitValues:
    """A metric by unit, such as a held-out sequence.

    Attributes:
        values, weights: (units,).
        groups: (units,) documents.
        identity: of the data and of the sequences measured: equal in runs that can be compared.
        better: which direction is.
        held_out: whether units are of the held-out text, a part of which selects; of others, such as questions, all report.
    """

    values: np.ndarray
    weights: np.ndarray
    groups: np.ndarray
    identity: tuple[str, str]
    better: str
    held_out: bool = True

    def part(self, selection: bool) -> "UnitValues":
        """The values of the documents that select, about a third, or of those that are reported on: by a hash of the document, which is
        for a sequence the one that it begins in. All, where they are not of the held-out text.

        Raises:
            RunError: there are none.
        """
        if not self.held_out:
            return self
        chosen = selects(self.identity[0], self.groups) == selection
        if not chosen.any():
            use = "choose learning rates" if selection else "report"
            raise RunError(f"none of {len(set(self.groups.tolist()))} held-out documents is left to {use} on: hold out more text")
        return UnitValues(self.values[chosen], self.weights[chosen], self.groups[chosen], self.identity, self.better)

    @property
    def mean(self) -> float:
        """The weighted mean over units."""
        return float(np.average(self.values, weights=self.weights))


@dataclass(frozen=True)
class Outcome:
    """A run folder, the step that the run is to reach, and the metric that is wanted of it then.

    Attributes:
        scheduled: kinds of evaluation that its configuration has measured at that step, beside the validation.
        asked: those that it must have then, each with the keys of `eval` that it is asked for with; {}: the scheduled ones will do.
    """

    folder: Path
    last_step: int
    metric: str
    scheduled: tuple[str, ...] = ()
    asked: dict[str, dict[str, Plain]] = field(default_factory=dict)

    @cached_property
    def state(self) -> State:
        """How far the run came: `finished` once its last checkpoint, both metrics and all that is measured at the end are there, unless
        it has diverged."""
        if not self.folder.is_dir():
            return "unfinished"
        if self.divergence:
            return "diverged"
        if not self.trained:
            return "unfinished"
        return "finished" if self.complete and self.measured and self.values(self.metric) is not None else "unfinished"

    @cached_property
    def divergence(self) -> str:
        """How the run diverged, in words; empty if it didn't.

        It stopped at values that are not finite, or its final loss isn't; or it learned nothing that was left at its end: its final loss
        is above the unigram cross-entropy, and its training loss ended more than `RISE` above the lowest that it had logged.
        """
        lines = read_metrics(self.folder / METRICS)[0]
        if said := next((str(line[DIVERGED]) for line in lines if DIVERGED in line), ""):
            if self.checkpoint.exists():
                raise RunError(f"{self.folder / METRICS}: says that the run diverged, but {self.checkpoint} is there: bring it back")
            return said
        if self.trained and not math.isfinite(self.series(SELECTION).means[0]):
            return f"final {SELECTION} is not finite"
        logged = curve(lines, "train/loss").loss
        logged = logged[np.isfinite(logged)]
        if not self.not_learned or not len(logged) or logged[-1] - logged.min() <= RISE:
            return ""
        return f"{self.not_learned}, training loss rose from {logged.min():.4f} to {logged[-1]:.4f}"

    @cached_property
    def not_learned(self) -> str:
        """Words for a final loss above the unigram cross-entropy; empty if it is below."""
        series = self.series(SELECTION) if self.trained else None
        loss, level = (series.means[0], series.references.get(UNIGRAM, math.inf)) if series else (0.0, math.inf)
        return f"final loss above the unigram cross-entropy ({loss:.4f} > {level:.4f})" if loss > level else ""

    @property
    def checkpoint(self) -> Path:
        """Its last one."""
        return step_path(self.folder / CHECKPOINTS, self.last_step)

    @cached_property
    def trained(self) -> bool:
        """Whether the last checkpoint is there, and SELECTION was measured of it."""
        return self.checkpoint.exists() and self.series(SELECTION) is not None

    @cached_property
    def complete(self) -> bool:
        """Whether each scheduled evaluation of the last step was made, or has failed (`eval.on_error` is log): a kill leaves neither."""
        files = evaluation_files(self.folder)
        missing = [kind for kind in self.scheduled if (kind, self.last_step) not in files]
        lines = read_metrics(self.folder / METRICS)[0] if missing else []
        failed = {name for line in lines if line.get("step") == self.last_step for name in line}
        return all(f"{kind}/failed" in failed for kind in missing)

    @cached_property
    def measured(self) -> bool:
        """Whether all that is asked for was measured as it is asked for."""
        return self.asked.items() <= {one.kind: one.asked for one in self._evaluations}.items()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to train or to measure."""
        return self.state != "unfinished"

    @property
    def names(self) -> list[str]:
        """The metrics that were measured by unit at the last step."""
        return [name for evaluation in self._evaluations for one in evaluation.series if one.samples for name in one.logged]

    def series(self, metric: str) -> Series | None:
        """The series that logs a metric at the last step; None if it was not measured. Raises RunError: a damaged file."""
        return next((one for evaluation in self._evaluations for one in evaluation.series if metric in one.logged), None)

    @property
    def sealed(self) -> bool:
        """Whether digests show that the evaluations at the last step are of its weights; False: an older version left none."""
        return self._measured_last[1]

    @property
    def codes(self) -> list[dict[str, str]]:
        """Digests of the code that measured the evaluations at the last step, one for each."""
        return [one.code for one in self._evaluations]

    @property
    def _evaluations(self) -> list[Evaluation]:
        """The evaluations of the last step."""
        return self._measured_last[0]

    @cached_property
    def _measured_last(self) -> tuple[list[Evaluation], bool]:
        """`_evaluations` and `sealed`. Raises RunError: they are of other weights, or were altered."""
        files = evaluation_files(self.folder)
        found = [one for (_, step), path in files.items() if step == self.last_step for one in _read(path)]
        return found, not found or not self.checkpoint.exists() or check_measured(self.folder, found, self.checkpoint)

    def values(self, metric: str) -> UnitValues | None:
        """A metric by unit at the last step, whose mean is the logged one; None if it was not measured by unit."""
        if metric not in self._values:
            self._values[metric] = _by_unit(self.series(metric), metric)
        return self._values[metric]

    @cached_property
    def _values(self) -> dict[str, UnitValues | None]:
        return {}

    def tokens_to_reach(self, level: float, better: Literal["lower", "higher"], selection: bool) -> float:
        """Tokens at which the wanted metric first reached a level, on the documents that select or on those that report, from the run's
        evaluations on the sequences of the last one; 0 if its first one had, infinite if none had or it has not finished."""
        if self.state != "finished":
            return math.inf
        if selection not in self._reached:
            identity = self.values(self.metric).identity
            points = [(one.tokens_seen, values.part(selection).mean) for one, values in self._history if values.identity == identity]
            self._reached[selection] = tokens_to_reach(*zip(*points, strict=True), level, better)
        return self._reached[selection]

    @cached_property
    def _reached(self) -> dict[bool, float]:
        return {}

    @cached_property
    def _history(self) -> list[tuple[Evaluation, UnitValues]]:
        """The evaluations of the wanted metric up to the last step, and its values then."""
        kinds = {one.kind for one in self._evaluations for series in one.series if self.metric in series.logged}
        files = [(at, path) for at, path in sorted(evaluation_files(self.folder).items()) if at[0] in kinds and at[1] <= self.last_step]
        read = [one for _, path in files for one in _read(path)]
        check_measured(self.folder, read, self.checkpoint)
        found = [(one, next((series for series in one.series if self.metric in series.logged), None)) for one in read if one.tokens_seen]
        return [(one, values) for one, series in found if (values := _by_unit(series, self.metric))]

    def mean(self, metric: str, selection: bool) -> float:
        """The mean of a metric over the documents that select or those that are reported on; infinite of a run that has not finished."""
        return self.values(metric).part(selection).mean if self.state == "finished" else math.inf


def _read(path: Path) -> list[Evaluation]:
    """The evaluation in a file; [] if it holds no series. Raises RunError: it is damaged."""
    content = read_evaluation(path)
    try:
        return [Evaluation.of(content)] if "series" in content else []
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: not an evaluation: {one_line(error)}; delete it, and it is measured again") from None


def _by_unit(one: Series | None, metric: str) -> UnitValues | None:
    """A metric that a series logs by unit; None if it has no units."""
    if one is None or not one.samples:
        return None
    if one.bins:  # logged is the mean over every position
        (sample,), widths = one.samples, np.diff(one.axis.values)
        values = sample.values @ widths / widths.sum()
    else:
        sample, values = one.column(one.logged.index(metric))
    identity = (one.data_fingerprint or sample.sha256, sample.sha256)
    return UnitValues(values.astype(float), sample.weights, sample.groups, identity, one.better, bool(one.data_fingerprint))
