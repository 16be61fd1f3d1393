"""An experiment's folder: who works on it, the settings that its first start fixed for all runs, and what was changed
since its plan.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pandas as pd

from lm.config.load import merge
from lm.data.prepare import prepare, vocab_size_of
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError, as_written
from lm.evaluation.held_out import validation_sequences
from lm.evaluation.metrics import find_metric
from lm.experiments.experiment import SHARED_SETTINGS, Experiment, cost, deciding_keys, omitted_keys
from lm.experiments.experiment_file import read_experiment
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.files import json_bytes, locked_folder, plain_sha256
from lm.machine import threads_per_process
from lm.model.device import count_gpus, resolve_compile, resolve_precision
from lm.plain import Plain, to_plain
from lm.runs.evaluations import selection_mask
from lm.runs.folder import CONFIG, EVALUATIONS, RESOLVED_FILE
from lm.runs.manifest import read_file, write_files

# key of the plan in RESOLVED_FILE; the plan is null (unknown) if the file was written after final runs were measured
PLAN = "planned"
_OVERRIDES = "overrides"  # key in RESOLVED_FILE of the overrides that the first start was given
_OTHER_NAME = "give the experiment's file another name, or set runs=..."


# ---------------------------------------------------------------- who works on an experiment


@contextmanager
def experiment_lock(folder: Path) -> Iterator[None]:
    """Hold the system's lock of an experiment's folder during the body, after making the folder; it ends with the
    process. Raises RunError: the folder can't be made, or another process works on the experiment.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: can't make the folder: {error.strerror}") from None
    words = "another lm compare works on it; --report-only and --plan show how far it is"
    with locked_folder(folder, words) as lock_problem:
        if lock_problem:
            print(f"note: {lock_problem}: start no other lm compare of this experiment", file=sys.stderr)
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


# ---------------------------------------------------------------- opening and starting an experiment


def open_experiment(path: Path, overrides: list[str], jobs: int = 1) -> Procedure:
    """Open an experiment as its file and run folders are now, without preparing, training or writing anything.

    If the file leaves precision, compilation or threads open, the settings of the first start hold. Before a first
    start they are resolved for this machine.

    jobs: the number of runs at a time, on which the number of threads depends.

    Raises LMError: the file is wrong, the experiment's folder is a run folder, or RESOLVED_FILE is damaged.
    """
    experiment = read_experiment(path, overrides)
    if (experiment.folder / CONFIG).exists():
        raise RunError(f"{experiment.folder}: a run folder; {_OTHER_NAME}")
    recorded = _first_start_record(experiment)
    settings = recorded or _machine_settings(experiment, jobs)
    trainer = experiment.base.get("trainer", {})  # sizes and arms may set these keys, too
    open_settings = {
        name: settings[name] for name in SHARED_SETTINGS if trainer.get(name) in ("auto", None) and name in settings
    }
    procedure = Procedure(replace(experiment, base=merge(experiment.base, {"trainer": open_settings})))
    _compare_with_plan(procedure, recorded)
    return procedure


def start(path: Path, overrides: list[str], jobs: int = 1) -> Procedure:
    """Start an experiment: prepare its text, and fix the settings that all its runs share.

    Raises LMError: as `open_experiment`; or the text can't be prepared, or is not that of the first runs.
    """
    store = prepare(open_experiment(path, overrides, jobs).experiment.first_config.data, progress=True)
    procedure = open_experiment(path, overrides, jobs)  # the vocabulary is known now
    experiment, file = procedure.experiment, procedure.experiment.folder / RESOLVED_FILE
    _check_held_out_text(experiment, store)
    trainer, recorded, has_measured_runs = (
        experiment.first_config.trainer,
        _first_start_record(experiment),
        is_measured(experiment),
    )
    plan = None if has_measured_runs else plan_of(experiment)
    settings = {"data_fingerprint": store.fingerprint} | {name: getattr(trainer, name) for name in SHARED_SETTINGS}
    settings |= recorded
    # the plan may change before a final run is measured
    if not recorded or (not has_measured_runs and settings.get(PLAN) != plan):
        settings |= {_OVERRIDES: list(overrides), PLAN: plan}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_files(file.parent, {file.name: json_bytes(settings)})
    if settings["data_fingerprint"] != store.fingerprint:
        raise RunError(f"{file}: the text is not what the first runs were trained on; {_OTHER_NAME}")
    return procedure


def _check_held_out_text(experiment: Experiment, store: Store) -> None:
    """Check that a held-out document is left to report results on and, with tuning, another to choose rates on.
    Raises ConfigError.
    """
    config = experiment.first_config
    if config.data.symbolic:
        return
    labels = validation_sequences(store, config).document_labels
    chosen = selection_mask(store.fingerprint, labels)
    for use, mask in {"report": ~chosen, "choose learning rates": chosen | (not experiment.is_tuned)}.items():
        if not mask.any():
            reason = f"none of the {len(set(labels.tolist()))} held-out documents is left to {use} on"
            raise ConfigError(
                [Problem("base.data.val_fraction", config.data.val_fraction, reason, "hold out more text")]
            )


def _first_start_record(experiment: Experiment) -> dict[str, Plain]:
    """What the first start recorded in RESOLVED_FILE; {} before it. Raises RunError: the file was altered."""
    folder, advice = experiment.folder, "bring it back: it holds what was planned before the first run"
    return json.loads(read_file(folder, RESOLVED_FILE, advice)) if (folder / RESOLVED_FILE).exists() else {}


def _machine_settings(experiment: Experiment, jobs: int) -> dict[str, Plain]:
    """Settle `SHARED_SETTINGS` for this machine. Whether runs are compiled depends on the cost of a baseline run in
    the first size, and on the number of baseline runs, which share compiled code.
    """
    config, tune = experiment.first_config, experiment.tune
    accelerator = "gpu" if count_gpus(config) else "cpu"
    precision = resolve_precision(config, accelerator, {}).value
    runs = len(experiment.seeds) + len(tune.grid) * len(tune.seeds)
    flops = cost(config, vocab_size_of(config.data) or 1).flops
    processes = jobs * (1 if accelerator == "gpu" else config.trainer.devices)  # a run takes a slot for each GPU
    return {
        "precision": 32 if precision == "32" else precision,
        "compile": resolve_compile(config, flops, accelerator, {}, runs).value == "true",
        "threads": config.trainer.threads or threads_per_process(processes),
    }


# ---------------------------------------------------------------- the plan: the experiment before the first final run


def plan_of(experiment: Experiment) -> dict[str, dict]:
    """The present plan: keys that all verdicts depend on (`shared`), and the configuration of each arm and size
    (`arms`, by SIZE/ARM).
    """
    configs = {
        _name(size, arm.name): experiment.config(size, arm, 0, None, {"name": "any"})
        for size, arm in experiment.size_arms
    }
    primary, baseline = experiment.primary, experiment.arms[0].name
    shared = {"seeds": sorted(experiment.seeds), "baseline": baseline}
    # only the plan's power depends on `spread`
    shared |= {f"primary.{key}": value for key, value in vars(primary).items() if key != "spread"}
    for size in experiment.sizes:
        measurement = experiment.measurement_config(configs[_name(size, baseline)])
        options = measurement.eval.measured_options(find_metric(measurement, primary.metric)[0].kind)
        shared |= {_name(size, f"{primary.metric}: {key}"): value for key, value in options.items()}
    shared |= {f"tune.{key}": value for key, value in vars(experiment.tune).items()}
    if experiment.table is not None:
        columns = ["size", "arm", "key", "rate", "seed", SELECTION, primary.metric]
        # missing values as earlier versions wrote them
        cells = experiment.table[columns].map(lambda cell: "None" if pd.isna(cell) else str(cell))
        rows = sorted(" ".join(row) for row in cells.to_numpy())
        shared["tune.table"] = f"{experiment.tune.table} {plain_sha256(rows)[:8]}"
    arms = {}
    for size, arm in experiment.size_arms:
        start_keys = {"swap": arm.swap and vars(arm.swap), "train": arm.trained, "step": arm.branch_step}
        keys = deciding_keys(to_plain(configs[_name(size, arm.name)]))
        arms[_name(size, arm.name)] = keys | ({"from": arm.source} | start_keys if arm.source else {})
    return {"shared": shared, "arms": arms}


def _name(size: str, name: str) -> str:
    return f"{size}/{name}" if size else name


def _run_configs(experiment: Experiment) -> list[Path]:
    """The configurations in the experiment's folder, which are of runs that have begun."""
    return [path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in experiment.folder.glob(pattern)]


def is_measured(experiment: Experiment) -> bool:
    """Whether the experiment's folder has an evaluation of a final run, which is a run to be judged, of any
    configuration.
    """
    return any(
        any((path.parent / EVALUATIONS).glob("*.csv")) and b"stage: final" in path.read_bytes()
        for path in _run_configs(experiment)
    )


def _changes(plan: dict[str, dict], present: dict[str, dict]) -> dict[str, list[str]]:
    """What differs between two plans, in words, by SIZE/ARM; changes of what all verdicts depend on have the name "".
    A list of what the primary metric is measured on may grow: others are measured beside it.
    """
    sides = [{"": side["shared"]} | side["arms"] for side in (plan, present)]

    def is_same(key: str, was: Plain, now: Plain) -> bool:
        is_longer = ": " in key and isinstance(was, list) and isinstance(now, list) and all(item in now for item in was)
        return was == now or is_longer

    changes = {}
    for name in dict.fromkeys(chain(*sides)):
        was, now = (omitted_keys() | side.get(name, {}) for side in sides)
        changes[name] = [
            f"{key} was {as_written(was.get(key))}, is {as_written(now.get(key))}"
            for key in was | now
            if not is_same(key, was.get(key), now.get(key))
        ]
        if not all(name in side for side in sides):
            changes[name] = ["added" if name in sides[1] else "left out"]
    return {name: words for name, words in changes.items() if words}


def _compare_with_plan(procedure: Procedure, recorded: dict[str, Plain]) -> None:
    """Compare the present plan with the `recorded` one. Set the notes on what was changed since, and the arms whose
    verdicts are exploratory for that. Before a final run was measured, the plan may change.

    A change of an arm concerns its own verdict and those of arms that start from its weights. All other changes, and
    those of the baseline, concern all verdicts; changes of tuning are noted alone.
    """
    experiment, plan, present = procedure.experiment, recorded.get(PLAN), plan_of(procedure.experiment)
    if words := _other_runs_words(procedure, recorded):
        procedure.plan_notes = [words]
    if plan == present or not is_measured(experiment):
        return
    every_arm = frozenset((size, arm.name) for size, arm in experiment.size_arms)
    if plan is None:
        note = f"exploratory: what was planned before the first run is not known: {RESOLVED_FILE} does not say"
        procedure.plan_notes.append(note)
        procedure.exploratory = every_arm
        return
    changes, sources = _changes(plan, present), {arm.name: arm.source for arm in experiment.arms}
    shared = changes.pop("", [])
    tuning = [words for words in shared if words.startswith("tune.")]
    words = [words for words in shared if words not in tuning]

    def is_changed(size: str, arm: str) -> bool:
        return bool(arm) and (_name(size, arm) in changes or is_changed(size, sources[arm]))

    concerns_all = words or changes.keys() - present["arms"].keys()
    concerns_all = concerns_all or any(is_changed(size, experiment.arms[0].name) for size in experiment.sizes)
    procedure.exploratory = frozenset(pair for pair in every_arm if concerns_all or is_changed(*pair))
    names: dict[str, list[str]] = {}
    for name, arm_words in changes.items():
        names.setdefault(", ".join(arm_words), []).append(name)
    words += [f"{', '.join(arms)}: {text}" for text, arms in names.items()]
    lines = {"exploratory: changed since the plan": words, "changed since the plan": tuning}
    procedure.plan_notes += [f"{start}: {'; '.join(entries)}" for start, entries in lines.items() if entries]


def _other_runs_words(procedure: Procedure, recorded: dict[str, Plain]) -> str:
    """Say that the experiment's folder has none of the runs that are asked for, but runs that were started with other
    overrides, and give the command that goes on with those; empty otherwise.
    """
    experiment, overrides = procedure.experiment, tuple(recorded.get(_OVERRIDES) or ())
    is_other = recorded and overrides != experiment.overrides and _run_configs(experiment)
    if not is_other or any(run.config.run_folder.is_dir() for run in procedure.known_runs()):
        return ""
    command = replace(experiment, overrides=overrides).command
    return f"the runs here were started with other overrides; the command that goes on with them: {command}"
