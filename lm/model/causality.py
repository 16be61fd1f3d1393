"""Check that normalizers from outside lm let no token see later ones, before a run is trained with them."""

from dataclasses import replace

import torch

from lm.config.tree import Config
from lm.errors import ConfigError, Problem
from lm.model.decoder import Decoder

MAX_LENGTH = 512  # most tokens of the two sequences that are compared; they differ in the second half
TOLERANCE = 1e-4  # of the change in the second half, whose logits must change


def check_causality(config: Config) -> None:
    """Check each normalizer from outside in one layer of the model, at the training length up to `MAX_LENGTH`.

    Logits of two sequences that differ in their second half must be equal in the first.

    Raises ConfigError that names the normalizer. Weights are random and large, so that no part of the layer is idle.
    """
    outside = {
        repr(options): options
        for phase in config.plan
        for options in phase.normalizer.layer_options()
        if ":" in options.name
    }
    length = min(MAX_LENGTH, config.data.seq_len)
    half = length // 2
    tokens = (torch.arange(length) % 6).expand(2, -1).clone()
    tokens[1, half:] = 6 + torch.arange(length - half) % 2
    for options in outside.values():
        model = replace(config.model, n_layer=1, n_mlp=8, normalizer=options, dropout=0.0)
        decoder, generator = Decoder(model, 8, config.data.seq_len, seed=None), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, parameter.size(-1) ** -0.5, generator=generator)
        first, second = decoder.logits(tokens).detach().float()
        changes = (first - second).abs().amax(-1)
        if (changes[:half] > TOLERANCE * changes[half:].max()).any():
            reason = "gives a token weights that depend on later tokens, as if it forgot the mask"
            remedy = f"mask by layout.visible(); lm check-normalizer {options.name} tests it"
            raise ConfigError([Problem("model.normalizer", options.name, reason, remedy)])
