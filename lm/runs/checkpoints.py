"""Checkpoint files: written atomically, verified byte by byte before use, read without executing anything."""

import os
import shutil
import zipfile
from pathlib import Path

import torch

from lm.errors import RunError, one_line
from lm.files import replacing, sync_folder
from lm.runs.folder import BEST, check_fields, step_path, steps_saved

FORMAT = 4  # format of checkpoints; raised when older files can no longer be read
# Metadata that every checkpoint has; one that can be resumed has more (lm.training.state).
METADATA = {
    "step": int,
    "tokens": int,
    "phase": int,
    "vocab_size": int,
    "data_fingerprint": str,
    "config": str,
    "plugins": dict[str, str],
}


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> None:
    """Write `checkpoint` whole or not at all. Raises RunError if it can't be written (a full disk, say)."""
    with replacing(path, "the checkpoint") as file:
        torch.save(checkpoint, file)


def link_checkpoint(name: str, path: Path) -> None:
    """Make `name` (`last.ckpt`, `best.ckpt`) beside `path` the same file: a hard link, or a copy where hard links are unsupported."""
    target, temporary = path.parent / name, path.parent / f".{name}"
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            with replacing(target, "the checkpoint") as copy, path.open("rb") as file:
                shutil.copyfileobj(file, copy)
            return
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # still there if both were the same file already
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{target}: can't save the checkpoint: {error.strerror}; {path} is intact") from None


def is_saved(folder: Path, step: int) -> bool:
    """True if a folder of checkpoints holds the one of `step`, under its own name or as the best."""
    if step_path(folder, step).exists():
        return True
    try:
        return load_metadata(folder / BEST)["step"] == step
    except RunError:
        return False


def verify(path: Path, tensors: bool = True) -> None:
    """Compare every byte of a checkpoint with the CRC that the file holds of it, which torch doesn't; without `tensors` all but theirs.

    A gigabyte takes half a second.

    Raises:
        RunError: no file, or a damaged one; names the tensor, and the last intact checkpoint beside it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if tensors or "/data/" not in member.filename:
                    _check_member(archive, member, path)
    except FileNotFoundError:
        raise RunError(f"{path}: no such checkpoint") from None
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError) as error:  # RuntimeError: compressed in an unknown way, or encrypted
        raise _unreadable(path, error) from None


def load_checkpoint(path: Path) -> dict[str, object]:
    """The checkpoint's plain data and tensors, verified, on the CPU. Nothing in the file is executed.

    Raises:
        RunError: no file, a damaged one, or not a checkpoint of ours; names the last intact one beside it.
    """
    verify(path)
    return _read(path)


def load_metadata(path: Path) -> dict[str, object]:
    """The checkpoint's metadata: step, phase, configuration ... Tensors are neither read nor verified. Raises as `load_checkpoint`."""
    verify(path, tensors=False)
    return _read(path)["lm"]


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    try:
        with archive.open(member) as file:
            while file.read(2**20):
                pass
    except (zipfile.BadZipFile, EOFError):
        raise RunError(f"{path}: {_tensor_name(path, member.filename)} was altered (its CRC differs){_alternative(path)}") from None


def _tensor_name(path: Path, member: str) -> str:
    """What a member of the archive holds: `data/N` is the N-th tensor saved, counted from 0; a tensor with two names is saved once."""
    number = member.rpartition("/data/")[2]
    if not number.isdigit():
        return member.rpartition("/")[2]
    names: dict[int, str] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            names.setdefault(value.untyped_storage().data_ptr(), name)
        elif isinstance(value, dict | list | tuple):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                walk(item, f"{name}.{key}" if name else str(key))

    walk(_read(path), "")
    return list(names.values())[int(number)].removeprefix("state_dict.") if int(number) < len(names) else member


def _read(path: Path) -> dict[str, object]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file of another kind fails in many ways inside torch
        raise _unreadable(path, error) from None
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(name), dict) for name in ("lm", "state_dict")):
        raise RunError(f"{path}: not a checkpoint of lm")
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in checkpoint["state_dict"].items()):
        raise RunError(f"{path}: its `state_dict` must hold tensors by their names")
    if checkpoint["lm"].get("format") != FORMAT:
        raise RunError(f"{path}: checkpoint format {checkpoint['lm'].get('format')}, this version of lm reads {FORMAT}")
    check_fields(checkpoint["lm"], METADATA, path)
    return checkpoint


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: not a readable checkpoint: {one_line(error, 160)}{_alternative(path)}")


def _alternative(path: Path) -> str:
    """Words that name the checkpoint to use instead; empty if there is none."""
    others = [other for other in steps_saved(path.parent) if not other.samefile(path)]
    return f"; the newest beside it is {others[-1]}" if others else ""
