"""Checkpoint files are written atomically, checked by the manifest before use, and read without executing code in
them.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from lm.errors import RunError, one_line
from lm.files import file_sha256, replace_file
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    add_entries,
    check_file,
    checkpoint_paths,
    log_manifest_entry,
    manifest_entry,
)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, dtypes, shapes and values of all tensors, sorted by name. Tensors are copied to the
    CPU one at a time.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


# ---------------------------------------------------------------- checkpoints


CHECKPOINT_FORMAT = 5  # format of checkpoints; raised when older files can no longer be read


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> None:
    """Write `checkpoint` atomically to `path`, the path checkpoints/NAME in a run folder. The manifest gets an entry
    for this file and one for the metrics.jsonl written so far.

    Raises RunError: the file can't be written, for example because the disk is full, or torch can't read it back.
    """
    weights, step, run = weights_sha256(checkpoint["state_dict"]), checkpoint["lm"]["step"], path.parent.parent
    with replace_file(path, "the checkpoint") as file:
        torch.save(checkpoint, file)
        file.flush()
        try:  # now, not as the run is resumed
            torch.load(file.name, weights_only=True, mmap=True)
        except UnpicklingError:
            reason = "a callback's state is no numbers, texts, tensors, and lists and maps of them"
            raise RunError(f"{path}: can't be read back: {reason} (trainer.callbacks)") from None
        sha256 = file_sha256(Path(file.name))
        add_entries(
            run,
            log_manifest_entry(run, step),
            manifest_entry(f"{CHECKPOINTS_FOLDER}/{path.name}", sha256, step, weights),
        )


def load_checkpoint(path: Path) -> dict[str, object]:
    """Return the content of a checkpoint: plain data, and tensors on the CPU. Nothing in the file is executed. A file
    in a run folder is checked by its manifest, which takes one or two seconds for each gigabyte.

    Raises RunError: the file is missing, damaged, or no checkpoint of lm. The message names the newest other checkpoint
    in the folder.
    """
    folder = Path(os.path.realpath(path)).parent  # raises nothing for a loop of links
    if folder.name == CHECKPOINTS_FOLDER and path.is_file():
        check_file(
            folder.parent, f"{CHECKPOINTS_FOLDER}/{path.resolve().name}", advice=f"bring it back{_fallback_hint(path)}"
        )
    return read_checkpoint_without_manifest(path)


def read_checkpoint_without_manifest(path: Path) -> dict[str, object]:
    """Return the content of a checkpoint file without a check by the manifest. Tensors are read when they are used;
    `lm` in the content is plain data: step, phase, configuration and more.

    Raises RunError: the file is missing or unreadable, or no checkpoint of this version of lm.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint or run folder; lm train makes run folders, runs/NAME") from None
    except Exception as error:  # a file of another kind fails in many ways inside torch
        reason = f"not a readable checkpoint: {one_line(error, 160)}"
        raise RunError(f"{path}: {reason}; bring it back{_fallback_hint(path)}") from None
    if not isinstance(content, dict) or not isinstance(content.get("lm"), dict):
        raise RunError(f"{path}: not a checkpoint of lm")
    if (version := content["lm"].get("format")) != CHECKPOINT_FORMAT:
        remedy = "; lm 0.11 reads it" if version == 4 else ""
        raise RunError(f"{path}: checkpoint format {version}, this version of lm reads {CHECKPOINT_FORMAT}{remedy}")
    return content


def _fallback_hint(damaged_path: Path) -> str:
    """Return the end of an error message on a damaged checkpoint, which names the newest other checkpoint in its
    folder. It is empty if there is no other.
    """
    others = [checkpoint for checkpoint in checkpoint_paths(damaged_path.parent) if checkpoint != damaged_path]
    return f"; the newest beside it is {others[-1]}" if others else ""
