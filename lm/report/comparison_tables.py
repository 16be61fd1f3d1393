"""The tables and words of a comparison: numbers, differences, costs, what runs share and what differs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from lm.attention import catalogue
from lm.report.comparison import ArmRuns, Line, RunComparison, Section, across, seeds_shown
from lm.report.tables import Cell, Column, Filled, Table, digits, four_digits, print_tables, printable, show
from lm.runs.folder import peak_memory, training_seconds
from lm.runs.record import RunRecord, differing, starts
from lm.schema import Plain, flatten
from lm.statistics.intervals import Interval

BETTER = {"lower": "below zero: better", "higher": "above zero: better", "none": ""}  # words for a difference
REPORTING = (
    "of held-out text or tasks, numbers are of the documents or sequences that report, without the third that selects rates and checkpoints"
)
SAME = {True: "yes", False: "NO", None: "unknown"}  # words for a check of fairness
Span = tuple[datetime, datetime]


def comparison_tables(comparison: RunComparison) -> tuple[Table, ...]:
    """The table of each section: a row for each task, inference setting and arm, a column for each metric and place."""
    return tuple(_table(comparison, section) for section in comparison.sections)


def _table(comparison: RunComparison, section: Section) -> Table:
    every = [(arm, line) for line in dict.fromkeys(replace(line, metric="") for line in section.lines) for arm in comparison.arms]
    by_metric = [[(arm, replace(line, metric=metric)) for arm, line in every] for metric in section.metrics]
    by_metric = [*zip(*(row for row in zip(*by_metric, strict=True) if any(section.of_arm(*of) for of in row)), strict=True)]
    rows, single = by_metric[0], section.shape == "number"
    labels = {
        "arm": [arm.label for arm, _ in rows],
        "task": [line.what for _, line in rows],
        "inference setting": [line.setting for _, line in rows],
    }
    columns: list[Filled] = [(Column(name, kind="label"), cells) for name, cells in labels.items() if any(cells)]
    columns += [(Column("seeds"), [str(len(arm.runs)) for arm, _ in rows])]
    if single:
        for name, value in (("params", lambda run: run.measured("parameters.total")), ("tokens", lambda run: run.tokens_seen)):
            columns.append((Column(name, "M"), [_mean_of([value(run) for run in arm.runs], 1e6) for arm, _ in rows]))
    columns += [column for rows in by_metric for column in _means(comparison, section, rows)]
    for rows in by_metric if single else ():
        series = section.example(rows[0][1].metric)
        for name in series.references:
            levels = [[each.references[name] for each in section.alike(*of, "") if name in each.references] for of in rows]
            columns.append((Column(name, _unit(series.unit)), [digits(float(np.mean(values))) if values else None for values in levels]))
    columns += [column for rows in by_metric for column in _differences(comparison, section, rows)]
    title = section.title + (" in training lengths" if section.shape == "bins" else "")
    return Table(title, _unit(section.first.unit), tuple(columns))


def _mean_of(values: Sequence[float | None], unit: float = 1.0) -> str | None:
    """The mean of the values that are not None, in a unit, with four digits."""
    known = [value for value in values if value is not None]
    return four_digits(np.mean(known) / unit) if known else None


def _means(comparison: RunComparison, section: Section, rows: list[tuple[ArmRuns, Line]]) -> list[Filled]:
    """A column for each place, with intervals at points; the spread of a single number over several seeds has a column of its own."""
    series = section.example(rows[0][1].metric)
    unit, points, lengths = _unit(series.unit), section.shape == "points", section.seq_lens
    columns = {}
    for place, (start, _) in section.places.items():
        name = place + (f", {start / lengths[0]:g}x" if points and len(lengths) == 1 else "")
        name = name if points and len(section.metrics) == 1 else f"{series.metric} {name}".strip()
        columns[name] = [(section.interval(*of, place) if points else None) or digits(section.mean(*of, place)) for of in rows]
    over = covered(cell for cells in columns.values() for cell in cells if isinstance(cell, Interval))
    how = {"unit": _with_interval(unit, " or over ".join(over)), "kind": "mean", "decimals": 3 if series.unit == "fraction" else 4}
    means = [(Column(name, **how if over else {"unit": unit}), cells) for name, cells in columns.items()]
    if section.shape == "number" and series.samples and any(len(arm.runs) > 1 for arm in comparison.arms):
        values = [[each.mean_at("") for each in section.alike(*of, "")] for of in rows]
        means.append((Column("sd over seeds", unit), [digits(float(np.std(each, ddof=1))) if len(each) > 1 else None for each in values]))
    return means


def _differences(comparison: RunComparison, section: Section, rows: list[tuple[ArmRuns, Line]]) -> list[Filled]:
    """Differences to the baseline: a column for each place that they are at and each thing that their intervals cover."""
    metric, every = rows[0][1].metric, [each for each in comparison.differences if each.section is section]
    by_row = {(each.arm, each.line): each for each in every if each.line.metric == metric and each.interval}
    several, unit, base = len({each.line.metric for each in every}) > 1, _unit(section.example(metric).unit), comparison.arms[0].label
    columns = []
    for place in dict.fromkeys(each.place for each in by_row.values()):
        name = ", ".join(filter(None, (f"difference to {base}", metric if several else "", place)))
        here = [by_row.get((arm.label, line)) for arm, line in rows]
        intervals = [each.interval if each and each.place == place else None for each in here]
        columns += [(Column(name, _with_interval(unit, over), "difference"), _covering(over, intervals)) for over in covered(intervals)]
    return columns


def covered(intervals: Iterable[Interval | None]) -> list[str]:
    """The different things that intervals cover."""
    return list(dict.fromkeys(each.over for each in intervals if each))


def _covering(over: str, intervals: list[Interval | None]) -> list[Cell]:
    """The cells of a column that has only the intervals that cover `over`, with None in place of all others."""
    return [each if each and each.over == over else None for each in intervals]


def _unit(unit: str) -> str:
    """A unit as short as a heading needs it."""
    return unit.replace(" per ", "/")


def _with_interval(unit: str, over: str) -> str:
    """The heading's unit of numbers with a 95% interval over `over`."""
    return f"{unit}, 95% interval" + (f" over {over}" if over else "")


def difference_table(comparison: RunComparison) -> Table:
    """The differences to the baseline, each in the column of what its interval covers."""
    every, intervals = comparison.differences, [each.interval for each in comparison.differences]
    columns: list[Filled] = [(Column("arm", kind="label"), [each.arm for each in every])]
    columns.append((Column("of", kind="label"), [each.what for each in every]))
    for over in covered(intervals) or [""]:
        column = Column(f"mean [{_with_interval('', over).removeprefix(', ')}]", kind="difference")
        columns.append((column, _covering(over, intervals)))
    units = []
    for section, metric in dict.fromkeys((each.section, each.line.metric) for each in every):
        series = section.example(metric)
        unit = " as a fraction" if series.unit == "fraction" else f" in {_unit(series.unit)}" if series.unit else ""
        units.append(f"{metric}{unit}{f' ({BETTER[series.better]})' if BETTER[series.better] else ''}")
    return Table(f"Differences to {comparison.arms[0].label}", ", ".join(dict.fromkeys(units)), tuple(columns))


def print_comparison(comparison: RunComparison, console: Console | None = None) -> None:
    """Print the tables, the differences, the warning and what is missing."""
    tables = comparison_tables(comparison)
    if comparison.differences:  # they get a table of their own
        kept = [tuple(filled for filled in table.contents if filled[0].kind != "difference") for table in tables]
        tables = (*(replace(table, contents=each) for table, each in zip(tables, kept, strict=True)), difference_table(comparison))
    print_tables(*tables, notes=notes(comparison), console=console)


def notes(comparison: RunComparison) -> list[str]:
    """Notes on what differs besides the normalizer, how the differences were made, or why there are none, and on single runs."""
    lines = [comparison.warning] if comparison.warning else []
    of_text = any(series.samples and series.data_fingerprint for section in comparison.sections for series in section.series.values())
    lines += [REPORTING] if of_text else []
    for note in dict.fromkeys(difference.note for difference in comparison.differences):
        same = [difference for difference in comparison.differences if difference.note == note]
        whats: dict[tuple[str, ...], list[str]] = {}  # by the arms that have this note
        for what in dict.fromkeys(difference.what for difference in same):
            whats.setdefault(tuple(difference.arm for difference in same if difference.what == what), []).append(what)
        kind = "" if same[0].interval else "no "
        lines += [f"{kind}difference of {', '.join(arms)} in {'; '.join(which)}: {note}" for arms, which in whats.items()]
    return [*lines, *comparison.missing]


# ---------------------------------------------------------------- what a run took


def cost_table(arms: Sequence[ArmRuns], concurrent: Sequence[RunRecord], title: str = "What a run took") -> Table:
    """The costs of a run of each arm, mean over its runs; `concurrent`: all runs that may have been under way at the same time."""
    spans = {run.folder: _under_way(run) for run in concurrent}
    on_cpu = [str(run.used("device") or "cpu").startswith("cpu") for arm in arms for run in arm.runs]
    memory = "GiB, whole process" if all(on_cpu) else "GiB, whole process on a CPU" if any(on_cpu) else "GiB, tensors on the GPU"
    units = {
        "parameters": "M", "in the normalizer": "parameters", "tokens": "M a run", "training": "TFLOP a run", "training time": "s a run",
        "speed": "tokens/s", "peak memory": memory, "concurrent runs": "mean",
    }  # fmt: skip
    costs = [[*zip(*(_costs(run, spans) for run in arm.runs), strict=True)] for arm in arms]
    columns: list[Filled] = [
        (Column("arm", kind="label"), [arm.label for arm in arms]),
        (Column("runs"), [str(len(arm.runs)) for arm in arms]),
    ]
    for (name, unit), by_arm in zip(units.items(), zip(*costs, strict=True), strict=True):
        cells = [_mean_of(values) for values in by_arm]
        columns += [(Column(name, unit), cells)] if any(cells) else []
    devices = [", ".join(dict.fromkeys(show(run.used("device")) for run in arm.runs)) for arm in arms]
    return Table(title, "", (*columns, (Column("device", kind="words"), devices)))


def _costs(run: RunRecord, spans: Mapping[Path, Span | None]) -> tuple[float | None, ...]:
    """The costs of a run in the order and units of `cost_table`; None where the run folder does not say."""
    tokens, seconds, memory = run.tokens_seen, training_seconds(run.logged), peak_memory(run.logged)
    total, normalizer, flops = (run.measured(name) for name in ("parameters.total", "parameters.normalizer", "flops_per_token"))
    concurrent = None
    if mine := spans[run.folder]:  # how many other runs were under way at a time, on average over this one's
        others = [each for folder, each in spans.items() if each and folder != run.folder]
        shared = sum(max(0.0, (min(mine[1], stop) - max(mine[0], start)).total_seconds()) for start, stop in others)
        concurrent = shared / (mine[1] - mine[0]).total_seconds()
    return (
        total and total / 1e6,
        normalizer,
        tokens and tokens / 1e6,
        flops and tokens and flops * tokens / 1e12,
        seconds,
        tokens and seconds and tokens / seconds,
        memory and memory / 2**30,
        concurrent,
    )


def _under_way(run: RunRecord) -> Span | None:
    """Begin and end of the training of a run's last start; None if the run folder does not say."""
    begun = starts(run.environment)
    seconds = training_seconds(run.logged, begun[-1]["step"]) if begun else None
    if not seconds or not begun[-1].get("time"):
        return None
    first = datetime.fromisoformat(begun[-1]["time"])
    return first, first + timedelta(seconds=seconds)


# ---------------------------------------------------------------- what runs share and what differs


@dataclass(frozen=True)
class Fact:
    """Something that holds of all runs, or by arm: its value, and whether it is the same in all (None: a run doesn't say).

    It is a `condition` of a fair comparison, or says how runs were measured.
    """

    what: str
    same: bool | None
    value: str
    condition: bool = True


def run_facts(comparison: RunComparison) -> list[Fact]:
    """The settings of all runs and how they were measured: conditions of a fair comparison first."""
    arms, on = comparison.arms, {section.first.shown.measured_on: section for section in comparison.sections}

    def same(what: str, value: Callable[[RunRecord], object]) -> Fact:
        return Fact(what, *across(arms, value))

    def config(*prefixes: str) -> Callable[[RunRecord], str]:
        return lambda run: ", ".join(f"{key}={value}" for key, value in run.flat.items() if key.startswith(prefixes))

    def outside(run: RunRecord) -> int | None:
        total, normalizer = run.measured("parameters.total"), run.measured("parameters.normalizer")
        return None if total is None or normalizer is None else total - normalizer

    def steps(run: RunRecord) -> str:
        return f"{show(run.evaluations[0].step if run.evaluations else None)} / {show(run.flat.get('trainer.max_steps'))}"

    def parameters(run: RunRecord) -> str:
        return " / ".join(show(run.measured(f"parameters.{name}")) for name in ("total", "non_embedding", "normalizer"))

    def tasks(run: RunRecord) -> str | None:
        return "; ".join(_pairs(share) for share in run.config["data"].get("tasks") or []) or None

    same_code, code = across(arms, lambda run: run.commits)  # equal commits with uncommitted changes say nothing
    seeds = [tuple(seeds_shown(run.seeds) for run in arm.runs) for arm in arms]
    by_arm = "; ".join(f"{arm.label}: {', '.join(of_arm)}" for arm, of_arm in zip(arms, seeds, strict=True))
    unequal = [f"{printable(run.name)}: {'; '.join(what)}" for run in comparison.runs if (what := differing(run.environment))]
    settings = dict.fromkeys(line.setting for section in comparison.sections for line in section.lines if line.setting)
    conditions = [
        same("tokens seen", lambda run: run.tokens_seen),
        same("tokens in the weights started from", lambda run: run.tokens_before),
        *(same(f"tokens seen, {name}", section.tokens_seen) for name, section in list(on.items())[1:]),
        same("data fingerprint", lambda run: run.measured("data_fingerprint")),
        *(same(f"{name} (sha256)", section.sha256) for name, section in on.items()),
        same("tokens in a step", lambda run: run.flat.get("optim.batch_tokens")),
        same("steps", lambda run: run.flat.get("trainer.max_steps")),
        Fact("seeds", len(set(seeds)) == 1, by_arm if len(set(seeds)) > 1 else ", ".join(seeds[0])),
        same("learning rate and schedule", config("optim.lr", "optim.warmup_steps", "optim.schedule.")),
        same("parameters outside the normalizer", outside),
        same("precision", lambda run: run.used("precision")),
        same("device", lambda run: run.used("device")),
        Fact("what each start of a run used", not unequal, ". ".join(unequal) or "the same at every start"),
        Fact("code", None if same_code and "uncommitted" in code else same_code, code),
    ]
    others = [
        *(Fact(f"normalizer: {arm.label}", None, _normalizer(arm.runs[0])) for arm in arms),
        same("training length (tokens)", lambda run: run.flat["data.seq_len"]),
        *(same(name, partial(_amount, section)) for name, section in on.items()),
        Fact("inference settings", None, ", ".join(settings) or "none"),
        same("data", corpus),
        *([same("tasks", tasks)] if any(map(tasks, comparison.runs)) else []),
        same("steps: evaluated / planned", steps),
        same("parameters: total / non-embedding / normalizer", parameters),
        same("torch.compile", lambda run: run.used("compile")),
        same("versions", lambda run: _pairs(run.environment.get("versions"))),
    ]
    return conditions + [replace(each, condition=False) for each in others]


def facts_table(comparison: RunComparison) -> Table:
    """A row for each of the `run_facts`; of several arms whether the conditions of a fair comparison hold."""
    known, several = run_facts(comparison), len(comparison.arms) > 1
    same = [(Column("same in all runs", kind="label"), [SAME[each.same] if each.condition else "" for each in known])]
    what, value = Column("what", kind="label"), Column("value", kind="words")
    return Table(
        "Runs and environment", "", ((what, [each.what for each in known]), *same * several, (value, [each.value for each in known]))
    )


def configuration_table(comparison: RunComparison, without: Callable[[str], bool]) -> Table:
    """A row for each configuration key in which the arms differ, `without` some, and a column for each arm."""
    lines = [(key, values) for key, values in comparison.config_diff.items() if not without(key)]
    columns = [(Column("key", kind="label"), [key for key, _ in lines])]
    columns += [(Column(arm.label, kind="words"), [values[place] for _, values in lines]) for place, arm in enumerate(comparison.arms)]
    return Table("Configuration keys in which the arms differ", "", tuple(columns))


def _amount(section: Section, run: RunRecord) -> str | None:
    """How many and how long the sequences are that a run was measured on, task by task."""
    of = [(line.what, each.shown.amount) for (owner, line), each in section.series.items() if owner is run and each.shown.amount]
    return "; ".join(": ".join(filter(None, each)) for each in dict.fromkeys(of)) or None


def corpus(run: RunRecord) -> str | None:
    """Where the text or the tasks come from, and how much there is."""
    counts = {name: count for name, count in (run.environment.get("data") or {}).items() if name != "store"}  # a folder of one machine
    source = {} if run.symbolic else {"source": run.config["data"].get("source")}
    return _pairs({**source, **counts})


def _pairs(block: Plain) -> str | None:
    return ", ".join(f"{key} {show(value)}" for key, value in flatten(block).items()) if block else None


def _normalizer(run: RunRecord) -> str:
    """Formula, source, options and what n means for a run's normalizer, phase by phase."""
    phases = []
    for step, options in run.phases:
        entry, known, n = catalogue.ENTRIES.get(options["name"]), catalogue.read(options), str(options.get("n", ""))
        formula = (known.formula() if known else str(options["name"])) + (f" ({entry.source})" if entry else "")
        given = ", ".join(f"{key}={_option(value)}" for key, value in options.items() if key not in ("name", "n"))
        meaning = {"visible": "keys the query sees (its position + 1)", "sample": "length of the sequence or document"}
        counted = f"n = {meaning.get(n, n.removeprefix('fixed:') + ' for every query')}" if n else ""
        phases.append((f"from step {step}: " if step else "") + "; ".join(filter(None, (formula, given, counted))))
    return "; then ".join(phases)


def _option(value: Plain) -> str:
    """The value of an option as text; normalizers, as those of a pattern of layers, by their names with their options."""
    if isinstance(value, list):
        return ", ".join(map(_option, value))
    if not isinstance(value, dict):
        return show(value)
    options = ", ".join(f"{key}={_option(each)}" for key, each in value.items() if key != "name")
    return " ".join(filter(None, (str(value.get("name", "")), options and f"({options})")))
