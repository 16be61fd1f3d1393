"""The state of a run beside its weights and optimizer."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from lm.runs.checkpoints import is_saved
from lm.runs.folder import check_fields, step_path
from lm.schema import Plain


@dataclass(frozen=True)
class Best:
    """The lowest validation loss (nats per target) so far on the documents that select, its step, and the sequences that it is of."""

    step: int
    loss: float
    sequences_sha256: str


@dataclass
class RunState:
    """The state of a run beside weights and optimizer, part of a checkpoint's metadata. Equal on all ranks, but for the time and digests.

    Attributes:
        best: the lowest validation so far.
        skipped: steps whose update was skipped.
        skipped_in_a_row: number of consecutive ones up to the last step.
        nll_since_line, targets_since_line: loss (nats) and targets over all ranks since the last logged line.
        elapsed_s: seconds of training.
        weights_sha256: of the weights that were measured or saved, by step; of the step of a swap those before and after it.
    """

    best: Best | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    nll_since_line: float = 0.0
    targets_since_line: int = 0
    elapsed_s: float = 0.0
    weights_sha256: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: dict[str, Plain], folder: Path) -> "RunState":
        """From a checkpoint's `metadata`. A best model that is no longer in `folder`, with the run's checkpoints, is dropped.

        Raises:
            RunError: something is missing, or of another type.
        """
        metadata = {"weights_sha256": {}, **metadata}  # an older version wrote none
        path, types = step_path(folder, metadata["step"]), {one.name: one.type for one in fields(cls)}
        check_fields(metadata, types | {"best": dict | None}, path)
        if best := metadata["best"]:
            types_of_best = {one.name: one.type for one in fields(Best)}
            check_fields(best, types_of_best, path, "best.")
            best = Best(**{name: best[name] for name in types_of_best})
            if not is_saved(folder, best.step):  # its weights may have been deleted when a run went back
                best = None
        return cls(**{name: metadata[name] for name in types} | {"best": best or None})

    def plain(self) -> dict[str, Plain]:
        """As a checkpoint's metadata hold it."""
        return asdict(self)

    def note_weights(self, step: int, sha256: str) -> None:
        """Remember weights that were measured or saved at a step."""
        known = self.weights_sha256.setdefault(str(step), [])
        known += [] if sha256 in known else [sha256]

    def count_step(self, nll: float, targets: int) -> None:
        """Count a step with the summed loss `nll` (nats) over `targets` targets."""
        self.skipped_in_a_row = 0
        self.nll_since_line += nll
        self.targets_since_line += targets

    def count_skipped(self) -> None:
        """Count a step whose update was skipped."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def take_mean_loss(self) -> float:
        """Mean loss (nats per target) since the last call, over all ranks; NaN if every step was skipped. Resets the sums."""
        mean = self.nll_since_line / self.targets_since_line if self.targets_since_line else math.nan
        self.nll_since_line, self.targets_since_line = 0.0, 0
        return mean
