"""The results of an experiment so far, which are the verdicts on its arms, as a table and in words, and its tuning
runs.
"""

import math
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter

import numpy as np

from lm.experiments.experiment import Arm
from lm.experiments.judging import Judgement
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.experiments.tuning_table import values_by_arm_and_rate
from lm.report.tables import Cell, Column, FilledColumn, Table, numeral, print_tables
from lm.runs.evaluations import json_value, number
from lm.runs.folder import DIVERGED, ENVIRONMENT
from lm.schema import Plain
from lm.statistics.intervals import Interval, trend
from lm.statistics.tuning import Rate, mean_loss, rate_cell, rate_text

MAX_PRINTED = 500  # lines of a table that a terminal shows


def summary_entries(procedure: Procedure, judgement: Judgement | None = None) -> list[dict[str, Plain]]:
    """The entries of `Judgement.entries`. To the entry of each arm but the baseline, its mean difference to the
    baseline in tuning runs is added, by rate. `judgement`: the verdicts, if they are known already.
    """
    judgement = judgement or procedure.judgement()
    entries, arms = judgement.entries(), {arm.name: arm for arm in procedure.experiment.arms[1:]}
    for entry in (entry for entry in entries if entry["arm"] in arms):
        tuning_differences = differences_by_rate(procedure, entry["size"], arms[entry["arm"]])
        means = {
            rate_text(rate): float(np.mean(differences))
            for rate, differences in tuning_differences.items()
            if differences
        }
        entry["differences_by_rate"] = {rate: mean if math.isfinite(mean) else None for rate, mean in means.items()}
    return entries


def differences_by_rate(procedure: Procedure, size: str, arm: Arm) -> dict[Rate, list[float]]:
    """The differences of tuning runs, arm minus baseline, as a list over seeds for each rate that both have. {} before
    rates are chosen, or if the arm is not tuned. A run's value is the primary metric on the documents by which rates
    are chosen. A difference is infinite if one run diverged. Seeds of which both diverged are left out."""
    experiment = procedure.experiment
    baseline = experiment.arms[0].name
    tuning_values = values_by_arm_and_rate(procedure.tuning_runs(size), size, attrgetter("primary_value"))
    if not arm.is_tuned or not {arm.name, baseline} <= tuning_values.keys() or not procedure.choice(size).rates:
        return {}
    primary = experiment.primary

    def comparable_value(value: float) -> float:
        return -value if value == math.inf and primary.better == "higher" else value

    arm_values, base_values = (
        {rate: [*map(comparable_value, values)] for rate, values in tuning_values[name].items()}
        for name in (arm.name, baseline)
    )
    return {
        rate: [
            a - b
            for a, b in zip(arm_values[rate], base_values[rate], strict=True)
            if math.isfinite(a) or math.isfinite(b)
        ]
        for rate in sorted(arm_values.keys() & base_values.keys())
    }


def summary_table(judgement: Judgement, entries: list[dict[str, Plain]]) -> Table:
    """The table of the entries that `summary_entries` gives, a row for each size and arm."""
    verdicts = [judgement.verdicts.get((entry["size"], entry["arm"])) for entry in entries]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[FilledColumn]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    question, baseline = judgement.question, judgement.question.arms[0]
    columns = column("size", [entry["size"] or None for entry in entries], kind="label")
    columns += column("arm", [entry["arm"] for entry in entries], kind="label")
    # first, so that it is in sight on a narrow screen
    columns += column("verdict", [verdict and verdict.words for verdict in verdicts], kind="words")
    columns += column(
        question.rate_heading, [None if entry["rate"] is None else rate_text(entry["rate"]) for entry in entries]
    )
    columns += column("seeds", [f"{entry['runs']} of {entry['of']}" for entry in entries])
    omits_finished_runs = any(entry["runs"] > sum(judgement.common_seeds[entry["size"]]) for entry in entries)
    basis = ", ".join(filter(None, (question.measured_on, "common seeds" * omits_finished_runs)))
    columns += column(f"mean {judgement.primary.metric}", [numeral(entry["mean"]) for entry in entries], basis)
    columns += column(
        f"difference to {baseline}",
        [verdict and verdict.interval for verdict in verdicts],
        "interval over seeds, all together 95%",
        "difference",
    )
    intervals = [verdict and verdict.document_interval for verdict in verdicts]
    pairs = [
        (verdict.interval, verdict.document_interval) for verdict in verdicts if verdict and verdict.document_interval
    ]
    if not all(np.allclose(wider.as_list(), interval.as_list(), rtol=0, atol=5e-5) for interval, wider in pairs):
        columns += column(
            "on other text of the kind",
            intervals,
            "interval over seeds and documents, all together 95%",
            "difference",
        )
    columns += column(
        "p", [f"{verdict.p:.2g}" if verdict and verdict.seeds else None for verdict in verdicts], "adjusted"
    )
    exact_p = [None if verdict is None or verdict.p_exact is None else f"{verdict.p_exact:.2g}" for verdict in verdicts]
    columns += column("p of the sign-flip test", exact_p, "adjusted")
    return Table("Summary", "", tuple(columns))


def print_verdicts(judgement: Judgement, entries: list[dict[str, Plain]], title: str) -> None:
    """Print the entries of `summary_entries` as a table of numbers, and below the table each verdict with its
    reason. Of more than MAX_PRINTED entries the first are printed.
    """
    omission = (
        f"printed: the first {MAX_PRINTED:,} of {len(entries):,} lines; lm judge --json and verdicts.json hold all"
    )
    notes = [omission] if len(entries) > MAX_PRINTED else []
    entries = entries[:MAX_PRINTED]
    table = summary_table(judgement, entries)
    number_columns = tuple((column, cells) for column, cells in table.contents if column.kind != "words")
    print_tables(replace(table, title=title, contents=number_columns))
    for entry in entries:
        if "verdict" in entry:
            arm = " ".join(filter(None, (entry["size"], entry["arm"])))
            open_question = judgement.verdicts[entry["size"], entry["arm"]].open_reason
            reason = entry["reason"].removeprefix(open_question).lstrip(":; ")  # the verdict's words end with it
            print(": ".join(filter(None, (arm, entry["words"], reason))))
    print(*notes, sep="\n", end="\n" * len(notes))


def measured_words(procedure: Procedure) -> str:
    """Describe the primary metric as finished runs record it, by its name, the place on its axis where it is measured
    (such as a sequence length), and its unit. Before a run has finished, return its name alone."""
    experiment = procedure.experiment
    metric, runs = experiment.primary.metric, (run for size in experiment.sizes for run in procedure.final_runs(size))
    evaluations = [run.outcome.measurement(metric) for run in runs if run.outcome.state == "finished"]
    if not evaluations:
        return metric
    rows = evaluations[0].frame[evaluations[0].frame["metric"] == metric]
    (x, until, setting, about), seq_len = rows[["x", "until", "setting", "about"]].iloc[-1], evaluations[0].seq_len
    unit, axis = "" if about.unit in ("", "fraction") else f", in {about.unit}", about.axis
    if axis is None:
        return f"{metric}{unit}"
    is_bin = not math.isnan(until)
    end, quantity = (until, f"mean {about.quantity}") if is_bin else (x, about.quantity)
    place = f"{'of all positions of' if is_bin else axis.before} {number(end)} {axis.unit}".rstrip()
    length = ""
    if axis.unit == "tokens" and len({evaluation.seq_len for evaluation in evaluations}) == 1:
        length = f"{'' if end == seq_len else f'{end / seq_len:g} times '}the training length"
    return ", ".join(filter(None, (f"{metric}: {quantity} {place}", length, setting * is_bin))) + unit


def trends(procedure: Procedure, judgement: Judgement) -> list[dict[str, Plain]]:
    """The trend over sizes of each arm's difference to the baseline, at the judged rates. It is the change with each
    doubling of non-embedding parameters, or of tokens if all sizes have equally many parameters. Only seeds that the
    arm and the baseline have finished in every size count. Intervals are not adjusted for their number.
    Empty with one size.
    """
    (baseline, *arms), sizes = (arm.name for arm in procedure.experiment.arms), list(procedure.experiment.sizes)
    if len(sizes) < 2:
        return []
    finished_runs = ((run for run in procedure.final_runs(size) if run.outcome.state == "finished") for size in sizes)
    records = [
        next((run.outcome.record for run in runs if (run.config.run_folder / ENVIRONMENT).is_file()), None)
        for runs in finished_runs
    ]
    if None in records:
        return []
    parameters = [record.environment_entry("parameters.non_embedding") for record in records]
    amounts = {"parameters": parameters, "tokens": [record.tokens_seen for record in records]}
    amount_name = next((name for name, counts in amounts.items() if None not in counts and len(set(counts)) > 1), None)
    entries = []
    for arm in arms if amount_name else ():
        if not all(judgement.judged_runs(size, name) for size in sizes for name in (arm, baseline)):
            continue
        values = np.array([[judgement.judged_values(size, name) for size in sizes] for name in (arm, baseline)])
        with np.errstate(invalid="ignore"):
            differences = np.subtract(*values)
        differences = differences[:, np.isfinite(differences).all(0)]
        if differences.shape[1] > 1:
            interval = trend(differences, np.array(amounts[amount_name]))
            sample = f"{len(sizes)} sizes, {differences.shape[1]} seeds"
            entries.append(
                {
                    "arm": arm,
                    "with_each_doubling_of": amount_name,
                    "over": sample,
                    "change": json_value(interval.as_list()),
                }
            )
    return entries


def trend_table(procedure: Procedure, judgement: Judgement) -> Table | None:
    """The table of `trends`, a row for each arm; None without trends."""
    if not (entries := trends(procedure, judgement)):
        return None
    changes = [Interval(*(math.nan if value is None else value for value in entry["change"])) for entry in entries]
    change = Column(f"difference to {judgement.question.arms[0]} changes by", "95% interval, alone", "difference")
    samples = (Column("over", kind="label"), [entry["over"] for entry in entries])
    arms = (Column("arm", kind="label"), [entry["arm"] for entry in entries])
    return Table(f"With each doubling of {entries[0]['with_each_doubling_of']}", "", (arms, samples, (change, changes)))


def tuning_table_rows(procedure: Procedure) -> list[dict[str, Plain]]:
    """The rows of `tuning.csv`, one for each tuning run, as `tune.table` reads them; runs that have not ended have no
    values.
    """
    metric = procedure.experiment.primary.metric

    def cell(value: float | None) -> Plain:
        return value if value is None or math.isfinite(value) else DIVERGED

    rows = []
    for run in (run for size in procedure.experiment.sizes for run in procedure.tuning_runs(size)):
        rows.append({"size": run.size, "arm": run.arm, "key": run.key, "rate": rate_cell(run.rate), "seed": run.seed})
        rows[-1][SELECTION] = cell(run.selection_value)
        if metric != SELECTION:
            rows[-1][metric] = cell(run.primary_value)
        rows[-1]["configuration"] = run.configuration
    return rows


def tuning_means(procedure: Procedure) -> list[dict[str, Plain]]:
    """Means of the metric by which rates are chosen, by size (if the experiment has sizes), arm and rate of tuning
    runs; null where a run diverged or has not ended."""
    experiment, values = procedure.experiment, defaultdict[tuple[str, str, Rate], list[float]](list)
    for run in (run for size in experiment.sizes for run in procedure.tuning_runs(size)):
        value = experiment.choice_value(run)
        values[run.size, run.arm, run.rate].append(math.inf if value is None else value)
    means = {size_arm_rate: mean_loss(costs) for size_arm_rate, costs in values.items()}
    return [
        ({"size": size} if size else {})
        | {"arm": arm, "rate": rate_cell(rate), experiment.choice_metric: mean if math.isfinite(mean) else None}
        for (size, arm, rate), mean in means.items()
    ]
