"""Run folders: the only thing that training leaves behind and everything after it reads."""

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from lm.config.load import parse
from lm.config.tree import Config, ExperimentConfig
from lm.config.yaml_text import parse_yaml
from lm.errors import ConfigError, RunError, one_line, shown
from lm.files import plain_sha256, write_together
from lm.schema import Plain, convert, type_name

CONFIG, ENVIRONMENT, METRICS, TOKENIZER = "config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json"
CHECKPOINTS, EVALUATIONS, PROFILE = "checkpoints", "evaluations", "profile"
RESOLVED = "resolved.json"  # in the folder of an experiment, around its run folders: what its first start settled for all of them
TRAINING = "another process is training in this run folder; wait for it or stop it"  # why a folder that is locked is refused
LAST, BEST = "last.ckpt", "best.ckpt"  # in CHECKPOINTS, beside step-N.ckpt


def write_json(path: Path, content: Plain) -> Path:
    """`content` as indented JSON, whole or not at all; returns the file's path."""
    write_together({path: json_bytes(content)})
    return path


def json_bytes(content: Plain) -> bytes:
    """`content` as the text of an indented JSON file."""
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> dict[str, Plain]:
    """The object in a JSON file. Raises RunError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON: {one_line(error, 160)}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: holds no JSON object")
    return content


def check_fields(content: dict[str, Plain], fields: Mapping[str, object], path: Path, within: str = "") -> None:
    """Check what was read from `path`: `fields` maps the names of its entries to their types.

    within: the entry that holds them, in the message.

    Raises:
        RunError: an entry is missing, of another type, or a negative number.
    """
    for name, kind in fields.items():
        value = convert(kind, content.get(name, MISSING))
        if value is MISSING or (isinstance(value, int | float) and value < 0):
            found = str(content[name])[:40] if name in content else "missing"
            raise RunError(f"{path}: its `{within}{name}` must be {type_name(kind)}, not {shown(found)}")


def command_line() -> str:
    """The command of this process, quoted so that a shell runs the same again."""
    return shlex.join(["lm", *sys.argv[1:]])


def sealed(content: dict[str, Plain]) -> dict[str, Plain]:
    """`content` as it is read back from JSON, with a `sha256` of itself."""
    content = json.loads(json.dumps(content, allow_nan=False))  # with the keys that will be read: JSON's are texts
    return {**content, "sha256": plain_sha256(content)}


def unsealed(content: dict[str, Plain], path: Path) -> dict[str, Plain]:
    """What `sealed` was given, of what was read from `path`. Raises RunError if it has no sha256, or was altered."""
    bare = {name: value for name, value in content.items() if name != "sha256"}
    if "sha256" not in content:
        raise RunError(f"{path}: holds no sha256 of itself: it is of an older version, and must be made again")
    if content["sha256"] != plain_sha256(bare):
        raise RunError(f"{path}: was altered (its sha256 differs)")
    return bare


def write_sealed(path: Path, content: dict[str, Plain]) -> Path:
    """`content` as JSON with a `sha256` of itself, whole or not at all; returns the file's path."""
    return write_json(path, sealed(content))


def read_sealed(path: Path) -> dict[str, Plain]:
    """What `write_sealed` wrote. Raises RunError if it is missing, damaged or was altered."""
    return unsealed(read_json(path), path)


def require_run(folder: Path, *files: str) -> None:
    """Raises RunError if `folder` is not a run folder that holds `files`: with what it is instead, and what takes it."""
    if (folder / "config.json").is_file() or (folder.suffix == ".gguf" and folder.is_file()):
        raise RunError(f"{folder}: a model that was not imported; name OUT in place of it after: lm import {folder} -o OUT")
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    if (folder / RESOLVED).is_file():
        use = f"name runs below it, or judge all of them: lm compare {folder.resolve().name}.yaml --report-only"
        raise RunError(f"{folder}: the folder of an experiment, not of a run; {use}")
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise RunError(f"{folder}: not a run folder: it has no {' and no '.join(absent)}")


def read_config(folder: Path) -> Config:
    """The run's resolved configuration. Raises RunError if `folder` is not a run folder, or the file was cut short."""
    require_run(folder, CONFIG)
    path = folder / CONFIG
    try:
        plain = parse_yaml(path.read_bytes(), path.name)
        missing = [spec.name for spec in fields(Config) if spec.name not in (plain or {}) and spec.type is not ExperimentConfig]
        if missing:  # a run writes all of them, `log` last; the experiment since there are experiments
            again = f"lm.config.load.to_yaml(lm.load({str(folder)!r}).config)"
            raise RunError(f"{path}: cut short: it has no {', '.join(missing)}; bring it back, or write what the checkpoint holds: {again}")
        return parse(plain)
    except (OSError, ConfigError, TypeError) as error:
        raise RunError(f"{path}: not readable: {one_line(error)}") from None


def step_path(folder: Path, step: int) -> Path:
    """`step-N.ckpt` in a folder of checkpoints."""
    return folder / f"step-{step:06d}.ckpt"


def step_of(path: Path) -> int:
    """N of a `step-N.ckpt`."""
    return int(path.stem.removeprefix("step-"))


def steps_saved(folder: Path) -> list[Path]:
    """The `step-N.ckpt` files of a folder, in ascending order of step."""
    return sorted((path for path in folder.glob("step-*.ckpt") if path.stem.removeprefix("step-").isdigit()), key=step_of)
