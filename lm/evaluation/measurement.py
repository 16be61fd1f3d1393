"""What every evaluation is: settings that decide it, numbers, and how they are shown. One class a kind."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from lm.config.effects import function_of
from lm.config.eval_config import Schedule
from lm.config.tree import Config
from lm.data.store import Store
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.schema import Plain

Progress = Callable[[int], None]  # hears of units of work done


@dataclass(frozen=True)
class Row:
    """One number of a result, for tables."""

    setting: str  # how the model was used; empty: as trained
    where: str  # positions, lengths, depths ...
    metric: str
    value: float
    low: float | None = None  # ends of its 95 % interval, if it has one
    high: float | None = None
    over: str = ""  # what the interval covers


class Measurement(ABC):
    """One kind of evaluation, as a configuration asks for it.

    Raises (when made):
        LMError: the store does not hold what it needs.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1  # raise it when the numbers of the same settings change

    def __init__(self, config: Config, store: Store):
        self.config, self.store = config, store

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """When it runs during training."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Plain]:
        """All that decides its numbers beside the weights, precision and data: kept in the result."""

    @property
    @abstractmethod
    def work(self) -> int:
        """Units that `measure` reports as done."""

    @abstractmethod
    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        """The numbers. Collective; the decoder and the random state stay as they are."""

    @abstractmethod
    def rows(self, result: dict[str, Plain]) -> list[Row]:
        """The result as a table."""

    @abstractmethod
    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        """Those numbers that belong among the run's metrics."""

    @abstractmethod
    def text(self, result: dict[str, Plain]) -> str:
        """One line."""

    def precision(self, where: Device) -> str:
        """What it computes in, as recorded."""
        return where.precision

    def key(self, weights: str, where: Device) -> str:
        """Names what decides a result: kind, version, settings, model, data, precision and `weights` (their sha256)."""
        model = function_of(self.config.model)
        facts = [self.kind, self.version, self.settings, model, self.store.fingerprint, self.precision(where), weights]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def weights_sha256(model: nn.Module) -> str:
    """Of all parameters and buffers with their names and types."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
