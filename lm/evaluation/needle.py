"""Accuracy, in fp32, on needles in a haystack by sequence length and depth, with heads' attention to needles."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.config.eval_config import lengths_from_factors
from lm.config.task_config import Needle
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks import NoRoom, Text, example
from lm.diagnostics.attention_rows import HEADS
from lm.errors import ConfigError
from lm.evaluation.answers import ACCURACY, QUESTION_SEED, AnswerMeasurement, Sample, accuracy, by_length
from lm.evaluation.evaluation_kind import Advance, ignore
from lm.evaluation.held_out import LENGTHS, by_sequence, tokens_sha256
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.decoder import Decoder
from lm.model.device import Device
from lm.progress import Progress
from lm.runs.evaluations import rows, units_frame
from lm.runs.metric import Metric

EXACT_COLUMN = 0  # index in `SCORED` of `exact`
HEADS_DEPTH = 0.5  # depth of the needles that heads' attention is measured on


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
    ("first digit", "fraction"),  # 1 if the first digit of that number is correct
    # 1 if each answer token is the most probable one after the tokens before it (then greedy decoding gives it)
    ("exact, teacher-forced", "fraction"),
    ("loss of answers", "nats per token"),
)


def score(decoder: Decoder, questions: list[Trial], length: int, text: Text) -> Tensor:
    """Scores of questions with equally long prompts: (questions, metrics) fp32, with a column for each metric that
    `SCORED` lists.

    Each prompt is the beginning of a sequence of `length` tokens.
    """
    prompts = torch.from_numpy(np.stack([trial.prompt for trial in questions])).to(next(decoder.parameters()).device)
    cache = DecodingCache(length)
    first_logits = decoder.head(decoder(prompts, cache=cache, first=prompts.size(1) - 1)).float()  # (B, 1, V)
    outputs = _greedy_tokens(decoder, first_logits, cache.fork(1), max(len(trial.answer) for trial in questions) + 2)
    answers = pad_sequence([torch.from_numpy(trial.answer) for trial in questions], True).to(prompts.device)  # (B, A)
    logits = first_logits
    if answers.size(1) > 1:
        logits = torch.cat((logits, decoder.head(decoder(answers[:, :-1], cache=cache)).float()), 1)  # (B, A, V)
    nll, hits = F.cross_entropy(logits.mT, answers, reduction="none"), logits.argmax(-1) == answers  # (B, A)
    score_rows = []
    for index, trial in enumerate(questions):
        prediction, tokens = text.decode_answer(outputs[index].cpu().numpy()).strip(), len(trial.answer)
        first_digit, exact = prediction[:1] == trial.number[:1], prediction.startswith(trial.number)
        scores = exact, first_digit, hits[index, :tokens].all(), nll[index, :tokens].mean()
        score_rows.append([*map(float, scores)])
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
    def names(cls, config: Config) -> dict[str, Sequence[object]]:
        options = cls.options_of(config)
        lengths = lengths_from_factors(options.length_factors, config.data)
        return {"SETTING": [setting.label for setting in options.inference], "LENGTH": lengths}

    @classmethod
    def metrics(cls, config: Config) -> list[Metric]:
        # without depths there is the control alone
        return [metric for metric in super().metrics(config) if metric.control or cls.options_of(config).depths]

    def __init__(self, config: Config, store: Store):
        """Raises ConfigError: the needles fit into none of the lengths, or not into `heads_at`."""
        super().__init__(config, store)
        options, self.haystack = self.eval_config, Text(store)
        task = Needle(needles=options.needles, distractors=options.distractors)
        self.tasks = {f"depth {100 * depth:g}%": replace(task, depth=depth) for depth in options.depths}
        self.tasks["no needle"] = replace(task, absent=True)
        for length in self.lengths[:-1]:
            try:
                self.check_fits(task, length, "length_factors", options.trials)
            except ConfigError as error:
                if not isinstance(error.__cause__, NoRoom):
                    raise
                self.lengths = [other for other in self.lengths if other != length]
                if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
                    reason = f"sequences of {length:,} are left out: {error.__cause__}"
                    Progress().say(f"note: eval.needle.length_factors: {reason}")
        self.check_fits(task, self.lengths[-1], "length_factors", options.trials)
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
        """Every head's attention to needles at depth `HEADS_DEPTH`, by trial, and exact answers and correct first
        digits.
        """
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
        for column in (0, 1):
            exact = replace(about, quantity=f"{SCORED[column][0]}, heads' trials")
            yield rows(exact, cell.scores[:, [column]], cell.units, setting=setting)


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
    fractions = np.mean([cell.scores[:, EXACT_COLUMN] for cell in depths], axis=0)
    units = depths[0].units.assign(sequences=hashlib.sha256(identity.encode()).hexdigest()[:16])
    return fractions[:, None], units
