"""How long a run is where its configuration gives the tokens by the size of the model (`trainer.tokens_per_parameter`)."""

import math
from dataclasses import replace

import torch

from lm.config.checks import check_steps
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.model.counts import count_parameters
from lm.model.decoder import Decoder


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
