"""What is done about a step whose loss or gradient is not finite (`optim.on_nonfinite`)."""

import math

from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.training.state import RunState

MOST_SKIPPED = 10  # steps in a row whose update may be left out before the run stops after all


def leave_out(decoder: Decoder, state: RunState, policy: str, where: str) -> None:
    """Leave a step's update out that is not finite (`optim.on_nonfinite: skip`).

    where: step, loss and gradient norm, in words.

    Raises:
        RunError: the policy is `stop`, or too many steps in a row were left out.
    """
    state.left_out()
    if policy == "stop":
        advice = "lower optim.lr or raise optim.warmup_steps, in a run of another name; or leave such steps out: optim.on_nonfinite=skip"
        raise RunError(f"{where} ({_norms(decoder)}); checkpoints up to the last saved are intact: {advice}")
    if state.skipped_in_a_row >= MOST_SKIPPED:
        raise RunError(f"{where} ({_norms(decoder)}), the {state.skipped_in_a_row}th step in a row; the last checkpoint is intact")
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
