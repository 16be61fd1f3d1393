"""A kind of evaluation: the options that decide its results, the frame that it measures, and the file of its result in
a run folder.

`lm.config.eval_config` names the class that measures each kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd

from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import RunError
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import applicable_settings, for_inference
from lm.plugins import PLUGINS
from lm.progress import Progress
from lm.runs.checkpoints import weights_sha256
from lm.runs.evaluations import Evaluation, evaluation_path, joined, json_value, measuring_code
from lm.runs.manifest import read_file, write_files
from lm.runs.metric import Metric
from lm.schema import Plain

if TYPE_CHECKING:
    from lm.evaluation.held_out import HeldOut

Advance = Callable[[int], None]  # called with the units of work done since the last call


def ignore(units: int) -> None:
    """Do nothing. A measurement whose progress is not displayed calls this function as its progress callback (type
    `Advance`).
    """


class Measurement(ABC):
    """Base class of all evaluations, which measure series of a decoder by a configuration's options and keep results in
    run folders.

    Raises LMError when constructed: the store does not hold the data that the evaluation needs.
    """

    kind: ClassVar[str]  # key of the evaluation's options in `eval`
    logged: ClassVar[tuple[Metric, ...]] = ()  # what it logs, with words in braces in names for what differs
    in_fp32: ClassVar[bool] = False  # whether it measures in fp32, whatever the precision of training
    fixed_lengths: ClassVar[bool] = False  # whether it measures the same sequences whatever the training length is
    held_out: Sequence["HeldOut"] = ()  # the held-out sequences that it reads, if it reads any

    def __init__(self, config: Config, store: Store | None):
        self.config, self.store = config, store
        # fingerprint of the data of its sequences; empty: no store
        self.fingerprint = store.fingerprint if store else ""

    @classmethod  # noqa: B027 (most need none)
    def require(cls) -> None:
        """Raise RunError unless the packages that it needs are installed."""

    @classmethod
    def names(cls, config: Config) -> dict[str, Sequence[object]]:
        """What stands for the words in braces in names of metrics, for a run of `config`."""
        return {}

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        """The metrics that it logs for a run of `config`."""
        if not (names := cls.names(config)):  # those of lm-eval keep their braces
            return [*cls.logged]
        words = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
        return [metric.named(**named) for metric in cls.logged for named in words]

    @classmethod
    def options_of(cls, config: Config) -> Timing:
        """The evaluation's options in a configuration, including those that set when it runs during training."""
        return config.eval.kinds.get(cls.kind, Timing())

    @classmethod
    def sequences_of(cls, config: Config, metric: str) -> dict[str, Plain]:
        """What decides the sequences that a metric is measured on. Arms that differ in it can't be compared."""
        length = {} if cls.fixed_lengths else {"data.seq_len": config.data.seq_len}
        return length | config.eval.measured_options(cls.kind)

    @property
    def eval_config(self) -> Timing:
        """The evaluation's options (`options_of`)."""
        return self.options_of(self.config)

    @property
    def options(self) -> dict[str, Plain]:
        """What decides the result beside the keys of `eval`, the weights, precision and data; the result records it."""
        data = self.config.data
        sha256: list[Plain] = [sequences.sha256 for sequences in self.held_out]
        return {"seq_len": data.seq_len, "documents": data.documents, "sequences_sha256": sha256}

    @property
    def work_units(self) -> int:
        """The sum of all counts with which `measure` calls `progress`, such as the number of sequences."""
        count = sum(len(sequences.sequences) for sequences in self.held_out)
        return count * len(getattr(self.eval_config, "inference", [None]))

    def inference_models(self, decoder: Decoder) -> Iterator[tuple[str, Decoder]]:
        """The label of each inference setting that is for the decoder's normalizer, and the decoder under it."""
        for setting in applicable_settings(decoder, self.eval_config.inference):
            yield setting.label, for_inference(decoder, setting)

    @abstractmethod
    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        """Measure a decoder and return blocks of rows (`lm.runs.evaluations.rows`). All ranks call it; the decoder is
        not changed, nor the random state.
        """

    def cacheable(self, frame: pd.DataFrame) -> bool:
        """Whether a result is used again in place of measuring anew. One that is not finite isn't, as a repetition may
        be finite.
        """
        return bool(np.isfinite(frame["value"][frame["weight"] > 0]).all())

    def facts(self, weights: str, device: Device) -> dict[str, Plain]:
        """What decides the result of `weights` (a sha256), by the fields of an `Evaluation`."""
        facts = {
            "options": self.options,
            "asked": self.config.eval.measured_options(self.kind),
            "data_fingerprint": self.fingerprint,
            "precision": "32" if self.in_fp32 else device.precision,
            "weights_sha256": weights,
            "code": {"lm": measuring_code(), **PLUGINS.code(self.config.normalizer_names)},
        }
        return json_value(facts)

    def evaluate(
        self, decoder: Decoder, device: Device, step: int, tokens_seen: int, progress: Advance = ignore
    ) -> Evaluation:
        """Measure a decoder trained for `step` steps and `tokens_seen` tokens, and return the result. All ranks call
        it.
        """
        facts = self.facts(weights_sha256(decoder.state_dict()), device)
        frame = joined(self.measure(decoder, device, progress))
        return Evaluation(self.kind, step, tokens_seen, self.config.data.seq_len, frame=frame, **facts)

    def write(self, run: Path, evaluation: Evaluation) -> Path:
        """Write a result to its file in a run folder, and return the file's path."""
        path = evaluation_path(run, evaluation.kind, evaluation.step)
        files = {str(path.relative_to(run)): evaluation.content()}
        write_files(run, files, evaluation.step, evaluation.weights_sha256, "the evaluation")
        return path

    def cached(self, run: Path, weights: str, device: Device, step: int) -> Evaluation | None:
        """The result of `weights` (a sha256) in a run folder's file of `step`. None if there is none, if other facts
        decided it, or if a note says that it is damaged.
        """
        path = evaluation_path(run, self.kind, step)
        if not path.is_file():
            return None
        try:
            evaluation = Evaluation.parse(read_file(run, str(path.relative_to(run))))
        except (RunError, ValueError):
            Progress().say(f"note: {path}: not as it was written: measured again")
            return None
        is_same = all(getattr(evaluation, name) == value for name, value in self.facts(weights, device).items())
        return evaluation if is_same and self.cacheable(evaluation.frame) else None


def measurement_types(config: Config, kinds: Iterable[str] | None = None) -> list[type[Measurement]]:
    """Import the classes of the measurements that `config.eval` asks for, the validation first; `kinds` as in
    `measurements`.

    Raises RunError: a package that a measurement needs is not installed.
    """
    class_paths = [
        name.split(":")
        for kind, name in config.eval.measurement_classes(config.data).items()
        if kinds is None or kind in kinds
    ]
    types = [getattr(import_module(module), attribute) for module, attribute in class_paths]
    for measurement in types:
        measurement.require()
    return types


def measurements(config: Config, store: Store, kinds: Iterable[str] | None = None) -> list[Measurement]:
    """The measurements that `config.eval` asks for, the validation first; with `kinds` only measurements of these
    kinds.

    Raises LMError: the store does not hold the data that a measurement needs, or a package is not installed.
    """
    return [measurement(config, store) for measurement in measurement_types(config, kinds)]
