"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lm.config.training_config import Muon

MATRICES = "matrices"  # the group of parameters that Muon updates
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration, by Keller Jordan's post
EPS = 1e-7  # least norm that a matrix is divided by


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the group `matrices`, each projection of a fused matrix apart, `torch.optim.AdamW` for the other groups.

    Updates are those of `torch.optim.Muon` on each projection, equal bit by bit on a CPU. That one makes a small product at a time, and
    threads wait for each other at each; here the projections of one shape are orthogonalised together. The state of a matrix is one
    `momentum_buffer` of its shape, in fp32; that of other parameters is AdamW's.

    Args:
        groups: torch's groups of named parameters, each with its `name`.
        options: of both.
        projections: rows of each fused matrix that are one projection, as `lm.model.decoder.projections`.
        fused: whether AdamW runs as one kernel over all parameters.
    """

    def __init__(
        self, groups: list[dict[str, object]], options: Muon, projections: Mapping[str, Mapping[str, slice]], fused: bool | None = None
    ):
        self.options, self.projections = options, projections
        of_adamw = {"betas": (options.beta1, options.beta2), "eps": options.eps, "fused": fused}
        self.adamw = torch.optim.AdamW([torch.empty(0)], **of_adamw)  # its groups and state are lent to it at each step
        super().__init__(groups, self.adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient. Returns the loss, if `closure` computes it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["name"] == MATRICES:
                self._update_matrices(group)
        self.adamw.state, self.adamw.param_groups = self.state, [group for group in self.param_groups if group["name"] != MATRICES]
        self.adamw.step()
        return loss

    def _update_matrices(self, group: dict[str, object]) -> None:
        """A step of Muon on the projections of the group's matrices. Their rows are looked up anew each time: weights may have moved."""
        momentum = self.options.momentum
        of_shape: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}  # projections and what their updates are made of
        for name, matrix in zip(group["param_names"], group["params"], strict=True):
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
            mean = (matrix.grad.lerp(mean, momentum) if self.options.nesterov else mean).bfloat16()
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            for rows in self.projections.get(name, {"all": slice(None)}).values():
                projections, means = of_shape.setdefault(mean[rows].shape, ([], []))
                projections.append(matrix[rows])
                means.append(mean[rows])
        for shape, (projections, means) in of_shape.items():
            rate = group["lr"] * _relative_rate(shape, self.options.adjust_lr)
            for projection, update in zip(projections, orthogonalised(torch.stack(means), self.options.ns_steps), strict=True):
                projection.sub_(update, alpha=rate)


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """About the nearest orthogonal matrix of each: its singular values are brought to between 0.7 and 1.2, but for those near 0.

    Args:
        matrices: (N, rows, columns), bfloat16.
        steps: of the Newton-Schulz iteration of degree 5, https://kellerjordan.github.io/posts/muon.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _relative_rate(shape: torch.Size, adjust_lr: str) -> float:
    """A projection's learning rate over its group's: for updates of AdamW's size (arXiv 2502.16982), or as in Keller Jordan's post."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
