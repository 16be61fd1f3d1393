"""The critical number of keys: tests between samples of heads of equal size."""

import math

import numpy as np
import pytest
from scipy.stats import ks_2samp

from lm.diagnostics.limits import critical_count, head_mean_samples, two_sample_tests


def test_it_is_the_first_number_of_keys_that_is_not_rejected():
    rng = np.random.default_rng(0)
    first, shift, counts = rng.standard_normal((144, 5)), np.array([3.0, 1.0, 0.28, 0.0, 3.0]), [1, 2, 5, 10, 20]
    second = rng.standard_normal((144, 5)) + shift
    statistic, p = two_sample_tests(first, second)
    expected = ks_2samp(first[:, 1], second[:, 1])
    assert (statistic[1], p[1]) == (expected.statistic, expected.pvalue)
    assert (p[0], p[1]) < (1e-6, 1e-6)
    assert critical_count(p, counts, 0.05) == counts[int(np.flatnonzero(p >= 0.05)[0])]
    assert critical_count(p, counts, 0.01) <= critical_count(p, counts, 0.05) <= 10  # a stricter level rejects less


def test_where_all_are_rejected_there_is_none():
    statistic, p = two_sample_tests(np.zeros((50, 2)), np.ones((50, 2)))
    assert math.isnan(critical_count(p, [1, 2], 0.05))
    assert statistic.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_left_out():
    first = np.random.default_rng(0).standard_normal((40, 2))
    gaps = first.copy()
    gaps[:4, 0], gaps[4, 0], gaps[:, 1] = np.nan, np.inf, np.nan
    statistic, p = two_sample_tests(gaps, first)
    assert statistic[0] == ks_2samp(gaps[5:, 0], first[:, 0]).statistic
    assert math.isnan(statistic[1])
    assert critical_count(p, [1, 2], 0.05) == 1


def test_few_heads_give_as_many_values_as_many_heads_do():
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 5, (16, 36, 3)).astype(float)
    sums = rng.standard_normal((16, 36, 3)) * rows
    values = head_mean_samples(sums, rows, 144)
    assert values.shape == (144, 3)
    assert values[36 + 7] == pytest.approx(sums[1::4, 7].sum(0) / rows[1::4, 7].sum(0))
    assert head_mean_samples(sums, rows, 20).shape == (20, 3)  # more heads than are wanted
    assert head_mean_samples(sums[:2], rows[:2], 144).shape == (72, 3)  # no more groups than sequences
    assert head_mean_samples(sums, rows, 36) == pytest.approx(sums.sum(0) / rows.sum(0))
