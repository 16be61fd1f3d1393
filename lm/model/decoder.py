"""The decoder: a nanoGPT-style pre-norm transformer whose attention normalizer can be chosen.

Shapes: B rows, T tokens, H heads of queries, K of keys and values, D head size, C width, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.attention.documents import by_documents
from lm.attention.layout import Rows
from lm.attention.normalizer import Normalizer, Shape, grouped, make_normalizer
from lm.config.inference_config import RopeScaling
from lm.config.model_config import ModelConfig
from lm.data.batches import Batch
from lm.model.cross_entropy import linear_cross_entropy
from lm.model.rope import AS_TRAINED, Rotation, rope_rotation, rotate

LONG_TOKENS = 8192  # of a row that an MLP sees at a time where nothing is kept for a backward pass


def make_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm over the model's width."""
    size, eps = config.n_embd, config.norm_eps
    return nn.RMSNorm(size, eps) if config.norm == "rms" else nn.LayerNorm(size, eps, bias=config.bias)


class Cache:
    """What each layer remembers of the tokens seen so far, for decoding: keys and values, or what its normalizer makes of them.

    Args:
        length: tokens the document will have in all: the n of the policy `sample`.
    """

    def __init__(self, length: int):
        self.length, self.seen = length, 0
        self.states: dict[nn.Module, object] = {}

    def fork(self, copies: int) -> "Cache":
        """A cache that goes its own way, with each row `copies` times."""
        return self._with(lambda x: x.repeat_interleave(copies, 0) if copies > 1 else x)

    def take(self, row: int) -> "Cache":
        """A cache of one row that goes its own way."""
        return self._with(lambda x: x[row : row + 1])

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Cache":
        other = Cache(self.length)
        other.seen = self.seen
        other.states = {
            module: tuple(map(change, state)) if isinstance(state, tuple) else change(state) for module, state in self.states.items()
        }
        return other


class Heads(NamedTuple):
    """What a layer's normalizer is given, and the layer's input that it is made from."""

    x: Tensor  # (B, T, C)
    q: Tensor  # (B, H, T, D), with its features
    k: Tensor  # likewise
    v: Tensor  # (B, H, T, E)


@dataclass(frozen=True)
class Context:
    """What a layer knows of its tokens beside their vectors."""

    rows: Rows
    rotation: Rotation | None  # RoPE's, of the queries
    logit_factor: float  # of a rescaled RoPE
    cache: Cache | None
    left: list[Heads] | None = None  # where a layer leaves its heads, if anyone asks (`lm.model.attention_stream`)


class AttentionBase(nn.Module):
    """What kinds of attention share: queries and keys normalised and turned, the past remembered, weights made."""

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        size = config.key_dims
        self.q_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.normalizer: Normalizer = make_normalizer(config.normalizer.of_layer(layer), Shape(config.n_head, size, config.n_embd, seq_len))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Heads' outputs (B, T, H E) of q (B, H, T, D), k (B, K, T, D) and v (B, K, T, E), made from x (B, T, C), T the new tokens."""
        q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        if context.logit_factor != 1:
            q = q * context.logit_factor
        q, k = _with(q, self.normalizer.query_features(x)), _with(k, grouped(self.normalizer.key_features(x), k.size(1)))
        if context.cache:
            states = context.cache.states
            out, states[self] = self.normalizer.decode(q, k, v, context.rows, states.get(self))
            return out.transpose(1, 2).flatten(2)
        k, v = self.normalizer.of_each_query_head(k, v)
        if context.left is not None:
            context.left.append(Heads(x, q, k, v))
        if context.rows.documents is not None:
            out = by_documents(self.normalizer, q, k, v, context.rows)
        else:
            out = self.normalizer(q, k, v, context.rows)
        return out.transpose(1, 2).flatten(2)


def _with(heads: Tensor, features: Tensor | None) -> Tensor:
    """Heads and their features, in the wider of their dtypes: sums over all tokens of a feature would add up its rounding."""
    return heads if features is None else torch.cat((heads, features), -1)


class Attention(AttentionBase):
    """Causal multi-head attention; the normalizer turns queries, keys and values into the heads' outputs.

    Heads of queries share those of keys and values in groups, H / K each: grouped queries, arXiv 2305.13245.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__(config, seq_len, layer)
        self.heads = (config.n_head, config.kv_heads, config.kv_heads)
        q, k, v = (n * config.key_dims for n in self.heads)
        self.fused = {"qkv": {"q": q, "k": k, "v": v}}
        self.qkv = nn.Linear(config.n_embd, q + k + v, bias=config.bias if config.qkv_bias is None else config.qkv_bias)
        self.out = nn.Linear(q, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)
        return self.out(self.attend(x, q, k, v, context))


class GAU(AttentionBase):
    """Gated attention unit, arXiv 2202.10447: O = (U * A V) W_o, with one head whose queries and keys share Z.

    U, V (width e) and Z (width s) are SiLU(x W); Q and K are Z with a gain and an offset for each dimension, 1 and 0 at first.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__(config, seq_len, layer)
        e, s = config.value_dims, config.key_dims
        self.fused = {"uvz": {"u": e, "v": e, "z": s}}
        self.uvz = nn.Linear(config.n_embd, 2 * e + s, bias=config.bias)
        self.q_gain, self.q_offset = nn.Parameter(torch.ones(s)), nn.Parameter(torch.zeros(s))
        self.k_gain, self.k_offset = nn.Parameter(torch.ones(s)), nn.Parameter(torch.zeros(s))
        self.out = nn.Linear(e, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        u, v, z = F.silu(self.uvz(x)).split(list(self.fused["uvz"].values()), -1)
        q, k = z * self.q_gain + self.q_offset, z * self.k_gain + self.k_offset
        return self.out(u * self.attend(x, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), context))


class MLP(nn.Module):
    """SwiGLU (gate and value in one matrix), GELU, its approximation by tanh, or ReLU^2."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        hidden = config.mlp_width
        self.fused = {"up": {"gate": hidden, "value": hidden}} if self.kind == "swiglu" else {}
        self.up = nn.Linear(config.n_embd, hidden * (2 if self.kind == "swiglu" else 1), bias=config.bias)
        self.out = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.kind == "swiglu":
            gate, value = x.chunk(2, -1)
            return self.out(F.silu(gate) * value)
        return self.out(
            F.relu(x).square() if self.kind == "relu2" else F.gelu(x, approximate="tanh" if self.kind == "gelu_tanh" else "none")
        )


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, seq_len, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), context))
        if torch.is_grad_enabled() or x.size(1) <= LONG_TOKENS:
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        return torch.cat([part + self.dropout(self.mlp(self.mlp_norm(part))) for part in x.split(LONG_TOKENS, 1)], 1)


class GatedBlock(nn.Module):
    """x + gau(norm(x))."""

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        self.gau_norm = make_norm(config)
        self.gau = GAU(config, seq_len, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x + self.dropout(self.gau(self.gau_norm(x), context))


class Decoder(nn.Module):
    """The language model.

    Args:
        config: shape and choices.
        vocab_size: tokens V.
        seq_len: tokens in a training row; normalizers start from it, learned positions end at it.
        seed: of the initial weights. Each parameter draws from its own stream (seed, name), so two
            models of one seed start equal wherever they share parameters, whatever their normalizers.
            None: leave them unset, for weights that are loaded.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, seq_len: int, seed: int | None = 0):
        super().__init__()
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        self.rope_scaling: RopeScaling = AS_TRAINED  # another in a copy by `lm.model.inference.for_inference`
        self.embedding = nn.Embedding(vocab_size, config.n_embd)
        self.position = nn.Embedding(seq_len, config.n_embd) if config.position.ends else None
        self.dropout = nn.Dropout(config.dropout)
        block = {"attention": Block, "gau": GatedBlock}[config.block.name]
        self.blocks = nn.ModuleList(block(config, seq_len, layer) for layer in range(config.n_layer))
        for normalizer in self.normalizers()[1:]:
            normalizer.share(self.normalizers()[0])
        self.norm = make_norm(config)
        self.head = nn.Linear(config.n_embd, vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        if seed is not None:
            self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int, normalizers_only: bool = False) -> None:
        """Matrices ~ N(0, init_std), those into the residual stream / sqrt(2 n_layer); gains 1, biases 0.

        Normalizers have set themselves but for their `hidden` matrices, ~ N(0, 1 / inputs); `normalizers_only`: draw just those.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or (is_normalizer(name) and not name.endswith(".hidden.weight")):
                continue
            if is_normalizer(name):
                std = parameter.size(1) ** -0.5
            elif normalizers_only:
                continue
            else:
                std = self.config.init_std / (math.sqrt(2 * self.config.n_layer) if name.endswith(".out.weight") else 1.0)
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and module.bias is not None and not is_normalizer(name):
                module.bias.zero_()

    def forward(self, tokens: Tensor, rows: Rows | None = None, cache: Cache | None = None) -> Tensor:
        """Hidden states (B, T, C) of tokens (B, T) int64, after the last norm: what `head` reads.

        Args:
            rows: where the tokens stand, if they are not one document from its start: `Rows.packed`, say.
            cache: of the tokens before, which these go on from and are added to.

        Raises:
            ValueError: positions beyond learned ones.
        """
        x, context = self.start(tokens, rows, cache)
        for block in self.blocks:
            x = block(x, context)
        if cache:
            cache.seen += tokens.size(1)
        return self.norm(x)

    def start(self, tokens: Tensor, rows: Rows | None = None, cache: Cache | None = None) -> tuple[Tensor, Context]:
        """What `forward` gives the first layer: vectors (B, T, C), and the context that all layers share."""
        if rows is None and cache:
            rows = Rows.next(cache.seen, tokens.size(1), cache.length, tokens.device)
        rows = rows or Rows.full(tokens.size(1), tokens.device)
        x = self.embedding(tokens)
        if self.position is not None:
            last = int(rows.positions.max()) if cache or rows.documents is not None else tokens.size(1) - 1
            if last >= self.seq_len:
                raise ValueError(f"learned positions end at {self.seq_len} tokens, the row has {last + 1}")
            x = x + self.position(rows.positions)
        rotation, lengths = None, (self.seq_len, cache.length if cache else tokens.size(1))
        if self.config.position.rotates:
            rotation = rope_rotation(rows.positions, self.config.key_dims, self.config.position, self.rope_scaling, lengths)
        factor = self.rope_scaling.logit_factor(self.rope_scaling.s(*lengths))
        return self.dropout(x), Context(rows, rotation, factor, cache)

    def normalizers(self) -> list[Normalizer]:
        """The normalizers, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, Normalizer)]

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits (B, T, V) of tokens (B, T) int64. For rows long enough to mind B x T x V, see `lm.model.cross_entropy`."""
        return self.head(self(tokens))

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the losses (nats, fp32 scalar) of a batch's targets."""
        hidden = self.hidden(batch)
        return linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, batch.targets.flatten())

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states (B, T, C) of a batch's tokens, as `forward`."""
        return self(batch.tokens, batch_rows(batch))


def batch_rows(batch: Batch) -> Rows:
    """Where the tokens of a batch stand: in one document each sequence, or in documents that don't see each other."""
    if batch.positions is None:
        return Rows.full(batch.tokens.size(1), batch.tokens.device)
    return Rows.isolated(batch.positions)


def is_normalizer(parameter: str) -> bool:
    """True for the name of a normalizer's parameter."""
    return ".normalizer." in parameter


def projections(decoder: Decoder) -> dict[str, dict[str, slice]]:
    """Rows of each fused matrix that are one projection each, by its name: {"q", "k", "v": ...} of an `attention.qkv.weight`.

    For optimizers that treat them apart. A module that fuses projections says so in `fused`: {its layer: {projection: rows}}, in order.
    """
    found = {}
    for name, module in decoder.named_modules():
        for layer, sizes in getattr(module, "fused", {}).items():
            ends = accumulate(sizes.values())
            found[f"{name}.{layer}.weight"] = {part: slice(end - sizes[part], end) for part, end in zip(sizes, ends, strict=True)}
    return found


def count_parameters(decoder: Decoder) -> dict[str, int]:
    """`total`, `non_embedding` (without embeddings and head), `normalizer`."""
    total = sum(p.numel() for p in decoder.parameters())
    embedding = {p for m in (decoder.embedding, decoder.head, decoder.position) if m is not None for p in m.parameters()}
    normalizer = sum(p.numel() for name, p in decoder.named_parameters() if is_normalizer(name))
    return {"total": total, "non_embedding": total - sum(p.numel() for p in embedding), "normalizer": normalizer}


def flops_per_token(decoder: Decoder) -> int:
    """Training FLOPs a token: 6 a matrix entry (embedding look-ups are free), 3 T a dimension of keys and values for causal attention."""
    config = decoder.config
    matrices = sum(p.numel() for p in decoder.blocks.parameters() if p.dim() == 2) + decoder.head.weight.numel()
    dimensions = config.n_head * (config.key_dims + config.value_dims)
    return 6 * matrices + 3 * config.n_layer * decoder.seq_len * dimensions
