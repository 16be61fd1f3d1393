"""The parameters of normalizers in metrics.jsonl."""

import pytest
from folders import last_checkpoint

from lm.model.decoder import Decoder
from lm.runs.checkpoints import load_checkpoint
from lm.runs.folder import read_metrics
from lm.training.step_callbacks import normalizer_parameters
from lm.training.train import train


def decoder(tiny, normalizer: str) -> Decoder:
    config = tiny(f"model.normalizer={normalizer}")
    return Decoder(config.model, 400, config.data.seq_len, seed=1)


def test_values_by_head_are_logged_by_layer_and_head_and_others_as_their_root_mean_square(tiny):
    assert normalizer_parameters(decoder(tiny, "softmax")) == {}
    model = decoder(tiny, "[ssmax, forget]")
    model.normalizers()[0].s.data[1] = 3.5
    model.normalizers()[1].w.data[:] = -2.0
    values = normalizer_parameters(model)
    names = ["s/layer0/head0", "s/layer0/head1", "w/layer1/rms", "b/layer1/head0", "b/layer1/head1"]
    assert list(values) == [f"normalizer/{name}" for name in names]
    assert (values["normalizer/s/layer0/head1"], values["normalizer/w/layer1/rms"]) == (3.5, 2.0)


def test_what_layers_share_is_logged_once(tiny):
    values = normalizer_parameters(decoder(tiny, "p_n"))
    assert [name for name in values if name.startswith("normalizer/p/")] == ["normalizer/p/layer0/rms"]
    assert values["normalizer/p/layer0/rms"] == 1


def test_the_last_line_has_the_parameters_of_the_last_checkpoint(tiny):
    config = tiny("model.normalizer={name: ssmax, bias: true}", "eval.long_context.length_factor=0")
    assert train(config) == 0
    line = [record for record in read_metrics(config.run_folder) if "train/loss" in record][-1]
    weights = load_checkpoint(last_checkpoint(config.run_folder))["state_dict"]
    for name in ("s", "b"):
        for layer in range(2):
            expected = pytest.approx(weights[f"blocks.{layer}.attention.normalizer.{name}"].tolist(), abs=1e-5)
            assert [line[f"normalizer/{name}/layer{layer}/head{head}"] for head in range(2)] == expected
