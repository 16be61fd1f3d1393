"""Verdicts: textbook values, which verdict follows from what, and how often they are false."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, nct, t, ttest_1samp

from lm.statistics.intervals import estimate_over_seeds_and_documents
from lm.statistics.verdicts import UNTUNED_OBSTACLE, Comparison, judge_comparisons, power, seeds_needed

sys.path.insert(0, str(ROOT / "scripts"))
from simulate_verdicts import AwkwardWorld, World, simulate_trials

MATTERS = 0.02


def spread(mean: float, deviation: float, seeds: int) -> list[float]:
    """So many differences of exactly this mean and standard deviation."""
    values = np.linspace(-1, 1, seeds)
    return list(mean + deviation * values / values.std(ddof=1))


def kind(*comparisons: Comparison) -> str:
    """The verdict on the first of them."""
    return next(
        iter(judge_comparisons({str(i): comparison for i, comparison in enumerate(comparisons)}, MATTERS).values())
    ).kind


def at_rates(*means: float) -> np.ndarray:
    """Differences at the pairs of rates (4, 4), (4, 8), (8, 4), (8, 8): (2, 2, seeds)."""
    return np.reshape([spread(mean, 0.005, 5) for mean in means], (2, 2, 5))


@pytest.mark.parametrize(
    ("means", "every", "expected"),
    [
        ((-0.02, -0.02, -0.03, -0.03), False, "better"),  # at both of the baseline's rates, by one of its own
        ((0.02, 0.02, -0.03, -0.03), False, "better"),  # its other rate is worse: that is no rate to take
        ((-0.02, 0.02, -0.03, 0.002), False, "undecided"),  # the baseline at 8 is as good
        # of a metric that doesn't choose rates every pair must show it
        ((0.02, 0.02, -0.03, -0.03), True, "undecided"),
        ((-0.02, -0.02, -0.03, -0.03), True, "better"),
    ],
)
def test_an_arm_is_better_if_it_beats_the_baseline_at_each_of_its_rates(
    means: tuple[float, ...], every: bool, expected: str
):
    by_rates = at_rates(*means)
    assert kind(Comparison(by_rates, (1, 0), must_hold_at_all_rates=every)) == expected
    mirrored = Comparison(-by_rates, (1, 0), must_hold_at_all_rates=every, higher_is_better=True)
    assert kind(mirrored) == expected, "the best rate of a metric of which more is better is that of its highest value"
    of_the_other = -by_rates.swapaxes(0, 1)
    assert kind(Comparison(of_the_other, (0, 1), must_hold_at_all_rates=every)) == expected.replace("better", "worse")


def test_an_arm_is_worse_only_against_the_baseline_at_a_rate_of_both():
    # the baseline is better at its second rate, at which the arm was not trained
    by_rates = at_rates(0.0, 0.03, 0.0, 0.03)
    comparison = Comparison(by_rates, (0, 1))
    assert kind(comparison) == "worse"
    separate = replace(comparison, n_shared_rates=1)
    assert kind(separate) == "undecided"
    assert separate.interval_ends()[0] < 0 < comparison.interval_ends()[0]
    assert separate.interval_ends()[1] == comparison.interval_ends()[1]
    turned = replace(separate, metric_differences=-by_rates, judged_rate_pair=(0, 0))
    assert kind(turned) == "no difference above margin", "better only if it is so against each"
    by_rates = at_rates(0.03, 0.03, 0.03, 0.03)
    assert kind(Comparison(by_rates, n_shared_rates=1)) == "worse"
    assert kind(Comparison(-by_rates, n_shared_rates=1)) == "better"


def test_the_interval_is_that_of_both_arms_at_their_best():
    by_rates = at_rates(0.03, 0.0, -0.01, -0.04)
    comparison = Comparison(by_rates, (1, 0))
    verdict = judge_comparisons({"a": comparison}, MATTERS)["a"]
    assert verdict.unadjusted_interval == verdict.interval
    half, half_alone = (t.ppf(1 - 0.025 / family, 4) * 0.005 / np.sqrt(5) for family in (2, 1))
    assert verdict.interval.as_list() == pytest.approx([-0.01, min(-0.01 - half, -0.01 - half_alone), -0.01 + half])
    widest = judge_comparisons({"a": replace(comparison, must_hold_at_all_rates=True)}, MATTERS)["a"].interval
    assert widest.as_list() == pytest.approx([-0.01, -0.04 - half_alone, 0.03 + half_alone])


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_nothing_is_claimed_where_a_rate_that_is_not_judged_has_a_difference_that_is_not_finite(lost: float):
    by_rates = at_rates(-0.03, -0.03, -0.03, -0.03)
    by_rates[0, 1, 2] = lost
    verdict = judge_comparisons({"a": Comparison(by_rates, (1, 0))}, MATTERS)["a"]
    assert (verdict.kind, verdict.p, verdict.seeds_needed) == ("unstable", 1.0, None)


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        (spread(0.0, 0.001, 5), "no difference above 0.02 (5 seeds)"),
        (spread(0.0, 0.1, 5), "undecided: the interval is too wide (5 seeds)"),
        (spread(-0.01, 0.005, 10), "a difference below 0.02 (10 seeds)"),
        (spread(-0.1, 0.005, 5), "better by more than 0.02 (5 seeds)"),
        (spread(0.1, 0.005, 5), "worse by more than 0.02 (5 seeds)"),
        (spread(-0.019, 0.005, 10), "better, perhaps by less than 0.02 (10 seeds)"),
        ([0.0] * 3, "undecided: all seeds agree, and are too few (3 seeds)"),
        (spread(0.0, 0.1, 2), "incomplete: a verdict takes 3 seeds"),
        ((), "incomplete: a verdict takes 3 seeds"),
        ([-0.03, -0.03, np.inf], "unstable: a difference is not finite"),
    ],
)
def test_words_hold_for_one_situation_and_name_the_margin(differences: list[float], words: str):
    verdict = judge_comparisons({"a": Comparison(differences)}, MATTERS)["a"]
    assert verdict.statement_with_seeds == words
    assert " over " not in verdict.reason, "the words end with the number of seeds"
    assert replace(verdict, plan_changed_after_results=True).statement_with_seeds == f"exploratory: {words}"


def test_a_reason_says_how_many_seeds_a_difference_of_interest_takes():
    verdict = judge_comparisons({"a": Comparison(spread(0.01, 0.03, 5))}, MATTERS)["a"]
    assert verdict.seeds_needed[0] == seeds_needed(0.03, MATTERS) == 20
    ends = [0.03 * np.sqrt(4 / chi2.ppf(tail, 4)) for tail in (0.975, 0.025)]
    assert [*verdict.seeds_needed[1:]] == [seeds_needed(end, MATTERS) for end in ends] == [9, 148]
    assert verdict.reason.endswith(
        "to find one of 0.02 4 times in 5 takes 20 seeds (9 to 148, as the spread itself is known from few)"
    )
    assert verdict.interval.noise_source == "5 seeds"
    verdict_of_few = judge_comparisons({"a": Comparison(spread(0.01, 0.3, 3))}, MATTERS)["a"]
    assert verdict_of_few.reason.endswith(
        "takes more than 1,000 seeds (481 to more than 1,000, as the spread itself is known from few)"
    )


TIES = {
    "three of one step": ([1 / 128] * 3, "undecided", 0.25),
    "three of rounding": ([-1e-16] * 3, "undecided", 0.25),
    "three with rounding": ([0.1, 0.1 + 1e-16, 0.1 - 1e-16], "undecided", 0.25),
    "five of one step": ([1 / 128] * 5, "undecided", 1 / 16),
    "six of one step": ([1 / 128] * 6, "difference below margin", 1 / 32),
    "six of much": ([0.25] * 6, "worse", 1 / 32),
    "six of nothing": ([0.0] * 6, "no difference above margin", 1.0),
    "three of nothing": ([0.0] * 3, "undecided", 1.0),
}


@pytest.mark.parametrize(("values", "expected", "p"), TIES.values(), ids=TIES)
def test_without_spread_the_sign_flip_test_decides(values: list[float], expected: str, p: float):
    verdict = judge_comparisons({"a": Comparison(values)}, MATTERS)["a"]
    assert (verdict.kind, verdict.p) == (expected, p)
    assert not verdict.interval.is_bounded


def families() -> st.SearchStrategy[list[list[float]]]:
    """Differences of a few comparisons, with ties."""
    value = st.one_of(st.sampled_from([0.0, 1 / 128, -1 / 128, 0.02, -0.02]), st.floats(-0.1, 0.1))
    return st.integers(3, 9).flatmap(
        lambda seeds: st.lists(st.lists(value, min_size=seeds, max_size=seeds), min_size=1, max_size=5)
    )


def unpaired(values: list[float]) -> Comparison:
    """The comparison of a half of the values with the other half, brought into 0 and 1."""
    arm, baseline = (np.array([values[part]]) + 0.5 for part in (slice(0, None, 2), slice(1, None, 2)))
    count = min(arm.shape[1], baseline.shape[1])
    return Comparison(arm[:, :count] - baseline[:, :count], unpaired_values=(arm, baseline), possible_range=(0.0, 1.0))


@settings(deadline=None)  # quadratures
@given(families(), st.sampled_from([Comparison, partial(Comparison, possible_range=(-1.0, 1.0)), unpaired]))
def test_no_word_contradicts_the_interval_beside_it(family: list[list[float]], compare: Callable):
    comparisons = {number: compare(values * 2) for number, values in enumerate(family)}
    found_verdicts = judge_comparisons(comparisons, MATTERS)
    for verdict in found_verdicts.values():
        low, high = verdict.interval.low, verdict.interval.high
        without_0, is_within = low > 0 or high < 0, low > -MATTERS and high < MATTERS
        is_accuracy = comparisons[0].possible_range is not None
        assert low < high or not is_accuracy, "an interval of an accuracy has a length"
        assert not is_accuracy or -1 <= low <= high <= 1
        expected = {
            (True, True): ("difference below margin",), (True, False): ("better", "worse"),
            (False, True): ("no difference above margin",), (False, False): ("undecided",),
        }  # fmt: skip
        assert verdict.kind in expected[without_0, is_within]
        assert (verdict.p <= 0.05) == without_0 or abs(verdict.p - 0.05) < 1e-6
        assert not verdict.unadjusted_interval.is_bounded or (
            low <= verdict.unadjusted_interval.low and verdict.unadjusted_interval.high <= high
        )


def test_intervals_of_a_family_are_each_longer_so_that_all_hold_together():
    values = spread(0.03, 0.03, 7)
    units = np.array(values)[:, None] + np.random.default_rng(0).normal(0, 0.02, (7, 9))
    on_other_text = estimate_over_seeds_and_documents(units[None, None], np.ones(9), np.arange(9))
    comparison = Comparison(values, seed_and_document_estimate=on_other_text)
    nothing = Comparison((), obstacle=UNTUNED_OBSTACLE)
    for count in (1, 4, 6):
        verdict = judge_comparisons(dict(enumerate([comparison] + [nothing] * (count - 1))), MATTERS)[0]
        alpha = 1 - 0.95 ** (1 / count)
        half, half_alone = (t.ppf(1 - tail / 2, 6) * 0.03 / np.sqrt(7) for tail in (alpha, 0.05))
        assert verdict.interval.as_list() == pytest.approx([0.03, 0.03 - half, 0.03 + half])
        assert verdict.unadjusted_interval.as_list() == pytest.approx([0.03, 0.03 - half_alone, 0.03 + half_alone])
        reach = on_other_text.half_width(alpha).item() * np.array([0, -1, 1])
        assert verdict.seed_and_document_interval.as_list() == pytest.approx(list(on_other_text.mean.item() + reach))
        assert verdict.p == pytest.approx(1 - (1 - ttest_1samp(values, 0).pvalue) ** count)
        assert verdict.seeds_needed[0] == seeds_needed(0.03, MATTERS, alpha)
    at_two_rates = judge_comparisons({"a": Comparison(np.array([[values], [values]]))}, MATTERS)["a"]
    assert at_two_rates.seeds_needed[0] == seeds_needed(0.03, MATTERS, 0.05 / 2) > seeds_needed(0.03, MATTERS)


def test_power_is_that_of_the_noncentral_t():
    critical = t.ppf(0.975, 9)
    expected = nct.sf(critical, 9, 0.8 * np.sqrt(10)) + nct.cdf(-critical, 9, 0.8 * np.sqrt(10))
    assert power(10, 1.0, 0.8) == pytest.approx(expected, abs=1e-9)
    assert power(10, 1.0, 0.0) == pytest.approx(0.05)
    needed = seeds_needed(1.0, 0.8)
    assert power(needed, 1.0, 0.8) >= 0.8 > power(needed - 1, 1.0, 0.8)
    assert (seeds_needed(1.0, 1e-4), seeds_needed(1.0, 0.0)) == (None, None)
    assert (seeds_needed(1e-18, 0.1), seeds_needed(0.0, 0.1)) == (3, 6), (
        "without spread as many as the sign-flip test takes"
    )
    assert [power(5, 1.0, difference) for difference in (5.0, 15.0, 1e6, 1e18)] == pytest.approx([1.0] * 4, abs=1e-3)


MANY = pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.slow)])  # experiments


@MANY
def test_simulated_experiments_with_equal_arms_have_few_false_verdicts_and_intervals_that_hold(count: int):
    counts, coverage = simulate_trials(
        World("4 equal arms, heavy tails", 5, (0.0,) * 4, arm_document_effects_cancel=True, has_heavy_tails=True),
        range(count),
    )
    assert counts["false"] / count <= 0.06
    assert 0.95 <= coverage[:, 0].mean() <= 0.995
    assert counts["together"] / count >= 0.94


@MANY
def test_simulated_accuracies_of_arms_that_fail_have_few_false_verdicts(count: int):
    name = "arms fail in 25.2 % of seeds, the baseline never"
    counts, _ = simulate_trials(AwkwardWorld(name, arms=4, n_seeds=5, is_unpaired=False), range(count))
    assert counts["false"] / count <= 0.05


@MANY
def test_simulated_tuning_that_is_misled_by_unlucky_runs_gives_few_false_verdicts(count: int):
    world = World(
        "unlucky",
        5,
        (0.0,) * 4,
        arm_document_effects_cancel=True,
        bad_run_chance=0.2,
        curvature=0.05,
        octaves_from_central_rate=(0.4,) * 5,
    )
    counts, coverage = simulate_trials(world, range(count))
    assert counts["false"] / count <= 0.03
    assert coverage[:, 2].mean() > 0.2, "tuning chose different rates"
    assert coverage[:, 0].mean() >= 0.95
