"""Run folders as reports read them: whole, unfinished, of older versions, corrupt."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fabricated import save_empty_checkpoint, write_evaluation
from folders import curves_of
from reported import SEQ_LEN, build_run, write_report

import lm
from lm.experiments.run_outcome import Outcome
from lm.report.comparison import compare_runs, normalizer_history_label
from lm.report.comparison_pictures import LOSS_TITLES, curves_picture, drawn_runs
from lm.report.comparison_tables import run_properties
from lm.report.html import write_comparison
from lm.runs.evaluations import load_evaluation
from lm.runs.folder import PEAK_MEMORY_KEY, highest_logged
from lm.runs.record import read_run
from lm.training.train import train


def test_a_run_is_read_whole(report_runs):
    run = read_run(report_runs[1])
    assert (run.name, run.seeds, run.flat_config["data.seq_len"]) == ("scalable", (1,), SEQ_LEN)
    validation, bits, *long = (curve for evaluation in run.evaluations for curve in curves_of(evaluation))
    assert [len(units.values) for units in validation.points] == [128]
    assert bits.points == []
    assert [(curve.setting, len(curve.points[0].values)) for curve in long] == [("as trained", 24), ("theta x 50", 24)]
    assert [len(run.curve(name).tokens) for name in LOSS_TITLES] == [100, 20]


@pytest.mark.parametrize(("init", "words"), [("match", " (init match)"), ("", ""), (None, "")])
def test_the_label_of_a_swapped_run_names_the_init_of_new_parameters_where_there_is_one(init: str | None, words: str):
    entries = {"swap.normalizer": "softmax", "swap.init": init}
    run = SimpleNamespace(
        phase_starts_and_normalizers=[(0, {"name": "log_n"})], config={}, environment_entry=entries.get
    )
    assert normalizer_history_label(run) == f"softmax -> log_n after training{words}"


def test_the_last_evaluation_counts(report_runs):
    write_evaluation(
        report_runs[0], replace(load_evaluation(report_runs[0] / "evaluations/validation.step-000200.csv"), step=90)
    )
    assert read_run(report_runs[0]).evaluations[0].step == 200


def test_evaluations_of_different_steps_are_said(report_runs):
    path = report_runs[0] / "evaluations/long_context.step-000200.csv"
    write_evaluation(report_runs[0], replace(load_evaluation(path), step=90, tokens_seen=90 * 8192))
    path.unlink()
    checks = {fact.name: fact.runs_agree for fact in run_properties(compare_runs([*map(read_run, report_runs)]))}
    assert checks["tokens seen"] is True
    assert checks["tokens seen when evaluated"] is False


def test_an_unreadable_line_inside_is_skipped_and_repeated_steps_count_once(report_runs):
    path = report_runs[0] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], '{"step": 3, "to{"st', *lines[2:]]) + "\n")
    save_empty_checkpoint(report_runs[0], 200)
    assert len(read_run(report_runs[0]).curve("train/loss").tokens) == 100


@pytest.mark.parametrize("kept", [(), ("validation",), ("long_context",)])
def test_a_run_without_evaluations_and_log_is_reported(tmp_path, kept):
    folders = [build_run(tmp_path, "soft", evaluations=kept), build_run(tmp_path, "scalable", "ssmax")]
    (folders[0] / "metrics.jsonl").unlink()
    files = write_report(folders, tmp_path / "out")
    assert ("soft" in files.csv.read_text()) == bool(kept)
    assert ("not evaluated" in files.html.read_text()) == (len(kept) < 2)


def test_training_time_is_over_all_starts():
    lines = [{"step": step, "elapsed_s": 1.5 * step, PEAK_MEMORY_KEY: 10 - step} for step in (2, 4, 6)] + [
        {"step": 6, "val/loss": 4.0}
    ]
    assert (
        highest_logged(lines, "elapsed_s"),
        highest_logged(lines, PEAK_MEMORY_KEY),
        highest_logged([], PEAK_MEMORY_KEY),
    ) == (9.0, 8, None)


@pytest.mark.slow
def test_a_diverged_run_is_called_so_everywhere(tiny, tmp_path, capsys):
    """By `lm train` as it ends and is resumed, `lm.results`, an experiment; by `lm report` in words, table, picture."""
    config = tiny("name=gone", "optim.lr=3", "optim.schedule=constant", "trainer.max_steps=40", "log.progress=lines")
    assert train(config) == 0
    how = r"diverged: final loss above the unigram cross-entropy \(.*\), training loss rose from .* to .*"
    assert re.fullmatch(f"done: {config.run_folder}, {how}", capsys.readouterr().err.splitlines()[-1])
    assert train(replace(config, resume="auto")) == 0
    assert re.search(f"complete at step 40, {how}; raise", capsys.readouterr().out.splitlines()[-1])
    assert {*lm.results(config.run_folder)["state"]} == {"diverged"}
    assert Outcome(config.run_folder, 40, "val/loss").state == "diverged"
    assert train(tiny("name=well", "trainer.max_steps=40")) == 0
    runs = [config.run_folder, tiny("name=well").run_folder]
    assert [read_run(run).state for run in runs] == ["diverged", "finished"]
    for folders in (runs[:1], runs):
        comparison, report = compare_runs([read_run(run) for run in folders]), tmp_path / "report"
        assert re.search(f"gone: {how}", write_comparison(comparison, report).read_text())
        assert ",diverged,,1," in (report / "table.csv").read_text()
        panel = curves_picture(comparison.arm_labels, drawn_runs(comparison), LOSS_TITLES, comparison).panels[0]
        assert [trace.kind for trace in panel.traces].count("diverged") == 1
        shown = read_run(folders[-1]).curve("train/loss").values[20:]  # of the diverged run alone, or of the other
        assert all(panel.y_range[0] < loss < panel.y_range[1] for loss in shown)
