"""lm: what an attention normalizer does to a language model. The public face: load, train, evaluate, compare, judge and results."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm import functional
    from lm.commands.python_face import compare, evaluate, judge, train
    from lm.report.frame import results
    from lm.runs.loading import load

__all__ = ["Given", "compare", "evaluate", "functional", "judge", "load", "results", "train"]
__version__ = "0.11.0"

Given = str | os.PathLike | Mapping[str, object]  # a file or preset, an override `KEY=VALUE`, or keys with their values
_FACE = dict.fromkeys(("compare", "evaluate", "judge", "train"), "lm.commands.python_face")
_FACE |= {"load": "lm.runs.loading", "results": "lm.report.frame"}


if not TYPE_CHECKING:  # to which any name would be one of the package's

    def __getattr__(name: str) -> Callable | ModuleType:
        """The public function or module with this name; its module, which may import torch, is imported at its first use."""
        if name == "functional":
            return import_module("lm.functional")
        if name not in _FACE:
            raise AttributeError(f"module 'lm' has no attribute '{name}'")
        return getattr(import_module(_FACE[name]), name)
