"""How long the sequences of a step are: a pure function of (store, seed, step)."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from lm.data.store import Split
from lm.data.stratified_sampler import BLOCK, StratifiedSampler, members

SHORTEST = 16  # tokens of the shortest piece of a document
_LENGTH_SEED = 2**63  # keeps the draws of lengths apart from those of sequences


class NoFullStep(ValueError):
    """The documents have too few pieces of each length to fill a step."""


class Lengths(Protocol):
    """Tokens in each sequence of a step."""

    shortest: int

    def __call__(self, step: int) -> int:
        """The length of the sequences of `step` (0-based)."""


class Curriculum:
    """Lengths that follow each other: `starts` maps the fraction of the run at which each begins, 0 first, to the length."""

    def __init__(self, starts: Mapping[float, int], max_steps: int):
        self.starts = dict(sorted((round(fraction * max_steps), int(length)) for fraction, length in starts.items()))
        self.shortest = min(starts.values())

    def __call__(self, step: int) -> int:
        first = list(self.starts)
        return self.starts[first[bisect_right(first, step) - 1]]

    def until(self, step: int) -> dict[int, int]:
        """The lengths of the steps before `step`, by the step each begins at."""
        return {first: length for first, length in self.starts.items() if first < step}


class MixedLengths:
    """Lengths drawn for each step by weight: each length's weight is its fraction of the steps, and so of the tokens."""

    def __init__(self, weights: Mapping[int, float], seed_words: tuple[int, ...]):
        self.lengths = sorted(weights)
        self.shortest = int(self.lengths[0])
        self.sampler = StratifiedSampler([weights[length] for length in self.lengths], (*seed_words, _LENGTH_SEED))

    def __call__(self, step: int) -> int:
        block, place = divmod(step, BLOCK)
        return int(self.lengths[self.sampler.block(block)[0][place]])


class DocumentPieces:
    """Sequences within documents: each document is cut into pieces of powers of two tokens.

    A document of D tokens gives D // `longest` pieces of `longest` and one for each binary digit of the rest, down to
    `SHORTEST` (after Dataset Decomposition, arXiv 2405.13226): no padding, and fewer than `SHORTEST` of its tokens, at its two ends,
    are left out, others in each epoch. The first token of all follows the last. A step has sequences of one length. In an epoch each
    length has as many steps as its pieces fill, in a random order; those over (fewer than a step's tokens at each length) wait for
    another epoch. Pieces of a length that fill no step are never read.

    Args:
        longest: tokens of the longest sequence, a power of two.
        step_tokens: tokens of a step, a multiple of `longest`.

    Raises:
        NoFullStep: pieces of no length fill a step.
    """

    def __init__(self, split: Split, longest: int, step_tokens: int, seed_words: tuple[int, ...]):
        self.split, self.longest, self.step_tokens, self.seed_words = split, longest, step_tokens, seed_words
        self.shortest = SHORTEST
        offsets = np.asarray(split.offsets)
        sizes = np.diff(offsets)
        self.offsets, self.spare = offsets[:-1], sizes % SHORTEST
        self.pieces: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # length: document, place in it
        begun = np.zeros_like(sizes)
        length = longest
        while length >= SHORTEST:
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
