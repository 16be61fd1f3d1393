"""What a statistic is: a function of rows of attention, one number for each head and query, or sums over all queries of a sequence."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lm.diagnostics.rows import AttentionRows
from lm.runs.series import Axis


@dataclass(frozen=True)
class Statistic:
    """One number for each head and query.

    Attributes:
        name: as tables and pictures show it.
        unit: such as `keys` or `nats`; a `fraction` lies within 0 and 1; empty: a number without one.
        of: rows -> (H, T), NaN where it is not defined; None: it does not apply to the layer's normalizer. What it gives of rows that
            are not `is_defined` is not used.
        shown: in reports, pictures and the metrics of a run, too; any other is in the result and its tables alone.
        fitted: its growth with the number of visible keys n is fitted by head, value ~ n^exponent.
        log: its values are logarithms already, for the fit.
    """

    name: str
    unit: str
    of: Callable[[AttentionRows], Tensor | None]
    shown: bool = False
    fitted: bool = False
    log: bool = False


@dataclass(frozen=True)
class Accumulated:
    """Sums over all queries of each sequence by head, such as those of weights by the position of the key.

    Attributes:
        name, unit, shown: as of `Statistic`.
        size: tokens of a sequence -> how many sums P a head has.
        sums: rows, tokens of the sequence -> (H, P), which are added up over blocks of queries; None: it does not apply. It leaves out
            the rows that are not `is_defined`.
        finish: sums of each sequence (N, layers, H, P) float64 -> one number for each head (layers, H), NaN where it is not defined; None:
            there is none, `Family.derive` makes use of the sums.
    """

    name: str
    unit: str
    size: Callable[[int], int]
    sums: Callable[[AttentionRows, int], Tensor | None]
    finish: Callable[[np.ndarray], np.ndarray] | None = None
    shown: bool = False


@dataclass(frozen=True, eq=False)
class Values:
    """What statistics gave of one model on N sequences, NaN where they are not defined.

    Attributes:
        n: (N, layers, T), how many keys each query sees.
        by_query: (N, layers, H, T) of each `Statistic`, by its name.
        by_head: (layers, H) of each `Accumulated` that has such numbers, by its name.
        sums: (N, layers, H, P) float64 of each `Accumulated`, by its name.
        length: tokens in a sequence.
        train_length: tokens in a training sequence.
    """

    n: np.ndarray
    by_query: dict[str, np.ndarray]
    by_head: dict[str, np.ndarray]
    sums: dict[str, np.ndarray]
    length: int
    train_length: int


@dataclass(frozen=True, eq=False)
class Derived:
    """Numbers made of the values of several statistics: one (1,), or one for each point of an axis; `what`: which of those of this name."""

    name: str
    unit: str
    values: np.ndarray
    axis: Axis | None = None
    shown: bool = False
    what: str = ""


@dataclass(frozen=True)
class Family:
    """Statistics that belong together, which `eval.diagnostics.statistics` names by one word."""

    per_query: tuple[Statistic, ...] = ()
    accumulated: tuple[Accumulated, ...] = ()
    derive: Callable[[Values], list[Derived]] = lambda values: []
