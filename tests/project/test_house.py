"""The structure of the package, derived from its source: imports point one way, and every module has its own name and
its own subject.
"""

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from house_size import house_sizes

from lm.evaluation.measurement import MEASURING_PACKAGES as MEASURING

ROOT = Path(__file__).resolve().parents[2]
# A room may import those before it: what a key is, the options of normalizers, the configuration, text, models, files
# of runs ...
ROOMS = (
    "errors",
    "attention",
    "machine",
    "plain",
    "files",
    "progress",
    "plugins",
    "config",
    "functional",
    "data",
    "model",
    "runs",
    "statistics",
    "report",
    "huggingface",
    "diagnostics",
    "evaluation",
    "training",
    "callbacks",
    "experiments",
    "commands",
    "cli",
)
LARGEST = 600  # lines of a module


# Code tokens of each room; comments, docstrings and line ends are free. A change that needs more in one room takes it
# from another, and says so in its commit: `python scripts/generate.py`.
RATCHET = json.loads((ROOT / "tests" / "house_size.json").read_text())


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted((ROOT / "lm").rglob("*.py"))
    }


MODULES = modules()


@cache
def tree(path: Path) -> ast.Module:
    """What a file parses to."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of it."""
    return tuple(ast.walk(tree(path)))


def imports(path: Path) -> set[str]:
    """The modules of the package that a module imports, wherever in it: at the top, in functions, and for
    annotations.
    """
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & MODULES.keys()


def room(module: str) -> str:
    """The folder or the module right below `lm` that a module belongs to."""
    return module.split(".")[1]


@cache
def graph() -> dict[str, set[str]]:
    """What each module imports of the package."""
    return {name: imports(path) for name, path in MODULES.items()}


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_rooms_import_the_ones_before_them_only():
    inner = [name for name in MODULES if room(name) not in ("__init__", "__main__")]
    assert {room(name) for name in inner} == set(ROOMS)
    order = {name: place for place, name in enumerate(ROOMS)}
    back = [
        f"{name} imports {other}" for name in inner for other in graph()[name] if order[room(other)] > order[room(name)]
    ]
    assert not back


def test_the_code_that_measures_is_in_the_rooms_whose_change_is_noticed():
    reached: set[str] = set()
    new = {name for name in MODULES if name.startswith("lm.evaluation.")}
    while new:
        reached |= new
        new = set().union(*(graph()[name] for name in new)) - reached
    without_numbers = {
        "__init__",
        "errors",
        "files",
        "machine",
        "plain",
        "plugins",
        "progress",
        "report",
        "statistics",  # of reports
    }
    assert {room(name) for name in reached if name != "lm"} - without_numbers == {
        name.removesuffix(".py") for name in MEASURING
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_read_in_one_sitting(name: str):
    assert len(MODULES[name].read_text().splitlines()) <= LARGEST


HEAVY = ("lightning", "wandb", "datasets", "transformers", "matplotlib.pyplot")
LIGHT = ("lm", "lm.cli", "lm.config.load", "lm.config.tree", "lm.report.html", "lm.runs.record",
    "lm.experiments.procedure",
         "lm.report.frame")  # fmt: skip


def test_help_and_completion_need_no_torch_and_what_reads_configurations_and_reports_no_lightning():
    code = (
        "import sys, importlib\n"
        "from typer.testing import CliRunner; from typer.main import get_command\n"
        "from lm.cli import app; r = CliRunner()\n"
        "for name in [[], *([name] for name in get_command(app).commands)]:\n"
        "    assert r.invoke(app, [*name, '--help']).exit_code == 0\n"
        "line = {'_LM_COMPLETE': 'complete_bash', 'COMP_WORDS': 'lm tr', 'COMP_CWORD': '1'}\n"
        "assert r.invoke(app, prog_name='lm', env=line).output.split() == ['train']\n"
        "assert 'torch' not in sys.modules\n"
        f"for name in {LIGHT}: importlib.import_module(name); print(name, *{{*{HEAVY}}} & {{*sys.modules}})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()) == (0, [*LIGHT]), result.stderr


def test_the_house_only_shrinks():
    sizes = house_sizes()
    assert sizes.keys() == RATCHET.keys()
    grown = {room: f"{sizes[room]} > {size}" for room, size in RATCHET.items() if sizes[room] > size}
    assert not grown, "delete as much as was added, or take it from another room: scripts/generate.py"


def test_the_lock_has_the_versions_that_the_tests_ran_with():
    lock = {
        f"{package['name']}=={package.get('version')}"
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    assert {line for line in lines if "==" in line and line[0] != "#"} <= lock
