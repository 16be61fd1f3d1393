"""Recall: how often a model gives a task's answers, at the training length and far beyond it."""

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
    """Tasks' answers by length: how many are right as wholes, after the right answers to earlier questions and, where a sequence asks
    several, in a roll-out after the model's own; how many of their tokens are right, and their loss."""

    kind = "recall"
    version = 4

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: a task does not fit into one of its sequences, or the held-out text is too short for one."""
        super().__init__(config, store)
        asked = config.eval.recall
        self.tasks = asked.tasks or [share.task for share in config.data.tasks]
        self.haystack = Text(store) if any(task.vocab_size is None for task in self.tasks) else None
        for task, length in product(self.tasks, self.lengths):
            check_room(task, length, "test", self.haystack, "eval.recall.length_factors", asked.length_factors)

    @property
    def settings(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "seed": QUESTION_SEED,
            "tasks": [to_plain(task) for task in self.tasks],
            "lengths": self.lengths,
            "rows": self.schedule.rows,
            "settings": [to_plain(setting) for setting in self.schedule.settings],
        }

    @property
    def work(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.schedule.rows * len(self.schedule.settings)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> list[Series]:
        names = task_names([to_plain(task) for task in self.tasks])
        return [
            one
            for setting in self.schedule.settings
            for task, name in zip(self.tasks, names, strict=True)
            for one in self._of_task(for_inference(decoder, setting), task, name, setting.label, where, progress)
        ]

    def _of_task(self, decoder: Decoder, task: Task, name: str, setting: str, where: Device, progress: Progress) -> list[Series]:
        right, rolled_out, tokens, nll = [], [], [], []  # of each length
        for length in self.lengths:
            made = [example(task, QUESTION_SEED, index, length, "test", self.haystack) for index in range(self.schedule.rows)]
            sha256, found = tokens_sha256(one.tokens for one in made), answers(decoder, made, where, progress)
            asked_in = found.row[found.place == 0]
            right.append(by_unit(sha256, asked_in, found.whole(found.right)))
            rolled_out.append(by_unit(sha256, asked_in, found.whole(found.rolled_out)))
            tokens.append(by_unit(sha256, found.row, found.right))
            nll.append(by_unit(sha256, found.row, found.nll))
        plain, chance = to_plain(task), task.chance
        given = {"what": plain.pop("name"), "options": plain}
        used = f" {setting}" if len(self.schedule.settings) > 1 else ""
        logged = tuple(f"recall/{name} {length}{used}" for length in self.lengths)
        series = [self.answers_right(right, chance and chance.teacher_forced, setting, logged=logged, **given)]
        if any(sample.weights.max() > 1 for sample in right):  # else it is the same
            series.append(self.answers_right(rolled_out, chance and chance.rollout, f"{setting}, {ROLL_OUT}", **given))
        series.append(self.at_lengths("tokens right", "fraction", tokens, setting=setting, **given))
        return [*series, self.at_lengths("loss of answers", "nats per token", nll, setting=setting, **given)]
