"""Finds presets: the configurations, recipes and experiments that come with the package, each with a name."""

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import lm

# subfolders to search for a preset, by kind
_SUBFOLDERS = {"experiments": ("experiments", ""), "": ("", "recipes", "models", "data")}


def folder() -> Path:
    """Return the folder of presets: within the installed package, or `configs/` of the clone that the package runs
    from.
    """
    package = Path(lm.__file__).parent
    return next(path for path in (package / "configs", package.parent / "configs") if path.is_dir())


def find(argument: str | Path, kind: str = "", base_folder: str | Path = "") -> Path:
    """Return the path that a command-line argument names: an existing file, else the preset of that name, else the
    argument itself.

    A preset is preferred to a folder of the same name. A preset's name is its path in the folder of presets, e.g.
    `recipes/modern`; the subfolder and `.yaml` may be left out, and `configs/` may stand before it.

    Args:
        kind: `experiments` for an experiment, empty for a configuration.
        base_folder: the folder that relative paths start from.
    """
    path = Path(base_folder, os.path.expanduser(argument))
    name = str(argument).removeprefix("configs/").removesuffix(".yaml")
    files = (folder() / subfolder / f"{name}.yaml" for subfolder in _SUBFOLDERS[kind])
    return path if path.is_file() else next((file for file in files if file.is_file()), path)


def is_override(argument: str) -> bool:
    """Return whether a command-line argument is an override `key=value`: it contains `=`, and no file or folder has
    this path.
    """
    return "=" in argument and not os.path.exists(os.path.expanduser(argument))


def list_presets() -> Iterator[tuple[str, str]]:
    """Yield (name, description) of each preset. The description is the first sentence of the comment that begins its
    file.
    """
    root = folder()
    for path in sorted(root.rglob("*.yaml"), key=lambda path: (len(path.relative_to(root).parts), str(path))):
        words = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0].split()
        comment = " ".join(word for word in words if word != "#")
        yield path.relative_to(root).with_suffix("").as_posix(), re.split(r"(?<=[.?]) ", comment)[0].rstrip(".:")


def suggestion(path: Path) -> str:
    """Return a hint for the error that `path` does not exist: the most similar name, else the command that lists
    presets.
    """
    files = [str(file) for file in path.parent.glob("*.yaml")]
    known_names = [*files, *(form for name, _ in list_presets() for form in (name, name.rpartition("/")[2]))]
    matches = get_close_matches(str(path.with_suffix("")), known_names, n=1)
    return f"; did you mean '{matches[0]}'?" if matches else "; lm configs lists presets"
