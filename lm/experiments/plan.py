"""The plan of an experiment: its runs, what each costs, and how long all take."""

import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from lm.config.load import to_yaml
from lm.config.tree import Config, effect_of
from lm.data.prepare import open_prepared, vocabulary
from lm.errors import ConfigError, RunError, one_line
from lm.experiments.experiment import SHARED, Experiment, Primary
from lm.experiments.procedure import Procedure, Run
from lm.experiments.slots import Devices, Slots, Stopped, interruptible
from lm.files import unfinished, write_text
from lm.machine import child_environment, usable_cores
from lm.runs.evaluations import evaluation_files
from lm.runs.folder import ENVIRONMENT, METRICS, read_json, read_metrics, step_seconds, training_seconds, write_json
from lm.runs.record import starts
from lm.schema import flatten, to_plain
from lm.statistics.learned import fewest_seeds
from lm.statistics.verdicts import POWER, seeds_needed

_TOKENIZER_BYTES, _VALUE_BYTES = 65, 70  # of an entry of tokenizer.json, and of a validation loss of one sequence in JSON


@dataclass(frozen=True)
class Cost:
    """The resources that one run takes.

    Attributes:
        parameters: of the model.
        tokens: trained on.
        flops: of training.
        disk: bytes of its run folder at the end, if the last checkpoint is the best one: checkpoints, tokenizer, validation losses.
    """

    parameters: int
    tokens: int
    flops: int
    disk: int


def cost(config: Config, vocab_size: int, begun: int = 0) -> Cost:
    """The resources that a run of this configuration and vocabulary takes, which branches from `begun` steps of another one."""
    import torch  # takes seconds

    from lm.model.decoder import Decoder, group_of, is_normalizer
    from lm.model.spec import count_parameters, flops_per_token

    with torch.device("meta"):
        decoder = Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)
    trainer = config.trainer
    parameters, tokens = count_parameters(decoder), config.optim.batch_tokens * (trainer.max_steps - begun)
    trained = {name: p for name, p in decoder.named_parameters() if not config.train_only or is_normalizer(name)}
    state = sum(config.optim.optimizer.kept(group_of(name, p)) * p.numel() for name, p in trained.items())
    checkpoint = 4 * (parameters["total"] + state)  # fp32

    def times(every: int) -> int:
        return -(-trainer.max_steps // every) - begun // every

    kept = min(trainer.keep_checkpoints, times(config.checkpoint_every)) + sum(end > begun for end in config.phase_ends[:-1])
    validations = times(config.validation_every) * config.eval.sequences * _VALUE_BYTES
    disk = kept * checkpoint + vocab_size * _TOKENIZER_BYTES + 2 * validations  # each is kept a second time, for `lm eval`
    return Cost(parameters["total"], tokens, flops_per_token(decoder) * tokens, disk)


Costs = dict[tuple[str, str], Cost]  # of a run, by size and arm


def costs(procedure: Procedure) -> Costs | None:
    """The resources that a run of each size and arm takes; None where the size of the vocabulary can't be known before the text is
    prepared."""
    experiment = procedure.experiment
    known = vocabulary(experiment.first_config.data)
    if known is None:
        return None
    costs_of_arms = {}
    for size, arm in experiment.places:
        taken = cost(experiment.config_of(size, arm), known, arm.step or 0)
        costs_of_arms[size, arm.name] = taken if arm.trained else replace(taken, tokens=0, flops=0)
    return costs_of_arms


def plan(procedure: Procedure, taken: Costs | None, time: str, where: str = "") -> Iterator[str]:
    """Lines: the runs, their tokens, FLOPs and disk (`taken`, by `costs`) and `time`, what they share, how many seeds a difference of
    interest takes, and `where` the runs compute."""
    experiment = procedure.experiment
    tune, primary, sizes = experiment.tune, experiment.primary, list(experiment.sizes)
    yield f"experiment {experiment.name} in {experiment.folder}: " + ", ".join(arm.name for arm in experiment.arms)
    for (size, arm), each in (taken or {}).items():
        name = " ".join(filter(None, (size, arm)))
        yield f"  {name}: {each.parameters / 1e6:.2f} M parameters, {each.tokens / 1e6:.2f} M tokens, {_bytes(each.disk)} on disk a run"
    tuned = f"{tune.heading} as chosen from {tune.table}" if tune.table else "no tuning"
    if tune.grid:
        values = [", ".join(f"{value:g}" for value in axis) for axis in tune.axes]
        over = " and ".join(f"{key} over {some}" for key, some in zip(tune.keys, values, strict=True))
        together = f" ({len(tune.rates)} together)" if len(tune.keys) > 1 else ""
        tuned = f"tuning {over}{together} with seeds {', '.join(map(str, tune.seeds))}"
    yield f"{tuned}; final seeds {', '.join(map(str, experiment.seeds))}"
    counts = {(size, arm): number for size in sizes for arm, number in procedure.n_runs(size).items()}
    number, more = (
        sum(counts.values()),
        "; the grid may grow twice, and final seeds are trained at each chosen rate: two are counted" if tune.grid else "",
    )
    untrained = sum(counts[size, arm.name] for size in sizes for arm in experiment.arms if not arm.trained)
    runs = f"{number} runs" + (f" ({untrained} of them are measured without training)" if untrained else "")
    if taken:
        totals = (sum(counts[place] * getattr(each, name) for place, each in taken.items()) for name in ("tokens", "flops", "disk"))
        tokens, flops, disk = totals
        yield f"{runs}, {tokens / 1e6:.1f} M tokens, {flops:.2e} FLOPs, about {_bytes(disk)} on disk{more}"
    else:
        why = "the vocabulary is not known before the text is there: lm prepare makes it"
        yield f"{runs}{more}; tokens, FLOPs and disk: {why}"
    yield f"time: {time}"
    known, judged = procedure.known(), procedure.judged()
    yield f"done: {sum(run.outcome.ended for run in known)} of the {len(known)} runs known so far"
    yield f"primary metric {primary.metric}, {primary.better} is better; {_seeds(primary, judged.alpha)}"
    yield from judged.power(len(experiment.all_seeds))
    yield from procedure.notes()
    yield f"runs compute with {_settings(experiment)}" + (f"; {where}" if where else "")


def _settings(experiment: Experiment) -> str:
    """Precision, compilation and threads of the runs; where sizes or arms differ in one, which have what."""
    words = []
    for name in SHARED:
        places: dict[object, list[str]] = {}
        for size, arm in experiment.places:
            value = getattr(experiment.config_of(size, arm).trainer, name)
            places.setdefault(value, []).append(" ".join(filter(None, (size, arm.name))))
        apart = ", ".join(f"{value} ({', '.join(names)})" for value, names in places.items())
        words.append(f"{name} {apart if len(places) > 1 else next(iter(places))}")
    return "; ".join(words)


def _seeds(primary: Primary, alpha: float) -> str:
    """How many seeds it takes to find a difference of interest, in words."""
    if primary.learned is not None:
        return f"a run has learned if it reaches {primary.learned:g}; a difference can be shown from {fewest_seeds(alpha)} seeds on"
    runs = "single runs" if primary.reach is None else "the logarithms of single runs"
    margin, what = primary.matters, f"a difference of {primary.matters:g}"
    if primary.reach is not None:
        margin, what = math.log1p(primary.matters), f"a factor of {1 + primary.matters:g} in {primary.quantity}"
    needed = ", ".join(f"{seeds_needed(each, margin, alpha)} if it is {each:.3g}" for each in (margin / 2, margin, 2 * margin))
    return f"seeds to find {what} with probability {POWER:g} go by the standard deviation of differences between {runs}: {needed}"


def _bytes(number: float) -> str:
    """An amount of disk in words."""
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} TB"


# ---------------------------------------------------------------- how long runs take


PILOT = "pilot.json"  # in the experiment's folder: seconds of a run, by a hash of what they depend on
PILOT_SECONDS = 10.0  # that the pilots of one command take, without the start of their processes
MOST_PILOTS = 16  # arms that are timed at most
COMMAND = [sys.executable, "-m", "lm.training.pilot"]
_OUTPUT, _ERRORS = "output", "errors"  # files of a pilot

Times = dict[tuple[str, str], float]  # seconds of a run, by size and arm


def run_times(procedure: Procedure, costs: Costs, slots: Slots, budget: float = PILOT_SECONDS) -> tuple[Times, str]:
    """Seconds that a run of each size and arm takes, and where they come from in words.

    Ended runs of this experiment count first. If there are none, arms of the first size are timed for a few steps, as many at a time as
    runs will be, for at most `budget` seconds; what was timed is kept. What has not been measured is scaled by FLOPs from what has.

    Raises:
        ConfigError: the runs of an arm would be refused.
        RunError: the pilot failed, or timed no arm within its budget.
        DataError: there is no text to time it on yet.
    """
    measured, source = _ended(procedure), "the runs that have ended"
    if not any(costs[place].flops for place in measured):
        measured, source = _pilot(procedure, costs, slots, budget)
    if not measured:
        raise RunError(
            f"no arm was timed within {PILOT_SECONDS:g} s: plan again on an idle machine, one experiment at a time, or let a run end"
        )
    nearest = next(place for place in measured if costs[place].flops)  # arms that are not trained take none
    seconds = {}
    for key, cost in costs.items():
        like = next((place for place in measured if place[1] == key[1] and costs[place].flops), nearest)
        seconds[key] = measured[key] if key in measured else measured[like] * cost.flops / costs[like].flops
    return seconds, source


def duration(seconds: float) -> str:
    """A time in words."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _ended(procedure: Procedure) -> Times:
    """Mean seconds of the finished runs, each from its last start to its last evaluation, as of a whole run."""
    taken = defaultdict(list)
    for run in procedure.known():
        files, begun = evaluation_files(run.config.run_folder), _last_start(run) if run.outcome.state == "finished" else None
        ends = [path.stat().st_mtime for (_, step), path in files.items() if step == run.outcome.last_step]
        if begun and ends and (seconds := whole(run, max(0.0, max(ends) - begun[1]))):
            taken[run.size, run.arm].append(seconds)
    return {key: statistics.fmean(values) for key, values in taken.items()}


def whole(run: Run, seconds: float) -> float:
    """The seconds that a run would take without interruption, if that after its last start took so many seconds: the training before it,
    which the log says, is added. 0 if the log does not say."""
    begun = _last_start(run)
    if not begun or not begun[0]:
        return seconds
    log = read_metrics(run.config.run_folder / METRICS).lines
    trained = training_seconds(log)
    return seconds + trained - training_seconds(log, begun[0]) if trained else 0.0


def _last_start(run: Run) -> tuple[int, float] | None:
    """The step from which a run was last started, and when (POSIX seconds); None if its folder does not say, or it is not trained."""
    try:
        last = starts(read_json(run.config.run_folder / ENVIRONMENT))[-1] if run.trained else {}
        return last["step"], datetime.fromisoformat(last["time"]).timestamp()
    except (RunError, KeyError, IndexError, TypeError, ValueError):
        return None


def _pilot(procedure: Procedure, costs: Costs, slots: Slots, budget: float) -> tuple[Times, str]:
    """Seconds of a run of each arm in the first size that an earlier pilot has timed, or one does now within `budget`; and the source in
    words. Arms that take equally long are timed once; those with other normalizers and FLOPs than the arms before them come first."""
    experiment = procedure.experiment
    kept, size, arms = experiment.folder / PILOT, next(iter(experiment.sizes)), [arm for arm in experiment.arms if arm.trained]
    configs = {arm.name: experiment.config_of(size, arm) for arm in arms}
    keys = {name: _what_time_depends_on(config, slots) for name, config in configs.items()}
    before = read_json(kept).get("seconds") if kept.exists() else None  # of older versions nothing is taken
    known = {key: float(value) for key, value in before.items() if len(key) == 16} if isinstance(before, dict) else {}
    missing = {key: name for name, key in reversed(keys.items()) if key not in known}
    partly: dict[str, float] = {}
    if missing and budget > 0:
        if not experiment.first_config.data.symbolic:
            open_prepared(experiment.first_config.data)
        kinds = {name: (*sorted(config.normalizer_names), costs[size, name].flops) for name, config in configs.items()}
        first = {kinds[name]: name for name in reversed(configs)}.values()
        names = sorted(missing.values(), key=lambda name: (name not in first, list(configs).index(name)))[:MOST_PILOTS]
        timed, partly = _timed({name: configs[name] for name in names}, kept, slots.lanes(), budget)
        known |= {keys[name]: seconds for name, seconds in timed.items()}
        write_json(kept, {"seconds": known})
    whole_runs = {name: known[key] for name, key in keys.items() if key in known}
    timed_arms = "each arm" if len(whole_runs) == len(keys) else f"{len(whole_runs)} of {len(keys)} arms"
    words = f"a pilot of some steps{f' of {timed_arms}' if whole_runs else ''}, {len(slots.lanes())} at a time"
    if partly := {name: seconds for name, seconds in partly.items() if name not in whole_runs}:
        words += f"; of {', '.join(partly)} the steps alone, as evaluations took too long"
    if len(whole_runs) + len(partly) < len(keys):
        words += "; the other arms were not timed: by FLOPs"
    return {(size, name): seconds for name, seconds in (partly | whole_runs).items()}, words


def _what_time_depends_on(config: Config, slots: Slots) -> str:
    """A hash of all that decides how long a run takes, in these slots on this machine: the keys that are more than names and seeds; of
    numbers of model and optimizer that are no sizes, such as a learning rate, whether they are 0; but settings of a group of parameters,
    which a run without such parameters refuses, as they are."""
    ours = {path: value for path, value in flatten(to_plain(config)).items() if effect_of(path).affects not in ("label", "seed")}
    ours.pop("trainer.compile", None)  # pilots are eager
    for path, value in ours.items():
        if isinstance(value, float) and path.startswith(("model", "optim", "phases")) and not path.startswith("optim.groups"):
            ours[path] = bool(value)
    content = [ours, slots.jobs, platform.node(), usable_cores(), *([slots.gpus, slots.per_gpu] if slots.gpus else [])]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _timed(configs: dict[str, Config], kept: Path, lanes: list[Devices], budget: float) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a run of each configuration, the start of its process included; and of those whose evaluations did not end within `budget`
    the seconds of its steps alone. They are shared out among processes that work at the same time on the GPUs of `lanes`, as the runs will;
    each is timed at least once, and no process is idle from the start. Runs are kept beside `kept` until they are timed."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    names, begin, jobs = list(configs), time.time(), len(lanes)
    shared = [names[number::jobs] or [names[number % len(names)]] for number in range(jobs)]
    with interruptible() as received, tempfile.TemporaryDirectory(dir=kept.parent, prefix=unfinished(kept)) as folder:
        places = [Path(folder, str(number)) for number in range(jobs)]
        pilots = []
        try:
            for place, share, devices in zip(places, shared, lanes, strict=True):
                for name in share:
                    write_text(place / f"{name}.yaml", to_yaml(replace(configs[name], name=name, runs=str(place))))
                pilots.append(_start(place, share, devices))
            _wait(pilots, places, begin, budget)
        except KeyboardInterrupt:
            number = received[-1] if received else signal.SIGINT
            raise Stopped(f"stopped by {signal.Signals(number).name} while runs were timed: nothing was trained", number) from None
        finally:
            late = [process.poll() is None for process in pilots]
            for process in (process for process, was_late in zip(pilots, late, strict=True) if was_late):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.wait()
        timed, partly = defaultdict(list), {}
        for process, place, share, was_late in zip(pilots, places, shared, late, strict=True):
            if process.returncode and not was_late:
                last = ((place / _ERRORS).read_text().strip() or "no output").splitlines()[-1].removeprefix("error: ")
                if process.returncode == ConfigError.exit_code:  # which its runs would end with
                    raise ConfigError(f"{', '.join(share)}: {last}")
                raise RunError(f"a pilot of the experiment's runs failed: {one_line(RuntimeError(last))}")
            begun, *lines = _lines(place) or [{}]
            for name, line in zip(share, lines, strict=False):
                timed[name].append(line["seconds"] + begun["begun"] - begin)
            if was_late and len(lines) < len(share) and (each := step_seconds(place / share[len(lines)] / METRICS)):
                partly[share[len(lines)]] = each * configs[share[len(lines)]].trainer.max_steps
    whole_runs = {name: statistics.fmean(seconds) for name, seconds in timed.items()}
    return whole_runs, {name: seconds for name, seconds in partly.items() if name not in whole_runs}


def _start(place: Path, names: list[str], devices: Devices) -> subprocess.Popen:
    """A process that times the configurations of these names in the folder `place`, where its output goes, on these GPUs; it ends with this
    process."""
    command = [*COMMAND, *(str(place / f"{name}.yaml") for name in names)]
    with (place / _OUTPUT).open("wb") as output, (place / _ERRORS).open("wb") as errors:
        environment = child_environment(devices)
        return subprocess.Popen(command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)


def _wait(pilots: list[subprocess.Popen], places: list[Path], begin: float, budget: float) -> None:
    """Wait until all have ended, or `budget` seconds after the last one began; starting may take twice as long."""
    while any(process.poll() is None for process in pilots):
        begun = [lines[0]["begun"] for place in places if (lines := _lines(place))]
        if time.time() > (max(begun) + budget if len(begun) == len(places) else begin + 2 * budget):
            return
        time.sleep(0.05)


def _lines(place: Path) -> list[dict[str, float]]:
    """The whole lines that a pilot has printed."""
    return [json.loads(line) for line in (place / _OUTPUT).read_text().split("\n")[:-1] if line.startswith("{")]


def total_seconds(procedure: Procedure, times: Times, slots: Slots) -> float:
    """Seconds that the runs without a result take in these slots."""
    counts = {size: procedure.n_runs(size) for size in procedure.experiment.sizes}
    times = {place: seconds * slots.taken(*place) for place, seconds in times.items()}
    planned = sum(seconds * counts[size][arm] for (size, arm), seconds in times.items())
    done = sum(times[run.size, run.arm] for run in procedure.known() if run.outcome.ended)
    return max(0.0, planned - done) / slots.jobs
