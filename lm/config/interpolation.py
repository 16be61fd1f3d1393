"""`${...}` in a user's configuration: the values of other keys and of environment variables."""

import os
import re
from dataclasses import MISSING

from lm.config.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_NODES, dump_yaml, parse_yaml
from lm.errors import ConfigError, abbreviated
from lm.schema import Plain


def interpolated(plain: dict[str, Plain]) -> dict[str, Plain]:
    """The user's own keys, with the interpolations in their values replaced.

    `${key.path}` is the value of another key, `${oc.env:NAME}` an environment variable and `${oc.env:NAME,default}` the same with a
    default, `${oc.decode:text}` what a text means in YAML. A value that is nothing but an interpolation keeps the type of what it names.
    Configurations of checkpoints and exports are data, and are never interpolated: they could read the user's environment.

    Raises:
        ConfigError: an interpolation names nothing or itself, or the result is too large.
    """
    found = _Interpolation(plain).value(plain)
    if _size(found, {}) > MAX_NODES:
        raise ConfigError(f"the configuration has more than {MAX_NODES:,} keys and values once `${{...}}` are replaced")
    return found


class _Interpolation:
    """Values expanded once each: a value that is named twice is shared, so that repeated doubling takes neither time nor memory."""

    def __init__(self, plain: dict[str, Plain]):
        self.plain = plain
        self.known: dict[str | int, Plain] = {}  # by text, or by the id of a block or list of `plain`
        self.pending: list[str | int] = []
        self.written = 0  # characters of the texts that were composed

    def value(self, raw: Plain) -> Plain:
        """What a value of the tree stands for."""
        if not (isinstance(raw, dict | list) or (isinstance(raw, str) and "${" in raw)):
            return raw
        name = raw if isinstance(raw, str) else id(raw)
        if name not in self.known:
            _require(name not in self.pending, raw, "refers to itself")
            _require(len(self.pending) < 2 * MAX_DEPTH, raw, f"is {2 * MAX_DEPTH} references and blocks deep")
            self.pending.append(name)
            if isinstance(raw, str):
                self.known[name] = self.expanded(raw)
            else:
                self.known[name] = (
                    [self.value(item) for item in raw] if isinstance(raw, list) else {k: self.value(v) for k, v in raw.items()}
                )
            self.pending.pop()
        return self.known[name]

    def expanded(self, text: str) -> Plain:
        """A text with its interpolations replaced, the inner ones first."""
        nested: list[list[Plain]] = [[]]  # pieces of the text, and of each interpolation that is open
        for piece in re.split(r"(\$\{|\})", text):
            if piece == "${":
                nested.append([])
                _require(len(nested) <= MAX_DEPTH, text, f"has interpolations nested more than {MAX_DEPTH} deep")
            elif piece == "}" and len(nested) > 1:
                name = self.joined(nested.pop(), text)
                nested[-1].append(self.named(str(name).strip(), text))
            elif piece:
                nested[-1].append(piece)
        _require(len(nested) == 1, text, "has a `${` without its `}`")
        return self.joined(nested[0], text)

    def joined(self, pieces: list[Plain], text: str) -> Plain:
        """A piece that stands alone as it is, several as text."""
        if len(pieces) == 1:
            return pieces[0]
        _require(not any(isinstance(piece, dict | list) for piece in pieces), text, "puts a block or list into a text")
        joined = "".join(piece if isinstance(piece, str) else dump_yaml(piece).split()[0] for piece in pieces)
        self.written += len(joined)
        _require(self.written <= MAX_BYTES, text, f"makes the configuration larger than {MAX_BYTES:,} characters")
        return joined

    def named(self, name: str, text: str) -> Plain:
        """The value of an interpolation within `text`, by what stands in its braces."""
        kind, _, rest = name.partition(":")
        if kind == "oc.decode":
            return parse_yaml(rest, text)
        if kind == "oc.env":
            variable, comma, default = (part.strip() for part in rest.partition(","))
            found = os.environ.get(variable, default if comma else None)
            _require(found is not None, text, f"needs the environment variable {variable}, which is not set")
            _require("${" not in found, text, f"names the environment variable {variable}, which holds a `${{`")
            return found
        value: Plain = self.plain
        for part in name.split("."):
            value = _item(self.value(value) if isinstance(value, str) else value, part)
            _require(value is not MISSING, text, f"refers to {name}, which is no key")
        return self.value(value)


def _require(true: bool, raw: Plain, otherwise: str) -> None:
    if not true:
        raise ConfigError(f"{abbreviated(str(raw), 80)}: {otherwise}")


def _item(value: Plain, name: str) -> Plain:
    """The item of a block or list that a part of a path names; MISSING if there is none."""
    if isinstance(value, list) and re.fullmatch("[0-9]{1,9}", name):
        return value[int(name)] if int(name) < len(value) else MISSING
    if not isinstance(value, dict):
        return MISSING
    return value[name] if name in value else next((item for key, item in value.items() if str(key) == name), MISSING)


def _size(value: Plain, known: dict[int, int]) -> int:
    """Keys and values within a value, with whatever is shared counted wherever it stands."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 1 + sum(_size(item, known) for item in (value.values() if isinstance(value, dict) else value))
    return known[id(value)]
