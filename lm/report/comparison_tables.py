"""The tables and notes of a comparison: means, differences, costs, and the facts that runs share or differ in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from lm.attention import catalogue
from lm.config import normalizers as kinds
from lm.report.comparison import ArmRuns, RunComparison, Section, SeriesName, seeds_shown, shared_value
from lm.report.tables import (
    Column,
    FilledColumn,
    Table,
    four_digit_text,
    numeral,
    plain_text,
    printable,
    table_from_rows,
)
from lm.runs.folder import DIVERGED, peak_memory, training_seconds
from lm.runs.record import RunRecord, differing_settings, starts
from lm.schema import Plain, flatten
from lm.statistics.intervals import Interval

BETTER_SIDE = {"lower": "below zero", "higher": "above zero", "none": ""}  # side on which differences are improvements
REPORTING_NOTE = (
    "of held-out text or tasks, numbers are of the documents or sequences that report, without the third "
    "that selects rates and checkpoints"
)
OWN_SEEDS_NOTE = (
    "arms were measured with different seeds: means are over each arm's own, differences over the seeds "
    "that both arms have"
)
AGREEMENT_TEXTS = {True: "yes", False: "NO", None: "unknown"}  # how tables show `Fact.agrees`
TimeSpan = tuple[datetime, datetime]


def comparison_tables(comparison: RunComparison) -> tuple[Table, ...]:
    """One table for each section: a row for each task, inference setting and arm, a column for each metric at each
    point or range. A table of differences to the baseline follows if any difference has an interval."""
    tables = [_section_table(comparison, section) for section in comparison.sections]
    differences = _difference_table(comparison)
    return (*tables, differences) if differences.rows else tuple(tables)


def _section_table(comparison: RunComparison, section: Section) -> Table:
    measured = dict.fromkeys((run, replace(name, metric="")) for run, name in section.series)  # names without metric
    rows = product(dict.fromkeys(name for _, name in measured), comparison.arms)
    runs_by_row = {(arm, name): [run for run in arm.runs if (run, name) in measured] for name, arm in rows}
    runs_by_row = {row: runs for row, runs in runs_by_row.items() if runs}
    rows_by_metric = [[(arm, replace(name, metric=metric)) for arm, name in runs_by_row] for metric in section.metrics]
    labels = {
        "arm": [arm.label for arm, _ in runs_by_row],
        "task": [name.subject for _, name in runs_by_row],
        "inference setting": [name.setting for _, name in runs_by_row],
    }
    columns: list[FilledColumn] = [(Column(name, kind="label"), cells) for name, cells in labels.items() if any(cells)]
    columns += [(Column("seeds"), [str(len(runs)) for runs in runs_by_row.values()])]
    diverged_counts = [sum(run.state == DIVERGED for run in runs) for runs in runs_by_row.values()]
    columns += [(Column("diverged"), [str(count) for count in diverged_counts])] if any(diverged_counts) else []
    if section.shape == "number":
        for name, value in (
            ("params", lambda run: run.environment_entry("parameters.total")),
            ("tokens", lambda run: run.tokens_seen),
        ):
            columns.append(
                (Column(name, "M"), [_mean_text([value(run) for run in runs], 1e6) for runs in runs_by_row.values()])
            )
    columns += [column for rows in rows_by_metric for column in _mean_columns(comparison, section, rows)]
    for rows in rows_by_metric if section.shape == "number" else ():
        example = section.example(rows[0][1].metric)
        series_by_row = [section.comparable_series(*row, "") for row in rows]
        for name, _ in example.about.references:
            levels = [
                [level for series in row_series for other, level in series.about.references if other == name]
                for row_series in series_by_row
            ]
            columns.append(
                (
                    Column(name, _unit(example.unit)),
                    [numeral(float(np.mean(values))) if values else None for values in levels],
                )
            )
    title = section.title + (" in training lengths" if section.shape == "bins" else "")
    return Table(title, _unit(section.example_series.unit), tuple(columns))


def _mean_text(values: Sequence[float | None], unit: float = 1.0, decimals: int | None = None) -> str | None:
    """The mean of the values that are not None, divided by `unit`, as text with four digits or `decimals` decimals;
    None without values.
    """
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    mean = np.mean(numbers) / unit
    return four_digit_text(mean) if decimals is None else f"{mean:.{decimals}f}"


def _mean_columns(
    comparison: RunComparison, section: Section, rows: list[tuple[ArmRuns, SeriesName]]
) -> list[FilledColumn]:
    """Columns of a metric's means, one for each point (with intervals) or range. Single numbers of several seeds also
    have an sd column.
    """
    example = section.example(rows[0][1].metric)
    unit, has_points, training_lengths = _unit(example.unit), section.shape == "points", section.seq_lens
    cells_by_name = {}
    for place, (start, _) in section.places.items():
        name = place + (f", {start / training_lengths[0]:g}x" if has_points and len(training_lengths) == 1 else "")
        name = name if has_points and len(section.metrics) == 1 else f"{example.metric} {name}".strip()
        cells_by_name[name] = [
            (section.interval(*row, place) if has_points else None) or numeral(section.mean(*row, place))
            for row in rows
        ]
    noise_sources = dict.fromkeys(
        cell.noise_source for cells in cells_by_name.values() for cell in cells if isinstance(cell, Interval)
    )
    fields = {"unit": unit}
    if noise_sources:
        interval_unit = f"{unit}, 95% interval over {' or over '.join(noise_sources)}, alone"
        fields = {"unit": interval_unit, "kind": "mean", "decimals": 3 if example.unit == "fraction" else 4}
    mean_columns = [(Column(name, **fields), cells) for name, cells in cells_by_name.items()]
    if section.shape == "number" and example.points and any(len(arm.runs) > 1 for arm in comparison.arms):
        means_by_row = [[series.mean_at("") for series in section.comparable_series(*row, "")] for row in rows]
        spreads = [
            numeral(float(np.std(run_means, ddof=1))) if len(run_means) > 1 else None for run_means in means_by_row
        ]
        mean_columns.append((Column("sd over seeds", unit), spreads))
    return mean_columns


def _unit(unit: str) -> str:
    return unit.replace(" per ", "/")


def _difference_table(comparison: RunComparison) -> Table:
    """A table of the differences to the baseline that have an interval, with a column for each source of noise that
    intervals cover.
    """
    differences = [difference for difference in comparison.differences if difference.interval]
    intervals = [difference.interval for difference in differences]
    examples = [difference.section.example(difference.name.metric) for difference in differences]
    columns: list[FilledColumn] = [
        (Column("arm", kind="label"), [difference.arm for difference in differences]),
        (Column("metric", kind="label"), [difference.subject for difference in differences]),
        (Column("measured in", kind="label"), [_unit(series.unit) for series in examples]),
        (Column("better", kind="label"), [BETTER_SIDE[series.about.better] for series in examples]),
    ]
    for noise_source in dict.fromkeys(interval.noise_source for interval in intervals):
        cells = [interval if interval.noise_source == noise_source else None for interval in intervals]
        columns.append((Column("difference", f"95% interval over {noise_source}, alone", "difference"), cells))
    return Table(f"Differences to {comparison.arms[0].label}", "", tuple(columns))


def comparison_notes(comparison: RunComparison) -> list[str]:
    """Notes on what differs besides the normalizer, on how differences were computed or why they are missing, and on
    what runs lack.
    """
    lines = [comparison.warning] if comparison.warning else []
    has_text = any(series.is_of_text for section in comparison.sections for series in section.series.values())
    lines += [REPORTING_NOTE] if has_text else []
    names = ((section, name) for section in comparison.sections for name in section.names)
    differ_in_seeds = any(
        len({tuple(section.by_seed(arm, name)) for arm in comparison.arms} - {()}) > 1 for section, name in names
    )
    lines += [OWN_SEEDS_NOTE] if comparison.differences and differ_in_seeds else []
    for note in dict.fromkeys(difference.note for difference in comparison.differences):
        group = [difference for difference in comparison.differences if difference.note == note]
        # by the names of the arms whose differences have this note
        subjects_by_arms: dict[tuple[str, ...], list[str]] = {}
        for subject in dict.fromkeys(difference.subject for difference in group):
            subjects_by_arms.setdefault(
                tuple(difference.arm for difference in group if difference.subject == subject), []
            ).append(subject)
        absence = "" if group[0].interval else " is not given"
        for arms, subjects in subjects_by_arms.items():
            lines.append(f"difference of {', '.join(arms)} in {'; '.join(subjects)}{absence}: {note}")
    return [*lines, *comparison.missing_notes]


# ---------------------------------------------------------------- what a run took


def cost_table(arms: Sequence[ArmRuns], concurrent_runs: Sequence[RunRecord], title: str = "What a run took") -> Table:
    """A table of the mean costs of a run, one row per arm. `concurrent_runs`: all runs that may have been under way at
    the same time.
    """
    training_spans = {run.folder: _training_span(run) for run in concurrent_runs}
    uses_cpu = [str(run.setting("device") or "cpu").startswith("cpu") for arm in arms for run in arm.runs]
    memory_unit = (
        "GiB, whole process"
        if all(uses_cpu)
        else "GiB, whole process on a CPU"
        if any(uses_cpu)
        else "GiB, tensors on the GPU"
    )
    costs = [[_costs(run, training_spans, memory_unit) for run in arm.runs] for arm in arms]
    columns: list[FilledColumn] = [
        (Column("arm", kind="label"), [arm.label for arm in arms]),
        (Column("runs"), [str(len(arm.runs)) for arm in arms]),
    ]
    for name, unit in costs[0][0]:
        cells = [
            _mean_text([cost[name, unit] for cost in by_run], decimals=1 if name == "concurrent runs" else None)
            for by_run in costs
        ]
        columns += [(Column(name, unit), cells)] if any(cells) else []
    devices = [", ".join(dict.fromkeys(plain_text(run.setting("device")) for run in arm.runs)) for arm in arms]
    return Table(title, "", (*columns, (Column("device", kind="words"), devices)))


def _costs(
    run: RunRecord, training_spans: Mapping[Path, TimeSpan | None], memory_unit: str
) -> dict[tuple[str, str], float | None]:
    """A run's costs by (name, unit), None where the run folder records none. `training_spans`: start and end of
    training by run folder.
    """
    seconds, memory = training_seconds(run.log_lines), peak_memory(run.log_lines)
    # the run's own, as the seconds are
    tokens = run.tokens_seen and run.tokens_seen - (run.environment_entry("branched_from.tokens") or 0)
    tokens = 0 if run.environment.get("swap") and not run.log_lines else tokens  # it was swapped, and not trained
    total, normalizer, flops = (
        run.environment_entry(name) for name in ("parameters.total", "parameters.normalizer", "flops_per_token")
    )
    concurrency = None
    # how many other runs were under way at a time, on average over this run's span
    if own_span := training_spans[run.folder]:
        other_spans = [span for folder, span in training_spans.items() if span and folder != run.folder]
        shared_seconds = sum(
            max(0.0, (min(own_span[1], stop) - max(own_span[0], start)).total_seconds()) for start, stop in other_spans
        )
        concurrency = shared_seconds / (own_span[1] - own_span[0]).total_seconds()
    return {
        ("parameters", "M"): total and total / 1e6,
        ("in the normalizer", "parameters, at the start"): normalizer,
        ("tokens", "M a run"): tokens and tokens / 1e6,
        ("training", "TFLOP a run"): flops and tokens and flops * tokens / 1e12,
        ("training time", "s a run"): seconds,
        ("speed", "tokens/s"): tokens / seconds if tokens and seconds else None,
        ("peak memory", memory_unit): memory and memory / 2**30,
        ("concurrent runs", "others of this page, mean"): concurrency,
    }


def _training_span(run: RunRecord) -> TimeSpan | None:
    """Start and end of a run's training since it was last started or resumed; None if the run folder does not record
    them.
    """
    run_starts = starts(run.environment)
    seconds = training_seconds(run.log_lines, run_starts[-1]["step"]) if run_starts else None
    if not seconds or not run_starts[-1].get("time"):
        return None
    start = datetime.fromisoformat(run_starts[-1]["time"])
    return start, start + timedelta(seconds=seconds)


# ---------------------------------------------------------------- what runs share and what differs


@dataclass(frozen=True)
class Fact:
    """A setting or measurement of all runs: its value as text, by arm if arms differ, and whether all runs agree.

    `agrees` is None if it is unknown whether runs agree. `condition`: whether a fair comparison needs the runs to
    agree.
    """

    name: str
    agrees: bool | None
    value: str
    condition: bool = True


def run_facts(comparison: RunComparison) -> list[Fact]:
    """Facts on the settings of all runs and on how the runs were measured, beginning with the conditions of a fair
    comparison.
    """
    arms = comparison.arms
    sections = {section.example_series.about.measured_on: section for section in comparison.sections}

    def fact(name: str, value: Callable[[RunRecord], object]) -> Fact:
        return Fact(name, *shared_value(arms, value))

    def parameters_outside_normalizer(run: RunRecord) -> int | None:
        total, normalizer = run.environment_entry("parameters.total"), run.environment_entry("parameters.normalizer")
        return None if total is None or normalizer is None else total - normalizer

    def steps(run: RunRecord) -> str:
        return (
            f"{plain_text(run.evaluations[0].step if run.evaluations else None)} / "
            f"{plain_text(run.flat.get('trainer.max_steps'))}"
        )

    def parameters(run: RunRecord) -> str:
        return " / ".join(
            plain_text(run.environment_entry(f"parameters.{name}")) for name in ("total", "non_embedding", "normalizer")
        )

    def tasks(run: RunRecord) -> str | None:
        return "; ".join(_settings_text(entry) for entry in run.config["data"].get("tasks") or []) or None

    # equal commits with uncommitted changes need not be equal code
    is_same_code, code = shared_value(arms, lambda run: run.commits)
    schedule = ("optim.lr", "optim.warmup_steps", "optim.schedule.")  # prefixes of the keys of the schedule
    seed_lists = {tuple(run.seeds for run in arm.runs) for arm in arms}
    differences = [(printable(run.name), differing_settings(run.environment)) for run in comparison.runs]
    differing_starts = ". ".join(f"{name}: {'; '.join(settings)}" for name, settings in differences if settings)
    inference_settings = dict.fromkeys(
        name.setting for section in comparison.sections for name in section.names if name.setting
    )
    conditions = [
        fact("tokens seen", lambda run: run.tokens_seen),
        fact("tokens in the weights started from", lambda run: run.tokens_before),
        *(fact(f"tokens seen, {name}", section.tokens_seen) for name, section in list(sections.items())[1:]),
        fact("data fingerprint", lambda run: run.environment_entry("data_fingerprint")),
        *(fact(f"{name} (sha256)", section.sha256) for name, section in sections.items()),
        fact("tokens in a step", lambda run: run.flat.get("optim.batch_tokens")),
        fact("steps", lambda run: run.flat.get("trainer.max_steps")),
        Fact("seeds", len(seed_lists) == 1, shared_value(arms, lambda run: seeds_shown(run.seeds))[1]),
        fact(
            "learning rate and schedule",
            lambda run: ", ".join(f"{key}={run.flat[key]}" for key in run.flat if key.startswith(schedule)),
        ),
        fact("parameters outside the normalizer", parameters_outside_normalizer),
        fact("precision", lambda run: run.setting("precision")),
        fact("device", lambda run: run.setting("device")),
        Fact("what each start of a run used", not differing_starts, differing_starts or "the same at every start"),
        Fact("code", None if is_same_code and "uncommitted" in code else is_same_code, code),
    ]
    other_facts = [
        *(Fact(f"normalizer: {arm.label}", None, _normalizer_text(arm.runs[0])) for arm in arms),
        fact("training length (tokens)", lambda run: run.flat["data.seq_len"]),
        *(fact(name, partial(_sequences_text, section)) for name, section in sections.items()),
        Fact("inference settings", None, ", ".join(inference_settings) or "none"),
        fact("data", corpus_text),
        *([fact("tasks", tasks)] if any(map(tasks, comparison.runs)) else []),
        fact("steps: evaluated / planned", steps),
        fact("parameters: total / non-embedding / normalizer", parameters),
        fact("torch.compile", lambda run: run.setting("compile")),
        fact("versions", lambda run: _settings_text(run.environment.get("versions"))),
    ]
    return conditions + [replace(fact, condition=False) for fact in other_facts]


def facts_table(comparison: RunComparison) -> Table:
    """A table with a row for each of the `run_facts`; with several arms, a column says which conditions of a fair
    comparison hold.
    """
    rows = []
    for fact in run_facts(comparison):
        agreement = (
            {"same in all runs": AGREEMENT_TEXTS[fact.agrees] if fact.condition else ""}
            if len(comparison.arms) > 1
            else {}
        )
        rows.append({"what": fact.name} | agreement | {"value": fact.value})
    return table_from_rows("Runs and environment", rows, {"value": "words"})


def configuration_table(comparison: RunComparison, is_omitted: Callable[[str], bool]) -> Table:
    """A table with a row for each configuration key in which the arms differ, unless it `is_omitted`, and a column for
    each arm.
    """
    keys = [key for key in comparison.config_diff if not is_omitted(key)]
    cells_by_arm = [[comparison.config_diff[key][index] for key in keys] for index in range(len(comparison.arms))]
    columns = [
        (Column(arm.label, kind="words"), cells) for arm, cells in zip(comparison.arms, cells_by_arm, strict=True)
    ]
    return Table("Configuration keys in which the arms differ", "", ((Column("key", kind="label"), keys), *columns))


def _sequences_text(section: Section, run: RunRecord) -> str | None:
    """Text on number and length of the sequences on which a run's series in a section were measured, by task; None if
    no series says it.
    """
    amounts = dict.fromkeys(
        (name.subject, series.about.amount) for (owner, name), series in section.series.items() if owner is run
    )
    return "; ".join(": ".join(filter(None, (subject, amount))) for subject, amount in amounts if amount) or None


def corpus_text(run: RunRecord) -> str | None:
    """Text on a run's data: source (left out for symbolic tasks), and numbers of tokens and documents; None if nothing
    is recorded.
    """
    # without the machine's folder
    counts = {name: count for name, count in (run.environment.get("data") or {}).items() if name != "store"}
    source = {} if run.symbolic else {"source": run.config["data"].get("source")}
    return _settings_text({**source, **counts})


def _settings_text(settings: Plain) -> str | None:
    return ", ".join(f"{key} {plain_text(value)}" for key, value in flatten(settings).items()) if settings else None


def _normalizer_text(run: RunRecord) -> str:
    """Text on the normalizer of each training phase of a run: formula, source, options and the meaning of n."""
    phases = []
    for step, options in run.phases:
        entry = catalogue.ENTRIES.get(options["name"])
        normalizer = kinds.options_from_plain(options)
        n = str(options.get("n", ""))
        formula = (normalizer.formula() if normalizer else str(options["name"])) + (
            f" ({entry.source})" if entry else ""
        )
        option_text = ", ".join(
            f"{key}={_option_text(value)}" for key, value in options.items() if key not in ("name", "n")
        )
        n_meanings = {
            "visible": "keys the query sees (its position + 1)",
            "sample": "length of the sequence or document",
        }
        n_text = f"n = {n_meanings.get(n, n.removeprefix('fixed:') + ' for every query')}" if n else ""
        phases.append((f"from step {step}: " if step else "") + "; ".join(filter(None, (formula, option_text, n_text))))
    return "; then ".join(phases)


def _option_text(value: Plain) -> str:
    """The value of a normalizer's option as text. A normalizer within the value is written as its name with its options
    in parentheses.
    """
    if isinstance(value, list):
        return ", ".join(map(_option_text, value))
    if not isinstance(value, dict):
        return plain_text(value)
    options = ", ".join(f"{key}={_option_text(option)}" for key, option in value.items() if key != "name")
    return " ".join(filter(None, (str(value.get("name", "")), options and f"({options})")))
