"""Intervals: coverage, textbook values, and rows that depend on each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.evaluation.statistics import bootstrap_mean, over_seeds, paired_difference, t_quantile, wilson


def test_bootstrap_interval_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(400):
        shared = rng.normal(4, 0.5, 60)
        interval = paired_difference(shared + 0.1 + rng.normal(0, 0.2, 60), shared, seed=trial, resamples=1000)
        covered += interval.low <= 0.1 <= interval.high
    assert 0.91 <= covered / 400 <= 0.98


def test_rows_of_a_document_are_resampled_together():
    rng, documents = np.random.default_rng(0), np.repeat(np.arange(12), 10)
    covered = {"together": 0, "apart": 0}
    for trial in range(300):
        difference = np.repeat(rng.normal(0.1, 0.1, 12), 10) + rng.normal(0, 0.1, 120)  # most of it is the document's
        for name, groups in (("together", documents), ("apart", None)):
            interval = paired_difference(difference, np.zeros(120), groups=groups, seed=trial, resamples=500)
            covered[name] += interval.low <= 0.1 <= interval.high
    assert covered["together"] >= 0.86 * 300, "twelve documents: a percentile interval is a little narrow"
    assert covered["apart"] < 0.7 * 300


def test_groups_of_one_row_change_nothing_and_labels_don_t_matter():
    rng = np.random.default_rng(0)
    a, weights, labels = rng.normal(size=40), rng.integers(1, 9, 40), np.arange(40) // 4
    alone = paired_difference(a, 0 * a, weights)
    assert alone == paired_difference(a, 0 * a, weights, np.arange(40) + 7)
    assert paired_difference(a, 0 * a, weights, labels) == paired_difference(a, 0 * a, weights, labels * 3 + 5) != alone


def test_identical_rows_differ_by_exactly_nothing():
    rows = np.random.default_rng(0).normal(4, 1, 50)
    interval = paired_difference(rows, rows.copy())
    assert (interval.mean, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_pairing_narrows_the_interval_of_correlated_rows():
    rng = np.random.default_rng(1)
    shared = rng.normal(4, 0.5, 100)
    a, b = shared + rng.normal(0, 0.05, 100), shared + rng.normal(0, 0.05, 100)
    paired, unpaired = paired_difference(a, b), paired_difference(a, rng.permutation(b))
    assert (paired.high - paired.low) < 0.3 * (unpaired.high - unpaired.low)


def test_bootstrap_is_seeded_and_matches_the_textbook_width():
    values = np.random.default_rng(2).normal(0, 1, (400, 1))
    low, high = bootstrap_mean(values, seed=3)
    assert (low, high) == bootstrap_mean(values, seed=3)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)


def test_rows_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="equal shapes"):
        paired_difference(np.zeros(3), np.zeros(4))


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (10, 2.2281), (11, 2.2010), (30, 2.0423), (120, 1.9799)])
def test_t_quantile_matches_the_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)


def test_interval_over_seeds_is_students():
    interval = over_seeds(np.array([0.1, 0.2, 0.3]))
    assert interval.mean == pytest.approx(0.2)
    assert interval.high - 0.2 == pytest.approx(4.30265 * 0.1 / np.sqrt(3), rel=1e-5)


def test_wilson_is_the_score_interval():
    for right, trials, low, high in (
        (8, 10, 0.490162, 0.943318),
        (1, 20, 0.008881, 0.236131),
        (0, 10, 0.0, 0.277533),
        (5, 5, 0.565518, 1.0),
    ):
        found = wilson(right, trials)
        assert found.mean == right / trials
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-5)
    assert np.isnan(wilson(0, 0).mean)


@given(trials=st.integers(1, 10_000), share=st.floats(0, 1))
def test_wilson_holds_the_share_and_stays_within_0_and_1(trials: int, share: float):
    found = wilson(round(share * trials), trials)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    mirrored = wilson(trials - round(share * trials), trials)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-12)
