"""The description of a model apart from its weights, with or without a training run behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lm.attention.plugins import PLUGINS
from lm.config.data_config import END_OF_TEXT
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.errors import ConfigError, Problem
from lm.model.decoder import Decoder
from lm.schema import Plain, build, key, own_problems, section


@dataclass
class ModelSpec:
    """Enough to build a decoder, give it its weights, and use it: evaluate, swap, generate, export."""

    model: ModelConfig = section(ModelConfig, "the decoder, with the normalizer that it has")
    vocab_size: int = key(256, "tokens that the model knows", ge=1)
    seq_len: int = key(256, "training length, tokens", ge=1)
    end_of_text: str = key(END_OF_TEXT, "the token that starts every document of text")
    plugins: dict[str, str] = key({}, "version of each normalizer from outside")

    @classmethod
    def of(cls, decoder: Decoder, end_of_text: str = END_OF_TEXT) -> "ModelSpec":
        """The spec of a decoder."""
        versions = PLUGINS.versions(one.name for one in decoder.config.normalizer.layer_options())
        return cls(decoder.config, decoder.vocab_size, decoder.seq_len, end_of_text, versions)

    @classmethod
    def from_training(cls, config: Config, metadata: Mapping[str, Plain]) -> "ModelSpec":
        """The spec of a model from its configuration and what its checkpoint says: `phase`, `vocab_size`, `plugins`."""
        model, versions = config.model_in(metadata["phase"]), metadata.get("plugins", {})
        return cls(model, metadata["vocab_size"], config.data.seq_len, config.data.tokenizer.end_of_text, versions)

    @classmethod
    def read(cls, plain: Plain) -> "ModelSpec":
        """From plain data (`lm.schema.to_plain`); imports no code that the data names. Raises ConfigError: all that is wrong."""
        problems: list[Problem] = []
        missing = [spec.name for spec in fields(cls) if spec.name not in plain] if isinstance(plain, Mapping) else []
        problems += [Problem(name, None, "is missing") for name in missing]
        spec = build(cls, plain, "", problems)
        if problems := problems or own_problems(spec):
            raise ConfigError(problems)
        return spec

    def changed_plugins(self) -> list[tuple[str, str, str]]:
        """(name, version recorded, version imported) of the normalizers from outside whose code has changed."""
        now = PLUGINS.versions(self.plugins)
        return [(name, before, now[name]) for name, before in self.plugins.items() if now.get(name, before) != before]

    def decoder(self) -> Decoder:
        """A decoder for weights that are loaded: its parameters are not set."""
        return Decoder(self.model, self.vocab_size, self.seq_len, seed=None)
