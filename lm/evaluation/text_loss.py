"""Loss on held-out text: at the training length, far beyond it by position, and on the same tokens cut into several lengths."""

import numpy as np

from lm.config.eval_config import Timing
from lm.config.task_config import task_names
from lm.config.tree import Config
from lm.data.batches import validation_starts
from lm.data.store import Store
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.evaluation.held_out import (
    NATS,
    HeldOut,
    bits_per_byte,
    bucket_edges,
    bucket_means,
    lengths_axis,
    long_sequences,
    nll_by_token,
    positions_axis,
    validation_sequences,
)
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import KIND, LOSS, Sample, Series, Shown, validation_series
from lm.schema import Plain, to_plain


class Validation(Measurement):
    """Loss at the training length: nats per token, bits per byte, and each sequence's mean for paired comparison."""

    kind = KIND

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = validation_sequences(store, config)

    @property
    def asked(self) -> Timing:
        return Timing(every=self.config.validation_every, at=[1.0])

    @property
    def options(self) -> dict[str, Plain]:
        return {"seq_len": self.held_out.length, "sequences_sha256": self.held_out.sha256, "documents": self.config.data.documents}

    @property
    def work(self) -> int:
        return len(self.held_out.sequences)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        held_out, data = self.held_out, self.config.data
        nll = nll_by_token(decoder, held_out, where, progress=progress)
        bits = None if data.symbolic else bits_per_byte(nll, held_out)
        loss, sample = self._loss(nll, np.ones(len(nll), bool))
        level = self.store.val.unigram_cross_entropy if data.symbolic or data.text_weight else None  # text not trained on has none
        series = validation_series(loss, bits, level, held_out.length, sample, self.store.fingerprint)
        labels = task_names([to_plain(each.task) for each in data.tasks]) if data.symbolic else [p.label for p in self.store.val.sources]
        for number, label in enumerate(labels if len(labels) > 1 else []):  # the sources of a mixture, or the tasks over symbols
            chosen = held_out.sources == number
            if chosen.any():
                loss, sample = self._loss(nll, chosen)
                fields = {"samples": (sample,), "data_fingerprint": self.store.fingerprint, "logged": (f"val/loss {label}",)}
                series.append(self.series(LOSS, NATS, "lower", loss, what=label, **fields))
        return series

    def _loss(self, nll: np.ndarray, chosen: np.ndarray) -> tuple[float, Sample]:
        """The loss of the sequences where `chosen` (sequences,) is true, and of each of them."""
        loss, counts = nll[chosen], self.held_out.counts[chosen]
        means = loss.mean(1, dtype=np.float64, where=counts)[:, None]
        sample = Sample(self.held_out.sha256, means, counts.sum(1), self.held_out.document_labels[chosen])
        return float(loss.mean(dtype=np.float64, where=counts)), sample


class LongContext(Measurement):
    """Loss by position of sequences beyond the training length, once for each inference setting (arXiv 2501.19399, Fig. 5)."""

    kind = "long_context"

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.held_out = long_sequences(store, config)

    @property
    def options(self) -> dict[str, Plain]:
        return self.with_settings(length=self.held_out.length, sequences_sha256=self.held_out.sha256)

    @property
    def work(self) -> int:
        return len(self.held_out.sequences) * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        held_out, count, length, series = self.held_out, len(self.held_out.sequences), self.held_out.length, []
        edges = bucket_edges(self.config.data.seq_len, length)
        shown = Shown(
            "Long sequences, by position",
            "long-context sequences",
            f"{count:,} of {length:,} tokens",
            "loss by position, mean over sequences",
            method=f"Loss beyond the training length is measured on {count:,} held-out sequences of {length:,} tokens, by position, "
            "without further training",
        )
        for setting in self.asked.inference:
            nll = nll_by_token(for_inference(decoder, setting), held_out, where, progress)
            by_bucket = bucket_means(nll, edges)
            series += [
                self.series(
                    "loss", NATS, "lower", by_bucket.mean(0), setting=setting.label, axis=positions_axis(edges),
                    samples=(held_out.sample(by_bucket),), curve=nll.mean(0, dtype=np.float64), data_fingerprint=self.store.fingerprint,
                    interval="documents", logged=(self.asked.metric(setting.label),), shown=shown,
                ),
                self.series("bits per byte", "", "lower", bits_per_byte(nll, held_out), setting=setting.label),
            ]  # fmt: skip
        return series


class ByLength(Measurement):
    """Mean loss over the same tokens at each of `eval.by_length.lengths`, once for each inference setting: only the context differs.

    A unit is a stretch of as many tokens as the longest length, with one value for each length.
    """

    kind = "by_length"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: the held-out text is shorter than the longest length."""
        super().__init__(config, store)
        self.lengths, self.longest = sorted(self.asked.lengths), max(self.asked.lengths)
        self.starts = validation_starts(store.val, self.longest, self.asked.sequences)
        if not len(self.starts):
            reason = f"needs {self.longest + 1:,} held-out tokens, and there are {store.val.n_tokens:,}"
            raise ConfigError([Problem("eval.by_length.lengths", self.longest, reason, "leave it out, or hold out more text")])
        self.stretches = self._cut(self.longest)

    def _cut(self, length: int) -> HeldOut:
        """All stretches cut into sequences of `length`, those of one stretch after each other."""
        starts = self.starts[:, None] + length * np.arange(self.longest // length)
        return HeldOut.take(self.store, starts.ravel(), length, self.config.data.documents == "isolate")

    @property
    def options(self) -> dict[str, Plain]:
        documents = self.config.data.documents
        return self.with_settings(lengths=self.lengths, sequences_sha256=self.stretches.sha256, documents=documents)

    @property
    def work(self) -> int:
        return len(self.starts) * sum(self.longest // length for length in self.lengths) * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        count, series = len(self.starts), []
        shown = Shown(
            "Loss by sequence length",
            "stretches of held-out text",
            f"{count:,} of {self.longest:,} tokens",
            "loss by sequence length, mean over the same tokens",
            method=f"Loss by sequence length is measured on {count * self.longest:,} held-out tokens, cut into sequences of each length,",
        )
        for setting in self.asked.inference:
            model = for_inference(decoder, setting)
            losses = [nll_by_token(model, self._cut(length), where, progress) for length in self.lengths]
            by_stretch = np.stack([nll.reshape(count, -1).mean(1, dtype=np.float64) for nll in losses], axis=1)
            series.append(
                self.series(
                    "loss", NATS, "lower", by_stretch.mean(0), setting=setting.label, axis=lengths_axis(self.lengths),
                    samples=(self.stretches.sample(by_stretch),), data_fingerprint=self.store.fingerprint, interval="documents",
                    logged=tuple(self.asked.metric(length, setting.label) for length in self.lengths), shown=shown,
                )
            )  # fmt: skip
        return series
