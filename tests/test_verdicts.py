"""Verdicts: textbook values, which verdict follows from what, and how often they are false."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control, nct, t, ttest_1samp

from lm.statistics.verdicts import Comparison, holm, p_difference, p_equivalence, power, seeds_needed, verdicts

sys.path.insert(0, str(ROOT / "scripts"))
from simulate_verdicts import World, many

MATTERS = 0.02


def spread(mean: float, deviation: float, seeds: int) -> list[float]:
    """So many differences of exactly this mean and standard deviation."""
    values = np.linspace(-1, 1, seeds)
    return list(mean + deviation * values / values.std(ddof=1))


def same(value: float) -> Comparison:
    return Comparison([value] * 3)


def kind(*comparisons: Comparison, better: str = "lower") -> str:
    """The verdict on the first of them."""
    return next(iter(verdicts({str(i): one for i, one in enumerate(comparisons)}, MATTERS, better).values())).kind


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Comparison(spread(-0.03, 0.005, 3)), "better"),
        (Comparison(spread(-0.03, 0.005, 3), planned=5), "not resolved"),  # a look before the end decides nothing
        (Comparison(spread(0.03, 0.005, 3)), "worse"),
        (Comparison(spread(-0.03, 0.005, 2)), "not resolved"),
        (Comparison([-0.03]), "not resolved"),
        (Comparison(()), "not resolved"),
        (Comparison(spread(-0.01, 0.005, 10)), "different but below what matters"),
        (Comparison(spread(-0.01, 0.005, 10), elsewhere={2e-3: [0.1, 0.1]}), "different but below what matters"),
        (Comparison(spread(-0.019, 0.005, 10)), "better"),  # may be more than matters
        (Comparison(spread(0.001, 0.005, 5)), "equivalent"),
        (Comparison(spread(0.001, 0.003, 4)), "not resolved"),  # four seeds are too few to say so
        (Comparison(spread(0.01, 0.03, 5)), "not resolved"),
        (Comparison(spread(-0.03, 0.005, 5), diverged=1), "unstable"),
        (Comparison([-0.03, -0.03, np.inf]), "unstable"),
        (Comparison(spread(-0.03, 0.005, 5), tuned=False), "not tuned"),
        (Comparison(spread(-0.03, 0.005, 5), elsewhere={2e-3: [0.01, 0.02], 8e-3: [-0.1, -0.2]}), "depends on the rate"),
        (Comparison(spread(-0.03, 0.005, 5), elsewhere={2e-3: [-0.01, -0.02], 8e-3: [-np.inf]}), "better"),
        (Comparison(spread(-0.03, 0.005, 5), elsewhere={8e-3: [np.inf]}), "depends on the rate"),
        (Comparison(spread(0.001, 0.005, 5), elsewhere={2e-3: [-0.01, -0.02]}), "equivalent"),
    ],
)
def test_each_verdict_follows_from_what_it_says(one: Comparison, expected: str):
    assert kind(one) == expected


def at_rates(*means: float) -> np.ndarray:
    """Differences at the pairs of rates (4, 4), (4, 8), (8, 4), (8, 8): (2, 2, seeds)."""
    return np.reshape([spread(mean, 0.005, 5) for mean in means], (2, 2, 5))


@pytest.mark.parametrize(
    ("means", "every", "expected"),
    [
        ((-0.02, -0.02, -0.03, -0.03), False, "better"),  # at both of the baseline's rates, by one of its own
        ((0.02, 0.02, -0.03, -0.03), False, "better"),  # its other rate is worse: that is no rate to take
        ((-0.02, 0.02, -0.03, 0.002), False, "not resolved"),  # the baseline at 8 is as good
        ((0.02, 0.02, -0.03, -0.03), True, "not resolved"),  # of a metric that doesn't choose rates every pair must show it
        ((-0.02, -0.02, -0.03, -0.03), True, "better"),
    ],
)
def test_an_arm_is_better_if_it_beats_the_baseline_at_each_of_its_rates(means: tuple[float, ...], every: bool, expected: str):
    by_rates = at_rates(*means)
    assert kind(Comparison(by_rates[1, 0], by_rates=by_rates, place=(1, 0), every=every)) == expected
    assert not every or kind(Comparison(-by_rates[1, 0], by_rates=-by_rates, place=(1, 0), every=True), better="higher") == expected
    of_the_other = -by_rates.swapaxes(0, 1)
    assert kind(Comparison(of_the_other[0, 1], by_rates=of_the_other, place=(0, 1), every=every)) == expected.replace("better", "worse")


def test_an_arm_is_worse_only_against_the_baseline_at_a_rate_of_both():
    by_rates = at_rates(0.0, 0.03, 0.0, 0.03)  # the baseline is better at its second rate, at which the arm was not trained
    one = Comparison(by_rates[0, 1], by_rates=by_rates, place=(0, 1))
    assert kind(one) == "worse"
    apart = replace(one, shared=1)
    assert kind(apart) == "not resolved"
    assert apart.interval.low < 0 < one.interval.low
    assert apart.interval.high == one.interval.high
    turned = replace(apart, by_rates=-by_rates, differences=-by_rates[0, 0], place=(0, 0))
    assert kind(turned) == "equivalent", "better only if it is so against each"
    by_rates = at_rates(0.03, 0.03, 0.03, 0.03)
    assert kind(Comparison(by_rates[0, 0], by_rates=by_rates, shared=1)) == "worse"
    assert kind(Comparison(-by_rates[0, 0], by_rates=-by_rates, shared=1)) == "better"


def test_the_interval_is_that_of_both_arms_at_their_best():
    by_rates = at_rates(0.03, 0.0, -0.01, -0.04)
    one = Comparison(by_rates[1, 0], by_rates=by_rates, place=(1, 0))
    found = verdicts({"a": one}, MATTERS, "lower")["a"]
    half, own = (t.ppf(1 - 0.025 / together, 4) * 0.005 / np.sqrt(5) for together in (2, 1))
    assert found.interval.listed() == pytest.approx([-0.01, min(-0.01 - half, -0.01 - own), -0.01 + half])
    every = verdicts({"a": replace(one, every=True)}, MATTERS, "lower")["a"].interval
    assert every.listed() == pytest.approx([-0.01, -0.04 - own, 0.03 + own])


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_nothing_is_claimed_where_a_rate_that_is_not_judged_has_a_difference_that_is_not_finite(lost: float, every: bool):
    by_rates = at_rates(-0.03, -0.03, -0.03, -0.03)
    one = Comparison(by_rates[1, 0], by_rates=by_rates, place=(1, 0), every=every)
    assert kind(one) == "better"
    by_rates[0, 1, 2] = lost
    one = replace(one)
    found = verdicts({"a": one}, MATTERS, "lower")["a"]
    assert (found.kind, found.p, found.p_equivalent) == ("not resolved", 1.0, 1.0)
    assert "at another of the learning rates" in found.reason
    assert found.interval.mean == pytest.approx(-0.03)
    assert np.isnan([found.interval.low, found.interval.high, p_difference(one), p_equivalence(one, MATTERS)]).all()


def test_a_difference_that_hangs_on_one_rate_says_so():
    by_rates = at_rates(0.03, 0.03, -0.03, 0.005)
    found = verdicts({"a": Comparison(by_rates[1, 0], by_rates=by_rates, place=(1, 0))}, MATTERS, "lower")["a"]
    assert found.reason == "the difference is not shown at the other rates that the arms were trained at"


def test_another_sign_elsewhere_is_one_that_is_shown_where_there_are_seeds_for_it():
    def found(some: list[float]) -> str:
        return kind(Comparison(spread(-0.03, 0.005, 5), elsewhere={2e-3: some}))

    assert found(spread(0.01, 0.02, 5)) == "better", "5 seeds leave it open"
    assert found(spread(0.03, 0.01, 5)) == "depends on the rate"
    assert found([0.01, 0.02]) == "depends on the rate", "2 can't show anything: their mean decides"
    assert found([0.01, 0.02, np.inf]) == "depends on the rate"


def test_a_metric_of_which_more_is_better_turns_the_words():
    assert kind(Comparison(spread(0.03, 0.005, 3)), better="higher") == "better"


def test_one_of_many_comparisons_needs_more_evidence():
    one, nothing = Comparison(spread(-0.03, 0.01, 3)), Comparison((), tuned=False)
    assert p_difference(one) < 0.05 < 5 * p_difference(one)
    assert kind(one) == "better"
    assert kind(one, *[nothing] * 4) == "not resolved", "what can't be tested counts in the family"


def test_a_reason_says_how_many_seeds_a_difference_of_interest_takes():
    found = verdicts({"a": Comparison(spread(0.01, 0.03, 5))}, MATTERS, "lower")["a"]
    assert found.seeds_needed == seeds_needed(0.03, MATTERS) == 20
    assert "takes 20 seeds" in found.reason
    assert "equivalence takes 5 seeds or more" in verdicts({"a": Comparison(spread(0.001, 0.003, 4))}, MATTERS, "lower")["a"].reason
    assert found.interval.over == "5 seeds"


def test_p_values_are_those_of_the_t_tests():
    values = np.random.default_rng(0).normal(0.005, 0.01, 7)
    assert p_difference(Comparison(values)) == pytest.approx(ttest_1samp(values, 0).pvalue)
    one_sided = ttest_1samp(values, -MATTERS, alternative="greater").pvalue, ttest_1samp(values, MATTERS, alternative="less").pvalue
    assert p_equivalence(Comparison(values), MATTERS) == pytest.approx(max(one_sided))
    assert (p_difference(same(0.0)), p_difference(same(0.25)), p_equivalence(same(0.0), MATTERS)) == (1.0, 0.0, 0.0)
    assert p_equivalence(same(MATTERS), MATTERS) >= 0.5


def test_holms_adjustment_is_the_textbooks():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2, 0.9]) == [0.4, 0.9]
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_adjusted_p_values_keep_their_order_and_only_rise(p: list[float]):
    adjusted = holm(p)
    assert all(0 <= before <= after <= 1 for before, after in zip(p, adjusted, strict=True))
    assert [adjusted[i] for i in np.argsort(p, kind="stable")] == sorted(adjusted)
    assert all(one >= other - 1e-12 for one, other in zip(adjusted, false_discovery_control(p), strict=True))


def test_power_is_that_of_the_noncentral_t():
    critical = t.ppf(0.975, 9)
    expected = nct.sf(critical, 9, 0.8 * np.sqrt(10)) + nct.cdf(-critical, 9, 0.8 * np.sqrt(10))
    assert power(10, 1.0, 0.8) == pytest.approx(expected, abs=1e-9)
    assert power(10, 1.0, 0.0) == pytest.approx(0.05)
    needed = seeds_needed(1.0, 0.8)
    assert power(needed, 1.0, 0.8) >= 0.8 > power(needed - 1, 1.0, 0.8)
    assert seeds_needed(1.0, 1e-4) is None
    assert seeds_needed(0.0, 0.1) == seeds_needed(1e-18, 0.1) == 3
    assert [power(5, 1.0, difference) for difference in (5.0, 15.0, 1e6, 1e18)] == pytest.approx([1.0] * 4, abs=1e-3)


@pytest.mark.parametrize("matters", [0.0, -1.0, np.inf, np.nan])
def test_a_verdict_takes_a_difference_of_interest(matters: float):
    with pytest.raises(ValueError, match="smallest difference of interest"):
        verdicts({}, matters, "lower")


def test_simulated_experiments_with_equal_arms_have_few_false_verdicts_and_intervals_that_hold():
    some, (seeds, *_, n) = many(World("4 equal arms, heavy tails", 5, (0.0,) * 4, equal_on_text=True, heavy=True), range(300))
    assert (some["better"] + some["worse"]) / 300 <= 0.06
    assert 0.95 <= seeds / n <= 0.995


def test_simulated_tuning_that_is_misled_by_unlucky_runs_gives_few_false_verdicts():
    world = World("unlucky", 5, (0.0,) * 4, equal_on_text=True, unlucky=0.2, curvature=0.05, optima=(0.4,) * 5)
    some, (seeds, _, differ, n) = many(world, range(200))
    assert (some["better"] + some["worse"]) / 200 <= 0.03, "the rates of tuning alone: 0.17"
    assert differ / n > 0.2
    assert seeds / n >= 0.95


def test_simulated_experiments_find_what_was_planned_for():
    world = World("1 arm better", 6, (-MATTERS,), equal_on_text=True, optima=(0.4, 0.4))
    some, _ = many(world, range(300))
    assert (some["better"] + some["different but below what matters"]) / 300 >= 0.72
    assert not some["worse"]
