"""This module trains the runs of an experiment in a loop: in processes on this machine, or in jobs that submitit sends
to a scheduler.

A run takes one process after another, one for each of its `lm` commands. When `lm compare` ends, the processes of this
machine save a checkpoint and end; a scheduler's jobs go on.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from lm.errors import ConfigError, RunError, one_line
from lm.experiments.definition import Experiment
from lm.experiments.procedure import (
    FAILURE_SUFFIX,
    LOG_FOLDER,
    Failure,
    Procedure,
    Run,
    next_runs,
    read_failure,
    remaining_commands,
)
from lm.experiments.run_outcome import NoDocuments, Outcome
from lm.files import folder_lock, read_json, write_json
from lm.machine import STOP_SIGNALS, process_start_time, signals_blocked, start_child
from lm.model.device import count_gpus, visible_gpu_ids
from lm.plain import Plain
from lm.report.tables import number_text
from lm.runs.folder import ALREADY_TRAINING, CONFIG_FILE

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

Engine = Literal["slurm", "local"]
Devices = tuple[str, ...]  # GPUs of a run, as CUDA_VISIBLE_DEVICES names them; (): it computes on the CPU
JOB_SUFFIX = "job.json"  # suffix of the file beside a run's log that says which job trains it
JOBS_FOLDER = "workers"  # folder in the experiment's folder: scripts and output of submitit's jobs
POLL_SECONDS = 1.0  # seconds between checks of a job


# ---------------------------------------------------------------- slots of this machine


def device_slots(experiment: Experiment, jobs: int | None, jobs_per_gpu: int) -> list[Devices]:
    """Return a slot for each run that this machine trains at a time: the GPUs that the run sees, () on the CPU.

    Args:
        jobs: largest number of slots; None: `jobs_per_gpu` on each group of GPUs, or one if runs compute on the CPU.
        jobs_per_gpu: number of runs that share each GPU.

    Raises ConfigError: there are too few GPUs for a run.
    """
    n_gpus = max(count_gpus(experiment.example_config(size, arm)) for size, arm in experiment.size_arms)
    if not n_gpus:
        return [()] * (jobs or 1)
    gpus = visible_gpu_ids()
    groups = [gpus[first : first + n_gpus] for first in range(0, len(gpus) - n_gpus + 1, n_gpus)]
    return (groups * jobs_per_gpu)[:jobs]


# ---------------------------------------------------------------- processes of this machine


class ChildProcesses:
    """Trains the runs of an experiment in processes of this machine."""

    def __init__(self):
        self._processes: dict[Path, subprocess.Popen] = {}
        self._stop_event = threading.Event()

    def train(self, run: Run, devices: Devices | None, rank: int = 0) -> tuple[int, float]:
        """Train or continue a run, which sees only `devices` (None: all GPUs that this process sees). Returns the exit
        status of the run's last command, negative if a signal killed the command, and the seconds that all its commands
        took. In a run on several nodes, a process whose `rank` is above 0 runs `lm train` alone.
        """
        # in a process that an earlier start left
        while not rank and is_run_training(run.config.run_folder) and not self._stop_event.is_set():
            self._stop_event.wait(1)
        status, start = 128 + signal.SIGTERM if self._stop_event.is_set() else 0, time.monotonic()
        for command in [] if status else remaining_commands(replace(run, outcome=replace(run.outcome))):
            status = self._execute(run, command, devices) if not rank or command[0] == "train" else 0
            if status:
                break
        return status, time.monotonic() - start

    def stop_local_work(self, signal_number: int = signal.SIGTERM) -> None:
        """Send the signal `signal_number` to all processes, and start no more. At SIGTERM, the processes save a
        checkpoint and end.
        """
        self._stop_event.set()
        for process in list(self._processes.values()):
            process.send_signal(signal_number)

    def wait(self) -> None:
        """Wait until all processes have ended. Signal handlers call this method, since Popen.wait may deadlock in
        them.
        """
        for process in list(self._processes.values()):
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def _execute(self, run: Run, command: list[str], devices: Devices | None) -> int:
        folder, output = run.config.run_folder, run.log_file()
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("ab") as log:
            process = start_child([sys.executable, "-m", "lm", *command], log, log, devices)
        self._processes[folder] = process
        if self._stop_event.is_set():
            process.send_signal(signal.SIGTERM)
        status = process.wait()
        del self._processes[folder]
        return status


def is_run_training(folder: Path) -> bool:
    """Return whether a process of this machine trains the run in a run folder, as the folder's lock shows."""
    if not folder.is_dir():
        return False
    try:
        with folder_lock(folder, ALREADY_TRAINING):
            return False
    except RunError:
        return True


# ---------------------------------------------------------------- jobs of a scheduler


# options that submitit has for every engine
_SUBMITIT_OPTIONS = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name")
_MAX_REQUEUES = 1000  # how often a job that meets its time limit is queued again


class TrainingJob:
    """A training job is a callable that submitit calls on the scheduler's machines to train a run. When the job is
    about to end, submitit calls its `checkpoint`.
    """

    def __init__(self, run: Run):
        self.run = run
        self._children: ChildProcesses | None = None  # made in the job: its locks can't be pickled

    def __call__(self) -> tuple[int, float]:
        """Train or continue the run. Returns exit status and seconds of training. In a job on several nodes each task
        calls this method. Only the first task swaps normalizers before training, and evaluates after training.
        """
        from submitit import JobEnvironment

        self._children, rank = ChildProcesses(), JobEnvironment().global_rank
        swapped_config = Path(self.run.config.init_from, CONFIG_FILE)
        while rank and self.run.swap and not swapped_config.exists():
            time.sleep(POLL_SECONDS)
        return self._children.train(self.run, None, rank)

    def checkpoint(self) -> "DelayedSubmission":
        """Let the run save a checkpoint and end. Returns the same job, which submitit queues again."""
        from submitit.helpers import DelayedSubmission

        if self._children:
            self._children.stop_local_work()
            self._children.wait()
        return DelayedSubmission(TrainingJob(self.run))


class Cluster:
    """Trains runs in jobs that submitit sends to a scheduler. Jobs outlive this process; `lm compare` finds them by
    files (`_job_record`).

    Args:
        experiment_folder: a folder that all machines see; its subfolder JOBS_FOLDER holds the scripts and output of the
            jobs.
        options: options of each job as `KEY=VALUE,KEY=VALUE`, of submitit (timeout_min, gpus_per_node, cpus_per_task,
            mem_gb) or sbatch, such as partition.
        engine: the scheduler; with `local`, the jobs are processes of this machine.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
        RunError: submitit or the scheduler is not installed.
    """

    def __init__(self, experiment_folder: Path, options: str, engine: Engine):
        try:
            import submitit
        except ImportError:
            raise RunError("--submit needs submitit, which is not installed: pip install 'submitit>=1.5.4'") from None
        self.engine = engine
        self._submitit_errors = submitit.core.utils
        self._lock, self._stop_event = threading.Lock(), threading.Event()
        self._job_parameters: dict[str, int | str] = {"name": "lm", "timeout_min": 60, "nodes": 1, "tasks_per_node": 1}
        for setting in filter(None, options.split(",")):
            name, separator, value = setting.partition("=")
            if not name.isidentifier() or not separator:
                example = "must be KEY=VALUE,KEY=VALUE, e.g. partition=gpu,timeout_min=240"
                raise ConfigError(f"--job-options {options}: {example}")
            name = name if name in _SUBMITIT_OPTIONS else f"{engine}_{name}"
            self._job_parameters[name] = int(value) if value.isdigit() else value
        try:
            requeues = {f"{engine}_max_num_timeout": _MAX_REQUEUES}
            self._executor = submitit.AutoExecutor(experiment_folder.absolute() / JOBS_FOLDER, engine, **requeues)
            self._executor.update_parameters(**self._job_parameters)
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise ConfigError(f"--job-options {options}: {one_line(error)}") from None
        except RuntimeError as error:
            raise RunError(f"--submit {engine}: {one_line(error)}") from None

    @property
    def scheduler_name(self) -> str:
        """Return the name of the scheduler; `local` is followed by the name of this machine."""
        return f"local on {socket.gethostname()}" if self.engine == "local" else self.engine

    def submit(self, function: Callable[[], object], nodes: int = 1, devices: int = 1) -> "Job":
        """Submit a job that calls `function`. A job on one node calls it once; a job on several nodes calls it once for
        each of the `devices` of each node.

        Returns the job, whose result is that of the first call. Raises RunError: the scheduler refuses.
        """
        # A job of this machine inherits the blocked signals: Ctrl-C and a closed terminal are to stop this process
        # alone.
        with self._lock, signals_blocked(signal.SIGINT, signal.SIGHUP):
            try:
                tasks = {"nodes": nodes, "tasks_per_node": devices} if nodes > 1 else {}
                self._executor.update_parameters(**self._job_parameters | tasks)
                return self._executor.submit(function).task(0)
            except (RuntimeError, OSError, ValueError) as error:
                raise RunError(f"--submit {self.engine}: {one_line(error)}") from None

    def result(self, job: "Job") -> object:
        """Wait for a job and return its result. Raises RunError: the job failed or vanished."""
        try:
            return job.result()
        except self._submitit_errors.UncompletedJobError:
            raise RunError(
                f"--submit {self.engine}: job {job.job_id} failed; its output says why: {job.paths.stderr}"
            ) from None

    def train(self, run: Run, devices: Devices) -> tuple[int, float]:
        """Wait for the end of the job that trains a run; submit a job unless one is queued or running. Returns the exit
        status, and the seconds of training since the job's last start. A job that vanished counts as killed, perhaps
        because it lacked memory. After `stop_local_work`, the status is 128 + SIGTERM. Raises RunError: the scheduler
        refuses the job, or the job failed.
        """
        path, record = run.log_file(JOB_SUFFIX), _job_record(run)
        job = self._executor.job_class(self._executor.folder, str(record["id"])) if record else None
        if job is None or not self._is_job_alive(job, record["born"]):
            trainer = run.config.trainer
            job = self.submit(TrainingJob(run), trainer.num_nodes, trainer.devices)
            start_time = process_start_time(int(job.job_id)) if self.engine == "local" else ""
            record = {"engine": self.scheduler_name, "id": job.job_id, "born": start_time}
            write_json(path, record)
            print(f"{run.stage}: {run.label}: job {job.job_id}", flush=True)
        while self._is_job_alive(job, record["born"]):
            if self._stop_event.wait(POLL_SECONDS):
                return 128 + signal.SIGTERM, 0.0
        path.unlink(missing_ok=True)
        error = job.exception()
        has_vanished = error and not isinstance(error, self._submitit_errors.FailedJobError)
        return (-signal.SIGKILL, 0.0) if has_vanished else self.result(job)

    def stop_local_work(self, ignored_signal: int = signal.SIGTERM) -> None:
        """Stop waiting for the jobs, which continue to run and get no signal (`ChildProcesses` sends it to its
        processes).
        """
        self._stop_event.set()

    def _is_job_alive(self, job: "Job", start_time: Plain) -> bool:
        """Return whether a job is queued or running. A `local` job runs while the process with its ID has the start
        time `start_time`."""
        return (
            bool(start_time) and process_start_time(int(job.job_id)) == start_time
            if self.engine == "local"
            else not job.done()
        )


def _job_record(run: Run) -> dict[str, Plain]:
    """Read the file that names the job that trains a run: its scheduler (key `engine`), its ID, and (`born`) the start
    time of a local job. {} without such a file. Raises RunError: the file is damaged."""
    path = run.log_file(JOB_SUFFIX)
    return read_json(path) if path.exists() else {}


# ---------------------------------------------------------------- the loop


class RunsFailed(RunError):
    """Some runs of an experiment failed; all others that could be started were trained."""


class TrainingStopped(RunError):
    """A signal has stopped the work on an experiment; the exit status is 128 plus the signal's number."""

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_code = 128 + number


@contextmanager
def interrupt_on_signals() -> Iterator[list[int]]:
    """Let all `STOP_SIGNALS` interrupt the body of a `with` statement as Ctrl-C does, except signals that are already
    handled or ignored. Yields the list of received signals. Only the main thread can be interrupted; in others the list
    stays empty.
    """
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        # schedulers announce the end of a job more than once
        if number in (signal.SIGUSR1, signal.SIGUSR2) and signals:
            return
        signals.append(number)
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOP_SIGNALS if is_main_thread and signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield signals
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class ExperimentTrainer:
    """Trains the runs that an experiment needs, until all have ended or no other run can be started.

    Args:
        slots: the GPUs of each run that is trained at a time (`device_slots`).
        cluster: trains the runs in a scheduler's jobs; None: processes of this machine train them.

    Attributes:
        pending_runs: the run and its GPUs by the future of its training, for all runs that are being trained.
        failures_by_folder: the failures of runs, by run folder.
    """

    def __init__(self, procedure: Procedure, slots: list[Devices], cluster: Cluster | None = None):
        self.procedure, self.slots = procedure, slots
        self.cluster, self.run_trainer = cluster, cluster or ChildProcesses()
        self.pending_runs: dict[Future, tuple[Run, Devices]] = {}
        self.failures_by_folder: dict[Path, Failure] = {}

    def train_all(self) -> None:
        """Train runs until all have ended or no other run can be started.

        Raises:
            RunsFailed: some runs failed; it is raised when no other run can be started.
            TrainingStopped: one of `STOP_SIGNALS` has arrived. Runs of this machine have saved a checkpoint; a
                scheduler's jobs go on.
            RunError: a trained run lacks the primary metric, a job failed, or a job that another `lm compare` submitted
                is still training a run.
        """
        self._check_job_records()
        pending, free = self.pending_runs, [*self.slots]
        with interrupt_on_signals() as signals, ThreadPoolExecutor(len(self.slots)) as pool:
            try:
                while True:
                    startable = self._startable_runs({run.config.run_folder for run, _ in pending.values()})
                    for run in islice(startable, len(free)):
                        devices = free.pop(0)
                        pending[pool.submit(self.run_trainer.train, run, devices)] = run, devices
                    if not pending:
                        break
                    for future in wait(pending, None, FIRST_COMPLETED).done:
                        run, devices = pending.pop(future)
                        free.append(devices)
                        self._report_end(run, *future.result())
            except KeyboardInterrupt:
                number, running_count = signals[-1] if signals else signal.SIGINT, len(pending)
                self.stop()
                words = f"{'jobs that go on' if self.cluster else 'runs that saved and ended'}: {running_count}"
                words = words if running_count else "no run was under way"
                name = signal.Signals(number).name
                raise TrainingStopped(f"stopped by {name}: {words}; the same command goes on", number) from None
            except BaseException:
                self.stop()
                raise
        if self.failures_by_folder:
            words = "; ".join(f"{folder.name}: {failure}" for folder, failure in self.failures_by_folder.items())
            remedy = "the same command goes on with killed ones, and --retry tries others again"
            remedy += f"; their output is in {self.procedure.experiment.folder / LOG_FOLDER}"
            raise RunsFailed(f"{len(self.failures_by_folder)} runs failed ({words}); {remedy}")

    def runs_to_start(self) -> list[Run]:
        """List the runs that can start now and that no process of this machine trains. Raises RunError: a scheduler's
        job that this process does not wait for is training a run.
        """
        self._check_job_records()
        return [run for run in self._startable_runs(set()) if not is_run_training(run.config.run_folder)]

    def stop(self) -> None:
        """Let the pending runs save a checkpoint, and wait for their end; a second interrupt kills them. Jobs of a
        scheduler go on.
        """
        self.run_trainer.stop_local_work()
        try:
            wait(self.pending_runs)
        except KeyboardInterrupt:
            self.run_trainer.stop_local_work(signal.SIGKILL)
            wait(self.pending_runs)

    def _check_job_records(self) -> None:
        """Delete the job records of runs that have ended. Raises RunError: a scheduler's job that this process does not
        wait for is training a run.
        """
        for run in self.procedure.known_runs():
            record, path = _job_record(run), run.log_file(JOB_SUFFIX)
            if record and run.outcome.has_ended:
                path.unlink(missing_ok=True)
            elif record and record["engine"] != (self.cluster and self.cluster.scheduler_name):
                engine = str(record["engine"])
                remedy = f"add --submit {engine.split()[0]} to wait for it, or delete this file once the job is gone"
                raise RunError(f"{path}: job {record['id']} of {engine} trains this run; {remedy}")

    def _startable_runs(self, running_folders: set[Path]) -> Iterator[Run]:
        """Yield the next runs that can start: they have not failed, and neither they nor the runs whose weights they
        start from are training in `running_folders`."""
        for run in next_runs(self.procedure.known_runs()):
            folder, source = run.config.run_folder, run.source_run
            if {folder, source and source.config.run_folder} & (running_folders | self.failures_by_folder.keys()):
                continue
            if failure := read_failure(run):
                self.failures_by_folder[folder] = failure
            else:
                yield run

    def _report_end(self, run: Run, status: int, seconds: float) -> None:
        """Print a line on a run that has ended, or record its failure."""
        outcome, title = replace(run.outcome), f"{run.stage}: {run.label}"  # the copy reads the files again
        failure_path = run.log_file(FAILURE_SUFFIX)
        if not outcome.has_ended:
            failure = self.failures_by_folder[run.config.run_folder] = self._make_failure(run, status, outcome)
            if not failure.was_interrupted:
                write_json(failure_path, vars(failure))
            print(f"{title}: failed with {failure} ({failure.log})", flush=True)
            return
        failure_path.unlink(missing_ok=True)
        words = f"diverged ({outcome.divergence})"
        if outcome.state == "finished":
            words = self._metric_text(run, outcome)
            words += f", did not learn: {outcome.loss_above_unigram_text}" if outcome.loss_above_unigram_text else ""
        known_runs = self.procedure.known_runs()
        left = sum(not run.outcome.has_ended for run in known_runs)
        rest_words = f"{left} of the {len(known_runs)} runs known so far are left"
        print(f"{title}: {words}, {seconds:.0f} s; {rest_words}", flush=True)

    def _make_failure(self, run: Run, status: int, outcome: Outcome) -> Failure:
        """Return the failure of a run that ended with the exit status `status`. Its reason is the signal that killed
        the run, the last line of its log, or the measurement that is missing. Raises RunError: no command failed, but
        no evaluation measured the primary metric for each sequence."""
        log, folder = run.log_file(), run.config.run_folder
        metric = self.procedure.experiment.primary_metric.metric
        if status < 0:
            reason = f"killed by {signal.Signals(-status).name}" + " (out of memory?)" * (status == -signal.SIGKILL)
        elif status:
            output = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
            reason = next((line for line in reversed(output) if line.strip()), "no output")[:300]
        elif len(outcome.metric_values(metric)):
            reason = "an evaluation or checkpoint of its last step is missing after training"
        else:
            reason = f"primary.metric {metric} was not measured by sequence at the last step"
            if not outcome.failed_evaluations:
                raise RunError(f"{folder}: {reason}; correct the file: lm metrics names those that are")
            reasons = "; ".join(f"{kind}: {words}" for kind, words in outcome.failed_evaluations.items())
            reason += f" ({reasons}); lm eval {folder} measures it, without a limit of time"
        return Failure(status, reason, str(log))

    def _metric_text(self, run: Run, outcome: Outcome) -> str:
        """Describe a tuning run by the metric that chooses rates, a final run by the primary metric. Both are means
        over the held-out documents that choose rates; a metric of questions is a mean over all questions. Return
        `finished` if no such document is left."""
        experiment = self.procedure.experiment
        name = experiment.rate_choice_metric if run.stage == "tune" else experiment.primary_metric.metric
        try:
            value = number_text(outcome.mean(name, for_selection=True))
        except NoDocuments:  # a line on progress must not end the experiment
            return "finished"
        return f"{name} ({experiment.measured_data_text(name, 'selection')}) {value}"
