"""Costs of a decoder: parameters, FLOPs, and the steps of a run whose length is given by its size."""

import math
from dataclasses import replace

import torch

from lm.config.load import check_steps
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.model.decoder import Decoder, is_normalizer


def count_parameters(decoder: Decoder) -> dict[str, int]:
    """`total`, `non_embedding` (without embeddings and head), `normalizer`."""
    total = sum(p.numel() for p in decoder.parameters())
    tables = decoder.embedding, decoder.value_embedding, decoder.head, decoder.position
    embedding = {p for m in tables if m is not None for p in m.parameters()}
    normalizer = sum(p.numel() for name, p in decoder.named_parameters() if is_normalizer(name))
    return {"total": total, "non_embedding": total - sum(p.numel() for p in embedding), "normalizer": normalizer}


def flops_per_token(decoder: Decoder, masked: bool = False) -> int:
    """Training FLOPs a token: 6 a matrix entry (embedding look-ups are free), 3 T a dimension of keys and values for causal attention.

    masked: count what the causal mask hides, too, as PaLM (arXiv 2204.02311, appendix B) and nanoGPT do: 6 N + 12 L H Q T.
    """
    config = decoder.config
    matrices = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2) + decoder.head.weight.numel()
    if config.value_residual == "first_layer":  # whose values are computed twice
        matrices += config.n_embd * config.kv_heads * config.value_dims
    dimensions = config.n_head * (config.key_dims + config.value_dims)
    return 6 * matrices + (6 if masked else 3) * config.n_layer * decoder.seq_len * dimensions


# ---------------------------------------------------------------- steps by size


def steps_of(config: Config, vocab_size: int) -> int:
    """Optimizer steps of a run: as given, or as many as `tokens_per_parameter` takes, rounded up.

    What is counted are all parameters but those of normalizers, so that models that differ in the normalizer alone train equally long.
    """
    trainer = config.trainer
    if trainer.max_steps:
        return trainer.max_steps
    with torch.device("meta"):
        counted = count_parameters(Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None))
    tokens = trainer.tokens_per_parameter * (counted["total"] - counted["normalizer"])
    return math.ceil(tokens / config.optim.batch_tokens)


def with_steps(config: Config, vocab_size: int) -> Config:
    """The configuration with its number of steps in `trainer.max_steps`, in place of `tokens_per_parameter`.

    Raises:
        ConfigError: the steps leave no room for something.
    """
    if config.trainer.max_steps:
        return config
    known = replace(config, trainer=replace(config.trainer, max_steps=steps_of(config, vocab_size), tokens_per_parameter=None))
    if problems := check_steps(known):
        raise ConfigError(problems)
    return known
