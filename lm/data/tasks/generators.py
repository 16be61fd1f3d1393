"""The sequences of every synthetic task: a pure function of (task, seed, index, length)."""

from collections.abc import Callable

from lm.config.task_config import MQAR, Copy, FlipFlop, Induction, Maximum, Needle, Passkey, Task
from lm.data.tasks import in_text, symbols
from lm.data.tasks.examples import Draw, Example, NoRoom, Subset
from lm.data.tasks.in_text import Text

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
