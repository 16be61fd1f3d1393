"""Reports read run folders only: statistics, grouping into arms, fairness, and every output format."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from lm import configure as configuration
from lm.attention.table import label as normalizer_label
from lm.errors import RunError
from lm.evaluation.statistics import bootstrap_mean, over_seeds, t_quantile, wilson
from lm.report import Comparison, Interval, compare, paired_difference, print_table, read_run, write_report
from lm.report.comparison import Difference, asked, share_right

SEQ_LEN = 64


def plain(value):
    """As the trainer writes numbers: null for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value


def build_run(
    root: Path,
    name: str,
    normalizer: dict | str = "softmax",
    seed: int = 1,
    better: float = 0.0,
    rise: float = 0.5,
    tokens: str = "rows-a",
    fingerprint: str = "data-a",
    evaluations: tuple[str, ...] = ("validation", "long_context"),
    seq_len: int = SEQ_LEN,
    steps: int = 200,
    noise: float = 0.02,
    align: bool = True,
    asked: dict[int, float] | None = None,
    **overrides,
) -> Path:
    """A run folder as the trainer writes it: `better` lowers the loss, `rise` is the loss per doubling beyond the training length."""
    rng = np.random.default_rng([seed, *name.encode()])
    rows_rng = np.random.default_rng([*tokens.encode()])  # how hard each row is: the same for every run on these rows
    folder = root / name
    (folder / "evaluations").mkdir(parents=True)
    merged = {
        "name": "run",
        "seed": seed,
        "data": {"seq_len": seq_len},
        "model": {"normalizer": normalizer},
        "trainer": {"max_steps": steps},
    }
    tree = configuration.parse(configuration.merge(merged, overrides))
    (folder / "config.yaml").write_text(configuration.to_yaml(tree))
    own = 0 if normalizer == "softmax" else 48
    environment = {
        "git_commit": "0123456789abcdef", "git_dirty": False, "versions": {"torch": "2.13.0", "lm": "0.1.0"}, "device": "cpu",
        "precision": "32", "compile": False, "command": f"lm train configs/{name}.yaml", "data_fingerprint": fingerprint,
        "parameters": {"total": 10_823_424 + own, "non_embedding": 8_000_000, "normalizer": own},
        "tokens_total": steps * 8192, "unigram_entropy": {"train": 6.3, "val": 6.31}, "data": {"train_tokens": 1_900_000, "documents": 200},
        "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    (folder / "environment.json").write_text(json.dumps(environment))
    final = 3.8 - better
    lines = []
    for step in range(steps // 100, steps + 1, max(1, steps // 100)):
        curve = final + 4.5 * np.exp(-step / steps * 12) + 0.9 * (1 - step / steps)
        base = {"step": step, "tokens": step * 8192}
        lines.append(
            base | {"train/loss": curve + rng.normal(0, 0.06), "train/grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1e4, "elapsed_s": step}
        )
        if step % (steps // 20) == 0:
            lines.append(base | {"val/loss": curve + 0.05, "val/bits_per_byte": curve / 2.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(plain(line)) + "\n" for line in lines))
    common = {"step": steps, "tokens_seen": steps * 8192, "data_fingerprint": fingerprint, "rows_sha256": tokens, "seq_len": seq_len}
    if "validation" in evaluations:
        nll = final + rows_rng.normal(0, 0.4, 128) + rng.normal(0, noise, 128)
        write_evaluation(
            folder, "validation", steps, common | {"kind": "validation", "rows": 128, "loss": nll.mean(), "bits_per_byte": nll.mean() / 2.9,
            "unigram_entropy": 6.31, "nll_by_row": nll, "targets_by_row": [256] * 128, "document_by_row": [row // 8 for row in range(128)]},
        )  # fmt: skip
    if "long_context" in evaluations:
        length, rows = 8 * seq_len, 24
        shift = 1.0 if align else 1.1
        edges = np.unique([0, *np.round(shift * 2 ** np.arange(0, np.log2(length), 0.25)).astype(int), length])
        edges = edges[edges <= length]
        position = np.arange(length)
        hard = rows_rng.normal(0, 0.3, (rows, 1))
        settings = []
        for factor in (1.0, 50.0):
            beyond = rise * np.maximum(0, np.log2((position + 1) / seq_len)) / (1 if factor == 1 else 3)
            by_row = final + 2.5 / np.sqrt(position + 1) + beyond + 0.08 * (factor > 1) + hard + rng.normal(0, noise * 8, (rows, length))
            buckets = np.stack([by_row[:, a:b].mean(axis=1) for a, b in pairwise(edges)], axis=1)
            label = "as trained" if factor == 1 else "theta x 50"
            settings.append({"label": label, "loss": by_row.mean(), "bits_per_byte": by_row.mean() / 2.9,
                             "nll_by_position": by_row.mean(axis=0), "nll_by_row": buckets})  # fmt: skip
        write_evaluation(
            folder, "long_context", steps,
            common | {"kind": "long_context", "length": length, "rows": rows, "document_by_row": list(range(rows)),
                      "bucket_edges": edges.tolist(), "settings": settings},
        )  # fmt: skip
    if asked:
        write_answers(folder, common, asked)
    return folder


def write_answers(folder: Path, common: dict, asked: dict[int, float], **task: int) -> None:
    """Recall of `asked`, the share of answers right by length, and needles, of which a tenth fewer are found."""
    cells, needles = [], []
    for length, share in asked.items():
        by_row = np.clip(share + np.linspace(-0.1, 0.1, 16), 0, 1)
        cells.append({"label": "as trained", "task": {"name": "mqar", "pairs": 8} | task, "length": length,
                      "rows_sha256": f"m{length}", "by_row": by_row, "questions_by_row": [8] * 16})  # fmt: skip
        for depth in (0.0, 1.0, None):
            right = 0 if depth is None else round(9 * share)
            needles.append({"label": "as trained", "length": length, "depth": depth, "absent": depth is None, "trials_sha256": f"n{length}",
                            "by_trial": [1] * right + [0] * (10 - right)})  # fmt: skip
    write_evaluation(folder, "recall", common["step"], common | {"kind": "recall", "cells": cells})
    settings = {"needles": 1, "distractors": 0, "finetune": {"steps": 0}}
    write_evaluation(folder, "needle", common["step"], common | {"kind": "needle", "cells": needles} | settings)


def write_evaluation(folder: Path, kind: str, step: int, content: dict) -> None:
    (folder / "evaluations" / f"{kind}.step-{step:06d}.json").write_text(json.dumps(plain(content)))


@pytest.fixture
def pair(tmp_path) -> list[Path]:
    return [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax", better=0.05, rise=0.1)]


# ---------------------------------------------------------------- statistics


def test_bootstrap_interval_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(400):
        shared = rng.normal(4, 0.5, 60)
        interval = paired_difference(shared + 0.1 + rng.normal(0, 0.2, 60), shared, seed=trial, resamples=1000)
        covered += interval.low <= 0.1 <= interval.high
    assert 0.91 <= covered / 400 <= 0.98


def test_rows_of_a_document_are_resampled_together():
    rng, documents = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    covered = {"together": 0, "apart": 0}
    for trial in range(300):
        difference = np.repeat(rng.normal(0.1, 0.1, 12), 10) + rng.normal(0, 0.1, 120)  # most of it is the document's
        for name, groups in (("together", documents), ("apart", None)):
            interval = paired_difference(difference, np.zeros(120), groups=groups, seed=trial, resamples=500)
            covered[name] += interval.low <= 0.1 <= interval.high
    assert covered["together"] >= 0.86 * 300, "twelve documents: a percentile interval is a little narrow"
    assert covered["apart"] < 0.7 * 300


def test_groups_of_one_row_change_nothing_and_labels_don_t_matter():
    rng = np.random.default_rng(0)
    a, weights, labels = rng.normal(size=40), rng.integers(1, 9, 40), np.arange(40) // 4
    alone = paired_difference(a, 0 * a, weights)
    assert alone == paired_difference(a, 0 * a, weights, np.arange(40) + 7)
    assert paired_difference(a, 0 * a, weights, labels) == paired_difference(a, 0 * a, weights, labels * 3 + 5) != alone


def test_few_documents_are_said_and_not_resampled(tmp_path):
    folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax")]
    assert "paired bootstrap over 16 documents (128 rows)" in compared(*folders)[1][()].note
    for folder in folders:
        edit(folder, "validation", lambda result: result.update(document_by_row=[row // 64 for row in range(128)]))
    assert "over 128 rows of only 2 documents, as if they were independent" in compared(*folders)[1][()].note


def test_identical_rows_differ_by_exactly_nothing():
    rows = np.random.default_rng(0).normal(4, 1, 50)
    interval = paired_difference(rows, rows.copy())
    assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_pairing_narrows_the_interval_of_correlated_rows():
    rng = np.random.default_rng(1)
    shared = rng.normal(4, 0.5, 100)
    a, b = shared + rng.normal(0, 0.05, 100), shared + rng.normal(0, 0.05, 100)
    paired, unpaired = paired_difference(a, b), paired_difference(a, rng.permutation(b))
    assert (paired.high - paired.low) < 0.3 * (unpaired.high - unpaired.low)


def test_bootstrap_is_seeded_and_matches_the_textbook_width():
    values = np.random.default_rng(2).normal(0, 1, (400, 1))
    low, high = bootstrap_mean(values, seed=3)
    assert (low, high) == bootstrap_mean(values, seed=3)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)


def test_rows_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="equal shapes"):
        paired_difference(np.zeros(3), np.zeros(4))


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (10, 2.2281), (11, 2.2010), (30, 2.0423), (120, 1.9799)])
def test_t_quantile_matches_the_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_interval_over_seeds_is_students():
    interval = over_seeds(np.array([0.1, 0.2, 0.3]))
    assert interval.mean == pytest.approx(0.2)
    assert interval.high - 0.2 == pytest.approx(4.30265 * 0.1 / np.sqrt(3), rel=1e-5)


# ---------------------------------------------------------------- reading


def test_a_run_is_read_whole(pair):
    run = read_run(pair[1])
    assert (run.name, run.seed, run.seq_len, run.missing) == ("scalable", 1, SEQ_LEN, ())
    assert run.validation.nll_by_row.shape == (128,)
    assert [setting.label for setting in run.long_context.settings] == ["as trained", "theta x 50"]
    assert len(run.training.tokens) == 100
    assert len(run.validations.tokens) == 20


def test_the_last_evaluation_counts(pair):
    old = json.loads((pair[0] / "evaluations/validation.step-000200.json").read_text())
    write_evaluation(pair[0], "validation", 90, old | {"step": 90, "loss": 9.0})
    assert read_run(pair[0]).validation.step == 200


def test_evaluations_of_different_steps_are_said(pair):
    path = pair[0] / "evaluations/long_context.step-000200.json"
    write_evaluation(pair[0], "long_context", 90, json.loads(path.read_text()) | {"step": 90, "tokens_seen": 90 * 8192})
    path.unlink()
    run = read_run(pair[0])
    assert run.missing == ("the validation is of step 200, the long-context evaluation of step 90",)
    checks = {check.what: check.ok for check in compare([run, read_run(pair[1])]).checks}
    assert checks["tokens seen"] is True
    assert checks["tokens seen, long-context evaluation"] is False


def test_a_cut_off_last_line_is_ignored(pair):
    path = pair[0] / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 201, "tok')
    run = read_run(pair[0])
    assert len(run.training.tokens) == 100
    assert run.missing == ()


def test_an_unreadable_line_inside_is_skipped_and_said_and_repeated_steps_count_once(pair):
    path = pair[0] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], '{"step": 3, "to{"st', *lines[2:]]) + "\n")
    run = read_run(pair[0])
    assert len(run.training.tokens) == 100
    assert "line" in run.missing[0]
    assert "4" in run.missing[0]


def test_not_a_run_folder(tmp_path):
    with pytest.raises(RunError, match=r"no config.yaml and no environment.json"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="no such run folder"):
        read_run(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("environment.json", '{"git', "JSON"),
        ("environment.json", "[]", "no JSON object"),
        ("config.yaml", "a: [", "YAML"),
        ("config.yaml", "seed: 1", "no model.normalizer.name, data.seq_len"),
        ("evaluations/validation.step-000200.json", '{"loss": 1', "JSON"),
        ("evaluations/validation.step-000200.json", "{}", "no data_fingerprint"),
        ("evaluations/long_context.step-000200.json", '{"settings": []}', "no data_fingerprint"),
        ("metrics.jsonl", "nonsense\nmore\n", "no line"),
    ],
)
def test_corrupt_files_are_named(pair, name, content, words):
    (pair[0] / name).write_text(content)
    with pytest.raises(RunError, match=words) as caught:
        read_run(pair[0])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_the_wrong_shape_are_refused(pair):
    path = pair[0] / "evaluations/validation.step-000200.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": 5}))
    with pytest.raises(RunError, match=r"validation.step-000200.json: nll_by_row has shape \(128,\), not \(5,\)"):
        read_run(pair[0])


@pytest.mark.parametrize("kept", [(), ("validation",), ("long_context",)])
def test_missing_evaluations_are_reported(tmp_path, kept):
    folders = [build_run(tmp_path, "soft", evaluations=kept), build_run(tmp_path, "scalable", "ssmax")]
    files = write_report(folders, tmp_path / "out")
    html = files.html.read_text()
    for kind in ("validation", "long_context"):
        assert (f"soft: no {kind.replace('_', '-')} evaluation" in html) == (kind not in kept)
    assert "soft" in files.csv.read_text()
    assert ("not evaluated" in html) == (len(kept) < 2)


def test_a_run_that_has_only_started(tmp_path):
    folder = build_run(tmp_path, "soft", evaluations=())
    (folder / "metrics.jsonl").unlink()
    html = write_report([folder], tmp_path / "out").html.read_text()
    assert "no metrics.jsonl" in html


# ---------------------------------------------------------------- arms, fairness, differences


def test_paired_differences_find_what_was_built_in(pair):
    comparison = compare([read_run(folder) for folder in pair])
    validation, plain_rope, scaled_rope = comparison.differences
    assert validation.interval.low < validation.interval.mean < validation.interval.high < 0
    assert validation.interval.mean == pytest.approx(-0.05, abs=0.01)
    assert plain_rope.interval.mean == pytest.approx(-0.05 - 0.4 * 2.56, abs=0.03)
    assert scaled_rope.interval.mean == pytest.approx(-0.05 - 0.4 * 2.56 / 3, abs=0.03)
    assert "one seed per arm: differences of this size can be noise of the seed" in validation.note
    assert "not training noise" in validation.note
    assert comparison.warning == ""


@pytest.mark.parametrize(("change", "why"), [({"tokens": "rows-b"}, "rows or positions"), ({"fingerprint": "data-b"}, "fingerprint")])
def test_runs_on_different_tokens_are_refused_a_difference_and_told_why(tmp_path, change, why):
    folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax", **change)]
    files = write_report(folders, tmp_path / "out")
    html = files.html.read_text()
    assert "not measured on the same tokens" in html
    assert why in html
    assert all(difference.interval is None for difference in compare([read_run(folder) for folder in folders]).differences)
    assert "[" not in files.markdown.read_text().split("- validation")[0]


def test_keys_that_differ_besides_the_normalizer_are_shouted(tmp_path):
    folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax", optim={"lr": 0.002}, log={"every": 5})]
    comparison = compare([read_run(folder) for folder in folders])
    assert comparison.warning == "The arms differ in more than the normalizer: optim.lr."
    diff = dict(comparison.config_diff)
    assert diff["optim.lr"] == ("0.001", "0.002")
    assert diff["model.normalizer.name"] == ("softmax", "ssmax")
    assert diff["model.normalizer.scale"] == ("-", "learned")
    assert diff["log.every"] == ("10", "5")
    assert [check.what for check in comparison.checks if not check.ok] == ["learning rate and schedule"]
    assert comparison.warning in write_report(folders, tmp_path / "out").html.read_text()


def test_an_unfinished_run_is_shouted(pair):
    for path in (pair[1] / "evaluations").iterdir():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens_seen": 8192}))
    comparison = compare([read_run(folder) for folder in pair])
    assert comparison.warning == "The runs have not seen the same number of tokens: softmax: 1,638,400; ssmax: 8,192."


def test_seeds_are_grouped_into_arms_and_paired(tmp_path):
    folders = [
        build_run(tmp_path, f"{normalizer}-{seed}", normalizer, seed=seed, better=better + 0.01 * seed)
        for normalizer, better in (("softmax", 0.0), ("ssmax", 0.05))
        for seed in (3, 1, 2)
    ]
    comparison = compare([read_run(folder) for folder in folders])
    assert [(arm.label, [run.seed for run in arm.runs]) for arm in comparison.arms] == [("softmax", [1, 2, 3]), ("ssmax", [1, 2, 3])]
    difference = comparison.differences[0]
    assert "3 paired seeds" in difference.note
    assert "Student t" in difference.note
    assert difference.interval.mean == pytest.approx(-0.05, abs=0.01)
    assert "sd over seeds" in write_report(folders, tmp_path / "out").markdown.read_text()


def test_differences_are_between_seeds_in_common(tmp_path):
    def of(*seeds: tuple[int, int]) -> Difference:
        made = [("softmax", seeds[0]), ("ssmax", seeds[1])]
        folders = [
            build_run(tmp_path, f"{name}{seeds}{seed}".replace(" ", ""), name, seed=seed, better=seed / 10)
            for name, two in made
            for seed in two
        ]
        return compared(*folders)[1][()]

    shared = of((1, 2), (2, 3))
    assert shared.interval.mean == pytest.approx(0, abs=0.02), "seed 2, not the means"
    assert "seed 2 alone is in both arms" in shared.note
    assert of((1, 2), (3, 4)).interval is None
    assert "no seed in common" in of((1,), (3,)).note


def test_runs_of_an_arm_on_different_rows_have_no_mean(tmp_path):
    folders = [build_run(tmp_path, f"soft{seed}", seed=seed, tokens=tokens) for seed, tokens in ((1, "rows-a"), (2, "rows-b"))]
    assert "softmax: the validation rows of its runs differ: no mean of their losses" in compared(*folders)[0].missing
    assert re.search(r"\| softmax \| 2 \| 10\.82 \| 1\.638 \| - \| - \|", write_report(folders, tmp_path / "out").markdown.read_text())


def test_the_formula_is_that_of_the_options(tmp_path):
    page = write_report([build_run(tmp_path, "plain", "ssmax")], tmp_path / "out").html.read_text()
    assert "softmax((s ln n) z)" in page
    page = write_report([build_run(tmp_path, "biased", {"name": "ssmax", "bias": True})], tmp_path / "out").html.read_text()
    assert "softmax((s ln n + b) z)" in page


def test_labels_tell_arms_apart(tmp_path):
    assert normalizer_label({"name": "ssmax", "scale": "none", "bias": False, "init": "match", "n": "visible"}) == "ssmax (scale=none)"
    assert normalizer_label({"name": "ssmax", "init": 1.0, "bias": True}) == "ssmax (init=1.0, bias=true)"
    assert normalizer_label({"name": "new", "temperature": 2}) == "new (temperature=2)"
    folders = [
        build_run(tmp_path, "a"),
        build_run(tmp_path, "b", optim={"lr": 0.002}),
        build_run(tmp_path, "c", "ssmax"),
        build_run(tmp_path, "d"),
    ]
    labels = [arm.label for arm in compare([read_run(folder) for folder in folders]).arms]
    assert labels == ["softmax, lr=0.001, a", "softmax, lr=0.002", "ssmax", "softmax, lr=0.001, d"]


def test_the_baseline_is_chosen_by_run_arm_or_normalizer(pair):
    records = [read_run(folder) for folder in pair]
    assert compare(records).arms[0].label == "softmax"
    for name in ("scalable", "ssmax"):
        assert compare(records, name).arms[0].label == "ssmax"
    with pytest.raises(RunError, match="choose from: softmax, ssmax"):
        compare(records, "sofmax")


def test_buckets_that_miss_the_range_say_their_own_positions(tmp_path):
    folders = [build_run(tmp_path, "soft", align=False), build_run(tmp_path, "scalable", "ssmax", align=False)]
    difference = compare([read_run(folder) for folder in folders]).differences[1]
    assert re.search(r"positions 282-512", difference.what)
    assert difference.interval


# ---------------------------------------------------------------- answers

RECALL, NEEDLE, CONTROL = (("mqar", "as trained"), ("needle", "as trained"), ("needle, control without it", "as trained"))


def compared(*folders: Path) -> tuple[Comparison, dict[tuple[str, ...], Difference]]:
    """The comparison, and the last arm's differences by what they are of."""
    comparison = compare([read_run(folder) for folder in folders])
    return comparison, {difference.of: difference for difference in comparison.differences}


def edit(folder: Path, kind: str, change: Callable[[dict], None]) -> None:
    path = next(folder.glob(f"evaluations/{kind}.*"))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_answers_have_intervals_and_paired_differences_at_the_longest_rows(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.9, 512: 0.3}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.9, 512: 0.8})]
    comparison, found = compared(*folders)
    assert asked(comparison.arms) == [RECALL, NEEDLE, CONTROL]
    assert share_right(comparison.arms[0], RECALL, 512).listed() == pytest.approx(wilson(0.3 * 128, 128).listed())
    assert share_right(comparison.arms[1], NEEDLE, 512).listed() == pytest.approx(wilson(7, 10).listed()), (
        "not 14 of 20: depths ask the same"
    )
    assert share_right(comparison.arms[1], CONTROL, 64).mean == 0
    assert found[RECALL].interval is None, "all rows differ by the same"
    edit(folders[1], "recall", lambda result: result["cells"][1]["by_row"].reverse())
    found = compared(*folders)[1]
    assert found[RECALL].interval.mean == pytest.approx(0.5)
    assert found[RECALL].interval.low < 0.49
    assert "answers right, mqar in rows of 512" in found[RECALL].what
    assert found[RECALL].note.startswith("paired bootstrap over 16 rows")
    assert found[NEEDLE].note.startswith("paired bootstrap over 10 rows")
    files = write_report(folders, tmp_path / "out")
    (line,) = [line for line in files.markdown.read_text().splitlines() if line.startswith("| ssmax | mqar")]
    assert re.fullmatch(r"\| ssmax \| mqar \| as trained \| 0\.900 \[.*\] \| 0\.800 \[.*\] \| \+0\.5000 \[.*\] \|", line)
    assert b"Answers right" in files.html.read_bytes()


def test_answers_of_several_seeds_have_the_wider_interval(tmp_path):
    def arm(name: str, *shares: float) -> Interval:
        folders = [build_run(tmp_path, f"{name}{seed}", seed=seed, asked={64: share}) for seed, share in enumerate(shares)]
        return share_right(compared(*folders)[0].arms[0], RECALL, 64)

    spread = arm("spread", 0.6875, 0.8125, 0.75)
    assert spread.listed() == pytest.approx([0.75, 0.75 - 4.302653 * 0.0625 / 3**0.5, 0.75 + 4.302653 * 0.0625 / 3**0.5])
    assert arm("wide", 0.8, 0.8, 0.2).high == 1
    assert arm("equal", 0.75, 0.75).listed() == pytest.approx(wilson(96, 128).listed()), "seeds that agree are no certainty"


def test_rows_with_more_answers_weigh_more(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.5}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.5})]
    for folder, first in zip(folders, (0.5, 0.9), strict=True):
        edit(folder, "recall", lambda result, first=first: result["cells"][0].update(
            by_row=[first] * 8 + [0.5] * 8, questions_by_row=[15] * 8 + [1] * 8))  # fmt: skip
        edit(folder, "validation", lambda result, first=first: result.update(
            nll_by_row=[first] * 64 + [0.5] * 64, targets_by_row=[3] * 64 + [1] * 64))  # fmt: skip
    comparison, found = compared(*folders)
    assert share_right(comparison.arms[1], RECALL, 64).mean == pytest.approx((0.9 * 120 + 0.5 * 8) / 128)
    assert found[RECALL].interval.mean == pytest.approx(0.4 * 120 / 128)
    assert found[()].interval.mean == pytest.approx(0.4 * 3 / 4)
    assert found[()].interval.low < 0.3 < found[()].interval.high


def test_answers_to_other_questions_are_not_subtracted(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.9}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.5})]
    edit(folders[1], "recall", lambda result: result["cells"][0].update(rows_sha256="others"))
    comparison, found = compared(*folders)
    assert found[RECALL].interval is None
    assert "not measured on the same tokens" in found[RECALL].note
    assert found[NEEDLE].interval is not None
    assert [check.ok for check in comparison.checks if "questions" in check.what] == [False]


def test_differences_are_at_the_longest_rows_that_both_were_asked_in(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.9}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.5, 512: 0.5})]
    edit(folders[1], "recall", lambda result: result["cells"][0]["by_row"].reverse())
    difference = compared(*folders)[1][RECALL]
    assert difference.interval.mean == pytest.approx(-0.4)
    assert "in rows of 64" in difference.what
    table = write_report(folders, tmp_path / "out").markdown.read_text()
    assert "difference to softmax, 512" in table
    assert re.search(r"\| ssmax \| mqar .*\| - \|\n", table), "the column is of other rows than the difference"


def test_tasks_are_named_over_all_runs(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.9}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.9})]
    write_answers(folders[1], {"step": 200, "tokens_seen": 200 * 8192, "data_fingerprint": "data-a"}, {64: 0.9}, pairs=16)
    comparison, found = compared(*folders)
    assert asked(comparison.arms)[:2] == [("mqar (pairs 8)", "as trained"), NEEDLE]
    assert found["mqar (pairs 16)", "as trained"].interval is None


def test_answers_of_other_steps_are_said(tmp_path):
    folders = [build_run(tmp_path, "soft", asked={64: 0.9}), build_run(tmp_path, "scalable", "ssmax", asked={64: 0.9})]
    edit(folders[1], "recall", lambda result: result.update(step=100, tokens_seen=1000))
    edit(folders[1], "needle", lambda result: result.update(step=100, tokens_seen=1000))
    comparison, _ = compared(*folders)
    assert "asked for answers after different numbers of tokens: softmax: 1,638,400; ssmax: 1,000" in comparison.warning
    assert [check.ok for check in comparison.checks if check.what == "tokens seen, answers"] == [False]
    assert any("the evaluation of mqar of step 100" in lack for lack in comparison.missing)


def test_runs_on_symbols_lack_nothing_without_long_rows_and_bytes(tmp_path):
    symbols = {
        "eval": {"long_context": {"length_factor": 0}},
        "data": {"seq_len": 64, "tasks": [{"weight": 1.0, "task": {"name": "mqar"}}]},
    }
    folder = build_run(tmp_path, "soft", asked={64: 0.9}, evaluations=("validation",), **symbols)
    edit(folder, "validation", lambda result: result.update(bits_per_byte=None))
    assert read_run(folder).missing == ()
    files = write_report([folder], tmp_path / "out")
    assert "bits per byte" not in files.markdown.read_text()
    page = files.html.read_text()
    assert "nats per token of the answers" in page
    assert "source.name" not in page.split("<h2>Runs")[0]


def test_an_evaluation_of_answers_that_is_asked_for_is_missed(tmp_path):
    folder = build_run(tmp_path, "soft", data={"seq_len": 64, "tasks": [{"weight": 0.5, "task": {"name": "needle"}}]})
    assert read_run(folder).missing == ("no recall evaluation",)
    write_evaluation(folder, "recall", 200, {"kind": "recall", "step": 200, "cells": [{"task": {"name": "needle"}}]})
    (lack,) = read_run(folder).missing
    assert "no recall evaluation that can be read" in lack


# ---------------------------------------------------------------- output


def numbers(text: str) -> set[str]:
    return set(re.findall(r"[-+]?\d+\.\d{4}", text))


def test_all_formats_have_the_same_numbers(pair, tmp_path):
    files = write_report(pair, tmp_path / "out")
    markdown = files.markdown.read_text().split("- validation")[0]
    html = re.search(r"<h2>Results.*?<p>", files.html.read_text(), re.DOTALL)[0].replace("&#43;", "+")
    assert numbers(markdown) == numbers(files.csv.read_text()) == numbers(files.latex.read_text()) == numbers(html)
    assert len(numbers(markdown)) > 20
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_table(pair, console=console)
    assert numbers(markdown) <= numbers(console.export_text())


def test_csv_is_rectangular_and_carries_units(pair, tmp_path):
    rows = list(csv.DictReader(write_report(pair, tmp_path / "out").csv.open()))
    assert not any(None in row for row in rows)
    by_label = {(row["arm"], row["RoPE"], row["quantity"]): row for row in rows}
    assert len(by_label) == len(rows)
    difference = by_label["ssmax", "as trained", "difference to softmax, 4x-8x"]
    assert float(difference["low"]) < float(difference["value"]) < float(difference["high"]) < -0.04
    assert by_label["softmax", "theta x 50", "loss 4x-8x"]["unit"] == "nats/token"


def test_the_page_is_self_contained_and_escapes_hostile_names(tmp_path):
    name = "<script>alert(1)&$\\frac{"
    folders = [build_run(tmp_path, name), build_run(tmp_path, "twin"), build_run(tmp_path, "scalable", "ssmax")]
    files = write_report(folders, tmp_path / "out")
    html = files.html.read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert not re.search(r"""(?:src|href|action)\s*=\s*["'](?!#)""", html)
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|<object|javascript:", html)
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "\\textless{}script\\textgreater{}alert(1)\\&\\$\\textbackslash{}frac\\{" in files.latex.read_text()


def test_the_same_runs_give_the_same_bytes(pair, tmp_path):
    first, second = (write_report(pair, tmp_path / name) for name in ("one", "two"))
    for name, path in vars(first).items():
        assert path.read_bytes() == getattr(second, name).read_bytes(), name
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(path.name for path in vars(first).values())


@pytest.mark.parametrize("value", [1e3, np.inf, np.nan])
def test_an_exploding_loss_breaks_nothing(tmp_path, value):
    folder = build_run(tmp_path, "exploding", "ssmax")
    for kind in ("validation", "long_context"):
        path = folder / f"evaluations/{kind}.step-000200.json"
        content = json.loads(path.read_text())
        if kind == "validation":
            content |= {"loss": value, "bits_per_byte": value, "nll_by_row": [value] * 128}
        else:
            half = len(content["settings"][0]["nll_by_row"][0]) // 2
            for row in content["settings"][0]["nll_by_row"]:
                row[half:] = [value] * (len(row) - half)
            content["settings"][0]["nll_by_position"][100:] = [value] * (content["length"] - 100)
        path.write_text(json.dumps(plain(content)))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line | {key: value for key in line if key.endswith("loss") and line["step"] > 100} for line in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(plain(line)) for line in metrics))
    soft = build_run(tmp_path, "soft")
    for folders in ([soft, folder], [folder]):
        files = write_report(folders, tmp_path / "out")
        assert ("1000" if value == 1e3 else "not finite") in files.markdown.read_text()
        assert b"nan" not in files.csv.read_bytes()
        assert "leaving the picture" in files.html.read_text() or value != 1e3 or len(folders) == 1


def test_one_run_has_a_report_without_differences(pair, tmp_path):
    html = write_report(pair[1:], tmp_path / "out").html.read_text()
    assert "difference" not in html.lower()
    assert "fair" not in html
    assert "ssmax: scalable" in html


def test_no_evaluation_of_the_same_rows_twice(pair):
    assert len(compare([read_run(pair[0]), read_run(pair[0])]).arms[0].runs) == 1


def test_an_unwritable_folder_is_a_run_error(pair, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't save the report"):
        write_report(pair, tmp_path / "file" / "out")


def test_reports_import_neither_torch_nor_lightning():
    code = "import lm.report, sys; sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'matplotlib.pyplot')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
