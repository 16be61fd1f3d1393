"""Dataclasses as configuration schemas: built with strict checks from plain data (values, lists and maps, as in YAML),
and documented.

A schema is a dataclass whose fields are made with functions of this module: `key` (a value), `section` (a nested
dataclass), `optional` (a nested dataclass or null) or `sections` (a list of nested dataclasses). A field made by
`variant` holds a block (a map of keys) whose `name` picks one of several dataclasses. A field made by `variants` holds
a list or a map of such blocks. A field's metadata describe its content: values within `limits`, blocks of one `schema`,
or blocks of a `table` {name: schema}. `many` is list or dict if the field holds several blocks.
`build` checks plain data against a schema and collects every problem instead of stopping at the first.
"""

import contextlib
import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass

from lm.errors import ConfigError, Problem
from lm.removed_keys import REMOVED_VALUES, removed_key

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
NOT_GIVEN = "???"  # the value by which OmegaConf marks a key that the user must give
MUST_BE_GIVEN = "must be given", f"replace {NOT_GIVEN} by a value"  # reason and remedy of a key that has this value


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


@dataclass(frozen=True)
class Limits:
    """Inclusive (`ge`, `le`) and exclusive (`gt`, `lt`) bounds of a number or of each number in a list or map; None
    means no bound.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __str__(self) -> str:
        bounds = {_BOUNDS[name][0]: limit for name, limit in vars(self).items() if limit is not None}
        return " and ".join(
            f"{sign} {limit if isinstance(limit, int) else f'{limit:g}'}" for sign, limit in bounds.items()
        )

    def allow(self, value: float) -> bool:
        """Return whether `value` is within the bounds."""
        return all(_BOUNDS[name][1](value, limit) for name, limit in vars(self).items() if limit is not None)


_BOUNDS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}


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


class DeclaredEffect(typing.TypedDict, total=False):
    """The entries of an `Effect` that a field declares; a field inherits the other entries from the block that contains
    it.
    """

    affects: typing.Literal["model", "training", "seed", "numerics", "execution", "evaluation", "label"]
    on_resume: typing.Literal["same", "free", "ahead", "branch"]
    acts_in: tuple[str, ...]


def key(default, help: str, effect: DeclaredEffect | None = None, *, omit_default: bool = False, **limits: float):
    """Make a dataclass field for a configuration key with a default, a one-line description, an effect and bounds (`gt
    ge lt le`).

    omit_default: `to_plain` leaves the key out while it has its default value. Use this for a new key in an existing
    block: the hashes of existing runs' configurations and arms then stay the same.
    """
    metadata = {"help": help, "effect": effect, "limits": Limits(**limits), "omit_default": omit_default}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(schema: type, help: str, effect: DeclaredEffect | None = None, *, by_user: bool = True):
    """Make a dataclass field for a nested block of keys, described by the dataclass `schema`. A block that lm alone
    sets (`by_user` is false) is not in the reference.
    """
    metadata = {"help": help, "effect": effect, "schema": schema, "by_user": by_user}
    return field(default_factory=schema, metadata=metadata)


def optional(schema: type, help: str, effect: DeclaredEffect | None = None):
    """Make a dataclass field for a nested block that is null (off) unless one of its keys is given."""
    metadata = {"help": help, "effect": effect, "schema": schema, "optional": True}
    return field(default=None, metadata=metadata)


def sections(schema: type, help: str, default: tuple = (), effect: DeclaredEffect | None = None):
    """Make a dataclass field for a list of blocks, each described by the dataclass `schema`."""
    metadata = {"help": help, "effect": effect, "schema": schema, "many": list}
    return field(default_factory=lambda: list(default), metadata=metadata)


def variant(
    table: Mapping[str, type],
    default: str,
    help: str,
    effect: DeclaredEffect | None = None,
    *,
    omit_default: bool = False,
):
    """Make a field for a block whose `name` selects a dataclass in `table`; a name alone means all defaults.

    `effect` and `omit_default` mean what they mean in `key`.
    """
    metadata = {"help": help, "effect": effect, "table": table, "default": default, "omit_default": omit_default}
    return field(default_factory=lambda: table[default](), metadata=metadata)


def variants(table: Mapping[str, type], help: str, *, many: type = list):
    """Make a field for a list of blocks as in `variant`, or, if `many` is dict, for {name chosen by the user: block};
    empty by default.
    """
    metadata = {"help": help, "effect": None, "table": table, "many": many}
    return field(default_factory=many, metadata=metadata)


def effect(schema: type, path: str) -> Effect | None:
    """Return the effect of the key at the dotted `path`, e.g. `a.b` or `a[0].b`; None if `schema` has no such key.

    A path that continues into a key's plain data gives the key's effect. A plugin's option, unknown to `schema`, has
    its block's effect. If a field declares `affects` without `on_resume`, then `on_resume` is `same` for model,
    training and seed, else `free`.
    """
    specs, declared = _fields_at(schema, path), {}
    for spec in specs:
        changes = spec.metadata["effect"] or {}
        if "affects" in changes:
            declared["on_resume"] = "same" if changes["affects"] in ("model", "training", "seed") else "free"
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
        has_table = bool(spec.metadata.get("table"))
        blocks = (
            list(spec.metadata["table"].values())
            if has_table
            else [spec.metadata["schema"]]
            if "schema" in spec.metadata
            else []
        )
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
    matches = difflib.get_close_matches(str(word), names, n=1)
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
        problems.append(
            Problem(path, data, "must be a block of keys", "keys: " + ", ".join(spec.name for spec in fields(schema)))
        )
        return schema()
    specs = {spec.name: spec for spec in fields(schema)}
    empty_remedy = "it has no options: give the name of another" if not specs else ""
    values = {}
    for name, value in data.items():
        key_path = _join_path(path, name)
        if name in specs:
            values[name] = _field_value(specs[name], value, key_path, problems)
        elif removed := removed_key(path, getattr(schema, "name", ""), name):
            if value != removed[0]:
                problems.append(Problem(key_path, value, "is no key of lm any more", removed[1]))
        elif not (name == "name" and hasattr(schema, "name")):
            owner_names = [
                variant_name for variant_name, options in (table or {}).items() if _field_named(options, name)
            ]
            instruction = (
                f"give the whole list {_join_path(path, 'of')}" if "of" in specs else f"set {_join_path(path, 'name')}"
            )
            owner_remedy = f"it is an option of {', '.join(owner_names)}: {instruction}" if owner_names else ""
            parts = str(name).split(".")
            nesting_remedy = (
                f"nest it: {': {'.join(parts)}: ...{'}' * (len(parts) - 1)}"
                if len(parts) > 1 and parts[0] in specs
                else ""
            )
            problems.append(
                Problem(
                    key_path,
                    value,
                    "unknown key",
                    owner_remedy or empty_remedy or nesting_remedy or _inner_key(schema, name) or suggest(name, specs),
                )
            )
    return schema(**{name: value for name, value in values.items() if value is not MISSING})


def _inner_key(schema: type, name: str) -> str:
    """Return advice for a key that blocks within `schema` have, such as `lr` for optim.lr; empty if none or many do."""
    paths = _paths_by_name(schema).get(name, [])
    return f"did you mean {' or '.join(paths)}?" if 1 <= len(paths) <= 3 else ""


@functools.cache  # a damaged file may have thousands of unknown keys
def _paths_by_name(schema: type) -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    for path, *_ in reference(schema):
        if "." in path and "[" not in path:
            paths.setdefault(path.rpartition(".")[2], []).append(path)
    return paths


def _field_value(spec: dataclasses.Field, value: Plain, path: str, problems: list[Problem]):
    table, container = spec.metadata.get("table"), spec.metadata.get("many")
    has_blocks = table is not None or "schema" in spec.metadata
    if value == NOT_GIVEN or (not has_blocks and NOT_GIVEN in single_values(value)):
        return _refuse(problems, path, value, *MUST_BE_GIVEN)

    def block(item: Plain, item_path: str):
        if table is None:
            return build(spec.metadata["schema"], item, item_path, problems)
        return _build_variant(table, spec.metadata.get("default"), item, item_path, problems)

    if container is dict:
        if not is_block(value):
            return _refuse(problems, path, value, "must be a map from names to blocks")
        return {name: block(item, f"{path}.{name}") for name, item in value.items()}
    if container is list:
        if table is not None and not isinstance(value, list):
            value = [value]
        if not isinstance(value, list | None):
            return _refuse(problems, path, value, "must be a list of blocks")
        return [block(item, item_path) for item_path, item in _items(value or [], path)]
    if has_blocks:
        return None if value is None and "optional" in spec.metadata else block(value, path)
    result = convert(spec.type, value)
    advice = [text for item in single_values(value) if (text := REMOVED_VALUES.get((spec.name, str(item))))]
    if result is MISSING and advice:
        return _refuse(problems, path, value, "is no value of lm any more", advice[0])
    if result is MISSING:
        remedy = _type_remedy(spec.type, value, spec.metadata["help"])
        return _refuse(problems, path, value, f"must be {type_name(spec.type)}", remedy)
    limits = spec.metadata["limits"]
    if not all(limits.allow(item) for item in single_values(result) if type(item) in (int, float)):
        return _refuse(problems, path, value, f"must be {limits}")
    return result


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
    if name == NOT_GIVEN:
        return _refuse(problems, _join_path(path, "name"), name, *MUST_BE_GIVEN)
    variant_name = name if isinstance(name, str) else ""  # no variant has an empty name
    try:
        schema = table[variant_name]
    except KeyError as error:
        reason, remedy = (
            (error.reason, error.remedy)
            if isinstance(error, Unavailable)
            else ("only normalizers may be code from outside", "take one of lm's own, or lm 0.11")
            if ":" in variant_name
            else ("unknown name", suggest(variant_name, table))
        )
        return _refuse(problems, _join_path(path, "name"), name, reason, remedy)
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
    if origin is list:
        items = [convert(args[0], item) for item in value] if isinstance(value, list) else [MISSING]
        return MISSING if MISSING in items else items
    if origin is dict:
        pairs = (
            {convert(args[0], k): convert(args[1], v) for k, v in value.items()}
            if isinstance(value, dict)
            else {MISSING: MISSING}
        )
        return MISSING if MISSING in (*pairs, *pairs.values()) else pairs
    if type(value) is int and not -(2**63) <= value < 2**63:
        return MISSING
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and type(value) is float and not math.isfinite(value):
        return MISSING
    if type(value) is str and "\0" in value:  # no file and no file name can hold it
        return MISSING
    return value if type(value) is hint else MISSING


def type_name(hint: type) -> str:
    """Return a type in words for users, e.g. `an integer or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is typing.Literal:
        return " | ".join(yaml_scalar(arg) for arg in args)
    if origin is list:
        return f"a list ({type_name(args[0])} each)"
    if origin is dict:
        return f"a map ({type_name(args[0])}: {type_name(args[1])})"
    return {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a map",
        types.NoneType: "null",
    }[hint]


def _type_remedy(hint: type, value: Plain, meaning: str) -> str:
    """Return the remedy for a value of the wrong type; for true or false in place of a text, return `meaning`, the
    key's description.
    """
    literals = _literals(hint)
    unknown_texts = [
        item
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, str) and item not in literals
    ]
    if (unknown_texts or isinstance(value, dict)) and convert(hint, map_values(value, _as_number)) is not MISSING:
        return "write numbers without quotes and leading zeros, or ${oc.decode:...}"
    if unknown_texts and literals:
        literal_texts = [yaml_scalar(arg) for arg in literals]
        return (
            f"write {unknown_texts[0]} without quotes"
            if unknown_texts[0] in literal_texts
            else suggest(unknown_texts[0], literal_texts)
        )
    if hint is not str:
        return ""
    if type(value) is int and "`fixed:N`" in meaning:  # a row length
        return f"write fixed:{value}"
    return meaning if isinstance(value, bool | str) else "quote it in the YAML"


def _as_number(value: Plain) -> Plain:
    """Return the number that Python reads in a text; if there is none, or `value` is no text, return `value`."""
    for number_type in (int, float) if isinstance(value, str) else ():
        with contextlib.suppress(ValueError):
            return number_type(value)
    return value


def _literals(hint: type) -> tuple:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return sum((_literals(arg) for arg in typing.get_args(hint)), ())


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


def reference(
    schema: type, path: str = "", described_options: set[type] | None = None
) -> list[tuple[str, str, str, str]]:
    """Return rows (key path, type, default, description) of the keys of `schema`, in order; each dataclass of a table
    is described once.
    """
    rows = []
    described_options = set() if described_options is None else described_options
    for spec in fields(schema):
        if not spec.metadata.get("by_user", True):
            continue
        key_path, default, blocks = _join_path(path, spec.name), _default_of(spec), {}
        table, block = spec.metadata.get("table"), spec.metadata.get("schema")
        if container := spec.metadata.get("many"):
            kind = (
                "a map from names to blocks"
                if container is dict
                else f"a list of {'blocks' if table is None else 'names or blocks'}"
            )
            default_text = yaml_flow(_plain_value(default))
            blocks = {"[]": block} if block else {}
        elif table is not None:
            kind, default_text = " | ".join(table), spec.metadata["default"]
            blocks = {f"[{name}]": option for name, option in table.items()}
        elif block:
            kind, default_text, blocks = "a block or null" if "optional" in spec.metadata else "", "null", {"": block}
        else:
            limits = str(spec.metadata["limits"])
            kind, default_text = type_name(spec.type) + (f", {limits}" if limits else ""), yaml_scalar(default)
        if kind:
            rows.append((key_path, kind, default_text, spec.metadata["help"]))
        for suffix, option in blocks.items():
            if block or option not in described_options:
                described_options.add(option)
                rows += reference(option, key_path + suffix, described_options)
    return rows


def yaml_flow(value: Plain) -> str:
    """Return a value as YAML on one line; a block that has only a `name` is written as this name."""
    if isinstance(value, list):
        return f"[{', '.join(map(yaml_flow, value))}]"
    if isinstance(value, dict):
        text = ", ".join(f"{name}: {yaml_flow(item)}" for name, item in value.items())
        return value["name"] if list(value) == ["name"] else "{" + text + "}"
    return yaml_scalar(value)


def yaml_scalar(value: Plain) -> str:
    """Return a value that is neither list nor map as YAML text."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)
