"""`lm compare` on a terminal: one table of all runs of an experiment, kept up to date while they train, with the time that is left."""

import heapq
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lm.experiments.engine import Jobs
from lm.experiments.plan import Times, duration
from lm.experiments.procedure import Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.slots import named
from lm.report.tables import from_lines, grid
from lm.runs.folder import METRICS, MetricTail
from lm.statistics.tuning import Rate, rate_words

REFRESH_SECONDS = 1.0
MOST_RUNS = 20  # runs are shown one by one up to so many, else in groups
ENDED = ("finished", "diverged")
STATES = (*ENDED, "failed", "running", "waiting")  # in the order in which groups count them
_NUMBERS = ("rate", "seed", "runs", SELECTION, "done in")  # columns
_STYLES = {"finished": "green", "diverged": "red", "failed": "red", "running": "bold", "waiting": "dim"}
_EACH = ("size", "arm", "rate", "seed", "stage")
_GROUPS = (("size", "arm", "rate", "stage"), ("size", "arm", "stage"), ("size", "stage"))  # from the finest on


@dataclass
class RunLine:
    """A run as the table shows it.

    Attributes:
        state: one of `STATES`.
        step, last_step: logged so far, and the one it ends with.
        loss: the latest validation loss.
        note: what a waiting one waits for, or why it failed.
        remaining: estimated seconds until it has ended; None: not known, or it has.
        folder, before: of the run, and of the one it starts from; None of one that is not known yet.
    """

    size: str
    arm: str
    stage: str
    rate: Rate | None
    seed: int
    state: str = "waiting"
    step: int = 0
    last_step: int = 0
    loss: float | None = None
    note: str = ""
    remaining: float | None = None
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
        """Seconds until the last step at the speed seen here, or before that is known by the expected time of the run."""
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

    def lines(self) -> list[RunLine]:
        """All runs that are known, and those that will be once learning rates are chosen."""
        now, known, sizes = self.clock(), self.jobs.known, list(self.experiment.sizes)
        running = {run.config.run_folder: devices for run, devices in list(self.jobs.pending.values())}
        self._followed = {folder: self._followed.get(folder) or _Followed(MetricTail(folder / METRICS), now) for folder in running}
        for followed in self._followed.values():
            followed.look(now)
        ended = {run.config.run_folder for run in known if run.outcome.state == "finished"}
        lines = [self._line(run, named(running.get(run.config.run_folder, ())), ended, now) for run in known]
        lines += self._to_come(lines)
        self._estimate(lines)
        return sorted(lines, key=lambda line: sizes.index(line.size))

    def _line(self, run: Run, devices: str, ended: set[Path], now: float) -> RunLine:
        folder, outcome = run.config.run_folder, run.outcome
        line = RunLine(run.size, run.arm, run.stage, run.rate, run.seed, last_step=outcome.last_step, folder=folder, before=run.before)
        if outcome.ended:
            line.state, line.step = outcome.state, outcome.last_step
            line.loss = float(outcome.series(SELECTION).means[0]) if outcome.state == "finished" else None
        elif failure := self.jobs.failed.get(folder):
            line.state, line.note = "failed", f"status {failure.status}"
        elif followed := self._followed.get(folder):
            line.state, line.note = "running", devices
            line.step, line.loss = followed.log.step, followed.log.latest.get(SELECTION)
            line.remaining = followed.left(line.last_step, now, self._expected(line))
        elif run.before and run.before not in ended:
            line.note = "for the run it starts from"
        return line

    def _to_come(self, known: list[RunLine]) -> list[RunLine]:
        """The runs that the choice of learning rates will add: those of tuning of arms that start from others, and the final ones."""
        experiment, lines = self.experiment, []
        for size in experiment.sizes:
            mine = [line for line in known if line.size == size]
            final = {line.arm for line in mine if line.stage == "final"}
            begun = {line.arm for line in mine if line.stage == "tune"}
            tuned = begun - {line.arm for line in mine if line.stage == "tune" and line.state not in ENDED}
            if all(line.state in ENDED for line in mine):
                continue
            for arm in experiment.arms:
                if arm.tuned and arm.name not in begun:
                    for rate, seed in product(experiment.tune.rates, experiment.tune.seeds):
                        lines.append(RunLine(size, arm.name, "tune", rate, seed, note="for the rates of earlier arms"))
            for arm in experiment.arms:
                without_rate = final and (not experiment.tune.grid or (arm.name if arm.tuned else arm.start) in tuned)
                if arm.name not in final and not without_rate:
                    lines += [RunLine(size, arm.name, "final", None, seed, note="for its rate") for seed in experiment.seeds]
        return lines

    def _expected(self, line: RunLine) -> float | None:
        """Expected seconds of a run: the mean of those that ended here, else the plan's."""
        took = self.jobs.seconds.get((line.size, line.arm))
        return statistics.fmean(took) if took else self.times.get((line.size, line.arm))

    def _estimate(self, lines: list[RunLine]) -> None:
        """Give the waiting lines their `remaining`, as if they were taken in their order, by as many at a time as work now."""
        taken = {(line.size, line.arm): self.jobs.slots.taken(line.size, line.arm) for line in lines}
        busy = [line for line in lines if line.state == "running"]
        slots = [line.remaining or 0.0 for line in busy for _ in range(taken[line.size, line.arm])]
        slots += [0.0] * (self.jobs.slots.jobs - len(slots))
        heapq.heapify(slots)
        ends = {line.folder: line.remaining or 0.0 for line in busy}
        tuned: dict[str, float] = defaultdict(float)  # by size, when its tuning ends
        for line in lines:
            if line.state == "waiting" and (expected := self._expected(line)) is not None:
                free = [heapq.heappop(slots) for _ in range(taken[line.size, line.arm])]
                line.remaining = max(*free, ends.get(line.before, 0.0) if line.folder else tuned[line.size]) + expected
                ends |= {line.folder: line.remaining} if line.folder else {}
                for _ in free:
                    heapq.heappush(slots, line.remaining)
            if line.stage == "tune" and line.remaining is not None:
                tuned[line.size] = max(tuned[line.size], line.remaining)

    def render(self, height: int = 50) -> RenderableType:
        """The table, in at most about `height` lines."""
        lines = self.lines()
        if not lines:
            return Text("reading the run folders")
        room = max(1, min(MOST_RUNS, height - 6))  # beside borders, heading and the line below
        groupings = [(names, _grouped(lines, names)) for names in (_EACH, *_GROUPS)]
        names, groups = next((each for each in groupings if len(each[1]) <= room), groupings[-1])
        table = from_lines("", [self._row(names, group) for group in groups], _NUMBERS)
        return Group(grid(table), Text(self._whole(lines)))

    def _row(self, names: tuple[str, ...], group: list[RunLine]) -> dict[str, str | Text]:
        """The row of lines that are equal in `names`, without what the experiment does not have."""
        first, each = group[0], names == _EACH
        absent = {"size"} if "" in self.experiment.sizes else set()
        absent |= set() if self.experiment.tuned else {"rate"}
        place = {"size": first.size, "arm": first.arm, "rate": "" if first.rate is None else rate_words(first.rate), "stage": first.stage}
        row = {name: str(first.seed) if name == "seed" else place[name] for name in names if name not in absent}
        steps = [f"{line.step} of {line.last_step}" for line in group if line.state == "running" or (each and line.last_step)]
        losses = [line.loss for line in group if line.loss is not None and (each or line.state == "finished")]
        if each:
            state = Text(f"{first.state} {first.note}".strip(), _STYLES[first.state])
        else:
            row["runs"], counts = str(len(group)), Counter(line.state for line in group)
            on = "".join(f" {line.note}" for line in group if line.state == "running" and line.note)
            state = Text(", ".join(f"{counts[name]} {name}{on * (name == 'running')}" for name in STATES if counts[name]))
        loss = {SELECTION if each else f"mean {SELECTION}": f"{statistics.fmean(losses):.4f}" if losses else ""}
        latest = _latest(group)
        return row | {"state": state, "step": "; ".join(steps)} | loss | {"done in": "" if latest is None else duration(latest)}

    def _whole(self, lines: list[RunLine]) -> str:
        """The line below the table: how far the experiment is."""
        experiment, counts = self.experiment, Counter(line.state for line in lines)
        ended = sum(counts[state] for state in ENDED)
        words = [f"{experiment.name}: {ended} of {len(lines)} runs ended"]
        words[0] += "".join(f", {counts[state]} {state}" for state in ("failed", "running") if counts[state])
        if experiment.tune.grid:
            remaining = sum(line.stage == "tune" and line.state not in ENDED for line in lines)
            rates = {(line.size, line.rate) for line in lines if line.stage == "tune" and line.rate not in experiment.tune.rates}
            more = max(Counter(size for size, _ in rates).values(), default=0)
            grown = f", whose grid has grown by {more}" if more else ""
            words.append(f"tuning{grown}: {f'{remaining} runs left' if remaining else 'done'}")
        if waiting := [line for line in lines if line.state in ("running", "waiting")]:
            known = all(line.remaining is not None for line in waiting)
            words.append(f"about {duration(_latest(lines) or 0.0)} left" if known else "how long it takes is not known yet")
        return "; ".join(words)


def _grouped(lines: list[RunLine], names: tuple[str, ...]) -> list[list[RunLine]]:
    """Lines that are equal in these names, in the order of the first of each."""
    groups: dict[tuple, list[RunLine]] = {}
    for line in lines:
        groups.setdefault(tuple(getattr(line, name) for name in names), []).append(line)
    return list(groups.values())


def _latest(lines: list[RunLine]) -> float | None:
    return max((line.remaining for line in lines if line.remaining is not None), default=None)


@contextmanager
def live_table(jobs: Jobs, times: Times) -> Iterator[None]:
    """Show the table on standard output while the body works, if that is a terminal and `log.progress` is auto or bar; what is printed
    meanwhile goes above it, and nothing of it is left at the end."""
    console, progress = Console(), jobs.procedure.experiment.first_config.log.progress
    if not (sys.stdout.isatty() and console.is_interactive and progress in ("auto", "bar")):
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
