"""What every evaluation is: options that decide its numbers, and the series it gives. `lm.config.eval_config` names one class a kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import ClassVar

from torch import nn

from lm.attention.plugins import PLUGINS
from lm.config.effects import function_of
from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.data.store import Store
from lm.files import plain_sha256
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs import checkpoints
from lm.runs.evaluations import measuring_code
from lm.runs.series import Series
from lm.schema import Plain

Progress = Callable[[int], None]  # called with the units of work done


class Measurement(ABC):
    """One kind of evaluation, as a configuration asks for it.

    Raises (when made):
        LMError: the store does not hold what it needs.
    """

    kind: ClassVar[str]  # the name of its block of `eval`

    def __init__(self, config: Config, store: Store):
        self.config, self.store = config, store

    @property
    def asked(self) -> Timing:
        """What the configuration asks for: its block of `eval`, which says when it runs during training, too."""
        return self.config.eval.kinds[self.kind]

    @property
    @abstractmethod
    def options(self) -> dict[str, Plain]:
        """All that decides its numbers beside the weights, precision and data: kept in the result."""

    @property
    @abstractmethod
    def work(self) -> int:
        """Units that `measure` reports as done."""

    @abstractmethod
    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
        """The numbers. Collective; the decoder and the random state stay as they are."""

    def picture(self, series: Sequence[Series]) -> bytes | None:
        """A PNG file of its result; None if there is nothing to draw."""
        from lm.evaluation.fraction_pictures import draw  # imports matplotlib

        return draw(series)

    def lasts(self, series: Sequence[Series]) -> bool:
        """Whether a result is kept, so that it is not measured again: numbers that are not finite may be otherwise another time."""
        return all(one.is_finite for one in series)

    def precision(self, where: Device) -> str:
        """What it computes in, as recorded."""
        return where.precision

    @property
    def code(self) -> dict[str, str]:
        """Digests of the code that its numbers come from: of lm, and of the packages of normalizers from outside."""
        return {"lm": measuring_code(), **PLUGINS.code(self.config.normalizer_names)}

    def key(self, weights: str, where: Device) -> str:
        """Names what decides a result: kind, code, options, model, data, precision, `weights` (a sha256)."""
        model = function_of(self.config.model)
        facts = [self.kind, self.code, self.options, model, self.store.fingerprint, self.precision(where), weights]
        return plain_sha256(facts)


def measurements(config: Config, store: Store, kinds: Iterable[str] | None = None) -> list[Measurement]:
    """All that `config.eval` asks for, the validation first; `kinds`: of these alone.

    Raises:
        LMError: the store does not hold what one of them needs.
    """
    found = []
    for kind, name in config.eval.wanted(config.data).items():
        if kinds is None or kind in kinds:
            module, _, attribute = name.partition(":")
            found.append(getattr(import_module(module), attribute)(config, store))
    return found


def weights_sha256(model: nn.Module) -> str:
    """A sha256 over all parameters and buffers with their names and types: that of `state_dict` in a checkpoint of the model."""
    return checkpoints.weights_sha256(model.state_dict())
