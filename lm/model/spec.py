"""A model's spec describes the model without its weights. This module also checks normalizers from outside lm, and
counts a model's parameters, FLOPs per token and training steps.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from lm.attention.contract import changes_by_later_tokens, random_normalizer
from lm.config.data_config import END_OF_TEXT
from lm.config.load import empty_phase_problems
from lm.config.model_config import ModelConfig
from lm.config.schema import build_block, cross_key_problems, key, section
from lm.config.tree import Config
from lm.errors import ConfigError, Problem
from lm.model.decoder import Decoder, parameter_group
from lm.plain import Plain
from lm.plugins import PLUGINS

MAX_CAUSALITY_LENGTH = 512  # most tokens of the two sequences that are compared; they differ in the second half
CAUSALITY_TOLERANCE = 1e-9  # of outputs of size 1 in fp64


@dataclass
class ModelSpec:
    """A model's spec suffices to build its decoder, load its weights, and use it: evaluate, swap, generate, export."""

    model: ModelConfig = section(ModelConfig, "the decoder, with the normalizer that it has")
    vocab_size: int = key(256, "tokens that the model knows", ge=1)
    seq_len: int = key(256, "training length, tokens", ge=2)
    end_of_text: str = key(END_OF_TEXT, "the token that starts every document of text")
    end_tokens: list[str] = key(
        [], "the tokens that end a document; []: the token that starts the next one", omit_default=True
    )
    plugins: dict[str, str] = key({}, "version of each normalizer from outside")

    @classmethod
    def from_decoder(cls, decoder: Decoder, end_of_text: str, end_tokens: Sequence[str] = ()) -> "ModelSpec":
        """Return the spec of a decoder, with the versions of its normalizers from outside lm."""
        versions = PLUGINS.source_ids(options.name for options in decoder.config.normalizer.layer_options())
        return cls(decoder.config, decoder.vocab_size, decoder.seq_len, end_of_text, [*end_tokens], versions)

    @classmethod
    def from_training(cls, config: Config, checkpoint_metadata: Mapping[str, Plain]) -> "ModelSpec":
        """Return the spec of a run's model, from the run's configuration and the metadata of its checkpoint.

        checkpoint_metadata: holds `phase` (index of the training phase, as phases may have different normalizers),
        `vocab_size` and, if normalizers are from outside lm, `plugins`.
        """
        tokenizer = config.data.tokenizer
        return cls(
            config.model_in_phase(checkpoint_metadata["phase"]),
            checkpoint_metadata["vocab_size"],
            config.data.seq_len,
            tokenizer.end_of_text,
            [*tokenizer.end_tokens],
            checkpoint_metadata.get("plugins", {}),
        )

    @classmethod
    def from_plain(cls, plain_spec: Plain) -> "ModelSpec":
        """Return the spec that plain data (`lm.plain.to_plain`) describe.

        Raises ConfigError: the data are invalid, or name a normalizer from outside lm whose import is not allowed or
        fails.
        """
        names = {spec.name for spec in fields(cls) if not spec.metadata.get("omit_default")}
        problems = (
            [Problem(name, None, "is missing") for name in sorted(names - plain_spec.keys())]
            if isinstance(plain_spec, Mapping)
            else []
        )
        spec = build_block(cls, plain_spec, "", problems)
        if problems := problems or cross_key_problems(spec):
            raise ConfigError(problems)
        return spec

    def changed_plugins(self) -> list[tuple[str, str, str]]:
        """Return (name, recorded version, imported version) of each normalizer from outside lm whose code has changed
        since it was recorded.
        """
        versions = PLUGINS.source_ids(self.plugins).items()
        return [(name, self.plugins[name], version) for name, version in versions if self.plugins[name] != version]

    def make_decoder(self) -> Decoder:
        """Return a decoder whose parameters are not initialised, so that weights can be loaded into it."""
        return Decoder(self.model, self.vocab_size, self.seq_len, seed=None)


def check_plugin_causality(config: Config) -> None:
    """Check that no normalizer from outside lm lets an output depend on later tokens. Sequences have the training
    length, but at most `MAX_CAUSALITY_LENGTH` tokens.

    Raises ConfigError, which names the normalizer.
    """
    length = min(MAX_CAUSALITY_LENGTH, config.data.seq_len)
    layers = [options for phase in config.phases_or_default for options in phase.normalizer.layer_options()]
    for options in layers:
        if ":" not in options.name:
            continue
        normalizer = random_normalizer(options, train_length=length)
        if (changes_by_later_tokens(normalizer, length, length // 2) > CAUSALITY_TOLERANCE).any():
            reason = "gives a token weights that depend on later tokens, as if it forgot the mask"
            remedy = f"mask by layout.visible(); lm check-normalizer {options.name} tests it"
            raise ConfigError([Problem("model.normalizer", options.name, reason, remedy)])


def count_parameters(decoder: Decoder) -> dict[str, int]:
    """Return numbers of parameters by name: `total`, `non_embedding` (without embeddings and head) and `normalizer`
    (in normalizers).
    """
    counts = Counter[str]()
    for name, parameter in decoder.named_parameters():
        counts[parameter_group(name, parameter)] += parameter.numel()
    non_embedding = counts.total() - counts["embedding"] - counts["head"]
    return {"total": counts.total(), "non_embedding": non_embedding, "normalizer": counts["normalizer"]}


def flops_per_token(decoder: Decoder) -> int:
    """Return the training FLOPs per token: 6 N + 3 L H T (D + E).

    N is the number of entries of all weight matrices, L the number of layers, H the number of heads of a layer's
    normalizer. T is the training length, D the size of a head's keys, E the size of its values.

    Embedding look-ups are free. Scores that the causal mask hides are not counted. PaLM (arXiv 2204.02311, appendix B)
    and nanoGPT count them, so that their attention term is twice as large: 6 N + 12 L H T D, for E = D.
    """
    config = decoder.config
    matrix_entries = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2) + decoder.head.weight.numel()
    if config.value_residual:  # the first layer's values are computed twice
        matrix_entries += config.n_embd * config.kv_heads * config.value_dims
    dimensions = config.n_head * config.maps_per_head * (config.key_dims + config.value_dims)
    return 6 * matrix_entries + 3 * config.n_layer * decoder.seq_len * dimensions


def steps_of_token_budget(config: Config, vocab_size: int) -> int:
    """Return the optimizer steps of a run, as many as `tokens_per_parameter` requires, rounded up.

    The normalizers' parameters are not counted, so that models that differ in the normalizer alone train equally long.
    """
    with torch.device("meta"):
        counts = count_parameters(Decoder(config.model_in_phase(0), vocab_size, config.data.seq_len, seed=None))
    tokens = config.trainer.tokens_per_parameter * (counts["total"] - counts["normalizer"])
    return math.ceil(tokens / config.optim.batch_tokens)


def with_steps(config: Config, vocab_size: int) -> Config:
    """Return the configuration with its number of steps in `trainer.max_steps`, in place of `tokens_per_parameter`.

    Raises ConfigError: the steps are too few, for example for a phase or the warm-up.
    """
    if config.trainer.max_steps:
        return config
    steps = steps_of_token_budget(config, vocab_size)
    sized_config = replace(config, trainer=replace(config.trainer, max_steps=steps, tokens_per_parameter=None))
    if problems := [*empty_phase_problems(sized_config)]:
        raise ConfigError(problems)
    return sized_config
