"""Dataclasses as configuration schemas: strict building from plain data, and their reference text.

A schema is a dataclass whose fields are made with `key` (a value), `section` (a nested dataclass), `optional` (one that may be null),
`sections` (a list of them), `variant` (one of several dataclasses, chosen by the node's `name`) or `named` (a map of such).
`build` checks plain data against it and collects every problem instead of stopping at the first.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from functools import cache

from lm.errors import Problem

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


@cache  # each configuration asks for them many times
def fields(schema: type) -> tuple[dataclasses.Field, ...]:
    """The fields of a dataclass with their types, also where its module has `from __future__ import annotations`."""
    specs = dataclasses.fields(schema)
    if any(isinstance(spec.type, str) for spec in specs):
        hints = typing.get_type_hints(schema)
        for spec in specs:
            spec.type = hints[spec.name]
    return specs


@dataclass(frozen=True)
class Limits:
    """Inclusive (`ge`, `le`) and exclusive (`gt`, `lt`) bounds of a number, or of a list's items."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __str__(self) -> str:
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        bounds = [
            f"{signs[name]} {limit if isinstance(limit, int) else f'{limit:g}'}" for name, limit in vars(self).items() if limit is not None
        ]
        return " and ".join(bounds)

    def allow(self, value: float) -> bool:
        """True if `value` is within the bounds."""
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )


@dataclass(frozen=True)
class Effect:
    """The effect of a key. A block's effect holds for all of its keys; a key may declare its own.

    Attributes:
        affects: `model`: the function that trained weights define; `training`: the weights that are learned; `seed`: the random
            numbers of training; `numerics`: results up to rounding; `execution`: where and how fast; `evaluation`: what is measured;
            `label`: how a run is named, stored and displayed.
        on_resume: whether a resumed run may have another value: `same`: no; `free`: yes; `ahead`: for steps that are still to come;
            `branch`: no, but a new run that branches from it (`branch_from`) may.
        acts_in: the commands in which the key has an effect: `train`, or commands on a trained model.
    """

    affects: str = "training"
    on_resume: str = "same"
    acts_in: tuple[str, ...] = ("train",)


class DeclaredEffect(typing.TypedDict, total=False):
    """The part of an `Effect` that a field declares; the rest comes from the block that contains it."""

    affects: typing.Literal["model", "training", "seed", "numerics", "execution", "evaluation", "label"]
    on_resume: typing.Literal["same", "free", "ahead", "branch"]
    acts_in: tuple[str, ...]


def key(default, help: str, effect: DeclaredEffect | None = None, *, omit_default: bool = False, **limits: float):
    """A configuration key: its default, its one-line description, what it affects and its bounds (`gt ge lt le`).

    omit_default: plain data leave it out while it has its default: for a key added to a block that there are runs of, whose
    configurations, arms and hashes then stay as they were.
    """
    metadata = {"help": help, "effect": effect, "limits": Limits(**limits), "omit_default": omit_default}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(schema: type, help: str, effect: DeclaredEffect | None = None):
    """A nested block of keys, described by the dataclass `schema`."""
    return field(default_factory=schema, metadata={"help": help, "effect": effect})


def optional(schema: type, help: str, effect: DeclaredEffect | None = None, *, omit_default: bool = False):
    """A nested block that is null (off) until one of its keys is given. `omit_default` as of `key`."""
    return field(default=None, metadata={"help": help, "effect": effect, "optional": schema, "omit_default": omit_default})


def sections(schema: type, help: str, default: tuple = (), effect: DeclaredEffect | None = None):
    """A list of blocks, each described by the dataclass `schema`."""
    return field(default_factory=lambda: list(default), metadata={"help": help, "effect": effect, "item": schema})


def variant(table: Mapping[str, type], default: str, help: str, effect: DeclaredEffect | None = None, *, omit_default: bool = False):
    """A block whose `name` picks one dataclass of `table`; a bare name stands for its defaults. `omit_default` as of `key`."""
    metadata = {"help": help, "effect": effect, "table": table, "omit_default": omit_default}
    return field(default_factory=lambda: table[default](), metadata=metadata)


def variants(table: Mapping[str, type], help: str, *, omit_default: bool = False):
    """A list of blocks, each as in `variant`; empty by default. `omit_default` as of `key`."""
    return field(default_factory=list, metadata={"help": help, "effect": None, "list_table": table, "omit_default": omit_default})


def named(table: Mapping[str, type], help: str, effect: DeclaredEffect | None = None):
    """A map from names of the user's to blocks, each as in `variant`; empty by default."""
    return field(default_factory=dict, metadata={"help": help, "effect": effect, "named_table": table})


def effect(schema: type, path: str) -> Effect | None:
    """The effect of the key at `path` (dotted, items of lists by index or not) affects; None if `schema` has no such key.

    Everything below a key of plain data has that key's effect; so has an option of a block that is not in its table (one of a plugin).
    """
    first, *rest = path.split(".")
    spec = _field(schema, first)
    if spec is None:
        return None
    inherited = effect_within(Effect(), spec)
    for name in rest:
        table = spec.metadata.get("table") or spec.metadata.get("list_table") or spec.metadata.get("named_table")
        inner = list(table.values()) if table else [spec.metadata.get("item") or block_of(spec)]
        if not inner[0]:
            break
        spec = next((known for block in inner if (known := _field(block, name))), None)
        if spec is None:
            return inherited if table else None
        inherited = effect_within(inherited, spec)
    return inherited


def effect_within(block: Effect, spec: dataclasses.Field) -> Effect:
    """The effect of a field in a block with the effect `block`. What affects neither the model nor training may change on resume."""
    changes = dict(spec.metadata["effect"] or {})
    if "affects" in changes:
        changes.setdefault("on_resume", "same" if changes["affects"] in ("model", "training", "seed") else "free")
    return dataclasses.replace(block, **changes)


def block_of(spec: dataclasses.Field) -> type | None:
    """The dataclass of the block that a field holds, whether or not it may be null; None: the field holds something else."""
    schema = spec.metadata.get("optional", spec.type)
    return schema if is_dataclass(schema) else None


def is_optional(schema: type, path: str) -> bool:
    """Whether the key at `path` (dotted) is a block that null turns off (`optional`)."""
    *blocks, name = path.split(".")
    inner: type | None = schema
    for block in blocks:
        spec = inner and _field(inner, block)
        inner = spec and block_of(spec)
    spec = inner and _field(inner, name)
    return bool(spec) and "optional" in spec.metadata


def _field(schema: type, name: str) -> dataclasses.Field | None:
    """The field called `name`; the index of a list's item is ignored (`phases[1]`)."""
    return next((spec for spec in fields(schema) if spec.name == name.partition("[")[0]), None)


class Unavailable(KeyError):
    """A variant's name that is known and can't be used: the reason, and what to do. Raised by tables that import variants by name."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def suggest(word: str, known: typing.Iterable[str]) -> str:
    """A "did you mean" remedy, or the list of what is allowed; of a table that imports variants with the names that are installed."""
    known = [*known, *getattr(known, "installed", tuple)()]
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean '{close[0]}'?" if close else "choose from: " + ", ".join(known)


def build(schema: type, data: Plain, path: str, problems: list[Problem], table: Mapping[str, type] | None = None):
    """An instance of `schema`, one of `table` where a name picks it, from plain `data`; what is wrong is appended to `problems`."""
    if not isinstance(data, Mapping):
        problems.append(Problem(path, data, "must be a block of keys", "keys: " + ", ".join(f.name for f in fields(schema))))
        return schema()
    known = {f.name: f for f in fields(schema)}
    other = "it has no options: give the name of another" if not known else ""
    values = {}
    for name, value in data.items():
        where = _join(path, name)
        if name in known:
            values[name] = _field_value(known[name], value, where, problems)
        elif not (name == "name" and hasattr(schema, "name")):
            owners = [variant_name for variant_name, options in (table or {}).items() if _field(options, name)]
            owner = f"it is an option of {', '.join(owners)}: set {_join(path, 'name')}" if owners else ""
            parts = str(name).split(".")
            nested = f"nest it: {': {'.join(parts)}: ...{'}' * (len(parts) - 1)}" if len(parts) > 1 and parts[0] in known else ""
            problems.append(Problem(where, value, "unknown key", owner or other or nested or suggest(name, known)))
    return schema(**{name: value for name, value in values.items() if value is not MISSING})


def _field_value(spec: dataclasses.Field, value: Plain, path: str, problems: list[Problem]):
    if "table" in spec.metadata:
        return _build_variant(spec.metadata["table"], spec.default_factory().name, value, path, problems)
    if "list_table" in spec.metadata:
        items = value if isinstance(value, list) else [value]
        return [_build_variant(spec.metadata["list_table"], None, item, f"{path}[{index}]", problems) for index, item in enumerate(items)]
    if table := spec.metadata.get("named_table"):
        if not is_block(value):
            problems.append(Problem(path, value, "must be a map from names to blocks"))
            return MISSING
        return {name: _build_variant(table, None, item, f"{path}.{name}", problems) for name, item in value.items()}
    if "item" in spec.metadata:
        if not isinstance(value, list | None):
            problems.append(Problem(path, value, "must be a list of blocks"))
            return MISSING
        return [build(spec.metadata["item"], item, f"{path}[{index}]", problems) for index, item in enumerate(value or [])]
    if "optional" in spec.metadata and value is None:
        return None
    if block := block_of(spec):
        return build(block, value, path, problems)
    converted = convert(spec.type, value)
    if converted is MISSING:
        problems.append(Problem(path, value, f"must be {type_name(spec.type)}", _type_remedy(spec.type, value, spec.metadata["help"])))
        return MISSING
    limits = spec.metadata["limits"]
    for item in _items(converted):
        if isinstance(item, int | float) and not isinstance(item, bool) and not limits.allow(item):
            problems.append(Problem(path, value, f"must be {limits}"))
            return MISSING
    return converted


def _items(value: Plain) -> Iterator[Plain]:
    """The values of lists and maps within each other; any other value by itself."""
    if not isinstance(value, list | dict):
        yield value
    for item in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _items(item)


def is_block(value: Plain) -> bool:
    """True for a block of keys; False for a map whose keys are data, such as numbers."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _build_variant(table: Mapping[str, type], default: str | None, value: Plain, path: str, problems: list[Problem]):
    if isinstance(value, list) and "layers" in table:
        value = {"name": "layers", "of": value}
    value = {"name": value} if isinstance(value, str) else value
    if not is_block(value) or value.get("name", default) is None:
        problems.append(Problem(path, value, "must be a name or a block with a 'name'", suggest("", table)))
        return MISSING
    name = value.get("name", default)
    if not isinstance(name, str):
        problems.append(Problem(_join(path, "name"), name, "unknown name", suggest("", table)))
        return MISSING
    try:
        schema = table[name]
    except Unavailable as error:
        problems.append(Problem(_join(path, "name"), name, error.reason, error.remedy))
        return MISSING
    except KeyError:
        problems.append(Problem(_join(path, "name"), name, "unknown name", suggest(name, table)))
        return MISSING
    return build(schema, value, path, problems, table)


def convert(hint: type, value: Plain):
    """`value` as the type `hint`, or MISSING if it isn't one. Only int -> float is converted; integers have 64 bits, floats are finite."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((v for v in (convert(arg, value) for arg in args) if v is not MISSING), MISSING)
    if origin is typing.Literal:
        return value if any(value == arg and type(value) is type(arg) for arg in args) else MISSING
    if origin is list:
        items = [convert(args[0], item) for item in value] if isinstance(value, list) else [MISSING]
        return MISSING if MISSING in items else items
    if origin is dict:
        pairs = {convert(args[0], k): convert(args[1], v) for k, v in value.items()} if isinstance(value, dict) else {MISSING: MISSING}
        return MISSING if MISSING in (*pairs, *pairs.values()) else pairs
    if type(value) is int and not -(2**63) <= value < 2**63:
        return MISSING
    if hint is float and type(value) is int:
        return float(value)
    if hint is float and type(value) is float and not math.isfinite(value):
        return MISSING
    if hint is types.NoneType:
        return None if value is None else MISSING
    return value if type(value) is hint else MISSING


def type_name(hint: type) -> str:
    """The type as a user reads it, e.g. `an integer or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is typing.Literal:
        return " | ".join(_written(arg) for arg in args)
    if origin is list:
        return f"a list ({type_name(args[0])} each)"
    if origin is dict:
        return f"a map ({type_name(args[0])}: {type_name(args[1])})"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a map", types.NoneType: "null"}[hint]


def _type_remedy(hint: type, value: Plain, meaning: str) -> str:
    """Words on what to write instead; `meaning`: help of the key, which names its texts where yes or no was given."""
    literals = _literals(hint)
    unknown = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str) and item not in literals]
    if unknown and literals:
        words = [_written(arg) for arg in literals]
        return f"write {unknown[0]} without quotes" if unknown[0] in words else suggest(unknown[0], words)
    if hint is not str:
        return ""
    return meaning if isinstance(value, bool) else "quote it in the YAML"


def _written(value: str | int | bool) -> str:
    """A value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _literals(hint: type) -> tuple:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return sum((_literals(arg) for arg in typing.get_args(hint)), ())


def own_problems(block, path: str = "") -> list[Problem]:
    """The problems that the blocks of a configuration find in themselves, by full key paths.

    A block with rules beyond those of its single keys has a method `problems() -> list[Problem]`, whose paths are relative to the block.
    """
    problems = [dataclasses.replace(problem, path=_join(path, problem.path)) for problem in getattr(block, "problems", list)()]
    for spec in fields(type(block)):
        value = getattr(block, spec.name)
        items = {f"[{index}]": item for index, item in enumerate(value)} if isinstance(value, list) else {"": value}
        if "named_table" in spec.metadata:
            items = {f".{name}": item for name, item in value.items()}
        for index, item in items.items():
            if is_dataclass(item):
                problems += own_problems(item, _join(path, spec.name) + index)
    return problems


def to_plain(config) -> dict[str, Plain]:
    """The instance as nested plain data, each variant with its `name`: what `build` reads back. Without defaults that `key` omits."""
    specs = fields(type(config))
    plain = {"name": config.name} if hasattr(config, "name") and all(spec.name != "name" for spec in specs) else {}
    for spec in specs:
        value = getattr(config, spec.name)
        if spec.metadata.get("omit_default") and value == (spec.default if spec.default is not MISSING else spec.default_factory()):
            continue
        if "item" in spec.metadata or "list_table" in spec.metadata:
            plain[spec.name] = [to_plain(item) for item in value]
        elif "named_table" in spec.metadata:
            plain[spec.name] = {name: to_plain(item) for name, item in value.items()}
        else:
            plain[spec.name] = to_plain(value) if is_dataclass(value) else value
    return plain


def flatten(plain: Plain, path: str = "") -> dict[str, Plain]:
    """Nested blocks as {key path: value}; the blocks of a list by their index."""
    if isinstance(plain, list) and plain and isinstance(plain[0], dict):
        return {key: value for index, item in enumerate(plain) for key, value in flatten(item, f"{path}[{index}]").items()}
    if not isinstance(plain, dict) or not plain or not all(isinstance(name, str) for name in plain):
        return {path: plain}
    return {key: value for name, item in plain.items() for key, value in flatten(item, f"{path}.{name}" if path else name).items()}


def reference(schema: type, path: str = "", described: set[type] | None = None) -> list[tuple[str, str, str, str]]:
    """Rows (key path, type, default, description) of every key of `schema`, in order; an option of several tables once."""
    rows = []
    described = set() if described is None else described
    for spec in fields(schema):
        where = _join(path, spec.name)
        if "table" in spec.metadata:
            table = spec.metadata["table"]
            rows.append((where, " | ".join(table), spec.default_factory().name, spec.metadata["help"]))
            for name, option in table.items():
                if option not in described:
                    described.add(option)
                    rows += reference(option, f"{where}[{name}]", described)
        elif "list_table" in spec.metadata:
            rows.append((where, "a list of names or blocks", "[]", spec.metadata["help"]))
        elif "named_table" in spec.metadata:
            rows.append((where, "a map from names to blocks", "{}", spec.metadata["help"]))
        elif "item" in spec.metadata:
            rows.append((where, "a list of blocks", _yaml_flow([to_plain(item) for item in spec.default_factory()]), spec.metadata["help"]))
            rows += reference(spec.metadata["item"], f"{where}[]", described)
        elif block := block_of(spec):
            if "optional" in spec.metadata:
                rows.append((where, "a block or null", "null", spec.metadata["help"]))
            rows += reference(block, where, described)
        else:
            default = spec.default if spec.default is not MISSING else spec.default_factory()
            limits = str(spec.metadata["limits"])
            kind = type_name(spec.type) + (f", {limits}" if limits else "")
            rows.append((where, kind, _yaml_scalar(default), spec.metadata["help"]))
    return rows


def _yaml_flow(value: Plain) -> str:
    """A value as YAML on one line; a block that has only a name is written as that name."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_flow, value))}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{name}: {_yaml_flow(item)}" for name, item in value.items())
        return value["name"] if list(value) == ["name"] else "{" + inner + "}"
    return _yaml_scalar(value)


def _yaml_scalar(value: Plain) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else str(name)
