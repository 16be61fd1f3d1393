"""The configuration as a JSON Schema (draft 2020-12), for editors: keys, types, bounds and descriptions of a YAML
file.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import Field

from lm.config.normalizers import Catalogue, Layers
from lm.config.tree import Config
from lm.schema import BOUNDS, Plain, fields

Schema = dict[str, Plain]

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", types.NoneType: "null"}
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{"}  # `${...}` may take the place of any value
OUTSIDE_NAME: Schema = {"type": "string", "pattern": ":"}  # the name of a plugin: `package.module:Class`


def configuration_schema() -> Schema:
    """The JSON Schema of a configuration file, with each block under `$defs`; it can't express contradictions between
    keys.
    """
    definitions: dict[str, Schema] = {}
    root = _block(Config, definitions)
    base = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    properties = next(iter(definitions.values()))["properties"]
    properties["base"] = {**base, "description": "files whose keys these are laid on"}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "A configuration of lm", **root, "$defs": definitions}


def _block(schema: type, definitions: dict[str, Schema], name: str | None = None) -> Schema:
    """A reference to the JSON Schema, in `definitions`, of a block whose keys are the fields of `schema`; if `name` is
    given, a key `name` has this value.
    """
    # classes of the same name in different modules stay apart
    title = f"{schema.__module__.rpartition('.')[2]}.{schema.__name__}"
    if title not in definitions:
        definitions[title] = {}  # for a block that contains itself
        properties = {"name": {"const": name}} if name else {}
        for spec in fields(schema):
            properties[spec.name] = {"description": spec.metadata["help"], **_value(spec, definitions)}
        definitions[title] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"$ref": f"#/$defs/{title}"}


def _value(spec: Field, definitions: dict[str, Schema]) -> Schema:
    table, block, container = (spec.metadata.get(name) for name in ("table", "schema", "many"))
    if table is None and block is None:
        return _interpolable(_type(spec.type, spec.metadata["limits"]))
    value = _block(block, definitions) if block else _variant(table, spec.metadata.get("default"), definitions)
    if container is dict:
        return {"type": "object", "additionalProperties": value}
    if container is list:
        items = {"type": "array", "items": value}
        return items if block else {"anyOf": [items, value]}
    return {"anyOf": [value, {"type": "null"}]} if "optional" in spec.metadata else {"allOf": [value]}


def _interpolable(value: Schema) -> Schema:
    """Extend the JSON Schema `value` to accept an interpolation `${...}` as well."""
    return {"anyOf": [value, INTERPOLATION]}


def _variant(table: Mapping[str, type], default: str | None, definitions: dict[str, Schema]) -> Schema:
    """The JSON Schema of a choice of a class in `table`: its name, or a block of its options; a block without `name`
    means `default`.
    """
    options: list[Plain] = [{"enum": list(table)}, INTERPOLATION] if table else [INTERPOLATION]
    for name, schema in table.items():
        reference = _block(schema, definitions, name)
        options.append(reference if name == default else {**reference, "required": ["name"]})
    if Layers.name in table:
        layer_table = {name: schema for name, schema in table.items() if name != Layers.name}
        options.append({"type": "array", "items": _variant(layer_table, None, definitions), "minItems": 1})
    if isinstance(table, Catalogue):  # plugins may be named, too
        options += [OUTSIDE_NAME, {"type": "object", "properties": {"name": OUTSIDE_NAME}, "required": ["name"]}]
    return {"anyOf": options}


def _type(hint: type, limits: dict[str, float]) -> Schema:
    """The JSON Schema of a value of type `hint` within `limits`; in a list or map, each item must be within
    `limits`.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(argument, limits) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _interpolable(_type(arguments[0], limits))}
    if origin is dict:
        return {"type": "object", "additionalProperties": _interpolable(_type(arguments[1], limits))}
    bounds = {BOUNDS[name][2]: bound for name, bound in limits.items()} if hint in (int, float) else {}
    return {"type": TYPES[hint], **bounds}
