"""Base class of normalizers' options, which gives formulas, labels and checks to tables, reports and configurations."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from lm.errors import Problem, yaml_scalar

N_HELP = "row length n: `visible` keys, length of the `sample`, or `fixed:N`"
INIT_FIXED_REASON = "is an initial value, which training has replaced"
MAX_LENGTH = 1e9  # most tokens in an option that is a length: longer ones would leave the range of the computations
MAX_FACTOR = 1e6  # bound of options that are factors or logits: products of them stay within the range of fp32
_ROW_LENGTH_PATTERN = re.compile(r"visible|sample|fixed:([2-9]|[1-9][0-9]{1,8}|10{9})")


def key(
    default,
    help: str,
    effect: Mapping[Literal["affects", "on_resume", "commands"], object] | None = None,
    *,
    omit_default: bool = False,
    **limits: float,
):
    """Make a dataclass field for a configuration key with a default, a one-line description and bounds (`gt ge lt le`).

    effect: entries of an `lm.config.schema.Effect`, e.g. what the key affects, or whether a resumed run may change it.
    omit_default: `lm.plain.to_plain` leaves the key out while it has its default value. Use this for a new key in an
    existing block: the hashes of existing runs' configurations and arms then stay the same.
    """
    metadata = {"help": help, "effect": effect, "omit_default": omit_default, "limits": limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def reference_length_key(meaning: str):
    """Make a field for the option `base`, the length m of a formula. `meaning` describes m in the option's help, e.g.
    "the length at which this is softmax".
    """
    return key("train", f"m, {meaning}; `train`: the training length", ge=2, le=MAX_LENGTH)


@dataclass
class Options:
    """Base of a normalizer's options. A subclass is a dataclass whose fields are keys of the configuration (`key`)."""

    name: ClassVar[str]  # the name in `model.normalizer`
    full_formula: ClassVar[str]  # formula of the weights, with all terms that options can add
    learned_parameters: ClassVar[str] = "none"  # the learned parameters, in words
    source: ClassVar[str] = ""  # the paper or code that the function comes from
    published_findings: ClassVar[str] = ""  # published results, with their source
    sums_to_one: ClassVar[bool] = True  # whether each row of weights sums to 1 for all values of the options
    # whether the option `n` accepts the value `sum`, which divides each row of weights by the row's sum
    n_accepts_sum: ClassVar[bool] = False
    scales_with_q: ClassVar[bool] = True  # whether a factor on q is the same factor on the logits q.k
    # by option, the reason why a trained model can't change it
    fixed_by_training: ClassVar[Mapping[str, str]] = {"init": INIT_FIXED_REASON}

    @property
    def rows_sum_to_one(self) -> bool:
        """True if each row of weights sums to 1 with these options."""
        return self.sums_to_one or getattr(self, "n", "") == "sum"

    def formula(self) -> str:
        """Return the formula of the weights, without terms that these options switch off."""
        return self.full_formula

    def problems(self) -> list[Problem]:
        """Return problems that the types of the options can't express: an unknown value of the option `n`, or options
        that contradict each other.
        """
        n = str(getattr(self, "n", "visible"))
        if _ROW_LENGTH_PATTERN.fullmatch(n) or (self.n_accepts_sum and n == "sum"):
            return []
        return [
            Problem(
                "n",
                n,
                "unknown row length",
                f"write fixed:{n}"
                if n.isdecimal()
                else f"choose visible, sample or fixed:N (N a whole number from 2 to {MAX_LENGTH:g})",
            )
        ]

    def layer_options(self) -> list["Options"]:
        """Return [self], or the options of each layer in turn if these options are a list of layers
        (`lm.config.normalizers.LayerList`).
        """
        return [self]

    def options_of_layer(self, layer: int) -> "Options":
        """Return the options of the layer with the index `layer`. A list of layers is repeated if the model has
        more.
        """
        options = self.layer_options()
        return options[layer % len(options)]

    def non_defaults(self, excluded: str = "") -> dict[str, object]:
        """Return the options that differ from their defaults, {name: value}, without the option `excluded`."""
        defaults = {spec.name: spec.default for spec in fields(self) if spec.name != excluded}
        return {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}

    def label(self) -> str:
        """Return the name with the options that differ from their defaults: `ssmax (init=1.0)`."""
        return label_text(self.name, self.non_defaults())


def label_text(name: str, options: Mapping[str, object]) -> str:
    """Return a normalizer's name with `options` in parentheses: `ssmax (init=1.0)`."""
    return (
        f"{name} ({', '.join(f'{option}={yaml_scalar(value)}' for option, value in options.items())})"
        if options
        else name
    )
