"""The decoder: its shapes, positions, inference settings, caches, and normalizers by layer."""

import itertools
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import mark_others_slow

from lm.attention import catalogue
from lm.attention import catalogue as opt
from lm.attention.layout import AttentionLayout
from lm.config import normalizers as kinds
from lm.config.eval_config import InferenceSetting, Interpolation
from lm.config.load import parse_config, to_yaml
from lm.config.model_config import GAUBlock, LearnedPosition, ModelConfig, NoPosition, Rope
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.model.blocks import DecodingCache, ForwardContext, RMSNorm, rotate
from lm.model.decoder import Decoder
from lm.model.rope import rope_rotation
from lm.model.spec import count_parameters, flops_per_token
from lm.model.swapped import with_inference_setting


def small(**changes: object) -> ModelConfig:
    return ModelConfig(**{"n_layer": 2, "n_head": 2, "n_embd": 32, **changes})


SHAPES = [
    {"norm": norm, "mlp": mlp, "position": position, "qk_norm": qk_norm, "bias": bias, "tied": tied}
    for (norm, mlp, position), (qk_norm, bias, tied) in zip(
        itertools.product(
            ("rms", "layer"), ("swiglu", "gelu", "relu2"), (Rope(), Rope(fraction=0.5), LearnedPosition(), NoPosition())
        ),
        itertools.cycle(itertools.product((False, True), repeat=3)),
        strict=False,
    )
]


@pytest.mark.parametrize("changes", SHAPES, ids=lambda c: f"{c['norm']}-{c['mlp']}-{c['position'].name}")
def test_every_shape_is_causal_trains_and_gives_each_parameter_a_gradient(changes: dict):
    decoder = Decoder(small(**changes), 50, 16)
    sequences = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    hidden = decoder(sequences[:, :-1])
    other_sequences = sequences.clone()
    other_sequences[:, 10:] = (other_sequences[:, 10:] + 1) % 50
    assert torch.equal(decoder(other_sequences[:, :-1])[:, :10], hidden[:, :10])
    decoder.summed_loss(Batch.from_sequences(sequences)).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_models_of_one_seed_start_equal_whatever_their_normalizer():
    first = dict(Decoder(small(), 50, 16, seed=3).named_parameters())
    second = dict(Decoder(small(normalizer=opt.SSMax(bias=True)), 50, 16, seed=3).named_parameters())
    assert {name for name in second if name not in first} == {
        f"blocks.{i}.attention.normalizer.{p}" for i in (0, 1) for p in "sb"
    }
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dict(Decoder(small(), 50, 16, seed=4).named_parameters())
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_initial_spread_is_as_documented():
    weights = dict(Decoder(small(n_embd=256, n_layer=8), 500, 16).named_parameters())
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.0.mlp.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert weights["blocks.0.attention.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)


@pytest.mark.parametrize("shape", [(7, 3, 33), (2, 1, 40), (4, 50, 6, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_root_mean_square_norm_alone_is_torchs_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.transpose(-3, -2)[..., 1:, :].requires_grad_()  # not contiguous, as heads are
    outcomes = []
    for module in (torch.nn.RMSNorm(shape[-1], 1e-6).to(dtype), RMSNorm(shape[-1], 1e-6).to(dtype)):
        module.weight.data.copy_(torch.linspace(0.5, 2, shape[-1]))
        y, cotangent = module(x), torch.linspace(-1, 2, x.numel()).view_as(x).to(dtype)
        outcomes.append((y, *torch.autograd.grad(y, [x, module.weight], cotangent)))
        assert torch.equal(torch.autograd.grad(module(x.detach()), module.weight, cotangent)[0], outcomes[-1][2])
        module.requires_grad_(False)
        assert torch.equal(torch.autograd.grad(module(x), x, cotangent)[0], outcomes[-1][1])
        with torch.no_grad():
            assert torch.equal(module(x), y)
    assert all(torch.equal(actual, expected) for expected, actual in zip(*outcomes, strict=True))


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


def test_the_low_frequency_pairs_of_p_rope_are_not_rotated():
    x = torch.randn(1, 1, 10, 64, generator=torch.Generator().manual_seed(0))
    part = rope_rotation(torch.arange(10), 64, Rope(fraction=0.25))
    assert torch.equal(rotate(x, part)[..., 16:], x[..., 16:])
    fastest = rope_rotation(torch.arange(10), 64, Rope())
    assert torch.equal(part[0], fastest[0][:, :8])


@torch.no_grad()
@pytest.mark.parametrize("block", ["grouped", "gau"])
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_an_inference_setting_makes_a_copy_that_shares_weights_and_leaves_the_model_unchanged(name: str, block: str):
    model, tokens = make_decoder(name, block), torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(0))
    changes = {"n": "fixed:7"} if "n" in vars(model.normalizers()[0].options) else {}
    before, state = model(tokens), torch.get_rng_state()
    scaled_model = with_inference_setting(model, InferenceSetting(Interpolation(), changes))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(scaled_model(tokens), before)
    assert torch.equal(model(tokens), before)
    copied, originals = dict(scaled_model.named_parameters()), dict(model.named_parameters())
    assert list(copied) == list(originals)
    assert all(copied[name] is originals[name] for name in copied)
    alike = make_decoder(name, block, changes)
    alike.load_state_dict(model.state_dict())
    assert torch.equal(with_inference_setting(alike, InferenceSetting(Interpolation()))(tokens), scaled_model(tokens))


def settable(options: type) -> dict[str, object]:
    """Another value of every option that an inference setting may change."""
    fixed = getattr(options, "fixed_by_training", {})
    by_type = {bool: lambda value: not value, float: lambda value: value + 1.5}
    by_type |= {int: lambda value: value + 1, str: lambda value: "fixed:9"}
    changes = {
        spec.name: by_type[type(spec.default)](spec.default) for spec in fields(options) if spec.name not in fixed
    }
    literals = {"base": 9.0, "form": "1/n^2", "features": "relu"}
    return {name: literals.get(name, value) for name, value in changes.items()}


@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_options_that_training_has_not_fixed_change_no_parameter(name: str):
    options, shapes = kinds.NORMALIZER_OPTIONS[name], []
    for changes in ({}, settable(options)):
        shapes.append(
            {
                key: value.shape
                for key, value in Decoder(small(normalizer=options(**changes)), 50, 16).named_parameters()
            }
        )
    assert shapes[0] == shapes[1]


# ---------------------------------------------------------------- decoding and packed documents, for every normalizer
# and block

BLOCKS = {
    "attention": {"n_head": 2},
    "grouped": {"n_head": 4, "n_kv_head": 2, "head_size": 12},
    "gau": {"n_head": 1, "block": GAUBlock(key_size=8)},
}


def make_decoder(name: str, block: str, options: Mapping[str, object] = {}, **changes: object) -> Decoder:
    config = ModelConfig(
        n_layer=2, n_embd=32, normalizer=kinds.NORMALIZER_OPTIONS[name](**options), **{**BLOCKS[block], **changes}
    )
    decoder = Decoder(config, 50, seq_len=16, seed=3).eval().double()
    with torch.no_grad():
        for normalizer in decoder.normalizers():
            for parameter in normalizer.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return decoder


@torch.no_grad()
@pytest.mark.parametrize("block", mark_others_slow(BLOCKS, ["grouped", "gau"]))
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_prefill_equals_decoding_step_by_step_equals_packed_documents(name: str, block: str):
    model = make_decoder(name, block)
    tokens = torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(0))
    at_once = model(tokens)
    cache = DecodingCache(24)
    steps = [model(tokens[:, :7], cache=cache), *(model(tokens[:, t : t + 1], cache=cache) for t in range(7, 24))]
    assert torch.allclose(torch.cat(steps, 1), at_once, rtol=0, atol=1e-9)
    lengths = [5, 1, 18]
    packed = model(tokens, layout=AttentionLayout.from_document_lengths(lengths))
    separate = [model(part) for part in tokens.split(lengths, 1)]
    assert torch.allclose(packed, torch.cat(separate, 1), rtol=0, atol=1e-9)
    batched = model(torch.cat((tokens, tokens.flip(1))))
    assert torch.allclose(batched[:1], at_once, rtol=0, atol=1e-9)
    same_states_of_the_last_tokens(model, tokens)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [{"output_gate": "head"}, {"differential": True, "normalizer": "entmax15"}, {"value_residual": "first_layer"}],
    ids=str,
)
def test_the_states_of_the_last_tokens_alone_are_the_same_in_other_blocks(tiny, changes: dict):
    config = tiny(*(f"model.{key}={value}" for key, value in changes.items())).model
    model = Decoder(config, 50, seq_len=16, seed=3).eval().double()
    same_states_of_the_last_tokens(model, torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("block", mark_others_slow(BLOCKS, ["grouped", "gau"]))
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_gradients_of_answers_need_no_queries_before_them(name: str, block: str):
    model = make_decoder(name, block).train()
    answers = np.zeros((2, 24), bool)
    answers[0, 20:], answers[1, [19, 23]] = True, True
    batch = Batch.from_sequences(torch.randint(50, (2, 25), generator=torch.Generator().manual_seed(0)), answers)
    assert batch.first_target_index == 19
    part_loss, full_loss = (model.summed_loss(part) for part in (batch, batch._replace(first_target_index=0)))
    assert part_loss.item() == pytest.approx(full_loss.item(), rel=1e-6)  # its sum is in fp32
    parameters = dict(model.named_parameters())
    part_grads, full_grads = (
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in (part_loss, full_loss)
    )
    for place, grad, full_grad in zip(parameters, part_grads, full_grads, strict=True):
        assert (grad is None) == (full_grad is None), place
        if grad is not None:
            assert torch.allclose(grad, full_grad, rtol=1e-4, atol=1e-6 * full_grad.abs().max().item()), place


def same_states_of_the_last_tokens(model: Decoder, tokens: torch.Tensor) -> None:
    """Compare states asked for from some token on with those of whole sequences: alone, of packed documents, and with a
    cache.
    """
    layout, cache = AttentionLayout.from_document_lengths([5, 1, 18]), DecodingCache(24)
    for states, last_states in (
        (model(tokens), model(tokens, output_start=20)),
        (model(tokens, layout), model(tokens, layout, output_start=20)),
    ):
        assert torch.allclose(last_states, states[:, 20:], rtol=0, atol=1e-9)
    first = model(tokens[:, :15], cache=cache, output_start=14)
    rest = model(tokens[:, 15:], cache=cache, output_start=2)
    assert torch.allclose(torch.cat((first, rest), 1), model(tokens)[:, [14, *range(17, 24)]], rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", catalogue.OPTIONS_BY_NAME)
def test_grouped_queries_are_heads_of_equal_keys_and_values(name: str):
    """The same numbers as a model whose heads of keys and values are the shared ones, written out for each head of
    queries.
    """
    shared = make_decoder(name, "grouped")
    ungrouped = make_decoder(name, "grouped", n_kv_head=None)
    weights = shared.state_dict()
    for layer in range(2):
        name_of_weight = f"blocks.{layer}.attention.qkv.weight"
        q, k, v = weights[name_of_weight].split((48, 24, 24))
        weights[name_of_weight] = torch.cat(
            (q, *(part.unflatten(0, (2, 12)).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v)))
        )
    ungrouped.load_state_dict(weights)
    tokens = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(shared(tokens), ungrouped(tokens), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "forget", "window"])
def test_the_cache_holds_the_shared_keys_and_values_alone(name: str):
    model, cache = make_decoder(name, "grouped"), DecodingCache(40)
    model(torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(0)), cache=cache)
    features = 4 if name == "forget" else 0  # a gate for each head of queries
    assert sum(part.numel() for state in cache.states.values() for part in state) == 2 * 40 * (2 * 2 * 12 + features)


def test_counts_follow_shared_keys_and_head_size():
    """By hand: 2 layers of width 32, 4 heads of 12 with 2 of keys and values, ReLU^2 of 128, 50 words, 16 tokens."""
    model = Decoder(small(n_head=4, n_kv_head=2, head_size=12, mlp="relu2", qkv_bias=True), 50, 16)
    matrices = 2 * ((48 + 24 + 24) * 32 + 48 * 32 + 2 * 128 * 32)
    vectors = 2 * (96 + 2 * 32) + 32
    assert count_parameters(model)["non_embedding"] == matrices + vectors
    assert flops_per_token(model) == 6 * (matrices + 50 * 32) + 3 * 2 * 16 * 2 * 48


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"n_kv_head": 3}, "n_kv_head"),
        ({"n_embd": 34, "n_head": 4}, "n_embd"),
        ({"head_size": 7}, "head_size"),
        ({"n_head": 1, "block": GAUBlock(key_size=7)}, "block.key_size"),
        ({"n_head": 1, "block": GAUBlock(), "n_kv_head": 1}, "n_kv_head"),
        ({"n_head": 2, "block": GAUBlock()}, "n_head"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_naming_their_key(changes: dict, path: str):
    assert [problem.key_path for problem in small(**changes).problems()] == [path]
    assert not [*small(n_head=4, n_kv_head=2, head_size=20, n_embd=34).problems()]


def test_gau_is_its_papers_formula():
    """O = (U * relu(Q K^T)^2 / (n s) V) W_o with U, V, Z = SiLU(x W), Q and K = Z with gains and offsets."""
    model = make_decoder("relu2", "gau", position=NoPosition())
    gau = model.blocks[0].gau
    with torch.no_grad():
        for parameter in (gau.q_gain, gau.q_offset, gau.k_gain, gau.k_offset):
            parameter.add_(torch.randn(8, generator=torch.Generator().manual_seed(1)).double())
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)).double()
    u, v, z = F.silu(x @ gau.uvz.weight.t()).split([64, 64, 8], -1)
    scores = (z * gau.q_gain + gau.q_offset) @ (z * gau.k_gain + gau.k_offset).transpose(1, 2)
    a = (scores.relu() ** 2).tril() / (torch.arange(1, 7).view(6, 1) * 8)
    expected = (u * (a @ v)) @ gau.out.weight.t()
    assert torch.allclose(gau(x, ForwardContext(AttentionLayout.full(6), None, 1.0, None)), expected, atol=1e-9)


# ---------------------------------------------------------------- another normalizer in each layer


def test_a_list_of_normalizers_is_repeated_over_the_layers(tiny):
    config = tiny("model.n_layer=5", "model.normalizer=[softmax, {name: ssmax, bias: true}, relu2]")
    assert parse_config(yaml.safe_load(to_yaml(config))) == config
    assert config.model.normalizer.label() == "layers (softmax, ssmax (bias=true), relu2)"
    options = [normalizer.options for normalizer in Decoder(config.model, 400, 32).normalizers()]
    softmax, ssmax, relu2 = opt.Softmax(), opt.SSMax(bias=True), opt.Relu2()
    assert options == [softmax, ssmax, relu2, softmax, ssmax]
    with pytest.raises(ConfigError, match=r"model\.normalizer\.of\[1\]\.name = 'ssmx'.*did you mean 'ssmax'"):
        tiny("model.normalizer=[softmax, ssmx]")
    with pytest.raises(ConfigError, match=r"model\.normalizer\.of\[0\]\.n = 'wide': unknown row length"):
        tiny("model.normalizer=[{name: ssmax, n: wide}]")
    with pytest.raises(ConfigError, match="must be given"):
        tiny("model.normalizer=[]")
    with pytest.raises(ConfigError, match="3 normalizers': lists more than the 2 layers"):
        tiny("model.normalizer=[softmax, softmax, ssmax]")


def test_a_normalizers_own_matrices_follow_the_seed():
    config = small(normalizer=opt.QASSMax())
    first, second, third = (Decoder(config, 50, 16, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "blocks.0.attention.normalizer.gate.hidden.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], third[name])
    assert first[name].std().item() == pytest.approx(1 / 4, rel=0.1)


def test_p_n_is_one_table_for_all_layers_and_starts_as_softmax():
    config = small(normalizer=opt.PN())
    model, softmax = Decoder(config, 50, 16, seed=1), Decoder(small(), 50, 16, seed=1)
    first, second = model.normalizers()
    assert first.p is second.p
    assert first.s is not second.s
    tokens = torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(0))  # longer than the table
    assert torch.equal(model.logits(tokens), softmax.logits(tokens))
    names = [name for name, _ in model.named_parameters() if name.endswith(".p")]
    assert names == ["blocks.0.attention.normalizer.p"]
    model.summed_loss(Batch.from_sequences(tokens)).backward()
    assert abs(first.p.grad[0]) < 1e-8  # one key: nothing to weigh
    assert (first.p.grad[1:].abs() > 1e-8).all()
