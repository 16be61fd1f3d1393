"""The tables of a comparison: a row for each task, inference setting and arm; the differences; and the notes below them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from rich.console import Console

from lm.report.comparison import RunComparison
from lm.report.sections import Arm, Line, Section
from lm.report.tables import Cell, Column, Filled, Table, digits, four_digits, print_tables
from lm.statistics.intervals import Interval


def comparison_tables(comparison: RunComparison) -> tuple[Table, ...]:
    """One for each section: a row for each task, inference setting and arm, a column for each metric and place."""
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
            known = [[number for run in arm.runs if (number := value(run)) is not None] for arm, _ in rows]
            columns.append((Column(name, "M"), [four_digits(np.mean(some) / 1e6) if some else None for some in known]))
    several = any(len(arm.runs) > 1 for arm in comparison.arms)
    columns += [column for rows in by_metric for column in _means(section, rows, several)]
    columns += [column for rows in by_metric for column in _references(section, rows)] if single else []
    columns += [column for rows in by_metric for column in _differences(comparison, section, rows)]
    title = section.title + (" in training lengths" if section.shape == "bins" else "")
    return Table(title, _unit(section.first.unit), tuple(columns), _summary(section, rows))


def _summary(section: Section, rows: list[tuple[Arm, Line]]) -> str:
    """Rows of numbers at points, each arm's at the last point, the best first, under the first inference setting; empty of others."""
    if section.shape != "points" or len(section.places) < 2:
        return ""
    (_, first), place, series = rows[0], list(section.places)[-1], section.first
    same = [(arm, section.mean(arm, line, place)) for arm, line in rows if (line.what, line.setting) == (first.what, first.setting)]
    known = [(arm.label, value) for arm, value in same if value is not None and np.isfinite(value)]
    if series.better != "none":
        known.sort(key=lambda arm: arm[1], reverse=series.better == "higher")
    which = f" ({series.better} is better)" if series.better != "none" else ""
    of = ", ".join(filter(None, (f"{series.axis.before} {place} {series.axis.unit}".strip(), *first.of)))
    said = ", ".join(f"{label} {digits(value)}" for label, value in known)
    return f"{series.metric[:1].upper()}{series.metric[1:]} {of}: {said}{which}." if known else ""


def _means(section: Section, rows: list[tuple[Arm, Line]], several: bool) -> list[Filled]:
    """A column for each place, with intervals at points; the spread of a single number over `several` seeds has a column of its own."""
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
    if several and section.shape == "number" and series.samples:
        values = [[each.mean_at("") for each in section.alike(*of, "")] for of in rows]
        means.append((Column("sd over seeds", unit), [digits(float(np.std(some, ddof=1))) if len(some) > 1 else None for some in values]))
    return means


def _references(section: Section, rows: list[tuple[Arm, Line]]) -> list[Filled]:
    """The levels that a single number is to be compared with, each a mean over the runs."""
    series, columns = section.example(rows[0][1].metric), []
    for name in series.references:
        levels = [[each.references[name] for each in section.alike(*of, "") if name in each.references] for of in rows]
        columns.append((Column(name, _unit(series.unit)), [digits(float(np.mean(some))) if some else None for some in levels]))
    return columns


def _differences(comparison: RunComparison, section: Section, rows: list[tuple[Arm, Line]]) -> list[Filled]:
    """Differences to the baseline: a column for each place that they are at and each thing that their intervals cover."""
    metric, every = rows[0][1].metric, [each for each in comparison.differences if each.section is section]
    by_row = {(each.arm, each.line): each for each in every if each.line.metric == metric and each.interval}
    several, unit, base = len({each.line.metric for each in every}) > 1, _unit(section.example(metric).unit), comparison.arms[0].label
    columns = []
    for place in dict.fromkeys(each.place for each in by_row.values()):
        name = ", ".join(filter(None, (f"difference to {base}", metric if several else "", place)))
        here = [by_row.get((arm.label, line)) for arm, line in rows]
        intervals = [each.interval if each and each.place == place else None for each in here]
        columns += [(Column(name, _with_interval(unit, over), "difference"), _of_cover(over, intervals)) for over in covered(intervals)]
    return columns


def covered(intervals: Iterable[Interval | None]) -> list[str]:
    """The different things that intervals cover."""
    return list(dict.fromkeys(each.over for each in intervals if each))


def _of_cover(over: str, intervals: list[Interval | None]) -> list[Cell]:
    """The intervals that cover it: the cells of its column."""
    return [each if each and each.over == over else None for each in intervals]


def _unit(unit: str) -> str:
    """In the little room of a heading."""
    return unit.replace(" per ", "/")


def _with_interval(unit: str, over: str) -> str:
    """The unit of numbers that have an interval."""
    return f"{unit}, 95% interval" + (f" over {over}" if over else "")


def print_comparison(comparison: RunComparison, console: Console | None = None) -> None:
    """Print the tables, the differences, the warning and what is missing."""
    tables = comparison_tables(comparison)
    if comparison.differences:  # they get a table of their own
        tables = tuple(
            replace(table, contents=tuple(filled for filled in table.contents if filled[0].kind != "difference")) for table in tables
        )
        tables += (_difference_table(comparison),)
    print_tables(*tables, notes=notes(comparison), console=console)


def _difference_table(comparison: RunComparison) -> Table:
    """Each difference in the column of what its interval covers."""
    every, intervals = comparison.differences, [each.interval for each in comparison.differences]
    columns: list[Filled] = [(Column("arm", kind="label"), [each.arm for each in every])]
    columns.append((Column("of", kind="label"), [each.what for each in every]))
    for over in covered(intervals) or [""]:
        column = Column(f"mean [{_with_interval('', over).removeprefix(', ')}]", kind="difference")
        columns.append((column, _of_cover(over, intervals)))
    units = dict.fromkeys(f"{metric}{in_unit(_unit(unit))}" for metric, unit, _ in differing(comparison))
    return Table(f"Differences to {comparison.arms[0].label}", ", ".join(units), tuple(columns))


def differing(comparison: RunComparison) -> list[tuple[str, str, str]]:
    """Metric, unit and which way is better of what has differences."""
    of = dict.fromkeys((each.section, each.line.metric) for each in comparison.differences)
    return [(metric, section.example(metric).unit, section.example(metric).better) for section, metric in of]


def in_unit(unit: str) -> str:
    """Words after what a number is of, with a space before them; none of a number without a unit."""
    return f" as a {unit}" if unit == "fraction" else f" in {unit}" if unit else ""


def notes(comparison: RunComparison) -> list[str]:
    """Notes on what differs besides the normalizer, how the differences were made, or why there are none, and what the runs lack."""
    lines = [comparison.warning] if comparison.warning else []
    for note in dict.fromkeys(difference.note for difference in comparison.differences):
        same = [difference for difference in comparison.differences if difference.note == note]
        whats: dict[tuple[str, ...], list[str]] = {}  # by the arms that have this note
        for what in dict.fromkeys(difference.what for difference in same):
            whats.setdefault(tuple(difference.arm for difference in same if difference.what == what), []).append(what)
        kind = "" if same[0].interval else "no "
        lines += [f"{kind}difference of {', '.join(arms)} in {'; '.join(which)}: {note}" for arms, which in whats.items()]
    return lines + [f"missing: {lack}" for lack in comparison.missing]
