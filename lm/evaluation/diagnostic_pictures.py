"""The picture of diagnostics: statistics by the number of visible keys, and maps of heads."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from lm.diagnostics.attention_rows import HEAD, KEYS
from lm.report.pictures import Map, Panel, Picture, Trace, logarithmic_ticks
from lm.runs.evaluations import Evaluation, measured, point_means

PANEL_SIZE = 4.8, 3.4  # inches


def diagnostics_picture(evaluation: Evaluation) -> Picture | None:
    """A picture with a row for each statistic in reports, with its curve and each model's map of heads; None if there
    is nothing to show.
    """
    means = point_means(measured([evaluation]))
    axes = np.array([about.axis.name if about.axis else "" for about in means["about"]])
    by_keys, by_head = (
        means[(axes == KEYS) & (means["title"] != "")],
        means[(axes == HEAD) & ~means["task"].str.contains(",")],
    )
    settings = [*by_keys["setting"].unique()]
    panels: list[Panel | Map | None] = []
    for quantity, curves in by_keys.groupby("quantity", sort=False):
        traces = [
            Trace(settings.index(setting), setting, *curve[["x", "value"]].to_numpy().T, "mean",
                dashes=curve["about"].iloc[0].control, hollow=curve["about"].iloc[0].control)
            for setting, curve in curves.groupby("setting", sort=False)
        ]  # fmt: skip
        base, ticks = logarithmic_ticks(traces[0].x.tolist())
        marks, unit = {evaluation.seq_len: "training length"}, curves["about"].iloc[0].unit
        panels.append(Panel(quantity, "visible keys n", unit, traces, ticks, base, marks=marks))
        panels += _maps(quantity, by_head[by_head["quantity"] == quantity], settings)
    return Picture(panels, settings, "", 1 + len(settings), PANEL_SIZE) if panels else None


def _maps(quantity: str, means: pd.DataFrame, settings: list[str]) -> Iterator[Map | None]:
    """Each model's map of a metric, layers from top to bottom, heads from left to right, on one scale of colours; None
    without values.
    """
    finite = means["value"][np.isfinite(means["value"])]
    top, low = float(finite.max()), float(finite.min())
    for setting in settings:
        of_setting = means[means["setting"] == setting]
        if of_setting.empty:
            yield None
            continue
        heads = (
            of_setting.pivot(index="task", columns="x", values="value").reindex(of_setting["task"].unique()).to_numpy()
        )
        labels = [[*map(str, range(size))] for size in heads.shape[::-1]]
        yield Map(f"{quantity}\n{setting}", "head", *labels, heads, top, low, shows_values=False, y_label="layer")
