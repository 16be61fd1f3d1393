"""At which length attention loses the key that it is to retrieve, from scores at one length: the prediction of docs/half-length.md.

A query sees n keys; one of them, the needle, has the score z*. Weights are e^z over their sum. The sequence grows by `more` tokens like
those of its filler: scores are multiplied by 1 + slope ln((n + more) / n), and each token adds the mean of e^z over filler to the sum. The
slope is d ln(scale) / d ln n of the normalizer at n: 0 of softmax, 1 / ln n of a scale that is proportional to ln n. The needle has

    w = 1 / (1 + sum over other keys of e^(z - z*) + more mean over filler of e^(z - z*)),

with the scores z at the new length.

Shapes: Q questions, K keys (-inf where a key is not visible).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.data.batches import Batch
from lm.data.tasks import Example
from lm.diagnostics.attention_rows import AttentionRows, later
from lm.model.attention_stream import AttentionBlock, attention_blocks
from lm.model.decoder import Decoder

STEPS_AN_OCTAVE = 8  # lengths at which a crossing is looked for
OCTAVES = 40  # as far as is looked: beyond it a model is said never to lose the needle


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Scores that a head gives to questions at one length, fp64."""

    needle: np.ndarray  # (Q,) z*, score of the key that holds the answer
    others: np.ndarray  # (Q, K) scores of all other visible keys
    is_filler: np.ndarray  # (Q, K) bool, which of those a longer sequence has more of
    n: np.ndarray  # (Q,) visible keys
    slope: np.ndarray  # (Q,) of the scores' scale on ln n, relative to the scale at n

    def weight(self, more: float) -> np.ndarray:
        """Weight on the needle (Q,) in a sequence of `more` further tokens."""
        scale = (1 + self.slope * np.log1p(more / self.n))[:, None]
        odds = np.exp(np.minimum(scale * (self.others - self.needle[:, None]), 600.0))  # -inf: 0
        of_filler = np.where(self.is_filler, odds, 0.0).sum(1) / self.is_filler.sum(1)
        return 1 / (1 + odds.sum(1) + more * of_filler)

    @property
    def margin(self) -> np.ndarray:
        """The needle's score minus the log of filler's mean e^score, (Q,) nats: e^margin keys of filler weigh as much as the needle."""
        filler = np.where(self.is_filler, np.exp(self.others - self.needle[:, None]), 0.0)
        return -np.log(filler.sum(1) / self.is_filler.sum(1))


@dataclass(frozen=True, eq=False)
class RetrievingHead:
    """The head that gives the needle most weight, a mean over questions."""

    layer: int  # from 0
    head: int  # from 0
    weight: float  # that mean
    effective_keys: np.ndarray  # (Q,) N_eff of its rows
    entropy: np.ndarray  # (Q,) of its rows, nats
    scores: Retrieval  # those of its rows
    formula_holds: bool = True  # whether its weights are those that the formula is of


@torch.no_grad()
def retrieving_head(decoder: Decoder, examples: list[Example], any_map: bool = False) -> RetrievingHead | None:
    """The head that answers questions of sequences of one length; None if no layer is one that the formula holds for.

    It holds for weights e^score over their sum, on all keys up to the query, that do not depend on distance. Filler is neither in a pair
    nor in a question, nor is its predecessor. With `any_map` other weights on all keys before the query count as well: the log of a
    weight's share in its row stands for its score, without a slope.
    """
    parts: dict[int, list[tuple[np.ndarray, ...]]] = {}
    formula_holds: dict[int, bool] = {}
    for example in examples:
        asked = (example.questions[:, 0] - 1).tolist()
        batch = Batch.of(example.tokens[None]).to(decoder.head.weight.device)
        for block in attention_blocks(decoder, batch, asked, inputs=True, block=len(asked)):
            rows = AttentionRows.of(block)
            by_score = block.normalizer.score_map == "exp" and not block.normalizer.log_decay(rows.scores).any()
            if bool((rows.n == rows.queries + 1).all()) if by_score else any_map and bool((rows.n >= rows.queries).all()):
                parts.setdefault(block.layer, []).append(_of_block(block, rows, example, by_score))
                formula_holds[block.layer] = by_score
    best: RetrievingHead | None = None
    for layer, blocks in parts.items():
        needle, others, filler, n, slope, weight, effective, entropy = (np.concatenate(values) for values in zip(*blocks, strict=True))
        head = int(weight.mean(0).argmax())
        if best is None or weight[:, head].mean() > best.weight:
            scores = Retrieval(needle[:, head], others[:, head], filler, n, slope[:, head])
            mean = float(weight[:, head].mean())
            best = RetrievingHead(layer, head, mean, effective[:, head], entropy[:, head], scores, formula_holds[layer])
    return best


def _of_block(block: AttentionBlock, rows: AttentionRows, example: Example, by_score: bool) -> tuple[np.ndarray, ...]:
    """For each question of a sequence: needle (Q, H), others (Q, H, L), filler (Q, L), n (Q,), slope, weight, N_eff and entropy (Q, H)."""
    length, keys, device = len(example.tokens) - 1, rows.visible.size(-1), rows.visible.device
    evidence, questions = torch.as_tensor(example.evidence[:, 0], device=device), torch.arange(len(example.questions), device=device)
    weights = rows.weights if by_score else (rows.size / rows.total.unsqueeze(-1)).nan_to_num()
    shares = weights.double().transpose(0, 1)  # (Q, H, S)
    scores = rows.scores.double().transpose(0, 1) if by_score else shares.clamp_min(1e-300).log()
    scores = scores.masked_fill(~rows.visible.unsqueeze(1), -math.inf)
    needle = scores[questions, :, evidence]
    others = scores.clone()
    others[questions, :, evidence] = -math.inf
    special = torch.zeros(length + 1, dtype=torch.bool, device=device)
    for start, stop in [*example.needles, (example.questions[0, 0] - 1, length + 1)]:
        special[start:stop] = True
    filler = ~special[:keys] & ~torch.cat((special.new_ones(1), special[: keys - 1])) & rows.visible
    growth = _scale_at_twice(block, rows, length) - 1 if by_score else torch.zeros_like(needle)
    slope = growth / torch.log1p(length / rows.n.double()).unsqueeze(-1)
    weight, entropy = shares[questions, :, evidence], -torch.special.xlogy(shares, shares).sum(-1)
    effective = 1 / shares.square().sum(-1)
    pad = (0, length - keys)
    padded = F.pad(others, pad, value=-math.inf), F.pad(filler, pad)
    return tuple(values.cpu().numpy() for values in (needle, *padded, rows.n.double(), slope, weight, effective, entropy))


def _scale_at_twice(block: AttentionBlock, rows: AttentionRows, length: int) -> Tensor:
    """The factor on the scores of the same queries and keys where `length` more tokens stand before all of them, (Q, H) fp64."""
    queries, keys = block.inputs.q[:, :, block.queries], block.inputs.k[:, :, : rows.visible.size(-1)]
    shifted = block.normalizer.scores(queries, keys, later(block.layout, length))[0].double()
    now = rows.scores.double().masked_fill(~rows.visible, 0.0)
    return ((shifted * now).sum(-1) / now.square().sum(-1)).transpose(0, 1)


def median_weights(scores: Retrieval, length: int) -> np.ndarray:
    """The median weight on the needle at the lengths `reach(length)`, (R,)."""
    return np.array([np.median(scores.weight(at - length)) for at in reach(length)])


def reach(length: int) -> np.ndarray:
    """The lengths that a prediction looks at, (R,) tokens: `STEPS_AN_OCTAVE` in each of `OCTAVES` octaves from `length` on."""
    return length * 2 ** (np.arange(OCTAVES * STEPS_AN_OCTAVE + 1) / STEPS_AN_OCTAVE)


def half_length(weights: np.ndarray, length: int, threshold: float = 0.5) -> float:
    """The least length, tokens, at which the median weight on the needle (`median_weights`) is below `threshold`; infinite if none is.

    Between the lengths looked at ln odds of the weight are linear in the logarithm of the length.
    """
    below = np.flatnonzero(weights < threshold)
    if not len(below):
        return math.inf
    lengths, last = reach(length), int(below[0])
    if last == 0:
        return float(length)
    odds = np.log(np.maximum(1 / weights[last - 1 : last + 1] - 1, 1e-300))
    part = (math.log(1 / threshold - 1) - odds[0]) / (odds[1] - odds[0])
    return float(lengths[last - 1] * (lengths[last] / lengths[last - 1]) ** part)
