"""Questions with one correct answer, asked in fp32: given the correct earlier answers, after the model's own, and among other answers."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.data.batches import Batch
from lm.data.tasks.examples import Example
from lm.data.tasks.in_text import Text
from lm.evaluation.measurement import Progress
from lm.evaluation.sequences import by_sequence
from lm.model.blocks import DecodingCache
from lm.model.cross_entropy import argmax_tokens, token_nll
from lm.model.decoder import Decoder
from lm.model.device import Device

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
    progress: Progress = lambda sequences: None,
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


def scored(
    decoder: Decoder,
    asked: list[Trial],
    length: int,
    where: Device,
    text: Text,
    progress: Progress = lambda trials: None,
) -> np.ndarray:
    """`score` of trials whose prompts are parts of sequences of `length` tokens, in fp32: (trials, len(SCORED)). Collective."""

    def measure(part: list[int]) -> Tensor:
        with torch.autocast(where.device.type, enabled=False):
            return score(decoder, [asked[index] for index in part], length, text)

    return by_sequence([decoder], [len(one.prompt) for one in asked], (len(SCORED),), where, measure, progress)


def score(decoder: Decoder, asked: list[Trial], length: int, text: Text) -> Tensor:
    """Prompts of one length, read once each: (trials, len(SCORED)) fp32, as `SCORED` names its columns.

    1 if all that greedy decoding writes is correct; 1 if its first digit is; 1 if each token of the answer is the most probable one after
    those before (then greedy decoding gives it); 1 if no other is more probable than the answer (as a whole number); 1 and how many are;
    loss of the answer (nats per token); and its difference to the loss of the most probable other (nats; 0 if there is none).
    """
    device = decoder.head.weight.device
    prompts = torch.from_numpy(np.stack([one.prompt for one in asked])).to(device)
    cache = DecodingCache(length)
    first = decoder.head(decoder(prompts, cache=cache)[:, -1:]).float()  # (B, 1, V)
    written = _greedy(decoder, first, cache.fork(1), max(len(one.answer) for one in asked) + 2)
    found = []
    for index, one in enumerate(asked):
        candidates = [one.answer, *one.others]
        nll, hits = _nll(decoder, candidates, first[index : index + 1], cache.select(index).fork(len(candidates)))
        better = (nll[1:] < nll[0]).sum()
        said = text.decode(written[index].cpu().numpy()).strip()
        digit, whole = said[:1] == one.number[:1], re.match(r"\d*", said)[0] == one.number
        margin = nll[0] - nll[1:].min() if one.others else 0
        scores = whole, digit, hits, better == 0, 1 + better, nll[0] / len(one.answer), margin
        found.append([float(number) for number in scores])
    return torch.tensor(found)


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
    for number, one in enumerate(candidates):
        tokens[number, : len(one)], real[number, : len(one)] = torch.from_numpy(one), 1.0
    tokens, real = tokens.to(first.device), real.to(first.device)
    logits = first.expand(len(candidates), -1, -1)
    if longest > 1:
        logits = torch.cat((logits, decoder.head(decoder(tokens[:, :-1], cache=cache)).float()), 1)
    log_p = logits.log_softmax(-1).gather(2, tokens.unsqueeze(-1)).squeeze(-1)
    hits = (logits[0].argmax(-1) == tokens[0])[: len(candidates[0])]
    return -(log_p * real).sum(1), bool(hits.all())
