"""Rows of evaluations as reports show them: of reporting documents alone, and at the places of tables."""

import numpy as np
import pandas as pd

from lm.report.tables import number
from lm.runs.evaluations import CURVE
from lm.statistics.units import mean

REPORTING = "of reporting documents"  # what names of metrics in reports end with, if other documents are left out


def reporting_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a frame of `evaluation_rows` without held-out documents that choose checkpoints or learning rates.

    Names of metrics then say so, as metrics.jsonl has the mean over all held-out text by its name alone. A curve
    without a document for reports at some point keeps its means over all documents, without units.
    """
    is_text, reports = rows["part"] != "", rows["part"] == "reports"
    has_reports = reports.groupby([rows[name] for name in (*CURVE, "x")], observed=True, dropna=False).transform("any")
    lost = (is_text & ~has_reports).groupby([rows[name] for name in CURVE], observed=True).transform("any")
    means = mean(rows[lost], [*CURVE, "x"], rows["weight"][lost]).assign(sample=np.nan)
    is_named = is_text & ~lost
    named = {name: rows[name].where(~is_named, rows[name] + f" {REPORTING}") for name in ("metric", "quantity")}
    kept = rows.assign(**named)[~lost & (rows["part"] != "selects")]
    return pd.concat([kept, means], ignore_index=True) if len(means) else kept


def at_places(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a frame of `evaluation_rows` at the places that reports show. Bins are merged into ranges: a unit's
    value is its mean over the bins within the range.

    Ranges are `within 1x`, `1x-2x`, ... of the training length. New columns are `place`, a label, and `order`, by which
    places are sorted.
    """
    is_bin = rows["shape"] == "bins"
    points, bins = rows[~is_bin], rows[is_bin]
    labels = {x: number(x) for x in points["x"].dropna().unique()}
    points = points.assign(place=[labels.get(x, "") for x in points["x"]], order=points["x"])
    octave = np.floor(np.log2(np.maximum(bins["x"] / bins["seq_len"], 0.5))) + 1  # 0: within the training length
    length = bins.groupby(CURVE, observed=True)["until"].transform("max")
    stop = np.minimum(bins["seq_len"] * 2**octave, length)
    ends = list(zip(np.where(octave > 0, 2.0 ** (octave - 1), 0.0), stop / bins["seq_len"], strict=True))
    labels = {(low, high): f"{low:g}x-{high:g}x" if low else f"within {high:g}x" for low, high in set(ends)}
    bins = bins.assign(place=[labels[pair] for pair in ends], order=stop / bins["seq_len"], stop=stop)
    bins = bins[bins["until"] <= stop]
    ranges = mean(bins, [*CURVE, "place", "sample"], bins["until"] - bins["x"])
    return pd.concat([points, ranges.assign(until=ranges["stop"]).drop(columns="stop")]).sort_index()
