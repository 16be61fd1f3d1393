"""The verdicts of docs/statistics.md on an experiment's finished runs."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np

from lm.experiments.arms import Arm
from lm.experiments.experiment import Primary
from lm.experiments.procedure import Procedure, Run, check_alike
from lm.experiments.tuning_tables import by_arm_and_rate
from lm.statistics.intervals import Estimate, over_seeds_and_documents
from lm.statistics.learned import Counts, Learned, has_learned, learned_verdicts
from lm.statistics.reach import factor, log_tokens
from lm.statistics.tuning import differences
from lm.statistics.verdicts import Comparison, Verdict, verdicts

ByRate = dict[float | None, list[Run]]  # final runs of an arm by seed, at each rate; first the one that tuning chose
Pair = tuple[float | None, float | None]  # the rates of an arm and of the baseline


def judge(procedure: Procedure) -> dict[tuple[str, str], Verdict]:
    """The verdicts by size and arm, on all arms but the baseline; with `primary.reach` the interval is of the factor.

    Raises:
        RunError: the primary metric was not measured, or its direction is another.
    """
    experiment = procedure.experiment
    primary, (_, *others) = experiment.primary, experiment.arms
    places = {(size, arm.name): (size, arm) for size in experiment.sizes for arm in others}
    if primary.learned is not None:
        found = learned_verdicts({name: counted(procedure, *place) for name, place in places.items()}, experiment.looks)
    else:
        ratio = primary.reach is not None
        found = {name: compared(procedure, *place) for name, place in places.items()}
        found = verdicts(found, primary.matters, "lower" if ratio else primary.better, ratio, experiment.looks)
        if ratio:
            found = {name: replace(one, interval=factor(one.interval), alone=factor(one.alone)) for name, one in found.items()}
    return {
        (size, arm): replace(one, exploratory=procedure.exploratory(size, arm), reason=one.reason + _not_learned(procedure, size, arm))
        for (size, arm), one in found.items()
    }


def _not_learned(procedure: Procedure, size: str, arm: str) -> str:
    """The final runs of an arm and of the baseline that have finished and did not learn, in words to follow a reason; empty if all did."""
    runs = [one for one in procedure.final(size) if one.arm in (arm, procedure.experiment.arms[0].name)]
    lost = [f"{one.label}: {one.outcome.not_learned}" for one in runs if one.outcome.state == "finished" and one.outcome.not_learned]
    return f"; did not learn: {'; '.join(lost[:3])}{'; ...' if len(lost) > 3 else ''}" if lost else ""


def next_look(procedure: Procedure) -> Procedure:
    """The experiment with the seeds of its second look, once all runs of the first have ended and left a comparison undecided; else as it
    is. Under `--minutes` there is no second look."""
    experiment = procedure.experiment
    if not experiment.more_seeds or experiment.look == 2 or experiment.limited:
        return procedure
    if not all(run.outcome.ended for run in procedure.known()) or all(one.kind != "undecided" for one in judge(procedure).values()):
        return procedure
    return Procedure(replace(experiment, seeds=experiment.seeds + experiment.more_seeds, look=2))


def compared(procedure: Procedure, size: str, arm: Arm) -> Comparison:
    """The comparison that runs so far give of an arm against the baseline."""
    experiment, rates = procedure.experiment, procedure.rates(size)
    planned = len(experiment.seeds)
    if rates is None:
        return Comparison((), planned=planned)
    base = experiment.arms[0]
    if not {arm.name, base.name} <= rates.keys():
        return Comparison((), tuned=False)
    at, (ours, theirs) = (rates[arm.name], rates[base.name]), _final(procedure, size, arm)
    tried = ours.keys()
    decisive = _decisive(at, ours, theirs)
    begun = any(one.arm == arm.name and one.outcome.ended for one in decisive)  # else a baseline that diverged says nothing of the arm
    diverged = [one for one in decisive if begun and one.outcome.state == "diverged"]
    why = "; ".join(f"{one.label}: {one.outcome.divergence}" for one in diverged[:3]) + ("; ..." if len(diverged) > 3 else "")
    if diverged:  # nothing can be claimed: what there is at the rates that are judged is shown
        ours, theirs = {at[0]: ours[at[0]]}, {at[1]: theirs[at[1]]}
    else:
        ours, theirs = _usable(procedure, ours, at[0]), _usable(procedure, theirs, at[1])
    seeds = [seed for seed in range(planned) if all(one.outcome.state == "finished" for one in _of_seed(seed, ours, theirs))]
    ours, theirs = ({rate: [runs[seed] for seed in seeds] for rate, runs in by_rate.items()} for by_rate in (ours, theirs))
    place, every = ([*ours].index(at[0]), [*theirs].index(at[1])), experiment.primary.quantity != experiment.chosen_by
    shared = None if arm.start or diverged else sum(rate in tried for rate in theirs)
    by_rates = _differences(ours, theirs, lambda run: _value(procedure, run))
    shown, unreached, on_other_text = by_rates[place], "", None
    if experiment.primary.reach is not None:
        unreached = _unreached(procedure, [one for by_rate in (ours, theirs) for runs in by_rate.values() for one in runs])
        shown = shown[np.isfinite(shown)]
    elif seeds and not experiment.first_config.data.symbolic:
        on_other_text = _over_documents(experiment.primary.metric, ours, theirs)
    higher = experiment.primary.reach is None and experiment.primary.better == "higher"
    return Comparison(
        shown.tolist(), len(diverged), None if unreached else by_rates, place, shared, every, higher,
        planned=planned, why=why, over_documents=on_other_text, unreached=unreached,
    )  # fmt: skip


def counted(procedure: Procedure, size: str, arm: Arm) -> Learned:
    """How many of the runs so far have learned, of an arm and of the baseline."""
    experiment, rates = procedure.experiment, procedure.rates(size)
    planned, base = len(experiment.seeds), experiment.arms[0]
    if rates is None:
        return Learned(0, 0, 0, 0, planned=planned)
    if not {arm.name, base.name} <= rates.keys():
        return Learned(0, 0, 0, 0, tuned=False)
    at, (ours, theirs) = (rates[arm.name], rates[base.name]), _final(procedure, size, arm)
    seeds = [seed for seed in range(planned) if all(one.outcome.ended for one in _of_seed(seed, ours, theirs))]

    def counts(pair: Pair) -> Counts:
        learned = [sum(_has_learned(procedure, runs[seed]) for seed in seeds) for runs in (ours[pair[0]], theirs[pair[1]])]
        return learned[0], len(seeds), learned[1], len(seeds)

    diverged = sum(one.outcome.state == "diverged" for one in _decisive(at, ours, theirs))
    return Learned(*counts(at), [*map(counts, _pairs(ours, theirs))], diverged, planned=planned)


def differences_by_rate(procedure: Procedure, size: str, arm: Arm) -> dict[float, list[float]]:
    """Arm minus baseline of the tuning seeds at every rate that both have: of the primary metric on the selection text, or of 1 for a
    run that has learned and 0 else, or of the logarithm of tokens. Infinite where one of them diverged, or did not reach its level."""
    values, base = _tried_values(procedure, size), procedure.experiment.arms[0]
    return differences(arm.name, base.name, values) if {arm.name, base.name} <= values.keys() and procedure.rates(size) else {}


def _final(procedure: Procedure, size: str, arm: Arm) -> tuple[ByRate, ByRate]:
    """The final runs of an arm and of the baseline at each of their rates. An arm that starts from another has one rate; if it comes from
    the baseline, so has that: what is compared is what became of the same runs. The baseline's rates that the arm has, too, come first.

    Raises:
        RunError: finished ones were not measured on the same sequences.
    """
    base, rates, choice = procedure.experiment.arms[0], procedure.rates(size), procedure.choice(size)
    of_arm, of_base = choice.final.get(arm.name), choice.final[base.name]
    if arm.start:
        of_arm, of_base = (rates[arm.name],), (rates[base.name],) if base.name in procedure.sources(arm) else of_base
    else:
        of_base = sorted(of_base, key=lambda rate: rate not in of_arm)
    found: list[ByRate] = []
    for one, tried in ((arm, of_arm), (base, of_base)):
        seeds = procedure.experiment.seeds
        found.append({rate: [procedure.run(size, one, "final", rate, seed, rates) for seed in seeds] for rate in tried})
    check_alike([one for by_rate in found for some in by_rate.values() for one in some], procedure.experiment.primary.metric)
    return found[0], found[1]


def _decisive(at: Pair, ours: ByRate, theirs: ByRate) -> list[Run]:
    """The runs without which nothing can be said: at the rates that are judged, and at those that tuning chose."""
    runs = (*ours[at[0]], *theirs[at[1]], *next(iter(ours.values())), *next(iter(theirs.values())))
    return list({one.config.run_folder: one for one in runs}.values())


def _usable(procedure: Procedure, runs: ByRate, judged: float | None) -> ByRate:
    """Without the other rates at which one of the runs diverged, or never reached the level: they can't be an arm's best."""

    def lost(one: Run) -> bool:
        reach = procedure.experiment.primary.reach is not None and one.outcome.state == "finished"
        return one.outcome.state == "diverged" or (reach and procedure.quantity(one.outcome) == math.inf)

    return {rate: some for rate, some in runs.items() if rate in (judged, next(iter(runs))) or not any(map(lost, some))}


def _of_seed(number: int, *by_rates: ByRate) -> list[Run]:
    """All runs of one seed."""
    return [some[number] for by_rate in by_rates for some in by_rate.values()]


def _pairs(ours: ByRate, theirs: ByRate) -> list[Pair]:
    """All pairs of rates; none where both have one."""
    return [] if len(ours) == len(theirs) == 1 else [*product(ours, theirs)]


def _unreached(procedure: Procedure, runs: list[Run]) -> str:
    """How many finished runs of each arm have no number of tokens, in words; empty if all have one."""
    primary, said = procedure.experiment.primary, []
    runs = list({one.config.run_folder: one for one in runs}.values())
    for arm in dict.fromkeys(one.arm for one in runs):
        tokens = [procedure.quantity(one.outcome) for one in runs if one.arm == arm]
        if never := sum(one == math.inf for one in tokens):
            said.append(f"{never} of {len(tokens)} runs of {arm} did not reach {primary.metric} {primary.reach:g}")
        if early := sum(one == 0 for one in tokens):
            said.append(f"{early} of {len(tokens)} runs of {arm} had reached {primary.reach:g} at the first evaluation")
    return "; ".join(said)


def _value(procedure: Procedure, run: Run) -> float:
    """The primary metric on the documents that are reported on, or the logarithm of `quantity`'s tokens; infinite of a run that is not
    finished.

    Raises:
        RunError: its direction is another than the experiment says.
    """
    procedure.check_direction(run.outcome)
    found = procedure.quantity(run.outcome)
    return found if procedure.experiment.primary.reach is None else log_tokens(found)


def _has_learned(procedure: Procedure, run: Run) -> bool:
    primary = procedure.experiment.primary
    return has_learned(_value(procedure, run), primary.learned, primary.better)


def _compared_value(primary: Primary, value: float) -> float:
    """The number that differences are taken of: 1 or 0 for a run that has learned or not, the logarithm of tokens, else the metric;
    `value` is infinite if the run diverged."""
    if primary.learned is not None:
        return float(has_learned(value, primary.learned, primary.better))
    if primary.reach is not None:
        return log_tokens(value)
    return -value if value == math.inf and primary.better == "higher" else value


def _tried_values(procedure: Procedure, size: str) -> dict[str, dict[float, list[float]]]:
    """The primary metric of the tuning runs by arm, rate and seed."""
    primary = procedure.experiment.primary
    measured = by_arm_and_rate(procedure.tried(size), size, "primary") if procedure.experiment.tuned else {}
    return {
        arm: {rate: [_compared_value(primary, one) for one in some] for rate, some in by_rate.items()} for arm, by_rate in measured.items()
    }


def _differences(ours: ByRate, theirs: ByRate, value: Callable[[Run], float | np.ndarray]) -> np.ndarray:
    """Arm minus baseline at each pair of rates, (the arm's rates, the baseline's, seeds, and the shape of a run's value)."""
    mine, others = (np.array([[value(run) for run in runs] for runs in by_rate.values()]) for by_rate in (ours, theirs))
    with np.errstate(invalid="ignore"):
        return mine[:, None] - others


def _over_documents(metric: str, ours: ByRate, theirs: ByRate) -> Estimate | None:
    """The difference over seeds and documents at each pair of rates; None without held-out documents, or with too few of either."""
    first = next(iter(ours.values()))[0].outcome.values(metric)
    if not first.held_out:
        return None
    first = first.part(selection=False)
    values = _differences(ours, theirs, lambda run: run.outcome.values(metric).part(selection=False).values)
    return over_seeds_and_documents(values, first.weights, first.groups)
