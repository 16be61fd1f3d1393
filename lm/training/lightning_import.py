"""Lightning, imported without torchmetrics unless somebody has imported torchmetrics before."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _without_torchmetrics() -> Iterator[bool]:
    """Put an empty stand-in in place of torchmetrics while Lightning is imported; yield whether that was possible.

    torchmetrics imports scipy, matplotlib and transformers, and takes many times as long to import as Lightning, which
    needs it for `self.log` alone. Code that imports torchmetrics before or afterwards gets the package itself.
    """
    stand_in = ModuleType("torchmetrics")
    stand_in.__version__ = "1.0.0"  # the newest version that Lightning tells from older ones
    stand_in.Metric, stand_in.MetricCollection = type("Metric", (), {}), type("MetricCollection", (), {})
    is_stand_in = "lightning.pytorch" not in sys.modules and (
        sys.modules.setdefault("torchmetrics", stand_in) is stand_in
    )
    try:
        yield is_stand_in
    finally:
        if is_stand_in:
            del sys.modules["torchmetrics"]


with _without_torchmetrics() as _is_stand_in:
    import lightning as L
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

# what to do where code from outside calls `self.log`; empty if Lightning has torchmetrics
TORCHMETRICS_ADVICE = "train in a process that has trained no run without callbacks before" if _is_stand_in else ""
__all__ = ["TORCHMETRICS_ADVICE", "L", "MisconfigurationException", "SIGTERMException"]
