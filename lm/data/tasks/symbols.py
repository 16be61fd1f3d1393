"""Tasks over symbols 0 to V - 1: associative recall, copying, induction, the largest of many, flip-flop."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from lm.data.tasks.examples import HELD_OUT, Draw, Example, Guessing, Task, require, span
from lm.data.tasks.in_text import Text
from lm.schema import key


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

    def problems(self) -> list[tuple[str, str]]:
        found = [("queries", f"is more than pairs = {self.pairs}")] if self.queries > self.pairs else []
        if self.held_out == "pairs" and (self.joined or self.values < HELD_OUT * self.pairs):
            found.append(("held_out", f"single pairs need two symbols each and {HELD_OUT} times as many values as pairs"))
        return found + [
            ("pairs", f"is more than {name} = {n}") for name, n in (("keys", self.keys), ("values", self.values)) if n < self.pairs
        ]

    def make(self, draw: Draw, length: int, text: Text | None = None) -> Example:
        width = 1 if self.joined else 2
        require(length + 1 - width * self.pairs - 2 * self.queries, f"{self.pairs} pairs and {self.queries} queries", length)
        pairs = 1 + draw.one(self.pairs) if self.varied and draw.part == "train" else self.pairs
        queries = min(self.queries, pairs)
        front = length + 1 - 2 * queries
        first_filler, first_pair = self.keys + self.values, self.keys + self.values + self.filler
        tokens = first_filler + draw.below(self.filler, length + 1)
        at, asked = draw.places(front, [width] * pairs), draw.order(pairs, queries)
        keys, values = self._contents(pairs, draw)
        if self.joined:
            tokens[at] = first_pair + keys * self.values + values
        else:
            tokens[at], tokens[at + 1] = keys, self.keys + values
        tokens[front::2], tokens[front + 1 :: 2] = keys[asked], self.keys + values[asked]
        answers = span(np.arange(front + 1, length + 1, 2))
        return Example(tokens, answers, span(at[asked] + width - 1), pairs, span(at[asked], width))

    def _contents(self, pairs: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """Different keys, and different values for them."""
        for _ in draw.tries():
            keys, order = draw.order(self.keys, pairs), draw.order(self.values)
            if self.held_out == "pairs":
                break
            if draw.owns(*keys, *order[:pairs]):
                return keys, order[:pairs]
        # Each key takes the first value that is free and fits: values / 8 or more fit, others hold at most pairs - 1 of them.
        free = ((keys[:, None] + order) % HELD_OUT == 0) == (draw.part == "test")  # (pairs, values)
        values = np.empty(pairs, np.int64)
        for pair in range(pairs):
            first = int(free[pair].argmax())
            values[pair] = order[first]
            free[:, first] = False
        return keys, values


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

    def make(self, draw: Draw, length: int, text: Text | None = None) -> Example:
        room = length - 2 * self.span
        require(room, f"a string of {self.span} and its copy", length)
        tokens = self.symbols + draw.below(self.filler, length + 1)
        start, end = draw.one(room + 1), length + 1 - self.span
        for _ in draw.tries():
            string = draw.below(self.symbols, self.span)
            if draw.owns(*string):
                break
        tokens[start : start + self.span] = tokens[end:] = string
        tokens[end - 1] = self.vocab_size - 1
        return Example(tokens, span(end, self.span), span(start, self.span), 1, span(start, self.span))


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

    def make(self, draw: Draw, length: int, text: Text | None = None) -> Example:
        require(length - 3, "two marks and two symbols", length)
        start = draw.one(length - 2)  # of the mark; the last two tokens are the question and its answer
        for _ in draw.tries():
            tokens = draw.below(self.symbols, length + 1)
            tokens[start] = tokens[-2] = self.symbols
            tokens[-1] = tokens[start + 1]
            if draw.owns(*tokens):
                break
        return Example(tokens, span(length), span(start + 1), 1, span(start, 2))


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

    def problems(self) -> list[tuple[str, str]]:
        counts = (("priorities", self.priorities), ("payloads", self.payloads))
        return [("items", f"is more than {name} = {n}") for name, n in counts if n < self.items]

    def make(self, draw: Draw, length: int, text: Text | None = None) -> Example:
        require(length - 1 - 2 * self.items, f"{self.items} items, the mark and the answer", length)
        tokens = self.priorities + self.payloads + draw.below(self.filler, length + 1)
        at = draw.places(length - 1, [2] * self.items)
        for _ in draw.tries():
            priorities, payloads = draw.order(self.priorities, self.items), draw.order(self.payloads, self.items)
            if draw.owns(*priorities, *payloads):
                break
        tokens[at], tokens[at + 1] = priorities, self.priorities + payloads
        best = int(priorities.argmax())
        tokens[-2], tokens[-1] = self.vocab_size - 1, tokens[at[best] + 1]
        return Example(tokens, span(length), span(at[best] + 1), self.items, span(at[best], 2))


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

    def make(self, draw: Draw, length: int, text: Text | None = None) -> Example:
        count, start = divmod(length + 1, 2)
        require(count - 2, "a write and a read", length)
        write, ignore, read = self.symbols, self.symbols + 1, self.symbols + 2
        few = round((1 - self.ignored) / 2 * 2**32)
        for _ in draw.tries():
            drawn = draw.below(2**32, count)
            verbs = np.select([drawn < few, drawn < 2 * few], [write, read], ignore)
            verbs[0], verbs[-1] = write, read
            last = np.maximum.accumulate(np.where(verbs == write, np.arange(count), 0))  # write that holds at each instruction
            written = draw.below(self.symbols, count)
            symbols = np.where(verbs == read, written[last], written)
            tokens = np.concatenate((np.full(start, self.symbols + 3), np.stack((verbs, symbols), 1).ravel()))
            if draw.owns(*tokens):
                break
        reads = np.flatnonzero(verbs == read)
        writes = start + 2 * last[reads]
        return Example(tokens, span(start + 2 * reads + 1), span(writes + 1), self.symbols, span(writes, 2))
