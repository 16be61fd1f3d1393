"""Intervals that hold together, and those of bounded values: against scipy, statsmodels and direct simulation."""

import numpy as np
import pytest
from scipy.stats import beta, dunnett, t, ttest_1samp, ttest_ind

from lm.statistics.intervals import (
    MAX_CORRELATION,
    Family,
    bounded_mean_ends,
    cautious_mean_correlation,
    joint_tail_probability,
)
from lm.statistics.verdicts import UNTUNED_OBSTACLE, Comparison, comparison_family, judge_comparisons, stack_comparisons

TABLES = 500  # random tables of each design


def paired(values: np.ndarray) -> list[Comparison]:
    """The comparisons of all arms but the first with the first, (arms, seeds)."""
    return [Comparison(differences) for differences in values[1:] - values[0]]


def unpaired(arms: list[np.ndarray]) -> list[Comparison]:
    baseline, counts = arms[0][None], [min(len(arm), len(arms[0])) for arm in arms]
    return [
        Comparison(arm[:count] - arms[0][:count], unpaired_values=(arm[None], baseline))
        for arm, count in zip(arms[1:], counts[1:], strict=True)
    ]


def random_tables(seed: int):
    """Arms' values with a common effect of each seed, of various numbers, noise and differences."""
    random = np.random.default_rng(seed)
    for _ in range(TABLES):
        arms, seeds = random.integers(2, 7), random.integers(3, 12)
        noise = 10 ** random.uniform(-3, 1, (arms, 1))
        yield random.normal(size=seeds) + noise * random.normal(random.normal(size=(arms, 1)), 1, (arms, seeds))


@pytest.mark.slow
@pytest.mark.parametrize("is_paired", [True, False])
def test_intervals_and_p_are_those_of_scipys_t_tests_at_the_familys_level(is_paired: bool):
    random = np.random.default_rng(1)
    for values in random_tables(1):
        arms = values if is_paired else [arm[: random.integers(3, len(arm) + 1)] for arm in values]
        comparisons = dict(enumerate(paired(arms) if is_paired else unpaired(arms)))
        family = comparison_family(stack_comparisons(comparisons))
        for arm, verdict in zip(arms[1:], judge_comparisons(comparisons, 0.1).values(), strict=True):
            test = ttest_1samp(arm - arms[0], 0) if is_paired else ttest_ind(arm, arms[0], equal_var=False)  # Welch's
            for interval, alpha in ((verdict.interval, family.comparison_alpha), (verdict.unadjusted_interval, 0.05)):
                expected = test.confidence_interval(1 - alpha)
                assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
            assert verdict.p == pytest.approx(float(family.joint_p(test.pvalue)), rel=1e-9)


@pytest.mark.parametrize("arms", [2, 4, 9])
def test_joint_p_of_arms_that_scatter_alike_is_dunnetts(arms: int):
    """Dunnett's test pools the spread of all arms. Where samples have the same spread, the statistics are the same."""
    random = np.random.default_rng(arms)
    for _ in range(10):
        values = random.normal(size=(arms + 1, 400))
        values -= values.mean(1, keepdims=True)
        values = values / values.std(1, ddof=1, keepdims=True) + random.normal(0, 0.12, (arms + 1, 1))
        found = [verdict.p for verdict in judge_comparisons(dict(enumerate(unpaired([*values]))), 0.1).values()]
        expected = dunnett(*values[1:], control=values[0], rng=np.random.default_rng(0)).pvalue
        assert found == pytest.approx(expected, rel=0.03, abs=2e-3)


@pytest.mark.parametrize(("count", "seeds", "correlation"), [(4, 5, 0.5), (10, 3, 0.3), (3, 10, 0.5), (28, 9, 0.2)])
def test_the_joint_distribution_is_that_of_simulated_seeds(count: int, seeds: int, correlation: float):
    random, trials, hits, p = np.random.default_rng(0), 20_000, 0, 0.2 / count
    for _ in range(5):
        factor = random.standard_normal((trials // 5, 1, seeds))
        own = random.standard_normal((trials // 5, count, seeds))
        values = np.sqrt(correlation) * factor + np.sqrt(1 - correlation) * own
        statistics = values.mean(-1) / values.std(-1, ddof=1) * np.sqrt(seeds)
        hits += (np.abs(statistics).max(1) > t.ppf(1 - p / 2, seeds - 1)).sum()
    expected = joint_tail_probability(p, count, seeds - 1, correlation)
    assert hits / trials == pytest.approx(expected, abs=3.5 * np.sqrt(expected / trials))
    family = Family(0, ((count, seeds - 1, correlation),))
    assert float(family.joint_p(p)) == pytest.approx(expected, rel=1e-4)
    assert 0.05 / count < Family(count).comparison_alpha < family.comparison_alpha < 0.05
    assert float(family.joint_p(family.comparison_alpha)) == pytest.approx(0.05)
    assert joint_tail_probability(0.01, 1, seeds - 1, correlation) == pytest.approx(0.01, rel=1e-6)


def test_independent_comparisons_are_adjusted_as_by_statsmodels():
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    p = np.random.default_rng(0).uniform(0, 0.2, 7)
    assert Family(7).joint_p(p) == pytest.approx(multitest.multipletests(p, method="sidak")[1])


def test_the_correlation_is_estimated_cautiously():
    random = np.random.default_rng(0)
    means = {}
    for truth in (0.0, 0.3, 0.5):
        estimates = []
        for _ in range(300):
            factor = np.sqrt(truth) * random.standard_normal((1, 6))
            estimates.append(cautious_mean_correlation(factor + np.sqrt(1 - truth) * random.standard_normal((5, 6))))
        assert all(0 <= estimate <= MAX_CORRELATION for estimate in estimates)
        means[truth] = np.mean(estimates)
    assert means[0.0] < 0.05
    assert 0.05 < means[0.3] < 0.3
    assert means[0.3] < means[0.5] < 0.5
    assert cautious_mean_correlation(np.array([[1.0, 2, 4, 3]] * 3)) == MAX_CORRELATION
    assert cautious_mean_correlation(np.array([[1.0, 1, 1], [1, 2, 5]])) == 0


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (6, 9), (1, 16)])
def test_bounded_ends_of_answers_are_clopper_and_pearsons(right: int, count: int):
    values = np.repeat([0.0, 1.0], [count - right, right])
    low = beta.ppf(0.025, right, count - right + 1) if right else 0.0
    high = beta.ppf(0.975, right + 1, count - right) if right < count else 1.0
    assert bounded_mean_ends(values, 0, 1, 0.025) == pytest.approx((low, high), abs=1e-7)


def test_bounded_ends_of_agreeing_seeds_are_where_a_failure_can_be_missed():
    for seeds in (3, 5, 20):
        end = 1 - 0.025 ** (1 / seeds)
        assert bounded_mean_ends(np.zeros(seeds), -1, 1, 0.025) == pytest.approx((-end, end), abs=1e-7)
    values = np.random.default_rng(0).uniform(-1, 1, (3, 7))
    low, high = bounded_mean_ends(values, -1, 1, 0.005)
    assert low == pytest.approx(-bounded_mean_ends(-values, -1, 1, 0.005)[1], abs=1e-7)
    weights = np.random.default_rng(0).dirichlet(np.ones(8), 200_000)
    assert high[0] == pytest.approx(np.quantile(weights @ np.append(values[0], 1), 0.995), abs=0.003)


def accuracy(values: list[float]) -> Comparison:
    return Comparison(values, higher_is_better=True, possible_range=(-1.0, 1.0))


def test_equivalence_of_accuracies_takes_seeds_enough_to_see_one_fail():
    """(1 - M)^n is at most the alpha of a comparison in its family."""
    for margin, count in ((0.25, 1), (0.25, 4), (0.1, 1)):
        family = Family(count)
        fewest = next(n for n in range(3, 99) if (1 - margin) ** n < family.comparison_alpha)
        for seeds in (fewest - 1, fewest):
            values = accuracy([0.0] * seeds)
            others = [Comparison((), obstacle=UNTUNED_OBSTACLE)] * (count - 1)
            verdict = judge_comparisons(dict(enumerate([values, *others])), margin)[0]
            assert verdict.kind == ("undecided" if seeds < fewest else "no difference above margin")
            assert verdict.interval.is_bounded
            assert seeds == fewest or verdict.reason.endswith(f"to leave this out takes at least {fewest}")


def test_seeds_that_agree_on_a_large_difference_leave_out_0_and_no_more():
    verdict = judge_comparisons({"a": accuracy([1.0] * 6)}, 0.25)["a"]
    assert verdict.statement_with_seeds == "better, perhaps by less than 0.25 (6 seeds)"
    assert verdict.interval.as_list() == pytest.approx([1.0, 2 * 0.025 ** (1 / 6) - 1, 1.0], rel=1e-6)
    small = judge_comparisons({"a": accuracy([1 / 128] * 6)}, 0.25)["a"]
    assert (small.kind, small.p) == ("better", 2**-5)
    assert 0 < small.interval.low < 1e-6
    assert small.interval.high > 0.25


@pytest.mark.parametrize("seeds", [5, 11])
def test_unpaired_accuracies_take_twice_the_care_as_either_arm_may_fail(seeds: int):
    arm = np.ones((1, seeds))
    comparison = Comparison(
        [[[0.0] * seeds]], higher_is_better=True, unpaired_values=(arm, arm), possible_range=(0.0, 1.0)
    )
    verdict = judge_comparisons({"a": comparison}, 0.25)["a"]
    end = 1 - 0.025 ** (1 / seeds)
    assert verdict.interval.as_list() == pytest.approx([0, -end, end], abs=1e-7)
    assert verdict.kind == "undecided"
    assert verdict.reason.endswith("takes at least 13")
