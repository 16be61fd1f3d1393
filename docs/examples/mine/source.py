"""Text that a program makes: docs/extending.md."""

from dataclasses import dataclass

from lm.config.data_config import OutsideSource
from lm.schema import key


@dataclass
class Sums(OutsideSource):
    """A document for each number, of sums with it."""

    count: int = key(100, "documents", ge=1)

    def documents(self):
        for number in range(self.count):
            yield " ".join(f"{other} + {number} = {other + number}." for other in range(60))

    def identity(self):
        return {}  # the options and the code are added: here they are all that documents depend on
