"""The precision of scores and sums: what the dtypes given say, whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which the dtypes of operands alone decide what is computed in."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
