"""Packages from outside, which tests write, import and forget."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from conftest import ROOT

from lm.plugins import PLUGINS


@contextlib.contextmanager
def outside_package(
    name: str, modules: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder of a package with the code of these modules, which can be imported and has not been; an import of one
    writes the file `imported` in `folder`."""
    package = folder / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for module, code in modules.items():
        (package / f"{module}.py").write_text(f"{code}\nopen({str(folder / 'imported')!r}, 'a').close()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{ROOT}")
    forget(name)
    yield package
    forget(name)


def installed(package: Path, entry_points: str) -> None:
    """Make the package one that an installer has put there, as version 1.2 with these entry points."""
    info = package.with_name(f"{package.name}-1.2.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "top_level.txt").write_text(f"{package.name}\n")
    PLUGINS._entry_points = None


def forget(package: str) -> None:
    """As in a process that has imported nothing from outside."""
    vars(PLUGINS).update(vars(type(PLUGINS)()))
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
