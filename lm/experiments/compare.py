"""`lm compare`: open or start experiments, print their plans, train their runs, and judge them.

An experiment's folder records the settings that its first start fixed for all runs. It also records the plan from
before the first final run (a run that is judged).
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

import torch

from lm.config.tree import Config
from lm.data.prepare import expected_vocab_size, prepare
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError, value_text
from lm.evaluation.held_out import validation_sequences
from lm.experiments.definition import SHARED_SETTINGS, Experiment, name_with_size, present_plan, read_experiment
from lm.experiments.judging import SizeArm, power_and_noise_sentences
from lm.experiments.page import send_experiment_to_wandb, write_verdicts
from lm.experiments.procedure import Procedure, Run, forget_failures, remaining_commands
from lm.experiments.trainer import (
    Cluster,
    Devices,
    Engine,
    ExperimentTrainer,
    RunsFailed,
    device_slots,
)
from lm.files import folder_lock, json_bytes
from lm.machine import threads_per_process
from lm.model.decoder import Decoder
from lm.model.device import count_gpus, resolve_compile, resolve_precision
from lm.model.spec import count_parameters, flops_per_token
from lm.plain import Plain
from lm.runs.evaluations import model_selection_mask
from lm.runs.folder import (
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    EXPERIMENT_SETTINGS_FILE,
    METRICS_FILE,
    read_environment,
    read_file,
    write_files,
)
from lm.runs.record import run_starts

# key of the plan in EXPERIMENT_SETTINGS_FILE; the plan is null (unknown) if the file was written after final runs were
# measured
PLAN_KEY = "planned"
_NAME_REMEDY = "give the experiment's file another name, or set runs=..."


@dataclass(frozen=True)
class TrainingOptions:
    """Holds the options of `lm compare` that control the training of runs."""

    jobs: int | None = None  # largest number of runs at a time; None: as many as the machine has slots
    retry: bool = False  # whether to try failed runs again
    jobs_per_gpu: int = 1  # number of runs that share each GPU
    engine: Engine | None = None  # the scheduler whose jobs train the runs; None: processes of this machine train them
    workers: int = 1  # number of the scheduler's jobs at a time
    job_options: str = ""  # the options of each job, as `--job-options` gives them


def compare_experiments(
    experiments: list[Experiment],
    options: TrainingOptions,
    plan_only: bool = False,
    report_only: bool = False,
) -> None:
    """Print the plans of experiments, then train and judge the experiments, one after the other.

    Args:
        plan_only: print the plans alone.
        report_only: print no plans and train nothing, but judge the runs that exist.

    Raises LMError: runs failed, or the existing runs can't be judged.
    """
    failure_words = []
    for experiment in experiments:
        if report_only:
            write_verdicts(open_experiment(experiment))
            continue
        # before text is prepared: there may be too few GPUs
        slots = (
            [()] * options.workers if options.engine else device_slots(experiment, options.jobs, options.jobs_per_gpu)
        )
        jobs = 1 if options.engine else len(slots)
        if plan_only:
            print("\n".join(plan_lines(open_experiment(experiment, jobs), slots)))
            continue
        with experiment_lock(experiment.folder):
            cluster = None
            if options.engine:
                cluster = Cluster(experiment.folder, options.job_options, options.engine)
                _start_in_job(experiment, cluster)
            procedure = start_experiment(experiment, jobs)
            print("\n".join(plan_lines(procedure, slots)), flush=True)
            if options.retry:
                forget_failures(procedure)
            try:
                ExperimentTrainer(procedure, slots, cluster).train_all()
            except RunsFailed as error:
                failure_words.append(str(error))
                if not any(run.outcome.has_ended for run in procedure.known_runs()):
                    continue  # there is nothing to judge
            entries = write_verdicts(procedure)
            try:
                send_experiment_to_wandb(procedure, entries)
            except RunError as error:  # later experiments are trained all the same
                failure_words.append(str(error))
    if failure_words:
        raise RunsFailed("; ".join(failure_words))


def print_commands(experiments: list[Experiment], options: TrainingOptions) -> None:
    """Print, for each run that can be started now, one line with the shell commands that train it. Raises LMError as
    `start_experiment` does.
    """
    for experiment in experiments:
        with redirect_stdout(sys.stderr):  # messages on the text and on other processes are no commands
            procedure = start_experiment(experiment, options.jobs or 1)
            if options.retry:
                forget_failures(procedure)
        for run in ExperimentTrainer(procedure, [()]).runs_to_start():
            python = [sys.executable, "-P", "-m", "lm"]  # -P: a folder `lm` in the current one is not the package
            shell_commands = [shlex.join([*python, *command]) for command in remaining_commands(run)]
            print(" && ".join(shell_commands), flush=True)


def _start_in_job(experiment: Experiment, cluster: Cluster) -> None:
    """Prepare the training text of an experiment on this machine. If the experiment was never started, start it in a
    scheduler's job, so that precision, compilation and threads are chosen for the machines that train."""
    prepare(experiment.first_config.data, progress=True)
    if not (experiment.folder / EXPERIMENT_SETTINGS_FILE).exists():
        print(f"{experiment.name}: a first job settles precision, compilation and threads", flush=True)
        file, overrides = experiment.file, [*experiment.overrides]
        cluster.result(cluster.submit(lambda: start_experiment(read_experiment(file, overrides))))


# ---------------------------------------------------------------- opening and starting an experiment


@contextmanager
def experiment_lock(folder: Path) -> Iterator[None]:
    """Make an experiment's folder, and hold the system's lock of this folder during the body of a `with` statement. The
    lock ends with the process. Raises RunError: the folder can't be made, or another process works on the experiment.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: can't make the folder: {error.strerror}") from None
    words = "another lm compare works on it; --report-only and --plan show how far it is"
    with folder_lock(folder, words) as lock_problem:
        if lock_problem:
            print(f"note: {lock_problem}: start no other lm compare of this experiment", file=sys.stderr)
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def open_experiment(experiment: Experiment, jobs: int = 1) -> Procedure:
    """Return an experiment's procedure, which knows the runs that are needed, and their outcomes by the run folders as
    they are now. Nothing is prepared, trained or written.

    If the file leaves precision, compilation or threads open, the settings of the first start hold. Before a first
    start they are resolved for this machine.

    jobs: the number of runs at a time, on which the number of threads depends.

    Raises RunError: the experiment's folder is a run folder, or the record of the first start
    (EXPERIMENT_SETTINGS_FILE) is damaged.
    """
    if (experiment.folder / CONFIG_FILE).exists():
        raise RunError(f"{experiment.folder}: a run folder; {_NAME_REMEDY}")
    recorded = _first_start_record(experiment)
    procedure = Procedure(experiment.fill_unset_settings(recorded or _machine_settings(experiment, jobs)))
    _note_plan_changes(procedure, recorded)
    return procedure


def start_experiment(experiment: Experiment, jobs: int = 1) -> Procedure:
    """Start an experiment: prepare its text, and fix the settings that all its runs share.

    Raises LMError: as for `open_experiment`; or the text can't be prepared, or differs from the text of the first runs.
    """
    store = prepare(experiment.first_config.data, progress=True)
    procedure = open_experiment(experiment, jobs)  # the vocabulary is known now
    experiment, file = procedure.experiment, procedure.experiment.folder / EXPERIMENT_SETTINGS_FILE
    _check_held_out_text(experiment, store)
    trainer, recorded = experiment.first_config.trainer, _first_start_record(experiment)
    has_measured_runs = has_any_final_evaluation(experiment)
    plan = None if has_measured_runs else present_plan(experiment)
    settings = {"data_fingerprint": store.fingerprint} | {name: getattr(trainer, name) for name in SHARED_SETTINGS}
    settings |= recorded
    # the plan may change before a final run is measured
    if not recorded or (not has_measured_runs and settings.get(PLAN_KEY) != plan):
        settings[PLAN_KEY] = plan
        file.parent.mkdir(parents=True, exist_ok=True)
        write_files(file.parent, {file.name: json_bytes(settings)})
    if settings["data_fingerprint"] != store.fingerprint:
        raise RunError(f"{file}: the text is not what the first runs were trained on; {_NAME_REMEDY}")
    return procedure


def _check_held_out_text(experiment: Experiment, store: Store) -> None:
    """Check that a held-out document is left to report results on and, with tuning, another to choose rates on. Raises
    ConfigError otherwise.
    """
    config = experiment.first_config
    if not experiment.has_text_data:
        return
    labels = validation_sequences(store, config).document_labels
    chosen = model_selection_mask(store.fingerprint, labels)
    for use, mask in {"report": ~chosen, "choose learning rates": chosen | (not experiment.is_tuned)}.items():
        if not mask.any():
            reason = f"none of the {len(set(labels.tolist()))} held-out documents is left to {use} on"
            raise ConfigError(
                [Problem("base.data.val_fraction", config.data.val_fraction, reason, "hold out more text")]
            )


def _first_start_record(experiment: Experiment) -> dict[str, Plain]:
    """Return what the experiment's first start recorded in EXPERIMENT_SETTINGS_FILE; {} before the first start.
    Raises RunError: the file was altered."""
    folder, advice = experiment.folder, "bring it back: it holds what was planned before the first run"
    return (
        json.loads(read_file(folder, EXPERIMENT_SETTINGS_FILE, advice))
        if (folder / EXPERIMENT_SETTINGS_FILE).exists()
        else {}
    )


def _machine_settings(experiment: Experiment, jobs: int) -> dict[str, Plain]:
    """Choose the `SHARED_SETTINGS`, such as precision and number of threads, for this machine. Whether runs are
    compiled depends on the FLOPs of one baseline run, of the first size, and on their number: baseline runs share
    compiled code."""
    config, tune = experiment.first_config, experiment.tune
    accelerator = "gpu" if count_gpus(config) else "cpu"
    precision = resolve_precision(config, accelerator, {}).value
    runs = len(experiment.seeds) + len(tune.grid) * len(tune.seeds)
    flops = run_cost(config, expected_vocab_size(config.data) or 1).flops
    processes = jobs * (1 if accelerator == "gpu" else config.trainer.devices)  # a run takes a slot for each GPU
    return {
        "precision": 32 if precision == "32" else precision,
        "compile": resolve_compile(config, flops, accelerator, {}, runs).value == "true",
        "threads": config.trainer.threads or threads_per_process(processes),
    }


# ---------------------------------------------------------------- what was changed since the plan


def has_any_final_evaluation(experiment: Experiment) -> bool:
    """Return whether the experiment's folder has an evaluation of a final run (a run that is judged), also of one with
    another configuration than now."""
    configs = chain(*(experiment.folder.glob(pattern) for pattern in (f"*/{CONFIG_FILE}", f"*/*/{CONFIG_FILE}")))
    return any(
        any((path.parent / EVALUATIONS_FOLDER).glob("*.csv")) and b"stage: final" in path.read_bytes()
        for path in configs
    )


def _describe_changes(plan: dict[str, dict], present: dict[str, dict]) -> dict[str, list[str]]:
    """Say what differs between two plans, by SIZE/ARM; keys that concern all arms stand under an empty name."""
    sides, changes = [{"": side["shared"]} | side["arms"] for side in (plan, present)], {}
    for name in dict.fromkeys(chain(*sides)):
        was, now = (side.get(name, {}) for side in sides)
        changes[name] = [
            f"{key} was {value_text(was.get(key))}, is {value_text(now.get(key))}"
            for key in was | now
            if was.get(key) != now.get(key)
        ]
        if not (was and now):
            changes[name] = ["added" if now else "left out"]
    return {name: words for name, words in changes.items() if words}


def _note_plan_changes(procedure: Procedure, recorded: dict[str, Plain]) -> None:
    """Compare the present plan with the `recorded` one. In `procedure`, set notes on the changes, and the arms whose
    verdicts the changes make exploratory. A change before any final run was measured has no effect.

    A change of an arm concerns the verdicts on this arm and on arms that start from its weights. Changes of the
    baseline and all other changes concern all verdicts. Changes of tuning are noted, but make no verdict exploratory.
    """
    experiment, plan, present = procedure.experiment, recorded.get(PLAN_KEY), present_plan(procedure.experiment)
    if plan == present or not has_any_final_evaluation(experiment):
        return
    every_arm = frozenset((size, arm.name) for size, arm in experiment.size_arms)
    if plan is None:
        note = f"what was planned before the first run is not known: {EXPERIMENT_SETTINGS_FILE} does not say"
        procedure.plan_notes, procedure.exploratory_arms = [f"exploratory: {note}"], every_arm
        return
    changes, sources = _describe_changes(plan, present), {arm.name: arm.source_arm for arm in experiment.arms}
    shared = changes.pop("", [])
    tuning = [words for words in shared if words.startswith("tune.")]
    words = [words for words in shared if words not in tuning]

    def is_changed(size: str, arm: str) -> bool:
        return bool(arm) and (name_with_size(size, arm) in changes or is_changed(size, sources[arm]))

    concerns_all = words or changes.keys() - present["arms"].keys()
    concerns_all = concerns_all or any(is_changed(size, experiment.arms[0].name) for size in experiment.sizes)
    procedure.exploratory_arms = frozenset(pair for pair in every_arm if concerns_all or is_changed(*pair))
    names: dict[str, list[str]] = {}
    for name, arm_words in changes.items():
        names.setdefault(", ".join(arm_words), []).append(name)
    words += [f"{', '.join(arms)}: {text}" for text, arms in names.items()]
    lines = {"exploratory: changed since the plan": words, "changed since the plan": tuning}
    procedure.plan_notes = [f"{start}: {'; '.join(entries)}" for start, entries in lines.items() if entries]


# ---------------------------------------------------------------- the plan


def plan_lines(procedure: Procedure, slots: list[Devices]) -> Iterator[str]:
    """Yield the lines of a plan: the runs, their resources, time and settings, the chance to find a difference with
    these seeds, and notes. `slots` lists the devices of each of the concurrent runs."""
    experiment, run_costs = procedure.experiment, costs_by_arm(procedure)
    tune, primary = experiment.tune, experiment.primary_metric
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), run in run_costs.items():
        resources = f"{run.n_parameters / 1e6:.2f} M parameters, {run.n_tokens / 1e6:.2f} M tokens a run"
        yield f" {name_with_size(size, arm)}: {resources}"
    tuning = f"{tune.key} as chosen from {tune.table}" if tune.table else "no tuning"
    if tune.grid:
        rates, seeds = ", ".join(f"{rate:g}" for rate in tune.grid), ", ".join(map(str, tune.seeds))
        tuning = f"tuning {tune.key} over {rates} with seeds {seeds}"
    yield f"{tuning}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {
        (size, arm): count for size in experiment.sizes for arm, count in procedure.count_runs_by_arm(size).items()
    }
    growth = "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted"
    growth *= bool(tune.grid)
    size_words = f"{growth}; tokens and FLOPs: not known before lm prepare has made the vocabulary"
    if run_costs:
        tokens, flops = (
            sum(counts[size_arm] * getattr(run_cost, name) for size_arm, run_cost in run_costs.items())
            for name in ("n_tokens", "flops")
        )
        size_words = f", {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs{growth}"
    yield f"{sum(counts.values())} runs{size_words}"
    known_runs = procedure.known_runs()
    ended_runs = [run for run in known_runs if run.outcome.has_ended]
    ended = [(finished_run_seconds(run), run_costs[run.size, run.arm].flops) for run in ended_runs] if run_costs else []
    if timed := [(seconds, run_flops) for seconds, run_flops in ended if seconds and run_flops]:
        all_seconds, timed_flops = map(sum, zip(*timed, strict=True))
        left_flops = flops - sum(run_flops for _, run_flops in ended)
        left = duration_text(max(0.0, left_flops) * all_seconds / timed_flops / len(slots))
        yield f"time: about {left} for what is left, by the FLOPs of the runs that have ended"
    else:
        yield "time: known once the first run has ended"
    yield f"done: {len(ended_runs)} of the {len(known_runs)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; a difference of {primary.matters:g} matters"
    yield from power_and_noise_sentences(procedure.judgement(), len(experiment.seeds))
    yield from procedure.notes()
    trainers = [experiment.example_config(size, arm).trainer for size, arm in experiment.size_arms]
    settings = [
        f"{key} {' or '.join({str(getattr(trainer, key)): 0 for trainer in trainers})}" for key in SHARED_SETTINGS
    ]
    yield f"runs compute with {'; '.join(settings)}; {len(slots)} at a time"


@dataclass(frozen=True)
class RunCost:
    """Holds the resources that one run takes."""

    n_parameters: int  # number of the model's parameters
    n_tokens: int  # number of tokens that it is trained on
    flops: int  # floating-point operations of its training


def run_cost(config: Config, vocab_size: int, first_step: int = 0) -> RunCost:
    """Return the resources of a run that is trained from `first_step` on."""
    with torch.device("meta"):
        decoder = Decoder(config.model_in_phase(0), vocab_size, config.data.seq_len, seed=None)
    tokens = config.optim.batch_tokens * (config.trainer.max_steps - first_step)
    return RunCost(count_parameters(decoder)["total"], tokens, flops_per_token(decoder) * tokens)


def costs_by_arm(procedure: Procedure) -> dict[SizeArm, RunCost]:
    """Return the resources of a run of each size and arm; {} if the size of the vocabulary is unknown before text is
    prepared."""
    experiment, costs_of_arms = procedure.experiment, {}
    vocab_size = expected_vocab_size(experiment.first_config.data)
    for size, arm in experiment.size_arms if vocab_size else ():
        config = experiment.example_config(size, arm)
        first_step = arm.branch_step or 0 if arm.is_trained else config.trainer.max_steps
        costs_of_arms[size, arm.name] = run_cost(config, vocab_size, first_step)
    return costs_of_arms


def finished_run_seconds(run: Run) -> float:
    """Return the seconds that a finished run took; 0 if it was not trained in one go, or its folder does not say."""
    folder = run.config.run_folder
    with suppress(RunError, KeyError, ValueError, OSError):
        (start,) = run_starts(read_environment(folder)) if run.outcome.state == "finished" else ()
        return (folder / METRICS_FILE).stat().st_mtime - datetime.fromisoformat(start["time"]).timestamp()
    return 0.0


def duration_text(seconds: float) -> str:
    """Return a time in words, such as `2 h 5 min`."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
