"""Converts YAML text to plain data and back, and resolves interpolations `${...}` with OmegaConf, for configuration
files and override values.

Size, depth and expansion of a text are bounded, since a text may come from a stranger.
"""

import math
import os
import re
from collections.abc import Mapping

import yaml
from omegaconf import OmegaConf
from omegaconf._yaml import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from lm.errors import ConfigError, Problem, abbreviate, one_line, value_text
from lm.plain import Plain

MAX_BYTES = 2**19  # size of a text
MAX_NODES = 10_000  # keys and values in a text, with aliases expanded
MAX_DEPTH = 50  # nesting of blocks and lists
_UNICODE_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_Loader = get_yaml_loader(max_yaml_expanded_nodes=MAX_NODES)  # `1e-3` is a number, a repeated key an error
_INTEGER_TAG = "tag:yaml.org,2002:int"
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != _INTEGER_TAG]
    for letter, resolvers in _Loader.yaml_implicit_resolvers.items()
}
# In YAML 1.1, 010 is 8 and 1:30 is 90; both are texts here.
_Loader.add_implicit_resolver(
    _INTEGER_TAG, re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), [*"-+0123456789"]
)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that OmegaConf and other readers read back: texts that look like numbers or dates are quoted, and no
    value is an alias.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        letter: [*yaml.SafeDumper.yaml_implicit_resolvers.get(letter, ()), *resolvers]
        for letter, resolvers in _Loader.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: object) -> bool:
        """Return True: every value is written in full."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return the YAML node of `text`. Unicode line breaks are written as escapes in quotes: PyYAML would read them
        back as spaces.
        """
        return self.represent_scalar(
            "tag:yaml.org,2002:str", text, style='"' if _UNICODE_LINE_BREAKS.search(text) else None
        )

    def represent_other(self, value: object) -> yaml.Node:
        """Return the YAML node of a mapping, a path or a NumPy number."""
        if isinstance(value, Mapping):
            return self.represent_dict(value)
        if isinstance(value, os.PathLike):
            return self.represent_text(os.fspath(value))
        return self.represent_data(value.item()) if hasattr(value, "item") else self.represent_undefined(value)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_multi_representer(object, _Dumper.represent_other)


def parse_yaml(text: str | bytes, source: str) -> Plain:
    """Parse a YAML text (in UTF-8) and return its plain data; None if the text is empty.

    Raises ConfigError: the text is not valid YAML, holds more than plain data, or is too large or too deep; `source` is
    the text's name.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES:,} bytes, which is no configuration")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # before the parser calls itself for each level, in C
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise yaml.MarkedYAMLError(
                    problem=f"is nested more than {MAX_DEPTH} deep", problem_mark=event.start_mark
                )
        return yaml.load(text, Loader=_Loader)
    # ValueError and LookupError: bytes that are no UTF-8, tags on unsuitable text, such as !!int x
    except (yaml.YAMLError, ValueError, LookupError) as error:
        reason = one_line(error).replace('in "<unicode string>", ', "at ").partition(". See ")[0]
        raise ConfigError(f"{source}: not valid YAML: {reason}") from None


def dump_yaml(plain_data: Plain) -> str:
    """Write plain data as YAML, from which `parse_yaml` returns the same data."""
    return yaml.dump(plain_data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def yaml_flow(value: object) -> str:
    """Return a value as YAML on one line; paths become texts, NumPy numbers become numbers."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=math.inf
    )
    return text.removesuffix("\n...\n").strip("\n")


def yaml_override(key: str, value: object) -> str:
    """Return the override `KEY=VALUE` of a command line. Raises ConfigError: YAML can't represent the value."""
    try:
        return f"{key}={yaml_flow(value)}"
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{key}: {abbreviate(value_text(str(value)), 80)}: is no plain value: {one_line(error, 80)}"
        ) from None


# ---------------------------------------------------------------- interpolation


def resolve_interpolations(config_dict: dict[str, Plain]) -> dict[str, Plain]:
    """Return a configuration that a user wrote, with the interpolations `${...}` in its values resolved.

    Configurations of checkpoints and exports are never resolved: `${...}` could read the user's environment variables.

    Raises ConfigError: an interpolation can't be resolved, or a value is `???`, which must be replaced.
    """
    if not re.search(r"\$\{|\?{3}", str(config_dict)):  # OmegaConf takes several times as long as all that follows
        return config_dict
    try:
        config = OmegaConf.create(config_dict)
        if missing_paths := OmegaConf.missing_keys(config):
            raise ConfigError(
                [Problem(path, "???", "must be given", "replace ??? by a value") for path in sorted(missing_paths)]
            )
        return OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        reason = (
            one_line(error)
            .partition(" full_key: ")[0]
            .rpartition(" raised while resolving interpolation: ")[2]
            .strip('"')
        )
        key = getattr(error, "full_key", None) or "the configuration"
        raise ConfigError(f"{abbreviate(key, 80)}: {reason} (an interpolation ${{...}} sees given keys only)") from None
