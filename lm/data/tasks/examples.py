"""What every synthetic task shares: a row with its questions, and random numbers that are the same everywhere."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from lm.schema import Plain

if TYPE_CHECKING:
    from lm.data.tasks.in_text import Text

Part = Literal["train", "test"]
PARTS = ("train", "test")
HELD_OUT = 8  # one in so many contents is in test rows only
MOST_INDICES = 2**63
MOST_CONTENTS = 50  # that are tried for one that fits into the row
MOST_TRIES = 1000  # contents that are drawn for one of the row's part


@dataclass(frozen=True, eq=False)
class Example:
    """A row, and what it asks.

    Spans are [start, stop) in `tokens`. A question is what stands before its span in `questions`; the tokens of the
    span are the answer. The row shows it in the span of `evidence`: the same tokens (or the one symbol of a joined pair).
    """

    tokens: np.ndarray  # (length + 1,) int64
    questions: np.ndarray  # (Q, 2) int64: where each answer is to be given, in order
    evidence: np.ndarray  # (Q, 2) int64: what each is to be read from; (0, 0) if the row doesn't show it
    candidates: int  # answers of this kind in the row; what picking among them gives: `Task.guessing`
    needles: np.ndarray  # (Q, 2) int64: the evidence with what belongs to it, such as its key or its sentence; (0, 0) likewise

    @property
    def answers(self) -> np.ndarray:
        """Which next tokens are targets, (length,) bool: entry t says so of token t + 1."""
        marked = np.zeros(len(self.tokens), bool)
        for start, stop in self.questions:
            marked[start:stop] = True
        return marked[1:]


@dataclass(frozen=True)
class Guessing:
    """Fraction of the answers that is right by chance: picked among those the row shows, without reading which one is asked for."""

    given: float  # the right answers to earlier questions stand in the row (teacher forcing), and are crossed off
    own: float  # the picks themselves stand there instead (greedy decoding)

    @classmethod
    def among(cls, candidates: int, asked: int) -> "Guessing | None":
        """`asked` different ones of the `candidates` that a row shows, none picked twice; None for one alone: finding it is the task.

        Question i has `candidates` - i answers left under teacher forcing; all `candidates` asked for make H_k / k. One's own picks
        tell nothing of what is right: they are an arrangement at random, each right once in `candidates`.
        """
        if candidates == 1:
            return None
        return cls(sum(1 / (candidates - earlier) for earlier in range(asked)) / asked, 1 / candidates)


class Task(ABC):
    """The options of a synthetic task, and the rows it makes of them.

    Training rows and test rows have streams of their own, and by `Draw.owns` contents of their own; each task says which.
    """

    name: ClassVar[str]

    @abstractmethod
    def make(self, draw: "Draw", length: int, text: "Text | None" = None) -> Example:
        """A row of exactly `length` + 1 tokens. Raises NoRoom: it doesn't fit."""

    @property
    def vocab_size(self) -> int | None:
        """Symbols 0 to V - 1 that rows are made of; None: those of a tokenizer."""
        return None

    @property
    def guessing(self) -> Guessing | None:
        """What chance gives in a test row; None where that is not one number."""
        return None

    def problems(self) -> list[tuple[str, str]]:
        """(key, what is wrong with it) of options that contradict each other."""
        return []


def example(task: Task, seed: int, index: int, length: int, part: Part = "train", text: "Text | None" = None) -> Example:
    """Row `index` of a task: a pure function of the arguments, on any machine.

    Args:
        length: predicted tokens; the row has one more.
        part: of which rows: training and test never share a stream.
        text: tokenizer and filler of the tasks in text.

    Raises:
        NoRoom: the task doesn't fit into the row.
    """
    draw = Draw(seed, part, index)
    for last in reversed(range(MOST_CONTENTS)):
        try:
            made = task.make(draw, length, text)
            break
        except NoRoom:  # names and numbers differ in tokens: others may fit
            if not last:
                raise
    assert len(made.tokens) == length + 1
    return made


class Draw:
    """The random numbers of one row, from raw PCG64 output, which never changes between NumPy versions.

    Args:
        seed, index: below 2^32 and 2^63; no two rows share a stream.
    """

    def __init__(self, seed: int, part: Part, index: int):
        assert 0 <= seed < 2**32
        assert 0 <= index < MOST_INDICES
        self.part = part
        self.raw: Callable[[int], np.ndarray] = np.random.PCG64(np.random.SeedSequence((seed, PARTS.index(part), index))).random_raw

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
        """Where blocks of `widths` begin that lie in `room` positions side by side, in this order, all such choices alike: int64."""
        spare = room - sum(widths)
        gaps = np.sort(self.order(spare + len(widths), len(widths))) - np.arange(len(widths))  # filler before each block
        return gaps + np.cumsum([0, *widths[:-1]])

    def tries(self) -> Iterator[int]:
        """Counts the draws of contents until one of this part is found. Raises ValueError when there seems to be none."""
        yield from range(MOST_TRIES)
        raise ValueError(f"too few different contents to have some for {self.part} rows alone: allow longer rows or more symbols")

    def owns(self, *contents: int) -> bool:
        """True if a row of this part may have these contents: one in `HELD_OUT` is in test rows only, the others in training rows only."""
        return (fold(contents) % HELD_OUT == 0) == (self.part == "test")


def task_names(tasks: list[dict[str, Plain]]) -> list[str]:
    """A name for each task, given as plain data; those of one name are told apart by the options in which they differ."""
    names = []
    for task in tasks:
        alike = [other for other in tasks if other["name"] == task["name"]]
        told = [key for key in task if any(other.get(key) != task[key] for other in alike)]
        options = ", ".join(f"{key} {str(task[key]).lower() if isinstance(task[key], bool) else task[key]}" for key in told)
        names.append(f"{task['name']} ({options})" if options else task["name"])
    return names


def fold(contents: tuple[int, ...] | np.ndarray) -> int:
    """A hash of integers in their order, the same on any machine."""
    return int.from_bytes(hashlib.blake2b(np.asarray(contents, "<i8").tobytes(), digest_size=8).digest(), "little")


class NoRoom(ValueError):
    """A task that doesn't fit into a row."""


def require(room: int, what: str, length: int) -> None:
    """Raise NoRoom if `room`, the positions left for filler, is negative."""
    if room < 0:
        raise NoRoom(f"{what} need rows of at least {length - room} tokens, not {length}")


def span(start: int | np.ndarray, width: int = 1) -> np.ndarray:
    """Spans [start, start + width): (Q, 2) int64."""
    start = np.atleast_1d(start).astype(np.int64)
    return np.stack((start, start + width), 1)
