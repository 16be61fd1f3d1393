"""The structure of the package, derived from its source: imports point one way, and every module has its own name and its own subject."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lm.runs.evaluations import MEASURING_PACKAGES as MEASURING

ROOT = Path(__file__).resolve().parent.parent
# A room may import those before it: what a key is, the options of normalizers, the configuration, text, models, files of runs ...
ROOMS = (
    "errors",
    "machine",
    "schema",
    "files",
    "progress",
    "plugins",
    "attention",
    "functional",
    "config",
    "data",
    "model",
    "runs",
    "statistics",
    "report",
    "huggingface",
    "diagnostics",
    "evaluation",
    "training",
    "experiments",
    "commands",
    "cli",
)
LARGEST = 600  # lines of a module


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
    """The modules of the package that a module imports, wherever in it: at the top, in functions, and for annotations."""
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


# Words that name nothing: pronouns, determiners, prepositions and participles.
NAMELESS = {
    "each", "one", "every", "same", "own", "ours", "theirs", "both", "some", "alone", "here", "within", "below", "above", "inside",
    "apart", "twice", "across", "along", "over", "of", "how", "why", "which", "known", "asked", "given", "found", "made", "kept",
    "seen", "shown", "wanted", "tried", "drawn", "taken",
}  # fmt: skip


def test_local_variables_are_named_by_nouns():
    """Names of fields, options and keyword arguments are no local variables."""
    nameless = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.id}"
        for path in MODULES.values()
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMELESS
    ]
    assert not nameless, "name what they hold"


def test_names_are_imported_from_modules_that_define_them():
    defined = {}
    for name, path in MODULES.items():
        names = {node.id for node in nodes(path) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names |= {
            alias.asname or alias.name
            for node in nodes(path)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        defined[name.removesuffix(".__init__")] = names
    undefined = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in sorted(path for folder in ("lm", "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "lm"
        for alias in node.names
        if alias.name not in {*defined.get(node.module, ()), "*"} and f"{node.module}.{alias.name}" not in MODULES
    ]
    assert not undefined


def test_rooms_import_the_ones_before_them_only():
    inner = [name for name in MODULES if room(name) not in ("__init__", "__main__")]
    assert {room(name) for name in inner} == set(ROOMS)
    order = {name: place for place, name in enumerate(ROOMS)}
    back = [
        f"{name} imports {other}" for name in inner for other in graph()[name] if order[room(other)] > order[room(name)]
    ]
    assert not back


def test_training_prints_its_last_evaluation_and_knows_nothing_else_of_reports():
    modules_of_reports = {
        other for name in MODULES for other in graph()[name] if (room(name), room(other)) == ("training", "report")
    }
    assert modules_of_reports <= {"lm.report.evaluation_tables"}


def test_the_code_that_measures_is_in_the_rooms_whose_change_is_noticed():
    reached: set[str] = set()
    new = {name for name in MODULES if name.startswith("lm.evaluation.")}
    while new:
        reached |= new
        new = set().union(*(graph()[name] for name in new)) - reached
    without_numbers = {"__init__", "errors", "files", "machine", "plugins", "progress", "report", "schema"}
    assert {room(name) for name in reached if name != "lm"} - without_numbers == set(MEASURING)


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in MODULES.values() if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_read_in_one_sitting(name: str):
    assert len(MODULES[name].read_text().splitlines()) <= LARGEST


# Rooms whose names have been gone through.
NAMED = {*ROOMS} - {"functional"}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_begin_with_what_they_are_of(name: str):
    documented = [
        node for node in nodes(MODULES[name]) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    assert not [
        text
        for node in documented
        if (text := ast.get_docstring(node) or "").split(" ")[0] in ("Of", "As", "That", "Those", "What")
    ]


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in NAMED])
def test_local_names_are_nouns(name: str):
    assigned = {
        node.id for node in nodes(MODULES[name]) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert not {"one", "found", "made", "left"} & (
        assigned | {node.arg for node in nodes(MODULES[name]) if isinstance(node, ast.arg)}
    )


@pytest.mark.parametrize(
    ("what", "most"),
    [
        (r"csv\.(writer|DictWriter)\(", 1),
        (r"from rich\.table import", 1),
        (r"^(import|from) matplotlib", 2),
        (r"^class (Arm|Comparison)\b", 2),
    ],
)
def test_a_mechanism_stands_in_one_place(what: str, most: int):
    assert 0 < sum(bool(re.search(what, path.read_text(), re.MULTILINE)) for path in MODULES.values()) <= most


def test_files_are_read_and_written_in_one_encoding_whatever_the_locale():
    texts = {name: path.read_text() for name, path in MODULES.items()}
    assert not [
        name for name, text in texts.items() if re.search(r"\.read_text\(\)|\.write_text\((?!.*encoding=)", text)
    ]


def test_no_public_name_of_experiments_and_reports_stands_in_two_modules():
    names = Counter()
    for name in (name for name in MODULES if room(name) in ("experiments", "report", "statistics")):
        names.update(
            node.name
            for node in tree(MODULES[name]).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        )
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_packages_pass_nothing_on(name: str):
    assert (
        name in ("lm.__init__", "lm.huggingface.__init__") or not graph()[name]
    )  # these two are read by users of Python


HEAVY = ("torch", "lightning", "wandb", "datasets", "transformers", "matplotlib.pyplot")
LIGHT = ("lm", "lm.cli", "lm.config.load", "lm.config.tree", "lm.report.html", "lm.runs.record", "lm.experiments.experiment_folder",
         "lm.report.frame")  # fmt: skip


def test_what_reads_configurations_and_reports_needs_no_torch():
    code = f"import importlib, sys\nfor name in {LIGHT}: importlib.import_module(name); print(name, *{{*{HEAVY}}} & {{*sys.modules}})"
    code += "\nsys.path.append('scripts'); import recompute; print('recompute', *{'torch'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.splitlines()) == (0, [*LIGHT, "recompute"]), result.stderr
