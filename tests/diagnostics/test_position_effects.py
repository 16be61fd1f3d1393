"""The fraction of the weights' variance that key position, or distance, explains, on weights made with a known
answer.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.diagnostics.sparsity import group_sums_and_counts, standardised_weights_and_mask, variance_explained

SEQUENCES, LENGTH = 24, 200
QUERIES = torch.arange(100, LENGTH, 2)
KEYS = torch.arange(LENGTH)
VISIBLE = QUERIES.unsqueeze(1) >= KEYS  # (T, S)
DISTANCE = (QUERIES.unsqueeze(1) - KEYS).clamp(min=0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


PLACES = (KEYS.expand_as(DISTANCE), DISTANCE, torch.arange(DISTANCE.numel()).view_as(DISTANCE))


def explained(weights: Tensor) -> list[float]:
    """By key position, by distance and by both, of weights (sequences, T, S)."""
    values, counts = standardised_weights_and_mask(weights, VISIBLE)
    sums = (group_sums_and_counts(values, counts, places, int(places.max()) + 1) for places in PLACES)
    return [float(variance_explained(part.numpy())) for part in sums]


SHAPE = SEQUENCES, len(QUERIES), LENGTH
CASES = {
    "key position": (drawn(LENGTH).expand(SHAPE), 1.0, 0.0, 1.0),
    "key position, each query its factor": (drawn(LENGTH) * drawn(SEQUENCES, len(QUERIES), 1, seed=1), 1.0, 0.0, 1.0),
    "distance": (drawn(LENGTH)[DISTANCE].expand(SHAPE), 0.0, 1.0, 1.0),
    "neither": (drawn(*SHAPE), 0.0, 0.0, 0.0),
    "content of the key, the same for all queries of a sequence": (
        drawn(SEQUENCES, 1, LENGTH).expand(SHAPE),
        0.0,
        0.0,
        0.0,
    ),
    "half of the variance": (drawn(LENGTH) + drawn(*SHAPE, seed=2), 0.5, 0.0, 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_effects_of_known_size_are_found(name: str):
    weights, *effects = CASES[name]
    assert explained(weights) == pytest.approx(effects, abs=0.03)


def test_a_decay_is_explained_by_distance_at_queries_within_a_factor_of_two():
    """Late keys are near to the queries that see them, so that key position explains much, but not all, of it."""
    by_key, by_distance, by_both = explained((0.95**DISTANCE).expand(SHAPE))
    assert by_both == pytest.approx(1, abs=1e-3)
    assert by_distance > 0.97
    assert 0.3 < by_key < 0.7


def test_one_sequence_equal_weights_and_values_that_are_not_finite_give_nothing():
    values, counts = standardised_weights_and_mask(drawn(1, *SHAPE[1:]), VISIBLE)
    assert np.isnan(variance_explained(group_sums_and_counts(values, counts, DISTANCE, LENGTH).numpy()))
    for weights in (torch.full((2, 8), 0.1), torch.tensor([[1.0, torch.nan, 0, 0, 0, 0, 0, 0]]), torch.zeros(1, 8)):
        values, counts = standardised_weights_and_mask(weights, torch.ones(8, dtype=torch.bool))
        assert not counts.any()
        assert (values == 0).all()
