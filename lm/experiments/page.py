"""One page of one or several experiments: question and verdict first, then all that they rest on, in tables, pictures and words."""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from lm.config.tree import effect_of
from lm.experiments.engine import failures
from lm.experiments.experiment import Experiment
from lm.experiments.judging import Judged
from lm.experiments.procedure import Procedure, Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.summary import amount, differences_by_rate, has_reached, summary_lines, summary_table, trend_table, trends
from lm.files import write_together
from lm.report.comparison import ArmRuns, RunComparison, comparison_of
from lm.report.comparison_pictures import LOSSES, DrawnRun, by_layer, curves
from lm.report.html import PAGE, Answer, PagePart, PageSection, page_files, run_details, run_sections
from lm.report.pictures import Panel, Picture, Trace
from lm.report.tables import DIFFERENCE, Column, Filled, Table, digits, signed
from lm.runs.folder import CONFIG, ENVIRONMENT
from lm.schema import Plain
from lm.statistics.intervals import Interval, over_seeds
from lm.statistics.tuning import EXTENSIONS, Rate, coordinates, rate_words

FACTOR = Column("factor", kind="mean", decimals=2)
BASIS = (
    "All at the last step, on the held-out documents that report. A mean is over an arm's finished runs, a difference over the seeds of "
    "which both runs have finished. The interval on other text of the kind, where there is one, covers seeds and documents together."
)
CROSSED = (
    "Tuning seeds are few: where they chose different rates, an arm's final seeds are trained at its own rate and at the baseline's, those "
    "of the baseline at all. An arm is judged at the one of lowest mean loss on the selection text. It is better than the baseline only if "
    "it is so against it at each of these rates, worse only if it is so at each of its own against the baseline at one of the same, and "
    "the intervals of the summary cover which of the rates is an arm's best."
)


class SizeResults:
    """The final runs of a size.

    Attributes:
        judged: the verdicts on the runs of all sizes.
        tried: the tuning runs.
        choice: the rates of the arms, as far as they are known.
        arm_names: the baseline first.
        verdicts: by arm, on all but the baseline.
        final: the final runs that are known, by seed and arm.
        of: words after titles, such as `, small`.
    """

    def __init__(self, procedure: Procedure, size: str, judged: Judged):
        self.procedure, self.experiment, self.size, self.judged = procedure, procedure.experiment, size, judged
        self.of, self.tried, self.choice = f", {size}" if size else "", procedure.tried(size), procedure.choice(size)
        self.arm_names = [arm.name for arm in procedure.experiment.arms]
        self.verdicts = {name: judged.verdicts[size, name] for name in self.arm_names[1:]}
        self.final: list[Run] = list(procedure.final(size))
        finished = [run for run in self.final if run.outcome.state == "finished"]
        self.values = {(run.arm, run.seed): procedure.quantity(run.outcome) for run in finished}

    @cached_property
    def begun(self) -> list[DrawnRun]:
        """The final runs that have begun, finished, diverged or not."""
        runs = [run for run in self.final if all((run.config.run_folder / name).is_file() for name in (CONFIG, ENVIRONMENT))]
        states = [(run, run.outcome.state) for run in runs]
        return [DrawnRun(run.arm, run.seed, state, run.outcome.record, f"{run.label} ({state})") for run, state in states]

    @cached_property
    def comparison(self) -> RunComparison | None:
        """The arms that have finished runs, on the documents that are reported on; None if there are none."""
        finished = [run for run in self.begun if run.state == "finished"]
        by_arm = {name: tuple(run.record.reporting for run in finished if run.arm == name) for name in self.arm_names}
        arms = tuple(ArmRuns(name, records) for name, records in by_arm.items() if records)
        return comparison_of(arms, tuple(self.arm_names)) if arms else None


# ---------------------------------------------------------------- the page


def write_page(procedures: list[Procedure], out: Path) -> Path:
    """Write the page of experiments and its files into the folder `out`, all of them or none. Returns the page.

    Raises:
        LMError: run folders that can't be read or compared, or `out` can't be written.
    """
    write_together(experiment_files(procedures, out), "the report")
    return out / PAGE


def experiment_files(procedures: list[Procedure], out: Path, judged: Judged | None = None) -> dict[Path, bytes]:
    """The page of experiments and each of its tables and pictures, as files in the folder `out`; where there are several experiments, names
    of files begin with the experiment's. `judged`: the verdicts on the one procedure, if they are known already.

    Raises:
        LMError: run folders that can't be read or compared.
    """
    return page_files([_part(each, f"{each.experiment.name}-" if len(procedures) > 1 else "", judged) for each in procedures], out)


def _part(procedure: Procedure, prefix: str, judged: Judged | None) -> PagePart:
    experiment, judged = procedure.experiment, judged or procedure.judged()
    lines, sizes = summary_lines(procedure, judged), [SizeResults(procedure, size, judged) for size in experiment.sizes]
    first = PageSection("Summary")
    first.add("note", _family(experiment))
    first.add("warning", _lost(procedure, sizes))
    first.add("table", summary_table(judged, lines), f"{prefix}summary")
    first.add("note", BASIS if any(line["runs"] for line in lines) else None)
    if experiment.primary.learned is None:
        first.add("picture", differences_picture(sizes), f"{prefix}differences")
    else:
        first.add("picture", learned_picture(sizes, lines), f"{prefix}learned")
    over_sizes = trend_table(judged, trends(procedure, judged))
    first.add("table", over_sizes, f"{prefix}trends")
    for each in sizes:
        first.add("table", seeds_table(each) if each.final else None, f"{prefix}{each.size}{'-' * bool(each.size)}seeds")
    sections, commands = [first], PageSection("Commands")
    commands.add("code", experiment.command)
    for each in sizes:
        sections += _of_size(each, f"{prefix}{each.size}-" if each.size else prefix)
        for run in each.begun:
            commands.add("details", run_details(run))
    shown = [section for section in (*sections, commands) if section.blocks]
    return PagePart(experiment.name, shown, question(experiment), answers(sizes), _margin(experiment))


def _of_size(results: SizeResults, prefix: str) -> list[PageSection]:
    training, tuning = PageSection(f"While training{results.of}"), PageSection(f"Learning rates{results.of}")
    primary, comparison = results.experiment.primary.metric, results.comparison
    titles = LOSSES | ({} if primary == SELECTION else {primary: primary})
    training.add("picture", curves(results.arm_names, results.begun, titles, comparison), f"{prefix}curves")
    for name, picture in by_layer(results.arm_names, results.begun).items():
        training.add("picture", picture, f"{prefix}{name}")
    tuning.add("picture", rates_picture(results), f"{prefix}rates")
    tuning.add("table", crossed_table(results), f"{prefix}final-rates")
    tuning.add("note", _tuning(results))
    tuning.add("note", CROSSED if results.choice.crossed else None)
    if comparison is None:
        return [training, tuning]
    return [training, tuning, *run_sections(comparison, [run.record for run in results.begun], prefix, results.of, _is_label)]


def _is_label(key: str) -> bool:
    """Whether a key names a run, a folder or what is logged: no difference between arms."""
    return key in ("init_from", "branch_from") or effect_of(key).affects == "label"


# ---------------------------------------------------------------- words


def _joined(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def question(experiment: Experiment) -> str:
    """The question of the experiment, as its file settled it before any run."""
    base, *others = (arm.name for arm in experiment.arms)
    primary, does = experiment.primary, f"{'Does' if len(others) == 1 else 'Do'} {_joined(others)}"
    if primary.learned is not None:
        reaches = f"{primary.metric} is {primary.learned:g} or {'less' if primary.better == 'lower' else 'more'} at its end"
        return f"{does} learn more or less often than {base}? (A run has learned if {reaches}.)"
    if primary.reach is not None:
        value = f"{primary.metric} {primary.reach:g}"
        return f"{does} take fewer or more tokens to reach {value} than {base}, by more than a factor of {1 + primary.matters:g}?"
    return (
        f"{does} change {primary.metric} by more than {primary.matters:g}, compared with {base}? ({primary.better.capitalize()} is better.)"
    )


def answers(sizes: list[SizeResults]) -> list[Answer]:
    """The verdict on each arm and size, their intervals on one scale."""
    verdicts = [(results, arm, verdict) for results in sizes for arm, verdict in results.verdicts.items()]
    primary, base = sizes[0].experiment.primary, sizes[0].arm_names[0]
    matters, reach = primary.matters or 0.0, primary.reach is not None
    scale, marks = (np.log, [1.0, 1 / (1 + matters), 1 + matters]) if reach else (np.asarray, [0.0, -matters, matters])
    column, what = (FACTOR, f"Factor: tokens, of those of {base}") if reach else (DIFFERENCE, f"Difference to {base}")
    bounded = [verdict.interval for *_, verdict in verdicts if verdict.interval and verdict.interval.bounded]
    ends = scale([value for interval in bounded for value in interval.listed()] + marks)
    low, width = ends.min(), np.ptp(ends) or 1.0
    cards = []
    for results, arm, verdict in verdicts:
        name, effect = f"{arm}{results.of}", ()
        if results.choice.rates is None:
            cards.append(Answer(name, "no verdict yet", "Rates are being tuned."))
            continue
        if interval := verdict.interval:
            places = (4 + 92 * (scale([*interval.listed(), *marks]) - low) / width).round(2).tolist() if interval.bounded else None
            below = tuple(f"{mark:.3g}" if reach else f"{mark:+g}" if mark else "0" for mark in marks)
            over = "" if interval.over == f"{verdict.seeds} seeds" else interval.over  # the words end with them
            effect = what, column.text(interval.mean), column.ends(interval), over, places, below
        tone = {"better": "good", "worse": "bad", "unstable": "bad"}.get(verdict.kind, "")
        because = "" if verdict.reason == verdict.open else f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
        cards.append(Answer(name, verdict.words, because, tone, *effect))
    return cards


def _margin(experiment: Experiment) -> str:
    """Words for what is shaded where intervals are drawn."""
    matters, reach = experiment.primary.matters or 0.0, experiment.primary.reach is not None
    shaded = f"factors of less than {1 + matters:g}" if reach else f"differences below {matters:g}"
    scale = ", on a logarithmic scale" if reach else ""
    return f"Dots and bars: effects with their intervals{scale}. Shaded: {shaded}, which do not matter."


def _family(experiment: Experiment) -> str:
    """How arms are compared, and which comparisons were adjusted for each other."""
    arms, sizes, primary = len(experiment.arms) - 1, len(experiment.sizes), experiment.primary
    differences = "differences" if primary.reach is None else "differences of log tokens"
    test = f"Student t intervals of paired {differences} over seeds"
    together = ": all intervals hold together with 95%, and each word follows from its interval"
    if primary.learned is not None:
        test, together = "Fisher's exact test of the numbers of runs that have learned", ""
    looks = " Two looks were planned, and each has half of the 5%." if experiment.looks == 2 else ""
    if arms * sizes == 1:
        return f"There is one comparison, by {test}." + (looks or " Nothing is adjusted.")
    of = f"{arms * sizes} comparisons with {experiment.arms[0].name} ({arms} arms{f', {sizes} sizes' * (sizes > 1)})"
    adjusted = f"p values and intervals are adjusted for their number{together}."
    return f"Family: {of} on {primary.quantity}, by {test}. {adjusted}{looks}"


def _lost(procedure: Procedure, sizes: list[SizeResults]) -> list[str]:
    """Facts to be known beside the numbers: unfinished and diverged runs, arms without a rate, notes."""
    experiment, lines, infinite = procedure.experiment, [], []
    for each in sizes:
        of, values = f"{each.size}: " if each.size else "", [(run, experiment.choosing(run)) for run in each.tried]
        for what, diverged in (("diverged", True), (f"did not reach {experiment.chosen_by.removeprefix('tokens to ')}", False)):
            lost = [run for run, value in values if value == math.inf and run.diverged == diverged]
            if names := _joined([f"{run.arm} at {rate_words(run.rate)} seed {run.seed}" for run in lost]):
                infinite.append(f"{of}tuning runs that {what}: {names}")
        if each.choice.rates is None:
            ended = sum(value is not None for _, value in values)
            so_far = f"{ended} of the {len(values)} tuning runs known so far have ended"
            final = "arms that start from others have no final runs yet" if each.choice.crossed else "there are no final runs yet"
            final = final if each.choice.settled else "final runs at the rates of several arms have not all ended"
            lines.append(f"{of}tuning goes on: {so_far}; {final}")
            continue
        if at_edge := _joined([name for name in each.arm_names if name not in each.choice.rates]):
            why = "the best is at an edge of a grid that may not grow again, or every rate diverged"
            lines.append(f"{of}no rate for {at_edge}: {why}")
        by_state: dict[str, list[str]] = {}
        for run in each.final:
            by_state.setdefault(run.outcome.state, []).append(f"{run.arm} seed {run.seed}")
        if unfinished := by_state.get("unfinished"):
            lines.append(f"{of}{len(unfinished)} of {len(each.final)} final runs have not ended: {_joined(unfinished)}")
        if "diverged" in by_state:
            lines.append(f"{of}diverged, counted and in no mean: {_joined(by_state['diverged'])}")
    lines += [*infinite, *(f"failed: {run.stage} run {run.label}: {failure}" for run, failure in failures(procedure))]
    return lines + procedure.notes()


def _tuning(results: SizeResults) -> str | None:
    """How rates were chosen, and which; None without tuning, and before its end."""
    experiment, tried, choice = results.experiment, results.tried, results.choice
    if not tried or not choice.final:
        return None
    tune, grows = experiment.tune, f"a best rate at an edge extends the grid, at most {EXTENSIONS} times"
    seeds = ", ".join(map(str, sorted({run.seed for run in tried})))
    rates = ", ".join(map(rate_words, sorted({run.rate for run in tried})))
    origin = f"from {tune.table}" if tune.table else f"planned: {', '.join(map(rate_words, tune.rates))}; {grows}"
    best = "lowest" if experiment.cost(1.0) > 0 else "highest"
    return (
        f"{tune.heading} was chosen for each arm by the {best} mean {experiment.chosen_by} on the selection text over seeds {seeds} "
        f"at {rates} ({origin}): {', '.join(f'{arm} {rate_words(some[0])}' for arm, some in choice.final.items())}."
    )


# ---------------------------------------------------------------- tables


def seeds_table(results: SizeResults) -> Table:
    """The primary metric of every final run on the report text, and its differences to the baseline's run of the same seed."""
    primary, base, seeds, values = results.experiment.primary, results.arm_names[0], results.experiment.seeds, results.values
    states = {(run.arm, run.seed): run.outcome.state for run in results.final}
    columns: list[Filled] = [(Column("seed", kind="label"), list(map(str, seeds)))]
    for arm in results.arm_names:
        places = [(arm, seed) for seed in seeds]
        words = [amount(primary, values[at]) if at in values else states.get(at, "no rate") for at in places]
        columns.append((Column(arm, primary.quantity), words))
    for arm in results.arm_names[1:]:
        both = [(values.get((arm, seed)), values.get((base, seed))) for seed in seeds]
        if primary.reach is None:
            cells = [None if None in pair else signed(pair[0] - pair[1]) for pair in both]
            columns.append((Column(f"{arm} - {base}", primary.metric), cells))
        else:
            ratios = [f"{pair[0] / pair[1]:.3g}" if all(map(has_reached, pair)) else None for pair in both]
            columns.append((Column(f"{arm} / {base}", primary.quantity), ratios))
    return Table(f"Every seed{results.of}, on the report text", primary.quantity, tuple(columns))


def crossed_table(results: SizeResults) -> Table | None:
    """The final seeds of arms that are trained at several rates, at each of them; None if there are none."""
    experiment, procedure, choice, base = results.experiment, results.procedure, results.choice, results.arm_names[0]
    finished: dict[tuple[str, Rate], list[Run]] = {}
    for run in procedure.crossed(results.size):
        finished.setdefault((run.arm, run.rate), []).extend([run] if run.outcome.state == "finished" else [])
    if not finished:
        return None
    values = {at: {each.seed: procedure.quantity(each.outcome) for each in runs} for at, runs in finished.items()}

    def apart(arm: str, rate: Rate) -> Interval | None:
        theirs = values.get((base, rate), {}) if arm != base else {}
        both = [value - theirs[seed] for seed, value in values[arm, rate].items() if seed in theirs]
        return over_seeds(np.array(both)).interval() if len(both) > 1 else None

    def mean(numbers: Collection[float]) -> str | None:
        return digits(float(np.mean([*numbers]))) if numbers else None

    used = {arm: {rates[0]: "chosen by tuning"} for arm, rates in choice.final.items()}
    for arm, rate in (choice.rates or {}).items() if choice.settled else ():
        if arm in used:
            used[arm][rate] = ", ".join(filter(None, (used[arm].get(rate), "judged")))
    chosen_by = [mean([procedure.choosing(run.outcome) for run in runs]) for runs in finished.values()]
    columns: list[Filled] = [
        (Column("arm", kind="label"), [arm for arm, _ in finished]),
        (Column(experiment.tune.heading), [rate_words(rate) for _, rate in finished]),
        (Column("use", kind="words"), [used[arm].get(rate) for arm, rate in finished]),
        (Column("seeds"), [f"{len(runs)} of {len(experiment.seeds)}" for runs in finished.values()]),
        (Column(f"mean {experiment.chosen_by}", "selection text"), chosen_by),
    ]
    if experiment.primary.reach is None:
        means = [mean(by_seed.values()) for by_seed in values.values()]
        columns.append((Column(f"mean {experiment.primary.quantity}", "report text"), means))
        over = "95% interval over seeds, not adjusted"
        columns.append((Column(f"difference to {base}, both at this rate", over, "difference"), [apart(*at) for at in finished]))
    return Table(f"Final seeds at the rates of both arms{results.of}", "", tuple(columns))


# ---------------------------------------------------------------- pictures


def rates_picture(results: SizeResults) -> Picture | None:
    """Selection loss of each tuning run by rate, and the differences with both arms at the same rate, two panels for each tuned key; None
    without tuning."""
    experiment, tried, primary = results.experiment, results.tried, results.experiment.primary
    if not any(experiment.choosing(each) is not None for each in tried):
        return None
    panels: list[Panel] = []
    for number, key in enumerate(experiment.tune.keys):
        ticks = {value: f"{value:g}" for value in sorted({coordinates(each.rate)[number] for each in tried})}
        first, second = _tuning_panel(results, number, ticks), _differences_panel(results, number, ticks)
        by = f", by {key}" if len(experiment.tune.keys) > 1 else ""
        panels += [replace(panel, title=f"{panel.title}{by}") for panel in (first, *([second] if any(map(_drawn, second.traces)) else []))]
    of_key = " of the best other values" if len(experiment.tune.keys) > 1 else ""
    caption = f"Left: dots are single tuning seeds, lines their means{of_key}, rings the rates that were chosen."
    if any(trace.kind == "diverged" for panel in panels for trace in panel.traces):
        unreached = ", or did not reach the value" if primary.reach is not None and experiment.chosen_by != SELECTION else ""
        caption += f" Crosses at the top: a seed diverged there{unreached}, and the rate is not chosen."
    caption += " Right: of the tuning seeds, once every tuning run has ended."
    small = 0.0 if primary.learned is not None else primary.matters
    caption += f" Shaded: differences below {small:g}." if small else ""
    return Picture(panels, [arm.name for arm in experiment.arms], caption)


def _drawn(trace: Trace) -> bool:
    return len(trace.x) > 0


def _tuning_panel(results: SizeResults, number: int, ticks: dict[float, str]) -> Panel:
    """The tuning runs over the value of the tuned key of this number, with the means at the best values of the others."""
    experiment, tried, traces, rings = results.experiment, results.tried, [], []
    chosen, losses = {arm: rates[0] for arm, rates in results.choice.final.items()}, experiment.costs_of(tried, results.size)
    for index, arm in enumerate(each.name for each in experiment.arms):
        values = [(each.rate, value) for each in tried if each.arm == arm and (value := experiment.choosing(each)) is not None]
        values = [(coordinates(rate)[number], value) for rate, value in values]
        traces.append(_dots(index, f"{arm}, single seeds", [pair for pair in values if math.isfinite(pair[1])]))
        diverged = np.array([x for x, value in values if not math.isfinite(value)])
        traces += [Trace(index, f"{arm}, diverged", diverged, np.full(len(diverged), np.nan), "diverged")] if len(diverged) else []
        means: dict[float, list[float]] = {}
        for rate, costs in sorted(losses.get(arm, {}).items()):
            if all(map(math.isfinite, costs)):
                means.setdefault(coordinates(rate)[number], []).append(float(np.mean(costs)))
        mean = {x: experiment.cost(min(costs)) for x, costs in means.items()}
        traces.append(Trace(index, f"{arm}, mean", np.array([*mean]), np.array([*mean.values()]), "mean"))
        x = coordinates(chosen[arm])[number] if arm in chosen else None
        rings += [(x, mean[x], index)] if x in mean else []
    label = f"{experiment.chosen_by}, selection text"
    return Panel("Tuning runs", experiment.tune.keys[number], label, traces, ticks, log=10, rings=rings)


def _differences_panel(results: SizeResults, number: int, ticks: dict[float, str]) -> Panel:
    """Differences to the baseline at the same rate, over the value of the tuned key of this number."""
    experiment, primary, base, traces = results.experiment, results.experiment.primary, results.arm_names[0], []
    for index, arm in enumerate(experiment.arms[1:], 1):
        by_value: dict[float, list[float]] = {}
        for rate, differences in differences_by_rate(results.procedure, results.size, arm).items():
            by_value.setdefault(coordinates(rate)[number], []).extend(filter(math.isfinite, differences))
        by_value = {x: np.expm1(values).tolist() if primary.reach is not None else values for x, values in by_value.items() if values}
        label, means = f"{arm.name} - {base}", np.array([np.mean(values) for values in by_value.values()])
        traces.append(_dots(index, f"{label}, single seeds", [(x, value) for x, values in by_value.items() for value in values]))
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


def differences_picture(sizes: list[SizeResults]) -> Picture | None:
    """Differences to the baseline with their intervals: of each arm, or where there are several sizes by size."""
    experiment, several, traces = sizes[0].experiment, len(sizes) > 1, []
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
    crossed = " and rates" if any(results.choice.crossed for results in sizes) else ""
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
