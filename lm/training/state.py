"""What a run remembers from step to step beside weights and optimizer."""

import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from lm.errors import RunError
from lm.runs.checkpoints import is_saved, step_path
from lm.schema import Plain, convert, type_name


@dataclass
class RunState:
    """What a run remembers beside weights and optimizer; a checkpoint's facts hold it whole. The same on all ranks but for the time.

    Attributes:
        best: `step`, `loss` and `rows_sha256` of the lowest validation so far.
        skipped: steps whose update was left out.
        skipped_in_a_row: as many of them were the last ones.
        nll_since_line, targets_since_line: loss (nats) and targets over all ranks since the last logged line.
        elapsed_s: seconds of training.
    """

    best: dict[str, int | float | str] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    nll_since_line: float = 0.0
    targets_since_line: int = 0
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, facts: dict[str, Plain], folder: Path) -> "RunState":
        """As a checkpoint's `facts` have it. A best model that is not in `folder`, with the run's checkpoints, any more is none.

        Raises:
            RunError: something is missing, or of another type.
        """
        values = {one.name: convert(one.type, facts.get(one.name, MISSING)) for one in fields(cls)}
        for one in fields(cls):
            if values[one.name] is MISSING:
                found = str(facts.get(one.name))[:40]
                raise RunError(f"{step_path(folder, facts['step'])}: its `{one.name}` must be {type_name(one.type)}, not {found!r}")
        state = cls(**values)
        if state.best and not is_saved(folder, state.best["step"]):  # a run that goes back may find the weights gone
            state.best = None
        return state

    def made(self, nll: float, targets: int) -> None:
        """A step was made, with this loss (nats, summed) over so many targets."""
        self.skipped_in_a_row = 0
        self.nll_since_line += nll
        self.targets_since_line += targets

    def left_out(self) -> None:
        """A step's update was left out."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def take_loss(self) -> float:
        """Mean loss (nats per target) of the steps since this was last asked, over all ranks; NaN if all their updates were left out."""
        mean = self.nll_since_line / self.targets_since_line if self.targets_since_line else math.nan
        self.nll_since_line, self.targets_since_line = 0.0, 0
        return mean
