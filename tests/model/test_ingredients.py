"""What current baselines add to a decoder: each is off unless asked for, is what its formula says, and leaves all else
as it was.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.attention.catalogue import Relu2, Softmax, SSMax, make_normalizer
from lm.attention.layout import AttentionLayout
from lm.attention.normalizer import LayerSpec
from lm.attention.options import Options
from lm.config.load import load_config
from lm.config.model_config import LearnedPosition, ModelConfig
from lm.config.training_config import OptimConfig
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.model.attention_stream import attention_blocks
from lm.model.blocks import DecodingCache
from lm.model.decoder import Decoder
from lm.model.spec import count_parameters, flops_per_token
from lm.model.swapped import with_normalizer
from lm.runs.loading import load, save_model
from lm.training.optimizers import parameter_groups

V, C, T = 60, 48, 20
INGREDIENTS = {
    "out_init": {"out_init": "zero"},
    "embedding_norm, rms": {"embedding_norm": "rms"},
    "embedding_norm, layer": {"embedding_norm": "layer"},
    "logit_softcap": {"logit_softcap": 3.0},
    "value_residual": {"value_residual": "first_layer", "n_kv_head": 2},
    "differential": {"differential": True},
    "differential, v2": {"differential": "v2"},
    "exclusive": {"exclusive": True},
    "output_gate, 12 inputs": {"output_gate": "head", "gate_inputs": 12},
    "output_gate, head": {"output_gate": "head"},
    "output_gate, element": {"output_gate": "element"},
}
each = pytest.mark.parametrize("ingredient", INGREDIENTS)


def model(seed: int = 0, **changes: object) -> Decoder:
    return Decoder(ModelConfig(n_layer=2, n_embd=C, **changes), V, T, seed).eval()


def trained(ingredient: str, **changes: object) -> Decoder:
    """With weights that are nowhere 0 or 1."""
    decoder = model(**INGREDIENTS[ingredient], **changes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return decoder


def tokens(count: int = 1) -> Tensor:
    return torch.randint(V, (count, T), generator=torch.Generator().manual_seed(0))


@each
def test_all_other_parameters_start_as_without_it(ingredient: str):
    changes = {"n_kv_head": 2} if "value_residual" in ingredient else {}
    plain, other = dict(model(**changes).named_parameters()), dict(model(**INGREDIENTS[ingredient]).named_parameters())
    changed = {name for name, parameter in plain.items() if not torch.equal(parameter, other[name])}
    expected = {
        "out_init": {name for name in plain if name.endswith(".out.weight")},
        "differential, v2": {f"blocks.{layer}.attention.qkv.weight" for layer in (0, 1)},  # of twice the queries
    }
    assert changed == expected.get(ingredient, set())


@each
def test_it_changes_the_function_and_one_token_at_a_time_gives_the_same(ingredient: str):
    decoder = trained(ingredient)
    with torch.no_grad():
        logits = decoder.logits(tokens())[0]
        plain = model(**({"n_kv_head": 2} if "value_residual" in ingredient else {}))
        shapes = {name: value.shape for name, value in plain.state_dict().items()}
        plain.load_state_dict(
            {name: value for name, value in decoder.state_dict().items() if shapes.get(name) == value.shape},
            strict=ingredient != "differential, v2",  # whose queries are twice as many
        )
        # which is of the start alone
        assert torch.allclose(logits, plain.logits(tokens())[0]) == (ingredient == "out_init")
        cache = DecodingCache(T)
        steps = [decoder.head(decoder(token, cache=cache))[0] for token in tokens().split(1, 1)]
    assert torch.allclose(torch.cat(steps), logits, atol=1e-5)


@each
def test_it_is_kept_by_swaps_and_model_folders(ingredient: str, tmp_path):
    decoder = trained(ingredient)
    new = with_normalizer(decoder, decoder.config.normalizer)
    reloaded = load(save_model(decoder, tmp_path / "model")).decoder
    for other in (new, reloaded):
        assert other.config == decoder.config
        with torch.no_grad():
            assert torch.equal(other(tokens()), decoder(tokens()))
            assert torch.equal(
                other.summed_loss(Batch.from_sequences(tokens())), decoder.summed_loss(Batch.from_sequences(tokens()))
            )


# ---------------------------------------------------------------- each by its formula


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_norm_is_of_the_tokens_vectors_before_their_positions(kind: str, position: str):
    decoder = trained(f"embedding_norm, {kind}", **({"position": LearnedPosition()} if position == "learned" else {}))
    x = decoder.embedding(tokens())
    x = x - (x.mean(-1, keepdim=True) if kind == "layer" else 0)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * decoder.embedding_norm.weight
    if position == "learned":
        expected = expected + decoder.position.weight
    torch.testing.assert_close(decoder.embed(tokens())[0], expected)
    assert count_parameters(decoder)["non_embedding"] == count_parameters(model())["non_embedding"] + C


def test_values_are_mixed_with_those_of_the_first_layer():
    decoder, batch, first = trained("value_residual", qkv_bias=True), Batch(tokens(2), tokens(2), None), None
    with torch.no_grad():
        inputs = [block.inputs for block in attention_blocks(decoder, batch, block_size=T)]
        for layer, (layer_inputs, block) in enumerate(zip(inputs, decoder.blocks, strict=True)):
            expected = values = (
                layer_inputs.x @ block.attention.qkv.weight[-24:].t() + block.attention.qkv.bias[-24:]
            ).view(2, T, 2, 12)
            if layer:
                mix = block.attention.value_mix
                assert mix != 0.5
                expected = (1 - mix) * values + mix * first
            first = values if first is None else first
            torch.testing.assert_close(layer_inputs.v[:, ::2], expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_a_model_starts_with_the_mean_of_both_values():
    decoder, batch = model(value_residual="first_layer"), Batch(tokens(2), tokens(2), None)
    with torch.no_grad():
        inputs = [block.inputs for block in attention_blocks(decoder, batch, block_size=T)]
        layer_values = [
            layer_inputs.x @ block.attention.qkv.weight[-C:].t()
            for layer_inputs, block in zip(inputs, decoder.blocks, strict=True)
        ]
        for layer_inputs, value in zip(inputs, layer_values, strict=True):
            torch.testing.assert_close(
                layer_inputs.v.transpose(1, 2).flatten(2), (value + layer_values[0]) / 2, atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("kind", ["head", "element"])
def test_outputs_of_heads_are_times_a_gate_that_the_layers_input_gives(kind: str):
    decoder = trained(f"output_gate, {kind}", n_kv_head=2)
    attention, x = decoder.blocks[0].attention, decoder.blocks[0].attention_norm(decoder.embedding(tokens(2)))
    outputs = []
    attention.out.register_forward_pre_hook(lambda module, arguments: outputs.append(arguments[0]))
    with torch.no_grad():
        decoder(tokens(2))
        gate, (gated,) = attention.gate.weight, outputs
        attention.gate = None
        decoder(tokens(2))
        per_head = 1 if kind == "head" else 12
        for head in range(4):
            rows = gate[head * per_head : (head + 1) * per_head]
            expected = outputs[1][..., 12 * head : 12 * head + 12] / (1 + torch.exp(-(x @ rows.t())))
            torch.testing.assert_close(gated[..., 12 * head : 12 * head + 12], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normalizer", [Softmax(), SSMax(), Relu2()], ids=lambda options: options.name)
def test_the_second_version_subtracts_the_map_of_a_second_query(normalizer: Options):
    """From dense weights of each query, with RoPE and grouped queries; a gate a token and head, no norm."""
    decoder, batch = trained("differential, v2", n_kv_head=2, normalizer=normalizer), Batch(tokens(2), tokens(2), None)
    outputs, attention = [], decoder.blocks[0].attention
    attention.out.register_forward_pre_hook(lambda module, arguments: outputs.append(arguments[0]))
    with torch.no_grad():
        decoder(batch.tokens)
        chunk = next(iter(attention_blocks(decoder, batch, block_size=T)))
        maps = (chunk.weights @ chunk.inputs.v).unflatten(1, (4, 2))
        factor = (chunk.inputs.x @ attention.difference.factor.weight.t()).sigmoid().transpose(1, 2).unsqueeze(-1)
        expected = (maps[:, :, 0] - factor * maps[:, :, 1]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0], expected, atol=1e-5, rtol=1e-4)
    assert flops_per_token(decoder) - flops_per_token(model(n_kv_head=2)) == 3 * 2 * 2 * T * C + 6 * 2 * (C * C + 4 * C)


def test_the_recipe_of_lssar_scales_cosines():
    """Under QK-norm scores are ln D ln n cos(q, k), as in the paper."""
    config = load_config(["recipes/lssar"]).model
    assert config.qk_norm
    q, k = F.normalize(torch.randn(2, 1, 4, T, 12, generator=torch.Generator().manual_seed(0)), dim=-1)
    normalizer, size = make_normalizer(config.normalizer, LayerSpec(4, 12, C, T)), 12**0.5
    scores = normalizer.unmasked_scores(size * q, size * k, AttentionLayout.full(T))
    n = torch.arange(1.0, T + 1).view(T, 1)
    torch.testing.assert_close(scores, math.log(12) * n.log() * (q @ k.mT), atol=1e-5, rtol=1e-5)


def test_exclusive_outputs_are_orthogonal_to_the_tokens_own_values():
    """Of grouped queries, whose first token sees its own value alone and keeps nothing."""
    decoder, plain = trained("exclusive", n_kv_head=2), model(n_kv_head=2)
    plain.load_state_dict(decoder.state_dict())
    outputs, batch = [], Batch(tokens(2), tokens(2), None)
    with torch.no_grad():
        for side in (decoder, plain):
            side.blocks[0].attention.out.register_forward_pre_hook(lambda module, inputs: outputs.append(inputs[0]))
            side(batch.tokens)
        v = next(iter(attention_blocks(decoder, batch, block_size=T))).inputs.v.transpose(1, 2)
    y, plain_y = (x.unflatten(-1, (4, -1)) for x in outputs[:2])
    torch.testing.assert_close(y, plain_y - (plain_y * v).sum(-1, keepdim=True) * v / v.square().sum(-1, keepdim=True))
    assert float((y * v).sum(-1).abs().max()) < 1e-5
    assert float(y[:, 0].abs().max()) < 1e-5


def test_a_gate_of_few_inputs_starts_at_1_and_sees_no_others():
    gated, plain = model(output_gate="head", gate_inputs=12), model()
    with torch.no_grad():
        assert torch.equal(gated.logits(tokens()), plain.logits(tokens()))
    assert gated.blocks[0].attention.gate.weight.shape == (4, 12)


def test_differential_attention_starts_with_drawn_vectors_that_no_optimizer_takes_for_a_matrix():
    decoder, plain = model(differential=True), model()
    vectors = torch.cat([block.attention.difference.lambdas for block in decoder.blocks])
    assert float(vectors.detach().std()) == pytest.approx(0.1, rel=0.3)
    assert torch.equal(
        vectors, torch.cat([block.attention.difference.lambdas for block in model(differential=True).blocks])
    )
    groups = {
        group["name"]: [name for name, _ in group["params"]] for group in parameter_groups(decoder, OptimConfig())
    }
    assert "blocks.0.attention.difference.lambdas" in groups["vectors"]
    assert flops_per_token(decoder) - flops_per_token(plain) == 3 * 2 * T * C  # twice the products with values
    assert len(model(differential=True, normalizer=SSMax()).normalizers()[0].s) == 8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["model.n_layer=1", "model.value_residual=first_layer"],
            r"model\.value_residual = 'first_layer': has no other layer to act in",
        ),
        (
            ["model.head_size=7", "model.position=none", "model.differential=true"],
            "heads of odd size 7, which two maps can't share",
        ),
        (["model.gate_inputs=12"], "model.gate_inputs = 12: has no gate to act in; set output_gate"),
        (["model.output_gate=head", "model.gate_inputs=9999"], "exceeds model.n_embd"),
        (["model.block=gau", "model.n_head=1", "model.exclusive=true"], "no option of a gated attention unit"),
        (["model.logit_softcap=0"], r"model\.logit_softcap = 0: must be > 0"),
    ],
)
def test_what_has_no_effect_is_refused(tiny, options: list[str], expected: str):
    with pytest.raises(ConfigError, match=expected):
        tiny(*options)


def test_logits_are_capped_in_fp32_whatever_autocast_says():
    capped, plain = trained("logit_softcap"), model()
    plain.load_state_dict(capped.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(capped.logits(tokens()), 3 * torch.tanh(plain.logits(tokens()) / 3))
        assert plain.logits(tokens()).abs().max() > 3
        with torch.autocast("cpu", torch.bfloat16):
            assert capped.logits(tokens()).dtype == torch.float32
