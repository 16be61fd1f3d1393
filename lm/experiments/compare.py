"""`lm compare`: plan experiments, train their runs under a live table, judge them, and write the results."""

import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
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
from lm.experiments.page import experiment_files
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
from lm.files import json_bytes, write_together
from lm.report.html import PAGE
from lm.report.tables import csv_text, numeral, print_tables, table_from_rows, to_rich
from lm.runs.folder import METRICS, RESOLVED_FILE, last_logged
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
                experiment, page = procedure.experiment, procedure.experiment.folder / REPORT / PAGE
                try:
                    send_report(experiment.first_config.log, experiment.name, experiment.folder, entries, page)
                except RunError as error:  # later experiments are trained all the same
                    failure_words.append(str(error))
        if report_folder and judged_procedures:
            write_together(experiment_files(judged_procedures, report_folder), "the report")
            print(f"report of all experiments: {report_folder / PAGE}")
        if failure_words:
            raise RunsFailed("; ".join(failure_words))


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
        has_measured_runs = is_measured(experiment)
        reason = (
            "none of the runs that the file now asks for has ended" if has_measured_runs else "no run has ended yet"
        )
        remedy = procedure.other_runs or "leave --report-only out to train"
        if failed_runs := failures(procedure):
            reason = f"no run has a result; {len(failed_runs)} failed, the first with {failed_runs[0][1]}"
            remedy = "--retry tries again"
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
MAX_RUNS = 20  # largest number of rows; more runs are shown in groups
_NUMBER_COLUMNS = dict.fromkeys(("rate", "seed", "runs", SELECTION), "number")  # columns that hold numbers
# groups count in this order
_STATE_STYLES = {"finished": "green", "diverged": "red", "failed": "red", "running": "bold", "waiting": "dim"}
# columns that tell single runs apart, then columns that tell groups of runs apart, the finest groups first
_LINE_COLUMNS = (
    ("size", "arm", "rate", "seed", "stage"),
    ("size", "arm", "rate", "stage"),
    ("size", "arm", "stage"),
    ("size", "stage"),
)


@dataclass
class RunLine:  # what the table shows of one run
    run: Run
    state: str = "waiting"  # one of `_STATE_STYLES`
    step: int = 0  # the last logged step
    loss: float | None = None  # the latest validation loss
    note: str = ""  # what a waiting run waits for, the devices of a running run, or why a run failed


class LiveTable:
    """A text table of an experiment's known runs, or of groups of them, with state, step and validation loss.

    It reads the runs that `jobs` knows, and the last logged values of pending runs.
    """

    def __init__(self, jobs: ExperimentTrainer):
        self.jobs, self.experiment = jobs, jobs.procedure.experiment
        self._logged: dict[Path, dict[str, Plain]] = {}  # the last value of each metric, by the folders of pending runs

    def run_lines(self) -> list[RunLine]:
        pending = {run.config.run_folder: gpu_words(devices) for run, devices in list(self.jobs.pending.values())}
        self._logged = {folder: self._logged.get(folder, {}) | last_logged(folder / METRICS) for folder in pending}
        return [self._run_line(run, pending.get(run.config.run_folder, "")) for run in self.jobs.known_runs]

    def _run_line(self, run: Run, devices: str) -> RunLine:
        folder, outcome = run.config.run_folder, run.outcome
        if outcome.ended:
            loss = float(outcome.series(SELECTION).means[0]) if outcome.state == "finished" else None
            return RunLine(run, outcome.state, outcome.last_step, loss)
        if failure := self.jobs.failed.get(folder):
            return RunLine(run, "failed", note=f"status {failure.status}")
        if (logged := self._logged.get(folder)) is not None:
            return RunLine(run, "running", logged.get("step", 0), logged.get(SELECTION), devices)
        waits_for_source = run.source and run.source.outcome.state != "finished"
        return RunLine(run, note="for the run it starts from" if waits_for_source else "")

    def render(self, height: int = 50) -> RenderableType:
        """Return the table, in at most about `height` lines."""
        lines = self.run_lines()
        if not lines:
            return Text("reading the run folders")
        max_rows = max(1, min(MAX_RUNS, height - 6))  # borders, heading and the progress line take 6 lines
        for names in _LINE_COLUMNS:
            groups: dict[tuple, list[RunLine]] = {}
            for line in lines:
                groups.setdefault(attrgetter(*names)(line.run), []).append(line)
            if len(groups) <= max_rows:
                break
        table = table_from_rows("", [self._row(names, group) for group in groups.values()], _NUMBER_COLUMNS)
        return Group(to_rich(table), Text(self._progress_words(lines)))

    def _row(self, names: tuple[str, ...], group: list[RunLine]) -> dict[str, str | Text]:
        """The table row of runs that agree in the columns `names`. An experiment without sizes or rates has no columns
        for them.
        """
        first, is_single, counts = group[0], "seed" in names, Counter(line.state for line in group)
        has_column = {"size": "" not in self.experiment.sizes, "rate": self.experiment.is_tuned}
        values = {name: getattr(first.run, name) for name in names if has_column.get(name, True)}
        row: dict[str, str | Text] = {name: str(value) for name, value in values.items()}
        if "rate" in row:
            row["rate"] = "" if first.run.rate is None else rate_text(first.run.rate)
        shown = group if is_single else [line for line in group if line.state == "running"]
        losses = [line.loss for line in group if line.loss is not None and (is_single or line.state == "finished")]
        state = Text(f"{first.state} {first.note}".strip(), _STATE_STYLES[first.state])
        if not is_single:
            devices = "".join(f" {line.note}" for line in shown if line.note)
            words = [f"{counts[name]} {name}{devices * (name == 'running')}" for name in _STATE_STYLES if counts[name]]
            row["runs"], state = str(len(group)), Text(", ".join(words))
        loss = {SELECTION if is_single else f"mean {SELECTION}": f"{statistics.fmean(losses):.4f}" if losses else ""}
        return (
            row
            | {"state": state, "step": "; ".join(f"{line.step} of {line.run.outcome.last_step}" for line in shown)}
            | loss
        )

    def _progress_words(self, lines: list[RunLine]) -> str:
        """The line below the table: the progress of the experiment, and the remaining time."""
        experiment, counts = self.experiment, Counter(line.state for line in lines)
        ended = sum(line.run.outcome.ended for line in lines)
        words = [f"{experiment.name}: {ended} of the {len(lines)} runs known so far ended"]
        words[0] += "".join(f", {counts[state]} {state}" for state in ("failed", "running") if counts[state])
        if experiment.tune.grid:
            tuning = [line.run for line in lines if line.run.stage == "tune"]
            left = sum(not run.outcome.ended for run in tuning)
            rates = {(run.size, run.rate) for run in tuning if run.rate not in experiment.tune.rates}
            added = max(Counter(size for size, _ in rates).values(), default=0)
            growth = f", whose grid has grown by {added}" if added else ""
            words.append(f"tuning{growth}: {f'{left} runs left' if left else 'done'}")
        unfinished = [line for line in lines if line.state in ("running", "waiting")]
        if unfinished and self.jobs.times:
            seconds = sum(
                self._fraction_left(line) * seconds_of([line.run], self.jobs.times, self.jobs.slots)
                for line in unfinished
            )
            words.append(f"about {duration(seconds)} left")
        elif unfinished:
            words.append("how long it takes is not known yet")
        return "; ".join(words)

    def _fraction_left(self, line: RunLine) -> float:
        first_step = line.run.config.first_step or 0
        return 1 - max(0, line.step - first_step) / max(1, line.run.outcome.last_step - first_step)


@contextmanager
def live_table(jobs: ExperimentTrainer) -> Iterator[None]:
    """Show the table on standard output during the body, if the output is a terminal and `log.progress` is auto or bar.
    Printed text goes above the table, which is removed at the end."""
    # while rich is live it replaces sys.stdout, which makes control characters visible, also those of rich
    console = Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
    progress = jobs.procedure.experiment.first_config.log.progress
    if not (sys.stdout.isatty() and console.is_interactive and progress in ("auto", "bar")):
        yield
        return
    table = LiveTable(jobs)
    live = Live(
        get_renderable=lambda: table.render(console.size.height),
        console=console,
        refresh_per_second=1 / REFRESH_SECONDS,
        transient=True,
    )
    with suppress(OSError):  # the terminal was closed
        live.start()
    try:
        yield
    finally:
        with suppress(OSError):
            live.stop()
