"""Reports know no kind of evaluation by name: a made-up one is in every table, picture, difference and check."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from reported import build_run, compare_folders, pictures, write_report, write_rows

from lm.evaluation.measurement import metric_rows, sampling_unit_frame
from lm.report.comparison_tables import comparison_tables, run_properties
from lm.runs.evaluations import Axis, Metric


def probe(rng: np.random.Generator, level: float) -> pd.DataFrame:
    """A number, a curve by position, and points at depths with units of their own."""

    def measured(name: str, columns: int, units: int = 40) -> dict[str, object]:
        values = level + rng.normal(0, 0.1, (units, columns))
        return {
            "values": values,
            "units": sampling_unit_frame(name, np.arange(units)),
            "inference_setting": "as trained",
        }

    sparsity = Metric("probe/sparsity", "bits", "higher", quantity="sparsity", units="documents", interval=True)
    words = {"title": "Sparsity of attention", "measured_on": "probe sequences", "amount": "40 of 64 tokens"}
    number = replace(sparsity, references=(("uniform", 9.0),), **words)
    words |= {"measured_on": "long probe sequences", "amount": "40 of 256 tokens", "caption": "sparsity by position"}
    bins = replace(sparsity, name="", axis=Axis("position", "tokens", "at positions"), **words)
    words = {"title": "Reach by depth", "measured_on": "deep probe sequences", "amount": "10 of 64 tokens"}
    depth = Axis("depth", "", "at depth", log=False)
    points = replace(sparsity, name="", unit="tokens", quantity="reach", axis=depth, caption="reach by depth", **words)
    return pd.concat(
        [
            metric_rows(number, **measured("n", 1)),
            metric_rows(bins, **measured("b", 3), x=[0, 64, 128], bin_ends=[64, 128, 256]),
            *(metric_rows(points, **measured(f"p{x}", 1, 10 + int(2 * x)), x=[x], task="books") for x in (0.0, 0.5)),
        ],
        ignore_index=True,
    )


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    run_folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax")]
    for folder, level in zip(run_folders, (2.0, 3.0), strict=True):
        write_rows(folder, "probe", probe(np.random.default_rng(len(folder.name)), level))
    return run_folders


def test_a_made_up_kind_of_evaluation_is_reported(folders, tmp_path):
    comparison, _ = compare_folders(*folders)
    titles = [table.title for table in comparison_tables(comparison)]
    assert {"Sparsity of attention", "Sparsity of attention in training lengths", "Reach by depth"} < set(titles)
    intervals = {difference.metric_in_words: difference.interval for difference in comparison.differences}
    for label in (
        "probe/sparsity",
        "sparsity at positions 128-256, as trained",
        "reach, books at depth 0.5, as trained",
    ):
        assert intervals[label].mean == pytest.approx(1, abs=0.2)
        assert intervals[label].low > 0.5
    facts = {fact.name: fact.value for fact in run_properties(comparison)}
    assert facts["long probe sequences"] == "40 of 256 tokens"
    assert facts["deep probe sequences"] == "books: 10 of 64 tokens"
    files = write_report(folders, tmp_path / "out")
    cells = {(row["table"], row["arm"], row["quantity"]): row for row in files.rows}
    of_bin = cells["Sparsity of attention in training lengths", "ssmax", "sparsity 2x-4x"]
    assert float(of_bin["value"]) == pytest.approx(3, abs=0.1)
    assert cells["Sparsity of attention", "ssmax", "uniform"]["value"] == "9.0000"
    deep = cells["Reach by depth", "softmax", "0.5"]
    unit = "tokens, 95% interval over sequences, 1 seed, alone"
    assert (deep["task"], deep["unit"], deep["interval over"]) == ("books", unit, "sequences, 1 seed")
    assert float(deep["low"]) < 2 < float(deep["high"])
    assert {"Reach by depth", "Sparsity of attention"} < {
        *re.findall("<caption>(.*)</caption>", files.html.read_text())
    }


def test_a_made_up_kind_has_panels_for_what_is_over_an_axis(folders):
    *_, sparsity, reach = pictures(compare_folders(*folders)[0])
    for picture, title in (
        (sparsity, "Sparsity of attention: sparsity, as trained"),
        (reach, "Reach by depth: reach, books, as trained"),
    ):
        assert [panel.title for panel in picture.panels] == [title, f"{title}: paired difference to softmax"]
    assert "Reach by depth. Bands: 95% intervals over sequences, 1 seed, each alone." in reach.caption
    assert "From position 16." in sparsity.caption
