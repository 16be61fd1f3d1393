"""Read the fields of a config.json strictly: a field that lm neither reads nor knows to be irrelevant is an error.

A field is irrelevant if it can't change the logits.
"""

import math
from collections.abc import Container
from dataclasses import MISSING, fields
from pathlib import Path

from lm.config.model_config import LinearScaling, Llama3Scaling, Rope, TrainedScaling, TrainedYarn
from lm.errors import RunError, abbreviate, value_text
from lm.plain import Plain, converted_or_missing, type_name

# Fields that change nothing about the logits of text in evaluation mode, of every architecture here.
# About the file; what a forward pass returns or keeps; training and other heads; tokens, which the tokenizer knows (the
# one that starts a document is chosen when it is read); defaults of generation, which older files keep here.
_IRRELEVANT_FIELDS_TEXT = """
model_type transformers_version _name_or_path _model_name_or_path _commit_hash name_or_path unsloth_fixed
unsloth_version torch_dtype dtype is_llama_config transformers.js_config _attn_implementation
_attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled use_flash_attn
_experts_implementation _experts_implementation_internal attn_implementation tokenizer_class prefix
task_specific_params
output_attentions output_hidden_states _output_attentions return_dict use_return_dict use_cache torchscript
use_bfloat16 tf_legacy_loss gradient_checkpointing chunk_size_feed_forward pretraining_tp is_decoder
reorder_and_upcast_attn
initializer_range attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout classifier_dropout
num_labels id2label label2id problem_type finetuning_task summary_type summary_use_proj summary_activation
summary_first_dropout summary_proj_to_labels
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
IRRELEVANT_FIELDS = frozenset(_IRRELEVANT_FIELDS_TEXT.split())
# Fields of every architecture that may only have this value, and why.
REQUIRED_VALUES: dict[str, tuple[Plain, str]] = {
    "auto_map": (None, "names code in the folder, which is never executed"),
    "quantization_config": (None, "quantised weights are not read; give the model they were made from"),
    "pruned_heads": ({}, "heads that were left out are not read"),
    "cross_attention_hidden_size": (None, "only decoders are read"),
    **dict.fromkeys(
        ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"), (False, "only decoders are read")
    ),
    **dict.fromkeys(("rope_interleaved", "rope_traditional", "use_mrope"), (False, "RoPE of this kind is not read")),
}


class ConfigFields:
    """This class holds the fields of a configuration file, and remembers which of them were used.

    Args:
        values: the fields' values, by name.
        path: path that errors name.
    """

    def __init__(self, values: dict[str, Plain], path: Path):
        self.path, self._values, self._used_names = path, values, set()

    def read_value(self, name: str, value_type: type, default: Plain = MISSING) -> Plain:
        """Return a field's value, or `default` if it is null or absent, and mark the field as used.

        Raises RunError: the value has another type than `value_type`, or is missing and there is no default.
        """
        self._used_names.add(name)
        value = self._values.get(name)
        if value is None and default is not MISSING:
            return default
        result = converted_or_missing(value_type, value)
        if result is MISSING:
            text = abbreviate(value_text(value), 60) if name in self._values else "missing"
            raise RunError(f"{self.path}: {name} must be {type_name(value_type)}, not {text}")
        return result

    def positive_integer(self, name: str, default: Plain = MISSING, maximum: int = 10**9) -> int:
        """Return a field's value, or `default` if it is null or absent, and mark it as used.

        Raises RunError: the value is not a whole number from 1 to `maximum`, or is missing and there is no default.
        """
        size = self.read_value(name, int, default)
        if size is not None and not 1 <= size <= maximum:
            raise self.refusal(name, "must be 1 or more" if size < 1 else f"must be at most {maximum:,}")
        return size

    def positive_number(self, name: str, default: Plain = MISSING) -> float:
        """Return a field's value, or `default` if it is null or absent, and mark it as used.

        Raises RunError: the value is not a number above 0, or is missing and there is no default.
        """
        number = self.read_value(name, float, default)
        if number is not None and number <= 0:
            raise self.refusal(name, "must be above 0")
        return number

    def nested_fields(self, name: str) -> "ConfigFields | None":
        """Return the fields nested in the field `name`; None if it is null or absent. Raises RunError: its value holds
        no fields.
        """
        values = self.read_value(name, dict, None)
        return None if values is None else ConfigFields(values, Path(f"{self.path}: {name}"))

    def require_value(self, name: str, allowed_values: tuple[Plain, ...], reason: str) -> None:
        """Check that a field is absent, null or one of `allowed_values`, and mark it as used. Raises RunError with
        `reason` if not.
        """
        self._used_names.add(name)
        value = self._values.get(name)
        if value is not None and value not in allowed_values:
            raise self.refusal(name, reason)

    def refusal(self, name: str, reason: str) -> RunError:
        """Return an error that names a field, its value and the reason why lm can't use it."""
        return RunError(f"{self.path}: {name} = {abbreviate(value_text(self._values.get(name)), 80)}: {reason}")

    def check_all_used(self, irrelevant_names: Container[str]) -> None:
        """Check that each field was used, is in `irrelevant_names`, or is null. Raises RunError, which names the other
        fields.
        """
        unknown_names = [
            name
            for name, value in self._values.items()
            if name not in self._used_names and name not in irrelevant_names and value is not None
        ]
        if unknown_names:
            further_names = f" (and {', '.join(unknown_names[1:6])})" if unknown_names[1:] else ""
            raise self.refusal(
                unknown_names[0], f"a field that is not known here{further_names}: the model may compute something else"
            )


# ---------------------------------------------------------------- RoPE


DEFAULT_THETA = 10000.0  # transformers' default of rope_theta
LENGTH_DEPENDENT_REASON = (
    "its frequencies depend on the length of the sequence; only default, linear, llama3 and yarn are read"
)
ORIGINAL_LENGTH_FIELD = "original_max_position_embeddings"
# For each `rope_type`, lm's class of options, and lm's name of each option by its name in transformers.
ROPE_TYPES: dict[str, tuple[type[TrainedScaling], dict[str, str]]] = {
    "default": (TrainedScaling, {}),
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (
        Llama3Scaling,
        {
            "factor": "factor",
            "low_freq_factor": "slow_periods",
            "high_freq_factor": "fast_periods",
            ORIGINAL_LENGTH_FIELD: "original",
        },
    ),
    "yarn": (
        TrainedYarn,
        {
            "factor": "factor",
            "beta_slow": "slow_periods",
            "beta_fast": "fast_periods",
            ORIGINAL_LENGTH_FIELD: "original",
            "attention_factor": "attention_factor",
            "truncate": "whole_pairs",
        },
    ),
}
ROPE_DEFAULTS: dict[str, Plain] = {"attention_factor": None, "truncate": True}


def read_rope(
    config: ConfigFields,
    n_positions: int,
    default_theta: float = DEFAULT_THETA,
    names_read_elsewhere: tuple[str, ...] = (),
) -> Rope:
    """Return RoPE's options from the fields of a model with a context of `n_positions` tokens.

    Args:
        config: fields of the model.
        default_theta: RoPE's base if no field gives it.
        names_read_elsewhere: nested fields that the caller reads itself.

    Raises RunError: RoPE has a type or field that lm can't use; the message names it.
    """
    rope_fields, older_rope_fields = config.nested_fields("rope_parameters"), config.nested_fields("rope_scaling")
    if rope_fields and older_rope_fields:
        raise config.refusal("rope_scaling", "stands beside rope_parameters: one of them says what RoPE is")
    outer_theta = config.positive_number("rope_theta", None)
    config.require_value("partial_rotary_factor", (1,), "all dimensions of a head rotate in this architecture")
    name = "rope_parameters" if rope_fields else "rope_scaling"
    if (rope_fields := rope_fields or older_rope_fields) is None:
        return Rope(theta=outer_theta or default_theta)
    theta = rope_fields.positive_number("rope_theta", outer_theta or default_theta)
    if outer_theta not in (None, theta):
        raise config.refusal("rope_theta", f"{name} has rope_theta = {theta:g}: one of them says what RoPE is")
    rope_fields.require_value("partial_rotary_factor", (1,), "all dimensions of a head rotate in this architecture")
    kind = rope_fields.read_value("rope_type", str, rope_fields.read_value("type", str, "default"))
    if kind not in ROPE_TYPES:
        name = "rope_type" if rope_fields.read_value("rope_type", str, "") else "type"
        raise rope_fields.refusal(
            name,
            LENGTH_DEPENDENT_REASON if kind in ("dynamic", "longrope") else f"only {', '.join(ROPE_TYPES)} are read",
        )
    schema, option_names = ROPE_TYPES[kind]
    types = {spec.name: spec.type for spec in fields(schema)}
    defaults = ROPE_DEFAULTS | {ORIGINAL_LENGTH_FIELD: n_positions}
    if kind == TrainedYarn.name:
        defaults["factor"] = n_positions / rope_fields.positive_integer(ORIGINAL_LENGTH_FIELD, n_positions)
        rope_fields.read_value("finetuned", bool, False)  # true if the weights were trained further with this scaling
    options = {}
    for field, option in option_names.items():
        if option in types:
            options[option] = rope_fields.read_value(field, types[option], defaults.get(field, MISSING))
        else:
            constant = getattr(schema, option)
            rope_fields.require_value(
                field, (constant,), f"only {constant:g} is read, as the models released with {kind} have"
            )
    if kind == TrainedYarn.name:
        scales = [rope_fields.read_value(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]
        if options["attention_factor"] is None and all(scales):  # one alone is not read by transformers either
            growth = 0.1 * math.log(max(options["factor"], 1.0))
            options["attention_factor"] = (growth * scales[0] + 1) / (growth * scales[1] + 1)
    rope_fields.check_all_used(names_read_elsewhere)
    return Rope(theta=theta, scaling=schema(**options))


def read_partial_rope(config: ConfigFields) -> Rope:
    """Return RoPE's options of GPT-NeoX, which rotates only a fraction of each head. Raises RunError as `read_rope`
    does.
    """
    rope_fields = config.nested_fields("rope_parameters")
    theta = config.positive_number("rotary_emb_base", DEFAULT_THETA)
    fraction = config.positive_number("rotary_pct", 0.25)
    config.require_value("rope_scaling", (), "RoPE that was rescaled is not read here")
    if rope_fields is not None:
        theta = rope_fields.positive_number("rope_theta", theta)
        fraction = rope_fields.positive_number("partial_rotary_factor", fraction)
        rope_fields.require_value("rope_type", ("default",), "RoPE that was rescaled is not read here")
        rope_fields.check_all_used(())
    return Rope(theta=theta, fraction=fraction, partial=fraction < 1)


def rope_parameters_value(rope: Rope) -> dict[str, Plain]:
    """Return the content of transformers' field `rope_parameters` for lm's RoPE options."""
    kind, option_names = next(
        (kind, option_names) for kind, (schema, option_names) in ROPE_TYPES.items() if schema is type(rope.scaling)
    )
    values = {field: getattr(rope.scaling, option) for field, option in option_names.items()}
    return {"rope_type": kind, "rope_theta": rope.theta} | {
        name: value for name, value in values.items() if value is not None
    }
