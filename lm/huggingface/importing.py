"""Import a pretrained model of Hugging Face (`lm import`, safetensors) to a model folder, which lm loads like a run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from lm.config.data_config import END_OF_TEXT
from lm.data.tokenizer import (
    NOT_A_TOKENIZER,
    TOKENIZER_CONFIG_FILE,
    convert_library_errors,
    download_files,
    parse_tokenizer,
    read_tokenizer_json,
    require_tokenizer_json,
    vocab_size,
)
from lm.errors import ConfigError, DataError, Problem, RunError, one_line
from lm.files import read_json, require_new_path
from lm.huggingface.architectures import ARCHITECTURES, HEAD_TENSOR, Architecture, MappedParameter
from lm.huggingface.fields import ConfigFields
from lm.model.spec import ModelSpec
from lm.plain import Plain, to_plain
from lm.runs.folder import TOKENIZER_FILE
from lm.runs.loading import write_model

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
READABLE_DTYPES = ("F32", "F16", "BF16")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CURRENT_TENSOR_NAMES = {"embed_out.weight": HEAD_TENSOR}  # of GPT-NeoX
LM_MODEL_TYPE = "lm_decoder"  # model_type of an export that is computed by lm's code, modeling_lm.py
JsonText = str  # text of a tokenizer.json
StartToken = str  # token that starts a document


class WeightFiles:
    """This class reads tensors from a folder's model.safetensors, or from the shards that model.safetensors.index.json
    lists.

    Attributes:
        folder: the folder, which errors name.
        shapes: shape of each tensor, by its name in transformers.

    Raises RunError: the folder has no weights, or a shard is missing, truncated or damaged.
    """

    def __init__(self, folder: Path):
        self.folder, self.shapes = folder, dict[str, tuple[int, ...]]()
        # of each tensor: its file, and its dtype and name there
        self._file_dtype_and_name: dict[str, tuple[Path, str, str]] = {}
        for file in _weight_files(folder):
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        """Record the shape, dtype and file of each tensor in `file`. Raises RunError: the file is missing or
        damaged.
        """
        if not file.is_file():
            raise RunError(f"{file}: no such file, which {INDEX_FILE} lists; fetch the model again")
        try:
            with safe_open(file, "pt") as reader:
                for name in reader.keys():  # noqa: SIM118
                    tensor = reader.get_slice(name)
                    current_name = CURRENT_TENSOR_NAMES.get(name, name)
                    self.shapes[current_name] = tuple(tensor.get_shape())
                    self._file_dtype_and_name[current_name] = file, tensor.get_dtype(), name
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: not a readable safetensors file: {one_line(error, 160)}; fetch it again") from None

    def read(self, name: str) -> Tensor:
        """Return a tensor, converted to fp32.

        The file is opened for this tensor alone, so that no other tensor stays in mapped memory. Raises RunError: the
        tensor can't be read, or its stored dtype is not one of `READABLE_DTYPES`.
        """
        file, dtype, stored_name = self._file_dtype_and_name[name]
        if dtype not in READABLE_DTYPES:
            raise RunError(f"{file}: {name} has type {dtype}; only {', '.join(READABLE_DTYPES)} are read")
        try:
            with safe_open(file, "pt") as reader:
                return reader.get_tensor(stored_name).to(torch.float32)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{file}: {name} is not readable: {one_line(error, 160)}") from None


def _weight_files(folder: Path) -> list[Path]:
    """Return the paths of a folder's safetensors files. Raises RunError: there are none, or their index is damaged."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        if pickles := [path.name for pattern in PICKLE_PATTERNS for path in sorted(folder.glob(pattern))]:
            reason = (
                "a pickle, which may run code when it is read; convert it where you trust it: "
                "model.save_pretrained writes safetensors"
            )
            raise RunError(f"{folder / pickles[0]}: {reason}")
        raise RunError(f"{folder}: no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    files_by_name = read_json(index).get("weight_map")
    if not isinstance(files_by_name, dict) or not files_by_name or not all(map(_is_file_name, files_by_name.values())):
        raise RunError(f"{index}: its weight_map must name a file of the folder for each tensor")
    return [folder / file for file in dict.fromkeys(files_by_name.values())]


def _is_file_name(file: object) -> bool:
    """Return whether `file` is a file's name without folders."""
    return isinstance(file, str) and file not in ("", ".", "..") and Path(file).name == file


# ---------------------------------------------------------------- the model


CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class PretrainedModel:
    """This class holds a pretrained model's configuration and tokenizer; its weights are not read yet."""

    config_path: Path  # the path of its config.json, which errors name
    config: dict[str, Plain]  # fields as in a config.json
    weight_files: WeightFiles
    tokenizer: str | None  # content of a tokenizer.json; None: there is none
    tokenizer_path: Path  # the path of the tokenizer, which errors name
    tokenizer_config: dict[str, Plain]  # content of the tokenizer's tokenizer_config.json
    generation_config: dict[str, Plain]  # content of the model's generation_config.json
    origin: dict[str, Plain]  # facts on the source of the model, beside its architecture


def import_model(
    source: str,
    target: Path,
    train_length: int | None = None,
    revision: str | None = None,
    tokenizer: Path | None = None,
    end_of_text: str | None = None,
) -> ModelSpec:
    """Write a pretrained model to the model folder `target`, and return its spec. No code of the model is executed.

    Args:
        source: a folder in the format of transformers (safetensors, also in shards), or a name on the hub.
        train_length: training length in tokens; None: the number of positions in its configuration, e.g.
            `max_position_embeddings`.
        revision: commit, tag or branch of a model on the hub.
        tokenizer: a tokenizer.json or a tokenizer's folder; None: the model's own.
        end_of_text: the token that starts a document; None: <|endoftext|> if the tokenizer has it, else its BOS or EOS.

    Raises:
        RunError: `source` is no model or can't be used (the message names the field or tensor), or `target` exists;
            nothing is written.
        DataError: `source` or the tokenizer is neither on this machine nor on the hub, or the tokenizer can't be read.
        ConfigError: `train_length` is not the number of learned positions, or an argument does not apply to `source`.
    """
    require_new_path(target)
    model = open_pretrained(source, revision, tokenizer)
    fields = ConfigFields(model.config, model.config_path)
    model_type = fields.read_value("model_type", str)
    if model_type not in ARCHITECTURES:
        reason = (
            "this export of lm has code of its own: export the run without --format hf; "
            if model_type == LM_MODEL_TYPE
            else ""
        )
        raise fields.refusal("model_type", f"{reason}only {', '.join(ARCHITECTURES)} are read")
    architecture = ARCHITECTURES[model_type]
    spec = architecture.read_model_spec(fields)
    positions = spec.seq_len
    if train_length is not None and train_length != positions and spec.model.position.has_length_limit:
        raise ConfigError(
            [Problem("--length", train_length, f"{source} has learned positions for {positions}", "drop it")]
        )
    if end_of_text and model.tokenizer is None:
        raise ConfigError(
            [Problem("--end-of-text", end_of_text, f"{source} has no tokenizer", "name one with --tokenizer")]
        )
    token_count, tokenizer_text = 0, None
    if model.tokenizer is not None:
        tokenizer, tokenizer_text, spec.end_of_text, spec.end_tokens = read_tokenizer(
            model, end_of_text, spec.vocab_size
        )
        token_count = vocab_size(tokenizer)
    spec.seq_len = train_length or positions
    try:
        spec = ModelSpec.from_plain(to_plain(spec))  # checks lm's bounds, and for contradictions
    except ConfigError as error:
        raise RunError(f"{model.config_path}: describes a model that can't be built: {one_line(error)}") from None
    parameters = _checked_parameters(architecture, spec, fields.path.name, model.weight_files)
    origin = {**model.origin, "architecture": model_type, "max_position_embeddings": positions}
    tokenizer_bytes = None if tokenizer_text is None else tokenizer_text.encode()
    tensors = dict(_parameter_values(parameters, model.weight_files))
    n_parameters = sum(tensor.numel() for tensor in tensors.values())
    write_model(target, spec, tensors, tokenizer_bytes, origin=origin)
    _print_summary(target, model_type, spec, token_count, n_parameters)
    return spec


def open_pretrained(source: str, revision: str | None, tokenizer: Path | None) -> PretrainedModel:
    """Return the model that `source` names, without reading its weights. Arguments and errors are those of
    `import_model`.
    """
    path, origin = Path(source), {"source": source}
    if revision and path.exists():
        raise ConfigError([Problem("--revision", revision, f"{source} is on this machine, not on the hub", "drop it")])
    if path.is_file():
        raise RunError(f"{path}: not a folder with a {CONFIG_FILE}; text and token ids are read by lm prepare")
    if not path.is_dir():
        path = download_files(source, revision, ["*.json", "*.safetensors"])
        origin["commit"] = path.name
    if not (path / CONFIG_FILE).is_file():
        raise RunError(f"{path}: not a model in the format of transformers: it has no {CONFIG_FILE}")
    config = read_json(path / CONFIG_FILE)
    tokenizer_path = tokenizer or path
    tokenizer_text = require_tokenizer_json(tokenizer) if tokenizer else read_tokenizer_json(path)
    tokenizer_config, generation_config = (
        read_json(file) if file.is_file() else {}
        for file in (tokenizer_path / TOKENIZER_CONFIG_FILE, path / "generation_config.json")
    )
    tokenizer_path = tokenizer_path / TOKENIZER_FILE if tokenizer_path.is_dir() else tokenizer_path
    return PretrainedModel(
        path / CONFIG_FILE,
        config,
        WeightFiles(path),
        tokenizer_text,
        tokenizer_path,
        tokenizer_config,
        generation_config,
        origin,
    )


def read_tokenizer(
    model: PretrainedModel, end_of_text: str | None, model_vocab_size: int
) -> tuple[Tokenizer, JsonText, StartToken, list[str]]:
    """Return a model's tokenizer, the text of its tokenizer.json, its start token and its end tokens.

    The start token, which starts a document, is `end_of_text` if that is given. An empty list of end tokens means that
    the start token also ends a document.

    model_vocab_size: number of token ids of the model. Raises RunError: as `import_model` does.
    """
    start_token = end_of_text or _start_token(model)
    tokenizer, text = _checked_tokenizer(model, start_token, model_vocab_size)
    added_tokens = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
    end_tokens = _configured_tokens("eos", added_tokens, model.tokenizer_config, model.config, model.generation_config)
    return tokenizer, text, start_token, [] if end_tokens == [start_token] else end_tokens


def _start_token(model: PretrainedModel) -> StartToken:
    """Return the token that starts a document: <|endoftext|> if it is a special token, else the model's BOS, else its
    EOS.

    Raises RunError: the tokenizer has none of these tokens, or can't be parsed.
    """
    path = model.tokenizer_path
    try:
        tokens = {
            token["id"]: token["content"] for token in json.loads(model.tokenizer)["added_tokens"] if token["special"]
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: its tokenizer is {NOT_A_TOKENIZER}: {one_line(error, 160)}") from None
    if END_OF_TEXT in tokens.values():
        return END_OF_TEXT
    for role in ("bos", "eos"):
        if configured_tokens := _configured_tokens(role, tokens, model.tokenizer_config, model.config):
            return configured_tokens[0]
    special_text = (
        f"its special tokens: {', '.join(map(str, [*tokens.values()][:8]))}" if tokens else "it has no special tokens"
    )
    raise RunError(f"{path}: no token that starts a document is known ({special_text}); name one: --end-of-text TOKEN")


def _configured_tokens(role: str, token_by_id: dict[int, str], *configurations: dict[str, Plain]) -> list[str]:
    """Return the BOS or EOS tokens that `configurations` name by text or id, and that are in `token_by_id`.

    role: `bos` or `eos`.
    """
    named_tokens: list[Plain] = []
    for fields in configurations:
        token, ids = fields.get(f"{role}_token"), fields.get(f"{role}_token_id")
        named_tokens.append(token.get("content") if isinstance(token, dict) else token)
        named_tokens += [
            token_by_id.get(index) for index in (ids if isinstance(ids, list) else [ids]) if isinstance(index, int)
        ]
    return [*dict.fromkeys(token for token in named_tokens if isinstance(token, str) and token in token_by_id.values())]


def _checked_tokenizer(model: PretrainedModel, start_token: str, model_vocab_size: int) -> tuple[Tokenizer, JsonText]:
    """Return a model's tokenizer and its tokenizer.json. Special tokens whose ids the model doesn't have are dropped,
    as the model can neither read nor generate them.

    Raises RunError: the tokenizer can't be used, lacks the token `start_token`, or has other ids of `model_vocab_size`
    or above.
    """
    content = model.tokenizer
    try:
        with convert_library_errors(f"its tokenizer is {NOT_A_TOKENIZER}"):
            tokenizer = parse_tokenizer(content, start_token)
            if vocab_size(tokenizer) > model_vocab_size:  # often <pad>, which fine-tuning adds
                fields = json.loads(content)
                fields["added_tokens"] = [
                    token
                    for token in fields["added_tokens"]
                    if token["id"] < model_vocab_size or not token["special"] or token["content"] == start_token
                ]
                content = json.dumps(fields, ensure_ascii=False)
                tokenizer = parse_tokenizer(content, start_token)
    except DataError as error:
        text = str(error).replace("set data.tokenizer.end_of_text to one", "name one with --end-of-text")
        raise RunError(f"{model.tokenizer_path}: {text}") from None
    if (size := vocab_size(tokenizer)) > model_vocab_size:
        reason = (
            f"the tokenizer has ids up to {size - 1:,}, the model's vocab_size is {model_vocab_size:,}: "
            "of another model?"
        )
        raise RunError(f"{model.tokenizer_path}: {reason}")
    return tokenizer, content


def _checked_parameters(
    architecture: Architecture, spec: ModelSpec, config_name: str, tensors: WeightFiles
) -> list[MappedParameter]:
    """Return lm's parameters with the tensors that hold them, sorted by name, after checking that the tensors fit.

    Raises RunError: a tensor is missing, unknown or has another shape, or a tied head differs from the embedding.
    """
    base = architecture.tensor_prefix * any(name.startswith(architecture.tensor_prefix) for name in tensors.shapes)
    parameters = list(architecture.mapped_parameters(spec, base))
    expected_shapes = {name: size for parameter in parameters for name, size in parameter.tensors}
    if spec.model.tied and HEAD_TENSOR in tensors.shapes:
        expected_shapes[HEAD_TENSOR] = (spec.vocab_size, spec.model.n_embd)
        if tensors.shapes[HEAD_TENSOR] == expected_shapes[HEAD_TENSOR] and not torch.equal(
            tensors.read(HEAD_TENSOR), tensors.read(parameters[0].tensors[0][0])
        ):
            raise RunError(
                f"{tensors.folder}: {HEAD_TENSOR} differs from the embedding, and tie_word_embeddings is true"
            )
    for name, size in expected_shapes.items():
        if name not in tensors.shapes:
            raise RunError(f"{tensors.folder}: there is no tensor {name}, which {config_name} implies")
        if tensors.shapes[name] != size:
            raise RunError(f"{tensors.folder}: {name} has shape {tensors.shapes[name]}, {config_name} implies {size}")
    unknown_names = [
        name
        for name in tensors.shapes
        if name not in expected_shapes and not name.endswith(architecture.buffer_suffixes or ("\n",))
    ]
    if unknown_names:
        raise RunError(
            f"{tensors.folder}: {unknown_names[0]} is not a tensor of the model that {config_name} describes"
        )
    return sorted(parameters, key=lambda parameter: parameter.name)


def _parameter_values(parameters: list[MappedParameter], tensors: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of each of lm's parameters, which is read when it is requested.

    Raises RunError: a tensor holds NaN or infinity.
    """
    for parameter in parameters:
        pieces = []
        for name, _ in parameter.tensors:
            pieces.append(tensors.read(name))
            if not pieces[-1].isfinite().all():
                raise RunError(f"{tensors.folder}: {name} holds numbers that are not finite")
        pieces = [piece.t() for piece in pieces] if parameter.is_transposed else pieces
        if parameter.n_interleaved_heads:
            pieces = [
                piece.unflatten(0, (parameter.n_interleaved_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
                for piece in pieces
            ]
        yield parameter.name, torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


def _print_summary(folder: Path, model_type: str, spec: ModelSpec, n_tokens: int, n_parameters: int) -> None:
    """Print the imported model's architecture and size, and its tokenizer's size and special tokens."""
    print(
        f"{folder}: {model_type}, {n_parameters:,} parameters, {spec.model.position.label}, "
        f"training length {spec.seq_len:,}"
    )
    if n_tokens:
        end_note = f", end with {' or '.join(spec.end_tokens)}" if spec.end_tokens else ""
        room_note = f" (the model has room for {spec.vocab_size:,})" if n_tokens < spec.vocab_size else ""
        print(f"tokenizer: {n_tokens:,} tokens{room_note}; documents start with {spec.end_of_text}{end_note}")
    else:
        print("no tokenizer: the model neither reads nor writes text; name one with --tokenizer")
