"""Choose held-out sequences, and measure the loss at the training length, by position, by length, and before and
after a swap of the normalizer."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lm.config.data_config import DataConfig, TokenizerFile
from lm.config.eval_config import InferenceSetting, ValidationTiming, lengths_from_factors
from lm.config.tree import Config
from lm.data.batches import long_window_starts, validation_starts
from lm.data.prepare import prepare
from lm.data.sources import source_labels as source_labels
from lm.data.store import TOKENIZER_FILE, Store
from lm.data.tasks import STORE_SEED, NoRoomError, make_example
from lm.errors import ConfigError, DataError, Problem
from lm.evaluation.measurement import HeldOutSequences, Measurement, metric_rows
from lm.model.cross_entropy import token_kl, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, eval_mode
from lm.plain import Plain, distinct_names, to_plain
from lm.progress import Progress
from lm.runs.checkpoints import weights_sha256
from lm.runs.evaluations import (
    NATS,
    UNIGRAM_BOUND_NAME,
    UNIGRAM_LEVEL_NAME,
    VAL_LOSS,
    VALIDATION,
    Axis,
    Metric,
    model_selection_mask,
)

MAX_BATCH_TOKENS = 16384  # the most tokens in one forward pass, if a sequence has no more


def validation_sequences(store: Store, config: Config) -> HeldOutSequences:
    """Return up to `eval.sequences` held-out windows of the training length, evenly spaced; for symbolic tasks test
    sequences.
    """
    sequences = task_sequences if config.data.symbolic else evenly_spaced_sequences
    return sequences(store, config, config.data.seq_len, config.eval.sequences)


def evenly_spaced_sequences(store: Store, config: Config, length: int, limit: int) -> HeldOutSequences:
    """Return up to `limit` sequences of `length` tokens, evenly spaced over the held-out text.

    If attention is limited to single documents in training (`data.documents` is `isolate`), it also is in these
    sequences.
    """
    return HeldOutSequences.from_store(
        store, validation_starts(store.val, length, limit), length, config.data.documents == "isolate"
    )


def task_sequences(store: Store, config: Config, length: int, total_count: int) -> HeldOutSequences:
    """Return `total_count` test sequences of symbolic tasks, divided among the tasks by weight. They are the same for
    all runs.

    Raises NoRoomError: a task does not fit into `length` tokens.
    """
    tasks = config.data.tasks
    ends = np.floor(np.cumsum([task.weight for task in tasks]) * total_count + 0.5).astype(int)
    sources = np.searchsorted(ends, np.arange(total_count), "right")
    indices = (
        np.arange(total_count) - np.concatenate(([0], ends))[sources]
    )  # index of each sequence among those of its task
    examples = [
        make_example(tasks[source].task, STORE_SEED, int(index), length, "test")
        for source, index in zip(sources, indices, strict=True)
    ]
    return HeldOutSequences.from_examples(examples, store.bytes_per_token, sources)


def long_sequences(store: Store, config: Config) -> HeldOutSequences:
    """Return up to `eval.long_context.sequences` sequences, each within one held-out document.

    With `length_factor: auto` their length is at first AUTO_LENGTH_FACTOR training lengths, or one training length if
    positions are learned. It is halved until at least two held-out documents are longer than the sequences. Raises
    ConfigError: no document is long enough.
    """
    options, seq_len, longest = config.eval.long_context, config.data.seq_len, store.val.longest
    length = max(1, round(options.max_length_factor * seq_len))
    if options.length_factor == "auto":
        length = seq_len if config.model.position.has_length_limit else length
        min_documents = min(2, int((store.val.lengths > 1).sum()))
        while length > 1 and (store.val.lengths > length).sum() < min_documents:
            length = max(1, length // 2)
    if length >= longest:
        reason = (
            f"with data.seq_len = {seq_len} it needs a held-out document of {length + 1:,} tokens, the longest "
            f"has {longest:,}"
        )
        remedy = "set it to auto, or to 0 to train without this evaluation"
        raise ConfigError([Problem("eval.long_context.length_factor", options.length_factor, reason, remedy)])
    return HeldOutSequences.from_store(store, long_window_starts(store.val, length, options.sequences), length)


# ---------------------------------------------------------------- values of each sequence


def measure_sequences(
    models: list[Decoder],
    lengths: Sequence[int],
    value_shape: tuple[int, ...],
    device: Device,
    measure: Callable[[list[int]], Tensor],
) -> np.ndarray:
    """Return values of each sequence, (N, *value_shape) fp32, that `measure` computes in batches.

    All ranks call this function. The sequences are split over the ranks, and every rank returns all values. Models are
    in evaluation mode, without gradients. Autocast is off unless `measure` turns it on.

    Args:
        models: models that `measure` runs.
        lengths: tokens in each sequence, (N,). Sequences of one length share batches of up to `MAX_BATCH_TOKENS`
            tokens.
        measure: function from indices of sequences of one length to their values, (indices, *value_shape).
    """

    def rank_values() -> Tensor:
        result, by_length = torch.zeros(len(lengths), *value_shape), {}
        for index in range(device.rank, len(lengths), device.world_size):
            by_length.setdefault(lengths[index], []).append(index)
        with Progress("auto" if device.progress_label else "none").bar(device.progress_label, len(lengths)) as bar:
            for length, indices in by_length.items():
                size = max(1, MAX_BATCH_TOKENS // length)
                for batch in (indices[start : start + size] for start in range(0, len(indices), size)):
                    with torch.autocast(device.device.type, enabled=False):
                        result[batch] = measure(batch).cpu()
                    bar.update(len(batch))
        return result

    with eval_mode(*models):
        return all_reduce_sum(device, rank_values).numpy()


def nll_by_token(decoder: Decoder, held_out: HeldOutSequences, device: Device) -> np.ndarray:
    """Return the losses -log p of the predicted tokens, (N, length) fp32, in nats. All ranks call this function.

    It never holds T x T attention weights or T x V logits of a sequence of T tokens.
    """

    def measure(indices: list[int]) -> Tensor:
        batch = held_out.batch(indices).to(device.device)
        with device.autocast():
            hidden = decoder.hidden_states(batch)
        return token_nll(hidden.flatten(0, 1), decoder.head, batch.targets.flatten()).view(batch.targets.shape)

    return measure_sequences([decoder], held_out.lengths, (held_out.length,), device, measure)


def bits_per_byte(nll: np.ndarray, held_out: HeldOutSequences) -> float:
    """Return the sum of -log2 p over the predicted tokens, divided by their number of UTF-8 bytes.

    nll: losses (N, length) in nats.
    """
    n_bytes = (held_out.bytes_per_token[held_out.sequences[:, 1:]] * held_out.target_mask).sum(dtype=np.float64)
    return float(nll.sum(dtype=np.float64) / math.log(2) / n_bytes)


def bucket_edges(train_length: int, length: int) -> np.ndarray:
    """Return the edges of position buckets from 0 to `length`, four buckets per octave.

    There are edges at `train_length` x 2^i for whole numbers i.
    """
    quarters = np.arange(-4 * math.ceil(math.log2(train_length)), 4 * math.ceil(math.log2(length / train_length)) + 1)
    edges = np.unique(np.rint(train_length * 2.0 ** (quarters / 4)).astype(int))
    return np.concatenate(([0], edges[(edges > 0) & (edges < length)], [length]))


def inference_setting_labels(settings: Sequence[InferenceSetting]) -> list[str]:
    """Return the labels of inference settings, such as `theta x 50`, to be put into names of metrics. If there is only
    one setting, its label is empty.
    """
    return [setting.label for setting in settings] if len(settings) > 1 else [""]


def drop_single_setting(metric: Metric, settings: Sequence[InferenceSetting]) -> Metric:
    """Return the metric, without the word {SETTING} in its name if there is only one inference setting."""
    return metric if len(settings) > 1 else metric.fill_placeholders(SETTING="")


POSITION_AXIS = Axis("position in the sequence", "tokens", "at positions")
LENGTH_AXIS = Axis("sequence length", "tokens", "in sequences of")


# ---------------------------------------------------------------- loss


# nats per token: `unigram_reference` is no bound up to this relative entropy of the store's fractions to the weights
MIXTURE_KL_TOLERANCE = 0.002


def unigram_reference(store: Store, data: DataConfig) -> tuple[tuple[str, float], ...]:
    """Return the held-out loss of a model that knows only the training mixture's token frequencies.

    The result has the form of `Metric.references`: a name, and the loss in nats per token. It is empty if all text has
    weight 0.

    Each source or task has a weight in the mixture, and makes up a fraction of the store's tokens. If weights equal
    fractions, the loss is exact, and its name is UNIGRAM_LEVEL_NAME. Otherwise it is an upper bound, with the name
    UNIGRAM_BOUND_NAME. It is a bound since each token's probability in the mixture is at least that in the store times
    the smallest weight / fraction.
    """
    weights = np.array([weighted.weight for weighted in (data.tasks if data.symbolic else data.sources)])
    if not (data.symbolic or data.text_weight):
        return ()
    fractions = np.array([source.n_tokens for source in store.train.sources]) / store.train.n_tokens
    log_ratios = np.log(fractions / weights)
    if fractions @ log_ratios <= MIXTURE_KL_TOLERANCE:  # the relative entropy of fractions to weights
        return ((UNIGRAM_LEVEL_NAME, store.val.unigram_cross_entropy),)
    return ((UNIGRAM_BOUND_NAME, store.val.unigram_cross_entropy + float(log_ratios.max())),)


class Validation(Measurement):
    """Validation measures the loss at the training length: nats per token, bits per byte, and each sequence's mean
    loss.
    """

    kind = VALIDATION
    _shared_metric_fields: ClassVar = {
        "title": "Validation at the training length",
        "measured_on": "validation sequences",
    }
    logged_metrics = (
        Metric(VAL_LOSS, NATS, "lower", "loss at the training length on all held-out text, or on tasks' answers",
            VAL_LOSS, "documents", True, **_shared_metric_fields),
        Metric(f"{VAL_LOSS} {{PART}}", NATS, "lower", "the same on one source of a mixture, or one task", VAL_LOSS,
            "documents"),
        Metric("val/bits_per_byte", "bits per byte", "lower", "the same in bits per byte of text",
            "val/bits_per_byte", **_shared_metric_fields),
    )  # fmt: skip

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = [validation_sequences(store, config)]

    @classmethod
    def options_of(cls, config: Config) -> ValidationTiming:
        return ValidationTiming(every=config.validation_every)

    @classmethod
    def source_or_task_names(cls, config: Config) -> list[str]:
        """Return the names of a mixture's sources, or of the tasks over symbols; an empty list if there is only one."""
        data = config.data
        names = distinct_names([to_plain(task.task) for task in data.tasks]) if data.symbolic else source_labels(data)
        return names if len(names) > 1 else []

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        loss, part_loss, bits = cls.logged_metrics
        parts = [part_loss.fill_placeholders(PART=name) for name in cls.source_or_task_names(config)]
        return [loss, *parts, *[bits] * (not config.data.symbolic)]

    @classmethod
    def sequence_options(cls, config: Config, metric: str) -> dict[str, Plain]:
        tasks: list[Plain] = [to_plain(task) for task in config.data.tasks] if config.data.symbolic else []
        return super().sequence_options(config, metric) | {"data.tasks": tasks}

    @property
    def further_inputs(self) -> dict[str, Plain]:
        data = self.config.data
        # which the store's fingerprint leaves out
        return super().further_inputs | {
            "weights": [item.weight for item in (data.tasks if data.symbolic else data.sources)]
        }

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        (sequences,), data = self.held_out, self.config.data
        nll = nll_by_token(decoder, sequences, device)
        means = sequences.sequence_means(nll)
        units = sequences.sampling_units(self.data_fingerprint, weigh_by_targets=True)
        loss, part_loss, bits = self.logged_metrics
        amount = sequences.size_text + ", nats per token of the answers" * data.symbolic
        blocks = [
            metric_rows(replace(loss, amount=amount, references=unigram_reference(self.store, data)), means, units)
        ]
        if not data.symbolic:
            blocks.append(metric_rows(replace(bits, amount=amount), bits_per_byte(nll, sequences)))
        for number, name in enumerate(self.source_or_task_names(self.config)):
            if (part := sequences.source_indices == number).any():
                blocks.append(metric_rows(part_loss, means[part], units[part], task=name))
        return blocks


class OtherTexts(Measurement):
    """This evaluation measures the loss at the training length on each text of `eval.texts.of`, as validation does."""

    kind = "texts"
    _shared_metric_fields: ClassVar = {
        "title": "Other texts, at the training length",
        "measured_on": "sequences of other texts",
    }
    logged_metrics = (
        Metric("text/{NAME}/loss", NATS, "lower", "loss at the training length on another text", "loss", "documents",
            True, **_shared_metric_fields),
        Metric("text/{NAME}/bits_per_byte", "bits per byte", "lower", "the same in bits per byte", "bits per byte",
            **_shared_metric_fields),
    )  # fmt: skip

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        return {"NAME": [*cls.options_of(config).of]}

    def __init__(self, config: Config, store: Store):
        """Prepare the texts. Raises DataError: a text can't be read. Raises ConfigError: a text is shorter than a
        sequence.
        """
        super().__init__(config, store)
        data, end = config.data, store.manifest["end_of_text"]["token"]
        tokenizer = TokenizerFile(path=str(store.path / TOKENIZER_FILE), end_of_text=end)
        base = DataConfig(
            tokenizer=tokenizer, val_fraction=1.0, on_error=data.on_error, root=data.root, deduplicate=False
        )
        self.held_out = []
        self.stores: dict[str, Store] = {}  # of each text, all of it held out, with the run's tokenizer
        for name, source in self.eval_config.of.items():
            try:
                text = self.stores[name] = prepare(replace(base, source=source))
            except DataError as error:
                raise DataError(f"eval.texts.of.{name}: {error}") from None
            self.held_out.append(evenly_spaced_sequences(text, config, data.seq_len, self.eval_config.sequences))
            if not len(self.held_out[-1].sequences):
                reason = f"has {text.val.n_tokens:,} tokens, and a sequence needs {data.seq_len + 1:,}"
                remedy = "name a longer text, or leave it out"
                raise ConfigError([Problem(f"eval.texts.of.{name}", text.path.name, reason, remedy)])

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        blocks, (loss, bits) = [], self.logged_metrics
        for (name, text), sequences in zip(self.stores.items(), self.held_out, strict=True):
            nll, fingerprint = nll_by_token(decoder, sequences, device), text.fingerprint
            selection = model_selection_mask(fingerprint, sequences.document_labels)
            splits = selection.any() and not selection.all()  # else too few documents to divide: all report
            units = sequences.sampling_units(fingerprint if splits else "")
            for metric, *values in (
                (loss, sequences.sequence_means(nll), units),
                (bits, bits_per_byte(nll, sequences)),
            ):
                blocks.append(metric_rows(replace(metric, amount=sequences.size_text), *values, task=name))
        return blocks


class LongContext(Measurement):
    """This evaluation measures the loss by position in sequences longer than in training, under each inference setting.

    A report plots the result like Fig. 5 of arXiv 2501.19399.
    """

    kind = "long_context"
    logged_metrics = (
        Metric("long/loss {SETTING}", NATS, "lower", "loss beyond the training length, mean over positions", "loss",
            "documents", True, POSITION_AXIS, "Long sequences, by position", "long-context sequences",
            caption="loss by position, mean over sequences"),
    )  # fmt: skip

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        return {"SETTING": [setting.label for setting in cls.options_of(config).inference]}

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = [long_sequences(store, config)]

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        (sequences,), blocks = self.held_out, []
        metric = replace(self.logged_metrics[0], amount=sequences.size_text)
        units = sequences.sampling_units(self.data_fingerprint)
        edges = bucket_edges(self.config.data.seq_len, sequences.length)
        starts, ends = edges[:-1], edges[1:]
        for label, model in self.decoders_by_setting(decoder):
            nll = nll_by_token(model, sequences, device)
            bucket_means = np.add.reduceat(nll.astype(np.float64), starts, axis=1) / (ends - starts)
            blocks.append(
                metric_rows(metric, bucket_means, units, starts.tolist(), ends.tolist(), inference_setting=label)
            )
            bits = Metric(better="lower", quantity="bits per byte")
            blocks.append(metric_rows(bits, bits_per_byte(nll, sequences), inference_setting=label))
        return blocks


class LossByLength(Measurement):
    """This evaluation measures the loss of the same held-out tokens, cut into sequences of each of
    `eval.by_length.lengths`.

    So only the tokens' context differs between lengths. A unit is a stretch of text of the longest length, with one
    mean loss for each length.
    """

    kind, ignores_train_length = "by_length", True
    logged_metrics = (
        Metric("by_length/loss {LENGTH} {SETTING}", NATS, "lower", "loss on the same text, cut into sequences", "loss",
            "documents", True, LENGTH_AXIS, "Loss by sequence length", "stretches of held-out text",
            caption="loss by sequence length, mean over the same tokens"),
    )  # fmt: skip

    @classmethod
    def placeholder_values(cls, config: Config) -> dict[str, Sequence[object]]:
        options = cls.options_of(config)
        return {"SETTING": inference_setting_labels(options.inference), "LENGTH": sorted(options.lengths)}

    def __init__(self, config: Config, store: Store):
        """Choose the sequences. Raises ConfigError: the held-out text is shorter than the longest length."""
        super().__init__(config, store)
        self.lengths, longest = sorted(self.eval_config.lengths), max(self.eval_config.lengths)
        starts = validation_starts(store.val, longest, self.eval_config.sequences)
        if not len(starts):
            reason = f"needs {longest + 1:,} held-out tokens, and there are {store.val.n_tokens:,}"
            raise ConfigError(
                [Problem("eval.by_length.lengths", longest, reason, "leave it out, or hold out more text")]
            )
        isolate = config.data.documents == "isolate"
        # of each length the sequences into which the stretches of text are cut, stretch by stretch
        self.held_out = [
            HeldOutSequences.from_store(
                store, np.add.outer(starts, np.arange(0, longest, length)).ravel(), length, isolate
            )
            for length in self.lengths
        ]

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        stretches, blocks = self.held_out[-1], []
        metric = replace(self.logged_metrics[0], amount=stretches.size_text)
        units = stretches.sampling_units(self.data_fingerprint)
        metric = drop_single_setting(metric, self.eval_config.inference)
        for label, model in self.decoders_by_setting(decoder):
            losses = [nll_by_token(model, cut, device) for cut in self.held_out]
            by_stretch = [nll.reshape(len(units), -1).mean(1, dtype=np.float64) for nll in losses]
            blocks.append(metric_rows(metric, np.stack(by_stretch, 1), units, self.lengths, inference_setting=label))
        return blocks


# ---------------------------------------------------------------- a swap of the normalizer


def swap_sequences(store: Store, config: Config) -> list[HeldOutSequences]:
    """Return held-out sequences for each of `eval.swap_lengths` (in training lengths), in ascending order.

    At the training length they are the validation sequences. At other lengths they are windows within documents, or
    test sequences of symbolic tasks.

    A length is left out if no held-out document has it or a task does not fit into it. Lengths beyond the training
    length are left out if positions are learned.
    """
    count = config.eval.long_context.sequences
    sequences = []
    for length in lengths_from_factors(config.eval.swap_lengths, config.data):
        if length == config.data.seq_len:
            sequences.append(validation_sequences(store, config))
        elif length > config.data.seq_len and config.model.position.has_length_limit:
            continue
        elif config.data.symbolic:
            with suppress(NoRoomError):
                sequences.append(task_sequences(store, config, length, count))
        elif len(starts := long_window_starts(store.val, length, count)):
            sequences.append(HeldOutSequences.from_store(store, starts, length))
    return sequences


class SwapMeasurement(Measurement):
    """This evaluation compares a decoder before and after a swap of its normalizer, on the same tokens.

    For each length it gives the loss before and after (nats per token), their difference, and KL(before || after) of
    the next-token distributions (nats). In symbolic tasks these are means over answer tokens. RoPE is the same before
    and after.

    old: the decoder before the swap.
    """

    kind = "swap"
    _shared_metric_fields: ClassVar = {
        "unit": NATS, "better": "lower", "units": "documents", "interval": True, "axis": LENGTH_AXIS,
        "measured_on": "sequences around the swap",
    }  # fmt: skip
    logged_metrics = (  # at the training length
        Metric("swap/loss_before", meaning="loss before a swap between phases", quantity="loss before",
            **_shared_metric_fields),
        Metric("swap/loss_after", meaning="loss after it, on the same sequences", quantity="loss after",
            **_shared_metric_fields),
        Metric("swap/kl", meaning="divergence of the new distribution from the old", quantity="KL divergence",
            title="KL divergence at the swap of the normalizer", **_shared_metric_fields,
            caption="KL divergence at the swap, by sequence length"),
    )  # fmt: skip
    _loss_change_metric: ClassVar = Metric(
        quantity="change of loss", title="Change of loss at the swap of the normalizer",
        caption="change of loss at the swap, by sequence length", **_shared_metric_fields,
    )  # fmt: skip

    def __init__(self, config: Config, store: Store, old: Decoder):
        super().__init__(config, store)
        self.old_decoder, self.held_out = old, swap_sequences(store, config)

    @property
    def further_inputs(self) -> dict[str, Plain]:
        label, weights = self.old_decoder.config.normalizer.label(), weights_sha256(self.old_decoder.state_dict())
        return super().further_inputs | {"before": label, "weights_before_sha256": weights}

    def measure(self, decoder: Decoder, device: Device) -> list[pd.DataFrame]:
        old, blocks = self.old_decoder.to(device.device), []
        amount = "; ".join(sequences.size_text for sequences in self.held_out)
        lengths, seq_len = [sequences.length for sequences in self.held_out], self.config.data.seq_len
        logged_length = min(lengths, key=lambda length: length != seq_len, default=seq_len)
        for length, sequences in zip(lengths, self.held_out, strict=True):
            before, after, kl = token_losses_and_kl(old, decoder, sequences, device)
            units = sequences.sampling_units(self.data_fingerprint, weigh_by_targets=True)
            for metric, values in zip(
                (*self.logged_metrics, self._loss_change_metric), (before, after, kl, after - before), strict=True
            ):
                swap_metric = replace(metric, amount=amount)
                block = metric_rows(swap_metric, sequences.sequence_means(values), units, [length])
                blocks.append(block if length == logged_length else block.assign(metric=metric.quantity))
        return blocks


def token_losses_and_kl(
    old: Decoder, new: Decoder, held_out: HeldOutSequences, device: Device
) -> tuple[np.ndarray, ...]:
    """Return the losses -log p of the predicted tokens under `old` and `new`, and KL(old || new):
    three arrays, (N, length) float64 each, in nats.

    All ranks call this function.
    """

    def measure(indices: list[int]) -> Tensor:
        batch = held_out.batch(indices).to(device.device)
        with device.autocast():
            hidden = [model.hidden_states(batch).flatten(0, 1) for model in (old, new)]
        targets, heads = batch.targets.flatten(), (old.head, new.head)
        losses = [token_nll(states, head, targets) for states, head in zip(hidden, heads, strict=True)]
        values = torch.stack([*losses, token_kl(hidden[0], old.head, hidden[1], new.head)])
        return values.view(3, *batch.targets.shape).transpose(0, 1)

    numbers = measure_sequences([old, new], held_out.lengths, (3, held_out.length), device, measure)
    return tuple(numbers.swapaxes(0, 1).astype("f8"))
