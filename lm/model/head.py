"""The output head: hidden states to logits.

Shapes: C width, V vocabulary.
"""

import torch
from torch import Tensor, nn


class Head(nn.Linear):
    """Logits (..., V) of hidden states (..., C).

    Args:
        softcap: c of c tanh(logit / c), in fp32, which bounds logits (Gemma 2, arXiv 2408.00118); None: logits as they are.
    """

    def __init__(self, n_embd: int, vocab_size: int, softcap: float | None = None):
        super().__init__(n_embd, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        return logits if self.softcap is None else capped(logits.float(), self.softcap)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap tanh(logits / softcap); None: the logits."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
