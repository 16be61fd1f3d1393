"""The folder of an experiment: what its first start settles for all runs, and what departs from the plan."""

import re
import time
from collections.abc import Callable
from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm.config.load import merge
from lm.config.training_config import TrainerConfig
from lm.config.tree import Config
from lm.config.yaml_text import parse_yaml
from lm.data.prepare import prepare, vocabulary
from lm.errors import Problem, RunError, shown
from lm.experiments.experiment import SHARED, Arm, Departure, Experiment, config_hash, deciding
from lm.experiments.experiment_file import kind_of_metric, read_experiment
from lm.experiments.plan import Times, cost
from lm.experiments.procedure import Procedure, next_look
from lm.files import write_new
from lm.machine import threads_each
from lm.runs.folder import CHECKPOINTS, CONFIG, EVALUATIONS, RESOLVED, json_bytes, read_json, step_path, write_json
from lm.schema import Plain, build, convert, to_plain
from lm.statistics.tuning import coordinates, rate_of

if TYPE_CHECKING:
    from lm.model.device import Resolved

PLAN = "plan"  # in RESOLVED: what was settled when it was written; null: it was lost
_OVERRIDES = "overrides"  # in RESOLVED: those of the first start


def open_experiment(path: Path, overrides: list[str], jobs: int = 1, anew: bool = False) -> Procedure:
    """An experiment as it stands: nothing is prepared, trained or written.

    Seeds of the second look are in where the first was undecided. Where the file leaves precision, compilation and threads open, they are
    as the first start has settled them; before it, as they would be settled on this machine for so many runs at a time.

    Args:
        anew: open it although its folder has ended runs of another configuration alone (`other_runs`).

    Raises:
        LMError: the file is wrong, or the experiment's folder is something else.
    """
    experiment = read_experiment(path, overrides)
    if (experiment.folder / CONFIG).exists():
        raise RunError(f"{experiment.folder}: a run folder; give the experiment's file another name, or set runs=...")
    kept = experiment.folder / RESOLVED
    settled = read_json(kept) if kept.exists() else _on_this_machine(experiment, jobs)
    if wrong := _wrong(settled):
        raise RunError(f"{kept}: {wrong}; bring it back, or delete it, and the next start writes it anew")
    trainer = experiment.base.get("trainer", {})  # sizes and arms may say otherwise, each for itself
    left_open = {name: settled[name] for name in SHARED if trainer.get(name) in ("auto", None)}
    planned = tuple(settled["seeds"]) if "seeds" in settled else None
    experiment = replace(experiment, base=merge(experiment.base, {"trainer": left_open}), planned=planned)
    procedure = Procedure(replace(experiment, departures=departures(experiment, settled if kept.exists() else None)))
    if not anew and not any(run.config.run_folder.is_dir() for run in procedure.known()) and (others := other_runs(procedure)):
        raise RunError(f"{experiment.folder}: {others}; to train what is asked for now, add --anew")
    return next_look(procedure)


def start(
    path: Path, overrides: list[str], jobs: int = 1, anew: bool = False, timed: Callable[[Procedure], Times] | None = None
) -> Procedure:
    """An experiment that can be worked on: with its text prepared, and settled what all runs share. Of several processes that start it
    at the same time, one settles.

    Args:
        timed: gives the seconds of runs, as far as they are known: whether to compile is settled by them, else by FLOPs.

    Raises:
        LMError: as `open_experiment`; the text can't be prepared, or is another than that of the first runs.
    """
    store = prepare(open_experiment(path, overrides, jobs, anew).experiment.first_config.data, progress=True)
    procedure = open_experiment(path, overrides, jobs, True)  # the vocabulary is known now
    experiment = procedure.experiment
    trainer, kept = experiment.first_config.trainer, experiment.folder / RESOLVED
    settled = {"data_fingerprint": store.fingerprint} | {name: getattr(trainer, name) for name in SHARED}
    undecided = read_experiment(path, overrides)
    if timed and not kept.exists() and undecided.first_config.trainer.compile == "auto":
        compiled = _compiled(undecided, timed(procedure).get((next(iter(undecided.sizes)), undecided.arms[0].name)))
        settled["compile"] = compiled.value == "true"
        print(f"trainer.compile of all runs: {compiled}", flush=True)
        experiment = replace(experiment, base=merge(experiment.base, {"trainer": {"compile": settled["compile"]}}))
    late, plan = is_measured(experiment), plan_of(experiment)
    settled |= {"seeds": list(experiment.all_seeds), _OVERRIDES: list(overrides), PLAN: None if late else plan}
    if not write_new(kept, json_bytes(settled)) and not late:  # nothing that a plan could be chosen by was measured yet
        before = read_json(kept)
        now = before | ({PLAN: plan} if is_another(before.get(PLAN), plan) else {})
        now |= {"seeds": settled["seeds"]} if "seeds" in before else {}
        if now != before:
            write_json(kept, now)
    if read_json(kept).get("data_fingerprint") != store.fingerprint:
        reason = "the text is not what the first runs were trained on"
        raise RunError(f"{kept}: {reason}; give the experiment's file another name, or set runs=...")
    return open_experiment(path, overrides, jobs, True)


def other_runs(procedure: Procedure) -> str:
    """How many ended runs in an experiment's folder are of its arms, rates and seeds but of another configuration than is asked for now, in
    which keys, and the command that goes on with them; empty if there are none. Arms that start from others are left out, as these tell."""
    experiment, known = procedure.experiment, {run.config.run_folder for run in procedure.known()}
    count, differences = 0, list[dict[str, tuple[Plain, Plain]]]()
    any_rate, number = experiment.any_rate, r"[\d.]+(?:e[+-]\d+)?"
    for size, arm in ((size, arm) for size, arm in experiment.places if not arm.start):
        keys = experiment.tuned_keys(size, arm, any_rate)  # whose values its folders are named with
        values = f"-{'_'.join([number] * len(keys))}" if keys else ""
        name = re.compile(rf"{re.escape(arm.name)}({values})-seed(\d+)-[0-9a-f]{{8}}")
        by_rate: dict[str, list[tuple[Path, int]]] = {}
        for folder in sorted((experiment.folder / size).glob("*-seed*")):
            if (match := name.fullmatch(folder.name)) and folder not in known and (folder / CONFIG).is_file():
                by_rate.setdefault(match[1], []).append((folder, int(match[2])))
        for at, runs in by_rate.items():
            own = dict(zip(keys, map(float, filter(None, at[1:].split("_"))), strict=True))
            every = zip(experiment.tune.keys, coordinates(any_rate), strict=True) if any_rate else ()
            rate = rate_of(own.get(key, value) for key, value in every) if any_rate else None
            configs = [procedure.run(size, arm, "final", rate, seed, {}).config for _, seed in runs]
            others = [(run[0], config) for run, config in zip(runs, configs, strict=True) if run[0] != config.run_folder]
            ended, differing = _ended_otherwise(others, experiment.tune.keys)
            count, differences = count + ended, [*differences, differing] if differing else differences
    if not count:
        return ""
    shared = {key: pair for key, pair in differences[0].items() if all(pair == each.get(key) for each in differences)}
    listed = [*(shared or differences[0]).items()][:4]
    words = ", ".join(f"{key}={shown(theirs)} (asked for: {shown(ours)})" for key, (theirs, ours) in listed)
    more = ", ..." if len(shared or differences[0]) > 4 else ""
    given = _overrides_of(experiment, shared if all(each.keys() == shared.keys() for each in differences) else {})
    remedy = f"; the command that goes on with them: {replace(experiment, overrides=given).command}" if given is not None else ""
    return f"{count} ended runs here are of another configuration: {words}{more}{remedy}"


def _ended_otherwise(runs: list[tuple[Path, Config]], tuned_keys: tuple[str, ...]) -> tuple[int, dict[str, tuple[Plain, Plain]]]:
    """How many of the folders of one arm's runs at one rate have ended, and the keys in which the first of them differs from the
    configuration that is asked for in its place: (theirs, the one asked for), null where a key is not set."""
    for folder, config in runs:
        plain = parse_yaml((folder / CONFIG).read_bytes(), str(folder / CONFIG))
        theirs, ours = deciding(plain), deciding(to_plain(config))
        last = theirs.get("trainer.max_steps")
        ended = sum(isinstance(last, int) and step_path(run / CHECKPOINTS, last).exists() for run, _ in runs)
        differing = {
            key: (theirs.get(key), ours.get(key)) for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)
        }
        differing = {key: pair for key, pair in differing.items() if key not in tuned_keys}
        return (ended, differing) if differing and ended else (0, {})
    return 0, {}


def _overrides_of(experiment: Experiment, differing: dict[str, tuple[Plain, Plain]]) -> tuple[str, ...] | None:
    """The overrides under which keys have the values that they differ from; without such keys those of the experiment's first start. None
    if neither says any but those that were given now."""
    if not differing:
        kept = experiment.folder / RESOLVED
        first = convert(list[str], read_json(kept).get(_OVERRIDES)) if kept.exists() else MISSING
        return None if first is MISSING or tuple(first) == experiment.overrides else tuple(first)
    given = [override for override in experiment.overrides if override.partition("=")[0] not in differing]
    return (*given, *(f"{key}={theirs if isinstance(theirs, str) else shown(theirs)}" for key, (theirs, _) in differing.items()))


def _wrong(settled: dict[str, Plain]) -> str:
    """Problems of the settings of a first start, in words; empty if there are none."""
    if missing := {*SHARED} - settled.keys():
        return f"has no {', '.join(sorted(missing))}"
    problems = [Problem(name, settled[name], "is not settled") for name in SHARED if settled[name] in ("auto", None)]
    build(TrainerConfig, {name: settled[name] for name in SHARED}, "", problems)
    if "seeds" in settled and convert(list[int], settled["seeds"]) is MISSING:
        problems.append(Problem("seeds", settled["seeds"], "must be a list of seeds"))
    if not isinstance(settled.get(PLAN), dict | None):
        problems.append(Problem(PLAN, settled[PLAN], "must be a map"))
    return str(problems[0]) if problems else ""


def _on_this_machine(experiment: Experiment, jobs: int) -> dict[str, Plain]:
    """Precision, compilation and threads of runs on this machine, `jobs` at a time."""
    from lm.model.device import gpus_of, resolve_precision

    config = experiment.first_config
    precision = resolve_precision(config, "gpu" if gpus_of(config) else "cpu", {})
    return {
        "precision": 32 if precision.value == "32" else precision.value,
        "compile": _compiled(experiment).value == "true",
        "threads": config.trainer.threads or threads_each(jobs),
    }


def _compiled(experiment: Experiment, seconds: float | None = None) -> "Resolved":
    """Whether runs are compiled, by all of the baseline in the first size, which share compiled code; `seconds`: of each, if known."""
    from lm.model.device import gpus_of, resolve_compile  # torch takes seconds to import

    config, tune = experiment.first_config, experiment.tune
    runs = len(experiment.seeds) + len(tune.rates) * len(tune.seeds)
    flops = cost(config, vocabulary(config.data) or 1).flops
    return resolve_compile(config, flops, "gpu" if gpus_of(config) else "cpu", {}, runs, seconds)


# ---------------------------------------------------------------- what was settled before final runs were measured


def plan_of(experiment: Experiment) -> dict[str, Plain]:
    """The plan of an experiment as it is settled now: primary metric, what it is measured on, tuning, looks, and a hash of each arm's
    configuration, by size."""
    arms = {size: {arm.name: _hash(experiment, size, arm) for arm in experiment.arms} for size in experiment.sizes}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    primary = {key: value for key, value in vars(experiment.primary).items() if key != "spread"}  # which the plan's power alone is from
    measured = {size: _measured(experiment, size) for size in experiment.sizes}
    tune = dict(vars(experiment.tune))
    return {"at": at, "primary": primary, "measured": measured, "tune": tune, "looks": experiment.looks, "arms": arms}


def _measured(experiment: Experiment, size: str) -> dict[str, Plain]:
    """The options of the evaluation that gives the primary metric, of the baseline."""
    config = experiment.config(size, experiment.arms[0], 0, None, {"name": "any"})
    return experiment.evaluated(config).eval.asked(kind_of_metric(experiment.primary.metric))


def _hash(experiment: Experiment, size: str, arm: Arm) -> str:
    config = config_hash(experiment.config(size, arm, 0, None, {"name": "any"}))
    step = () if arm.step is None else (arm.step,)
    return " ".join(map(str, (config, *((f"from {arm.start}", arm.swap, arm.trained, *step) if arm.start else ()))))


def is_measured(experiment: Experiment) -> bool:
    """True if anything of a final run was measured in the experiment's folder, of whatever configuration."""
    configs = (path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in experiment.folder.glob(pattern))
    return any(any((config.parent / EVALUATIONS).glob("*.json")) and b"stage: final" in config.read_bytes() for config in configs)


def is_another(plan: dict[str, Plain] | None, now: dict[str, Plain]) -> bool:
    """True if a plan is known and differs from the one now in more than its time."""
    return bool(plan) and {**plan, "at": now["at"]} != now


def departures(experiment: Experiment, settled: dict[str, Plain] | None) -> tuple[Departure, ...]:
    """Changes since the plan in `settled`, the content of RESOLVED (None: there is no such file); nothing before final runs were
    measured. Raises RunError: it holds something else."""
    now = plan_of(experiment)
    plan = (settled or {}).get(PLAN)
    if (plan and not is_another(plan, now)) or not is_measured(experiment):
        return ()
    if settled is not None and PLAN not in settled:
        return (Departure(f"{RESOLVED} is of an earlier version, which did not record primary metric and arms", exploratory=False),)
    if plan is None:
        return (Departure(f"what was planned before the first run is not known: {RESOLVED} was not there when final runs were"),)
    try:
        at, changes = plan["at"], []
        for block, exploratory in (("primary", True), ("tune", False)):
            for key, value in now[block].items():
                if key in plan[block] and plan[block][key] != value:
                    words = f"{block}.{key} was {shown(plan[block][key])} when it was settled ({at}), it is {shown(value)}"
                    changes.append(Departure(words, exploratory))
        for size, options in plan.get("measured", {}).items():
            for name, value in now["measured"].get(size, options).items():
                if not _extends(value, then := options.get(name)):
                    words = f"its {name} was {shown(then)} when it was settled ({at}), it is {shown(value)}"
                    changes.append(Departure(f"what {experiment.primary.metric} is measured on: {words}"))
        if (looks := plan.get("looks", now["looks"])) != now["looks"]:
            words = f"the number of looks was {looks} when it was settled ({at}), it is {now['looks']} (more_seeds)"
            changes.append(Departure(words))
        return tuple(changes + _changed_arms(plan["arms"], now["arms"], experiment.arms[0].name, at))
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{experiment.folder / RESOLVED}: its `{PLAN}` is damaged; bring it back") from None


def _extends(now: Plain, then: Plain) -> bool:
    """Whether a value is as it was, or a list that holds all that it held: what is measured beside a metric doesn't change it."""
    return now == then or (isinstance(now, list) and isinstance(then, list) and all(value in now for value in then))


def _changed_arms(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]], baseline: str, at: str) -> list[Departure]:
    """Arms that were added, left out, or changed; what concerns the baseline, or makes the family smaller, concerns all."""
    changes = []
    places = {(size, arm): None for plan in (before, now) for size, arms in plan.items() for arm in arms}
    for size, arm in places:
        then, today = before.get(size, {}).get(arm), now.get(size, {}).get(arm)
        if then != today:
            what = "was added" if then is None else "is left out" if today is None else "has another configuration"
            for_all = today is None or arm == baseline
            name = ", ".join(filter(None, (arm, size)))
            changes.append(Departure(f"arm {name} {what} since the arms were settled ({at})", place=None if for_all else (size, arm)))
    if next(iter(before.values()), {}) and next(iter(next(iter(before.values())))) != baseline:
        changes.append(Departure(f"the baseline is another since the arms were settled ({at})"))
    return changes
