"""Accuracy, in fp32, on needles in a haystack by sequence length and depth, with heads' attention to needles."""

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lm.config.eval_config import NeedleConfig, lengths_from_factors
from lm.config.task_config import Needle
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks import Draw, Example, NoRoom, TaskError, Text, example
from lm.diagnostics.attention_rows import HEADS
from lm.evaluation.answers import ACCURACY, QUESTION_SEED, AnswerMeasurement, Sample, accuracy, by_length
from lm.evaluation.evaluation_kind import Advance, ignore
from lm.evaluation.held_out import EVAL_TOKENS, LENGTHS, by_sequence, tokens_sha256
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import training_loss
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, preserved_random_state
from lm.model.swapped import applicable_settings, for_inference
from lm.progress import Progress
from lm.runs.evaluations import rows, units_frame
from lm.runs.metric import Metric
from lm.schema import Plain, to_plain

FINETUNE_SEQUENCES, FINETUNE_LR = 16, 2e-4  # sequences of a step of fine-tuning, and its peak learning rate
FINETUNE_SEED = 1  # seed of fine-tuning and of its sequences, which are training sequences of the task
EXACT_COLUMN = 0  # index in `SCORED` of `exact`
DRAWN_NUMBERS = 9  # random numbers among which the correct number is ranked, beside the text's other numbers
HEADS_DEPTH = 0.5  # depth of the needles that heads' attention is measured on


@dataclass(frozen=True)
class Trial:
    """A question about a number in a text: the prompt, the correct answer, and other answers among which the correct
    one is ranked.
    """

    prompt: np.ndarray  # (T,) int64
    answer: np.ndarray  # (A,) int64
    others: list[np.ndarray]  # the tokens of each other answer
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
    ("first of candidates", "fraction"),  # 1 if no other candidate is more probable, as a whole, than the answer
    ("rank among candidates", ""),  # 1 plus the number of candidates that are more probable than the answer
    ("loss of answers", "nats per token"),
    # -log p of the answer minus that of this candidate; 0 without other candidates
    ("loss over the most probable other", "nats"),
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
    score_rows = []
    for index, trial in enumerate(questions):
        candidates = [trial.answer, *trial.others]
        nll, hits = _candidate_nll(
            decoder, candidates, first_logits[index : index + 1], cache.select([index]).fork(len(candidates))
        )
        better_count = (nll[1:] < nll[0]).sum()
        prediction = text.decode_answer(outputs[index].cpu().numpy()).strip()
        first_digit, exact = prediction[:1] == trial.number[:1], prediction.startswith(trial.number)
        gap = nll[0] - nll[1:].min() if trial.others else 0
        scores = exact, first_digit, hits, better_count == 0, 1 + better_count, nll[0] / len(trial.answer), gap
        score_rows.append([*map(float, scores)])
    return torch.tensor(score_rows)


def _greedy_tokens(decoder: Decoder, first_logits: Tensor, cache: DecodingCache, count: int) -> Tensor:
    """The next `count` tokens by greedy decoding, (B, count); `first_logits` give the first token."""
    tokens = [first_logits.argmax(-1)]
    for _ in range(count - 1):
        tokens.append(decoder.head(decoder(tokens[-1], cache=cache)).argmax(-1))
    return torch.cat(tokens, 1)


def _candidate_nll(
    decoder: Decoder, candidates: list[np.ndarray], first_logits: Tensor, cache: DecodingCache
) -> tuple[Tensor, bool]:
    """Losses -log p of whole candidates, (candidates,), nats, and whether each token of the first candidate is the most
    probable one.
    """
    tokens = pad_sequence([torch.from_numpy(candidate) for candidate in candidates], batch_first=True).to(
        first_logits.device
    )
    lengths = torch.tensor([*map(len, candidates)], device=tokens.device)
    mask = torch.arange(tokens.size(1), device=tokens.device) < lengths.unsqueeze(1)
    logits = first_logits.expand(len(candidates), -1, -1)
    if tokens.size(1) > 1:
        logits = torch.cat((logits, decoder.head(decoder(tokens[:, :-1], cache=cache)).float()), 1)
    log_p = logits.log_softmax(-1).gather(2, tokens.unsqueeze(-1)).squeeze(-1)
    hits = (logits[0].argmax(-1) == tokens[0])[: len(candidates[0])]
    return -(log_p * mask).sum(1), bool(hits.all())


def trials(task: Needle, length: int, count: int, text: Text) -> list[Trial]:
    """`count` questions about needles in test sequences of `length` tokens; the questions are the same for every
    model.
    """
    sequences = (example(task, QUESTION_SEED, index, length, "test", text) for index in range(count))
    questions = (
        _make_trial(item, question, index, text)
        for index, item in enumerate(sequences)
        for question in range(task.needles)
    )
    return [*islice(questions, count)]


def _make_trial(sequence: Example, question: int, index: int, text: Text) -> Trial:
    start, stop = sequence.questions[question]
    answer = sequence.tokens[start:stop]
    number, text_numbers = text.decode(answer).strip(), set(re.findall(r"\d{7}", text.decode(sequence.tokens)))
    draw, drawn_numbers = Draw(QUESTION_SEED + 1, "test", index), set()
    # numbers with as many tokens as the answer: shorter ones would be more probable
    for _ in range(100 * DRAWN_NUMBERS):
        candidate = str(1_000_000 + draw.integer(9_000_000))
        if len(drawn_numbers) < DRAWN_NUMBERS and len(text.encode_number(candidate)) == len(answer):
            drawn_numbers.add(candidate)
    alternatives = [text.encode_number(candidate) for candidate in sorted((text_numbers | drawn_numbers) - {number})]
    spans = np.stack((sequence.evidence[question], sequence.needles[question]))
    return Trial(sequence.tokens[:start], answer, alternatives, number, spans, index)


def finetuned_copy(decoder: Decoder, config: NeedleConfig, seq_len: int, text: Text, device: Device) -> Decoder:
    """A copy of the decoder, fine-tuned on the loss of answers in training sequences with needles, of `seq_len` tokens.

    AdamW has betas 0.9 and 0.999 and no weight decay; gradients are clipped to norm 1. The learning rate rises in the
    first third of the steps, is constant in the second, and falls towards 0 in the last (after arXiv 2505.17083, App.
    G.2). `decoder` is not changed. Every rank does the same work.
    """
    options = config.finetune
    model = copy.deepcopy(decoder).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    task = Needle(needles=config.needles, distractors=config.distractors)
    with torch.enable_grad(), preserved_random_state():
        torch.manual_seed(FINETUNE_SEED)
        for step in range(options.steps):
            phase_steps = max(1, options.steps // 3)
            for group in optimizer.param_groups:
                group["lr"] = FINETUNE_LR * min(1.0, (step + 1) / phase_steps, (options.steps - step) / phase_steps)
            offset = step * FINETUNE_SEQUENCES
            examples = [
                example(task, FINETUNE_SEED, offset + index, seq_len, "train", text)
                for index in range(FINETUNE_SEQUENCES)
            ]
            answers = np.stack([item.answers for item in examples])
            batch = Batch.of(np.stack([item.tokens for item in examples]), answers).to(device.device)
            optimizer.zero_grad()
            batch_size = max(1, EVAL_TOKENS // seq_len)
            for tokens, targets in zip(batch.tokens.split(batch_size), batch.targets.split(batch_size), strict=True):
                with device.autocast():
                    hidden = model.hidden(Batch(tokens, targets, None)).flatten(0, 1)
                    loss, _ = training_loss(hidden, model.head, targets.flatten())
                (loss / int(answers.sum())).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.eval()


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

    kind = "needle"
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
        options = cls.options_of(config)
        return [
            metric.named(LENGTH=length, SETTING=setting.label)
            for setting in options.inference
            for metric in cls.logged[not options.depths :]
            for length in lengths_from_factors(options.length_factors, config.data)
        ]

    @classmethod
    def sequences_of(cls, config: Config, metric: str) -> dict[str, Plain]:
        return config.eval.measured_options(cls.kind)

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.haystack = Text(store)
        task = Needle(needles=self.eval_config.needles, distractors=self.eval_config.distractors)
        self.tasks = {f"depth {100 * depth:g}%": replace(task, depth=depth) for depth in self.eval_config.depths}
        self.tasks["no needle"] = replace(task, absent=True)
        lengths, reasons = self.lengths, {}
        for length in lengths:
            try:
                example(task, QUESTION_SEED, 0, length, "test", self.haystack)
            except NoRoom as error:
                reasons[length] = str(error)
            except TaskError:  # `check_fits` raises it as a ConfigError
                continue
        # if all are too short, `check_fits` says so
        self.lengths = [length for length in lengths if length not in reasons] or lengths
        self.heads_length = round((self.eval_config.heads_at or 0) * config.data.seq_len)
        for length in self.lengths:
            self.check_fits(task, length, "length_factors", self.eval_config.trials)
        if self.eval_config.heads_at:
            self.check_fits(task, self.heads_length, "heads_at")
        if self.eval_config.finetune.steps:
            self.check_fits(
                task,
                config.data.seq_len,
                "finetune.steps",
                1,
                "train",
                "fine-tuning has the training length: set it to 0",
            )
        for length in sorted({*lengths} - {*self.lengths}):
            if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
                Progress().say(
                    f"note: eval.needle.length_factors: sequences of {length:,} are left out: {reasons[length]}"
                )

    @property
    def options(self) -> dict[str, Plain]:
        return {"seq_len": self.config.data.seq_len, "seed": QUESTION_SEED, **self.plain_eval_config}

    @property
    def work_units(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.eval_config.trials * len(self.eval_config.inference)

    def measure(self, decoder: Decoder, device: Device, progress: Advance) -> list[pd.DataFrame]:
        steps = self.eval_config.finetune.steps
        base = self._finetuned_decoder(decoder, device) if steps else decoder
        blocks, heads_blocks = [], []
        for inference in applicable_settings(decoder, self.eval_config.inference):
            model = for_inference(base, inference)
            setting_label = inference.label + (f", fine-tuned {steps} steps" if steps else "")
            blocks += self._answer_blocks(model, inference.label, setting_label, device, progress)
            heads_blocks += self._head_blocks(model, setting_label, device) if self.eval_config.heads_at else []
        return blocks + heads_blocks

    def _finetuned_decoder(self, decoder: Decoder, device: Device) -> Decoder:
        """Fine-tune a copy on every rank, and return the copy of rank 0 on all ranks, as the copies of the ranks might
        come to differ.
        """
        copies: list[Decoder] = []

        def finetune() -> Tensor:
            copies.append(finetuned_copy(decoder, self.eval_config, self.config.data.seq_len, self.haystack, device))
            return torch.zeros(1)

        all_reduce_sum(device, finetune)
        if device.world > 1:
            for value in copies[0].state_dict().values():
                torch.distributed.broadcast(value, 0)
        return copies[0]

    def precision(self, device: Device) -> str:
        training_precision = device.precision if self.eval_config.finetune.steps else "32"
        return super().precision(device) + (
            f", fine-tuned in {training_precision}" if training_precision != "32" else ""
        )

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
        self, decoder: Decoder, label: str, setting: str, device: Device, progress: Advance
    ) -> list[pd.DataFrame]:
        """Accuracy for reports, over all depths and for the control without needle; then each metric that `SCORED`
        lists, at each depth and for the control."""
        scores = {
            name: [self._scores(decoder, task, length, device, progress) for length in self.lengths]
            for name, task in self.tasks.items()
        }
        options = json.dumps({"needles": self.eval_config.needles, "distractors": self.eval_config.distractors})
        blocks: list[pd.DataFrame] = []
        tasks = [*self.tasks][:-1], ["no needle"]
        for metric, names in zip(self.logged, tasks, strict=True):
            if not names:
                continue
            pools = [
                self._pooled_sample(depth_scores)
                for depth_scores in zip(*(scores[name] for name in names), strict=True)
            ]
            log_names = [metric.named(LENGTH=length, SETTING=label).name for length in self.lengths]
            what, chance = (
                "needle, control without it" if metric.control else "needle",
                self._chance(self.tasks[names[0]]),
            )
            about = accuracy(metric, len(pools[0][0]), chance, options)
            blocks.append(by_length(about, self.lengths, pools, task=what, setting=setting, names=log_names))
        for name, task in self.tasks.items():
            guess_accuracies = [
                np.mean([1 / (1 + len(trial.others)) for trial in length_scores.trials])
                for length_scores in scores[name]
            ]
            chance_levels = {"exact": self._chance(task), "first of candidates": float(np.mean(guess_accuracies))}
            for column, (quantity, unit) in enumerate(SCORED):
                samples = [(length_scores.values[:, [column]], length_scores.units) for length_scores in scores[name]]
                chance, is_fraction = chance_levels.get(quantity), unit == "fraction"
                about = Metric(
                    "", unit, "higher" if is_fraction else "lower", "", quantity, "questions", is_fraction, LENGTHS,
                    references=() if chance is None else (("chance", chance),), options=options,
                )  # fmt: skip
                blocks.append(by_length(about, self.lengths, samples, task=name, setting=setting))
        return blocks

    def _scores(
        self, decoder: Decoder, task: Needle, length: int, device: Device, progress: Advance = ignore
    ) -> "_Scores":
        questions = trials(task, length, self.eval_config.trials, self.haystack)

        def measure(indices: list[int]) -> Tensor:
            return score(decoder, [questions[index] for index in indices], length, self.haystack)

        lengths = [len(trial.prompt) for trial in questions]
        return _Scores(questions, by_sequence([decoder], lengths, (len(SCORED),), device, measure, progress))

    def _pooled_sample(self, depths: Sequence["_Scores"]) -> Sample:
        """Each trial's fraction of exact answers over `depths`; a trial counts once, as all depths ask the same
        question.
        """
        identity = json.dumps([to_plain(self.eval_config.finetune), *(scores.sha256 for scores in depths)])
        fractions = np.mean([scores.values[:, EXACT_COLUMN] for scores in depths], axis=0)
        sha256 = hashlib.sha256(identity.encode()).hexdigest()
        return fractions[:, None], units_frame(sha256, depths[0].sequences)

    def _head_blocks(self, decoder: Decoder, setting: str, device: Device) -> list[pd.DataFrame]:
        """Every head's attention to needles at depth `HEADS_DEPTH`, by trial, and exact answers and correct first
        digits.
        """
        length, shape = self.heads_length, (2, len(decoder.normalizers()), decoder.normalizers()[0].layer.n_head)
        scores = self._scores(
            decoder, Needle(needles=1, distractors=self.eval_config.distractors, depth=HEADS_DEPTH), length, device
        )

        def measure(indices: list[int]) -> Tensor:
            return torch.stack([head_scores(decoder, scores.trials[index], length) for index in indices])

        weights = by_sequence([decoder], [len(trial.prompt) for trial in scores.trials], shape, device, measure)
        uniform_attention = np.mean(
            [np.diff(trial.spans).ravel() / len(trial.prompt) for trial in scores.trials], axis=0
        )
        options = json.dumps({"length": length, "depth": HEADS_DEPTH})
        about = Metric("", "fraction", "higher", units="questions", options=options)
        blocks = []
        for (number, span), layer in product(enumerate(("number", "sentence")), range(shape[1])):
            levels = (("uniform attention", float(uniform_attention[number])),)
            attention = replace(about, quantity=f"attention to the {span}", axis=HEADS, references=levels)
            values = weights[:, number, layer].astype(float), scores.units, [*range(shape[2])]
            blocks.append(rows(attention, *values, task=f"layer {layer}", setting=setting))
        for column in (0, 1):
            exact = replace(about, quantity=f"{SCORED[column][0]}, heads' trials")
            blocks.append(rows(exact, scores.values[:, [column]], scores.units, setting=setting))
        return blocks


@dataclass(frozen=True, eq=False)
class _Scores:
    """Trials of one sequence length and depth, with a row of scores (`score`) for each trial."""

    trials: list[Trial]
    values: np.ndarray  # (trials, len(SCORED))

    @cached_property
    def sha256(self) -> str:
        return tokens_sha256(part for trial in self.trials for part in (trial.prompt, trial.answer))

    @property
    def sequences(self) -> np.ndarray:
        """The sequence of each trial, (trials,); trials of one sequence depend on each other."""
        return np.array([trial.sequence for trial in self.trials])

    @cached_property
    def units(self) -> pd.DataFrame:
        return units_frame(self.sha256, self.sequences)
