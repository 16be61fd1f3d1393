"""Metadata of checkpoints: their content without tensors, read without torch and without executing anything."""

import contextlib
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

from lm.errors import RunError, one_line
from lm.runs.folder import BEST, check_fields, step_paths

CHECKPOINT_FORMAT = 5  # format of checkpoints; raised when older files can no longer be read
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
# the entry of a checkpoint with a sha256 of each entry that holds tensors; lm 0.9 and earlier wrote none
SHA256 = "sha256"
# Entries that `lm.runs.same_run.check_evaluations` reads: SHA256, and in the metadata digests of the weights by step
# and of the log.
DIGEST_FIELDS = {SHA256: dict[str, str], "weights_sha256": dict[str, list[str]], "log": dict}


def load_metadata(path: Path) -> dict[str, object]:
    """The checkpoint's metadata: step, phase, configuration ... Raises the errors of `read_without_tensors`."""
    return read_without_tensors(path)["lm"]


def best_step(folder: Path) -> int | None:
    """The step of `best.ckpt` in a folder of checkpoints; None if there is none, or it is damaged."""
    with contextlib.suppress(RunError):
        return load_metadata(folder / BEST)["step"]
    return None


def read_without_tensors(path: Path) -> dict[str, object]:
    """The content of a checkpoint with placeholders for its tensors, whose values are neither read nor verified.

    Raises RunError: the file is missing, damaged, or no checkpoint of lm; the message names the newest other checkpoint
    in the folder.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            member = next(member for member in archive.namelist() if member.endswith("/data.pkl"))
            content = _MetadataUnpickler(io.BytesIO(archive.read(member))).load()  # `read` checks the CRC
    except Exception as error:  # other files fail in many ways
        raise unreadable_checkpoint(path, error) from None
    return checked_content(content, path)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the plain data of a checkpoint. No code that the file names is imported."""

    def find_class(self, module: str, name: str) -> type:
        """OrderedDict if the file names it; for any other class that the file names, such as a tensor's, a placeholder
        class.
        """
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Placeholder

    def persistent_load(self, storage: object) -> None:
        """Return None in place of a tensor's storage, which is not read."""


class _Placeholder:
    """Placeholder for an object that is not plain data, such as a tensor; its constructor ignores all arguments."""

    def __new__(cls, *arguments: object) -> "_Placeholder":
        return object.__new__(cls)


def checked_content(checkpoint: object, path: Path) -> dict[str, object]:
    """Return `checkpoint`, the content of the file at `path`. Raises RunError if it is no checkpoint that this version
    of lm can read.
    """
    if not isinstance(checkpoint, dict) or not all(
        isinstance(checkpoint.get(name), dict) for name in ("lm", "state_dict")
    ):
        raise RunError(f"{path}: not a checkpoint of lm")
    if checkpoint["lm"].get("format") != CHECKPOINT_FORMAT:
        raise RunError(
            f"{path}: checkpoint format {checkpoint['lm'].get('format')}, this version of lm reads {CHECKPOINT_FORMAT}"
        )
    check_fields(checkpoint["lm"], METADATA, path)
    return checkpoint


def unreadable_checkpoint(path: Path, error: Exception) -> RunError:
    """The RunError for a checkpoint file that can't be read because of `error`; the message says what is wrong and what
    to do.
    """
    if isinstance(error, FileNotFoundError):
        return RunError(f"{path}: no such checkpoint or run folder; lm train makes run folders, runs/NAME")
    if isinstance(error, zipfile.BadZipFile) and "CRC" in str(error):
        return RunError(f"{path}: data.pkl was altered (its CRC differs){fallback_hint(path)}")
    return RunError(f"{path}: not a readable checkpoint: {one_line(error, 160)}{fallback_hint(path)}")


def fallback_hint(damaged_path: Path) -> str:
    """The end of an error message on a damaged checkpoint, which names the newest other one in its folder; empty if
    there is none.
    """
    other_checkpoints = [
        checkpoint for checkpoint in step_paths(damaged_path.parent) if not checkpoint.samefile(damaged_path)
    ]
    return f"; the newest beside it is {other_checkpoints[-1]}" if other_checkpoints else ""
