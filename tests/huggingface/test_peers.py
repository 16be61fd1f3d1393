"""Attention as other libraries compute it: the same outputs and gradients of the inputs, in fp32.

flash-linear-attention's naive functions and x-transformers are compared where they are installed:

    pip install --no-deps fla-core x-transformers einops einx frozendict loguru torch-einops-utils triton
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lm.attention import catalogue as opt
from lm.attention.contract import random_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import Normalizer
from lm.config.model_config import ModelConfig
from lm.model.blocks import Attention, ForwardContext
from lm.model.rope import rope_rotation

HEADS, SIZE, WIDTH, LENGTH, TOLERANCE = 4, 16, 64, 200, 2e-5
MASK = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
Function = Callable[..., Tensor]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: Function, theirs: Function, *inputs: Tensor) -> None:
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = function(*leaves)
        results.append((output.detach(), *torch.autograd.grad(output, leaves, drawn(*output.shape, seed=9))))
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


# ---------------------------------------------------------------- functions of queries, keys and values


def in_transformers(model: str, name: str) -> Callable:
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def gpt_oss(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = SimpleNamespace(num_key_value_groups=1, sinks=normalizer.b, training=False)
    return in_transformers("gpt_oss", "eager_attention_forward")(module, q, k, v, MASK, SIZE**-0.5)[0].transpose(1, 2)


def gemma2(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module, attend = SimpleNamespace(num_key_value_groups=1, training=False), "eager_attention_forward"
    output, _ = in_transformers("gemma2", attend)(module, q, k, v, MASK, scaling=SIZE**-0.5, softcap=0.7)
    return output.transpose(1, 2)


def ministral3(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = in_transformers("ministral3", "get_llama_4_attn_scale")(torch.arange(LENGTH)[None], 0.3, 16)
    return scaled_dot_product_attention(q * scale, k, v, is_causal=True)


def llama4(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE, "num_hidden_layers": 1}
    config = transformers.Llama4TextConfig(
        **sizes, hidden_size=3 * WIDTH, no_rope_layers=[0], attn_scale=0.3, floor_scale=16
    )
    config._attn_implementation = "sdpa"
    module = in_transformers("llama4", "Llama4TextAttention")(config, 0)
    parts = torch.eye(3 * WIDTH).split(WIDTH)  # of the input, which holds queries, keys and values
    for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
        module.get_submodule(name).weight.data.copy_(part)
    module.o_proj = nn.Identity()
    output, _ = module(torch.cat([x.transpose(1, 2).flatten(2) for x in (q, k, v)], -1), None, None)
    return output.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def of_fla(name: str, function: str, **options: object) -> Callable[..., Tensor]:
    """A naive function of fla on (B, T, H, D), as one on (B, H, T, D)."""
    pytest.importorskip("fla")
    naive = getattr(import_module(f"fla.ops.{name}.naive"), function)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = naive(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)

    return attend


def fla_alibi(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = normalizer.log_decay(q).expand(q.size(0), LENGTH, HEADS)
    return of_fla("attn", "naive_parallel_attn", g=gates)(q, k, v)


def fla_forget(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = k[..., -1].transpose(1, 2)  # the feature that keys have
    return of_fla("forgetting_attn", "naive_forgetting_attn", g=gates)(q, k[..., :-1], v)


def fla_retention(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pytest.importorskip("fla")
    return import_module("fla.ops.retention.naive").naive_retention(q, k, v) / 2  # n is 2


def x_transformers(**options: object) -> Callable[..., Tensor]:
    def attend(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        module = pytest.importorskip("x_transformers.attend").Attend(causal=True, heads=HEADS, **options)
        output, _ = module(q, k, v)
        return output

    return attend


PEERS: dict[str, tuple[opt.Options, Callable[..., Tensor]]] = {
    "gpt-oss": (opt.Sink(), gpt_oss),
    "Gemma 2": (opt.SoftCap(cap=0.7), gemma2),
    "Llama 4": (opt.Llama4(floor_scale=16.0, attn_scale=0.3), llama4),
    "Ministral 3": (opt.Llama4(floor_scale=16.0, attn_scale=0.3, offset=0), ministral3),
    "fla, sink": (opt.Sink(), lambda normalizer, *qkv: of_fla("attn", "naive_parallel_attn",
        sink_bias=normalizer.b)(*qkv)),
    "fla, window": (opt.Window(size=20), lambda _, *qkv: of_fla("attn", "naive_parallel_attn", window_size=20)(*qkv)),
    "fla, ALiBi": (opt.ALiBi(), fla_alibi),
    "fla, forgetting attention": (opt.Forget(), fla_forget),
    "fla, stick-breaking": (opt.StickBreaking(), lambda _, *qkv: of_fla("stickbreaking_attn",
        "naive_stickbreaking_attn")(*qkv)),
    "fla, retention": (opt.Linear(features="identity", decay=True, n="fixed:2"), fla_retention),
    "x-transformers, zero key": (opt.Softmax1(), x_transformers(add_zero_kv=True)),
    "x-transformers, capped": (opt.SoftCap(cap=0.7), x_transformers(softclamp_logits=True, logit_softclamp_value=0.7)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_normalizers_are_those_of_other_libraries(peer: str):
    options, theirs = PEERS[peer]
    normalizer = random_normalizer(options, torch.float32).requires_grad_(False)
    q, k, v = (drawn(2, HEADS, LENGTH, SIZE, seed=seed) for seed in range(3))
    _, k = normalizer.append_features(drawn(2, LENGTH, normalizer.layer.width, seed=3), q, k)
    layout = AttentionLayout.full(LENGTH)
    assert_same(lambda *qkv: normalizer(*qkv, layout), lambda *qkv: theirs(normalizer, *qkv), q, k, v)


# ---------------------------------------------------------------- layers


def diffllama(sizes: dict[str, int]) -> tuple[nn.Module, ModelConfig, dict[str, Tensor]]:
    module = in_transformers("diffllama", "DiffLlamaAttention")(transformers.DiffLlamaConfig(**sizes), 0)
    weights = (module.get_submodule(name).weight for name in ("q_proj", "k_proj", "v_proj"))
    state = {  # the first half of the heads is paired with the second
        "qkv.weight": torch.cat([x.unflatten(0, (2, -1, SIZE)).transpose(0, 1).flatten(0, 2) for x in weights]),
        "difference.lambdas": torch.cat([module.get_parameter(f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")]),
        "difference.norm.weight": torch.ones(2 * SIZE),
    }
    return module, ModelConfig(1, n_head=HEADS // 2, n_kv_head=1, n_embd=WIDTH, differential=True), state


def qwen3_next(sizes: dict[str, int]) -> tuple[nn.Module, ModelConfig, dict[str, Tensor]]:
    module = in_transformers("qwen3_next", "Qwen3NextAttention")(transformers.Qwen3NextConfig(**sizes), 0)
    q, gate = (part.flatten(0, 1) for part in module.q_proj.weight.unflatten(0, (HEADS, 2, SIZE)).unbind(1))
    norms = {f"{name}.weight": 1 + module.get_submodule(name).weight for name in ("q_norm", "k_norm")}
    state = {"qkv.weight": torch.cat((q, module.k_proj.weight, module.v_proj.weight)), "gate.weight": gate, **norms}
    config = ModelConfig(1, n_head=HEADS, n_kv_head=2, n_embd=WIDTH, qk_norm=True, output_gate="element")
    return module, config, state


@pytest.mark.parametrize("peer", [diffllama, qwen3_next], ids=lambda function: function.__name__)
def test_layers_are_those_of_transformers(peer: Callable):
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": SIZE}
    torch.manual_seed(0)
    module, config, state = peer(sizes | {"num_hidden_layers": 1, "rms_norm_eps": 1e-5, "attention_dropout": 0.0})
    module.config._attn_implementation = "sdpa"
    layer = Attention(config, LENGTH, 0)
    layer.load_state_dict({**state, "out.weight": module.o_proj.weight})
    cos, sin = rope_rotation(torch.arange(LENGTH), config.key_dims, config.position)
    angles = tuple(torch.cat((part, part), -1)[None] for part in (cos, sin))
    context = ForwardContext(AttentionLayout.full(LENGTH), (cos, sin), 1.0, None)
    assert_same(lambda x: layer(x, context), lambda x: module(x, angles, None)[0], drawn(2, LENGTH, WIDTH, seed=0))
