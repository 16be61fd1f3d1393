"""One page of one or several experiments: question and verdict first, then all that they rest on, in tables, pictures and words."""

from pathlib import Path

import numpy as np

from lm.config.tree import effect_of
from lm.data.tokenizer import load_tokenizer
from lm.experiments import page_tables
from lm.experiments.engine import read_failure
from lm.experiments.experiment import Experiment
from lm.experiments.experiment_folder import noise
from lm.experiments.judging import Judged
from lm.experiments.page_tables import SizeResults
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.experiments.summary import summary_lines
from lm.files import write_together
from lm.report.comparison_pictures import LOSSES, by_layer, curves
from lm.report.comparison_tables import architecture, corpus, measuring_methods, models, training_methods
from lm.report.html import PAGE, Answer, PagePart, PageSection, ShownEffect, page_files, run_details, run_sections
from lm.report.tables import DIFFERENCE, Column, show
from lm.runs.evaluations import selects
from lm.runs.folder import TOKENIZER
from lm.statistics.intervals import ALPHA
from lm.statistics.tuning import EXTENSIONS, rate_words

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
    first.add("table", page_tables.summary_table(judged, lines), f"{prefix}summary")
    first.add("note", BASIS if any(line["runs"] for line in lines) else None)
    if experiment.primary.learned is None:
        first.add("picture", page_tables.differences_picture(procedure, sizes), f"{prefix}differences")
    else:
        first.add("picture", page_tables.learned_picture(sizes, lines), f"{prefix}learned")
    for each in sizes:
        first.add("table", page_tables.seeds_table(each) if each.final else None, f"{prefix}{each.size}{'-' * bool(each.size)}seeds")
    sections, commands = [first], PageSection("Commands")
    commands.add("code", experiment.command)
    for each in sizes:
        sections += _of_size(procedure, each, f"{prefix}{each.size}-" if each.size else prefix)
        for run, record in each.begun:
            commands.add("details", run_details(record, f"{run.label} ({run.outcome.state})"))
    shown = [section for section in (*sections, commands) if section.blocks]
    return PagePart(experiment.name, shown, question(experiment), answers(sizes), _margin(experiment))


def _of_size(procedure: Procedure, results: SizeResults, prefix: str) -> list[PageSection]:
    training, tuning = PageSection(f"While training{results.of}"), PageSection(f"Learning rates{results.of}")
    primary, comparison = results.experiment.primary.metric, results.comparison
    titles = LOSSES | ({} if primary == SELECTION else {primary: primary})
    training.add("picture", curves(results.arm_names, results.drawn, titles, comparison), f"{prefix}curves")
    for name, picture in by_layer(results.arm_names, results.drawn).items():
        training.add("picture", picture, f"{prefix}{name}")
    tuning.add("picture", page_tables.rates_picture(procedure, results.size), f"{prefix}rates")
    tuning.add("table", page_tables.crossed_table(procedure, results.size), f"{prefix}final-rates")
    tuning.add("note", CROSSED if procedure.choice(results.size).crossed else None)
    if comparison is None:
        return [training, tuning]
    begun, words = [record for _, record in results.begun], _methods(procedure, results)
    return [training, tuning, *run_sections(comparison, begun, words, prefix, results.of, _is_label)]


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
        name, effect = f"{arm}{results.of}", None
        if results.rates is None:
            cards.append(Answer(name, "no verdict yet", "Rates are being tuned."))
            continue
        if interval := verdict.interval:
            places = (4 + 92 * (scale([*interval.listed(), *marks]) - low) / width).round(2).tolist() if interval.bounded else None
            below = tuple(f"{mark:.3g}" if reach else f"{mark:+g}" if mark else "0" for mark in marks)
            effect = ShownEffect(what, column.text(interval.mean), column.ends(interval), interval.over, places, below)
        tone = {"better": "good", "worse": "bad", "unstable": "bad"}.get(verdict.kind, "")
        because = "" if verdict.reason == verdict.open else f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
        cards.append(Answer(name, verdict.words, because, tone, effect))
    return cards


def _margin(experiment: Experiment) -> str:
    """Words for what is shaded where intervals are drawn."""
    matters, reach = experiment.primary.matters or 0.0, experiment.primary.reach is not None
    shaded = f"factors of less than {1 + matters:g}" if reach else f"differences below {matters:g}"
    scale = ", on a logarithmic scale" if reach else ""
    return f"Dots and bars: effects with their intervals{scale}. Shaded: {shaded}, which do not matter."


def _family(experiment: Experiment) -> str:
    """Which comparisons were adjusted for each other."""
    arms, sizes = len(experiment.arms) - 1, len(experiment.sizes)
    looks = " Two looks were planned, and each has half of the 5%." if experiment.looks == 2 else ""
    if arms * sizes == 1:
        return "There is one comparison." + (looks or " Nothing is adjusted.")
    of = f"{arms * sizes} comparisons with {experiment.arms[0].name} ({arms} arms{f', {sizes} sizes' * (sizes > 1)})"
    together = ": all intervals hold together with 95%, and each word follows from its interval"
    together = "" if experiment.primary.learned is not None else together
    return f"Family: {of} on {experiment.primary.quantity}. p values and intervals are adjusted for their number{together}.{looks}"


def _lost(procedure: Procedure, sizes: list[SizeResults]) -> list[str]:
    """Facts to be known beside the numbers: unfinished and diverged runs, arms without a rate, notes."""
    experiment, lines, infinite = procedure.experiment, [], []
    for each in sizes:
        of, tried = f"{each.size}: " if each.size else "", procedure.tried(each.size)
        values = [(run, experiment.choosing(run)) for run in tried]
        if diverged := _joined([f"{run.arm} at {rate_words(run.rate)} seed {run.seed}" for run, value in values if value == float("inf")]):
            infinite.append(f"{of}tuning runs that diverged: {diverged}")
        if each.rates is None:
            ended = sum(value is not None for _, value in values)
            so_far = f"{ended} of the {len(tried)} tuning runs known so far have ended"
            lines.append(f"{of}tuning goes on: {so_far}; there are no final runs yet")
            continue
        if at_edge := _joined([name for name in each.arm_names if name not in each.rates]):
            why = "the best is at an edge of a grid that may not grow again, or every rate diverged"
            lines.append(f"{of}no rate for {at_edge}: {why}")
        by_state: dict[str, list[str]] = {}
        for run in each.final:
            by_state.setdefault(run.outcome.state, []).append(f"{run.arm} seed {run.seed}")
        if unfinished := by_state.get("unfinished"):
            lines.append(f"{of}{len(unfinished)} of {len(each.final)} final runs have not ended: {_joined(unfinished)}")
        if "diverged" in by_state:
            lines.append(f"{of}diverged, counted and in no mean: {_joined(by_state['diverged'])}")
    failures = [(run, failure) for run in procedure.known() if (failure := read_failure(experiment.folder, run))]
    lines += [*infinite, *(f"failed: {run.stage} run {run.label}: {failure}" for run, failure in failures)]
    return lines + procedure.notes() + noise(procedure, sizes[0].judged)


def _methods(procedure: Procedure, results: SizeResults) -> str:
    """A paragraph for a paper on one size: models, corpus, training, held-out text, tuning, tests."""
    comparison, primary = results.comparison, procedure.experiment.primary
    run, record = next((run, record) for run, record in results.begun if run.outcome.state == "finished")
    tokenizer, file, vocabulary = record.config["data"].get("tokenizer"), run.config.run_folder / TOKENIZER, ""
    if isinstance(tokenizer, dict):
        options = [f"{key} {show(value)}" for key, value in tokenizer.items() if key != "name" and value not in ([], None)]
        tokenizer = ", ".join([show(tokenizer.get("name")), *options])
    if file.is_file():
        vocabulary = f" (vocabulary of {load_tokenizer(file, run.config.data.tokenizer.end_of_text).get_vocab_size():,})"
    arms = _joined(results.arm_names)
    text = [f"We trained {models(comparison)}: {arms} (the configuration keys in which they differ are listed above)."]
    text += [architecture(comparison), f"Data: {corpus(record)}; tokenizer: {show(tokenizer)}{vocabulary}.", training_methods(comparison)]
    if values := run.outcome.values(SELECTION):
        labels, what = np.unique(values.groups), "sequences of tasks" if run.config.data.symbolic else "documents"
        chosen = selects(values.fingerprint, labels).sum()
        parts = f"{chosen} select (learning rates) and {len(labels) - chosen} report"
        text.append(f"Of {len(labels)} held-out {what}, {parts}, by a hash of the document.")
    text += [_tuning(procedure, results.size), measuring_methods(comparison)]
    words = f"The primary metric, {primary.metric}, was settled in the experiment's file, with "
    test, of = "Student t intervals of paired differences over seeds", "over arms, sizes and looks (Bonferroni)"
    hold = f"which hold together with {1 - ALPHA:.0%} {of}"
    if primary.reach is not None:
        words += f"the value whose tokens are compared, {primary.reach:g}, and the smallest ratio of interest, {1 + primary.matters:g}. "
        words += "The tokens at which a run first reached it are interpolated between evaluations, linearly in their logarithm."
        test = test.replace("differences", "differences of log tokens")
    elif primary.learned is None:
        words += f"the smallest difference of interest, {primary.matters:g}."
    else:
        words += f"the level at which a run has learned, {primary.learned:g}."
        test = "Fisher's exact test of the numbers of runs that have learned, with Clopper-Pearson intervals of their fractions"
        hold = f"p times the number of comparisons and looks at most {ALPHA:g}"
    words += f" Final runs used seeds {', '.join(map(str, procedure.experiment.seeds))}, the same for every arm."
    return " ".join([*text, f"{words} Arms are compared with {results.arm_names[0]} by {test}, {hold}."])


def _tuning(procedure: Procedure, size: str) -> str:
    experiment, tried, choice = procedure.experiment, procedure.tried(size), procedure.choice(size)
    if not tried:
        return "Nothing was tuned: arms are as the experiment's file gives them."
    tune, grows = experiment.tune, f"a best rate at an edge extends the grid, at most {EXTENSIONS} times"
    seeds, rates = (
        ", ".join(map(str, sorted({run.seed for run in tried}))),
        ", ".join(map(rate_words, sorted({run.rate for run in tried}))),
    )
    origin = f"from {tune.table}" if tune.table else f"planned: {', '.join(map(rate_words, tune.rates))}; {grows}"
    best = "lowest" if experiment.cost(1.0) > 0 else "highest"
    how = f"{tune.heading} was chosen for each arm by the {best} mean {experiment.chosen_by} on the selection text over seeds {seeds} "
    how += f"at {rates} ({origin}): {', '.join(f'{arm} {rate_words(some[0])}' for arm, some in choice.final.items())}."
    if choice.crossed:
        judged = ", ".join(f"{arm} at {rate_words(rate)}" for arm, rate in (choice.rates or {}).items())
        how += " Where rates differed, an arm's final seeds were trained at its own and at the baseline's, those of the baseline at all; "
        how += (
            f"each arm is judged at the one of the best mean on the selection text ({judged}), and p is that of both at their best rates."
        )
    return how
