"""Model folders written: safetensors, a description with a sha256 of each tensor, and the tokenizer. `lm.runs.loading` reads them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lm.files import file_sha256, new_folder, replacing
from lm.model.spec import ModelSpec
from lm.runs.folder import TOKENIZER, write_sealed
from lm.runs.weights_file import Described, write_weights
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
