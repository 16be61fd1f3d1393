"""Run folders: the only thing that training leaves behind and everything after it reads."""

import json
from pathlib import Path

import yaml

from lm.config import Config
from lm.configure import parse
from lm.errors import ConfigError, RunError
from lm.files import write_text
from lm.schema import Plain

CONFIG, ENVIRONMENT, METRICS, TOKENIZER = "config.yaml", "environment.json", "metrics.jsonl", "tokenizer.json"
CHECKPOINTS, EVALUATIONS = "checkpoints", "evaluations"


def write_json(path: Path, content: Plain) -> None:
    """`content` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


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
