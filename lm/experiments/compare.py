"""`lm compare`: plan experiments, train their runs, judge them, and write the results."""

import math
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path

import pandas as pd

from lm.data.prepare import prepare, vocab_size_of
from lm.errors import RunError
from lm.experiments.experiment import SHARED_SETTINGS, Cost, Experiment, cost
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import experiment_lock, is_measured, open_experiment, start
from lm.experiments.judging import INTERVALS, experiment_noise, print_verdicts
from lm.experiments.loop import (
    Cluster,
    Devices,
    Engine,
    ExperimentTrainer,
    RunsFailed,
    failures,
    forget_failures,
    gpu_words,
    slots_of,
)
from lm.experiments.page import experiment_files, question, trend_table, trends
from lm.experiments.procedure import Procedure, Run, commands
from lm.files import json_bytes, read_json, write_together
from lm.plain import Plain
from lm.report.html import PAGE
from lm.report.tables import csv_text, numeral, print_tables, table_from_rows, with_unit
from lm.runs.folder import DIVERGED, ENVIRONMENT, METRICS, RESOLVED_FILE, read_environment
from lm.runs.record import starts
from lm.training.wandb_runs import send_report

VERDICTS, TUNING, REPORT = "verdicts", "tuning", "report"


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `lm compare` that control the training of runs."""

    jobs: int | None = None  # largest number of runs at a time; None: as many as the machine has slots
    retry: bool = False  # whether to try failed runs again
    jobs_per_gpu: int = 1  # number of runs that share each GPU
    engine: Engine | None = None  # the scheduler whose jobs train the runs; None: processes of this machine train them
    workers: int = 1  # number of the scheduler's jobs at a time
    job_options: str = ""  # the options of each job, as `--job-options` gives them

    def slots(self, experiment: Experiment) -> list[Devices]:
        """Return the slots for an experiment's runs. Raises ConfigError: a run needs more GPUs than there are."""
        return [()] * self.workers if self.engine else slots_of(experiment, self.jobs, self.jobs_per_gpu)

    def cluster(self, folder: Path) -> Cluster | None:
        """Return the `Cluster` that trains an experiment's runs in jobs; None without a scheduler. Raises LMError as
        `Cluster` does.
        """
        return Cluster(folder, self.job_options, self.engine) if self.engine else None


def compare_experiments(
    files: list[Path],
    overrides: list[str],
    options: TrainingOptions,
    plan_only: bool = False,
    report_only: bool = False,
) -> None:
    """Print the plans of experiments, then train and judge the experiments, one after the other.

    Args:
        plan_only: print the plans alone.
        report_only: print no plans and train nothing, but judge the runs that exist.

    Raises LMError: an experiment's file is wrong, or runs failed.
    """
    failure_words = []
    for path, experiment in [(path, read_experiment(path, overrides)) for path in files]:
        if report_only:
            _write_verdicts(open_experiment(path, overrides))
            continue
        slots = options.slots(experiment)  # before text is prepared: there may be too few GPUs
        jobs = 1 if options.engine else len(slots)
        if plan_only:
            print("\n".join(plan_lines(open_experiment(path, overrides, jobs), slots)))
            continue
        with experiment_lock(experiment.folder):
            if options.engine:
                _start_in_job(experiment, path, options)
            procedure = start(path, overrides, jobs)
            print("\n".join(plan_lines(procedure, slots)), flush=True)
            try:
                _train_runs(procedure, options, slots)
            except RunsFailed as error:
                failure_words.append(str(error))
                if not any(run.outcome.ended for run in procedure.known_runs()):
                    continue  # there is nothing to judge
            entries = _write_verdicts(procedure)
            try:
                _send_report(procedure, entries)
            except RunError as error:  # later experiments are trained all the same
                failure_words.append(str(error))
    if failure_words:
        raise RunsFailed("; ".join(failure_words))


def print_commands(files: list[Path], overrides: list[str], options: TrainingOptions) -> None:
    """Print, for each run that can be started now, one line with the shell commands that train it. Raises LMError: a
    file is wrong.
    """
    for path in files:
        with redirect_stdout(sys.stderr):  # messages on the text and on other processes are no commands
            procedure = start(path, overrides, options.jobs or 1)
            folder = procedure.experiment.folder
            if options.retry:
                forget_failures(procedure)
        for run in ExperimentTrainer(procedure, [()]).free_runs():
            python = [sys.executable, "-P", "-m", "lm"]  # -P: a folder `lm` in the current one is not the package
            shell_commands = [shlex.join([*python, *command]) for command in commands(run, folder)]
            print(" && ".join(shell_commands), flush=True)


def _start_in_job(experiment: Experiment, path: Path, options: TrainingOptions) -> None:
    """Prepare the training text of an experiment on this machine. If the experiment was never started, start it in a
    scheduler's job, so that precision, compilation and threads are chosen for the machines that train."""
    cluster = options.cluster(experiment.folder)
    prepare(experiment.first_config.data, progress=True)
    if not (experiment.folder / RESOLVED_FILE).exists():
        print(f"{experiment.name}: a first job settles precision, compilation and threads", flush=True)
        cluster.result(cluster.submit(partial(start, path, [*experiment.overrides])))


def _train_runs(procedure: Procedure, options: TrainingOptions, slots: list[Devices]) -> None:
    """Train the runs of an experiment. Raises RunsFailed."""
    if options.retry:
        forget_failures(procedure)
    ExperimentTrainer(procedure, slots, options.cluster(procedure.experiment.folder)).train_all()


# ---------------------------------------------------------------- the plan


def plan_lines(procedure: Procedure, slots: list[Devices]) -> Iterator[str]:
    """The lines of a plan: the runs, their resources, time and settings, what the seeds find, and notes."""
    experiment, run_costs = procedure.experiment, costs(procedure)
    tune, primary = experiment.tune, experiment.primary
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), run_cost in run_costs.items():
        name = " ".join(filter(None, (size, arm)))
        yield f"  {name}: {run_cost.parameters / 1e6:.2f} M parameters, {run_cost.tokens / 1e6:.2f} M tokens a run"
    tuning = f"{tune.key} as chosen from {tune.table}" if tune.table else "no tuning"
    if tune.grid:
        rates, seeds = ", ".join(f"{rate:g}" for rate in tune.grid), ", ".join(map(str, tune.seeds))
        tuning = f"tuning {tune.key} over {rates} with seeds {seeds}"
    yield f"{tuning}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {(size, arm): count for size in experiment.sizes for arm, count in procedure.n_runs(size).items()}
    untrained = sum(counts[size, arm.name] for size, arm in experiment.size_arms if not arm.trained)
    runs = f"{sum(counts.values())} runs" + f" ({untrained} of them are measured without training)" * bool(untrained)
    growth = "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted"
    growth *= bool(tune.grid)
    size_words = f"{growth}; tokens and FLOPs: not known before lm prepare has made the vocabulary"
    if run_costs:
        tokens, flops = (
            sum(counts[size_arm] * getattr(run_cost, name) for size_arm, run_cost in run_costs.items())
            for name in ("tokens", "flops")
        )
        size_words = f", {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs{growth}"
    yield f"{runs}{size_words}"
    known_runs, judgement = procedure.known_runs(), procedure.judgement()
    if times := run_times(known_runs, run_costs):
        in_all = sum(count * times[size_arm] for size_arm, count in counts.items())
        ended = sum(times[run.size, run.arm] for run in known_runs if run.outcome.ended)
        left = duration(max(0.0, in_all - ended) / len(slots))
        yield f"time: about {left} for what is left, by the runs that have ended"
    else:
        yield "time: known once the first run has ended"
    yield f"done: {sum(run.outcome.ended for run in known_runs)} of the {len(known_runs)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; a difference of {primary.matters:g} matters"
    yield from judgement.power_sentences(len(experiment.seeds))
    yield from filter(None, [experiment_noise(judgement)])
    yield from procedure.notes()
    trainers = [experiment.example_config(size, arm).trainer for size, arm in experiment.size_arms]
    settings = [
        f"{key} {' or '.join({str(getattr(trainer, key)): 0 for trainer in trainers})}" for key in SHARED_SETTINGS
    ]
    gpus = gpu_words(dict.fromkeys(chain(*slots)))
    yield f"runs compute with {'; '.join(settings)}; {len(slots)} at a time{f' on {gpus}' if gpus else ''}"


def costs(procedure: Procedure) -> dict[tuple[str, str], Cost]:
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


def run_times(runs: list[Run], run_costs: dict[tuple[str, str], Cost]) -> dict[tuple[str, str], float]:
    """Estimate the seconds that a run of each size and arm takes, by the finished ones among `runs` that were trained
    in one go. Times of other sizes and arms are scaled by FLOPs. {} before the first trained run has finished."""
    durations = defaultdict(list)
    for run in runs:
        folder = run.config.run_folder
        with suppress(RunError, KeyError, ValueError, OSError):  # a folder that does not say
            (start,) = starts(read_environment(folder)) if run.outcome.state == "finished" else ()
            began = datetime.fromisoformat(start["time"]).timestamp()
            durations[run.size, run.arm].append((folder / METRICS).stat().st_mtime - began)
    measured = {size_arm: statistics.fmean(values) for size_arm, values in durations.items()}
    reference = next((size_arm for size_arm in measured if size_arm in run_costs and run_costs[size_arm].flops), None)
    return {
        size_arm: measured.get(size_arm, measured[reference] * run_cost.flops / run_costs[reference].flops)
        for size_arm, run_cost in (run_costs if reference else {}).items()
    }


def duration(seconds: float) -> str:
    """A time in words, such as `2 h 5 min`."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


# ---------------------------------------------------------------- the results


def _write_verdicts(procedure: Procedure) -> list[dict[str, Plain]]:
    """Print the verdicts. Write verdicts, tuning results and report into the experiment's folder, either all files or
    none. Returns `Judgement.entries`. Raises LMError: no run has ended, or a run's file can't be read.
    """
    experiment, primary, failed_runs = procedure.experiment, procedure.experiment.primary, failures(procedure)
    if not any(run.outcome.ended for run in procedure.known_runs()):
        reason, remedy = "no run has ended yet", "".join(procedure.plan_notes[:1]) or "leave --report-only out to train"
        if failed_runs:
            reason = f"no run has a result; {len(failed_runs)} failed, the first with {failed_runs[0][1]}"
            remedy = "--retry tries again"
        elif is_measured(experiment):
            reason = "none of the runs that the file now asks for has ended"
        raise RunError(f"{experiment.folder}: {reason}; {remedy}")
    judgement = procedure.judgement()
    entries, notes = judgement.entries(), procedure.notes()
    verdicts = {"primary": vars(primary), "notes": notes, "arms": entries}
    if size_trends := trends(procedure, judgement):
        verdicts["trends"] = size_trends
    files = {
        experiment.folder / f"{VERDICTS}.json": json_bytes(verdicts),
        experiment.folder / f"{VERDICTS}.csv": csv_text(entries, intervals=INTERVALS).encode(),
    }
    if frames := [runs for runs in map(procedure.tuning_runs, experiment.sizes) if len(runs)]:
        tuning = pd.concat(frames)
        files[experiment.folder / f"{TUNING}.csv"] = tuning.replace(math.inf, DIVERGED).to_csv(index=False).encode()
        metric = experiment.choice_metric
        keys = [tuning[name] for name in ("size", "arm", "rate")]
        means = tuning[metric].fillna(math.inf).groupby(keys, sort=False).mean()
        rows = [
            ({"size": size} if size else {})
            | {"arm": arm, "rate": f"{rate:g}", metric: numeral(mean if math.isfinite(mean) else None)}
            for (size, arm, rate), mean in means.items()
        ]
        title = f"tuning: mean {metric} ({experiment.data_words(metric, 'selection')})"
        print_tables(table_from_rows(title, rows, dict.fromkeys(("rate", metric), "number")))
    rate_note = f", each arm at its own {experiment.tune.key}" * experiment.is_tuned
    print_verdicts(judgement, entries, f"{with_unit(primary.metric, experiment.metric.unit)}{rate_note}")
    for note in notes:
        print(note)
    for run, failure in failed_runs:
        print(f"failed: {run.stage}: {run.label}: {failure} ({failure.log}); --retry tries again")
    write_together(files | experiment_files(procedure, experiment.folder / REPORT, judgement), "verdicts and report")
    if size_trends:
        print_tables(trend_table(size_trends, experiment.arms[0].name))
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    print(f"report: {experiment.folder / REPORT / PAGE}")
    return entries


def _send_report(procedure: Procedure, entries: list[dict[str, Plain]]) -> None:
    """Send the report of an experiment to wandb. Raises RunError as `send_report` does."""
    experiment, primary = procedure.experiment, procedure.experiment.primary
    facts = {"question": question(experiment), "margin": primary.matters, "primary": vars(primary)}
    facts |= {"arms": [arm.name for arm in experiment.arms], "seeds": [*experiment.seeds]}
    runs = [
        {
            "stage": run.stage,
            "run": run.label,
            "state": run.outcome.state,
            "wandb_id": read_json(run.config.run_folder / ENVIRONMENT).get("wandb_id"),
        }
        for run in procedure.known_runs()
        if run.has_begun
    ]
    log, page = experiment.first_config.log, experiment.folder / REPORT / PAGE
    send_report(log, experiment.name, experiment.folder, facts, entries, runs, page)
