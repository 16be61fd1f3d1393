"""A layer consists of attention or a gated attention unit, an MLP, and their norms. This module has these parts, and
the cache of decoding.

Shapes: B sequences, T tokens, H query heads, K key-value heads, D head size, E width of a head's values, C width of the
model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lm.attention.catalogue import make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec, Normalizer

if TYPE_CHECKING:
    from lm.config.model_config import ModelConfig

# cos and sin, fp32, each (T, pairs) or (B, T, pairs) for the pairs of dimensions that rotate
Rotation = tuple[Tensor, Tensor]
MAX_MLP_TOKENS = 8192  # tokens of a sequence that an MLP takes at a time where no backward pass follows


class UninitialisedLinear(nn.Linear):
    """`torch.nn.Linear` whose parameters are not initialised: `Decoder.initialise` sets them, or they are loaded."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialised."""


class UninitialisedEmbedding(nn.Embedding):
    """`torch.nn.Embedding` whose matrix is not initialised: `Decoder.initialise` sets it, or it is loaded."""

    def reset_parameters(self) -> None:
        """Leave the parameters uninitialised."""


class _RMSNorm(torch.autograd.Function):
    """Compute RMSNorm x * r * w of x (..., C) with gain w, where r = 1 / sqrt(mean x^2 + eps). The backward pass takes
    half of torch's passes over x.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        r = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        scaled = x * r
        ctx.save_for_backward(x, weight, r, scaled if ctx.needs_input_grad[1] else None)
        return scaled * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, r, scaled = ctx.saved_tensors
        dweight = (grad * scaled).sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, None
        dscaled = grad * weight
        dr = (dscaled * x).sum(-1, keepdim=True)
        # x * factor is the part of the gradient that goes through r
        factor = dr.mul_(-0.5).mul_(r.pow(3)).div_(x.size(-1)).mul_(2)
        return dscaled.mul_(r).add_(x * factor), dweight, None


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` of the last dimension, made faster on CPUs, where torch has no kernel for it and
    differentiates it step by step.

    Outputs and gradients equal torch's bit for bit. If x has other uses, too, autograd adds the gradients of all uses
    in another order, so that their sum may differ by rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        is_full_precision = x.dtype == self.weight.dtype in (torch.float32, torch.float64)
        if x.device.type != "cpu" or not is_full_precision or torch.compiler.is_compiling():
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


def make_norm(config: ModelConfig, norm: str | None = None) -> nn.Module:
    """Make RMSNorm (`rms`) or LayerNorm (`layer`) over the model's width, as `norm` says, by default `config.norm`."""
    size, eps = config.n_embd, config.norm_eps
    return RMSNorm(size, eps) if (norm or config.norm) == "rms" else nn.LayerNorm(size, eps, bias=config.bias)


class HeadNorm(RMSNorm):
    """Normalises each head's queries, keys or outputs by RMSNorm, in the gain's dtype.

    Under autocast queries and keys arrive in bf16. Queries and keys are rounded to bf16 again only after RoPE and the
    normalizer have changed them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x (..., D), which may have any dtype, in the gain's dtype."""
        return super().forward(x.to(self.weight.dtype))


class WidthNorm(HeadNorm):
    """Normalises the queries or keys of all heads together, (B, H, T, D), by RMSNorm, in the gain's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.shape[1]
        return super().forward(x.transpose(1, 2).flatten(2)).unflatten(2, (heads, -1)).transpose(1, 2)


class _PairRotation(torch.autograd.Function):
    """Rotate pairs (x1, x2) by their angles, in few passes over x; gradients are rotated by the opposite angles."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(grad, cos, -sin).to(ctx.dtype), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x, in fp32 or wider, with each pair of dimensions (x1, x2) turned to (x1 cos - x2 sin, x2 cos + x1 sin).
    The first n dimensions pair with the next n, where n is the width of `cos`. Further dimensions stay as they are.
    """
    n_pairs = cos.size(-1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    x1, x2 = x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs]
    return torch.cat(((x1 * cos).addcmul_(x2, sin, value=-1), (x2 * cos).addcmul_(x1, sin), x[..., 2 * n_pairs :]), -1)


def rotation_at(positions: Tensor, frequencies: Tensor, amplitude: float) -> Rotation:
    """Return cos and sin of RoPE's angles at `positions`, (T,) or (B, T), times `amplitude`.

    frequencies: radians per token of each pair of dimensions, (pairs,) float64. Angles are formed in float64, as at
    position 131,072 fp32 would be off by 0.004 radians.
    """
    angles = positions.double().unsqueeze(-1) * frequencies
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `x` (B, H, T, D) rotated by RoPE, in fp32 or wider. The first half of the rotated dimensions pairs with
    the second.
    """
    cos, sin = (part.unsqueeze(-3) for part in rotation)  # the same for all heads
    return _PairRotation.apply(x, cos, sin)


@dataclass
class DecodingCache:
    """The cache holds each layer's state after the tokens so far, for decoding: keys and values, or what the layer's
    normalizer keeps instead.
    """

    document_length: int  # tokens that the document will have in all, which are n if the option `n` is `sample`
    n_seen: int = 0  # tokens so far
    states: dict[nn.Module, object] = field(default_factory=dict)  # state of each layer, by its attention module

    def fork(self) -> DecodingCache:
        """Return an independent copy of the cache. Both caches hold the same tensors at first: layers replace a cache's
        tensors, and never change them.
        """
        return replace(self, states={**self.states})


class AttentionInputs(NamedTuple):
    """Holds the inputs of a layer's normalizer, and the layer's own input, from which they are computed."""

    x: Tensor  # (B, T, C)
    q: Tensor  # (B, H, T, D), longer by features that the normalizer appends
    k: Tensor  # (B, H, T, D), longer by such features
    v: Tensor  # (B, H, T, E)


@dataclass(frozen=True)
class ForwardContext:
    """All layers of one forward pass share these inputs: the layout of the tokens, RoPE, and the cache."""

    layout: AttentionLayout
    rotation: Rotation | None  # RoPE's cos and sin at the new tokens' positions; None: no RoPE
    score_factor: float  # factor on the scores of layers with RoPE, the temperature of a rescaled RoPE
    cache: DecodingCache | None
    first_layer_values: Tensor | None = None  # the first layer's values (B, K, T, E), which the others mix into theirs
    # layers append their inputs here for `lm.model.attention_stream`
    captured_inputs: list[AttentionInputs] | None = None
    output_start: int = 0  # index of the first new token that a layer computes an output for

    def select_output_tokens(self, x: Tensor) -> Tensor:
        """Return the part of x (B, T, C) at the tokens that a layer computes outputs for, from the index `output_start`
        on.
        """
        return x[:, self.output_start :] if self.output_start else x

    def attend(self, layer: AttentionBase, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' outputs (B, H, T - output_start, E) at the tokens from the index `output_start` on.

        q, k: the layer's queries (B, H, T, D) and keys (B, K, T, D), after norms and rotation. v: values (B, K, T, E).
        x: the layer's input (B, T, C).
        """
        normalizer, layout = layer.normalizer, self.layout
        q, k = normalizer.append_features(x, q, k)
        if self.output_start:
            q, layout = q[:, :, self.output_start :], layout.queries_from(self.output_start)
        if self.cache:
            output, self.cache.states[layer] = normalizer.decode(q, k, v, layout, self.cache.states.get(layer))
            return output
        k, v = normalizer.expand_kv_heads(k, v)
        if self.captured_inputs is not None:
            self.captured_inputs.append(AttentionInputs(x, q, k, v))
        return normalizer.attend(q, k, v, layout)


class AttentionBase(nn.Module):
    """Base of `Attention` and `GAU`, which holds norms and rotation of queries and keys, and the normalizer."""

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        size, n_head = config.key_dims, config.n_head * config.maps_per_head
        self.rotates = config.position.rotates_in(layer)
        n_keys = config.kv_heads * (2 if config.differential is True else 1)
        norm, counts = (WidthNorm, (n_head, n_keys)) if config.qk_norm == "width" else (HeadNorm, (1, 1))
        self.q_norm, self.k_norm = (
            norm(count * size, config.norm_eps) if config.qk_norm else nn.Identity() for count in counts
        )
        spec = LayerSpec(n_head, size, config.n_embd, seq_len)
        self.normalizer: Normalizer = make_normalizer(config.normalizer.options_of_layer(layer), spec)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """Return the heads' outputs (B, T - output_start, H E) for q (B, H, T, D), k (B, K, T, D) and v (B, K, T, E).

        x: the layer's input (B, T, C). T is the number of new tokens. Outputs are computed only for tokens from the
        index `context.output_start` on; the queries before it are not used.
        """
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
            q = q if context.score_factor == 1 else q * context.score_factor
        return context.attend(self, x, q, k, v).transpose(1, 2).flatten(2)


class Attention(AttentionBase):
    """Causal multi-head attention, in which the normalizer turns queries, keys and values into the heads' outputs.

    H / K query heads share each key-value head (grouped queries, arXiv 2305.13245). With `differential` each of the
    model's H heads is two heads of the normalizer. One gets the first halves of queries and keys, the other the second
    halves, and both get whole values. With `differential: v2` each of the H heads is two neighbouring query heads of
    full size.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__(config, seq_len, layer)
        n_queries = config.n_head * (2 if config.differential == "v2" else 1)
        self.n_head, self.head_counts = config.n_head, (n_queries, config.kv_heads, config.kv_heads)
        q_width, k_width, v_width = (n * config.value_dims for n in self.head_counts)
        self.fused_row_counts = {"qkv": {"q": q_width, "k": k_width, "v": v_width}}
        self.qkv = UninitialisedLinear(config.n_embd, q_width + k_width + v_width, bias=config.has_qkv_bias)
        width = config.n_head * config.value_dims
        self.out = UninitialisedLinear(width, config.n_embd, bias=config.bias)
        self.exclusive = config.exclusive
        self.value_mix = nn.Parameter(torch.full((1,), 0.5)) if config.value_residual and layer else None
        gate_width = {None: 0, "head": config.n_head, "element": width}[config.output_gate]
        n_inputs, self.gate_factor = (config.gate_inputs, 2) if config.gate_inputs else (config.n_embd, 1)
        self.gate = UninitialisedLinear(n_inputs, gate_width, bias=False) if gate_width else None
        self.difference = None
        if config.differential:
            self.difference = (
                DifferentialV1(config.value_dims, config.norm_eps, layer)
                if config.differential is True
                else DifferentialV2(config.n_embd, config.n_head)
            )

    def project_values(self, x: Tensor) -> Tensor:
        """Project the layer's input x (B, T, C) to its values (B, K, T, E)."""
        n_rows = self.fused_row_counts["qkv"]["v"]
        bias = None if self.qkv.bias is None else self.qkv.bias[-n_rows:]
        return F.linear(x, self.qkv.weight[-n_rows:], bias).unflatten(-1, (self.head_counts[2], -1)).transpose(1, 2)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.head_counts), -1)).transpose(1, 2).split(self.head_counts, 1)
        if self.value_mix is not None:
            v = v + self.value_mix.to(v.dtype) * (context.first_layer_values.to(v.dtype) - v)
        heads, kv_heads, _ = self.head_counts
        if not isinstance(self.difference, DifferentialV1):
            output = self.attend(x, q, k, v, context)
            if self.difference is not None:
                outputs = output.unflatten(-1, (self.n_head, 2, -1))
                output = self.difference(outputs, context.select_output_tokens(x)).flatten(2)
        else:
            # (B, K, H / K or 1, T, 2, D / 2)
            q, k = (x.unflatten(1, (kv_heads, -1)).unflatten(-1, (2, -1)) for x in (q, k))
            # (B, 2 H or 2 K, T, D / 2), by key-value head, half, query head
            q, k = (x.movedim(-2, 2).flatten(1, 3) for x in (q, k))
            output = self.attend(x, q, k, v.repeat_interleave(2, 1), context).unflatten(
                -1, (kv_heads, 2, heads // kv_heads, -1)
            )
            output = self.difference(output.transpose(3, 4).flatten(2, 3)).flatten(2)
        if self.exclusive:
            own_values = context.select_output_tokens(v.transpose(1, 2)).unsqueeze(-2)  # (B, T, K, 1, E)
            output = remove_own_value(
                output.unflatten(-1, (kv_heads, self.n_head // kv_heads, -1)), own_values
            ).flatten(2)
        if self.gate is not None:
            inputs = context.select_output_tokens(x)[..., : self.gate.in_features]
            # (B, T, H, 1) or (B, T, H, D)
            gates = self.gate_factor * self.gate(inputs).sigmoid().unflatten(-1, (self.n_head, -1))
            output = (output.unflatten(-1, (self.n_head, -1)) * gates).flatten(2)
        return self.out(output)


def remove_own_value(outputs: Tensor, own_values: Tensor) -> Tensor:
    """Return y - (y.u) u, in the dtype of `outputs`, where y are the heads' outputs and u the unit vectors of each
    token's own value.

    outputs: (B, T, K, H / K, E). own_values: (B, T, K, 1, E).
    """
    y, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (outputs, own_values))
    u = F.normalize(v, dim=-1)
    return (y - (y * u).sum(-1, keepdim=True) * u).to(outputs.dtype)


class DifferentialV2(nn.Module):
    """Differential attention's second version computes o1 - sigmoid(x W) o2. o1 and o2 are the outputs of two queries
    of a head, x is the layer's input.
    """

    def __init__(self, width: int, n_head: int):
        super().__init__()
        self.factor = UninitialisedLinear(width, n_head, bias=False)

    def forward(self, outputs: Tensor, x: Tensor) -> Tensor:
        """Return the differences (B, T, H, E) of the outputs of each head's two queries, (B, T, H, 2, E), for the
        layer's input x (B, T, C).
        """
        first_output, second_output = outputs.unbind(-2)
        return first_output - self.factor(x).sigmoid().unsqueeze(-1) * second_output


class DifferentialV1(nn.Module):
    """Differential attention (arXiv 2410.05258) computes (1 - lambda_0) RMSNorm(o1 - lambda o2). o1 and o2 are a head's
    outputs by two attention maps.

    lambda = exp(a.b) - exp(c.d) + lambda_0 with learned vectors a, b, c, d; lambda_0 = 0.8 - 0.6 exp(-0.3 l) in layer l
    = 0, 1 ...
    """

    # standard deviation that `Decoder.initialise` draws the vectors with, as in the authors' code
    INITIAL_STD: ClassVar[float] = 0.1

    def __init__(self, size: int, eps: float, layer: int):
        super().__init__()
        self.lambda_0 = 0.8 - 0.6 * math.exp(-0.3 * layer)
        # a tensor, so that compiled layers share their code
        self.register_buffer("initial_lambda", torch.tensor(self.lambda_0), persistent=False)
        # four vectors of half a head, in one dimension: no matrix to optimizers
        self.lambdas = nn.Parameter(torch.zeros(2 * size))
        self.norm = HeadNorm(size, eps)

    def forward(self, outputs: Tensor) -> Tensor:
        """Return the differences (B, T, H, D), in the outputs' dtype, of each head's outputs by two attention maps,
        (B, T, H, 2, D).
        """
        a, b, c, d = self.lambdas.float().chunk(4)
        factor = (a * b).sum().exp() - (c * d).sum().exp() + self.initial_lambda
        first_output, second_output = outputs.to(self.norm.weight.dtype).unbind(-2)
        return (self.norm(first_output - factor * second_output) * (1 - self.initial_lambda)).to(outputs.dtype)


class GAU(AttentionBase):
    """A gated attention unit (arXiv 2202.10447) computes O = (U * (A V)) W_o, with one head's attention weights A and
    the elementwise product *.

    The input is projected, passed through SiLU, and split into U and V of width e and Z of width s. Queries and keys
    are Z times a learned gain plus a learned offset, initially 1 and 0.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__(config, seq_len, layer)
        e, s = config.value_dims, config.key_dims
        self.fused_row_counts = {"uvz": {"u": e, "v": e, "z": s}}
        self.uvz = UninitialisedLinear(config.n_embd, 2 * e + s, bias=config.bias)
        self.q_gain, self.q_offset = nn.Parameter(torch.ones(s)), nn.Parameter(torch.zeros(s))
        self.k_gain, self.k_offset = nn.Parameter(torch.ones(s)), nn.Parameter(torch.zeros(s))
        self.out = UninitialisedLinear(e, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        u, v, z = F.silu(self.uvz(x)).split(list(self.fused_row_counts["uvz"].values()), -1)
        q, k = z * self.q_gain + self.q_offset, z * self.k_gain + self.k_offset
        return self.out(
            context.select_output_tokens(u) * self.attend(x, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), context)
        )


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * value (..., W) for x (..., 2 W), which holds W gates, then W values."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def relu2(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return F.relu(x).square()


ACTIVATIONS = {"swiglu": swiglu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu2": relu2}


class MLP(nn.Module):
    """An MLP whose activation is SwiGLU (gate and value in one matrix), GELU, GELU's approximation by tanh, or
    ReLU^2.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden_width, is_gated = config.mlp_width, config.mlp == "swiglu"
        self.activation = ACTIVATIONS[config.mlp]
        self.fused_row_counts = {"up": {"gate": hidden_width, "value": hidden_width}} if is_gated else {}
        self.up = UninitialisedLinear(
            config.n_embd, 2 * hidden_width if is_gated else hidden_width, bias=config.has_mlp_bias
        )
        self.out = UninitialisedLinear(hidden_width, config.n_embd, bias=config.has_mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.activation(self.up(x)))


class Block(nn.Module):
    """A layer computes x + attention(norm(x)), then x + mlp(norm(x)).

    x is (B, T, C), the result (B, T - output_start, C), for the tokens from `context.output_start` on. With `post_norm`
    norms are on the outputs; with `parallel` the MLP has the attention's input.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config, seq_len, layer)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.post_norm, self.parallel = config.post_norm, config.parallel

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        attended = self.attention(x if self.post_norm else self.attention_norm(x), context)
        attended = self.dropout(self.attention_norm(attended) if self.post_norm else attended)
        x = context.select_output_tokens(x)
        if self.parallel:
            return x + attended + self.feed_forward(x)
        x = x + attended
        if torch.is_grad_enabled() or x.size(1) <= MAX_MLP_TOKENS:
            return x + self.feed_forward(x)
        return torch.cat([part + self.feed_forward(part) for part in x.split(MAX_MLP_TOKENS, 1)], 1)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream x (B, T, C)."""
        return self.dropout(self.mlp_norm(self.mlp(x)) if self.post_norm else self.mlp(self.mlp_norm(x)))


class GauBlock(nn.Module):
    """A layer with a gated attention unit computes x + gau(norm(x)).

    x is (B, T, C), the result (B, T - output_start, C), for the tokens from `context.output_start` on.
    """

    def __init__(self, config: ModelConfig, seq_len: int, layer: int):
        super().__init__()
        self.gau_norm = make_norm(config)
        self.gau = GAU(config, seq_len, layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        return context.select_output_tokens(x) + self.dropout(self.gau(self.gau_norm(x), context))
