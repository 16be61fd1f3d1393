"""Read trained models from run folders, checkpoints and model folders, and write model folders. A model folder holds
safetensors, JSON and a tokenizer.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from lm.config.data_config import END_OF_TEXT
from lm.config.eval_config import NO_SCALING
from lm.config.tree import Config
from lm.config.yaml_text import dump_yaml
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError, RunError, is_out_of_memory, one_line, terminal_text
from lm.files import expand_home, json_bytes, new_folder
from lm.model.decoder import Decoder
from lm.model.spec import ModelSpec
from lm.plain import Plain, to_plain
from lm.runs.checkpoints import load_checkpoint, read_checkpoint_without_manifest
from lm.runs.folder import (
    CHECKPOINTS_FOLDER,
    ENVIRONMENT_FILE,
    FORMAT_WITHOUT_MANIFEST,
    MANIFEST_FILE,
    MODEL_JSON,
    TOKENIZER_FILE,
    check_file,
    checkpoint_paths,
    checkpoint_step,
    read_entries,
    read_environment,
    read_model_json,
    require_run,
    write_files,
)
from lm.runs.resume_checks import trained_config

WEIGHTS_FILE = "model.safetensors"  # file in a model folder, beside MODEL_JSON
MODEL_KEYS_FILE = (
    "model.yaml"  # file in the folder of a model without a training run, from which a configuration starts
)
KEYS_LEFT_OUT_OF_MODEL_YAML = ("normalizer", "dropout", "init_std")  # keys of `model` that are no part of its shape
MODEL_FORMAT = 6  # version of lm.json; FORMAT_WITHOUT_MANIFEST is read, too


def write_model(
    out: Path,
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    tokenizer_json: bytes | None,
    training_metadata: dict[str, Plain] | None = None,
    origin: dict[str, Plain] | None = None,
) -> Path:
    """Write a model to the folder `out` atomically, and return `out`.

    Args:
        weights: all parameters by name, on any device; a tied head is stored once, as the embedding.
        tokenizer_json: content of the model's tokenizer.json; None: the model has no tokenizer, as it reads no text.
        training_metadata: metadata of the checkpoint, such as `step`; None: the model is of no training run.
        origin: facts on where an imported model came from.

    Raises RunError: `out` holds something, or can't be written.
    """
    with new_folder(out) as folder:
        description = {
            "format": MODEL_FORMAT,
            "spec": to_plain(spec),
            "training": training_metadata,
            "origin": origin or {},
        }
        files = {MODEL_JSON: json_bytes(description)} | (
            {} if tokenizer_json is None else {TOKENIZER_FILE: tokenizer_json}
        )
        if training_metadata is None:
            files[MODEL_KEYS_FILE] = dump_yaml(_model_keys(out, spec, tokenizer_json is not None)).encode()
        names = [name for name in weights if name != "head.weight" or not spec.model.tied]
        copies = {name: weights[name].cpu().clone() for name in names}  # safetensors refuses what layers share
        files[WEIGHTS_FILE] = safetensors.torch.save(copies, {"format": "pt"})
        write_files(folder, files, (training_metadata or {}).get("step", 0))
    return out


def _model_keys(out: Path, spec: ModelSpec, has_tokenizer: bool) -> dict[str, Plain]:
    """Return the keys of a configuration that trains from the model folder `out`: weights, shape and tokenizer. If the
    model has learned positions, the training length is among the keys. The normalizer, which may be code, is left to
    the user.
    """
    model = {name: value for name, value in to_plain(spec.model).items() if name not in KEYS_LEFT_OUT_OF_MODEL_YAML}
    data: dict[str, Plain] = {"seq_len": spec.seq_len} if spec.model.position.name == "learned" else {}
    if has_tokenizer:
        # the start token ends the document before, too
        ends = [*dict.fromkeys([*spec.end_tokens, spec.end_of_text])] if spec.end_tokens else []
        path = f"${{init_from}}/{TOKENIZER_FILE}"
        data["tokenizer"] = {"name": "file", "path": path, "end_of_text": spec.end_of_text, "end_tokens": ends}
    return {"init_from": str(out), "model": model, "data": data}


# ---------------------------------------------------------------- models read back


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model is a decoder that was read from files, with its tokenizer, configuration and metadata."""

    decoder: Decoder  # the model in evaluation mode, on the CPU
    spec: ModelSpec  # its description; `spec.model` is its configuration in the phase of training that it has reached
    tokenizer: Tokenizer | None  # its tokenizer; None if no tokenizer.json lies beside the weights
    path: Path  # the checkpoint or model folder it was read from
    config: Config | None = None  # the configuration it was trained with; None if the model has no training run
    # plain data about its training: `step`, `tokens`, `data_fingerprint`, `phase`, `config` as YAML; {} without one
    metadata: dict[str, Plain] = field(default_factory=dict)
    # the run's environment.json; {} if there is no such file
    environment: dict[str, Plain] = field(default_factory=dict)
    # `source`, `architecture` ... of an imported model; {} for other models
    origin: dict[str, Plain] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return the folder with tokenizer.json and other files: the run folder of a checkpoint, or the model folder
        itself.
        """
        return _model_folder(self.path)

    def tokenizer_and_start_id(self) -> tuple[Tokenizer, int]:
        """Return the tokenizer, and the id of the token that starts a document. Raises RunError: the model has no
        tokenizer.
        """
        if self.tokenizer is None:
            raise RunError(
                f"{self.folder}: no tokenizer.json beside the weights, so that text can't be read or written"
            )
        return self.tokenizer, self.tokenizer.token_to_id(self.spec.end_of_text)

    @property
    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end a document; the model must have a tokenizer. Raises RunError: the
        tokenizer lacks such a token.
        """
        ids = {token: self.tokenizer.token_to_id(token) for token in self.spec.end_tokens or [self.spec.end_of_text]}
        if unknown_tokens := [token for token, index in ids.items() if index is None]:
            raise RunError(f"{self.folder}: its tokenizer has no token {unknown_tokens[0]} (end_tokens)")
        return [*ids.values()]

    @property
    def step_tokens_and_data(self) -> dict[str, Plain]:
        """Return the model's `step`, `tokens_seen` and `data_fingerprint`, as fields of an evaluation. They are 0, 0
        and None without a training run.
        """
        step, tokens = self.metadata.get("step", 0), self.metadata.get("tokens", 0)
        return {"step": step, "tokens_seen": tokens, "data_fingerprint": self.metadata.get("data_fingerprint")}


def load(path: str | os.PathLike, checkpoint: str | int = "last") -> LoadedModel:
    """Load the model at `path`, a checkpoint, a model folder or a run folder. Every byte is verified before it is used.

    checkpoint: the checkpoint of a run folder: `last`, `best` or a step. `lm export` and `save_model` write model
    folders.

    Raises RunError: there is no such model, a file is damaged, weights don't fit their configuration or aren't finite,
    or files belong to different runs.
    """
    path, checkpoint = expand_home(path), str(checkpoint)
    if checkpoint != "last" and not (path / CHECKPOINTS_FOLDER).is_dir():
        raise RunError(f"{path}: not a run folder, of which a checkpoint ({checkpoint}) could be chosen")
    if (path / MODEL_JSON).is_file():
        return _load_model_folder(path)
    if path.is_dir():
        require_run(path, CHECKPOINTS_FOLDER)
        paths = checkpoint_paths(path / CHECKPOINTS_FOLDER)
        files = {str(checkpoint_step(file)): file for file in paths} | ({"last": paths[-1]} if paths else {})
        if paths and checkpoint == "best":
            best = read_checkpoint_without_manifest(paths[-1])["lm"].get("best")
            step = str(best.get("step")) if isinstance(best, dict) else ""
            files |= {"best": files[step]} if step in files else {}
        if checkpoint not in files:
            there = ", ".join(files) or "none"
            raise RunError(f"{path}: no checkpoint {checkpoint}; there is: {there}")
        path = files[checkpoint]
    content, folder = load_checkpoint(path), _model_folder(path)
    environment = read_environment(folder) if (folder / ENVIRONMENT_FILE).is_file() else {}
    with _convert_misfit_errors(path):
        config = trained_config(content["lm"], path)
        spec = ModelSpec.from_training(config, content["lm"])
        decoder = _build_decoder(spec, content["state_dict"], path)
    return LoadedModel(decoder, spec, _read_tokenizer(folder, spec), path, config, content["lm"], environment)


def _load_model_folder(folder: Path) -> LoadedModel:
    """Load the model of a model folder. Raises RunError: the folder has a format that this version can't read, or a
    file was altered."""
    description = {"origin": {}, **read_model_json(folder)}
    version = description.get("format")
    if version == FORMAT_WITHOUT_MANIFEST:
        text = f"exported by lm 0.11, without a {MANIFEST_FILE}: its files are not checked; export it again"
        print(terminal_text(f"note: {folder}: {text}"), file=sys.stderr)
    elif version != MODEL_FORMAT:
        raise RunError(
            f"{folder / MODEL_JSON}: format {version}, this version of lm reads {MODEL_FORMAT}: export the model again"
        )
    else:
        check_file(folder, WEIGHTS_FILE, advice="export it again")
    with _convert_misfit_errors(folder):
        spec, metadata = ModelSpec.from_plain(description["spec"]), description["training"] or {}
        config = trained_config(metadata, folder) if metadata else None
        decoder = _build_decoder(spec, safetensors.torch.load_file(folder / WEIGHTS_FILE), folder)
    tokenizer = _read_tokenizer(folder, spec)
    return LoadedModel(decoder, spec, tokenizer, folder, config, metadata, origin=description["origin"])


# errors of OmegaConf, torch and safetensors on content that doesn't fit
_MISFIT_ERRORS = (
    LookupError,
    RuntimeError,
    TypeError,
    AttributeError,
    ValueError,
    OverflowError,
    OSError,
    SafetensorError,
    ConfigError,
)


@contextmanager
def _convert_misfit_errors(path: Path) -> Iterator[None]:
    """Return a context that turns errors on the content of `path` into RunError. A stranger may have written that
    content.
    """
    try:
        yield
    except _MISFIT_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise RunError(f"{path}: weights and configuration don't fit: {one_line(error)}") from None


def _build_decoder(spec: ModelSpec, weights: dict[str, Tensor], path: Path) -> Decoder:
    """Return a decoder with weights, in evaluation mode on the CPU. Raises RunError, or one of `_MISFIT_ERRORS`: names,
    shapes or values don't fit.
    """
    for name, saved_version, present_version in spec.changed_plugins():
        changed = f"{name} was {saved_version} when this was saved, it is {present_version} now"
        print(terminal_text(f"note: {path}: {changed}: the model may be another"), file=sys.stderr)
    if spec.model.tied:
        weights.setdefault("head.weight", weights["embedding.weight"])
    if len({name.split(".")[1] for name in weights if name.startswith("blocks.")}) != spec.model.n_layer:
        raise ValueError(f"model.n_layer is {spec.model.n_layer}, and there are weights of another number of layers")
    if expanded := [name for name, value in weights.items() if not value.is_contiguous()]:
        raise ValueError(f"{expanded[0]} is not contiguous")  # a single expanded value can claim any shape
    # Names and shapes are compared on a device without memory, as a damaged file may claim any size.
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        spec.make_decoder().load_state_dict(weights)
    check_finite(weights, path)
    decoder = spec.make_decoder()
    decoder.load_state_dict(weights)
    return decoder.eval()


def _read_tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer | None:
    """Return the tokenizer in `folder`; None if there is none, and the manifest has no entry of one.

    Raises:
        RunError: the tokenizer is missing, or not the one that the model was trained with.
        DataError: the tokenizer can't be used.
    """
    if (folder / MANIFEST_FILE).is_file() and read_entries(folder, TOKENIZER_FILE):
        check_file(folder, TOKENIZER_FILE, advice="bring back the one that the model was trained with")
    return load_tokenizer(folder / TOKENIZER_FILE, spec.end_of_text) if (folder / TOKENIZER_FILE).is_file() else None


def check_finite(weights: Mapping[str, Tensor], path: Path) -> None:
    """Check that all weights of the model at `path` are finite. Raises RunError otherwise."""
    for name, value in weights.items():
        if not value.isfinite().all():
            raise RunError(
                f"{path}: {name} holds numbers that are not finite; use weights from before the model diverged"
            )


def _model_folder(checkpoint_or_folder: Path) -> Path:
    """Return the folder of a model's files: the path itself if it is a folder, else the checkpoint's run folder."""
    if checkpoint_or_folder.is_dir():
        return checkpoint_or_folder
    return Path(os.path.realpath(checkpoint_or_folder)).parent.parent  # raises nothing for a loop of links


def export(source: Path, checkpoint: str, out: Path) -> Path:
    """Write the model at `source` as the model folder `out`, with the metadata of its training run, and return `out`.
    `checkpoint` is `last`, `best` or a step.

    Raises RunError: there is no model at `source`, or `out` is not empty or can't be written. No incomplete folder is
    left.
    """
    model = load(source, checkpoint)
    training = model.metadata if model.config else None
    tokenizer = (model.folder / TOKENIZER_FILE).read_bytes() if model.tokenizer else None
    return write_model(out, model.spec, model.decoder.state_dict(), tokenizer, training, model.origin)


def save_model(
    decoder: Decoder, out: str | os.PathLike, tokenizer: str | os.PathLike | None = None, end_of_text: str = END_OF_TEXT
) -> Path:
    """Write a decoder, trained by lm or elsewhere, as a model folder, which `load` and `lm` commands read. Return
    `out`.

    Args:
        decoder: the decoder with its weights, on any device.
        tokenizer: a tokenizer.json of the `tokenizers` library; None: the model has no text.
        end_of_text: the tokenizer's separator of documents, such as <|endoftext|>, which stands before each document.

    Raises:
        RunError: RoPE is rescaled (`with_inference_setting`), weights are not finite, the tokenizer has more tokens
            than the model, or `out` holds something or can't be written.
        DataError: the tokenizer can't be used, or has no token `end_of_text`.
    """
    out, tokenizer = expand_home(out), expand_home(tokenizer) if tokenizer else None
    if decoder.rope_scaling != NO_SCALING:
        raise RunError(f"{out}: a model folder holds no inference setting: save the decoder without its own RoPE")
    if tokenizer and (tokens := load_tokenizer(tokenizer, end_of_text).get_vocab_size()) > decoder.vocab_size:
        reason = f"has {tokens} tokens, the model {decoder.vocab_size}"
        raise RunError(f"{tokenizer}: {reason}: give the one that it was trained with")
    check_finite(decoder.state_dict(), out)
    spec, content = ModelSpec.from_decoder(decoder, end_of_text), tokenizer.read_bytes() if tokenizer else None
    return write_model(out, spec, decoder.state_dict(), content)
