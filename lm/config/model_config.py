"""The keys of `model`: the decoder's shape and choices."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from lm.attention.catalogue import OPTIONS
from lm.attention.options import Options
from lm.schema import key, variant


class Position:
    """How a model knows where tokens stand.

    Attributes:
        rotates: queries and keys are turned, by angles that can be rescaled.
        ends: there are no positions beyond the training length.
    """

    name: ClassVar[str]
    rotates: ClassVar[bool] = False
    ends: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """In words."""
        return f"position {self.name}"


@dataclass
class Rope(Position):
    """Rotary embedding, arXiv 2104.09864."""

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True
    theta: float = key(10000.0, "base of the rotation periods", gt=1)
    fraction: float = key(1.0, "share of each head's dimensions that rotates, fastest first (p-RoPE below 1)", gt=0, le=1)

    @property
    def label(self) -> str:
        return f"rope theta {self.theta:g}"

    def rotated(self, head_size: int) -> int:
        """How many of a head's dimensions turn: an even number."""
        return int(head_size * self.fraction) // 2 * 2


@dataclass
class Learned(Position):
    """A learned vector per position; can't be evaluated beyond the training length."""

    name: ClassVar[str] = "learned"
    ends: ClassVar[bool] = True


@dataclass
class NoPosition(Position):
    """No position information but the causal mask (NoPE)."""

    name: ClassVar[str] = "none"


@dataclass
class AttentionBlock:
    """Multi-head attention, then an MLP."""

    name: ClassVar[str] = "attention"


@dataclass
class GAUBlock:
    """A gated attention unit, arXiv 2202.10447: one head, no MLP; two of them stand for one block of attention and MLP."""

    name: ClassVar[str] = "gau"
    expansion: float = key(2.0, "width of gate and values, in model widths", gt=0)
    key_size: int = key(128, "dimensions of queries and keys", ge=1)


@dataclass
class ModelConfig:
    n_layer: int = key(6, "blocks", ge=1)
    block: AttentionBlock | GAUBlock = variant({v.name: v for v in (AttentionBlock, GAUBlock)}, "attention", "what a layer is made of")
    n_head: int = key(4, "attention heads; 1 for gau", ge=1)
    n_embd: int = key(256, "width of the residual stream", ge=1)
    n_mlp: int | None = key(None, "hidden width of the MLP; null: 4 x n_embd, or 8/3 x n_embd rounded up to 64 for swiglu", ge=1)
    mlp: Literal["swiglu", "gelu", "relu2"] = key("swiglu", "the MLP's activation")
    norm: Literal["rms", "layer"] = key("rms", "RMSNorm or LayerNorm, before attention, MLP and head")
    position: Position = variant({v.name: v for v in (Rope, Learned, NoPosition)}, "rope", "position information")
    normalizer: Options = variant(
        OPTIONS, "softmax", "how attention scores become weights", {"on_resume": "ahead", "acts_in": ("train", "swap")}
    )
    qk_norm: bool = key(False, "RMSNorm with gain on each head's queries and keys")
    bias: bool = key(False, "biases in linear layers and LayerNorm")
    tied: bool = key(False, "one matrix for embedding and head")
    dropout: float = key(0.0, "after embedding, attention and MLP", {"affects": "training"}, ge=0, lt=1)
    init_std: float = key(
        0.02,
        "standard deviation of initial weights; projections into the residual stream: / sqrt(2 n_layer)",
        {"affects": "training"},
        gt=0,
    )

    @property
    def head_size(self) -> int:
        """Dimensions of each head's queries and keys."""
        return self.block.key_size if isinstance(self.block, GAUBlock) else self.n_embd // self.n_head
