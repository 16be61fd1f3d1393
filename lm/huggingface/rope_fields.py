"""RoPE in configurations of transformers: `rope_parameters`, or in older files `rope_theta` and `rope_scaling`."""

from dataclasses import MISSING, fields

from lm.config.model_config import Rope
from lm.config.rope_scaling import LinearScaling, Llama3Scaling, TrainedScaling, Unscaled, YarnScaling
from lm.huggingface.fields import Fields
from lm.schema import Plain

THETA = 10000.0  # the default
BY_LENGTH = "its frequencies depend on the length of the sequence; only default, linear, llama3 and yarn are read"
ORIGINAL = "original_max_position_embeddings"
# Our options by their names in transformers, of each `rope_type`.
TYPES: dict[str, tuple[type[TrainedScaling], dict[str, str]]] = {
    "default": (Unscaled, {}),
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (Llama3Scaling, {"factor": "factor", "low_freq_factor": "slow", "high_freq_factor": "fast", ORIGINAL: "original"}),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "beta_slow": "slow",
            "beta_fast": "fast",
            ORIGINAL: "original",
            "attention_factor": "attention_factor",
            "truncate": "whole_pairs",
        },
    ),
}
DEFAULTS: dict[str, Plain] = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None, "truncate": True}


def read_rope(config: Fields, positions: int) -> Rope:
    """RoPE of a model whose context is `positions`. Raises RunError: a type or field that can't be used, by name."""
    block, older = config.block("rope_parameters"), config.block("rope_scaling")
    if block and older:
        raise config.refused("rope_scaling", "stands beside rope_parameters: one of them says what RoPE is")
    outside = config.number("rope_theta", None)
    config.fixed("partial_rotary_factor", (1,), "all dimensions of a head rotate in this architecture")
    name = "rope_parameters" if block else "rope_scaling"
    if (block := block or older) is None:
        return Rope(theta=outside or THETA)
    theta = block.number("rope_theta", outside or THETA)
    if outside not in (None, theta):
        raise config.refused("rope_theta", f"{name} has rope_theta = {theta:g}: one of them says what RoPE is")
    block.fixed("partial_rotary_factor", (1,), "all dimensions of a head rotate in this architecture")
    for name in ("mscale", "mscale_all_dim"):
        block.fixed(name, (), "only attention_factor is read")
    kind = block.take("rope_type", str, block.take("type", str, "default"))
    if kind not in TYPES:
        name = "rope_type" if block.take("rope_type", str, "") else "type"
        raise block.refused(name, BY_LENGTH if kind in ("dynamic", "longrope") else f"only {', '.join(TYPES)} are read")
    schema, names = TYPES[kind]
    types = {spec.name: spec.type for spec in fields(schema)}
    defaults = {**DEFAULTS, ORIGINAL: positions}
    options = {ours: block.take(theirs, types[ours], defaults.get(theirs, MISSING)) for theirs, ours in names.items()}
    block.finish(())
    return Rope(theta=theta, scaling=schema(**options))


def write_rope(rope: Rope) -> dict[str, Plain]:
    """`rope_parameters` of our RoPE."""
    kind, names = next((kind, names) for kind, (schema, names) in TYPES.items() if schema is type(rope.scaling))
    values = {theirs: getattr(rope.scaling, ours) for theirs, ours in names.items()}
    return {"rope_type": kind, "rope_theta": rope.theta} | {name: value for name, value in values.items() if value is not None}
