"""Accuracy in reports: recall and needles, by sequence length."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from reported import (
    accuracy_interval,
    accuracy_rows,
    answer_labels,
    build_run,
    compare_folders,
    edit_evaluation,
    pictures,
    write_rows,
)

import lm
from lm.report.comparison import paired_interval
from lm.report.comparison_pictures import task_heat_maps
from lm.runs.evaluations import Metric
from lm.statistics.intervals import Interval, effective_trials, wilson_interval

RECALL, ROLLED_OUT = ("mqar", "as trained"), ("mqar", "as trained, roll-out")
NEEDLE, CONTROL = ("needle", "as trained"), ("needle, control without it", "as trained")


def of_sequences(fraction: float) -> Interval:
    """The interval of a fraction in 16 sequences of 8 questions, as `build_run` has them."""
    trials = effective_trials(8 * np.linspace(fraction - 0.1, fraction + 0.1, 16), np.full(16, 8))
    return wilson_interval(fraction * trials, trials)


def test_answers_have_intervals_and_paired_differences_at_the_longest_sequences(tmp_path):
    folders = [
        build_run(tmp_path, "soft", asked={64: 0.9, 512: 0.3}),
        build_run(tmp_path, "scalable", "ssmax", asked={64: 0.9, 512: 0.8}),
    ]
    comparison, differences = compare_folders(*folders)
    assert answer_labels(comparison) == [RECALL, ROLLED_OUT, NEEDLE, CONTROL]
    assert accuracy_interval(comparison, 0, RECALL, 512).as_list() == pytest.approx(of_sequences(0.3).as_list())
    assert accuracy_interval(comparison, 1, NEEDLE, 512).as_list() == pytest.approx(wilson_interval(7, 10).as_list()), (
        "not 14 of 20: depths ask the same"
    )
    assert accuracy_interval(comparison, 1, CONTROL, 64).mean == 0
    assert CONTROL not in {difference.metric_name.task_and_setting for difference in comparison.differences}, (
        "a control says nothing about an arm"
    )
    assert differences[RECALL].interval is None, "all sequences differ by the same"
    edit_evaluation(folders[1], "recall", lambda rows: reverse(rows, 512))
    differences = compare_folders(*folders)[1]
    assert differences[RECALL].interval.mean == pytest.approx(0.5)
    assert differences[RECALL].interval.low < 0.49
    assert "accuracy, mqar in sequences of 512" in differences[RECALL].metric_in_words
    assert differences[RECALL].interval.noise_source == differences[NEEDLE].interval.noise_source == "sequences, 1 seed"


def test_needles_by_depth_and_length_are_a_map_for_each_arm(tmp_path):
    losses = {f"depth {25 * place}%": 0.05 * place for place in range(4)}
    folders = [
        build_run(tmp_path, "soft"),
        build_run(tmp_path, "again", seed=2),
        build_run(tmp_path, "scalable", "ssmax"),
    ]
    for folder, exact in zip(folders, (0.2, 0.4, 0.8), strict=True):
        rows = [
            untitled(accuracy_rows({64: [1, 1], 512: [exact - loss] * 2}, depth, 1, task=depth))
            for depth, loss in losses.items()
        ]
        write_rows(folder, "needle", pd.concat(rows))
    (picture,) = task_heat_maps(compare_folders(*folders)[0])
    assert [panel.title for panel in picture.panels] == ["softmax", "ssmax"]
    for panel, exact in zip(picture.panels, (0.3, 0.8), strict=True):  # the mean over two seeds, and one
        assert (panel.row_labels, list(panel.column_labels), panel.max_value) == ([*losses], ["64", "512"], 1)
        assert panel.values == pytest.approx(np.array([[1, exact - loss] for loss in losses.values()]))
    write_rows(folders[2], "needle", pd.concat(rows[:3]))
    assert task_heat_maps(compare_folders(folders[2])[0]) == [], "lines show as few"


def untitled(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows that no report shows in a table."""
    return rows.assign(about=[replace(metric, title="") for metric in rows["about"]])


def reverse(rows: pd.DataFrame, length: int) -> None:
    """Reverse the values of the first task and setting in sequences of a length."""
    mask = (rows["x"] == length) & (rows["setting"] == "as trained")
    rows.loc[mask, "value"] = rows.loc[mask, "value"].to_numpy()[::-1]


def weighed(rows: pd.DataFrame, values: list[float], weights: list[int]) -> None:
    """Give the first units other values and weights."""
    rows.loc[range(len(values)), ["value", "weight"]] = np.array([values, weights], float).T


def test_chance_is_drawn(tmp_path):
    folder = build_run(tmp_path, "soft", asked={64: 0.9})
    (picture,) = [picture for picture in pictures(compare_folders(folder)[0]) if picture.caption.startswith("Accuracy")]
    assert "chance, picking among the answers shown and not yet given" in picture.caption
    assert [panel.horizontal_line_labels for panel in picture.panels] == [
        {0.3397: "chance 0.34"},
        {0.125: "chance, roll-out 0.125"},
        {},
        {},
    ]


def test_answers_of_several_seeds_have_the_wider_interval(tmp_path):
    def arm(name: str, *fractions: float) -> Interval:
        folders = [
            build_run(tmp_path, f"{name}{seed}", seed=seed, asked={64: fraction})
            for seed, fraction in enumerate(fractions)
        ]
        return accuracy_interval(compare_folders(*folders)[0], 0, RECALL, 64)

    spread = arm("spread", 0.6875, 0.8125, 0.75)
    assert spread.low < 0.75 - 4.302653 * 0.0625 / 3**0.5, "of the values alone, an arm may fail in some seeds"
    assert spread.high > 0.75 + 4.302653 * 0.0625 / 3**0.5
    assert arm("right", 1.0, 1.0, 1.0).low < 0.025 ** (1 / 3) + 1e-6
    assert 0.8 < arm("wide", 0.8, 0.8, 0.2).high < 1
    assert arm("equal", 0.75, 0.75).low < of_sequences(0.75).low, "seeds that agree are no certainty"
    assert arm("first", 0.6, 0.62, 0.64).as_list() == pytest.approx(arm("last", 0.64, 0.62, 0.6).as_list()), (
        "no seed stands for the others"
    )


def test_sequences_with_more_answers_weigh_more(tmp_path):
    arms = {"soft": "softmax", "scalable": "ssmax"}
    folders = [build_run(tmp_path, name, arm, asked={64: 0.5}, fingerprint="") for name, arm in arms.items()]
    for folder, first in zip(folders, (0.5, 0.9), strict=True):
        edit_evaluation(
            folder, "recall", lambda result, first=first: weighed(result, [first] * 8 + [0.5] * 8, [15] * 8 + [1] * 8)
        )
        edit_evaluation(
            folder,
            "validation",
            lambda result, first=first: weighed(result, [first] * 64 + [0.5] * 64, [3] * 64 + [1] * 64),
        )
    comparison, differences = compare_folders(*folders)
    assert accuracy_interval(comparison, 1, RECALL, 64).mean == pytest.approx((0.9 * 120 + 0.5 * 8) / 128)
    assert differences[RECALL].interval.mean == pytest.approx(0.4 * 120 / 128)
    assert differences[()].interval.mean == pytest.approx(0.4 * 3 / 4)
    assert differences[()].interval.low < 0.3 < differences[()].interval.high


def test_differences_are_at_the_longest_sequences_that_both_were_asked_in(tmp_path):
    folders = [
        build_run(tmp_path, "soft", asked={64: 0.9}),
        build_run(tmp_path, "scalable", "ssmax", asked={64: 0.5, 512: 0.5}),
    ]
    edit_evaluation(folders[1], "recall", lambda rows: reverse(rows, 64))
    difference = compare_folders(*folders)[1][RECALL]
    assert difference.interval.mean == pytest.approx(-0.4)
    assert "in sequences of 64" in difference.metric_in_words


def test_a_difference_of_accuracies_has_the_interval_of_its_verdict():
    for values in ((0.543, 0.043, 0.5, 0.36, 1, 0.99, 1, 1), (1,) * 8, (0.99, 1, 1, 0.98, 1, 1, 0.99, 1)):
        table = pd.DataFrame({"arm": list("aaaabbbb"), "seed": [*range(4)] * 2, "value": values})
        low, high = lm.judge(table, better="higher").loc[1, ["alone low", "alone high"]]
        differences = table["value"][4:].to_numpy() - table["value"][:4].to_numpy()
        interval = paired_interval(None, differences, Metric(unit="fraction", better="higher"))
        assert (interval.low, interval.high) == pytest.approx((low, high))
    # a fraction that only describes attention has Student's t
    described = paired_interval(None, np.array([0.01, 0.03, 0.02]), Metric(unit="fraction"))
    assert described.low == pytest.approx(0.02 - 4.302653 * 0.01 / 3**0.5)
