"""Configurations from YAML files and overrides, and back.

`load` merges files (each may inherit with `base:`) and `key=value` overrides, and raises one
`ConfigError` with every problem. Nothing here imports torch.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from lm.attention.options import Options
from lm.attention.plugins import PLUGINS
from lm.config.checks import check
from lm.config.interpolation import interpolated
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.config.yaml_text import MAX_BYTES, MAX_DEPTH, dump_yaml, parse_yaml
from lm.errors import ConfigError, Problem, abbreviated, one_line
from lm.schema import (
    Effect,
    Plain,
    block_of,
    build,
    effect,
    effect_within,
    is_block,
    is_optional,
    own_problems,
    reference,
    suggest,
    to_plain,
)

WithWeights = Callable[[str, dict[str, Plain], dict[str, Plain]], dict[str, Plain]]
MAX_BASES = 50  # files that inherit from each other in a row
# Keys that say the same in two ways: where one is laid on the other, it takes its place.
ALTERNATIVES = {"trainer.max_steps": "tokens_per_parameter", "trainer.tokens_per_parameter": "max_steps"}


def load(arguments: list[str], with_weights: WithWeights | None = None) -> Config:
    """The user's configuration from YAML files and `key=value` overrides, later ones winning; normalizers that it names are imported.

    with_weights: (`init_from`, keys of the files, overrides) -> all keys, with what the weights say.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    if not arguments:
        raise ConfigError("no configuration given: name a YAML file, e.g. configs/softmax.yaml")
    merged: dict[str, Plain] = {}
    overrides = []
    name = ""
    for argument in arguments:
        if "=" in argument:
            overrides.append(argument)
        else:
            plain = read_yaml(Path(argument))
            if "arms" in plain:
                raise ConfigError(f"{argument}: an experiment, not the configuration of one run; it is for lm compare {argument} [--plan]")
            merged = merge(merged, plain)
            name = name or Path(argument).stem
    own = read_overrides(overrides)
    weights = own.get("init_from", merged.get("init_from"))
    named = with_weights and weights and isinstance(weights, str)
    merged = with_weights(weights, merged, own) if named else merge(merged, own)
    with PLUGINS.trusted():
        return parse(interpolated({**merged, "name": merged.get("name") or name}))


def load_normalizer(name: str, overrides: list[str]) -> Options:
    """The options of a normalizer that the user names, with `option=value` texts; one from outside is imported.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    problems: list[Problem] = []
    with PLUGINS.trusted():
        model = build(ModelConfig, {"normalizer": {"name": name, **read_overrides(overrides)}}, "model", problems)
    problems += own_problems(model.normalizer, "model.normalizer")
    if problems:
        raise ConfigError(problems)
    return model.normalizer


def parse(plain: dict[str, Plain]) -> Config:
    """The checked configuration from plain data, without interpolation.

    Raises:
        ConfigError: everything that is wrong, in one message.
    """
    problems: list[Problem] = []
    config = build(Config, plain, "", problems)
    if config.trainer.tokens_per_parameter and "max_steps" not in plain["trainer"]:
        config.trainer.max_steps = None  # the default gives way
    if config.phases and (not isinstance(plain.get("model"), dict) or "normalizer" not in plain["model"]):
        config.model.normalizer = config.phases[0].normalizer
    failed = {problem.path for problem in problems}
    problems += [problem for problem in check(config) if problem.path not in failed]
    if problems:
        raise ConfigError(problems)
    return config


def to_yaml(config: Config) -> str:
    """The resolved tree as YAML: `parse` of it gives the same configuration."""
    return dump_yaml(to_plain(config))


def read_yaml(path: Path) -> dict[str, Plain]:
    """The file's keys merged over those of its `base:` files (paths relative to the file).

    Raises:
        ConfigError: naming the file that can't be read or is not a configuration.
    """
    return _read(path, (), {})


def _read(path: Path, heirs: tuple[Path, ...], known: dict[Path, dict[str, Plain]]) -> dict[str, Plain]:
    """As `read_yaml`; `heirs` inherit from the file, each from the next, and `known` holds the files that were read before."""
    try:
        where = path.resolve()
        if where in known:
            return known[where]
        if where in heirs:
            raise ConfigError(f"{path}: inherits from itself through `base:`")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = suggest(path.name, (p.name for p in path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
        by = f" (a base of {heirs[-1].name})" if heirs else " (overrides are key=value)" if not path.suffix else ""
        raise ConfigError(f"{path}: no such configuration file{by}" + (f"; {near}" if "did" in near else "")) from None
    except IsADirectoryError:
        remedy = f"to go on with this run, name {path / 'config.yaml'}" if (path / "config.yaml").is_file() else "name a YAML file"
        raise ConfigError(f"{path}: a folder, not a configuration file; {remedy}") from None
    except (OSError, RuntimeError) as error:  # the second of a loop of links, before Python 3.13
        raise ConfigError(f"{abbreviated(str(path))}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    plain = parse_yaml(content, str(path))
    plain = {} if plain is None else plain
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: must hold keys and values, not a {type(plain).__name__}")
    given = plain.pop("base", [])
    bases = given if isinstance(given, list) else [given]
    if not all(isinstance(base, str) for base in bases):
        raise ConfigError([Problem("base", given, f"must be a file or a list of files (in {path})")])
    if bases and len(heirs) >= MAX_BASES:
        raise ConfigError(f"{path}: is inherited from through more than {MAX_BASES} files by `base:`")
    merged: dict[str, Plain] = {}
    for base in bases:
        merged = merge(merged, _read(path.parent / base, (*heirs, where), known))
    known[where] = merge(merged, plain)
    return known[where]


def read_overrides(overrides: list[str]) -> dict[str, Plain]:
    """`key.path=value` texts as nested plain data. Raises ConfigError for text of another form."""
    merged: dict[str, Plain] = {}
    for override in overrides:
        path, sign, text = override.partition("=")
        names = path.split(".")
        if not sign or not all(names) or len(names) > MAX_DEPTH:
            raise ConfigError(f"{abbreviated(override, 80)}: not an override; write key=value, e.g. optim.lr=3e-4")
        value = parse_yaml(text, abbreviated(override, 80))
        for name in reversed(names):
            value = {name: value}
        merged = merge(merged, value)
    return merged


def overrides_in(command: str, overrides: list[str]) -> dict[str, Plain]:
    """`key=value` texts as nested plain data, for a command on a trained model: `eval`, `swap` or `harness`.

    Raises:
        ConfigError: naming each key that has no effect there, since it belongs to the checkpoint or to training.
    """
    changes = interpolated(read_overrides(overrides))
    parts = [override.partition("=") for override in overrides]
    refused = [(path, value) for path, _, value in parts if (found := effect(Config, path)) and command not in found.acts_in]
    if refused:
        remedy = "free to change: " + ", ".join(acting_in(command))
        raise ConfigError([Problem(path, value, f"can't be changed in lm {command}", remedy) for path, value in refused])
    return changes


def acting_in(command: str, schema: type = Config, above: Effect | None = None, path: str = "") -> list[str]:
    """The keys that act in a command; a block, if all of its keys do."""
    found = []
    for spec in fields(schema):
        here, where = effect_within(above or Effect(), spec), f"{path}{spec.name}"
        if command in here.acts_in:
            found.append(where)
        elif block := block_of(spec):
            found += acting_in(command, block, here, f"{where}.")
    return found


def merge(under: dict[str, Plain], over: dict[str, Plain], at: str = "") -> dict[str, Plain]:
    """`over` laid on `under`, both the block `at` (such as `optim.`). A block whose `name` changes replaces the old block whole,
    so that options of one normalizer are never applied to another; of ALTERNATIVES the one in `over` stays.

    Raises:
        ConfigError: what would never be seen: null in place of a block that has keys, a number where keys of a block are laid on it.
    """
    merged = dict(under)
    for name, value in over.items():
        old, other = merged.get(name), ALTERNATIVES.get(f"{at}{name}")
        if other and value is not None and other not in over:
            merged.pop(other, None)
        if value is None and is_block(old) and not is_optional(Config, f"{at}{name}"):
            raise ConfigError([Problem(f"{at}{name}", None, "must be a block of keys", "leave it out, or give keys: " + ", ".join(old))])
        if isinstance(value, str) and is_block(old) and effect(Config, f"{at}{name}.name"):
            value = {"name": value}
        if isinstance(old, int | float) and isinstance(value, dict):
            raise ConfigError([Problem(f"{at}{name}", old, "must be a block of keys", f"there is also {at}{name}.{next(iter(value), '')}")])
        if isinstance(old, str) and isinstance(value, dict):
            old = {"name": old}
        if isinstance(old, dict) and isinstance(value, dict):
            renamed = "name" in old and value.get("name", old["name"]) != old["name"]
            merged[name] = merge(old, value, f"{at}{name}.") if is_block(old) and is_block(value) and not renamed else value
        else:
            merged[name] = value
    return merged


def reference_markdown() -> str:
    """docs/config.md: every key with its type, default and description."""
    lines = [
        "# Configuration reference",
        "",
        "Generated by `lm config --reference`; a test keeps it true. `key[choice]` rows are the options of a block",
        "whose `name` is that choice. Every key can be set in a YAML file or as `key=value` on the command line;",
        "a list is given whole, e.g. `'phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]'`.",
        "",
        "What a key affects: `model`, the function that trained weights define; `training`, the weights that are learned; `seed`, the",
        "random numbers of training; `numerics`, results up to rounding; `execution`, where and how fast; `evaluation`, what is measured;",
        "`label`, how a run is named, stored and displayed. Runs that differ in model, training or numerics belong to different arms. A",
        "resumed run must have the same values of all keys that affect model, training or seed, except those marked *free* and those",
        "marked *ahead*, which may change for steps that are still to come.",
        "",
        "| key | type | default | affects | what it is |",
        "|---|---|---|---|---|",
    ]
    for path, kind, default, text in reference(Config):
        lines.append(f"| `{path}` | {kind.replace('|', '&#124;')} | `{default}` | {_affects(path)} | {text.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def _affects(path: str) -> str:
    """What a key affects, and whether a resumed run may change it although it affects what is learned."""
    found = effect(Config, path)
    strict = found.affects in ("model", "training", "seed")
    return f"{found.affects}, *{found.on_resume}*" if strict and found.on_resume != "same" else found.affects
