"""Sequences of the tasks in text: needles in a haystack of the corpus, and the pass key among grass (lm/config/task_config.py)."""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from lm.config.task_config import Needle, Passkey
from lm.data.tasks.examples import Draw, Example, TaskError, require, span
from lm.data.tokenizer import decode, encoding_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lm.data.store import Split, Store

CITIES = (
    "Accra", "Amsterdam", "Ankara", "Athens", "Baghdad", "Bangkok", "Beijing", "Berlin", "Bogota", "Boston", "Brussels", "Budapest",
    "Cairo", "Chicago", "Copenhagen", "Dakar", "Delhi", "Denver", "Dublin", "Geneva", "Hanoi", "Havana", "Helsinki", "Istanbul",
    "Jakarta", "Karachi", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Melbourne", "Mexico", "Milan",
    "Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Naples", "Osaka", "Oslo", "Ottawa", "Paris", "Prague", "Quito", "Riga",
    "Rome", "Santiago", "Seattle", "Seoul", "Shanghai", "Singapore", "Sofia", "Stockholm", "Sydney", "Tehran", "Tokyo", "Toronto",
    "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MOST_TRIES = 1000  # windows that are tried for one within a document


class Text:
    """The tokenizer and the filler of a token store: training sequences take the training split, test sequences the held-out one."""

    def __init__(self, store: "Store"):
        self.vocab_size = store.vocab_size
        self._tokenizer: Tokenizer = store.tokenizer()
        self._splits: dict[str, Split] = {"train": store.train, "test": store.val}

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text by itself, int64."""
        return np.array(encoding_of(self._tokenizer, text).ids, np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """The text that tokens stand for."""
        return decode(self._tokenizer, tokens.tolist())

    def filler(self, draw: Draw, count: int) -> np.ndarray:
        """`count` tokens side by side, int64: a random window within a document if one is that long, else across documents.

        Raises:
            TaskError: the split has not so many tokens.
        """
        split = self._splits[draw.subset]
        if split.n_tokens < count:
            raise TaskError(f"{count} tokens of filler are more than the {split.n_tokens} of the split")
        for _ in range(MOST_TRIES if split.longest > count else 1):
            start = draw.one(split.n_tokens - count + 1)
            begin, end = np.searchsorted(split.offsets, (start, start + count - 1), "right")
            if begin == end and start > split.offsets[begin - 1]:  # a document begins with the end-of-text token
                break
        return split.take(np.array([start]), count)[0].astype(np.int64)


def needle(task: Needle, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `Needle`."""
    total = task.needles + task.distractors
    cities = [CITIES[city] for city in draw.order(len(CITIES), total)]
    starts = [text.encode(f" The special magic {city} number is:") for city in cities]
    questions = [text.encode(f"\nWhat is the special magic {city} number? The special magic {city} number is:") for city in cities]
    stop = text.encode(".")
    shown = range(task.needles if task.absent else 0, total)
    order = draw.order(task.needles)  # the order of the questions

    def build(numbers: list[np.ndarray]) -> Example:
        sentences = [np.concatenate((starts[which], numbers[which], stop)) for which in shown]
        asked = [(questions[which], numbers[which]) for which in order]
        inside = [(len(starts[which]), len(starts[which]) + len(numbers[which])) for which in shown]
        sequence, at = haystack(draw, length, sentences, asked, None if task.absent else task.depth, text.filler)
        spans = {which: (at[i], *(at[i] + np.array(inside[i])), at[i] + len(sentences[i])) for i, which in enumerate(shown)}
        held = np.array(
            [spans.get(which, (0, 0, 0, 0)) for which in order], np.int64
        )  # start of the sentence, start and stop of the number in it, stop of the sentence
        return Example(sequence, answer_spans(asked, length), held[:, 1:3], max(1, len(shown)), held[:, [0, 3]])

    times = [1 + (which in shown) if which < task.needles else 1 for which in range(total)]
    return without_leaks(draw, text, 7, times, build)


def passkey(task: Passkey, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `Passkey`."""
    parts = [text.encode(part) for part in (" The pass key is", ". Remember it.", " is the pass key.")]
    question, grass = text.encode(" What is the pass key? The pass key is"), text.encode(GRASS)

    def filler(draw: Draw, count: int) -> np.ndarray:
        return np.resize(grass, count) if task.filler == "grass" else text.filler(draw, count)

    def build(numbers: list[np.ndarray]) -> Example:
        (number,) = numbers
        sentence = np.concatenate((parts[0], number, parts[1], number, parts[2]))
        asked = [(question, number)]
        sequence, at = haystack(draw, length, [] if task.absent else [sentence], asked, task.depth, filler)
        held = span(at[0] + len(parts[0]), len(number)) if at else span(0, 0)
        whole = span(at[0], len(sentence)) if at else span(0, 0)
        return Example(sequence, answer_spans(asked, length), held, 1, whole)

    return without_leaks(draw, text, 5, [1 if task.absent else 3], build)


def without_leaks(draw: Draw, text: Text, digits: int, times: list[int], build: Callable[[list[np.ndarray]], Example]) -> Example:
    """The sequence that `build` makes of the tokens of random numbers with `digits` digits; the i-th stands `times[i]` times in the
    sequence's text."""
    for _ in draw.tries():
        numbers: list[int] = []
        while len(numbers) < len(times):
            number = 10 ** (digits - 1) + draw.one(9 * 10 ** (digits - 1))
            if draw.owns(number) and number not in numbers:
                numbers.append(number)
        made = build([text.encode(f" {number}") for number in numbers])
        whole = text.decode(made.tokens)
        if all(whole.count(str(number)) == expected for number, expected in zip(numbers, times, strict=True)):
            break
    return made


def haystack(
    draw: Draw,
    length: int,
    sentences: list[np.ndarray],
    asked: list[tuple[np.ndarray, np.ndarray]],
    depth: float | None,
    filler: Callable[[Draw, int], np.ndarray],
) -> tuple[np.ndarray, list[int]]:
    """Sentences in `filler`, then questions with their answers: the sequence (length + 1,), and where each sentence begins.

    Raises:
        NoRoom: no room for all of it.
    """
    end = [part for pair in asked for part in pair]
    room = length + 1 - sum(map(len, [*sentences, *end]))
    require(room, "the needles and their questions", length)
    before = draw.below(room + 1, len(sentences))  # filler before each sentence
    if depth is not None and sentences:
        before[0] = round(depth * room)
    order = np.argsort(before, kind="stable")
    hay, edges = filler(draw, room), [0, *before[order].tolist(), room]
    parts, at, position = [], [0] * len(sentences), 0
    for place, (start, stop) in enumerate(pairwise(edges)):
        parts.append(hay[start:stop])
        if place < len(order):
            which = int(order[place])
            parts.append(sentences[which])
            at[which] = position + stop - start
            position = at[which] + len(sentences[which])
    return np.concatenate(parts + end), at


def answer_spans(asked: list[tuple[np.ndarray, np.ndarray]], length: int) -> np.ndarray:
    """Where the answers stand in a sequence that ends with the questions and their answers: (Q, 2)."""
    stops = length + 1 - np.cumsum([0, *(len(question) + len(answer) for question, answer in asked[:0:-1])])[::-1]
    return np.array([(stop - len(answer), stop) for stop, (_, answer) in zip(stops, asked, strict=True)], np.int64)
