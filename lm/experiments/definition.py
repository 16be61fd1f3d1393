"""This module reads and checks the file of an experiment: base configuration, arms, seeds, tuning and primary metric.
`Experiment` gives the configuration of each run."""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from itertools import product
from pathlib import Path
from typing import Literal

import pandas as pd

from lm.config import presets
from lm.config.load import command_overrides, merge, merge_bases, nest_keys, parse_config, read_overrides, read_yaml
from lm.config.normalizers import NORMALIZER_OPTIONS
from lm.config.removed_keys import removed_hashed_defaults
from lm.config.schema import build_block, cross_key_problems, key, section
from lm.config.tree import Config, ExperimentConfig, distinguishes_arms, key_effect
from lm.config.yaml_text import resolve_interpolations, yaml_override
from lm.data.prepare import expected_vocab_size
from lm.errors import ConfigError, DataError, Problem, suggestion_or_all_names
from lm.evaluation.metrics import find_metric
from lm.experiments.judging import PrimaryMetric, Rate, SizeArm, Stage
from lm.experiments.run_outcome import SELECTION_METRIC, DueEvaluations, OptionsByKind, read_tuning_table
from lm.files import expand_home, json_sha256
from lm.model.spec import steps_of_token_budget
from lm.plain import Plain, flatten, to_plain
from lm.plugins import PLUGINS
from lm.runs.evaluations import Metric
from lm.runs.folder import CHECKPOINTS_FOLDER, SWAPPED_FOLDER, checkpoint_path

_KEYS_SET_AFTER_PARSING = "name", "runs", "seed"  # in a copy of the configuration: no other key depends on them
_SEEDS_REMEDY = "the runs that choose a rate must not judge it"
TOKENS_KEY = "trainer.tokens_per_parameter"
SHARED_SETTINGS = ("precision", "compile", "threads")  # keys of `trainer` that all runs of an experiment share
_STORE_KEYS = "source", "tokenizer", "val_fraction", "deduplicate", "on_error"  # keys of `data` that decide the store
# configuration keys that the experiment sets in each run
_KEYS_SET_PER_RUN = ("seed", "data.seed", "name")
_KEYS_SET_PER_RUN += tuple(f"experiment.{spec.name}" for spec in fields(ExperimentConfig))
# folders beside those of sizes, which have other names
_RESERVED_FOLDERS = "logs", "report", SWAPPED_FOLDER, "workers"


@dataclass(frozen=True)
class Swap:
    """Says which normalizer an arm puts into the weights from which it starts, as `lm swap` does."""

    to: str = key("", "the new normalizer; its options are the arm's `model.normalizer`")
    init: str | float | None = key(None, "initial values of its parameters: match, unit or a number; null: its default")


@dataclass(frozen=True)
class Arm:
    """An arm is one of the variants that an experiment compares: the base configuration with some changes."""

    name: str
    config_changes: dict[str, Plain]  # how the arm's configuration differs from the base
    source_arm: str = ""  # the earlier arm whose trained weights this arm starts from; empty: random weights
    swap: Swap | None = None  # replaces the normalizer that the weights were trained with; None: no swap
    is_trained: bool = True  # False: the swapped weights are measured without further training
    # the step of `source` at which the arm branches off, with optimizer state and position in the data, at
    # least 1; None: no branch
    branch_step: int | None = None

    @property
    def is_tuned(self) -> bool:
        """Return whether the arm gets its own learning rate; if not, it has the rate of the arm that it starts from."""
        return self.is_trained and self.branch_step is None


@dataclass
class Tune:
    """Says how each arm's learning rate, or its value of another key, is chosen: from a grid or a table of runs."""

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
        """Return problems of the grid that concern several keys or entries; each value is valid by itself."""
        if not self.grid:
            return []
        problems = []
        if len(set(self.grid)) < max(2, len(self.grid)):
            problems.append(Problem("grid", self.grid, "must be at least 2 different values"))
        if len(set(self.seeds)) < 2:
            problems.append(Problem("seeds", self.seeds, "tuning needs at least 2 seeds"))
        if self.table is not None:
            problems.append(Problem("table", self.table, "the rates would be chosen twice", "give a grid or a table"))
        return problems


@dataclass(frozen=True)
class Experiment:
    """Holds an experiment as its file describes it; the first arm is the baseline of all comparisons."""

    # the file's name without its suffix; names the experiment's folder, which lies in the base configuration's `runs`
    name: str
    base_config: dict[str, Plain]  # plain configuration that all arms share
    arms: tuple[Arm, ...]
    # changes of the configuration by size; an experiment without sizes has one size with an empty name
    sizes: dict[str, dict[str, Plain]]
    seeds: tuple[int, ...]
    tune: Tune
    primary_metric: PrimaryMetric
    # file, overrides: the file that was read, and the `key=value` texts that change its base configuration
    file: Path
    overrides: tuple[str, ...]
    # the runs that the file `tune.table` lists, as `Procedure.tuning_runs` gives them; None without this file
    tuning_table: pd.DataFrame | None = field(default=None, repr=False, compare=False)
    # keys of `eval` for the measurement of finished runs, in addition to the evaluations during training
    evaluation_changes: dict[str, Plain] = field(default_factory=dict)
    # parsed configurations, by the values of all keys except `_KEYS_SET_AFTER_PARSING`
    _configs: dict[str, Config] = field(default_factory=dict, repr=False, compare=False)

    @property
    def command(self) -> str:
        """Return the shell command that trains and judges the experiment, or continues it."""
        return shlex.join(["lm", "compare", str(self.file), *self.overrides])

    @property
    def is_tuned(self) -> bool:
        """Return whether each arm has its own learning rate, from a grid or a table."""
        return bool(self.tune.grid or self.tune.table)

    @property
    def rate_choice_metric(self) -> str:
        """Return the name, in tables, of the metric by which learning rates are chosen."""
        return SELECTION_METRIC if self.tune.metric == SELECTION_METRIC else self.primary_metric.metric

    @property
    def rate_choice_sign(self) -> int:
        """Return -1 if rates are chosen by a metric of which higher values are better, else 1."""
        return -1 if self.tune.metric == "primary" and self.primary_metric.better == "higher" else 1

    def measured_data_text(self, metric: str, part: Literal["selection", "report"]) -> str:
        """Name the data that a metric is measured on: `all questions` if it is a primary metric of questions. Else
        return `selection text`, which chooses rates, or `report text`, which gives results."""
        is_primary = metric == self.primary_metric.metric
        return "all questions" if is_primary and self.declared_metric.units == "questions" else f"{part} text"

    @cached_property
    def declared_metric(self) -> Metric:
        """Return the primary metric as its measurement declares it."""
        return find_metric(self.measurement_config(self.first_config), self.primary_metric.metric)[1]

    @property
    def has_text_data(self) -> bool:
        """Return whether runs are measured on documents of a text, not on sequences of symbols."""
        return not self.first_config.data.symbolic

    @property
    def folder(self) -> Path:
        """Return the experiment's folder, which holds all its runs and results."""
        return expand_home(self.first_config.runs) / self.name

    @property
    def first_config(self) -> Config:
        """Return an example of the baseline's configuration, in the first size, as `example_config` gives it."""
        return self.example_config(next(iter(self.sizes)), self.arms[0])

    @property
    def size_arms(self) -> list[tuple[str, Arm]]:
        """Return all pairs of a size's name and an arm."""
        return [*product(self.sizes, self.arms)]

    @property
    def example_rate(self) -> Rate | None:
        """Return an example of a rate: the first one of the grid or of the table; None without tuning."""
        rates = self.tune.grid if self.tuning_table is None else self.tuning_table["rate"].tolist()
        return next(iter(rates), None)

    def example_config(self, size: str, arm: Arm) -> Config:
        """Return a configuration of an arm for checks and counts before runs are known. The run is named `any` and has
        the first seed and the rate `example_rate`. Raises ConfigError: the configuration is wrong."""
        return self.config(size, arm, self.seeds[0], self.example_rate, {"name": "any"})

    def config_dict(
        self, size: str, arm: Arm, seed: int, rate: Rate | None, changes: Mapping[str, Plain]
    ) -> dict[str, Plain]:
        """Return one run's plain configuration; `rate` is the tuned key's value, and `changes` override the rest."""
        tuned = nest_keys({} if rate is None else {self.tune.key: rate})
        return reduce(merge, (self.base_config, self.sizes[size], arm.config_changes, tuned, {"seed": seed}, changes))

    def config(self, size: str, arm: Arm, seed: int, rate: Rate | None, changes: Mapping[str, Plain]) -> Config:
        """Build the configuration of one run; arguments are as for `config_dict`. Runs that differ only in
        `_KEYS_SET_AFTER_PARSING` share a parsed configuration, also across copies of the experiment. Raises
        ConfigError: the configuration is wrong."""
        plain = resolve_interpolations(self.config_dict(size, arm, seed, rate, changes))
        own_keys = {name: plain[name] for name in _KEYS_SET_AFTER_PARSING if name in plain}
        cache_key = repr({name: value for name, value in plain.items() if name not in own_keys})
        if cache_key not in self._configs:
            with PLUGINS.trust_user_text():  # the user's file names the plugins
                self._configs[cache_key] = parse_config(plain)
        return replace(self._configs[cache_key], **own_keys)

    def run_config(
        self, size: str, arm: Arm, stage: Stage, rate: Rate | None, seed: int, source_config: Config | None
    ) -> Config:
        """Return the configuration of a run, with its name, which ends in a hash, and the weights that it starts from.

        stage: `tune` or `final`, recorded in the block `experiment`; the name does not depend on it.
        source_config: the configuration of the run from whose weights the new run starts; None: random weights."""
        folder, start = self.folder / size, dict[str, str]()
        config = self.config(size, arm, seed, rate, {"runs": str(folder), "name": "run"})
        value = "" if rate is None else f"{rate:g}"
        stem = "-".join(filter(None, (arm.name, value, f"seed{seed}")))
        if source_config and arm.swap and arm.is_trained:
            options, defaults = (to_plain(part) for part in (config.model.normalizer, type(config.model.normalizer)()))
            option_words = [
                f"{key}={value}"
                for key, value in sorted(options.items())
                if key not in ("name", "init") and value != defaults.get(key)
            ]
            words = " ".join([source_config.name, str(arm.swap), *option_words])
            start["init_from"] = str(
                folder / SWAPPED_FOLDER / f"{stem}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
            )
        elif source_config and arm.branch_step:
            start["branch_from"] = str(checkpoint_path(source_config.run_folder / CHECKPOINTS_FOLDER, arm.branch_step))
            start["init_from"] = source_config.init_from
        elif source_config:
            start["init_from"] = str(source_config.run_folder)
        # In the hash, starting weights count by their path below the default folder of runs: an experiment may be
        # moved.
        hashed_start = {
            name: str(Path(Config().runs, self.name) / Path(path).relative_to(self.folder))
            if Path(path).is_relative_to(self.folder)
            else path
            for name, path in start.items()
        }
        digest = config_hash(replace(config, **hashed_start))
        place = ExperimentConfig(self.name, arm.name, size or None, stage, rate)
        return replace(config, **start, name=f"{stem}-{digest}", experiment=place)

    def fill_unset_settings(self, settings: dict[str, Plain]) -> "Experiment":
        """Return the experiment with those of `settings` that are `SHARED_SETTINGS` and that its base does not set."""
        trainer = self.base_config.get("trainer", {})  # sizes and arms may set these keys, too
        names = (name for name in SHARED_SETTINGS if trainer.get(name) in ("auto", None) and name in settings)
        return replace(self, base_config=merge(self.base_config, {"trainer": {name: settings[name] for name in names}}))

    def measurement_config(self, config: Config) -> Config:
        """Return `config`, changed by the file's block `evaluate`. Raises ConfigError: the result is wrong."""
        return parse_config(merge(to_plain(config), self.evaluation_changes)) if self.evaluation_changes else config

    @cached_property
    def required_evaluations(self) -> dict[SizeArm, OptionsByKind]:
        """Return all evaluation options after changes by `evaluate`, by (size, arm) and kind; {} without changes."""
        required = {}
        for size, arm in self.size_arms if self.evaluation_changes else ():
            config = self.measurement_config(self.example_config(size, arm))
            kinds = config.eval.wanted_kinds(config.data)
            required[size, arm.name] = {kind: config.eval.measurement_options(kind) for kind in kinds}
        return required

    def due_evaluations(self, size: str, arm: Arm, config: Config) -> DueEvaluations:
        """Return the evaluations that are due at the end of an arm's run."""
        (_, *wanted_kinds), kinds = config.eval.wanted_kinds(config.data), config.eval.non_null_kind_options
        steps = config.trainer.max_steps
        due_kinds = [kind for kind in wanted_kinds if not arm.is_trained or kinds[kind].is_due(steps, steps)]
        run_eval_options = {kind: config.eval.measurement_options(kind) for kind in ("validation", *kinds)}
        return DueEvaluations(due_kinds, self.required_evaluations.get((size, arm.name), {}), run_eval_options)

    @property
    def evaluation_overrides(self) -> list[str]:
        """Return the keys of `evaluate` as `KEY=VALUE` arguments of `lm eval`."""
        return [yaml_override(name, value) for name, value in self.evaluation_changes.items()]


def config_hash(config: Config) -> str:
    """Hash the keys that decide what a run learns and how it is measured, to eight hexadecimal digits. Null keys don't
    count, so new keys of lm change no hash. `run_config` makes paths of weights relative, so folders may move."""
    text = json.dumps(result_deciding_keys(to_plain(config)), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def result_deciding_keys(config_dict: dict[str, Plain]) -> dict[str, Plain]:
    """Return the dotted keys that decide what a run learns and how it is measured, without null values. Keys removed
    since 0.11.0 are added with their defaults, so that hashes of older runs stay the same."""
    areas = ("model", "training", "seed", "numerics", "evaluation")
    keys = flatten(config_dict).items()
    present = {path: value for path, value in keys if value is not None and key_effect(path).affects in areas}
    return present | dict(removed_hashed_defaults(config_dict))


def present_plan(experiment: Experiment) -> dict[str, dict]:
    """Return the present plan: keys that all verdicts depend on (`shared`), and the configuration of each arm and size
    (`arms`, by SIZE/ARM)."""
    primary, baseline, arms = experiment.primary_metric, experiment.arms[0], {}
    shared = {"seeds": sorted(experiment.seeds), "baseline": baseline.name}
    # only the plan's power depends on `spread`
    shared |= {f"primary.{key}": value for key, value in vars(primary).items() if key != "spread"}
    for size in experiment.sizes:
        measurement = experiment.measurement_config(experiment.config(size, baseline, 0, None, {"name": "any"}))
        options = measurement.eval.measurement_options(find_metric(measurement, primary.metric)[0].kind)
        shared |= {name_with_size(size, f"{primary.metric}: {key}"): value for key, value in options.items()}
    shared |= {f"tune.{key}": value for key, value in vars(experiment.tune).items()}
    if experiment.tuning_table is not None:
        rows = sorted(experiment.tuning_table.to_csv(index=False).splitlines())
        shared["tune.table"] = f"{experiment.tune.table} {json_sha256(rows)[:8]}"
    for size, arm in experiment.size_arms:
        start_keys = {"swap": arm.swap and vars(arm.swap), "train": arm.is_trained, "step": arm.branch_step}
        keys = result_deciding_keys(to_plain(experiment.config(size, arm, 0, None, {"name": "any"})))
        arms[name_with_size(size, arm.name)] = keys | ({"from": arm.source_arm} | start_keys if arm.source_arm else {})
    return {"shared": shared, "arms": arms}


def name_with_size(size: str, name: str) -> str:
    """Return SIZE/NAME, which tells apart things of one name in several sizes; NAME in an experiment without sizes."""
    return f"{size}/{name}" if size else name


# ---------------------------------------------------------------- the file


@dataclass
class _FileKeys:
    """Declares the keys of an experiment's file."""

    base: str | list[str] | dict = key({}, "a configuration file, a list of files, or a block of keys")
    arms: dict = key({}, "by name, what each arm changes")
    sizes: dict | None = key(None, "by name, what each size changes")
    seeds: list[int] = key([1, 2, 3], "seeds of the final runs", ge=0, lt=2**31)
    tune: Tune = section(Tune, "the learning rate of each arm")
    primary: PrimaryMetric = section(PrimaryMetric, "what decides")
    evaluate: dict | None = key(None, "keys of `eval` with which runs are measured after training")

    def problems(self) -> list[Problem]:
        problems = []
        if len(set(self.seeds)) < len(self.seeds) or not self.seeds:
            problems.append(Problem("seeds", self.seeds, "must be different seeds, at least one"))
        if self.tune.grid and (shared := sorted({*self.seeds} & {*self.tune.seeds})):
            problems.append(Problem("tune.seeds", shared, "are also final seeds", _SEEDS_REMEDY))
        if self.tune.key in _KEYS_SET_PER_RUN or not distinguishes_arms(self.tune.key):
            remedy = "name a key of the optimizer, such as optim.lr"
            problems.append(Problem("tune.key", self.tune.key, "is nothing that training depends on", remedy))
        return problems


@dataclass
class _ArmKeys:
    """Declares the keys of an arm in the file, without `from` and the configuration keys that the arm changes."""

    swap: Swap | None = section(Swap, "the normalizer that is put into the weights", default=None)
    train: bool = key(True, "whether the arm is trained")
    step: int | None = key(None, "the step of the other arm from which it goes on", ge=1)


def read_experiments(arguments: list[str]) -> list[Experiment]:
    """Read the experiments whose files `arguments` name, each with the overrides among them. Raises LMError: a file
    can't be read or is wrong."""
    overrides = [*filter(presets.is_override, arguments)]
    files = [text for text in arguments if text not in overrides]
    if not files:
        raise ConfigError("no experiment file given, e.g. configs/experiments/ssmax.yaml")
    return [read_experiment(file, overrides) for file in files]


def read_experiment(file: str | Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a YAML file describes.

    overrides: `key=value` texts, which change the base configuration of all arms.

    Raises ConfigError: the file or an arm's configuration is wrong; one message lists the problems.
    Raises DataError: `trainer.tokens_per_parameter` is set, and the size of the vocabulary is not known yet.
    """
    file = presets.find(file, "experiments")
    try:
        experiment = _set_max_steps(_parse_experiment(file, overrides))
        _check_experiment(experiment)
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else ConfigError(f"{file}: {error}") from None
    return experiment


def _parse_experiment(file: Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a file describes, without building the configurations of its arms."""
    problems, plain = list[Problem](), read_yaml(file)
    if "arms" not in plain:
        remedy = f"train it with lm train {file}, or name it as an experiment's base"
        raise ConfigError(f"{file}: no experiment: it has no `arms`; {remedy}")
    keys = build_block(_FileKeys, plain, "", problems)
    problems += cross_key_problems(keys)
    base = nest_keys(keys.base) if isinstance(keys.base, dict) else {"base": keys.base}
    arm_blocks, size_blocks = (_named_blocks(name, getattr(keys, name) or {}, problems) for name in ("arms", "sizes"))
    arms: dict[str, Arm] = {}
    for name, block in arm_blocks.items():
        arms[name] = _parse_arm(name, block, arms, file, problems)
    sizes = {name: merge_bases(block, file, f"sizes.{name}.base") for name, block in size_blocks.items()}
    if len(arms) < 2 and not problems:
        problems.append(Problem("arms", [*arms], "needs a baseline and at least one other arm"))
    if problems:
        raise ConfigError(problems)
    base, changes, tune = merge_bases(base, file, "base"), read_overrides(overrides), keys.tune
    table = None if tune.table is None else read_tuning_table(file.parent / tune.table, keys.primary.metric)
    experiment = Experiment(
        file.stem, merge(base, changes), tuple(arms.values()), sizes or {"": {}}, tuple(keys.seeds), tune,
        keys.primary, file, tuple(overrides), table, nest_keys(keys.evaluate or {}),
    )  # fmt: skip
    changes_by_path_prefix = {f"arms.{name}.": block for name, block in arm_blocks.items()}
    changes_by_path_prefix |= {f"sizes.{name}.": block for name, block in size_blocks.items()} | {"": changes}
    if problems := [*_ineffective_keys(experiment, changes_by_path_prefix)]:
        raise ConfigError(problems)
    return experiment


def _ineffective_keys(experiment: Experiment, changes_by_path_prefix: dict[str, dict[str, Plain]]) -> Iterator[Problem]:
    """Yield a problem for each key of an arm, a size or the command line that another value replaces in every run.

    changes_by_path_prefix: keys by their path's beginning: `arms.NAME.`, `sizes.NAME.`; empty for the command line.
    """
    plains = {}
    for size, arm in experiment.size_arms:
        names = (*_KEYS_SET_PER_RUN, *(("init_from", "branch_from") if arm.source_arm else ()))
        changes = nest_keys(dict.fromkeys(names, "as the experiment sets it"))
        plains[size, arm.name] = flatten(experiment.config_dict(size, arm, 0, experiment.example_rate, changes))
    for prefix, block in changes_by_path_prefix.items():
        own = [plain for (size, arm), plain in plains.items() if prefix in ("", f"arms.{arm}.", f"sizes.{size}.")]
        for path, value in flatten({name: value for name, value in block.items() if name != "base"}).items():
            if value != {} and all(value != plain.get(path, plain.get(f"{path}.name")) for plain in own):
                remedy = "drop it" if prefix else f"change it in {experiment.file.name}"
                yield Problem(f"{prefix}{path}", value, "is set by the experiment, so this has no effect", remedy)


def _parse_arm(name: str, block: dict[str, Plain], arms: dict[str, Arm], file: Path, problems: list[Problem]) -> Arm:
    """Read an arm's block, and take the keys of `_ArmKeys` and `from` out of it. `arms` are the arms before it.
    Problems are added to `problems`; problems inside `swap` are found later, when the configuration is parsed."""
    path, source = f"arms.{name}", block.pop("from", None)
    start = build_block(
        _ArmKeys, {key: block.pop(key) for key in ("swap", "train", "step") if key in block}, path, problems
    )
    changes, swap, source_name = merge_bases(block, file, f"{path}.base"), start.swap, str(source)

    def refuse(key: str, value: Plain, reason: str, remedy: str) -> None:
        problems.append(Problem(f"{path}.{key}", value, reason, remedy))

    if source is not None and source_name not in arms:
        baseline_words = "the first arm is the baseline, which starts from random weights"
        remedy = suggestion_or_all_names(source_name, arms) if arms else baseline_words
        refuse("from", source, "is no earlier arm", remedy)
    if source is None and swap:
        refuse("swap", to_plain(swap), "there are no weights to swap", "say of which arm: `from`")
    if start.step is not None and (source is None or swap or not start.train):
        remedy = "name the arm: `from`, and drop `swap` and `train`"
        refuse("step", start.step, "goes on with the optimizer state of another arm", remedy)
    if not start.train and not swap:
        refuse("train", False, "would be the arm it starts from", "give a `swap`, or train it")
    for key_path, value in flatten(block).items() if block and not start.train else ():
        if not key_path.startswith("model.normalizer"):
            refuse(key_path, value, "has no effect on an arm that is not trained", "drop it, or train the arm")
    if (tokens := flatten(changes).get(TOKENS_KEY)) is not None:
        refuse(TOKENS_KEY, tokens, "the arms of a size train equally long", "give it in base or sizes")
    if swap:
        normalizer = {"name": swap.to} | ({} if swap.init is None else {"init": swap.init})
        with suppress(KeyError), PLUGINS.trust_user_text():
            init = getattr(NORMALIZER_OPTIONS[swap.to], "init", None)
            normalizer |= {"init": init} if init is not None and swap.init is None else {}
        changes = merge(changes, {"model": {"normalizer": normalizer}})
    # its changes are laid over its source's
    if source_name in arms and (start.step is not None or not start.train):
        changes = merge(merge(arms[source_name].config_changes, {} if start.train else {"phases": []}), changes)
    return Arm(name, changes, "" if source is None else source_name, swap, start.train, start.step)


def _named_blocks(key: str, value: dict, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """Return the nested keys of each arm or size by its name; an arm or size without keys (null) has {}.

    key: the key in the file, `arms` or `sizes`, whose content is `value`. Problems with it are added to `problems`.
    """
    blocks = {}
    for name, changes in value.items():
        text = "" if isinstance(name, bool | None) else str(name)  # YAML reads on, yes and null as values
        is_name = text[:1].isalnum() and len(text) <= 40 and all(char.isalnum() or char in "-_." for char in text)
        if not is_name or (key == "sizes" and text in _RESERVED_FOLDERS):
            reason = "must be a name of at most 40 letters, digits, '-', '_' and '.', which begins with no sign"
            remedy = f"choose another, not {', '.join(_RESERVED_FOLDERS)}, or put it in quotes"
            problems.append(Problem(f"{key}.{name}", name, reason, remedy))
        elif not isinstance(changes, dict | None):
            problems.append(Problem(f"{key}.{name}", changes, "must be a block of configuration keys"))
        else:
            blocks[text] = nest_keys(changes or {})
    return blocks


def _set_max_steps(experiment: Experiment) -> Experiment:
    """Set `trainer.max_steps` to the baseline's number of steps, in each size for which `trainer.tokens_per_parameter`
    is set. Returns the new experiment. Raises DataError: the size of the vocabulary is not known yet."""
    sizes = dict(experiment.sizes)
    for size, changes in experiment.sizes.items():
        if flatten(merge(experiment.base_config, changes)).get(TOKENS_KEY) is None:
            continue
        with suppress(ConfigError):  # `_check_experiment` reports the error with size and arm
            config = experiment.example_config(size, experiment.arms[0])
            vocab_size, steps = expected_vocab_size(config.data), config.trainer.max_steps
            if not (steps or vocab_size):
                reason = "needs the vocabulary, which is not known before the text is there"
                remedy = "lm prepare makes it; or set trainer.max_steps"
                raise DataError(f"{TOKENS_KEY} = {config.trainer.tokens_per_parameter:g}: {reason}: {remedy}")
            steps = steps or steps_of_token_budget(config, vocab_size)
            sizes[size] = merge(changes, nest_keys({"trainer.max_steps": steps}))
    return replace(experiment, sizes=sizes)


def _check_experiment(experiment: Experiment) -> None:
    """Check the configurations of all arms in all sizes, and the tuning table. Raises ConfigError with all problems."""
    problems: list[Problem | str] = [] if experiment.tuning_table is None else [*_check_tuning_table(experiment)]
    primary = experiment.primary_metric
    try:
        command_overrides("eval", experiment.evaluation_overrides)
    except ConfigError as error:
        problems += [replace(problem, key_path=f"evaluate.{problem.key_path}") for problem in error.problems]
    names_by_problem: dict[str, list[str]] = {}
    configs: dict[SizeArm, Config] = {}
    for size, arm in experiment.size_arms:
        try:
            config = configs[size, arm.name] = experiment.example_config(size, arm)
            metric = find_metric(experiment.measurement_config(config), primary.metric)[1]
            if metric.better not in (primary.better, "none"):
                reason = f"of {metric.name}, {metric.better} is better"
                raise ConfigError([Problem("primary.better", primary.better, reason, f"write {metric.better}")])
            if metric.unit == "fraction" and primary.matters > 1:
                reason, remedy = f"{metric.name} lies between 0 and 1", "give a fraction, such as 0.25"
                raise ConfigError([Problem("primary.matters", primary.matters, reason, remedy)])
        except ConfigError as error:
            name = ", ".join([f"arm {arm.name}", *([f"size {size}"] if size else [])])
            for problem in error.problems or [str(error)]:
                names_by_problem.setdefault(str(problem), []).append(name)
    for text, names in names_by_problem.items():
        is_general = len(names) == len(experiment.size_arms)
        problems.append(text if is_general else f"{'; '.join(names)}: {text}")
    for size in experiment.sizes if not problems else ():
        problems += _check_arms(experiment, {arm.name: configs[size, arm.name] for arm in experiment.arms})
    if problems:
        raise ConfigError(list(dict.fromkeys(map(str, problems))))


def _check_arms(experiment: Experiment, config_by_arm: dict[str, Config]) -> Iterator[Problem]:
    """Check that the arms of a size differ, read the same data and are measured on the same sequences. An arm that
    starts from a checkpoint of its source, at `branch_step`, needs one that the source keeps."""
    metric, names = experiment.primary_metric.metric, dict[str, str]()
    baseline_sequences = _measured_sequence_options(experiment, config_by_arm[experiment.arms[0].name])
    for arm in experiment.arms:
        config, path = config_by_arm[arm.name], f"arms.{arm.name}"
        identity = f"{arm.source_arm} {arm.branch_step} {arm.swap} {arm.is_trained} {config_hash(config)}"
        if (name := names.setdefault(identity, arm.name)) != arm.name:
            yield Problem(path, arm.config_changes, f"is the same as {name}", "change it, or drop it")
        if arm.branch_step and arm.branch_step not in (kept := _kept_checkpoint_steps(config_by_arm[arm.source_arm])):
            reason = f"is no step that {arm.source_arm} keeps a checkpoint of ({', '.join(map(str, kept))})"
            remedy = "set trainer.checkpoint_every to a divisor of it, and raise trainer.keep_checkpoints"
            yield Problem(f"{path}.step", arm.branch_step, reason, remedy)
        sequences = _measured_sequence_options(experiment, config)
        if other := [key for key, value in sequences.items() if value != baseline_sequences.get(key)]:
            reason = f"measures {metric} on other sequences than the baseline ({', '.join(other)})"
            remedy = (
                "name a metric that all arms measure alike, such as by_length/loss, or set its options in `evaluate`"
            )
            yield Problem(path, arm.config_changes, reason, remedy)


def _measured_sequence_options(experiment: Experiment, config: Config) -> dict[str, Plain]:
    """Return the options, those of the token store included, that decide the sequences of a run's primary metric."""
    metric, config = experiment.primary_metric.metric, experiment.measurement_config(config)
    store = {f"data.{name}": getattr(config.data, name) for name in _STORE_KEYS}
    return store | find_metric(config, metric)[0].sequence_options(config, metric)


def _kept_checkpoint_steps(config: Config) -> list[int]:
    """Return the steps whose checkpoints a run keeps."""
    last = config.trainer.max_steps
    regular = [step for step in range(1, last + 1) if step % config.checkpoint_every == 0 or step == last]
    return sorted({*regular[-config.trainer.keep_checkpoints :], *config.phase_ends[:-1]})


def _check_tuning_table(experiment: Experiment) -> Iterator[Problem]:
    """Check that a tuning table is of the tuned key and has no seed of the final runs. In every size each tuned arm
    must have ended runs in it. At a rate that the baseline has, too, both must have runs of the same seeds."""
    table, file = experiment.tuning_table, experiment.tune.table
    if wrong_keys := {*table["key"]} - {experiment.tune.key}:
        yield Problem("tune.key", experiment.tune.key, f"the table {file} is of {', '.join(sorted(wrong_keys))}")
    if shared_seeds := sorted({*experiment.seeds} & {*table["seed"]}):
        yield Problem("tune.table", shared_seeds, "are final seeds", _SEEDS_REMEDY)
    ended, baseline = table.dropna(subset=[experiment.rate_choice_metric]), experiment.arms[0].name
    seeds = ended.groupby(["size", "arm", "rate"])["seed"].agg(frozenset)
    for size, arm in experiment.size_arms:
        own, base = (seeds.get((size, name), pd.Series(dtype=object)) for name in (arm.name, baseline))
        has_all_evaluations = len(own) and all(base.get(rate, of_rate) == of_rate for rate, of_rate in own.items())
        if arm.is_tuned and not has_all_evaluations:
            needed = f"runs of {arm.name} with the seeds that {baseline} has"
            remedy = "make it again by `lm compare` with a grid: it writes tuning.csv"
            yield Problem("tune.table", file, f"has not {needed}{f', in {size}' if size else ''}", remedy)
