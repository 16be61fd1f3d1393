"""Whatever stands in a configuration, the outcome is a valid one that its YAML gives back, or an error that names what
is wrong.

Keys are drawn from the reference, with hostile values among others.
The suite draws the same few each time; `python -m pytest tests/config/test_fuzz_configurations.py -m slow` draws
2,000 new ones.
"""

import datetime
import functools
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config.load import load_config, parse_config, to_yaml
from lm.config.reference import reference_rows
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.machine import peak_process_bytes
from lm.plain import Plain, to_plain

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
BASE = {"name": "x", "data": {"source": {"name": "files", "paths": ["a.txt"]}}}


# ---------------------------------------------------------------- what is drawn


WORDS = ["train", "visible", "a.txt", "1e4", "0x1f", "null", "~", "1_0", "é", "- a", "a: b", "2020-01-01", "softmax"]
NUMBERS = st.integers(0, 300) | st.floats(0, 2)
VALUES = NUMBERS | st.booleans() | st.sampled_from(WORDS) | st.text(max_size=8) | st.lists(NUMBERS, max_size=3)


def nested(path: str, value: Plain) -> Plain:
    """A configuration in which the key of a row of the reference has a value."""
    for part in reversed(path.split(".")):
        name, *suffixes = re.findall(r"[^\[\]]+|\[\]", part)
        for suffix in reversed(suffixes):  # a key of several choices: of the first
            value = [value] if suffix == "[]" else {"name": suffix.partition(",")[0]} | value
        value = {name: value}
    return value


def laid(base: Plain, changes: Plain) -> Plain:
    """Plain data with changes laid on their blocks."""
    are_blocks = isinstance(base, dict) and isinstance(changes, dict)
    return {**base, **{name: laid(base.get(name), value) for name, value in changes.items()}} if are_blocks else changes


def keys(most: int) -> st.SearchStrategy[str]:
    """Texts in which up to `most` keys have their defaults, values of any type or hostile ones."""
    pair = st.sampled_from(reference_rows(Config)).flatmap(
        lambda row: (st.just(yaml.safe_load(row[2])) | VALUES | st.sampled_from(HOSTILE)).map(
            lambda value: nested(row[0], value)
        )
    )
    return st.lists(pair, max_size=most).map(lambda blocks: yaml.safe_dump(functools.reduce(laid, blocks, BASE)))


# ---------------------------------------------------------------- what must come of it


def loaded(folder: Path, text: str) -> Config | None:
    """The configuration, which its resolved YAML gives back; None if it is an error that tells what is wrong."""
    path = folder / "drawn.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        config = load_config([str(path)])
    except ConfigError as error:
        lines = str(error).splitlines()
        assert 0 < len(lines) <= 32
        assert all(line.strip() and len(line) < 2000 for line in lines)
        return None
    assert config.micro_batch > 0
    # None: known with the vocabulary
    assert config.trainer.max_steps is None or len(config.phase_ends) == len(config.phases_or_default)
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config([str(path)]) == config
    assert parse_config(to_plain(config)) == config
    return config


@pytest.mark.parametrize("examples", [40, pytest.param(700, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(("most", "valid"), [(6, 0.02), (1, 0.1)], ids=["several keys", "one key"])
def test_a_configuration_is_valid_and_comes_back_or_is_an_error_that_names_what_is_wrong(
    most: int, valid: float, examples: int, tmp_path: Path
):
    successes = []

    @settings(
        max_examples=examples,
        deadline=SECONDS * 1000,
        derandomize=examples < 100,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(keys(most))
    def draw(text: str) -> None:
        successes.append(loaded(tmp_path, text) is not None)

    before = peak_process_bytes()
    draw()
    assert peak_process_bytes() - before < GROWTH
    assert sum(successes) >= valid * len(successes), "too few valid ones to say anything of the way back"
