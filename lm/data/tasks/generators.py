"""The sequences of every synthetic task: a pure function of (task, seed, index, length); and the token store of a run without text."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import END_OF_TEXT
from lm.config.task_config import MQAR, Copy, FlipFlop, Induction, Maximum, Needle, Passkey, Task
from lm.data.tasks import in_text, symbols
from lm.data.tasks.examples import Draw, Example, NoRoom, Subset, TaskError
from lm.data.tasks.in_text import Text
from lm.schema import Plain, to_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Makes a sequence of exactly length + 1 tokens of a task's options, or raises NoRoom.
Generator = Callable[[Task, Draw, int, Text | None], Example]
GENERATORS: dict[type[Task], Generator] = {
    MQAR: symbols.mqar,
    Copy: symbols.copy,
    Induction: symbols.induction,
    Maximum: symbols.maximum,
    FlipFlop: symbols.flip_flop,
    Needle: in_text.needle,
    Passkey: in_text.passkey,
}
MOST_CONTENTS = 50  # contents that are tried for one that fits into the sequence


def example(task: Task, seed: int, index: int, length: int, subset: Subset = "train", text: "Text | None" = None) -> Example:
    """Sequence `index` of a task: a pure function of the arguments, on any machine.

    Args:
        length: predicted tokens; the sequence has one more.
        subset: training or test sequences, which never share a stream of random numbers.
        text: tokenizer and filler for the tasks in text.

    Raises:
        NoRoom: the task doesn't fit into the sequence.
        TaskError: it has no contents for this subset, or the text too little filler.
    """
    draw = Draw(seed, subset, index)
    for last in reversed(range(MOST_CONTENTS)):
        try:
            made = GENERATORS[type(task)](task, draw, length, text)
            break
        except NoRoom:  # names and numbers differ in tokens: others may fit
            if not last:
                raise
    assert len(made.tokens) == length + 1
    return made


def check_task(task: Task, seed: int, length: int, subset: Subset, count: int, text: "Text | None" = None) -> None:
    """Raises TaskError if `count` sequences can't be made, or can't all differ."""
    example(task, seed, 0, length, subset, text)
    if count > (different := task.distinct(length, subset)):
        kind = "test" if subset == "test" else "training"
        raise TaskError(f"{count:,} {kind} sequences can't all differ: there are about {different:,.0f}")


# ---------------------------------------------------------------- the store of a run without text


SHOWN = 64  # sequences of each task in each split of a store
STORE_SEED = 0  # seed of those sequences, and of the sequences that tasks are evaluated on


def symbol_tokenizer(tasks: list[Task]) -> "Tokenizer":
    """Symbol i is the word "i"; the last id is the end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    size = max(task.vocab_size for task in tasks)
    tokenizer = Tokenizer(models.WordLevel({str(symbol): symbol for symbol in range(size)} | {END_OF_TEXT: size}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def symbol_sequences(tasks: list[Task], subset: Subset, seq_len: int) -> list[Example]:
    """The sequences of a split of a store, `SHOWN` of each task."""
    return [example(task, STORE_SEED, index, seq_len, subset) for task in tasks for index in range(SHOWN)]


def answer_counts(sequences: list[Example], vocab_size: int) -> np.ndarray:
    """How often each token is part of an answer: (V,) int64."""
    return np.bincount(np.concatenate([one.tokens[1:][one.answers] for one in sequences]), minlength=vocab_size)


def symbol_spec(tasks: list[Task], seq_len: int) -> dict[str, Plain]:
    """All that decides the store's content."""
    return {"source": {"name": "tasks", "tasks": [to_plain(task) for task in tasks], "seq_len": seq_len}}


def symbol_label(tasks: list[Task]) -> str:
    """A name for the store's folder."""
    return "+".join(dict.fromkeys(task.name for task in tasks))
