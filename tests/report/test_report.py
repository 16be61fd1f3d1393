"""Reports of run folders: grouping into arms, fairness, differences."""

import re

import pytest
import yaml
from manifests import write_recorded_file
from reported import build_run, compare_folders, edit_evaluation, write_report

from lm.errors import RunError
from lm.report.comparison import Difference, compare_runs
from lm.report.comparison_tables import (
    DIFFERENT_SEEDS_NOTE,
    ONE_SEED_NOTE,
    comparison_notes,
    comparison_tables,
    run_properties,
)
from lm.report.tables import Column, number_text, signed_text
from lm.runs.record import read_run


def test_paired_differences_find_what_was_built_in(report_runs):
    comparison = compare_runs([read_run(folder) for folder in report_runs])
    validation, plain_rope, scaled_rope = comparison.differences
    assert validation.interval.low < validation.interval.mean < validation.interval.high < 0
    assert validation.interval.mean == pytest.approx(-0.05, abs=0.01)
    assert plain_rope.interval.mean == pytest.approx(-0.05 - 0.4 * 2.56, abs=0.03)
    assert scaled_rope.interval.mean == pytest.approx(-0.05 - 0.4 * 2.56 / 3, abs=0.03)
    assert validation.interval.noise_source == "documents, 1 seed"
    assert ONE_SEED_NOTE in comparison_notes(comparison)
    assert comparison.fairness_warning == ""


@pytest.mark.parametrize("change", [{"tokens": "sequences-b"}, {"fingerprint": "data-b"}, {"align": False}])
def test_runs_on_different_tokens_are_refused_a_difference_and_told_why(tmp_path, change):
    folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax", **change)]
    files = write_report(folders, tmp_path / "out")
    html = files.html.read_text()
    assert "not measured on the same tokens" in html
    *_, difference = compare_runs([read_run(folder) for folder in folders]).differences
    assert difference.interval is None
    assert not any(row["low"] for row in files.rows) or change == {"align": False}


def test_keys_that_differ_besides_the_normalizer_are_shouted(tmp_path):
    folders = [
        build_run(tmp_path, "soft"),
        build_run(tmp_path, "scalable", "ssmax", optim={"lr": 0.002}, log={"every": 5}),
    ]
    comparison = compare_runs([read_run(folder) for folder in folders])
    assert comparison.fairness_warning == "The arms differ in more than the normalizer: optim.lr."
    diff = dict(comparison.config_diff)
    assert diff["optim.lr"] == ("0.001", "0.002")
    assert diff["model.normalizer.name"] == ("softmax", "ssmax")
    assert diff["model.normalizer.scale"] == ("-", "learned")
    assert diff["log.every"] == ("10", "5")
    assert [fact.name for fact in run_properties(comparison) if fact.must_agree and not fact.runs_agree] == [
        "learning rate and schedule"
    ]
    assert comparison.fairness_warning in write_report(folders, tmp_path / "out").html.read_text()


def test_a_key_that_is_off_is_as_one_that_an_older_run_lacks(report_runs):
    path = report_runs[1] / "config.yaml"
    config = yaml.safe_load(path.read_text())
    assert config["eval"].pop("diagnostics") is None
    write_recorded_file(path, yaml.safe_dump(config, sort_keys=False))
    diff = dict(compare_runs([read_run(folder) for folder in report_runs]).config_diff)
    assert "eval.diagnostics" not in diff
    assert diff["model.normalizer.scale"] == ("-", "learned")


def test_an_unfinished_run_is_shouted(report_runs):
    for kind in ("validation", "long_context"):
        edit_evaluation(report_runs[1], kind, lambda rows: None, tokens_seen=8192)
    comparison = compare_runs([read_run(folder) for folder in report_runs])
    assert (
        comparison.fairness_warning
        == "The runs have not seen the same number of tokens: softmax: 1,638,400; ssmax: 8,192."
    )


def test_seeds_are_grouped_into_arms_and_paired(tmp_path):
    folders = [
        build_run(tmp_path, f"{normalizer}-{seed}", normalizer, seed=seed, better=better + 0.01 * seed)
        for normalizer, better in (("softmax", 0.0), ("ssmax", 0.05))
        for seed in (3, 1, 2)
    ]
    comparison = compare_runs([read_run(folder) for folder in folders])
    assert [(arm, [run.seeds for run in runs]) for arm, runs in comparison.runs_by_arm.items()] == [
        ("softmax", [(1,), (2,), (3,)]),
        ("ssmax", [(1,), (2,), (3,)]),
    ]
    difference = comparison.differences[0]
    assert difference.interval.noise_source == "3 seeds"
    assert ONE_SEED_NOTE not in comparison_notes(comparison)
    assert difference.interval.mean == pytest.approx(-0.05, abs=0.01)
    assert "sd over seeds" in {row["quantity"] for row in write_report(folders, tmp_path / "out").rows}


def test_seeds_and_tokens_are_of_the_runs_that_have_the_number(tmp_path):
    arms = [("softmax", 1), ("softmax", 2), ("ssmax", 1), ("ssmax", 2), ("ssmax", 3)]
    folders = [build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50) for name, seed in arms]
    for path in (tmp_path / "softmax2" / "evaluations").glob("long_context*"):
        path.unlink()
    comparison = compare_runs([read_run(folder) for folder in folders])
    seeds = [
        cells
        for table in comparison_tables(comparison)
        for column, cells in table.filled_columns
        if column.name == "seeds"
    ]
    assert seeds == [["2", "3"], ["1", "3"] * 2]
    assert DIFFERENT_SEEDS_NOTE in comparison_notes(comparison)
    assert DIFFERENT_SEEDS_NOTE not in comparison_notes(
        compare_runs([read_run(folder) for folder in folders if folder.name.endswith("1")])
    )


def test_differences_are_between_seeds_in_common(tmp_path):
    def of(*seeds: tuple[int, int]) -> Difference:
        arms = [("softmax", seeds[0]), ("ssmax", seeds[1])]
        folders = [
            build_run(tmp_path, f"{name}{seeds}{seed}".replace(" ", ""), name, seed=seed, better=seed / 10)
            for name, two in arms
            for seed in two
        ]
        return compare_folders(*folders)[1][()]

    shared = of((1, 2), (2, 3))
    assert shared.interval.mean == pytest.approx(0, abs=0.02), "seed 2, not the means"
    assert shared.interval.noise_source == "documents, 1 seed"
    assert of((1, 2), (3, 4)).interval is None
    assert "no seed in common" in of((1,), (3,)).no_interval_reason


def test_labels_tell_arms_apart(tmp_path):
    folders = [
        build_run(tmp_path, "a"),
        build_run(tmp_path, "b", optim={"lr": 0.002}),
        build_run(tmp_path, "c", "ssmax"),
        build_run(tmp_path, "d"),
    ]
    labels = [*compare_runs([read_run(folder) for folder in folders]).runs_by_arm]
    assert labels == ["softmax, lr=0.001, a", "softmax, lr=0.002", "ssmax", "softmax, lr=0.001, d"]


def test_the_baseline_is_chosen_by_run_arm_or_normalizer(report_runs):
    records = [read_run(folder) for folder in report_runs]
    assert compare_runs(records).arm_labels[0] == "softmax"
    for name in ("scalable", "ssmax"):
        assert compare_runs(records, name).arm_labels[0] == "ssmax"
    with pytest.raises(RunError, match="choose from: softmax, ssmax"):
        compare_runs(records, "sofmax")


def test_buckets_that_miss_the_range_say_their_own_positions(tmp_path):
    folders = [build_run(tmp_path, "soft", align=False), build_run(tmp_path, "scalable", "ssmax", align=False)]
    difference = compare_runs([read_run(folder) for folder in folders]).differences[1]
    assert re.search(r"positions 282-512", difference.metric_in_words)
    assert difference.interval


def test_too_few_documents_give_no_interval_and_are_said(tmp_path):
    folders = [
        build_run(tmp_path, name, normalizer, fingerprint="")
        for name, normalizer in (("soft", "softmax"), ("scalable", "ssmax"))
    ]
    assert compare_folders(*folders)[1][()].interval.noise_source == "documents, 1 seed"
    for folder in folders:
        edit_evaluation(folder, "validation", lambda rows: rows.assign(group=rows["sample"] // 64))
    difference = compare_folders(*folders)[1][()]
    assert difference.interval is None
    assert difference.no_interval_reason.endswith("fewer than 3 documents")


@pytest.mark.parametrize(
    ("value", "written", "as_difference"),
    [
        (16460.3, "16460", "+16460"),
        (-123456.0, "-123500", "-123500"),
        (123.456, "123.5", "+123.5"),
        (4.5, "4.5000", "+4.5000"),
        (-1e-9, "0.0000", "0.0000"),
        (3e-5, "0.0000", "+0.000030"),  # an end of an interval, above 0
    ],
)
def test_numbers_have_no_exponent_and_zero_no_sign(value, written, as_difference):
    assert (number_text(value), signed_text(value)) == (written, as_difference)
    assert Column("divergence", kind="mean").mean_text(-1e-9) == "0.0000"
