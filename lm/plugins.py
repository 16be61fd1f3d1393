"""Code from outside: `package.module:Class`, or a bare name that an installed package gives to it (entry points).

Packages of lm declare the kinds of such code, each a `Kind`: normalizers, optimizers, sources of text, synthetic tasks, evaluations.

Code is imported only because the user named it: in a configuration or on the command line of this process (`trusted`), or
through its package (`allow`). A checkpoint, run folder or export that names code gets it only if its package is allowed.
docs/normalizers-own.md and docs/extending.md describe the requirements on such a class.
"""

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lm.files import sources_sha256
from lm.schema import Unavailable


@dataclass(frozen=True)
class Kind:
    """A kind of code from outside, which is a dataclass of options."""

    group: str  # the group of entry points that name such code
    noun: str  # its name in errors
    base: type  # the base class of such code
    methods: tuple[str, ...] = ()  # methods of `base` that it must override, besides abstract ones
    page: str = "docs/extending.md"  # the page with its requirements
    check: str = "check-extension"  # the command that tests it

    def command(self, name: str) -> str:
        """The command that checks the code `name` of this kind."""
        return f"lm {self.check} {name}" if self.check != "check-extension" else f"lm {self.check} {self.noun} {name}"

    def options(self, code: type) -> type:
        """`code`, the imported dataclass of options. Raises Unavailable: it is not of this kind."""
        if not (isinstance(code, type) and issubclass(code, self.base) and is_dataclass(code)):
            base_name = f"{self.base.__module__}.{self.base.__name__}"
            raise Unavailable(f"is no {self.noun}: no dataclass that is a subclass of {base_name}", f"see {self.page}")
        missing_names = [name for name in self.methods if getattr(code, name) is getattr(self.base, name)]
        if missing_names := [*missing_names, *sorted(getattr(code, "__abstractmethods__", ()))]:
            raise Unavailable(f"is not whole: it has no {', '.join(missing_names)}", f"see {self.page}")
        return code


class Plugin(NamedTuple):
    """Code from outside, as it was imported."""

    options: type
    implementation: type
    version: str  # of its distribution, if it has one, and the sha256 of its source file
    kind: Kind
    code: str  # digest of the Python files of its whole package, as they were when it was imported


class Plugins:
    """Packages that this process may import, and imported classes, by their `module:Class`."""

    def __init__(self) -> None:
        self._allowed_packages: set[str] = set()
        self._is_trusting = False
        self._plugins: dict[str, Plugin] = {}
        self._noted_names: set[tuple[str, str]] = set()  # groups and built-in names whose entry points have been looked for

    def allow(self, packages: Iterable[str]) -> None:
        """Allow imports of the code of these packages (or modules) that files name."""
        self._allowed_packages.update(packages)

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """A context for reading text that the user wrote: code from outside that it names is imported."""
        was_trusting, self._is_trusting = self._is_trusting, True
        try:
            yield
        finally:
            self._is_trusting = was_trusting

    def options(self, name: str, kind: Kind) -> type:
        """The options of the code that `name` means; their attribute `name` is the code's `module:Class`.

        Raises:
            KeyError: `name` means no code from outside.
            Unavailable: the code may not or can't be imported, or is not of this kind.
        """
        if ":" in name and not all(name.split(":", 1)):
            raise Unavailable("names no class", "write package.module:Class")
        reference = name if ":" in name else metadata.entry_points(group=kind.group)[name].value  # nothing is imported
        module = reference.partition(":")[0]
        is_allowed = any(f"{module}.".startswith(f"{package}.") for package in self._allowed_packages)
        if reference not in self._plugins or self._plugins[reference].kind is not kind:
            if not self._is_trusting and not is_allowed:
                package, allowed_packages = package_of(module), ", ".join(sorted(self._allowed_packages))
                remedy = f"if you trust it: --allow-plugin {package}, in Python PLUGINS.allow(['{package}']) of lm.plugins"
                remedy += f"; allowed is {allowed_packages}" if allowed_packages else ""
                raise Unavailable("is code from outside, which a file names", remedy)
            self._plugins[reference] = _imported(reference, kind)
        return self._plugins[reference].options

    def note_hidden(self, name: str, kind: Kind) -> None:
        """Print once to stderr that an entry point has the built-in name that the user gave, and that `name` does not mean it."""
        if not self._is_trusting or (kind.group, name) in self._noted_names:
            return
        self._noted_names.add((kind.group, name))
        for entry in metadata.entry_points(group=kind.group, name=name):
            print(f"note: {name} is lm's own; the entry point of that name is meant by {entry.value}", file=sys.stderr)

    def implementation(self, name: str) -> type:
        """The class that was imported for the options that `options` gave the attribute `name`."""
        return self._plugins[name].implementation

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Versions of the imported code from outside among `names`."""
        return {name: self._plugins[name].version for name in names if name in self._plugins}

    def code(self, names: Iterable[str]) -> dict[str, str]:
        """A digest of the Python files of the whole package when it was imported, for each code from outside among `names`."""
        return {name: self._plugins[name].code for name in names if name in self._plugins}

    def failure(self, error: BaseException) -> tuple[str, str]:
        """The code from outside that raised `error`, with its function, file and line, in words, and the command that checks it.

        Both are empty if no code from outside was running.
        """
        modules = {place: name for name in self._plugins for place in (package_of(name), name.partition(":")[0])}
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if name := modules.get(module) or modules.get(package_of(module)):
                kind = self._plugins[name].kind
                location = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
                return f"{kind.noun} {name} failed in {location}", kind.command(name)
        return "", ""

    def checks(self) -> list[str]:
        """The commands that check the imported code from outside."""
        return [plugin.kind.command(name) for name, plugin in self._plugins.items()]


PLUGINS = Plugins()  # one for the whole process, as imports are


class Table(dict[str, type]):
    """Options by name. It also finds options from outside, which it does not list."""

    def __init__(self, kind: Kind, options: Mapping[str, type]):
        super().__init__(options)
        self.kind = kind

    def __missing__(self, name: str) -> type:
        return PLUGINS.options(str(name), self.kind)

    def __getitem__(self, name: str) -> type:
        if name in self:
            PLUGINS.note_hidden(name, self.kind)
        return super().__getitem__(name)

    def installed(self) -> list[str]:
        """Names that installed packages give to code of this kind."""
        return sorted(metadata.entry_points(group=self.kind.group).names)


def package_of(reference: str) -> str:
    """The name of the top-level package of `package.module:Class`, or of a module."""
    return reference.partition(":")[0].partition(".")[0]


def _imported(reference: str, kind: Kind) -> Plugin:
    module, _, name = reference.partition(":")
    try:
        code = getattr(importlib.import_module(module), name)
    except Exception as error:  # any error that the module raises
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = "install its package, or mend the name or its code; of a file in the current folder: PYTHONPATH=. lm ..."
        raise Unavailable(f"can't be imported: {problem}", remedy) from None
    schema = kind.options(code)
    if unkeyed_names := [spec.name for spec in fields(schema) if "help" not in spec.metadata]:
        raise Unavailable(f"has an option that is not made by lm.schema.key: {unkeyed_names[0]}", f"see {kind.page}")
    named_schema = type(schema.__name__, (schema,), {"name": reference, "__doc__": schema.__doc__, "__module__": schema.__module__})
    package = sys.modules[package_of(reference)]
    if not any(getattr(package, name, None) for name in ("__path__", "__file__")):
        raise Unavailable("is in no file", "write it into a module")
    try:
        digest = sources_sha256(getattr(package, "__path__", None) or [package.__file__])
        return Plugin(named_schema, code, _version(reference, code), kind, digest)
    except OSError as error:
        raise Unavailable(f"can't be read: {error}", "install its package in a folder, not in an archive") from None


def _version(reference: str, code: type) -> str:
    distribution, source = _distribution(package_of(reference)), inspect.getsourcefile(code)
    if not source:
        return distribution or "unknown"
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:12]  # a distribution may be edited where it is installed from
    return f"source sha256 {digest}" + f" ({distribution})" * bool(distribution)


def _distribution(package: str) -> str:
    """Name and version of the distribution that installed a package; empty if there is none.

    `importlib.metadata.packages_distributions` says the same, and takes ten times as long, as it parses the list of all files.
    """
    for distribution in metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        files = () if packages else (distribution.read_text("RECORD") or "").splitlines()
        if package in packages or any(line.startswith((f"{package}/", f"{package}.py,")) for line in files):
            return f"{distribution.name} {distribution.version}"
    return ""


def is_version(recorded: str, present: str) -> bool:
    """Whether code of the version `present` is of the `recorded` one; older runs recorded a distribution without a digest."""
    return present == recorded or present.endswith(f" ({recorded})")
