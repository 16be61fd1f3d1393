"""A step of one size against the sign of a mean of gradients: docs/extending.md."""

from dataclasses import dataclass

import torch

from lm.config.training_config import Optimizer
from lm.schema import key


@dataclass
class SignMomentum(Optimizer):
    """A step of one size against the sign of a mean of gradients (arXiv 1802.04434)."""

    beta: float = key(0.9, "decay of the mean", ge=0, lt=1)
    weight_decay: float = key(0.1, "of matrices, embedding and head, times the rate", ge=0)

    def make(self, groups, decoder):
        return Signs(groups, {"beta": self.beta})


class Signs(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()  # the gradients
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.sign())
        return loss
