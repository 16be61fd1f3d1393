"""The tensors of a folder of safetensors: names, shapes and types from the files' headers, the numbers one tensor at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lm.errors import RunError, one_line
from lm.runs.folder import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_TYPES = ("F32", "F16", "BF16")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Tensors(Protocol):
    """Tensors by their names in transformers, to be read one by one.

    Attributes:
        path: names them in errors.
        shapes: of each tensor.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """A tensor, fp32, on the CPU. Raises RunError: it can't be read."""
        ...


@dataclass(frozen=True)
class _Stored:
    file: Path
    shape: tuple[int, ...]


class Shards:
    """The tensors of model.safetensors, or of the shards that model.safetensors.index.json lists.

    Raises:
        RunError: none there, a shard that is missing, cut short, damaged or not as the index says; tensors of a type that is not read.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self._stored: dict[str, _Stored] = {}
        for file, names in _files(folder).items():
            self._describe(file, names)
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def _describe(self, file: Path, names: set[str] | None) -> None:
        """Read the header of a file; `names`: what it holds by the index."""
        if not file.is_file():
            raise RunError(f"{file}: no such file, which {INDEX} lists; fetch the model again")
        try:
            with safe_open(file, "pt") as opened:
                held = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                types = {name: part.get_dtype() for name, part in held.items()}
                shapes = {name: tuple(part.get_shape()) for name, part in held.items()}
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: not a readable safetensors file: {one_line(error, 160)}; fetch it again") from None
        if names is not None and names != held.keys():
            name = min(names ^ held.keys())
            raise RunError(f"{file}: {name} is {'missing, ' if name in names else 'not '}listed for it in {INDEX}; fetch the model again")
        for name, kind in types.items():
            if kind not in READ_TYPES:
                raise RunError(f"{file}: {name} has type {kind}; only {', '.join(READ_TYPES)} are read")
            self._stored[name] = _Stored(file, shapes[name])

    def read(self, name: str) -> Tensor:
        """A tensor, fp32. The file is opened for it alone: of mapped memory no more stays than that of this tensor."""
        file = self._stored[name].file
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(name).to(torch.float32)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: {name} is not readable: {one_line(error, 160)}") from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files that hold the weights, and the names that each holds by the index, if there is one."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    index = folder / INDEX
    if not index.is_file():
        if pickles := [path.name for pattern in PICKLES for path in sorted(folder.glob(pattern))]:
            reason = "a pickle, which may run code when it is read; convert it where you trust it: model.save_pretrained writes safetensors"
            raise RunError(f"{folder / pickles[0]}: {reason}")
        raise RunError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}")
    by_name = read_json(index).get("weight_map")
    if not isinstance(by_name, dict) or not by_name or not _plain_names(by_name.values()):
        raise RunError(f"{index}: its weight_map must name a file of the folder for each tensor")
    files: dict[Path, set[str] | None] = {}
    for name, file in by_name.items():
        files.setdefault(folder / file, set()).add(name)
    return files


def _plain_names(files: Iterable[object]) -> bool:
    return all(isinstance(file, str) and file not in ("", ".", "..") and Path(file).name == file for file in files)
