"""A recall of the first symbol: docs/extending.md."""

from dataclasses import dataclass
from math import log

import numpy as np

from lm.config.task_config import Task
from lm.data.tasks import Example
from lm.schema import key


@dataclass
class First(Task):
    """Random symbols, then a mark, after which the first symbol is asked for."""

    symbols: int = key(16, "different symbols", ge=2)

    @property
    def vocab_size(self):
        return self.symbols + 1

    def entropy(self, length):
        return (length - 1) * log(self.symbols)

    def make(self, draw, length, text):
        tokens = draw.integers(self.symbols, length + 1)
        tokens[-2:] = self.symbols, tokens[0]
        first, last = np.array([[0, 1]]), np.array([[length, length + 1]])
        return Example(tokens, last, first, needles=first)
