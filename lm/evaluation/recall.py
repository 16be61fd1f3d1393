"""Recall: accuracy of a task's answers in fp32, given the correct earlier answers and after the model's own, by sequence length."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor

from lm.config.eval_config import lengths_of
from lm.config.task_config import Task, task_names
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks.examples import Example, NoRoom, Subset, TaskError
from lm.data.tasks.generators import check_task, example
from lm.data.tasks.in_text import Text
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import Advance, Measurement
from lm.evaluation.held_out import by_sequence, tokens_sha256
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Axis, Sample, Series, Shown
from lm.schema import Plain, to_plain

# ---------------------------------------------------------------- all questions of a sequence, in one reading


@dataclass(frozen=True, eq=False)
class Answers:
    """What a model made of the answers in some sequences: one entry for each of their tokens, in the order of sequences and questions."""

    nll: np.ndarray  # (N,) fp32, nats: -log p of the token, those before it given
    right: np.ndarray  # (N,) bool: it is the most likely one, those before it given
    rolled_out: np.ndarray  # (N,) bool: it is the one that greedy decoding gives, with the model's own answers in the sequence
    sequence: np.ndarray  # (N,) int64, index of its sequence
    place: np.ndarray  # (N,) int64, within the answer

    def whole(self, right: np.ndarray) -> np.ndarray:
        """Each answer: (Q,) bool, all of its tokens `right` (N,)."""
        return np.minimum.reduceat(right, np.flatnonzero(self.place == 0)).astype(bool)


def answers(
    decoder: Decoder,
    made: list[Example],
    where: Device,
    progress: Advance = lambda sequences: None,
) -> Answers:
    """Read sequences of one length and give each answer's tokens, in fp32: teacher-forced, and by greedy decoding. Collective.

    Teacher-forced, the correct answers to earlier questions stand in the sequence: a whole answer is right when greedy decoding gives it
    after those. In the roll-out the model's own answers stand there instead (`roll_out`). Holds the logits of answers only, and no
    T x T weights where the normalizer needs none.

    Args:
        progress: called with the number of sequences done.
    """
    at = np.array([(i, end, end - begin) for i, one in enumerate(made) for begin, stop in one.questions for end in range(begin, stop)])
    sequence, position, place = at[:, 0], at[:, 1] - 1, at[:, 2]
    asked = np.bincount(sequence, minlength=len(made))  # tokens asked for in each sequence
    column = np.arange(len(sequence)) - np.repeat(np.cumsum(asked) - asked, asked)

    def measure(sequences: list[int]) -> Tensor:
        mine = np.isin(sequence, sequences)
        tokens = Batch.of(np.stack([made[one].tokens for one in sequences])).to(where.device)
        spot = torch.from_numpy(np.stack((np.searchsorted(sequences, sequence[mine]), position[mine]))).to(where.device)
        with torch.autocast(where.device.type, enabled=False):
            hidden = decoder.hidden(tokens)[spot[0], spot[1]]
            targets, head = tokens.targets[spot[0], spot[1]], decoder.head
            said = argmax_tokens(hidden, head)
            hits = [answer == targets for answer in (said, roll_out(decoder, tokens, spot, said))]
            result = torch.zeros(len(sequences), max(asked), 3, device=where.device)
            result[spot[0], torch.from_numpy(column[mine])] = torch.stack((token_nll(hidden, head, targets), *map(Tensor.float, hits)), 1)
        return result

    lengths = [len(one.tokens) - 1 for one in made]
    nll, right, rolled_out = by_sequence([decoder], lengths, (max(asked), 3), where, measure, progress)[sequence, column].T
    return Answers(nll, right > 0.5, rolled_out > 0.5, sequence, place)


def roll_out(decoder: Decoder, batch: Batch, place: Tensor, said: Tensor) -> Tensor:
    """The answers of greedy decoding, in which the model's own stand in place of the correct ones: (N,) int64, token by token.

    Sequences are read again with what the model says in them until it says the same: what it says depends on what stands before alone,
    so each reading settles the next answer's token at least, mostly all. Costs nothing where only a sequence's last is wrong; else
    one more reading of the sequence, and one of what follows its first answer for every round: at most as many as tokens are asked for.

    Args:
        place: (2, N) int64, sequence and position at which each token of an answer is predicted, in their order.
        said: (N,) int64, the most probable ones after the correct ones.
    """
    wrong = said != batch.targets[place[0], place[1]]
    last = place[0] != torch.cat((place[0, 1:], place.new_tensor([-1])))  # last of its sequence: nothing is asked for after it
    sequences = place[0, wrong & ~last].unique()
    if not len(sequences):
        return said
    mine = torch.isin(place[0], sequences)
    sequence, position = torch.searchsorted(sequences, place[0, mine]), place[1, mine]
    tokens, spoken = batch.tokens[sequences], said[mine]
    first = int(position.min()) + 1  # no answer stands before it
    cache, later, shown = DecodingCache(tokens.size(1)), position >= first, position + 1 < tokens.size(1)
    decoder(tokens[:, :first], cache=cache)
    for _ in range(int(sequence.bincount().max())):
        tokens[sequence[shown], position[shown] + 1] = spoken[shown]
        hidden = decoder(tokens[:, first:], cache=cache.fork(1))
        before, spoken = spoken, spoken.clone()
        spoken[later] = argmax_tokens(hidden[sequence[later], position[later] - first], decoder.head)
        if torch.equal(spoken, before):
            break
    return said.masked_scatter(mine, spoken)


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

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        names = task_names([to_plain(task) for task in self.tasks])
        return [
            one
            for setting in self.asked.inference
            for task, name in zip(self.tasks, names, strict=True)
            for one in self._of_task(for_inference(decoder, setting), task, name, setting.label, where, progress)
        ]

    def _of_task(self, decoder: Decoder, task: Task, name: str, setting: str, where: Device, progress: Advance) -> list[Series]:
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
