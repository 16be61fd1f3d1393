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
from lm.evaluation.evaluation_kind import Advance, Measurement, ignore
from lm.evaluation.held_out import by_sequence, lengths_axis, tokens_sha256
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.model.inference import for_inference
from lm.runs.series import Sample, Series, Shown
from lm.schema import Plain, to_plain

QUESTION_SEED = 0  # seed of the sequences with questions, the same for every model
ROLL_OUT = "roll-out"  # answers after the model's own, in place of the correct ones
_AFTER = "given the correct answers to earlier questions"


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answers in some sequences: one entry for each of their tokens, in the order of sequences and questions."""

    nll: np.ndarray  # (N,) fp32, nats: -log p of the token, those before it given
    right: np.ndarray  # (N,) bool: it is the most likely one, those before it given
    rolled_out: np.ndarray  # (N,) bool: it is the one that greedy decoding gives, with the model's own answers in the sequence
    sequence: np.ndarray  # (N,) int64, index of its sequence
    place: np.ndarray  # (N,) int64, within the answer

    def whole(self, right: np.ndarray) -> np.ndarray:
        """Each answer: (Q,) bool, all of its tokens `right` (N,)."""
        return np.minimum.reduceat(right, np.flatnonzero(self.place == 0)).astype(bool)


def read_answers(decoder: Decoder, examples: list[Example], where: Device, progress: Advance = ignore) -> Answers:
    """Read sequences of one length and give each answer's tokens, in fp32: teacher-forced, and by greedy decoding. Collective.

    Teacher-forced, the correct answers to earlier questions stand in the sequence: a whole answer is right when greedy decoding gives it
    after those. In the roll-out the model's own answers stand there instead (`roll_out`). Holds the logits of answers only, and no
    T x T weights where the normalizer needs none. `progress` is called with the number of sequences done.
    """
    spans = [(index, *span) for index, each in enumerate(examples) for span in each.questions]
    tokens = np.array([(index, end, end - begin) for index, begin, stop in spans for end in range(begin, stop)])
    sequence, position, place = tokens[:, 0], tokens[:, 1] - 1, tokens[:, 2]
    asked = np.bincount(sequence, minlength=len(examples))  # tokens asked for in each sequence
    column = np.arange(len(sequence)) - np.repeat(np.cumsum(asked) - asked, asked)

    def measure(part: list[int]) -> Tensor:
        mine = np.isin(sequence, part)
        batch = Batch.of(np.stack([examples[index].tokens for index in part])).to(where.device)
        spot = torch.from_numpy(np.stack((np.searchsorted(part, sequence[mine]), position[mine]))).to(where.device)
        hidden, targets = decoder.hidden(batch)[spot[0], spot[1]], batch.targets[spot[0], spot[1]]
        said = argmax_tokens(hidden, decoder.head)
        hits = [(answer == targets).float() for answer in (said, roll_out(decoder, batch, spot, said))]
        result = torch.zeros(len(part), max(asked), 3, device=where.device)
        result[spot[0], torch.from_numpy(column[mine])] = torch.stack((token_nll(hidden, decoder.head, targets), *hits), 1)
        return result

    lengths = [len(each.tokens) - 1 for each in examples]
    nll, right, rolled_out = by_sequence([decoder], lengths, (max(asked), 3), where, measure, progress)[sequence, column].T
    return Answers(nll, right > 0.5, rolled_out > 0.5, sequence, place)


def roll_out(decoder: Decoder, batch: Batch, place: Tensor, said: Tensor) -> Tensor:
    """The answers of greedy decoding, in which the model's own stand in place of the correct ones: (N,) int64, token by token.

    A sequence is read again with what the model says in it until it says the same: what it says depends on what stands before alone, so
    each reading settles the next answer's token at least, mostly all. A settled sequence leaves the batch. One of which only the last
    token is wrong costs nothing; any other one a reading up to its first answer, and readings of what follows.

    Args:
        place: (2, N) int64, sequence and position at which each token of an answer is predicted, in their order.
        said: (N,) int64, the most probable ones after the correct ones.
    """
    last = place[0] != torch.cat((place[0, 1:], place.new_tensor([-1])))  # last of its sequence: nothing is asked for after it
    rows = place[0, (said != batch.targets[place[0], place[1]]) & ~last].unique()  # sequences that are not settled, those of the cache
    if not len(rows):
        return said
    tokens, spoken, cache = batch.tokens.clone(), said.clone(), DecodingCache(batch.tokens.size(1))
    first = int(place[1, torch.isin(place[0], rows)].min()) + 1  # no answer stands before it
    decoder(tokens[rows, :first], cache=cache)
    for _ in range(int(place[0].bincount().max())):
        mine = torch.isin(place[0], rows)
        sequence, position = place[:, mine & (place[1] + 1 < tokens.size(1))]
        tokens[sequence, position + 1] = spoken[mine & (place[1] + 1 < tokens.size(1))]
        later = mine & (place[1] >= first)
        hidden = decoder(tokens[rows, first:], cache=cache.fork(1))
        again = argmax_tokens(hidden[torch.searchsorted(rows, place[0, later]), place[1, later] - first], decoder.head)
        changed = place[0, later][(again != spoken[later]) & ~last[later]]
        spoken[later] = again
        unsettled = torch.isin(rows, changed)
        if not unsettled.any():
            break
        rows, cache = rows[unsettled], cache.select(unsettled)
    return spoken


class AnswerMeasurement(Measurement):
    """A measurement of answers in fp32, at `length_factors` training lengths, under each of its inference settings."""

    def precision(self, where: Device) -> str:
        return "32"  # answers are judged in fp32 whatever the model was trained in

    @cached_property
    def lengths(self) -> list[int]:
        """Predicted tokens in a sequence, ascending."""
        return lengths_of(self.asked.length_factors, self.config.data)

    def at_lengths(self, metric: str, unit: str, samples: list[Sample], **given: object) -> Series:
        """A series over `lengths`, with a sample each; of fractions more is better, of losses less. `given`: its other fields."""
        means = np.array([np.average(sample.values[:, 0], weights=sample.weights) for sample in samples])
        better = "higher" if unit == "fraction" else "lower"
        return self.series(metric, unit, better, means, axis=lengths_axis(self.lengths), samples=tuple(samples), **given)

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
        given |= {"setting": setting, "references": {} if chance is None else {name: chance}, "interval": "wilson", "shown": shown}
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
    """Accuracy by length of whole answers and of single tokens, and the loss of answers.

    Whole answers are given after the correct answers to earlier questions, and, where a sequence asks several, in a roll-out.
    """

    kind = "recall"

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: a task does not fit into one of its sequences, or the held-out text is too short for one."""
        super().__init__(config, store)
        self.tasks = self.asked.asked_tasks(config.data)
        self.haystack = Text(store) if any(task.vocab_size is None for task in self.tasks) else None
        for task, length in product(self.tasks, self.lengths):
            factors = self.asked.length_factors
            check_room(task, length, "test", self.asked.sequences, self.haystack, "eval.recall.length_factors", factors)

    @property
    def options(self) -> dict[str, Plain]:
        tasks: list[Plain] = [to_plain(task) for task in self.tasks]
        return self.with_settings(seed=QUESTION_SEED, tasks=tasks, lengths=self.lengths, sequences=self.asked.sequences)

    @property
    def work(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.asked.sequences * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        named = list(zip(self.tasks, task_names([to_plain(task) for task in self.tasks]), strict=True))
        series: list[Series] = []
        for setting, (task, name) in product(self.asked.inference, named):
            series += self._of_task(for_inference(decoder, setting), task, name, setting.label, where, progress)
        return series

    def _of_task(self, decoder: Decoder, task: Task, name: str, setting: str, where: Device, progress: Advance) -> list[Series]:
        """The series of one task under one inference setting."""
        samples: dict[str, list[Sample]] = {metric: [] for metric in ("whole", "rolled out", "token", "loss")}  # of each length
        for length in self.lengths:
            examples = [example(task, QUESTION_SEED, index, length, "test", self.haystack) for index in range(self.asked.sequences)]
            sha256, answers = tokens_sha256(each.tokens for each in examples), read_answers(decoder, examples, where, progress)
            asked_in = answers.sequence[answers.place == 0]
            samples["whole"].append(by_unit(sha256, asked_in, answers.whole(answers.right)))
            samples["rolled out"].append(by_unit(sha256, asked_in, answers.whole(answers.rolled_out)))
            samples["token"].append(by_unit(sha256, answers.sequence, answers.right))
            samples["loss"].append(by_unit(sha256, answers.sequence, answers.nll))
        plain, chance = to_plain(task), task.chance
        given = {"what": plain.pop("name"), "options": plain}
        logged = tuple(self.asked.metric(name, length, setting) for length in self.lengths)
        series = [self.accuracy(samples["whole"], chance and chance.teacher_forced, setting, logged=logged, **given)]
        if any(sample.weights.max() > 1 for sample in samples["whole"]):  # else it is the same
            series.append(self.accuracy(samples["rolled out"], chance and chance.rollout, f"{setting}, {ROLL_OUT}", **given))
        series.append(self.at_lengths("token accuracy", "fraction", samples["token"], setting=setting, **given))
        return [*series, self.at_lengths("loss of answers", "nats per token", samples["loss"], setting=setting, **given)]
