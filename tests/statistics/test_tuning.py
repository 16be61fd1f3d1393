"""Learning rates are chosen from one grid that all arms share, and the choice is never at its edge."""

import math

import pytest

from lm.statistics.tuning import (
    best_rate,
    crossed_rates,
    grid_rates,
    mean_loss,
    rate_cell,
    rate_choice,
    rate_text,
    read_rate,
    tuning_outcome,
)

GRID = (1e-3, 2e-3, 4e-3)


def bowl(best: float, rates: tuple[float, ...] = GRID) -> dict[float, list[float]]:
    """Losses of two seeds, least at the rate `best`."""
    return {rate: [4 + math.log2(rate / best) ** 2 + seed for seed in (0.0, 0.1)] for rate in rates}


def test_each_arm_gets_the_rate_of_its_lowest_mean_loss():
    result = tuning_outcome(
        [(1e-3, 2e-3, 4e-3, 8e-3)], {"a": bowl(2e-3, (*GRID, 8e-3)), "b": bowl(4e-3, (*GRID, 8e-3))}
    )
    assert (result.rates, result.missing, result.at_edge) == ({"a": 2e-3, "b": 4e-3}, (), ())


def test_one_arm_at_the_edge_grows_the_grid_for_all():
    losses = {"a": bowl(2e-3), "b": bowl(8e-3)}
    assert tuning_outcome([GRID], losses).missing == (8e-3,)
    grid = (*GRID, 8e-3)
    assert tuning_outcome([GRID], {"a": bowl(2e-3, grid), "b": bowl(8e-3, grid)}).missing == (16e-3,)
    longest = (*grid, 16e-3)
    assert tuning_outcome([GRID], {"a": bowl(2e-3, longest), "b": bowl(8e-3, longest)}).rates == {"a": 2e-3, "b": 8e-3}


@pytest.mark.parametrize(("whole", "lowest"), [(False, (1.5, 0.75)), (True, (1,))])
def test_whole_numbers_are_halved_exactly_if_the_key_may_have_other_values(whole: bool, lowest: tuple[float, ...]):
    def possible(rate: float) -> bool:
        return not whole or isinstance(rate, int)

    grid = (3, 6, 12)
    for count in range(len(lowest)):
        losses = {"a": bowl(1e-3, (*lowest[:count], *grid))}
        assert tuning_outcome([grid], losses, possible).missing == (lowest[count],)


def test_after_two_extensions_an_arm_at_the_edge_has_no_rate():
    most = (*GRID, 8e-3, 16e-3)
    result = tuning_outcome([GRID], {"a": bowl(2e-3, most), "b": bowl(1.0, most)})
    assert (result.rates, result.at_edge, result.missing) == ({"a": 2e-3}, ("b",), ())


def test_a_rate_at_which_one_seed_diverged_is_not_chosen():
    losses = bowl(4e-3, (*GRID, 8e-3))
    losses[4e-3][1] = math.inf
    losses[8e-3][0] = math.nan
    assert tuning_outcome([(*GRID, 8e-3)], {"a": losses}).rates == {"a": 2e-3}
    assert mean_loss([4.0, math.nan]) == math.inf


def test_an_arm_that_diverges_everywhere_has_no_rate():
    diverged = {rate: [math.inf, math.inf] for rate in GRID}
    result = tuning_outcome([GRID], {"a": bowl(2e-3), "b": diverged})
    assert (result.rates, result.missing, result.at_edge) == ({"a": 2e-3}, (), ("b",)), "a grid does not grow for it"


DECAYS = (0.1, 0.2, 0.4, 0.8)  # of a second key, whose grid is of another length


def bowl_of_two(
    best: tuple[float, float], axes: tuple[tuple[float, ...], ...] = (GRID, DECAYS)
) -> dict[tuple[float, float], list[float]]:
    """Losses of two seeds, least at the pair of values `best`."""
    return {
        pair: [
            4 + sum(math.log2(value / centre) ** 2 for value, centre in zip(pair, best, strict=True)) + seed
            for seed in (0.0, 0.1)
        ]
        for pair in grid_rates(axes)
    }


def test_two_keys_are_tuned_together():
    result = tuning_outcome([GRID, DECAYS], {"a": bowl_of_two((2e-3, 0.4)), "b": bowl_of_two((2e-3, 0.2))})
    assert (result.rates, result.missing, result.at_edge) == ({"a": (2e-3, 0.4), "b": (2e-3, 0.2)}, (), ())
    assert crossed_rates("a", result.rates) == {"a": ((2e-3, 0.4), (2e-3, 0.2)), "b": ((2e-3, 0.2), (2e-3, 0.4))}


@pytest.mark.parametrize(
    ("best", "missing"),
    [
        ((2e-3, 0.8), [(rate, 1.6) for rate in GRID]),
        ((2e-3, 0.05), [(rate, 0.05) for rate in GRID]),
        ((8e-3, 0.2), [(8e-3, decay) for decay in DECAYS]),
        ((8e-3, 0.8), grid_rates([(8e-3,), (*DECAYS, 1.6)]) + [(rate, 1.6) for rate in GRID]),
    ],
    ids=["second key, above", "second key, below", "first key", "both"],
)
def test_a_grid_of_two_keys_grows_where_the_best_is_at_the_edge_of_one(best, missing):
    losses = {"a": bowl_of_two((2e-3, 0.2)), "b": bowl_of_two(best)}
    assert set(tuning_outcome([GRID, DECAYS], losses).missing) == set(missing)


def test_an_arm_at_the_edge_of_the_second_key_has_no_rate():
    most = [GRID, (*DECAYS, 1.6, 3.2)]
    result = tuning_outcome(
        [GRID, DECAYS], {"a": bowl_of_two((2e-3, 0.2), most), "b": bowl_of_two((2e-3, 100.0), most)}
    )
    assert (result.rates, result.at_edge, result.missing) == ({"a": (2e-3, 0.2)}, ("b",), ())
    assert rate_choice({"a": bowl_of_two((2e-3, 0.8))}).at_edge == ("a",), "as of a table"


def test_a_key_that_may_not_have_the_value_ends_its_own_growth_alone():
    losses = {"a": bowl_of_two((8e-3, 0.8))}
    assert set(tuning_outcome([GRID, DECAYS], losses, lambda rate: rate[1] <= 1).missing) == {
        (8e-3, decay) for decay in DECAYS
    }


def test_of_equal_means_the_middle_of_both_keys_wins():
    equal = {rate: [4.0, 4.0] for rate in grid_rates([GRID, (1.0, 2.0, 3.0)])}
    assert best_rate(equal, equal) == (2e-3, 2.0)


@pytest.mark.parametrize(
    ("rate", "cell", "words"),
    [
        (1.23456789e-3, 1.23456789e-3, "0.00123457"),
        ((1.23456789e-3, 16, 0.1), "0.00123456789 / 16 / 0.1", "0.00123457 / 16 / 0.1"),
    ],
)
def test_a_rate_is_read_back_from_its_cell_exactly(rate, cell, words):
    assert rate_cell(rate) == cell
    assert read_rate(cell) == rate
    assert rate_text(rate) == rate_text(cell) == words
