"""Evaluations: frames, their files and back, and their series."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fabricated import EMPTY_FRAME, make_evaluation, write_evaluation

from lm.evaluation.measurement import metric_rows, sampling_unit_frame
from lm.report.comparison import drop_selection_rows, merge_bins_into_ranges
from lm.report.frame import concatenate_blocks, evaluation_block
from lm.runs.evaluations import (
    VAL_LOSS,
    Axis,
    Metric,
    evaluation_rows,
    load_evaluation,
    means_over_bins,
    model_selection_mask,
    point_means,
    selection_loss_and_sequence_hash,
)


def by_position() -> pd.DataFrame:
    about = Metric(
        "probe/loss", "nats per token", "lower", "", "loss", "documents", True, Axis("position", "tokens", "at"),
        "Loss by position", "long sequences", "3 of 16 tokens", references=(("chance", 0.5), ("unknown", np.nan)),
        options='{"size": 3}',
    )  # fmt: skip
    values = np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0]])
    units = sampling_unit_frame("abc", np.array([0, 0, 1]), selection_seed="data")
    return metric_rows(about, values, units, [0, 4], [4, 16], "books", "as trained")


def scalar() -> pd.DataFrame:
    return metric_rows(Metric("", "nats per token", "lower", quantity="loss"), 3.0)


def by_length(options: str = "", setting: str = "") -> pd.DataFrame:
    lengths = Axis("length", "tokens", "in sequences of")
    about = Metric("", "fraction", "higher", "", "accuracy", "questions", True, lengths, options=options)
    return pd.concat(
        [
            metric_rows(about, np.full((count, 1), 0.5), units, [length], task="needle", inference_setting=setting)
            for length, count in ((64, 2), (128, 5))
            for units in [sampling_unit_frame(f"{length}", np.arange(count), np.full(count, 8))]
        ]
    )  # fmt: skip


@pytest.mark.parametrize("made", [by_position, scalar, by_length, lambda: EMPTY_FRAME])
def test_a_file_and_back_is_the_same(made: Callable[[], pd.DataFrame], tmp_path: Path):
    path = write_evaluation(tmp_path, make_evaluation(made()))
    again = load_evaluation(path)
    assert again.file_content() == path.read_bytes()
    numbers = ["x", "until", "sample", "group", "weight", "value"]
    np.testing.assert_array_equal(again.frame[numbers].astype(float), made()[numbers].astype(float))
    assert pd.read_csv(path, skiprows=1)["value"].tolist() == pytest.approx(made()["value"].tolist(), nan_ok=True)


def test_means_are_over_units_and_over_bins_and_places_are_ranges_or_points():
    frame = evaluation_rows([make_evaluation(pd.concat([by_position(), by_length()], ignore_index=True), seq_len=8)])
    assert frame.groupby("axis_kind")["logged"].all().to_dict() == {"bins": True, "points": False}
    assert point_means(frame)["value"].tolist() == pytest.approx([3, np.nan, 0.5, 0.5], nan_ok=True)
    places = merge_bins_into_ranges(frame[frame["sample"] != 1])
    assert [*zip(places["place"], places["value"], strict=True)] == [
        ("within 1x", 1.0),
        ("within 1x", 5.0),
        ("64", 0.5),
        *[("128", 0.5)] * 4,
    ]
    overall = means_over_bins(frame[frame["sample"] != 1])
    assert overall["value"].tolist() == pytest.approx([(1.75 + 5.75) / 2, 0.5, 0.5])


@pytest.mark.parametrize(("weights", "mean"), [([1, 0, 3], 4), ([0, 0, 0], np.nan)])
def test_a_unit_of_weight_0_has_no_value(weights: list[int], mean: float):
    units = sampling_unit_frame("abc", np.arange(3), np.array(weights))
    loss = metric_rows(Metric(quantity="loss", units="documents"), np.array([[1], [7], [5]]), units)
    assert point_means(evaluation_rows([make_evaluation(loss)]))["value"].tolist() == pytest.approx([mean], nan_ok=True)


@pytest.mark.parametrize("documents", [40, 1])
def test_reports_leave_out_documents_that_select_unless_all_do(documents: int):
    (label,) = np.flatnonzero(model_selection_mask("data", np.arange(40)))[:1]
    groups = np.arange(40) if documents > 1 else np.full(40, label)
    loss = metric_rows(
        Metric(quantity="loss", units="documents"),
        np.arange(40.0)[:, None],
        sampling_unit_frame("a", groups, None, "data"),
    )
    kept = drop_selection_rows(evaluation_rows([make_evaluation(loss)]))
    assert set(kept["quantity"]) == {"loss of reporting documents" if documents > 1 else "loss"}
    expected = np.arange(40.0)[~model_selection_mask("data", groups)] if documents > 1 else [np.arange(40.0).mean()]
    assert kept["value"].tolist() == pytest.approx(expected)


def test_about_a_third_of_the_documents_select_and_always_the_same():
    documents = np.arange(3000)
    selected = model_selection_mask("fingerprint", documents)
    assert 0.3 < selected.mean() < 0.37
    np.testing.assert_array_equal(model_selection_mask("fingerprint", np.repeat(documents, 2)), np.repeat(selected, 2))
    assert (selected != model_selection_mask("another", documents)).any()
    assert selected[:40].nonzero()[0].tolist() == [0, 1, 2, 5, 10, 11, 12, 17, 20, 24, 28, 30, 39], (
        "as in experiments so far"
    )


@pytest.mark.parametrize("part", ["selects", "reports", ""])
def test_where_a_part_is_empty_all_sequences_choose_the_best_checkpoint(part: str):
    units = sampling_unit_frame("abc", np.arange(3)).assign(part=part)
    loss = metric_rows(Metric(VAL_LOSS, quantity=VAL_LOSS, units="documents"), np.array([[1.0], [2.0], [6.0]]), units)
    assert selection_loss_and_sequence_hash(make_evaluation(loss))[0] == 3


def test_the_long_table_has_the_document_of_each_unit_at_each_place():
    table = concatenate_blocks([evaluation_block(make_evaluation(by_position()), {})])
    assert table[["x", "sample", "group"]].to_numpy().tolist() == [
        [x, *unit] for x in (0, 4) for unit in [(0, 0), (1, 0), (2, 1)]
    ]
    assert {"quantity": "loss", "unit": "nats per token", "better": "lower"}.items() <= table.iloc[0].to_dict().items()


def test_the_long_table_tells_tasks_of_one_name_apart_by_their_options():
    needles = [by_length(f'{{"needles": 1, "depth": {depth}}}', f"at {depth}") for depth in (0.0, 1.0)]
    evaluation = make_evaluation(pd.concat([*needles, by_position()], ignore_index=True))
    table = concatenate_blocks([evaluation_block(evaluation, {})])
    assert table.task.unique().tolist() == ["needle (depth 0.0)", "needle (depth 1.0)", "books"]
    assert table.part.unique().tolist() == ["reports"]
