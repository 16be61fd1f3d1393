"""Models of transformers, in and out, and lm's normalizers inside them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lm.functional import Named


def register(normalizers: "Mapping[str, Named] | None" = None) -> None:
    """Make normalizers known to transformers as `attn_implementation="lm_ssmax"` and its kin: see `lm.huggingface.inside.register`."""
    from lm.huggingface.inside import register

    register(normalizers)


def add_parameters(model: "PreTrainedModel", train_length: int | None = None) -> None:
    """Give a model of transformers the parameters of its normalizer: see `lm.huggingface.inside.add_parameters`."""
    from lm.huggingface.inside import add_parameters

    add_parameters(model, train_length)
