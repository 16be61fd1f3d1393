"""The options of `data.lengths`: how many tokens the sequences of each training step have (made in lm/data/batches.py)."""

from dataclasses import dataclass
from typing import ClassVar

from lm.errors import Problem
from lm.schema import key

SHORTEST_PIECE = 16  # tokens


class SequenceLengths:
    """Options that give each step a length. All sequences of a step have it; the tokens of a step stay `optim.batch_tokens`.

    Attributes:
        shorter: true if sequences may be shorter than `data.seq_len`.
    """

    name: ClassVar[str]
    shorter: ClassVar[bool] = True

    def begins(self, seq_len: int, max_steps: int) -> dict[int, int]:
        """The lengths one after the other, by the step that each begins at; empty if lengths do not follow each other."""
        return {}

    def drawn(self) -> dict[int, float]:
        """The weights of lengths that are drawn for each step; empty if none are."""
        return {}

    def conflicts(self, seq_len: int, max_steps: int, one_source: bool) -> list[Problem]:
        """What is wrong with them in a configuration with these values.

        Args:
            seq_len, max_steps: `data.seq_len`, `trainer.max_steps`.
            one_source: true if all sequences are text of one source.
        """
        return []


def _divisors(lengths: list[int], path: str, seq_len: int) -> list[Problem]:
    """A problem at `path` if one of `lengths` does not divide `seq_len`."""
    wrong = [length for length in lengths if length < 2 or seq_len % length]
    reason = f"does not divide data.seq_len = {seq_len} into sequences of 2 tokens or more"
    return [Problem(f"data.lengths.{path}", length, reason, "give divisors of data.seq_len") for length in wrong[:1]]


@dataclass
class FullLength(SequenceLengths):
    """`data.seq_len` at every step."""

    name: ClassVar[str] = "full"
    shorter: ClassVar[bool] = False

    def begins(self, seq_len: int, max_steps: int) -> dict[int, int]:
        """One length."""
        return {0: seq_len}


@dataclass
class FixedLength(SequenceLengths):
    """`length` at every step."""

    name: ClassVar[str] = "fixed"
    length: int | None = key(None, "tokens in each sequence, a divisor of data.seq_len", ge=2)

    def begins(self, seq_len: int, max_steps: int) -> dict[int, int]:
        """One length."""
        return {0: self.length}

    def problems(self) -> list[Problem]:
        """No length."""
        return [] if self.length else [Problem("length", None, "no length given", "give a divisor of data.seq_len")]

    def conflicts(self, seq_len: int, max_steps: int, one_source: bool) -> list[Problem]:
        """A length that does not divide `data.seq_len`."""
        return _divisors([self.length] if self.length else [], "length", seq_len)


@dataclass
class MixedLengths(SequenceLengths):
    """A length drawn for each step: length l with weight w for a fraction w of the steps, and so of the tokens."""

    name: ClassVar[str] = "mixed"
    weights: dict[int, float] = key({}, "{length: weight}: divisors of data.seq_len, weights that sum to 1, e.g. {64: 0.5, 128: 0.5}", gt=0)

    def drawn(self) -> dict[int, float]:
        """The weights."""
        return self.weights

    def problems(self) -> list[Problem]:
        """No lengths, or weights that do not sum to 1."""
        if not self.weights:
            return [Problem("weights", {}, "no lengths given", "give {length: weight}, e.g. {64: 0.5, 128: 0.5}")]
        total = sum(self.weights.values())
        return [Problem("weights", self.weights, f"sum to {total:g}, not to 1")] if abs(total - 1) > 1e-6 else []

    def conflicts(self, seq_len: int, max_steps: int, one_source: bool) -> list[Problem]:
        """Lengths that do not divide `data.seq_len`, or of which the run has less than a step."""
        rare = [length for length, weight in self.weights.items() if weight * max_steps < 1 - 1e-6]
        reason = f"gives sequences of {rare[0]} less than one step of trainer.max_steps = {max_steps}" if rare else ""
        found = [Problem("data.lengths.weights", self.weights, reason, "raise its weight, or train for more steps")] if rare else []
        return _divisors(list(self.weights), "weights", seq_len) + found


@dataclass
class Curriculum(SequenceLengths):
    """Lengths one after the other: the one that starts at fraction f of the run holds from step round(f `trainer.max_steps`) on."""

    name: ClassVar[str] = "curriculum"
    starts: dict[float, int] = key({}, "{fraction of the run: length}, from 0.0 on, divisors of data.seq_len, e.g. {0.0: 64, 0.5: 256}")

    def begins(self, seq_len: int, max_steps: int) -> dict[int, int]:
        """The lengths in the order of their starts."""
        return {round(fraction * max_steps): length for fraction, length in sorted(self.starts.items())}

    def problems(self) -> list[Problem]:
        """Fractions that are none, or no first one."""
        if not all(0 <= fraction < 1 for fraction in self.starts):
            return [Problem("starts", self.starts, "a length must start at a fraction of the run of 0 or more and below 1")]
        missing = [Problem("starts", self.starts, "no length starts at 0.0", "give the first one, e.g. {0.0: 64, 0.5: 256}")]
        return [] if 0 in self.starts else missing

    def conflicts(self, seq_len: int, max_steps: int, one_source: bool) -> list[Problem]:
        """Lengths that do not divide `data.seq_len`, or that no step has."""
        if self.problems():
            return []
        found = _divisors(list(self.starts.values()), "starts", seq_len)
        if len(self.begins(seq_len, max_steps)) < len(self.starts):
            reason = f"leaves a length no step of trainer.max_steps = {max_steps}"
            found.append(Problem("data.lengths.starts", self.starts, reason, "move the starts apart, or train for more steps"))
        return found


@dataclass
class DocumentLengths(SequenceLengths):
    """Pieces of single documents, whose lengths are powers of two from 16 to `data.seq_len`.

    After Dataset Decomposition (arXiv 2405.13226). A document of D tokens gives D // `data.seq_len` pieces of `data.seq_len`, and one
    for each binary digit of the rest from 16 up: fewer than 16 of its tokens are left out, others in each epoch. Documents of fewer
    than 16 tokens are left out whole.
    """

    name: ClassVar[str] = "documents"

    def conflicts(self, seq_len: int, max_steps: int, one_source: bool) -> list[Problem]:
        """Text that is not read by document, or a longest piece that is no power of two."""
        found = []
        if not one_source:
            found.append("reads the documents of one source as they come, without a mixture's weights and without tasks")
        if seq_len < SHORTEST_PIECE or seq_len & (seq_len - 1):
            found.append(f"needs a data.seq_len that is a power of two of {SHORTEST_PIECE} or more, not {seq_len}")
        return [Problem("data.lengths", self.name, reason, "give other lengths") for reason in found]


LENGTHS: dict[str, type[SequenceLengths]] = {v.name: v for v in (FullLength, FixedLength, MixedLengths, Curriculum, DocumentLengths)}
