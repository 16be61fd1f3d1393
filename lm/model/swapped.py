"""This module copies a trained decoder, with other normalizers in place of its own, or for another inference
setting.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.attention.options import Options
from lm.config.eval_config import InferenceSetting
from lm.config.model_config import ModelConfig
from lm.errors import ConfigError
from lm.model.blocks import AttentionBase
from lm.model.decoder import Decoder, is_normalizer_parameter
from lm.model.device import preserved_random_state


@torch.no_grad()
def rebuild_decoder(decoder: Decoder, config: ModelConfig, replaces_normalizers: bool) -> Decoder:
    """Return a new decoder with the weights of `decoder`, and the normalizers and positions of `config`, on the CPU.

    replaces_normalizers: whether `config` has other normalizers than `decoder`. `Normalizer.init_from` then sets their
        parameters: it converts the old ones where it can, and keeps initial values elsewhere.
    """
    new_decoder, weights = Decoder(config, decoder.vocab_size, decoder.seq_len, seed=None), decoder.state_dict()
    if not replaces_normalizers:
        new_decoder.load_state_dict(weights)
        return new_decoder.train(decoder.training)
    new_decoder.initialise(seed=0, normalizers_only=True)  # drawn values are the same at every swap
    new_decoder.load_state_dict(
        {name: weights[name] for name in weights if not is_normalizer_parameter(name)}, strict=False
    )
    for new_normalizer, old_normalizer in zip(new_decoder.normalizers(), decoder.normalizers(), strict=True):
        new_normalizer.init_from(old_normalizer)
    return new_decoder.train(decoder.training)


def with_normalizer(decoder: Decoder, normalizer: Options) -> Decoder:
    """Return a new decoder with the weights of `decoder` and new normalizers, of these options
    (`lm.attention.options`). The new normalizers' parameters are set as in a swap (`rebuild_decoder`).
    """
    return rebuild_decoder(decoder, replace(decoder.config, normalizer=normalizer), replaces_normalizers=True)


@torch.no_grad()
def score_factors_by_length(decoder: Decoder, lengths: Sequence[int]) -> Tensor:
    """Return the factors c in the scores c q.k / sqrt(D) of a document's last token, for documents of the given
    `lengths`. The result is (lengths, layers, H) on the CPU.

    Each of H heads has queries q and keys k of size D. The factors are NaN in layers whose scores are no multiple of
    q.k / sqrt(D) (`Normalizer.scale_by_position`).
    """
    normalizers = decoder.normalizers()
    heads, size, device = normalizers[0].layer.n_head, normalizers[0].layer.head_size, decoder.embedding.weight.device
    q = torch.full((1, heads, 1, size), size**-0.25, device=device)  # q.q / sqrt(D) = 1: scores are the factor
    layouts = [AttentionLayout.full(length, device).select(slice(length - 1, length), length) for length in lengths]
    factors = torch.full((len(lengths), len(normalizers), heads), math.nan)
    for layer, normalizer in enumerate(normalizers):
        if normalizer.scale_by_position() is not None:
            scores = [
                normalizer.unmasked_scores(q, q, replace(layout, key_positions=layout.positions)) for layout in layouts
            ]
            factors[:, layer] = torch.cat(scores)[:, :, 0, 0].cpu()
    return factors


def applicable_settings(decoder: Decoder, settings: Iterable[InferenceSetting]) -> list[InferenceSetting]:
    """Return the inference settings whose changed options all exist in this decoder's normalizer. The other settings
    may be for the normalizer of another training phase.

    For a decoder that takes no inference settings, only the setting that changes nothing (as trained) is kept.
    """
    return [
        setting
        for setting in settings
        if not setting.missing_options([decoder.config.normalizer])
        and (decoder.takes_inference_settings or setting == InferenceSetting())
    ]


def with_inference_setting(decoder: Decoder, setting: InferenceSetting) -> Decoder:
    """Return a copy of `decoder` that computes under `setting` and shares its parameters; `decoder` itself if `setting`
    is as trained.

    The copy is in the same mode (training or evaluation). Raises ConfigError: `setting` changes an option that no
    normalizer has, or one that can't change after training; or it has YaRN's temperature, and some layer's scores
    aren't proportional to q.
    """
    if setting == InferenceSetting():
        return decoder
    (normalizer,), problems = setting.changed_normalizers([decoder.config.normalizer], "inference")
    if problems:
        raise ConfigError(problems)
    inference_decoder = copy.deepcopy(
        decoder, {id(tensor): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
    )
    inference_decoder.rope_scaling = setting.rope
    inference_decoder.config = replace(decoder.config, normalizer=normalizer)
    for layer, attention in enumerate(
        module for module in inference_decoder.modules() if isinstance(module, AttentionBase)
    ):
        if setting.normalizer:
            attention.normalizer = _with_options(attention.normalizer, normalizer.options_of_layer(layer))
    return inference_decoder


def _with_options(normalizer: Normalizer, options: Options) -> Normalizer:
    """Return a new normalizer with `options` that shares the parameters and buffers of `normalizer`."""
    with preserved_random_state():  # initial values may be drawn
        new_normalizer = make_normalizer(options, normalizer.layer)
    for name, tensor in (*normalizer.named_parameters(), *normalizer.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(new_normalizer.get_submodule(owner), leaf, tensor)
    return new_normalizer.train(normalizer.training)
