"""Recall: how often a model gives a task's answers, at the training length and far beyond it."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.config.eval_config import Schedule
from lm.config.inference_config import LongSetting
from lm.config.task_config import Task, task_names
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks.examples import Example, Part
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.errors import ConfigError, Problem
from lm.evaluation.held_out import EVAL_TOKENS, used_as
from lm.evaluation.measurement import Measurement, Progress, Row
from lm.evaluation.statistics import wilson
from lm.model.cross_entropy import likeliest, token_nll
from lm.model.decoder import Cache, Decoder
from lm.model.device import Device, over_ranks, undisturbed
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


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model made of each answer of a cell: one entry for each token of an answer, in the order of rows and questions."""

    nll: np.ndarray  # (N,) fp32, nats: -log p of the token, those before it given
    right: np.ndarray  # (N,) bool: it is the most likely one, those before it given
    rolled_out: np.ndarray  # (N,) bool: it is the one that greedy decoding gives, with the model's own answers in the row
    row: np.ndarray  # (N,) int64
    question: np.ndarray  # (N,) int64, within the row
    place: np.ndarray  # (N,) int64, within the answer
    candidates: int  # as `Example.candidates`
    sha256: str  # of the rows

    def whole(self, right: np.ndarray) -> np.ndarray:
        """Each answer: (Q,) bool, all of its tokens `right` (N,)."""
        return np.minimum.reduceat(right, np.flatnonzero(self.place == 0)).astype(bool)


def recall_cells(tasks: Iterable[Task], seq_len: int, factors: Iterable[float], rows: int) -> list[Cell]:
    """Each of `tasks` at each of `factors` times the training length."""
    return [Cell(task, round(factor * seq_len), rows) for task in tasks for factor in factors]


def check_room(task: Task, length: int, part: Part, text: Text | None, key: str, factors: Plain) -> None:
    """Raises ConfigError, naming `key` and its value `factors`, if a task has no room in `length` tokens, or too little text."""
    try:
        example(task, RECALL_SEED, 0, length, part, text)
    except ValueError as error:
        raise ConfigError([Problem(key, factors, f"{task.name} in rows of {length:,}: {error}", "leave that length out")]) from None


def answer_cell(
    decoder: Decoder,
    cell: Cell,
    where: Device,
    seed: int = 0,
    text: Text | None = None,
    setting: LongSetting | None = None,
    progress: Progress = lambda rows: None,
) -> Answers:
    """Read the test rows of a cell and give each answer's tokens, in fp32: teacher-forced, and by greedy decoding. Collective.

    Teacher-forced, the right answers to earlier questions stand in the row: a whole answer is right when greedy decoding gives
    it after those. In the roll-out the model's own answers stand there instead (`roll_out`). Rows are split over the ranks of
    `where`; every rank returns all. Holds the logits of answers only, and no T x T weights where the normalizer needs none.

    Args:
        seed: of the rows, which are the same for every model.
        text: of tasks in text.
        setting: how the model is used.
        progress: hears how many rows are done.
    """
    setting = setting or LongSetting()
    made = [example(cell.task, seed, index, cell.length, "test", text) for index in range(cell.rows)]
    at = np.array([(row, end - 1) for row, one in enumerate(made) for begin, stop in one.questions for end in range(begin, stop)])
    mine = np.arange(cell.rows)[where.rank :: where.world]
    batch = max(1, EVAL_TOKENS // cell.length)

    def local() -> Tensor:
        result = torch.zeros(3, len(at))
        for start in range(0, len(mine), batch):
            where.check_time()
            rows = mine[start : start + batch]
            taken = np.flatnonzero(np.isin(at[:, 0], rows))
            tokens = Batch.of(np.stack([made[row].tokens for row in rows])).to(where.device)
            place = torch.from_numpy(np.stack((np.searchsorted(rows, at[taken, 0]), at[taken, 1]))).to(where.device)
            with torch.autocast(where.device.type, enabled=False):
                hidden = decoder.hidden(tokens, setting.rope)[place[0], place[1]]
                targets, head = tokens.targets[place[0], place[1]], decoder.head.weight
                said = likeliest(hidden, head)
                hits = [answer == targets for answer in (said, roll_out(decoder, tokens, place, said, setting))]
                result[:, taken] = torch.stack((token_nll(hidden, head, targets), *(hit.float() for hit in hits))).cpu()
            progress(len(rows))
        return result

    with undisturbed(decoder), used_as(decoder, setting):
        nll, right, rolled_out = over_ranks(where, local).numpy()
    return Answers(nll, right > 0.5, rolled_out > 0.5, at[:, 0], *_places(made), max(one.candidates for one in made), _sha256(made))


def roll_out(decoder: Decoder, batch: Batch, place: Tensor, said: Tensor, setting: LongSetting) -> Tensor:
    """The answers of greedy decoding, in which the model's own stand in place of the right ones: (N,) int64, token by token.

    Rows are read again with what the model says in them until it says the same: what it says depends on what stands before alone,
    so each reading settles the next answer's token at least, mostly all. Costs nothing where only a row's last is wrong; else
    one more reading of the row, and one of what follows its first answer for every round: at most as many as tokens are asked for.

    Args:
        place: (2, N) int64, row and position at which each token of an answer is predicted, in their order.
        said: (N,) int64, the likeliest ones after the right ones.
    """
    wrong = said != batch.targets[place[0], place[1]]
    last = place[0] != torch.cat((place[0, 1:], place.new_tensor([-1])))  # of its row: nothing is asked for after it
    rows = place[0, wrong & ~last].unique()
    if not len(rows):
        return said
    mine = torch.isin(place[0], rows)
    row, position = torch.searchsorted(rows, place[0, mine]), place[1, mine]
    tokens, spoken = batch.tokens[rows], said[mine]
    first = int(position.min()) + 1  # no answer stands before it
    cache, later, shown = Cache(tokens.size(1)), position >= first, position + 1 < tokens.size(1)
    decoder(tokens[:, :first], setting.rope, cache=cache)
    for _ in range(int(row.bincount().max())):
        tokens[row[shown], position[shown] + 1] = spoken[shown]
        hidden = decoder(tokens[:, first:], setting.rope, cache=cache.fork(1))
        before, spoken = spoken, spoken.clone()
        spoken[later] = likeliest(hidden[row[later], position[later] - first], decoder.head.weight)
        if torch.equal(spoken, before):
            break
    return said.masked_scatter(mine, spoken)


def measure_cells(
    decoder: Decoder,
    cells: list[Cell],
    where: Device,
    text: Text | None = None,
    setting: LongSetting | None = None,
    progress: Progress = lambda rows: None,
) -> list[dict[str, Plain]]:
    """Accuracy and loss of a task's answers in each cell; arguments as of `answer_cell`. Collective.

    `answer`: fraction of the questions answered right as a whole, the right answers before them given; `rollout`: with the model's own
    in their place; `token`: fraction of the answers' tokens, as `answer`; with 95 % Wilson intervals [fraction, low, high] that
    take the questions of a row as independent. `chance`, `rollout_chance`: what `Task.guessing` gives of `answer` and `rollout`, or None.
    `by_row`, `rollout_by_row`: each row's fraction of whole answers, for paired comparison, and how many it has. `nll`: nats per
    token of the answers.
    """
    setting = setting or LongSetting()
    answered = (answer_cell(decoder, cell, where, RECALL_SEED, text, setting, progress) for cell in cells)
    return [{"label": setting.label, **_summary(cell, answers)} for cell, answers in zip(cells, answered, strict=True)]


class Recall(Measurement):
    """Accuracy and loss of tasks' answers by length, as `measure_cells`."""

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
        ways = self.config.eval.recall.settings
        found = [measure_cells(decoder, self.cells, where, self.haystack, way, progress) for way in ways]
        return {"cells": [cell for one in found for cell in one]}

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


def _summary(cell: Cell, answers: Answers) -> dict[str, Plain]:
    rows, guessing = answers.row[answers.place == 0], cell.task.guessing
    whole, rolled_out = answers.whole(answers.right), answers.whole(answers.rolled_out)
    questions = np.bincount(rows, minlength=cell.rows)

    def by_row(right: np.ndarray) -> list[float]:
        return [round(float(fraction), 6) for fraction in np.bincount(rows, right, cell.rows) / questions]

    return {
        "task": to_plain(cell.task),
        "length": cell.length,
        "rows": cell.rows,
        "rows_sha256": answers.sha256,
        "candidates": answers.candidates,
        "questions": len(whole),
        "answer": wilson(int(whole.sum()), len(whole)).listed(),
        "chance": guessing and guessing.given,
        "rollout": wilson(int(rolled_out.sum()), len(rolled_out)).listed(),
        "rollout_chance": guessing and guessing.own,
        "token": wilson(int(answers.right.sum()), len(answers.right)).listed(),
        "nll": float(answers.nll.mean(dtype=np.float64)),
        "by_row": by_row(whole),
        "rollout_by_row": by_row(rolled_out),
        "questions_by_row": questions.tolist(),
    }


def _places(made: list[Example]) -> tuple[np.ndarray, np.ndarray]:
    """The question, and the place in its answer, of each token of an answer."""
    both = [(which, place) for one in made for which, (begin, end) in enumerate(one.questions) for place in range(end - begin)]
    return tuple(np.array(both, np.int64).T)


def _sha256(made: list[Example]) -> str:
    return hashlib.sha256(np.concatenate([one.tokens for one in made]).astype("<i8").tobytes()).hexdigest()
