"""Writes metrics.jsonl, the log of the run, and mirrors it to wandb."""

import json
import math
from pathlib import Path

from lm.errors import RunError
from lm.runs.evaluations import Evaluation
from lm.schema import Plain
from lm.training.mirror import Mirror


class MetricLog:
    """Appends one JSON object a line to `metrics.jsonl` and mirrors it to wandb. Does nothing on other ranks."""

    def __init__(self, path: Path, mirror: Mirror | None, main: bool):
        self.path, self.mirror, self.main = path, mirror, main

    def write(self, metrics: dict[str, Plain]) -> None:
        """`metrics` holds `step`; numbers that are not finite become null. Raises RunError if the line can't be written."""
        if not self.main:
            return
        finite = {name: value if not isinstance(value, float) or math.isfinite(value) else None for name, value in metrics.items()}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")
        except OSError as error:
            raise RunError(f"{self.path}: can't log step {metrics['step']}: {error.strerror}; go on with resume=auto") from None
        if self.mirror:
            self.mirror.log(metrics)

    def evaluation(self, result: Evaluation, picture: Path) -> None:
        """Mirror what an evaluation gave beside its lines here: curves, and its picture, if there is one at `picture`."""
        if self.mirror:
            self.mirror.evaluation(result, picture)

    def close(self) -> None:
        """Finish the wandb run."""
        if self.mirror:
            self.mirror.finish()
