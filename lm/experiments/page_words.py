"""Words of an experiment's page: the question, the verdicts, what was lost, and how it was done."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from lm.data.tokenizer import load_tokenizer
from lm.experiments.engine import read_failure
from lm.experiments.equal_arms import noise
from lm.experiments.experiment import Experiment
from lm.experiments.page_tables import SizeResults
from lm.experiments.procedure import Procedure, Run
from lm.experiments.run_outcome import SELECTION
from lm.report.comparison import show
from lm.report.descriptions import architecture, corpus, measuring_methods, models, training_methods
from lm.report.html import Answer, Effect
from lm.report.tables import DIFFERENCE, Column
from lm.runs.folder import TOKENIZER
from lm.runs.series import selects
from lm.schema import Plain
from lm.statistics.intervals import ALPHA, Interval
from lm.statistics.tuning import EXTENSIONS
from lm.statistics.verdicts import Verdict

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
COST = (
    "Means over the finished final runs. Training time is that of the steps, without evaluations. Speeds can be compared only on one "
    "device and with as many other runs beside: how many final runs of this experiment were under way at a time is known from their "
    "starts, what else the machine did is not. FLOPs are computed, not measured."
)


def joined(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def question(experiment: Experiment) -> str:
    """The question of the experiment, as its file settled it before any run."""
    base, *others = (arm.name for arm in experiment.arms)
    primary, does = experiment.primary, f"{'Does' if len(others) == 1 else 'Do'} {joined(others)}"
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
    primary = sizes[0].experiment.primary
    matters, scale = primary.matters or 0.0, np.asarray if primary.reach is None else np.log
    marks = [0.0, -matters, matters] if primary.reach is None else [1.0, 1 / (1 + matters), 1 + matters]
    bounded = [verdict.interval for *_, verdict in verdicts if verdict.interval and verdict.interval.bounded]
    ends = scale([value for interval in bounded for value in interval.listed()] + marks)
    low, width = ends.min(), np.ptp(ends) or 1.0

    def place(interval: Interval) -> tuple[float, ...]:
        return tuple((8 + 184 * (scale([*interval.listed(), *marks]) - low) / width).round(1).tolist())

    return [_answer(results, arm, verdict, place) for results, arm, verdict in verdicts]


def margin(experiment: Experiment) -> str:
    """Words for what is shaded where intervals are drawn."""
    matters, reach = experiment.primary.matters or 0.0, experiment.primary.reach is not None
    shaded = f"factors of less than {1 + matters:g}" if reach else f"differences below {matters:g}"
    scale = ", on a logarithmic scale" if reach else ""
    return f"Dots and bars: effects with their intervals{scale}. Shaded: {shaded}, which do not matter."


def _answer(results: SizeResults, arm: str, verdict: Verdict, place: Callable[[Interval], tuple[float, ...]]) -> Answer:
    name, base = ", ".join(filter(None, (arm, results.size))), results.arm_names[0]
    if results.rates is None:
        return Answer(name, "no verdict yet", "Rates are being tuned.")
    because, effect = f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.", None
    if interval := verdict.interval:
        reach = results.experiment.primary.reach is not None
        column, what = (FACTOR, f"Factor: tokens, of those of {base}") if reach else (DIFFERENCE, f"Difference to {base}")
        effect = Effect(
            what, column.text(interval.mean), column.ends(interval), interval.over, place(interval) if interval.bounded else None
        )
    tone = {"better": "good", "worse": "bad", "unstable": "bad"}.get(verdict.kind, "")
    return Answer(name, verdict.words, because, tone, effect)


def family(experiment: Experiment) -> str:
    """Which comparisons were adjusted for each other."""
    count = (len(experiment.arms) - 1) * len(experiment.sizes)
    if count == 1:
        return "There is one comparison." + (_looks(experiment) or " Nothing is adjusted.")
    sizes = f", {len(experiment.sizes)} sizes" if len(experiment.sizes) > 1 else ""
    of = f"{count} comparisons with {experiment.arms[0].name} ({len(experiment.arms) - 1} arms{sizes}) on {experiment.primary.quantity}"
    together = (
        "" if experiment.primary.learned is not None else ": all intervals hold together with 95%, and each word follows from its interval"
    )
    return f"Family: {of}. p values and intervals are adjusted for their number{together}.{_looks(experiment)}"


def _looks(experiment: Experiment) -> str:
    return " Two looks were planned, and each has half of the 5%." if experiment.looks == 2 else ""


def lost(procedure: Procedure, sizes: list[SizeResults]) -> list[str]:
    """Facts to be known beside the numbers: unfinished and diverged runs, arms without a rate, notes."""
    experiment, lines = procedure.experiment, []
    for each in sizes:
        of = f"{each.size}: " if each.size else ""
        if each.rates is None:
            tried = procedure.tried(each.size)
            ended = sum(experiment.choosing(each) is not None for each in tried)
            lines.append(
                f"{of}tuning goes on: {ended} of the {len(tried)} tuning runs known so far have ended; there are no final runs yet"
            )
            continue
        at_edge = [name for name in each.arm_names if name not in each.rates]
        if at_edge:
            lines.append(
                f"{of}no rate for {joined(at_edge)}: the best is at an edge of a grid that may not grow again, or every rate diverged"
            )
        states = Counter(run.outcome.state for run in each.final)
        if states["unfinished"]:
            lines.append(f"{of}{states['unfinished']} of {len(each.final)} final runs have not ended: {_named(each.final, 'unfinished')}")
        if states["diverged"]:
            lines.append(f"{of}diverged, counted and in no mean: {_named(each.final, 'diverged')}")
    for size in experiment.sizes:
        infinite = [each for each in procedure.tried(size) if procedure.experiment.choosing(each) == float("inf")]
        named = joined([f"{each.arm} at {each.rate:g} seed {each.seed}" for each in infinite])
        lines += [f"{f'{size}: ' if size else ''}tuning runs that diverged: {named}"] if infinite else []
    for run in procedure.known():
        if failure := read_failure(experiment.folder, run):
            lines.append(f"failed: {run.stage} run {run.label}: {failure}")
    return lines + procedure.notes() + noise(procedure, sizes[0].judged)


def _named(runs: list[Run], state: str) -> str:
    return joined([f"{run.arm} seed {run.seed}" for run in runs if run.outcome.state == state])


def methods(procedure: Procedure, results: SizeResults) -> str:
    """A paragraph for a paper on one size: models, corpus, training, held-out text, tuning, tests."""
    experiment, comparison = procedure.experiment, results.comparison
    run, record = results.finished[0]
    named = joined(results.arm_names)
    text = [f"We trained {models(comparison)}: {named} (the configuration keys in which they differ are listed above)."]
    text.append(architecture(comparison))
    text.append(f"Data: {corpus(record)}; tokenizer: {_options(record.config['data'].get('tokenizer'))}{_vocabulary(run)}.")
    text.append(training_methods(comparison))
    text.append(_held_out(run))
    text.append(_tuning(procedure, results.size))
    text.append(measuring_methods(comparison))
    text.append(_tests(experiment))
    return " ".join(filter(None, text))


def _tests(experiment: Experiment) -> str:
    primary, base = experiment.primary, experiment.arms[0].name
    text = f"The primary metric, {primary.metric}, was settled in the experiment's file, with "
    test = "Student t intervals of paired differences over seeds"
    if primary.reach is not None:
        text += f"the value whose tokens are compared, {primary.reach:g}, and the smallest ratio of interest, {1 + primary.matters:g}. "
        text += "The tokens at which a run first reached it are interpolated between evaluations, linearly in their logarithm."
        test = test.replace("differences", "differences of log tokens")
    elif primary.learned is None:
        text += f"the smallest difference of interest, {primary.matters:g}."
    else:
        text += f"the level at which a run has learned, {primary.learned:g}."
        test = "Fisher's exact test of the numbers of runs that have learned, with Clopper-Pearson intervals of their fractions"
    text += f" Final runs used seeds {', '.join(map(str, experiment.seeds))}, the same for every arm."
    family = f"which hold together with {1 - ALPHA:.0%} over arms, sizes and looks (Bonferroni)"
    if primary.learned is not None:
        family = f"p times the number of comparisons and looks at most {ALPHA:g}"
    return f"{text} Arms are compared with {base} by {test}, {family}."


def _options(block: Plain) -> str:
    if not isinstance(block, dict):
        return show(block)
    return ", ".join(
        [show(block.get("name")), *(f"{key} {show(value)}" for key, value in block.items() if key != "name" and value not in ([], None))]
    )


def _vocabulary(run: Run) -> str:
    path = run.config.run_folder / TOKENIZER
    if not path.is_file():
        return ""
    return f" (vocabulary of {load_tokenizer(path, run.config.data.tokenizer.end_of_text).get_vocab_size():,})"


def _held_out(run: Run) -> str:
    values = run.outcome.values(SELECTION)
    if values is None:
        return ""
    labels = np.unique(values.groups)
    chosen = selects(values.identity[0], labels).sum()
    what = "sequences of tasks" if run.config.data.symbolic else "documents"
    return (
        f"Of {len(labels)} held-out {what}, {chosen} select (learning rates) and {len(labels) - chosen} report, by a hash of the document."
    )


def _tuning(procedure: Procedure, size: str) -> str:
    experiment, tried = procedure.experiment, procedure.tried(size)
    tune, choice = experiment.tune, procedure.choice(size)
    if not tried:
        return "Nothing was tuned: arms are as the experiment's file gives them."
    seeds, rates = sorted({each.seed for each in tried}), sorted({each.rate for each in tried})
    best = "lowest" if experiment.cost(1.0) > 0 else "highest"
    how = f"{tune.key} was chosen for each arm by the {best} mean {experiment.chosen_by} on the selection text "
    how += f"over seeds {', '.join(map(str, seeds))}"
    how += f" at {', '.join(f'{rate:g}' for rate in rates)}"
    grows = f"a best rate at an edge extends the grid, at most {EXTENSIONS} times"
    how += f" (from {tune.table})" if tune.table else f" (planned: {', '.join(f'{rate:g}' for rate in tune.grid)}; {grows})"
    how = f"{how}: {', '.join(f'{arm} {some[0]:g}' for arm, some in choice.final.items())}."
    if choice.crossed:
        judged = ", ".join(f"{arm} at {rate:g}" for arm, rate in (choice.rates or {}).items())
        how += " Where rates differed, an arm's final seeds were trained at its own and at the baseline's, those of the baseline at all; "
        how += "each arm is judged at the one of the best mean on the selection text "
        how += f"({judged}), and p is that of both at their best rates."
    return how
