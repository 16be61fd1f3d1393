"""The closed forms of S against sums, Monte Carlo and the figures of their source; moments of scores."""

import math

import pytest
import torch
from torch import Tensor

from lm.diagnostics.sparsity import (
    decay_sparsity,
    exp_sparsity,
    identity_sparsity,
    independent_features_sparsity,
    mean_over_rms_sparsity,
    relu2_sparsity,
    relu_sparsity,
)

SCORES = ((0.0, 1.0), (1.0, 1.0), (-1.0, 1.0), (-2.0, 1.0), (2.0, 0.5), (0.5, 2.0))  # beta, gamma
# S of 20,000,000 Gaussian scores at those
MEASURED = {
    "relu2": (0.40822, 0.61278, 0.20521, 0.07182, 0.90230, 0.46229),
    "identity": (0.79784, 0.82493, 0.82496, 0.90205, 0.97016, 0.79805),
    "exp": (0.60653, 0.60653, 0.60653, 0.60653, 0.88250, 0.13534),
    "relu": (0.56416, 0.78091, 0.30346, 0.11173, 0.97016, 0.62652),
}
MAPS = {"relu2": lambda z: z.relu().square(), "identity": lambda z: z, "relu": lambda z: z.relu(), "exp": torch.exp}
FORMS = {"relu2": relu2_sparsity, "identity": identity_sparsity, "relu": relu_sparsity}
FORMS["exp"] = lambda mean, std: exp_sparsity(std)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(weights: Tensor) -> Tensor:
    """S of weights that are all visible."""
    return mean_over_rms_sparsity(weights, torch.ones_like(weights, dtype=torch.bool))


def tensors(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms_are_what_gaussian_scores_give(name: str):
    noise = normal(300_000)
    for (beta, gamma), measured in zip(SCORES, MEASURED[name], strict=True):
        sparsity_of_form = FORMS[name](*tensors(beta, gamma)).item()
        assert sparsity_of_form == pytest.approx(measured, abs=2e-4)
        if name != "exp" or gamma < 2:  # so few keys lack the scores that matter there
            assert sparsity_of_form == pytest.approx(of(MAPS[name](beta + gamma * noise)).item(), abs=1e-2)


def test_far_ratios_and_equal_scores_have_their_limits():
    far, unit = torch.tensor([-1e9, -1e3, -20.0], dtype=torch.float64), torch.tensor(1.0)
    for form in (relu_sparsity, relu2_sparsity):
        assert (form(far, unit) >= 0).all()
        assert (form(far, unit) < 1e-40).all()
        assert form(*tensors(1e9, 1)).item() == pytest.approx(1)
    for name, form in FORMS.items():
        assert form(*tensors(2, 0)).item() == pytest.approx(1)
        assert form(*tensors(0, 0)).isnan() or name == "exp"
    near = torch.linspace(-19.9, -1, 500, dtype=torch.float64)
    for form in (relu_sparsity, relu2_sparsity):
        assert (form(near, unit).diff() > 0).all()  # no rounding errors where terms cancel


def test_independent_features_depend_on_the_ratio_of_standard_deviation_and_mean():
    """Not on their product."""
    keys = torch.distributions.Gamma(torch.tensor(0.3), torch.tensor(1.0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        features = keys.sample((200_000, 32)).double()
    query = normal(32, seed=4).abs()
    sparsity_of_form = independent_features_sparsity(query, features.mean(), features.std()).item()
    assert sparsity_of_form == pytest.approx(of(features @ query).item(), abs=1e-2)
    product = independent_features_sparsity(query, 1 / features.mean(), features.std()).item()
    assert abs(product - sparsity_of_form) > 0.03


@pytest.mark.parametrize(("decay", "n", "measured"), [
    (0.9, 10, 0.95790), (0.9, 100, 0.43588), (0.99, 1000, 0.44608), (0.5, 16, 0.43301), (0.999, 512, 0.98929),
])  # fmt: skip
def test_decay_is_the_direct_sum(decay: float, n: int, measured: float):
    sparsity_of_form = decay_sparsity(*tensors(math.log(decay), n)).item()
    assert sparsity_of_form == pytest.approx(measured, abs=1e-5)
    assert sparsity_of_form == pytest.approx(of(decay ** torch.arange(n, dtype=torch.float64)).item(), abs=1e-9)
    assert decay_sparsity(*tensors(0, n)).item() == 1
    assert decay_sparsity(*tensors(-1e-12, n)).item() == pytest.approx(1)


def test_sparsity_is_of_visible_keys_and_does_not_change_with_a_factor():
    weights = torch.tensor([[1.0, 1, 1, 9], [0, 5, 0, 9], [0, 0, 0, 9], [1e-30, -1e-30, 1e-30, 9]])
    visible = torch.tensor([True, True, True, False])
    torch.testing.assert_close(
        mean_over_rms_sparsity(weights, visible), torch.tensor([1, 1 / math.sqrt(3), torch.nan, 1]), equal_nan=True
    )
    a = normal(5, 100).softmax(-1)
    torch.testing.assert_close(100 * of(a) ** 2, 1 / a.square().sum(-1))
