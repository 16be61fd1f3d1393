"""The settings that the first start of an experiment records in its folder for all runs, and later departures from the
recorded plan.
"""

import time
from collections.abc import Sequence
from dataclasses import MISSING, replace
from pathlib import Path

import numpy as np

from lm.config.load import merge
from lm.config.training_config import TrainerConfig
from lm.config.tree import Config
from lm.config.yaml_text import override, parse_yaml
from lm.data.prepare import prepare, vocab_size_of
from lm.data.store import Store
from lm.errors import ConfigError, Problem, RunError, as_written
from lm.evaluation.held_out import ByLength, LongContext, Validation
from lm.experiments.experiment import (
    SHARED_SETTINGS,
    Arm,
    Departure,
    Experiment,
    config_hash,
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
from lm.schema import Plain, build, convert, to_plain
from lm.statistics.tuning import key_values, make_rate

# key of the plan in RESOLVED_FILE; the plan is null (unknown) if the file was written after final runs were measured
PLAN = "plan"
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
    settings = _read_settings(settings_file) if settings_file.exists() else _machine_settings(experiment, jobs)
    if problem := _settings_problem(settings):
        raise RunError(f"{settings_file}: {problem}; bring it back, or delete it, and the next start writes it anew")
    trainer = experiment.base.get("trainer", {})  # sizes and arms may set these keys, too
    open_settings = {name: settings[name] for name in SHARED_SETTINGS if trainer.get(name) in ("auto", None)}
    planned_seeds = tuple(settings["seeds"]) if "seeds" in settings else None
    experiment = replace(
        experiment, base=merge(experiment.base, {"trainer": open_settings}), planned_seeds=planned_seeds
    )
    procedure = Procedure(
        replace(experiment, departures=departures(experiment, settings if settings_file.exists() else None))
    )
    if (
        not anew
        and not any(run.config.run_folder.is_dir() for run in procedure.known_runs())
        and (note := other_runs_note(procedure))
    ):
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
    settings |= {
        "seeds": list(experiment.seeds),
        _OVERRIDES: list(overrides),
        PLAN: None if has_measured_runs else plan,
        _CODE: code,
    }
    # the plan may change before a final run is measured
    if not write_new(settings_file, json_bytes(sealed(settings))) and not has_measured_runs:
        old_settings = _read_settings(settings_file)
        new_settings = old_settings | ({PLAN: plan} if has_plan_changed(old_settings.get(PLAN), plan) else {})
        new_settings |= {name: settings[name] for name in ("seeds", _CODE) if name in old_settings}
        if new_settings != old_settings:
            write_sealed(settings_file, new_settings)
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


def other_runs_note(procedure: Procedure) -> str:
    """Describe the ended runs in an experiment's folder whose configuration is not the present one of their arm, apart
    from rate and seed; empty without such runs. The note gives the number of these runs, the differing keys, and the
    command that continues the runs. Arms that start from another arm's weights are left out, as that arm's runs show
    the difference.
    """
    experiment, known_folders = procedure.experiment, {run.config.run_folder for run in procedure.known_runs()}
    arms = {arm.name: arm for arm in experiment.arms if not arm.source}
    tuned_values = (
        dict(zip(experiment.tune.keys, key_values(experiment.any_rate), strict=True)) if experiment.is_tuned else {}
    )
    # of each run, by key: its value and the requested value; None: not set
    differences = list[dict[str, tuple[Plain, Plain]]]()
    sized_files = [
        (size, path)
        for size in experiment.sizes
        for path in sorted((experiment.folder / size).glob(f"*-seed*/{CONFIG}"))
    ]
    for run_size, file in sized_files:
        plain = {} if file.parent in known_folders else parse_yaml(file.read_bytes(), str(file))
        values, experiment_block = omitted_keys() | deciding_keys(plain), plain.get("experiment") or {}
        last_step = values.get("trainer.max_steps")
        arm = arms.get(experiment_block.get("arm"))
        cell = experiment_block.get("rate")
        n_tuned_keys = 0 if cell is None else len(str(cell).split(" / "))
        has_ended = isinstance(last_step, int) and step_path(file.parent / CHECKPOINTS, last_step).exists()
        if not arm or not has_ended or n_tuned_keys != len(tuned_values):
            continue
        rate = make_rate(values.get(key, value) for key, value in tuned_values.items()) if tuned_values else None
        requested_values = omitted_keys() | deciding_keys(
            to_plain(procedure.config(run_size, arm, "final", rate, plain["seed"], None))
        )
        pairs = {
            key: (values.get(key), requested_values.get(key)) for key in sorted(values.keys() | requested_values.keys())
        }
        differences.append({key: pair for key, pair in pairs.items() if pair[0] != pair[1] and key not in tuned_values})
    differences = [pairs for pairs in differences if pairs]
    if not differences:
        return ""
    shared_values = {
        key: pair for key, pair in differences[0].items() if all(pair == group.get(key) for group in differences)
    }
    listed_values = [*(shared_values or differences[0]).items()][:4]
    words = ", ".join(
        f"{key}={as_written(value)} (asked for: {as_written(requested)})" for key, (value, requested) in listed_values
    )
    ellipsis = ", ..." if len(shared_values or differences[0]) > 4 else ""
    overrides = _overrides_of(
        experiment, shared_values if all(group.keys() == shared_values.keys() for group in differences) else {}
    )
    remedy = (
        f"; the command that goes on with them: {replace(experiment, overrides=overrides).command}"
        if overrides is not None
        else ""
    )
    return f"{len(differences)} ended runs here are of another configuration: {words}{ellipsis}{remedy}"


def _overrides_of(experiment: Experiment, differing_values: dict[str, tuple[Plain, Plain]]) -> tuple[str, ...] | None:
    """Return the overrides that continue the runs in the experiment's folder: the present overrides, with the values
    that these runs have for differing keys. Without such keys, return the overrides of the first start, or None if they
    are unknown or unchanged. `differing_values`: for each differing key, its value in the runs and the requested
    value.
    """
    if not differing_values:
        settings_file = experiment.folder / RESOLVED_FILE
        first_overrides = (
            convert(list[str], _read_settings(settings_file).get(_OVERRIDES)) if settings_file.exists() else MISSING
        )
        return (
            None
            if first_overrides is MISSING or tuple(first_overrides) == experiment.overrides
            else tuple(first_overrides)
        )
    other_overrides = (text for text in experiment.overrides if text.partition("=")[0] not in differing_values)
    return (*other_overrides, *(override(key, value) for key, (value, _) in differing_values.items()))


def _read_settings(file: Path) -> dict[str, Plain]:
    """Read RESOLVED_FILE; a file of an older version has no digest of itself. Raises RunError: it was altered."""
    content = read_json(file)
    try:
        return unsealed(content, file) if "sha256" in content else content
    except RunError as error:
        raise RunError(f"{error}; bring it back: it holds what was planned before the first run") from None


def _settings_problem(settings: dict[str, Plain]) -> str:
    if missing_names := {*SHARED_SETTINGS} - settings.keys():
        return f"has no {', '.join(sorted(missing_names))}"
    problems = [
        Problem(name, settings[name], "is not settled") for name in SHARED_SETTINGS if settings[name] in ("auto", None)
    ]
    build(TrainerConfig, {name: settings[name] for name in SHARED_SETTINGS}, "", problems)
    if "seeds" in settings and convert(list[int], settings["seeds"]) is MISSING:
        problems.append(Problem("seeds", settings["seeds"], "must be a list of seeds"))
    other_names = [name for name in (PLAN, _CODE) if not isinstance(settings.get(name), dict | None)]
    problems += [Problem(name, settings[name], "must be a map") for name in other_names]
    return str(problems[0]) if problems else ""


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


# ---------------------------------------------------------------- what was settled before final runs were measured


def plan_of(experiment: Experiment) -> dict[str, Plain]:
    """The present plan: time, primary metric, options of its evaluation, tuning, and a hash of each arm by size."""
    configs = {
        (size, arm.name): experiment.config(size, arm, 0, None, {"name": "any"}) for size, arm in experiment.size_arms
    }
    arms = {
        size: {arm.name: _arm_hash(arm, configs[size, arm.name]) for arm in experiment.arms}
        for size in experiment.sizes
    }
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    # only the plan's power depends on it
    primary = {key: value for key, value in vars(experiment.primary).items() if key != "spread"}
    baseline, kind = experiment.arms[0].name, kind_of_metric(experiment.primary.metric)
    measured = {
        size: experiment.measurement_config(configs[size, baseline]).eval.measured_options(kind)
        for size in experiment.sizes
    }
    tune = dict(vars(experiment.tune))
    if experiment.table:
        rows = sorted(
            f"{run.size} {run.arm} {run.key} {run.rate} {run.seed} {run.selection_value} {run.primary_value}"
            for run in experiment.table
        )
        tune["digest of table"] = plain_sha256(rows)[:8]
    return {"at": timestamp, "primary": primary, "measured": measured, "tune": tune, "arms": arms}


def _arm_hash(arm: Arm, config: Config) -> str:
    step = () if arm.branch_step is None else (arm.branch_step,)
    return " ".join(
        map(str, (config_hash(config), *((f"from {arm.source}", arm.swap, arm.trained, *step) if arm.source else ())))
    )


def is_measured(experiment: Experiment) -> bool:
    """Whether the experiment's folder has an evaluation of a final run, which is a run to be judged, of any
    configuration.
    """
    paths = (path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in experiment.folder.glob(pattern))
    return any(
        any((path.parent / EVALUATIONS).glob("*.json")) and b"stage: final" in path.read_bytes() for path in paths
    )


def has_plan_changed(plan: dict[str, Plain] | None, current_plan: dict[str, Plain]) -> bool:
    """Whether a recorded plan is known and differs from the current plan in more than the time at which it was
    recorded. A new order of the arms counts only if it changes the baseline."""
    return bool(plan) and (
        {**plan, "at": current_plan["at"]} != current_plan or _baseline(plan["arms"]) != _baseline(current_plan["arms"])
    )


def _baseline(arms: dict[str, dict[str, str]]) -> str:
    """The name of the baseline, the first of a plan's arms; empty without arms."""
    return next(iter(next(iter(arms.values()), {})), "")


def departures(experiment: Experiment, settings: dict[str, Plain] | None) -> tuple[Departure, ...]:
    """List how an experiment departs from its recorded plan (`plan_of`); empty before a run to be judged was measured.

    settings: the content of RESOLVED_FILE; None: there is no such file.

    Raises RunError: the recorded plan is damaged.
    """
    current_plan = plan_of(experiment)
    plan = (settings or {}).get(PLAN)
    if (plan and not has_plan_changed(plan, current_plan)) or not is_measured(experiment):
        return ()
    if settings is not None and PLAN not in settings:
        return (
            Departure(
                f"{RESOLVED_FILE} is of an earlier version, which did not record primary metric and arms",
                exploratory=False,
            ),
        )
    if plan is None:
        return (
            Departure(
                f"what was planned before the first run is not known: {RESOLVED_FILE} was not there when final runs "
                "were"
            ),
        )
    try:
        plan_time, changes = plan["at"], []

        def change_words(subject: str, planned_value: Plain, value: Plain) -> str:
            return (
                f"{subject} was {as_written(planned_value)} when it was settled ({plan_time}), it is "
                f"{as_written(value)}"
            )

        for block, exploratory in (("primary", True), ("tune", False)):
            for key, value in current_plan[block].items():
                if key in plan[block] and plan[block][key] != value:
                    changes.append(Departure(change_words(f"{block}.{key}", plan[block][key], value), exploratory))
        for size, options in plan.get("measured", {}).items():
            for name, value in current_plan["measured"].get(size, options).items():
                if not _extends(value, planned_value := options.get(name)):
                    subject = f"what {experiment.primary.metric} is measured on: its {name}"
                    changes.append(Departure(change_words(subject, planned_value, value)))
        return tuple(changes + _changed_arms(plan["arms"], current_plan["arms"], experiment.arms, plan_time))
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{experiment.folder / RESOLVED_FILE}: its `{PLAN}` is damaged; bring it back") from None


def _extends(value: Plain, planned_value: Plain) -> bool:
    """Whether an option equals its planned value, or is a list with all planned elements, as added elements do not
    change the metric.
    """
    are_lists = isinstance(value, list) and isinstance(planned_value, list)
    return value == planned_value or (are_lists and all(element in value for element in planned_value))


def _changed_arms(
    planned_arms: dict[str, dict[str, str]],
    current_arms: dict[str, dict[str, str]],
    arms: Sequence[Arm],
    plan_time: str,
) -> list[Departure]:
    """Departures for arms that were added, left out, or changed. A change of the baseline, or an arm that is left out,
    concerns all verdicts. A change of another arm concerns its own verdict and the verdicts of arms that start from its
    weights.
    """
    changes, baseline, sources = [], arms[0].name, {arm.name: arm.source for arm in arms}

    def change_words(size: str, arm: str) -> str:
        planned_hash, current_hash = planned_arms.get(size, {}).get(arm), current_arms.get(size, {}).get(arm)
        if planned_hash != current_hash:
            return (
                "was added"
                if planned_hash is None
                else "is left out"
                if current_hash is None
                else "has another configuration"
            )
        return (
            f"starts from an arm that {words}"
            if sources.get(arm) and (words := change_words(size, sources[arm]))
            else ""
        )

    size_arms = {
        (size, arm): None
        for arms_by_size in (planned_arms, current_arms)
        for size, arms in arms_by_size.items()
        for arm in arms
    }
    for size, arm in size_arms:
        if words := change_words(size, arm):
            size_arm = None if arm == baseline or arm not in current_arms.get(size, {}) else (size, arm)
            name = ", ".join(filter(None, (arm, size)))
            changes.append(
                Departure(f"arm {name} {words} since the arms were settled ({plan_time})", size_arm=size_arm)
            )
    if _baseline(planned_arms) not in ("", baseline):
        changes.append(Departure(f"the baseline is another since the arms were settled ({plan_time})"))
    return changes
