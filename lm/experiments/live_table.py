"""`lm compare` on a terminal: one table of all runs of an experiment, kept up to date while they train, with the time that is left."""

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from lm.statistics.tuning import rate_words

REFRESH_SECONDS = 1.0
MOST_RUNS = 20  # runs are shown one by one up to so many, else in groups
ENDED = ("finished", "diverged")
STATES = (*ENDED, "failed", "running", "waiting")  # in the order in which groups count them
_NUMBERS = ("rate", "seed", "runs", SELECTION)  # columns
_STYLES = {"finished": "green", "diverged": "red", "failed": "red", "running": "bold", "waiting": "dim"}
_EACH = ("size", "arm", "rate", "seed", "stage")
_GROUPS = (("size", "arm", "rate", "stage"), ("size", "arm", "stage"), ("size", "stage"))  # from the finest on


@dataclass
class RunLine:
    """A run as the table shows it.

    Attributes:
        state: one of `STATES`.
        step: logged so far.
        loss: the latest validation loss.
        note: what a waiting one waits for, or why it failed.
    """

    run: Run
    state: str = "waiting"
    step: int = 0
    loss: float | None = None
    note: str = ""


class LiveTable:
    """The runs of an experiment that are known as text: each with its state, step and validation loss, or groups of them.

    It reads what `jobs` knows already, and the ends of the logs of the runs under way.

    Args:
        jobs: the work that it shows.
        times: seconds that a run takes, by size and arm, as the plan estimates them; {}: not known.
    """

    def __init__(self, jobs: Jobs, times: Times):
        self.jobs, self.experiment, self.times = jobs, jobs.procedure.experiment, times
        self._logs: dict[Path, MetricTail] = {}

    def lines(self) -> list[RunLine]:
        """All runs that are known."""
        running = {run.config.run_folder: devices for run, devices in list(self.jobs.pending.values())}
        self._logs = {folder: self._logs.get(folder) or MetricTail(folder / METRICS) for folder in running}
        for log in self._logs.values():
            log.look()
        ended = {run.config.run_folder for run in self.jobs.known if run.outcome.state == "finished"}
        return [self._line(run, named(running.get(run.config.run_folder, ())), ended) for run in self.jobs.known]

    def _line(self, run: Run, devices: str, ended: set[Path]) -> RunLine:
        folder, outcome = run.config.run_folder, run.outcome
        if outcome.ended:
            loss = float(outcome.series(SELECTION).means[0]) if outcome.state == "finished" else None
            return RunLine(run, outcome.state, outcome.last_step, loss)
        if failure := self.jobs.failed.get(folder):
            return RunLine(run, "failed", note=f"status {failure.status}")
        if log := self._logs.get(folder):
            return RunLine(run, "running", log.step, log.latest.get(SELECTION), devices)
        return RunLine(run, note="for the run it starts from" if run.before and run.before not in ended else "")

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
        """The row of lines whose runs are equal in `names`, without what the experiment does not have."""
        first, each = group[0], names == _EACH
        absent = {"size"} if "" in self.experiment.sizes else set()
        absent |= set() if self.experiment.tuned else {"rate"}
        row = {name: _cell(first.run, name) for name in names if name not in absent}
        steps = [f"{line.step} of {line.run.outcome.last_step}" for line in group if each or line.state == "running"]
        losses = [line.loss for line in group if line.loss is not None and (each or line.state == "finished")]
        if each:
            state = Text(f"{first.state} {first.note}".strip(), _STYLES[first.state])
        else:
            row["runs"], counts = str(len(group)), Counter(line.state for line in group)
            on = "".join(f" {line.note}" for line in group if line.state == "running" and line.note)
            state = Text(", ".join(f"{counts[name]} {name}{on * (name == 'running')}" for name in STATES if counts[name]))
        loss = {SELECTION if each else f"mean {SELECTION}": f"{statistics.fmean(losses):.4f}" if losses else ""}
        return row | {"state": state, "step": "; ".join(steps)} | loss

    def _whole(self, lines: list[RunLine]) -> str:
        """The line below the table: how far the experiment is."""
        experiment, counts = self.experiment, Counter(line.state for line in lines)
        ended = sum(counts[state] for state in ENDED)
        words = [f"{experiment.name}: {ended} of the {len(lines)} runs known so far ended"]
        words[0] += "".join(f", {counts[state]} {state}" for state in ("failed", "running") if counts[state])
        if experiment.tune.grid:
            tuning = [line for line in lines if line.run.stage == "tune"]
            remaining = sum(line.state not in ENDED for line in tuning)
            rates = {(line.run.size, line.run.rate) for line in tuning if line.run.rate not in experiment.tune.rates}
            more = max(Counter(size for size, _ in rates).values(), default=0)
            grown = f", whose grid has grown by {more}" if more else ""
            words.append(f"tuning{grown}: {f'{remaining} runs left' if remaining else 'done'}")
        if waiting := [line for line in lines if line.state in ("running", "waiting")]:
            seconds = [self._seconds(line) for line in waiting]
            known = None not in seconds
            words.append(f"about {duration(sum(seconds) / self.jobs.slots.jobs)} left" if known else "how long it takes is not known yet")
        return "; ".join(words)

    def _seconds(self, line: RunLine) -> float | None:
        """Seconds of a slot that a run still takes, by the mean of those that ended here, else by the plan; None: not known."""
        place = line.run.size, line.run.arm
        took = self.jobs.seconds.get(place)
        expected = statistics.fmean(took) if took else self.times.get(place)
        return expected and expected * self.jobs.slots.taken(*place) * (1 - line.step / max(1, line.run.outcome.last_step))


def _cell(run: Run, name: str) -> str:
    """A cell of the table: the value by which a run is told apart, such as its rate."""
    value = getattr(run, name)
    return "" if value is None else rate_words(value) if name == "rate" else str(value)


def _grouped(lines: list[RunLine], names: tuple[str, ...]) -> list[list[RunLine]]:
    """Lines whose runs are equal in these names, in the order of the first of each."""
    groups: dict[tuple, list[RunLine]] = {}
    for line in lines:
        groups.setdefault(tuple(getattr(line.run, name) for name in names), []).append(line)
    return list(groups.values())


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
