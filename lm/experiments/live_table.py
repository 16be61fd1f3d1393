"""`lm compare` on a terminal: one table of all runs of an experiment, kept up to date while they train, with the time that is left."""

import heapq
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lm.experiments.engine import Jobs
from lm.experiments.procedure import Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.slots import Devices, named
from lm.experiments.timing import Times, duration
from lm.report.tables import from_lines, grid
from lm.runs.folder import METRICS, MetricTail

REFRESH_SECONDS = 1.0
MOST_LINES = 20  # runs are shown one by one up to so many, else in groups
ENDED = ("finished", "diverged")
NUMBERS = ("rate", "seed", "runs", SELECTION, "done in")  # columns
STATES = (*ENDED, "failed", "running", "waiting")  # in the order in which groups count them
_STYLES = {"finished": "green", "diverged": "red", "failed": "red", "running": "bold", "waiting": "dim"}
_GROUPS = (("size", "arm", "rate", "stage"), ("size", "arm", "stage"), ("size", "stage"))  # from the finest on


@dataclass
class Line:
    """A run as the table shows it.

    Attributes:
        state: one of `STATES`.
        step, last_step: logged so far, and the one it ends with.
        loss: the latest validation loss.
        note: what a waiting one waits for, or why it failed.
        left: estimated seconds until it has ended; None: not known, or it has.
        folder, before: of the run, and of the one it starts from; None of one that is not known yet.
    """

    size: str
    arm: str
    stage: str
    rate: float | None
    seed: int
    state: str = "waiting"
    step: int = 0
    last_step: int = 0
    loss: float | None = None
    note: str = ""
    left: float | None = None
    folder: Path | None = None
    before: Path | None = None


@dataclass
class _Followed:
    """The log of a run under way, and when its steps were seen."""

    log: MetricTail
    since: float
    first_step: int = 0
    first_seen: float = 0.0  # seconds, by the table's clock; 0: no step yet
    last_seen: float = 0.0

    def look(self, now: float) -> None:
        before = self.log.step
        self.log.look()
        if self.log.step and not self.first_seen:
            self.first_step, self.first_seen = self.log.step, now
        if self.log.step != before:
            self.last_seen = now

    def left(self, last_step: int, now: float, expected: float | None) -> float | None:
        """Seconds until the last step at the speed seen here; before it is known, what is left of the expected time."""
        steps = self.log.step - self.first_step
        if self.first_seen and steps > 0:
            return max(0.0, (self.last_seen - self.first_seen) / steps * (last_step - self.log.step) - (now - self.last_seen))
        return None if expected is None else max(0.0, expected - (now - self.since))


class LiveTable:
    """The runs of an experiment as text: each with its state, step, validation loss and the time left, or groups of them.

    It reads what `jobs` knows already, and the ends of the logs of the runs under way.

    Args:
        jobs: the work that it shows.
        times: seconds that a run takes, by size and arm, as the plan estimates them; {}: not known.
        clock: seconds that pass.
    """

    def __init__(self, jobs: Jobs, times: Times, clock: Callable[[], float] = time.monotonic):
        self.jobs, self.experiment, self.times, self.clock = jobs, jobs.procedure.experiment, times, clock
        self._followed: dict[Path, _Followed] = {}

    def lines(self) -> list[Line]:
        """All runs that are known, and those that will be once learning rates are chosen."""
        now, known = self.clock(), self.jobs.known
        running = {run.config.run_folder: devices for run, devices in list(self.jobs.pending.values())}
        self._followed = {folder: self._followed.get(folder) or _Followed(MetricTail(folder / METRICS), now) for folder in running}
        for followed in self._followed.values():
            followed.look(now)
        ended = {run.config.run_folder for run in known if run.outcome.state == "finished"}
        lines = [self._line(run, running, ended, now) for run in known]
        lines += self._to_come(lines)
        self._estimate(lines)
        sizes = list(self.experiment.sizes)
        return sorted(lines, key=lambda line: sizes.index(line.size))

    def _line(self, run: Run, running: dict[Path, Devices], ended: set[Path], now: float) -> Line:
        folder, outcome = run.config.run_folder, run.outcome
        line = Line(run.size, run.arm, run.stage, run.rate, run.seed, last_step=outcome.last_step, folder=folder, before=run.before)
        followed = self._followed.get(folder)
        if outcome.ended:
            line.state, line.step = outcome.state, outcome.last_step
            line.loss = float(outcome.series(SELECTION).means[0]) if outcome.state == "finished" else None
        elif failure := self.jobs.failed.get(folder):
            line.state, line.note = "failed", f"status {failure.status}"
        elif followed:
            line.state, line.note = "running", named(running[folder])
            line.step, line.loss = followed.log.step, followed.log.latest.get(SELECTION)
            line.left = followed.left(line.last_step, now, self._expected(run.size, run.arm))
        elif run.before and run.before not in ended:
            line.note = "for the run it starts from"
        return line

    def _to_come(self, known: list[Line]) -> list[Line]:
        """The runs that the choice of learning rates will add: those of tuning of arms that start from others, and the final ones."""
        experiment, lines = self.experiment, []
        for size in experiment.sizes:
            mine = [line for line in known if line.size == size]
            final = {line.arm for line in mine if line.stage == "final"}
            open_arms = {line.arm for line in mine if line.stage == "tune" and line.state not in ENDED}
            tuned = {line.arm for line in mine if line.stage == "tune"} - open_arms
            if all(line.state in ENDED for line in mine):
                continue
            for arm in experiment.arms:
                if arm.tuned and arm.name not in tuned | open_arms:
                    for rate, seed in product(experiment.tune.grid, experiment.tune.seeds):
                        lines.append(Line(size, arm.name, "tune", rate, seed, note="for the rates of earlier arms"))
            for arm in experiment.arms:
                without_rate = final and (not experiment.tune.grid or (arm.name if arm.tuned else arm.start) in tuned)
                if arm.name not in final and not without_rate:
                    lines += [Line(size, arm.name, "final", None, seed, note="for its rate") for seed in experiment.seeds]
        return lines

    def _expected(self, size: str, arm: str) -> float | None:
        """Seconds of a run, as those that ended here took, else as the plan says."""
        took = self.jobs.seconds.get((size, arm))
        return statistics.fmean(took) if took else self.times.get((size, arm))

    def _estimate(self, lines: list[Line]) -> None:
        """Give the waiting lines their `left`, as if they were taken in their order, by as many at a time as work now."""
        busy = [line for line in lines if line.state == "running"]
        taken = self.jobs.slots.taken
        slots = [line.left or 0.0 for line in busy for _ in range(taken(line.size, line.arm))]
        slots += [0.0] * (self.jobs.slots.jobs - sum(taken(line.size, line.arm) for line in busy))
        heapq.heapify(slots)
        ends = {line.folder: line.left or 0.0 for line in busy}
        tuned: dict[str, float] = defaultdict(float)  # by size, when its tuning ends
        for line in lines:
            if line.stage == "tune" and line.left is not None:
                tuned[line.size] = max(tuned[line.size], line.left)
            if line.state != "waiting" or (expected := self._expected(line.size, line.arm)) is None:
                continue
            free = [heapq.heappop(slots) for _ in range(taken(line.size, line.arm))]
            after = ends.get(line.before, 0.0) if line.folder else tuned[line.size]
            line.left = max(*free, after) + expected
            ends |= {line.folder: line.left} if line.folder else {}
            if line.stage == "tune":
                tuned[line.size] = max(tuned[line.size], line.left)
            for _ in free:
                heapq.heappush(slots, line.left)

    def render(self, height: int = 50) -> RenderableType:
        """The table, in at most about `height` lines."""
        lines = self.lines()
        if not lines:
            return Text("reading the run folders")
        room = max(1, min(MOST_LINES, height - 6))  # beside borders, heading and the line below
        if len(lines) <= room:
            table = self._of_runs(lines)
        else:
            groupings = [(names, self._grouped(lines, names)) for names in _GROUPS]
            names, groups = next((each for each in groupings if len(each[1]) <= room), groupings[-1])
            table = self._of_groups(names, groups)
        return Group(table, Text(self._whole(lines)))

    def _of_runs(self, lines: list[Line]) -> Table:
        rows = [
            {
                **self._place(line, ("size", "arm", "rate", "seed", "stage")),
                "state": Text(f"{line.state} {line.note}".strip(), _STYLES[line.state]),
                "step": f"{line.step} of {line.last_step}" if line.last_step else "",
                SELECTION: "" if line.loss is None else f"{line.loss:.4f}",
                "done in": _time(line.left),
            }
            for line in lines
        ]
        return grid(from_lines("", rows, NUMBERS))

    def _of_groups(self, names: tuple[str, ...], groups: list[list[Line]]) -> Table:
        rows = []
        for group in groups:
            steps = [f"{line.step} of {line.last_step}" for line in group if line.state == "running"]
            counts = {state: sum(line.state == state for line in group) for state in STATES}
            on = {state: "".join(f" {line.note}" for line in group if line.state == state == "running" and line.note) for state in STATES}
            losses = [line.loss for line in group if line.state == "finished" and line.loss is not None]
            rows.append(
                {
                    **self._place(group[0], names),
                    "runs": str(len(group)),
                    "state": Text(", ".join(f"{count} {state}{on[state]}" for state, count in counts.items() if count)),
                    "step": "; ".join(steps),
                    f"mean {SELECTION}": f"{statistics.fmean(losses):.4f}" if losses else "",
                    "done in": _time(_latest(group)),
                }
            )
        return grid(from_lines("", rows, NUMBERS))

    def _place(self, line: Line, names: tuple[str, ...]) -> dict[str, str]:
        """The place that tells a run from the others, without what the experiment does not have."""
        has = {"size": line.size, "rate": "" if line.rate is None else f"{line.rate:g}"}
        absent = {"size"} if "" in self.experiment.sizes else set()
        absent |= set() if self.experiment.tuned else {"rate"}
        return {name: has[name] if name in has else str(getattr(line, name)) for name in names if name not in absent}

    def _grouped(self, lines: list[Line], names: tuple[str, ...]) -> list[list[Line]]:
        """Lines that are equal in these names, in the order of the first of each."""
        groups: dict[tuple, list[Line]] = {}
        for line in lines:
            groups.setdefault(tuple(getattr(line, name) for name in names), []).append(line)
        return list(groups.values())

    def _whole(self, lines: list[Line]) -> str:
        """The line below: how far the experiment is."""
        experiment = self.experiment
        ended = sum(line.state in ENDED for line in lines)
        counts = [f"{n} {state}" for state in STATES[2:4] if (n := sum(line.state == state for line in lines))]
        said = [f"{experiment.name}: {ended} of {len(lines)} runs ended" + "".join(f", {count}" for count in counts)]
        if experiment.tune.grid:
            left = sum(line.stage == "tune" and line.state not in ENDED for line in lines)
            rates = {(line.size, line.rate) for line in lines if line.stage == "tune" and line.rate not in experiment.tune.grid}
            more = max(sum(size == other for other, _ in rates) for size in experiment.sizes)
            grown = f", whose grid has grown by {more}" if more else ""
            said.append(f"tuning{grown}: {f'{left} runs left' if left else 'done'}")
        waiting = [line for line in lines if line.state in ("running", "waiting")]
        if waiting:
            known = all(line.left is not None for line in waiting)
            said.append(f"about {duration(_latest(lines) or 0.0)} left" if known else "how long it takes is not known yet")
        return "; ".join(said)


@contextmanager
def live_table(jobs: Jobs, times: Times) -> Iterator[None]:
    """Show the table on standard output while the body works, if that is a terminal and `log.progress` is auto or bar; what is printed
    meanwhile goes above it, and nothing of it is left at the end."""
    console = Console()
    asked = jobs.procedure.experiment.first_config.log.progress
    if not (sys.stdout.isatty() and console.is_interactive and asked in ("auto", "bar")):
        yield
        return
    table = LiveTable(jobs, times)
    live = Live(
        get_renderable=lambda: table.render(console.size.height), console=console, refresh_per_second=1 / REFRESH_SECONDS, transient=True
    )
    with suppress(OSError):  # a terminal that was closed
        live.start()
    try:
        yield
    finally:
        with suppress(OSError):
            live.stop()


def _latest(lines: list[Line]) -> float | None:
    return max((line.left for line in lines if line.left is not None), default=None)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)
