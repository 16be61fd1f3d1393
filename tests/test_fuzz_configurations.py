"""Whatever stands in a configuration, the outcome is a valid one that its YAML gives back, or an error that names what
is wrong.

Configurations are drawn from the schema itself, with hostile values among them, and texts of valid ones are mutilated.
The suite draws the same few each time; `python -m pytest tests/test_fuzz_configurations.py -m slow` draws 2,000 new
ones.
"""

import datetime
import types
import typing
from dataclasses import Field, dataclass, fields
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config.load import load_config, parse, to_yaml
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.machine import peak_process_bytes
from lm.schema import block_of, reference, to_plain

SECONDS = 5
GROWTH = 400 * 10**6  # bytes that the process may grow by
DEEP = yaml.safe_load("[" * 60 + "]" * 60)
HOSTILE = [
    *(None, True, 0, -1, 2**31, 2**63, -(2**64), 10**30, 10**400, 0.0, -0.5, 1e308, 5e-324, float("nan"), float("inf")),
    *("", " ", "\0", "\ud800", "a/b", "..", "fixed:" + "9" * 30, "1e4", "é\u2028", "x" * 5000),
    *("${name}", "${oc.env:LM_TEST_NOT_SET}", "${nothing}", "${", "${${${"),
    *([], [[]], [None], DEEP, ["softmax"] * 40, {}, {"name": []}, {"name": None}, {"name": {"name": 1}}, {"base": 1}),
    *({None: 1}, {1: 2}, {float("nan"): 1}, b"\xff", datetime.date(2020, 1, 1)),
]
SNIPPETS = [
    *(
        "\t",
        "\0",
        "{",
        "}",
        "[",
        "]",
        ":",
        "- ",
        "#",
        "&a ",
        "*a",
        "<<: *a\n",
        "? ",
        "|\n",
        ">\n",
        "'",
        '"',
        "${",
        "\\",
    ),
    *("!!python/name:os.system ", "!!binary ", "!!set ", "%YAML 9.9\n", "---\n", "...\n"),
    *("\ufeff", "\x85", "\u2028", "0x", ".nan", "1:30", "[" * 2000, "- " * 2000),
]
BASE = {"name": "x", "data": {"source": {"name": "files", "paths": ["a.txt"]}}}


# ---------------------------------------------------------------- what is drawn


def of_type(hint: type, low: float | None, high: float | None) -> st.SearchStrategy:
    """Values of a key's type, within its bounds where it has them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(arg, low, high) for arg in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(of_type(args[0], low, high), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(args[0], None, None), of_type(args[1], low, high), max_size=3)
    if hint is int:
        small = st.integers(int(low or 0), min(int(high or 2**63 - 1), int(low or 0) + 20))
        return small | st.integers(-(2**63) if low is None else int(low), 2**63 - 1 if high is None else int(high))
    if hint is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    words = st.sampled_from(
        ["train", "visible", "a.txt", "1e4", "0x1f", "null", "~", "1_0", "é", "- a", "a: b", "2020-01-01"]
    )
    return {bool: st.booleans(), str: words | st.text(max_size=8), types.NoneType: st.none()}[hint]


@dataclass
class Nothing:
    """The options of a name that no table holds."""


def of_key(spec: Field) -> st.SearchStrategy:
    """Values of a field of the schema: a block, a list of them, or what its type says."""
    many = spec.metadata.get("many")
    if (table := spec.metadata.get("table")) is not None:
        # empty: of what comes from outside
        names = st.sampled_from(sorted(table)) if table else of_type(str, None, None)
        block_of_name = names.flatmap(
            lambda name: of_block(table.get(name, Nothing)).map(lambda keys: {"name": name, **keys})
        )
        if many is dict:
            return st.dictionaries(of_type(str, None, None), block_of_name, max_size=2)
        return st.lists(block_of_name, max_size=2) if many else block_of_name | names
    if many:
        return st.lists(of_block(spec.metadata["schema"]), max_size=2)
    if block := block_of(spec):
        return of_block(block)
    limits = spec.metadata["limits"]
    lows = [limits[name] for name in ("ge", "gt") if name in limits]
    highs = [limits[name] for name in ("le", "lt") if name in limits]
    return of_type(spec.type, max(lows, default=None), min(highs, default=None))


def of_block(schema: type, most: int = 3) -> st.SearchStrategy:
    """A few keys of a schema."""
    specs = {spec.name: spec for spec in fields(schema)}
    if not specs:
        return st.just({})
    pair = st.sampled_from(sorted(specs)).flatmap(
        lambda name: st.tuples(st.just(name), of_key(specs[name]) | st.sampled_from(HOSTILE))
    )
    return st.lists(pair, max_size=most).map(dict)


KEYS = [path.replace("[]", "") for path, *_ in reference(Config) if "[" not in path.replace("[]", "")]
OVERRIDES = st.tuples(
    st.sampled_from(KEYS) | st.text(max_size=8), st.sampled_from(HOSTILE).map(repr) | st.text(max_size=12)
).map("=".join)


@st.composite
def mutilated(draw: st.DrawFn) -> str:
    """The text of a valid configuration with pieces cut out, repeated, moved or put in."""
    text = to_yaml(parse(BASE))
    for _ in range(draw(st.integers(1, 4))):
        first, last = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        last = min(last, first + draw(st.sampled_from([0, 1, 20, 500])))
        text = text[:first] + draw(st.sampled_from(["", text[first:last] * 2, *SNIPPETS])) + text[last:]
    return text


# ---------------------------------------------------------------- what must come of it


def loaded(folder: Path, text: str, *overrides: str) -> Config | None:
    """The configuration, which its resolved YAML gives back; None if it is an error that tells what is wrong."""
    path = folder / "drawn.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        config = load_config([str(path), *overrides])
    except ConfigError as error:
        lines = str(error).splitlines()
        assert 0 < len(lines) <= 32
        assert all(line.strip() and len(line) < 2000 for line in lines)
        return None
    assert config.micro_batch > 0
    # None: known with the vocabulary
    assert config.trainer.max_steps is None or len(config.phase_ends) == len(config.plan)
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config([str(path)]) == config
    assert parse(to_plain(config)) == config
    return config


FEW = st.lists(OVERRIDES, max_size=3).map(lambda overrides: [override for override in overrides if "=" in override])


@pytest.mark.parametrize("examples", [40, pytest.param(700, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(
    ("texts", "overrides", "valid"),
    [
        (of_block(Config, 6).map(lambda keys: yaml.safe_dump({**BASE, **keys})), FEW, 0.02),
        (mutilated(), st.just([]), 0.01),  # of 700 texts, 13 to 34 were valid in 23 runs
        (of_block(Config, 1).map(lambda keys: yaml.safe_dump({**BASE, **keys})), st.just([]), 0.1),
    ],
    ids=["several blocks and overrides", "a mutilated text", "one block"],
)
def test_a_configuration_is_valid_and_comes_back_or_is_an_error_that_names_what_is_wrong(
    texts, overrides, valid, examples, tmp_path
):
    successes = []

    @settings(
        max_examples=examples,
        deadline=SECONDS * 1000,
        derandomize=examples < 100,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts, overrides)
    def draw(text: str, overrides: list[str]) -> None:
        successes.append(loaded(tmp_path, text, *overrides) is not None)

    before = peak_process_bytes()
    draw()
    assert peak_process_bytes() - before < GROWTH
    assert sum(successes) >= valid * len(successes), "too few valid ones to say anything of the way back"
