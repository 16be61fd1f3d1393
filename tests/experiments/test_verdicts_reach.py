"""Tokens at which runs first reach a value of the primary metric, compared as ratios."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT
from fabricated import FINGERPRINT, evaluated, finish, validate, validation
from manifests import put

from lm.errors import ConfigError
from lm.experiments.compare import plan_lines
from lm.experiments.experiment_file import read_experiment
from lm.experiments.loop import Slots
from lm.experiments.page import (
    SizeResults,
    _caveats,
    answers,
    differences_picture,
    question,
    rates_picture,
    seeds_table,
)
from lm.experiments.procedure import Procedure, Run
from lm.experiments.summary import summary_entries, summary_table, tuning_table_rows
from lm.report.tables import csv_text
from lm.runs.evaluations import VALIDATION_METRICS, selection_mask
from lm.runs.folder import ENVIRONMENT
from lm.statistics.intervals import over_seeds
from lm.statistics.tokens import tokens_to_reach
from lm.statistics.verdicts import power, smallest_difference

LEVEL = 4.6
STEPS = (1, 2, 4, 8)  # of the evaluations
TOKENS = 256  # in a step


@pytest.mark.parametrize(
    ("values", "better", "tokens"),
    [
        ([6.0, 5.0, 4.0, 3.0], "lower", 200 * 2**0.4),
        ([6.0, 4.6, 5.0, 3.0], "lower", 200.0),
        ([6.0, math.nan, 4.0, 3.0], "lower", 100 * 4**0.7),
        ([6.0, 5.5, 5.0, 4.7], "lower", math.inf),
        ([4.6, 4.0, 3.0, 2.0], "lower", 0.0),
        ([1.0, 4.0, 5.0, 3.0], "higher", 200 * 2**0.6),
    ],
)
def test_tokens_are_interpolated_in_their_logarithm_before_the_first_evaluation_that_reaches_the_level(
    values, better, tokens
):
    assert tokens_to_reach([100, 200, 400, 800], values, LEVEL, better) == pytest.approx(tokens)


# ---------------------------------------------------------------- in experiments


def experiment(folder: Path, *overrides: str, **changes: object) -> Procedure:
    path = folder / "trial.yaml"
    arms = {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}}
    file = {"base": str(ROOT / "tests" / "tiny.yaml"), "arms": arms, "primary": {"reach": LEVEL, "matters": 0.1}}
    path.write_text(yaml.safe_dump(file | changes, sort_keys=False))
    return Procedure(read_experiment(path, ["data.source.paths=[.]", f"runs={folder / 'runs'}", *overrides]))


def trained(run: Run, tokens: float) -> None:
    """A run whose loss falls linearly in log tokens, and is LEVEL at `tokens`."""
    for step in STEPS:
        loss = LEVEL - 0.2 * math.log(step * TOKENS / tokens)
        finish(run, loss) if step == run.outcome.last_step else validate(run, step, loss)


def reached(run: Run) -> float:
    """SSMax takes about 0.7 of the tokens."""
    return 1000.0 + 10 * run.seed if run.arm == "softmax" else 700.0 * (1 + 0.013 * run.seed)


def test_the_verdict_is_on_the_ratio_of_tokens_paired_by_seed(tmp_path):
    procedure = experiment(tmp_path)
    for run in procedure.known_runs():
        trained(run, reached(run))
    soft, scalable = summary_entries(procedure)
    logs = np.log([0.7 * (1 + 0.013 * seed) / (1 + 0.01 * seed) for seed in (1, 2, 3)])
    expected = np.exp(over_seeds(logs).interval().as_list())
    assert scalable["verdict"] == "better"
    assert scalable["factor"] == pytest.approx(expected, abs=1e-4)
    assert soft["mean"] == pytest.approx(np.exp(np.log([1010, 1020, 1030]).mean()), rel=1e-4)
    assert (soft["reached"], "difference" in scalable, scalable["over_seeds_and_documents"]) == (3, False, None)
    sizes = [SizeResults(procedure, "", procedure.judgement())]
    (answer,) = answers(sizes)
    assert (answer.effect, answer.value, answer.ends) == ("Factor: tokens, of those of softmax", "0.70", "[0.70, 0.71]")
    assert (answer.noise_source, answer.verdict[-9:]) == ("", "(3 seeds)"), "said once"
    mean, low, high, zero, least, most = answer.drawn_positions
    assert low < mean < high < least < zero < most
    assert answer.reason.startswith("The interval leaves out 1")
    assert question(procedure.experiment) == (
        "Does ssmax take fewer or more tokens to reach val/loss 4.6 than softmax, by more than a factor of 1.1?"
    )
    headings = [column.name for column in summary_table(sizes[0].judgement, [soft, scalable]).columns]
    assert headings[3:6] == ["geometric mean, tokens to val/loss 4.6", "have reached it", "factor to softmax"]
    cells = [[cell for _, cell in row] for row in seeds_table(sizes[0]).rows]
    assert cells[0] == ["1", "1,010", "709", "0.702"]


def test_a_run_that_never_reaches_the_value_is_counted_and_said(tmp_path):
    procedure = experiment(tmp_path, seeds=[1, 2, 3, 4, 5])
    for run in procedure.known_runs():
        trained(
            run,
            10_000
            if run.arm == "ssmax" and run.seed > 3
            else 100
            if run.arm == "softmax" and run.seed == 1
            else reached(run),
        )
    soft, scalable = summary_entries(procedure)
    expected = (
        "2 of 5 runs of ssmax did not reach val/loss 4.6; 1 of 5 runs of softmax had reached 4.6 at the first "
        "evaluation"
    )
    assert (scalable["verdict"], scalable["reason"]) == ("not reached", expected)
    assert (scalable["factor"], scalable["reached"], scalable["mean"], soft["mean"]) == (None, 3, None, None)
    cells = [[cell for _, cell in row] for row in seeds_table(SizeResults(procedure, "", procedure.judgement())).rows]
    assert cells[0][1:] == ["at the first evaluation", "709", None]
    assert cells[4][2:] == ["not reached", None]


def test_evaluations_on_other_sequences_than_the_last_are_left_out(tmp_path, monkeypatch):
    procedure = experiment(tmp_path)
    run = procedure.known_runs()[0]
    trained(run, 1000.0)
    monkeypatch.setattr("fabricated.DOCUMENTS", 25)
    monkeypatch.setattr("fabricated.FINGERPRINT", "another")
    validate(run, 2, 4.0)
    assert procedure.known_runs()[0].outcome.tokens_to_reach(LEVEL, "lower", selection=False) == pytest.approx(
        1000, rel=1e-3
    )


def test_tokens_are_counted_on_the_documents_that_report_or_select_and_since_the_branch(tmp_path):
    procedure = experiment(tmp_path)
    run = procedure.known_runs()[0]
    trained(run, 1000.0)
    crossings = np.where(selection_mask(FINGERPRINT, np.arange(40)), 500.0, 1000.0)  # tokens by document
    for step in STEPS:
        values = LEVEL - 0.2 * np.log(step * TOKENS / crossings)
        evaluated(run, "validation", step, validation(values, 32))

    def tokens() -> list[float]:
        outcome = replace(run.outcome)
        return [outcome.tokens_to_reach(LEVEL, "lower", selection) for selection in (False, True)]

    assert tokens() == pytest.approx([1000, 500], rel=1e-3)
    put(run.config.run_folder / ENVIRONMENT, {"branched_from": {"tokens": TOKENS}})
    part = math.log2(1000 / 512)  # between 512 - 256 and 1,024 - 256 tokens
    assert tokens()[0] == pytest.approx(256 * 3**part, rel=1e-3)


def test_a_metric_of_no_better_direction_reaches_a_value_in_that_of_the_experiment(tmp_path, monkeypatch):
    procedure = experiment(tmp_path)
    monkeypatch.setattr(
        "lm.runs.evaluations.VALIDATION_METRICS", tuple(replace(metric, better="none") for metric in VALIDATION_METRICS)
    )
    for run in procedure.known_runs():
        trained(run, reached(run))
    assert procedure.judgement().verdicts["", "ssmax"].kind == "better"
    upwards = Procedure(replace(procedure.experiment, primary=replace(procedure.experiment.primary, better="higher")))
    assert "had reached 4.6 at the first evaluation" in upwards.judgement().verdicts["", "ssmax"].reason


def test_other_rates_are_shown_by_tokens_on_the_selection_text(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.report.pictures._render", lambda *arguments: "<svg />")
    tune = {"grid": [1e-3, 2e-3, 4e-3], "seeds": [101, 102]}
    procedure = experiment(tmp_path, tune=tune)
    by_rate = {1e-3: (900, 1400), 2e-3: (700, 600), 4e-3: (900, 1400)}  # softmax, ssmax
    while unfinished := [run for run in procedure.known_runs() if not run.outcome.ended]:
        for run in unfinished:
            trained(run, by_rate[run.rate][run.arm == "ssmax"] * (1 + 0.01 * (run.seed % 3) * (run.arm == "ssmax")))
    _, scalable = summary_entries(procedure)
    assert scalable["factors_by_rate"]["0.001"] > 1 > scalable["factors_by_rate"]["0.002"]
    results = SizeResults(procedure, "", procedure.judgement())
    at_end, at_rates = (
        [line for line in csv.DictReader(picture.csv.splitlines()) if line["of"].startswith("ssmax")]
        for picture in (differences_picture([results]), rates_picture(results))
    )
    labels = {(panel.x_label, panel.y_label.partition(",")[0]) for panel in rates_picture(results).panels}
    words = ("validation loss (nats per token)", "relative difference of tokens until loss 4.6")
    assert labels == {("learning rate (optim.lr)", label) for label in words}
    (bar,) = (line for line in at_end if line["kind"] == "interval")
    assert float(bar["y"]) == pytest.approx(scalable["factor"][0] - 1, abs=1e-3)
    ratios = {float(line["x"]): float(line["y"]) for line in at_rates if line["of"] == "ssmax - softmax, mean"}
    assert ratios == pytest.approx(
        {float(rate): factor - 1 for rate, factor in scalable["factors_by_rate"].items()}, abs=1e-3
    )
    table = tmp_path / "rates.csv"
    table.write_text(csv_text(tuning_table_rows(procedure)))
    assert "tokens to val/loss 4.6" in next(csv.reader(table.open()))
    by_table = experiment(tmp_path, tune={"table": "rates.csv"})
    assert summary_entries(by_table) == summary_entries(procedure)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"primary": {"reach": 4.6, "metric": "long/loss as trained"}},
            "primary.reach = 4.6: long/loss as trained is measured once, at the last step",
        ),
        (
            {"base": {"base": str(ROOT / "tests" / "tiny.yaml"), "eval.every": 1000000}},
            "primary.reach = 4.6: val/loss is measured once, at the last step; measure it on the way: eval.every",
        ),
    ],
)
def test_what_can_t_be_reached_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, **changes)


def test_the_plan_counts_seeds_for_a_factor(tmp_path):
    lines = [*plan_lines(experiment(tmp_path, primary={"reach": LEVEL, "matters": 0.1, "spread": 0.05}), Slots(1))]
    (seeds,) = (
        line for line in lines if "seeds to find a factor of 1.1 in tokens to val/loss 4.6 with probability" in line
    )
    assert "if it is 0.0477, " in seeds, "half of ln 1.1"
    (line,) = (line for line in lines if line.startswith("power: "))
    assert f"3 seeds find a factor of 1.1 with probability {power(3, 0.05, math.log(1.1)):.2f}, by" in line
    assert line.endswith(f"they find a factor of {math.exp(smallest_difference(3, 0.05)):.3g}")


def test_a_tuning_run_that_did_not_reach_the_value_did_not_diverge(tmp_path):
    tune = {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102], "metric": "primary"}
    procedure = experiment(tmp_path, tune=tune)
    for run in procedure.known_runs():
        trained(run, 1000.0 if run.rate == 2e-2 else 1e6)
    table = tuning_table_rows(procedure)
    assert {line["tokens to val/loss 4.6"] for line in table if line["rate"] != 2e-2} == {"not reached"}
    lines = _caveats(procedure, [SizeResults(procedure, "", procedure.judgement())])
    runs = ", ".join(
        f"{arm} at {rate} seed {seed}" for arm in ("softmax", "ssmax") for rate in (0.01, 0.04) for seed in (101, 102)
    )
    assert f"tuning runs that did not reach val/loss 4.6: {' and '.join(runs.rsplit(', ', 1))}" in lines
    assert not any("diverged" in line for line in lines)
    (tmp_path / "rates.csv").write_text(csv_text(table))
    by_table = experiment(tmp_path, tune={"table": "rates.csv", "metric": "primary"})
    assert by_table.tuning_runs("") == procedure.tuning_runs("")
