"""Measure statistics of attention weights of a trained model and of the untrained one (`lm diagnose`)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lm.config.eval_config import DiagnosticsConfig
from lm.config.tree import Config
from lm.data.batches import long_window_starts
from lm.data.store import Store
from lm.diagnostics.attention_rows import (
    HEAD_AXIS,
    MIN_KEYS,
    NO_WEIGHT_FRACTION,
    NOT_FINITE_FRACTION,
    VISIBLE_KEYS_AXIS,
    AttentionMeasurement,
    HeadStatistic,
    MeasuredValues,
    Statistic,
    Statistics,
    fit_head_exponents_and_r2,
    half_octave_ranges,
    log_spaced_queries,
    nan_mean,
)
from lm.diagnostics.concentration import concentration_statistics
from lm.diagnostics.limits import limit_statistics
from lm.diagnostics.sparsity import sparsity_statistics
from lm.errors import ConfigError, Problem
from lm.evaluation.held_out import evenly_spaced_sequences, measure_sequences, validation_sequences
from lm.evaluation.measurement import HeldOutSequences, Measurement, metric_rows, sampling_unit_frame
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.swapped import applicable_settings, with_inference_setting
from lm.plain import Plain
from lm.runs.evaluations import Metric

KIND = "diagnostics"
UNTRAINED_LABEL = "untrained weights"
# by their names in `eval.diagnostics.statistics`
STATISTIC_GROUPS: dict[str, Callable[[], Statistics]] = {
    "concentration": concentration_statistics,
    "sparsity": sparsity_statistics,
    "limits": limit_statistics,
}
UNDEFINED_ROW_FRACTIONS = (
    Statistic(NOT_FINITE_FRACTION, "fraction", lambda rows: None),
    Statistic(NO_WEIGHT_FRACTION, "fraction", lambda rows: None),
)
_LENGTH_KEY = "eval.diagnostics.length_factor"


def statistics_of(options: DiagnosticsConfig) -> Statistics:
    """Return the statistics that the configuration asks for."""
    return [statistic for name in options.statistics for statistic in STATISTIC_GROUPS[name]()]


# ---------------------------------------------------------------- sequences


def diagnostic_sequences(store: Store, config: Config, options: DiagnosticsConfig) -> HeldOutSequences:
    """Return up to `options.sequences` held-out windows. Windows of the training length may cross documents; any others
    lie within one document each.

    Raises ConfigError: no document is long enough, or a window has fewer than `MIN_KEYS` tokens.
    """
    length = round(options.length_factor * config.data.seq_len)
    if length < MIN_KEYS:
        reason = f"makes sequences of {length} tokens, in which no query sees the {MIN_KEYS} keys that statistics need"
        raise ConfigError([Problem(_LENGTH_KEY, options.length_factor, reason, "set it higher")])
    if config.data.symbolic:
        validation = validation_sequences(store, config)
        count = min(options.sequences, len(validation.sequences))
        indices = np.arange(count) * len(validation.sequences) // count
        return HeldOutSequences(validation.sequences[indices], validation.bytes_per_token)
    if options.length_factor == 1:
        windows = evenly_spaced_sequences(store, config, length, options.sequences)
    else:
        windows = HeldOutSequences.from_store(store, long_window_starts(store.val, length, options.sequences), length)
    if not len(windows.sequences):
        reason = f"needs held-out documents of {length + 1:,} tokens, the longest has {store.val.longest:,}"
        raise ConfigError([Problem(_LENGTH_KEY, options.length_factor, reason, "set it lower")])
    return windows


# ---------------------------------------------------------------- measuring


class Diagnostics(Measurement):
    """Diagnostics measure statistics of attention weights by layer, head and number of visible keys, in fp32.

    They measure the trained model, and the untrained model of the same configuration and seed, under each inference
    setting. A result that holds for the untrained model, too, says nothing about training.
    """

    kind, measures_in_fp32 = KIND, True
    logged_metrics = (
        Metric("diagnostics/{STATISTIC}", meaning="statistic of attention weights, mean over heads", units="documents"),
    )

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        return [
            replace(
                metric.fill_placeholders(STATISTIC=each.name), unit=each.unit, quantity=each.name,
                units="documents" if isinstance(each, Statistic) else "",
            )
            for metric in cls.logged_metrics
            for each in statistics_of(cls.options_of(config))
            if each.in_reports
        ]  # fmt: skip

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = [diagnostic_sequences(store, config, self.eval_config)]

    @property
    def further_inputs(self) -> dict[str, Plain]:
        return super().further_inputs | {"untrained_seed": self.config.seed}

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        (sequences,), seed = self.held_out, self.config.seed
        return diagnostic_rows(decoder, sequences, self.eval_config, device, seed, self.data_fingerprint)


def diagnostic_rows(
    decoder: Decoder,
    held_out: HeldOutSequences,
    options: DiagnosticsConfig,
    device: Device,
    untrained_seed: int,
    data_fingerprint: str,
) -> list[pd.DataFrame]:
    """Measure the diagnostics of a decoder and return blocks of rows: overall means, by visible keys, and by head.

    All ranks call this function.

    Args:
        untrained_seed: seed of the untrained model to compare with.
        data_fingerprint: fingerprint of the data that the sequences come from.
    """
    untrained_decoder = Decoder(decoder.config, decoder.vocab_size, decoder.seq_len, seed=untrained_seed).to(
        device.device
    )
    queries, layers = log_spaced_queries(held_out.length, options.queries), len(decoder.normalizers())
    heads = max(normalizer.layer.n_head for normalizer in decoder.normalizers())
    measures = AttentionMeasurement(statistics_of(options), layers, heads, queries, held_out.length)
    values_by_model: dict[str, MeasuredValues] = {}
    for setting in applicable_settings(decoder, options.inference):
        untrained_label = UNTRAINED_LABEL + f", {setting.label}" * (setting.label != "as trained")
        for label, source in ((setting.label, decoder), (untrained_label, untrained_decoder)):
            model = with_inference_setting(source, setting)

            def measure(indices: list[int], model: Decoder = model) -> Tensor:
                batches = (held_out.batch([index]).to(device.device) for index in indices)
                return torch.stack([measures.measure_statistics(model, batch) for batch in batches])

            vectors = measure_sequences([model], held_out.lengths, (measures.vector_length,), device, measure)
            values_by_model[label] = measures.split_vectors(vectors)
    return [
        block
        for statistic in (*measures.row_statistics, *UNDEFINED_ROW_FRACTIONS, *measures.head_statistics)
        for block in _statistic_rows(
            statistic, values_by_model, held_out, data_fingerprint, decoder.seq_len, len(queries)
        )
    ]


def _statistic_rows(
    statistic: Statistic | HeadStatistic,
    values_by_model: dict[str, MeasuredValues],
    held_out: HeldOutSequences,
    data_fingerprint: str,
    train_length: int,
    n_queries: int,
) -> Iterator[pd.DataFrame]:
    """Yield rows of a statistic of several models on the same sequences; no rows if the statistic is defined for no
    query.

    There are up to four kinds of rows for each model. The first is the mean over queries, heads and layers. It has an
    interval over documents if each query has a value, and none if only each head has. The second is the exponent b of a
    fit of statistic ~ n^b, n the number of visible keys. The third is a curve, the mean in each bin of n. The last has,
    for each layer and head, the mean over sequences and queries, b, and R^2 of the fit.

    values_by_model: measured values by label, the trained model first.
    """
    trained, name = next(iter(values_by_model), ""), statistic.name
    arrays = {model: (values.by_query | values.pooled_by_head)[name] for model, values in values_by_model.items()}
    if not any(np.isfinite(array).any() for array in arrays.values()):
        return
    has_curve = isinstance(statistic, Statistic) and statistic not in UNDEFINED_ROW_FRACTIONS
    bins = half_octave_ranges(values_by_model[trained].n_visible_keys_by_query, train_length) if has_curve else []
    reported = {
        "title": f"Attention: {name}", "measured_on": "held-out sequences of diagnostics",
        "amount": f"{held_out.size_text}, {n_queries} queries each",
        "caption": f"{name} of attention weights, mean over heads",
    }  # fmt: skip
    for model, array in arrays.items():
        n_visible_keys = values_by_model[model].n_visible_keys_by_query
        head_metric = Metric(unit=statistic.unit, quantity=name, control=model != trained)
        document_metric = replace(head_metric, units="documents", interval=True)
        by_head = [(head_metric, nan_mean(array, (0, 3)) if array.ndim == 4 else array)]
        log_name = "diagnostics/{STATISTIC}" * (statistic.in_reports and model == trained)
        count = np.isfinite(array).sum((1, 2, 3)) if array.ndim == 4 else np.zeros(0)
        if count.any():
            units = sampling_unit_frame(held_out.sha256, held_out.document_labels, count, data_fingerprint)
            means = np.where(count, nan_mean(array, (1, 2, 3)), 0.0)[:, None]
            yield metric_rows(replace(document_metric, name=log_name), means, units, inference_setting=model)
        else:
            yield metric_rows(replace(head_metric, name=log_name), nan_mean(array), inference_setting=model)
        if has_curve and statistic.has_exponent:
            n = np.where(n_visible_keys <= train_length, n_visible_keys, np.nan)
            b, r_squared = fit_head_exponents_and_r2(array, n, statistic.is_log)
            if np.isfinite(b).any():
                exponent_metric = replace(head_metric, unit="", quantity=f"exponent of {name.removeprefix('ln ')}")
                by_head += [
                    (exponent_metric, b),
                    (replace(exponent_metric, quantity=f"R^2 of the {exponent_metric.quantity}"), r_squared),
                ]
                yield metric_rows(exponent_metric, nan_mean(b), inference_setting=model)
        curve = replace(document_metric, axis=VISIBLE_KEYS_AXIS, **(reported if statistic.in_reports else {}))
        units, n = held_out.sampling_units(data_fingerprint), n_visible_keys[:, :, None]
        for first, last in bins:
            means = nan_mean(np.where((n >= first) & (n <= last), array, np.nan), (1, 2, 3))
            point = units.assign(weight=np.isfinite(means).astype(float))
            x = [float(round(math.sqrt(first * last)))]
            yield metric_rows(curve, np.nan_to_num(means)[:, None], point, x, inference_setting=model)
        for metric, layer_values in by_head:
            for layer, head_values in enumerate(layer_values):
                heads = [*range(len(head_values))]
                yield metric_rows(
                    replace(metric, axis=HEAD_AXIS),
                    head_values,
                    x=heads,
                    task=f"layer {layer}",
                    inference_setting=model,
                )
