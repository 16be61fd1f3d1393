"""Tables of an experiment's page, and the final runs of a size that they show, on the part of the held-out text that reports."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path

import numpy as np

from lm.config.effects import effect_of
from lm.experiments.experiment import Experiment
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import crossed_runs
from lm.report.comparison import Comparison, comparison_of, show
from lm.report.descriptions import how_measured
from lm.report.sections import Arm
from lm.report.tables import Cell, Column, Table, digits, four_digits, signed
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CONFIG, ENVIRONMENT, METRICS, peak_memory, training_seconds
from lm.runs.identity import starts
from lm.runs.record import RunRecord, read_run
from lm.runs.series import Sample, Series, selects
from lm.schema import Plain
from lm.statistics.intervals import Interval, over_seeds
from lm.statistics.verdicts import Verdict


class SizeResults:
    """The final runs of a size; `verdicts`: all of the procedure's.

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
        """The final runs of all arms, the baseline first."""
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
        """The runs that have finished."""
        return [(run, record) for run, record in self.begun if run.outcome.state == "finished"]

    def value(self, run: Run) -> float | None:
        """The number by which a final run is compared (`Procedure.quantity`); None of a run that has not finished."""
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


_Made = tuple[Column, list[Cell]]


def summary_table(sizes: list[SizeResults], lines: list[dict[str, Plain]]) -> Table:
    """A row for each size and arm, from the lines of `summary`."""
    experiment, verdicts = sizes[0].experiment, [found.verdicts.get(arm) for found in sizes for arm in found.arm_names]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[_Made]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    primary, base = experiment.primary, experiment.arms[0].name
    made = column("size", [line["size"] or None for line in lines], kind="label")
    made += column("arm", [line["arm"] for line in lines], kind="label")
    made += column(experiment.tune.key, [None if line["rate"] is None else f"{line['rate']:g}" for line in lines])
    made += column("seeds", [f"{line['runs']} of {line['of']}" for line in lines])
    kind = "mean" if primary.reach is None else "geometric mean,"
    made += column(f"{kind} {primary.quantity}", [_amount(experiment, line["mean"]) for line in lines], "report text")
    if primary.reach is not None:
        made += column("have reached it", [f"{line['reached']} of {line['runs']}" for line in lines])
    if primary.learned is not None:
        made += column("have learned", [f"{line['learned']} of {line['ended']}" for line in lines])
        fractions = [Interval(*line["fraction_learned"]) if line["ended"] else None for line in lines]
        made.append((Column("fraction", "95% interval, Clopper-Pearson", "mean", 2), fractions))
    over, intervals = "interval over seeds, all together 95%", [one and one.interval for one in verdicts]
    if primary.reach is None:
        made += column(f"difference to {base}", intervals, over, "difference")
    else:
        made += column(f"factor to {base}", intervals, over, "mean")
    if primary.learned is None:
        both = [one and one.over_documents for one in verdicts]
        made += column("on other text of the kind", both, "interval over seeds and documents, all together 95%", "difference")
    made += column("p", [one and f"{one.p:.2g}" for one in verdicts], "adjusted")
    exact = [None if one is None or one.p_exact is None else f"{one.p_exact:.2g}" for one in verdicts]
    made += column("p of the sign-flip test", exact, "adjusted")
    made += column("verdict", [one and one.words for one in verdicts], kind="words")
    return Table("Summary", "", tuple(made))


def seeds_table(found: SizeResults) -> Table:
    """The primary metric of every final run on the report text, and its differences to the baseline's run of the same seed."""
    primary, base = found.experiment.primary, found.arm_names[0]
    runs = {(run.arm, run.seed): run for run in found.final}
    values = {at: found.value(run) for at, run in runs.items()}
    seeds = found.experiment.seeds
    made: list[_Made] = [(Column("seed", kind="label"), list(map(str, seeds)))]
    for arm in found.arm_names:
        at = [(arm, seed) for seed in seeds]
        words = [
            _amount(found.experiment, values[each]) if values.get(each) is not None
            else runs[each].outcome.state if each in runs else "no rate"
            for each in at
        ]  # fmt: skip
        made.append((Column(arm, primary.quantity), words))
    for arm in found.arm_names[1:]:
        both = [(values.get((arm, seed)), values.get((base, seed))) for seed in seeds]
        if primary.reach is None:
            made.append((Column(f"{arm} - {base}", primary.metric), [None if None in pair else signed(pair[0] - pair[1]) for pair in both]))
        else:
            ratios = [f"{pair[0] / pair[1]:.3g}" if reached(pair) else None for pair in both]
            made.append((Column(f"{arm} / {base}", primary.quantity), ratios))
    return Table("Every seed" + (f", {found.size}" if found.size else "") + ", on the report text", primary.quantity, tuple(made))


def crossed_table(procedure: Procedure, size: str) -> Table | None:
    """The final seeds of arms that are trained at several rates, at each of them; None if there are none."""
    experiment, choice, base = procedure.experiment, procedure.choice(size), procedure.experiment.arms[0].name
    finished = {at: [one for one in some if one.outcome.state == "finished"] for at, some in crossed_runs(procedure, size).items()}
    if not finished:
        return None
    values = {at: {one.seed: procedure.quantity(one.outcome) for one in some} for at, some in finished.items()}

    def apart(arm: str, rate: float) -> Interval | None:
        theirs = values.get((base, rate), {}) if arm != base else {}
        both = [value - theirs[seed] for seed, value in values[arm, rate].items() if seed in theirs]
        return over_seeds(np.array(both)).interval() if len(both) > 1 else None

    def mean(some: Collection[float]) -> str | None:
        return digits(float(np.mean(list(some)))) if some else None

    used = {arm: {rates[0]: "chosen by tuning"} for arm, rates in choice.final.items()}
    for arm, rate in ((arm, rate) for arm, rate in choice.rates.items() if choice.settled and arm in used):
        used[arm][rate] = ", ".join(filter(None, (used[arm].get(rate), "judged")))
    made: list[_Made] = [
        (Column("arm", kind="label"), [arm for arm, _ in finished]),
        (Column(experiment.tune.key), [f"{rate:g}" for _, rate in finished]),
        (Column("use", kind="words"), [used[arm].get(rate) for arm, rate in finished]),
        (Column("seeds"), [f"{len(some)} of {len(experiment.seeds)}" for some in finished.values()]),
        (
            Column(f"mean {experiment.chosen_by}", "selection text"),
            [mean([procedure.choosing(each.outcome) for each in one]) for one in finished.values()],
        ),
    ]
    if experiment.primary.reach is None:
        means = [mean(some.values()) for some in values.values()]
        made.append((Column(f"mean {experiment.primary.quantity}", "report text"), means))
        over = "95% interval over seeds, not adjusted"
        made.append((Column(f"difference to {base}, both at this rate", over, "difference"), [apart(*at) for at in finished]))
    return Table("Final seeds at the rates of both arms" + (f", {size}" if size else ""), "", tuple(made))


def reached(tokens: tuple[float | None, ...]) -> bool:
    """Whether all are numbers of tokens at which a run has reached its level."""
    return all(one is not None and 0 < one < np.inf for one in tokens)


def _amount(experiment: Experiment, value: float | None) -> str | None:
    """The number by which a run is compared, in digits; tokens in whole numbers."""
    if experiment.primary.reach is None or value is None:
        return digits(value)
    return f"{value:,.0f}" if reached((value,)) else "at the first evaluation" if value == 0 else "not reached"


def cost_table(found: SizeResults) -> Table | None:
    """The costs of a run of each arm, mean over its finished final runs; None if none has finished."""
    by_arm = {arm: [record for run, record in found.finished if run.arm == arm] for arm in found.arm_names}
    by_arm = {arm: records for arm, records in by_arm.items() if records}
    times = {record.folder: _under_way(record) for _, record in found.begun}
    units = {
        "parameters": "M", "in the normalizer": "parameters", "tokens": "M a run", "training": "TFLOP a run", "training time": "s a run",
        "speed": "tokens/s", "peak memory": _memory_of(record for records in by_arm.values() for record in records),
        "beside it": "other runs, mean",
    }  # fmt: skip
    costs = {arm: [dict(zip(units, _costs(record, times), strict=True)) for record in records] for arm, records in by_arm.items()}
    made: list[_Made] = [(Column("arm", kind="label"), list(by_arm)), (Column("runs"), [str(len(records)) for records in by_arm.values()])]
    for name, unit in units.items():
        known = [[one[name] for one in some if one[name] is not None] for some in costs.values()]
        made += [(Column(name, unit), [four_digits(np.mean(some)) if some else None for some in known])] if any(known) else []
    devices = [", ".join(dict.fromkeys(show(record.used("device")) for record in records)) for records in by_arm.values()]
    made.append((Column("device", kind="words"), devices))
    return Table("What a run took" + (f", {found.size}" if found.size else ""), "", tuple(made)) if by_arm else None


def _costs(record: RunRecord, times: dict[Path, tuple[datetime, datetime] | None]) -> tuple[float | None, ...]:
    """In the order and units of the table; None where the run folder does not say."""
    log = record.folder / METRICS
    tokens, seconds, memory = record.tokens_seen, training_seconds(log), peak_memory(log)
    total, normalizer, flops = (record.measured(name) for name in ("parameters.total", "parameters.normalizer", "flops_per_token"))
    return (
        total and total / 1e6,
        normalizer,
        tokens and tokens / 1e6,
        flops and tokens and flops * tokens / 1e12,
        seconds,
        tokens and seconds and tokens / seconds,
        memory and memory / 2**30,
        _beside(record, times),
    )


def _memory_of(records: Iterable[RunRecord]) -> str:
    """The unit of the peak memory, with what it is of."""
    on_cpu = [str(record.used("device") or "cpu").startswith("cpu") for record in records]
    return "GiB, whole process" if all(on_cpu) else "GiB, whole process on a CPU" if any(on_cpu) else "GiB, tensors on the GPU"


def _under_way(record: RunRecord) -> tuple[datetime, datetime] | None:
    """From when to when the last start of a run trained at least."""
    begun = starts(record.environment)
    seconds = training_seconds(record.folder / METRICS, begun[-1]["step"]) if begun else None
    if not seconds or not begun[-1].get("time"):
        return None
    first = datetime.fromisoformat(begun[-1]["time"])
    return first, first + timedelta(seconds=seconds)


def _beside(record: RunRecord, times: dict[Path, tuple[datetime, datetime] | None]) -> float | None:
    """How many other final runs were under way at a time, on average over this one's."""
    mine = times[record.folder]
    if mine is None:
        return None
    others = [one for folder, one in times.items() if one and folder != record.folder]
    shared = sum(max(0.0, (min(mine[1], stop) - max(mine[0], start)).total_seconds()) for start, stop in others)
    return shared / (mine[1] - mine[0]).total_seconds()


def configuration_table(comparison: Comparison) -> Table:
    """Every configuration key in which the arms differ, but for names, folders and logging."""
    lines = [(key, values) for key, values in comparison.config_diff if key != "init_from" and effect_of(key).affects != "label"]
    made: list[_Made] = [(Column("key", kind="label"), [key for key, _ in lines])]
    made += [(Column(arm.label, kind="words"), [values[number] for _, values in lines]) for number, arm in enumerate(comparison.arms)]
    return Table("Configuration keys in which the arms differ", "", tuple(made))


def environment_table(comparison: Comparison) -> Table:
    """The settings that all runs share and those that differ, and how they were measured."""
    words = {True: "all runs", False: "differs", None: "not known of all"}
    lines = [(check.what, words[check.ok], check.detail) for check in comparison.checks]
    lines += [(what, "", value) for what, value in how_measured(comparison)]
    columns = [Column("what", kind="label"), Column("same in", kind="label"), Column("value", kind="words")]
    return Table("Runs and environment", "", tuple((column, [line[number] for line in lines]) for number, column in enumerate(columns)))
