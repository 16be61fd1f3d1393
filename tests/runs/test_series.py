"""Series: what every evaluation gives, as JSON and back, and checked."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from lm.report.frame import evaluation_blocks, frame
from lm.runs.evaluations import Axis, Evaluation, Sample, Series, Shown, checkpoint_selection_mask, selection_mask


def by_position() -> Series:
    sample = Sample("abc", np.array([[1.0, 2.0], [3.0, np.nan], [5.0, 6.0]]), np.ones(3), np.array([0, 0, 1]))
    axis = Axis("position", "tokens", "at positions", (0, 4, 16), bins=True)
    labels = Shown("Loss by position", "long sequences", "3 of 16 tokens")
    return Series(
        "probe", "loss", "nats per token", "lower", 4, np.array([3.0, np.nan]), "books", {"size": 3}, "as trained",
        axis, (sample,),
        np.arange(16.0), "data", {"chance": 0.5}, "documents", logged=("probe/loss",), shown=labels,
    )  # fmt: skip


def scalar() -> Series:
    return Series("probe", "loss", "nats per token", "lower", 4, np.array([3.0]))


def by_length() -> Series:
    samples = tuple(
        Sample(f"{length}", np.full((units, 1), 0.5), np.full(units, 8.0), np.arange(units))
        for length, units in ((64, 2), (128, 5))
    )
    axis = Axis("length", "tokens", "in sequences of", (64, 128))
    return Series(
        "probe",
        "accuracy",
        "fraction",
        "higher",
        64,
        np.array([0.5, 0.5]),
        axis=axis,
        samples=samples,
        interval="wilson",
    )


@pytest.mark.parametrize("made", [by_position, scalar, by_length])
def test_json_and_back_is_the_same(made: Callable[[], Series]):
    text = json.dumps(made().plain(), allow_nan=False)
    assert json.dumps(Series.from_plain(json.loads(text)).plain()) == text
    for before, after in zip(made().samples, Series.from_plain(json.loads(text)).samples, strict=True):
        np.testing.assert_array_equal(before.values, after.values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": np.zeros(3)}, r"means has shape \(3,\), not \(2,\)"),
        ({"curve": np.zeros(3)}, r"curve has shape \(3,\), not \(16,\)"),
        ({"curve": None}, "a curve belongs to bins"),
        ({"samples": ()}, "an interval needs samples"),
        ({"samples": by_length().samples[:1]}, "samples have 1 columns, not 2"),
        ({"samples": (replace(by_position().samples[0], weights=np.ones(4)),)}, "samples.weights has shape"),
        ({"samples": (replace(by_position().samples[0], weights=np.zeros(3)),)}, "samples.weights must be positive"),
        ({"axis": Axis("position", "tokens", "", (0, 16, 4), bins=True)}, "must ascend"),
        ({"axis": Axis("position", "tokens", "", (1, 4, 16), bins=True)}, "bins must be whole numbers from 0"),
        ({"interval": "student"}, "interval must be none or documents or wilson"),
        ({"better": "more"}, "better must be lower or higher"),
        ({"logged": ("a", "b")}, "one logged name"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(by_position(), **change)


def test_what_is_no_series_is_refused():
    content = scalar().plain()
    with pytest.raises(ValueError, match="a series has no colour"):
        Series.from_plain(content | {"colour": "red"})
    with pytest.raises(ValueError, match="metric must be a text"):
        Series.from_plain(content | {"metric": 3})
    del content["means"]
    with pytest.raises(KeyError, match="means"):
        Series.from_plain(content)


def test_about_a_third_of_the_documents_select_and_always_the_same():
    documents = np.arange(3000)
    selected = selection_mask("fingerprint", documents)
    assert 0.3 < selected.mean() < 0.37
    np.testing.assert_array_equal(selection_mask("fingerprint", np.repeat(documents, 2)), np.repeat(selected, 2))
    assert (selected != selection_mask("another", documents)).any()
    assert selected[:40].nonzero()[0].tolist() == [0, 1, 2, 5, 10, 11, 12, 17, 20, 24, 28, 30, 39], (
        "as in experiments so far"
    )


@pytest.mark.parametrize("selects_all", [True, False])
def test_where_a_part_would_be_empty_all_sequences_choose_the_best_checkpoint(selects_all: bool):
    (document,) = np.flatnonzero(selection_mask("fingerprint", np.arange(40)) == selects_all)[:1]
    assert checkpoint_selection_mask("fingerprint", np.full(5, document)).all()


def test_the_long_table_has_the_document_of_each_unit_at_each_place():
    evaluation = Evaluation("probe", 8, 256, "", {}, "32", "weights", (by_position(),))
    table = frame(evaluation_blocks(evaluation, {}))
    assert table[["x", "sample", "group"]].to_numpy().tolist() == [
        [0, 0, 0],
        [0, 1, 0],
        [0, 2, 1],
        [4, 0, 0],
        [4, 1, 0],
        [4, 2, 1],
    ]


def test_the_long_table_tells_tasks_of_one_name_apart_by_their_options():
    needles = tuple(replace(by_length(), what="needle", options={"needles": 1, "depth": depth}) for depth in (0.0, 1.0))
    roll_out = replace(needles[1], setting="roll-out")  # which only one of the two tasks has
    table = frame(
        evaluation_blocks(Evaluation("probe", 8, 256, "", {}, "32", "weights", (*needles, roll_out, by_position())), {})
    )
    assert table.task.unique().tolist() == ["needle (depth 0.0)", "needle (depth 1.0)", "books"]
