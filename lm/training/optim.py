"""AdamW's parameter groups and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from lm.config import WSD, Constant, Cosine, OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on parameters of rank >= 2 only: never on norms, biases or normalizers' scalars.

    Fused where the device has it: one kernel over all parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


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
