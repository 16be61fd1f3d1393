"""The verdicts of docs/statistics.md on an experiment's finished runs."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from lm.experiments.arms import Arm
from lm.experiments.experiment import Primary
from lm.experiments.outcomes import Values
from lm.experiments.procedure import Procedure, Run, check_alike
from lm.experiments.tuning_tables import by_arm_and_rate
from lm.statistics.intervals import Interval, envelope, over_seeds_and_documents
from lm.statistics.learned import Counts, Learned, has_learned, learned_verdicts
from lm.statistics.reach import factor, log_tokens
from lm.statistics.tuning import differences, elsewhere
from lm.statistics.verdicts import Comparison, Pair, Verdict, bounding_pairs, verdicts

ByRate = dict[float | None, list[Run]]  # final runs of an arm by seed, at each rate; first the one that tuning chose


def judge(procedure: Procedure) -> dict[str, Verdict]:
    """The verdict on each arm but the baseline, of several sizes on `ARM, SIZE`; with `primary.reach` the interval is of the factor.

    Raises:
        RunError: the primary metric was not measured, or its direction is another.
    """
    experiment = procedure.experiment
    primary, (_, *others) = experiment.primary, experiment.arms
    pairs = {(f"{arm.name}, {size}" if size else arm.name): (size, arm) for size in experiment.sizes for arm in others}
    if primary.learned is not None:
        found = learned_verdicts({name: counted(procedure, *pair) for name, pair in pairs.items()})
    else:
        ratio = primary.reach is not None
        found = {name: compared(procedure, *pair) for name, pair in pairs.items()}
        found = verdicts(found, primary.matters, _direction(procedure), ratio)
        found = {name: replace(one, interval=factor(one.interval)) if ratio else one for name, one in found.items()}
    return {name: replace(one, exploratory=procedure.added + procedure.left_out) for name, one in found.items()}


def compared(procedure: Procedure, size: str, arm: Arm) -> Comparison:
    """What the runs so far show of an arm against the baseline."""
    experiment, rates = procedure.experiment, procedure.rates(size)
    planned = len(experiment.seeds)
    if rates is None:
        return Comparison((), planned=planned)
    base = experiment.arms[0]
    if not {arm.name, base.name} <= rates.keys():
        return Comparison((), tuned=False)
    at, (ours, theirs) = (rates[arm.name], rates[base.name]), _final(procedure, size, arm)
    diverged = [one for one in _decisive(at, ours, theirs) if one.outcome.state == "diverged"]
    why = "; ".join(f"{one.label}: {one.outcome.divergence}" for one in diverged[:3]) + ("; ..." if len(diverged) > 3 else "")
    other = _elsewhere(procedure, size, arm, ours, theirs)
    if diverged:  # nothing can be claimed: what there is at the rates that are judged is shown
        ours, theirs = {at[0]: ours[at[0]]}, {at[1]: theirs[at[1]]}
    else:
        ours, theirs = _usable(procedure, ours, at[0]), _usable(procedure, theirs, at[1])
    of_arm, of_base = _bounding(ours, theirs)
    upper, lower = (of_arm, of_base) if _direction(procedure) == "lower" else (of_base, of_arm)
    seeds = [seed for seed in range(planned) if all(one.outcome.state == "finished" for one in _of_seed(seed, ours, theirs))]

    def runs_of(pair: Pair) -> list[tuple[Run, Run]]:
        return [(ours[pair[0]][seed], theirs[pair[1]][seed]) for seed in seeds]

    def difference(pair: Pair) -> list[float]:
        return [_value(procedure, mine) - _value(procedure, other) for mine, other in runs_of(pair)]

    values, unreached, crossed = difference(at), "", None
    if experiment.primary.reach is not None:
        unreached = _unreached(procedure, [one for pair in (at, *upper, *lower) for both in runs_of(pair) for one in both])
        values = [one for one in values if math.isfinite(one)]
    elif not experiment.first_config.data.symbolic:
        metric = experiment.primary.metric
        crossed, *more = (_over_documents(runs_of(pair), metric) for pair in (at, *upper, *lower))
        crossed = envelope(crossed, more[: len(upper)], more[len(upper) :]) if crossed else None
    return Comparison(
        values, len(diverged), [] if unreached else [*map(difference, upper)], [] if unreached else [*map(difference, lower)],
        other, planned=planned, why=why, over_documents=crossed, unreached=unreached,
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
    other = {rate: float(np.mean(some)) for rate, some in _elsewhere(procedure, size, arm, ours, theirs).items() if some}
    of_arm, of_base = _bounding(ours, theirs)
    others = {"higher": [*map(counts, of_arm)], "lower": [*map(counts, of_base)]}
    return Learned(*counts(at), others, diverged, other, planned=planned)


def differences_by_rate(procedure: Procedure, size: str, arm: Arm) -> dict[float, list[float]]:
    """Arm minus baseline of the tuning seeds at every rate that both have: of the primary metric on the selection text, or of 1 for a
    run that has learned and 0 else, or of the logarithm of tokens. Infinite where one of them diverged, or did not reach its level."""
    values, base = _tried_values(procedure, size), procedure.experiment.arms[0]
    return differences(arm.name, base.name, values) if {arm.name, base.name} <= values.keys() and procedure.rates(size) else {}


def _final(procedure: Procedure, size: str, arm: Arm) -> tuple[ByRate, ByRate]:
    """The final runs of an arm and of the baseline at each of their rates; an arm that starts from another is not crossed, and is compared
    with the baseline at its one rate. Raises RunError if finished ones were not measured on the same sequences."""
    base, rates, choice = procedure.experiment.arms[0], procedure.rates(size), procedure.choice(size)
    found: list[ByRate] = []
    for one in (arm, base):
        crossed = not arm.start and arm.name in choice.final
        tried = choice.final[one.name] if crossed else (rates[one.name],)
        seeds = procedure.experiment.seeds
        found.append({rate: [procedure.run(size, one, "final", rate, seed, rates) for seed in seeds] for rate in tried})
    check_alike([one for by_rate in found for some in by_rate.values() for one in some], procedure.experiment.primary.metric)
    return found[0], found[1]


def _decisive(at: Pair, ours: ByRate, theirs: ByRate) -> list[Run]:
    """Those without which nothing can be said: at the rates that are judged, and at those that tuning chose."""
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


def _direction(procedure: Procedure) -> Literal["lower", "higher"]:
    """Which direction of what is compared is better: of tokens to reach a level, fewer."""
    primary = procedure.experiment.primary
    return "lower" if primary.reach is not None else primary.better


def _bounding(ours: ByRate, theirs: ByRate) -> tuple[list[Pair], list[Pair]]:
    """The pairs of rates of `bounding_pairs`; none where both have one rate."""
    return ([], []) if len(ours) == len(theirs) == 1 else bounding_pairs([*ours], [*theirs])


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
    """The primary metric on the documents that are reported on, or the logarithm of `quantity`'s tokens; NaN of a run that is not
    finished.

    Raises:
        RunError: its direction is another than the experiment says.
    """
    procedure.check_direction(run.outcome)
    found = procedure.quantity(run.outcome) if run.outcome.state == "finished" else math.nan
    return found if procedure.experiment.primary.reach is None else log_tokens(found)


def _has_learned(procedure: Procedure, run: Run) -> bool:
    primary = procedure.experiment.primary
    return has_learned(_value(procedure, run), primary.learned, primary.better)


def _elsewhere(procedure: Procedure, size: str, arm: Arm, ours: ByRate, theirs: ByRate) -> dict[float, list[float]]:
    """Arm minus baseline with both at one rate: of the final seeds at the two rates that tuning chose, if these differ and both were
    trained at them; else of the tuning seeds, as `elsewhere` gives them. Of runs that learn or don't, the difference of 1 and 0."""
    base = procedure.experiment.arms[0]
    first = {arm.name: next(iter(ours)), base.name: next(iter(theirs))}
    if len(ours) == 1:
        values = _tried_values(procedure, size)
        return elsewhere(arm.name, base.name, first, values) if {arm.name, base.name} <= values.keys() else {}
    values: dict[str, dict[float, list[float]]] = {arm.name: {}, base.name: {}}
    for rate in ours:
        pairs = [pair for pair in zip(ours[rate], theirs[rate], strict=True) if all(one.outcome.ended for one in pair)]
        for number, one in enumerate((arm, base)):
            values[one.name][rate] = [_of_ended(procedure, pair[number]) for pair in pairs]
    return differences(arm.name, base.name, values)


def _of_ended(procedure: Procedure, run: Run) -> float:
    """What differences are of, of a final run that has ended."""
    value = procedure.quantity(run.outcome) if run.outcome.state == "finished" else math.inf
    return _compared_value(procedure.experiment.primary, value)


def _compared_value(primary: Primary, value: float) -> float:
    """What differences are of: 1 or 0 for a run that has learned or not, the logarithm of tokens, else the metric; `value` is infinite if
    the run diverged."""
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


def _over_documents(pairs: list[tuple[Run, Run]], metric: str) -> Interval | None:
    """The difference of pairs of runs, one a seed, over seeds and documents; None without held-out documents, or with too few of either."""
    measured: list[list[Values]] = [[one.outcome.values(metric) for one in pair] for pair in pairs]
    if not measured or not measured[0][0].held_out:
        return None
    parts = [[one.part(selection=False) for one in pair] for pair in measured]
    first = parts[0][0]
    return over_seeds_and_documents(np.stack([ours.values - theirs.values for ours, theirs in parts]), first.weights, first.groups)
