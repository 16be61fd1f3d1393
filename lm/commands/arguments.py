"""Defines command-line arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from lm.config.presets import is_override
from lm.errors import ConfigError
from lm.files import expand_home
from lm.plugins import PLUGINS

OutFile = Annotated[Path | None, typer.Option("--out", "-o", help="also write all numbers to this .csv or .json file")]
CheckpointChoice = Annotated[
    str, typer.Option(help="checkpoint of a run: last, best (lowest selection loss), or a step")
]
ModelSource = Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="run folder, checkpoint or export")]
NewFolder = Annotated[Path, typer.Option("--out", "-o", help="folder to create")]


AllowPlugin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PACKAGE",
        callback=lambda packages: PLUGINS.allow(packages or ()),
        help="allow plugins that the model names to be imported from this package",
    ),
]


def check_out_file(out: Path | None) -> None:
    """Raise ConfigError if the file name `out` ends neither in .csv nor in .json."""
    if out and out.suffix not in (".csv", ".json"):
        raise ConfigError(f"{out}: can't write results of this kind; name a .csv or .json file")


def paths_and_overrides(arguments: list[str], message: str = "") -> tuple[list[Path], list[str]]:
    """Split command-line arguments into (paths, overrides). If there is no path, raise ConfigError with the text
    `message`, unless `message` is empty.
    """
    overrides = [text for text in arguments if is_override(text)]
    paths = [expand_home(text) for text in arguments if text not in overrides]
    if message and not paths:
        raise ConfigError(message)
    return paths, overrides
