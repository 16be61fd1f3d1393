"""Collect the Python files of an export that carries its own code: the modelling file and copies of lm's modules.

transformers copies a model folder's modelling file, and each file that a line `from .NAME import ...` names. It copies
no subfolders. So all modules are written to one folder and import each other by such lines.
"""

import ast
import inspect
from collections.abc import Mapping
from pathlib import Path

from lm.attention.normalizer import Normalizer
from lm.errors import RunError

LM_FOLDER = Path(__file__).parents[1]
MODELLING_MODULE = "modeling_lm"  # beside this module
CATALOGUE_MODULE = "lm_catalogue"  # written for each export, with the model's normalizers alone
EXCLUDED_MODULES = ("lm_triton_kernels",)  # needs a package that transformers would demand on every machine


def code_files(normalizers: Mapping[str, type[Normalizer]]) -> dict[str, str]:
    """Return {file name: text} of the code that computes a model with the given normalizers, {name: class}.

    Raises RunError: a user's normalizer imports other modules of its own package, or modules of lm outside
    `lm.attention`.
    """
    sources, texts = {MODELLING_MODULE: Path(__file__).with_name(f"{MODELLING_MODULE}.py")}, {}
    import_lines = []
    for name, normalizer in normalizers.items():
        module = normalizer.__module__
        exported_name = _exported_name(module) if module.startswith("lm.") else module.replace(".", "_")
        sources[exported_name] = Path(inspect.getsourcefile(normalizer))
        import_lines.append(f"from .{exported_name} import {normalizer.__qualname__}  # {name}")
    while names := sources.keys() - texts.keys():
        for name in names:
            texts[name], imported_modules = _make_imports_relative(sources[name])
            sources |= {
                _exported_name(module): LM_FOLDER / f"{module.removeprefix('lm.').replace('.', '/')}.py"
                for module in imported_modules
            }
    entries = ", ".join(f'"{name}": {normalizer.__qualname__}' for name, normalizer in normalizers.items())
    texts[CATALOGUE_MODULE] = "\n".join([
        '"""The normalizers of this model, by their names in config.json."""', "",
        *import_lines, "", f"NORMALIZERS = {{{entries}}}", "normalizer_class = NORMALIZERS.__getitem__", "", "",
        "def make_normalizer(options, layer):",
        "    return {kind.schema: kind for kind in NORMALIZERS.values()}[type(options)](options, layer)", "", "",
        "# transformers copies a module because a line like these names it",
        *(f"from .{name} import __name__ as _" for name in sorted(sources.keys() - {MODELLING_MODULE})), "",
    ])  # fmt: skip
    return {f"{name}.py": text for name, text in texts.items()}


def _exported_name(module: str) -> str:
    """Return the name that a module of lm has in an export: `lm.attention.layout` becomes `lm_layout`."""
    return f"lm_{module.rpartition('.')[2]}"


def _make_imports_relative(path: Path) -> tuple[str, set[str]]:
    """Return a module's text with relative imports in place of lm's absolute ones, and the modules of lm that it
    imports.

    Raises RunError: it imports a module that an export can't hold.
    """
    text = path.read_text(encoding="utf-8")
    lines, imported_modules, tree = text.splitlines(), set(), ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":  # imports for type checkers alone
            lines[node.lineno : node.end_lineno] = ["    pass", *[""] * (node.end_lineno - node.lineno - 1)]
            node.body = []
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0), reverse=True):
        if not isinstance(node, ast.ImportFrom | ast.Import):
            continue
        module = getattr(node, "module", None) or ""
        names = [alias.name for alias in node.names]
        packages = {name.partition(".")[0] for name in ([module] if module else names)}
        if not (getattr(node, "level", 0) or packages & {"lm", path.parent.name}):
            continue
        if module == "lm.attention":
            modules = [f"lm.attention.{name}" for name in names]
            statements = [
                f"from . import {_exported_name(alias.name)} as {alias.asname or alias.name}" for alias in node.names
            ]
        elif module.startswith(("lm.attention.", "lm.model.")) or module == "lm.errors":
            modules = [module]
            imported_names = ", ".join(f"{alias.name} as {alias.asname or alias.name}" for alias in node.names)
            statements = [f"from .{_exported_name(module)} import {imported_names}"]
        else:
            raise RunError(
                f"{path}:{node.lineno}: an export holds one file of a normalizer from outside, which may import "
                f"lm.attention and installed packages, not {module or names[0]}"
            )
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [indent + statement for statement in statements]
        imported_modules |= {
            name for name in modules if _exported_name(name) not in (CATALOGUE_MODULE, *EXCLUDED_MODULES)
        }
    return "\n".join(lines) + "\n", imported_modules
