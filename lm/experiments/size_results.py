"""The final runs of one size of an experiment, as its page shows them: by arm, on the part of the held-out text that is reported on."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from lm.experiments.procedure import Procedure, Run
from lm.report.comparison import Comparison, comparison_of
from lm.report.sections import Arm
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CONFIG, ENVIRONMENT
from lm.runs.record import RunRecord, read_run
from lm.runs.series import Sample, Series, selects
from lm.statistics.verdicts import Verdict


class SizeResults:
    """What there is of a size; `verdicts`: all of the procedure's.

    Attributes:
        rates: of the arms; None while they are being tuned.
        verdicts: by arm, on all but the baseline.
        final: the final runs that are known, by seed and arm.
    """

    def __init__(self, procedure: Procedure, size: str, verdicts: dict[tuple[str, str], Verdict]):
        self.experiment, self.size, self._quantity = procedure.experiment, size, procedure.quantity
        self.verdicts = {name: verdicts[size, name] for name in self.arm_names[1:]}
        self.rates = procedure.rates(size)
        self.final: list[Run] = list(procedure.final(size))
        self._records: dict[Path, RunRecord] = {}

    @property
    def arm_names(self) -> list[str]:
        """Of all arms, the baseline first."""
        return [arm.name for arm in self.experiment.arms]

    def colour(self, arm: str) -> int:
        """Number of an arm's colour: the same in all pictures."""
        return self.arm_names.index(arm)

    def record(self, run: Run) -> RunRecord | None:
        """A run's folder as it was read; None where it has not begun."""
        folder = run.config.run_folder
        if folder not in self._records and all((folder / name).is_file() for name in (CONFIG, ENVIRONMENT)):
            self._records[folder] = read_run(folder)
        return self._records.get(folder)

    @cached_property
    def begun(self) -> list[tuple[Run, RunRecord]]:
        """The final runs that have begun, finished, diverged or not, with their records."""
        return [(run, record) for run in self.final if (record := self.record(run))]

    @cached_property
    def finished(self) -> list[tuple[Run, RunRecord]]:
        """Those that have finished."""
        return [(run, record) for run, record in self.begun if run.outcome.state == "finished"]

    def value(self, run: Run) -> float | None:
        """What is compared of a final run (`Procedure.quantity`); None of a run that has not finished."""
        return self._quantity(run.outcome) if run.outcome.state == "finished" else None

    @cached_property
    def comparison(self) -> Comparison | None:
        """The arms that have finished runs, on the documents that are reported on; None if there are none. Without differences where the
        baseline has none."""
        by_arm = {name: [record for run, record in self.finished if run.arm == name] for name in self.arm_names}
        arms = tuple(Arm(name, tuple(map(reported, records))) for name, records in by_arm.items() if records)
        if not arms:
            return None
        made = comparison_of(arms)
        return made if arms[0].label == self.arm_names[0] else replace(made, differences=())


def reported(record: RunRecord) -> RunRecord:
    """A run with its evaluations on the documents that are reported on."""
    evaluations = tuple(replace(one, series=tuple(_series(one))) for one in record.evaluations)
    return replace(record, evaluations=evaluations)


def _series(evaluation: Evaluation) -> list[Series]:
    of_text = any(one.data_fingerprint for one in evaluation.series)
    found = [report_part(one) for one in evaluation.series if one.samples]
    alone = [replace(one, metric=f"{one.metric}, all held-out text") if of_text else one for one in evaluation.series if not one.samples]
    return [one for one in (*found, *alone) if one]


def report_part(series: Series) -> Series | None:
    """A series on the documents that are reported on; as it is if it is of no held-out text; None if none of these is left. Curves of
    bins become as coarse as the bins are."""
    if not series.data_fingerprint:
        return series
    samples = [one.part(~selects(series.data_fingerprint, one.groups)) for one in series.samples]
    if not all(len(one.weights) and one.weights.sum() for one in samples):
        return None
    means = np.concatenate([_mean(one) for one in samples])
    means[~np.isfinite(series.means)] = np.nan
    curve = np.repeat(means, np.diff(series.axis.values).astype(int)) if series.bins else None
    return replace(series, samples=tuple(samples), means=means, curve=curve)


def _mean(sample: Sample) -> np.ndarray:
    """Over units, (columns,); a unit is left out where it has no value, as in the means of series."""
    values = np.ma.masked_invalid(sample.values)
    return np.ma.average(values, axis=0, weights=sample.weights).filled(np.nan)
