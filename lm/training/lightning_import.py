"""Lightning, imported without torchmetrics unless a callback from outside needs it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _without_torchmetrics() -> Iterator[None]:
    """Put an empty stand-in in place of torchmetrics while Lightning is imported, as lm logs nothing through
    torchmetrics.

    torchmetrics imports scipy, matplotlib and transformers, and takes many times as long to import as Lightning. Code
    that imports torchmetrics before or afterwards gets the package itself.
    """
    stand_in = ModuleType("torchmetrics")
    stand_in.__version__ = "1.0.0"  # the newest version that Lightning tells from older ones
    stand_in.Metric, stand_in.MetricCollection = type("Metric", (), {}), type("MetricCollection", (), {})
    is_stand_in = sys.modules.setdefault("torchmetrics", stand_in) is stand_in
    try:
        yield
    finally:
        if is_stand_in:
            del sys.modules["torchmetrics"]


with _without_torchmetrics():
    import lightning as L
    from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["L", "SIGTERMException"]
