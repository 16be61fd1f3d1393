"""Results of an experiment so far: the arms with their verdicts as a table and in sentences, and the tuning runs."""

import math

import numpy as np

from lm.experiments.experiment import Arm, by_arm_and_rate
from lm.experiments.judging import Judged
from lm.experiments.procedure import Procedure, Run
from lm.experiments.run_outcome import SELECTION
from lm.report.tables import Column, digits
from lm.runs.evaluations import Series
from lm.runs.folder import DIVERGED
from lm.schema import Plain
from lm.statistics.intervals import Interval
from lm.statistics.learned import has_learned, log_tokens
from lm.statistics.tuning import Rate, mean_loss, rate_cell, rate_differences, rate_words


def summary_lines(procedure: Procedure, judged: Judged | None = None) -> list[dict[str, Plain]]:
    """One entry for each size and arm (`Judged.lines`), with the mean difference over the tuning seeds at each rate. `judged`: the
    verdicts, if they are known already."""
    judged, reach = judged or procedure.judged(), procedure.experiment.primary.reach is not None
    lines, arms = judged.lines(), {arm.name: arm for arm in procedure.experiment.arms[1:]}
    for line in (line for line in lines if line["arm"] in arms):
        apart = differences_by_rate(procedure, line["size"], arms[line["arm"]])
        means = {rate_words(rate): float(np.mean(some)) for rate, some in apart.items() if some}
        finite = {rate: mean if math.isfinite(mean) else None for rate, mean in means.items()}
        line["factors_by_rate" if reach else "differences_by_rate"] = {
            rate: math.exp(mean) if reach and mean is not None else mean for rate, mean in finite.items()
        }
    return lines


def differences_by_rate(procedure: Procedure, size: str, arm: Arm) -> dict[Rate, list[float]]:
    """Arm minus baseline of the tuning seeds at every rate that both have: of the primary metric on the selection text, or of 1 for a
    run that has learned and 0 else, or of the logarithm of tokens. Infinite where one of them diverged, or did not reach its level."""
    experiment = procedure.experiment
    base, measured = experiment.arms[0].name, by_arm_and_rate(procedure.tried(size), size, "primary") if experiment.tuned else {}
    if not {arm.name, base} <= measured.keys() or not procedure.rates(size):
        return {}
    primary = experiment.primary

    def compared(value: float) -> float:
        if primary.learned is not None:
            return float(has_learned(value, primary.learned, primary.better))
        if primary.reach is not None:
            return log_tokens(value)
        return -value if value == math.inf and primary.better == "higher" else value

    both = {name: {rate: [*map(compared, some)] for rate, some in measured[name].items()} for name in (arm.name, base)}
    return rate_differences(arm.name, base, both)


def findings(procedure: Procedure, lines: list[dict[str, Plain]]) -> list[str]:
    """Sentences on each arm: its mean and the baseline's with their difference, then the verdict; `lines`: the summary. Arms without a
    mean have none, nor have runs that learn or don't: the verdict's reason counts them."""
    experiment, sentences = procedure.experiment, []
    for size in experiment.sizes:
        base, *others = (line for line in lines if line["size"] == size)
        finished = {run.arm: run for run in procedure.final(size) if run.outcome.state == "finished"}
        for line in others:
            if None in (line["mean"], base["mean"]) or not (line.get("factor") or line.get("difference")):
                continue
            series = [finished[each["arm"]].outcome.series(experiment.primary.metric) for each in (line, base)]
            if "factor" in line:
                ours, theirs = (f"{each['arm']} after {each['mean']:,.0f}" for each in (line, base))
                words = f"the {experiment.primary.metric} of {experiment.primary.reach:g} is reached by {ours} tokens and by {theirs}"
            else:
                words = _means(experiment.primary.metric, series, line, base)
            sentence = f"{words}, {_difference(line, series[0].unit)}. {line['words'][:1].upper()}{line['words'][1:]}."
            sentences.append(f"{size}: {sentence}" if size else f"{sentence[:1].upper()}{sentence[1:]}")
    return sentences


def _means(metric: str, series: list[Series], line: dict[str, Plain], base: dict[str, Plain]) -> str:
    """The means of two arms, and where they are measured: a point of an axis, such as a length; `series`: of a run of each."""
    axis, what, first = series[0].axis, f"the {metric}", ""
    if axis and not axis.bins:
        place, (x, _) = [*series[0].places.items()][series[0].logged.index(metric)]
        alike = axis.unit == "tokens" and len({each.seq_len for each in series}) == 1
        factor = "" if x == series[0].seq_len else f"{x / series[0].seq_len:g} times "
        times = f", {factor}the training length" if alike else ""
        what, first = f"the {series[0].metric}", f"{f'{axis.before} {place} {axis.unit}'.rstrip()}{times}, "
    ours, theirs = (f"{100 * each['mean']:.1f} %" if series[0].unit == "fraction" else digits(each["mean"]) for each in (line, base))
    return f"{first}{what} of {line['arm']} is {ours} and that of {base['arm']} {theirs}"


def _difference(line: dict[str, Plain], unit: str) -> str:
    """The difference of an arm to the baseline, or its factor, with the interval."""
    interval = Interval(*(math.nan if value is None else value for value in line.get("factor") or line["difference"]))
    if "factor" in line:
        return f"{Column('factor', kind='mean', decimals=2).shown(interval)} times the tokens"
    return f"a difference of {Column('difference', kind='mean', decimals=2 if unit == 'fraction' else 4).shown(interval)}"


def crossed_runs(procedure: Procedure, size: str) -> dict[tuple[str, float], list[Run]]:
    """The final runs that have ended, by arm and rate, of arms whose final seeds are trained at several rates."""
    runs: dict[tuple[str, float], list[Run]] = {}
    for run in procedure.crossed(size):
        runs.setdefault((run.arm, run.rate), []).extend([run] if run.outcome.ended else [])
    return runs


def tuning_table(procedure: Procedure) -> list[dict[str, Plain]]:
    """One line for each tuning run, as `tuning.csv` holds them and `tune.table` reads them; of runs that have not ended without numbers."""
    metric = procedure.experiment.primary.quantity

    def cell(value: float | None) -> Plain:
        return value if value is None or math.isfinite(value) else DIVERGED

    return [
        {"size": size, "arm": run.arm, "key": run.key, "rate": rate_cell(run.rate), "seed": run.seed, SELECTION: cell(run.selection)}
        | ({} if metric == SELECTION else {metric: cell(run.primary)})
        | {"configuration": run.configuration}
        for size in procedure.experiment.sizes
        for run in procedure.tried(size)
    ]


def tuning_means(procedure: Procedure) -> list[dict[str, Plain]]:
    """The mean of what chooses rates, of every arm at every rate that was tried; null where a run diverged or is not done."""
    experiment, lines = procedure.experiment, []
    for size in experiment.sizes:
        values: dict[tuple[str, Rate], list[float]] = {}
        for run in procedure.tried(size):
            value = experiment.choosing(run)
            values.setdefault((run.arm, run.rate), []).append(math.inf if value is None else value)
        means = {place: mean_loss(some) for place, some in values.items()}
        lines += [
            {"size": size, "arm": arm, "rate": rate_cell(rate), experiment.chosen_by: mean if math.isfinite(mean) else None}
            for (arm, rate), mean in means.items()
        ]
    return lines
