"""This module writes the results of an experiment: verdicts in files and in print, and the page. The page begins with
question and verdicts; tables, pictures and facts follow."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lm.config.tree import key_effect
from lm.errors import RunError
from lm.experiments.definition import Experiment
from lm.experiments.judging import (
    DIFFERENCE_INTERVAL_KEYS,
    DIVERGED_KEY,
    FINISHED,
    Judgement,
    power_and_noise_sentences,
    print_verdicts,
    summary_table,
)
from lm.experiments.procedure import Procedure, failed_runs
from lm.experiments.run_outcome import SELECTION_METRIC
from lm.files import json_bytes, read_json, write_together
from lm.plain import Plain, json_value
from lm.report.comparison import ArmComparison
from lm.report.comparison_pictures import LOSS_TITLES, DrawnRun
from lm.report.html import (
    PAGE_FILE,
    Page,
    PageSection,
    VerdictCard,
    introduction,
    page_files,
    run_details,
    run_sections,
)
from lm.report.pictures import Panel, Picture, Trace
from lm.report.tables import (
    DIFFERENCE_COLUMN,
    Column,
    FilledColumn,
    Table,
    csv_text,
    number_text,
    print_tables,
    signed_text,
    with_unit,
)
from lm.runs.folder import ENVIRONMENT_FILE
from lm.statistics.intervals import Interval, trend_per_doubling
from lm.training.wandb_runs import send_report

VERDICTS, TUNING, REPORT = "verdicts", "tuning", "report"  # files and folder of results, without suffix
SUMMARY_TABLE_NOTE = (
    "All at the last step. A mean is over the seeds that all arms have finished, a difference over all that its two "
    "arms have finished. The interval on other text of the kind covers seeds and documents together. It is never "
    "shorter than the interval over seeds."
)
SEVERAL_RATES_NOTE = (
    "Tuning seeds are few: where they chose different rates, an arm's final seeds are trained at its own rate and at "
    "the baseline's, those of the baseline at all. An arm is judged at the best of its rates, by the metric that "
    "tuning goes by. It is better than the baseline only if it is so against it at each of these rates, worse only if "
    "it is so at each of its own against the baseline at one of the same, and the intervals of the summary cover which "
    "of the rates is an arm's best."
)


# ---------------------------------------------------------------- the results


def write_verdicts(procedure: Procedure) -> list[dict[str, Plain]]:
    """Print the verdicts. Write verdicts, tuning results and report into the experiment's folder, either all files or
    none. Returns `Judgement.summary_rows`. Raises LMError: no run has ended, or a run's file can't be read.
    """
    experiment, run_failures = procedure.experiment, failed_runs(procedure)
    primary = experiment.primary_metric
    if not any(run.outcome.has_ended for run in procedure.known_runs()):
        reason, remedy = "no run of this file and these overrides has ended", "leave --report-only out to train"
        if run_failures:
            reason = f"no run has a result; {len(run_failures)} failed, the first with {run_failures[0][1]}"
            remedy = "--retry tries again"
        raise RunError(f"{experiment.folder}: {reason}; {remedy}")
    judgement = procedure.judgement()
    entries, notes = judgement.summary_rows(), procedure.notes()
    verdicts = {"primary": vars(primary), "notes": notes, "arms": entries}
    if size_trends := trends_over_sizes(procedure, judgement):
        verdicts["trends"] = size_trends
    files = {
        experiment.folder / f"{VERDICTS}.json": json_bytes(verdicts),
        experiment.folder / f"{VERDICTS}.csv": csv_text(entries, intervals=DIFFERENCE_INTERVAL_KEYS).encode(),
    }
    if frames := [runs for runs in map(procedure.tuning_runs, experiment.sizes) if len(runs)]:
        tuning = pd.concat(frames)
        files[experiment.folder / f"{TUNING}.csv"] = tuning.replace(math.inf, DIVERGED_KEY).to_csv(index=False).encode()
    rate_note = f", each arm at its own {experiment.tune.key}" * experiment.is_tuned
    print_verdicts(judgement, entries, f"{with_unit(primary.metric, experiment.declared_metric.unit)}{rate_note}")
    for note in notes:
        print(note)
    for run, failure in run_failures:
        print(f"failed: {run.stage}: {run.label}: {failure} ({failure.log}); --retry tries again")
    write_together(files | experiment_files(procedure, experiment.folder / REPORT, judgement), "verdicts and report")
    if size_trends:
        print_tables(trend_table(size_trends, experiment.arms[0].name))
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    print(f"report: {experiment.folder / REPORT / PAGE_FILE}")
    return entries


def send_experiment_to_wandb(procedure: Procedure, entries: list[dict[str, Plain]]) -> None:
    """Send the report of an experiment to wandb. Raises RunError as `send_report` does."""
    experiment, primary = procedure.experiment, procedure.experiment.primary_metric
    facts = {"question": question_text(experiment), "margin": primary.matters, "primary": vars(primary)}
    facts |= {"arms": [arm.name for arm in experiment.arms], "seeds": [*experiment.seeds]}
    runs = [
        {
            "stage": run.stage,
            "run": run.label,
            "state": run.outcome.state,
            "wandb_id": read_json(run.config.run_folder / ENVIRONMENT_FILE).get("wandb_id"),
        }
        for run in procedure.known_runs()
        if run.has_begun
    ]
    log, page = experiment.first_config.log, experiment.folder / REPORT / PAGE_FILE
    send_report(log, experiment.name, experiment.folder, facts, entries, runs, page)


# ---------------------------------------------------------------- the page


def experiment_files(procedure: Procedure, folder: Path, judgement: Judgement) -> dict[Path, bytes]:
    """Return the content of each file of the report on an experiment (the page, its tables and its pictures), by path
    in `folder`. Raises LMError: run folders can't be read."""
    experiment, entries, metric = procedure.experiment, judgement.summary_rows(), procedure.experiment.declared_metric
    summary = PageSection("Summary")
    summary.add_block("note", f"Decides: {with_unit(experiment.primary_metric.metric, metric.unit)}.")
    summary.add_block("note", _adjustment_text(judgement))
    for sentence in power_and_noise_sentences(judgement, len(experiment.seeds)):
        summary.add_block("note", f"{sentence[:1].upper()}{sentence[1:]}.")
    failed = [f"failed: {run.stage} run {run.label}: {failure}" for run, failure in failed_runs(procedure)]
    summary.add_block("warning", failed + procedure.notes())
    summary.add_block("table", summary_table(judgement, entries), "summary")
    summary.add_block("note", SUMMARY_TABLE_NOTE if any(entry["runs"] for entry in entries) else None)
    summary.add_block("picture", differences_picture(experiment, judgement), "differences")
    if size_trends := trends_over_sizes(procedure, judgement):
        summary.add_block("table", trend_table(size_trends, experiment.arms[0].name), "trends")
    for size in experiment.sizes:
        summary.add_block("table", seeds_table(judgement, size), f"{_file_name_prefix(size)}seeds")
    sections, commands, records = [summary], PageSection("Commands"), []
    commands.add_block("code", experiment.command)
    for size in experiment.sizes:
        runs = [
            DrawnRun(run.arm, run.seed, run.outcome.state, run.outcome.record, f"{run.label} ({run.outcome.state})")
            for run in procedure.final_runs_at_judged_rates(size)
            if run.has_begun
        ]
        sections += _size_sections(procedure, size, runs)
        records.append([run.record for run in runs])
        for run in runs:
            commands.add_block("details", run_details(run))
    margin_note = (
        "Dots and bars: effects with their intervals, which hold together. Shaded: differences below "
        f"{experiment.primary_metric.matters:g}, which do not matter."
    )
    words, cards = introduction(records), answer_cards(judgement)
    page = Page(experiment.name, [*sections, commands], words, question_text(experiment), cards, margin_note)
    return page_files(page, folder)


def _size_sections(procedure: Procedure, size: str, runs: list[DrawnRun]) -> list[PageSection]:
    """Return the page's sections on the runs of a size that have begun."""
    experiment = procedure.experiment
    names = tuple(arm.name for arm in experiment.arms)
    # on the held-out documents for reports, not those by which learning rates are chosen
    finished = {name: [run.record for run in runs if run.arm == name and run.state == "finished"] for name in names}
    arms = {name: records for name, records in finished.items() if records}
    comparison = ArmComparison(names, arms) if arms else None
    name = experiment.primary_metric.metric
    titles = LOSS_TITLES if name == SELECTION_METRIC else LOSS_TITLES | {name: (name, _quantity_label(experiment))}
    tuning = PageSection(f"Learning rates{_size_suffix(size)}")
    tuning.add_block("picture", rates_picture(procedure, size), f"{_file_name_prefix(size)}rates")
    tuning.add_block("note", SEVERAL_RATES_NOTE if procedure.rate_choice(size).arms_with_several_rates else None)
    return run_sections(names, runs, comparison, size, titles, tuning, _is_uncompared_key)


def _file_name_prefix(size: str) -> str:
    """Return `SIZE-`, to be put before a file's name; empty if the experiment has no named sizes."""
    return f"{size}-" if size else ""


def _size_suffix(size: str) -> str:
    """Return `, SIZE`, to be put after a title; empty if the experiment has no named sizes."""
    return f", {size}" if size else ""


def _is_uncompared_key(key: str) -> bool:
    """Return whether a configuration key names a run or folder, or says what is logged, so that its values are not
    compared between arms."""
    return key in ("init_from", "branch_from") or key_effect(key).affects == "label"


# ---------------------------------------------------------------- words


def question_text(experiment: Experiment) -> str:
    """Phrase the question that the experiment asks about its arms and its baseline, by the primary metric."""
    baseline, *names = (arm.name for arm in experiment.arms)
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    primary, subject = experiment.primary_metric, f"{'Does' if len(names) == 1 else 'Do'} {listed}"
    direction = f"({primary.better.capitalize()} is better.)"
    return f"{subject} change {primary.metric} by more than {primary.matters:g}, compared with {baseline}? {direction}"


def answer_cards(judgement: Judgement) -> list[VerdictCard]:
    """Return the verdict on each arm in each size, as cards for the page; all intervals are drawn on one scale."""
    margin, effect_name = judgement.primary_metric.matters, f"Difference to {judgement.question.arms[0]}"
    marks, labels = [0.0, -margin, margin], ("0", f"{-margin:+g}", f"{margin:+g}")
    intervals = [verdict.interval for verdict in judgement.verdicts.values()]
    ends = [end for interval in intervals if interval and interval.is_bounded for end in interval.as_list()] + marks
    lowest, width = min(ends), np.ptp(ends) or 1.0
    cards = []
    for (size, arm), verdict in judgement.verdicts.items():
        name, effect, interval = f"{arm}{_size_suffix(size)}", (), verdict.interval
        if judgement.question.judged_rates[size] is None:
            cards.append(VerdictCard(name, "no verdict yet", "Rates are being tuned."))
            continue
        if interval:
            percents = (4 + 92 * (np.array([*interval.as_list(), *marks]) - lowest) / width).round(2).tolist()
            # the words end with seeds
            noise_source = "" if interval.noise_source == f"{verdict.seed_count} seeds" else interval.noise_source
            value, ends = DIFFERENCE_COLUMN.mean_text(interval.mean), DIFFERENCE_COLUMN.ends_text(interval)
            effect = effect_name, value, ends, noise_source, percents if interval.is_bounded else None, labels
        tone = {"better": "good", "worse": "bad", "unstable": "bad", "not learned": "bad"}.get(verdict.kind, "")
        reason = (
            "" if verdict.reason == verdict.no_answer_reason else f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
        )
        cards.append(VerdictCard(name, verdict.statement_with_seeds, reason, tone, *effect))
    return cards


def _adjustment_text(judgement: Judgement) -> str:
    """Name the test that compares arms, and the family of comparisons for which p values and intervals are adjusted."""
    question = judgement.question
    arms, sizes = len(question.arms) - 1, len(question.judged_rates)
    test = "Student t intervals of paired differences over seeds"
    coverage = ": all intervals hold together with 95%, and each word follows from its interval"
    caveat = "They assume that seeds scatter alike to both sides: one-sided noise of one arm is not covered"
    if judgement.value_bounds:
        caveat += ". An end that does not leave out 0 assumes nothing but the lowest and highest value of the metric"
    if arms * sizes == 1:
        return f"There is one comparison, by {test}. Nothing is adjusted. {caveat}."
    comparisons = f"{arms * sizes} comparisons with {question.arms[0]} ({arms} arms{f', {sizes} sizes' * (sizes > 1)})"
    adjustment = f"p values and intervals are adjusted by their joint distribution{coverage}."
    return f"Family: {comparisons} on {question.primary_metric.metric}, by {test}. {adjustment} {caveat}."


# ---------------------------------------------------------------- tables


def seeds_table(judgement: Judgement, size: str) -> Table | None:
    """Return a table of every judged run of a size: its primary metric, and the difference to the baseline's run of the
    same seed. None without runs."""
    question, metric = judgement.question, judgement.primary_metric.metric
    baseline, *arms = question.arms
    runs = {arm: judgement.runs_at_judged_rate(size, arm) for arm in question.arms}
    if not any(map(len, runs.values())):
        return None
    columns: list[FilledColumn] = [(Column("seed", kind="label"), list(map(str, question.seeds)))]
    for arm in question.arms:
        pairs = zip(*(judgement.run_columns[name][runs[arm]] for name in ("state", "value")), strict=True)
        words = [number_text(value) if state == FINISHED else state for state, value in pairs]
        columns.append((Column(arm, metric), words or ["no rate"] * len(question.seeds)))
    for arm in arms if len(runs[baseline]) else ():
        pairs = zip(
            judgement.judged_values_or_inf(size, arm), judgement.judged_values_or_inf(size, baseline), strict=False
        )
        cells = [signed_text(a - b) if np.isfinite([a, b]).all() else None for a, b in pairs]
        columns.append((Column(f"{arm} - {baseline}", metric), cells or [None] * len(question.seeds)))
    return Table(f"Every seed{_size_suffix(size)} ({question.measured_data_text})", metric, tuple(columns))


def trends_over_sizes(procedure: Procedure, judgement: Judgement) -> list[dict[str, Plain]]:
    """Return the trend over sizes of each arm's difference to the baseline, at the judged rates. It is the change with
    each doubling of non-embedding parameters, or of tokens if all sizes have equally many parameters. Only seeds that
    the arm and the baseline have finished in every size count. Intervals are not adjusted for their number. The list is
    empty if there is one size."""
    (baseline, *arms), sizes = (arm.name for arm in procedure.experiment.arms), list(procedure.experiment.sizes)
    if len(sizes) < 2:
        return []
    finished = (
        (run for run in procedure.final_runs_at_judged_rates(size) if run.outcome.state == FINISHED) for size in sizes
    )
    records = [next((run.outcome.record for run in runs if run.has_begun), None) for runs in finished]
    if None in records:
        return []
    parameters = [record.environment_entry("parameters.non_embedding") for record in records]
    amounts = {"parameters": parameters, "tokens": [record.tokens_seen for record in records]}
    amount_name = next((name for name, counts in amounts.items() if None not in counts and len(set(counts)) > 1), None)
    entries = []
    for arm in arms if amount_name else ():
        if not all(judgement.runs_at_judged_rate(size, name) for size in sizes for name in (arm, baseline)):
            continue
        values = np.array([[judgement.judged_values_or_inf(size, name) for size in sizes] for name in (arm, baseline)])
        with np.errstate(invalid="ignore"):
            differences = np.subtract(*values)
        differences = differences[:, np.isfinite(differences).all(0)]
        if differences.shape[1] > 1:
            interval = trend_per_doubling(differences, np.array(amounts[amount_name]))
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


def trend_table(entries: list[dict[str, Plain]], baseline: str) -> Table:
    """Return the table of `trends_over_sizes`, a row for each arm."""
    changes = [Interval(*(math.nan if value is None else value for value in entry["change"])) for entry in entries]
    change = Column(f"difference to {baseline} changes by", "95% interval, alone", "difference")
    samples = (Column("over", kind="label"), [entry["over"] for entry in entries])
    arms = (Column("arm", kind="label"), [entry["arm"] for entry in entries])
    return Table(f"With each doubling of {entries[0]['with_each_doubling_of']}", "", (arms, samples, (change, changes)))


# ---------------------------------------------------------------- pictures


def rates_picture(procedure: Procedure, size: str) -> Picture | None:
    """Return a picture of tuning runs by rate, in the metric by which rates are chosen; None before one has ended."""
    experiment, tuning_runs = procedure.experiment, procedure.tuning_runs(size)
    metric, names = experiment.rate_choice_metric, [arm.name for arm in experiment.arms]
    if tuning_runs[metric].isna().all():
        return None
    chosen_rates = {arm: rates[0] for arm, rates in procedure.rate_choice(size).rates_of_final_runs.items()}
    traces = []
    for index, name in enumerate(names):
        runs = tuning_runs[tuning_runs["arm"] == name]
        values, is_diverged = runs[["rate", metric]].to_numpy(), np.isinf(runs[metric])
        traces.append(_dots_trace(index, f"{name}, single seeds", values[np.isfinite(runs[metric])]))
        if is_diverged.any():
            crosses = runs["rate"][is_diverged].to_numpy()
            traces.append(Trace(index, f"{name}, diverged", crosses, np.full(len(crosses), np.nan), "diverged"))
        means = runs.groupby("rate")[metric].mean()
        means = means[np.isfinite(means)]
        traces.append(Trace(index, f"{name}, mean", means.index.to_numpy(), means.to_numpy(), "mean"))
        if (rate := chosen_rates.get(name)) in means:
            traces.append(Trace(index, f"{name}, chosen", np.array([rate]), np.array([means[rate]]), "chosen"))
    label = "validation loss (nats per token)" if metric == SELECTION_METRIC else _quantity_label(experiment)
    name = "learning rate" if experiment.tune.key == "optim.lr" else experiment.tune.key.rpartition(".")[2]
    panel = Panel(
        "Tuning runs",
        f"{name.replace('_', ' ')} ({experiment.tune.key})",
        f"{label}, {experiment.measured_data_text(metric, 'selection')}",
        traces,
        {rate: f"{rate:g}" for rate in sorted({*tuning_runs["rate"]})},
        x_log_base=10,
    )
    caption = "Tuning runs: dots are single seeds, lines their means, rings the rates that were chosen."
    if np.isinf(tuning_runs[metric]).any():
        caption += " Crosses at the top: a seed diverged there, and the rate is not chosen."
    return Picture([panel], names, caption)


def _dots_trace(arm_index: int, label: str, points: Sequence[tuple[float, float]]) -> Trace:
    """Return a trace of single dots (x, y) of an arm."""
    return Trace(arm_index, label, *np.array(points).reshape(-1, 2).T, "dots")


def _quantity_label(experiment: Experiment) -> str:
    """Return the primary metric in words."""
    return with_unit(
        experiment.declared_metric.quantity.rpartition("/")[2].replace("_", " "), experiment.declared_metric.unit
    )


def differences_picture(experiment: Experiment, judgement: Judgement) -> Picture | None:
    """Return a picture of differences to the baseline with their intervals, by arm, or by size if there are several
    sizes; None without runs."""
    names, sizes, traces = judgement.question.arms, [*judgement.question.judged_rates], []
    by_size, margin = len(sizes) > 1, judgement.primary_metric.matters
    x_labels = sizes if by_size else names[1:]
    for (size, arm), verdict in judgement.verdicts.items():
        differences, index = judgement.comparisons[size, arm].judged_differences, names.index(arm)
        x = sizes.index(size) + 0.16 * (index - len(names) / 2) if by_size else float(index - 1)
        label = ", ".join(filter(None, (size, arm)))
        if len(differences):
            traces.append(_dots_trace(index, f"{label}, single seeds", [(x, value) for value in differences]))
        if verdict.interval and verdict.interval.is_bounded:
            y, low, high = (np.array([value]) for value in verdict.interval.as_list())
            traces.append(Trace(index, label, np.array([x + 0.06]), y, "interval", low, high))
    if not traces:
        return None
    title = f"Difference to {names[0]}" + (" by size" if by_size else "")
    label = (
        f"{_quantity_label(experiment)}, {experiment.measured_data_text(experiment.primary_metric.metric, 'report')}"
    )
    panel = Panel(title, "", label, traces, dict(enumerate(x_labels)), has_zero_line=True, margin=margin)
    rates_part = " and rates" * any(len(rates) > 1 for rates in judgement.runs_by_arm.values())
    caption = (
        f"Dots: single seeds. Bars: mean with its interval over seeds{rates_part}; all of them hold together with 95%."
    )
    return Picture([panel], names, f"{caption} Shaded: differences below {margin:g}.")
