"""This module makes the tables and notes of a comparison: means, differences, costs, and the facts that runs share or
differ in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from lm.config.normalizers import description
from lm.plain import Plain, flatten
from lm.report.comparison import (
    ArmComparison,
    ArmMean,
    Difference,
    MetricName,
    RunsByArm,
    training_lengths,
)
from lm.report.tables import (
    Column,
    FilledColumn,
    Table,
    four_digit_text,
    number_text,
    printable_text,
    recorded_value_text,
)
from lm.runs.evaluations import Metric
from lm.runs.folder import DIVERGED_KEY, PEAK_MEMORY_KEY, highest_logged
from lm.runs.record import RunRecord

# side of zero on which differences are improvements, by the better direction
BETTER_SIDE_OF_ZERO = {"lower": "below zero", "higher": "above zero", "none": ""}
REPORT_TEXT_NOTE = (
    "of held-out text or tasks, numbers are of the documents or sequences that report, without the third "
    "that selects rates and checkpoints"
)
ONE_SEED_NOTE = (
    "One seed: intervals cover the choice of text alone. Another seed can move a difference several times as far."
)
DIFFERENT_SEEDS_NOTE = (
    "arms were measured with different seeds: means are over each arm's own, differences over the seeds "
    "that both arms have"
)
AGREEMENT_TEXTS = {True: "yes", False: "NO", None: "unknown"}  # how tables show `RunProperty.runs_agree`


def comparison_tables(comparison: ArmComparison) -> tuple[Table, ...]:
    """Return one table for each section: a row for each task, inference setting and arm, a column for each metric at
    each point or range. A table of differences to the baseline follows if any difference has an interval."""
    tables = [_section_table(comparison, section) for section in comparison.sections]
    differences = [difference for difference in comparison.differences if difference.interval]
    return (*tables, _difference_table(comparison, differences)) if differences else tuple(tables)


def _section_table(comparison: ArmComparison, section: pd.DataFrame) -> Table:
    """Return the table of one section of `comparison_tables`."""
    title, axis_kind = section[["title", "axis_kind"]].iloc[0]
    runs_by_row = section.groupby(["task_label", "setting", "arm"], sort=False)["run"].unique().to_dict()
    settings = dict.fromkeys(row[:2] for row in runs_by_row)
    rows = [row for pair, arm in product(settings, comparison.runs_by_arm) if (row := (*pair, arm)) in runs_by_row]
    task_labels, setting_names, arms = (list(texts) for texts in zip(*rows, strict=True))
    labels = {"arm": arms, "task": task_labels, "inference setting": setting_names}
    columns: list[FilledColumn] = [(Column(name, kind="label"), texts) for name, texts in labels.items() if any(texts)]
    columns.append((Column("seeds"), [str(len(runs_by_row[row])) for row in rows]))
    diverged = [sum(comparison.runs[run].state == DIVERGED_KEY for run in runs_by_row[row]) for row in rows]
    columns += [(Column("diverged"), [str(count) for count in diverged])] if any(diverged) else []
    levels, lengths = list[FilledColumn](), training_lengths(section)
    # points ascend; ranges are in the order of their end divided by the training length
    places = section.drop_duplicates("place").sort_values("order", kind="stable")
    for quantity, means in section.groupby("quantity", sort=False):
        metric, has_units = means["about"].iloc[0], means["sample"].notna().any()
        names = [MetricName(title, axis_kind, quantity, task_label, setting) for task_label, setting, _ in rows]
        for place, start in zip(places["place"], places["x"], strict=True):
            cells = [comparison.arm_means.get((name, place, arm)) for name, arm in zip(names, arms, strict=True)]
            heading = place
            if axis_kind == "points" and len(lengths) == 1:
                heading = f"{place}, {start / lengths[0]:g}x"
            if axis_kind != "points" or section["quantity"].nunique() > 1:
                heading = f"{quantity} {heading}".strip()
            columns.append(_mean_column(heading, metric, cells))
        if axis_kind == "number":
            unit = _short_unit(metric.unit)
            if has_units and any(len(arm_runs) > 1 for arm_runs in comparison.runs_by_arm.values()):
                spreads = [number_text(cell and cell.seed_std) for cell in cells]
                columns.append((Column("sd over seeds", unit), spreads))
            for level in dict(metric.references):
                values = [number_text(cell and dict(cell.metric.references).get(level)) for cell in cells]
                levels.append((Column(level, unit), values))
    title += " in training lengths" if axis_kind == "bins" else ""
    return Table(title, _short_unit(section["about"].iloc[0].unit), (*columns, *levels))


def _mean_column(heading: str, metric: Metric, cells: Sequence[ArmMean | None]) -> FilledColumn:
    """Return a column of a table with a row for each arm: the arm's mean of the metric at one point or range of
    the metric's axis, such as one sequence length, with its interval if it has one. A cell is None without a mean."""
    sources = dict.fromkeys(cell.interval.noise_source for cell in cells if cell and cell.interval)
    unit, options = _short_unit(metric.unit), {}
    if sources:
        unit += f", 95% interval over {' or over '.join(sources)}, alone"
        options = {"kind": "mean", "decimals": 3 if metric.unit == "fraction" else 4}
    return Column(heading, unit, **options), [cell and (cell.interval or number_text(cell.mean)) for cell in cells]


def _short_unit(unit: str) -> str:
    """Shorten a unit for headings: `nats per token` becomes `nats/token`."""
    return unit.replace(" per ", "/")


def _difference_table(comparison: ArmComparison, differences: list[Difference]) -> Table:
    """Return a table of differences. Differences whose intervals cover different sources of noise, such as `3 seeds`
    and `documents, 1 seed`, stand in different columns."""
    labels = {
        "arm": [difference.arm for difference in differences],
        "metric": [difference.metric_in_words for difference in differences],
        "measured in": [_short_unit(difference.metric.unit) for difference in differences],
        "better": [BETTER_SIDE_OF_ZERO[difference.metric.better] for difference in differences],
    }
    columns: list[FilledColumn] = [(Column(name, kind="label"), texts) for name, texts in labels.items()]
    intervals = [difference.interval for difference in differences]
    for noise_source in dict.fromkeys(interval.noise_source for interval in intervals):
        cells = [interval if interval.noise_source == noise_source else None for interval in intervals]
        columns.append((Column("difference", f"95% interval over {noise_source}, alone", "difference"), cells))
    return Table(f"Differences to {comparison.arm_labels[0]}", "", tuple(columns))


def comparison_notes(comparison: ArmComparison) -> list[str]:
    """Return notes on the documents and seeds over which means are taken, and on why differences are missing."""
    lines = [REPORT_TEXT_NOTE] * bool((comparison.titled_metric_rows["part"] == "reports").any())
    intervals = [difference.interval for difference in comparison.differences if difference.interval]
    lines += [ONE_SEED_NOTE] * any(interval.noise_source.endswith(", 1 seed") for interval in intervals)
    seeds = comparison.run_means.groupby(["name", "arm"])["seeds"].agg(frozenset)
    differ_in_seeds = (seeds.groupby("name").nunique() > 1).any()
    lines += [DIFFERENT_SEEDS_NOTE] * bool(comparison.differences and differ_in_seeds)
    missing = pd.DataFrame(
        [
            (difference.no_interval_reason, difference.metric_in_words, difference.arm)
            for difference in comparison.differences
            if difference.no_interval_reason
        ],
        columns=["reason", "description", "arms"],
    )
    # arms by reason and description, then descriptions by reason and arms
    missing = missing.groupby(["reason", "description"], sort=False)["arms"].agg(", ".join).reset_index()
    for (arms, reason), descriptions in missing.groupby(["arms", "reason"], sort=False)["description"]:
        lines.append(f"difference of {arms} in {'; '.join(descriptions)} is not given: {reason}")
    return lines


# ---------------------------------------------------------------- what a run took


def cost_table(runs_by_arm: RunsByArm, title: str = "What a run took") -> Table:
    """Return a table of the mean costs of a run, one row per arm, without costs that no run folder records."""
    means = [pd.DataFrame([_run_costs(run) for run in runs], dtype=float).mean() for runs in runs_by_arm.values()]
    columns: list[FilledColumn] = [
        (Column("arm", kind="label"), [*runs_by_arm]),
        (Column("runs"), [str(len(runs)) for runs in runs_by_arm.values()]),
    ]
    for name, unit in means[0].index:
        cells = [None if np.isnan(cost[name, unit]) else four_digit_text(cost[name, unit]) for cost in means]
        columns += [(Column(name, unit), cells)] if any(cells) else []
    devices = [
        ", ".join(dict.fromkeys(recorded_value_text(run.recorded_setting("device")) for run in runs))
        for runs in runs_by_arm.values()
    ]
    return Table(title, "", (*columns, (Column("device", kind="words"), devices)))


def _run_costs(run: RunRecord) -> dict[tuple[str, str], float | None]:
    """Return a run's costs by (name, unit), None where the run folder records none."""
    seconds, memory = highest_logged(run.log_lines, "elapsed_s"), highest_logged(run.log_lines, PEAK_MEMORY_KEY)
    # the run's own, as the seconds are
    tokens = run.tokens_seen and run.tokens_seen - (run.environment_entry("branched_from.tokens") or 0)
    tokens = 0 if run.environment.get("swap") and not run.log_lines else tokens  # it was swapped, and not trained
    total, normalizer, flops = (
        run.environment_entry(name) for name in ("parameters.total", "parameters.normalizer", "flops_per_token")
    )
    return {
        ("parameters", "M"): total and total / 1e6,
        ("in the normalizer", "parameters, at the start"): normalizer,
        ("tokens", "M a run"): tokens and tokens / 1e6,
        ("training", "TFLOP a run"): flops and tokens and flops * tokens / 1e12,
        ("training time", "s a run"): seconds,
        ("speed", "tokens/s"): tokens / seconds if tokens and seconds else None,
        ("peak memory", "GiB, of the process on a CPU, of tensors on a GPU"): memory and memory / 2**30,
    }


# ---------------------------------------------------------------- what runs share and what differs


@dataclass(frozen=True)
class RunProperty:
    """Holds a setting or measurement of all runs: its value as text, by arm if arms differ, and whether all runs agree.

    `runs_agree` is None if it is unknown whether runs agree. `must_agree`: whether a fair comparison needs the runs to
    agree.
    """

    name: str
    runs_agree: bool | None
    value: str
    must_agree: bool = True


def run_properties(comparison: ArmComparison) -> list[RunProperty]:
    """Return the settings of all runs, and how the runs were measured; first the properties in which the runs of a fair
    comparison agree."""
    runs, arms = comparison.runs, comparison.runs_by_arm
    conditions_by_run = [_fairness_conditions(run) for run in runs]
    properties = {
        name: RunProperty(name, *comparison.agreement_and_text([conditions[name] for conditions in conditions_by_run]))
        for name in conditions_by_run[0]
    }
    seed_lists = {tuple(run.seeds for run in arm_runs) for arm_runs in arms.values()}
    properties["seeds"] = replace(properties["seeds"], runs_agree=len(seed_lists) == 1)
    # equal commits need not be equal code
    if properties["code"].runs_agree and "uncommitted" in properties["code"].value:
        properties["code"] = replace(properties["code"], runs_agree=None)
    values: dict[str, list[Plain]] = {}
    for section in comparison.sections:
        amounts = {run: _sequences_text(rows) for run, rows in section.groupby("run")}
        values[section["about"].iloc[0].measured_on] = [amounts.get(number) for number in range(len(runs))]
    values["torch.compile"] = [run.recorded_setting("compile") for run in runs]
    versions = [run.environment.get("versions") or {} for run in runs]
    values["versions"] = [
        ", ".join(f"{name} {version}" for name, version in run_versions.items()) or None for run_versions in versions
    ]
    return [
        *properties.values(),
        *(
            RunProperty(f"normalizer: {arm}", None, _normalizer_text(arm_runs[0]), False)
            for arm, arm_runs in arms.items()
        ),
        *(
            RunProperty(name, *comparison.agreement_and_text(run_values), must_agree=False)
            for name, run_values in values.items()
        ),
    ]


def _fairness_conditions(run: RunRecord) -> dict[str, Plain]:
    """Return the settings and counts of a run in which the runs of a fair comparison agree."""
    total, normalizer = run.environment_entry("parameters.total"), run.environment_entry("parameters.normalizer")
    evaluated_after = {evaluation.tokens_seen for evaluation in run.evaluations}
    scheduled = [
        key for key in run.flat_config if key.startswith(("optim.lr", "optim.warmup_steps", "optim.schedule."))
    ]
    return {
        "tokens seen": run.tokens_seen,
        "tokens seen when evaluated": ", ".join(f"{tokens:,}" for tokens in sorted(evaluated_after)) or None,
        "tokens in the weights started from": run.tokens_before_run,
        "data fingerprint": run.environment_entry("data_fingerprint"),
        "tokens in a step": run.flat_config.get("optim.batch_tokens"),
        "steps": run.flat_config.get("trainer.max_steps"),
        "seeds": " after ".join(map(str, reversed(run.seeds))),  # `3 after 1`: initial weights were trained with seed 1
        "learning rate and schedule": ", ".join(f"{key}={run.flat_config[key]}" for key in scheduled),
        "parameters outside the normalizer": None if None in (total, normalizer) else total - normalizer,
        "precision": run.recorded_setting("precision"),
        "device": run.recorded_setting("device"),
        "code": run.commits_text,
    }


def properties_table(comparison: ArmComparison) -> Table:
    """Return a table with a row for each of the `run_properties`; with several arms, a column says which conditions of
    a fair comparison hold."""
    properties = run_properties(comparison)
    agreements = [
        AGREEMENT_TEXTS[run_property.runs_agree] if run_property.must_agree else "" for run_property in properties
    ]
    columns: list[FilledColumn] = [
        (Column("what", kind="label"), [run_property.name for run_property in properties]),
        *[(Column("same in all runs", kind="label"), agreements)] * (len(comparison.runs_by_arm) > 1),
        (Column("value", kind="words"), [run_property.value for run_property in properties]),
    ]
    return Table("Runs and environment", "", tuple(columns))


def configuration_table(comparison: ArmComparison, is_omitted: Callable[[str], bool]) -> Table:
    """Return a table with a row for each configuration key in which the arms differ, unless it `is_omitted`, and a
    column for each arm."""
    keys = [key for key in comparison.config_diff if not is_omitted(key)]
    columns = [
        (Column(arm, kind="words"), [comparison.config_diff[key][index] for key in keys])
        for index, arm in enumerate(comparison.runs_by_arm)
    ]
    return Table("Configuration keys in which the arms differ", "", ((Column("key", kind="label"), keys), *columns))


def _sequences_text(rows: pd.DataFrame) -> str | None:
    """Return the number and length of the sequences that rows were measured on (`Metric.amount`), by task. Return None
    if no row's metric states them."""
    amounts = dict.fromkeys(zip(rows["task_label"], (metric.amount for metric in rows["about"]), strict=True))
    return "; ".join(": ".join(filter(None, pair)) for pair in amounts if pair[1]) or None


def data_text(run: RunRecord) -> str:
    """Return a run's text or tasks by name, and the number of training tokens. Sequences of symbols have no such
    number, as they are generated in training."""
    source = {} if run.is_symbolic else flatten(run.config["data"].get("source"))
    names = [name for key, name in source.items() if name and key.rpartition(".")[2] in ("package", "dataset", "paths")]
    words = [str(part) for name in names for part in (name if isinstance(name, list) else [name])]
    words += [entry["task"]["name"] for entry in run.config["data"].get("tasks") or []]
    count = None if run.is_symbolic else run.environment_entry("data.train_tokens")
    return printable_text(", ".join([*words, *([f"{count:,} training tokens"] if count else [])]))


def _normalizer_text(run: RunRecord) -> str:
    """Return text on the normalizer of each training phase of a run: formula, source, and options that aren't the
    defaults."""
    return "; then ".join(
        f"{f'from step {step}: ' if step else ''}{description(options)}"
        for step, options in run.phase_starts_and_normalizers
    )
