"""The plan of an experiment: its runs, the cost of each, and the time that all take."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

import torch
from rich.filesize import decimal

from lm.config.tree import Config
from lm.data.prepare import vocab_size_of
from lm.errors import RunError
from lm.experiments.experiment import SHARED_SETTINGS, Experiment, PrimaryMetric
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Slots
from lm.files import read_json
from lm.model.decoder import Decoder, group_of, is_normalizer_parameter
from lm.model.spec import count_parameters, flops_per_token
from lm.runs.folder import ENVIRONMENT, METRICS, read_metrics, training_seconds
from lm.runs.record import starts
from lm.statistics.verdicts import POWER, seeds_needed

_TOKEN_ENTRY_BYTES, _LOSS_BYTES = 65, 70  # bytes of an entry of tokenizer.json, and of a sequence's validation loss


@dataclass(frozen=True)
class Cost:
    """The resources that one run takes."""

    parameters: int  # number of the model's parameters
    tokens: int  # number of tokens that it is trained on
    flops: int  # floating-point operations of its training
    # bytes of checkpoints, tokenizer and validation losses in its folder at the end, if the last checkpoint is the best
    # one
    disk: int


def cost(config: Config, vocab_size: int, branch_step: int = 0) -> Cost:
    """Estimate the resources that one run takes. `branch_step`: the step at which the run branches off another run, or
    0.
    """
    with torch.device("meta"):
        decoder = Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)
    trainer = config.trainer
    parameters, tokens = count_parameters(decoder), config.optim.batch_tokens * (trainer.max_steps - branch_step)
    trained_parameters = {
        name: p for name, p in decoder.named_parameters() if not config.train_only or is_normalizer_parameter(name)
    }
    state_count = sum(
        config.optim.optimizer.kept(group_of(name, p)) * p.numel() for name, p in trained_parameters.items()
    )
    checkpoint_bytes = 4 * (parameters["total"] + state_count)  # fp32

    def occurrences(interval: int) -> int:
        return -(-trainer.max_steps // interval) - branch_step // interval

    phase_count = sum(end > branch_step for end in config.phase_ends[:-1])
    checkpoint_count = min(trainer.keep_checkpoints, occurrences(config.checkpoint_every)) + phase_count
    validation_bytes = occurrences(config.validation_every) * config.eval.sequences * _LOSS_BYTES
    # `lm eval` keeps the validation losses a second time
    disk = checkpoint_count * checkpoint_bytes + vocab_size * _TOKEN_ENTRY_BYTES + 2 * validation_bytes
    return Cost(parameters["total"], tokens, flops_per_token(decoder) * tokens, disk)


Costs = dict[tuple[str, str], Cost]  # resources of a run, by size and arm


def costs(procedure: Procedure) -> Costs | None:
    """Estimate the resources of a run of each size and arm; None if the size of the vocabulary is unknown before text
    is prepared.
    """
    experiment = procedure.experiment
    vocab_size = vocab_size_of(experiment.first_config.data)
    if vocab_size is None:
        return None
    costs_of_arms = {}
    for size, arm in experiment.size_arms:
        run_cost = cost(experiment.example_config(size, arm), vocab_size, arm.branch_step or 0)
        costs_of_arms[size, arm.name] = run_cost if arm.trained else replace(run_cost, tokens=0, flops=0)
    return costs_of_arms


def plan_lines(procedure: Procedure, run_costs: Costs | None, time_words: str, slot_words: str = "") -> Iterator[str]:
    """The lines of a plan: the runs, their resources and settings, the number of seeds that find a difference of
    interest, and notes.

    Args:
        run_costs: the resources of a run by size and arm (`costs`); None: unknown.
        time_words: the time that all runs take.
        slot_words: how many runs are trained at a time, and on which devices.
    """
    experiment = procedure.experiment
    tune, primary, sizes = experiment.tune, experiment.primary, list(experiment.sizes)
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), run_cost in (run_costs or {}).items():
        name = " ".join(filter(None, (size, arm)))
        millions = f"{run_cost.parameters / 1e6:.2f} M parameters, {run_cost.tokens / 1e6:.2f} M tokens"
        yield f"  {name}: {millions}, {decimal(int(run_cost.disk))} on disk a run"
    tuning = f"{tune.heading} as chosen from {tune.table}" if tune.table else "no tuning"
    if tune.grid:
        values = [", ".join(f"{value:g}" for value in axis) for axis in tune.axes]
        grid_words = " and ".join(
            f"{key} over {value_words}" for key, value_words in zip(tune.keys, values, strict=True)
        )
        combinations = f" ({len(tune.rates)} together)" if len(tune.keys) > 1 else ""
        tuning = f"tuning {grid_words}{combinations} with seeds {', '.join(map(str, tune.seeds))}"
    yield f"{tuning}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {(size, arm): run_count for size in sizes for arm, run_count in procedure.n_runs(size).items()}
    run_count = sum(counts.values())
    note = (
        "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted"
        if tune.grid
        else ""
    )
    untrained_count = sum(counts[size, arm.name] for size in sizes for arm in experiment.arms if not arm.trained)
    runs = f"{run_count} runs" + (
        f" ({untrained_count} of them are measured without training)" if untrained_count else ""
    )
    if run_costs:
        tokens, flops, disk = (
            sum(counts[size_arm] * getattr(usage, name) for size_arm, usage in run_costs.items())
            for name in ("tokens", "flops", "disk")
        )
        yield f"{runs}, {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs, about {decimal(int(disk))} on disk{note}"
    else:
        reason = "the vocabulary is not known before the text is there: lm prepare makes it"
        yield f"{runs}{note}; tokens, FLOPs and disk: {reason}"
    yield f"time: {time_words}"
    known_runs, judgement = procedure.known_runs(), procedure.judgement()
    yield f"done: {sum(run.outcome.ended for run in known_runs)} of the {len(known_runs)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; {_seed_count_words(primary, judgement.alpha)}"
    yield from judgement.power_sentences(len(experiment.seeds))
    yield from procedure.notes()
    yield f"runs compute with {_settings_words(experiment)}" + (f"; {slot_words}" if slot_words else "")


def _settings_words(experiment: Experiment) -> str:
    """Describe precision, compilation and threads of the runs; a setting that differs is listed with the sizes and arms
    of each value.
    """
    words = []
    for name in SHARED_SETTINGS:
        names_by_value: dict[object, list[str]] = {}
        for size, arm in experiment.size_arms:
            value = getattr(experiment.example_config(size, arm).trainer, name)
            names_by_value.setdefault(value, []).append(" ".join(filter(None, (size, arm.name))))
        value_words = ", ".join(f"{value} ({', '.join(names)})" for value, names in names_by_value.items())
        words.append(f"{name} {value_words if len(names_by_value) > 1 else next(iter(names_by_value))}")
    return "; ".join(words)


def _seed_count_words(primary: PrimaryMetric, alpha: float) -> str:
    """Say how many seeds are needed to find a difference of interest."""
    runs = "single runs" if primary.reach is None else "the logarithms of single runs"
    margin, effect = primary.matters, f"a difference of {primary.matters:g}"
    if primary.reach is not None:
        margin, effect = math.log1p(primary.matters), f"a factor of {1 + primary.matters:g} in {primary.quantity_name}"
    deviations = margin / 2, margin, 2 * margin
    seed_counts = ", ".join(
        f"{seeds_needed(deviation, margin, alpha)} if it is {deviation:.3g}" for deviation in deviations
    )
    return (
        f"seeds to find {effect} with probability {POWER:g} go by the standard deviation of differences between "
        f"{runs}: {seed_counts}"
    )


# ---------------------------------------------------------------- the time that runs take


Times = dict[tuple[str, str], float]  # seconds of a run, by size and arm


def run_times(procedure: Procedure, run_costs: Costs) -> Times:
    """Estimate the seconds that a run of each size and arm takes, by the finished runs of this experiment. Times of
    other sizes and arms are scaled by FLOPs. {} before the first trained run has finished."""
    measured_times = _finished_run_times(procedure)
    trained = [size_arm for size_arm in measured_times if run_costs[size_arm].flops]  # others take no FLOPs
    seconds = {}
    for key, run_cost in run_costs.items() if trained else ():
        reference = next((size_arm for size_arm in trained if size_arm[1] == key[1]), trained[0])
        seconds[key] = measured_times.get(key, measured_times[reference] * run_cost.flops / run_costs[reference].flops)
    return seconds


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _finished_run_times(procedure: Procedure) -> Times:
    """The mean seconds of finished runs, by size and arm. A run's seconds are the time from its last start to its last
    evaluation, plus its training time before that start."""
    durations = defaultdict(list)
    for run in procedure.known_runs():
        log, start = run.config.run_folder / METRICS, _last_start(run) if run.outcome.state == "finished" else None
        # The log's last line is of the last evaluation in training; evaluation files may be newer.
        if start and log.exists() and (seconds := uninterrupted_seconds(run, max(0.0, log.stat().st_mtime - start[1]))):
            durations[run.size, run.arm].append(seconds)
    return {key: statistics.fmean(values) for key, values in durations.items()}


def uninterrupted_seconds(run: Run, seconds: float) -> float:
    """Seconds that a run would take without interruption: `seconds` since its last start, plus the logged training time
    before that start. 0 if the log does not hold this time."""
    start = _last_start(run)
    if not start or not start[0]:
        return seconds
    log = read_metrics(run.config.run_folder / METRICS).lines
    trained_seconds = training_seconds(log)
    return seconds + trained_seconds - training_seconds(log, start[0]) if trained_seconds else 0.0


def _last_start(run: Run) -> tuple[int, float] | None:
    """The step and the time (POSIX seconds) of a run's last start; None if its folder does not say, or the run is not
    trained.
    """
    try:
        start = starts(read_json(run.config.run_folder / ENVIRONMENT))[-1] if run.trained else {}
        return start["step"], datetime.fromisoformat(start["time"]).timestamp()
    except (RunError, KeyError, IndexError, TypeError, ValueError):
        return None


def total_seconds(procedure: Procedure, times: Times, slots: Slots) -> float:
    """Estimate the seconds until all runs have ended, with as many runs at a time as `slots` allows."""
    counts = {size: procedure.n_runs(size) for size in procedure.experiment.sizes}
    times = {size_arm: seconds * slots.slots_per_run(*size_arm) for size_arm, seconds in times.items()}
    planned_seconds = sum(seconds * counts[size][arm] for (size, arm), seconds in times.items())
    ended_seconds = sum(times[run.size, run.arm] for run in procedure.known_runs() if run.outcome.ended)
    return max(0.0, planned_seconds - ended_seconds) / slots.n_slots
