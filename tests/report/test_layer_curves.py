"""Curves of what is logged by layer and head: what they are made of, and where a report shows them."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fabricated import save
from matplotlib.figure import Figure
from reported import build_run, write_report

from lm.report import comparison_pictures
from lm.report.comparison import compare_runs
from lm.report.comparison_pictures import MAX_POINTS, drawn_runs, layer_curves, layer_pictures
from lm.report.pictures import Panel, Trace, _draw_panel
from lm.runs.folder import METRICS
from lm.runs.record import read_run


def test_quantities_are_told_apart_by_layer_and_head_and_the_last_line_of_a_step_counts():
    lines = [
        {
            "step": 2,
            "tokens": 20,
            "train/loss": 1.0,
            "largest_score/layer0/head0": 9.0,
            "largest_score/layer0/head1": 9.0,
        },
        {
            "step": 1,
            "tokens": 10,
            "largest_score/layer0/head0": 1.0,
            "largest_score/layer0/head1": 2.0,
            "train/grad_norm/layer10": None,
        },
        {
            "step": 2,
            "tokens": 20,
            "largest_score/layer0/head0": 3.0,
            "largest_score/layer0/head1": None,
            "train/grad_norm/layer10": 4.0,
        },
        {"step": 2, "tokens": 20, "val/loss": 1.0},
        {"step": 1, "tokens": 10, "normalizer/base.out.bias/layer3/rms": 0.5, "train/grad_norm/layer2": 7.0},
    ]
    curves = layer_curves(lines)
    assert [*curves] == [
        ("largest_score", 0),
        ("normalizer/base.out.bias", 3),
        ("train/grad_norm", 2),
        ("train/grad_norm", 10),
    ]
    scores = curves["largest_score", 0]
    assert [*scores] == ["head0", "head1"]
    assert [head.tokens.tolist() for head in scores.values()] == [[10, 20], [10, 20]]
    np.testing.assert_array_equal([head.values for head in scores.values()], [[1.0, 3.0], [2.0, np.nan]])
    np.testing.assert_array_equal(curves["train/grad_norm", 10][""].values, [np.nan, 4.0])
    assert [*curves["normalizer/base.out.bias", 3]] == ["rms"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A made-up run of 600 logged steps, with one spike of the gradient, and a step whose norm was not finite."""
    folder = build_run(tmp_path, "logged")
    lines = [
        {"step": step, "tokens": 1000 * step, "largest_score/layer0/head0": 1.0, "largest_score/layer0/head1": 2.0,
         "largest_score/layer0/head2": 6.0,
         "train/grad_norm/layer1": 100.0 if step == 301 else None if step == 400 else 0.5}
        for step in range(1, 601)
    ]  # fmt: skip
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    save(folder, 600)
    return folder


def test_a_line_is_the_median_over_heads_of_scores_the_largest_and_no_spike_is_lost(run: Path):
    picture = layer_pictures(["softmax"], drawn_runs(compare_runs([read_run(run)])))["dynamics"]
    rows = list(csv.DictReader(io.StringIO(picture.csv)))
    scores = [row for row in rows if row["panel"] == "Largest score"]
    assert len(scores) == 200 <= MAX_POINTS  # of 600 steps
    assert {(row["of"], row["y"]) for row in scores} == {("softmax, seed 1, layer0", "6")}
    norms = [row["y"] for row in rows if row["panel"] == "Gradient norm before clipping"]
    assert (set(norms), norms.count("100")) == ({"0.5", "nan", "100"}, 1)
    assert picture.arms == ["layer 0", "layer 1"]


def test_reports_show_them_where_they_are_logged(run: Path, tmp_path: Path):
    other = build_run(tmp_path, "other")
    for number, (runs, logged) in enumerate((([run], True), ([run, other], True), ([other], False))):
        page = write_report(runs, tmp_path / f"report{number}").html
        assert ("A line for each seed and layer" in page.read_text()) == logged
        assert bool(list(page.parent.glob("dynamics.*"))) == logged


@pytest.mark.parametrize(("low", "high"), [(2.0, 3.1), (0.31, 0.52), (2.01, 2.04), (0.5, 70.0)])
def test_an_axis_in_logs_has_labels_within_one_decade(low: float, high: float):
    axes = Figure().subplots()
    trace = Trace(0, "a", np.array([1.0, 2.0]), np.array([low, high]), "seed")
    _draw_panel(axes, Panel("t", "x", "y", [trace], log_y=True))
    axes.figure.draw_without_rendering()
    bottom, top = axes.get_ylim()
    labels = [label for label in axes.yaxis.get_ticklabels(which="both") if bottom <= label.get_position()[1] <= top]
    assert sum(bool(label.get_text()) for label in labels) >= 2


@pytest.mark.parametrize("name", ["train/loss", "val/loss"])
def test_a_loss_picture_has_a_mean_line_an_arm(name: str, monkeypatch: pytest.MonkeyPatch):
    values = {1: [3.0, 2.0, 1.0], 2: [5.0, 4.0, 3.0]}
    record = SimpleNamespace(phases=[None], flat={}, tokens_before=0)
    runs = [SimpleNamespace(arm="a", seed=seed, state="finished", record=record) for seed in values]
    tokens = np.array([10.0, 20.0, 30.0])
    monkeypatch.setattr(
        comparison_pictures,
        "_curve_by_tokens_seen",
        lambda run, _: SimpleNamespace(tokens=tokens, values=np.array(values[run.seed])),
    )
    picture = comparison_pictures.curves(["a"], runs, {name: "Loss"}, None)
    (mean,) = [trace for trace in picture.panels[0].traces if trace.kind == "mean"]
    assert mean.y.tolist() == [4.0, 3.0, 2.0]
