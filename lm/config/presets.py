"""Presets: the configurations, recipes and experiments that come with the package, found by name."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import lm
from lm.errors import ConfigError
from lm.schema import suggest

_FOLDERS = {"experiments": ("experiments", ""), "": ("", "recipes", "models", "data")}  # folders in which a name is looked up, by kind


def folder() -> Path:
    """The folder of presets: within the installed package, or `configs/` of the clone that the package runs from."""
    package = Path(lm.__file__).parent
    return next(path for path in (package / "configs", package.parent / "configs") if path.is_dir())


def find(argument: str | Path, kind: str = "", parent: str | Path = "") -> Path:
    """The file that an argument of the command line names: an existing file, else the preset of that name, else the argument as a path.

    A folder of the same name hides no preset. A preset's name is its path within `configs`, with or without that folder and `.yaml`, e.g.
    `recipes/modern` or `configs/softmax.yaml`.

    Args:
        kind: `experiments` for an experiment, empty for a configuration.
        parent: the folder that relative paths start from.
    """
    name = Path(os.path.expanduser(argument))
    path = Path(parent, name)
    if (path.exists() and not path.is_dir()) or name.is_absolute() or ".." in name.parts or not name.name:
        return path
    relative_path = Path(*name.parts[1:]) if len(name.parts) > 1 and name.parts[0] == "configs" else name
    relative_path = relative_path if relative_path.suffix in (".yaml", ".yml") else relative_path.with_name(f"{relative_path.name}.yaml")
    return next((file for place in _FOLDERS[kind] if (file := folder() / place / relative_path).is_file()), path)


def is_override(argument: str) -> bool:
    """Whether an argument of the command line is a `key=value`: it has a `=`, and is not the path of a file or folder."""
    return "=" in argument and not os.path.exists(os.path.expanduser(argument))


def names() -> Iterator[tuple[str, str]]:
    """Yield each preset's name, and the first sentence of the comment on the first line of its file."""
    root = folder()
    for path in sorted(root.rglob("*.yaml"), key=lambda path: (len(path.relative_to(root).parts), str(path))):
        line = path.read_text(encoding="utf-8").partition("\n")[0]
        sentence = line.removeprefix("#").strip().partition(". ")[0].rstrip(".:") if line.startswith("#") else ""
        yield path.relative_to(root).with_suffix("").as_posix(), sentence


def suggestion(path: Path) -> str:
    """A remedy for the missing file `path`: the preset with the most similar name, else the command that lists presets."""
    known_names = [name for name, _ in names()]
    text = suggest(path.with_suffix("").as_posix(), [*known_names, *(name.rpartition("/")[2] for name in known_names)])
    return f"; {text if text.startswith('did you mean') else 'lm configs lists presets'}"


def copy(parent: Path) -> Path:
    """Copy all presets, with the .csv tables of tuning runs that experiments name, into the new folder `parent`/configs and return it.

    Raises ConfigError: the folder exists already, or can't be written.
    """
    destination = parent / "configs"
    try:
        shutil.copytree(folder(), destination)
    except FileExistsError:
        raise ConfigError(f"{destination}: is there already; name another folder") from None
    except OSError as error:
        raise ConfigError(f"{destination}: can't be written: {error.strerror or error}") from None
    return destination
