"""The tokens that a run reads: the global batch of step t is a pure function of (store, seed, t).

It depends on nothing else: not on world size, workers, micro-batch or restarts. The only data state is t.
The lengths of sequences and the draws among several streams are such functions, too. Their options are in lm/config/data_config.py.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lm.config.data_config import SHORTEST_PIECE, DataConfig
from lm.config.task_config import Task
from lm.config.tree import Config
from lm.data.store import Split, Store
from lm.data.tasks import TaskError, Text, example, integer_hash
from lm.errors import ConfigError, Problem

T = TypeVar("T")
BLOCK = 1024  # slots that are assigned together
_SAMPLER_SEED = 2**61  # keeps these draws apart from those of epochs and lengths


def members(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The members of groups of the sizes `counts`, group by group: each member's group, and its number in it, from 0; int64 (members,)."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def _cached(draws: dict[int, T], number: int, draw: Callable[[], T]) -> T:
    """The draws of block or epoch `number`. The draws before it stay cached, as a step may straddle two."""
    if number not in draws:
        for old_number in [old_number for old_number in draws if old_number != number - 1]:
            del draws[old_number]
        draws[number] = draw()
    return draws[number]


class StratifiedSampler:
    """Assigns slots 0, 1, ... to streams by weight: a stream of weight w is due once in every 1 / w slots, at a random place among these.

    Slots go to the streams in the order in which the streams are due. At any step of the run, a stream has had its weight's fraction of the
    slots so far to within 1 + w x streams. No period of the run, such as every tenth step, favours a stream.

    Args:
        weights: of the streams, above 0, in any unit.
        seed_words: the seed of the draws.
    """

    def __init__(self, weights: list[float], seed_words: tuple[int, ...]):
        self.weights, self.seed_words = np.array(weights) / np.sum(weights), seed_words
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def assign(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream of each of slots (k,) of the run, and the slot's number among the slots of this stream: both int64 (k,)."""
        blocks, places = np.divmod(slots, BLOCK)
        streams, stream_slots = np.empty_like(slots), np.empty_like(slots)
        for block in np.unique(blocks):
            in_block = blocks == block
            streams[in_block], stream_slots[in_block] = (values[places[in_block]] for values in self.block(int(block)))
        return streams, stream_slots

    def block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The streams of the slots from block x BLOCK to (block + 1) x BLOCK, and their numbers within the streams, as in `assign`."""
        return _cached(self._blocks, block, lambda: self._drawn(block * BLOCK))

    def _drawn(self, first_slot: int) -> tuple[np.ndarray, np.ndarray]:
        # Before slot t, t slots are due, give or take one a stream: the slots of this block are due between `begin` and `end`.
        begin, end = first_slot - len(self.weights) - 1, first_slot + BLOCK + len(self.weights) + 1
        stream_starts = np.maximum(0, np.floor(begin * self.weights).astype(np.int64) - 1)
        counts = np.ceil(end * self.weights).astype(np.int64) + 1 - stream_starts
        streams, place = members(counts)
        stream_slots = place + stream_starts[streams]
        # Places in their 1 / w slots at which a stream's slots are due, [0, 1]; raw PCG64 output never changes between NumPy versions.
        shifts = []
        for stream, (start, count) in enumerate(zip(stream_starts.tolist(), counts.tolist(), strict=True)):
            random = np.random.PCG64(np.random.SeedSequence((*self.seed_words, _SAMPLER_SEED, stream)))
            shifts.append(random.advance(start).random_raw(count) / 2**64)
        due_times = (stream_slots + np.concatenate(shifts)) / self.weights[streams]
        order = np.argsort(due_times, kind="stable")[first_slot - stream_starts.sum() :][:BLOCK]
        return streams[order], stream_slots[order]


# ---------------------------------------------------------------- lengths of sequences


_LENGTH_SEED = 2**63  # keeps the draws of lengths apart from those of sequences


class Lengths(ABC):
    """Tokens in each sequence of a step."""

    shortest: int  # the least length
    left_out: float = 0.0  # fraction of the tokens that an epoch does not read

    @abstractmethod
    def __call__(self, step: int) -> int:
        """The length of the sequences of `step` (0-based)."""

    def fractions(self, steps: int) -> dict[int, float]:
        """By length, the fraction of the tokens of the first `steps` steps that is in sequences of this length."""
        return _fractions(Counter(map(self, range(steps))))

    def note(self) -> str:
        """The tokens that an epoch does not read, in words; empty if they are fewer than a sequence."""
        return ""


def _fractions(counts: Mapping[int, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {length: count / total for length, count in sorted(counts.items()) if count}


class StepwiseLengths(Lengths):
    """Lengths one after the other, by the step at which each begins: 0 first, ascending."""

    def __init__(self, length_by_step: Mapping[int, int]):
        self.steps, self.lengths, self.shortest = list(length_by_step), list(length_by_step.values()), min(length_by_step.values())

    def __call__(self, step: int) -> int:
        return self.lengths[bisect_right(self.steps, step) - 1]


class DrawnLengths(Lengths):
    """Lengths drawn for each step by weight. A length's weight is its fraction of the steps, and so of the tokens."""

    def __init__(self, weights: Mapping[int, float], seed_words: tuple[int, ...]):
        self.lengths = sorted(weights)
        self.shortest = self.lengths[0]
        self.sampler = StratifiedSampler([weights[length] for length in self.lengths], (*seed_words, _LENGTH_SEED))

    def __call__(self, step: int) -> int:
        block, place = divmod(step, BLOCK)
        return self.lengths[self.sampler.block(block)[0][place]]


class DocumentPieces(Lengths):
    """Sequences within documents, cut as `DocumentLengths` says: a shorter piece would predict next to nothing from context.

    The tokens in no piece lie at a document's two ends, in each epoch a random number of them at its beginning. The first token of the text
    follows the last. In an epoch each length has as many steps as its pieces fill, in a random order; random pieces are left over, or all
    of a length that fills no step.

    Args:
        longest: tokens of the longest sequence, a power of two.
        step_tokens: tokens of a step, a multiple of `longest`.

    Raises ConfigError: pieces of no length fill a step.
    """

    def __init__(self, split: Split, longest: int, step_tokens: int, seed_words: tuple[int, ...]):
        self.split, self.longest, self.step_tokens, self.seed_words = split, longest, step_tokens, seed_words
        self.shortest = SHORTEST_PIECE
        offsets = np.asarray(split.offsets)
        sizes = np.diff(offsets)
        self.offsets, self.spare = offsets[:-1], sizes % SHORTEST_PIECE
        self.pieces: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by length: each piece's document, and its place there
        starts = np.zeros_like(sizes)
        length = longest
        while length >= SHORTEST_PIECE:
            counts = (sizes - starts) // length
            document, piece = members(counts)
            self.pieces[length] = document, starts[document] + piece * length
            starts += counts * length
            length //= 2
        self.steps = {length: len(document) * length // step_tokens for length, (document, _) in self.pieces.items()}
        self.steps_per_epoch = sum(self.steps.values())
        if not self.steps_per_epoch:
            reason = f"pieces of no length fill a step of {step_tokens} tokens"
            raise ConfigError([Problem("data.lengths", "documents", reason, "lower optim.batch_tokens, or add text")])
        self.left_out = 1 - self.steps_per_epoch * step_tokens / int(sizes.sum())
        self.never_read = int(sizes[sizes < SHORTEST_PIECE].sum()) / int(sizes.sum())  # fraction of the tokens that all epochs leave out
        self._epoch, self._order, self._starts = -1, np.empty(0), {}

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        random = np.random.PCG64(np.random.SeedSequence((*self.seed_words, epoch)))
        shift = (random.random_raw(len(self.offsets)) % (self.spare + 1).astype(np.uint64)).astype(np.int64)
        self._starts = {}
        for length, (document, place) in self.pieces.items():
            order = np.argsort(random.random_raw(len(document)), kind="stable") if len(document) else []
            self._starts[length] = (self.offsets[document] + shift[document] + place)[order]
        lengths = np.repeat(list(self.steps), list(self.steps.values()))
        self._order = lengths[np.argsort(random.random_raw(len(lengths)), kind="stable")]
        self._epoch = epoch

    def __call__(self, step: int) -> int:
        epoch, place = divmod(step, self.steps_per_epoch)
        self._enter(epoch)
        return int(self._order[place])

    def fractions(self, steps: int) -> dict[int, float]:
        """The fractions in whole epochs, for any `steps`: an epoch's draws are large."""
        return _fractions(self.steps)

    def note(self) -> str:
        short_documents = f", {self.never_read:.1%} always: documents of fewer than {SHORTEST_PIECE}" if self.never_read else ""
        return f"{self.left_out:.1%} of the tokens are left out of each epoch{short_documents}"

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, None]:
        """`Stream.read` for slots of one step, whose sequences have `length` tokens."""
        slots_per_step = self.step_tokens // self.longest
        starts = self.sequence_starts(int(slots[0]) // slots_per_step).reshape(slots_per_step, -1)[slots % slots_per_step]
        return self.split.circular_windows(starts.ravel(), length, 0, self.split.n_tokens), None

    def sequence_starts(self, step: int) -> np.ndarray:
        """The first tokens of a step's sequences, by index: int64 (step_tokens / length,)."""
        length = self(step)
        place = step % self.steps_per_epoch
        number = int((self._order[:place] == length).sum())
        count = self.step_tokens // length
        return self._starts[length][number * count : (number + 1) * count]


# ---------------------------------------------------------------- batches


IGNORED = -1  # the target of a token that is to predict nothing
_SOURCE_SEED = 2**62  # keeps the draws of the sources of a mixture apart from those of epochs


class Batch(NamedTuple):
    """Sequences to train on or to evaluate."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the token that each is to predict, or `IGNORED`
    positions: Tensor | None  # (B, T) int64 within each document, where documents don't see each other; None: a sequence is one document
    first: int = 0  # no token before it has a target in any sequence

    @classmethod
    def of(cls, sequences: np.ndarray | Tensor, answers: np.ndarray | None = None, end_of_text: int | None = None) -> "Batch":
        """The batch of sequences (B, T + 1) of tokens.

        Args:
            answers: (B, T) bool, true for predictions that count; None: all count.
            end_of_text: the token that begins a document, if documents are not to see each other.
        """
        sequences = torch.as_tensor(sequences)
        tokens, targets, first = sequences[:, :-1], sequences[:, 1:], 0
        if answers is not None:
            targets, first = targets.masked_fill(~torch.from_numpy(answers), IGNORED), int(answers.any(0).argmax())
        positions = None
        if end_of_text is not None:  # as far as the sequence shows where its first document begins
            place = torch.arange(tokens.size(1))
            positions = place - torch.where(tokens == end_of_text, place, 0).cummax(1).values
        return cls(tokens, targets, positions, first)

    def to(self, device: torch.device) -> "Batch":
        return self._replace(**{name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)})


# ---------------------------------------------------------------- streams of sequences


class Stream(Protocol):
    """Endless slots of `seq_len` tokens, each filled by one sequence or by several shorter ones."""

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The contents of slots (k,), in sequences of `length`: tokens int64 (k x seq_len / length, length + 1), and counted predictions.

        These are bool (k x seq_len / length, length), or None if all count.
        """


class TextStream:
    """Sequences of a part of a split: the tokens from `first` to `first + n_tokens`, read as a circle, whose first token follows its last.

    Every document begins with the end-of-text token, so that this seam is a border of documents like any other. Each epoch cuts the
    circle, from a random place, into `sequences_per_epoch` sequences of `seq_len` + 1 tokens, and visits these in a random order. A
    sequence's last token is the next sequence's first. Every token is a target once an epoch, but for fewer than `seq_len` before the cut.

    Raises ValueError: the part has no sequence of `seq_len` + 1 tokens (`lm.data.prepare.check_sequences` tells the user before).
    """

    def __init__(self, split: Split, first: int, n_tokens: int, seq_len: int, seed_words: tuple[int, ...]):
        self.split, self.first, self.n_tokens, self.seq_len, self.seed_words = split, first, n_tokens, seq_len, seed_words
        if n_tokens <= seq_len:
            raise ValueError(f"{n_tokens} tokens hold no sequence of {seq_len + 1}")
        self.sequences_per_epoch = n_tokens // seq_len
        self._epochs: dict[int, np.ndarray] = {}

    def epoch_starts(self, epoch: int) -> np.ndarray:
        """Places in the part at which an epoch's sequences begin, in the order of visits: int64 (sequences_per_epoch,).

        Draws are of raw PCG64 output, which never changes between NumPy versions (the output of `Generator` may).
        """

        def drawn() -> np.ndarray:
            random = np.random.PCG64(np.random.SeedSequence((*self.seed_words, epoch))).random_raw(self.sequences_per_epoch + 1)
            return (int(random[-1]) % self.n_tokens + self.seq_len * np.argsort(random[:-1], kind="stable")) % self.n_tokens

        return _cached(self._epochs, epoch, drawn)

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """Places in the part at which the sequences of slots (k,) begin: int64 (k,)."""
        epochs, places = np.divmod(slots, self.sequences_per_epoch)
        starts = np.empty_like(slots)
        for epoch in np.unique(epochs):
            starts[epochs == epoch] = self.epoch_starts(int(epoch))[places[epochs == epoch]]
        return starts

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, None]:
        """`Stream.read`; a slot has the same tokens for every length."""
        starts = self.starts(slots)[:, None] + length * np.arange(self.seq_len // length)
        return self.split.circular_windows(starts.ravel(), length, self.first, self.n_tokens), None


class TaskStream:
    """Sequences of a synthetic task, whose answers alone count. They are drawn independently, and may repeat (see `Task.distinct`).

    Raises TaskError: the task doesn't fit into sequences of `shortest` tokens, or has none for training.
    """

    def __init__(self, task: Task, seed: int, seq_len: int, shortest: int, text: Text | None):
        self.task, self.seed, self.seq_len, self.text = task, seed, seq_len, text
        example(task, seed, 0, shortest, "train", text)  # raises in time

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        indices = (slots[:, None] * self.seq_len + np.arange(self.seq_len // length)).ravel()
        examples = [example(self.task, self.seed, int(index), length, "train", self.text) for index in indices]
        return np.stack([sequence.tokens for sequence in examples]), np.stack([sequence.answers for sequence in examples])


class TrainSequences:
    """The sequences of every step of a run.

    Args:
        batch_slots: slots of `seq_len` tokens in one optimizer step, over all processes.
        data: the sources' weights, tasks, and the lengths of sequences. A step has the same tokens for all lengths
            (but for `documents`), and none is padding.
        max_steps: steps of the run: a curriculum's lengths begin at fractions of them.
    """

    def __init__(self, store: Store, data: DataConfig, batch_slots: int, seed: int, max_steps: int = 1):
        self.store, self.data, self.seq_len, self.batch_slots = store, data, data.seq_len, batch_slots
        self.seed_words = (int(store.fingerprint, 16), seed)
        if length_by_step := data.lengths.length_by_step(self.seq_len, max_steps):
            self.length: Lengths = StepwiseLengths(length_by_step)
        elif weights_by_length := data.lengths.weights_by_length():
            self.length = DrawnLengths(weights_by_length, self.seed_words)
        else:
            self.length = DocumentPieces(store.train, self.seq_len, self.seq_len * batch_slots, self.seed_words)
        weights, self.streams = self._streams(seed)
        self.sampler = StratifiedSampler(weights, self.seed_words) if len(self.streams) > 1 else None

    def _streams(self, seed: int) -> tuple[list[float], list[Stream]]:
        if isinstance(self.length, DocumentPieces):  # the lengths come with the text that is read
            return [1.0], [self.length]
        tasks = [weighted.task for weighted in self.data.tasks]
        weights, streams, text_weight = [weighted.weight for weighted in self.data.tasks], [], self.data.text_weight
        text = Text(self.store) if any(task.vocab_size is None for task in tasks) else None
        for number, task in enumerate(tasks):
            streams.append(TaskStream(task, integer_hash((seed, number)) % 2**32, self.seq_len, self.length.shortest, text))
        if not text_weight:  # tasks alone, of which the store may hold sequences as its parts
            return weights, streams
        split, first = self.store.train, 0
        for number, (source, weighted_source) in enumerate(zip(split.sources, self.data.sources, strict=True)):
            if weighted_source.weight:
                seed_words = self.seed_words if len(split.sources) == 1 else (*self.seed_words, _SOURCE_SEED + number)
                weights.append(text_weight * weighted_source.weight)
                streams.append(TextStream(split, first, source.n_tokens, self.seq_len, seed_words))
            first += source.n_tokens
        return weights, streams

    def batch(self, step: int, first: int = 0, count: int | None = None) -> Batch:
        """The global batch of a step, or its `count` slots from `first` on, in sequences of `length(step)` tokens."""
        last = self.batch_slots if count is None else first + count
        sequences, answers, is_text = self._sequences(step * self.batch_slots + np.arange(first, last), self.length(step))
        batch = Batch.of(sequences, answers, self.store.end_of_text if self.data.documents == "isolate" else None)
        if batch.positions is not None:  # a task's sequence is one document, whatever its filler
            batch.positions[~torch.from_numpy(is_text)] = torch.arange(batch.tokens.size(1))
        return batch

    def _sequences(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        """Tokens, predictions that count (None: all), and sequences that are text, by slot, as `Stream.read` gives them."""
        if self.sampler is None:
            sequences, answers = self.streams[0].read(slots, length)
            return sequences, answers, np.full(len(sequences), answers is None)
        streams, stream_slots = self.sampler.assign(slots)
        per_slot = self.seq_len // length
        sequences = np.empty((len(slots), per_slot, length + 1), np.int64)
        answers = np.ones((len(slots), per_slot, length), bool)
        is_text = np.ones((len(slots), per_slot), bool)
        for number in np.unique(streams):
            in_stream = streams == number
            tokens, stream_answers = self.streams[number].read(stream_slots[in_stream], length)
            sequences[in_stream] = tokens.reshape(-1, per_slot, length + 1)
            if stream_answers is not None:
                answers[in_stream], is_text[in_stream] = stream_answers.reshape(-1, per_slot, length), False
        return sequences.reshape(-1, length + 1), answers.reshape(-1, length), is_text.ravel()


def train_sequences(store: Store, config: Config, batch_slots: int | None = None) -> TrainSequences:
    """The sequences that a configuration trains on; with `batch_slots`, in steps of this size.

    Raises ConfigError: the pieces of documents fill no step (`data.lengths=documents`), or a task can't make its sequences.
    """
    data = config.data
    slots = batch_slots or config.optim.batch_tokens // data.seq_len
    try:
        return TrainSequences(store, data, slots, config.seed if data.seed is None else data.seed, config.trainer.max_steps)
    except TaskError as error:
        names = ", ".join(weighted.task.name for weighted in data.tasks)
        raise ConfigError([Problem("data.tasks", names, str(error), "change data.seq_len, data.lengths or the task's options")]) from None


class MicroBatches(Dataset[Batch]):
    """One process's part of every global batch, in micro-batches.

    Item k is micro-batch k % accumulation of step k // accumulation: `micro_batch` slots of `seq_len` tokens.
    """

    def __init__(self, sequences: TrainSequences, rank: int, world: int, micro_batch: int):
        rank_slots = sequences.batch_slots // world
        self.source, self.first, self.micro_batch = sequences, rank * rank_slots, micro_batch
        self.accumulation = rank_slots // micro_batch

    def __getitem__(self, index: int) -> Batch:
        step, number = divmod(index, self.accumulation)
        return self.source.batch(step, self.first + number * self.micro_batch, self.micro_batch)


def train_loader(
    sequences: TrainSequences,
    rank: int,
    world: int,
    micro_batch: int,
    first_step: int,
    max_steps: int,
    workers: int,
    pin_memory: bool = False,
) -> DataLoader:
    """Process `rank`'s micro-batches of steps `first_step` to `max_steps`."""
    batches = MicroBatches(sequences, rank, world, micro_batch)
    return DataLoader(
        batches,
        batch_size=None,
        sampler=range(first_step * batches.accumulation, max_steps * batches.accumulation),
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else each pass would draw from the global random state
    )


# ---------------------------------------------------------------- held-out sequences


def validation_starts(split: Split, seq_len: int, limit: int) -> np.ndarray:
    """Starts of up to `limit` sequences of `seq_len` + 1 tokens, evenly spread over the split: int64 (k,).

    No token is a target twice; a sequence's last token may be the next sequence's first.
    """
    n_sequences = max(0, split.n_tokens - 1) // seq_len
    count = min(limit, n_sequences)
    return np.arange(count, dtype=np.int64) * n_sequences // max(1, count) * seq_len


def long_starts(split: Split, length: int, limit: int) -> np.ndarray:
    """Starts of up to `limit` windows of `length` + 1 tokens, each within one document: int64 (k,).

    A document of D tokens holds (D - 1) // length windows side by side in its middle. The starts are of
    windows that are evenly spread over all of these. Most begin inside a document, as training sequences do,
    so that the loss by position shows the effect of the position and not of documents' beginnings.
    """
    offsets = np.asarray(split.offsets)
    spans = np.diff(offsets) - 1
    n_windows = spans // length
    document, window = members(n_windows)
    starts = offsets[:-1][document] + (spans - n_windows * length)[document] // 2 + window * length
    count = min(limit, len(starts))
    return starts[np.arange(count) * len(starts) // max(1, count)]
