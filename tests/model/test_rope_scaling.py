"""RoPE rescaled in training: the same frequencies as in transformers, part of the model, and resolved with inference
settings.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm.config.eval_config import (
    FAST_PERIODS,
    NO_SCALING,
    NTK,
    SLOW_PERIODS,
    InferenceSetting,
    InferenceYarn,
    Interpolation,
    RopeScaling,
    ThetaFactor,
)
from lm.config.model_config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoPosition,
    Rope,
    TrainedScaling,
    TrainedYarn,
)
from lm.data.batches import Batch
from lm.errors import ConfigError
from lm.huggingface.fields import rope_parameters_value
from lm.model.attention_stream import attention_blocks
from lm.model.decoder import Decoder
from lm.model.rope import frequencies, rope_rotation
from lm.model.swapped import with_inference_setting

SCALINGS = [
    LinearScaling(factor=3.0),
    Llama3Scaling(factor=6.0, original=200),
    TrainedYarn(factor=4.0, original=300),
    TrainedYarn(factor=5.0, original=300, attention_factor=1.3, whole_pairs=False),
    TrainedYarn(factor=0.5, original=300),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda value: value.name)
@pytest.mark.parametrize("theta", [3e3, 1e6])
def test_frequencies_are_those_of_transformers(scaling: TrainedScaling, theta: float):
    rope = Rope(theta=theta, scaling=scaling)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=900, rope_parameters=rope_parameters_value(rope)
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling.name](config, torch.device("cpu"))
    actual = frequencies(64, rope, NO_SCALING, 900, 900)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)
    assert not torch.allclose(actual, frequencies(64, Rope(theta=theta), NO_SCALING, 900, 900))
    cos, sin = rope_rotation(torch.arange(50), 64, rope)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, amplitude**2))


INFERENCE_SCALINGS = [
    NO_SCALING, ThetaFactor(50.0), ThetaFactor(0.1), NTK(6.0), NTK(), Interpolation(2.0), Interpolation(),
    InferenceYarn(4.0), InferenceYarn(),
]  # fmt: skip


@pytest.mark.parametrize("inference", INFERENCE_SCALINGS, ids=lambda value: value.name)
@pytest.mark.parametrize("scaling", [TrainedScaling(), *SCALINGS], ids=lambda value: value.name)
def test_an_inference_setting_rescales_the_model_as_it_was_trained(scaling: TrainedScaling, inference: RopeScaling):
    """Another base is the base of a model that transformers makes with it; other settings rescale the frequencies of
    the model as it is."""
    head_size, trained_length, length = 64, 900, 2700
    rope, s = Rope(theta=1e4, scaling=scaling), getattr(inference, "factor", None) or length / trained_length
    base_factor = {"theta": s, "ntk": s ** (head_size / (head_size - 2))}.get(inference.name, 1.0)
    fields = rope_parameters_value(replace(rope, theta=rope.theta * base_factor))
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=trained_length, rope_parameters=fields
    )
    plain = 1 / (fields["rope_theta"] ** (torch.arange(0, head_size, 2) / head_size))
    scaled = scaling.name != "none"
    expected = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, torch.device("cpu"))[0] if scaled else plain
    if inference.name == "interpolation":
        expected = expected / s
    elif inference.name == "yarn":
        periods = trained_length * expected / (2 * math.pi)
        kept = ((periods - SLOW_PERIODS) / (FAST_PERIODS - SLOW_PERIODS)).clamp(0, 1)
        expected = expected * kept + expected / s * (1 - kept)
    actual = frequencies(head_size, rope, inference, trained_length, length)
    torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=0)


@torch.no_grad()
def test_listed_layers_rotate_and_the_others_have_no_positions():
    """Queries and keys of each layer are those of a model that rotates in all layers, or in none. YaRN's temperature
    goes with rotation.
    """
    tokens = torch.randint(60, (1, 30), generator=torch.Generator().manual_seed(0))
    rotates = [True, False, False]
    setting = InferenceSetting(InferenceYarn(4.0))
    mixed = with_inference_setting(
        Decoder(ModelConfig(n_layer=4, n_embd=48, position=Rope(layers=rotates)), 60, 16), setting
    )
    for layer, block in enumerate(attention_blocks(mixed, Batch(tokens, tokens, None), block_size=30)):
        position = Rope() if rotates[layer % 3] else NoPosition()
        config = ModelConfig(n_layer=1, n_embd=48, position=position)
        single = Decoder(config, 60, 16)
        single = with_inference_setting(single, setting) if position.rotates else single
        attention = single.blocks[0].attention
        attention.load_state_dict(mixed.blocks[layer].attention.state_dict())
        _, context = single.embed(tokens)
        captured = []
        attention(block.inputs.x, replace(context, captured_inputs=captured))
        torch.testing.assert_close(captured[0].q, block.inputs.q)
        torch.testing.assert_close(captured[0].k, block.inputs.k)


def test_different_settings_have_different_labels():
    settings = [InferenceSetting(ThetaFactor(factor)) for factor in (50.0, 1e6, 100000.1, 100000.2)]
    assert [setting.label for setting in settings] == [
        "theta x 50",
        "theta x 1e+06",
        "theta x 100000.1",
        "theta x 100000.2",
    ]
    assert InferenceSetting(InferenceYarn(factor=32.00001, temperature=False)).label == "yarn 32.00001, temperature 0"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("[true]", r"model\.position\.layers = \[true\]: is the same in all layers; drop it"),
        ("[false, false]", r"is the same in all layers; set model\.position=none"),
        ("[true, false, false, false, true, true, false]", r"lists more than the 2 layers of model\.n_layer"),
        ("[1.5]", r"model\.position\.layers"),
    ],
)
def test_a_list_of_layers_that_says_nothing_or_too_much_is_refused(tiny, layers: str, expected: str):
    with pytest.raises(ConfigError, match=expected):
        tiny("model.n_layer=2", f"model.position.layers={layers}")
