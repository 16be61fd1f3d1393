"""Reads configurations from YAML files and overrides, checks them, and writes them as YAML.

`load_config` merges files (each may inherit with `base:`) and `key=value` overrides. `parse_config` raises one
`ConfigError` with every problem of single keys, or if there are none, with every contradiction between keys.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from lm.attention.options import Options
from lm.config import presets
from lm.config.normalizers import NORMALIZER_OPTIONS, LayerList
from lm.config.schema import build_block, build_named_block, cross_key_problems, effect_at, fields_along_path
from lm.config.tree import Config
from lm.config.yaml_text import MAX_BYTES, dump_yaml, parse_yaml, resolve_interpolations
from lm.errors import ConfigError, Problem, abbreviate, one_line, value_text
from lm.plain import Plain, flatten, is_config_block, to_plain
from lm.plugins import PLUGINS


def config_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each missing value of a configuration, and for each contradiction between keys that are valid
    by themselves.

    If keys of one block contradict each other, only such problems are reported: all further rules assume consistent
    blocks.
    """
    data, model, trainer = config.data, config.model, config.trainer
    if block_problems := cross_key_problems(config):
        yield from block_problems
        return
    if not re.fullmatch(r"(?!\.\.?$)[^/]{1,100}", config.name) or not config.name.isprintable():
        reason = "must be the name of a folder: printable, at most 100 characters, without a path"
        yield Problem("name", config.name, reason, "set name, and runs for the folder that holds it")
    if non_divisors := [length for length in data.lengths.weights if length < 2 or data.seq_len % length]:
        reason = f"does not divide data.seq_len = {data.seq_len} into sequences of 2 tokens or more"
        yield Problem("data.lengths.weights", non_divisors[0], reason, "give divisors of data.seq_len")
    yield from phase_problems(config)
    yield from task_problems(config)
    yield from _batch_problems(config)
    if trainer.max_steps is None and trainer.tokens_per_parameter is None:
        yield Problem("trainer.max_steps", None, "is not given", "set it, or trainer.tokens_per_parameter")
    if trainer.max_steps and trainer.tokens_per_parameter:
        reason = f"trainer.max_steps = {trainer.max_steps} is given, too"
        yield Problem("trainer.tokens_per_parameter", trainer.tokens_per_parameter, reason, "drop one")
    if trainer.max_steps:
        yield from empty_phase_problems(config)
    normalizers = [phase.normalizer for phase in config.phases_or_default]
    for kind, options in config.eval.non_null_kind_options.items():
        conflicts = []
        # checked even if the evaluation is off, as other values are
        for index, setting in enumerate(getattr(options, "inference", [])):
            conflicts += setting.changed_normalizers(normalizers, f"inference[{index}]")[1]
        conflicts += options.conflicts(data, model) if options.is_wanted(data) else ()
        yield from (
            replace(conflict, key_path=f"eval.{kind}.{conflict.key_path}".replace("tasks.tasks", "tasks"))
            for conflict in conflicts
        )


def _batch_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if the tokens of a step don't make whole sequences, or if processes and micro-batches can't share
    these equally.
    """
    data, optim, trainer = config.data, config.optim, config.trainer
    min_batch, sequences = data.seq_len * config.world_size, optim.batch_tokens // data.seq_len
    batch_floor = optim.batch_tokens // min_batch * min_batch
    batch_sizes = " or ".join(str(size) for size in (batch_floor, batch_floor + min_batch) if size)
    if optim.batch_tokens % data.seq_len:
        reason = f"is not a multiple of data.seq_len x devices x num_nodes = {min_batch}"
        yield Problem("optim.batch_tokens", optim.batch_tokens, reason, f"set it to {batch_sizes}")
    elif sequences % config.world_size:
        reason = f"{config.world_size} processes can't share the {sequences} sequences of a step (optim.batch_tokens)"
        remedy = f"set it to a divisor of {sequences}, or optim.batch_tokens to {batch_sizes}"
        yield Problem("trainer.devices", trainer.devices, reason, remedy)
    elif trainer.micro_batch and config.sequences_per_rank % trainer.micro_batch:
        reason = f"does not divide the {config.sequences_per_rank} sequences of a process in a step"
        yield Problem("trainer.micro_batch", trainer.micro_batch, reason, "give a divisor")


def empty_phase_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each phase of training that has no step."""
    for index, (start, end) in enumerate(pairwise([0, *config.phase_ends])):
        if end <= start:
            path, steps = f"phases[{index}].until", config.trainer.max_steps
            reason = f"leaves the phase no step after step {start} of trainer.max_steps = {steps}"
            yield Problem(path, config.phases_or_default[index].until, reason, "raise it, or train for more steps")


def phase_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each contradiction between a phase of training and other keys."""
    phases = config.phases
    if not phases:
        return
    if phases[-1].until != 1:
        path = f"phases[{len(phases) - 1}].until"
        yield Problem(path, phases[-1].until, "the last phase must end at 1", "set it to 1")
    if phases[0].seq_len:
        yield Problem("phases[0].seq_len", phases[0].seq_len, "is data.seq_len in the first phase", "set data.seq_len")
    if any(phase.seq_len for phase in phases) and config.data.lengths.weights:
        reason = "draws the length of each step, and phases change it, too"
        yield Problem("data.lengths", config.data.lengths.name, reason, "drop it, or phases[].seq_len")
    for index, phase in enumerate(phases):
        model, phase_config = config.model_in_phase(index), config.with_phase_seq_len(index)
        for problem in _batch_problems(phase_config) if phase.seq_len and index else ():
            yield replace(problem, reason=f"{problem.reason}, in phases[{index}]")
        if phase.position and (model.position.has_length_limit or config.model.position.has_length_limit):
            reason = "learned positions are weights, which phases can't change"
            yield Problem(f"phases[{index}].position", phase.position.name, reason, "set it to rope or none")
        elif model.position.has_length_limit and phase_config.data.seq_len > config.data.seq_len:
            reason = f"learned positions end at data.seq_len = {config.data.seq_len}"
            yield Problem(f"phases[{index}].seq_len", phase.seq_len, reason, "set model.position=rope")
        elif phase.position:
            yield from (
                replace(problem, key_path=problem.key_path.replace("position", f"phases[{index}].position", 1))
                for problem in model.problems()
                if problem.key_path.startswith("position")
            )
    if config.model.normalizer != phases[0].normalizer:
        reason = f"phases[0].normalizer is {phases[0].normalizer.name}, which training starts with"
        remedy = "drop model.normalizer, or make them agree"
        yield Problem("model.normalizer", config.model.normalizer.name, reason, remedy)


def task_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each contradiction between the synthetic tasks, their weights and the number of test
    sequences.
    """
    data, n_sequences = config.data, config.eval.sequences
    for weighted in data.tasks if data.symbolic else ():
        n_distinct = weighted.task.n_distinct_sequences(data.seq_len, "test")
        if weighted.weight * n_sequences > max(1, n_distinct):
            name = f"{weighted.task.name} has about {n_distinct:,.0f} test sequences of {data.seq_len} tokens"
            remedy = "lower it, or give the task more symbols or length"
            yield Problem("eval.sequences", n_sequences, f"can't all differ: {name}", remedy)
    weights = sum(weighted.weight for weighted in data.tasks)
    if weights > 1 + 1e-6:
        yield Problem("data.tasks", weights, "weights sum to more than 1", "lower them")
    if any(weighted.task.vocab_size for weighted in data.tasks) and (not data.symbolic or weights < 1 - 1e-6):
        names = ", ".join(weighted.task.name for weighted in data.tasks if weighted.task.vocab_size)
        reason = "use a vocabulary of symbols, which text and tasks in text don't have"
        yield Problem("data.tasks", names, reason, "give such tasks alone weights that sum to 1")


# ---------------------------------------------------------------- loading


# Keys of one block that exclude each other: if `changes` has the first and not the second, `merge` drops the second
# from `base`.
KEY_EXCLUSIONS = {
    "trainer.max_steps": "tokens_per_parameter",
    "trainer.tokens_per_parameter": "max_steps",
    "init_from": "branch_from",  # not the other way: a branch keeps the `init_from` of the run that it branches from
}


def load_config(arguments: list[str]) -> Config:
    """Read the user's configuration from YAML files and `key=value` overrides, and import the plugins that it names.
    Later arguments win.

    Raises ConfigError: an argument can't be read, or the configuration has problems, listed in one message.
    """
    if not arguments:
        raise ConfigError("no configuration given: name a YAML file, e.g. configs/softmax.yaml")
    tree: dict[str, Plain] = {}
    files = [argument for argument in arguments if not presets.is_override(argument)]
    for file in files:
        path = presets.find(file)
        plain = read_yaml(path if path.exists() else presets.find(file, "experiments"))
        if "arms" in plain:
            raise ConfigError(
                f"{file}: an experiment, not the configuration of one run; it is for lm compare {file} [--plan]"
            )
        tree = merge(tree, plain)
    tree = merge(tree, read_overrides([argument for argument in arguments if argument not in files]))
    if tree.get("name") in (None, ""):  # 0 and false stay, for `parse_config` to refuse them as names
        tree["name"] = Path(files[0]).stem if files else "run"
    with PLUGINS.trust_user_text():
        return parse_config(resolve_interpolations(tree))


def load_normalizer(name: str, overrides: list[str]) -> Options:
    """Return the options of the normalizer `name`, with `option=value` texts applied; if it is a plugin, import it.

    Raises ConfigError: the normalizer is unknown, or has no such option or value.
    """
    with PLUGINS.trust_user_text():
        return build_named_block(NORMALIZER_OPTIONS, {"name": name, **read_overrides(overrides)}, "model.normalizer")


def parse_config(config_dict: dict[str, Plain]) -> Config:
    """Build and check a configuration from plain data; interpolations `${...}` are not resolved.

    Raises ConfigError: one message lists all problems of single keys, or if there are none, all contradictions between
    keys. Beside a refused value contradictions are not looked for, since the key's default takes its place.
    """
    problems: list[Problem] = []
    config = build_block(Config, config_dict, "", problems)
    if config.trainer.tokens_per_parameter and "max_steps" not in config_dict["trainer"]:
        config.trainer.max_steps = None  # not the default, beside tokens_per_parameter
    model = config_dict.get("model") if config.phases else None
    normalizer = config.model.normalizer
    if config.phases and not (isinstance(model, dict) and "normalizer" in model):
        normalizer = config.model.normalizer = config.phases[0].normalizer or normalizer
    for phase in config.phases:
        phase.normalizer = normalizer = phase.normalizer or normalizer
    if problems := problems or [*config_problems(config)]:
        raise ConfigError(problems)
    return config


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML text, from which `parse_yaml` and `parse_config` read an equal configuration."""
    return dump_yaml(to_plain(config))


def read_yaml(path: Path, inheriting_files: tuple[Path, ...] = ()) -> dict[str, Plain]:
    """Read the keys of a file, merged over the keys of the files that the key `base` in it names. The paths in `base`
    are relative to the file's folder, or are names of presets.

    inheriting_files: the chain of files whose keys `base` led to this file, outermost first; a file in its own chain is
    an error.

    Raises ConfigError: a file can't be read or is not a configuration; the message names the file.
    """
    try:
        resolved_path = path.resolve()
        if resolved_path in inheriting_files:
            raise ConfigError(f"{path}: inherits from itself through `base:`")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        remark = "" if path.suffix in (".yaml", ".yml") else " (overrides are key=value, without spaces)"
        remark = f" (a base of {inheriting_files[-1].name})" if inheriting_files else remark
        raise ConfigError(f"{path}: no such configuration file{remark}{presets.suggestion(path)}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ConfigError(f"{abbreviate(str(path))}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    plain = parse_yaml(content, str(path)) or {}
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must hold keys and values, not {abbreviate(value_text(plain), 40)}")
    if "arms" in plain:
        if inheriting_files:
            raise ConfigError(
                f"{path}: an experiment, not a configuration that {inheriting_files[-1].name} can have as its base"
            )
        return plain  # its base may be a block, which is no base of a configuration; callers refuse its arms
    return merge_bases(nest_keys(plain), path, "base", (*inheriting_files, resolved_path))


def merge_bases(
    plain_block: dict[str, Plain], path: Path, base_key_path: str = "base", inheriting_files: tuple[Path, ...] = ()
) -> dict[str, Plain]:
    """Return the keys of a block, merged over the keys of the files that the block's own key `base` lists. Later files
    win.

    Each file is named by its path, relative to the folder of `path`, or is a preset.

    Args:
        path: the file that contains the block.
        base_key_path: the path of the key `base` within that file, for errors.
        inheriting_files: the files that lead to this block by their `base`; if one comes again, it is a circle.

    Raises ConfigError: `base` is not a file or a list of files, or one of them can't be read or is not a configuration.
    """
    bases = plain_block.get("base", [])
    names = bases if isinstance(bases, list) else [bases]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: {Problem(base_key_path, bases, 'must be a file or a list of files')}")
    tree: dict[str, Plain] = {}
    for name in names:
        tree = merge(tree, read_yaml(presets.find(name, base_folder=path.parent), inheriting_files))
    return merge(tree, {name: value for name, value in plain_block.items() if name != "base"})


def read_overrides(overrides: list[str]) -> dict[str, Plain]:
    """Parse `key.path=value` texts into nested plain data. Raises ConfigError: a text has another form, or its value is
    not valid YAML.
    """
    blocks: list[dict[str, Plain]] = []
    for override in overrides:
        (path, sign, text), short_override = override.partition("="), abbreviate(override, 80)
        if not sign or not all(path.split(".")):
            raise ConfigError(f"{short_override}: not an override; write key=value, e.g. optim.lr=3e-4")
        # of other types, an empty value is null
        is_empty = not text and (specs := fields_along_path(Config, path)) and specs[-1].type is str
        if re.search(r"^[^'\"]* #", text):
            raise ConfigError(f"{short_override}: ' #' begins a comment in YAML; quote the value, {path}='\"...\"'")
        blocks.append({path: "" if is_empty else parse_yaml(text, short_override)})
    return nest_keys(*blocks)


def nest_keys(*blocks: Mapping[str, Plain]) -> dict[str, Plain]:
    """Turn dotted keys into nested blocks, such as {"optim.lr": 1} into {"optim": {"lr": 1}}, and merge these. Later
    blocks win.

    Raises ConfigError: a block gives one key twice, nested and dotted.
    """
    tree: dict[str, Plain] = {}
    for block in blocks:
        given_paths: set[str] = set()
        for key, value in block.items():
            paths = {*flatten(value, str(key))} if is_config_block(value) else {str(key)}
            if repeated_paths := sorted(paths & given_paths):
                raise ConfigError(f"{repeated_paths[0]}: given twice in one block; drop one")
            given_paths |= paths
            for name in reversed(str(key).split(".")):
                value = {name: value}
            tree = merge(tree, value)
    return tree


def command_overrides(command: str, overrides: list[str]) -> dict[str, Plain]:
    """Parse `key=value` texts into nested plain data, for a command on a trained model: `eval`, `swap` or `diagnose`.

    Raises ConfigError: a key has no effect in the command, since the key belongs to the checkpoint or to training.
    """
    changes = resolve_interpolations(read_overrides(overrides))
    if problems := [
        Problem(path, text, f"can't be changed in lm {command}")
        for path, _, text in (override.partition("=") for override in overrides)
        if (key_effect := effect_at(Config, path)) and command not in key_effect.commands
    ]:
        raise ConfigError(problems)
    return changes


def merge(base: dict[str, Plain], changes: dict[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Return the keys of `base`, overridden by `changes`; both hold keys of the block at the path `prefix` (such as
    `optim.`).

    A block with a new `name` replaces the old block entirely, so that options of one normalizer are never applied to
    another. A key set in `changes` removes the key that excludes it (`KEY_EXCLUSIONS`) from `base`: `max_steps` removes
    `tokens_per_parameter`, for example.

    Raises ConfigError: `changes` has null where `base` has a block that can't be null.
    """
    result = dict(base)
    for name, value in changes.items():
        path = f"{prefix}{name}"
        old, specs, excluded_key = result.get(name), fields_along_path(Config, path), KEY_EXCLUSIONS.get(path)
        if excluded_key and value and excluded_key not in changes:
            result.pop(excluded_key, None)
        if value is None and is_config_block(old) and (not specs or specs[-1].metadata.get("default", "") is not None):
            raise ConfigError(Problem(path, None, "must be a block of keys", "leave it out, or give keys"))
        if isinstance(value, str) and is_config_block(old) and effect_at(Config, f"{path}.name"):
            value = {"name": value}
        if isinstance(old, str) and isinstance(value, dict):
            old = {"name": old}
        # short for the block `layers`
        if isinstance(old, list) and isinstance(value, dict) and path == "model.normalizer":
            old = {"name": LayerList.name, "of": old}
        if (
            is_config_block(old)
            and is_config_block(value)
            and ("name" not in old or value.get("name", old["name"]) == old["name"])
        ):
            value = merge(old, value, f"{path}.")
        result[name] = value
    return result
