"""What the runs of an experiment are judged on: seeds planned and added, documents, other rates, runs that learned
nothing.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from fabricated import (
    FINGERPRINT,
    finish_all_runs,
    finish_run,
    trainer_that_calls,
    validation_frame,
    write_frame,
    write_page,
    write_training_losses,
)
from manifests import write_recorded_file
from trials import procedure_of

from lm.config.load import to_yaml
from lm.evaluation.answers import Recall, rows_by_length
from lm.evaluation.measurement import sampling_unit_frame
from lm.experiments.compare import plan_lines
from lm.experiments.procedure import Procedure, Run
from lm.report.frame import results
from lm.runs.evaluations import model_selection_mask
from lm.runs.folder import CONFIG_FILE, ENVIRONMENT_FILE
from lm.statistics.intervals import estimate_over_seeds_and_documents
from lm.statistics.verdicts import power, smallest_difference


def loss(run: Run) -> float:
    """SSMax is better by 0.1 at any rate."""
    return 5 - 0.1 * (run.arm == "ssmax") + 1e-3 * run.seed * (run.arm == "ssmax")


def experiment(folder: Path, **changes: object) -> Procedure:
    """The untuned experiment of softmax and SSMax with the default seeds and margin, or a changed one."""
    return procedure_of(folder, **({"tune": None, "seeds": None, "primary": None} | changes))


def recall(value: float, *levels: tuple[str, float]) -> dict[str, pd.DataFrame]:
    """Accuracy in sequences of 16 and of 64 tokens, half of and twice the training length."""
    samples = [
        (np.full((4, 1), value), sampling_unit_frame(f"of {length}", np.arange(4), np.full(4, 8)))
        for length in (16, 64)
    ]
    about = replace(Recall.logged_metrics[0], title="", references=levels)
    return {"recall": rows_by_length(about, [16, 64], samples, task="needle")}


OF_RECALL = {"metric": "recall/needle 64", "better": "higher", "matters": 0.1}
ACCURACIES = {"softmax": {1e-2: 0.2, 2e-2: 0.5, 4e-2: 0.1}, "ssmax": {}}


def test_the_primary_metric_may_choose_the_rates_and_solved_everywhere_is_no_edge(tmp_path, capsys):
    tune = {"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102], "metric": "primary"}
    recalled = {"tasks": ["needle"], "length_factors": [0.5, 2], "sequences": 4}
    base = {"base": str(ROOT / "tests" / "tiny.yaml"), "eval.recall": recalled}
    procedure = experiment(tmp_path, base=base, seeds=[1, 2], primary=OF_RECALL, tune=tune)
    trainer_that_calls(
        procedure, lambda run: finish_run(run, 5.0 - run.rate, recall(ACCURACIES[run.arm].get(run.rate, 1.0))) or 0
    ).train_all()
    out = capsys.readouterr().out
    assert "tune: softmax at 0.02 seed 101: recall/needle 64 (all questions) 0.5000, " in out, (
        "what chooses is said as a run ends"
    )
    assert "final: ssmax at 0.02 seed 1: recall/needle 64 (all questions) 1.0000, " in out
    assert procedure.rate_choice("").judged_rates == {"softmax": 2e-2, "ssmax": 2e-2}, (
        "by the loss both would be at the edge"
    )
    tuning_runs = procedure.tuning_runs("")
    means = tuning_runs.groupby(["arm", "rate"], sort=False)[OF_RECALL["metric"]].mean()
    assert [*means] == [0.2, 0.5, 0.1, 1.0, 1.0, 1.0]
    assert not procedure.judgement().question.must_hold_at_all_rates
    (folder := tmp_path / "by-loss").mkdir()
    by_loss = experiment(
        folder, base=base, seeds=[1, 2], primary=OF_RECALL, tune={"grid": tune["grid"], "seeds": tune["seeds"]}
    )
    assert by_loss.judgement().question.must_hold_at_all_rates, (
        "where the loss chooses the rates, every pair of rates must show a difference in recall"
    )


def test_means_are_over_the_seeds_that_all_arms_have_finished(tmp_path):
    procedure = experiment(tmp_path)
    for run in procedure.known_runs():
        if (run.arm, run.seed) != ("ssmax", 3):
            finish_run(run, {1: 5.0, 2: 6.0, 3: 8.0}[run.seed] - 0.1 * (run.arm == "ssmax"))
    soft, scalable = procedure.judgement().summary_rows()
    assert (soft["mean"], scalable["mean"]) == pytest.approx((5.5, 5.4))
    assert (soft["runs"], scalable["runs"]) == (3, 2)


def test_the_second_interval_is_over_the_documents_that_report(tmp_path):
    random, procedure = np.random.default_rng(0), experiment(tmp_path)
    by_run = {}
    for run in procedure.known_runs():
        finish_run(run, 5.0)
        values = by_run[run.arm, run.seed] = 5 + random.normal(0, 0.1, 40)
        write_frame(run, "validation", run.outcome.last_step, validation_frame(values))
    report = np.flatnonzero(~model_selection_mask(FINGERPRINT, np.arange(40))).tolist()
    differences = np.stack([(by_run["ssmax", seed] - by_run["softmax", seed])[report] for seed in (1, 2, 3)])
    expected = estimate_over_seeds_and_documents(differences, np.ones(len(report)), np.array(report)).interval()
    assert procedure.judgement().summary_rows()[1]["over_seeds_and_documents"] == pytest.approx(
        expected.as_list(), abs=1e-5
    )
    assert expected.noise_source == f"3 seeds and {len(report)} documents"


@pytest.mark.parametrize("by", [{}, {"metric": "primary"}])
def test_rates_are_chosen_on_the_documents_that_select_and_judged_on_those_that_report(tmp_path, by):
    selects_document = model_selection_mask(FINGERPRINT, np.arange(40))
    optima = {True: 2e-3, False: 4e-3}  # by whether a document selects
    procedure = experiment(tmp_path, tune={"grid": [1e-3, 2e-3, 4e-3, 8e-3], "seeds": [101, 102], **by})
    while unfinished := [run for run in procedure.known_runs() if not run.outcome.has_ended]:
        for run in unfinished:
            finish_run(run, 5.0)
            by_part = {
                part: 5 + abs(math.log2(run.rate / best)) - (run.arm == "ssmax") * (0.1 + part)
                for part, best in optima.items()
            }
            values = np.array([by_part[bool(part)] for part in selects_document])
            write_frame(run, "validation", run.outcome.last_step, validation_frame(values))
    assert procedure.rate_choice("").judged_rates == {"softmax": 2e-3, "ssmax": 2e-3}
    tuning = procedure.tuning_runs("").query("arm == 'softmax'").groupby("rate")["val/loss"].mean().to_dict()
    assert tuning == pytest.approx({1e-3: 6, 2e-3: 5, 4e-3: 6, 8e-3: 7})
    softmax, ssmax = procedure.judgement().summary_rows()
    assert (softmax["mean"], ssmax["mean"], ssmax["difference"][0]) == pytest.approx((6.0, 5.9, -0.1))


ABOVE = "final loss above the unigram cross-entropy (6.2500 > 6.0000)"


def unlike(folder: Path, *training_losses: float, final: float = 6.25) -> tuple[Procedure, dict]:
    """SSMax's runs log these training losses and end above the unigram cross-entropy, softmax's end below it; and what
    is said of SSMax.
    """
    procedure = experiment(folder)
    for run in procedure.known_runs():
        finish_run(run, 5.0 + 1e-3 * run.seed if run.arm == "softmax" else final, unigram=6.0)
        write_training_losses(run, *(training_losses if run.arm == "ssmax" else (9.0, 5.0)))
    return procedure, procedure.judgement().summary_rows()[1]


@pytest.mark.parametrize("training_losses", [(), (10.8, 6.3), (10.8, float("nan"), 6.3)])
def test_runs_that_learned_nothing_have_a_value_and_a_note(tmp_path, training_losses):
    procedure, line = unlike(tmp_path, *training_losses)
    assert {run.outcome.state for run in procedure.known_runs()} == {"finished"}
    assert (line["verdict"], line["runs"], line["mean"]) == ("worse", 3, 6.25)
    assert f"; did not learn: ssmax seed 1: {ABOVE}; ssmax seed 2: " in line["reason"]


@pytest.mark.parametrize(
    ("training_losses", "final", "how"),
    [
        ((10.8, 4.0, 7.5), 6.25, f"{ABOVE}, training loss rose from 4.0000 to 7.5000"),
        ((6.0, 4.0, 6.1, float("nan")), 6.25, f"{ABOVE}, training loss rose from 4.0000 to 6.1000"),
        ((10.8, 4.0), math.inf, "final val/loss is not finite"),
    ],
)
def test_runs_whose_loss_rose_or_is_not_finite_have_diverged(tmp_path, training_losses, final, how):
    procedure, line = unlike(tmp_path, *training_losses, final=final)
    assert [run.outcome.state for run in procedure.known_runs()] == ["finished", "diverged"] * 3
    assert (line["verdict"], line["runs"]) == ("unstable", 0)
    assert line["reason"].startswith(f"3 final runs diverged: ssmax seed 1: {how}"), line["reason"]
    assert "did not learn" not in line["reason"]
    for run in procedure.known_runs():
        write_recorded_file(run.config.run_folder / CONFIG_FILE, to_yaml(run.config))
        write_recorded_file(run.config.run_folder / ENVIRONMENT_FILE, {"starts": [{"step": 0}]})
    states = results(procedure.experiment.folder).groupby("arm")["state"].unique().map(list).to_dict()
    assert states == {"softmax": ["finished"], "ssmax": ["diverged"]}, "in the long table, which lm judge takes, too"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [((6.25, 6.5), "not learned"), ((6.0, 6.0), "not learned"), ((5.9, 6.5), "worse"), ((6.5, 5.9), "better")],
)
def test_without_a_run_below_the_unigram_cross_entropy_nothing_is_compared(tmp_path, losses, verdict):
    procedure = experiment(tmp_path)
    for run in procedure.known_runs():
        finish_run(run, losses[run.arm == "ssmax"] + 1e-3 * run.seed * (run.arm == "ssmax"), unigram=6.0)
    line = procedure.judgement().summary_rows()[1]
    assert line["verdict"] == verdict
    if verdict == "not learned":
        reason = "no run of either arm is better than the unigram cross-entropy (6)"
        assert line["words"] == f"not learned: {reason}"
        assert line["p"] is None
        page = write_page(procedure, tmp_path / "page").read_text()
        assert f"not learned: {reason}" in page


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ((0.003, 0.003), "not learned"),
        ((0.25, 0.28), "not learned"),
        ((0.25, 1.0), "undecided"),
    ],
)
def test_accuracies_at_chance_are_not_compared(tmp_path, accuracies, verdict):
    """By the chance that the evaluation declares, and Wilson's interval of as many trials as questions are worth."""
    recalled = {"tasks": ["needle"], "length_factors": [0.5, 2], "sequences": 4}
    base = {"base": str(ROOT / "tests" / "tiny.yaml"), "eval.recall": recalled}
    procedure = experiment(tmp_path, base=base, primary=OF_RECALL)
    for run in procedure.known_runs():
        finish_run(run, 5.0, recall(accuracies[run.arm == "ssmax"], ("chance", 0.25)))
    line = procedure.judgement().summary_rows()[1]
    assert line["verdict"] == verdict
    assert (verdict == "not learned") == ("is better than chance (0.25)" in line["words"])


GRID = {"grid": [1e-3, 2e-3, 4e-3, 8e-3], "seeds": [101, 102]}


def misled(run: Run) -> float:
    """Arms are equal, best at 4e-3; softmax's tuning runs were unlucky there."""
    unlucky = run.stage == "tune" and run.arm == "softmax" and run.rate == 4e-3
    return 5 + 10 * abs(run.rate - 4e-3) + 0.1 * unlucky + 1e-4 * run.seed * (run.arm == "ssmax")


def test_where_tuning_chose_different_rates_both_arms_are_trained_at_both(tmp_path):
    procedure = finish_all_runs(experiment(tmp_path, tune=GRID, seeds=[1, 2, 3, 4, 5]), misled)
    choice = procedure.rate_choice("")
    assert choice.rates_of_final_runs == {"softmax": (2e-3, 4e-3), "ssmax": (4e-3, 2e-3)}
    assert choice.judged_rates == {"softmax": 4e-3, "ssmax": 4e-3}, "by the final seeds, on the selection text"
    final = [run for run in procedure.known_runs() if run.stage == "final"]
    assert len(final) == len({run.config.run_folder for run in final}) == 4 * 5
    assert all(run.outcome.state == "finished" for run in final)
    line = procedure.judgement().summary_rows()[1]
    assert line["difference"][0] == pytest.approx(3e-4, abs=1e-5)
    assert line["difference"][2] < 1e-3, "the tuned rates alone: better by 0.02"
    assert line["verdict"] == "difference below margin"
    expected = "final seeds are trained at 0.002 and 0.004, as tuning chose different rates for the arms"
    assert any(note.endswith(expected) and "softmax" in note for note in procedure.notes())


def test_a_run_that_diverges_at_a_rate_neither_chosen_nor_judged_is_left_out(tmp_path):
    def found(lost_run: tuple[str, float]) -> dict:
        def loss(run: Run) -> float:
            return (
                math.inf
                if (run.arm, run.rate, run.seed) == (*lost_run, 1)
                else misled(run) - 0.1 * (run.arm == "ssmax")
            )

        return (
            finish_all_runs(experiment(tmp_path / f"{lost_run[0]}-{lost_run[1]:g}", tune=GRID), loss)
            .judgement()
            .summary_rows()[1]
        )

    for name in ("ssmax-0.002", "softmax-0.002", "ssmax-0.004"):
        (tmp_path / name).mkdir()
    assert found(("ssmax", 2e-3))["verdict"] != "unstable", "a rate that tuning did not choose for it"
    assert found(("softmax", 2e-3))["verdict"] == "unstable", "the rate that tuning chose for it"
    assert found(("ssmax", 4e-3))["verdict"] == "unstable"


def test_while_runs_at_the_others_rate_are_missing_nothing_is_claimed(tmp_path):
    procedure = experiment(tmp_path, tune=GRID)
    for run in procedure.known_runs():
        finish_run(run, misled(run))
    reopened = Procedure(procedure.experiment)
    for run in reopened.known_runs():
        if run.stage == "final" and (run.arm, run.rate) != ("softmax", 4e-3):
            finish_run(run, misled(run))
    line = Procedure(procedure.experiment).judgement().summary_rows()[1]
    assert (line["verdict"], line["reason"]) == ("incomplete", "0 of 3 seeds have ended")
    assert Procedure(procedure.experiment).judgement().summary_rows()[0]["rate"] == 2e-3, (
        "the tuned one, until all have ended"
    )


def test_a_plan_says_the_power_for_its_own_margin_and_says_loudly_if_it_is_low(tmp_path):
    def said(procedure: Procedure) -> list[str]:
        return [line for line in plan_lines(procedure, [()]) if line.lower().startswith(("power", "low power"))]

    primary = {"metric": "val/loss", "matters": 0.02}
    assert said(experiment(tmp_path, primary=primary)) == [
        "power: not known before seeds have ended, as the file expects no primary.spread"
    ]
    (high,) = said(experiment(tmp_path, primary=primary | {"spread": 0.005}))
    assert (
        high
        == f"power: 3 seeds find a difference of 0.02 with probability {power(3, 0.005, 0.02):.2f}, by a spread of "
        f"0.005 (primary.spread); with probability 0.8 they find {smallest_difference(3, 0.005):.2g}"
    )
    _, low = said(experiment(tmp_path, primary=primary | {"spread": 0.05}))
    assert low.startswith(
        "LOW POWER: the experiment will more likely than not leave such a difference undecided; probability 0.8 takes "
        "52 seeds"
    )
    of_two = [*plan_lines(experiment(tmp_path, primary=primary | {"spread": 0.05}, seeds=[1, 2]), [()])]
    assert "NO VERDICT: a verdict takes 3 seeds, not 2: add seeds" in of_two
    noise = {("softmax", seed): 0.0 for seed in (1, 2, 3)} | {
        ("ssmax", 1): 0.05,
        ("ssmax", 2): -0.05,
        ("ssmax", 3): 0.01,
    }
    finished = finish_all_runs(
        experiment(tmp_path, primary=primary | {"spread": 0.005}), lambda run: 5.0 + noise[run.arm, run.seed]
    )
    spread = np.std([0.05, -0.05, 0.01], ddof=1)
    assert f"by a spread of {spread:.2g} (the seeds that have ended)" in said(finished)[0]


def test_an_arm_is_tuned_that_starts_from_one_without_a_rate_of_its_own(tmp_path):
    arms = {
        "softmax": {},
        "swapped": {"from": "softmax", "swap": {"to": "ssmax"}, "train": False},
        "more": {"from": "swapped", "model.normalizer": "ssmax"},
        "cooled": {"from": "softmax", "step": 4, "trainer.max_steps": 6},
        "longer": {"from": "cooled"},
    }
    procedure = experiment(tmp_path, arms=arms, tune={"grid": [1e-2, 2e-2, 4e-2], "seeds": [101, 102]})
    trained_folders = set[Path]()
    n_planned = procedure.count_runs_by_arm("")
    while unfinished := [run for run in procedure.known_runs() if not run.outcome.has_ended]:
        assert all(
            run.source_run is None
            or run.source_run.config.run_folder in trained_folders | {source.config.run_folder for source in unfinished}
            for run in unfinished
        )
        trained_folders |= {run.config.run_folder for run in unfinished}
        for run in unfinished:
            finish_run(run, 5 + abs((run.rate or 0) - 2e-2) + 0.001 * run.seed)
    assert procedure.rate_choice("").judged_rates == dict.fromkeys(arms, 2e-2)
    from_others = [run for run in procedure.known_runs() if run.source_run]
    assert all((run.source_run.seed, run.source_run.stage) == (run.seed, run.stage) for run in from_others)
    assert {*procedure.tuning_runs("")["arm"]} == {"softmax", "more", "longer"}, "others choose no rate"
    assert procedure.count_runs_by_arm("") == {"softmax": 9, "swapped": 5, "more": 9, "cooled": 5, "longer": 9}
    assert sum(procedure.count_runs_by_arm("").values()) == len(procedure.known_runs())
    assert n_planned == procedure.count_runs_by_arm("")


def test_the_noise_of_an_experiments_final_runs_is_said_in_the_plan_and_on_the_page(tmp_path):
    random = np.random.default_rng(0)
    procedure = finish_all_runs(
        experiment(tmp_path, tune={"grid": [1e-3, 2e-3, 4e-3], "seeds": [101, 102]}),
        lambda run: float(random.normal(3.0, 0.1)),
    )
    judged = [procedure.judgement().judged_values_or_inf("", arm) for arm in ("softmax", "ssmax")]
    noise = f"oise: single runs scatter by {math.sqrt(np.var(judged, axis=1, ddof=1).mean()):.3g} ("
    paired = f", differences paired by seed by {np.std(np.subtract(*judged), ddof=1):.3g} ("
    for text in ("\n".join(plan_lines(procedure, [()])), write_page(procedure, tmp_path / "page").read_text()):
        assert noise in text
        assert paired in text
        assert "ower: 3 seeds find a difference of 0.01 with probability 0.0" in text
