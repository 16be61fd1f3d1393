"""What a new run takes from weights without a training run, such as an imported model: shape, tokenizer, and learned positions' length."""

from pathlib import Path

from lm.attention.catalogue import ENTRIES, Layers
from lm.config.load import merge
from lm.runs.folder import TOKENIZER, read_sealed
from lm.schema import Plain

TRAINED_OTHERWISE = ("normalizer", "dropout", "init_std")  # keys of `model` that the run's own configuration says


def with_shape_of(init_from: str, given: dict[str, Plain]) -> dict[str, Plain]:
    """A configuration's keys, those of the model folder `init_from` in place of its shape and tokenizer; as it is for other weights.

    The normalizer is the folder's only where the configuration names none: another one is not a matter of shape (`lm swap`).

    Raises:
        RunError: the folder's description is damaged.
    """
    from lm.runs.model_folder import DESCRIPTION  # imports torch

    folder = Path(init_from)
    if not (folder / DESCRIPTION).is_file():
        return given
    description = read_sealed(folder / DESCRIPTION)
    spec = description["spec"]
    if description.get("training") is not None:
        return given
    normalizer = spec["model"]["normalizer"]
    # A configuration may import the normalizers that it names; a model folder may not, so that none from outside is taken from it.
    own = all(one["name"] in ENTRIES for one in (normalizer["of"] if normalizer["name"] == Layers.name else [normalizer]))
    under = {"model": {"normalizer": normalizer}} if own and not given.get("phases") else {}
    over: dict[str, Plain] = {"model": {name: value for name, value in spec["model"].items() if name not in TRAINED_OTHERWISE}, "data": {}}
    if (folder / TOKENIZER).is_file():
        over["data"]["tokenizer"] = {"name": "file", "path": str(folder / TOKENIZER), "end_of_text": spec["end_of_text"]}
    if spec["model"]["position"]["name"] == "learned":
        over["data"]["seq_len"] = spec["seq_len"]
    return merge(merge(under, given), over)
