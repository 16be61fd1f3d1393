"""The results of an experiment so far, which are the verdicts on its arms, as a table and in words, and its tuning
runs.
"""

import math
from dataclasses import replace

import numpy as np

from lm.experiments.judging import Judgement
from lm.experiments.procedure import Procedure
from lm.report.tables import Cell, Column, FilledColumn, Table, numeral, print_tables
from lm.runs.evaluations import json_value, number
from lm.runs.folder import ENVIRONMENT
from lm.schema import Plain
from lm.statistics.intervals import Interval, trend

MAX_PRINTED = 500  # lines of a table that a terminal shows


def summary_table(judgement: Judgement, entries: list[dict[str, Plain]]) -> Table:
    """The table of `Judgement.entries`, a row for each size and arm."""
    verdicts = [judgement.verdicts.get((entry["size"], entry["arm"])) for entry in entries]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[FilledColumn]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    question, baseline = judgement.question, judgement.question.arms[0]
    columns = column("size", [entry["size"] or None for entry in entries], kind="label")
    columns += column("arm", [entry["arm"] for entry in entries], kind="label")
    # first, so that it is in sight on a narrow screen
    columns += column("verdict", [verdict and verdict.words for verdict in verdicts], kind="words")
    columns += column(
        question.rate_heading, [None if entry["rate"] is None else f"{entry['rate']:g}" for entry in entries]
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
    """Print the entries of a judgement as a table of numbers, and below the table each verdict with its
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
