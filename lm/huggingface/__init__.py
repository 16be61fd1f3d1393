"""Read and write models of Hugging Face transformers, and use lm's normalizers in transformers' own models."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm.huggingface.attention_functions import add_normalizer_parameters, register

__all__ = ["add_normalizer_parameters", "register"]


if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> Callable:
        """Return the function `name` of `lm.huggingface.attention_functions`. The first call imports transformers."""
        if name not in __all__:
            raise AttributeError(f"module 'lm.huggingface' has no attribute '{name}'")
        from lm.huggingface import attention_functions

        return getattr(attention_functions, name)
