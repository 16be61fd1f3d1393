"""Checkpoint and weights files: written atomically, verified byte by byte before use, read without executing anything."""

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lm.errors import RunError
from lm.files import replacing, sync_folder
from lm.runs.metadata import SHA256, alternative, checked_content, unreadable

_TYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}

Described = tuple[torch.dtype, tuple[int, ...]]  # type and shape of a tensor


def write_weights(file: BinaryIO, signatures: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Write tensors in the order of `signatures` (types and shapes by name); returns the sha256 of each tensor (`tensor_sha256`).

    The format: https://huggingface.co/docs/safetensors.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in signatures.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    digests = {}
    for (name, tensor), (expected_name, signature) in zip(tensors, signatures.items(), strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected_name, *signature), f"{name} is not as described"
        tensor = tensor.contiguous()
        file.write(_bytes(tensor))
        digests[name] = tensor_sha256(tensor)
    return digests


def tensor_sha256(tensor: Tensor) -> str:
    """The sha256 of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_bytes(tensor.contiguous()))
    return digest.hexdigest()


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """The sha256 over tensors with their names, dtypes and shapes, in the order of their names; one tensor at a time is on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(_bytes(value.cpu().contiguous()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def mismatch(expected: Mapping[str, object], saved: Mapping[str, object], surplus: str) -> str:
    """Words on the first saved value that is missing, not expected, or of another shape or layout; empty if all values fit.

    surplus: words for a name that is not expected.
    """
    for name in {**expected, **saved}:
        if name not in expected or name not in saved:
            return f"{name} is {'missing' if name in expected else surplus}"
        shape, expected_shape = (tuple(value.shape) if isinstance(value, Tensor) else None for value in (saved[name], expected[name]))
        if shape != expected_shape:
            return f"{name} has shape {shape}, the configuration implies {expected_shape}"
        if shape is not None and not saved[name].is_contiguous():  # a single expanded value can claim any shape
            return f"{name} is not contiguous"
    return ""


# ---------------------------------------------------------------- checkpoints


PARTS = {"state_dict": "weights", "optimizer": "tensors of the optimizer"}  # words for the entries of a checkpoint that hold tensors


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> str:
    """Write `checkpoint`, and a sha256 of each of its `PARTS`, whole or not at all; returns the sha256 of the weights.

    Raises RunError: the file can't be written (a full disk, say).
    """
    digests = _digests(checkpoint)
    with replacing(path, "the checkpoint") as file:
        torch.save({**checkpoint, SHA256: digests}, file)
    return digests["state_dict"]


def link_checkpoint(name: str, path: Path) -> None:
    """Give the checkpoint `path` a second `name` in its folder (`last.ckpt`): a hard link, or a copy where hard links are unsupported."""
    link_path, temporary_path = path.parent / name, path.parent / f".{name}"
    try:
        temporary_path.unlink(missing_ok=True)
        try:
            os.link(path, temporary_path)
        except OSError:
            with replacing(link_path, "the checkpoint") as copy, path.open("rb") as file:
                shutil.copyfileobj(file, copy)
            return
        os.replace(temporary_path, link_path)
        temporary_path.unlink(missing_ok=True)  # still there if both were the same file already
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{link_path}: can't save the checkpoint: {error.strerror}; {path} is intact") from None


def verify(path: Path) -> None:
    """Compare every byte of a checkpoint with the CRCs in the file, which torch doesn't check; a gigabyte takes half a second.

    Raises RunError: the file is missing or damaged; the message names the tensor, and the last intact checkpoint beside the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            altered_name = archive.testzip()
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, ValueError) as error:  # RuntimeError: encrypted, or an unknown compression
        raise unreadable(path, error) from None
    if altered_name:
        raise RunError(f"{path}: {_tensor_name(path, altered_name)} was altered (its CRC differs){alternative(path)}")


def load_checkpoint(path: Path) -> dict[str, object]:
    """The checkpoint's plain data and tensors, verified, on the CPU. Nothing in the file is executed.

    Beside CRCs, the sha256 of each of its `PARTS` is compared: an archive that was written anew, with other tensors, has matching CRCs.

    Raises RunError: the file is missing, damaged, or no checkpoint of lm; the message names the last intact checkpoint beside it.
    """
    verify(path)
    checkpoint = _read(path)
    _check_sizes(path, checkpoint)
    if SHA256 in checkpoint:
        expected_digests = checkpoint[SHA256]
        for part, digest in _digests(checkpoint).items():
            if not isinstance(expected_digests, dict) or expected_digests.get(part) != digest:
                raise RunError(f"{path}: its {PARTS[part]} were altered (their sha256 differs){alternative(path)}")
    return checkpoint


def _tensor_name(path: Path, member: str) -> str:
    """Words for the content of an archive's member: `data/N` is the N-th saved tensor, counted from 0. A tensor with two names is saved
    once."""
    number = member.rpartition("/data/")[2]
    if not number.isdigit():
        return member.rpartition("/")[2]
    names = list(_storages(_read(path)))
    return names[int(number)].removeprefix("state_dict.") if int(number) < len(names) else member


def _tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested maps and lists, with the keys that lead to them, in the order in which torch saves them."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def _storages(checkpoint: dict[str, object]) -> dict[str, int]:
    """Bytes of each storage, by the name of its first tensor, in the order in which torch saves them; tied tensors share a storage."""
    storages: dict[int, tuple[str, int]] = {}
    for name, tensor in _tensors(checkpoint):
        storages.setdefault(tensor.untyped_storage()._cdata, (name, tensor.untyped_storage().nbytes()))
    return dict(storages.values())


def _check_sizes(path: Path, checkpoint: dict[str, object]) -> None:
    """Raises RunError if a member of the archive has another size than its tensor; torch would fill the tensor with the next bytes."""
    with zipfile.ZipFile(path) as archive:
        sizes = {member.filename.rpartition("/data/")[2]: {member.file_size, member.compress_size} for member in archive.infolist()}
    for number, (name, size) in enumerate(_storages(checkpoint).items()):
        if sizes.get(str(number)) != {size}:
            raise RunError(f"{path}: {name.removeprefix('state_dict.')} was altered (it has not its {size:,} bytes){alternative(path)}")


def _digests(checkpoint: dict[str, object]) -> dict[str, str]:
    """The sha256 of the tensors of each of `PARTS`; the sha256 of `state_dict` is the `weights_sha256` of evaluations, too."""
    return {part: weights_sha256(dict(_tensors(checkpoint[part]))) for part in PARTS if part in checkpoint}


def _read(path: Path) -> dict[str, object]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file of another kind fails in many ways inside torch
        raise unreadable(path, error) from None
    checkpoint = checked_content(checkpoint, path)
    if not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in checkpoint["state_dict"].items()):
        raise RunError(f"{path}: its `state_dict` must hold tensors by their names")
    return checkpoint
