"""Recall: how often a model gives a task's answers, at the training length and far beyond it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.config import Config, LongSetting, Schedule
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks import Example, Task, Text, example
from lm.data.tasks.store import STORE_SEED
from lm.errors import ConfigError, Problem
from lm.evaluation.devices import Device, over_ranks, undisturbed
from lm.evaluation.loss import EVAL_TOKENS, used_as
from lm.evaluation.measurement import Measurement, Progress, Row
from lm.evaluation.statistics import Interval, wilson
from lm.loss import chunk_rows
from lm.model import Decoder
from lm.schema import Plain, to_plain


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


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model made of each answer of a cell: one entry for each token of an answer, in the order of rows and questions."""

    nll: np.ndarray  # (N,) fp32, nats: -log p of the token, those before it given
    right: np.ndarray  # (N,) bool: it is the most likely one
    row: np.ndarray  # (N,) int64
    question: np.ndarray  # (N,) int64, within the row
    place: np.ndarray  # (N,) int64, within the answer
    candidates: int  # as `Example.candidates`
    sha256: str  # of the rows

    @property
    def whole(self) -> np.ndarray:
        """Each answer: (Q,) bool, all of its tokens right."""
        return np.minimum.reduceat(self.right, np.flatnonzero(self.place == 0)).astype(bool)


def recall_cells(tasks: Iterable[Task], seq_len: int, factors: Iterable[float], rows: int) -> list[Cell]:
    """Each of `tasks` at each of `factors` times the training length."""
    return [Cell(task, round(factor * seq_len), rows) for task in tasks for factor in factors]


def answer_cell(
    decoder: Decoder,
    cell: Cell,
    where: Device,
    text: Text | None = None,
    setting: LongSetting | None = None,
    progress: Progress = lambda rows: None,
) -> Answers:
    """Read the test rows of a cell and give each answer's tokens, teacher-forced, in fp32. Collective.

    A token that is right given the right ones before it is the one that greedy decoding gives, as long as all before it
    are: a whole answer counts as right when greedy decoding gives it. Rows are split over the ranks of `where`; every rank
    returns all. Holds the logits of answers only, and no T x T weights where the normalizer needs none.

    Args:
        text: of tasks in text.
        setting: how the model is used.
        progress: hears how many rows are done.
    """
    setting = setting or LongSetting()
    made = [example(cell.task, STORE_SEED, index, cell.length, "test", text) for index in range(cell.rows)]
    at = np.array([(row, end - 1) for row, one in enumerate(made) for begin, stop in one.questions for end in range(begin, stop)])

    def local() -> Tensor:
        result = torch.zeros(2, len(at))
        size, mine = max(1, EVAL_TOKENS // cell.length), np.arange(cell.rows)[where.rank :: where.world]
        for start in range(0, len(mine), size):
            where.check_time()
            rows = mine[start : start + size]
            taken = np.flatnonzero(np.isin(at[:, 0], rows))
            batch = Batch.of(np.stack([made[row].tokens for row in rows])).to(where.device)
            row, position = torch.from_numpy(np.stack((np.searchsorted(rows, at[taken, 0]), at[taken, 1]))).to(where.device)
            hidden = decoder.hidden(batch, setting.rope)[row, position]
            result[:, taken] = judge(hidden, decoder.head.weight, batch.targets[row, position]).cpu()
            progress(len(rows))
        return result

    with undisturbed(decoder), used_as(decoder, setting), torch.autocast(where.device.type, enabled=False):
        nll, right = over_ranks(where, local).numpy()
    return Answers(nll, right > 0.5, at[:, 0], *_places(made), max(one.candidates for one in made), _sha256(made))


def judge(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """-log p of each target, and 1.0 where no token is more likely: (2, N) fp32, from hidden (N, C) and the head (V, C)."""
    head, judged = weight.float().t(), []
    for h, y in zip(hidden.split(chunk_rows(weight)), targets.split(chunk_rows(weight)), strict=True):
        logits = h.float() @ head
        judged.append(torch.stack((torch.nn.functional.cross_entropy(logits, y, reduction="none"), (logits.argmax(-1) == y).float())))
    return torch.cat(judged, 1)


class Recall(Measurement):
    """Accuracy and loss of the answers of each task at each length, once for each way to use the model.

    `answer`: share of the questions answered right as a whole; `token`: share of the answers' tokens; both with 95 % Wilson
    intervals [share, low, high] that take the questions of a row as independent. `by_row`: each row's share of whole
    answers, for paired comparison. `nll`: nats per token of the answers. Always in fp32.
    """

    kind = "recall"

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        recall = config.eval.recall
        self.filler = None if config.data.symbolic else Text(store)
        self.cells = recall_cells(config.recall_tasks, config.data.seq_len, recall.lengths, recall.rows)
        for cell in self.cells:
            try:
                example(cell.task, STORE_SEED, 0, cell.length, "test", self.filler)
            except ValueError as error:
                lengths = [f"{length:g}" for length in recall.lengths]
                reason = f"{cell.task.name}, rows of {cell.length}: {error}"
                raise ConfigError([Problem("eval.recall.lengths", ", ".join(lengths), reason, "leave that length out")]) from None

    @property
    def schedule(self) -> Schedule:
        return self.config.eval.recall

    @property
    def settings(self) -> dict[str, Plain]:
        return {
            "seq_len": self.config.data.seq_len,
            "tasks": [to_plain(task) for task in self.config.recall_tasks],
            "lengths": sorted({cell.length for cell in self.cells}),
            "rows": self.config.eval.recall.rows,
            "ways": [to_plain(way) for way in self.config.eval.recall.settings],
        }

    @property
    def work(self) -> int:
        return sum(cell.rows for cell in self.cells) * len(self.config.eval.recall.settings)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        found = []
        for way in self.config.eval.recall.settings:
            for cell in self.cells:
                answers = answer_cell(decoder, cell, where, self.filler, way, progress)
                found.append({"label": way.label, **_summary(cell, answers)})
        return {"cells": found}

    def rows(self, result: dict[str, Plain]) -> list[Row]:
        found = []
        for cell in result["cells"]:
            where = f"{cell['task']['name']}, {cell['length']:,} tokens"
            found.append(Row(cell["label"], where, "answers right", *cell["answer"]))
            found.append(Row(cell["label"], where, "loss of answers", cell["nll"]))
        return found

    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        return {f"recall/{_name(result, cell)}": cell["answer"][0] for cell in result["cells"]}

    def text(self, result: dict[str, Plain]) -> str:
        return "answers right " + ", ".join(f"{100 * cell['answer'][0]:.1f} % ({_name(result, cell)})" for cell in result["cells"])


def _name(result: dict[str, Plain], cell: dict[str, Plain]) -> str:
    """A cell among those of a result: task, with its number if there are several of a name, length, setting."""
    names = [task["name"] for task in result["tasks"]]
    name = cell["task"]["name"]
    number = f"-{result['tasks'].index(cell['task']) + 1}" if names.count(name) > 1 else ""
    way = f" {cell['label']}" if len(result["ways"]) > 1 else ""
    return f"{name}{number} {cell['length']}{way}"


def _summary(cell: Cell, answers: Answers) -> dict[str, Plain]:
    whole, rows = answers.whole, answers.row[answers.place == 0]
    by_row = np.bincount(rows, whole, cell.rows) / np.bincount(rows, minlength=cell.rows)
    return {
        "task": to_plain(cell.task),
        "length": cell.length,
        "rows": cell.rows,
        "rows_sha256": answers.sha256,
        "candidates": answers.candidates,
        "questions": len(whole),
        "answer": _listed(wilson(int(whole.sum()), len(whole))),
        "token": _listed(wilson(int(answers.right.sum()), len(answers.right))),
        "nll": float(answers.nll.mean(dtype=np.float64)),
        "by_row": [round(float(share), 6) for share in by_row],
    }


def _listed(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]


def _places(made: list[Example]) -> tuple[np.ndarray, np.ndarray]:
    """The question, and the place in its answer, of each token of an answer."""
    both = [(which, place) for one in made for which, (begin, end) in enumerate(one.questions) for place in range(end - begin)]
    return tuple(np.array(both, np.int64).T)


def _sha256(made: list[Example]) -> str:
    return hashlib.sha256(np.concatenate([one.tokens for one in made]).astype("<i8").tobytes()).hexdigest()
