"""Trained models as files: read from run folders, checkpoints and model folders (safetensors, JSON, tokenizer), written as the last."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from lm.attention.catalogue import ENTRIES, Layers
from lm.config.data_config import END_OF_TEXT
from lm.config.load import merge, read_yaml, to_yaml
from lm.config.tree import Config, function_of
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError, RunError, one_line, out_of_memory
from lm.files import file_sha256, new_folder, replacing
from lm.model.decoder import Decoder
from lm.model.rope import AS_TRAINED
from lm.model.spec import ModelSpec
from lm.runs.checkpoints import Described, load_checkpoint, tensor_sha256, write_weights
from lm.runs.folder import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    LAST,
    TOKENIZER,
    check_fields,
    read_json,
    read_sealed,
    require_run,
    step_of,
    step_path,
    steps_saved,
    write_sealed,
)
from lm.runs.metadata import METADATA, SEALS
from lm.runs.same_run import check_environment, trained_config
from lm.schema import Plain, to_plain

WEIGHTS, DESCRIPTION = "model.safetensors", "lm.json"  # files of a model folder
MODEL_FORMAT = 5  # version of the description; raised when older ones can no longer be read
TENSOR_SHA256, TOKENIZER_SHA256 = "tensor_sha256", "tokenizer_sha256"  # in the description; the second in a run's environment.json, too


def write_model(
    out: Path,
    spec: ModelSpec,
    described: Mapping[str, Described],
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: bytes | None = None,
    training: dict[str, Plain] | None = None,
    origin: dict[str, Plain] | None = None,
) -> Path:
    """Write a model to the folder `out`, whole or not at all; returns it.

    Args:
        spec: what the model is.
        described: type and shape of each parameter; a tied head is stored once, as the embedding.
        tensors: the parameters on the CPU, in that order, each made when it is written.
        tokenizer: content of its tokenizer.json; None: of a model without text.
        training: metadata of its training, if a run is behind it.
        origin: where it was imported from, if it was.

    Raises:
        RunError: `out` holds something, or can't be written.
    """
    with new_folder(out) as folder:
        with replacing(folder / WEIGHTS, "the weights") as file:
            digests = write_weights(file, described, tensors)
        description = {"format": MODEL_FORMAT, "spec": to_plain(spec), "training": training, TOKENIZER_SHA256: None}
        if origin:
            description["origin"] = origin
        if tokenizer is not None:
            with replacing(folder / TOKENIZER) as file:
                file.write(tokenizer)
            description[TOKENIZER_SHA256] = file_sha256(folder / TOKENIZER)
        write_sealed(folder / DESCRIPTION, {**description, TENSOR_SHA256: digests})
    return out


# ---------------------------------------------------------------- the shape of weights that a run starts from


TRAINED_OTHERWISE = ("normalizer", "dropout", "init_std")  # keys of `model` that the run's own configuration says

Keys = dict[str, Plain]  # keys of a configuration


def with_shape_of(init_from: str, given: dict[str, Plain], own: dict[str, Plain]) -> dict[str, Plain]:
    """The keys of configuration files with `own` overrides laid on them, and in between the shape and tokenizer of `init_from`, a model
    folder without a training run or a swap of one; other weights change nothing.

    The normalizer is the folder's only where neither names one: another one is not a matter of shape (`lm swap`).

    Raises:
        RunError: the folder's description is damaged.
    """
    folder = Path(init_from)
    keys = _untrained(folder)
    if keys is None:
        return merge(given, own)
    normalizer, over = keys
    under = {} if given.get("phases") or own.get("phases") else normalizer
    return merge(merge(merge(under, given), over), own)


def _untrained(folder: Path) -> tuple[Keys, Keys] | None:
    """The keys of `_taken`, of a model folder; None: `folder` is none, or its model has a training run."""
    if (folder / DESCRIPTION).is_file():
        description = read_sealed(folder / DESCRIPTION)
        spec = description["spec"]
        return None if description.get("training") is not None else _taken(folder, spec["model"], spec["seq_len"], spec["end_of_text"])
    if not (folder / ENVIRONMENT).is_file() or not (folder / CONFIG).is_file():
        return None
    environment = read_json(folder / ENVIRONMENT)
    if "swap" not in environment or "starts" in environment:
        return None
    config = read_yaml(folder / CONFIG)
    try:
        return _taken(folder, config["model"], config["data"]["seq_len"], config["data"]["tokenizer"]["end_of_text"])
    except (KeyError, TypeError):
        raise RunError(f"{folder / CONFIG}: cut short: it does not say what the model is; swap the model again") from None


def _taken(folder: Path, model: Keys, seq_len: int, end_of_text: str) -> tuple[Keys, Keys]:
    """The keys that a run takes from a model of this description: a normalizer of ours; and the shape, tokenizer and length of learned
    positions."""
    normalizer = model["normalizer"]
    # A configuration may import the normalizers that it names; a model folder may not, so that none from outside is taken from it.
    ours = all(entry["name"] in ENTRIES for entry in (normalizer["of"] if normalizer["name"] == Layers.name else [normalizer]))
    shape: Keys = {"model": {name: value for name, value in model.items() if name not in TRAINED_OTHERWISE}, "data": {}}
    if (folder / TOKENIZER).is_file():
        shape["data"]["tokenizer"] = {"name": "file", "path": str(folder / TOKENIZER), "end_of_text": end_of_text}
    if model["position"]["name"] == "learned":
        shape["data"]["seq_len"] = seq_len
    return {"model": {"normalizer": normalizer}} if ours else {}, shape


# ---------------------------------------------------------------- models read back


FIELDS = {"spec": dict, "training": dict | None, TENSOR_SHA256: dict[str, str], TOKENIZER_SHA256: str | None}  # fields of the description


@dataclass(frozen=True)
class Loaded:
    """A model read back, and what belongs to it.

    Attributes:
        decoder: in evaluation mode, on the CPU.
        spec: what it is: `spec.model` is its configuration as it is, in its phase of training.
        tokenizer: None if no tokenizer.json lies beside the weights.
        path: the checkpoint or model folder it was read from.
        config: what it was trained with; None if no training run is behind it.
        metadata: of its training, plain data: `step`, `tokens`, `data_fingerprint`, `phase`; {} without one.
        environment: the run's environment.json; {} if none lies there.
        origin: of an imported model: `source`, `architecture` ...; {} of others.
    """

    decoder: Decoder
    spec: ModelSpec
    tokenizer: Tokenizer | None
    path: Path
    config: Config | None = None
    metadata: dict[str, Plain] = field(default_factory=dict)
    environment: dict[str, Plain] = field(default_factory=dict)
    origin: dict[str, Plain] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The run folder of a checkpoint, or the model folder itself: where tokenizer.json and others lie."""
        return _folder(self.path)

    def tokenizer_and_start(self) -> tuple[Tokenizer, int]:
        """The tokenizer, and the id of the token that starts a document. Raises RunError of a model without text."""
        if self.tokenizer is None:
            raise RunError(f"{self.folder}: no tokenizer.json beside the weights, so that text can't be read or written")
        return self.tokenizer, self.tokenizer.token_to_id(self.spec.end_of_text)

    @property
    def stamp(self) -> dict[str, Plain]:
        """The point in training at which results were measured: `step`, `tokens_seen`, `data_fingerprint`; 0, 0, None without one."""
        step, tokens = self.metadata.get("step", 0), self.metadata.get("tokens", 0)
        return {"step": step, "tokens_seen": tokens, "data_fingerprint": self.metadata.get("data_fingerprint")}


def load(path: str | os.PathLike, checkpoint: str | int = "last") -> Loaded:
    """The model at `path`: a run folder (its `last`, `best` or a step's checkpoint), a checkpoint, or a model folder.

    A model folder is what `lm export` and `save_model` write. Every byte is verified before it is used.

    Raises:
        RunError: nothing of the kind, damaged, weights that don't fit their configuration or aren't finite, or files of different runs.
    """
    path, checkpoint = Path(path), str(checkpoint)
    if checkpoint != "last" and not (path / CHECKPOINTS).is_dir():
        raise RunError(f"{path}: not a run folder, of which a checkpoint ({checkpoint}) could be chosen")
    if (path / DESCRIPTION).is_file():
        return _load_model(path)
    if path.is_dir() or path.suffix == ".gguf":
        require_run(path)
        if not (path / CHECKPOINTS).is_dir() and not (path / CONFIG).is_file():
            raise RunError(f"{path}: neither a run folder (it has no {CONFIG}) nor a model folder (no {DESCRIPTION})")
        path = find_checkpoint(path, checkpoint)
    content = load_checkpoint(path)
    file = _folder(path) / ENVIRONMENT
    environment = check_environment(file, content["lm"], path) if file.is_file() else {}
    config, metadata = _split_config(content["lm"], path)
    spec = ModelSpec.from_training(config, metadata)
    decoder, tokenizer = _build_decoder(spec, content["state_dict"], path, environment.get(TOKENIZER_SHA256))
    return Loaded(decoder, spec, tokenizer, path, config, metadata, environment)


def _load_model(path: Path) -> Loaded:
    description = read_sealed(path / DESCRIPTION)
    if description.get("format") != MODEL_FORMAT:
        version = description.get("format")
        raise RunError(f"{path / DESCRIPTION}: format {version}, this version of lm reads {MODEL_FORMAT}: export the model again")
    check_fields({"origin": {}, **description}, {**FIELDS, "origin": dict}, path / DESCRIPTION)
    origin = description.get("origin", {})
    expected, training = description[TENSOR_SHA256], description["training"]
    try:
        spec = ModelSpec.read(description["spec"])
    except ConfigError as error:
        raise RunError(f"{path / DESCRIPTION}: not the description of a model: {one_line(error)}") from None
    try:
        weights = safetensors.torch.load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path / WEIGHTS}: not readable: {one_line(error, 160)}") from None
    altered = [name for name in {**expected, **weights} if name not in weights or expected.get(name) != tensor_sha256(weights[name])]
    if altered:
        raise RunError(f"{path / WEIGHTS}: {altered[0]} was altered (its sha256 differs from that in {DESCRIPTION}); export it again")
    decoder, tokenizer = _build_decoder(spec, weights, path, description[TOKENIZER_SHA256])
    if training is None:
        return Loaded(decoder, spec, tokenizer, path, origin=origin)
    check_fields(training, METADATA, path / DESCRIPTION, "training.")
    config, metadata = _split_config(training, path)
    if function_of(config.model_in(metadata["phase"])) != function_of(spec.model):
        raise RunError(f"{path / DESCRIPTION}: its `training` is of another model than its `spec`")
    return Loaded(decoder, spec, tokenizer, path, config, metadata, origin=origin)


def _split_config(metadata: dict[str, Plain], path: Path) -> tuple[Config, dict[str, Plain]]:
    """The configuration in the metadata, and all other metadata."""
    config = trained_config(metadata, path)
    if metadata["phase"] >= len(config.plan):
        raise RunError(f"{path}: its `phase` is {metadata['phase']}, its training has {len(config.plan)}")
    return config, {name: value for name, value in metadata.items() if name != "config" and name not in SEALS}


def _build_decoder(
    spec: ModelSpec, weights: dict[str, Tensor], path: Path, tokenizer_sha256: str | None
) -> tuple[Decoder, Tokenizer | None]:
    for name, before, now in spec.changed_plugins():
        print(f"note: {path}: {name} was {before} when this was saved, it is {now} now: the model may be another", file=sys.stderr)
    try:
        if spec.model.tied:
            weights.setdefault("head.weight", weights["embedding.weight"])
        if reason := weights_mismatch(spec, weights):
            raise ValueError(reason)
        check_finite(weights, path)
        decoder = spec.decoder()
        decoder.load_state_dict(weights)
    except (LookupError, RuntimeError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if out_of_memory(error):
            raise
        raise RunError(f"{path}: weights and configuration don't fit: {one_line(error)}") from None
    return decoder.eval(), _tokenizer(_folder(path) / TOKENIZER, spec.end_of_text, tokenizer_sha256)


def _tokenizer(file: Path, end_of_text: str, sha256: str | None) -> Tokenizer | None:
    """The tokenizer beside the weights, if there is one; `sha256`: of the file that they were trained with, if known.

    Raises:
        RunError: it is not that file, or not there.
        DataError: it can't be used.
    """
    if not file.is_file():
        if sha256:
            raise RunError(f"{file}: missing, and the model was trained with it; bring it back")
        return None
    if sha256 and file_sha256(file) != sha256:
        raise RunError(f"{file}: not the tokenizer that the model was trained with (its sha256 differs); bring that one back")
    return load_tokenizer(file, end_of_text)


def weights_mismatch(spec: ModelSpec, weights: dict[str, Tensor]) -> str:
    """The first tensor that doesn't fit the decoder that `spec` describes, and why; empty if all fit.

    Nothing of the claimed size is allocated: shapes are compared on torch's meta device, which stores no numbers.
    """
    model, embedding = spec.model, weights.get("embedding.weight")
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if embedding is not None and embedding.shape != (spec.vocab_size, model.n_embd):  # before a width that torch can't even multiply
        return _other_shape("embedding.weight", embedding, (spec.vocab_size, model.n_embd))
    if len(layers) != model.n_layer:
        return f"there are weights of {len(layers)} layers, model.n_layer is {model.n_layer}"
    with torch.device("meta"):
        implied = spec.decoder().state_dict()
    for name in {**implied, **weights}:
        if name not in weights or name not in implied:
            return f"{name} is {'missing' if name in implied else 'not a tensor of the model'}"
        if weights[name].shape != implied[name].shape:
            return _other_shape(name, weights[name], implied[name].shape)
        if not weights[name].is_contiguous():  # an expanded single number claims any size
            return f"{name} is not contiguous"
    return ""


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raises RunError if one of the weights of the model at `path` is not finite: nothing can be computed with them."""
    for name, value in weights.items():
        if not value.isfinite().all():
            raise RunError(f"{path}: {name} holds numbers that are not finite; use weights from before the model diverged")


def _other_shape(name: str, tensor: Tensor, implied: tuple[int, ...]) -> str:
    return f"{name} has shape {tuple(tensor.shape)}, the configuration implies {tuple(implied)}"


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
        have = ", ".join(str(step_of(path)) for path in steps_saved(checkpoints)) or "none"
        raise RunError(f"{path}: no such checkpoint; steps saved in {folder}: {have}")
    return path


def export(source: Path, checkpoint: str, out: Path) -> Path:
    """Write the model at `source` to the folder `out` without pickle, with the metadata of its training. Returns `out`.

    Raises:
        RunError: nothing to load there, `out` holds something, or it can't be written; nothing half-written is left.
    """
    loaded = load(source, checkpoint)
    training = {**loaded.metadata, "config": to_yaml(loaded.config)} if loaded.config else None
    return _write(loaded.decoder, loaded.spec, out, loaded.folder / TOKENIZER if loaded.tokenizer else None, training, loaded.origin)


def save_model(
    decoder: Decoder, out: str | os.PathLike, tokenizer: str | os.PathLike | None = None, end_of_text: str = END_OF_TEXT
) -> Path:
    """Write a decoder, trained here or elsewhere, to the folder `out` as `lm export` does: for `load`, generation and the harness.

    Args:
        decoder: with its weights; on any device.
        tokenizer: a tokenizer.json of the `tokenizers` library; None: of a model without text.
        end_of_text: its token that starts a document.

    Raises:
        RunError: RoPE is rescaled (`for_inference`), weights are not finite, the tokenizer has more tokens than the model, or as `export`.
        DataError: the tokenizer can't be used, or has no such token.
    """
    out, tokenizer = Path(out), Path(tokenizer) if tokenizer else None
    if decoder.rope_scaling != AS_TRAINED:
        raise RunError(f"{out}: a model folder holds no inference setting: save the decoder that the copy with its own RoPE was made of")
    if tokenizer and (tokens := load_tokenizer(tokenizer, end_of_text).get_vocab_size()) > decoder.vocab_size:
        raise RunError(f"{tokenizer}: has {tokens} tokens, the model {decoder.vocab_size}: give the one that it was trained with")
    check_finite(decoder.state_dict(), out)
    return _write(decoder, ModelSpec.of(decoder, end_of_text), out, tokenizer, None, {})


def _write(
    decoder: Decoder, spec: ModelSpec, out: Path, tokenizer: Path | None, training: dict[str, Plain] | None, origin: dict[str, Plain]
) -> Path:
    """The decoder as a model folder. A tied head is stored once, as the embedding."""
    state = {name: value for name, value in sorted(decoder.state_dict().items()) if name != "head.weight" or not spec.model.tied}
    described = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
    tensors = ((name, value.cpu()) for name, value in state.items())
    return write_model(out, spec, described, tensors, tokenizer.read_bytes() if tokenizer else None, training, origin)
