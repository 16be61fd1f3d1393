"""Plugins: third-party classes ("code from outside" in messages), named as `package.module:Class` or by an installed
entry point.

Modules of lm declare the kinds of plugins, each a `Kind`: normalizers, optimizers, sources of text, synthetic tasks,
evaluations.

A plugin is imported only if the user named it, in a configuration or on the command line of this process
(`Plugins.trusted`), or allowed its package (`Plugins.allow`). A plugin that only a checkpoint, run folder or export
names is imported only if its package is allowed. docs/normalizers-own.md and docs/extending.md describe the
requirements on a plugin.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lm.files import file_sha256, sources_sha256
from lm.schema import Unavailable


@dataclass(frozen=True)
class Kind:
    """Describes one kind of plugins, such as optimizers: how they are declared and named, what they must define, and
    how to check them.
    """

    group: str  # the entry-point group in which packages declare such plugins
    noun: str  # what error texts call a plugin of this kind, e.g. `optimizer`
    base: type  # the base class of these plugins' dataclasses of options
    methods: tuple[str, ...] = ()  # methods of `base` that a plugin must override, besides abstract ones
    page: str = "docs/extending.md"  # the documentation page that states the requirements
    check: str = "check-extension"  # the command of `lm` that checks a plugin

    def command(self, name: str) -> str:
        """Return the command line that checks the plugin `name` of this kind, such as `lm check-extension optimizer
        NAME`.
        """
        return f"lm {self.check} {name}" if self.check != "check-extension" else f"lm {self.check} {self.noun} {name}"

    def options(self, plugin_class: type) -> type:
        """Return the dataclass of a plugin's options, often the class itself. Raises Unavailable: the class is no
        plugin of this kind.
        """
        if not (isinstance(plugin_class, type) and issubclass(plugin_class, self.base) and is_dataclass(plugin_class)):
            base_name = f"{self.base.__module__}.{self.base.__name__}"
            raise Unavailable(f"is no {self.noun}: no dataclass that is a subclass of {base_name}", f"see {self.page}")
        missing_names = [name for name in self.methods if getattr(plugin_class, name) is getattr(self.base, name)]
        if missing_names := [*missing_names, *sorted(getattr(plugin_class, "__abstractmethods__", ()))]:
            raise Unavailable(f"is not whole: it has no {', '.join(missing_names)}", f"see {self.page}")
        return plugin_class


class Plugin(NamedTuple):
    """An imported plugin: its classes, version and digest."""

    options: type  # the dataclass of its options, whose `name` is `package.module:Class`
    implementation: type  # the imported class
    version: str  # the sha256 of its source file, with name and version of its distribution if it has one
    kind: Kind
    code_digest: str  # digest of the Python and C++ files of its package, computed at its import


class Plugins:
    """Imports plugins. An instance holds the packages that `allow` permits and, by `package.module:Class`, the imported
    plugins.
    """

    def __init__(self) -> None:
        self._allowed_packages: set[str] = set()
        self._is_trusting = False
        self._plugins: dict[str, Plugin] = {}
        self._noted_names: set[tuple[str, str]] = (
            set()
        )  # (entry-point group, built-in name) that `note_hidden` has looked up

    def allow(self, packages: Iterable[str]) -> None:
        """Permit that plugins in these packages (or modules) are imported if a checkpoint, run folder or export names
        them.
        """
        self._allowed_packages.update(packages)

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """A context for reading text that the user wrote; within it, every plugin that is named may be imported."""
        was_trusting, self._is_trusting = self._is_trusting, True
        try:
            yield
        finally:
            self._is_trusting = was_trusting

    def options(self, name: str, kind: Kind) -> type:
        """Return the options class of the plugin `name`, importing it if needed; the class's attribute `name` is
        `package.module:Class`.

        Raises:
            KeyError: `name` is no `package.module:Class` and no entry point.
            Unavailable: importing the plugin is not permitted or fails, or the plugin is not of this kind.
        """
        if ":" in name and not all(name.split(":", 1)):
            raise Unavailable("names no class", "write package.module:Class")
        reference = name if ":" in name else installed_plugins(kind.group)[name]  # nothing is imported
        module = reference.partition(":")[0]
        is_allowed = any(f"{module}.".startswith(f"{package}.") for package in self._allowed_packages)
        if reference not in self._plugins or self._plugins[reference].kind is not kind:
            if not self._is_trusting and not is_allowed:
                package, allowed_packages = package_of(module), ", ".join(sorted(self._allowed_packages))
                remedy = (
                    f"if you trust it: --allow-plugin {package}, in Python PLUGINS.allow(['{package}']) of lm.plugins"
                )
                remedy += f"; allowed is {allowed_packages}" if allowed_packages else ""
                raise Unavailable("is code from outside, which a file names", remedy)
            self._plugins[reference] = _import_plugin(reference, kind)
        return self._plugins[reference].options

    def note_hidden(self, name: str, kind: Kind) -> None:
        """Print once on stderr that the user's `name` selects a class of lm, if an installed entry point has this name,
        too.
        """
        if not self._is_trusting or (kind.group, name) in self._noted_names:
            return
        self._noted_names.add((kind.group, name))
        if reference := installed_plugins(kind.group).get(name):
            print(f"note: {name} is lm's own; the entry point of that name is meant by {reference}", file=sys.stderr)

    def implementation(self, name: str) -> type:
        """Return the class of the imported plugin `name` (`package.module:Class`)."""
        return self._plugins[name].implementation

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Return {name: version} of the imported plugins among `names`."""
        return {name: self._plugins[name].version for name in names if name in self._plugins}

    def code(self, names: Iterable[str]) -> dict[str, str]:
        """Return {name: digest of the package's source code (`Plugin.code_digest`)} of the imported plugins among
        `names`.
        """
        return {name: self._plugins[name].code_digest for name in names if name in self._plugins}

    def failure(self, error: BaseException) -> tuple[str, str]:
        """Return two texts: the plugin, function, file and line that raised `error`, and the command that checks this
        plugin.

        Both texts are empty if no plugin's code is in the error's traceback.
        """
        modules = {module: name for name in self._plugins for module in (package_of(name), name.partition(":")[0])}
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if name := modules.get(module) or modules.get(package_of(module)):
                kind = self._plugins[name].kind
                location = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
                return f"{kind.noun} {name} failed in {location}", kind.command(name)
        return "", ""

    def checks(self) -> list[str]:
        """Return the command lines that check the imported plugins, one each."""
        return [plugin.kind.command(name) for name, plugin in self._plugins.items()]


PLUGINS = Plugins()  # one for the whole process, as imports are


class Registry(dict[str, type]):
    """A registry {name: options class} of lm's classes and plugins of one kind. A lookup imports a plugin; iteration
    leaves plugins out.
    """

    def __init__(self, kind: Kind, options: Mapping[str, type]):
        super().__init__(options)
        self.kind = kind

    def __getitem__(self, name: str) -> type:
        if name not in self:
            return PLUGINS.options(str(name), self.kind)
        PLUGINS.note_hidden(name, self.kind)
        return super().__getitem__(name)

    def installed(self) -> list[str]:
        """Return the names of the installed entry points for plugins of this kind."""
        return sorted(installed_plugins(self.kind.group))


def installed_plugins(group: str) -> dict[str, str]:
    """Return {name: `package.module:Class`} of the installed entry points in a group. Nothing is imported."""
    return _entry_points(group, tuple(sys.path))


@cache  # reading all distributions takes 10 ms, and a configuration may have thousands of unknown names
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, str]:
    return {entry.name: entry.value for entry in metadata.entry_points(group=group)}


def package_of(reference: str) -> str:
    """Return the name of the top-level package of a reference `package.module:Class` or of a module's name."""
    return reference.partition(":")[0].partition(".")[0]


def _import_plugin(reference: str, kind: Kind) -> Plugin:
    module, _, name = reference.partition(":")
    try:
        plugin_class = getattr(importlib.import_module(module), name)
    except Exception as error:  # any error that the module raises
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = (
            "install its package, or mend the name or its code; of a file in the current folder: PYTHONPATH=. lm ..."
        )
        raise Unavailable(f"can't be imported: {problem}", remedy) from None
    options = kind.options(plugin_class)
    if unkeyed_names := [spec.name for spec in fields(options) if "help" not in spec.metadata]:
        raise Unavailable(f"has an option that is not made by lm.schema.key: {unkeyed_names[0]}", f"see {kind.page}")
    named_options = type(
        options.__name__, (options,), {"name": reference, "__doc__": options.__doc__, "__module__": options.__module__}
    )
    package = sys.modules[package_of(reference)]
    if not any(getattr(package, name, None) for name in ("__path__", "__file__")):
        raise Unavailable("is in no file", "write it into a module")
    try:
        digest = sources_sha256(getattr(package, "__path__", None) or [package.__file__])
        return Plugin(named_options, plugin_class, _version_of(reference, plugin_class), kind, digest)
    except OSError as error:
        raise Unavailable(f"can't be read: {error}", "install its package in a folder, not in an archive") from None


def _version_of(reference: str, plugin_class: type) -> str:
    distribution, source = _distribution_of(package_of(reference)), inspect.getsourcefile(plugin_class)
    if not source:
        return distribution or "unknown"
    digest = file_sha256(Path(source))[:12]  # an editable distribution changes without a new version
    return f"source sha256 {digest}" + f" ({distribution})" * bool(distribution)


def _distribution_of(package: str) -> str:
    """Return the name and version of the distribution that installed a package; empty if no distribution did.

    `importlib.metadata.packages_distributions` would take ten times as long, as it parses the file lists of all
    distributions.
    """
    for distribution in metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        files = () if packages else (distribution.read_text("RECORD") or "").splitlines()
        if package in packages or any(line.startswith((f"{package}/", f"{package}.py,")) for line in files):
            return f"{distribution.name} {distribution.version}"
    return ""


def matches_version(recorded: str, present: str) -> bool:
    """Return whether the plugin version `present` matches the one `recorded` in a run; older runs recorded only
    the name and version of the distribution that installed the plugin."""
    return present == recorded or present.endswith(f" ({recorded})")
