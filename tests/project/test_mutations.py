"""Whether the tests would notice: each mutation of the source, in a copy of it, must make one of the tests fail that it
stands under.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

BY_TESTS = yaml.safe_load((ROOT / "tests" / "mutations.yaml").read_text())
MUTATIONS = {
    mutation.pop("what"): {**mutation, "tests": tests}
    for tests, mutations in BY_TESTS.items()
    for mutation in mutations
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source and its tests; each mutation is undone after its test."""
    tree = tmp_path_factory.mktemp("mutated")
    for part in ("lm", "scripts", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def failing(tree: Path, tests: str) -> tuple[bool, str]:
    """Whether some of the tests (paths, `::` and the test's name behind them or not) fails, and its output. A named
    test may be slow.
    """
    marked = ["-m", "not gpu"] if "::" in tests else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *marked, *tests.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return result.returncode == 1, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tests", BY_TESTS)
def test_what_is_not_mutated_passes(copied: Path, tests: str):
    failed, output = failing(copied, tests)
    assert not failed, output


@pytest.mark.slow
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_mutation_is_noticed(copied: Path, what: str):
    file, old, new, tests = MUTATIONS[what].values()
    path = copied / "lm" / file
    source = path.read_text()
    path.write_text(source.replace(old, new))
    try:
        failed, output = failing(copied, tests)
    finally:
        path.write_text(source)
    assert failed, output


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_text_that_a_mutation_replaces_is_there_once(what: str):
    file, old, new, _ = MUTATIONS[what].values()
    assert (ROOT / "lm" / file).read_text().count(old) == 1
    assert old != new
