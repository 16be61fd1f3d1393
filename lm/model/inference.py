"""A trained decoder under another inference setting: RoPE's frequencies and the normalizers' options differ, the weights are the same."""

import copy
from dataclasses import replace

import torch

from lm.attention.catalogue import make_normalizer
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options
from lm.config.inference_config import InferenceSetting
from lm.errors import ConfigError
from lm.model.blocks import AttentionBase
from lm.model.decoder import Decoder


def for_inference(decoder: Decoder, setting: InferenceSetting) -> Decoder:
    """A copy of `decoder` that is used as `setting` says, in the same mode, and shares its parameters; the decoder stays as it is.

    Raises:
        ConfigError: options that none of its normalizers has, or that training has fixed.
    """
    (normalizer,), problems = setting.normalizers([decoder.config.normalizer], "normalizer")
    if problems:
        raise ConfigError(problems)
    used = copy.deepcopy(decoder, {id(tensor): tensor for tensor in (*decoder.parameters(), *decoder.buffers())})
    used.rope_scaling, used.config = setting.rope, replace(decoder.config, normalizer=normalizer)
    for layer, attention in enumerate(module for module in used.modules() if isinstance(module, AttentionBase)):
        if setting.normalizer:
            attention.normalizer = _with_options(attention.normalizer, normalizer.of_layer(layer))
    return used


def _with_options(trained: Normalizer, options: Options) -> Normalizer:
    """A normalizer with other options and the same parameters."""
    with torch.random.fork_rng():  # initial values may be drawn
        fresh = make_normalizer(options, trained.layer)
    for name, tensor in (*trained.named_parameters(), *trained.named_buffers()):
        owner, _, own = name.rpartition(".")
        setattr(fresh.get_submodule(owner), own, tensor)
    return fresh.train(trained.training)
