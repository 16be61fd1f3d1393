"""Recall: how often a model gives a task's answers, at the training length and far beyond it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lm.config.eval_config import Schedule
from lm.config.inference_config import InferenceSetting
from lm.config.task_config import Task, task_names
from lm.config.tree import Config
from lm.data.store import Store
from lm.data.tasks.examples import Example, Part
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.errors import ConfigError, Problem
from lm.evaluation.answers import Answers, answers
from lm.evaluation.measurement import Measurement, Progress, Row
from lm.evaluation.statistics import wilson
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.schema import Plain, to_plain

RECALL_SEED = 0  # of the rows, the same for every model
OVER = "questions, 1 seed"  # what intervals of shares of one model's answers cover


@dataclass(frozen=True)
class Cell:
    """A task at a length.

    Attributes:
        task: with the options to measure it with; its test rows are taken.
        length: predicted tokens in a row.
        rows: how many rows.
    """

    task: Task
    length: int
    rows: int


def recall_cells(tasks: Iterable[Task], seq_len: int, factors: Iterable[float], rows: int) -> list[Cell]:
    """Each of `tasks` at each of `factors` times the training length."""
    return [Cell(task, round(factor * seq_len), rows) for task in tasks for factor in factors]


def check_room(task: Task, length: int, part: Part, text: Text | None, key: str, factors: Plain) -> None:
    """Raises ConfigError, naming `key` and its value `factors`, if a task has no room in `length` tokens, or too little text."""
    try:
        example(task, RECALL_SEED, 0, length, part, text)
    except ValueError as error:
        raise ConfigError([Problem(key, factors, f"{task.name} in rows of {length:,}: {error}", "leave that length out")]) from None


class Recall(Measurement):
    """Accuracy and loss of tasks' answers by length.

    `answer`: fraction of the questions answered right as a whole, the right answers before them given; `rollout`: with the model's own
    in their place; `token`: fraction of the answers' tokens, as `answer`; with 95 % Wilson intervals [fraction, low, high] that
    take the questions of a row as independent. `chance`, `rollout_chance`: what `Task.guessing` gives of `answer` and `rollout`, or None.
    `by_row`, `rollout_by_row`: each row's fraction of whole answers, for paired comparison, and how many it has. `nll`: nats per
    token of the answers.
    """

    kind = "recall"
    version = 3

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: a task does not fit into one of its rows, or the held-out text is too short for one."""
        super().__init__(config, store)
        asked = config.eval.recall
        tasks = asked.tasks or [share.task for share in config.data.tasks]
        self.cells = recall_cells(tasks, config.data.seq_len, asked.length_factors, asked.rows)
        self.haystack = Text(store) if any(task.vocab_size is None for task in tasks) else None
        for cell in self.cells:
            check_room(cell.task, cell.length, "test", self.haystack, "eval.recall.length_factors", asked.length_factors)

    @property
    def schedule(self) -> Schedule:
        return self.config.eval.recall

    def precision(self, where: Device) -> str:
        return "32"  # answers are judged in fp32 whatever the model was trained in

    @property
    def settings(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "seed": RECALL_SEED,
            "asked": [{"task": to_plain(cell.task), "length": cell.length, "rows": cell.rows} for cell in self.cells],
            "ways": [to_plain(way) for way in self.config.eval.recall.settings],
        }

    @property
    def work(self) -> int:
        return sum(cell.rows for cell in self.cells) * len(self.config.eval.recall.settings)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        return {
            "cells": [self._cell(decoder, cell, where, way, progress) for way in self.config.eval.recall.settings for cell in self.cells]
        }

    def _cell(self, decoder: Decoder, cell: Cell, where: Device, way: InferenceSetting, progress: Progress) -> dict[str, Plain]:
        made = [example(cell.task, RECALL_SEED, index, cell.length, "test", self.haystack) for index in range(cell.rows)]
        return {"label": way.label, **_summary(cell, made, answers(for_inference(decoder, way), made, where, progress))}

    def rows(self, result: dict[str, Plain]) -> list[Row]:
        found = []
        for name, cell in zip(self._names(result), result["cells"], strict=True):
            for metric, value, chance in (("answers right", "answer", "chance"), ("right in a roll-out", "rollout", "rollout_chance")):
                found.append(Row(cell["label"], name, metric, *cell[value], OVER))
                found += [] if cell[chance] is None else [Row(cell["label"], name, f"{metric}: chance", cell[chance])]
            found.append(Row(cell["label"], name, "loss of answers", cell["nll"]))
        return found

    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        return {f"recall/{name}": cell["answer"][0] for name, cell in zip(self._names(result), result["cells"], strict=True)}

    def text(self, result: dict[str, Plain]) -> str:
        named = zip(self._names(result), result["cells"], strict=True)
        parts = (f"{cell['answer'][0]:.1%}, in a roll-out {cell['rollout'][0]:.1%} ({name})" for name, cell in named)
        return f"answers right: {'; '.join(parts)}"

    def _names(self, result: dict[str, Plain]) -> list[str]:
        """A name for each cell: task, length, and how the model was used if in several ways."""
        tasks = task_names([cell["task"] for cell in result["cells"]])
        several = len(result["ways"]) > 1
        return [
            f"{task} {cell['length']}" + (f" {cell['label']}" if several else "") for task, cell in zip(tasks, result["cells"], strict=True)
        ]


def _summary(cell: Cell, made: list[Example], found: Answers) -> dict[str, Plain]:
    rows, guessing = found.row[found.place == 0], cell.task.guessing
    whole, rolled_out = found.whole(found.right), found.whole(found.rolled_out)
    questions = np.bincount(rows, minlength=cell.rows)

    def by_row(right: np.ndarray) -> list[float]:
        return [round(float(fraction), 6) for fraction in np.bincount(rows, right, cell.rows) / questions]

    return {
        "task": to_plain(cell.task),
        "length": cell.length,
        "rows": cell.rows,
        "rows_sha256": _sha256(made),
        "candidates": max(one.candidates for one in made),
        "questions": len(whole),
        "answer": wilson(int(whole.sum()), len(whole)).listed(),
        "chance": guessing and guessing.given,
        "rollout": wilson(int(rolled_out.sum()), len(rolled_out)).listed(),
        "rollout_chance": guessing and guessing.own,
        "token": wilson(int(found.right.sum()), len(found.right)).listed(),
        "nll": float(found.nll.mean(dtype=np.float64)),
        "by_row": by_row(whole),
        "rollout_by_row": by_row(rolled_out),
        "questions_by_row": questions.tolist(),
    }


def _sha256(made: list[Example]) -> str:
    return hashlib.sha256(np.concatenate([one.tokens for one in made]).astype("<i8").tobytes()).hexdigest()
