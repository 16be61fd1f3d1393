"""What an experiment file says: the base configuration, the arms, their seeds, the grid they are tuned on, and the primary metric."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Literal

from lm.attention.plugins import PLUGINS
from lm.config.effects import effect_of
from lm.config.interpolation import interpolated
from lm.config.load import merge, parse, read_overrides, read_yaml
from lm.config.tree import Config
from lm.config.yaml_text import MAX_BYTES, MAX_DEPTH, parse_yaml
from lm.errors import ConfigError, Problem, abbreviated
from lm.experiments.tuning_tables import Tried, by_arm_and_rate, read_table
from lm.runs.folder import CONFIG
from lm.schema import Plain, build, flatten, key, own_problems, section, suggest, to_plain
from lm.statistics.tuning import FEWEST_TUNING_SEEDS

_TAKEN = (".", "..", "claims", "logs", "report")  # as folders
_NAME = "letters, digits, '-', '_' and '.'"


@dataclass
class Tune:
    """The grid every arm is tuned on."""

    grid: list[int | float] = key([], "its values, e.g. [1e-3, 2e-3, 4e-3]; []: the arms are taken as they are", gt=0)
    table: str | None = key(None, "a file as `tuning.csv`, relative to the experiment's, of which rates are chosen instead of a grid")
    seeds: list[int] = key([101, 102], "seeds of the tuning runs; none of the final ones", ge=0, lt=2**31)
    key: str = key("optim.lr", "the configuration key that is tuned")

    def problems(self) -> list[Problem]:
        """What contradicts itself."""
        found = []
        if self.grid and (len(set(self.grid)) < len(self.grid) or len(self.grid) < 2):
            found.append(Problem("grid", self.grid, "must be at least 2 different values"))
        if self.grid and len(set(self.seeds)) < FEWEST_TUNING_SEEDS:
            found.append(Problem("seeds", self.seeds, f"tuning needs at least {FEWEST_TUNING_SEEDS} seeds"))
        if self.grid and self.table:
            found.append(Problem("table", self.table, "the rates would be chosen twice", "give a grid or a table"))
        return found


@dataclass
class Primary:
    """The one metric that decides, settled before any run."""

    metric: str = key("val/loss", "name in the metrics log, as `lm eval` gives it, e.g. val/loss")
    better: Literal["lower", "higher"] = key("lower", "which direction is better")
    matters: float = key(0.01, "smallest difference of interest, in the metric's unit", gt=0)
    learned: float | None = key(None, "a run has learned if the metric reaches this: fractions of runs are compared; null: means are")


@dataclass
class _File:
    """The keys of an experiment file but for `base`, `arms` and `sizes`, which hold keys of configurations."""

    seeds: list[int] = key([1, 2, 3], "seeds of the final runs", ge=0, lt=2**31)
    tune: Tune = section(Tune, "the learning rate of each arm")
    primary: Primary = section(Primary, "what decides")


@dataclass(frozen=True)
class Arm:
    """One arm: how its configuration differs from the base, and the earlier arm whose trained weights it starts from, if any."""

    name: str
    changes: dict[str, Plain]
    start: str = ""


@dataclass(frozen=True)
class Experiment:
    """An experiment as its file describes it; the first arm is the baseline.

    Attributes:
        name: the file's name; runs lie in the base configuration's `runs`, in a folder of this name.
        base: plain configuration that all arms share.
        sizes: changes by size, such as of model or steps; one without a name if there are none.
        file, overrides: where it was read from, and what was changed in it.
        table: the lines of `tune.table`.
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

    @property
    def command(self) -> str:
        """What trains and judges it, or goes on with it, in a shell."""
        return shlex.join(["lm", "compare", str(self.file), *self.overrides])

    @property
    def tuned(self) -> bool:
        """Whether each arm has a learning rate of its own, from a grid or a table."""
        return bool(self.tune.grid or self.table)

    @property
    def first_rate(self) -> float | None:
        """A value that the tuned key may have; None without tuning."""
        return self.tune.grid[0] if self.tune.grid else self.table[0].rate if self.table else None

    @property
    def folder(self) -> Path:
        """Where its runs and its report are kept."""
        return Path(self.first_config.runs) / self.name

    @property
    def first_config(self) -> Config:
        """The configuration of the baseline's first run."""
        return self.config(next(iter(self.sizes)), self.arms[0], self.seeds[0], self.first_rate, {"name": "any"})

    def config(self, size: str, arm: Arm, seed: int, rate: float | None, changes: Mapping[str, Plain]) -> Config:
        """The configuration of one run; `rate` is the value of the tuned key. Raises ConfigError naming arm and size."""
        tuned = {} if rate is None else nested({self.tune.key: rate})
        plain = self.base
        for more in (self.sizes[size], arm.changes, tuned, {"seed": seed}, changes):
            plain = merge(plain, more)
        try:
            with PLUGINS.trusted():  # the user's own file names them
                return parse(interpolated(plain))
        except ConfigError as error:
            where = f"arm {arm.name}" + (f", size {size}" if size else "")
            raise ConfigError(f"{where}: {error}") from None


def read_experiment(file: Path, overrides: list[str]) -> Experiment:
    """The experiment of a YAML file; `key=value` texts change the base configuration of all arms.

    Raises:
        ConfigError: everything that is wrong with it, in one message, also with the configuration of any arm.
    """
    plain = _read(file)
    problems: list[Problem] = []
    arms = _arms(plain.pop("arms", None), problems)
    sizes = {name: nested(changes) for name, changes in _blocks("sizes", plain.pop("sizes", None) or {}, problems).items()}
    base = _base(file, plain.pop("base", None))
    made = build(_File, plain, "", problems)
    problems += own_problems(made)
    if len(set(made.seeds)) < len(made.seeds) or not made.seeds:
        problems.append(Problem("seeds", made.seeds, "must be different seeds, at least one"))
    if made.tune.grid and (both := sorted({*made.seeds} & {*made.tune.seeds})):
        problems.append(Problem("tune.seeds", both, "are also final seeds", "the runs that choose a rate must not judge it"))
    fixed = {"seed", "name", "runs", "resume", "init_from"}
    if made.tune.key in fixed:
        problems.append(Problem("tune.key", made.tune.key, "is set by the experiment", "name a key of the optimizer, such as optim.lr"))
    fixed |= {made.tune.key} if made.tune.grid or made.tune.table else set()
    blocks = {f"arms.{arm.name}": arm.changes for arm in arms} | {f"sizes.{name}": changes for name, changes in sizes.items()}
    for where, changes in blocks.items():
        for path in sorted(fixed & set(flatten(changes))):
            problems.append(Problem(f"{where}.{path}", flatten(changes)[path], "is set by the experiment", "drop it"))
    if problems:
        raise ConfigError(problems)
    base = merge(base, read_overrides(overrides))
    sizes, seeds = sizes or {"": {}}, tuple(made.seeds)
    table = read_table(file.parent / made.tune.table, made.primary.metric) if made.tune.table else ()
    found = Experiment(file.stem, base, arms, sizes, seeds, made.tune, made.primary, file, tuple(overrides), table)
    _check_table(found)
    _check(found)
    return found


def _check_table(experiment: Experiment) -> None:
    """That a tuning table has a finished run of every arm and size, at several rates and seeds, none of them final."""
    where, problems = experiment.tune.table, []
    if wrong := {one.key for one in experiment.table} - {experiment.tune.key}:
        problems.append(Problem("tune.key", experiment.tune.key, f"the table {where} is of {', '.join(sorted(wrong))}"))
    if both := sorted({*experiment.seeds} & {one.seed for one in experiment.table}):
        problems.append(Problem("tune.table", both, "are final seeds", "the runs that choose a rate must not judge it"))
    remedy = "make it again by `lm compare` with a grid: it writes tuning.csv"
    for size, arm in product(experiment.sizes if where else (), experiment.arms):
        name = " ".join(filter(None, (size, arm.name)))
        by_rate = by_arm_and_rate(experiment.table, size, "selection").get(arm.name, {})
        mine = [one for one in experiment.table if (one.size, one.arm) == (size, arm.name)]
        if not mine:
            problems.append(Problem("tune.table", where, f"has no {name}", remedy))
        elif any(one.selection is None for one in mine):
            problems.append(Problem("tune.table", where, f"has runs of {name} that have not ended", remedy))
        elif len(by_rate) < 2 or min(map(len, by_rate.values())) < FEWEST_TUNING_SEEDS:
            reason = f"has fewer than 2 rates of {name}, or fewer than {FEWEST_TUNING_SEEDS} seeds at one"
            problems.append(Problem("tune.table", where, reason, remedy))
    if problems:
        raise ConfigError(problems)


def _check(experiment: Experiment) -> None:
    """Every arm's configuration in every size, and that no two arms are the same and all read the same data."""
    for size in experiment.sizes:
        seen: dict[str, str] = {}
        plans: dict[str, Config] = {}
        data, first = None, None
        for arm in experiment.arms:
            config = experiment.config(size, arm, experiment.seeds[0], experiment.first_rate, {"name": "any"})
            same = f"{arm.start} {config_hash(config)}"
            if same in seen:
                raise ConfigError([Problem(f"arms.{arm.name}", arm.changes, f"is the same as {seen[same]}", "change it, or drop it")])
            seen[same] = arm.name
            if arm.start and config.plan[0].normalizer != plans[arm.start].plan[-1].normalizer:
                reason = f"has another normalizer than {arm.start}, whose weights it starts from"
                raise ConfigError([Problem(f"arms.{arm.name}.from", arm.start, reason, "swap it in during training instead: `phases`")])
            plans[arm.name] = config
            text = repr((config.data.source, config.data.tokenizer, config.data.val_fraction))
            if first is not None and (first.data.seq_len, first.eval) != (config.data.seq_len, config.eval):
                reason, remedy = "is measured on other sequences than the baseline", "give all arms one data.seq_len and one eval block"
                raise ConfigError([Problem(f"arms.{arm.name}", arm.changes, reason, remedy)])
            first = first or config
            if data is not None and text != data:
                reason, remedy = "reads other data than the baseline", "give all arms one data.source, tokenizer and val_fraction"
                raise ConfigError([Problem(f"arms.{arm.name}", arm.changes, reason, remedy)])
            data = text


def config_hash(config: Config) -> str:
    """Eight letters of all that decides what a run learns and what of it is measured: what differs in it is another run. Keys that are
    null (off) are left out, so that a later version's new keys do not make other runs of the same experiment."""
    ours = ("model", "training", "seed", "numerics", "evaluation")
    kept = {path: value for path, value in flatten(to_plain(config)).items() if value is not None and effect_of(path).affects in ours}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:8]


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


def _read(path: Path) -> dict[str, Plain]:
    try:
        with path.open("rb") as file:
            plain = parse_yaml(file.read(MAX_BYTES + 1), str(path))
    except IsADirectoryError:
        what = "a run folder, whose report lm report writes" if (path / CONFIG).is_file() else "a folder"
        raise ConfigError(f"{path}: {what}; name an experiment's YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must hold the keys base, arms, seeds, tune, primary")
    if "arms" not in plain and (keys := sorted(plain.keys() & {spec.name for spec in fields(Config)})):
        reason = f"the configuration of one run (it has {', '.join(keys)} and no arms), not an experiment"
        raise ConfigError(f"{path}: {reason}; train it with lm train {path}, or name it as an experiment's base")
    return plain


def _base(path: Path, given: Plain) -> dict[str, Plain]:
    """The base configuration: a file or a list of files beside the experiment's, or a block of keys."""
    if isinstance(given, dict):
        return nested(given)
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError([Problem("base", given, f"must be a configuration file, a list of them, or a block of keys (in {path})")])
    merged: dict[str, Plain] = {}
    for name in names:
        merged = merge(merged, read_yaml(path.parent / name))
    return merged


def _blocks(where: str, given: Plain, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """A map from names to blocks of keys; an empty block may be left out."""
    if not isinstance(given, dict):
        problems.append(Problem(where, given, "must be a map from names to what they change"))
        return {}
    found = {}
    for name, changes in given.items():
        if not all(letter.isalnum() or letter in "-_." for letter in str(name)) or not 0 < len(str(name)) <= 40 or str(name) in _TAKEN:
            problems.append(Problem(f"{where}.{name}", name, f"must be a name of at most 40 {_NAME}, not {', '.join(_TAKEN)}"))
        elif str(name) in found:
            problems.append(Problem(f"{where}.{name}", name, "is there twice"))
        elif isinstance(changes, dict | None):
            found[str(name)] = dict(changes or {})
        else:
            problems.append(Problem(f"{where}.{name}", changes, "must be a block of configuration keys"))
    return found


def _arms(given: Plain, problems: list[Problem]) -> tuple[Arm, ...]:
    found: list[Arm] = []
    for name, changes in _blocks("arms", given, problems).items():
        start = changes.pop("from", None)
        earlier = [arm.name for arm in found]
        if start is not None and start not in earlier:
            problems.append(Problem(f"arms.{name}.from", start, "is no earlier arm", suggest(str(start), earlier)))
        found.append(Arm(name, nested(changes), str(start or "")))
    if len(found) < 2 and not problems:
        problems.append(Problem("arms", [arm.name for arm in found], "needs a baseline and at least one other arm"))
    return tuple(found)
