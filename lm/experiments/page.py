"""The report page of one or several experiments: question and verdicts first, then the tables, pictures and facts
behind the verdicts.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from lm.config.tree import effect_of
from lm.experiments.experiment import Experiment
from lm.experiments.judging import Judgement
from lm.experiments.loop import failures
from lm.experiments.noise import experiment_noise
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.experiments.summary import (
    measured_words,
    summary_table,
    trend_table,
)
from lm.report.comparison import ArmComparison
from lm.report.comparison_pictures import LOSSES, DrawnRun
from lm.report.html import Answer, PagePart, PageSection, introduction, page_files, run_details, run_sections
from lm.report.pictures import Panel, Picture, Trace
from lm.report.tables import DIFFERENCE, Column, FilledColumn, Table, numeral, signed_text, with_unit
from lm.statistics.tuning import EXTENSIONS

MAX_NAMES = 8  # largest number of runs that a sentence names
BASIS_NOTE = (
    "All at the last step, on the report text. A mean is over the seeds that all arms have "
    "finished, a difference over all that its two arms have finished. The interval on other text of the kind covers "
    "seeds and documents together. It is never shorter than the interval over seeds, and is left out where all are "
    "equal."
)
CROSSED_RATES_NOTE = (
    "Tuning seeds are few: where they chose different rates, an arm's final seeds are trained at its own rate and at "
    "the baseline's, those of the baseline at all. An arm is judged at the best of its rates, by the metric that "
    "tuning goes by. It is better than the baseline only if it is so against it at each of these rates, worse only if "
    "it is so at each of its own against the baseline at one of the same, and the intervals of the summary cover which "
    "of the rates is an arm's best."
)


class SizeResults:
    """The results of one of an experiment's `sizes`: its tuning runs, its final runs, which are judged, and the
    verdicts.

    Attributes:
        verdicts: the verdict on each arm but the baseline, by name.
        final: the final runs that are known, ordered by seed and arm.
        values: the primary metric of each finished run, by arm and seed.
        title_suffix: words after titles, such as `, small`.
    """

    def __init__(self, procedure: Procedure, size: str, judgement: Judgement):
        self.procedure, self.experiment, self.size, self.judgement = procedure, procedure.experiment, size, judgement
        self.title_suffix = f", {size}" if size else ""
        self.tuning_runs = procedure.tuning_runs(size)
        self.choice = procedure.choice(size)
        self.arm_names = [arm.name for arm in procedure.experiment.arms]
        self.verdicts = {name: judgement.verdicts[size, name] for name in self.arm_names[1:]}
        self.final = procedure.final_runs(size)
        finished_runs = [run for run in self.final if run.outcome.state == "finished"]
        metric = self.experiment.primary.metric
        self.values = {(run.arm, run.seed): run.outcome.mean(metric, selection=False) for run in finished_runs}

    @cached_property
    def begun_runs(self) -> list[DrawnRun]:
        """The final runs that have begun, whether they have finished, diverged or neither."""
        states = [(run, run.outcome.state) for run in self.final if run.has_begun]
        return [
            DrawnRun(run.arm, run.seed, state, run.outcome.record, f"{run.label} ({state})") for run, state in states
        ]

    @cached_property
    def comparison(self) -> ArmComparison | None:
        """The comparison of the arms that have finished runs, on the held-out documents for reports (not those by which
        learning rates are chosen); None without finished runs."""
        finished_runs = [run for run in self.begun_runs if run.state == "finished"]
        arms = {
            name: [run.record for run in finished_runs if run.arm == name]
            for name in dict.fromkeys(run.arm for run in finished_runs)
        }
        arms = {name: arms[name] for name in self.arm_names if name in arms}
        return ArmComparison(tuple(self.arm_names), arms) if arms else None


# ---------------------------------------------------------------- the page


def experiment_files(
    procedures: list[Procedure], folder: Path, judgement: Judgement | None = None
) -> dict[Path, bytes]:
    """The content of each file of a report on experiments (the page, its tables and its pictures), by path in `folder`.
    With several experiments, the name of a table or picture file begins with the name of its experiment.

    judgement: the verdicts on a single procedure, if they are known already.

    Raises LMError: run folders can't be read or compared.
    """
    prefixes = [f"{procedure.experiment.name}-" if len(procedures) > 1 else "" for procedure in procedures]
    return page_files(
        [_page_part(procedure, prefix, judgement) for procedure, prefix in zip(procedures, prefixes, strict=True)],
        folder,
    )


def _page_part(procedure: Procedure, prefix: str, judgement: Judgement | None) -> PagePart:
    experiment, judgement = procedure.experiment, judgement or procedure.judgement()
    entries = judgement.entries()
    sizes = [SizeResults(procedure, size, judgement) for size in experiment.sizes]
    summary = PageSection("Summary")
    summary.add("note", f"Decides: {measured_words(procedure)}.")
    summary.add("note", _family_words(experiment))
    summary.add("note", (noise := experiment_noise(judgement)) and f"{noise[:1].upper()}{noise[1:]}.")
    summary.add("warning", _caveats(procedure, sizes))
    summary.add("table", summary_table(judgement, entries), f"{prefix}summary")
    summary.add("note", BASIS_NOTE if any(entry["runs"] for entry in entries) else None)
    summary.add("picture", differences_picture(sizes), f"{prefix}differences")
    summary.add("table", trend_table(procedure, judgement), f"{prefix}trends")
    for results in sizes:
        summary.add(
            "table",
            seeds_table(results) if results.final else None,
            f"{prefix}{results.size}{'-' * bool(results.size)}seeds",
        )
    sections, commands = [summary], PageSection("Commands")
    commands.add("code", experiment.command)
    for results in sizes:
        sections += _size_sections(results, f"{prefix}{results.size}-" if results.size else prefix)
        for run in results.begun_runs:
            commands.add("details", run_details(run))
    words = introduction([[run.record for run in results.begun_runs] for results in sizes])
    return PagePart(
        experiment.name, [*sections, commands], words, question(experiment), answers(sizes), _margin_words(experiment)
    )


def _size_sections(results: SizeResults, prefix: str) -> list[PageSection]:
    tuning, suffix = PageSection(f"Learning rates{results.title_suffix}"), results.title_suffix
    name = results.experiment.primary.metric
    titles = LOSSES if name == SELECTION else LOSSES | {name: (name, _quantity_label(results.experiment))}
    tuning.add("picture", rates_picture(results), f"{prefix}rates")
    tuning.add("note", _tuning_words(results))
    tuning.add("note", CROSSED_RATES_NOTE if results.choice.crossed else None)
    return run_sections(
        results.arm_names, results.begun_runs, results.comparison, prefix, suffix, titles, tuning, _is_name
    )


def _is_name(key: str) -> bool:
    """Whether a configuration key names a run or folder, or says what is logged, so that its values are not compared
    between arms.
    """
    return key in ("init_from", "branch_from") or effect_of(key).affects == "label"


# ---------------------------------------------------------------- words


def _join_names(names: list[str]) -> str:
    """Join names as `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def question(experiment: Experiment) -> str:
    """Phrase the question that the experiment asks about its arms and its baseline, by the primary metric."""
    baseline, *names = (arm.name for arm in experiment.arms)
    primary, subject = experiment.primary, f"{'Does' if len(names) == 1 else 'Do'} {_join_names(names)}"
    direction = f"({primary.better.capitalize()} is better.)"
    return f"{subject} change {primary.metric} by more than {primary.matters:g}, compared with {baseline}? {direction}"


def answers(sizes: list[SizeResults]) -> list[Answer]:
    """The verdict on each arm in each size, as cards for the page; all intervals are drawn on one scale."""
    verdicts = [(results, arm, verdict) for results in sizes for arm, verdict in results.verdicts.items()]
    primary, baseline = sizes[0].experiment.primary, sizes[0].arm_names[0]
    marks = [0.0, -primary.matters, primary.matters]
    bounded_intervals = [verdict.interval for *_, verdict in verdicts if verdict.interval and verdict.interval.bounded]
    ends = [value for interval in bounded_intervals for value in interval.as_list()] + marks
    lowest, width = min(ends), np.ptp(ends) or 1.0
    cards = []
    for results, arm, verdict in verdicts:
        name, effect = f"{arm}{results.title_suffix}", ()
        if results.choice.rates is None:
            cards.append(Answer(name, "no verdict yet", "Rates are being tuned."))
            continue
        if interval := verdict.interval:
            positions = (
                (4 + 92 * (np.array([*interval.as_list(), *marks]) - lowest) / width).round(2).tolist()
                if interval.bounded
                else None
            )
            mark_labels = tuple(f"{mark:+g}" if mark else "0" for mark in marks)
            # the words end with seeds
            noise_source = "" if interval.noise_source == f"{verdict.seeds} seeds" else interval.noise_source
            effect = (
                f"Difference to {baseline}",
                DIFFERENCE.text(interval.mean),
                DIFFERENCE.ends(interval),
                noise_source,
                positions,
                mark_labels,
            )
        tone = {"better": "good", "worse": "bad", "unstable": "bad", "not learned": "bad"}.get(verdict.kind, "")
        reason = "" if verdict.reason == verdict.open_reason else f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
        cards.append(Answer(name, verdict.words, reason, tone, *effect))
    return cards


def _margin_words(experiment: Experiment) -> str:
    """Explain the drawn intervals, and the shaded area of effects that do not matter."""
    intervals = "Dots and bars: effects with their intervals, which hold together."
    return f"{intervals} Shaded: differences below {experiment.primary.matters:g}, which do not matter."


def _family_words(experiment: Experiment) -> str:
    """Name the test that compares arms, and the comparisons for whose number p values and intervals are adjusted."""
    arms, sizes, primary = len(experiment.arms) - 1, len(experiment.sizes), experiment.primary
    test = "Student t intervals of paired differences over seeds"
    coverage = ": all intervals hold together with 95%, and each word follows from its interval"
    caveat = "They assume that seeds scatter alike to both sides: one-sided noise of one arm is not covered"
    caveat += ", but where no difference was found." if primary.better == "higher" else "."
    if arms * sizes == 1:
        return f"There is one comparison, by {test}. Nothing is adjusted. {caveat}"
    comparisons = (
        f"{arms * sizes} comparisons with {experiment.arms[0].name} ({arms} arms{f', {sizes} sizes' * (sizes > 1)})"
    )
    adjustment = f"p values and intervals are adjusted by their joint distribution{coverage}."
    return f"Family: {comparisons} on {primary.metric}, by {test}. {adjustment} {caveat}"


def _caveats(procedure: Procedure, sizes: list[SizeResults]) -> list[str]:
    """List what a reader must know beside the numbers: unfinished, diverged and failed runs, ongoing tuning, arms
    without a rate, notes.
    """
    experiment, caveats, infinite_caveats = procedure.experiment, [], []
    for results in sizes:
        prefix = f"{results.size}: " if results.size else ""
        values = results.tuning_runs[experiment.choice_metric]
        diverged = results.tuning_runs[np.isinf(values)][["arm", "rate", "seed"]].itertuples(index=False)
        if names := _join_names([f"{arm} at {rate:g} seed {seed}" for arm, rate, seed in diverged]):
            infinite_caveats.append(f"{prefix}tuning runs that diverged: {names}")
        if results.choice.rates is None:
            progress = f"{values.notna().sum()} of the {len(values)} tuning runs known so far have ended"
            final_words = (
                "arms that start from others have no final runs yet"
                if results.choice.crossed
                else "there are no final runs yet"
            )
            final_words = (
                final_words if results.choice.settled else "final runs at the rates of several arms have not all ended"
            )
            caveats.append(f"{prefix}tuning goes on: {progress}; {final_words}")
            continue
        if edge_names := _join_names([name for name in results.arm_names if name not in results.choice.rates]):
            reason = "the best is at an edge of a grid that may not grow again, or every rate diverged"
            caveats.append(f"{prefix}no rate for {edge_names}: {reason}")
        runs_by_state: dict[str, list[str]] = {}
        for run in results.final:
            runs_by_state.setdefault(run.outcome.state, []).append(f"{run.arm} seed {run.seed}")
        if unfinished_names := runs_by_state.get("unfinished"):
            names = f": {_join_names(unfinished_names)}" if len(unfinished_names) <= MAX_NAMES else ""
            caveats.append(f"{prefix}{len(unfinished_names)} of {len(results.final)} final runs have not ended{names}")
        if "diverged" in runs_by_state:
            caveats.append(f"{prefix}diverged, counted and in no mean: {_join_names(runs_by_state['diverged'])}")
    caveats += [
        *infinite_caveats,
        *(f"failed: {run.stage} run {run.label}: {failure}" for run, failure in failures(procedure)),
    ]
    return caveats + procedure.notes()


def _tuning_words(results: SizeResults) -> str | None:
    """Explain how rates were chosen, and name the chosen rates; None without tuning runs, or before rates are
    chosen.
    """
    experiment, tuning_runs, choice = results.experiment, results.tuning_runs, results.choice
    if not len(tuning_runs) or not choice.rates_of_final_runs:
        return None
    tune, extension = experiment.tune, f"a best rate at an edge extends the grid, at most {EXTENSIONS} times"
    seeds = ", ".join(map(str, sorted({*tuning_runs["seed"]})))
    rates = ", ".join(f"{rate:g}" for rate in sorted({*tuning_runs["rate"]}))
    origin = f"from {tune.table}" if tune.table else f"planned: {', '.join(map('{:g}'.format, tune.grid))}; {extension}"
    extremum = "lowest" if experiment.cost(1.0) > 0 else "highest"
    choices = ", ".join(f"{arm} {arm_rates[0]:g}" for arm, arm_rates in choice.rates_of_final_runs.items())
    metric = f"{experiment.choice_metric} ({experiment.data_words(experiment.choice_metric, 'selection')})"
    return (
        f"{tune.key} was chosen for each arm by the {extremum} mean {metric} over seeds {seeds} at {rates} "
        f"({origin}): {choices}."
    )


# ---------------------------------------------------------------- tables


def seeds_table(results: SizeResults) -> Table:
    """A table of the primary metric of every final run, and of its difference to the baseline's run of the same
    seed.
    """
    metric = results.experiment.primary.metric
    baseline = results.arm_names[0]
    seeds = results.experiment.seeds
    values = results.values
    states = {(run.arm, run.seed): run.outcome.state for run in results.final}
    columns: list[FilledColumn] = [(Column("seed", kind="label"), list(map(str, seeds)))]
    for arm in results.arm_names:
        arm_seeds = [(arm, seed) for seed in seeds]
        words = [
            numeral(values[arm_seed]) if arm_seed in values else states.get(arm_seed, "no rate")
            for arm_seed in arm_seeds
        ]
        columns.append((Column(arm, metric), words))
    for arm in results.arm_names[1:]:
        value_pairs = [(values.get((arm, seed)), values.get((baseline, seed))) for seed in seeds]
        cells = [None if None in pair else signed_text(pair[0] - pair[1]) for pair in value_pairs]
        columns.append((Column(f"{arm} - {baseline}", metric), cells))
    basis = results.experiment.data_words(metric, "report")
    return Table(f"Every seed{results.title_suffix} ({basis})", metric, tuple(columns))


# ---------------------------------------------------------------- pictures


def rates_picture(results: SizeResults) -> Picture | None:
    """A picture of the values of tuning runs by rate, in the metric by which rates are chosen; None before a tuning run
    has ended.
    """
    experiment, metric, tuning_runs = results.experiment, results.experiment.choice_metric, results.tuning_runs
    if tuning_runs[metric].isna().all():
        return None
    chosen_rates = {arm: rates[0] for arm, rates in results.choice.rates_of_final_runs.items()}
    traces = []
    for index, name in enumerate(results.arm_names):
        runs = tuning_runs[tuning_runs["arm"] == name]
        values, is_diverged = runs[["rate", metric]].to_numpy(), np.isinf(runs[metric])
        traces.append(_dots(index, f"{name}, single seeds", values[np.isfinite(runs[metric])]))
        if is_diverged.any():
            crosses = runs["rate"][is_diverged].to_numpy()
            traces.append(Trace(index, f"{name}, diverged", crosses, np.full(len(crosses), np.nan), "diverged"))
        means = runs.groupby("rate")[metric].mean()
        means = means[np.isfinite(means)]
        traces.append(Trace(index, f"{name}, mean", means.index.to_numpy(), means.to_numpy(), "mean"))
        if (rate := chosen_rates.get(name)) in means:
            traces.append(Trace(index, f"{name}, chosen", np.array([rate]), np.array([means[rate]]), "chosen"))
    label = "validation loss (nats per token)" if metric == SELECTION else _quantity_label(experiment)
    name = "learning rate" if experiment.tune.key == "optim.lr" else experiment.tune.key.rpartition(".")[2]
    panel = Panel(
        "Tuning runs",
        f"{name.replace('_', ' ')} ({experiment.tune.key})",
        f"{label}, {experiment.data_words(metric, 'selection')}",
        traces,
        {rate: f"{rate:g}" for rate in sorted({*tuning_runs["rate"]})},
        log=10,
    )
    caption = "Tuning runs: dots are single seeds, lines their means, rings the rates that were chosen."
    if np.isinf(tuning_runs[metric]).any():
        caption += " Crosses at the top: a seed diverged there, and the rate is not chosen."
    return Picture([panel], results.arm_names, caption)


def _dots(arm_index: int, label: str, points: Sequence[tuple[float, float]]) -> Trace:
    return Trace(arm_index, label, *np.array(points).reshape(-1, 2).T, "dots")


def _quantity_label(experiment: Experiment) -> str:
    """The primary metric in words."""
    return with_unit(experiment.metric.quantity.rpartition("/")[2].replace("_", " "), experiment.metric.unit)


def differences_picture(sizes: list[SizeResults]) -> Picture | None:
    """A picture of differences to the baseline with their intervals, by arm, or by size if there are several sizes;
    None without runs.
    """
    experiment, by_size, traces = sizes[0].experiment, len(sizes) > 1, []
    names, margin = sizes[0].arm_names, experiment.primary.matters
    x_labels = [results.size for results in sizes] if by_size else names[1:]
    for results, (arm_index, arm) in product(sizes, enumerate(names[1:], 1)):
        differences = np.array(results.judgement.comparisons[results.size, arm].differences)
        interval = results.verdicts[arm].interval
        ends = interval and np.array(interval.as_list())
        x = x_labels.index(results.size if by_size else arm) + (0.16 * (arm_index - len(names) / 2) if by_size else 0.0)
        label = ", ".join(filter(None, (results.size, arm)))
        traces += (
            [_dots(arm_index, f"{label}, single seeds", [(x, value) for value in differences])]
            if len(differences)
            else []
        )
        traces += [_bar(arm_index, label, x + 0.06, ends.tolist())] if interval and interval.bounded else []
    if not traces:
        return None
    title = f"Difference to {names[0]}" + (" by size" if by_size else "")
    label = f"{_quantity_label(experiment)}, {experiment.data_words(experiment.primary.metric, 'report')}"
    panel = Panel(title, "", label, traces, dict(enumerate(x_labels)), zero_line=True, margin=margin)
    rates_part = " and rates" if any(results.choice.crossed for results in sizes) else ""
    caption = (
        f"Dots: single seeds. Bars: mean with its Student t interval over seeds{rates_part}; all of them hold "
        "together with 95%."
    )
    return Picture([panel], names, f"{caption} Shaded: differences below {margin:g}.")


def _bar(arm_index: int, label: str, x: float, interval: list[float]) -> Trace:
    y, low, high = (np.array([value]) for value in interval)
    return Trace(arm_index, label, np.array([x]), y, "interval", low, high)
