"""Learning rates are chosen from one grid that all arms share, and the choice is never at its edge."""

import math

from lm.statistics.tuning import (
    best_rate,
    mean_loss,
    tuning_outcome,
)

GRID = (1e-3, 2e-3, 4e-3)


def bowl(best: float, rates: tuple[float, ...] = GRID) -> dict[float, list[float]]:
    """Losses of two seeds, least at the rate `best`."""
    return {rate: [4 + math.log2(rate / best) ** 2 + seed for seed in (0.0, 0.1)] for rate in rates}


def test_each_arm_gets_the_rate_of_its_lowest_mean_loss():
    result = tuning_outcome((1e-3, 2e-3, 4e-3, 8e-3), {"a": bowl(2e-3, (*GRID, 8e-3)), "b": bowl(4e-3, (*GRID, 8e-3))})
    assert (result.rates, result.missing, result.at_edge) == ({"a": 2e-3, "b": 4e-3}, (), ())


def test_one_arm_at_the_edge_grows_the_grid_for_all():
    losses = {"a": bowl(2e-3), "b": bowl(8e-3)}
    assert tuning_outcome(GRID, losses).missing == (8e-3,)
    grid = (*GRID, 8e-3)
    assert tuning_outcome(GRID, {"a": bowl(2e-3, grid), "b": bowl(8e-3, grid)}).missing == (16e-3,)
    longest = (*grid, 16e-3)
    assert tuning_outcome(GRID, {"a": bowl(2e-3, longest), "b": bowl(8e-3, longest)}).rates == {"a": 2e-3, "b": 8e-3}


def test_whole_numbers_are_halved_to_whole_numbers_if_they_are_even():
    losses = {"a": bowl(1e-3, (4, 8, 16))}
    (lowest,) = tuning_outcome((4, 8, 16), losses).missing
    assert (lowest, type(lowest)) == (2, int)
    odd = {"a": bowl(1e-3, (3, 6, 12))}
    assert tuning_outcome((3, 6, 12), odd, lambda rate: isinstance(rate, int)).at_edge == ("a",)


def test_after_two_extensions_an_arm_at_the_edge_has_no_rate():
    most = (*GRID, 8e-3, 16e-3)
    result = tuning_outcome(GRID, {"a": bowl(2e-3, most), "b": bowl(1.0, most)})
    assert (result.rates, result.at_edge, result.missing) == ({"a": 2e-3}, ("b",), ())


def test_a_rate_at_which_one_seed_diverged_is_not_chosen():
    losses = bowl(4e-3, (*GRID, 8e-3))
    losses[4e-3][1] = math.inf
    losses[8e-3][0] = math.nan
    assert tuning_outcome((*GRID, 8e-3), {"a": losses}).rates == {"a": 2e-3}
    assert mean_loss([4.0, math.nan]) == math.inf


def test_an_arm_that_diverges_everywhere_has_no_rate():
    diverged = {rate: [math.inf, math.inf] for rate in GRID}
    result = tuning_outcome(GRID, {"a": bowl(2e-3), "b": diverged})
    assert (result.rates, result.missing, result.at_edge) == ({"a": 2e-3}, (), ("b",)), "a grid does not grow for it"


def test_of_equal_means_the_middle_of_the_grid_wins():
    equal = {rate: [4.0, 4.0] for rate in GRID}
    assert best_rate(equal, equal) == 2e-3
