"""Numbers of each of many sequences: in batches of one length, split over ranks; and which sequences they are."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lm.evaluation.measurement import Progress
from lm.model.decoder import Decoder
from lm.model.device import Device, all_reduce_sum, eval_mode

EVAL_TOKENS = 16384  # tokens in one forward pass
T = TypeVar("T")


def tokens_sha256(sequences: Iterable[np.ndarray]) -> str:
    """Of token ids, one sequence after the other."""
    return hashlib.sha256(np.concatenate(list(sequences)).astype("<i8").tobytes()).hexdigest()


def batches(items: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Sequences of one `length` each, in their order, at most `EVAL_TOKENS` tokens together."""
    alike: dict[int, list[T]] = {}
    for item in items:
        alike.setdefault(length(item), []).append(item)
    for tokens, same in alike.items():
        size = max(1, EVAL_TOKENS // tokens)
        yield from (same[start : start + size] for start in range(0, len(same), size))


def by_sequence(
    models: list[Decoder],
    lengths: Sequence[int],
    shape: tuple[int, ...],
    where: Device,
    measure: Callable[[list[int]], Tensor],
    progress: Progress = lambda sequences: None,
) -> np.ndarray:
    """What `measure` gives of each sequence: (N, *shape) fp32. Collective.

    Sequences are split over the ranks of `where`; every rank returns all.

    Args:
        models: those that `measure` runs; in evaluation mode meanwhile, and without gradients.
        lengths: tokens in each sequence, (N,): those of one length are read together.
        measure: indices of sequences of one length -> (indices, *shape).
        progress: called with the number of sequences done.
    """

    def local() -> Tensor:
        result = torch.zeros(len(lengths), *shape)
        for part in batches(range(len(lengths))[where.rank :: where.world], lengths.__getitem__):
            where.check_time()
            result[part] = measure(part).cpu()
            progress(len(part))
        return result

    with eval_mode(*models):
        return all_reduce_sum(where, local).numpy()
