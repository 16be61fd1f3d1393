"""Identity of runs that are compared: the settings that decide what a run learns, what each of its starts used, and its seeds."""

import hashlib
import json

from lm.config.effects import canonical, is_learned, recorded_per_start
from lm.schema import Plain, flatten

_DIFFERS_ALWAYS = ("step", "time", "command")


def starts(environment: dict[str, Plain]) -> list[dict[str, Plain]]:
    """The settings of each start of a run, as dotted keys: those whose steps the weights have in them. [] of a model without a training
    run.

    A start at step s leaves none of the steps after s that earlier ones made.

    Raises:
        ValueError: `starts` is no list of objects with a step.
    """
    if "starts" not in environment:
        return []
    found = environment["starts"]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) and isinstance(one.get("step"), int) for one in found):
        raise ValueError("starts is no list of objects with a step")
    kept: list[dict[str, Plain]] = []
    for start in found:
        kept = [earlier for earlier in kept if earlier["step"] < start["step"]] + [flatten(start)]
    return kept


def used(environment: dict[str, Plain], name: str) -> Plain:
    """The setting that the starts used, such as `32`; where they differ `32, from step 500 bf16-mixed`; None if no start
    recorded it."""
    changes: list[tuple[int, Plain]] = []
    for start in starts(environment):
        if start.get(name) is not None and (not changes or start[name] != changes[-1][1]):
            changes.append((start["step"], start[name]))
    if len(changes) < 2:
        return changes[0][1] if changes else None
    return ", ".join(f"from step {step:,} {_short(value)}" if number else _short(value) for number, (step, value) in enumerate(changes))


def _last_part(key: str) -> str:
    """The name in environment.json of the value that a key had."""
    return key.rpartition(".")[2]


def differing(environment: dict[str, Plain]) -> list[str]:
    """Settings in which the starts of a run differ, in words; empty if they used the same."""
    found = starts(environment)
    names = dict.fromkeys(name for start in found for name in start if name not in _DIFFERS_ALWAYS)
    differ = [name for name in names if len({json.dumps(start[name]) for start in found if start.get(name) is not None}) > 1]
    return [f"{name} {used(environment, name)}" for name in differ]


def _short(value: Plain) -> str:
    """A value as short text: commits truncated, booleans as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)[:24]


def arm_definition(config: dict[str, Plain], environment: dict[str, Plain]) -> dict[str, Plain]:
    """All that decides what a run learns, except its seed, as dotted keys in canonical form: runs in which it is equal are one arm.

    Precision, compilation and the schedule's length are those used at each start; initial weights (`init_from`) are identified by
    the arm they come from, not by their path.
    """
    found = {key: value for key, value in flatten(canonical(config)).items() if is_learned(key)}
    as_used = {key: used(environment, _last_part(key)) for key in recorded_per_start()}
    found |= {key: value for key, value in as_used.items() if value is not None}
    start, swap = environment.get("started_from") or {}, environment.get("swap") or {}
    if config.get("init_from") and "arm" in start:
        found["init_from"] = f"{start['normalizer']}, arm {start['arm']}"
    return found | {f"swap.{name}": swap[name] for name in ("normalizer", "init", "arm") if name in swap}


def arm(config: dict[str, Plain], environment: dict[str, Plain]) -> str:
    """The identifier of a run's arm: a hash of `arm_definition`."""
    return hashlib.sha256(json.dumps(arm_definition(config, environment), sort_keys=True, default=str).encode()).hexdigest()[:12]


def seeds(config: dict[str, Plain], environment: dict[str, Plain]) -> tuple[int, ...]:
    """The seeds behind a run's weights: those of the run it started from, then its own; consecutive equal seeds once."""
    found = [*((environment.get("started_from") or {}).get("seeds") or ()), config["seed"]]
    return tuple(seed for number, seed in enumerate(found) if number == 0 or seed != found[number - 1])
