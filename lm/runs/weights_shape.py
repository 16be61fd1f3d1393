"""What a new run takes from weights without a training run, such as an imported model: shape, tokenizer, and learned positions' length."""

from pathlib import Path

from lm.attention.catalogue import ENTRIES, Layers
from lm.config.load import merge, read_yaml
from lm.errors import RunError
from lm.runs.folder import CONFIG, ENVIRONMENT, TOKENIZER, read_json, read_sealed
from lm.schema import Plain

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
    from lm.runs.model_folder import DESCRIPTION  # imports torch

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
    """What a run takes from a model of this description: a normalizer of ours; and the shape, tokenizer and length of learned positions."""
    normalizer = model["normalizer"]
    # A configuration may import the normalizers that it names; a model folder may not, so that none from outside is taken from it.
    ours = all(one["name"] in ENTRIES for one in (normalizer["of"] if normalizer["name"] == Layers.name else [normalizer]))
    shape: Keys = {"model": {name: value for name, value in model.items() if name not in TRAINED_OTHERWISE}, "data": {}}
    if (folder / TOKENIZER).is_file():
        shape["data"]["tokenizer"] = {"name": "file", "path": str(folder / TOKENIZER), "end_of_text": end_of_text}
    if model["position"]["name"] == "learned":
        shape["data"]["seq_len"] = seq_len
    return {"model": {"normalizer": normalizer}} if ours else {}, shape
