"""Checkpoint files: written whole or not at all, read without executing anything."""

import os
import shutil
from pathlib import Path

import torch

from lm.errors import RunError
from lm.files import replacing, sync_folder

FORMAT = 2  # of the checkpoint's `lm` entry; raised when older files can no longer be read
LAST, BEST = "last.ckpt", "best.ckpt"


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> None:
    """Write `checkpoint` whole or not at all. Raises RunError if it can't be written (a full disk, say)."""
    with replacing(path, "the checkpoint") as file:
        torch.save(checkpoint, file)


def point(name: str, path: Path) -> None:
    """Make `name` (`last.ckpt`, `best.ckpt`) beside `path` the same file: a hard link, or a copy where links are not to be had."""
    target, fresh = path.parent / name, path.parent / f".{name}"
    try:
        fresh.unlink(missing_ok=True)
        try:
            os.link(path, fresh)
        except OSError:
            with replacing(target, "the checkpoint") as copy, path.open("rb") as file:
                shutil.copyfileobj(file, copy)
            return
        os.replace(fresh, target)
        fresh.unlink(missing_ok=True)  # still there if both were the same file already
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{target}: can't save the checkpoint: {error.strerror}; {path} is intact") from None


def step_path(folder: Path, step: int) -> Path:
    """`step-N.ckpt` in a folder of checkpoints."""
    return folder / f"step-{step:06d}.ckpt"


def step_of(path: Path) -> int:
    """N of a `step-N.ckpt`."""
    return int(path.stem.removeprefix("step-"))


def steps_saved(folder: Path) -> list[Path]:
    """The `step-N.ckpt` files of a folder, by rising step."""
    return sorted((path for path in folder.glob("step-*.ckpt") if path.stem.removeprefix("step-").isdigit()), key=step_of)


def is_saved(folder: Path, step: int) -> bool:
    """True if a folder of checkpoints holds that of `step`, under its own name or as the best."""
    if step_path(folder, step).exists():
        return True
    try:
        return load_checkpoint(folder / BEST)["lm"]["step"] == step
    except RunError:
        return False


def load_checkpoint(path: Path) -> dict[str, object]:
    """The checkpoint's plain data and tensors, on the CPU. Nothing in the file is executed.

    Raises:
        RunError: no file, or not a checkpoint of ours; names the last intact one beside it.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint") from None
    except Exception as error:  # a damaged file fails in many ways inside torch
        others = [other for other in steps_saved(path.parent) if not other.samefile(path)]
        hint = f"; the newest beside it is {max(others, key=lambda other: other.stat().st_mtime_ns)}" if others else ""
        raise RunError(f"{path}: not a readable checkpoint: {' '.join(str(error).split())[:160]}{hint}") from None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("lm"), dict):
        raise RunError(f"{path}: not a checkpoint of lm")
    if checkpoint["lm"].get("format") != FORMAT:
        raise RunError(f"{path}: of checkpoint format {checkpoint['lm'].get('format')}, this version of lm reads {FORMAT}")
    return checkpoint


def bare_weights(checkpoint: dict[str, object]) -> dict[str, torch.Tensor]:
    """The decoder's state dict in a checkpoint."""
    return {name.removeprefix("decoder."): value for name, value in checkpoint["state_dict"].items()}
