"""The options of synthetic tasks: the contents of their sequences, the accuracy of chance, and contradictions between
options.

The sequences themselves are made in lm/data/tasks.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, lgamma, log
from typing import ClassVar, Literal

from lm.errors import Problem
from lm.plain import Plain
from lm.schema import key

MAX_SYMBOLS, MAX_VOCABULARY = 2**16, 2**20  # most symbols of one kind; most symbols of a task, joined pairs included
TEST_DIVISOR = 8  # 1 in 8 of a task's contents (such as strings or keys) occurs in test sequences only


def chance_accuracy(candidates: int, questions: int) -> float | None:
    """Mean accuracy of answers picked at random among `candidates` that the sequence shows, over `questions` questions
    whose answers differ; None if there is only one candidate.

    The right answers to earlier questions stand in the sequence, and are not picked again: question i (from 0) has
    `candidates` - i answers left. With k questions and k candidates, chance is (1 + 1/2 + ... + 1/k) / k.
    """
    if candidates == 1:
        return None
    return sum(1 / (candidates - index) for index in range(questions)) / questions


class Task(ABC):
    """Base class of the options of synthetic tasks. After "Symbols:" the docstring of a task lists what its token ids
    stand for, in ascending order."""

    name: ClassVar[str]
    # the number V of symbols, 0 to V - 1, of a task over symbols; None for a task in text
    vocab_size: ClassVar[int | None] = None
    # chance level in test sequences; None if it differs between questions, or if they don't show the right answer among
    # others
    chance: ClassVar[float | None] = None

    @abstractmethod
    def entropy(self, length: int) -> float:
        """Entropy in nats, or a lower bound of the entropy, of the task's sequences of `length` predicted tokens."""

    def n_distinct(self, length: int, subset: Literal["train", "test"]) -> float:
        """The approximate number of different sequences that the subset can have; with more draws, some sequences
        repeat.
        """
        fraction = 1 / TEST_DIVISOR if subset == "test" else 1 - 1 / TEST_DIVISOR
        return fraction * exp(min(self.entropy(length), 100.0))


def _log_arrangements(n: int, k: int) -> float:
    """ln of the number of ordered lists of `k` different items out of `n`."""
    return lgamma(n + 1) - lgamma(n - k + 1)


@dataclass
class MQAR(Task):
    """Multi-query associative recall (arXiv 2312.04927): pairs of key and value among filler, then keys, each followed
    by its value.

    Symbols: keys, then values, then filler; if `joined`, then a symbol for each pair of key and value, ordered by key.
    A sequence ends with queries of two tokens, a key and its value. Keys and values of a sequence all differ, no key is
    asked for twice, and filler has symbols of its own. So a value occurs only in its pair and in its answer.

    Training and test share no list of (key, value): its hash decides to which of them it belongs. A single pair may
    occur in both. With `held_out: pairs` they share no pair. Test sequences then have the pairs whose key and value,
    each counted from 0, sum to a multiple of 8; training sequences have all others.
    A model that has memorised the pairs of training is then wrong in test sequences more often than chance.
    """

    name: ClassVar[str] = "mqar"
    keys: int = key(64, "different keys", ge=1, le=MAX_SYMBOLS)
    values: int = key(64, "different values", ge=1, le=MAX_SYMBOLS)
    filler: int = key(32, "different symbols of filler", ge=1, le=MAX_SYMBOLS)
    pairs: int = key(8, "pairs in a sequence", ge=1, le=MAX_SYMBOLS)
    queries: int = key(8, "keys asked for at the sequence's end", ge=1, le=MAX_SYMBOLS)
    joined: bool = key(
        False, "a pair is one symbol of key and value: single-hop; else two: the key must be found first"
    )
    held_out: Literal["lists", "pairs"] = key(
        "lists", "what test sequences have to themselves: lists of pairs, or single pairs"
    )

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.filler + (self.keys * self.values if self.joined else 0)

    @property
    def chance(self) -> float | None:
        return chance_accuracy(self.pairs, self.queries)

    def entropy(self, length: int) -> float:
        """Entropy of the pairs and the filler; the pairs' positions and the queries are not counted."""
        n_filler = max(0, length + 1 - (1 if self.joined else 2) * self.pairs - 2 * self.queries)
        list_entropy = _log_arrangements(self.keys, self.pairs) + _log_arrangements(self.values, self.pairs)
        return (
            list_entropy
            + n_filler * log(self.filler)
            - (self.pairs * log(TEST_DIVISOR) if self.held_out == "pairs" else 0)
        )

    def problems(self) -> Iterator[Problem]:
        if self.queries > self.pairs:
            yield Problem("queries", self.queries, f"is more than pairs = {self.pairs}")
        if self.held_out == "pairs" and (self.joined or self.values < TEST_DIVISOR * self.pairs):
            reason = f"single pairs need two symbols each and {TEST_DIVISOR} times as many values as pairs"
            yield Problem("held_out", self.held_out, reason)
        if self.vocab_size > MAX_VOCABULARY:
            reason = f"makes {self.vocab_size:,} symbols of keys and values, more than {MAX_VOCABULARY:,}"
            yield Problem("joined", self.joined, reason, "lower keys or values")
        limits = {"keys": self.keys, "values": self.values}
        yield from (
            Problem("pairs", self.pairs, f"is more than {name} = {n}") for name, n in limits.items() if n < self.pairs
        )


@dataclass
class Needle(Task):
    """A needle in a haystack (arXiv 2501.19399, 2505.17083): sentences "The special magic CITY number is: NUMBER." in
    text of the corpus.

    The sequence ends with a question for each needle, each followed by its seven-digit number. Numbers and cities in a
    sequence all differ. A number occurs only in its needle and in its answer, as the same tokens.

    Training and test share no number: its hash decides to which of them it belongs. Cities occur in both. Test
    sequences take their filler from held-out documents, training sequences from the others.
    """

    name: ClassVar[str] = "needle"
    needles: int = key(1, "needles that are asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not", ge=0, le=32)
    depth: float | None = key(
        None, "fraction of the filler before the first asked needle; null: random. Others are anywhere", ge=0, le=1
    )
    absent: bool = key(False, "leave the asked needles out: the control, which nothing but chance can answer")

    def entropy(self, length: int) -> float:
        """Entropy of the numbers alone; cities, the needles' positions and filler are not counted."""
        return (self.needles + self.distractors) * log(9 * 10**6)

    @property
    def chance(self) -> float | None:
        return None if self.absent else chance_accuracy(self.needles + self.distractors, self.needles)


TASKS = {v.name: v for v in (MQAR, Needle)}


def task_names(tasks: list[dict[str, Plain]]) -> list[str]:
    """A name for each of `tasks` (plain data), such as `mqar (pairs 8)`; options that differ between tasks of one name
    are in brackets.
    """
    names = []
    for task in tasks:
        namesakes = [namesake for namesake in tasks if namesake["name"] == task["name"]]
        differing_keys = [key for key in task if any(namesake.get(key) != task[key] for namesake in namesakes)]
        options = ", ".join(
            f"{key} {str(task[key]).lower() if isinstance(task[key], bool) else task[key]}" for key in differing_keys
        )
        names.append(f"{task['name']} ({options})" if options else task["name"])
    return names
