"""The files of a report: the same numbers in every format, what intervals cover, the page, and the lines of
pictures.
"""

import base64
import csv
import errno
import hashlib
import io
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from conftest import thinned
from fabricated import save
from reported import build_run, edit, pictures, plain, write_report
from rich.console import Console

from lm import files as lm_files
from lm.errors import RunError
from lm.report.comparison import compare_runs
from lm.report.comparison_tables import comparison_notes, comparison_tables
from lm.report.pictures import Panel, Picture, Trace
from lm.report.tables import print_tables
from lm.runs.record import read_run


def numbers(text: str) -> set[str]:
    return set(re.findall(r"[-+]?\d+\.\d{4}", text))


def test_all_formats_have_the_same_numbers(pair, tmp_path):
    files = write_report(pair, tmp_path / "out")
    markdown = files.markdown.read_text().split("- validation")[0]
    results = re.search(r"<h2>Measured at the end.*?<h2>", files.html.read_text(), re.DOTALL)[0].replace("&#43;", "+")
    html = "".join(re.findall(r"<table.*?</table>", results, re.DOTALL))
    assert numbers(markdown) == numbers(files.csv.read_text()) == numbers(files.latex.read_text()) == numbers(html)
    assert len(numbers(markdown)) > 20
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_tables(*comparison_tables(compare_runs([read_run(folder) for folder in pair])), console=console)
    assert numbers(markdown) <= numbers(console.export_text())


def shown(folders: list[Path], out: Path) -> dict[str, str]:
    """Every format of a report as text: heads of columns, captions, legends."""
    comparison = compare_runs([read_run(folder) for folder in folders])
    files = write_report(folders, out)
    captions = " ".join(picture.caption for picture in pictures(comparison))
    console = Console(width=200, record=True, file=io.StringIO())
    print_tables(*comparison_tables(comparison), notes=comparison_notes(comparison), console=console)
    texts = {name: getattr(files, name).read_text() for name in ("html", "markdown", "csv", "latex")}
    texts["latex"] = texts["latex"].replace("\\\\", "")
    return texts | {"terminal": console.export_text(), "caption": captions}


def test_every_format_says_that_an_interval_of_one_seed_is_over_documents(pair, tmp_path):
    for name, text in shown(pair, tmp_path / "out").items():
        assert "documents, 1 seed" in re.sub(r"\s+", " ", text), name
        assert not re.search(r"\d seeds", text), name
    assert "One seed: intervals cover the choice of text alone." in (tmp_path / "out/report.html").read_text()
    assert "| difference (95% interval over documents, 1 seed, alone) |" in (tmp_path / "out/table.md").read_text()
    rows = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    assert {row["interval over"] for row in rows if row["low"]} == {"documents, 1 seed"}
    assert all(bool(row["interval over"]) == bool(row["low"]) for row in rows)


def test_every_format_says_over_how_many_seeds(tmp_path):
    folders = [
        build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50)
        for name in ("softmax", "ssmax")
        for seed in (1, 2, 3)
    ]
    for name, text in shown(folders, tmp_path / "out").items():
        assert "3 seeds" in re.sub(r"\s+", " ", text), name
        assert "1 seed" not in text, name
    rows = list(csv.DictReader((tmp_path / "out/table.csv").open()))
    assert {row["interval over"] for row in rows if row["low"]} == {"3 seeds"}


def test_intervals_that_cover_unlike_things_have_columns_of_their_own(tmp_path):
    arms = [("softmax", 1), ("softmax", 2), ("ssmax", 1), ("ssmax", 2), ("log_n", 1)]
    folders = [build_run(tmp_path, f"{name}{seed}", name, seed=seed, better=seed / 50) for name, seed in arms]
    lines = write_report(folders, tmp_path / "out").markdown.read_text().splitlines()
    seeds, documents = (f"difference (95% interval over {words}, alone)" for words in ("2 seeds", "documents, 1 seed"))
    start = lines.index(f"| arm | metric | measured in | better | {seeds} | {documents} |")
    (ssmax, *_), (log_n, *_) = (
        [line for line in lines[start:] if line.startswith(f"| {arm} ")] for arm in ("ssmax", "log_n")
    )
    assert ssmax.endswith("] | - |")
    assert re.search(r"\| - \| \S+ \[.*\] \|$", log_n)


def test_csv_is_rectangular_and_carries_units(pair, tmp_path):
    rows = list(csv.DictReader(write_report(pair, tmp_path / "out").csv.open()))
    assert not any(None in row for row in rows)
    by_label = {(row["arm"], row["inference setting"] or row["metric"], row["quantity"]): row for row in rows}
    assert len(by_label) == len(rows)
    difference = by_label["ssmax", "loss of reporting documents at positions 256-512, as trained", "difference"]
    assert float(difference["low"]) < float(difference["value"]) < float(difference["high"]) < -0.04
    assert (difference["measured in"], difference["better"]) == ("nats/token", "below zero")
    assert by_label["softmax", "theta x 50", "loss of reporting documents 4x-8x"]["unit"] == "nats/token"


@pytest.mark.usefixtures("painted")
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
    assert "<script>alert(1)\\&\\$\\textbackslash frac\\{" in files.latex.read_text()


def test_the_same_runs_give_the_same_bytes(pair, tmp_path):
    first, second = (write_report(pair, tmp_path / name) for name in ("one", "two"))
    for name, path in first._asdict().items():
        assert path.read_bytes() == getattr(second, name).read_bytes(), name


def exploding(root: Path, value: float) -> list[list[Path]]:
    """A run whose losses become `value`, beside another one and alone."""
    folder = build_run(root, "exploding", "ssmax")
    for kind in ("validation", "long_context"):
        edit(folder, kind, lambda rows: rows.assign(value=rows["value"].where(rows["x"] < 100, value)))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line | {key: value for key in line if key.endswith("loss") and line["step"] > 100} for line in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(plain(line)) for line in metrics))
    save(folder, 200)
    return [[build_run(root, "soft"), folder], [folder]]


@pytest.mark.parametrize("value", thinned([1e3, np.nan, np.inf], [1e3]))
def test_an_exploding_loss_breaks_nothing(tmp_path, value):
    for folders in exploding(tmp_path, value):
        files = write_report(folders, tmp_path / "out")
        assert ("1000" if value == 1e3 else "not finite") in files.markdown.read_text()
        assert b"nan" not in files.csv.read_bytes()
        assert "is not shown" in files.html.read_text() or value != 1e3


@pytest.mark.usefixtures("painted")
def test_a_picture_of_an_infinite_loss_can_be_painted(tmp_path):
    for folders in exploding(tmp_path, np.inf):
        picture = pictures(compare_runs([read_run(folder) for folder in folders]))[0]
        assert "<!-- Training loss (train/loss) -->" in picture.svg


def test_one_run_has_a_report_without_differences(pair, tmp_path):
    html = write_report(pair[1:], tmp_path / "out").html.read_text()
    assert "difference" not in html.lower()
    assert "fair" not in html
    assert "ssmax: scalable" in html


def test_the_page_begins_with_what_was_trained_and_on_which_text_numbers_are(pair, tmp_path):
    head = write_report(pair, tmp_path / "out").html.read_text().partition("<h2>")[0]
    words = "Trained: 10.82 million parameters, on 1.638 million tokens in 200 steps of 8,192, in sequences of 64. "
    assert f"{words}Data: sotu, 1,900,000 training tokens, 200 documents." in head
    assert "the selection text, chooses learning rates" in head
    assert "the report text" in head


def test_no_evaluation_of_the_same_sequences_twice(pair):
    assert len(compare_runs([read_run(pair[0]), read_run(pair[0])]).runs) == 1


def test_an_unwritable_folder_is_a_run_error(pair, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't save the report"):
        write_report(pair, tmp_path / "file" / "out")


def test_a_full_disk_leaves_the_report_that_was_there(pair, tmp_path, monkeypatch: pytest.MonkeyPatch):
    out = write_report(pair, tmp_path / "out").html.parent
    before = {path: path.read_bytes() for path in out.iterdir()}
    (pair[0] / "metrics.jsonl").unlink()  # another report
    temporary_file = lm_files.temporary_file

    def full(path: Path) -> AbstractContextManager:
        if path.name == "report.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        return temporary_file(path)

    monkeypatch.setattr(lm_files, "temporary_file", full)
    with pytest.raises(RunError, match=r"report\.html: can't save the report: No space left on device"):
        write_report(pair, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.usefixtures("painted")
def test_a_picture_has_the_same_bytes_in_each_format_whenever_it_is_drawn():
    picture, same_picture = (
        Picture([Panel("title", "x", "y", [Trace(0, "a", np.ones(1), np.ones(1), "dots")])], ["a"]) for _ in range(2)
    )
    assert picture.png.startswith(b"\x89PNG")
    assert "<svg" in picture.svg
    assert "title,a,dots,1,1" in picture.csv
    assert (picture.svg, picture.png) == (same_picture.svg, same_picture.png), "the same bytes whenever it is drawn"
