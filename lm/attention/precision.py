"""Where and how attention is computed: the device that its routes are chosen for, and the precision of scores and sums."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_counted: torch.device | None = None


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which the dtypes of operands alone decide what is computed in."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


def executing_device(tensor: Tensor) -> torch.device:
    """The device whose routes a computation with a tensor takes: the tensor's own, unless another's are counted (`counted_on`)."""
    return _counted or tensor.device


@contextmanager
def counted_on(device: torch.device) -> Iterator[None]:
    """Take the routes and blocks of another device than the tensors', to count on fake CPU tensors what that device would keep."""
    global _counted
    _counted = device
    try:
        yield
    finally:
        _counted = None
