"""`lm export --format hf`: a model as a plain GPT-2, Llama or Qwen folder that transformers loads without code of ours."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lm.attention.options import shown
from lm.config.effects import function_of
from lm.errors import RunError
from lm.files import new_folder, replacing
from lm.huggingface.architectures import ARCHITECTURES, Architecture, Part, Shape
from lm.huggingface.fields import Fields
from lm.huggingface.importing import CONFIG
from lm.huggingface.model_card import model_card
from lm.huggingface.shards import SINGLE
from lm.huggingface.tokenizer_files import TOKENIZER_CONFIG
from lm.model.spec import ModelSpec
from lm.runs.folder import TOKENIZER
from lm.runs.loading import Loaded, load
from lm.runs.weights_file import Described, write_weights
from lm.schema import Plain


def export_for_transformers(source: Path, checkpoint: str, out: Path) -> Path:
    """Write the model at `source` to the folder `out` in the format of transformers, in fp32. Returns `out`.

    Weights, config.json, the tokenizer, and README.md: what the model is, how it was trained, and its figures.

    Raises:
        RunError: nothing to load there, a model that no architecture holds (with the reason), or `out` can't be written.
    """
    loaded = load(source, checkpoint)
    shape = Shape(loaded.spec.model, loaded.spec.vocab_size, loaded.spec.seq_len)
    architecture, config = _architecture(shape, source)
    described, tensors = _tensors(architecture, shape, config, loaded)
    with new_folder(out) as folder:
        with replacing(folder / SINGLE, "the weights") as file:
            write_weights(file, described, tensors)
        files = {CONFIG: {**config, **_tokens(loaded)}}
        if loaded.tokenizer is not None:
            with replacing(folder / TOKENIZER) as file:
                file.write((loaded.folder / TOKENIZER).read_bytes())
            files[TOKENIZER_CONFIG] = _tokenizer_config(loaded.spec)
        for name, content in files.items():
            with replacing(folder / name) as file:
                file.write((json.dumps(content, indent=2) + "\n").encode())
        with replacing(folder / "README.md") as file:
            file.write(model_card(loaded, architecture.model_type).encode())
    return out


def _architecture(shape: Shape, source: Path) -> tuple[Architecture, dict[str, Plain]]:
    """The architecture that holds such a model, and its configuration. Raises RunError with how the nearest one differs."""
    ours, differences = function_of(shape.model), {}
    for name, architecture in ARCHITECTURES.items():
        config = architecture.write(shape)
        theirs = function_of(architecture.read(Fields(config, source)).model)
        apart = [
            f"{key} = {shown(theirs.get(key))} (here {shown(ours.get(key))})"
            for key in dict.fromkeys((*ours, *theirs))
            if ours.get(key) != theirs.get(key) and ("." not in key or (key in ours and key in theirs))  # else another variant's option
        ]
        apart += [reason] if (reason := architecture.unfit(shape)) else []
        if not apart:
            return architecture, config
        differences[name] = apart
    name, apart = min(differences.items(), key=lambda item: len(item[1]))
    nearest = f"the nearest, {name}, has {', '.join(apart)}"
    remedy = "without --format hf it is exported for lm"
    raise RunError(f"{source}: no architecture of transformers computes this model without code of ours; {nearest}; {remedy}")


def _tensors(
    architecture: Architecture, shape: Shape, config: dict[str, Plain], loaded: Loaded
) -> tuple[dict[str, Described], Iterator[tuple[str, Tensor]]]:
    """Types and shapes of the tensors by their names in transformers, and the tensors, made one by one."""
    state = loaded.decoder.state_dict()
    parts = list(architecture.placed(shape, Fields(config, loaded.path), architecture.base))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            for (name, _), value in zip(part.theirs, _split(part, state[part.ours].float()), strict=True):
                yield name, value

    return {name: (torch.float32, size) for part in parts for name, size in part.theirs}, tensors()


def _split(part: Part, value: Tensor) -> Iterator[Tensor]:
    """The tensors that one of our parameters becomes."""
    sizes = [size[-1] if part.transposed else size[0] for _, size in part.theirs]
    for piece in value.split(sizes):
        yield piece.t().contiguous() if part.transposed else piece.contiguous()


def _tokens(loaded: Loaded) -> dict[str, Plain]:
    """Ids of the token that starts, and so ends, documents."""
    if loaded.tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    _, start = loaded.tokenizer_and_start()
    return {"bos_token_id": start, "eos_token_id": start}


def _tokenizer_config(spec: ModelSpec) -> dict[str, Plain]:
    end = spec.end_of_text
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": spec.seq_len,
        "clean_up_tokenization_spaces": False,
    }
