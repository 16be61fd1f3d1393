"""Series of answers, by length of the sequence: what recall and needles share, beside how a model reads questions (`answers`)."""

from functools import cached_property

import numpy as np

from lm.config.eval_config import lengths_of
from lm.config.task_config import Task
from lm.data.tasks.examples import NoRoom, Subset, TaskError
from lm.data.tasks.generators import check_task, example
from lm.data.tasks.in_text import Text
from lm.errors import ConfigError, Problem
from lm.evaluation.measurement import Measurement
from lm.model.device import Device
from lm.runs.series import Axis, Sample, Series, Shown
from lm.schema import Plain

QUESTION_SEED = 0  # seed of the sequences with questions, the same for every model
ROLL_OUT = "roll-out"  # answers after the model's own, in place of the correct ones
_AFTER = "given the correct answers to earlier questions"


class AnswerMeasurement(Measurement):
    """A measurement of answers in fp32, at `length_factors` training lengths, under each of its inference settings."""

    def precision(self, where: Device) -> str:
        return "32"  # answers are judged in fp32 whatever the model was trained in

    @cached_property
    def lengths(self) -> list[int]:
        """Predicted tokens in a sequence, ascending."""
        return lengths_of(self.asked.length_factors, self.config.data)

    def at_lengths(self, metric: str, unit: str, samples: list[Sample], **given: object) -> Series:
        """A series over `lengths`, of a sample each; of fractions more is better, of losses less. `given`: what else it says."""
        axis = Axis("sequence length", "tokens", "in sequences of", tuple(self.lengths))
        means = np.array([np.average(sample.values[:, 0], weights=sample.weights) for sample in samples])
        better = "higher" if unit == "fraction" else "lower"
        return Series(self.kind, metric, unit, better, self.config.data.seq_len, means, axis=axis, samples=tuple(samples), **given)

    def accuracy(self, samples: list[Sample], chance: float | None, setting: str, **given: object) -> Series:
        """Fraction of questions whose whole answer is correct, for reports. `chance`: the accuracy of guessing, if it is one number."""
        shown = Shown(
            "Accuracy by sequence length",
            "sequences with questions",
            f"{int(samples[0].weights.sum()):,} different ones a length",
            f"accuracy by sequence length, {_AFTER}, or in a {ROLL_OUT} after the model's own",
            "chance, picking among the answers shown and not yet given",
            f"Accuracy is the fraction of held-out questions whose whole answer is correct, under greedy decoding in fp32 {_AFTER} "
            f"(in a {ROLL_OUT} after the model's own),",
        )
        name = f"chance, {ROLL_OUT}" if setting.endswith(ROLL_OUT) else "chance"
        references = {} if chance is None else {name: chance}
        given |= {"setting": setting, "references": references, "interval": "wilson", "shown": shown}
        return self.at_lengths("accuracy", "fraction", samples, **given)


def by_unit(sha256: str, unit: np.ndarray, values: np.ndarray) -> Sample:
    """Means of values (N,) by the unit (N,) that each belongs to, with how many there are; units from 0 to the largest."""
    counts = np.bincount(unit)
    return Sample(sha256, (np.bincount(unit, values) / counts)[:, None], counts, np.arange(len(counts)))


def too_short(task: Task, length: int, text: Text | None) -> str:
    """Why a task doesn't fit into test sequences of `length` tokens; empty if it does."""
    try:
        example(task, QUESTION_SEED, 0, length, "test", text)
    except NoRoom as error:
        return str(error)
    except TaskError:  # another reason, which `check_room` gives
        pass
    return ""


def check_room(task: Task, length: int, subset: Subset, count: int, text: Text | None, key: str, factors: Plain) -> None:
    """Raises ConfigError, naming `key` and its value `factors`, unless a task makes `count` different sequences of `length` tokens."""
    try:
        check_task(task, QUESTION_SEED, length, subset, count, text)
    except TaskError as error:
        raise ConfigError(
            [Problem(key, factors, f"{task.name} in sequences of {length:,}: {error}", "leave that length out, or ask for fewer")]
        ) from None
