"""Sequences of the tasks over symbols (lm/config/task_config.py): associative recall, copying, induction, maximum, flip-flop."""

import numpy as np

from lm.config.task_config import HELD_OUT, MQAR, Copy, FlipFlop, Induction, Maximum
from lm.data.tasks.examples import Draw, Example, require, span
from lm.data.tasks.in_text import Text


def mqar(task: MQAR, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `MQAR`."""
    width = 1 if task.joined else 2
    require(length + 1 - width * task.pairs - 2 * task.queries, f"{task.pairs} pairs and {task.queries} queries", length)
    pairs = 1 + draw.one(task.pairs) if task.varied and draw.subset == "train" else task.pairs
    queries = min(task.queries, pairs)
    front = length + 1 - 2 * queries
    first_filler, first_pair = task.keys + task.values, task.keys + task.values + task.filler
    tokens = first_filler + draw.below(task.filler, length + 1)
    at, asked = draw.places(front, [width] * pairs), draw.order(pairs, queries)
    keys, values = _lists(task, pairs, draw)
    if task.joined:
        tokens[at] = first_pair + keys * task.values + values
    else:
        tokens[at], tokens[at + 1] = keys, task.keys + values
    tokens[front::2], tokens[front + 1 :: 2] = keys[asked], task.keys + values[asked]
    answers = span(np.arange(front + 1, length + 1, 2))
    return Example(tokens, answers, span(at[asked] + width - 1), pairs, span(at[asked], width))


def _lists(task: MQAR, pairs: int, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Different keys, and different values for them."""
    for _ in draw.tries():
        keys, order = draw.order(task.keys, pairs), draw.order(task.values)
        if task.held_out == "pairs":
            break
        if draw.owns(*keys, *order[:pairs]):
            return keys, order[:pairs]
    # Each key takes the first value that is free and fits: values / 8 or more fit, others hold at most pairs - 1 of them.
    free = ((keys[:, None] + order) % HELD_OUT == 0) == (draw.subset == "test")  # (pairs, values)
    values = np.empty(pairs, np.int64)
    for pair in range(pairs):
        first = int(free[pair].argmax())
        values[pair] = order[first]
        free[:, first] = False
    return keys, values


def copy(task: Copy, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `Copy`."""
    room = length - 2 * task.span
    require(room, f"a string of {task.span} and its copy", length)
    tokens = task.symbols + draw.below(task.filler, length + 1)
    start, end = draw.one(room + 1), length + 1 - task.span
    for _ in draw.tries():
        string = draw.below(task.symbols, task.span)
        if draw.owns(*string):
            break
    tokens[start : start + task.span] = tokens[end:] = string
    tokens[end - 1] = task.vocab_size - 1
    return Example(tokens, span(end, task.span), span(start, task.span), 1, span(start, task.span))


def induction(task: Induction, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `Induction`."""
    require(length - 3, "two marks and two symbols", length)
    start = draw.one(length - 2)  # place of the first mark; the last two tokens are the question and its answer
    for _ in draw.tries():
        tokens = draw.below(task.symbols, length + 1)
        tokens[start] = tokens[-2] = task.symbols
        tokens[-1] = tokens[start + 1]
        if draw.owns(*tokens):
            break
    return Example(tokens, span(length), span(start + 1), 1, span(start, 2))


def maximum(task: Maximum, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `Maximum`."""
    require(length - 1 - 2 * task.items, f"{task.items} items, the mark and the answer", length)
    tokens = task.priorities + task.payloads + draw.below(task.filler, length + 1)
    at = draw.places(length - 1, [2] * task.items)
    for _ in draw.tries():
        priorities, payloads = draw.order(task.priorities, task.items), draw.order(task.payloads, task.items)
        if draw.owns(*priorities, *payloads):
            break
    tokens[at], tokens[at + 1] = priorities, task.priorities + payloads
    best = int(priorities.argmax())
    tokens[-2], tokens[-1] = task.vocab_size - 1, tokens[at[best] + 1]
    return Example(tokens, span(length), span(at[best] + 1), task.items, span(at[best], 2))


def flip_flop(task: FlipFlop, draw: Draw, length: int, text: Text | None = None) -> Example:
    """A sequence of `FlipFlop`."""
    count, start = divmod(length + 1, 2)
    require(count - 2, "a write and a read", length)
    write, ignore, read = task.symbols, task.symbols + 1, task.symbols + 2
    few = round((1 - task.ignored) / 2 * 2**32)
    for _ in draw.tries():
        drawn = draw.below(2**32, count)
        verbs = np.select([drawn < few, drawn < 2 * few], [write, read], ignore)
        verbs[0], verbs[-1] = write, read
        last = np.maximum.accumulate(np.where(verbs == write, np.arange(count), 0))  # write that holds at each instruction
        written = draw.below(task.symbols, count)
        symbols = np.where(verbs == read, written[last], written)
        tokens = np.concatenate((np.full(start, task.symbols + 3), np.stack((verbs, symbols), 1).ravel()))
        if draw.owns(*tokens):
            break
    reads = np.flatnonzero(verbs == read)
    writes = start + 2 * last[reads]
    return Example(tokens, span(start + 2 * reads + 1), span(writes + 1), task.symbols, span(writes, 2))
