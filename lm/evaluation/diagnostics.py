"""Diagnostics (`lm diagnose`): attention statistics of a trained model, the untrained model, and the trained model with
shuffled scores.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lm.config.eval_config import DiagnosticsConfig
from lm.config.tree import Config
from lm.data.batches import long_starts
from lm.data.store import Store
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
from lm.diagnostics.concentration import concentration_statistics
from lm.diagnostics.limits import limit_statistics
from lm.diagnostics.sparsity import sparsity_statistics
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import HeldOut, Measurement
from lm.evaluation.held_out import by_sequence, spread_sequences, validation_sequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import applicable_settings, for_inference
from lm.plain import Plain
from lm.runs.evaluations import rows, units_frame
from lm.runs.metric import Metric

KIND = "diagnostics"
SHUFFLED, UNTRAINED = "shuffled scores", "untrained weights"
# by their names in `eval.diagnostics.statistics`
FAMILIES: dict[str, Callable[[], StatisticFamily]] = {
    "concentration": concentration_statistics,
    "sparsity": sparsity_statistics,
    "limits": limit_statistics,
}
UNDEFINED_FRACTIONS = (
    Statistic(NOT_FINITE, "fraction", lambda rows: None),
    Statistic(NO_WEIGHT, "fraction", lambda rows: None),
)
_LENGTH_KEY = "eval.diagnostics.length_factor"


def families(options: DiagnosticsConfig) -> tuple[StatisticFamily, ...]:
    return tuple(FAMILIES[name]() for name in options.statistics)


# ---------------------------------------------------------------- sequences


def diagnostic_sequences(store: Store, config: Config, options: DiagnosticsConfig) -> HeldOut:
    """Up to `options.sequences` windows of held-out data; within single documents if not of the training length.

    Raises ConfigError: no document is long enough, or sequences are so short that no query sees `MIN_KEYS` keys.
    """
    length = round(options.length_factor * config.data.seq_len)
    if length < MIN_KEYS:
        reason = f"makes sequences of {length} tokens, in which no query sees the {MIN_KEYS} keys that statistics need"
        raise ConfigError([Problem(_LENGTH_KEY, options.length_factor, reason, "set it higher")])
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


# ---------------------------------------------------------------- measuring


class Diagnostics(Measurement):
    """Statistics of attention weights by layer, head and number of visible keys, in fp32, of three models under each
    inference setting.

    The models are the trained model, the untrained model of its configuration and seed, and the trained model with each
    query's scores shuffled among the query's visible keys. A result that holds for the untrained model, too, says
    nothing about training. A result that holds for shuffled scores, too, follows from the distribution of the scores.
    """

    kind, in_fp32 = KIND, True
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

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = [diagnostic_sequences(store, config, self.eval_config)]

    @property
    def options(self) -> dict[str, Plain]:
        return super().options | {"untrained_seed": self.config.seed}

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        (sequences,), seed = self.held_out, self.config.seed
        return diagnostic_blocks(decoder, sequences, self.eval_config, device, seed, self.fingerprint)


def diagnostic_blocks(
    decoder: Decoder, held_out: HeldOut, options: DiagnosticsConfig, device: Device, seed: int, fingerprint: str
) -> list[pd.DataFrame]:
    """Measure diagnostics of a decoder on `device`, and return blocks of rows: overall, by visible keys, or by head.
    All ranks call it.

    seed: seed of the untrained model to compare with; fingerprint: fingerprint of the data that the sequences come
    from.
    """
    untrained_decoder = Decoder(decoder.config, decoder.vocab_size, decoder.seq_len, seed=seed).to(device.device)
    queries, layers = query_indices(held_out.length, options.queries), len(decoder.normalizers())
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    measures = Measures(families(options), layers, heads, queries, held_out.length)
    models: dict[str, MeasuredValues] = {}
    for setting in applicable_settings(decoder, options.inference):
        trained, untrained = pair = [for_inference(model, setting) for model in (decoder, untrained_decoder)]

        def measure(indices: list[int], trained: Decoder = trained, untrained: Decoder = untrained) -> Tensor:
            vectors = []
            for index in indices:
                batch = held_out.batch([index]).to(device.device)
                order = shuffling_numbers(index, len(queries), held_out.length)
                as_trained, shuffled = measures.vectors(trained, batch, order)
                vectors.append(torch.stack([as_trained, *measures.vectors(untrained, batch), shuffled]))
            return torch.stack(vectors)

        vectors = by_sequence(pair, held_out.lengths, (3, measures.vector_length), device, measure)
        suffix = "" if setting.label == "as trained" else f", {setting.label}"
        names = setting.label, UNTRAINED + suffix, SHUFFLED + suffix
        models |= {name: measures.values(vectors[:, index], decoder.seq_len) for index, name in enumerate(names)}
    return [*_model_rows(models, measures, held_out, fingerprint)] if models else []


def _model_rows(
    models: dict[str, MeasuredValues], measures: Measures, held_out: HeldOut, fingerprint: str
) -> Iterator[pd.DataFrame]:
    """Rows of the statistics of several models on the same sequences; the trained model comes first.

    Overall there is each statistic's mean over queries, heads and layers, with intervals over documents if it has a
    value for each query, and the mean of b in fits statistic ~ n^b, n the number of visible keys. Curves are means
    by n. By layer and head there are means over sequences and queries, b, and R^2 of the fit.
    """
    trained, values = next(iter(models.items()))
    bins, statistics = half_octaves(values.n, values.train_length), measures.query_statistics

    def measured(of: Iterable[Statistic | QuerySums]) -> Iterator[tuple[Statistic | QuerySums, str, np.ndarray]]:
        """Each statistic's values by model, (N, layers, H, T) or (layers, H), unless all are undefined."""
        for statistic in of:
            arrays = {name: (each.by_query | each.by_head)[statistic.name] for name, each in models.items()}
            if any(np.isfinite(array).any() for array in arrays.values()):
                yield from ((statistic, name, array) for name, array in arrays.items())

    def metric(statistic: Statistic | QuerySums, model: str, **fields: object) -> Metric:
        plain = {"unit": statistic.unit, "quantity": statistic.name, "control": model != trained}
        return Metric(**plain | fields)

    def by_head(about: Metric, model: str, values: np.ndarray) -> Iterator[pd.DataFrame]:
        for layer, row in enumerate(values):
            yield rows(replace(about, axis=HEADS), row, x=[*range(len(row))], task=f"layer {layer}", setting=model)

    fits = []
    for statistic, model, array in measured(statistic for statistic in statistics if statistic.has_exponent):
        n, name = models[model].n, f"exponent of {statistic.name.removeprefix('ln ')}"
        b, r_squared = exponent(array, np.where(n <= values.train_length, n, np.nan), statistic.log)
        about = metric(statistic, model, unit="", quantity=name)
        fits += [(about, model, b, r_squared)] if np.isfinite(b).any() else []

    documents = {"units": "documents", "interval": True}
    for statistic, model, array in measured([*statistics, *UNDEFINED_FRACTIONS, *measures.query_sums]):
        is_logged = statistic.in_reports and model == trained
        about = metric(statistic, model, name="diagnostics/{STATISTIC}" * is_logged)
        count = np.isfinite(array).sum((1, 2, 3)) if array.ndim == 4 else np.zeros(0)
        if count.any():
            units = units_frame(held_out.sha256, held_out.document_labels, count, fingerprint)
            means = np.where(count, mean(array, (1, 2, 3)), 0.0)[:, None]
            yield rows(replace(about, **documents), means, units, setting=model)
        else:
            yield rows(about, mean(array), setting=model)
    for about, model, b, _ in fits:
        yield rows(about, mean(b), setting=model)

    for statistic, model, array in measured(statistics if bins else []):
        display = {
            "title": f"Attention: {statistic.name}",
            "measured_on": "held-out sequences of diagnostics",
            "amount": f"{held_out.amount}, {len(measures.queries)} queries each",
            "caption": f"{statistic.name} of attention weights, mean over heads",
        }
        about = metric(statistic, model, axis=VISIBLE_KEYS, **documents, **(display if statistic.in_reports else {}))
        units, n = held_out.units(fingerprint), models[model].n[:, :, None]
        for (first, last), x in zip(bins, bin_middles(bins), strict=True):
            means = mean(np.where((n >= first) & (n <= last), array, np.nan), (1, 2, 3))
            point = units.assign(weight=np.isfinite(means).astype(float))
            yield rows(about, np.nan_to_num(means)[:, None], point, [x], setting=model)

    for statistic, model, array in measured([*statistics, *measures.query_sums, *UNDEFINED_FRACTIONS]):
        yield from by_head(metric(statistic, model), model, mean(array, (0, 3)) if array.ndim == 4 else array)
    for about, model, b, r_squared in fits:
        yield from by_head(about, model, b)
        yield from by_head(replace(about, quantity=f"R^2 of the {about.quantity}"), model, r_squared)
