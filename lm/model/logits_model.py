"""Any module that maps tokens to logits, in the form that measurements read a decoder in."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.model.blocks import DecodingCache


class LogitsModel(nn.Module):
    """Gives a module that maps tokens to logits the interface of `lm.model.decoder.Decoder` that measurements use.

    It keeps no state of earlier tokens: decoding reads all of them again for each new token.
    """

    takes_settings = False

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.head, self.config = module, _NoHead(), ModelConfig()

    def forward(self, tokens: Tensor, cache: DecodingCache | None = None, first: int = 0) -> Tensor:
        """Logits (B, T - first, V) of tokens (B, T), with a cache of those after the tokens in it."""
        if cache is not None:
            n_seen = cache.seen
            tokens = torch.cat((cache.states[self], tokens), 1) if n_seen else tokens
            cache.states[self], cache.seen, first = tokens, tokens.size(1), first + n_seen
        logits = self.module(tokens)[:, first:]
        self.head.out_features = logits.size(-1)
        return logits

    def hidden(self, batch: Batch, first: int = 0) -> Tensor:
        """Logits in place of hidden states, which the head leaves as they are."""
        return self(batch.tokens, first=first)


class _NoHead(nn.Identity):
    out_features: int  # size of the vocabulary

    def in_fp32(self) -> Callable[[Tensor], Tensor]:
        return Tensor.float
