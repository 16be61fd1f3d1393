"""Metrics that Lightning's callbacks from outside log, as an evaluation of the last step, so that they can decide."""

import hashlib
from dataclasses import replace

import numpy as np
import pandas as pd

from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.evaluations import rows, units_frame
from lm.runs.metric import Metric
from lm.schema import Plain


class LoggedMetrics(Measurement):
    """The values that callbacks of `trainer.callbacks` gave to `self.log` last: one number a run for each metric."""

    kind = "callbacks"
    logged = (
        Metric("{NAME}", meaning="what a callback of `trainer.callbacks` gives to self.log", units="questions",
            title="Metrics of callbacks", measured_on="runs", amount="one value a run"),
    )  # fmt: skip
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

    def cacheable(self, frame: pd.DataFrame) -> bool:
        return False  # `lm eval` can't measure them

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        (metric,) = self.logged
        blocks = []
        for name, value in self.values.items():
            # one value, which pairs with that of another run
            units = units_frame(hashlib.sha256(name.encode()).hexdigest(), np.zeros(1, int))
            blocks.append(rows(replace(metric, quantity=name), np.array([[value]]), units, names=[name]))
        return blocks
