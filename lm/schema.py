"""Dataclasses as configuration schemas: built with strict checks from plain data (values, lists and maps, as in YAML),
and documented.

A schema is a dataclass whose fields are made with functions of this module: `key` (a value), `section` (a nested
dataclass), `optional` (a nested dataclass or null) or `sections` (a list of nested dataclasses). A field made by
`variant` holds a block (a map of keys) whose `name` picks one of several dataclasses. A field made by `variants` holds
a list or a map of such blocks. A field's metadata describe its content: values within `limits`, blocks of one `schema`,
or blocks of a `table` {name: schema}. `many` is list or dict if the field holds several blocks.
`build` checks plain data against a schema and collects every problem instead of stopping at the first.
"""

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass

from lm.attention.options import key as key
from lm.attention.options import yaml_scalar as yaml_scalar
from lm.errors import ConfigError, Problem
from lm.removed_keys import removed_defaults

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
NOT_GIVEN = "???"  # the value by which OmegaConf marks a key that the user must give
_REPLACE = f"replace {NOT_GIVEN} by a value"


@functools.cache  # each configuration needs the fields of a class many times
def fields(schema: type) -> tuple[dataclasses.Field, ...]:
    """Return a dataclass's fields, whose `type` is a type, not text, even under `from __future__ import
    annotations`.
    """
    specs = dataclasses.fields(schema)
    if any(isinstance(spec.type, str) for spec in specs):
        hints = typing.get_type_hints(schema)
        for spec in specs:
            spec.type = hints[spec.name]
    return specs


# {bound of a number, or of each number in a list or map: (sign, test, name in JSON Schema)}
BOUNDS = {
    "gt": (">", operator.gt, "exclusiveMinimum"),
    "ge": (">=", operator.ge, "minimum"),
    "lt": ("<", operator.lt, "exclusiveMaximum"),
    "le": ("<=", operator.le, "maximum"),
}


@dataclass(frozen=True)
class Effect:
    """Describes a configuration key: what it affects, whether a resumed run may change it, and the commands in which it
    acts.
    """

    # `model`: the function that trained weights define; `training`: the weights that are learned; `seed`: the random
    # numbers of training; `numerics`: results up to rounding; `execution`: where and how fast; `evaluation`: what is
    # measured; `label`: how a run is named, stored and displayed
    affects: str = "training"
    # whether a resumed run may have another value: `same`: no; `free`: yes; `ahead`: for steps that are still to come;
    # `branch`: no, but a new run that branches from it (`branch_from`) may
    on_resume: str = "same"
    # the commands in which the key has an effect: `train`, or commands on a trained model
    acts_in: tuple[str, ...] = ("train",)


# The entries of an `Effect` that a field declares; it inherits the others from the block that contains it.
DeclaredEffect = dict[str, str | tuple[str, ...]]


def _field(default_factory: Callable, help: str, effect: DeclaredEffect | None, omit_default: bool = False, **content):
    metadata = {"help": help, "effect": effect, "omit_default": omit_default, **content}
    return field(default_factory=default_factory, metadata=metadata)


def section(schema: type, help: str, effect: DeclaredEffect | None = None, *, by_user: bool = True):
    """Make a dataclass field for a nested block of keys, described by the dataclass `schema`. A block that lm alone
    sets (`by_user` is false) is not in the reference.
    """
    return _field(schema, help, effect, schema=schema, by_user=by_user)


def optional(schema: type, help: str, effect: DeclaredEffect | None = None):
    """Make a dataclass field for a nested block that is null (off) unless one of its keys is given."""
    return _field(lambda: None, help, effect, schema=schema, optional=True)


def sections(schema: type, help: str, default: tuple = (), effect: DeclaredEffect | None = None):
    """Make a dataclass field for a list of blocks, each described by the dataclass `schema`."""
    return _field(lambda: list(default), help, effect, schema=schema, many=list)


def variant(
    table: Mapping[str, type],
    default: str | None,
    help: str,
    effect: DeclaredEffect | None = None,
    *,
    omit_default: bool = False,
):
    """Make a field for a block whose `name` selects a dataclass in `table`; a name alone means all defaults.

    With `default` None the field may be null. `effect` and `omit_default` mean what they mean in `key`.
    """
    if default is None:
        return _field(lambda: None, help, effect, omit_default, table=table, default=None, optional=True)
    return _field(lambda: table[default](), help, effect, omit_default, table=table, default=default)


def variants(table: Mapping[str, type], help: str, *, many: type = list):
    """Make a field for a list of blocks as in `variant`, or, if `many` is dict, for {name chosen by the user: block};
    empty by default."""
    return _field(many, help, None, table=table, many=many)


def effect(schema: type, path: str) -> Effect | None:
    """Return the effect of the key at the dotted `path`, e.g. `a.b` or `a[0].b`; None if `schema` has no such key.

    A path that continues into a key's plain data gives the key's effect. A plugin's option, unknown to `schema`, has
    its block's effect. If a field declares `affects` without `on_resume`, then `on_resume` is `same` for model,
    training and seed, else `free`.
    """
    specs, declared = _fields_at(schema, path), {}
    for changes in (spec.metadata["effect"] or {} for spec in specs):
        if affects := changes.get("affects"):
            declared["on_resume"] = "same" if affects in ("model", "training", "seed") else "free"
        declared |= changes
    return Effect(**declared) if specs else None


def _fields_at(schema: type, path: str) -> list[dataclasses.Field]:
    """Return the fields along a dotted path, the outermost first. They end at a field of plain data, or at a block of a
    table (`variant`) if no dataclass in the table has the path's next name. Returns [] if `schema` has no such key.
    """
    specs, blocks, has_table = [], [schema], False
    for name in path.split("."):
        spec = next((match for block in blocks if (match := _field_named(block, name))), None)
        if spec is None:
            return specs if has_table else []
        specs.append(spec)
        has_table, block = bool(spec.metadata.get("table")), spec.metadata.get("schema")
        blocks = [block] if block else [*spec.metadata.get("table", {}).values()]
        if not blocks:
            break
    return specs


def block_of(spec: dataclasses.Field) -> type | None:
    """Return the dataclass of the block in a field made by `section` or `optional`; None for other fields."""
    return None if "many" in spec.metadata else spec.metadata.get("schema")


def key_field(schema: type, path: str) -> dataclasses.Field | None:
    """Return the dataclass field that declares the key at the dotted `path`. None if there is no such key, or if `path`
    leads into a key's plain data."""
    specs = _fields_at(schema, path)
    return specs[-1] if len(specs) == path.count(".") + 1 else None


def _field_named(schema: type, name: str) -> dataclasses.Field | None:
    """Return the field called `name`, without a list index at its end (`phases[1]` gives `phases`); None if there is no
    such field.
    """
    return next((spec for spec in fields(schema) if spec.name == name.partition("[")[0]), None)


class Unavailable(KeyError):
    """Raised if a block's `name` refers to a plugin that may not be imported, can't be imported or is invalid; holds
    reason and remedy.
    """

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def suggest(word: str, names: typing.Iterable[str]) -> str:
    """Return advice on an unknown `word`, for an error message: the most similar of `names`, or else all of them. A
    method `suggestions` of `names` gives further ones, such as those of installed plugins.
    """
    names = [*getattr(names, "suggestions", names.__iter__)()]
    matches = [name for name in names if name.startswith(f"{word} ")]  # of a metric at several lengths, say
    matches = matches or difflib.get_close_matches(str(word), names, n=1)
    if matches:
        return f"did you mean '{matches[0]}'?"
    return "choose from: " + ", ".join(names)


def build(schema: type, data: Plain, path: str, problems: list[Problem], table: Mapping[str, type] | None = None):
    """Return an instance of `schema` made from plain `data`; append the problems found in `data`, such as unknown keys,
    to `problems`.

    table: the {name: dataclass} from which a block's `name` selected `schema`; if others of these dataclasses have an
    unknown key, the remedy names them.
    """
    if not isinstance(data, Mapping):
        keys = ", ".join(spec.name for spec in fields(schema))
        problems.append(Problem(path, data, "must be a block of keys", f"keys: {keys}"))
        return schema()
    specs = {spec.name: spec for spec in fields(schema)}
    values = {}
    for name, value in data.items():
        key_path = _join_path(path, name)
        if name in specs:
            values[name] = _field_value(specs[name], value, key_path, problems)
        elif defaults := removed_defaults(path, getattr(schema, "name", ""), name):
            if value not in defaults:
                problems.append(Problem(key_path, value, "is no key of lm any more", "see CHANGELOG.md"))
        elif not (name == "name" and hasattr(schema, "name")):
            problems.append(Problem(key_path, value, "unknown key", _key_advice(schema, str(name), table or {}, path)))
    return schema(**{name: value for name, value in values.items() if value is not MISSING})


def _key_advice(schema: type, name: str, table: Mapping[str, type], block_path: str) -> str:
    """Return advice on an unknown key of the block at `block_path`. Other dataclasses of the `table` or blocks within
    `schema` may have it.
    """
    if owners := [variant_name for variant_name, options in table.items() if _field_named(options, name)]:
        return f"it is an option of {', '.join(owners)}, not of {schema.name}"
    if "." in name:
        return f"nest it: {name.replace('.', ': {')}: ...{'}' * name.count('.')}"
    names, paths = [spec.name for spec in fields(schema)], [path for path, *_ in reference(schema) if "[" not in path]
    match = difflib.get_close_matches(name, names + [path.rpartition(".")[2] for path in paths], n=1)
    if match and match[0] not in names:
        inner = [_join_path(block_path, path) for path in paths if path.endswith(f".{match[0]}")]
        if len(inner) <= 3:
            return f"did you mean {' or '.join(inner)}?"
    return suggest(name, names)


def _field_value(spec: dataclasses.Field, value: Plain, path: str, problems: list[Problem]):
    table, container = spec.metadata.get("table"), spec.metadata.get("many")
    has_blocks = table is not None or "schema" in spec.metadata
    if value == NOT_GIVEN or (not has_blocks and NOT_GIVEN in single_values(value)):
        return _refuse(problems, path, value, "must be given", _REPLACE)

    def block(item: Plain, item_path: str):
        if table is None:
            return build(spec.metadata["schema"], item, item_path, problems)
        return _build_variant(table, spec.metadata.get("default"), item, item_path, problems)

    if container is dict:
        if not is_block(value):
            return _refuse(problems, path, value, "must be a map from names to blocks")
        return {name: block(item, f"{path}.{name}") for name, item in value.items()}
    if container is list:
        value = [value] if table is not None and not isinstance(value, list) else value or []
        if not isinstance(value, list):
            return _refuse(problems, path, value, "must be a list of blocks")
        return [block(item, item_path) for item_path, item in _items(value, path)]
    if has_blocks:
        return None if value is None and "optional" in spec.metadata else block(value, path)
    result, limits = convert(spec.type, value), spec.metadata["limits"]
    if result is MISSING:
        remedy = "quote it in the YAML" if spec.type is str else ""
        return _refuse(problems, path, value, f"must be {type_name(spec.type)}", remedy)
    numbers = [item for item in single_values(result) if type(item) in (int, float)]
    if not all(BOUNDS[name][1](number, limit) for name, limit in limits.items() for number in numbers):
        return _refuse(problems, path, value, f"must be {_limits_text(limits)}")
    return result


def _limits_text(limits: dict[str, float]) -> str:
    return " and ".join(
        f"{BOUNDS[name][0]} {limit if isinstance(limit, int) else f'{limit:g}'}" for name, limit in limits.items()
    )


def _refuse(problems: list[Problem], *parts: object) -> object:
    """Append a problem of these parts to `problems`, and return MISSING."""
    problems.append(Problem(*parts))
    return MISSING


def _items(value: Plain, path: str) -> Iterator[tuple[str, Plain]]:
    """Yield (path, item) for each item of a list or map at `path`; another value is its own only item."""
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((_join_path(path, name), item) for name, item in value.items())
    else:
        yield path, value


def single_values(value: Plain) -> Iterator[Plain]:
    """Yield the single values in nested lists and maps; if `value` is neither list nor map, yield `value`."""
    if isinstance(value, list | dict):
        for _, item in _items(value, ""):
            yield from single_values(item)
    else:
        yield value


def map_values(value: Plain, change: Callable[[Plain], Plain]) -> Plain:
    """Return plain data in which `change` has replaced each key and each value that is neither list nor map."""
    if isinstance(value, dict):
        return {change(name): map_values(item, change) for name, item in value.items()}
    return [map_values(item, change) for item in value] if isinstance(value, list) else change(value)


def is_block(value: Plain) -> bool:
    """Return whether `value` may be a block: a map with texts as keys. A map whose keys are data, such as numbers, is
    no block.
    """
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _build_variant(table: Mapping[str, type], default: str | None, value: Plain, path: str, problems: list[Problem]):
    if isinstance(value, list) and "layers" in table:
        value = {"name": "layers", "of": value}
    value = {"name": value} if isinstance(value, str) else value
    if not is_block(value) or value.get("name", default) is None:
        return _refuse(problems, path, value, "must be a name or a block with a 'name'", suggest("", table))
    name = value.get("name", default)
    try:
        schema = table[name if isinstance(name, str) else ""]  # no variant has an empty name
    except Unavailable as error:
        return _refuse(problems, f"{path}.name", name, error.reason, error.remedy)
    except KeyError:
        reason = ("must be given", _REPLACE) if name == NOT_GIVEN else ("unknown name", suggest(name, table))
        return _refuse(problems, f"{path}.name", name, *reason)
    return build(schema, value, path, problems, table)


def build_named(table: Mapping[str, type], value: Plain, path: str, default: str | None = None):
    """Return the dataclass instance that `value`, a name or a block with a `name`, selects from `table`. `path` is the
    path of `value` in errors.

    default: the name for a block without a name; if None, each block must have a name.

    Raises ConfigError: all problems of single keys in one message; if there are none, all problems that the block
    reports itself.
    """
    problems: list[Problem] = []
    block = _build_variant(table, default, value, path, problems)
    if problems := problems or cross_key_problems(block, path):
        raise ConfigError(problems)
    return block


def convert(hint: type, value: Plain):
    """Return `value` as type `hint` (only int becomes float); MISSING if types differ, an int exceeds 64 bits, or a
    float isn't finite.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((v for v in (convert(arg, value) for arg in args) if v is not MISSING), MISSING)
    if origin is typing.Literal:
        return value if any(value == arg and type(value) is type(arg) for arg in args) else MISSING
    if origin is list and isinstance(value, list):
        items = [convert(args[0], item) for item in value]
        return MISSING if MISSING in items else items
    if origin is dict and isinstance(value, dict):
        parts = [convert(list[arg], [*part]) for arg, part in zip(args, (value, value.values()), strict=True)]
        return MISSING if MISSING in parts else dict(zip(*parts, strict=True))
    if type(value) is int and not -(2**63) <= value < 2**63:
        return MISSING
    if hint is float and type(value) is int:
        return float(value)
    # no file and no file name can hold a NUL
    is_odd = not math.isfinite(value) if type(value) is float else type(value) is str and "\0" in value
    return value if type(value) is hint and not is_odd else MISSING


def type_name(hint: type) -> str:
    """Return a type in words for users, e.g. `an integer or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(yaml_scalar, args))
    names = [*map(type_name, args)]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(names)
    if origin is not None:
        return f"a list ({names[0]} each)" if origin is list else f"a map ({names[0]}: {names[1]})"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a map"}.get(hint, "null")


def cross_key_problems(block, path: str = "") -> list[Problem]:
    """Return the problems that the `problems` methods of `block` and of all blocks in it report, with full key paths.

    A block with rules that concern several keys has a method `problems() -> list[Problem]`; its key paths are relative
    to the block.
    """
    problems = [
        dataclasses.replace(problem, path=_join_path(path, problem.path))
        for problem in getattr(block, "problems", list)()
    ]
    for spec in fields(type(block)):
        for path_of_item, item in _items(getattr(block, spec.name), _join_path(path, spec.name)):
            problems += cross_key_problems(item, path_of_item) if is_dataclass(item) else []
    return problems


def to_plain(config, whole: bool = False) -> dict[str, Plain]:
    """Return `config` as nested plain data for `build`. A block of a dataclass with a `name` that selects it has this
    `name` as a key. Keys made with `omit_default` are left out while they have their default, unless `whole` is
    true.
    """
    specs = fields(type(config))
    plain = {"name": config.name} if hasattr(config, "name") and all(spec.name != "name" for spec in specs) else {}
    for spec in specs:
        value = getattr(config, spec.name)
        if whole or not spec.metadata.get("omit_default") or value != _default_of(spec):
            plain[spec.name] = _plain_value(value, whole)
    return plain


def _plain_value(value, whole: bool = False) -> Plain:
    return map_values(value, lambda item: to_plain(item, whole) if is_dataclass(item) else item)


def _default_of(spec: dataclasses.Field):
    return spec.default if spec.default is not MISSING else spec.default_factory()


def flatten(plain: Plain, path: str = "") -> dict[str, Plain]:
    """Flatten nested blocks into {key path: value}; the path of a block in a list contains its index (`a[0].b`)."""
    if not plain or not (is_block(plain) or (isinstance(plain, list) and isinstance(plain[0], dict))):
        return {path: plain}
    return {key: value for item_path, item in _items(plain, path) for key, value in flatten(item, item_path).items()}


@functools.cache
def reference(schema: type, path: str = "") -> tuple[tuple[str, str, str, str], ...]:
    """Return rows (key path, type, default, description) of the keys of `schema`, in order. Each dataclass is described
    once, and a key that several choices share has one row, e.g. `optimizer[adamw, muon].eps`.
    """
    return tuple(_rows(schema, path, {}))


def _rows(schema: type, path: str, described: dict[type, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of `reference`. `described`: the path at which each dataclass was described."""
    for spec in fields(schema):
        if not spec.metadata.get("by_user", True):
            continue
        key_path, default, blocks = _join_path(path, spec.name), yaml_flow(_plain_value(_default_of(spec))), {}
        table, block, container = (spec.metadata.get(name) for name in ("table", "schema", "many"))
        if container is dict:
            kind = "a map from names to blocks"
        elif container:
            kind, blocks = "a list of blocks" if block else "a list of names or blocks", {"[]": block} if block else {}
        elif block:
            kind, blocks = "a block or null" if "optional" in spec.metadata else "", {"": block}
        elif table:
            kind, default = " | ".join(table), spec.metadata["default"] or "null"
            kind += " or null" * ("optional" in spec.metadata)
            blocks = {f"[{name}]": option for name, option in table.items()}
        else:
            limits = _limits_text(spec.metadata["limits"])
            kind, default = type_name(spec.type) + (f", {limits}" if limits else ""), yaml_scalar(_default_of(spec))
        if block in described:
            kind = f"{kind or 'a block'}, as {described[block]}"
        if kind:
            yield key_path, kind, default, spec.metadata["help"]
        choices_by_row: dict[tuple[str, ...], list[str]] = {}
        for choice, option in blocks.items():
            if option not in described:
                described[option] = key_path
                for inner_path, *texts in _rows(option, key_path + choice, described):
                    row = inner_path.removeprefix(key_path + choice), *texts
                    choices_by_row.setdefault(row, []).append(choice.strip("[]"))
        for (inner_path, *texts), choices in choices_by_row.items():
            suffix = f"[{', '.join(choices)}]" if table or container else ""
            yield key_path + suffix + inner_path, *texts


def yaml_flow(value: Plain) -> str:
    """Return a value as YAML on one line; a block that has only a `name` is written as this name."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_flow, value))}]"
    if isinstance(value, dict):
        text = ", ".join(f"{name}: {yaml_flow(item)}" for name, item in value.items())
        return value["name"] if list(value) == ["name"] else "{" + text + "}"
    return yaml_scalar(value)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)
