"""Models as others publish them: their blocks written out here, in plain formulas, against the decoder's."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config.model_config import Learned, ModelConfig, Rope
from lm.model.blocks import DecodingCache
from lm.model.decoder import Decoder

V, C, T = 60, 48, 20
Weights = dict[str, Tensor]


def model(**changes: object) -> Decoder:
    """Of random weights, none of them 0 or 1, in fp64."""
    decoder = Decoder(ModelConfig(n_layer=2, n_embd=C, **changes), V, seq_len=T).eval().double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return decoder


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(H, T, D) each; heads side by side, (T, H D)."""
    scores = (q @ k.transpose(1, 2) / math.sqrt(q.size(-1))).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def heads(x: Tensor, size: int) -> Tensor:
    return x.view(T, -1, size).transpose(0, 1)


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def turned(x: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding of (H, T, D): x cos + rotate_half(x) sin."""
    size = x.size(-1)
    angles = torch.arange(T).double()[:, None] * theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.cat((angles, angles), -1)
    return x * angles.cos() + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * angles.sin()


def agrees(decoder: Decoder, expected: Tensor, tokens: Tensor) -> None:
    """Read as a whole, and token by token."""
    with torch.no_grad():
        assert torch.allclose(decoder.logits(tokens[None])[0], expected, atol=1e-6)
        cache = DecodingCache(T)
        steps = [decoder.head(decoder(token, cache=cache))[0] for token in tokens[None].split(1, 1)]
    assert torch.allclose(torch.cat(steps), expected, atol=1e-6)


def test_gpt_2():
    decoder = model(n_head=4, norm="layer", mlp="gelu_tanh", position=Learned(), bias=True, tied=True, norm_eps=1e-5)
    w, tokens = decoder.state_dict(), torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))

    def norm(x: Tensor, name: str) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * w[
            f"{name}.weight"
        ] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]

    x = w["embedding.weight"][tokens] + w["position.weight"]
    for name in ("blocks.0", "blocks.1"):
        q, k, v = (
            heads(part, 12) for part in linear(norm(x, f"{name}.attention_norm"), f"{name}.attention.qkv").split(C, -1)
        )
        x = x + linear(causal_attention(q, k, v), f"{name}.attention.out")
        hidden = linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.up")
        x = x + linear(
            0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3))), f"{name}.mlp.out"
        )
    agrees(decoder, norm(x, "norm") @ w["embedding.weight"].t(), tokens)


def llama(
    w: Weights, tokens: Tensor, n_head: int, n_kv_head: int, size: int, theta: float, eps: float, qk_norm: bool = False
) -> Tensor:
    """Logits of Llama's blocks (SmolLM2's too), with Qwen2's biases where there are some and Qwen3's norms of queries
    and keys.
    """
    x, group = w["embedding.weight"][tokens], n_head // n_kv_head
    for name in ("blocks.0", "blocks.1"):
        qkv = rms(x, w[f"{name}.attention_norm.weight"], eps) @ w[f"{name}.attention.qkv.weight"].t() + w.get(
            f"{name}.attention.qkv.bias", 0.0
        )
        q, k, v = (heads(part, size) for part in qkv.split((n_head * size, n_kv_head * size, n_kv_head * size), -1))
        if qk_norm:
            q, k = rms(q, w[f"{name}.attention.q_norm.weight"], eps), rms(k, w[f"{name}.attention.k_norm.weight"], eps)
        q, k = turned(q, theta), turned(k, theta)
        k, v = (torch.stack([part[head // group] for head in range(n_head)]) for part in (k, v))
        x = x + causal_attention(q, k, v) @ w[f"{name}.attention.out.weight"].t()
        gate, value = (rms(x, w[f"{name}.mlp_norm.weight"], eps) @ w[f"{name}.mlp.up.weight"].t()).chunk(2, -1)
        x = x + (F.silu(gate) * value) @ w[f"{name}.mlp.out.weight"].t()
    return rms(x, w["norm.weight"], eps) @ w["head.weight"].t()


def test_llama_and_smollm2():
    decoder = model(n_head=6, n_kv_head=2, norm_eps=1e-3, tied=True, n_mlp=80, position=Rope(theta=1e5))
    tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
    agrees(decoder, llama(decoder.state_dict(), tokens, 6, 2, 8, 1e5, 1e-3), tokens)


def test_qwen2():
    decoder = model(n_head=4, n_kv_head=2, norm_eps=1e-6, qkv_bias=True, position=Rope(theta=1e6))
    assert [name for name in decoder.state_dict() if name.endswith("bias")] == [
        f"blocks.{layer}.attention.qkv.bias" for layer in (0, 1)
    ]
    tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
    agrees(decoder, llama(decoder.state_dict(), tokens, 4, 2, 12, 1e6, 1e-6), tokens)


def test_qwen3():
    decoder = model(n_head=4, n_kv_head=1, head_size=20, norm_eps=1e-2, qk_norm=True, position=Rope(theta=1e6))
    tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
    agrees(decoder, llama(decoder.state_dict(), tokens, 4, 1, 20, 1e6, 1e-2, qk_norm=True), tokens)
