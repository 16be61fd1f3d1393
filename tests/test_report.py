"""Reports read run folders only: reading them, grouping into arms, fairness, and every output format."""

import contextlib
import copy
import csv
import errno
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import reduce
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from reported import SEQ_LEN, build_run, compared, edit, first_sample, plain, write_evaluation
from rich.console import Console

from lm.attention.catalogue import label as normalizer_label
from lm.errors import RunError
from lm.evaluation.line_styles import colour_and_marker, dashes_and_width
from lm.report.comparison import compare
from lm.report.differences import Difference
from lm.report.html import write_report
from lm.report.plots import overview
from lm.report.tables import print_table
from lm.runs.evaluations import Evaluation
from lm.runs.record import read_run
from lm.runs.validation import UNIGRAM


@pytest.fixture
def pair(tmp_path) -> list[Path]:
    return [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax", better=0.05, rise=0.1)]


# ---------------------------------------------------------------- reading


def test_a_run_is_read_whole(pair):
    run = read_run(pair[1])
    assert (run.name, run.seeds, run.flat["data.seq_len"], run.missing) == ("scalable", (1,), SEQ_LEN, ())
    validation, bits, *long = run.series
    assert validation.samples[0].values.shape == (128, 1)
    assert bits.samples == ()
    assert [(one.setting, one.samples[0].values.shape[0]) for one in long] == [("as trained", 24), ("theta x 50", 24)]
    assert len(run.training.tokens) == 100
    assert len(run.validations.tokens) == 20


def test_the_last_evaluation_counts(pair):
    old = json.loads((pair[0] / "evaluations/validation.step-000200.json").read_text())
    write_evaluation(pair[0], "validation", 90, old | {"step": 90})
    assert read_run(pair[0]).evaluations[0].step == 200


def test_evaluations_of_different_steps_are_said(pair):
    path = pair[0] / "evaluations/long_context.step-000200.json"
    write_evaluation(pair[0], "long_context", 90, json.loads(path.read_text()) | {"step": 90, "tokens_seen": 90 * 8192})
    path.unlink()
    run = read_run(pair[0])
    assert run.missing == ("the validation evaluation is of step 200, the long-context evaluation of step 90",)
    checks = {check.what: check.ok for check in compare([run, read_run(pair[1])]).checks}
    assert checks["tokens seen"] is True
    assert checks["tokens seen, long-context sequences"] is False


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
        ("config.yaml", "a: " + "[" * 1000, "nested more than 50 deep"),
        ("config.yaml", "seed: 1", "no model.normalizer.name, data.seq_len"),
        ("evaluations/validation.step-000200.json", '{"loss": 1', "JSON"),
        ("evaluations/long_context.step-000200.json", "[]", "no JSON object"),
        ("metrics.jsonl", "nonsense\nmore\n", "no line"),
    ],
)
def test_corrupt_files_are_named(pair, name, content, words):
    (pair[0] / name).write_text(content)
    with pytest.raises(RunError, match=words) as caught:
        read_run(pair[0])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["validation", "long_context"])
def test_an_evaluation_of_an_older_version_is_said_to_be_missing(pair, kind):
    edit(pair[0], kind, lambda result: result.pop("data_fingerprint"))
    lacks = read_run(pair[0]).missing
    assert f"no {kind.replace('_', '-')} evaluation that can be read" in lacks[0]
    assert "no data_fingerprint; if it was measured by an older version, measure it again with `lm eval`" in lacks[0]


def test_numbers_of_the_wrong_shape_are_refused(pair):
    edit(pair[0], "validation", lambda result: result["series"][0]["samples"][0].update(weights=[1] * 5))
    with pytest.raises(RunError, match=r"validation.step-000200.json: samples.weights has shape \(5,\), not \(128,\)"):
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
    assert "one seed per arm: says nothing about the method" in validation.note
    assert "not training noise" in validation.note
    assert comparison.warning == ""


@pytest.mark.parametrize(
    ("change", "why"), [({"tokens": "sequences-b"}, "sequences or positions"), ({"fingerprint": "data-b"}, "fingerprint")]
)
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
    assert [(arm.label, [run.seeds for run in arm.runs]) for arm in comparison.arms] == [
        ("softmax", [(1,), (2,), (3,)]),
        ("ssmax", [(1,), (2,), (3,)]),
    ]
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


def test_runs_of_an_arm_on_different_sequences_have_no_mean(tmp_path):
    folders = [build_run(tmp_path, f"soft{seed}", seed=seed, tokens=tokens) for seed, tokens in ((1, "sequences-a"), (2, "sequences-b"))]
    assert "softmax: the validation sequences of its runs differ: no mean over them" in compared(*folders)[0].missing
    assert re.search(r"\| softmax \| 2 \| 10\.82 \| 1\.638 \| - \| - \|", write_report(folders, tmp_path / "out").markdown.read_text())


def test_the_formula_is_that_of_the_options(tmp_path):
    page = write_report([build_run(tmp_path, "plain", "ssmax")], tmp_path / "out").html.read_text()
    assert "softmax((s ln n) z)" in page
    page = write_report([build_run(tmp_path, "biased", {"name": "ssmax", "bias": True})], tmp_path / "out").html.read_text()
    assert "softmax((s ln n + b) z)" in page


def test_labels_tell_arms_apart(tmp_path):
    assert normalizer_label({"name": "ssmax", "scale": "none", "bias": False, "init": "match", "n": "visible"}) == "ssmax (scale=none)"
    assert normalizer_label({"name": "ssmax", "init": 1.0, "bias": True}) == "ssmax (bias=true, init=1.0)"
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


def test_too_few_documents_give_no_interval_and_are_said(tmp_path):
    folders = [build_run(tmp_path, "soft"), build_run(tmp_path, "scalable", "ssmax")]
    assert "paired by sequence, Student t over 16 documents (128 sequences)" in compared(*folders)[1][()].note
    for folder in folders:
        edit(folder, "validation", lambda result: first_sample(result).update(groups=[row // 64 for row in range(128)]))
    difference = compared(*folders)[1][()]
    assert (difference.interval, difference.note) == (None, "sequences of 2 documents: an interval takes at least 3")


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


def shown(folders: list[Path], out: Path) -> dict[str, str]:
    """Every format of a report as text: heads of columns, captions, legends."""
    files, picture = write_report(folders, out), overview(compare([read_run(folder) for folder in folders]))
    console = Console(width=200, record=True, file=io.StringIO())
    print_table(folders, console=console)
    found = {name: getattr(files, name).read_text() for name in ("html", "markdown", "csv", "latex")}
    found["latex"] = found["latex"].replace("\\\\", "")
    return found | {
        "terminal": console.export_text(),
        "footer": picture.footer,
        "legend": " ".join(picture.legend),
        "caption": picture.caption,
    }


ALONE = "over documents, 1 seed"


def test_every_format_says_that_an_interval_of_one_seed_is_over_documents(pair, tmp_path):
    for name, text in shown(pair, tmp_path / "out").items():
        assert ("1 seed" if name == "legend" else "documents, 1 seed") in re.sub(r"\s+", " ", text), name
        assert not re.search(r"\d seeds", text), name
    assert "| difference to softmax (nats/token, 95% interval over documents, 1 seed) |" in (tmp_path / "out/table.md").read_text()
    rows = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    assert {row["interval over"] for row in rows if row["low"]} == {"documents, 1 seed"}
    assert all(bool(row["interval over"]) == bool(row["low"]) for row in rows)


def test_every_format_says_over_how_many_seeds(tmp_path):
    folders = [
        build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50) for name in ("softmax", "ssmax") for seed in (1, 2, 3)
    ]
    for name, text in shown(folders, tmp_path / "out").items():
        assert "3 seeds" in re.sub(r"\s+", " ", text), name
        assert "1 seed" not in text, name
    rows = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    assert {row["interval over"] for row in rows if row["low"]} == {"3 seeds"}


def test_intervals_that_cover_unlike_things_have_columns_of_their_own(tmp_path):
    made = [("softmax", 1), ("softmax", 2), ("ssmax", 1), ("ssmax", 2), ("log_n", 1)]
    folders = [build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50) for name, seed in made]
    lines = write_report(folders, tmp_path / "out").markdown.read_text().splitlines()
    head, *_ = [line for line in lines if line.startswith("| arm")]
    assert "interval over 2 seeds" in head
    assert head.count(ALONE) == 1
    (ssmax, *_), (log_n, *_) = ([line for line in lines if line.startswith(f"| {arm} ")] for arm in ("ssmax", "log_n"))
    assert ssmax.endswith("] | - |")
    assert re.search(r"\| - \| \S+ \[.*\] \|$", log_n)


def test_nothing_is_set_in_bold(pair, tmp_path):
    texts = shown(pair, tmp_path / "out")
    assert not re.search(r"<b>|<strong|textbf|bfseries|\*\*", "".join(texts.values()))


def test_csv_is_rectangular_and_carries_units(pair, tmp_path):
    rows = list(csv.DictReader(write_report(pair, tmp_path / "out").csv.open()))
    assert not any(None in row for row in rows)
    by_label = {(row["arm"], row["inference setting"], row["quantity"]): row for row in rows}
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
        loss = content["series"][0]
        if kind == "validation":
            for one in content["series"]:
                one["means"] = [value]
            first_sample(content)["values"] = [[value]] * 128
        else:
            half = len(loss["means"]) // 2
            for row in (loss["means"], *first_sample(content)["values"]):
                row[half:] = [value] * (len(row) - half)
            loss["curve"][100:] = [value] * (len(loss["curve"]) - 100)
        path.write_text(json.dumps(plain(content)))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line | {key: value for key in line if key.endswith("loss") and line["step"] > 100} for line in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(plain(line)) for line in metrics))
    soft = build_run(tmp_path, "soft")
    for folders in ([soft, folder], [folder]):
        files = write_report(folders, tmp_path / "out")
        assert ("1000" if value == 1e3 else "not finite") in files.markdown.read_text()
        assert b"nan" not in files.csv.read_bytes()
        assert "Leaving the picture" in files.html.read_text() or value != 1e3 or len(folders) == 1


def test_one_run_has_a_report_without_differences(pair, tmp_path):
    html = write_report(pair[1:], tmp_path / "out").html.read_text()
    assert "difference" not in html.lower()
    assert "fair" not in html
    assert "ssmax: scalable" in html


def test_no_evaluation_of_the_same_sequences_twice(pair):
    assert len(compare([read_run(pair[0]), read_run(pair[0])]).arms[0].runs) == 1


def test_an_unwritable_folder_is_a_run_error(pair, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't save the report"):
        write_report(pair, tmp_path / "file" / "out")


def test_reports_import_neither_torch_nor_lightning():
    code = "import lm.report.html, sys; sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'matplotlib.pyplot')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_full_disk_leaves_the_report_that_was_there(pair, tmp_path, monkeypatch: pytest.MonkeyPatch):
    out = write_report(pair, tmp_path / "out").html.parent
    before = {path: path.read_bytes() for path in out.iterdir()}
    (pair[0] / "metrics.jsonl").unlink()  # another report
    mkstemp = tempfile.mkstemp

    def full(prefix: str = "", **given: object) -> tuple[int, str]:
        if prefix.startswith(".report.html"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return mkstemp(prefix=prefix, **given)

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(RunError, match=r"report\.html: can't save the report: No space left on device"):
        write_report(pair, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_no_two_of_forty_lines_of_a_picture_look_alike():
    lines = [colour_and_marker(number) for number in range(40)]
    assert all(a != b for a, b in combinations(lines, 2))
    arms_and_settings = [colour_and_marker(arm) | dashes_and_width(setting) for arm in range(8) for setting in range(5)]
    assert all(a != b for a, b in combinations(arms_and_settings, 2))
    assert all(dashes_and_width(number)["linestyle"] != ":" for number in range(14)), "dotted lines are reference levels"
    axes = Figure().subplots()
    for number in range(40):
        axes.plot([0, 1], [0, 1], **colour_and_marker(number) | dashes_and_width(number % 14))


@pytest.mark.parametrize("value", [None, [], {}, "word", -1.5, True])
def test_a_field_of_another_type_in_a_result_is_one_line_or_harmless(pair, value: object):
    path = next(pair[0].glob("evaluations/validation.*"))
    whole = json.loads(path.read_text())

    def places(node: object, where: tuple = ()) -> Iterator[tuple]:
        for name, item in node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ():
            yield (*where, name)
            yield from places(item, (*where, name))

    for *inner, last in places(whole):
        changed = copy.deepcopy(whole)
        node = reduce(lambda found, name: found[name], inner, changed)
        node[last] = value
        with contextlib.suppress(KeyError, ValueError):  # what readers turn into a line that names the file
            Evaluation.of(changed)
        if isinstance(node, dict) and last not in ("options", "references", UNIGRAM) and "asked" not in (*inner, last):
            del node[last]
            with pytest.raises((KeyError, ValueError)):
                Evaluation.of(changed)
