"""Tables of an experiment's page, and the final runs of a size that they show, on the part of the held-out text that reports."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path

import numpy as np

from lm.config.effects import effect_of
from lm.experiments.experiment import Primary
from lm.experiments.judging import Judged
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import crossed_runs
from lm.report.comparison import RunComparison, comparison_of, show
from lm.report.descriptions import configuration_table, facts_table, how_measured
from lm.report.sections import Arm
from lm.report.tables import Cell, Column, Table, digits, four_digits, print_tables, signed
from lm.runs.evaluations import Evaluation
from lm.runs.folder import CONFIG, ENVIRONMENT, METRICS, peak_memory, training_seconds
from lm.runs.record import RunRecord, read_run, starts
from lm.runs.series import Sample, Series, selects
from lm.schema import Plain
from lm.statistics.intervals import Interval, over_seeds


class SizeResults:
    """The final runs of a size.

    Attributes:
        judged: the verdicts on the runs of all sizes.
        verdicts: by arm, on all but the baseline.
        rates: of the arms; None while they are being tuned.
        final: the final runs that are known, by seed and arm.
    """

    def __init__(self, procedure: Procedure, size: str, judged: Judged):
        self.experiment, self.size, self.judged, self._quantity = procedure.experiment, size, judged, procedure.quantity
        self.verdicts = {name: judged.verdicts[size, name] for name in self.arm_names[1:]}
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
    def comparison(self) -> RunComparison | None:
        """The arms that have finished runs, on the documents that are reported on; None if there are none. Without differences where the
        baseline has none."""
        by_arm = {name: [record for run, record in self.finished if run.arm == name] for name in self.arm_names}
        arms = tuple(Arm(name, tuple(map(reported, records))) for name, records in by_arm.items() if records)
        if not arms:
            return None
        comparison = comparison_of(arms)
        return comparison if arms[0].label == self.arm_names[0] else replace(comparison, differences=())


def reported(record: RunRecord) -> RunRecord:
    """A run with its evaluations on the documents that are reported on."""
    evaluations = tuple(replace(each, series=tuple(_series(each))) for each in record.evaluations)
    return replace(record, evaluations=evaluations)


def _series(evaluation: Evaluation) -> list[Series]:
    of_text = any(each.data_fingerprint for each in evaluation.series)
    parts = [report_part(each) for each in evaluation.series if each.samples]
    alone = [
        replace(each, metric=f"{each.metric}, all held-out text") if of_text else each for each in evaluation.series if not each.samples
    ]
    return [each for each in (*parts, *alone) if each]


def report_part(series: Series) -> Series | None:
    """A series on the documents that are reported on; as it is if it is of no held-out text; None if none of these is left. Curves of
    bins become as coarse as the bins are."""
    if not series.data_fingerprint:
        return series
    samples = [each.part(~selects(series.data_fingerprint, each.groups)) for each in series.samples]
    if not all(len(each.weights) and each.weights.sum() for each in samples):
        return None
    means = np.concatenate([_mean(each) for each in samples])
    means[~np.isfinite(series.means)] = np.nan
    curve = np.repeat(means, np.diff(series.axis.values).astype(int)) if series.bins else None
    return replace(series, samples=tuple(samples), means=means, curve=curve)


def _mean(sample: Sample) -> np.ndarray:
    """Over units, (columns,); a unit is left out where it has no value, as in the means of series."""
    values = np.ma.masked_invalid(sample.values)
    return np.ma.average(values, axis=0, weights=sample.weights).filled(np.nan)


_Made = tuple[Column, list[Cell]]


def summary_table(judged: Judged, lines: list[dict[str, Plain]]) -> Table:
    """A row for each size and arm, from the lines of `summary`."""
    question, verdicts = judged.question, [judged.verdicts.get((line["size"], line["arm"])) for line in lines]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[_Made]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    primary, base = question.primary, question.arms[0]
    columns = column("size", [line["size"] or None for line in lines], kind="label")
    columns += column("arm", [line["arm"] for line in lines], kind="label")
    columns += column(question.key, [None if line["rate"] is None else f"{line['rate']:g}" for line in lines])
    columns += column("seeds", [f"{line['runs']} of {line['of']}" for line in lines])
    kind = "mean" if primary.reach is None else "geometric mean,"
    columns += column(f"{kind} {primary.quantity}", [_amount(primary, line["mean"]) for line in lines], question.measured_on)
    if primary.reach is not None:
        columns += column("have reached it", [f"{line['reached']} of {line['runs']}" for line in lines])
    if primary.learned is not None:
        columns += column("have learned", [f"{line['learned']} of {line['ended']}" for line in lines])
        fractions = [Interval(*line["fraction_learned"]) if line["ended"] else None for line in lines]
        columns.append((Column("fraction", "95% interval, Clopper-Pearson", "mean", 2), fractions))
    over, intervals = "interval over seeds, all together 95%", [each and each.interval for each in verdicts]
    if primary.reach is None:
        columns += column(f"difference to {base}", intervals, over, "difference")
    else:
        columns += column(f"factor to {base}", intervals, over, "mean")
    if primary.learned is None:
        both = [each and each.over_documents for each in verdicts]
        columns += column("on other text of the kind", both, "interval over seeds and documents, all together 95%", "difference")
    columns += column("p", [each and f"{each.p:.2g}" for each in verdicts], "adjusted")
    exact = [None if each is None or each.p_exact is None else f"{each.p_exact:.2g}" for each in verdicts]
    columns += column("p of the sign-flip test", exact, "adjusted")
    columns += column("verdict", [each and each.words for each in verdicts], kind="words")
    return Table("Summary", "", tuple(columns))


def print_verdicts(judged: Judged, lines: list[dict[str, Plain]], title: str) -> None:
    """Print the lines of `summary` as a table, and each verdict with its reason."""
    print_tables(replace(summary_table(judged, lines), title=title))
    for line in lines:
        if "verdict" in line:
            print(f"{' '.join(filter(None, (line['size'], line['arm'])))}: {line['verdict']}: {line['reason']}")


def seeds_table(results: SizeResults) -> Table:
    """The primary metric of every final run on the report text, and its differences to the baseline's run of the same seed."""
    primary, base = results.experiment.primary, results.arm_names[0]
    runs = {(run.arm, run.seed): run for run in results.final}
    values = {at: results.value(run) for at, run in runs.items()}
    seeds = results.experiment.seeds
    columns: list[_Made] = [(Column("seed", kind="label"), list(map(str, seeds)))]
    for arm in results.arm_names:
        at = [(arm, seed) for seed in seeds]
        words = [
            _amount(primary, values[each]) if values.get(each) is not None
            else runs[each].outcome.state if each in runs else "no rate"
            for each in at
        ]  # fmt: skip
        columns.append((Column(arm, primary.quantity), words))
    for arm in results.arm_names[1:]:
        both = [(values.get((arm, seed)), values.get((base, seed))) for seed in seeds]
        if primary.reach is None:
            columns.append(
                (Column(f"{arm} - {base}", primary.metric), [None if None in pair else signed(pair[0] - pair[1]) for pair in both])
            )
        else:
            ratios = [f"{pair[0] / pair[1]:.3g}" if reached(pair) else None for pair in both]
            columns.append((Column(f"{arm} / {base}", primary.quantity), ratios))
    return Table("Every seed" + (f", {results.size}" if results.size else "") + ", on the report text", primary.quantity, tuple(columns))


def crossed_table(procedure: Procedure, size: str) -> Table | None:
    """The final seeds of arms that are trained at several rates, at each of them; None if there are none."""
    experiment, choice, base = procedure.experiment, procedure.choice(size), procedure.experiment.arms[0].name
    finished = {at: [each for each in some if each.outcome.state == "finished"] for at, some in crossed_runs(procedure, size).items()}
    if not finished:
        return None
    values = {at: {each.seed: procedure.quantity(each.outcome) for each in some} for at, some in finished.items()}

    def apart(arm: str, rate: float) -> Interval | None:
        theirs = values.get((base, rate), {}) if arm != base else {}
        both = [value - theirs[seed] for seed, value in values[arm, rate].items() if seed in theirs]
        return over_seeds(np.array(both)).interval() if len(both) > 1 else None

    def mean(some: Collection[float]) -> str | None:
        return digits(float(np.mean(list(some)))) if some else None

    used = {arm: {rates[0]: "chosen by tuning"} for arm, rates in choice.final.items()}
    for arm, rate in ((arm, rate) for arm, rate in choice.rates.items() if choice.settled and arm in used):
        used[arm][rate] = ", ".join(filter(None, (used[arm].get(rate), "judged")))
    columns: list[_Made] = [
        (Column("arm", kind="label"), [arm for arm, _ in finished]),
        (Column(experiment.tune.key), [f"{rate:g}" for _, rate in finished]),
        (Column("use", kind="words"), [used[arm].get(rate) for arm, rate in finished]),
        (Column("seeds"), [f"{len(some)} of {len(experiment.seeds)}" for some in finished.values()]),
        (
            Column(f"mean {experiment.chosen_by}", "selection text"),
            [mean([procedure.choosing(run.outcome) for run in some]) for some in finished.values()],
        ),
    ]
    if experiment.primary.reach is None:
        means = [mean(some.values()) for some in values.values()]
        columns.append((Column(f"mean {experiment.primary.quantity}", "report text"), means))
        over = "95% interval over seeds, not adjusted"
        columns.append((Column(f"difference to {base}, both at this rate", over, "difference"), [apart(*at) for at in finished]))
    return Table("Final seeds at the rates of both arms" + (f", {size}" if size else ""), "", tuple(columns))


def reached(tokens: tuple[float | None, ...]) -> bool:
    """Whether all are numbers of tokens at which a run has reached its level."""
    return all(each is not None and 0 < each < np.inf for each in tokens)


def _amount(primary: Primary, value: float | None) -> str | None:
    """The number by which a run is compared, in digits; tokens in whole numbers."""
    if primary.reach is None or value is None:
        return digits(value)
    return f"{value:,.0f}" if reached((value,)) else "at the first evaluation" if value == 0 else "not reached"


def cost_table(results: SizeResults) -> Table | None:
    """The costs of a run of each arm, mean over its finished final runs; None if none has finished."""
    by_arm = {arm: [record for run, record in results.finished if run.arm == arm] for arm in results.arm_names}
    by_arm = {arm: records for arm, records in by_arm.items() if records}
    times = {record.folder: _under_way(record) for _, record in results.begun}
    units = {
        "parameters": "M", "in the normalizer": "parameters", "tokens": "M a run", "training": "TFLOP a run", "training time": "s a run",
        "speed": "tokens/s", "peak memory": _memory_of(record for records in by_arm.values() for record in records),
        "beside it": "other runs, mean",
    }  # fmt: skip
    costs = {arm: [dict(zip(units, _costs(record, times), strict=True)) for record in records] for arm, records in by_arm.items()}
    columns: list[_Made] = [
        (Column("arm", kind="label"), list(by_arm)),
        (Column("runs"), [str(len(records)) for records in by_arm.values()]),
    ]
    for name, unit in units.items():
        known = [[each[name] for each in some if each[name] is not None] for some in costs.values()]
        columns += [(Column(name, unit), [four_digits(np.mean(some)) if some else None for some in known])] if any(known) else []
    devices = [", ".join(dict.fromkeys(show(record.used("device")) for record in records)) for records in by_arm.values()]
    columns.append((Column("device", kind="words"), devices))
    return Table("What a run took" + (f", {results.size}" if results.size else ""), "", tuple(columns)) if by_arm else None


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
    others = [each for folder, each in times.items() if each and folder != record.folder]
    shared = sum(max(0.0, (min(mine[1], stop) - max(mine[0], start)).total_seconds()) for start, stop in others)
    return shared / (mine[1] - mine[0]).total_seconds()


def arms_differ(comparison: RunComparison) -> Table:
    """Every configuration key in which the arms differ, but for names, folders and logging."""
    lines = [
        (key, values)
        for key, values in comparison.config_diff
        if key not in ("init_from", "branch_from") and effect_of(key).affects != "label"
    ]
    return configuration_table(comparison, lines)


def environment_table(comparison: RunComparison) -> Table:
    """The settings that all runs share and those that differ, and how they were measured."""
    words = {True: "all runs", False: "differs", None: "not known of all"}
    lines = [(check.what, words[check.ok], check.detail) for check in comparison.checks]
    return facts_table(lines + [(what, "", value) for what, value in how_measured(comparison)], title="Runs and environment")
