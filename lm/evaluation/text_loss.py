"""Loss on held-out text: at the training length, far beyond it by position, and on the same tokens cut into several lengths."""

import numpy as np

from lm.config.eval_config import Timing
from lm.config.task_config import task_names
from lm.config.tree import Config
from lm.data.batches import validation_starts
from lm.data.store import Store
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.evaluation.held_out import HeldOut, bits_per_byte, bucket_edges, bucket_means, long_sequences, nll_by_token, validation_sequences
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import KIND, LOSS, Axis, Sample, Series, Shown, validation_series
from lm.schema import Plain, to_plain


class Validation(Measurement):
    """Loss at the training length: nats per token, bits per byte, and each sequence's mean for paired comparison."""

    kind = KIND

    def __init__(self, config, store):
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
        held_out = self.held_out
        nll = nll_by_token(decoder, held_out, where, progress=progress)
        bits = None if self.config.data.symbolic else bits_per_byte(nll, held_out)
        loss, per_sequence = self._loss(nll, np.ones(len(nll), bool))
        whole = validation_series(loss, bits, self.store.val.unigram_cross_entropy, held_out.length, per_sequence, self.store.fingerprint)
        return whole + [self._of_source(nll, label, held_out.sources == number) for number, label in self._sources()]

    def _loss(self, nll: np.ndarray, mine: np.ndarray) -> tuple[float, Sample]:
        """The loss of some sequences, chosen by `mine` (sequences,), and of each of them."""
        held_out = self.held_out
        loss, counts = nll[mine], held_out.counts[mine]
        per_sequence = loss.mean(1, dtype=np.float64, where=counts)[:, None]
        sample = Sample(held_out.sha256, per_sequence, counts.sum(1), held_out.document_labels[mine])
        return float(loss.mean(dtype=np.float64, where=counts)), sample

    def _sources(self) -> list[tuple[int, str]]:
        """Number and label of each source of a mixture, or of each task over symbols; none of one alone."""
        data = self.config.data
        labels = task_names([to_plain(one.task) for one in data.tasks]) if data.symbolic else [p.label for p in self.store.val.sources]
        found = [(number, label) for number, label in enumerate(labels) if (self.held_out.sources == number).any()]
        return found if len(labels) > 1 else []

    def _of_source(self, nll: np.ndarray, label: str, mine: np.ndarray) -> Series:
        loss, per_sequence = self._loss(nll, mine)
        return Series(
            self.kind, LOSS, "nats per token", "lower", self.held_out.length, np.array([loss]), what=label, samples=(per_sequence,),
            data_fingerprint=self.store.fingerprint, logged=(f"val/loss {label}",),
        )  # fmt: skip


class LongContext(Measurement):
    """Loss by position of sequences beyond the training length, once for each inference setting (arXiv 2501.19399, Fig. 5)."""

    kind = "long_context"

    def __init__(self, config, store):
        super().__init__(config, store)
        self.held_out = long_sequences(store, config)

    @property
    def options(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "length": self.held_out.length,
            "sequences_sha256": self.held_out.sha256,
            "inference": [to_plain(setting) for setting in self.asked.inference],
        }

    @property
    def work(self) -> int:
        return len(self.held_out.sequences) * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        held_out, count, length, found = self.held_out, len(self.held_out.sequences), self.held_out.length, []
        edges = bucket_edges(decoder.seq_len, length)
        axis = Axis("position in the sequence", "tokens", "at positions", tuple(edges.tolist()), bins=True)
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
            common = {"kind": self.kind, "better": "lower", "seq_len": decoder.seq_len, "setting": setting.label}
            found.append(
                Series(
                    metric="loss", unit="nats per token", means=by_bucket.mean(0), axis=axis,
                    samples=(Sample(held_out.sha256, by_bucket, np.ones(count), held_out.document_labels),),
                    curve=nll.mean(0, dtype=np.float64), data_fingerprint=self.store.fingerprint, interval="documents",
                    logged=(self.asked.metric(setting.label),), shown=shown, **common,
                )
            )  # fmt: skip
            found.append(Series(metric="bits per byte", unit="", means=np.array([bits_per_byte(nll, held_out)]), **common))
        return found


class ByLength(Measurement):
    """Mean loss over the same tokens at each of `eval.by_length.lengths`, once for each inference setting: only the context differs.

    A unit is a stretch of as many tokens as the longest length, with one value for each length.
    """

    kind = "by_length"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: the held-out text is shorter than the longest length."""
        super().__init__(config, store)
        self.lengths, longest = sorted(self.asked.lengths), max(self.asked.lengths)
        self.starts = validation_starts(store.val, longest, self.asked.sequences)
        if not len(self.starts):
            reason = f"needs {longest + 1:,} held-out tokens, and there are {store.val.n_tokens:,}"
            raise ConfigError([Problem("eval.by_length.lengths", longest, reason, "leave it out, or hold out more text")])
        self.stretches = self._cut(longest)

    def _cut(self, length: int) -> HeldOut:
        """All stretches cut into sequences of `length`, those of one stretch after each other."""
        starts = self.starts[:, None] + length * np.arange(max(self.lengths) // length)
        return HeldOut.take(self.store, starts.ravel(), length, self.config.data.documents == "isolate")

    @property
    def options(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "lengths": self.lengths,
            "sequences_sha256": self.stretches.sha256,
            "documents": self.config.data.documents,
            "inference": [to_plain(setting) for setting in self.asked.inference],
        }

    @property
    def work(self) -> int:
        longest = max(self.lengths)
        return len(self.starts) * sum(longest // length for length in self.lengths) * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        count, longest, found = len(self.starts), max(self.lengths), []
        shown = Shown(
            "Loss by sequence length",
            "stretches of held-out text",
            f"{count:,} of {longest:,} tokens",
            "loss by sequence length, mean over the same tokens",
            method=f"Loss by sequence length is measured on {count * longest:,} held-out tokens, cut into sequences of each length,",
        )
        for setting in self.asked.inference:
            model = for_inference(decoder, setting)
            losses = [nll_by_token(model, self._cut(length), where, progress) for length in self.lengths]
            by_stretch = np.stack([nll.reshape(count, -1).mean(1, dtype=np.float64) for nll in losses], axis=1)
            found.append(
                Series(
                    self.kind, "loss", "nats per token", "lower", decoder.seq_len, by_stretch.mean(0), setting=setting.label,
                    axis=Axis("sequence length", "tokens", "in sequences of", tuple(self.lengths)),
                    samples=(Sample(self.stretches.sha256, by_stretch, np.ones(count), self.stretches.document_labels),),
                    data_fingerprint=self.store.fingerprint, interval="documents",
                    logged=tuple(self.asked.metric(length, setting.label) for length in self.lengths), shown=shown,
                )
            )  # fmt: skip
        return found
