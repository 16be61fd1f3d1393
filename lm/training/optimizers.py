"""Optimizers: Muon, their builders, the groups of parameters, learning rates, and state by parameter name.

A new optimizer needs an options class, its row in `lm.config.training_config.OPTIMIZERS`, and a builder in `BUILDERS`. An optimizer that
treats projections separately finds them in the fused matrices with `lm.model.decoder.projections`.
"""

import copy
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from lm.config.training_config import AdamW, Groups, Muon, OptimConfig
from lm.config.tree import Config
from lm.model.decoder import Decoder, group_of, is_normalizer, projections
from lm.model.device import has_native_bf16
from lm.model.transfer import Scaling, scalings
from lm.runs.checkpoints import mismatch

MATRICES = "matrices"  # the group of parameters that Muon updates
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # Keller Jordan's coefficients of the Newton-Schulz iteration
EPS = 1e-7  # least norm that a matrix is divided by
BATCH_ELEMENTS = 2**24  # entries of the matrices that are orthogonalised together, to bound memory; the last matrix may exceed it


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the group `matrices`, each projection of a fused matrix separately, `torch.optim.AdamW` for the other groups.

    A projection gets the update of `torch.optim.Muon`, bit by bit on a CPU where products are in bf16 (tests/test_muon.py). torch's class
    makes one product at a time, at which threads wait for each other. This class orthogonalises projections of one shape together.
    It takes about `BATCH_ELEMENTS` entries at a time: a step's own memory is 12 to 22 bytes x these, or x the largest matrix's entries.
    The state of a matrix is one `momentum_buffer` of its shape, in fp32; other parameters have AdamW's state.

    Args: as for each of `BUILDERS`; Muon's options include AdamW's.
    """

    def __init__(self, options: Muon, groups: list[dict[str, object]], decoder: Decoder):
        self.options, self.projections = options, projections(decoder)
        self.adamw = adamw(options, [torch.empty(0)], decoder)  # gets this optimizer's groups and state at each step
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
        """Make a step of Muon on the projections of the group's matrices. Each step slices them anew, as the matrices may have moved."""
        momentum, batch, elements = self.options.momentum, [], 0
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
                batch.append((matrix[rows], mean[rows]))
            elements += mean.numel()
            if elements >= BATCH_ELEMENTS:
                self._update_batch(batch, group["lr"])
                batch, elements = [], 0
        self._update_batch(batch, group["lr"])

    def _update_batch(self, batch: list[tuple[Tensor, Tensor]], lr: float) -> None:
        """Update projections, those of one shape together; `batch`: pairs of a projection and its mean gradient."""
        pairs_by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for projection, mean in batch:
            pairs_by_shape.setdefault(mean.shape, []).append((projection, mean))
        for shape, pairs in pairs_by_shape.items():
            rate = lr * self.options.relative_rate(*shape)
            means = torch.stack([mean for _, mean in pairs])
            products = torch.bfloat16 if has_native_bf16("gpu" if means.is_cuda else "cpu") else torch.float32
            updates = orthogonalised(means, self.options.ns_steps, products)
            for (projection, _), update in zip(pairs, updates, strict=True):
                projection.sub_(update, alpha=rate)


def orthogonalised(matrices: Tensor, steps: int, products: torch.dtype) -> Tensor:
    """Approximate the nearest orthogonal matrix of each matrix: singular values, unless near 0, are brought to between 0.7 and 1.2.

    Args:
        matrices: (N, rows, columns), bfloat16.
        steps: number of Newton-Schulz iterations of degree 5, https://kellerjordan.github.io/posts/muon.
        products: the dtype of the factors of products, and of the result. In fp32, much faster where bf16 is emulated, values are
            rounded to bf16, too; only sums are made in another order.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().to(products)

    a, b, c = COEFFICIENTS
    tall = matrices.size(1) > matrices.size(2)
    x = (matrices.mT if tall else matrices).to(products)
    x = rounded(x / rounded(x.norm(dim=(1, 2), keepdim=True)).clamp(min=EPS))
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        x = rounded(torch.baddbmm(x, rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x.mT if tall else x


# ---------------------------------------------------------------- optimizers of a configuration


# An optimizer's state by parameter name; {} for a parameter without an update yet.
State = dict[str, dict[str, Tensor | float]]

GROUPS = tuple(group.name for group in fields(Groups))


def parameter_groups(decoder: Decoder, optim: OptimConfig) -> list[dict[str, object]]:
    """The trained parameters with their names, as torch's groups, none empty. `eps` is set only where it isn't the optimizer's epsilon.

    `lr_factor`: the factor on the schedule's learning rate. With `model.transfer` (`lm.model.transfer`), a group whose parameters have
    different factors is split into groups of the same `name`. A step's decay takes the same fraction of a weight as in the base model.
    """
    scalings_by_name = scalings(decoder, decoder.config, optim.optimizer.width_exponent) if decoder.config.transfer else {}
    parameters: dict[tuple[str, Scaling], list[tuple[str, Tensor]]] = {}
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            parameters.setdefault((group_of(name, parameter), scalings_by_name.get(name, Scaling())), []).append((name, parameter))

    def options(group: str, scaling: Scaling) -> dict[str, float]:
        settings = getattr(optim.groups, group)
        factors = {"weight_decay": optim.weight_decay(group) / scaling.lr, "lr_factor": settings.lr_factor * scaling.lr}
        if optim.optimizer.has_eps(group) and (settings.eps is not None or scaling.eps != 1):
            factors["eps"] = (settings.eps or optim.optimizer.eps) * scaling.eps
        return factors

    group_keys = sorted(parameters, key=lambda key: GROUPS.index(key[0]))
    return [{"name": group, "params": parameters[group, scaling], **options(group, scaling)} for group, scaling in group_keys]


def adamw(options: AdamW | Muon, groups: list, decoder: Decoder) -> torch.optim.AdamW:
    """AdamW; fused (one kernel over all parameters) where the device supports it."""
    can_fuse = next(decoder.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps, fused=can_fuse)


# Builders by the options' name: (options, groups of named parameters, decoder) -> optimizer.
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": MuonAndAdamW}


def make_optimizer(decoder: Decoder, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters; `set_rates` gives it learning rates."""
    options, groups = optim.optimizer, parameter_groups(decoder, optim)
    parameter_ids = {id(parameter) for group in groups for _, parameter in group["params"]}  # torch changes the groups
    builder = BUILDERS.get(options.name)
    optimizer = builder(options, groups, decoder) if builder else options.make(groups, decoder)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"`make` of {options.name} gives {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if parameter_ids != {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
        raise ValueError(f"`make` of {options.name} gives an optimizer of other parameters than those of `groups`: each must be trained")
    for group in optimizer.param_groups:
        group.setdefault("lr", 0.0)
    return optimizer


def freeze(decoder: Decoder, train_only: str | None) -> None:
    """Freeze all parameters but those that `train_only` names (None: freeze none)."""
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(not train_only or is_normalizer(name))


def set_rates(optimizer: torch.optim.Optimizer, config: Config, phase: int, step: int) -> None:
    """Give each group its learning rate for optimizer step `step` (0-based).

    The rates depend on the step alone, so that a schedule has no state to restore.
    """
    rate = config.optim.lr_at(step, config.trainer.max_steps)
    start = config.phase_ends[phase - 1] if phase else 0
    warmup_factor = min(1.0, (step - start + 1) / max(1, config.plan[phase].warmup_steps))  # warm-up of a new normalizer
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"] * (warmup_factor if group["name"] == "normalizer" else 1.0)


# ---------------------------------------------------------------- state by parameter name


def named_state(optimizer: torch.optim.Optimizer) -> State:
    pairs = [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]
    return {name: dict(optimizer.state.get(parameter, {})) for name, parameter in pairs}


def load_named_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Give a new optimizer a copy of `state`; parameters that `state` lacks start without state."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    states = {index: copy.deepcopy(state[name]) for index, name in enumerate(names) if state.get(name)}
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def state_after_swap(state: State) -> State:
    """The state that a swap keeps: all but the state of the normalizers, whose parameters are new."""
    return {name: entry for name, entry in state.items() if not is_normalizer(name)}


def implied_state(decoder: Decoder, config: Config) -> State:
    """The state of the configuration's optimizer after a step of a decoder on the meta device, where the step costs nothing.

    Freezes parameters of `decoder` that are not trained.
    """
    freeze(decoder, config.train_only)
    optimizer = make_optimizer(decoder, config.optim)
    for parameter in decoder.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step(lambda: None)
    decoder.zero_grad()
    return named_state(optimizer)


def optimizer_mismatch(decoder: Decoder, config: Config, state: State) -> str:
    """The first entry of `state` that doesn't fit the optimizer of this decoder on the meta device, and why; empty if all fit."""
    expected_state = implied_state(decoder, config)
    for name in {**expected_state, **state}:
        if name not in expected_state or name not in state:
            return f"{name} is {'missing' if name in expected_state else 'not trained'}"
        if not isinstance(state[name], dict):
            return f"{name} has {state[name]!r:.40} in place of optimizer state"
        if state[name] and (reason := mismatch(expected_state[name], state[name], "not part of its state")):
            return f"{name}: {reason}"
    return ""
