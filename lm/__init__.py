"""lm: what an attention normalizer does to a language model."""

import os
from typing import TYPE_CHECKING

__version__ = "0.11.0"

if TYPE_CHECKING:
    from lm.runs.loading import Loaded


def load(path: str | os.PathLike, checkpoint: str | int = "last") -> "Loaded":
    """A trained model with its tokenizer and configuration: see `lm.runs.loading.load`."""
    from lm.runs.loading import load

    return load(path, checkpoint)
