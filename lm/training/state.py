"""What of a run goes on from step to step: its state, and what training goes on from at a start or a swap."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from lm.config.tree import Config
from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.model.swapped import swapped
from lm.runs.checkpoints import bare_weights, is_saved
from lm.runs.folder import CHECKPOINTS
from lm.schema import Plain
from lm.training.optimizers import State, after_swap, freeze


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

    best: dict[str, Plain] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    nll_since_line: float = 0.0
    targets_since_line: int = 0
    elapsed_s: float = 0.0

    @classmethod
    def of(cls, facts: dict[str, Plain], folder: Path) -> "RunState":
        """As a checkpoint's `facts` have it. A best model that is not in the run `folder` any more is none.

        Raises:
            RunError: something is missing.
        """
        if missing := [one.name for one in fields(cls) if one.name not in facts]:
            raise RunError(f"{folder}: the checkpoint at step {facts['step']} says nothing of {', '.join(missing)}; go on from another")
        state = cls(**{one.name: facts[one.name] for one in fields(cls)})
        if state.best and not is_saved(folder / CHECKPOINTS, state.best["step"]):  # a run that goes back may find the weights gone
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


@dataclass
class Start:
    """What a phase of a run begins with. Whoever has used `optimizer` or `before` up drops it, for its memory.

    Attributes:
        step: optimizer steps done.
        decoder: on the CPU, with the weights to go on from.
        optimizer: what the optimizer knows of the parameters.
        before: the decoder that a swap at this step replaced.
    """

    step: int
    phase: int
    decoder: Decoder
    state: RunState = field(default_factory=RunState)
    optimizer: State = field(default_factory=dict)
    before: Decoder | None = None


def going_on(config: Config, checkpoint: dict[str, object]) -> Start:
    """Where a checkpoint's run is: in its phase as it is, or at the start of the next one, with the normalizers swapped."""
    facts = checkpoint["lm"]
    phase = config.phase_at(facts["step"])
    decoder = Decoder(config.model_in(facts["phase"]), facts["vocab_size"], config.data.seq_len, seed=None)
    decoder.load_state_dict(bare_weights(checkpoint))
    start = Start(facts["step"], phase, decoder, RunState.of(facts, config.run_folder), checkpoint["optimizer"])
    if phase != facts["phase"]:
        start.decoder, start.before = swapped(decoder, config.model_in(phase).normalizer), decoder
        start.optimizer = after_swap(start.optimizer)
    freeze(start.decoder, config.train_only)
    return start
