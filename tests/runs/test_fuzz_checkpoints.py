"""Damaged checkpoints, exports and run folders: an error of one line or the same result, soon, and never a traceback.

The manifest has the sha256 of every file: what is read of them is what was written, or refused. A log may grow, and a
stranger's checkpoint or export may say anything: of them only the form of the outcome is checked.

python -m pytest tests/runs/test_fuzz_checkpoints.py -m "slow or not slow"       damages 300 files more
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from folders import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import record

import lm
from lm.config.load import load_config
from lm.config.tree import Config
from lm.data.prepare import prepare
from lm.data.store import Store
from lm.errors import LMError
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import read_config
from lm.runs.loading import export
from lm.runs.record import read_run
from lm.training.optimizers import saved_state
from lm.training.starting import resume_or_branch
from lm.training.train import train

SECONDS = 5.0  # of processor time that a damaged file may take
SHORT = ["trainer.max_steps=4", "trainer.checkpoint_every=2", "eval.long_context.length_factor=0"]
PROBLEMS = ("2 problems", "3 problems", "4 problems")  # of a configuration, one a line
MISSING = object()
VALUES = [MISSING, None, [], [1], "x", 10**30, -1, 0.5, {}, {"a": [1]}, True]


class Finished:
    """A finished run `a` and its export, what reads them, and what that gave before anything was damaged."""

    def __init__(self, folder: Path, config: Config, store: Store):
        self.run, self.exported, self.config, self.store = folder / "a", folder / "exported", config, store
        self.checkpoint = self.run / "checkpoints" / "last.ckpt"
        readable = (".json", ".jsonl", ".yaml")
        self.files = sorted(
            path for path in folder.rglob("*") if path.suffix in readable and path.parent.name != "cache"
        )
        self.before = {
            path: path.read_bytes() for path in (*self.files, self.checkpoint, self.exported / "model.safetensors")
        }
        self.intact = self.models()

    def models(self) -> list[object]:
        """What checkpoint and export hold: weights, and what is known of them."""
        return [self.resumed(), *(self.loaded(path) for path in (self.run, self.exported))]

    def loaded(self, path: Path) -> tuple[dict[str, torch.Tensor], list[object]]:
        """A model read back."""
        model = lm.load(path)
        return model.decoder.state_dict(), [model.config, model.spec, model.metadata]

    def resumed(self) -> tuple[dict[str, torch.Tensor], list[object]]:
        """What training would go on from."""
        checkpoint = load_checkpoint(self.checkpoint)
        start, *_ = resume_or_branch(self.config, self.store, checkpoint, self.checkpoint)
        states = saved_state(start.content).items()
        moments = {f"{name}.{key}": value for name, state in states for key, value in state.items()}
        return start.content["state_dict"] | moments, [start.step, start.phase, start.state]

    def reported(self) -> None:
        """What a report reads."""
        read_run(self.run)
        read_config(self.run)

    def check(self, damaged: Path, content: bytes | Callable[[], object]) -> None:
        """Put `content` in place of a file, or let it be written, use it in every way, and put the file back."""
        uses = {
            self.checkpoint: [(self.resumed, self.intact[0]), (lambda: self.loaded(self.run), self.intact[1])],
            self.exported: [(lambda: self.loaded(self.exported), self.intact[2])],
            self.run: [(lambda: self.loaded(self.run), self.intact[1]), (self.reported, None)],
        }
        key = next(key for key in uses if key in (damaged, *damaged.parents))
        try:
            damaged.unlink()
            damaged.write_bytes(content) if isinstance(content, bytes) else content()
            for use, intact in uses[key] if isinstance(content, bytes) else uses[key][-1:]:
                start = time.process_time()
                error, results = outcome(use)
                assert "\n" not in error or error.startswith(PROBLEMS)
                assert error or not isinstance(content, bytes) or intact is None or equal(results, intact)
                assert time.process_time() - start < SECONDS
        finally:
            damaged.unlink(missing_ok=True)
            damaged.write_bytes(self.before[damaged])


def outcome(use: Callable[[], object]) -> tuple[str, object]:
    """An error's text, or what was found."""
    try:
        return "", use()
    except LMError as error:
        return str(error), None


def equal(
    results: tuple[dict[str, torch.Tensor], list[object]], other_results: tuple[dict[str, torch.Tensor], list[object]]
) -> bool:
    return same(results[0], other_results[0]) and results[1] == other_results[1]


@pytest.fixture(scope="module")
def finished(corpus: Path, store_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("fuzzed")
    options = [f"data.source.paths=[{corpus}]", f"data.root={store_root}", f"runs={folder}", "name=a", *SHORT]
    config = load_config([str(ROOT / "tests" / "tiny.yaml"), *options])
    train(config)
    export(config.run_folder, "last", folder / "exported")
    return Finished(folder, config, prepare(config.data, progress=False))


def places(content: object, path: tuple = ()) -> Iterator[tuple]:
    """The places of all entries of nested maps, and of the first entry of each list."""
    entries = (
        content.items()
        if isinstance(content, dict)
        else list(enumerate(content))[:1]
        if isinstance(content, list)
        else ()
    )
    for name, value in entries:
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


def damage_bytes(finished: Finished, file: float, place: float, mask: int) -> None:
    """One file: a byte flipped by `mask`, or with 0 the rest cut off."""
    path = list(finished.before)[int(file * len(finished.before))]
    content = finished.before[path]
    index = min(int(place * len(content)), len(content) - 1)
    flipped = bytes([content[index] ^ mask]) + content[index + 1 :] if mask else b""
    finished.check(path, content[:index] + flipped)


def damage_field(finished: Finished, file: float, place: float, value: object) -> None:
    """A checkpoint or an export's lm.json, written again with its line in the manifest: an entry set to something else,
    or missing.
    """
    path = [finished.checkpoint, finished.exported / "lm.json"][int(file * 2)]
    is_checkpoint = path == finished.checkpoint
    content = torch.load(path, weights_only=True) if is_checkpoint else json.loads(path.read_text())
    paths = list(places(content))
    content = changed(content, paths[int(place * len(paths))], value)

    def write() -> None:
        torch.save(content, path) if is_checkpoint else path.write_text(json.dumps(content))
        record(finished.run if is_checkpoint else finished.exported)

    finished.check(path, write)


FRACTION = st.floats(0, 1, exclude_max=True)
FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@settings(FUZZ, max_examples=40)
@given(FRACTION, FRACTION, st.integers(0, 255))
def test_a_damaged_byte_is_one_line_or_no_difference(finished: Finished, file: float, place: float, mask: int):
    damage_bytes(finished, file, place, mask)


@settings(FUZZ, max_examples=30)
@given(FRACTION, FRACTION, st.sampled_from(VALUES))
def test_a_field_that_is_missing_or_mistyped_is_one_line(finished: Finished, file: float, place: float, value: object):
    damage_field(finished, file, place, value)


@pytest.mark.slow
@settings(FUZZ, max_examples=150)
@given(FRACTION, FRACTION, st.integers(0, 255), st.sampled_from(VALUES))
def test_many_damaged_files_are_one_line_each(finished: Finished, file: float, place: float, mask: int, value: object):
    damage_bytes(finished, file, place, mask)
    damage_field(finished, place, file, value)
