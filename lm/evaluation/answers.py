"""Answers to questions in long sequences, in fp32: recall of synthetic tasks, and needles in a haystack with heads'
attention to them.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.config.eval_config import lengths_from_factors
from lm.config.task_config import Needle, Task, task_names
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks import Example, TaskError, Text, check_task, example
from lm.diagnostics.attention_rows import HEADS
from lm.errors import ConfigError, Problem
from lm.evaluation.evaluation_kind import Advance, Measurement, ignore, tokens_sha256
from lm.evaluation.held_out import LENGTHS, by_sequence, by_setting, setting_words
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.plain import Plain, to_plain
from lm.runs.evaluations import NATS, rows, units_frame
from lm.runs.metric import Metric

Sample = tuple[np.ndarray, pd.DataFrame]  # (units, 1) values of sequences, and the sequences as `units_frame`
QUESTION_SEED = 0  # seed of the sequences with questions, the same for every model
HEADS_DEPTH = 0.5  # depth of the needles that heads' attention is measured on
ROLL_OUT = "roll-out"  # name of a setting in which sequences hold the model's own answers in place of the correct ones


@dataclass(frozen=True, eq=False)
class Answers:
    """A model's answers to questions in some sequences. Arrays have an entry per answer token, in the order of
    sequences and questions.
    """

    nll: np.ndarray  # (N,) fp32, nats: -log p of the token given the tokens before it
    hits: np.ndarray  # (N,) bool: the token is the most likely one given the tokens before it
    # (N,) bool: greedy decoding gives the token, with the model's own answers in the sequence
    rolled_out_hits: np.ndarray
    sequence: np.ndarray  # (N,) int64, index of the token's sequence
    token_index: np.ndarray  # (N,) int64, the token's index within its answer

    def whole_answers(self, token_hits: np.ndarray) -> np.ndarray:
        """Mask, (answers,) bool, of the answers for which `token_hits`, (N,) bool, is true at every token of the
        answer.
        """
        return np.minimum.reduceat(token_hits, np.flatnonzero(self.token_index == 0)).astype(bool)


def read_answers(decoder: Decoder, examples: list[Example], device: Device, progress: Advance = ignore) -> Answers:
    """Read a model's answers in sequences of one length, in fp32, teacher-forced and in a roll-out. All ranks call it.

    Teacher-forced, a sequence holds the correct answers to earlier questions; in the roll-out it holds the model's own
    (`roll_out`). An answer token is right if it is the model's most probable token there. Memory holds logits of answer
    tokens only. It holds no T x T attention weights of T tokens, unless the normalizer needs them. `progress` is called
    with the number of sequences done.
    """
    spans = [(index, *span) for index, item in enumerate(examples) for span in item.questions]
    tokens = np.array([(index, end, end - start) for index, start, stop in spans for end in range(start, stop)])
    sequence, position, token_index = tokens[:, 0], tokens[:, 1] - 1, tokens[:, 2]
    answer_token_counts = np.bincount(sequence, minlength=len(examples))  # answer tokens in each sequence
    column = np.arange(len(sequence)) - np.repeat(
        np.cumsum(answer_token_counts) - answer_token_counts, answer_token_counts
    )

    def measure(indices: list[int]) -> Tensor:
        is_in_batch = np.isin(sequence, indices)
        batch = Batch.of(np.stack([examples[index].tokens for index in indices])).to(device.device)
        locations = torch.from_numpy(
            np.stack((np.searchsorted(indices, sequence[is_in_batch]), position[is_in_batch]))
        ).to(device.device)
        start = int(locations[1].min())
        hidden = decoder.hidden(batch, start)[locations[0], locations[1] - start]
        targets = batch.targets[locations[0], locations[1]]
        predictions = argmax_tokens(hidden, decoder.head)
        hits = [
            (answer == targets).float() for answer in (predictions, roll_out(decoder, batch, locations, predictions))
        ]
        result = torch.zeros(len(indices), max(answer_token_counts), 3, device=device.device)
        result[locations[0], torch.from_numpy(column[is_in_batch])] = torch.stack(
            (token_nll(hidden, decoder.head, targets), *hits), 1
        )
        return result

    lengths = [len(item.tokens) - 1 for item in examples]
    nll, right, rolled_out = by_sequence([decoder], lengths, (max(answer_token_counts), 3), device, measure, progress)[
        sequence, column
    ].T
    return Answers(nll, right > 0.5, rolled_out > 0.5, sequence, token_index)


def roll_out(decoder: Decoder, batch: Batch, locations: Tensor, predictions: Tensor) -> Tensor:
    """Answer tokens, (N,) int64, of greedy decoding in sequences that hold the model's own earlier answers in place of
    the correct answers.

    A sequence is read again with the model's answers in it until the answers no longer change. Each reading settles at
    least the next answer token, and mostly all, since an answer token depends on earlier tokens alone. A settled
    sequence leaves the batch. A sequence whose answer tokens are all correct, except perhaps the last, is not read
    again. In the sequences that are read again, the tokens before the first answer token are read once, and later
    tokens in each reading.

    Args:
        locations: (2, N) int64, ascending: for each answer token the index of its sequence in the batch, and the
            position that predicts it.
        predictions: (N,) int64, the most probable token at each of these positions if the sequence holds the correct
            answers.
    """
    # (N,) bool: the sequence's last answer token
    is_last = locations[0] != torch.cat((locations[0, 1:], locations.new_tensor([-1])))
    # unsettled, as in `cache`
    sequences = locations[0, (predictions != batch.targets[locations[0], locations[1]]) & ~is_last].unique()
    if not len(sequences):
        return predictions
    tokens, answers, cache = batch.tokens.clone(), predictions.clone(), DecodingCache(batch.tokens.size(1))
    # index of the first answer token in these sequences
    start = int(locations[1, torch.isin(locations[0], sequences)].min()) + 1
    decoder(tokens[sequences, :start], cache=cache, first=start - 1)
    for _ in range(int(locations[0].bincount().max())):
        is_active = torch.isin(locations[0], sequences)
        sequence, position = locations[:, is_active & (locations[1] + 1 < tokens.size(1))]
        tokens[sequence, position + 1] = answers[is_active & (locations[1] + 1 < tokens.size(1))]
        is_read = is_active & (locations[1] >= start)
        hidden = decoder(tokens[sequences, start:], cache=cache.fork())
        updates = argmax_tokens(
            hidden[torch.searchsorted(sequences, locations[0, is_read]), locations[1, is_read] - start], decoder.head
        )
        changed_sequences = locations[0, is_read][(updates != answers[is_read]) & ~is_last[is_read]]
        answers[is_read] = updates
        is_unsettled = torch.isin(sequences, changed_sequences)
        if not is_unsettled.any():
            break
        sequences, cache = sequences[is_unsettled], cache.select(is_unsettled)
    return answers


class AnswerMeasurement(Measurement):
    """Base class of measurements of answers to questions, in fp32, under each inference setting and at each of several
    sequence lengths (the option `length_factors`, in training lengths)."""

    count_key: ClassVar[str]  # the option with the number of sequences or questions of a task and length
    in_fp32, fixed_lengths = True, True
    tasks: dict[str, Task]  # by name
    haystack: Text | None  # the corpus that fills sequences of its tasks; None: all tasks are over symbols

    @classmethod
    def names(cls, config: Config) -> dict[str, Sequence[object]]:
        options = cls.options_of(config)
        lengths = lengths_from_factors(options.length_factors, config.data)
        return {"SETTING": [setting.label for setting in options.inference], "LENGTH": lengths}

    @property
    def work_units(self) -> int:
        count, settings = getattr(self.eval_config, self.count_key), len(self.eval_config.inference)
        return len(self.tasks) * len(self.lengths) * count * settings

    def check_fits(self, task: Task, length: int, key: str, count: int = 1) -> None:
        """Raise ConfigError, which names the option `key`, unless `task` can make `count` different sequences of
        `length` tokens.
        """
        try:
            check_task(task, QUESTION_SEED, length, "test", count, self.haystack)
        except TaskError as error:
            reason, value = f"{task.name} in sequences of {length:,}: {error}", getattr(self.eval_config, key)
            remedy = "leave that length out, or ask for fewer"
            raise ConfigError([Problem(f"eval.{self.kind}.{key}", value, reason, remedy)]) from error

    @cached_property
    def lengths(self) -> list[int]:
        """The sequence lengths that are measured, in predicted tokens, ascending."""
        return lengths_from_factors(self.eval_config.length_factors, self.config.data)


ACCURACY = Metric(
    unit="fraction", better="higher", quantity="accuracy", units="questions", interval=True, axis=LENGTHS,
    title="Accuracy by sequence length", measured_on="sequences with questions",
    caption=f"accuracy by sequence length, given the correct answers to earlier questions, or in a {ROLL_OUT} "
    "after the model's own",
    levels="chance, picking among the answers shown and not yet given",
)  # fmt: skip


def accuracy(metric: Metric, questions: int, chance: float | None, options: str, guess: str = "chance") -> Metric:
    """The metric, an accuracy, for a number of questions a length. `chance` is the mean accuracy of guessing, None if
    unknown; `options`: of the task; `guess`: the name of `chance`.
    """
    references = () if chance is None else ((guess, chance),)
    return replace(metric, amount=f"{questions:,} different ones a length", references=references, options=options)


def by_length(metric: Metric, lengths: list[int], samples: Sequence[Sample], **fields: str) -> pd.DataFrame:
    """Rows of a metric with a sample at each length. `fields`: `task` and `setting` of `rows`."""
    points = zip(samples, lengths, strict=True)
    return pd.concat(rows(metric, *sample, [length], **fields) for sample, length in points)


def sequence_sample(sha256: str, sequence_index: np.ndarray, values: np.ndarray) -> Sample:
    """Each sequence's mean of its `values`, (N,), and the sequences, weighted by the number of these. `sequence_index`,
    (N,), is the sequence of each value, from 0."""
    counts = np.bincount(sequence_index)
    means = (np.bincount(sequence_index, values) / counts)[:, None]
    return means, units_frame(sha256, np.arange(len(counts)), counts)


class Recall(AnswerMeasurement):
    """Accuracy of whole answers and of answer tokens, and the loss of answers, by sequence length.

    Whole answers are measured teacher-forced and, where sequences have several questions, also in a roll-out
    (`read_answers`).
    """

    kind, count_key = "recall", "sequences"
    logged = (replace(ACCURACY, name="recall/{TASK} {LENGTH} {SETTING}", meaning="whole answers that are correct"),)

    @classmethod
    def names(cls, config: Config) -> dict[str, Sequence[object]]:
        settings = setting_words(cls.options_of(config).inference)
        return super().names(config) | {"SETTING": settings, "TASK": [*cls.tasks_of(config)]}

    @classmethod
    def tasks_of(cls, config: Config) -> dict[str, Task]:
        """The tasks that are asked for, by the names that tell them apart."""
        tasks = cls.options_of(config).asked_tasks(config.data)
        return dict(zip(task_names([to_plain(task) for task in tasks]), tasks, strict=True))

    @classmethod
    def sequences_of(cls, config: Config, metric: str) -> dict[str, Plain]:
        tasks = {
            name: to_plain(task) for name, task in cls.tasks_of(config).items() if metric.startswith(f"recall/{name} ")
        }
        return super().sequences_of(config, metric) | {"tasks": tasks}

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: a task does not fit into one of the lengths, or the held-out text is too short for the
        task.
        """
        super().__init__(config, store)
        self.tasks = self.tasks_of(config)
        self.haystack = Text(store) if any(task.vocab_size is None for task in self.tasks.values()) else None
        for task, length in product(self.tasks.values(), self.lengths):
            self.check_fits(task, length, "length_factors", self.eval_config.sequences)

    @property
    def options(self) -> dict[str, Plain]:
        return super().options | {"tasks": [to_plain(task) for task in self.tasks.values()]}

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        models = product(self.inference_models(decoder), self.tasks)
        return [
            block for (setting, model), name in models for block in self._blocks(model, name, setting, device, progress)
        ]

    def _blocks(
        self, decoder: Decoder, name: str, setting: str, device: Device, progress: Advance
    ) -> Iterator[pd.DataFrame]:
        """Rows of one task: accuracy of whole answers, teacher-forced and rolled out, of tokens, and the loss."""
        task, (metric,) = self.tasks[name], self.logged
        # each has one sample a length
        whole, rolled_out, token, loss = zip(
            *(self._samples(decoder, task, length, device, progress) for length in self.lengths), strict=True
        )
        task_options, chance = to_plain(task), task.chance
        fields, options = {"task": task_options.pop("name"), "setting": setting}, json.dumps(task_options)
        metric, questions = by_setting(metric, self.eval_config.inference), int(whole[0][1]["weight"].sum())
        about = accuracy(metric.named(TASK=name), questions, chance and chance.teacher_forced, options)
        yield by_length(about, self.lengths, whole, **fields)
        if any(units["weight"].max() > 1 for _, units in whole):  # else a roll-out has the same accuracy
            about = replace(metric, name="")
            about = accuracy(about, questions, chance and chance.rollout, options, f"chance, {ROLL_OUT}")
            yield by_length(about, self.lengths, rolled_out, **fields | {"setting": f"{setting}, {ROLL_OUT}"})
        about = Metric("", "fraction", "higher", "", "token accuracy", "questions", axis=LENGTHS, options=options)
        yield by_length(about, self.lengths, token, **fields)
        about = replace(about, unit=NATS, better="lower", quantity="loss of answers")
        yield by_length(about, self.lengths, loss, **fields)

    def _samples(self, decoder: Decoder, task: Task, length: int, device: Device, progress: Advance) -> list[Sample]:
        """By sequence: accuracy of whole answers, teacher-forced and rolled out, accuracy of tokens, and the loss."""
        examples = [
            example(task, QUESTION_SEED, index, length, "test", self.haystack)
            for index in range(self.eval_config.sequences)
        ]
        sha256 = tokens_sha256(item.tokens for item in examples)
        answers = read_answers(decoder, examples, device, progress)
        by_question = [answers.whole_answers(hits) for hits in (answers.hits, answers.rolled_out_hits)]
        asked = answers.sequence[answers.token_index == 0]
        samples = [sequence_sample(sha256, asked, hits) for hits in by_question]
        return samples + [sequence_sample(sha256, answers.sequence, values) for values in (answers.hits, answers.nll)]


# ---------------------------------------------------------------- needles


@dataclass(frozen=True)
class Trial:
    """A question about a number in a text: the prompt and the correct answer."""

    prompt: np.ndarray  # (T,) int64
    answer: np.ndarray  # (A,) int64
    number: str  # the correct number, in digits
    spans: np.ndarray  # (2, 2): [start, stop) in the prompt, of the number in its needle and of the needle's sentence
    sequence: int  # index of its sequence, which other trials may share


SCORED = (  # metric and unit of each column of `score`
    # 1 if what greedy decoding writes begins with the whole number; more digits may follow, as the loss on answers
    # teaches no model to stop
    ("exact", "fraction"),
    ("loss of answers", NATS),
)


def score(decoder: Decoder, questions: list[Trial], length: int, text: Text) -> Tensor:
    """Scores of questions with equally long prompts: (questions, metrics) fp32, with a column for each metric that
    `SCORED` lists.

    Each prompt is the beginning of a sequence of `length` tokens.
    """
    prompts = torch.from_numpy(np.stack([trial.prompt for trial in questions])).to(next(decoder.parameters()).device)
    cache = DecodingCache(length)
    first_logits = decoder.head(decoder(prompts, cache=cache, first=prompts.size(1) - 1)).float()  # (B, 1, V)
    outputs = _greedy_tokens(decoder, first_logits, cache.fork(), max(len(trial.answer) for trial in questions) + 2)
    answers = pad_sequence([torch.from_numpy(trial.answer) for trial in questions], True).to(prompts.device)  # (B, A)
    logits = first_logits
    if answers.size(1) > 1:
        logits = torch.cat((logits, decoder.head(decoder(answers[:, :-1], cache=cache)).float()), 1)  # (B, A, V)
    nll = F.cross_entropy(logits.mT, answers, reduction="none")  # (B, A)
    score_rows = []
    for trial, losses, tokens in zip(questions, nll, outputs.cpu().numpy(), strict=True):
        exact = text.decode_answer(tokens).strip().startswith(trial.number)
        score_rows.append([float(exact), float(losses[: len(trial.answer)].mean())])
    return torch.tensor(score_rows)


def _greedy_tokens(decoder: Decoder, first_logits: Tensor, cache: DecodingCache, count: int) -> Tensor:
    """The next `count` tokens by greedy decoding, (B, count); `first_logits` give the first token."""
    tokens = [first_logits.argmax(-1)]
    for _ in range(count - 1):
        tokens.append(decoder.head(decoder(tokens[-1], cache=cache)).argmax(-1))
    return torch.cat(tokens, 1)


def trials(task: Needle, length: int, count: int, text: Text) -> list[Trial]:
    """`count` questions about needles in test sequences of `length` tokens; the questions are the same for every
    model.
    """
    found: list[Trial] = []
    for index in range(-(-count // task.needles)):
        item = example(task, QUESTION_SEED, index, length, "test", text)
        for (start, stop), *spans in zip(item.questions, item.evidence, item.needles, strict=True):
            answer = item.tokens[start:stop]
            found.append(Trial(item.tokens[:start], answer, text.decode(answer).strip(), np.stack(spans), index))
    return found[:count]


def head_scores(decoder: Decoder, trial: Trial, length: int) -> Tensor:
    """Each head's attention from the prompt's last token to the needle's number, and to the needle's sentence: (2,
    layers, H) fp32.

    The whole sequence has `length` tokens. The attention to a span is the sum of weights on its tokens; arXiv
    2501.19399 (Figs. 7 and 8) states no definition, so this definition is ours. Memory holds the weights of one query.
    """
    tokens = torch.from_numpy(trial.prompt[None]).to(decoder.head.weight.device)
    blocks = attention_blocks(decoder, Batch(tokens, tokens, None), [-1], length)
    span_weights = [
        torch.stack([block.weights[0, :, 0, start:stop].sum(-1) for start, stop in trial.spans]) for block in blocks
    ]
    return torch.stack(span_weights, 1).cpu()


class NeedleMeasurement(AnswerMeasurement):
    """Accuracy on needles in a haystack by sequence length and depth, a control without the needle, and heads'
    attention to the needle.
    """

    kind, count_key = "needle", "trials"
    logged = (
        replace(ACCURACY, name="needle/exact {LENGTH} {SETTING}", meaning="needles whose number is written"),
        replace(
            ACCURACY,
            name="needle/control {LENGTH} {SETTING}",
            meaning="the same without the needle in the text",
            control=True,
        ),
    )

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        # without depths there is the control alone
        return [metric for metric in super().metrics(config) if metric.control or cls.options_of(config).depths]

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: the needles don't fit into one of the lengths, or into `heads_at`."""
        super().__init__(config, store)
        options, self.haystack = self.eval_config, Text(store)
        task = Needle(needles=options.needles, distractors=options.distractors)
        self.tasks = {f"depth {100 * depth:g}%": replace(task, depth=depth) for depth in options.depths}
        self.tasks["no needle"] = replace(task, absent=True)
        for length in self.lengths:
            self.check_fits(task, length, "length_factors", options.trials)
        self.heads_length = round((options.heads_at or 0) * config.data.seq_len)
        if options.heads_at:
            self.check_fits(task, self.heads_length, "heads_at")

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        blocks, head_blocks = [], []
        for setting, model in self.inference_models(decoder):
            blocks += self._answer_blocks(model, setting, device, progress)
            head_blocks += self._head_blocks(model, setting, device) if self.eval_config.heads_at else []
        return blocks + head_blocks

    def _chance(self, task: Needle) -> float | None:
        """Mean accuracy, over trials, of guessing among the numbers not yet asked for; None if the needle is absent or
        the only number.
        """
        # earlier questions of a sequence stand in the prompt with their answers
        candidates = task.needles + task.distractors
        return task.chance and float(
            np.mean([1 / (candidates - index % task.needles) for index in range(self.eval_config.trials)])
        )

    def _answer_blocks(
        self, decoder: Decoder, setting: str, device: Device, progress: Advance
    ) -> Iterator[pd.DataFrame]:
        """Accuracy for reports, over all depths and for the control without needle; then each metric that `SCORED`
        lists, at each depth and for the control."""
        cells = {
            name: [self._cell(decoder, task, length, device, progress) for length in self.lengths]
            for name, task in self.tasks.items()
        }
        options = json.dumps({"needles": self.eval_config.needles, "distractors": self.eval_config.distractors})
        *depths, control = self.tasks
        for metric, names in zip(self.logged, (depths, [control]), strict=True):
            if not names:
                continue
            samples = [_pooled_sample(depth_cells) for depth_cells in zip(*map(cells.get, names), strict=True)]
            about = accuracy(metric, self.eval_config.trials, self._chance(self.tasks[names[0]]), options)
            fields = {"task": f"needle{', control without it' * metric.control}", "setting": setting}
            yield by_length(about, self.lengths, samples, **fields)
        for name, task in self.tasks.items():
            for column, (quantity, unit) in enumerate(SCORED):
                chance, is_fraction = self._chance(task) if quantity == "exact" else None, unit == "fraction"
                about = Metric(
                    "", unit, "higher" if is_fraction else "lower", "", quantity, "questions", is_fraction, LENGTHS,
                    references=() if chance is None else (("chance", chance),), options=options,
                )  # fmt: skip
                samples = [(cell.scores[:, [column]], cell.units) for cell in cells[name]]
                yield by_length(about, self.lengths, samples, task=name, setting=setting)

    def _cell(self, decoder: Decoder, task: Needle, length: int, device: Device, progress: Advance = ignore) -> "_Cell":
        questions = trials(task, length, self.eval_config.trials, self.haystack)

        def measure(indices: list[int]) -> Tensor:
            return score(decoder, [questions[index] for index in indices], length, self.haystack)

        lengths = [len(trial.prompt) for trial in questions]
        return _Cell(questions, by_sequence([decoder], lengths, (len(SCORED),), device, measure, progress))

    def _head_blocks(self, decoder: Decoder, setting: str, device: Device) -> Iterator[pd.DataFrame]:
        """Every head's attention to needles at depth `HEADS_DEPTH`, by trial, and exact answers."""
        normalizers, length = decoder.normalizers(), self.heads_length
        shape = 2, len(normalizers), normalizers[0].layer.n_head
        task = Needle(needles=1, distractors=self.eval_config.distractors, depth=HEADS_DEPTH)
        cell = self._cell(decoder, task, length, device)

        def measure(indices: list[int]) -> Tensor:
            return torch.stack([head_scores(decoder, cell.trials[index], length) for index in indices])

        weights = by_sequence([decoder], [len(trial.prompt) for trial in cell.trials], shape, device, measure)
        uniform_attention = np.mean([np.diff(trial.spans).ravel() / len(trial.prompt) for trial in cell.trials], axis=0)
        options = json.dumps({"length": length, "depth": HEADS_DEPTH})
        about = Metric("", "fraction", "higher", units="questions", options=options)
        for (number, span), layer in product(enumerate(("number", "sentence")), range(shape[1])):
            levels = (("uniform attention", float(uniform_attention[number])),)
            attention = replace(about, quantity=f"attention to the {span}", axis=HEADS, references=levels)
            values = weights[:, number, layer].astype(float), cell.units, [*range(shape[2])]
            yield rows(attention, *values, task=f"layer {layer}", setting=setting)
        yield rows(replace(about, quantity="exact, heads' trials"), cell.scores[:, :1], cell.units, setting=setting)


@dataclass(frozen=True, eq=False)
class _Cell:
    """Trials of one sequence length and depth, with a row of scores (`score`) for each trial."""

    trials: list[Trial]
    scores: np.ndarray  # (trials, len(SCORED))

    @cached_property
    def sha256(self) -> str:
        return tokens_sha256(part for trial in self.trials for part in (trial.prompt, trial.answer))

    @property
    def units(self) -> pd.DataFrame:
        """The trials as units; those of one sequence depend on each other."""
        return units_frame(self.sha256, np.array([trial.sequence for trial in self.trials]))


def _pooled_sample(depths: Sequence[_Cell]) -> Sample:
    """Each trial's fraction of exact answers over `depths`; all depths ask the same question: a trial counts once."""
    # the hash that versions with fine-tuning gave to models without it
    identity = json.dumps([{"steps": 0}, *(cell.sha256 for cell in depths)])
    fractions = np.mean([cell.scores[:, 0] for cell in depths], axis=0)
    units = depths[0].units.assign(sequences=hashlib.sha256(identity.encode()).hexdigest()[:16])
    return fractions[:, None], units
