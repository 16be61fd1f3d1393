"""Metrics that a run has learned or not: Fisher's exact test on fractions of runs."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT
from fabricated import finish
from scipy.stats import fisher_exact as scipys

from lm.errors import ConfigError, RunError
from lm.experiments.experiment_file import read_experiment
from lm.experiments.plan import plan_lines
from lm.experiments.procedure import Procedure
from lm.experiments.summary import summary_entries
from lm.runs.evaluations import Axis, Sample, Series
from lm.runs.folder import METRICS
from lm.statistics.learned import LearnedCounts, fewest_seeds, fisher_exact, learned_verdicts


def test_p_is_that_of_fishers_exact_test():
    for of_ours, of_theirs in ((3, 3), (4, 5), (9, 9), (5, 1)):
        for arm_count in range(of_ours + 1):
            for base_count in range(of_theirs + 1):
                expected = scipys([[arm_count, of_ours - arm_count], [base_count, of_theirs - base_count]]).pvalue
                assert fisher_exact(arm_count, of_ours, base_count, of_theirs) == pytest.approx(expected)
    assert fisher_exact(0, 0, 0, 0) == 1


@pytest.mark.parametrize(
    ("one", "kind", "reason"),
    [
        (
            LearnedCounts([(5, 0)], 5, n_planned_seeds=5),
            "better",
            "5 of 5 have learned, 0 of 5 of the baseline; Fisher's exact test: p = 0.0079",
        ),
        (LearnedCounts([(0, 5)], 5, n_planned_seeds=5), "worse", "p = 0.0079"),
        (LearnedCounts([(5, 5)], 5, n_planned_seeds=5), "undecided", "p = 1"),
        (LearnedCounts([(3, 0)], 3, n_planned_seeds=3), "undecided", "can show a difference from 4 seeds on"),
        (LearnedCounts([(4, 0)], 4, n_planned_seeds=4), "better", "p = 0.029"),
        (LearnedCounts([(4, 0)], 4, n_planned_seeds=5), "incomplete", "4 of 5 seeds have ended"),
        (
            LearnedCounts([(5, 0)], 5, n_diverged_runs=2, n_planned_seeds=5),
            "better",
            "2 diverged, and count as not learned",
        ),
        (LearnedCounts([(0, 0)], 0, is_tuned=False), "not tuned", "edge"),
        (
            LearnedCounts([(5, 0), (5, 5)], 5, n_planned_seeds=5),
            "undecided",
            "not so at the other rates that the arms were trained at",
        ),
        (LearnedCounts([(5, 0), (5, 1)], 5, n_planned_seeds=5), "better", "p = 0.048"),
        (LearnedCounts([(3, 0), (3, 3)], 3, n_planned_seeds=3), "undecided", "can show a difference from 4 seeds on"),
    ],
)
def test_each_verdict_follows_from_what_it_says(one: LearnedCounts, kind: str, reason: str):
    verdict = learned_verdicts({"arm": one})["arm"]
    assert (verdict.kind, reason in verdict.reason) == (kind, True), verdict.reason


def test_one_of_two_comparisons_needs_more_seeds():
    counts = {"a": LearnedCounts([(4, 0)], 4, n_planned_seeds=4), "b": LearnedCounts([(0, 0)], 4, n_planned_seeds=4)}
    assert learned_verdicts(counts)["a"].kind == "undecided"
    assert "from 5 seeds on" in learned_verdicts(counts)["a"].reason
    assert (fewest_seeds(0.05), fewest_seeds(0.025)) == (4, 5)


def test_equal_arms_that_share_seeds_are_told_apart_no_more_often_than_alpha():
    random = np.random.default_rng(0)
    for chance in (0.2, 0.5):
        for shared in (0.0, 0.8):  # how often both arms of a seed do the same
            false = 0
            for _ in range(2000):
                arm_learned = random.random(9) < chance
                base_learned = np.where(random.random(9) < shared, arm_learned, random.random(9) < chance)
                false += fisher_exact(int(arm_learned.sum()), 9, int(base_learned.sum()), 9) <= 0.05
            assert false / 2000 <= 0.05


# ---------------------------------------------------------------- in experiments


def recall(accuracy: float) -> Series:
    """Accuracy of 8 questions in sequences of 32 and of 512."""
    samples = tuple(
        Sample(f"of {length}", np.full((8, 1), value), np.ones(8), np.arange(8))
        for length, value in ((32, 1.0), (512, accuracy))
    )
    axis = Axis("sequence length", "tokens", "in sequences of", (32, 512))
    logged = ("recall/passkey 32", "recall/passkey 512")
    means = np.array([1.0, accuracy])
    return Series(
        "recall",
        "accuracy",
        "fraction",
        "higher",
        32,
        means,
        axis=axis,
        samples=samples,
        interval="wilson",
        logged=logged,
    )


def experiment(folder: Path, **primary: object) -> Procedure:
    path = folder / "recall.yaml"
    file = {
        "base": str(ROOT / "tests" / "tiny.yaml"),
        "arms": {"softmax": {"model.normalizer": "softmax"}, "ssmax": {"model.normalizer": "ssmax"}},
        "seeds": [1, 2, 3, 4, 5],
        "primary": {"metric": "recall/passkey 512", "better": "higher", **primary},
    }
    path.write_text(yaml.safe_dump(file, sort_keys=False))
    return Procedure(
        read_experiment(path, ["data.source.paths=[.]", f"runs={folder / 'runs'}", "eval.recall.tasks=[passkey]"])
    )


def test_recall_is_judged_by_the_runs_that_have_learned_it(tmp_path):
    procedure = experiment(tmp_path, learned=0.9)
    for run in procedure.known_runs():
        finish(run, 5.0, recall({"softmax": 0.1, "ssmax": 0.95}[run.arm]))
    soft, scalable = summary_entries(procedure)
    assert (soft["learned"], scalable["learned"], scalable["verdict"]) == (0, 5, "better")
    assert scalable["fraction_learned"] == pytest.approx([1.0, 0.4782, 1.0], abs=1e-4)
    assert (soft["mean"], scalable["mean"]) == pytest.approx((0.1, 0.95)), "all questions report"


def test_a_diverged_run_has_not_learned(tmp_path):
    procedure = experiment(tmp_path, learned=0.9)
    for run in procedure.known_runs():
        finish(run, 5.0, recall(0.95))
        folder = run.config.run_folder
        if run.arm == "ssmax":
            shutil.rmtree(folder / "checkpoints")
            (folder / METRICS).write_text('{"step": 3, "diverged": "loss is not finite"}\n')
    _, scalable = summary_entries(procedure)
    assert (scalable["learned"], scalable["ended"], scalable["verdict"]) == (0, 5, "worse")


def test_recall_s_mean_accuracy_is_a_metric_as_any_other(tmp_path):
    procedure = experiment(tmp_path, matters=0.05)
    for run in procedure.known_runs():
        finish(run, 5.0, recall({"softmax": 0.1, "ssmax": 0.8}[run.arm] + 0.01 * run.seed * (run.arm == "ssmax")))
    _, scalable = summary_entries(procedure)
    assert (scalable["verdict"], scalable["difference"][0]) == ("better", pytest.approx(0.73))


def test_the_wrong_direction_is_said(tmp_path):
    with pytest.raises(
        ConfigError, match=r"primary.better = 'lower': of recall/passkey 512, higher is better; write `better: higher`$"
    ):
        experiment(tmp_path, learned=0.9, better="lower")
    with pytest.raises(
        ConfigError, match=r"primary.learned = 90.0: recall/passkey 512 lies between 0 and 1; give a fraction"
    ):
        experiment(tmp_path, learned=90)
    settled = experiment(tmp_path, learned=0.9).experiment
    procedure = Procedure(
        replace(settled, primary=replace(settled.primary, better="lower"))
    )  # as of an evaluation from outside
    for run in procedure.known_runs():
        finish(run, 5.0, recall(0.5))
    with pytest.raises(RunError, match="higher is better; correct the experiment"):
        summary_entries(procedure)


def test_the_plan_says_from_how_many_seeds_on_a_difference_can_be_shown(tmp_path):
    assert any(
        "a run has learned if it reaches 0.9; a difference can be shown from 4 seeds on" in line
        for line in plan_lines(experiment(tmp_path, learned=0.9), None, "")
    )


def test_a_difference_in_the_other_direction_at_another_rate_shows_nothing():
    assert learned_verdicts({"a": LearnedCounts([(5, 0), (5, 0)], 5)})["a"].kind == "better"
    verdict = learned_verdicts({"a": LearnedCounts([(5, 0), (0, 5)], 5)})["a"]
    assert (verdict.kind, verdict.p) == ("undecided", 1.0)
    assert "but not so at the other rates" in verdict.reason


def test_other_rates_are_named_where_they_alone_leave_a_family_s_comparison_open():
    at_other_rates, at_no_rate = (
        LearnedCounts([(9, 2), (9, 3)], 10),
        LearnedCounts([(8, 2), (6, 4)], 10),
    )  # p = .0055, .020; .023, .66
    reasons = {name: verdict.reason for name, verdict in learned_verdicts(dict.fromkeys("abc", at_other_rates)).items()}
    assert all("but not so at the other rates" in reason for reason in reasons.values()), reasons
    reasons = {name: verdict.reason for name, verdict in learned_verdicts(dict.fromkeys("abc", at_no_rate)).items()}
    assert not any("other rates" in reason for reason in reasons.values()), reasons
