"""Import from and export to Hugging Face transformers, and lm's normalizers inside its models."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm.huggingface.inside import add_parameters, register

__all__ = ["add_parameters", "register"]


if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> Callable:
        """The function with this name in `lm.huggingface.inside`, which imports transformers."""
        if name not in __all__:
            raise AttributeError(f"module 'lm.huggingface' has no attribute '{name}'")
        from lm.huggingface import inside

        return getattr(inside, name)
