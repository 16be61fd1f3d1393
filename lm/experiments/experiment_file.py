"""Read an experiment's file, and check it: its arms, what they are compared on, and its tuning table."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd

from lm.config import presets
from lm.config.load import (
    merge,
    merge_bases,
    nest_keys,
    overrides_in,
    read_overrides,
    read_yaml,
)
from lm.config.normalizers import OPTIONS
from lm.config.tree import Config, ExperimentConfig, distinguishes_arms
from lm.data.prepare import vocab_size_of
from lm.errors import ConfigError, DataError, Problem, suggest
from lm.evaluation.metrics import find_metric
from lm.experiments.experiment import Arm, Experiment, Swap, Tune, config_hash
from lm.experiments.judging import PrimaryMetric
from lm.experiments.run_outcome import SELECTION
from lm.model.spec import count_steps
from lm.plain import Plain, flatten, to_plain
from lm.plugins import PLUGINS
from lm.runs.folder import DIVERGED, SWAPPED
from lm.runs.same_run import config_problems
from lm.schema import build, cross_key_problems, key, section
from lm.statistics.tuning import MIN_TUNING_SEEDS

_JUDGED = "the runs that choose a rate must not judge it"
TOKENS_KEY = "trainer.tokens_per_parameter"
# configuration keys that the experiment sets in each run
_EXPERIMENT_KEYS = ("seed", "data.seed", "name")
_EXPERIMENT_KEYS += tuple(f"experiment.{spec.name}" for spec in fields(ExperimentConfig))
_FOLDERS = ("logs", "report", SWAPPED, "workers")  # folders beside those of sizes, which have other names


@dataclass
class _FileKeys:
    """The keys of an experiment's file."""

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
            problems.append(Problem("tune.seeds", shared, "are also final seeds", _JUDGED))
        if self.tune.key in _EXPERIMENT_KEYS or not distinguishes_arms(self.tune.key):
            remedy = "name a key of the optimizer, such as optim.lr"
            problems.append(Problem("tune.key", self.tune.key, "is nothing that training depends on", remedy))
        return problems


@dataclass
class _ArmKeys:
    """The keys of an arm that are no configuration keys, except `from`."""

    swap: Swap | None = section(Swap, "the normalizer that is put into the weights", default=None)
    train: bool = key(True, "whether the arm is trained")
    step: int | None = key(None, "the step of the other arm from which it goes on", ge=1)


def read_experiment(file: Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a YAML file describes.

    overrides: `key=value` texts, which change the base configuration of all arms.

    Raises ConfigError: the file or an arm's configuration is wrong; one message lists the problems.
    Raises DataError: `trainer.tokens_per_parameter` is set, and the size of the vocabulary is not known yet.
    """
    file = presets.find(file, "experiments")
    try:
        experiment = _with_steps(_experiment(file, overrides))
        _check(experiment)
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else ConfigError(f"{file}: {error}") from None
    return experiment


def _experiment(file: Path, overrides: list[str]) -> Experiment:
    """Read the experiment that a file describes, without building the configurations of its arms."""
    problems, plain = list[Problem](), read_yaml(file)
    if "arms" not in plain:
        remedy = f"train it with lm train {file}, or name it as an experiment's base"
        raise ConfigError(f"{file}: no experiment: it has no `arms`; {remedy}")
    keys = build(_FileKeys, plain, "", problems)
    problems += cross_key_problems(keys)
    base = nest_keys(keys.base) if isinstance(keys.base, dict) else {"base": keys.base}
    arm_blocks, size_blocks = (_named_blocks(name, getattr(keys, name) or {}, problems) for name in ("arms", "sizes"))
    arms: dict[str, Arm] = {}
    for name, block in arm_blocks.items():
        arms[name] = _arm(name, block, arms, file, problems)
    sizes = {name: merge_bases(block, file, f"sizes.{name}.base") for name, block in size_blocks.items()}
    if len(arms) < 2 and not problems:
        problems.append(Problem("arms", [*arms], "needs a baseline and at least one other arm"))
    if problems:
        raise ConfigError(problems)
    base, changes, tune = merge_bases(base, file, "base"), read_overrides(overrides), keys.tune
    table = None if tune.table is None else _tuning_table(file.parent / tune.table, keys.primary.metric)
    experiment = Experiment(
        file.stem, merge(base, changes), tuple(arms.values()), sizes or {"": {}}, tuple(keys.seeds), tune,
        keys.primary, file, tuple(overrides), table, nest_keys(keys.evaluate or {}),
    )  # fmt: skip
    blocks = {f"arms.{name}.": block for name, block in arm_blocks.items()}
    blocks |= {f"sizes.{name}.": block for name, block in size_blocks.items()} | {"": changes}
    if problems := [*_ineffective_keys(experiment, blocks)]:
        raise ConfigError(problems)
    return experiment


def _ineffective_keys(experiment: Experiment, blocks: dict[str, dict[str, Plain]]) -> Iterator[Problem]:
    """Yield a problem for each key of an arm, a size or the command line that no run has, as another value wins.

    blocks: the keys of each, by the beginning of their path: `arms.NAME.`, `sizes.NAME.`, or empty for overrides.
    """
    plains = {}
    for size, arm in experiment.size_arms:
        names = (*_EXPERIMENT_KEYS, *(("init_from", "branch_from") if arm.source else ()))
        changes = nest_keys(dict.fromkeys(names, "as the experiment sets it"))
        plains[size, arm.name] = flatten(experiment.plain(size, arm, 0, experiment.any_rate, changes))
    for start, block in blocks.items():
        own = [plain for (size, arm), plain in plains.items() if start in ("", f"arms.{arm}.", f"sizes.{size}.")]
        for path, value in flatten({name: value for name, value in block.items() if name != "base"}).items():
            if value != {} and all(value != plain.get(path, plain.get(f"{path}.name")) for plain in own):
                remedy = "drop it" if start else f"change it in {experiment.file.name}"
                yield Problem(f"{start}{path}", value, "is set by the experiment, so this has no effect", remedy)


def _arm(name: str, block: dict[str, Plain], earlier: dict[str, Arm], file: Path, problems: list[Problem]) -> Arm:
    """Read an arm's block, and take the keys out of it that are no configuration keys; `earlier` are the arms before
    it. Problems with it are added to `problems`. An unknown normalizer or initial value of `swap` is refused where the
    configuration is parsed.
    """
    path, source = f"arms.{name}", block.pop("from", None)
    start = build(_ArmKeys, {key: block.pop(key) for key in ("swap", "train", "step") if key in block}, path, problems)
    changes, swap, source_name = merge_bases(block, file, f"{path}.base"), start.swap, str(source)

    def refuse(key: str, value: Plain, reason: str, remedy: str) -> None:
        problems.append(Problem(f"{path}.{key}", value, reason, remedy))

    if source is not None and source_name not in earlier:
        baseline_words = "the first arm is the baseline, which starts from random weights"
        refuse("from", source, "is no earlier arm", suggest(source_name, earlier) if earlier else baseline_words)
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
        with suppress(KeyError), PLUGINS.trusted():
            init = OPTIONS[swap.to].first_init()
            normalizer |= {"init": init} if init is not None and swap.init in (None, "fit") else {}
        changes = merge(changes, {"model": {"normalizer": normalizer}})
    # its changes are laid over its source's
    if source_name in earlier and (start.step is not None or not start.train):
        changes = merge(merge(earlier[source_name].changes, {} if start.train else {"phases": []}), changes)
    return Arm(name, changes, "" if source is None else source_name, swap, start.train, start.step)


def _named_blocks(key: str, value: dict, problems: list[Problem]) -> dict[str, dict[str, Plain]]:
    """Return the nested keys of each arm or size by its name; an arm or size without keys (null) has {}.

    key: the key in the file, `arms` or `sizes`, whose content is `value`. Problems with it are added to `problems`.
    """
    blocks = {}
    for name, changes in value.items():
        text = "" if isinstance(name, bool | None) else str(name)  # YAML reads on, yes and null as values
        is_name = text[:1].isalnum() and len(text) <= 40 and all(char.isalnum() or char in "-_." for char in text)
        if not is_name or (key == "sizes" and text in _FOLDERS):
            reason = (
                "must be a name of at most 40 letters, digits, '-', '_' and '.', that begins with a letter or digit"
            )
            remedy = f"choose another, not {', '.join(_FOLDERS)}, or put it in quotes"
            problems.append(Problem(f"{key}.{name}", name, reason, remedy))
        elif not isinstance(changes, dict | None):
            problems.append(Problem(f"{key}.{name}", changes, "must be a block of configuration keys"))
        else:
            blocks[text] = nest_keys(changes or {}, path=f"{key}.{name}.")
    return blocks


def _with_steps(experiment: Experiment) -> Experiment:
    """Set `trainer.max_steps` to the baseline's number of steps, in each size for which `trainer.tokens_per_parameter`
    is set. Returns the new experiment. Raises DataError: the size of the vocabulary is not known yet."""
    sizes = dict(experiment.sizes)
    for size, changes in experiment.sizes.items():
        if flatten(merge(experiment.base, changes)).get(TOKENS_KEY) is None:
            continue
        with suppress(ConfigError):  # `_check` reports the error with size and arm
            config = experiment.example_config(size, experiment.arms[0])
            vocab_size, steps = vocab_size_of(config.data), config.trainer.max_steps
            if not (steps or vocab_size):
                reason = "needs the vocabulary, which is not known before the text is there"
                remedy = "lm prepare makes it; or set trainer.max_steps"
                raise DataError(f"{TOKENS_KEY} = {config.trainer.tokens_per_parameter:g}: {reason}: {remedy}")
            steps = steps or count_steps(config, vocab_size)
            sizes[size] = merge(changes, nest_keys({"trainer.max_steps": steps}))
    return replace(experiment, sizes=sizes)


# ---------------------------------------------------------------- checks of the arms' configurations


# Keys of `data` that decide what the token store holds.
_STORE_KEYS = ("source", "tokenizer", "val_fraction", "deduplicate", "on_error")


def _check(experiment: Experiment) -> None:
    """Check the configurations of all arms in all sizes, and the tuning table. Raises ConfigError, which lists all
    problems.
    """
    problems: list[Problem | str] = [] if experiment.table is None else [*_check_table(experiment)]
    try:
        overrides_in("eval", experiment.evaluate_overrides)
    except ConfigError as error:
        problems += [replace(problem, path=f"evaluate.{problem.path}") for problem in error.problems]
    names_by_problem: dict[str, list[str]] = {}
    configs: dict[tuple[str, str], Config] = {}
    for size, arm in experiment.size_arms:
        try:
            config = configs[size, arm.name] = experiment.example_config(size, arm)
            measured_config = experiment.measurement_config(config)
            if not problems:
                _check_metric(experiment, measured_config)
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


def _check_arms(experiment: Experiment, configs: dict[str, Config]) -> Iterator[Problem]:
    """Check that the arms of a size, of these configurations, differ, read the same data, and are measured on the same
    sequences, and that branches fit the arms they continue.
    """
    metric, names = experiment.primary.metric, dict[str, str]()
    baseline = configs[experiment.arms[0].name]
    for arm in experiment.arms:
        config, path = configs[arm.name], f"arms.{arm.name}"
        identity = f"{arm.source} {arm.branch_step} {arm.swap} {arm.trained} {config_hash(config)}"
        if (name := names.setdefault(identity, arm.name)) != arm.name:
            yield Problem(path, arm.changes, f"is the same as {name}", "change it, or drop it")
        if arm.branch_step is not None:
            yield from _check_branch(arm, config, configs[arm.source])
        data = [f"data.{key}" for key in _STORE_KEYS if getattr(baseline.data, key) != getattr(config.data, key)]
        if data:
            remedy = f"give all arms one value of {', '.join(data)}"
            yield Problem(path, arm.changes, "reads other data than the baseline", remedy)
        if _measured_sequences(experiment, config) != _measured_sequences(experiment, baseline):
            reason = f"measures {metric} on other sequences than the baseline"
            remedy = (
                "name a metric that all arms measure alike, such as by_length/loss, or set its options in `evaluate`"
            )
            yield Problem(path, arm.changes, reason, remedy)


def _measured_sequences(experiment: Experiment, config: Config) -> dict[str, Plain]:
    """Return what decides the sequences that the primary metric of a run is measured on."""
    metric, config = experiment.primary.metric, experiment.measurement_config(config)
    return find_metric(config, metric)[0].sequences_of(config, metric)


def _check_branch(arm: Arm, config: Config, source: Config) -> Iterator[Problem]:
    """Check an arm that continues another arm's run (`source`) from a step. The source must keep a checkpoint of this
    step, and steps must remain after it. The two may differ only in settings that may change during a run."""
    interval, steps, step = source.checkpoint_every, source.trainer.max_steps, arm.branch_step
    regular_steps = [step for step in range(1, steps + 1) if step % interval == 0 or step == steps]
    kept_steps = {*regular_steps[-source.trainer.keep_checkpoints :], *source.phase_ends[:-1]}
    if step not in kept_steps:
        reason = f"is no step that {arm.source} keeps a checkpoint of ({', '.join(map(str, sorted(kept_steps)))})"
        remedy = "set trainer.checkpoint_every to a divisor of it, and raise trainer.keep_checkpoints"
        yield Problem(f"arms.{arm.name}.step", step, reason, remedy)
    if config.trainer.max_steps <= step:
        reason = f"leaves no step after step {step} of {arm.source}"
        remedy = "raise it: it counts all steps from the first"
        yield Problem(f"arms.{arm.name}.trainer.max_steps", config.trainer.max_steps, reason, remedy)
    metadata = {"step": step, "phase": source.phase_at(step - 1)}
    for problem in config_problems(config, source, metadata, Path(arm.source), branches=True):
        yield replace(problem, path=f"arms.{arm.name}.{problem.path}")


def _check_metric(experiment: Experiment, config: Config) -> None:
    """Check that a run's evaluations log the primary metric by sequence, and that the other keys of `primary` fit this
    metric. Raises ConfigError.
    """
    primary, problems, metric = experiment.primary, [], find_metric(config, experiment.primary.metric)[1]
    if metric.better not in (primary.better, "none"):
        reason = f"of {metric.name}, {metric.better} is better"
        problems.append(Problem("primary.better", primary.better, reason, f"write {metric.better}"))
    if metric.unit == "fraction" and primary.matters > 1:
        reason = f"{metric.name} lies between 0 and 1"
        problems.append(Problem("primary.matters", primary.matters, reason, "give a fraction, such as 0.25"))
    if problems:
        raise ConfigError(problems)


# ---------------------------------------------------------------- tuning tables


def _tuning_table(path: Path, metric: str) -> pd.DataFrame:
    """Read the tuning runs that a tuning table lists, as `Procedure.tuning_runs` gives them.

    metric: the column of the primary metric, which may be missing.

    Raises ConfigError: the file does not exist, or is no tuning table.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        for name in {SELECTION, metric}:
            texts = table[name] if name in table or name == SELECTION else pd.Series("", table.index)
            table[name] = texts.replace({DIVERGED: "inf", "": "nan"}).map(float)  # exact, unlike pandas' own reading
        table["rate"], table["seed"] = table["rate"].map(float), table["seed"].map(int)
        if not table["rate"].between(0, math.inf, inclusive="neither").all():
            raise ValueError
        return table[[*dict.fromkeys(("size", "arm", "key", "rate", "seed", SELECTION, metric))]]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (tune.table)") from None
    except (KeyError, ValueError, TypeError):
        columns = f"size, arm, key, rate above 0, seed and {SELECTION}, which is a number or `{DIVERGED}`"
        raise ConfigError(
            f"{path}: is no tuning table: it needs columns {columns}, as in tuning.csv, which `lm compare` writes"
        ) from None


def _check_table(experiment: Experiment) -> Iterator[Problem]:
    """Check that a tuning table is of the tuned key, and has ended runs of every tuned arm in every size, at several
    rates with several seeds, which are those of the baseline at shared rates. None of the seeds may be in
    `experiment.seeds`, the seeds of the runs that are judged.
    """
    table, file, baseline = experiment.table, experiment.tune.table, experiment.arms[0].name
    if wrong_keys := {*table["key"]} - {experiment.tune.key}:
        yield Problem("tune.key", experiment.tune.key, f"the table {file} is of {', '.join(sorted(wrong_keys))}")
    if shared_seeds := sorted({*experiment.seeds} & {*table["seed"]}):
        yield Problem("tune.table", shared_seeds, "are final seeds", _JUDGED)
    ended = table.dropna(subset=[experiment.choice_metric]).sort_values("seed")
    seeds = ended.groupby(["size", "arm", "rate"])["seed"].agg(tuple)
    for size, arm in experiment.size_arms:
        own, base = (seeds.get((size, name), pd.Series(dtype=object)) for name in (arm.name, baseline))
        is_complete = len(own) > 1 and all(
            len({*values}) >= MIN_TUNING_SEEDS and base.get(rate, values) == values for rate, values in own.items()
        )
        if arm.is_tuned and not is_complete:
            needed = f"2 rates of {arm.name} with the same seeds as {baseline}, {MIN_TUNING_SEEDS} or more"
            remedy = "make it again by `lm compare` with a grid: it writes tuning.csv"
            yield Problem("tune.table", file, f"has not {needed}{f', in {size}' if size else ''}", remedy)
