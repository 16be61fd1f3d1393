"""Tuning tables: what the tuning runs of an experiment gave, one line a run, as `tuning.csv` holds it and `tune.table` reads it."""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lm.config.effects import effect_of
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.experiments.run_outcome import SELECTION
from lm.schema import Plain, flatten, to_plain

DIVERGED = "diverged"  # in place of a number
_REMEDY = "tuning.csv, which `lm compare` writes, has the form"


@dataclass(frozen=True)
class Tried:
    """One tuning run.

    Attributes:
        key: the configuration key that is tuned.
        selection, primary: means of SELECTION and of the primary metric on the selection text; infinite if the run diverged; None: not
            known.
        configuration: what was tuned, as `described` gives it.
    """

    size: str
    arm: str
    key: str
    rate: float
    seed: int
    selection: float | None
    primary: float | None
    configuration: str


def described(config: Config, tuned_key: str, start: str) -> str:
    """The settings of a run but for seed, precision and tuned key: the keys that are not at their defaults, `KEY=VALUE; KEY=VALUE`.

    `start`: the arm whose weights it starts from, in place of their path.
    """
    changed = {path: value for path, value in flatten(to_plain(config)).items() if value is not None and _defaults().get(path) != value}
    found = {
        path: value
        for path, value in changed.items()
        if path not in (tuned_key, "init_from", "branch_from") and effect_of(path).affects in ("model", "training")
    } | ({"from": start} if start else {})
    return "; ".join(f"{path}={value}" for path, value in sorted(found.items()))


@cache
def _defaults() -> dict[str, Plain]:
    return flatten(to_plain(Config()))


def differing_keys(ours: str, theirs: str) -> list[str]:
    """The keys in which two configurations, as `described`, differ."""
    return sorted({one.partition("=")[0] for one in {*ours.split("; ")} ^ {*theirs.split("; ")}})


def table_lines(tried: Iterable[Tried], metric: str) -> list[dict[str, Plain]]:
    """Tuning runs in the form of a table: one column for SELECTION, and one for the primary metric where it is another."""
    return [
        {"size": one.size, "arm": one.arm, "key": one.key, "rate": one.rate, "seed": one.seed, SELECTION: _cell(one.selection)}
        | ({} if metric == SELECTION else {metric: _cell(one.primary)})
        | {"configuration": one.configuration}
        for one in tried
    ]


def _cell(value: float | None) -> Plain:
    return value if value is None or math.isfinite(value) else DIVERGED


def read_table(path: Path, metric: str) -> tuple[Tried, ...]:
    """The lines of a tuning table; `metric`: the primary one, None in all of them if the table has no column of it.

    Raises:
        ConfigError: there is no such file, or it is no tuning table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [
                name for name in ("size", "arm", "key", "rate", "seed", SELECTION, "configuration") if name not in (reader.fieldnames or ())
            ]
            if missing:
                raise ConfigError(f"{path}: not a tuning table: it has no column {', '.join(missing)}; {_REMEDY}")
            found = []
            for line in reader:
                try:
                    selection = _number(line[SELECTION]) if line[SELECTION] else None
                    primary = _number(line[metric]) if metric in line and selection is not None else None
                    rate, seed = _rate(line["rate"]), int(line["seed"])
                    found.append(Tried(line["size"], line["arm"], line["key"], rate, seed, selection, primary, line["configuration"] or ""))
                except (ValueError, TypeError, AttributeError):
                    reason = f"needs a rate above 0, a seed, and a {SELECTION} that is a number or `{DIVERGED}`"
                    raise ConfigError(f"{path}: line {reader.line_num} {reason}; {_REMEDY}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (tune.table)") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a tuning table: {error}; {_REMEDY}") from None
    if len({(one.size, one.arm, one.rate, one.seed) for one in found}) < len(found):
        raise ConfigError(f"{path}: has a run twice: the same size, arm, rate and seed; {_REMEDY}")
    return tuple(found)


def _number(text: str) -> float:
    value = math.inf if text == DIVERGED else float(text)
    if math.isnan(value):
        raise ValueError
    return value


def _rate(text: str) -> float:
    """A value of the tuned key, an integer where it is written as one."""
    value = int(text) if text.isdecimal() else float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def by_arm_and_rate(tried: Iterable[Tried], size: str, value: str) -> dict[str, dict[float, list[float]]]:
    """The numbers of a size, `selection` or `primary`, by arm, rate and seed (ascending); None are left out."""
    found: dict[str, dict[float, list[float]]] = {}
    for one in sorted((one for one in tried if one.size == size), key=lambda one: (one.rate, one.seed)):
        number = getattr(one, value)
        if number is not None:
            found.setdefault(one.arm, {}).setdefault(one.rate, []).append(number)
    return found
