"""Where a measurement runs: a device, its precision, this process among its peers, and how long it may take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lm.errors import RunError


class OutOfTime(RunError):
    """A measurement took longer than it may (`max_seconds`)."""


@dataclass(frozen=True)
class Device:
    """Where a model runs: torch device, bf16 autocast or not, and this process among its peers."""

    device: torch.device
    bf16: bool
    rank: int = 0
    world: int = 1
    until: float | None = None  # time.monotonic() at which a measurement is given up

    @property
    def precision(self) -> str:
        """As recorded in results."""
        return "bf16-mixed" if self.bf16 else "32"

    def autocast(self) -> torch.autocast:
        """The precision's context."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def within(self, seconds: float | None) -> "Device":
        """The same, with `seconds` from now on; None: without end."""
        return replace(self, until=None if seconds is None else time.monotonic() + seconds)

    def check_time(self) -> None:
        """Raises OutOfTime. Call it between batches, within `over_ranks`."""
        if self.until is not None and time.monotonic() > self.until:
            raise OutOfTime("took longer than its max_seconds")


def over_ranks(where: Device, local: Callable[[], Tensor]) -> Tensor:
    """The sum over ranks of what `local` gives on each, on the CPU. Collective.

    What `local` raises on one rank is raised on it, and a RunError on the others: none is left waiting.
    """
    failure, values = None, torch.empty(0)
    try:
        values = local()
    except Exception as error:  # the peers must hear of it, whatever it is
        failure = error
    if where.world > 1:
        failed = torch.tensor(float(failure is not None), device=where.device)
        torch.distributed.all_reduce(failed)
        if failed and failure is None:
            failure = RunError("failed on another process")
    if failure is not None:
        raise failure
    if where.world == 1:
        return values.cpu()
    shared = values.to(where.device)
    torch.distributed.all_reduce(shared)
    return shared.cpu()


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """Models in evaluation mode, without gradients; afterwards their modes and the random state are as before."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
