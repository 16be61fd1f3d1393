"""Metadata of checkpoints: their content without tensors, read without torch and without executing anything."""

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

from lm.errors import RunError, one_line
from lm.runs.folder import BEST, check_fields, steps_saved

FORMAT = 4  # format of checkpoints; raised when older files can no longer be read
# Metadata that every checkpoint has; a checkpoint that can be resumed has more (lm.training.starting).
METADATA = {
    "step": int,
    "tokens": int,
    "phase": int,
    "vocab_size": int,
    "data_fingerprint": str,
    "config": str,
    "plugins": dict[str, str],
}
SHA256 = "sha256"  # the entry of a checkpoint with a sha256 of each entry that holds tensors; lm 0.9 and earlier wrote none
# Entries that `lm.runs.same_run.check_measured` reads: SHA256, and in the metadata the sha256 of weights by step, and of the log.
SEALS = {SHA256: dict[str, str], "weights_sha256": dict[str, list[str]], "log": dict}


def load_metadata(path: Path) -> dict[str, object]:
    """The checkpoint's metadata: step, phase, configuration ... Raises as `without_tensors`."""
    return without_tensors(path)["lm"]


def best_step(folder: Path) -> int | None:
    """The step of `best.ckpt` in a folder of checkpoints; None if there is none, or it is damaged."""
    with contextlib.suppress(RunError):
        return load_metadata(folder / BEST)["step"]
    return None


def without_tensors(path: Path) -> dict[str, object]:
    """The content of a checkpoint, with stand-ins for tensors, which are neither read nor verified.

    Raises RunError: the file is missing, damaged, or no checkpoint of lm; the message names the last intact checkpoint beside it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _Metadata(io.BytesIO(archive.read(name))).load()  # `read` checks the CRC
    except Exception as error:  # other files fail in many ways
        raise unreadable(path, error) from None
    return checked_content(content, path)


class _Metadata(pickle.Unpickler):
    """Reads the plain data of a checkpoint. No code that the file names is imported."""

    def find_class(self, module: str, name: str) -> type:
        """The class to use in place of any class that the file names, such as the classes of tensors."""
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Nothing

    def persistent_load(self, storage: object) -> None:
        """Leave a tensor's values in the file."""


class _Nothing:
    """Stand-in for an object that is not plain data."""

    def __new__(cls, *arguments: object) -> "_Nothing":
        return object.__new__(cls)


def checked_content(checkpoint: object, path: Path) -> dict[str, object]:
    """A checkpoint's content, with metadata of this version. Raises RunError if `checkpoint` is anything else."""
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(name), dict) for name in ("lm", "state_dict")):
        raise RunError(f"{path}: not a checkpoint of lm")
    if checkpoint["lm"].get("format") != FORMAT:
        raise RunError(f"{path}: checkpoint format {checkpoint['lm'].get('format')}, this version of lm reads {FORMAT}")
    check_fields(checkpoint["lm"], METADATA, path)
    return checkpoint


def unreadable(path: Path, error: Exception) -> RunError:
    """The error for a file that is no checkpoint, or whose metadata are damaged."""
    if isinstance(error, FileNotFoundError):
        return RunError(f"{path}: no such checkpoint or run folder; lm train makes run folders, runs/NAME")
    if isinstance(error, zipfile.BadZipFile) and "CRC" in str(error):
        return RunError(f"{path}: data.pkl was altered (its CRC differs){alternative(path)}")
    return RunError(f"{path}: not a readable checkpoint: {one_line(error, 160)}{alternative(path)}")


def alternative(path: Path) -> str:
    """Words that name the checkpoint to use instead; empty if there is none."""
    candidates = [candidate for candidate in steps_saved(path.parent) if not candidate.samefile(path)]
    return f"; the newest beside it is {candidates[-1]}" if candidates else ""
