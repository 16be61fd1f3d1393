"""Which of several streams has each slot of a run: a pure function of (entropy, slot)."""

import numpy as np

DECK = 1024  # slots that are dealt together
_DEAL = 2**61  # keeps these draws apart from those of epochs and lengths


def members(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of groups of so many members, one after the other: each member's group, and its number in it, from 0: both int64 (members,)."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


class Deck:
    """Deals slots 0, 1, ... to streams by weight: a stream of weight w is due once in every 1 / w slots, at a random place in them.

    Slots go to the streams in the order in which they are due. However long the run, a stream has had its weight's part of the
    slots so far to within 1 + w x streams; and no period of the run, such as every tenth step, favours any.

    Args:
        weights: above 0, in any unit.
        entropy: of the draws.
    """

    def __init__(self, weights: list[float], entropy: tuple[int, ...]):
        self.weights, self.entropy = np.array(weights) / np.sum(weights), entropy
        self._decks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def deal(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream that has each of slots (k,) of the run, and which of its own slots that is: both int64 (k,)."""
        decks, places = np.divmod(slots, DECK)
        streams, own = np.empty_like(slots), np.empty_like(slots)
        for deck in np.unique(decks):
            here = decks == deck
            streams[here], own[here] = (cards[places[here]] for cards in self.cards(int(deck)))
        return streams, own

    def cards(self, deck: int) -> tuple[np.ndarray, np.ndarray]:
        """What `deal` says of the slots from deck x DECK to (deck + 1) x DECK."""
        if deck not in self._decks:
            # A step may straddle two decks, so the one before is kept.
            self._decks = {before: cards for before, cards in self._decks.items() if before == deck - 1}
            self._decks[deck] = self._drawn(deck * DECK)
        return self._decks[deck]

    def _drawn(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        # Before slot t, as many are due as t, give or take one a stream: these slots are due between `begin` and `end`.
        begin, end = first - len(self.weights) - 1, first + DECK + len(self.weights) + 1
        firsts = np.maximum(0, np.floor(begin * self.weights).astype(np.int64) - 1)
        counts = np.ceil(end * self.weights).astype(np.int64) + 1 - firsts
        streams, place = members(counts)
        own = place + firsts[streams]
        due = (own + self._places(firsts, counts)) / self.weights[streams]
        order = np.argsort(due, kind="stable")[first - firsts.sum() :][:DECK]
        return streams[order], own[order]

    def _places(self, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Where in its 1 / w slots each stream's slots from `firsts` on are due, `counts` of them: [0, 1], one stream after the other.

        Drawn from raw PCG64 output, which never changes between NumPy versions.
        """
        drawn = []
        for stream, (first, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
            random = np.random.PCG64(np.random.SeedSequence((*self.entropy, _DEAL, stream)))
            drawn.append(random.advance(first).random_raw(count) / 2**64)
        return np.concatenate(drawn)
