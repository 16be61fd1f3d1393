"""Jacobians of normalizers against singular values of dense ones, and the ceilings of Lemma 2 on random cases."""

import math

import pytest
import torch
from torch import Tensor

from lm.attention.catalogue import ENTRIES, make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer
from lm.diagnostics.lemmas import directions, finite_difference, spectral_norm

KEYS = 24


def softmax(temperature: float | Tensor):
    return lambda scores: (scores / temperature).softmax(-1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores_with_ties(rows: int, keys: int, seed: int) -> Tensor:
    """Gaussian scores, of which every other row has two equal ones far above the others: the worst case."""
    scores = 3 * torch.randn(rows, keys, generator=seeded(seed), dtype=torch.float64)
    scores[::2] = -20.0
    scores[::2, :2] = 0.0
    return scores


def made(name: str) -> tuple[Normalizer, AttentionLayout]:
    """A normalizer of two heads in fp64, and the layout of the last 4 of `KEYS` queries."""
    normalizer = make_normalizer(ENTRIES[name](), LayerSpec(2, 8, 16, 64)).double()
    return normalizer, AttentionLayout.full(KEYS).select(torch.arange(KEYS - 4, KEYS), KEYS)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_spectral_norm_is_the_largest_singular_value_of_every_normalizer(name: str):
    normalizer, layout = made(name)
    scores = torch.randn(1, 2, 4, KEYS, generator=seeded(), dtype=torch.float64) + 0.5

    def normalize(values: Tensor) -> Tensor:
        return normalizer.normalize(values, layout)

    norms = spectral_norm(normalize, scores, layout.visible(), seeded(1), steps=100)
    dense = torch.autograd.functional.jacobian(
        lambda values: normalize(values).sum((0, 1, 2)), scores
    )  # (S', 1, H, T, S)
    expected = torch.linalg.matrix_norm(dense.permute(1, 2, 3, 0, 4), 2)
    assert torch.allclose(norms, expected, rtol=2e-2)
    assert bool((norms <= expected * (1 + 1e-9)).all())


def test_of_softmax_it_is_below_half_the_inverse_temperature_in_2000_cases_and_reaches_it():
    scores = scores_with_ties(2_000, 40, 0)
    temperature = 10 ** (3 * torch.rand(2_000, 1, generator=seeded(1), dtype=torch.float64) - 2)
    norms = spectral_norm(softmax(temperature), scores, torch.tensor(True), seeded(2)) * temperature.squeeze(1)
    a = softmax(temperature)(scores)
    exact = torch.linalg.matrix_norm(torch.diag_embed(a) - a.unsqueeze(1) * a.unsqueeze(2), 2)
    assert norms.max().item() == pytest.approx(0.5, abs=1e-6)
    assert norms.max() <= 0.5 + 1e-12
    assert bool((norms <= exact * (1 + 1e-9) + 1e-15).all())
    assert (norms / exact)[exact > 1e-12].quantile(0.02) > 0.98
    entries = (torch.diag_embed(a) - a.unsqueeze(1) * a.unsqueeze(2)).abs().amax((1, 2))
    assert entries.max().item() == pytest.approx(0.25)  # what the published 1 / (4 T) bounds


def test_finite_differences_stay_below_their_ceiling_in_2000_cases_and_reach_it():
    worst = 0.0
    for number in range(20):
        temperature, step = (
            float(10 ** (4 * torch.rand((), generator=seeded(seed)) - 3)) for seed in (number, 100 + number)
        )
        scores = scores_with_ties(100, 40, number) * 0.5
        direction = directions(torch.tensor(True), scores.shape, seeded(number))
        direction[0] = 0.0
        direction[0, 0], direction[0, 1] = 0.5**0.5, -(0.5**0.5)  # the leading singular vector
        differences = finite_difference(softmax(temperature), scores, step, direction)
        ratio = (differences / min(1 / (2 * temperature), math.sqrt(2) / step)).max().item()
        assert ratio <= 1 + 1e-9
        worst = max(worst, ratio)
    assert worst > 0.99


def test_one_direction_says_far_less_than_the_spectral_norm():
    scores = torch.randn(64, 256, generator=seeded(), dtype=torch.float64)
    norm = spectral_norm(softmax(0.01), scores, torch.tensor(True), seeded(1))
    change = finite_difference(softmax(0.01), scores, 1e-6, directions(torch.tensor(True), scores.shape, seeded(2)))
    assert norm.mean() > 5 * change.mean()


def test_directions_leave_out_what_a_query_does_not_see():
    visible = torch.tensor([[True, True, False], [True, False, False]])
    vectors = directions(visible, torch.Size((4, 2, 3)), seeded())
    assert bool((vectors.masked_select(~visible) == 0).all())
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(4, 2, dtype=torch.float64))
