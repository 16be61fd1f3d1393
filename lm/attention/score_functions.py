"""Functions of a single score: elementwise attention is made of them, and rows of others are, up to a factor of each row."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class ScoreFunction(ABC):
    """A function f of a score, as defined and in place for tiles; `kind` names it to the Triton kernels."""

    kind: str

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """f(z), the definition."""

    @abstractmethod
    def value_(self, z: Tensor) -> Tensor:
        """f(z); overwrites z."""

    @abstractmethod
    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """(f(z), grad x f'(z)); overwrites z and grad."""


class Relu(ScoreFunction):
    """max(z, 0)."""

    kind = "relu"

    def __call__(self, z: Tensor) -> Tensor:
        return z.relu()

    def value_(self, z: Tensor) -> Tensor:
        return z.relu_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return z.relu_(), grad.mul_(z > 0)


class Relu2(ScoreFunction):
    """max(z, 0)^2."""

    kind = "relu2"

    def __call__(self, z: Tensor) -> Tensor:
        return z.relu().square()

    def value_(self, z: Tensor) -> Tensor:
        return z.relu_().square_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        z.relu_()
        grad.mul_(z).mul_(2)
        return z.square_(), grad


class Sigmoid(ScoreFunction):
    """1 / (1 + e^-z)."""

    kind = "sigmoid"

    def __call__(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def value_(self, z: Tensor) -> Tensor:
        return z.sigmoid_()

    def derivative_(self, z: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        z.sigmoid_()
        grad.mul_(z)
        return z, grad.addcmul_(grad, z, value=-1)


# By `Normalizer.score_map`. Scores that are products of non-negative features are their own map, and have closed forms of their own.
SCORE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "relu2": Relu2(),
    "relu": Relu(),
    "sigmoid": Sigmoid(),
    "identity": lambda z: z,
    "features": lambda z: z,
}
