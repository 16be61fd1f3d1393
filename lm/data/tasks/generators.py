"""The sequences of every synthetic task: a pure function of (task, seed, index, length)."""

from collections.abc import Callable

from lm.config.task_config import MQAR, Copy, FlipFlop, Induction, Maximum, Needle, Passkey, Task
from lm.data.tasks import in_text, symbols
from lm.data.tasks.examples import Draw, Example, NoRoom, Subset, TaskError
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
