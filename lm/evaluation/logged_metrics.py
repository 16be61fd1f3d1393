"""Metrics that Lightning's callbacks from outside log, as an evaluation of the last step, so that they can decide."""

import hashlib

import numpy as np

from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.evaluations import Sample, Series, Shown
from lm.runs.metric import Metric
from lm.schema import Plain


class LoggedMetrics(Measurement):
    """The values that callbacks of `trainer.callbacks` gave to `self.log` last: one number a run for each metric."""

    kind = "callbacks"
    logged = (Metric("{NAME}", meaning="what a callback of `trainer.callbacks` gives to self.log", units="questions"),)
    values: dict[str, float]  # by name; set before each measurement

    @classmethod
    def options_of(cls, config: Config) -> Timing:
        return Timing()  # at the last step

    @property
    def options(self) -> dict[str, Plain]:
        return {"callbacks": [*self.config.trainer.callbacks]}

    @property
    def work_units(self) -> int:
        return 0

    def cacheable(self, series: object) -> bool:
        return False  # `lm eval` can't measure them

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[Series]:
        display = Shown("Metrics of callbacks", "runs", "one value a run")
        return [
            self.series(name, "", "none", value, logged=(name,), samples=(_sample(name, value),), shown=display)
            for name, value in self.values.items()
        ]


def _sample(name: str, value: float) -> Sample:
    """A sample of one value, which pairs with that of another run."""
    return Sample(hashlib.sha256(name.encode()).hexdigest(), np.array([[value]]), np.ones(1), np.zeros(1, int))
