"""The prediction of docs/theory.md on the runs of a recall experiment: at which length accuracy falls below one half."""

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from recompute import observed_half_length

from lm.data.batches import Batch
from lm.data.tasks import example
from lm.diagnostics.retrieval_length import OCTAVES, Retrieval, half_length, median_weights, retrieving_head
from lm.errors import RunError
from lm.evaluation.answers import QUESTION_SEED
from lm.model.decoder import Decoder
from lm.runs.evaluations import last_evaluations
from lm.runs.folder import read_config
from lm.runs.loading import load
from lm.schema import to_plain

HALF = 0.5  # accuracy that a run falls below, and the threshold of the form without a fitted constant
SEQUENCES = 64  # test sequences that scores are measured on
UNSEEN = 8  # test sequences of each length that the recall evaluation has not measured
LEARNED = 0.9  # accuracy at the training length from which on a run has learned the task
CLEAR = 0.99  # accuracy at the longest length evaluated, above which a run is not measured at longer ones


def error(predicted: float, observed: float, longest: int) -> float:
    """|log2(predicted / observed)|, octaves.

    If the run keeps half of its accuracy up to `longest`, the last length measured (`observed` is infinite): how far the prediction lies
    below that; 0 if it lies beyond, which is all that is known to be right.
    """
    if math.isinf(observed):
        return max(0.0, math.log2(longest / predicted)) if math.isfinite(predicted) else 0.0
    return abs(math.log2(min(predicted, 2.0**OCTAVES * longest) / observed))


def fitted_threshold(weights: Sequence[np.ndarray], observed: Sequence[float], length: int, longest: int) -> float:
    """The threshold of the least sum of errors over runs, each with its `median_weights`."""
    candidates = 1 / (1 + np.exp(-np.linspace(-6, 4, 101)))

    def total(threshold: float) -> float:
        return sum(error(half_length(each, length, threshold), seen, longest) for each, seen in zip(weights, observed, strict=True))

    return float(min(candidates, key=total))


@dataclass(frozen=True, eq=False)
class Run:
    """A run: its arm, what it gives at the training length, and its accuracy at some lengths (empty until they may be looked at).

    Attributes:
        head: (layer, head) with the largest mean weight on the needle, `at_length`.
        effective: mean N_eff of that head on the questions; `s`: mean S; `entropy`: mean, nats.
        formula_holds: whether the head's weights are those that the formula is of.
    """

    folder: Path
    arm: str
    length: int
    head: tuple[int, int]
    at_length: float
    effective: float
    s: float
    found: Retrieval
    weights: np.ndarray
    lengths: tuple[int, ...] = ()
    accuracy: tuple[float, ...] = ()
    entropy: float = math.nan
    formula_holds: bool = True

    @property
    def observed(self) -> float:
        """Its 50 % length."""
        return observed_half_length(self.lengths, self.accuracy)

    def up_to(self, longest: int) -> "Run":
        """As if it had been measured up to this length alone."""
        count = sum(length <= longest for length in self.lengths)
        return replace(self, lengths=self.lengths[:count], accuracy=self.accuracy[:count])

    def error(self, predicted: float) -> float:
        """Of a prediction, octaves."""
        return error(predicted, self.observed, self.lengths[-1])

    def predicted(self, threshold: float) -> float:
        """Its 50 % length by the formula."""
        return half_length(self.weights, self.length, threshold)


def measured(folder: Path, any_map: bool = False) -> Run:
    """A run's numbers at the training length; with `any_map` of heads that the prediction does not hold for as well.

    Raises RunError: it was not trained on recall of pairs, or has no such attention.
    """
    config = read_config(folder)
    if not config.data.tasks:
        raise RunError(f"{folder}: was trained on text, not on a recall task: give --recall the runs of a recall experiment")
    task, length = config.data.tasks[0].task, config.data.seq_len
    questions = [example(task, QUESTION_SEED, index, length, "test") for index in range(SEQUENCES)]
    head = retrieving_head(load(folder).decoder, questions, any_map)
    if head is None:
        raise RunError(f"{folder}: no layer has weights that are e^score over their sum, which the prediction is of")
    arm = f"{', '.join(dict.fromkeys(layer.label() for layer in config.model.normalizer.layer_options()))}, {config.optim.lr:g}"
    s = float(np.sqrt(head.effective_keys / head.scores.n).mean())
    effective, weights = float(head.effective_keys.mean()), median_weights(head.scores, length)
    place, entropy = (head.layer, head.head), float(head.entropy.mean())
    return Run(
        folder, arm, length, place, head.weight, effective, s, head.scores, weights, entropy=entropy, formula_holds=head.formula_holds
    )


def between(lengths: list[int], accuracy: list[float]) -> list[int]:
    """The lengths, doubled each time, that lie between the two where accuracy first falls below one half; [] if it never does."""
    last = next((index for index, right in enumerate(accuracy) if right < HALF), 0)
    doubled = [lengths[last - 1] * 2**power for power in range(1, OCTAVES)] if last else []
    return [length for length in doubled if length < lengths[last]]


@torch.no_grad()
def accuracy_at(decoder: Decoder, folder: Path, length: int, sequences: int) -> float:
    """Accuracy, teacher-forced, on test sequences of `length` tokens, one at a time."""
    task, right = read_config(folder).data.tasks[0].task, []
    for index in range(sequences):
        made = example(task, QUESTION_SEED, index, length, "test")
        at = torch.as_tensor(made.questions[:, 0])
        logits = decoder.head(decoder.hidden(Batch.of(made.tokens[None]))[0, at - 1])
        right += (logits.argmax(-1) == torch.as_tensor(made.tokens)[at]).tolist()
    return float(np.mean(right))


def observed(run: Run, longer: tuple[int, ...], sequences: int) -> Run:
    """The run with its accuracy: that of its recall evaluation; at `longer` lengths where it is neither clear nor lost by then; and an
    octave apart between two lengths of the evaluation where it falls below one half between them."""
    every, missing = last_evaluations(run.folder, to_plain(read_config(run.folder)))
    curves = [one for evaluation in every for one in evaluation.series if evaluation.kind == "recall" and one.metric == "accuracy"]
    if not curves:
        raise RunError(f"{run.folder}: has no recall evaluation ({', '.join(missing)}): lm eval {run.folder}")
    curve = curves[0]  # teacher-forced; the roll-out follows
    lengths, accuracy = [int(value) for value in curve.axis.values], curve.means.tolist()
    decoder = load(run.folder).decoder
    for length in between(lengths, accuracy):
        place = bisect(lengths, length)
        lengths.insert(place, length)
        accuracy.insert(place, accuracy_at(decoder, run.folder, length, sequences))
    for length in longer:
        if length > lengths[-1] and HALF <= accuracy[-1] < CLEAR:
            lengths.append(length)
            accuracy.append(accuracy_at(decoder, run.folder, length, sequences))
    return replace(run, lengths=tuple(lengths), accuracy=tuple(accuracy))


@dataclass(frozen=True)
class Score:
    """How predictions of one form came out, over runs: errors in octaves.

    Attributes:
        name: of the form.
        fell: mean error of the runs that fell below one half within the lengths measured.
        within: how many of those were predicted to within a factor of two.
        kept: how many of the others (censored) were predicted to keep more than half, as they did.
        predictions: of each run, tokens.
        thresholds: of each arm, if the form has one.
    """

    name: str
    fell: float
    within: int
    kept: int
    predictions: list[float]
    thresholds: dict[str, float]


def scores(runs: list[Run]) -> list[Score]:
    """The form without a constant, that with one fitted on the other arms, and the baseline, on runs that have learned the task."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    others = {arm: [run for run in runs if run.arm != arm] for arm in arms}
    fitted = {
        arm: fitted_threshold(
            [run.weights for run in part], [run.observed for run in part], runs[0].length, max(run.lengths[-1] for run in part)
        )
        for arm, part in others.items()
    }
    ends = {run: min(run.observed, run.lengths[-1]) for run in runs}
    mean = {arm: float(np.exp(np.mean([math.log(ends[run]) for run in part]))) for arm, part in others.items()}
    return [
        _score("weight below 1/2", runs, [run.predicted(HALF) for run in runs], {}),
        _score("weight below a threshold fitted on the other arms", runs, [run.predicted(fitted[run.arm]) for run in runs], fitted),
        _score("baseline: mean length of the other arms", runs, [mean[run.arm] for run in runs], {}),
    ]


def _score(name: str, runs: list[Run], predictions: list[float], thresholds: dict[str, float]) -> Score:
    errors = [(run, run.error(predicted), predicted) for run, predicted in zip(runs, predictions, strict=True)]
    fell = [one for run, one, _ in errors if math.isfinite(run.observed)]
    kept = sum(predicted >= run.lengths[-1] for run, _, predicted in errors if math.isinf(run.observed))
    return Score(name, float(np.mean(fell)) if fell else math.nan, sum(one <= 1 for one in fell), kept, predictions, thresholds)
