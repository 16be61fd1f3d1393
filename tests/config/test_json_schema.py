"""The JSON Schema of the configuration: it takes what loading takes, and refuses wrong keys, names and values."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, lm

from lm.config.load import parse_config, read_yaml
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError
from lm.plain import Plain, to_plain

jsonschema = pytest.importorskip("jsonschema")

FILES = [
    path
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if "arms" not in parse_yaml(path.read_bytes(), path.name)
]


@pytest.fixture(scope="module")
def validator():
    result = lm("config", "--schema")
    assert result.returncode == 0, result.stderr
    schema = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_every_configuration_of_ours_is_valid(validator, path: Path):
    for plain in (parse_yaml(path.read_bytes(), path.name), read_yaml(path)):
        assert [error.message for error in validator.iter_errors(plain)] == []


def test_the_configuration_that_a_run_writes_is_valid(validator, tiny):
    assert [error.message for error in validator.iter_errors(to_plain(tiny("name=a")))] == []


WRONG = [
    {"optm": {}},
    {"optim": {"lr": -1}},
    {"optim": {"lr": "fast"}},
    {"optim": {"schedule": {"name": "wsd", "decay_fractio": 0.1}}},
    {"model": {"normalizer": "ssmx"}},
    {"model": {"normalizer": {"name": "ssmax", "temprature": 2}}},
    {"model": {"normalizer": []}},
    {"trainer": {"precision": 16}},
    {"trainer": {"max_steps": 2.5}},
    {"log": {"to": [1]}},
    {"phases": [{"untl": 1}]},
    {"eval": {"texts": {"of": {"a": {"name": "nothing"}}}}},
]
RIGHT = [
    {"model": {"normalizer": ["window", "ssmax", {"name": "ssmax", "bias": True}]}},
    {"optim": {"schedule": {"final_fraction": 0.2}}},
    {"eval": {"texts": {"of": {"a": {"name": "files", "paths": ["x"]}}}, "needle": {"length_factors": [1, 2]}}},
    {"trainer": {"precision": 32, "tokens_per_parameter": 20}},
    {"data": {"lengths": {"name": "mixed", "weights": {32: 1.0}}, "seq_len": 32}, "optim": {"batch_tokens": 32}},
]


@pytest.mark.parametrize("plain", WRONG, ids=str)
def test_what_loading_refuses_is_invalid(validator, plain: dict[str, Plain]):
    with pytest.raises(ConfigError):
        parse_config({"name": "a", "trainer": {}, **plain})
    assert not validator.is_valid(plain)


@pytest.mark.parametrize("plain", RIGHT, ids=str)
def test_what_loading_takes_is_valid(validator, plain: dict[str, Plain]):
    parse_config({"name": "a", "trainer": {}, **plain})
    assert [error.message for error in validator.iter_errors(plain)] == []


def test_what_is_interpolated_and_normalizers_from_outside_are_valid(validator):
    content = {
        "seed": "${oc.env:SEED}",
        "base": ["a.yaml"],
        "model": {"normalizer": {"name": "package.module:Class", "own": 1}},
    }
    content |= {
        "data": {"lengths": {"name": "mixed", "weights": {32: "${seed}"}}},
        "eval": {"swap_lengths": [1, "${seed}"]},
    }
    assert [error.message for error in validator.iter_errors(content)] == []
