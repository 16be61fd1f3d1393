"""This module selects the units of a measurement that choose learning rates or that are reported, and computes weighted
means of units. A unit is one measured sequence or question; a data frame has rows for it."""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd

from lm.errors import RunError


class NoDocuments(RunError):
    """Raised if no held-out document is left to choose learning rates on, or none to report results on."""


def model_selection_mask(fingerprint: str, document_labels: np.ndarray) -> np.ndarray:
    """Return the mask, (units,) bool, of the held-out units (such as sequences) that choose checkpoints and learning
    rates. Results are reported on all other units.

    `document_labels`, (units,), is the label of each unit's document. A hash of this label and the data `fingerprint`
    chooses about a third of the documents for selection.
    """
    labels, label_indices = np.unique(document_labels, return_inverse=True)
    selection = [hashlib.sha256(f"{fingerprint} {label}".encode()).digest()[0] % 3 == 0 for label in labels.tolist()]
    return np.array(selection, dtype=bool)[label_indices]


def units_of_split(units: pd.DataFrame, part: Literal["selects", "reports"]) -> pd.DataFrame:
    """Return the units of held-out documents that choose learning rates (`selects`), or of those that are reported
    (`reports`). Units that don't come from held-out text are all returned. A sequence belongs to the document in
    which it begins.

    Raises NoDocuments: no unit is left.
    """
    kept = units[units["part"].isin(["", part])]
    if units.empty or len(kept):
        return kept
    purpose = "choose learning rates" if part == "selects" else "report"
    raise NoDocuments(
        f"none of {units['group'].nunique()} held-out documents is left to {purpose} on: hold out more text"
    )


def unit_rows(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return one row for each unit (sequence or question) on which `metric`, a name in metrics.jsonl, was measured.
    `frame` is the data frame of an `Evaluation`, with the columns `lm.runs.evaluations.COLUMNS`.

    If the metric was measured in ranges of positions (bins), the row's `value` is the unit's mean over all positions.
    The result is empty if the metric was not measured, or only its mean is known.
    """
    rows = frame[(frame["metric"] == metric) & frame["sample"].notna()]
    if not rows["until"].notna().any():
        return rows
    return grouped_mean(rows, ["sample"], rows["until"] - rows["x"]).assign(until=rows["until"].iloc[-1])


def weighted_mean(rows: pd.DataFrame) -> float:
    """Return the weighted mean of units; NaN if all weights are 0, which means that no unit has a value."""
    rows = rows[rows["weight"] > 0]
    return float(np.average(rows["value"], weights=rows["weight"])) if len(rows) else math.nan


def grouped_mean(rows: pd.DataFrame, keys: Sequence[str], weights: pd.Series | float = 1.0) -> pd.DataFrame:
    """Return the weighted mean of `value` over the rows with equal `keys`, in the order in which these keys come first.
    Other columns have the values of the first of these rows.

    A mean is NaN if all its weights are 0, or if a value with a weight above 0 is NaN.
    """
    codes = rows.groupby([*keys], sort=False, observed=True, dropna=False).ngroup().to_numpy()
    weights = np.broadcast_to(np.asarray(weights, float), len(rows))
    values = np.where(weights > 0, weights * rows["value"], 0.0)
    with np.errstate(invalid="ignore"):
        means = np.bincount(codes, values) / np.bincount(codes, weights)
    return rows.iloc[np.unique(codes, return_index=True)[1]].assign(value=means)
