"""Loss by sequence length: the same held-out tokens, cut into sequences of several lengths."""

import numpy as np

from lm.config.tree import Config
from lm.data.batches import validation_starts
from lm.data.store import Store
from lm.errors import ConfigError, Problem
from lm.evaluation.held_out import HeldOut, nll_by_token
from lm.evaluation.measurement import Measurement, Progress
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Axis, Sample, Series, Shown
from lm.schema import Plain, to_plain


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

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
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
