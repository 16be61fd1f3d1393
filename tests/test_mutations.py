"""Whether the tests of normalizers would notice: each mutation of the source, in a copy of it, must make one of them fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TESTS = ("tests/test_definitions.py", "tests/test_autocast.py")

MUTATIONS = {one.pop("what"): one for one in yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text())}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source and its tests; each mutation is undone after its test."""
    tree = tmp_path_factory.mktemp("mutated")
    for part in ("lm", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def failing(tree: Path) -> tuple[bool, str]:
    """Whether some test fails, and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.returncode == 1, result.stdout


@pytest.mark.slow
def test_what_is_not_mutated_passes(copied: Path):
    failed, said = failing(copied)
    assert not failed, said


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_mutation_is_noticed(copied: Path, what: str):
    file, old, new = MUTATIONS[what].values()
    path = copied / "lm" / file
    source = path.read_text()
    path.write_text(source.replace(old, new))
    try:
        failed, said = failing(copied)
    finally:
        path.write_text(source)
    assert failed, said


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_text_that_a_mutation_replaces_is_there_once(what: str):
    file, old, new = MUTATIONS[what].values()
    assert (ROOT / "lm" / file).read_text().count(old) == 1
    assert old != new
