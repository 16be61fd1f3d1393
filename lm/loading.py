"""Trained models read back: from a run folder, a checkpoint, or an export (safetensors, JSON and the tokenizer)."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import yaml
from safetensors import SafetensorError
from tokenizers import Tokenizer

from lm.checkpoints import BEST, LAST, bare_weights, load_checkpoint, step_of, step_path, steps_saved
from lm.config import Config
from lm.configure import parse
from lm.data.tokenizer import END_OF_TEXT, load_tokenizer
from lm.errors import ConfigError, RunError
from lm.files import new_folder, replacing
from lm.model import Decoder
from lm.runs import CHECKPOINTS, TOKENIZER, read_json, write_json
from lm.schema import Plain, to_plain

WEIGHTS, DESCRIPTION = "model.safetensors", "lm.json"  # of an export


@dataclass(frozen=True)
class Loaded:
    """A trained model and what belongs to it.

    Attributes:
        decoder: in evaluation mode, on the CPU; `decoder.config` is the model as it is, in its phase of training.
        tokenizer: None if no tokenizer.json lies beside the weights.
        config: what it was trained with.
        facts: plain data: `step`, `tokens`, `data_fingerprint`, `vocab_size`, `phase`.
        path: the checkpoint or export it was read from.
    """

    decoder: Decoder
    tokenizer: Tokenizer | None
    config: Config
    facts: dict[str, Plain]
    path: Path

    @property
    def folder(self) -> Path:
        """The run folder of a checkpoint, or the export itself: where tokenizer.json and others lie."""
        return _folder(self.path)

    @property
    def end_of_text(self) -> str:
        """The token that starts every document."""
        return end_of_text(self.config)


def load(path: str | os.PathLike, checkpoint: str | int = "last") -> Loaded:
    """The model at `path`: a run folder (its `last`, `best` or a step's checkpoint), a checkpoint, or an export of `lm export`.

    Raises:
        RunError: nothing of the kind, damaged, or weights that don't fit their configuration.
    """
    path, checkpoint = Path(path), str(checkpoint)
    if checkpoint != "last" and not (path / CHECKPOINTS).is_dir():
        raise RunError(f"{path}: not a run folder, of which a checkpoint ({checkpoint}) could be chosen")
    if (path / DESCRIPTION).is_file():
        description = read_json(path / DESCRIPTION)
        try:
            weights = safetensors.torch.load_file(path / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path / WEIGHTS}: not readable: {' '.join(str(error).split())[:160]}") from None
        return _build(description.pop("config", None), description, weights, path)
    if path.is_dir():
        path = find_checkpoint(path, checkpoint)
    content = load_checkpoint(path)
    facts = {name: value for name, value in content["lm"].items() if name != "config"}
    try:
        plain = yaml.safe_load(content["lm"]["config"])
    except yaml.YAMLError:
        plain = None
    return _build(plain, facts, bare_weights(content), path)


def _build(plain: Plain, facts: dict[str, Plain], weights: dict[str, object], path: Path) -> Loaded:
    try:
        config = parse(plain)
        decoder = Decoder(config.model_in(facts["phase"]), facts["vocab_size"], config.data.seq_len, seed=None)
        if config.model.tied:
            weights.setdefault("head.weight", weights["embedding.weight"])
        decoder.load_state_dict(weights, strict=True)
    except (ConfigError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: weights and configuration don't fit: {' '.join(str(error).split())[:300]}") from None
    file = _folder(path) / TOKENIZER
    tokenizer = load_tokenizer(file, end_of_text(config)) if file.is_file() else None
    return Loaded(decoder.eval(), tokenizer, config, facts, path)


def end_of_text(config: Config) -> str:
    """The token that starts every document."""
    return getattr(config.data.tokenizer, "end_of_text", END_OF_TEXT)


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.resolve().parent.parent


def find_checkpoint(folder: Path, which: str) -> Path:
    """`last`, `best`, a step number or a path, as a path. Raises RunError that lists what there is."""
    checkpoints = folder / CHECKPOINTS
    named = {"last": LAST, "best": BEST}
    if which in named:
        path = checkpoints / named[which]
    elif which.isdigit():
        path = step_path(checkpoints, int(which))
    else:
        path = Path(which)
    if not path.is_file():
        have = ", ".join(str(step_of(found)) for found in steps_saved(checkpoints)) or "none"
        raise RunError(f"{path}: no such checkpoint; steps saved in {folder}: {have}")
    return path


def export(source: Path, checkpoint: str, out: Path) -> Path:
    """Write the model at `source` to the folder `out` without pickle: model.safetensors, lm.json, tokenizer.json. Returns `out`.

    A tied head is stored once, as the embedding.

    Raises:
        RunError: nothing to load there, `out` holds something, or it can't be written; nothing half-written is left.
    """
    loaded = load(source, checkpoint)
    with new_folder(out) as folder:
        tied = {"head.weight"} if loaded.config.model.tied else set()
        weights = {name: value.clone() for name, value in loaded.decoder.state_dict().items() if name not in tied}
        with replacing(folder / WEIGHTS, "the weights") as file:
            file.write(safetensors.torch.save(weights, {"format": "pt"}))
        write_json(folder / DESCRIPTION, {**loaded.facts, "config": to_plain(loaded.config)})
        if loaded.tokenizer:
            shutil.copyfile(loaded.folder / TOKENIZER, folder / TOKENIZER)
    return out
