"""How long the sequences of a step are: a pure function of (store, seed, step). The options are in lm/config/lengths_config.py."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lm.config.lengths_config import SHORTEST_PIECE, SequenceLengths
from lm.data.store import Split
from lm.data.stratified_sampler import BLOCK, StratifiedSampler, members

_LENGTH_SEED = 2**63  # keeps the draws of lengths apart from those of sequences


class NoFullStep(ValueError):
    """The documents have too few pieces of each length to fill a step."""


class Lengths:
    """Tokens in each sequence of a step.

    Attributes:
        shortest: the least length.
        reads_text: true if the lengths come with the text that is read: a `lm.data.batches.Stream`.
    """

    shortest: int
    reads_text: ClassVar[bool] = False

    def __call__(self, step: int) -> int:
        """The length of the sequences of `step` (0-based)."""
        raise NotImplementedError

    def fractions(self, steps: int) -> dict[int, float]:
        """By length, the fraction of the tokens of the first `steps` steps that is in sequences of it."""
        raise NotImplementedError

    def note(self) -> str:
        """Which tokens an epoch does not read, in words; empty if it reads all but fewer than a sequence."""
        return ""


def _fractions(counts: Mapping[int, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {length: count / total for length, count in sorted(counts.items()) if count}


def lengths_of(
    options: SequenceLengths, split: Split, seq_len: int, batch_slots: int, max_steps: int, seed_words: tuple[int, ...]
) -> Lengths:
    """The lengths that `data.lengths` describes, in steps of `batch_slots` x `seq_len` tokens.

    Raises:
        NoFullStep: pieces of documents of no length fill a step.
    """
    if begins := options.begins(seq_len, max_steps):
        return StepwiseLengths(begins)
    if weights := options.drawn():
        return DrawnLengths(weights, seed_words)
    return DocumentPieces(split, seq_len, seq_len * batch_slots, seed_words)


class StepwiseLengths(Lengths):
    """Lengths one after the other, by the step that each begins at: 0 first, ascending."""

    def __init__(self, begins: Mapping[int, int]):
        self.steps, self.lengths, self.shortest = list(begins), list(begins.values()), min(begins.values())

    def __call__(self, step: int) -> int:
        return self.lengths[bisect_right(self.steps, step) - 1]

    def fractions(self, steps: int) -> dict[int, float]:
        """As `Lengths.fractions`."""
        counts: Counter[int] = Counter()
        for begin, end, length in zip(self.steps, [*self.steps[1:], steps], self.lengths, strict=True):
            counts[length] += max(0, min(end, steps) - begin)
        return _fractions(counts)


class DrawnLengths(Lengths):
    """Lengths drawn for each step by weight: each length's weight is its fraction of the steps, and so of the tokens."""

    def __init__(self, weights: Mapping[int, float], seed_words: tuple[int, ...]):
        self.lengths = sorted(weights)
        self.shortest = self.lengths[0]
        self.sampler = StratifiedSampler([weights[length] for length in self.lengths], (*seed_words, _LENGTH_SEED))

    def __call__(self, step: int) -> int:
        block, place = divmod(step, BLOCK)
        return self.lengths[self.sampler.block(block)[0][place]]

    def fractions(self, steps: int) -> dict[int, float]:
        """As `Lengths.fractions`."""
        return _fractions(Counter(map(self, range(steps))))


class DocumentPieces(Lengths):
    """Sequences within documents: each document is cut into pieces of powers of two tokens (`DocumentLengths` says which).

    No piece is padded. The fewer than 16 tokens of a document that no piece has lie at its two ends, a random number at either in each
    epoch. A piece shorter than 16 would predict next to nothing from context, so documents shorter than that are never read. The first
    token of the text follows the last. In an epoch each length has as many steps as its pieces fill, in a random order; pieces that do
    not fill a step are not read in this epoch: random ones, but for a length that fills no step at all, whose pieces are never read.

    Args:
        longest: tokens of the longest sequence, a power of two.
        step_tokens: tokens of a step, a multiple of `longest`.

    Raises:
        NoFullStep: pieces of no length fill a step.
    """

    reads_text: ClassVar[bool] = True

    def __init__(self, split: Split, longest: int, step_tokens: int, seed_words: tuple[int, ...]):
        self.split, self.longest, self.step_tokens, self.seed_words = split, longest, step_tokens, seed_words
        self.shortest = SHORTEST_PIECE
        offsets = np.asarray(split.offsets)
        sizes = np.diff(offsets)
        self.offsets, self.spare = offsets[:-1], sizes % SHORTEST_PIECE
        self.pieces: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # length: document, place in it
        begun = np.zeros_like(sizes)
        length = longest
        while length >= SHORTEST_PIECE:
            counts = (sizes - begun) // length
            document, within = members(counts)
            self.pieces[length] = document, begun[document] + within * length
            begun += counts * length
            length //= 2
        self.steps = {length: len(document) * length // step_tokens for length, (document, _) in self.pieces.items()}
        self.steps_per_epoch = sum(self.steps.values())
        if not self.steps_per_epoch:
            raise NoFullStep(f"pieces of no length fill a step of {step_tokens} tokens")
        self.left_out = 1 - self.steps_per_epoch * step_tokens / int(sizes.sum())  # fraction of the tokens that an epoch leaves out
        self.never_read = int(sizes[sizes < SHORTEST_PIECE].sum()) / int(sizes.sum())  # fraction of the tokens that all epochs leave out
        self._epoch, self._order, self._starts = -1, np.empty(0), {}

    def _enter(self, epoch: int) -> None:
        """Draw the epoch: which length each step has, and which sequences."""
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
        """As `Lengths.fractions`, of whole epochs, whatever `steps`: an epoch's draws are large."""
        return _fractions(self.steps)

    def note(self) -> str:
        """As `Lengths.note`."""
        never = f", {self.never_read:.1%} always: documents of fewer than {SHORTEST_PIECE}" if self.never_read else ""
        return f"{self.left_out:.1%} of the tokens are left out of each epoch{never}"

    def read(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, None]:
        """As `lm.data.batches.Stream.read`, for slots of one step, whose sequences have `length` tokens."""
        slots_per_step = self.step_tokens // self.longest
        starts = self.sequence_starts(int(slots[0]) // slots_per_step).reshape(slots_per_step, -1)[slots % slots_per_step]
        return self.split.around(starts.ravel(), length, 0, self.split.n_tokens), None

    def sequence_starts(self, step: int) -> np.ndarray:
        """Where the sequences of a step begin: int64 (step_tokens / length,)."""
        length = self(step)
        place = step % self.steps_per_epoch
        before = int((self._order[:place] == length).sum())
        count = self.step_tokens // length
        return self._starts[length][before * count : (before + 1) * count]
