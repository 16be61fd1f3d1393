"""Lightning without torchmetrics, which brings scipy, matplotlib and transformers, and takes many times as long to import as Lightning."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _without_torchmetrics() -> Iterator[None]:
    """Give Lightning stand-ins for the classes of torchmetrics that it tests values for: nothing here is logged through it. Whoever imports
    torchmetrics before or afterwards has the package itself."""
    if "torchmetrics" in sys.modules:
        yield
        return
    stand_in = ModuleType("torchmetrics")
    stand_in.__version__ = "1.0.0"  # the newest that Lightning tells from others
    stand_in.Metric, stand_in.MetricCollection = type("Metric", (), {}), type("MetricCollection", (), {})
    sys.modules["torchmetrics"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torchmetrics"]


with _without_torchmetrics():
    import lightning as L
    from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

__all__ = ["ClusterEnvironment", "L", "LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"]
