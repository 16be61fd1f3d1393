"""The page of an experiment: what it says first, what its numbers are of, and that nothing is lost. Runs are made up,
not trained.
"""

import csv
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from fabricated import write_page
from manifests import write_recorded_file
from markupsafe import escape
from reported import build_run, write_report
from scipy.stats import ttest_1samp
from trials import procedure_of

from lm.config.load import to_yaml
from lm.experiments.page import trends_over_sizes
from lm.experiments.procedure import Procedure, Run
from lm.report.comparison import REPORTING_SUFFIX
from lm.runs.folder import CONFIG_FILE, DIVERGED_KEY, METRICS_FILE, read_file

STEPS = 200
FILE = {
    "arms": {arm: {"model.normalizer": arm} for arm in ("softmax", "ssmax", "log_n")},
    "seeds": [1, 2, 3],
    "tune": {"grid": [5e-3, 1e-2, 2e-2], "seeds": [101, 102]},
    "primary": {"metric": "val/loss", "better": "lower", "matters": 0.02},
}


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures have their numbers, but nothing is drawn."""
    monkeypatch.setattr("lm.report.pictures._render", lambda *arguments: "<svg />")


def made(folder: Path, **changes: object) -> Procedure:
    """An experiment in a folder, of which no run has begun."""
    lengths = ["data.seq_len=64", "eval.long_context.length_factor=8", "optim.batch_tokens=8192"]
    return procedure_of(folder, f"trainer.max_steps={STEPS}", *lengths, **(FILE | changes))


def finish(run: Run, loss: float, **options: object) -> Path:
    """A run folder as if the run had been trained to about this loss."""
    folder = run.config.run_folder
    build_run(folder.parent, folder.name, seed=run.seed, better=3.8 - loss, steps=STEPS, **options)
    write_recorded_file(folder / CONFIG_FILE, to_yaml(run.config))
    return folder


def diverge(run: Run) -> None:
    """A run folder as if the run had stopped at values that are not finite."""
    folder = finish(run, losses(run))
    shutil.rmtree(folder / "checkpoints")
    with (folder / METRICS_FILE).open("a") as log:
        log.write(json.dumps({"step": STEPS, DIVERGED_KEY: "loss is not finite"}) + "\n")


def losses(run: Run) -> float:
    """Lower for other arms than softmax, best at the middle rate."""
    tuned = abs(np.log2(run.rate / 1e-2)) if run.rate else 0
    return 3.8 - 0.1 * (run.arm != "softmax") + 0.2 * tuned + 0.001 * run.seed


def finish_all(procedure: Procedure, loss=losses, **options: object) -> Procedure:
    """Every run that the experiment asks for, tuning first."""
    while unfinished := [
        run for run in procedure.known_runs() if not run.outcome.has_ended and not run.config.run_folder.exists()
    ]:
        for run in unfinished:
            finish(run, loss(run), **options)
    return Procedure(procedure.experiment)


def text_of(page: Path) -> str:
    """The words of a page, without pictures and markup."""
    body = re.sub(
        r"<svg.*?</svg>|<style.*?</style>|<script.*?</script>|<nav.*?</nav>", "", page.read_text(), flags=re.DOTALL
    )
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body)).replace("&#43;", "+")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_the_question_and_its_answers_come_first_and_every_table_and_picture_is_a_file_too(tmp_path):
    procedure = finish_all(made(tmp_path))
    page = write_page(procedure, tmp_path / "out")
    words = text_of(page)
    assert words.index("Do ssmax and log_n change val/loss by more than 0.02, compared with softmax?") < 100
    _, ssmax, log_n = procedure.judgement().summary_rows()
    assert ssmax["verdict"] == "better"
    for line in (ssmax, log_n):
        assert re.search(
            rf"{line['arm']} {re.escape(line['words'])} Difference to softmax {line['difference'][0]:+.4f} \[", words
        )
        assert f"[{', '.join(f'{end:+.4f}' for end in line['difference'][1:3])}]" in words
    cards = re.findall(r"<article.*?</article>", page.read_text(), re.DOTALL)
    assert [card.count("3 seeds") for card in cards] == [1, 1]
    assert words.index("Family: 2 comparisons") < words.index("Summary ") + 200 < words.index("While training")
    html = page.read_text()
    assert not re.search(r"src=|url\((?!#)|@import", html), "nothing is loaded"
    links = set(linked := re.findall(r'<a href="([^"#]+)"', html))
    assert len(linked) == len(links), "no table or picture has another's file"
    assert links == {path.name for path in page.parent.iterdir()} - {page.name}
    tables = ("summary", "seeds", "cost", "configuration", "measured-differences")
    pictures = ("curves", "rates", "differences", "measured-2-picture")
    for name, kinds in [*((name, ("csv",)) for name in tables), *((name, ("svg",)) for name in pictures)]:
        assert {f"{name}.{kind}" for kind in kinds} <= links
    assert escape(procedure.experiment.command) in html
    for run in procedure.final_runs_at_judged_rates(""):
        assert f"{run.label} (finished)" in words


def test_diverged_and_unfinished_runs_are_said_and_in_no_mean(tmp_path, undrawn):
    procedure = made(tmp_path, tune=None)
    for run in procedure.known_runs():
        if (run.arm, run.seed) != ("log_n", 3):
            diverge(run) if (run.arm, run.seed) == ("ssmax", 2) else finish(run, losses(run))
    page = write_page(Procedure(procedure.experiment), tmp_path / "out")
    words = text_of(page)
    assert "ssmax unstable" in words
    cells = {(row["seed"], row["quantity"]): row["value"] for row in rows(page.parent / "seeds.csv")}
    assert (cells["2", "ssmax"], cells["3", "log_n"]) == ("diverged", "unfinished")
    assert ("2", "ssmax - softmax") not in cells


def test_a_page_before_anything_has_ended(tmp_path, undrawn):
    words = text_of(write_page(made(tmp_path), tmp_path / "out"))
    assert "ssmax no verdict yet Rates are being tuned." in words


def sized(tmp_path: Path) -> Procedure:
    """An experiment in three sizes of 1, 4 and 8 M parameters, in which the gain of other arms than softmax shrinks
    with size.
    """
    gains = {"a": 0.1, "b": 0.07, "c": 0.02}
    procedure = made(tmp_path, tune=None, sizes={name: {"model.n_embd": 16 * n} for n, name in enumerate(gains, 1)})

    def loss(run: Run) -> float:
        return 3.8 - (gains[run.size] + 0.003 * run.seed * (run.size == "c")) * (run.arm != "softmax") + 0.01 * run.seed

    finish_all(procedure, loss)
    for run in procedure.known_runs():
        path = run.config.run_folder / "environment.json"
        environment = json.loads(path.read_text())
        environment["parameters"]["non_embedding"] = {"a": 10**6, "b": 4 * 10**6, "c": 8 * 10**6}[run.size]
        write_recorded_file(path, environment)
    return Procedure(procedure.experiment)


def test_the_trend_over_sizes_is_that_of_the_slopes_of_single_seeds(tmp_path, undrawn):
    procedure = sized(tmp_path)
    judgement = procedure.judgement()
    line, _ = trends_over_sizes(procedure, judgement)
    runs = {(size, arm): judgement.judged_values_or_inf(size, arm) for size in "abc" for arm in ("softmax", "ssmax")}
    differences = np.array([np.subtract(runs[size, "ssmax"], runs[size, "softmax"]) for size in "abc"])
    slopes = [np.polyfit([0, 2, 3], seed, 1)[0] for seed in differences.T]  # in doublings of parameters
    expected = ttest_1samp(slopes, 0).confidence_interval(0.95)
    assert line["change"] == pytest.approx([np.mean(slopes), *expected], rel=1e-9)
    assert 0.01 < line["change"][0] < 0.04
    assert (line["arm"], line["with_each_doubling_of"], line["over"]) == ("ssmax", "parameters", "3 sizes, 3 seeds")
    page = write_page(procedure, tmp_path / "out")
    assert "ssmax, a better" in text_of(page)
    assert {"a-curves.svg", "c-seeds.csv"} <= {path.name for path in page.parent.iterdir()}
    first, _ = rows(tmp_path / "out" / "trends.csv")
    assert [float(first[end]) for end in ("value", "low", "high")] == pytest.approx(line["change"], abs=1e-4)


def test_sizes_that_are_alike_or_not_trained_have_no_trend(tmp_path):
    procedure = made(tmp_path, tune=None, sizes={"a": {"model.n_embd": 16}, "b": {"model.n_embd": 64}})
    assert trends_over_sizes(procedure, procedure.judgement()) == []
    procedure = finish_all(procedure)
    assert trends_over_sizes(procedure, procedure.judgement()) == [], "the records have as many parameters and tokens"


def test_a_report_of_the_same_runs_agrees_to_the_last_digit(tmp_path, undrawn):
    arms = {name: FILE["arms"][name] for name in ("softmax", "ssmax")}
    procedure = finish_all(made(tmp_path, tune=None, arms=arms))
    with mock.patch("lm.runs.evaluations.read_file", wraps=read_file) as first:
        page = write_page(Procedure(procedure.experiment), tmp_path / "out")
    paths = [folder / name for (folder, name, _), _ in first.call_args_list]
    assert sorted(paths) == sorted(tmp_path.glob("runs/**/evaluations/*.csv")), "each file once"
    write_report([run.config.run_folder for run in procedure.final_runs_at_judged_rates("")], tmp_path / "report")

    def numbers(path: Path) -> dict[str, dict[str, str]]:
        tables = ("Summary", "Validation at the training length", "Differences to softmax")
        cells = {
            f"{row['arm']}: {row['quantity']} {row.get('metric', '')}".strip(): row
            for row in rows(path)
            if row["table"] in tables
        }
        return {name: {part: row[part] for part in ("value", "low", "high")} for name, row in cells.items()}

    report_numbers = numbers(tmp_path / "report" / "table.csv")
    assert numbers(page.parent / "measured-1.csv") | numbers(page.parent / "measured-differences.csv") == report_numbers
    verdicts = numbers(page.parent / "summary.csv")
    assert verdicts["ssmax: difference to softmax"] == report_numbers[f"ssmax: difference val/loss {REPORTING_SUFFIX}"]
    for arm in arms:
        assert (
            verdicts[f"{arm}: mean val/loss"]["value"] == report_numbers[f"{arm}: val/loss {REPORTING_SUFFIX}"]["value"]
        )
