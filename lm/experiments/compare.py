"""`lm compare`: plan experiments, train what they need, judge them, and write down what came out."""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lm.data.prepare import prepare
from lm.errors import DataError, RunError
from lm.experiments.engine import LOCK, Cluster, Engine, Jobs, RunsFailed, failures, read_options, retry, worker, working_on
from lm.experiments.experiment import Experiment
from lm.experiments.experiment_file import read_experiment
from lm.experiments.experiment_folder import open_experiment, other_runs, start
from lm.experiments.judging import INTERVALS
from lm.experiments.live_table import live_table
from lm.experiments.page import experiment_files, write_page
from lm.experiments.plan import (
    PILOT_SECONDS,
    Costs,
    Times,
    costs,
    duration,
    plan,
    run_times,
    total_seconds,
)
from lm.experiments.procedure import Procedure, next_look
from lm.experiments.slots import Slots, Stopped, commands, slots_of
from lm.experiments.summary import measured_words, print_verdicts, summary_lines, trend_table, trends, tuning_means, tuning_table
from lm.files import write_together
from lm.report.html import PAGE
from lm.report.tables import csv_text, digits, from_lines, print_tables
from lm.runs.folder import RESOLVED, json_bytes
from lm.schema import Plain
from lm.statistics.tuning import rate_words

VERDICTS, TUNING, REPORT = "verdicts", "tuning", "report"


@dataclass(frozen=True)
class Work:
    """How experiments are worked on.

    Attributes:
        jobs: slots (`lm.experiments.slots`); None: all of this machine's GPUs, or one on the CPU.
        retry: whether runs that failed are tried again.
        anew: whether an experiment whose folder has ended runs of another configuration alone is trained beside them.
        per_gpu: slots on each GPU.
        engine: the scheduler whose jobs train the runs; None: the slots of this machine do.
        workers: jobs at a time.
        options: of each job, as `--job-options` gives them.
    """

    jobs: int | None = None
    retry: bool = False
    anew: bool = False
    per_gpu: int = 1
    engine: Engine | None = None
    workers: int = 1
    options: str = ""

    def slots(self, experiment: Experiment) -> Slots:
        """The slots for an experiment. Raises ConfigError: this machine has too few."""
        return Slots(self.workers) if self.engine else slots_of(experiment, self.jobs, self.per_gpu)

    def timed(self, procedure: Procedure) -> Times:
        """Seconds of an experiment's runs on this machine; none where they can't be known yet."""
        return _times(procedure, costs(procedure), self.slots(procedure.experiment), PILOT_SECONDS)[0]

    def cluster(self, folder: Path) -> Cluster | None:
        """The jobs of an experiment's folder, if jobs train its runs. Raises LMError: see `Cluster`."""
        return Cluster(folder, read_options(self.options), self.engine) if self.engine else None


def compare_experiments(
    files: list[Path],
    overrides: list[str],
    work: Work,
    plan_only: bool = False,
    report_only: bool = False,
    out: Path | None = None,
    send: Callable[[Experiment, list[dict[str, Plain]]], None] | None = None,
) -> None:
    """Print the plans of experiments; then, unless `plan_only`, train what is missing (unless `report_only`) and judge what is there, one
    experiment after the other. `out`: a folder for one report of all of them. `send`: called with each that was worked on and the lines of
    its verdicts, when its report is written.

    Raises:
        LMError: an experiment's file is wrong, or runs failed.
    """
    working, experiments = not plan_only and not report_only, [read_experiment(path, overrides) for path in files]
    jobs = [1 if report_only or work.engine else work.slots(each).jobs for each in experiments]  # enough, before text is prepared
    opened = partial(start, timed=None if work.engine else work.timed) if working else open_experiment
    with ExitStack() as stack:
        for folder in dict.fromkeys(each.folder for each in experiments if working):
            stack.enter_context(working_on(folder))
        for path in files if work.engine else ():
            _settle_in_a_job(path, overrides, work)
        procedures = [opened(path, overrides, each, work.anew or plan_only) for path, each in zip(files, jobs, strict=True)]
        times: list[Times] = [{} for _ in files]
        if not report_only:
            times = _planned(procedures, work)
        if plan_only:
            return
        failures, judged = [], []
        for procedure, each in zip(procedures, times, strict=True):
            if working:
                if work.retry:
                    retry(procedure)
                try:
                    procedure = _work(procedure, work, each)
                except RunsFailed as error:
                    failures.append(str(error))
            judged.append(next_look(procedure))
            lines = _conclude(judged[-1])
            if working and send:
                send(procedure.experiment, lines)
        if out:
            print(f"report of all experiments: {write_page(judged, out)}")
        if failures:
            raise RunsFailed("; ".join(failures))


def _settle_in_a_job(path: Path, overrides: list[str], work: Work) -> None:
    """Prepare the text of an experiment here, and start it in a job if it has not been: precision, compilation and threads are those of the
    machines that train."""
    experiment = open_experiment(path, overrides, 1, work.anew).experiment
    cluster = work.cluster(experiment.folder)
    prepare(experiment.first_config.data, progress=True)
    if not (experiment.folder / RESOLVED).exists():
        print(f"{experiment.name}: a first job settles precision, compilation and threads", flush=True)
        cluster.result(cluster.submit(partial(start, path, overrides, 1, work.anew)))


def _work(procedure: Procedure, work: Work, times: Times) -> Procedure:
    """Train what an experiment needs, its second look included where there is one. Raises RunsFailed."""
    experiment = procedure.experiment
    at_work = Jobs(procedure, work.slots(experiment), cluster=work.cluster(experiment.folder))
    with live_table(at_work, times):
        at_work.work()
    following = next_look(procedure)
    return procedure if following is procedure else _work(following, work, times)


def print_commands(files: list[Path], overrides: list[str], anew: bool = False) -> None:
    """Print what a shell has to do for each run that can be started now, one line a run. Raises LMError: a file is wrong."""
    for path in files:
        with redirect_stdout(sys.stderr):  # what is said of the text, and of others at work, is no command
            procedure = start(path, overrides, anew=anew)
            folder = procedure.experiment.folder
            if (folder / LOCK).exists():
                print(f"note: {folder}: {worker(folder)}")
        for run in Jobs(procedure, Slots(1)).free():
            lines = [shlex.join([sys.executable, "-m", "lm", *command]) for command in commands(run, folder)]
            print(" && ".join(lines), flush=True)


def _planned(procedures: list[Procedure], work: Work) -> list[Times]:
    """Print the plans; returns how long the runs of each experiment take."""
    timed, end = [], time.monotonic() + PILOT_SECONDS
    for procedure in procedures:
        cost, places = costs(procedure), work.slots(procedure.experiment)
        untimed = {}, "not estimated for the machines of the jobs"
        times, words = untimed if work.engine else _times(procedure, cost, places, end - time.monotonic())
        timed.append(times)
        if times:
            seconds = total_seconds(procedure, times, places)
            words = f"about {duration(seconds)} for what is left, {len(places.lanes())} at a time, by {words}"
        where = f"{work.workers} at a time, each in a job" if work.engine else str(places)
        print("\n".join(plan(procedure, cost, words, where)), flush=True)
        if others := other_runs(procedure):
            print(f"note: {others}", flush=True)
    return timed


def _times(procedure: Procedure, taken: Costs | None, slots: Slots, budget: float) -> tuple[Times, str]:
    """Seconds of the runs and their source in words, or no times and the reason. `budget`: seconds that timing them may take."""
    if taken is None:
        return {}, "not known before the text is there: lm prepare makes it"
    try:
        return run_times(procedure, taken, slots, budget)
    except DataError:
        return {}, "not known before there is text to time some steps on: lm prepare makes it"
    except Stopped:
        raise
    except RunError as error:
        return {}, f"not known: {error}"


def _conclude(procedure: Procedure) -> list[dict[str, Plain]]:
    """Print the verdicts; write them, what tuning found, and the report into the experiment's folder, all of them or none.

    Returns the verdicts' lines.

    Raises:
        RunError: nothing has been trained yet.
        LMError: a file of a run that the page shows can't be read.
    """
    experiment = procedure.experiment
    if not any(run.outcome.ended for run in procedure.known()):
        reason, remedy = "no run has ended yet", other_runs(procedure) or "leave --report-only out to train"
        if failed := failures(procedure):
            reason, remedy = f"no run has a result; {len(failed)} failed, the first with {failed[0][1]}", "--retry tries again"
        raise RunError(f"{experiment.folder}: {reason}; {remedy}")
    judged = procedure.judged()
    lines, notes = summary_lines(procedure, judged), procedure.notes()
    verdicts = {"primary": vars(experiment.primary), "notes": notes, "arms": lines}
    over_sizes = trends(procedure, judged)
    verdicts |= {"trends": over_sizes} if over_sizes else {}
    files = {
        experiment.folder / f"{VERDICTS}.json": json_bytes(verdicts),
        experiment.folder / f"{VERDICTS}.csv": csv_text(lines, intervals=INTERVALS).encode(),
    }
    if rates := tuning_table(procedure):
        files[experiment.folder / f"{TUNING}.csv"] = csv_text(rates).encode()
        without = ("size",) if "" in experiment.sizes else ()
        by = experiment.chosen_by
        means = [line | {"rate": rate_words(line["rate"]), by: digits(line[by])} for line in tuning_means(procedure)]
        means = [{name: cell for name, cell in line.items() if name not in without} for line in means]
        print_tables(from_lines(f"tuning: mean {by} on the selection text", means, ("rate", by)))
    rates = f", each arm at its own {experiment.tune.heading}" * experiment.tuned
    print_verdicts(judged, lines, f"{measured_words(procedure)}{rates}")
    for note in notes:
        print(note)
    for run, failure in failures(procedure):
        print(f"failed: {run.stage}: {run.label}: {failure} ({failure.log}); --retry tries again")
    write_together(files | experiment_files([procedure], experiment.folder / REPORT, judged), "verdicts and report")
    if table := trend_table(judged, over_sizes):
        print_tables(table)
    print(f"verdicts: {experiment.folder / VERDICTS}.json")
    print(f"report: {experiment.folder / REPORT / PAGE}")
    return lines
