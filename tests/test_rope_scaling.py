"""RoPE rescaled in training: the same frequencies as in transformers, part of the model, and resolved with inference settings."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm.config.inference_config import AsTrained, Interpolation
from lm.config.model_config import LinearScaling, Llama3Scaling, Rope, TrainedScaling, YarnScaling
from lm.errors import ConfigError
from lm.huggingface.fields import write_rope
from lm.model.rope import frequencies, rope_rotation

SCALINGS = [
    LinearScaling(factor=3.0),
    Llama3Scaling(factor=6.0, slow=1.5, fast=5.0, original=200),
    YarnScaling(factor=4.0, original=300),
    YarnScaling(factor=5.0, slow=2.0, fast=20.0, original=300, attention_factor=1.3, whole_pairs=False),
    YarnScaling(factor=0.5, original=300),
    YarnScaling(factor=4.0, fast=1.01, original=300),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: one.name)
@pytest.mark.parametrize("theta", [3e3, 1e6])
def test_frequencies_are_those_of_transformers(scaling: TrainedScaling, theta: float):
    rope = Rope(theta=theta, scaling=scaling)
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=900, rope_parameters=write_rope(rope))
    theirs, amplitude = ROPE_INIT_FUNCTIONS[scaling.name](config, torch.device("cpu"))
    ours = frequencies(64, rope, AsTrained(), 900, 900)
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)
    assert scaling.amplitude == pytest.approx(amplitude)
    assert not torch.allclose(ours, frequencies(64, Rope(theta=theta), AsTrained(), 900, 900))
    cos, sin = rope_rotation(torch.arange(50), 64, rope)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, amplitude**2))


def test_an_inference_setting_acts_on_the_frequencies_of_the_model():
    rope = Rope(scaling=LinearScaling(factor=4.0))
    assert torch.equal(frequencies(64, rope, Interpolation(2.0), 64, 512), frequencies(64, Rope(), Interpolation(8.0), 64, 512))


def test_the_bounds_of_the_transition_must_be_in_order(tiny):
    with pytest.raises(ConfigError, match=r"model\.position\.scaling\.fast = 1\.0: is not above slow = 1"):
        tiny("model.position.scaling={name: llama3, fast: 1.0}")
    assert tiny("model.position.scaling=yarn").model.position.label == "rope theta 10000, yarn"
    assert math.isclose(YarnScaling().amplitude, 0.1 * math.log(4) + 1)
