"""The configuration as a JSON Schema (draft 2020-12), for editors: keys, types, bounds, descriptions of a YAML file."""

import types
import typing
from dataclasses import Field

from lm.config.normalizers import Catalogue, Layers
from lm.config.tree import Config
from lm.plain import Plain
from lm.schema import fields

Schema = dict[str, Plain]
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object", types.NoneType: "null"}
BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{"}  # `${...}` may take the place of any value
OUTSIDE_NAME: Schema = {"type": "string", "pattern": ":"}  # the name of a plugin: `package.module:Class`


def configuration_schema() -> Schema:
    """Return the JSON Schema of a configuration file, each block under `$defs`, without contradictions between keys."""
    definitions: dict[str, Schema] = {}
    root = _block(Config, definitions)
    base = {"anyOf": [{"type": "string"}, {"type": "array"}], "description": "files whose keys these are laid on"}
    next(iter(definitions.values()))["properties"]["base"] = base
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _block(schema: type, definitions: dict[str, Schema]) -> Schema:
    """Return a reference to the JSON Schema, in `definitions`, of a block whose keys are the fields of `schema`."""
    title = f"{schema.__module__.rpartition('.')[2]}.{schema.__name__}"
    if title not in definitions:
        definitions[title] = {}  # for a block that contains itself
        properties = {"name": {"const": schema.name}} if hasattr(schema, "name") else {}
        for spec in fields(schema):
            properties[spec.name] = {"description": spec.metadata["help"], **_value(spec, definitions)}
        definitions[title] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"$ref": f"#/$defs/{title}"}


def _value(spec: Field, definitions: dict[str, Schema]) -> Schema:
    """Return the JSON Schema of a field: of its plain value, or of its block, name, list or map of blocks."""
    blocks, default = spec.metadata.get("blocks"), spec.metadata.get("default")
    if not blocks:
        return _type(spec.type, spec.metadata["limits"])
    options = [
        _block(schema, definitions) | ({} if name in ("", default) else {"required": ["name"]})
        for name, schema in blocks.items()
    ]
    options += [INTERPOLATION, *([{"enum": [*blocks]}] if "" not in blocks else [])]
    if isinstance(blocks, Catalogue):  # plugins may be named, too
        options += [OUTSIDE_NAME, {"type": "object", "properties": {"name": OUTSIDE_NAME}, "required": ["name"]}]
    if isinstance(default, dict):
        return {"type": "object", "additionalProperties": {"anyOf": options}}
    if isinstance(default, list) or Layers.name in blocks:
        options.append({"type": "array", "items": {"anyOf": [*options]}, "minItems": int(default != [])})
    return {"anyOf": [*options, {"type": "null"}] if default is None else options}


def _type(hint: type, limits: dict[str, float]) -> Schema:
    """Return the JSON Schema of a value of type `hint`; its numbers, also in a list or map, must be within `limits`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(argument, limits) for argument in arguments]}
    if origin is typing.Literal:
        value = {"enum": [*arguments]}
    elif origin is list:
        value = {"type": "array", "items": _type(arguments[0], limits)}
    elif origin is dict:
        value = {"type": "object", "additionalProperties": _type(arguments[1], limits)}
    else:
        bounds = limits.items() if hint in (int, float) else ()
        value = {"type": TYPES[hint]} | {BOUNDS[name]: bound for name, bound in bounds}
    return {"anyOf": [value, INTERPOLATION]}
