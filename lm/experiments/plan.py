"""The plan of an experiment: its runs, the cost of each, and the time that all take."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import torch

from lm.config.tree import Config
from lm.data.prepare import vocab_size_of
from lm.errors import RunError
from lm.experiments.experiment import SHARED_SETTINGS, Experiment, PrimaryMetric
from lm.experiments.noise import experiment_noise
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Slots
from lm.model.decoder import Decoder
from lm.model.spec import count_parameters, flops_per_token
from lm.runs.folder import METRICS, read_environment, read_metrics, training_seconds
from lm.runs.record import starts
from lm.statistics.verdicts import POWER, seeds_needed


@dataclass(frozen=True)
class Cost:
    """The resources that one run takes."""

    parameters: int  # number of the model's parameters
    tokens: int  # number of tokens that it is trained on
    flops: int  # floating-point operations of its training


def cost(config: Config, vocab_size: int, first_step: int = 0) -> Cost:
    """The resources of a run that is trained from `first_step` on."""
    with torch.device("meta"):
        decoder = Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)
    tokens = config.optim.batch_tokens * (config.trainer.max_steps - first_step)
    return Cost(count_parameters(decoder)["total"], tokens, flops_per_token(decoder) * tokens)


Costs = dict[tuple[str, str], Cost]  # resources of a run, by size and arm


def costs(procedure: Procedure) -> Costs:
    """The resources of a run of each size and arm; {} if the size of the vocabulary is unknown before text is
    prepared.
    """
    experiment, costs_of_arms = procedure.experiment, {}
    vocab_size = vocab_size_of(experiment.first_config.data)
    for size, arm in experiment.size_arms if vocab_size else ():
        config = experiment.example_config(size, arm)
        first_step = arm.branch_step or 0 if arm.trained else config.trainer.max_steps
        costs_of_arms[size, arm.name] = cost(config, vocab_size, first_step)
    return costs_of_arms


def plan_lines(procedure: Procedure, run_costs: Costs, time_words: str, slot_words: str = "") -> Iterator[str]:
    """The lines of a plan: the runs, their resources and settings, the number of seeds that find a difference of
    interest, and notes.

    Args:
        run_costs: the resources of a run by size and arm (`costs`); {}: unknown.
        time_words: the time that all runs take.
        slot_words: how many runs are trained at a time, and on which devices.
    """
    experiment = procedure.experiment
    tune, primary = experiment.tune, experiment.primary
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), run_cost in run_costs.items():
        name = " ".join(filter(None, (size, arm)))
        yield f"  {name}: {run_cost.parameters / 1e6:.2f} M parameters, {run_cost.tokens / 1e6:.2f} M tokens a run"
    tuning = f"{tune.heading} as chosen from {tune.table}" if tune.table else "no tuning"
    if tune.grid:
        axes = [
            f"{key} over {', '.join(f'{x:g}' for x in axis)}" for key, axis in zip(tune.keys, tune.axes, strict=True)
        ]
        combinations = f" ({len(tune.rates)} together)" if len(axes) > 1 else ""
        tuning = f"tuning {' and '.join(axes)}{combinations} with seeds {', '.join(map(str, tune.seeds))}"
    yield f"{tuning}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {(size, arm): count for size in experiment.sizes for arm, count in procedure.n_runs(size).items()}
    untrained = sum(counts[size, arm.name] for size, arm in experiment.size_arms if not arm.trained)
    runs = f"{sum(counts.values())} runs" + f" ({untrained} of them are measured without training)" * bool(untrained)
    growth = "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted"
    growth = growth if tune.grid else ""
    if run_costs:
        tokens, flops = (
            sum(counts[size_arm] * getattr(run_cost, name) for size_arm, run_cost in run_costs.items())
            for name in ("tokens", "flops")
        )
        yield f"{runs}, {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs{growth}"
    else:
        yield f"{runs}{growth}; tokens and FLOPs: not known before lm prepare has made the vocabulary"
    yield f"time: {time_words}"
    known_runs, judgement = procedure.known_runs(), procedure.judgement()
    yield f"done: {sum(run.outcome.ended for run in known_runs)} of the {len(known_runs)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; {_seed_count_words(primary, judgement.alpha)}"
    yield from judgement.power_sentences(len(experiment.seeds))
    yield from filter(None, [experiment_noise(judgement)])
    yield from procedure.notes()
    yield f"runs compute with {_settings_words(experiment)}" + (f"; {slot_words}" if slot_words else "")


def _settings_words(experiment: Experiment) -> str:
    """Name precision, compilation and threads of the runs."""
    trainers = [experiment.example_config(size, arm).trainer for size, arm in experiment.size_arms]
    values = {name: dict.fromkeys(str(getattr(trainer, name)) for trainer in trainers) for name in SHARED_SETTINGS}
    return "; ".join(f"{name} {' or '.join(words)}" for name, words in values.items())


def _seed_count_words(primary: PrimaryMetric, alpha: float) -> str:
    """Say how many seeds are needed to find a difference of interest."""
    runs = "single runs" if primary.reach is None else "the logarithms of single runs"
    margin, effect = primary.matters, f"a difference of {primary.matters:g}"
    if primary.reach is not None:
        margin, effect = math.log1p(primary.matters), f"a factor of {1 + primary.matters:g} in {primary.quantity_name}"
    seed_counts = ", ".join(
        f"{seeds_needed(deviation, margin, alpha)} if it is {deviation:.3g}"
        for deviation in (margin / 2, margin, 2 * margin)
    )
    return (
        f"seeds to find {effect} with probability {POWER:g} go by the standard deviation of differences between "
        f"{runs}: {seed_counts}"
    )


# ---------------------------------------------------------------- the time that runs take


Times = dict[tuple[str, str], float]  # seconds of a run, by size and arm


def run_times(runs: list[Run], run_costs: Costs) -> Times:
    """Estimate the seconds that a run of each size and arm takes, by the finished ones among `runs`. Times of other
    sizes and arms are scaled by FLOPs. {} before the first trained run has finished."""
    durations = defaultdict(list)
    for run in runs:
        if run.outcome.state == "finished" and (seconds := _seconds(run)):
            durations[run.size, run.arm].append(seconds)
    measured = {size_arm: statistics.fmean(values) for size_arm, values in durations.items()}
    trained = [size_arm for size_arm in measured if size_arm in run_costs and run_costs[size_arm].flops]
    times = {}
    for size_arm, run_cost in run_costs.items() if trained else ():
        reference = next((other for other in trained if other[1] == size_arm[1]), trained[0])
        scaled = measured[reference] * run_cost.flops / run_costs[reference].flops
        times[size_arm] = measured.get(size_arm, scaled)
    return times


def _seconds(run: Run) -> float:
    """The seconds that a run took: from its last start to the last line of its log, which is of its last evaluation in
    training, and its training before that start. 0 if its folder does not say, or it is not trained.
    """
    log = run.config.run_folder / METRICS
    with suppress(RunError, KeyError, IndexError, ValueError, OSError):
        start = starts(read_environment(run.config.run_folder))[-1] if run.trained else {}
        seconds = max(0.0, log.stat().st_mtime - datetime.fromisoformat(start["time"]).timestamp())
        if start["step"]:
            lines = read_metrics(log).lines
            seconds += (training_seconds(lines) or 0.0) - (training_seconds(lines, start["step"]) or 0.0)
        return seconds
    return 0.0


def total_seconds(procedure: Procedure, times: Times, slots: Slots) -> float:
    """Estimate the seconds until all runs have ended, those that are not known yet among them."""
    seconds = {size_arm: time * slots.slots_per_run(*size_arm) for size_arm, time in times.items()}
    counts = {(size, arm): n for size in procedure.experiment.sizes for arm, n in procedure.n_runs(size).items()}
    planned = sum(count * seconds[size_arm] for size_arm, count in counts.items()) / slots.n_slots
    return max(0.0, planned - seconds_of((run for run in procedure.known_runs() if run.outcome.ended), times, slots))


def seconds_of(runs: Iterable[Run], times: Times, slots: Slots) -> float:
    """The seconds that runs take, with as many at a time as `slots` allows."""
    return sum(times[run.size, run.arm] * slots.slots_per_run(run.size, run.arm) for run in runs) / slots.n_slots


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
