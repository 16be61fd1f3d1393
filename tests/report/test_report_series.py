"""Reports know no kind of evaluation by name: a made-up one is in every table, picture, difference and check."""

import csv
from pathlib import Path

import numpy as np
import pytest
from manifests import record
from reported import build_run, compared, edit, write_evaluation, write_report

from lm.errors import RunError
from lm.report.comparison_pictures import overview
from lm.report.comparison_tables import comparison_tables, run_facts
from lm.runs.evaluations import Axis, Sample, Series, Shown
from lm.runs.record import read_run


def probe(rng: np.random.Generator, level: float) -> list[Series]:
    """A number, a curve by position, and points at depths with units of their own."""
    common = {"kind": "probe", "seq_len": 64, "better": "higher", "setting": "as trained", "interval": "documents"}

    def sample(name: str, columns: int, units: int = 40) -> Sample:
        return Sample(name, level + rng.normal(0, 0.1, (units, columns)), np.ones(units), np.arange(units))

    number, bins, points = sample("n", 1), sample("b", 3), [sample(f"p{depth}", 1, 10 + depth) for depth in (0, 1)]
    mean = number.values.mean(0)
    return [
        Series(metric="sparsity", unit="bits", means=mean, samples=(number,), references={"uniform": 9.0},
            logged=("probe/sparsity",),
               shown=Shown("Sparsity of attention", "probe sequences", "40 of 64 tokens"), **common),
        Series(metric="sparsity", unit="bits", means=bins.values.mean(0), samples=(bins,), curve=np.full(256, level),
               axis=Axis("position", "tokens", "at positions", (0, 64, 128, 256), bins=True),
               shown=Shown("Sparsity of attention", "long probe sequences", "40 of 256 tokens", "sparsity by position"),
               **common),
        Series(metric="reach", unit="tokens", means=np.array([part.values.mean() for part in points]),
            samples=tuple(points), what="books",
               axis=Axis("depth", "", "at depth", (0.0, 0.5), log=False),
               shown=Shown("Reach by depth", "deep probe sequences", "10 of 64 tokens", "reach by depth"), **common),
    ]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    run_folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax")]
    for folder, level in zip(run_folders, (2.0, 3.0), strict=True):
        series = [curve.plain() for curve in probe(np.random.default_rng(len(folder.name)), level)]
        stamp = {"kind": "probe", "step": 200, "tokens_seen": 200 * 8192, "data_fingerprint": "d"}
        made_with = {"options": {}, "precision": "32", "weights_sha256": "w"}
        write_evaluation(folder, "probe", 200, stamp | made_with | {"series": series})
    return run_folders


def test_a_made_up_kind_of_evaluation_is_reported(folders, tmp_path):
    comparison, _ = compared(*folders)
    titles = [table.title for table in comparison_tables(comparison)]
    assert {"Sparsity of attention", "Sparsity of attention in training lengths", "Reach by depth"} < set(titles)
    intervals = {difference.subject: difference.interval for difference in comparison.differences}
    for label in (
        "probe/sparsity",
        "sparsity at positions 128-256, as trained",
        "reach, books at depth 0.5, as trained",
    ):
        assert intervals[label].mean == pytest.approx(1, abs=0.2)
        assert intervals[label].low > 0.5
    checks = {fact.name: fact.agrees for fact in run_facts(comparison)}
    for measured_on in ("probe sequences", "long probe sequences", "deep probe sequences"):
        assert checks[f"{measured_on} (sha256)"] is checks[f"tokens seen, {measured_on}"] is True
    files = write_report(folders, tmp_path / "out")
    rows = {(row["table"], row["arm"], row["quantity"]): row for row in csv.DictReader(files.csv.open())}
    assert float(rows["Sparsity of attention in training lengths", "ssmax", "sparsity 2x-4x"]["value"]) == 3
    assert rows["Sparsity of attention", "ssmax", "uniform"]["value"] == "9.0000"
    deep = rows["Reach by depth", "softmax", "0.5"]
    assert (deep["task"], deep["unit"], deep["interval over"]) == (
        "books",
        "tokens, 95% interval over sequences, 1 seed, alone",
        "sequences, 1 seed",
    )
    assert float(deep["low"]) < 2 < float(deep["high"])
    for text in (files.html.read_text(), files.markdown.read_text(), files.latex.read_text()):
        assert "Reach by depth" in text
        assert "Sparsity of attention" in text


def test_a_made_up_kind_has_panels_for_what_is_over_an_axis(folders):
    picture = overview(compared(*folders)[0])
    for folder in folders:
        next(folder.glob("evaluations/probe.*")).unlink()
    titles = [[panel.title for panel in figure.panels] for figure in (overview(compared(*folders)[0]), picture)]
    made_up = ["Sparsity of attention: sparsity, as trained", "Reach by depth: reach, books, as trained"]
    difference = "paired difference to softmax"
    assert titles[1] == [
        *titles[0],
        made_up[0],
        f"{made_up[0]}: {difference}",
        made_up[1],
        f"{made_up[1]}: {difference}",
    ]
    assert "Reach by depth. Bands: 95% intervals over sequences, 1 seed, each alone." in picture.caption
    assert "From position 16." in picture.caption


def test_series_that_are_none_are_refused_in_one_line(folders):
    path = next(folders[0].glob("evaluations/probe.*"))
    path.write_text(path.read_text().replace('"higher"', '"more"'))
    record(folders[0])
    with pytest.raises(RunError, match=r"probe.step-000200.json: .*: better must be lower or higher or none; bring"):
        read_run(folders[0])


def test_a_point_that_is_not_finite_is_said_and_has_no_interval(folders, tmp_path):
    edit(folders[1], "probe", lambda result: result["series"][2]["means"].__setitem__(0, None))
    edit(folders[1], "probe", lambda result: result["series"][2]["samples"][0]["values"][0].__setitem__(0, None))
    files = write_report(folders, tmp_path / "out")
    rows = {(row["table"], row["arm"], row["quantity"]): row for row in csv.DictReader(files.csv.open())}
    assert rows["Reach by depth", "ssmax", "0"]["value"] == "not finite"
    assert b"nan" not in files.csv.read_bytes()
