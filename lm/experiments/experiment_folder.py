"""The settings that the first start of an experiment records in its folder for all runs, the plan among them, and what
was changed since that plan.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lm.config.load import merge
from lm.config.tree import Config
from lm.data.prepare import prepare, vocab_size_of
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError, as_written
from lm.evaluation.held_out import ByLength, LongContext, Validation
from lm.experiments.experiment import (
    SHARED_SETTINGS,
    Experiment,
    deciding_keys,
    kind_of_metric,
    omitted_keys,
)
from lm.experiments.experiment_file import read_experiment
from lm.experiments.plan import cost
from lm.experiments.procedure import Procedure
from lm.experiments.run_outcome import SELECTION
from lm.files import json_bytes, plain_sha256, read_json, sealed, unsealed, write_new, write_sealed
from lm.machine import threads_per_process
from lm.model.device import ResolvedSetting, count_gpus, resolve_compile, resolve_precision
from lm.plugins import PLUGINS, matches_version
from lm.runs.evaluations import selection_mask
from lm.runs.folder import CHECKPOINTS, CONFIG, EVALUATIONS, RESOLVED_FILE, step_path
from lm.schema import Plain, to_plain

# key of the plan in RESOLVED_FILE; the plan is null (unknown) if the file was written after final runs were measured
PLAN = "planned"
_CODE = "code"  # key in RESOLVED_FILE of the versions of the plugins (code from outside lm) that runs are trained with
_OVERRIDES = "overrides"  # key in RESOLVED_FILE of the overrides that the first start was given


def open_experiment(path: Path, overrides: list[str], jobs: int = 1, anew: bool = False) -> Procedure:
    """Open an experiment as its file and run folders are now, without preparing, training or writing anything.

    If the file leaves precision, compilation or threads open, the settings of the first start hold. Before a first
    start they are resolved for this machine.

    Args:
        jobs: the number of runs at a time, on which the number of threads depends.
        anew: open the experiment even if its folder holds only ended runs of other configurations (`other_runs_note`).

    Raises LMError: the file is wrong, the experiment's folder is a run folder, RESOLVED_FILE is damaged, or `anew` is
    needed.
    """
    experiment = read_experiment(path, overrides)
    if (experiment.folder / CONFIG).exists():
        raise RunError(f"{experiment.folder}: a run folder; give the experiment's file another name, or set runs=...")
    settings_file = experiment.folder / RESOLVED_FILE
    recorded = _read_settings(settings_file) if settings_file.exists() else None
    settings = _machine_settings(experiment, jobs) if recorded is None else recorded
    trainer = experiment.base.get("trainer", {})  # sizes and arms may set these keys, too
    open_settings = {
        name: settings[name] for name in SHARED_SETTINGS if trainer.get(name) in ("auto", None) and name in settings
    }
    experiment = replace(experiment, base=merge(experiment.base, {"trainer": open_settings}))
    procedure = Procedure(_compared_with_plan(experiment, recorded))
    if not anew and (note := other_runs_note(procedure)):
        raise RunError(f"{experiment.folder}: {note}; to train what is asked for now, add --anew")
    return procedure


def start(path: Path, overrides: list[str], jobs: int = 1, anew: bool = False) -> Procedure:
    """Start an experiment: prepare its text, and fix the settings that all its runs share. If several processes start
    the experiment at the same time, one of them fixes the settings.

    Raises LMError: as `open_experiment`; or the text can't be prepared, or text or plugins differ from those of the
    first runs.
    """
    store = prepare(open_experiment(path, overrides, jobs, anew).experiment.first_config.data, progress=True)
    procedure = open_experiment(path, overrides, jobs, True)  # the vocabulary is known now
    experiment = procedure.experiment
    _check_held_out_parts(experiment, store)
    trainer, settings_file = experiment.first_config.trainer, experiment.folder / RESOLVED_FILE
    settings = {"data_fingerprint": store.fingerprint} | {name: getattr(trainer, name) for name in SHARED_SETTINGS}
    file_experiment = read_experiment(path, overrides)
    if not settings_file.exists() and file_experiment.first_config.trainer.compile == "auto":
        print(f"trainer.compile of all runs: {_compilation(file_experiment)}", flush=True)
    has_measured_runs, plan = is_measured(experiment), plan_of(experiment)
    code = PLUGINS.versions(
        {name for run in procedure.known_runs() for name in run.config.plugin_names_by_key.values()}
    )
    plan_settings = {_OVERRIDES: list(overrides), PLAN: None if has_measured_runs else plan, _CODE: code}
    # the plan may change before a final run is measured
    if not write_new(settings_file, json_bytes(sealed(settings | plan_settings))) and not has_measured_runs:
        old_settings = _read_settings(settings_file)
        if (old_settings.get(PLAN), old_settings.get(_CODE)) != (plan, code):
            write_sealed(settings_file, old_settings | plan_settings)
    settings, remedy = _read_settings(settings_file), "give the experiment's file another name, or set runs=..."
    if settings.get("data_fingerprint") != store.fingerprint:
        raise RunError(f"{settings_file}: the text is not what the first runs were trained on; {remedy}")
    for name, version in (settings.get(_CODE) or {}).items():
        if not matches_version(version, code.get(name, version)):
            change = f"{name} was {version} in the first runs, it is {code[name]} now"
            raise RunError(f"{settings_file}: {change}; bring that code back, {remedy}")
    return open_experiment(path, overrides, jobs, True)


def _check_held_out_parts(experiment: Experiment, store: Store) -> None:
    """Check that a held-out document is left to report the primary metric and, with tuning, another to choose rates.
    Raises ConfigError.
    """
    metric, tune = experiment.primary.metric, experiment.tune
    uses = [("report", metric)]
    if tune.grid:  # tables show both metrics of each tuning run
        uses += [("choose learning rates", SELECTION), ("choose learning rates", metric)]
    elif experiment.is_tuned:
        uses += [("choose learning rates", SELECTION if tune.metric == SELECTION else metric)]
    config = experiment.measurement_config(experiment.first_config)
    documents = {used_metric: _document_labels(config, store, used_metric) for _, used_metric in uses}
    for use, used_metric in uses:
        labels = documents[used_metric]
        if labels is not None and not (selection_mask(store.fingerprint, labels) == (use != "report")).any():
            reason = f"none of the {len(set(labels.tolist()))} held-out documents of {used_metric} is left to {use} on"
            raise ConfigError(
                [Problem("base.data.val_fraction", config.data.val_fraction, reason, "hold out more text")]
            )


def _document_labels(config: Config, store: Store, metric: str) -> np.ndarray | None:
    """The label of the document in which each held-out sequence of a metric begins, (sequences,); None without held-out
    documents.
    """
    kind, label = kind_of_metric(metric), metric.partition(" ")[2]
    if config.data.symbolic or kind not in ("validation", "long_context", "by_length"):
        return None
    if kind != "validation":
        return (
            LongContext(config, store).held_out if kind == "long_context" else ByLength(config, store).stretches
        ).document_labels
    validation = Validation(config, store)
    source_labels = [source.label for source in store.val.sources]
    mask = validation.held_out.sources == source_labels.index(label) if label else validation.trained_mask
    return validation.held_out.document_labels[mask]


def _read_settings(file: Path) -> dict[str, Plain]:
    """Read RESOLVED_FILE; a file of an older version has no digest of itself. Raises RunError: it was altered."""
    content = read_json(file)
    try:
        return unsealed(content, file) if "sha256" in content else content
    except RunError as error:
        raise RunError(f"{error}; bring it back: it holds what was planned before the first run") from None


def _machine_settings(experiment: Experiment, jobs: int) -> dict[str, Plain]:
    config = experiment.first_config
    precision = resolve_precision(config, "gpu" if count_gpus(config) else "cpu", {})
    processes = jobs * (1 if count_gpus(config) else config.trainer.devices)  # a run takes a slot for each of its GPUs
    return {
        "precision": 32 if precision.value == "32" else precision.value,
        "compile": _compilation(experiment).value == "true",
        "threads": config.trainer.threads or threads_per_process(processes),
    }


def _compilation(experiment: Experiment) -> ResolvedSetting:
    """Decide whether runs are compiled, by the cost of a baseline run in the first size and the number of baseline
    runs, which share compiled code."""
    config, tune = experiment.first_config, experiment.tune
    runs = len(experiment.seeds) + len(tune.rates) * len(tune.seeds)
    flops = cost(config, vocab_size_of(config.data) or 1).flops
    return resolve_compile(config, flops, "gpu" if count_gpus(config) else "cpu", {}, runs)


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
        measurement = experiment.measurement_config(configs[_name(size, baseline)]).eval
        options = measurement.measured_options(kind_of_metric(primary.metric))
        shared |= {_name(size, f"{primary.metric}: {key}"): value for key, value in options.items()}
    shared |= {f"tune.{key}": value for key, value in vars(experiment.tune).items()}
    if experiment.table:
        rows = sorted(
            f"{run.size} {run.arm} {run.key} {run.rate} {run.seed} {run.selection_value} {run.primary_value}"
            for run in experiment.table
        )
        shared["tune.table"] = f"{experiment.tune.table} {plain_sha256(rows)[:8]}"
    arms = {}
    for size, arm in experiment.size_arms:
        start_keys = {"swap": arm.swap and vars(arm.swap), "train": arm.trained, "step": arm.branch_step}
        keys = deciding_keys(to_plain(configs[_name(size, arm.name)]))
        arms[_name(size, arm.name)] = keys | ({"from": arm.source} | start_keys if arm.source else {})
    return {"shared": shared, "arms": arms}


def _name(size: str, name: str) -> str:
    return f"{size}/{name}" if size else name


def is_measured(experiment: Experiment) -> bool:
    """Whether the experiment's folder has an evaluation of a final run, which is a run to be judged, of any
    configuration.
    """
    paths = (path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in experiment.folder.glob(pattern))
    return any(
        any((path.parent / EVALUATIONS).glob("*.json")) and b"stage: final" in path.read_bytes() for path in paths
    )


def _changes(planned: dict[str, Plain], present: dict[str, Plain]) -> dict[str, str]:
    """Name each key that differs, with both values."""
    return {
        key: f"{key} was {as_written(planned.get(key))}, is {as_written(present.get(key))}"
        for key in dict.fromkeys((*planned, *present))
        if planned.get(key) != present.get(key)
    }


def _arm_changes(plan: dict[str, dict], present: dict[str, dict], ignored_keys: Sequence[str] = ()) -> dict[str, str]:
    """The changes of the arms of both plans, as words by arm."""
    arms = {
        name: {
            key: words
            for key, words in _changes(omitted_keys() | plan["arms"][name], omitted_keys() | keys).items()
            if key not in ignored_keys
        }
        for name, keys in present["arms"].items()
        if name in plan["arms"]
    }
    return {name: ", ".join(words.values()) for name, words in arms.items() if words}


def _arm_words(changes: dict[str, str], arm_count: int) -> list[str]:
    """Join arms with the same changes; without names if these are all arms."""
    names_by_words: dict[str, list[str]] = {}
    for name, words in changes.items():
        names_by_words.setdefault(words, []).append(name)
    return [
        words if len(names) == arm_count > 1 else f"{', '.join(names)}: {words}"
        for words, names in names_by_words.items()
    ]


def _compared_with_plan(experiment: Experiment, settings: dict[str, Plain] | None) -> Experiment:
    """Return the experiment with its recorded plan (`settings`, the content of RESOLVED_FILE; None: no such file),
    notes on what was changed since, and the arms whose verdicts are exploratory for that. There are no notes before
    a final run was measured.

    A change of an arm concerns its own verdict and those of arms that start from its weights. All other changes, and
    those of the baseline, concern all verdicts; changes of tuning are noted alone.
    """
    plan = (settings or {}).get(PLAN)
    experiment = replace(experiment, plan=plan, planned_overrides=(settings or {}).get(_OVERRIDES))
    present = plan_of(experiment)
    if plan == present or not is_measured(experiment):
        return experiment
    every_arm = frozenset((size, arm.name) for size, arm in experiment.size_arms)
    if settings is not None and PLAN not in settings and settings.get("plan", {}) is not None:
        # an earlier version kept seeds and the primary metric as they are, and hashes of the arms
        recorded = {"seeds": sorted(settings.get("seeds", experiment.seeds))}
        recorded |= {f"primary.{key}": value for key, value in settings.get("plan", {}).get("primary", {}).items()}
        changes = _changes(recorded, {key: present["shared"].get(key, value) for key, value in recorded.items()})
        notes = (f"{RESOLVED_FILE} is of an earlier version: whether arms were changed since the plan is not known",)
        if changes:
            notes += (f"exploratory: changed since the plan: {'; '.join(changes.values())}",)
        return replace(experiment, plan_notes=notes, exploratory=every_arm if changes else frozenset())
    if plan is None:
        note = (
            f"exploratory: what was planned before the first run is not known: {RESOLVED_FILE} was not there when "
            "final runs were"
        )
        return replace(experiment, plan_notes=(note,), exploratory=every_arm)
    shared = _changes(plan["shared"], present["shared"])
    for key, value in plan["shared"].items():  # the primary metric stays as it was if others are measured beside it
        values = present["shared"].get(key)
        if (
            ": " in key
            and isinstance(value, list)
            and isinstance(values, list)
            and all(item in values for item in value)
        ):
            shared.pop(key, None)
    tuning = [words for key, words in shared.items() if key.startswith("tune.")]
    general = [words for key, words in shared.items() if not key.startswith("tune.")]
    left_out = [name for name in plan["arms"] if name not in present["arms"]]
    arms = _arm_changes(plan, present) | {name: "added" for name in present["arms"] if name not in plan["arms"]}
    words = general + _arm_words(arms, len(present["arms"])) + [f"{name}: left out" for name in left_out]
    sources = {arm.name: arm.source for arm in experiment.arms}

    def is_changed(size: str, arm: str) -> bool:
        return bool(arm) and (_name(size, arm) in arms or is_changed(size, sources[arm]))

    concerns_all = general or left_out or any(is_changed(size, experiment.arms[0].name) for size in experiment.sizes)
    exploratory = every_arm if concerns_all else frozenset(pair for pair in every_arm if is_changed(*pair))
    lines = {"exploratory: changed since the plan": words, "changed since the plan": tuning}
    notes = tuple(f"{start}: {'; '.join(changes)}" for start, changes in lines.items() if changes)
    return replace(experiment, plan_notes=notes, exploratory=exploratory)


def other_runs_note(procedure: Procedure) -> str:
    """Say that the experiment's folder has none of the runs that are asked for, but ended runs of another planned
    configuration, with the keys that differ and the command that goes on with those runs; empty otherwise.
    """
    experiment, plan = procedure.experiment, procedure.experiment.plan
    if not plan or any(run.config.run_folder.is_dir() for run in procedure.known_runs()):
        return ""
    changes = _arm_changes(plan, plan_of(experiment), experiment.tune.keys if experiment.is_tuned else ())
    has_ended_runs = any(
        step_path(folder / CHECKPOINTS, keys["trainer.max_steps"]).exists()
        for name, keys in plan["arms"].items()
        for folder in experiment.folder.glob(f"{name}-*")
    )
    if not changes or not has_ended_runs:
        return ""
    overrides = tuple(experiment.planned_overrides or ())
    remedy = (
        f"; the command that goes on with them: {replace(experiment, overrides=overrides).command}"
        if overrides != experiment.overrides
        else ""
    )
    words = "; ".join(_arm_words(changes, len(plan["arms"])))
    return f"ended runs here are of another configuration: {words}{remedy}"
