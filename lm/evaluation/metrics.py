"""The metrics of metrics.jsonl: their names, units, directions and meanings, and those that a configuration logs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

import torch

from lm.config.task_config import task_names
from lm.config.tree import Config
from lm.data.sources import labels
from lm.evaluation.diagnostics import families
from lm.model.decoder import Decoder
from lm.runs.evaluations import BITS_PER_BYTE, LOSS, REPORTING, Better
from lm.runs.folder import PEAK_MEMORY
from lm.schema import to_plain

NATS = "nats per token"
PER_HEAD = "layerL/headH"


@dataclass(frozen=True)
class Metric:
    """A metric of metrics.jsonl. Words in capitals in its name stand for what differs, such as LENGTH or layerL."""

    name: str
    unit: str
    better: Better
    meaning: str
    decides: bool = False  # measured for each sequence, document or question: an experiment's primary.metric can be it


METRICS = {
    metric.name: metric
    for metric in (
        Metric("train/loss", NATS, "lower", "training loss, mean since the last line"),
        Metric("train/z_loss", "", "none", "what optim.z_loss adds to the loss, mean since the last line"),
        Metric("train/grad_norm", "", "none", "norm of the step's gradient, before clipping"),
        Metric("lr", "", "none", "learning rate of the step"),
        Metric("tokens_per_s", "tokens/s", "higher", "training tokens a second since the last line"),
        Metric("mfu/causal", "fraction", "higher", "FLOPs of the peak, counting causal scores; if the peak is known"),
        Metric("mfu/palm", "fraction", "higher", "FLOPs of the peak, counting all scores; if the peak is known"),
        Metric("elapsed_s", "s", "lower", "time of training, without evaluations and checkpoints"),
        Metric(PEAK_MEMORY, "bytes", "lower", "largest memory so far: of the process, or of tensors on the GPU"),
        Metric("sequence_length", "tokens", "none", "length of the step's sequences"),
        Metric("train/skipped", "steps", "lower", "steps so far whose update was skipped, as it was not finite"),
        Metric("train/grad_norm/layerL", "", "none", "norm of the gradient of a layer's parameters, before clipping"),
        Metric(f"normalizer/NAME/{PER_HEAD}", "", "none", "parameter of a normalizer with one value a head"),
        Metric("normalizer/NAME/layerL/rms", "", "none", "root mean square of another parameter of a normalizer"),
        Metric(f"logit_scale/nN/{PER_HEAD}", "", "none", "factor on q.k / sqrt(D) of a query that sees N keys"),
        Metric(f"logit_scale/slope/{PER_HEAD}", "", "none", "slope a of the factor's fit a ln n + b"),
        Metric(f"logit_scale/intercept/{PER_HEAD}", "", "none", "intercept b of that fit"),
        Metric(f"largest_score/{PER_HEAD}", "", "none", "largest score of a query and a key, before normalization"),
        Metric("swap/loss_before", NATS, "lower", "loss before a swap between phases"),
        Metric("swap/loss_after", NATS, "lower", "loss after it, on the same sequences"),
        Metric("swap/kl", NATS, "lower", "divergence of the new distribution from the old"),
        Metric(LOSS, NATS, "lower", "loss at the training length on all held-out text, or on tasks' answers", True),
        Metric(f"{LOSS} PART", NATS, "lower", "the same on one source of a mixture, or one task", True),
        Metric(BITS_PER_BYTE, "bits per byte", "lower", "the same in bits per byte of text"),
        Metric("long/loss SETTING", NATS, "lower", "loss beyond the training length, mean over positions", True),
        Metric("by_length/loss LENGTH SETTING", NATS, "lower", "loss on the same text, cut into sequences", True),
        Metric("text/NAME/loss", NATS, "lower", "loss at the training length on another text", True),
        Metric("text/NAME/bits_per_byte", "bits per byte", "lower", "the same in bits per byte"),
        Metric("recall/TASK LENGTH SETTING", "fraction", "higher", "whole answers that are correct", True),
        Metric("needle/exact LENGTH SETTING", "fraction", "higher", "needles whose number is written", True),
        Metric("needle/control LENGTH SETTING", "fraction", "higher", "the same without the needle in the text", True),
        Metric("tasks/TASK/METRIC", "", "none", "a metric of lm-eval, by its names", True),
        Metric("diagnostics/STATISTIC", "", "none", "statistic of attention weights, mean over heads", True),
    )
}  # fmt: skip


def metrics_of(config: Config) -> list[Metric]:
    """The metrics that a run of `config` logs, in the order of `METRICS`. Words in capitals stay where names are known
    only to the model (parameters, layers, heads) or to lm-eval.
    """
    names, units = _training_names(config), {}
    for kind in config.eval.measurement_classes(config.data):
        if kind == "diagnostics":
            for family in families(config.eval.diagnostics):
                statistics = (*family.query_statistics, *family.query_sums)
                units |= {f"{kind}/{entry.name}": entry.unit for entry in statistics if entry.in_reports}
            names += units
        else:
            names += evaluation_names(config, kind) or [name for name in METRICS if name.startswith(f"{kind}/")]
    names += [] if config.data.symbolic else [BITS_PER_BYTE]
    names += [name.replace("/loss", "/bits_per_byte") for name in names if name.startswith("text/")]
    order = {name: index for index, name in enumerate(METRICS)}
    entries = sorted(((_described(name), name) for name in names), key=lambda entry: order[entry[0].name])
    return [replace(metric, name=name, unit=units.get(name, metric.unit)) for metric, name in entries]


def _described(name: str) -> Metric:
    """The entry of `METRICS` for a metric: of its name, or with words in capitals for part of it."""
    patterns = {re.sub(r"[A-Z]{2,}.*[A-Z]{2,}|[A-Z]{2,}", ".+", entry.name): entry for entry in METRICS.values()}
    return METRICS.get(name) or next(entry for text, entry in patterns.items() if re.fullmatch(text, name))


def evaluation_names(config: Config, kind: str) -> list[str] | None:
    """Names of the metrics that an evaluation measures for each sequence or question; None if unknown before the first
    measurement.
    """
    if kind != "validation":
        return config.eval.kinds[kind].metrics(config.data)
    data = config.data
    parts = task_names([to_plain(weighted.task) for weighted in data.tasks]) if data.symbolic else labels(data)
    return [LOSS, *(f"{LOSS} {part}" for part in parts if len(parts) > 1)]


def _training_names(config: Config) -> list[str]:
    """Names of the metrics that training logs, in which words in capitals stand for layers, heads and parameters."""
    dynamics = {"gradient_norm": "train/grad_norm/", "logit_scale": "logit_scale/", "largest_score": "largest_score/"}
    conditions = {
        "train/z_loss": config.optim.z_loss,
        "sequence_length": config.data.lengths.allows_shorter,
        "train/skipped": config.optim.on_nonfinite == "skip",
        "swap/": len(config.phases) > 1 and config.eval.swap_lengths,
        "normalizer/": False,
        **{prefix: name in config.log.dynamics for name, prefix in dynamics.items()},
    }
    logged_in_training = takewhile(lambda name: name != LOSS, METRICS)
    names = [
        name for name in logged_in_training if all(on for prefix, on in conditions.items() if name.startswith(prefix))
    ]
    return names + list(dict.fromkeys(_parameter_names(config)))


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
the [documents that report](glossary.md) alone: their names end with `{REPORTING}`.

| metric | unit | better | what it is | can decide |
|---|---|---|---|---|"""


def markdown() -> str:
    """The page docs/metrics.md: the table of all metrics."""
    lines = [_HEAD]
    for metric in METRICS.values():
        lines.append(
            f"| `{metric.name}` | {metric.unit} | {metric.better} | {metric.meaning} | {'yes' * metric.decides} |"
        )
    return "\n".join(lines) + "\n"
