"""Results of an experiment so far: the arms with their verdicts as a table and in sentences, and the tuning runs."""

import math

import numpy as np

from lm.experiments.experiment import Primary
from lm.experiments.judging import differences_by_rate, judge
from lm.experiments.procedure import Procedure, Run
from lm.experiments.tuning_tables import table_lines
from lm.report.tables import DIFFERENCE, Column, digits
from lm.runs.series import Series
from lm.schema import Plain
from lm.statistics.intervals import Interval
from lm.statistics.learned import clopper_pearson, has_learned
from lm.statistics.tuning import mean_loss


def summary(procedure: Procedure) -> list[dict[str, Plain]]:
    """One entry for each size and arm: rate, finished runs, mean of the primary metric on the reported documents over the seeds that all
    arms have finished, verdict, the difference with its interval over seeds and that over seeds and documents, and the mean difference
    over the tuning seeds at each rate; of arms whose final seeds are trained at several rates the mean at each. With `primary.reach`
    geometric means of tokens over the runs that `reached` it, and factors in place of differences; if runs learn or don't, how many
    `learned` of those that `ended`, and the fraction's interval."""
    experiment, judged, lines = procedure.experiment, judge(procedure), []
    counting, reach = experiment.primary.learned is not None, experiment.primary.reach is not None
    for size in experiment.sizes:
        rates = procedure.rates(size) or {}
        finished = [seeds for seeds in procedure.finished_seeds(size).values() if seeds]
        common = set(finished[0]).intersection(*finished) if finished else set()
        for number, arm in enumerate(experiment.arms):
            runs = [one for one in procedure.final(size) if one.arm == arm.name]
            done = [one for one in runs if one.outcome.state == "finished"]
            values = {one.seed: procedure.quantity(one.outcome) for one in done}
            means = [value for seed, value in values.items() if seed in common]
            learned = (
                [has_learned(one, experiment.primary.learned, experiment.primary.better) for one in values.values()] if counting else []
            )
            line: dict[str, Plain] = {
                "size": size, "arm": arm.name, "rate": rates.get(arm.name), "runs": len(values), "of": len(experiment.seeds),
                "mean": _mean(means, geometric=reach),
            }  # fmt: skip
            at_rates = {f"{rate:g}": some for (name, rate), some in crossed_runs(procedure, size).items() if name == arm.name}
            if at_rates:
                line["means_by_rate"] = {rate: _mean_of(procedure, some) for rate, some in at_rates.items()}
            line |= {"reached": sum(map(math.isfinite, values.values()))} if reach else {}
            if counting:
                ended = sum(one.outcome.ended for one in runs)
                line |= {"learned": sum(learned), "ended": ended, "fraction_learned": _finite(clopper_pearson(sum(learned), ended))}
            if number:
                verdict = judged[size, arm.name]
                line |= {"verdict": verdict.words, "reason": verdict.reason, "factor" if reach else "difference": _finite(verdict.interval)}
                line |= {"alone": _finite(verdict.alone), "over_seeds_and_documents": _finite(verdict.over_documents)}
                needed = verdict.seeds_needed
                line |= {"p": verdict.p, "p_exact": verdict.p_exact}
                line["seeds_needed"] = needed and [needed.by_spread, needed.fewest, needed.most]
                by_rate = {f"{rate:g}": float(np.mean(some)) for rate, some in differences_by_rate(procedure, size, arm).items() if some}
                finite = {rate: mean if math.isfinite(mean) else None for rate, mean in by_rate.items()}
                line["factors_by_rate" if reach else "differences_by_rate"] = {
                    rate: math.exp(mean) if reach and mean is not None else mean for rate, mean in finite.items()
                }
            lines.append(line)
    return lines


def findings(procedure: Procedure, lines: list[dict[str, Plain]]) -> list[str]:
    """Statements of each verdict on the means of an arm and of the baseline, one plain sentence each; `lines`: the summary. Arms without a
    mean have none, nor have runs that learn or don't: the verdict's reason counts them."""
    experiment, found = procedure.experiment, []
    for size in experiment.sizes:
        base, *others = (line for line in lines if line["size"] == size)
        finished = {run.arm: run for run in procedure.final(size) if run.outcome.state == "finished"}
        for line in others:
            if None in (line["mean"], base["mean"]) or not (line.get("factor") or line.get("difference")):
                continue
            series = [finished[one["arm"]].outcome.series(experiment.primary.metric) for one in (line, base)]
            said = _tokens(experiment.primary, line, base) if "factor" in line else _means(experiment.primary.metric, series, line, base)
            sentence = f"{said}: {_verdict(line, series[0].unit)}."
            found.append(f"{size}: {sentence}" if size else f"{sentence[:1].upper()}{sentence[1:]}")
    return found


def _means(metric: str, series: list[Series], line: dict[str, Plain], base: dict[str, Plain]) -> str:
    """The means of two arms, and where they are measured: a point of an axis, such as a length; `series`: of a run of each."""
    axis, what, first = series[0].axis, f"the {metric}", ""
    if axis and not axis.bins:
        place, (x, _) = [*series[0].places.items()][series[0].logged.index(metric)]
        alike = axis.unit == "tokens" and len({one.seq_len for one in series}) == 1
        factor = "" if x == series[0].seq_len else f"{x / series[0].seq_len:g} times "
        times = f", {factor}the training length" if alike else ""
        what, first = f"the {series[0].metric}", f"{f'{axis.before} {place} {axis.unit}'.rstrip()}{times}, "
    ours, theirs = (f"{100 * one['mean']:.1f} %" if series[0].unit == "fraction" else digits(one["mean"]) for one in (line, base))
    return f"{first}{what} of {line['arm']} is {ours} and that of {base['arm']} {theirs}"


def _tokens(primary: Primary, line: dict[str, Plain], base: dict[str, Plain]) -> str:
    """After how many tokens two arms reach the level."""
    ours, theirs = (f"{one['arm']} after {one['mean']:,.0f}" for one in (line, base))
    return f"the {primary.metric} of {primary.reach:g} is reached by {ours} tokens and by {theirs}"


def _verdict(line: dict[str, Plain], unit: str) -> str:
    """A verdict with its interval: after `better` and `worse`, which say the direction, of the difference without its sign."""
    mean, low, high = (math.nan if value is None else value for value in line.get("factor") or line["difference"])
    size = Column("size", kind="mean", decimals=2 if unit == "fraction" or "factor" in line else 4)
    if "factor" in line:
        return f"{line['verdict']}, {size.shown(Interval(mean, low, high))} times the tokens"
    if line["verdict"].endswith(("better", "worse")):
        return f"{line['verdict']} by {size.shown(Interval(mean, low, high) if mean > 0 else Interval(-mean, -high, -low))}"
    return f"{line['verdict']}, the difference is {DIFFERENCE.shown(Interval(mean, low, high))}"


def crossed_runs(procedure: Procedure, size: str) -> dict[tuple[str, float], list[Run]]:
    """The final runs that have ended, by arm and rate, of arms whose final seeds are trained at several rates."""
    found: dict[tuple[str, float], list[Run]] = {}
    for run in procedure.crossed(size):
        found.setdefault((run.arm, run.rate), []).extend([run] if run.outcome.ended else [])
    return found


def _mean_of(procedure: Procedure, runs: list[Run]) -> float | None:
    """The mean of what is compared of runs that have ended; None without any, or where one diverged."""
    return _mean([procedure.quantity(one.outcome) for one in runs], geometric=procedure.experiment.primary.reach is not None)


def _mean(values: list[float], geometric: bool) -> float | None:
    """The arithmetic or geometric mean; None without values, or where one is not finite (of a geometric one, or 0)."""
    if not values or not np.isfinite(values).all() or (geometric and not all(values)):
        return None
    return float(np.exp(np.mean(np.log(values)))) if geometric else float(np.mean(values))


def _finite(interval: Interval | None) -> list[float | None] | None:
    """[mean, low, high], null where not finite."""
    return interval and [value if math.isfinite(value) else None for value in interval.listed()]


def tuning_table(procedure: Procedure) -> list[dict[str, Plain]]:
    """One line for each tuning run, as `tuning.csv` holds them and `tune.table` reads them; of runs that have not ended without numbers."""
    tried = [one for size in procedure.experiment.sizes for one in procedure.tried(size)]
    return table_lines(tried, procedure.experiment.primary.quantity)


def tuning_means(procedure: Procedure) -> list[dict[str, Plain]]:
    """The mean of what chooses rates, of every arm at every rate that was tried; null where a run diverged or is not done."""
    lines = []
    for size in procedure.experiment.sizes:
        tried = procedure.tried(size)
        for arm, rate in dict.fromkeys((one.arm, one.rate) for one in tried):
            losses = [procedure.experiment.choosing(one) for one in tried if (one.arm, one.rate) == (arm, rate)]
            mean = mean_loss([math.inf if loss is None else loss for loss in losses])
            lines.append({"size": size, "arm": arm, "rate": rate, procedure.experiment.chosen_by: mean if math.isfinite(mean) else None})
    return lines
