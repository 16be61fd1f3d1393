"""Theorems 1 and 2 of arXiv 2508.17821 against plain loops, their bounds on random cases, and the reference numbers."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from lm.diagnostics.limits import RandomKeys, TopKeys, many_key_counts, random_keys, top_distances, top_keys


def row(
    rng: np.random.Generator, keys: int, size: int, scale: float = 2.0, unit: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax weights of Gaussian scores (keys,), and Gaussian vectors (keys, size), of length 1 if `unit`."""
    x = rng.standard_normal((keys, size))
    if unit:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    a = np.exp(rng.standard_normal(keys) * scale)
    return a / a.sum(), x


def distance(a: np.ndarray, x: np.ndarray, indices: np.ndarray) -> float:
    """d~ as its definition says."""
    s = (a[indices, None] * x[indices]).sum(0)
    return sum(np.linalg.norm(a[i] * x[i] - s) for i in range(len(a)) if i not in set(indices.tolist()))


def top(a: np.ndarray, x: np.ndarray, counts: list[int], visible: np.ndarray | None = None) -> TopKeys:
    mask = torch.ones(1, len(a), dtype=torch.bool) if visible is None else torch.tensor(visible)[None]
    return top_keys(torch.tensor(a)[None], mask, torch.tensor(x), counts)


def drawn(a: np.ndarray, x: np.ndarray, counts: list[int], rows: int = 1) -> RandomKeys:
    mask = torch.ones(rows, len(a), dtype=torch.bool)
    draws = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    return random_keys(torch.tensor(a).expand(rows, -1), mask, torch.tensor(x), counts, draws)


def test_the_largest_weights_as_in_plain_loops():
    rng = np.random.default_rng(0)
    a, x = row(rng, 50, 8, unit=False)
    counts = [1, 3, 8, 49]
    result = top(a, x, counts)
    for index, count in enumerate(counts):
        best, far_keys = np.argsort(-a)[:count], np.argsort(-a)[count:]
        s = (a[best, None] * x[best]).sum(0)
        far = np.linalg.norm(a[:, None] * x - s, axis=1)
        r, mass, longest = far[far_keys].min(), a[best].sum(), np.linalg.norm(x[best], axis=1).max()
        gap = np.linalg.norm(x[far_keys][:, None] - x[best], axis=-1).max()
        pairs = np.linalg.norm(x[best][:, None] - x[best], axis=-1)
        delta = pairs[np.triu_indices(count, 1)].min(initial=np.inf) if count > 1 else 0.0
        xi = []
        for i in range(count):
            rest = np.delete(a[best], i)
            xi.append(
                np.sqrt(
                    longest**2 * (rest**2).sum()
                    + max(longest**2 - delta**2 / 2, 0) * (rest.sum() ** 2 - (rest**2).sum())
                )
            )
        xi = np.array(xi)
        assert result.distance[index, 0].item() == pytest.approx(distance(a, x, best), rel=1e-9)
        assert result.bound[index, 0].item() == pytest.approx(
            (1 - mass) * gap + ((50 - count + 1) * mass - 1) * longest, rel=1e-9
        )
        assert result.separable[index, 0].item() == pytest.approx((far[best] <= r).mean())
        assert result.upper[index, 0].item() == pytest.approx(
            np.exp(-(np.maximum(xi - r, 0) ** 2) / (2 * longest**2)).mean(), rel=1e-9
        )
        assert result.lower[index, 0].item() == pytest.approx(max(0, 1 - xi.mean() / r), rel=1e-9, abs=1e-12)
        distances = top_distances(torch.tensor(a)[None], torch.ones(1, 50, dtype=torch.bool), torch.tensor(x), counts)
        assert torch.equal(distances, result.distance)
        assert set(result.top_mask[index, 0].nonzero().ravel().tolist()) == set(best.tolist())


def test_the_bound_on_the_distance_of_the_largest_weights_holds_in_2000_cases():
    rng = np.random.default_rng(1)
    tightest = 0.0
    for _ in range(100):  # each with twenty rows of weights
        keys, size = int(rng.integers(4, 120)), int(rng.integers(2, 48))
        _, x = row(rng, keys, size, unit=rng.random() < 0.5)
        weights = torch.tensor(rng.standard_normal((20, keys)) * rng.uniform(0.1, 6)).softmax(-1)
        result = top_keys(
            weights,
            torch.ones_like(weights, dtype=torch.bool),
            torch.tensor(x * rng.uniform(0.1, 3)),
            [int(rng.integers(1, keys))],
        )
        ratio = (result.distance / result.bound).max().item()
        assert ratio <= 1 + 1e-9
        tightest = max(tightest, ratio)
    assert tightest > 0.9  # the bound is no formality


def test_the_bound_holds_for_weights_that_do_not_sum_to_one():
    rng = np.random.default_rng(2)
    for factor in (0.01, 0.5, 30.0):
        a, x = row(rng, 60, 8)
        result = top(a * factor, x, [1, 5, 20])
        assert bool((result.distance <= result.bound * (1 + 1e-9)).all())


def test_expectations_over_random_keys_enclose_the_mean_of_draws():
    rng = np.random.default_rng(3)
    a, x = row(rng, 40, 12)
    counts = [1, 3, 10, 20, 36]
    result = drawn(a, x, counts, rows=4_000)
    mean = result.sampled.mean(1)
    error = result.sampled.std(1) / 4_000**0.5
    for index, count in enumerate(counts):
        naive = np.array([distance(a, x, rng.permutation(40)[:count]) for _ in range(300)])
        assert abs(mean[index].item() - naive.mean()) < 5 * naive.std() / 300**0.5 + 1e-9
    assert bool((result.corrected[:, 0] < mean + 4 * error).all())
    assert bool((mean < result.upper[:, 0] + 4 * error).all())
    assert bool((result.uncorrected[:, 0] > 2 * mean)[:4].all())  # the uncorrected form is 2 to 10 times too large


def test_expectations_as_the_closed_forms_say():
    rng = np.random.default_rng(4)
    a, x = row(rng, 30, 6, unit=False)
    counts = [1, 7, 29]
    result, y = drawn(a, x, counts), a[:, None] * x
    for index, count in enumerate(counts):
        c, share = count / 29, (30 - count) / 30
        corrected = share * np.linalg.norm((1 + c) * y - c * y.sum(0), axis=1).sum()
        uncorrected = share * np.linalg.norm((a[:, None] + c) * x - y.sum(0), axis=1).sum()
        upper = 0.0
        for i in range(30):
            rest = np.delete(y, i, 0)
            spread = count * (29 - count) / (29 * 28) * ((rest**2).sum() - (rest.sum(0) ** 2).sum() / 29)
            upper += share * np.sqrt((((1 + c) * y[i] - c * y.sum(0)) ** 2).sum() + spread)
        expected = {"corrected": corrected, "uncorrected": uncorrected, "upper": upper}
        for name, value in expected.items():
            assert getattr(result, name)[index, 0].item() == pytest.approx(value, rel=1e-9), name


def test_keys_that_a_query_does_not_see_change_nothing():
    rng = np.random.default_rng(5)
    a, x = row(rng, 30, 6)
    padded = np.concatenate((np.zeros(5), a, np.zeros(9)))
    far_away = np.concatenate((np.full((5, 6), 50.0), x, np.full((9, 6), -50.0)))
    mask = np.concatenate((np.zeros(5, bool), np.ones(30, bool), np.zeros(9, bool)))
    plain, other = top(a, x, [1, 4, 29]), top(padded, far_away, [1, 4, 29], mask)
    for name in ("distance", "bound", "separable", "lower", "upper"):
        assert torch.allclose(getattr(plain, name), getattr(other, name)), name


def test_more_keys_than_a_query_sees_are_no_number():
    rng = np.random.default_rng(6)
    a, x = row(rng, 8, 4)
    result = top(a, x, [7, 8, 9, 20])
    assert result.distance.isnan().ravel().tolist() == [False, False, True, True]
    assert result.distance[1].item() == 0  # nothing is left out
    assert result.separable.isnan().ravel().tolist() == [
        False,
        True,
        True,
        True,
    ]  # there is no other key to be nearer than
    assert drawn(a, x, [8, 9]).corrected.isnan().ravel().tolist() == [False, True]


def test_the_fraction_that_can_be_told_apart_falls_as_in_the_reference():
    """768-dimensional vectors on a sphere, 1,024 keys: 1.00, .98, .97, .85, .52 at N = 1, 4, 8, 16, 64."""
    x = torch.nn.functional.normalize(torch.randn(1024, 768, generator=torch.Generator().manual_seed(0)), dim=-1)
    weights = (2 * torch.randn(24, 1024, generator=torch.Generator().manual_seed(1))).softmax(-1)
    result = top_keys(weights, torch.ones_like(weights, dtype=torch.bool), x, [1, 4, 8, 16, 64])
    assert torch.allclose(result.separable.mean(1), torch.tensor([1.0, 0.98, 0.97, 0.85, 0.52]), atol=0.06)
    assert result.lower[2:].max() < 0.1  # all but vacuous from N = 8 on
    assert result.upper.min() > 0.95


def test_numbers_of_keys_grow_by_a_tenth():
    counts = many_key_counts(1200)
    assert counts[:12] == [*range(1, 11), 11, 12]
    assert counts[-1] == 300
    assert max(after / before for before, after in pairwise(counts[10:])) < 1.13
