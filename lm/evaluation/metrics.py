"""List all kinds of evaluation and all metrics, and find those that a configuration logs to metrics.jsonl."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pandas as pd

from lm.config.tree import Config
from lm.data.store import Store
from lm.errors import ConfigError, Problem, suggestion_or_all_names
from lm.evaluation.answers import NeedleMeasurement, Recall
from lm.evaluation.diagnostics import Diagnostics
from lm.evaluation.downstream import DownstreamTasks
from lm.evaluation.held_out import LongContext, LossByLength, OtherTexts, SwapMeasurement, Validation
from lm.evaluation.measurement import Measurement, metric_rows, sampling_unit_frame
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.report.comparison import REPORTING_SUFFIX
from lm.runs.evaluations import NATS, Metric
from lm.runs.folder import PEAK_MEMORY_KEY

TRAINING_METRICS = (  # logged in training
    Metric("train/loss", NATS, "lower", "training loss, mean since the last line"),
    Metric("train/grad_norm", "", "none", "norm of the step's gradient, before clipping"),
    Metric("lr", "", "none", "learning rate of the step"),
    Metric("tokens_per_s", "tokens/s", "higher", "training tokens a second since the last line"),
    Metric("elapsed_s", "s", "lower", "time of training, without evaluations and checkpoints"),
    Metric(PEAK_MEMORY_KEY, "bytes", "lower", "largest memory so far: of the process, or of tensors on the GPU"),
    Metric("sequence_length", "tokens", "none", "length of the step's sequences"),
    Metric("normalizer/{NAME}/layerL/headH", "", "none", "parameter of a normalizer with one value a head"),
    Metric("normalizer/{NAME}/layerL/rms", "", "none", "root mean square of another parameter of a normalizer"),
    *(replace(metric, units="") for metric in SwapMeasurement.logged_metrics),
)  # fmt: skip


class CallbackMeasurement(Measurement):
    """This evaluation records the last values that callbacks in `trainer.callbacks` gave to `self.log`, one number per
    metric.
    """

    kind = "callbacks"
    logged_metrics = (
        Metric("{NAME}", meaning="what a callback of `trainer.callbacks` gives to self.log", units="questions",
            title="Metrics of callbacks", measured_on="runs", amount="one value a run"),
    )  # fmt: skip
    logged_values: dict[str, float]  # by name; set before each measurement

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        (metric,), blocks = self.logged_metrics, []
        for name, value in self.logged_values.items():
            # one value, which pairs with that of another run
            units = sampling_unit_frame(hashlib.sha256(name.encode()).hexdigest(), np.zeros(1, int))
            blocks.append(metric_rows(replace(metric, quantity=name), np.array([[value]]), units))
        return blocks


MEASUREMENT_CLASSES = (  # in the order in which they are made; of callbacks last, as it has metrics of any name
    Validation, LongContext, LossByLength, OtherTexts, Recall, NeedleMeasurement, Diagnostics, DownstreamTasks,
    CallbackMeasurement,
)  # fmt: skip


def create_measurements(config: Config, store: Store, only_kinds: Sequence[str] | None = None) -> list[Measurement]:
    """Return the measurements that `config.eval` asks for, the validation first; of `only_kinds` alone if it
    is given.

    Raises LMError: the store does not hold the data that a measurement needs, or a package is not installed.
    """
    wanted = config.eval.wanted_kinds(config.data)
    return [
        each(config, store)
        for each in MEASUREMENT_CLASSES
        if each.kind in wanted and each.kind in (only_kinds or wanted)
    ]


def metrics_of(config: Config) -> list[Metric]:
    """Return the metrics that a run of `config` logs.

    Names keep placeholders in capitals, such as the L of `layerL`, for what only the model or lm-eval knows: layers,
    heads, parameters and lm-eval's metrics. Metrics of swaps are left out if no swap is measured.
    """
    swaps = len(config.phases) > 1 and config.eval.swap_lengths
    in_training = (metric for metric in TRAINING_METRICS if swaps or not metric.name.startswith("swap/"))
    return [*in_training, *chain(*(kind.metrics(config) for kind in _measurement_classes(config)))]


def is_reserved_metric_name(name: str) -> bool:
    """Return whether lm itself logs a metric of this name, so that no user's callback may log it."""
    lm_metrics = chain(TRAINING_METRICS, *(kind.logged_metrics for kind in MEASUREMENT_CLASSES[:-1]))
    return name in ("step", "tokens") or any(metric.is_logged_as(name) for metric in lm_metrics)


def _measurement_classes(config: Config) -> list[type[Measurement]]:
    """Return the kinds of evaluation that a configuration asks for, including the metrics of callbacks."""
    kinds = [*config.eval.wanted_kinds(config.data), *[CallbackMeasurement.kind] * bool(config.trainer.callbacks)]
    return [measurement for measurement in MEASUREMENT_CLASSES if measurement.kind in kinds]


def find_metric(config: Config, name: str) -> tuple[type[Measurement], Metric]:
    """Return the metric `name`, and the kind of evaluation that measures it. Only metrics with a value for each
    sequence or question are found.

    Raises ConfigError: `config` asks for no such metric, or the metric has no such values.
    """
    candidates = [
        (kind, metric) for kind in _measurement_classes(config) for metric in kind.metrics(config) if metric.can_decide
    ]
    for kind, metric in candidates:
        if metric.matches(name):
            return kind, replace(metric, name=name)
    remedy = suggestion_or_all_names(name, [metric.name for _, metric in candidates if "{" not in metric.name])
    if not remedy.startswith("did you mean"):
        is_asked = any(metric.name.partition("/")[0] == name.partition("/")[0] for _, metric in candidates)
        remedy += "; or ask for the evaluation in the base's `eval` or in `evaluate`" * (not is_asked)
    raise ConfigError([Problem("primary.metric", name, "is not measured by sequence at the last step", remedy)])


_PAGE_HEAD = f"""# Metrics

The names in metrics.jsonl, which tables, `primary.metric`, `lm judge --metric` and `lm.results` have, too. `lm metrics
CONFIG` lists those that a configuration logs, with names in place of the words in capitals. A report's numbers are of
the [documents that report](verdicts.md#glossary) alone: their names end with `{REPORTING_SUFFIX}`.

| metric | unit | better | what it is | can decide |
|---|---|---|---|---|"""


def metrics_page() -> str:
    """Return the text of docs/metrics.md: the table of all metrics."""
    lines = [_PAGE_HEAD]
    for metric in (*TRAINING_METRICS, *chain(*(kind.logged_metrics for kind in MEASUREMENT_CLASSES))):
        lines.append(
            f"| `{metric.name_without_braces}` | {metric.unit} | {metric.better} | {metric.meaning} "
            f"| {'yes' * metric.can_decide} |"
        )
    return "\n".join(lines) + "\n"
