"""Results of an experiment so far: the arms with their verdicts as a table and in words, and the tuning runs."""

import math
from dataclasses import replace
from operator import attrgetter

import numpy as np

from lm.experiments.experiment import NOT_REACHED, Arm, Primary, by_arm_and_rate
from lm.experiments.judging import Judged, finite
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.report.tables import Cell, Column, Filled, Table, digits, print_tables
from lm.runs.folder import DIVERGED, ENVIRONMENT
from lm.schema import Plain
from lm.statistics.intervals import Interval, trend
from lm.statistics.learned import factor, has_learned, log_tokens
from lm.statistics.tuning import Rate, mean_loss, rate_cell, rate_differences, rate_words


def summary_lines(procedure: Procedure, judged: Judged | None = None) -> list[dict[str, Plain]]:
    """One entry for each size and arm (`Judged.lines`), with the mean difference over the tuning seeds at each rate. `judged`: the
    verdicts, if they are known already."""
    judged, reach = judged or procedure.judged(), procedure.experiment.primary.reach is not None
    lines, arms = judged.lines(), {arm.name: arm for arm in procedure.experiment.arms[1:]}
    for line in (line for line in lines if line["arm"] in arms):
        apart = differences_by_rate(procedure, line["size"], arms[line["arm"]])
        means = {rate_words(rate): float(np.mean(differences)) for rate, differences in apart.items() if differences}
        finite = {rate: mean if math.isfinite(mean) else None for rate, mean in means.items()}
        line["factors_by_rate" if reach else "differences_by_rate"] = {
            rate: math.exp(mean) if reach and mean is not None else mean for rate, mean in finite.items()
        }
    return lines


def differences_by_rate(procedure: Procedure, size: str, arm: Arm) -> dict[Rate, list[float]]:
    """Arm minus baseline of the tuning seeds at every rate that both have: of the primary metric on the selection text, or of 1 for a
    run that has learned and 0 else, or of the logarithm of tokens. Infinite where one of them diverged, or did not reach its level."""
    experiment = procedure.experiment
    base, measured = experiment.arms[0].name, by_arm_and_rate(procedure.tried(size), size, attrgetter("primary"))
    if not {arm.name, base} <= measured.keys() or not procedure.choice(size).rates:
        return {}
    primary = experiment.primary

    def compared(value: float) -> float:
        if primary.learned is not None:
            return float(has_learned(value, primary.learned, primary.better))
        if primary.reach is not None:
            return log_tokens(value)
        return -value if value == math.inf and primary.better == "higher" else value

    both = {name: {rate: [*map(compared, values)] for rate, values in measured[name].items()} for name in (arm.name, base)}
    return rate_differences(arm.name, base, both)


def summary_table(judged: Judged, lines: list[dict[str, Plain]]) -> Table:
    """A row for each size and arm, of the lines of `summary_lines`."""
    verdicts = [judged.verdicts.get((line["size"], line["arm"])) for line in lines]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[Filled]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    primary, base = judged.primary, judged.arms[0]
    columns = column("size", [line["size"] or None for line in lines], kind="label")
    columns += column("arm", [line["arm"] for line in lines], kind="label")
    columns += column(judged.key, [None if line["rate"] is None else rate_words(line["rate"]) for line in lines])
    columns += column("seeds", [f"{line['runs']} of {line['of']}" for line in lines])
    kind = "mean" if primary.reach is None else "geometric mean,"
    where = ", ".join(filter(None, (judged.measured_on, "common seeds" if judged.leaves_out else "")))
    columns += column(f"{kind} {primary.quantity}", [amount(primary, line["mean"]) for line in lines], where)
    if primary.reach is not None:
        columns += column("have reached it", [f"{line['reached']} of {line['runs']}" for line in lines])
    if primary.learned is not None:
        columns += column("have learned", [f"{line['learned']} of {line['ended']}" for line in lines])
        fractions = [Interval(*line["fraction_learned"]) if line["ended"] else None for line in lines]
        columns.append((Column("fraction", "95% interval, Clopper-Pearson", "mean", 2), fractions))
    name, kind = (f"difference to {base}", "difference") if primary.reach is None else (f"factor to {base}", "mean")
    columns += column(name, [each and each.interval for each in verdicts], "interval over seeds, all together 95%", kind)
    if primary.learned is None:
        both = [each and each.over_documents for each in verdicts]
        columns += column("on other text of the kind", both, "interval over seeds and documents, all together 95%", "difference")
    columns += column("p", [each and f"{each.p:.2g}" for each in verdicts], "adjusted")
    exact = [None if each is None or each.p_exact is None else f"{each.p_exact:.2g}" for each in verdicts]
    columns += column("p of the sign-flip test", exact, "adjusted")
    columns += column("verdict", [each and each.words for each in verdicts], kind="words")
    return Table("Summary", "", tuple(columns))


def print_verdicts(judged: Judged, lines: list[dict[str, Plain]], title: str) -> None:
    """Print the lines of `summary_lines` as a table of numbers, and below it each verdict with its reason."""
    table = summary_table(judged, lines)
    numbers = tuple((column, cells) for column, cells in table.contents if column.kind != "words")
    print_tables(replace(table, title=title, contents=numbers))
    for line in lines:
        if "verdict" in line:
            arm, unanswered = " ".join(filter(None, (line["size"], line["arm"]))), judged.verdicts[line["size"], line["arm"]].open
            reason = line["reason"].removeprefix(unanswered).removeprefix(": ")  # the words end with it
            print(": ".join(filter(None, (arm, line["words"], reason))))


def has_reached(tokens: float | None) -> bool:
    """Whether `tokens` say when a run reached its level: not never, and not before its first evaluation."""
    return tokens is not None and 0 < tokens < math.inf


def amount(primary: Primary, value: float | None) -> str | None:
    """The number by which a run is compared, in digits; tokens in whole numbers."""
    if primary.reach is None or value is None:
        return digits(value)
    return f"{value:,.0f}" if has_reached(value) else "at the first evaluation" if value == 0 else NOT_REACHED


def measured_words(procedure: Procedure) -> str:
    """Words for the primary metric and the point of an axis at which it is measured, such as a length, by the runs that have finished."""
    experiment = procedure.experiment
    metric, runs = experiment.primary.metric, (run for size in experiment.sizes for run in procedure.final(size))
    series = [run.outcome.series(metric) for run in runs if run.outcome.state == "finished"]
    if not series or series[0].axis is None or series[0].axis.bins:
        return metric
    axis, (place, (x, _)) = series[0].axis, [*series[0].places.items()][series[0].logged.index(metric)]
    alike = axis.unit == "tokens" and len({each.seq_len for each in series}) == 1
    factor = "" if x == series[0].seq_len else f"{x / series[0].seq_len:g} times "
    return f"{metric}: {series[0].metric} {f'{axis.before} {place} {axis.unit}'.rstrip()}" + f", {factor}the training length" * alike


def trends(procedure: Procedure, judged: Judged) -> list[dict[str, Plain]]:
    """The trend over sizes of each arm's difference to the baseline, at the judged rates, over the seeds that both have finished in every
    size: its change with each doubling of parameters, or where all sizes have as many, of tokens. With `primary.reach` the factor that
    each doubling multiplies the factor by. The intervals hold alone. None of runs that learn or don't."""
    experiment, primary = procedure.experiment, procedure.experiment.primary
    (base, *arms), sizes = (arm.name for arm in experiment.arms), list(experiment.sizes)
    if len(sizes) < 2 or primary.learned is not None:
        return []
    finished = ((run for run in procedure.final(size) if run.outcome.state == "finished") for size in sizes)
    records = [next((run.outcome.record for run in runs if (run.config.run_folder / ENVIRONMENT).is_file()), None) for runs in finished]
    if None in records:
        return []
    amounts = {
        "parameters": [record.measured("parameters.non_embedding") for record in records],
        "tokens": [record.tokens_seen for record in records],
    }
    by = next((name for name, known in amounts.items() if None not in known and len(set(known)) > 1), None)
    lines = []
    for arm in arms if by else ():
        value = log_tokens if primary.reach is not None else float
        runs = [[judged.judged_runs(size, name) for name in (arm, base)] for size in sizes]
        if not all(map(all, runs)):
            continue
        differences = np.array([[value(ours.value) - value(theirs.value) for ours, theirs in zip(*both, strict=True)] for both in runs])
        differences = differences[:, np.isfinite(differences).all(0)]
        if differences.shape[1] > 1:
            interval = trend(differences, np.array(amounts[by]))
            interval = factor(interval) if primary.reach is not None else interval
            over = f"{len(sizes)} sizes, {differences.shape[1]} seeds"
            lines.append({"arm": arm, "with_each_doubling_of": by, "over": over, "change": finite(interval)})
    return lines


def trend_table(judged: Judged, lines: list[dict[str, Plain]]) -> Table | None:
    """A row for each of the lines of `trends`; None if there are none."""
    if not lines:
        return None
    base, reach = judged.arms[0], judged.primary.reach is not None
    changes = [Interval(*(math.nan if value is None else value for value in line["change"])) for line in lines]
    what = f"factor to {base} is multiplied by" if reach else f"difference to {base} changes by"
    change = Column(what, "95% interval, not adjusted", "mean" if reach else "difference", 3 if reach else 4)
    over = (Column("over", kind="label"), [line["over"] for line in lines])
    arms = (Column("arm", kind="label"), [line["arm"] for line in lines])
    return Table(f"With each doubling of {lines[0]['with_each_doubling_of']}", "", (arms, over, (change, changes)))


def tuning_table(procedure: Procedure) -> list[dict[str, Plain]]:
    """One line for each tuning run, as `tuning.csv` holds them and `tune.table` reads them; of runs that have not ended without numbers."""
    primary = procedure.experiment.primary
    metric = primary.quantity

    def cell(value: float | None, infinite: str = DIVERGED) -> Plain:
        return value if value is None or math.isfinite(value) else infinite

    return [
        {"size": size, "arm": run.arm, "key": run.key, "rate": rate_cell(run.rate), "seed": run.seed, SELECTION: cell(run.selection)}
        | ({} if metric == SELECTION else {metric: cell(run.primary, DIVERGED if run.diverged or primary.reach is None else NOT_REACHED)})
        | {"configuration": run.configuration}
        for size in procedure.experiment.sizes
        for run in procedure.tried(size)
    ]


def tuning_means(procedure: Procedure) -> list[dict[str, Plain]]:
    """The mean of what chooses rates, of every arm at every rate that was tried; null where a run diverged or is not done."""
    experiment, lines = procedure.experiment, []
    for size in experiment.sizes:
        values: dict[tuple[str, Rate], list[float]] = {}
        for run in procedure.tried(size):
            value = experiment.choosing(run)
            values.setdefault((run.arm, run.rate), []).append(math.inf if value is None else value)
        means = {place: mean_loss(costs) for place, costs in values.items()}
        lines += [
            {"size": size, "arm": arm, "rate": rate_cell(rate), experiment.chosen_by: mean if math.isfinite(mean) else None}
            for (arm, rate), mean in means.items()
        ]
    return lines
