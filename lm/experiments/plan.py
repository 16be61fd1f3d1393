"""The plan of an experiment: its runs, the cost of each, and the time that all take."""

import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from rich.filesize import decimal

from lm.config.load import to_yaml
from lm.config.tree import Config, effect_of
from lm.data.prepare import open_prepared, vocab_size_of
from lm.errors import ConfigError, RunError, one_line
from lm.experiments.experiment import SHARED_SETTINGS, Experiment, PrimaryMetric
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Devices, Slots, Stopped, interruptible, start_process
from lm.files import read_json, unfinished, write_json, write_text
from lm.machine import usable_cores
from lm.model.decoder import Decoder, group_of, is_normalizer_parameter
from lm.model.spec import count_parameters, flops_per_token
from lm.runs.folder import ENVIRONMENT, METRICS, read_metrics, step_path, step_seconds, training_seconds
from lm.runs.record import starts
from lm.schema import flatten, to_plain
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


PILOT = "pilot.json"  # file in the experiment's folder: seconds of a run, by a hash of the settings that decide them
PILOT_SECONDS = 10.0  # most seconds that the pilots of one command take, without the start of their processes
MAX_PILOTS = 16  # largest number of arms that are timed
PILOT_COMMAND = [sys.executable, "-m", "lm.training.pilot"]
_OUTPUT_FILE, _ERROR_FILE = "output", "errors"  # names of a pilot's files

Times = dict[tuple[str, str], float]  # seconds of a run, by size and arm


def run_times(procedure: Procedure, run_costs: Costs, slots: Slots, budget: float = PILOT_SECONDS) -> tuple[Times, str]:
    """Estimate the seconds that a run of each size and arm takes. Returns the seconds, and their source in words.

    Times of finished runs of this experiment are used first. If no trained run has finished, arms of the first size are
    timed by pilots, which are processes that train each arm for a few steps. As many pilots run at a time as runs in
    training, within limits that follow from `budget` (`_wait_for_pilots`). The file PILOT keeps the times. Times of
    other sizes and arms are scaled by FLOPs.

    Raises:
        ConfigError: the pilot refuses the configuration of an arm.
        RunError: the pilot failed, or timed no arm within its budget.
        DataError: there is no text yet on which the pilot can train.
    """
    measured_times, source = _finished_run_times(procedure), "the runs that have ended"
    if not any(run_costs[size_arm].flops for size_arm in measured_times):
        measured_times, source = _pilot_times(procedure, run_costs, slots, budget)
    if not measured_times:
        remedy = "plan again on an idle machine, one experiment at a time, or let a run end"
        raise RunError(f"no arm was timed within {max(0.0, budget):.3g} s: {remedy}")
    default_size_arm = next(
        size_arm for size_arm in measured_times if run_costs[size_arm].flops
    )  # arms that are not trained take no FLOPs
    seconds = {}
    for key, run_cost in run_costs.items():
        reference = next(
            (size_arm for size_arm in measured_times if size_arm[1] == key[1] and run_costs[size_arm].flops),
            default_size_arm,
        )
        seconds[key] = measured_times.get(key, measured_times[reference] * run_cost.flops / run_costs[reference].flops)
    return seconds, source


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


def _pilot_times(procedure: Procedure, run_costs: Costs, slots: Slots, budget: float) -> tuple[Times, str]:
    """The seconds of a run of each timed arm in the first size, and the source of the times in words. Of the arms
    without a time in the file PILOT, at most MAX_PILOTS are timed, within `budget` seconds. Arms of equal
    `_timing_hash` are timed once. Arms whose normalizers or FLOPs differ from those of all arms before them come
    first.
    """
    experiment = procedure.experiment
    file, size, arms = (
        experiment.folder / PILOT,
        next(iter(experiment.sizes)),
        [arm for arm in experiment.arms if arm.trained],
    )
    branches = {
        arm.name: "" if arm.branch_step is None else str(step_path(experiment.folder, arm.branch_step)) for arm in arms
    }
    configs = {arm.name: replace(experiment.example_config(size, arm), branch_from=branches[arm.name]) for arm in arms}
    keys = {name: _timing_hash(config, slots) for name, config in configs.items()}
    file_seconds = read_json(file).get("seconds") if file.exists() else None  # files of older versions count as empty
    known_seconds = (
        {key: float(value) for key, value in file_seconds.items() if len(key) == 16}
        if isinstance(file_seconds, dict)
        else {}
    )
    untimed_names = {key: name for name, key in reversed(keys.items()) if key not in known_seconds}
    step_times: dict[str, float] = {}
    if untimed_names and budget > 0:
        if not experiment.first_config.data.symbolic:
            open_prepared(experiment.first_config.data)
        kinds = {
            name: (*sorted(config.normalizer_names), run_costs[size, name].flops) for name, config in configs.items()
        }
        first_names = {kinds[name]: name for name in reversed(configs)}.values()
        names = sorted(untimed_names.values(), key=lambda name: (name not in first_names, list(configs).index(name)))[
            :MAX_PILOTS
        ]
        run_seconds, step_times = _time_configurations(
            {name: configs[name] for name in names}, file, slots.concurrent_devices(), budget
        )
        known_seconds |= {keys[name]: seconds for name, seconds in run_seconds.items()}
        write_json(file, {"seconds": known_seconds})
    whole_run_seconds = {name: known_seconds[key] for name, key in keys.items() if key in known_seconds}
    timed_arms = "each arm" if len(whole_run_seconds) == len(keys) else f"{len(whole_run_seconds)} of {len(keys)} arms"
    words = (
        f"a pilot of some steps{f' of {timed_arms}' if whole_run_seconds else ''}, "
        f"{len(slots.concurrent_devices())} at a time"
    )
    if step_times:
        words += f"; of {', '.join(step_times)} the steps alone, as evaluations took too long"
    if len(whole_run_seconds) + len(step_times) < len(keys):
        words += "; the other arms were not timed: by FLOPs"
    return {(size, name): seconds for name, seconds in (step_times | whole_run_seconds).items()}, words


def _timing_hash(config: Config, slots: Slots) -> str:
    """Hash all that decides the time of a run in these slots on this machine, without names, seeds and compilation. A
    float of model, optimizer or phases, such as a learning rate, is hashed as zero or not zero. Floats of
    `optim.groups` are hashed in full, as only their default values are accepted if a model has no parameters in the
    group.
    """
    settings = {
        path: value
        for path, value in flatten(to_plain(config)).items()
        if effect_of(path).affects not in ("label", "seed")
    }
    settings.pop("trainer.compile", None)  # pilots are eager
    for path, value in settings.items():
        if (
            isinstance(value, float)
            and path.startswith(("model", "optim", "phases"))
            and not path.startswith("optim.groups")
        ):
            settings[path] = bool(value)
    content = [
        settings,
        slots.n_slots,
        platform.node(),
        usable_cores(),
        *([slots.gpus, slots.slots_per_gpu] if slots.gpus else []),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _time_configurations(
    configs: dict[str, Config], file: Path, process_devices: list[Devices], budget: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Time a run of each configuration. Returns the seconds of whole runs, with the start of their process; and the
    seconds of steps alone, for runs whose evaluations did not end within `budget` seconds.

    Processes divide the configurations among them and work at the same time, as in training, each on one entry of
    `process_devices`. A process times those of its configurations that run on one device, or the first one if all run
    on several devices. With fewer configurations than processes, several processes time the same configuration. The run
    folders lie beside `file` until timing ends.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    names, start_time, jobs = list(configs), time.time(), len(process_devices)
    groups = [names[process_index::jobs] or [names[process_index % len(names)]] for process_index in range(jobs)]
    # Lightning starts a run's other processes with the same arguments: a run on several devices has a process of its
    # own
    groups = [[name for name in group if configs[name].world_size == 1] or group[:1] for group in groups]
    with (
        interruptible() as signals,
        tempfile.TemporaryDirectory(dir=file.parent, prefix=unfinished(file)) as parent_folder,
    ):
        folders = [Path(parent_folder, str(process_index)) for process_index in range(jobs)]
        pilots = []
        try:
            for folder, group, devices in zip(folders, groups, process_devices, strict=True):
                for name in group:
                    write_text(folder / f"{name}.yaml", to_yaml(replace(configs[name], name=name, runs=str(folder))))
                command = [*PILOT_COMMAND, *(str(folder / f"{name}.yaml") for name in group)]
                with (folder / _OUTPUT_FILE).open("wb") as output, (folder / _ERROR_FILE).open("wb") as errors:
                    pilots.append(start_process(command, output, errors, devices))
            _wait_for_pilots(pilots, folders, start_time, budget)
        except KeyboardInterrupt:
            number = signals[-1] if signals else signal.SIGINT
            raise Stopped(
                f"stopped by {signal.Signals(number).name} while runs were timed: nothing was trained", number
            ) from None
        finally:
            late_pilots = [process for process in pilots if process.poll() is None]
            for process in late_pilots:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
                process.wait()
        run_seconds, step_times = defaultdict(list), {}
        for process, folder, group in zip(pilots, folders, groups, strict=True):
            if process.returncode and process not in late_pilots:
                output = (folder / _ERROR_FILE).read_text(encoding="utf-8", errors="replace").strip() or "no output"
                message = output.splitlines()[-1].removeprefix("error: ")
                if process.returncode == ConfigError.exit_code:  # its runs would end with the same error
                    raise ConfigError(f"{', '.join(group)}: {message}")
                raise RunError(f"a pilot of the experiment's runs failed: {one_line(RuntimeError(message))}")
            first_line, *lines = _printed_lines(folder) or [{}]
            for name, line in zip(group, lines, strict=False):
                run_seconds[name].append(line["seconds"] + first_line["begun"] - start_time)
            if (
                process in late_pilots
                and len(lines) < len(group)
                and (step_time := step_seconds(folder / group[len(lines)] / METRICS))
            ):
                config = configs[group[len(lines)]]
                step_times[group[len(lines)]] = step_time * (config.trainer.max_steps - (config.first_step or 0))
    whole_run_seconds = {name: statistics.fmean(seconds) for name, seconds in run_seconds.items()}
    return whole_run_seconds, {name: seconds for name, seconds in step_times.items() if name not in whole_run_seconds}


def _wait_for_pilots(pilots: list[subprocess.Popen], folders: list[Path], start_time: float, budget: float) -> None:
    """Wait until all pilots, the processes that time runs, have ended, at most until `budget` seconds after the last
    one began to time. While one has not begun, wait at most until 2 * `budget` seconds after `start_time`."""
    while any(process.poll() is None for process in pilots):
        first_times = [lines[0]["begun"] for folder in folders if (lines := _printed_lines(folder))]
        if time.time() > (max(first_times) + budget if len(first_times) == len(folders) else start_time + 2 * budget):
            return
        time.sleep(0.05)


def _printed_lines(folder: Path) -> list[dict[str, float]]:
    """The complete lines of JSON that a pilot has printed so far."""
    return [
        json.loads(line)
        for line in (folder / _OUTPUT_FILE).read_text(encoding="utf-8").split("\n")[:-1]
        if line.startswith("{")
    ]


def total_seconds(procedure: Procedure, times: Times, slots: Slots) -> float:
    """Estimate the seconds until all runs have ended, with as many runs at a time as `slots` allows."""
    counts = {size: procedure.n_runs(size) for size in procedure.experiment.sizes}
    times = {size_arm: seconds * slots.slots_per_run(*size_arm) for size_arm, seconds in times.items()}
    planned_seconds = sum(seconds * counts[size][arm] for (size, arm), seconds in times.items())
    ended_seconds = sum(times[run.size, run.arm] for run in procedure.known_runs() if run.outcome.ended)
    return max(0.0, planned_seconds - ended_seconds) / slots.n_slots
