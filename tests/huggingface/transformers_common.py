"""transformers' common tests of models, for the classes that an export brings; test_export_hf.py runs this file.

LM_TRANSFORMERS names a folder with transformers' source: a clone, or the unpacked source package, which holds
tests/test_modeling_common.py, too. The package parameterized must be installed.

    pip download --no-deps --no-binary transformers transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    LM_TRANSFORMERS=transformers-5.23.0 python -m pytest -m slow tests/huggingface/test_export_hf.py -k common
"""

import os
import sys
import unittest
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch
from test_export_hf import LISTED, PLAIN, gated, shape
from transformers.models.auto import modeling_auto

from lm.attention import catalogue as opt
from lm.config.model_config import LearnedPosition, ModelConfig
from lm.config.normalizers import LayerList
from lm.huggingface.exporting import _lm_config
from lm.huggingface.modeling_lm import LmConfig, LmForCausalLM, LmModel
from lm.model.decoder import Decoder
from lm.model.spec import ModelSpec

VOCABULARY = 99
MODELS = {
    "Plain": shape(opt.Softmax(temperature=0.5), **PLAIN),
    "Modern": shape(opt.SSMax(bias=True)),
    "Layers": shape(LISTED, output_gate="element"),
    "LayerNorm": shape(opt.QASSMax(), norm="layer", bias=True, tied=True),
    "Elementwise": shape(LayerList([opt.Relu2(), opt.Sigmoid(bias=True)]), **PLAIN | {"position": LearnedPosition()}),
    "Definitions": shape(LayerList([opt.Forget(), opt.ASEntmax()])),
    "TwoMaps": shape(opt.SSMax(), differential=True, exclusive=True),
    "Gated": gated(LayerList([opt.Relu2(), opt.SSMax(), opt.Sink()])),
}


class Tester:
    """What transformers' tests ask for a model's configuration and inputs."""

    batch_size, seq_length, is_training, vocab_size = 2, 7, True, VOCABULARY

    def __init__(self, model: ModelConfig):
        decoder, spec = Decoder(model, VOCABULARY, 64, seed=0), ModelSpec(model, VOCABULARY, 64)
        self.fields = _lm_config(SimpleNamespace(spec=spec, decoder=decoder)) | {"auto_map": None}
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = model.n_embd, model.n_layer, model.n_head

    def get_config(self) -> LmConfig:
        """A configuration of the model."""
        return LmConfig(**self.fields, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self) -> tuple[LmConfig, dict[str, torch.Tensor]]:
        """A configuration, and arguments of the model's forward pass."""
        tokens = torch.randint(3, VOCABULARY, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


sys.path.insert(0, os.environ["LM_TRANSFORMERS"])
# other tests, which the source package lacks
for name, mixin in (
    ("tests.exporters.test_export", "ExportTesterMixin"),
    ("tests.generation.test_utils", "GenerationTesterMixin"),
):
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], mixin, type(mixin, (), {}))
from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

# Labels are made for classes that transformers knows by name.
modeling_auto.MODEL_MAPPING_NAMES["lm_decoder"] = LmModel.__name__
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["lm_decoder"] = LmForCausalLM.__name__
for kind, deep_model in MODELS.items():
    model = replace(deep_model, n_layer=2)
    attributes = {
        "all_model_classes": (LmModel, LmForCausalLM),
        "setUp": lambda self, model=model: setattr(self, "model_tester", Tester(model)),
    }
    bases = (ModelTesterMixin, GenerationTesterMixin, unittest.TestCase)
    globals()[f"Test{kind}"] = type(f"Test{kind}", bases, attributes)
