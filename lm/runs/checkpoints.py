"""Checkpoint and weights files, which are written atomically, verified byte by byte before use, and read without
executing anything.
"""

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
from lm.files import new_temporary_path, replacing, sync_folder
from lm.runs.metadata import SHA256, checked_content, fallback_hint, unreadable_checkpoint

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}

TensorSignature = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor


def write_weights(
    file: BinaryIO, signatures: Mapping[str, TensorSignature], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, str]:
    """Write tensors to a safetensors file; returns the `tensor_sha256` of each tensor by name.

    `signatures` has the dtype and shape of each tensor by name; `tensors` must be in the same order. The file format is
    described in https://huggingface.co/docs/safetensors.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in signatures.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
    digests = {}
    for (name, tensor), (expected_name, signature) in zip(tensors, signatures.items(), strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected_name, *signature), f"{name} is not as described"
        tensor = tensor.contiguous()
        file.write(_tensor_bytes(tensor))
        digests[name] = tensor_sha256(tensor)
    return digests


def tensor_sha256(tensor: Tensor) -> str:
    """The sha256 of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(_tensor_bytes(tensor.contiguous()))
    return digest.hexdigest()


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """The sha256 over names, dtypes, shapes and values of all tensors, sorted by name. Tensors are copied to the CPU
    one at a time.
    """
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(_tensor_bytes(value.cpu().contiguous()))
    return digest.hexdigest()


def _tensor_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def mismatch(expected: Mapping[str, object], saved: Mapping[str, object], unexpected_phrase: str) -> str:
    """Compare tensors by name. Returns a message on the first tensor that is missing in `saved` or `expected`,
    misshapen or not contiguous.

    Returns an empty text if all tensors fit. unexpected_phrase: what the message says of a name that is not in
    `expected`.
    """
    for name in {**expected, **saved}:
        if name not in expected or name not in saved:
            return f"{name} is {'missing' if name in expected else unexpected_phrase}"
        shape, expected_shape = (
            tuple(value.shape) if isinstance(value, Tensor) else None for value in (saved[name], expected[name])
        )
        if shape != expected_shape:
            return f"{name} has shape {shape}, the configuration implies {expected_shape}"
        if shape is not None and not saved[name].is_contiguous():  # a single expanded value can claim any shape
            return f"{name} is not contiguous"
    return ""


# ---------------------------------------------------------------- checkpoints


# entries with tensors, and their names in messages
TENSOR_ENTRIES = {"state_dict": "weights", "optimizer_states": "tensors of the optimizer"}


def save_checkpoint(checkpoint: dict[str, object], path: Path) -> str:
    """Write `checkpoint` atomically to `path`, with a sha256 of each entry that holds tensors; returns the sha256 of
    the weights.

    Raises RunError: the file can't be written, for example because the disk is full.
    """
    digests = _entry_digests(checkpoint)
    with replacing(path, "the checkpoint") as file:
        torch.save({**checkpoint, SHA256: digests}, file)
    return digests["state_dict"]


def link_checkpoint(name: str, path: Path) -> None:
    """Give the checkpoint at `path` a second file name in its folder, such as `last.ckpt`, by a hard link, or a copy
    where links fail.
    """
    link_path = path.parent / name
    temporary_path = new_temporary_path(link_path)
    try:
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


def load_checkpoint(path: Path) -> dict[str, object]:
    """The verified content of a checkpoint, plain data and tensors on the CPU. Nothing in the file is executed.

    Every byte is checked against the CRCs in the file, which torch doesn't check; a gigabyte takes half a second.
    Weights and optimizer tensors are also checked by sha256, which checkpoints of lm 0.9 and earlier lack. CRCs alone
    don't reveal a file that was rewritten with other tensors.

    Raises RunError: the file is missing, damaged, or no checkpoint of lm. The message names the altered tensor, and the
    newest other checkpoint in the folder.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            altered_name = archive.testzip()
            sizes = {
                member.filename.rpartition("/data/")[2]: {member.file_size, member.compress_size}
                for member in archive.infolist()
            }
    # RuntimeError: encrypted, or an unknown compression
    except (OSError, EOFError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        raise unreadable_checkpoint(path, error) from None
    if altered_name:
        raise RunError(
            f"{path}: {_member_label(path, altered_name)} was altered (its CRC differs){fallback_hint(path)}"
        )
    checkpoint = _load_unverified(path)
    for number, (name, size) in enumerate(_storage_sizes(checkpoint).items()):
        if sizes.get(str(number)) != {size}:  # torch would read past a member that is too short
            raise RunError(
                f"{path}: {name.removeprefix('state_dict.')} was altered (it has not its {size:,} "
                f"bytes){fallback_hint(path)}"
            )
    if SHA256 in checkpoint:
        expected_digests = checkpoint[SHA256]
        for entry, digest in _entry_digests(checkpoint).items():
            if not isinstance(expected_digests, dict) or expected_digests.get(entry) != digest:
                raise RunError(
                    f"{path}: its {TENSOR_ENTRIES[entry]} were altered (their sha256 differs){fallback_hint(path)}"
                )
    return checkpoint


def _member_label(path: Path, member: str) -> str:
    """The name that messages give to a member of a checkpoint's zip archive. Member `data/N` has its tensor's name, any
    other member its file name. N counts the tensors that torch saved, from 0; tied tensors count once."""
    number = member.rpartition("/data/")[2]
    if not number.isdigit():
        return member.rpartition("/")[2]
    tensor_names = list(_storage_sizes(_load_unverified(path)))
    return tensor_names[int(number)].removeprefix("state_dict.") if int(number) < len(tensor_names) else member


def _named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor in nested maps and lists, in torch's order of saving. Names are the keys on
    the way, dotted.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key))


def _storage_sizes(checkpoint: dict[str, object]) -> dict[str, int]:
    """The number of bytes of each storage, by the name of its first tensor, in torch's order of saving; tied tensors
    share a storage.
    """
    sizes_by_storage: dict[int, tuple[str, int]] = {}
    for name, tensor in _named_tensors(checkpoint):
        sizes_by_storage.setdefault(tensor.untyped_storage()._cdata, (name, tensor.untyped_storage().nbytes()))
    return dict(sizes_by_storage.values())


def _entry_digests(checkpoint: dict[str, object]) -> dict[str, str]:
    """The sha256 of a checkpoint's weights (`state_dict`) and of the tensors of `optimizer_states`, by these names,
    where it has these entries. Evaluations record the first as `weights_sha256`."""
    return {
        entry: weights_sha256(dict(_named_tensors(checkpoint[entry])))
        for entry in TENSOR_ENTRIES
        if entry in checkpoint
    }


def _load_unverified(path: Path) -> dict[str, object]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a file of another kind fails in many ways inside torch
        raise unreadable_checkpoint(path, error) from None
    checkpoint = checked_content(checkpoint, path)
    if not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in checkpoint["state_dict"].items()
    ):
        raise RunError(f"{path}: its `state_dict` must hold tensors by their names")
    return checkpoint
