"""The engine that trains the runs of an experiment, in processes of this machine or in jobs that submitit sends to a
scheduler.

One `lm compare` at a time works on an experiment. It starts the runs that can be started, prints their results, and
records failures.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm.errors import ConfigError, RunError, one_line
from lm.experiments.experiment_folder import host_name
from lm.experiments.plan import Costs, duration, run_times, seconds_of
from lm.experiments.procedure import Procedure, Run, next_runs
from lm.experiments.run_outcome import SELECTION, Outcome
from lm.experiments.slots import (
    LOG_FOLDER,
    Children,
    Devices,
    Slots,
    Stopped,
    gpu_words,
    interruptible,
    is_training,
    log_path,
)
from lm.experiments.summary import value_text
from lm.files import read_json, write_json
from lm.machine import STOP_SIGNALS, process_start
from lm.report.tables import numeral
from lm.runs.evaluations import NoDocuments, evaluation_files
from lm.runs.folder import CHECKPOINTS, step_of, step_paths
from lm.schema import Plain

if TYPE_CHECKING:
    from submitit import Job
    from submitit.helpers import DelayedSubmission

Engine = Literal["slurm", "local"]
# suffixes of files beside a run's log: why the run failed, and which job trains it
FAILURE_SUFFIX, JOB_SUFFIX = "failed.json", "job.json"
JOBS_FOLDER = "workers"  # folder in the experiment's folder: scripts and output of submitit's jobs
POLL_SECONDS = 1.0  # seconds between checks of a job
RECORD_WAIT_SECONDS = 120.0  # seconds within which a job must see the record that names it
# SIGKILL: out of memory?
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


# ---------------------------------------------------------------- runs that failed


@dataclass(frozen=True)
class Failure:
    """The failure of a run, which ended without a result."""

    status: int  # the exit status of the run; if a signal killed it, minus the number of the signal
    reason: str  # why the run failed: the last line of its output, the signal, or the measurement that is missing
    log: str  # path of the file that holds all output of the run
    saved: str = ""  # the last saved step and the number of evaluations, in words
    again: bool = False  # whether the run's previous crash had the same `saved`

    def __str__(self) -> str:
        return f"status {self.status}: {self.reason}" if self.status else self.reason

    @property
    def interrupted(self) -> bool:
        """Whether the next start continues the run, as a signal stopped the run, or killed it for the first time since
        its last save. A second crash without a save in between is a failure."""
        return (self.status < 0 and not self.again) or self.status - 128 in STOP_SIGNALS

    @property
    def crashed(self) -> bool:
        """Whether the run was killed by a signal that it may have caused itself, such as SIGSEGV."""
        return -self.status in _CRASH_SIGNALS


def note_failure(experiment_folder: Path, run: Run, status: int, reason: str) -> Failure:
    """Return the failure of a run that ended with the exit status `status`. Its reason is the signal that killed the
    run, else `reason`, else the last line of the run's log. Write the failure to a file for `read_failure`, unless a
    signal stopped the run without a crash.
    """
    log, folder = log_path(experiment_folder, run), run.config.run_folder
    step = max(map(step_of, step_paths(folder / CHECKPOINTS)), default=0)
    saved = f"step {step}, {len(evaluation_files(folder))} evaluations"
    if status < 0:
        reason = f"killed by {signal.Signals(-status).name}" + " (out of memory?)" * (status == -signal.SIGKILL)
    output = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() and not reason else []
    reason = reason or next((line for line in reversed(output) if line.strip()), "no output")[:300]
    failure, earlier = Failure(status, reason, str(log), saved), _last_failure(experiment_folder, run)
    if failure.crashed and earlier and earlier.crashed and earlier.saved == saved:
        failure = replace(failure, reason=f"{reason}, twice in a row at the same place", again=True)
    if failure.crashed or not failure.interrupted:
        write_json(log_path(experiment_folder, run, FAILURE_SUFFIX), vars(failure))
    return failure


def read_failure(experiment_folder: Path, run: Run) -> Failure | None:
    """Return the failure of a run; None if the run has not failed, or was interrupted. Raises RunError: the failure
    file is damaged.
    """
    failure = _last_failure(experiment_folder, run)
    return None if failure is None or failure.interrupted else failure


def _last_failure(experiment_folder: Path, run: Run) -> Failure | None:
    path = log_path(experiment_folder, run, FAILURE_SUFFIX)
    content = read_json(path) if path.exists() else {}
    return Failure(*(content[spec.name] for spec in fields(Failure))) if content else None


def failures(procedure: Procedure) -> list[tuple[Run, Failure]]:
    """The runs of an experiment that have failed, each with its failure."""
    pairs = ((run, read_failure(procedure.experiment.folder, run)) for run in procedure.known_runs())
    return [(run, failure) for run, failure in pairs if failure and not run.outcome.ended]


def forget_failures(procedure: Procedure) -> None:
    """Let the runs that failed be tried again."""
    for run in procedure.known_runs():
        log_path(procedure.experiment.folder, run, FAILURE_SUFFIX).unlink(missing_ok=True)


# ---------------------------------------------------------------- jobs of a scheduler


# options that submitit has for every engine
_COMMON_OPTIONS = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name")
_DEFAULT_OPTIONS = {"name": "lm", "timeout_min": 60}
_MAX_REQUEUES = 1000  # how often a job that meets its time limit is queued again


class Training:
    """A callable that submitit calls in a job to train a run; submitit calls its `checkpoint` when the job is about to
    end.
    """

    def __init__(self, run: Run, experiment_folder: Path):
        self.run, self.experiment_folder = run, experiment_folder
        self._children: Children | None = None  # made in the job: its locks can't be pickled

    def __call__(self) -> tuple[int, float]:
        """Train or continue the run, if its job record (`_job_record`) names this job. Returns exit status and seconds
        of training.
        """
        self._children = Children(self.experiment_folder)
        return self._children.train(self.run, None) if self._is_recorded_job() else (128 + signal.SIGTERM, 0.0)

    def checkpoint(self) -> "DelayedSubmission":
        """Let the run save a checkpoint and end. Returns the same job, which submitit queues again."""
        from submitit.helpers import DelayedSubmission

        if self._children:
            self._children.stop()
            self._children.wait()
        return DelayedSubmission(Training(self.run, self.experiment_folder))

    def _is_recorded_job(self) -> bool:
        """Wait at most RECORD_WAIT_SECONDS for the run's job record to name this job; return whether it does. If `lm
        compare` was killed before it recorded this job, the record may name a later job."""
        from submitit import JobEnvironment

        job_id, deadline = JobEnvironment().job_id, time.monotonic() + RECORD_WAIT_SECONDS
        while (
            recorded_id := _job_record(self.experiment_folder, self.run).get("id")
        ) != job_id and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return recorded_id == job_id


class Cluster:
    """Trains runs in jobs that submitit sends to a scheduler. Jobs outlive this process; `lm compare` finds them by
    files (`_job_record`).

    Args:
        experiment_folder: a folder that all machines see; its subfolder JOBS_FOLDER holds the scripts and output of the
            jobs.
        options: options of each job: options of submitit (timeout_min, gpus_per_node, cpus_per_task, mem_gb) or sbatch,
            such as partition.
        engine: the scheduler; with `local`, the jobs are processes of this machine.

    Raises:
        ConfigError: an option is unknown, or its value is wrong.
        RunError: submitit or the scheduler is not installed.
    """

    def __init__(self, experiment_folder: Path, options: dict[str, str], engine: Engine):
        try:
            import submitit
        except ImportError:
            raise RunError("--submit needs submitit, which is not installed: pip install 'submitit>=1.5.4'") from None
        self.experiment_folder = experiment_folder.absolute()
        self.engine = engine
        self._submitit_errors = submitit.core.utils
        self._lock, self._stopping = threading.Lock(), threading.Event()
        settings = _DEFAULT_OPTIONS | {
            name: int(value) if value.isdigit() else value for name, value in options.items()
        }
        parameters: dict[str, object] = {
            name if name in _COMMON_OPTIONS else f"{engine}_{name}": value for name, value in settings.items()
        }
        try:
            requeues = {f"{engine}_max_num_timeout": _MAX_REQUEUES}
            self._executor = submitit.AutoExecutor(self.experiment_folder / JOBS_FOLDER, engine, **requeues)
            self._executor.update_parameters(**parameters)
        except (AssertionError, NameError, TypeError, ValueError) as error:
            raise ConfigError(f"--job-options {','.join(map('='.join, options.items()))}: {one_line(error)}") from None
        except RuntimeError as error:
            raise RunError(f"--submit {engine}: {one_line(error)}") from None

    @property
    def scheduler_name(self) -> str:
        """The name of the scheduler; `local` is followed by the name of this machine."""
        return f"local on {host_name()}" if self.engine == "local" else self.engine

    def submit(self, function: Callable[[], object]) -> "Job":
        """Submit a job that calls `function`. Raises RunError: the scheduler refuses."""
        # A job of this machine inherits the blocked signals: Ctrl-C and a closed terminal are to stop this process
        # alone.
        signals = {signal.SIGINT, signal.SIGHUP}
        with self._lock:
            old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            try:
                return self._executor.submit(function)
            except (RuntimeError, OSError) as error:
                raise RunError(f"--submit {self.engine}: {one_line(error)}") from None
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

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
        because it lacked memory. After `stop`, the status is 128 + SIGTERM. Raises RunError: the scheduler refuses the
        job, or the job failed.
        """
        record = _job_record(self.experiment_folder, run)
        job = self._executor.job_class(self._executor.folder, str(record["id"])) if record else None
        if job is None or not self._is_alive(job, record["born"]):
            job = self.submit(Training(run, self.experiment_folder))
            birth = process_start(int(job.job_id)) if self.engine == "local" else ""
            record = {"engine": self.scheduler_name, "id": job.job_id, "born": birth}
            write_json(log_path(self.experiment_folder, run, JOB_SUFFIX), record)
            print(f"{run.stage}: {run.label}: job {job.job_id}", flush=True)
        while self._is_alive(job, record["born"]):
            if self._stopping.wait(POLL_SECONDS):
                return 128 + signal.SIGTERM, 0.0
        log_path(self.experiment_folder, run, JOB_SUFFIX).unlink(missing_ok=True)
        error = job.exception()
        return (
            (-signal.SIGKILL, 0.0)
            if error and not isinstance(error, self._submitit_errors.FailedJobError)
            else self.result(job)
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop waiting for the jobs, which continue to run. `number` is ignored; `Children.stop` sends this signal to
        its processes.
        """
        self._stopping.set()

    def _is_alive(self, job: "Job", birth: Plain) -> bool:
        """Whether a job is queued or running. A `local` job runs while the process with its ID has the start time
        `birth`.
        """
        return bool(birth) and process_start(int(job.job_id)) == birth if self.engine == "local" else not job.done()


def read_scheduler_options(text: str) -> dict[str, str]:
    """Parse job options such as `partition=gpu,timeout_min=240` into values by option name. Raises ConfigError."""
    options = {}
    for setting in filter(None, text.split(",")):
        name, separator, value = setting.partition("=")
        if not name.isidentifier() or not separator:
            raise ConfigError(f"--job-options {text}: must be KEY=VALUE,KEY=VALUE, e.g. partition=gpu,timeout_min=240")
        options[name] = value
    return options


def _job_record(experiment_folder: Path, run: Run) -> dict[str, Plain]:
    """Read the file that names the job that trains a run: its scheduler (key `engine`), its ID, and (`born`) the start
    time of a local job. {} without such a file. Raises RunError: the file is damaged."""
    path = log_path(experiment_folder, run, JOB_SUFFIX)
    return read_json(path) if path.exists() else {}


# ---------------------------------------------------------------- the runs of an experiment


class RunsFailed(RunError):
    """Some runs of an experiment failed; all others that could be started were trained."""


class ExperimentTrainer:
    """Trains the runs that an experiment needs, until all have ended or no other run can be started.

    Args:
        cluster: trains the runs in a scheduler's jobs; None: processes of this machine train them.
        run_costs: the resources of each run, by which the time that is left is estimated; {}: unknown.

    Attributes:
        known_runs: the runs that the experiment needs, as known when the run folders were last read.
        pending: for each run that is being trained, the future of its training, mapped to the run and its GPUs.
        failed: the failures of runs, by run folder.
        times: the seconds that a run of each size and arm takes, by the runs that have finished.
    """

    def __init__(
        self, procedure: Procedure, slots: Slots, cluster: Cluster | None = None, run_costs: Costs | None = None
    ):
        self.procedure, self.slots, self.folder = procedure, slots, procedure.experiment.folder
        self.cluster, self.trainer = cluster, cluster or Children(self.folder)
        self.known_runs: list[Run] = []
        self.pending: dict[Future, tuple[Run, Devices]] = {}
        self.failed: dict[Path, Failure] = {}
        self.run_costs = run_costs or {}
        self.times = run_times(procedure.known_runs() if run_costs else [], self.run_costs)

    def train_all(self) -> None:
        """Train runs until all have ended or no other run can be started.

        Raises:
            RunsFailed: some runs failed; it is raised when no other run can be started.
            Stopped: one of `STOP_SIGNALS` has arrived. Runs of this machine have saved a checkpoint; a
                scheduler's jobs go on.
            RunError: a job for which this process does not wait trains a run, a job failed, or a trained run lacks the
                primary metric.
        """
        self._check_jobs()
        self.pending = pending = dict[Future, tuple[Run, Devices]]()
        with interruptible() as signals, ThreadPoolExecutor(self.slots.n_slots) as pool:
            try:
                while True:
                    for run in self._startable_runs({run.config.run_folder for run, _ in pending.values()}):
                        devices = self.slots.devices(run.size, run.arm, [devices for _, devices in pending.values()])
                        if devices is None:
                            # no later run starts first: else a run of several GPUs would wait for all smaller ones
                            break
                        pending[pool.submit(self.trainer.train, run, devices)] = run, devices
                    if not pending:
                        break
                    for future in wait(pending, None, FIRST_COMPLETED).done:
                        self._report_end(*pending.pop(future), *future.result())
            except KeyboardInterrupt:
                number, running_count = signals[-1] if signals else signal.SIGINT, len(pending)
                self.stop()
                words = f"{'jobs that go on' if self.cluster else 'runs that saved and ended'}: {running_count}"
                words = words if running_count else "no run was under way"
                name = signal.Signals(number).name
                raise Stopped(f"stopped by {name}: {words}; the same command goes on", number) from None
            except BaseException:
                self.stop()
                raise
        if self.failed:
            words = "; ".join(f"{folder.name}: {failure}" for folder, failure in self.failed.items())
            remedies = {
                (True,): "the same command goes on with them",
                (False,): "--retry tries them again",
                (False, True): "--retry tries all of them again, without it the killed ones go on",
            }
            remedy = remedies[tuple(sorted({failure.interrupted for failure in self.failed.values()}))]
            logs = self.folder / LOG_FOLDER
            raise RunsFailed(f"{len(self.failed)} runs failed ({words}); {remedy}; their output is in {logs}")

    def free_runs(self) -> list[Run]:
        """List the runs that can start now and that no process of this machine trains. Raises RunError: a job trains
        one of the runs.
        """
        self._check_jobs()
        return [run for run in self._startable_runs(set()) if not is_training(run.config.run_folder)]

    def _check_jobs(self) -> None:
        """Delete the job records of runs that have ended. Raises RunError: a job for which this process does not wait
        trains a run.
        """
        for run in self.procedure.known_runs():
            record, path = _job_record(self.folder, run), log_path(self.folder, run, JOB_SUFFIX)
            if record and run.outcome.ended:
                path.unlink(missing_ok=True)
            elif record and record["engine"] != (self.cluster and self.cluster.scheduler_name):
                engine = str(record["engine"])
                remedy = f"add --submit {engine.split()[0]} to wait for it, or delete this file once the job is gone"
                raise RunError(f"{path}: job {record['id']} of {engine} trains this run; {remedy}")

    def _startable_runs(self, running_folders: set[Path]) -> Iterator[Run]:
        """Yield the next runs that have not failed. None of them, nor its source, trains in `running_folders`."""
        self.known_runs = self.procedure.known_runs()
        for run in next_runs(self.known_runs):
            folder, source = run.config.run_folder, run.source
            if {folder, source and source.config.run_folder} & (running_folders | self.failed.keys()):
                continue
            if failure := read_failure(self.folder, run):
                self.failed[folder] = failure
            else:
                yield run

    def _report_end(self, run: Run, devices: Devices, status: int, seconds: float) -> None:
        outcome, folder = replace(run.outcome), run.config.run_folder  # the copy reads the files again
        if not outcome.ended:
            reason = "" if status else self._missing_words(run, outcome)
            failure = self.failed[folder] = note_failure(self.folder, run, status, reason)
            print(f"{run.stage}: {run.label}: failed with {failure} ({failure.log})", flush=True)
            return
        log_path(self.folder, run, FAILURE_SUFFIX).unlink(missing_ok=True)
        self.known_runs = self.procedure.known_runs()
        self.times = run_times(self.known_runs, self.run_costs)
        words = self._result_words(run, outcome)
        if outcome.state == "diverged":
            words = f"diverged ({outcome.divergence})"
        elif outcome.not_learned_text:
            words += f", did not learn: {outcome.not_learned_text}"
        left = [run for run in self.known_runs if not run.outcome.ended]
        rest_words = f"{len(left)} of the {len(self.known_runs)} runs known so far are left"
        if self.times and left:
            rest_words += f", about {duration(seconds_of(left, self.times, self.slots))}"
        device_words = f" on {gpu_words(devices)}" if devices else ""
        print(f"{run.stage}: {run.label}: {words}, {seconds:.0f} s{device_words}; {rest_words}", flush=True)

    def _missing_words(self, run: Run, outcome: Outcome) -> str:
        """Say which measurement of a trained run is missing. Raises RunError: no run measures the primary metric."""
        metric, names, folder = self.procedure.experiment.primary.metric, outcome.unit_metrics, run.config.run_folder
        if metric in names:
            return "an evaluation or checkpoint of its last step is missing after training"
        reasons = [f"{kind}: {reason}" for kind, reason in outcome.failed_evaluations.items()]
        unmeasured = f"primary.metric {metric} was not measured by sequence at the last step"
        if not reasons:
            is_mean_alone = any(metric in line for line in outcome.log.lines)
            remedy = "it is a mean alone: give its rows units" if is_mean_alone else "correct the file"
            raise RunError(f"{folder}: {unmeasured}; {remedy}, measured were: {', '.join(names)}")
        return f"{unmeasured} ({'; '.join(reasons)}); lm eval {folder} measures it, without a limit of time"

    def _result_words(self, run: Run, outcome: Outcome) -> str:
        """Describe a tuning run by the metric that chooses rates, a final run by the number by which runs are compared.
        Both are measured on the held-out documents by which rates are chosen; for an accuracy, on all questions. Return
        `finished` if no such document is left."""
        experiment = self.procedure.experiment
        name = experiment.primary.quantity_name
        try:
            if (experiment.choice_metric if run.stage == "tune" else name) == SELECTION:
                return f"selection loss {numeral(outcome.mean(SELECTION, True))}"
            value = value_text(experiment.primary, self.procedure.compared_value(outcome, True))
        except NoDocuments:  # a line on progress must not end the experiment
            return "finished"
        return f"{name} ({experiment.data_words(name, 'selection')}) {value}"

    def stop(self) -> None:
        """Let the pending runs save a checkpoint, and wait for their end; a second interrupt kills them. Jobs of a
        scheduler go on.
        """
        self.trainer.stop()
        try:
            wait(self.pending)
        except KeyboardInterrupt:
            self.trainer.stop(signal.SIGKILL)
            wait(self.pending)
