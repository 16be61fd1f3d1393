"""Training the runs of an experiment: several at a time, side by side with other processes that work on the same experiment."""

import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lm.errors import RunError
from lm.experiments.children import Children, Stopped, interruptible
from lm.experiments.claims import Claim, Claims
from lm.experiments.failures import LOGS, Failure, failure_of, forget_failure, read_failure, write_failure
from lm.experiments.outcomes import SELECTION, Outcome
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Devices, Slots, named
from lm.experiments.timing import whole
from lm.report.tables import digits

CLAIMS = "claims"  # in the experiment's folder
POLL_SECONDS = 3.0  # between looks at what other processes do


class RunsFailed(RunError):
    """Some runs of an experiment have no result; the others were trained."""


def retry(procedure: Procedure) -> None:
    """Let the runs that failed be tried again."""
    for run in procedure.known():
        forget_failure(procedure.experiment.folder, run)


class Jobs:
    """Trains what an experiment needs until nothing is left, or nothing more can be done.

    Each run is claimed first (`lm.experiments.claims`): several processes may work on one experiment, on machines that share its folder.

    Args:
        procedure: says what is needed next.
        slots: how many runs work at a time, and on which GPUs.
        launch: trains one run, or goes on with it, and gives the exit status; None: `lm` in a process of its own.

    Attributes:
        known: the runs that the experiment needs, as they were at the last look.
        pending: the runs that are being trained here, with the claims on them and their GPUs.
        failed: why runs have failed, by run folder.
        seconds: that runs which ended here would have taken without interruption, by size and arm.
    """

    def __init__(self, procedure: Procedure, slots: Slots, launch: Callable[[Run], int] | None = None):
        self.procedure, self.slots, self.folder = procedure, slots, procedure.experiment.folder
        self.children, self.claims = Children(self.folder), Claims(self.folder / CLAIMS)
        self.launch = launch
        self.known: list[Run] = []
        self.pending: dict[Future, tuple[Run, Claim, Devices]] = {}
        self.failed: dict[Path, Failure] = {}
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def work(self) -> None:
        """Train until no run is left.

        Raises:
            RunsFailed: at the end, if some did.
            Stopped: by SIGINT, SIGTERM, SIGHUP or SIGUSR1; the runs have saved a checkpoint.
        """
        self.pending = pending = dict[Future, tuple[Run, Claim, Devices]]()
        with interruptible() as received, ThreadPoolExecutor(self.slots.jobs) as pool:
            try:
                while True:
                    others = False
                    for run in self._startable({run.config.run_folder for run, *_ in pending.values()}):
                        devices = self.slots.devices(run.size, run.arm, [devices for *_, devices in pending.values()])
                        if devices is None:
                            break  # no later one goes before it: a run of several GPUs would wait for as long as there are others
                        claim = self._claim(run)
                        others |= claim is None
                        if claim:
                            pending[pool.submit(self._train, run, claim, devices)] = run, claim, devices
                    if pending:
                        for future in wait(pending, POLL_SECONDS if others else None, FIRST_COMPLETED).done:
                            self._ended(*pending.pop(future), *future.result())
                    elif others:
                        time.sleep(POLL_SECONDS)
                    else:
                        break
            except KeyboardInterrupt:
                raise self._stopped(received[-1] if received else signal.SIGINT) from None
            except BaseException:
                self.stop()
                raise
        self._report_failures()

    def free(self) -> list[Run]:
        """Runs that can be started now, and that no process works on."""
        startable = list(self._startable(set()))
        held = self.claims.holders(map(claim_name, startable))
        return [run for run in startable if claim_name(run) not in held]

    def _startable(self, running: set[Path]) -> Iterator[Run]:
        """Runs that are not done and have not failed, whose starting weights are there."""
        self.known = known = self.procedure.known()
        done = {one.config.run_folder for one in known if one.outcome.state == "finished" and one.config.run_folder not in running}
        for run in known:
            folder = run.config.run_folder
            if run.outcome.ended or folder in running | self.failed.keys() or (run.before and run.before not in done):
                continue
            if failure := read_failure(self.folder, run):
                self.failed[folder] = failure
            else:
                yield run

    def _claim(self, run: Run) -> Claim | None:
        """The claim on a run that is still to be done; None if another process has it, or has just done it."""
        claim = self.claims.take(claim_name(run), lambda: self.children.stop_one(run))
        if claim and (replace(run.outcome).ended or read_failure(self.folder, run)):  # by another, since we looked
            self.claims.release(claim)
            return None
        return claim

    def _train(self, run: Run, claim: Claim, devices: Devices) -> tuple[int, float]:
        """The exit status of training a run, and the seconds it took."""
        begin = time.monotonic()
        status = self.launch(run) if self.launch else self.children.train(run, claim, devices)
        return status, time.monotonic() - begin

    def _ended(self, run: Run, claim: Claim, devices: Devices, status: int, seconds: float) -> None:
        outcome, folder = replace(run.outcome), run.config.run_folder  # read anew
        try:
            if outcome.ended:
                forget_failure(self.folder, run)
                self.procedure.check_direction(outcome)
                self.seconds[run.size, run.arm] += filter(None, [whole(run, seconds)])
                diverged = outcome.state == "diverged"
                by = self.procedure.experiment.chosen_by
                metric = "selection loss" if by == SELECTION else f"{by} on the selection text"
                said = f"diverged ({outcome.divergence})" if diverged else f"{metric} {digits(self.procedure.choosing(outcome))}"
                said += f", did not learn: {outcome.not_learned}" if outcome.not_learned and not diverged else ""
                known = self.procedure.known()
                left = [self.slots.taken(one.size, one.arm) for one in known if not one.outcome.ended]
                took = [*chain(*self.seconds.values())]
                left_over = f"{len(left)} of the {len(known)} runs known so far are left"
                left_over += f", about {statistics.fmean(took) * sum(left) / self.slots.jobs / 60:.0f} min" if took else ""
                where = f" on {named(devices)}" if devices else ""
                print(f"{run.stage}: {run.label}: {said}, {seconds:.0f} s{where}; {left_over}", flush=True)
            elif not status:
                raise RunError(f"{folder}: {self._lacks(outcome)}")
            elif not claim.lost:
                failure = failure_of(self.folder, run, status)
                self.failed[folder] = failure
                write_failure(self.folder, run, failure)
                print(f"{run.stage}: {run.label}: failed with {failure} ({failure.log})", flush=True)
        finally:
            self.claims.release(claim)

    def _lacks(self, outcome: Outcome) -> str:
        """Why a run that was trained and measured has no result."""
        metric, names = self.procedure.experiment.primary.metric, outcome.names
        if metric in names:
            return "an evaluation or checkpoint of its last step is missing after training; its output is in the folder logs"
        return f"primary.metric {metric} was not measured by sequence at the last step; correct the file, measured were: {', '.join(names)}"

    def _report_failures(self) -> None:
        """Raises RunError if runs failed: which, why, and what to do."""
        if not self.failed:
            return
        lines = "; ".join(f"{folder.name}: {failure}" for folder, failure in self.failed.items())
        remedy = {True: "the same command goes on with them", False: "--retry tries them again"}
        kinds = [remedy[kind] for kind in (False, True) if any(one.interrupted is kind for one in self.failed.values())]
        words = kinds[0] if len(kinds) == 1 else "--retry tries all of them again, without it the killed ones go on"
        raise RunsFailed(f"{len(self.failed)} runs failed ({lines}); {words}; their output is in {self.folder / LOGS}")

    def _stopped(self, number: int) -> Stopped:
        """What to say once a signal has stopped the work."""
        running = len(self.pending)
        self.stop()
        saved = f"{running} runs were asked to save and have ended" if running else "no run was under way"
        return Stopped(f"stopped by {signal.Signals(number).name}: {saved}; the same command goes on", number)

    def stop(self) -> None:
        """Let the running ones save a checkpoint and end, and give their claims back; a second signal kills them."""
        self.children.stop()
        try:
            wait(self.pending)
        except KeyboardInterrupt:
            self.children.stop(signal.SIGKILL)
            wait(self.pending)
        self.claims.release_all()


def claim_name(run: Run) -> str:
    """The name of the claim on a run."""
    return str(Path(run.size) / run.config.name)
