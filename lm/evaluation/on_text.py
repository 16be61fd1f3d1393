"""A model without a training run, such as an imported one, on the text of a configuration: measured as a run on that text would be."""

from dataclasses import fields, replace
from pathlib import Path

from lm.config.data_config import DataConfig, TokenizerFile
from lm.config.load import load
from lm.config.training_config import OptimConfig, TrainerConfig
from lm.config.tree import Config
from lm.data.prepare import check_sequences, prepare
from lm.data.store import Store
from lm.errors import ConfigError, Problem
from lm.runs.folder import TOKENIZER
from lm.runs.loading import Loaded
from lm.schema import effect

CONFIGURATIONS = (".yaml", ".yml")


def split_configurations(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Paths of models, and those of configurations."""
    models = [path for path in paths if path.suffix not in CONFIGURATIONS]
    return models, [path for path in paths if path.suffix in CONFIGURATIONS]


def text_config(loaded: Loaded, files: list[Path]) -> Config:
    """A configuration with the model's shape, tokenizer and training length, and otherwise the data and `eval` of `files`.

    It is not checked for what the model can't do, such as sequences beyond learned positions: overrides may take that back, and `parse`
    checks the two together.

    Raises:
        ConfigError: a configuration that is wrong, or has no text.
        RunError: the model has no tokenizer.
    """
    loaded.tokenizer_and_start()
    given, spec = load([str(path) for path in files]), loaded.spec
    if given.data.symbolic:
        reason = f"its sequences are symbols, which {loaded.path} does not know"
        raise ConfigError([Problem("data.tasks", str(files[-1]), reason, "name a configuration of text")])
    tokenizer = TokenizerFile(path=str(loaded.folder / TOKENIZER), end_of_text=spec.end_of_text)
    data = replace(given.data, seq_len=spec.seq_len, tokenizer=tokenizer, tasks=[], lengths=DataConfig().lengths)
    kept = [one.name for one in fields(TrainerConfig) if "eval" in effect(Config, f"trainer.{one.name}").acts_in]
    folder = loaded.folder.resolve()
    return Config(
        name=folder.name, runs=str(folder.parent), seed=given.seed, data=data, model=spec.model, eval=given.eval,
        optim=OptimConfig(batch_tokens=spec.seq_len), trainer=TrainerConfig(**{name: getattr(given.trainer, name) for name in kept}),
    )  # fmt: skip


def on_text(loaded: Loaded, config: Config) -> tuple[Loaded, Store]:
    """The model as if it had been trained, for no step, on the text of a `text_config`, and that text, prepared if it was not before.

    Raises:
        LMError: the text can't be prepared, or is shorter than the sequences that the model was trained on.
    """
    store = prepare(config.data, progress=True)
    check_sequences(store, config, fixed=str(loaded.path))
    metadata = {"step": 0, "tokens": 0, "phase": 0, "vocab_size": loaded.spec.vocab_size, "plugins": loaded.spec.plugins}
    return replace(loaded, config=config, metadata={**metadata, "data_fingerprint": store.fingerprint}, environment={}), store
