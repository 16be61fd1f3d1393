"""One kind of evaluation: what decides its numbers, the series that it gives, and its result in a run folder.

`lm.config.eval_config` names the class that measures each kind.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from torch import nn

from lm.attention.plugins import PLUGINS
from lm.config.effects import function_of
from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import RunError
from lm.files import plain_sha256, write_together
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs import checkpoints
from lm.runs.evaluations import Evaluation, evaluation_path, measuring_code
from lm.runs.folder import EVALUATIONS, json_bytes, read_sealed, sealed, write_sealed
from lm.runs.series import Series
from lm.schema import Plain

Advance = Callable[[int], None]  # called with the units of work done


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
    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
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


def measured(
    measurement: Measurement, decoder: Decoder, where: Device, step: int, tokens_seen: int, progress: Advance = lambda units: None
) -> Evaluation:
    """What a measurement gives of a decoder that was trained for so many steps and tokens. Collective."""
    weights = weights_sha256(decoder)
    series = measurement.measure(decoder, where, progress)
    return Evaluation(
        measurement.kind, step, tokens_seen, measurement.store.fingerprint, measurement.options, measurement.precision(where), weights,
        tuple(series), measurement.config.eval.asked(measurement.kind), measurement.code,
    )  # fmt: skip


def write_evaluation(run: Path, measurement: Measurement, evaluation: Evaluation) -> Path:
    """Write the result of a measurement to its file, and draw its picture if it has one; returns the file's path."""
    path, picture = evaluation_path(run, evaluation.kind, evaluation.step), measurement.picture(evaluation.series)
    pictures = {} if picture is None else {path.with_suffix(".png"): picture}
    write_together({path: json_bytes(sealed(evaluation.plain())), **pictures}, "the evaluation")
    return path


def kept_at(folder: Path, measurement: Measurement, weights: str, where: Device) -> Path:
    """Where a run folder keeps the result of a measurement of `weights` (their sha256), however often it is measured otherwise."""
    return folder / EVALUATIONS / "cache" / f"{measurement.kind}-{measurement.key(weights, where)[:16]}.json"


def kept(folder: Path, measurement: Measurement, weights: str, where: Device, step: int, tokens_seen: int) -> Evaluation | None:
    """The result that a run folder keeps of a measurement; None if there is none, or if it is damaged, which a note says."""
    path = kept_at(folder, measurement, weights, where)
    if not path.is_file():
        return None
    try:
        asked = measurement.config.eval.asked(measurement.kind)
        return replace(Evaluation.of(read_sealed(path)), step=step, tokens_seen=tokens_seen, asked=asked)
    except (RunError, KeyError, ValueError) as error:
        reason = error if isinstance(error, RunError) else f"{path}: is damaged, or of another version"
        print(f"note: {reason}: measured again", file=sys.stderr)
    return None


def keep(folder: Path, measurement: Measurement, evaluation: Evaluation, where: Device) -> None:
    """Keep a result, if it is one that lasts."""
    if measurement.lasts(evaluation.series):
        path = kept_at(folder, measurement, evaluation.weights_sha256, where)
        path.parent.mkdir(exist_ok=True, parents=True)
        write_sealed(path, evaluation.plain())
