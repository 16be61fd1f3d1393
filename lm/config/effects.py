"""What follows from the effects of the keys: which keys distinguish experimental arms, and which define a model's function."""

from functools import lru_cache

from lm.config.canonical import canonical
from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.schema import Effect, Plain, effect, flatten, reference, to_plain

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
