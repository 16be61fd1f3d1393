"""Prediction, from scores at one length, of the length at which attention loses the key that it is to retrieve
(docs/half-length.md).

A query sees n keys; one of them, the needle, has the score z*. A key's weight is e^z / (sum of e^z). When the sequence
grows by `growth` tokens like its filler, scores are multiplied by 1 + slope ln((n + growth) / n). Each new token adds
the mean of e^z over filler to the sum. The slope is d ln(scale) / d ln n at n, where `scale` is the factor on scores.
It is 0 for softmax, and 1 / ln n for a scale proportional to ln n. The needle's weight is

    w = 1 / (1 + (sum over other keys of e^(z - z*)) + growth (mean over filler of e^(z - z*))),

with the scores z at the new length.

Shapes: Q questions, K keys (-inf where a key is not visible).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention.normalizer import Normalizer
from lm.data.batches import Batch
from lm.data.tasks import Example
from lm.diagnostics.attention_rows import AttentionRows, shifted_layout
from lm.model.attention_stream import QueryBlock, attention_blocks
from lm.model.decoder import Decoder

STEPS_AN_OCTAVE = 8  # lengths in an octave that `half_length` searches
OCTAVES = 40  # octaves that are searched: a model that keeps the needle there is said never to lose it


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Scores of the queries of Q questions in one head, at one sequence length, fp64."""

    needle: np.ndarray  # (Q,) z*, score of the key that holds the answer
    other_scores: np.ndarray  # (Q, K) scores of all other keys, -inf where not visible
    is_filler: np.ndarray  # (Q, K) bool, whether a key is filler, of which a longer sequence has more
    n: np.ndarray  # (Q,) visible keys
    slope: np.ndarray  # (Q,) growth of the scores' scale with each unit of ln n, over the scale at n

    def weight(self, growth: float) -> np.ndarray:
        """The weight on the needle, (Q,), in a sequence with `growth` further tokens."""
        scale = (1 + self.slope * np.log1p(growth / self.n))[:, None]
        is_visible = np.isfinite(
            self.other_scores
        )  # times a scale of 0 or below, the -inf of others would be NaN or infinite
        gaps = np.where(is_visible, self.other_scores - self.needle[:, None], 0.0)
        odds = np.where(is_visible, np.exp(np.minimum(scale * gaps, 600.0)), 0.0)
        filler_mean = np.where(self.is_filler, odds, 0.0).sum(1) / self.is_filler.sum(1)
        return 1 / (1 + odds.sum(1) + growth * filler_mean)

    @property
    def margin(self) -> np.ndarray:
        """The needle's score minus the log of filler's mean e^score, (Q,) nats: e^margin keys of filler weigh as much
        as the needle.
        """
        filler = np.where(self.is_filler, np.exp(self.other_scores - self.needle[:, None]), 0.0)
        return -np.log(filler.sum(1) / self.is_filler.sum(1))


@dataclass(frozen=True, eq=False)
class RetrievingHead:
    """The head with the largest mean weight on the needle (the key to retrieve) over Q questions."""

    layer: int  # from 0
    head: int  # from 0
    weight: float  # mean weight on the needle
    effective_keys: np.ndarray  # (Q,) N_eff of each question's query
    entropy: np.ndarray  # (Q,) entropy of each question's query, nats
    scores: Retrieval  # scores of each question's query
    formula_holds: bool = True  # whether its weights are e^score times a factor of the query


@torch.no_grad()
def retrieving_head(
    decoder: Decoder, examples: list[Example], filler: range, any_map: bool = False
) -> RetrievingHead | None:
    """The head with the largest mean weight on the needle in sequences of one length; None if the module's formula
    holds for no layer.

    The formula holds for weights e^score / (sum of e^score) on all keys up to the query, if they do not depend on
    distance. A key is filler if its token's id and the id of the token before it are in `filler`. With `any_map` heads
    with other weights are searched, too, if queries see all keys before them. The slope is taken as 0 if such weights
    are not e^score times a factor of the query, or have a window or a decay as in ALiBi. A key's score is then the log
    of its fraction of the query's weight.
    """
    parts: dict[int, list[tuple[np.ndarray, ...]]] = {}
    formula_holds: dict[int, bool] = {}
    for example in examples:
        queries = (example.questions[:, 0] - 1).tolist()
        batch = Batch.of(example.tokens[None]).to(decoder.head.weight.device)
        for block in attention_blocks(decoder, batch, queries, with_inputs=True, block=len(queries)):
            rows = AttentionRows.from_block(block)
            normalizer = block.normalizer
            is_exp_map = normalizer.score_map == "exp" and not normalizer.log_decay(rows.scores).any()
            is_exp_map &= (
                type(normalizer).visible is Normalizer.visible
            )  # a window may hold these sequences and not longer ones
            is_exp_map &= any_map or (normalizer.options.rows_sum_to_one and not normalizer.depends_on_distance)
            if is_exp_map or (any_map and bool((rows.n >= rows.queries).all())):
                parts.setdefault(block.layer, []).append(_block_scores(block, rows, example, filler, is_exp_map))
                formula_holds[block.layer] = is_exp_map
    best_head: RetrievingHead | None = None
    for layer, blocks in parts.items():
        arrays = (np.concatenate(values) for values in zip(*blocks, strict=True))
        needle, other_scores, filler, n, slope, weight, effective_keys, entropy = arrays
        head = int(weight.mean(0).argmax())
        if best_head is None or weight[:, head].mean() > best_head.weight:
            scores, mean = (
                Retrieval(needle[:, head], other_scores[:, head], filler, n, slope[:, head]),
                float(weight[:, head].mean()),
            )
            best_head = RetrievingHead(
                layer, head, mean, effective_keys[:, head], entropy[:, head], scores, formula_holds[layer]
            )
    return best_head


def _block_scores(
    block: QueryBlock, rows: AttentionRows, example: Example, filler: range, is_exp_map: bool
) -> tuple[np.ndarray, ...]:
    """Arrays for Q questions of a sequence of L tokens: `Retrieval`'s needle (Q, H), other_scores (Q, H, L), is_filler
    (Q, L), n (Q,) and slope (Q, H), then the weight on the needle, effective keys 1 / (sum of squared weights) and the
    entropy, (Q, H) each.
    """
    length, keys, device = len(example.tokens) - 1, rows.visible.size(-1), rows.visible.device
    evidence, questions = (
        torch.as_tensor(example.evidence[:, 0], device=device),
        torch.arange(len(example.questions), device=device),
    )
    weights = rows.weights if is_exp_map else (rows.magnitudes / rows.abs_sum.unsqueeze(-1)).nan_to_num()
    fractions = weights.double().transpose(0, 1)  # (Q, H, S)
    scores = rows.scores.double().transpose(0, 1) if is_exp_map else fractions.clamp_min(1e-300).log()
    scores = scores.masked_fill(~rows.visible.unsqueeze(1), -math.inf)
    needle = scores[questions, :, evidence]
    other_scores = scores.clone()
    other_scores[questions, :, evidence] = -math.inf
    tokens = torch.as_tensor(example.tokens, device=device)
    is_special = (tokens < filler.start) | (tokens >= filler.stop)  # in a pair or a question
    is_filler = ~is_special[:keys] & ~torch.cat((is_special.new_ones(1), is_special[: keys - 1])) & rows.visible
    growth = _shifted_scale(block, rows, length) - 1 if is_exp_map else torch.zeros_like(needle)
    slope = growth / torch.log1p(length / rows.n.double()).unsqueeze(-1)
    weight, entropy = fractions[questions, :, evidence], -torch.special.xlogy(fractions, fractions).sum(-1)
    effective_keys = 1 / fractions.square().sum(-1)
    pad = (0, length - keys)
    padded_arrays = F.pad(other_scores, pad, value=-math.inf), F.pad(is_filler, pad)
    return tuple(
        values.cpu().numpy()
        for values in (needle, *padded_arrays, rows.n.double(), slope, weight, effective_keys, entropy)
    )


def _shifted_scale(block: QueryBlock, rows: AttentionRows, length: int) -> Tensor:
    """The factor, (Q, H) fp64, by which the scores of the block's queries and keys change if `length` more tokens stand
    before them.
    """
    queries, keys = block.inputs.q[:, :, block.queries], block.inputs.k[:, :, : rows.visible.size(-1)]
    shifted_scores = block.normalizer.scores(queries, keys, shifted_layout(block.layout, length))[0].double()
    scores = rows.scores.double().masked_fill(~rows.visible, 0.0)
    return ((shifted_scores * scores).sum(-1) / scores.square().sum(-1)).transpose(0, 1)


def median_weights(scores: Retrieval, length: int) -> np.ndarray:
    """The median over questions of the weight on the needle, (R,), at each of the R `candidate_lengths(length)`."""
    return np.array([np.median(scores.weight(new_length - length)) for new_length in candidate_lengths(length)])


def candidate_lengths(length: int) -> np.ndarray:
    """Lengths among which the length of failure is sought, (R,) tokens: `STEPS_AN_OCTAVE` in each of `OCTAVES`
    doublings of `length`.
    """
    return length * 2 ** (np.arange(OCTAVES * STEPS_AN_OCTAVE + 1) / STEPS_AN_OCTAVE)


def half_length(weights: np.ndarray, length: int, threshold: float = 0.5) -> float:
    """The least length, tokens, at which the median weight on the needle (`median_weights`) is below `threshold`, else
    infinite.

    Between the lengths of `candidate_lengths` the log odds of the weight are taken as linear in the logarithm of the
    length.
    """
    indices = np.flatnonzero(weights < threshold)
    if not len(indices):
        return math.inf
    lengths, index = candidate_lengths(length), int(indices[0])
    if index == 0:
        return float(length)
    log_odds = np.log(np.maximum(1 / weights[index - 1 : index + 1] - 1, 1e-300))
    fraction = (math.log(1 / threshold - 1) - log_odds[0]) / (log_odds[1] - log_odds[0])
    return float(lengths[index - 1] * (lengths[index] / lengths[index - 1]) ** fraction)
