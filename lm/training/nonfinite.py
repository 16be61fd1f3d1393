"""Handles a step whose loss or gradient is not finite (`optim.on_nonfinite`)."""

import math

from lm.errors import Diverged
from lm.model.decoder import Decoder
from lm.training.state import RunState

MOST_SKIPPED = 10  # consecutive steps that may be skipped before the run stops


def skip_or_stop(decoder: Decoder, state: RunState, policy: str, step: int, found: str) -> None:
    """Skip the update of a step that is not finite (`optim.on_nonfinite: skip`), or stop the run.

    step: the one to be made, from 1. found: its loss and gradient norm, in words.

    Raises:
        Diverged: the policy is `stop`, or too many consecutive steps were skipped.
    """
    state.count_skipped()
    where = f"step {step}: {found} ({_norms(decoder)})"
    if policy == "stop":
        advice = "lower optim.lr or raise optim.warmup_steps, in a run of another name; or skip such steps: optim.on_nonfinite=skip"
        raise Diverged(f"{where}; checkpoints up to the last saved are intact: {advice}", step)
    if state.skipped_in_a_row >= MOST_SKIPPED:
        raise Diverged(f"{where}, the {state.skipped_in_a_row}th step in a row; the last checkpoint is intact", step)
    for parameter in decoder.parameters():
        parameter.grad = None  # the optimizer then leaves the parameter and its moments as they are


def _norms(decoder: Decoder) -> str:
    """The first parameter whose gradient isn't finite, and the layer with the largest gradient that is."""
    norms = {name: float(p.grad.norm()) for name, p in decoder.named_parameters() if p.grad is not None}
    bad = [name for name, norm in norms.items() if not math.isfinite(norm)]
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    first = f"not finite in {bad[0]} and {len(bad) - 1} of {len(norms)} others" if bad else "finite in each parameter"
    largest = max(finite, key=finite.get, default="")
    return first + (f", largest finite norm {finite[largest]:.3g} in {largest}" if largest else "")
