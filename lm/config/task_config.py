"""The options of synthetic tasks: what their rows hold, what chance gives, and which options contradict each other.

The rows themselves are made in lm/data/tasks.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm.errors import Problem
from lm.schema import Plain, key

HELD_OUT = 8  # one in so many contents is in test rows only


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


class Task:
    """Options of a synthetic task. Training rows and test rows have contents of their own; each task says which."""

    name: ClassVar[str]

    @property
    def vocab_size(self) -> int | None:
        """Symbols 0 to V - 1 that rows are made of; None: those of a tokenizer."""
        return None

    @property
    def guessing(self) -> Guessing | None:
        """What chance gives in a test row; None where that is not one number."""
        return None


@dataclass
class MQAR(Task):
    """Multi-query associative recall (arXiv 2312.04927): pairs of key and value among filler, then keys: which value has each?

    Symbols: keys, then values, then filler, then, if `joined`, pairs: one for each key and value, by key. The queries are the
    row's last 2 `queries` tokens, key and value by turns; keys and values of a row are all different, no key is asked for
    twice, and filler is neither: a value stands in its pair and in its answer, and nowhere else.

    Disjoint: lists of (key, value), by their hash; single pairs may be in rows of either kind. With `held_out: pairs` a pair whose
    key and value sum to a multiple of 8 is in test rows only, any other in training rows only: a model that knows which pairs
    training has is then wrong in test rows more often than chance.
    """

    name: ClassVar[str] = "mqar"
    keys: int = key(64, "different keys", ge=1)
    values: int = key(64, "different values", ge=1)
    filler: int = key(32, "different symbols of filler", ge=1)
    pairs: int = key(8, "pairs in a row", ge=1)
    queries: int = key(8, "keys asked for at the row's end", ge=1)
    joined: bool = key(False, "a pair is one symbol, that of its key and value: one look finds it; else two, and a key must be found first")
    held_out: Literal["lists", "pairs"] = key("lists", "what test rows have to themselves: lists of pairs, or single pairs")
    varied: bool = key(False, "training rows have 1 to `pairs` pairs, at random, and no more queries; test rows all of them")

    @property
    def vocab_size(self) -> int:
        return self.keys + self.values + self.filler + (self.keys * self.values if self.joined else 0)

    @property
    def guessing(self) -> Guessing | None:
        return Guessing.among(self.pairs, self.queries)

    def problems(self) -> list[Problem]:
        found = [Problem("queries", self.queries, f"is more than pairs = {self.pairs}")] if self.queries > self.pairs else []
        if self.held_out == "pairs" and (self.joined or self.values < HELD_OUT * self.pairs):
            reason = f"single pairs need two symbols each and {HELD_OUT} times as many values as pairs"
            found.append(Problem("held_out", self.held_out, reason))
        limits = {"keys": self.keys, "values": self.values}
        return found + [Problem("pairs", self.pairs, f"is more than {name} = {n}") for name, n in limits.items() if n < self.pairs]


@dataclass
class Copy(Task):
    """Copying (after arXiv 2402.01032): a string among filler, a mark, and the string again, which is the answer.

    Symbols: those of strings, then filler, then the mark. Filler is not of strings' symbols, so the string stands nowhere else.

    Disjoint: strings, by their hash.
    """

    name: ClassVar[str] = "copy"
    symbols: int = key(32, "different symbols in strings", ge=2)
    filler: int = key(32, "different symbols of filler", ge=1)
    span: int = key(16, "symbols in a string", ge=4)

    @property
    def vocab_size(self) -> int:
        return self.symbols + self.filler + 1


@dataclass
class Induction(Task):
    """Induction heads (as in arXiv 2312.00752, sec. 4.1.2): a mark and a symbol among random ones; at the end the mark again: which symbol?

    Symbols: the random ones, then the mark, which stands twice. The answer's symbol is as frequent elsewhere as any other:
    leaving it out would tell it.

    Disjoint: whole rows, by their hash.
    """

    name: ClassVar[str] = "induction"
    symbols: int = key(16, "different symbols", ge=2)

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def guessing(self) -> Guessing | None:
        return Guessing(1 / self.symbols, 1 / self.symbols)


@dataclass
class Maximum(Task):
    """Retrieval of the largest (after arXiv 2410.01104): items among filler, then a mark: the payload of the highest priority?

    An item is a priority and a payload. Symbols: priorities from low to high, then payloads, then filler, then the mark.
    Priorities and payloads of a row are all different, so the answer stands in its item and nowhere else.

    Disjoint: the (priority, payload) of the items in the order of the row, by their hash.
    """

    name: ClassVar[str] = "max"
    priorities: int = key(64, "different priorities", ge=1)
    payloads: int = key(32, "different payloads", ge=1)
    filler: int = key(32, "different symbols of filler", ge=1)
    items: int = key(8, "items in a row", ge=1)

    @property
    def vocab_size(self) -> int:
        return self.priorities + self.payloads + self.filler + 1

    @property
    def guessing(self) -> Guessing | None:
        return Guessing.among(self.items, 1)

    def problems(self) -> list[Problem]:
        limits = {"priorities": self.priorities, "payloads": self.payloads}
        return [Problem("items", self.items, f"is more than {name} = {n}") for name, n in limits.items() if n < self.items]


@dataclass
class FlipFlop(Task):
    """Flip-flop (arXiv 2306.00946): write, ignore and read, each with a symbol; after a read comes what was written last.

    Symbols: those written, then write, ignore, read, then a start that makes rows of even `length` come out. The first
    instruction is a write, the last a read. What is written is also among the ignored: nothing but the order tells.
    Chance is not one number: half of the reads follow another read without a write between them and have its answer.

    Disjoint: whole rows, by their hash.
    """

    name: ClassVar[str] = "flip_flop"
    symbols: int = key(2, "different symbols that are written", ge=2)
    ignored: float = key(0.8, "share of the instructions that are to be ignored; writes and reads share the rest", ge=0, lt=1)

    @property
    def vocab_size(self) -> int:
        return self.symbols + 4


@dataclass
class Needle(Task):
    """A needle in a haystack (arXiv 2501.19399, 2505.17083): sentences "The special magic CITY number is: NUMBER." in text of the corpus.

    The row ends with a question for each needle and its number. Seven-digit numbers and cities of a row all differ; an asked
    number stands in its needle and in its answer and nowhere else in the text, and is the same tokens in both.

    Disjoint: numbers, by their hash; filler, by the corpus's split into documents. Cities are shared.
    """

    name: ClassVar[str] = "needle"
    needles: int = key(1, "needles that are asked for", ge=1, le=32)
    distractors: int = key(0, "needles of other cities that are not", ge=0, le=32)
    depth: float | None = key(None, "share of the filler before the first asked needle; null: random. Others are anywhere", ge=0, le=1)
    absent: bool = key(False, "leave the asked needles out: the control, which nothing but chance can answer")

    @property
    def guessing(self) -> Guessing | None:
        return None if self.absent else Guessing.among(self.needles + self.distractors, self.needles)


@dataclass
class Passkey(Task):
    """The pass key among grass (arXiv 2305.16300): "The pass key is KEY. Remember it. KEY is the pass key.", five digits, asked at the end.

    The key stands twice in its sentence, in the answer, and nowhere else, as the same tokens each time.

    Disjoint: keys, by their hash; with filler of the corpus, that too, by its split into documents.
    """

    name: ClassVar[str] = "passkey"
    filler: Literal["grass", "corpus"] = key("grass", 'around the key: "The grass is green. …" over and over, or the corpus')
    depth: float | None = key(None, "share of the filler before the key; null: random", ge=0, le=1)
    absent: bool = key(False, "leave the key out: the control, which nothing but chance can answer")


TASKS: dict[str, type[Task]] = {task.name: task for task in (MQAR, Copy, Induction, Maximum, FlipFlop, Needle, Passkey)}


def task_names(tasks: list[dict[str, Plain]]) -> list[str]:
    """A name for each task, given as plain data; those of one name are told apart by the options in which they differ."""
    names = []
    for task in tasks:
        alike = [other for other in tasks if other["name"] == task["name"]]
        told = [key for key in task if any(other.get(key) != task[key] for other in alike)]
        options = ", ".join(f"{key} {str(task[key]).lower() if isinstance(task[key], bool) else task[key]}" for key in told)
        names.append(f"{task['name']} ({options})" if options else task["name"])
    return names
