"""The context that all phases of a run have in common."""

from dataclasses import dataclass

from lm.config.tree import Config
from lm.data.store import Store
from lm.evaluation.evaluation_kind import Measurement
from lm.model.device import Resolved
from lm.progress import StepProgress
from lm.training.launcher import Launcher
from lm.training.mirror import MetricLog


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes: Lightning's accelerator, the device in words, precision, whether it compiles, who started its
    processes, and the FLOPs a second that one device can make (None: not known)."""

    accelerator: str
    device: str
    precision: Resolved
    compiled: Resolved
    launcher: Launcher = "lightning"
    peak_flops: float | None = None

    @property
    def bf16(self) -> bool:
        """True if precision is bf16-mixed, else it is 32."""
        return self.precision.value != "32"

    @property
    def compiles(self) -> bool:
        """True if the model is compiled."""
        return self.compiled.value == "true"


@dataclass(frozen=True)
class RunContext:
    """The context that all phases of a run have in common; `measurements`: what it measures, the validation first."""

    config: Config
    store: Store
    measurements: list[Measurement]
    machine: Machine
    wandb_id: str
    log: MetricLog
    progress: StepProgress
