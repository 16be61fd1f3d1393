"""Synthetic tasks: corpora whose rows are made, not read. Each is the options of one class and a pure function of (seed, index, length)."""

from lm.data.tasks.rows import Draw, Example, Guessing, Task, example, task_names
from lm.data.tasks.symbols import MQAR, Copy, FlipFlop, Induction, Maximum
from lm.data.tasks.text import Needle, Passkey, Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (MQAR, Copy, Induction, Maximum, FlipFlop, Needle, Passkey)}

__all__ = [
    "MQAR", "TASKS", "Copy", "Draw", "Example", "FlipFlop", "Guessing", "Induction", "Maximum", "Needle", "Passkey", "Task", "Text",
    "example", "task_names",
]  # fmt: skip
