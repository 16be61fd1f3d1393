"""Model folders written: safetensors, a description with a sha256 of each tensor, and the tokenizer. `lm.runs.loading` reads them.

`with_shape_of` gives a new run the shape of such weights.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lm.attention.catalogue import ENTRIES, Layers
from lm.config.load import merge, read_yaml
from lm.errors import RunError
from lm.files import file_sha256, new_folder, replacing
from lm.model.spec import ModelSpec
from lm.runs.checkpoints import Described, write_weights
from lm.runs.folder import CONFIG, ENVIRONMENT, TOKENIZER, read_json, read_sealed, write_sealed
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
    found = _untrained(folder)
    if found is None:
        return merge(given, own)
    normalizer, over = found
    under = {} if given.get("phases") or own.get("phases") else normalizer
    return merge(merge(merge(under, given), over), own)


def _untrained(folder: Path) -> tuple[Keys, Keys] | None:
    """The keys of `_taken`, of a model that no training run is known of; None: not such a folder."""

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
    ours = all(one["name"] in ENTRIES for one in (normalizer["of"] if normalizer["name"] == Layers.name else [normalizer]))
    shape: Keys = {"model": {name: value for name, value in model.items() if name not in TRAINED_OTHERWISE}, "data": {}}
    if (folder / TOKENIZER).is_file():
        shape["data"]["tokenizer"] = {"name": "file", "path": str(folder / TOKENIZER), "end_of_text": end_of_text}
    if model["position"]["name"] == "learned":
        shape["data"]["seq_len"] = seq_len
    return {"model": {"normalizer": normalizer}} if ours else {}, shape
