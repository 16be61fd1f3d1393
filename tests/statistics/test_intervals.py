"""Intervals: coverage, textbook values, and units that depend on each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from lm.statistics.intervals import (
    Interval,
    effective_trials,
    estimate_over_seeds,
    estimate_over_seeds_and_documents,
    interval_over_documents,
    interval_over_questions,
    wilson_interval,
)


def test_the_degrees_of_freedom_are_bell_and_mccaffreys():
    rng = np.random.default_rng(1)
    weights, values = rng.lognormal(0, 1, 9), rng.normal(size=9)
    part = weights / weights.sum()
    residual = np.eye(9) - np.outer(np.ones(9), part)  # of values that have the same variance
    form = (part / np.sqrt(1 - part))[:, None] * residual
    gram = form @ form.T
    half = student.ppf(0.975, np.trace(gram) ** 2 / (gram**2).sum()) * np.linalg.norm(form @ values)
    interval = interval_over_documents(values, weights, np.arange(9))
    low, high = interval.low, interval.high
    assert ((high - low) / 2, (high + low) / 2, interval.mean) == pytest.approx(
        (half, part @ values, part @ values), rel=1e-9
    )


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("documents", [3, 8, 20])
def test_an_interval_over_documents_holds_the_truth_as_often_as_it_says(documents: int, unequal: bool, heavy: bool):
    rng, trials, labels = np.random.default_rng(documents), 400, np.repeat(np.arange(documents), 4)
    hits = 0
    for _ in range(trials):
        effect = rng.standard_t(4, documents) if heavy else rng.normal(size=documents)
        weights = (rng.lognormal(0, 0.6, documents) if unequal else np.ones(documents))[labels]
        values = 0.1 + 0.1 * effect[labels] + 0.05 * rng.normal(size=len(labels))
        interval = interval_over_documents(values, weights, labels)
        hits += interval.low <= 0.1 <= interval.high
    assert 0.925 <= hits / trials <= 0.99


def test_labels_weights_in_another_unit_and_units_without_weight_change_nothing():
    rng = np.random.default_rng(0)
    a, weights, labels = rng.normal(size=40), rng.integers(1, 9, 40).astype(float), np.arange(40) // 4
    interval = interval_over_documents(a, weights, labels)
    padded = interval_over_documents(np.append(a, 9.0), np.append(3 * weights, 0.0), np.append(labels * 3 + 5, 999))
    assert (padded.mean, padded.low, padded.high) == pytest.approx(
        (interval.mean, interval.low, interval.high), rel=1e-12
    )
    assert interval_over_documents(a, weights, np.arange(40) + 7) != interval


def test_values_that_are_not_finite_have_no_interval():
    values = np.random.default_rng(0).normal(size=20)
    values[3] = np.nan
    assert np.isnan(interval_over_documents(values, np.ones(20), np.arange(20)).as_list()).all()


def test_two_documents_have_no_interval():
    values, labels = np.arange(6.0), np.array([0, 0, 0, 1, 1, 2])
    assert interval_over_documents(values, np.ones(6), labels // 2) is None
    assert interval_over_documents(values, np.array([1, 1, 1, 1, 1, 0]), labels) is None
    assert interval_over_documents(values, np.ones(6), labels).noise_source == "documents, 1 seed"


def test_an_interval_over_seeds_and_documents_holds_the_mean_over_both():
    rng, trials = np.random.default_rng(0), 500
    hits = {"both": 0, "seeds alone": 0}
    for _ in range(trials):
        values = 0.1 + 0.1 * rng.normal(size=(5, 1)) + 0.2 * rng.normal(size=20) + 0.1 * rng.normal(size=(5, 20))
        over_both = estimate_over_seeds_and_documents(values, np.ones(20), np.arange(20)).interval()
        for name, interval in (("both", over_both), ("seeds alone", estimate_over_seeds(values.mean(1)).interval())):
            hits[name] += interval.low <= 0.1 <= interval.high
    assert 0.93 <= hits["both"] / trials <= 0.98
    assert hits["seeds alone"] / trials < 0.93
    assert over_both.noise_source == "5 seeds and 20 documents"


def test_the_spread_over_seeds_is_that_of_their_weighted_means():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(5, 20)), rng.integers(1, 30, 20).astype(float)
    estimate = estimate_over_seeds_and_documents(values, weights, np.arange(20))
    by_seed = estimate_over_seeds(np.average(values, axis=1, weights=weights))
    assert estimate.minimum_width_estimates[0].interval().as_list() == pytest.approx(by_seed.interval().as_list())


def test_seeds_and_documents_take_enough_of_both():
    values = np.random.default_rng(0).normal(size=(5, 8))
    assert estimate_over_seeds_and_documents(values, np.ones(8), np.arange(8)) is not None
    assert estimate_over_seeds_and_documents(values[:, :7], np.ones(7), np.arange(7)) is None
    assert estimate_over_seeds_and_documents(values[:1], np.ones(8), np.arange(8)) is None
    assert estimate_over_seeds_and_documents(values * np.inf, np.ones(8), np.arange(8)) is None


def test_intervals_of_fractions_are_those_of_statsmodels():
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for right, trials in ((k, n) for n in (1, 7, 40) for k in range(n + 1)):
        interval = wilson_interval(right, trials)
        assert interval.mean == right / trials
        assert (interval.low, interval.high) == pytest.approx(
            proportion.proportion_confint(right, trials, method="wilson"), abs=1e-9
        )
    assert np.isnan(wilson_interval(0, 0).low)


def fraction_interval(values: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> Interval:
    """The interval of a fraction."""
    return interval_over_questions(values, weights, groups, np.average(values, weights=weights))


@pytest.mark.parametrize("fraction", [0, 1])
@pytest.mark.parametrize("as_units", [True, False])
def test_all_right_or_all_wrong_are_as_many_trials_as_sequences(fraction: int, as_units: bool):
    units = (np.ones(72), np.repeat(np.arange(9), 8)) if as_units else (np.full(9, 8), np.arange(9))
    interval = fraction_interval(np.full(len(units[0]), fraction), *units)
    assert interval.noise_source == "sequences, 1 seed"
    assert interval.as_list() == pytest.approx(wilson_interval(9 * fraction, 9).as_list(), rel=1e-12)


@given(data=st.data(), sequences=st.integers(1, 20), size=st.integers(1, 8))
def test_questions_of_a_sequence_are_worth_between_one_trial_and_their_number(
    data: st.DataObject, sequences: int, size: int
):
    counts = np.array(data.draw(st.lists(st.integers(1, size), min_size=sequences, max_size=sequences)))
    right = np.array([data.draw(st.integers(0, most)) for most in counts])
    trials = effective_trials(right, counts)
    assert 0 < trials <= counts.sum()
    if (counts == counts[0]).all():
        assert trials >= sequences * (1 - 1e-9)
    interval, mirrored = (
        fraction_interval(successes / counts, counts, np.arange(sequences)) for successes in (right, counts - right)
    )
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((interval.low, interval.high), abs=1e-9)


@pytest.mark.parametrize("chance", [0.5, 0.9])
@pytest.mark.parametrize("correlation", [0.1, 0.5, 0.9])
def test_intervals_over_sequences_hold_the_chance_where_those_over_questions_do_not(chance: float, correlation: float):
    rng, rest, hits = np.random.default_rng(0), 1 / correlation - 1, np.zeros(2)
    for _ in range(400):
        right = rng.binomial(8, rng.beta(chance * rest, (1 - chance) * rest, 40))
        intervals = fraction_interval(right / 8, np.full(40, 8), np.arange(40)), wilson_interval(right.sum(), 320)
        hits += [interval.low <= chance <= interval.high for interval in intervals]
    assert hits[0] / 400 > 0.93
    assert hits[1] / 400 < 0.91


def test_a_fraction_that_is_not_finite_has_no_interval():
    interval = fraction_interval(np.array([1, np.nan]), np.full(2, 4), np.arange(2))
    assert np.isnan(interval.as_list()).all()
