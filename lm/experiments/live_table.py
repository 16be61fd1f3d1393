"""The table that `lm compare` shows on a terminal, with all runs of an experiment and the remaining time, updated while
runs train.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lm.experiments.engine import ExperimentTrainer
from lm.experiments.plan import Times, duration
from lm.experiments.procedure import Run
from lm.experiments.run_outcome import SELECTION
from lm.experiments.slots import gpu_words
from lm.report.tables import table_from_rows, to_rich
from lm.runs.folder import METRICS, last_logged
from lm.schema import Plain
from lm.statistics.tuning import rate_text

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

    times: seconds that a run takes, by size and arm, as the plan estimates them; {}: unknown.
    """

    def __init__(self, jobs: ExperimentTrainer, times: Times):
        self.jobs, self.experiment, self.times = jobs, jobs.procedure.experiment, times
        self._logged: dict[Path, dict[str, Plain]] = {}  # the last value of each metric, by the folders of pending runs

    def run_lines(self) -> list[RunLine]:
        devices_by_folder = {run.config.run_folder: devices for run, devices in list(self.jobs.pending.values())}
        self._logged = {
            folder: self._logged.get(folder, {}) | last_logged(folder / METRICS) for folder in devices_by_folder
        }
        return [
            self._run_line(run, gpu_words(devices_by_folder.get(run.config.run_folder, ())))
            for run in self.jobs.known_runs
        ]

    def _run_line(self, run: Run, devices: str) -> RunLine:
        folder, outcome = run.config.run_folder, run.outcome
        if outcome.ended:
            loss = float(outcome.series(SELECTION).means[0]) if outcome.state == "finished" else None
            return RunLine(run, outcome.state, outcome.last_step, loss)
        if failure := self.jobs.failed.get(folder):
            return RunLine(run, "failed", note=f"status {failure.status}")
        if (logged := self._logged.get(folder)) is not None:
            return RunLine(run, "running", logged.get("step", 0), logged.get(SELECTION), devices)
        return RunLine(
            run, note="for the run it starts from" if run.source and run.source.outcome.state != "finished" else ""
        )

    def render(self, height: int = 50) -> RenderableType:
        """Return the table, in at most about `height` lines."""
        lines = self.run_lines()
        if not lines:
            return Text("reading the run folders")
        max_rows = max(1, min(MAX_RUNS, height - 6))  # borders, heading and the progress line take 6 lines
        for column_names in _LINE_COLUMNS:
            groups: dict[tuple, list[RunLine]] = {}
            for line in lines:
                groups.setdefault(attrgetter(*column_names)(line.run), []).append(line)
            if len(groups) <= max_rows:
                break
        table = table_from_rows("", [self._row(column_names, group) for group in groups.values()], _NUMBER_COLUMNS)
        return Group(to_rich(table), Text(self._progress_words(lines)))

    def _row(self, column_names: tuple[str, ...], group: list[RunLine]) -> dict[str, str | Text]:
        """The table row of runs that agree in the columns `column_names`. An experiment without sizes or rates has no
        columns for them.
        """
        first_line, is_single = group[0], "seed" in column_names
        has_column = {"size": "" not in self.experiment.sizes, "rate": self.experiment.is_tuned}
        values = {name: getattr(first_line.run, name) for name in column_names if has_column.get(name, True)}
        row = {
            name: "" if value is None else rate_text(value) if name == "rate" else str(value)
            for name, value in values.items()
        }
        steps = [
            f"{line.step} of {line.run.outcome.last_step}" for line in group if is_single or line.state == "running"
        ]
        losses = [line.loss for line in group if line.loss is not None and (is_single or line.state == "finished")]
        if is_single:
            state = Text(f"{first_line.state} {first_line.note}".strip(), _STATE_STYLES[first_line.state])
        else:
            row["runs"], counts = str(len(group)), Counter(line.state for line in group)
            device_words = "".join(f" {line.note}" for line in group if line.state == "running" and line.note)
            state = Text(
                ", ".join(
                    f"{counts[name]} {name}{device_words * (name == 'running')}"
                    for name in _STATE_STYLES
                    if counts[name]
                )
            )
        loss = {SELECTION if is_single else f"mean {SELECTION}": f"{statistics.fmean(losses):.4f}" if losses else ""}
        return row | {"state": state, "step": "; ".join(steps)} | loss

    def _progress_words(self, lines: list[RunLine]) -> str:
        """The line below the table: the progress of the experiment, and the remaining time."""
        experiment, counts = self.experiment, Counter(line.state for line in lines)
        words = [
            f"{experiment.name}: {sum(line.run.outcome.ended for line in lines)} of the {len(lines)} runs known so far "
            "ended"
        ]
        words[0] += "".join(f", {counts[state]} {state}" for state in ("failed", "running") if counts[state])
        if experiment.tune.grid:
            tuning_lines = [line for line in lines if line.run.stage == "tune"]
            remaining_count = sum(not line.run.outcome.ended for line in tuning_lines)
            rates = {
                (line.run.size, line.run.rate) for line in tuning_lines if line.run.rate not in experiment.tune.rates
            }
            added_count = max(Counter(size for size, _ in rates).values(), default=0)
            growth = f", whose grid has grown by {added_count}" if added_count else ""
            words.append(f"tuning{growth}: {f'{remaining_count} runs left' if remaining_count else 'done'}")
        if unfinished_lines := [line for line in lines if line.state in ("running", "waiting")]:
            seconds, unknown = [self._seconds(line) for line in unfinished_lines], "how long it takes is not known yet"
            words.append(
                unknown if None in seconds else f"about {duration(sum(seconds) / self.jobs.slots.n_slots)} left"
            )
        return "; ".join(words)

    def _seconds(self, line: RunLine) -> float | None:
        """The remaining seconds of a run, times the slots that it takes. The estimate is based on the mean of ended
        runs of its size and arm, else on the plan; None if unknown."""
        size_arm = line.run.size, line.run.arm
        durations = self.jobs.seconds.get(size_arm)
        expected_seconds = statistics.fmean(durations) if durations else self.times.get(size_arm)
        first_step = line.run.config.first_step or 0
        steps = max(1, line.run.outcome.last_step - first_step)
        remaining_fraction = 1 - max(0, line.step - first_step) / steps
        return expected_seconds and expected_seconds * self.jobs.slots.slots_per_run(*size_arm) * remaining_fraction


@contextmanager
def live_table(jobs: ExperimentTrainer, times: Times) -> Iterator[None]:
    """Show the table on standard output during the body, if the output is a terminal and `log.progress` is auto or bar.
    Printed text goes above the table, which is removed at the end."""
    # while rich is live it replaces sys.stdout, which makes control characters visible, also those of rich
    console = Console(file=getattr(sys.stdout, "rich_proxied_file", sys.stdout))
    progress = jobs.procedure.experiment.first_config.log.progress
    if not (sys.stdout.isatty() and console.is_interactive and progress in ("auto", "bar")):
        yield
        return
    table = LiveTable(jobs, times)
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
