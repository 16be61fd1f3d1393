"""Checkpoint files: written whole or not at all, read without executing anything."""

import os
import re
import shutil
from pathlib import Path

import torch
import yaml

from lm.config import Config, parse
from lm.errors import ConfigError, RunError
from lm.files import replacing, sync_folder
from lm.model import Decoder

_STEP = re.compile(r"step-(\d+)\.ckpt")
LAST = "last.ckpt"


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> None:
    """Write `checkpoint` whole or not at all. Raises RunError if it can't be written (a full disk, say)."""
    with replacing(path, "the checkpoint") as file:
        torch.save(checkpoint, file)


def point_last(path: Path) -> None:
    """Make `last.ckpt` beside `path` the same file: a hard link, or a copy where links are not to be had."""
    last, fresh = path.parent / LAST, path.parent / ".last.ckpt"
    try:
        fresh.unlink(missing_ok=True)
        try:
            os.link(path, fresh)
        except OSError:
            shutil.copyfile(path, fresh)
        os.replace(fresh, last)
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{last}: can't save the checkpoint: {error.strerror}; {path} is intact") from None


def steps_saved(folder: Path) -> list[Path]:
    """The `step-N.ckpt` files of a folder, by rising step."""
    found = [(int(match[1]), path) for path in folder.glob("step-*.ckpt") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def load_checkpoint(path: Path) -> dict[str, object]:
    """The checkpoint's plain data and tensors, on the CPU. Nothing in the file is executed.

    Raises:
        RunError: no file, or not a checkpoint of ours.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint") from None
    except Exception as error:  # a damaged file fails in many ways inside torch
        raise RunError(f"{path}: not a readable checkpoint: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("lm"), dict):
        raise RunError(f"{path}: not a checkpoint of lm")
    return checkpoint


def load_decoder(path: Path) -> tuple[Decoder, Config, dict[str, object]]:
    """The model of a checkpoint, the configuration it was trained with, and the checkpoint's facts
    (`step`, `tokens`, `data_fingerprint`, `vocab_size`).

    Raises:
        RunError: unreadable, or its weights don't fit its configuration.
    """
    checkpoint = load_checkpoint(path)
    facts = checkpoint["lm"]
    try:
        config = parse(yaml.safe_load(facts["config"]))
        decoder = Decoder(config.model, facts["vocab_size"], config.data.seq_len, seed=None)
        weights = {name.removeprefix("decoder."): value for name, value in checkpoint["state_dict"].items()}
        decoder.load_state_dict(weights, strict=True)
    except (ConfigError, KeyError, RuntimeError) as error:
        raise RunError(f"{path}: weights and configuration don't fit: {' '.join(str(error).split())[:300]}") from None
    return decoder.eval(), config, facts
