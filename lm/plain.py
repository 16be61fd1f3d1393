"""Functions on plain data, which YAML and JSON can hold: values, lists and maps. They also convert dataclasses to plain
data.
"""

import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass

from lm.errors import yaml_scalar

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def is_config_block(value: Plain) -> bool:
    """Return whether `value` may be a block of keys: a map whose keys are all texts."""
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def join_path(path: str, name: str) -> str:
    """Return the dotted path of the key `name` in the block at `path`, which is empty for the outermost block."""
    return f"{path}.{name}" if path else str(name)


def direct_items_with_paths(value: Plain, path: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield (path, item) for each item of a list or map at `path`. For another value, yield this value as the only
    item.
    """
    if isinstance(value, list):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((join_path(path, name), item) for name, item in value.items())
    else:
        yield path, value


def flatten(plain: Plain, path: str = "") -> dict[str, Plain]:
    """Flatten nested blocks into {key path: value}. The path of a block in a list contains its index (`a[0].b`)."""
    if not plain or not (is_config_block(plain) or (isinstance(plain, list) and isinstance(plain[0], dict))):
        return {path: plain}
    return {
        key: value
        for item_path, item in direct_items_with_paths(plain, path)
        for key, value in flatten(item, item_path).items()
    }


def distinct_names(blocks: list[dict[str, Plain]]) -> list[str]:
    """Return a name for each of `blocks`, for example `mqar (pairs 8)` for a task. It is the block's key `name` and, in
    brackets, the options that differ between blocks of one name.
    """
    names = []
    for block in blocks:
        namesakes = [namesake for namesake in blocks if namesake["name"] == block["name"]]
        differing_keys = [key for key in block if any(namesake.get(key) != block[key] for namesake in namesakes)]
        options = ", ".join(
            f"{key} {str(block[key]).lower() if isinstance(block[key], bool) else block[key]}" for key in differing_keys
        )
        names.append(f"{block['name']} ({options})" if options else block["name"])
    return names


def converted_or_missing(value_type: type, value: Plain):
    """Return `value` as type `value_type`; only int is converted to another type, float.

    Return MISSING if `value` can't have the type. This is so if the types differ, an int exceeds 64 bits, a float isn't
    finite, or a text has a NUL, which no file name can hold.
    """
    origin, args = typing.get_origin(value_type), typing.get_args(value_type)
    if origin in (typing.Union, types.UnionType):
        return next((v for v in (converted_or_missing(arg, value) for arg in args) if v is not MISSING), MISSING)
    if origin is typing.Literal:
        return value if any(value == arg and type(value) is type(arg) for arg in args) else MISSING
    if origin is list and isinstance(value, list):
        content = [converted_or_missing(args[0], item) for item in value]
        return MISSING if MISSING in content else content
    if origin is dict and isinstance(value, dict):
        parts = [
            converted_or_missing(list[arg], [*part]) for arg, part in zip(args, (value, value.values()), strict=True)
        ]
        return MISSING if MISSING in parts else dict(zip(*parts, strict=True))
    if type(value) is int and -(2**63) <= value < 2**63 and value_type in (int, float):
        return value_type(value)
    is_odd = type(value) is int or (type(value) is float and not math.isfinite(value)) or "\0" in str(value)
    return value if type(value) is value_type and not is_odd else MISSING


def type_name(value_type: type) -> str:
    """Return a type in words for users, e.g. `an integer or null`."""
    origin, args = typing.get_origin(value_type), typing.get_args(value_type)
    if origin is typing.Literal:
        return " | ".join(map(yaml_scalar, args))
    words = {list: "a list ({} each)", dict: "a map ({}: {})"}.get(origin) or " or ".join("{}" for _ in args)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a map"}
    return words.format(*map(type_name, args)) or names.get(value_type, "null")


def to_plain(value, include_omittable_keys: bool = False) -> Plain:
    """Convert a configuration to nested plain data: dicts, lists and scalars. A configuration is a dataclass whose
    fields are made with `lm.attention.options.key`. Lists and maps may contain such dataclasses.

    A block whose dataclass has a `name`, such as `ssmax`, gets the key `name`. Keys made with `omit_default` are left
    out while they have their default, unless `include_omittable_keys` is true.
    """
    if isinstance(value, list):
        return [to_plain(item, include_omittable_keys) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item, include_omittable_keys) for name, item in value.items()}
    if not is_dataclass(value):
        return value
    specs = fields(value)
    plain = {"name": value.name} if hasattr(value, "name") and all(spec.name != "name" for spec in specs) else {}
    for spec in specs:
        item = getattr(value, spec.name)
        if include_omittable_keys or not spec.metadata.get("omit_default") or item != field_default(spec):
            plain[spec.name] = to_plain(item, include_omittable_keys)
    return plain


def field_default(dataclass_field: Field) -> object:
    """Return the default of a dataclass's field."""
    return dataclass_field.default if dataclass_field.default is not MISSING else dataclass_field.default_factory()


def json_value(value: object) -> Plain:
    """Return `value` as plain data for JSON: arrays and tuples become lists, numbers that are not finite become
    null.
    """
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
