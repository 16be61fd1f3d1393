"""AdamW's parameter groups, what of its state a swap keeps, and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from lm.config.training_config import WSD, Constant, Cosine, OptimConfig
from lm.model.decoder import is_normalizer


def parameter_groups(model: nn.Module) -> list[list[str]]:
    """Names of the trained parameters: those of rank >= 2, the others, and the normalizers' (each list may be empty)."""
    trained = [(name, p.dim()) for name, p in model.named_parameters() if p.requires_grad]
    normalizers = [name for name, _ in trained if is_normalizer(name)]
    rest = [(name, rank) for name, rank in trained if not is_normalizer(name)]
    return [[name for name, rank in rest if rank >= 2], [name for name, rank in rest if rank < 2], normalizers]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on parameters of rank >= 2 only: never on norms, biases or normalizers.

    Fused where the device has it: one kernel over all parameters.
    """
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in names], "weight_decay": decay}
        for names, decay in zip(parameter_groups(model), (config.weight_decay, 0.0, 0.0), strict=True)
    ]
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def carry_over(state: dict[str, object], before: list[list[str]], after: list[list[str]]) -> dict[str, object]:
    """An optimizer's state after a swap: of the parameters in the groups `before`, for those in `after` (`parameter_groups`).

    Parameters that were not there, and all of normalizers, start afresh: no moments, step count 0.
    """
    known = dict(enumerate(name for names in before for name in names))
    kept = {known[index]: moments for index, moments in state["state"].items() if not is_normalizer(known[index])}
    place = {name: index for index, name in enumerate(name for names in after for name in names)}
    return {
        "state": {index: kept[name] for name, index in place.items() if name in kept},
        "param_groups": [
            {**group, "params": [place[name] for name in names]} for group, names in zip(state["param_groups"], after, strict=True)
        ],
    }


def lr_factor(step: int, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based), as a share of the peak.

    Warm-up is linear and ends at the peak: step 0 has 1 / warmup_steps. Then constant, half a cosine to
    `final_fraction`, or flat until the last `decay_fraction` of the steps and linear from there (WSD).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    schedule = config.schedule
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, Cosine):
        progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
        return schedule.final_fraction + (1 - schedule.final_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    assert isinstance(schedule, WSD)
    decay_steps = max(1, round(schedule.decay_fraction * max_steps))
    left = min(1.0, (max_steps - step) / decay_steps)
    return schedule.final_fraction + (1 - schedule.final_fraction) * left
