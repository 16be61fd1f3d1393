"""Words of an experiment's page: the question, the verdicts, what was lost, and how it was done."""

from collections import Counter
from dataclasses import dataclass

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
from lm.report.tables import DIFFERENCE, Column
from lm.runs.folder import TOKENIZER
from lm.runs.series import selects
from lm.schema import Plain
from lm.statistics.intervals import ALPHA
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


@dataclass(frozen=True)
class Answer:
    """The verdict on an arm (and size), and what it rests on, in words."""

    arm: str
    verdict: str
    because: str


def answers(sizes: list[SizeResults]) -> list[Answer]:
    """One for each arm and size."""
    return [_answer(found, arm, verdict) for found in sizes for arm, verdict in found.verdicts.items()]


def _answer(found: SizeResults, arm: str, verdict: Verdict) -> Answer:
    name = ", ".join(filter(None, (arm, found.size)))
    if found.rates is None:
        return Answer(name, "no verdict yet", "Rates are being tuned.")
    because = f"{verdict.reason[:1].upper()}{verdict.reason[1:]}."
    if interval := verdict.interval:
        reach = found.experiment.primary.reach is not None
        difference = f"{FACTOR.shown(interval)} times the tokens of" if reach else "Difference to"
        difference += f" {found.arm_names[0]}" + ("" if reach else f": {DIFFERENCE.shown(interval)}")
        because = f"{difference}, interval over {interval.over}. {because}"
    return Answer(name, verdict.words, because)


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
    experiment, found = procedure.experiment, []
    for one in sizes:
        of = f"{one.size}: " if one.size else ""
        if one.rates is None:
            tried = procedure.tried(one.size)
            ended = sum(experiment.choosing(each) is not None for each in tried)
            found.append(
                f"{of}tuning goes on: {ended} of the {len(tried)} tuning runs known so far have ended; there are no final runs yet"
            )
            continue
        at_edge = [name for name in one.arm_names if name not in one.rates]
        if at_edge:
            found.append(
                f"{of}no rate for {joined(at_edge)}: the best is at an edge of a grid that may not grow again, or every rate diverged"
            )
        states = Counter(run.outcome.state for run in one.final)
        if states["unfinished"]:
            found.append(f"{of}{states['unfinished']} of {len(one.final)} final runs have not ended: {_named(one.final, 'unfinished')}")
        if states["diverged"]:
            found.append(f"{of}diverged, counted and in no mean: {_named(one.final, 'diverged')}")
    for size in experiment.sizes:
        infinite = [one for one in procedure.tried(size) if procedure.experiment.choosing(one) == float("inf")]
        named = joined([f"{one.arm} at {one.rate:g} seed {one.seed}" for one in infinite])
        found += [f"{f'{size}: ' if size else ''}tuning runs that diverged: {named}"] if infinite else []
    for run in procedure.known():
        if failure := read_failure(experiment.folder, run):
            found.append(f"failed: {run.stage} run {run.label}: {failure}")
    return found + procedure.notes() + noise(procedure)


def _named(runs: list[Run], state: str) -> str:
    return joined([f"{run.arm} seed {run.seed}" for run in runs if run.outcome.state == state])


def methods(procedure: Procedure, found: SizeResults) -> str:
    """A paragraph for a paper on one size: models, corpus, training, held-out text, tuning, tests."""
    experiment, comparison = procedure.experiment, found.comparison
    run, record = found.finished[0]
    named = joined(found.arm_names)
    text = [f"We trained {models(comparison)}: {named} (the configuration keys in which they differ are listed above)."]
    text.append(architecture(comparison))
    text.append(f"Data: {corpus(record)}; tokenizer: {_options(record.config['data'].get('tokenizer'))}{_vocabulary(run)}.")
    text.append(training_methods(comparison))
    text.append(_held_out(run))
    text.append(_tuning(procedure, found.size))
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
    seeds, rates = sorted({one.seed for one in tried}), sorted({one.rate for one in tried})
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
