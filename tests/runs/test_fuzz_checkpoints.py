"""Fields of a stranger's checkpoint or export that are missing or mistyped: an error of one line, soon, or a model.

python -m pytest tests/runs/test_fuzz_checkpoints.py -m "slow or not slow"       changes 150 fields more
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from folders import last_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import record_files

import lm
from lm.config.load import load_config
from lm.config.tree import Config
from lm.errors import LMError
from lm.runs.loading import export
from lm.training.train import train

SECONDS = 5.0  # of processor time that a damaged file may take
SHORT = ["trainer.max_steps=4", "trainer.checkpoint_every=2", "eval.long_context.length_factor=0"]
PROBLEMS = ("2 problems", "3 problems", "4 problems")  # of a configuration, one a line
MISSING = object()
VALUES = [MISSING, None, [], [1], "x", 10**30, -1, 0.5, {}, {"a": [1]}, True]


@pytest.fixture(scope="module")
def config(corpus: Path, store_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The configuration of a finished run, whose export lies in its folder."""
    options = [f"data.source.paths=[{corpus}]", f"data.root={store_root}", "name=a", *SHORT]
    config = load_config([str(ROOT / "tests" / "tiny.yaml"), *options, f"runs={tmp_path_factory.mktemp('fuzzed')}"])
    train(config)
    export(config.run_folder, "last", config.run_folder / "exported")
    return config


def places(content: object, path: tuple = ()) -> Iterator[tuple]:
    """The places of all entries of nested maps, and of the first entry of each list."""
    is_map = isinstance(content, dict)
    for name, value in content.items() if is_map else list(enumerate(content))[:1] if isinstance(content, list) else ():
        yield (*path, name)
        yield from places(value, (*path, name))


def changed(content: object, place: tuple, value: object) -> object:
    """A copy with the entry at a place set, or without it."""
    content = copy.deepcopy(content)
    block = content
    for name in place[:-1]:
        block = block[name]
    if value is MISSING:
        del block[place[-1]]
    else:
        block[place[-1]] = value
    return content


def check(use: Callable[[], object]) -> None:
    """Call `use`: it ends soon, well or with an error of one line."""
    start, error = time.process_time(), ""
    try:
        use()
    except LMError as raised:
        error = str(raised)
    assert "\n" not in error or error.startswith(PROBLEMS)
    assert time.process_time() - start < SECONDS


def change_field(config: Config, of_checkpoint: bool, place: float, value: object) -> None:
    """Set an entry of the last checkpoint, or of an export's lm.json, to something else, or leave it out, with its line
    in the manifest.
    """
    run, exported = config.run_folder, config.run_folder / "exported"
    path = last_checkpoint(run) if of_checkpoint else exported / "lm.json"
    before = path.read_bytes()
    content = torch.load(path, weights_only=True) if of_checkpoint else json.loads(before)
    paths = list(places(content))
    content = changed(content, paths[int(place * len(paths))], value)
    path.unlink()
    try:
        torch.save(content, path) if of_checkpoint else path.write_text(json.dumps(content))
        record_files(run if of_checkpoint else exported)
        check(lambda: lm.load(run if of_checkpoint else exported))
    finally:
        path.unlink()
        path.write_bytes(before)


FRACTION = st.floats(0, 1, exclude_max=True)
FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@settings(FUZZ, max_examples=30)
@given(st.booleans(), FRACTION, st.sampled_from(VALUES))
def test_a_field_that_is_missing_or_mistyped_is_one_line(config: Config, of_checkpoint: bool, place: float, value):
    change_field(config, of_checkpoint, place, value)


@pytest.mark.slow
@settings(FUZZ, max_examples=150)
@given(st.booleans(), FRACTION, st.sampled_from(VALUES))
def test_many_fields_are_one_line_each(config: Config, of_checkpoint: bool, place: float, value):
    change_field(config, of_checkpoint, place, value)
