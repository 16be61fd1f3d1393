"""Diagnostics (`lm diagnose`): attention statistics of a trained model, the untrained model, and the trained model with
shuffled scores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lm.config.data_config import DataConfig
from lm.config.eval_config import DiagnosticsConfig, EvalConfig, LongContextConfig
from lm.config.load import merge, overrides_in, parse
from lm.config.training_config import OptimConfig
from lm.config.tree import Config
from lm.data.batches import long_starts
from lm.data.store import Store
from lm.data.tokenizer import encoding_of
from lm.diagnostics import concentration, limits, sparsity
from lm.diagnostics.attention_rows import (
    HEADS,
    MIN_KEYS,
    NO_WEIGHT,
    NOT_FINITE,
    VISIBLE_KEYS,
    MeasuredValues,
    Measures,
    QuerySums,
    Statistic,
    StatisticFamily,
    bin_middles,
    exponent,
    half_octaves,
    mean,
    query_indices,
    shuffling_numbers,
)
from lm.errors import ConfigError, Problem, RunError
from lm.evaluation.evaluate import evaluate_model, evaluate_sources, open_device
from lm.evaluation.evaluation_kind import Advance, Measurement, ignore
from lm.evaluation.held_out import HeldOut, by_sequence, spread_sequences, validation_sequences
from lm.files import expand_home
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import applicable_settings, for_inference
from lm.report.evaluation_tables import EvaluationResult
from lm.runs.evaluations import Evaluation, rows, units_frame
from lm.runs.folder import DESCRIPTION
from lm.runs.loading import LoadedModel, load
from lm.runs.metric import Axis, Metric
from lm.schema import Plain, to_plain

KIND = "diagnostics"
SHUFFLED, UNTRAINED = "shuffled scores", "untrained weights"
# by their names in `eval.diagnostics.statistics`
FAMILIES: dict[str, Callable[[DiagnosticsConfig], StatisticFamily]] = {
    "concentration": lambda options: concentration.concentration_statistics(),
    "sparsity": lambda options: sparsity.sparsity_statistics(),
    "limits": lambda options: limits.limit_statistics(),
}
UNDEFINED_FRACTIONS = (
    Statistic(NOT_FINITE, "fraction", lambda rows: None),
    Statistic(NO_WEIGHT, "fraction", lambda rows: None),
)
_LENGTH_KEY = "eval.diagnostics.length_factor"


def families(options: DiagnosticsConfig) -> tuple[StatisticFamily, ...]:
    return tuple(FAMILIES[name](options) for name in options.statistics)


# ---------------------------------------------------------------- sequences


def diagnostic_sequences(store: Store, config: Config, options: DiagnosticsConfig) -> HeldOut:
    """Up to `options.sequences` windows of `options.text`, else of held-out data; within single documents if not of the
    training length.

    Raises:
        ConfigError: no document is long enough, or sequences are so short that no query sees `MIN_KEYS` keys.
        RunError: the text can't be read, or is too short.
    """
    length = sequence_length(options, config.data.seq_len)
    if options.text:
        return sequences_of_text(store.tokenizer(), store.end_of_text, options, length)
    if config.data.symbolic:
        validation = validation_sequences(store, config)
        count = min(options.sequences, len(validation.sequences))
        indices = np.arange(count) * len(validation.sequences) // count
        return HeldOut(validation.sequences[indices], validation.token_bytes)
    if options.length_factor == 1:
        windows = spread_sequences(store, config, length, options.sequences)
    else:
        windows = HeldOut.take(store, long_starts(store.val, length, options.sequences), length)
    if not len(windows.sequences):
        reason = f"needs held-out documents of {length + 1:,} tokens, the longest has {store.val.longest:,}"
        raise ConfigError([Problem(_LENGTH_KEY, options.length_factor, reason, "set it lower")])
    return windows


def sequence_length(options: DiagnosticsConfig, seq_len: int) -> int:
    """Tokens in a sequence, for a model trained on sequences of `seq_len`. Raises ConfigError if no query would see
    `MIN_KEYS` keys.
    """
    length = round(options.length_factor * seq_len)
    if length < MIN_KEYS:
        reason = f"makes sequences of {length} tokens, in which no query sees the {MIN_KEYS} keys that statistics need"
        raise ConfigError([Problem(_LENGTH_KEY, options.length_factor, reason, "set it higher")])
    return length


def sequences_of_text(tokenizer: Tokenizer, end_of_text: int, options: DiagnosticsConfig, length: int) -> HeldOut:
    """Up to `options.sequences` windows of the text file `options.text`, spread evenly, without overlap; the file
    counts as one document.

    Raises RunError: the file can't be read, is not UTF-8, or has too few tokens.
    """
    tokens = np.array([end_of_text, *encoding_of(tokenizer, read_file(options.text, "eval.diagnostics.text = ")).ids])
    windows = (len(tokens) - 1) // length
    if not windows:
        reason = f"has {len(tokens):,} tokens, a sequence {length + 1:,}"
        raise RunError(f"eval.diagnostics.text = {options.text}: {reason}; give more text, or lower {_LENGTH_KEY}")
    count = min(options.sequences, windows)
    starts = np.arange(count) * windows // count * length
    sequences = tokens[starts[:, None] + np.arange(length + 1)]
    token_bytes = np.zeros(tokenizer.get_vocab_size(), np.float32)
    return HeldOut(sequences, token_bytes, documents=np.zeros(count, int))


def read_file(path: str, prefix: str) -> str:
    """The text of a UTF-8 file. Raises RunError, whose message begins with `prefix`, the option that names the file."""
    try:
        return expand_home(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{prefix}{path}: {getattr(error, 'strerror', None) or 'is not UTF-8'}") from None


# ---------------------------------------------------------------- measuring


class Diagnostics(Measurement):
    """Statistics of attention weights by layer, head and number of visible keys, in fp32, of three models under each
    inference setting.

    The models are the trained model, the untrained model of its configuration and seed, and the trained model with each
    query's scores shuffled among the query's visible keys. A result that holds for the untrained model, too, says
    nothing about training. A result that holds for shuffled scores, too, follows from the distribution of the scores.
    """

    kind = KIND
    logged = (
        Metric("diagnostics/{STATISTIC}", meaning="statistic of attention weights, mean over heads", units="documents"),
    )

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        found = families(cls.options_of(config))
        return [
            replace(metric.named(STATISTIC=entry.name), unit=entry.unit, quantity=entry.name, units=units)
            for metric in cls.logged
            for entries, units in (("query_statistics", "documents"), ("query_sums", ""))
            for family in found
            for entry in getattr(family, entries)
            if entry.in_reports
        ]

    def __init__(self, config: Config, store: Store | None, held_out: HeldOut | None = None):
        """Set the sequences to read: `held_out`, else `diagnostic_sequences` of the store."""
        super().__init__(config, store)
        self.held_out = held_out or diagnostic_sequences(store, config, self.eval_config)

    @property
    def options(self) -> dict[str, Plain]:
        length, options = self.held_out.length, self.plain_eval_config
        facts = {"sequences": len(self.held_out.sequences), "sequences_asked": options["sequences"], "length": length}
        facts |= {"sequences_sha256": self.held_out.sha256, "query_indices": query_indices(length, options["queries"])}
        facts["documents"] = self.config.data.documents
        return {
            "seq_len": self.config.data.seq_len,
            **options,
            **facts,
            "least_keys": MIN_KEYS,
            "untrained_seed": self.config.seed,
        }

    @property
    def work_units(self) -> int:
        return len(self.held_out.sequences) * len(self.eval_config.inference)

    def precision(self, device: Device) -> str:
        return "32"

    def cacheable(self, frame: pd.DataFrame) -> bool:
        return True  # a number that is not finite is undefined, not an error

    def picture(self, evaluation: Evaluation) -> bytes | None:
        from lm.evaluation.diagnostic_pictures import diagnostics_picture  # imports matplotlib

        return (picture := diagnostics_picture(evaluation.series)) and picture.png

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        # no window of a text is held back to select runs
        fingerprint = "" if self.eval_config.text else self.fingerprint
        return diagnostic_blocks(
            decoder, self.held_out, self.eval_config, device, self.config.seed, fingerprint, progress
        )


def diagnostic_blocks(
    decoder: Decoder,
    held_out: HeldOut,
    options: DiagnosticsConfig,
    device: Device,
    seed: int,
    fingerprint: str,
    progress: Advance = ignore,
) -> list[pd.DataFrame]:
    """Measure diagnostics of a decoder on `device`, and return blocks of rows: overall, by visible keys, or by head.
    All ranks call it.

    seed: seed of the untrained model to compare with; fingerprint: fingerprint of the data that the sequences come
    from.
    """
    untrained_decoder = Decoder(decoder.config, decoder.vocab_size, decoder.seq_len, seed=seed).to(device.device)
    values_by_setting: dict[str, MeasuredValues] = {}
    settings = applicable_settings(decoder, options.inference)
    for setting in settings:
        suffix = "" if setting.label == "as trained" else f", {setting.label}"
        decoders = [for_inference(model, setting) for model in (decoder, untrained_decoder)]
        measures, vectors = statistics_of(*decoders, held_out, options, device, progress)
        values = [measures.values(vectors[:, number], decoder.seq_len) for number in range(3)]
        values_by_setting |= dict(zip((setting.label, UNTRAINED + suffix, SHUFFLED + suffix), values, strict=True))
    if not settings:
        return []
    groups = _ModelRows(values_by_setting, measures, held_out, fingerprint)
    blocks = [*groups.overall_means(), *groups.curves(), *groups.head_means()]
    return blocks + (list(groups.head_means_by_keys()) if options.by_position else [])


def statistics_of(
    decoder: Decoder,
    untrained_decoder: Decoder,
    held_out: HeldOut,
    options: DiagnosticsConfig,
    device: Device,
    progress: Advance = ignore,
) -> tuple[Measures, np.ndarray]:
    """Return what is measured (`Measures`), and its values in each of N sequences for the model, the untrained model,
    and the model with shuffled scores: (N, 3, values) fp32.

    Sequences are split over the ranks of `device`; every rank returns the statistics of all sequences. All ranks call
    it.
    """
    queries = query_indices(held_out.length, options.queries)
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    measures = Measures(families(options), len(decoder.normalizers()), heads, queries, held_out.length)

    def vectors(index: int) -> Tensor:
        batch = held_out.batch([index]).to(device.device)
        model_values, shuffled_values = measures.vectors(
            decoder, batch, shuffling_numbers(index, len(queries), held_out.length)
        )
        return torch.stack([model_values, *measures.vectors(untrained_decoder, batch), shuffled_values])

    def measure(indices: list[int]) -> Tensor:
        return torch.stack([vectors(index) for index in indices])

    return measures, by_sequence(
        [decoder, untrained_decoder], held_out.lengths, (3, measures.vector_length), device, measure, progress
    )


# ---------------------------------------------------------------- rows


class _ModelRows:
    """The rows of the statistics of several models on the same sequences; the trained model comes first."""

    def __init__(
        self, values_by_setting: dict[str, MeasuredValues], measures: Measures, held_out: HeldOut, fingerprint: str
    ):
        self.values_by_setting = values_by_setting
        self.measures = measures
        self.held_out = held_out
        self.fingerprint = fingerprint
        self.first_setting = next(iter(values_by_setting))
        self.bins = half_octaves(
            values_by_setting[self.first_setting].n, values_by_setting[self.first_setting].train_length
        )

    def _model_values(
        self, statistics: Iterable[Statistic | QuerySums]
    ) -> Iterator[tuple[Statistic | QuerySums, str, MeasuredValues]]:
        """Tuples (statistic, setting, values) for each statistic and model; statistics without a value in any model are
        left out.
        """
        for statistic in statistics:
            arrays = [
                (values.by_query | values.by_head).get(statistic.name) for values in self.values_by_setting.values()
            ]
            if any(array is not None and np.isfinite(array).any() for array in arrays):
                yield from ((statistic, setting, values) for setting, values in self.values_by_setting.items())

    def overall_means(self) -> Iterator[pd.DataFrame]:
        """Each statistic's mean over queries, heads and layers, with intervals over documents if it has a
        value for each query. Further rows give the mean over heads and layers of b in fits statistic ~ n^b, where n
        is the number of visible keys.
        """
        statistics = [*self.measures.query_statistics, *UNDEFINED_FRACTIONS, *self.measures.query_sums]
        for statistic, setting, values in self._model_values(statistics):
            is_logged = statistic.in_reports and setting == self.first_setting
            names = [f"{KIND}/{statistic.name}"] if is_logged else []
            units, statistic_values = None, values.by_head.get(statistic.name)
            if statistic_values is None:
                by_query = values.by_query[statistic.name]
                count = np.isfinite(by_query).sum((1, 2, 3))
                statistic_values = mean(by_query)
                if count.any():
                    units = units_frame(self.held_out.sha256, self.held_out.document_labels, count, self.fingerprint)
                    statistic_values = np.where(count, mean(by_query, (1, 2, 3)), 0.0)[:, None]
            else:
                statistic_values = mean(statistic_values)
            name = "diagnostics/{STATISTIC}" * is_logged
            yield self._rows(statistic, setting, statistic_values, units=units, names=names, name=name)
        for statistic, setting, exponents, _ in self._fits():
            yield self._rows(statistic, setting, mean(exponents), _exponent_of(statistic))

    def curves(self) -> Iterator[pd.DataFrame]:
        """Each statistic's means over heads and layers by the number of visible keys, with intervals over documents."""
        for statistic, setting, values in self._model_values(self.measures.query_statistics if self.bins else []):
            # (N, bins)
            by_bin = np.stack([self._mean_within(statistic, values, bounds, (1, 2, 3)) for bounds in self.bins], 1)
            has_value = np.isfinite(by_bin)
            blocks = (
                self._rows(
                    statistic, setting, np.where(has_value[:, [index]], by_bin[:, [index]], 0.0), x=[x], is_curve=True,
                    units=self.held_out.units(self.fingerprint).assign(weight=has_value[:, index].astype(float)),
                )
                for index, x in enumerate(bin_middles(self.bins))
            )  # fmt: skip
            yield pd.concat(blocks)

    def head_means(self) -> Iterator[pd.DataFrame]:
        """By layer and head, each statistic's mean over sequences and queries, and of b and R^2 of the fit
        statistic ~ n^b. Here n is the number of visible keys."""
        statistics = [*self.measures.query_statistics, *self.measures.query_sums, *UNDEFINED_FRACTIONS]
        for statistic, setting, values in self._model_values(statistics):
            by_head = values.by_head.get(statistic.name)
            by_head = mean(values.by_query[statistic.name], (0, 3)) if by_head is None else by_head
            yield from self._head_rows(statistic, setting, by_head)
        for statistic, setting, exponents, r_squared in self._fits():
            yield from self._head_rows(statistic, setting, exponents, _exponent_of(statistic))
            yield from self._head_rows(statistic, setting, r_squared, f"R^2 of the {_exponent_of(statistic)}")

    def head_means_by_keys(self) -> Iterator[pd.DataFrame]:
        """Each statistic's means over sequences and queries, by layer, head and number of visible keys."""
        for statistic, setting, values in self._model_values(self.measures.query_statistics):
            for low, high in self.bins:
                by_head = self._mean_within(statistic, values, (low, high), (0, 3))
                yield from self._head_rows(statistic, setting, by_head, suffix=f", {low:,} to {high:,} keys")

    def _fits(self) -> Iterator[tuple[Statistic, str, np.ndarray, np.ndarray]]:
        """Tuples (statistic, setting, b, R^2) for each statistic and model, from fits statistic ~ n^b to queries that
        see n <= `train_length` keys. The arrays b and R^2 have the shape (layers, H)."""
        statistics = (statistic for statistic in self.measures.query_statistics if statistic.has_exponent)
        for statistic, setting, values in self._model_values(statistics):
            n = np.where(values.n <= values.train_length, values.n, np.nan)
            exponents, r_squared = exponent(values.by_query[statistic.name], n, statistic.log)
            if np.isfinite(exponents).any():
                yield statistic, setting, exponents, r_squared

    def _mean_within(
        self, statistic: Statistic, values: MeasuredValues, bounds: tuple[int, int], axes: tuple[int, ...]
    ) -> np.ndarray:
        """Means over `axes` of the values of queries whose number of visible keys lies within `bounds`, ends
        included.
        """
        n = values.n[:, :, None]
        return mean(np.where((n >= bounds[0]) & (n <= bounds[1]), values.by_query[statistic.name], np.nan), axes)

    def _head_rows(
        self, statistic: Statistic, setting: str, by_head: np.ndarray, quantity: str = "", suffix: str = ""
    ) -> Iterator[pd.DataFrame]:
        for layer, means in enumerate(by_head):
            heads, task = [*range(by_head.shape[1])], f"layer {layer}{suffix}"
            yield self._rows(statistic, setting, means, quantity, axis=HEADS, x=heads, task=task)

    def _rows(
        self,
        statistic: Statistic | QuerySums,
        setting: str,
        values: np.ndarray,
        quantity: str = "",
        name: str = "",
        axis: Axis | None = None,
        is_curve: bool = False,
        **fields: object,
    ) -> pd.DataFrame:
        """Rows of a statistic, or of `quantity`, a number without a unit that is computed from the statistic. `name`,
        `axis`: of the metric; `is_curve`: whether it is one by visible keys. `fields`: arguments of `rows`.
        """
        control, has_units = setting != self.first_setting, fields.get("units") is not None
        display = {}
        if is_curve and statistic.in_reports:
            display = {
                "title": f"Attention: {statistic.name}",
                "measured_on": "held-out sequences of diagnostics",
                "amount": f"{self.held_out.amount}, {len(self.measures.queries)} queries each",
                "caption": f"{statistic.name} of attention weights, mean over heads",
            }
        about = Metric(
            name, "" if quantity else statistic.unit, quantity=quantity or statistic.name, control=control,
            units="documents" * has_units, interval=has_units, axis=VISIBLE_KEYS if is_curve else axis, **display,
        )  # fmt: skip
        values = np.asarray(values, "f8")
        return rows(about, values, setting=setting, **fields)


def _exponent_of(statistic: Statistic) -> str:
    return f"exponent of {statistic.name.removeprefix('ln ')}"


# ---------------------------------------------------------------- lm diagnose


def diagnose(sources: list[Path], checkpoint: str = "last", overrides: Sequence[str] = ()) -> list[EvaluationResult]:
    """Measure diagnostics of models, keep the results in evaluations/ as `lm eval` does, and return them.

    Args:
        sources: run folders, checkpoints, exports and other model folders, and configurations of the text that model
            folders are measured on. A model folder without a training run needs such a configuration, or
            eval.diagnostics.text.
        checkpoint: the checkpoint of run folders: `last`, `best` or a step.
        overrides: `key=value` of keys that act in `lm diagnose`, such as eval.diagnostics.sequences=32.

    Raises LMError: no model at a source, no text that could be read, other data than the model was trained on.
    """
    changes = diagnosis_changes(overrides)
    text = changes["eval"]["diagnostics"].get("text")
    alone = [source for source in sources if text and (source / DESCRIPTION).is_file()]
    others = [source for source in sources if source not in alone]
    results = [_diagnose_on_text(load(source, checkpoint), changes) for source in alone]
    return results + (
        evaluate_sources(others, checkpoint, partial(changed_config, changes), kinds=[KIND]) if others else []
    )


def diagnosis_changes(overrides: Sequence[str]) -> dict[str, Plain]:
    """Changes of a configuration: a block `eval.diagnostics`, and `overrides`. Raises ConfigError: they remove it."""
    changes = merge({"eval": {"diagnostics": {}}}, overrides_in("diagnose", [*overrides]))
    if changes["eval"]["diagnostics"] is None:
        reason, remedy = "leaves nothing to describe", "leave it out, or give keys of the block"
        raise ConfigError([Problem("eval.diagnostics", None, reason, remedy)])
    return changes


def _diagnose_on_text(model: LoadedModel, changes: dict[str, Plain]) -> EvaluationResult:
    """Diagnose a model folder on `eval.diagnostics.text`, without a token store."""
    config = changed_config(changes, model.config or config_of(model))
    options = config.eval.diagnostics
    length = sequence_length(options, model.spec.seq_len)
    measurement = Diagnostics(config, None, sequences_of_text(*model.tokenizer_and_start(), options, length))
    (result,) = evaluate_model(model.folder, model, [measurement], open_device(config, model.environment))
    return result


def changed_config(changes: dict[str, Plain], config: Config) -> Config:
    """A configuration with `changes`, of whose `eval` only the validation and the diagnostics are left, as others may
    not be for the model.
    """
    alone = EvalConfig(
        sequences=config.eval.sequences,
        long_context=LongContextConfig(length_factor=0),
        diagnostics=config.eval.diagnostics,
    )
    return parse(merge(to_plain(replace(config, eval=alone)), changes))


def config_of(model: LoadedModel) -> Config:
    """The configuration of a model without a training run: defaults with the model's shape."""
    data, optim = DataConfig(seq_len=model.spec.seq_len), OptimConfig(batch_tokens=model.spec.seq_len)
    return Config(name=model.folder.resolve().name, data=data, model=model.spec.model, optim=optim)
