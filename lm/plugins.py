"""Plugins are normalizers from outside lm ("code from outside" in messages), named as `package.module:Class` or by an
installed entry point.

A plugin is imported only if the user named it or allowed its package (`Plugins.allow`). Users name it in a
configuration or on the command line of this process (`Plugins.trust_user_text`). A plugin that only a checkpoint, run
folder or export names is imported only if its package is allowed. docs/normalizers-own.md describes the requirements on
a plugin.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lm.errors import PluginUnavailable
from lm.files import file_sha256, source_files_sha256

ENTRY_POINT_GROUP = "lm.normalizers"  # the entry-point group in which packages declare normalizers
REQUIREMENTS_PAGE = "docs/normalizers-own.md"  # the documentation page that states the requirements

OptionsGetter = Callable[[type], type]  # returns the class of a plugin's options, or raises PluginUnavailable


class Plugin(NamedTuple):
    """A plugin is an imported normalizer, with its classes, and digests of its file and package."""

    options_class: type  # the dataclass of its options, whose `name` is `package.module:Class`
    normalizer_class: type  # the imported class
    source_id: str  # `source sha256 ` and 12 digits of its source file's, or `unknown`
    package_digest: str  # digest of the Python and C++ files of its package, computed at its import


class Plugins:
    """Imports plugins. An instance holds the packages that `allow` permits and, by `package.module:Class`, the imported
    plugins.
    """

    def __init__(self) -> None:
        self._allowed_packages: set[str] = set()
        self._reads_user_text = False
        self._plugins: dict[str, Plugin] = {}
        self._entry_points: dict[str, str] | None = None  # {name: reference}, None before it was needed

    def allow(self, packages: Iterable[str]) -> None:
        """Permit that plugins in these packages (or modules) are imported if a checkpoint, run folder or export names
        them.
        """
        self._allowed_packages.update(packages)

    @contextmanager
    def trust_user_text(self) -> Iterator[None]:
        """Return a context for reading text that the user wrote; within it, every plugin that is named may be
        imported.
        """
        was_trusting, self._reads_user_text = self._reads_user_text, True
        try:
            yield
        finally:
            self._reads_user_text = was_trusting

    def installed_plugins(self) -> dict[str, str]:
        """Return {name: `package.module:Class`} of the installed entry points, which are read once a process."""
        if self._entry_points is None:
            self._entry_points = {entry.name: entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
        return self._entry_points

    def import_plugin(self, name: str, get_options: OptionsGetter) -> Plugin:
        """Return the plugin `name`, an entry point or `package.module:Class`, which is imported if needed.

        `get_options` checks the imported class and returns its class of options, whose attribute `name` is always
        `package.module:Class`.

        Raises:
            KeyError: `name` is no `package.module:Class` and no entry point.
            PluginUnavailable: importing the plugin is not permitted or fails, or `get_options` refuses it.
        """
        reference = name if ":" in name else self.installed_plugins()[name]  # nothing is imported
        module = reference.partition(":")[0]
        is_allowed = any(f"{module}.".startswith(f"{package}.") for package in self._allowed_packages)
        if reference not in self._plugins:
            if not self._reads_user_text and not is_allowed:
                package = top_level_package(module)
                remedy = f"--allow-plugin {package}, in Python PLUGINS.allow(['{package}']) of lm.plugins"
                raise PluginUnavailable("is code from outside, which a file names", f"if you trust it: {remedy}")
            self._plugins[reference] = _import_plugin(reference, get_options)
        return self._plugins[reference]

    def source_ids(self, names: Iterable[str]) -> dict[str, str]:
        """Return {name: text with a digest of the plugin's source file (`Plugin.source_id`)} of the imported plugins
        among `names`."""
        return {name: self._plugins[name].source_id for name in names if name in self._plugins}

    def package_digests(self, names: Iterable[str]) -> dict[str, str]:
        """Return {name: digest of the package's source code (`Plugin.package_digest`)} of the imported plugins among
        `names`.
        """
        return {name: self._plugins[name].package_digest for name in names if name in self._plugins}

    def failure_and_check_command(self, error: BaseException) -> tuple[str, str]:
        """Return two texts: the plugin, function, file and line that raised `error`, and the command that checks this
        plugin.

        Both texts are empty if no plugin's code is in the error's traceback.
        """
        modules = {
            module: name for name in self._plugins for module in (top_level_package(name), name.partition(":")[0])
        }
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if name := modules.get(module) or modules.get(top_level_package(module)):
                location = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
                return f"normalizer {name} failed in {location}", f"lm check-normalizer {name}"
        return "", ""


PLUGINS = Plugins()  # one for the whole process, as imports are


def top_level_package(reference: str) -> str:
    """Return the name of the top-level package of a reference `package.module:Class` or of a module's name."""
    return reference.partition(":")[0].partition(".")[0]


def _import_plugin(reference: str, get_options: OptionsGetter) -> Plugin:
    """Import the plugin `package.module:Class` that `reference` names.

    Raises PluginUnavailable: the import fails, or the class is no normalizer.
    """
    module, _, name = reference.partition(":")
    try:
        plugin_class = getattr(importlib.import_module(module), name)
    except Exception as error:  # any error that the module raises
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = (
            "install its package, or mend the name or its code; of a file in the current folder: PYTHONPATH=. lm ..."
        )
        raise PluginUnavailable(f"can't be imported: {problem}", remedy) from None
    options = get_options(plugin_class)
    if unkeyed_names := [spec.name for spec in fields(options) if "help" not in spec.metadata]:
        raise PluginUnavailable(
            f"has an option not made by lm.attention.options.key: {unkeyed_names[0]}", f"see {REQUIREMENTS_PAGE}"
        )
    named_options = type(
        options.__name__, (options,), {"name": reference, "__doc__": options.__doc__, "__module__": options.__module__}
    )
    package = sys.modules[top_level_package(reference)]
    try:
        digest = source_files_sha256(getattr(package, "__path__", None) or [package.__file__])
        source = inspect.getsourcefile(plugin_class)
        source_id = f"source sha256 {file_sha256(Path(source))[:12]}" if source else "unknown"
        return Plugin(named_options, plugin_class, source_id, digest)
    except (OSError, AttributeError) as error:  # AttributeError: of code typed in, which is in no file
        raise PluginUnavailable(
            f"can't be read: {error}", "write it into a module, in a folder, not in an archive"
        ) from None
