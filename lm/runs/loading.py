"""Trained models read back: from a run folder, a checkpoint, or an export (safetensors, JSON and the tokenizer)."""

import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from lm.config.load import to_yaml
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.data.tokenizer import END_OF_TEXT, load_tokenizer
from lm.errors import RunError
from lm.files import new_folder, replacing
from lm.model.decoder import Decoder
from lm.runs.checkpoints import BEST, LAST, check_facts, load_checkpoint, step_of, step_path, steps_saved
from lm.runs.consistency import check_environment, trained_config
from lm.runs.folder import CHECKPOINTS, ENVIRONMENT, TOKENIZER, read_sealed, write_sealed
from lm.schema import Plain

WEIGHTS, DESCRIPTION = "model.safetensors", "lm.json"  # of an export
TENSOR_SHA256, TOKENIZER_SHA256 = "tensor_sha256", "tokenizer_sha256"  # in the description; the second in a run's environment.json, too


@dataclass(frozen=True)
class Loaded:
    """A trained model and what belongs to it.

    Attributes:
        decoder: in evaluation mode, on the CPU; `decoder.config` is the model as it is, in its phase of training.
        tokenizer: None if no tokenizer.json lies beside the weights.
        config: what it was trained with.
        facts: plain data: `step`, `tokens`, `data_fingerprint`, `vocab_size`, `phase`.
        path: the checkpoint or export it was read from.
        environment: the run's environment.json; {} if none lies there.
    """

    decoder: Decoder
    tokenizer: Tokenizer | None
    config: Config
    facts: dict[str, Plain]
    path: Path
    environment: dict[str, Plain] = field(default_factory=dict)

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

    Every byte is verified before it is used.

    Raises:
        RunError: nothing of the kind, damaged, weights that don't fit their configuration, or files of different runs.
    """
    path, checkpoint = Path(path), str(checkpoint)
    if checkpoint != "last" and not (path / CHECKPOINTS).is_dir():
        raise RunError(f"{path}: not a run folder, of which a checkpoint ({checkpoint}) could be chosen")
    if (path / DESCRIPTION).is_file():
        return _load_export(path)
    if path.is_dir():
        path = find_checkpoint(path, checkpoint)
    content = load_checkpoint(path)
    file = _folder(path) / ENVIRONMENT
    environment = check_environment(file, content["lm"], path) if file.is_file() else {}
    return _build(content["lm"], content["state_dict"], path, environment, environment.get(TOKENIZER_SHA256))


def _load_export(path: Path) -> Loaded:
    description = read_sealed(path / DESCRIPTION)
    check_facts(description, path / DESCRIPTION)
    try:
        weights = safetensors.torch.load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path / WEIGHTS}: not readable: {' '.join(str(error).split())[:160]}") from None
    expected, tokenizer = description.pop(TENSOR_SHA256), description.pop(TOKENIZER_SHA256)
    altered = [name for name in {**expected, **weights} if name not in weights or expected.get(name) != _sha256(weights[name])]
    if altered:
        raise RunError(f"{path / WEIGHTS}: {altered[0]} was altered (its sha256 differs from that in {DESCRIPTION}); export it again")
    return _build(description, weights, path, {}, tokenizer)


def _build(
    description: dict[str, Plain], weights: dict[str, Tensor], path: Path, environment: dict[str, Plain], tokenizer_sha256: str | None
) -> Loaded:
    config = trained_config(description, path)
    facts = {name: value for name, value in description.items() if name != "config"}
    try:
        model = config.model_in(facts["phase"])
        if model.tied:
            weights.setdefault("head.weight", weights["embedding.weight"])
        if reason := misfit(model, facts["vocab_size"], config.data.seq_len, weights):
            raise ValueError(reason)
        decoder = Decoder(model, facts["vocab_size"], config.data.seq_len, seed=None)
        decoder.load_state_dict(weights)
    except (LookupError, RuntimeError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise RunError(f"{path}: weights and configuration don't fit: {' '.join(str(error).split())[:300]}") from None
    tokenizer = _tokenizer(_folder(path) / TOKENIZER, end_of_text(config), tokenizer_sha256)
    return Loaded(decoder.eval(), tokenizer, config, facts, path, environment)


def _tokenizer(file: Path, end_of_text: str, sha256: str | None) -> Tokenizer | None:
    """The tokenizer beside the weights, if there is one; `sha256`: of the file that they were trained with, if known."""
    if not file.is_file():
        return None
    if sha256 and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        raise RunError(f"{file}: not the tokenizer that the model was trained with (its sha256 differs); bring that one back")
    return load_tokenizer(file, end_of_text)


def misfit(model: ModelConfig, vocab_size: int, seq_len: int, weights: dict[str, Tensor]) -> str:
    """The first tensor that a decoder of this configuration does not have, and why; empty if all fit.

    Nothing of the size that the configuration claims is made: shapes are compared on torch's meta device, which holds no numbers.
    """
    embedding, layers = weights.get("embedding.weight"), {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if embedding is not None and embedding.shape != (vocab_size, model.n_embd):  # before a width that torch can't even multiply
        return _other_shape("embedding.weight", embedding, (vocab_size, model.n_embd))
    if len(layers) != model.n_layer:
        return f"there are weights of {len(layers)} layers, model.n_layer is {model.n_layer}"
    with torch.device("meta"):
        implied = Decoder(model, vocab_size, seq_len, seed=None).state_dict()
    for name in {**implied, **weights}:
        if name not in weights or name not in implied:
            return f"{name} is {'missing' if name in implied else 'none of the model'}"
        if weights[name].shape != implied[name].shape:
            return _other_shape(name, weights[name], implied[name].shape)
        if not weights[name].is_contiguous():  # a single number can pose as a matrix of any size
            return f"{name} is not stored as a whole"
    return ""


def _other_shape(name: str, found: Tensor, implied: tuple[int, ...]) -> str:
    return f"{name} has shape {tuple(found.shape)}, the configuration implies {tuple(implied)}"


def _sha256(tensor: Tensor) -> str:
    """Of a tensor's values, with their type and shape."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


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
        description = {**loaded.facts, "config": to_yaml(loaded.config), TOKENIZER_SHA256: None}
        if loaded.tokenizer:
            shutil.copyfile(loaded.folder / TOKENIZER, folder / TOKENIZER)
            description[TOKENIZER_SHA256] = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
        write_sealed(folder / DESCRIPTION, {**description, TENSOR_SHA256: {name: _sha256(value) for name, value in weights.items()}})
    return out
