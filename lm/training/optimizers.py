"""Optimizers: their builders, the groups of parameters, learning rates, and state by parameter name.

A new optimizer is an options class and its row in `lm.config.training_config.OPTIMIZERS`, and a builder here in `BUILDERS`. One that
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
from lm.model.transfer import Scaling, scalings
from lm.training.muon import MuonAndAdamW

# An optimizer's state by parameter name; {} for a parameter without an update yet.
State = dict[str, dict[str, Tensor | float]]

GROUPS = tuple(group.name for group in fields(Groups))


def parameter_groups(decoder: Decoder, optim: OptimConfig) -> list[dict[str, object]]:
    """The trained parameters with their names, as torch's groups; those without any parameter are left out. `eps` where a group has one.

    `lr_factor`: on the schedule's learning rate. Where that is transferred (`lm.model.transfer`), parameters of one group that differ in
    their factors are groups of the same `name`; the fraction of a weight that a step's decay takes stays the base model's.
    """
    scaled = scalings(decoder, decoder.config, optim.optimizer.width_exponent) if decoder.config.transfer else {}
    found: dict[tuple[str, Scaling], list[tuple[str, Tensor]]] = {}
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            found.setdefault((group_of(name, parameter), scaled.get(name, Scaling())), []).append((name, parameter))

    def options(group: str, scaling: Scaling) -> dict[str, float]:
        own = getattr(optim.groups, group)
        made = {"weight_decay": optim.weight_decay(group) / scaling.lr, "lr_factor": own.lr_factor * scaling.lr}
        if optim.optimizer.has_eps(group) and (own.eps is not None or scaling.eps != 1):
            made["eps"] = (own.eps or optim.optimizer.eps) * scaling.eps
        return made

    ordered = sorted(found, key=lambda key: GROUPS.index(key[0]))
    return [{"name": group, "params": found[group, scaling], **options(group, scaling)} for group, scaling in ordered]


def adamw(options: AdamW, groups: list[dict[str, object]], decoder: Decoder) -> torch.optim.Optimizer:
    """AdamW; fused (one kernel over all parameters) where the device supports it."""
    return torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), eps=options.eps, fused=_can_fuse(decoder))


def muon(options: Muon, groups: list[dict[str, object]], decoder: Decoder) -> torch.optim.Optimizer:
    """Muon for matrices, each projection apart, and AdamW, as `adamw`, for the rest."""
    return MuonAndAdamW(groups, options, projections(decoder), fused=_can_fuse(decoder))


def _can_fuse(decoder: Decoder) -> bool:
    return next(decoder.parameters()).device.type in ("cpu", "cuda")


# Builders by the options' name: (options, groups of named parameters, decoder) -> optimizer.
BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}


def make_optimizer(decoder: Decoder, optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters; `set_rates` gives it learning rates."""
    return BUILDERS[optim.optimizer.name](optim.optimizer, parameter_groups(decoder, optim), decoder)


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
    warm = min(1.0, (step - start + 1) / max(1, config.plan[phase].warmup_steps))  # warm-up of a new normalizer
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"] * (warm if group["name"] == "normalizer" else 1.0)


# ---------------------------------------------------------------- state by parameter name


def named_state(optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's state by parameter name."""
    named = [pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]
    return {name: dict(optimizer.state.get(parameter, {})) for name, parameter in named}


def load_named_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Give a new optimizer a copy of `state`; parameters that `state` does not contain start without."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    known = {index: copy.deepcopy(state[name]) for index, name in enumerate(names) if state.get(name)}
    optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})


def after_swap(state: State) -> State:
    """The state that a swap keeps: all but that of the normalizers, whose parameters are new."""
    return {name: known for name, known in state.items() if not is_normalizer(name)}


def implied_state(decoder: Decoder, config: Config) -> State:
    """The state of the configuration's optimizer after a step of a decoder on the meta device, where the step costs nothing.

    What is not trained is frozen in `decoder`.
    """
    freeze(decoder, config.train_only)
    optimizer = make_optimizer(decoder, config.optim)
    for parameter in decoder.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    decoder.zero_grad()
    return named_state(optimizer)


def optimizer_mismatch(decoder: Decoder, config: Config, state: State) -> str:
    """The first entry of `state` that doesn't fit the optimizer of this decoder, and why; empty if all fit.

    decoder: on the meta device.
    """
    implied = implied_state(decoder, config)
    for name in {**implied, **state}:
        if name not in implied or name not in state:
            return f"{name} is {'missing' if name in implied else 'not trained'}"
        ours, theirs = implied[name], state[name]
        if not isinstance(theirs, dict):
            return f"{name} has {theirs!r:.40} in place of optimizer state"
        for key in {**ours, **theirs} if theirs else ():
            if key not in ours or key not in theirs:
                return f"{name}: {key} is {'missing' if key in ours else 'not part of its state'}"
            shapes = [tuple(one[key].shape) if isinstance(one[key], Tensor) else None for one in (theirs, ours)]
            if shapes[0] != shapes[1]:
                return f"{name}: {key} has shape {shapes[0]}, the configuration implies {shapes[1]}"
            if shapes[0] is not None and not theirs[key].is_contiguous():  # an expanded single number claims any size
                return f"{name}: {key} is not contiguous"
    return ""
