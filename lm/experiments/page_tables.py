"""Tables and pictures of an experiment's verdicts and rates, and the final runs of a size on the part of the held-out text that reports."""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from lm.experiments.experiment import Experiment, Primary
from lm.experiments.judging import Judged
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import crossed_runs, differences_by_rate
from lm.report.comparison import ArmRuns, RunComparison, comparison_of
from lm.report.comparison_pictures import DrawnRun
from lm.report.pictures import Panel, Picture, Trace
from lm.report.tables import Cell, Column, Filled, Table, digits, print_tables, signed
from lm.runs.folder import CONFIG, ENVIRONMENT
from lm.runs.record import RunRecord
from lm.schema import Plain
from lm.statistics.intervals import Interval, over_seeds
from lm.statistics.tuning import Rate, coordinates, rate_words


class SizeResults:
    """The final runs of a size.

    Attributes:
        judged: the verdicts on the runs of all sizes.
        arm_names: the baseline first.
        verdicts: by arm, on all but the baseline.
        rates: of the arms; None while they are being tuned.
        final: the final runs that are known, by seed and arm.
        of: words after titles, such as `, small`.
    """

    def __init__(self, procedure: Procedure, size: str, judged: Judged):
        self.experiment, self.size, self.judged, self.of = procedure.experiment, size, judged, f", {size}" if size else ""
        self.arm_names = [arm.name for arm in procedure.experiment.arms]
        self.verdicts = {name: judged.verdicts[size, name] for name in self.arm_names[1:]}
        self.rates = procedure.rates(size)
        self.final: list[Run] = list(procedure.final(size))
        finished = [run for run in self.final if run.outcome.state == "finished"]
        self.values = {(run.arm, run.seed): procedure.quantity(run.outcome) for run in finished}

    @cached_property
    def begun(self) -> list[tuple[Run, RunRecord]]:
        """The final runs that have begun, finished, diverged or not, with their records."""
        folders = [(run, run.config.run_folder) for run in self.final]
        return [(run, run.outcome.record) for run, folder in folders if all((folder / name).is_file() for name in (CONFIG, ENVIRONMENT))]

    @property
    def drawn(self) -> list[DrawnRun]:
        """The runs that have begun, for pictures of training."""
        return [DrawnRun(run.arm, run.seed, run.outcome.state, record) for run, record in self.begun]

    @cached_property
    def comparison(self) -> RunComparison | None:
        """The arms that have finished runs, on the documents that are reported on; None if there are none."""
        by_arm = {name: [each.record for each in self.drawn if (each.arm, each.state) == (name, "finished")] for name in self.arm_names}
        arms = tuple(ArmRuns(name, tuple(record.reporting for record in records)) for name, records in by_arm.items() if records)
        return comparison_of(arms, tuple(self.arm_names)) if arms else None


# ---------------------------------------------------------------- tables


def summary_table(judged: Judged, lines: list[dict[str, Plain]]) -> Table:
    """A row for each size and arm, from the lines of `summary`."""
    question, verdicts = judged.question, [judged.verdicts.get((line["size"], line["arm"])) for line in lines]

    def column(name: str, cells: list[Cell], unit: str = "", kind: str = "number") -> list[Filled]:
        return [(Column(name, unit, kind), cells)] if any(cell is not None for cell in cells) else []

    primary, base = question.primary, question.arms[0]
    columns = column("size", [line["size"] or None for line in lines], kind="label")
    columns += column("arm", [line["arm"] for line in lines], kind="label")
    columns += column(question.key, [None if line["rate"] is None else rate_words(line["rate"]) for line in lines])
    columns += column("seeds", [f"{line['runs']} of {line['of']}" for line in lines])
    kind = "mean" if primary.reach is None else "geometric mean,"
    columns += column(f"{kind} {primary.quantity}", [_amount(primary, line["mean"]) for line in lines], question.measured_on)
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
    """Print the lines of `summary` as a table, and each verdict with its reason."""
    print_tables(replace(summary_table(judged, lines), title=title))
    for line in lines:
        if "verdict" in line:
            print(f"{' '.join(filter(None, (line['size'], line['arm'])))}: {line['words']}: {line['reason']}")


def seeds_table(results: SizeResults) -> Table:
    """The primary metric of every final run on the report text, and its differences to the baseline's run of the same seed."""
    primary, base, seeds, values = results.experiment.primary, results.arm_names[0], results.experiment.seeds, results.values
    states = {(run.arm, run.seed): run.outcome.state for run in results.final}
    columns: list[Filled] = [(Column("seed", kind="label"), list(map(str, seeds)))]
    for arm in results.arm_names:
        places = [(arm, seed) for seed in seeds]
        words = [_amount(primary, values[at]) if at in values else states.get(at, "no rate") for at in places]
        columns.append((Column(arm, primary.quantity), words))
    for arm in results.arm_names[1:]:
        both = [(values.get((arm, seed)), values.get((base, seed))) for seed in seeds]
        if primary.reach is None:
            cells = [None if None in pair else signed(pair[0] - pair[1]) for pair in both]
            columns.append((Column(f"{arm} - {base}", primary.metric), cells))
        else:
            ratios = [f"{pair[0] / pair[1]:.3g}" if all(map(_reached, pair)) else None for pair in both]
            columns.append((Column(f"{arm} / {base}", primary.quantity), ratios))
    return Table(f"Every seed{results.of}, on the report text", primary.quantity, tuple(columns))


def _reached(tokens: float | None) -> bool:
    """Whether `tokens` say when a run reached its level: not never, and not before its first evaluation."""
    return tokens is not None and 0 < tokens < math.inf


def _amount(primary: Primary, value: float | None) -> str | None:
    """The number by which a run is compared, in digits; tokens in whole numbers."""
    if primary.reach is None or value is None:
        return digits(value)
    return f"{value:,.0f}" if _reached(value) else "at the first evaluation" if value == 0 else "not reached"


def crossed_table(procedure: Procedure, size: str) -> Table | None:
    """The final seeds of arms that are trained at several rates, at each of them; None if there are none."""
    experiment, choice, base = procedure.experiment, procedure.choice(size), procedure.experiment.arms[0].name
    finished = {at: [each for each in some if each.outcome.state == "finished"] for at, some in crossed_runs(procedure, size).items()}
    if not finished:
        return None
    values = {at: {each.seed: procedure.quantity(each.outcome) for each in some} for at, some in finished.items()}

    def apart(arm: str, rate: Rate) -> Interval | None:
        theirs = values.get((base, rate), {}) if arm != base else {}
        both = [value - theirs[seed] for seed, value in values[arm, rate].items() if seed in theirs]
        return over_seeds(np.array(both)).interval() if len(both) > 1 else None

    def mean(some: Collection[float]) -> str | None:
        return digits(float(np.mean(list(some)))) if some else None

    used = {arm: {rates[0]: "chosen by tuning"} for arm, rates in choice.final.items()}
    for arm, rate in ((arm, rate) for arm, rate in choice.rates.items() if choice.settled and arm in used):
        used[arm][rate] = ", ".join(filter(None, (used[arm].get(rate), "judged")))
    chosen_by = [mean([procedure.choosing(run.outcome) for run in some]) for some in finished.values()]
    columns: list[Filled] = [
        (Column("arm", kind="label"), [arm for arm, _ in finished]),
        (Column(experiment.tune.heading), [rate_words(rate) for _, rate in finished]),
        (Column("use", kind="words"), [used[arm].get(rate) for arm, rate in finished]),
        (Column("seeds"), [f"{len(some)} of {len(experiment.seeds)}" for some in finished.values()]),
        (Column(f"mean {experiment.chosen_by}", "selection text"), chosen_by),
    ]
    if experiment.primary.reach is None:
        means = [mean(some.values()) for some in values.values()]
        columns.append((Column(f"mean {experiment.primary.quantity}", "report text"), means))
        over = "95% interval over seeds, not adjusted"
        columns.append((Column(f"difference to {base}, both at this rate", over, "difference"), [apart(*at) for at in finished]))
    return Table("Final seeds at the rates of both arms" + (f", {size}" if size else ""), "", tuple(columns))


# ---------------------------------------------------------------- pictures


def rates_picture(procedure: Procedure, size: str) -> Picture | None:
    """Selection loss of each tuning run by rate, and the differences with both arms at the same rate, two panels for each tuned key; None
    without tuning."""
    experiment, tried, primary = procedure.experiment, procedure.tried(size), procedure.experiment.primary
    if not any(experiment.choosing(each) is not None for each in tried):
        return None
    panels: list[Panel] = []
    for number, key in enumerate(experiment.tune.keys):
        ticks = {value: f"{value:g}" for value in sorted({coordinates(each.rate)[number] for each in tried})}
        first, second = _tuning_panel(procedure, size, number, ticks), _differences_panel(procedure, size, number, ticks)
        by = f", by {key}" if len(experiment.tune.keys) > 1 else ""
        panels += [replace(panel, title=f"{panel.title}{by}") for panel in (first, *([second] if any(map(_drawn, second.traces)) else []))]
    of_key = " of the best other values" if len(experiment.tune.keys) > 1 else ""
    caption = f"Left: dots are single tuning seeds, lines their means{of_key}, rings the rates that were chosen."
    if any(trace.kind == "diverged" for panel in panels for trace in panel.traces):
        caption += " Crosses at the top: a seed diverged there, and the rate is not chosen."
    caption += " Right: of the tuning seeds, once every tuning run has ended."
    small = 0.0 if primary.learned is not None else primary.matters
    caption += f" Shaded: differences below {small:g}." if small else ""
    return Picture(panels, [arm.name for arm in experiment.arms], caption)


def _drawn(trace: Trace) -> bool:
    return len(trace.x) > 0


def _tuning_panel(procedure: Procedure, size: str, number: int, ticks: dict[float, str]) -> Panel:
    """The tuning runs over the value of the tuned key of this number, with the means at the best values of the others."""
    experiment, tried, traces, rings = procedure.experiment, procedure.tried(size), [], []
    chosen, losses = {arm: rates[0] for arm, rates in procedure.choice(size).final.items()}, experiment.costs_of(tried, size)
    for index, arm in enumerate(each.name for each in experiment.arms):
        values = [(each.rate, value) for each in tried if each.arm == arm and (value := experiment.choosing(each)) is not None]
        values = [(coordinates(rate)[number], value) for rate, value in values]
        traces.append(_dots(index, f"{arm}, single seeds", [pair for pair in values if math.isfinite(pair[1])]))
        diverged = np.array([x for x, value in values if not math.isfinite(value)])
        traces += [Trace(index, f"{arm}, diverged", diverged, np.full(len(diverged), np.nan), "diverged")] if len(diverged) else []
        means: dict[float, list[float]] = {}
        for rate, some in sorted(losses.get(arm, {}).items()):
            if all(map(math.isfinite, some)):
                means.setdefault(coordinates(rate)[number], []).append(float(np.mean(some)))
        mean = {x: experiment.cost(min(some)) for x, some in means.items()}
        traces.append(Trace(index, f"{arm}, mean", np.array([*mean]), np.array([*mean.values()]), "mean"))
        x = coordinates(chosen[arm])[number] if arm in chosen else None
        rings += [(x, mean[x], index)] if x in mean else []
    label = f"{experiment.chosen_by}, selection text"
    return Panel("Tuning runs", experiment.tune.keys[number], label, traces, ticks, log=10, rings=rings)


def _differences_panel(procedure: Procedure, size: str, number: int, ticks: dict[float, str]) -> Panel:
    """Differences to the baseline at the same rate, over the value of the tuned key of this number."""
    experiment, primary, traces = procedure.experiment, procedure.experiment.primary, []
    base = experiment.arms[0].name
    for index, arm in enumerate(experiment.arms[1:], 1):
        by_value: dict[float, list[float]] = {}
        for rate, some in differences_by_rate(procedure, size, arm).items():
            by_value.setdefault(coordinates(rate)[number], []).extend(filter(math.isfinite, some))
        by_value = {x: np.expm1(some).tolist() if primary.reach is not None else some for x, some in by_value.items() if some}
        label, means = f"{arm.name} - {base}", np.array([np.mean(some) for some in by_value.values()])
        traces.append(_dots(index, f"{label}, single seeds", [(x, value) for x, some in by_value.items() for value in some]))
        traces.append(Trace(index, f"{label}, mean", np.array([*by_value]), means, "mean"))
    measured, small = _difference(experiment), primary.matters
    if primary.learned is not None:
        measured, small = "fraction of runs that have learned", 0.0
    title, label = f"Difference to {base}, both at the same rate", f"{measured}, selection text"
    return Panel(title, experiment.tune.keys[number], label, traces, ticks, log=10, zero=True, small=small)


def _dots(number: int, label: str, points: list[tuple[float, float]]) -> Trace:
    return Trace(number, label, *np.array(points).reshape(-1, 2).T, "dots")


def _difference(experiment: Experiment) -> str:
    """The label of an axis of differences."""
    primary = experiment.primary
    return primary.metric if primary.reach is None else f"relative difference of {primary.quantity}"


def differences_picture(procedure: Procedure, sizes: list[SizeResults]) -> Picture | None:
    """Differences to the baseline with their intervals: of each arm, or where there are several sizes by size."""
    experiment, several, traces = procedure.experiment, len(sizes) > 1, []
    names, small = sizes[0].arm_names, experiment.primary.matters
    places = [results.size for results in sizes] if several else names[1:]
    for results, (number, arm) in product(sizes, enumerate(names[1:], 1)):
        single, interval = np.array(results.judged.comparisons[results.size, arm].differences), results.verdicts[arm].interval
        ends = interval and np.array(interval.listed())
        if experiment.primary.reach is not None:
            single, ends = np.expm1(single), interval and ends - 1
        x = places.index(results.size if several else arm) + (0.16 * (number - len(names) / 2) if several else 0.0)
        label = ", ".join(filter(None, (results.size, arm)))
        traces += [_dots(number, f"{label}, single seeds", [(x, value) for value in single])] if len(single) else []
        traces += [_bar(number, label, x + 0.06, ends.tolist())] if interval and interval.bounded else []
    if not traces:
        return None
    title, label = f"Difference to {names[0]}" + (" by size" if several else ""), f"{_difference(experiment)}, report text"
    panel = Panel(title, "", label, traces, dict(enumerate(places)), zero=True, small=small)
    crossed = " and rates" if any(procedure.choice(results.size).crossed for results in sizes) else ""
    caption = f"Dots: single seeds. Bars: mean with its Student t interval over seeds{crossed}; all of them hold together with 95%."
    return Picture([panel], names, f"{caption} Shaded: differences below {small:g}.")


def _bar(number: int, label: str, x: float, interval: list[float]) -> Trace:
    y, low, high = (np.array([value]) for value in interval)
    return Trace(number, label, np.array([x]), y, "interval", low, high)


def learned_picture(sizes: list[SizeResults], lines: list[dict[str, Plain]]) -> Picture | None:
    """The primary metric of every final run with the level at which it has learned, and the fractions that have; None before any."""
    primary, places, single, fractions = sizes[0].experiment.primary, {}, [], []
    for results, (number, arm) in product(sizes, enumerate(sizes[0].arm_names)):
        x, label = float(len(places)), " ".join(filter(None, (arm, results.size)))
        places[x] = label
        values = [value for (name, _), value in results.values.items() if name == arm]
        single += [_dots(number, f"{label}, single seeds", [(x, value) for value in values])] if values else []
        (line,) = (line for line in lines if (line["size"], line["arm"]) == (results.size, arm))
        fractions += [_bar(number, label, x, line["fraction_learned"])] if line["ended"] else []
    if not single:
        return None
    panels = [
        Panel("Every seed", "", f"{primary.metric}, at the end", single, places, levels={primary.learned: "has learned"}),
        Panel("Fraction of runs that have learned", "", "fraction", fractions, places, y_range=(-0.03, 1.03)),
    ]
    caption = "Left: dots are single seeds. Right: bars are 95% Clopper-Pearson intervals; a run that diverged has not learned."
    return Picture(panels, sizes[0].arm_names, caption)
