"""Makes the batches that a run reads. The global batch of step t is a function of the store, the configuration, the
seed and t alone.

World size, workers, micro-batch and restarts do not change the batch, so a run that resumes needs no data state but t.
The sequence length and each sequence's source or task are functions of store, configuration, seed and t, too. A batch
consists of slots, numbered over all steps of a run. A slot has `seq_len` tokens: one sequence or several shorter ones.
A stream, of a source or a task, fills slots with sequences.
"""

import signal
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lm.config.data_config import DataConfig, Task
from lm.config.tree import Config
from lm.data.store import Split, Store
from lm.data.tasks import FillerText, TaskError, integer_hash, make_example
from lm.errors import ConfigError, Problem, RunError
from lm.machine import STOP_SIGNALS, signals_blocked

SLOTS_PER_BLOCK = 1024  # slots that `assign_slots_to_streams` assigns to streams in one draw
# seed words that separate the draws of a sampler, of a mixture's sources (each adds its index), and of lengths
_SAMPLER_SEED, _SOURCE_SEED, _LENGTH_SEED = 2**61, 2**62, 2**63


def group_and_index(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each item's group, and its index in the group, for items in consecutive groups of sizes `counts`: two
    int64 arrays, (sum of `counts`,).
    """
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def assign_slots_to_streams(weights: Sequence[float], seed_integers: tuple[int, ...], slots: np.ndarray) -> np.ndarray:
    """Assign slots of a run, by number (k,), to streams (sources or tasks) at random, in proportion to the streams'
    weights.

    Returns int64 (2, k): each slot's stream index, and the slot's number (from 0) within this stream.

    Time is counted in slots. A stream with a fraction w of all weights is due once in each interval of 1 / w slots, at
    a random time. Slots go to streams in the order of these due times. So a stream gets w t of the first t slots, with
    an error of at most 1 + w n for n streams. As due times are random, no stream always fills the same slots of a step.
    `TrainSequences` assigns steps to lengths in the same way.

    Args:
        weights: a weight above 0 for each stream; they need not sum to 1.
        seed_integers: integers that seed the draws.
    """
    fractions = tuple(np.array(weights) / np.sum(weights))
    blocks, slots_in_block = np.divmod(slots, SLOTS_PER_BLOCK)
    assigned = np.empty((2, len(slots)), np.int64)
    for block in np.unique(blocks):
        is_in_block = blocks == block
        assignment = _assign_block_to_streams(fractions, seed_integers, int(block) * SLOTS_PER_BLOCK)
        assigned[:, is_in_block] = assignment[:, slots_in_block[is_in_block]]
    return assigned


@lru_cache(maxsize=64)
def _assign_block_to_streams(weights: tuple[float, ...], seed_integers: tuple[int, ...], first_slot: int) -> np.ndarray:
    """Return what `assign_slots_to_streams` returns for the `SLOTS_PER_BLOCK` slots from `first_slot` on."""
    # Time is counted in slots: before time t, t slots are due, to within one per stream. Draw all due times from
    # `begin` to `end`.
    begin, end = first_slot - len(weights) - 1, first_slot + SLOTS_PER_BLOCK + len(weights) + 1
    stream_starts = np.maximum(0, np.floor(np.multiply(begin, weights)).astype(np.int64) - 1)
    counts = np.ceil(np.multiply(end, weights)).astype(np.int64) + 1 - stream_starts
    streams, index_in_stream = group_and_index(counts)
    stream_slots = index_in_stream + stream_starts[streams]
    # Due times within intervals of 1 / w slots, as fractions [0, 1]; raw PCG64 output never changes between NumPy
    # versions.
    shifts = [
        np.random.PCG64(np.random.SeedSequence((*seed_integers, _SAMPLER_SEED, stream)))
        .advance(start)
        .random_raw(count)
        for stream, (start, count) in enumerate(zip(stream_starts.tolist(), counts.tolist(), strict=True))
    ]
    due_times = (stream_slots + np.concatenate(shifts) / 2**64) / np.array(weights)[streams]
    order = np.argsort(due_times, kind="stable")[first_slot - stream_starts.sum() :][:SLOTS_PER_BLOCK]
    return np.stack((streams[order], stream_slots[order]))


# ---------------------------------------------------------------- batches


NO_TARGET = -1  # the target of a token whose prediction does not count


class Batch(NamedTuple):
    """A batch of B sequences of T tokens, to train on or to evaluate."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the token that follows each, or `NO_TARGET`
    # (B, T) int64, positions in documents, if a query sees its own document alone; None: in the sequence
    positions: Tensor | None
    first_target_index: int = 0  # index before which no token of any sequence has a target

    @classmethod
    def from_sequences(
        cls, sequences: np.ndarray | Tensor, answer_mask: np.ndarray | None = None, end_of_text_id: int | None = None
    ) -> "Batch":
        """Make a batch of `sequences` (B, T + 1): the first T tokens of each are the inputs, the last T the targets.

        Args:
            answer_mask: (B, T) bool, true for predictions that count in the loss; None: all predictions count.
            end_of_text_id: id of the token that begins each document, to isolate documents; None: a query sees earlier
                documents, too.
        """
        sequences = torch.as_tensor(sequences)
        tokens, targets, first = sequences[:, :-1], sequences[:, 1:], 0
        if answer_mask is not None:
            targets = targets.masked_fill(~torch.from_numpy(answer_mask), NO_TARGET)
            first = int(answer_mask.any(0).argmax())
        positions = None
        # if a document began before the sequence, positions count from the sequence's first token
        if end_of_text_id is not None:
            index = torch.arange(tokens.size(1))
            positions = index - torch.where(tokens == end_of_text_id, index, 0).cummax(1).values
        return cls(tokens, targets, positions, first)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with its tensors on `device`."""
        return self._replace(**{name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)})


# ---------------------------------------------------------------- streams of sequences


class TextStream:
    """Reads sequences from the text of one source: those `n_tokens` tokens of a split that begin at index
    `first_index`. The text is read as a circle, so that its start follows its end.

    Every document begins with the end-of-text token, so the end is followed by a new document. Each epoch cuts the
    circle, from a random token on, into `sequences_per_epoch` sequences of `slot_length` + 1 tokens, and reads them in
    a random order. A sequence's last token is the next sequence's first. In each epoch every token is a target once,
    except fewer than `slot_length` tokens after the last sequence. `lm.data.prepare.check_text_lengths` checks that the
    text has more than `slot_length` tokens.
    """

    def __init__(self, split: Split, first_index: int, n_tokens: int, slot_length: int, seed_integers: tuple[int, ...]):
        self.split, self.first_index, self.n_tokens = split, first_index, n_tokens
        self.slot_length, self.seed_integers = slot_length, seed_integers
        self.sequences_per_epoch = n_tokens // slot_length

    def slot_starts(self, slots: np.ndarray) -> np.ndarray:
        """Return the index, counted from `first_index`, at which the tokens of each slot of `slots` (k,) begin: int64
        (k,).
        """
        epochs, sequence_numbers = np.divmod(slots, self.sequences_per_epoch)
        starts = np.empty_like(slots)
        for epoch in np.unique(epochs):
            epoch_starts = _epoch_starts((*self.seed_integers, int(epoch)), self.n_tokens, self.slot_length)
            starts[epochs == epoch] = epoch_starts[sequence_numbers[epochs == epoch]]
        return starts

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of `slots` (k,), int64 (k x slot_length / length, length + 1), and a mask of the
        predictions that count in the loss.

        The mask is bool (k x slot_length / length, length), and all true. A slot has the same text for every `length`.
        """
        starts = self.slot_starts(slots)[:, None] + length * np.arange(self.slot_length // length)
        index = (starts.reshape(-1, 1) + np.arange(length + 1)) % self.n_tokens
        tokens = self.split.tokens_at(self.first_index + index).astype(np.int64)
        return tokens, np.ones((len(tokens), length), bool)


@lru_cache(maxsize=64)
def _epoch_starts(seed_integers: tuple[int, ...], n_tokens: int, slot_length: int) -> np.ndarray:
    """Return the indices at which an epoch's sequences begin, in the order of reading: int64
    (n_tokens // slot_length,).

    The random order comes from raw PCG64 output, which never changes between NumPy versions (the output of `Generator`
    may).
    """
    raw_numbers = np.random.PCG64(np.random.SeedSequence(seed_integers)).random_raw(n_tokens // slot_length + 1)
    return (int(raw_numbers[-1]) % n_tokens + slot_length * np.argsort(raw_numbers[:-1], kind="stable")) % n_tokens


class TaskStream:
    """Makes training sequences of a synthetic task, in which only answers count in the loss. Two sequences may be equal
    by chance.

    min_length: tokens of the shortest training sequences.

    Raises TaskError: the task needs sequences of more than `min_length` tokens, has no training contents (keys,
    numbers), or lacks filler.
    """

    def __init__(self, task: Task, seed: int, slot_length: int, min_length: int, text: FillerText | None):
        self.task, self.seed, self.slot_length, self.text = task, seed, slot_length, text
        make_example(task, seed, 0, min_length, "train", text)  # raises TaskError before training

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences as `TextStream.read` does, and a mask of the predictions that count in the loss, bool (k x
        slot_length / length, length).
        """
        indices = (slots[:, None] * self.slot_length + np.arange(self.slot_length // length)).ravel()
        examples = [make_example(self.task, self.seed, int(index), length, "train", self.text) for index in indices]
        return np.stack([sequence.tokens for sequence in examples]), np.stack(
            [sequence.answer_mask for sequence in examples]
        )


class TrainSequences:
    """Makes the global batch of every training step of a run.

    Args:
        data: the options that give the sources' weights, the tasks and the lengths of sequences.
        slots_per_step: slots of `seq_len` tokens in one optimizer step, over all processes.

    A step has the same text whatever its sequence length. No token is padding.
    """

    def __init__(self, store: Store, data: DataConfig, slots_per_step: int, seed: int):
        self.store, self.data, self.seq_len, self.slots_per_step = store, data, data.seq_len, slots_per_step
        self.seed_integers = (int(store.fingerprint, 16), seed)
        length_weights = sorted(data.lengths.weights.items()) or [(self.seq_len, 1.0)]
        self.lengths, self.length_weights = zip(*length_weights, strict=True)
        self.stream_weights, self.streams = self._make_streams(seed)

    def sequence_length(self, step: int) -> int:
        """Return the length, in tokens, of all sequences of `step` (0-based)."""
        assigned = assign_slots_to_streams(self.length_weights, (*self.seed_integers, _LENGTH_SEED), np.array([step]))
        return self.lengths[assigned[0, 0]]

    def _make_streams(self, seed: int) -> tuple[list[float], list[TaskStream | TextStream]]:
        """Return the weight of each stream, and the streams: one for each task, then one for each source of text."""
        tasks = [weighted.task for weighted in self.data.tasks]
        weights, streams, text_weight = [weighted.weight for weighted in self.data.tasks], [], self.data.text_weight
        text = FillerText(self.store) if any(task.vocab_size is None for task in tasks) else None
        for number, task in enumerate(tasks):
            streams.append(TaskStream(task, integer_hash((seed, number)) % 2**32, self.seq_len, self.lengths[0], text))
        if not text_weight:  # tasks alone; the sources of a store without text are the tasks
            return weights, streams
        split, first = self.store.train, 0
        for number, (source, weighted_source) in enumerate(zip(split.sources, self.data.sources, strict=True)):
            seed_integers = (
                self.seed_integers if len(split.sources) == 1 else (*self.seed_integers, _SOURCE_SEED + number)
            )
            weights.append(text_weight * weighted_source.weight)
            streams.append(TextStream(split, first, source.n_tokens, self.seq_len, seed_integers))
            first += source.n_tokens
        return weights, streams

    def batch(self, step: int, first_slot: int = 0, count: int | None = None) -> Batch:
        """Return the global batch of a step, or only its `count` slots from slot `first_slot` on. Sequences have
        `sequence_length(step)` tokens.
        """
        length, stop = self.sequence_length(step), self.slots_per_step if count is None else first_slot + count
        slots = step * self.slots_per_step + np.arange(first_slot, stop)
        streams, stream_slots = assign_slots_to_streams(self.stream_weights, self.seed_integers, slots)
        sequence_streams = np.repeat(streams, self.seq_len // length)  # the stream of each sequence
        sequences = np.empty((len(sequence_streams), length + 1), np.int64)
        answers = np.empty((len(sequence_streams), length), bool)
        for number in np.unique(streams):
            tokens, stream_answers = self.streams[number].read(stream_slots[streams == number], length)
            sequences[sequence_streams == number], answers[sequence_streams == number] = tokens, stream_answers
        end_of_text_id = self.store.end_of_text_id if self.data.documents == "isolate" else None
        batch = Batch.from_sequences(sequences, answers, end_of_text_id)
        # a task's sequence counts as one document, even if its filler is text of several
        if batch.positions is not None:
            batch.positions[torch.from_numpy(sequence_streams < len(self.data.tasks))] = torch.arange(length)
        return batch


def train_sequences(store: Store, config: Config) -> TrainSequences:
    """Return the training sequences of a configuration, as global batches by step. Raises ConfigError: a task can't
    make its sequences.
    """
    data, slots_per_step = config.data, config.optim.batch_tokens // config.data.seq_len
    try:
        return TrainSequences(store, data, slots_per_step, config.seed if data.seed is None else data.seed)
    except TaskError as error:
        names = ", ".join(weighted.task.name for weighted in data.tasks)
        raise ConfigError(
            [Problem("data.tasks", names, str(error), "change data.seq_len, data.lengths or the task's options")]
        ) from None


class TrainLoader(DataLoader[Batch]):
    """A data loader whose worker processes ignore the signals that stop a run, since the run goes on to the end of its
    step.

    `kill_workers` ends the workers. If the process that started them dies, they end at most 5 s later, by torch's own
    check.
    """

    processes: frozenset[BaseProcess] = frozenset()  # the workers that `__iter__` started last

    def __iter__(self) -> Iterator[Batch]:
        """Start the workers while the stop signals are blocked, so that workers inherit the block.

        torch's handler of SIGCHLD is removed: it would raise the error of a lost worker anywhere, also where a
        checkpoint is saved. Without the handler, reading the next batch raises this error.
        """
        other_processes, handler = {*active_children()}, signal.getsignal(signal.SIGCHLD)
        try:
            with signals_blocked(*STOP_SIGNALS):
                return super().__iter__()
        finally:
            signal.signal(signal.SIGCHLD, handler)
            self.processes = frozenset({*active_children()} - other_processes)

    def check_workers(self) -> None:
        """Raise RunError if a worker was killed. Without this check, reading a batch would raise one of many errors."""
        wait([worker.sentinel for worker in self.processes], timeout=1)
        for worker in self.processes:
            worker.join(0.01)  # a worker that is just ending has no status yet
            if (number := -(worker.exitcode or 0)) > 0:
                cause = {signal.SIGKILL: " (out of memory?)", signal.SIGBUS: " (no room in /dev/shm?)"}.get(number, "")
                raise RunError(
                    f"data.workers = {self.num_workers}: a process that reads batches was killed by "
                    f"{signal.Signals(number).name}{cause}; lower data.workers or give the run more memory, and go on "
                    "with resume=auto"
                ) from None

    def kill_workers(self) -> None:
        """Kill the workers. They ignore SIGTERM, by which torch and Python would end them after an error."""
        for worker in self.processes:
            worker.kill()


def train_loader(
    sequences: TrainSequences,
    rank: int,
    world_size: int,
    micro_batch: int,
    first_step: int,
    max_steps: int,
    workers: int,
    pin_memory: bool = False,
) -> TrainLoader:
    """Return a data loader of the micro-batches of process `rank` of `world_size`, from step `first_step` to the last
    step, `max_steps` - 1.

    A micro-batch has `micro_batch` slots of `seq_len` tokens. It is cut from the process's slots of a global batch.
    """
    rank_slots = sequences.slots_per_step // world_size
    micro_batches_per_step = rank_slots // micro_batch
    return TrainLoader(
        range(first_step * micro_batches_per_step, max_steps * micro_batches_per_step),
        batch_size=None,
        collate_fn=partial(_micro_batch, sequences, rank * rank_slots, micro_batches_per_step, micro_batch),
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else each pass would draw from the global random state
    )


def _micro_batch(
    sequences: TrainSequences, first_slot_in_step: int, micro_batches_per_step: int, size: int, index_in_run: int
) -> Batch:
    """Return micro-batch `index_in_run` of a run for one process. A step has `micro_batches_per_step` micro-batches of
    `size` slots, cut from the global batch's slots from `first_slot_in_step` on.
    """
    step, number = divmod(index_in_run, micro_batches_per_step)
    return sequences.batch(step, first_slot_in_step + number * size, size)


# ---------------------------------------------------------------- held-out sequences


def validation_starts(split: Split, seq_len: int, limit: int) -> np.ndarray:
    """Return the token indices, int64 (k,), at which up to `limit` sequences of `seq_len` + 1 tokens begin, evenly
    spread over the split.

    No token is a target twice; a sequence's last token may be the next sequence's first.
    """
    n_sequences = max(0, split.n_tokens - 1) // seq_len
    count = min(limit, n_sequences)
    return np.arange(count, dtype=np.int64) * n_sequences // max(1, count) * seq_len


def long_window_starts(split: Split, length: int, limit: int) -> np.ndarray:
    """Return the token indices, int64 (k,), at which up to `limit` windows of `length` + 1 tokens begin, each within
    one document.

    A document of D tokens holds (D - 1) // length windows side by side in its middle; `limit` windows, evenly spread
    over all documents' windows, are chosen. Most windows begin inside a document, as training sequences do. So the loss
    by position shows the effect of the position and not of documents' beginnings.
    """
    offsets = np.asarray(split.offsets)
    spans = np.diff(offsets) - 1
    n_windows = spans // length
    document, window = group_and_index(n_windows)
    starts = offsets[:-1][document] + (spans - n_windows * length)[document] // 2 + window * length
    count = min(limit, len(starts))
    return starts[np.arange(count) * len(starts) // max(1, count)]
