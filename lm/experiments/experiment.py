"""An experiment as its file describes it: base configuration, arms, seeds, tuning, primary metric; and the configuration of each run."""

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from lm.attention.catalogue import make_normalizer
from lm.attention.normalizer import LayerSpec
from lm.attention.options import Options
from lm.config.load import merge, parse
from lm.config.tree import Config, effect_of
from lm.config.yaml_text import MAX_DEPTH, interpolated
from lm.errors import ConfigError, Problem, abbreviated
from lm.experiments.run_outcome import SELECTION
from lm.plugins import PLUGINS
from lm.schema import Plain, build, flatten, is_block, key, to_plain
from lm.statistics.tuning import FEWEST_TUNING_SEEDS, Rate, coordinates, rates_of

NOT_REACHED = "not reached"  # in place of the number of tokens of a run that never reached `primary.reach`
SHARED = ("precision", "compile", "threads")  # keys of `trainer` that all runs of an experiment share
_OF_NORMALIZER = "optim.groups.normalizer."
_OWN = ("name", "runs", "seed")  # keys of a run that no other key of its configuration depends on


@dataclass(frozen=True)
class Swap:
    """Another normalizer for the weights that an arm starts from, as `lm swap` gives it."""

    to: str = key("", "the new normalizer; its options are the arm's `model.normalizer`")
    init: str | float | None = key(None, "initial values of its parameters: match, unit, fit or a number; null: its default")


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        changes: how its configuration differs from the base.
        start: the earlier arm whose trained weights it starts from, if any.
        step: the step of it that the arm branches from, with optimizer state and place in the data; None: it starts from weights alone.
        swap: what becomes of their normalizer; None: it stays.
        trained: False: the swapped weights are measured as they are.
    """

    name: str
    changes: dict[str, Plain]
    start: str = ""
    swap: Swap | None = None
    trained: bool = True
    step: int | None = None

    @property
    def tuned(self) -> bool:
        """Whether it has a learning rate of its own where the experiment tunes one; else it has that of the arm it starts from."""
        return self.trained and self.step is None


@dataclass
class Tune:
    """The grid every arm is tuned on."""

    grid: list[int | float] | list[list[int | float]] = key(
        [], "its values, e.g. [1e-3, 2e-3, 4e-3], of several keys a list for each; []: the arms are taken as they are", gt=0
    )
    table: str | None = key(None, "a file as `tuning.csv`, relative to the experiment's, of which rates are chosen instead of a grid")
    seeds: list[int] = key([101, 102], "seeds of the tuning runs; none of the final ones", ge=0, lt=2**31)
    metric: Literal["val/loss", "primary"] = key("val/loss", "what its value is chosen by: the validation loss, or the primary metric")
    key: str | list[str] = key("optim.lr", "the configuration key that is tuned, or a list of keys that are tuned together")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that are tuned."""
        return (self.key,) if isinstance(self.key, str) else tuple(self.key)

    @property
    def axes(self) -> list[list[int | float]]:
        """The planned values of each key; none without a grid."""
        return [self.grid] if self.grid and isinstance(self.key, str) else self.grid

    @property
    def rates(self) -> list[Rate]:
        """The planned rates: the values of all keys together; none without a grid."""
        return rates_of(self.axes) if self.grid else []

    @property
    def heading(self) -> str:
        """The tuned keys as the heading of their values."""
        return " / ".join(self.keys)

    def problems(self) -> list[Problem]:
        """Contradictions between keys."""
        problems = []
        if not self.keys or len(set(self.keys)) < len(self.keys):
            problems.append(Problem("key", self.key, "must be a key, or a list of different keys"))
        if self.table is not None and not self.table.strip():
            problems.append(Problem("table", self.table, "names no file", "name one as `tuning.csv`, or leave it out"))
        several = isinstance(self.key, list)
        if self.grid and (any(isinstance(values, list) != several for values in self.grid) or len(self.axes) != len(self.keys)):
            reason = f"must be a list of values for each of {', '.join(self.keys)}" if several else "must be a list of values"
            problems.append(Problem("grid", self.grid, reason, "" if several else "of several keys name them all: `key: [KEY, ...]`"))
        elif any(len(set(values)) < len(values) or len(values) < 2 for values in self.axes):
            problems.append(Problem("grid", self.grid, "must be at least 2 different values" + " of each key" * several))
        if self.grid and len(set(self.seeds)) < FEWEST_TUNING_SEEDS:
            problems.append(Problem("seeds", self.seeds, f"tuning needs at least {FEWEST_TUNING_SEEDS} seeds"))
        if self.grid and self.table:
            problems.append(Problem("table", self.table, "the rates would be chosen twice", "give a grid or a table"))
        return problems


@dataclass
class Primary:
    """The one metric that decides, settled before any run."""

    metric: str = key("val/loss", "name in the metrics log, as `lm eval` gives it, e.g. val/loss")
    better: Literal["lower", "higher"] = key("lower", "which direction is better")
    matters: float = key(0.01, "smallest difference of interest, in the metric's unit; of `reach` relative: 0.1 is 10 %", gt=0)
    spread: float | None = key(None, "standard deviation of differences between single runs that the plan expects; null: unknown", gt=0)
    learned: float | None = key(None, "a run has learned if the metric reaches this: fractions of runs are compared; null: means are")
    reach: float | None = key(None, "compare the tokens at which the metric first reaches this; null: its values at the end")

    def problems(self) -> list[Problem]:
        """Contradictions between keys."""
        twice = self.learned is not None and self.reach is not None
        return [Problem("reach", self.reach, "runs would be compared in two ways", "give learned or reach")] if twice else []

    @property
    def quantity(self) -> str:
        """The name of the compared quantity in tables: the metric, or the tokens that it takes to reach a value."""
        return self.metric if self.reach is None else f"tokens to {self.metric} {self.reach:g}"


@dataclass(frozen=True)
class Tried:
    """One tuning run.

    Attributes:
        key: the configuration keys that are tuned, as `Tune.heading` gives them.
        selection, primary: the mean of SELECTION and the primary quantity on the selection text; infinite if the run diverged, or did not
            reach its level; None: not known.
        configuration: what was tuned, as `described` gives it.
    """

    size: str
    arm: str
    key: str
    rate: Rate
    seed: int
    selection: float | None
    primary: float | None
    configuration: str

    @property
    def diverged(self) -> bool:
        """Whether the run diverged."""
        return self.selection == math.inf


@dataclass(frozen=True)
class Departure:
    """How an experiment differs from what was planned, in words.

    Attributes:
        exploratory: whether it makes verdicts exploratory; else it is a note alone.
        place: the size and arm whose verdict it concerns; None: all.
    """

    words: str
    exploratory: bool = True
    place: tuple[str, str] | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment as its file describes it; the first arm is the baseline.

    Attributes:
        name: the file's name; runs lie in the base configuration's `runs`, in a folder of this name.
        base: plain configuration that all arms share.
        sizes: changes by size, such as of model or steps; one without a name if there are none.
        file, overrides: where it was read from, and what was changed in it.
        table: the lines of `tune.table`.
        planned: the seeds at its first start, of an experiment that was started.
        evaluate: configuration keys that all finished runs are measured with at their last step, beside what they measure in training.
        more_seeds: seeds of the second look, which are trained if the first leaves a comparison undecided.
        look: which of the looks `seeds` are of; those of the second include the first's.
        departures: what differs from what was planned when no final run had been measured.
    """

    name: str
    base: dict[str, Plain]
    arms: tuple[Arm, ...]
    sizes: dict[str, dict[str, Plain]]
    seeds: tuple[int, ...]
    tune: Tune
    primary: Primary
    file: Path
    overrides: tuple[str, ...]
    table: tuple[Tried, ...] = ()
    evaluate: dict[str, Plain] = field(default_factory=dict)
    more_seeds: tuple[int, ...] = ()
    look: Literal[1, 2] = 1
    planned: tuple[int, ...] | None = None
    departures: tuple[Departure, ...] = ()
    _configs: dict[str, Config] = field(default_factory=dict, repr=False, compare=False)  # by their keys but for `_OWN`

    @property
    def command(self) -> str:
        """The shell command that trains and judges it, or goes on with it."""
        return shlex.join(["lm", "compare", str(self.file), *self.overrides])

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The final seeds of both looks."""
        return tuple(dict.fromkeys((*self.seeds, *self.more_seeds)))

    @property
    def looks(self) -> int:
        """How often the data may be judged, which the 5 % are shared out among."""
        return 2 if self.more_seeds else 1

    @property
    def tuned(self) -> bool:
        """Whether each arm has a learning rate of its own, from a grid or a table."""
        return bool(self.tune.grid or self.table)

    @property
    def chosen_by(self) -> str:
        """The metric that chooses rates, by its name in tables."""
        return SELECTION if self.tune.metric == SELECTION else self.primary.quantity

    def cost(self, value: float) -> float:
        """A value of the metric that chooses rates as what is minimized; infinite stays infinite."""
        higher = self.tune.metric == "primary" and self.primary.reach is None and self.primary.better == "higher"
        return -value if higher and math.isfinite(value) else value

    def choosing(self, tried: Tried) -> float | None:
        """The value of a tuning run that chooses rates; infinite if it diverged, or did not reach its level; None: not known."""
        return tried.selection if self.tune.metric == SELECTION else tried.primary

    def costs_of(self, tried: Iterable[Tried], size: str) -> dict[str, dict[Rate, list[float]]]:
        """The costs to be minimized, of the tuning runs of a size, by arm, rate and seed (ascending)."""
        values = by_arm_and_rate(tried, size, self.choosing)
        return {arm: {rate: [self.cost(value) for value in some] for rate, some in rates.items()} for arm, rates in values.items()}

    def tuned_keys(self, size: str, arm: Arm, rate: Rate | None) -> dict[str, Plain]:
        """The tuned keys at a rate with their values; without those of the normalizer's parameters in an arm that has none."""
        if rate is None:
            return {}
        values = dict(zip(self.tune.keys, coordinates(rate), strict=True))
        if not any(key.startswith(_OF_NORMALIZER) for key in values):
            return values
        plan = self.config(size, arm, self.seeds[0], None, {"name": "any"}).plan
        learned = any(_has_parameters(options) for phase in plan for options in phase.normalizer.layer_options())
        return {key: value for key, value in values.items() if learned or not key.startswith(_OF_NORMALIZER)}

    @property
    def folder(self) -> Path:
        """Where its runs and its report are kept."""
        return Path(self.first_config.runs) / self.name

    @property
    def first_config(self) -> Config:
        """The configuration of the baseline's first run."""
        return self.config_of(next(iter(self.sizes)), self.arms[0])

    @property
    def places(self) -> list[tuple[str, Arm]]:
        """Each size with each arm."""
        return [*product(self.sizes, self.arms)]

    @property
    def any_rate(self) -> Rate | None:
        """A rate of the grid or of the table; None without tuning."""
        return self.tune.rates[0] if self.tune.grid else self.table[0].rate if self.table else None

    def config_of(self, size: str, arm: Arm) -> Config:
        """The configuration of an arm's run of the first seed and rate, but for its name. Raises ConfigError."""
        return self.config(size, arm, self.seeds[0], self.any_rate, {"name": "any"})

    def config(self, size: str, arm: Arm, seed: int, rate: Rate | None, changes: Mapping[str, Plain]) -> Config:
        """The configuration of one run; `rate` is the value of the tuned key. Runs that differ in `_OWN` alone share one that was parsed
        once, as do experiments that were made of each other. Raises ConfigError."""
        plain = self.base
        for more in (self.sizes[size], arm.changes, nested(self.tuned_keys(size, arm, rate)), {"seed": seed}, changes):
            plain = merge(plain, more)
        plain = interpolated(plain)
        own = {name: plain[name] for name in _OWN if name in plain}
        known = repr({name: value for name, value in plain.items() if name not in own})
        if known not in self._configs:
            with PLUGINS.trusted():  # the user's own file names them
                self._configs[known] = parse(plain)
        problems: list[Problem] = []
        build(Config, own, "", problems)
        if problems:
            raise ConfigError(problems)
        return replace(self._configs[known], **own)

    def evaluated(self, config: Config) -> Config:
        """The configuration that a run is measured with after training. Raises ConfigError."""
        return parse(merge(to_plain(config), self.evaluate)) if self.evaluate else config

    @property
    def evaluate_overrides(self) -> list[str]:
        """`evaluate` as the `KEY=VALUE` of `lm eval`."""
        return [f"{path}={json.dumps(value)}" for path, value in _leaves(self.evaluate)]


def _has_parameters(options: Options) -> bool:
    """Whether the normalizer with these options has parameters."""
    import torch  # takes seconds

    with torch.device("meta"):
        return any(True for _ in make_normalizer(options, LayerSpec(1, 2, 2, 2)).parameters())


def _leaves(plain: dict[str, Plain], above: str = "") -> Iterator[tuple[str, Plain]]:
    """The values of nested blocks by their dotted paths; lists are values."""
    for name, value in plain.items():
        if is_block(value) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def config_hash(config: Config) -> str:
    """Eight letters of all that decides what a run learns and what of it is measured: what differs in it is another run. Keys that are
    null (off) are left out, so that a later version's new keys do not make other runs of the same experiment. `init_from` counts as it is:
    of a run that starts from another of its experiment it must not hold where the experiment lies (`lm.experiments.procedure`)."""
    return hashlib.sha256(json.dumps(deciding(to_plain(config)), sort_keys=True, default=str).encode()).hexdigest()[:8]


def deciding(plain: dict[str, Plain]) -> dict[str, Plain]:
    """The keys of a run's configuration that decide what it learns and what of it is measured, dotted; without those that are null."""
    ours = ("model", "training", "seed", "numerics", "evaluation")
    return {path: value for path, value in flatten(plain).items() if value is not None and effect_of(path).affects in ours}


def nested(changes: Mapping[str, Plain]) -> dict[str, Plain]:
    """{"optim.lr": 1} as {"optim": {"lr": 1}}; what is nested already stays so."""
    plain: dict[str, Plain] = {}
    for path, value in changes.items():
        names = str(path).split(".")
        if len(names) > MAX_DEPTH:
            raise ConfigError(f"{abbreviated(str(path), 80)}: not a configuration key")
        for name in reversed(names):
            value = {name: value}
        plain = merge(plain, value)
    return plain


def described(config: Config, tuned_keys: Iterable[str], start: str) -> str:
    """The settings of a run but for seed, precision and tuned keys: the keys that are not at their defaults, `KEY=VALUE; KEY=VALUE`.

    `start`: the arm whose weights it starts from, in place of their path.
    """
    changed = {path: value for path, value in flatten(to_plain(config)).items() if value is not None and _defaults().get(path) != value}
    settings = {
        path: value
        for path, value in changed.items()
        if path not in (*tuned_keys, "init_from", "branch_from") and effect_of(path).affects in ("model", "training")
    } | ({"from": start} if start else {})
    return "; ".join(f"{path}={value}" for path, value in sorted(settings.items()))


@cache
def _defaults() -> dict[str, Plain]:
    return flatten(to_plain(Config()))


def differing_keys(ours: str, theirs: str) -> list[str]:
    """The keys in which two configurations, as `described`, differ."""
    return sorted({setting.partition("=")[0] for setting in {*ours.split("; ")} ^ {*theirs.split("; ")}})


def by_arm_and_rate(tried: Iterable[Tried], size: str, value: Callable[[Tried], float | None]) -> dict[str, dict[Rate, list[float]]]:
    """The values of a size's tuning runs, by arm, rate and seed (ascending); None are left out."""
    numbers: dict[str, dict[Rate, list[float]]] = {}
    for run in sorted((run for run in tried if run.size == size), key=lambda run: (run.rate, run.seed)):
        if (number := value(run)) is not None:
            numbers.setdefault(run.arm, {}).setdefault(run.rate, []).append(number)
    return numbers
