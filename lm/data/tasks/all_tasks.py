"""The table of synthetic tasks by name."""

from lm.data.tasks.examples import Task
from lm.data.tasks.in_text import Needle, Passkey
from lm.data.tasks.symbols import MQAR, Copy, FlipFlop, Induction, Maximum

TASKS: dict[str, type[Task]] = {task.name: task for task in (MQAR, Copy, Induction, Maximum, FlipFlop, Needle, Passkey)}
