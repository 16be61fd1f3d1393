"""Needles in a haystack: what a model answers by context length and depth, and which heads look at the needle."""

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lm.attention.layout import AttentionLayout
from lm.config.eval_config import NeedleConfig
from lm.config.task_config import Needle
from lm.config.training_config import AdamW
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks.examples import Draw, Example
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.evaluation.evaluation_kind import Advance, ignore
from lm.evaluation.held_out import EVAL_TOKENS, by_sequence, tokens_sha256
from lm.evaluation.recall import QUESTION_SEED, AnswerMeasurement, check_room, too_short
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import linear_cross_entropy
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, eval_mode
from lm.model.inference import for_inference
from lm.model.transfer import Scaling, gradients_to_norm, scalings
from lm.progress import Progress
from lm.runs.series import Axis, Sample, Series
from lm.schema import Plain, to_plain

FINETUNE_SEED = 1  # seed of the sequences of fine-tuning, which are training sequences
EXACT = 0  # column of `SCORED`
OTHERS = 9  # numbers that the right one is ranked among, beside those of distractor needles
HEADS_DEPTH = 0.5


# ---------------------------------------------------------------- one question after a prompt, among other answers


@dataclass(frozen=True)
class Trial:
    """A question about a number in a text: the prompt, the answer's tokens, other answers to rank it among, and the number itself."""

    prompt: np.ndarray  # (T,) int64
    answer: np.ndarray  # (A,) int64
    others: list[np.ndarray]
    number: str
    spans: np.ndarray  # (2, 2): [start, stop) in the prompt of the number in its needle, and of the needle's sentence
    sequence: int  # index of its sequence, of which other trials may ask, too


SCORED = (  # metric and unit of each column of `score`
    ("exact", "fraction"),
    ("first digit", "fraction"),
    ("exact, teacher-forced", "fraction"),
    ("first of candidates", "fraction"),
    ("rank among candidates", ""),
    ("loss of answers", "nats per token"),
    ("loss over the most probable other", "nats"),
)


def score(decoder: Decoder, asked: list[Trial], length: int, text: Text) -> Tensor:
    """Prompts of one length, parts of sequences of `length` tokens, read once each: (trials, len(SCORED)) fp32.

    1 if all that greedy decoding writes is correct; 1 if its first digit is; 1 if each token of the answer is the most probable one after
    those before (then greedy decoding gives it); 1 if no other is more probable than the answer (as a whole number); 1 and how many are;
    loss of the answer (nats per token); and its difference to the loss of the most probable other (nats; 0 if there is none).
    """
    device = decoder.head.weight.device
    prompts = torch.from_numpy(np.stack([trial.prompt for trial in asked])).to(device)
    cache = DecodingCache(length)
    first = decoder.head(decoder(prompts, cache=cache)[:, -1:]).float()  # (B, 1, V)
    written = _greedy(decoder, first, cache.fork(1), max(len(trial.answer) for trial in asked) + 2)
    rows = []
    for index, trial in enumerate(asked):
        candidates = [trial.answer, *trial.others]
        nll, hits = _nll(decoder, candidates, first[index : index + 1], cache.select([index]).fork(len(candidates)))
        better = (nll[1:] < nll[0]).sum()
        said = text.decode(written[index].cpu().numpy()).strip()
        digit, whole = said[:1] == trial.number[:1], re.match(r"\d*", said)[0] == trial.number
        margin = nll[0] - nll[1:].min() if trial.others else 0
        rows.append([float(value) for value in (whole, digit, hits, better == 0, 1 + better, nll[0] / len(trial.answer), margin)])
    return torch.tensor(rows)


def _greedy(decoder: Decoder, first: Tensor, cache: DecodingCache, count: int) -> Tensor:
    """`count` tokens by greedy decoding: (B, count)."""
    tokens = [first.argmax(-1)]
    for _ in range(count - 1):
        tokens.append(decoder.head(decoder(tokens[-1], cache=cache)).argmax(-1))
    return torch.cat(tokens, 1)


def _nll(decoder: Decoder, candidates: list[np.ndarray], first: Tensor, cache: DecodingCache) -> tuple[Tensor, bool]:
    """-log p of each candidate as a whole, (candidates,), and whether every token of the first is the most probable one."""
    longest = max(map(len, candidates))
    tokens = torch.zeros(len(candidates), longest, dtype=torch.int64)
    real = torch.zeros(len(candidates), longest)
    for number, candidate in enumerate(candidates):
        tokens[number, : len(candidate)], real[number, : len(candidate)] = torch.from_numpy(candidate), 1.0
    tokens, real = tokens.to(first.device), real.to(first.device)
    logits = first.expand(len(candidates), -1, -1)
    if longest > 1:
        logits = torch.cat((logits, decoder.head(decoder(tokens[:, :-1], cache=cache)).float()), 1)
    log_p = logits.log_softmax(-1).gather(2, tokens.unsqueeze(-1)).squeeze(-1)
    hits = (logits[0].argmax(-1) == tokens[0])[: len(candidates[0])]
    return -(log_p * real).sum(1), bool(hits.all())


def trials(task: Needle, length: int, count: int, text: Text) -> list[Trial]:
    """`count` questions about sequences of `length` tokens: test sequences, the same for every model."""
    asked: list[Trial] = []
    for index in range(count):
        sequence = example(task, QUESTION_SEED, index, length, "test", text)
        asked += [_trial(sequence, which, index, text) for which in range(len(sequence.questions))]
        if len(asked) >= count:
            break
    return asked[:count]


def _trial(sequence: Example, which: int, index: int, text: Text) -> Trial:
    start, stop = sequence.questions[which]
    answer = sequence.tokens[start:stop]
    number, in_text = text.decode(answer).strip(), set(re.findall(r"\d{7}", text.decode(sequence.tokens)))
    draw, drawn = Draw(QUESTION_SEED + 1, "test", index), set()
    for _ in range(100 * OTHERS):  # numbers of as many tokens: shorter ones would be more probable
        other = str(1_000_000 + draw.one(9_000_000))
        if len(drawn) < OTHERS and len(text.encode(f" {other}")) == len(answer):
            drawn.add(other)
    others = [text.encode(f" {other}") for other in sorted((in_text | drawn) - {number})]
    return Trial(sequence.tokens[:start], answer, others, number, np.stack((sequence.evidence[which], sequence.needles[which])), index)


def finetuned(decoder: Decoder, config: NeedleConfig, seq_len: int, text: Text, where: Device) -> Decoder:
    """A copy of the decoder, trained to answer: answer-only loss on training sequences of the training length.

    AdamW (0.9, 0.999) without weight decay, gradients clipped at 1, a third of the steps each of warm-up, constant rate and
    decay to 0 (after arXiv 2505.17083, App. G.2). With `model.transfer` the rate is the base model's, as in training. The decoder itself
    stays as it is. Every rank does the same.
    """
    how = config.finetune
    model = copy.deepcopy(decoder).train().requires_grad_(True)
    of_scaling: dict[Scaling, list[Tensor]] = {}
    for name, scaling in scalings(model, model.config, AdamW().width_exponent).items():
        of_scaling.setdefault(scaling, []).append(model.get_parameter(name))
    groups = [{"params": some, "lr_factor": scaling.lr, "eps": 1e-8 * scaling.eps} for scaling, some in of_scaling.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), weight_decay=0.0)
    task = Needle(needles=config.needles, distractors=config.distractors)
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(FINETUNE_SEED)
        for step in range(how.steps):
            where.check_time()
            third = max(1, how.steps // 3)
            for group in optimizer.param_groups:
                group["lr"] = group["lr_factor"] * how.lr * min(1.0, (step + 1) / third, (how.steps - step) / third)
            first = step * how.batch_sequences
            examples = [example(task, FINETUNE_SEED, first + index, seq_len, "train", text) for index in range(how.batch_sequences)]
            answers = np.stack([each.answers for each in examples])
            batch = Batch.of(np.stack([each.tokens for each in examples]), answers).to(where.device)
            optimizer.zero_grad()
            size = max(1, EVAL_TOKENS // seq_len)
            for tokens, targets in zip(batch.tokens.split(size), batch.targets.split(size), strict=True):
                with where.autocast():
                    hidden = model.hidden(Batch(tokens, targets, None)).flatten(0, 1)
                    loss = linear_cross_entropy(hidden, model.head, targets.flatten())
                (loss / int(answers.sum())).backward()
            norm = torch.nn.utils.get_total_norm(gradients_to_norm(model, model.config))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()
    return model.eval()


def head_scores(decoder: Decoder, trial: Trial, length: int) -> Tensor:
    """Attention from the prompt's last token to the number in its needle and to the needle's sentence: (2, layers, H) fp32.

    `length`: tokens of the whole sequence. The score is a sum of weights (arXiv 2501.19399, Figs. 7 and 8, whose definition is not
    stated; this one is ours). Holds one query's weights.
    """
    tokens = torch.from_numpy(trial.prompt[None]).to(decoder.head.weight.device)
    layout = AttentionLayout.continuing(0, len(trial.prompt), length, tokens.device)
    layers = [
        torch.stack([block.weights[0, :, 0, start:stop].sum(-1) for start, stop in trial.spans])
        for block in attention_blocks(decoder, Batch(tokens, tokens, None), [-1], layout)
    ]
    return torch.stack(layers, 1).cpu()


class NeedleMeasurement(AnswerMeasurement):
    """Answers by context length and depth, with a control without the needle; and the heads that look at it."""

    kind = "needle"

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.haystack = Text(store)
        base = Needle(needles=self.asked.needles, distractors=self.asked.distractors)
        self.tasks = {f"depth {100 * depth:g}%": replace(base, depth=depth) for depth in self.asked.depths}
        self.tasks["no needle"] = replace(base, absent=True)
        asked, reasons = self.lengths, {length: too_short(base, length, self.haystack) for length in self.lengths}
        self.lengths = [length for length in asked if not reasons[length]] or asked  # if all are too short, the first says so below
        self.heads_length = round((self.asked.heads_at or 0) * config.data.seq_len)
        needed = [(length, "test", self.asked.trials, "length_factors", self.asked.length_factors) for length in self.lengths]
        if self.asked.heads_at:
            needed.append((self.heads_length, "test", 1, "heads_at", self.asked.heads_at))
        if self.asked.finetune.steps:
            needed.append((config.data.seq_len, "train", 1, "finetune.steps", self.asked.finetune.steps))
        for length, subset, count, key, value in needed:
            check_room(base, length, subset, count, self.haystack, f"eval.needle.{key}", value)
        for length in sorted({*asked} - {*self.lengths}):
            if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
                Progress().say(f"note: eval.needle.length_factors: sequences of {length:,} are left out: {reasons[length]}")

    @property
    def options(self) -> dict[str, Plain]:
        return {"seq_len": self.config.data.seq_len, "seed": QUESTION_SEED, **self.asked_plain}

    @property
    def work(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.asked.trials * len(self.asked.inference)

    def measure(self, decoder: Decoder, where: Device, progress: Advance) -> list[Series]:
        steps = self.asked.finetune.steps
        model = self._finetuned(decoder, where) if steps else decoder
        series, of_heads = [], []
        for inference in self.asked.inference:
            used, setting = for_inference(model, inference), f"{inference.label}, fine-tuned {steps} steps" if steps else inference.label
            series += self._answers(used, inference.label, setting, where, progress)
            of_heads += self._heads(used, setting, where) if self.asked.heads_at else []
        return series + of_heads

    def _finetuned(self, decoder: Decoder, where: Device) -> Decoder:
        """The copy that fine-tuning gives on rank 0, on all ranks: theirs might drift apart."""
        copies: list[Decoder] = []

        def local() -> Tensor:
            copies.append(finetuned(decoder, self.asked, self.config.data.seq_len, self.haystack, where))
            return torch.zeros(1)

        with eval_mode(decoder):
            all_reduce_sum(where, local)
        if where.world > 1:
            for value in copies[0].state_dict().values():
                torch.distributed.broadcast(value, 0)
        return copies[0]

    def _answers(self, decoder: Decoder, label: str, setting: str, where: Device, progress: Advance) -> list[Series]:
        """Exact answers over all depths and of the control, for reports; then all that is scored, by depth."""
        scores = {
            name: [self._scores(decoder, task, length, where, progress) for length in self.lengths] for name, task in self.tasks.items()
        }
        common = {"options": {"needles": self.asked.needles, "distractors": self.asked.distractors}, "setting": setting}
        series: list[Series] = []
        for control, names in ((False, list(self.tasks)[:-1]), (True, ["no needle"])):
            if not names:
                continue
            pooled = [self._pooled(depths) for depths in zip(*(scores[name] for name in names), strict=True)]
            chance = self.tasks[names[0]].chance
            series.append(
                self.accuracy(
                    pooled, chance and chance.teacher_forced, control=control, what="needle, control without it" if control else "needle",
                    logged=tuple(self.asked.metric(control, length, label) for length in self.lengths), **common,
                )
            )  # fmt: skip
        for name, task in self.tasks.items():
            chance = task.chance and task.chance.teacher_forced  # earlier questions of a sequence stand in the prompt with their answers
            candidates = [np.mean([1 + len(trial.others) for trial in each.trials]) for each in scores[name]]
            levels = {"exact": chance, "first of candidates": 1 / float(np.mean(candidates))}
            for column, (metric, unit) in enumerate(SCORED):
                samples = [each.sample(each.values[:, [column]]) for each in scores[name]]
                references = {} if levels.get(metric) is None else {"chance": levels[metric]}
                interval = "wilson" if unit == "fraction" else "none"
                series.append(self.at_lengths(metric, unit, samples, what=name, references=references, interval=interval, **common))
        return series

    def _scores(self, decoder: Decoder, task: Needle, length: int, where: Device, progress: Advance = ignore) -> "_Scores":
        asked = trials(task, length, self.asked.trials, self.haystack)

        def measure(part: list[int]) -> Tensor:
            return score(decoder, [asked[index] for index in part], length, self.haystack)

        lengths = [len(trial.prompt) for trial in asked]
        return _Scores(asked, by_sequence([decoder], lengths, (len(SCORED),), where, measure, progress))

    def _pooled(self, depths: Sequence["_Scores"]) -> Sample:
        """Exact answers by trial. A trial asks the same at each depth: it counts once."""
        sha256 = hashlib.sha256(json.dumps([to_plain(self.asked.finetune), *(each.sha256 for each in depths)]).encode()).hexdigest()
        exact = np.mean([each.values[:, EXACT] for each in depths], axis=0)
        return replace(depths[0].sample(exact[:, None]), sha256=sha256)

    def _heads(self, decoder: Decoder, setting: str, where: Device) -> list[Series]:
        """Attention of every head to needles at `HEADS_DEPTH`, by trial, and whether the trials were answered."""
        length, shape = self.heads_length, (2, len(decoder.normalizers()), decoder.normalizers()[0].layer.n_head)
        scores = self._scores(decoder, Needle(needles=1, distractors=self.asked.distractors, depth=HEADS_DEPTH), length, where)

        def measure(part: list[int]) -> Tensor:
            return torch.stack([head_scores(decoder, scores.trials[index], length) for index in part])

        def series(metric: str, values: np.ndarray, **given: object) -> Series:
            place, sample = {"length": length, "depth": HEADS_DEPTH}, (scores.sample(values),)
            means = values.mean(0, dtype=np.float64)
            return self.series(metric, "fraction", "higher", means, setting=setting, options=place, samples=sample, **given)

        weights = by_sequence([decoder], [len(trial.prompt) for trial in scores.trials], shape, where, measure)
        uniform = np.mean([np.diff(trial.spans).ravel() for trial in scores.trials], axis=0) / length
        heads = Axis("head", "", "of head", tuple(range(shape[2])), log=False)
        looking = [
            series(
                f"attention to the {span}", weights[:, number, layer],
                what=f"layer {layer}", axis=heads, references={"uniform attention": float(uniform[number])},
            )
            for number, span in enumerate(("number", "sentence"))
            for layer in range(shape[1])
        ]  # fmt: skip
        return looking + [series(f"{SCORED[column][0]}, heads' trials", scores.values[:, [column]]) for column in (0, 1)]


@dataclass(frozen=True, eq=False)
class _Scores:
    """Trials of one length and depth, and what `score` gives of them."""

    trials: list[Trial]
    values: np.ndarray  # (trials, len(SCORED))

    @cached_property
    def sha256(self) -> str:
        """A hash of prompts and answers."""
        return tokens_sha256(part for trial in self.trials for part in (trial.prompt, trial.answer))

    def sample(self, values: np.ndarray) -> Sample:
        """Values (trials, columns) by trial; trials of one sequence depend on each other."""
        return Sample(self.sha256, values, np.ones(len(values)), np.array([trial.sequence for trial in self.trials]))
