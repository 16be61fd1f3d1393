"""Recall: accuracy of a task's answers, at the training length and far beyond it."""

from itertools import product

from lm.config.task_config import Task, task_names
from lm.config.tree import Config
from lm.data.store import Store
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.evaluation.answer_series import QUESTION_SEED, ROLL_OUT, AnswerMeasurement, by_unit, check_room
from lm.evaluation.answers import answers
from lm.evaluation.measurement import Progress
from lm.evaluation.sequences import tokens_sha256
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Series
from lm.schema import Plain, to_plain


class Recall(AnswerMeasurement):
    """Accuracy by length: of whole answers, given the correct answers to earlier questions and, where a sequence asks several, in a
    roll-out after the model's own; of single tokens; and the loss of answers."""

    kind = "recall"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: a task does not fit into one of its sequences, or the held-out text is too short for one."""
        super().__init__(config, store)
        asked = config.eval.recall
        self.tasks = asked.asked_tasks(config.data)
        self.haystack = Text(store) if any(task.vocab_size is None for task in self.tasks) else None
        for task, length in product(self.tasks, self.lengths):
            check_room(task, length, "test", asked.sequences, self.haystack, "eval.recall.length_factors", asked.length_factors)

    @property
    def options(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "seed": QUESTION_SEED,
            "tasks": [to_plain(task) for task in self.tasks],
            "lengths": self.lengths,
            "sequences": self.asked.sequences,
            "inference": [to_plain(setting) for setting in self.asked.inference],
        }

    @property
    def work(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.asked.sequences * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
        names = task_names([to_plain(task) for task in self.tasks])
        return [
            one
            for setting in self.asked.inference
            for task, name in zip(self.tasks, names, strict=True)
            for one in self._of_task(for_inference(decoder, setting), task, name, setting.label, where, progress)
        ]

    def _of_task(self, decoder: Decoder, task: Task, name: str, setting: str, where: Device, progress: Progress) -> list[Series]:
        right, rolled_out, tokens, nll = [], [], [], []  # a sample of each length
        for length in self.lengths:
            made = [example(task, QUESTION_SEED, index, length, "test", self.haystack) for index in range(self.asked.sequences)]
            sha256, found = tokens_sha256(one.tokens for one in made), answers(decoder, made, where, progress)
            asked_in = found.sequence[found.place == 0]
            right.append(by_unit(sha256, asked_in, found.whole(found.right)))
            rolled_out.append(by_unit(sha256, asked_in, found.whole(found.rolled_out)))
            tokens.append(by_unit(sha256, found.sequence, found.right))
            nll.append(by_unit(sha256, found.sequence, found.nll))
        plain, chance = to_plain(task), task.chance
        given = {"what": plain.pop("name"), "options": plain}
        logged = tuple(self.asked.metric(name, length, setting) for length in self.lengths)
        series = [self.accuracy(right, chance and chance.teacher_forced, setting, logged=logged, **given)]
        if any(sample.weights.max() > 1 for sample in right):  # else it is the same
            series.append(self.accuracy(rolled_out, chance and chance.rollout, f"{setting}, {ROLL_OUT}", **given))
        series.append(self.at_lengths("token accuracy", "fraction", tokens, setting=setting, **given))
        return [*series, self.at_lengths("loss of answers", "nats per token", nll, setting=setting, **given)]
