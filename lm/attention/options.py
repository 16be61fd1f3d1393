"""The options of a normalizer: the base of their classes, with what tables, labels and the checks of a configuration ask of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from lm.errors import Problem
from lm.schema import Plain, build, own_problems, to_plain, yaml_scalar

N_HELP = "row length n: `visible` keys, length of the `sample`, or `fixed:N`"
FIRST_VALUE = "is an initial value, which training has replaced"
LONGEST = 1e9  # tokens, of any length among the options: more would leave the range of what is computed with it
LARGEST = 1e6  # bound of factors and logits: products of them stay within fp32
_ROW_LENGTH = re.compile(r"visible|sample|fixed:([2-9]|[1-9][0-9]{1,8}|10{9})")


@dataclass
class Options:
    """Base of a normalizer's options. A subclass is a dataclass of keys (`lm.schema.key`)."""

    name: ClassVar[str]  # the name in `model.normalizer`
    full_formula: ClassVar[str]  # the weights, with all that options can add
    learned: ClassVar[str] = "none"  # the parameters
    source: ClassVar[str] = ""  # the paper or code that the function comes from
    known: ClassVar[str] = ""  # published figures, with their source
    sums_to_one: ClassVar[bool] = True  # each row of weights sums to 1, whatever the options
    over_sum: ClassVar[bool] = False  # `n` may be `sum`: each row is divided by its sum
    scales_with_q: ClassVar[bool] = True  # a factor on q is the same factor on the logits q.k
    fixed_by_training: ClassVar[Mapping[str, str]] = {}  # why an option can't be changed in a trained model, by its name

    @property
    def rows_sum_to_one(self) -> bool:
        """Whether each row of weights sums to 1 with these options."""
        return self.sums_to_one or getattr(self, "n", "") == "sum"

    def formula(self) -> str:
        """The weights with these options, without what they switch off."""
        return self.full_formula

    def problems(self) -> list[Problem]:
        """Problems that the types of the options can't express: an unknown row length, contradictory options."""
        n = str(getattr(self, "n", "visible"))
        if _ROW_LENGTH.fullmatch(n) or (self.over_sum and n == "sum"):
            return []
        return [Problem("n", n, "unknown row length", f"choose visible, sample or fixed:N (N a whole number from 2 to {LONGEST:g})")]

    @classmethod
    def first_init(cls) -> Plain:
        """The initial values of the parameters unless the option `init` sets others; None: there is no such option."""
        return next((spec.default for spec in fields(cls) if spec.name == "init"), None)

    def layer_options(self) -> list["Options"]:
        """The options of the single normalizers: these options themselves."""
        return [self]

    def layer_option(self, layer: int) -> "Options":
        return self

    def with_changes(self, changes: Mapping[str, Plain], path: str, problems: list[Problem]) -> "Options":
        """Options of a trained normalizer with the `changes` that it has as options; what is wrong at `path` is appended to `problems`."""
        overrides = {option: value for option, value in changes.items() if option in {spec.name for spec in fields(self)}}
        violations = [
            Problem(f"{path}.{option}", overrides[option], reason)
            for option, reason in self.fixed_by_training.items()
            if option in overrides
        ]
        options = build(type(self), {**to_plain(self), **overrides}, path, violations)
        problems += violations or own_problems(options, path)
        return options

    def non_defaults(self) -> dict[str, Plain]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if getattr(self, spec.name) != spec.default}

    def beyond_initial_values(self) -> dict[str, Plain]:
        """The options that aren't their defaults, without initial values."""
        return {option: value for option, value in self.non_defaults().items() if option != "init"}

    def label(self) -> str:
        """The name with the options that aren't their defaults: `ssmax (init=1.0)`."""
        return labelled(self.name, self.non_defaults())

    def swap_arguments(self) -> str:
        """The options as `lm swap --to` takes them: `ssmax model.normalizer.bias=true`; initial values left out."""
        overrides = self.beyond_initial_values()
        return " ".join([self.name, *(f"model.normalizer.{option}={yaml_scalar(value)}" for option, value in overrides.items())])


def labelled(name: str, options: Mapping[str, Plain]) -> str:
    """A normalizer's name and options as a reader sees them."""
    return f"{name} ({', '.join(f'{option}={yaml_scalar(value)}' for option, value in options.items())})" if options else name
