"""Which tokens a run reads: the global batch of step t is a pure function of (store, seed, t).

It depends on nothing else: not on world size, workers, micro-batch or restarts. The only data state is t.
"""

from collections import Counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.config.data_config import DataConfig
from lm.config.task_config import Task
from lm.config.tree import Config
from lm.data.deck import Deck, members
from lm.data.sequence_lengths import Curriculum, Lengths, Mixture, NaturalRows, NoFullStep
from lm.data.store import Split, Store
from lm.data.tasks.examples import NoRoom, fold
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.errors import ConfigError, Problem

IGNORED = -1  # a target that is not to be predicted
_PARTS = 2**62  # keeps the draws of a mixture's parts apart from those of epochs


class Batch(NamedTuple):
    """Rows to train on or to evaluate.

    Attributes:
        tokens: (B, T) int64.
        targets: (B, T) int64, what each token is to predict; `IGNORED` where nothing.
        positions: (B, T) int64 within each document, where documents don't see each other; None: a row is one document.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None

    @classmethod
    def of(cls, rows: np.ndarray | Tensor, answers: np.ndarray | None = None, end_of_text: int | None = None) -> "Batch":
        """From rows (B, T + 1) of tokens.

        Args:
            answers: (B, T) bool, which predictions count; None: all.
            end_of_text: the token that begins a document, if documents are not to see each other.
        """
        rows = torch.as_tensor(rows)
        tokens, targets = rows[:, :-1], rows[:, 1:]
        if answers is not None:
            targets = targets.masked_fill(~torch.from_numpy(answers), IGNORED)
        return cls(tokens, targets, None if end_of_text is None else document_positions(tokens, end_of_text))

    def to(self, device: torch.device) -> "Batch":
        """On another device."""
        return Batch(*(None if x is None else x.to(device) for x in self))


def document_positions(tokens: Tensor, end_of_text: int) -> Tensor:
    """Each token's place in its document, as far as the row shows it: int64, the shape of `tokens` (B, T)."""
    place = torch.arange(tokens.size(1))
    return place - torch.where(tokens == end_of_text, place, 0).cummax(1).values


# ---------------------------------------------------------------- streams of rows


class Stream(Protocol):
    """An endless sequence of slots of `seq_len` tokens, each filled by one row or by several shorter ones."""

    def rows(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """What slots (k,) hold, in rows of `length`: tokens int64 (k x seq_len / length, length + 1), and which predictions count.

        The latter bool (k x seq_len / length, length), or None for all.
        """


class TextStream:
    """Rows of a part of a split, the tokens from `first` to `first + n_tokens`, which is a circle: after its last token comes its first.

    Every document begins with the end-of-text token, so that this seam is a border of documents like any other. Epoch e cuts the
    circle, from a place of its own, into `rows_per_epoch` rows of `seq_len` + 1 tokens (each row's last token is the next one's first)
    and visits them in an order of its own. Every token is a target once an epoch, but for the fewer than `seq_len` before the cut.

    Raises:
        ValueError: the part has no row of `seq_len` + 1 tokens (`lm.data.prepare.check_sequences` says so kindly).
    """

    def __init__(self, split: Split, first: int, n_tokens: int, seq_len: int, entropy: tuple[int, ...]):
        self.split, self.first, self.n_tokens, self.seq_len, self.entropy = split, first, n_tokens, seq_len, entropy
        if n_tokens <= seq_len:
            raise ValueError(f"{n_tokens} tokens hold no row of {seq_len + 1}")
        self.rows_per_epoch = n_tokens // seq_len
        self._epochs: dict[int, np.ndarray] = {}

    def epoch_starts(self, epoch: int) -> np.ndarray:
        """Where in the part the rows of an epoch begin, in the order they are visited: int64 (rows_per_epoch,).

        Drawn from raw PCG64 output, which never changes between NumPy versions (those of `Generator` may).
        """
        if epoch not in self._epochs:
            random = np.random.PCG64(np.random.SeedSequence((*self.entropy, epoch))).random_raw(self.rows_per_epoch + 1)
            cut = int(random[-1]) % self.n_tokens
            # A step may straddle two epochs, so the one before is kept.
            self._epochs = {before: starts for before, starts in self._epochs.items() if before == epoch - 1}
            self._epochs[epoch] = (cut + self.seq_len * np.argsort(random[:-1], kind="stable")) % self.n_tokens
        return self._epochs[epoch]

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """Where in the part the rows in slots (k,) begin: int64 (k,)."""
        epochs, places = np.divmod(slots, self.rows_per_epoch)
        found = np.empty_like(slots)
        for epoch in np.unique(epochs):
            found[epochs == epoch] = self.epoch_starts(int(epoch))[places[epochs == epoch]]
        return found

    def rows(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, None]:
        """As `Stream.rows`: the tokens of a slot are the same whatever the length."""
        cut = self.starts(slots)[:, None] + length * np.arange(self.seq_len // length)
        return self.split.around(cut.ravel(), length, self.first, self.n_tokens), None


class TaskStream:
    """Rows of a synthetic task, whose answers alone count; no two slots have a row in common.

    Raises:
        NoRoom: the task doesn't fit into rows of `shortest` tokens.
    """

    def __init__(self, task: Task, seed: int, seq_len: int, shortest: int, text: Text | None):
        self.task, self.seed, self.seq_len, self.text = task, seed, seq_len, text
        example(task, seed, 0, shortest, "train", text)  # raises in time

    def rows(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Stream.rows`."""
        indices = (slots[:, None] * self.seq_len + np.arange(self.seq_len // length)).ravel()
        made = [example(self.task, self.seed, int(index), length, "train", self.text) for index in indices]
        return np.stack([one.tokens for one in made]), np.stack([one.answers for one in made])


class TrainRows:
    """The rows of every step of a run.

    Args:
        batch_rows: slots of `seq_len` tokens in one optimizer step, over all processes.
        data: the sources' weights, tasks, and lengths of the rows that share a slot. The tokens of a step are the same whatever the
            lengths (but for `documents`), and none is padding.
        max_steps: steps of the run, of which the lengths that follow each other have their shares.
    """

    def __init__(self, store: Store, data: DataConfig, batch_rows: int, seed: int, max_steps: int = 1):
        self.store, self.data, self.seq_len, self.batch_rows = store, data, data.seq_len, batch_rows
        self.entropy = (int(store.fingerprint, 16), seed)
        natural = data.lengths == "documents"
        self.natural = NaturalRows(store.train, self.seq_len, self.seq_len * batch_rows, self.entropy) if natural else None
        self.length: Lengths = self.natural or lengths_of(data.lengths, self.seq_len, max_steps, self.entropy)
        shares, self.streams = self._streams(seed)
        self.deck = Deck(shares, self.entropy) if len(self.streams) > 1 else None

    def _streams(self, seed: int) -> tuple[list[float], list[Stream]]:
        """What the rows are drawn from, with shares that sum to 1."""
        if self.natural:
            return [1.0], [self.natural]
        tasks = self.data.tasks
        rest = 1 - sum(share.weight for share in tasks)
        shares, streams = [share.weight for share in tasks], []
        text = Text(self.store) if any(share.task.vocab_size is None for share in tasks) else None
        for number, share in enumerate(tasks):
            streams.append(TaskStream(share.task, fold((seed, number)) % 2**32, self.seq_len, self.length.shortest, text))
        if rest < 1e-6:  # tasks alone, whose store may hold rows of each as its parts
            return shares, streams
        split, first = self.store.train, 0
        for number, (source, asked) in enumerate(zip(split.sources, self.data.sources, strict=True)):
            if asked.weight:
                entropy = self.entropy if len(split.sources) == 1 else (*self.entropy, _PARTS + number)
                shares.append(rest * asked.weight)
                streams.append(TextStream(split, first, source.n_tokens, self.seq_len, entropy))
            first += source.n_tokens
        return shares, streams

    def shares(self, steps: int) -> dict[int, float]:
        """The share of the tokens of the first `steps` steps that is in rows of each length."""
        counts = self.natural.steps if self.natural else Counter(self.length(step) for step in range(steps))
        total = sum(counts.values())
        return {length: count / total for length, count in sorted(counts.items()) if count}

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """The global batch of a step, or of it the `count` slots from `first` on; rows of `length(step)` tokens."""
        last = self.batch_rows if count is None else first + count
        rows, answers, is_text = self._rows(step * self.batch_rows + np.arange(first, last), self.length(step))
        batch = Batch.of(rows, answers, self.store.end_of_text if self.data.documents == "isolate" else None)
        if batch.positions is not None:  # a row of a task is one document, whatever its filler
            batch.positions[~torch.from_numpy(is_text)] = torch.arange(batch.tokens.size(1))
        return batch

    def _rows(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Tokens, which predictions count, and which rows are text."""
        if self.deck is None:
            rows, answers = self.streams[0].rows(slots, length)
            return rows, answers, np.full(len(rows), answers is None)
        dealt, own = self.deck.deal(slots)
        per_slot = self.seq_len // length
        rows = np.empty((len(slots), per_slot, length + 1), np.int64)
        answers = np.ones((len(slots), per_slot, length), bool)
        is_text = np.ones((len(slots), per_slot), bool)
        for number in np.unique(dealt):
            mine = dealt == number
            tokens, counted = self.streams[number].rows(own[mine], length)
            rows[mine] = tokens.reshape(-1, per_slot, length + 1)
            if counted is not None:
                answers[mine], is_text[mine] = counted.reshape(-1, per_slot, length), False
        return rows.reshape(-1, length + 1), answers.reshape(-1, length), is_text.ravel()


def train_rows(store: Store, config: Config, batch_rows: int | None = None) -> TrainRows:
    """The rows that a configuration trains on; with `batch_rows`, in steps of another size.

    Raises:
        ConfigError: the documents fill no step (`data.lengths: documents`), or a task has no room in a row.
    """
    data = config.data
    rows = batch_rows or config.optim.batch_tokens // data.seq_len
    try:
        return TrainRows(store, data, rows, config.seed, config.trainer.max_steps)
    except NoFullStep as error:
        raise ConfigError([Problem("data.lengths", data.lengths, str(error), "lower optim.batch_tokens, or add text")]) from None
    except NoRoom as error:
        names = ", ".join(share.task.name for share in data.tasks)
        raise ConfigError([Problem("data.tasks", names, str(error), "set data.seq_len and data.lengths to more")]) from None


def lengths_of(lengths: int | dict[int | float, int | float] | None, seq_len: int, max_steps: int, entropy: tuple[int, ...]) -> Lengths:
    """The lengths of the steps that `data.lengths` describes, but for `documents`."""
    if not lengths or isinstance(lengths, int):
        return Curriculum({0.0: lengths or seq_len}, max_steps)
    return Curriculum(lengths, max_steps) if 0 in lengths else Mixture(lengths, entropy)


class MicroBatches(Dataset[Batch]):
    """One process's share of every global batch, in micro-batches.

    Item k is micro-batch k % accumulation of step k // accumulation: `micro_batch` slots of `seq_len` tokens.
    """

    def __init__(self, rows: TrainRows, rank: int, world: int, micro_batch: int):
        rank_rows = rows.batch_rows // world
        assert rank_rows * world == rows.batch_rows, "the configuration has checked this"
        assert rank_rows % micro_batch == 0, "the configuration has checked this"
        self.source, self.first, self.micro_batch = rows, rank * rank_rows, micro_batch
        self.accumulation = rank_rows // micro_batch

    def __getitem__(self, index: int) -> Batch:
        step, micro = divmod(index, self.accumulation)
        return self.source.batch(step, self.first + micro * self.micro_batch, self.micro_batch)


def train_loader(
    rows: TrainRows, rank: int, world: int, micro_batch: int, first_step: int, max_steps: int, workers: int, pin_memory: bool = False
) -> DataLoader:
    """Process `rank`'s micro-batches of steps `first_step` to `max_steps`."""
    batches = MicroBatches(rows, rank, world, micro_batch)
    return DataLoader(
        batches,
        batch_size=None,
        sampler=range(first_step * batches.accumulation, max_steps * batches.accumulation),
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else each pass would draw from the global random state
    )


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
    document, within = members(fitting)
    starts = offsets[:-1][document] + (spans - fitting * length)[document] // 2 + within * length
    count = min(rows, len(starts))
    return starts[np.arange(count) * len(starts) // max(1, count)]
