"""Reading the file of an experiment."""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lm.config import presets
from lm.config.effects import is_learned
from lm.config.load import merge, read_overrides, read_yaml
from lm.config.tree import Config, ExperimentConfig
from lm.config.yaml_text import MAX_BYTES, parse_yaml
from lm.data.prepare import vocabulary
from lm.errors import ConfigError, DataError, Problem
from lm.experiments.arms import nested, read_arms, read_blocks
from lm.experiments.checking import check
from lm.experiments.experiment import Experiment, Primary, Tune
from lm.experiments.tuning_tables import read_table
from lm.runs.folder import CONFIG
from lm.schema import Plain, build, flatten, key, own_problems, section, suggest


@dataclass
class _File:
    """The keys of an experiment file but for `base`, `arms`, `sizes` and `evaluate`, which hold keys of configurations."""

    seeds: list[int] = key([1, 2, 3], "seeds of the final runs", ge=0, lt=2**31)
    more_seeds: list[int] = key([], "seeds of a second look, trained if the first leaves a comparison undecided", ge=0, lt=2**31)
    tune: Tune = section(Tune, "the learning rate of each arm")
    primary: Primary = section(Primary, "what decides")


TOKENS = "trainer.tokens_per_parameter"
_KEYS = ("base", "arms", "sizes", *(spec.name for spec in fields(_File)), "evaluate")


def read_experiment(file: Path, overrides: list[str]) -> Experiment:
    """The experiment of a YAML file; `key=value` texts change the base configuration of all arms.

    Raises:
        ConfigError: everything that is wrong with it, in one message, also with the configuration of any arm.
    """
    file = presets.find(file, "experiments")
    try:
        found = _with_steps(_experiment(file, overrides))
        check(found)
    except ConfigError as error:
        raise error if str(error).startswith(f"{file}: ") else ConfigError(f"{file}: {error}") from None
    return found


def _experiment(file: Path, overrides: list[str]) -> Experiment:
    """What the file says, its arms' configurations not yet made."""
    plain = _read(file)
    problems: list[Problem] = []
    arms = read_arms(plain.pop("arms", None), problems)
    sizes = {name: nested(changes) for name, changes in read_blocks("sizes", plain.pop("sizes", None) or {}, problems).items()}
    base, evaluate = _base(file, plain.pop("base", None)), plain.pop("evaluate", None) or {}
    if not isinstance(evaluate, dict):
        problems.append(Problem("evaluate", evaluate, "must be a block of configuration keys"))
        evaluate = {}
    for name in sorted(plain.keys() - _KEYS, key=str):
        problems.append(Problem(str(name), plain.pop(name), "unknown key", suggest(str(name), _KEYS)))
    made = build(_File, plain, "", problems)
    problems += own_problems(made)
    if len(set(made.seeds)) < len(made.seeds) or not made.seeds:
        problems.append(Problem("seeds", made.seeds, "must be different seeds, at least one"))
    if len({*made.seeds, *made.more_seeds}) < len({*made.seeds}) + len(made.more_seeds):
        problems.append(Problem("more_seeds", made.more_seeds, "must be different seeds, and none of `seeds`"))
    if made.more_seeds and (made.tune.grid or made.tune.table) and any(arm.start for arm in arms):
        reason = "a second look may choose another rate for the arms that others start from"
        problems.append(Problem("more_seeds", made.more_seeds, reason, "give all seeds in `seeds`, or tune nothing"))
    if made.tune.grid and (both := sorted({*made.seeds, *made.more_seeds} & {*made.tune.seeds})):
        problems.append(Problem("tune.seeds", both, "are also final seeds", "the runs that choose a rate must not judge it"))
    fixed = {"seed", "name", "runs", "resume", "init_from", *(f"experiment.{spec.name}" for spec in fields(ExperimentConfig))}
    if made.tune.key in fixed:
        problems.append(Problem("tune.key", made.tune.key, "is set by the experiment", "name a key of the optimizer, such as optim.lr"))
    elif not is_learned(made.tune.key):
        reason = "is nothing that training depends on"
        problems.append(Problem("tune.key", made.tune.key, reason, "name a key of the optimizer, such as optim.lr"))
    fixed |= {made.tune.key} if made.tune.grid or made.tune.table else set()
    blocks = {f"arms.{arm.name}": arm.changes for arm in arms} | {f"sizes.{name}": changes for name, changes in sizes.items()}
    for where, changes in blocks.items():
        for path in sorted(fixed & set(flatten(changes))):
            problems.append(Problem(f"{where}.{path}", flatten(changes)[path], "is set by the experiment", "drop it"))
    arms = tuple(replace(arm, changes=_with_files(file, f"arms.{arm.name}", arm.changes)) for arm in arms)
    sizes = {name: _with_files(file, f"sizes.{name}", changes) for name, changes in sizes.items()}
    for arm in arms:
        if (given := flatten(arm.changes).get(TOKENS)) is not None:
            problems.append(
                Problem(f"arms.{arm.name}.{TOKENS}", given, "the arms of a size train equally long", "give it in base or sizes")
            )
    if problems:
        raise ConfigError(problems)
    base = merge(base, read_overrides(overrides))
    sizes, seeds = sizes or {"": {}}, tuple(made.seeds)
    table = read_table(file.parent / made.tune.table, made.primary.quantity) if made.tune.table else ()
    return Experiment(
        file.stem,
        base,
        arms,
        sizes,
        seeds,
        made.tune,
        made.primary,
        file,
        tuple(overrides),
        table,
        nested(evaluate),
        more_seeds=tuple(made.more_seeds),
    )


def _with_steps(experiment: Experiment) -> Experiment:
    """The experiment with the steps of each size that gives tokens by the number of parameters: those of the baseline, for all arms."""
    sizes = dict(experiment.sizes)
    for size, changes in experiment.sizes.items():
        given = flatten(merge(experiment.base, changes)).get(TOKENS) is not None
        for arm in reversed(experiment.arms) if given else ():  # the baseline last; the others only if it is wrong, or has steps of its own
            with suppress(ConfigError):  # which `check` says, with its place
                config = experiment.config(size, arm, experiment.seeds[0], experiment.first_rate, {"name": "any"})
                if config.trainer.max_steps is None:
                    sizes[size] = merge(changes, nested({"trainer.max_steps": _steps(config)}))
    return replace(experiment, sizes=sizes)


def _steps(config: Config) -> int:
    """Steps of a run whose tokens are given by the number of parameters. Raises DataError if the vocabulary is not known yet."""
    from lm.model.counts import steps_of  # torch takes seconds to import

    if size := vocabulary(config.data):
        return steps_of(config, size)
    reason = "needs the vocabulary, which is not known before the text is there"
    raise DataError(f"{TOKENS} = {config.trainer.tokens_per_parameter:g}: {reason}: lm prepare makes it; or set trainer.max_steps")


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
    """The base configuration: a file or a list of files beside the experiment's, or a block of keys, which may have a `base` of its own."""
    if isinstance(given, dict):
        return _with_files(path, "base", nested(given))
    return _files(path, "base", given, ", a list of them, or a block of keys")


def _with_files(path: Path, where: str, changes: dict[str, Plain]) -> dict[str, Plain]:
    """The keys of a block, laid on the configuration files that its `base` names. Of an arm or a size its own keys alone were checked: a
    file may hold what the experiment sets, such as a learning rate."""
    own = {name: value for name, value in changes.items() if name != "base"}
    return merge(_files(path, f"{where}.base", changes["base"], " or a list of them"), own) if "base" in changes else own


def _files(path: Path, where: str, given: Plain, forms: str) -> dict[str, Plain]:
    """Configuration files by their paths relative to the experiment's, the later over the earlier."""
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError([Problem(where, given, f"must be a configuration file{forms}")])
    merged: dict[str, Plain] = {}
    for name in names:
        merged = merge(merged, read_yaml(path.parent / name))
    return merged
