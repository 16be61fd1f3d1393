"""Define the base class of all kinds of evaluation, such as validation or recall, and the held-out sequences on which
they measure a model.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from lm.config.eval_config import EvaluationTiming
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks import Example
from lm.errors import RunError
from lm.files import source_files_sha256
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import applicable_settings, with_inference_setting
from lm.plain import Plain, json_value
from lm.plugins import PLUGINS
from lm.progress import Progress
from lm.runs.checkpoints import weights_sha256
from lm.runs.evaluations import COLUMNS, Evaluation, Metric, evaluation_path, join_rows, model_selection_mask
from lm.runs.folder import read_file, write_files

# packages and modules that measure
MEASURING_PACKAGES = (
    "attention",
    "config",
    "data",
    "diagnostics",
    "evaluation",
    "functional.py",
    "huggingface",
    "model",
    "runs",
)


@cache
def measuring_code_digest(package: Path = Path(__file__).parent.parent) -> str:
    """Return a digest (16 hex digits) of all source files that can affect an evaluation's numbers."""
    return source_files_sha256([package / package_name for package_name in MEASURING_PACKAGES])


def tokens_sha256(sequences: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of the token ids of all sequences, one sequence after the other."""
    return hashlib.sha256(np.concatenate(list(sequences)).astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class HeldOutSequences:
    """This class holds held-out sequences of one length, which are the same for every run and checkpoint."""

    sequences: np.ndarray  # (N, length + 1) token ids
    bytes_per_token: np.ndarray  # (V,) number of UTF-8 bytes that each token stands for
    # (N,) index of the held-out document that each sequence begins in; None: sequences are independent
    first_document_indices: np.ndarray | None = None
    source_indices: np.ndarray | None = None  # (N,) index of the source or task of each sequence; None: not known
    answer_mask: np.ndarray | None = None  # (N, length) bool, which predictions count; None: all
    # the token that begins a document, if documents in a sequence don't see each other; else None
    end_of_text_id: int | None = None

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the token ids."""
        return tokens_sha256(self.sequences)

    @property
    def length(self) -> int:
        """Return the number of predicted tokens in a sequence."""
        return self.sequences.shape[1] - 1

    @property
    def lengths(self) -> list[int]:
        """Return the number of predicted tokens in each sequence, (N,)."""
        return [self.length] * len(self.sequences)

    @property
    def size_text(self) -> str:
        """Return the number and length of the sequences in words, such as `256 of 512 tokens`."""
        return f"{len(self.sequences):,} of {self.length:,} tokens"

    @property
    def document_labels(self) -> np.ndarray:
        """Return integer labels (N,) that are equal for sequences of one document."""
        return np.arange(len(self.sequences)) if self.first_document_indices is None else self.first_document_indices

    @property
    def target_mask(self) -> np.ndarray:
        """Return which predictions count, (N, length) bool: answer tokens in tasks with answers, else all tokens."""
        return np.ones((len(self.sequences), self.length), bool) if self.answer_mask is None else self.answer_mask

    def batch(self, indices: list[int]) -> Batch:
        """Return a batch of the sequences at `indices`."""
        return Batch.from_sequences(
            self.sequences[indices],
            None if self.answer_mask is None else self.answer_mask[indices],
            self.end_of_text_id,
        )

    def sampling_units(self, selection_seed: str, weigh_by_targets: bool = False) -> pd.DataFrame:
        """Return the sequences as the units of a measurement, one row each (`sampling_unit_frame`).

        selection_seed: as for `sampling_unit_frame`. weigh_by_targets: whether a sequence's weight is its number of
        predictions that count; else all weights are equal.
        """
        return sampling_unit_frame(
            self.sha256, self.document_labels, self.target_mask.sum(1) if weigh_by_targets else None, selection_seed
        )

    def sequence_means(self, values: np.ndarray) -> np.ndarray:
        """Return each sequence's mean (N, 1) of `values` (N, length) over the predictions that count."""
        return values.mean(1, dtype=np.float64, where=self.target_mask)[:, None]

    @classmethod
    def from_examples(
        cls, examples: list[Example], bytes_per_token: np.ndarray, task_indices: np.ndarray | None = None
    ) -> "HeldOutSequences":
        """Return the sequences of task examples of one length. task_indices: index (N,) of each example's task."""
        sequences, answers = (
            np.stack([getattr(item, name) for item in examples]) for name in ("tokens", "answer_mask")
        )
        return cls(sequences, bytes_per_token, None, task_indices, answers)

    @classmethod
    def from_store(
        cls, store: Store, starts: np.ndarray, length: int, isolate_documents: bool = False
    ) -> "HeldOutSequences":
        """Return the sequences of `length` + 1 tokens that begin at the indices `starts` of the held-out tokens.

        isolate_documents: whether a token sees only its own document.
        """
        sequences = store.val.take_windows(starts, length + 1)
        ends = np.cumsum([source.n_tokens for source in store.val.sources])
        sources = np.searchsorted(ends, starts, "right")
        documents = np.searchsorted(store.val.offsets, starts, "right") - 1
        return cls(
            sequences,
            store.bytes_per_token,
            documents,
            sources,
            end_of_text_id=store.end_of_text_id if isolate_documents else None,
        )


# ---------------------------------------------------------------- rows of a frame


def sampling_unit_frame(
    sequences_sha256: str, groups: np.ndarray, weights: np.ndarray | None = None, selection_seed: str = ""
) -> pd.DataFrame:
    """Return the units of a measurement, such as sequences or questions, one row each (for `metric_rows`).

    Args:
        sequences_sha256: SHA-256 of the sequences.
        groups: (units,), the label of each unit's document.
        weights: (units,), such as numbers of tokens; None: all are equal.
        selection_seed: fingerprint of held-out text. A third of its documents serve to choose learning rates, the
            others to report results. Empty: all units serve both.
    """
    part = np.where(model_selection_mask(selection_seed, groups), "selects", "reports") if selection_seed else ""
    weights = np.ones(len(groups)) if weights is None else weights
    columns = {"sequences": sequences_sha256[:16], "sample": np.arange(len(groups)), "group": groups, "part": part}
    return pd.DataFrame(columns | {"weight": weights})


def metric_rows(
    metric: Metric,
    values: np.ndarray | float,
    units: pd.DataFrame | None = None,
    x: Sequence[float] = (np.nan,),
    bin_ends: Sequence[float] = (),
    task: str = "",
    inference_setting: str = "",
) -> pd.DataFrame:
    """Return rows of a frame with the columns `COLUMNS`, one row for each unit and each point of the metric's axis.

    Placeholders in the metric's name are filled: {TASK} with the task, {SETTING} with the inference setting, {LENGTH}
    with a point of `x`, {STATISTIC} with `metric.quantity`.

    Args:
        values: (units, points), or (points,) if only means are known.
        units: the units, from `sampling_unit_frame`; None: only means are known.
        x: points of the axis; for bins their starts.
        bin_ends: ends of the bins; empty: points are no bins.
        task: task, source or the like; empty: all together.
        inference_setting: label of the inference setting.
    """
    values = np.atleast_2d(values) if units is None else values
    n_units, n_points = values.shape
    words = dict.fromkeys(("TASK", "NAME", "PART"), task or metric.quantity) | {"SETTING": inference_setting}
    words |= dict.fromkeys(("STATISTIC", "METRIC"), metric.quantity)
    names = [metric.fill_placeholders(**words, LENGTH=point).name or metric.quantity for point in x]
    points = {"metric": names, "x": x, "until": bin_ends or [np.nan] * n_points}
    columns: dict[str, object] = {name: np.repeat(column, n_units) for name, column in points.items()}
    if units is None:
        columns |= {"sequences": "", "sample": np.nan, "group": np.nan, "part": "", "weight": 1.0}
    else:
        columns |= {name: np.tile(units[name], n_points) for name in units}
    columns |= {"task": task, "setting": inference_setting, "value": values.T.ravel().astype(float)}
    columns["about"] = np.full(values.size, metric, object)
    return pd.DataFrame(columns)[[*COLUMNS]]


# ---------------------------------------------------------------- a kind of evaluation


class Measurement(ABC):
    """A measurement is one kind of evaluation: it measures metrics of a decoder by a configuration's options.

    Results are kept in run folders. Raises LMError when constructed: the store does not hold the data that the
    evaluation needs.
    """

    kind: ClassVar[str]  # key of the evaluation's options in `eval`
    logged_metrics: ClassVar[tuple[Metric, ...]] = ()  # metrics that it logs; words in braces differ between runs
    measures_in_fp32: ClassVar[bool] = False  # whether it measures in fp32, even if training is in bf16
    # whether a metric's name, not the training length, says how long its sequences are
    ignores_train_length: ClassVar[bool] = False
    held_out: Sequence[HeldOutSequences] = ()  # the held-out sequences that it reads, if it reads any

    def __init__(self, config: Config, store: Store | None):
        self.config, self.store = config, store
        # fingerprint of the data of its sequences; empty: no store
        self.data_fingerprint = store.fingerprint if store else ""

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        """Return the values that placeholders in names of metrics have in a run of `config`, such as {"LENGTH": [256,
        512]}.
        """
        return {}

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        """Return the metrics that a run of `config` logs from this evaluation."""
        if not (names := cls.placeholder_values(config)):  # those of lm-eval keep their braces
            return [*cls.logged_metrics]
        words = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
        return [metric.fill_placeholders(**named) for metric in cls.logged_metrics for named in words]

    @classmethod
    def options_of(cls, config: Config) -> EvaluationTiming:
        """Return the evaluation's options in a configuration, including those that say when it runs during training."""
        return config.eval.non_null_kind_options.get(cls.kind, EvaluationTiming())

    @classmethod
    def sequence_options(cls, config: Config, metric: str) -> dict[str, Plain]:
        """Return the options that decide on which sequences a metric is measured, {name: value}.

        Arms of an experiment that differ in them can't be compared.
        """
        length = {} if cls.ignores_train_length else {"data.seq_len": config.data.seq_len}
        return length | config.eval.measurement_options(cls.kind)

    @property
    def eval_config(self) -> EvaluationTiming:
        """Return the evaluation's options in `config`, the configuration that the measurement was made with."""
        return self.options_of(self.config)

    @property
    def further_inputs(self) -> dict[str, Plain]:
        """Return further values that decide the result, {name: value}. The weights, the precision, the data and the
        evaluation's options in `eval` are not among them.

        The file of the result records these values.
        """
        data = self.config.data
        sha256: list[Plain] = [sequences.sha256 for sequences in self.held_out]
        return {"seq_len": data.seq_len, "documents": data.documents, "sequences_sha256": sha256}

    @property
    def is_cacheable(self) -> bool:
        """Return whether `result_inputs` holds everything that decides the results, so that a result can be used
        again.
        """
        return True

    def decoders_by_setting(self, decoder: Decoder) -> Iterator[tuple[str, Decoder]]:
        """Yield (label, decoder) for each inference setting that applies to the decoder's normalizer, such as `theta x
        50`.
        """
        for setting in applicable_settings(decoder, self.eval_config.inference):
            yield setting.label, with_inference_setting(decoder, setting)

    @abstractmethod
    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        """Measure a decoder and return blocks of rows (`metric_rows`). All ranks call this method.

        It changes neither the decoder nor the random state.
        """

    def result_inputs(self, weights_hash: str, device: Device) -> dict[str, Plain]:
        """Return all inputs that decide the result of measuring a model whose weights have the SHA-256 `weights_hash`:
        options, data, precision, weights and code. Keys are field names of `Evaluation`.
        """
        inputs = {
            "options": self.further_inputs,
            "asked": self.config.eval.measurement_options(self.kind),
            "data_fingerprint": self.data_fingerprint,
            "precision": "32" if self.measures_in_fp32 else device.precision,
            "weights_sha256": weights_hash,
            "code": {"lm": measuring_code_digest(), **PLUGINS.package_digests(self.config.normalizer_names)},
        }
        return json_value(inputs)

    def evaluate(self, decoder: Decoder, device: Device, step: int, tokens_seen: int) -> Evaluation:
        """Measure a decoder that was trained for `step` steps on `tokens_seen` tokens, and return the result. All ranks
        must call this method.
        """
        inputs = self.result_inputs(weights_sha256(decoder.state_dict()), device)
        frame = join_rows(self.measure(decoder, device))
        return Evaluation(self.kind, step, tokens_seen, self.config.data.seq_len, frame=frame, **inputs)

    def write(self, run_folder: Path, evaluation: Evaluation) -> Path:
        """Write a result to its file in a run folder, and return the file's path."""
        path = evaluation_path(run_folder, evaluation.kind, evaluation.step)
        files = {str(path.relative_to(run_folder)): evaluation.file_content()}
        write_files(run_folder, files, evaluation.step, evaluation.weights_sha256)
        return path

    def cached_result(self, run_folder: Path, weights_hash: str, device: Device, step: int) -> Evaluation | None:
        """Return the result that a run folder's file of `step` holds for weights with the SHA-256 `weights_hash`.

        Returns None if there is no file, if other weights, data, precision or options decided its result, or if it was
        altered.
        """
        path = evaluation_path(run_folder, self.kind, step)
        if not path.is_file():
            return None
        try:
            evaluation = Evaluation.parse(read_file(run_folder, str(path.relative_to(run_folder))))
        except (RunError, ValueError):
            Progress().say(f"note: {path}: not as it was written: measured again")
            return None
        is_same = all(
            getattr(evaluation, name) == value for name, value in self.result_inputs(weights_hash, device).items()
        )
        return evaluation if is_same and self.is_cacheable else None
