"""The length at which a needle is lost, predicted from made-up scores."""

import math

import numpy as np
import pytest

from lm.diagnostics.retrieval_length import Retrieval, error, fitted_threshold, half_length, median_weights, observed_half_length

LENGTH = 64


def predicted(found: Retrieval, threshold: float) -> float:
    """Its 50 % length."""
    return half_length(median_weights(found, LENGTH), LENGTH, threshold)


def made(gap: float, slope: float = 0.0, spread: float = 0.0, questions: int = 5, needle: float = 0.0) -> Retrieval:
    """A needle `gap` above filler of Gaussian scores; the query sees 64 keys."""
    drawn = np.random.default_rng(0).standard_normal((questions, LENGTH - 1))
    n = np.full(questions, float(LENGTH))
    return Retrieval(
        np.full(questions, needle + gap), needle + spread * drawn, np.ones((questions, LENGTH - 1), bool), n, np.full(questions, slope)
    )


@pytest.mark.parametrize("gap", [6.0, 8.0, 11.0])
@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_softmax_loses_the_needle_where_filler_outweighs_it(gap: float, threshold: float):
    others = math.exp(gap) * (1 - threshold) / threshold  # keys of filler that leave the needle this weight
    assert predicted(made(gap), threshold) == pytest.approx(others + 1, rel=2e-3)
    assert made(gap).margin == pytest.approx(gap)


def test_the_spread_of_filler_counts_as_the_mean_of_its_exponentials():
    one = made(9.0, spread=1.5)
    mean = np.exp(one.others).mean(1)
    assert one.margin == pytest.approx(9.0 - np.log(mean))
    assert np.median(one.weight(predicted(one, 0.3) - LENGTH)) == pytest.approx(0.3, rel=1e-2)


def test_a_scale_that_grows_with_ln_n_never_loses_a_needle_that_is_far_enough_above():
    slope = 1 / math.log(LENGTH)
    for gap, kept in ((1.1 * math.log(LENGTH), True), (0.9 * math.log(LENGTH), False)):  # s z* = 1 is the SSMax paper's threshold
        found = predicted(made(gap, slope), 0.4)
        assert math.isinf(found) == kept
    assert made(8.0, slope).weight(960.0) == pytest.approx(1 / (1 + 1023 * math.exp(-8 * math.log(1024) / math.log(64))), rel=1e-9)


def test_the_weight_grown_is_that_of_more_keys_of_the_same_scores():
    one = made(5.0, slope=0.24, spread=0.7)
    more, scale = 3 * (LENGTH - 1), 1 + 0.24 * math.log((LENGTH + 3 * (LENGTH - 1)) / LENGTH)
    odds = np.exp(scale * (one.others - one.needle[:, None]))
    assert one.weight(more) == pytest.approx(1 / (1 + 4 * odds.sum(1)))


def test_keys_that_are_not_visible_count_for_nothing():
    one = made(5.0)
    others = np.pad(one.others, ((0, 0), (0, 7)), constant_values=-np.inf)
    padded = Retrieval(one.needle, others, np.pad(one.is_filler, ((0, 0), (0, 7))), one.n, one.slope)
    assert padded.weight(100.0) == pytest.approx(one.weight(100.0))


def test_an_observed_length_is_interpolated_in_its_logarithm():
    assert observed_half_length([64, 128, 256], [1.0, 0.75, 0.25]) == pytest.approx(128 * math.sqrt(2))
    assert observed_half_length([64, 128, 256], [1.0, 0.9, 0.5]) == math.inf
    assert observed_half_length([64, 128], [0.3, 0.2]) == 64


def test_errors_are_octaves_and_of_censored_runs_what_is_known_to_be_wrong():
    assert error(512, 128, 2048) == 2
    assert error(512, math.inf, 2048) == 2
    assert error(4096, math.inf, 2048) == error(math.inf, math.inf, 2048) == 0


def test_a_threshold_is_fitted_where_it_predicts_best():
    runs = [made(gap) for gap in (6.0, 7.0, 8.0)]
    observed = [predicted(one, 0.2) for one in runs]
    assert fitted_threshold(
        [median_weights(one, LENGTH) for one in (*runs, made(30.0))], [*observed, math.inf], LENGTH, 2048
    ) == pytest.approx(0.2, abs=0.02)
