"""Which of several streams each slot of a run reads from: a pure function of (seed words, slot)."""

import numpy as np

BLOCK = 1024  # slots that are assigned together
_SAMPLER_SEED = 2**61  # keeps these draws apart from those of epochs and lengths


def members(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The members of groups of the sizes `counts`, group by group: each member's group, and its number in it, from 0; int64 (members,)."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


class StratifiedSampler:
    """Assigns slots 0, 1, ... to streams by weight: a stream of weight w is due once in every 1 / w slots, at a random place in them.

    Slots go to the streams in the order in which they are due. However long the run, a stream has had its weight's fraction of the
    slots so far to within 1 + w x streams; and no period of the run, such as every tenth step, favours any.

    Args:
        weights: above 0, in any unit.
        seed_words: of the draws.
    """

    def __init__(self, weights: list[float], seed_words: tuple[int, ...]):
        self.weights, self.seed_words = np.array(weights) / np.sum(weights), seed_words
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def assign(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream of each of slots (k,) of the run, and which of its own slots that is: both int64 (k,)."""
        blocks, places = np.divmod(slots, BLOCK)
        streams, own = np.empty_like(slots), np.empty_like(slots)
        for block in np.unique(blocks):
            here = blocks == block
            streams[here], own[here] = (assigned[places[here]] for assigned in self.block(int(block)))
        return streams, own

    def block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """What `assign` gives for the slots from block x BLOCK to (block + 1) x BLOCK."""
        if block not in self._blocks:
            # A step may straddle two blocks, so the one before is kept.
            self._blocks = {before: assigned for before, assigned in self._blocks.items() if before == block - 1}
            self._blocks[block] = self._drawn(block * BLOCK)
        return self._blocks[block]

    def _drawn(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        # Before slot t, as many are due as t, give or take one a stream: these slots are due between `begin` and `end`.
        begin, end = first - len(self.weights) - 1, first + BLOCK + len(self.weights) + 1
        firsts = np.maximum(0, np.floor(begin * self.weights).astype(np.int64) - 1)
        counts = np.ceil(end * self.weights).astype(np.int64) + 1 - firsts
        streams, place = members(counts)
        own = place + firsts[streams]
        due = (own + self._places(firsts, counts)) / self.weights[streams]
        order = np.argsort(due, kind="stable")[first - firsts.sum() :][:BLOCK]
        return streams[order], own[order]

    def _places(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Where in its 1 / w slots each stream's slots from `firsts` on are due, `counts` of them: [0, 1], one stream after the other.

        Drawn from raw PCG64 output, which never changes between NumPy versions.
        """
        drawn = []
        for stream, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
            random = np.random.PCG64(np.random.SeedSequence((*self.seed_words, _SAMPLER_SEED, stream)))
            drawn.append(random.advance(first).random_raw(count) / 2**64)
        return np.concatenate(drawn)
