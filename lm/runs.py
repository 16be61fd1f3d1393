"""Run folders: the only thing that training leaves behind and everything after it reads."""

import json
import os
import tempfile
from pathlib import Path

import yaml

from lm.config import Config, parse
from lm.errors import ConfigError, RunError
from lm.schema import Plain

CONFIG, ENVIRONMENT, METRICS, TOKENIZER = "config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json"
CHECKPOINTS, EVALUATIONS = "checkpoints", "evaluations"


def write_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) whole or not at all. Raises RunError naming the file and the reason."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise RunError(f"{path}: can't write: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"{path}: can't write: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, content: Plain) -> None:
    """`content` as indented JSON, whole or not at all."""
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Plain]:
    """The object in a JSON file. Raises RunError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: not readable: {' '.join(str(error).split())[:160]}") from None


def read_config(folder: Path) -> Config:
    """The run's resolved configuration. Raises RunError if `folder` is not a run folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise RunError(f"{folder}: not a run folder (no {CONFIG})")
    try:
        return parse(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ConfigError) as error:
        raise RunError(f"{path}: not readable: {' '.join(str(error).split())[:300]}") from None
