"""How concentrated attention is, S = E|a| / sqrt(E[a^2]) of a query's weights a, and what S is for Gaussian scores, in closed form.

S lies within (0, 1]: 1 where all weights are equal, 1 / sqrt(n) where one of n keys has all the weight; it does not change with a
factor on the weights. The closed forms (after Su, kexue.fm 9889) are those of
infinitely many keys whose scores are beta + gamma eps, eps ~ N(0, 1): beta and gamma are the mean and the standard deviation of a
query's scores, after every scale on them. All functions are elementwise in tensors of any shape, fp32 or wider, and give NaN where
they are not defined.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOWEST_RATIO = -20.0  # beta / gamma: S of relu and relu^2 is below 1e-40 from there on, and its terms cancel to rounding error


@dataclass(frozen=True)
class Moments:
    """Moments of the scores of each query over the keys that it sees.

    Attributes:
        mean: beta.
        std: gamma, the root of the mean squared deviation (divided by n, as S is).
        skew: third standardised moment, 0 for Gaussian scores; NaN where all scores are equal.
        excess_kurtosis: fourth standardised moment minus 3, 0 for Gaussian scores; NaN where all scores are equal.
    """

    mean: Tensor
    std: Tensor
    skew: Tensor
    excess_kurtosis: Tensor


def score_moments(scores: Tensor, visible: Tensor) -> Moments:
    """Moments over the last dimension of scores (..., S), of the keys where `visible` (broadcastable to it) is true."""
    n = visible.sum(-1)
    mean = scores.masked_fill(~visible, 0.0).sum(-1) / n
    deviation = (scores - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
    std = (deviation.square().sum(-1) / n).sqrt()
    standard = deviation / std.masked_fill(std == 0, math.nan).unsqueeze(-1)
    cube = standard * standard * standard
    return Moments(mean, std, cube.sum(-1) / n, (cube * standard).sum(-1) / n - 3)


def sparsity(weights: Tensor, visible: Tensor) -> Tensor:
    """S of each query's weights (..., S) over the keys that it sees; NaN where all of them are 0."""
    a = weights.abs().masked_fill(~visible, 0.0)
    a = a / a.amax(-1, keepdim=True)  # squares of small weights would underflow
    return a.sum(-1) / (a.square().sum(-1) * visible.sum(-1)).sqrt()


def exp_sparsity(std: Tensor) -> Tensor:
    """S of e^score: exp(-gamma^2 / 2), whatever the mean. Holds for n keys while gamma < `condensation_scale(n)`."""
    return (-std.square() / 2).exp()


def condensation_scale(n: Tensor) -> Tensor:
    """sqrt(ln n / 2), the standard deviation of n scores from which on the largest weights dominate E[a^2] of e^score.

    E[a^2] = e^(2 beta + 2 gamma^2) is made by scores 2 gamma standard deviations above the mean, and the largest of n Gaussian scores
    is sqrt(2 ln n) above it: with larger gamma n keys do not contain what the expectation is made of, and S stays above its closed form.
    """
    return (n.log() / 2).sqrt()


def simulated_sparsity(std: Tensor, n: int, draws: int = 64, seed: int = 0) -> Tensor:
    """S of e^score for n Gaussian scores of each standard deviation in `std` (K,), also beyond condensation: the mean over draws."""
    drawn = torch.randn(draws, n, generator=torch.Generator().manual_seed(seed), dtype=std.dtype)
    everywhere = torch.ones(n, dtype=torch.bool)
    return torch.stack([sparsity((one * drawn).softmax(-1), everywhere).mean() for one in std])


def relu_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """S of relu(score), with r = beta / gamma: (r Phi + phi) / sqrt((r^2 + 1) Phi + r phi); 1 / sqrt(pi) at r = 0."""
    r, below, density = _ratio(mean, std)
    return (r * below + density) / ((r**2 + 1) * below + r * density).sqrt()


def relu2_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """S of relu(score)^2: ((r^2 + 1) Phi + r phi) / sqrt((r^4 + 6 r^2 + 3) Phi + (r^3 + 5 r) phi); 1 / sqrt(6) at r = 0."""
    r, below, density = _ratio(mean, std)
    return ((r**2 + 1) * below + r * density) / ((r**4 + 6 * r**2 + 3) * below + (r**3 + 5 * r) * density).sqrt()


def identity_sparsity(mean: Tensor, std: Tensor) -> Tensor:
    """S of the scores themselves, which may be negative: at least sqrt(2 / pi) = .798, so such weights cannot concentrate."""
    beta, gamma = mean.double(), std.double()
    absolute = math.sqrt(2 / math.pi) * gamma * (-(beta / gamma).square() / 2).exp() + beta * torch.erf(beta / gamma / math.sqrt(2))
    return absolute / (beta.square() + gamma.square()).sqrt()


def linear_sparsity(query: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """S of products query.key of non-negative features, exact: 1 / sqrt(1 + q.Sigma q / (q.mu)^2).

    query: (..., D), mean: (..., D) and covariance: (..., D, D) of the keys' features.
    """
    variance = (query.unsqueeze(-2) @ covariance @ query.unsqueeze(-1)).squeeze((-2, -1))
    return 1 / (1 + variance / (query * mean).sum(-1).square()).sqrt()


def independent_features_sparsity(query: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """`linear_sparsity` if a key's D features are independent, each of this mean and standard deviation.

    1 / sqrt(1 + ((sigma / mu) ||q||_2 / ||q||_1)^2), where the ratio of the norms of query (..., D) lies within 1 / sqrt(D) and 1.
    """
    return 1 / (1 + (std / mean * query.norm(dim=-1) / query.norm(1, -1)).square()).sqrt()


def decay_sparsity(log_decay: Tensor, n: Tensor) -> Tensor:
    """S of n weights g^t, t = 0 ... n - 1 tokens back, g = e^log_decay <= 1: 1 for g = 1, near sqrt((1 + g) / (n (1 - g))) for large n.

    S of products of independent weights is the product of their S: it goes with that of content, whatever the content's map.
    """
    log_g, n = torch.broadcast_tensors(log_decay.double(), n.double())
    g = log_g.exp()
    square = torch.expm1(n * log_g) / (n * torch.expm1(log_g)) * (1 + g) / (1 + (n * log_g).exp())
    return torch.where(log_g == 0, 1.0, square).sqrt()


def _ratio(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r = beta / gamma in fp64, the normal distribution Phi(r) and its density phi(r)."""
    r = (mean.double() / std.double()).clamp(LOWEST_RATIO, 1e6)  # 1e6, or gamma = 0: S is 1
    density = (-r.square() / 2).exp() / math.sqrt(2 * math.pi)
    tail = density * math.sqrt(math.pi / 2) * torch.special.erfcx(-r.clamp(max=0.0) / math.sqrt(2))  # exact where Phi's terms cancel
    return r, torch.where(r < 0, tail, torch.special.ndtr(r)), density
