"""The effects of the keys: which distinguish experimental arms, which define a model's function; and one form for all ways to write it."""

from functools import lru_cache

from lm.attention.catalogue import Layers
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.schema import Effect, Plain, build, effect, flatten, reference, to_plain


def canonical(config: dict[str, Plain]) -> dict[str, Plain]:
    """A configuration (plain data, as in config.yaml) with each null of `model` resolved and each list of normalizers at its shortest.

    Configurations of one model are equal in this form. Imports no plugin; a model that can't be read stays as it is.
    """
    model = config.get("model")
    if not isinstance(model, dict):
        return config
    problems = []
    read = build(ModelConfig, {name: value for name, value in model.items() if name != "normalizer"}, "model", problems)
    if problems:
        return config
    resolved = {name: value for name, value in read.block.resolved(read).items() if name in model}
    result = {**config, "model": _with_shortest_list({**model, **resolved}, read.n_layer)}
    if isinstance(phases := config.get("phases"), list):
        result["phases"] = [_with_shortest_list(phase, read.n_layer) for phase in phases]
    return result


def differences(ours: dict[str, Plain], theirs: dict[str, Plain]) -> dict[str, tuple[Plain, Plain]]:
    """The dotted keys in which two configurations (plain data) differ, with the values of both; None where a key is absent.

    Without those that are written alike and differ only because they follow from another key, e.g. `head_size: null` from `n_embd`, and
    without the options of a block whose `name` differs.
    """
    flat = [flatten(config) for config in (ours, theirs)]
    resolved = [flatten(canonical(config)) for config in (ours, theirs)]
    values = {key: tuple(config.get(key) for config in resolved) for key in (*resolved[0], *resolved[1])}
    changes = {key: (a, b) for key, (a, b) in values.items() if a != b and flat[0].get(key, a) != flat[1].get(key, b)}
    renamed = tuple(key.removesuffix("name") for key in changes if key.endswith(".name"))
    return {key: both for key, both in changes.items() if key.endswith(".name") or not key.startswith(renamed)}


def _with_shortest_list(block: Plain, n_layer: int) -> Plain:
    """A block whose `normalizer`, if it is a list that repeats itself over the layers, is the shortest list of that effect."""
    normalizer = block.get("normalizer") if isinstance(block, dict) else None
    listed = normalizer.get("of") if isinstance(normalizer, dict) and normalizer.get("name") == Layers.name else None
    if not isinstance(listed, list) or not listed:
        return block
    by_layer = [listed[layer % len(listed)] for layer in range(n_layer)]
    period = next(size for size in range(1, n_layer + 1) if by_layer == [by_layer[layer % size] for layer in range(n_layer)])
    return {**block, "normalizer": by_layer[0] if period == 1 else {**normalizer, "of": by_layer[:period]}}


# ---------------------------------------------------------------- what a key affects


LEARNED = ("model", "training", "numerics")  # effects on what a run learns, its seed aside


@lru_cache(maxsize=2**14)  # a report of many runs asks for the same keys of each
def effect_of(path: str) -> Effect:
    """The effect of the key at a dotted path; a key that this version does not know is taken to affect training."""
    return effect(Config, path) or Effect()


def is_learned(path: str) -> bool:
    """True if the key affects what a run learns: runs that differ in it belong to different arms."""
    return effect_of(path).affects in LEARNED


@lru_cache(maxsize=1)
def recorded_per_start() -> tuple[str, ...]:
    """Keys that distinguish arms and may change on resume; environment.json records the value that each start of a run used."""
    return tuple(path for path, *_ in reference(Config) if is_learned(path) and effect_of(path).on_resume == "free")


def function_of(model: ModelConfig) -> dict[str, Plain]:
    """The options that define the function of a model's weights, by dotted paths within `model`, in canonical form."""
    plain = canonical({"model": to_plain(model)})["model"]
    return {path: value for path, value in flatten(plain).items() if effect_of(f"model.{path}").affects == "model"}
