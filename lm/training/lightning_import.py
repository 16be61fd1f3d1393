"""Lightning is imported here without torchmetrics, unless some module has imported torchmetrics before.

torchmetrics imports scipy, matplotlib and transformers, which takes many times as long as importing Lightning.
Lightning needs it for `self.log` alone; `lm.training.train` imports it first for a run with users' callbacks.
"""

import sys
from types import ModuleType

_torchmetrics_stand_in = ModuleType("torchmetrics")
_torchmetrics_stand_in.__version__ = "1.0.0"  # the newest version that Lightning tells from older ones
_torchmetrics_stand_in.Metric, _torchmetrics_stand_in.MetricCollection = (
    type("Metric", (), {}),
    type("MetricCollection", (), {}),
)
try:
    sys.modules.setdefault("torchmetrics", _torchmetrics_stand_in)
    import lightning as L
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
finally:  # who imports torchmetrics afterwards gets the package itself
    if sys.modules["torchmetrics"] is _torchmetrics_stand_in:
        del sys.modules["torchmetrics"]

__all__ = ["L", "MisconfigurationException", "SIGTERMException"]
