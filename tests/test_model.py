"""The decoder and its loss head."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import lm.loss
from lm.attention import table
from lm.config import Learned, ModelConfig, NoPosition, Rope, load
from lm.loss import linear_cross_entropy, token_nll
from lm.model import Decoder, count_parameters, mlp_width, rope_rotation, rotate


def small(**changes: object) -> ModelConfig:
    return ModelConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 32, **changes})


SHAPES = [
    {"norm": norm, "mlp": mlp, "position": position, "qk_norm": qk_norm, "bias": bias, "tied": tied}
    for (norm, mlp, position), (qk_norm, bias, tied) in zip(
        itertools.product(("rms", "layer"), ("swiglu", "gelu", "relu2"), (Rope(), Rope(fraction=0.5), Learned(), NoPosition())),
        itertools.cycle(itertools.product((False, True), repeat=3)),
        strict=False,
    )
]


@pytest.mark.parametrize("changes", SHAPES, ids=lambda c: f"{c['norm']}-{c['mlp']}-{c['position'].name}")
def test_every_shape_is_causal_trains_and_gives_each_parameter_a_gradient(changes: dict):
    decoder = Decoder(small(**changes), 50, 16)
    rows = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    hidden = decoder(rows[:, :-1])
    changed = rows.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    assert torch.equal(decoder(changed[:, :-1])[:, :10], hidden[:, :10])
    decoder.loss(rows).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_loss_of_the_initial_model_is_near_that_of_a_uniform_guess():
    rows = torch.randint(500, (4, 65), generator=torch.Generator().manual_seed(0))
    assert Decoder(small(), 500, 64).loss(rows).item() / 256 == pytest.approx(math.log(500), abs=0.05)


def test_models_of_one_seed_start_equal_whatever_their_normalizer():
    first = dict(Decoder(small(), 50, 16, seed=3).named_parameters())
    second = dict(Decoder(small(normalizer=table.SSMax(bias=True)), 50, 16, seed=3).named_parameters())
    assert {name for name in second if name not in first} == {f"blocks.{i}.attention.normalizer.{p}" for i in (0, 1) for p in "sb"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dict(Decoder(small(), 50, 16, seed=4).named_parameters())
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_initial_spread_is_as_documented():
    weights = dict(Decoder(small(n_embd=256, n_layer=8), 500, 16).named_parameters())
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.0.mlp.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert weights["blocks.0.attention.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("preset", "vocab_size", "seq_len", "millions"),
    [
        ("1m", 4096, 256, 1.2),
        ("5m", 4096, 256, 5.3),
        ("14m", 4096, 256, 13.8),
        ("30m", 4096, 256, 29.9),
        ("60m", 4096, 256, 54.8),
        ("gpt2-124m", 50257, 1024, 124.4),
        ("ssmax-162m", 50257, 1024, 162.1),
        ("350m", 50257, 1024, 355.1),
    ],
)
def test_presets_have_the_size_they_say(preset: str, vocab_size: int, seq_len: int, millions: float):
    config = load([f"configs/models/{preset}.yaml", f"data.seq_len={seq_len}"])
    with torch.device("meta"):
        decoder = Decoder(config.model, vocab_size, seq_len, seed=None)
    assert count_parameters(decoder)["total"] / 1e6 == pytest.approx(millions, abs=0.06)


def test_mlp_width_defaults():
    assert mlp_width(small(n_embd=768)) == 2048
    assert mlp_width(small(n_embd=768, mlp="gelu")) == 3072
    assert mlp_width(small(n_mlp=100)) == 100


# ---------------------------------------------------------------- RoPE


def test_rope_scores_depend_on_distance_only_and_stay_exact_far_out():
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = {}
    for start in (0, 100, 131_000):
        rotation = rope_rotation(torch.tensor([start, start + 37]), 64, Rope())
        turned_q, turned_k = rotate(q.expand(1, 1, 2, 64), rotation), rotate(k.expand(1, 1, 2, 64), rotation)
        score[start] = (turned_q[..., 1, :] * turned_k[..., 0, :]).sum().item()
    assert score[100] == pytest.approx(score[0], abs=1e-5)
    assert score[131_000] == pytest.approx(score[0], abs=1e-5)


def test_rope_keeps_lengths_and_leaves_the_slowest_pairs_of_p_rope_alone():
    x = torch.randn(1, 1, 10, 64, generator=torch.Generator().manual_seed(0))
    whole = rotate(x, rope_rotation(torch.arange(10), 64, Rope()))
    assert torch.allclose(whole.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    part = rope_rotation(torch.arange(10), 64, Rope(fraction=0.25))
    assert torch.equal(rotate(x, part)[..., 16:], x[..., 16:])
    fastest = rope_rotation(torch.arange(10), 64, Rope())
    assert torch.equal(part[0], fastest[0][:, :8])


def test_theta_factor_multiplies_theta():
    positions = torch.arange(100)
    scaled, asked = rope_rotation(positions, 64, Rope(theta=1e4), 50.0), rope_rotation(positions, 64, Rope(theta=5e5))
    assert torch.equal(scaled[0], asked[0])
    decoder = Decoder(small(), 50, 16)
    tokens = torch.randint(50, (1, 16))
    assert not torch.allclose(decoder(tokens, 50.0), decoder(tokens))
    assert decoder.config.position.theta == 1e4


def test_learned_positions_refuse_longer_rows():
    with pytest.raises(ValueError, match="learned positions end at 16"):
        Decoder(small(position=Learned()), 50, 16)(torch.zeros(1, 17, dtype=torch.int64))


# ---------------------------------------------------------------- loss head


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunked_loss_equals_plain_cross_entropy_with_its_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(lm.loss.CHUNK_LOGITS, "cpu", 128 * 37)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(37, 24, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(37, (300,), generator=generator)
    plain = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    chunked = linear_cross_entropy(hidden, weight, targets)
    assert chunked.dtype == torch.float32
    assert torch.allclose(chunked, plain.float(), rtol=1e-5)
    for a, b in zip(torch.autograd.grad(chunked * 0.3, [hidden, weight]), torch.autograd.grad(plain * 0.3, [hidden, weight]), strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert torch.allclose(token_nll(hidden, weight, targets).sum(), plain.float(), rtol=1e-5)


def test_loss_in_bf16_autocast_is_near_the_exact_one():
    decoder = Decoder(small(), 500, 64)
    rows = torch.randint(500, (4, 65), generator=torch.Generator().manual_seed(0))
    exact = decoder.loss(rows).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = decoder.loss(rows)
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=1e-3)
    assert decoder.head.weight.grad.dtype == torch.float32


def test_loss_and_evaluation_never_hold_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch):
    """The largest tensor made while computing the loss of 4,096 tokens and 1,000 words stays far below 4,096 x 1,000."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    monkeypatch.setitem(lm.loss.CHUNK_LOGITS, "cpu", 256 * 1000)
    hidden = torch.randn(4096, 16, requires_grad=True)
    weight = torch.randn(1000, 16, requires_grad=True)
    targets = torch.randint(1000, (4096,))
    with Watch():
        linear_cross_entropy(hidden, weight, targets).backward()
        token_nll(hidden, weight, targets)
    assert largest <= 256 * 1000
