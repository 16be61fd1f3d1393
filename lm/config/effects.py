"""What follows from what each key affects: what tells runs and models apart."""

from lm.config.model_config import ModelConfig
from lm.config.tree import Config
from lm.schema import Effect, Plain, effect, flatten, reference, to_plain

LEARNED = ("model", "training", "numerics")  # what decides what a run learns, its seed aside


def effect_of(path: str) -> Effect:
    """What the key at a dotted path affects; one that this version does not know may have affected what was learned."""
    return effect(Config, path) or Effect()


def is_learned(path: str) -> bool:
    """True if runs that differ in the key learn differently: if it tells arms apart."""
    return effect_of(path).affects in LEARNED


def counted_as_used() -> list[str]:
    """The keys that tell arms apart and that a resumed run may change: what each start used counts, which environment.json says."""
    return [path for path, *_ in reference(Config) if is_learned(path) and effect_of(path).on_resume == "free"]


def function_of(model: ModelConfig) -> dict[str, Plain]:
    """What decides the function that a model's weights stand for, by dotted paths within `model`."""
    return {path: value for path, value in flatten(to_plain(model)).items() if effect_of(f"model.{path}").affects == "model"}
