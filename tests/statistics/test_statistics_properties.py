"""Statistics by what they promise, recomputed from components that are known: whatever their code is, these hold."""

import numpy as np
import pytest
from scipy.stats import t as student

from lm.statistics.intervals import Estimate, estimate_over_seeds_and_documents
from lm.statistics.verdicts import Comparison, Verdict, judge_comparisons


def centred(count: int, seed: int) -> np.ndarray:
    """Numbers of mean 0 and sample variance 1."""
    numbers = np.random.default_rng(seed).normal(size=count)
    numbers -= numbers.mean()
    return numbers / numbers.std(ddof=1)


def crossed(seeds: int, documents: int, of_seeds: float, of_documents: float, of_both: float) -> Estimate:
    """The estimate from seeds and documents of mean 3, whose effects and interaction have exactly these standard
    deviations.
    """
    interaction = np.random.default_rng(2).normal(size=(seeds, documents))
    interaction -= interaction.mean(0) + interaction.mean(1, keepdims=True) - interaction.mean()
    interaction *= np.sqrt((seeds - 1) * (documents - 1) / (interaction**2).sum())
    values = 3 + of_seeds * centred(seeds, 0)[:, None] + of_documents * centred(documents, 1) + of_both * interaction
    return estimate_over_seeds_and_documents(values, np.ones(documents), np.arange(documents))


def test_the_interval_over_seeds_and_documents_counts_the_interaction_once():
    """The means of seeds and those of documents each hold the interaction: their variances' sum has it twice."""
    seeds, documents, a, b, c = 40, 60, 0.5, 0.6, 3.0
    estimate = crossed(seeds, documents, a, b, c)
    of_seeds, of_documents, of_both = a**2 / seeds, b**2 / documents, c**2 / (seeds * documents)
    assert of_both > 0.5 * of_seeds
    assert of_seeds + of_documents - of_both > 1.2 * max(of_seeds, of_documents), "no floor holds it"
    # Satterthwaite's
    degrees = (of_seeds + of_documents) ** 2 / (of_seeds**2 / (seeds - 1) + of_documents**2 / (documents - 1))
    half = student.ppf(0.975, degrees) * np.sqrt(of_seeds + of_documents - of_both)
    assert float(estimate.half_width()) == pytest.approx(half, rel=0.02)
    assert float(estimate.mean) == pytest.approx(3)


def test_without_noise_of_documents_the_interval_is_students_over_seeds_and_without_that_of_seeds_over_documents():
    for count, estimate in ((8, crossed(8, 12, 1.0, 0.0, 0.0)), (12, crossed(8, 12, 0.0, 1.0, 0.0))):
        assert float(estimate.half_width()) == pytest.approx(student.ppf(0.975, count - 1) / np.sqrt(count), rel=1e-6)


@pytest.mark.parametrize(("of_seeds", "of_documents", "counted"), [(0.01, 0.6, "documents"), (0.5, 0.01, "seeds")])
def test_the_interval_is_never_shorter_than_over_seeds_or_over_documents(
    of_seeds: float, of_documents: float, counted: str
):
    """Where the interaction is large, the three variances together would give less than each."""
    seeds, documents = 6, 10
    spreads = {"seeds": of_seeds**2 / seeds, "documents": of_documents**2 / documents}
    degrees = {"seeds": seeds - 1, "documents": documents - 1}[counted]
    half = student.ppf(0.975, degrees) * np.sqrt(spreads[counted])
    estimate = crossed(seeds, documents, of_seeds, of_documents, 3.0)
    assert float(estimate.half_width()) == pytest.approx(half, rel=0.02)


def differing(p: float, seeds: int, deviation: float = 0.01) -> np.ndarray:
    """Differences below 0 of which a two-sided t test gives p."""
    return deviation * (centred(seeds, seeds) + student.ppf(p / 2, seeds - 1) / np.sqrt(seeds))


@pytest.mark.parametrize(("sign", "claimed"), [(1, "better"), (-1, "worse")])
@pytest.mark.parametrize("rates", [2, 3])
def test_a_claim_pays_for_each_rate_that_the_seeds_may_choose_among(rates: int, sign: int, claimed: str):
    """The least p of several rates is at most 0.05 more often than once in 20: each counts."""
    seeds = 6
    flat = 0.01 * np.stack([centred(seeds, 10 + rate) for rate in range(rates - 1)])

    def verdict(p: float) -> Verdict:
        # (the arm's rates, one of the baseline's, seeds)
        by_rates = sign * np.stack([differing(p, seeds), *flat])[:, None]
        if sign < 0:  # the baseline is the one that may choose
            by_rates = by_rates.swapaxes(0, 1)
        comparison = Comparison(by_rates)
        return judge_comparisons({"arm": comparison}, 0.001)["arm"]

    comparison = Comparison(list(sign * differing(0.04, seeds)))
    assert judge_comparisons({"arm": comparison}, 0.001)["arm"].kind == claimed
    assert verdict(0.04).kind not in ("better", "worse")
    assert verdict(0.04).p == pytest.approx(0.04 * rates)
    assert verdict(0.9 * 0.05 / rates).kind == claimed
