"""Count the bytes of tensors that exist at a time, on any device."""

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class TensorMemory(TorchDispatchMode):
    """This context counts the bytes of tensors made within it and not yet freed, each storage once.

    Attributes:
        current_bytes: bytes held now.
        peak_bytes: the most bytes held so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = self.peak_bytes = 0  # bytes held now, and the most bytes so far
        self._storages = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        results = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(results) if isinstance(tensor, Tensor)):
            if storage not in self._storages:
                self._storages[storage] = None
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return results

    def _add(self, n_bytes: int) -> None:
        """Add bytes to those held now; a negative number removes them."""
        self.current_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
