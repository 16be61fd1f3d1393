"""Makes the sequences of synthetic tasks (lm/config/data_config.py). Each sequence is a function of task, seed, subset,
index, length and text alone.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from lm.config.data_config import END_OF_TEXT, INVERSE_TEST_FRACTION, MQAR, Needle, Task
from lm.data.tokenizer import adds_leading_space, decode, encode_with_offsets, special_token_mask

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lm.data.store import Store

Subset = Literal["train", "test"]
SUBSETS: tuple[Subset, ...] = get_args(Subset)
# contents drawn until one belongs to the subset, or windows of filler until one lies within a document
MAX_ATTEMPTS = 1000
ENCODING_PREFIXES = (
    "x",
    ":",
    "\n",
)  # texts before a piece that is encoded; the first that does not merge with it is taken
MAX_DRAWS_TO_FIT = 50  # contents drawn until one fits into the sequence
STORE_SEED = 0  # seed of the sequences of a store without text, and of the sequences for evaluations on tasks


class TaskError(ValueError):
    """Raised if a task can't make the requested sequences."""


class NoRoomError(TaskError):
    """Raised if a task's contents don't fit into a sequence of the requested length."""


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of a task, and the spans [start, stop) of its tokens that hold the answers, and the evidence for them.

    Row q of `answer_spans` is the span of answer q, which follows question q. Row q of `evidence_spans` is the span of
    the earlier tokens that show answer q. There the sequence states the answer's tokens. With `MQAR.joined` it has
    instead one symbol that stands for both key and value.
    """

    tokens: np.ndarray  # (length + 1,) int64
    answer_spans: np.ndarray  # (Q, 2) int64: the span of the answer to each question, in order
    evidence_spans: np.ndarray  # (Q, 2) int64: the span that shows each answer; (0, 0) for an answer that is not shown
    # (Q, 2) int64: the span of each evidence and its key, mark or sentence; (0, 0) without evidence
    asked_needle_spans: np.ndarray

    @property
    def answer_mask(self) -> np.ndarray:
        """Return the mask of predictions that count, (length,) bool: entry t is true if token t + 1 is part of an
        answer.
        """
        is_answer = np.zeros(len(self.tokens), bool)
        for start, stop in self.answer_spans:
            is_answer[start:stop] = True
        return is_answer[1:]


class Draw:
    """Draws the random numbers of one sequence, from raw PCG64 output, which never changes between NumPy versions.

    Each (seed, subset, index) has its own stream of numbers; seed is below 2^32, index below 2^63.
    """

    def __init__(self, seed: int, subset: Subset, index: int):
        self.subset = subset
        self.raw_numbers: Callable[[int], np.ndarray] = np.random.PCG64(
            np.random.SeedSequence((seed, SUBSETS.index(subset), index))
        ).random_raw

    def integers(self, limit: int, count: int) -> np.ndarray:
        """Draw `count` integers from 0 to `limit` - 1: int64 (count,)."""
        return (self.raw_numbers(count) % np.uint64(limit)).astype(np.int64)

    def integer(self, limit: int) -> int:
        """Draw one integer from 0 to `limit` - 1."""
        return self.raw_numbers() % limit

    def permutation(self, n: int, count: int | None = None) -> np.ndarray:
        """Draw `count` (default: `n`) different integers from 0 to `n` - 1, in random order: int64 (count,)."""
        return np.argsort(self.raw_numbers(n), kind="stable")[:count]

    def block_starts(self, room: int, count: int, width: int) -> np.ndarray:
        """Draw the start positions of `count` disjoint blocks of `width` tokens within `room` positions: int64
        (count,), ascending. All choices are equally likely.
        """
        # the positions of blocks and spare tokens in order, with one position for each block
        positions = np.sort(self.permutation(room - count * (width - 1), count))
        return positions + (width - 1) * np.arange(count)

    def attempt_numbers(self) -> Iterator[int]:
        """Yield 0, 1, ... to a loop that draws contents, e.g. keys, until they suit the subset.

        Raises TaskError: the loop has drawn `MAX_ATTEMPTS` times.
        """
        yield from range(MAX_ATTEMPTS)
        raise TaskError(f"too few different contents to have some for {self.subset} sequences alone")

    def subset_has(self, *contents: int) -> bool:
        """Return whether `contents`, e.g. keys, belong to this subset. The hash of the contents decides: 1 in
        `INVERSE_TEST_FRACTION` contents is for test, the rest for training.
        """
        return (integer_hash(contents) % INVERSE_TEST_FRACTION == 0) == (self.subset == "test")


def integer_hash(contents: tuple[int, ...] | np.ndarray) -> int:
    """Return a 64-bit hash of a sequence of integers, the same on any machine."""
    return int.from_bytes(hashlib.blake2b(np.asarray(contents, "<i8").tobytes(), digest_size=8).digest(), "little")


def require_room(room: int, contents: str, length: int) -> None:
    """Raise NoRoomError if `room`, the number of positions left for filler in a sequence of `length` tokens, is
    negative.

    contents: what fills the other positions, in words, for the error message.
    """
    if room < 0:
        raise NoRoomError(f"{contents} need sequences of at least {length - room} tokens, not {length}")


class FillerText:
    """The tokenizer and the text of a token store, for tasks in text. The text is the filler around a task's sentences.

    Training sequences take filler from the training split, test sequences from held-out text.
    """

    def __init__(self, store: "Store"):
        self._tokenizer: Tokenizer = store.tokenizer()
        self._special_ids = np.flatnonzero(special_token_mask(self._tokenizer))
        self._split_by_subset = {"train": store.train, "test": store.val}
        # whether the tokenizer puts a space before a text, as Llama 2's does
        self._adds_leading_space = adds_leading_space(self._tokenizer)
        # the token of the space before a number, (1,), if the tokenizer adds spaces and never merges it; else (0,)
        numbers = [self.encode(f" {number}") for number in range(1, 1000)] if self._adds_leading_space else []
        is_separate = len({tokens[0] for tokens in numbers}) == 1 and min(map(len, numbers)) > 1
        self._number_space_ids = numbers[0][:1] if is_separate else np.empty(0, np.int64)

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of `text` as it stands within a longer text, without special tokens: int64 (tokens,)."""
        for anchor in ENCODING_PREFIXES if self._adds_leading_space else ():
            start = encode_with_offsets(self._tokenizer, anchor).ids
            ids = encode_with_offsets(self._tokenizer, anchor + text).ids
            if ids[: len(start)] == start:
                return np.array(ids[len(start) :], np.int64)
        return np.array(encode_with_offsets(self._tokenizer, text).ids, np.int64)

    def encode_before_number(self, text: str) -> np.ndarray:
        """Return `encode(text)` for a text that a number follows. The token of the space between them is appended if
        `encode_number` leaves it out.
        """
        return np.concatenate((self.encode(text), self._number_space_ids))

    def encode_number(self, number: int | str) -> np.ndarray:
        """Return the token ids of a number and the space before it: int64 (tokens,). If the tokenizer puts a space
        before each text, and always encodes it as a token of its own, this token is left out. `encode_before_number`
        then appends it to the text before the number.
        """
        return self.encode(f" {number}")[len(self._number_space_ids) :]

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of token ids (tokens,)."""
        return decode(self._tokenizer, tokens.tolist())

    def decode_until_special_token(self, tokens: np.ndarray) -> str:
        """Return the text of generated tokens up to the first special token, such as the end-of-text token."""
        return self.decode(tokens[: np.append(np.isin(tokens, self._special_ids), True).argmax()])

    def draw_filler(self, draw: Draw, count: int) -> np.ndarray:
        """Return `count` consecutive tokens from a random place of the text, int64 (count,), within one document if
        possible.

        The tokens may cross documents if no document is long enough, or if `MAX_ATTEMPTS` random places all cross
        documents.

        Raises TaskError: the split has fewer than `count` tokens.
        """
        split = self._split_by_subset[draw.subset]
        if split.n_tokens < count:
            raise TaskError(f"{count} tokens of filler are more than the {split.n_tokens} of the split")
        for _ in range(MAX_ATTEMPTS if split.longest > count else 1):
            start = draw.integer(split.n_tokens - count + 1)
            begin, end = np.searchsorted(split.offsets, (start, start + count - 1), "right")
            if begin == end and start > split.offsets[begin - 1]:  # a document begins with the end-of-text token
                break
        return split.take_windows(np.array([start]), count)[0]


# ---------------------------------------------------------------- recall over symbols


def make_mqar(task: MQAR, draw: Draw, length: int, unused_text: FillerText | None = None) -> Example:
    """Make a sequence of multi-query associative recall. Raises NoRoomError: pairs and queries don't fit into `length`
    predicted tokens.
    """
    width = 1 if task.joined else 2
    require_room(
        length + 1 - width * task.pairs - 2 * task.queries, f"{task.pairs} pairs and {task.queries} queries", length
    )
    query_start = length + 1 - 2 * task.queries
    first_filler_id, first_pair_id = task.keys + task.values, task.keys + task.values + task.filler
    tokens = first_filler_id + draw.integers(task.filler, length + 1)
    starts, query_pairs = draw.block_starts(query_start, task.pairs, width), draw.permutation(task.pairs, task.queries)
    keys, values = _keys_and_values(task, draw)
    if task.joined:
        tokens[starts] = first_pair_id + keys * task.values + values
    else:
        tokens[starts], tokens[starts + 1] = keys, task.keys + values
    tokens[query_start::2], tokens[query_start + 1 :: 2] = keys[query_pairs], task.keys + values[query_pairs]
    answers = np.add.outer(np.arange(query_start + 1, length + 1, 2), (0, 1))
    starts = starts[query_pairs]
    return Example(tokens, answers, np.add.outer(starts, (width - 1, width)), np.add.outer(starts, (0, width)))


def _keys_and_values(task: MQAR, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Draw the keys and the values of a sequence's pairs, so that they belong to its subset. Returns two int64 arrays
    (pairs,), indices of keys and indices of values, both from 0, not token ids.
    """
    for _ in draw.attempt_numbers():
        keys, order = draw.permutation(task.keys, task.pairs), draw.permutation(task.values)
        if task.held_out == "pairs":
            break
        if draw.subset_has(*keys, *order[: task.pairs]):
            return keys, order[: task.pairs]
    # Each key takes the first unused value whose pair belongs to this subset: values / 8 or more do, and other keys
    # take at most pairs - 1.
    is_free = ((keys[:, None] + order) % INVERSE_TEST_FRACTION == 0) == (draw.subset == "test")  # (pairs, values)
    values = np.empty(task.pairs, np.int64)
    for pair in range(task.pairs):
        value_number = int(is_free[pair].argmax())
        values[pair] = order[value_number]
        is_free[:, value_number] = False
    return keys, values


# ---------------------------------------------------------------- tasks in text


_CITY_NAMES = """
Accra Amsterdam Ankara Athens Baghdad Bangkok Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago
Copenhagen Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki Istanbul Jakarta Karachi Kyoto Lagos Lima
Lisbon London Madrid Manila Melbourne Mexico Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo
Ottawa Paris Prague Quito Riga Rome Santiago Seattle Seoul Shanghai Singapore Sofia Stockholm Sydney Tehran
Tokyo Toronto Vienna Warsaw Zurich"""
CITIES = tuple(_CITY_NAMES.split())


def make_needle(task: Needle, draw: Draw, length: int, text: FillerText | None = None) -> Example:
    """Make a sequence of needles in a haystack. Numbers are drawn until each occurs only in its own sentence and
    answer.
    """
    n_cities = task.needles + task.distractors
    cities = [CITIES[city] for city in draw.permutation(len(CITIES), n_cities)]
    sentences = {  # {index of a city: its sentence up to the number}
        index: text.encode_before_number(f" The special magic {cities[index]} number is:")
        for index in range(task.needles if task.absent else 0, n_cities)
    }
    form = "\nWhat is the special magic {0} number? The special magic {0} number is:"
    questions = {
        index: text.encode_before_number(form.format(cities[index]))
        for index in draw.permutation(task.needles).tolist()
    }
    for _ in draw.attempt_numbers():
        numbers: list[int] = []
        while len(numbers) < n_cities:
            number = 10**6 + draw.integer(9 * 10**6)
            if draw.subset_has(number) and number not in numbers:
                numbers.append(number)
        tokens = [text.encode_number(number) for number in numbers]
        sequence = _assemble_haystack(task, draw, length, text, tokens, sentences, questions)
        decoded_text = text.decode(sequence.tokens)
        if all(
            decoded_text.count(str(number)) == (index in sentences) + (index in questions)
            for index, number in enumerate(numbers)
        ):
            break
    return sequence


def _assemble_haystack(
    task: Needle,
    draw: Draw,
    length: int,
    text: FillerText,
    number_tokens: list[np.ndarray],
    sentence_by_city: dict[int, np.ndarray],
    question_by_city: dict[int, np.ndarray],
) -> Example:
    """Return the sequence of a needle task with filler, sentences and questions in their places.

    Args:
        number_tokens: the token ids of each city's number.
        sentence_by_city: for each city in the haystack, by index, the token ids of its sentence up to the number.
        question_by_city: for each city that is asked for, by index, the token ids of its question.

    Raises NoRoomError: the sentences and questions don't fit into `length` predicted tokens.
    """
    end = text.encode(".")
    whole_sentences = [np.concatenate((begin, number_tokens[index], end)) for index, begin in sentence_by_city.items()]
    ending = [part for index, question in question_by_city.items() for part in (question, number_tokens[index])]
    n_filler = length + 1 - sum(map(len, [*whole_sentences, *ending]))
    require_room(n_filler, "the needles and their questions", length)
    depths = draw.integers(n_filler + 1, len(sentence_by_city))  # tokens of filler before each sentence
    if task.depth is not None and not task.absent:
        depths[0] = round(task.depth * n_filler)
    order, widths = np.argsort(depths, kind="stable"), np.array([*map(len, whole_sentences)], np.int64)
    starts = np.empty_like(depths)
    starts[order] = depths[order] + np.cumsum(widths[order]) - widths[order]
    sentence_tokens = np.concatenate([np.empty(0, np.int64), *(whole_sentences[index] for index in order)])
    body = np.insert(text.draw_filler(draw, n_filler), np.repeat(depths[order], widths[order]), sentence_tokens)
    # from the end of a question to the end of its answer
    answers = (len(body) + np.cumsum([len(part) for part in ending])).reshape(-1, 2)
    spans = np.zeros((2, len(number_tokens), 2), np.int64)  # of each number in its sentence, and of its sentence
    for (index, begin), start, width in zip(sentence_by_city.items(), starts, widths, strict=True):
        spans[:, index] = start + np.array([[len(begin), len(begin) + len(number_tokens[index])], [0, width]])
    evidence, needles = spans[:, list(question_by_city)]
    return Example(np.concatenate((body, *ending)), answers, evidence, needles)


# ---------------------------------------------------------------- any task


# Functions that make a sequence of exactly length + 1 tokens by a task's options, or raise NoRoomError.
EXAMPLE_MAKERS: dict[type[Task], Callable[[Task, Draw, int, FillerText | None], Example]] = {
    MQAR: make_mqar,
    Needle: make_needle,
}


def make_example(
    task: Task, seed: int, index: int, length: int, subset: Subset = "train", text: FillerText | None = None
) -> Example:
    """Make sequence `index` of a task. The sequence depends on the arguments alone, and is the same on any machine.

    Args:
        length: number of predicted tokens; the sequence has one more token.
        subset: whether to make a training or a test sequence; the two never share a stream of random numbers.
        text: the tokenizer and filler, for tasks in text.

    Raises:
        NoRoomError: the task doesn't fit into the sequence.
        TaskError: no contents (keys, numbers or symbols) for this subset were found, or the text has too little filler.
    """
    draw = Draw(seed, subset, index)
    for tries_left in reversed(range(MAX_DRAWS_TO_FIT)):
        try:
            return EXAMPLE_MAKERS[type(task)](task, draw, length, text)
        except NoRoomError:  # names and numbers differ in their number of tokens: others may fit
            if not tries_left:
                raise


def check_task(task: Task, seed: int, length: int, subset: Subset, count: int, text: FillerText | None = None) -> None:
    """Raise TaskError if the task can't make sequences of `length` predicted tokens, or can't make `count` different
    ones.
    """
    make_example(task, seed, 0, length, subset, text)
    if count > (n_distinct := task.n_distinct_sequences(length, subset)):
        raise TaskError(f"{count:,} {subset} sequences can't all differ: there are about {n_distinct:,.0f}")


def symbol_tokenizer(tasks: list[Task]) -> "Tokenizer":
    """Make a tokenizer of the tasks' symbols: token i is the word "i", and the last id is the end-of-text token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = max(task.vocab_size for task in tasks)
    tokenizer = Tokenizer(
        models.WordLevel({str(symbol): symbol for symbol in range(size)} | {END_OF_TEXT: size}, unk_token=END_OF_TEXT)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
