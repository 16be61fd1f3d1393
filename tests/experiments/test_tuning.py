"""Learning rates are chosen from one grid that all arms share, and the choice is never at its edge."""

import math

from lm.experiments.procedure import best_rate, final_run_rates, mean_cost, tuned_rates

GRID = (1e-3, 2e-3, 4e-3)


def bowl(best: float, rates: tuple[float, ...] = GRID) -> dict[float, list[float]]:
    """Losses of two seeds, least at the rate `best`."""
    return {rate: [4 + math.log2(rate / best) ** 2 + seed for seed in (0.0, 0.1)] for rate in rates}


def test_each_arm_gets_the_rate_of_its_lowest_mean_cost():
    grid = (*GRID, 8e-3)
    assert tuned_rates(grid, {"a": bowl(2e-3, grid), "b": bowl(4e-3, grid)}) == ({"a": 2e-3, "b": 4e-3}, ())


def test_one_arm_at_the_edge_grows_the_grid_for_all():
    losses = {"a": bowl(2e-3), "b": bowl(8e-3)}
    assert tuned_rates(GRID, losses) == ({}, (8e-3,))
    grid = (*GRID, 8e-3)
    assert tuned_rates(GRID, {"a": bowl(2e-3, grid), "b": bowl(8e-3, grid)}) == ({}, (16e-3,))
    longest = (*grid, 16e-3)
    assert tuned_rates(GRID, {"a": bowl(2e-3, longest), "b": bowl(8e-3, longest)})[0] == {"a": 2e-3, "b": 8e-3}


def test_after_two_extensions_an_arm_at_the_edge_has_no_rate():
    most = (*GRID, 8e-3, 16e-3)
    assert tuned_rates(GRID, {"a": bowl(2e-3, most), "b": bowl(1.0, most)}) == ({"a": 2e-3}, ())


def test_a_rate_at_which_one_seed_diverged_is_not_chosen():
    losses = bowl(4e-3, (*GRID, 8e-3))
    losses[4e-3][1] = math.inf
    losses[8e-3][0] = math.nan
    assert tuned_rates((*GRID, 8e-3), {"a": losses}) == ({"a": 2e-3}, ())
    assert mean_cost([4.0, math.nan]) == math.inf


def test_an_arm_that_diverges_everywhere_has_no_rate():
    diverged = {rate: [math.inf, math.inf] for rate in GRID}
    assert tuned_rates(GRID, {"a": bowl(2e-3), "b": diverged}) == ({"a": 2e-3}, ()), "a grid does not grow for it"


def test_of_equal_means_the_middle_of_the_grid_wins():
    equal = {rate: [4.0, 4.0] for rate in GRID}
    assert best_rate(equal, equal) == 2e-3


def test_the_baseline_is_trained_at_all_rates_that_tuning_chose():
    crossed = final_run_rates("a", {"a": 1, "b": 2, "c": 3, "d": 1})
    assert crossed == {"a": (1, 2, 3), "b": (2, 1), "c": (3, 1), "d": (1,)}
