"""This module has Muon, the builders of optimizers, groups of parameters, learning rates, and optimizer state by
parameter name.

A new optimizer needs an options class, its row in `lm.config.training_config.OPTIMIZERS`, and a builder in
`OPTIMIZER_BUILDERS`. An optimizer that treats projections separately finds them in the fused matrices with
`lm.model.decoder.projection_rows`.
"""

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from lm.config.training_config import AdamW, Muon, OptimConfig, ParameterGroups
from lm.config.tree import Config
from lm.model.decoder import Decoder, is_normalizer_parameter, parameter_group, projection_rows
from lm.model.device import describe_bf16_hardware

MATRIX_GROUP = "matrices"  # the group of parameters that Muon updates
NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Keller Jordan's coefficients of the Newton-Schulz iteration
NEWTON_SCHULZ_STEPS = 5
MIN_NORM = 1e-7  # least norm that a matrix is divided by
# entries of the matrices that are orthogonalised together, to bound memory; the last matrix may exceed it
MUON_BATCH_ELEMENTS = 2**24


class MuonAndAdamW(torch.optim.Optimizer):
    """This optimizer updates the group `matrices` with Muon and all other groups with `torch.optim.AdamW`.

    Projections that share a fused matrix, such as q, k and v, are updated separately. Each gets the update of
    `torch.optim.Muon`. On a CPU with products in bf16 the two updates are bit-equal (tests/training/test_muon.py).
    Unlike torch's class, which multiplies one matrix at a time, this class orthogonalises projections of one shape
    together, for speed.

    A stack of matrices, which are orthogonalised at once, grows until it has `MUON_BATCH_ELEMENTS` entries or more. A
    step needs 12 to 22 bytes for each entry of a stack. The state of a matrix is one `momentum_buffer` of its shape, in
    fp32; other parameters have AdamW's state.

    Arguments are the same as for every builder in `OPTIMIZER_BUILDERS`; Muon's options include AdamW's.
    """

    def __init__(self, options: Muon, groups: list[dict[str, object]], decoder: Decoder):
        self.options, self.projection_rows = options, projection_rows(decoder)
        self.adamw = make_adamw(
            options, [torch.empty(0)], decoder
        )  # gets this optimizer's groups and state at each step
        super().__init__(groups, self.adamw.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient. Return the loss if `closure` computes it."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            if group["name"] == MATRIX_GROUP:
                self._update_matrices(group)
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if group["name"] != MATRIX_GROUP]
        self.adamw.step()
        return loss

    def _update_matrices(self, group: dict[str, object]) -> None:
        """Update the matrices of a parameter group with Muon. Each step takes slices of projections anew, as the
        matrices may have moved in memory.
        """
        momentum, batch, n_elements = self.options.momentum, [], 0
        for name, matrix in zip(group["param_names"], group["params"], strict=True):
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            mean_gradient = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
            mean_gradient = matrix.grad.lerp(mean_gradient, momentum).bfloat16()  # Nesterov's
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            batch += [
                (matrix[rows], mean_gradient[rows])
                for rows in self.projection_rows.get(name, {"all": slice(None)}).values()
            ]
            n_elements += mean_gradient.numel()
            if n_elements >= MUON_BATCH_ELEMENTS:
                self._update_projections(batch, group["lr"])
                batch, n_elements = [], 0
        self._update_projections(batch, group["lr"])

    def _update_projections(self, projections_and_gradients: list[tuple[Tensor, Tensor]], lr: float) -> None:
        """Update projections, given in pairs of a projection and the momentum average of its gradients over steps
        (Nesterov's). Projections of one shape are processed together.
        """
        pairs_by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for projection, mean_gradient in projections_and_gradients:
            pairs_by_shape.setdefault(mean_gradient.shape, []).append((projection, mean_gradient))
        for shape, pairs in pairs_by_shape.items():
            step_size = lr * self.options.relative_rate(*shape)
            mean_gradients = torch.stack([mean_gradient for _, mean_gradient in pairs])
            product_dtype = (
                torch.bfloat16 if describe_bf16_hardware("gpu" if mean_gradients.is_cuda else "cpu") else torch.float32
            )
            updates = orthogonal_approximation(mean_gradients, product_dtype)
            for (projection, _), update in zip(pairs, updates, strict=True):
                projection.sub_(update, alpha=step_size)


def orthogonal_approximation(matrices: Tensor, product_dtype: torch.dtype) -> Tensor:
    """Approximate the orthogonal matrix nearest to each matrix, by Newton-Schulz iterations of degree 5
    (https://kellerjordan.github.io/posts/muon). Singular values not near 0 become values from 0.7 to 1.2.

    Args:
        matrices: (N, rows, columns), bfloat16.
        product_dtype: dtype of the factors in matrix products, and of the result. fp32 is much faster where bf16 is
            emulated; values are still rounded to bf16, so that results differ only by the order of sums.
    """

    def round_to_bf16(x: Tensor) -> Tensor:
        return x.bfloat16().to(product_dtype)

    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = (matrices.mT if is_tall else matrices).to(product_dtype)
    x = round_to_bf16(x / round_to_bf16(x.norm(dim=(1, 2), keepdim=True)).clamp(min=MIN_NORM))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = round_to_bf16(x @ x.mT)
        x = round_to_bf16(torch.baddbmm(x, round_to_bf16(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x.mT if is_tall else x


# ---------------------------------------------------------------- optimizers of a configuration


# An optimizer's state by parameter name; {} for a parameter without an update yet.
OptimizerState = dict[str, dict[str, Tensor | float]]

PARAMETER_GROUP_NAMES = tuple(group.name for group in fields(ParameterGroups))


def parameter_groups(decoder: Decoder, optim: OptimConfig) -> list[dict[str, object]]:
    """Return parameter groups in torch's format, with named trained parameters. A group's `lr_factor` multiplies the
    schedule's learning rate.
    """
    parameters: dict[str, list[tuple[str, Tensor]]] = {group: [] for group in PARAMETER_GROUP_NAMES}
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            parameters[parameter_group(name, parameter)].append((name, parameter))
    return [
        {
            "name": group,
            "params": members,
            "weight_decay": optim.weight_decay(group),
            "lr_factor": getattr(optim.groups, group).lr_factor,
        }
        for group, members in parameters.items()
        if members
    ]


def make_adamw(options: AdamW | Muon, groups: list, _decoder: Decoder) -> torch.optim.AdamW:
    """Return torch's AdamW with betas and epsilon of `options`, fused: one kernel updates all parameters."""
    return torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)


# Builders by the options' name: (options, groups of named parameters, decoder) -> optimizer.
OPTIMIZER_BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": make_adamw, "muon": MuonAndAdamW}


def make_optimizer(decoder: Decoder, optim: OptimConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer for the trained parameters. `set_learning_rates` sets its learning rates at each
    step.
    """
    options = optim.optimizer
    optimizer = OPTIMIZER_BUILDERS[options.name](options, parameter_groups(decoder, optim), decoder)
    for group in optimizer.param_groups:
        group.setdefault("lr", 0.0)
    use_named_state(optimizer)
    return optimizer


def freeze(decoder: Decoder, train_only: Literal["normalizer"] | None) -> None:
    """Freeze all parameters except the normalizers' if `train_only` is `normalizer`. If it is None, make all parameters
    trainable.
    """
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not train_only or is_normalizer_parameter(name))


def set_learning_rates(optimizer: torch.optim.Optimizer, config: Config, phase: int, step: int) -> None:
    """Give each group its learning rate for optimizer step `step` (0-based). The rate of the normalizers is multiplied
    by the warm-up of `phase`, which rises to 1 over the phase's `warmup_steps`.

    The rates depend on the step alone, so that a schedule has no state to restore.
    """
    learning_rate = config.lr_at(step)
    phase_start = config.phase_ends[phase - 1] if phase else 0
    # warm-up of a new normalizer
    warmup_factor = min(1.0, (step - phase_start + 1) / max(1, config.phases_or_default[phase].warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"] * (warmup_factor if group["name"] == "normalizer" else 1.0)


# ---------------------------------------------------------------- state by parameter name


# the entry of a checkpoint with the `state_dict` of each optimizer, of which a run has one
OPTIMIZER_STATES_KEY = "optimizer_states"


def use_named_state(optimizer: torch.optim.Optimizer) -> None:
    """Make `state_dict` and `load_state_dict` of an optimizer refer to parameters by name, not by number.

    A parameter that a loaded state lacks starts without state. Loading leaves the optimizer's options unchanged.
    """
    optimizer.register_state_dict_post_hook(lambda _, content: {**content, "state": state_by_name(optimizer)})
    optimizer.register_load_state_dict_pre_hook(_state_by_number)


def state_by_name(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state of each parameter by its name."""
    return {
        name: dict(optimizer.state.get(parameter, {}))
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }


def saved_optimizer_state(checkpoint: dict[str, object]) -> OptimizerState | None:
    """Return the optimizer's state by parameter name from a checkpoint; None if it has none."""
    (optimizer,) = checkpoint.get(OPTIMIZER_STATES_KEY) or [{}]
    return optimizer.get("state")


def _state_by_number(optimizer: torch.optim.Optimizer, content: dict[str, object]) -> dict[str, object]:
    """Return `content`, whose state is by parameter name, with state by parameter number, as torch loads it. The state
    is copied, as the loaded state may be mapped from a file.
    """
    names, state = [name for group in optimizer.param_groups for name in group["param_names"]], content["state"]
    numbered = {number: copy.deepcopy(state[name]) for number, name in enumerate(names) if state.get(name)}
    return {"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]}
