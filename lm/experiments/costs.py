"""What a run of an experiment will cost: parameters, tokens, FLOPs and disk, from its configuration."""

from dataclasses import dataclass

import torch

from lm.config.tree import Config
from lm.model.counts import count_parameters, flops_per_token
from lm.model.decoder import Decoder, group_of, is_normalizer

_TOKENIZER_BYTES, _VALUE_BYTES = 65, 70  # of an entry of tokenizer.json, and of a validation loss of one sequence in JSON


@dataclass(frozen=True)
class Cost:
    """What one run takes.

    Attributes:
        parameters: of the model.
        tokens: trained on.
        flops: of training.
        disk: bytes of its run folder at the end, if the last checkpoint is the best one: checkpoints, tokenizer, validation losses.
    """

    parameters: int
    tokens: int
    flops: int
    disk: int


def cost(config: Config, vocab_size: int) -> Cost:
    """What a run of this configuration takes, of this vocabulary."""
    decoder, trainer = _on_meta(config, vocab_size), config.trainer
    parameters, tokens = count_parameters(decoder), config.optim.batch_tokens * trainer.max_steps
    trained = {name: p for name, p in decoder.named_parameters() if not config.train_only or is_normalizer(name)}
    state = sum(config.optim.optimizer.kept(group_of(name, p)) * p.numel() for name, p in trained.items())
    checkpoint = 4 * (parameters["total"] + state)  # fp32
    kept = min(trainer.keep_checkpoints, -(-trainer.max_steps // config.checkpoint_every)) + len(config.phase_ends) - 1
    validations = -(-trainer.max_steps // config.validation_every) * config.eval.sequences * _VALUE_BYTES
    disk = kept * checkpoint + vocab_size * _TOKENIZER_BYTES + 2 * validations  # each is kept a second time, for `lm eval`
    return Cost(parameters["total"], tokens, flops_per_token(decoder) * tokens, disk)


def _on_meta(config: Config, vocab_size: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(config.model_in(0), vocab_size, config.data.seq_len, seed=None)
