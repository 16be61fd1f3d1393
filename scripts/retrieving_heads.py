"""The head of a run that answers recall of pairs: its numbers at the training length, and where the run's accuracy
falls below one half.
"""

from bisect import bisect
from pathlib import Path

import numpy as np
import torch
from recall_results import observed_half_length

from lm.data.batches import Batch
from lm.data.tasks import example
from lm.diagnostics.retrieval_length import OCTAVES, half_length, median_weights, retrieving_head
from lm.errors import RunError
from lm.evaluation.answers import QUESTION_SEED
from lm.model.decoder import Decoder
from lm.runs.evaluations import last_evaluations
from lm.runs.folder import read_config
from lm.runs.loading import load
from lm.schema import to_plain

HALF = 0.5  # accuracy that a run falls below
CLEAR = 0.99  # accuracy at the longest length evaluated, above which a run is not measured at longer ones
SEQUENCES = 64  # test sequences that scores are measured on
UNSEEN = 8  # test sequences of each length that the recall evaluation has not measured
LONGER = 8192, 16384  # such lengths, tokens


def numbers(folder: Path) -> dict[str, float]:
    """What the head that gives the needle most weight has at the training length, a mean over questions of margins and
    slopes the median; and the lengths at which the run is predicted and observed to fall (docs/half-length.md).

    Raises RunError: the run was not trained on recall of pairs, or no layer sees all keys before the query.
    """
    config = read_config(folder)
    if not config.data.tasks:
        raise RunError(f"{folder}: was trained on text, not on a recall task: give the runs of a recall experiment")
    task, length, decoder = config.data.tasks[0].task, config.data.seq_len, load(folder).decoder
    examples = [example(task, QUESTION_SEED, index, length, "test") for index in range(SEQUENCES)]
    head = retrieving_head(decoder, examples, task.filler_symbols, any_map=True)
    if head is None:
        raise RunError(f"{folder}: no layer sees all keys before the query")
    lengths, accuracy = accuracies(folder, decoder)
    return {
        "margin": float(np.median(head.scores.margin)),
        "slope": float(np.median(head.scores.slope)),
        "weight on the needle": head.weight,
        "N_eff": float(head.effective_keys.mean()),
        "S": float(np.sqrt(head.effective_keys / head.scores.n).mean()),
        "entropy": float(head.entropy.mean()),
        "formula holds": float(head.formula_holds),
        "predicted half-length": half_length(median_weights(head.scores, length), length),
        "half-length": observed_half_length(lengths, accuracy),
        "longest": lengths[-1],
    }


def accuracies(folder: Path, decoder: Decoder) -> tuple[list[int], list[float]]:
    """Lengths and the accuracy of a run at each: those of its recall evaluation, lengths an octave apart where it falls
    below one half between two of them, and longer ones if it is neither clear nor lost by then.

    Raises RunError: it has no recall evaluation.
    """
    evaluations, missing_names = last_evaluations(folder, to_plain(read_config(folder)))
    curves = [
        curve
        for evaluation in evaluations
        for curve in evaluation.series
        if evaluation.kind == "recall" and curve.metric == "accuracy"
    ]
    if not curves:
        raise RunError(f"{folder}: has no recall evaluation ({', '.join(missing_names)}): lm eval {folder}")
    curve = curves[0]  # teacher-forced; the roll-out follows
    lengths, accuracy = [int(value) for value in curve.axis.values], curve.means.tolist()
    for length in between(lengths, accuracy):
        place = bisect(lengths, length)
        lengths.insert(place, length)
        accuracy.insert(place, accuracy_at(decoder, folder, length))
    for length in LONGER:
        if length > lengths[-1] and HALF <= accuracy[-1] < CLEAR:
            lengths.append(length)
            accuracy.append(accuracy_at(decoder, folder, length))
    return lengths, accuracy


def between(lengths: list[int], accuracy: list[float]) -> list[int]:
    """The lengths, doubled each time, that lie between the two where accuracy first falls below one half; [] if it
    never does.
    """
    last = next((index for index, right in enumerate(accuracy) if right < HALF), 0)
    doubled = [lengths[last - 1] * 2**power for power in range(1, OCTAVES)] if last else []
    return [length for length in doubled if length < lengths[last]]


@torch.no_grad()
def accuracy_at(decoder: Decoder, folder: Path, length: int) -> float:
    """Accuracy, teacher-forced, on `UNSEEN` test sequences of `length` tokens, one at a time."""
    task, right = read_config(folder).data.tasks[0].task, []
    for index in range(UNSEEN):
        sequence = example(task, QUESTION_SEED, index, length, "test")
        positions = torch.as_tensor(sequence.questions[:, 0])
        first = int(positions.min()) - 1
        logits = decoder.head(decoder.hidden(Batch.of(sequence.tokens[None]), first)[0, positions - 1 - first])
        right += (logits.argmax(-1) == torch.as_tensor(sequence.tokens)[positions]).tolist()
    return float(np.mean(right))
