"""How long the runs of an experiment take: as its ended runs took, else as a pilot of a few real steps says."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.load import to_yaml
from lm.data.prepare import open_prepared
from lm.errors import ConfigError, RunError, one_line
from lm.experiments.procedure import Procedure, Run
from lm.files import write_text
from lm.runs.evaluations import evaluation_files
from lm.runs.folder import ENVIRONMENT, METRICS, read_json, write_json
from lm.runs.identity import starts
from lm.runs.metric_log import training_seconds

if TYPE_CHECKING:
    from lm.experiments.costs import Cost

PILOT = "pilot.json"  # in the experiment's folder: seconds of a run, by its arm

Times = dict[tuple[str, str], float]  # seconds of a run, by size and arm


def run_times(procedure: Procedure, costs: "dict[tuple[str, str], Cost]", jobs: int) -> tuple[Times, str]:
    """Seconds that a run of each size and arm takes, and where they come from in words.

    Ended runs of this experiment count first. If there are none, every arm of the first size is timed for a few steps, as many at a time
    as runs will be, once. What has not been measured is scaled by FLOPs from what has.

    Raises:
        ConfigError: the runs of an arm would be refused.
        RunError: the pilot failed.
        DataError: there is no text to time it on yet.
    """
    measured, source = _ended(procedure), "the runs that have ended"
    if not any(costs[one].flops for one in measured):
        measured, source = _pilot(procedure, jobs), f"a pilot of some steps of each arm, {jobs} at a time"
    nearest = next(one for one in measured if costs[one].flops)  # arms that are not trained take none
    found = {}
    for key, cost in costs.items():
        like = next((one for one in measured if one[1] == key[1] and costs[one].flops), nearest)
        found[key] = measured[key] if key in measured else measured[like] * cost.flops / costs[like].flops
    return found, source


def duration(seconds: float) -> str:
    """A time in words."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _ended(procedure: Procedure) -> Times:
    """Mean seconds of the finished runs."""
    taken = defaultdict(list)
    for run in procedure.known():
        if run.outcome.state == "finished" and (seconds := _seconds(run)):
            taken[run.size, run.arm].append(seconds)
    return {key: statistics.fmean(values) for key, values in taken.items()}


def _seconds(run: Run) -> float:
    """From a run's last start to its last evaluation, as of a whole run (`whole`); 0 if its folder does not say."""
    ends = [path.stat().st_mtime for (_, step), path in evaluation_files(run.config.run_folder).items() if step == run.outcome.last_step]
    begun = _last_start(run)
    return whole(run, max(0.0, max(ends) - begun[1])) if begun and ends else 0.0


def whole(run: Run, seconds: float) -> float:
    """What a run would take without interruption, if that after its last start took so many seconds: the training before it, which the
    log says, is added. 0 if the log does not say."""
    begun, log = _last_start(run), run.config.run_folder / METRICS
    if not begun or not begun[0]:
        return seconds
    trained = training_seconds(log)
    return seconds + trained - training_seconds(log, begun[0]) if trained else 0.0


def _last_start(run: Run) -> tuple[int, float] | None:
    """The step from which a run was last started, and when (POSIX seconds); None if its folder does not say, or it is not trained."""
    try:
        last = starts(read_json(run.config.run_folder / ENVIRONMENT))[-1] if run.trained else {}
        return last["step"], datetime.fromisoformat(last["time"]).timestamp()
    except (RunError, KeyError, IndexError, TypeError, ValueError):
        return None


def _pilot(procedure: Procedure, jobs: int) -> Times:
    """Seconds of a run of each arm in the first size: kept of an earlier pilot, or measured now."""
    experiment = procedure.experiment
    kept, size, arms = experiment.folder / PILOT, next(iter(experiment.sizes)), [arm for arm in experiment.arms if arm.trained]
    if kept.exists():
        content = read_json(kept)
        if content.get("jobs") == jobs and content.get("seconds", {}).keys() >= {arm.name for arm in arms}:
            return {(size, arm.name): float(content["seconds"][arm.name]) for arm in arms}
    if not experiment.first_config.data.symbolic:
        open_prepared(experiment.first_config.data)
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for arm in arms:
            config = experiment.config(size, arm, experiment.seeds[0], experiment.first_rate, {"name": "pilot"})
            files[arm.name] = Path(folder) / f"{arm.name}.yaml"
            write_text(files[arm.name], to_yaml(config))
        found = _timed(files, jobs)
    if experiment.folder.is_dir():
        write_json(kept, {"jobs": jobs, "seconds": found})
    return {(size, arm): seconds for arm, seconds in found.items()}


def _timed(files: dict[str, Path], jobs: int) -> dict[str, float]:
    """Seconds of a run of each configuration, the start of its process included. They are shared out among `jobs` processes that work at
    the same time, as the runs will; each is timed at least once, and no process is idle from the start."""
    names = list(files)
    shared = [names[number::jobs] or [names[number % len(names)]] for number in range(jobs)]
    begin = time.monotonic()
    command = [sys.executable, "-m", "lm.training.pilot"]
    pilots = [
        subprocess.Popen([*command, *(str(files[name]) for name in some)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for some in shared
    ]
    seconds, inside = defaultdict(list), []
    for process, some in zip(pilots, shared, strict=True):
        out, err = process.communicate()
        if process.returncode:
            last = (err.strip() or "no output").splitlines()[-1]
            if process.returncode == ConfigError.exit_code:  # which its runs would end with
                raise ConfigError(f"{', '.join(some)}: {last.removeprefix('error: ')}")
            raise RunError(f"a pilot of the experiment's runs failed: {one_line(RuntimeError(last.removeprefix('error: ')))}")
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        inside.append(sum(each["wall_seconds"] for each in found))
        for name, each in zip(some, found, strict=True):
            seconds[name].append(each["seconds"])
    start = max(0.0, time.monotonic() - begin - max(inside))
    return {name: statistics.fmean(some) + start for name, some in seconds.items()}
