"""Needles in a haystack: what a model answers by context length and depth, and which heads look at the needle."""

import copy
import hashlib
import re
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lm.attention.layout import Rows
from lm.config.eval_config import NeedleConfig, Schedule
from lm.config.inference_config import InferenceSetting
from lm.config.task_config import Needle
from lm.config.tree import Config
from lm.data.batches import Batch
from lm.data.store import Store
from lm.data.tasks.examples import Draw, Example
from lm.data.tasks.generators import example
from lm.data.tasks.in_text import Text
from lm.evaluation.answers import Trial, scored
from lm.evaluation.measurement import Measurement, Progress, Row
from lm.evaluation.recall import OVER, check_room
from lm.evaluation.sequences import EVAL_TOKENS, by_sequence
from lm.evaluation.statistics import wilson
from lm.model.attention_stream import attention_blocks
from lm.model.cross_entropy import linear_cross_entropy
from lm.model.decoder import Decoder
from lm.model.device import Device, over_ranks, undisturbed
from lm.model.inference import for_inference
from lm.schema import Plain, to_plain

SEED = 0  # of the trials, the same for every model
FINETUNE_SEED = 1  # of the rows of fine-tuning, which are training rows
OTHERS = 9  # numbers that the right one is ranked among, beside those of distractor needles
HEADS_DEPTH = 0.5


def trials(task: Needle, length: int, count: int, text: Text) -> list[Trial]:
    """`count` questions about rows of `length` tokens: test rows, the same for every model."""
    found: list[Trial] = []
    index = 0
    while len(found) < count:
        made = example(task, SEED, index, length, "test", text)
        found += [_trial(made, which, index, text) for which in range(len(made.questions))]
        index += 1
    return found[:count]


def _sha256(asked: list[Trial]) -> str:
    """Of prompts and answers."""
    return hashlib.sha256(np.concatenate([part for one in asked for part in (one.prompt, one.answer)]).astype("<i8").tobytes()).hexdigest()


def _trial(made: Example, which: int, index: int, text: Text) -> Trial:
    start, stop = made.questions[which]
    answer = made.tokens[start:stop]
    in_row = {number for number in re.findall(r"\d{7}", text.decode(made.tokens))}
    number = text.decode(answer).strip()
    draw, drawn = Draw(SEED + 1, "test", index), set()
    for _ in range(100 * OTHERS):  # of as many tokens: else the shorter would be the likelier
        other = str(1_000_000 + draw.one(9_000_000))
        if len(drawn) < OTHERS and len(text.encode(f" {other}")) == len(answer):
            drawn.add(other)
    others = [text.encode(f" {other}") for other in sorted((in_row | drawn) - {number})]
    return Trial(made.tokens[:start], answer, others, number, np.stack((made.evidence[which], made.needles[which])))


def finetuned(decoder: Decoder, config: NeedleConfig, seq_len: int, text: Text, where: Device) -> Decoder:
    """A copy of the decoder, trained to answer: answer-only loss on training rows of the training length.

    AdamW (0.9, 0.999) without weight decay, gradients clipped at 1, a third of the steps each of warm-up, constant rate and
    decay to 0 (after arXiv 2505.17083, App. G.2). The decoder itself stays as it is. Every rank does the same.
    """
    how = config.finetune
    model = copy.deepcopy(decoder).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, betas=(0.9, 0.999), weight_decay=0.0)
    task = Needle(needles=config.needles, distractors=config.distractors)
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(FINETUNE_SEED)
        for step in range(how.steps):
            where.check_time()
            third = max(1, how.steps // 3)
            optimizer.param_groups[0]["lr"] = how.lr * min(1.0, (step + 1) / third, (how.steps - step) / third)
            made = [example(task, FINETUNE_SEED, step * how.rows + row, seq_len, "train", text) for row in range(how.rows)]
            batch = Batch.of(np.stack([one.tokens for one in made]), np.stack([one.answers for one in made])).to(where.device)
            optimizer.zero_grad()
            for part in _split(batch, max(1, EVAL_TOKENS // seq_len)):
                with where.autocast():
                    loss = linear_cross_entropy(model.hidden(part).flatten(0, 1), model.head.weight, part.targets.flatten())
                (loss / sum(int(one.answers.sum()) for one in made)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model.eval()


def _split(batch: Batch, rows: int) -> list[Batch]:
    return [Batch(tokens, targets, None) for tokens, targets in zip(batch.tokens.split(rows), batch.targets.split(rows), strict=True)]


def head_scores(decoder: Decoder, one: Trial, length: int) -> Tensor:
    """Attention from the prompt's last token, in a row of `length`, to the number in its needle and to its sentence: (2, layers, H) fp32.

    Sums of weights (arXiv 2501.19399, Figs. 7 and 8, whose definition is not stated; this one is ours). Holds one query's weights.
    """
    tokens = torch.from_numpy(one.prompt[None]).to(decoder.head.weight.device)
    rows = Rows.next(0, len(one.prompt), length, tokens.device)
    found = [
        torch.stack([block.weights[0, :, 0, start:stop].sum(-1) for start, stop in one.spans])
        for block in attention_blocks(decoder, Batch(tokens, tokens, None), [-1], rows)
    ]
    return torch.stack(found, 1).cpu()


class NeedleMeasurement(Measurement):
    """Answers by context length and depth, with a control without the needle; and the heads that look at it."""

    kind = "needle"
    version = 3

    def __init__(self, config: Config, store: Store):
        super().__init__(config, store)
        self.asked, self.haystack = config.eval.needle, Text(store)
        lengths = [round(factor * config.data.seq_len) for factor in self.asked.length_factors]
        base = Needle(needles=self.asked.needles, distractors=self.asked.distractors)
        self.cells = [(length, replace(base, depth=depth)) for length in lengths for depth in self.asked.depths]
        self.cells += [(length, replace(base, absent=True)) for length in lengths]
        for length in lengths:
            check_room(base, length, "test", self.haystack, "eval.needle.length_factors", self.asked.length_factors)
        if self.asked.heads_at:
            check_room(base, self._heads_length, "test", self.haystack, "eval.needle.heads_at", self.asked.heads_at)
        if self.asked.finetune.steps:
            check_room(base, config.data.seq_len, "train", self.haystack, "eval.needle.finetune.steps", self.asked.finetune.steps)

    @property
    def _heads_length(self) -> int:
        return round(self.asked.heads_at * self.config.data.seq_len)

    @property
    def schedule(self) -> Schedule:
        return self.asked

    def precision(self, where: Device) -> str:
        return "32"  # answers are judged in fp32 whatever the model was trained in

    @property
    def settings(self) -> dict[str, Plain]:
        decides = {name: value for name, value in to_plain(self.asked).items() if name not in ("every", "at", "max_seconds")}
        return {"seq_len": self.config.data.seq_len, "seed": SEED, **decides}

    @property
    def work(self) -> int:
        return len(self.cells) * self.asked.trials * len(self.asked.settings)

    def measure(self, decoder: Decoder, where: Device, progress: Progress) -> dict[str, Plain]:
        with undisturbed(decoder):
            model = decoder
            if self.asked.finetune.steps:
                model = self._taught(decoder, where)
            cells = [self._cell(model, length, task, way, where, progress) for way in self.asked.settings for length, task in self.cells]
            heads = [self._heads(model, way, where) for way in self.asked.settings] if self.asked.heads_at else []
        return {"cells": cells, "heads": heads}

    def _taught(self, decoder: Decoder, where: Device) -> Decoder:
        """The copy that fine-tuning gives on rank 0, on all ranks: theirs might drift apart."""
        copies: list[Decoder] = []

        def local() -> Tensor:
            copies.append(finetuned(decoder, self.asked, self.config.data.seq_len, self.haystack, where))
            return torch.zeros(1)

        over_ranks(where, local)
        if where.world > 1:
            for value in copies[0].state_dict().values():
                torch.distributed.broadcast(value, 0)
        return copies[0]

    def _cell(
        self, decoder: Decoder, length: int, task: Needle, way: InferenceSetting, where: Device, progress: Progress
    ) -> dict[str, Plain]:
        asked = trials(task, length, self.asked.trials, self.haystack)
        nll, hits, digit, whole, better, margin = scored(for_inference(decoder, way), asked, length, where, self.haystack, progress).T
        return {
            "label": way.label,
            "length": length,
            "depth": task.depth,
            "absent": task.absent,
            "trials": len(asked),
            "trials_sha256": _sha256(asked),
            "nll": float(nll.mean(dtype=np.float64)),
            "exact": wilson(int(whole.sum()), len(whole)).listed(),
            "chance": task.guessing and task.guessing.given,  # earlier questions of a row stand in the prompt with their answers
            "exact_teacher_forced": wilson(int(hits.sum()), len(hits)).listed(),
            "first_digit": wilson(int(digit.sum()), len(digit)).listed(),
            "rank_first": wilson(int((better == 0).sum()), len(better)).listed(),
            "candidates": float(np.mean([1 + len(one.others) for one in asked])),
            "rank": float(1 + better.mean(dtype=np.float64)),
            "margin": float(margin.mean(dtype=np.float64)),
            "by_trial": [int(x) for x in whole],
        }

    def _heads(self, decoder: Decoder, way: InferenceSetting, where: Device) -> dict[str, Plain]:
        """Attention of every head to needles at `HEADS_DEPTH`, and whether the trial was answered."""
        length = self._heads_length
        task = Needle(needles=1, distractors=self.asked.distractors, depth=HEADS_DEPTH)
        asked, decoder = trials(task, length, self.asked.trials, self.haystack), for_inference(decoder, way)
        shape = 2, len(decoder.normalizers()), decoder.normalizers()[0].shape.n_head

        def measure(part: list[int]) -> Tensor:
            with torch.autocast(where.device.type, enabled=False):
                return torch.stack([head_scores(decoder, asked[index], length) for index in part])

        digit, whole = scored(decoder, asked, length, where, self.haystack).T[[2, 3]]
        by_trial = by_sequence([decoder], [len(one.prompt) for one in asked], shape, where, measure)
        number, sentence = by_trial.mean(0, dtype=np.float64)
        order = np.argsort(-number, axis=None)[:25]
        tokens = np.mean([np.diff(one.spans).ravel() for one in asked], axis=0)
        return {
            "label": way.label,
            "length": length,
            "depth": HEADS_DEPTH,
            "trials": len(asked),
            "number": number.round(6).tolist(),  # [layer][head], means over trials
            "sentence": sentence.round(6).tolist(),
            "chance": {"number": float(tokens[0] / length), "sentence": float(tokens[1] / length)},
            "top": [
                [int(layer), int(head), float(number[layer, head])]
                for layer, head in zip(*np.unravel_index(order, number.shape), strict=True)
            ],
            "highest_by_trial": by_trial[:, 0].max((1, 2)).round(6).tolist(),
            "outcome_by_trial": ["right" if w else "first digit" if d else "wrong" for d, w in zip(digit, whole, strict=True)],
        }

    def rows(self, result: dict[str, Plain]) -> list[Row]:
        taught = f", fine-tuned {result['finetune']['steps']} steps" if result["finetune"]["steps"] else ""
        found = []
        for cell in result["cells"]:
            place = "no needle" if cell["absent"] else f"depth {cell['depth']:.0%}"
            where, used = f"{cell['length']:,} tokens, {place}", cell["label"] + taught
            found.append(Row(used, where, "exact", *cell["exact"], OVER))
            found += [] if cell["chance"] is None else [Row(used, where, "exact: chance", cell["chance"])]
            found.append(Row(used, where, "first digit", *cell["first_digit"], OVER))
            found.append(Row(used, where, f"first of {cell['candidates']:.0f}", *cell["rank_first"], OVER))
            found.append(Row(used, where, "loss of answers", cell["nll"]))
        for heads in result["heads"]:
            layer, head, value = heads["top"][0]
            where = f"{heads['length']:,} tokens, depth {heads['depth']:.0%}, layer {layer}, head {head}"
            found.append(Row(heads["label"] + taught, where, "most attention on the number", value))
        return found

    def scores(self, result: dict[str, Plain]) -> dict[str, float]:
        found: dict[str, float] = {}
        for label, length, absent in dict.fromkeys((cell["label"], cell["length"], cell["absent"]) for cell in result["cells"]):
            some = [c for c in result["cells"] if (c["label"], c["length"], c["absent"]) == (label, length, absent)]
            name = f"needle/{'control' if absent else 'exact'} {length} {label}"
            found[name] = float(np.mean([cell["exact"][0] for cell in some]))
        return found

    def text(self, result: dict[str, Plain]) -> str:
        return "needles found: " + ", ".join(
            f"{value:.0%} ({name.removeprefix('needle/exact ')})" for name, value in self.scores(result).items() if "exact" in name
        )
