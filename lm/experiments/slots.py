"""Slots: how many runs work at a time on this machine, and which of its GPUs each of them sees."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from lm.errors import ConfigError
from lm.experiments.experiment import Experiment

Devices = tuple[str, ...]  # GPUs of a run, as CUDA_VISIBLE_DEVICES names them; (): it computes on the CPU


@dataclass(frozen=True)
class Slots:
    """The slots of one `lm compare`. A run takes one, or as many as it has GPUs, each on a GPU of its own.

    Attributes:
        jobs: slots.
        gpus: that are handed out; (): all runs compute on the CPU.
        per_gpu: slots on each GPU.
        wanted: GPUs that a run takes, by size and arm; what is not in it takes none.
    """

    jobs: int
    gpus: Devices = ()
    per_gpu: int = 1
    wanted: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def taken(self, size: str, arm: str) -> int:
        """Slots that a run of an arm takes."""
        return max(1, self.wanted.get((size, arm), 0))

    def devices(self, size: str, arm: str, under_way: Iterable[Devices]) -> Devices | None:
        """The GPUs of a run that starts beside others, those first on which fewest runs work; None while there are too few slots.

        Args:
            under_way: the GPUs of each run that is under way.
        """
        others = list(under_way)
        if sum(max(1, len(one)) for one in others) + self.taken(size, arm) > self.jobs:
            return None
        runs, wanted = Counter(chain(*others)), self.wanted.get((size, arm), 0)
        free = sorted((gpu for gpu in self.gpus if runs[gpu] < self.per_gpu), key=runs.__getitem__)
        return tuple(free[:wanted]) if len(free) >= wanted else None

    def lanes(self) -> list[Devices]:
        """The GPUs of as many runs as work at a time, each with as many as any run takes."""
        widest, found = max(self.wanted, key=self.wanted.__getitem__, default=("", "")), list[Devices]()
        while (devices := self.devices(*widest, found)) is not None:
            found.append(devices)
        return found

    def __str__(self) -> str:
        on_gpu = f"on {named(self.gpus[: self.jobs])}" + (f", {self.per_gpu} on each GPU" if self.per_gpu > 1 else "")
        return f"{len(self.lanes())} at a time {on_gpu if any(self.wanted.values()) else 'on the CPU'}"


def named(devices: Devices) -> str:
    """GPUs in words, e.g. `GPU 0, 1`; the first letters of a UUID will do. Empty for none."""
    words = ", ".join(name[:12] for name in devices)
    return f"GPU {words}" if words and devices[0].isdigit() else words


def slots_of(experiment: Experiment, jobs: int | None, per_gpu: int) -> Slots:
    """The slots for an experiment on this machine.

    Args:
        jobs: that are asked for; None: `per_gpu` on each GPU, or one if all runs compute on the CPU.

    Raises:
        ConfigError: there are too few GPUs for that, or for a run.
    """
    from lm.model.device import gpus_of, visible_gpus  # torch takes seconds to import

    seed, rate, gpus = experiment.seeds[0], experiment.first_rate, visible_gpus()
    arms = [(size, arm) for size in experiment.sizes for arm in experiment.arms]
    wanted = {(size, arm.name): gpus_of(experiment.config(size, arm, seed, rate, {"name": "any"})) for size, arm in arms}
    most = max(wanted.values())
    if not most:
        return Slots(jobs or 1)
    there = len(gpus) * per_gpu
    if (jobs or 1) > there:
        how = f"lower it, or let more runs share a GPU: --jobs-per-gpu {-(-(jobs or 1) // len(gpus))}"
        raise ConfigError(f"--jobs {jobs}: there are {there} slots, {per_gpu} on each of {named(gpus)}; {how}")
    if (jobs or there) < most:
        raise ConfigError(f"--jobs {jobs}: a run of {most} GPUs (trainer.devices) takes {most} slots; raise it, or lower trainer.devices")
    return Slots(jobs or there, gpus, per_gpu, wanted)
