"""Stand-ins for torch and for modules that need torch: each is imported when one of its attributes is first used.

Modules of normalizers import the names below, so that a command can read their options without waiting for torch.
`Tensor`, `AttentionLayout` and `Module` are `object` at run time: they serve in annotations, and `Module` as a base
class.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
    from torch.nn import Module

    from lm.attention import elementwise_sums, layout, routes
    from lm.attention.layout import AttentionLayout
else:

    class _Lazy(ModuleType):
        """A stand-in for the module called `name`, which is imported at the first access to an attribute."""

        def __getattr__(self, name: str) -> object:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    torch, F = _Lazy("torch"), _Lazy("torch.nn.functional")
    elementwise_sums, layout, routes = (
        _Lazy(f"lm.attention.{name}") for name in ("elementwise_sums", "layout", "routes")
    )
    Tensor = AttentionLayout = Module = object
