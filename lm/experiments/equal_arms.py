"""A/A experiments: the baseline of an experiment against itself with other seeds, judged as its arms are: how much noise there is."""

import math
from dataclasses import replace

import numpy as np

from lm.config.load import merge
from lm.errors import RunError
from lm.experiments.arms import nested
from lm.experiments.experiment import Experiment, Original
from lm.experiments.judging import Judged
from lm.experiments.procedure import Procedure
from lm.statistics.verdicts import ALPHA, POWER, detectable

AA = "-aa"  # behind the experiment's name
Rates = dict[str, float]  # of the baseline, by size


def baseline_rates(procedure: Procedure) -> Rates | None:
    """The rates that tuning has chosen for the baseline of an experiment; None while it has not, or where nothing is tuned.

    Raises:
        RunError: its tuning table gives none.
    """
    experiment, baseline = procedure.experiment, procedure.experiment.arms[0].name
    rates = {size: (procedure.rates(size) or {}).get(baseline) for size in experiment.sizes}
    if all(rate is not None for rate in rates.values()):
        return rates
    if experiment.table:
        raise RunError(f"{experiment.tune.table}: the best rate of {baseline} is at an edge, or every rate diverged: try more rates")
    return None


def equal_arms(experiment: Experiment, rates: Rates | None) -> Experiment:
    """The A/A experiment: the baseline, and the baseline with seeds that the experiment uses nowhere, an offset above its own. Two runs of
    one seed would be equal bit for bit. `rates`: of the baseline; None: both arms are tuned as the experiment's are."""
    baseline, tune = experiment.arms[0], experiment.tune
    used = (*experiment.all_seeds, *(experiment.planned or ()), *tune.seeds, *(one.seed for one in experiment.table))
    again = replace(baseline, name=f"{baseline.name[:34]}-again", offset=1000 * (max(used) // 1000 + 1))
    made = replace(
        experiment,
        name=f"{experiment.name}{AA}",
        arms=(baseline, again),
        equal_to=Original(experiment.name, len(experiment.all_seeds), experiment.intervals, rates),
    )
    if rates is None:
        return made
    sizes = {size: merge(changes, nested({tune.key: rates[size]})) for size, changes in experiment.sizes.items()}
    return replace(made, sizes=sizes, tune=replace(tune, grid=[], table=None), table=())


def noise(procedure: Procedure, judged: Judged) -> list[str]:
    """Findings of an A/A experiment, one sentence a size: the spread of single differences, which difference the experiment's seeds find,
    and whether the verdict on equal arms held. Nothing of other experiments."""
    experiment, original = procedure.experiment, procedure.experiment.equal_to
    if original is None:
        return []
    said = []
    for (size, again), verdict in judged.verdicts.items():
        single = [] if experiment.primary.learned is not None else list(judged.comparisons[size, again].differences)
        parts = [f"noise{size and ', '}{size}"]
        if len(single) > 1 and np.isfinite(single).all():
            spread, ratio = float(np.std(single, ddof=1)), experiment.primary.reach is not None
            smallest = detectable(original.seeds, spread, ALPHA / original.intervals)
            what = f"a factor of {math.exp(smallest):.3g}" if ratio else f"a difference of {smallest:.2g}"
            of = "logarithms of " if ratio else ""
            parts.append(f"single differences between {of}equal arms have a standard deviation of {spread:.2g} over {len(single)} seeds")
            parts.append(f"by it the {original.seeds} seeds of {original.name} find {what} with probability {POWER:g}")
        held = {"undecided": "held", "equivalent": "held", "better": "is false", "worse": "is false"}
        told = held.get(verdict.kind, "is false" if verdict.kind.startswith("different") else "says nothing of equal arms yet")
        parts.append(f"the verdict, {verdict.words}, {told}")
        said.append(f"{parts[0]}: {'; '.join(parts[1:])}")
    return said
