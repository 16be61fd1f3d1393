"""lm compares attention normalizers in language models. Its public functions are load, train, evaluate, compare, judge
and results.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm import functional
    from lm.commands.python_interface import compare, evaluate, judge, train
    from lm.report.frame import results
    from lm.runs.loading import load

__all__ = ["ConfigArgument", "compare", "evaluate", "functional", "judge", "load", "results", "train"]
__version__ = "0.12.0.dev0"

# a YAML file, a preset, an override `KEY=VALUE`, or a mapping of keys to values
ConfigArgument = str | os.PathLike | Mapping[str, object]
# module of each public function
_MODULE_BY_NAME = dict.fromkeys(("compare", "evaluate", "judge", "train"), "lm.commands.python_interface")
_MODULE_BY_NAME |= {"load": "lm.runs.loading", "results": "lm.report.frame"}


if not TYPE_CHECKING:  # a type checker that sees this function takes any name for an attribute of the package

    def __getattr__(name: str) -> Callable | ModuleType:
        """Import the public function or module `name` at its first use and return it, so that `import lm` doesn't
        import torch.
        """
        if name == "functional":
            return import_module("lm.functional")
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'lm' has no attribute '{name}'")
        return getattr(import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook."""
    return __all__
