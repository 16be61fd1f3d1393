"""A sequence of a synthetic task with its questions, and the random numbers that it is made from, the same on any machine."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lm.config.task_config import HELD_OUT

Subset = Literal["train", "test"]
SUBSETS: tuple[Subset, ...] = get_args(Subset)
MOST_INDICES = 2**63
MOST_TRIES = 1000  # contents drawn until one belongs to the subset


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence, and the questions in it.

    Spans are [start, stop) in `tokens`. A span in `questions` holds the tokens of an answer; what stands before it is the
    question. The sequence shows the answer in the span of `evidence`: the same tokens (or the one symbol of a joined pair).
    """

    tokens: np.ndarray  # (length + 1,) int64
    questions: np.ndarray  # (Q, 2) int64: where each answer is to be given, in order
    evidence: np.ndarray  # (Q, 2) int64: where each answer is to be read; (0, 0) if the sequence doesn't show it
    candidates: int  # answers of this kind in the sequence; `Task.chance` is what picking among them gives
    needles: np.ndarray  # (Q, 2) int64: the evidence with what belongs to it, such as its key or its sentence; (0, 0) likewise

    @property
    def answers(self) -> np.ndarray:
        """Which next tokens are targets, (length,) bool: entry t is about token t + 1."""
        marked = np.zeros(len(self.tokens), bool)
        for start, stop in self.questions:
            marked[start:stop] = True
        return marked[1:]


class Draw:
    """The random numbers of one sequence, from raw PCG64 output, which never changes between NumPy versions.

    Args:
        seed, index: below 2^32 and 2^63; no two sequences share a stream.
    """

    def __init__(self, seed: int, subset: Subset, index: int):
        assert 0 <= seed < 2**32
        assert 0 <= index < MOST_INDICES
        self.subset = subset
        self.raw: Callable[[int], np.ndarray] = np.random.PCG64(np.random.SeedSequence((seed, SUBSETS.index(subset), index))).random_raw

    def below(self, limit: int, count: int) -> np.ndarray:
        """`count` integers from 0 to `limit` - 1: int64."""
        return (self.raw(count) % np.uint64(limit)).astype(np.int64)

    def one(self, limit: int) -> int:
        """An integer from 0 to `limit` - 1."""
        return self.raw() % limit

    def order(self, n: int, count: int | None = None) -> np.ndarray:
        """`count` (default: all) different integers from 0 to `n` - 1, in random order: int64."""
        return np.argsort(self.raw(n), kind="stable")[:count]

    def places(self, room: int, widths: list[int]) -> np.ndarray:
        """Starts of blocks of `widths` that lie in `room` positions in this order without overlap, uniform over all such choices: int64."""
        spare = room - sum(widths)
        gaps = np.sort(self.order(spare + len(widths), len(widths))) - np.arange(len(widths))  # filler before each block
        return gaps + np.cumsum([0, *widths[:-1]])

    def tries(self) -> Iterator[int]:
        """Counts the draws of contents until one belongs to this subset. Raises TaskError when there seems to be none."""
        yield from range(MOST_TRIES)
        raise TaskError(f"too few different contents to have some for {self.subset} sequences alone")

    def owns(self, *contents: int) -> bool:
        """True if a sequence of this subset may have these contents: 1 in `HELD_OUT` is for test sequences, the others for training."""
        return (fold(contents) % HELD_OUT == 0) == (self.subset == "test")


def fold(contents: tuple[int, ...] | np.ndarray) -> int:
    """A hash of integers in their order, the same on any machine."""
    return int.from_bytes(hashlib.blake2b(np.asarray(contents, "<i8").tobytes(), digest_size=8).digest(), "little")


class TaskError(ValueError):
    """A task that can't make the sequences that are asked for."""


class NoRoom(TaskError):
    """A task that doesn't fit into a sequence."""


def require(room: int, what: str, length: int) -> None:
    """Raise NoRoom if `room`, the positions left for filler, is negative."""
    if room < 0:
        raise NoRoom(f"{what} need sequences of at least {length - room} tokens, not {length}")


def span(start: int | np.ndarray, width: int = 1) -> np.ndarray:
    """Spans [start, start + width): (Q, 2) int64."""
    spans = np.empty((np.size(start), 2), np.int64)
    spans[:, 0] = start
    np.add(spans[:, 0], width, out=spans[:, 1])
    return spans
