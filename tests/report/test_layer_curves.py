"""Curves of what is logged by layer and head: what they are made of, and where a report shows them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fabricated import save_empty_checkpoint
from reported import build_run, write_report

from lm.report import comparison_pictures
from lm.report.comparison import compare_runs
from lm.report.comparison_pictures import MAX_CURVE_POINTS, drawn_runs, parameter_picture
from lm.runs.folder import METRICS_FILE, Curve
from lm.runs.record import read_run


def test_parameters_are_told_apart_by_layer_and_head_and_the_last_line_of_a_step_counts(tmp_path: Path):
    run = build_run(tmp_path, "logged")
    lines = [
        {"step": 2, "tokens": 20, "normalizer/s/layer0/head0": 9.0, "normalizer/s/layer0/head1": 9.0},
        {"step": 1, "tokens": 10, "normalizer/s/layer0/head0": 1.0, "normalizer/s/layer0/head1": 2.0},
        {"step": 2, "tokens": 20, "normalizer/s/layer0/head0": 3.0, "normalizer/s/layer0/head1": None},
        {"step": 1, "tokens": 10, "normalizer/base.out.bias/layer10/rms": 0.5, "normalizer/s/layer2/head0": 7.0},
    ]  # fmt: skip
    (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_empty_checkpoint(run, 2)
    picture = parameter_picture(["softmax"], drawn_runs(compare_runs([read_run(run)])))
    drawn = {
        panel.title: {trace.label.rpartition(", ")[2]: trace for trace in panel.traces} for panel in picture.panels
    }
    s, bias = drawn["Parameter s of the normalizer"], drawn["Parameter base.out.bias of the normalizer"]
    assert [*s] == ["layer0/head0", "layer0/head1", "layer2/head0"]
    assert [*bias] == ["layer10/rms"]
    assert s["layer0/head0"].x.tolist() == [10, 20]
    np.testing.assert_array_equal([s[f"layer0/head{head}"].y for head in (0, 1)], [[1.0, 3.0], [2.0, np.nan]])


def test_reports_show_them_where_they_are_logged(tmp_path: Path):
    run, other = build_run(tmp_path, "logged"), build_run(tmp_path, "other")
    lines = [{"step": step, "tokens": 1000 * step, "normalizer/s/layer1/head2": 0.5} for step in range(1, 601)]
    (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_empty_checkpoint(run, 600)
    for number, (runs, logged) in enumerate((([run], True), ([run, other], True), ([other], False))):
        page = write_report(runs, tmp_path / f"report{number}").html
        files = [*page.parent.glob("normalizer-parameters.*")]
        assert bool(files) == logged == ("A line for each seed, layer and head" in page.read_text())
        if logged:
            picture = parameter_picture(["softmax"], drawn_runs(compare_runs([read_run(run)])))
            (trace,) = picture.panels[0].traces
            assert picture.panels[0].title == "Parameter s of the normalizer"
            assert trace.y.tolist() == [0.5] * MAX_CURVE_POINTS  # of 600 steps


@pytest.mark.parametrize("name", ["train/loss", "val/loss"])
def test_a_loss_picture_has_a_mean_line_an_arm(name: str):
    values = {1: [3.0, 2.0, 1.0], 2: [5.0, 4.0, 3.0]}
    records = {
        seed: SimpleNamespace(
            phase_starts_and_normalizers=[None],
            tokens_before_run=0,
            curve=lambda _, losses=losses: Curve(np.arange(3.0), np.array(losses)),
        )
        for seed, losses in values.items()
    }
    runs = [SimpleNamespace(arm="a", seed=seed, state="finished", record=record) for seed, record in records.items()]
    picture = comparison_pictures.curves_picture(["a"], runs, {name: ("Loss", "nats")}, None)
    (mean,) = [trace for trace in picture.panels[0].traces if trace.drawn_as == "mean"]
    assert mean.y.tolist() == [4.0, 3.0, 2.0]
