"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lm.config.training_config import Muon

MATRICES = "matrices"  # the group of parameters that Muon updates


class MuonAndAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the group `matrices`, each projection of a fused matrix apart, `torch.optim.AdamW` for the other groups.

    torch's Muon orthogonalises whole parameters. It is given leaves that are views of the projections' rows in weight, gradient and
    momentum, so that its own routine, which has no public name, is what runs. The state of a matrix is one `momentum_buffer`
    of its shape, in fp32; that of other parameters is AdamW's.

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
        states: dict[Tensor, dict[str, Tensor]] = {}
        for name, matrix in zip(group["param_names"], group["params"], strict=True):
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            for rows in self.projections.get(name, {"all": slice(None)}).values():
                projection = matrix.detach()[rows]
                projection.grad = matrix.grad[rows]
                states[projection] = {"momentum_buffer": state["momentum_buffer"][rows]}
        if states:
            muon = torch.optim.Muon(
                list(states),
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=self.options.momentum,
                nesterov=self.options.nesterov,
                ns_steps=self.options.ns_steps,
                adjust_lr_fn=self.options.adjust_lr,
            )
            muon.state.update(states)
            muon.step()
