"""What replacing the normalizer did to a model: loss, next-token distributions and attention, before and after."""

import numpy as np
import torch
from torch import Tensor

from lm.config.eval_config import Timing
from lm.config.tree import Config
from lm.data.batches import Batch, long_starts
from lm.data.store import Store
from lm.evaluation.held_out import HeldOut, bucket_edges, bucket_means, by_token, validation_sequences
from lm.evaluation.measurement import Measurement, Progress, weights_sha256
from lm.evaluation.sequences import by_sequence
from lm.model.attention_stream import in_lockstep
from lm.model.cross_entropy import token_kl, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.runs.series import Axis, Sample, Series, Shown
from lm.schema import Plain

DRIFT_SEQUENCES = 4  # sequences of each length whose attention weights are compared
_NATS = "nats per token"


def swap_sequences(store: Store, config: Config) -> list[HeldOut]:
    """Held-out sequences of each of `eval.swap_lengths`, ascending: the validation sequences, and others within documents.

    Lengths that no held-out document has are left out, and those beyond the training length where positions are learned.
    """
    found = []
    for length in sorted({int(factor * config.data.seq_len) for factor in config.eval.swap_lengths}):
        if length == config.data.seq_len:
            found.append(validation_sequences(store, config))
        elif length < config.data.seq_len or not config.model.position.ends:
            starts = long_starts(store.val, length, config.eval.long_context.sequences)
            found += [HeldOut.take(store, starts, length)] if len(starts) else []
    return found


class Swap(Measurement):
    """A decoder after a swap of its normalizer beside the one before it, on identical tokens, without a change to RoPE.

    For each length: loss before and after (nats per token) and KL(before || after) of the next-token distributions (nats), by
    position; the change of the loss with its interval over documents; and the attention drift of each layer.
    """

    kind = "swap"

    def __init__(self, config: Config, store: Store, before: Decoder):
        super().__init__(config, store)
        self.before, self.held_out = before, swap_sequences(store, config)

    @property
    def asked(self) -> Timing:
        return Timing()  # measured whenever a swap is made

    @property
    def options(self) -> dict[str, Plain]:
        return {
            "before": self.before.config.normalizer.label(),
            "weights_before_sha256": weights_sha256(self.before),
            "sequences_sha256": [one.sha256 for one in self.held_out],
        }

    @property
    def work(self) -> int:
        return sum(len(one.sequences) for one in self.held_out)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
        models = [self.before.to(where.device), decoder]
        measured = [compared(*models, one, where, progress) for one in self.held_out]
        found = []
        for first, (held_out, values) in enumerate(zip(self.held_out, measured, strict=True)):
            for (metric, name), numbers in zip(_METRICS.items(), values, strict=True):
                found.append(self._by_position(metric, numbers, held_out, () if first else (f"swap/{name}",)))
            drift = attention_drift(*models, held_out, where)
            layers = Axis("layer", "", "of layer", tuple(range(len(drift))), log=False)
            found.append(self._series("attention drift", "", drift, what=_of(held_out), axis=layers))
        if self.held_out:
            found.append(self._by_length("change of loss", [after - before for before, after, _ in measured]))
            found.append(self._by_length("KL divergence", [kl for _, _, kl in measured]))
        return found

    def _by_position(self, metric: str, values: np.ndarray, held_out: HeldOut, logged: tuple[str, ...]) -> Series:
        """Means of `values` (sequences, length) in buckets of positions; one number where only answers count."""
        given = {"what": _of(held_out), "logged": logged}
        if held_out.answers is not None:
            return self._series(metric, _NATS, np.array([values.mean(where=held_out.counts)]), **given)
        edges = bucket_edges(self.config.data.seq_len, held_out.length)
        by_bucket = bucket_means(values, edges)
        sample = Sample(held_out.sha256, by_bucket, np.ones(len(values)), held_out.document_labels)
        axis = Axis("position in the sequence", "tokens", "at positions", tuple(edges.tolist()), bins=True)
        return self._series(metric, _NATS, by_bucket.mean(0), axis=axis, samples=(sample,), curve=values.mean(0), **given)

    def _by_length(self, metric: str, values: list[np.ndarray]) -> Series:
        """Means of `values`, (sequences, length) of each length, with intervals over documents; for reports."""
        samples, means = [], []
        for held_out, numbers in zip(self.held_out, values, strict=True):
            counts = held_out.counts
            mean = numbers.mean(1, where=counts)[:, None]
            samples.append(Sample(held_out.sha256, mean, counts.sum(1), held_out.document_labels))
            means.append(numbers.mean(where=counts))
        axis = Axis("sequence length", "tokens", "in sequences of", tuple(one.length for one in self.held_out))
        amount = "; ".join(f"{len(one.sequences):,} of {one.length:,} tokens" for one in self.held_out)
        title = f"{metric[0].upper()}{metric[1:]} at the swap of the normalizer"
        shown = Shown(title, "sequences around the swap", amount, f"{metric} at the swap, by sequence length")
        return self._series(metric, _NATS, np.array(means), axis=axis, samples=tuple(samples), interval="documents", shown=shown)

    def _series(self, metric: str, unit: str, means: np.ndarray, **given: object) -> Series:
        fingerprint = self.store.fingerprint
        return Series(self.kind, metric, unit, "lower", self.config.data.seq_len, means, data_fingerprint=fingerprint, **given)


_METRICS = {"loss before": "loss_before", "loss after": "loss_after", "KL divergence": "kl"}  # with their names in the metrics log


def _of(held_out: HeldOut) -> str:
    return f"sequences of {held_out.length:,}"


def compared(old: Decoder, new: Decoder, held_out: HeldOut, where: Device, progress: Progress = lambda done: None) -> np.ndarray:
    """For every predicted token -log p under both models and KL(old || new): (3, N, length) float64, nats. Collective."""

    def measure(batch: Batch) -> Tensor:
        with where.autocast():
            hidden = [model.hidden(batch).flatten(0, 1) for model in (old, new)]
        targets = batch.targets.flatten()
        heads = old.head, new.head
        losses = [token_nll(h, head, targets) for h, head in zip(hidden, heads, strict=True)]
        return torch.stack([*losses, token_kl(hidden[0], heads[0], hidden[1], heads[1])]).view(3, *batch.targets.shape)

    return by_token([old, new], held_out, where, measure, numbers=3, progress=progress).astype("f8")


def attention_drift(old: Decoder, new: Decoder, held_out: HeldOut, where: Device) -> np.ndarray:
    """Half the L1 distance between both models' attention weights, a mean over queries and heads: (layers,) float64.

    0 for equal attention, at most 1 for weights that sum to one; layers above the first see what the layers below have changed. On the
    first `DRIFT_SEQUENCES` sequences. Collective.
    """
    layers, count = old.config.n_layer, min(DRIFT_SEQUENCES, len(held_out.sequences))

    def measure(part: list[int]) -> Tensor:
        drift = torch.zeros(len(part), layers, dtype=torch.float64)
        for place, index in enumerate(part):  # one at a time: attention weights are large
            with where.autocast():
                for a, b in in_lockstep([old, new], held_out.batch([index]).to(where.device)):
                    apart = (a.weights - b.weights).abs().sum((0, 2, 3), dtype=torch.float64).mean()
                    drift[place, a.layer] += float(apart) / 2 / held_out.length
        return drift.float()

    return by_sequence([old, new], [held_out.length] * count, (layers,), where, measure).mean(0, dtype=np.float64)
