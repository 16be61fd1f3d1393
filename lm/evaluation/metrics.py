"""The metrics of metrics.jsonl: their names, units, directions and meanings, and those that a configuration logs."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch

from lm.config.tree import Config
from lm.errors import ConfigError, Problem, suggest
from lm.evaluation.answers import Recall
from lm.evaluation.diagnostics import Diagnostics
from lm.evaluation.downstream import DownstreamTasks
from lm.evaluation.evaluation_kind import Measurement
from lm.evaluation.held_out import ByLength, LongContext, OtherTexts, Validation
from lm.evaluation.logged_metrics import LoggedMetrics
from lm.evaluation.needle import NeedleMeasurement
from lm.model.decoder import Decoder
from lm.runs.evaluations import NATS, REPORTING
from lm.runs.folder import PEAK_MEMORY
from lm.runs.metric import Metric

PER_HEAD = "layerL/headH"


TRAINING = (  # logged in training
    Metric("train/loss", NATS, "lower", "training loss, mean since the last line"),
    Metric("train/z_loss", "", "none", "what optim.z_loss adds to the loss, mean since the last line"),
    Metric("train/grad_norm", "", "none", "norm of the step's gradient, before clipping"),
    Metric("lr", "", "none", "learning rate of the step"),
    Metric("tokens_per_s", "tokens/s", "higher", "training tokens a second since the last line"),
    Metric("elapsed_s", "s", "lower", "time of training, without evaluations and checkpoints"),
    Metric(PEAK_MEMORY, "bytes", "lower", "largest memory so far: of the process, or of tensors on the GPU"),
    Metric("sequence_length", "tokens", "none", "length of the step's sequences"),
    Metric(f"normalizer/{{NAME}}/{PER_HEAD}", "", "none", "parameter of a normalizer with one value a head"),
    Metric("normalizer/{NAME}/layerL/rms", "", "none", "root mean square of another parameter of a normalizer"),
    Metric("swap/loss_before", NATS, "lower", "loss before a swap between phases"),
    Metric("swap/loss_after", NATS, "lower", "loss after it, on the same sequences"),
    Metric("swap/kl", NATS, "lower", "divergence of the new distribution from the old"),
)  # fmt: skip
MEASUREMENTS = (Validation, LongContext, ByLength, OtherTexts, Recall, NeedleMeasurement, DownstreamTasks, Diagnostics)


def metrics_of(config: Config) -> list[Metric]:
    """The metrics that a run of `config` logs. Words stay in capitals where names are known only to the model
    (layers, heads) or to lm-eval.
    """
    return [*_training_metrics(config), *chain(*(kind.metrics(config) for kind in _measurements(config)))]


def is_own_name(name: str) -> bool:
    """Whether lines of metrics.jsonl have lm's own value of this name, which no callback from outside may log."""
    own = chain(TRAINING, *(kind.logged for kind in MEASUREMENTS))
    return name in ("step", "tokens") or any(metric.logs(name) for metric in own)


def _measurements(config: Config) -> list[type[Measurement]]:
    asked = config.eval.measurement_classes(config.data)
    outside = [LoggedMetrics] * bool(config.trainer.callbacks)  # last: it has metrics of any name
    return [*(measurement for measurement in MEASUREMENTS if measurement.kind in asked), *outside]


def measured(config: Config, name: str) -> tuple[type[Measurement], Metric]:
    """Return the metric `name`, and the evaluation of `config` that measures it for each sequence or question.

    Raises ConfigError: there is no such metric.
    """
    found = [(kind, metric) for kind in _measurements(config) for metric in kind.metrics(config) if metric.decides]
    for kind, metric in found:
        if metric.matches(name):
            return kind, replace(metric, name=name)
    remedy = suggest(name, [metric.name for _, metric in found if "{" not in metric.name])
    if not remedy.startswith("did you mean"):
        is_asked = any(metric.name.partition("/")[0] == name.partition("/")[0] for _, metric in found)
        remedy += "; or ask for the evaluation in the base's `eval` or in `evaluate`" * (not is_asked)
    raise ConfigError([Problem("primary.metric", name, "is not measured by sequence at the last step", remedy)])


def _training_metrics(config: Config) -> list[Metric]:
    conditions = {
        "train/z_loss": config.optim.z_loss,
        "sequence_length": bool(config.data.lengths.weights),
        "swap/": len(config.phases) > 1 and config.eval.swap_lengths,
    }
    metrics: list[Metric] = []
    parameters = dict.fromkeys(_parameter_names(config))
    for metric in TRAINING:
        if "{" in metric.name:
            metrics += [replace(metric, name=name) for name in parameters if metric.matches(name)]
        elif all(on for prefix, on in conditions.items() if metric.name.startswith(prefix)):
            metrics.append(metric)
    return metrics


def _parameter_names(config: Config) -> Iterator[str]:
    for phase in range(len(config.phases) or 1):
        with torch.device("meta"):
            decoder = Decoder(config.model_in(phase), 1, config.data.seq_len, seed=None)
        for normalizer in decoder.normalizers():
            for name, parameter in normalizer.named_parameters():
                has_heads = "." not in name and parameter.shape == (normalizer.layer.n_head,)
                yield f"normalizer/{name}/{PER_HEAD if has_heads else 'layerL/rms'}"


_HEAD = f"""# Metrics

The names in metrics.jsonl, which tables, `primary.metric`, `lm judge --metric` and `lm.results` have, too. `lm metrics
CONFIG` lists those that a configuration logs, with names in place of the words in capitals. A report's numbers are of
the [documents that report](verdicts.md#glossary) alone: their names end with `{REPORTING}`.

| metric | unit | better | what it is | can decide |
|---|---|---|---|---|"""


def markdown() -> str:
    """The page docs/metrics.md: the table of all metrics."""
    lines = [_HEAD]
    for metric in (*TRAINING, *chain(*(kind.logged for kind in (*MEASUREMENTS, LoggedMetrics)))):
        lines.append(
            f"| `{metric.pattern}` | {metric.unit} | {metric.better} | {metric.meaning} | {'yes' * metric.decides} |"
        )
    return "\n".join(lines) + "\n"
