"""`lm compare`: plan experiments, train their runs under a live table, judge them, and write the results."""

import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lm.data.prepare import prepare
from lm.errors import RunError
from lm.experiments.engine import (
    Cluster,
    Engine,
    ExperimentTrainer,
    RunsFailed,
    failures,
    forget_failures,
    read_scheduler_options,
)
from lm.experiments.experiment import Experiment
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import LOCK, experiment_lock, holder_words, is_measured, open_experiment, start
from lm.experiments.judging import INTERVALS
from lm.experiments.page import experiment_files, question
from lm.experiments.plan import Costs, costs, duration, plan_lines, run_times, seconds_of, total_seconds
from lm.experiments.procedure import Procedure, Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.slots import Slots, commands, gpu_words, slots_of
from lm.experiments.summary import (
    measured_words,
    print_verdicts,
    summary_entries,
    trend_table,
    trends,
    tuning_means,
    tuning_table_rows,
)
from lm.files import json_bytes, read_json, write_together
from lm.report.html import PAGE
from lm.report.tables import csv_text, numeral, print_tables, table_from_rows, to_rich
from lm.runs.folder import ENVIRONMENT, METRICS, RESOLVED_FILE, last_logged
from lm.schema import Plain
from lm.statistics.tuning import rate_text
from lm.training.wandb_runs import send_report

VERDICTS, TUNING, REPORT = "verdicts", "tuning", "report"


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `lm compare` that control the training of runs."""

    jobs: int | None = (
        # number of slots (`lm.experiments.slots`); None: `slots_per_gpu` on each GPU, or one if no run takes a GPU
        None
    )
    retry: bool = False  # whether to try failed runs again
    # whether to train although the folder has none of the file's runs, but ended runs of another configuration
    anew: bool = False
    slots_per_gpu: int = 1  # number of slots on each GPU
    engine: Engine | None = None  # the scheduler whose jobs train the runs; None: processes of this machine train them
    workers: int = 1  # number of the scheduler's jobs at a time
    job_options: str = ""  # the options of each job, as `--job-options` gives them

    def slots(self, experiment: Experiment) -> Slots:
        """Return the `Slots` for an experiment's runs. Raises ConfigError: a run needs more GPUs or slots than there
        are.
        """
        return Slots(self.workers) if self.engine else slots_of(experiment, self.jobs, self.slots_per_gpu)

    def cluster(self, folder: Path) -> Cluster | None:
        """Return the `Cluster` that trains an experiment's runs in jobs; None without a scheduler. Raises LMError as
        `Cluster` does.
        """
        return Cluster(folder, read_scheduler_options(self.job_options), self.engine) if self.engine else None


def compare_experiments(
    files: list[Path],
    overrides: list[str],
    options: TrainingOptions,
    plan_only: bool = False,
    report_only: bool = False,
    report_folder: Path | None = None,
) -> None:
    """Print the plans of experiments, then train and judge the experiments, one after the other.

    Args:
        plan_only: print the plans alone.
        report_only: print no plans and train nothing, but judge the runs that exist.
        report_folder: a folder for one report of all experiments.

    Raises LMError: an experiment's file is wrong, or runs failed.
    """
    is_working, experiments = not plan_only and not report_only, [read_experiment(path, overrides) for path in files]
    names = Counter(experiment.name for experiment in experiments)
    if report_folder and max(names.values()) > 1:
        raise RunError(
            f"--out {report_folder}: several experiments are named {names.most_common(1)[0][0]}; report them one by one"
        )
    # Slots are counted before text is prepared: too few raise ConfigError.
    job_counts = [
        1 if report_only or options.engine else options.slots(experiment).n_slots for experiment in experiments
    ]
    open_procedure = start if is_working else open_experiment
    with ExitStack() as stack:
        for folder in dict.fromkeys(experiment.folder for experiment in experiments if is_working):
            stack.enter_context(experiment_lock(folder))
        for path in files if options.engine else ():
            _start_in_job(path, overrides, options)
        anew = options.anew or plan_only
        procedures = [
            open_procedure(path, overrides, job_count, anew) for path, job_count in zip(files, job_counts, strict=True)
        ]
        run_costs = [{} for _ in files] if report_only else _print_plans(procedures, options)
        if plan_only:
            return
        failure_words, judged_procedures = [], []
        for procedure, procedure_costs in zip(procedures, run_costs, strict=True):
            if is_working:
                if options.retry:
                    forget_failures(procedure)
                try:
                    _train_runs(procedure, options, procedure_costs)
                except RunsFailed as error:
                    failure_words.append(str(error))
                    if not any(run.outcome.ended for run in procedure.known_runs()):
                        continue  # there is nothing to judge
            judged_procedures.append(procedure)
            entries = _write_verdicts(judged_procedures[-1])
            if is_working:
                try:
                    _send_report(procedure, entries)
                except RunError as error:  # later experiments are trained all the same
                    failure_words.append(str(error))
        if report_folder and judged_procedures:
            write_together(experiment_files(judged_procedures, report_folder), "the report")
            print(f"report of all experiments: {report_folder / PAGE}")
        if failure_words:
            raise RunsFailed("; ".join(failure_words))


def _send_report(procedure: Procedure, entries: list[dict[str, Plain]]) -> None:
    """Send the report of an experiment to wandb. Raises RunError as `send_report` does."""
    experiment, runs = procedure.experiment, []
    facts = {
        "question": question(experiment),
        "margin": experiment.primary.matters,
        "primary": vars(experiment.primary),
    }
    facts |= {"arms": [arm.name for arm in experiment.arms], "seeds": [*experiment.seeds]}
    for run in procedure.known_runs():
        names = {"stage": run.stage, "run": run.label, "state": run.outcome.state}
        if run.has_begun:
            runs.append(names | {"wandb_id": read_json(run.config.run_folder / ENVIRONMENT).get("wandb_id")})
    log, page = experiment.first_config.log, experiment.folder / REPORT / PAGE
    send_report(log, experiment.name, experiment.folder, facts, entries, runs, page)


def _start_in_job(path: Path, overrides: list[str], options: TrainingOptions) -> None:
    """Prepare the training text of an experiment on this machine. If the experiment was never started, start it in a
    scheduler's job, so that precision, compilation and threads are chosen for the machines that train."""
    experiment = open_experiment(path, overrides, 1, options.anew).experiment
    cluster = options.cluster(experiment.folder)
    prepare(experiment.first_config.data, progress=True)
    if not (experiment.folder / RESOLVED_FILE).exists():
        print(f"{experiment.name}: a first job settles precision, compilation and threads", flush=True)
        cluster.result(cluster.submit(partial(start, path, overrides, 1, options.anew)))


def _train_runs(procedure: Procedure, options: TrainingOptions, run_costs: Costs) -> None:
    """Train the runs of an experiment. Raises RunsFailed."""
    experiment = procedure.experiment
    jobs = ExperimentTrainer(procedure, options.slots(experiment), options.cluster(experiment.folder), run_costs)
    with live_table(jobs):
        jobs.train_all()


def print_commands(files: list[Path], overrides: list[str], options: TrainingOptions) -> None:
    """Print, for each run that can be started now, one line with the shell commands that train it. Raises LMError: a
    file is wrong.
    """
    for path in files:
        with redirect_stdout(sys.stderr):  # messages on the text and on other processes are no commands
            procedure = start(path, overrides, options.jobs or 1, options.anew)
            folder = procedure.experiment.folder
            if (folder / LOCK).exists():
                print(f"note: {folder}: {holder_words(folder)}")
            elif options.retry:
                forget_failures(procedure)
        for run in ExperimentTrainer(procedure, Slots(1)).free_runs():
            shell_commands = [shlex.join([sys.executable, "-m", "lm", *command]) for command in commands(run, folder)]
            print(" && ".join(shell_commands), flush=True)


def _print_plans(procedures: list[Procedure], options: TrainingOptions) -> list[Costs]:
    all_costs = []
    for procedure in procedures:
        run_costs, slots = costs(procedure), options.slots(procedure.experiment)
        times, words = run_times(procedure.known_runs(), run_costs), "known once the first run has ended"
        if times:
            left = duration(total_seconds(procedure, times, slots))
            words = f"about {left} for what is left, {slots.at_a_time} at a time, by the runs that have ended"
        slot_words = f"{options.workers} at a time, each in a job" if options.engine else str(slots)
        print("\n".join(plan_lines(procedure, run_costs, words, slot_words)), flush=True)
        if procedure.other_runs:
            print(f"note: {procedure.other_runs}", flush=True)
        all_costs.append(run_costs)
    return all_costs


def _write_verdicts(procedure: Procedure) -> list[dict[str, Plain]]:
    """Print the verdicts. Write verdicts, tuning results and report into the experiment's folder, either all files or
    none. Returns the entries of `summary_entries`. Raises LMError: no run has ended, or a run's file can't be read for
    the report.
    """
    experiment = procedure.experiment
    if not any(run.outcome.ended for run in procedure.known_runs()):
        reason, remedy = "no run has ended yet", procedure.other_runs or "leave --report-only out to train"
        if failed_runs := failures(procedure):
            reason = f"no run has a result; {len(failed_runs)} failed, the first with {failed_runs[0][1]}"
            remedy = "--retry tries again"
        elif is_measured(experiment):
            reason = "none of the runs that the file now asks for has ended"
        raise RunError(f"{experiment.folder}: {reason}; {remedy}")
    judgement = procedure.judgement()
    entries, notes = summary_entries(procedure, judgement), procedure.notes()
    verdicts = {"primary": vars(experiment.primary), "notes": notes, "arms": entries}
    if size_trends := trends(procedure, judgement):
        verdicts["trends"] = size_trends
    files = {
        experiment.folder / f"{VERDICTS}.json": json_bytes(verdicts),
        experiment.folder / f"{VERDICTS}.csv": csv_text(entries, intervals=INTERVALS).encode(),
    }
    if tuning_rows := tuning_table_rows(procedure):
        files[experiment.folder / f"{TUNING}.csv"] = csv_text(tuning_rows).encode()
        metric = experiment.choice_metric
        means = [
            row | {"rate": rate_text(row["rate"]), metric: numeral(row[metric])} for row in tuning_means(procedure)
        ]
        title = f"tuning: mean {metric} ({experiment.data_words(metric, 'selection')})"
        print_tables(table_from_rows(title, means, dict.fromkeys(("rate", metric), "number")))
    rate_note = f", each arm at its own {experiment.tune.heading}" * experiment.is_tuned
    print_verdicts(judgement, entries, f"{measured_words(procedure)}{rate_note}")
    for note in notes:
        print(note)
    for run, failure in failures(procedure):
        print(f"failed: {run.stage}: {run.label}: {failure} ({failure.log}); --retry tries again")
    write_together(files | experiment_files([procedure], experiment.folder / REPORT, judgement), "verdicts and report")
    if table := trend_table(procedure, judgement):
        print_tables(table)
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    print(f"report: {experiment.folder / REPORT / PAGE}")
    return entries


# ---------------------------------------------------------------- the live table of runs


REFRESH_SECONDS = 1.0


class LiveTable:
    """A text table of the runs that train now, with step, validation loss and devices, and a line on the progress of
    the experiment. Runs that have ended stand above it, as `ExperimentTrainer` prints them.
    """

    def __init__(self, jobs: ExperimentTrainer):
        self.jobs, self.experiment = jobs, jobs.procedure.experiment
        self._logged: dict[Path, dict[str, Plain]] = {}  # the last value of each metric, by the folders of pending runs

    def render(self) -> RenderableType:
        """Return the table."""
        pending = [*self.jobs.pending.values()]
        folders = [run.config.run_folder for run, _ in pending]
        self._logged = {folder: self._logged.get(folder, {}) | last_logged(folder / METRICS) for folder in folders}
        rows = []
        for (run, devices), folder in zip(pending, folders, strict=True):
            loss, step = self._logged[folder].get(SELECTION), self._logged[folder].get("step", 0)
            steps = f"{step} of {run.outcome.last_step}"
            row = {
                "stage": run.stage,
                "run": run.label,
                "step": steps,
                SELECTION: "" if loss is None else f"{loss:.4f}",
            }
            rows.append(row | ({"on": gpu_words(devices)} if devices else {}))
        return Group(to_rich(table_from_rows("", rows, {SELECTION: "number"})), Text(self._progress_words()))

    def _progress_words(self) -> str:
        experiment, jobs, runs = self.experiment, self.jobs, self.jobs.known_runs
        left = [run for run in runs if not run.outcome.ended and run.config.run_folder not in jobs.failed]
        ended = len(runs) - len(left) - len(jobs.failed)
        words = f"{experiment.name}: {ended} of the {len(runs)} runs known so far ended"
        words += f", {len(jobs.failed)} failed" * bool(jobs.failed)
        rates = {(run.size, run.rate) for run in runs if run.stage == "tune" and run.rate not in experiment.tune.rates}
        if experiment.tune.grid and rates:
            words += f"; the grid has grown by {max(Counter(size for size, _ in rates).values())}"
        if left and jobs.times:
            done = sum(self._fraction_done(run) * seconds_of([run], jobs.times, jobs.slots) for run in left)
            words += f"; about {duration(seconds_of(left, jobs.times, jobs.slots) - done)} left"
        return words

    def _fraction_done(self, run: Run) -> float:
        step, first_step = self._logged.get(run.config.run_folder, {}).get("step", 0), run.config.first_step or 0
        return max(0, step - first_step) / max(1, run.outcome.last_step - first_step)


@contextmanager
def live_table(jobs: ExperimentTrainer) -> Iterator[None]:
    """Show the table on standard output during the body, if the output is a terminal and `log.progress` is auto or bar.
    Printed text goes above the table, which is removed at the end."""
    # while rich is live it replaces sys.stdout, which makes control characters visible, also those of rich
    console = Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
    progress, table = jobs.procedure.experiment.first_config.log.progress, LiveTable(jobs)
    if not (sys.stdout.isatty() and console.is_interactive and progress in ("auto", "bar")):
        yield
        return
    rate = 1 / REFRESH_SECONDS
    live = Live(get_renderable=table.render, console=console, refresh_per_second=rate, transient=True)
    with suppress(OSError):  # the terminal was closed
        live.start()
    try:
        yield
    finally:
        with suppress(OSError):
            live.stop()
