"""Which tokens a run reads: the global batch of step t is a pure function of (store, seed, t).

It depends on nothing else: not on world size, workers, micro-batch or restarts. The only data state is t.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.data.store import Split, Store

_LENGTHS = 2**63  # keeps the draws of lengths apart from those of epochs


class TrainRows:
    """The training rows of a store.

    Epoch e cuts the token stream, from an offset of its own below `seq_len`, into `rows_per_epoch` rows of
    `seq_len` + 1 tokens (each row's last token is the next one's first) and visits them in an order of its own.
    Every token is a target once an epoch, but for fewer than 2 x `seq_len` at the two ends of the stream.

    With `lengths`, every step cuts its rows into shorter ones of a single length, drawn for the step: the tokens of a step
    are the same whatever the mixture, and none is padding.

    Args:
        batch_rows: rows of one optimizer step, over all processes.
        lengths: divisors of `seq_len`, each with its share of the steps (of the tokens, that is); empty: `seq_len` alone.

    Raises:
        ValueError: the split has no row of `seq_len` + 1 tokens (`lm.data.prepare.check_rows` says so kindly).
    """

    def __init__(self, store: Store, seq_len: int, batch_rows: int, seed: int, lengths: dict[int, float] | None = None):
        self.split, self.seq_len, self.batch_rows = store.train, seq_len, batch_rows
        self.lengths = lengths or {seq_len: 1.0}
        self.entropy = (int(store.fingerprint, 16), seed)
        n_tokens = store.train.n_tokens
        if n_tokens <= seq_len:
            raise ValueError(f"{n_tokens} tokens hold no row of {seq_len + 1}")
        # One row less than fits: each offset below seq_len then gives the same number of rows.
        self.rows_per_epoch = max(1, n_tokens // seq_len - 1)
        self.n_offsets = min(seq_len, n_tokens - self.rows_per_epoch * seq_len)
        self._epochs: dict[int, np.ndarray] = {}

    def epoch_starts(self, epoch: int) -> np.ndarray:
        """Where the rows of an epoch begin, in the order they are visited: int64 (rows_per_epoch,).

        Drawn from raw PCG64 output, which never changes between NumPy versions (those of `Generator` may).
        """
        if epoch not in self._epochs:
            random = np.random.PCG64(np.random.SeedSequence((*self.entropy, epoch))).random_raw(self.rows_per_epoch + 1)
            offset = int(random[-1]) % self.n_offsets
            # A step may straddle two epochs, so the one before is kept.
            self._epochs = {before: starts for before, starts in self._epochs.items() if before == epoch - 1}
            self._epochs[epoch] = offset + self.seq_len * np.argsort(random[:-1], kind="stable")
        return self._epochs[epoch]

    def row_starts(self, step: int) -> np.ndarray:
        """Where the rows of a step begin, over all processes: int64 (batch_rows,)."""
        index = step * self.batch_rows + np.arange(self.batch_rows)
        epochs, places = np.divmod(index, self.rows_per_epoch)
        return np.concatenate([self.epoch_starts(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def length(self, step: int) -> int:
        """Tokens in each row of a step: a function of (store, seed, step)."""
        names = sorted(self.lengths)
        drawn = np.random.SeedSequence((*self.entropy, _LENGTHS, step)).generate_state(1, np.uint64)[0] / 2**64
        edges = np.cumsum([self.lengths[name] for name in names[:-1]])
        return names[int(np.searchsorted(edges, drawn, side="right"))]

    def rows(self, step: int, first: int = 0, count: int | None = None) -> np.ndarray:
        """The global batch of a step: int64 (batch_rows x seq_len / L, L + 1), L = `length(step)`.

        Or of it the `count` rows of `seq_len` tokens from `first` on, cut in the same way.
        """
        starts, length = self.row_starts(step)[first : None if count is None else first + count], self.length(step)
        cut = starts[:, None] + length * np.arange(self.seq_len // length)
        return windows(self.split, cut.ravel(), length)


class MicroBatches(Dataset[Tensor]):
    """One process's share of every global batch, in micro-batches.

    Item k is micro-batch k % accumulation of step k // accumulation: int64 (micro_batch, seq_len + 1), or
    (micro_batch x seq_len / L, L + 1) where the step has rows of L.
    """

    def __init__(self, rows: TrainRows, rank: int, world: int, micro_batch: int):
        rank_rows = rows.batch_rows // world
        assert rank_rows * world == rows.batch_rows, "the configuration has checked this"
        assert rank_rows % micro_batch == 0, "the configuration has checked this"
        self.source, self.first, self.micro_batch = rows, rank * rank_rows, micro_batch
        self.accumulation = rank_rows // micro_batch

    def __getitem__(self, index: int) -> Tensor:
        step, micro = divmod(index, self.accumulation)
        return torch.from_numpy(self.source.rows(step, self.first + micro * self.micro_batch, self.micro_batch))


class TrainLoader:
    """Micro-batches from a step on; its length is that of the whole run, as Lightning counts them."""

    def __init__(self, batches: MicroBatches, first_step: int, max_steps: int, workers: int, pin_memory: bool):
        self.length = max_steps * batches.accumulation
        self.loader = DataLoader(
            batches,
            batch_size=None,
            sampler=range(first_step * batches.accumulation, self.length),
            num_workers=workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each pass would draw from the global random state
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.loader)


def train_loader(
    rows: TrainRows, rank: int, world: int, micro_batch: int, first_step: int, max_steps: int, workers: int, pin_memory: bool = False
) -> TrainLoader:
    """Process `rank`'s micro-batches of steps `first_step` to `max_steps`; `len` counts from step 0."""
    return TrainLoader(MicroBatches(rows, rank, world, micro_batch), first_step, max_steps, workers, pin_memory)


# ---------------------------------------------------------------- held-out rows


def windows(split: Split, starts: np.ndarray, length: int) -> np.ndarray:
    """The `length` + 1 tokens from each of `starts` (k,): int64 (k, length + 1)."""
    return split.take(starts, length + 1).astype(np.int64)


def validation_starts(split: Split, seq_len: int, rows: int) -> np.ndarray:
    """Starts of up to `rows` rows of `seq_len` + 1 tokens, evenly spread over the split: int64 (k,).

    No token is a target twice; a row's last token may be the next row's first.
    """
    fitting = max(0, split.n_tokens - 1) // seq_len
    count = min(rows, fitting)
    return np.arange(count, dtype=np.int64) * fitting // max(1, count) * seq_len


def long_starts(split: Split, length: int, rows: int) -> np.ndarray:
    """Starts of up to `rows` windows of `length` + 1 tokens, each within one document: int64 (k,).

    A document of D tokens holds (D - 1) // length windows side by side in its middle; those taken are
    evenly spread over all of them. Most then begin inside a document, as training rows do, so that the
    loss by position shows the position and not how documents begin.
    """
    offsets = np.asarray(split.offsets)
    spans = np.diff(offsets) - 1
    fitting = spans // length
    document = np.repeat(np.arange(len(spans)), fitting)
    within = np.arange(len(document)) - np.repeat(np.cumsum(fitting) - fitting, fitting)
    starts = offsets[:-1][document] + (spans - fitting * length)[document] // 2 + within * length
    count = min(rows, len(starts))
    return starts[np.arange(count) * len(starts) // max(1, count)]
