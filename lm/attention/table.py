"""The table of normalizers: options, formula, source and implementing class of each.

A new normalizer is one class (in a module of this package) and one row here. Nothing in this
module imports torch, so that a configuration is checked before anything heavy is loaded.
"""

import importlib
import re
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from lm.errors import Problem
from lm.schema import Plain, key

_ROW_LENGTH = re.compile(r"visible|sample|fixed:([2-9]|[1-9][0-9]+)")


@dataclass
class Softmax:
    """softmax(z): the baseline."""

    name: ClassVar[str] = "softmax"


@dataclass
class SSMax:
    """Scalable-Softmax, arXiv 2501.19399: softmax((s ln n + b) z)."""

    name: ClassVar[str] = "ssmax"
    scale: Literal["learned", "none"] = key("learned", "s of `s ln n`, one per layer and head; `none`: s = 1 (the paper's variant c)")
    bias: bool = key(False, "learn b of `s ln n + b`, one per layer and head, from 0 (the paper's variant d)")
    init: Literal["match", "unit"] | float = key(
        "match",
        "first value of s; `match`: 1 / mean of ln n over the training length, which keeps the mean logit scale at 1, and in a swap "
        "the closed form that follows the old normalizer (docs/swapping.md); `unit`: 1",
    )
    n: str = key("visible", "row length n: `visible` keys, length of the `sample`, or `fixed:N`")


@dataclass
class LogN:
    """Entropy-invariant scaling, kexue.fm 8823: softmax(z ln n / ln m)."""

    name: ClassVar[str] = "log_n"
    base: Literal["train"] | float = key("train", "m, the length at which this is softmax; `train`: the training length", gt=1)
    clip: bool = key(False, "never scale below 1, for models trained without it (`max(1, ln n / ln m)`)")
    n: str = key("visible", "row length n: `visible` keys, length of the `sample`, or `fixed:N`")


@dataclass(frozen=True)
class Entry:
    """One row: the options' dataclass, the class that implements it, and what the docs say."""

    options: type
    implementation: str  # "module:Class"
    formula: str
    parameters: str
    source: str

    def load(self) -> type:
        """The implementing `Normalizer` class (imports torch)."""
        module, name = self.implementation.split(":")
        return getattr(importlib.import_module(module), name)


ENTRIES: dict[str, Entry] = {
    entry.options.name: entry
    for entry in (
        Entry(Softmax, "lm.attention.normalizers:Softmax", "softmax(z)", "none", "baseline"),
        Entry(
            SSMax,
            "lm.attention.normalizers:SSMax",
            "softmax((s ln n + b) z)",
            "s (and b) per layer and head",
            "Nakanishi 2025, arXiv 2501.19399, Eq. 2",
        ),
        Entry(LogN, "lm.attention.normalizers:LogN", "softmax(z ln n / ln m)", "none", "Su 2021, kexue.fm 8823"),
    )
}


def label(plain: dict[str, Plain]) -> str:
    """A normalizer's name with the options that aren't its defaults: `ssmax (init=1.0)`."""
    schema = OPTIONS.get(plain["name"])
    defaults = {spec.name: spec.default for spec in fields(schema)} if schema else {}
    options = {key: value for key, value in plain.items() if key != "name"}
    changed = [f"{key}={_shown(value)}" for key, value in options.items() if key not in defaults or defaults[key] != value]
    return f"{plain['name']} ({', '.join(changed)})" if changed else plain["name"]


def _shown(value: Plain) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


OPTIONS: dict[str, type] = {name: entry.options for name, entry in ENTRIES.items()}


def check(options: Softmax | SSMax | LogN, path: str) -> list[Problem]:
    """What the types of the options can't say: the row-length policy and contradictory pairs."""
    problems = []
    policy = getattr(options, "n", "visible")
    if not _ROW_LENGTH.fullmatch(policy):
        problems.append(Problem(f"{path}.n", policy, "unknown row length", "choose visible, sample or fixed:N (N a whole number from 2)"))
    if isinstance(options, SSMax) and options.scale == "none" and options.init != "match":
        problems.append(Problem(f"{path}.init", options.init, "scale: none has no s to start", "drop init, or set scale: learned"))
    return problems
