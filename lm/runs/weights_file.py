"""Weights as a safetensors file, written one tensor after the other: never more than one of them is held for it."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import BinaryIO

import torch
from torch import Tensor

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


def write_weights(file: BinaryIO, described: Mapping[str, Described], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Write tensors, in the order of `described`, which says what will come; returns the sha256 of each (`tensor_sha256`).

    The format: https://huggingface.co/docs/safetensors.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    digests = {}
    for (name, tensor), (expected, described_as) in zip(tensors, described.items(), strict=True):
        assert (name, tensor.dtype, tuple(tensor.shape)) == (expected, *described_as), f"{name} is not as described"
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
    """The sha256 over tensors with their names, dtypes and shapes, in the order of their names; one of them at a time is on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(_bytes(value.cpu().contiguous()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
