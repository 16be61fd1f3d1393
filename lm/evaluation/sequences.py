"""Numbers of each of many sequences: in batches of one length, split over ranks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lm.evaluation.measurement import Progress
from lm.model.decoder import Decoder
from lm.model.device import Device, over_ranks, undisturbed

EVAL_TOKENS = 16384  # tokens in one forward pass


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
        progress: hears how many sequences are done.
    """

    def local() -> Tensor:
        result, alike = torch.zeros(len(lengths), *shape), {}
        for index in range(len(lengths))[where.rank :: where.world]:
            alike.setdefault(lengths[index], []).append(index)
        for length, mine in alike.items():
            batch = max(1, EVAL_TOKENS // length)
            for start in range(0, len(mine), batch):
                where.check_time()
                part = mine[start : start + batch]
                result[part] = measure(part).cpu()
                progress(len(part))
        return result

    with undisturbed(*models):
        return over_ranks(where, local).numpy()
