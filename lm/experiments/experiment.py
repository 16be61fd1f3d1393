"""An experiment as its file describes it (base configuration, arms, seeds, tuning, primary metric), and the
configuration of each run.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from lm.config.load import merge, nest_keys, parse
from lm.config.tree import Config, effect_of
from lm.config.yaml_text import override, resolve_interpolations
from lm.errors import Problem
from lm.evaluation.metrics import find_metric
from lm.experiments.judging import PrimaryMetric
from lm.experiments.run_outcome import SELECTION
from lm.files import expand_home
from lm.model.decoder import Decoder
from lm.model.spec import count_parameters, flops_per_token
from lm.plain import Plain, flatten, to_plain
from lm.plugins import PLUGINS
from lm.removed_keys import hashed_defaults
from lm.runs.metric import Metric
from lm.schema import key
from lm.statistics.tuning import MIN_TUNING_SEEDS, Rate

SHARED_SETTINGS = ("precision", "compile", "threads")  # keys of `trainer` that all runs of an experiment share
_UNCACHED_KEYS = ("name", "runs", "seed")  # keys on which no other key of a configuration depends


@dataclass(frozen=True)
class Swap:
    """The normalizer that an arm puts into the weights from which it starts, as `lm swap` does."""

    to: str = key("", "the new normalizer; its options are the arm's `model.normalizer`")
    init: str | float | None = key(
        None, "initial values of its parameters: match, unit, fit or a number; null: its default"
    )


@dataclass(frozen=True)
class Arm:
    name: str
    changes: dict[str, Plain]  # how the arm's configuration differs from the base
    source: str = ""  # the earlier arm whose trained weights this arm starts from; empty: random weights
    swap: Swap | None = None  # replaces the normalizer that the weights were trained with; None: no swap
    trained: bool = True  # False: the swapped weights are measured without further training
    # the step of `source` at which the arm branches off, with optimizer state and position in the data; None: no branch
    branch_step: int | None = None

    @property
    def is_tuned(self) -> bool:
        """Whether the arm gets its own learning rate if the experiment tunes one. If not, it has the rate of the arm it
        starts from.
        """
        return self.trained and self.branch_step is None


@dataclass
class Tune:
    """The choice of each arm's learning rate, or of its value of another configuration key, from a grid or from a table
    of tuning runs.
    """

    grid: list[int | float] = key([], "its values, e.g. [1e-3, 2e-3, 4e-3]; []: the arms are taken as they are", gt=0)
    table: str | None = key(
        None, "a file as `tuning.csv`, relative to the experiment's, of which rates are chosen instead of a grid"
    )
    seeds: list[int] = key([101, 102], "seeds of the tuning runs; none of the final ones", ge=0, lt=2**31)
    metric: Literal["val/loss", "primary"] = key(
        "val/loss", "what its value is chosen by: the validation loss, or the primary metric"
    )
    key: str = key("optim.lr", "the configuration key that is tuned")

    def problems(self) -> list[Problem]:
        """What is wrong with the grid, beside single values."""
        if not self.grid:
            return []
        problems = []
        if len(set(self.grid)) < max(2, len(self.grid)):
            problems.append(Problem("grid", self.grid, "must be at least 2 different values"))
        if len(set(self.seeds)) < MIN_TUNING_SEEDS:
            problems.append(Problem("seeds", self.seeds, f"tuning needs at least {MIN_TUNING_SEEDS} seeds"))
        if self.table is not None:
            problems.append(Problem("table", self.table, "the rates would be chosen twice", "give a grid or a table"))
        return problems


@dataclass(frozen=True)
class Experiment:
    """An experiment as its file describes it; the first arm is the baseline."""

    # the file's name without its suffix; names the experiment's folder, which lies in the base configuration's `runs`
    name: str
    base: dict[str, Plain]  # plain configuration that all arms share
    arms: tuple[Arm, ...]
    # changes of the configuration by size; an experiment without sizes has one size with an empty name
    sizes: dict[str, dict[str, Plain]]
    seeds: tuple[int, ...]
    tune: Tune
    primary: PrimaryMetric
    # file, overrides: the file that was read, and the `key=value` texts that change its base configuration
    file: Path
    overrides: tuple[str, ...]
    # the runs that the file `tune.table` lists, as `Procedure.tuning_runs` gives them; None without this file
    table: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    # configuration keys for the measurement of finished runs at their last step, in addition to the evaluations during
    # training
    evaluate: dict[str, Plain] = field(default_factory=dict)
    # parsed configurations, by the values of all keys except `_UNCACHED_KEYS`
    _configs: dict[str, Config] = field(default_factory=dict, repr=False, compare=False)

    @property
    def command(self) -> str:
        """The shell command that trains and judges the experiment, or continues it."""
        return shlex.join(["lm", "compare", str(self.file), *self.overrides])

    @property
    def is_tuned(self) -> bool:
        """Whether each arm has its own learning rate, from a grid or a table."""
        return bool(self.tune.grid or self.tune.table)

    @property
    def choice_metric(self) -> str:
        """The name, in tables, of the metric by which learning rates are chosen."""
        return SELECTION if self.tune.metric == SELECTION else self.primary.metric

    def data_words(self, metric: str, part: Literal["selection", "report"]) -> str:
        """Name the data that a metric is measured on: `all questions` if it is the primary metric and one of
        questions, else the held-out text that chooses rates (`selection`) or reports results (`report`)."""
        is_primary = metric == self.primary.metric
        return "all questions" if is_primary and self.metric.units == "questions" else f"{part} text"

    @cached_property
    def metric(self) -> Metric:
        """The primary metric as its measurement declares it."""
        return find_metric(self.measurement_config(self.first_config), self.primary.metric)[1]

    def cost(self, value: float) -> float:
        """Convert a value of the metric by which rates are chosen into a cost to be minimized; infinite values stay
        infinite.
        """
        higher_is_better = self.tune.metric == "primary" and self.primary.better == "higher"
        return -value if higher_is_better and math.isfinite(value) else value

    def costs(self, tuning_runs: pd.DataFrame) -> dict[str, dict[Rate, list[float]]]:
        """The costs of tuning runs that have ended (`Experiment.cost`), by arm and rate as a list in ascending order of
        seeds.
        """
        costs: dict[str, dict[Rate, list[float]]] = {}
        ended_runs = tuning_runs.dropna(subset=[self.choice_metric]).sort_values("seed")
        for arm, rate, value in ended_runs[["arm", "rate", self.choice_metric]].itertuples(index=False):
            costs.setdefault(arm, {}).setdefault(rate, []).append(self.cost(value))
        return costs

    @property
    def folder(self) -> Path:
        return expand_home(self.first_config.runs) / self.name

    @property
    def first_config(self) -> Config:
        """An example of the baseline's configuration, in the first size, as `example_config` gives it."""
        return self.example_config(next(iter(self.sizes)), self.arms[0])

    @property
    def size_arms(self) -> list[tuple[str, Arm]]:
        return [*product(self.sizes, self.arms)]

    @property
    def any_rate(self) -> Rate | None:
        """An example of a rate: the first one of the grid or of the table; None without tuning."""
        rates = self.tune.grid if self.table is None else self.table["rate"].tolist()
        return next(iter(rates), None)

    def example_config(self, size: str, arm: Arm) -> Config:
        """An example of an arm's configuration, for checks and counts before runs are known: a run named `any`, of the
        first seed, at the learning rate `any_rate`. Raises ConfigError: the configuration is wrong."""
        return self.config(size, arm, self.seeds[0], self.any_rate, {"name": "any"})

    def plain(
        self, size: str, arm: Arm, seed: int, rate: Rate | None, changes: Mapping[str, Plain]
    ) -> dict[str, Plain]:
        """The plain configuration of one run; `rate` is the value of the tuned key, and `changes` override all other
        settings.
        """
        plain = self.base
        for block in (
            self.sizes[size],
            arm.changes,
            nest_keys({} if rate is None else {self.tune.key: rate}),
            {"seed": seed},
            changes,
        ):
            plain = merge(plain, block)
        return plain

    def config(self, size: str, arm: Arm, seed: int, rate: Rate | None, changes: Mapping[str, Plain]) -> Config:
        """Build the configuration of one run from `plain`. Runs that differ only in `_UNCACHED_KEYS` share a parsed
        configuration, also across copies of the experiment. Raises ConfigError.
        """
        plain = resolve_interpolations(self.plain(size, arm, seed, rate, changes))
        own_keys = {name: plain[name] for name in _UNCACHED_KEYS if name in plain}
        cache_key = repr({name: value for name, value in plain.items() if name not in own_keys})
        if cache_key not in self._configs:
            with PLUGINS.trusted():  # the user's file names the plugins
                self._configs[cache_key] = parse(plain)
        return replace(self._configs[cache_key], **own_keys)

    def measurement_config(self, config: Config) -> Config:
        """Return `config` with the entries of `self.evaluate` laid over it, to measure a run after training. Raises
        ConfigError.
        """
        return parse(merge(to_plain(config), self.evaluate)) if self.evaluate else config

    @property
    def evaluate_overrides(self) -> list[str]:
        """The keys of `evaluate` as `KEY=VALUE` arguments of `lm eval`."""
        return [override(name, value) for name, value in self.evaluate.items()]


@dataclass(frozen=True)
class Cost:
    """The resources that one run takes."""

    parameters: int  # number of the model's parameters
    tokens: int  # number of tokens that it is trained on
    flops: int  # floating-point operations of its training


def cost(config: Config, vocab_size: int, first_step: int = 0) -> Cost:
    """The resources of a run that is trained from `first_step` on."""
    with torch.device("meta"):
        decoder = Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)
    tokens = config.optim.batch_tokens * (config.trainer.max_steps - first_step)
    return Cost(count_parameters(decoder)["total"], tokens, flops_per_token(decoder) * tokens)


def config_hash(config: Config) -> str:
    """Hash all keys that decide what a run learns and how it is measured, to eight hexadecimal digits. A run with
    another hash is another run. Null keys (off) are left out, so that new keys of a later version do not change the
    hash. The paths `init_from` and `branch_from` are hashed as text, so `lm.experiments.procedure` first makes them
    independent of where the experiment's folder lies.
    """
    return hashlib.sha256(
        json.dumps(deciding_keys(to_plain(config)), sort_keys=True, default=str).encode()
    ).hexdigest()[:8]


def deciding_keys(plain: dict[str, Plain]) -> dict[str, Plain]:
    """The dotted keys, with their values, that decide what a run learns and how it is measured; null values are left
    out. Keys that left since 0.11.0 have their defaults.
    """
    areas = ("model", "training", "seed", "numerics", "evaluation")
    keys = flatten(plain).items()
    present = {path: value for path, value in keys if value is not None and effect_of(path).affects in areas}
    return present | dict(hashed_defaults(plain))


@cache
def omitted_keys() -> dict[str, Plain]:
    """The `deciding_keys` that `to_plain` omits while they have their default values, with these values."""
    written_keys = flatten(to_plain(Config()))
    default_keys = deciding_keys(to_plain(Config(), whole=True))
    return {path: value for path, value in default_keys.items() if path not in written_keys}
