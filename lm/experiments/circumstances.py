"""Circumstances of runs that a reader must know: what was settled before final runs were measured, and what differs between runs."""

import time
from collections.abc import Iterable

from lm.attention.plugins import PLUGINS
from lm.errors import RunError, shown
from lm.experiments.arms import Arm
from lm.experiments.experiment import Departure, Experiment, config_hash
from lm.experiments.run_outcome import Outcome
from lm.runs.evaluations import measuring_code
from lm.runs.folder import CONFIG, ENVIRONMENT, EVALUATIONS, RESOLVED, read_json
from lm.runs.record import used
from lm.schema import Plain

PLAN = "plan"  # in RESOLVED: what was settled when it was written; null: it was lost
_FACTS = {"git commit": "git_commit", "torch": "versions.torch", "device": "device", "precision": "precision", "compile": "compile"}


def plan_of(experiment: Experiment) -> dict[str, Plain]:
    """The plan of an experiment as it is settled now: primary metric, tuning, and a hash of each arm's configuration, by size."""
    arms = {size: {arm.name: _hash(experiment, size, arm) for arm in experiment.arms} for size in experiment.sizes}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    primary = {key: value for key, value in vars(experiment.primary).items() if key != "spread"}  # which the plan's power alone is from
    return {"at": at, "primary": primary, "tune": dict(vars(experiment.tune)), "arms": arms}


def _hash(experiment: Experiment, size: str, arm: Arm) -> str:
    config = config_hash(experiment.config(size, arm, 0, None, {"name": "any"}))
    return " ".join(
        map(str, (config, *((f"from {arm.start}", arm.swap, arm.trained, *([] if arm.step is None else [arm.step])) if arm.start else ())))
    )


def is_measured(experiment: Experiment) -> bool:
    """True if anything of a final run was measured in the experiment's folder, of whatever configuration."""
    configs = (path for pattern in (f"*/{CONFIG}", f"*/*/{CONFIG}") for path in experiment.folder.glob(pattern))
    return any(any((one.parent / EVALUATIONS).glob("*.json")) and b"stage: final" in one.read_bytes() for one in configs)


def is_another(plan: dict[str, Plain] | None, now: dict[str, Plain]) -> bool:
    """True if a plan that is known says something else than another, whenever they were made."""
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
        found = _changed_keys("primary", plan, now, True) + _changed_keys("tune", plan, now, False)
        return tuple(found + _changed_arms(plan["arms"], now["arms"], experiment.arms[0].name, plan["at"]))
    except (KeyError, TypeError, AttributeError):
        raise RunError(f"{experiment.folder / RESOLVED}: its `{PLAN}` is damaged; bring it back") from None


def _changed_keys(block: str, plan: dict[str, Plain], now: dict[str, Plain], exploratory: bool) -> list[Departure]:
    before = plan[block]
    changed = [key for key in now[block] if key in before and before[key] != now[block][key]]
    words = (
        f"{block}.{key} was {shown(before[key])} when it was settled ({plan['at']}), it is {shown(now[block][key])}" for key in changed
    )
    return [Departure(one, exploratory) for one in words]


def _changed_arms(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]], baseline: str, at: str) -> list[Departure]:
    """Arms that were added, left out, or changed; what concerns the baseline, or makes the family smaller, concerns all."""
    found = []
    places = {(size, arm): None for plan in (before, now) for size, arms in plan.items() for arm in arms}
    for size, arm in places:
        then, today = before.get(size, {}).get(arm), now.get(size, {}).get(arm)
        if then != today:
            what = "was added" if then is None else "is left out" if today is None else "has another configuration"
            for_all = today is None or arm == baseline
            name = ", ".join(filter(None, (arm, size)))
            found.append(Departure(f"arm {name} {what} since the arms were settled ({at})", place=None if for_all else (size, arm)))
    if next(iter(before.values()), {}) and next(iter(next(iter(before.values())))) != baseline:
        found.append(Departure(f"the baseline is another since the arms were settled ({at})"))
    return found


def unequal(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    """In what finished runs, given with their arms, differ beside these: one sentence each, by environment.json and their evaluations.

    Raises:
        RunError: an environment.json can't be read.
    """
    finished = [(arm, one) for arm, one in outcomes if one.state == "finished"]
    recorded = [(arm, read_json(one.folder / ENVIRONMENT), one) for arm, one in finished if (one.folder / ENVIRONMENT).is_file()]
    found = []
    try:
        for name, key in _FACTS.items():
            if words := _differing([(arm, used(environment, key)) for arm, environment, _ in recorded]):
                found.append(f"runs differ in {name}: {words}")
        commits = [used(environment, "git_dirty") for _, environment, _ in recorded if used(environment, "git_commit")]
        if dirty := sum(one is not False for one in commits):
            found.append(f"{dirty} of {len(finished)} runs are of a git tree with uncommitted changes: their code is not known")
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{recorded[0][2].folder.parent}: an {ENVIRONMENT} is damaged: {error}") from None
    if unsealed := sum(not one.sealed for _, one in finished):
        found.append(f"{unsealed} runs' evaluations carry no digest (made by an earlier version)")
    return found + _by_code([(arm, one) for arm, one in finished if one.sealed])


def _differing(values: list[tuple[str, Plain]]) -> str:
    """Values with the arms that have them, in words; empty if all are the same."""
    arms: dict[str, dict[str, None]] = {}
    for arm, value in values:
        arms.setdefault("not recorded" if value is None else str(value), {})[arm] = None
    return "; ".join(f"{value[:60]} ({', '.join(some)})" for value, some in arms.items()) if len(arms) > 1 else ""


def _by_code(outcomes: list[tuple[str, Outcome]]) -> list[str]:
    """Whether runs were measured by different code, or by other than today's."""
    today = {"lm": measuring_code(), **PLUGINS.code(name for _, one in outcomes for code in one.codes for name in code)}
    found, other = [], 0
    for name in dict.fromkeys(name for _, one in outcomes for code in one.codes for name in code):
        digests = [(arm, code[name]) for arm, one in outcomes for code in one.codes if name in code]
        if words := _differing(digests):
            found.append(f"runs were measured by different code of {name}: {words}; lm eval RUN measures them again")
        else:
            other += name in today and any(digest != today[name] for _, digest in digests)
    return found + ["runs were measured by other code than today's; lm eval RUN measures them again"] * bool(other)
