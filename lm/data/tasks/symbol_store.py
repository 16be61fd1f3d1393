"""The token store of a run without text: the symbols of its tasks, and the first sequences of each as its documents."""

from typing import TYPE_CHECKING

import numpy as np

from lm.config.data_config import END_OF_TEXT
from lm.config.task_config import Task
from lm.data.tasks.examples import Example, Subset
from lm.data.tasks.generators import example
from lm.schema import Plain, to_plain

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
